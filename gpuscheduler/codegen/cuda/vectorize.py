"""Vectorization: how many neighbouring elements a thread takes at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...ir import limits
from ...ir.expr import RANDOM
from . import tuning
from .call_cost import length_of
from .kernel_values import simplify_within
from .nodes import NodeTree, cost_of, size_of
from .operations import operation
from .schedule import Schedule


def choose_vector_width(schedule: Schedule) -> Schedule:
    """Choose the elements of a vector, and the vectors of a thread at a time.

    Also chooses the bodies for points beyond the core.
    """
    tree = schedule.tree
    most = tree if schedule.core is None else schedule.core  # where most points are
    cost, long = sum(cost_of(n) for n in most.nodes), count_instructions(most)
    width = limit_width(tree, align_width(schedule), cost, long)
    columns = schedule.reducing and not schedule.rows and schedule.across < 0
    if columns and schedule.scanning and schedule.points // width < tuning.MANY_COLUMNS:
        width = 1  # or too few threads have a column
    columns = columns and not schedule.scanning
    moments = columns and any(r.op == "moment" for r in schedule.kernel.reductions)
    many = moments and width >= tuning.MANY_MOMENT_WIDTH and cost < tuning.MANY_COST
    many = many and schedule.points >= tuning.MANY_COLUMNS
    if moments:  # each column keeps much in registers
        width = min(width, tuning.MANY_MOMENT_WIDTH if many else tuning.MOMENT_WIDTH)
    at_once = 1
    if columns:
        at_once = tuning.MANY_COLUMN_BLOCKS if many else tuning.COLUMN_BLOCKS
    each = sum(
        size_of(most.nodes[k].code)
        * (width if schedule.fast_stride(schedule.layout_of[most.letter, k]) else 1)
        for k in most.inputs
    )
    deep = columns or (schedule.scanning and width == 1)
    times = tuning.DEEP_TIMES if many or (deep and each <= 8) else tuning.TIMES
    room = tuning.MANY_FLIGHT_BYTES if many else tuning.FLIGHT_BYTES
    while times > 1 and (times * each > room or times * width * cost > tuning.FLIGHT_COST):
        times //= 2
    while times > 1 and times * width * long > tuning.MOST_INSTRUCTIONS:
        times //= 2
    times = times if tree.inputs else 1
    loads_late = each > tuning.LATE_BYTES and schedule.core is None and schedule.across < 0
    loads_late = loads_late and not (columns or schedule.scanning)
    loads_late = loads_late and all(tree.guards[k] is None for k in tree.inputs)
    if loads_late:
        width = times = 1
    schedule = replace(schedule, width=width, times=times, at_once=at_once, loads_late=loads_late)
    return schedule if loads_late or width > 1 else read_unaligned(schedule, cost)


def align_width(schedule: Schedule) -> int:
    """The most elements of a vector that all arrays are read and written in, by whole loads."""
    tree = schedule.tree
    every = [(body, k) for body in schedule.bodies for k in body.inputs]
    axes = schedule.axes[schedule.thread_group]
    length = axes[-1].length if axes else 1
    outs = (schedule.scanning or not schedule.reducing) and not schedule.kernel.picks
    sizes = [size_of(c) for c in schedule.outs] if outs else []
    if schedule.reducing and not schedule.rows and schedule.fast_stride(schedule.out_layout) == 1:
        sizes += [max(size_of(c), 4) for c in schedule.outs]
    plain = schedule.across < 0 and schedule.aligned
    if schedule.kernel.strides is not None:
        plain = plain and schedule.fast_stride(schedule.out_layout) == 1
    for body, k in every:
        step = schedule.fast_stride(schedule.layout_of[body.letter, k])
        if step == 1:
            sizes.append(size_of(body.nodes[k].code))
        plain = plain and step in (0, 1) and not schedule.varies(body, body.guards[k])
    plain = plain and not any(schedule.fast_stride(n) for n in schedule.axis_layout.values())
    draws = [n for n in tree.nodes if n.op in RANDOM]
    if not sizes or (draws and not tree.inputs and schedule.reducing):
        sizes = [4 if any(n.code == "f4" for n in draws) else 8]
    width = max(1, min(tuning.MOST_WIDTH, tuning.LOAD_BYTES // min(sizes))) if plain else 1
    while width > 1 and not (length % width == 0 and are_aligned(schedule, width)):
        width //= 2
    return width


def limit_width(tree: NodeTree, width: int, cost: int, long: int) -> int:
    """Limit the elements of a vector by what the compiler takes for each of them.

    `cost` is that of a point, and `long` the instructions of its long functions.
    """
    while width > 2 and width * len(tree.nodes) > tuning.MOST_STATEMENTS // 8:
        width //= 2
    while not tree.calls and width > 1 and width * cost > tuning.MOST_COST:
        width //= 2
    while width > 1 and width * long > tuning.MOST_INSTRUCTIONS:
        width //= 2  # sooner than that long functions are called
    if tree.calls:  # each is there as often as a thread has elements, to be compiled anew
        again = any(tree.nodes[k].data[0].repeats for k in tree.calls)
        width = 1 if again else min(width, tuning.CALLED_WIDTH)  # loops do not run side by side
    return width


def read_unaligned(schedule: Schedule, cost: int) -> Schedule:
    """Write vectors of inputs that are read one by one, if that is possible."""
    if not can_read_unaligned(schedule, cost):
        return schedule
    if schedule.reducing:
        left = leave_core(schedule)
        if left is None:
            return schedule
        schedule = left
    width = unaligned_width(schedule)
    return split_boundary(replace(schedule, loose=True, width=width, times=1, at_once=1))


def count_instructions(tree: NodeTree) -> int:
    """Count the instructions of a point's long functions."""
    total = 0
    for node in tree.nodes:
        if node.args and cost_of(node) > 1 and node.op != "call":
            types = [tree.nodes[a].code for a in node.args]
            text = operation(node.op, types, node.code, ["x"] * len(types))
            total += length_of(text or "")
    return total


def can_read_unaligned(schedule: Schedule, cost: int) -> bool:
    """Whether threads write vectors of inputs that do not begin at multiples of a vector.

    Edges and shifts are such inputs. Threads then read each of their elements once, one by one.
    """
    if schedule.across >= 0 or cost > tuning.LOOSE_COST or schedule.scanning:
        return False
    if schedule.kernel.is_histogram or schedule.kernel.picks:
        return False
    if schedule.sliding:
        return False
    main, axes = schedule.bodies[-1], schedule.axes[schedule.thread_group]
    if any(n.op in (*RANDOM, "taken", "call") for tree in schedule.bodies for n in tree.nodes):
        return False
    if not main.inputs or not axes or axes[-1].length < tuning.LOOSE_LEAST:
        return False
    sizes = [size_of(c) for c in schedule.outs]
    if schedule.reducing:
        often = len(main.inputs) >= tuning.OFTEN * len({main.nodes[k].data[0] for k in main.inputs})
        fits = (
            often or schedule.core is not None
        ) and schedule.points * schedule.reach > tuning.MANY_STEPS
        fits = fits and (schedule.rows or schedule.writes)
    elif schedule.out_layout >= 0:
        fits = are_rows_aligned(schedule, unaligned_width(schedule))
    else:
        fits = not any(
            n * schedule.points <= limits.CLOSE and n * schedule.points % 16 for n in sizes
        )
    if not fits or not (schedule.reducing or (schedule.writes and max(sizes) <= 8)):
        return False
    return all(
        abs(schedule.fast_stride(schedule.layout_of[main.letter, k])) <= 1
        and main.guards[k] is None
        for k in main.inputs
    )


def leave_core(schedule: Schedule) -> Schedule | None:
    """Let a reduction leave the core along some axes, while vectors stay in it.

    Vectors lie in the core along the other axes. The bodies for this become `partly` of the
    schedule. None where the inputs of one cannot be read as vectors.
    """
    along, across = ("r", "k") if schedule.rows else ("k", "r")  # vectors lie along the first
    for group in (along, across) if schedule.core_bounds(across) else ():
        if group != along and not schedule.core_bounds(along):
            continue  # no point of these lies beyond the core along the others
        schedule, tree = add_body(
            schedule, schedule.core_bounds(group), {"k": "a", "r": "b"}[group]
        )
        schedule = replace(schedule, partly={**schedule.partly, group: tree})
        if group == along and not can_read_vectors(schedule, tree):
            return None
    return schedule


def add_body(
    schedule: Schedule, within: Iterable[tuple[int, int, int]], letter: str
) -> tuple[Schedule, NodeTree]:
    """Add the layouts of a body for points that lie in the core along some axes."""
    tree, layouts = simplify_within(schedule, within, letter)
    return replace(schedule, layout_of={**schedule.layout_of, **layouts}), tree


def can_read_vectors(schedule: Schedule, tree: NodeTree) -> bool:
    """Whether a tree's inputs can be read for all points of a vector at once."""
    return all(
        abs(schedule.fast_stride(schedule.layout_of[tree.letter, k])) <= 1
        and not schedule.varies(tree, tree.guards[k])
        for k in tree.inputs
    )


def split_boundary(schedule: Schedule) -> Schedule:
    """Choose bodies for points beyond the core, where vectors lie in rows.

    Such points are of three kinds: points in the core along the last axis, which come as
    vectors; points in the core along all other axes; and the few that are left.
    """
    down = schedule.reducing and not schedule.rows
    if schedule.core is None or schedule.partly or down or not lie_in_rows(schedule):
        return schedule
    within, last = schedule.core_bounds(schedule.thread_group), core_axis_of_vectors(schedule)
    fast, others = [x for x in within if x[0] == last], [x for x in within if x[0] != last]
    split, tree = add_body(schedule, fast, "a") if fast else (schedule, schedule.tree)
    if not others or not can_read_vectors(split, tree):
        return schedule
    apart = {"last": tree}
    if fast or schedule.axes[schedule.thread_group][-1].length % schedule.width:
        split, apart["others"] = add_body(split, others, "b")
    return replace(split, apart=apart)


def core_axis_of_vectors(schedule: Schedule) -> int:
    """The kernel's axis that vectors lie along, if the core ends along it; or -1."""
    return next((k for k, n in schedule.axis_layout.items() if schedule.fast_stride(n)), -1)


def begin_with_rows(schedule: Schedule) -> bool:
    """Whether unaligned vectors begin with each row of the output."""
    return schedule.thread_group == "k" and schedule.out_layout >= 0 and not schedule.reducing


def lie_in_rows(schedule: Schedule) -> bool:
    """Whether each unaligned vector lies in one row. The last one of a row may be shorter."""
    return (
        begin_with_rows(schedule)
        or schedule.axes[schedule.thread_group][-1].length % schedule.width == 0
    )


def unaligned_width(schedule: Schedule) -> int:
    """The width of vectors whose elements are read one by one."""
    main, columns = schedule.bodies[-1], schedule.reducing and not schedule.rows
    sizes = [size_of(main.nodes[k].code) for k in main.inputs]
    sizes += [size_of(c) for c in schedule.outs if columns or not schedule.reducing]
    width = max(2, min(tuning.LOOSE_WIDTH, tuning.LOAD_BYTES // max(sizes)))
    if columns:  # each thread has the results of a vector
        if any(r.op == "moment" for r in schedule.kernel.reductions):
            width = min(width, tuning.MOMENT_WIDTH)
        length = schedule.axes["k"][-1].length
        even = max(sizes) <= 8 and schedule.fast_stride(schedule.out_layout) == 1
        while width > 1 and not (
            even and length % width == 0 and are_rows_aligned(schedule, width)
        ):
            width //= 2
    return width


def are_aligned(schedule: Schedule, width: int) -> bool:
    """Whether vectors of this width begin at multiples of a load in all arrays."""
    every = [(body, k) for body in schedule.bodies for k in body.inputs]
    even = all(
        schedule.fast_stride(schedule.layout_of[tree.letter, k]) != 1
        or is_input_aligned(schedule, tree, k, width)
        for tree, k in every
    )
    return even and (schedule.kernel.strides is None or are_rows_aligned(schedule, width))


def is_input_aligned(schedule: Schedule, tree: NodeTree, k: int, width: int) -> bool:
    """Whether vectors of this width begin at multiples of a load in an input.

    The input's elements are contiguous along the fastest axis, and vectors begin at multiples of
    their width along it.
    """
    layout, node = schedule.layout_of[tree.letter, k], tree.nodes[k]
    size = size_of(node.code)
    others = schedule.strides(layout, "k") + schedule.strides(layout, "r")
    others.remove(1)
    steps = (*others, node.data[1].offset)
    return not any(s * size % min(tuning.LOAD_BYTES, width * size) for s in steps)


def begins_aligned(schedule: Schedule, tree: NodeTree, k: int) -> bool:
    """Whether unaligned vectors are aligned in this one input."""
    if not schedule.aligned or schedule.fast_stride(schedule.layout_of[tree.letter, k]) != 1:
        return False
    axes = schedule.axes[schedule.thread_group]
    rows = len(axes) == 1 or lie_in_rows(schedule)
    return rows and is_input_aligned(schedule, tree, k, schedule.width)


def are_rows_aligned(schedule: Schedule, width: int) -> bool:
    """Whether each row of the outputs begins at a multiple of a vector."""
    others = schedule.strides(schedule.out_layout, "k") + schedule.strides(schedule.out_layout, "r")
    if schedule.fast_stride(schedule.out_layout) != 1:
        return False
    others.remove(1)
    sizes = [size_of(c) for c in schedule.outs]
    return not any(s * n % min(tuning.LOAD_BYTES, width * n) for n in sizes for s in others)
