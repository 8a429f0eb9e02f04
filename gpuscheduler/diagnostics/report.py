"""A report of what ran, as one file: lanes, memory, links, layers, advice; no scripts.

The file loads nothing, so it works in mails, in notebooks without trust, and offline.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike, fspath
from types import FrameType
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from dask import config
from dask.utils import format_bytes, format_time

from .._version import __version__
from ..cpython_private import frame_of_caller
from ..frontend.lines import is_users_frame
from ..plan.machine import DISK, HOST, Machine, place_name
from ..runtime.observe import RunRecord
from .explain import Explanation, explanation_html
from .svg import (
    COPIES_IN,
    COPIES_OUT,
    OTHER,
    Lane,
    Span,
    colour_map,
    draw_lanes,
    draw_parts,
    draw_steps,
)
from .trace_json import Trace, write

if TYPE_CHECKING:
    from .recording import Recording

#: Lines of the calling function that are shown around the `with` statement.
SHOWN_LINES = 40
#: Colours of the parts of a run.
_PARTS = {
    "planning": "#7c3aed",
    "waiting for memory": "#dc2626",
    "running": "#2563eb",
    "handing over": "#64748b",
}
_CSS = """
body{font-family:system-ui,sans-serif;font-size:14px;color:#222;margin:24px;max-width:1180px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:22px 0 6px}
.verdict{display:flex;gap:14px;margin:12px 0}
.verdict div{flex:1;border-left:4px solid #2563eb;background:#f4f4f5;padding:8px 12px}
.verdict div.bad{border-color:#dc2626;background:#fef2f2}
.verdict b{display:block;font-size:17px}
.legend span{margin-right:16px;white-space:nowrap}
.legend i{display:inline-block;width:11px;height:11px;margin-right:5px}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 10px 2px 0;text-align:left}
pre{background:#f4f4f5;padding:8px;overflow:auto;font-size:12px}
.error{background:#fef2f2;border-left:4px solid #dc2626;padding:8px 12px}
.note{color:#555}
"""


class Report:
    """Records a `with` block, and writes a report of it at the end; see `gpuscheduler.report`."""

    def __init__(
        self,
        path: str | PathLike[str],
        recording: Recording,
        code: bool = True,
        timeline: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ):
        self.path, self.recording = path, recording
        self._code, self._timeline = code, timeline
        self._storage = dict(storage_options or {})
        self._source = ""

    def __enter__(self) -> Recording:
        if self._code:
            self._source = calling_source(frame_of_caller(1))
        return self.recording.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.recording.end()
        try:
            self.write("" if error is None else f"{type(error).__name__}: {error}")
        except Exception as failure:  # never over the user's own error
            warnings.warn(f"the report {self.path!s} was not written: {failure}", stacklevel=2)

    def write(self, error: str = "") -> None:
        """Write the file, and the timeline beside it, if asked for."""
        text = report_html(self.recording, self._source, error)
        write_text(self.path, text, self._storage)
        if self._timeline:
            stem = fspath(self.path).removesuffix(".html")
            write(f"{stem}.json.gz", {"gpuscheduler": self.recording.trace()})


def write_text(path: str | PathLike[str], text: str, storage: Mapping[str, Any]) -> None:
    """Write a text to a path or URL (by fsspec)."""
    if "://" in fspath(path):
        import fsspec  # type: ignore[import-untyped]

        with fsspec.open(fspath(path), "w", encoding="utf-8", **storage) as file:
            file.write(text)
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def calling_source(frame: FrameType | None) -> str:
    """The source around the line on which the user's nearest frame is."""
    while frame is not None and not is_users_frame(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    file, at = frame.f_code.co_filename, frame.f_lineno
    first, last = max(1, at - SHOWN_LINES // 4), at + 3 * SHOWN_LINES // 4
    if frame.f_code.co_name != "<module>":
        try:
            lines, start = inspect.getsourcelines(frame.f_code)
            first, last = max(first, start), min(last, start + len(lines) - 1)
        except (OSError, TypeError):
            return ""
    every = linecache.getlines(file, frame.f_globals)
    return "".join(every[first - 1 : last]).rstrip()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """One of the three answers at the top."""

    question: str
    answer: str
    detail: str
    is_bad: bool = False


def report_html(recording: Recording, source: str = "", error: str = "") -> str:
    """The report of a recording as HTML."""
    records, trace = recording.runs(), recording.trace()
    try:
        page: Explanation | None = recording.explain()
    except RuntimeError:
        page = None
    machine = next((r.machine for r in reversed(records) if r.machine is not None), None)
    begin, end = _time_range(trace)
    seconds: Counter[str] = Counter()
    for row in trace.rows:
        seconds[row.label] += row.end - row.begin
    colours = colour_map([name for name, _ in seconds.most_common()])
    body = [f"<h1>gpuscheduler: {len(records)} run{'s'[: len(records) != 1]}</h1>"]
    if error:
        body.append(f'<p class="error"><b>ended by an error</b><br>{escape(error)}</p>')
    for record in records:
        if record.error and record.error.split(":")[0] not in error:
            body.append(f'<p class="error">run {record.number}: {escape(record.error)}</p>')
    if trace.rows and machine is not None:
        body.append(_verdicts_html(_verdicts(seconds, trace, machine, page, records, begin, end)))
    body.append(_section("Where the time went", _parts_html(records)))
    if trace.rows:
        clock = Counter(row.clock for row in trace.rows).most_common(1)[0][0]
        body.append(_section("Devices over time", _lanes_html(
            trace, records, begin, end, colours, seconds, clock, recording
        )))  # fmt: skip
    if trace.memory and machine is not None:
        body.append(_section("Memory over time", _memory_html(trace, machine, begin, end)))
    if trace.copies:
        body.append(_section("Copies", _links_html(trace, machine)))
    if page is not None:
        body.append(_section("Layers", explanation_html(page)))
    if notes := recording.notes():
        rows = [[f"{(n.ns - recording.began) / 1e6:.1f} ms", n.kind, n.text] for n in notes]
        body.append(_section("Notes", _table(("at", "what", ""), rows[:200])))
    if source:
        body.append(_section("Source", f"<pre>{escape(source)}</pre>"))
    body.append(_section("Versions and options", _facts_html(machine)))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>gpuscheduler report</title><style>{_CSS}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _time_range(trace: Trace) -> tuple[int, int]:
    begins = [r.begin for r in trace.rows] + [c.begin for c in trace.copies]
    ends = [r.end for r in trace.rows] + [c.end for c in trace.copies]
    times = [s.ns for s in trace.memory]
    return min(begins + times, default=0), max(ends + times, default=1)


def _verdicts(
    seconds: Counter[str],
    trace: Trace,
    machine: Machine,
    page: Explanation | None,
    records: Sequence[RunRecord],
    begin: int,
    end: int,
) -> list[_Verdict]:
    """Which layer takes the time, which device waits, whether memory is short."""
    total = sum(seconds.values()) or 1
    label, most = seconds.most_common(1)[0]
    line = next((r.line for r in trace.rows if r.label == label), "")
    slow = _Verdict(
        "Which layer takes the time?",
        f"{label}: {most / total:.0%}",
        f"{format_time(most / 1e9)} of {format_time(total / 1e9)} of work"
        + (f", {line}" if line else ""),
    )
    busy = busy_parts(trace, begin, end)
    places = sorted(busy)
    idle = min(places, key=lambda p: busy[p])
    least = busy[idle]
    answer = "all are busy" if least > 0.8 else f"{place_name(idle)} waits {1 - least:.0%}"
    detail = ", ".join([f"{place_name(p)} {busy[p]:.0%} busy" for p in places[:8]])
    waits = _Verdict("Which device waits?", answer, detail, least <= 0.5)
    peaks = {m: max([s.used.get(m, 0) for s in trace.memory], default=0) for m in machine.memories}
    if page is not None:
        for use in page.memory:
            peaks[use.place] = max(peaks.get(use.place, 0), use.peak)
    parts = {m: n / max(machine.limit(m), 1) for m, n in peaks.items()}
    fullest = max(parts, key=lambda m: parts[m])
    limit = machine.limit(fullest)
    took = [r.footprint for r in records if r.footprint is not None]
    spilled = sum([n for footprint in took for n in footprint.spilled.values()])
    short = bool(spilled) or parts[fullest] > 0.9
    answer = "short" if short else "no"
    answer += f": {format_bytes(spilled)} spilled" if spilled else f", {parts[fullest]:.0%} used"
    at = _label_at_peak(trace, fullest)
    if not at and page is not None:
        at = next((u.at for u in page.memory if u.place == fullest), "")
    where = machine.memory_name(fullest)
    detail = f"{format_bytes(peaks[fullest])} of {format_bytes(limit)} on {where}"
    return [slow, waits, _Verdict(
        "Is memory short?", answer, detail + (f", at {at}" if at else ""), short
    )]  # fmt: skip


def busy_parts(trace: Trace, begin: int, end: int) -> dict[int, float]:
    """The part of the time in which each device ran anything."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for row in trace.rows:
        spans.setdefault(row.place, []).append((row.begin, row.end))
    out = {}
    for place, found in spans.items():
        total, until = 0, begin
        for a, b in sorted(found):
            total += max(0, b - max(a, until))
            until = max(until, b)
        out[place] = min(1.0, total / max(end - begin, 1))
    return out


def _verdicts_html(verdicts: Iterable[_Verdict]) -> str:
    cells = [
        f'<div class="{"bad" if v.is_bad else ""}">{escape(v.question)}<b>{escape(v.answer)}</b>'
        f'<span class="note">{escape(v.detail)}</span></div>'
        for v in verdicts
    ]
    return f'<div class="verdict">{"".join(cells)}</div>'


def _parts_html(records: Sequence[RunRecord]) -> str:
    sums = dict.fromkeys(_PARTS, 0.0)
    for r in records:
        if not r.ended:
            continue
        planned = r.planned_ns or r.ended
        admitted = r.admitted or planned
        queued = r.queued or r.ended
        for name, ns in zip(
            _PARTS,
            (planned - r.began, admitted - planned, queued - admitted, r.ended - queued),
            strict=True,
        ):
            sums[name] += max(ns, 0) / 1e9
    bar = draw_parts([(n, s, _PARTS[n]) for n, s in sums.items()], format_time)
    words = ", ".join([f"{n} {format_time(s)}" for n, s in sums.items() if s > 1e-6])
    how: Counter[str] = Counter(
        f"{r.how or 'not run'}, plan {r.planned or 'kept'}" for r in records
    )
    runs = "; ".join([f"{n} × {what}" for what, n in how.most_common(4)])
    return f'{bar}<p class="note">{escape(words)}. Runs: {escape(runs)}.</p>'


def _lanes_html(
    trace: Trace,
    records: Sequence[RunRecord],
    begin: int,
    end: int,
    colours: Mapping[str, str],
    seconds: Counter[str],
    clock: str,
    recording: Recording,
) -> str:
    busy = busy_parts(trace, begin, end)
    lanes = []
    for place in sorted(busy, key=lambda p: (p < 0, p)):
        spans = [Span(r.begin, r.end, r.label) for r in trace.rows if r.place == place]
        lanes.append(Lane(place_name(place), spans, f"{busy[place]:.0%} busy"))
        for name, mine, colour in (
            ("copies in", [c for c in trace.copies if c.dst == place], COPIES_IN),
            ("copies out", [c for c in trace.copies if c.src == place and c.dst < 0], COPIES_OUT),
        ):
            if mine and place >= 0:
                moved = format_bytes(sum([c.nbytes for c in mine]))
                spans = [Span(c.begin, c.end, name) for c in mine]
                lanes.append(Lane(name, spans, moved, 10))
                colours = {**colours, name: colour}
    total = sum(seconds.values()) or 1
    legend = [
        f'<span><i style="background:{colours[name]}"></i>{escape(name)} {ns / total:.0%}</span>'
        for name, ns in seconds.most_common(8)
    ]
    if len(seconds) > 8:
        rest = sum([ns for _, ns in seconds.most_common()[8:]])
        legend.append(f'<span><i style="background:{OTHER}"></i>others {rest / total:.0%}</span>')
    epoch = recording.epoch
    marks = [
        (r.began + epoch, f"run {r.number} begins")
        for r in records[:100]
        if r.began + epoch > begin
    ]
    picture = draw_lanes(lanes, begin, end, colours, lambda ns: format_time(ns / 1e9), marks)
    words = {
        "device": "Times are those of the devices' own clocks.",
        "thread": "Times are those of the threads that ran the steps.",
        "host": "Times are those at which the host heard of steps, up to half a millisecond late.",
        "sampled": "Times are those of a marked run of the same plan.",
        "estimated": "Times of steps are predictions, scaled to the run: "
        'level="device" measures them.',
    }[clock]
    return (
        f'<p class="legend">{"".join(legend)}</p>{picture}<p class="note">{words} Pale is idle; '
        "low bars are busy for a part of their time only.</p>"
    )


def _memory_html(trace: Trace, machine: Machine, begin: int, end: int) -> str:
    out = []
    for memory in machine.memories:
        limit = machine.limit(memory)
        points = [(float(s.ns), float(s.used.get(memory, 0))) for s in trace.memory]
        peak = max([n for _, n in points], default=0.0)
        near = limit <= 3 * peak
        top = max(limit, peak) * 1.02 if near else peak * 1.15
        name = f"values on {machine.memory_name(memory)}"
        label = _label_at_peak(trace, memory)
        picture = draw_steps(
            {"values": points}, begin, end, top, {"values": "#2563eb"},
            lambda ns: format_time(ns / 1e9), lambda n: format_bytes(int(n)),
            limit if near else None, peak=f"peak, {label}" if label else "peak",
        )  # fmt: skip
        used = f"{peak / max(limit, 1):.0%} of the limit of {format_bytes(limit)}"
        out.append(f"<p>{escape(name)}: peak {format_bytes(int(peak))}, {used}</p>{picture}")
    spill = {
        place_name(p): [(float(s.ns), float(s.used.get(p, 0))) for s in trace.memory]
        for p in (HOST, DISK)
    }
    spill = {name: points for name, points in spill.items() if any(n for _, n in points)}
    if spill:
        top = max([n for points in spill.values() for _, n in points]) * 1.15
        picture = draw_steps(
            spill, begin, end, top, {}, lambda ns: format_time(ns / 1e9),
            lambda n: format_bytes(int(n)), height=80,
        )  # fmt: skip
        out.append(f"<p>spilled values</p>{picture}")
    return "".join(out)


def _label_at_peak(trace: Trace, memory: int) -> str:
    """The label of what ran, and made most, when a memory was fullest."""
    if not trace.memory:
        return ""
    at = max(trace.memory, key=lambda s: s.used.get(memory, 0)).ns
    ran = [r for r in trace.rows if r.begin <= at <= r.end]
    return max(ran, key=lambda r: r.nbytes).label if ran else ""


def _links_html(trace: Trace, machine: Machine | None) -> str:
    nbytes: Counter[tuple[int, int]] = Counter()
    busy: Counter[tuple[int, int]] = Counter()
    for copy in trace.copies:
        nbytes[copy.src, copy.dst] += copy.nbytes
        busy[copy.src, copy.dst] += copy.end - copy.begin
    rows = []
    for (src, dst), n in nbytes.most_common(40):
        rate = n / max(busy[src, dst], 1)
        part = ""
        if machine is not None and not machine.shared and DISK not in (src, dst):
            whole = machine.peer[src][dst] if min(src, dst) >= 0 else machine.host[max(src, dst)]
            part = f"{rate * 1e9 / whole:.0%}"
        rows.append([place_name(src), place_name(dst), format_bytes(n), f"{rate:.2f}", part])
    return _table(("from", "to", "bytes", "GB/s while copying", "of the link"), rows)


def _facts_html(machine: Machine | None) -> str:
    facts = {"gpuscheduler": __version__, "Python": sys.version.split()[0]}
    facts |= {"Dask": dask.__version__, "NumPy": np.__version__}
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        facts["CuPy"] = str(getattr(cupy, "__version__", ""))
    if machine is not None:
        facts["devices"] = str(len(machine.devices))
        limits = [format_bytes(machine.limit(m)) for m in machine.memories]
        facts["memory limits"] = ", ".join(limits)
    section = config.get("gpuscheduler", None)
    if isinstance(section, Mapping):
        facts |= {f"gpuscheduler.{k}": str(v) for k, v in section.items() if v is not None}
    return _table((), [[name, value] for name, value in facts.items()])


def _section(title: str, html: str) -> str:
    return f"<h2>{escape(title)}</h2>{html}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{first}</tr>{body}</table>" if head else f"<table>{body}</table>"
