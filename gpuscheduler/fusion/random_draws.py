"""Random numbers that a task draws, by their position in an array.

Each number depends on the array's seed and on the element's position, and not on the chunks: the
same array in other chunks has the same numbers. A `Tile` is written by position, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dask._task_spec import GraphNode, Task

from ..frontend.captured import RANDOM
from ..frontend.graph import Graph, RandomDraw
from ..ir import random
from ..ir.expr import PLACEHOLDER, Expr, View
from .source import InlineSource, StructureNumbers
from .task import placeholder


class Draws:
    """Writes blocks of random numbers, and the numbers along a tile's axes, as expressions."""

    def __init__(self, graph: Graph, numbers: StructureNumbers, by_position: bool = True):
        self.graph, self.numbers = graph, numbers
        #: Whether random numbers are drawn by position; otherwise their tasks stay as they are.
        self.by_position = by_position
        #: Expression and number of each structure of a random block.
        self._drawn: dict[Any, tuple[Expr | None, int]] = {}
        #: Expression and number of the indices along one axis of a tile, by the axis' length.
        self._axes: dict[int, tuple[Expr, int]] = {}
        #: Philox keys, by the id of the seed that each is made of.
        self._philox_keys: dict[int, int] = {}
        #: Seeds that are known by their ids, and so must live on.
        self._alive: list[Any] = []

    def draw(self, task: Any) -> InlineSource | None:
        """Return a block of random numbers as readers may compute it; None for other tasks."""
        if not self.by_position or type(task) is not Task or task.func not in RANDOM:
            return None
        where = self.graph.draws.get(task.key)
        if where is None or task.dependencies:
            return None
        strides = View.contiguous(where.shape).strides
        position = sum([n * step for n, step in zip(where.start, strides, strict=True)])
        shape = tuple(task.args[3])
        words = ("draw", id(where.seed), shape, position % 2)
        if words not in self._drawn:
            _, name, _, _, args, kwargs = (plain_arguments(a) for a in task.args)
            expr = random.draw(
                name, shape, View(position % 2, strides), self._seed(where), tuple(args),
                dict(kwargs), base=PLACEHOLDER,
            )  # fmt: skip
            self._drawn[words] = expr, self.numbers.number(("drawn", expr, shape))
        expr, number = self._drawn[words]
        if expr is None:
            return None
        block = self.graph.blocks.get(task.key)
        kind = block.kind if block is not None else generator_kind(task.args[0])
        even = position - position % 2
        return InlineSource(shape, expr, (), (), (even,), kind, False, False, number)

    def numbers_of(self, start: int, length: int) -> InlineSource:
        """Return the indices `start`, `start + 1`, … along one axis of a tile."""
        if length not in self._axes:
            axis = Expr("index", (), np.int64, View(0, (1,)))
            expr = Expr("add", (axis, placeholder(0)), np.int64)
            self._axes[length] = expr, self.numbers.number(("tile", length))
        expr, number = self._axes[length]
        return InlineSource((length,), expr, (), (), (start,), None, False, False, number)

    def _seed(self, where: RandomDraw) -> int:
        if id(where.seed) not in self._philox_keys:
            self._alive.append(where.seed)
            self._philox_keys[id(where.seed)] = random.key_of(where.seed)
        return self._philox_keys[id(where.seed)]


def generator_kind(generator: Any) -> str | None:
    """Return the type of the arrays that a bit generator or a RandomState class makes."""
    library = getattr(generator, "xp", None) or str(getattr(generator, "__module__", ""))
    return {"cupy": "cupy.ndarray", "numpy": "numpy.ndarray"}.get(library.partition(".")[0])


def plain_arguments(value: Any) -> Any:
    """Return an argument of a random task without Dask's containers."""
    if isinstance(value, GraphNode):
        return value({})
    return value
