"""A region of a kernel: operations that are evaluated box by box with NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...ir.expr import RANDOM, DType, Expr, View, nodes, substitute, view_of, with_view
from ...ir.regions import Box, as_affine
from . import llvm_code, llvm_map, philox, tuning
from .accumulate import ALL_POINTS, Array, State, broadcast_view
from .array_memory import BufferMemory, buffer_memory
from .llvm_text import OPEN
from .node_calls import (
    GUARDED,
    draw_numbers,
    evaluate_where,
    index_numbers,
    make_call,
    take_elements,
    varying_shape,
)

if TYPE_CHECKING:
    from .evaluate import _EvaluationPlan

#: The first and the last element that an array has, counted from its first one.
Bounds = Mapping[int, tuple[int, int]]
#: Number of the first buffer of such numbers, among arrays; the others come before.
BUFFERS = -1_000_000


# ---- regions: boxes in which every view is inside its array


def _place(node: Expr, axes: int) -> tuple[View, list[Expr]] | None:
    """Return evenly spaced indices as a View, and terms added to it; None for other indices."""
    if node.op == "add" and node.dtype == np.int64 and node.args[1].op == OPEN:
        found = _place(node.args[0], axes)
        return None if found is None else (found[0], [*found[1], node.args[1]])
    view = as_affine(node, axes)
    return None if view is None or not any(view.strides) else (view, [])


# ---- one region as calls


class _RegionStep(NamedTuple):
    call: Callable[..., Any]
    args: tuple[int, ...]
    slot: int
    placed: bool  # it is called with the run, and the block's origin and shape, too
    dead: tuple[int, ...]  # slots that nobody reads any more


@dataclass(slots=True)
class _RegionLeaf:
    slot: int
    array: int
    dtype: DType
    view: View
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    varies: tuple[bool, ...]


class Region:
    """The expressions of one region, over its collapsed axes, and how they are evaluated."""

    def __init__(self, box: Box, roots: list[Expr], views: list[View], reduced: frozenset[int],
                 block_bytes: int):  # fmt: skip
        """Collapse axes along which the leaves and `views` (of outputs, say) are evenly strided."""
        every = [_view_from_corner(v, box) for v in views]
        leaves = [(n, v) for n in nodes(roots) if (v := view_of(n)) is not None]
        every += [_view_from_corner(v, box) for _, v in leaves]
        lengths = [stop - start for start, stop in box]
        self.shape, self.reduced, every = _collapse_axes(lengths, every, reduced)
        self.stays = tuple([k for k in range(len(self.shape)) if k not in self.reduced])
        self.kept = tuple([self.shape[k] for k in self.stays])
        self.views = every[: len(views)]
        moved = zip(leaves, every[len(views) :], strict=True)
        self.exprs = substitute(roots, {id(n): with_view(n, v) for (n, _), v in moved})
        self._number(self.exprs)
        self.block_bytes, self.block = block_bytes, self.choose_block(block_bytes)
        self.count = math.prod(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))

    def _number(self, roots: list[Expr]) -> None:
        """Give each distinct node a slot; nodes that are no leaves become calls."""
        axes = len(self.shape)
        self.dtypes: list[DType] = []
        self.varies: list[tuple[bool, ...]] = []  # along which axes a slot's value may differ
        self.leaves: list[_RegionLeaf] = []
        self.constants: list[tuple[int, Any]] = []
        self.open: list[tuple[int, int]] = []  # a slot, and which of the given constants it has
        once: list[tuple[Callable[..., Any], tuple[int, ...], int, bool]] = []
        each: list[tuple[Callable[..., Any], tuple[int, ...], int, bool]] = []
        numbers: dict[Any, int] = {}
        slots: dict[int, int] = {}
        nothing, everything = (False,) * axes, (True,) * axes

        roots = _find_clips(roots)
        for node in _evaluated_nodes(roots):
            below = node.args[:1] if node.op == GUARDED else node.args
            args = tuple([slots[id(a)] for a in below])
            words = (node.op, node.dtype, node.data, args, node if node.op == GUARDED else None)
            slot = slots[id(node)] = numbers.setdefault(words, len(numbers))
            if slot < len(self.dtypes):
                continue
            self.dtypes.append(node.dtype)
            varies = tuple([any(self.varies[a][k] for a in args) for k in range(axes)])
            if node.op == "constant":
                self.constants.append((slot, np.frombuffer(node.data, node.dtype).reshape(())))
            elif node.op == OPEN:
                self.open.append((slot, node.data))
            elif node.op == "input":
                n, view = node.data
                varies = tuple([s != 0 for s in view.strides])
                shape = varying_shape(self.shape, varies)
                strides = tuple([s * node.dtype.itemsize for s in view.strides])
                self.leaves.append(_RegionLeaf(slot, n, node.dtype, view, shape, strides, varies))
            elif node.op == "index":
                varies = tuple([s != 0 for s in node.data.strides])
                if varies == nothing:
                    value = np.asarray(node.data.offset, np.int64)
                    self.constants.append((slot, value))
                else:
                    each.append((partial(index_numbers, node.data), (), slot, True))
            elif node.op == "taken":
                n, view = node.args[0].data
                each.append((partial(take_elements, n, view), args[1:], slot, True))
                varies = varies if any(varies) else everything
            elif node.op == GUARDED:
                varies = everything
                each.append((partial(evaluate_where, node), args, slot, True))
            elif node.op in RANDOM and (place := _place(node.args[0], axes)):
                view, shifts = place
                varies = tuple([s != 0 for s in view.strides])
                draw = partial(draw_numbers, node.op, node.data, node.dtype, view)
                each.append((draw, tuple([slots[id(x)] for x in shifts]), slot, True))
            else:
                along = tuple([self.varies[a][-1] for a in args])
                call = make_call(node, along if any(along) and not all(along) else None)
                (each if any(varies) else once).append((call, args, slot, False))
            self.varies.append(varies)
        self.roots = [slots[id(r)] for r in roots]
        self.once = [_RegionStep(*s, ()) for s in once]
        self.steps = self._last_uses(each)
        self._registers()

    def _last_uses(self, calls: list[Any]) -> list[_RegionStep]:
        """Drop calls whose values are not read, and note when each value is read last."""
        needed = set(self.roots)
        steps: list[_RegionStep] = []
        lasting = {s.slot for s in self.once} | {s for s, _ in self.constants}
        lasting |= {leaf.slot for leaf in self.leaves} | {s for s, _ in self.open} | needed
        for call, args, slot, placed in reversed(calls):
            if slot in needed:
                dead = tuple([a for a in dict.fromkeys(args) if a not in needed | lasting])
                needed.update(args)
                steps.append(_RegionStep(call, args, slot, placed, dead))
        return steps[::-1]

    def _registers(self) -> None:
        """Give each slot a buffer; buffers that were just read, and are cached, come first."""
        self.register: dict[int, int] = {}
        free: list[int] = []
        count = 0
        for step in self.steps:
            home = None
            if isinstance(step.call, np.ufunc):
                for a in step.dead:
                    same = self.dtypes[a] == self.dtypes[step.slot]
                    if same and self.varies[a] == self.varies[step.slot] and a in self.register:
                        home = self.register[a]
                        break
            if home is None:
                home = free.pop() if free else count
                count = max(count, home + 1)
            self.register[step.slot] = home
            free += [self.register[a] for a in step.dead if self.register[a] != home]
        self.registers = count

    def choose_block(self, block_bytes: int) -> tuple[int, ...]:
        """Return the shape of a block: long along contiguous axes, and within `block_bytes`."""
        axes = len(self.shape)
        widest = max([d.itemsize for d in self.dtypes], default=1)
        if not self.steps:  # no temporaries
            block_bytes *= 8
        room = max(block_bytes // widest, 1)
        lengths = [1] * axes
        fast = {axes - 1}  # axes along which some view goes through memory
        views = [leaf.view for leaf in self.leaves]
        for view in views:
            steps = [(abs(s), -k) for k, s in enumerate(view.strides) if s]
            if steps:
                fast.add(-min(steps)[1])
        order = sorted(fast, reverse=True)
        rest = list(range(axes - 1, -1, -1))
        for n, k in enumerate(order):
            share = round(room ** (1 / (len(order) - n)))
            if len(order) == 1 and self.reduced and k not in self.reduced:
                share = min(share, 4096)  # wider is no faster, and rows are to be added up
                rest = [*rest[1:], k]
            lengths[k] = max(1, min(self.shape[k], share))
            room //= lengths[k]
        for k in rest:
            more = min(self.shape[k], lengths[k] * max(room, 1))
            room = max(room * lengths[k] // max(more, 1), 1)
            lengths[k] = more
        # pieces of about equal length
        return tuple(
            [-(-n // max(-(-n // b), 1)) for n, b in zip(self.shape, lengths, strict=True)]
        )

    # ---- evaluation

    @cached_property
    def drawn_numbers(self) -> DrawnNumbers | None:
        """How machine code reads drawn random numbers; None where this does not pay."""
        if not llvm_map.is_worth_compiling(self.shape):
            return None
        found = DrawnNumbers(self)
        return found if found.draws and len(self.steps) > len(found.draws) else None

    @cached_property
    def code(self) -> llvm_code.CompiledLoop | None:
        """Machine code that writes the region's values; None where this does not pay."""
        if not llvm_map.is_worth_compiling(self.shape) or not self.steps:
            return None
        return llvm_map.map_loop(self.shape, self.exprs, self.views)

    def write(
        self,
        memory: dict[int, BufferMemory],
        outs: Sequence[Array],
        given: Sequence[Array],
        fresh: bool,
    ) -> None:
        """Evaluate the region, and write into arrays of the whole space.

        `fresh` says that these are as planned, and that no one else has them.
        """
        if fresh and self.code is not None:
            flats = [buffer_memory(out) for out in outs]
            places = [
                llvm_code.address(flat) + (first + view.offset) * flat.itemsize
                for (flat, first), view in zip(flats, self.views, strict=True)
            ]
            self.code(memory, given, places)
            return
        if fresh and self.drawn_numbers is not None and self.drawn_numbers.has_writing_code:
            self.drawn_numbers.write(memory, outs, given)
            return
        targets = []
        for out, view in zip(outs, self.views, strict=True):
            item = out.itemsize
            strides = tuple([s * item for s in view.strides])
            if not view.offset and strides == out.strides and self.shape == out.shape:
                targets.append(out)
                continue
            flat, first = buffer_memory(out)
            start = (first + view.offset) * item
            targets.append(np.ndarray(self.shape, out.dtype, flat, start, strides))
        run = RegionRun(self, memory, given)
        whole = self.count == 1
        for origin, lengths in block_boxes(self.shape, self.block, range(len(self.shape))):
            if whole:
                run.block(origin, lengths, targets)
            else:
                where = tuple([slice(o, o + n) for o, n in zip(origin, lengths, strict=True)])
                run.block(origin, lengths, [t[where] for t in targets])


class DrawCall(NamedTuple):
    """Random numbers whose positions go evenly."""

    op: str
    key: int
    dtype: DType
    view: View
    shifts: tuple[int, ...]  # which of the given numbers are added to the positions


class DrawnNumbers:
    """A region whose random numbers are drawn into buffers, block by block.

    Machine code reads the buffers and evaluates all operations of the region in one pass.
    """

    def __init__(self, region: Region):
        self.region = region
        self.block = region.choose_block(min(region.block_bytes, tuning.DRAWN_BYTES))
        self.draws: list[DrawCall] = []
        self.numbers: dict[int, int] = {}  # of nodes, by their ids
        for node in nodes(region.exprs):
            if node.op not in RANDOM:
                continue
            place = _place(node.args[0], len(region.shape))
            if place is not None and all(s.op == OPEN for s in place[1]):
                view, shifts = place
                draw = DrawCall(
                    node.op, node.data, node.dtype, view, tuple([s.data for s in shifts])
                )
                if draw not in self.draws:
                    self.draws.append(draw)
                self.numbers[id(node)] = self.draws.index(draw)
        self._writing: dict[tuple[int, ...], llvm_code.CompiledLoop | None] = {}
        self._reducing: dict[
            tuple[int, ...], tuple[llvm_code.CompiledLoop | None, Sequence[int]]
        ] = {}

    def room(self) -> list[Array]:
        """Return new buffers for the random numbers of a block."""
        return [np.empty(self._shape(d, self.block), d.dtype).reshape(-1) for d in self.draws]

    def _shape(self, draw: DrawCall, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return varying_shape(lengths, tuple([s != 0 for s in draw.view.strides]))

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        return block_boxes(self.region.shape, self.block, range(len(self.block)))

    def exprs(self, lengths: tuple[int, ...]) -> list[Expr]:
        """Return the region's expressions, which read buffers of a block of these lengths."""
        read = {}
        for node in nodes(self.region.exprs):
            if id(node) in self.numbers:
                n = self.numbers[id(node)]
                view = self._view(self.draws[n], lengths)
                read[id(node)] = Expr("input", (), node.dtype, (BUFFERS - n, view))
        return substitute(self.region.exprs, read)

    def _view(self, draw: DrawCall, lengths: tuple[int, ...]) -> View:
        steps = View.contiguous(self._shape(draw, lengths)).strides
        return View(0, tuple([s * (t != 0) for s, t in zip(steps, draw.view.strides, strict=True)]))

    def memory(
        self, memory: Mapping[int, BufferMemory], given: Sequence[Array], room: list[Array],
        origin: tuple[int, ...], lengths: tuple[int, ...],
    ) -> dict[int, BufferMemory]:  # fmt: skip
        """Draw a block's random numbers; return all arrays as if at the region's origin."""
        out = dict(memory)
        box = make_box(origin, lengths)
        for n, draw in enumerate(self.draws):
            first = draw.view.offset + sum([int(given[k]) for k in draw.shifts])
            buffer: Array = np.ndarray(self._shape(draw, lengths), draw.dtype, room[n])
            philox.fill(
                draw.op, draw.key, _view_from_corner(View(first, draw.view.strides), box), buffer
            )
            before = _view_from_corner(self._view(draw, lengths), box).offset
            out[BUFFERS - n] = BufferMemory(room[n], -before)
        return out

    def code(self, lengths: tuple[int, ...]) -> llvm_code.CompiledLoop | None:
        """Return machine code that writes a block of these lengths; None if there is none."""
        if lengths not in self._writing:
            exprs = self.exprs(lengths)
            self._writing[lengths] = llvm_map.map_loop(lengths, exprs, self.region.views)
        return self._writing[lengths]

    def reducer(
        self, plan: _EvaluationPlan, lengths: tuple[int, ...]
    ) -> tuple[llvm_code.CompiledLoop | None, Sequence[int]]:
        """Return machine code that reduces a block of these lengths, and the order of its axes."""
        if lengths not in self._reducing:
            stays = self.region.stays
            kept = tuple([lengths[k] for k in stays])
            target = broadcast_view(View.contiguous(kept), stays, len(lengths))
            self._reducing[lengths] = plan.reducer(
                lengths, self.exprs(lengths), target, self.region, math.prod(kept)
            )
        return self._reducing[lengths]

    @cached_property
    def has_writing_code(self) -> bool:
        """Whether there is machine code to write each block."""
        return all(self.code(lengths) is not None for lengths in {n for _, n in self.boxes()})

    def has_reducing_code(self, plan: _EvaluationPlan) -> bool:
        """Whether there is machine code to reduce each block for a plan."""
        return all(self.reducer(plan, n)[0] is not None for n in {n for _, n in self.boxes()})

    def write(
        self, memory: Mapping[int, BufferMemory], outs: Sequence[Array], given: Sequence[Array]
    ) -> None:
        flats, room = [buffer_memory(out) for out in outs], self.room()
        for origin, lengths in self.boxes():
            places = [
                llvm_code.address(flat)
                + (first + _view_from_corner(view, make_box(origin, lengths)).offset)
                * flat.itemsize
                for (flat, first), view in zip(flats, self.region.views, strict=True)
            ]
            code = self.code(lengths)
            assert code is not None
            here = self.memory(memory, given, room, origin, lengths)
            code.call_at(origin, here, given, places)

    def states(
        self, plan: _EvaluationPlan, memory: Mapping[int, BufferMemory], given: Sequence[Array],
        room: list[Array], origin: tuple[int, ...], lengths: tuple[int, ...],
    ) -> list[State]:  # fmt: skip
        """Draw and reduce a block by machine code; return its states."""
        code, order = self.reducer(plan, lengths)
        assert code is not None
        here = self.memory(memory, given, room, origin, lengths)
        shape = tuple([lengths[k] for k in self.region.stays])
        return plan.states(code, shape, here, given, [origin[k] for k in order])


def make_box(origin: Sequence[int], lengths: Sequence[int]) -> Box:
    return tuple([(o, o + n) for o, n in zip(origin, lengths, strict=True)])


class RegionRun:
    """One evaluation of a region: its inputs, and buffers."""

    def __init__(self, region: Region, memory: dict[int, BufferMemory], given: Sequence[Array]):
        self.region, self.memory, self.given = region, memory, given
        values: list[Any] = [None] * len(region.dtypes)
        for slot, value in region.constants:
            values[slot] = value
        for slot, n in region.open:
            values[slot] = given[n]
        self.leaves: list[tuple[int, Array, tuple[bool, ...]]] = []
        for leaf in region.leaves:
            flat, first = memory[leaf.array]
            buffer = flat.view(np.int64) if flat.dtype.kind in "mM" else flat
            start = (first + leaf.view.offset) * leaf.dtype.itemsize
            array: Array = np.ndarray(leaf.shape, leaf.dtype, buffer, start, leaf.strides)
            values[leaf.slot] = array
            if region.count > 1 and any(leaf.varies):
                self.leaves.append((leaf.slot, array, leaf.varies))
        for step in region.once:
            values[step.slot] = step.call(*[values[a] for a in step.args])
        self.values = values
        self.buffers: list[Array] = []
        self.bound: dict[tuple[int, ...], list[Any]] = {}

    def _outs(self, lengths: tuple[int, ...]) -> list[Any]:
        """Return the array into which each slot of a block of this shape is written."""
        outs = self.bound.get(lengths)
        if outs is None:
            region = self.region
            outs = [None] * len(region.dtypes)
            if region.count > 1:
                if not self.buffers:
                    self.buffers = self._buffers()
                for slot, home in region.register.items():
                    shape = varying_shape(lengths, region.varies[slot])
                    dtype = region.dtypes[slot]
                    buffer = self.buffers[home]
                    if dtype.kind in "mM":
                        buffer = buffer.view(np.int64)
                    outs[slot] = np.ndarray(shape, dtype, buffer)
            self.bound[lengths] = outs
        return outs

    def _buffers(self) -> list[Array]:
        region = self.region
        sizes = [0] * region.registers
        for slot, home in region.register.items():
            items = math.prod(varying_shape(region.block, region.varies[slot]))
            sizes[home] = max(sizes[home], items * region.dtypes[slot].itemsize)
        return [np.empty(-(-n // 8) * 8, np.uint8) for n in sizes]

    def block(
        self, origin: tuple[int, ...], lengths: tuple[int, ...], targets: Sequence[Array] = ()
    ) -> list[Any]:
        """Evaluate one block into `targets`; without these, return the roots' values."""
        region, values = self.region, self.values
        if self.leaves:
            slices = [slice(o, o + n) for o, n in zip(origin, lengths, strict=True)]
            for slot, array, varies in self.leaves:
                if False in varies:
                    where = [s if v else ALL_POINTS for s, v in zip(slices, varies, strict=True)]
                    values[slot] = array[tuple(where)]
                else:
                    values[slot] = array[tuple(slices)]
        outs = self._outs(lengths)
        straight: set[int] = set()
        if targets:
            outs = outs.copy()
            for slot, target in zip(region.roots, targets, strict=True):
                if slot in region.register and False not in region.varies[slot]:
                    outs[slot] = target
                    straight.add(id(target))
        for call, args, slot, placed, dead in region.steps:
            words = [values[a] for a in args]
            if placed:
                values[slot] = call(self, origin, lengths, *words, out=outs[slot])
            else:
                values[slot] = call(*words, out=outs[slot])
            for a in dead:
                values[a] = None
        for slot, target in zip(region.roots, targets, strict=False):
            if id(target) not in straight or values[slot] is not target:
                target[...] = values[slot]
        return [values[slot] for slot in region.roots]


def _view_from_corner(view: View, box: Box) -> View:
    """Return a view whose origin is the corner of a box."""
    shift = sum(s * start for s, (start, _) in zip(view.strides, box, strict=True))
    return View(view.offset + shift, view.strides)


def _collapse_axes(
    shape: Sequence[int], views: list[View], reduced: frozenset[int]
) -> tuple[tuple[int, ...], frozenset[int], list[View]]:
    """Merge neighbouring axes that every view steps through evenly.

    The points and their order stay the same.

    >>> _collapse_axes((4, 1, 3), [View(7, (6, 5, 2))], frozenset())
    ((12,), frozenset(), [View(offset=7, strides=(2,))])
    """
    axes = [k for k, n in enumerate(shape) if n != 1]
    groups: list[list[int]] = []
    for k in axes:
        if groups:
            j = groups[-1][-1]
            even = all(v.strides[j] == v.strides[k] * shape[k] for v in views)
            if even and (j in reduced) == (k in reduced):
                groups[-1].append(k)
                continue
        groups.append([k])
    if not groups:  # one point: an axis spares its readers a case
        return (1,), frozenset(), [View(v.offset, (0,)) for v in views]
    lengths = tuple([math.prod([shape[k] for k in g]) for g in groups])
    over = frozenset([n for n, g in enumerate(groups) if g[0] in reduced])
    new = [View(v.offset, tuple([v.strides[g[-1]] for g in groups])) for v in views]
    return lengths, over, new


def _evaluated_nodes(roots: list[Expr]) -> list[Expr]:
    """Return the nodes below `roots`, except those in the branches of guarded nodes."""
    return nodes(roots, lambda n: n.args[:1] if n.op == GUARDED else n.args)


def block_boxes(
    shape: tuple[int, ...], block: tuple[int, ...], axes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield origins and lengths of the blocks along some axes, in C order."""
    starts = [range(0, shape[k], block[k]) if k in axes else (0,) for k in range(len(shape))]
    for origin in product(*starts):
        yield origin, tuple(
            [min(b, n - o) for o, n, b in zip(origin, shape, block, strict=True)]
        )  # fmt: skip


def _find_clips(roots: list[Expr]) -> list[Expr]:
    """Replace choices between a value and two bounds by `clip`, ten times as fast."""
    new: dict[int, Expr] = {}
    for node in _evaluated_nodes(roots):
        args = tuple([new.get(id(a), a) for a in node.args])
        same = all(a is b for a, b in zip(args, node.args, strict=True))
        here = node if same else Expr(node.op, args, node.dtype, node.data)
        if (below := _clipped_bound(here, "greater")) and (
            above := _clipped_bound(below[0], "less")
        ):
            here = Expr("clip", (above[0], above[1], below[1]), node.dtype)
        new[id(node)] = here
    return [new[id(r)] for r in roots]


def _clipped_bound(node: Expr, compare: str) -> tuple[Expr, Expr] | None:
    """Return the value and the bound of a `where` that limits a value; None for others."""
    if node.op != "where":
        return None
    over, bound, x = node.args
    plain = over.op == compare and bound.op == "constant" and node.dtype.kind in "iuf"
    return (x, bound) if plain and over.args[0] is x and over.args[1] == bound else None
