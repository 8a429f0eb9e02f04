"""What runs did: one recording, from which timeline, report, progress and pages are fed.

The loop appends to a list, and readers pull: a slow or broken reader cannot slow or break a run.
This file is pure: the clock is an argument, and rows are decoded when somebody asks for them.

==========  =====================================================================================
counters    one `RunRecord` for each run, and the run's `State` while it goes on: nothing per step
steps       also each turn of the loop: what was ordered, what came back, bytes in each memory
device      also when steps ran by the clocks of the devices
memory      also what each step allocates, by line; slow, for one run
==========  =====================================================================================

Times are nanoseconds of the recorder's clock; `Recorder.epoch` is added for times since 1970.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..plan.machine import HOST, Machine, place_name
from ..plan.plan import Footprint, Plan
from ..plan.step_table import StepTable, step_table
from .allocations import StepAllocations
from .events import Copied, Copy, Done, Event, Instruction, Issued, Launch
from .under_way import runs_under_way

if TYPE_CHECKING:
    from .state import State
    from .tape import LaunchTape

#: Instructions and events that a recorder keeps: the latest, about 20 MB.
MOST_EVENTS = 2**18
#: Finished runs that a recorder keeps.
MOST_RUNS = 1024
#: Notes that a recorder keeps.
MOST_NOTES = 4096
#: Seconds that a run may wait for memory before that is noted.
LONG_WAIT = 1e-3
#: Turns after which the loop calls `RunRecord.trim`.
TRIM_EVERY = 256


class Level(IntEnum):
    """How much is recorded."""

    #: Run records and counters; nothing per step.
    COUNTERS = 0
    #: Every turn of the loop.
    STEPS = 1
    #: ... and device times, where devices have clocks.
    DEVICE = 2
    #: ... and what steps on GPUs allocate, by the user's line.
    MEMORY = 3

    @classmethod
    def read(cls, name: str | int | Level) -> Level:
        """The level of this name.

        >>> Level.read("steps")
        <Level.STEPS: 1>
        """
        if isinstance(name, int):
            return cls(name)
        try:
            return cls[name.upper()]
        except KeyError:
            names = ", ".join(repr(level.name.lower()) for level in cls)
            raise ValueError(f"observe={name!r}: use one of {names}") from None


class Turn(NamedTuple):
    """One turn of the run loop."""

    ns: int  # when the events were received
    instructions: list[Instruction]  # ordered before that, since the turn before
    events: list[Event]  # what came back; never `Failed`, which holds a traceback
    used: tuple[int, ...]  # bytes by place before the events, in the order of `RunRecord.memories`


class Mark(NamedTuple):
    """When a step or a copy ran, by the clock of its device."""

    step: int
    place: int  # where the step ran, or where the copy went
    begin: int  # ns of the recorder's clock
    end: int
    src: int | None = None  # where the copy came from; None for steps
    clock: str = "device"  # or "sampled": it was seen in another run of the same plan


class Row(NamedTuple):
    """A step that has run."""

    run: int  # `RunRecord.number`
    step: int
    key: Any
    label: str  # "normalise · exp · sum"
    line: str  # "wave.py:20, wave.py:21"
    place: int  # a device, or `HOST`
    ready: int  # ns: when it was handed to its device
    begin: int
    end: int
    nbytes: int  # of its value
    #: Whose clock: "device", "thread" (of the CPU), "host" (late by up to half a millisecond),
    #: "sampled" (of another run of the plan), "estimated" (predicted, scaled to the run).
    clock: str

    def shift_clock(self, ns: int) -> Row:
        """The same row by a clock that is ahead."""
        return self._replace(ready=self.ready + ns, begin=self.begin + ns, end=self.end + ns)


class CopyRow(NamedTuple):
    """A value that was copied."""

    run: int
    step: int
    label: str  # of the step that made the value
    src: int  # a device, `HOST` or `DISK`
    dst: int
    begin: int  # ns
    end: int
    nbytes: int
    clock: str

    def shift_clock(self, ns: int) -> CopyRow:
        """The same row by a clock that is ahead."""
        return self._replace(begin=self.begin + ns, end=self.end + ns)


class MemorySample(NamedTuple):
    """Bytes that values held or reserved in each place at one time."""

    run: int
    ns: int
    used: dict[int, int]

    def shift_clock(self, ns: int) -> MemorySample:
        """The same sample by a clock that is ahead."""
        return self._replace(ns=self.ns + ns)


class Note(NamedTuple):
    """Something rare: a compilation, a wait for memory, a fallback."""

    ns: int
    kind: str  # "compile", "admit", "spill", "failed"; "warning" and "error" of the log
    fields: dict[str, Any]

    @property
    def text(self) -> str:
        """Its fields for people."""
        if "text" in self.fields:
            return str(self.fields["text"])
        return ", ".join([f"{name} {value}" for name, value in self.fields.items()])


@dataclass(slots=True, eq=False)
class RunRecord:
    """One run of a plan, at every level."""

    recorder: Recorder = field(repr=False)
    #: Counts the runs of a recorder from 1.
    number: int
    level: Level
    #: ns: when the caller asked.
    began: int
    #: "steps", "tape" or "replay"; "" before it runs. Those of a tape know no single steps.
    how: str = ""
    #: Where its plan came from: "new", "template" or "cache"; "" before it is planned.
    planned: str = ""
    #: What ran it, where that was not the scheduler's devices: "8 host threads".
    where: str = ""
    #: Whether all its steps are shown at `HOST`, as it ran on the host's threads.
    is_host: bool = False
    #: ns: when its plan was there; `admitted - planned_ns` was spent waiting for memory.
    planned_ns: int = 0
    #: ns: when it was let in.
    admitted: int = 0
    #: ns: when the last step was done, or all were queued where nobody waits for devices.
    queued: int = 0
    #: ns: when the caller got the values; 0 while it goes on.
    ended: int = 0
    #: The number of steps to run; 0 before it is planned.
    steps: int = 0
    #: The plan, while the run goes on, and then what is left of it: `table`.
    plan: Plan | None = field(default=None, repr=False)
    #: The run's `State` while it goes on by steps: `left`, `used`, `moved`, `spilled`.
    state: State | None = field(default=None, repr=False)
    #: The launch tape that it follows.
    tape: LaunchTape | None = field(default=None, repr=False)
    #: Where it ran, from level STEPS on.
    machine: Machine | None = field(default=None, repr=False)
    #: Its steps; kept after the run from level STEPS on.
    table: StepTable | None = field(default=None, repr=False)
    #: Places of `Turn.used`, in order.
    memories: tuple[int, ...] = ()
    #: What the run took, once it is over.
    footprint: Footprint | None = None
    #: Most working memory of one step seen, in bytes by kind of step.
    working: dict[int, int] = field(default_factory=dict, repr=False)
    #: What was predicted of it, where it was.
    predicted: Footprint | None = None
    #: Type and first line of the exception that ended it, never the exception.
    error: str = ""
    #: Its turns, from level STEPS on, the oldest dropped first.
    turns: deque[Turn] = field(default_factory=deque, repr=False)
    #: Device times of its steps and copies, where devices have clocks.
    marks: deque[Mark] = field(default_factory=deque, repr=False)
    #: What its steps allocated, at level MEMORY.
    allocations: deque[StepAllocations] = field(default_factory=deque, repr=False)
    #: Steps and copies without device times, as no timed event was free, by lane.
    missed: dict[int, int] = field(default_factory=dict, repr=False)
    #: Called before marks are read: devices append those that they have.
    unread: list[Callable[[], None]] = field(default_factory=list, repr=False)
    #: Turns that were dropped.
    dropped: int = 0
    _counted: int = 0  # turns whose events are in `_events`
    _events: int = 0

    @property
    def steps_left(self) -> int:
        """How many steps are not done; of a tape, all until its end."""
        if self.ended:
            return 0
        state = self.state
        return self.steps if state is None else min(state.left, self.steps)

    @property
    def is_over(self) -> bool:
        return self.ended > 0

    @property
    def seconds(self) -> float:
        """From the call to its values; of a run under way, until now."""
        return ((self.ended or self.recorder.clock()) - self.began) / 1e9

    def enter(self, plan: Plan, how: str) -> None:
        """Note that this plan begins to run; forgets the turns of a try before."""
        self.plan, self.how, self.tape, self.steps = plan, how, None, plan.launch_count
        self.turns.clear()
        self.marks.clear()
        self.allocations.clear()
        self.missed.clear()
        self.dropped = self._counted = self._events = 0
        if self.level >= Level.STEPS:
            self.table, self.machine = step_table(plan), plan.machine

    def note_admission(self) -> None:
        """Note when it is let in, and whether it had to wait for memory."""
        self.admitted = self.recorder.clock()
        waited = (self.admitted - self.planned_ns) / 1e9 if self.planned_ns else 0.0
        if waited > LONG_WAIT:
            self.recorder.note("admit", run=self.number, waited=f"{waited:.3g} s for memory")

    def loop_begins(self, state: State) -> deque[Turn] | None:
        """Note a run's state; returns where the loop appends its turns, None below STEPS."""
        self.state, self.memories = state, tuple(state.used)
        return self.turns if self.level >= Level.STEPS else None

    def settle(self) -> None:
        """Have devices append their marks; of a run that is over, all of them."""
        for read in self.unread.copy():
            read()
        if self.is_over:
            self.unread.clear()
        self.recorder.drop_marks(self)

    def trim(self) -> None:
        """Keep the recorder's events within their bound; the loop calls it now and then."""
        fresh = len(self.turns) - self._counted
        for turn in islice(reversed(self.turns), max(fresh, 0)):
            self._events += len(turn.instructions) + len(turn.events)
        self._counted = len(self.turns)
        self.recorder.drop_oldest(self)

    def drop_turns(self, events: int) -> int:
        """Drop the oldest turns with at least so many events; returns how many there were."""
        out = 0
        while out < events and self.turns and self._counted:
            turn = self.turns.popleft()
            n = len(turn.instructions) + len(turn.events)
            out += n
            self._events -= n
            self._counted -= 1
            self.dropped += 1
        return out


@dataclass(eq=False, repr=False)
class Recorder:
    """Records the runs of one scheduler; bounded.

    >>> from itertools import count
    >>> recorder = Recorder(clock=count(1000).__next__)
    >>> record = recorder.begin()
    >>> recorder.end(record)
    >>> recorder.runs[-1].number, recorder.runs[-1].ended - record.began
    (1, 1)
    """

    #: Gives the time in ns; monotonic.
    clock: Callable[[], int]
    #: ns between 1970 and the zero of the clock.
    epoch: int = 0
    #: The least level, of the option `observe`.
    base: Level = Level.COUNTERS
    #: Instructions and events that are kept.
    most: int = MOST_EVENTS
    #: Finished runs, the oldest first.
    runs: deque[RunRecord] = field(default_factory=lambda: deque(maxlen=MOST_RUNS))
    #: Runs under way, by number.
    running: dict[int, RunRecord] = field(default_factory=dict)
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=MOST_NOTES))
    #: Objects that hear of runs, in the thread that computes: `run_began(record)` and
    #: `run_ended(record)`. What one raises is logged, and it is removed.
    observers: list[Any] = field(default_factory=list)
    #: Levels of the recordings under way, by their number.
    raised: dict[int, Level] = field(default_factory=dict)
    #: Sums over all finished runs: ("runs", how, "ok" or "error"), ("planned", how), ("steps",),
    #: ("moved", src, dst) and ("spilled", place) in bytes, ("seconds",).
    totals: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    #: Layers that were persisted: the number of the run that made each, and when, in ns.
    persisted: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: What an observer raised is given to this function.
    complain: Callable[[Any, BaseException], None] = lambda observer, error: None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))  # of runs
    _tokens: Iterator[int] = field(default_factory=count)  # of `raise_level`

    @property
    def level(self) -> Level:
        """The level of a run that begins now."""
        if not self.raised:
            return self.base
        return max(self.base, *list(self.raised.values()))

    def raise_level(self, level: Level) -> int:
        """Record at least this level until `lower_level` is called with the returned number."""
        number = next(self._tokens)
        self.raised[number] = level
        return number

    def lower_level(self, number: int) -> None:
        """Take back a `raise_level`."""
        self.raised.pop(number, None)

    def begin(self, where: str = "", is_host: bool = False) -> RunRecord:
        """Begin the record of a run."""
        record = RunRecord(self, next(self._numbers), self.level, self.clock())
        record.where, record.is_host = where, is_host
        self.running[record.number] = record
        runs_under_way.begin(record)
        self._tell("run_began", record)
        return record

    def end(self, record: RunRecord, error: BaseException | None = None) -> None:
        """End the record of a run: it lets go of its plan, its state and its tape."""
        record.ended = self.clock()
        runs_under_way.end(record)
        record.queued = record.queued or record.ended
        if error is not None:
            lines = str(error).splitlines()
            record.error = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
            self.note("failed", run=record.number, text=f"run {record.number}: {record.error}")
        self._count(record)
        if record.level >= Level.STEPS:
            record.trim()
        if record.plan is not None:
            record.predicted = record.plan.predicted
            if record.level >= Level.STEPS:
                record.working = dict(record.plan.task_memory_by_kind)
                if record.state is not None:
                    record.working.update(record.state.extra)
        record.plan = record.state = None
        self.running.pop(record.number, None)
        if len(self.runs) == self.runs.maxlen:  # what is dropped with it
            self.runs[0].turns.clear()
        self.runs.append(record)
        self._tell("run_ended", record)

    def _count(self, record: RunRecord) -> None:
        totals, took = self.totals, record.footprint
        totals["runs", record.how, "error" if record.error else "ok"] += 1
        totals["planned", record.planned] += 1
        totals["seconds",] += (record.ended - record.began) / 1e9  # type: ignore[assignment]
        totals["steps",] += record.steps
        if took is not None:
            for (src, dst), nbytes in took.traffic.items():
                totals["moved", src, dst] += nbytes
            for place, nbytes in took.spilled.items():
                if nbytes:
                    totals["spilled", place] += nbytes
                    self.note("spill", run=record.number, bytes=nbytes, to=place_name(place))

    def note(self, kind: str, **fields: Any) -> None:
        """Note something rare; never called per step."""
        self.notes.append(Note(self.clock(), kind, fields))

    def note_persisted(self, record: RunRecord, layers: Iterable[str]) -> None:
        """Note which layers a run leaves on its devices."""
        for layer in layers:
            self.persisted.pop(layer, None)  # the latest is last
            self.persisted[layer] = record.number, self.clock()
        while len(self.persisted) > MOST_NOTES:
            del self.persisted[next(iter(self.persisted))]

    def _tell(self, what: str, record: RunRecord) -> None:
        for observer in list(self.observers):
            try:
                getattr(observer, what)(record)
            except Exception as error:
                self.observers.remove(observer)
                self.complain(observer, error)

    def drop_oldest(self, latest: RunRecord) -> None:
        """Drop the oldest turns of finished runs, then of `latest`, down to `most` events."""
        every = [*self.runs, *self.running.values()]
        more = sum([r._events for r in every]) - self.most
        for record in [*list(self.runs), latest]:
            if more <= 0:
                return
            more -= record.drop_turns(more)

    def drop_marks(self, latest: RunRecord) -> None:
        """Drop the marks and allocations of the oldest finished runs, down to `most`."""
        every = list(self.runs)
        more = sum([len(r.marks) + len(r.allocations) for r in every]) - self.most
        for record in every:
            if more <= 0:
                return
            if record is not latest:
                more -= len(record.marks) + len(record.allocations)
                record.marks.clear()
                record.allocations.clear()

    # ---- decoding

    def records(self, since: int = 0) -> list[RunRecord]:
        """Runs that ended at `since` (ns) or later, and those under way, by number."""
        every = [*[r for r in self.runs.copy() if r.ended >= since], *self.running.copy().values()]
        return sorted(every, key=lambda r: r.number)

    def rows(self, since: int = 0) -> list[Row]:
        """The steps of the latest runs, from level STEPS on, in the order in which they ended."""
        return [row for r in self.records(since) for row in decode_rows(r)]

    def copies(self, since: int = 0) -> list[CopyRow]:
        """The copies of the latest runs, from level STEPS on."""
        return [row for r in self.records(since) for row in decode_copies(r)]


class TurnDecoder:
    """Decodes the turns of one run, given one after the other, into `rows` and `copies`."""

    def __init__(self, record: RunRecord, table: StepTable):
        self.record, self.table = record, table
        #: Steps and copies that have ended; a reader may take them away between two turns.
        self.rows: list[Row] = []
        self.copies: list[CopyRow] = []
        #: ns: when each step under way was handed to its device.
        self.launched: dict[int, int] = {}
        #: ns: when the latest step of each device was done.
        self.free: dict[int, int] = {}
        #: ns of the latest turn.
        self.latest = record.admitted
        #: Bytes of each value, as far as they are known.
        self.sizes = list(table.nbytes)
        self._spans: dict[int, tuple[int, int]] = {}
        self._copied: dict[tuple[int, int], int] = {}  # when copies under way began

    def read(self, turn: Turn) -> None:
        """Decode the next turn."""
        for ins in turn.instructions:
            if type(ins) is Launch:
                self.launched[ins.step] = self.latest
            elif type(ins) is Copy:
                self._copied[ins.step, ins.dst] = self.latest
        for event in turn.events:
            if type(event) is Issued:
                self.sizes[event.step] = event.nbytes
                if event.span is not None:
                    self._spans[event.step] = event.span
            elif type(event) is Done and event.step in self.launched:
                self._end_step(event.step, turn.ns)
            elif type(event) is Copied:
                i, begin = event.step, self._copied.pop((event.step, event.dst), None)
                if begin is not None:
                    self.copies.append(CopyRow(
                        self.record.number, i, self.table.label(i), event.src, event.dst, begin,
                        turn.ns, self.sizes[i], "host",
                    ))  # fmt: skip
        self.latest = turn.ns

    def _end_step(self, i: int, end: int) -> None:
        table, place = self.table, self.table.places[i]
        ready = begin = self.launched.pop(i)
        clock, span = "host", self._spans.pop(i, None)
        if span is not None:
            (begin, end), clock = span, "thread"
        elif not table.aside[i]:
            begin = max(begin, self.free.get(place, begin))
            self.free[place] = end
        self.rows.append(Row(
            self.record.number, i, table.keys[i], table.label(i), table.line(i),
            HOST if self.record.is_host else place, min(ready, begin), begin, end, self.sizes[i],
            clock,
        ))  # fmt: skip


def decode_run(record: RunRecord) -> tuple[list[Row], list[CopyRow]]:
    """The steps and the copies of one run, in the order in which they ended.

    What devices have measured replaces what turns tell.
    """
    table = record.table
    if table is None:
        return [], []
    record.settle()
    decoder = TurnDecoder(record, table)
    for turn in record.turns.copy():
        decoder.read(turn)
    marks = record.marks.copy()
    measured = {(m.step, None if m.src is None else m.place) for m in marks}
    rows = [r for r in decoder.rows if (r.step, None) not in measured]
    copies = [c for c in decoder.copies if (c.step, c.dst) not in measured]
    sizes = decoder.sizes if record.tape is None else record.tape.nbytes
    for m in marks:
        i, label = m.step, table.label(m.step)
        if m.src is None:
            rows.append(Row(
                record.number, i, table.keys[i], label, table.line(i),
                HOST if record.is_host else m.place, min(record.admitted, m.begin), m.begin, m.end,
                sizes[i], m.clock,
            ))  # fmt: skip
        else:
            copies.append(CopyRow(
                record.number, i, label, m.src, m.place, m.begin, m.end, sizes[i], m.clock
            ))  # fmt: skip
    if record.how == "replay" and not rows:
        rows = _estimated_rows(record, table)
    return sorted(rows, key=lambda r: r.end), sorted(copies, key=lambda c: c.end)


def decode_rows(record: RunRecord) -> list[Row]:
    """The steps of one run, in the order in which they ended."""
    return decode_run(record)[0]


def decode_copies(record: RunRecord) -> list[CopyRow]:
    """The copies of one run, in the order in which they ended."""
    return decode_run(record)[1]


def _estimated_rows(record: RunRecord, table: StepTable) -> list[Row]:
    """Steps of a tape without device times: predicted times, scaled to the run."""
    tape = record.tape
    if tape is None:
        return []
    order: dict[int, list[int]] = {}
    for place, orders in tape.orders:
        order.setdefault(place, []).extend([step for verb, step, _ in orders if verb == "launch"])
    busiest = max([sum([table.seconds[i] for i in found]) for found in order.values()], default=0.0)
    if not busiest:
        return []
    scale = ((record.queued or record.recorder.clock()) - record.admitted) / busiest
    rows = []
    for place, found in order.items():
        at = float(record.admitted)
        for i in found:
            begin, at = at, at + table.seconds[i] * scale
            rows.append(Row(
                record.number, i, table.keys[i], table.label(i), table.line(i), place,
                record.admitted, int(begin), int(at), tape.nbytes[i], "estimated",
            ))  # fmt: skip
    return rows


def decode_memory(record: RunRecord) -> list[MemorySample]:
    """Bytes in each place at each turn of one run."""
    return [
        MemorySample(record.number, t.ns, dict(zip(record.memories, t.used, strict=True)))
        for t in record.turns.copy()
    ]
