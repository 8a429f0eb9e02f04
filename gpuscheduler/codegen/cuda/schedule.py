"""The schedule of a kernel: loop order, vector width, tiles and windows.

`Schedule` decides before any text is written. It sorts and merges the axes; `vectorize` chooses
the vector width and `window_schedule` how windows slide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import NotGenerated
from ...ir.expr import RANDOM, SCANS, Expr, Kernel
from ...ir.regions import interior
from . import vectorize, window_schedule
from .loop_space import LoopAxis, LoopSpace, collapse_axes, counting_strides
from .nodes import DeviceCall, NodeTree, code_of, dtype_of, size_of
from .operations import accumulator, code

#: Blocks per multiprocessor: so many that the end of the last ones does not matter.
WAVES = 128
#: Blocks per multiprocessor where each has a table in shared memory.
SHARED_WAVES = 32
#: Bytes of columns that a multiprocessor's cache holds beside everything else.
KEPT_BYTES = 96 * 1024
#: Least columns of a part that a warp goes along at a time.
LEAST_COLUMNS = 64
#: Bytes of shared memory for tiles, of 48 KiB.
TILES = 40 * 1024
#: Most bins of a histogram whose counters fit there.
MOST_BINS = TILES // 4
#: Counters of a block, where a histogram has few bins.
COUNTERS = 4096
#: Most bins of a histogram of weights whose sums fit there.
MOST_WEIGHTS = TILES // 8
#: Most bins of a histogram of weights that has a table for each warp.
FEW_WEIGHTS = 2048
#: Points and elements that 32 bits count, with room for some steps more.
SMALL = 2**31 - 2**27


class ArgumentSlots:
    """The 64-bit arguments of one item of a launch, by name."""

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
    """Where a piece of code lies in the loops: the names of its coordinates."""

    #: Name of the coordinate along a loop, by the loop's group and its number there.
    coords: dict[tuple[str, int], str]
    #: Name of a point's number within a group, by group.
    linear: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class PointRange:
    """Points, or vectors, that code finds by their number i."""

    #: How many there are.
    points: int
    #: The argument that holds this number.
    total: str
    #: Statements that find a point's coordinates and its number among all points.
    found: list[str]
    #: Names of the coordinates.
    names: list[str]
    #: Name of the number among all points.
    number: str


@dataclass(slots=True)
class ResultLoop:
    """How a reduction's results are made: declarations, the body of a loop, and its length."""

    #: Statements before the loop.
    declared: list[str]
    #: The loop's body.
    work: list[str]
    #: How often the body runs.
    units: int


class Schedule(LoopSpace):
    """All that is decided of a kernel before its text is written."""

    def __init__(self, kernel: Kernel, aligned: bool, processors: int, writes: bool):
        super().__init__(kernel, aligned, processors, writes)
        self.slots = ArgumentSlots()
        #: How many of the slots are constants.
        self.constants = 0
        #: Array number and offset of a pointer, by slot.
        self.pointers: dict[int, tuple[int, int]] = {}
        self.scratch: tuple[int, int] | None = None
        self.counters: tuple[int, int] | None = None
        #: Parts in which warps pick out what a mask selects.
        self.units = 0
        self.structs: list[str] = []
        self.calls: dict[str, DeviceCall] = {}
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
        self.kinds = []
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
        """Find the core: a box of points where conditions on indices that guard loads are known.

        Most points lie there, and less is to be computed for them.
        """
        self.core, self.partly, self.apart, self.within = None, {}, {}, []
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

    # ---- axes

    def _space(self) -> None:
        """Order and merge the axes, and decide on tiles, windows and vectors.

        Axes are kept or reduced. The fastest axis of all is the last in its group.
        """
        kernel, rank = self.kernel, len(self.kernel.shape)
        axes = set(kernel.axes) if self.reducing else set()
        kept = [k for k in range(rank) if k not in axes]
        over = [k for k in range(rank) if k in axes]
        self.layouts, self.moved, self.layout_of = {}, set(), {}

        def layout(strides: Sequence[int], memory: bool) -> int:
            n = self.layouts.setdefault(tuple(strides), len(self.layouts))
            if memory:
                self.moved.add(n)
            return n

        for tree in self.trees:
            for k in (*tree.inputs, *tree.indices):
                strides = self.leaf_strides(tree, k, kept)
                self.layout_of[tree.letter, k] = layout(strides, tree.nodes[k].op == "input")
        self.axis_layout = {
            k: layout([int(a == k) for a in range(rank)], False) for k, _, _ in self.within
        }
        self.points = math.prod(kernel.shape[k] for k in kept)
        self.reach = math.prod(kernel.shape[k] for k in over)
        last, order = self._fastest(kept, over)
        panes = window_schedule.find_tile_axes(self, kept, over)
        slides = (
            window_schedule.find_sliding_axes(self, kept, over, last) if panes is None else None
        )
        if panes is not None:
            last = panes[-1][0]
        if slides is not None:
            order = [slides[1], *[k for k in order if k != slides[1]]]
        if self.sliding:
            self.core, self.within, self.axis_layout = None, [], {}
        self.out_layout = -1
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
        self.axes = {}
        for name, ks in self.groups.items():
            if 0 in (kernel.shape[k] for k in ks):
                self.axes[name] = [LoopAxis(0, (0,) * len(layouts))]
            else:
                every = [LoopAxis(kernel.shape[k], tuple(s[k] for s in layouts)) for k in ks]
                self.axes[name] = collapse_axes(every)
        self.along = "r" if self.reducing and self.rows else "k"
        self._tiles()
        vectorize.choose_vector_width(self)
        if slides is not None:
            window_schedule.order_axes_for_sliding(self, slides)
        if panes is not None:
            window_schedule.order_axes_by_tile(self, panes)
        if self.sliding:
            window_schedule.merge_selected_loads(self)
        self._panels()
        self._choose_index_width()

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
        """The strides of an element taken by a computed index, without the computed part."""
        place = self.tree.nodes[self.tree.nodes[k].args[0]]
        first = place.args[0] if place.op == "add" else self.tree.nodes[k].args[0]
        if self.tree.nodes[first].op != "index":
            return (0,) * len(self.kernel.shape)
        return list(self.layouts)[self.layout_of[self.tree.letter, first]]

    def _tiles(self) -> None:
        """Decide whether to go in tiles: inputs lie along another axis than the outputs."""
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
            strides = self.strides(layout, group)
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

    def _panels(self) -> None:
        """Split long columns so that what all rows read stays in a multiprocessor's cache.

        The kernel goes through all rows of one part of the columns, then of the next part.
        """
        axes, tree = self.axes["r"], self.tree
        whole = self.reducing and self.points == 1 and not (self.scanning or self.kernel.counts)
        if not whole or self.across >= 0 or len(axes) < 2 or axes[0].length == 0 or self.loose:
            return
        odd = any(n.op in (*RANDOM, "taken") for n in tree.nodes)
        if odd or any(tree.guards[k] is not None for k in tree.inputs):
            return
        each = 0  # bytes of a column that all rows read
        for k in tree.inputs:
            *others, last = self.strides(self.layout_of[tree.letter, k], "r")
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

    def _choose_index_width(self) -> None:
        """Decide whether 32 bits are enough to count points and elements."""
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
        """The text of an argument."""
        return f"S({self.slots.at(name, value)})"

    def number(self, name: Any, value: int) -> str:
        """The text of an argument that counts points or elements."""
        return f"({self.count}){self.slot(name, value)}"

    def _is_hoisted(self, tree: NodeTree, k: int, groups: Iterable[str]) -> bool:
        """Whether an input is the same for all points along these axes."""
        layout = self.layout_of[tree.letter, k]
        still = not any(any(self.strides(layout, g)) for g in groups)
        return still and tree.guards[k] is None


def too_many(kernel: Kernel) -> str | None:
    """Why a histogram does not fit in shared memory, or None."""
    bins, most = kernel.shape[0], MOST_WEIGHTS if kernel.weighs else MOST_BINS
    what = "histogram of weights" if kernel.weighs else "histogram"
    return f"a {what} of {bins:,} bins, more than {most:,}" if bins > most else None
