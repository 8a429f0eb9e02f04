"""What a scheduler shows of its runs: recordings, explanations, persisted memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

from dask.base import persist as dask_persist
from dask.utils import format_time

from ..options import Options
from ..pipeline.summary import SchedulerSummary
from ..plan.plan import Plan
from ..runtime.observe import Level, Recorder, Row, RunRecord
from ..runtime.persisted import PersistedChunks
from ..runtime.protocol import Hardware
from .explain import Explanation, explain_plan
from .log import log_run
from .memory import HeldMemory, held_memory
from .progress import ProgressDisplay
from .recording import Recording
from .serve import Dashboard, close_dashboard, open_dashboard, require_page
from .trace_json import Trace, take_trace, write_trace


class ObservedScheduler:
    """The part of `Scheduler` by which people look at runs; it computes nothing by itself."""

    options: Options
    recorder: Recorder
    number: int
    host_threads: int
    _closed: bool
    _dashboard: Dashboard | None = None
    _progress: ProgressDisplay | None = None
    _hardware: Hardware | None
    _host: ObservedScheduler | None
    _gpus: ObservedScheduler | None
    _persisted: PersistedChunks

    @property
    def hardware(self) -> Hardware:
        """The devices."""
        raise NotImplementedError

    def get(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        """Compute keys of a graph."""
        raise NotImplementedError

    def plan(self, *collections: Any) -> Plan:
        """Plan collections."""
        raise NotImplementedError

    @property
    def dashboard(self) -> Dashboard:
        """The live page, with ``dashboard=True``: its `url`; in a notebook, a link and a frame."""
        return require_page(self._dashboard)

    @property
    def observers(self) -> list[Any]:
        """Objects that hear of runs: `run_began(record)` and `run_ended(record)`.

        They are called in the thread that computes. One that raises is logged and removed.
        """
        return self.recorder.observers

    def record(self, level: str = "device") -> Recording:
        """Record the runs of a `with` block: at level "steps", "device" or "memory".

        >>> import dask.array as da
        >>> from gpuscheduler import Scheduler
        >>> with Scheduler("cpu:2") as s, s.record("steps") as recording:
        ...     _ = da.ones(10, chunks=5).sum().compute()
        >>> recording
        <Recording of 1 run, level steps, ended>
        >>> sorted({row.place for row in recording.rows()})
        [0, 1]
        """
        return Recording(self.recorder, Level.read(level), self._limits, self._is_gpu)

    def rows(self) -> list[Row]:
        """The latest steps that have run, with times in ns since 1970.

        Raises
        ------
        RuntimeError
            where nothing was recorded of steps.
        """
        return [row.shift_clock(self.recorder.epoch) for row in self.trace().rows]

    def trace(self) -> Trace:
        """The latest steps, copies and bytes in memory."""
        kept = any(record.level >= Level.STEPS for record in self.recorder.records())
        if not kept and self.recorder.level < Level.STEPS:
            raise RuntimeError(
                "no times of steps were recorded: make the scheduler with timeline=True or "
                "observe='steps', or compute in `with scheduler.record():`"
            )
        return take_trace(self.recorder.records(), self._limits(), self.recorder.epoch)

    def timeline(self, path: str | PathLike[str]) -> None:
        """Write the latest steps, as `rows` has them, for Perfetto: a thread for each device.

        The file also has copies, with arrows from the steps that made the values, and the memory
        over time. A path that ends in ``.gz`` is compressed.
        """
        write_trace(path, {"gpuscheduler": self.trace()})

    def explain(self, *collections: Any, measure: bool = False) -> Explanation:
        """Explain on one page what computing these collections would run, and what it costs.

        The page says which layers become which kernels and why others do not, where they are
        written, bytes, time and the peak of memory, and gives advice. For NumPy's arrays it begins
        with the choice between GPUs and the host, and its reason. Computes nothing, unless
        `measure` asks for one run. In notebooks it is a table with bars.

        Raises
        ------
        OutOfMemory
            where the computation cannot fit the memory.

        >>> import dask.array as da
        >>> from gpuscheduler import Scheduler
        >>> with Scheduler("cpu:2") as s:
        ...     page = s.explain(da.ones((2000, 2000), chunks=1000).sum())
        >>> page.steps, page.rows[0].times
        (5, 4)
        """
        if measure:
            with self.record("device") as recording:
                dask_persist(*collections, scheduler=self.get)
            return recording.explain()
        begin = self.recorder.clock()
        plan = self.plan(*collections)
        planned = format_time((self.recorder.clock() - begin) / 1e9)
        return explain_plan(plan, plan.predicted, self._is_gpu() and not plan.where, planned)

    def held(self, who: bool = False) -> HeldMemory:
        """What is persisted on the devices and on the host: bytes, places, and the user's line.

        With `who` it also says which variables hold the collections, which takes a while.

        >>> import dask.array as da
        >>> from gpuscheduler import Scheduler
        >>> with Scheduler("cpu:2") as s:
        ...     x = da.ones((1000, 1000), chunks=500).persist()
        ...     s.held().nbytes
        8000000
        """
        chunks = self._persisted.chunks()
        if self._host is not None:
            chunks += self._host._persisted.chunks()
        return held_memory(chunks, self.recorder.persisted, self.recorder.clock(), who)

    def _is_gpu(self) -> bool:
        return self.hardware.kind == "cuda"

    def _limits(self) -> dict[int, int]:
        machine = self.hardware.machine
        return {memory: machine.limit(memory) for memory in machine.memories}

    # ---- displays, from its start to its end

    def _begin_displays(self) -> None:
        """Show progress, and serve the live page, where options say so."""
        if self.options.progress:
            self._progress = ProgressDisplay(self.recorder)
            self._progress.start()
        if self.options.dashboard:
            self._dashboard = open_dashboard(self, self.options.dashboard)

    def _end_displays(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self.options.dashboard:
            close_dashboard(self.number, self._dashboard)

    # ---- what it records, and how it is shown

    @property
    def _host_text(self) -> str:
        """The host's threads in words; "" for a scheduler's own devices."""
        return "" if self._gpus is None else f"{len(self.hardware.machine.devices)} host threads"

    @contextmanager
    def _record_run(self) -> Iterator[RunRecord]:
        """The record of one run, which ends with the block."""
        record = self.recorder.begin(self._host_text, self._gpus is not None)
        try:
            yield record
        except BaseException as error:
            self.recorder.end(record, error)
            raise
        else:
            self.recorder.end(record)
        finally:
            log_run(record)

    def __repr__(self) -> str:
        if self._hardware is None and self._closed:
            return "<Scheduler of the parent process, closed>"
        return self._summary().line()

    def _repr_html_(self) -> str:
        return self._summary().html()

    def _summary(self) -> SchedulerSummary:
        mine, host = self._persisted.nbytes(), self._host
        hosts = {} if host is None else host._persisted.nbytes()
        return SchedulerSummary(self.hardware, mine, hosts, self.host_threads, self._closed)
