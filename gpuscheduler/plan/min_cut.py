"""Divide groups of tasks between GPUs and the host at the least cost: a minimum cut.

Each group costs seconds on either side, and each value that crosses costs the way. The least sum is
a minimum cut of a network (Stone, "Multiprocessor scheduling with the aid of network flow
algorithms", 1977), which Dinic's algorithm finds (1970): shortest augmenting paths, level by level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

#: What a forbidden side costs, and units in a second: whole numbers make the cut exact.
ENDLESS, UNITS = 1 << 62, 10**12


class Network:
    """A directed graph whose arcs have capacities."""

    def __init__(self, nodes: int):
        self.arcs: list[list[int]] = [[] for _ in range(nodes)]  # numbers of arcs, by where from
        self.to: list[int] = []
        self.room: list[int] = []  # of each arc; its opposite has the next number, or the last

    def add(self, a: int, b: int, capacity: int) -> None:
        """Add an arc from `a` to `b`."""
        self.arcs[a].append(len(self.to))
        self.arcs[b].append(len(self.to) + 1)
        self.to += [b, a]
        self.room += [capacity, 0]

    def cut(self, source: int, sink: int) -> list[bool]:
        """Return whether each node is on the source's side of a minimum cut.

        >>> network = Network(3)
        >>> network.add(0, 1, 5)
        >>> network.add(1, 2, 3)
        >>> network.cut(0, 2)
        [True, True, False]
        """
        while (level := self._levels(source))[sink] >= 0:
            tried = [0] * len(self.arcs)
            while self._augment(source, sink, level, tried):
                pass
        return [n >= 0 for n in level]

    def _levels(self, source: int) -> list[int]:
        """How many arcs with room lead to each node; -1 where none do."""
        level = [-1] * len(self.arcs)
        level[source] = 0
        queue = deque([source])
        while queue:
            at = queue.popleft()
            for arc in self.arcs[at]:
                if self.room[arc] and level[self.to[arc]] < 0:
                    level[self.to[arc]] = level[at] + 1
                    queue.append(self.to[arc])
        return level

    def _augment(self, source: int, sink: int, level: list[int], tried: list[int]) -> bool:
        """Send as much as possible along one path of rising levels; False if there is none."""
        path: list[int] = []
        at = source
        while at != sink:
            arcs = self.arcs[at]
            while tried[at] < len(arcs):
                arc = arcs[tried[at]]
                if self.room[arc] and level[self.to[arc]] == level[at] + 1:
                    break
                tried[at] += 1
            else:
                if at == source:
                    return False
                at = self.to[path.pop() ^ 1]
                tried[at] += 1
                continue
            path.append(arc)
            at = self.to[arc]
        flow = min([self.room[arc] for arc in path])
        for arc in path:
            self.room[arc] -= flow
            self.room[arc ^ 1] += flow
        return True


@dataclass(slots=True)
class Division:
    """What is to be divided: groups of tasks by number, and what passes between them."""

    #: Seconds of each group on GPUs and on the host; None where it cannot run there.
    gpu: list[float | None] = field(default_factory=list)
    host: list[float | None] = field(default_factory=list)
    #: Seconds to bring what one group makes to another one on the host, where it is on GPUs.
    down: dict[tuple[int, int], float] = field(default_factory=dict)
    #: Seconds to send all that a group makes on the host to GPUs, where any group there reads it.
    up: dict[int, float] = field(default_factory=dict)

    def add(self, gpu: float | None, host: float | None) -> int:
        """Add a group, and return its number."""
        self.gpu.append(gpu)
        self.host.append(host)
        return len(self.gpu) - 1

    @property
    def readers(self) -> Mapping[int, Collection[int]]:
        """The groups that read what a group makes."""
        out: dict[int, list[int]] = {}
        for a, b in self.down:
            out.setdefault(a, []).append(b)
        return out

    def seconds(self, on_gpus: Sequence[bool]) -> float:
        """Seconds of a division, one after the other; infinite if it is not possible."""
        total = 0.0
        for here, gpu, host in zip(on_gpus, self.gpu, self.host, strict=True):
            seconds = gpu if here else host
            if seconds is None:
                return float("inf")
            total += seconds
        total += sum([s for (a, b), s in self.down.items() if on_gpus[a] and not on_gpus[b]])
        for a, readers in self.readers.items():
            if not on_gpus[a] and any(on_gpus[b] for b in readers):
                total += self.up.get(a, 0.0)
        return total

    def moving_seconds(self, on_gpus: Sequence[bool]) -> list[float]:
        """Return, for each group, the seconds that moving it alone to its other side would add.

        Infinite for a group that cannot run there. The division must be possible.

        >>> division = Division([1.0, 1.0], [5.0, 0.5], {(0, 1): 0.25}, {0: 9.0})
        >>> division.moving_seconds([True, False])
        [3.75, 0.25]
        """
        sides = zip(on_gpus, self.gpu, self.host, strict=True)
        pairs = [(gpu, host) if here else (host, gpu) for here, gpu, host in sides]
        more = [float("inf") if a is None or b is None else b - a for a, b in pairs]
        for (a, b), seconds in self.down.items():
            if not on_gpus[b]:  # the copy comes or goes with `a`
                more[a] += -seconds if on_gpus[a] else seconds
            if on_gpus[a]:
                more[b] += seconds if on_gpus[b] else -seconds
        for a, readers in self.readers.items():
            seconds, there = self.up.get(a, 0.0), sum([on_gpus[b] for b in readers])
            if there:
                more[a] += seconds if on_gpus[a] else -seconds
            if on_gpus[a]:
                continue
            for b in readers:
                if there == on_gpus[b]:  # no other reader is on GPUs
                    more[b] += -seconds if on_gpus[b] else seconds
        return more

    def assign(self) -> list[bool]:
        """Return whether each group should run on GPUs: the least seconds, by a minimum cut.

        Raises `ValueError` if a group cannot run on either side.

        >>> division = Division([1.0, 1.0], [5.0, 0.5], {(0, 1): 0.1}, {0: 9.0})
        >>> division.assign()
        [True, False]
        """
        count, readers = len(self.gpu), self.readers
        senders = [a for a in self.up if a in readers]
        network = Network(count + 2 + len(senders))
        source, sink = count, count + 1
        for n, (gpu, host) in enumerate(zip(self.gpu, self.host, strict=True)):
            if gpu is None and host is None:
                raise ValueError(f"group {n} cannot run on GPUs, nor on the host")
            # on the source's side, which is the GPUs', the arc to the sink is cut
            network.add(n, sink, _units(gpu))
            network.add(source, n, _units(host))
        for (a, b), seconds in self.down.items():
            network.add(a, b, _units(seconds))
        for at, a in enumerate(senders, count + 2):
            network.add(at, a, _units(self.up[a]))
            for b in readers[a]:  # one of these on GPUs makes the copy
                network.add(b, at, ENDLESS)
        return network.cut(source, sink)[:count]


def _units(seconds: float | None) -> int:
    return ENDLESS if seconds is None else round(seconds * UNITS)
