"""QR of a tall block by Cholesky factors of Gram matrices, with Householder QR as the fallback.

The method is shifted CholeskyQR, repeated until a measured test holds:

- T. Fukaya, R. Kannan, Y. Nakatsukasa, Y. Yamamoto, Y. Yanagisawa: "Shifted Cholesky QR for
  computing the QR factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42 (2020).
- Y. Yamamoto, Y. Nakatsukasa, Y. Yanagisawa, T. Fukaya: "Roundoff error analysis of the
  CholeskyQR2 algorithm", ETNA 44 (2015): the test.

Differences from these: columns are scaled to about unit length, by powers of two, inside the Gram
matrix. A step whose result is orthonormal as measured is the last one. Rows are multiplied by the
inverse of a factor only where that is as accurate as substitution.

Blocks are arrays of NumPy or CuPy. Gram matrices and factors have double precision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, TypedDict

import numpy as np

from .blocks import array_module, declare_working_memory
from .lapack import INDEFINITE, call

#: Bounds of squared column lengths, for blocks of single and double precision. Outside, squares of
#: elements or elements of factors might overflow or vanish.
SQUARES = {4: (2.0**-200, 2.0**200), 8: (2.0**-900, 2.0**900)}
#: Factors that are applied to one matrix, at most; then Householder QR.
MOST_STEPS = 4
#: The largest ‖QᴴQ - I‖ (Frobenius) from which one more step gives an orthonormal Q.
NEAR = 5 / 64
#: Q is orthonormal where ‖QᴴQ - I‖ is at most this many times n·u.
ORTHONORMAL = 4
#: Matrices of at least this many columns, and rows a column, are worth a Gram matrix.
FEWEST_COLUMNS, LEAST_ASPECT = 32, 4
#: Columns that are substituted together: by a product with the inverse of their diagonal block.
TOGETHER = 128
#: Columns of a triangle, or of a Gram matrix, that are computed together on GPUs, without what is
#: zero or below the diagonal. For 62500 x 1000 float64 on an H200, a product took 1.5 ms and not
#: 2.3, a Gram matrix 1.6 and not 2.4 (syrk: 1.9).
SKIPPED = 256
#: Elements of single precision that are converted together for a Gram matrix.
PIECE = 2**23
#: The unit roundoff of Gram matrices.
DOUBLE = 2.0**-53

#: cuBLAS's functions, by the types of their matrices.
GEMM = {"f": "sgemm", "d": "dgemm", "F": "cgemm", "D": "zgemm"}

#: The latest branches that were taken, by name, for tests; deque's append needs no lock.
branches: deque[str] = deque(maxlen=4096)


class _MultiplierBase(TypedDict):
    """How blocks of rows become those of the next Q.

    `how` is "inverse" (they are multiplied by `factor`), "solve" (substitution with `factor`),
    "keep" (they are that Q already) or "failed" (a factor broke down: Householder QR has to do it).
    """

    how: Literal["inverse", "solve", "keep", "failed"]
    factor: Any  # None for "keep" and "failed"


class Multiplier(_MultiplierBase, total=False):
    """The same, with what "solve" needs besides."""

    inverses: list[Any]  # of the factor's diagonal blocks; None where one is not accurate


class Factor(Multiplier):
    """A step of the factorization: arrays and plain values, so it can move between devices."""

    r: Any  # R up to this step; None where the first step failed
    done: bool  # whether the next Q is orthonormal
    unit: float  # unit roundoff of the matrix


#: Overflow is looked for in results, and NaN is passed on: NumPy's warnings would say it again.
quiet = np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")


@declare_working_memory(lambda block: 3 * block)
def tall_qr(x: Any) -> tuple[Any, Any]:
    """Return Q and R of a matrix of shape (m, n); R has no negative diagonal element.

    For any finite x, ‖I - QᴴQ‖ and ‖x - QR‖ / ‖x‖ are at most 30·n·√n·u, with the unit roundoff u
    of x. Where x has NaN or infinity, so have Q and R, as LAPACK gives them.

    >>> x = np.vander(np.linspace(-1, 1, 400), 40)  # of condition 1e16
    >>> q, r = tall_qr(x)
    >>> bool(abs(q.T @ q - np.eye(40)).max() < 1e-14), bool(abs(q @ r - x).max() < 1e-13)
    (True, True)
    """
    if x.dtype.kind not in "fc":
        x = x.astype(float)
    found = cholesky_qr(x) if is_tall(x.shape) and x.dtype.char in "fdFD" else None
    return householder_qr(x) if found is None else found


def is_tall(shape: tuple[int, ...]) -> bool:
    """Whether a matrix of this shape is worth a Gram matrix.

    >>> is_tall((4096, 64)), is_tall((100, 64)), is_tall((4096, 8)), is_tall((3, 4096, 64))
    (True, False, False, False)
    """
    if len(shape) != 2:
        return False
    m, n = shape
    return n >= FEWEST_COLUMNS and m >= LEAST_ASPECT * n


def cholesky_qr(x: Any) -> tuple[Any, Any] | None:
    """Return Q and R by repeated CholeskyQR, shifted where ill-conditioned.

    None where a factor breaks down, or where MOST_STEPS do not converge.
    """
    factor, q = start_factor(make_gram(x), unit_roundoff(x.dtype)), x
    for _ in range(MOST_STEPS):
        if factor["how"] == "failed":
            return None
        q = apply_factor(q, factor)
        if not factor["done"]:
            factor = next_factor(make_gram(q), factor)
            if factor["how"] != "keep":
                continue
        return q, factor["r"].astype(x.dtype)
    if factor["how"] != "failed":
        branches.append("failed: too many steps")
    return None


def unit_roundoff(dtype: Any) -> float:
    """Return the unit roundoff of a floating dtype.

    >>> unit_roundoff("f4") == 2.0**-24, unit_roundoff("c16") == 2.0**-53
    (True, True)
    """
    return float(np.finfo(dtype).eps) / 2


@quiet
def make_gram(x: Any) -> Any:
    """Return xᴴx in double precision, for x of shape (m, n)."""
    double = np.result_type(x.dtype, np.float64)
    if x.dtype == double:
        return _square_of_columns(x)
    rows = max(1, PIECE // max(1, x.shape[1]))
    total = None
    for begin in range(0, max(1, len(x)), rows):
        piece = x[begin : begin + rows].astype(double)
        product = _square_of_columns(piece)
        if total is None:
            total = product
        else:
            total += product
    return total


def _square_of_columns(x: Any) -> Any:
    """Return xᴴx; what is below its diagonal is copied where that pays."""
    n = x.shape[1]
    if n < 2 * SKIPPED or not _has_rows(x):
        return adjoint(x) @ x
    xp, size = array_module(x), x.itemsize
    gram = xp.empty((n, n), x.dtype)
    turn, pitch = xp.cuda.cublas.CUBLAS_OP_C, x.strides[0] // size
    for begin in range(0, n, SKIPPED):
        end, to = min(begin + SKIPPED, n), begin * size
        shape = end - begin, end, len(x)
        matrices = x.data.ptr + to, pitch, x.data.ptr, pitch, gram.data.ptr + to, n
        _call_gemm(xp, x.dtype.char, turn, shape, matrices)
        gram[begin:end, :begin] = adjoint(gram[:begin, begin:end])
    return gram


def adjoint(x: Any) -> Any:
    """Return the conjugate transpose of a matrix or dask matrix, a view where x is real."""
    return x.conj().T if x.dtype.kind == "c" else x.T


@quiet
def start_factor(gram: Any, unit: float) -> Factor:
    """Factor the Gram matrix of a matrix x of this unit roundoff; see `Factor`."""
    xp = array_module(gram)
    squares = gram.diagonal().real
    least, most = _read_numbers(xp, squares.min(), squares.max()) if len(gram) else (1.0, 1.0)
    lower, upper = SQUARES[4 if unit > DOUBLE else 8]
    if not (lower <= least and most <= upper):  # NaN, too
        return _failed_factor("range", None, unit)
    exponents = xp.frexp(squares)[1] // 2
    shrink, grow = _powers(xp, -exponents), _powers(xp, exponents)
    scaled = gram * shrink[:, None] * shrink
    factor, n, name = _cholesky(scaled), len(gram), "plain"
    if factor is None or _is_graded(xp, factor, 8 * (n * DOUBLE) ** 0.5):
        name = "shift"
        shift = 64 * n**0.5 * DOUBLE * scaled.diagonal().real.sum()
        factor = _cholesky(scaled + shift * xp.eye(n, dtype=gram.dtype))
        if factor is None or _is_graded(xp, factor, 0.0):
            return _failed_factor("shifted factor", None, unit)
    branches.append(name)
    chosen = _choose(xp, factor)
    if chosen["how"] == "inverse":
        chosen["factor"] = chosen["factor"] * shrink[:, None]
    else:  # columns of the factor are scaled, and so are rows of inverses
        chosen["factor"] = chosen["factor"] * grow
        ends = _column_ends(n)
        chosen["inverses"] = [
            None if i is None else i * shrink[begin:end, None]
            for i, begin, end in zip(chosen["inverses"], ends, ends[1:], strict=False)
        ]
    return {**chosen, "r": factor * grow, "done": False, "unit": unit}


@quiet
def next_factor(gram: Any, before: Factor) -> Factor:
    """Factor the Gram matrix of the Q that a step has given.

    Returns what `start_factor` does; `how` may also be "keep": that Q is orthonormal.
    """
    if before["how"] == "failed":
        return before
    if before["done"]:
        return {**before, "how": "keep", "factor": None}
    xp, unit, n = array_module(gram), before["unit"], len(gram)
    error = gram - xp.eye(n, dtype=gram.dtype)
    (size,) = _read_numbers(xp, xp.linalg.norm(error))
    if not size < np.inf:
        return _failed_factor("overflow", before, unit)
    if size <= ORTHONORMAL * n * unit:
        branches.append("orthonormal")
        return {**before, "how": "keep", "factor": None, "done": True}
    if size * size <= unit:
        # (I + Φ)ᴴ(I + Φ) = I + E up to ‖E‖², where Φ is the upper half of E
        half = xp.triu(error, 1) + xp.diag(error.diagonal() / 2)
        eye = xp.eye(n, dtype=gram.dtype)
        chosen: Multiplier = {"how": "inverse", "factor": eye - half}
        upper = eye + half
        branches.append("first order")
    else:
        found = _cholesky(gram)
        if found is None or _is_graded(xp, found, 0.0):
            return _failed_factor("factor", before, unit)
        upper = found
        chosen = _choose(xp, upper)
        branches.append("near" if size <= NEAR else "far")
    r = xp.triu(upper @ before["r"])
    return {**chosen, "r": r, "done": size <= NEAR, "unit": unit}


def end_factor(gram: Any, before: Factor) -> Factor:
    """Do what `next_factor` does, for the last step: a Q that is still far off is a failure."""
    after = next_factor(gram, before)
    if after["how"] == "failed" or after["done"]:
        return after
    return _failed_factor("too many steps", before, before["unit"])


@quiet
def apply_factor(x: Any, factor: Factor) -> Any:
    """Return a block of rows of a step's Q from that of the step before."""
    how = factor["how"]
    if how in ("keep", "failed"):
        return x
    if how == "inverse":
        return multiply_upper(x, in_rows(factor["factor"], x.dtype))
    return solve_rows(x, factor)


def multiply_upper(x: Any, upper: Any) -> Any:
    """Return x @ upper for an upper triangle, of which zeros are left out where that pays."""
    xp, n = array_module(x), x.shape[1]
    if n < 2 * SKIPPED or not _has_rows(x):
        return x @ upper
    y = xp.empty(x.shape, x.dtype)
    for begin in range(0, n, SKIPPED):
        end = min(begin + SKIPPED, n)
        _multiply_columns(y, (begin, end), x, (0, end), upper, (0, begin))
    return y


def solve_rows(x: Any, factor: Factor) -> Any:
    """Return y with y @ factor = x, by substitution of some columns at a time.

    Half of the columns are solved, their products are taken from the other half, and that is
    solved: so most products are large ones.
    """
    xp = array_module(x)
    upper, ends = in_rows(factor["factor"], x.dtype), _column_ends(x.shape[1])
    inverses = [None if i is None else in_rows(i, x.dtype) for i in factor["inverses"]]
    rest, y = xp.array(x, order="C"), xp.empty(x.shape, x.dtype)
    if len(ends) > 1:
        _solve_groups(y, rest, upper, inverses, ends, 0, len(ends) - 1)
    return y


def _solve_groups(
    y: Any, rest: Any, upper: Any, inverses: list[Any], ends: list[int], first: int, last: int
) -> None:
    """Solve some groups of columns of `rest` into `y`.

    No inner function of `solve_rows`: one that calls itself keeps these arrays until Python looks
    for garbage.
    """
    begin, end = ends[first], ends[last]
    if last - first > 1:
        half = (first + last) // 2
        middle = ends[half]
        _solve_groups(y, rest, upper, inverses, ends, first, half)
        solved, at = (begin, middle), (begin, middle)
        _multiply_columns(rest, (middle, end), y, solved, upper, at, subtract=True)
        _solve_groups(y, rest, upper, inverses, ends, half, last)
    elif inverses[first] is None:
        piece = rest[:, begin:end]
        y[:, begin:end] = _solve(upper[begin:end, begin:end], piece.T, trans=1).T
    else:
        _multiply_columns(y, (begin, end), rest, (begin, end), inverses[first], (0, 0))


def _column_ends(n: int) -> list[int]:
    """Where blocks of columns begin, and the end of the last."""
    return [*range(0, n, TOGETHER), n] if n else [0]


def in_rows(m: Any, dtype: Any) -> Any:
    """Return a matrix of a factor as its products need it: of this dtype, without gaps."""
    return array_module(m).ascontiguousarray(m, dtype)


def _has_rows(x: Any) -> bool:
    """Whether a matrix is one of CuPy's that has rows, without gaps."""
    if array_module(x) is np or not len(x):
        return False
    down, along = x.strides
    return bool(along == x.itemsize and down >= x.shape[1] * along)


def _multiply_columns(
    out: Any,
    to: tuple[int, int],
    a: Any,
    of: tuple[int, int],
    b: Any,
    at: tuple[int, int],
    subtract: bool = False,
) -> None:
    """Set columns of `out` to the product of columns of `a` and a part of `b`, or subtract it.

    `to` and `of` say which columns, from the first to behind the last, and `at` where the part of
    `b` begins. Rows of all are without gaps. CuPy would copy such parts of matrices first.
    """
    (begin, end), (first, last), (row, column) = to, of, at
    columns, inner = end - begin, last - first
    xp, size = array_module(out), out.itemsize
    if xp is np:
        product = a[:, first:last] @ b[row : row + inner, column : column + columns]
        out[:, begin:end] = out[:, begin:end] - product if subtract else product
    elif len(out):
        pitches = [m.strides[0] // size for m in (b, a, out)]
        matrices = (
            b.data.ptr + (row * pitches[0] + column) * size, pitches[0],
            a.data.ptr + first * size, pitches[1], out.data.ptr + begin * size, pitches[2],
        )  # fmt: skip
        _call_gemm(xp, out.dtype.char, 0, (columns, len(out), inner), matrices, subtract)


def _call_gemm(
    xp: Any,
    char: str,
    turn: int,
    shape: tuple[int, int, int],
    matrices: tuple[int, int, int, int, int, int],
    subtract: bool = False,
) -> None:
    """Call cuBLAS, which counts along columns first: so the right matrix comes before the left.

    `turn` is what is done to the left one, `shape` has columns, rows and the inner length, and
    `matrices` the address and the pitch of the right one, the left one and the result.
    """
    b, b_pitch, a, a_pitch, out, pitch = matrices
    _, scale = _scalar(-1 if subtract else 1, char)
    _, kept = _scalar(int(subtract), char)
    multiply = getattr(xp.cuda.cublas, GEMM[char])
    handle = xp.cuda.get_cublas_handle()
    multiply(handle, 0, turn, *shape, scale, b, b_pitch, a, a_pitch, kept, out, pitch)


@cache
def _scalar(value: int, char: str) -> tuple[Any, int]:
    """A number of a dtype in the memory of the host, and its address."""
    number = np.full((), value, char)
    return number, int(number.ctypes.data)


def invert_upper(upper: Any) -> Any:
    """Return the inverse of an upper triangular matrix."""
    return _solve(upper, array_module(upper).eye(len(upper), dtype=upper.dtype), trans=0)


@quiet
def householder_qr(x: Any) -> tuple[Any, Any]:
    """Return Q and R by the library's Householder QR, of columns that are scaled to about 1.

    Q has shape (m, k) and R (k, n) with k = min(m, n); R has no negative diagonal element.
    """
    branches.append("householder")
    xp = array_module(x)
    scaled, exponents = scale_columns(x)
    q, r = xp.linalg.qr(scaled)
    q, r = _with_positive_diagonal(xp, q, r)
    return q, r if exponents is None else r * _powers(xp, exponents).astype(r.real.dtype)


def scale_columns(x: Any) -> tuple[Any, Any]:
    """Scale columns by powers of two, where their squares might overflow or vanish.

    Returns the scaled matrix and the exponents by which its columns were divided; None for none.
    """
    if not x.size:
        return x, None
    xp = array_module(x)
    largest = abs(x).max(axis=0)
    least, most = _read_numbers(xp, largest.min(), largest.max())
    bound = 2.0 ** (np.finfo(x.dtype).maxexp // 4)
    if 1 / bound <= least and most <= bound or not most < np.inf:
        return x, None
    limit = np.finfo(x.dtype).maxexp - 8
    exponents = xp.clip(xp.frexp(largest)[1], -limit, limit)
    return x * _powers(xp, -exponents).astype(x.real.dtype), exponents


def _with_positive_diagonal(xp: Any, q: Any, r: Any) -> tuple[Any, Any]:
    diagonal = r.diagonal()
    if diagonal.dtype.kind == "c":
        sizes = abs(diagonal)
        sign = xp.where(sizes > 0, diagonal / xp.where(sizes > 0, sizes, 1), 1)
    else:
        sign = xp.where(diagonal < 0, -1, 1)
    sign = sign.astype(r.dtype)
    return q * sign, r * sign.conj()[:, None]


def _choose(xp: Any, upper: Any) -> Multiplier:
    """Return "inverse" and the inverse where that is accurate, else "solve" and the matrix.

    Both are in rows, also where the library has made columns: each block would turn them again.
    With the inverse, ‖x - QR‖ grows with the condition of R: it must be small beside n·√n. In a
    substitution, that is so for the condition of each diagonal block. Substitution by the library,
    for blocks whose condition is larger, takes several times as long on GPUs.
    """
    inverse, n = invert_upper(upper), len(upper)
    ends = _column_ends(n)
    pairs = [(upper, inverse)]
    pairs += [
        # the inverse of a triangle has the inverses of its diagonal blocks
        (upper[begin:end, begin:end], inverse[begin:end, begin:end])
        for begin, end in zip(ends, ends[1:], strict=False)
    ]
    sizes = _read_numbers(xp, *[xp.linalg.norm(m) for pair in pairs for m in pair])
    good = [a * b <= 8 * n for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
    if good[0]:
        return {"how": "inverse", "factor": xp.ascontiguousarray(inverse)}
    branches.append("solve" if all(good[1:]) else "solve by the library")
    inverses = [
        xp.ascontiguousarray(m) if fine else None
        for (_, m), fine in zip(pairs[1:], good[1:], strict=True)
    ]
    return {"how": "solve", "factor": xp.ascontiguousarray(upper), "inverses": inverses}


def _failed_factor(why: str, before: Factor | None, unit: float) -> Factor:
    branches.append(f"failed: {why}")
    r = None if before is None else before["r"]
    return {"how": "failed", "factor": None, "r": r, "done": False, "unit": unit}


def _is_graded(xp: Any, upper: Any, bound: float) -> bool:
    """Whether the least diagonal element is not above `bound` times the largest; for NaN, too."""
    if not len(upper):
        return False
    diagonal = upper.diagonal().real
    least, most = _read_numbers(xp, diagonal.min(), diagonal.max())
    return not (bound * most < least and most < np.inf)


def _read_numbers(xp: Any, *numbers: Any) -> list[float]:
    """Numbers of the device on the host: the host waits once."""
    return [float(n) for n in (numbers if xp is np else xp.stack(numbers).tolist())]


def _powers(xp: Any, exponents: Any) -> Any:
    """Powers of two in double precision; exact."""
    return xp.ldexp(xp.ones(exponents.shape), exponents.astype(np.int32))


def _cholesky(gram: Any) -> Any:
    """Return the upper factor; None where the library finds that there is none."""
    try:
        return adjoint(call(np.linalg.cholesky, INDEFINITE, gram))
    except np.linalg.LinAlgError:
        return None


def _solve(upper: Any, b: Any, trans: int) -> Any:
    """Solve with an upper triangular matrix (trans=0) or its transpose (trans=1)."""
    return _triangular_solver(array_module(upper))(upper, b, trans=trans)


def _triangular_solver(xp: Any) -> Callable[..., Any]:
    if xp is not np:
        return import_module("cupyx.scipy.linalg").solve_triangular  # type: ignore[no-any-return]
    try:
        solve = import_module("scipy.linalg").solve_triangular
    except ImportError:  # Dask does without SciPy, too
        return lambda a, b, trans: np.linalg.solve(a.T if trans else a, b)
    return partial(solve, check_finite=False)
