"""Evaluate a function on every point of a grid, as a lazy Dask array.

No coordinate is stored, sent or read, but those of axes that are given as arrays.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import dask.array as da
import numpy as np
from dask import config
from dask.array.core import normalize_chunks
from dask.base import tokenize
from dask.blockwise import blockwise
from dask.highlevelgraph import HighLevelGraph
from dask.utils import parse_bytes

from .codegen.cpu import evaluate
from .default import kind_in_use
from .frontend.tiles import MeshAxis, Tile, Tiles
from .ir.expr import DType, Expr, Kernel, View, nodes, replace_leaves
from .tracing.array import TracedArray, apply_expression
from .tracing.numba_cpu import python_function
from .tracing.point_function import (
    ResultTuple,
    bind_arguments,
    expression_tokens,
    point_expressions,
)

#: Axes of a mesh.
MOST_AXES = 6
#: Tiles of an array for which nothing is said about chunks: at least so many points each, so that a
#: tile is worth its launch ...
LEAST_POINTS = {"numpy": 2**16, "cupy": 2**20}
#: ... so many tiles where they are small, which keeps every device busy ...
TILES = 64
#: ... and about so many at most: scheduling one costs as much as ten thousand points.
MOST_TILES = 4096
#: How many times more points a tile may have than is asked for, and how many times shorter it may
#: be, if all are alike then: small tiles have more of what is done once per row and column.
LARGER, NEAR = 1.5, 4 / 3


def axis(start: float, stop: float, n: int, endpoint: bool = True) -> MeshAxis:
    """`n` coordinates from `start` to `stop`, evenly spaced: those of `numpy.linspace`, float64.

    Parameters
    ----------
    start, stop
        Finite numbers, in the unit of what is measured along the axis.
    n
        How many; at least 1, and more than 2**31 are possible.
    endpoint
        Whether `stop` is the last of them, exactly.

    Raises
    ------
    ValueError
        for a number that is not finite, or no points.
    TypeError
        for ends that are no real numbers, or a count that is no whole one.

    Examples
    --------
    >>> np.asarray(axis(0, 1, 5))
    array([0.  , 0.25, 0.5 , 0.75, 1.  ])
    """
    return MeshAxis(*_convert_ends(start, stop), _count(n), bool(endpoint))


def geomaxis(start: float, stop: float, n: int, endpoint: bool = True) -> MeshAxis:
    """Return `n` coordinates in geometric progression, from `start` to `stop`.

    Each is the same multiple of the one before: the float64 numbers of `numpy.geomspace`.

    Raises
    ------
    ValueError
        for zeros, ends of different signs, a number that is not finite, or no points.

    Examples
    --------
    >>> np.asarray(geomaxis(1, 1000, 4))
    array([   1.,   10.,  100., 1000.])
    """
    first, last = _convert_ends(start, stop)
    if not first or not last or (first < 0) != (last < 0):
        raise ValueError(
            f"a geometric axis from {start!r} to {stop!r}: the ends must have the same sign, and "
            "neither may be zero"
        )
    return MeshAxis(first, last, _count(n), bool(endpoint), geometric=True)


def _convert_ends(start: Any, stop: Any) -> tuple[float, float]:
    try:
        ends = float(start), float(stop)
    except (TypeError, ValueError):
        raise TypeError(
            f"an axis goes from a real number to another: {start!r}, {stop!r}"
        ) from None
    if not all(map(math.isfinite, ends)):
        raise ValueError(f"an axis from {start!r} to {stop!r}: both must be finite")
    return ends


def _count(n: Any) -> int:
    try:
        count = operator.index(n)
    except TypeError:
        raise TypeError(f"an axis of {n!r} points: a whole number") from None
    if count < 1:
        raise ValueError(f"an axis of {count} points: there must be at least one")
    return count


def mesh(
    f: Callable[..., Any],
    axes: Sequence[Any],
    args: tuple[Any, ...] = (),
    chunks: Any = "auto",
    dtype: Any = None,
    indexing: str = "ij",
    how: str = "auto",
    backend: str | None = None,
) -> Any:
    """`f(x, y, …, *args)` at every point of a grid, as a lazy Dask array of tiles.

    Each tile is computed on the device that it is on, and so are its coordinates; reductions and
    other array operations behind it become part of the same kernel, so that nothing of the size of
    the grid is stored unless it is asked for. A slice of the result computes what it reads.

    Parameters
    ----------
    f
        A Python function of one point: of as many numbers as there are axes, and `args`. It may use
        `math` or NumPy functions of numbers, branches, loops, and functions of the same kind; or it
        may be written for NumPy arrays, as long as it treats each point alone. It gives a number,
        or a tuple or list of them, and is settled here: globals that change later change nothing.
    axes
        For each axis, an `axis`, a `geomaxis`, or a 1-D array (NumPy, CuPy, Dask, or a list) of any
        coordinates. One to six.
    args
        Numbers that `f` gets after the coordinates.
    chunks
        As for other Dask arrays. ``"auto"`` makes tiles of up to `array.chunk-size` bytes, or up to
        half as much more where all tiles are alike then.
    dtype
        Of the coordinates that `f` gets: float64 by default, complex128 where an axis is complex.
        With float32, what `f` makes of them is float32, too.
    indexing
        ``"ij"``: the result's axes are those of `axes`. ``"xy"``: the first two change places, as
        in `numpy.meshgrid`.
    how
        ``"trace"``: call `f` once, on symbols. ``"numba"``: have Numba compile it. ``"auto"``: the
        first of these that works. ``"numpy"``: call it for each tile, with arrays of coordinates
        that are broadcast against each other, by what globals are then. ``"python"``: call it for
        each point on the host, with NumPy's numbers, as a loop over the axes would; this is what
        ``"auto"`` does, with a warning, for a function that has a `try`.
    backend
        The library whose arrays the blocks are: ``"numpy"``, or one with its functions. By default
        ``"cupy"`` where the scheduler in use has GPUs.

    Returns
    -------
    dask.array.Array
        Of the axes' lengths, and of the type that `f` gives; a tuple of them where `f` gives a
        tuple or a list.

    Raises
    ------
    NotCompiled
        (a TypeError) where `f` can neither be traced nor compiled: it names the line.
    ValueError, TypeError
        for axes, arguments or chunks that make no sense.

    Notes
    -----
    NumPy's rules hold where Python has others: a division by zero or the logarithm of a negative
    number is no error, and gives infinity or NaN. A grid has many points, and one outside a
    formula's domain shall not take away the values of all others. On GPUs a function that raises
    gives NaN (0, where it gives integers or bools); on CPU devices its exception comes out. A
    function that catches such errors wants Python's rules: it is called by Python.

    Examples
    --------
    >>> z = mesh(lambda x, y: math.hypot(x, y), (axis(0, 3, 4), axis(0, 4, 5)))
    >>> z
    dask.array<<lambda>, shape=(4, 5), dtype=float64, chunksize=(4, 5), chunktype=numpy.ndarray>
    >>> float(z.max().compute(scheduler="gpu"))
    5.0
    """
    if how not in ("auto", "trace", "numba", "numpy", "python"):
        raise ValueError(f"how={how!r}: use 'auto', 'trace', 'numba', 'numpy' or 'python'")
    if indexing not in ("ij", "xy"):
        raise ValueError(f"indexing={indexing!r}: use 'ij' or 'xy'")
    if not isinstance(axes, Iterable):
        raise TypeError(f"axes={axes!r}: a sequence of them, one for each argument of the function")
    if not isinstance(args, tuple):
        raise TypeError(f"args={args!r}: a tuple of numbers")
    every = [_checked_axis(a, k) for k, a in enumerate(axes)]
    if not 1 <= len(every) <= MOST_AXES:
        raise ValueError(f"{len(every)} axes: a mesh has one to {MOST_AXES}")
    wide = any(getattr(a, "dtype", np.dtype(float)).kind == "c" for a in every)
    given = np.dtype((np.complex128 if wide else np.float64) if dtype is None else dtype)
    if given.kind not in "iufc":
        raise TypeError(f"dtype={given}: coordinates are numbers")
    if wide and given.kind != "c":
        raise TypeError(f"dtype={given}: an axis has complex coordinates")
    numbers = tuple([_number(a) for a in args])
    order = list(range(len(every)))
    if indexing == "xy" and len(order) > 1:
        order[:2] = 1, 0
    xp = backend or {"cpu": "numpy", "cuda": "cupy"}[kind_in_use()]
    _check_call(f, len(every), len(numbers))
    made: list[Any] | None = None
    if how == "numpy":
        made = _as_written(f, len(every), given, numbers)
    elif how != "python":
        whole = bind_arguments(f, len(every) + len(numbers))
        ranges = [_range_of(a) if given.kind == "f" else None for a in every]
        made = point_expressions(whole, [given] * len(every), numbers, how, xp, ranges)
    if made is None:
        made = _point_by_point(f, every, given, numbers)
    out = [_array(f, m, every, order, chunks, given, xp) for m in made]
    return tuple(out) if isinstance(made, ResultTuple) else out[0]


def _check_call(f: Any, axes: int, args: int) -> None:
    """Whether a function can be called with a coordinate of each axis, and the numbers behind."""
    if not callable(f):
        raise TypeError(f"{f!r} is no function: a mesh evaluates one of {axes} coordinates")
    try:
        signature = inspect.signature(python_function(f) or f)
    except (TypeError, ValueError):  # of C's functions not all say what they take
        return
    try:
        signature.bind(*range(axes + args))
    except TypeError as error:
        what = f"{axes} {'axis' if axes == 1 else 'axes'}{f' and {args} of args' if args else ''}"
        raise TypeError(
            f"{getattr(f, '__name__', f)}{signature} is called with a number for each of {what}: "
            f"{error}"
        ) from None


def _checked_axis(given: Any, k: int) -> Any:
    """An `MeshAxis`, or a 1-D Dask array."""
    if isinstance(given, MeshAxis):
        return given
    array = given if isinstance(given, da.Array) else da.asarray(_at_hand(given))
    if array.ndim != 1 or array.dtype.kind not in "biufc":
        raise ValueError(
            f"axis {k} is {array.ndim}-dimensional, of {array.dtype}: use axis(start, stop, n), "
            "geomaxis(start, stop, n), or a 1-D array of numbers"
        )
    if math.isnan(array.shape[0]):
        raise ValueError(f"the length of axis {k} is not known: call compute_chunk_sizes() on it")
    if not array.shape[0]:
        raise ValueError(f"axis {k} has no points: there must be at least one")
    return array


def _at_hand(given: Any) -> Any:
    return given if hasattr(given, "dtype") else np.asarray(given)


def _range_of(a: Any) -> tuple[float, float] | None:
    """The least and the greatest coordinate, where they are known."""
    return (min(a.start, a.stop), max(a.start, a.stop)) if isinstance(a, MeshAxis) else None


def _number(value: Any) -> Any:
    if isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
        return value
    raise TypeError(f"args has {value!r}: they are numbers; close over anything else")


def _as_written(
    f: Callable[..., Any], count: int, given: DType, args: tuple[Any, ...]
) -> list[Any]:
    """The function itself, for each thing that it gives."""
    result = f(*[np.ones((1,) * count, given) for _ in range(count)], *args)
    several = isinstance(result, (tuple, list))
    out = [_UncompiledFunction(f, args, k if several else None, np.asarray(r).dtype)
           for k, r in enumerate(result if several else [result])]  # fmt: skip
    return ResultTuple(out) if several else out


@dataclass(frozen=True)
class _UncompiledFunction:
    f: Callable[..., Any]
    args: tuple[Any, ...]
    part: int | None
    dtype: DType

    def __call__(self, *points: Any) -> Any:
        result = self.f(*points, *self.args)
        return result if self.part is None else result[self.part]


def _point_by_point(
    f: Callable[..., Any], axes: Sequence[Any], given: DType, args: tuple[Any, ...]
) -> list[Any]:
    """Return calls of the function for each point, by Python: one for each of its results.

    Their types are those of the results at the ends and in the middle of the axes, or at one point
    where the coordinates are not known.
    """
    kind = given.type
    tried = []
    for where in (0.0, 0.5, 1.0):
        point = [
            kind(a.coordinates_of(np.array([int(where * (len(a) - 1))]))[0])
            if isinstance(a, MeshAxis)
            else kind(1)
            for a in axes
        ]
        result = f(*point, *args)
        tried.append(tuple(result) if isinstance(result, (tuple, list)) else result)
    several = isinstance(tried[0], tuple)
    if len({len(t) if isinstance(t, tuple) else 0 for t in tried}) > 1:
        raise TypeError(f"{getattr(f, '__name__', f)} does not give as many numbers everywhere")
    parts: list[Any] = list(zip(*tried, strict=True)) if several else [tried]
    every = []
    for n, part in enumerate(parts):
        dtype = np.result_type(*[np.asarray(v).dtype for v in part])
        if dtype.kind not in "biufc" or any(np.ndim(v) for v in part):
            raise TypeError(f"{getattr(f, '__name__', f)} gives {part[0]!r}: a mesh is of numbers")
        every.append(_PointByPoint(f, args, n if several else None, dtype))
    return ResultTuple(every) if several else every


@dataclass(frozen=True)
class _PointByPoint:
    """A function that is called with the numbers of one point, as often as there are points."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    part: int | None
    dtype: DType

    def __call__(self, *points: Any) -> Any:
        every = np.broadcast(*[p.get() if hasattr(p, "get") else p for p in points])
        out = np.empty(every.shape, self.dtype)
        for n, point in enumerate(every):
            result = self.f(*point, *self.args)
            value = result if self.part is None else result[self.part]
            if not np.can_cast(np.asarray(value).dtype, self.dtype, "same_kind"):
                raise TypeError(
                    f"mesh: {getattr(self.f, '__name__', self.f)} gives {value!r} at {point}, but "
                    f"{self.dtype} at the corners of the mesh: give one dtype everywhere"
                )
            out.flat[n] = value
        return import_module(type(points[0]).__module__.partition(".")[0]).asarray(out)


# ---- the array of tiles


def _array(
    f: Any, what: Any, axes: Sequence[Any], order: list[int], chunks: Any, given: DType, xp: str
) -> da.Array:
    shape = [0] * len(axes)
    for a, k in zip(axes, order, strict=True):
        shape[k] = len(a)
    sides = _sides(chunks, tuple(shape), what.dtype, LEAST_POINTS.get(xp, 1))
    formulas = tuple(a if isinstance(a, MeshAxis) else None for a in axes)
    chunk = MeshTile(what, formulas, tuple(order), given, xp)
    name = getattr(f, "__name__", type(f).__name__)
    arrays = [
        (k, a.rechunk((sides[k],)))
        for a, k in zip(axes, order, strict=True)
        if not isinstance(a, MeshAxis)
    ]
    key = f"{name}-{tokenize(chunk, sides, [a.name for _, a in arrays])}"
    every = tuple(range(len(shape)))
    words: list[Any] = [Tiles(sides), every]
    for k, a in arrays:
        words += [a.name, (k,)]
    counts = {a.name: a.numblocks for _, a in arrays}
    layer = blockwise(chunk, key, every, *words, numblocks=counts)
    graph = HighLevelGraph.from_collections(key, layer, dependencies=[a for _, a in arrays])
    meta = import_module(xp).empty((0,) * len(shape), dtype=what.dtype)
    return da.Array(graph, key, sides, meta=meta)


def _sides(
    chunks: Any, shape: tuple[int, ...], dtype: DType, least: int
) -> tuple[tuple[int, ...], ...]:
    points = math.prod(shape)
    most = parse_bytes(config.get("array.chunk-size")) // dtype.itemsize
    tile = max(min(most, max(points // TILES, least)), points // MOST_TILES, 1)
    words = chunks.values() if isinstance(chunks, dict) else chunks
    some_free = words == "auto" or (isinstance(words, Iterable) and "auto" in tuple(words))
    limit = tile * dtype.itemsize if some_free else None
    every = words if isinstance(words, Iterable) and not isinstance(words, str) else (words,)
    if any(isinstance(w, (int, np.integer)) and w == 0 for w in every):  # Dask would divide by it
        sides: Any = ((0,),)
    else:
        sides = normalize_chunks(chunks, shape, limit=limit, dtype=dtype)
    if not all(map(all, sides)):
        raise ValueError(f"chunks={chunks!r}: a tile has at least one point")
    given = chunks if isinstance(chunks, dict) else dict(enumerate(every))
    free = [words == "auto" or given.get(k) == "auto" for k in range(len(sides))]
    lengths = [tuple(map(int, side)) for side in sides]
    more = LARGER ** (1 / max(sum(free), 1))
    return tuple([_equalize_tiles(s, more) if f else s for s, f in zip(lengths, free, strict=True)])


def _equalize_tiles(side: tuple[int, ...], more: float) -> tuple[int, ...]:
    """Return equal lengths of tiles, if such are near, at most so many times as long.

    Then all tiles have one kernel, instead of one for each edge and corner. A multiple of four, so
    that vectors of elements lie in rows.

    >>> _equalize_tiles((4096,) * 12 + (848,), 1.23) == (5000,) * 10, _equalize_tiles((4, 4, 1), 2)
    (True, (4, 4, 1))
    """
    whole, length = sum(side), side[0]
    if side[-1] == length:
        return side
    least, most = math.ceil(length / NEAR), min(int(length * more), whole)
    lengths: Iterable[int] = range(-(-least // 4) * 4, most + 1, 4)
    fewest, all_ = math.ceil(whole / most), whole // least
    if all_ - fewest < (most - least) // 4:  # fewer to try
        lengths = (whole // n for n in range(fewest, all_ + 1) if whole % n == 0)
    equal = [n for n in lengths if n % 4 == 0 and whole % n == 0]
    if not equal:
        return side
    best = min(equal, key=lambda n: max(n / length, length / n))
    return (best,) * (whole // best)


class MeshTile:
    """Makes one tile: called with a `Tile`, and blocks of the axes that are arrays."""

    def __init__(
        self,
        what: Any,
        axes: tuple[MeshAxis | None, ...],
        order: tuple[int, ...],
        given: DType,
        xp: str,
    ):
        self.what = what  # an expression of a point's coordinates, or a function of arrays of them
        self.axes = axes  # None for those that are arrays
        self.order = order  # which of the tile's axes each lies along
        self.given = given
        self.xp = xp

    def __dask_tokenize__(self) -> Any:
        what = _expression_token(self.what) if isinstance(self.what, Expr) else self.what
        return type(self).__name__, tokenize(what, self.axes, self.order, self.given, self.xp)

    def __call__(self, tile: Tile, *arrays: Any) -> Any:
        points = self.points(tile, arrays)
        first, spread = points[0], self._spread(points)
        if not isinstance(self.what, Expr):
            value = self.what(*spread)
        elif isinstance(first, TracedArray):
            return apply_expression(self.what, spread)
        elif isinstance(first, np.ndarray):
            (value,) = evaluate.evaluate(self._kernel(tile.shape), points)
            return value
        else:
            value = _by_operations(self.what, spread)
        if np.isscalar(value):  # it is of no library
            return np.full_like(first, value, self.what.dtype, shape=tile.shape)
        return np.broadcast_to(value, tile.shape).astype(self.what.dtype)

    def pick_elements(self, axis: int, indices: Any) -> tuple[MeshTile, int, Any] | None:
        """Return a tile function of some elements along an axis, by their indices.

        With it come the place of their coordinates among the arrays that the function gets, and
        the coordinates. They are None where the axis is an array: its elements are the coordinates.
        Returns None for such an axis on GPUs, where indexing it would be no part of a kernel.
        """
        k = self.order.index(axis)
        if self.axes[k] is None and self.xp != "numpy":
            return None
        formula = self.axes[k]
        coordinates = None if formula is None else formula.coordinates_of(indices)
        return _with_array(self, k), self.axes[:k].count(None), coordinates

    def points(self, tile: Tile, arrays: Sequence[Any]) -> list[Any]:
        """The coordinates along each axis, 1-D and of the type that the function gets."""
        given = iter(arrays)
        out = []
        for formula, k in zip(self.axes, self.order, strict=True):
            if formula is not None:
                x = formula.coordinates_of(tile.indices(k, self.xp))
            else:
                x = next(given)
                if isinstance(x, np.ndarray) and self.xp != "numpy":
                    x = import_module(self.xp).asarray(x)
            out.append(x.astype(self.given))
        return out

    def _spread(self, points: list[Any]) -> list[Any]:
        """Each along its own axis of the tile."""
        n = len(points)
        return [
            x.reshape(tuple([-1 if j == k else 1 for j in range(n)]))
            for x, k in zip(points, self.order, strict=True)
        ]

    def _kernel(self, shape: tuple[int, ...]) -> Kernel:
        views = [View(0, tuple([int(j == k) for j in range(len(shape))])) for k in self.order]

        def spread(leaf: Expr) -> Expr:
            if leaf.op != "input":
                return leaf
            return Expr("input", (), leaf.dtype, (leaf.data[0], views[leaf.data[0]]))

        return Kernel(shape, tuple(replace_leaves([self.what], spread)))


@functools.lru_cache(256)
def _expression_token(expr: Expr) -> str:
    """The same word in every process for expressions that are equal."""
    return str(tokenize(expression_tokens(expr)))


@functools.lru_cache(256)  # blocks that come of one have the same: they are alike
def _with_array(tile: MeshTile, k: int) -> MeshTile:
    """The same, which is given the coordinates along one axis."""
    axes = (*tile.axes[:k], None, *tile.axes[k + 1 :])
    return MeshTile(tile.what, axes, tile.order, tile.given, tile.xp)


def _by_operations(expr: Expr, points: list[Any]) -> Any:
    """The value of an expression by a library's own functions, for other schedulers than ours."""
    value: dict[int, Any] = {}
    for node in nodes((expr,)):
        args = [value[id(a)] for a in node.args]
        if node.op == "input":
            got = points[node.data[0]]
        elif node.op == "constant":
            got = node.value
        elif node.op == "call":
            raise NotImplementedError(
                f"{node.data[0].name} has to be compiled into a kernel: compute this with "
                'gpuscheduler.get, or scheduler="gpu"'
            )
        elif node.op == "cast":
            got = args[0].astype(node.dtype)
        elif node.op == "complex":
            got = args[0] + 1j * args[1]
        else:
            library = np if hasattr(np, node.op) else import_module("cupyx.scipy.special")
            got = getattr(library, node.op)(*args)  # NumPy's function is the arrays' own
        value[id(node)] = got
    return value[id(expr)]
