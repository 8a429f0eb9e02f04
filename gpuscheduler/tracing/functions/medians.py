"""Medians and quantiles of few elements, by sorting networks.

The network is algorithm M of Knuth, The Art of Computer Programming 3, section 5.2.2, without the
exchanges that the result does not need. A library sorts a copy of each window of a median filter; a
kernel sorts it in registers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..array import TracedArray, as_traced, implements, reshape_array, scalar_if_point
from ..context import current, no_out, nothing, refuse
from ..elementwise import choose_elements
from ..reduce import axes_of, elements, reduced_shape

#: Elements that are sorted in registers, at most; and of which there may be NaN, on CPU devices.
MOST_SORTED, MOST_WITH_NAN = 32, 16
#: Quantiles of the same elements, at most.
MOST_QUANTILES = 8


def exchanges(n: int) -> Iterator[tuple[int, int]]:
    """Pairs of places, the lower first, which a network puts in order to sort `n` elements.

    >>> list(exchanges(3))
    [(0, 2), (0, 1), (1, 2)]
    """
    most = 1 << max(n - 1, 0).bit_length() >> 1
    p = most
    while p:
        q, r, d = most, 0, p
        while True:
            yield from ((i, i + d) for i in range(n - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1


def in_order(every: list[Any]) -> list[Any]:
    """The same elements from the least to the largest; none is NaN."""
    out = list(every)
    for i, j in exchanges(len(out)):
        out[i], out[j] = np.fmin(out[i], out[j]), np.fmax(out[i], out[j])
    return out


def _mean_of_middle(low: Any, high: Any) -> Any:
    """The mean of the middle two, in the type that NumPy has it in."""
    if low.dtype.kind in "biu":
        low, high = low.astype(np.float64), high.astype(np.float64)
    if low is high:
        return low
    if low.dtype == np.float16:
        return np.true_divide(low.astype("f4") + high.astype("f4"), np.float32(2)).astype("f2")
    return np.true_divide(low + high, low.dtype.type(2))


def _elements_along(
    x: Any, axis: Any, name: str, most: int = MOST_SORTED
) -> tuple[TracedArray, Any, list[TracedArray]]:
    """The elements along some axes."""
    x = as_traced(x)
    axes = axes_of(x, axis)
    count = math.prod(x.shape[k] for k in axes)
    if not 0 < count <= most or not x.size or x.dtype.kind not in "biuf":
        raise refuse(f"numpy.{name} of {count:,} elements of {x.dtype} has no expression")
    return x, axes, elements(x, axes)


@implements("median")
def median_of(
    a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False, keepdims: Any = False
) -> Any:  # fmt: skip
    no_out(out)
    x, axes, every = _elements_along(a, axis, "median")
    n = len(every)
    if x.dtype.kind == "b":
        every = [e.astype(np.uint8) for e in every]
    ordered = in_order(every)
    middle = _mean_of_middle(ordered[(n - 1) // 2], ordered[n // 2])
    if x.dtype.kind == "f":
        none = functools.reduce(np.logical_or, [np.isnan(e) for e in every])
        middle = choose_elements(none, x.dtype.type(np.nan), middle)
    return scalar_if_point(reshape_array(middle, reduced_shape(x, axes, keepdims)))


@implements("nanmedian")
def nanmedian_of(
    a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False,
    keepdims: Any = nothing,
) -> Any:  # fmt: skip
    no_out(out)
    most = MOST_SORTED if current.get().products else MOST_WITH_NAN
    x, axes, every = _elements_along(a, axis, "nanmedian", most)
    if x.dtype.kind != "f":
        return median_of(x, axis, None, overwrite_input, keepdims)
    none = [np.isnan(e) for e in every]
    last = x.dtype.type(np.inf)
    ordered = in_order([choose_elements(m, last, e) for m, e in zip(none, every, strict=True)])
    count = len(every) - functools.reduce(np.add, [m.astype(np.intp) for m in none])
    low, high = ordered[0], ordered[0]
    for k in range(1, len(every)):
        low = choose_elements((count - 1) // 2 == k, ordered[k], low)
        high = choose_elements(count // 2 == k, ordered[k], high)
    middle = choose_elements(count % 2 == 1, high, _mean_of_middle(low, high))
    middle = choose_elements(count == 0, x.dtype.type(np.nan), middle)
    return scalar_if_point(reshape_array(middle, reduced_shape(x, axes, keepdims)))


# ---- quantiles


def _follow_quantiles(name: str) -> None:
    skip, percent = name.startswith("nan"), name.endswith("percentile")

    @implements(name)
    def quantile_of(
        a: Any, q: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False,
        method: str = "linear", keepdims: Any = False, *, weights: Any = None,
    ) -> Any:  # fmt: skip
        no_out(out)
        known = _in_range(np.true_divide(q, 100) if percent else q)
        weak = type(q) in (int, float)
        return _quantiles(a, known, weak, axis, method, keepdims, weights, skip)


for _name in ("quantile", "percentile", "nanquantile", "nanpercentile"):
    _follow_quantiles(_name)


def _in_range(q: Any) -> Any:
    """Quantiles that are known; or an array of those that will be known when it is computed."""
    if isinstance(q, TracedArray):
        return q
    q = np.asanyarray(q)
    if not (q.dtype.kind in "biuf" and ((q >= 0) & (q <= 1)).all()):
        raise refuse("its quantiles are not in the range [0, 1]")
    return q


def _quantiles(
    a: Any, q: Any, weak: bool, axis: Any, method: Any, keepdims: Any, weights: Any, skip: bool
) -> Any:
    """Quantiles by NumPy's method "linear", of the elements that are not NaN if NaNs are skipped.

    With `weak`, the quantile was a number of Python's, which has no dtype of its own.
    """
    name = "nanquantile" if skip else "quantile"
    most = MOST_SORTED if current.get().products else MOST_WITH_NAN
    x, axes, every = _elements_along(a, tuple(axis) if isinstance(axis, list) else axis, name, most)
    if (
        method != "linear"
        or weights is not None
        or x.dtype.kind == "b"
        or q.dtype.kind not in "iuf"
    ):
        raise refuse(f"numpy.{name} of {x.dtype}, by its method {method!r}, has no expression")
    if q.ndim > 1 or q.size > MOST_QUANTILES:
        raise refuse(f"numpy.{name} of {q.size} quantiles has no expression")
    count: Any = len(every)
    none = [np.isnan(e) for e in every] if x.dtype.kind == "f" else []
    if none and skip:
        last = x.dtype.type(np.inf)
        every = [choose_elements(m, last, e) for m, e in zip(none, every, strict=True)]
        count = count - functools.reduce(np.add, [m.astype(np.intp) for m in none])
    ordered, shape = in_order(every), reduced_shape(x, axes, keepdims)

    def single_quantile(q: Any) -> Any:
        value = _quantile(ordered, count, q, weak)
        if none:
            empty = count == 0 if skip else functools.reduce(np.logical_or, none)
            value = choose_elements(empty, value.dtype.type(np.nan), value)
        return reshape_array(value, shape)

    if not q.ndim:
        return scalar_if_point(single_quantile(q))
    return np.stack([single_quantile(q[k]) for k in range(q.size)])


def _quantile(ordered: list[Any], count: Any, q: Any, weak: bool) -> Any:
    """The quantile of as many of these as `count` says."""
    last = count - 1
    index = (last.astype(q.dtype) if isinstance(last, TracedArray) else last) * q
    if index.dtype.kind in "iu":
        return _index_or_first(ordered, index)
    before = np.floor(index)
    low = _index_or_first(ordered, np.minimum(before, last))
    high = _index_or_first(ordered, np.minimum(before + 1, last))
    part = index - before
    if weak:  # it takes the type of the elements
        part = part.astype(low.dtype if low.dtype.kind == "f" else np.float64)
    difference = high - low
    value = low + difference * part
    return choose_elements(part >= 0.5, (high - difference * (1 - part)).astype(value.dtype), value)


def _index_or_first(every: list[Any], index: Any) -> Any:
    """One of these; the first where there is none of that number."""
    if not isinstance(index, TracedArray):
        return every[max(int(index), 0)]
    out = every[0]
    for k in range(1, len(every)):
        out = choose_elements(index == k, every[k], out)
    return out
