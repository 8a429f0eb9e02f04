"""Eigenvalues and eigenvectors, of one matrix on one device, of stacks on all devices.

There is no method here for a matrix that does not fit one device. NVIDIA's libraries for that need
one process for each GPU (cuSOLVERMp), or are deprecated (cuSOLVERMg).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from dask.array.core import Array

from . import lapack
from .blocks import array_module
from .matrices import as_stack, call_on_stacks, call_on_whole, fits, inexact_dtype, real_part

#: Matrices of the argument's size that a call needs beside as many for its working memory.
SIZES = {"eigh": 2, "eigvalsh": 1, "eig": 4, "eigvals": 2}
ALTERNATIVES = (
    "For a few eigenpairs, use an iterative method that only multiplies, such as "
    "scipy.sparse.linalg.lobpcg with a LinearOperator of this array; for singular values of a "
    "matrix with few columns, gpuscheduler.linalg.svd."
)


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors in columns."""

    eigenvalues: Array
    eigenvectors: Array


class EigResult(NamedTuple):
    """Eigenvalues in any order, and eigenvectors in columns."""

    eigenvalues: Array
    eigenvectors: Array


def eigh(a: Any, UPLO: str = "L") -> EighResult:
    """Return eigenvalues and eigenvectors of symmetric or Hermitian matrices.

    Parameters
    ----------
    a
        Array of shape `(..., n, n)`: real or complex numbers of 32 or 64 bits each, integers or
        booleans.
    UPLO
        The triangle that is read: `"L"` or `"U"`.

    Returns
    -------
    eigenvalues, eigenvectors
        Arrays of shape `(..., n)`, ascending, and `(..., n, n)`, in the chunks of `a`; of stacks,
        in chunks of whole matrices. One call on one device decomposes a matrix (`syevd`).

    Raises
    ------
    NotImplementedError
        If one matrix needs more memory than half of one device's.
    numpy.linalg.LinAlgError
        When computed, if there is NaN or infinity, or the method does not converge; here, if a
        matrix is not square.

    Examples
    --------
    >>> import dask.array as da
    >>> w, v = eigh(da.from_array(np.array([[2.0, 9.0], [0.0, 1.0]]), chunks=1))
    >>> w.compute().tolist()
    [1.0, 2.0]
    """
    kinds = ["vector of reals", "matrix"]
    return EighResult(*_decompose("eigh", a, kinds, _eigh, UPLO=_triangle("eigh", UPLO)))


def eigvalsh(a: Any, UPLO: str = "L") -> Array:
    """Return eigenvalues of symmetric or Hermitian matrices, ascending.

    Parameters, result and errors are those of `eigh`.

    >>> import dask.array as da
    >>> eigvalsh(da.from_array(np.array([[2.0, 9.0], [0.0, 1.0]]), chunks=1)).compute().tolist()
    [1.0, 2.0]
    """
    kinds = ["vector of reals"]
    (values,) = _decompose("eigvalsh", a, kinds, _eigvalsh, UPLO=_triangle("eigvalsh", UPLO))
    return values


def eig(a: Any) -> EigResult:
    """Return eigenvalues and right eigenvectors of any square matrices, as complex numbers.

    NumPy gives real numbers where all eigenvalues are; that depends on values, and the dtype of a
    lazy array does not.

    Parameters
    ----------
    a
        Array of shape `(..., n, n)`: real or complex numbers of 32 or 64 bits each, integers or
        booleans.

    Returns
    -------
    eigenvalues, eigenvectors
        Complex arrays of shape `(..., n)`, in any order, and `(..., n, n)`, in the chunks of `a`;
        of stacks, in chunks of whole matrices. One call on one device decomposes a matrix (`geev`).

    Raises
    ------
    NotImplementedError
        If one matrix needs more memory than half of one device's.
    numpy.linalg.LinAlgError
        When computed, if there is NaN or infinity, or the method does not converge; here, if a
        matrix is not square.

    Examples
    --------
    >>> import dask.array as da
    >>> w, v = eig(da.from_array(np.array([[0.0, -1.0], [1.0, 0.0]]), chunks=1))
    >>> np.sort(w.compute().imag).tolist()
    [-1.0, 1.0]
    """
    return EigResult(*_decompose("eig", a, ["complex vector", "complex matrix"], _eig))


def eigvals(a: Any) -> Array:
    """Return eigenvalues of any square matrices, as complex numbers in any order.

    Parameters, result and errors are those of `eig`.

    >>> import dask.array as da
    >>> eigvals(da.eye(2, chunks=1)).compute().tolist()
    [(1+0j), (1+0j)]
    """
    (values,) = _decompose("eigvals", a, ["complex vector"], _eigvals)
    return values


def _triangle(function: str, uplo: str) -> str:
    if not isinstance(uplo, str) or uplo.upper() not in ("L", "U"):
        raise ValueError(f"{function}: UPLO={uplo!r}: must be 'L' or 'U'")
    return uplo.upper()


def _decompose(
    function: str, a: Any, kinds: Sequence[str], run: Callable[..., Any], **options: Any
) -> list[Array]:
    """Arrays of what a function makes of matrices."""
    a = as_stack(function, a)
    dtype, n = inexact_dtype(function, a.dtype), a.shape[-1]
    dtypes = [_dtype_of(kind, dtype) for kind in kinds]
    fits(a, SIZES[function] * n * n * dtype.itemsize, of=function, hint=ALTERNATIVES)
    if a.ndim > 2:
        dims = ",".join("(n)" if "vector" in kind else "(n,n)" for kind in kinds)
        made = call_on_stacks(run, f"(n,n)->{dims}", a.astype(dtype), dtypes=dtypes, **options)
        return list(made) if len(kinds) > 1 else [made]
    outputs = [
        ((n,) if "vector" in kind else (n, n), of) for kind, of in zip(kinds, dtypes, strict=True)
    ]
    made = call_on_whole(run, [a], dtype, outputs, **options)
    return [x.rechunk(a.chunks[-x.ndim :]) for x in made]


def _dtype_of(kind: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if "reals" in kind:
        return real_part(dtype)
    return np.result_type(dtype, np.complex64) if "complex" in kind else dtype


def _eigh(a: Any, UPLO: str) -> tuple[Any, Any]:
    _check_finite(a, UPLO)
    values, vectors = lapack.call(np.linalg.eigh, lapack.NOT_CONVERGED, a, UPLO=UPLO)
    return values, vectors


def _eigvalsh(a: Any, UPLO: str) -> Any:
    _check_finite(a, UPLO)
    return lapack.call(np.linalg.eigvalsh, lapack.NOT_CONVERGED, a, UPLO=UPLO)


def _eig(a: Any) -> tuple[Any, Any]:
    _check_finite(a)
    values, vectors = lapack.call(np.linalg.eig, lapack.NOT_CONVERGED, a)
    dtype = np.result_type(a.dtype, np.complex64)
    return values.astype(dtype), vectors.astype(dtype)


def _eigvals(a: Any) -> Any:
    _check_finite(a)
    values = lapack.call(np.linalg.eigvals, lapack.NOT_CONVERGED, a)
    return values.astype(np.result_type(a.dtype, np.complex64))


def _check_finite(a: Any, uplo: str | None = None) -> None:
    """Raise for NaN and infinity, of which libraries make different things."""
    xp = array_module(a)
    read = a if uplo is None else xp.tril(a) if uplo == "L" else xp.triu(a)
    if not xp.isfinite(read).all():
        raise np.linalg.LinAlgError("Array must not contain infs or NaNs")
