"""The wire format of values that travel between processes in one parcel.

What is small in one buffer, what is on a device in one batch through pinned memory. Sends nothing
itself.

Within a process a `Bundle` is only a dictionary, and device arrays in it stay where they are. It is
packed when it is pickled, which `distributed` does when another worker or the client asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from dask.sizeof import sizeof as dask_sizeof

from ..values import deep_leaves, map_deep_leaves, sizeof
from .wire import BroadcastArray, BufferSlot, LentArray, LostArray, OffDevice

Key = Any

#: Bytes of an array up to which it travels in the common buffer.
SMALL = 2**16
ALIGNMENT = 64


class Bundle:
    """Values by their keys. Pickled, it is a few buffers, however many values there are.

    >>> import pickle
    >>> load = pickle.loads(pickle.dumps(Bundle({"a": np.arange(3), "b": (1, np.ones(2))})))
    >>> load.values["a"].tolist(), load.values["b"][0]
    ([0, 1, 2], 1)
    """

    __slots__ = ("__weakref__", "near", "values")

    def __init__(self, values: dict[Key, Any], near: bool = False):
        self.values = values
        self.near = near  # only processes that can read this one's device memory get it

    def take(self, keys: Iterable[Key], near: bool = False) -> Bundle:
        """A part of it, which shares the values."""
        return Bundle({k: self.values[k] for k in keys}, near)

    def __reduce__(self) -> Any:
        return _unpack_values, pack_values(self.values, self.near)

    def __repr__(self) -> str:
        return f"<Cargo of {len(self.values)} value{'s'[: len(self.values) != 1]}>"


def _sizeof_cargo(cargo: Bundle) -> int:
    """Bytes on the host: what is on a device takes none of the worker's memory."""
    return sum(0 if _on_device(v) else sizeof(v) for v in deep_leaves(list(cargo.values.values())))


dask_sizeof.register(Bundle, _sizeof_cargo)


def pack_values(values: Mapping[Key, Any], near: bool = False) -> tuple[dict[Key, Any], list[Any]]:
    """The values with slots in place of arrays, and the buffers that these lie in.

    The first buffer has what is small, the second what was on devices: for one that is not `near`,
    or cannot be lent.
    """
    if near:
        values = _lend_arrays(values)
    small: list[Any] = []
    away: list[Any] = []

    def looked_at(leaf: Any) -> None:
        if _is_packable(leaf):
            small.append(leaf)
        elif _on_device(leaf):
            away.append(leaf)

    for value in values.values():
        for leaf in deep_leaves(value):
            looked_at(leaf)
    here, there = _slots(small, device=False), _slots(away, device=True)
    buffers = [_host_buffer(small, here), _device_buffer(away, there)]
    next_small, next_away = iter(here), iter(there)

    def slot(leaf: Any) -> Any:
        if _is_packable(leaf):
            return next(next_small)
        if _on_device(leaf):
            return next(next_away)
        if _is_repeated(leaf):
            once = tuple(slice(0, 1) if s == 0 else slice(None) for s in leaf.strides)
            return BroadcastArray(np.ascontiguousarray(leaf[once]), leaf.shape)
        return leaf

    return {k: map_deep_leaves(slot, v) for k, v in values.items()}, buffers


def _lend_arrays(values: Mapping[Key, Any]) -> dict[Key, Any]:
    """The values with what their owner lends in place of large arrays on devices."""
    from . import cuda_ipc  # here, for it imports CuPy

    used = set()

    def lend_leaf(leaf: Any) -> Any:
        if not _on_device(leaf) or leaf.nbytes <= SMALL:
            return leaf
        found = cuda_ipc.lend_array(leaf)
        if found is None:
            return leaf
        used.add(leaf.device.id)
        return found

    out = {k: map_deep_leaves(lend_leaf, v) for k, v in values.items()}
    cuda_ipc.finish(used)
    return out


def _fetch_lent(values: dict[Key, Any]) -> list[Any]:
    """Copy all lent arrays, in order.

    The owner may free them when this returns. An array that cannot be copied becomes a `LostArray`:
    the task that reads it raises the error.
    """
    things = [leaf for v in values.values() for leaf in deep_leaves(v) if type(leaf) is LentArray]
    if not things:
        return []
    try:
        from . import cuda_ipc

        arrays = cuda_ipc.fetch_arrays(things)
        return [OffDevice(a) if type(a) is np.ndarray else a for a in arrays]
    except Exception as error:
        return [LostArray(f"{type(error).__name__}: {error}")] * len(things)


def _unpack_values(values: dict[Key, Any], buffers: list[Any]) -> Bundle:
    host, device = buffers
    fetched = iter(_fetch_lent(values))

    def array(leaf: Any) -> Any:
        if type(leaf) is LentArray:
            return next(fetched)
        if type(leaf) is BufferSlot:
            return OffDevice(leaf.read(device)) if leaf.device else leaf.read(host)
        if type(leaf) is BroadcastArray:
            return np.broadcast_to(leaf.values, leaf.shape)
        return leaf

    return Bundle({k: map_deep_leaves(array, v) for k, v in values.items()})


def _is_packable(leaf: Any) -> bool:
    return (
        type(leaf) is np.ndarray
        and leaf.nbytes <= SMALL
        and leaf.flags.c_contiguous
        and leaf.dtype.kind in "biufcmM"
    )


def _is_repeated(leaf: Any) -> bool:
    return type(leaf) is np.ndarray and 0 in leaf.strides and leaf.size > 1


def _on_device(leaf: Any) -> bool:
    kind = type(leaf)
    return kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy"


def _slots(arrays: list[Any], device: bool) -> list[BufferSlot]:
    rounded = [-(-a.nbytes // ALIGNMENT) * ALIGNMENT for a in arrays]
    starts = [0, *accumulate(rounded)]
    return [BufferSlot(a.shape, a.dtype, s, device) for a, s in zip(arrays, starts, strict=False)]


def _length(slots: list[BufferSlot]) -> int:
    return slots[-1].start + slots[-1].nbytes if slots else 0


def _host_buffer(arrays: list[Any], slots: list[BufferSlot]) -> Any:
    buffer = np.empty(_length(slots), np.uint8)
    for a, s in zip(arrays, slots, strict=True):
        s.read(buffer)[...] = a
    return buffer


def _device_buffer(arrays: list[Any], slots: list[BufferSlot]) -> Any:
    if not arrays:
        return np.empty(0, np.uint8)
    from ..devices.cuda.links import gather_on_host  # here, for it imports CuPy

    return gather_on_host(arrays, [s.start for s in slots], _length(slots))


def off_device(value: Any) -> Iterator[OffDevice]:
    """What a value has that was on a device of another process."""
    return (leaf for leaf in deep_leaves(value) if type(leaf) is OffDevice)


def put_back(value: Any, put: Callable[[Any], Any]) -> Any:
    """The value with `put(array)` in place of each array that was on a device elsewhere."""
    return map_deep_leaves(lambda v: put(v.array) if type(v) is OffDevice else v, value)
