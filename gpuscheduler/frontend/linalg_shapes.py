"""Shapes that factorizations and stacks make of known shapes.

Dask does not know the shapes of blocks between the steps of `da.linalg`, which come as tuples. The
shapes here follow the documentation of NumPy and SciPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _inexact_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.kind in "fc" else np.dtype(float)


def _qr(a: Array) -> tuple[Array, ...]:
    (*many, m, n), dtype = a.shape, _inexact_dtype(a.dtype)
    k = min(m, n)
    return Array((*many, m, k), dtype), Array((*many, k, n), dtype)


def _svd(a: Array) -> tuple[Array, ...]:
    """With `full_matrices`, as it is called."""
    (*many, m, n), dtype = a.shape, _inexact_dtype(a.dtype)
    values = Array((*many, min(m, n)), np.empty(0, dtype).real.dtype)
    return Array((*many, m, m), dtype), values, Array((*many, n, n), dtype)


def _lu(a: Array) -> tuple[Array, ...]:
    (*many, m, n), dtype = a.shape, _inexact_dtype(a.dtype)
    k, real = min(m, n), np.empty(0, dtype).real.dtype
    return Array((*many, m, m), real), Array((*many, m, k), dtype), Array((*many, k, n), dtype)


def _vstack(*rows: Array) -> Array:
    """Of matrices."""
    dtype = np.result_type(*[a.dtype for a in rows])
    return Array((sum([a.shape[0] for a in rows]), *rows[0].shape[1:]), dtype)


#: By the library and the name of a function; Dask has wrappers of some.
MAKE: dict[tuple[str, str], Callable[..., Array | tuple[Array, ...]]] = {
    ("numpy", "qr"): _qr,
    ("dask", "_wrapped_qr"): _qr,
    ("numpy", "svd"): _svd,
    ("scipy", "lu"): _lu,
    ("numpy", "vstack"): _vstack,
}


def name_of(function: Any) -> tuple[str, str]:
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    return str(module).partition(".")[0], str(name)


def result_shapes(
    name: tuple[str, str], arrays: Sequence[Array]
) -> Array | tuple[Array, ...] | None:
    """What a function makes; None for what is not known here.

    >>> a = Array((1000, 20), np.dtype("f4"))
    >>> q, r = result_shapes(("numpy", "qr"), [a])
    >>> q.shape, r.shape, result_shapes(("numpy", "vstack"), [r, r]).shape
    ((1000, 20), (20, 20), (40, 20))
    """
    if name not in MAKE or not arrays or any(len(a.shape) < 2 for a in arrays):
        return None
    return MAKE[name](*arrays)
