"""Exact percentiles, quantiles and medians of dask arrays, and partitions.

One long line: its runs are sorted, and the elements of the wanted ranks are found as cuts are
(`splitters`); no data is exchanged. On GPUs a sort reads and writes a run a few times, and takes
less than counting bits by several kernels of CuPy. Where all fits one task, that task selects. Of
many lines, each block of whole lines is one task.
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from .blocks import array_module, join, module_name, to_host
from .local_sort import argsort_lines, count_nan_at_end, sort_lines, sort_pieces
from .ordered_keys import has_ordered_keys, values_of_keys
from .runs import count_runs, group_blocks, machine_in_use
from .sorting import argsort, check_sortable, flatten, lines_fit, sort, sort_line_blocks
from .splitters import find_brackets, find_candidates, merge_candidates, sample_run

#: By method, (alpha, beta) of n·q + alpha + q·(1 − alpha − beta) − 1 (Hyndman, Fan 1996).
CONTINUOUS = {
    "interpolated_inverted_cdf": (0.0, 1.0),
    "hazen": (0.5, 0.5),
    "weibull": (0.0, 0.0),
    "linear": (1.0, 1.0),
    "median_unbiased": (1 / 3, 1 / 3),
    "normal_unbiased": (3 / 8, 3 / 8),
}
#: Methods that take one element, or the mean of two.
DISCRETE = (
    "inverted_cdf", "averaged_inverted_cdf", "closest_observation", "lower", "higher", "midpoint",
    "nearest",
)  # fmt: skip
_MEDIAN = "median"


def percentile(
    a: Any, q: Any, axis: Any = None, *, method: str = "linear", keepdims: bool = False
) -> Any:
    """Return exact percentiles, as `numpy.percentile`.

    Dask's function of this name is approximate, and takes 1-D arrays only.

    Parameters
    ----------
    a
        Array of integers or real numbers, of any shape and chunks; chunks may be unknown.
    q
        Percentages from 0 to 100: a number, or an array of them.
    axis
        Axis, or tuple of axes, along which to compute; None for all.
    method
        One of NumPy's thirteen methods.
    keepdims
        Keep reduced axes with length 1.

    Returns
    -------
    dask array
        With the shape of `q` followed by the axes that are left. NaN where a line has NaN.

    Raises
    ------
    TypeError
        if the dtype is neither an integer nor a real one.
    ValueError
        if `q` is out of range, or the method unknown.

    >>> percentile(da.arange(11, chunks=4), [25, 50]).compute()
    array([2.5, 5. ])
    """
    q = np.asarray(q) / 100 if np.ndim(q) else float(q) / 100
    return _quantiles("percentile", a, q, axis, method, keepdims, False)


def quantile(
    a: Any, q: Any, axis: Any = None, *, method: str = "linear", keepdims: bool = False
) -> Any:
    """Return exact quantiles, as `numpy.quantile`; see `percentile`.

    >>> float(quantile(da.arange(11, chunks=4), 0.5).compute())
    5.0
    """
    return _quantiles("quantile", a, q, axis, method, keepdims, False)


def nanpercentile(
    a: Any, q: Any, axis: Any = None, *, method: str = "linear", keepdims: bool = False
) -> Any:
    """Return exact percentiles of what is not NaN, as `numpy.nanpercentile`; see `percentile`.

    >>> float(nanpercentile(da.from_array([1, np.nan, 3], chunks=2), 50).compute())
    2.0
    """
    q = np.asarray(q) / 100 if np.ndim(q) else float(q) / 100
    return _quantiles("nanpercentile", a, q, axis, method, keepdims, True)


def nanquantile(
    a: Any, q: Any, axis: Any = None, *, method: str = "linear", keepdims: bool = False
) -> Any:
    """Return exact quantiles of what is not NaN, as `numpy.nanquantile`; see `percentile`.

    >>> float(nanquantile(da.from_array([1, np.nan, 3], chunks=2), 1).compute())
    3.0
    """
    return _quantiles("nanquantile", a, q, axis, method, keepdims, True)


def median(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """Return the exact median, as `numpy.median`, over any axes; see `percentile`.

    >>> float(median(da.from_array([3.0, 1.0, 2.0, 9.0], chunks=2)).compute())
    2.5
    """
    return _quantiles("median", a, 0.5, axis, _MEDIAN, keepdims, False)


def nanmedian(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """Return the exact median of what is not NaN, as `numpy.nanmedian`; see `percentile`.

    >>> float(nanmedian(da.from_array([3.0, np.nan, 1.0], chunks=2)).compute())
    2.0
    """
    return _quantiles("nanmedian", a, 0.5, axis, _MEDIAN, keepdims, True)


def partition(
    a: Any, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None
) -> Any:
    """Put the kth elements in their place, no larger ones before, as `numpy.partition`.

    A line over several blocks that has no room in one task is sorted, as CuPy does.

    Parameters
    ----------
    a, axis
        As in `sort`.
    kth
        An index or several.
    kind, order
        For NumPy's sake: "introselect" and None.

    Returns
    -------
    dask array
        With the shape, chunks and dtype of `a`.

    Raises
    ------
    ValueError
        if an index is out of bounds.
    TypeError
        as `sort`.

    >>> int(partition(da.from_array([3, 4, 2, 1], chunks=2), 1)[1].compute())
    2
    """
    return _partition("partition", a, kth, axis, kind, order)


def argpartition(
    a: Any, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None
) -> Any:
    """Return indices of a partition, as `numpy.argpartition`; see `partition`.

    >>> int(argpartition(da.from_array([3, 4, 2, 1], chunks=2), 0)[0].compute())
    3
    """
    return _partition("argpartition", a, kth, axis, kind, order)


def _partition(what: str, a: Any, kth: Any, axis: int | None, kind: str, order: Any) -> Any:
    if kind != "introselect":
        raise ValueError(f"{what}: kind={kind!r}: use 'introselect'")
    a, axis = flatten(check_sortable(what, a, None, order), axis)
    n = a.shape[axis]
    wanted = np.unique(np.atleast_1d(np.asarray(kth)))
    if wanted.dtype.kind not in "iu":
        raise TypeError(f"{what}: kth={kth!r}: use integers")
    if not math.isnan(n) and wanted.size and not (-n <= wanted[0] and wanted[-1] < n):
        raise ValueError(f"{what}: kth={kth!r} is out of bounds for {n} elements")
    is_index = what == "argpartition"
    if a.numblocks[axis] > 1 and not (lines_fit([a], axis) if a.ndim > 1 else _is_one_task(a)):
        return (argsort if is_index else sort)(a, axis)
    function = _argpartition_lines if is_index else _partition_lines
    ranks = tuple(wanted.tolist())
    return sort_line_blocks(what, [a], axis, partial(function, kth=ranks), is_index=is_index)


def _is_one_task(a: Any) -> bool:
    nbytes = a.size * a.dtype.itemsize
    return count_runs(nbytes, a.numblocks[0], machine_in_use(module_name(a))) == 1


def _partition_lines(blocks: list[list[Any]], axis: int, kth: tuple[int, ...]) -> Any:
    whole = join(blocks[0], axis)
    if array_module(whole) is np and whole.dtype != np.float16:
        whole.partition([k % whole.shape[axis] for k in kth], axis=axis)
        return whole
    return sort_lines(whole, axis)


def _argpartition_lines(blocks: list[list[Any]], axis: int, kth: tuple[int, ...]) -> Any:
    whole = join(blocks[0], axis)
    if array_module(whole) is np and whole.dtype != np.float16:
        return np.argpartition(whole, [k % whole.shape[axis] for k in kth], axis=axis)
    return argsort_lines(whole, axis)


# ---- the graph of quantiles


def _quantiles(
    what: str, a: Any, q: Any, axis: Any, method: str, keepdims: bool, ignore_nan: bool
) -> Any:
    a = check_sortable(what, a)
    if a.dtype.kind not in "iuf":
        raise TypeError(f"{what}: dtype {a.dtype}: use integers or real numbers, such as x.real")
    if method not in CONTINUOUS and method not in (*DISCRETE, _MEDIAN):
        known = ", ".join(map(repr, (*CONTINUOUS, *DISCRETE)))
        raise ValueError(f"{what}: method={method!r}: use one of {known}")
    wanted = np.asarray(q, float)
    if not ((wanted >= 0) & (wanted <= 1)).all():
        most = 100 if "percentile" in what else 1  # percentiles were divided by 100
        given = np.round(wanted * most, 9).tolist()  # 1.1 * 100 is 110.00000000000001
        raise ValueError(f"{what}: q={given}: use values from 0 to {most}")
    if isinstance(axis, (tuple, list)):
        axes = tuple(int(i) for i in axis)
    else:
        axes = tuple(range(a.ndim)) if axis is None else (int(axis),)
    axes = tuple(sorted(np.lib.array_utils.normalize_axis_tuple(axes, a.ndim)))
    dtype = _result_dtype(a.dtype, q, method)
    request = _Request(tuple(wanted.ravel().tolist()), wanted.shape, method, ignore_nan, dtype.str)
    if len(axes) == a.ndim:
        flat = a if a.ndim == 1 else flatten(a, None)[0] if a.ndim else a.reshape(1)
        out = _of_long_line(what, flat, request)
    else:
        out = _of_lines(what, a, axes, request)
    if keepdims:
        place = tuple(None if i in axes else slice(None) for i in range(a.ndim))
        out = out[(slice(None),) * wanted.ndim + place]
    return out


def _result_dtype(dtype: np.dtype[Any], q: Any, method: str) -> np.dtype[Any]:
    one: Any = np.zeros(1, dtype)
    found: Any = np.median(one) if method == _MEDIAN else np.quantile(one, q, method=method)  # type: ignore[call-overload]
    return np.dtype(found.dtype)


class _Request(NamedTuple):
    """What is asked for; a plain tuple in tasks, so that their plan is kept."""

    fractions: tuple[float, ...]
    shape: tuple[int, ...]  # of the fractions, as they came
    method: str
    ignore_nan: bool
    dtype: str  # of the result


def _of_long_line(what: str, x: Any, request: _Request) -> Any:
    lengths, module = x.chunks[0], module_name(x)
    runs = count_runs(
        x.shape[0] * x.dtype.itemsize, len(lengths), machine_in_use(module),
        is_merge_cheap=module != "numpy",  # NumPy selects in one run, and sorts several
    )  # fmt: skip
    token = tokenize(x, request, runs)
    name = f"{what}-{token}"
    key = (name, *(0,) * len(request.shape))
    dsk: dict[Any, Any] = {}
    refs = [TaskRef((x.name, b)) for b in range(len(lengths))]
    if runs == 1 or not has_ordered_keys(x.dtype):
        dsk[key] = Task(key, _select_in_one, List(*refs), tuple(request))
    else:
        groups = group_blocks(lengths, runs)
        samples, found = [], []
        brackets = (f"{what}-brackets-{token}", 0)
        for i, group in enumerate(groups):
            run, sample, part = ((f"{what}-{s}-{token}", i) for s in ("run", "sample", "found"))
            dsk[run] = Task(run, _sorted_run, List(*[refs[b] for b in group]))
            dsk[sample] = Task(sample, _sample_and_count, TaskRef(run), len(groups))
            dsk[part] = Task(part, _found_in_run, TaskRef(run), TaskRef(brackets))
            samples.append(TaskRef(sample))
            found.append(TaskRef(part))
        dsk[brackets] = Task(brackets, _brackets, List(*samples), tuple(request))
        dsk[key] = Task(
            key,
            _select_of_runs,
            List(*found),
            TaskRef(brackets),
            tuple(request),
            x.dtype.str,
            module,
        )
    graph = HighLevelGraph.from_collections(name, dsk, dependencies=[x])
    meta = array_module(x._meta).empty((0,) * len(request.shape), request.dtype)
    return da.Array(graph, name, tuple((n,) for n in request.shape), meta=meta)


def _of_lines(what: str, a: Any, axes: tuple[int, ...], request: _Request) -> Any:
    """Along some of several axes: they become the last one, with all of it in a block."""
    others = tuple(i for i in range(a.ndim) if i not in axes)
    if len(axes) > 1 or (a.numblocks[axes[0]] > 1 and not lines_fit([a], axes[0])):
        a = a.rechunk({**dict.fromkeys(axes, -1), **dict.fromkeys(others, "auto")})
    if len(axes) > 1:
        moved = da.transpose(a, (*others, *axes))
        moved = moved.reshape((*(a.shape[i] for i in others), -1))
        a, axes = moved, (len(others),)
    axis = axes[0]
    left = [i for i in range(a.ndim) if i != axis]
    n, front = a.numblocks[axis], (0,) * len(request.shape)
    name = f"{what}-{tokenize(a, axis, request)}"
    dsk: dict[Any, Any] = {}
    for index in product(*(range(a.numblocks[i]) for i in left)):
        key = (name, *front, *index)
        blocks = [TaskRef((a.name, *index[:axis], b, *index[axis:])) for b in range(n)]
        dsk[key] = Task(key, _select_in_lines, List(*blocks), axis, tuple(request))
    chunks = (*((n,) for n in request.shape), *(a.chunks[i] for i in left))
    graph = HighLevelGraph.from_collections(name, dsk, dependencies=[a])
    meta = array_module(a._meta).empty((0,) * len(chunks), request.dtype)
    return da.Array(graph, name, chunks, meta=meta)


# ---- tasks


def _select_in_one(blocks: list[Any], asked: tuple[Any, ...]) -> Any:
    """Quantiles of the elements of all blocks."""
    request = _Request(*asked)
    xp, dtype = array_module(blocks[0]), blocks[0].dtype
    selects = xp is np and dtype != np.float16
    x = join(blocks) if selects else sort_pieces(blocks)
    if selects:
        missing = int(np.count_nonzero(np.isnan(x))) if dtype.kind == "f" else 0
    else:
        missing = count_nan_at_end(x)
    valid = int(x.size) - missing
    low, high, weight = positions(request, valid)
    if selects and valid and (request.ignore_nan or not missing):
        x.partition(np.unique([low, high]))
    if not valid or (missing and not request.ignore_nan):
        out = np.full(len(request.fractions), np.nan)
    else:
        values = to_host(x[xp.asarray(np.concatenate([low, high]))])
        out = interpolate(np, values[: low.size], values[low.size :], weight, request.method)
    return xp.asarray(np.asarray(out).astype(request.dtype).reshape(request.shape))


def _sorted_run(blocks: list[Any]) -> Any:
    return sort_pieces(blocks)


def _sample_and_count(run: Any, runs: int) -> tuple[Any, int]:
    """A sample of the sorted run, and how many NaN are in it."""
    return sample_run([run], runs), count_nan_at_end(run)


def _brackets(samples: list[tuple[Any, int]], asked: tuple[Any, ...]) -> Any:
    """Brackets of the elements that the quantiles need, and how many elements and NaN there are."""
    request = _Request(*asked)
    missing = sum(n for _, n in samples)
    valid = sum(s.length for s, _ in samples) - missing
    low, high, _ = positions(request, valid)
    ranks = np.unique([low, high]) + 1 if valid else np.zeros(0, np.int64)
    return find_brackets([s for s, _ in samples], ranks.tolist()), valid, missing


def _found_in_run(run: Any, brackets: Any) -> Any:
    return find_candidates([run], brackets[0])


def _select_of_runs(
    found: list[Any], brackets: Any, asked: tuple[Any, ...], dtype: Any, module: str
) -> Any:
    """Quantiles of the union of sorted runs."""
    request = _Request(*asked)
    bounds, valid, missing = brackets
    xp = import_module(module)
    if not valid or (missing and not request.ignore_nan):
        return xp.asarray(np.full(request.shape, np.nan, request.dtype))
    keys = np.array([merge_candidates(found, t, r) for t, r in enumerate(bounds.ranks.tolist())])
    values = values_of_keys(keys, dtype)
    low, high, weight = positions(request, valid)
    below, above = (values[np.searchsorted(bounds.ranks, rank + 1)] for rank in (low, high))
    out = interpolate(np, below, above, weight, request.method)
    return xp.asarray(np.asarray(out).astype(request.dtype).reshape(request.shape))


def _select_in_lines(blocks: list[Any], axis: int, asked: tuple[Any, ...]) -> Any:
    """Quantiles along whole lines."""
    request = _Request(*asked)
    xp = array_module(blocks[0])
    x = xp.moveaxis(sort_lines(join(blocks, axis), axis), axis, -1)
    n = x.shape[-1]
    missing = xp.isnan(x).sum(axis=-1) if x.dtype.kind == "f" else xp.zeros(x.shape[:-1], int)
    valid = n - missing if request.ignore_nan else xp.where(missing > 0, 0, n)
    counts = to_host(valid)
    out = xp.empty((len(request.fractions), *x.shape[:-1]), request.dtype)
    low, high, weight = positions(request, counts)
    for number in range(len(request.fractions)):
        if not n:
            out[number] = np.nan
            continue
        below, above = (
            xp.take_along_axis(x, xp.asarray(ranks[number])[..., None], axis=-1)[..., 0]
            for ranks in (low, high)
        )
        value = interpolate(xp, below, above, xp.asarray(weight[number]), request.method)
        out[number] = xp.where(valid > 0, value, np.nan) if out.dtype.kind == "f" else value
    return out.reshape((*request.shape, *x.shape[:-1]))


def positions(request: _Request, n: Any) -> tuple[Any, Any, Any]:
    """Return the ranks below and above each quantile, from 0, and the weight of the one above.

    Parameters
    ----------
    request
        Its fractions and method.
    n
        How many elements there are: an int, or an array of them.

    Returns
    -------
    int64, int64 and float64 arrays of shape (fractions, *n.shape).
    """
    n = np.asarray(n, np.int64)
    q = np.array(request.fractions).reshape(-1, *(1,) * n.ndim)
    position, weight = _position(request.method, n, q)
    low = np.floor(position)
    if weight is None:
        weight = position - low
    last = np.maximum(n - 1, 0)
    high = np.clip(low + 1, 0, last).astype(np.int64)
    weight = np.where(low < 0, 0.0, weight)
    low = np.clip(low, 0, last).astype(np.int64)
    return low, np.where(weight == 0, low, high), weight + np.zeros(low.shape)


def _position(method: str, n: Any, q: Any) -> tuple[Any, Any]:
    """Return the position of a quantile among n elements, and the weight of the next element.

    The weight is None where it is the fraction of the position.
    """
    if method == _MEDIAN:
        position = (n - 1) / 2
        return position + 0 * q, None
    if method == "linear":
        return (n - 1) * q, None
    if method in CONTINUOUS:
        alpha, beta = CONTINUOUS[method]
        return n * q + (alpha + q * (1 - alpha - beta)) - 1, None
    if method == "averaged_inverted_cdf":
        position = n * q - 1
        return position, np.where(position == np.floor(position), 0.5, 1.0)
    if method == "midpoint":
        position = (n - 1) * q
        return np.floor(position), np.where(position == np.floor(position), 0.0, 0.5)
    if method == "inverted_cdf":
        position = np.ceil(n * q - 1)
    elif method == "closest_observation":
        position = n * q - 1.5
        low = np.floor(position)
        position = np.where((position == low) & (low % 2 == 1), low, low + 1)
    else:
        position = (n - 1) * q
        rounded: dict[str, Any] = {"lower": np.floor, "higher": np.ceil, "nearest": np.around}
        position = rounded[method](position)
    return position, np.zeros(np.broadcast(n, q).shape)


def interpolate(xp: Any, low: Any, high: Any, weight: Any, method: str) -> Any:
    """Return what is between two elements, by NumPy's formula, which is exact at both ends."""
    if method == _MEDIAN:
        middle = xp.stack([low, high], axis=-1).mean(axis=-1)
        return xp.where(weight == 0, low, middle)
    if method in ("inverted_cdf", "closest_observation", "lower", "higher", "nearest"):
        return low
    step = high - low
    with np.errstate(invalid="ignore"):
        upper = high - step * (1 - weight)
        out = xp.where(weight >= 0.5, upper, low + step * weight)
    return xp.where(weight == 0, low, out)
