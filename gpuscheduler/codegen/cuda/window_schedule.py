"""Sliding windows: results of a thread that share reads, and tiles in shared memory."""

from __future__ import annotations

import math
from typing import Any

from ...ir import limits
from ...ir.limits import LEAST_SLIDING, MOST_SLIDING
from ...ir.regions import interior
from . import window_tiles
from .loop_space import MOMENT, LoopAxis, LoopSpace, collapse_axes, power_below
from .nodes import NodeTree, cost_of, held_size, part_size
from .window_tiles import SLIDING_WORDS, THREADS, ColumnTile

#: Least threads of a multiprocessor that must have work.
SLIDING_THREADS = 2 * THREADS
#: Most nodes of an expression that windows reduce.
MOST_SLIDING_NODES = 100
#: Most statements of a kernel with sliding windows: they bound the compiler's time.
SLIDING_STATEMENTS = 2000
#: Results from which on windows are reduced in tiles.
LEAST_IN_PANES = 2**14


def find_layouts(space: LoopSpace) -> list[tuple[int, ...]] | None:
    """The layouts of all that is reduced.

    None where a reduction cannot be merged from parts.
    """
    orders = any(r.op in ("argmin", "argmax", "histogram") for r in space.kernel.reductions)
    tree = space.tree
    if not space.reducing or space.scanning or orders or tree.taken or tree.calls:
        return None
    if len(tree.nodes) > MOST_SLIDING_NODES or not space.points:
        return None
    every = {space.layout_of[tree.letter, k] for k in (*tree.inputs, *tree.indices)}
    return [s for s, n in space.layouts.items() if n in every]


def find_tile_axes(
    space: LoopSpace, kept: list[int], over: list[int]
) -> list[tuple[int, int]] | None:
    """Find the axes along which windows slide and reach, and choose a tile for them.

    Returns pairs of axes. The last pair lies along contiguous elements. The pair before it, if
    any, lies down the columns of the tile. None where there is no such tile.
    """
    layouts, shape = find_layouts(space), space.kernel.shape
    over = [r for r in over if shape[r] > 1]
    if layouts is None or not over or space.points < LEAST_IN_PANES:
        return None
    pairs, rest = [], []
    for r in over:
        along = [a for a in kept if all(s[a] == s[r] for s in layouts)]
        if along and any(s[r] for s in layouts):
            pairs.append((along[0], r))
        else:
            rest.append(r)
    memory = {n for k in space.tree.inputs for n in [space.layout_of[space.tree.letter, k]]}
    inputs = [s for s, n in space.layouts.items() if n in memory]
    fast = [(a, r) for a, r in pairs if any(abs(s[a]) == 1 for s in inputs)]
    if len(fast) != 1 or len({a for a, _ in pairs}) < len(pairs):
        return None
    # what lies in a column is put together first: of the longest windows
    slow = sorted([p for p in pairs if p not in fast], key=lambda p: (shape[p[1]], p[0]))
    pairs = [*slow, *fast]
    choose_tile(space, kept, pairs, rest)
    space.sliding = 0 if space.pane is None else space.pane.some
    return None if space.pane is None else pairs


def choose_tile(
    space: LoopSpace, kept: list[int], pairs: list[tuple[int, int]], rest: list[int]
) -> None:
    """Choose the tile of windows: by columns where windows slide along two axes, else by rows.

    Sets `pane` and `down_axis` of the space. A tile by rows serves windows that slide along two
    axes if no tile by columns has room.
    """
    shape, (a, r) = space.kernel.shape, pairs[-1]
    if len(pairs) > 1:
        rows, down = pairs[-2][0], shape[pairs[-2][1]]
    else:
        others = [k for k in kept if k != a and shape[k] > 1]
        rows, down = others[-1] if others else -1, 1
    high = shape[rows] if rows >= 0 else 1
    windows = window_tiles.WindowShape(
        along=shape[a], rows=high, planes=space.points // (shape[a] * high), window=shape[r],
        down=down, deep=math.prod(shape[k] for k in (*rest, *[r for _, r in pairs[:-2]])),
        made=sum(held_size(g) for _, _, gives in space.kinds for g in gives),
        moments=any(op == "moment" for op, _, _ in space.kinds),
    )  # fmt: skip
    if len(pairs) > 1:
        held = words = 0
        for j, kind in enumerate(space.kinds):
            if own := len(space.moment_members(j)):
                held += 8 * own
                words += 2 * (own - own // len(MOMENT))  # all deviate from the same
            else:
                held += part_size(*kind)
                words += part_size(*kind) // 4
        reads = 8 + sum(cost_of(n) for n in space.tree.nodes)
        space.pane = window_tiles.box(windows, held, words, reads, space.processors)
    if space.pane is None and not rest and len(pairs) <= 2:
        values = {root: held_size(short) for root, (_, short, _) in
                  zip(space.tree.roots, space.kinds, strict=True)}  # fmt: skip
        space.pane = window_tiles.pane(windows, sum(values.values()), space.processors)
    space.down_axis = rows


def order_axes_by_tile(space: LoopSpace, pairs: list[tuple[int, int]]) -> None:
    """Put the axes that tiles lie along last."""
    assert space.pane is not None
    (a, r), rows, layouts = pairs[-1], space.down_axis, list(space.layouts)

    def axis(k: int) -> LoopAxis:
        if k < 0:
            return LoopAxis(1, (0,) * len(layouts))
        return LoopAxis(space.kernel.shape[k], tuple(s[k] for s in layouts))

    space.width, space.times, space.at_once = 1, 4, 1
    within = find_tile_core(space, pairs)
    others = [k for k in space.groups["k"] if k not in (a, rows)]
    places = {k: n for n, k in enumerate([*others, rows, a])}
    every = [axis(k) for k in others]
    if not any(k in within for k in others):
        every = collapse_axes(every)
        places = {rows: len(every), a: len(every) + 1}
    space.within_panes = {places[k]: bounds for k, bounds in within.items()}
    space.axes["k"] = [*every, axis(rows), axis(a)]
    space.axes["r"] = [axis(r)]
    if isinstance(space.pane, ColumnTile):
        gone = {r for _, r in pairs[-2:]}
        space.axes["r"] = collapse_axes(axis(k) for k in space.groups["r"] if k not in gone)


def find_tile_core(
    space: LoopSpace, pairs: list[tuple[int, int]]
) -> dict[int, tuple[int, int, int]]:
    """Find points where choices by position are known: tiles of them need no checks.

    Returns the first point, the end, and how many points a tile has, by the number of the axis.
    """
    assert space.pane is not None
    shape = list(space.kernel.shape)
    for a, r in pairs:
        shape[a], shape[r] = shape[a] + shape[r] - 1, 1
    box, roots = interior(space.evaluated, tuple(shape)) or (None, space.evaluated)
    box = box or tuple([(0, n) for n in shape])
    core = NodeTree(roots, "c")
    rows, along = space.down_axis, pairs[-1][0]
    reaches = {a: space.kernel.shape[r] for a, r in pairs}
    cut = [k for k, n in enumerate(shape) if k not in (rows, along) and box[k] != (0, n)]
    leaves = {k: space.leaf_strides(core, k, ()) for k in (*core.inputs, *core.indices)}
    if any(k not in reaches for k in cut) or not all(s in space.layouts for s in leaves.values()):
        return {}
    space.core = core
    space.layout_of |= {(core.letter, k): space.layouts[s] for k, s in leaves.items()}
    within = {along: (*box[along], space.pane.wide)} | {k: (*box[k], reaches[k]) for k in cut}
    return within if rows < 0 else within | {rows: (*box[rows], space.pane.high)}


def merge_selected_loads(space: LoopSpace) -> None:
    """Load one of several inputs, which a condition on indices selects, by one load.

    `either` of the space becomes (condition, one, other) by the first input and by the node that
    selects. `gone` becomes the nodes that are no longer needed.
    """
    tree = space.tree
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
        if k in space.gone or tree.nodes[k].op != "where":
            continue
        found = collect_below(k, None, leaves, wheres)
        if found is not None and len({space.type_of_load(tree, n) for n in leaves}) == 1:
            space.either[k] = space.either[leaves[0]] = found
            space.gone |= {*leaves[1:], *wheres[1:]}


def find_sliding_axes(
    space: LoopSpace, kept: list[int], over: list[int], last: int
) -> tuple[int, int] | None:
    """Find the axes along which windows slide and reach, without a tile.

    All that is reduced moves alike along both. Sets `sliding` of the space: how many results a
    thread makes along the first.
    """
    layouts, shape = find_layouts(space), space.kernel.shape
    if layouts is None or last not in kept:
        return None
    found = [
        (shape[r], a, r)
        for a in kept
        for r in over
        if a != last and all(s[a] == s[r] for s in layouts) and any(s[a] for s in layouts)
    ]
    window, a, r = max(found, default=(0, -1, -1))
    room = most_results(space)
    some = power_below(min(MOST_SLIDING, window, shape[a], room))
    if not found or some < LEAST_SLIDING:
        return None
    space.sliding = some
    return a, r


def most_results(space: LoopSpace) -> int:
    """Most results of a thread that leave enough threads."""
    return space.points // (SLIDING_THREADS * space.processors)


def order_axes_for_sliding(space: LoopSpace, slides: tuple[int, int]) -> None:
    """Put the axis along which windows slide before the last one.

    A part of the last axis goes in a tile, so that threads which read the same elements do so at
    the same time.
    """
    a, r = slides
    layouts, shape = list(space.layouts), space.kernel.shape
    words = 0  # that each part has of its own
    for op, short, gives in space.kinds:
        words += part_size(op, short, gives) // (8 if op == "moment" else 4)
    room = most_results(space)
    space.width = min(space.width, 4 if space.sliding == LEAST_SLIDING else 2)

    def fits(some: int, width: int) -> bool:
        registers = (some - 1) * width * words <= SLIDING_WORDS
        text = 2 * some * width * len(space.tree.nodes) <= SLIDING_STATEMENTS
        return registers and text and some * width <= room

    while space.width > 1 and not fits(space.sliding, space.width):
        space.width //= 2
    while space.sliding > LEAST_SLIDING and not fits(space.sliding, space.width):
        space.sliding //= 2
    space.times = 4 if space.sliding == LEAST_SLIDING else 8
    space.at_once = 1

    def axis(k: int) -> LoopAxis:
        return LoopAxis(shape[k], tuple(s[k] for s in layouts))

    *others, fast = collapse_axes(axis(k) for k in space.groups["k"] if k != a)
    part = fast.length
    if part > limits.SLIDING_TILE:
        tiles = range(space.width, limits.SLIDING_TILE + 1, space.width)
        found = max([n for n in tiles if part % n == 0], default=0)
        part = found if found >= 32 else part
    if part < fast.length:
        others.append(LoopAxis(fast.length // part, tuple([s * part for s in fast.strides])))
    space.axes["k"] = [*others, axis(a), LoopAxis(part, fast.strides)]
    space.axes["r"] = [axis(r), *collapse_axes(axis(k) for k in space.groups["r"] if k != r)]
