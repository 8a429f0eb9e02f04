"""Compute steps of a GPU plan on the host, where CuPy refuses them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import cupy
from cupy.cuda import Device, Event
from dask.utils import key_split

from ...frontend.task import OwnTask, host_only, members_of, original_of
from ...plan.plan import Step
from ...runtime.tape import Order
from . import caller_order
from .arrays import (
    is_refusal,
)
from .gpu_run import GpuRun
from .lane import DeviceLane
from .numpy_fallback import (
    SAID,
    OwnCode,
    is_cupy_refusal,
    may_concern_host_array,
    move_task,
    move_to_host,
    send_value,
)
from .pinned import copy_to_numpy


@dataclass(slots=True)
class NextOrders:
    """An order that a thread asks the run's loop to give; not an event of the plan."""

    place: int
    order: Order


_logger = logging.getLogger("gpuscheduler.run")


def compute_on_host(
    task: Any,
    values: dict[Any, Any],
    error: Exception | None = None,
    bring: Callable[[Any], Any] = cupy.asnumpy,
    collect: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Compute a task on the host, with copies of its inputs. Returns its value there.

    Of a kernel task, the original operations run. `bring` copies an array to the host. `collect`
    gets the value at once, while the stream is current that the task may have chosen: leaving any
    `with stream:` makes another stream current. Raises `error`, with which the task failed on its
    device, where the host cannot compute it either.
    """
    if members := members_of(task):
        return tuple([compute_on_host(member, values, error, bring) for member in members])
    task = original_of(task)
    with OwnCode():
        there = move_to_host(task, values, error is not None, bring)
    if there is None:
        if error is not None:
            raise error
        return collect(task(values))
    try:
        value = collect(there.task(there.values))
    except Exception as again:
        if error is None or is_refusal(again) or isinstance(again, MemoryError):
            raise
        raise error from None
    if there.has_written():
        raise error or TypeError("it writes to an array of CuPy's, and runs on the host")
    return value


def run_on_host(launch: tuple[GpuRun, int, int]) -> None:
    """Compute a step on the host, and have its worker take the value back."""
    run, i, place = launch
    given = run.given.pop(i, None)
    if given is None or run.stopped:
        return
    made: Future[Any] = Future()
    try:
        made.set_result(_compute_from_copies(run, run.lanes[place], i, *given))
    except BaseException as error:
        made.set_exception(error)
    run.by_host[i] = made
    run.events.put([NextOrders(place, ("back", i, place))])  # type: ignore[list-item]
    if run.stopped:  # nobody takes the value any more
        run.by_host.clear()


def _compute_from_copies(
    run: GpuRun, lane: DeviceLane, i: int, values: dict[Any, Any], ready: Event
) -> Any:
    """Compute a step on the host from copies, and send its value to the device."""

    def bring(v: Any) -> Any:  # on the out stream: not behind later work of the home stream
        if not isinstance(v, cupy.ndarray):
            return v
        with lane.outgoing:
            return copy_to_numpy(v, run.hardware.pinned)

    Device(lane.device).use()
    caller_order.order_thread_behind_callers(run)
    ready.synchronize()
    task: Any = run.plan.steps[i].task
    value = task.call(values, bring) if host_only(task) else None
    if host_only(task) and not task.sends:
        return value
    with lane.home:  # for arrays that the task itself sends to the device
        if not host_only(task):
            value = compute_on_host(task, values, bring=bring, collect=lane.collect_value)
        return send_value(value)


def take_host_value(
    run: GpuRun, lane: DeviceLane, i: int, task: Any, values: dict[Any, Any]
) -> Any:
    """The value that the host has computed for a step, or computes now."""
    made = run.by_host.pop(i, None)
    return run_now_on_host(run, lane, task, values) if made is None else made.result()


def run_now_on_host(
    run: GpuRun, lane: DeviceLane, task: Any, values: dict[Any, Any], error: Exception | None = None
) -> Any:
    """Compute a task on the host in this thread, and send its value to the device."""
    lane.make_current()
    # copies from other devices are queued on their current streams
    caller_order.order_thread_behind_callers(run)
    if host_only(task):
        value = task.call(values, run.hardware.to_numpy)
        return send_value(value) if task.sends else value
    value = compute_on_host(task, values, error, collect=lane.collect_value)
    with OwnCode():
        return send_value(value)


def recompute_refused(
    run: GpuRun, lane: DeviceLane, step: Step, task: Any, values: dict[Any, Any], into: Any,
    error: Exception, mixed: bool,
) -> Any:  # fmt: skip
    """Compute a task that CuPy refused: with NumPy's arrays copied to the device, or on the host.

    Notes in the plan which of the two worked for this kind of step. Warns once of the host.
    """
    if not mixed and may_concern_host_array(error):
        try:
            value = compute_with_copies(run, lane, task, values, into, error)
        except SAID as again:
            if again is not error:
                raise
        else:
            run.plan.history.mixed.add(step.kind)
            error.__traceback__ = None  # which holds this run
            return value
    if (isinstance(task, OwnTask) and not task.runs_on_host) or not is_cupy_refusal(error):
        raise error
    value = run_now_on_host(run, lane, task, values, error)
    (key, *_) = getattr(step.key, "keys", None) or (step.key,)  # of several, the first
    said = (
        f"{key_split(key)!r} runs on the host, to which what it reads is copied, as CuPy "
        f"refused it: {type(error).__name__}: {error}"
    )
    _logger.warning("%s", said)
    # an error where that is asked for: then it is one each time
    warnings.warn(said, RuntimeWarning, stacklevel=2)
    run.plan.history.hosted.add(step.kind)
    error.__traceback__ = None
    return value


def compute_with_copies(
    run: GpuRun, lane: DeviceLane, task: Any, values: dict[Any, Any], into: Any, error: Any = None
) -> Any:
    """Compute a task with its NumPy arrays copied to the device.

    Raises `error`, with which the task failed before, where this is not possible.
    """
    lane.make_current()
    with OwnCode():
        there = move_task(task, values)
    if there is None:
        if error is not None:
            raise error
        return run.compute(lane, task, values, into)
    try:
        value = run.compute(lane, there.task, there.values, into)
    except Exception as again:
        if error is None or is_refusal(again):
            raise
        raise error from None
    if there.has_written():
        raise error or TypeError("it writes to an array of NumPy's, and reads one of CuPy's")
    return value
