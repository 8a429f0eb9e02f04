"""Tasks that select by a mask: kernels that count and write what it selects.

How many elements there are is known only at run time. One kernel counts them and another writes
them (`CompressTask`); readers that reduce the selection may compute it for themselves instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codegen.cuda.kernel import why_not_generated
from ..frontend.graph import Graph
from ..ir.expr import Expr, Kernel, Program, View, nodes, replace_leaves, view_of, with_view
from ..ir.rewrite import renumber_arrays
from ..tracing.context import MOST_NODES
from .inline import Inliner
from .recipe import Candidate, array_kind, reads_with_inlined
from .source import InlineSource, UnfusedTask
from .task import CompressTask, KernelTask, count_arrays

#: Numbers of each element that a mask selects, at most, for kernels to pick it out.
MOST_COLUMNS = 8


class Selections:
    """Makes tasks that select by a mask kernels, or lets their readers select."""

    def __init__(self, graph: Graph, inliner: Inliner):
        self.graph, self.inliner = graph, inliner
        #: Program and element shape by an offer's number and `first`; None where there is none.
        self._programs: dict[Any, tuple[Program, tuple[int, ...]] | None] = {}

    def offer_to_readers(self, task: Candidate, offer: InlineSource) -> None:
        """Leave the task as it is, and let its readers select for themselves."""
        key = task.key
        if not self.inliner.may_disappear(key):
            return
        names, positions = reads_with_inlined(task)
        source = offer.for_block(tuple(names), tuple(positions), array_kind(self.graph, task))
        source.free = source.little and not positions
        function = self.inliner.add_producers(task) if task.inlined else task.task
        source.apart = UnfusedTask(*self.inliner.inputs_with_producers(task), function)
        self.inliner.sources[key] = source

    def make_compress_task(self, task: Candidate, offer: InlineSource) -> bool:
        """Make the task a `CompressTask`, and return whether it has kernels."""
        graph, inliner, key = self.graph, self.inliner, task.key
        names, positions = reads_with_inlined(task)
        first = tuple([names.index(name) for name in names])  # a value and its mask are of the same
        words = offer.number, first
        if words not in self._programs:
            self._programs[words] = compress_program(offer, first)
        found = self._programs[words]
        if found is None:
            return False
        program, columns = found
        function = task.task
        if task.inlined:
            function = inliner.add_producers(task)
            inliner.rewire(task)
        fused = KernelTask(
            key, program, tuple(names), offer.expects, tuple(positions), array_kind(graph, task),
            function,
        )  # fmt: skip
        graph.replace(key, CompressTask(fused, columns))
        if inliner.may_disappear(key):
            source = inliner.sources[key] = offer.for_block(
                fused.names, fused.positions, fused.kind
            )
            source.free = source.little and not positions
            node = graph.nodes[key]
            source.apart = UnfusedTask(node.names, node.needs, node.constants, function)
        return True


def compress_program(
    offer: InlineSource, first: Sequence[int]
) -> tuple[Program, tuple[int, ...]] | None:
    """Return the kernels that count and write a selection, and the shape of each element.

    Input n is the same value as input `first[n]`.
    """
    masked = offer.parts
    rows = len(masked.over)
    counts = [count_arrays((structure,)) for structure in offer.expects]
    if masked.axis or not math.prod(masked.over) or not sum(counts):
        return None
    shape = tuple(masked.shape[rows:])
    if math.prod(shape) > MOST_COLUMNS or not math.prod(shape):
        return None

    def column(place: tuple[int, ...]) -> Expr:
        def change(leaf: Expr) -> Expr:
            view = view_of(leaf)
            if view is None:
                return leaf
            offset = sum([i * s for i, s in zip(place, view.strides[rows:], strict=True)])
            return with_view(leaf, View(view.offset + offset, view.strides[:rows]))

        return replace_leaves([masked.expr], change)[0]

    columns = [column(place) for place in np.ndindex(shape)]
    begins = [0, *itertools.accumulate(counts)]
    number = {
        begins[n] + i: begins[m] + i
        for n, (m, count) in enumerate(zip(first, counts, strict=True))
        for i in range(count)
    }
    kernels = tuple(
        [
            renumber_arrays(
                Kernel(masked.over, (masked.mask, *rest), picks=True), number.__getitem__
            )
            for rest in ((), columns)
        ]
    )
    every = nodes(kernels[1].roots)
    # what takes long is computed once, and not twice
    loops = [n for n in every if n.op == "call" and n.data[0].repeats]
    if loops or len(every) > MOST_NODES or any(map(why_not_generated, kernels)):
        return None
    return Program(sum(counts), kernels, None), shape
