"""Kernels that pick out what a mask selects, in order."""

from __future__ import annotations

from . import tuning
from .body import Body, KernelLoops, declare_pointers
from .coordinates import LoopSite
from .nodes import NodeTree
from .operations import STORED, store_value
from .statements import loop_elements, unroll
from .work_division import limit_blocks


def write_loops(body: Body) -> KernelLoops:
    """Write the loop that picks out, in order, the elements that a mask selects.

    Each warp has a part of the points. Two kernels are written this way. The first has the mask
    alone, and counts what is selected in each part. The second also has the values. It gets the
    sums of these counts up to the end of each part, and writes the values behind each other.
    """
    schedule, arguments, places = body.schedule, body.arguments, body.places
    width, c = schedule.width, schedule.count
    n, held = schedule.points // width, schedule.times * width
    unit = tuning.PICKED // width  # vectors; both kernels have parts of as many points
    units = -(-n // unit)
    blocks = limit_blocks(schedule, -(-units * 32 // tuning.THREADS))
    coords, names = places.split("k", schedule.lengths("k", width), "j", "k", width)
    site = LoopSite({("k", a): x for a, x in enumerate(names)}, {"k": f"j * {width}u"})
    columns = schedule.outs[1:]
    at = f"u * {width} + e" if width > 1 else "u"

    def use(tree: NodeTree, which: str) -> list[str]:
        mask, *values = [f"{tree.letter}{root}" for root in tree.roots]
        after = [f"here[{at}] = {mask};"]
        for m, (short, value) in enumerate(zip(columns, values, strict=True)):
            after.append(f"value{m}[{at}] = {store_value(short, value)};")
        return body.compute_elements(tree, site, which, after)

    work = body.load_and_use("j < n", "j = first + u * 32u + lane", coords, site, use)
    begin, end = "unsigned total = 0;", ["if (lane == 0) ((unsigned*)q0)[w] = total;"]
    takes = [
        "#pragma unroll",
        f"for (int h = 0; h < {held}; ++h) total += __popc(__ballot_sync(~0u, here[h]));",
    ]
    if columns:
        number = f"(at + before) * {len(columns)}" if len(columns) > 1 else "at + before"
        writes = [f"q{1 + m}[{number}] = value{m}[{at}];" for m in range(len(columns))]
        some = f"const unsigned some = __ballot_sync(~0u, here[{at}]);"
        before = "before += __popc(some & ((1u << lane) - 1));"
        begin, end = "long long at = w ? ((const long long*)q0)[w - 1] : 0;", []
        takes = unroll(
            f"int u = 0; u < {schedule.times}; ++u",
            [
                "unsigned before = 0, all = 0;",
                *loop_elements(width, [some, before, "all += __popc(some);"]),
                *loop_elements(width, [f"if (here[{at}]) {{", *writes, "++before;", "}"]),
                "at += all;",
            ],
        )
    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {c} n = {arguments.number('n', n)}, units = {arguments.number('units', units)};",
        "if (n == 0 || blockIdx.x >= blocks) return;",
        *declare_pointers(body),
        *body.load_invariants(LoopSite({}, {"k": "0"})),
        "const unsigned lane = threadIdx.x & 31;",
        f"for ({c} w = (blockIdx.x * {tuning.THREADS}u + threadIdx.x) / 32; w < units; "
        f"w += blocks * {tuning.THREADS // 32}u) {{",
        begin,
        f"for ({c} first = w * {unit}u; first < (w + 1) * {unit}u && first < n; "
        f"first += {32 * schedule.times}u) {{",
        f"bool here[{held}] = {{}};",
        *[f"{STORED[short]} value{m}[{held}];" for m, short in enumerate(columns)],
        *work,
        *takes,
        "}",
        *end,
        "}",
    ]
    return KernelLoops(lines, blocks, units)
