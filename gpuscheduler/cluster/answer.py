"""How the result of a computation on a cluster is made of the values of its workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode, Task, TaskRef
from dask.core import flatten
from dask.utils import format_bytes

from ..devices.choose import cuda_devices
from ..plan.machine import Machine
from ..plan.plan import Plan
from ..runtime.gather import ResultAssembly
from ..sparse_parts import unwrap_sparse
from .stages import CALLER, StageGraph
from .transport import Bundle, put_back

if TYPE_CHECKING:
    from distributed import Future

    from .worker_plugin import StagePayload

Key = Any


class RemoteBlock(GraphNode):  # type: ignore[misc]
    """A persisted block: a reference to one of the values that a worker holds.

    For whoever is not attached, and in other processes, it is the task that picks this value out of
    the future. When the last block of a stage is gone, the worker lets go of them.
    """

    __dask_future__ = True
    __slots__ = ("__weakref__", "future", "inner", "nbytes", "worker")

    def __init__(self, key: Key, inner: Key, future: Future, worker: str, nbytes: int):
        self.key, self._dependencies = key, frozenset((future.key,))
        self.inner = inner  # the key under which the future's value has it; None: it is the value
        self.future, self.worker, self.nbytes = future, worker, nbytes

    @property
    def block_fusion(self) -> bool:
        return True

    def substitute(self, subs: dict[Key, Any], key: Key | None = None) -> RemoteBlock:
        """The same block under another key, with the same future."""
        key = self.key if key is None else key
        return RemoteBlock(key, self.inner, self.future, self.worker, self.nbytes)

    def copy(self) -> RemoteBlock:
        return self.substitute({})

    def __call__(self, values: dict[Key, Any]) -> Any:
        return pick(values[self.future.key], self.inner)

    def __dask_tokenize__(self) -> Any:
        return self.key, self.inner, self.future.key

    def __repr__(self) -> str:
        return f"<Block {self.key!r}, {format_bytes(self.nbytes)} on {self.worker}>"

    def __reduce__(self) -> Any:
        return Task, (self.key, pick, TaskRef(self.future.key), self.inner)


@dataclass(repr=False)
class ClusterResult:
    """How the result is made of the values that the stages give."""

    wanted: tuple[Key, ...]
    alias: dict[Key, Key]
    gathers: dict[Key, Any]
    data: dict[Key, Any]
    names: dict[Key, Key]  # of values that existed already: under which name they come

    def __repr__(self) -> str:
        return f"<Answer of {len(self.wanted):,} values>"

    def values(self, cargos: Iterable[Bundle], on_device: bool = False) -> list[Any]:
        """The value of each wanted key. `on_device`: what was on a device goes to one here."""
        found = {k: v for cargo in cargos for k, v in cargo.values.items()}
        plan = Plan([], (), Machine.uniform(1), gathers=self.gathers)
        assembly = ResultAssembly(plan, self.alias)

        # as in `scheduler._results`, no function here calls itself
        def value(key: Key, to_host: bool) -> Any:
            target = self.alias.get(key, key)
            if target in self.data:
                return self.data[target]
            name = self.names.get(target, target)
            return put_back(found[name], _return_same if to_host else _to_device)

        def find_value(key: Key) -> Any:
            gather = self.gathers.get(self.alias.get(key, key))
            if gather is None:
                return value(key, not on_device)
            to_host = gather.converted or not on_device
            return assembly.result(gather, lambda k: value(k, to_host))

        return [unwrap_sparse(find_value(key)) for key in self.wanted]


def _return_same(value: Any) -> Any:
    return value


def _to_device(array: Any) -> Any:
    import cupy

    return cupy.asarray(array)


def pick(cargo: Bundle, key: Key) -> Any:
    """Task of the cluster: take one value out of a bundle.

    It serves clients that are not attached, which know nothing of bundles.
    """
    return put_back(cargo.values[key], _to_device if cuda_devices() else _return_same)


def finish(answer: ClusterResult, cargos: list[Bundle]) -> Any:
    """Task of the cluster: make one result of the stages' values, for `client.compute`."""
    (value,) = answer.values(cargos, on_device=bool(cuda_devices()))
    return value


@dataclass(repr=False)
class PickledWork:
    """A computation, cut into stages and pickled: what is sent for each of its runs."""

    cut: StageGraph
    payloads: list[StagePayload]  # by stage
    answer: ClusterResult
    workers: tuple[str, ...]  # addresses, by number
    shared: list[Any]  # large values of the graph that several stages read, sent once
    once: bool = False  # it is not kept, for it brings values that stay on the workers

    def __repr__(self) -> str:
        return f"<Work of {self.cut!r} on {len(self.workers)} workers>"

    @property
    def steps(self) -> range:
        return range(len(self.cut.source_of))

    @property
    def results(self) -> list[int]:
        """The parcels that the caller reads."""
        return sorted({n for (_, worker), n in self.cut.readers.items() if worker == CALLER})

    def part(self, key: Key) -> tuple[ClusterResult, list[int]]:
        """How one of the results is made, and of which parcels."""
        whole, plan = self.answer, self.cut
        target = whole.alias.get(key, key)
        gather = whole.gathers.get(target)
        read = [key] if gather is None else list(flatten(gather.blocks))
        alias = {k: whole.alias[k] for k in (key, *read) if k in whole.alias}
        made = [alias.get(k, k) for k in read]
        data = {k: whole.data[k] for k in made if k in whole.data}
        names = {k: whole.names[k] for k in made if k in whole.names}
        gathers = {} if gather is None else {target: gather}
        parcels = {plan.readers[plan.source_of[k], CALLER] for k in made if k not in data}
        return ClusterResult((key,), alias, gathers, data, names), sorted(parcels)
