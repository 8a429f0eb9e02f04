"""The run loop: instructions go to devices, their events to `State`.

`Devices`, in `protocol`, is all that the loop needs of hardware. The same tests run on every
implementation of it (tests/devices/test_devices.py).
"""

from __future__ import annotations

from ..plan.origins import describe_task, failed_at
from ..plan.plan import Plan
from .admission import AdmittedRun
from .events import Copy, Done, Failed, Launch
from .observe import TRIM_EVERY, RunRecord, Turn
from .protocol import Devices, StepWatcher
from .state import DEEP_WINDOW, WINDOW, State


def run(
    plan: Plan,
    devices: Devices,
    watch: StepWatcher | None = None,
    window: int = WINDOW,
    deep_window: int = DEEP_WINDOW,
    ahead: bool = True,
    check: bool = False,
    rerun: bool = False,
    turn: AdmittedRun | None = None,
    record: RunRecord | None = None,
) -> State:
    """Run every step of a plan on devices; returns the final state.

    Parameters
    ----------
    plan, devices
        The plan, and what runs it.
    watch
        Hears of each step that is launched or done.
    window, deep_window, ahead, check
        As for `State`.
    rerun
        Run a task that failed once more in the calling thread, for a debugger.
    turn
        The run as `Admission` knows it: each wait counts as a sign of life.
    record
        The run as it is recorded: gets the state, and each turn from level STEPS on.

    Raises
    ------
    BaseException
        The exception of a task that failed, of its own type, with a note that names the task.
    """
    state = State(plan, window, deep_window, ahead, check)
    instructions = state.start()
    launch, copy, free, wait = devices.launch, devices.copy, devices.free, devices.wait
    turns, used, count = None, state.used, 0
    if record is not None:
        turns, clock = record.loop_begins(state), record.recorder.clock
    while True:
        for ins in instructions:
            kind = type(ins)
            if kind is Launch and watch is not None:
                watch.note_launch(ins.step)
            try:
                if kind is Launch:
                    launch(ins.step, ins.place)  # type: ignore[union-attr]
                elif kind is Copy:
                    copy(ins.step, ins.src, ins.dst)  # type: ignore[union-attr]
                else:
                    free(ins.step, ins.place)  # type: ignore[union-attr]
            except Exception as failure:  # the device's method itself failed
                explain_error(failure, plan, ins.step)
                raise
        if state.is_finished:
            return state
        events = wait()
        if turn is not None:
            turn.beats += 1
        for event in events:
            if type(event) is Failed:
                if event.step < 0:
                    raise event.error
                event_step, error = event.step, event.error
                step = plan.steps[event_step]
                if rerun and isinstance(error, Exception):
                    step.task(step.values(devices.value))
                del event, events  # or the error and its traceback would hold each other
                try:
                    raise explain_error(error, plan, event_step)
                finally:
                    del error
            if watch is not None and type(event) is Done:
                watch.note_done(event.step)
        if turns is not None and record is not None:
            turns.append(Turn(clock(), instructions, events, tuple(used.values())))
            count += 1
            if not count % TRIM_EVERY:
                record.trim()
        instructions = state.handle(*events)


def explain_error(error: BaseException, plan: Plan, i: int) -> BaseException:
    """Add a note to an exception that names the user's code, the task and its device.

    Returns the exception.
    """
    step = plan.steps[i]
    note = f"while running {step.key!r} on device {step.place}"
    if words := describe_task(step.task, step.key, plan.renamed):
        note += f": {words}"
    if where := failed_at(error.__traceback__):
        note += f"; it failed in {where}"
    return add_note(error, note)


def add_note(error: BaseException, note: str) -> BaseException:
    """Add a note to an exception, on Python 3.10 too; returns the exception."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.__notes__ = [*getattr(error, "__notes__", []), note]
    return error
