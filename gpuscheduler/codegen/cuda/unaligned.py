"""Loops over vectors of inputs that do not begin at multiples of a vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import vectorize
from .body import Body
from .coordinates import LoopSite
from .nodes import NodeTree

#: Statements for a point or a vector of a body, at a site, by its number.
PointUse = Callable[[Body, NodeTree, LoopSite, str], list[str]]


def loop_unaligned(
    body: Body, group: str, base: LoopSite, use: PointUse,
    vectors: tuple[str, str, str], others: tuple[str, str],
) -> list[str]:  # fmt: skip
    """Write the loops over vectors of unaligned inputs, along a group of axes.

    The group has `n` points. `vectors` are a thread's first vector, the end, and the step. A
    vector that leaves its row or the core is taken apart. Points beyond the core come
    before, so that lanes of a warp do the same: `others` are a thread's first such point and
    the step. Threads beyond the core along the other axes may have a body of their own:
    ``central`` tells them apart.
    """
    schedule, arguments, places = body.schedule, body.arguments, body.places
    width, main = schedule.width, schedule.bodies[-1]
    lengths = schedule.lengths(group, 1)

    def site(names: Sequence[str], number: str) -> LoopSite:
        coords = {(group, a): x for a, x in enumerate(names)}
        return LoopSite(base.coords | coords, base.linear | ({group: number} if number else {}))

    def point(
        body: Body, place: LoopSite, number: str, tree: NodeTree, edge: NodeTree | None
    ) -> list[str]:
        lines = body.point(tree, place, use(body, tree, place, number))
        if edge is None:
            return lines
        others = body.point(edge, place, use(body, edge, place, number))
        return ["if (central) {", *lines, "} else {", *others, "}"]

    def slabs(body: Body, kind: str, tree: NodeTree, edge: NodeTree | None = None) -> list[str]:
        slab = body.places.slabs(group, cuts, kind)
        uses = point(body, site(slab.names, slab.number), slab.number, tree, edge)
        return body.loop(others[0], slab.total, others[1], [*slab.found, *uses])

    edge = schedule.partly.get(group)
    if by_row := vectorize.begin_with_rows(schedule):
        rows, number = [*lengths[:-1], -(-lengths[-1] // width)], ""
        coords, names = places.split(group, rows, "i", group, width, "rows")
    else:
        number = "j"
        coords, names = places.split(group, lengths, "j", group, 1, "whole")
        coords.insert(0, f"const {schedule.count} j = i * {width}u;")
    here = site(names, number)
    bounded = bool(schedule.core_bounds(group))
    whole = [places.check_core(here, group)] if bounded else []
    even = vectorize.lie_in_rows(schedule)
    if lengths[-1] % width and vectorize.core_axis_of_vectors(schedule) < 0:
        most = arguments.number("whole", max(lengths[-1] - width + 1, 0))
        whole.append(f"({schedule.count}){names[-1]} < {most}")
    lines = point(body, here, number, main, edge)
    cuts = places.find_core_ends(group, width if even else 1)
    beyond = slabs(body, "core", schedule.apart["last"]) if schedule.apart else []
    single = body.narrow()
    if whole and even and bounded:  # what is in no whole vector of the core is beyond it
        lines = [f"if ({' && '.join(whole)}) {{", *lines, "}"]
    elif whole:
        if by_row:
            end = arguments.number(("length", group, "whole", len(lengths) - 1), lengths[-1])
            inner = [
                f"const {schedule.index} ke = {names[-1]} + one;", f"if (ke >= {end}) break;"
            ]  # fmt: skip
            place = site([*names[:-1], "ke"], "")
        else:
            inner, others_ = places.split(group, lengths, "je", f"{group}e", 1, "whole")
            inner[:0] = [f"const {schedule.count} je = j + one;", "if (je >= n) break;"]
            place = site(others_, "je")
        check = [f"if (!({single.places.check_core(place, group)})) continue;"] if bounded else []
        lines = [
            f"if ({' && '.join(whole)}) {{", *lines, "} else {", "#pragma unroll 1",
            f"for (int one = 0; one < {width}; ++one) {{",
            *inner, *check, *point(single, place, "je", main, edge), "}", "}",
        ]  # fmt: skip
    if "others" in schedule.apart:
        beyond += slabs(single, "last", schedule.apart["others"])
        beyond += slabs(single, "beyond", schedule.tree)
    elif bounded and schedule.partly:
        beyond = slabs(single, "whole", schedule.partly["k"], schedule.tree)
    elif bounded and not schedule.apart:
        beyond = slabs(single, "whole", schedule.tree)
    return [*beyond, *body.loop(*vectors, [*coords, *lines])]
