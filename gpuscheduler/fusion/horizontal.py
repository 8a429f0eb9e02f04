"""Horizontal fusion: programs that read the same become one.

A mean and a variance of the same blocks, and then the steps that combine these. Small results only:
what is made together is let go of together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
            graph = graph.copy()
        fused: dict[Key, Any] = {k: graph.nodes[k].task for k in chain(*groups)}
        number: dict[int, int] = {}  # in the same order everywhere: alike groups are one program
        for task in fused.values():
            number.setdefault(id(task.program), len(number))
        merged = {}
        for group in groups:
            keys = sorted(group, key=lambda k: number[id(fused[k].program)])
            holder = TupleItemKey(tuple(keys))
            merged[holder] = keys, _join_tasks(fused, holder, known)
        graph.merge(merged)
    return graph


def _find_siblings(graph: Graph, kept: set[Key]) -> list[list[Key]]:
    """Return groups of tasks that read the same."""
    groups: dict[Any, list[list[Key]]] = {}
    bytes_of = cache(partial(_bytes_read, graph))
    for key, node in graph.nodes.items():
        task = node.task
        if not isinstance(task, KernelTask) or key in kept or task.positions or not task.names:
            continue
        if type(key) is TupleItemKey or not _is_small(task):
            continue
        read = frozenset(node.needs), frozenset(node.constants)
        alike = groups.setdefault((read, node.pin), [])
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
    node = graph.nodes[key]
    task = node.task
    assert isinstance(task, KernelTask)
    whose = dict(zip(node.names, node.needs, strict=True))
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
    made = sum(n for k in task.program.kernels for n in k.output_bytes)
    return made <= SMALL or 8 * made <= read


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
    alike = alike and other.is_scan == kernel.is_scan
    if alike and (
        kernel.is_histogram or other.is_histogram
    ):  # which have one reduction, of the same arrays
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
