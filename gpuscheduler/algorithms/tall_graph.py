"""The graph of the QR factorization of a tall matrix, and of SVD and least squares by it.

Each step is a Gram matrix of every block, their sum over a fixed tree, one small factorization, and
one pass over the blocks (`tall_kernel`). Tasks decide by the factor that they read whether there is
anything left to do, so the graph depends on shapes and chunks only. Where Cholesky factors break
down, the last tasks do Householder TSQR:

- J. Demmel, L. Grigori, M. Hoemmen, J. Langou: "Communication-optimal parallel and sequential QR
  and LU factorizations", SIAM J. Sci. Comput. 34 (2012).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.array.core import Array
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from . import tall_tasks
from .tall_kernel import (
    apply_factor,
    end_factor,
    make_gram,
    next_factor,
    start_factor,
    tall_qr,
    unit_roundoff,
)

#: Fan-in of the tree of sums: values that one task adds.
ARITY = 8
#: Matrices of at most this many bytes are factored by one task.
SMALL = 2**24


class SVDResult(NamedTuple):
    """A singular value decomposition, as lazy arrays."""

    U: Array
    S: Array
    Vh: Array


class GraphValue(NamedTuple):
    """A key of a graph whose value is no block of an array."""

    graph: HighLevelGraph
    layer: str
    key: Any

    @property
    def dask(self) -> HighLevelGraph:
        return self.graph

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self.layer,)

    def __dask_graph__(self) -> HighLevelGraph:
        return self.graph


def add_layer(name: str, tasks: Mapping[Any, Task], *needs: Any) -> HighLevelGraph:
    return HighLevelGraph.from_collections(name, tasks, dependencies=list(needs))


def graph_value(
    name: str, function: Callable[..., Any], arguments: list[Any], *needs: Any
) -> GraphValue:
    """The result of one task that is no block of an array."""
    return GraphValue(add_layer(name, {name: Task(name, function, *arguments)}, *needs), name, name)


def _tree_sum(name: str, keys: list[Any], of: Any) -> GraphValue:
    """The sum of values by a tree whose shape depends only on how many there are."""
    tasks: dict[Any, Task] = {}
    level = 0
    while len(keys) > 1 or not level:
        above = []
        for n in range(0, len(keys), ARITY):
            key = (name, level, n // ARITY)
            tasks[key] = Task(
                key, tall_tasks.add_known, List(*[TaskRef(k) for k in keys[n : n + ARITY]])
            )
            above.append(key)
        keys, level = above, level + 1
    return GraphValue(add_layer(name, tasks, of), name, keys[0])


class TallFactors:
    """The QR factorization of a matrix `a` of blocks of rows.

    `blocks` is the last Q that is stored; `factor` says how its blocks become Q, and `stack` has
    what Householder TSQR makes where the Cholesky factors broke down.
    """

    def __init__(self, a: Array, token: str, blocks: Array, factor: GraphValue, stack: GraphValue):
        self.a, self.token, self.blocks, self.factor, self.stack = a, token, blocks, factor, stack
        self.n = int(a.shape[1])

    def _small_array(
        self, what: str, function: Callable[..., Any], arguments: list[Any], *needs: Any,
        shape: tuple[int, ...], dtype: Any = None,
    ) -> Array:  # fmt: skip
        """An array of one block that one task makes."""
        name = f"{what}-{self.token}"
        key = (name, *[0] * len(shape))
        graph = add_layer(name, {key: Task(key, function, *arguments)}, *needs)
        dtype = np.dtype(dtype or self.a.dtype)
        like = self.a._meta if dtype.kind == "c" else self.a._meta.real
        meta = meta_from_array(like, len(shape), dtype=dtype)
        return Array(graph, name, tuple([(n,) for n in shape]), meta=meta)

    def _by_block(
        self, what: str, function: Callable[..., Any], arguments: list[Any], *needs: Any,
        rows: bool = True,
    ) -> Array:  # fmt: skip
        """An array of a block for each block of rows: (m, n), or (n, m) without `rows`."""
        name, heights = f"{what}-{self.token}", self.a.chunks[0]
        tasks: dict[Any, Task] = {}
        for i in range(len(heights)):
            key = (name, i, 0) if rows else (name, 0, i)
            block = TaskRef((self.blocks.name, i, 0))
            more = [TaskRef((v.name, i, 0)) if isinstance(v, Array) else v for v in arguments]
            tasks[key] = Task(
                key, function, block, TaskRef(self.factor.key), TaskRef(self.stack.key), i, *more
            )
        arrays = [v for v in arguments if isinstance(v, Array)]
        graph = add_layer(name, tasks, self.blocks, self.factor, self.stack, *arrays, *needs)
        chunks = (heights, (self.n,)) if rows else ((self.n,), heights)
        return Array(graph, name, chunks, meta=self.a._meta)

    def q(self) -> Array:
        return self._by_block("qr-q", tall_tasks.end_q, [])

    def r(self) -> Array:
        read = [TaskRef(self.factor.key), TaskRef(self.stack.key), self.a.dtype.str]
        return self._small_array(
            "qr-r", tall_tasks.end_r, read, self.factor, self.stack, shape=(self.n, self.n)
        )

    def _svd(self) -> GraphValue:
        name = f"svd-of-r-{self.token}"
        read = [TaskRef(self.factor.key), TaskRef(self.stack.key)]
        return graph_value(name, tall_tasks.svd_of_r, read, self.factor, self.stack)

    def svd(self) -> SVDResult:
        parts, n = self._svd(), self.n
        u = self._by_block("svd-u", tall_tasks.end_u, [TaskRef(parts.key)], parts)
        read = [TaskRef(parts.key), 2, self.a.dtype.str]
        vh = self._small_array("svd-vh", tall_tasks.take_part, read, parts, shape=(n, n))
        return SVDResult(u, self.svdvals(), vh)

    def svdvals(self) -> Array:
        parts, real = self._svd(), self.a.real.dtype
        read = [TaskRef(parts.key), 1, real.str]
        return self._small_array(
            "svd-s", tall_tasks.take_part, read, parts, shape=(self.n,), dtype=real
        )

    def pinv(self, rcond: float | None, sides: tuple[int, ...]) -> Array:
        parts = self._svd()
        cutoff = tolerance(self.a.dtype, rcond, sides)
        name = f"pinv-{tokenize(cutoff)}"
        return self._by_block(
            name, tall_tasks.end_pinv, [TaskRef(parts.key), cutoff], parts, rows=False
        )

    def solve(self, b: Array, rcond: float | None, sides: tuple[int, ...]) -> Array:
        """The solutions x of a x = b for a tall matrix; `b` has its chunks."""
        parts, cutoff = self._svd(), tolerance(self.a.dtype, rcond, sides)
        token = tokenize(b, cutoff)
        projected = self._by_block(f"lstsq-qtb-{token}", tall_tasks.project_rows, [b])
        keys = [(projected.name, i, 0) for i in range(projected.numblocks[0])]
        total = _tree_sum(f"lstsq-sum-{token}-{self.token}", keys, projected)
        read = [TaskRef(parts.key), TaskRef(total.key), cutoff, self.a.dtype.str]
        shape = (self.n, int(b.shape[1]))
        return self._small_array(
            f"lstsq-{token}", tall_tasks.solve_by_svd, read, parts, total, shape=shape
        )

    def solve_wide(self, b: Array, rcond: float | None, sides: tuple[int, ...]) -> Array:
        """The shortest solutions x of aᴴ x = b, for the adjoint of the tall matrix `a`."""
        parts, cutoff = self._svd(), tolerance(self.a.dtype, rcond, sides)
        b = b.rechunk((-1, -1))
        name = f"lstsq-inner-{tokenize(b, cutoff)}"
        read = [TaskRef(parts.key), TaskRef((b.name, 0, 0)), cutoff]
        inner = graph_value(f"{name}-{self.token}", tall_tasks.solve_adjoint, read, parts, b)
        out = self._by_block(f"lstsq-{name}", tall_tasks.end_product, [TaskRef(inner.key)], inner)
        heights = self.a.chunks[0]
        return Array(out.dask, out.name, (heights, (int(b.shape[1]),)), meta=self.a._meta)


def factorize(a: Array) -> TallFactors:
    """Build the graph of the QR factorization of a tall matrix, by CholeskyQR in three rounds.

    Each round factors the sum of the Gram matrices of all blocks, and that factor turns one Q into
    the next; the last factor is applied by the tasks that read Q. The tasks of Householder TSQR
    return None unless a round has failed. One task factors a matrix of one block.
    """
    return factorize_blocks(_rechunk_to_rows(a))


def factorize_blocks(a: Array) -> TallFactors:
    """Do what `factorize` does, for a matrix whose blocks are whole rows, and stay as they are."""
    token, n = tokenize("gpuscheduler-qr", a), int(a.shape[1])
    count, unit = a.numblocks[0], unit_roundoff(a.dtype)

    def apply_to_blocks(what: str, of: Array, factor: GraphValue) -> Array:
        name = f"{what}-{token}"
        tasks = {}
        for i in range(count):
            key = (name, i, 0)
            tasks[key] = Task(key, apply_factor, TaskRef((of.name, i, 0)), TaskRef(factor.key))
        return Array(add_layer(name, tasks, of, factor), name, a.chunks, meta=a._meta)

    def sum_grams(what: str, of: Array, factor: GraphValue | None) -> GraphValue:
        name = f"{what}-{token}"
        more = [] if factor is None else [TaskRef(factor.key)]
        function = make_gram if factor is None else tall_tasks.make_next_gram
        keys = [(name, i, 0) for i in range(count)]
        tasks = {k: Task(k, function, TaskRef((of.name, *k[1:])), *more) for k in keys}
        graph = add_layer(name, tasks, *([of] if factor is None else [of, factor]))
        dtype = np.result_type(a.dtype, np.float64)
        grams = Array(
            graph, name, ((n,) * count, (n,)), meta=meta_from_array(a._meta, 2, dtype=dtype)
        )
        return _tree_sum(f"{what}-sum-{token}", keys, grams)

    def factor_sum(
        what: str, function: Callable[..., Any], total: GraphValue, more: Any
    ) -> GraphValue:
        read = [TaskRef(total.key), TaskRef(more.key) if isinstance(more, GraphValue) else more]
        needs = [total, more] if isinstance(more, GraphValue) else [total]
        return graph_value(f"{what}-{token}", function, read, *needs)

    if count == 1:
        pair = graph_value(f"qr-{token}", tall_qr, [TaskRef((a.name, 0, 0))], a)
        name = f"qr-q0-{token}"
        part = Task((name, 0, 0), getitem, TaskRef(pair.key), 0)
        blocks = Array(add_layer(name, {(name, 0, 0): part}, pair), name, a.chunks, meta=a._meta)
        factor = graph_value(
            f"qr-factor-{token}", tall_tasks.keep_factor, [TaskRef(pair.key), unit], pair
        )
        return TallFactors(
            a, token, blocks, factor, graph_value(f"qr-stack-{token}", tall_tasks.make_none, [])
        )
    first = factor_sum("qr-factor1", start_factor, sum_grams("qr-gram1", a, None), unit)
    q1 = apply_to_blocks("qr-q1", a, first)
    second = factor_sum("qr-factor2", next_factor, sum_grams("qr-gram2", q1, first), first)
    q2 = apply_to_blocks("qr-q2", q1, second)
    third = factor_sum("qr-factor3", end_factor, sum_grams("qr-gram3", q2, second), second)
    name = f"qr-fallback-{token}"
    keys = [(name, i) for i in range(count)]
    tasks = {
        k: Task(k, tall_tasks.fallback_r, TaskRef((q2.name, k[1], 0)), TaskRef(third.key))
        for k in keys
    }
    r_of_blocks = GraphValue(add_layer(name, tasks, q2, third), name, None)
    read = [TaskRef(third.key), List(*map(TaskRef, keys))]
    stack = graph_value(f"qr-stack-{token}", tall_tasks.stack_r, read, third, r_of_blocks)
    return TallFactors(a, token, q2, third, stack)


def _rechunk_to_rows(a: Array) -> Array:
    """Rechunk a matrix to blocks of whole rows; to one block if it is small."""
    if math.isnan(a.shape[0]):
        return a
    m, n = (int(side) for side in a.shape)
    chunks: Any = (-1, -1)
    if a.nbytes > SMALL:
        if a.numblocks[1] == 1:
            return a
        rows = max(1, n, max(a.chunks[0]) * max(a.chunks[1]) // max(1, n))
        chunks = (min(m, rows), -1)
    out: Array = a.rechunk(chunks)
    return out


def tolerance(dtype: Any, rcond: float | None, sides: tuple[float, ...]) -> float:
    """The cutoff for small singular values, as a fraction of the largest."""
    if rcond is not None:
        return float(rcond)
    known = [side for side in sides if not math.isnan(side)]
    return float(np.finfo(dtype).eps) * max(known)
