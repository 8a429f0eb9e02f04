"""Nested values: their bytes, their leaves, and maps over them.

The file touches no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from dask.sizeof import sizeof as dask_sizeof

#: Libraries whose arrays are in files, whatever `nbytes` they say.
FILES = {"zarr", "h5py", "netCDF4", "tiledb"}
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
