"""The schedule of a kernel: loop order, vector width, tiles and windows.

Along which axes, how many at a time, in tiles or panes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import NotGenerated
from ...ir import limits
from ...ir.expr import RANDOM, SCANS, Expr, Kernel, View
from ...ir.limits import LEAST_SLIDING, MOST_SLIDING
from ...ir.regions import interior, simplify_in_box
from . import window_tiles
from .call_cost import MOST_INSTRUCTIONS, length_of
from .nodes import (
    MOST_STATEMENTS,
    DeviceCall,
    NodeTree,
    code_of,
    cost_of,
    dtype_of,
    held_size,
    part_size,
    size_of,
)
from .operations import STORED, accumulator, code, operation
from .window_tiles import SLIDING_WORDS, THREADS, ColumnTile, RowTile

#: Columns from which a thread may have four of them, with all that a mean and a variance need: with
#: fewer, too few threads have work. Measured.
MANY_COLUMNS = 2**15
#: Blocks per processor: enough that it does not matter when the last ones end.
WAVES, SHARED_WAVES = 128, 32
#: Work of the elements that a thread takes side by side. It is all compiled as often as there are
#: elements (thirty functions of complex numbers eight times: 41 s, once: 1.6 s), and where there is
#: as much to do it does not matter how the little is loaded.
MOST_COST = 1024
#: What a point costs from which on a kernel computes for longer than it reads and writes.
HEAVY = 128
#: Bytes of columns that a multiprocessor's cache has room for beside what else goes through it, and
#: columns that a warp goes along at a time.
KEPT_BYTES, LEAST_COLUMNS = 96 * 1024, 64
#: Bytes of inputs of one thread at a time, beyond which it has no registers for them all: of 255;
#: and that it has room for in a quarter of these.
LATE_BYTES, FEW_BYTES = 1000, 128
#: What each element of a vector may cost whose parts are read one by one: the code is there twice.
#: And how long rows have to be.
LOOSE_COST, LOOSE_LEAST = 256, 64
#: Places in each array that a reduction reads at each point, from which on it is worth while to
#: read them one by one, but each once.
OFTEN = 5
#: Points from which on it is worth while to reduce those beyond the core by themselves.
MANY_STEPS = 2**14
#: Bytes of shared memory for tiles; there are 48 KiB.
TILES = 40 * 1024
#: Bins of a histogram that have room there, and how many counters blocks have if that is enough.
MOST_BINS, COUNTERS = TILES // 4, 4096
#: Sums of a histogram of weights that have room there, and how many blocks have if that is enough
#: for a table of each warp.
MOST_WEIGHTS, FEW_WEIGHTS = TILES // 8, 2048
#: Threads of a processor that have work then, at least.
SLIDING_THREADS = 2 * THREADS
#: Nodes of what they reduce, at most, and how often these may be there: the compiler's time.
MOST_SLIDING_NODES, SLIDING_STATEMENTS = 100, 2000
#: Results from which on windows lie in panes.
LEAST_IN_PANES = 2**14
#: The members of a moment, but for how many there are.
MOMENT = ("k", "sum", "squares")
#: Points and elements that 32 bits can count, and go on by some steps.
SMALL = 2**31 - 2**27


@dataclass(frozen=True, slots=True)
class LoopAxis:
    """Some points in a row, and the strides of each layout along them."""

    length: int
    strides: tuple[int, ...]


def collapse_axes(axes: Iterable[LoopAxis]) -> list[LoopAxis]:
    """Fewer axes for the same points in the same order: none of length 1, and neighbours are one
    where all layouts go evenly from one to the next.

    >>> collapse_axes([LoopAxis(4, (6,)), LoopAxis(1, (5,)), LoopAxis(3, (2,))])
    [Axis(length=12, strides=(2,))]
    >>> collapse_axes([LoopAxis(4, (3, 0)), LoopAxis(3, (1, 1))])
    [Axis(length=4, strides=(3, 0)), Axis(length=3, strides=(1, 1))]
    """
    out: list[LoopAxis] = []
    for axis in axes:
        if axis.length == 1:
            continue
        if out and all(
            s == t * axis.length for s, t in zip(out[-1].strides, axis.strides, strict=True)
        ):
            out[-1] = LoopAxis(out[-1].length * axis.length, axis.strides)
        else:
            out.append(axis)
    return out


class ArgumentSlots:
    """The arguments of one item, by what they are."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self._known: dict[Any, int] = {}

    def at(self, name: Any, value: int = 0) -> int:
        """The slot of that name, which has one value."""
        word = int(value) & (2**64 - 1)
        if name not in self._known:
            self._known[name] = len(self.words)
            self.words.append(word)
        found = self._known[name]
        assert self.words[found] == word, f"two values of {name}"
        return found

    def __contains__(self, name: Any) -> bool:
        return name in self._known


@dataclass(slots=True)
class LoopSite:
    """Where in the iteration space a piece of code is: what its coordinates are called."""

    coords: dict[tuple[str, int], str]  # group of axes and number in it
    linear: dict[str, str] = field(default_factory=dict)  # number of the point within its group


@dataclass(slots=True)
class PointRange:
    """Points, or vectors, that are found by their number i: how many, the argument that says so,
    statements that find the point's coordinates and its number among all, and what these are
    called."""

    points: int
    total: str
    found: list[str]
    names: list[str]
    number: str


@dataclass(slots=True)
class ResultLoop:
    """How results of a reduction are made: what is declared first, a loop's body, and how often
    that is to run."""

    declared: list[str]
    work: list[str]
    units: int


class Schedule:
    """What is decided of a kernel before its text is written."""

    def __init__(self, kernel: Kernel, aligned: bool, processors: int, writes: bool):
        self.kernel, self.aligned, self.processors = kernel, aligned, processors
        self.writes = writes  # whether its outputs begin at multiples of a vector
        self.width = self.times = 1  # elements side by side, and how many times over
        self.deeper = self.heavy = False
        self.at_once = 1  # blocks that a multiprocessor shall have room for
        self.sliding = 0  # results of windows that a thread makes, one behind the other
        self.pane: RowTile | None = None
        self.down_axis = -1  # along which the rows of a pane lie
        self.either: dict[int, Any] = {}  # see `_find_either`
        self.gone: set[int] = set()
        self.slots = ArgumentSlots()
        self.constants = 0  # among them
        self.pointers: dict[int, tuple[int, int]] = {}  # slot -> array number and offset
        self.scratch: tuple[int, int] | None = None
        self.counters: tuple[int, int] | None = None
        self.units = 0  # parts in which warps pick out what a mask selects
        self.reducing, self.scanning = bool(kernel.reductions), kernel.scans
        self.structs: list[str] = []
        self.calls: dict[str, DeviceCall] = {}
        self.outs = [code_of(o) for o in kernel.outputs]
        if self.reducing:
            self._reductions()
            self.final = NodeTree(kernel.outputs, "f")
        else:
            self.evaluated = list(kernel.outputs)
            self.tree = self.final = NodeTree(kernel.outputs, "v")
        self._interior()
        self._space()

    # ---- what is reduced

    def _reductions(self) -> None:
        roots = []
        names: dict[str, str] = {}  # of accumulators, by their text
        self.kinds: list[tuple[str, str, list[str]]] = []  # operation, what it takes, results
        for j, r in enumerate(self.kernel.reductions):
            gives = []
            for d in r.dtypes:
                short = code(np.dtype(d))
                if short is None:
                    raise NotGenerated(f"{r.op} that gives {d}")
                gives.append(short)
            if r.op == "histogram":
                assert len(self.kernel.reductions) == 1
                if reason := too_many(self.kernel):
                    raise NotGenerated(reason)
                roots.append(r.arg)
                self.kinds.append((r.op, code_of(r.arg), gives))
                continue
            op = SCANS.get(r.op, r.op)
            found = accumulator(op, code_of(r.arg), gives[0], f"Part{j}", r.op in SCANS)
            if found is None:
                raise NotGenerated(f"{r.op} of {r.arg.dtype}")
            text, takes = found
            # the compiler does what it does for a type once
            alike = names.setdefault(text.replace(f"Part{j}", ""), f"Part{j}")
            self.structs.append(text if alike == f"Part{j}" else f"typedef {alike} Part{j};")
            taken = r.arg if code_of(r.arg) == takes else Expr("cast", (r.arg,), dtype_of(takes))
            roots.append(taken)
            self.kinds.append((op, takes, gives))
        self.evaluated = roots
        self.tree = NodeTree(roots, "v")

    def _interior(self) -> None:
        """Where conditions on indices guard loads, most points may lie where it is known which of
        them hold: there less is to be done."""
        self.core: NodeTree | None = None
        # where only some axes are known to be in the core: a group of them, or the last one of a
        # group ("last") and the others of it ("others")
        self.partly: dict[str, NodeTree] = {}
        self.apart: dict[str, NodeTree] = {}
        self.within: list[tuple[int, int, int]] = []  # axis, first, length: where the core lies
        if self.scanning or all(g is None for g in self.tree.guards.values()):
            return
        found = interior(self.evaluated, self.kernel.shape)
        if found is None:
            return
        box, roots = found
        core = NodeTree(roots, "c")
        if 2 * len(core.nodes) <= len(self.tree.nodes):
            self.core = core
            for k, ((low, high), n) in enumerate(zip(box, self.kernel.shape, strict=True)):
                if high - low < n:
                    self.within.append((k, low, high - low))

    def _within(self, group: str) -> list[tuple[int, int, int]]:
        """Where the core lies along some axes: the number of one, its first point and length."""
        return [x for x in self.within if x[0] in self.groups[group]]

    @property
    def bodies(self) -> list[NodeTree]:
        """What is evaluated at each point."""
        if self.scanning:
            return [self.tree, self.final]
        core = [self.core] if self.core is not None else []
        return list(dict.fromkeys([self.tree, *self.partly.values(), *self.apart.values(), *core]))

    @property
    def trees(self) -> list[NodeTree]:
        return list(dict.fromkeys([*self.bodies, self.final]))

    # ---- axes

    def _space(self) -> None:
        """Sort the axes into those that are kept and those that are reduced, the fastest one of
        all last in its group, and merge what can be merged."""
        kernel, rank = self.kernel, len(self.kernel.shape)
        axes = set(kernel.axes) if self.reducing else set()
        kept = [k for k in range(rank) if k not in axes]
        over = [k for k in range(rank) if k in axes]
        self.layouts: dict[tuple[int, ...], int] = {}
        self.moved: set[int] = set()  # layouts of memory, not of indices alone
        self.layout_of: dict[tuple[str, int], int] = {}  # letter and node

        def layout(strides: Sequence[int], memory: bool) -> int:
            n = self.layouts.setdefault(tuple(strides), len(self.layouts))
            if memory:
                self.moved.add(n)
            return n

        for tree in self.trees:
            for k in (*tree.inputs, *tree.indices):
                strides = self._leaf_strides(tree, k, kept)
                self.layout_of[tree.letter, k] = layout(strides, tree.nodes[k].op == "input")
        self.axis_layout = {
            k: layout([int(a == k) for a in range(rank)], False) for k, _, _ in self.within
        }
        self.points = math.prod(kernel.shape[k] for k in kept)
        self.reach = math.prod(kernel.shape[k] for k in over)
        last, order = self._fastest(kept, over)
        panes = self._panes(kept, over)
        slides = self._slides(kept, over, last) if panes is None else None
        if panes is not None:
            last = panes[-1][0]
        if slides is not None:
            order = [slides[1], *[k for k in order if k != slides[1]]]
        if self.sliding:
            self.core, self.within, self.axis_layout = None, [], {}
        self.out_layout = -1  # where outputs lie one behind the other
        if kernel.strides is not None:
            assert self.scanning or not self.reducing
            self.out_layout = layout(kernel.strides, True)
        elif self.reducing:
            whole = range(rank) if self.scanning else kept
            self.out_layout = layout(counting_strides(kernel.shape, whole), True)
        if any(r.op in ("argmin", "argmax") for r in kernel.reductions):
            self.position = layout(counting_strides(kernel.shape, over), False)
        layouts = list(self.layouts)
        self.rows = last in over or not kept or self.points == 1 or kernel.counts
        self.groups = {"k": kept, "r": order}
        if last in kept:
            self.groups["k"] = [*[k for k in kept if k != last], last]
        self.axes: dict[str, list[LoopAxis]] = {}
        for name, ks in self.groups.items():
            if 0 in (kernel.shape[k] for k in ks):
                self.axes[name] = [LoopAxis(0, (0,) * len(layouts))]
            else:
                every = [LoopAxis(kernel.shape[k], tuple(s[k] for s in layouts)) for k in ks]
                self.axes[name] = collapse_axes(every)
        self.along = "r" if self.reducing and self.rows else "k"
        self._tiles()
        self._width()
        if slides is not None:
            self._slide(slides)
        if panes is not None:
            self._lie_in_panes(panes)
        if self.sliding:
            self._find_either()
        self._panels()
        self._small()

    def _may_slide(self) -> list[tuple[int, ...]] | None:
        """The layouts of all that is reduced, where it may be put together in parts."""
        orders = any(r.op in ("argmin", "argmax", "histogram") for r in self.kernel.reductions)
        tree = self.tree
        if not self.reducing or self.scanning or orders or tree.taken or tree.calls:
            return None
        if len(tree.nodes) > MOST_SLIDING_NODES or not self.points:
            return None
        every = {self.layout_of[tree.letter, k] for k in (*tree.inputs, *tree.indices)}
        return [s for s, n in self.layouts.items() if n in every]

    def _panes(self, kept: list[int], over: list[int]) -> list[tuple[int, int]] | None:
        """The axes along which windows slide and reach, where one of them, the last, is that along
        which elements lie one behind the other, and that before it that down which columns lie, if
        there are any: what is reduced goes to shared memory."""
        layouts, shape = self._may_slide(), self.kernel.shape
        over = [r for r in over if shape[r] > 1]
        if layouts is None or not over or self.points < LEAST_IN_PANES:
            return None
        pairs, rest = [], []
        for r in over:
            along = [a for a in kept if all(s[a] == s[r] for s in layouts)]
            if along and any(s[r] for s in layouts):
                pairs.append((along[0], r))
            else:
                rest.append(r)
        memory = {n for k in self.tree.inputs for n in [self.layout_of[self.tree.letter, k]]}
        inputs = [s for s, n in self.layouts.items() if n in memory]
        fast = [(a, r) for a, r in pairs if any(abs(s[a]) == 1 for s in inputs)]
        if len(fast) != 1 or len({a for a, _ in pairs}) < len(pairs):
            return None
        # what lies in a column is put together first: of the longest windows
        slow = sorted([p for p in pairs if p not in fast], key=lambda p: (shape[p[1]], p[0]))
        pairs = [*slow, *fast]
        self._choose_pane(kept, pairs, rest)
        self.sliding = 0 if self.pane is None else self.pane.some
        return None if self.pane is None else pairs

    def _choose_pane(self, kept: list[int], pairs: list[tuple[int, int]], rest: list[int]) -> None:
        """A box where windows slide down columns, too, if there is room, or a pane where there is
        nothing else."""
        shape, (a, r) = self.kernel.shape, pairs[-1]
        if len(pairs) > 1:
            rows, down = pairs[-2][0], shape[pairs[-2][1]]
        else:
            others = [k for k in kept if k != a and shape[k] > 1]
            rows, down = others[-1] if others else -1, 1
        high = shape[rows] if rows >= 0 else 1
        windows = window_tiles.WindowShape(
            along=shape[a], rows=high, planes=self.points // (shape[a] * high), window=shape[r],
            down=down, deep=math.prod(shape[k] for k in (*rest, *[r for _, r in pairs[:-2]])),
            made=sum(held_size(g) for _, _, gives in self.kinds for g in gives),
            moments=any(op == "moment" for op, _, _ in self.kinds),
        )  # fmt: skip
        if len(pairs) > 1:
            held = words = 0
            for j, kind in enumerate(self.kinds):
                if own := len(self._members(j)):
                    held += 8 * own
                    words += 2 * (own - own // len(MOMENT))  # all deviate from the same
                else:
                    held += part_size(*kind)
                    words += part_size(*kind) // 4
            reads = 8 + sum(cost_of(n) for n in self.tree.nodes)
            self.pane = window_tiles.box(windows, held, words, reads, self.processors)
        if self.pane is None and not rest and len(pairs) <= 2:
            values = {root: held_size(short) for root, (_, short, _) in
                      zip(self.tree.roots, self.kinds, strict=True)}  # fmt: skip
            self.pane = window_tiles.pane(windows, sum(values.values()), self.processors)
        self.down_axis = rows

    def _lie_in_panes(self, pairs: list[tuple[int, int]]) -> None:
        """Put the axes that panes lie along last."""
        assert self.pane is not None
        (a, r), rows, layouts = pairs[-1], self.down_axis, list(self.layouts)

        def axis(k: int) -> LoopAxis:
            if k < 0:
                return LoopAxis(1, (0,) * len(layouts))
            return LoopAxis(self.kernel.shape[k], tuple(s[k] for s in layouts))

        self.width, self.times, self.at_once = 1, 4, 1
        within = self._core_of_panes(pairs)
        others = [k for k in self.groups["k"] if k not in (a, rows)]
        places = {k: n for n, k in enumerate([*others, rows, a])}
        every = [axis(k) for k in others]
        if not any(k in within for k in others):
            every = collapse_axes(every)
            places = {rows: len(every), a: len(every) + 1}
        self.within_panes = {places[k]: bounds for k, bounds in within.items()}
        self.axes["k"] = [*every, axis(rows), axis(a)]
        self.axes["r"] = [axis(r)]
        if isinstance(self.pane, ColumnTile):
            gone = {r for _, r in pairs[-2:]}
            self.axes["r"] = collapse_axes(axis(k) for k in self.groups["r"] if k not in gone)

    def _core_of_panes(self, pairs: list[tuple[int, int]]) -> dict[int, tuple[int, int, int]]:
        """Where it is known of all points of a pane what is chosen there by position: that and
        whether there are such points is not asked of each then. By axis the first one and the end
        of these points, and how many of them a pane has."""
        assert self.pane is not None
        shape = list(self.kernel.shape)
        for a, r in pairs:
            shape[a], shape[r] = shape[a] + shape[r] - 1, 1
        box, roots = interior(self.evaluated, tuple(shape)) or (None, self.evaluated)
        box = box or tuple([(0, n) for n in shape])
        core = NodeTree(roots, "c")
        rows, along = self.down_axis, pairs[-1][0]
        reaches = {a: self.kernel.shape[r] for a, r in pairs}
        cut = [k for k, n in enumerate(shape) if k not in (rows, along) and box[k] != (0, n)]
        leaves = {k: self._leaf_strides(core, k, ()) for k in (*core.inputs, *core.indices)}
        if any(k not in reaches for k in cut) or not all(
            s in self.layouts for s in leaves.values()
        ):
            return {}
        self.core = core
        self.layout_of |= {(core.letter, k): self.layouts[s] for k, s in leaves.items()}
        within = {along: (*box[along], self.pane.wide)} | {k: (*box[k], reaches[k]) for k in cut}
        return within if rows < 0 else within | {rows: (*box[rows], self.pane.high)}

    def _find_either(self) -> None:
        """Values that are one of several inputs, by what is known from the index: such a one is a
        single load, from a place that is chosen. `either` has the conditions and inputs of each
        (condition, one, other), by the first of the inputs and by the node, which has then what
        that input has; `gone` are the other nodes that nobody wants any longer."""
        tree = self.tree
        uses = [0] * len(tree.nodes)
        for n in tree.nodes:
            for a in n.args:
                uses[a] += 1
        for root in tree.roots:
            uses[root] += 1

        def known(op: str, *args: int) -> int:
            return tree._known.get((op, "b1", args, None), -1)

        def both(guard: int | None, condition: int) -> int:
            return condition if guard is None else known("logical_and", guard, condition)

        def of(k: int, guard: int | None, leaves: list[int], wheres: list[int]) -> Any:
            node = tree.nodes[k]
            if node.op == "input" and uses[k] == 1 and tree.guards[k] == guard:
                leaves.append(k)
                return k
            if node.op != "where" or tree.values[node.args[0]] or (wheres and uses[k] > 1):
                return None
            wheres.append(k)
            c, a, b = node.args
            one = of(a, both(guard, c), leaves, wheres)
            other = of(b, both(guard, known("logical_not", c)), leaves, wheres)
            return None if one is None or other is None else (c, one, other)

        for k in range(len(tree.nodes) - 1, -1, -1):
            leaves: list[int] = []
            wheres: list[int] = []
            if k in self.gone or tree.nodes[k].op != "where":
                continue
            found = of(k, None, leaves, wheres)
            if found is not None and len({self._kind(tree, n) for n in leaves}) == 1:
                self.either[k] = self.either[leaves[0]] = found
                self.gone |= {*leaves[1:], *wheres[1:]}

    def _slides(self, kept: list[int], over: list[int], last: int) -> tuple[int, int] | None:
        """The axes along which windows slide and reach, where there are any, and how many results
        a thread makes along the first (`sliding`): those along which all that is reduced goes
        alike."""
        layouts, shape = self._may_slide(), self.kernel.shape
        if layouts is None or last not in kept:
            return None
        found = [
            (shape[r], a, r)
            for a in kept
            for r in over
            if a != last and all(s[a] == s[r] for s in layouts) and any(s[a] for s in layouts)
        ]
        window, a, r = max(found, default=(0, -1, -1))
        room = self._sliding_room()
        some = power_below(min(MOST_SLIDING, window, shape[a], room))
        if not found or some < LEAST_SLIDING:
            return None
        self.sliding = some
        return a, r

    def _sliding_room(self) -> int:
        """Results that a thread may have, so that there are enough threads."""
        return self.points // (SLIDING_THREADS * self.processors)

    def _slide(self, slides: tuple[int, int]) -> None:
        """Put the axis along which windows slide before the last one, of which a part goes in a
        tile, so that threads which read the same do so at the same time."""
        a, r = slides
        layouts, shape = list(self.layouts), self.kernel.shape
        words = 0  # that each part has of its own
        for op, short, gives in self.kinds:
            words += part_size(op, short, gives) // (8 if op == "moment" else 4)
        room = self._sliding_room()
        self.width = min(self.width, 4 if self.sliding == LEAST_SLIDING else 2)

        def fits(some: int, width: int) -> bool:
            registers = (some - 1) * width * words <= SLIDING_WORDS
            text = 2 * some * width * len(self.tree.nodes) <= SLIDING_STATEMENTS
            return registers and text and some * width <= room

        while self.width > 1 and not fits(self.sliding, self.width):
            self.width //= 2
        while self.sliding > LEAST_SLIDING and not fits(self.sliding, self.width):
            self.sliding //= 2
        self.times = 4 if self.sliding == LEAST_SLIDING else 8
        self.at_once = 1

        def axis(k: int) -> LoopAxis:
            return LoopAxis(shape[k], tuple(s[k] for s in layouts))

        *others, fast = collapse_axes(axis(k) for k in self.groups["k"] if k != a)
        part = fast.length
        if part > limits.SLIDING_TILE:
            tiles = range(self.width, limits.SLIDING_TILE + 1, self.width)
            found = max([n for n in tiles if part % n == 0], default=0)
            part = found if found >= 32 else part
        if part < fast.length:
            others.append(LoopAxis(fast.length // part, tuple([s * part for s in fast.strides])))
        self.axes["k"] = [*others, axis(a), LoopAxis(part, fast.strides)]
        self.axes["r"] = [axis(r), *collapse_axes(axis(k) for k in self.groups["r"] if k != r)]

    def _leaf_strides(self, tree: NodeTree, k: int, kept: Sequence[int]) -> tuple[int, ...]:
        """The strides of a leaf along all axes, of which the outputs of a reduction have `kept`."""
        node, shape = tree.nodes[k], self.kernel.shape
        view: View = node.data[1] if node.op == "input" else node.data
        strides = list(view.strides)
        if self.reducing and tree is self.final and not self.scanning:
            spread = [0] * len(shape)
            for a, s in zip(kept, strides, strict=True):
                spread[a] = s
            strides = spread
        # along an axis of one point a stride means nothing
        return tuple([0 if n == 1 else s for n, s in zip(shape, strides, strict=True)])

    def _fastest(self, kept: list[int], over: list[int]) -> tuple[int, list[int]]:
        """The axis that threads lie along, and the order of the reduced ones."""
        shape = self.kernel.shape
        if not self.reducing:
            return (kept[-1] if kept else -1), []
        if self.scanning:  # along which it writes
            return max([k for k, n in enumerate(shape) if n > 1], default=over[-1]), over
        weights = dict.fromkeys(range(len(shape)), 0.0)
        dominant: tuple[int, ...] | None = None
        most = -1
        for tree_node in self.tree.inputs:
            node = self.tree.nodes[tree_node]
            strides = list(self.layouts)[self.layout_of[self.tree.letter, tree_node]]
            covered = math.prod(n for n, s in zip(shape, strides, strict=True) if s)
            for k, s in enumerate(strides):
                if abs(s) == 1:  # so many bytes lie one behind the other along it
                    weights[k] += int(node.code[1:]) * covered
            if covered > most:
                dominant, most = strides, covered
        for tree_node in self.tree.taken:
            strides = self._strides_beside(tree_node)
            for k, s in enumerate(strides):
                if abs(s) == 1:
                    weights[k] += int(self.tree.nodes[tree_node].code[1:]) * math.prod(shape)
            if math.prod(shape) > most:
                dominant, most = strides, math.prod(shape)
        long = [k for k in range(len(shape)) if shape[k] > 1]
        if not long:
            return (over[-1] if over else kept[-1] if kept else -1), over
        last = max(long, key=lambda k: (weights[k], k))
        if dominant is not None:
            steps = dominant
            over = sorted(over, key=lambda k: (-abs(steps[k]) if steps[k] else -(2**62), k))
        if last in over:
            over = [*[k for k in over if k != last], last]
        return last, over

    def _strides_beside(self, k: int) -> tuple[int, ...]:
        """The strides of an element that is taken, but for what its number is computed of."""
        place = self.tree.nodes[self.tree.nodes[k].args[0]]
        first = place.args[0] if place.op == "add" else self.tree.nodes[k].args[0]
        if self.tree.nodes[first].op != "index":
            return (0,) * len(self.kernel.shape)
        return list(self.layouts)[self.layout_of[self.tree.letter, first]]

    def _strides(self, layout: int, group: str) -> list[int]:
        return [a.strides[layout] for a in self.axes[group]]

    def _fast(self, layout: int) -> int:
        """The stride along the axis that threads lie along."""
        strides = self._strides(layout, self.along)
        return strides[-1] if strides else 0

    def _tiles(self) -> None:
        """Whether to go in tiles: a leaf lies along another axis than its readers."""
        self.turned: set[int] = set()  # layouts that are read turned around
        group = "r" if self.reducing else "k"
        axes = self.axes[group]
        self.across = -1
        if len(axes) < 2 or (self.reducing and self.axes["k"]) or axes[-1].length < 16:
            return
        if self.kernel.picks:
            return
        votes: dict[int, list[int]] = {}
        for k in self.tree.inputs:
            layout = self.layout_of[self.tree.letter, k]
            strides = self._strides(layout, group)
            fast = min((a for a, s in enumerate(strides) if s), default=-1,
                       key=lambda a: (abs(strides[a]), -a))  # fmt: skip
            if fast in (-1, len(axes) - 1) or axes[fast].length < 16 or abs(strides[fast]) > 4:
                continue
            if abs(strides[-1]) >= 8:
                votes.setdefault(fast, []).append(layout)
        if votes:
            self.across = max(votes, key=lambda a: (len(votes[a]), a))
            self.turned = set(votes[self.across])
            self.core, self.within = None, []

    def _width(self) -> None:
        """How many elements a thread takes side by side, and how many times over."""
        tree = self.tree
        every = [(body, k) for body in self.bodies for k in body.inputs]
        axes = self.axes[self.along]
        length = axes[-1].length if axes else 1
        outs = (self.scanning or not self.reducing) and not self.kernel.picks
        sizes = [size_of(c) for c in self.outs] if outs else []
        if self.reducing and not self.rows and self._fast(self.out_layout) == 1:
            sizes += [max(size_of(c), 4) for c in self.outs]
        plain = self.across < 0 and self.aligned
        if self.kernel.strides is not None:
            plain = plain and self._fast(self.out_layout) == 1
        for body, k in every:
            step = self._fast(self.layout_of[body.letter, k])
            if step == 1:
                sizes.append(size_of(body.nodes[k].code))
            plain = plain and step in (0, 1) and not self._varies(body, body.guards[k])
        plain = plain and not any(self._fast(n) for n in self.axis_layout.values())
        draws = [n for n in tree.nodes if n.op in RANDOM]
        if not sizes or (draws and not tree.inputs and self.reducing):
            sizes = [4 if any(n.code == "f4" for n in draws) else 8]
        width = max(1, min(8, 16 // min(sizes))) if plain else 1
        while width > 1 and not (length % width == 0 and self._even(width)):
            width //= 2
        most = tree if self.core is None else self.core  # where most points are
        cost, long = sum(cost_of(n) for n in most.nodes), self._length(most)
        while width > 2 and width * len(tree.nodes) > MOST_STATEMENTS // 8:
            width //= 2
        while not tree.calls and width > 1 and width * cost > MOST_COST:
            width //= 2
        while width > 1 and width * long > MOST_INSTRUCTIONS:
            width //= 2  # sooner than that long functions are called
        if tree.calls:  # each is there as often as a thread has elements, to be compiled anew
            again = any(tree.nodes[k].data[0].repeats for k in tree.calls)
            width = 1 if again else min(width, 4)  # loops do not run side by side
        columns = self.reducing and not self.rows and self.across < 0
        if columns and self.scanning and self.points // width < MANY_COLUMNS:
            width = 1  # or too few threads have a column
        columns = columns and not self.scanning
        moments = columns and any(r.op == "moment" for r in self.kernel.reductions)
        many = moments and width >= 4 and self.points >= MANY_COLUMNS and cost < 16
        if moments:  # each column keeps much in registers
            width = min(width, 4 if many else 2)
        self.width = width
        # three blocks at least on each multiprocessor, or too few loads are under way
        self.at_once = 2 if many else 3 if columns else 1
        each = sum(
            size_of(most.nodes[k].code)
            * (width if self._fast(self.layout_of[most.letter, k]) else 1)
            for k in most.inputs
        )
        deep = columns or (self.scanning and width == 1)
        times = 8 if many or (deep and each <= 8) else 4
        while times > 1 and (times * each > (128 if many else 64) or times * width * cost > 512):
            times //= 2
        while times > 1 and times * width * long > MOST_INSTRUCTIONS:
            times //= 2
        self.times = times if tree.inputs else 1
        #: Whether a block along a row that does four things at a time may do eight.
        self.deeper = each <= 16 and 8 * width * cost <= MOST_COST and self.across < 0
        self.deeper = self.deeper and 8 * width * long <= MOST_INSTRUCTIONS
        #: Whether it computes for longer than it reads and writes.
        self.heavy = cost >= HEAVY and not tree.calls
        #: Whether inputs are loaded where they are used, and not all of them before.
        self.late = each > LATE_BYTES and self.core is None and self.across < 0
        self.late = self.late and not (columns or self.scanning)
        self.late = self.late and all(tree.guards[k] is None for k in tree.inputs)
        if self.late:
            self.width = self.times = 1
        #: Whether vectors are written of what is read one by one.
        self.loose = self.width == 1 and not self.late and self._may_be_loose(cost)
        if self.loose:
            self.width, self.times = self._loose_width(), 1
            each *= self.width
            self.at_once = min(self.at_once, 2) if each <= 2 * FEW_BYTES else 1
            room = each <= FEW_BYTES < 4 * len(tree.inputs) and self.core is not None
            if room and not columns and self.points > 1:
                self.at_once = 4  # registers are for the core: what is beyond it may spill
            self._take_apart()
        else:
            self.partly = {}

    @staticmethod
    def _length(tree: NodeTree) -> int:
        """The instructions of the long functions of a point."""
        total = 0
        for node in tree.nodes:
            if node.args and cost_of(node) > 1 and node.op != "call":
                types = [tree.nodes[a].code for a in node.args]
                text = operation(node.op, types, node.code, ["x"] * len(types))
                total += length_of(text or "")
        return total

    def _may_be_loose(self, cost: int) -> bool:
        """Whether threads take neighbours side by side although what they read does not begin at
        multiples of a vector, or ends within one: edges and shifts. They read it one by one then,
        each element once, and write vectors."""
        if self.across >= 0 or cost > LOOSE_COST or self.scanning:
            return False
        if self.kernel.counts or self.kernel.picks:
            return False
        if self.sliding:
            return False
        main, axes = self.bodies[-1], self.axes[self.along]
        if any(n.op in (*RANDOM, "taken", "call") for tree in self.bodies for n in tree.nodes):
            return False
        if not main.inputs or not axes or axes[-1].length < LOOSE_LEAST:
            return False
        sizes = [size_of(c) for c in self.outs]
        if self.reducing:
            often = len(main.inputs) >= OFTEN * len({main.nodes[k].data[0] for k in main.inputs})
            fits = (often or self.core is not None) and self.points * self.reach > MANY_STEPS
            fits = fits and (self.rows or self.writes) and self._may_leave_the_core()
        elif self.out_layout >= 0:
            fits = self._even_rows(self._loose_width())
        else:
            fits = not any(n * self.points <= limits.CLOSE and n * self.points % 16 for n in sizes)
        if not fits or not (self.reducing or (self.writes and max(sizes) <= 8)):
            return False
        return all(
            abs(self._fast(self.layout_of[main.letter, k])) <= 1 and main.guards[k] is None
            for k in main.inputs
        )

    def _may_leave_the_core(self) -> bool:
        """Whether a reduction's results, or what is reduced, may lie beyond the core along some
        axes while vectors lie in it along the others: with the bodies `partly`."""
        along, across = ("r", "k") if self.rows else ("k", "r")  # vectors lie along the first
        for group in (along, across) if self._within(across) else ():
            if group != along and not self._within(along):
                continue  # no point of these lies beyond the core along the others
            tree = self._settled(self._within(group), {"k": "a", "r": "b"}[group])
            self.partly[group] = tree
            if group == along and not self._side_by_side(tree):
                return False
        return True

    def _settled(self, within: Iterable[tuple[int, int, int]], letter: str) -> NodeTree:
        """What is evaluated where points are known to be in the core along some axes."""
        box = [(0, n) for n in self.kernel.shape]
        for k, low, length in within:
            box[k] = low, low + length
        tree = NodeTree(simplify_in_box(self.evaluated, tuple(box)), letter)
        for k in (*tree.inputs, *tree.indices):
            self.layout_of[letter, k] = self.layouts[self._leaf_strides(tree, k, ())]
        return tree

    def _side_by_side(self, tree: NodeTree) -> bool:
        """Whether a tree's inputs can be read for the points of a vector at once."""
        return all(
            abs(self._fast(self.layout_of[tree.letter, k])) <= 1
            and not self._varies(tree, tree.guards[k])
            for k in tree.inputs
        )

    def _take_apart(self) -> None:
        """Points beyond the core are of three kinds, where vectors lie in rows: those that are in
        it along the last axis, and come as vectors; those that are in it along all others; and the
        few that are left."""
        down = self.reducing and not self.rows
        if self.core is None or self.partly or down or not self._even_vectors():
            return
        within, last = self._within(self.along), self._fast_axis()
        fast, others = [x for x in within if x[0] == last], [x for x in within if x[0] != last]
        tree = self._settled(fast, "a") if fast else self.tree
        if not others or not self._side_by_side(tree):
            return
        self.apart = {"last": tree}
        if fast or self.axes[self.along][-1].length % self.width:
            self.apart["others"] = self._settled(others, "b")

    def _fast_axis(self) -> int:
        """The kernel's axis that vectors lie along, if the core ends along it; or -1."""
        return next((k for k, n in self.axis_layout.items() if self._fast(n)), -1)

    def _by_row(self) -> bool:
        """Whether vectors that are read anyhow begin with each row of the output."""
        return self.along == "k" and self.out_layout >= 0 and not self.reducing

    def _even_vectors(self) -> bool:
        """Whether vectors that are read anyhow lie in rows, of which the last may not be whole."""
        return self._by_row() or self.axes[self.along][-1].length % self.width == 0

    def _loose_width(self) -> int:
        main, columns = self.bodies[-1], self.reducing and not self.rows
        sizes = [size_of(main.nodes[k].code) for k in main.inputs]
        sizes += [size_of(c) for c in self.outs if columns or not self.reducing]
        width = max(2, min(4, 16 // max(sizes)))
        if columns:  # each thread has the results of a vector
            if any(r.op == "moment" for r in self.kernel.reductions):
                width = min(width, 2)
            length = self.axes["k"][-1].length
            even = max(sizes) <= 8 and self._fast(self.out_layout) == 1
            while width > 1 and not (even and length % width == 0 and self._even_rows(width)):
                width //= 2
        return width

    def _panels(self) -> None:
        """Go through all rows of a part of the columns, then of the next part, where each row reads
        what is the same in all: of so many columns that this stays in a multiprocessor's cache."""
        axes, tree = self.axes["r"], self.tree
        whole = self.reducing and self.points == 1 and not (self.scanning or self.kernel.counts)
        if not whole or self.across >= 0 or len(axes) < 2 or axes[0].length == 0 or self.loose:
            return
        odd = any(n.op in (*RANDOM, "taken") for n in tree.nodes)
        if odd or any(tree.guards[k] is not None for k in tree.inputs):
            return
        each = 0  # bytes of a column that all rows read
        for k in tree.inputs:
            *others, last = self._strides(self.layout_of[tree.letter, k], "r")
            each += size_of(tree.nodes[k].code) * bool(last and not any(others))
        columns = axes[-1].length
        if each * columns <= KEPT_BYTES:
            return
        unit = max(self.width, 2)
        most = KEPT_BYTES // each // unit * unit
        for part in range(most, LEAST_COLUMNS - 1, -unit):
            if columns % part == 0:
                fast = axes[-1].strides
                far = LoopAxis(columns // part, tuple([s * part for s in fast]))
                self.axes["r"] = [far, *axes[:-1], LoopAxis(part, fast)]
                return

    def _varies(self, tree: NodeTree, condition: int | None) -> bool:
        """Whether a condition on indices may differ between neighbours along the fastest axis."""
        return condition is not None and any(
            tree.nodes[k].op == "index" and self._fast(self.layout_of[tree.letter, k])
            for k in tree.below([condition])
        )

    def _even(self, width: int) -> bool:
        """Whether such vectors begin at multiples of what is loaded at a time."""
        every = [(body, k) for body in self.bodies for k in body.inputs]
        even = all(
            self._fast(self.layout_of[tree.letter, k]) != 1 or self._read_evenly(tree, k, width)
            for tree, k in every
        )
        return even and (self.kernel.strides is None or self._even_rows(width))

    def _read_evenly(self, tree: NodeTree, k: int, width: int) -> bool:
        """Whether vectors that begin at multiples along the fastest axis do so in an input, where
        elements lie one behind the other along that axis."""
        layout, node = self.layout_of[tree.letter, k], tree.nodes[k]
        size = size_of(node.code)
        others = self._strides(layout, "k") + self._strides(layout, "r")
        others.remove(1)
        steps = (*others, node.data[1].offset)
        return not any(s * size % min(16, width * size) for s in steps)

    def _begins_evenly(self, tree: NodeTree, k: int) -> bool:
        """The same of one of those inputs that are read anyhow."""
        if not self.aligned or self._fast(self.layout_of[tree.letter, k]) != 1:
            return False
        axes = self.axes[self.along]
        rows = len(axes) == 1 or self._even_vectors()
        return rows and self._read_evenly(tree, k, self.width)

    def _even_rows(self, width: int) -> bool:
        """Whether each row of the outputs begins at a multiple of such a vector."""
        others = self._strides(self.out_layout, "k") + self._strides(self.out_layout, "r")
        if self._fast(self.out_layout) != 1:
            return False
        others.remove(1)
        sizes = [size_of(c) for c in self.outs]
        return not any(s * n % min(16, width * n) for n in sizes for s in others)

    def _small(self) -> None:
        """Whether 32 bits are enough to count points and elements."""
        furthest = max(self.points, self.reach)
        for n in self.moved:
            span = sum(
                abs(a.strides[n]) * (a.length - 1) for axes in self.axes.values() for a in axes
            )
            furthest = max(furthest, span)
        self.small = furthest < SMALL
        self.int = "int" if self.small else "long long"
        self.count = "unsigned" if self.small else "unsigned long long"

    # ---- values

    def slot(self, name: Any, value: int = 0) -> str:
        return f"S({self.slots.at(name, value)})"

    def number(self, name: Any, value: int) -> str:
        """An argument that counts."""
        return f"({self.count}){self.slot(name, value)}"

    def _hoisted(self, tree: NodeTree, k: int, groups: Iterable[str]) -> bool:
        """Whether an input is the same for all points along these axes."""
        layout = self.layout_of[tree.letter, k]
        still = not any(any(self._strides(layout, g)) for g in groups)
        return still and tree.guards[k] is None

    def _vector(self, tree: NodeTree, k: int) -> bool:
        return (
            self.width > 1
            and tree in self.bodies
            and abs(self._fast(self.layout_of[tree.letter, k])) == 1
        )

    def _kind(self, tree: NodeTree, k: int) -> str:
        stored_as = STORED[tree.nodes[k].code]
        return f"Vec<{stored_as}, {self.width}>" if self._vector(tree, k) else stored_as

    def _members(self, j: int) -> list[str]:
        """What a moment consists of but for its count, which is known. Each lies in an array of its
        own: threads read from different banks then."""
        op, short, _ = self.kinds[j]
        if op != "moment":
            return []
        return (
            [f"{x}.{m}" for x in ("real", "imag") for m in MOMENT] if short[0] == "c" else [*MOMENT]
        )


def too_many(kernel: Kernel) -> str | None:
    """Why a kernel has no room for a histogram, if so."""
    bins, most = kernel.shape[0], MOST_WEIGHTS if kernel.weighs else MOST_BINS
    what = "histogram of weights" if kernel.weighs else "histogram"
    return f"a {what} of {bins:,} bins, more than {most:,}" if bins > most else None


def counting_strides(shape: Sequence[int], axes: Iterable[int]) -> list[int]:
    """Strides that number the points along some axes in C order.

    >>> counting_strides((4, 5, 1, 3), (0, 2, 3))
    [3, 0, 0, 1]
    """
    strides, step = [0] * len(shape), 1
    for k in reversed(list(axes)):
        strides[k] = step if shape[k] > 1 else 0
        step *= max(shape[k], 1)
    return strides


def power_above(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()


def power_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
