"""CuPy arrays and containers of them: bytes, order, and copies on the host."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Event, runtime

from ...errors import OutOfMemory
from ...frontend.graph import is_plain
from ...values import deep_leaves, is_container, map_deep_leaves
from .result_rooms import one_copy_pays

Refused = cupy.cuda.memory.OutOfMemoryError
#: What the runtime, the driver (Numba's errors, too) and CUDA's libraries say without memory.
NO_MEMORY = re.compile(
    "cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CU[A-Z]+_(STATUS_)?ALLOC(ATION)?_FAILED"
)
#: What has nothing on a device.
HOST_TYPES = (int, float, complex, str, bytes, np.generic, np.ndarray)
#: Bytes beside its own that a part of a larger array may keep without being copied for it.
REST = 2**12


# ---- values


def is_refusal(error: BaseException) -> bool:
    """Whether an error says that memory was refused.

    `OutOfMemory` is none: a computation in a task has raised it, which has done what it could.

    >>> is_refusal(MemoryError()), is_refusal(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    (True, True)
    >>> is_refusal(OutOfMemory()), is_refusal(RuntimeError("CUBLAS_STATUS_INTERNAL_ERROR"))
    (False, False)
    """
    if isinstance(error, MemoryError):
        return not isinstance(error, OutOfMemory)
    return isinstance(error, Exception) and NO_MEMORY.search(str(error)) is not None


def device_bytes(value: Any) -> int:
    """Bytes of device memory in a value; what lives on the host takes none.

    >>> device_bytes((np.ones(5), None))
    0
    """
    if isinstance(value, cupy.ndarray):
        return int(value.nbytes)
    if is_container(value) or isinstance(value, (tuple, list)):
        return sum(int(v.nbytes) for v in deep_leaves(value) if isinstance(v, cupy.ndarray))
    return 0


def array_bytes(value: Any) -> int:
    """Bytes of arrays that are on a device, or have left it."""
    if type(value) is cupy.ndarray:
        return int(value.nbytes)
    arrays = [v.array if isinstance(v, PinnedCopy) else v for v in deep_leaves(value)]
    return sum([int(v.nbytes) for v in arrays if isinstance(v, (cupy.ndarray, np.ndarray))])


def is_on_host(value: Any) -> bool:
    """Whether all of a value is surely on the host.

    A task that returns None may have written to a device.

    >>> is_on_host(1.5), is_on_host((np.ones(5), "a")), is_on_host(None)
    (True, True, False)
    """
    if is_container(value):
        return all(map(is_on_host, deep_leaves(value)))
    return isinstance(value, HOST_TYPES) and not getattr(value, "dtype", np.dtype(int)).hasobject


def make_contiguous(value: Any) -> Any:
    """The same value with arrays that one copy can move: contiguous, in either order."""
    if is_contiguous_array(value):
        return value
    return map_deep_leaves(
        lambda v: v if is_contiguous_array(v) else cupy.ascontiguousarray(v), value
    )


def is_contiguous_array(value: Any) -> bool:
    return all(
        v.flags.c_contiguous or v.flags.f_contiguous
        for v in deep_leaves(value)
        if isinstance(v, cupy.ndarray)
    )


def memory_order(array: Any) -> str:
    return "C" if array.flags.c_contiguous else "F"


def as_one_array(value: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any]] | None:
    """One array over arrays that lie close together, and how to take them out of a copy.

    None where they do not share one piece of memory.
    """
    every = list(deep_leaves(value))
    if len(every) < 2 or not all(isinstance(v, cupy.ndarray) and v.nbytes for v in every):
        return None
    memory = every[0].data.mem
    if any(v.data.mem is not memory or not v.flags.c_contiguous for v in every):
        return None
    begin = min([v.data.ptr for v in every])
    size = max([v.data.ptr + v.nbytes for v in every]) - begin
    if not one_copy_pays(size, sum([v.nbytes for v in every])):
        return None

    def parts(copy: Any) -> Any:
        return map_deep_leaves(
            lambda v: cupy.ndarray(v.shape, v.dtype, copy.data + (v.data.ptr - begin)), value
        )

    first = min(every, key=lambda v: v.data.ptr)
    return cupy.ndarray((size,), np.uint8, first.data), parts


def is_plain_host_array(v: Any) -> bool:
    """Whether a value is an array of the host such as devices have."""
    return isinstance(v, np.ndarray) and is_plain(v.dtype)


def is_pinned(array: Any) -> bool:
    """Whether an array of the host is in pinned memory."""
    return bool(runtime.pointerGetAttributes(array.ctypes.data).type == runtime.memoryTypeHost)


def is_over(event: Event) -> bool:
    """Whether an event is over; also True after an error, which `synchronize` reports."""
    try:
        return bool(event.done)
    except runtime.CUDARuntimeError:
        return True


@dataclass(slots=True)
class PinnedCopy:
    """A CuPy array's bytes in pinned memory; `order` is how the device had them."""

    array: Any
    order: str

    def __getitem__(self, n: int) -> PinnedCopy:
        return PinnedCopy(np.ascontiguousarray(to_host_array(self)[n]), "C")


def to_host_array(v: Any) -> Any:
    if not isinstance(v, PinnedCopy):
        return v
    return v.array.reshape(-1).reshape(v.array.shape, order=v.order)


def copy_pinned(v: Any) -> Any:
    """A copy of an array that has left its device; other values are returned as they are."""
    return to_host_array(v).copy("K") if isinstance(v, PinnedCopy) else v


def to_current_device(v: Any) -> Any:
    """On the caller's current device and stream; the pinned memory is free when it returns."""
    if not isinstance(v, PinnedCopy):
        return v
    out = cupy.asarray(to_host_array(v), order=v.order)
    cupy.cuda.get_current_stream().synchronize()
    return out


def requested_bytes(error: BaseException, least: int) -> int:
    """Bytes that the allocator was asked for, from CuPy's own words."""
    words = str(error).replace(",", "").split()
    numbers = [int(w) for w in words if w.isdigit()]
    return max([least, *numbers[:1]])
