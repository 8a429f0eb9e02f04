"""Run a plan on leased devices: the fastest way that memory allows.

1. Follow the plan's launch tape, where everything fits and nobody listens (`_follow_tape`).
2. Else run beside the persisted chunks that the plan does not read, without moving them, where all
   that the run makes fits beside them (`_run_alone`).
3. Else run with all persisted chunks as part of the plan: they may be evicted.

A run that takes more memory than others leave waits for its turn first (`admission`). True sizes
and working memory of the steps go back to the plan, for its next run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from ..errors import OutOfMemory
from ..frontend.chunk import Chunk, count_moves
from ..frontend.graph import Graph, layer_of
from ..gc_control import without_garbage_collection
from ..options import Options
from ..plan.machine import DISK, ENDLESS, HOST
from ..plan.plan import Footprint, Plan
from ..plan.working_memory import WorkingMemory
from ..runtime import loop
from ..runtime.admission import SMALL, Admission, AdmittedRun
from ..runtime.dask_callbacks import DaskCallbacks
from ..runtime.gather import ResultAssembly
from ..runtime.observe import Level, RunRecord
from ..runtime.persisted import PersistedChunks
from ..runtime.protocol import Devices, Hardware, Lease, StepListener, StepWatcher
from ..runtime.simulated import predict
from ..runtime.state import DEEP_WINDOW, WINDOW, State
from ..runtime.tape import LaunchTape, record_tape
from . import planner
from .choice import bytes_made_on_host
from .compile import write_in_place
from .plan_entry import PlanEntry
from .results import RunResults, collect_values, keep_chunks

_logger = logging.getLogger("gpuscheduler.run")


@dataclass(slots=True, eq=False, repr=False)
class PlanRun:
    """One run of a plan: its devices, who listens, and where the results go."""

    entry: PlanEntry  # as the cache has it: what the run learns goes there
    lease: Lease
    keep: bool = False  # whether results stay on the devices, as persisted chunks
    callbacks: DaskCallbacks | None = None
    rerun: bool = False  # run a task that failed once more in the calling thread, to debug it
    watcher: StepWatcher | None = None  # hears which steps are launched and done
    begun: Callable[[Devices], None] | None = None  # gets the devices before they run anything
    record: RunRecord | None = None  # where it is recorded
    took: Footprint | None = None  # what the run took, once it is over
    graph: Graph = field(init=False)
    plan: Plan = field(init=False)  # as it was when the run began

    def __post_init__(self) -> None:
        self.graph, self.plan = self.entry.graph, self.entry.plan

    @property
    def has_listener(self) -> bool:
        """Whether the run cannot be done over, or somebody hears of its steps."""
        return bool(self.task_callbacks or self.watcher or self.begun or self.rerun)

    @property
    def task_callbacks(self) -> DaskCallbacks | None:
        """The callbacks, if any of them wants to hear of each task."""
        return self.callbacks if self.callbacks and self.callbacks.per_task else None


@dataclass(eq=False, repr=False)
class PlanExecutor:
    """Runs the plans of one scheduler, beside its persisted chunks."""

    hardware: Hardware
    options: Options
    persisted: PersistedChunks
    admission: Admission
    working_memory: WorkingMemory
    is_host: bool  # whether these are the host's threads beside a scheduler's GPUs
    #: Bytes of persisted chunks of the other side, GPUs or host, by place of this one.
    others_chunks: Callable[[], dict[int, int]]

    def execute(self, run: PlanRun) -> list[Any]:
        """Return the values of the wanted keys, in their order."""
        need = partial(self._admission_need, run.graph, run.plan)
        record = run.record
        if record is not None and run.callbacks and not run.callbacks.per_task:
            run.callbacks.start_counts(record, run.plan, run.graph)
        with self.admission.turn(need) as turn:  # a run that waits borrows no chunks
            if record is not None:
                record.note_admission()
            try:
                if not run.has_listener:
                    values = self._run_alone(run, turn)
                    if values is not None:
                        return values
                with self.persisted.lend() as chunks:
                    plan = run.entry.plan_with_chunks(chunks, self.others_chunks())
                    if run.task_callbacks:  # they may keep what they see
                        assembly = self._assembly(run.graph, plan)
                    else:
                        plan, assembly = self._write_in_place(run.graph, plan)
                    return self._run_plan(run, plan, assembly, turn)
            except Exception as error:
                lost = self.hardware.recognize_loss(error)
                if lost is None:
                    raise
                _logger.error("%s", lost)
                raise lost from error

    def predict(self, entry: PlanEntry) -> Footprint:
        """Predict what a run that begins now would take."""
        beside = entry.plan_with_chunks(self.persisted.chunks(), self.others_chunks())
        now, _ = self._write_in_place(entry.graph, beside)
        return predict(now, self.options.window, self.options.deep_window)

    # ---- three ways to run

    def _run_alone(self, run: PlanRun, turn: AdmittedRun) -> list[Any] | None:
        """Run by the tape, or at least without moving chunks that the plan does not read.

        None where these may have to move.
        """
        known = run.entry
        if known.ours is None:
            known.ours = self.persisted.select_kept(run.plan.own_chunks)
        with self.persisted.lend(known.ours) as chunks:
            own = known.own_bytes() if len(chunks) == len(run.plan.own_chunks) else None
            others = self.persisted.bytes_of_others(chunks, own)
            for place, nbytes in self.others_chunks().items():
                others[place] = others.get(place, 0) + nbytes
            values = self._follow_tape(run, chunks, others)
            if (
                values is not None
                or not others
                or not self._fits_beside_chunks(known, chunks, others)
            ):
                return values
            beside = known.plan_with_chunks(chunks, others)
            plan, assembly = self._write_in_place(run.graph, beside)
            try:
                return self._run_plan(run, plan, assembly, turn)
            except OutOfMemory as error:
                if error.plan != id(plan):  # it came out of a task
                    raise
                # others have to move after all, from now on at once
                known.most = dict.fromkeys(plan.machine.memories, ENDLESS)
                return None

    def _follow_tape(
        self, run: PlanRun, chunks: list[Chunk], others: dict[int, int]
    ) -> list[Any] | None:
        """Run by the plan's launch tape; None where there is none, or it cannot be followed."""
        if self.options.check:
            return None
        if run.lease.threads is not None:  # the caller's own threads are given all steps
            return None
        tape = self._find_tape(run.entry, chunks, others)
        if not tape:
            return None
        others = {p: n for p, n in others.items() if p >= 0}
        plan = run.entry.plan_with_own_chunks() if run.plan.own_chunks else run.plan
        memory = plan.machine.memory

        def free(place: int) -> int:
            return memory[place] - others.get(place, 0)

        assembly = self._assembly(run.graph, plan, free)
        devices = run.lease.devices(plan, assembly, StepListener.NOTHING, tape)
        try:
            if run.record is not None:
                run.record.enter(plan, "replay")
                run.record.tape = tape
                _observe(run.record, devices)
            begin = perf_counter()
            if not devices.follow(tape):
                return None
            if run.record is not None:
                run.record.queued = run.record.recorder.clock()
            run.took = tape.footprint(perf_counter() - begin, others, assembly.tape_peak)
            to_numpy = self.hardware.to_numpy
            results = RunResults(run.graph, plan, devices, assembly, tape.nbytes, to_numpy)
            return self._hand_over(run, results)
        finally:
            devices.close()

    def _run_plan(
        self, run: PlanRun, plan: Plan, assembly: ResultAssembly, turn: AdmittedRun
    ) -> list[Any]:
        """Run step by step, as `State` decides, and learn from what the steps took."""
        callbacks = run.task_callbacks
        watcher = callbacks or run.watcher
        if callbacks and callbacks.exact:
            listener = StepListener.EACH
        else:
            listener = StepListener.DONE if watcher or run.begun else StepListener.NOTHING
        devices = run.lease.devices(plan, assembly, listener, None)
        try:
            if run.record is not None:
                run.record.enter(plan, "steps")
                _observe(run.record, devices)
            if run.begun:
                run.begun(devices)
            if callbacks:
                callbacks.start_state(plan, run.graph)
                if callbacks.exact:
                    callbacks.value = devices.value
            state = self._run_loop(run, plan, devices, watcher, turn)
            to_numpy = self.hardware.to_numpy
            results = RunResults(run.graph, plan, devices, assembly, state.nbytes, to_numpy)
            values = self._hand_over(run, results)
        finally:
            devices.close()
        known = run.entry
        if not run.plan.once and known.learn(state.nbytes, state.extra, state.plan.into):
            self.working_memory.learn(known.plan)
        return values

    def _run_loop(
        self,
        run: PlanRun,
        plan: Plan,
        devices: Devices,
        watcher: StepWatcher | None,
        turn: AdmittedRun,
    ) -> State:
        threads, options = run.lease.threads, self.options
        # a posttask sees a step done before the pretask of its reader, as in Dask's own schedulers
        exact = run.callbacks is not None and run.callbacks.exact
        ahead = threads is None and not exact
        begin = perf_counter()
        state = loop.run(
            plan, devices, watcher, threads or options.window, threads or options.deep_window,
            ahead, options.check, run.rerun, turn, run.record,
        )  # fmt: skip
        run.took = state.footprint(perf_counter() - begin)
        if run.record is not None:
            run.record.queued = run.record.recorder.clock()
        return state

    def _hand_over(self, run: PlanRun, results: RunResults) -> list[Any]:
        if run.keep:
            if run.record is not None:
                graph = run.graph
                names = {graph.called.get(k, k) for k in graph.wanted}
                layers = {layer_of(key) for key in names}
                run.record.recorder.note_persisted(run.record, layers)
            return keep_chunks(results, self.hardware, self.persisted)
        return collect_values(results)

    # ---- what a run works with

    def _assembly(
        self, graph: Graph, plan: Plan, free: Callable[[int], int] = lambda place: 0
    ) -> ResultAssembly:
        hardware = self.hardware
        join, bring, send = hardware.join, hardware.bring, hardware.send
        return ResultAssembly(plan, graph.alias, hardware.empty, join, free, bring, send)

    def _write_in_place(self, graph: Graph, plan: Plan) -> tuple[Plan, ResultAssembly]:
        """The plan whose steps write parts of the result into one array, where they can."""
        assembly = self._assembly(graph, plan)
        return write_in_place(plan, assembly, self.hardware), assembly

    def _find_tape(
        self, entry: PlanEntry, chunks: list[Chunk], others: Mapping[int, int]
    ) -> LaunchTape | None:
        """The plan's launch tape, where all fits beside `others` (bytes by place).

        None also where another run may move chunks that this one reads.
        """
        plan, windows = entry.plan, (self.options.window, self.options.deep_window)
        if not plan.tried or windows != (WINDOW, DEEP_WINDOW) or not self.hardware.can_replay(plan):
            return None
        base = entry.base
        if base.tape is None:
            with without_garbage_collection():
                base.tape = record_tape(plan) or False
        tape: LaunchTape | None = base.tape or None
        if tape is None or len(chunks) < len(plan.own_chunks):
            return None
        latest = count_moves()
        if entry.calm != latest:
            if any([p for p in c.places if p >= 0] != [c.place] for c in chunks):
                return None
            entry.calm = latest
        memory = plan.machine.memory
        if any(n + others.get(p, 0) > memory[p] for p, n in tape.peak.items()):
            return None
        return tape

    # ---- memory

    def _fits_beside_chunks(
        self, entry: PlanEntry, chunks: list[Chunk], others: Mapping[int, int]
    ) -> bool:
        """Whether all that a run makes surely fits beside persisted chunks that it does not read.

        True only for a run that could be done over, should these have to move after all.
        """
        plan, most = entry.plan, entry.most
        if not (plan.tried or all(s.known for s in plan.steps)):
            return False
        machine = plan.machine
        if most is None:
            most = {m: n + plan.working_memory for m, n in plan.bytes_by_memory().items()}
            if plan.writes or any(s.aside for s in plan.steps):
                most = dict.fromkeys(most, ENDLESS)
            entry.most = most
        if not machine.shared and any(
            p not in (c.place, HOST, DISK) for c in chunks for p in c.places
        ):
            return False  # such replicas are not counted
        taken = dict(most)
        for place, nbytes in others.items():
            if place in machine.devices:
                taken[machine.memory_of(place)] += nbytes
        return all(n <= machine.limit(m) for m, n in taken.items())

    def held_bytes(self) -> dict[int, int]:
        """Bytes of persisted chunks in each memory that admission limits."""
        memory_of = self.hardware.machine.memory_of
        out = dict.fromkeys(self.admission.limit, 0)
        for place, nbytes in self.persisted.nbytes().items():
            if place in self.hardware.machine.devices:
                out[memory_of(place)] += nbytes
        if HOST in out:
            on_host = self.persisted.bytes_of_others(()).get(HOST, 0)
            out[HOST] = on_host + self.others_chunks().get(HOST, 0)
        return out

    def _admission_need(self, graph: Graph, known: Plan) -> dict[int, int]:
        """Bytes that a run may take at most of each memory that admission limits."""
        most = self._most_bytes(graph, known)
        if self.is_host:
            return {HOST: most.get(0, 0)}
        limit = self.admission.limit
        if HOST in limit:  # what has no room on the GPUs is spilled there
            most[HOST] = sum([max(0, n - limit[m]) for m, n in most.items() if m >= 0])
            most[HOST] += bytes_made_on_host(known)
        return most

    def _most_bytes(self, graph: Graph, known: Plan) -> dict[int, int]:
        """Bytes that a run may take at most in each memory beside persisted chunks.

        True as far as the sizes of the steps are known.
        """
        plan, _ = self._write_in_place(graph, known)
        made, whole = plan.bytes_by_memory(known.chunks), plan.whole
        most = {m: n + whole.get(m, 0) + known.task_memory for m, n in made.items()}
        machine = self.hardware.machine
        limit = {m: machine.limit(m) for m in machine.memories}
        is_small = all(n <= SMALL * limit[m] for m, n in most.items())
        if is_small or len(known.steps) > planner.MANY_STEPS:
            return most
        with suppress(OutOfMemory):  # of sizes that are guesses
            foreseen = predict(plan, self.options.window, self.options.deep_window).peak
            return {m: min(n, foreseen[m]) for m, n in most.items()}
        return most


def _observe(record: RunRecord, devices: Devices) -> None:
    """Ask devices for the times of steps, where somebody wants these."""
    if record.level >= Level.STEPS:
        devices.observe(record)
