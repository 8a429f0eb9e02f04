"""sort, argsort and lexsort of dask arrays, as graphs.

Along an axis of one chunk each block is sorted by itself. Lines over several blocks are joined,
sorted and cut again where a block of whole lines has room. Longer lines, and 1-D arrays, are
sorted by samples with exact splitters: runs of blocks are sorted, cut into parts (`splitters`),
exchanged, and merged. Each output block has exactly the length of the input block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from operator import getitem
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from .blocks import array_module, join, module_name
from .local_sort import (
    argsort_columns,
    argsort_lines,
    lexsort_lines,
    sort_lines,
    sort_pieces,
    sorts_quickly,
)
from .ordered_keys import KINDS, has_ordered_keys
from .runs import (
    count_runs,
    group_blocks,
    is_out_of_core,
    machine_in_use,
    most_line_bytes,
)
from .splitters import find_brackets, find_candidates, find_cuts, sample_run

#: Lines too long for one block that are sorted each by itself; more are an error.
MOST_LONG_LINES = 64


def sort(
    a: Any,
    axis: int | None = -1,
    kind: str | None = None,
    order: Any = None,
    *,
    stable: bool | None = None,
    descending: bool = False,
) -> Any:
    """Sort along an axis, as `numpy.sort`; also for `np.sort(x)` of a dask array.

    The sort is stable, whatever `kind` and `stable` say. NaN and NaT come last, also with
    `descending`. Complex numbers are sorted by real, then imaginary part.

    Parameters
    ----------
    a
        Array of any shape, with numbers, bools, dates, durations or strings. Chunks may be unknown.
    axis
        Axis to sort along; None sorts the flattened array.
    kind, stable
        Accepted for NumPy's sake.
    order
        Must be None: there are no structured dtypes.
    descending
        Put the largest first, and keep equal elements in order.

    Returns
    -------
    dask array
        With the shape, chunks and dtype of `a`.

    Raises
    ------
    TypeError
        if the dtype has no order, or the blocks are neither NumPy's nor CuPy's.
    ValueError
        if lines lie over chunks of unknown size on other axes, and need to be rechunked.

    Source: exact splitting, see `algorithms.splitters`.

    >>> x = da.from_array([3.0, np.nan, 1.0, 2.0], chunks=2)
    >>> sort(x).compute()
    array([ 1.,  2.,  3., nan])
    >>> sort(x, descending=True).chunks
    ((2, 2),)
    """
    a = check_sortable("sort", a, kind, order, stable)
    a, axis = flatten(a, axis)
    return _sort_columns("sort", [a], axis, index=False, descending=bool(descending))


def argsort(
    a: Any,
    axis: int | None = -1,
    kind: str | None = None,
    order: Any = None,
    *,
    stable: bool | None = None,
    descending: bool = False,
) -> Any:
    """Return the indices that sort along an axis, as `numpy.argsort` with ``kind="stable"``.

    Parameters and errors are those of `sort`.

    Returns
    -------
    dask array
        int64, with the shape and chunks of `a`.

    >>> argsort(da.from_array([3, 1, 3, 1], chunks=2), descending=True).compute()
    array([0, 2, 1, 3])
    """
    a = check_sortable("argsort", a, kind, order, stable)
    a, axis = flatten(a, axis)
    return _sort_columns("argsort", [a], axis, index=True, descending=bool(descending))


def lexsort(keys: Any, axis: int = -1) -> Any:
    """Return the indices that sort by several keys, the last key first, as `numpy.lexsort`.

    `np.lexsort((a, b))` of dask arrays in a tuple calls it; with a list NumPy computes the arrays.

    Parameters
    ----------
    keys
        Arrays of one shape, or one array whose rows are the keys.
    axis
        Axis of the keys to sort along.

    Returns
    -------
    dask array
        int64, with the shape and chunks of the last key.

    Raises
    ------
    TypeError
        if there is no key, or a dtype has no order.
    ValueError
        if the keys have different shapes.

    >>> surnames = da.from_array(["Hertz", "Galilei", "Hertz"], chunks=2)
    >>> names = da.from_array(["Heinrich", "Galileo", "Gustav"], chunks=2)
    >>> lexsort((names, surnames)).compute()
    array([1, 2, 0])
    """
    columns = [da.asanyarray(k) for k in keys][::-1]
    if not columns:
        raise TypeError("lexsort: there are no keys, give at least one array")
    columns = [check_sortable("lexsort", c) for c in columns]
    first = columns[0]
    for c in columns[1:]:
        if c.ndim != first.ndim or not all(
            math.isnan(n) or math.isnan(m) or n == m
            for n, m in zip(c.shape, first.shape, strict=True)
        ):
            raise ValueError(
                f"lexsort: keys have shapes {c.shape} and {first.shape}, use equal ones"
            )
    if first.ndim == 0:
        raise TypeError("lexsort: keys are scalars, use arrays with at least one axis")
    columns = [c if _same_chunks(c, first) else c.rechunk(first.chunks) for c in columns]
    axis = _normalize("lexsort", axis, first.ndim)
    return _sort_columns("lexsort", columns, axis, index=True, descending=False)


def sort_complex(a: Any) -> Any:
    """Sort along the last axis as complex numbers, as `numpy.sort_complex`.

    >>> sort_complex(da.from_array([2, 1], chunks=1)).compute()
    array([1.+0.j, 2.+0.j])
    """
    a = da.asanyarray(a)
    if a.dtype.kind != "c":
        a = a.astype("F" if a.dtype.char in "bhBH" else "G" if a.dtype.char == "g" else "D")
    return sort(a)


# ---- arguments


def check_sortable(
    name: str, a: Any, kind: Any = None, order: Any = None, stable: bool | None = None
) -> Any:
    """The argument as a dask array; errors for what cannot be sorted."""
    if order is not None:
        raise TypeError(f"{name}: order={order!r}: structured dtypes are not sorted, sort a field")
    if kind is not None and stable is not None:
        raise ValueError(f"{name}: give kind or stable, not both")
    if kind is not None and str(kind)[:1].lower() not in "qmhs":
        raise ValueError(
            f"{name}: kind={kind!r}: use 'quicksort', 'mergesort', 'heapsort', 'stable'"
        )
    a = da.asanyarray(a)
    if a.dtype.kind not in KINDS or a.dtype.names:
        raise TypeError(
            f"{name}: dtype {a.dtype} has no order here: use numbers, bools, dates or strings, "
            "such as x.astype(float)"
        )
    if not (type(a._meta) is np.ndarray or module_name(a) == "cupy"):
        raise TypeError(
            f"{name}: blocks are {type(a._meta).__name__}: use NumPy's or CuPy's arrays, such as "
            "x.map_blocks(np.asarray)"
        )
    return a


def _normalize(name: str, axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise np.exceptions.AxisError(axis, ndim, name)
    return axis % ndim


def flatten(a: Any, axis: int | None) -> tuple[Any, int]:
    if axis is None and a.ndim != 1:
        empty = 0 in a.shape  # Dask cannot ravel that
        return (da.from_array(a._meta.reshape(-1)) if empty else a.ravel()), 0
    if axis is None:
        return a, 0
    return a, _normalize("sort", axis, a.ndim)


def _same_chunks(a: Any, b: Any) -> bool:
    """Whether two arrays have the same chunks, as far as they are known."""
    return len(a.chunks) == len(b.chunks) and all(
        len(c) == len(d) and all(m == n or math.isnan(m + n) for m, n in zip(c, d, strict=True))
        for c, d in zip(a.chunks, b.chunks, strict=True)
    )


# ---- any shape


def _sort_columns(
    what: str, columns: list[Any], axis: int, *, index: bool, descending: bool
) -> Any:
    """Sort arrays of one shape together, the first the most important."""
    x = columns[0]
    if x.ndim == 1:
        return sort_long(what, columns, index=index, descending=descending)
    function = _block_sorter(columns, index, descending)
    if x.numblocks[axis] > 1 and not lines_fit(columns, axis):
        return _sort_large_lines(what, columns, axis, index=index, descending=descending)
    return sort_line_blocks(what, columns, axis, function, is_index=index)


def _block_sorter(columns: list[Any], index: bool, descending: bool) -> Callable[..., Any]:
    if not index:
        return partial(_sort_lines, descending=descending)
    if len(columns) > 1:
        return _lexsort_lines
    return partial(_argsort_lines, descending=descending)


def _line_bytes(columns: list[Any], axis: int) -> float:
    """Bytes of the largest block with whole lines along the axis."""
    x = columns[0]
    others = math.prod(max(c) for i, c in enumerate(x.chunks) if i != axis)
    return float(others * x.shape[axis] * sum(c.dtype.itemsize for c in columns))


def lines_fit(columns: list[Any], axis: int) -> bool:
    nbytes = _line_bytes(columns, axis)  # NaN where chunks are unknown
    largest = math.prod(max(c) for c in columns[0].chunks) * columns[0].dtype.itemsize
    return not nbytes > most_line_bytes(largest, machine_in_use(module_name(columns[0])))


def sort_line_blocks(
    what: str, columns: list[Any], axis: int, function: Callable[..., Any], *, is_index: bool
) -> Any:
    """Join the blocks along the axis, apply a function, and cut its result as the input was."""
    x = columns[0]
    name = f"{what}-{tokenize(columns, axis, function)}"
    whole, n = f"{what}-lines-{name}", x.numblocks[axis]
    others = [range(1) if i == axis else range(k) for i, k in enumerate(x.numblocks)]
    dsk: dict[Any, Any] = {}
    for index in product(*others):
        keys = [(*index[:axis], b, *index[axis + 1 :]) for b in range(n)]
        reads = [[_ref(c.name, k) for k in keys] for c in columns]
        key: Any = (name, *index) if n == 1 else (whole, *index)
        dsk[key] = Task(key, function, List(*[List(*r) for r in reads]), axis)
        if n == 1:
            continue
        known = not any(math.isnan(c) for c in x.chunks[axis])
        lengths: Any = (f"{what}-lengths-{name}", *index)
        if not known:
            each: list[Any] = [(f"{what}-length-{name}", *k) for k in keys]
            for length, block in zip(each, reads[0], strict=True):
                dsk[length] = Task(length, _length, block, axis)
            dsk[lengths] = Task(lengths, tuple, List(*[TaskRef(k) for k in each]))
        start = 0
        for b, k in enumerate(keys):
            cut: Any = (name, *k)
            if not known:
                dsk[cut] = Task(cut, _cut_block, TaskRef(key), TaskRef(lengths), b, axis)
                continue
            stop = start + int(x.chunks[axis][b])
            dsk[cut] = Task(cut, getitem, TaskRef(key), (*[slice(None)] * axis, slice(start, stop)))
            start = stop
    return _array(name, dsk, columns, is_index)


def _ref(name: str, block: tuple[Any, ...]) -> TaskRef:
    return TaskRef((name, *block))


def _array(name: str, dsk: dict[Any, Any], columns: list[Any], is_index: bool) -> Any:
    x = columns[0]
    meta = x._meta
    if is_index:
        meta = array_module(meta).empty((0,) * x.ndim, np.intp)
    graph = HighLevelGraph.from_collections(name, dsk, dependencies=columns)
    return da.Array(graph, name, x.chunks, meta=meta)


def _sort_large_lines(
    what: str, columns: list[Any], axis: int, *, index: bool, descending: bool
) -> Any:
    """Sort lines over several blocks, of which a block of whole lines has no room."""
    x = columns[0]
    line = x.shape[axis] * sum(c.dtype.itemsize for c in columns)
    most = most_line_bytes(0, machine_in_use(module_name(x)))
    others = [i for i in range(x.ndim) if i != axis]
    if any(math.isnan(n) for n in x.shape):
        raise ValueError(
            f"{what}: axis {axis} lies over {x.numblocks[axis]} blocks, and other chunk sizes are "
            "unknown: call x.compute_chunk_sizes() before"
        )
    count = math.prod(x.shape[i] for i in others)
    if line > most and count <= MOST_LONG_LINES:
        sorted_lines = [
            sort_long(
                what,
                [c[(*line[:axis], slice(None), *line[axis:])] for c in columns],
                index=index,
                descending=descending,
            )
            for line in product(*(range(x.shape[i]) for i in others))
        ]
        out = da.stack(sorted_lines, axis=-1).reshape(
            (x.shape[axis], *(x.shape[i] for i in others))
        )
        return da.moveaxis(out, 0, axis).rechunk(x.chunks)
    chunks = {axis: -1, **dict.fromkeys(others, "auto")}
    itemsize = sum(c.dtype.itemsize for c in columns)
    limit = max(1, int(most * x.dtype.itemsize / itemsize))
    wide = [columns[0].rechunk(chunks, block_size_limit=limit)]
    wide += [c.rechunk(wide[0].chunks) for c in columns[1:]]
    function = _block_sorter(columns, index, descending)
    return sort_line_blocks(what, wide, axis, function, is_index=index).rechunk(x.chunks)


# ---- one long line


def sort_long(what: str, columns: list[Any], *, index: bool, descending: bool) -> Any:
    """Sort 1-D arrays of one length together, the first the most important.

    Returns the order with `index`, else the first array in order.
    """
    x = columns[0]
    lengths, machine = x.chunks[0], machine_in_use(module_name(x))
    nbytes = x.shape[0] * sum(c.dtype.itemsize for c in columns) + 8 * index * x.shape[0]
    # timsort merges; the quick sort of values, and CUB, begin anew
    is_cheap = module_name(x) == "numpy" and (index or not sorts_quickly(x.dtype))
    runs = count_runs(nbytes, len(lengths), machine, is_merge_cheap=is_cheap)
    if runs == 1 or not all(has_ordered_keys(c.dtype) for c in columns):
        function = _block_sorter(columns, index, descending)
        return sort_line_blocks(what, columns, 0, function, is_index=index)
    copies = is_out_of_core(nbytes, machine)
    builder = _SampleSort(what, columns, index, descending, runs, copies)
    return builder.build()


class _SampleSort:
    """The graph of a sample sort; each step is named after its function below."""

    def __init__(
        self, what: str, columns: list[Any], index: bool, descending: bool, runs: int, copies: bool
    ):
        self.columns, self.index, self.descending, self.copies = columns, index, descending, copies
        self.lengths = columns[0].chunks[0]
        self.known = not any(math.isnan(n) for n in self.lengths)
        self.groups = group_blocks(self.lengths, runs)
        self.token = tokenize(columns, index, descending, runs, copies)
        self.what, self.name = what, f"{what}-{self.token}"
        self.dsk: dict[Any, Any] = {}

    def build(self) -> Any:
        runs = range(len(self.groups))
        lengths = None if self.known else self._lengths()
        made = [self._run(i, lengths) for i in runs]
        samples = [
            self.add("sample", i, _sample, made[i], len(self.columns), len(self.groups),
                     self.descending)
            for i in runs
        ]  # fmt: skip
        ends = [group[-1] + 1 for group in self.groups[:-1]]
        ranks: Any = lengths
        if self.known:
            totals = np.cumsum([0, *self.lengths]).tolist()
            ranks = tuple(int(totals[e]) for e in ends)
        brackets = self.add(
            "brackets", 0, _brackets, List(*samples), ranks, tuple(ends), self.known
        )
        found = [
            self.add("candidates", i, _candidates, made[i], brackets, len(self.columns),
                     self.descending)
            for i in runs
        ]  # fmt: skip
        cuts = self.add("cuts", 0, _find_cuts, List(*found), brackets)
        for j, group in enumerate(self.groups):
            pieces = [
                self.add("piece", (i, j), _piece, made[i], cuts, i, j, self.copies) for i in runs
            ]
            merged = self.add(
                "merge", j, _merge, List(*pieces), len(self.columns), self.index, self.descending
            )
            self._parts(merged, group, lengths)
        return _array(self.name, self.dsk, self.columns, self.index)

    def add(self, step: str, index: Any, function: Callable[..., Any], *args: Any) -> TaskRef:
        """Add the task of a step with this index, an int or a tuple. Returns a reference to it."""
        index = index if isinstance(index, tuple) else (index,)
        key = (f"{self.what}-{step}-{self.token}", *index)
        self.dsk[key] = Task(key, function, *args)
        return TaskRef(key)

    def _lengths(self) -> TaskRef:
        name = self.columns[0].name
        each = [self.add("length", b, len, TaskRef((name, b))) for b in range(len(self.lengths))]
        return self.add("lengths", 0, tuple, List(*each))

    def _run(self, i: int, lengths: TaskRef | None) -> TaskRef:
        group = self.groups[i]
        blocks = List(*[List(*[TaskRef((c.name, b)) for b in group]) for c in self.columns])
        if not self.index:
            return self.add("run", i, _sorted_run, blocks, self.descending)
        if lengths is None:
            start: Any = int(sum(self.lengths[: group[0]]))
            return self.add("run", i, _sorted_run_with_index, blocks, start, self.descending)
        start = self.add("start", i, _start_of, lengths, group[0])
        return self.add("run", i, _sorted_run_with_index, blocks, start, self.descending)

    def _parts(self, merged: TaskRef, group: list[int], lengths: TaskRef | None) -> None:
        """Cut an output run into its blocks."""
        start = 0
        for b in group:
            key = (self.name, b)
            if lengths is not None:
                self.dsk[key] = Task(key, _cut_of_group, merged, lengths, group[0], b)
                continue
            stop = start + int(self.lengths[b])
            self.dsk[key] = Task(key, getitem, merged, slice(start, stop))
            start = stop


# ---- tasks


def _sort_lines(blocks: list[list[Any]], axis: int, descending: bool) -> Any:
    if blocks[0][0].ndim == 1:
        return sort_pieces(blocks[0], descending)
    return sort_lines(join(blocks[0], axis), axis, descending)


def _argsort_lines(blocks: list[list[Any]], axis: int, descending: bool) -> Any:
    (column,) = blocks
    return argsort_lines(column[0] if len(column) == 1 else join(column, axis), axis, descending)


def _lexsort_lines(blocks: list[list[Any]], axis: int) -> Any:
    return lexsort_lines([join(column, axis) for column in blocks], axis)


def _length(block: Any, axis: int) -> int:
    return int(block.shape[axis])


def _cut_block(whole: Any, lengths: Sequence[int], number: int, axis: int) -> Any:
    """The part of joined lines that lies where a block was."""
    start = sum(lengths[:number])
    return whole[(*[slice(None)] * axis, slice(start, start + lengths[number]))]


def _sorted_run(blocks: list[list[Any]], descending: bool) -> tuple[Any, ...]:
    return (sort_pieces(blocks[0], descending),)


def _sorted_run_with_index(
    blocks: list[list[Any]], start: int, descending: bool
) -> tuple[Any, ...]:
    """The sorted keys, and where each was in the whole array."""
    columns = [join(column) for column in blocks]
    order = argsort_columns(columns, descending)
    return (*[c[order] for c in columns], order + start)


def _start_of(lengths: Sequence[int], block: int) -> int:
    return int(sum(lengths[:block]))


def _sample(run: tuple[Any, ...], keys: int, runs: int, descending: bool) -> Any:
    """Sample the key columns of a run."""
    return sample_run(run[:keys], runs, descending)


def _brackets(samples: list[Any], ranks: Any, ends: tuple[int, ...], known: bool) -> Any:
    if not known:
        totals = np.cumsum([0, *ranks]).tolist()
        ranks = [totals[e] for e in ends]
    return find_brackets(samples, ranks)


def _candidates(run: tuple[Any, ...], brackets: Any, keys: int, descending: bool) -> Any:
    return find_candidates(run[:keys], brackets, descending)


def _find_cuts(candidates: list[Any], brackets: Any) -> Any:
    return find_cuts(candidates, brackets)


def _piece(run: tuple[Any, ...], cuts: Any, i: int, j: int, copies: bool) -> tuple[Any, ...]:
    """What a run gives to an output run; a copy where memory is short, to let the run go."""
    start, stop = int(cuts[i, j]), int(cuts[i, j + 1])
    return tuple(c[start:stop].copy() if copies else c[start:stop] for c in run)


def _merge(pieces: list[tuple[Any, ...]], keys: int, index: bool, descending: bool) -> Any:
    """Merge sorted pieces, those of the first runs first."""
    if not index:
        return sort_pieces([p[0] for p in pieces], descending)
    columns = [join([p[c] for p in pieces]) for c in range(keys)]
    order = argsort_columns(columns, descending, presorted=True)
    return join([p[keys] for p in pieces])[order]


def _cut_of_group(merged: Any, lengths: Sequence[int], first: int, block: int) -> Any:
    start = int(sum(lengths[first:block]))
    return merged[start : start + int(lengths[block])]
