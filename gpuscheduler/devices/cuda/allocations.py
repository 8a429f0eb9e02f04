"""Meter what a step allocates, by the user's line that does it.

CuPy tells a `MemoryHook` of each allocation in the thread that makes it (cupy/cuda/memory.pyx).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import cupy

from ...cpython_private import frame_of_caller
from ...frontend.lines import is_users_frame
from ...runtime.allocations import AllocationLog, Site

T = TypeVar("T")


class LineMeter(cupy.cuda.MemoryHook):
    """Notes what the functions that it calls allocate, with the nearest line of the user's."""

    def __init__(self) -> None:
        self.name = f"gpuscheduler {id(self)}"  # a step may compute another graph, also metered
        self.log = AllocationLog()
        self._acquired = 0  # bytes that the pool has taken for the allocation under way

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function, and note what it allocates in this thread."""
        with self:
            return function(*arguments)

    def alloc_postprocess(self, *, mem_size: int, mem_ptr: int, **_: Any) -> None:
        if mem_ptr:  # else there was no memory
            self._acquired += mem_size

    def malloc_postprocess(self, *, mem_size: int, pmem_id: int, **_: Any) -> None:
        acquired, self._acquired = self._acquired, 0
        if pmem_id:
            self.log.allocate(pmem_id, mem_size, _find_site(), acquired)

    def free_postprocess(self, *, pmem_id: int, **_: Any) -> None:
        self.log.free(pmem_id)


#: Behind this frame is the caller of the computation, whose line allocates nothing.
_OUTERMOST = LineMeter.call.__code__


def _find_site() -> Site:
    frame: FrameType | None = frame_of_caller(1)
    while frame is not None and frame.f_code is not _OUTERMOST:
        if is_users_frame(frame):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None
