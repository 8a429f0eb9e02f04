"""Arrays on GPUs that other processes of this machine read in place, through CUDA IPC.

It imports CuPy, as `cuda` does. Who lends an array keeps it until the other has its copy.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Device, Stream, runtime

from ..forks import new_lock
from .wire import LentArray

#: Seconds for which memory of another process stays open that is not read any more, and at most
#: twice that: to open it takes up to some milliseconds, and until it is closed it is not free.
KEPT = 10.0
#: The GPUs on which arrays of other processes arrive, each with as many as the others.
devices: list[int] = []

_opened: dict[tuple[int, bytes], list[Any]] = {}  # (device, handle) -> [address, when last read]
_lock = new_lock()
_later: threading.Timer | None = None  # that will close what is not read any more


def machine() -> str:
    """What processes have in common that can lend each other arrays, if anything lets them."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}"


@lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def sample() -> Any:
    """A small array on the first of `devices`, of bytes that nothing else has."""
    with Device(devices[0]):
        return cupy.asarray(np.frombuffer(os.urandom(4096), np.uint8))


def lend_array(array: Any) -> LentArray | None:
    """What another process needs to read an array; None where it cannot be lent."""
    if not array.flags.c_contiguous or not array.nbytes:
        return None
    begin, size = ctypes.c_uint64(), ctypes.c_size_t()
    with Device(array.device.id):
        try:
            found = _driver().cuMemGetAddressRange_v2(
                ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(array.data.ptr)
            )
            if found != 0:
                return None
            handle = bytes(runtime.ipcGetMemHandle(begin.value))
        except (OSError, AttributeError, runtime.CUDARuntimeError):  # other memory, other drivers
            return None
    return LentArray(handle, array.data.ptr - begin.value, array.shape, array.dtype)


def finish(ids: Iterable[int]) -> None:
    """Wait for what makes arrays on these GPUs, on whatever stream of ours that is."""
    for i in sorted(set(ids)):
        with Device(i):
            Stream.null.synchronize()


def fetch_arrays(things: Sequence[LentArray]) -> list[Any]:
    """Copy arrays of other processes to `devices`, or to the host where these have no room.

    The copies are complete when this returns.
    """
    on = devices or [runtime.getDevice()]
    out = []
    used = set()
    with _lock:
        try:
            for n, thing in enumerate(things):
                i = on[n * len(on) // len(things)]
                used.add(i)
                with Device(i), Stream.null:
                    source = _address(i, thing.handle) + thing.start
                    out.append(_copy_array(source, thing))
        finally:  # nothing is read any more when this ends, however that is
            finish(used)
            _look_again()
    return out


def _copy_array(source: int, thing: LentArray) -> Any:
    kind, stream = runtime.memcpyDefault, Stream.null.ptr
    array: Any
    try:
        array = cupy.empty(thing.shape, thing.dtype)
    except cupy.cuda.memory.OutOfMemoryError:
        array = np.empty(thing.shape, thing.dtype)
        runtime.memcpy(array.ctypes.data, source, array.nbytes, kind)
        return array
    runtime.memcpyAsync(array.data.ptr, source, array.nbytes, kind, stream)
    return array


def _look_again() -> None:
    global _later
    if _later is None and _opened:
        _later = threading.Timer(KEPT, _look)
        _later.name, _later.daemon = "gpuscheduler-ipc", True
        _later.start()


def _look() -> None:
    """In a thread of its own, as long as anything is open."""
    global _later
    with _lock:
        _later = None
        _close(monotonic() - KEPT)
        _look_again()


def _address(device: int, handle: bytes) -> int:
    found = _opened.get((device, handle))
    if found is None:
        found = _opened[device, handle] = [runtime.ipcOpenMemHandle(handle), 0.0]
    found[1] = monotonic()
    return int(found[0])


def _close(before: float) -> None:
    for (device, handle), (address, last) in list(_opened.items()):
        if last <= before:
            del _opened[device, handle]
            with Device(device), suppress(runtime.CUDARuntimeError):
                runtime.ipcCloseMemHandle(address)


def close() -> None:
    """Let go of the memory of other processes."""
    global _later
    with _lock:
        _close(float("inf"))
        if _later is not None:
            _later.cancel()
            _later = None
