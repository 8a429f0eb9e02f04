"""The NumPy reading of a kernel: its tree is evaluated in blocks that stay in the cache, or, where
it is large, by machine code (`host_code`).

No array of the size of an operand is made but the outputs. A block is a box of the iteration space;
each node is one call of a ufunc on it. Where views reach outside their arrays for points that a
`where` does not choose, the space is cut into regions in which it is known what is chosen; where
that is not possible, only the chosen points are read. The same cuts keep calls to the points that
are meant for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from . import host_code, philox
from .bins import Bins
from .expr import (
    RANDOM,
    SCANS,
    DType,
    Expr,
    Kernel,
    Reduction,
    View,
    nodes,
    rebuilt,
    substituted,
    view_of,
    with_view,
)
from .host_code import OPEN
from .regions import Box, affine, cut_for, settled
from .scans import BOTH, carried_as

Array = np.ndarray[Any, Any]
#: The first and the last element that an array has, counted from its first one.
Bounds = Mapping[int, tuple[int, int]]

#: Bytes of one temporary: a few of them fit the cache that cores share. Smaller ones, which fit a
#: core's own, are no faster where one thread computes, and take up to four times where two do: each
#: of NumPy's calls takes the interpreter's lock again. Measured with 2 cores and with 16.
BLOCK_BYTES = 4 * 1024 * 1024
#: Points that are added up one after the other, as NumPy does it along all axes but the last. Rows
#: of no more are reduced beside each other: measured, longer ones are faster one by one.
FEW_POINTS = 16
#: A region of fewer than one in so many of a kernel's points is not worth code of its own.
SMALL_PART = 64
#: Functions of numbers that have a bug in NumPy; see `_packed`.
_PACKED = frozenset({"isfinite", "isinf", "isnan", "signbit", "negative"})
#: Bytes of numbers that are drawn for machine code at once: they stay in a core's own cache.
DRAWN_BYTES = 2**20
#: Number of the first buffer of such numbers, among arrays; the others come before.
BUFFERS = -1_000_000
#: What no ufunc computes.
STRUCTURAL = frozenset({"taken", "cast", "where", "real", "imag", "complex", "bin"})
#: A `where` of which only the chosen points may be read; only inside this module.
GUARDED = "guarded"


def evaluate(
    kernel: Kernel,
    arrays: Mapping[int, Array] | Sequence[Array],
    block_bytes: int = BLOCK_BYTES,
    words: Mapping[Expr, Expr] | None = None,
    out: Array | None = None,
) -> tuple[Array, ...]:
    """The outputs of a kernel, C-contiguous and of shape `kernel.kept`. `words` has other constants
    for some of its constants: that costs much less than another kernel. `out` is the array, of any
    strides, for the output of a kernel that has one.

    >>> from gpuscheduler.expr import Expr, constant, source
    >>> x = source(0, (5,), "f8")
    >>> evaluate(Kernel((5,), (Expr("add", (x, constant(1, "f8")), "f8"),)), [np.arange(5.0)])
    (array([1., 2., 3., 4., 5.]),)
    """
    if kernel.scans:
        return _scanned(kernel, arrays, block_bytes, words, out)
    every = {n: arrays[n] for n in kernel.inputs}
    bounds = {n: _extent(a) for n, a in every.items()}
    facts = _facts(kernel)
    outside = any(low < bounds[n][0] or high > bounds[n][1] for n, low, high in facts.reach)
    known = tuple(bounds.items()) if outside or facts.chooses else None
    strides = None
    if out is not None and not out.flags.c_contiguous:
        strides = tuple([s // out.itemsize for s in out.strides])
    where = known, block_bytes, tuple(words) if words else (), strides
    plan = facts.plans.get(where)
    if plan is None:
        plan = facts.plans[where] = _plan(kernel, *where)
    given = [np.asarray(w.value) for w in words.values()] if words else []
    memory = {n: _memory(a) for n, a in every.items()}
    for n, dtype in plan.dtypes:
        if memory[n].flat.dtype != dtype:
            raise TypeError(f"array {n} is {memory[n].flat.dtype}, the kernel reads {dtype}")
    if plan.reductions:
        results = _reduced(plan, memory, given)
        if out is None and plan.direct is not None:
            return tuple([np.asarray(results[n], order="C") for n in plan.direct])
        for n, result in enumerate(results):
            memory[-1 - n] = _Memory(result.reshape(-1), 0)
    outs = [np.empty(kernel.kept, o.dtype) for o in kernel.outputs] if out is None else [out]
    # machine code writes to memory, whatever is there
    fresh = out is None or not (
        out.dtype != kernel.outputs[0].dtype
        or out.shape != kernel.kept
        or any(np.may_share_memory(out, a) for a in every.values())
    )
    for part in plan.outputs:
        part.write(memory, outs, given, fresh)
    return tuple(outs)


def _scanned(
    kernel: Kernel,
    arrays: Mapping[int, Array] | Sequence[Array],
    block_bytes: int,
    words: Mapping[Expr, Expr] | None,
    out: Array | None,
) -> tuple[Array, ...]:
    """The outputs of a kernel of scans: what it scans, the scans, and what is made of them."""
    args, outputs, first = _around_scans(kernel)
    values = evaluate(args, arrays, block_bytes, words)
    every = {n: arrays[n] for n in kernel.inputs}
    for n, (scan, value) in enumerate(zip(kernel.reductions, values, strict=True)):
        join = getattr(np, BOTH[SCANS[scan.op]])
        found = join.accumulate(value, kernel.axes[0], carried_as(scan))
        every[first + n] = found.astype(scan.dtypes[0], copy=False)
    return evaluate(outputs, every, block_bytes, words, out)


@lru_cache(1024)
def _around_scans(kernel: Kernel) -> tuple[Kernel, Kernel, int]:
    """What is scanned, what is made of that, which is behind all arrays, and its first number."""
    first = max(kernel.inputs, default=-1) + 1
    whole = View.contiguous(kernel.shape)

    def change(leaf: Expr) -> Expr:
        if leaf.op != "reduced":
            return leaf
        return Expr("input", (), leaf.dtype, (first + leaf.data[0], whole))

    args = Kernel(kernel.shape, tuple([r.arg for r in kernel.reductions]))
    return args, Kernel(kernel.shape, tuple(rebuilt(kernel.outputs, change))), first


def supported(expr: Expr) -> str | None:
    """Why NumPy cannot evaluate an expression; None where it can.

    >>> from gpuscheduler.expr import source
    >>> supported(Expr("frobnicate", (source(0, (5,), "f4"),), "f4"))
    'NumPy has no function frobnicate of float32'
    """
    for node in nodes((expr,)):
        if not node.args or node.op in STRUCTURAL or node.op in RANDOM or node.op == "call":
            continue
        reason = _unknown(node.op, tuple([a.dtype for a in node.args]), node.dtype)
        if reason is not None:
            return reason
    return None


@lru_cache(4096)
def _unknown(op: str, types: tuple[DType, ...], gives: DType) -> str | None:
    reason = f"NumPy has no function {op} of {', '.join(t.name for t in types)}"
    try:
        function = _ufunc(op)
        if function.nin != len(types) or function.nout != 1 or function.signature is not None:
            return reason
        found = function.resolve_dtypes((*types, None))
    except (NotImplementedError, TypeError):
        return reason
    return None if found[-1] == gives else f"{reason} that gives {gives.name}"


@lru_cache(256)
def _ufunc(op: str) -> np.ufunc:
    function = getattr(np, op, None)
    if not isinstance(function, np.ufunc):
        try:
            from scipy import special  # type: ignore[import-untyped,unused-ignore]
        except ImportError:  # SciPy is not required
            special = None
        function = getattr(special, op, None)
    if not isinstance(function, np.ufunc):
        raise NotImplementedError(f"no function {op} in NumPy, nor in SciPy where it is installed")
    return function


# ---- arrays as memory


class _Memory(NamedTuple):
    flat: Array  # every element from the lowest address to the highest
    first: int  # which of them is element [0, …, 0]


def _extent(array: Array) -> tuple[int, int]:
    if array.flags.c_contiguous:
        return 0, array.size - 1
    if not array.size:
        return 0, -1
    ends = [s // array.itemsize * (n - 1) for n, s in zip(array.shape, array.strides, strict=True)]
    return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0)


def _memory(array: Array) -> _Memory:
    if array.flags.c_contiguous:
        return _Memory(array.reshape(-1), 0)
    low, high = _extent(array)
    corner = array[tuple(slice(-1, None) if s < 0 else slice(0, 1) for s in array.strides)]
    shape, strides = (high - low + 1,), (array.itemsize,)
    return _Memory(np.lib.stride_tricks.as_strided(corner, shape, strides), -low)


def _ends(view: View, box: Box) -> tuple[int, int]:
    """The least and the greatest number that a view gives in a box that is not empty."""
    low = high = view.offset
    for stride, (start, stop) in zip(view.strides, box, strict=True):
        a, b = stride * start, stride * (stop - 1)
        low, high = low + min(a, b), high + max(a, b)
    return low, high


class _Facts(NamedTuple):
    """What is known of a kernel."""

    kernel: Kernel
    reach: tuple[tuple[int, int, int], ...]
    chooses: bool
    plans: dict[Any, _Plan]


#: By the kernels' ids: to hash one takes as long as the rest of what is done before it runs.
_known: dict[int, _Facts] = {}
MOST_KNOWN, MOST_PLANS = 1024, 64


def _facts(kernel: Kernel) -> _Facts:
    found = _known.get(id(kernel))
    if found is None or found.kernel is not kernel or len(found.plans) > MOST_PLANS:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        found = _known[id(kernel)] = _Facts(kernel, _reach(kernel), _chooses_calls(kernel), {})
    return found


@lru_cache(1024)
def _reach(kernel: Kernel) -> tuple[tuple[int, int, int], ...]:
    """How far its leaves reach into each array."""
    found: dict[int, tuple[int, int]] = {}
    spaces = (([r.arg for r in kernel.reductions], kernel.shape), (kernel.outputs, kernel.kept))
    for roots, shape in spaces:
        if 0 in shape:
            continue
        box = tuple((0, n) for n in shape)
        for node in nodes(roots):
            if node.op == "input":
                n, view = node.data
                low, high = _ends(view, box)
                old = found.get(n, (low, high))
                found[n] = min(low, old[0]), max(high, old[1])
    return tuple((n, low, high) for n, (low, high) in found.items())


@lru_cache(1024)
def _chooses_calls(kernel: Kernel) -> bool:
    """Whether some call need not be made at every point."""
    choices = [n for n in nodes(kernel.roots) if n.op == "where"]
    return any(n.op == "call" for n in nodes([a for c in choices for a in c.args[1:]]))


# ---- regions: boxes in which every view is inside its array


def _place(node: Expr, axes: int) -> tuple[View, list[Expr]] | None:
    """Numbers that go evenly, as a View and what is added to it."""
    if node.op == "add" and node.dtype == np.int64 and node.args[1].op == OPEN:
        found = _place(node.args[0], axes)
        return None if found is None else (found[0], [*found[1], node.args[1]])
    view = affine(node, axes)
    return None if view is None or not any(view.strides) else (view, [])


def _regions(
    roots: list[Expr], box: Box, bounds: Bounds
) -> Iterator[tuple[Box, list[Expr]]]:  # fmt: skip
    """Boxes that make up `box`, and what is to be evaluated in each: there every view is inside its
    array, except below ``guarded`` nodes, and no ``where`` is left of which it is known what it
    chooses."""
    roots = settled(roots, box)
    bad: dict[int, bool] = {}  # does it read, somewhere in this box, outside an array?
    calls: dict[int, bool] = {}  # does it call what may have no end for points not meant for it?
    for node in nodes(roots):
        below = node.args[:1] if node.op == GUARDED else node.args
        calls[id(node)] = node.op == "call" or any(calls[id(a)] for a in below)
        if node.op == "input":
            low, high = _ends(node.data[1], box)
            first, last = bounds.get(node.data[0], (low, high))
            bad[id(node)] = low < first or high > last
        else:
            bad[id(node)] = any(bad[id(a)] for a in below)
    stack, seen = list(roots), set()
    while stack:
        node = stack.pop()
        if id(node) in seen or not (bad[id(node)] or calls[id(node)]):
            continue
        seen.add(id(node))
        if node.op == "input":
            raise IndexError(f"{node!r} is read outside of the array, at {node.data[1]}")
        either = node.op == "where" and node.args[1:]
        if either and any(bad[id(a)] or calls[id(a)] for a in either):
            condition = node.args[0]
            cut = cut_for(condition, box)
            if cut is not None:
                axis, places = cut
                for start, stop in zip(places, places[1:], strict=False):
                    part = (*box[:axis], (start, stop), *box[axis + 1 :])
                    yield from _regions(roots, part, bounds)
                return
            if not any(bad[id(a)] for a in either):
                stack += node.args
                continue
            marked = Expr(GUARDED, node.args, node.dtype)
            yield from _regions(substituted(roots, {id(node): marked}), box, bounds)
            return
        stack += node.args[:1] if node.op == GUARDED else node.args
    yield box, roots


# ---- one region as calls


class _Step(NamedTuple):
    call: Callable[..., Any]
    args: tuple[int, ...]
    slot: int
    placed: bool  # it is called with the run, and the block's origin and shape, too
    dead: tuple[int, ...]  # slots that nobody reads any more


@dataclass(slots=True)
class _Leaf:
    slot: int
    array: int
    dtype: DType
    view: View
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    varies: tuple[bool, ...]


class _Region:
    """The expressions of one region, over its collapsed axes, and how they are evaluated."""

    def __init__(self, box: Box, roots: list[Expr], views: list[View], reduced: frozenset[int],
                 block_bytes: int):  # fmt: skip
        """`views` (of outputs, say) are kept evenly strided too, as collapsing goes."""
        every = [_moved(v, box) for v in views]
        leaves = [(n, v) for n in nodes(roots) if (v := view_of(n)) is not None]
        every += [_moved(v, box) for _, v in leaves]
        lengths = [stop - start for start, stop in box]
        self.shape, self.reduced, every = _collapsed(lengths, every, reduced)
        self.stays = tuple([k for k in range(len(self.shape)) if k not in self.reduced])
        self.kept = tuple([self.shape[k] for k in self.stays])
        self.views = every[: len(views)]
        moved = zip(leaves, every[len(views) :], strict=True)
        self.exprs = substituted(roots, {id(n): with_view(n, v) for (n, _), v in moved})
        self._number(self.exprs)
        self.block_bytes, self.block = block_bytes, self.choose_block(block_bytes)
        self.count = math.prod(-(-n // b) for n, b in zip(self.shape, self.block, strict=True))

    def _number(self, roots: list[Expr]) -> None:
        """Give each distinct node a slot, and make calls of those that are not leaves."""
        axes = len(self.shape)
        self.dtypes: list[DType] = []
        self.varies: list[tuple[bool, ...]] = []  # along which axes a slot's value may differ
        self.leaves: list[_Leaf] = []
        self.constants: list[tuple[int, Any]] = []
        self.open: list[tuple[int, int]] = []  # a slot, and which of the given constants it has
        once: list[tuple[Callable[..., Any], tuple[int, ...], int, bool]] = []
        each: list[tuple[Callable[..., Any], tuple[int, ...], int, bool]] = []
        numbers: dict[Any, int] = {}
        slots: dict[int, int] = {}
        nothing, everything = (False,) * axes, (True,) * axes

        roots = _clipped(roots)
        for node in _reachable(roots):
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
                shape = _shape(self.shape, varies)
                strides = tuple([s * node.dtype.itemsize for s in view.strides])
                self.leaves.append(_Leaf(slot, n, node.dtype, view, shape, strides, varies))
            elif node.op == "index":
                varies = tuple([s != 0 for s in node.data.strides])
                if varies == nothing:
                    value = np.asarray(node.data.offset, np.int64)
                    self.constants.append((slot, value))
                else:
                    each.append((partial(_indices, node.data), (), slot, True))
            elif node.op == "taken":
                n, view = node.args[0].data
                each.append((partial(_taken, n, view), args[1:], slot, True))
                varies = varies if any(varies) else everything
            elif node.op == GUARDED:
                varies = everything
                each.append((partial(_chosen, node), args, slot, True))
            elif node.op in RANDOM and (place := _place(node.args[0], axes)):
                view, shifts = place
                varies = tuple([s != 0 for s in view.strides])
                draw = partial(_drawn, node.op, node.data, node.dtype, view)
                each.append((draw, tuple([slots[id(x)] for x in shifts]), slot, True))
            else:
                along = tuple([self.varies[a][-1] for a in args])
                call = _call(node, along if any(along) and not all(along) else None)
                (each if any(varies) else once).append((call, args, slot, False))
            self.varies.append(varies)
        self.roots = [slots[id(r)] for r in roots]
        self.once = [_Step(*s, ()) for s in once]
        self.steps = self._last_uses(each)
        self._registers()

    def _last_uses(self, calls: list[Any]) -> list[_Step]:
        """Drop what nobody reads (the index of a draw, say), and note when values die."""
        needed = set(self.roots)
        steps: list[_Step] = []
        lasting = {s.slot for s in self.once} | {s for s, _ in self.constants}
        lasting |= {leaf.slot for leaf in self.leaves} | {s for s, _ in self.open} | needed
        for call, args, slot, placed in reversed(calls):
            if slot in needed:
                dead = tuple([a for a in dict.fromkeys(args) if a not in needed | lasting])
                needed.update(args)
                steps.append(_Step(call, args, slot, placed, dead))
        return steps[::-1]

    def _registers(self) -> None:
        """Which buffer each slot has: one that has just been read is still in the cache."""
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
        """The shape of a block: long along the axes along which memory is, and no larger."""
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
    def drawn(self) -> _Drawn | None:
        """How machine code computes what is made of random numbers, where that is worth it."""
        if not host_code.worth(self.shape):
            return None
        found = _Drawn(self)
        return found if found.draws and len(self.steps) > len(found.draws) else None

    @cached_property
    def code(self) -> host_code.Code | None:
        """Machine code that writes its values, where that is worth it."""
        if not host_code.worth(self.shape) or not self.steps:
            return None
        return host_code.writing(self.shape, self.exprs, self.views)

    def write(
        self, memory: dict[int, _Memory], outs: Sequence[Array], given: Sequence[Array], fresh: bool
    ) -> None:
        """Evaluate and write into arrays of the whole space; `fresh` says that these are as
        foreseen and nobody else's."""
        if fresh and self.code is not None:
            flats = [_memory(out) for out in outs]
            places = [
                host_code.address(flat) + (first + view.offset) * flat.itemsize
                for (flat, first), view in zip(flats, self.views, strict=True)
            ]
            self.code(memory, given, places)
            return
        if fresh and self.drawn is not None and self.drawn.writes:
            self.drawn.write(memory, outs, given)
            return
        targets = []
        for out, view in zip(outs, self.views, strict=True):
            item = out.itemsize
            strides = tuple([s * item for s in view.strides])
            if not view.offset and strides == out.strides and self.shape == out.shape:
                targets.append(out)
                continue
            flat, first = _memory(out)
            start = (first + view.offset) * item
            targets.append(np.ndarray(self.shape, out.dtype, flat, start, strides))
        run = _Run(self, memory, given)
        whole = self.count == 1
        for origin, lengths in _boxes(self.shape, self.block, range(len(self.shape))):
            if whole:
                run.block(origin, lengths, targets)
            else:
                where = tuple([slice(o, o + n) for o, n in zip(origin, lengths, strict=True)])
                run.block(origin, lengths, [t[where] for t in targets])


class _Draw(NamedTuple):
    """Random numbers whose positions go evenly."""

    op: str
    key: int
    dtype: DType
    view: View
    shifts: tuple[int, ...]  # which of the given numbers are added to the positions


class _Drawn:
    """A region whose random numbers are drawn into buffers, block by block; machine code makes of
    them, in one pass, what else would take a call of NumPy's for each operation."""

    def __init__(self, region: _Region):
        self.region = region
        self.block = region.choose_block(min(region.block_bytes, DRAWN_BYTES))
        self.draws: list[_Draw] = []
        self.numbers: dict[int, int] = {}  # of nodes, by their ids
        for node in nodes(region.exprs):
            if node.op not in RANDOM:
                continue
            place = _place(node.args[0], len(region.shape))
            if place is not None and all(s.op == OPEN for s in place[1]):
                view, shifts = place
                draw = _Draw(node.op, node.data, node.dtype, view, tuple([s.data for s in shifts]))
                if draw not in self.draws:
                    self.draws.append(draw)
                self.numbers[id(node)] = self.draws.index(draw)
        self._writing: dict[tuple[int, ...], host_code.Code | None] = {}
        self._reducing: dict[tuple[int, ...], tuple[host_code.Code | None, Sequence[int]]] = {}

    def room(self) -> list[Array]:
        """Buffers of one evaluation, as long as a block needs them."""
        return [np.empty(self._shape(d, self.block), d.dtype).reshape(-1) for d in self.draws]

    def _shape(self, draw: _Draw, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return _shape(lengths, tuple([s != 0 for s in draw.view.strides]))

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        return _boxes(self.region.shape, self.block, range(len(self.block)))

    def exprs(self, lengths: tuple[int, ...]) -> list[Expr]:
        """The region's, which read the buffers of a block of these lengths."""
        read = {}
        for node in nodes(self.region.exprs):
            if id(node) in self.numbers:
                n = self.numbers[id(node)]
                view = self._view(self.draws[n], lengths)
                read[id(node)] = Expr("input", (), node.dtype, (BUFFERS - n, view))
        return substituted(self.region.exprs, read)

    def _view(self, draw: _Draw, lengths: tuple[int, ...]) -> View:
        steps = View.contiguous(self._shape(draw, lengths)).strides
        return View(0, tuple([s * (t != 0) for s, t in zip(steps, draw.view.strides, strict=True)]))

    def memory(
        self, memory: Mapping[int, _Memory], given: Sequence[Array], room: list[Array],
        origin: tuple[int, ...], lengths: tuple[int, ...],
    ) -> dict[int, _Memory]:  # fmt: skip
        """The arrays, and what is drawn for a block, each as if it began at the region's origin."""
        out = dict(memory)
        box = _box(origin, lengths)
        for n, draw in enumerate(self.draws):
            first = draw.view.offset + sum([int(given[k]) for k in draw.shifts])
            buffer: Array = np.ndarray(self._shape(draw, lengths), draw.dtype, room[n])
            philox.fill(draw.op, draw.key, _moved(View(first, draw.view.strides), box), buffer)
            before = _moved(self._view(draw, lengths), box).offset
            out[BUFFERS - n] = _Memory(room[n], -before)
        return out

    def code(self, lengths: tuple[int, ...]) -> host_code.Code | None:
        """Machine code that writes a block of these lengths."""
        if lengths not in self._writing:
            exprs = self.exprs(lengths)
            self._writing[lengths] = host_code.writing(lengths, exprs, self.region.views)
        return self._writing[lengths]

    def reducer(
        self, plan: _Plan, lengths: tuple[int, ...]
    ) -> tuple[host_code.Code | None, Sequence[int]]:
        """Machine code that reduces a block of these lengths, and how that orders the axes."""
        if lengths not in self._reducing:
            stays = self.region.stays
            kept = tuple([lengths[k] for k in stays])
            target = _spread(View.contiguous(kept), stays, len(lengths))
            self._reducing[lengths] = plan.reducer(
                lengths, self.exprs(lengths), target, self.region, math.prod(kept)
            )
        return self._reducing[lengths]

    @cached_property
    def writes(self) -> bool:
        """Whether there is code that writes it."""
        return all(self.code(lengths) is not None for lengths in {n for _, n in self.boxes()})

    def reduces(self, plan: _Plan) -> bool:
        """Whether there is code that reduces it for its plan."""
        return all(self.reducer(plan, n)[0] is not None for n in {n for _, n in self.boxes()})

    def write(
        self, memory: Mapping[int, _Memory], outs: Sequence[Array], given: Sequence[Array]
    ) -> None:
        flats, room = [_memory(out) for out in outs], self.room()
        for origin, lengths in self.boxes():
            places = [
                host_code.address(flat)
                + (first + _moved(view, _box(origin, lengths)).offset) * flat.itemsize
                for (flat, first), view in zip(flats, self.region.views, strict=True)
            ]
            code = self.code(lengths)
            assert code is not None
            here = self.memory(memory, given, room, origin, lengths)
            code.call_at(origin, here, given, places)

    def states(
        self, plan: _Plan, memory: Mapping[int, _Memory], given: Sequence[Array],
        room: list[Array], origin: tuple[int, ...], lengths: tuple[int, ...],
    ) -> list[State]:  # fmt: skip
        """What machine code makes of a block that is reduced."""
        code, order = self.reducer(plan, lengths)
        assert code is not None
        here = self.memory(memory, given, room, origin, lengths)
        shape = tuple([lengths[k] for k in self.region.stays])
        return plan.states(code, shape, here, given, [origin[k] for k in order])


def _box(origin: Sequence[int], lengths: Sequence[int]) -> Box:
    return tuple([(o, o + n) for o, n in zip(origin, lengths, strict=True)])


class _Run:
    """One evaluation of a region: its inputs, and buffers."""

    def __init__(self, region: _Region, memory: dict[int, _Memory], given: Sequence[Array]):
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
        """Where each slot of a block of this shape is written."""
        outs = self.bound.get(lengths)
        if outs is None:
            region = self.region
            outs = [None] * len(region.dtypes)
            if region.count > 1:
                if not self.buffers:
                    self.buffers = self._buffers()
                for slot, home in region.register.items():
                    shape = _shape(lengths, region.varies[slot])
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
            items = math.prod(_shape(region.block, region.varies[slot]))
            sizes[home] = max(sizes[home], items * region.dtypes[slot].itemsize)
        return [np.empty(-(-n // 8) * 8, np.uint8) for n in sizes]

    def block(
        self, origin: tuple[int, ...], lengths: tuple[int, ...], targets: Sequence[Array] = ()
    ) -> list[Any]:
        """Evaluate one block, into `targets` where there are any; else give the roots' values."""
        region, values = self.region, self.values
        if self.leaves:
            slices = [slice(o, o + n) for o, n in zip(origin, lengths, strict=True)]
            for slot, array, varies in self.leaves:
                if False in varies:
                    where = [s if v else _ALL for s, v in zip(slices, varies, strict=True)]
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


_ALL = slice(None)


def _shape(lengths: tuple[int, ...], varies: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple([n if v else 1 for n, v in zip(lengths, varies, strict=True)])


def _moved(view: View, box: Box) -> View:
    """The view from a box's own corner."""
    shift = sum(s * start for s, (start, _) in zip(view.strides, box, strict=True))
    return View(view.offset + shift, view.strides)


def _collapsed(
    shape: Sequence[int], views: list[View], reduced: frozenset[int]
) -> tuple[tuple[int, ...], frozenset[int], list[View]]:
    """Fewer axes for the same points in the same order: neighbours merged where every view goes
    evenly from one to the next.

    >>> _collapsed((4, 1, 3), [View(7, (6, 5, 2))], frozenset())
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


def _reachable(roots: list[Expr]) -> list[Expr]:
    """Nodes that are evaluated as such: not those below a guarded one's branches."""
    return nodes(roots, lambda n: n.args[:1] if n.op == GUARDED else n.args)


def _boxes(
    shape: tuple[int, ...], block: tuple[int, ...], axes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Origins and lengths of the blocks along some axes, in C order; the other axes are 0 long."""
    starts = [range(0, shape[k], block[k]) if k in axes else (0,) for k in range(len(shape))]
    for origin in product(*starts):
        yield origin, tuple(
            [min(b, n - o) for o, n, b in zip(origin, shape, block, strict=True)]
        )  # fmt: skip


def _clipped(roots: list[Expr]) -> list[Expr]:
    """Choices between values and two bounds as one call of NumPy's, which takes a tenth as long."""
    new: dict[int, Expr] = {}
    for node in _reachable(roots):
        args = tuple([new.get(id(a), a) for a in node.args])
        same = all(a is b for a, b in zip(args, node.args, strict=True))
        here = node if same else Expr(node.op, args, node.dtype, node.data)
        if (below := _beyond(here, "greater")) and (above := _beyond(below[0], "less")):
            here = Expr("clip", (above[0], above[1], below[1]), node.dtype)
        new[id(node)] = here
    return [new[id(r)] for r in roots]


def _beyond(node: Expr, compare: str) -> tuple[Expr, Expr] | None:
    """The value and the bound of a choice: the bound where the value is beyond it."""
    if node.op != "where":
        return None
    over, bound, x = node.args
    plain = over.op == compare and bound.op == "constant" and node.dtype.kind in "iuf"
    return (x, bound) if plain and over.args[0] is x and over.args[1] == bound else None


# ---- nodes as calls that take `out`


def _call(node: Expr, along: tuple[bool, ...] | None = None) -> Callable[..., Any]:
    """`along` is which arguments vary along the last axis, where some do and some do not."""
    if node.op == "cast":
        return partial(_cast, node.dtype)
    if node.op == "where":
        return partial(_where, node.dtype)
    if node.op == "clip":
        return np.clip
    if node.op in ("real", "imag"):
        return partial(_part, node.op)
    if node.op == "complex":
        return partial(_complex, node.dtype)
    if node.op == "bin":
        return partial(_bin, node.data)
    if node.op in RANDOM:
        return partial(_drawn_at, node.op, node.data, node.dtype)
    if node.op == "call":
        function, part = node.data
        types = tuple([a.dtype for a in node.args])
        if along is not None:
            return function.rows(types, node.dtype, part, along)  # type: ignore[no-any-return]
        return function.ufunc(types, node.dtype, part)  # type: ignore[no-any-return]
    if node.op in _PACKED:
        return partial(_packed, _ufunc(node.op))
    return _ufunc(node.op)


def _packed(function: np.ufunc, a: Any, out: Array | None = None) -> Any:
    """NumPy (to 2.4) writes these past an `out` with strides on CPUs with AVX-512, not into it; and
    negatives of each fourth number of four bytes, or eighth of eight, are those of others there."""
    if out is None or out.flags.c_contiguous:
        return function(a, out=out)
    out[...] = function(a)
    return out


def _cast(dtype: DType, a: Any, out: Array | None = None) -> Any:
    if out is None:
        return a.astype(dtype)
    np.copyto(out, a, casting="unsafe")
    return out


def _where(dtype: DType, c: Any, a: Any, b: Any, out: Array | None = None) -> Any:
    return np.where(c, a, b)  # of memory of its own: to copy that to `out` would only cost


def _bin(bins: Bins, a: Any, out: Array | None = None) -> Any:
    found = bins.find(a)
    if out is None:
        return found
    out[...] = found
    return out


def _part(name: str, a: Any, out: Array | None = None) -> Any:
    found = a.real if name == "real" else a.imag
    if out is None:
        return found
    out[...] = found
    return out


def _complex(dtype: DType, a: Any, b: Any, out: Array | None = None) -> Any:
    if out is None:
        out = np.empty(np.broadcast_shapes(np.shape(a), np.shape(b)), dtype)
    out.real = a
    out.imag = b
    return out


def _drawn_at(op: str, key: int, dtype: DType, at: Any, out: Array | None = None) -> Any:
    found = np.asarray(philox.values(op, key, np.asarray(at), dtype))
    if out is None:
        return found
    out[...] = found
    return out


def _drawn(
    op: str, key: int, dtype: DType, view: View, run: Any, origin: tuple[int, ...],
    lengths: tuple[int, ...], *shifts: Any, out: Array | None = None,
) -> Array:  # fmt: skip
    """Random numbers whose positions go evenly."""
    varies = tuple([s != 0 for s in view.strides])
    if out is None:
        out = np.empty(_shape(lengths, varies), dtype)
    moved = view.offset + sum(o * s for o, s in zip(origin, view.strides, strict=True))
    moved += sum(int(s) for s in shifts)
    philox.fill(op, key, View(moved, view.strides), out)
    return out


def _indices(
    view: View, run: Any, origin: tuple[int, ...], lengths: tuple[int, ...],
    out: Array | None = None,
) -> Array:  # fmt: skip
    first = view.offset
    for o, s in zip(origin, view.strides, strict=True):
        first += o * s
    found: Any = None
    for k, s in enumerate(view.strides):
        if s:
            along = np.arange(first, first + lengths[k] * s, s, dtype=np.int64)
            shape = [1] * len(lengths)
            shape[k] = -1
            along = along.reshape(shape)
            found, first = along if found is None else found + along, 0
    return found  # type: ignore[no-any-return]


def _taken(
    array: int, view: View, run: _Run, origin: tuple[int, ...], lengths: tuple[int, ...],
    numbers: Any, out: Array | None = None,
) -> Array:  # fmt: skip
    """Elements at places that are computed."""
    flat, first = run.memory[array]
    evenly: Any = _indices(view, run, origin, lengths) if any(view.strides) else view.offset
    # what is not chosen may be anywhere
    found: Array = flat.take(first + evenly + np.asarray(numbers), mode="clip")
    if out is None:
        return found if found.ndim else np.broadcast_to(found, lengths)
    out[...] = found
    return out


def _chosen(
    node: Expr, run: _Run, origin: tuple[int, ...], lengths: tuple[int, ...],
    condition: Any, out: Array | None = None,
) -> Array:  # fmt: skip
    """A `where` of which only the chosen points are read."""
    if out is None:
        out = np.empty(lengths, node.dtype)
    mask = np.broadcast_to(condition, lengths)
    for chosen, branch in ((mask, node.args[1]), (~mask, node.args[2])):
        points = [p + o for p, o in zip(np.nonzero(chosen), origin, strict=True)]
        out[chosen] = _at(branch, points, len(points[0]), run)
    return out


def _at(root: Expr, points: list[Array], count: int, run: _Run) -> Any:
    """An expression at some points, given by their coordinates."""
    values: dict[int, Any] = {}

    def numbers(view: View) -> Any:
        total: Any = np.full(count, view.offset, np.int64)
        for stride, coordinate in zip(view.strides, points, strict=True):
            if stride:
                total += stride * coordinate
        return total

    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if id(node) in values:
            continue
        branching = node.op in ("where", GUARDED)
        below = node.args[:1] if branching else node.args
        below = node.args[1:] if node.op == "taken" else below
        if not ready:
            stack.append((node, True))
            stack += [(a, False) for a in below]
        elif node.op == "constant":
            values[id(node)] = np.broadcast_to(node.value, (count,))
        elif node.op == OPEN:
            values[id(node)] = np.broadcast_to(run.given[node.data], (count,))
        elif node.op == "index":
            values[id(node)] = numbers(node.data)
        elif node.op == "input":
            n, view = node.data
            flat, first = run.memory[n]
            where = numbers(view) + first
            if count and (where.min() < 0 or where.max() >= flat.size):
                raise IndexError(f"{node!r} is read outside of the array, at {view}")
            values[id(node)] = flat[where]
        elif node.op == "taken":
            n, view = node.args[0].data
            flat, first = run.memory[n]
            where = numbers(view) + first + values[id(node.args[1])]
            values[id(node)] = flat.take(where, mode="clip")
        elif branching:
            mask = values[id(node.args[0])]
            out: Array = np.empty(count, node.dtype)
            for chosen, branch in ((mask, node.args[1]), (~mask, node.args[2])):
                some = [p[chosen] for p in points]
                out[chosen] = _at(branch, some, int(np.count_nonzero(chosen)), run)
            values[id(node)] = out
        else:
            values[id(node)] = _call(node)(*[values[id(a)] for a in node.args])
    return values[id(root)]


# ---- reductions

State = tuple[Any, ...]  # what is known of some of the points that are reduced to one


@dataclass(frozen=True)
class _Plan:
    outputs: list[_Region]
    reductions: tuple[Reduction, ...]
    regions: list[_Region]  # of what is reduced; their views are that of the kept, and positions
    kernel: Kernel
    dtypes: tuple[tuple[int, DType], ...]

    @cached_property
    def codes(self) -> list[host_code.Code | None]:
        """Machine code for what is reduced in each region, where that is worth it. That of the only
        region makes states of the shape that is kept, that of others those of their own part."""
        return [self._code(region) for region in self.regions]

    def _code(self, region: _Region) -> host_code.Code | None:
        whole = self.kernel.shape
        if not host_code.worth(whole) or SMALL_PART * math.prod(region.shape) < math.prod(whole):
            return None
        target, count = region.views[0], math.prod(self.kernel.kept)
        if len(self.regions) > 1:
            target = _spread(View.contiguous(region.kept), region.stays, len(region.shape))
            count = math.prod(region.kept)
        return self.reducer(region.shape, region.exprs, target, region, count)[0]

    def reducer(
        self, shape: tuple[int, ...], exprs: Sequence[Expr], target: View, region: _Region,
        count: int,
    ) -> tuple[host_code.Code | None, Sequence[int]]:  # fmt: skip
        """Machine code that reduces a box of a region of this shape to `count` states, numbered by
        `target`; and the order in which that has the axes."""
        position, order = region.views[-1], list(range(len(shape)))
        along = len(shape) - 1 in region.reduced
        if along and shape[-1] <= FEW_POINTS and region.stays:  # many results beside each other
            last = region.stays[-1]
            order = [*[k for k in range(len(shape)) if k != last], last]
            shape, along = tuple([shape[k] for k in order]), False
            exprs, target = _reordered(exprs, order), _in_order(target, order)
            position = _in_order(position, order)
        types = [_taken_as(r) for r in self.reductions]
        code = host_code.reducing(
            shape, exprs, self.reductions, types, target, position, along, count, self.few
        )
        return code, order

    @cached_property
    def few(self) -> bool:
        """Whether so few points become one that what is lost to rounding is no more than in
        NumPy's sums."""
        return math.prod([self.kernel.shape[k] for k in self.kernel.axes]) <= FEW_POINTS

    @cached_property
    def direct(self) -> list[int] | None:
        """Which results the outputs are, where they are nothing else."""
        numbers = [(r, j) for r, x in enumerate(self.reductions) for j in range(len(x.dtypes))]
        outputs = self.kernel.outputs
        if any(o.op != "reduced" for o in outputs) or len(set(outputs)) < len(outputs):
            return None
        return [numbers.index(o.data) for o in outputs]

    def states(
        self,
        code: host_code.Code,
        shape: tuple[int, ...],
        memory: dict[int, _Memory],
        given: Sequence[Array],
        origin: Sequence[int] | None = None,
    ) -> list[State]:
        """What machine code makes of a region, or of its box with an origin: states of this
        shape."""
        made = [host_code.states(r.op, _taken_as(r), shape, self.few) for r in self.reductions]
        places = [host_code.address(a) for found in made for a in found]
        if origin is None:
            code(memory, given, places)
        else:
            code.call_at(origin, memory, given, places)
        return [
            host_code.finished(r.op, found) for r, found in zip(self.reductions, made, strict=True)
        ]


@lru_cache(1024)
def _plan(
    kernel: Kernel, bounds: tuple[tuple[int, tuple[int, int]], ...] | None, block_bytes: int,
    words: tuple[Expr, ...], strides: tuple[int, ...] | None = None,
) -> _Plan:  # fmt: skip
    kept = tuple(k for k in range(len(kernel.shape)) if k not in kernel.axes)
    numbers: dict[tuple[int, int], int] = {}
    for r, reduction in enumerate(kernel.reductions):
        for j in range(len(reduction.dtypes)):
            numbers[r, j] = len(numbers)
    whole = View.contiguous(kernel.kept)

    def change(leaf: Expr) -> Expr:
        if leaf.op == "constant" and leaf in words:
            return Expr(OPEN, (), leaf.dtype, words.index(leaf))
        if leaf.op != "reduced":
            return leaf
        return Expr("input", (), leaf.dtype, (-1 - numbers[leaf.data], whole))

    def regions(roots: list[Expr], shape: tuple[int, ...]) -> list[tuple[Box, list[Expr]]]:
        box = tuple((0, n) for n in shape)
        if 0 in shape:
            return []
        if bounds is None:
            return [(box, roots)]
        known = dict(bounds)
        known.update({-1 - n: (0, math.prod(kernel.kept) - 1) for n in numbers.values()})
        return list(_regions(roots, box, known))

    outputs = []
    target = whole if strides is None else View(0, strides)
    for box, roots in regions(rebuilt(kernel.outputs, change), kernel.kept):
        outputs.append(_Region(box, roots, [target] * len(roots), frozenset(), block_bytes))
    inner = []
    if kernel.counts:
        # once for each point, not for each bin, too
        _, wanted = _binned(kernel)
        wanted = rebuilt(wanted, lambda leaf: _without_first(change(leaf)))
        for box, roots in regions(wanted, kernel.shape[1:]):
            axes = frozenset(range(len(box)))
            views = [View(0, (0,) * len(box))] * len(roots)
            inner.append(_Region(box, roots, views, axes, block_bytes))
    elif kernel.reductions:
        target = _spread(whole, kept, len(kernel.shape))
        over = [n for k, n in enumerate(kernel.shape) if k in kernel.axes]
        reduced_axes = tuple(sorted(kernel.axes))
        position = _spread(View.contiguous(tuple(over)), reduced_axes, len(kernel.shape))
        for box, roots in regions(
            rebuilt([r.arg for r in kernel.reductions], change), kernel.shape
        ):
            views = [target, position]
            inner.append(_Region(box, roots, views, frozenset(kernel.axes), block_bytes))
    reads = {n.data[0]: n.dtype for n in nodes(kernel.roots) if n.op == "input"}
    return _Plan(outputs, kernel.reductions, inner, kernel, tuple(reads.items()))


def _spread(view: View, axes: Sequence[int], count: int) -> View:
    """The view over more axes, of which it has only some."""
    strides = [0] * count
    for k, s in zip(axes, view.strides, strict=True):
        strides[k] = s
    return View(view.offset, tuple(strides))


def _reduced(plan: _Plan, memory: dict[int, _Memory], given: Sequence[Array]) -> list[Array]:
    """The results of all reductions, over the axes that are kept."""
    kernel = plan.kernel
    if kernel.counts:
        return [_counted(plan, memory, given)]
    states: list[State] | None = None
    seen: Array | None = None
    for region, code in zip(plan.regions, plan.codes, strict=True):
        if code is not None and len(plan.regions) == 1:
            states = plan.states(code, kernel.kept, memory, given)
            break
        if states is None:
            states = [_room(r, kernel.kept) for r in plan.reductions]
            seen = np.zeros(kernel.kept, bool) if len(plan.regions) > 1 else None
        if code is not None:
            found = plan.states(code, region.kept, memory, given)
            _enter(plan, region, found, (0,) * len(region.shape), region.shape, states, seen)
        else:
            _reduce_region(plan, _Run(region, memory, given), states, seen)
    if states is None:
        states = [_identity(r, kernel) for r in plan.reductions]
    out = []
    for reduction, state in zip(plan.reductions, states, strict=True):
        out += _finished(reduction, state)
    return out


def _in_order(view: View, order: Sequence[int]) -> View:
    return View(view.offset, tuple([view.strides[k] for k in order]))


def _reordered(exprs: Sequence[Expr], order: Sequence[int]) -> list[Expr]:
    """The same over axes in another order."""
    leaves = [(n, v) for n in nodes(exprs) if (v := view_of(n)) is not None]
    return substituted(exprs, {id(n): with_view(n, _in_order(v, order)) for n, v in leaves})


def _without_first(leaf: Expr) -> Expr:
    """A leaf without the first axis, along which it is the same everywhere."""
    view = view_of(leaf)
    return leaf if view is None else with_view(leaf, View(view.offset, view.strides[1:]))


def _binned(kernel: Kernel) -> tuple[Bins | None, list[Expr]]:
    """Of a histogram the bins, and the values that are to be found there; or None, and the numbers
    of bins. Behind these come weights, if there are any."""
    value, weights = kernel.reductions[0].arg, []
    if kernel.weighs:
        if value.op == "complex":
            value, weight = value.args
        else:
            value, weight = (Expr(part, (value,), np.float64) for part in ("real", "imag"))
        weights = [weight]
        if value.op == "cast" and value.args[0].op == "bin":
            (value,) = value.args
    if value.op == "bin":
        return value.data, [*value.args, *weights]
    return None, [value, *weights]


def _counted(plan: _Plan, memory: dict[int, _Memory], given: Sequence[Array]) -> Array:
    """How many values lie in each bin, or what their weights add up to."""
    (reduction,) = plan.reductions
    kernel = plan.kernel
    bins, _ = _binned(kernel)
    total = np.zeros(kernel.kept, np.float64 if kernel.weighs else np.int64)
    count = len(total)
    for region in plan.regions:
        run = _Run(region, memory, given)
        for origin, size in _boxes(region.shape, region.block, range(len(region.shape))):
            values, *rest = [np.broadcast_to(v, size) for v in run.block(origin, size)]
            weights = rest[0] if rest else None
            if bins is None:
                number = np.minimum(values.ravel(), count).astype(np.intp, copy=False)
                heavy = None if weights is None else weights.ravel()
                total += np.bincount(number, heavy, count + 1)[:count]
            elif weights is None:
                bins.count(values, total)
            else:
                bins.weigh(values, weights, total)
    return total.astype(reduction.dtypes[0], copy=False)


def _reduce_region(plan: _Plan, run: _Run, states: list[State], seen: Array | None) -> None:
    region, drawn = run.region, run.region.drawn
    if drawn is not None and not drawn.reduces(plan):
        drawn = None
    room = [] if drawn is None else drawn.room()
    axes = range(len(region.shape))
    reduced = tuple(sorted(region.reduced))
    kept, position = region.stays, region.views[1]
    block = region.block if drawn is None else drawn.block
    for outer, _ in _boxes(region.shape, block, kept):
        sums: list[_Tree] = [_Tree(r.op) for r in plan.reductions]
        for inner, _ in _boxes(region.shape, block, reduced):
            origin = tuple([outer[k] if k in kept else inner[k] for k in axes])
            size = tuple(
                [min(b, n - o) for o, n, b in zip(origin, region.shape, block, strict=True)]
            )
            if drawn is not None:
                found = drawn.states(plan, run.memory, run.given, room, origin, size)
                for tree, state in zip(sums, found, strict=True):
                    tree.add(state)
                continue
            values = run.block(origin, size)
            first = position.offset + sum(o * s for o, s in zip(origin, position.strides,
                                                                strict=True))  # fmt: skip
            for reduction, tree, value in zip(plan.reductions, sums, values, strict=True):
                value = np.broadcast_to(value, size) if np.shape(value) != size else value
                tree.add(_partial(reduction, value, reduced, first, position.strides))
        _enter(plan, region, [t.total() for t in sums], outer, size, states, seen)


def _enter(
    plan: _Plan, region: _Region, found: list[State], origin: tuple[int, ...],
    lengths: tuple[int, ...], states: list[State], seen: Array | None,
) -> None:  # fmt: skip
    """Put what was found of part of a region to the states; `seen` is where there are some."""
    target = region.views[0]
    start = target.offset + sum(o * target.strides[k] for k, o in enumerate(origin))
    shape = tuple([lengths[k] for k in region.stays])

    def part(a: Array) -> Array:
        strides = tuple([target.strides[k] * a.itemsize for k in region.stays])
        return np.ndarray(shape, a.dtype, a, start * a.itemsize, strides)

    for reduction, values, state in zip(plan.reductions, found, states, strict=True):
        views = tuple([part(s) for s in state])
        if seen is not None:
            known = part(seen)
            with np.errstate(all="ignore"):
                merged = _merged(reduction.op, views, values)
            values = tuple([np.where(known, m, f) for m, f in zip(merged, values, strict=True)])
        for view, value in zip(views, values, strict=True):
            view[...] = value
    if seen is not None:
        part(seen)[...] = True


class _Tree:
    """Partial results, merged in pairs like a binary counter, so that rounding errors stay small
    however many there are, and their order is always the same."""

    def __init__(self, op: str):
        self.op = op
        self.stack: list[tuple[int, State]] = []

    def add(self, state: State) -> None:
        rank = 0
        while self.stack and self.stack[-1][0] == rank:
            state = _merged(self.op, self.stack.pop()[1], state)
            rank += 1
        self.stack.append((rank, state))

    def total(self) -> State:
        state = self.stack.pop()[1]
        while self.stack:
            state = _merged(self.op, self.stack.pop()[1], state)
        return state


_WIDE = {"f2": "f8", "f4": "f8", "c8": "c16"}


def _wide(dtype: DType) -> DType:
    """The type in which numbers of this type are added up."""
    return np.dtype(_WIDE.get(dtype.str[1:], dtype))


def _types(reduction: Reduction) -> tuple[DType, ...]:
    """The types of a reduction's state."""
    op, arg, dtype = reduction.op, reduction.arg.dtype, reduction.dtypes[0]
    if op in ("sum", "prod"):
        return (_wide(dtype),)
    if op in ("any", "all"):
        return (np.dtype(bool),)
    if op in ("argmin", "argmax"):
        return np.dtype(np.int64), arg
    if op == "moment":
        total = _wide(np.result_type(arg, np.float16))
        real = np.empty(0, total).real.dtype
        return np.dtype(np.float64), total, real
    return (arg,)


def _taken_as(reduction: Reduction) -> DType:
    """The type that a reduction's values are taken as: of a moment, double."""
    return reduction.arg.dtype if reduction.op in host_code.EXTREMES else _types(reduction)[0]


def _room(reduction: Reduction, shape: tuple[int, ...]) -> State:
    return tuple([np.empty(shape, t) for t in _types(reduction)])


def _identity(reduction: Reduction, kernel: Kernel) -> State:
    """The state of no points at all."""
    op = reduction.op
    start = {"sum": 0, "prod": 1, "any": False, "all": True, "moment": 0}.get(op)
    if start is None and 0 in [kernel.shape[k] for k in kernel.axes]:
        if op.startswith("arg"):
            raise ValueError(f"attempt to get {op} of an empty sequence")
        name = _REDUCE[op].__name__
        raise ValueError(f"zero-size array to reduction operation {name} which has no identity")
    return tuple([np.full(kernel.kept, start or 0, t) for t in _types(reduction)])


_REDUCE: dict[str, np.ufunc] = {op: getattr(np, name) for op, name in host_code.PAIRWISE.items()}


def _partial(
    reduction: Reduction, value: Array, axes: tuple[int, ...], first: int, strides: tuple[int, ...]
) -> State:
    """The state of one block."""
    op = reduction.op
    if op in ("argmin", "argmax"):
        return _extreme(op, value, axes, first, strides)
    if op == "moment":
        _, total, real = _types(reduction)
        if reduction.dtypes[1].itemsize == real.itemsize:  # to be as exact as its own numbers
            value = value.astype(total, copy=False)
        return _moment(value, axes, total, real)
    function = _REDUCE[op]
    if op in ("sum", "prod"):
        wide = _wide(reduction.dtypes[0])
        return (_added(value, axes, wide) if op == "sum" else function.reduce(value, axes, wide),)
    found = function.reduce(value, axis=axes)
    return (found.copy() if not axes else found,)


def _added(value: Array, axes: tuple[int, ...], wide: DType) -> Any:
    """A sum, as accurate as NumPy's along contiguous axes whatever the axes are. Adding up in the
    values' own type is three times faster; it is done where few are added one after the other."""
    if _wide(value.dtype) != wide or value.dtype.itemsize == 2 or len(axes) == 0:
        return np.add.reduce(value, axes, wide)
    last = value.ndim - 1
    if last in axes and value.shape[last] >= 16 and value.flags.c_contiguous:
        # NumPy adds in pairs here
        return np.add.reduce(np.add.reduce(value, last), axes[:-1], wide)
    if len(axes) == 1 and axes[0] != last and value.shape[last] >= 64:
        (k,), few = axes, 32
        many = value.shape[k] // few
        head = value[(*[_ALL] * k, slice(0, many * few))]
        shape = (*value.shape[:k], many, few, *value.shape[k + 1 :])
        found = np.add.reduce(np.add.reduce(head.reshape(shape), k + 1), k, wide)
        if many * few < value.shape[k]:
            found += np.add.reduce(value[(*[_ALL] * k, slice(many * few, None))], k, wide)
        return found
    return np.add.reduce(value, axes, wide)


def _extreme(
    op: str, value: Array, axes: tuple[int, ...], first: int, strides: tuple[int, ...]
) -> State:
    """Where the extreme is among all points that are reduced, and the extreme itself."""
    kept = [k for k in range(value.ndim) if k not in axes]
    shape = tuple([value.shape[k] for k in kept])
    over = tuple([value.shape[k] for k in axes])
    lines = value.transpose(*kept, *axes).reshape(*shape, -1)
    at = (np.argmin if op == "argmin" else np.argmax)(lines, axis=-1)
    found = np.take_along_axis(lines, np.expand_dims(at, -1), -1)[..., 0]
    position: Any = np.full(shape, first, np.int64)
    if not axes:  # they were all of length one
        return position, found
    for k, coordinate in zip(axes, np.unravel_index(at, over), strict=True):
        position += strides[k] * coordinate
    return position, found


def _moment(value: Array, axes: tuple[int, ...], total: DType, real: DType) -> State:
    """Count, sum, and squared deviations from the mean. Deviations are from the mean rounded to the
    values' own type, which is near enough; what that leaves is taken away in the end."""
    if value.dtype.kind not in "fc" or value.dtype.itemsize == 2:
        value = value.astype(np.float32 if value.dtype.itemsize == 2 else total)
    n = math.prod([value.shape[k] for k in axes])
    shape = tuple([value.shape[k] for k in range(value.ndim) if k not in axes])
    added = np.asarray(_added(value, axes, total))
    mean = np.expand_dims((added / n).astype(value.dtype), axes)
    off = value - mean
    rest = np.asarray(_added(off, axes, total))
    if value.dtype.kind == "c":
        squares = off.real * off.real
        squares += off.imag * off.imag
    else:
        squares = np.multiply(off, off, out=off)
    m2 = _added(squares, axes, real) - (rest.real * rest.real + rest.imag * rest.imag) / n
    return np.full(shape, n, np.float64), added, m2


def _merged(op: str, a: State, b: State) -> State:
    """The state of the points of both."""
    if op in ("argmin", "argmax"):
        return _more_extreme(op, a, b)
    if op == "moment":
        return _chan(a, b)
    return (_REDUCE[op](a[0], b[0]),)


def _more_extreme(op: str, a: State, b: State) -> State:
    with np.errstate(invalid="ignore"):
        beats = np.less if op == "argmin" else np.greater
        (i, x), (j, y) = a, b
        x_odd, y_odd = x != x, y != y
        earlier = j < i
        better = np.where(x_odd | y_odd, y_odd & (~x_odd | earlier),
                          beats(y, x) | ((x == y) & earlier))  # fmt: skip
    return np.where(better, j, i), np.where(better, y, x)


def _chan(a: State, b: State) -> State:
    """Chan, Golub and LeVeque 1979: squared deviations of two sets together."""
    with np.errstate(invalid="ignore"):
        (n, s, m), (k, t, o) = a, b
        apart = t / k - s / n
        far = apart.real * apart.real + apart.imag * apart.imag
        return n + k, s + t, m + o + far * (n * k / (n + k))


def _finished(reduction: Reduction, state: State) -> list[Array]:
    """Results in the types that they are to have."""
    if reduction.op == "moment":
        n, total, m2 = state
        with np.errstate(invalid="ignore", divide="ignore"):
            state = total / n, m2
    return [
        np.asarray(s).astype(d, copy=False) for s, d in zip(state, reduction.dtypes, strict=True)
    ]
