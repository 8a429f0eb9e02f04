"""Searches in sorted tables: `searchsorted`, `digitize`, `interp`, `isin`, `bincount`."""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

import numpy as np

from ...ir.bins import comparison_dtype
from ..array import TracedArray, as_traced, implements, scalar_if_point
from ..context import NOT_KNOWN, cast_to, check_dtype, constant, refuse
from ..elementwise import choose_elements, clip_array
from .lookup import constant_array, integer_bounds, look_up_elements, on_gpus
from .statistics import count_numbers, evenly_binned, weigh_numbers

#: Elements of a table that a value is compared with one by one, where they are not in order.
MOST_COMPARED = 64
#: ... and where they are: a search asks for fewer.
FEW_COMPARED = 8
#: Edges that each value is compared with, at most, where others are searched.
MOST_EDGES = 32
#: Elements of a table that is searched.
MOST_SEARCHED = 2**30


@implements("bincount")
def _bincount(x: Any, weights: Any = None, minlength: Any = 0) -> TracedArray:
    """Of numbers that are less than `minlength`: of others there would be more results."""
    x, length = as_traced(x), operator.index(minlength)
    if x.ndim != 1 or x.dtype.kind not in "biu":
        raise refuse(f"it counts {x.dtype} of shape {x.shape}")
    least, most = integer_bounds(x._expr)
    if least < 0 or most >= length:
        raise refuse("numbers in its bincount are not known to be from 0 to minlength - 1")
    if weights is None or not x.size:  # of nothing NumPy gives counts
        return count_numbers(x.astype(np.int64), length)
    return weigh_numbers(x.astype(np.int64), length, weights)


# ------------------------------------------------------------------------------------------------
# Tables in ascending order.


class _SortedTable:
    """Numbers in ascending order, NaNs last, in the dtype in which they are compared.

    With `descends`, the order is the other way round.
    """

    def __init__(self, table: Any, dtype: Any, descends: Any = None):
        self.dtype, self.descends = check_dtype(dtype), descends
        self.known: np.ndarray[Any, Any] | None = None
        if isinstance(table, TracedArray):
            self.array = table
        else:
            self.known = np.asarray(table).astype(self.dtype)
            self.array = constant_array(self.known)
        self.size = self.array.size
        real = self.dtype.kind == "f"
        self.has_nan = real and (self.known is None or bool(np.isnan(self.known).any()))

    def elements_at(self, places: Any) -> TracedArray:
        """Its elements at these places, each of which is one of its own."""
        number = as_traced(places)
        if self.descends is not None:
            number = choose_elements(self.descends, np.int64(self.size - 1) - number, number)
        found = look_up_elements(self.array, {0: number}, 0)
        return found.astype(self.dtype)

    def place(self, value: TracedArray, side: str) -> TracedArray:
        """How many of its elements are less than a value, or, on the side "right", not greater."""
        value = value.astype(self.dtype)
        if not self.size:
            return TracedArray(constant(0, np.int64), value.shape)
        found = self._find_even_bin(value) if side == "right" else None
        if found is not None:
            return found
        number = value.dtype.kind == "f"

        def is_before(place: Any) -> Any:
            t = self.elements_at(place)
            if not number:
                return t < value if side == "left" else t <= value
            if not self.has_nan:  # and a NaN lies behind them all
                return ~(t >= value) if side == "left" else ~(t > value)
            if side == "left":
                return (t < value) | (np.isnan(value) & ~np.isnan(t))
            return ~((value < t) | (np.isnan(t) & ~np.isnan(value)))

        # a search of as many steps for each value
        base: Any = TracedArray(constant(0, np.int64), value.shape)
        left = self.size
        while left > 1:
            half = left // 2
            base = choose_elements(
                is_before(base + np.int64(half - 1)), base + np.int64(half), base
            )
            left -= half
        return cast(TracedArray, base + is_before(base).astype(np.int64))

    def _find_even_bin(self, value: TracedArray) -> TracedArray | None:
        """The same of numbers that lie evenly."""
        if self.known is None or self.has_nan or self.size < 2:
            return None
        found = evenly_binned(value, self.known)
        if found is None:
            return None
        first, last = self.known[0], self.known[-1]
        return choose_elements(
            value < first,
            np.int64(0),
            choose_elements(value < last, found + np.int64(1), np.int64(self.size)),
        )


def _checked_table(table: Any, what: str) -> Any:
    table = table if isinstance(table, TracedArray) else np.asarray(table)
    if table.ndim != 1 or table.dtype.kind not in "iuf" or table.size > MOST_SEARCHED:
        raise refuse(f"{what} {table.dtype} of shape {table.shape}")
    return table


@implements("searchsorted")
def _trace_searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    on_gpus("it searches in an array")
    if sorter is not None or side not in ("left", "right"):
        raise refuse("searchsorted with sorter= has no expression")
    table, v = _checked_table(a, "it searches in"), as_traced(v)
    if v.dtype.kind not in "iuf":
        raise refuse(f"it searches for {v.dtype}")
    known = _SortedTable(table, np.result_type(table.dtype, v.dtype))
    return scalar_if_point(known.place(v, side).astype(np.intp))


@implements("digitize")
def _digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """How many edges are not above each value, or above it where they descend."""
    x, given = as_traced(x), isinstance(bins, TracedArray)
    edges = _checked_table(bins, "it sorts into bins with edges of")
    if not edges.size or x.dtype.kind not in "iuf":
        raise refuse(f"it sorts {x.dtype} into bins of {edges.size} edges")
    if not given:
        np.digitize(np.empty(0, x.dtype), edges, right)  # it says what is wrong with them
    if edges.size > MOST_EDGES:
        on_gpus(f"it sorts {x.dtype} into bins of {edges.size} edges")
        return _among_many(x, edges, right)
    kind = comparison_dtype(x.dtype, edges.dtype)
    if kind is None or not (given or np.array_equal(edges, edges)):  # they have holes
        raise refuse(f"it sorts {x.dtype} into bins with edges of {edges.dtype}")
    value, edges = TracedArray(cast_to(x._expr, kind), x.shape), edges.astype(kind)
    found = TracedArray(constant(0, np.intp), x.shape)
    for k in range(edges.size):
        found = found + (value <= edges[k] if right else value < edges[k])
    # what is not a number lies behind all edges
    descends = edges[0] > edges[-1]
    other = edges.size - found
    return scalar_if_point(
        choose_elements(descends, found, other) if given else found if descends else other
    )


def _among_many(x: TracedArray, edges: Any, right: bool) -> Any:
    dtype, side = np.result_type(edges.dtype, x.dtype), "left" if right else "right"
    if isinstance(edges, TracedArray):
        table = _SortedTable(edges, dtype, edges[0] > edges[-1])
        found = table.place(x, side)
        return scalar_if_point(choose_elements(table.descends, table.size - found, found))
    descends = bool(edges[0] > edges[-1])
    found = _SortedTable(edges[::-1] if descends else edges, dtype).place(x, side)
    return scalar_if_point(np.int64(edges.size) - found if descends else found)


@implements("interp")
def _interp(
    x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> Any:
    """Along straight lines from point to point, as NumPy computes it, in double precision."""
    on_gpus("it interpolates in a table")
    x = as_traced(x)
    if period is not None or any(isinstance(v, TracedArray) for v in (left, right)):
        raise refuse("numpy.interp with period=, or arrays as left= or right=, has no expression")
    xp, fp = _checked_table(xp, "it interpolates at"), _checked_table(fp, "it interpolates in")
    if x.dtype.kind not in "iufb" or xp.shape != fp.shape or not xp.size:
        raise refuse(f"it interpolates in {xp.shape} points that have {fp.shape} values")
    points, values = _SortedTable(xp, np.float64), _SortedTable(fp, np.float64)
    x, last = x.astype(np.float64), np.int64(points.size - 1)
    ends = values.elements_at(np.int64(0)), values.elements_at(last)
    first, beyond = (
        end if given is None else np.float64(given)
        for end, given in zip(ends, (left, right), strict=True)
    )
    inner: Any = ends[0]
    if points.size > 1:
        inner = choose_elements(
            x == points.elements_at(last), ends[1], _interpolate(x, points, values)
        )
        inner = choose_elements(np.isnan(x), x, inner)
    found = choose_elements(x > points.elements_at(last), beyond, inner)
    return scalar_if_point(choose_elements(x < points.elements_at(np.int64(0)), first, found))


def _interpolate(x: TracedArray, points: _SortedTable, values: _SortedTable) -> Any:
    """On the line from the point before to the one behind."""
    # for a NaN, and beyond the ends, any place inside will do
    last = np.int64(points.size - 2)
    place = clip_array(points.place(x, "right") - np.int64(1), np.int64(0), last)
    here, value = points.elements_at(place), values.elements_at(place)
    there, later = points.elements_at(place + np.int64(1)), values.elements_at(place + np.int64(1))
    slope: Any = (later - value) / (there - here)
    finite = False
    if points.known is not None and values.known is not None:
        with np.errstate(all="ignore"):
            slopes = constant_array(np.diff(values.known) / np.diff(points.known))
        slope = look_up_elements(slopes, {0: place}, 0)
        finite = bool(np.isfinite(points.known).all() and np.isfinite(values.known).all())
    found = slope * (x - here) + value
    if not finite:
        again = slope * (x - there) + later
        again = choose_elements(np.isnan(again) & (value == later), value, again)
        found = choose_elements(np.isnan(found), again, found)
    return choose_elements(x == here, value, found)


# ------------------------------------------------------------------------------------------------
# Sets.


@implements("isin")
def _isin(
    element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *,
    kind: Any = None,
) -> Any:  # fmt: skip
    on_gpus("it looks for elements in a set")
    if not isinstance(assume_unique, bool) or not isinstance(invert, bool):
        raise refuse("how it looks for elements in a set depends on values")
    x = as_traced(element)
    tests = test_elements
    if not isinstance(tests, TracedArray):
        tests = np.asarray(tests)
        if tests.dtype.kind not in "biufc":
            raise refuse(f"it looks for elements of {tests.dtype}")
        tests = np.unique(tests[tests == tests])  # NaN is no element of a set
    size = tests.size
    if not size:
        found: Any = TracedArray(constant(False, "?"), x.shape)
    elif isinstance(tests, TracedArray) or size <= FEW_COMPARED or x.dtype.kind not in "iuf":
        if size > MOST_COMPARED:
            raise refuse(f"it looks for elements in a set of {size} {NOT_KNOWN}")
        line = tests.ravel() if isinstance(tests, TracedArray) else constant_array(tests)
        line = line if line.ndim else line.reshape(1)
        found = functools.reduce(operator.or_, [x == line[k] for k in range(size)])
    else:
        dtype = np.result_type(tests.dtype, x.dtype)
        if {tests.dtype.kind, x.dtype.kind} == {"i", "u"} and dtype.kind == "f":
            raise refuse(f"it looks for {x.dtype} in a set of {tests.dtype}")
        table = _SortedTable(np.unique(tests.astype(dtype)), dtype)
        place = np.minimum(table.place(x, "left"), np.int64(table.size - 1))
        found = table.elements_at(place) == x.astype(dtype)
    return np.logical_not(found) if invert else found
