"""Kernels without reductions: threads go along the innermost axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import tuning
from .body import Body, KernelLoops, declare_pointers
from .coordinates import LoopSite
from .nodes import NodeTree
from .operations import STORED, store_value
from .unaligned import loop_unaligned
from .work_division import limit_blocks


def write_loops(body: Body) -> KernelLoops:
    """Write the loop of threads along the innermost axis."""
    schedule, arguments, places = body.schedule, body.arguments, body.places
    width = schedule.width
    n = schedule.points // width
    step = f"(({schedule.count})blocks * {tuning.THREADS}u)"
    blocks = limit_blocks(schedule, -(-n // (tuning.THREADS * schedule.times)))
    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {schedule.count} n = {arguments.number('n', n)};",
        "if (n == 0 || blockIdx.x >= blocks) return;",
    ]
    lengths = schedule.lengths("k", width)
    coords, names = places.split("k", lengths, "j", "k", width)
    site = LoopSite({("k", a): x for a, x in enumerate(names)}, {"k": f"j * {width}u"})
    at = f"i + u * {step}"
    if schedule.tree.calls and len(lengths) > 1:
        # points that lie close together take similar branches: the lanes of a warp lie in a
        # patch, not in a line
        rows, columns = (
            arguments.number(("length", "k", "", n), lengths[n])
            for n in (len(lengths) - 2, len(lengths) - 1)
        )
        at = f"patched<{schedule.count}>({at}, {rows}, {columns})"
    place, where = f"({schedule.index})(j * {width}u)", []
    if schedule.out_layout >= 0:
        where = [f"const {schedule.index} to = {places.offset(schedule.out_layout, site)};"]
        place = "to"
    work = body.load_and_use(
        "j < n", f"j = {at}", coords, site,
        lambda tree, u: [*where, *write_stores(body, tree, site, place, u)],
    )  # fmt: skip
    lines += [
        *declare_pointers(body),
        *body.load_invariants(LoopSite({}, {"k": "0"})),
        f"for ({schedule.count} i = blockIdx.x * {tuning.THREADS}u + threadIdx.x; i < n; "
        f"i += {step} * {schedule.times}u) {{",
        *work,
        "}",
    ]
    return KernelLoops(lines, blocks)


def write_unaligned_loops(body: Body) -> KernelLoops:
    """Write the loop over vectors of the output whose inputs are not aligned."""
    schedule, arguments = body.schedule, body.arguments
    m = -(-schedule.points // schedule.width)
    if schedule.out_layout >= 0:  # vectors of a row, which begins at a multiple of one
        *rows, last = schedule.lengths("k", 1)
        m = math.prod(rows) * -(-last // schedule.width)
    blocks = limit_blocks(schedule, -(-m // tuning.THREADS))

    def use(body: Body, tree: NodeTree, site: LoopSite, number: str) -> list[str]:
        schedule, places = body.schedule, body.places
        if schedule.out_layout < 0:
            return write_stores(body, tree, site, f"({schedule.index}){number}", "0")
        place = f"const {schedule.index} to = {places.offset(schedule.out_layout, site)};"
        return [place, *write_stores(body, tree, site, "to", "0")]

    first = f"blockIdx.x * {tuning.THREADS}u + threadIdx.x"
    step = f"({schedule.count})blocks * {tuning.THREADS}u"
    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {schedule.count} n = {arguments.number('n', schedule.points)}, "
        f"m = {arguments.number('m', m)};",
        "if (n == 0 || blockIdx.x >= blocks) return;",
        *declare_pointers(body),
        *body.load_invariants(LoopSite({}, {"k": "0"})),
        *loop_unaligned(body, "k", LoopSite({}), use, (first, "m", step), (first, step)),
    ]
    return KernelLoops(lines, blocks)


def write_stores(
    body: Body, tree: NodeTree, site: LoopSite, place: str, which: str, before: Sequence[str] = ()
) -> list[str]:
    """Compute the outputs of a vector of points and write them; `before` comes before each."""
    schedule = body.schedule
    width = schedule.width
    declared, after, writes = [], [], []
    for n, (short, root) in enumerate(zip(schedule.outs, tree.roots, strict=True)):
        value = store_value(short, f"{tree.letter}{root}")
        if width == 1:
            after.append(f"q{n}[{place}] = {value};")
            continue
        kind = f"Vec<{STORED[short]}, {width}>"
        declared.append(f"{kind} out{n};")
        after.append(f"out{n}.x[e] = {value};")
        writes.append(f"*({kind}*)(q{n} + {place}) = out{n};")
    return [*declared, *body.compute_elements(tree, site, which, after, before), *writes]
