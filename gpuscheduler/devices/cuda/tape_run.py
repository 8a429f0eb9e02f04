"""Queue a run from its launch tape: replay it, or follow it and record a replay."""

from __future__ import annotations

from typing import Any

from cupy.cuda import Device

from ...runtime.events import NoRoom
from ...runtime.loop import explain_error
from ...runtime.tape import LaunchTape
from . import marks, step_values, transfers
from .arrays import (
    device_bytes,
    is_refusal,
)
from .gpu_run import GpuRun
from .lane import DeviceLane, HeldValue
from .recorder import ReplayRecorder
from .result_rooms import ResultRoom


def queue_tape(run: GpuRun, tape: LaunchTape) -> bool:
    """Queue all launches of a tape, by its replay where it has one.

    Returns False where memory was refused: the run goes on step by step.
    """
    for place, lane in enumerate(run.lanes):
        lane.sweep()
        for held in run.held[place].values():
            if held.ready is not None:  # it is still in the making
                lane.home.wait_event(held.ready)
                for other in run.lanes:
                    other.incoming.wait_event(held.ready)
                held.unseen = False
    replays = run.team.replays
    replay = replays.get(tape)
    if replay is None:
        rooms = run.hardware.rooms(run.plan, run.gathering)
        run.rooms = rooms if rooms is not None and rooms.tasks else None
    else:
        run.rooms = replay.rooms
    if run.rooms is not None and not _has_room(run, tape, run.rooms):
        return False
    try:
        if replay is not None and replay.fill_addresses(run.held, run.given_state()):
            probe = marks.replay_probe(run, replay)
            done, run.gathering.made = replay.run(run.lanes, run.held, probe)
            for place, i, value, ready in done:
                run.held[place][i] = HeldValue(value, ready)
            return True
    except Exception as error:
        if is_refusal(error):
            return False
        raise
    kernels, staged = run.hardware.kernels, run.hardware.staged
    recorder = None
    if tape not in replays:
        recorder = ReplayRecorder(run.plan, run.lanes, kernels, staged, run.rooms)
    for place, orders in tape.orders:
        lane = run.lanes[place]
        with Device(lane.device), lane.home:
            done = run.team.contexts[place].run(_follow_lane, run, lane, orders, recorder)
        if not done:
            return False
    if recorder is not None:
        replays[tape] = recorder.replay()
    return True


def _has_room(run: GpuRun, tape: LaunchTape, rooms: ResultRoom) -> bool:
    """Whether there is room for a tape whose result is allocated from the start."""
    place, gathering = rooms.place, run.gathering
    apart = [i for i in tape.last if i not in rooms.tasks and run.plan.steps[i].place == place]
    need = tape.rest[place] + rooms.nbytes + sum([tape.nbytes[i] for i in apart])
    gathering.need = {place: need}
    return need <= gathering.free(place)


def _follow_lane(
    run: GpuRun,
    lane: DeviceLane,
    orders: list[tuple[str, int, tuple[int, ...]]],
    recorder: ReplayRecorder | None,
) -> bool:
    """Queue a device's next orders of a tape; False where memory was refused."""
    held, wanted = run.held[lane.place], run.wanted
    if recorder is not None:
        recorder.begin_lane(lane.place)
    for verb, i, others in orders:
        try:
            if verb == "launch":
                for j in others:
                    lane.home.wait_event(held[j].ready)
                value = _call(run, lane, i) if run.probe is None else _call_measured(run, lane, i)
                seen = run.crossing[i] or (i in wanted and device_bytes(value))
                held[i] = HeldValue(value, lane.mark(lane.home) if seen else None)
                if recorder is not None:
                    recorder.record_launch(i, others, held)
            elif verb == "fetch":
                fetch = transfers.fetch if run.probe is None else run.probe.fetch
                if type(fetch(run, lane, i, *others)) is NoRoom:
                    return False
                if recorder is not None:
                    recorder.record_fetch(i, others[0], run.held)
            else:
                del held[i]
                if recorder is not None:
                    recorder.record_free(i)
        except Exception as error:
            if is_refusal(error):
                return False
            explain_error(error, run.plan, i)
            raise
    return True


def _call(run: GpuRun, lane: DeviceLane, i: int) -> Any:
    """Compute a step; no local holds its inputs longer than the call."""
    return step_values.call(
        run,
        lane,
        i,
        step_values.read_inputs(run, lane, run.plan.steps[i]),
        step_values.result_part(run, i),
    )


def _call_measured(run: GpuRun, lane: DeviceLane, i: int) -> Any:
    with run.probe.measure(lane, lane.home, i):
        return run.probe.meter(lane, i, _call, run, lane, i)
