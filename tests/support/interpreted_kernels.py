"""GPUs' kernels without a compiler: on the stand-in for CUDA, NumPy evaluates each program.

What is planned, sent, kept and brought home is as on GPUs; only the code of the kernels is not. So
whole test suites run in minutes where there is neither a GPU nor a C++ compiler.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from gpuscheduler.devices.cuda import kernel_code, kernels
from gpuscheduler.devices.cuda.hardware import CudaHardware
from gpuscheduler.pipeline import choice
from gpuscheduler.pipeline.numpy_arrays import NumpyArrays
from gpuscheduler.values import map_leaves


def _home(value: Any) -> Any:
    if not isinstance(value, cupy.ndarray):
        return value
    turned = value.flags.f_contiguous and not value.flags.c_contiguous
    return value.T.get().T if turned else value.get()


def _there(value: Any) -> Any:
    plain = type(value) is np.ndarray or isinstance(value, np.generic)
    return cupy.asarray(value) if plain and value.dtype.kind in "biufc" else value


def _evaluated(task: Any, values: dict[Any, Any]) -> Any:
    return map_leaves(_there, task({k: map_leaves(_home, v) for k, v in values.items()}))


def run(
    self: Any, fused: Any, values: dict[Any, Any], device: int, work: Any, into: Any = None
) -> Any:
    value = _evaluated(fused, values)
    if into is None:
        return value
    into[...] = value.reshape(into.shape)
    return into


def run_batch(self: Any, batch: Any, values: dict[Any, Any], *_: Any) -> Any:
    return tuple([_evaluated(member, values) for member in batch.members])


def pick(self: Any, task: Any, values: dict[Any, Any], *_: Any) -> Any:
    return _evaluated(task, values)


def _put(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}"
    setattr(owner, name, value)


def install(put: Callable[[Any, str, Any], None] = _put) -> None:
    """Evaluate the kernels of this process from now on; `put` may be a monkeypatch's `setattr`."""
    made: Any = kernels.Kernels
    for function in (run, run_batch, pick):
        put(made, function.__name__, function)
    put(kernel_code.KernelCode, "compile_ahead", lambda *_: None)
    put(made, "copy", lambda *_: False)  # of many blocks at once: they are copied one by one
    put(NumpyArrays, "_warn_of_calls", lambda *_: None)  # some tests expect no warning
    put(CudaHardware, "can_replay", lambda *_: False)  # a tape launches kernels by their addresses


def flip_coins(put: Callable[[Any, str, Any], None] = _put) -> None:
    """With `numpy="auto"`, have a coin say whether GPUs or the host run a plan, of any size."""
    coin = random.Random(0)
    for name in ("LEAST_BYTES", "LEAST_BLOCK", "LEAST_SECONDS"):
        put(choice, name, 0)
    put(choice, "MOST_CALLED", 2**40)
    put(choice.GpuWork, "seconds", lambda *_: coin.random())
    put(choice.HostWork, "seconds", lambda *_: coin.random())
