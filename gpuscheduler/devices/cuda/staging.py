"""Copy pageable host arrays to a device through small pinned buffers.

Through parts of pinned memory small enough for the processor's caches, so that what is copied need
not go to the host's memory and back.

A loop in compiled code fills them and has CUDA's driver copy them: no thread needs the interpreter
for that. Knows no plan and no stream of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...runtime.gather import strips

#: Bytes of a part, and how many a thread has: one is filled while the other is under way.
#: Measured: more of them, and larger ones, are slower.
PART_BYTES, PARTS = 2**21, 2
#: Smaller arrays are copied by NumPy: to load Numba takes longer than many of these. So are those
#: whose rows are shorter than that.
LEAST_BYTES, LEAST_ROW = 2**24, 2**10
#: ... and those of which fewer bytes lie in rows that are equally far apart: each such part goes by
#: itself.
LEAST_ROWS = 2**20
#: Bytes after which it is asked whether to go on.
STEP = 2**26


class DriverCalls(NamedTuple):
    """Addresses of functions of CUDA's driver."""

    copy: int  # to, from, bytes, stream
    record: int  # event, stream
    wait: int  # event


@cache
def calls() -> DriverCalls | None:
    """Those of the driver of this machine; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        functions = driver.cuMemcpyHtoDAsync_v2, driver.cuEventRecord, driver.cuEventSynchronize
    except (OSError, AttributeError):
        return None
    return DriverCalls(*[ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions])


def can_stage(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array goes so: it is large, its rows are long, and there is a driver."""
    if array.nbytes < LEAST_BYTES or calls() is None:
        return False
    _, _, width, rows, _ = next(strips(array.shape, array.strides, array.itemsize))
    return width >= LEAST_ROW and width * rows >= LEAST_ROWS


def send(
    to: int,
    array: np.ndarray[Any, Any],
    ring: np.ndarray[Any, Any],
    events: list[int],
    stream: int,
    go_on: Callable[[], None],
) -> int:
    """Copy an array, in C order, to an address of the current device's memory.

    The copies are queued on a stream, through parts of a ring, each with an event behind it.
    Returns CUDA's error code: 0 if all went well. Copies from the ring may be under way when it
    returns, or raises the error of `go_on`.
    """
    from . import staging_loops  # Numba takes a while to load

    functions = calls()
    assert functions is not None
    part = len(ring) // len(events)
    handles, begin, sent = np.array(events, np.int64), ring.ctypes.data, 0
    for from_, at, width, rows, pitch in strips(array.shape, array.strides, array.itemsize):
        source = array.ctypes.data + from_
        many = max(1, STEP // width)
        for row in range(0, rows, many):
            for column in range(0, width, STEP):
                go_on()
                n = min(STEP, width - column)  # less than a row only where rows go one by one
                sent, said = staging_loops.send(
                    to + at + row * width + column, source + row * pitch + column,
                    min(many, rows - row), n, pitch, begin, part, handles, sent, stream, *functions
                )  # fmt: skip
                if said:
                    return int(said)
    return 0
