"""Two shapes as SVG text: lanes of bars, and step lines; without scripts, of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

#: Bins of a lane: what is shorter than one is part of it.
BINS = 600
#: Points of a line.
MOST_POINTS = 600
#: Width of a picture, of the names to its left and of the figures to its right, in pixels.
WIDTH, LEFT, RIGHT = 1160, 120, 130
#: Room above step lines, for words.
TOP = 16
#: Colours that are told apart by most people (Paul Tol's "bright" and "muted").
COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#882255", "#44aa99",
)  # fmt: skip
OTHER = "#999999"
COPIES_IN, COPIES_OUT = "#0f766e", "#c2410c"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a lane: from `begin` to `end`, in any unit."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of spans; those that overlap share its time."""

    name: str
    spans: Sequence[Span]
    #: To the right of the lane: "97 % busy".
    note: str = ""
    height: int = 26


def colour_map(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in their order; the same grey for those behind the eighth."""
    out: dict[str, str] = {}
    for name in names:
        if name not in out:
            out[name] = COLOURS[len(out)] if len(out) < len(COLOURS) else OTHER
    return out


def bin_spans(spans: Iterable[Span], begin: float, end: float, bins: int = BINS) -> list[
    tuple[int, int, str, float]
]:  # fmt: skip
    """Runs of bins in which the same name was busy longest: first, behind the last, name, part.

    >>> bin_spans([Span(0, 6, "a"), Span(6, 7, "b")], 0, 10, bins=5)
    [(0, 3, 'a', 1.0), (3, 4, 'b', 0.3)]
    """
    width = (end - begin) / bins or 1.0
    busy: list[dict[str, float]] = [{} for _ in range(bins)]
    for span in spans:
        low = max(0, min(bins - 1, int((span.begin - begin) / width)))
        high = max(low, min(bins - 1, int((span.end - begin) / width)))
        for k in range(low, high + 1):
            left, right = begin + k * width, begin + (k + 1) * width
            took = min(span.end, right) - max(span.begin, left)
            if took > 0 or low == high:  # one that ends where a bin begins is not in that bin
                busy[k][span.name] = busy[k].get(span.name, 0.0) + max(took, 1e-3 * width)
    out: list[tuple[int, int, str, float]] = []
    for k, found in enumerate(busy):
        if not found:
            continue
        name = max(found, key=lambda n: found[n])
        part = min(1.0, sum(found.values()) / width)
        shown = 1.0 if part > 0.9 else 0.6 if part > 0.5 else 0.3
        if out and out[-1][1] == k and out[-1][2] == name and out[-1][3] == shown:
            out[-1] = out[-1][0], k + 1, name, shown
        else:
            out.append((k, k + 1, name, shown))
    return out


def draw_lanes(
    lanes: Sequence[Lane],
    begin: float,
    end: float,
    colours: Mapping[str, str],
    ticks: Callable[[float], str],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A picture of lanes above each other, with a time axis; `marks` are vertical lines."""
    inner = WIDTH - LEFT - RIGHT
    height = sum([lane.height + 6 for lane in lanes]) + 30
    out = [_begin(height)]
    y = 4
    scale = inner / BINS
    for lane in lanes:
        out.append(
            f'<rect x="{LEFT}" y="{y}" width="{inner}" height="{lane.height}" fill="#f4f4f5"/>'
        )
        middle = y + lane.height / 2 + 4
        out.append(_text(LEFT - 8, middle, lane.name, "end"))
        out.append(_text(WIDTH - RIGHT + 8, middle, lane.note))
        for first, behind, name, part in bin_spans(lane.spans, begin, end):
            high = max(2.0, lane.height * part)
            colour = colours.get(name, OTHER)
            out.append(
                f'<rect x="{LEFT + first * scale:.1f}" y="{y + lane.height - high:.1f}" '
                f'width="{max(1.0, (behind - first) * scale):.1f}" height="{high:.1f}" '
                f'fill="{colour}"><title>{escape(name)}</title></rect>'
            )
        y += lane.height + 6
    for at, words in marks:
        x = LEFT + inner * (at - begin) / ((end - begin) or 1.0)
        out.append(
            f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y}" stroke="#555" stroke-width="0.7" '
            f'stroke-dasharray="2 2"><title>{escape(words)}</title></line>'
        )
    out += [*_axis(begin, end, y, ticks), "</svg>"]
    return "".join(out)


def draw_steps(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    begin: float,
    end: float,
    top: float,
    colours: Mapping[str, str],
    ticks: Callable[[float], str],
    amounts: Callable[[float], str],
    limit: float | None = None,
    height: int = 120,
    peak: str = "",
) -> str:
    """A picture of step lines, the first filled, with a time axis and a limit.

    `peak` is written at the largest value of the first line.
    """
    inner, top = WIDTH - LEFT - RIGHT, max(top, 1.0)
    span = (end - begin) or 1.0
    out = [_begin(height + TOP + 30)]
    out.append(f'<rect x="{LEFT}" y="{TOP}" width="{inner}" height="{height}" fill="#f4f4f5"/>')

    def place(at: float, value: float) -> tuple[float, float]:
        x = LEFT + inner * min(1.0, max(0.0, (at - begin) / span))
        return x, TOP + height * (1 - min(1.0, value / top))

    for part in (0.0, 0.5, 1.0):
        y = TOP + height * (1 - part)
        out.append(_text(LEFT - 8, y + 4, amounts(top * part), "end"))
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + inner}" y2="{y:.1f}" '
                   'stroke="#ddd"/>')  # fmt: skip
    for n, (name, points) in enumerate(lines.items()):
        if not points:
            continue
        colour = colours.get(name, COLOURS[n % len(COLOURS)])
        path: list[str] = []
        y = 0.0
        for at, value in thin_out(points):
            x, y_next = place(at, value)
            path.append(f"M{x:.1f} {y_next:.1f}" if not path else f"H{x:.1f}V{y_next:.1f}")
            y = y_next
        path.append(f"H{LEFT + inner}")
        line = "".join(path)
        if n == 0:
            first = place(points[0][0], 0.0)[0]
            base = TOP + height
            out.append(
                f'<path d="{line}V{base}H{first:.1f}Z" fill="{colour}" fill-opacity="0.25"/>'
            )
        out.append(
            f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.5">'
            f"<title>{escape(name)}</title></path>"
        )
        out.append(_text(WIDTH - RIGHT + 8, min(y + 4, height + TOP), name, colour=colour))
    every = next(iter(lines.values()), ())
    if peak and every:
        at, value = max(every, key=lambda p: p[1])
        x, y = place(at, value)
        anchor = "start" if x < LEFT + inner * 0.7 else "end"
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#dc2626"/>')
        words = f"{peak}: {amounts(value)}"
        out.append(_text(x + (7 if anchor == "start" else -7), y - 4, words, anchor, "#b91c1c"))
    if limit is not None and limit <= top:
        y = place(begin, limit)[1]
        out.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + inner}" y2="{y:.1f}" stroke="#dc2626" '
            'stroke-width="1.5" stroke-dasharray="6 3"><title>limit</title></line>'
        )
        out.append(_text(WIDTH - RIGHT + 8, y + 4, f"limit {amounts(limit)}", colour="#dc2626"))
    out += [*_axis(begin, end, height + TOP, ticks), "</svg>"]
    return "".join(out)


def draw_parts(parts: Sequence[tuple[str, float, str]], words: Callable[[float], str]) -> str:
    """One bar of parts: name, amount and colour of each."""
    total = sum([amount for _, amount, _ in parts]) or 1.0
    out, x = [_begin(28)], float(LEFT)
    inner = WIDTH - LEFT - RIGHT
    for name, amount, colour in parts:
        width = inner * amount / total
        text = f"{name} {words(amount)}"
        out.append(
            f'<rect x="{x:.1f}" y="4" width="{width:.1f}" height="22" fill="{colour}">'
            f"<title>{escape(text)}</title></rect>"
        )
        if width > 7 * len(text):
            out.append(_text(x + 6, 19, text, colour="#fff"))
        x += width
    return "".join([*out, "</svg>"])


def thin_out(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[
    tuple[float, float]
]:  # fmt: skip
    """At most about so many points: the largest value of each bin stays, and the last.

    >>> thin_out([(0, 1), (1, 5), (2, 1), (3, 2)], most=2)
    [(1, 5), (3, 2)]
    """
    if len(points) <= most:
        return list(points)
    size = len(points) / most
    bins = [points[int(k * size) : int((k + 1) * size)] for k in range(most)]
    out = [max(b, key=lambda p: p[1]) for b in bins if b]
    return out if out[-1] == points[-1] else [*out, points[-1]]


def round_ticks(begin: float, end: float, most: int = 8) -> list[float]:
    """Round numbers between two, at most so many.

    >>> round_ticks(0, 10, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    span = (end - begin) or 1.0
    size = 10.0 ** len(str(int(span)))
    for _ in range(40):
        smaller = next((size / d for d in (2, 5, 10) if span / (size / d) <= most), None)
        if smaller is None:
            break
        size = min([size / d for d in (2, 5, 10) if span / (size / d) <= most])
    first = -(-begin // size) * size
    return [first + k * size for k in range(int((end - first) / size + 1e-9) + 1)]


def _axis(begin: float, end: float, y: float, ticks: Callable[[float], str]) -> list[str]:
    inner = WIDTH - LEFT - RIGHT
    out = []
    for at in round_ticks(0.0, end - begin):
        x = LEFT + inner * at / ((end - begin) or 1.0)
        out.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="#777"/>')
        out.append(_text(x, y + 18, ticks(at), "middle", "#555"))
    return out


def _begin(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-family="system-ui,sans-serif" '
        'font-size="12">'
    )


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(words)}</text>"
    )
