"""What sparse blocks ask of matrices of SciPy and CuPy: only methods that both have."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ..sparse_parts import CUPY_DTYPES, CUPYX, PYDATA, SCIPY, arrays_of, library_of, rebuild

#: Operations of two sparse matrices, where both libraries have a method.
BOTH: dict[Any, Callable[[Any, Any], Any]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: lambda a, b: a.multiply(b),
    np.maximum: lambda a, b: a.maximum(b),
    np.minimum: lambda a, b: a.minimum(b),
    np.not_equal: operator.ne,
    np.less: operator.lt,
    np.greater: operator.gt,
}


def sparse_module(array: Any) -> Any:
    """`scipy.sparse`, or `cupyx.scipy.sparse` for what is CuPy's."""
    cupys = type(array).__module__.partition(".")[0] in ("cupy", "cupyx")
    return import_module(CUPYX if cupys else SCIPY)


def as_csr(matrix: Any) -> Any:
    """A CSR matrix in canonical form: indices sorted, duplicates summed. Changes no argument."""
    library = library_of(type(matrix))
    if library == PYDATA:
        if matrix.ndim != 2:
            raise ValueError(f"a sparse block has two dimensions, and this one {matrix.ndim}")
        matrix = matrix.to_scipy_sparse()
    elif library is None:
        raise TypeError(f"{type(matrix).__name__} is no sparse matrix of SciPy, CuPy or pydata")
    if not matrix.nnz and matrix.format != "csr":
        return empty_csr(matrix, matrix.shape)
    made = matrix.tocsr()
    if not made.has_canonical_format:
        if made is matrix:
            made = made.copy()
        made.sum_duplicates()
    return made


def empty_csr(like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """A CSR matrix that stores nothing: of the library and kind of another one.

    CuPy's functions divide by lengths, and ask cuSPARSE what it refuses, where nothing is stored.
    """
    word = type(like).__name__.partition("_")[2]
    kind = getattr(sparse_module(like), f"csr_{word}")
    made = kind(tuple(int(n) for n in shape), dtype=like.dtype if dtype is None else dtype)
    made.has_canonical_format = True
    return made


def with_data(matrix: Any, data: Any) -> Any:
    """A CSR matrix with other elements, at the same places."""
    if library_of(type(matrix)) == CUPYX and data.dtype.char not in CUPY_DTYPES:
        raise TypeError(
            f"CuPy has no sparse matrices of {data.dtype}, only of bool, float32, float64, "
            "complex64 and complex128: use astype"
        )
    _, indices, indptr = arrays_of(matrix)
    return rebuild(matrix, [data, indices, indptr])


def cut(matrix: Any, parts: Sequence[Any]) -> Any:
    """Rows, then columns of a CSR matrix."""
    rows, columns = parts
    if not matrix.nnz:
        if isinstance(rows, int) and isinstance(columns, int):
            return matrix.dtype.type(0)
        return empty_csr(matrix, tuple(lengths_of_parts(matrix, parts)))
    if isinstance(rows, int) and isinstance(columns, int):
        return matrix[rows, columns]
    for axis, k in enumerate((rows, columns)):
        if isinstance(k, int):
            n = matrix.shape[axis]
            if not -n <= k < n:
                raise IndexError(f"index {k} is out of bounds for axis {axis} of length {n}")
            k = slice(k % n, k % n + 1)
        if isinstance(k, slice) and k.indices(matrix.shape[axis]) == (0, matrix.shape[axis], 1):
            continue
        matrix = matrix[k, :] if axis == 0 else matrix[:, k]
    if any(a.base is not None for a in arrays_of(matrix)):  # parts keep the whole alive
        matrix = matrix.copy()
    return as_csr(matrix)


def plain_index(k: Any) -> Any:
    """An index that both libraries take."""
    if isinstance(k, (int, np.integer)):
        return int(k)
    k = np.asarray(k) if isinstance(k, (list, tuple)) else k
    mask = isinstance(k, np.ndarray) and k.dtype == bool
    return np.flatnonzero(k) if mask else k


def lengths_of_parts(matrix: Any, parts: Sequence[Any]) -> list[int]:
    """How many rows and columns a part of a matrix has."""
    out = []
    for n, k in zip(matrix.shape, parts, strict=True):
        if isinstance(k, slice):
            out.append(len(range(*k.indices(n))))
        elif isinstance(k, int):
            out.append(1)
        else:
            out.append(int(k.sum()) if k.dtype == bool else len(k))
    return out


def parse_index(
    shape: tuple[int, ...], unit: int | None, index: Any
) -> tuple[list[Any], list[int], list[int]] | None:
    """What an index takes of the two axes of a matrix, with or without a third of length 1.

    Returns the indices of rows and columns, the places of axes of length 1 in the result, and the
    axes of the matrix that are not there any more; None where an empty slice takes nothing.

    >>> parse_index((4, 5), None, (Ellipsis, None, slice(2)))
    ([slice(None, None, None), slice(None, 2, None)], [1], [])
    """
    keys = index if isinstance(index, tuple) else (index,)
    if any(k is Ellipsis for k in keys):
        at = next(n for n, k in enumerate(keys) if k is Ellipsis)
        missing = len(shape) - sum(k is not None and k is not Ellipsis for k in keys)
        keys = (*keys[:at], *[slice(None)] * missing, *keys[at + 1 :])
    given = sum(k is not None for k in keys)
    if given > len(shape):
        raise IndexError(f"too many indices for a sparse block {shape}: {index!r}")
    parts: list[Any] = []
    units: list[int] = []
    gone: list[int] = []
    axis = 0
    for k in (*keys, *[slice(None)] * (len(shape) - given)):
        place = len(parts) + len(units) - len(gone)
        if k is None:
            units.append(place)
            continue
        if axis != unit:
            if isinstance(k, (int, np.integer)):
                gone.append(len(parts))
            parts.append(plain_index(k))
        elif isinstance(k, slice):
            if not range(*k.indices(1)):
                return None
            units.append(place)
        elif not isinstance(k, (int, np.integer)) or not -1 <= k <= 0:
            raise IndexError(f"index {k!r} for an axis of length 1 of a sparse block")
        axis += 1
    if sum(isinstance(k, np.ndarray) for k in parts) == 2:
        raise NotImplementedError("sparse blocks take one list of numbers at a time")
    return parts, units, gone
