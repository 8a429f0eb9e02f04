"""What a worker of a cluster has of this package: a plug-in with a `Scheduler` over the devices of
its node, and the tasks of the cluster that run on it. `attach` sends them.

This module imports `distributed`; nothing else does when it is imported.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from dask import config
from dask.base import get_scheduler, persist
from distributed import Reschedule, SchedulerPlugin, WorkerPlugin, get_client, get_worker
from distributed.protocol.pickle import loads

from .cargo import Cargo, Lent, Lost, Unreachable, off_device, put_back
from .forks import new_lock
from .garbage import without_garbage_collection
from .graph import Graph
from .plan import Plan
from .run import Devices, Interrupted, Watch, noted
from .scheduler import Scheduler
from .settings import Setting
from .sizes import leaves
from .timeline import Row

if TYPE_CHECKING:
    from distributed import Worker

Key = Any

#: Bytes of a pickled stage up to which its plan is kept for the next time.
KEPT = 2**23
#: Under this, and their numbers, come values of the graph that several stages read.
DATA = "gpuscheduler.data"
#: What a worker makes of the pickled plug-in, in names that every Python knows: one without this
#: package could not start otherwise.
UNPICKLED = (
    "__import__('gpuscheduler.node', fromlist=['Node']).Node(*told)"
    " if __import__('importlib.util').util.find_spec('gpuscheduler')"
    " else __import__('distributed').WorkerPlugin()"
)
#: What Dask is told while a cluster is attached: the tasks of its other way to shuffle talk to each
#: other, and find each other as tasks of the cluster only.
SHUFFLES = {"array.rechunk.method": "tasks", "dataframe.shuffle.method": "tasks"}
#: Seconds between two reports of how far a stage is.
REPORT_EVERY = 0.2


def version() -> str:
    from . import __version__

    return __version__


@dataclass(frozen=True)
class Sample:
    """A small array that a worker lends, for others to try whether they can read it."""

    machine: str
    pattern: bytes
    thing: Lent

    def is_read(self) -> bool:
        """Whether this process can."""
        from . import ipc

        if self.machine != ipc.machine():
            return False
        try:
            (copy,) = ipc.fetched([self.thing])
            return bool(copy.tobytes() == self.pattern)
        except Exception:  # whatever stands in the way: it is sent as others are
            return False


@dataclass(frozen=True)
class Facts:
    """What a worker tells of itself."""

    kind: str  # "cpu" or "cuda"
    memory: tuple[int, ...]  # bytes that values may take, per device
    bandwidth: float  # bytes/s, of one device
    sample: Sample | None = None  # of what it can lend to others on its machine


@dataclass(frozen=True)
class Payload:
    """What a stage's worker is sent."""

    token: str  # the same for the same stage of the same collection
    reads: dict[Key, Key]  # values that it is given -> their names in what it is given
    shared: dict[tuple[Key, Key], int]  # (task, name there) -> which of the shared values
    graph: bytes  # pickled


class Node(WorkerPlugin):  # type: ignore[misc]
    """The `Scheduler` of one worker, and the stages that it runs.

    It is pickled before it is set up, and only what it was told goes along.
    """

    def __init__(self, name: str, settings: dict[str, Any], expected: str):
        self.name, self.settings, self.expected = name, settings, expected

    def __reduce__(self) -> Any:
        return eval, (UNPICKLED, {"told": (self.name, self.settings, self.expected)})

    async def setup(self, worker: Worker) -> None:
        self.lock = new_lock()  # memory limits hold for one stage at a time
        self.running: dict[Key, _Run] = {}
        self.cancelled: set[Key] = set()
        self.worker, self.address = worker, worker.address
        self.scheduler: Scheduler | None = None
        self.sample: Sample | None = None
        self.lends: Any = None  # the array in it
        self.failure = ""
        self.ready = threading.Event()  # set when there is a scheduler, or a failure
        try:
            if version() != self.expected:
                raise RuntimeError(f"it has {version()}, and the client has {self.expected}")
            settings = {**self.settings, "devices": self._devices(worker)}
            self.scheduler = await asyncio.to_thread(lambda: Scheduler(**settings))
            self.sample, self.lends = await asyncio.to_thread(_sample, self.scheduler.hardware)
            _default.add(self)
        except Exception as error:
            self.failure = str(error)
            raise
        finally:
            self.ready.set()

    def _devices(self, worker: Worker) -> str | None:
        """The devices of this worker, where each was told its own."""
        devices = self.settings.get("devices")
        if not isinstance(devices, dict):
            return devices
        for name in (worker.name, str(worker.name), worker.address):
            if name in devices:
                return devices[name]  # type: ignore[no-any-return]
        raise RuntimeError(f"devices= says nothing of the worker named {worker.name!r}")

    async def teardown(self, worker: Worker) -> None:
        for run in list(self.running.values()):
            run.interrupt()
        _default.discard(self)
        if self.scheduler is not None:
            await asyncio.to_thread(self._close, self.scheduler)

    def _close(self, scheduler: Scheduler) -> None:
        if scheduler.hardware.kind == "cuda":
            from . import ipc

            self.sample = self.lends = None
            ipc.close()
        scheduler.close()

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """`distributed` stops no thread. This does, when nobody wants a stage any more."""
        if not (isinstance(key, tuple) and str(key[0]).endswith(self.name)):
            return
        if finish == "executing":
            self.cancelled.discard(key)
        elif start in ("executing", "long-running") and finish == "released":
            self.cancelled.add(key)
            if (run := self.running.get(key)) is not None:
                run.interrupt()
        elif finish in ("released", "forgotten"):
            self.cancelled.discard(key)

    def facts(self) -> Facts:
        assert self.scheduler is not None
        hardware = self.scheduler.hardware
        memory, bandwidth = tuple(hardware.machine.memory), hardware.machine.bandwidth
        return Facts(hardware.kind, memory, bandwidth, self.sample)

    def run(self, key: Key, payload: Payload, cargos: Iterable[Cargo]) -> Cargo:
        """Run a stage: its outputs."""
        assert self.scheduler is not None
        scheduler = self.scheduler
        run = self.running[key] = _Run()
        collecting = gc.isenabled()
        try:
            if key in self.cancelled:
                run.interrupt()
            with self.lock, _default.running_on(scheduler):
                run.check()
                found = {k: v for cargo in cargos for k, v in cargo.values.items()}

                def graph() -> Graph:
                    run.plans()
                    with without_garbage_collection():
                        out: Graph = loads(payload.graph)
                    for (task, name), number in payload.shared.items():
                        out.constants.setdefault(task, {})[name] = found[DATA, number]
                    return out

                given = self._brought({k: found[name] for k, name in payload.reads.items()})
                known = payload.token if len(payload.graph) <= KEPT else None

                def counter(plan: Plan) -> Counter:
                    run.planned()
                    return Counter(self.tell, key, sum(not s.fixed for s in plan.steps))

                try:
                    values = scheduler.run_graph(graph, given, run.begun, counter, known)
                except Interrupted:
                    raise
                except BaseException:
                    run.planned()
                    raise
                self.tell(key, 1.0)
                return Cargo(values)
        except Interrupted:  # whoever wants it again after all gets it
            if collecting:  # it may have come just before garbage was to be collected again
                gc.enable()
            raise Reschedule from None
        except BaseException as error:
            noted(error, f"on worker {self.address}")
            raise
        finally:
            del self.running[key]

    def tell(self, key: Key, done: float) -> None:
        """Tell the client how much of a stage is done, by way of the cluster's scheduler."""
        self.worker.log_event(self.name, {"stage": list(key), "done": done})

    def arrived(self, cargo: Cargo) -> Cargo:
        """What has come from another worker, on devices of this one if there is room for it."""
        with self.lock, suppress(MemoryError):  # it stays on the host until its stage begins
            return Cargo(self._brought(dict(cargo.values)))
        return cargo

    def _brought(self, given: dict[Key, Any]) -> dict[Key, Any]:
        """Values from other processes that were on devices, on devices of this one."""
        for key, value in given.items():
            for leaf in leaves(value):
                if type(leaf) is Lost:
                    raise Unreachable(
                        f"{key!r} is on a device of another worker, and could not be copied from "
                        f"there ({leaf.why}): compute it again, or have such values sent, by "
                        "dask.config.set({'gpuscheduler.ipc': False})"
                    )
        away = [k for k, v in given.items() if any(off_device(v))]
        if not away:
            return given
        assert self.scheduler is not None
        hardware: Any = self.scheduler.hardware
        n = len(hardware.machine.devices)
        for place in range(n):
            here = [k for rank, k in enumerate(away) if rank * n // len(away) == place]
            arrays = [leaf.array for k in here for leaf in off_device(given[k])]
            if hardware.kind == "cuda" and arrays:
                arrays = hardware.brought_in(arrays, place)
            arrived = iter(arrays)
            for key in here:
                given[key] = put_back(given[key], partial(_next, arrived))
        return given


#: The scheduler of the stage that a task belongs to: what the task computes itself runs there, too.
inside: ContextVar[Scheduler | None] = ContextVar("inside", default=None)


class _Default:
    """Dask's default scheduler in a process with nodes, one for all of them, for Dask's
    configuration is the whole process's. In a stage it is the node's own; what others compute goes
    where it would have gone."""

    def __init__(self) -> None:
        self.nodes: set[Node] = set()
        self.setting: Setting | None = None

    def add(self, node: Node) -> None:
        if not self.nodes:
            if config.get("scheduler", None) == self.get:  # from the process that began this one
                config.pop("scheduler")
            self.setting = Setting({"scheduler": self.get, **SHUFFLES})
        self.nodes.add(node)

    def discard(self, node: Node) -> None:
        self.nodes.discard(node)
        if not self.nodes and self.setting is not None:
            self.setting.end()

    @contextmanager
    def running_on(self, scheduler: Scheduler) -> Iterator[None]:
        """Run a stage."""
        self._again()
        token = inside.set(scheduler)
        try:
            yield
        finally:
            inside.reset(token)

    def get(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        return self._given()(dsk, keys, **kwargs)

    def persist(self, collections: Any, **kwargs: Any) -> Any:
        return persist(*collections, traverse=False, scheduler=self._given(), **kwargs)

    def _given(self) -> Any:
        if (mine := inside.get()) is not None:
            return mine.get
        if self.setting is None:  # the configuration came from the process that began this one
            return get_client().get
        if instead := self.setting.instead():
            return instead
        before = self.setting.before("scheduler")
        given = get_scheduler(scheduler=before) if before is not None else get_client().get
        self._again()
        return given

    def __reduce__(self) -> str:
        """Dask's configuration goes to new worker processes, and `get` with it."""
        return "_default"

    def _again(self) -> None:
        """A client that a task has got has made itself the default."""
        if config.get("scheduler", None) == "dask.distributed":
            config.set(scheduler=self.get)


_default = _Default()


def _next(arrays: Iterator[Any], _: Any) -> Any:
    return next(arrays)


class Counter(Watch):
    """Counts the steps of a stage that are done, and tells of it now and then."""

    def __init__(self, tell: Callable[[Key, float], None], key: Key, steps: int):
        self.tell, self.key = tell, key
        self.steps, self.count = max(steps, 1), 0
        self.next = monotonic() + REPORT_EVERY

    def done(self, step: int) -> None:
        self.count += 1
        if (now := monotonic()) > self.next:
            self.next = now + REPORT_EVERY
            self.tell(self.key, min(1.0, self.count / self.steps))


class _Run:
    """A stage that is running: it can be interrupted from another thread, at any time.

    While it is planned nothing looks whether somebody has done so: an exception is raised in its
    thread, as Ctrl-C raises one in the main thread. Whoever takes the number of the thread decides
    whether that happens, so it never does later.
    """

    def __init__(self) -> None:
        self.devices: Devices | None = None
        self.stopped = False
        self._lock = new_lock()
        self._planning = False
        self._thread: list[int] = []  # which is planning
        self._raised = False

    def plans(self) -> None:
        """From now on this thread is planning."""
        self._planning = True
        self._thread.append(threading.get_ident())
        if self.stopped:
            self.planned()
            self.check()

    def planned(self) -> None:
        """This thread is not planning any more."""
        if not self._planning:
            return
        try:
            self._thread.pop()
        except IndexError:  # the exception is on its way, or was lost in a destructor
            while not self._raised:
                sleep(0.001)
            _raise_in(threading.get_ident(), None)
            self.check()
        self._planning = False

    def begun(self, devices: Devices) -> None:
        with self._lock:
            self.devices = devices
        self.check()

    def check(self) -> None:
        if self.stopped:
            raise Interrupted("nobody wants this stage any more")

    def interrupt(self) -> None:
        with self._lock:
            self.stopped = True
            if self.devices is not None:
                self.devices.interrupt()
        with suppress(IndexError):
            thread = self._thread.pop()
            try:
                _raise_in(thread, Interrupted)
            finally:
                self._raised = True  # for this that thread waits


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in another thread when it is in Python code next. None takes it back."""
    given = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)


class Elsewhere(SchedulerPlugin):  # type: ignore[misc]
    """What waits for workers that have all left goes to one that comes, if it may: `distributed`
    sends it elsewhere only where others are there when it becomes ready."""

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Comes before what waits is looked through for what this worker can run."""
        for task in scheduler.unrunnable:
            if task.loose_restrictions and not scheduler.valid_workers(task):
                task.worker_restrictions = None


def run_stage(name: str, key: Key, payload: Payload, cargos: list[Cargo]) -> Cargo:
    """The task that a stage is for the cluster."""
    return _node(get_worker(), name).run(key, payload, cargos)


def arrive(name: str, cargo: Cargo) -> Cargo:
    """The task that has a parcel on its reader's worker before the stage that reads it begins."""
    return _node(get_worker(), name).arrived(cargo)


def take(cargo: Cargo, keys: tuple[Key, ...], near: bool) -> Cargo:
    """The task that takes out of a stage's outputs what one reader gets; a reader that is `near`
    copies it from this worker's devices."""
    return cargo.take(keys, near)


def _sample(hardware: Any) -> tuple[Sample | None, Any]:
    """What a worker on GPUs lends for a trial, and its array."""
    if hardware.kind != "cuda":
        return None, None
    try:
        from . import ipc

        ipc.devices[:] = list(dict.fromkeys(hardware.ids))
        array = ipc.sample()
        thing = ipc.lent(array)
        pattern = array.tobytes()  # for which it waits
        return (None if thing is None else Sample(ipc.machine(), pattern, thing)), array
    except Exception:  # whatever stands in the way: what others read is sent
        return None, None


def readable(samples: dict[str, Sample]) -> set[str]:
    """Which of other workers' samples this one can read."""
    return {address for address, sample in samples.items() if sample.is_read()}


def wrap(key: Key, value: Any) -> Cargo:
    """The task that makes any value of the cluster one that stages read."""
    return Cargo({key: value})


def facts(name: str, dask_worker: Worker) -> Facts | None:
    """What a worker has, for the client to ask; None while it is set up."""
    node: Any = dask_worker.plugins.get(name)
    if node is None or not node.ready.is_set():
        return None
    return _node(dask_worker, name).facts()


def rows(name: str, dask_worker: Worker) -> list[Row]:
    """When steps ran on a worker, by the clock of the cluster's scheduler."""
    scheduler = _node(dask_worker, name).scheduler
    assert scheduler is not None
    return [row.later(dask_worker.scheduler_delay) for row in scheduler.rows()]


def _node(worker: Worker, name: str) -> Node:
    node: Any = worker.plugins.get(name)
    if node is not None:
        node.ready.wait()
    if node is None or node.scheduler is None:
        why = node.failure if node is not None else "it was detached, or its log says why"
        expected = version() if node is None else node.expected
        raise RuntimeError(
            f"worker {worker.address} has no gpuscheduler {expected} over its devices: {why}"
        )
    return node  # type: ignore[no-any-return]
