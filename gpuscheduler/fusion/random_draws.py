"""Random numbers that a task draws, by their position in an array.

`codegen.random_block` has the function that such tasks call. A `Tile` is written by position, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dask._task_spec import Task

from ..codegen.random_block import RandomArray, draw_block
from ..frontend.graph import Graph
from ..ir.expr import Expr, View
from .source import InlineSource, StructureNumbers
from .task import placeholder


class Draws:
    """Writes blocks of random numbers, and the numbers along a tile's axes, as expressions."""

    def __init__(self, graph: Graph, numbers: StructureNumbers):
        self.graph, self.numbers = graph, numbers
        #: Expression and number of each structure of a random block.
        self._drawn: dict[Any, tuple[Expr | None, int]] = {}
        #: Expression and number of the indices along one axis of a tile, by the axis' length.
        self._axes: dict[int, tuple[Expr, int]] = {}
        #: Random arrays, which are known by their ids and so must live on.
        self._alive: dict[int, RandomArray] = {}

    def draw(self, task: Any) -> InlineSource | None:
        """Return a block of random numbers as readers may compute it; None for other tasks."""
        if type(task) is not Task or task.func is not draw_block or task.dependencies:
            return None
        array, start, shape = task.args
        position = array.position(start)
        words = id(self._alive.setdefault(id(array), array)), shape, position % 2
        if words not in self._drawn:
            expr = array.expression(shape, position % 2)
            self._drawn[words] = expr, self.numbers.number(("drawn", expr, shape))
        expr, number = self._drawn[words]
        if expr is None:
            return None
        block = self.graph.blocks.get(task.key)
        kind = block.kind if block is not None else f"{array.library}.ndarray"
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
