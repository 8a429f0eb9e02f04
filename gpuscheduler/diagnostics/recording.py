"""What was recorded while a `with` block ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from time import perf_counter_ns, time_ns
from typing import Any

from ..gc_control import without_garbage_collection
from ..options import Options
from ..runtime.observe import CopyRow, Level, MemorySample, Note, Recorder, Row, RunRecord
from .explain import Explanation, explain_records
from .log import logger, note_handler
from .memory import MemoryProfile, profile_memory
from .report import Recorded, Report, RunFacts
from .text import count_of
from .trace_json import Trace, take_trace, write_trace


class Recording:
    """The runs of a scheduler since `begin`; `Scheduler.record` makes one.

    As a context manager it raises the level of what is recorded, and ends with the block.
    """

    def __init__(
        self,
        recorder: Recorder,
        level: Level,
        limits: Callable[[], Mapping[int, int]],
        is_gpu: Callable[[], bool],
    ) -> None:
        self._recorder, self._level, self._limits = recorder, level, limits
        self._is_gpu = is_gpu
        self._token: int | None = None
        #: ns of the recorder's clock.
        self.began = recorder.clock()
        #: ns of the recorder's clock; 0 while it goes on.
        self.ended = 0
        self._kept: list[RunRecord] | None = None

    def __enter__(self) -> Recording:
        self.began, self.ended, self._kept = self._recorder.clock(), 0, None
        self._token = self._recorder.raise_level(self._level)
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """End the recording; what was recorded stays, as far as the recorder keeps it."""
        if self._token is not None:
            self._recorder.lower_level(self._token)
            self._token = None
            self._kept = self.runs()
            self.ended = self._recorder.clock()

    def runs(self) -> list[RunRecord]:
        """The runs that began while it went on, in order."""
        if self._kept is not None:
            return list(self._kept)
        return [r for r in self._recorder.records() if r.began >= self.began]

    def trace(self) -> Trace:
        """Its steps, copies and memory."""
        return take_trace(self.runs(), self._limits(), self._recorder.epoch)

    def rows(self) -> list[Row]:
        """The steps that ran, in ns since 1970."""
        return [row.shift_clock(self._recorder.epoch) for row in self.trace().rows]

    def copies(self) -> list[CopyRow]:
        """The copies between devices, the host and the disk, in ns since 1970."""
        return [row.shift_clock(self._recorder.epoch) for row in self.trace().copies]

    def samples(self) -> list[MemorySample]:
        """Bytes in each place over time, in ns since 1970."""
        return [sample.shift_clock(self._recorder.epoch) for sample in self.trace().memory]

    def timeline(self, path: str | PathLike[str]) -> None:
        """Write a file for Perfetto: a thread for each device, copies, memory."""
        write_trace(path, {"gpuscheduler": self.trace()})

    def explain(self) -> Explanation:
        """What ran, on one page: layers, kernels, predicted and measured costs, advice."""
        return explain_records(self.runs(), self._is_gpu())

    def memory(self, by: str = "layer") -> MemoryProfile:
        """What filled each memory at its peak, by "layer", "line", "task" or "device"."""
        return profile_memory(self.runs(), by)

    def notes(self) -> list[Note]:
        """What rare things happened: compilations, waits for memory, fallbacks."""
        until = self.ended or self._recorder.clock()
        return [n for n in self._recorder.notes.copy() if self.began <= n.ns <= until]

    def report(self, path: str | PathLike[str]) -> None:
        """Write a report of what ran, as one HTML file that loads nothing."""
        Report(path, self, code=False).write()

    @without_garbage_collection()
    def take_recorded(self) -> dict[str, Recorded]:
        """What a report shows, by the name of the process."""
        records, trace = self.runs(), self.trace()
        page, memory = None, None
        machine = next((r.machine for r in reversed(records) if r.machine is not None), None)
        if machine is not None:
            page = explain_records(records, self._is_gpu(), trace.rows)
            memory = profile_memory(records)
        notes = tuple([(n.ns, n.kind, n.text) for n in self.notes()])
        missed = sum([n for r in records for n in r.missed.values()])
        facts = tuple(map(run_facts, records))
        return {"gpuscheduler": Recorded(trace, machine, facts, page, memory, notes, missed)}

    def __repr__(self) -> str:
        state = "under way" if self._token is not None else "ended"
        runs = count_of(len(self.runs()), "run")
        return f"<Recording of {runs}, level {self._level.name.lower()}, {state}>"


def run_facts(record: RunRecord) -> RunFacts:
    """A run, as a report shows it."""
    took = record.footprint
    return RunFacts(
        record.number, record.how, record.planned, record.began, record.planned_ns,
        record.admitted, record.queued, record.ended, record.error,
        sum(took.spilled.values()) if took is not None else 0,
    )  # fmt: skip


def make_recorder(options: Options) -> Recorder:
    """Make the recorder of a scheduler with these options."""
    level = Level.read(options.observe)
    if options.timeline:
        level = max(level, Level.DEVICE)
    epoch = time_ns() - perf_counter_ns()
    recorder = Recorder(perf_counter_ns, epoch, level, complain=_complain)
    note_handler.add(recorder)
    return recorder


def _complain(observer: Any, error: BaseException) -> None:
    logger("run").warning("observer %r is removed, as it raised", observer, exc_info=error)
