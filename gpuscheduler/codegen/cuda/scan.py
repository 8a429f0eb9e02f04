"""Scans: lanes of a warp go along a line, or each thread has lines of its own."""

from __future__ import annotations

from ...errors import NotGenerated
from . import tuning
from .accumulators import loop_results
from .body import Body, KernelLoops, declare_pointers
from .coordinates import LoopSite
from .elementwise import write_stores
from .loop_space import power_above
from .operations import TYPES
from .statements import enclose, unroll
from .work_division import limit_blocks


def write_loops(body: Body) -> KernelLoops:
    """Write the loop that scans one line after the other, or lines side by side.

    All lanes of a warp take part in what they put together, also where they have no points.
    """
    schedule, arguments, places = body.schedule, body.arguments, body.places
    width, held, c = schedule.width, schedule.held, schedule.count
    steps = schedule.steps()
    results_ = schedule.points // held
    lanes = min(32, power_above(steps)) if schedule.rows else 1
    groups = -(-results_ // (tuning.THREADS // lanes))
    if groups >= 2**31:
        raise NotGenerated(f"a scan along {schedule.points:,} lines")
    blocks = limit_blocks(schedule, groups)
    kept, names = places.split("k", schedule.lengths("k", held), "o", "k", held)
    unit = width if schedule.rows else 1
    along, steps_ = places.split("r", schedule.lengths("r", unit), "j", "r", unit)
    site = LoopSite(
        {("k", a): x for a, x in enumerate(names)} | {("r", a): x for a, x in enumerate(steps_)},
        {"k": f"o * {held}u", "r": f"j * {unit}u"},
    )
    if schedule.rows:
        own = [
            f"const int lanes = (int){arguments.slot('lanes', lanes)};",
            f"const unsigned side = {tuning.THREADS}u / lanes;",
            "const int x = threadIdx.x / lanes, y = threadIdx.x % lanes;",
        ]
    else:
        own = [
            "const int lanes = 1, x = threadIdx.x, y = 0;",
            f"const unsigned side = {tuning.THREADS}u;",
        ]
    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {c} results = {arguments.number('results', results_)};",
        f"const {c} steps = {arguments.number('steps', steps)};",
        f"const unsigned groups = (unsigned){arguments.slot('groups', groups)};",
        "if (results == 0 || steps == 0 || blockIdx.x >= blocks) return;",
        *own,
        *declare_pointers(body),
        "for (unsigned w = blockIdx.x; w < groups; w += blocks) {",
        f"const {c} o = ({c})w * side + x;",
        "const bool live = o < results;",
        *kept,
        *load_line_invariants(body, site),
        *declare_parts(body),
        f"for ({c} r = 0; r < steps; r += lanes * {schedule.times}u) {{",
        *take_steps(body, along, site),
        "}",
        "}",
    ]
    return KernelLoops(lines, blocks)


def load_line_invariants(body: Body, site: LoopSite) -> list[str]:
    """Loads of what is the same along a line."""
    schedule = body.schedule
    place = LoopSite(site.coords, site.linear | {"r": "0"})
    lines = []
    for tree in schedule.bodies:
        inner, x = set(body.loop_inputs(tree)), body.register(tree)
        outer = [k for k in tree.inputs if k not in inner]
        lines += [f"{schedule.type_of_load(tree, k)} {x}{k} = {{}};" for k in outer]
        loads = body.loads(tree, outer, place, f"{x}#")
        lines += ["if (live) {", *loads, "}"] if outer else []
    return lines


def declare_parts(body: Body) -> list[str]:
    """Declare accumulators: one for each line of a thread, or for all lanes of a line."""
    schedule = body.schedule
    name = "carry" if schedule.rows else "part"
    lines = []
    for j in range(len(schedule.kinds)):
        lines.append(f"Part{j} {name}{j}[{schedule.held}];")
        lines += loop_results(body, [f"{name}{j}[e].clear();"])
    return lines


def take_steps(body: Body, along: list[str], site: LoopSite) -> list[str]:
    """Load, scan and write the vectors that a thread has at a time."""
    schedule, places = body.schedule, body.places
    width, at, condition = schedule.width, "j = r + u * lanes + y", "live && j < steps"
    declared, loads = [], []
    for tree in schedule.bodies:
        inner = body.loop_inputs(tree)
        declared += body.declare_registers(tree, schedule.times)
        target = f"{body.register(tree)}#[u]"
        loads += enclose(body.loads(tree, inner, site, target), bool(inner))
    values, whole, takes = [], [], []
    for j, root in enumerate(schedule.tree.roots):
        e = "e" if width > 1 else "0"
        values.append(f"g{j}[{e}] = {schedule.tree.letter}{root};")
        if schedule.rows:
            whole += [
                f"Part{j} part{j}[1];",
                f"part{j}[0].clear();",
                f"if (here) take_all(part{j}[0], g{j});",
                f"part{j}[0] = before_lane(part{j}[0], carry{j}[0], lanes, y);",
            ]
        held = "e" if schedule.held > 1 else "0"
        takes.append(f"take_one(part{j}[{held}], g{j}[{e}]);")
    room = [f"{TYPES[short]} g{j}[{width}];" for j, (_, short, _) in enumerate(schedule.kinds)]
    place = places.offset(schedule.out_layout, site)
    return [
        *declared,
        *(body.loop_vectors(condition, at, [*along, *loads]) if loads else []),
        *unroll(
            f"int u = 0; u < {schedule.times}; ++u",
            [
                f"const {schedule.count} {at};",
                f"const bool here = {condition};",
                *along,
                *room,
                "if (here) {",
                *body.compute_elements(schedule.tree, site, "u", values),
                "}",
                *whole,
                "if (here) {",
                f"const {schedule.index} at = {place};",
                *write_stores(body, schedule.final, site, "at", "u", takes),
                "}",
            ],
        ),
    ]
