"""The schedule of a kernel: all that is decided before any text is written.

`loop_order.make_schedule` makes one. It holds the loop order, vector width, tiles and windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...ir.expr import Kernel
from .loop_space import LoopAxis
from .nodes import NodeTree
from .operations import STORED
from .window_tiles import RowTile

#: The members of a moment without its count.
MOMENT = ("k", "sum", "squares")


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """A kernel, its loops, and how many elements each thread takes along them."""

    kernel: Kernel
    #: Whether inputs begin at multiples of a vector.
    aligned: bool
    #: Multiprocessors of the device.
    processors: int
    #: Whether outputs begin at multiples of a vector.
    writes: bool

    # ---- what is computed: see `kernel_values`

    #: Types of the outputs.
    outs: Sequence[str]
    #: Expressions that are evaluated at each point.
    evaluated: Sequence[Any]
    #: `evaluated` as nodes.
    tree: NodeTree
    #: The outputs as nodes: those of a reduction are computed after it.
    final: NodeTree
    #: For each reduction its operation, the type it takes and the types of its results.
    kinds: Sequence[tuple[str, str, list[str]]] = ()
    #: Types of accumulators that the text declares.
    structs: Sequence[str] = ()
    #: What is evaluated within the core, where conditions on indices are known; or None.
    core: NodeTree | None = None
    #: Where the core ends: axis of the kernel, first point, length.
    within: Sequence[tuple[int, int, int]] = ()
    #: What is evaluated where the core is left along the axes of one group only, by group.
    partly: Mapping[str, NodeTree] = field(default_factory=dict)
    #: What is evaluated within the core along the last axis of a group ("last"), or along all
    #: others ("others").
    apart: Mapping[str, NodeTree] = field(default_factory=dict)

    # ---- loops: see `loop_order`

    #: Number of each layout: strides along the kernel's axes.
    layouts: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    #: Numbers of the layouts of arrays in memory. Other layouts are of indices alone.
    memory_layouts: frozenset[int] = frozenset()
    #: Layout of an input or index, by the letter of its tree and its node.
    layout_of: Mapping[tuple[str, int], int] = field(default_factory=dict)
    #: Layout that counts along an axis where the core ends, by axis.
    axis_layout: Mapping[int, int] = field(default_factory=dict)
    #: Layout of the outputs, or -1 where they are contiguous.
    out_layout: int = -1
    #: Layout that numbers the reduced points, for the place of an extreme value; or -1.
    position: int = -1
    #: Number of points along the kept axes.
    points: int = 0
    #: Number of points along the reduced axes.
    reach: int = 0
    #: The kernel's axes that are kept ("k") and reduced ("r"), the fastest last.
    groups: Mapping[str, list[int]] = field(default_factory=dict)
    #: The loops of each group, with neighbouring axes merged.
    axes: Mapping[str, list[LoopAxis]] = field(default_factory=dict)
    #: Whether threads of a reduction lie along the reduced axes.
    rows: bool = False
    #: The loop that tiles turn with the fastest one, or -1.
    across: int = -1
    #: Layouts that tiles read turned around.
    turned: frozenset[int] = frozenset()
    #: Whether 32 bits count points and elements.
    small: bool = True

    # ---- vectors: see `vectorize` and `work_division`

    #: Neighbouring elements that a thread takes at a time.
    width: int = 1
    #: Vectors that a thread has under way at a time.
    times: int = 1
    #: Blocks that a multiprocessor shall have room for.
    at_once: int = 1
    #: Whether inputs are loaded where they are used, and not all of them before.
    loads_late: bool = False
    #: Whether vectors are written of inputs that are read one by one.
    loose: bool = False
    #: Results, or lines, of one thread at a time.
    held: int = 1
    #: Whether a whole block, not a warp, goes along a row.
    wide: bool = False

    # ---- windows: see `window_schedule`

    #: Pairs of axes along which windows of a tile slide and reach.
    tile_axes: Sequence[tuple[int, int]] | None = None
    #: Axes along which windows without a tile slide and reach.
    sliding_axes: tuple[int, int] | None = None
    #: Consecutive results of sliding windows that a thread makes, or 0.
    sliding: int = 0
    #: The tile of sliding windows in shared memory, or None.
    pane: RowTile | None = None
    #: The kernel's axis that the rows of a tile lie along, or -1.
    down_axis: int = -1
    #: First point and end of a tile's core, and points of a tile, by the number of the loop.
    within_panes: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    #: Loads from one of several inputs: see `window_schedule.merge_selected_loads`.
    either: Mapping[int, Any] = field(default_factory=dict)
    #: Nodes that such a load replaces.
    gone: frozenset[int] = frozenset()

    @property
    def reducing(self) -> bool:
        """Whether it reduces, or scans."""
        return bool(self.kernel.reductions)

    @property
    def scanning(self) -> bool:
        """Whether it scans."""
        return self.kernel.is_scan

    @property
    def thread_group(self) -> str:
        """The group that threads lie along."""
        return "r" if self.rows and self.kernel.reductions else "k"

    @property
    def index(self) -> str:
        """The type of coordinates and offsets."""
        return "int" if self.small else "long long"

    @property
    def count(self) -> str:
        """The type that counts points."""
        return "unsigned" if self.small else "unsigned long long"

    @property
    def bodies(self) -> list[NodeTree]:
        """What is evaluated at points: everywhere, in the core, and beside it."""
        if self.scanning:
            return [self.tree, self.final]
        core = [self.core] if self.core is not None else []
        return list(dict.fromkeys([self.tree, *self.partly.values(), *self.apart.values(), *core]))

    @property
    def trees(self) -> list[NodeTree]:
        """All bodies, and what is made of a reduction's results."""
        return list(dict.fromkeys([*self.bodies, self.final]))

    def core_bounds(self, group: str) -> list[tuple[int, int, int]]:
        """The axes of a group along which the core ends: axis, first point, length."""
        return [x for x in self.within if x[0] in self.groups[group]]

    def strides(self, layout: int, group: str) -> list[int]:
        """The strides of a layout along the loops of a group."""
        return [a.strides[layout] for a in self.axes[group]]

    def fast_stride(self, layout: int) -> int:
        """The stride along the axis that threads lie along."""
        strides = self.strides(layout, self.thread_group)
        return strides[-1] if strides else 0

    def varies(self, tree: NodeTree, condition: int | None) -> bool:
        """Whether a condition on indices may differ between neighbours along the fastest axis."""
        return condition is not None and any(
            tree.nodes[k].op == "index" and self.fast_stride(self.layout_of[tree.letter, k])
            for k in tree.nodes_below([condition])
        )

    def is_vector(self, tree: NodeTree, k: int) -> bool:
        """Whether an input is loaded as a vector."""
        return (
            self.width > 1
            and tree in self.bodies
            and abs(self.fast_stride(self.layout_of[tree.letter, k])) == 1
        )

    def type_of_load(self, tree: NodeTree, k: int) -> str:
        """The C++ type that an input is loaded as."""
        stored_as = STORED[tree.nodes[k].code]
        return f"Vec<{stored_as}, {self.width}>" if self.is_vector(tree, k) else stored_as

    def moment_members(self, j: int) -> list[str]:
        """The members of a moment without its count, which is known.

        Each has an array of its own, so that threads read from different banks of shared memory.
        """
        op, short, _ = self.kinds[j]
        if op != "moment":
            return []
        return (
            [f"{x}.{m}" for x in ("real", "imag") for m in MOMENT] if short[0] == "c" else [*MOMENT]
        )

    def has_moments(self) -> bool:
        """Whether means or variances are among what is reduced."""
        return any(op == "moment" for op, _, _ in self.kinds)

    def is_hoisted(self, tree: NodeTree, k: int, groups: Iterable[str]) -> bool:
        """Whether an input is the same for all points along these axes."""
        layout = self.layout_of[tree.letter, k]
        still = not any(any(self.strides(layout, g)) for g in groups)
        return still and tree.guards[k] is None

    def lengths(self, group: str, width: int) -> list[int]:
        """The lengths of a group's loops, the last one in vectors."""
        lengths = [a.length for a in self.axes[group]]
        if lengths and width > 1:
            lengths[-1] //= width
        return lengths

    def steps(self) -> int:
        """Vectors along the reduced axes, or points where vectors lie beside each other."""
        return -(-self.reach // self.width) if self.rows else self.reach

    def tile_count(self, group: str) -> int:
        """How many tiles a group of loops has."""
        axes = self.axes[group]
        count = 1
        for a, axis in enumerate(axes):
            tiled = a in (self.across, len(axes) - 1)
            count *= -(-axis.length // 32) if tiled else axis.length
        return count
