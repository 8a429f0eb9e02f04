"""Kernels that go in tiles of shared memory, and the loop over tiles, which reductions share."""

from __future__ import annotations

from typing import Any

from . import tuning
from .body import Body, KernelLoops, declare_pointers
from .coordinates import LoopSite
from .elementwise import write_stores
from .nodes import size_of
from .operations import STORED
from .statements import unroll
from .work_division import limit_blocks


def loop_tiles(body: Body, group: str, first: str, step: str, use: Any) -> list[str]:
    """A loop over tiles of 32 x 32, from number `first` on.

    `use(site)` gives the statements for one point.
    """
    schedule, arguments, places = body.schedule, body.arguments, body.places
    axes = schedule.axes[group]
    last, across = len(axes) - 1, schedule.across
    rest = [a for a in range(last) if a != across]
    counts = [axes[a].length for a in rest]
    counts += [-(-axes[across].length // 32), -(-axes[last].length // 32)]
    coords, names = places.split(group, counts, "w", "t", name="tile")
    turned, room = [], tuning.TILES
    for k in body.loop_inputs(schedule.tree):
        tile = 32 * 33 * size_of(schedule.tree.nodes[k].code)
        if schedule.layout_of[schedule.tree.letter, k] in schedule.turned and tile <= room:
            turned.append(k)
            room -= tile
    straight = [k for k in body.loop_inputs(schedule.tree) if k not in turned]

    def site(row: str, column: str) -> LoopSite:
        found = {(group, a): names[n] for n, a in enumerate(rest)}
        found[group, across] = f"t{len(rest)} * 32 + {row}"
        found[group, last] = f"t{len(rest) + 1} * 32 + {column}"
        return LoopSite(found)

    def is_inside(place: LoopSite) -> str:
        return " && ".join(
            f"{place.coords[group, a]} < ({schedule.index})"
            f"{arguments.slot(('length', group, 'edge', a), axes[a].length)}"
            for a in (across, last)
        )

    each, line = f"int u = 0; u < {schedule.times}; ++u", "(ty + 8 * u)"

    def for_each_site(row: str, column: str, lines: Any) -> list[str]:
        place = site(row, column)
        return unroll(each, [f"if ({is_inside(place)}) {{", *lines(place), "}"])

    shared = [f"__shared__ {STORED[schedule.tree.nodes[k].code]} turn{k}[32][33];" for k in turned]
    # in shared memory the elements have no constructors, so that these lie there untouched
    declared = [f"{STORED[schedule.tree.nodes[k].code]} x{k}[{schedule.times}]"
                f"{' = {}' if schedule.tree.guards[k] is not None else ''};"
                for k in (*straight, *turned)]  # fmt: skip
    fetch = [f"x{k}[u] = turn{k}[tx][{line}];" for k in turned]
    turning = for_each_site("tx", line, lambda s: body.loads(schedule.tree, turned, s, "x#[u]"))
    keep = unroll(each, [f"turn{k}[{line}][tx] = x{k}[u];" for k in turned])
    loads = for_each_site(line, "tx", lambda s: body.loads(schedule.tree, straight, s, "x#[u]"))
    return [
        *shared,
        "const int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;",
        f"for ({schedule.count} w = {first}; w < tiles; w += {step}) {{",
        *coords,
        *declared,
        *turning,
        *(loads if straight else []),
        *keep,
        "__syncthreads();",
        *for_each_site(line, "tx", lambda s: [*fetch, *use(s)]),
        "__syncthreads();",
        "}",
    ]


def write_loops(body: Body) -> KernelLoops:
    """Write the loop over tiles: inputs lie along another axis than the outputs."""
    schedule, arguments, places = body.schedule, body.arguments, body.places
    tiles = schedule.tile_count("k")
    blocks = limit_blocks(schedule, tiles)
    axes = schedule.axes["k"]

    def use(site: LoopSite) -> list[str]:
        place = ""
        for a, axis in enumerate(axes):
            length = f"({schedule.index}){arguments.slot(('edge', a), axis.length)}"
            coordinate = f"({site.coords['k', a]})"
            place = f"({place}) * {length} + {coordinate}" if place else coordinate
        if schedule.out_layout >= 0:
            place = places.offset(schedule.out_layout, site)
        stores = write_stores(body, schedule.tree, site, "at", "u")
        return [f"const {schedule.index} at = {place};", *stores]

    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {schedule.count} tiles = {arguments.number('tiles', tiles)};",
        "if (blockIdx.x >= blocks || tiles == 0) return;",
        *declare_pointers(body),
        *body.load_invariants(LoopSite({}, {})),
        *loop_tiles(body, "k", "blockIdx.x", "blocks", use),
    ]
    return KernelLoops(lines, blocks)
