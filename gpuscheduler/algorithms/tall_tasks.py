"""Tasks of the graphs of `tall_graph`: what they do to a block, or to small factors."""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import array_module, declare_working_memory
from .lapack import SINGULAR, call
from .tall_kernel import (
    Factor,
    adjoint,
    apply_factor,
    householder_qr,
    make_gram,
    quiet,
    solve_rows,
)

NO_SVD = "SVD did not converge"


def householder_bytes(block: int, *others: int) -> int:
    """Bytes that Householder QR of a block takes: a scaled copy, the factored one, and Q.

    A task that may have to fall back to it declares them, whether it will or not.
    """
    return 3 * block


def make_next_gram(x: Any, factor: Factor) -> Any:
    """Return the Gram matrix of a block; None where the factorization is over."""
    return None if factor["done"] or factor["how"] == "failed" else make_gram(x)


@quiet
def add_known(values: list[Any]) -> Any:
    """Add arrays up in their order, without those that are None; None where there is none."""
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return known[0] if known else None
    total = known[0] + known[1]
    for value in known[2:]:
        total += value
    return total


def make_none() -> None:
    """Return None: what nobody needs."""


def keep_factor(pair: tuple[Any, Any], unit: float) -> Factor:
    """Return the factor that says that a block's Q is what it should be."""
    _check_rows(pair[1])
    return {"how": "keep", "factor": None, "r": pair[1], "done": True, "unit": unit}


@declare_working_memory(householder_bytes)
def fallback_r(x: Any, factor: Factor) -> Any:
    """Return the Householder R of a block where Cholesky factors broke down; else None."""
    return householder_qr(x)[1] if factor["how"] == "failed" else None


@quiet
def stack_r(factor: Factor, parts: list[Any]) -> Any:
    """Return the last step of TSQR where Cholesky factors broke down; else None.

    That is a dict of R and of a small Q for each block.
    """
    if factor["how"] != "failed":
        return None
    xp = array_module(parts[0])
    ends = np.cumsum([len(p) for p in parts])
    q, r = householder_qr(xp.concatenate(parts))
    _check_rows(r)
    before = factor["r"]
    if before is not None:
        r = xp.triu(r.astype(before.dtype) @ before)
    return {"q": [q[e - len(p) : e] for e, p in zip(ends, parts, strict=True)], "r": r}


def _check_rows(r: Any) -> None:
    if len(r) < r.shape[1]:
        raise ValueError(
            f"a matrix of unknown length has {len(r)} rows and {r.shape[1]} columns, and must not "
            "have fewer rows: call x.compute_chunk_sizes() first"
        )


@declare_working_memory(householder_bytes)
@quiet
def end_q(x: Any, factor: Factor, stack: Any, i: int) -> Any:
    """Return block i of Q."""
    return householder_qr(x)[0] @ stack["q"][i] if stack is not None else apply_factor(x, factor)


def end_r(factor: Factor, stack: Any, dtype: str) -> Any:
    """Return R."""
    return (factor["r"] if stack is None else stack["r"]).astype(dtype)


def svd_of_r(factor: Factor, stack: Any) -> tuple[Any, Any, Any]:
    """Return U, the singular values and Vᴴ of R."""
    r = factor["r"] if stack is None else stack["r"]
    xp = array_module(r)
    if not bool(xp.isfinite(r).all()):
        raise np.linalg.LinAlgError(f"{NO_SVD}: the matrix has NaN or infinity")
    u, s, vh = call(np.linalg.svd, NO_SVD, r, full_matrices=False)
    return u, s, vh


def take_part(parts: tuple[Any, Any, Any], part: int, dtype: str) -> Any:
    """Return one of the matrices of an SVD."""
    return parts[part].astype(dtype)


@declare_working_memory(householder_bytes)
@quiet
def end_product(x: Any, factor: Factor, stack: Any, i: int, matrix: Any) -> Any:
    """Return block i of Q @ matrix, in one pass where the factor is an inverse."""
    matrix = matrix.astype(x.dtype)
    if stack is not None:
        return householder_qr(x)[0] @ (stack["q"][i] @ matrix)
    if factor["how"] == "inverse":
        return x @ (factor["factor"] @ matrix).astype(x.dtype)
    if factor["how"] == "solve":
        x = solve_rows(x, factor)
    return x @ matrix


@declare_working_memory(householder_bytes)
def end_u(x: Any, factor: Factor, stack: Any, i: int, parts: tuple[Any, Any, Any]) -> Any:
    """Return block i of U."""
    return end_product(x, factor, stack, i, parts[0])


@declare_working_memory(householder_bytes)
def end_pinv(
    x: Any, factor: Factor, stack: Any, i: int, parts: tuple[Any, Any, Any], cutoff: float
) -> Any:
    """Return block i of the pseudoinverse."""
    u, s, vh = parts
    return adjoint(end_product(x, factor, stack, i, u * _invert_values(s, cutoff) @ vh))


@declare_working_memory(householder_bytes)
@quiet
def project_rows(x: Any, factor: Factor, stack: Any, i: int, b: Any) -> Any:
    """Return what block i adds to Qᴴ b."""
    return adjoint(end_q(x, factor, stack, i)) @ b


def solve_by_svd(parts: tuple[Any, Any, Any], b: Any, cutoff: float, dtype: str) -> Any:
    """Return the shortest x that minimizes ‖b - R x‖, by the SVD of R."""
    u, s, vh = parts
    return (adjoint(vh) @ (_invert_values(s, cutoff)[:, None] * (adjoint(u) @ b))).astype(dtype)


def solve_adjoint(parts: tuple[Any, Any, Any], b: Any, cutoff: float) -> Any:
    """Return y such that Q y is the shortest x that minimizes ‖b - (Q R)ᴴ x‖."""
    u, s, vh = parts
    return u @ (_invert_values(s, cutoff)[:, None] * (vh @ b))


def _invert_values(s: Any, cutoff: float) -> Any:
    """Inverses of singular values of shape (..., k); 0 up to `cutoff` times the largest."""
    xp, known = array_module(s), s > cutoff * s[..., :1]
    return xp.where(known, 1 / xp.where(known, s, 1), 0)


# ---- stacks of matrices


def qr_of_stack(x: Any) -> tuple[Any, Any]:
    """Return Q and R of matrices of shape (..., m, n)."""
    q, r = call(np.linalg.qr, "QR failed", x)
    return q, r


def svd_of_stack(x: Any) -> tuple[Any, Any, Any]:
    """Return U, S and Vᴴ of matrices of shape (..., m, n)."""
    u, s, vh = call(np.linalg.svd, NO_SVD, x, full_matrices=False)
    return u, s, vh


def svdvals_of_stack(x: Any) -> Any:
    """Return the singular values of matrices of shape (..., m, n)."""
    return call(np.linalg.svd, NO_SVD, x, compute_uv=False)


def pinv_of_stack(x: Any, rcond: float | None) -> Any:
    """Return the pseudoinverses of matrices of shape (..., m, n)."""
    u, s, vh = svd_of_stack(x)
    part = np.finfo(x.dtype).eps * max(x.shape[-2:]) if rcond is None else rcond
    inverse = _invert_values(s, part)
    return (vh.conj().swapaxes(-2, -1) * inverse[..., None, :]) @ u.conj().swapaxes(-2, -1)


@quiet
def cond_of_stack(x: Any, p: Any) -> Any:
    """Return the condition numbers of square matrices in a norm that is no 2-norm.

    A singular matrix has infinity, and NaN in a matrix makes its number NaN, as in NumPy.
    """
    xp = array_module(x)
    if not x.shape[-1]:
        raise np.linalg.LinAlgError("cond: the matrix is empty")
    try:
        inverse = call(np.linalg.inv, SINGULAR, x)
    except np.linalg.LinAlgError:
        if x.ndim == 2:
            return xp.where(xp.isnan(x).any(), np.nan, np.inf).astype(x.real.dtype)
        return xp.stack([cond_of_stack(m, p) for m in x])
    sizes = [xp.linalg.norm(m, p, axis=(-2, -1)) for m in (x, inverse)]
    numbers = xp.asarray(sizes[0] * sizes[1])
    lost = xp.isnan(numbers) & ~xp.isnan(x).any(axis=(-2, -1))
    return xp.where(lost, numbers.dtype.type(np.inf), numbers)
