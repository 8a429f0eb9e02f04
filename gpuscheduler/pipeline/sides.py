"""Decide which tasks of NumPy's arrays run on GPUs and which on the host, group by group.

A group is the tasks of one layer that do the same. The seconds of each group on either side are
predicted (`host_cost`, `library_cost`), and so are those of copies between the sides; a minimum cut
gives the division (`min_cut`). It is used if it should be faster than GPUs that run all that they
can: else nothing moves to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dask.utils import key_split

from ..frontend.graph import Graph, Key, layer_of
from ..frontend.task import host_only, kernels_of
from ..frontend.task_node import TaskNode
from ..fusion.library_task import LibraryTask, NumpyTask
from ..fusion.portable import PortableTask
from ..fusion.residency import ValueFacts
from ..plan.host_cost import BLOCK, DOWN, HOST, NEW, TASK, UP, UP_GAPS, UP_MADE, program_seconds
from ..plan.library_cost import (
    CALLED,
    gpu_seconds,
    host_seconds,
    portable_seconds,
    product_seconds,
)
from ..plan.machine import STEP_SECONDS, Machine
from ..plan.min_cut import Division

#: A graph of more groups is not divided: GPUs run all that they can.
MOST_GROUPS = 400
#: A division is used if it should take at most this part of the time without one.
BETTER = 0.95
#: Blocks of a layer that may be under way at once on different sides.
MOST_DEPTH = 16.0
#: Layers that a line names.
MOST_NAMES = 4
#: Overhead in seconds of a host task in a plan for GPUs: a GPU's thread takes its value back.
HOSTED = 60e-6


@dataclass(slots=True)
class TaskGroup:
    """Tasks of one layer that do the same."""

    name: str
    keys: list[Key] = field(default_factory=list)
    #: Seconds of all on GPUs, and of all threads of the host; None where they cannot run there.
    gpu: float | None = 0.0
    host: float | None = 0.0
    #: What the tasks are, in words for the user.
    words: str = ""
    #: Why they are where they are.
    reason: str = ""
    on_gpus: bool = True
    #: Whether they are arrays that exist before the run, so that nothing runs.
    is_data: bool = False


@dataclass(slots=True)
class SideChooser:
    """Divides the tasks of one graph, in groups, between GPUs and the host."""

    graph: Graph
    facts: ValueFacts
    machine: Machine
    threads: int
    #: The device that holds a value, if any.
    home: Callable[[Any], int | None] | None = None
    groups: list[TaskGroup] = field(default_factory=list)
    division: Division = field(default_factory=Division)
    #: The name of the layer of a task.
    _layer_of: Callable[[Key], str] = layer_of
    #: The numbers of groups: by layer and kind of task, and by key.
    _group_numbers: dict[Any, int] = field(default_factory=dict)
    _group_of: dict[Key, int] = field(default_factory=dict)
    #: Seconds of programs on the host, by id; the programs are kept, or an id could be reused.
    _seconds: dict[int, float] = field(default_factory=dict)
    _programs: list[Any] = field(default_factory=list)

    def choose_sides(self) -> list[TaskGroup]:
        """Return the groups, each with its side and the reason."""
        self._find_groups()
        if len(self.groups) > MOST_GROUPS:  # layers of one name together
            self.groups, self._layer_of = [], key_split
            self._group_numbers, self._group_of = {}, {}
            self._find_groups()
        self._add_copy_costs()
        for group in self.groups:
            self.division.add(group.gpu, group.host)
        whole = [g.gpu is not None for g in self.groups]
        found = whole if len(self.groups) > MOST_GROUPS else divide(self.division)
        if self._total(found) > BETTER * self._total(whole):
            found = whole
        more = self.division.moving_seconds(found)
        for group, here, added in zip(self.groups, found, more, strict=True):
            group.on_gpus = here
            if group.gpu is not None and group.host is not None:
                group.reason = _reason(group, added)
        return self.groups

    def as_asked(self) -> list[TaskGroup]:
        """Return the groups, all on GPUs except those that GPUs cannot run."""
        self._find_groups()
        for group in self.groups:
            group.on_gpus = group.gpu is not None
        return self.groups

    # ---- groups

    def _find_groups(self) -> None:
        """Put each task into a group, and predict the seconds of each group on either side."""
        for key, node in self.graph.nodes.items():
            task: Any = node.task
            if node.is_data or node.sent or node.aside:
                self._add_data(key, node)
            elif kernels := kernels_of(task):
                seconds = sum([self._program_seconds(k.program) for k in kernels])
                touched = sum([k.touched_bytes for k in kernels])
                self._add(
                    key, ("kernel", *[id(k.program) for k in kernels]), "kernel",
                    touched / self.machine.bandwidth, max(seconds / self.threads, touched / HOST),
                )  # fmt: skip
            elif isinstance(task, LibraryTask):
                call = task.call
                on_host = host_seconds(call) / self.threads + task.touched_bytes / CALLED
                self._add(
                    key, call, f"{call.name}, by CuPy",
                    gpu_seconds(call, self.machine.bandwidth), on_host,
                )  # fmt: skip
            elif isinstance(task, NumpyTask):
                self._add_product(key, node)
            elif isinstance(task, PortableTask):
                self._add_portable(key, task)
            elif host_only(task):
                why = node.why or "it is no kernel"
                group = self._add(key, ("called", why), "called", None, task.touched_bytes / CALLED)
                group.reason = why
            elif node.needs and node.needs[0] in self._group_of:
                # a view is in the group of its array
                self._group_of[key] = self._group_of[node.needs[0]]
            else:
                self._add(key, "view", "view", 0.0, 0.0)

    def _add(
        self, key: Key, kind: Any, words: str, gpu: float | None, host: float | None,
        layer: str | None = None,
    ) -> TaskGroup:  # fmt: skip
        """Add a task, and its seconds on either side, to the group of its layer and kind."""
        layer = self._layer_of(key) if layer is None else layer
        number = self._group_numbers.setdefault((layer, kind), len(self.groups))
        if number == len(self.groups):
            self.groups.append(TaskGroup(key_split(key), words=words))
        group = self.groups[number]
        group.keys.append(key)
        self._group_of[key] = number
        gpus = len(self.machine.devices)
        group.gpu = _add_seconds(group.gpu, gpu, STEP_SECONDS, gpus)
        group.host = _add_seconds(group.host, host, HOSTED if gpu is not None else TASK, 1)
        return group

    def _add_data(self, key: Key, node: TaskNode) -> None:
        """Add a value that no side computes: an existing array, a copy, or a file's block."""
        task: Any = node.task
        value = task.value if node.is_data else getattr(task, "func", None)
        on_gpu = self.home is not None and self.home(value) is not None and not node.sent
        number = self._group_numbers.setdefault((self._layer_of(key), on_gpu), len(self.groups))
        if number == len(self.groups):
            self.groups.append(
                TaskGroup(key_split(key), gpu=0.0 if on_gpu else None, host=None if on_gpu else 0.0,
                          words="array", on_gpus=on_gpu, is_data=True)
            )  # fmt: skip
        self.groups[number].keys.append(key)
        self._group_of[key] = number

    def _add_product(self, key: Key, node: TaskNode) -> None:
        touched = node.task.task.touched_bytes  # type: ignore[attr-defined]
        operations = node.operations or 0
        self._add(
            key, ("product", node.product.left.shape, node.product.right.shape), "matrix product",
            operations / self.machine.flops,
            product_seconds(operations, np.dtype(node.product.dtype)) / self.threads
            + touched / CALLED,
        )  # fmt: skip

    def _add_portable(self, key: Key, task: PortableTask) -> None:
        """Add a task of the array library to the one group of all of them: they share values."""
        on_host, gpu = portable_seconds(task.operations, task.traffic, self.machine)
        host = on_host / self.threads + task.traffic / CALLED
        self._add(key, "portable", "array library", gpu, host, layer="")

    def _program_seconds(self, program: Any) -> float:
        found = self._seconds.get(id(program))
        if found is None:
            self._programs.append(program)
            found = self._seconds[id(program)] = program_seconds(program)
        return found

    # ---- copies between the sides

    def _add_copy_costs(self) -> None:
        """Predict the seconds of copies between groups, should these be on different sides."""
        links = min(len(self.machine.devices), 2)
        division, sizes, of = self.division, self.facts.sizes, self._group_of
        sent: set[Key] = set()
        for key, node in self.graph.nodes.items():
            b = of.get(key)
            for d in node.needs:
                a = of.get(d)
                if a is None or b is None or a == b:
                    continue
                nbytes = sizes.get(d, 0)
                seconds = nbytes / DOWN / links + BLOCK
                division.down[a, b] = division.down.get((a, b), 0.0) + seconds
                if d not in sent:
                    sent.add(d)
                    rate = _up_rate(self.graph.nodes[d]) if self.groups[a].is_data else UP_MADE
                    seconds = nbytes / rate / links + BLOCK
                    division.up[a] = division.up.get(a, 0.0) + seconds
        for key in self.graph.outputs:
            group = self.groups[of[key]] if key in of else None
            if group is None or self.graph.keep:
                continue
            if group.gpu is not None:
                group.gpu += sizes.get(key, 0) / DOWN / links
            if group.host is not None and not group.is_data:
                group.host += sizes.get(key, 0) / NEW

    # ---- the cost of a division

    def _total(self, on_gpus: Sequence[bool]) -> float:
        """Predicted seconds of a division: kernels, copies and calls overlap.

        They overlap the more, the more blocks there are for each thread.
        """
        division = self.division
        sides = list(zip(on_gpus, self.groups, strict=True))
        gpu = sum([g.gpu or 0.0 for here, g in sides if here])
        host = sum([g.host or 0.0 for here, g in sides if not here])
        down = sum([s for (a, b), s in division.down.items() if on_gpus[a] and not on_gpus[b]])
        up = sum([division.up.get(a, 0.0) for a, readers in division.readers.items()
                  if not on_gpus[a] and any(on_gpus[b] for b in readers)])  # fmt: skip
        blocks = max([len(g.keys) for g in self.groups], default=1)
        longest, depth = max(gpu, host, up, down), min(max(1.0, blocks / self.threads), MOST_DEPTH)
        return longest + (gpu + host + up + down - longest) / depth


def divide(division: Division) -> list[bool]:
    """Return whether each group is to run on GPUs, in the cheapest division."""
    return division.assign()


def _reason(group: TaskGroup, added: float) -> str:
    """Say what a group takes on its side and on the other, which takes `added` seconds more."""
    here, there = (group.gpu, "host") if group.on_gpus else (group.host, "GPUs")
    assert here is not None
    return f"{here:.2g} s here, {max(here + added, 0.0):.2g} s on {there} including copies"


def _add_seconds(
    total: float | None, seconds: float | None, overhead: float, devices: int
) -> float | None:
    """A group's seconds with one more task; None where any of its tasks cannot run."""
    return None if total is None or seconds is None else total + seconds / devices + overhead


def _up_rate(node: TaskNode) -> float:
    """The bytes per second at which an array goes to a GPU: fewer where it is not contiguous."""
    task: Any = node.task
    args: Sequence[Any] = getattr(task, "args", ())
    array = args[0] if args else getattr(task, "value", None)
    flags = getattr(array, "flags", None)
    is_contiguous = flags is None or flags.c_contiguous or flags.f_contiguous
    return UP if is_contiguous else UP_GAPS


@dataclass(frozen=True, slots=True)
class SideLine:
    """A line for the user: groups that do the same on one side, for one reason."""

    on_gpus: bool
    count: int
    names: tuple[str, ...]
    words: str
    reason: str

    def __str__(self) -> str:
        side = "GPU " if self.on_gpus else "host"
        shown = ", ".join(self.names[:MOST_NAMES]) + ", ..." * (len(self.names) > MOST_NAMES)
        why = f" ({self.reason})" if self.reason else ""
        return f"{side} {self.count:>6,} of {shown}: {self.words}{why}"


def side_lines(groups: Iterable[TaskGroup]) -> tuple[SideLine, ...]:
    """Say where groups run and why, in one line for those that do the same for one reason.

    >>> print(*side_lines([TaskGroup(n, [n], words="kernel") for n in ("add", "sum")]))
    GPU       2 of add, sum: kernel
    """
    together: dict[Any, list[TaskGroup]] = {}
    for group in groups:
        if not group.is_data and group.words != "view":
            together.setdefault((group.on_gpus, group.words, group.reason), []).append(group)
    lines = [
        SideLine(on, sum([len(g.keys) for g in some]),
                 tuple(dict.fromkeys([g.name for g in some])), words, reason)
        for (on, words, reason), some in together.items()
    ]  # fmt: skip
    return tuple(sorted(lines, key=lambda line: (not line.on_gpus, -line.count)))


def moved_keys(groups: Iterable[TaskGroup]) -> list[Key]:
    """The tasks that GPUs could run and that the host is to run."""
    return [k for g in groups if not g.on_gpus and g.gpu is not None for k in g.keys]
