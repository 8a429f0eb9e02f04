"""The plug-in that gives a cluster's worker a `Scheduler`, and the tasks that use it.

In each worker a plug-in with a `Scheduler` over the devices of its node, and the tasks of the
cluster that run on it; in the cluster's scheduler a plug-in that knows which workers take part, and
ends all of this when the client is gone. `attach` sends them.

This module imports `distributed`; nothing else does when it is imported.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from dask import config
from dask.base import get_scheduler, persist
from distributed import Reschedule, SchedulerPlugin, Status, WorkerPlugin, get_client, get_worker
from distributed.protocol.pickle import dumps, loads

from ..cpython_private import discard_error, raise_in_thread
from ..diagnostics.recording import Recording
from ..diagnostics.report import Recorded
from ..diagnostics.trace_json import Trace
from ..errors import Interrupted
from ..forks import new_lock
from ..frontend.graph import Graph
from ..frontend.lines import know_lines
from ..gc_control import without_garbage_collection
from ..plan.plan import Plan
from ..runtime.dask_config import ConfigOverride
from ..runtime.loop import add_note
from ..runtime.observe import Level
from ..runtime.protocol import Devices, StepWatcher
from ..scheduler import Scheduler
from ..values import deep_leaves
from .gpu_page import METRIC, add_page, worker_metric
from .transport import Bundle, off_device, put_back
from .wire import LentArray, LostArray, Unreachable

if TYPE_CHECKING:
    from distributed import Worker

Key = Any

#: Bytes of a pickled stage up to which its plan is kept for the next time.
KEPT = 2**23
#: Under this, and their numbers, come values of the graph that several stages read.
DATA = "gpuscheduler.data"
#: Makes the plug-in of a worker where it is unpickled, from the source of `unpickle_plugin`. It
#: must not need this package, which the worker may not have.
UNPICKLE = "(lambda names: exec(source, names) or names['unpickle_plugin'](*told))({})"
#: What Dask is told while a cluster is attached: the tasks of its other way to shuffle talk to each
#: other, and find each other as tasks of the cluster only.
SHUFFLES = {"array.rechunk.method": "tasks", "dataframe.shuffle.method": "tasks"}
#: Seconds between two reports of how far a stage is.
REPORT_EVERY = 0.2


def version() -> str:
    from .._version import __version__

    return __version__


@dataclass(frozen=True)
class SharedSample:
    """A small array that a worker lends: others try whether they can read it."""

    machine: str
    pattern: bytes
    thing: LentArray

    def is_read(self) -> bool:
        """Whether this process can."""
        from . import cuda_ipc

        if self.machine != cuda_ipc.machine():
            return False
        try:
            (copy,) = cuda_ipc.fetch_arrays([self.thing])
            return bool(copy.tobytes() == self.pattern)
        except Exception:  # whatever stands in the way: it is sent as others are
            return False


@dataclass(frozen=True)
class WorkerFacts:
    """The devices of a worker, as it reports them."""

    kind: str  # "cpu" or "cuda"
    memory: tuple[int, ...]  # bytes that values may take, per device
    bandwidth: float  # bytes/s, of one device
    sample: SharedSample | None = None  # of what it can lend to others on its machine


@dataclass(frozen=True)
class StagePayload:
    """The work of a stage, as its worker receives it."""

    token: str  # the same for the same stage of the same collection
    reads: dict[Key, Key]  # values that it is given -> their names in what it is given
    lines: dict[str, str]  # where the user wrote the layers of its tasks
    shared: dict[tuple[Key, Key], int]  # (task, name there) -> which of the shared values
    graph: bytes  # pickled


def unpickle_plugin(name: str, settings: dict[str, Any], expected: str) -> Any:
    """Make the plug-in of a worker: a `WorkerNode`, or one that reports an error.

    It stands by itself, for the worker may have another version of this package, or none.
    """
    from distributed import WorkerPlugin

    try:
        from gpuscheduler import __version__ as there
        from gpuscheduler.cluster.worker_plugin import WorkerNode
    except Exception as error:
        why = f"has no gpuscheduler ({error})"
    else:
        if there == expected:
            return WorkerNode(name, settings)
        why = f"has gpuscheduler {there}"
    why += f"; the client has gpuscheduler {expected}: install this version everywhere"

    class Absent(WorkerPlugin):  # type: ignore[misc]
        async def setup(self, worker: Any) -> None:
            told = f"worker {worker.contact_address} {why}"
            tell = getattr(worker.scheduler, name)
            if not await tell(address=worker.contact_address, told=told):
                await worker.plugin_remove(name)  # the client has left meanwhile

    return Absent()


class WorkerNode(WorkerPlugin):  # type: ignore[misc]
    """The `Scheduler` of one worker, and the stages that it runs.

    It is pickled before it is set up, and only what it was told goes along.
    """

    def __init__(self, name: str, settings: dict[str, Any]):
        self.name, self.settings = name, settings

    def __reduce__(self) -> Any:
        told = self.name, self.settings, version()
        return eval, (UNPICKLE, {"source": inspect.getsource(unpickle_plugin), "told": told})

    async def setup(self, worker: Worker) -> None:
        self.lock = new_lock()  # memory limits hold for one stage at a time
        self.running: dict[Key, _StageRun] = {}
        self.cancelled: set[Key] = set()
        self.recordings: dict[str, Recording] = {}  # for reports of the cluster, by name
        self.worker, self.address = worker, worker.address
        self.scheduler: Scheduler | None = None
        self.metric: Any = None  # what a heartbeat says of the devices
        self.sample: SharedSample | None = None
        self.lends: Any = None  # the array in it
        self.failure = ""
        self.removed = False
        self.ready = threading.Event()  # set when there is a scheduler, or a failure
        try:
            settings = {**self.settings, "devices": self._devices(worker)}
            scheduler = await asyncio.to_thread(lambda: Scheduler(**settings))
            if self.removed:  # meanwhile, when there was nothing to close yet
                await asyncio.to_thread(scheduler.close)
                return
            self.scheduler = scheduler
            self.sample, self.lends = await asyncio.to_thread(_sample, scheduler.hardware)
            if self.removed:
                return
            worker.handlers[self.name] = self.answer
            worker.metrics[METRIC] = self.metric = lambda _: worker_metric(scheduler)
            _default.add(self)
        except Exception as error:
            self.failure = str(error)
            raise
        finally:
            self.ready.set()
            if not self.removed:
                await self._report(worker)

    async def _report(self, worker: Worker) -> None:
        """Tell the cluster's scheduler this worker's devices, or why it cannot take part."""
        failed = self.scheduler is None
        told = _why_not(worker, self.failure) if failed else dumps(self.facts())
        tell = getattr(worker.scheduler, self.name)
        heard = False
        try:
            heard = await tell(address=worker.contact_address, told=told)
        finally:
            # 1. This worker joined, and was given the plug-in. 2. The client left, and workers that
            # were ready were asked to remove it. 3. Only then is it ready here.
            if not heard and worker.plugins.get(self.name) is self:
                await worker.plugin_remove(self.name)

    def _devices(self, worker: Worker) -> str | None:
        """The devices of this worker, where each was told its own."""
        devices = self.settings.get("devices")
        if not isinstance(devices, dict):
            return devices
        for name in (worker.name, str(worker.name), worker.address):
            if name in devices:
                return devices[name]  # type: ignore[no-any-return]
        raise RuntimeError(
            f"devices= has no entry for the worker named {worker.name!r}: add one for this name, "
            f"or for its address {worker.address!r}"
        )

    async def teardown(self, worker: Worker) -> None:
        self.removed = True
        worker.handlers.pop(self.name, None)
        if worker.metrics.get(METRIC) is self.metric:
            del worker.metrics[METRIC]
        for run in list(self.running.values()):
            run.interrupt()
        _default.discard(self)
        if self.scheduler is not None:
            await asyncio.to_thread(self._close, self.scheduler)

    def _close(self, scheduler: Scheduler) -> None:
        if scheduler.hardware.kind == "cuda":
            from . import cuda_ipc

            self.sample = self.lends = None
            cuda_ipc.close()
        scheduler.close()

    def transition(self, key: Key, start: str, finish: str, **_: Any) -> None:
        """`distributed` stops no thread. This does, when nobody wants a stage any more."""
        if not is_of(self.name, key):
            return
        if finish == "executing":
            self.cancelled.discard(key)
        elif start in ("executing", "long-running") and finish == "released":
            self.cancelled.add(key)
            if (run := self.running.get(key)) is not None:
                run.interrupt()
        elif finish in ("released", "forgotten"):
            self.cancelled.discard(key)

    def facts(self) -> WorkerFacts:
        assert self.scheduler is not None
        hardware = self.scheduler.hardware
        memory, bandwidth = tuple(hardware.machine.memory), hardware.machine.bandwidth
        return WorkerFacts(hardware.kind, memory, bandwidth, self.sample)

    def trace(self) -> Trace:
        """When steps ran, by the clock of the cluster's scheduler."""
        assert self.scheduler is not None
        return self.scheduler.trace().shift_clock(int(self.worker.scheduler_delay * 1e9))

    def begin_recording(self, name: str, level: Level) -> None:
        """Record what runs from now on."""
        assert self.scheduler is not None
        self.recordings[name] = self.scheduler.record(level.name.lower()).__enter__()

    def end_recording(self, name: str) -> tuple[str, Recorded] | None:
        """End a recording: the worker's name, and what a report shows; None if not begun here."""
        recording = self.recordings.pop(name, None)
        if recording is None:
            return None
        recording.end()
        (found,) = recording.take_recorded().values()
        behind = int(self.worker.scheduler_delay * 1e9)
        return str(self.worker.name), replace(found, trace=found.trace.shift_clock(behind))

    def find_readable(self, samples: dict[str, SharedSample]) -> set[str]:
        """The addresses of the workers whose samples this one can read."""
        return {address for address, sample in samples.items() if sample.is_read()}

    def answer(self, method: str, args: bytes) -> Any:
        """Call the method that `ask` names, and return its pickled result."""
        return dumps(getattr(self, method)(*loads(args)))

    def run(self, key: Key, payload: StagePayload, cargos: Iterable[Bundle]) -> Bundle:
        """Run a stage: its outputs."""
        assert self.scheduler is not None
        scheduler = self.scheduler
        know_lines(payload.lines)
        run = self.running[key] = _StageRun()
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
                        given = {**out.nodes[task].constants, name: found[DATA, number]}
                        out.set_constants(task, given)
                    return out

                given = self._bring_values({k: found[name] for k, name in payload.reads.items()})
                known = payload.token if len(payload.graph) <= KEPT else None

                def counter(plan: Plan) -> StepCounter:
                    run.end_planning()
                    return StepCounter(self.tell, key, sum(not s.fixed for s in plan.steps))

                try:
                    values = scheduler.run_graph(graph, given, run.note_devices, counter, known)
                except Interrupted:
                    raise
                except BaseException:
                    run.end_planning()
                    raise
                self.tell(key, 1.0)
                return Bundle(values)
        except Interrupted:  # whoever wants it again after all gets it
            if collecting:  # it may have come just before garbage was to be collected again
                gc.enable()
            raise Reschedule from None
        except BaseException as error:
            add_note(error, f"on worker {self.address}")
            raise
        finally:
            del self.running[key]

    def tell(self, key: Key, done: float) -> None:
        """Report to the client, through the scheduler, how much of a stage is done."""
        self.worker.log_event(self.name, {"stage": list(key), "done": done})

    def take_arrived(self, cargo: Bundle) -> Bundle:
        """A parcel of another worker, on devices of this one if they have room for it."""
        with self.lock, suppress(MemoryError):  # it stays on the host until its stage begins
            return Bundle(self._bring_values(dict(cargo.values)))
        return cargo

    def _bring_values(self, given: dict[Key, Any]) -> dict[Key, Any]:
        """Values from other processes that were on devices, on devices of this one."""
        for key, value in given.items():
            for leaf in deep_leaves(value):
                if type(leaf) is LostArray:
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
                arrays = hardware.copy_in(arrays, place)
            arrived = iter(arrays)
            for key in here:
                given[key] = put_back(given[key], partial(_next_array, arrived))
        return given


#: The scheduler of the stage that a task belongs to: what the task computes itself runs there, too.
inside: ContextVar[Scheduler | None] = ContextVar("inside", default=None)


class _DefaultScheduler:
    """Dask's default scheduler in a process that has nodes.

    There is one for all nodes, since Dask's configuration is the whole process's. Inside a stage it
    is the node's own scheduler. Any other computation goes where it would have gone without it.
    """

    def __init__(self) -> None:
        self.nodes: set[WorkerNode] = set()
        self.setting: ConfigOverride | None = None

    def add(self, node: WorkerNode) -> None:
        if not self.nodes:
            if config.get("scheduler", None) == self.get:  # from the process that began this one
                config.pop("scheduler")
            self.setting = ConfigOverride({"scheduler": self.get, **SHUFFLES})
        self.nodes.add(node)

    def discard(self, node: WorkerNode) -> None:
        self.nodes.discard(node)
        if not self.nodes and self.setting is not None:
            self.setting.end()

    @contextmanager
    def running_on(self, scheduler: Scheduler) -> Iterator[None]:
        """Run a stage."""
        self._restore_default_client()
        token = inside.set(scheduler)
        try:
            yield
        finally:
            inside.reset(token)

    def get(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        return self._scheduler_get()(dsk, keys, **kwargs)

    def persist(self, collections: Any, **kwargs: Any) -> Any:
        return persist(*collections, traverse=False, scheduler=self._scheduler_get(), **kwargs)

    def _scheduler_get(self) -> Any:
        if (mine := inside.get()) is not None:
            return mine.get
        if self.setting is None:  # the configuration came from the process that began this one
            return get_client().get
        if instead := self.setting.replacement():
            return instead
        before = self.setting.value_before("scheduler")
        given = get_scheduler(scheduler=before) if before is not None else get_client().get
        self._restore_default_client()
        return given

    def __reduce__(self) -> str:
        """Dask's configuration goes to new worker processes, and `get` with it."""
        return "_default"

    def _restore_default_client(self) -> None:
        """A client that a task has got has made itself the default."""
        if config.get("scheduler", None) == "dask.distributed":
            config.set(scheduler=self.get)


_default = _DefaultScheduler()


def _next_array(arrays: Iterator[Any], _: Any) -> Any:
    return next(arrays)


class StepCounter(StepWatcher):
    """Counts the steps of a stage that are done, and reports the count now and then."""

    def __init__(self, tell: Callable[[Key, float], None], key: Key, steps: int):
        self.tell, self.key = tell, key
        self.steps, self.count = max(steps, 1), 0
        self.next = monotonic() + REPORT_EVERY

    def note_done(self, step: int) -> None:
        self.count += 1
        if (now := monotonic()) > self.next:
            self.next = now + REPORT_EVERY
            self.tell(self.key, min(1.0, self.count / self.steps))


class _StageRun:
    """A running stage, which another thread can interrupt at any time.

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
            self.end_planning()
            self.check()

    def end_planning(self) -> None:
        """This thread is not planning any more."""
        if not self._planning:
            return
        try:
            self._thread.pop()
        except IndexError:  # the exception is on its way, or was lost in a destructor
            while not self._raised:
                sleep(0.001)
            discard_error(Interrupted)
            self.check()
        self._planning = False

    def note_devices(self, devices: Devices) -> None:
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
                raise_in_thread(thread, Interrupted)
            finally:
                self._raised = True  # for this that thread waits


class Attachment(SchedulerPlugin):  # type: ignore[misc]
    """The plug-in of an attached client in the cluster's scheduler.

    It knows which workers take part.

    Workers tell it what they have when they are ready, so that nobody waits for one that is not.
    When the client is gone, however that came about, it has all workers remove what they have of
    the client's.
    """

    def __init__(self, name: str, client: str, scheduler: Any):
        self.name, self.client, self.scheduler = name, client, scheduler
        self.told: dict[str, bytes | str] = {}  # by worker: its facts, pickled, or why it has none
        self.asked: set[tuple[str, asyncio.Future[Any]]] = set()  # workers that have not answered
        #: what others want of a client that is gone, and is not done yet
        self.wanted: set[Key] | None = None
        self.ended = False

    async def begin(self, node: WorkerNode) -> None:
        """Give all workers a plug-in, also those that join later."""
        scheduler, name = self.scheduler, self.name
        scheduler.add_plugin(self, name=name)
        add_page(scheduler)
        scheduler.handlers |= {name: self.hear, members_of(name): self.members}
        scheduler.worker_plugins[name] = pickled = dumps(node)
        await self.ask({"op": "plugin-add", "name": name, "plugin": pickled})

    async def end(self) -> None:
        """Have all workers remove it. Again, it does nothing."""
        if self.ended:
            return
        self.ended = True
        scheduler, name = self.scheduler, self.name
        del scheduler.handlers[name], scheduler.handlers[members_of(name)]
        scheduler.worker_plugins.pop(name, None)
        # who has told nothing yet would not answer before it is ready, and ends when it tells
        await self.ask({"op": "plugin-remove", "name": name}, list(self.told))
        scheduler.remove_plugin(name)

    def hear(self, address: str, told: bytes | str) -> bool:
        """Note the report of a worker."""
        address = self.scheduler.coerce_address(address)
        if address in self.scheduler.workers:
            self.told[address] = told
        return True

    def members(self, known: list[str]) -> dict[str, bytes | str | None]:
        """The running workers, and the reports of those that are not `known`."""
        running = [a for a, w in self.scheduler.workers.items() if w.status == Status.running]
        return {a: None if a in known else self.told.get(a) for a in running}

    async def ask(
        self, message: dict[str, Any], workers: Collection[str] | None = None
    ) -> dict[str, Any]:
        """What workers answer, or the exception instead. Who leaves meanwhile is left out."""
        scheduler = self.scheduler
        asked: dict[str, asyncio.Future[Any]] = {}
        for address in scheduler.workers if workers is None else workers:
            if address in scheduler.workers:
                question = scheduler.broadcast(msg=message, workers=[address], on_error="return")
                asked[address] = asyncio.ensure_future(question)
        self.asked |= asked.items()
        if asked:
            await asyncio.wait(asked.values())
        self.asked -= asked.items()
        there = {a: answer.result() for a, answer in asked.items() if not answer.cancelled()}
        return {address: answer[address] for address, answer in there.items()}

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Let stages for workers that have all left run on this one, if it may run them.

        `distributed` sends them elsewhere only where other workers are there when they become
        ready. This comes before `distributed` looks for tasks that the new worker can run.

        Comes before what waits is looked through for what this worker can run.
        """
        for task in scheduler.unrunnable:
            if task.loose_restrictions and not scheduler.valid_workers(task):
                task.worker_restrictions = None

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        self.told.pop(worker, None)
        for address, answer in self.asked:
            if address == worker:
                answer.cancel()

    def add_client(self, scheduler: Any, client: str) -> None:
        """Go on for a client that comes back after its connection was lost."""
        if client == self.client:
            self.wanted = None

    def remove_client(self, scheduler: Any, client: str) -> None:
        """End with the client, once everything is done that other clients want.

        For example after `distributed.fire_and_forget`.
        """
        if client == self.client and scheduler.status == Status.running:
            self.wanted = self.unfinished_keys()
            self._end_if_done()

    def transition(self, key: Key, start: str, finish: str, *_: Any, **__: Any) -> None:
        if self.wanted and key in self.wanted and finish in ("memory", "erred", "forgotten"):
            self.wanted.discard(key)
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self.wanted == set():
            self.scheduler.loop.add_callback(self.end)

    def unfinished_keys(self) -> set[Key]:
        """The keys of stages that a client wants, and of the parcels between them."""
        done = "memory", "erred", "released", "forgotten"
        tasks = self.scheduler.tasks.values()
        return {t.key for t in tasks if is_of(self.name, t.key) and t.state not in done}


async def begin(name: str, client: str, node: WorkerNode, dask_scheduler: Any) -> None:
    """Attach a client, by its number. Returns when all workers have told what they have."""
    attachment = Attachment(name, client, dask_scheduler)
    await attachment.begin(node)
    if client not in dask_scheduler.clients:  # it left before there was anything to end
        await attachment.end()


async def end(name: str, dask_scheduler: Any) -> None:
    """Detach a client."""
    if (attachment := dask_scheduler.plugins.get(name)) is not None:
        await attachment.end()


async def leave(name: str, dask_scheduler: Any) -> None:
    """Detach a client that is about to close, unless stages are still wanted.

    Then the attachment ends with the client, or, where other clients want the stages, when these
    are done.
    """
    attachment = dask_scheduler.plugins.get(name)
    if attachment is not None and not attachment.unfinished_keys():
        await attachment.end()


def members_of(name: str) -> str:
    """The name of the scheduler's handler that returns the members of an attachment."""
    return f"{name}-members"


def is_of(name: str, key: Key) -> bool:
    """Whether a task of the cluster is one of an attachment's."""
    return isinstance(key, tuple) and str(key[0]).endswith(name)


async def ask(
    name: str, method: str, args: tuple[Any, ...], workers: Collection[str], dask_scheduler: Any
) -> dict[str, Any]:
    """What a method of the nodes gives, or raises, on those workers that are there."""
    question = {"op": name, "method": method, "args": dumps(args)}
    answers = await dask_scheduler.plugins[name].ask(question, workers)
    return {w: a if isinstance(a, Exception) else loads(a) for w, a in answers.items()}


def run_stage(name: str, key: Key, payload: StagePayload, cargos: list[Bundle]) -> Bundle:
    """Task of the cluster: run a stage."""
    return _node(get_worker(), name).run(key, payload, cargos)


def arrive(name: str, cargo: Bundle) -> Bundle:
    """Task of the cluster: put a parcel on its reader's worker, before the stage begins."""
    return _node(get_worker(), name).take_arrived(cargo)


def take(cargo: Bundle, keys: tuple[Key, ...], near: bool) -> Bundle:
    """Task of the cluster: take one reader's values out of a stage's outputs.

    A reader that is `near` copies them from this worker's devices.
    """
    return cargo.take(keys, near)


def _sample(hardware: Any) -> tuple[SharedSample | None, Any]:
    """A small array that a worker with GPUs lends for a trial, and its original."""
    if hardware.kind != "cuda":
        return None, None
    try:
        from . import cuda_ipc

        cuda_ipc.devices[:] = list(dict.fromkeys(hardware.ids))
        array = cuda_ipc.sample()
        thing = cuda_ipc.lend_array(array)
        pattern = array.tobytes()  # for which it waits
        return (None if thing is None else SharedSample(cuda_ipc.machine(), pattern, thing)), array
    except Exception:  # whatever stands in the way: what others read is sent
        return None, None


def wrap(key: Key, value: Any) -> Bundle:
    """The task that makes any value of the cluster one that stages read."""
    return Bundle({key: value})


def _node(worker: Worker, name: str) -> WorkerNode:
    node: Any = worker.plugins.get(name)
    if node is not None:
        node.ready.wait()
    if node is None or node.scheduler is None:
        raise RuntimeError(_why_not(worker, "" if node is None else node.failure))
    return node  # type: ignore[no-any-return]


def _why_not(worker: Worker, failure: str) -> str:
    """Why a worker takes no part."""
    return (
        f"worker {worker.address} has no gpuscheduler {version()} over its devices: "
        f"{failure or 'it was detached, or its log says why'}"
    )
