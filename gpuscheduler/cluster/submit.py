"""Turn a partitioned graph into tasks of a Dask cluster.

`pickle_stages` makes `PickledWork`: the pickled stages of a computation, kept for its next run.
`make_tasks` makes the cluster's tasks for one run: one for each stage, one for each parcel that is
sent by itself, and one for each large value that several stages read. Nothing here talks to the
cluster.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dask._task_spec import DataNode, List, Task, TaskRef
from dask.utils import key_split

from ..dask_private import layers_of
from ..distributed_private import is_peer_to_peer
from ..errors import PlanError
from ..frontend.graph import Graph, pinned_device
from ..frontend.task import sequence_of
from ..frontend.transfers import identity
from ..plan.machine import Machine
from ..plan.origins import layer_lines
from ..values import sizeof
from .answer import ClusterResult, Key, PickledWork, finish
from .stages import BESIDE, CALLER, Stage, StageGraph

if TYPE_CHECKING:
    from .worker_plugin import WorkerFacts

#: Bytes per second between two workers, for the planner.
NETWORK = 1e9
#: A value of the graph with at least so many bytes is sent once for all stages that read it.
LARGE = 2**20
#: A parcel with at least so many bytes is copied from the devices of a worker on the same machine;
#: a smaller one comes with a message that is sent anyway.
LEAST_LENT = 2**20


class PeerToPeer(PlanError):
    """A graph whose tasks talk to each other: only the cluster itself can run it."""


def refuse_peer_to_peer(graph: Graph) -> None:
    """Raise `PeerToPeer` for a graph that has the barrier task of a peer-to-peer shuffle."""
    every = (t for task in graph.tasks.values() for _, t in sequence_of(task))
    if any(map(is_peer_to_peer, every)):
        raise PeerToPeer(
            "a peer-to-peer shuffle is tasks that talk to each other, which the cluster runs "
            "itself, without stages: shuffle with method='tasks' for a plan"
        )


def scheduling_options(dsk: Any, retries: int | None, priority: int) -> dict[str, Any]:
    """`retries` and `priority` of all stages: the caller's, or the most that any layer has."""
    layers = [
        layer.annotations
        for operand in getattr(dsk, "operands", ())
        if (hlg := layers_of(operand)) is not None
        for layer in hlg.layers.values()
        if layer.annotations
    ]

    def largest_annotation(name: str) -> int:
        given = (a.get(name) for a in layers)
        return max((n for n in given if isinstance(n, int)), default=0)

    return {
        "retries": retries or largest_annotation("retries"),
        "priority": priority or largest_annotation("priority"),
    }


# ---- before the graph is cut


class MissingInputs(Mapping[Key, Any]):
    """Values that a graph reads but does not have, looked up one key at a time."""

    def __init__(self, find: Callable[[Key], Any]):
        self.find = find

    def __getitem__(self, key: Key) -> Any:
        value = self.find(key)
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[Key]:
        return iter(())

    def __len__(self) -> int:
        return 1  # not 0: whoever sees an empty mapping looks nothing up


def make_values_tasks(graph: Graph) -> None:
    """Turn the wanted values of a graph into tasks, whose results stay on the workers."""
    for key, value in graph.data.items():
        name = (key, "value")
        task = Task(key, identity, TaskRef(name))
        graph.add(key, task, (), (), {name: value}, size=sizeof(value))
    graph.data = {}


def cluster_machine(workers: Sequence[WorkerFacts]) -> Machine:
    """The cluster as the planner sees it: each worker is one device."""
    n = len(workers)
    return Machine(
        tuple(sum(f.memory) for f in workers),
        tuple((NETWORK,) * n for _ in workers),
        (NETWORK,) * n,
        bandwidth=min(f.bandwidth * len(f.memory) for f in workers),
    )


def split_pins(
    graph: Graph, workers: Sequence[WorkerFacts]
) -> tuple[dict[Key, int], dict[Key, int]]:
    """The worker of each pinned task, and its device there.

    A pin is a number among all devices of the cluster, those of the first worker first. Raises
    `PlanError` for one that no device has.
    """
    every = [(w, d) for w, facts in enumerate(workers) for d in range(len(facts.memory))]
    on_worker, on_device = {}, {}
    for key, asked in graph.pins.items():
        pin = pinned_device(asked, len(every))
        if pin is None:
            continue
        if not isinstance(pin, int) or not 0 <= pin < len(every):
            raise PlanError(
                f"{key!r} is annotated with device={pin!r}, but the devices of the cluster are "
                f"0 to {len(every) - 1}: use one of those in dask.annotate(device=...)"
            )
        on_worker[key], on_device[key] = every[pin]
    return on_worker, on_device


# ---- what is kept of a computation


def pickle_stages(
    plan: StageGraph, workers: tuple[str, ...], devices: dict[Key, int], once: bool
) -> PickledWork:
    """Pickle each stage of a plan. `devices` are those of pinned tasks, on their workers."""
    from distributed.protocol.pickle import dumps

    from .worker_plugin import StagePayload

    graph = plan.graph
    portions = [plan.portion(stage, devices) for stage in plan.stages]
    shared, uses = _take_shared_values(portions)
    payloads = []
    for stage, portion, use in zip(plan.stages, portions, uses, strict=True):
        reads = {k: _name_in_source(plan, k) for read in stage.reads.values() for k in read}
        lines = layer_lines(portion.tasks)
        payloads.append(StagePayload(uuid.uuid4().hex, reads, lines, use, dumps(portion)))
    names = {k: _name_in_source(plan, k) for k in plan.held_by}
    answer = ClusterResult(graph.wanted, graph.alias, graph.gathers, graph.data, names)
    return PickledWork(plan, payloads, answer, workers, shared, once)


def _take_shared_values(
    portions: list[Graph],
) -> tuple[list[Any], list[dict[tuple[Key, Key], int]]]:
    """Take large values that several portions read out of the portions.

    Returns the values, and for each portion: (task, name there) -> the number of the value.
    """
    large = [
        [
            (task, name, v)
            for task, constants in p.constants.items()
            for name, v in constants.items()
            if sizeof(v) >= LARGE
        ]
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
            portion.set_constants(task, rest)
        uses.append(use)
    return list(values.values()), uses


def _name_in_source(plan: StageGraph, key: Key) -> Key:
    """The key under which the source of a value has it."""
    if key not in plan.held_by:
        return key
    block = plan.graph.tasks[key].value  # type: ignore[attr-defined]
    return key if block.inner is None else block.inner


# ---- one run


@dataclass
class ClusterTasks:
    """The tasks of the cluster that run one computation once."""

    #: The key under which the cluster has each parcel, by the parcel's number.
    parcels: list[Key]
    #: Every task, by its key.
    tasks: dict[Key, Any]
    #: The addresses of the workers on which each task may run.
    workers: dict[Key, list[str]]

    def add(self, key: Key, task: Any, workers: Sequence[str]) -> None:
        """Add a task that runs on any of these workers."""
        self.tasks[key], self.workers[key] = task, list(workers)

    def add_results(self, work: PickledWork) -> list[Key]:
        """Add one task for each wanted key, which makes its result of parcels; their keys."""
        keys: list[Key] = []
        for wanted in work.answer.wanted:
            key = f"{key_split(wanted)}-{uuid.uuid4().hex}"
            answer, parcels = work.part(wanted)
            read = List(*(TaskRef(self.parcels[n]) for n in parcels))
            self.add(key, Task(key, finish, answer, read), work.workers)
            keys.append(key)
        return keys


def stage_key(stage: Stage, run: str, name: str) -> Key:
    """The key of a stage's task in one run of an attached cluster with this name."""
    label = key_split(stage.tasks[-1])
    part = () if stage.part == BESIDE else (stage.part,)
    return f"{label}.stage{stage.level}-{run}-{name}", stage.worker, *part


def make_tasks(
    work: PickledWork, name: str, near: Collection[tuple[str, str]] = (), run: str | None = None
) -> ClusterTasks:
    """Make the tasks of the cluster that run a computation once.

    Parameters
    ----------
    work
        The computation.
    name
        The name of the attached cluster, which its workers know.
    near
        Pairs of addresses (owner, reader): the reader can copy from the owner's devices.
    run
        The name of the run, part of the tasks' keys. A new one by default.
    """
    from .worker_plugin import DATA, arrive, run_stage, take, wrap

    plan = work.cut
    run = run or uuid.uuid4().hex[:8]
    stages = [stage_key(s, run, name) for s in plan.stages]
    out = ClusterTasks([], {}, {})
    parcels = out.parcels
    lent = _lent_parcels(work, near) if near else set()
    for n, parcel in enumerate(plan.parcels):
        if parcel.source >= 0:
            source, loose = stages[parcel.source], False
        else:
            source, loose = plan.holders[-1 - parcel.source]
        if parcel.whole and not loose and n not in lent:
            parcels.append(source)
            continue
        key = (f"parcel-{run}-{name}", n)
        parcels.append(key)
        if loose:
            task = Task(key, wrap, parcel.keys[0], TaskRef(source))
        else:
            names = tuple([_name_in_source(plan, k) for k in parcel.keys])
            task = Task(key, take, TaskRef(source), names, n in lent)
        out.add(key, task, [work.workers[plan.worker_of(parcel.source)]])
    arrivals: dict[tuple[int, int], Key] = {}  # (parcel that is sent ahead, worker) -> its task
    for n, worker in plan.ahead:
        if n not in lent:
            there: Key = (f"arrival-{run}-{name}", n, worker)
            arrivals[n, worker] = there
            out.add(there, Task(there, arrive, name, TaskRef(parcels[n])), [work.workers[worker]])
    data = [(f"data-{run}-{name}", v) for v in range(len(work.shared))]
    for key, value in zip(data, work.shared, strict=True):
        out.add(key, Task(key, wrap, (DATA, key[1]), DataNode(None, value)), work.workers)
    for stage, key in zip(plan.stages, stages, strict=True):
        given = plan.parcels_of(stage)
        read: list[Key] = [arrivals.get((n, stage.worker), parcels[n]) for n in given]
        read += [parcels[n] for n in stage.after if n not in given]
        reads: list[Any] = [TaskRef(k) for k in read]
        payload = work.payloads[stage.number]
        reads += [TaskRef(data[v]) for v in dict.fromkeys(payload.shared.values())]
        task = Task(key, run_stage, name, key, payload, List(*reads))
        out.add(key, task, [work.workers[stage.worker]])
    return out


def _lent_parcels(work: PickledWork, near: Collection[tuple[str, str]]) -> set[int]:
    """The parcels that all their readers, on the same machine, copy from the owner's devices."""
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
        owner = work.workers[home]
        close = all((owner, work.workers[w]) in near for w in there)
        if close and sum(plan.nbytes[k] for k in parcel.keys) >= LEAST_LENT:
            out.add(n)
    return out
