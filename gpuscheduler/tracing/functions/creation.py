"""Functions that create arrays, on traced arrays.

Arrays that Dask's chunk functions create become expressions. Arrays that a user's function creates
are NumPy's, and must be small.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from dask.array import chunk as dask_chunk

from ...dask_private import broadcast_one
from ...ir.expr import Shape
from ..array import FUNCTIONS, TracedArray, as_traced, broadcast, look, read_beside
from ..bytecode import words
from ..context import check_dtype, constant, current, refuse
from ..elementwise import apply, choose_elements
from ..indexing import axis_index
from ..purity import is_array, is_nothing
from ..registry import CONVERTING, CUPY, KNOWN, KNOWN_CURRIED, NUMPY, instead_of

#: What Dask makes ones, zeros and the like of: one element, seen as many.
_UNIFORM = broadcast_one


def _uniform(
    like: Callable[..., Any], shape: Any, meta: Any = (), *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = getattr(meta, "dtype", np.dtype(float))
    if like is np.empty_like:
        like = np.zeros_like
    value = like(np.empty((), kwargs["dtype"]), *args, shape=(), **kwargs)
    return TracedArray(constant(value, value.dtype), _shape_of(shape))


KNOWN_CURRIED[_UNIFORM] = _uniform


def _shape_of(shape: Any) -> Shape:
    return tuple(map(int, shape)) if isinstance(shape, Iterable) else (int(shape),)


@instead_of(dask_chunk.arange)
def _arange(start: Any, stop: Any, step: Any, length: int, dtype: Any, like: Any = None) -> Any:
    """`start + i * step` as `numpy.arange` computes it: from its first two elements."""
    dtype = check_dtype(dtype)
    pair = np.arange(start, start + 2 * step, step, dtype=dtype)[:2]
    n = min(len(range(int(length))), len(np.broadcast_to(0, (_arange_length(start, stop, step),))))
    i = TracedArray(axis_index((n,), 0), (n,))
    if dtype.kind in "iu":
        return i.astype(dtype) * dtype.type(pair[1] - pair[0]) + pair[0]
    if dtype.kind != "f" or len(pair) < 2:
        raise refuse(f"it makes a range of type {dtype}")
    wide = np.float32 if dtype == np.float16 else dtype
    delta = np.subtract(pair[1], pair[0], dtype=wide)
    return (i.astype(wide) * delta + pair[0].astype(wide)).astype(dtype)


def _arange_length(start: Any, stop: Any, step: Any) -> int:
    return max(0, int(math.ceil((stop - start) / step)))


@instead_of(dask_chunk.linspace)
def _linspace(start: Any, stop: Any, num: int, endpoint: bool = True, dtype: Any = None) -> Any:
    """`numpy.linspace`: its last point is `stop` itself."""
    parts = num - 1 if endpoint else num
    if not all(isinstance(v, int | float | np.number) for v in (start, stop)) or parts <= 0:
        raise refuse("numpy.linspace with arrays as start or stop has no expression")
    wide = np.result_type(start, stop, float(num))
    if wide != np.float64 or num < 1:
        raise refuse(f"it spaces points of type {wide}")
    delta = np.float64(stop) - np.float64(start)
    step = delta / parts
    i = TracedArray(axis_index((num,), 0), (num,))
    scaled = i.astype(wide) * step if step != 0 else i.astype(wide) / parts * delta
    points = scaled + np.float64(start)
    if endpoint and num > 1:
        points = choose_elements(i == num - 1, np.float64(stop), points)
    dtype = np.dtype(wide if dtype is None else dtype)
    return np.floor(points).astype(dtype) if dtype.kind in "iu" else points.astype(dtype)


@instead_of(np.zeros)
def _zeros(shape: Any, dtype: Any = float, order: str = "C", **kwargs: Any) -> Any:
    return fill_array(shape, 0, dtype)


@instead_of(np.ones)
def _ones(shape: Any, dtype: Any = float, order: str = "C", **kwargs: Any) -> Any:
    return fill_array(shape, 1, dtype)


@instead_of(np.full)
def _full_of(
    shape: Any, fill_value: Any, dtype: Any = None, order: str = "C", **kwargs: Any
) -> Any:
    return fill_array(shape, fill_value, dtype)


def fill_array(shape: Any, value: Any, dtype: Any) -> TracedArray:
    shape = (shape,) if isinstance(shape, int | np.integer) else shape
    shape = tuple(operator.index(n) for n in shape)
    fill = as_traced(value if isinstance(value, TracedArray) else np.full((), value, dtype))
    fill = fill if dtype is None else fill.astype(dtype)
    return TracedArray(broadcast(fill, shape)._expr, shape)


@instead_of(np.eye)
def _eye(
    N: int, M: int | None = None, k: int = 0, dtype: Any = float, order: str = "C", **kwargs: Any
) -> Any:
    shape = (int(N), int(N if M is None else M))
    row, column = (axis_index(shape, axis) for axis in (0, 1))
    on = apply(np.equal, column, apply(np.add, row, int(k)) if k else row)
    return TracedArray(on, shape).astype(dtype)


def _like_nothing(function: Any) -> Callable[..., Any]:
    """`numpy.full_like` and its like, of an array without elements that only gives the library.

    CuPy would create the array while the function is traced.
    """

    @functools.wraps(function)
    def create_like(a: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("shape") is None or not is_nothing(a):
            return function(a, *args, **kwargs)
        return FUNCTIONS[function](fill_array((0,), 0, a.dtype), *args, **kwargs)

    return create_like


for _function in (np.full_like, np.ones_like, np.zeros_like, np.empty_like):
    KNOWN[_function] = _like_nothing(_function)
#: Elements of an array that is made while a function is traced, at most: it is made on the host,
#: where a large one takes its time.
MOST_MADE = 2**20


def _of_shape(shape: Any, *_: Any, **__: Any) -> int:
    return math.prod(_shape_of(shape))


def _of_rows(N: int, M: int | None = None, *_: Any, **__: Any) -> int:
    return int(N) * int(N if M is None else M)


def _of_range(start: Any, stop: Any = None, step: Any = 1, *_: Any, **__: Any) -> int:
    start, stop = (0, start) if stop is None else (start, stop)
    return _arange_length(start, stop, 1 if step is None else step)


def _of_points(start: Any, stop: Any, num: int = 50, *_: Any, **__: Any) -> int:
    return int(num)


#: NumPy's functions that make arrays of nothing, and how many elements.
_MAKERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(words("empty zeros ones full"), _of_shape),
    "indices": lambda dimensions, *_, **__: _of_shape(dimensions) * len(dimensions),
    "fromfunction": lambda function, shape, **_: _of_shape(shape),
    "broadcast_to": lambda array, shape, **_: _of_shape(shape),
    "eye": _of_rows, "tri": _of_rows, "identity": lambda n, *_, **__: int(n) ** 2,
    "arange": _of_range,
    **dict.fromkeys(words("linspace logspace geomspace"), _of_points),
}  # fmt: skip


def _small_array(name: str) -> Callable[..., Any]:
    make, count = getattr(np, name), _MAKERS[name]

    @functools.wraps(make)
    def create_from_scalars(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(v, TracedArray) for v in (*args, *kwargs.values())):
            elements = count(*args, **kwargs)
            if elements > MOST_MADE:
                raise refuse(f"it makes an array of {elements:,} elements")
        value = make(*args, **kwargs)
        beside = current.get().beside
        if beside is not None and beside.every and is_array(value) and value.size > 1:
            return read_beside(value, own=True).copy()
        return value

    return create_from_scalars


def _conversion_function(name: str) -> Callable[..., Any]:
    """A function that makes an array of what may be one already."""
    make = getattr(np, name)

    @functools.wraps(make)
    def create_array(a: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        inside = a if isinstance(a, (list, tuple)) else (a,)
        if not any(isinstance(v, TracedArray) for v in inside):
            return make(a, dtype, *args, **kwargs)
        x = as_traced(a)
        context, contiguous = current.get(), name in ("ascontiguousarray", "asfortranarray")
        # what is written to a copy is not written to `a`
        copies = name == "array" or (name == "ascontiguousarray" and not context.is_beside(x))
        copy = kwargs.get("copy", copies)
        out = x.astype(x.dtype if dtype is None else dtype, copy=bool(copy))
        own = not any(x._family is given for given in context.given)
        if contiguous and own and out.dtype == x.dtype:  # whether it is a copy is not known
            out = TracedArray(out._expr, out.shape, of=x)
        elif out._scalar:
            out = TracedArray(out._expr, ())
        missing = kwargs.get("ndmin", int(contiguous)) - out.ndim
        return look(out, lambda a: a[(None,) * missing]) if missing > 0 else out

    return create_array


def _sending_function(name: str) -> Callable[..., Any]:
    """Return a traced form of a CuPy function that may copy arrays from the host.

    NumPy has no such copy: traced arrays are refused, except those that are on the devices before
    the traced function runs.
    """
    make, beside = getattr(np, name), _conversion_function(name)

    @functools.wraps(make)
    def copy_array(a: Any, *args: Any, **kwargs: Any) -> Any:
        there = isinstance(a, TracedArray) and current.get().is_beside(a)
        return (beside if there else make)(a, *args, **kwargs)

    return copy_array


for _name in _MAKERS:
    NUMPY.enter(_name, _small_array(_name))
    CUPY.enter(_name, getattr(NUMPY, _name))
for _name in CONVERTING - {"asfortranarray"}:
    NUMPY.enter(_name, _conversion_function(_name))
for _name in CONVERTING:
    CUPY.enter(_name, _sending_function(_name))
for _name in NUMPY.own:
    KNOWN.setdefault(getattr(np, _name), getattr(NUMPY, _name))  # under a name of its own
