"""Sliding windows: results of a thread that share reads, and tiles in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...ir import limits
from ...ir.regions import interior
from . import tuning, window_tiles
from .kernel_values import leaf_strides
from .loop_space import LoopAxis, collapse_axes, power_below
from .nodes import NodeTree, cost_of, held_size, part_size
from .schedule import MOMENT, Schedule
from .window_tiles import ColumnTile, RowTile


def find_layouts(schedule: Schedule) -> list[tuple[int, ...]] | None:
    """The layouts of all that is reduced.

    None where a reduction cannot be merged from parts.
    """
    orders = any(r.op in ("argmin", "argmax", "histogram") for r in schedule.kernel.reductions)
    tree = schedule.tree
    if not schedule.reducing or schedule.scanning or orders or tree.taken or tree.calls:
        return None
    if len(tree.nodes) > tuning.MOST_SLIDING_NODES or not schedule.points:
        return None
    every = {schedule.layout_of[tree.letter, k] for k in (*tree.inputs, *tree.indices)}
    return [s for s, n in schedule.layouts.items() if n in every]


def find_tile_axes(schedule: Schedule, kept: list[int], over: list[int]) -> Schedule:
    """Find the axes along which windows slide and reach, and choose a tile for them.

    They become `tile_axes`, pairs of axes. The last pair lies along contiguous elements. The pair
    before it, if any, lies down the columns of the tile. Nothing changes if there is no such tile.
    """
    layouts, shape = find_layouts(schedule), schedule.kernel.shape
    over = [r for r in over if shape[r] > 1]
    if layouts is None or not over or schedule.points < tuning.LEAST_IN_PANES:
        return schedule
    pairs, rest = [], []
    for r in over:
        along = [a for a in kept if all(s[a] == s[r] for s in layouts)]
        if along and any(s[r] for s in layouts):
            pairs.append((along[0], r))
        else:
            rest.append(r)
    memory = {
        n for k in schedule.tree.inputs for n in [schedule.layout_of[schedule.tree.letter, k]]
    }
    inputs = [s for s, n in schedule.layouts.items() if n in memory]
    fast = [(a, r) for a, r in pairs if any(abs(s[a]) == 1 for s in inputs)]
    if len(fast) != 1 or len({a for a, _ in pairs}) < len(pairs):
        return schedule
    # what lies in a column is put together first: of the longest windows
    slow = sorted([p for p in pairs if p not in fast], key=lambda p: (shape[p[1]], p[0]))
    pairs = [*slow, *fast]
    pane, rows = choose_tile(schedule, kept, pairs, rest)
    if pane is None:
        return schedule
    return replace(schedule, tile_axes=pairs, pane=pane, down_axis=rows, sliding=pane.some)


def choose_tile(
    schedule: Schedule, kept: list[int], pairs: list[tuple[int, int]], rest: list[int]
) -> tuple[RowTile | None, int]:
    """Choose the tile of windows: by columns where windows slide along two axes, else by rows.

    Returns the tile and the axis that its rows lie along, or -1. A tile by rows serves windows
    that slide along two axes if no tile by columns has room.
    """
    shape, (a, r) = schedule.kernel.shape, pairs[-1]
    if len(pairs) > 1:
        rows, down = pairs[-2][0], shape[pairs[-2][1]]
    else:
        others = [k for k in kept if k != a and shape[k] > 1]
        rows, down = others[-1] if others else -1, 1
    high = shape[rows] if rows >= 0 else 1
    windows = window_tiles.WindowShape(
        along=shape[a], rows=high, planes=schedule.points // (shape[a] * high), window=shape[r],
        down=down, deep=math.prod(shape[k] for k in (*rest, *[r for _, r in pairs[:-2]])),
        made=sum(held_size(g) for _, _, gives in schedule.kinds for g in gives),
        moments=any(op == "moment" for op, _, _ in schedule.kinds),
    )  # fmt: skip
    pane: RowTile | None = None
    if len(pairs) > 1:
        held = words = 0
        for j, kind in enumerate(schedule.kinds):
            if own := len(schedule.moment_members(j)):
                held += 8 * own
                words += 2 * (own - own // len(MOMENT))  # all deviate from the same
            else:
                held += part_size(*kind)
                words += part_size(*kind) // 4
        reads = 8 + sum(cost_of(n) for n in schedule.tree.nodes)
        pane = window_tiles.box(windows, held, words, reads, schedule.processors)
    if pane is None and not rest and len(pairs) <= 2:
        values = {root: held_size(short) for root, (_, short, _) in
                  zip(schedule.tree.roots, schedule.kinds, strict=True)}  # fmt: skip
        pane = window_tiles.pane(windows, sum(values.values()), schedule.processors)
    return pane, rows


def order_axes_by_tile(schedule: Schedule) -> Schedule:
    """Put the axes that tiles of windows lie along last."""
    pairs = schedule.tile_axes
    if pairs is None:
        return schedule
    (a, r), rows, layouts = pairs[-1], schedule.down_axis, list(schedule.layouts)

    def axis(k: int) -> LoopAxis:
        if k < 0:
            return LoopAxis(1, (0,) * len(layouts))
        return LoopAxis(schedule.kernel.shape[k], tuple(s[k] for s in layouts))

    schedule, within = find_tile_core(schedule, pairs)
    others = [k for k in schedule.groups["k"] if k not in (a, rows)]
    places = {k: n for n, k in enumerate([*others, rows, a])}
    every = [axis(k) for k in others]
    if not any(k in within for k in others):
        every = collapse_axes(every)
        places = {rows: len(every), a: len(every) + 1}
    reduced = [axis(r)]
    if isinstance(schedule.pane, ColumnTile):
        gone = {r for _, r in pairs[-2:]}
        reduced = collapse_axes(axis(k) for k in schedule.groups["r"] if k not in gone)
    return replace(
        schedule,
        width=1, times=4, at_once=1,
        within_panes={places[k]: bounds for k, bounds in within.items()},
        axes={"k": [*every, axis(rows), axis(a)], "r": reduced},
    )  # fmt: skip


def find_tile_core(
    schedule: Schedule, pairs: Sequence[tuple[int, int]]
) -> tuple[Schedule, dict[int, tuple[int, int, int]]]:
    """Find points where choices by position are known: tiles of them need no checks.

    Returns the schedule with that core, and the first point, the end, and how many points a tile
    has, by the number of the axis.
    """
    assert schedule.pane is not None
    shape = list(schedule.kernel.shape)
    for a, r in pairs:
        shape[a], shape[r] = shape[a] + shape[r] - 1, 1
    box, roots = interior(list(schedule.evaluated), tuple(shape)) or (None, schedule.evaluated)
    box = box or tuple([(0, n) for n in shape])
    core = NodeTree(roots, "c")
    rows, along = schedule.down_axis, pairs[-1][0]
    reaches = {a: schedule.kernel.shape[r] for a, r in pairs}
    cut = [k for k, n in enumerate(shape) if k not in (rows, along) and box[k] != (0, n)]
    leaves = {k: leaf_strides(schedule.kernel, core, k) for k in (*core.inputs, *core.indices)}
    if any(k not in reaches for k in cut) or not all(
        s in schedule.layouts for s in leaves.values()
    ):
        return schedule, {}
    layouts = {(core.letter, k): schedule.layouts[s] for k, s in leaves.items()}
    found = replace(schedule, core=core, layout_of={**schedule.layout_of, **layouts})
    within = {along: (*box[along], schedule.pane.wide)} | {k: (*box[k], reaches[k]) for k in cut}
    if rows >= 0:
        within[rows] = (*box[rows], schedule.pane.rows_read)
    return found, within


def merge_selected_loads(schedule: Schedule) -> Schedule:
    """Let windows load one of several inputs, which a condition on indices selects, by one load.

    `either` becomes (condition, one, other) by the first input and by the node that selects.
    `gone` becomes the nodes that are no longer needed.
    """
    if not schedule.sliding:
        return schedule
    either: dict[int, Any] = {}
    gone: set[int] = set()
    tree = schedule.tree
    uses = [0] * len(tree.nodes)
    for n in tree.nodes:
        for a in n.args:
            uses[a] += 1
    for root in tree.roots:
        uses[root] += 1

    def known_node(op: str, *args: int) -> int:
        return tree._known.get((op, "b1", args, None), -1)

    def both_conditions(guard: int | None, condition: int) -> int:
        return condition if guard is None else known_node("logical_and", guard, condition)

    def collect_below(k: int, guard: int | None, leaves: list[int], wheres: list[int]) -> Any:
        node = tree.nodes[k]
        if node.op == "input" and uses[k] == 1 and tree.guards[k] == guard:
            leaves.append(k)
            return k
        if node.op != "where" or tree.values[node.args[0]] or (wheres and uses[k] > 1):
            return None
        wheres.append(k)
        c, a, b = node.args
        one = collect_below(a, both_conditions(guard, c), leaves, wheres)
        other = collect_below(
            b, both_conditions(guard, known_node("logical_not", c)), leaves, wheres
        )
        return None if one is None or other is None else (c, one, other)

    for k in range(len(tree.nodes) - 1, -1, -1):
        leaves: list[int] = []
        wheres: list[int] = []
        if k in gone or tree.nodes[k].op != "where":
            continue
        found = collect_below(k, None, leaves, wheres)
        if found is not None and len({schedule.type_of_load(tree, n) for n in leaves}) == 1:
            either[k] = either[leaves[0]] = found
            gone |= {*leaves[1:], *wheres[1:]}
    return replace(schedule, either=either, gone=frozenset(gone))


def find_sliding_axes(schedule: Schedule, kept: list[int], over: list[int], last: int) -> Schedule:
    """Find the axes along which windows slide and reach, without a tile.

    All that is reduced moves alike along both. They become `sliding_axes`; `sliding` is how many
    results a thread makes along the first.
    """
    layouts, shape = find_layouts(schedule), schedule.kernel.shape
    if layouts is None or last not in kept:
        return schedule
    found = [
        (shape[r], a, r)
        for a in kept
        for r in over
        if a != last and all(s[a] == s[r] for s in layouts) and any(s[a] for s in layouts)
    ]
    window, a, r = max(found, default=(0, -1, -1))
    room = most_results(schedule)
    some = power_below(min(limits.MOST_SLIDING, window, shape[a], room))
    if not found or some < limits.LEAST_SLIDING:
        return schedule
    return replace(schedule, sliding=some, sliding_axes=(a, r))


def most_results(schedule: Schedule) -> int:
    """Most results of a thread that leave enough threads."""
    return schedule.points // (tuning.SLIDING_THREADS * schedule.processors)


def order_axes_for_sliding(schedule: Schedule) -> Schedule:
    """Order the axes of sliding windows, and choose how many results a thread makes.

    The axis along which windows slide is put before the last one. A part of the last axis goes in
    a tile, so that threads which read the same elements do so at the same time. Vectors and
    results of a thread get fewer where they would take too many registers or statements.
    """
    if schedule.sliding_axes is None:
        return schedule
    a, r = schedule.sliding_axes
    layouts, shape = list(schedule.layouts), schedule.kernel.shape
    words = 0  # that each part has of its own
    for op, short, gives in schedule.kinds:
        words += part_size(op, short, gives) // (8 if op == "moment" else 4)
    room = most_results(schedule)
    some = schedule.sliding
    width = min(schedule.width, 4 if some == limits.LEAST_SLIDING else 2)

    def fits(some: int, width: int) -> bool:
        registers = (some - 1) * width * words <= tuning.SLIDING_WORDS
        text = 2 * some * width * len(schedule.tree.nodes) <= tuning.SLIDING_STATEMENTS
        return registers and text and some * width <= room

    while width > 1 and not fits(some, width):
        width //= 2
    while some > limits.LEAST_SLIDING and not fits(some, width):
        some //= 2

    def axis(k: int) -> LoopAxis:
        return LoopAxis(shape[k], tuple(s[k] for s in layouts))

    *others, fast = collapse_axes(axis(k) for k in schedule.groups["k"] if k != a)
    part = fast.length
    if part > limits.SLIDING_TILE:
        tiles = range(width, limits.SLIDING_TILE + 1, width)
        found = max([n for n in tiles if part % n == 0], default=0)
        part = found if found >= 32 else part
    if part < fast.length:
        others.append(LoopAxis(fast.length // part, tuple([s * part for s in fast.strides])))
    reduced = collapse_axes(axis(k) for k in schedule.groups["r"] if k != r)
    return replace(
        schedule,
        width=width, sliding=some, times=4 if some == limits.LEAST_SLIDING else 8, at_once=1,
        axes={"k": [*others, axis(a), LoopAxis(part, fast.strides)], "r": [axis(r), *reduced]},
    )  # fmt: skip
