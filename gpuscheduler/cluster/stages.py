"""Partition a graph into stages, each of which one worker can run alone.

Each is what one worker can do before it needs something from another. Numbers and keys in, stages
out; runs and sends nothing.

A stage is one task of the cluster, however many tasks it is made of. Tasks are first placed on
workers as they are on devices, in contiguous runs and near what they read. Then each gets a level:
how often the longest way to it goes from one worker to another. What has one worker and one level
is one stage, so a stage reads only from stages of lower levels, and there is no cycle.

What a stage gives to another worker is one parcel, whatever it is made of. One that takes long to
send goes as soon as it is made, by a task of its own on its reader, while both workers go on: there
what others read is made by a stage before the rest, and what reads of others by a stage after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dask._task_spec import DataNode

from ..frontend.graph import Graph
from ..frontend.task_node import TaskNode
from ..plan.build import PlacedTasks, placed_tasks
from ..plan.machine import Machine

Key = Any

#: What a stage costs the cluster: its way to the worker and back, in seconds.
STAGE_SECONDS = 10e-3
#: What a task may take of which no collection says anything, in seconds.
UNKNOWN_SECONDS = 1e-3
#: Levels that any graph may have; more only where stages have `FEWEST` tasks on average.
MOST_LEVELS = 64
FEWEST = 32
#: Bytes that a stage makes, up to which all of it goes to everybody who reads any of it.
LITTLE = 2**18
#: What a parcel must take to be sent, in seconds, to be worth two more tasks of the cluster.
AHEAD_SECONDS = 10 * STAGE_SECONDS
#: The least part of a stage's work that is worth to be done by itself meanwhile.
LEAST_PART = 1 / 8
#: Of all that goes to a worker, the part that a value must be for others to wait for it.
CRUMB = 1e-3
#: How much more than its share a worker may get to do, so that fewer bytes cross.
UNEVEN = 1.1

#: Parts of what one worker does at one level: what others wait for, what waits for nobody, and what
#: waits for others.
BEFORE, BESIDE, BEHIND = range(3)

#: How often tasks are looked at for a better worker.
PASSES = 8

#: Who gets a parcel: a worker by its number, or whoever asked for the results.
CALLER = -1


@dataclass(slots=True, repr=False)
class Stage:
    """Tasks that one worker runs at once, after all stages that it reads."""

    number: int
    worker: int
    level: int
    tasks: tuple[Key, ...]  # in execution order
    reads: dict[int, tuple[Key, ...]] = field(default_factory=dict)  # by source: what it is given
    outputs: tuple[Key, ...] = ()  # what others read of it, or the caller
    nbytes: int = 0  # of the outputs, estimated
    known: bool = True  # whether the collections tell that number
    seconds: float = 0.0  # of its tasks one after the other, estimated
    part: int = BESIDE  # what of its worker's tasks of this level it is
    after: tuple[int, ...] = ()  # parcels that are taken out of its worker's values before it runs

    def __repr__(self) -> str:
        return f"<Stage {self.number} of {len(self.tasks):,} tasks on worker {self.worker}>"


@dataclass(frozen=True, slots=True, repr=False)
class Parcel:
    """Values that a source gives to one or several readers, as one value of the cluster."""

    source: int  # the number of a stage; -1 - h for what is held by h
    keys: tuple[Key, ...]
    whole: bool  # it is all that the source has: no task takes it out

    def __repr__(self) -> str:
        return f"<Parcel of {len(self.keys):,} values of source {self.source}>"


@dataclass(repr=False)
class StageGraph:
    """The stages of a graph, in an order in which they can run.

    Sources are numbers: a stage's own, or -1 - h for `holders[h]`, which has values that exist
    already.
    """

    graph: Graph
    stages: list[Stage]
    parcels: list[Parcel]
    readers: dict[tuple[int, int], int]  # (source, worker or CALLER) -> the parcel it reads
    holders: list[Any]
    held_by: dict[Key, int]  # values that exist already -> their holder
    source_of: dict[Key, int]  # key -> the source that has it
    nbytes: dict[Key, int]  # estimates
    workers: int
    where_held: list[int] = field(default_factory=list)  # by holder: its worker
    #: parcels, and workers that get them as soon as they are there
    ahead: list[tuple[int, int]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Cut of {len(self.graph.tasks):,} tasks into {len(self.stages):,} stages>"

    @property
    def tasks(self) -> int:
        """How many tasks the cluster gets, but for the values that `attach` sends by themselves."""
        return len(self.stages) + sum(not p.whole for p in self.parcels) + len(self.ahead)

    def worker_of(self, source: int) -> int:
        return self.stages[source].worker if source >= 0 else self.where_held[-1 - source]

    def parcels_of(self, stage: Stage) -> list[int]:
        """The numbers of the parcels that a stage reads."""
        return list(dict.fromkeys(self.readers[s, stage.worker] for s in stage.reads))

    def traffic(self) -> dict[tuple[int, int], int]:
        """Bytes from worker to worker, estimated: each parcel once."""
        out: dict[tuple[int, int], int] = {}
        for (source, worker), n in self.readers.items():
            src = self.worker_of(source)
            if worker not in (CALLER, src):
                nbytes = sum(self.nbytes[k] for k in self.parcels[n].keys)
                out[src, worker] = out.get((src, worker), 0) + nbytes
        return {link: out[link] for link in sorted(out)}

    def peak(self) -> list[int]:
        """The most that each worker holds at once, estimated, its tasks done one by one.

        What another worker or the caller reads stays to the end.
        """
        graph, source_of = self.graph, self.source_of
        peak = [0] * self.workers
        last: dict[tuple[int, Key], int] = {}  # (worker, key) -> its last reader there
        order = [(s, k) for s in self.stages for k in s.tasks]
        for n, (stage, key) in enumerate(order):
            for d in graph.needs[key]:
                last[stage.worker, d] = n
        foreign = {
            k
            for (source, worker), n in self.readers.items()
            if worker != self.worker_of(source)
            for k in self.parcels[n].keys
            if source_of[k] >= 0
        }
        used = [0] * self.workers
        here: set[tuple[int, Key]] = set()  # what has come from other workers
        for n, (stage, key) in enumerate(order):
            w = stage.worker
            if n == 0 or order[n - 1][0] is not stage:
                away = (s for s in stage.reads if self.worker_of(s) != w)
                arrived = {(w, k) for s in away for k in stage.reads[s]} - here
                here |= arrived
                used[w] += sum(self.nbytes[k] for _, k in arrived)
            used[w] += self.nbytes[key]
            peak[w] = max(peak[w], used[w])
            for d in dict.fromkeys(graph.needs[key]):
                if last[w, d] == n and (d not in foreign or self.worker_of(source_of[d]) != w):
                    source = source_of[d]
                    freed = source >= 0 or self.worker_of(source) != w
                    used[w] -= self.nbytes[d] if freed else 0
        return peak

    def portion(self, stage: Stage, pins: Mapping[Key, int] | None = None) -> Graph:
        """The part of the graph that a stage runs, without the values that it reads.

        `pins` are devices of its worker.
        """
        g, mine = self.graph, stage.tasks
        read = [k for keys in stage.reads.values() for k in keys]
        sizes, blocks = g.sizes, g.blocks
        nodes = {}
        for k in mine:
            node = g.nodes[k]
            nodes[k] = out = TaskNode(node.task, node.needs, node.names, node.constants)
            facts = {"size": node.size, "block": node.block, "pin": pins.get(k) if pins else None}
            out.__dict__.update({name: fact for name, fact in facts.items() if fact is not None})
            if node.stores:
                out.stores = True
        return Graph(
            nodes, stage.outputs, stage.outputs,
            inner_sizes={k: sizes[k] for k in read if k in sizes},
            inner_blocks={k: blocks[k] for k in read if k in blocks},
        )  # fmt: skip

    def __str__(self) -> str:
        levels = 1 + max((s.level for s in self.stages), default=-1)
        steps = sum(len(s.tasks) for s in self.stages)
        lines = [
            f"{steps:,} tasks on {self.workers} workers: {len(self.stages)} stages in {levels} "
            f"level{'s'[: levels != 1]}, {self.tasks} tasks of the cluster"
        ]
        peak = self.peak()
        for w in range(self.workers):
            mine = [s for s in self.stages if s.worker == w]
            lines.append(
                f"  worker {w}: {len(mine)} stage{'s'[: len(mine) != 1]} of "
                f"{', '.join(f'{len(s.tasks):,}' for s in mine) or '0'} tasks, "
                f"peak memory {peak[w]:,} bytes"
            )
        lines += [f"  {a} -> {b}: {n:,} bytes" for (a, b), n in self.traffic().items()]
        return "\n".join(lines)


def cut(
    graph: Graph,
    machine: Machine,
    holder: Callable[[Any], tuple[Any, int] | None] = lambda value: None,
    pins: Mapping[Key, int] | None = None,
    near: Collection[tuple[int, int]] = (),
    ahead: float | None = None,
) -> StageGraph:
    """The stages of a graph on a cluster.

    `machine` has the workers as its devices: the memory of each, and the bytes per second from
    one to another. `holder` tells of a value in the graph whether it is only a reference to one
    that exists already: who has it, and on which worker. `pins` are the workers of tasks. `near`
    are workers, and readers of theirs that wait for no network. What takes `ahead` seconds to be
    sent (`AHEAD_SECONDS`) is sent while its reader does something else.

    Raises `PlanError` where a pin names no worker.

    >>> from gpuscheduler.frontend.lowering import from_dask
    >>> graph = {"a": (int,), "b": (int,), "c": (max, "a", "b")}
    >>> print(cut(from_dask(graph, "c"), Machine.uniform(2), pins={"a": 0, "b": 1, "c": 0}))
    3 tasks on 2 workers: 3 stages in 2 levels, 3 tasks of the cluster
      worker 0: 2 stages of 1, 1 tasks, peak memory 0 bytes
      worker 1: 1 stage of 1 tasks, peak memory 0 bytes
      1 -> 0: 0 bytes
    """
    ahead = AHEAD_SECONDS if ahead is None else ahead
    return _StagePartitioner(graph, machine, holder, pins or {}, near, ahead).cut()


class _StagePartitioner:
    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        holder: Callable[[Any], tuple[Any, int] | None],
        pins: Mapping[Key, int],
        near: Collection[tuple[int, int]],
        ahead: float,
    ):
        self.graph, self.machine = graph, machine
        self.near, self.ahead = near, ahead
        self.holders: list[Any] = []
        self.where_held: list[int] = []
        self.held_by: dict[Key, int] = {}
        numbers: dict[Any, int] = {}
        for key, task in graph.tasks.items():
            if not isinstance(task, DataNode):
                continue
            found = holder(task.value)
            if found is not None:
                name, worker = found
                if name not in numbers:
                    numbers[name] = len(self.holders)
                    self.holders.append(name)
                    self.where_held.append(worker)
                self.held_by[key] = numbers[name]

        def home_worker(value: Any) -> int | None:
            found = holder(value)
            return None if found is None else found[1]

        placed: PlacedTasks = placed_tasks(graph, machine, home_worker, pins)
        self.keys, self.inputs, self.nbytes = placed.keys, placed.inputs, placed.nbytes
        self.known, self.place = placed.known, list(placed.places)
        self.numbers = placed.numbers
        self.held = bytearray(k in self.held_by for k in self.keys)
        self.pinned = bytearray(h or k in pins for h, k in zip(self.held, self.keys, strict=True))
        self.seconds = [
            0.0 if h else machine.step_seconds(b + sum([self.nbytes[j] for j in reads]))
            for h, b, reads in zip(self.held, self.nbytes, self.inputs, strict=True)
        ]
        self.readers: list[list[int]] = [[] for _ in self.keys]
        for i, reads in enumerate(self.inputs):
            for j in reads:
                self.readers[j].append(i)

    def cut(self) -> StageGraph:
        level = [0] * len(self.keys)
        if len(self.machine.devices) > 1:
            self._move_to_readers()
            self._move_to_inputs()
            level = self._levels()
            if self._join_tail(level):
                level = self._levels()
        return self._stages(level)

    def _levels(self) -> list[int]:
        place, inputs, held = self.place, self.inputs, self.held
        level = [0] * len(place)
        for i, reads in enumerate(inputs):
            p, top = place[i], 0
            for j in reads:
                if not held[j]:  # it is there already, wherever it is
                    above = level[j] + (place[j] != p)
                    if above > top:
                        top = above
            level[i] = top
        return level

    def _move_to_readers(self) -> None:
        """Move tasks to the only other worker that reads them.

        Only where that moves fewer bytes, and the work stays even.
        """
        place, nbytes, inputs = self.place, self.nbytes, self.inputs
        load = [0.0] * len(self.machine.devices)
        for i, seconds in enumerate(self.seconds):
            load[place[i]] += seconds
        most = UNEVEN * sum(load) / len(load)
        for i in range(len(place) - 1, -1, -1):
            if self.pinned[i] or not self.readers[i]:
                continue
            there = {place[r] for r in self.readers[i]}
            if len(there) != 1:
                continue
            (q,) = there
            p = place[i]
            if p == q or load[q] + self.seconds[i] > most:
                continue
            fetched = sum(
                nbytes[j]
                for j in inputs[i]
                if place[j] == p and not any(place[r] == q for r in self.readers[j])
            )
            if fetched < nbytes[i]:
                place[i] = q
                load[p] -= self.seconds[i]
                load[q] += self.seconds[i]

    def _move_to_inputs(self) -> None:
        """Move tasks that read from another worker to that worker.

        Only where fewer bytes cross then, and the work stays even. Of two tasks that each read what
        the other one reads, too, both move to one worker.
        """
        place, nbytes, inputs = self.place, self.nbytes, self.inputs
        some = [i for i, reads in enumerate(inputs) if any(place[j] != place[i] for j in reads)]
        wanted = {self.numbers[k] for k in self.graph.outputs if k in self.numbers}
        some = [i for i in some if not self.pinned[i] and i not in wanted]
        if not some:
            return
        rank = dict.fromkeys(self.machine.devices, 0)
        turns = []  # one of each worker, then the next
        for i in some:
            turns.append((rank[place[i]], i))
            rank[place[i]] += 1
        turns.sort()
        load = [0.0] * len(self.machine.devices)
        for i, p in enumerate(place):
            load[p] += self.seconds[i]
        slack = (UNEVEN - 1) / 4 * sum(load) / len(load)
        count: dict[tuple[int, int], int] = defaultdict(int)  # readers of a value on a worker
        for i, p in enumerate(place):
            for j in inputs[i]:
                count[j, p] += 1

        def extra_bytes(i: int, p: int, q: int) -> int:
            """Bytes that cross with a task on worker q, less those with it on p."""
            out = nbytes[i] * (bool(count[i, p]) - bool(count[i, q]))
            for j in inputs[i]:
                out += nbytes[j] * (place[j] != q and not count[j, q])
                out -= nbytes[j] * (place[j] != p and count[j, p] == 1)
            return out

        for _ in range(PASSES):
            moved = False
            for _, i in turns:
                p = place[i]
                others = sorted({place[j] for j in inputs[i]} - {p})
                gain, q = min(((extra_bytes(i, p, q), q) for q in others), default=(0, p))
                if gain >= 0 or load[q] > load[p] + slack:
                    continue
                for j in inputs[i]:
                    count[j, p] -= 1
                    count[j, q] += 1
                load[p] -= self.seconds[i]
                load[q] += self.seconds[i]
                place[i], moved = q, True
            if not moved:
                return

    def _join_tail(self, level: list[int]) -> bool:
        """Let one worker run everything from some level on; whether it did.

        This happens where transfers between workers would take longer than the work, or there would
        be too many levels.
        """
        top = max(level, default=0)
        workers = len(self.machine.devices)
        if top < 1:
            return False
        least = 1 + max(
            (level[i] for i, p in enumerate(self.pinned) if p and not self.held[i]), default=0
        )
        # for each level: what all from there on take, make and read of what is below
        seconds, made, read = ([0.0] * (top + 2) for _ in range(3))
        for i, n in enumerate(level):
            if self.held[i]:
                continue
            seconds[n] += self._work(i)
            made[n] += self.nbytes[i]
        for j, readers in enumerate(self.readers):
            latest = max((level[r] for r in readers), default=0)
            first = 1 if self.held[j] else level[j] + 1
            if latest >= first:
                read[first] += self.nbytes[j]
                read[latest + 1] -= self.nbytes[j]
        for n in range(top - 1, -1, -1):
            seconds[n] += seconds[n + 1]
            made[n] += made[n + 1]
        for n in range(1, top + 2):
            read[n] += read[n - 1]
        rate = self.machine.peer[0][1]
        room = min(self.machine.memory) / 2

        def gain(n: int) -> float:
            if made[n] + read[n] > room:
                return -1.0
            costs = seconds[n] * (1 - 1 / workers) + read[n] / rate
            return (top - n) * STAGE_SECONDS - costs

        best = max(range(max(least, 1), top), key=gain, default=top)
        if gain(best) <= 0:
            best = top
        limit = max(MOST_LEVELS, len(level) // (FEWEST * workers))
        best = max(least, min(best, limit - 1))
        if best >= top:
            return False
        tail = [i for i, n in enumerate(level) if n >= best and not self.held[i]]
        there = [0] * workers
        for j in dict.fromkeys(j for i in tail for j in self.inputs[i]):
            if level[j] < best or self.held[j]:
                there[self.place[j]] += self.nbytes[j] + 1
        one = there.index(max(there))
        for i in tail:
            self.place[i] = one
        return True

    def _stages(self, level: list[int]) -> StageGraph:
        keys, place, held = self.keys, self.place, self.held
        part = self._parts(level)
        members: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for i in range(len(keys)):
            if not held[i]:
                members[level[i], part[i], place[i]].append(i)
        number = {who: n for n, who in enumerate(sorted(members))}
        source = [
            -1 - self.held_by[keys[i]] if held[i] else number[level[i], part[i], place[i]]
            for i in range(len(keys))
        ]
        stages, given = [], set()
        for (lvl, which, worker), mine in sorted(members.items()):
            n = number[lvl, which, worker]
            reads: dict[int, dict[Key, None]] = {}
            for i in mine:
                for j in self.inputs[i]:
                    if source[j] != n:
                        reads.setdefault(source[j], {})[keys[j]] = None
                        given.add(j)
            stages.append(
                Stage(
                    n,
                    worker,
                    lvl,
                    tuple([keys[i] for i in mine]),
                    {s: tuple(reads[s]) for s in sorted(reads)},
                    seconds=sum([self.seconds[i] for i in mine]),
                    part=which,
                )
            )
        wanted = [self.numbers[k] for k in dict.fromkeys(self.graph.outputs) if k in self.numbers]
        given.update(wanted)
        made: list[list[Key]] = [[] for _ in stages]
        for i in sorted(given):
            if not held[i]:
                stage = stages[source[i]]
                made[stage.number].append(keys[i])
                stage.nbytes += self.nbytes[i]
                stage.known &= self.known[i]
        for stage in stages:
            stage.outputs = tuple(made[stage.number])
        source_of = dict(zip(keys, source, strict=True))
        asked: dict[tuple[int, int], dict[Key, None]] = defaultdict(dict)
        for stage in stages:
            for s, read in stage.reads.items():
                asked[s, stage.worker].update(dict.fromkeys(read))
        for i in wanted:
            asked[source[i], CALLER][keys[i]] = None
        parcels, readers = _parcels(asked, stages, self.where_held)
        nbytes = dict(zip(keys, self.nbytes, strict=True))
        out = StageGraph(
            self.graph,
            stages,
            parcels,
            readers,
            self.holders,
            self.held_by,
            source_of,
            nbytes,
            len(self.machine.devices),
            self.where_held,
        )
        self._send_ahead(out)
        return out

    def _parts(self, level: list[int]) -> bytearray:
        """The part of each task: `BEFORE`, `BESIDE` or `BEHIND`.

        Tasks that other workers wait for come before the rest of their level, and tasks that wait
        for others come behind it. Only where the transfer takes long, and the rest is enough work.
        """
        part = bytearray([BESIDE]) * len(self.place)
        if len(self.machine.devices) > 1:
            work: dict[tuple[int, int], float] = defaultdict(float)
            for i, p in enumerate(self.place):
                work[level[i], p] += self._work(i)
            for which in BEFORE, BEHIND:
                self._mark(part, level, work, which)
        return part

    def _mark(
        self,
        part: bytearray,
        level: list[int],
        work: Mapping[tuple[int, int], float],
        which: int,
    ) -> None:
        """Mark tasks as `BEFORE` or `BEHIND`.

        With each goes every task of its level and worker that it needs, or that needs it.
        """
        place, held, before = self.place, self.held, which == BEFORE
        beyond = self.readers if before else self.inputs
        own = [i for i in range(len(place)) if not held[i] and part[i] == BESIDE]
        crossing: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for i in own:
            for j in beyond[i]:
                if place[j] != place[i]:
                    crossing[level[i], place[i]].add((i, place[j]) if before else (j, place[j]))
        least: dict[tuple[int, int], float] = {}  # bytes of a value for which others wait long
        for (lvl, p), values in crossing.items():
            links: dict[int, int] = defaultdict(int)
            for i, other in values:
                links[other] += self.nbytes[i]
            if any(self._is_long(n, *((p, q) if before else (q, p))) for q, n in links.items()):
                least[lvl, p] = max(links.values()) * CRUMB
        marked = bytearray(len(place))
        done: dict[tuple[int, int], float] = defaultdict(float)
        for i in reversed(own) if before else own:
            group = level[i], place[i]
            if group not in least:
                continue
            marked[i] = any(
                self.nbytes[i if before else j] >= least[group]
                if place[j] != place[i]
                else marked[j] and level[j] == level[i]
                for j in beyond[i]
            )
            done[group] += self._work(i) * marked[i]
        for i in own:
            group = level[i], place[i]
            if marked[i] and work[group] - done[group] >= LEAST_PART * work[group]:
                part[i] = which

    def _is_long(self, nbytes: int, source: int, reader: int) -> bool:
        """Whether it takes long to send so much."""
        if (source, reader) in self.near:
            return False
        return nbytes / self.machine.peer[source][reader] >= self.ahead

    def _work(self, i: int) -> float:
        known = self.known[i] or self.nbytes[i] == 0 and not self.inputs[i]
        return 0.0 if self.held[i] else self.seconds[i] + (0.0 if known else UNKNOWN_SECONDS)

    def _send_ahead(self, out: StageGraph) -> None:
        """Decide which parcels are sent as soon as they exist.

        A worker may run one task at a time: its stages begin after such parcels are taken out.
        """
        for (source, worker), n in sorted(out.readers.items()):
            home = out.worker_of(source)
            nbytes = sum(out.nbytes[k] for k in out.parcels[n].keys)
            if worker not in (CALLER, home) and self._is_long(nbytes, home, worker):
                out.ahead.append((n, worker))
        taken: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for n, _ in out.ahead:
            parcel = out.parcels[n]
            home = out.worker_of(parcel.source)
            if not parcel.whole:
                level = out.stages[parcel.source].level if parcel.source >= 0 else 0
                taken[level, home][n] = parcel.source
        for stage in out.stages:
            mine = taken[stage.level, stage.worker]
            stage.after = tuple([n for n, source in mine.items() if source < stage.number])


def _parcels(
    asked: Mapping[tuple[int, int], Iterable[Key]], stages: list[Stage], where_held: list[int]
) -> tuple[list[Parcel], dict[tuple[int, int], int]]:
    """The parcels, and which of them each reader reads.

    Readers of the same keys share a parcel. A source goes as a whole if it is small, or is read on
    its own worker.
    """
    numbers: dict[tuple[int, tuple[Key, ...] | None], int] = {}
    parcels: list[Parcel] = []
    readers: dict[tuple[int, int], int] = {}
    for (source, worker), keys in sorted(asked.items(), key=lambda item: item[0]):
        wanted = tuple(keys)
        if source >= 0:
            stage = stages[source]
            whole = worker == stage.worker or len(wanted) == len(stage.outputs)
            whole = whole or (stage.known and stage.nbytes <= LITTLE)
            every = stage.outputs
        else:  # how much more its holder has is not known here
            whole, every = worker == where_held[-1 - source], wanted
        name = (source, None) if whole else (source, tuple(sorted(map(repr, wanted))))
        if name not in numbers:
            numbers[name] = len(parcels)
            parcels.append(Parcel(source, every if whole and source >= 0 else wanted, whole))
        elif source < 0 and whole:
            n = numbers[name]
            both = tuple(dict.fromkeys((*parcels[n].keys, *wanted)))
            parcels[n] = replace(parcels[n], keys=both)
        readers[source, worker] = numbers[name]
    return parcels, readers
