"""Elements of arrays at places that are computed, and what NumPy looks up in tables: `table[i]`,
`take`, `searchsorted`, `digitize`, `interp`, `isin`, `choose`.

For GPUs: one element is read for each point, where NumPy's own functions are as fast on the host.
What NumPy says of an index beyond an array's end, a kernel cannot say: it reads as CuPy does, from
the other end.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from . import takes
from .arrays import (
    METHODS,
    Traced,
    apply,
    axis_index,
    broadcast,
    clipped,
    either,
    implements,
    look,
    read_beside,
    scalar_if_point,
    stored,
    traced,
)
from .bins import compared
from .expr import ANYWHERE, LEAVES, RANDOM, Expr, View, nodes, view_of, with_view
from .following import (
    NOT_KNOWN,
    cast_to,
    checked,
    constant,
    current,
    no_out,
    node_of,
    refuse,
)
from .numpy_functions import counted, evenly_binned, weighed
from .reading import instead_of

#: Elements of a table that a value is compared with one by one, where they are not in order.
MOST_COMPARED = 64
#: ... and where they are: a search asks for fewer.
FEW_COMPARED = 8
#: Edges that each value is compared with, at most, where others are searched.
MOST_EDGES = 32
#: Bounds of what may be any number.
ANY_NUMBER = -math.inf, math.inf
#: Elements of a table that is searched.
MOST_SEARCHED = 2**30


def on_gpus(what: str) -> None:
    if not current.get().products:
        raise refuse(f"{what}: NumPy's own is as fast")


# ------------------------------------------------------------------------------------------------
# Elements at places that are computed.


def at(
    x: Traced,
    shape: tuple[int, ...],
    still: Callable[[View], View],
    away: Callable[[View], Expr | None],
    anywhere: bool = False,
) -> Traced:
    """An array of this shape, of elements of `x`. Each leaf is read where `still` says, and as many
    elements behind as `away` says (int64, over the shape; None: none); with `anywhere`, there are
    such elements also where nobody needs them."""
    new: dict[int, Expr] = {}
    for old in nodes((x._expr,)):
        args = tuple([new[id(a)] for a in old.args])
        view = view_of(old)
        if view is not None:
            leaf = with_view(old, still(view))
            found = node_of(leaf.op, (), leaf.dtype, leaf.data)
            step = away(view)
            if step is not None and old.op == "index":
                found = apply(np.add, found, step)
            elif step is not None:
                found = node_of("taken", (found, step), leaf.dtype, ANYWHERE if anywhere else None)
        elif old.op == "taken" and args[0].op == "taken":
            base, place = args[0].args
            found = node_of("taken", (base, apply(np.add, place, args[1])), old.dtype)
        elif old.op in RANDOM:
            raise refuse("it takes random numbers by a list")
        else:
            found = node_of(old.op, args, old.dtype, old.data)
        new[id(old)] = found
    return Traced(new[id(x._expr)], shape)


def _times(number: Expr, step: int) -> Expr:
    return number if step == 1 else apply(np.multiply, number, step)


@instead_of(takes.picked)
def _picked(x: Any, axis: int, numbers: Any, length: int) -> Any:
    """Elements of an array along an axis, by their numbers, of which each is less than `length`."""
    on_gpus("it indexes with an array")
    x, numbers = traced(x), traced(numbers)
    if x.shape[axis] != length:  # they are read without a look at how many there are
        raise refuse(f"it takes elements of {length}, and there are {x.shape[axis]}")
    shape = (*x.shape[:axis], numbers.size, *x.shape[axis + 1 :])
    if 0 in x.shape or 0 in shape:
        return Traced(constant(0, x.dtype), shape)
    line = look(numbers, lambda a: a.reshape((-1,) + (1,) * (x.ndim - axis - 1)))
    number = cast_to(broadcast(line, shape)._expr, np.int64)

    def away(view: View) -> Expr | None:
        step = 0 if length == 1 else view.strides[axis]
        return _times(number, step) if step else None

    def still(view: View) -> View:
        return View(view.offset, (*view.strides[:axis], 0, *view.strides[axis + 1 :]))

    return at(x, shape, still, away)


@instead_of(takes.reordered)
def _reordered(arrays: list[Any], axis: int, numbers: Any) -> Any:
    return _picked(takes.joined(arrays, axis), axis, numbers, numbers.size)


def _in_memory(x: Traced, points: int) -> Traced:
    """The same array, as one that is read: what it takes to compute is done for each element once,
    where more are looked up."""
    if x._expr.op in LEAVES:
        return x
    every = nodes((x._expr,))
    if any(n.op in RANDOM for n in every) or points > x.size:
        return stored(x)
    return x


def _inside(index: Traced, length: int) -> Traced:
    """An index below a length, int64: one from an array's end as well, and any other by wrapping
    around."""
    if index.dtype.kind == "u" and np.iinfo(index.dtype).max < length:
        return index.astype(np.int64)
    if index.dtype.kind == "i" and index.itemsize <= 4 and length < 2**31:
        small: Any = np.remainder(index.astype(np.int32), np.int32(length))
        return cast(Traced, small.astype(np.int64))
    inside: Any = np.remainder(index.astype(np.int64), np.int64(length))
    return cast(Traced, inside)


def _numbers(index: Any, length: int) -> Traced:
    """Indices into an axis, each inside it."""
    if isinstance(index, Traced):
        if index.dtype.kind not in "iu":
            raise refuse(f"it indexes with an array of {index.dtype}")
        return _inside(index, length)
    known = np.asarray(index)
    if known.dtype.kind not in "iu" and known.size:
        raise refuse(f"it indexes with an array of {known.dtype}")
    if ((known < -length) | (known >= length)).any():
        raise IndexError(f"an index is out of bounds for an axis of size {length}")
    return _own(np.where(known < 0, known + length, known).astype(np.int64))


def _own(values: np.ndarray[Any, Any]) -> Traced:
    """An array whose values are known, as one that a kernel reads."""
    if values.size == 1 or not values.size:
        return traced(values)
    if current.get().beside is None:
        raise refuse("it uses an array that is neither an input nor computed from one")
    return read_beside(np.ascontiguousarray(values), own=True)


def _is_numbers(entry: Any) -> bool:
    """Whether an entry of an index says by its elements which to take."""
    if isinstance(entry, Traced):
        return entry._expr.op != "constant" and entry.dtype != bool
    return isinstance(entry, (list, tuple, np.ndarray)) and np.ndim(entry) > 0


def _taken(x: Traced, index: Any) -> Traced | None:
    """`x[index]` with arrays of integers in the index; None of any other."""
    given_entries = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_numbers, given_entries)):
        return None
    on_gpus("it indexes with an array")
    entries = tuple(_in_full(x, given_entries))
    # everything else is a view first, along whose axes elements are taken
    whole = x[tuple([slice(None) if _is_numbers(e) else e for e in entries])]
    chosen: dict[int, Any] = {}
    places, axis = [], 0  # the entries that count as arrays, as numbers do beside arrays
    for k, entry in enumerate(entries):
        if _is_numbers(entry):
            chosen[axis] = entry
        if entry is None or isinstance(entry, slice) or axis in chosen:
            axis += 1
        if entry is not None and not isinstance(entry, slice):
            places.append(k)
    # an Ellipsis is something between, also where it stands for no axis
    there = [
        k
        for k, e in enumerate(given_entries)
        if e is not None and e is not ... and not isinstance(e, slice)
    ]
    side_by_side = there == list(range(there[0], there[-1] + 1))
    first = sum(e is None or isinstance(e, slice) for e in entries[: places[0]])
    first = first if side_by_side else 0
    if len(chosen) == 1:
        ((along, given),) = chosen.items()
        if (found := _in_slices(whole, along, given)) is not None:
            return look(found, lambda a: np.moveaxis(a, along, first)).copy()
    numbers = {k: _numbers(entry, whole.shape[k]) for k, entry in chosen.items()}
    anywhere = all(isinstance(entry, Traced) for entry in chosen.values())
    out = _looked_up(whole, numbers, first, anywhere)
    return out if any(e is ... for e in given_entries) else scalar_if_point(out)


def _in_slices(x: Traced, axis: int, index: Any) -> Traced | None:
    """Elements along an axis whose numbers are known, where these are a few slices."""
    if isinstance(index, Traced) or np.ndim(index) != 1 or not x.shape[axis]:
        return None
    known = np.asarray(index)
    if not known.size or known.dtype.kind not in "iu":
        return None
    slices = takes.slices_of(np.where(known < 0, known + x.shape[axis], known), takes.FEW_SLICES)
    if slices is None or min(s.start for s in slices) < 0:
        return None
    return takes.joined(takes.parts_of(x, axis, slices), axis)  # type: ignore[no-any-return]


def _in_full(x: Traced, entries: Sequence[Any]) -> Iterator[Any]:
    """An index with an entry for each axis of an array."""
    count = sum(1 for e in entries if e is not None and e is not ...)
    if count > x.ndim:
        raise IndexError(f"too many indices for an array of {x.ndim} dimensions")
    rest = [slice(None)] * (x.ndim - count)
    open_ended = not any(e is ... for e in entries)
    for entry in (*entries, ...) if open_ended else entries:
        if entry is ...:
            yield from rest
            rest = []
        else:
            yield entry


def _looked_up(
    x: Traced, chosen: Mapping[int, Traced], first: int, anywhere: bool = True
) -> Traced:
    """Elements of an array by their numbers along these axes, in place of which, at `first`, those
    of the numbers are. With `anywhere`, the numbers are inside whatever they are computed of."""
    over = np.broadcast_shapes(*[n.shape for n in chosen.values()])
    rest = [k for k in range(x.ndim) if k not in chosen]
    kept = [x.shape[k] for k in rest]
    shape = (*kept[:first], *over, *kept[first:])
    if 0 in shape or 0 in x.shape:
        if 0 not in shape:
            raise IndexError(f"an index is out of bounds for an array of shape {x.shape}")
        return Traced(constant(0, x.dtype), shape)
    x = _in_memory(x, math.prod(shape))
    behind = (1,) * (len(kept) - first)
    numbers = {}
    for k, index in chosen.items():
        spread = broadcast(look(index, lambda a: a.reshape(a.shape + behind)), shape)
        numbers[k] = cast_to(spread._expr, np.int64)

    def still(view: View) -> View:
        own = [view.strides[k] for k in rest]
        return View(view.offset, (*own[:first], *(0,) * len(over), *own[first:]))

    def away(view: View) -> Expr | None:
        steps = [
            _times(numbers[k], view.strides[k])
            for k in chosen
            if view.strides[k] and x.shape[k] > 1
        ]
        return functools.reduce(functools.partial(apply, np.add), steps) if steps else None

    return at(x, shape, still, away, anywhere and x._expr.op == "input")


METHODS["index"] = _taken


@implements("take")
def _take(a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> Traced:
    no_out(out)
    x = traced(a)
    x, axis = (x.ravel(), 0) if axis is None else (x, normalize_axis_index(axis, x.ndim))
    if isinstance(indices, int | np.integer) and mode == "raise":
        return x[(*(slice(None),) * axis, indices)]
    on_gpus("it takes elements by their numbers")
    length = x.shape[axis]
    if mode == "clip":
        known = indices if isinstance(indices, Traced) else _own(np.asarray(indices))
        indices = clipped(known.astype(np.int64), np.int64(0), np.int64(length - 1))
    elif mode == "wrap" and not isinstance(indices, Traced):
        indices = np.asarray(indices) % max(length, 1)
    elif mode not in ("raise", "wrap"):
        raise ValueError(f"clipmode must be one of 'clip', 'raise', or 'wrap' (got {mode!r})")
    numbers = _numbers(indices, length)
    out = _looked_up(x, {axis: numbers}, axis, isinstance(indices, Traced))
    return out if out.ndim else scalar_if_point(out)


@implements("take_along_axis")
def _take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> Traced:
    on_gpus("it takes elements by their numbers")
    x = traced(arr)
    if axis is None:
        x, axis = x.ravel(), 0
    axis = normalize_axis_index(axis, x.ndim)
    if np.ndim(indices) != x.ndim:
        raise ValueError("`indices` and `arr` must have the same number of dimensions")
    numbers = _numbers(indices, x.shape[axis])
    over = list(
        np.broadcast_shapes(numbers.shape, [n if k != axis else 1 for k, n in enumerate(x.shape)])
    )
    chosen = {k: numbers if k == axis else _along(k, n, x.ndim) for k, n in enumerate(x.shape)}
    if any(
        n != m and n != 1 for k, (n, m) in enumerate(zip(x.shape, over, strict=True)) if k != axis
    ):
        raise IndexError("shape mismatch: indexing arrays could not be broadcast together")
    return _looked_up(x, chosen, 0, isinstance(indices, Traced))


def _along(axis: int, length: int, ndim: int) -> Traced:
    """The positions along one axis."""
    shape = tuple([length if k == axis else 1 for k in range(ndim)])
    return Traced(axis_index(shape, axis), shape)


@implements("choose")
def _choose(a: Any, choices: Any, out: Any = None, mode: str = "raise") -> Any:
    no_out(out)
    if isinstance(choices, Traced):
        choices = [choices[k] for k in range(len(choices))]
    dtype = np.result_type(*[c.dtype if isinstance(c, Traced) else c for c in choices])
    index, parts = traced(a), [traced(c) for c in choices]
    if index.dtype.kind not in "iub":
        raise TypeError(f"Cannot cast array data from {index.dtype} to dtype('int64')")
    last = len(parts) - 1
    if mode == "raise":
        least, most = _bounds(index._expr)
        if least < 0 or most > last:
            raise refuse("it is an error where it chooses what there is not")
    elif mode == "wrap":
        index = _inside(index, last + 1)
    elif mode != "clip":
        raise ValueError(f"clipmode must be one of 'clip', 'raise', or 'wrap' (got {mode!r})")
    made = [p.astype(dtype) for p in parts]
    found = made[last]
    for k in range(last - 1, -1, -1):
        found = either(np.less_equal(index, k) if k == 0 else np.equal(index, k), made[k], found)
    return found


@implements("bincount")
def _bincount(x: Any, weights: Any = None, minlength: Any = 0) -> Traced:
    """Of numbers that are less than `minlength`: of others there would be more results."""
    x, length = traced(x), operator.index(minlength)
    if x.ndim != 1 or x.dtype.kind not in "biu":
        raise refuse(f"it counts {x.dtype} of shape {x.shape}")
    least, most = _bounds(x._expr)
    if least < 0 or most >= length:
        raise refuse("how many numbers it counts depends on values")
    if weights is None or not x.size:  # of nothing NumPy gives counts
        return counted(x.astype(np.int64), length)
    return weighed(x.astype(np.int64), length, weights)


def _bounds(root: Expr) -> tuple[float, float]:
    """Between which numbers an integer lies, as far as its expression says."""
    known: dict[int, tuple[float, float]] = {}
    for node in nodes((root,)):
        known[id(node)] = _bounds_of(node, known) if node.dtype.kind in "iub" else ANY_NUMBER
    return known[id(root)]


def _bounds_of(node: Expr, known: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """The same of a node, given those of its arguments."""
    if node.dtype.kind == "b":
        return 0, 1
    if node.op == "constant":
        return int(node.value), int(node.value)
    if node.op == "bin":
        return 0, len(node.data)
    ends = [known[id(a)] for a in node.args]
    info = np.iinfo(node.dtype)
    least, most = int(info.min), int(info.max)
    if node.op == "remainder" and ends[1][0] == ends[1][1] > 0:
        return 0, ends[1][0] - 1
    if node.op == "bitwise_and":
        positive = [e[1] for e in ends if e[0] >= 0]
        return (0, min(positive)) if positive else (least, most)
    if node.op == "cast" and ends[0][0] >= least and ends[0][1] <= most:
        return ends[0]
    if node.op in ("minimum", "maximum"):
        pick = min if node.op == "minimum" else max
        return pick(e[0] for e in ends), pick(e[1] for e in ends)
    if node.op == "where":
        condition, _, other = node.args
        if condition.op in ("less", "greater") and other is condition.args[0]:
            low, high = known[id(condition.args[1])]  # as the bounds of what is clipped
            below = condition.op == "less"
            ends[2] = (
                (max(ends[2][0], low), ends[2][1]) if below else (ends[2][0], min(ends[2][1], high))
            )
        return min(e[0] for e in ends[1:]), max(e[1] for e in ends[1:])
    if node.op in ("add", "subtract"):
        (a, b), (c, d) = ends
        low, high = (a + c, b + d) if node.op == "add" else (a - d, b - c)
        if least <= low and high <= most:
            return low, high
    return least, most


# ------------------------------------------------------------------------------------------------
# Tables in ascending order.


class _Table:
    """Numbers in ascending order, NaNs behind all others, of the type that they are compared in.
    Where it `descends`, the order is the other way round."""

    def __init__(self, table: Any, dtype: Any, descends: Any = None):
        self.dtype, self.descends = checked(dtype), descends
        self.known: np.ndarray[Any, Any] | None = None
        if isinstance(table, Traced):
            self.array = table
        else:
            self.known = np.asarray(table).astype(self.dtype)
            self.array = _own(self.known)
        self.size = self.array.size
        real = self.dtype.kind == "f"
        self.has_nan = real and (self.known is None or bool(np.isnan(self.known).any()))

    def at(self, places: Any) -> Traced:
        """Its elements at these places, each of which is one of its own."""
        number = traced(places)
        if self.descends is not None:
            number = either(self.descends, np.int64(self.size - 1) - number, number)
        found = _looked_up(self.array, {0: number}, 0)
        return found.astype(self.dtype)

    def place(self, value: Traced, side: str) -> Traced:
        """How many of its elements are less than a value, or, on the side "right", not greater."""
        value = value.astype(self.dtype)
        if not self.size:
            return Traced(constant(0, np.int64), value.shape)
        found = self._binned(value) if side == "right" else None
        if found is not None:
            return found
        number = value.dtype.kind == "f"

        def before(place: Any) -> Any:
            t = self.at(place)
            if not number:
                return t < value if side == "left" else t <= value
            if not self.has_nan:  # and a NaN lies behind them all
                return ~(t >= value) if side == "left" else ~(t > value)
            if side == "left":
                return (t < value) | (np.isnan(value) & ~np.isnan(t))
            return ~((value < t) | (np.isnan(t) & ~np.isnan(value)))

        # a search of as many steps for each value
        base: Any = Traced(constant(0, np.int64), value.shape)
        left = self.size
        while left > 1:
            half = left // 2
            base = either(before(base + np.int64(half - 1)), base + np.int64(half), base)
            left -= half
        return cast(Traced, base + before(base).astype(np.int64))

    def _binned(self, value: Traced) -> Traced | None:
        """The same of numbers that lie evenly."""
        if self.known is None or self.has_nan or self.size < 2:
            return None
        found = evenly_binned(value, self.known)
        if found is None:
            return None
        first, last = self.known[0], self.known[-1]
        return either(
            value < first,
            np.int64(0),
            either(value < last, found + np.int64(1), np.int64(self.size)),
        )


def _checked_table(table: Any, what: str) -> Any:
    table = table if isinstance(table, Traced) else np.asarray(table)
    if table.ndim != 1 or table.dtype.kind not in "iuf" or table.size > MOST_SEARCHED:
        raise refuse(f"{what} {table.dtype} of shape {table.shape}")
    return table


@implements("searchsorted")
def _searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    on_gpus("it searches in an array")
    if sorter is not None or side not in ("left", "right"):
        raise refuse("its search in an array is not a plain one")
    table, v = _checked_table(a, "it searches in"), traced(v)
    if v.dtype.kind not in "iuf":
        raise refuse(f"it searches for {v.dtype}")
    known = _Table(table, np.result_type(table.dtype, v.dtype))
    return scalar_if_point(known.place(v, side).astype(np.intp))


@implements("digitize")
def _digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """How many edges are not above each value, or above it where they descend."""
    x, given = traced(x), isinstance(bins, Traced)
    edges = _checked_table(bins, "it sorts into bins with edges of")
    if not edges.size or x.dtype.kind not in "iuf":
        raise refuse(f"it sorts {x.dtype} into bins of {edges.size} edges")
    if not given:
        np.digitize(np.empty(0, x.dtype), edges, right)  # it says what is wrong with them
    if edges.size > MOST_EDGES:
        on_gpus(f"it sorts {x.dtype} into bins of {edges.size} edges")
        return _among_many(x, edges, right)
    kind = compared(x.dtype, edges.dtype)
    if kind is None or not (given or np.array_equal(edges, edges)):  # they have holes
        raise refuse(f"it sorts {x.dtype} into bins with edges of {edges.dtype}")
    value, edges = Traced(cast_to(x._expr, kind), x.shape), edges.astype(kind)
    found = Traced(constant(0, np.intp), x.shape)
    for k in range(edges.size):
        found = found + (value <= edges[k] if right else value < edges[k])
    # what is not a number lies behind all edges
    descends = edges[0] > edges[-1]
    other = edges.size - found
    return scalar_if_point(
        either(descends, found, other) if given else found if descends else other
    )


def _among_many(x: Traced, edges: Any, right: bool) -> Any:
    dtype, side = np.result_type(edges.dtype, x.dtype), "left" if right else "right"
    if isinstance(edges, Traced):
        table = _Table(edges, dtype, edges[0] > edges[-1])
        found = table.place(x, side)
        return scalar_if_point(either(table.descends, table.size - found, found))
    descends = bool(edges[0] > edges[-1])
    found = _Table(edges[::-1] if descends else edges, dtype).place(x, side)
    return scalar_if_point(np.int64(edges.size) - found if descends else found)


@implements("interp")
def _interp(
    x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> Any:
    """Along straight lines from point to point, as NumPy computes it, in double precision."""
    on_gpus("it interpolates in a table")
    x = traced(x)
    if period is not None or any(isinstance(v, Traced) for v in (left, right)):
        raise refuse("its interpolation is not a plain one")
    xp, fp = _checked_table(xp, "it interpolates at"), _checked_table(fp, "it interpolates in")
    if x.dtype.kind not in "iufb" or xp.shape != fp.shape or not xp.size:
        raise refuse(f"it interpolates in {xp.shape} points that have {fp.shape} values")
    points, values = _Table(xp, np.float64), _Table(fp, np.float64)
    x, last = x.astype(np.float64), np.int64(points.size - 1)
    ends = values.at(np.int64(0)), values.at(last)
    first, beyond = (
        end if given is None else np.float64(given)
        for end, given in zip(ends, (left, right), strict=True)
    )
    inner: Any = ends[0]
    if points.size > 1:
        inner = either(x == points.at(last), ends[1], _between(x, points, values))
        inner = either(np.isnan(x), x, inner)
    found = either(x > points.at(last), beyond, inner)
    return scalar_if_point(either(x < points.at(np.int64(0)), first, found))


def _between(x: Traced, points: _Table, values: _Table) -> Any:
    """On the line from the point before to the one behind."""
    # for a NaN, and beyond the ends, any place inside will do
    last = np.int64(points.size - 2)
    place = clipped(points.place(x, "right") - np.int64(1), np.int64(0), last)
    here, value = points.at(place), values.at(place)
    there, later = points.at(place + np.int64(1)), values.at(place + np.int64(1))
    slope: Any = (later - value) / (there - here)
    finite = False
    if points.known is not None and values.known is not None:
        with np.errstate(all="ignore"):
            slopes = _own(np.diff(values.known) / np.diff(points.known))
        slope = _looked_up(slopes, {0: place}, 0)
        finite = bool(np.isfinite(points.known).all() and np.isfinite(values.known).all())
    found = slope * (x - here) + value
    if not finite:
        again = slope * (x - there) + later
        again = either(np.isnan(again) & (value == later), value, again)
        found = either(np.isnan(found), again, found)
    return either(x == here, value, found)


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
    x = traced(element)
    tests = test_elements
    if not isinstance(tests, Traced):
        tests = np.asarray(tests)
        if tests.dtype.kind not in "biufc":
            raise refuse(f"it looks for elements of {tests.dtype}")
        tests = np.unique(tests[tests == tests])  # NaN is no element of a set
    size = tests.size
    if not size:
        found: Any = Traced(constant(False, "?"), x.shape)
    elif isinstance(tests, Traced) or size <= FEW_COMPARED or x.dtype.kind not in "iuf":
        if size > MOST_COMPARED:
            raise refuse(f"it looks for elements in a set of {size} {NOT_KNOWN}")
        line = tests.ravel() if isinstance(tests, Traced) else _own(tests)
        line = line if line.ndim else line.reshape(1)
        found = functools.reduce(operator.or_, [x == line[k] for k in range(size)])
    else:
        dtype = np.result_type(tests.dtype, x.dtype)
        if {tests.dtype.kind, x.dtype.kind} == {"i", "u"} and dtype.kind == "f":
            raise refuse(f"it looks for {x.dtype} in a set of {tests.dtype}")
        table = _Table(np.unique(tests.astype(dtype)), dtype)
        place = np.minimum(table.place(x, "left"), np.int64(table.size - 1))
        found = table.at(place) == x.astype(dtype)
    return np.logical_not(found) if invert else found
