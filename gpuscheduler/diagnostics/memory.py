"""What fills memory: values and working memory at the peak, and persisted collections."""

from __future__ import annotations

import gc
import linecache
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from types import FrameType
from typing import Any, NamedTuple

from dask.utils import format_bytes, format_time, key_split

from ..frontend.chunk import Chunk
from ..frontend.graph import layer_of
from ..frontend.lines import is_users_code, is_users_frame, line_of, place_in_file
from ..plan.machine import Machine, place_name
from ..plan.step_table import StepTable
from ..runtime.allocations import Site
from ..runtime.events import Copied, Free, Issued
from ..runtime.observe import RunRecord
from .text import align_columns, count_of

#: Rows that are printed of one memory.
MOST_ROWS = 12
#: Collections from one line that are held at once and are worth a word.
GENERATIONS = 3
#: Characters of a line's text that are shown.
MOST_SOURCE = 60
GROUPINGS = ("layer", "line", "task", "device")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A part of what fills a memory at its peak."""

    what: str  # "values" or "working memory"
    name: str  # a label, line, key or device, as asked for
    line: str
    nbytes: int
    count: int  # of values, or of steps that run
    until: str = ""  # the label of the last step that reads one of them
    source: str = ""  # the text of the line that allocated it, where that was recorded


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """One memory at its peak."""

    place: int
    name: str  # "device 0"
    limit: int
    nbytes: int  # of values
    seconds: float  # from the beginning of the run
    run: int
    during: str  # what was ordered last: a label and its line
    rows: tuple[MemoryRow, ...]  # the largest first

    @property
    def working_memory(self) -> int:
        """Bytes of working memory."""
        return sum([r.nbytes for r in self.rows if r.what != "values"])

    @property
    def total(self) -> int:
        """Bytes of values and working memory."""
        return self.nbytes + self.working_memory


@dataclass(frozen=True, slots=True)
class AllocationRow:
    """What steps allocated at one line, in the runs of a recording; bytes."""

    name: str  # a label, line, key or device, as asked for
    line: str  # that allocated: of the user's function, else of the layer
    source: str  # the text of that line; "" where no line of a function was seen
    most: int  # at once in one step
    total: int  # of all allocations
    acquired: int  # that the memory pool took from the device for them
    count: int  # of allocations


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """The peaks of all memories, and what steps allocated; printed, one page."""

    peaks: tuple[MemoryPeak, ...]
    by: str
    #: By line, the largest total first; level "memory" records them, on GPUs.
    allocations: tuple[AllocationRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for tools."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [line for peak in self.peaks for line in _peak_lines(peak)]
        return "\n".join([*lines, *_allocation_lines(self.allocations)])

    def __repr__(self) -> str:
        return f"<MemoryProfile of {len(self.peaks)} memories by {self.by}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _peak_lines(peak: MemoryPeak) -> list[str]:
    room = f" of {format_bytes(peak.limit)}" if peak.limit < 2**60 else ""
    part = (
        f", of which {format_bytes(peak.working_memory)} working memory"
        if peak.working_memory
        else ""
    )
    out = [
        f"peak on {peak.name}: {format_bytes(peak.total)}{room}{part}",
        f"  at {format_time(peak.seconds)} of run {peak.run}, while {peak.during} ran",
    ]
    rows = []
    for row in peak.rows[:MOST_ROWS]:
        until = f", needed until {row.until}" if row.until else ""
        many = count_of(row.count, "block") if row.what == "values" else row.source or "at most"
        rows.append([format_bytes(row.nbytes), row.what, row.name, row.line, many + until])
    if len(peak.rows) > MOST_ROWS:
        rest = format_bytes(sum([r.nbytes for r in peak.rows[MOST_ROWS:]]))
        rows.append([rest, "", f"in {len(peak.rows) - MOST_ROWS} more", "", ""])
    return out + [f"  {line}" for line in align_columns(rows, right=[0])]


def _allocation_lines(found: Sequence[AllocationRow]) -> list[str]:
    if not found:
        return []
    rows = [["at once", "in total", "times", "acquired", "allocated by", "line", ""]]
    for r in found[:MOST_ROWS]:
        sizes = [format_bytes(n) for n in (r.most, r.total)]
        new = format_bytes(r.acquired)
        rows.append([*sizes, f"{r.count:,}", new, r.name, r.line, r.source])
    more = [f"  and {len(found) - MOST_ROWS} more"] if len(found) > MOST_ROWS else []
    return [*[f"  {line}" for line in align_columns(rows, right=range(4))], *more]


def profile_memory(records: Sequence[RunRecord], by: str = "layer") -> MemoryProfile:
    """The largest peak of each memory in these runs, and what filled it.

    Raises
    ------
    ValueError
        for another grouping than "layer", "line", "task" and "device".
    RuntimeError
        where no run was recorded at level "steps" or above.
    """
    if by not in GROUPINGS:
        raise ValueError(f"by={by!r}: use one of {', '.join(map(repr, GROUPINGS))}")
    known = [r for r in records if r.table is not None and r.machine is not None]
    if not known:
        raise RuntimeError(
            "no memory was recorded: compute something in `with scheduler.record():`"
        )
    best: dict[int, _Peak] = {}
    for record in known:
        for memory, peak in _find_peaks(record).items():
            if memory not in best or peak.nbytes > best[memory].nbytes:
                best[memory] = peak
    peaks = [_describe_peak(m, found, by) for m, found in sorted(best.items())]
    return MemoryProfile(tuple(peaks), by, tuple(_sum_allocations(known, by)))


def _sum_allocations(records: Sequence[RunRecord], by: str) -> list[AllocationRow]:
    rows: dict[tuple[str, str, str], AllocationRow] = {}
    for record in records:
        table = record.table
        assert table is not None
        for step in record.allocations.copy():
            for use in step.uses:
                name, line, source = _name_site(table, step.step, use.site, by)
                old = rows.get((name, line, source))
                new = AllocationRow(
                    name, line, source, use.most, use.total, use.acquired, use.times
                )
                rows[name, line, source] = new if old is None else replace(
                    new, most=max(old.most, new.most), total=old.total + new.total,
                    acquired=old.acquired + new.acquired, count=old.count + new.count,
                )  # fmt: skip
    return sorted(rows.values(), key=lambda r: (-r.total, r.name, r.line))


def _name_site(table: StepTable, step: int, site: Site, by: str) -> tuple[str, str, str]:
    """Name, line and source of what a step allocates at a line."""
    name, line = _name_of(table, step, by)
    source = ""
    if site is not None:
        code, number = site
        line = place_in_file(code.co_filename, number)
        source = linecache.getline(code.co_filename, number).strip()[:MOST_SOURCE]
    elif by in ("line", "device"):
        line = table.line(step)
    return (line or name, "", source) if by == "line" else (name, line, source)


#: A change of what a memory holds: ns, memory, step, bytes; negative where a value goes.
_Change = tuple[int, int, int, int]


def _changes(record: RunRecord) -> Iterator[_Change]:
    table, machine = record.table, record.machine
    assert table is not None
    assert machine is not None
    sizes = dict(enumerate(table.nbytes))
    if record.tape is not None:
        yield from _changes_of_tape(record, table, machine)
        return
    for turn in record.turns.copy():
        for ins in turn.instructions:
            if type(ins) is Free:
                yield turn.ns, ins.place, ins.step, -sizes[ins.step]
        for event in turn.events:
            if type(event) is Issued:
                sizes[event.step] = event.nbytes
                memory = machine.memory_of(table.places[event.step])
                yield turn.ns, memory, event.step, event.nbytes
            elif type(event) is Copied and event.dst >= 0:
                yield turn.ns, event.dst, event.step, sizes[event.step]


def _changes_of_tape(record: RunRecord, table: StepTable, machine: Machine) -> Iterator[_Change]:
    tape = record.tape
    assert tape is not None
    orders = [(place, *order) for place, found in tape.orders for order in found]
    span = max((record.queued or record.ended) - record.admitted, 0)
    for n, (place, verb, step, _) in enumerate(orders):
        at = record.admitted + span * n // max(len(orders), 1)
        sign = -1 if verb == "free" else 1
        yield at, machine.memory_of(place), step, sign * tape.nbytes[step]


class _Peak(NamedTuple):
    """A memory at its fullest."""

    nbytes: int  # of values, and of the working memory of the step that makes one of them
    values: int  # bytes of values
    change: int  # the index of the change that leads to it
    record: RunRecord


def _find_peaks(record: RunRecord) -> dict[int, _Peak]:
    """Return the peak of each device's memory."""
    table, machine = record.table, record.machine
    assert table is not None
    assert machine is not None
    working = {a.step: a.working_memory for a in record.allocations.copy()}
    used: Counter[int] = Counter()
    held: dict[tuple[int, int], int] = {}
    out: dict[int, _Peak] = {}
    for n, (_, memory, step, nbytes) in enumerate(_changes(record)):
        used[memory] += _apply(held, memory, step, nbytes)
        total = used[memory]
        if nbytes >= 0 and machine.memory_of(table.places[step]) == memory:
            total += working.get(step, record.working.get(table.kinds[step], 0))
        if total > 0 and (memory not in out or total > out[memory].nbytes):
            out[memory] = _Peak(total, used[memory], n, record)
    return {m: found for m, found in out.items() if m >= 0}  # not the host, nor the disk


def _apply(held: dict[tuple[int, int], int], memory: int, step: int, nbytes: int) -> int:
    """By how much a memory changes; a value that is freed or comes twice counts once."""
    if nbytes < 0:
        return -held.pop((memory, step), 0)
    before = held.get((memory, step), 0)
    held[memory, step] = nbytes
    return nbytes - before


def _describe_peak(memory: int, peak: _Peak, by: str) -> MemoryPeak:
    record = peak.record
    table, machine = record.table, record.machine
    assert table is not None
    assert machine is not None
    held: dict[tuple[int, int], int] = {}
    ns, last = record.admitted, -1
    for n, (when, place, step, change) in enumerate(_changes(record)):
        _apply(held, place, step, change)
        if place == memory and change >= 0:
            ns, last = when, step
        if n == peak.change:
            break
    final: dict[int, int] = {}
    for i, inputs in enumerate(table.inputs):
        for j in inputs:
            final[j] = i
    sums: dict[tuple[str, str], list[int]] = {}
    until: dict[tuple[str, str], int] = {}
    for (place, step), size in held.items():
        if place != memory or not size:
            continue
        name = _name_of(table, step, by)
        row = sums.setdefault(name, [0, 0])
        row[0] += size
        row[1] += 1
        until[name] = max(until.get(name, -1), final.get(step, -1))
    rows = [
        MemoryRow(
            "values", *names, size, count,
            table.label(until[names]) if until[names] >= 0 else "",
        )
        for names, (size, count) in sums.items()
    ]  # fmt: skip
    during = ""
    if last >= 0:
        line = table.line(last)
        during = f'"{table.label(last)}"' + (f" ({line})" if line else "")
        rows += _working_rows(record, table, last, by)
    rows.sort(key=lambda r: -r.nbytes)
    return MemoryPeak(
        memory, machine.memory_name(memory), machine.limit(memory), peak.values,
        (ns - record.admitted) / 1e9, record.number, during, tuple(rows),
    )  # fmt: skip


def _working_rows(record: RunRecord, table: StepTable, step: int, by: str) -> list[MemoryRow]:
    """The working memory of a step: by line, where that was recorded; else the most of its kind."""
    seen = next((a for a in reversed(record.allocations) if a.step == step), None)
    if seen is not None:
        return [
            MemoryRow("working memory", name, line, use.working, use.times, source=source)
            for use in seen.uses if use.working
            for name, line, source in [_name_site(table, step, use.site, by)]
        ]  # fmt: skip
    working = record.working.get(table.kinds[step], 0)
    return [MemoryRow("working memory", *_name_of(table, step, by), working, 1)] * (working > 0)


def _name_of(table: StepTable, step: int, by: str) -> tuple[str, str]:
    line = table.line(step)
    if by == "line":
        return line or "unknown line", ""
    if by == "task":
        return str(table.keys[step]), line
    if by == "device":
        return place_name(table.places[step]), ""
    return table.label(step), line


# ---- what is persisted


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A persisted collection, or what is left of it."""

    name: str  # of its layer, without its token: "u"
    layer: str  # "add-fa79…"
    line: str  # where it was written
    nbytes: int
    blocks: int
    places: dict[int, int]  # bytes by place, in the fastest each block has
    run: int | None = None  # that made it
    age: float | None = None  # seconds since
    holders: tuple[str, ...] = ()  # who holds it: "`history` in main (wave.py:30)"


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Persisted collections, the largest first; printed, a line for each."""

    rows: tuple[HeldRow, ...]
    _names_holders: bool = field(default=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum([r.nbytes for r in self.rows])

    def __str__(self) -> str:
        if not self.rows:
            return "nothing is persisted"
        out = [self._line(row) for row in self.rows]
        lines = Counter([r.line for r in self.rows if r.line])
        out += [
            f"advice: {n} collections persisted at {line} are alive: delete older ones (del x)"
            for line, n in lines.items()
            if n >= GENERATIONS
        ]
        return "\n".join(out)

    def _line(self, row: HeldRow) -> str:
        where = ", ".join([place_name(p) for p in sorted(row.places, reverse=True)])
        out = f"{format_bytes(row.nbytes).rjust(11)} on {where}  {row.name}"
        out += f", {count_of(row.blocks, 'block')}"
        if row.line:
            out += f"  {row.line}"
        if row.run is not None and row.age is not None:
            out += f"  made in run {row.run}, {format_time(row.age)} ago"
        if self._names_holders:
            out += f"  held by: {', '.join(row.holders) or 'nobody that can be named'}"
        return out

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def held_memory(
    chunks: Iterable[Chunk],
    made: Mapping[str, tuple[int, int]],
    now: int,
    who: bool = False,
) -> HeldMemory:
    """What is persisted, by layer.

    `made` has the number of the run that made each layer, and when, in ns; `now` is by the same
    clock. With `who` it also looks for names of who holds the collections, which is slow.
    """
    sums: dict[str, list[Any]] = {}
    for chunk in chunks:
        row = sums.setdefault(layer_of(chunk.key), [0, 0, Counter()])
        place = max(chunk.places, default=chunk.place)
        row[0] += chunk.nbytes
        row[1] += 1
        row[2][place] += chunk.nbytes
    holders = find_holders(sums) if who and sums else {}
    rows = []
    for layer, (nbytes, blocks, places) in sums.items():
        run, at = made.get(layer, (None, None))
        rows.append(HeldRow(
            key_split(layer), layer, line_of(layer), nbytes, blocks, dict(places), run,
            None if at is None else (now - at) / 1e9, tuple(holders.get(layer, ())),
        ))  # fmt: skip
    return HeldMemory(tuple(sorted(rows, key=lambda r: -r.nbytes)), who)


def find_holders(layers: Iterable[str]) -> dict[str, list[str]]:
    """Names under which collections with these layers are held, in frames and in modules."""
    wanted = set(layers)
    found: dict[int, list[str]] = {}  # layers by the id of a collection
    for it in gc.get_objects():
        if not hasattr(type(it), "__dask_graph__"):
            continue
        graph = getattr(it, "dask", None)
        mine = wanted.intersection(getattr(graph, "layers", None) or ())
        if mine:
            found[id(it)] = sorted(mine)
    out: dict[str, list[str]] = {}
    for where, space in _spaces():
        for name, value in list(space.items()):
            parts = [value]
            if isinstance(value, (list, tuple, set)):
                parts += list(value)[:1000]
            elif isinstance(value, dict) and not name.startswith("__"):
                parts += list(value.values())[:1000]
            elif hasattr(value, "__dict__") and not isinstance(value, type):
                parts += [v for v in vars(value).values() if id(v) in found]
            for layer in {layer for part in parts for layer in found.get(id(part), ())}:
                words = f"`{name}` in {where}"
                names = out.setdefault(layer, [])
                if words not in names:
                    names.append(words)
    return out


def _spaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """The variables of the user's running functions and modules, and where these are."""
    for top in list(sys._current_frames().values()):
        frame: FrameType | None = top
        while frame is not None:
            if is_users_frame(frame) and frame.f_code.co_name != "<module>":
                code = frame.f_code
                place = place_in_file(code.co_filename, frame.f_lineno)
                yield f"{code.co_name} ({place})", dict(frame.f_locals)
            frame = frame.f_back
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if name == "__main__" or (file and is_users_code(file, name)):
            yield name, dict(vars(module))
