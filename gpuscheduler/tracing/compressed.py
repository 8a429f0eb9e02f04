"""Elements that a mask selects: `values[mask]`, of which the trace does not know how many.

The trace knows the number when the function has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ..ir.expr import DType
from .array import FUNCTIONS, TracedArray, UnknownSizeArray, array_classes, as_traced, expand
from .bytecode import words
from .context import current, no_out, nothing, refuse
from .elementwise import choose_elements
from .reduce import axes_of

#: What reduces over those points at which a mask holds.
OVER_POINTS: dict[str, Callable[..., Any]] = {}

#: What processors compute of all elements as soon as NumPy picks out those that are wanted.
_CHEAP = words(
    "add subtract multiply divide negative positive absolute square sqrt maximum minimum where "
    "equal not_equal less less_equal greater greater_equal logical_and logical_or logical_not "
    "bitwise_and bitwise_or invert conjugate isnan isfinite clip copy"
)

#: Functions of NumPy's that go element by element, beyond ufuncs.
_POINTWISE = frozenset({
    np.where, np.clip, np.round, np.around, np.nan_to_num, np.isclose, np.angle, np.sinc, np.fix,
    np.isposinf, np.isneginf, np.copy,
})  # fmt: skip

#: Reductions of what a mask selects, by their functions; and those whose second argument is a type.
_REDUCING = {
    **{getattr(np, name): name for name in words(
        "sum prod mean var std any all count_nonzero min max average nansum nanprod nanmean nanvar "
        "nanstd"
    )},
    np.amin: "min", np.amax: "max", np.linalg.norm: "norm",
    np.add.reduce: "sum", np.multiply.reduce: "prod", np.minimum.reduce: "min",
    np.maximum.reduce: "max", np.logical_or.reduce: "any", np.logical_and.reduce: "all",
}  # fmt: skip

_WITH_TYPE = words("sum prod mean var std nansum nanprod nanmean nanvar nanstd")


class CompressedArray(UnknownSizeArray):
    """`values[mask]`: the values at all points, and the mask that says which count.

    The number of elements is unknown. The axes of the mask, from `axis` on, are one axis of the
    array. Element-wise operations are computed at all points; a reduction along that axis covers
    the points at which the mask holds.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: TracedArray, mask: TracedArray, axis: int):
        self._values, self._mask, self._axis = values, mask, axis
        self._shared = False  # whether it has its elements in common with another one

    @property
    def dtype(self) -> DType:
        return self._values.dtype

    @property
    def ndim(self) -> int:
        return self._values.ndim - self._mask.ndim + 1

    @property
    def flags(self) -> SimpleNamespace:
        return SimpleNamespace(owndata=True)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __repr__(self) -> str:
        if current.get(None) is not None:
            raise refuse("it needs the values of an array (as text)")
        return f"<Selected {self.dtype} of {self._values.shape}>"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and any(hasattr(k, name) for k in array_classes()):
            raise refuse(f"it reads .{name} of what a mask selects")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refuse_unknown_length(self, *_: Any, **__: Any) -> Any:
        raise refuse("it needs to know how many elements a mask selects")

    __len__ = __iter__ = __bool__ = __int__ = __float__ = __complex__ = __index__ = (
        _refuse_unknown_length
    )
    __array__ = _refuse_unknown_length
    size = shape = nbytes = property(_refuse_unknown_length)

    def __getitem__(self, index: Any) -> CompressedArray:
        if isinstance(index, tuple):
            return self._part(index)
        mask: Any = np.logical_and(self._mask, self._points(index))
        return CompressedArray(self._values, mask, self._axis)

    def _part(self, index: tuple[Any, ...]) -> CompressedArray:
        """All that is selected of some of the other axes: in NumPy a view."""
        first, *others = index or (None,)
        basic = all(type(i) is slice or isinstance(i, (int, np.integer)) for i in others)
        whole = type(first) is slice and first == slice(None)
        if self._axis or not whole or not basic:
            return self._refuse_unknown_length()  # type: ignore[no-any-return]
        every = (slice(None),) * self._mask.ndim
        out = CompressedArray(self._values[(*every, *others)], self._mask, 0)
        out._shared = self._shared = True
        return out

    def _refuse_if_shared(self) -> None:
        if self._shared:
            raise refuse("it writes to a part of what a mask selects")

    def __setitem__(self, index: Any, value: Any) -> None:
        if index is ... and value is self:
            return  # written already
        self._refuse_if_shared()
        new: Any = np.where(with_values(self, self._points(index)), value, self)
        if np.ndim(value) or new.dtype != self.dtype:
            raise refuse("it assigns an array through a mask")
        self._values = new._values

    def _points(self, index: Any) -> Any:
        """Where another mask holds that has an element for each of this one's."""
        if not isinstance(index, CompressedArray) or index.dtype != bool or self.ndim > 1:
            return self._refuse_unknown_length()
        if not have_same_selection(self, index) or index._values.shape != self._values.shape:
            return self._refuse_unknown_length()
        return index._values

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "reduce":
            axis = () if inputs[1:] or "axis" in kwargs else (0,)
            return _reduce_selected(ufunc.reduce, *inputs, *axis, **kwargs)
        if method != "__call__" or ufunc.signature is not None:
            raise refuse(f"numpy.{ufunc.__name__}.{method} of what a mask selects")
        out, where = kwargs.pop("out", None), kwargs.pop("where", True)
        (out,) = out if isinstance(out, tuple) else (out,)
        if not any(isinstance(i, CompressedArray) for i in inputs) or (
            where is not True and out is None
        ):
            raise refuse("it uses out= or where= with what a mask selects")
        result = _apply_at_all_points(ufunc, inputs, kwargs)
        if out is None:
            return result
        if where is not True:
            result = _apply_at_all_points(np.where, (where, result, out))
        if not isinstance(out, CompressedArray) or not have_same_selection(out, result):
            raise refuse("it writes into an array that it is given (out=)")
        return out._write_result(result, kwargs.get("casting", "same_kind"))

    def _write_result(self, result: CompressedArray, casting: str = "same_kind") -> CompressedArray:
        self._refuse_if_shared()
        if self._values.shape != result._values.shape:
            self._refuse_unknown_length()
        self._values = result._values.astype(self.dtype, casting=casting)
        return self

    def __array_function__(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        if func in _POINTWISE:
            return _apply_at_all_points(func, args, kwargs)
        if func in _REDUCING:
            return _reduce_selected(func, *args, **kwargs)
        if func is np.histogram and current.get().products:
            return FUNCTIONS[np.histogram](*args, **kwargs)
        module = getattr(func, "__module__", None) or "numpy"
        raise refuse(f"{module}.{func.__name__} of what a mask selects")

    _scalar = False

    def __pow__(self, other: Any) -> Any:
        return TracedArray.__pow__(cast(TracedArray, self), other)

    def __ipow__(self, other: Any) -> Any:
        return self._write_result(self**other)

    def astype(self, dtype: Any, *args: Any, copy: bool = True, **kwargs: Any) -> CompressedArray:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return with_values(self, self._values.astype(dtype, *args, **kwargs))

    def copy(self, order: str = "C") -> CompressedArray:
        return with_values(self, self._values)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> CompressedArray:
        return self.copy()

    def ravel(self, order: str = "C") -> CompressedArray:
        return self if self.ndim == 1 else self._refuse_unknown_length()

    def flatten(self, order: str = "C") -> CompressedArray:
        return self.ravel().copy()

    def conj(self) -> Any:
        return np.conjugate(self) if self.dtype.kind == "c" else self

    conjugate = conj

    def round(self, decimals: int = 0, out: Any = None) -> Any:
        no_out(out)
        return np.round(self, decimals)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **kwargs: Any) -> Any:
        no_out(out, kwargs)
        return np.clip(self, min, max)

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return np.sum(self, *args, **kwargs)

    def prod(self, *args: Any, **kwargs: Any) -> Any:
        return np.prod(self, *args, **kwargs)

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        return np.mean(self, *args, **kwargs)

    def var(self, *args: Any, **kwargs: Any) -> Any:
        no_out(None, {"correction": kwargs.get("correction")})  # which the function has alone
        return np.var(self, *args, **kwargs)

    def std(self, *args: Any, **kwargs: Any) -> Any:
        no_out(None, {"correction": kwargs.get("correction")})
        return np.std(self, *args, **kwargs)

    def min(self, *args: Any, **kwargs: Any) -> Any:
        return np.min(self, *args, **kwargs)

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return np.max(self, *args, **kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        return np.any(self, *args, **kwargs)

    def all(self, *args: Any, **kwargs: Any) -> Any:
        return np.all(self, *args, **kwargs)


def with_values(like: CompressedArray, values: TracedArray) -> CompressedArray:
    """Other values, selected by the mask of `like`."""
    return CompressedArray(values, like._mask, like._axis)


def mask_over(x: CompressedArray) -> TracedArray:
    """The mask, with axes of length one in place of the other axes of the values."""
    own = range(x._axis, x._axis + x._mask.ndim)
    around = tuple([k for k in range(x._values.ndim) if k not in own])
    return expand(x._mask, around) if around else x._mask


def nan_elsewhere(x: CompressedArray) -> TracedArray:
    """The values at all points, NaN at those that are not selected."""
    if x.dtype.kind in "iu" and x.itemsize <= 4:
        x = x.astype(np.float64)
    if x.dtype.kind != "f":
        raise refuse(f"a histogram of masked {x.dtype} has no kernel: convert it to float64")
    return choose_elements(mask_over(x), x._values, x.dtype.type(np.nan))


def have_same_selection(a: CompressedArray, b: CompressedArray) -> bool:
    """Whether both have the same axes, of which the same points are selected."""
    same = a._axis == b._axis and a.ndim == b.ndim and a._mask.shape == b._mask.shape
    return same and a._mask._expr == b._mask._expr


def _apply_at_all_points(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = {}
) -> CompressedArray:
    """Apply an element-wise function to the values at all points."""
    every = (*args, *kwargs.values())
    first = next(v for v in every if isinstance(v, CompressedArray))
    if any(isinstance(v, (list, tuple)) for v in every):
        raise refuse("it computes with a list and what a mask selects")

    if not current.get().products and function.__name__ not in _CHEAP:
        raise refuse(f"{function.__name__} of what a mask selects: NumPy computes fewer elements")

    def values(v: Any) -> Any:
        if isinstance(v, CompressedArray):
            return v._values if have_same_selection(v, first) else first._refuse_unknown_length()
        if isinstance(v, np.ndarray):
            v = as_traced(v)
        if not isinstance(v, TracedArray) or not v.shape:
            return v
        # which of its axes meets the one of the selected elements
        at = v.ndim - (first.ndim - first._axis)
        if v.ndim > first.ndim or (at >= 0 and v.shape[at] != 1):
            first._refuse_unknown_length()
        more = first._mask.ndim - 1
        return v if at < 0 or not more else expand(v, tuple(range(at, at + more)))

    result = function(*map(values, args), **{k: values(v) for k, v in kwargs.items()})
    if not isinstance(result, TracedArray) or result.ndim != first._values.ndim:
        raise refuse(f"{getattr(function, '__name__', 'it')} of what a mask selects")
    return with_values(first, result)


def _reduce_selected(function: Any, a: Any, *args: Any, **given: Any) -> Any:
    """One of NumPy's reductions, or `ufunc.reduce`."""
    name = _REDUCING.get(function)
    if name is None or not isinstance(a, CompressedArray):
        raise refuse(f"{function.__name__} of what a mask selects")
    names = ["axis", "dtype", "out"] if name in _WITH_TYPE else ["axis"]
    names = ["ord", "axis"] if name == "norm" else names
    if len(args) > len(names):
        raise refuse(f"it gives {name} many arguments")
    given = {**dict(zip(names, args, strict=False)), **given}
    keep, axis = given.pop("keepdims", False), given.pop("axis", None)
    no_out(given.pop("out", None))
    where = given.pop("where", True)
    if where is not True and where is not nothing:
        raise refuse("it uses where= with what a mask selects")
    keep = keep is not nothing and bool(keep)
    axes = axes_of(a, axis)  # type: ignore[arg-type]
    if name == "norm" and a.ndim > 1:
        raise refuse("a norm of what a mask selects along an axis")
    first, more = a._axis, a._mask.ndim - 1
    others = tuple([k if k < first else k + more for k in axes if k != first])
    if first not in axes:
        if not axes:
            raise refuse("it reduces what a mask selects along no axis")
        values = function(a._values, axis=others, keepdims=keep, **given)
        return CompressedArray(
            values, a._mask, first if keep else first - sum(k < first for k in axes)
        )
    every = tuple(sorted((*others, *range(first, first + more + 1))))
    total = OVER_POINTS[name](a._values, mask_over(a), every, **given)
    return expand(total, axes) if keep else total
