"""Attach to a Dask cluster whose workers each drive all devices of their node.

A graph goes to them as a few stages, and each worker's own `Scheduler` runs the thousands of steps
that a stage is made of.

What is a stage, and where it runs, is decided in `cut`. Here it is sent: `distributed` moves what
goes from worker to worker, runs stages again where a worker was lost, and tells of errors.
"""

from __future__ import annotations

import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from os import PathLike
from time import monotonic
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import dask
from dask import config
from dask._expr import FinalizeCompute
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from dask.base import collections_to_expr
from dask.callbacks import local_callbacks
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.utils import key_split

from ..devices.choose import cuda_devices
from ..errors import PlanError
from ..forks import new_lock
from ..frontend.compiled_task import Chain
from ..frontend.graph import Graph, wanted_keys
from ..frontend.lowering import from_dask, received_by_scheduler
from ..frontend.transfers import identity
from ..gc_control import without_garbage_collection
from ..options import Options
from ..pipeline.cache import PlanCache, signature
from ..plan.machine import Machine
from ..runtime.dask_config import ConfigOverride
from ..runtime.timeline import write
from ..scheduler import nest_values
from ..values import sizeof
from .answer import ClusterResult, Key, PickledWork, RemoteBlock, finish
from .stages import BESIDE, CALLER, Stage, StageGraph, cut
from .wire import Unreachable

if TYPE_CHECKING:
    from distributed import Client, Future

    from .worker_plugin import WorkerFacts

#: Bytes per second between two workers, for the planner.
NETWORK = 1e9
#: Bytes of a value of the graph from which on it is sent once for all stages that read it.
LARGE = 2**20
#: Options of Dask's client that mean single tasks.
OF_TASKS = "workers", "resources", "actors"
#: Seconds after which it is asked again which workers there are. Stages for one that has left
#: meanwhile run elsewhere.
MEET_EVERY = 0.5
#: Bytes from which a parcel is copied from the devices of a worker on the same machine: what is
#: small comes with a message that is sent anyway.
LEAST_LENT = 2**20


def attach(
    client: Client,
    devices: str | dict[Any, str] | None = None,
    memory_limit: int | str | float | None = None,
    **options: Any,
) -> AttachedCluster:
    """Let each worker of a Dask cluster drive all devices of its node, by a `Scheduler` of its own.

    Until it is closed, or left as a context manager, `compute()`, `persist()`, `dask.compute` and
    `client.compute` go this way: a graph is cut into stages, one task of the cluster each, however
    many tasks they are made of. `client.submit` and `client.map` work as ever, and so do
    collections that are shuffled peer to peer (``method="p2p"``), by the cluster itself. Workers
    that join later take part.

    Parameters
    ----------
    client
        A `distributed.Client` that is not asynchronous.
    devices, memory_limit, options
        As for `Scheduler`, on each worker. ``"auto"`` is every GPU that ``CUDA_VISIBLE_DEVICES``
        leaves the worker, or CPU devices where there is none. Several workers on one machine must
        not have the same GPUs: ``devices={0: "cuda:0,1", 1: "cuda:2,3"}``, by the workers' names.

    Raises
    ------
    RuntimeError
        where a worker, or the cluster's scheduler, has not this package in this version, or a
        worker has not these devices. All such workers are named.
    TypeError
        for an asynchronous client, or an unknown option.

    Examples
    --------
    >>> import dask.array as da
    >>> from distributed import Client
    >>> with (
    ...     Client(n_workers=1, processes=False, dashboard_address=":0") as client,
    ...     attach(client, devices="cpu:2"),
    ... ):
    ...     int(da.arange(10, chunks=5).sum().compute())
    45
    """
    if client.asynchronous:
        raise TypeError("attach needs a Client that is not asynchronous")
    given = {"devices": devices, "memory_limit": memory_limit, **options}
    settings = {k: v for k, v in given.items() if v is not None}
    for string in devices.values() if isinstance(devices, dict) else [devices]:
        Options.read(**{**settings, "devices": string})  # a wrong option is known here
    return AttachedCluster(client, settings)


class PeerToPeer(PlanError):
    """A graph whose tasks talk to each other: only the cluster itself can run it."""


class AttachedCluster:
    """A client's cluster, with a `Scheduler` in each worker. Made by `attach`."""

    def __init__(self, client: Client, settings: dict[str, Any]):
        self.client, self.settings = client, settings
        self.name = ""  # of all that the cluster has of it
        self.workers: dict[str, WorkerFacts] = {}
        self._left_out: set[str] = set()
        self._near: set[tuple[str, str]] = set()  # workers, and who can read their devices
        self._watched: dict[str, RunProgress] = {}  # by the name of the run
        self._blocks: WeakValueDictionary[Key, RemoteBlock] = WeakValueDictionary()
        self._plans = PlanCache()
        self._closed = False
        self._met = 0.0  # when it was asked last which workers there are
        self._meeting = new_lock()
        self._check_versions()
        try:
            self._register()
            self._meet(strict=True)
        except BaseException:
            from .worker_plugin import end

            self._tell_scheduler(end)
            raise
        kinds = {f.kind for f in self.workers.values()}
        backend = {"array.backend": "cupy"} if kinds == {"cuda"} and cuda_devices() else {}
        if backend:
            from ..devices.cuda import dask_backend as creation

            creation.register()
        from .worker_plugin import SHUFFLES

        get = AttachedGet(self)
        self._setting = ConfigOverride({"scheduler": get, **SHUFFLES, **backend})
        own = type(client)
        self._client_get = MethodType(own.get, client)
        self._client_compute = MethodType(own.compute, client)
        self._client_persist = MethodType(own.persist, client)
        ends = {
            "close": self._close_client,
            "shutdown": self._shut_down_client,
            "_close": self._end_client,
        }
        mine = {"get": get, "compute": self.compute, "persist": self.persist, **ends}
        self._methods = ConfigOverride(mine, vars(client))

    # ---- the cluster

    def _check_versions(self) -> None:
        """The cluster's scheduler, too, needs the package, in this version. Where it has not, all
        that have not are named; workers tell it by themselves."""
        from .worker_plugin import version

        # of names that every Python knows: the package may not be there
        ask = (eval, "__import__('gpuscheduler').__version__")
        answers: dict[str, Any] = {}
        try:
            answers["the scheduler"] = self.client.run_on_scheduler(*ask)
        except Exception as error:
            answers["the scheduler"] = error
        if answers["the scheduler"] == version():
            return
        answers |= self.client.run(*ask, on_error="return")
        wrong = []
        for who, answer in answers.items():
            if isinstance(answer, Exception):
                wrong.append(f"{_worker(who)} has no gpuscheduler ({answer})")
            elif answer != version():
                wrong.append(f"{_worker(who)} has gpuscheduler {answer}")
        raise RuntimeError(
            f"{'; '.join(wrong)}; the client has gpuscheduler {version()}: install this "
            "version everywhere"
        )

    def _register(self) -> None:
        """Give the cluster what it needs. The name is a new one each time: what has been told to
        end may still be ending."""
        from .worker_plugin import WorkerNode, begin

        if self.name:
            self.client.unsubscribe_topic(self.name)
        self.name = f"gpuscheduler-{uuid.uuid4().hex[:12]}"
        self.client.subscribe_topic(self.name, self._told)
        node = WorkerNode(self.name, self.settings)
        self.client.run_on_scheduler(begin, self.name, self.client.id, node)

    def _meet(self, strict: bool = False) -> list[str]:
        """The addresses of the workers that can take part, in their order.

        The cluster's scheduler knows them, for they have told it: no worker is waited for here.
        """
        with self._meeting:
            if not self.workers or monotonic() >= self._met + MEET_EVERY:
                self._met = monotonic()
                self._look_round(strict)
            return sorted(self.workers)

    def _look_round(self, strict: bool) -> None:
        from distributed.protocol.pickle import loads

        there = self._members()
        if there is None:  # the connection was lost for a while: this client was taken for gone
            self._register()
            self.workers, self._left_out, self._near = {}, set(), set()
            there = self._members() or {}
        for gone in set(self.workers) - set(there):
            del self.workers[gone]
        self._left_out &= set(there)
        why_not = {a: told for a, told in there.items() if isinstance(told, str)}
        if why_not and strict:
            raise RuntimeError("; ".join(why_not.values()))
        for address in sorted(set(why_not) - self._left_out):
            warnings.warn(f"{why_not[address]}; it takes no part", stacklevel=2)
        self._left_out |= set(why_not)
        # who has told nothing is not ready yet, and is asked again next time
        new = {a: loads(told) for a, told in there.items() if isinstance(told, bytes)}
        self.workers |= new
        if new:
            self._introduce()
        if strict and not self.workers:
            raise RuntimeError(
                f"no worker is ready: {', '.join(there)}: their logs say why"
                if there
                else "the cluster has no workers: start some, and attach then"
            )

    def _members(self) -> dict[str, bytes | str | None] | None:
        """The workers that are running, and what new ones have told; None where the cluster's
        scheduler knows of no such attachment."""
        from .worker_plugin import members_of

        members = getattr(self.client.scheduler, members_of(self.name))
        return self.client.sync(members, known=list(self.workers))  # type: ignore[no-any-return]

    def _ask(self, method: str, *args: Any, workers: list[str]) -> dict[str, Any]:
        """What a method of nodes gives, or raises, on workers; who is gone is left out."""
        from .worker_plugin import ask

        return self.client.run_on_scheduler(ask, self.name, method, args, workers)  # type: ignore[no-any-return]

    def _introduce(self) -> None:
        """Find out which workers can read each other's devices."""
        lending = {a: f.sample for a, f in self.workers.items() if f.sample is not None}
        machines = [s.machine for s in lending.values()]
        asked = [a for a, s in lending.items() if machines.count(s.machine) > 1]
        if not asked or not config.get("gpuscheduler.ipc", True):
            self._near = set()
            return
        answers = self._ask("readable", lending, workers=asked)
        self._near = {
            (source, reader)
            for reader, sources in answers.items()
            if not isinstance(sources, Exception)
            for source in sources
        }

    def close(self) -> None:
        """Leave the cluster as it was: free what the workers hold for this, end their threads, and
        give `client.compute` and Dask's configuration back."""
        if self._give_back():
            from .worker_plugin import end

            self._tell_scheduler(end)

    def _give_back(self) -> bool:
        """Give back what is in this process; True the first time."""
        if self._closed:
            return False
        self._closed = True
        self._setting.end()
        self._methods.end()
        self._plans.clear()
        return True

    def _tell_scheduler(self, function: Callable[..., Any]) -> None:
        """Call a function of `node` in the cluster's scheduler, if that is there."""
        if self.client.status == "running":
            with suppress(Exception):  # it may be on its way out
                self.client.unsubscribe_topic(self.name)
                self.client.run_on_scheduler(function, self.name)

    def _close_client(self, *args: Any, **kwargs: Any) -> Any:
        """`client.close`: what is attached to it ends with it."""
        from .worker_plugin import leave

        if self._give_back():
            self._tell_scheduler(leave)
        return self.client.close(*args, **kwargs)

    def _shut_down_client(self) -> Any:
        """`client.shutdown`: nothing of the cluster is left."""
        self._give_back()
        return self.client.shutdown()

    async def _end_client(self, *args: Any, **kwargs: Any) -> Any:
        """`Client._close` (distributed 2026.1 to 2026.8), by which clients end in any other way: as
        when their cluster is gone."""
        self._give_back()
        return await self.client._close(*args, **kwargs)

    def __enter__(self) -> AttachedCluster:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Dask's configuration goes to new worker processes, and `get` with it."""
        return _PickledAttachment, ()

    def __repr__(self) -> str:
        if self._closed:
            return "<Attached, closed>"
        kinds: dict[str, int] = {}
        for f in self.workers.values():
            said = f"{len(f.memory)} {f.kind} device{'s'[: len(f.memory) != 1]}"
            kinds[said] = kinds.get(said, 0) + 1
        each = ", ".join(f"{n} worker{'s'[: n != 1]} of {what}" for what, n in kinds.items())
        out = "".join(f", not {_worker(address)}" for address in sorted(self._left_out))
        return f"<Attached to {self.client.scheduler.address}: {each}{out}>"  # type: ignore[union-attr]

    # ---- planning

    def plan(self, *collections: Any) -> StageGraph:
        """How computing these collections would be cut up. Computes nothing.

        Print it: the stages, the bytes between workers, the memory that each needs.
        """
        return self._work(*received_by_scheduler(*collections)).cut

    def timeline(self, path: str | PathLike[str]) -> None:
        """Write which step ran where and when, with `timeline=True`, as a file for Perfetto: a
        process for each worker, a thread for each of its devices. The times are those of the
        clock of the cluster's scheduler."""
        found = self._ask("rows", workers=self._there())
        for error in found.values():
            if isinstance(error, Exception):
                raise error
        write(path, {_worker(address): found[address] for address in sorted(found)})

    def _there(self) -> list[str]:
        if self._closed:
            raise RuntimeError("this cluster is not attached any more: attach(client) again")
        return self._meet()

    def _ready(self) -> list[str]:
        """The addresses of the workers that can take part, as soon as there is one. Until then a
        task that does nothing waits, as others do: an adaptive cluster starts a worker for it."""
        while not (workers := self._there()):
            if self._left_out:
                out = ", ".join(_worker(address) for address in sorted(self._left_out))
                raise RuntimeError(f"none of the cluster's workers takes part: not {out}")
            self.client.submit(bool, key=f"wait-{uuid.uuid4().hex}").result()
        return workers

    def _work(self, dsk: Any, keys: Any, stay: bool = False) -> PickledWork:
        """The computation of these keys, as it was cut before if it was. Its results may `stay` on
        the workers."""
        workers = tuple(self._ready())
        known = signature(dsk, wanted_keys(keys))
        if known is not None:
            found = self._plans.find(known, workers, stay)
            if found is not None:
                return found[1]  # type: ignore[return-value]
        with without_garbage_collection():
            work = self._cut(dsk, keys, workers, stay)
        if known is not None and not work.once:
            graph: Any = work.cut.graph
            self._plans.keep(known, workers, stay, graph=graph, plan=work)  # type: ignore[arg-type]
        return work

    def _cut(self, dsk: Any, keys: Any, workers: tuple[str, ...], stay: bool) -> PickledWork:
        from distributed.protocol.pickle import dumps

        from .worker_plugin import StagePayload

        number = {a: n for n, a in enumerate(workers)}

        def holder(value: Any) -> tuple[Any, int] | None:
            if type(value) is not RemoteBlock:
                return None
            return (value.future.key, value.inner is None), number.get(value.worker, 0)

        graph = from_dask(
            dsk,
            keys,
            _MissingInputs(self._held),
            home=lambda value: 0 if type(value) is RemoteBlock else None,
            held=lambda key, reference: self._held(reference),
            compiled=False,
        )
        if _peer_to_peer(graph):
            raise PeerToPeer(
                "a peer-to-peer shuffle is tasks that talk to each other, which the cluster runs "
                "itself, without stages: shuffle with method='tasks' for a plan"
            )
        once = stay and bool(graph.data)
        if once:
            _make_there(graph)
        self._find([v for v in _values(graph) if type(v) is RemoteBlock and not v.worker], workers)
        pins, local = self._pins(graph, workers)
        near = {(number[a], number[b]) for a, b in self._near if a in number and b in number}
        work = cut(graph, self._machine(workers), holder, pins, near)
        portions = [work.portion(stage, local) for stage in work.stages]
        shared, uses = _shared_values(portions)
        payloads = []
        for stage, portion, use in zip(work.stages, portions, uses, strict=True):
            reads = {k: _name(work, k) for read in stage.reads.values() for k in read}
            payloads.append(StagePayload(uuid.uuid4().hex, reads, use, dumps(portion)))
        names = {k: _name(work, k) for k in work.held_by}
        answer = ClusterResult(graph.wanted, graph.alias, graph.gathers, graph.data, names)
        return PickledWork(work, payloads, answer, workers, shared, once)

    def _find(self, loose: list[RemoteBlock], workers: tuple[str, ...]) -> None:
        """Where the values of a user's own futures are; what is not there yet is spread evenly."""
        if not loose:
            return
        there = self.client.who_has([b.future for b in loose])
        nbytes = self.client.nbytes([k for k, held in there.items() if held], summary=False)
        for rank, block in enumerate(loose):
            somewhere = workers[rank * len(workers) // len(loose)]
            block.worker = next((a for a in there.get(block.key, ()) if a in workers), somewhere)
            block.nbytes = max(0, nbytes.get(block.key, 0))

    def _machine(self, workers: Iterable[str]) -> Machine:
        facts = [self.workers[a] for a in workers]
        n = len(facts)
        return Machine(
            tuple(sum(f.memory) for f in facts),
            tuple((NETWORK,) * n for _ in facts),
            (NETWORK,) * n,
            bandwidth=min(f.bandwidth * len(f.memory) for f in facts),
        )

    def _pins(self, graph: Graph, workers: Iterable[str]) -> tuple[dict[Key, int], dict[Key, int]]:
        """The worker of each pin, and the device there. The cluster's devices are numbered."""
        every = [(w, d) for w, a in enumerate(workers) for d in range(len(self.workers[a].memory))]
        on_worker, on_device = {}, {}
        for key, pin in graph.pins.items():
            if not isinstance(pin, int) or not 0 <= pin < len(every):
                raise PlanError(
                    f"{key!r} is annotated with device={pin!r}, but the devices of the cluster are "
                    f"0 to {len(every) - 1}: use one of those in dask.annotate(device=...)"
                )
            on_worker[key], on_device[key] = every[pin]
        return on_worker, on_device

    def _held(self, reference: Any) -> Any:
        """What stands for a value that exists already, a block of ours or any future; None where
        there is no such value. The reference is one of these, an alias, or a key."""
        from distributed import Future

        if type(reference) is RemoteBlock:
            return reference
        name = reference.target if isinstance(reference, Alias) else reference
        name = name.key if isinstance(name, Future) else name
        if (block := self._blocks.get(name)) is not None:
            return block
        if name not in self.client.futures:
            return None
        future = reference if isinstance(reference, Future) else Future(name, self.client)
        return RemoteBlock(name, None, future, "", 0)

    # ---- running

    def get(
        self,
        dsk: Any,
        keys: Any,
        callbacks: Any = None,
        retries: int | None = None,
        priority: int = 0,
        sync: bool = True,
        **others: Any,
    ) -> Any:
        """Compute `keys` of `dsk`, as Dask's `get` and the client's.

        Of Dask's callbacks those see it that only look at how much is done, as `ProgressBar`.
        """
        from .worker_plugin import inside

        if (scheduler := inside.get()) is not None:  # in a task, of a worker in this process
            return scheduler.get(dsk, keys)
        own = partial(
            self._client_get, dsk, keys, retries=retries, priority=priority, sync=sync, **others
        )
        if not sync or any(others.get(name) for name in OF_TASKS):
            return own()
        try:
            work = self._work(dsk, keys)
        except PeerToPeer:
            return own()
        wishes = _wishes(dsk, retries, priority)
        with local_callbacks(callbacks) as active, self._progress(work, active) as run:
            try:
                cargos = self._gathered(work, wishes, run)
            except Unreachable:  # a stage runs elsewhere, as its worker has left
                self._near = set()  # until the workers are introduced again
                cargos = self._gathered(work, wishes, None)
        values = iter(work.answer.values(cargos, on_device=bool(cuda_devices())))
        return nest_values(keys, values)

    def _gathered(self, work: PickledWork, wishes: dict[str, Any], run: str | None) -> list[Any]:
        futures = self._submit(work, wishes, run)
        try:
            return list(self.client.gather(list(futures.values()), direct=True))
        finally:  # the stages that still run are cancelled, if nobody else wants them
            for future in futures.values():
                future.release()

    def compute(
        self,
        collections: Any,
        sync: bool = False,
        optimize_graph: bool = True,
        workers: Any = None,
        *,
        retries: int | None = None,
        priority: int = 0,
        traverse: bool = True,
        **others: Any,
    ) -> Any:
        """`client.compute`: futures of the values of collections, one for each. Options that mean
        single tasks, such as `workers`, are for the client's own."""
        own = partial(
            self._client_compute, collections, sync, optimize_graph, workers, retries=retries,
            priority=priority, traverse=traverse, **others,
        )  # fmt: skip
        if workers or any(others.values()):
            return own()
        several = isinstance(collections, (list, tuple, set, frozenset))
        every = [
            dask.delayed(c) if traverse and isinstance(c, (list, set, tuple, dict)) else c
            for c in (collections if several else [collections])
        ]
        lazy = [c for c in every if dask.is_dask_collection(c)]
        try:
            futures = iter(self._futures(lazy, optimize_graph, retries, priority) if lazy else [])
        except PeerToPeer:
            return own()
        out = [next(futures) if dask.is_dask_collection(c) else c for c in every]
        # not by way of the cluster's scheduler, which would hold all of it
        result = self.client.gather(out, direct=True) if sync else out
        return result if several else result[0]

    def _futures(
        self, collections: list[Any], optimize_graph: bool, retries: int | None, priority: int
    ) -> list[Future]:
        expr = FinalizeCompute(collections_to_expr(collections, optimize_graph)).optimize()
        work = self._work(expr, list(flatten(expr.__dask_keys__())))
        names, tasks, where = self._tasks(work)
        keys: list[Key] = []
        for wanted in work.answer.wanted:
            key = f"{key_split(wanted)}-{uuid.uuid4().hex}"
            answer, parcels = work.part(wanted)
            tasks[key] = Task(key, finish, answer, List(*(TaskRef(names[n]) for n in parcels)))
            where[key] = list(work.workers)
            keys.append(key)
        return self._send(tasks, keys, where, _wishes(expr, retries, priority))

    def persist(
        self,
        collections: Any,
        optimize_graph: bool = True,
        workers: Any = None,
        *,
        retries: int | None = None,
        priority: int = 0,
        **others: Any,
    ) -> Any:
        """`persist`: the same collections, of blocks that stay on the workers' devices.

        Returns at once. What `distributed.wait` and `distributed.progress` see of such a
        collection are the stages that make it.
        """
        from .worker_plugin import inside

        own = partial(
            self._client_persist, collections, optimize_graph, workers, retries=retries,
            priority=priority, **others,
        )  # fmt: skip
        if workers or any(others.values()):
            return own()
        several = isinstance(collections, (list, tuple, set, frozenset))
        every = list(collections) if several else [collections]
        if (scheduler := inside.get()) is not None:  # in a task, of a worker in this process
            kept = scheduler.persist(every, optimize_graph)
            return kept if several else kept[0]
        lazy = [c for c in every if dask.is_dask_collection(c)]
        expr = collections_to_expr(lazy, optimize_graph).optimize()
        keys = list(dict.fromkeys(flatten([c.__dask_keys__() for c in lazy])))
        try:
            blocks = self._persisted(expr, keys, _wishes(expr, retries, priority))
        except PeerToPeer:
            return own()
        out = []
        for c in every:
            if not dask.is_dask_collection(c):
                out.append(c)
                continue
            rebuild, state = c.__dask_postpersist__()
            dsk: dict[Key, Any] = {k: blocks[k] for k in flatten(c.__dask_keys__())}
            futures = {b.future.key: b.future for b in dsk.values() if type(b) is RemoteBlock}
            out.append(rebuild({**dsk, **futures}, *state))
        return out if several else out[0]

    def _persisted(self, expr: Any, keys: list[Key], wishes: dict[str, Any]) -> dict[Key, Any]:
        """A block for each key; one that is there already is the same as before."""
        work = self._work(expr, keys, stay=True)
        futures = self._submit(work, wishes)
        plan, answer = work.cut, work.answer
        out: dict[Key, Any] = {}
        for key in keys:
            target = answer.alias.get(key, key)
            source = plan.at[target]
            if source < 0:
                held: Any = plan.graph.tasks[target]
                out[key] = self._blocks.get(key) or held.value
                continue
            future = futures[plan.readers[source, CALLER]]
            where = work.workers[plan.worker_of(source)]
            out[key] = self._blocks[key] = RemoteBlock(
                key, target, future, where, plan.nbytes[target]
            )
        return out

    @contextmanager
    def _progress(self, work: PickledWork, active: Iterable[Any]) -> Iterator[str]:
        """The name of a run. While it goes on, callbacks may look at how much of it is done.

        Dask's `ProgressBar` begins to look when it is told that a task begins: callbacks are told
        of the first one.
        """
        run = uuid.uuid4().hex[:8]
        callbacks = list(active)
        if not callbacks:
            yield run
            return
        dsk = dict(work.cut.graph.tasks)
        progress = RunProgress({self._stage_key(s, run): len(s.tasks) for s in work.cut.stages})
        self._watched[run] = progress
        begun = []
        failed = True
        try:
            for callback in callbacks:
                if callback[0]:
                    callback[0](dsk)
                begun.append(callback)
            for _, start_state, *_ in callbacks:
                if start_state:
                    start_state(dsk, progress.state)
            for _, _, pretask, *_ in callbacks:
                if pretask and work.cut.stages:
                    pretask(work.cut.stages[0].tasks[0], dsk, progress.state)
            yield run
            progress.tell(1.0)
            failed = False
        finally:
            del self._watched[run]
            for *_, end in begun:
                if end:
                    end(dsk, progress.state, failed)

    def _told(self, event: tuple[float, Any]) -> None:
        """A worker has said how far a stage is; in the client's own thread."""
        _, message = event
        key = tuple(message["stage"])
        for progress in list(self._watched.values()):
            progress.tell(message["done"], key)

    def _submit(
        self, work: PickledWork, wishes: dict[str, Any], run: str | None = None
    ) -> dict[int, Future]:
        """Send the stages: futures of the parcels that the caller reads, by number."""
        names, tasks, where = self._tasks(work, run)
        futures = self._send(tasks, [names[n] for n in work.results], where, wishes)
        return dict(zip(work.results, futures, strict=True))

    def _tasks(
        self, work: PickledWork, run: str | None = None
    ) -> tuple[list[Key], dict[Key, Any], dict[Key, list[str]]]:
        """The name of each parcel on the cluster, the tasks that make them, and where these run."""
        from .worker_plugin import DATA, arrive, run_stage, take, wrap

        plan = work.cut
        run = run or uuid.uuid4().hex[:8]
        stages = [self._stage_key(s, run) for s in plan.stages]
        parcels: list[Key] = []
        tasks: dict[Key, Any] = {}
        where: dict[Key, list[str]] = {}
        near = self._lent(work)
        for n, parcel in enumerate(plan.parcels):
            if parcel.source >= 0:
                source, loose = stages[parcel.source], False
            else:
                source, loose = plan.holders[-1 - parcel.source]
            if parcel.whole and not loose and n not in near:
                parcels.append(source)
                continue
            key = (f"parcel-{run}-{self.name}", n)
            parcels.append(key)
            if loose:
                tasks[key] = Task(key, wrap, parcel.keys[0], TaskRef(source))
            else:
                names = tuple([_name(plan, k) for k in parcel.keys])
                tasks[key] = Task(key, take, TaskRef(source), names, n in near)
            where[key] = [work.workers[plan.worker_of(parcel.source)]]
        here: dict[tuple[int, int], Key] = {}  # parcels that are sent ahead, where they arrive
        for n, worker in plan.ahead:
            if n not in near:
                there: Key = (f"arrival-{run}-{self.name}", n, worker)
                here[n, worker] = there
                tasks[there] = Task(there, arrive, self.name, TaskRef(parcels[n]))
                where[there] = [work.workers[worker]]
        data = [(f"data-{run}-{self.name}", v) for v in range(len(work.shared))]
        for key, value in zip(data, work.shared, strict=True):
            tasks[key] = Task(key, wrap, (DATA, key[1]), DataNode(None, value))
            where[key] = list(work.workers)
        for stage, key in zip(plan.stages, stages, strict=True):
            given = plan.parcels_of(stage)
            read: list[Key] = [here.get((n, stage.worker), parcels[n]) for n in given]
            read += [parcels[n] for n in stage.after if n not in given]
            reads: list[Any] = [TaskRef(k) for k in read]
            payload = work.payloads[stage.number]
            reads += [TaskRef(data[v]) for v in dict.fromkeys(payload.shared.values())]
            tasks[key] = Task(key, run_stage, self.name, key, payload, List(*reads))
            where[key] = [work.workers[stage.worker]]
        return parcels, tasks, where

    def _lent(self, work: PickledWork) -> set[int]:
        """The parcels that their readers, on the same machine, copy from the devices."""
        if not self._near or not config.get("gpuscheduler.ipc", True):
            return set()
        plan = work.cut
        readers: dict[int, set[int]] = defaultdict(set)
        for (_, worker), n in plan.readers.items():
            readers[n].add(worker)
        out = set()
        for n, parcel in enumerate(plan.parcels):
            home = plan.worker_of(parcel.source)
            there = readers[n] - {home}
            if not there or CALLER in there:
                continue
            a = work.workers[home]
            close = all((a, work.workers[w]) in self._near for w in there)
            if close and sum(plan.nbytes[k] for k in parcel.keys) >= LEAST_LENT:
                out.add(n)
        return out

    def _stage_key(self, stage: Stage, run: str) -> Key:
        label = key_split(stage.tasks[-1])
        part = () if stage.part == BESIDE else (stage.part,)
        return f"{label}.stage{stage.level}-{run}-{self.name}", stage.worker, *part

    def _send(
        self,
        tasks: dict[Key, Any],
        keys: list[Key],
        where: dict[Key, list[str]],
        wishes: dict[str, Any],
    ) -> list[Future]:
        annotations = {"workers": where.__getitem__, "allow_other_workers": True}
        layer = MaterializedLayer(tasks, annotations=annotations)
        graph = HighLevelGraph({self.name: layer}, {self.name: set()})
        return self._client_get(graph, keys, sync=False, **wishes)  # type: ignore[no-any-return]


class AttachedGet:
    """`client.get` while the client is attached, and Dask's scheduler. It tells whose it is as a
    method does: so Dask and xarray know that locks must be the cluster's."""

    def __init__(self, attached: AttachedCluster):
        self.attached = attached

    @property
    def __self__(self) -> Client:
        if self.attached._closed:  # nothing of that client is to be used
            raise AttributeError("__self__")
        return self.attached.client

    def __call__(self, dsk: Any, keys: Any, workers: Any = None, **options: Any) -> Any:
        if self.attached._closed and (instead := self.attached._setting.instead()):
            return instead(dsk, keys, **options)
        return self.attached.get(dsk, keys, workers=workers, **options)

    def __reduce__(self) -> Any:
        return getattr, (self.attached, "get")


class RunProgress:
    """How many tasks of a run are done, as Dask's callbacks look at it."""

    def __init__(self, tasks: dict[Key, int]):
        self.tasks = tasks  # by stage
        self.done = dict.fromkeys(tasks, 0.0)
        empty = "dependencies", "dependents", "cache", "waiting_data"
        none = "waiting", "running", "released", "finished", "ready"
        self.state: dict[str, Any] = {name: {} for name in empty} | dict.fromkeys(none, ())
        self._count()

    def tell(self, done: float, stage: Key | None = None) -> None:
        """So much of a stage, or of all of them, is done."""
        if stage is None:
            self.done = dict.fromkeys(self.tasks, done)
        elif stage in self.done:
            self.done[stage] = max(done, self.done[stage])
        self._count()

    def _count(self) -> None:
        every = sum(self.tasks.values())
        finished = int(sum(n * self.done[s] for s, n in self.tasks.items()))
        self.state["finished"], self.state["ready"] = range(finished), range(every - finished)


class _PickledAttachment:
    """What stands for an attached cluster in other processes: there, Dask finds its client."""

    def get(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        from distributed import get_client

        return get_client().get(dsk, keys, **kwargs)


class _MissingInputs(Mapping[Key, Any]):
    """What the graph reads and has not, as a mapping that is only asked for single keys."""

    def __init__(self, held: Callable[[Key], Any]):
        self.held = held

    def __getitem__(self, key: Key) -> Any:
        value = self.held(key)
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[Key]:
        return iter(())

    def __len__(self) -> int:
        return 1  # it is not empty, for all that is known


def _wishes(dsk: Any, retries: int | None, priority: int) -> dict[str, Any]:
    """`retries` and `priority` of all stages: the caller's, or the most that any layer has."""
    layers = [
        layer.annotations
        for operand in getattr(dsk, "operands", ())
        if isinstance(hlg := getattr(operand, "hlg", operand), HighLevelGraph)
        for layer in hlg.layers.values()
        if layer.annotations
    ]

    def most(name: str) -> int:
        said = (a.get(name) for a in layers)
        return max((n for n in said if isinstance(n, int)), default=0)

    return {"retries": retries or most("retries"), "priority": priority or most("priority")}


def _values(graph: Graph) -> list[Any]:
    return [t.value for t in graph.tasks.values() if isinstance(t, DataNode)]


def _peer_to_peer(graph: Graph) -> bool:
    """Whether it has the task for which all others of such a shuffle wait."""
    from distributed.shuffle._core import P2PBarrierTask

    chains = [task.tasks for task in graph.tasks.values() if type(task) is Chain]
    every = chain(graph.tasks.values(), (t for tasks in chains for _, t in tasks))
    return any(type(t) is P2PBarrierTask for t in every)


def _make_there(graph: Graph) -> None:
    """Wanted values of the graph become tasks, which workers run and whose results they keep."""
    for key, value in graph.data.items():
        name = (key, "value")
        graph.tasks[key] = Task(key, identity, TaskRef(name))
        graph.needs[key] = graph.names[key] = ()
        graph.constants[key] = {name: value}
        graph.sizes[key] = sizeof(value)
    graph.data = {}


def _shared_values(portions: list[Graph]) -> tuple[list[Any], list[dict[tuple[Key, Key], int]]]:
    """Large values that several portions read, and by portion: (task, name there) -> which of them.
    Takes them out of the portions."""
    large = [
        [(task, name, v) for task, c in p.constants.items() for name, v in c.items() if _large(v)]
        for p in portions
    ]
    readers = Counter(n for found in large for n in {id(v) for _, _, v in found})
    values = {id(v): v for found in large for _, _, v in found if readers[id(v)] > 1}
    number = {known: n for n, known in enumerate(values)}
    uses: list[dict[tuple[Key, Key], int]] = []
    for portion, found in zip(portions, large, strict=True):
        use = {(task, name): number[id(v)] for task, name, v in found if id(v) in number}
        for task, name in use:
            rest = {k: v for k, v in portion.constants[task].items() if k != name}
            portion.constants[task] = rest
        uses.append(use)
    return list(values.values()), uses


def _large(value: Any) -> bool:
    return sizeof(value) >= LARGE


def _name(plan: StageGraph, key: Key) -> Key:
    """Under which key the source of a value has it."""
    if key not in plan.held_by:
        return key
    block = plan.graph.tasks[key].value  # type: ignore[attr-defined]
    return key if block.inner is None else block.inner


def _worker(who: str) -> str:
    return f"worker {who}" if "://" in who else who
