"""Two shapes as SVG text: lanes of bars, and step lines; without scripts, of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import floor, log10
from typing import Any

import numpy as np

from .colours import BAD, COLOURS, IDLE, OTHER, SMALL

#: Bins of a lane: what is shorter than one is part of it.
BINS = 600
#: Points of a line.
MOST_POINTS = 600
#: Width of a picture, of the names to its left and of the figures to its right, in pixels.
WIDTH, LEFT, RIGHT = 1160, 120, 130
#: Units of time, in ns.
UNITS = (1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns")
#: Room above step lines, for words.
TOP = 16


@dataclass(frozen=True, slots=True)
class Spans:
    """Pieces of time, in any unit, each with the number of its name; as arrays."""

    begin: Any
    end: Any
    label: Any
    names: Sequence[str]

    @classmethod
    def read(cls, pieces: Iterable[tuple[float, float, str]]) -> Spans:
        """The spans of (begin, end, name)."""
        found = list(pieces)
        numbers: dict[str, int] = {}
        label = [numbers.setdefault(name, len(numbers)) for _, _, name in found]
        begin, end = (np.array([p[n] for p in found], np.int64) for n in (0, 1))
        return cls(begin, end, np.array(label, np.intp), list(numbers))

    def __len__(self) -> int:
        return len(self.begin)

    def select(self, mask: Any) -> Spans:
        """Those at which the mask is true."""
        return Spans(self.begin[mask], self.end[mask], self.label[mask], self.names)


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of spans; those that overlap share its time."""

    name: str
    spans: Spans
    #: To the right of the lane: "97 % busy".
    note: str = ""
    height: int = 26


def bin_spans(spans: Spans, begin: float, end: float, bins: int = BINS) -> list[
    tuple[int, int, str, float]
]:  # fmt: skip
    """Runs of bins in which the same name was busy longest: first, behind the last, name, part.

    >>> bin_spans(Spans.read([(0, 6, "a"), (6, 7, "b")]), 0, 10, bins=5)
    [(0, 3, 'a', 1.0), (3, 4, 'b', 0.3)]
    """
    if not len(spans):
        return []
    width = (end - begin) / bins or 1.0
    starts, ends = (spans.begin - begin) / width, (spans.end - begin) / width  # in bins
    low = np.clip(starts.astype(np.intp), 0, bins - 1)
    high = np.clip(np.ceil(ends).astype(np.intp) - 1, low, bins - 1)
    count = len(spans.names)
    busy = np.zeros((bins + 1, count))
    first = np.minimum(ends, low + 1) - np.maximum(starts, low)
    np.add.at(busy, (low, spans.label), np.maximum(first, 1e-3))
    far = high > low
    last, label = high[far], spans.label[far]
    np.add.at(busy, (last, label), np.minimum(ends[far], last + 1) - last)
    between = np.zeros((bins + 1, count))  # whole bins: +1 behind the first, -1 at the last
    np.add.at(between, (low[far] + 1, label), 1.0)
    np.add.at(between, (last, label), -1.0)
    busy += between.cumsum(axis=0)
    every = busy[:bins].sum(axis=1)
    most = busy[:bins].argmax(axis=1)
    out: list[tuple[int, int, str, float]] = []
    for k in np.flatnonzero(every > 1e-9).tolist():
        part, name = every[k], spans.names[most[k]]
        shown = 1.0 if part > 0.9 else 0.6 if part > 0.5 else 0.3
        if out and out[-1][1:] == (k, name, shown):
            out[-1] = out[-1][0], k + 1, name, shown
        else:
            out.append((k, k + 1, name, shown))
    return out


def draw_lanes(
    lanes: Sequence[Lane],
    begin: float,
    end: float,
    colours: Mapping[str, str],
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
            f'<rect x="{LEFT}" y="{y}" width="{inner}" height="{lane.height}" fill="{IDLE}"/>'
        )
        middle = y + lane.height / 2 + 4
        out.append(_text(LEFT - 8, middle, lane.name, "end"))
        out.append(_text(WIDTH - RIGHT + 8, middle, lane.note))
        bars: dict[str, list[str]] = {}  # rectangles by name: one path for each
        for first, behind, name, part in bin_spans(lane.spans, begin, end):
            high = round(max(2.0, lane.height * part))
            wide = f"{max(1.0, (behind - first) * scale):.3g}"
            corner = f"M{LEFT + first * scale:.5g} {y + lane.height - high}"
            bars.setdefault(name, []).append(f"{corner}h{wide}v{high}h-{wide}z")
        for name, path in bars.items():
            out.append(
                f'<path d="{"".join(path)}" fill="{colours.get(name, OTHER)}">'
                f"<title>{escape(name)}</title></path>"
            )
        y += lane.height + 6
    for at, words in marks:
        x = LEFT + inner * (at - begin) / ((end - begin) or 1.0)
        out.append(
            f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y}" stroke="#555" stroke-width="0.7" '
            f'stroke-dasharray="2 2"><title>{escape(words)}</title></line>'
        )
    out += [*_time_axis(begin, end, y), "</svg>"]
    return "".join(out)


def draw_steps(
    lines: Mapping[str, tuple[Any, Any]],
    begin: float,
    end: float,
    top: float,
    colours: Mapping[str, str],
    amounts: Callable[[float], str],
    limit: float | None = None,
    height: int = 120,
    peak: str = "",
) -> str:
    """A picture of step lines, the first filled, with a time axis and a limit.

    Each line has two arrays: times and values. `peak` is written at the largest value of the first.
    """
    inner, top = WIDTH - LEFT - RIGHT, max(top, 1.0)
    span = (end - begin) or 1.0
    out = [_begin(height + TOP + 30)]
    out.append(f'<rect x="{LEFT}" y="{TOP}" width="{inner}" height="{height}" fill="{IDLE}"/>')

    def place(at: float, value: float) -> tuple[float, float]:
        x = LEFT + inner * min(1.0, max(0.0, (at - begin) / span))
        return x, TOP + height * (1 - min(1.0, value / top))

    for part in (0.0, 0.5, 1.0):
        y = TOP + height * (1 - part)
        out.append(_text(LEFT - 8, y + 4, amounts(top * part), "end"))
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + inner}" y2="{y:.1f}" '
                   'stroke="#ddd"/>')  # fmt: skip
    for n, (name, (times, values)) in enumerate(lines.items()):
        if not len(times):
            continue
        colour = colours.get(name, COLOURS[n % len(COLOURS)])
        path: list[str] = []
        y = 0.0
        for at, value in zip(*thin_out(times, values), strict=True):
            x, y_next = place(at, value)
            path.append(f"M{x:.1f} {y_next:.1f}" if not path else f"H{x:.1f}V{y_next:.1f}")
            y = y_next
        path.append(f"H{LEFT + inner}")
        line = "".join(path)
        if n == 0:
            first = place(times[0], 0.0)[0]
            base = TOP + height
            out.append(
                f'<path d="{line}V{base}H{first:.1f}Z" fill="{colour}" fill-opacity="0.25"/>'
            )
        out.append(
            f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.5">'
            f"<title>{escape(name)}</title></path>"
        )
        out.append(_text(WIDTH - RIGHT + 8, min(y + 4, height + TOP), name, colour=colour))
    times, values = next(iter(lines.values()), ((), ()))
    if peak and len(times):
        value = max(values)
        x, y = place(times[int(np.argmax(values))], value)
        anchor = "start" if x < LEFT + inner * 0.7 else "end"
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{BAD}"/>')
        words = f"{peak}: {amounts(value)}"
        out.append(_text(x + (7 if anchor == "start" else -7), y - 4, words, anchor, BAD))
    if limit is not None and limit <= top:
        y = place(begin, limit)[1]
        out.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + inner}" y2="{y:.1f}" stroke="{BAD}" '
            'stroke-width="1.5" stroke-dasharray="6 3"><title>limit</title></line>'
        )
        out.append(_text(WIDTH - RIGHT + 8, y + 4, f"limit {amounts(limit)}", colour=BAD))
    out += [*_time_axis(begin, end, height + TOP), "</svg>"]
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


def thin_out(times: Any, values: Any, most: int = MOST_POINTS) -> tuple[Any, Any]:
    """Thin out the points of a line to the largest value of each of `most` bins, and the last.

    Returns times and values. A line of at most `most` points stays as it is.

    >>> times, values = thin_out([0, 1, 2, 3], [1, 5, 1, 2], most=2)
    >>> times.tolist(), values.tolist()
    ([1, 3], [5, 2])
    """
    times, values = np.asarray(times), np.asarray(values)
    if len(times) <= most:
        return times, values
    edges = np.linspace(0, len(times), most + 1).astype(np.intp).tolist()
    kept = [a + int(values[a:b].argmax()) for a, b in pairwise(edges)]
    if kept[-1] != len(times) - 1:
        kept.append(len(times) - 1)
    return times[kept], values[kept]


def round_ticks(span: float, most: int = 8) -> list[float]:
    """Round numbers from 0 to `span`, about so many at most.

    >>> round_ticks(10, 5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    size = 10.0 ** floor(log10(span / most))
    size *= next(f for f in (1, 2, 5, 10) if span / (f * size) <= most * (1 + 1e-9))
    return [k * size for k in range(int(span / size + 1e-9) + 1)]


def _time_axis(begin: float, end: float, y: float) -> list[str]:
    """An axis of ns."""
    inner = WIDTH - LEFT - RIGHT
    size, unit = next((s, u) for s, u in UNITS if end - begin >= s or s == 1)
    out = []
    span = (end - begin) or 1.0
    for at in round_ticks(span):
        x = LEFT + inner * at / span
        out.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="#777"/>')
        out.append(_text(x, y + 18, f"{at / size:g} {unit}", "middle", SMALL))
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
