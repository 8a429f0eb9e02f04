"""`Scheduler`: the whole pipeline on one screen. Read this first.

Dask graph -> Graph -> Plan -> State <-> Devices -> values

`Scheduler._compute` shows the way of a computation. The planner (`pipeline.planner`) finds or makes
its plan, and the executor (`pipeline.execute`) runs the plan on devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

from .devices import choose
from .devices.choose import _limit, leave_gpus_to_parent
from .devices.cpu import CpuHardware
from .diagnostics.observed import ObservedScheduler
from .diagnostics.recording import make_recorder
from .forks import new_lock, new_rlock
from .frontend.graph import Graph
from .frontend.lowering import received_by_scheduler
from .gc_control import garbage_spared
from .options import Options
from .pipeline.cache import PlanCache
from .pipeline.execute import PlanExecutor, PlanRun
from .pipeline.gpu_libraries import GpuUse, Libraries
from .pipeline.numpy_arrays import NumpyArrays
from .pipeline.persist import persist_collections
from .pipeline.plan_entry import PlanEntry
from .pipeline.planner import Planner
from .pipeline.request import ComputeRequest
from .pipeline.results import nest_values
from .plan.machine import HOST
from .plan.plan import Footprint, Plan
from .plan.working_memory import WorkingMemory
from .runtime.admission import Admission
from .runtime.dask_config import ConfigOverride
from .runtime.host_memory import available_memory
from .runtime.loop import add_note
from .runtime.observe import Recorder
from .runtime.persisted import PersistedChunks
from .runtime.protocol import Devices, Hardware, StepWatcher
from .sparse_parts import unwrap_sparse


class Scheduler(ObservedScheduler):
    """Runs Dask graphs on every device of this machine, from this process.

    Parameters
    ----------
    devices
        ``"auto"`` (every GPU; CPU devices where there is none), ``"cpu"`` (one device per core),
        ``"cpu:4"``, ``"cuda"``, ``"cuda:0,2"``. A repeated id (``"cuda:0,0"``) makes logical
        devices on one GPU. ``"cuda,cpu:12"`` has 12 threads of the host compute beside the GPUs;
        the default is one per core, and 0 leaves all to the GPUs' own threads.
    memory_limit
        Memory for values on each device, and for tasks while they run, as far as that is known:
        bytes, a string such as ``"8 GiB"``, or a fraction (a float up to 1.0) of the free memory.
        Default: 0.9 of the free memory.
    options
        Any other field of `Options`, which documents them all.

    With GPUs, a computation that names no GPU library (NumPy blocks, bags, dataframes, delayed
    functions) runs on GPUs where the option ``numpy`` says so, and gives NumPy's arrays. Else the
    host runs it, or parts of it: one thread per core, within ``host_memory``. One
    CuPy array, ``to_backend("cupy")`` or ``dask.annotate(device=0)`` anywhere in a computation
    sends all of it to the GPUs.

    As a context manager it is Dask's default scheduler; on GPUs it also makes ``"cupy"`` the array
    backend. Leaving the context restores both and closes the scheduler.

    Raises
    ------
    ValueError
        if an option has a value that it cannot have, as an argument or in Dask's configuration.
    RuntimeError
        if CUDA devices are missing, or CuPy is not installed.

    Examples
    --------
    >>> import dask.array as da
    >>> with Scheduler(devices="cpu:2"):
    ...     int(da.arange(10, chunks=5).sum().compute())
    45
    """

    def __init__(
        self,
        devices: str | None = None,
        memory_limit: int | str | float | None = None,
        **options: Any,
    ):
        self._prepare(Options.read(devices=devices, memory_limit=memory_limit, **options))

    def _prepare(
        self, options: Options, hardware: Hardware | None = None, gpus: Scheduler | None = None
    ) -> None:
        self.options = options
        self.last: Footprint | None = None  # what the latest run took
        self._gpus: Scheduler | None = gpus  # the scheduler whose host work this one does
        self._host: Scheduler | None = None  # does the host work of this one; made at first use
        self._making = new_lock()
        self._libraries = Libraries()
        #: What is recorded of runs, on the devices and on the host's threads.
        self.recorder: Recorder = make_recorder(options) if gpus is None else gpus.recorder
        self.number: int = next(_numbers) if gpus is None else gpus.number
        self._hardware: Hardware | None = None  # stays None in a forked child until it is needed
        self._begin(hardware)
        self._entered: list[ConfigOverride] = []
        self._left: ConfigOverride | None = None  # the outermost of these, once it has ended
        self._closed = False
        _every.add(self)
        if gpus is None:
            self._begin_displays()

    def _begin(self, hardware: Hardware | None = None) -> Hardware:
        """Find the hardware, unless it is given, and begin with empty caches."""
        o = self.options
        if hardware is None:
            hardware = choose.find_hardware(
                o.devices, o.memory_limit, o.spill_directory, o.fast_math,
                o.host_memory, o.spill_compression,
            )  # fmt: skip
        machine = hardware.machine
        #: Threads of the host that do the work without GPU libraries; 0 on CPU devices, and where
        #: values may take nothing of the host's memory.
        self.host_threads = choose.host_threads(o.devices) if hardware.kind == "cuda" else 0
        if machine.host_memory == 0:
            self.host_threads = 0
        self._host_memory = machine.host_memory
        self._persisted = PersistedChunks()
        limit = _limit(o.plan_memory, available_memory(), "plan_memory", least=0)
        self._plans = PlanCache(limit, available_memory)
        hardware.when_short(self._plans.shed)
        hardware.when_compiled(self.recorder.note)
        memory = WorkingMemory(hardware.kind)
        self._planner = Planner(hardware, o, self._plans, memory, max(1, self.host_threads))
        if self._gpus is None:
            limits = {m: machine.limit(m) for m in machine.memories}
            if self.host_threads:  # values that leave the GPUs share memory with the host's work
                limits[HOST] = machine.host_memory
            self._turns = Admission(limits, lambda: self._executor.held_bytes())
        else:
            self._turns = self._gpus._turns
        self._executor = PlanExecutor(
            hardware, o, self._persisted, self._turns, memory,
            is_host=self._gpus is not None, others_chunks=self._others_chunks,
        )  # fmt: skip
        self._numpy = NumpyArrays(o, hardware, self._planner, self._executor, self._record_run)
        self._hardware = hardware
        return hardware

    @property
    def hardware(self) -> Hardware:
        """The devices; a forked child finds them at first use."""
        if self._hardware is not None:
            return self._hardware
        with _lock:
            if self._hardware is not None:
                return self._hardware
            try:
                return self._begin()
            except RuntimeError as error:
                raise RuntimeError(
                    f"devices={self.options.devices!r}: GPUs do not work in a process that was "
                    "forked from one that uses them: start it with multiprocessing's 'spawn' or "
                    "'forkserver', or compute there with Scheduler('cpu')"
                ) from error

    def _begin_anew(self) -> None:
        """Forget the parent's threads, runs and GPUs in a forked child.

        What there was stays alive: to free it would copy memory that both processes share.
        """
        if self._hardware is None:
            return
        _left_behind.append({**vars(self)})
        self.recorder.running.clear()  # no run of the parent goes on here
        if self._hardware.kind == "cuda":
            for setting in self._entered:
                setting.keep("scheduler")
            leave_gpus_to_parent()
            self._numpy.forked = True
            limits = self._turns.limit  # the child's host threads wait for no run of the parent
            self._turns = Admission(limits, lambda: dict.fromkeys(limits, 0))
        self._hardware = self._host = None

    def get(
        self,
        dsk: Any,
        keys: Any,
        cache: MutableMapping[Any, Any] | None = None,
        callbacks: Iterable[Any] | None = None,
        num_workers: int | None = None,
        pool: Any = None,
        rerun_exceptions_locally: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute `keys` of `dsk`; the contract is that of `dask.threaded.get`.

        A `pool` of threads runs the tasks in place of the scheduler's own. With a pool of processes
        this is `dask.multiprocessing.get`: no device, no fused kernels. Tasks that a pool fails at,
        or never runs, raise an error. Keyword arguments that only other schedulers know are
        ignored.
        """
        if self._left is not None and (instead := self._left.replacement()):
            return instead(dsk, keys, **kwargs)
        arguments = {
            "cache": cache, "callbacks": callbacks, "num_workers": num_workers, "pool": pool,
            "rerun_exceptions_locally": rerun_exceptions_locally,
        }  # fmt: skip
        return self._compute(ComputeRequest.read(dsk, keys, False, arguments))

    def __call__(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        """The same as `get`: so `scheduler=` can be a Scheduler itself."""
        return self.get(dsk, keys, **kwargs)

    def persist(self, collections: Any, optimize_graph: bool = True, **kwargs: Any) -> list[Any]:
        """Compute these collections and leave their chunks where they were made.

        Dask calls this for `x.persist()` and `dask.persist(x, y)`.

        The chunks count against the memory limit of later runs. A run that needs their room evicts
        chunks that it reads last or never; a run that reads an evicted chunk restores it. A chunk
        is freed with the last collection that holds it, also after this scheduler is closed. Other
        schedulers and other processes get the chunks as values.

        A run that runs out of memory beside persisted chunks begins again, so its tasks may run
        twice. It does not begin again if its graph reads or writes files.

        >>> import dask.array as da
        >>> with Scheduler("cpu:2", memory_limit="1 GiB") as s:
        ...     x = da.ones((1000, 1000), chunks=500).persist()
        ...     print(s)
        <Scheduler on 2 cpu devices, memory limit 1.00 GiB each, persisted 7.63 MiB>
        >>> float(x.sum().compute(scheduler="threads"))
        1000000.0
        """
        instead = None if self._left is None else self._left.replacement()
        return persist_collections(collections, optimize_graph, self._compute, instead, kwargs)

    def _compute(self, request: ComputeRequest) -> Any:
        """Plan and run: return values, or tasks that give persisted chunks."""
        self._check_open()
        if (use := self._gpu_use(request.dsk, request.cache)).gpu_library is None:
            return self._compute_numpy(request, use)
        return self._compute_here(request)

    def _compute_here(self, request: ComputeRequest) -> Any:
        """Plan and run on the scheduler's own devices."""
        request = request.resolve_pool()
        if request.pool is not None and not request.pool.runs_here():
            return request.compute_by_processes()
        with request.run_callbacks() as callbacks:
            leased = self.hardware.lease(request.num_workers, request.pool)
            with garbage_spared(), self._record_run() as record, leased as lease:
                entry = self._planner.plan_request(request, lease, callbacks, record)
                record.planned_ns = self.recorder.clock()
                rerun = bool(request.rerun_exceptions_locally)
                run = PlanRun(entry, lease, request.keep, callbacks, rerun, record=record)
                values = self._execute(run)
            if not request.keep:
                values = [unwrap_sparse(v) for v in values]
            if request.cache is not None:  # Dask's own schedulers leave results in it
                request.cache.update(zip(entry.graph.wanted, values, strict=True))
            return nest_values(request.keys, iter(values))

    def _compute_numpy(self, request: ComputeRequest, use: GpuUse) -> Any:
        """Compute NumPy's arrays on GPUs if that is chosen, otherwise on the host."""
        work = self._numpy
        choice = work.why_on_host(use, request.dsk, request)
        if choice is None:
            values, self.last, choice = work.compute(request, self.last)
            if values is not None:
                work.compare(request, values, self._host_scheduler)
                return nest_values(request.keys, iter(values))
        if (host := self._host_scheduler()) is None:  # then a GPU's thread computes
            return self._compute_here(request)
        out = self._compute_on_host(host, request)
        self.last = work.note_host(choice, self.last)
        return out

    def _execute(self, run: PlanRun) -> list[Any]:
        try:
            return self._executor.execute(run)
        finally:
            if run.took is not None:
                self.last = run.took
                if run.record is not None:
                    run.record.footprint = run.took

    def _compute_on_host(self, host: Scheduler, request: ComputeRequest) -> Any:
        try:
            return host._compute(request)
        except Exception as error:
            what = f"{host._host_text}, for no GPU has anything to do; their memory is host_memory"
            add_note(error, f"its devices are {what}")
            raise
        finally:
            self.last = None if host.last is None else replace(host.last, where=host._host_text)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self!r}: make a new Scheduler")

    def _gpu_use(self, dsk: Any, cache: Mapping[Any, Any] | None = None) -> GpuUse:
        """Return why a computation has to run on GPUs; on CPU devices, a reason in any case."""
        if not self.host_threads and self.hardware.kind != "cuda":  # a forked child has no hardware
            return GpuUse("CPU devices")
        found = self._libraries.look(dsk)
        return found if cache is None or found.gpu_library else self._libraries.look(cache)

    def _host_scheduler(self) -> Scheduler | None:
        """The scheduler of the host's threads; None where these may take no memory."""
        if not self.host_threads:
            return None
        with self._making:
            if self._host is None:
                o, n = self.options, self.host_threads
                limit = max(1, self._host_memory // n)
                hardware = CpuHardware(n, limit, o.spill_directory, o.spill_compression)
                self._host = Scheduler.__new__(Scheduler)
                self._host._prepare(self.options, hardware, self)
            return self._host

    def _others_chunks(self) -> dict[int, int]:
        """Bytes of the other side's persisted chunks, GPUs or host, by place of this side."""
        if self._host is not None:
            nbytes = self._host._persisted.bytes_of_others(()).get(0, 0)
            return {HOST: nbytes} if nbytes else {}
        if self._gpus is not None:
            nbytes = self._gpus._persisted.bytes_of_others(()).get(HOST, 0)
            return {0: nbytes} if nbytes else {}
        return {}

    def run_graph(
        self,
        graph: Callable[[], Graph],
        given: Mapping[Any, Any],
        begun: Callable[[Devices], None] | None = None,
        counter: Callable[[Plan], StepWatcher] | None = None,
        known: Any = None,
    ) -> dict[Any, Any]:
        """Compute a graph's outputs from the `given` values, which it reads and does not make.

        `begun` gets the devices before they run anything, and may hand them to a thread that
        interrupts them. `counter` makes a watcher of the plan's steps. With a name, `known`, the
        plan is kept: `graph` is called only for a new name. Changes the graph that it gives.
        """
        self._check_open()
        leased = self.hardware.lease(None, None)
        with garbage_spared(), self._record_run() as record, leased as lease:
            entry = self._planner.plan_graph(graph, given, lease, known)
            record.planned_ns = self.recorder.clock()
            watcher = None if counter is None else counter(entry.plan)
            run = PlanRun(entry, lease, watcher=watcher, begun=begun, record=record)
            return dict(zip(entry.graph.wanted, self._execute(run), strict=True))

    def plan(self, *collections: Any) -> Plan:
        """The plan that computing these collections would run, with a prediction of its cost.

        Computes nothing. `Plan.why` says which steps are no fused kernels, and why. The predicted
        peak has the working memory of tasks that are no kernels only once they have run.

        Raises
        ------
        OutOfMemory
            where the computation cannot fit the memory.

        >>> import dask.array as da
        >>> with Scheduler(devices="cpu:2") as s:
        ...     print(s.plan(da.ones((2000, 2000), chunks=1000).sum()))
        5 steps on 2 devices
          device 0: 3 steps, 3e-05 s
          device 1: 2 steps, 2e-05 s
          no kernel: 5 of sum, finalize-hlgfinalizecompute: it touches less than 262,144 bytes
          predicted: 4.5e-05 s; peak memory 40 bytes on device 0
        """
        dsk, keys = received_by_scheduler(*collections)
        use = self._gpu_use(dsk)
        if use.gpu_library is not None:
            return self._predict(dsk, keys).plan
        chosen = partial(self._predict, dsk, keys, resident=True)
        plan, said = self._numpy.plan_where_chosen(use, dsk, chosen)
        if plan is None:
            plan = (self._host_scheduler() or self)._predict(dsk, keys).plan
        return plan.with_facts(choice_text=said)

    def _predict(self, dsk: Any, keys: Any, resident: bool = False) -> PlanEntry:
        with garbage_spared(), self.hardware.lease(None, None) as lease:
            entry = self._planner.find_or_plan(dsk, keys, lease, resident=resident)
        predicted = replace(self._executor.predict(entry), where=self._host_text)
        entry.plan = entry.plan.with_facts(where=self._host_text, predicted=predicted)
        return entry

    # ---- as a context manager

    def __enter__(self) -> Scheduler:
        self._check_open()
        self._entered.append(ConfigOverride({"scheduler": self.get, **self.hardware.settings()}))
        active.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        active.remove(self)
        left = self._entered.pop()
        left.end()
        if not self._entered:
            self._left = left
            self.close()

    def close(self) -> None:
        """Join every thread, and free every byte except those of persisted collections.

        These stay as long as the collections. A closed scheduler runs nothing: `get` raises
        RuntimeError. Closing it twice does nothing.
        """
        if not self._closed:
            self._closed = True
            if self._gpus is None:
                self._end_displays()
            if self._hardware is not None:
                self._planner.clear()
                self._hardware.close()
            with self._making:
                if self._host is not None:
                    self._host.close()


#: Entered schedulers, the innermost last.
active: list[Scheduler] = []
_numbers = count(1)
_lock = new_rlock()
_every: WeakSet[Scheduler] = WeakSet()
_left_behind: list[Any] = []  # by the parent of this process


def _begin_anew_after_fork() -> None:
    """A child process has none of its parent's threads."""
    for scheduler in list(_every):
        scheduler._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew_after_fork)
