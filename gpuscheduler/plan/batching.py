"""Batch alike programs on one device into one launch.

The sums of many blocks that are there already or are made there, and blocks that the caller wants.
What this saves is the host's time, which is per step.

It comes after placement: only tasks on the same device are put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dask._task_spec import DataNode
from dask.core import flatten

from ..frontend.chunk import Chunk
from ..frontend.graph import Graph
from ..frontend.order import depth_first
from ..frontend.task import Launcher, OwnTask, TaskDescription
from ..fusion.horizontal import TupleItemKey
from ..fusion.task import KernelTask
from ..ir.limits import CLOSE
from .plan import Plan

Key = Any
Values = dict[Any, Any]

#: Programs of one launch at most: several launches keep a device busy while the host goes on.
MOST = 16
#: Bytes of a result that is small.
SMALL = CLOSE
#: Bytes of one that others may read: what one launch makes stays until all of it was read.
MODEST = 2**21
#: Bytes that a task may read of what others have made.
LITTLE = 2**24
#: A batch makes, fetches and reads of what others have made, which stays until all of it has run,
#: no more than this part of a device's memory. What it fetches counts for more, as it has to be
#: there before the first of the batch begins.
SHARE, FETCHED = 20, 8
#: ... and reads no more persisted chunks than one of so many parts of it: they may be elsewhere.
CHUNKS = 2


class Batch(OwnTask):
    """Tasks that are the same program on different arrays; its value has theirs by number."""

    __slots__ = ("_returns", "chunks", "fixed", "key", "members", "ready")
    launches_only = kernels_only = True

    members: list[KernelTask]

    def __init__(
        self,
        key: TupleItemKey,
        members: list[KernelTask],
        fixed: bool,
        chunks: tuple[Chunk, ...] = (),
    ):
        self.key, self.members = key, members
        self.fixed = fixed  # whether they read the same arrays at every run of the plan
        self.chunks = chunks  # ... unless one of these has been moved since
        self.ready: dict[Any, Any] = {}  # what a device has prepared for such
        self._returns = -1

    @property
    def parts(self) -> tuple[Any, ...]:
        return tuple(self.members)

    def with_parts(self, *parts: Any) -> Batch:
        return Batch(self.key, list(parts), self.fixed)

    def with_originals(self, change: Callable[[Any], Any]) -> Batch:
        return self.with_parts(*[task.with_originals(change) for task in self.members])

    @property
    def data(self) -> tuple[Chunk, ...]:
        return self.chunks

    def with_data(self, data: tuple[Any, ...]) -> Batch:
        return Batch(self.key, self.members, self.fixed, data)

    @property
    def kernels(self) -> tuple[KernelTask, ...]:
        return tuple(self.members)

    @property
    def work_identity(self) -> Any:
        return self.members[0].work_identity

    @property
    def touched_bytes(self) -> int:
        return sum([f.touched_bytes for f in self.members])

    def launch(self, launcher: Launcher, values: Values) -> Any:
        return launcher.run_batch(self, values)

    def describe(self) -> TaskDescription:
        kernels = [k for task in self.members for k in task.describe().kernels]
        return TaskDescription(f"batch of {len(self.members)} kernel tasks", tuple(kernels))

    def knows_inputs(self) -> bool:
        """Whether what was prepared still holds."""
        if self.chunks:
            returns = sum([c.return_count for c in self.chunks])
            if returns != self._returns:
                self.ready.clear()
                self._returns = returns
        return bool(self.ready)

    def __call__(self, values: Values) -> tuple[Any, ...]:
        return tuple([task(values) for task in self.members])

    def __repr__(self) -> str:
        return f"<Batch of {len(self.members)}: {self.members[0]!r}>"


def batch_alike(graph: Graph, plan: Plan) -> bool:
    """Batch alike tasks of one device, and pin every task to its place in the plan.

    True if there were any. Changes the graph.
    """
    nodes = graph.nodes
    if not any(isinstance(node.task, KernelTask) for node in nodes.values()):
        return False
    places = {s.key: s.place for s in plan.steps}
    groups = _groups(graph, plan, places)
    if not groups:
        return False
    made: dict[Key, tuple[list[Key], Batch]] = {}
    for group in groups:
        here = places[group[0]]
        read = [d for k in group for d in nodes[k].needs]
        # copies from other devices are new at each run
        fixed = all(nodes[d].is_data and places[d] == here for d in read)
        fixed = fixed and not any(nodes[k].constants for k in group)
        given = [getattr(nodes[d].task, "value", None) for d in read]
        chunks = tuple(v for v in given if type(v) is Chunk)
        holder = TupleItemKey(tuple(group))
        members: list[Any] = [nodes[k].task for k in group]
        made[holder] = group, Batch(holder, members, fixed, chunks)
    graph.merge(made)
    needs = {k: tuple(dict.fromkeys(node.needs)) for k, node in graph.nodes.items()}
    ends = dict.fromkeys([graph.parts.get(k, (k, ()))[0] for k in graph.outputs])
    graph.reorder(depth_first(needs, ends))
    graph.pin(places | {holder: places[keys[0]] for holder, (keys, _) in made.items()})
    return True


def _groups(graph: Graph, plan: Plan, place: Mapping[Key, int]) -> list[list[Key]]:
    """Tasks of one program, one device and one height: none of them reads another."""
    outputs = set(graph.outputs)
    gathered = {graph.alias.get(b, b) for g in graph.gathers.values() for b in flatten(g.blocks)}
    room = min(plan.machine.memory) // SHARE
    height: dict[Key, int] = {}
    open_: dict[Any, list[Key]] = {}
    weight: dict[Any, int] = {}  # bytes that an open group makes, fetches and keeps
    out = []
    nodes = graph.nodes
    for key, node in nodes.items():
        task, needs = node.task, node.needs
        height[key] = 1 + max([height[d] for d in needs], default=-1)
        if not isinstance(task, KernelTask) or key in gathered:
            continue
        if key not in outputs and not _is_modest(task):
            continue  # its readers let go of it one by one
        made = [nodes[d].size for d in needs if not nodes[d].is_data]
        read = sum([LITTLE if size is None else size for size in made])
        if read > LITTLE and not task.copies:
            continue  # what it reads should be let go of as soon as it is read
        fetched = sum([nodes[d].size or 0 for d in needs if place[d] != place[key]])
        # chunks may be away: all that a batch reads comes back before it begins
        read += sum([_chunk_bytes(nodes[d].task) for d in needs]) * CHUNKS // SHARE
        nbytes = FETCHED * fetched + read + (0 if _is_small(task) else node.size or 0)
        words = id(task.program), place[key], height[key], len(task.names), task.kind
        group = open_.get(words)
        if group is None or len(group) == MOST or weight[words] + nbytes > room:
            group = open_[words] = []
            weight[words] = 0
            out.append(group)
        group.append(key)
        weight[words] += nbytes
    return [g for g in out if len(g) > 1]


def _chunk_bytes(task: Any) -> int:
    value = task.value if isinstance(task, DataNode) else None
    return value.nbytes if type(value) is Chunk else 0


def _is_small(task: KernelTask) -> bool:
    kernels = task.program.kernels
    return all(n <= SMALL for k in kernels for n in k.output_bytes)


def _is_modest(task: KernelTask) -> bool:
    """Whether the task's result is small, by itself or beside its inputs."""
    made = sum([n for k in task.program.kernels for n in k.output_bytes])
    return made <= max(
        MODEST, sum([e.nbytes for _, own in task.inputs() for e in own if e is not None]) // 16
    )
