"""Keys, chunks and array modules of the blocks of an array."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np


def declare_working_memory(
    estimate: Callable[..., int],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say how much memory a function of blocks takes while it runs, beside its value.

    `estimate` is called with the bytes of each argument that is a block, in order. The scheduler
    counts them before the first run; later it knows better.

    >>> @declare_working_memory(lambda x: 2 * x)
    ... def double_sort(x): ...
    >>> double_sort.working_memory(800)
    1600
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        function.working_memory = estimate  # type: ignore[attr-defined]
        return function

    return declare


def array_module(block: Any) -> ModuleType:
    """The library of a block's type: NumPy, or the package that defines the type.

    >>> import numpy as np
    >>> array_module(np.ones(3)).__name__
    'numpy'
    """
    name = type(block).__module__.partition(".")[0]
    return sys.modules[name if name == "cupy" else "numpy"]


def module_name(x: Any) -> str:
    """The library of a dask array's blocks: "numpy" or "cupy"."""
    return array_module(x._meta).__name__


def to_host(block: Any) -> Any:
    """Return a block as an array of NumPy; waits for the GPU that makes it."""
    return block if isinstance(block, np.ndarray) else array_module(block).asnumpy(block)


def join(blocks: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate blocks into one new array, that nobody else has.

    Contiguous blocks of CuPy are copied by the driver, at the full bandwidth of the memory.

    >>> join([np.arange(2), np.arange(3)])
    array([0, 1, 0, 1, 2])
    """
    xp = array_module(blocks[0])
    if len(blocks) == 1 and (xp is np or not blocks[0].flags.c_contiguous):
        return blocks[0].copy()
    if xp is np:
        same = all(b.dtype == blocks[0].dtype for b in blocks)  # else bytes are swapped
        return np.concatenate(blocks, axis=axis, dtype=blocks[0].dtype if same else None)
    if blocks[0].ndim != 1 or not all(
        b.flags.c_contiguous and b.dtype == blocks[0].dtype for b in blocks
    ):  # fmt: skip
        return xp.concatenate(blocks, axis=axis)
    out = xp.empty(sum(b.size for b in blocks), blocks[0].dtype)
    at, runtime = out.data.ptr, xp.cuda.runtime
    for b in blocks:
        if b.nbytes:
            stream = xp.cuda.get_current_stream()
            runtime.memcpyAsync(at, b.data.ptr, b.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
        at += b.nbytes
    return out
