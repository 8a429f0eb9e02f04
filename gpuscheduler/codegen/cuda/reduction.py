"""Kernels that reduce: threads and blocks along the reduced axes, or beside them.

Rows: lanes of a warp or a whole block go along the reduced axes. Columns: each thread has
results of its own and goes down the reduced axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import NotGenerated
from . import tuning
from .accumulators import finish_results, loop_reduced, loop_results
from .body import Body, KernelLoops, declare_pointers
from .coordinates import LoopSite
from .nodes import NodeTree, part_size
from .statements import choose_last_block
from .work_division import limit_blocks, share_results


@dataclass(slots=True)
class ResultLoop:
    """How a reduction's results are made: declarations, the body of a loop, and its length."""

    #: Statements before the loop.
    declared: list[str]
    #: The loop's body.
    work: list[str]
    #: How often the body runs.
    units: int


@dataclass(slots=True)
class SharedRoom:
    """What blocks share in memory."""

    #: Bytes of scratch memory.
    scratch: int = 0
    #: Number of counters.
    counters: int = 0


def write_loops(body: Body) -> KernelLoops:
    """Write the loop that makes results, those beyond the core by themselves."""
    schedule, arguments, shares = body.schedule, body.arguments, SharedRoom()
    steps = schedule.steps() if schedule.across < 0 else schedule.tile_count("r")
    shared = schedule.wide or not schedule.rows  # whether blocks may share results
    every = make_results(body, shares)
    total, before = "groups * share" if shared else "groups", []
    work = [f"for (unsigned w = blockIdx.x; w < {total}; w += blocks) {{", *every.work, "}"]
    units = every.units
    if schedule.loose and not schedule.rows and schedule.core_bounds("k"):
        # those that are beyond the core come before, by themselves
        others = make_results(body.narrow(), shares, "beyond", schedule.width)
        units += others.units
        mine = arguments.slot(("units", "beyond"), others.units)
        before = [f"const unsigned others = (unsigned){mine};"]
        work = [
            f"for (unsigned v = blockIdx.x; v < {total} + others; v += blocks) {{",
            "if (v < others) {", "const unsigned w = v;", *others.declared, *others.work,
            "} else {", "const unsigned w = v - others;", *every.work, "}", "}",
        ]  # fmt: skip
    blocks = limit_blocks(schedule, units)
    room = f"__shared__ Largest kept[{tuning.THREADS // 2}];", "__shared__ bool last;"
    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {schedule.count} steps = {arguments.number('steps', steps)};",
        *before,
        "if (blockIdx.x >= blocks) return;",
        *(room if shared else ()),
        *declare_pointers(body),
        *every.declared,
        "if (results == 0) return;",
        *work,
    ]
    return KernelLoops(lines, blocks, scratch=shares.scratch, counters=shares.counters)


def make_results(body: Body, shares: SharedRoom, name: str = "", unit: int = 1) -> ResultLoop:
    """Write a loop's body that makes one or several results of a thread.

    It makes all results, or only those beyond the core. The parts of the latter have a `name`,
    and `unit` is the number of results in a vector of the others.
    """
    schedule, arguments, places = body.schedule, body.arguments, body.places
    c, shared = schedule.count, schedule.wide or not schedule.rows
    live = ["const bool live = o < results;"]
    if name:
        slab = places.slabs("k", places.find_core_ends("k", unit))
        results_ = slab.points
        number = slab.number
        site = LoopSite({("k", a): x for a, x in enumerate(slab.names)}, {"k": number})
        live = [*live, f"const {c} i = live ? o : 0;", *slab.found]
        bodies: Sequence[NodeTree] = [schedule.tree, *filter(None, [schedule.partly.get("r")])]
        kept: list[str] = []
    else:
        results_ = schedule.points // schedule.held
        held = schedule.held
        kept, names = places.split("k", schedule.lengths("k", held), "o", "k", held)
        site = LoopSite({("k", a): x for a, x in enumerate(names)}, {"k": f"o * {held}u"})
        bodies, number = schedule.bodies, "o"
        if schedule.loose and not schedule.rows:
            bodies = [*filter(None, [schedule.partly.get("k")]), schedule.bodies[-1]]
            if inside := places.check_core(site, "k"):
                live = [*kept, f"const bool live = o < results && {inside};"]
    side, lanes, share, long = share_results(schedule, results_)
    groups = -(-results_ // side)
    units = groups * share
    if units >= 2**31:
        raise NotGenerated(f"a reduction to {schedule.points:,} results")

    def prefixed(what: str) -> Any:
        return (what, name) if name else what

    declared = [
        f"const {c} results = {arguments.number(prefixed('results'), results_)};",
        f"const unsigned groups = (unsigned){arguments.slot(prefixed('groups'), groups)};",
    ]
    if shared:
        declared += [
            f"const unsigned share = (unsigned){arguments.slot(prefixed('share'), share)};",
            f"const {c} long_ = {arguments.number(prefixed('long'), long)};",
        ]
    if schedule.wide:
        declared.append(f"const int lanes = {tuning.THREADS}, x = 0, y = threadIdx.x;")
        declared.append("const unsigned side = 1;")
    else:
        across = ("/", "%") if schedule.rows else ("%", "/")
        divisor = "lanes" if schedule.rows else "side"
        declared += [
            f"const int lanes = (int){arguments.slot(prefixed('lanes'), lanes)};",
            f"const unsigned side = {tuning.THREADS}u / lanes;",
            f"const int x = threadIdx.x {across[0]} {divisor}, "
            f"y = threadIdx.x {across[1]} {divisor};",
        ]
    if shared:
        declared += declare_scratch(body, shares, groups, share, side, name)
    work = [
        "const unsigned group = w / share, part = w % share;"
        if shared
        else "const unsigned group = w;",
        f"const {c} o = ({c})group * side + x;",
        *live,
    ]
    for j in range(len(schedule.kinds)):
        work.append(f"Part{j} part{j}[{schedule.held}];")
        work += loop_results(body, [f"part{j}[e].clear();"])
    work += [
        "if (live && steps) {",
        *kept,
        *body.load_invariants(LoopSite({**site.coords}, {**site.linear, "r": "0"}), bodies),
        *loop_reduced(body, site, shared, bool(name)),
        "}",
        *merge_block(body),
        *(merge_shares(body) if shared else []),
        "if (y == 0 && live) {",
        *kept,
        *finish_results(body, site, number),
        "}",
    ]
    return ResultLoop(declared, work, units)


def merge_block(body: Body) -> list[str]:
    """Put the parts of a block's threads together."""
    schedule = body.schedule
    lines = []
    for j in range(len(schedule.kinds)):
        lines += loop_results(body, [merge_threads(body, f"part{j}[e]", j)])
    return lines


def merge_threads(body: Body, part: str, j: int) -> str:
    """Merge the parts of a block's threads, by a function where there are many."""
    schedule = body.schedule
    if schedule.wide:
        what, others = "block", "kept"
    elif schedule.rows:
        what, others = "lanes", "lanes"
    else:
        what, others = "lines", "lanes, side, kept"
    many = len(schedule.kinds) * (schedule.held + 1) > tuning.MOST_INLINED
    if many and part_size(*schedule.kinds[j]) >= tuning.LEAST_CALLED:
        return f"{part} = gathered_{what}({part}, {others});"
    return f"gather_{what}({part}, {others});"


def declare_scratch(
    body: Body, shares: SharedRoom, groups: int, share: int, side: int, name: str
) -> list[str]:
    """Where the blocks that share results leave their parts."""
    schedule, arguments = body.schedule, body.arguments
    many = -(-groups * share * side * schedule.held // 2) * 2  # parts may be 16 bytes long
    sizes = [part_size(op, short, gives) for op, short, gives in schedule.kinds]
    slot, counters = arguments.slots.slot_of("scratch"), arguments.slots.slot_of("counters")
    taken, counting = shares.scratch, shares.counters
    if share > 1:
        shares.scratch += many * sum(sizes)
        shares.counters += groups
    behind = [f" + {arguments.slot((what, name), n)}" if name else ""
              for what, n in (("scratch", taken), ("counters", counting))]  # fmt: skip
    lines = [
        f"unsigned char* const scratch = (unsigned char*)S({slot}){behind[0]};",
        f"unsigned* const counters = (unsigned*)S({counters}){behind[1]};",
    ]
    before = 0
    room = arguments.slot(("room", name), many)
    for j, size in enumerate(sizes):
        lines.append(f'static_assert(sizeof(Part{j}) == {size}, "scratch");')
        lines.append(f"Part{j}* const left{j} = (Part{j}*)(scratch + {before} * {room});")
        before += size
    return lines


def merge_shares(body: Body) -> list[str]:
    """Let the last block that shares results merge the parts of all blocks."""
    schedule = body.schedule
    own = f"(((unsigned long long)w * side + x) * {schedule.held} + e)"
    theirs = f"((((unsigned long long)group * share + p) * side + x) * {schedule.held} + e)"
    if schedule.held == 1:
        own, theirs = own.replace(" + e)", ")"), theirs.replace(" + e)", ")")
    leave, take = [], []
    for j in range(len(schedule.kinds)):
        settle = [f"part{j}[e].settle();"] if schedule.kinds[j][0] == "moment" else []
        leave += loop_results(body, [*settle, f"left{j}[{own}] = part{j}[e];"])
        # one of a thread's results after the other: all at once would take all its registers
        take += [
            "#pragma unroll 1",
            f"for (int e = 0; e < {schedule.held}; ++e) {{",
            f"Part{j} whole;",
            "whole.clear();",
            "if (live) for (unsigned p = y; p < share; p += lanes) {",
            f"whole.merge(from_memory(left{j} + {theirs}));",
            "}",
            merge_threads(body, "whole", j),
            f"if (y == 0 && live) left{j}[{own}] = whole;",
            "}",
            *loop_results(body, [f"if (y == 0 && live) part{j}[e] = left{j}[{own}];"]),
        ]
    return [
        "if (share > 1) {",
        "if (y == 0 && live) {",
        *leave,
        "__threadfence();",
        "}",
        *choose_last_block("share", "continue", "group"),
        *take,
        "}",
    ]
