"""The order of a kernel's loops, and all passes that make its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ...ir.expr import RANDOM, Kernel
from . import tuning, window_schedule
from .kernel_values import describe_values, find_core, leaf_strides
from .loop_space import LoopAxis, collapse_axes, counting_strides
from .nodes import size_of
from .schedule import Schedule
from .vectorize import choose_vector_width
from .work_division import divide_work


def make_schedule(kernel: Kernel, aligned: bool, processors: int, writes: bool) -> Schedule:
    """Decide all that a kernel's text is made of, pass by pass."""
    schedule = describe_values(kernel, aligned, processors, writes)
    for decide in PASSES:
        schedule = decide(schedule)
    return schedule


def order_axes(schedule: Schedule) -> Schedule:
    """Order and merge the axes; find those along which windows slide.

    Axes are kept or reduced. The fastest axis of all is the last in its group.
    """
    kernel, rank = schedule.kernel, len(schedule.kernel.shape)
    axes = set(kernel.axes) if schedule.reducing else set()
    kept = [k for k in range(rank) if k not in axes]
    over = [k for k in range(rank) if k in axes]
    layouts: dict[tuple[int, ...], int] = {}
    memory_layouts: set[int] = set()

    def layout(strides: Sequence[int], memory: bool) -> int:
        n = layouts.setdefault(tuple(strides), len(layouts))
        if memory:
            memory_layouts.add(n)
        return n

    layout_of = {}
    for tree in schedule.trees:
        after = schedule.reducing and tree is schedule.final and not schedule.scanning
        for k in (*tree.inputs, *tree.indices):
            strides = leaf_strides(kernel, tree, k, kept if after else None)
            layout_of[tree.letter, k] = layout(strides, tree.nodes[k].op == "input")
    axis_layout = {
        k: layout([int(a == k) for a in range(rank)], False) for k, _, _ in schedule.within
    }
    schedule = replace(
        schedule,
        layouts=layouts, layout_of=layout_of, axis_layout=axis_layout,
        points=math.prod(kernel.shape[k] for k in kept),
        reach=math.prod(kernel.shape[k] for k in over),
    )  # fmt: skip
    last, order = find_fastest(schedule, kept, over)
    schedule = window_schedule.find_tile_axes(schedule, kept, over)
    if schedule.tile_axes is not None:
        last = schedule.tile_axes[-1][0]
    else:
        schedule = window_schedule.find_sliding_axes(schedule, kept, over, last)
    if (slides := schedule.sliding_axes) is not None:
        order = [slides[1], *[k for k in order if k != slides[1]]]
    if schedule.sliding:
        schedule = replace(schedule, core=None, within=[], axis_layout={})
    out_layout = position = -1
    if kernel.strides is not None:
        assert schedule.scanning or not schedule.reducing
        out_layout = layout(kernel.strides, True)
    elif schedule.reducing:
        whole = range(rank) if schedule.scanning else kept
        out_layout = layout(counting_strides(kernel.shape, whole), True)
    if any(r.op in ("argmin", "argmax") for r in kernel.reductions):
        position = layout(counting_strides(kernel.shape, over), False)
    groups = {"k": kept, "r": order}
    if last in kept:
        groups["k"] = [*[k for k in kept if k != last], last]
    return replace(
        schedule,
        out_layout=out_layout, position=position, memory_layouts=frozenset(memory_layouts),
        groups=groups,
        rows=last in over or not kept or schedule.points == 1 or kernel.is_histogram,
        axes={name: make_axes(schedule, ks, layouts) for name, ks in groups.items()},
    )  # fmt: skip


def make_axes(
    schedule: Schedule, axes: Sequence[int], layouts: Iterable[tuple[int, ...]]
) -> list[LoopAxis]:
    """The loops along some of the kernel's axes, merged where they go on evenly."""
    shape, layouts = schedule.kernel.shape, list(layouts)
    if 0 in (shape[k] for k in axes):
        return [LoopAxis(0, (0,) * len(layouts))]
    return collapse_axes([LoopAxis(shape[k], tuple(s[k] for s in layouts)) for k in axes])


def find_fastest(schedule: Schedule, kept: list[int], over: list[int]) -> tuple[int, list[int]]:
    """Find the axis that threads lie along, and the order of the reduced axes.

    Threads lie along the axis along which most bytes of the inputs are contiguous; where several
    are equal, along the last. The input with most elements gives the order of the reduced axes.
    """
    shape = schedule.kernel.shape
    if not schedule.reducing:
        return (kept[-1] if kept else -1), []
    if schedule.scanning:  # along which it writes
        return max([k for k, n in enumerate(shape) if n > 1], default=over[-1]), over
    weights = dict.fromkeys(range(len(shape)), 0.0)
    dominant: tuple[int, ...] | None = None
    most = -1
    for tree_node in schedule.tree.inputs:
        node = schedule.tree.nodes[tree_node]
        strides = list(schedule.layouts)[schedule.layout_of[schedule.tree.letter, tree_node]]
        covered = math.prod(n for n, s in zip(shape, strides, strict=True) if s)
        for k, s in enumerate(strides):
            if abs(s) == 1:  # so many bytes lie one behind the other along it
                weights[k] += int(node.code[1:]) * covered
        if covered > most:
            dominant, most = strides, covered
    for tree_node in schedule.tree.taken:
        strides = strides_beside(schedule, tree_node)
        for k, s in enumerate(strides):
            if abs(s) == 1:
                weights[k] += int(schedule.tree.nodes[tree_node].code[1:]) * math.prod(shape)
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


def strides_beside(schedule: Schedule, k: int) -> tuple[int, ...]:
    """The strides of an element taken by a computed index, without the computed part."""
    place = schedule.tree.nodes[schedule.tree.nodes[k].args[0]]
    first = place.args[0] if place.op == "add" else schedule.tree.nodes[k].args[0]
    if schedule.tree.nodes[first].op != "index":
        return (0,) * len(schedule.kernel.shape)
    return list(schedule.layouts)[schedule.layout_of[schedule.tree.letter, first]]


def choose_tiles(schedule: Schedule) -> Schedule:
    """Decide whether to go in tiles: inputs lie along another axis than the outputs."""
    group = "r" if schedule.reducing else "k"
    axes = schedule.axes[group]
    if (
        len(axes) < 2
        or (schedule.reducing and schedule.axes["k"])
        or axes[-1].length < tuning.TURNED_LENGTH
    ):
        return schedule
    if schedule.kernel.picks or schedule.kernel.is_histogram:  # their blocks share the points
        return schedule
    votes: dict[int, list[int]] = {}
    for k in schedule.tree.inputs:
        layout = schedule.layout_of[schedule.tree.letter, k]
        strides = schedule.strides(layout, group)
        fast = min((a for a, s in enumerate(strides) if s), default=-1,
                   key=lambda a: (abs(strides[a]), -a))  # fmt: skip
        if (
            fast in (-1, len(axes) - 1)
            or axes[fast].length < tuning.TURNED_LENGTH
            or abs(strides[fast]) > tuning.TURNED_NEAR
        ):
            continue
        if abs(strides[-1]) >= tuning.TURNED_FAR:
            votes.setdefault(fast, []).append(layout)
    if not votes:
        return schedule
    across = max(votes, key=lambda a: (len(votes[a]), a))
    turned = frozenset(votes[across])
    return replace(schedule, across=across, turned=turned, core=None, within=[])


def split_columns(schedule: Schedule) -> Schedule:
    """Split long columns so that what all rows read stays in a multiprocessor's cache.

    The kernel goes through all rows of one part of the columns, then of the next part.
    """
    axes, tree = schedule.axes["r"], schedule.tree
    whole = (
        schedule.reducing
        and schedule.points == 1
        and not (schedule.scanning or schedule.kernel.is_histogram)
    )
    if not whole or schedule.across >= 0 or len(axes) < 2 or axes[0].length == 0 or schedule.loose:
        return schedule
    odd = any(n.op in (*RANDOM, "taken") for n in tree.nodes)
    if odd or any(tree.guards[k] is not None for k in tree.inputs):
        return schedule
    each = 0  # bytes of a column that all rows read
    for k in tree.inputs:
        *others, last = schedule.strides(schedule.layout_of[tree.letter, k], "r")
        each += size_of(tree.nodes[k].code) * bool(last and not any(others))
    columns = axes[-1].length
    if each * columns <= tuning.KEPT_BYTES:
        return schedule
    unit = max(schedule.width, 2)
    most = tuning.KEPT_BYTES // each // unit * unit
    for part in range(most, tuning.LEAST_COLUMNS - 1, -unit):
        if columns % part == 0:
            fast = axes[-1].strides
            far = LoopAxis(columns // part, tuple([s * part for s in fast]))
            split = [far, *axes[:-1], LoopAxis(part, fast)]
            return replace(schedule, axes={**schedule.axes, "r": split})
    return schedule


def choose_index_width(schedule: Schedule) -> Schedule:
    """Decide whether 32 bits are enough to count points and elements."""
    furthest = max(schedule.points, schedule.reach)
    for n in schedule.memory_layouts:
        span = sum(
            abs(a.strides[n]) * (a.length - 1) for axes in schedule.axes.values() for a in axes
        )
        furthest = max(furthest, span)
    return replace(schedule, small=furthest < tuning.SMALL)


#: How a schedule is made, in order.
PASSES: tuple[Callable[[Schedule], Schedule], ...] = (
    find_core,
    order_axes,
    choose_tiles,
    choose_vector_width,
    window_schedule.order_axes_for_sliding,
    window_schedule.order_axes_by_tile,
    window_schedule.merge_selected_loads,
    split_columns,
    choose_index_width,
    divide_work,
)
