"""Statements that put values into accumulators and make results of them.

Reductions, histograms and windows share them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .body import Body
from .coordinates import LoopSite
from .nodes import NodeTree
from .operations import STORED, TYPES, store_value
from .statements import enclose, loop_elements
from .tiles import loop_tiles
from .unaligned import loop_unaligned


def loop_results(body: Body, lines: list[str]) -> list[str]:
    """Statements for each result of a thread, by its number e."""
    held = body.schedule.held
    if held == 1:
        return [x.replace("[e]", "[0]").replace(" + e)", ")") for x in lines]
    return loop_elements(held, lines)


def take_values(body: Body, tree: NodeTree, site: LoopSite, which: str) -> list[str]:
    """Compute the values of a vector of points and put them into the accumulators."""
    schedule, places = body.schedule, body.places
    width = schedule.width
    together = width if schedule.rows else 1
    declared, after, takes = [], [], []
    if any(op in ("argmin", "argmax") for op, _, _ in schedule.kinds):
        text = places.offset(schedule.position, site, wide=True)
        declared.append(f"const long long at = {text};")
    for j, ((op, short, _), root) in enumerate(zip(schedule.kinds, tree.roots, strict=True)):
        value = f"{tree.letter}{root}"
        extra = ""
        if op in ("argmin", "argmax"):
            step = schedule.fast_stride(schedule.position) if schedule.rows else 0
            last = len(schedule.axes[schedule.thread_group]) - 1
            name = "stride", schedule.position, schedule.thread_group, last
            extra = ", at, " + (places.multiply("1", step, name, True) if step else "0")
        elif op == "moment" and schedule.across < 0 and not schedule.loose:
            # the vectors of a step are there in order
            extra = ", opens" if schedule.sliding else ", u == 0"
        kind = TYPES[short]
        if op == "histogram" and short == "c16":
            e = "e" if width > 1 else "0"
            after.append(f"held[u * {width} + {e}].hold({value}, bins);")
        elif op == "histogram":
            after.append(f"count_bin(table, {value}, bins, copies);")
        elif together > 1:
            declared.append(f"{kind} g{j}[{together}];")
            after.append(f"g{j}[e] = {value};")
            takes.append(f"part{j}[0].take(g{j}{extra});")
        else:
            target = "e" if schedule.held > 1 else "0"
            after.append(f"const {kind} g{j}[1] = {{{value}}};")
            after.append(f"part{j}[{target}].take(g{j}{extra});")
    return [*declared, *body.compute_elements(tree, site, which, after), *takes]


def finish_results(body: Body, site: LoopSite, number: str = "o") -> list[str]:
    """Compute and write the outputs of complete results.

    `number` is the name of a result's number where results are in order, and else empty.
    """
    schedule, places = body.schedule, body.places
    tree = schedule.final
    held = schedule.held
    coords = dict(site.coords)
    linear = {"k": f"o * {held}u + e" if held > 1 else number} if number else {}
    if held > 1:
        last = len(schedule.axes["k"]) - 1
        coords["k", last] = f"{coords['k', last]} + e"
    place = LoopSite(coords, linear)
    declared = []
    for k in tree.inputs:
        clear = " = {}" if tree.guards[k] is not None else ""
        declared.append(f"{STORED[tree.nodes[k].code]} z{k}{clear};")
    lines = [*declared]
    lines += enclose(body.loads(tree, tree.inputs, place, "z#"), bool(tree.inputs))
    values = {k: f"z{k}" for k in tree.inputs}
    wanted = tree.nodes_below(tree.roots)
    lines += body.statements(tree, wanted, place, values)
    offset = places.offset(schedule.out_layout, place)
    vector = held > 1 and schedule.fast_stride(schedule.out_layout) == 1
    before, after = [], []
    for n, (short, root) in enumerate(zip(schedule.outs, tree.roots, strict=True)):
        value = store_value(short, f"{tree.letter}{root}")
        if vector:
            kind = f"Vec<{STORED[short]}, {held}>"
            before.append(f"{kind} out{n};")
            lines.append(f"out{n}.x[e] = {value};")
            start = places.offset(schedule.out_layout, site)
            after.append(f"*({kind}*)(q{n} + ({start})) = out{n};")
        else:
            lines.append(f"q{n}[{offset}] = {value};")
    if held == 1:
        return lines
    return [*before, *loop_elements(held, lines), *after]


def loop_reduced(body: Body, site: LoopSite, shared: bool, beyond: bool) -> list[str]:
    """The loop along the reduced axes, of results `beyond` the core perhaps."""
    schedule, arguments, places = body.schedule, body.arguments, body.places
    width = schedule.width if schedule.rows else 1
    bounds = bound_steps(body, shared)
    others = ("part * lanes + y", "share * lanes") if shared else ("y", "lanes")
    if schedule.loose and schedule.rows:
        central = places.check_core(site, "k") if schedule.partly else ""
        return [
            *bounds, f"const {schedule.count} n = {arguments.number('n', schedule.reach)};",
            *([f"const bool central = {central};"] if central else []),
            *loop_unaligned(
                body, "r", site, lambda own, tree, place, _: take_values(own, tree, place, "0"),
                ("begin + y", "end", "lanes"), others,
            ),
        ]  # fmt: skip
    if schedule.loose:
        return [*bounds, *loop_columns(body, site, beyond, others)]
    if schedule.across >= 0:

        def use(place: LoopSite) -> list[str]:
            return take_values(body, schedule.tree, place, "u")

        tiles = f"const {schedule.count} tiles = steps;"
        return [tiles, *loop_tiles(body, "r", "part", "share", use)]
    return [
        *bounds,
        f"for ({schedule.count} r = begin + y; r < end; r += lanes * {schedule.times}u) {{",
        *take_vectors(body, site, width),
        "}",
    ]


def bound_steps(body: Body, shared: bool) -> list[str]:
    """Declare where a block begins and ends along the reduced axes."""
    schedule = body.schedule
    first = f"({schedule.count})part * long_" if shared else "0"
    end = "steps < begin + long_ ? steps : begin + long_" if shared else "steps"
    return [f"const {schedule.count} begin = {first};", f"const {schedule.count} end = {end};"]


def take_vectors(body: Body, site: LoopSite, width: int) -> list[str]:
    """Load the next vectors of a thread, from number `r` on, and take them in."""
    schedule, places = body.schedule, body.places
    coords, names = places.split("r", schedule.lengths("r", width), "j", "r", width)
    place = LoopSite(
        site.coords | {("r", a): x for a, x in enumerate(names)},
        site.linear | {"r": f"j * {width}u"},
    )
    return body.load_and_use(
        "j < end", "j = r + u * lanes", coords, place,
        lambda tree, u: take_values(body, tree, place, u),
    )  # fmt: skip


def loop_columns(body: Body, site: LoopSite, beyond: bool, others: tuple[str, str]) -> list[str]:
    """The loop of threads that have neighbouring results, of unaligned inputs.

    Vectors of the core come together. Points beyond it along the reduced axes come alone, as
    do all points of a result beyond the core.
    """
    schedule, arguments, places = body.schedule, body.arguments, body.places
    lengths = schedule.lengths("r", 1)

    def point(tree: NodeTree, names: Sequence[str], number: str) -> list[str]:
        coords = {("r", a): x for a, x in enumerate(names)}
        place = LoopSite(site.coords | coords, site.linear | {"r": number})
        return body.point(tree, place, take_values(body, tree, place, "0"))

    def steps(lines: list[str], start: str = "begin", end: str = "end") -> list[str]:
        head = f"for ({schedule.count} j = {start} + y; j < {end}; j += lanes) {{"
        return [head, *coords, *lines, "}"]

    coords, names = places.split("r", lengths, "j", "r", 1, "whole")
    if beyond:
        inside, outside = schedule.partly.get("r", schedule.tree), schedule.tree
    else:
        inside, outside = schedule.bodies[-1], schedule.partly.get("k", schedule.tree)
    main = point(inside, names, "j")
    if not schedule.core_bounds("r"):
        return steps(main)
    slab = places.slabs("r", places.find_core_ends("r"))
    uses = point(outside, slab.names, slab.number)
    last = body.loop(others[0], slab.total, others[1], [*slab.found, *uses])
    if len(lengths) > 1:
        place = LoopSite({("r", a): x for a, x in enumerate(names)}, {"r": "j"})
        return [*last, *steps([f"if ({places.check_core(place, 'r')}) {{", *main, "}"])]
    ((k, low, length),) = schedule.core_bounds("r")
    below, above = (
        arguments.number(("core", n), value) for n, value in enumerate((low, low + length))
    )
    return [
        *last,
        f"const {schedule.count} from = begin > {below} ? begin : {below};",
        f"const {schedule.count} past = end < {above} ? end : {above};",
        *steps(main, "from", "past"),
    ]
