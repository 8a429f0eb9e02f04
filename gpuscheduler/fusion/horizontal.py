"""Horizontal fusion: programs that read the same become one.

A mean and a variance of the same blocks, and then the steps that combine these. Small results only:
what is made together is let go of together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

from ..frontend.graph import Graph
from ..frontend.task import OwnTask, TaskDescription, describe
from ..ir.expr import Expr, Kernel, Out, Program, Reduction, replace_leaves
from ..ir.regions import bytes_read
from ..ir.rewrite import renumber_arrays
from ..values import map_leaves
from .task import KernelTask

Key = Any
Values = dict[Any, Any]

#: Rounds of merging: each reaches one level further up the tree of a reduction.
ROUNDS = 16
#: Results above this many bytes are not merged, if they are not small beside what is read.
SMALL = 2**20
#: Tasks in a group, at most.
MOST = 8
#: Part of its bytes that the task which reads less must have in common with the other.
COMMON = 1 / 2


@dataclass(frozen=True, slots=True)
class TupleItemKey:
    """The key of a task that makes a tuple of several values."""

    keys: tuple[Key, ...]

    def __repr__(self) -> str:
        return " and ".join(map(str, self.keys))


class SequentialTasks(OwnTask):
    """The original tasks of a group, run one after the other."""

    __slots__ = ("key", "tasks")

    def __init__(self, key: Key, tasks: Sequence[Callable[[Values], Any]]):
        self.key, self.tasks = key, tasks

    @property
    def parts(self) -> tuple[Any, ...]:
        return tuple(self.tasks)

    def with_parts(self, *parts: Any) -> SequentialTasks:
        return SequentialTasks(self.key, parts)

    def describe(self) -> TaskDescription:
        return TaskDescription(" and ".join([describe(task).words for task in self.tasks]))

    def __call__(self, values: Values) -> tuple[Any, ...]:
        return tuple([task(values) for task in self.tasks])


def merge_siblings(apart: Graph) -> Graph:
    """Return a graph in which siblings are one task; the same graph without siblings."""
    graph = apart
    kept = set(graph.outputs)
    known: dict[Any, tuple[Any, Program]] = {}
    for _ in range(ROUNDS):
        groups = _find_siblings(graph, kept)
        if not groups:
            break
        if graph is apart:  # which stays as it is
            graph = replace(
                apart, names={**apart.names}, needs={**apart.needs}, picks={**apart.picks},
                constants={**apart.constants}, pins={**apart.pins}, sizes={**apart.sizes},
            )  # fmt: skip
        fused: dict[Key, Any] = graph.tasks
        number: dict[int, int] = {}  # in the same order everywhere: alike groups are one program
        for key in chain(*groups):
            number.setdefault(id(fused[key].program), len(number))
        first = {
            group[0]: add_group(graph, sorted(group, key=lambda k: number[id(fused[k].program)]))
            for group in groups
        }
        where = {key: (h, n) for h in first.values() for n, key in enumerate(h.keys)}
        tasks = graph.tasks
        # the place in the order of execution is the first one's: what they read is all before it
        graph.tasks = {}
        for key, task in tasks.items():
            if key in first:
                graph.tasks[first[key]] = _join_tasks(tasks, first[key], known)
            elif key not in where:
                graph.tasks[key] = task
        forget_tasks(graph, where)
        rewire_readers(graph, where)
    return graph


def forget_tasks(graph: Graph, keys: Iterable[Key]) -> None:
    """Drop the graph's facts about tasks that are part of others now."""
    for key in keys:
        for facts in (graph.names, graph.needs, graph.constants, graph.picks, graph.pins):
            facts.pop(key, None)


def _find_siblings(graph: Graph, kept: set[Key]) -> list[list[Key]]:
    """Return groups of tasks that read the same."""
    groups: dict[Any, list[list[Key]]] = {}
    bytes_of = cache(partial(_bytes_read, graph))
    for key, task in graph.tasks.items():
        if not isinstance(task, KernelTask) or key in kept or task.positions or not task.names:
            continue
        if type(key) is TupleItemKey or not _is_small(task):
            continue
        read = frozenset(graph.needs[key]), frozenset(graph.constants.get(key, ()))
        alike = groups.setdefault((read, graph.pins.get(key)), [])
        for group in alike:
            if len(group) < MOST and _have_much_in_common(bytes_of(group[0]), bytes_of(key)):
                group.append(key)
                break
        else:
            alike.append([key])
    return [g for alike in groups.values() for g in alike if len(g) > 1]


def _have_much_in_common(one: Counter[Key], two: Counter[Key]) -> bool:
    """Whether two tasks read much of the same bytes, and not only each other's edges."""
    return (one & two).total() >= COMMON * min(one.total(), two.total())


def _bytes_read(graph: Graph, key: Key) -> Counter[Key]:
    """Return the bytes that a task reads of each value."""
    task = graph.tasks[key]
    assert isinstance(task, KernelTask)
    whose = dict(zip(graph.names[key], graph.needs[key], strict=True))
    arrays = [
        whose.get(name, name) for name, foreseen in task.inputs() for e in foreseen if e is not None
    ]
    out: Counter[Key] = Counter()
    for kernel in task.program.kernels:
        for n, nbytes in bytes_read(kernel).items():
            if n < len(arrays):
                out[arrays[n]] += nbytes
    return out


def _is_small(task: KernelTask) -> bool:
    read = sum(e.nbytes for _, foreseen in task.inputs() for e in foreseen if e is not None)
    made = sum(n for k in task.program.kernels for n in k.made)
    return made <= SMALL or 8 * made <= read


def add_group(graph: Graph, group: list[Key]) -> TupleItemKey:
    """Give a group one key in the graph, which reads what its members read."""
    holder = TupleItemKey(tuple(group))
    sources: dict[Key, tuple[Key, tuple[int, ...]]] = {}
    constants: dict[Key, Any] = {}
    for key in group:
        names = graph.names[key]
        picks = graph.picks.get(key, ((),) * len(names))
        for name, need, pick in zip(names, graph.needs[key], picks, strict=True):
            sources[name] = need, pick
        constants.update(graph.constants.get(key, {}))
    graph.names[holder] = tuple(sources)
    graph.needs[holder] = tuple([need for need, _ in sources.values()])
    if any(pick for _, pick in sources.values()):
        graph.picks[holder] = tuple([pick for _, pick in sources.values()])
    if constants:
        graph.constants[holder] = constants
    if group[0] in graph.pins:
        graph.pins[holder] = graph.pins[group[0]]
    graph.sizes[holder] = sum(graph.sizes.get(k, 0) for k in group)
    return holder


def _join_tasks(
    tasks: Mapping[Key, Any], holder: TupleItemKey, known: dict[Any, tuple[Any, Program]]
) -> KernelTask:
    """Return one task in place of a group; like groups share a program through `known`."""
    members = [tasks[k] for k in holder.keys]
    first: dict[Key, int] = {}  # name -> number of its first array
    expects: list[Any] = []
    count = 0
    parts = []
    for task in members:
        numbers: list[int] = []
        for (name, foreseen), structure in zip(task.inputs(), task.expects, strict=True):
            arrays = sum(e is not None for e in foreseen)
            if name not in first:
                first[name] = count
                expects.append(structure)
                count += arrays
            numbers += range(first[name], first[name] + arrays)
        parts.append((task.program, numbers))
    words = count, tuple([(id(program), tuple(numbers)) for program, numbers in parts])
    if words not in known:
        known[words] = parts, join_programs(parts, count)  # what is known by its id must live on
    return KernelTask(
        holder, known[words][1], tuple(first), tuple(expects), (),
        members[0].kind, SequentialTasks(holder, [t.original for t in members]),
    )  # fmt: skip


def rewire_readers(graph: Graph, where: Mapping[Key, tuple[Key, int]]) -> None:
    """Let readers pick their item of the tuple that a group makes."""
    for key, needs in graph.needs.items():
        if not any(d in where for d in needs):
            continue
        picks = list(graph.picks.get(key, ((),) * len(needs)))
        for n, d in enumerate(needs):
            if d in where:
                picks[n] = (where[d][1], *picks[n])
        graph.needs[key] = tuple([where[d][0] if d in where else d for d in needs])
        graph.picks[key] = tuple(picks)


def join_programs(parts: Sequence[tuple[Program, Sequence[int]]], inputs: int) -> Program:
    """Join programs to one of `inputs` inputs, whose value is the tuple of theirs.

    Each program comes with the numbers of its inputs among these. Reductions of the inputs over the
    same axes of the same shape become one kernel.
    """
    passes: list[list[tuple[int, int]]] = []  # of (part, kernel)
    for p, (program, _) in enumerate(parts):
        for k in range(len(program.kernels)):
            same = next((g for g in passes if _are_one_pass(parts, g[0], (p, k))), None)
            if same is not None:
                same.append((p, k))
            else:
                passes.append([(p, k)])
    numbers: list[dict[int, int]] = [dict(enumerate(given)) for _, given in parts]
    n = inputs
    for group in passes:
        for p, k in group:
            program = parts[p][0]
            for o in range(len(program.kernels[k].outputs)):
                numbers[p][program.starts[k] + o] = n
                n += 1
    kernels = [
        _join_kernels(
            [renumber_arrays(parts[p][0].kernels[k], numbers[p].__getitem__) for p, k in group]
        )
        for group in passes
    ]
    values = tuple(
        map_leaves(
            lambda v, own=own: replace(v, array=own[v.array]) if isinstance(v, Out) else v,  # type: ignore[misc]
            program.result,
        )
        for (program, _), own in zip(parts, numbers, strict=True)
    )
    return Program(inputs, tuple(kernels), values)


def _are_one_pass(
    parts: Sequence[tuple[Program, Sequence[int]]], one: tuple[int, int], two: tuple[int, int]
) -> bool:
    """Whether two kernels reduce inputs of their programs over the same axes."""
    if one[1] or two[1]:
        return False
    kernel, other = (parts[p][0].kernels[0] for p, _ in (one, two))
    alike = other.shape == kernel.shape and other.axes == kernel.axes
    alike = alike and other.scans == kernel.scans
    if alike and (kernel.counts or other.counts):  # which have one reduction, of the same arrays
        a, b = (
            renumber_arrays(parts[p][0].kernels[0], parts[p][1].__getitem__) for p, _ in (one, two)
        )
        alike = a.reductions == b.reductions
    return bool(kernel.reductions) and alike


def _join_kernels(kernels: Sequence[Kernel]) -> Kernel:
    if len(kernels) == 1:
        return kernels[0]
    reductions: dict[Reduction, int] = {}
    outputs: list[Expr] = []
    for kernel in kernels:
        place = [reductions.setdefault(r, len(reductions)) for r in kernel.reductions]

        def change(leaf: Expr, place: list[int] = place) -> Expr:
            if leaf.op != "reduced":
                return leaf
            return Expr("reduced", (), leaf.dtype, (place[leaf.data[0]], leaf.data[1]))

        outputs += replace_leaves(kernel.outputs, change)
    return replace(kernels[0], reductions=tuple(reductions), outputs=tuple(outputs))
