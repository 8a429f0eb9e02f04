"""A computation on one page: what runs as what, what it costs, and what would make it faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any

from dask.utils import format_bytes, format_time

from ..plan.machine import HOST, Machine, place_name
from ..plan.plan import Footprint, Plan
from ..plan.step_table import StepTable, step_table
from ..runtime.observe import Row, RunRecord, decode_rows
from .advice import SHOWN, Advice, Facts, LayerFacts, give_advice
from .colours import IDLE, KERNEL, WRITTEN
from .text import align_columns, count_of

#: Rows of the page.
MOST_ROWS = 25
#: Characters of what is shown where the mouse is, and of a line below the table.
LONGEST_TITLE, LONGEST_NOTE = 100, 500


@dataclass(frozen=True, slots=True)
class ExplainedLayer:
    """Steps that run the same code."""

    label: str  # "normalise · exp · sum"
    line: str  # "wave.py:20, wave.py:21"
    code: str  # where the user's functions are defined
    how: str  # "kernel", "2 kernels", "as written", "file", "host"
    reason: str  # why it is no kernel
    times: int
    reads: int  # bytes, of all its steps
    makes: int
    predicted: float  # seconds, of all its steps
    measured: float | None  # seconds; None before it has run
    limit: str  # "memory 88 %", "arithmetic 40 %"; "" where it is not known

    @property
    def seconds(self) -> float:
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The peak of one memory."""

    place: int
    name: str  # "device 0"
    peak: int
    limit: int
    step: str  # what runs at the peak: a label and its line


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a computation does; printed, it is one page.

    Figures are predictions, beside what the latest recorded run measured.
    """

    steps: int
    devices: int
    where: str  # what runs it, where that is not the scheduler's devices
    rows: tuple[ExplainedLayer, ...]  # those that take longest first
    memory: tuple[MemoryUse, ...]
    links: dict[tuple[int, int], int]  # bytes, by source and destination
    spilled: dict[int, int]  # bytes, by place
    advice: tuple[Advice, ...]
    predicted: float | None = None  # seconds
    measured: float | None = None  # seconds, of the latest run
    run: str = ""  # "run 3, replay"
    clock: str = ""  # of the measured times of layers
    planned: str = ""  # "from cache, 0.1 ms"
    why: dict[str, list[str]] = field(default_factory=dict)  # labels, by why they are no kernel
    choice: str = ""  # whether GPUs or the host compute NumPy's arrays, and why

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for tools."""
        out = asdict(self)
        out["links"] = {f"{a} -> {b}": n for (a, b), n in self.links.items()}
        return out

    def __str__(self) -> str:
        choice = [self.choice] * bool(self.choice)
        return "\n".join([*choice, self._headline(), *self._table(), *self._footer()])

    def __repr__(self) -> str:
        return f"<Explanation of {self.steps:,} steps in {len(self.rows)} rows>"

    def _headline(self) -> str:
        devices = self.where or count_of(self.devices, "device")
        out = f"{count_of(self.steps, 'step')} on {devices}."
        if self.predicted is not None:
            out += f" Predicted {format_time(self.predicted)}"
            out += "." if self.measured is None else ","
        if self.measured is not None:
            word = "Measured" if self.predicted is None else "measured"
            out += f" {word} {format_time(self.measured)} ({self.run})."
        if self.memory:
            most = max(self.memory, key=lambda m: m.peak / max(m.limit, 1))
            room = f" of {format_bytes(most.limit)}" if most.limit < 2**60 else ""
            out += f" Peak {format_bytes(most.peak)}{room} on {most.name}"
            out += f", at {most.step}." if most.step else "."
        return out

    def _table(self) -> list[str]:
        if not self.rows:
            return []
        measured = any(r.measured is not None for r in self.rows)
        limits = any(r.limit for r in self.rows)
        head = ["layers", "line", "runs as", "times", "reads", "makes", "predicted"]
        head += ["measured"] * measured + ["limit"] * limits
        cells = [head]
        for r in self.rows[:MOST_ROWS]:
            row = [r.label, r.line, r.how, f"{r.times:,}", format_bytes(r.reads)]
            row += [format_bytes(r.makes), format_time(r.predicted)]
            row += ["–" if r.measured is None else format_time(r.measured)] * measured
            cells.append(row + [r.limit] * limits)
        out = [f"  {line}" for line in align_columns(cells, right=range(3, 7 + measured))]
        if len(self.rows) > MOST_ROWS:
            rest = self.rows[MOST_ROWS:]
            took = format_time(sum([r.seconds for r in rest]))
            out.append(f"  and {len(rest)} more, which take {took}")
        return out

    def _footer(self) -> list[str]:
        out = []
        if self.clock == "estimated":
            out.append("measured:  no times of steps in a replay without device times")
        for reason, names in list(self.why.items())[:SHOWN]:
            out.append(f"not fused: {', '.join(names[:4])}: {reason}")
        links = [
            f"{place_name(a)} → {place_name(b)}: {format_bytes(n)}"
            for (a, b), n in sorted(self.links.items(), key=lambda item: -item[1])
            if n
        ]
        out.append(f"links:     {'; '.join(links[:6]) or 'nothing crosses'}")
        spilled = [f"{format_bytes(n)} to {place_name(p)}" for p, n in self.spilled.items() if n]
        out.append(f"spilled:   {'; '.join(spilled) or 'nothing'}")
        if self.planned:
            out.append(f"planned:   {self.planned}")
        out += [f"advice:    {advice}" for advice in self.advice[:SHOWN]]
        return out

    def _repr_html_(self) -> str:
        return explanation_html(self)


def explain_plan(
    plan: Plan, predicted: Footprint | None, is_gpu: bool, planned: str = "", once: bool = False
) -> Explanation:
    """Explain a plan that has not run."""
    page = explain_table(
        step_table(plan), plan.machine, is_gpu, predicted=predicted, where=plan.where,
        planned=planned, pinned=plan.bound, once=once or plan.once,
    )  # fmt: skip
    said = [plan.choice_text, *[f"  {line}" for line in plan.sides]] if plan.choice_text else []
    return replace(page, choice="\n".join(said))


def explain_records(
    records: Sequence[RunRecord], is_gpu: bool, rows: Iterable[Row] | None = None
) -> Explanation:
    """Explain what ran: the plan of the longest of these runs, and the latest run of it.

    `rows` are the decoded steps of all of them, where these are at hand.

    Raises
    ------
    RuntimeError
        where none of the runs was recorded at level "steps" or above.
    """
    known = [r for r in records if r.table is not None and r.machine is not None]
    if not known:
        raise RuntimeError(
            "there is nothing to explain: compute something in `with scheduler.record():`"
        )
    longest = max(known, key=lambda r: r.seconds)
    alike = [r for r in known if r.table is longest.table]
    latest = alike[-1]
    assert latest.table is not None
    assert latest.machine is not None
    how = {"new": "new, ", "": ""}.get(latest.planned, f"from {latest.planned}, ")
    took = (latest.planned_ns - latest.began) / 1e9
    return explain_table(
        latest.table, latest.machine, is_gpu and not latest.is_host,
        predicted=latest.predicted, where=latest.where, records=alike,
        rows=None if rows is None else [row for row in rows if row.run == latest.number],
        planned=how + format_time(max(took, 0.0)),
    )  # fmt: skip


def explain_table(
    table: StepTable,
    machine: Machine,
    is_gpu: bool,
    *,
    predicted: Footprint | None = None,
    where: str = "",
    planned: str = "",
    records: Sequence[RunRecord] = (),
    rows: Sequence[Row] | None = None,
    pinned: bool = False,
    once: bool = False,
) -> Explanation:
    """Explain a table of steps, by predictions or by what the latest of the records measured.

    `rows` are the decoded steps of that record; without them they are decoded here.
    """
    latest = records[-1] if records else None
    if rows is None:
        rows = decode_rows(latest) if latest is not None else []
    clock = rows[0].clock if rows else ""
    timed = [] if clock == "estimated" else rows
    layers = _layers(table, machine, timed, is_gpu)
    measured_footprint = latest.footprint if latest is not None else None
    footprint = measured_footprint or predicted
    links = dict(footprint.traffic) if footprint is not None else _links(table, machine)
    spilled = dict(footprint.spilled) if footprint is not None else {}
    if machine.shared:
        links = {}
    memory = _memory(table, machine, footprint)
    measured = None if measured_footprint is None else measured_footprint.seconds
    seconds = measured or (predicted.seconds if predicted is not None else 0.0)
    busy = _busy_seconds(table, machine, timed)
    facts = Facts(
        devices=len(machine.devices),
        is_gpu=is_gpu,
        layers=[
            LayerFacts(
                r.label, r.line, r.times, r.seconds, "kernel" in r.how, r.reason, r.code,
                r.how == "host", r.reads,
            )
            for r in layers
        ],
        busy=busy,
        chunk_bytes=[n for n, f in zip(table.nbytes, table.fixed, strict=True) if not f],
        step_seconds=(
            [(r.end - r.begin) / 1e9 for r in timed]
            or [s for s, f in zip(table.seconds, table.fixed, strict=True) if not f]
        ),
        seconds=seconds or max(busy, default=0.0),
        predicted=predicted.seconds if predicted is not None else None,
        measured=measured,
        link_bytes=sum([n for (a, b), n in links.items() if a >= 0 and b >= 0]),
        sent=sum([n for (a, b), n in links.items() if a == HOST and b >= 0]),
        sent_runs=sum(
            [any(a == HOST and n for (a, _), n in r.footprint.traffic.items())
             for r in records if r.footprint is not None]
        ),
        sent_seconds=sum(
            [machine.copy_seconds(n, a, b) for (a, b), n in links.items() if a == HOST and b >= 0]
        ) if not machine.shared else 0.0,
        touched=sum([r.reads + r.makes for r in layers]),
        spilled=sum(spilled.values()),
        fullest=max([m.peak / max(m.limit, 1) for m in memory], default=0.0),
        fullest_at=max(memory, key=lambda m: m.peak / max(m.limit, 1)).step if memory else "",
        planning=max(0.0, (latest.planned_ns - latest.began) / 1e9) if latest is not None else 0.0,
        once=once,
        moving_layer=_moving_layer(table),
        pinned=pinned,
    )  # fmt: skip
    why: dict[str, list[str]] = {}
    for r in layers:
        if r.reason:
            names = why.setdefault(r.reason, [])
            if r.label not in names:
                names.append(r.label)
    return Explanation(
        sum([not f for f in table.fixed]), len(machine.devices), where, tuple(layers), memory,
        links, spilled, tuple(give_advice(facts)[:SHOWN]),
        None if predicted is None else predicted.seconds, measured,
        "" if latest is None else f"run {latest.number}, {latest.how}", clock, planned, why,
    )  # fmt: skip


def _layers(
    table: StepTable, machine: Machine, rows: Iterable[Row], is_gpu: bool
) -> list[ExplainedLayer]:
    """Rows of the page, those that take longest first."""
    names = {}  # by group: groups of one name are one row
    for group, work in table.work.items():
        how = _kind_text(work)
        names[group] = table.labels[group], table.lines[group], how, work.reason
    seconds: Counter[int] = Counter()
    measured_steps: set[int] = set()
    for row in rows:
        seconds[table.groups[row.step]] += row.end - row.begin
        measured_steps.add(table.groups[row.step])
    sums: dict[Any, list[float]] = {}
    groups_of: dict[Any, dict[int, None]] = {}
    for i, group in enumerate(table.groups):
        if table.fixed[i]:
            continue
        found = sums.setdefault(names[group], [0, 0, 0, 0.0, 0, 0])
        found[0] += 1
        found[1] += sum([table.nbytes[j] for j in table.inputs[i]])
        found[2] += table.nbytes[i]
        found[3] += table.seconds[i]
        found[4] += table.work[group].touched
        found[5] += table.work[group].operations
        groups_of.setdefault(names[group], {})[group] = None
    out = []
    for name, (times, reads, makes, predicted, touched, operations) in sums.items():
        label, line, how, reason = name
        mine = groups_of[name]
        known = not measured_steps.isdisjoint(mine)
        measured = sum([seconds[g] for g in mine]) / 1e9 if known else None
        limit = _describe_bound(machine, measured, touched, operations) if is_gpu else ""
        code = ", ".join(dict.fromkeys([o.code for g in mine for o in table.origins[g] if o.code]))
        out.append(ExplainedLayer(
            label, line, code, how, reason, int(times), int(reads), int(makes), predicted,
            measured, limit,
        ))  # fmt: skip
    return sorted(out, key=lambda r: -r.seconds)


def _kind_text(work: Any) -> str:
    """How a group's steps run, as the column "runs as" has it."""
    if work.on_host:
        return "host"
    if work.reads_file:
        return "file"
    if work.kernels:
        return "kernel" if work.kernels == 1 else f"{work.kernels} kernels"
    if "matrix product" in work.words:
        return "cuBLAS"
    return "as written"


def _describe_bound(
    machine: Machine, seconds: float | None, touched: float, operations: float
) -> str:
    """Describe what bounds a layer and the part of the peak rate that it reaches: "memory 84%"."""
    if not seconds:
        return ""
    parts = {
        "memory": touched / (seconds * machine.bandwidth),
        "arithmetic": operations / (seconds * machine.flops),
    }
    name = max(parts, key=lambda n: parts[n])
    return f"{name} {parts[name]:.0%}" if parts[name] > 0 else ""


def _links(table: StepTable, machine: Machine) -> dict[tuple[int, int], int]:
    """Bytes copied over each link if nothing is evicted: each value once per device."""
    crossing: set[tuple[int, int]] = set()
    for i, inputs in enumerate(table.inputs):
        crossing.update(
            [(j, table.places[i]) for j in inputs if table.places[j] != table.places[i]]
        )
    out: dict[tuple[int, int], int] = {}
    for j, place in sorted(crossing):
        link = table.places[j], place
        out[link] = out.get(link, 0) + table.nbytes[j]
    return out


def _moving_layer(table: StepTable) -> str:
    """The label of the steps that read most bytes from other devices."""
    found: Counter[int] = Counter()
    for i, inputs in enumerate(table.inputs):
        for j in inputs:
            if table.places[j] != table.places[i]:
                found[table.groups[i]] += table.nbytes[j]
    return table.labels[found.most_common(1)[0][0]] if found else ""


def _busy_seconds(table: StepTable, machine: Machine, rows: Iterable[Row]) -> list[float]:
    """Seconds of work on each device."""
    out = [0.0] * len(machine.devices)
    found = False
    for row in rows:
        found = True
        out[table.places[row.step]] += (row.end - row.begin) / 1e9
    if not found:
        for place, seconds, fixed in zip(table.places, table.seconds, table.fixed, strict=True):
            out[place] += 0.0 if fixed else seconds
    return out


def _memory(
    table: StepTable, machine: Machine, footprint: Footprint | None
) -> tuple[MemoryUse, ...]:
    """The peak of each memory, and the step that runs at it."""
    peaks = peak_steps(table, machine)
    out = []
    for memory in machine.memories:
        step, live = peaks.get(memory, (None, 0))
        peak = live if footprint is None else footprint.peak.get(memory, live)
        words = ""
        if step is not None:
            where = table.line(step)
            words = f'"{table.label(step)}"' + (f" ({where})" if where else "")
        name = machine.memory_name(memory)
        out.append(MemoryUse(memory, name, peak, machine.limit(memory), words))
    return tuple(out)


def peak_steps(table: StepTable, machine: Machine) -> dict[int, tuple[int, int]]:
    """For each memory, the step in plan order at which most bytes are alive, and these bytes.

    Values of the graph itself count too, where devices do not share the host's memory.
    """
    last_reader: dict[int, int] = {}
    for i, inputs in enumerate(table.inputs):
        for j in inputs:
            last_reader[j] = i
    freed_after: dict[int, list[int]] = {}
    for j, i in last_reader.items():
        if j not in table.outputs and not table.fixed[j]:
            freed_after.setdefault(i, []).append(j)
    live: Counter[int] = Counter()
    peaks: dict[int, tuple[int, int]] = {}
    for i, (place, nbytes) in enumerate(zip(table.places, table.nbytes, strict=True)):
        memory = machine.memory_of(place)
        if table.fixed[i]:
            if not machine.shared:
                live[memory] += nbytes
            continue
        live[memory] += nbytes
        if live[memory] > peaks.get(memory, (0, -1))[1]:
            peaks[memory] = i, live[memory]
        for j in freed_after.get(i, ()):
            live[machine.memory_of(table.places[j])] -= table.nbytes[j]
        if i not in last_reader and i not in table.outputs:
            live[memory] -= nbytes
    return peaks


# ---- HTML

_STYLE = "font-family:system-ui,sans-serif;font-size:13px;border-collapse:collapse;max-width:1200px"


def explanation_html(e: Explanation) -> str:
    """The page as HTML: a table with bars, without scripts."""
    total = sum([r.seconds for r in e.rows]) or 1.0
    names = ["layers", "line", "runs as", "times", "reads", "makes", "time", ""]
    names += ["limit"] * any(r.limit for r in e.rows)
    head = "".join(f'<th style="text-align:left">{name}</th>' for name in names)
    rows = [_layer_html(r, total) for r in e.rows[:MOST_ROWS]]
    more = ""
    if len(e.rows) > MOST_ROWS:
        more = f"<p>and {len(e.rows) - MOST_ROWS} more</p>"
    notes = "".join(f"<li>{escape(line[:LONGEST_NOTE])}</li>" for line in e._footer())
    return (
        f'<div style="{_STYLE}"><p><b>{escape(e._headline())}</b></p>'
        f'<table style="{_STYLE}" cellpadding="4"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{more}"
        f'<ul style="margin-top:8px">{notes}</ul></div>'
    )


def _layer_html(r: ExplainedLayer, total: float) -> str:
    part = r.seconds / total
    colour = KERNEL if "kernel" in r.how or r.how == "cuBLAS" else WRITTEN
    bar = (
        f'<div style="background:{IDLE};width:160px;height:10px"><div style="background:{colour};'
        f'width:{part * 160:.0f}px;height:10px"></div></div>'
    )
    code, reason = (escape(text[:LONGEST_TITLE]) for text in (r.code or r.label, r.reason))
    cells = [
        f'<b title="{code}">{escape(r.label)}</b>',
        escape(r.line),
        f'<span style="color:{colour}" title="{reason}">{escape(r.how)}</span>',
        f"{r.times:,}",
        format_bytes(r.reads),
        format_bytes(r.makes),
        f"{format_time(r.seconds)} ({part:.0%})",
        bar,
        escape(r.limit),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
