"""Draw blocks of random numbers as CuPy arrays, for schedulers that call chunk functions.

Our own scheduler makes such blocks in its fused kernels and does not come here. The kernels here
are the same ones without readers, so that the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import cupy

from ...codegen.random_block import RandomArray, draw_on_host
from ...forks import new_lock
from ...frontend.graph import CUPY
from ...fusion.task import KernelTask
from ...ir.expr import Expr, Kernel, Out, Program
from .kernels import Kernels
from .launch import Workspace
from .random_generator import DeviceGenerator

Shape = tuple[int, ...]
_lock = new_lock()
#: Made at first use: compiling needs a device.
_made: list[Kernels] = []


def draw_block(array: RandomArray, start: Shape, size: Shape, given: Sequence[Any]) -> Any:
    """Draw a block on the current device; see `codegen.random_block.draw_block`."""
    position = array.position(start)
    expr = array.expression(size, position % 2)
    if expr is None:
        return array.call(DeviceGenerator(array.seed(start), array.library), size, given)

    def on_host(values: dict[Any, Any]) -> Any:
        return cupy.asarray(draw_on_host(array, start, size, given))

    task = KernelTask(
        "random numbers", _program(expr, size), (), (), (position - position % 2,), CUPY, on_host
    )
    return _kernels().run(task, {}, cupy.cuda.runtime.getDevice(), Workspace())


def _kernels() -> Kernels:
    with _lock:
        if not _made:
            _made.append(Kernels())
        return _made[0]


@lru_cache(256)
def _program(expr: Expr, shape: Shape) -> Program:
    return Program(0, (Kernel(shape, (expr,)),), Out(0, shape))
