"""Attach to a Dask cluster whose workers each drive all devices of their node.

A graph goes to the workers as a few stages. Each worker's own `Scheduler` runs the steps of a
stage, often thousands.

`stages.cut` decides the stages and their workers, `submit` makes tasks of them, and `membership`
knows the workers. `distributed` moves values between workers, runs stages again when a worker was
lost, and reports errors.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import dask
from dask import config
from dask._task_spec import Alias, DataNode
from dask.base import collections_to_expr
from dask.callbacks import local_callbacks
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from ..dask_private import FinalizeCompute
from ..devices.choose import cuda_devices
from ..distributed_private import end_client
from ..frontend.graph import wanted_keys
from ..frontend.lowering import from_dask, received_by_scheduler
from ..gc_control import without_garbage_collection
from ..options import Options
from ..pipeline.cache import PlanCache, signature
from ..pipeline.plan_entry import PlanEntry
from ..pipeline.results import nest_values
from ..runtime.dask_config import ConfigOverride
from ..runtime.under_way import runs_under_way
from .answer import Key, PickledWork, RemoteBlock
from .gpu_page import PATH
from .membership import Membership, check_versions, locate_values, worker_label
from .observed import ObservedCluster
from .progress import RunProgress
from .stages import CALLER, StageGraph, cut
from .submit import (
    ClusterTasks,
    MissingInputs,
    PeerToPeer,
    cluster_machine,
    make_tasks,
    make_values_tasks,
    pickle_stages,
    refuse_peer_to_peer,
    scheduling_options,
    split_pins,
    stage_key,
)
from .wire import Unreachable

if TYPE_CHECKING:
    from distributed import Client, Future

    from .worker_plugin import WorkerFacts

#: Options of Dask's client for single tasks: a call with one of them goes to the client itself.
OF_TASKS = "workers", "resources", "actors"


def attach(
    client: Client,
    devices: str | dict[Any, str] | None = None,
    memory_limit: int | str | float | None = None,
    **options: Any,
) -> AttachedCluster:
    """Let each worker of a Dask cluster drive all devices of its node.

    From then on `compute()`, `persist()`, `dask.compute` and `client.compute` cut a graph into
    stages, each of which is one task of the cluster. A `Scheduler` in each worker runs the stages.
    This ends with `close`, or with the context. `client.submit`, `client.map` and peer-to-peer
    shuffles (``method="p2p"``) work as without it. Workers that join later take part.

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
        where a worker, or the cluster's scheduler, does not have this version of this package, or
        a worker does not have these devices. The message names all of them.
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
        raise TypeError(
            "attach needs a Client that is not asynchronous: make one with asynchronous=False"
        )
    given = {"devices": devices, "memory_limit": memory_limit, **options}
    settings = {k: v for k, v in given.items() if v is not None}
    for string in devices.values() if isinstance(devices, dict) else [devices]:
        Options.read(**{**settings, "devices": string})  # a wrong option is known here
    return AttachedCluster(client, settings)


class AttachedCluster(ObservedCluster):
    """A client's cluster with a `Scheduler` in each worker; `attach` makes it."""

    def __init__(self, client: Client, settings: dict[str, Any]):
        self.client, self.settings = client, settings
        self.membership = Membership(client, settings, self._note_progress)
        #: The runs that callbacks look at, by name.
        self._watched: dict[str, RunProgress] = {}
        #: The persisted blocks that somebody still has, by key.
        self._blocks: WeakValueDictionary[Key, RemoteBlock] = WeakValueDictionary()
        #: `PickledWork` of earlier computations, by what was computed and the workers.
        self._plans = PlanCache()
        #: Whether the client and Dask's configuration are as they were before.
        self._closed = False
        check_versions(client)
        try:
            self.membership.register()
            self.membership.addresses(strict=True)
        except BaseException:
            from .worker_plugin import end

            self.membership.unregister(end)
            raise
        kinds = {f.kind for f in self.workers.values()}
        backend = {"array.backend": "cupy"} if kinds == {"cuda"} and cuda_devices() else {}
        if backend:
            from ..devices.cuda import dask_backend as creation

            creation.register()
        from .worker_plugin import SHUFFLES

        get = AttachedGet(self)
        self._dask_config = ConfigOverride({"scheduler": get, **SHUFFLES, **backend})
        own = type(client)
        self._client_get = MethodType(own.get, client)
        self._client_compute = MethodType(own.compute, client)
        self._client_persist = MethodType(own.persist, client)
        closing = {
            "close": self._close_client,
            "shutdown": self._shut_down_client,
            "_close": self._end_client,
        }
        methods = {"get": get, "compute": self.compute, "persist": self.persist, **closing}
        self._methods = ConfigOverride(methods, vars(client))

    # ---- the cluster

    @property
    def name(self) -> str:
        """Names everything of this attachment on the cluster."""
        return self.membership.name

    @property
    def workers(self) -> dict[str, WorkerFacts]:
        """What each worker that takes part tells of itself, by address."""
        return self.membership.workers

    @property
    def dashboard_link(self) -> str:
        """The page of every device of every worker, on the cluster's dashboard."""
        return str(self.client.dashboard_link).removesuffix("status") + PATH.strip("/")

    def close(self) -> None:
        """Detach from the cluster, and leave it as it was before.

        Frees the values that workers hold, ends their threads, and restores `client.compute` and
        Dask's configuration.
        """
        if self._detach():
            from .worker_plugin import end

            self.membership.unregister(end)

    def _detach(self) -> bool:
        """Restore the client and Dask's configuration; True the first time."""
        if self._closed:
            return False
        self._closed = True
        self._dask_config.end()
        self._methods.end()
        self._plans.clear()
        return True

    def _close_client(self, *args: Any, **kwargs: Any) -> Any:
        """Detach, then close the client: its `close` while it is attached."""
        from .worker_plugin import leave

        if self._detach():
            self.membership.unregister(leave)
        return self.client.close(*args, **kwargs)

    def _shut_down_client(self) -> Any:
        """Detach, then shut the cluster down: the client's `shutdown`."""
        self._detach()
        return self.client.shutdown()

    async def _end_client(self, *args: Any, **kwargs: Any) -> Any:
        """Detach, then end the client: its `_close` (distributed 2026.1 to 2026.8).

        Clients end this way whenever neither `close` nor `shutdown` is called, for example when
        their cluster is gone.
        """
        self._detach()
        return await end_client(self.client, *args, **kwargs)

    def __enter__(self) -> AttachedCluster:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Pickle as a stand-in: Dask sends its configuration, and so `get`, to new workers."""
        return _PickledAttachment, ()

    def __repr__(self) -> str:
        if self._closed:
            return "<AttachedCluster, closed>"
        kinds: dict[str, int] = {}
        for f in self.workers.values():
            said = f"{len(f.memory)} {f.kind} device{'s'[: len(f.memory) != 1]}"
            kinds[said] = kinds.get(said, 0) + 1
        each = ", ".join(f"{n} worker{'s'[: n != 1]} of {what}" for what, n in kinds.items())
        out = "".join(f", not {worker_label(a)}" for a in sorted(self.membership.left_out))
        return f"<AttachedCluster at {self.client.scheduler.address}: {each}{out}>"  # type: ignore[union-attr]

    # ---- planning

    def plan(self, *collections: Any) -> StageGraph:
        """Return the stages of a computation of these collections, without computing.

        Printed, it shows the stages, the bytes between workers, and the memory of each worker.
        """
        return self._prepare(*received_by_scheduler(*collections)).cut

    def _addresses(self) -> list[str]:
        if self._closed:
            raise RuntimeError("this cluster is not attached any more: attach(client) again")
        return self.membership.addresses()

    def _wait_for_workers(self) -> list[str]:
        """The addresses of the workers that take part, as soon as there is one.

        Until then an empty task waits on the cluster: an adaptive cluster starts a worker for it.
        """
        while not (workers := self._addresses()):
            if left_out := sorted(self.membership.left_out):
                names = ", ".join(map(worker_label, left_out))
                raise RuntimeError(
                    f"none of the cluster's workers takes part: not {names}; their logs say why"
                )
            self.client.submit(bool, key=f"wait-{uuid.uuid4().hex}").result()
        return workers

    def _prepare(self, dsk: Any, keys: Any, stay: bool = False) -> PickledWork:
        """The pickled stages that compute these keys, from the plan cache if possible.

        With `stay`, the results stay on the workers.
        """
        workers = tuple(self._wait_for_workers())
        known = signature(dsk, wanted_keys(keys))
        if known is not None:
            found = self._plans.find(known, workers, stay)
            if found is not None:
                return found.plan  # type: ignore[return-value]
        with without_garbage_collection():
            work = self._cut_graph(dsk, keys, workers, stay)
        if known is not None and not work.once:
            entry = PlanEntry(work.cut.graph, work)  # type: ignore[arg-type]
            self._plans.keep(known, workers, stay, entry=entry)
        return work

    def _cut_graph(self, dsk: Any, keys: Any, workers: tuple[str, ...], stay: bool) -> PickledWork:
        number = {a: n for n, a in enumerate(workers)}

        def holder(value: Any) -> tuple[Any, int] | None:
            if type(value) is not RemoteBlock:
                return None
            return (value.future.key, value.inner is None), number.get(value.worker, 0)

        graph = from_dask(
            dsk,
            keys,
            MissingInputs(self._find_existing),
            home=lambda value: 0 if type(value) is RemoteBlock else None,
            held=lambda key, reference: self._find_existing(reference),
            compiled=False,
        )
        refuse_peer_to_peer(graph)
        once = stay and bool(graph.data)
        if once:
            make_values_tasks(graph)
        values = [t.value for t in graph.tasks.values() if isinstance(t, DataNode)]
        loose = [v for v in values if type(v) is RemoteBlock and not v.worker]
        locate_values(self.client, loose, workers)
        facts = [self.workers[a] for a in workers]
        pins, local = split_pins(graph, facts)
        pairs = self.membership.near
        near = {(number[a], number[b]) for a, b in pairs if a in number and b in number}
        plan = cut(graph, cluster_machine(facts), holder, pins, near)
        return pickle_stages(plan, workers, local, once)

    def _find_existing(self, reference: Any) -> Any:
        """The `RemoteBlock` of a value that exists on the cluster already; None if there is none.

        The reference is a block, a future, an alias of one, or a key.
        """
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
        """Compute `keys` of `dsk`: the `get` of Dask and of the client.

        Of Dask's callbacks only those work that look at how much is done, such as `ProgressBar`.
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
            work = self._prepare(dsk, keys)
        except PeerToPeer:
            return own()
        wishes = scheduling_options(dsk, retries, priority)
        with local_callbacks(callbacks) as active, self._progress(work, active) as run:
            try:
                cargos = self._run(work, wishes, run)
            except Unreachable:  # a stage runs elsewhere, as its worker has left
                self.membership.near = set()  # until it is found out again which workers are near
                cargos = self._run(work, wishes, None)
        values = iter(work.answer.values(cargos, on_device=bool(cuda_devices())))
        return nest_values(keys, values)

    def _run(self, work: PickledWork, wishes: dict[str, Any], run: str | None) -> list[Any]:
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
        """Compute collections in the background: one future for each, as of `client.compute`.

        With options for single tasks, such as `workers`, the client's own method computes them.
        """
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
            futures = iter(
                self._submit_results(lazy, optimize_graph, retries, priority) if lazy else []
            )
        except PeerToPeer:
            return own()
        out = [next(futures) if dask.is_dask_collection(c) else c for c in every]
        # not by way of the cluster's scheduler, which would hold all of it
        result = self.client.gather(out, direct=True) if sync else out
        return result if several else result[0]

    def _submit_results(
        self, collections: list[Any], optimize_graph: bool, retries: int | None, priority: int
    ) -> list[Future]:
        expr = FinalizeCompute(collections_to_expr(collections, optimize_graph)).optimize()
        work = self._prepare(expr, list(flatten(expr.__dask_keys__())))
        made = self._make_tasks(work)
        keys = made.add_results(work)
        options = scheduling_options(expr, retries, priority)
        return self._send(made.tasks, keys, made.workers, options)

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
        """Compute collections, and keep their blocks on the workers' devices.

        Returns the same collections at once, as `client.persist`. `distributed.wait` and
        `distributed.progress` see the stages that make them.
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
            blocks = self._persist_blocks(expr, keys, scheduling_options(expr, retries, priority))
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

    def _persist_blocks(self, expr: Any, keys: list[Key], wishes: dict[str, Any]) -> dict[Key, Any]:
        """Submit the stages of these keys; a block for each key, the same for one that exists."""
        work = self._prepare(expr, keys, stay=True)
        futures = self._submit(work, wishes)
        plan, answer = work.cut, work.answer
        out: dict[Key, Any] = {}
        for key in keys:
            target = answer.alias.get(key, key)
            source = plan.source_of[target]
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
        """Show callbacks how much of a run is done; gives the name for the run."""
        run = uuid.uuid4().hex[:8]
        callbacks = list(active)
        if not callbacks and not runs_under_way.woken:  # nobody looks
            yield run
            return
        stages = work.cut.stages
        progress = RunProgress({stage_key(s, run, self.name): len(s.tasks) for s in stages})
        self._watched[run] = progress
        try:
            with progress.shown_to(callbacks, dict(work.cut.graph.tasks)):
                yield run
        finally:
            del self._watched[run]

    def _note_progress(self, event: tuple[float, Any]) -> None:
        """Note how much of a stage a worker has done; runs in the client's own thread."""
        _, message = event
        key = tuple(message["stage"])
        for progress in list(self._watched.values()):
            progress.update(message["done"], key)

    def _submit(
        self, work: PickledWork, wishes: dict[str, Any], run: str | None = None
    ) -> dict[int, Future]:
        """Send the stages; returns the futures of the parcels that the caller reads, by number."""
        made = self._make_tasks(work, run)
        keys = [made.parcels[n] for n in work.results]
        futures = self._send(made.tasks, keys, made.workers, wishes)
        return dict(zip(work.results, futures, strict=True))

    def _make_tasks(self, work: PickledWork, run: str | None = None) -> ClusterTasks:
        near = self.membership.near if config.get("gpuscheduler.ipc", True) else ()
        return make_tasks(work, self.name, near, run)

    def _send(
        self,
        tasks: dict[Key, Any],
        keys: list[Key],
        where: dict[Key, list[str]],
        wishes: dict[str, Any],
    ) -> list[Future]:
        """Send tasks to the cluster, each to its workers: futures of `keys`."""
        annotations = {"workers": where.__getitem__, "allow_other_workers": True}
        layer = MaterializedLayer(tasks, annotations=annotations)
        graph = HighLevelGraph({self.name: layer}, {self.name: set()})
        return self._client_get(graph, keys, sync=False, **wishes)  # type: ignore[no-any-return]


class AttachedGet:
    """Dask's scheduler, and the client's `get`, while the client is attached.

    Its `__self__` is the client, as for a method of the client: so Dask and xarray know that locks
    must be the cluster's.
    """

    def __init__(self, attached: AttachedCluster):
        self.attached = attached

    @property
    def __self__(self) -> Client:
        if self.attached._closed:  # nothing of that client is to be used
            raise AttributeError("__self__")
        return self.attached.client

    def __call__(self, dsk: Any, keys: Any, workers: Any = None, **options: Any) -> Any:
        if self.attached._closed and (instead := self.attached._dask_config.replacement()):
            return instead(dsk, keys, **options)
        return self.attached.get(dsk, keys, workers=workers, **options)

    def __reduce__(self) -> Any:
        return getattr, (self.attached, "get")


class _PickledAttachment:
    """Stands for an attached cluster in other processes, where Dask finds the client."""

    def get(self, dsk: Any, keys: Any, **kwargs: Any) -> Any:
        from distributed import get_client

        return get_client().get(dsk, keys, **kwargs)
