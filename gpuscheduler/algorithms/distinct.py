"""unique, searchsorted, isin and set operations of dask arrays.

Each run of blocks is reduced to its distinct values, with counts and first indices. All runs are
cut at common splitters, the parts are exchanged, and each part is reduced again. So an array with
few distinct values moves little. Results have chunks of unknown size, as those of `da.unique`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from .blocks import array_module, join, module_name, to_host
from .local_sort import argsort, argsort_columns, is_nan, sort_pieces
from .ordered_keys import has_ordered_keys, ordered_keys
from .products import take_along_axis
from .runs import count_runs, group_blocks, machine_in_use, most_line_bytes
from .sorting import check_sortable, flatten
from .splitters import count_at_most, sample_run


class UniqueAllResult(NamedTuple):
    """Distinct values, their first indices, where each element is among them, and their counts."""

    values: Any
    indices: Any
    inverse_indices: Any
    counts: Any


class UniqueCountsResult(NamedTuple):
    """Distinct values and their counts."""

    values: Any
    counts: Any


class UniqueInverseResult(NamedTuple):
    """Distinct values, and where each element is among them."""

    values: Any
    inverse_indices: Any


def unique(
    ar: Any,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: None = None,
    *,
    equal_nan: bool = True,
) -> Any:
    """Return the distinct elements in order, as `numpy.unique`.

    Parameters
    ----------
    ar
        Array of any shape with a dtype that `sort` takes. Chunks may be unknown in one dimension.
    return_index
        Also give the index of the first of each in the flattened array.
    return_inverse
        Also give the index of each element in the result; the distinct values have to fit one
        device.
    return_counts
        Also give how often each is there.
    axis
        Must be None.
    equal_nan
        Take NaN for one value, else each is one of its own.

    Returns
    -------
    dask array or tuple of dask arrays
        In the order of the arguments; with chunks of unknown size, the inverse with those of `ar`.

    Raises
    ------
    NotImplementedError
        if `axis` is given.
    TypeError
        if the dtype has no order.

    >>> values, counts = unique(da.from_array([3, 1, 3, 3], chunks=2), return_counts=True)
    >>> values.compute(), counts.compute()
    (array([1, 3]), array([1, 3]))
    """
    if axis is not None:
        raise NotImplementedError(
            f"unique: axis={axis}: use axis=None, or np.unique(x.compute(), axis={axis})"
        )
    ar = check_sortable("unique", ar)
    values, index, counts = _find_distinct("unique", ar, return_index, return_counts, equal_nan)
    out = [values]
    if return_index:
        out.append(index)
    if return_inverse:
        out.append(_search_whole("inverse", values, ar, _search, ("left",), np.dtype(np.intp)))
    if return_counts:
        out.append(counts)
    return out[0] if len(out) == 1 else tuple(out)


def unique_all(x: Any, /) -> UniqueAllResult:
    """Return values, first indices, inverse and counts, as `numpy.unique_all`; see `unique`.

    >>> unique_all(da.from_array([3, 1, 3], chunks=2)).inverse_indices.compute()
    array([1, 0, 1])
    """
    return UniqueAllResult(*unique(x, True, True, True, equal_nan=False))


def unique_counts(x: Any, /) -> UniqueCountsResult:
    """Return distinct values and their counts, as `numpy.unique_counts`; see `unique`.

    >>> unique_counts(da.from_array([3, 1, 3], chunks=2)).counts.compute()
    array([1, 2])
    """
    return UniqueCountsResult(*unique(x, return_counts=True, equal_nan=False))


def unique_inverse(x: Any, /) -> UniqueInverseResult:
    """Return distinct values and the inverse, as `numpy.unique_inverse`; see `unique`.

    >>> unique_inverse(da.from_array([3, 1, 3], chunks=2)).values.compute()
    array([1, 3])
    """
    return UniqueInverseResult(*unique(x, return_inverse=True, equal_nan=False))


def unique_values(x: Any, /) -> Any:
    """Return the distinct values, in order, as `numpy.unique_values`; see `unique`.

    >>> unique_values(da.from_array([3, 1, 3], chunks=2)).compute()
    array([1, 3])
    """
    return unique(x, equal_nan=False)


def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    """Return where elements belong in a sorted array, as `numpy.searchsorted`.

    Parameters
    ----------
    a
        Sorted 1-D array; its chunks may be unknown. It is looked through block by block where it
        does not fit one task.
    v
        Elements: a number, or an array of any shape.
    side
        "left" to put them before equal elements, "right" to put them behind.
    sorter
        Indices that sort `a`.

    Returns
    -------
    dask array
        int64, with the shape and chunks of `v`.

    Raises
    ------
    ValueError
        if `a` is not 1-D, or the side unknown.

    >>> searchsorted(da.arange(10, chunks=3), da.from_array([3, 8], chunks=1)).compute()
    array([3, 8])
    """
    if side not in ("left", "right"):
        raise ValueError(f"searchsorted: side={side!r}: use 'left' or 'right'")
    a, v = check_sortable("searchsorted", a), check_sortable("searchsorted", v)
    if a.ndim != 1:
        raise ValueError(f"searchsorted: a has {a.ndim} axes, use an array of one")
    if sorter is not None:
        a = take_along_axis(a, sorter, 0)
    if not a.nbytes > most_line_bytes(0, machine_in_use(module_name(v))):
        return _search_whole("searchsorted", a, v, _search, (side,), np.dtype(np.intp))
    axes = tuple(range(1, v.ndim + 1))
    found = da.blockwise(
        _search_row, (0, *axes), a, (0,), v, axes, side=side, adjust_chunks={0: 1},
        meta=array_module(v._meta).empty((0,) * (v.ndim + 1), np.intp),
    )  # fmt: skip
    return found.sum(axis=0)


def isin(
    element: Any,
    test_elements: Any,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    kind: str | None = None,
) -> Any:
    """Tell for each element whether it is among the test elements, as `numpy.isin`.

    The distinct test elements have to fit one device.

    Parameters
    ----------
    element, test_elements
        Arrays of any shapes.
    assume_unique, kind
        Accepted for NumPy's sake.
    invert
        Tell whether each is not among them.

    Returns
    -------
    dask array
        bool, with the shape and chunks of `element`.

    >>> isin(da.arange(4, chunks=2), [1, 7]).compute()
    array([False,  True, False, False])
    """
    element, tests = check_sortable("isin", element), check_sortable("isin", test_elements)
    tests, _, _ = _find_distinct("unique", tests, False, False, True)
    return _search_whole("isin", tests, element, _is_in, (bool(invert),), np.dtype(bool))


def union1d(ar1: Any, ar2: Any) -> Any:
    """Return the distinct elements of two arrays, in order, as `numpy.union1d`.

    >>> union1d(da.arange(3, chunks=2), [7, 1]).compute()
    array([0, 1, 2, 7])
    """
    return unique(_concatenate(*(_flatten_sortable("union1d", x) for x in (ar1, ar2))))


def intersect1d(
    ar1: Any, ar2: Any, assume_unique: bool = False, return_indices: bool = False
) -> Any:
    """Return the distinct elements that two arrays share, in order, as `numpy.intersect1d`.

    With `return_indices` also where the first of each is in both arrays.

    >>> intersect1d(da.arange(5, chunks=2), [7, 3, 1]).compute()
    array([1, 3])
    """
    first, second = (_flatten_sortable("intersect1d", x) for x in (ar1, ar2))
    common = np.result_type(first.dtype, second.dtype)
    first, second = first.astype(common), second.astype(common)
    if not return_indices:
        values = unique(first)
        return values[isin(values, second)]
    values, here = unique(first, return_index=True)
    others, there = unique(second, return_index=True)
    mine, theirs = isin(values, others), isin(others, values)
    return values[mine], here[mine], there[theirs]


def setdiff1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> Any:
    """Return the distinct elements of one array that another lacks, as `numpy.setdiff1d`.

    >>> setdiff1d(da.arange(5, chunks=2), [7, 3, 1]).compute()
    array([0, 2, 4])
    """
    first, second = (_flatten_sortable("setdiff1d", x) for x in (ar1, ar2))
    values = first if assume_unique else unique(first)
    return values[isin(values, second, invert=True)]


def setxor1d(ar1: Any, ar2: Any, assume_unique: bool = False) -> Any:
    """Return the distinct elements that are in one of two arrays only, as `numpy.setxor1d`.

    >>> setxor1d(da.arange(5, chunks=2), [7, 3, 1]).compute()
    array([0, 2, 4, 7])
    """
    both = [_flatten_sortable("setxor1d", x) for x in (ar1, ar2)]
    both = [x if assume_unique else unique(x) for x in both]
    values, counts = unique(_concatenate(*both), return_counts=True, equal_nan=False)
    return values[counts == 1]


def _flatten_sortable(name: str, x: Any) -> Any:
    return flatten(check_sortable(name, x), None)[0] if np.ndim(x) else da.asanyarray(x).reshape(1)


def _concatenate(a: Any, b: Any) -> Any:
    """Concatenate 1-D arrays, whose chunks may be unknown, in their common dtype."""
    common = np.result_type(a.dtype, b.dtype)
    return da.concatenate([a.astype(common), b.astype(common)], allow_unknown_chunksizes=True)


# ---- graphs


def _find_distinct(
    what: str, ar: Any, wants_index: bool, wants_counts: bool, equal_nan: bool
) -> tuple[Any, Any, Any]:
    """The distinct values, their first indices and counts; None for what is not wanted."""
    x = ar.reshape(1) if ar.ndim == 0 else flatten(ar, None)[0]
    lengths = x.chunks[0]
    machine = machine_in_use(module_name(x))
    runs = count_runs(
        x.size * x.dtype.itemsize, len(lengths), machine, is_merge_cheap=module_name(x) != "numpy"
    )
    if not has_ordered_keys(x.dtype):
        runs = 1
    groups = group_blocks(lengths, runs)
    token = tokenize(x, wants_index, wants_counts, equal_nan, runs)
    dsk: dict[Any, Any] = {}

    def add(step: str, index: Any, function: Any, *args: Any) -> TaskRef:
        key = (f"{what}-{step}-{token}", *index)
        dsk[key] = Task(key, function, *args)
        return TaskRef(key)

    offsets: Any = None
    if wants_index and any(math.isnan(n) for n in lengths):
        sizes = [add("length", (b,), len, TaskRef((x.name, b))) for b in range(len(lengths))]
        offsets = add("lengths", (0,), tuple, List(*sizes))
    made = []
    for i, group in enumerate(groups):
        blocks = List(*[TaskRef((x.name, b)) for b in group])
        start = offsets
        if start is None:
            start = int(sum(lengths[: group[0]])) if wants_index else 0
        made.append(
            add("run", (i,), _distinct_run, blocks, start, group[0], wants_index, equal_nan)
        )
    parts = made
    if len(groups) > 1:
        samples = List(*[add("sample", (i,), _sample, m, len(groups)) for i, m in enumerate(made)])
        splitters = add("bounds", (0,), _choose_splitters, samples)
        cuts = [add("cuts", (i,), _find_cuts, m, splitters) for i, m in enumerate(made)]
        parts = []
        for j in range(len(groups)):
            pieces = [add("piece", (i, j), _slice_run, m, cuts[i], j) for i, m in enumerate(made)]
            parts.append(add("part", (j,), _merge_distinct, List(*pieces), wants_index, equal_nan))
    xp = array_module(x._meta)
    out: list[Any] = []
    metas = [x._meta, xp.empty(0, np.intp), xp.empty(0, np.intp)]
    for number, (step, meta) in enumerate(zip(("values", "indices", "counts"), metas, strict=True)):
        if not (True, wants_index, wants_counts)[number]:
            out.append(None)
            continue
        name = f"{what}-{step}-{token}"
        layer: dict[Any, Any] = {
            (name, j): Task((name, j), getitem, p, number) for j, p in enumerate(parts)
        }
        graph = HighLevelGraph.from_collections(name, {**dsk, **layer}, dependencies=[x])
        out.append(da.Array(graph, name, ((math.nan,) * len(parts),), meta=meta))
    values, index, counts = out
    return values, index, counts


def _search_whole(
    what: str, table: Any, x: Any, function: Any, args: tuple[Any, ...], dtype: np.dtype[Any]
) -> Any:
    """Apply a function to each block of an array and the whole of a sorted one."""
    name = f"{what}-{tokenize(table, x, function, args)}"
    whole: Any = (f"{what}-table-{name}", 0)
    blocks = [TaskRef((table.name, b)) for b in range(table.numblocks[0])]
    dsk: dict[Any, Any] = {whole: Task(whole, join, List(*blocks))}
    for block in np.ndindex(*x.numblocks):
        key = (name, *block)
        dsk[key] = Task(key, function, TaskRef(whole), TaskRef((x.name, *block)), *args)
    graph = HighLevelGraph.from_collections(name, dsk, dependencies=[table, x])
    meta = array_module(x._meta).empty((0,) * x.ndim, dtype)
    return da.Array(graph, name, x.chunks, meta=meta)


# ---- tasks


def _distinct_run(
    blocks: list[Any], start: Any, first: int, wants_index: bool, equal_nan: bool
) -> tuple[Any, ...]:
    """Distinct values of blocks, the index of the first of each, and their counts."""
    if not wants_index:
        x, order = sort_pieces(blocks), None
    else:
        if isinstance(start, tuple):
            start = sum(start[:first])
        joined = join(blocks)
        order = argsort(joined)
        x = joined[order]
    firsts, counts = _find_equal_ranges(x, equal_nan)
    index = x[:0] if order is None else order[firsts] + int(start)
    return x[firsts], index, counts


def _find_equal_ranges(x: Any, equal_nan: bool) -> tuple[Any, Any]:
    """Where each distinct value of a sorted array begins, and how often it occurs."""
    xp, n = array_module(x), int(x.size)
    if not n:
        return xp.zeros(0, np.intp), xp.zeros(0, np.intp)
    kind = x.dtype.kind
    if xp is not np and kind == "f":  # CuPy's kernels flush subnormal numbers to zero
        (keys,) = ordered_keys(x)
        changed = keys[1:] != keys[:-1]
    else:
        changed = x[1:] != x[:-1]
    if kind in "fcMm":
        nan = is_nan(x)
        both = nan[1:] & nan[:-1]
        changed = changed & ~both if equal_nan else changed | both
    first = xp.ones(n, bool)
    first[1:] = changed
    starts = xp.flatnonzero(first)
    counts = xp.empty_like(starts)
    counts[:-1] = starts[1:] - starts[:-1]
    counts[-1:] = n - starts[-1:]
    return starts, counts


def _sample(run: tuple[Any, ...], runs: int) -> Any:
    return sample_run(run[:1], runs)


def _choose_splitters(samples: list[Any]) -> tuple[Any, ...]:
    """The splitters that divide all runs into parts of about equal size, from samples of each.

    There is one less than there are samples; they are columns of ordered keys.
    """
    columns = range(len(samples[0].keys))
    keys = tuple(np.concatenate([s.keys[c] for s in samples]) for c in columns)
    weights = np.concatenate([np.full(s.keys[0].size, s.step) for s in samples])
    order = np.lexsort(keys[::-1])
    ranks = np.cumsum(weights[order])  # about as many elements are at or below each sample
    if not ranks.size:
        return tuple(k[:0] for k in keys)
    wanted = ranks[-1] * np.arange(1, len(samples)) / len(samples)
    chosen = order[np.searchsorted(ranks, wanted)]
    return tuple(k[chosen] for k in keys)


def _find_cuts(run: tuple[Any, ...], splitters: tuple[Any, ...]) -> list[int]:
    """Where to cut a run at the splitters, so that equal elements of all runs come together."""
    inner = count_at_most(run[:1], splitters).tolist()
    return [0, *inner, int(run[0].size)]


def _slice_run(run: tuple[Any, ...], cuts: list[int], j: int) -> tuple[Any, ...]:
    if j >= len(cuts) - 1:  # all samples were empty, so there are no splitters
        return tuple(c[:0] for c in run)
    return tuple(c[cuts[j] : cuts[j + 1]] for c in run)


def _merge_distinct(
    pieces: list[tuple[Any, ...]], wants_index: bool, equal_nan: bool
) -> tuple[Any, ...]:
    """Merge distinct values of runs: keep the first index of each, and add the counts."""
    if not wants_index and all(not p[2].size or int(p[2].max()) == 1 for p in pieces):
        values = sort_pieces([p[0] for p in pieces])  # many times as fast as an argsort
        firsts, counts = _find_equal_ranges(values, equal_nan)
        return values[firsts], pieces[0][1], counts
    values = join([p[0] for p in pieces])
    order = argsort_columns([values], presorted=True)
    values = values[order]
    firsts, groups = _find_equal_ranges(values, equal_nan)
    index = join([p[1] for p in pieces])
    if wants_index:
        index = index[order][firsts]
    xp = array_module(values)
    total = xp.cumsum(join([p[2] for p in pieces])[order])
    ends = total[firsts + groups - 1]
    counts = ends - xp.concatenate([xp.zeros(1, ends.dtype), ends])[: ends.size]
    return values[firsts], index, counts


def _search(table: Any, x: Any, side: str) -> Any:
    """Where elements belong in a sorted array."""
    found, _, _ = _searchsorted_with_keys(table, x, side)
    return found


def _search_row(table: Any, x: Any, side: str) -> Any:
    return _search(table, x, side)[None]


def _is_in(table: Any, x: Any, invert: bool) -> Any:
    """Whether elements are in a sorted array; NaN never is."""
    xp = array_module(x)
    if not table.size:
        return xp.full(x.shape, invert)
    found, tables, keys = _searchsorted_with_keys(table, x, "left")
    at = xp.minimum(found, table.size - 1)
    hit = xp.ones(x.shape, bool)
    for t, k in zip(tables, keys, strict=True):
        hit &= t[at] == k
    if x.dtype.kind in "fcMm":
        hit &= ~is_nan(x)
    return ~hit if invert else hit


def _searchsorted_with_keys(
    table: Any, x: Any, side: Any
) -> tuple[Any, Sequence[Any], Sequence[Any]]:
    """Return `searchsorted` positions of `x` in a sorted table, and the sort keys of both."""
    xp, common = array_module(x), np.result_type(table.dtype, x.dtype)
    table, x = table.astype(common), x.astype(common)
    if not has_ordered_keys(common):
        return np.searchsorted(table, x, side), (table,), (x,)
    tables, keys = ordered_keys(table), ordered_keys(x)
    if len(keys) == 1:
        return xp.searchsorted(tables[0], keys[0], side), tables, keys
    found = xp.asarray(np.searchsorted(to_host(table), to_host(x), side))
    return found, tables, keys
