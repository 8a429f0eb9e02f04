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
from . import task_launch
from .arrays import is_refusal
from .caller_order import CallerOrder
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
from .run_context import RunContext


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
        return tuple([compute_on_host(m, values, error, bring, collect) for m in members])
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


class HostSteps:
    """Computes steps of a run on the host, in threads beside the workers.

    It owns what such steps read, with the event behind which that is ready, their values until
    their workers take them back, and the steps that wait for these. A worker does not wait: it
    launches the readers of such a step when its value is back, in the order of the plan.
    """

    def __init__(self, run: RunContext, callers: CallerOrder):
        self.run, self.callers = run, callers
        #: What the host computes steps with, and the event behind which the arrays are ready.
        self.given: dict[int, tuple[dict[Any, Any], Event]] = {}
        #: What the host has computed, by step.
        self.made: dict[int, Future[Any]] = {}
        #: By place: steps that the host computes now, and their readers. Only the worker uses it.
        self.away: list[set[int]] = [set() for _ in run.lanes]
        #: By place: readers of such steps that were launched, in that order.
        self.behind: list[list[int]] = [[] for _ in run.lanes]

    def waits(self, place: int, i: int) -> bool:
        """Whether a step reads what the host computes now: then it is launched behind that."""
        away = self.away[place]
        if away and not away.isdisjoint(self.run.plan.steps[i].inputs):
            away.add(i)
            self.behind[place].append(i)
            return True
        return False

    def hand_over(self, lane: DeviceLane, i: int, values: dict[Any, Any]) -> NextOrders:
        """Give a step with its inputs to the host. Returns the order to report."""
        self.away[lane.place].add(i)
        self.given[i] = values, lane.mark(lane.home, block=True)
        return NextOrders(lane.place, ("away", i, lane.place))

    def due_when_back(self, place: int, i: int) -> list[int]:
        """The steps to launch when a step is back from the host.

        These are the step, and all steps that wait for any step, in the order of the plan: a
        refused step was launched again, behind its readers. `waits` puts back the steps that
        have to wait longer.
        """
        behind, self.behind[place] = sorted(self.behind[place]), []
        self.away[place].difference_update(behind, (i,))
        return [i, *behind]

    def end(self) -> None:
        """Let go of all values: the run is over."""
        self.given.clear()
        self.made.clear()

    def run_on_host(self, launch: tuple[int, int]) -> None:
        """Compute a step on the host, and have its worker take the value back."""
        run = self.run
        i, place = launch
        given = self.given.pop(i, None)
        if given is None or run.stopped:
            return
        made: Future[Any] = Future()
        try:
            made.set_result(self._compute_from_copies(run.lanes[place], i, *given))
        except BaseException as error:
            made.set_exception(error)
        self.made[i] = made
        run.events.put([NextOrders(place, ("back", i, place))])  # type: ignore[list-item]
        if run.stopped:  # nobody takes the value any more
            self.made.clear()

    def _compute_from_copies(
        self, lane: DeviceLane, i: int, values: dict[Any, Any], ready: Event
    ) -> Any:
        """Compute a step on the host from copies, and send its value to the device."""
        run = self.run

        def bring(v: Any) -> Any:  # on the out stream: not behind later work of the home stream
            if not isinstance(v, cupy.ndarray):
                return v
            with lane.outgoing:
                return copy_to_numpy(v, run.hardware.pinned)

        Device(lane.device).use()
        self.callers.order_thread_behind_callers()
        ready.synchronize()
        task: Any = run.plan.steps[i].task
        value = task.call(values, bring) if host_only(task) else None
        if host_only(task) and not task.sends:
            return value
        with lane.home:  # for arrays that the task itself sends to the device
            if not host_only(task):
                value = compute_on_host(task, values, bring=bring, collect=lane.collect_value)
            return send_value(value)

    def take_host_value(self, lane: DeviceLane, i: int, task: Any, values: dict[Any, Any]) -> Any:
        """The value that the host has computed for a step, or computes now."""
        made = self.made.pop(i, None)
        return self.run_now_on_host(lane, task, values) if made is None else made.result()

    def run_now_on_host(
        self, lane: DeviceLane, task: Any, values: dict[Any, Any], error: Exception | None = None
    ) -> Any:
        """Compute a task on the host in this thread, and send its value to the device."""
        lane.make_current()
        # copies from other devices are queued on their current streams
        self.callers.order_thread_behind_callers()
        if host_only(task):
            value = task.call(values, self.run.hardware.to_numpy)
            return send_value(value) if task.sends else value
        value = compute_on_host(task, values, error, collect=lane.collect_value)
        with OwnCode():
            return send_value(value)

    def recompute_refused(
        self, lane: DeviceLane, step: Step, task: Any, values: dict[Any, Any], into: Any,
        error: Exception, mixed: bool,
    ) -> Any:  # fmt: skip
        """Compute a task that CuPy refused, with NumPy's arrays on the device or on the host.

        Notes in the plan which of the two worked for this kind of step. Warns once of the host.
        """
        run = self.run
        if not mixed and may_concern_host_array(error):
            try:
                value = self.compute_with_copies(lane, task, values, into, error)
            except SAID as again:
                if again is not error:
                    raise
            else:
                run.plan.history.mixed.add(step.kind)
                error.__traceback__ = None  # which holds this run
                return value
        if (isinstance(task, OwnTask) and not task.runs_on_host) or not is_cupy_refusal(error):
            raise error
        value = self.run_now_on_host(lane, task, values, error)
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
        self, lane: DeviceLane, task: Any, values: dict[Any, Any], into: Any, error: Any = None
    ) -> Any:
        """Compute a task with its NumPy arrays copied to the device.

        Raises `error`, with which the task failed before, where this is not possible.
        """
        run = self.run
        lane.make_current()
        with OwnCode():
            there = move_task(task, values)
        if there is None:
            if error is not None:
                raise error
            return task_launch.compute(run, lane, task, values, into)
        try:
            value = task_launch.compute(run, lane, there.task, there.values, into)
        except Exception as again:
            if error is None or is_refusal(again):
                raise
            raise error from None
        if there.has_written():
            raise error or TypeError("it writes to an array of NumPy's, and reads one of CuPy's")
        return value
