"""Queue a run from its launch tape: replay it, or follow it and record a replay."""

from __future__ import annotations

from functools import partial
from typing import Any

from cupy.cuda import Device

from ...runtime.events import NoRoom
from ...runtime.loop import explain_error
from ...runtime.tape import LaunchTape
from . import marks
from .arrays import device_bytes, is_refusal
from .given_values import GivenValues
from .lane import DeviceLane, HeldValue
from .recorder import ReplayRecorder
from .result_rooms import ResultRoom
from .run_context import RunContext
from .step_values import StepValues
from .transfers import Transfers


class TapeRun:
    """Queues all of a run at once, from its launch tape.

    It owns nothing but the replays that it leaves with the team. All work is queued by the
    caller's thread, on the streams that the run loop would use, in the order of the tape.
    """

    def __init__(
        self, run: RunContext, steps: StepValues, transfers: Transfers, given: GivenValues
    ):
        self.run, self.steps, self.transfers, self.given = run, steps, transfers, given

    def queue_tape(self, tape: LaunchTape) -> bool:
        """Queue all launches of a tape, by its replay where it has one.

        Returns False where memory was refused: the run goes on step by step.
        """
        run, steps = self.run, self.steps
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
            rooms = run.hardware.rooms(run.plan, run.assembly)
            steps.rooms = rooms if rooms is not None and rooms.tasks else None
        else:
            steps.rooms = replay.rooms
        if steps.rooms is not None and not self._has_room(tape, steps.rooms):
            return False
        try:
            if replay is not None and replay.fill_addresses(run.held, self.given.state()):
                probe = marks.replay_probe(run, replay)
                done, run.assembly.made = replay.run(run.lanes, run.held, probe)
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
            recorder = ReplayRecorder(run.plan, run.lanes, kernels, staged, steps.rooms)
        for place, orders in tape.orders:
            lane = run.lanes[place]
            with Device(lane.device), lane.home:
                done = run.team.contexts[place].run(self._follow_lane, lane, orders, recorder)
            if not done:
                return False
        if recorder is not None:
            replays[tape] = recorder.replay()
        return True

    def _has_room(self, tape: LaunchTape, rooms: ResultRoom) -> bool:
        """Whether there is room for a tape whose result is allocated from the start."""
        run = self.run
        place, assembly = rooms.place, run.assembly
        apart = [
            i for i in tape.unread if i not in rooms.tasks and run.plan.steps[i].place == place
        ]
        peak = tape.peak_without_unread[place] + rooms.nbytes
        peak += sum([tape.nbytes[i] for i in apart])
        assembly.tape_peak = {place: peak}
        return peak <= assembly.free(place)

    def _follow_lane(
        self,
        lane: DeviceLane,
        orders: list[tuple[str, int, tuple[int, ...]]],
        recorder: ReplayRecorder | None,
    ) -> bool:
        """Queue a device's next orders of a tape; False where memory was refused."""
        run = self.run
        held, crossing, wanted = run.held[lane.place], run.plan.crossings, run.plan.result_steps
        call, fetch = self._call, self.transfers.fetch
        if run.probe is not None:
            call, fetch = self._call_measured, partial(run.probe.fetch, self.transfers)
        if recorder is not None:
            recorder.begin_lane(lane.place)
        for verb, i, others in orders:
            try:
                if verb == "launch":
                    for j in others:
                        lane.home.wait_event(held[j].ready)
                    value = call(lane, i)
                    seen = crossing[i] or (i in wanted and device_bytes(value))
                    held[i] = HeldValue(value, lane.mark(lane.home) if seen else None)
                    if recorder is not None:
                        recorder.record_launch(i, others, held)
                elif verb == "fetch":
                    if type(fetch(lane, i, *others)) is NoRoom:
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

    def _call(self, lane: DeviceLane, i: int) -> Any:
        """Compute a step; no local holds its inputs longer than the call."""
        steps = self.steps
        return steps.call(
            lane, i, steps.read_inputs(lane, self.run.plan.steps[i]), steps.result_part(i)
        )

    def _call_measured(self, lane: DeviceLane, i: int) -> Any:
        probe = self.run.probe
        with probe.measure(lane, lane.home, i):
            return probe.meter(lane, i, self._call, lane, i)
