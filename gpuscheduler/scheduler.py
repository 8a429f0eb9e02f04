"""`Scheduler` and `get`: the whole pipeline on one screen. Read this first.

The whole pipeline on one screen. Read this first.

Dask graph -> Graph -> Plan -> State <-> Devices -> values
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from os import PathLike
from time import perf_counter
from typing import Any
from weakref import WeakSet

import dask.multiprocessing
import numpy as np
from dask import config
from dask._task_spec import DataNode
from dask.base import collections_to_expr
from dask.base import persist as dask_persist
from dask.callbacks import local_callbacks
from dask.core import flatten
from dask.utils import format_bytes, shorten_traceback

from .devices import choose
from .devices.choose import _limit, cuda_devices, leave_gpus_to_parent
from .devices.cpu import CpuHardware, cpu_count
from .errors import OutOfMemory
from .forks import new_lock, new_rlock
from .frontend.chunk import Chunk, ChunkTask, moves
from .frontend.graph import Graph, wanted_keys
from .frontend.lowering import compile_tasks, from_dask, received_by_scheduler
from .gc_control import garbage_spared, put_aside, without_garbage_collection
from .options import Options
from .pipeline import compile
from .pipeline.cache import PlanCache, SingleCollection, build_expression, signature
from .pipeline.compile import plan_dask, write_in_place
from .pipeline.gpu_libraries import Libraries
from .plan.machine import DISK, ENDLESS, HOST
from .plan.plan import Footprint, Plan
from .plan.working_memory import WorkingMemory
from .runtime.admission import SMALL, Admission, AdmittedRun
from .runtime.dask_callbacks import DaskCallbacks
from .runtime.dask_config import ConfigOverride
from .runtime.gather import ResultAssembly
from .runtime.host_memory import available_memory
from .runtime.loop import add_note, run
from .runtime.persisted import PersistedChunks
from .runtime.pools import CallersPool
from .runtime.protocol import Devices, Hardware, Lease, StepListener, StepWatcher
from .runtime.simulated import predict
from .runtime.state import DEEP_WINDOW, WINDOW, State
from .runtime.tape import LaunchTape, rehearse
from .runtime.timeline import LATEST, TimelineRecorder, TimelineRow, write
from .values import part_of

#: Plans that `run_graph` keeps.
KEPT_GRAPHS = 32
#: Where persisted chunks are when they are on no device.
AWAY = {HOST: "on the host", DISK: "on disk"}


class Scheduler:
    """Runs Dask graphs on every device of this machine, from this process.

    Parameters
    ----------
    devices
        ``"auto"`` (every GPU; CPU devices where there is none), ``"cpu"`` (one device per core),
        ``"cpu:4"``, ``"cuda"``, ``"cuda:0,2"``. A repeated id (``"cuda:0,0"``) makes logical
        devices on one GPU.
    memory_limit
        What values may take on each device, and what tasks take while they run, as far as that is
        known: bytes, a string such as ``"8 GiB"``, or a fraction (a float up to 1.0) of what is
        free. Default: 0.9 of what is free.
    window, deep_window
        How many steps may be under way on one device; the second holds while all that they make and
        fetch is small beside its memory.
    fuse
        Run chains of array operations, and the reductions behind them, as one kernel. Off, each
        operation runs by itself.
    fuse_least
        How many bytes a task must touch to be worth a kernel. Default: any on GPUs, 256 KiB on CPU
        devices.
    fast_math
        Compile kernels for GPUs with CUDA's ``--use_fast_math``: products and sums are rounded
        together, and float32 division, roots, exponentials, logarithms, sines and cosines are
        approximate (the CUDA programming guide says by how much; sines and cosines of large
        arguments have no correct digit), and denormal float32 numbers are zero. Without it, each
        operation is rounded as NumPy rounds it. On CPU devices it changes nothing.
    random
        ``"philox"``: what `da.random` draws depends on the seed and on each element's position,
        not on chunks or devices; these are other numbers than Dask's. ``"dask"``: as Dask draws.
    host_memory
        What values that had to leave the GPUs may take of the host's memory, and what the host's
        own threads compute, as ``memory_limit`` says it. With 0 there are none of either: each
        GPU's thread then computes NumPy's blocks, one at a time. What does not fit there goes to
        files. A quarter of it, up to 4 GiB for each GPU, is for what is on its way to files and
        from there, spilled values as well as blocks of stores; one value each way, and 2 MiB for
        each GPU, pass whatever it is.
        Default: 0.9 of what is available. On CPU devices, whose memory is the host's, it changes
        nothing.
    spill_directory
        Where values are written that fit in no memory for now, in a folder that only this user may
        enter. Default: Dask's ``temporary-directory``, else the system's.
    spill_compression
        How these are compressed: ``"zlib"``, or ``"lz4"`` (package lz4) and ``"zstd"`` (Python
        3.14, or package backports.zstd). Default: not at all, which is faster on most disks.
    direct_storage
        Whether GPUs read blocks of NumPy's memory maps and of h5py's datasets without chunks and
        filters (both opened with mode ``"r"``) straight from their files, by KvikIO: ``"auto"``,
        where it is installed and GPUDirect Storage works; True, wherever it is installed; False,
        never.
    plan_memory
        What plans that are kept for later may take of the host's memory, about, as ``memory_limit``
        says it; 0 for none. They also go where that memory is short. A step takes 2 to 3 KB.
    timeline
        Keep which step ran where and when, of the latest steps, for the method `timeline`.
    check
        Validate the scheduler's state after each event; slow.

    On GPUs, a computation that has nothing to do with any (NumPy's blocks, bags, dataframes,
    delayed functions that name no library of GPUs) runs on the host: on a thread for each core, by
    kernels as on CPU devices, within ``host_memory``. One array of CuPy's, one
    ``to_backend("cupy")`` or one ``dask.annotate(device=0)`` anywhere in it, and all of it is the
    GPUs'.

    As a context manager it is Dask's default scheduler (and, on GPUs, makes ``"cupy"`` the array
    backend); leaving restores what was there and closes it.

    Raises
    ------
    ValueError
        for an option that cannot have its value, wherever it was said.
    RuntimeError
        for CUDA devices that are not there, or where CuPy is not installed.

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
        #: Whose work this does that no GPU will do; and, where this has GPUs, who does that of it.
        self._gpus = gpus
        self._host: Scheduler | None = None  # made at first use
        self._making = new_lock()
        self._libraries = Libraries()
        self.last: Footprint | None = None  # what the latest run took
        self._rows: deque[TimelineRow] = deque(maxlen=LATEST) if gpus is None else gpus._rows
        self._hardware: Hardware | None = None  # only in a forked child, until it is needed
        self._begin(hardware)
        self._entered: list[ConfigOverride] = []
        self._left: ConfigOverride | None = None  # the last of these, when it has ended
        self._closed = False
        _every.add(self)

    def _begin(self, hardware: Hardware | None = None) -> Hardware:
        """Find the hardware, unless it is given, and know nothing yet of what runs on it."""
        o = self.options
        if hardware is None:
            hardware = choose.find_hardware(
                o.devices, o.memory_limit, o.spill_directory, o.direct_storage, o.fast_math,
                o.host_memory, o.spill_compression,
            )  # fmt: skip
        self._hardware = hardware
        gpus_here = hardware.kind == "cuda" and hardware.machine.host_memory > 0
        #: Threads of the host that do what no GPU will do, beside those of the devices; 0 where the
        #: devices are such threads, and where values may take nothing of the host's memory.
        self.host_threads = cpu_count() if gpus_here else 0
        self._host_memory = hardware.machine.host_memory
        limit = _limit(o.plan_memory, available_memory(), "plan_memory", least=0)
        self._plans = PlanCache(limit, available_memory)
        hardware.when_short(self._plans.shed)
        self._taken = WorkingMemory(hardware.kind)
        self._graphs: dict[Any, tuple[Graph, Plan]] = {}  # of `run_graph`
        self._persisted = PersistedChunks()
        machine = hardware.machine
        limits = {m: machine.limit(m) for m in machine.memories}
        if self.host_threads:  # what leaves the GPUs, and what the host computes, share its memory
            limits[HOST] = machine.host_memory
        gpus = self._gpus
        self._turns: Admission = Admission(limits, self._held) if gpus is None else gpus._turns
        return hardware

    @property
    def hardware(self) -> Hardware:
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
        """In a forked child: be without the parent's threads, runs and GPUs, and find hardware when
        it is needed. What there was stays: to free it would copy the memory that both share."""
        if self._hardware is None:
            return
        _left_behind.append(
            (self._hardware, self._plans, self._taken, self._graphs, self._persisted, self._turns,
             self._host)
        )  # fmt: skip
        if self._hardware.kind == "cuda":
            for setting in self._entered:
                setting.keep("scheduler")
            leave_gpus_to_parent()
            limits = self._turns.limit  # what the host's threads do waits for none of the parent's
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

        A `pool` of threads runs the tasks in place of the scheduler's own; with one of processes
        this is `dask.multiprocessing.get`: no device, no fused kernels, and `da.random` draws as
        Dask does. What a pool fails at, or will never do, is an error. Keyword arguments that other
        schedulers know and this one does not are ignored.
        """
        if self._left is not None and (instead := self._left.instead()):
            return instead(dsk, keys, **kwargs)
        return self._get(
            dsk, keys, False, cache, callbacks, num_workers, pool, rerun_exceptions_locally
        )

    def __call__(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        """The same as `get`, so that Dask takes `scheduler=` a Scheduler as it is."""
        return self.get(dsk, keys, **kwargs)

    def persist(self, collections: Any, optimize_graph: bool = True, **kwargs: Any) -> list[Any]:
        """Compute these collections and leave their chunks where they were made. Dask calls this
        for `x.persist()` and `dask.persist(x, y)`.

        The chunks count against the memory limit of later runs. A run that needs their room sends
        those away that it needs last, or not at all, and one that reads them brings them back.
        They go when the last collection that holds them does. Other schedulers get them as values,
        and so does another process. When this scheduler is closed, they stay with the collections.

        A run that seemed to fit beside them, and finds no room after all, begins again, unless its
        graph reads files or writes any: its tasks may run twice.

        >>> import dask.array as da
        >>> with Scheduler("cpu:2", memory_limit="1 GiB") as s:
        ...     x = da.ones((1000, 1000), chunks=500).persist()
        ...     print(s)
        <Scheduler on 2 cpu devices, memory limit 1.00 GiB each, persisted 7.63 MiB>
        >>> float(x.sum().compute(scheduler="threads"))
        1000000.0
        """
        if self._left is not None and (instead := self._left.instead()):
            kwargs |= {"traverse": False, "optimize_graph": optimize_graph}
            return list(dask_persist(*collections, scheduler=instead, **kwargs))
        if any(hasattr(c, "__dask_exprs__") for c in collections):  # Dask puts these together again

            def get(dsk: Any, keys: Any, **kwargs: Any) -> Any:
                return self._get(dsk, keys, True, **kwargs)

            options = {"traverse": False, "optimize_graph": optimize_graph, "scheduler": get}
            return list(dask_persist(*collections, **options, **kwargs))
        alone = len(collections) == 1 and not hasattr(collections[0], "expr")
        if alone:  # there is nothing that Dask could make of a graph
            expr = SingleCollection.of(collections[0], optimize_graph)
            every = [list(flatten(collections[0].__dask_keys__()))]
        else:
            expr = collections_to_expr(collections, optimize_graph).optimize()
            every = [list(flatten(keys)) for keys in expr.__dask_keys__()]
        rebuilt = [c.__dask_postpersist__() for c in collections]
        with shorten_traceback():
            wanted = [k for keys in every for k in keys]
            values = iter(self._get(expr, wanted, True, **kwargs))
        return [
            rebuild(dict(zip(keys, values)), *state)  # noqa: B905 - as many as there are keys
            for (rebuild, state), keys in zip(rebuilt, every, strict=True)
        ]

    def _get(
        self,
        dsk: Any,
        keys: Any,
        keep: bool,
        cache: MutableMapping[Any, Any] | None = None,
        callbacks: Iterable[Any] | None = None,
        num_workers: int | None = None,
        pool: Any = None,
        rerun_exceptions_locally: bool | None = None,
        **_: Any,
    ) -> Any:
        """The values, or tasks that give those which now are persisted."""
        if self._closed:
            raise RuntimeError(f"{self!r}: make a new Scheduler")
        cache = config.get("cache", None) if cache is None else cache
        host = self._host_for(dsk, cache)
        if host is not None:
            try:
                return host._get(
                    dsk, keys, keep, cache, callbacks, num_workers, pool, rerun_exceptions_locally
                )
            except Exception as error:
                what = f"{host._where}, for no GPU has anything to do; their memory is host_memory"
                add_note(error, f"its devices are {what}")
                raise
            finally:
                self.last = None if host.last is None else replace(host.last, where=host._where)
        results = self._chunks if keep else _results
        pool = config.get("pool", None) if pool is None else pool
        num_workers = config.get("num_workers", None) if num_workers is None else num_workers
        if rerun_exceptions_locally is None:
            rerun_exceptions_locally = config.get("rerun_exceptions_locally", False)
        if pool is not None:
            pool = CallersPool(pool, num_workers)
            if pool.is_ours():  # it would wait for the very thread that it is called in
                num_workers, pool = pool._max_workers, None
            elif not pool.runs_here():
                return _by_processes(
                    pool, build_expression(dsk), keys, cache=cache, callbacks=callbacks,
                    rerun_exceptions_locally=rerun_exceptions_locally,
                )  # fmt: skip
        with local_callbacks(callbacks) as active:
            watch = DaskCallbacks(active) if active else None
            try:
                with garbage_spared(), self.hardware.lease(num_workers, pool) as lease:
                    if watch or cache is not None:
                        graph, plan = self._planned(
                            build_expression(dsk), keys, lease, cache, watch
                        )
                    else:
                        graph, plan = self._known(dsk, keys, lease)
                    rerun = bool(rerun_exceptions_locally)
                    values = self._run(graph, plan, lease, watch, rerun, results)
                if cache is not None:  # Dask's own schedulers leave results in it
                    cache.update(zip(graph.wanted, values, strict=True))
                out = nest_values(keys, iter(values))
            except BaseException:
                if watch:
                    watch.finish(failed=True)
                raise
            if watch:
                watch.finish(failed=False)
        return out

    def _host_for(self, dsk: Any, cache: Mapping[Any, Any] | None = None) -> Scheduler | None:
        """The scheduler of the host's threads, for a graph in which no GPU has anything to do."""
        if not self.host_threads or self._libraries.named(dsk) is not None:
            return None
        if cache is not None and self._libraries.named(cache) is not None:
            return None
        with self._making:
            if self._host is None:
                n, limit = self.host_threads, self._host_memory
                hardware = CpuHardware(
                    n, max(1, limit // n), self.options.spill_directory,
                    self.options.spill_compression,
                )  # fmt: skip
                self._host = Scheduler.__new__(Scheduler)
                self._host._prepare(self.options, hardware, self)
            return self._host

    @property
    def _where(self) -> str:
        """Where it runs what no GPU will do, for people."""
        return "" if self._gpus is None else f"{len(self.hardware.machine.devices)} host threads"

    def _elsewhere(self) -> dict[int, int]:
        """Bytes that persisted chunks of the other side, GPUs or the host, have where this one's
        values may be."""
        if self._host is not None:
            nbytes = self._host._persisted.beside(()).get(0, 0)
            return {HOST: nbytes} if nbytes else {}
        if self._gpus is not None:
            nbytes = self._gpus._persisted.beside(()).get(HOST, 0)
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
        """The values of a graph's outputs; `given` are those that it reads and does not make.

        `begun` sees the devices before they run anything, and may hand them to a thread that
        interrupts them. What `counter` makes of the plan is told of its steps. What is `known`
        under the same name is planned once: `graph` is only called where it is not. Changes the
        graph that it gives.
        """
        if self._closed:
            raise RuntimeError(f"{self!r}: make a new Scheduler")
        homes = tuple([self.hardware.home(v) for v in given.values()])
        with garbage_spared(), self.hardware.lease(None, None) as lease:
            name = (known, homes, self._options().fuse)
            found = self._graphs.get(name) if known is not None else None
            if found is None:
                found = self._planned_graph(graph(), given, lease)
                if known is not None:
                    self._graphs[name] = found
                    while len(self._graphs) > KEPT_GRAPHS:
                        self._graphs.pop(next(iter(self._graphs)), None)
            planned, plan = found
            plan = copy(plan)
            plan.steps = list(plan.steps)
            for key, value in given.items():
                i = plan.index[key]
                plan.steps[i] = replace(plan.steps[i], task=DataNode(key, value))
            told = None if counter is None else counter(plan)
            values = self._run(planned, plan, lease, None, False, _results, told, begun)
            return dict(zip(planned.wanted, values, strict=True))

    def _planned_graph(
        self, graph: Graph, given: Mapping[Any, Any], lease: Lease
    ) -> tuple[Graph, Plan]:
        compile_tasks(graph.tasks)
        graph.put_in_front({k: DataNode(k, v) for k, v in given.items()})
        with without_garbage_collection():
            graph, plan = compile.plan_graph(
                graph, lease.machine, self.hardware.home, self.hardware.kind, self._options()
            )
        for key in given:  # the values themselves are not kept with the plan
            graph.tasks.pop(key, None)
            i = plan.index[key]
            plan.steps[i] = replace(plan.steps[i], task=DataNode(key, None))
        return graph, plan

    def _planned(
        self,
        dsk: Any,
        keys: Any,
        lease: Lease,
        cache: MutableMapping[Any, Any] | None = None,
        watch: DaskCallbacks | None = None,
    ) -> tuple[Graph, Plan]:
        started = watch.start if watch else None
        home = self._home(lease)
        with without_garbage_collection():

            def read(apart: Mapping[str, str]) -> Graph:
                return from_dask(
                    dsk, keys, cache, started, home, self._front(lease),
                    send=self.hardware.kind == "cuda" and lease.threads is None, apart=apart,
                )  # fmt: skip

            kind = self.hardware.kind
            if watch is None and cache is None:
                graph, plan = plan_dask(read, lease.machine, home, kind, self._options())
            else:  # callbacks see the tasks as they were
                graph = read({})
                if cache is not None:  # tasks may look into it for the values of the graph
                    for constants in graph.constants.values():
                        cache.update(constants)
                graph, plan = compile.plan_graph(
                    graph, lease.machine, home, kind, self._options(), False
                )
            self._taken.foresee(plan)
            if len(plan.steps) > MANY_STEPS:
                put_aside()
            return graph, plan

    def _options(self) -> Options:
        """The options of a run that begins now. No kernel raises, calls or prints what NumPy would:
        where the caller wants that, tasks of CPU devices run as NumPy runs them."""
        if self.hardware.kind == "cpu" and self.options.fuse and heeds_errors():
            return replace(self.options, fuse=False)
        return self.options

    def _home(self, lease: Lease) -> Callable[[Any], int | None]:
        """Which of a run's devices a value is on."""
        n, shared = len(lease.machine.devices), lease.machine.shared

        def home(value: Any) -> int | None:
            if type(value) is Chunk:
                place = value.place if value.keeper is self.hardware else None
                if place is not None and shared:
                    return place % n
            else:
                place = self.hardware.home(value)
            return place if place is not None and place < n else None

        return home

    def plan(self, *collections: Any) -> Plan:
        """The plan that computing these collections would run: what that will take, and which steps
        are no fused kernels, and why (`Plan.why`).

        Computes nothing. Raises `OutOfMemory` where it could not. What tasks that are no kernels
        take for themselves is in the peak once they have run.

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
        host = self._host_for(dsk)
        return (host or self)._foreseen(dsk, keys)

    def _foreseen(self, dsk: Any, keys: Any) -> Plan:
        with garbage_spared(), self.hardware.lease(None, None) as lease:
            graph, plan = self._known(dsk, keys, lease)
        plan.where = self._where
        beside = self._beside(plan, self._persisted.every(), self._elsewhere())
        now, _ = self._written(graph, beside)
        foreseen = predict(now, self.options.window, self.options.deep_window)
        plan.predicted = replace(foreseen, where=self._where)
        return plan

    def _front(self, lease: Lease) -> int | None:
        front = self.hardware.front()
        return front if front is not None and front < len(lease.machine.devices) else None

    def _known(self, dsk: Any, keys: Any, lease: Lease) -> tuple[Graph, Plan]:
        """The plan of this very collection, or of one like it, if it was computed before."""
        wanted = wanted_keys(keys)
        known = signature(dsk, wanted)
        if known is None:
            graph, plan = self._planned(build_expression(dsk), keys, lease)
            plan.once = True
            return graph, plan
        where = lease.machine, self._front(lease), self._options().fuse
        found = self._plans.find(known, *where)
        if found is None:
            dsk = build_expression(dsk)
            with without_garbage_collection():
                like = self._plans.likeness(dsk, wanted, self._home(lease))
                if like is not None:
                    found = self._plans.like(like, wanted, *where)
            if found is None:
                found = graph, plan = self._planned(dsk, keys, lease)
                if like is not None:
                    with without_garbage_collection():
                        self._plans.learn_from(dsk, like, *where, graph=graph, plan=plan)
            graph, plan = found
            self._plans.keep(known, *where, graph=graph, plan=plan)
        return found

    def _beside(
        self, plan: Plan, chunks: list[Chunk], others: Mapping[int, int] | None = None
    ) -> Plan:
        """The plan for a run that may move these chunks, and no others."""
        return plan.beside(chunks, others) if chunks or others else plan

    def _run(
        self,
        graph: Graph,
        known: Plan,
        lease: Lease,
        watch: DaskCallbacks | None,
        rerun: bool,
        results: Results,
        counter: StepWatcher | None = None,
        begun: Callable[[Devices], None] | None = None,
    ) -> list[Any]:
        """The values of the wanted keys, in their order."""
        heard = watch or counter or begun or rerun
        # who waits borrows no chunks
        with self._turns.turn(partial(self._needed, graph, known)) as turn:
            try:
                if not heard:
                    values = self._alone(graph, known, lease, results, turn)
                    if values is not None:
                        return values
                with self._persisted.lent() as chunks:
                    plan = self._beside(known, chunks, self._elsewhere())
                    if watch:  # callbacks may keep what they see
                        gathering = self._gathering(graph, plan)
                    else:
                        plan, gathering = self._written(graph, plan)
                    return self._learnt(
                        known,
                        *self._obeyed(
                            graph, plan, gathering, lease, watch, rerun, results, turn, counter,
                            begun,
                        ),
                    )  # fmt: skip
            except Exception as error:
                lost = self.hardware.lost(error)
                if lost is None:
                    raise
                raise lost from error

    def _alone(
        self, graph: Graph, known: Plan, lease: Lease, results: Results, turn: AdmittedRun
    ) -> list[Any] | None:
        """The values, by a tape or at least without moving chunks that the run does not read; None
        where these may have to move."""
        watched = self.options.timeline or self.options.check
        if known.ours is None:
            known.ours = self._persisted.known(known.own)
        with self._persisted.lent(known.ours) as chunks:
            theirs = known.own_bytes() if len(chunks) == len(known.own) else None
            others = self._persisted.beside(chunks, theirs)
            for place, nbytes in self._elsewhere().items():
                others[place] = others.get(place, 0) + nbytes
            tape = None
            if not watched and lease.threads is None:  # the caller's own threads are given all
                tape = self._tape(known, chunks, others)
            values = self._followed(graph, known, lease, *tape, results) if tape else None
            if values is not None or not others or not self._fits(known, chunks, others):
                return values
            plan, gathering = self._written(graph, self._beside(known, chunks, others))
            try:
                return self._learnt(
                    known, *self._obeyed(graph, plan, gathering, lease, None, False, results, turn)
                )
            except OutOfMemory as error:
                if error.plan != id(plan):  # it came out of a task
                    raise
                # others have to move after all, from now on at once
                known.most = dict.fromkeys(known.machine.memories, ENDLESS)
                return None

    def _gathering(
        self, graph: Graph, plan: Plan, free: Callable[[int], int] = lambda place: 0
    ) -> ResultAssembly:
        hardware = self.hardware
        join, bring, send = hardware.join, hardware.bring, hardware.send
        return ResultAssembly(plan, graph.alias, hardware.empty, join, free, bring, send)

    def _written(self, graph: Graph, plan: Plan) -> tuple[Plan, ResultAssembly]:
        """The plan as it is run where parts of its result are written into one array."""
        gathering = self._gathering(graph, plan)
        return write_in_place(plan, gathering, self.hardware), gathering

    def _learnt(self, known: Plan, state: State, values: list[Any]) -> list[Any]:
        if not known.once and known.learn(state.nbytes, state.extra, state.plan.into):
            self._taken.learn(known)
        return values

    def _fits(self, known: Plan, chunks: list[Chunk], others: Mapping[int, int]) -> bool:
        """Whether all that a run makes surely fits beside persisted chunks that it does not read:
        they will not have to move. It could be run again, too, if they do."""
        if not (known.tried or all(s.known for s in known.steps)):
            return False
        machine = known.machine
        if known.most is None:
            most = {m: n + known.working for m, n in known.everything().items()}
            if known.writes or any(s.aside for s in known.steps):
                most = dict.fromkeys(most, ENDLESS)
            known.most = most
        if not machine.shared and any(
            p not in (c.place, HOST, DISK) for c in chunks for p in c.places
        ):
            return False  # where nobody has counted it
        taken = dict(known.most)
        for place, nbytes in others.items():
            if place in machine.devices:
                taken[machine.memory_of(place)] += nbytes
        return all(n <= machine.limit(m) for m, n in taken.items())

    def _held(self) -> dict[int, int]:
        """Bytes of persisted chunks in each memory."""
        memory_of, out = self.hardware.machine.memory_of, dict.fromkeys(self._turns.limit, 0)
        for place, nbytes in self._persisted.nbytes().items():
            if place in self.hardware.machine.devices:
                out[memory_of(place)] += nbytes
        if HOST in out:
            out[HOST] = self._persisted.beside(()).get(HOST, 0) + self._elsewhere().get(HOST, 0)
        return out

    def _needed(self, graph: Graph, known: Plan) -> dict[int, int]:
        """Bytes that a run may take of each of the memories for which runs wait their turns."""
        most = self._most(graph, known)
        if self._gpus is not None:  # its memory is the host's
            return {HOST: most.get(0, 0)}
        if HOST in self._turns.limit:  # what has no room on the GPUs leaves for there
            limit = self._turns.limit
            most[HOST] = sum([max(0, n - limit[m]) for m, n in most.items() if m >= 0])
        return most

    def _most(self, graph: Graph, known: Plan) -> dict[int, int]:
        """Bytes that a run may take in each memory at most beside persisted chunks, as far as sizes
        are known."""
        plan, _ = self._written(graph, known)
        made, whole = plan.everything(known.chunks), plan.whole
        most = {m: n + whole.get(m, 0) + known.taken for m, n in made.items()}
        machine = self.hardware.machine
        limit = {m: machine.limit(m) for m in machine.memories}
        if len(known.steps) > MANY_STEPS or all(n <= SMALL * limit[m] for m, n in most.items()):
            return most
        with suppress(OutOfMemory):  # of sizes that are guesses
            foreseen = predict(plan, self.options.window, self.options.deep_window).peak
            return {m: min(n, foreseen[m]) for m, n in most.items()}
        return most

    def _tape(
        self, plan: Plan, chunks: list[Chunk], others: Mapping[int, int]
    ) -> tuple[LaunchTape, dict[int, int]] | None:
        """What the plan does where all fits, and bytes of other chunks on each device; None where
        it does not, and where somebody else may move chunks that it reads."""
        windows = self.options.window, self.options.deep_window
        if not plan.tried or windows != (WINDOW, DEEP_WINDOW) or not self.hardware.follows(plan):
            return None
        base = plan.template or plan
        if base.tape is None:
            with without_garbage_collection():
                base.tape = rehearse(plan) or False
        if not base.tape:
            return None
        if len(chunks) < len(plan.own):
            return None
        latest = moves()
        if plan.calm != latest:
            if any([p for p in c.places if p >= 0] != [c.place] for c in chunks):
                return None
            plan.calm = latest
        memory = plan.machine.memory
        if any(n + others.get(p, 0) > memory[p] for p, n in base.tape.need.items()):
            return None
        return base.tape, {p: n for p, n in others.items() if p >= 0}

    def _followed(
        self,
        graph: Graph,
        known: Plan,
        lease: Lease,
        tape: LaunchTape,
        others: dict[int, int],
        results: Results,
    ) -> list[Any] | None:
        """The values, by a tape; None where it cannot be followed after all."""
        plan = known.beside_own() if known.own else known
        memory = plan.machine.memory

        def free(place: int) -> int:
            return memory[place] - others.get(place, 0)

        gathering = self._gathering(graph, plan, free)
        devices = lease.devices(plan, gathering, StepListener.NOTHING, tape)
        try:
            begin = perf_counter()
            if not devices.follow(tape):
                return None
            self.last = tape.footprint(perf_counter() - begin, others, gathering.need)
            return results(graph, plan, devices, gathering, tape.nbytes)
        finally:
            devices.close()

    def _obeyed(
        self,
        graph: Graph,
        plan: Plan,
        gathering: ResultAssembly,
        lease: Lease,
        watch: DaskCallbacks | None,
        rerun: bool,
        results: Results,
        turn: AdmittedRun,
        counter: StepWatcher | None = None,
        begun: Callable[[Devices], None] | None = None,
    ) -> tuple[State, list[Any]]:
        told = watch or counter
        if self.options.timeline:
            told = TimelineRecorder(plan, self._rows, told, place=HOST if self._gpus else None)
        wants = (
            StepListener.EACH
            if watch
            else StepListener.DONE
            if told or begun
            else StepListener.NOTHING
        )
        devices = lease.devices(plan, gathering, wants, None)
        try:
            if begun:
                begun(devices)
            if watch:
                watch.start_state(plan, graph)
                watch.value = devices.value
            window = lease.threads or self.options.window
            deep = lease.threads or self.options.deep_window
            # callbacks see a step done before they see its reader begin, as in Dask's own
            ahead = lease.threads is None and watch is None
            begin = perf_counter()
            check = self.options.check
            state = run(plan, devices, told, window, deep, ahead, check, rerun, turn)
            self.last = state.footprint(perf_counter() - begin)
            return state, results(graph, plan, devices, gathering, state.nbytes)
        finally:
            devices.close()

    def _chunks(
        self,
        graph: Graph,
        plan: Plan,
        devices: Devices,
        gathering: ResultAssembly,
        nbytes: list[int],
    ) -> list[Any]:
        """Tasks for the wanted keys that give the values which are now persisted."""
        known: dict[Any, Any] = {}

        def chunk(key: Any) -> Any:
            target = graph.alias.get(key, key)
            i = plan.index.get(target)
            if target in graph.gathers or target in graph.data or i is None or i in plan.lent:
                (value,) = _results(graph, plan, devices, gathering, nbytes, [key])
                return value
            if target not in known:
                if i in plan.chunks:
                    known[target] = plan.chunks[i]
                else:
                    size = nbytes[i]
                    known[target] = self._chunk(graph, plan, devices, target, i, size)
            found = known[target]
            return (
                found.shown() if _is_number(found) else ChunkTask(graph.called.get(key, key), found)
            )

        return [chunk(key) for key in graph.wanted]

    def _chunk(
        self,
        graph: Graph,
        plan: Plan,
        devices: Devices,
        key: Any,
        i: int,
        nbytes: int,
    ) -> Chunk:
        place = plan.steps[i].place
        if key in graph.parts:  # one of several values that were made together
            places, nbytes = devices.keep_part(i, graph.parts[key][1])
        else:
            places = devices.keep(i)
        chunk = Chunk(graph.called.get(key, key), place, nbytes, places, self.hardware)
        self._persisted.add(chunk)
        return chunk

    # ---- as a context manager

    def __enter__(self) -> Scheduler:
        if self._closed:
            raise RuntimeError(f"{self!r}: make a new Scheduler")
        self._entered.append(ConfigOverride({"scheduler": self.get, **self.hardware.settings()}))
        _active.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        _active.remove(self)
        left = self._entered.pop()
        left.end()
        if not self._entered:
            self._left = left
            self.close()

    def close(self) -> None:
        """Join every thread, and free every byte but those of persisted collections, which stay as
        they are until these go. A closed scheduler runs nothing."""
        if not self._closed:
            self._closed = True
            if self._hardware is not None:
                self._plans.clear()
                self._graphs.clear()
                self._hardware.close()
            with self._making:
                if self._host is not None:
                    self._host.close()

    # ---- to look at

    def rows(self) -> list[TimelineRow]:
        """The latest steps that have run, with `timeline=True`."""
        if not self.options.timeline:
            raise RuntimeError("nothing was kept of when steps ran: say timeline=True before")
        return list(self._rows.copy())  # other threads may be adding some

    def timeline(self, path: str | PathLike[str]) -> None:
        """Write the latest steps that have run, with `timeline=True`, as a file for Perfetto: a
        thread for each device."""
        write(path, {"gpuscheduler": self.rows()})

    def __repr__(self) -> str:
        if self._hardware is None and self._closed:
            return "<Scheduler of the parent process, closed>"
        machine = self.hardware.machine
        limits = " / ".join(dict.fromkeys(format_bytes(m) for m in machine.memory))
        n = len(machine.devices)
        held = self._held_by_place()
        persisted = f", persisted {format_bytes(sum(held.values()))}" if held else ""
        away = [f"{format_bytes(held[p])} {where}" for p, where in AWAY.items() if p in held]
        if away:
            persisted += f" ({', '.join(away)})"
        trouble = f", {self.hardware.trouble}" if self.hardware.trouble else ""
        return (
            f"<Scheduler on {n} {self.hardware.kind} device{'s'[: n > 1]}, "
            f"memory limit {limits} each{self._beside_devices}{persisted}{trouble}"
            f"{', closed' if self._closed else ''}>"
        )

    @property
    def _beside_devices(self) -> str:
        threads = self.host_threads
        return f", {threads} host thread{'s'[: threads > 1]}" if threads else ""

    def _held_by_place(self) -> dict[int, int]:
        """Bytes of persisted chunks by place; those that the host's threads have are there."""
        held = self._persisted.nbytes()
        if self._host is not None:
            for place, nbytes in self._host._persisted.nbytes().items():
                where = min(place, HOST)
                held[where] = held.get(where, 0) + nbytes
        return held

    def _repr_html_(self) -> str:
        machine, names = self.hardware.machine, self.hardware.names
        held = self._held_by_place()
        rows = [
            (str(d), names[d], format_bytes(machine.memory[d]), format_bytes(held.get(d, 0)))
            for d in machine.devices
        ]
        rows += [("", where, "", format_bytes(held[p])) for p, where in AWAY.items() if p in held]
        if threads := self.host_threads:
            limit = format_bytes(machine.host_memory)
            rows.append(("", f"{threads} host thread{'s'[: threads > 1]}", limit, ""))
        table = "".join(f"<tr>{''.join(f'<td>{v}</td>' for v in row)}</tr>" for row in rows)
        return (
            f"<b>gpuscheduler.Scheduler</b>{' (closed)' if self._closed else ''}"
            "<table><tr><th>device</th><th>name</th><th>memory limit</th><th>persisted</th></tr>"
            f"{table}</table>"
        )


def current() -> Scheduler:
    """The innermost entered `Scheduler`, or the process's own, made at first use."""
    global _default
    if _active:
        return _active[-1]
    with _lock:
        if _default is not None and _default.hardware.trouble:  # the other devices go on
            _default.close()
        if _default is None or _default._closed:
            _default = Scheduler()
        return _default


def kind_in_use() -> str:
    """The kind of devices that `current` runs on, or would: "cpu" or "cuda"."""
    if _active:
        return _active[-1].hardware.kind
    return "cuda" if cuda_devices() else "cpu"


#: Steps of a plan that is put aside, with all that there is, until the run is over: else that would
#: begin with a look for garbage in all of it, and soon have another.
MANY_STEPS = 20_000

_active: list[Scheduler] = []
_default: Scheduler | None = None
_lock = new_rlock()
_every: WeakSet[Scheduler] = WeakSet()
_left_behind: list[Any] = []  # by the parent of this process


@atexit.register
def _close_default() -> None:
    if _default is not None:
        _default.close()


def _begin_anew_after_fork() -> None:
    """A child process has none of its parent's threads."""
    for scheduler in list(_every):
        scheduler._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew_after_fork)


#: How the warnings begin that NumPy gives of numbers, by the names of its errors.
NUMBER_WARNINGS = {
    "divide": "divide by zero encountered", "over": "overflow encountered",
    "under": "underflow encountered", "invalid": "invalid value encountered",
}  # fmt: skip


def heeds_errors() -> bool:
    """Whether the caller has NumPy do more about errors of numbers than to warn of them.

    That is to raise, call, print or log (`numpy.errstate`, `numpy.seterr`), or to warn, where
    such a warning is made an error.

    >>> with np.errstate(divide="raise"):
    ...     heeds_errors()
    True
    """
    actions = np.geterr()
    if not {"ignore", "warn"}.issuperset(actions.values()):
        return True
    filters = getattr(warnings, "_get_filters", lambda: warnings.filters)()  # since Python 3.14
    return any(f[0] == "error" for f in filters) and any(
        action == "warn" and _is_raised(NUMBER_WARNINGS[name], filters)
        for name, action in actions.items()
    )


def _is_raised(text: str, filters: Sequence[Any]) -> bool:
    """Whether a RuntimeWarning that begins so is an error, in some module at least."""
    for action, message, category, module, _ in filters:
        if not issubclass(RuntimeWarning, category) or (message and not message.match(text)):
            continue
        if action == "error" or module is None:
            return bool(action == "error")
    return False


def _is_number(chunk: Chunk) -> bool:
    """Whether it is not worth to be kept track of."""
    return isinstance(chunk.shown(), (bool, int, float, complex, str, np.generic))


Results = Callable[[Graph, Plan, Devices, ResultAssembly, list[int]], list[Any]]


def _results(
    graph: Graph,
    plan: Plan,
    devices: Devices,
    gathering: ResultAssembly,
    nbytes: list[int],
    keys: Iterable[Any] | None = None,
) -> list[Any]:
    """The value of each wanted key, or of these."""

    # no function here calls itself: it would hold the graph, and chunks in it, until garbage is
    # collected
    def value(key: Any) -> Any:
        target = graph.alias.get(key, key)
        if target in graph.data:
            return graph.data[target]
        return _part(graph, target, devices.value(plan.index[target]))

    def wanted(key: Any) -> Any:
        gather = graph.gathers.get(graph.alias.get(key, key))
        return value(key) if gather is None else gathering.result(gather, value)

    return [wanted(key) for key in (graph.wanted if keys is None else keys)]


def _part(graph: Graph, key: Any, value: Any) -> Any:
    """The value of a key, of several that were made together."""
    return part_of(value, graph.parts[key][1]) if key in graph.parts else value


def _by_processes(pool: CallersPool, dsk: Any, keys: Any, **options: Any) -> Any:
    """What `dask.multiprocessing.get` gives with a pool of the caller's: values are pickled on
    their way to its processes and back, and no device is used."""
    with pool.watched():
        return dask.multiprocessing.get(dsk, keys, pool=pool, **options)


def nest_values(keys: Any, values: Iterator[Any]) -> Any:
    """Values as their keys are in lists, as Dask wants them."""
    return tuple(nest_values(k, values) for k in keys) if isinstance(keys, list) else next(values)
