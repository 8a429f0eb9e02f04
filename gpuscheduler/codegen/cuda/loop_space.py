"""The loops of a kernel and the strides of its inputs along them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir.expr import Kernel, View
from ...ir.regions import simplify_in_box
from .nodes import NodeTree, code_of
from .operations import STORED
from .window_tiles import RowTile

#: The members of a moment without its count.
MOMENT = ("k", "sum", "squares")


@dataclass(frozen=True, slots=True)
class LoopAxis:
    """Some points in a row, and the strides of each layout along them."""

    length: int
    strides: tuple[int, ...]


def collapse_axes(axes: Iterable[LoopAxis]) -> list[LoopAxis]:
    """Merge neighbouring axes where all layouts go on evenly; drop axes of length 1.

    The points and their order stay the same.

    >>> collapse_axes([LoopAxis(4, (6,)), LoopAxis(1, (5,)), LoopAxis(3, (2,))])
    [LoopAxis(length=12, strides=(2,))]
    >>> collapse_axes([LoopAxis(4, (3, 0)), LoopAxis(3, (1, 1))])
    [LoopAxis(length=4, strides=(3, 0)), LoopAxis(length=3, strides=(1, 1))]
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


class LoopSpace:
    """A kernel, its loops, and how many elements each thread takes along them."""

    #: Expressions that are evaluated at each point.
    evaluated: list[Any]
    #: `evaluated` as nodes.
    tree: NodeTree
    #: The outputs as nodes: those of a reduction are computed after it.
    final: NodeTree
    #: For each reduction its operation, the type it takes and the types of its results.
    kinds: list[tuple[str, str, list[str]]]
    #: What is evaluated within the core, where conditions on indices are known; or None.
    core: NodeTree | None
    #: Where the core ends: axis of the kernel, first point, length.
    within: list[tuple[int, int, int]]
    #: What is evaluated where the core is left along the axes of one group only, by group.
    partly: dict[str, NodeTree]
    #: What is evaluated within the core along the last axis of a group ("last"), or along all
    #: others ("others").
    apart: dict[str, NodeTree]
    #: Number of each layout: strides along the kernel's axes.
    layouts: dict[tuple[int, ...], int]
    #: Layouts of memory; others are of indices alone.
    moved: set[int]
    #: Layout of an input or index, by the letter of its tree and its node.
    layout_of: dict[tuple[str, int], int]
    #: Layout that counts along an axis where the core ends, by axis.
    axis_layout: dict[int, int]
    #: Layout of the outputs, or -1 where they are contiguous.
    out_layout: int
    #: Number of points along the kept axes.
    points: int
    #: Number of points along the reduced axes.
    reach: int
    #: The kernel's axes that are kept ("k") and reduced ("r"), the fastest last.
    groups: dict[str, list[int]]
    #: The loops of each group, with neighbouring axes merged.
    axes: dict[str, list[LoopAxis]]
    #: Whether threads of a reduction lie along the reduced axes.
    rows: bool
    #: The group that threads lie along.
    along: str
    #: The loop that tiles turn with the fastest one, or -1.
    across: int
    #: Whether inputs are loaded where they are used, and not all of them before.
    late: bool
    #: Whether vectors are written of inputs that are read one by one.
    loose: bool
    #: First point and end of a tile's core, and points of a tile, by the number of the loop.
    within_panes: dict[int, tuple[int, int, int]]

    def __init__(self, kernel: Kernel, aligned: bool, processors: int, writes: bool):
        self.kernel = kernel
        #: Whether inputs begin at multiples of a vector.
        self.aligned = aligned
        #: Multiprocessors of the device.
        self.processors = processors
        #: Whether outputs begin at multiples of a vector.
        self.writes = writes
        self.reducing, self.scanning = bool(kernel.reductions), kernel.scans
        #: Types of the outputs.
        self.outs = [code_of(o) for o in kernel.outputs]
        #: Neighbouring elements that a thread takes at a time.
        self.width = 1
        #: Vectors that a thread has under way at a time.
        self.times = 1
        #: Whether a block along a row may take twice as many vectors.
        self.deeper = False
        #: Whether a kernel computes for longer than it reads and writes.
        self.heavy = False
        #: Blocks that a multiprocessor shall have room for.
        self.at_once = 1
        #: Consecutive results of sliding windows that a thread makes, or 0.
        self.sliding = 0
        #: The tile of sliding windows in shared memory, or None.
        self.pane: RowTile | None = None
        #: The kernel's axis that the rows of a tile lie along, or -1.
        self.down_axis = -1
        #: Loads from one of several inputs: see `window_schedule.merge_selected_loads`.
        self.either: dict[int, Any] = {}
        #: Nodes that such a load replaces.
        self.gone: set[int] = set()

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

    def simplify_within(self, within: Iterable[tuple[int, int, int]], letter: str) -> NodeTree:
        """Simplify what is evaluated at points that lie in the core along some axes."""
        box = [(0, n) for n in self.kernel.shape]
        for k, low, length in within:
            box[k] = low, low + length
        tree = NodeTree(simplify_in_box(self.evaluated, tuple(box)), letter)
        for k in (*tree.inputs, *tree.indices):
            self.layout_of[letter, k] = self.layouts[self.leaf_strides(tree, k, ())]
        return tree

    def leaf_strides(self, tree: NodeTree, k: int, kept: Sequence[int]) -> tuple[int, ...]:
        """The strides of a leaf along all axes.

        Outputs of a reduction have the `kept` axes only.
        """
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

    def strides(self, layout: int, group: str) -> list[int]:
        """The strides of a layout along the loops of a group."""
        return [a.strides[layout] for a in self.axes[group]]

    def fast_stride(self, layout: int) -> int:
        """The stride along the axis that threads lie along."""
        strides = self.strides(layout, self.along)
        return strides[-1] if strides else 0

    def varies(self, tree: NodeTree, condition: int | None) -> bool:
        """Whether a condition on indices may differ between neighbours along the fastest axis."""
        return condition is not None and any(
            tree.nodes[k].op == "index" and self.fast_stride(self.layout_of[tree.letter, k])
            for k in tree.below([condition])
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
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def power_below(n: int) -> int:
    """The greatest power of two that is at most n."""
    return 1 << (max(n, 1).bit_length() - 1)
