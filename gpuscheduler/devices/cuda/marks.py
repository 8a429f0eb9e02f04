"""When steps and copies ran, by the clocks of the GPUs.

A timed event is recorded before and behind what a step or a copy queues on its stream. Nobody waits
for them: they are read when somebody asks for the rows of a run, or when a later run begins.

The clock of a GPU is tied to that of the host by an *anchor*: a timed event on an idle stream,
recorded between two readings of the host's clock. CUDA gives elapsed times as float32 numbers of
milliseconds, so anchors are renewed: after a second their error is 0.06 µs, after 100 s 6 µs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import cupy
from cupy.cuda import Event, Stream, runtime

from ...forks import new_lock
from ...plan.machine import HOST
from ...plan.step_table import StepTable, step_table
from ...runtime.events import Event as StateEvent
from ...runtime.observe import Level, Mark, RunRecord
from .allocations import LineMeter
from .lane import DeviceLane
from .ranges import Ranges
from .run_context import RunContext
from .step_values import StepValues
from .transfers import Transfers

#: Timed events that a lane has at most; a new one takes 1.4 µs, one of these 0.2 µs.
POOL = 4096
#: ns after which an anchor is renewed.
RENEW_EVERY = 1_000_000_000
#: Readings of which the best becomes the anchor.
TRIES = 5
#: Replays of a tape between two whose steps are marked, below the level of device times.
MARK_EVERY = 64


class Anchor(NamedTuple):
    """A time by both clocks."""

    event: Event
    ns: int  # of the host's clock
    error: int  # ns, at most


def take_anchor(stream: Stream, clock: Callable[[], int], tries: int = TRIES) -> Anchor:
    """Tie the clock of a stream's device to the host's; the stream is idle."""
    best: Anchor | None = None
    for _ in range(tries):
        event = Event()
        before = clock()
        event.record(stream)
        event.synchronize()
        after = clock()
        if best is None or after - before < 2 * best.error:
            best = Anchor(event, (before + after) // 2, (after - before + 1) // 2)
    assert best is not None
    return best


class _Pending(NamedTuple):
    """A pair of events that nobody has read yet."""

    record: RunRecord
    anchor: Anchor
    begin: Event
    end: Event
    step: int
    place: int
    src: int | None


class LaneMarks:
    """Timed events of one lane; its thread records them, any thread reads them."""

    def __init__(self, clock: Callable[[], int], most: int = POOL):
        self.clock = clock
        self._stream = Stream(non_blocking=True)  # idle
        self._free: list[Event] = []
        self._left = most  # events that may still be made
        self._pending: deque[_Pending] = deque()
        self._reading = new_lock()
        self.anchor = take_anchor(self._stream, clock)

    def renew_anchor(self) -> None:
        """Take a new anchor where the last one is old. Call in the lane's thread."""
        if self.clock() - self.anchor.ns > RENEW_EVERY:
            self.anchor = take_anchor(self._stream, self.clock)

    def begin(self, stream: Stream) -> Event | None:
        """Record an event before what is queued next; None where none is free."""
        event = self._take()
        if event is not None:
            event.record(stream)
        return event

    def end(
        self,
        stream: Stream,
        begin: Event | None,
        record: RunRecord,
        step: int,
        place: int,
        src: int | None = None,
    ) -> None:
        """Record an event behind what was queued since `begin`."""
        event = self._take() if begin is not None else None
        if begin is None or event is None:
            self.drop(begin)
            record.missed[id(self)] = record.missed.get(id(self), 0) + 1
            return
        event.record(stream)
        self._pending.append(_Pending(record, self.anchor, begin, event, step, place, src))

    def drop(self, begin: Event | None) -> None:
        """Take back an event: what it began is not to be measured."""
        if begin is not None:
            self._free.append(begin)

    def _take(self) -> Event | None:
        if not self._free and not self._left:
            self.read(wait=False)
        with suppress(IndexError):  # another thread may take the last one
            return self._free.pop()
        if not self._left:
            return None
        self._left -= 1
        return Event()

    def read(self, wait: bool = True) -> None:
        """Read all pairs, in order; without `wait` only those that are over."""
        pending = self._pending
        with self._reading:
            while pending:
                mark = pending[0]
                try:
                    if not wait and not mark.end.done:
                        return
                    mark.end.synchronize()
                    elapsed = cupy.cuda.get_elapsed_time
                    begin = mark.anchor.ns + round(elapsed(mark.anchor.event, mark.begin) * 1e6)
                    end = begin + round(elapsed(mark.begin, mark.end) * 1e6)
                except runtime.CUDARuntimeError:  # the device is lost, which others tell
                    pending.clear()
                    return
                mark.record.marks.append(Mark(mark.step, mark.place, begin, end, mark.src))
                pending.popleft()
                self._free += (mark.begin, mark.end)


class RunProbe:
    """Measures the launches and copies of one run, and shows them to a profiler that is attached.

    `record` gets the times; with None there are only ranges.
    """

    def __init__(self, run: RunContext, record: RunRecord | None, ranges: Ranges | None):
        self.record, self.ranges = record, ranges
        self.table: StepTable | None = step_table(run.plan) if ranges is not None else None
        if record is not None:
            for lane in run.lanes:
                if lane.marks is not None:
                    lane.marks.read(wait=False)

    def measure(self, lane: DeviceLane, stream: Stream, step: int, src: int | None = None,
                dst: int | None = None) -> _Measured:  # fmt: skip
        """A context: what it queues on the stream is measured. Call in the lane's thread."""
        return _Measured(self, lane, stream, step, src, lane.place if dst is None else dst)

    def attempt(self, steps: StepValues, lane: DeviceLane, i: int) -> tuple[Any, int]:
        """`StepValues.attempt`, measured."""
        with self.measure(lane, lane.home, i) as measured:
            value, refused = self.meter(lane, i, steps.attempt, lane, i)
            measured.dropped = bool(refused)
        return value, refused

    def meter(
        self, lane: DeviceLane, step: int, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Call a function that computes a step; at level MEMORY, note what it allocates."""
        record = self.record
        if record is None or record.level < Level.MEMORY:
            return function(*arguments)
        meter = LineMeter()
        value = meter.call(function, *arguments)
        record.allocations.append(meter.log.sum_up(step, lane.place))
        return value

    def fetch(self, transfers: Transfers, lane: DeviceLane, i: int, src: int) -> StateEvent:
        """`Transfers.fetch`, measured from when the value is there."""
        source = transfers.source(lane, i, src)
        if source is not None and source.ready is not None:
            lane.incoming.wait_event(source.ready)
        with self.measure(lane, lane.incoming, i, src):
            return transfers.fetch(lane, i, src)

    def send_to_host(self, transfers: Transfers, lane: DeviceLane, i: int) -> None:
        """`Transfers.send_to_host`, measured from when the value is there."""
        ready = transfers.run.held[lane.place][i].ready
        lane.outgoing.wait_event(lane.mark(lane.home) if ready is None else ready)
        with self.measure(lane, lane.outgoing, i, lane.place, HOST):
            transfers.send_to_host(lane, i)


class _Measured:
    """A launch or a copy that is measured."""

    __slots__ = ("begin", "dropped", "dst", "lane", "probe", "src", "step", "stream")

    def __init__(
        self, probe: RunProbe, lane: Any, stream: Stream, step: int, src: int | None, dst: int
    ):
        self.probe, self.lane, self.stream, self.step = probe, lane, stream, step
        self.src, self.dst = src, dst
        self.begin: Event | None = None
        #: Whether nothing is to be measured after all.
        self.dropped = False

    def __enter__(self) -> _Measured:
        probe, lane = self.probe, self.lane
        if probe.ranges is not None and probe.table is not None:
            probe.ranges.push(probe.table.label(self.step), lane.device, self.step)
        if probe.record is not None:
            self.begin = lane_marks(lane, probe.record).begin(self.stream)
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        probe, record = self.probe, self.probe.record
        if record is not None:
            marks = lane_marks(self.lane, record)
            if kind is not None or self.dropped:
                marks.drop(self.begin)
            else:
                marks.end(self.stream, self.begin, record, self.step, self.dst, self.src)
        if probe.ranges is not None:
            probe.ranges.pop()


def lane_marks(lane: Any, record: RunRecord) -> LaneMarks:
    """The events of a lane, which are made at first use. Call in the lane's thread."""
    marks: LaneMarks | None = lane.marks
    if marks is None:
        marks = lane.marks = LaneMarks(record.recorder.clock)
    marks.renew_anchor()
    return marks


def observe_run(run: RunContext, record: RunRecord) -> None:
    """Measure a run at the level of device times; its steps are read when somebody asks."""
    run.record = record
    if record.level >= Level.DEVICE:
        run.probe = RunProbe(run, record, run.hardware.ranges)
        _read_later(run, record)


def _read_later(run: RunContext, record: RunRecord) -> None:
    lanes = run.lanes

    def read_marks() -> None:
        for lane in lanes:
            if lane.marks is not None:
                lane.marks.read(wait=record.is_over)

    record.unread.append(read_marks)


def replay_probe(run: RunContext, replay: Any) -> RunProbe | None:
    """What measures a replay; None where it only repeats what was measured before.

    Below the level of device times, the first replay and every `MARK_EVERY`-th are measured. The
    others get these times, moved to where they began.
    """
    record = run.record
    if record is None or record.level >= Level.DEVICE:
        return run.probe
    sample: RunRecord | None = replay.sample
    if sample is None or replay.since >= MARK_EVERY:
        replay.sample, replay.since = record, 1
        _read_later(run, record)
        return RunProbe(run, record, run.hardware.ranges)
    replay.since += 1
    record.unread.append(partial(copy_sample, sample, record))
    return run.probe


def copy_sample(sample: RunRecord, record: RunRecord) -> None:
    """Give a run the times of another run of its plan."""
    sample.settle()
    if record.marks or not record.admitted:
        return
    later = record.admitted - sample.admitted
    record.marks.extend(
        m._replace(begin=m.begin + later, end=m.end + later, clock="sampled")
        for m in sample.marks.copy()
    )
