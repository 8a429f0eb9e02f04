"""Products of arrays: `matmul`, `dot`, `tensordot`, `einsum` and others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from ...ir.expr import DType
from ..abstract import MatrixProductArray, ViewedInput
from ..array import TracedArray, as_traced, implements, look, scalar_if_point
from ..context import current, made_in, no_out, refuse
from ..reduce import reduce
from .statistics import USUAL


@implements("outer")
def _outer(a: Any, b: Any, out: Any = None) -> Any:
    no_out(out)
    return np.multiply(as_traced(a).ravel()[:, None], as_traced(b).ravel()[None, :])


#: Integers that kernels multiply with few columns, and how many that are.
SMALL_INTEGERS = tuple(np.dtype(kind) for kind in "?bBhH")
MOST_COLUMNS = 32


# ---- products of arrays with vectors


def _contract(
    operands: Sequence[TracedArray],
    labels: Sequence[Sequence[Any]],
    out: Sequence[Any],
    dtype: DType,
) -> TracedArray:
    """The sum of products of operands whose axes have these labels, over those that are not `out`.

    Only where one operand has them all: it is read once, and the others beside it. What else there
    is, as the product of two matrices, does more with each element than a kernel here would.
    """
    context = current.get()
    lengths: dict[Any, int] = {}
    for x, names in zip(operands, labels, strict=True):
        if len(set(names)) < len(names):
            raise refuse("it takes a diagonal in a product")
        for name, n in zip(names, x.shape, strict=True):
            if lengths.setdefault(name, n) == 1:
                lengths[name] = n
            elif n not in (1, lengths[name]):
                raise ValueError(f"lengths {lengths[name]} and {n} do not match")
    long = [name for name, n in lengths.items() if n != 1]
    whole = next((n for n in labels if set(long) <= set(n)), None)
    if whole is None or not context.products:
        context.operations += (8 if dtype.kind == "c" else 2) * math.prod(lengths.values())
        made = _of_matrices(operands, labels, out, lengths, dtype) if context.matrices else None
        if made is not None:
            return made
        raise refuse("it multiplies matrices")
    left = iter([name for name in out if name in long])
    order = [next(left) if name in out else name for name in whole if name in long]
    product: Any = None
    for x, names in zip(operands, labels, strict=True):
        has = [name for name in order if name in names and x.shape[names.index(name)] != 1]

        def align_axes(a: Any, names: Sequence[Any] = names, has: Sequence[Any] = has) -> Any:
            """With its axes where the product has them."""
            axes = [names.index(name) for name in has]
            a = a.transpose([*axes, *(k for k in range(a.ndim) if k not in axes)])
            a = a[(..., *(0,) * (a.ndim - len(axes)))]
            return a[(..., *[slice(None) if name in has else None for name in order])]

        part = look(x, align_axes).astype(dtype)
        product = part if product is None else product * part
    over = tuple([k for k, name in enumerate(order) if name not in out])
    (total,) = reduce("any" if dtype.kind == "b" else "sum", product, over, (dtype,))
    shape = tuple([slice(None) if name in long else None for name in out])
    return look(total, lambda a: a[shape]) if out else scalar_if_point(total)


def _of_matrices(
    operands: Sequence[TracedArray],
    labels: Sequence[Sequence[Any]],
    out: Sequence[Any],
    lengths: Mapping[Any, int],
    dtype: DType,
) -> TracedArray | None:
    """Such a sum where it is the product of two matrices, of types for which GPUs have one.

    BLAS has it for two of one type. Small integers with few columns have kernels of their own.
    """
    if len(operands) != 2 or dtype.char not in "fdFD" or 0 in lengths.values():
        return None
    if any(x._expr.op != "input" or made_in(x._expr) for x in operands):
        return None
    if any(x.dtype not in (dtype, *SMALL_INTEGERS) for x in operands):
        return None
    long = [name for name, n in lengths.items() if n != 1]
    inner = [name for name in long if name not in out]
    outer = [name for name in out if name in long]
    if len(inner) != 1 or len(outer) != 2 or len(long) != 3:
        return None
    first = next((k for k, names in enumerate(labels) if outer[0] in names), 0)
    sides = []
    for k, pair in ((first, [outer[0], *inner]), (1 - first, [*inner, outer[1]])):
        x, names = operands[k], list(labels[k])
        if [name for name in names if name in long] not in (pair, pair[::-1]):
            return None
        axes = [names.index(name) for name in pair]
        axes += [n for n in range(x.ndim) if n not in axes]
        matrix = look(x, lambda a, axes=axes: a.transpose(axes)[(..., *(0,) * (a.ndim - 2))])  # type: ignore[misc]
        if matrix.shape != tuple([lengths[name] for name in pair]):
            return None
        number, view = matrix._expr.data
        sides.append(ViewedInput(number, view, matrix.shape, x.dtype))
    if not all(side.dtype == dtype for side in sides):
        width = next(lengths[n] for n, s in zip(outer, sides, strict=True) if s.dtype == dtype)
        if dtype.kind != "f" or width > MOST_COLUMNS:
            return None
    product = MatrixProductArray((lengths[outer[0]], lengths[outer[1]]), *sides)
    total = TracedArray(current.get().keep(product, dtype), product.shape)
    shape = tuple([slice(None) if name in long else None for name in out])
    return look(total, lambda a: a[shape])


@implements("matmul")
def _matmul(a: Any, b: Any, out: Any = None, **kwargs: Any) -> TracedArray:
    no_out(out, kwargs)
    a, b = as_traced(a), as_traced(b)
    if not a.ndim or not b.ndim:
        raise ValueError("matmul: Input operand does not have enough dimensions")
    batch = list(range(max(a.ndim, b.ndim) - 2))
    rows, columns = ["row"] * (a.ndim > 1), ["column"] * (b.ndim > 1)
    of_a, of_b = batch[len(batch) - max(a.ndim - 2, 0) :], batch[len(batch) - max(b.ndim - 2, 0) :]
    if a.shape[-1] != b.shape[-1 - len(columns)]:
        raise ValueError("matmul: Input operand 1 has a mismatch in its core dimension 0")
    labels = [*of_a, *rows, "inner"], [*of_b, "inner", *columns]
    dtype = np.result_type(a.dtype, b.dtype)
    return _contract((a, b), labels, [*batch, *rows, *columns], dtype)


@implements("tensordot")
def _tensordot(a: Any, b: Any, axes: Any = 2) -> TracedArray:
    a, b = as_traced(a), as_traced(b)
    if isinstance(axes, int):
        axes = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    one, other = ([k] if isinstance(k, int) else list(k) for k in axes)
    one = [normalize_axis_index(k, a.ndim) for k in one]
    other = [normalize_axis_index(k, b.ndim) for k in other]
    if [a.shape[k] for k in one] != [b.shape[k] for k in other]:
        raise ValueError("shape-mismatch for sum")
    of_a: list[Any] = [("a", k) for k in range(a.ndim)]
    of_b: list[Any] = [("b", k) for k in range(b.ndim)]
    for j, k in zip(one, other, strict=True):
        of_b[k] = of_a[j]
    summed = {of_a[k] for k in one}
    out = [name for name in (*of_a, *of_b) if name not in summed]
    product = _contract((a, b), (of_a, of_b), out, np.result_type(a.dtype, b.dtype))
    return TracedArray(product._expr, product.shape)


@implements("dot")
def _dot(a: Any, b: Any, out: Any = None) -> Any:
    no_out(out)
    a, b = as_traced(a), as_traced(b)
    if not a.ndim or not b.ndim:
        return np.multiply(a, b)
    return scalar_if_point(_tensordot(a, b, ([a.ndim - 1], [max(b.ndim - 2, 0)])))


@implements("inner")
def _inner(a: Any, b: Any) -> Any:
    a, b = as_traced(a), as_traced(b)
    if not a.ndim or not b.ndim:
        return np.multiply(a, b)
    return scalar_if_point(_tensordot(a, b, ([a.ndim - 1], [b.ndim - 1])))


@implements("vdot")
def _vdot(a: Any, b: Any) -> Any:
    a, b = as_traced(a), as_traced(b)
    return _dot((np.conj(a) if a.dtype.kind == "c" else a).ravel(), b.ravel())


@implements("einsum")
def _einsum(
    subscripts: Any, *operands: Any, out: Any = None, dtype: Any = None, optimize: Any = False,
    **kwargs: Any,
) -> TracedArray:  # fmt: skip
    kwargs = {k: v for k, v in kwargs.items() if (k, v) not in USUAL}
    no_out(out, kwargs)
    if not isinstance(subscripts, str) or "." in subscripts:
        raise refuse("its einsum has '...', or subscripts that are no string")
    given, arrow, wanted = subscripts.replace(" ", "").partition("->")
    if not arrow:
        letters = given.replace(",", "")
        wanted = "".join(sorted(n for n in set(letters) if letters.count(n) == 1))
    arrays = [as_traced(x) for x in operands]
    labels = [list(word) for word in given.split(",")]
    if [len(names) for names in labels] != [x.ndim for x in arrays]:
        raise ValueError("einsum: the subscripts do not fit the operands")
    if not set(wanted) <= set(given):
        raise ValueError("einsum: an output subscript is in no operand")
    result = np.result_type(*[x.dtype for x in arrays]) if dtype is None else np.dtype(dtype)
    if not all(np.can_cast(x.dtype, result) for x in arrays):
        raise TypeError(f"einsum: the operands cannot be cast safely to {result}")
    return _contract(arrays, labels, list(wanted), result)
