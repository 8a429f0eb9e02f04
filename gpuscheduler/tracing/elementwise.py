"""Element-wise operations on traced arrays: ufuncs, `where`, `clip`, `round`, complex parts.

NumPy's own rules for types and shapes hold: each operation asks the ufunc for its dtypes.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import numpy_private
from ..ir.expr import DType, Expr
from .array import FUNCTIONS, METHODS, TracedArray, as_traced, broadcast, scalar_if_point
from .bytecode import words
from .context import cast_to, check_dtype, constant, no_out, node_of, nothing, refuse

#: SciPy's functions that have a name in an expression.
SPECIAL = words("erf erfc erfinv erfcinv gamma gammaln ndtr ndtri expit logit i0 i1 j0 j1 y0 y1")

NUMPY_ALSO = frozenset({"exp2", "expm1", "log1p", "cbrt"})  # SciPy's ufuncs that are NumPy's too

_CLIP = numpy_private.CLIP

_COMPARE = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})


def call_ufunc(
    ufunc: Any, inputs: Sequence[Any], out: Any = None, where: Any = True, dtype: Any = None,
    casting: Any = "same_kind", signature: Any = None, order: Any = "K", subok: Any = True,
) -> Any:  # fmt: skip
    """Call a ufunc of NumPy or SciPy, with its keywords."""
    name = "matmul" if ufunc is np.matmul else _name_of(ufunc)
    if signature is not None:
        raise refuse(f"it gives {name} a signature")
    if ufunc is np.matmul:
        no_out(out, {"dtype": dtype})
        return FUNCTIONS[np.matmul](*inputs)
    if name in ("divmod", "modf"):
        no_out(out, {"dtype": dtype, "where": where if where is not True else None})
        return _divmod(*inputs) if name == "divmod" else _modf(*inputs)
    if ufunc.nout != 1:
        raise refuse(f"numpy.{name} has more than one result")
    value = trace_ufunc(ufunc, name, inputs, dtype, casting)
    if isinstance(out, tuple):
        (out,) = out
    if out is ...:
        out, value = None, TracedArray(value._expr, value.shape)
    if out is not None and not isinstance(out, TracedArray):
        raise refuse("it writes into an array that it is given (out=)")
    if where is not True:
        if out is None:
            out = TracedArray(constant(0, value.dtype), value.shape)
        elif not np.can_cast(value.dtype, out.dtype, "same_kind"):
            raise TypeError(f"Cannot cast ufunc output from {value.dtype} to {out.dtype}")
        value = choose_elements(where, value.astype(out.dtype), out)
    if out is None:
        return value
    if casting == "unsafe" and not out._scalar:
        value = value.astype(out.dtype)
    return METHODS["write_in_place"](out, value)


def _name_of(ufunc: Any) -> str:
    """The name that an expression has for a ufunc of NumPy or SciPy."""
    name = str(ufunc.__name__)
    if getattr(ufunc, "signature", None) is not None:
        raise refuse(f"numpy.{name} is not element-wise or a reduction")
    if getattr(np, name, None) is ufunc:
        return name
    if ufunc is _CLIP:
        return "clip"
    if name in SPECIAL | NUMPY_ALSO and isinstance(ufunc, np.ufunc) and _is_scipy(ufunc, name):
        return name
    raise refuse(f"{name} is not one of NumPy's element-wise functions")


def _is_scipy(ufunc: Any, name: str) -> bool:
    special = sys.modules.get("scipy.special")
    return special is not None and getattr(special, name, None) is ufunc


def trace_ufunc(
    ufunc: Any, name: str, inputs: Sequence[Any], dtype: Any = None, casting: Any = "same_kind"
) -> TracedArray:
    """The elements that a ufunc with one result gives, in NumPy's dtype."""
    weak = [type(a) if type(a) in (int, float, complex) else None for a in inputs]
    arrays = [None if w else as_traced(a) for w, a in zip(weak, inputs, strict=True)]
    kinds = [w or a.dtype for w, a in zip(weak, arrays, strict=True)]  # type: ignore[union-attr]
    signature = (*[None] * len(kinds), None if dtype is None else np.dtype(dtype))
    dtypes = ufunc.resolve_dtypes((*kinds, None), signature=signature, casting=casting)
    for d in dtypes:
        check_dtype(d)
    shape = np.broadcast_shapes(*[a.shape for a in arrays if a is not None])
    exprs: list[Expr] = []
    for array, value, d in zip(arrays, inputs, dtypes, strict=False):
        if array is not None:
            exprs.append(cast_to(broadcast(array, shape)._expr, d))
            continue
        try:
            exprs.append(constant(value, d))
        except OverflowError:
            if name not in _COMPARE or len(inputs) != 2:
                raise
            # an int that the type cannot hold: every comparison with it has one answer
            probe = [np.zeros((), a.dtype) if a is not None else v
                     for a, v in zip(arrays, inputs, strict=True)]  # fmt: skip
            return TracedArray(constant(ufunc(*probe), bool), shape, not shape)
    if all(e.op == "constant" for e in exprs):
        with np.errstate(all="ignore"):
            folded = ufunc(*[e.value for e in exprs], dtype=dtypes[-1] if dtype else None)
        return TracedArray(constant(folded, dtypes[-1]), shape, not shape)
    return TracedArray(_operation(name, exprs, dtypes[-1]), shape, not shape)


def _operation(name: str, exprs: list[Expr], dtype: Any) -> Expr:
    """A node, or what NumPy's loop for these arguments does in other words."""
    if name == "clip":
        x, low, high = exprs
        if low.op == high.op == "constant" and low.value == low.value and high.value == high.value:
            # bounds that are the same for all keep the sign of zero
            for bound, beyond in ((low, "less"), (high, "greater")):
                over = node_of(beyond, (x, bound), bool)
                x = node_of("where", (over, bound, x), dtype)
            return x
        return node_of("minimum", (node_of("maximum", (x, low), dtype), high), dtype)
    if name == "power":
        base, exponent = exprs
        if exponent.op == "constant":
            if exponent.dtype.kind == "i" and exponent.value < 0:
                raise ValueError("Integers to negative integer powers are not allowed.")
            if exponent.value == 2 and base.dtype == dtype:
                return node_of("square", (base,), dtype)
        elif exponent.dtype.kind == "i":
            raise refuse("it raises integers to integer powers that may be negative")
    if name == "divide" and _has_exact_inverse(exprs[1]):  # the same bits, and far faster on a GPU
        inverse = constant(1 / exprs[1].value, exprs[1].dtype)
        return node_of("multiply", (exprs[0], inverse), dtype)
    if name == "divide" and _is_one(exprs[0]):
        return node_of("reciprocal", (exprs[1],), dtype)  # the same bits as well
    if name == "positive" or (name == "conjugate" and exprs[0].dtype.kind != "c"):
        return exprs[0]
    return node_of(name, tuple(exprs), dtype)


def _is_one(x: Expr) -> bool:
    return x.op == "constant" and x.dtype.kind == "f" and bool(x.value == 1)


def _has_exact_inverse(divisor: Expr) -> bool:
    """Whether it is a power of two whose inverse is a normal number, too."""
    if divisor.op != "constant" or divisor.dtype.kind != "f":
        return False
    value, least = divisor.value, float(np.finfo(divisor.dtype).smallest_normal)
    fraction, _ = math.frexp(value)
    return abs(fraction) == 0.5 and least <= abs(value) <= 1 / least


def _divmod(a: Any, b: Any) -> tuple[Any, Any]:
    return np.floor_divide(a, b), np.remainder(a, b)


def _modf(x: Any) -> tuple[Any, Any]:
    x = as_traced(x)
    x = np.positive(x.astype(np.modf.resolve_dtypes((x.dtype, None, None))[0]))
    whole = np.trunc(x)
    part = choose_elements(np.isinf(x), 0.0, np.subtract(x, whole))
    return np.copysign(part, x), whole


def _complex_part(name: str, x: TracedArray) -> TracedArray:
    """The real or the imaginary parts of complex numbers: in NumPy a view, so one of the family."""
    dtype = np.zeros((), x.dtype).real.dtype
    if x._expr.op == "constant":
        expr = constant(getattr(x._expr.value, name), dtype)
    else:
        expr = node_of(name, (x._expr,), dtype)
    return TracedArray(expr, x.shape, x._scalar, of=x)


def complex_of(real: TracedArray, imag: TracedArray, dtype: DType) -> TracedArray:
    """Complex numbers of their real and imaginary parts."""
    return TracedArray(
        node_of("complex", (real._expr, imag._expr), dtype), real.shape, real._scalar
    )


def choose_elements(condition: Any, a: Any, b: Any) -> TracedArray:
    """`numpy.where`: one of two values, in their common type."""
    dtype = np.result_type(*[v.dtype if isinstance(v, TracedArray) else v for v in (a, b)])
    condition = as_traced(condition)
    arrays = [as_traced(v, dtype) if not isinstance(v, TracedArray) else v for v in (a, b)]
    shape = np.broadcast_shapes(condition.shape, *[v.shape for v in arrays])
    chosen = cast_to(broadcast(condition, shape)._expr, bool)
    left, right = (cast_to(broadcast(v, shape)._expr, dtype) for v in arrays)
    if chosen.op == "constant":
        return TracedArray(left if chosen.value else right, shape)
    if left is right:
        return TracedArray(left, shape)
    return TracedArray(node_of("where", (chosen, left, right), dtype), shape)


def clip_array(
    x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None
) -> Any:
    """Trace `numpy.clip`; the bounds are given as `a_min`/`a_max`, or as `min`/`max`."""
    low, high = (None if v is nothing else v for v in (low, high))
    low = min if low is None and min is not nothing else low
    high = max if high is None and max is not nothing else high
    if x.dtype.kind in "iu":  # a Python int beyond the range of the dtype clips nothing
        limits = np.iinfo(x.dtype)
        low = None if type(low) is int and low <= limits.min else low
        high = None if type(high) is int and high >= limits.max else high
    if low is None and high is None:
        if x.dtype.kind == "b":
            raise refuse("numpy.clip of booleans without bounds is an error")
        return TracedArray(x._expr, x.shape, not x.shape)
    if low is None:
        return np.minimum(x, high)
    if high is None:
        return np.maximum(x, low)
    return trace_ufunc(_CLIP, "clip", (x, low, high))


def round_array(x: TracedArray, decimals: int = 0) -> Any:
    """`numpy.round`, by the operations that NumPy uses."""
    decimals = operator.index(decimals)  # one of NumPy's would change the type
    if x.dtype.kind == "c":
        return complex_of(round_array(x.real, decimals), round_array(x.imag, decimals), x.dtype)
    if x.dtype.kind == "b":
        if decimals:
            raise refuse("it rounds booleans to decimals")
        return scalar_if_point(x.astype(np.float16))
    if x.dtype.kind in "iu":
        if decimals >= 0:
            return scalar_if_point(x)
        scale = 10.0**-decimals
        return (np.rint(x / scale) * scale).astype(x.dtype)
    if decimals == 0:
        return np.rint(x)
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return np.rint(x * scale) / scale
    return np.rint(x / scale) * scale


def apply(ufunc: Any, *args: Any) -> Expr:
    """A node of a ufunc for int64 or bool arguments that need no promotion."""
    exprs = tuple(a if isinstance(a, Expr) else constant(a, np.int64) for a in args)
    dtypes = ufunc.resolve_dtypes((*[e.dtype for e in exprs], None))
    return node_of(ufunc.__name__, exprs, dtypes[-1])


METHODS["__call__"], METHODS["part"] = call_ufunc, _complex_part
