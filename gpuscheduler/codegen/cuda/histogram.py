"""Histograms: each block counts, or adds up weights, in shared memory."""

from __future__ import annotations

from ...errors import NotGenerated
from . import tuning
from .accumulators import bound_steps, finish_results, loop_reduced, take_vectors
from .body import Body, KernelLoops, declare_pointers
from .coordinates import LoopSite
from .loop_space import power_above
from .statements import choose_last_block


def write_loops(body: Body) -> KernelLoops:
    """Write the loops of a histogram of counts.

    Each block counts in shared memory, in as many copies as there is room for, so that few lanes
    of a warp want the same counter. It adds what it has to the totals. The last block leaves these
    zero. Integers add up to the same in any order.
    """
    schedule, arguments = body.schedule, body.arguments
    bins = schedule.kernel.shape[0]
    copies = (
        min(tuning.MOST_COPIES, (tuning.COUNTERS // bins).bit_length() - 1)
        if bins <= tuning.COUNTERS
        else 0
    )
    most = tuning.COUNTERS if bins <= tuning.COUNTERS else tuning.MOST_BINS
    counters = arguments.slots.slot_of("counters")
    divided, blocks = divide_points(body)
    if schedule.reach // blocks >= 2**31:
        raise NotGenerated(f"a histogram of {schedule.reach:,} points")
    site = LoopSite({("k", 0): "(int)o"} if schedule.axes["k"] else {})
    lines = [
        *divided,
        f"const unsigned copies = (unsigned){arguments.slot('copies', copies)};",
        "if (blockIdx.x >= blocks) return;",
        f"__shared__ unsigned table[{most}];",
        "__shared__ bool last;",
        f"unsigned* const counters = (unsigned*)S({counters});",
        "unsigned long long* const totals = (unsigned long long*)(counters + 2);",
        f"for (unsigned k = threadIdx.x; k < bins << copies; k += {tuning.THREADS}u) table[k] = 0;",
        "__syncthreads();",
        *declare_pointers(body),
        f"const unsigned lanes = {tuning.THREADS}u, y = threadIdx.x, part = blockIdx.x;",
        "if (steps) {",
        *body.load_invariants(LoopSite({}, {"r": "0"})),
        *loop_reduced(body, LoopSite({}), True, False),
        "}",
        "__syncthreads();",
        f"for (unsigned k = threadIdx.x; k < bins; k += {tuning.THREADS}u) {{",
        "unsigned n = 0;",
        "for (unsigned c = 0; c < 1u << copies; ++c)",
        "  n += table[(k << copies) + ((c + threadIdx.x) & ((1u << copies) - 1))];",
        "if (n) atomicAdd(totals + k, (unsigned long long)n);",
        "}",
        "__threadfence();",
        *choose_last_block("blocks", "return"),
        f"for ({schedule.count} o = threadIdx.x; o < bins; o += {tuning.THREADS}u) {{",
        "const long long part0[1] = {(long long)atomicExch(totals + o, 0ull)};",
        *finish_results(body, site),
        "}",
    ]
    return KernelLoops(lines, blocks, counters=2 + 2 * bins)


def write_weighted_loops(body: Body) -> KernelLoops:
    """Write the loops of a histogram of weights.

    Lanes of a warp that have the same bin add up what they have, and the first of them adds that
    to a table. Each warp has a table of its own, or takes turns with others. Blocks leave their
    sums in memory, and the last one adds these up: always in the same order.
    """
    schedule, arguments = body.schedule, body.arguments
    bins, warps = schedule.kernel.shape[0], tuning.THREADS // 32
    most = tuning.FEW_WEIGHTS if bins * warps <= tuning.FEW_WEIGHTS else tuning.MOST_WEIGHTS
    tables = min(warps, most // bins)
    counters, sums = arguments.slots.slot_of("counters"), arguments.slots.slot_of("scratch")
    divided, blocks = divide_points(body, max(schedule.processors, tuning.SUMS // bins))
    side = min(tuning.THREADS, power_above(bins))
    site = LoopSite({("k", 0): "(int)o"} if schedule.axes["k"] else {})
    lines = [
        *divided,
        f"const unsigned tables = (unsigned){arguments.slot('tables', tables)};",
        "if (blockIdx.x >= blocks) return;",
        f"__shared__ double table[{most}];",
        "__shared__ bool last;",
        f"unsigned* const counters = (unsigned*)S({counters});",
        f"double* const sums = (double*)S({sums});",
        f"for (unsigned k = threadIdx.x; k < bins * tables; k += {tuning.THREADS}u) "
        "table[k] = 0.0;",
        "__syncthreads();",
        *declare_pointers(body),
        f"const unsigned lanes = {tuning.THREADS}u, y = threadIdx.x, part = blockIdx.x;",
        "const unsigned warp = threadIdx.x / 32;",
        "if (steps) {",
        *body.load_invariants(LoopSite({}, {"r": "0"})),
        *loop_weights(body),
        "}",
        "__syncthreads();",
        f"for (unsigned k = threadIdx.x; k < bins; k += {tuning.THREADS}u) {{",
        "double sum = table[k];",
        "for (unsigned n = 1; n < tables; ++n) sum += table[n * bins + k];",
        "sums[part * bins + k] = sum;",
        "}",
        "__threadfence();",
        *choose_last_block("blocks", "return"),
        f"const unsigned side = (unsigned){arguments.slot('side', side)};",
        f"const unsigned every = {tuning.THREADS}u / side, group = threadIdx.x / side;",
        "for (unsigned k = threadIdx.x % side; k < bins; k += side) {",
        "double sum = 0.0;",
        "#pragma unroll 8",
        "for (unsigned n = group; n < blocks; n += every) sum += __ldcg(sums + n * bins + k);",
        "table[group * bins + k] = sum;",
        "}",
        "__syncthreads();",
        f"for ({schedule.count} o = threadIdx.x; o < bins; o += {tuning.THREADS}u) {{",
        "double part0[1] = {table[o]};",
        "for (unsigned n = 1; n < every; ++n) part0[0] += table[n * bins + o];",
        *finish_results(body, site),
        "}",
    ]
    return KernelLoops(lines, blocks, scratch=blocks * bins * 8, counters=2)


def divide_points(body: Body, most: int = 2**31) -> tuple[list[str], int]:
    """Divide the points of a histogram among at most `most` blocks: arguments, and blocks."""
    schedule, arguments = body.schedule, body.arguments
    steps = schedule.reach // schedule.width
    each = tuning.THREADS * schedule.times
    room = min(-(-steps // each), schedule.processors * tuning.ROW_WAVES, most)
    long = -(-max(steps, 1) // max(room, 1))
    long = -(-long // tuning.THREADS) * tuning.THREADS
    blocks = max(1, -(-steps // long))
    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {schedule.count} steps = {arguments.number('steps', steps)};",
        f"const {schedule.count} long_ = {arguments.number('long', long)};",
        f"const unsigned bins = (unsigned){arguments.slot('bins', schedule.kernel.shape[0])};",
    ]
    return lines, blocks


def loop_weights(body: Body) -> list[str]:
    """The loop along the reduced axes.

    All threads of a block go through it as often, whether they have points or not: they put
    together what they have.
    """
    schedule = body.schedule
    items, c = schedule.times * schedule.width, schedule.count
    return [
        *bound_steps(body, True),
        f"for ({c} first = begin; first < end; first += lanes * {schedule.times}u) {{",
        f"const {c} r = first + y;",
        f"Weight held[{items}];",
        *take_vectors(body, LoopSite({}), schedule.width),
        "for (unsigned n = 0; n < lanes / 32; n += tables) {",
        "if (warp >= n && warp < n + tables) {",
        "double* const mine = table + (warp - n) * bins;",
        "#pragma unroll",
        f"for (int h = 0; h < {items}; ++h) weigh_bin(mine, held[h], bins);",
        "}",
        "if (tables < lanes / 32) __syncthreads();",
        "}",
        "}",
    ]
