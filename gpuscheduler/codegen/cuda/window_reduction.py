"""Kernels that reduce windows which slide along a slow axis.

Threads share what these have in common.
"""

from __future__ import annotations

import math

from . import tuning
from .accumulators import finish_results, loop_results, take_values
from .body import Body, KernelLoops, declare_pointers
from .coordinates import LoopSite
from .nodes import NodeTree
from .statements import enclose, unroll
from .work_division import limit_blocks


def write_loops(body: Body) -> KernelLoops:
    """Write the loop in which each thread makes several results of overlapping windows."""
    schedule, arguments, places = body.schedule, body.arguments, body.places
    some, width, c, tree = schedule.sliding, schedule.width, schedule.count, schedule.tree
    axes, (window, *others) = schedule.axes["k"], schedule.axes["r"]
    at = len(axes) - 2  # the axis that they slide along
    lengths = schedule.lengths("k", width)
    lengths[at] = -(-lengths[at] // some)
    n = math.prod(lengths)
    blocks = limit_blocks(schedule, -(-n // tuning.THREADS))
    coords, names = places.split("k", lengths, "i", "k", width)
    across, inner = places.split("r", [x.length for x in others], "q", "r")
    site = LoopSite({("k", x): name for x, name in enumerate(names)})
    site.coords["k", at] = "begin"
    place = LoopSite(site.coords | {("r", 0): "(int)s"})
    place.coords |= {("r", x + 1): name for x, name in enumerate(inner)}
    reduced = [("r", x) for x in range(1 + len(others))]
    loads: list[str] = []
    if others:  # all that lies across belongs to a step
        many = arguments.number("across", math.prod(x.length for x in others))
        takes = body.point(tree, place, take_values(body, tree, place, "0"))
        takes = [f"for ({c} q = 0; q < {many}; ++q) {{", *across, *takes, "}"]
    else:
        loads = enclose(body.loads(tree, body.loop_inputs(tree), place, "x#[u]"))
        takes = take_values(body, tree, place, "u")
    last = f"({schedule.index}){arguments.slot('last', axes[at].length - some)}"
    here = LoopSite({**site.coords, ("k", at): "(begin + t)"})
    finished = ["if (t >= skip) {", *finish_results(body, here, ""), "}"]
    first = f"blockIdx.x * {tuning.THREADS}u + threadIdx.x"
    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {c} n = {arguments.number('n', n)};",
        "if (n == 0 || blockIdx.x >= blocks) return;",
        *declare_pointers(body),
        *body.loop(
            first, "n", f"({c})blocks * {tuning.THREADS}u",
            [
                *coords,
                f"const {schedule.index} mine = {names[at]} * {some};",
                f"const {schedule.index} begin = mine < {last} ? mine : {last};",
                f"const {schedule.index} skip = mine - begin;",
                *body.load_invariants(LoopSite(site.coords | dict.fromkeys(reduced, "0"))),
                *share_windows(body, window.length, loads, takes, finished),
            ],
        ),
    ]  # fmt: skip
    return KernelLoops(lines, blocks)


def share_windows(
    body: Body, window: int, loads: list[str], takes: list[str], finished: list[str],
    some: int = 0, tree: NodeTree | None = None, name: str = "window",
) -> list[str]:  # fmt: skip
    """Make results of windows one behind the other.

    Most of what these reduce they share (`shared`). What lies before that is put together from its
    end backwards (`head`), what lies behind it from its begin on (`tail`): van Herk, Pattern
    Recognition Letters 13 (1992). Step `s` is loaded, and taken in, and result `t` is `finished`.
    """
    schedule, arguments = body.schedule, body.arguments
    some, width, c = some or schedule.sliding, schedule.width, schedule.count

    def room(times: int) -> list[str]:
        return body.declare_registers(tree or schedule.tree, times) if loads else []

    def for_every_result(own: str, moments: str = "") -> list[str]:
        """The same for all reductions, and for all results side by side."""
        return loop_results(
            body,
            [
                (moments if moments and op == "moment" else own).replace("#", str(j))
                for j, (op, _, _) in enumerate(schedule.kinds)
            ],
        )

    def merge_statements(other: str) -> list[str]:
        return for_every_result(f"part#[e].merge({other});", f"part#[e].add({other});")

    def parts(name: str, many: str = "") -> list[str]:
        return [f"Part{j} {name}{j}{many}[{width}];" for j in range(len(schedule.kinds))]

    def declare_accumulators(name: str, which: str = "") -> list[str]:
        """What takes in values from here on."""
        return [f"Part{j} (&part{j})[{width}] = {name}{j}{which};"
                for j in range(len(schedule.kinds))]  # fmt: skip

    reach = f"({c}){arguments.slot(name, window)}"
    shared = [
        f"for ({c} r = {some - 1}; r < {reach}; r += {schedule.times}u) {{",
        *room(schedule.times),
        *(body.loop_vectors(f"s < {reach}", "s = r + u", loads) if loads else []),
        *body.loop_vectors(
            f"s < {reach}", "s = r + u",
            ["const bool opens = u == 0;", *declare_accumulators("shared"), *takes],
        ),
        "}",
    ]  # fmt: skip
    ahead, closed = f"int u = 0; u < {some - 1}; ++u", "const bool opens = false;"
    head = [
        *room(some - 1),
        *(unroll(ahead, [f"const {c} s = u;", *loads]) if loads else []),
        *unroll(
            f"int u = {some - 2}; u >= 0; --u",
            [f"const {c} s = u;", closed, *declare_accumulators("head", "[u]"),
             *for_every_result("part#[e].clear();", "part#[e].begin(shared#[e]);"), *takes,
             f"if (u < {some - 2}) {{", *merge_statements("head#[u + 1][e]"), "}"],
        ),
    ]  # fmt: skip
    tail = [
        *room(some - 1),
        *(unroll(ahead, [f"const {c} s = {reach} + u;", *loads]) if loads else []),
        *unroll(
            f"int t = 0; t < {some}; ++t",
            ["if (t) {", "const int u = t - 1;", f"const {c} s = {reach} + u;", closed,
             *declare_accumulators("tail"), *takes, "}", *parts("part"),
             *for_every_result("part#[e] = shared#[e];"),
             f"if (t < {some - 1}) {{", *merge_statements("head#[t][e]"), "}",
             "if (t) {", *merge_statements("tail#[e]"), "}", *finished],
        ),
    ]  # fmt: skip
    return [
        *parts("shared"), *for_every_result("shared#[e].clear();"), *shared,
        *parts("head", f"[{some - 1}]"), "{", *head, "}",
        *parts("tail"), *for_every_result("tail#[e].clear();", "tail#[e].begin(shared#[e]);"),
        "{", *tail, "}",
    ]  # fmt: skip
