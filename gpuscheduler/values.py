"""Nested values: their bytes, their leaves, and maps over them.

The file touches no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from dask.sizeof import sizeof as dask_sizeof

from .sparse_parts import arrays_of, is_scipys, library_of, rebuild

#: Libraries whose arrays are in files, whatever `nbytes` they say.
FILES = {"zarr", "h5py", "netCDF4", "tiledb"}
#: Types of containers of which each run has its own.
RENEWED = frozenset({list, tuple, set})
_SMALL = (int, float, complex, bool, str, bytes, type(None), np.generic)


def sizeof(value: Any) -> int:
    """Bytes of a chunk: arrays by their `nbytes`, containers by what they hold.

    Chunks may be dicts and tuples of arrays: Dask's mean, var and arg-reductions make them.

    >>> sizeof({"total": np.ones(4), "n": (np.ones(2), 3)})
    80
    """
    kind = type(value)
    if kind is np.ndarray:
        return int(value.nbytes)
    if isinstance(value, _SMALL):
        return 32
    try:
        if kind is dict:
            return sum(sizeof(v) for v in value.values())
        if isinstance(value, tuple) or (kind is list and len(value) <= 64):
            return sum(sizeof(v) for v in value)
        if isinstance(value, np.memmap) or kind.__module__.partition(".")[0] in FILES:
            return 0  # the bytes are in a file: no memory gets smaller without them
        if library_of(kind) is not None:
            return sum(sizeof(v) for v in arrays_of(value))
        if is_scipys(kind):  # of lists or a dict, or of a class of the user's
            held = [v.tolist() if isinstance(v, np.ndarray) and v.dtype.hasobject else v
                    for v in vars(value).values()]  # fmt: skip
            return sum(sum(map(dask_sizeof, v)) if type(v) is list else sizeof(v) for v in held)
        nbytes = getattr(value, "nbytes", None)
        if isinstance(nbytes, (int, np.integer)):
            return int(nbytes)
        return int(dask_sizeof(value))
    except Exception:  # an object may refuse to be looked at, or hold itself: it is an estimate
        return 32


def leaves(value: Any) -> Iterator[Any]:
    """The arrays and other values inside dicts, lists and tuples.

    >>> list(leaves({"a": (1, [2, 3])}))
    [1, 2, 3]
    """
    if type(value) is dict:
        for v in value.values():
            yield from leaves(v)
    elif type(value) in (tuple, list) or _has_names(value):
        for v in value:
            yield from leaves(v)
    else:
        yield value


def map_leaves(f: Callable[[Any], Any], value: Any) -> Any:
    """The same containers with `f` applied to what they hold.

    >>> map_leaves(lambda v: v + 1, {"a": (1, [2, 3])})
    {'a': (2, [3, 4])}
    >>> map_leaves(abs, np.linalg.slogdet(-np.eye(3)))
    SlogdetResult(sign=np.float64(1.0), logabsdet=np.float64(0.0))
    """
    kind = type(value)
    if kind is dict:
        return {k: map_leaves(f, v) for k, v in value.items()}
    if kind is tuple or kind is list:
        return kind(map_leaves(f, v) for v in value)
    if _has_names(value):
        return kind._make([map_leaves(f, v) for v in value])
    return f(value)


def renew(value: Any) -> Any:
    """A list, tuple or set made anew, with those in it; any other value itself.

    Dask gives each run its own of those that stand in a graph, so tasks may change them in place.

    >>> value = [1, ([2], {3})]
    >>> renew(value) == value, renew(value) is value, renew(value)[1][0] is value[1][0]
    (True, False, False)
    """
    try:
        return _renew_each(value)
    except RecursionError:  # it holds itself
        return value


def _renew_each(value: Any) -> Any:
    kind = type(value)
    if kind not in RENEWED:
        return value
    if kind is set or RENEWED.isdisjoint(map(type, value)):
        return kind(value)
    return kind(map(_renew_each, value))


def is_container(value: Any) -> bool:
    """Whether a value holds others: a dict, a list, a tuple or a sparse matrix.

    >>> is_container((1, 2)), is_container(np.ones(2))
    (True, False)
    """
    kind = type(value)
    return kind in (dict, tuple, list) or _has_names(value) or library_of(kind) is not None


def deep_leaves(value: Any) -> Iterator[Any]:
    """The leaves of a value, with the arrays of sparse matrices in place of these.

    For what moves and counts bytes. What traces and fuses takes a sparse matrix for one thing.

    >>> import scipy.sparse
    >>> [a.dtype.kind for a in deep_leaves((scipy.sparse.eye_array(3, format="csr"), np.ones(3)))]
    ['f', 'i', 'i', 'f']
    """
    for leaf in leaves(value):
        if library_of(type(leaf)) is None:
            yield leaf
        else:
            for part in arrays_of(leaf):
                yield from deep_leaves(part)


def map_deep_leaves(f: Callable[[Any], Any], value: Any) -> Any:
    """As `map_leaves`, and inside of sparse matrices on each of their arrays.

    They become matrices of SciPy or CuPy, as their new arrays are (see `sparse_parts.rebuild`).

    >>> import scipy.sparse
    >>> map_deep_leaves(lambda a: a + 0, scipy.sparse.eye_array(2, format="csr")).toarray()
    array([[1., 0.],
           [0., 1.]])
    """

    def change(leaf: Any) -> Any:
        if library_of(type(leaf)) is None:
            return f(leaf)
        return rebuild(leaf, [map_deep_leaves(f, v) for v in arrays_of(leaf)])

    return map_leaves(change, value)


class FunctionSet:
    """Some functions; in it is what is one of them, never what is only equal to one.

    Users' objects may be called, too, and say by themselves what they are equal to.

    >>> abs in FunctionSet(abs, len), max in FunctionSet(abs, len)
    (True, False)
    """

    __slots__ = ("_ids", "functions")

    def __init__(self, *functions: Any):
        self.functions, self._ids = functions, frozenset(map(id, functions))

    def __contains__(self, function: Any) -> bool:
        return id(function) in self._ids

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)


def part_of(value: Any, path: Iterable[int]) -> Any:
    """What lies at a path in tuples.

    >>> part_of((1, (2, 3)), (1, 0))
    2
    """
    for n in path:
        value = value[n]
    return value


def _has_names(value: Any) -> bool:
    """Whether it is a tuple with names, as NumPy's factors come."""
    return isinstance(value, tuple) and hasattr(value, "_make")
