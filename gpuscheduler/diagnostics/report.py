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
from dataclasses import dataclass, field
from html import escape
from operator import attrgetter
from os import PathLike, fspath
from types import FrameType
from typing import Any, NamedTuple, Protocol

import dask
import numpy as np
from dask import config
from dask.utils import format_bytes, format_time

from .._version import __version__
from ..cpython_private import frame_of_caller
from ..frontend.lines import is_users_frame
from ..plan.machine import DISK, HOST, Machine, place_name
from .colours import COPIES_IN, COPIES_OUT, OTHER, PARTS, TIMES, colour_map
from .explain import Explanation, explanation_html
from .headline import SHORT
from .memory import MemoryProfile
from .svg import Lane, Spans, draw_lanes, draw_parts, draw_steps
from .text import count_of, html_table, write_text
from .trace_json import Trace, write_trace

#: Lines of the calling function that are shown around the `with` statement.
SHOWN_LINES = 40
#: Labels that are told apart in lanes; the rest are "others".
MOST_LABELS = 64
#: Rows of tables, and processes of a cluster whose layers are shown.
MOST_ROWS, MOST_PROCESSES = 200, 4
OTHERS = "others"
#: What the clocks of rows are, for people.
CLOCKS = {
    "device": "Times are those of the devices' own clocks.",
    "thread": "Times are those of the threads that ran the steps.",
    "host": "Times are those at which the host heard of steps, up to half a millisecond late.",
    "sampled": "Times are those of a marked run of the same plan.",
    "estimated": 'Times of steps are predictions, scaled to the run: level="device" measures them.',
}
_CSS = """
body{font-family:system-ui,sans-serif;font-size:14px;color:#222;margin:24px;max-width:1180px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:22px 0 6px}h3{font-size:14px}
.verdict{display:flex;gap:14px;margin:12px 0}
.verdict div{flex:1;border-left:4px solid #2563eb;background:#f4f4f5;padding:8px 12px}
.verdict div.bad{border-color:#c62828;background:#fef2f2}
.verdict b{display:block;font-size:17px}
.legend span{margin-right:16px;white-space:nowrap}
.legend i{display:inline-block;width:11px;height:11px;margin-right:5px}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 10px 2px 0;text-align:left}
pre{background:#f4f4f5;padding:8px;overflow:auto;font-size:12px}
.error{background:#fef2f2;border-left:4px solid #c62828;padding:8px 12px}
.note{color:#555}
"""


class RunFacts(NamedTuple):
    """A run, as a report shows it; times are ns of its recorder's clock, 0 where unknown."""

    number: int
    how: str
    planned: str
    began: int
    planned_ns: int
    admitted: int
    queued: int
    ended: int
    error: str
    spilled: int  # bytes


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded in one process: all that a report shows of it."""

    trace: Trace
    machine: Machine | None
    runs: tuple[RunFacts, ...]
    #: What ran, on one page; None where no steps were recorded.
    page: Explanation | None
    #: What filled the memories; None where no steps were recorded.
    memory: MemoryProfile | None
    #: Time in ns of the recorder's clock, kind and text of each.
    notes: tuple[tuple[int, str, str], ...] = ()
    #: Steps and copies without device times, as no timed event was free.
    missed: int = 0


class Reportable(Protocol):
    """What a report records: the runs of a scheduler, or those of a cluster's workers."""

    def __enter__(self) -> Any: ...

    def end(self) -> None: ...

    def take_recorded(self) -> Mapping[str, Recorded]: ...


class Report:
    """Records a `with` block, and writes a report of it at the end; see `gpuscheduler.report`."""

    def __init__(
        self,
        path: str | PathLike[str],
        recording: Reportable,
        code: bool = True,
        timeline: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ):
        self.path, self.recording = path, recording
        self._code, self._timeline = code, timeline
        self._storage = dict(storage_options or {})
        self._source = ""

    def __enter__(self) -> Any:
        if self._code:
            self._source = calling_source(frame_of_caller(1))
        return self.recording.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.recording.end()
            self.write("" if error is None else f"{type(error).__name__}: {error}")
        except Exception as failure:  # never over the user's own error
            warnings.warn(f"the report {self.path!s} was not written: {failure}", stacklevel=2)

    def write(self, error: str = "") -> None:
        """Write the file, and the timeline beside it, if asked for."""
        found = self.recording.take_recorded()
        write_text(self.path, report_html(found, self._source, error), self._storage)
        if self._timeline:
            stem = fspath(self.path).removesuffix(".html")
            write_trace(f"{stem}.json.gz", {name: one.trace for name, one in found.items()})


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


class _Process:
    """What is drawn of one process; times are ns since 1970, in arrays."""

    def __init__(self, name: str, recorded: Recorded, several: bool):
        self.recorded, self.trace, self.machine = recorded, recorded.trace, recorded.machine
        #: The beginning of the names of its devices: "worker 0: ", where there are others.
        self.prefix = f"{name}: " if several else ""
        rows, copies, epoch = self.trace.rows, self.trace.copies, self.trace.epoch
        self.names = list(dict.fromkeys(map(attrgetter("label"), rows)))
        numbers = {name: n for n, name in enumerate(self.names)}
        self.label = _column(map(numbers.__getitem__, map(attrgetter("label"), rows)), len(rows))
        self.place = _column(map(attrgetter("place"), rows), len(rows))
        self.begin = _column(map(attrgetter("begin"), rows), len(rows)) + epoch
        self.end = _column(map(attrgetter("end"), rows), len(rows)) + epoch
        self.copied = (
            _column(map(attrgetter("begin"), copies), len(copies)) + epoch,
            _column(map(attrgetter("end"), copies), len(copies)) + epoch,
        )
        self._used: dict[int, Any] = {}
        samples = self.trace.memory
        self.times = _column(map(attrgetter("ns"), samples), len(samples)) + epoch
        ns = np.bincount(self.label, self.end - self.begin, len(self.names))
        #: ns by label.
        self.seconds: Counter[str] = Counter(dict(zip(self.names, ns.tolist(), strict=True)))

    def used(self, place: int) -> Any:
        """Bytes of values in a place, at `times`."""
        if place not in self._used:
            samples = self.trace.memory
            self._used[place] = _column((s.used.get(place, 0) for s in samples), len(samples))
        return self._used[place]

    def edges(self) -> list[int]:
        """Times at which something began or ended."""
        found = [self.begin, self.end, *self.copied, self.times]
        return [int(f(a)) for a in found if len(a) for f in (np.min, np.max)]

    def device(self, place: int) -> str:
        """The name of a device, for people."""
        return self.prefix + place_name(place)

    def busy_parts(self, begin: int, end: int) -> dict[int, float]:
        """The part of the time in which each device ran anything."""
        return {
            place: busy_part(self.begin[mine], self.end[mine], begin, end)
            for place in sorted(set(self.place.tolist()), key=lambda p: (p < 0, p))
            for mine in [self.place == place]
        }

    def peak(self, memory: int) -> tuple[int, str]:
        """The most bytes of values and working memory, and what ran then."""
        page, profile = self.recorded.page, self.recorded.memory
        found = [(int(self.used(memory).max(initial=0)), self.label_at(memory))]
        if page is not None:
            found += [(use.peak, use.step) for use in page.memory if use.place == memory]
        if profile is not None:
            found += [(p.total, p.during) for p in profile.peaks if p.place == memory]
        return max(found, key=lambda one: one[0])

    def label_at(self, memory: int) -> str:
        """The label of what ran, and made most, when a memory was fullest."""
        if not len(self.times):
            return ""
        at = self.times[int(self.used(memory).argmax())]
        ran = np.flatnonzero((self.begin <= at) & (at <= self.end)).tolist()
        return max((self.trace.rows[i] for i in ran), key=lambda r: r.nbytes).label if ran else ""


def _column(values: Iterable[int], count: int) -> Any:
    return np.fromiter(values, np.int64, count)


def busy_part(begins: Any, ends: Any, begin: int, end: int) -> float:
    """The part of a time in which at least one of these spans goes on."""
    if not len(begins):
        return 0.0
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], ends[order]
    until = np.maximum.accumulate(np.concatenate([[begin], ends]))[:-1]
    covered = np.maximum(0, ends - np.maximum(begins, until)).sum()
    return min(1.0, float(covered) / max(end - begin, 1))


@dataclass(frozen=True, slots=True)
class _Verdict:
    """One of the three answers at the top."""

    question: str
    answer: str
    detail: str
    is_bad: bool = False


@dataclass
class _Sheet:
    """What all sections share."""

    processes: list[_Process]
    begin: int
    end: int
    #: ns by label.
    seconds: Counter[str] = field(default_factory=Counter)
    colours: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_recordings(cls, found: Mapping[str, Recorded]) -> _Sheet:
        processes = [_Process(name, one, len(found) > 1) for name, one in found.items()]
        edges = [edge for p in processes for edge in p.edges()]
        out = cls(processes, min(edges, default=0), max(edges, default=1))
        for process in processes:
            out.seconds.update(process.seconds)
        out.colours = colour_map([name for name, _ in out.seconds.most_common()])
        return out

    def runs(self) -> list[RunFacts]:
        return [run for p in self.processes for run in p.recorded.runs]


def report_html(found: Mapping[str, Recorded], source: str = "", error: str = "") -> str:
    """The report of what was recorded in processes, by their names, as HTML."""
    sheet = _Sheet.from_recordings(found)
    runs = sheet.runs()
    where = f" on {count_of(len(found), 'worker')}" if len(found) > 1 else ""
    body = [f"<h1>gpuscheduler: {count_of(len(runs), 'run')}{where}</h1>"]
    if error:
        body.append(f'<p class="error"><b>ended by an error</b><br>{escape(error)}</p>')
    for run in runs:
        if run.error and run.error.split(":")[0] not in error:
            body.append(f'<p class="error">run {run.number}: {escape(run.error)}</p>')
    if sheet.seconds:
        verdicts = [_slow_verdict(sheet), _waiting_verdict(sheet), _memory_verdict(sheet)]
        body.append(_verdicts_html([v for v in verdicts if v is not None]))
    body.append(_section("Where the time went", _parts_html(runs)))
    if sheet.seconds:
        body.append(_section("Devices over time", _lanes_html(sheet)))
    if memory := "".join(_memory_html(p, sheet) for p in sheet.processes):
        body.append(_section("Memory over time", memory))
    if any(p.trace.copies for p in sheet.processes):
        body.append(_section("Copies", _links_html(sheet)))
    busiest = sorted(sheet.processes, key=lambda p: -sum(p.seconds.values()))
    layers = [(p, p.recorded.page) for p in busiest[:MOST_PROCESSES]]
    if html := "".join([_with_name(p, explanation_html(e)) for p, e in layers if e is not None]):
        body.append(_section("Layers", html))
    profiles = [(p, p.recorded.memory) for p in busiest[:MOST_PROCESSES]]
    if html := "".join([_with_name(p, m._repr_html_()) for p, m in profiles if m is not None]):
        body.append(_section("What filled the memory", html))
    if notes := [
        [f"{(ns + p.trace.epoch - sheet.begin) / 1e6:.1f} ms", p.prefix + kind, text]
        for p in sheet.processes for ns, kind, text in p.recorded.notes
    ]:  # fmt: skip
        body.append(_section("Notes", html_table(notes[:MOST_ROWS], ("at", "what", ""))))
    if source:
        body.append(_section("Source", f"<pre>{escape(source)}</pre>"))
    body.append(_section("Versions and options", _facts_html(sheet.processes)))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>gpuscheduler report</title><style>{_CSS}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _section(title: str, html: str) -> str:
    return f"<h2>{escape(title)}</h2>{html}"


def _with_name(process: _Process, html: str) -> str:
    """HTML below the name of its process, where there are several."""
    name = process.prefix.removesuffix(": ")
    return f"<h3>{escape(name)}</h3>{html}" if name else html


# ---- the answers at the top


def _slow_verdict(sheet: _Sheet) -> _Verdict:
    total = sum(sheet.seconds.values()) or 1
    label, most = sheet.seconds.most_common(1)[0]
    rows = (r for p in sheet.processes for r in p.trace.rows)
    line = next((r.line for r in rows if r.label == label), "")
    detail = f"{format_time(most / 1e9)} of {format_time(total / 1e9)} of work"
    return _Verdict(
        "Which layer takes the time?", f"{label}: {most / total:.0%}",
        detail + (f", {line}" if line else ""),
    )  # fmt: skip


def _waiting_verdict(sheet: _Sheet) -> _Verdict:
    busy = {
        p.device(place): part
        for p in sheet.processes for place, part in p.busy_parts(sheet.begin, sheet.end).items()
    }  # fmt: skip
    idle = min(busy, key=lambda name: busy[name])
    answer = "all are busy" if busy[idle] > 0.8 else f"{idle} waits {1 - busy[idle]:.0%}"
    detail = ", ".join([f"{name} {part:.0%} busy" for name, part in list(busy.items())[:8]])
    return _Verdict("Which device waits?", answer, detail, busy[idle] <= 0.5)


def _memory_verdict(sheet: _Sheet) -> _Verdict | None:
    parts = [
        (p.peak(memory)[0] / max(p.machine.limit(memory), 1), memory, p)
        for p in sheet.processes if p.machine is not None for memory in p.machine.memories
    ]  # fmt: skip
    if not parts:
        return None
    part, memory, p = max(parts, key=lambda one: one[0])
    peak, at = p.peak(memory)
    spilled = sum([run.spilled for run in sheet.runs()])
    short = bool(spilled) or part > SHORT
    answer = "short" if short else "no"
    answer += f": {format_bytes(spilled)} spilled" if spilled else f", {part:.0%} used"
    assert p.machine is not None
    where = p.prefix + p.machine.memory_name(memory)
    detail = f"{format_bytes(peak)} of {format_bytes(p.machine.limit(memory))} on {where}"
    return _Verdict("Is memory short?", answer, detail + (f", at {at}" if at else ""), short)


def _verdicts_html(verdicts: Iterable[_Verdict]) -> str:
    cells = [
        f'<div class="{"bad" if v.is_bad else ""}">{escape(v.question)}<b>{escape(v.answer)}</b>'
        f'<span class="note">{escape(v.detail)}</span></div>'
        for v in verdicts
    ]
    return f'<div class="verdict">{"".join(cells)}</div>'


# ---- sections


def _parts_html(runs: Sequence[RunFacts]) -> str:
    sums = dict.fromkeys(TIMES, 0.0)
    for r in runs:
        if not r.ended:
            continue
        planned = r.planned_ns or r.ended
        admitted = r.admitted or planned
        queued = r.queued or r.ended
        times = r.began, planned, admitted, queued, r.ended
        for n, name in enumerate(TIMES):
            sums[name] += max(times[n + 1] - times[n], 0) / 1e9
    bar = draw_parts([(n, s, TIMES[n]) for n, s in sums.items()], format_time)
    words = ", ".join([f"{n} {format_time(s)}" for n, s in sums.items() if s > 1e-6])
    plans = [f", plan {r.planned}" if r.planned else "" for r in runs]
    how = Counter([(r.how or "not run") + plan for r, plan in zip(runs, plans, strict=True)])
    texts = "; ".join([f"{n} × {what}" for what, n in how.most_common(4)])
    return f'{bar}<p class="note">{escape(words)}. Runs: {escape(texts)}.</p>'


def _lanes_html(sheet: _Sheet) -> str:
    lanes, colours = [], {**sheet.colours, "copies in": COPIES_IN, "copies out": COPIES_OUT}
    for process in sheet.processes:
        lanes += _lanes(process, sheet)
    total = sum(sheet.seconds.values()) or 1
    legend = [
        f'<span><i style="background:{colours[name]}"></i>{escape(name)} {ns / total:.0%}</span>'
        for name, ns in sheet.seconds.most_common(8)
    ]
    if rest := sum([ns for _, ns in sheet.seconds.most_common()[8:]]):
        legend.append(f'<span><i style="background:{OTHER}"></i>others {rest / total:.0%}</span>')
    starts = [
        (run.began + p.trace.epoch, f"{p.prefix}run {run.number} begins")
        for p in sheet.processes for run in p.recorded.runs[:100]
    ]  # fmt: skip
    marks = [(at, words) for at, words in starts if at > sheet.begin]
    picture = draw_lanes(lanes, sheet.begin, sheet.end, colours, marks)
    clocks = Counter([row.clock for p in sheet.processes for row in p.trace.rows])
    words = CLOCKS[clocks.most_common(1)[0][0]]
    if missed := sum([p.recorded.missed for p in sheet.processes]):
        words += f" {missed:,} steps and copies have no such time, as no timed event was free."
    return (
        f'<p class="legend">{"".join(legend)}</p>{picture}<p class="note">{words} Pale is idle; '
        "low bars are busy for a part of their time only.</p>"
    )


def _lanes(p: _Process, sheet: _Sheet) -> list[Lane]:
    """A lane for each device, and those of its copies."""
    kept = {name for name, _ in sheet.seconds.most_common(MOST_LABELS)}
    names = [*[name for name in p.names if name in kept], OTHERS]
    numbers = {name: n for n, name in enumerate(names)}
    label = np.array([numbers.get(name, len(names) - 1) for name in p.names], np.intp)[p.label]
    every, out = Spans(p.begin, p.end, label, names), []
    for place, busy in p.busy_parts(sheet.begin, sheet.end).items():
        out.append(Lane(p.device(place), every.select(p.place == place), f"{busy:.0%} busy"))
        copies = p.trace.copies if place >= 0 else []
        for name, mine in (
            ("copies in", [c.dst == place for c in copies]),
            ("copies out", [c.src == place and c.dst < 0 for c in copies]),
        ):
            if any(mine):
                mask = np.array(mine)
                begin, end = (a[mask] for a in p.copied)
                moved = sum([c.nbytes for c, is_mine in zip(copies, mine, strict=True) if is_mine])
                spans = Spans(begin, end, np.zeros(len(begin), np.intp), [name])
                out.append(Lane(name, spans, format_bytes(moved), 10))
    return out


def _memory_html(p: _Process, sheet: _Sheet) -> str:
    out: list[str] = []
    if p.machine is None or not len(p.times):
        return ""

    def draw(lines: Mapping[str, Any], top: float, **options: Any) -> str:
        return draw_steps(
            {name: (p.times, values) for name, values in lines.items()}, sheet.begin, sheet.end,
            top, PARTS, lambda n: format_bytes(int(n)), **options,
        )  # fmt: skip

    for memory in p.machine.memories:
        limit, used = p.machine.limit(memory), p.used(memory)
        peak = int(used.max())
        near = limit <= 3 * peak
        label = p.label_at(memory)
        picture = draw(
            {"values": used}, max(limit, peak) * 1.02 if near else peak * 1.15,
            limit=limit if near else None, peak=f"peak, {label}" if label else "peak",
        )  # fmt: skip
        name = f"values on {p.prefix}{p.machine.memory_name(memory)}"
        words = f"peak {format_bytes(peak)}"
        if (most := p.peak(memory)[0]) > peak:
            words += f", with working memory {format_bytes(most)}"
        words += f", {most / max(limit, 1):.0%} of the limit of {format_bytes(limit)}"
        out.append(f"<p>{escape(name)}: {words}</p>{picture}")
    spill = {place_name(place): p.used(place) for place in (HOST, DISK)}
    spill = {name: used for name, used in spill.items() if used.any()}
    if spill:
        top = max([int(used.max()) for used in spill.values()]) * 1.15
        out.append(f"<p>{escape(p.prefix)}spilled values</p>{draw(spill, top, height=80)}")
    return "".join(out)


def _links_html(sheet: _Sheet) -> str:
    rows = []
    for p in sheet.processes:
        nbytes: Counter[tuple[int, int]] = Counter()
        busy: Counter[tuple[int, int]] = Counter()
        for copy in p.trace.copies:
            nbytes[copy.src, copy.dst] += copy.nbytes
            busy[copy.src, copy.dst] += copy.end - copy.begin
        for (src, dst), n in nbytes.most_common(40):
            rate = n / max(busy[src, dst], 1)
            part, machine = "", p.machine
            if machine is not None and not machine.shared and DISK not in (src, dst):
                own = machine.host[max(src, dst)]
                whole = machine.peer[src][dst] if min(src, dst) >= 0 else own
                part = f"{rate * 1e9 / whole:.0%}"
            cells = [p.device(src), p.device(dst), format_bytes(n), f"{rate:.2f}", part]
            rows.append(cells)
    head = "from", "to", "bytes", "GB/s while copying", "of the link"
    return html_table(rows[:MOST_ROWS], head)


def _facts_html(processes: Iterable[_Process]) -> str:
    facts = {"gpuscheduler": __version__, "Python": sys.version.split()[0]}
    facts |= {"Dask": dask.__version__, "NumPy": np.__version__}
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        facts["CuPy"] = str(getattr(cupy, "__version__", ""))
    for p in processes:
        if (machine := p.machine) is not None:
            limits = [format_bytes(machine.limit(m)) for m in machine.memories]
            facts[f"{p.prefix}devices"] = str(len(machine.devices))
            facts[f"{p.prefix}memory limits"] = ", ".join(limits)
    section = config.get("gpuscheduler", None)
    if isinstance(section, Mapping):
        facts |= {f"gpuscheduler.{k}": str(v) for k, v in section.items() if v is not None}
    return html_table([[name, value] for name, value in facts.items()])
