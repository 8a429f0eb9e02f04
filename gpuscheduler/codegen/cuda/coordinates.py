"""Where a point lies: its coordinates, its place in each array, and the points beyond the core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .arguments import Arguments
from .nodes import NodeTree
from .schedule import Schedule


@dataclass(slots=True)
class LoopSite:
    """Where a piece of code lies in the loops: the names of its coordinates."""

    #: Name of the coordinate along a loop, by the loop's group and its number there.
    coords: dict[tuple[str, int], str]
    #: Name of a point's number within a group, by group.
    linear: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class PointRange:
    """Points, or vectors, that code finds by their number i."""

    #: How many there are.
    points: int
    #: The argument that holds this number.
    total: str
    #: Statements that find a point's coordinates and its number among all points.
    found: list[str]
    #: Names of the coordinates.
    names: list[str]
    #: Name of the number among all points.
    number: str


class Coordinates:
    """The text of coordinates and offsets, for the loops of a schedule."""

    def __init__(self, schedule: Schedule, arguments: Arguments) -> None:
        self.schedule, self.arguments = schedule, arguments

    def check_core(self, site: LoopSite, groups: str = "kr") -> str:
        """The condition that a point, or a vector that begins there, lies in the core."""
        schedule, arguments = self.schedule, self.arguments
        checks = []
        for k, low, length in [x for group in groups for x in schedule.core_bounds(group)]:
            layout, width = schedule.axis_layout[k], schedule.width
            begins = max(length - schedule.fast_stride(layout) * (width - 1), 0)
            offset, first = self.offset(layout, site), arguments.slot(("first", k), low)
            end = arguments.number(("within", k, width), begins)
            checks.append(f"({schedule.count})({offset} - ({schedule.index}){first}) < {end}")
        return " && ".join(checks)

    def multiply(self, coordinate: str, stride: int, name: Any, wide: bool) -> str:
        """The text of a coordinate times a stride, which is an argument."""
        schedule, arguments = self.schedule, self.arguments
        kind = "long long" if wide else schedule.index
        text = coordinate if kind == "int" else f"(long long){coordinate}"
        return text if stride == 1 else f"{text} * ({kind}){arguments.slot(name, stride)}"

    def offset(self, layout: int, site: LoopSite, wide: bool = False) -> str:
        """The number that a layout gives, from its own first one on."""
        schedule = self.schedule
        terms = []
        for group, axes in schedule.axes.items():
            strides = [a.strides[layout] for a in axes]
            if not any(strides):
                continue
            even = all(
                s == t.strides[layout] * t.length for s, t in zip(strides, axes[1:], strict=False)
            )
            last = len(axes) - 1
            if even and group in site.linear:
                name = "stride", layout, group, last
                terms.append(self.multiply(f"({site.linear[group]})", strides[-1], name, wide))
                continue
            for a, s in enumerate(strides):
                if s:
                    name = "stride", layout, group, a
                    terms.append(self.multiply(f"({site.coords[group, a]})", s, name, wide))
        return " + ".join(terms) or "0"

    def index_value(self, tree: NodeTree, k: int, site: LoopSite) -> str:
        """The value of an index leaf."""
        schedule, arguments = self.schedule, self.arguments
        offset = arguments.slot(("offset", tree.letter, k), tree.nodes[k].data.offset)
        layout = schedule.layout_of[tree.letter, k]
        return f"(long long){offset} + {self.offset(layout, site, wide=True)}"

    def split(self, group: str, lengths: Sequence[int], linear: str, letter: str,
                     unit: int = 1, name: str = "") -> tuple[list[str], list[str]]:  # fmt: skip
        """Split the number of a point: statements, and the names of the coordinates.

        The last coordinate counts in `unit`s.
        """
        schedule, arguments = self.schedule, self.arguments
        lines, names = [], [f"{letter}{n}" for n in range(len(lengths))]
        rest = linear
        scale = f" * {unit}u" if unit > 1 else ""
        for n in range(len(lengths) - 1, 0, -1):
            length = lengths[n]
            size = arguments.number(("length", group, name, n), length)
            if schedule.small:
                magic = arguments.slot(("magic", group, name, n), magic_of(max(length, 1)))
                whole = f"divide({rest}, {magic})"
            else:
                whole = f"{rest} / {size}"
            lines.append(f"const {schedule.count} {letter}q{n} = {whole};")
            lines.append(
                f"const {schedule.index} {letter}{n} = ({schedule.index})"
                f"(({rest} - {letter}q{n} * {size}){scale});"
            )
            rest, scale = f"{letter}q{n}", ""
        if lengths:
            lines.append(f"const {schedule.index} {letter}0 = ({schedule.index})({rest}{scale});")
        return lines, names

    def linear_index(self, group: str, lengths: Sequence[int], names: Sequence[str]) -> str:
        """A point's number among all of a group of axes."""
        schedule, arguments = self.schedule, self.arguments
        linear = names[0]
        for n in range(1, len(lengths)):
            whole = arguments.number(("length", group, "whole", n), lengths[n])
            linear = f"(({schedule.count}){linear} * {whole} + {names[n]})"
        return linear

    def find_core_ends(self, group: str, unit: int = 1) -> dict[int, tuple[int, int]]:
        """Where the core begins and ends along the axes that it does not fill.

        Along the last axis of the group it has whole vectors of a `unit`.
        """
        schedule = self.schedule
        cuts: dict[int, tuple[int, int]] = {}
        last = len(schedule.axes[group]) - 1
        for k, low, length in schedule.core_bounds(group):
            (a,) = [a for a, s in enumerate(schedule.strides(schedule.axis_layout[k], group)) if s]
            high = low + length
            if a == last:
                low, high = -(-low // unit) * unit, high // unit * unit
            cuts[a] = low, max(low, high)
        if cuts and last not in cuts and (odd := schedule.axes[group][-1].length % unit):
            cuts[last] = 0, schedule.axes[group][-1].length - odd
        return cuts

    def slabs(
        self, group: str, cuts: dict[int, tuple[int, int]], kind: str = "whole"
    ) -> PointRange:
        """Find points outside the core, which lie in slabs before and behind it along each axis.

        `kind` selects some of them: "core" those inside the core along the last axis (vectors
        then), "last" those inside it along all other axes, and "beyond" the rest.
        """
        schedule, arguments = self.schedule, self.arguments
        lengths = [a.length for a in schedule.axes[group]]
        last, steps = len(lengths) - 1, 1
        begin, sizes = [0] * len(lengths), list(lengths)  # of what is left
        order, gap = sorted(cuts), cuts.get(last, (0, lengths[-1]))
        if kind == "last":
            order = [last]
            for a in cuts:
                if a != last:
                    begin[a], sizes[a] = cuts[a][0], cuts[a][1] - cuts[a][0]
        elif kind != "whole":
            order = [a for a in order if a != last]
            if kind == "core":
                steps = schedule.width
                begin[last], sizes[last] = gap[0], (gap[1] - gap[0]) // steps
            else:
                sizes[last] = lengths[last] - (gap[1] - gap[0])
        names = [f"{group}e{n}" for n in range(len(lengths))]
        total, chosen = 0, []
        for a in order:
            low, high = cuts[a]
            for behind, (start, size) in enumerate(((0, low), (high, lengths[a] - high))):
                where, slab = [], [*sizes[:a], size, *sizes[a + 1 :]]
                for x in range(last, -1, -1):
                    at, length = start if x == a else begin[x], slab[x]
                    word = kind, group, a, x, behind and x == a
                    from_ = arguments.number(("from", *word), at)
                    scale = f" * {steps}u" if x == last and steps > 1 else ""
                    where.append(f"{names[x]} = ({schedule.index})({from_} + rest % ")
                    where[-1] += f"{arguments.number(('slab', *word), length)}{scale});"
                    if x:
                        where.append(f"rest /= {arguments.number(('slab', *word), length)};")
                many = arguments.number(("slab", kind, group, a, behind), math.prod(slab))
                chosen += [f"if (rest < {many}) {{", *where, "break;", "}", f"rest -= {many};"]
                total += math.prod(slab)
            begin[a], sizes[a] = low, high - low
        found = [
            f"{schedule.count} rest = i;",
            f"{schedule.index} {', '.join(f'{x} = 0' for x in names)};",
            "do {", *chosen, "} while (0);",
        ]  # fmt: skip
        if kind == "beyond":
            from_, many = (
                f"({schedule.index}){arguments.slot((word, group), n)}"
                for word, n in (("gap", gap[0]), ("gap length", gap[1] - gap[0]))
            )
            found.append(f"if ({names[last]} >= {from_}) {names[last]} += {many};")
        number = f"{group}at"
        found.append(
            f"const {schedule.count} {number} = {self.linear_index(group, lengths, names)};"
        )
        all_points = arguments.number(("slabs", kind, group), total)
        return PointRange(total, all_points, found, names, number)


def magic_of(d: int) -> int:
    """What `divide` needs to divide numbers below 2**31: a factor, and 32 bits up how far to shift.

    >>> m = magic_of(7)
    >>> [n * (m % 2**32) >> (m >> 32) for n in (0, 6, 7, 2**31 - 1)]
    [0, 0, 1, 306783378]
    """
    shift = 31 + (d - 1).bit_length()
    return shift << 32 | -(-(1 << shift) // d)
