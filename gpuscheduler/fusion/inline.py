"""Inlining: tasks disappear into their readers, which compute the values for themselves.

A task offers its value as an expression (`Offers`). The `Inliner` decides which readers take an
offer, rewires these in the graph, and drops the tasks that nobody reads any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..frontend.graph import Graph
from ..frontend.task import original_of
from ..ir.expr import Expr, Kernel, Out, replace_leaves, view_of, with_view
from ..ir.rewrite import renumber_leaf
from ..tracing.abstract import (
    AbstractArray,
    FlatArray,
    GeneratedArray,
    MaskedPoints,
    ScannedArray,
    ViewedInput,
)
from ..tracing.array import FEW
from ..tracing.context import squeezed_axes, view_over
from ..values import leaves, map_leaves
from .recipe import Candidate, structure_words
from .source import (
    BORROWED,
    LITTLE_WORK,
    InlineSource,
    StructureNumbers,
    TraceOutcome,
    UnfusedTask,
    is_cheaper_computed,
    sliced_share,
    work_per_element,
)
from .task import Key, TaskWithProducers, Values, count_arrays

#: Arrays that a task may read because of the tasks that disappear into it. Its kernel has an
#: argument for each, and all of them are in memory at once.
MOST_READ = 64


class Offers:
    """Writes values of tasks as expressions that their readers may compute."""

    def __init__(self, numbers: StructureNumbers, on_gpus: bool):
        self.numbers, self.on_gpus = numbers, on_gpus

    def offer_result(self, found: TraceOutcome) -> InlineSource | None:
        """Offer what a program makes, where that may save its memory."""
        program, made = found.program, found.makes
        assert program is not None
        if len(program.kernels) != 1:
            return None
        (kernel,), result = program.kernels, program.result
        if kernel.is_scan:
            return self._offer_scan(found, kernel)
        if type(result) is Out and len(result.shape) == 1 < len(kernel.shape):
            return self._offer_rows(found, kernel)
        outs = [out for out in leaves(result) if isinstance(out, Out) and not out.scalar]
        if kernel.reductions or len(outs) < max(len(list(leaves(result))), len(kernel.outputs)):
            return None
        expects = found.expects
        every = list(leaves(made))
        one = isinstance(result, Out)
        shown = tuple if one else squeezed_axes
        if any(shown(m.shape) != shown(kernel.shape) for m in every):
            return None
        if not are_arrays(expects):
            return None
        # steps of a tree meet on each device before they meet on one
        tiny = count_arrays(expects) > 1 and math.prod(kernel.shape) <= FEW
        nbytes = sum(m.nbytes for m in every)
        far = tiny or sum(e.nbytes for e in leaves(expects)) > 2 * nbytes

        def part(out: Out) -> GeneratedArray:
            expr = kernel.outputs[out.array - program.inputs]
            if out.shape != kernel.shape:  # axes of length one are more, or fewer
                (expr,) = replace_leaves(
                    [expr], lambda leaf: _broadcast_leaf(leaf, kernel.shape, out.shape)
                )
            return GeneratedArray(out.shape, expr.dtype, expr)

        parts = None if one else map_leaves(part, result)
        # readers of alike ones have one program, and that what each reads has as many leaves
        words = ("source", kernel.outputs, structure_words(made), structure_words(expects))
        number = self.numbers.number(words)
        root = kernel.outputs[0]
        little = self.on_gpus and parts is None and work_per_element(root) <= LITTLE_WORK
        return InlineSource(
            kernel.shape, root, (), expects, (), None, False, far, number, little, parts
        )  # fmt: skip

    def _offer_rows(self, found: TraceOutcome, kernel: Kernel) -> InlineSource | None:
        """Offer an array with the axes that it had before the task flattened it.

        A reader that does not depend on the order of the elements may take it so.
        """
        made, expects = found.makes, found.expects
        if kernel.reductions or len(kernel.outputs) > 1 or not are_arrays(expects):
            return None
        (root,) = kernel.outputs
        number = self.numbers.number(("rows", root, kernel.shape, structure_words(expects)))
        far = sum(e.nbytes for e in leaves(expects)) > 2 * made.nbytes
        return InlineSource(
            made.shape, root, (), expects, (), None, False, far, number,
            self.on_gpus and work_per_element(root) <= LITTLE_WORK,
            FlatArray(kernel.shape, root.dtype, root),
        )  # fmt: skip

    def _offer_scan(self, found: TraceOutcome, kernel: Kernel) -> InlineSource | None:
        """Offer a scan: in Dask's, one reader takes each part and another only the last."""
        made, expects = found.makes, found.expects
        (scan, *others), (output, *more) = kernel.reductions, kernel.outputs
        if others or more or output.op != "reduced" or not are_arrays(expects):
            return None
        if not isinstance(made, AbstractArray) or made.shape != kernel.shape:
            return None
        number = self.numbers.number(("scan", kernel, structure_words(expects)))
        part = ScannedArray(kernel.shape, made.dtype, scan.arg, scan.op, kernel.axes[0])
        far = any(e.nbytes > 2 * made.nbytes for e in leaves(expects))
        return InlineSource(
            kernel.shape, scan.arg, (), expects, (), None, False, far, number,
            work_per_element(scan.arg) <= LITTLE_WORK, part,
        )  # fmt: skip

    def offer_selection(
        self, masked: MaskedPoints, expects: tuple[Any, ...], own: int
    ) -> InlineSource:
        """Offer what a mask selects, for readers that reduce it.

        Then nobody has to find out how many elements there are. `own` of the arrays are not
        borrowed from producers.
        """

        def change(leaf: Expr) -> Expr:
            return renumber_leaf(leaf, lambda n: own + n - BORROWED if n >= BORROWED else n)

        expr, mask = replace_leaves([masked.expr, masked.mask], change)
        masked = replace(masked, expr=expr, mask=mask)
        number = self.numbers.number(("selection", masked, structure_words(expects)))
        little = work_per_element(expr) + work_per_element(mask) <= LITTLE_WORK
        return InlineSource(
            masked.shape, expr, (), expects, (), None, False, False, number, little, masked
        )  # fmt: skip

    def offer_view(self, name: Key, seen: ViewedInput, whole: AbstractArray) -> InlineSource:
        """Offer a view of one array."""
        far = math.prod(whole.shape) > 2 * math.prod(seen.shape)
        expr = Expr("input", (), seen.dtype, (0, seen.view))
        number = self.numbers.number(("source", expr, seen, whole))
        return InlineSource(seen.shape, expr, (name,), (whole,), (), None, True, far, number)


class Inliner:
    """Decides which producers each task computes for itself, and takes these out of the graph."""

    def __init__(
        self, graph: Graph, near: Callable[[Key, Key], bool] | None = None, on_gpus: bool = False
    ):
        self.graph, self.on_gpus = graph, on_gpus
        #: Whether two tasks are on one device.
        self.near = near
        #: What each task offers to its readers.
        self.sources: dict[Key, InlineSource] = {}
        #: How many tasks read each value.
        self.readers: dict[Key, int] = {}
        #: The readers of each value, once somebody has asked for them.
        self._takers: dict[Key, list[Key]] = {}
        self.outputs = set(graph.outputs)

    def count_readers(self) -> None:
        """Count the readers of each value."""
        for node in self.graph.nodes.values():
            for d in node.needs:
                self.readers[d] = self.readers.get(d, 0) + 1

    def may_disappear(self, key: Key) -> bool:
        """Whether a task is neither wanted nor bound to a device."""
        return self.graph.nodes[key].pin is None and key not in self.outputs

    def may_inline(self, target: Key, reader: Key) -> bool:
        """Whether a reader may compute what `target` offers."""
        source, readers = self.sources[target], self.readers[target]
        if not (source.free or readers == 1):
            times = self._count_sliced_reads(target, reader) if source.little else None
            if not is_cheaper_computed(source, readers if times is None else times):
                return False
        if not source.far:
            return True
        # a small part of something large: if that is elsewhere, only the part should come
        graph, near = self.graph, self.near
        whole = [d for d in graph.nodes[target].needs if d not in graph.beside]
        return near is not None and all(near(reader, d) for d in whole)

    def _count_sliced_reads(self, target: Key, reader: Key) -> float | None:
        """Return how often a block is read as a whole, by readers that take slices.

        Steps of a change of chunks do so. None if any reader takes the block otherwise: it is
        stored anyway. None also for very many readers, since each of them asks.
        """
        graph, shape = self.graph, self.sources[target].shape
        many = self.readers[target] > MOST_READ
        nodes = graph.nodes
        if many or not self.on_gpus or sliced_share(nodes[reader].task, shape) is None:
            return None
        if not self._takers:
            for key, node in nodes.items():
                for d in node.needs:
                    self._takers.setdefault(d, []).append(key)
        takers = self._takers.get(target, ())
        left = [k for k in takers if k in nodes and target in nodes[k].needs]
        if len(left) != self.readers[target]:  # others read it by now
            return None
        parts = [sliced_share(nodes[k].task, shape) for k in left]
        return None if None in parts else sum(parts)  # type: ignore[arg-type]

    def add_producers(self, task: Candidate) -> Callable[[Values], Any]:
        """Return the original task behind the producers that it now replaces."""
        return TaskWithProducers(task.task, [
            (task.recipe.names[n], self._unfused_task(task.target(n), source).function)
            for n, source in task.inlined.items()
        ])  # fmt: skip

    def _unfused_task(self, target: Key, source: InlineSource) -> UnfusedTask:
        """Return inputs, constants and function of a task that disappears into a reader."""
        if source.apart is not None:
            return source.apart
        node = self.graph.nodes[target]
        return UnfusedTask(node.names, node.needs, node.constants, original_of(node.task))

    def inputs_with_producers(
        self, task: Candidate
    ) -> tuple[tuple[Key, ...], tuple[Key, ...], dict[Key, Any]]:
        """Return names, inputs and constants of a task that computes its producers itself."""
        constants = dict(self.graph.nodes[task.key].constants)
        names = task.own_names()
        new = {name: task.targets[name] for name in names if name in task.targets}
        for n, source in task.inlined.items():
            before = self._unfused_task(task.target(n), source)
            constants.update(before.constants)
            new.update(zip(before.names, before.needs, strict=True))
        # an array that one of them has as a constant has a task by now, which another reads
        constants = {k: v for k, v in constants.items() if k not in new}
        return tuple(new), tuple(new.values()), constants

    def rewire(self, task: Candidate) -> None:
        """Let a task read what its producers read, and drop producers without other readers."""
        names, needs, constants = self.inputs_with_producers(task)
        self.graph.rewire(task.key, names, needs, constants)
        for n, source in task.inlined.items():
            target = task.target(n)
            for d in self._unfused_task(target, source).needs:
                self.readers[d] += 1
            self.readers[target] -= 1
            if not self.readers[target] and target not in self.outputs:
                self._drop(target)

    def _drop(self, key: Key) -> None:
        for d in self.graph.drop(key).needs:
            self.readers[d] -= 1
            if not self.readers[d] and d not in self.outputs:  # its readers compute it themselves
                self._drop(d)


def are_arrays(structures: tuple[Any, ...]) -> bool:
    """Whether values are arrays, or containers of nothing else."""
    return all(isinstance(leaf, AbstractArray) for leaf in leaves(structures))


def _broadcast_leaf(leaf: Expr, shape: tuple[int, ...], other: tuple[int, ...]) -> Expr:
    view = view_of(leaf)
    return leaf if view is None else with_view(leaf, view_over(view, shape, other))
