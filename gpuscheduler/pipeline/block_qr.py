"""Have GPUs factor the tall blocks of Dask's own `qr` and `svd` by Cholesky factors.

Dask calls NumPy's QR for each block, and for the factors R on top of each other. On GPUs that is
slow: a Householder QR has few large products. Graphs, shapes and layers stay as they are.

Reaches into Dask (2026.1 to 2026.8): `dask.array.wrapped_qr`, the function of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from dask._task_spec import Task

from ..algorithms.blocks import array_module
from ..algorithms.tall_kernel import is_tall, tall_qr
from ..dask_private import wrapped_qr
from ..frontend.compiled_task import COMPILED
from ..frontend.graph import Graph
from ..frontend.rebuild import swap_parts
from ..frontend.task import OwnTask


def factor_block(a: Any) -> Any:
    """Return Q and R of a block, as Dask's own function for blocks does."""
    return tall_qr(a) if _is_for_products(a) else wrapped_qr(a)


def factor_matrix(a: Any, mode: str = "reduced") -> Any:
    """Return Q and R of a matrix, as `numpy.linalg.qr` does."""
    if mode == "reduced" and _is_for_products(a):
        return tall_qr(a)
    return np.linalg.qr(a, mode)  # type: ignore[call-overload]


def _is_for_products(a: Any) -> bool:
    """Whether a block is on a GPU, and tall enough for Cholesky factors to be faster."""
    on_gpu = array_module(a) is not np and getattr(a, "dtype", None) is not None
    return on_gpu and a.dtype.char in "fdFD" and is_tall(a.shape)


#: The functions that are replaced, and by which.
REPLACED: list[tuple[Any, Callable[..., Any]]] = [
    (wrapped_qr, factor_block),
    (np.linalg.qr, factor_matrix),
]


def use_tall_qr(graph: Graph) -> bool:
    """Replace QR in the tasks of a graph; return whether there was any. Changes the graph."""
    search = _Search()
    found = [key for key, task in graph.tasks.items() if search.has_qr(task)]
    known: dict[int, Any] = {}
    for key in found:
        graph.replace(key, swap_parts(graph.tasks[key], _replacement, known))
    return bool(found)


def _replacement(it: Any) -> Any:
    for function, other in REPLACED:
        if it is function:
            return other
    return it


class _Search:
    """Looks for QR in tasks; what several tasks share is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def has_qr(self, it: Any) -> bool:
        """Whether a task, or a function that is a part of one, calls QR."""
        if type(it) is Task:
            return _replacement(it.func) is not it.func
        if isinstance(it, OwnTask):
            return not it.kernels_only and any(self.has_qr(part) for part in it.parts)
        return type(it) is FunctionType and self._calls_qr(it)

    def _calls_qr(self, function: FunctionType) -> bool:
        """Whether a function that was compiled of fused tasks calls QR."""
        if function.__code__.co_filename != COMPILED:
            return False
        known = self._known.get(id(function))
        if known is None:
            self._known[id(function)] = False
            known = any(
                _replacement(v) is not v or (type(v) is FunctionType and self._calls_qr(v))
                for v in function.__globals__.values()
            )
            self._known[id(function)] = known
        return known
