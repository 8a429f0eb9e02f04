"""Steps of a GPU plan that the host computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy

from ...fusion.task import CompressTask, KernelTask, OptionalTask
from ...plan.batching import Batch
from ...runtime.tape import Order
from .arrays import is_refusal
from .numpy_fallback import OwnCode, at_home


@dataclass(slots=True)
class NextOrders:
    """No news for the loop, but what it is to order next."""

    place: int
    order: Order


def compute_on_host(
    task: Any,
    values: dict[Any, Any],
    error: Exception | None = None,
    bring: Callable[[Any], Any] = cupy.asnumpy,
) -> Any:
    """The value of a task (of a kernel, the operations that it stands for) that is called with
    copies on the host of what it reads. Raises `error`, with which it has failed on the device,
    where that comes to nothing."""
    if type(task) is Batch:
        return tuple([compute_on_host(member, values, error, bring) for member in task.members])
    if type(task) in (OptionalTask, CompressTask):
        task = task.fused
    task = task.original if type(task) is KernelTask else task
    with OwnCode():
        there = at_home(task, values, error is not None, bring)
    if there is None:
        if error is not None:
            raise error
        return task(values)
    try:
        value = there.task(there.values)
    except Exception as again:
        if error is None or is_refusal(again) or isinstance(again, MemoryError):
            raise
        raise error from None
    if there.changed():
        raise error or TypeError("it writes to an array of CuPy's, and runs on the host")
    return value
