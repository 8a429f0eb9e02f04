"""Predict what a call of a library's function takes on the host's threads, and on a GPU.

Seconds of one thread are those of NumPy 2.4 and SciPy 1.17 on one core of an EPYC, the rates of all
threads together those of 16 cores beside an H200 (`graphs/bench/host.py`). A GPU's are what its
memory takes for the passes of each algorithm, but for sorts, which were timed on an H200.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..tracing.abstract import LibraryCall
from .machine import Machine

#: Bytes per second that library functions read and write on all threads: most of it is new memory.
CALLED = 7e9
#: Operations per second of one thread in products of float32; half as many of float64.
PRODUCT = 47e9
#: Seconds of one thread for an element: by the axis that is the fastest in memory, by others.
SORT, SORT_FAR, ARGSORT, QUANTILE = 2e-9, 12e-9, 45e-9, 9e-9
FFT_AXIS, TAP, WINDOW, MEDIAN_TAP = 7e-9, 0.6e-9, 12e-9, 11e-9
#: Seconds of one GPU for an element.
GPU_SORT, GPU_ARGSORT, GPU_TAP = 0.33e-9, 0.5e-9, 0.01e-9
#: Times that a GPU reads and writes an array in a transform of one axis.
FFT_PASSES = 3


def host_seconds(call: LibraryCall) -> float:
    """Seconds of one thread of the host, beside what its memory takes.

    >>> import numpy as np
    >>> from gpuscheduler.ir.expr import View
    >>> from gpuscheduler.tracing.abstract import ViewedInput
    >>> x = ViewedInput(0, View.contiguous((1000, 1000)), (1000, 1000), np.dtype("f4"))
    >>> call = LibraryCall("numpy.sort", (x,), (("axis", 1),), x.shape, x.dtype)
    >>> f"{host_seconds(call):.2g}"
    '0.002'
    """
    name, options = call.name.rpartition(".")[2], dict(call.options)
    elements = _elements(call)
    if name in ("sort", "partition"):
        last = len(call.arguments[0].shape) - 1
        return elements * (SORT if options["axis"] in (None, last) else SORT_FAR)
    if name in ("argsort", "argpartition"):
        return elements * ARGSORT
    if name in ("median", "quantile", "percentile"):
        return elements * QUANTILE
    if ".fft." in call.name:
        return elements * FFT_AXIS * _fft_axes(options)
    if name == "median_filter":
        return elements * MEDIAN_TAP * _taps(call, options)
    if name in ("maximum_filter", "minimum_filter", "uniform_filter"):
        return elements * WINDOW * len(call.shape)
    return elements * TAP * _taps(call, options)


def gpu_seconds(call: LibraryCall, bandwidth: float) -> float:
    """Seconds of one GPU whose memory moves so many bytes per second."""
    name, options = call.name.rpartition(".")[2], dict(call.options)
    elements = _elements(call)
    passed = traffic_of(call) / bandwidth
    if name.startswith("arg"):
        return elements * GPU_ARGSORT
    if name in ("sort", "partition", "median", "quantile", "percentile"):
        return elements * GPU_SORT
    if ".fft." in call.name:
        return passed * FFT_PASSES * _fft_axes(options)
    return max(passed * len(call.shape), elements * GPU_TAP * _taps(call, options))


def product_seconds(operations: int, dtype: Any) -> float:
    """Seconds of one thread of the host for a product of matrices."""
    return operations / (PRODUCT if dtype.char in "fF" else PRODUCT / 2)


def portable_seconds(operations: int, traffic: int, machine: Machine) -> tuple[float, float]:
    """Seconds of one thread of the host, and of one GPU, for a task of the array library.

    They are those of products of float64; a GPU takes at least what its memory does.
    """
    on_gpu = max(operations / machine.flops, traffic / machine.bandwidth)
    return product_seconds(operations, np.dtype(float)), on_gpu


def traffic_of(call: LibraryCall) -> int:
    """Bytes that a call reads and makes."""
    read = sum([math.prod(a.shape) * a.dtype.itemsize for a in call.arguments])
    return read + math.prod(call.shape) * call.dtype.itemsize


def _elements(call: LibraryCall) -> int:
    return max(math.prod(call.arguments[0].shape), math.prod(call.shape))


def _fft_axes(options: dict[str, Any]) -> int:
    return len(options["axes"]) if "axes" in options else 1


def _taps(call: LibraryCall, options: dict[str, Any]) -> float:
    """Elements that a filter reads for each that it makes."""
    name, dims = call.name.rpartition(".")[2], len(call.shape)
    if "size" in options:
        sizes = options["size"] if isinstance(options["size"], tuple) else (options["size"],) * dims
        return float(math.prod(sizes) if name == "median_filter" else sum(sizes))
    if "sigma" in options:
        sigmas = options["sigma"]
        sigmas = sigmas if isinstance(sigmas, tuple) else (sigmas,) * dims
        return float(sum([2 * options["truncate"] * s + 1 for s in sigmas]))
    if len(call.arguments) > 1:
        return float(math.prod(call.arguments[1].shape))
    if "weights" in options:
        return float(math.prod(options["weights"].shape))
    return 3 * dims
