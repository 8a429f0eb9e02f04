"""Devices made of host threads: the default on a machine without GPUs.

Each device is one thread, which computes with NumPy and compiled loops. All devices read the same
memory, so nothing is copied between them: a value is one object. Values that do not fit are spilled
to files by two more threads, one for writes and one for reads, while tasks run. A few other threads
run the tasks that read and write the files of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
from dask.array.core import finalize
from dask.system import cpu_count as dask_cpu_count
from dask.utils import key_split

from ..errors import DeviceLost, Interrupted, NotSpillable, OutOfMemory
from ..forks import new_lock
from ..frontend.chunk import Chunk, Key, Places
from ..fusion.task import KernelTask
from ..numpy_private import refused_bytes
from ..plan.machine import DISK, HOST, Machine
from ..plan.plan import SHORT, Plan
from ..runtime.events import Copied, Done, Event, Failed, Issued, NoRoom
from ..runtime.gather import ResultAssembly
from ..runtime.host_memory import MemoryTrimmer, available_memory
from ..runtime.observe import RunRecord
from ..runtime.pools import CallersPool
from ..runtime.protocol import Lease, StepListener
from ..runtime.spill import RunFiles, SpillStore
from ..runtime.tape import LaunchTape
from ..runtime.threads import BorrowedTeam, EventQueue, Team, Teams, Worker
from ..values import RENEWED, part_of, renew, sizeof

#: Arrays of the value's size that a NumPy expression usually holds beside its value, at most.
ARRAYS = 2
#: Working memory is estimated and measured only where all devices together have at least so many
#: bytes: the interpreter itself takes about as much.
LEAST_MEASURED = 2**26
#: Where memory is short, the working memory of a step is measured if it reads and makes at least
#: this part of the memory.
NOTABLE = 1 / 256
#: Measured steps of each kind: several, since the bytes that other threads take are counted, too.
SAMPLES = 3
#: A worker with more to do reports at least this often, in seconds.
REPORT_EVERY = 0.0005
#: Seconds of a step from which on threads with nothing to do take over what waits for others: cores
#: are not all equally fast, and the next steps should take about as long.
LONG = 0.001
#: ... and so do they, for each of them, in a run of so few steps that it pays to wake them.
COARSE = 4
#: What has become of the latest launch of a step.
LAUNCHED, MADE, REFUSED = 0, 1, 2


def cpu_machine(devices: int, memory_limit: int | None = None) -> Machine:
    """`devices` threads that share the host's memory; a limit is per device, in bytes."""
    if memory_limit is None:
        memory_limit = int(0.9 * available_memory()) // devices
    arrays = ARRAYS if devices * memory_limit >= LEAST_MEASURED else 0
    return Machine.uniform(
        devices, memory=memory_limit, bandwidth=5e9, flops=40e9, shared=True, arrays=arrays
    )


def cpu_count() -> int:
    """The cores that this process may use, by its affinity and its container."""
    return max(1, int(dask_cpu_count()))


class CpuHardware:
    """Threads of this process, in teams of one per device."""

    kind = "cpu"
    trouble = ""

    def __init__(
        self,
        devices: int,
        memory_limit: int | None = None,
        spill_directory: str | None = None,
        spill_compression: str | None = None,
    ):
        if devices < 1:
            raise ValueError(f"{devices} CPU devices: there must be at least one")
        self.names = tuple(f"host thread {d}" for d in range(devices))
        self.machine = cpu_machine(devices, memory_limit)
        self.store = SpillStore(spill_directory, compression=spill_compression)
        self.trimmer = MemoryTrimmer(self.machine.limit(0))
        self._teams: dict[int, Teams] = {}
        self._lock = new_lock()

    def can_replay(self, plan: Plan) -> bool:
        return False

    def home(self, value: Any) -> int | None:
        return None  # every thread reads all of the host's memory

    def to_numpy(self, value: Any) -> Any:
        return value

    def value_on_host(self, key: Key, place: int, places: Places) -> Any:
        return self.caller_value(key, place, places)

    def device_value(self, places: Places) -> Any:
        return places.get(0)

    def caller_value(self, key: Key, place: int, places: Places) -> Any:
        return renew(places[0]) if 0 in places else self.store.read(places[DISK], key)

    def forget(self, places: Places) -> None:
        if DISK in places:
            self.store.remove(places[DISK])

    def settings(self) -> dict[str, Any]:
        return {}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def callers_device(self) -> int | None:
        return None

    def rooms(self, plan: Plan, assembly: ResultAssembly) -> None:
        return None

    bring = send = None

    def join(self, blocks: Any) -> Any:
        return finalize(blocks)

    def synchronize(self) -> None:
        pass  # what has run has ended

    def recognize_loss(self, error: BaseException) -> DeviceLost | None:
        return None

    @contextmanager
    def lease(self, num_workers: int | None, pool: CallersPool | None) -> Iterator[Lease]:
        if pool is not None:
            machine = self._share(1)
            borrowed = BorrowedTeam(pool)
            yield Lease(
                machine,
                lambda plan, g, told, _: CpuDevices(
                    plan, borrowed, g, self.store, told, self.trimmer
                ),
                borrowed.threads,
            )
            return
        n = len(self.machine.devices) if num_workers is None else max(1, num_workers)
        with self._lock:
            teams = self._teams.setdefault(n, Teams(lambda: cpu_team(n)))
        with teams.lease() as team:
            yield Lease(
                self._share(n),
                lambda plan, g, told, _: CpuDevices(plan, team, g, self.store, told, self.trimmer),
            )

    def _share(self, devices: int) -> Machine:
        """The host's memory, divided among this many devices."""
        if devices == len(self.machine.devices):
            return self.machine
        return cpu_machine(devices, sum(self.machine.memory) // devices)

    def when_short(self, shed: Callable[[], object]) -> None:
        self.trimmer.shed = shed

    def when_compiled(self, note: Callable[..., None]) -> None:
        """Nothing: kernels for CPUs are compiled once for all schedulers of the process."""

    def close(self) -> None:
        with self._lock:
            every, self._teams = list(self._teams.values()), {}
        for teams in every:
            teams.close()
        self.store.retire()


def cpu_team(devices: int) -> Team:
    return Team([Worker(f"gpuscheduler-cpu-{d}") for d in range(devices)])


class CpuDevices:
    """The threads of one run. `launch` only collects; `wait` sends each worker its steps."""

    def __init__(
        self,
        plan: Plan,
        team: Team | BorrowedTeam,
        assembly: ResultAssembly | None = None,
        store: SpillStore | None = None,
        told: StepListener = StepListener.DONE,
        trimmer: MemoryTrimmer | None = None,
        size: Callable[[Any], int] = sizeof,
    ):
        self.plan, self.team, self.size, self.trimmer = plan, team, size, trimmer
        self.exact = told is StepListener.EACH  # somebody may want to see, and keep, each value
        self.assembly = assembly
        self.files = RunFiles(store or SpillStore())  # of values on the disk
        self.values: list[Any] = [None] * len(plan.steps)
        self.held = [0] * len(plan.steps)  # places that hold the value in memory
        self.nbytes = [0] * len(plan.steps)  # ... and the bytes that it has there
        self.written: set[int] = set()  # steps of which the host has all that is wanted
        self.refused: list[set[int]] = [set() for _ in range(len(team))]  # steps, by device
        #: Steps whose value is a list, tuple or set that other runs have, too, until it is read.
        self._shared: set[int] = set()
        self._renewing = new_lock()
        self.chunks = plan.movable_chunks
        for i, step in enumerate(plan.steps):
            if i in self.chunks:
                self._take_over(i, self.chunks[i])
            elif step.fixed:
                value = step.task({})
                self._hold_given(i, value() if type(value) is Chunk else value)
                self.held[i] = 1
        is_short = plan.machine.arrays and plan.may_be_short
        #: Measures the working memory of steps; None while memory is not short.
        self.meter = trimmer if is_short else None
        #: Bytes of values that may still be made before steps are measured in any case. It is
        #: finite where sizes are not known.
        self.unmeasured = inf
        if plan.machine.arrays and not plan.tried:
            self.unmeasured = SHORT * plan.machine.limit(0)
        self.stopped = False
        self.timed = False  # whether events say when steps ran
        #: Steps that were sent to a thread and that none has begun: whoever takes one out runs it.
        self._open: dict[int, None] = {}
        self._stage = bytearray([MADE] * len(plan.steps))  # ... of what a launched step may read
        #: Whether any thread may take any step; whether the latest step was long; and whether any
        #: may have been taken: then what a step reads may be in the making elsewhere.
        self._workers = team.workers if isinstance(team, Team) else []
        self._any = not plan.bound and len(self._workers) > 1
        self._long = self._helped = False
        self._coarse = self._any and plan.launch_count <= COARSE * len(team)
        self._launches: list[list[int]] = [[] for _ in range(len(team))]
        self._events = EventQueue()
        self._soon: list[Event] = []
        team.begin()

    def _take_over(self, step: int, chunk: Chunk) -> None:
        places = chunk.places
        if 0 in places:
            self._hold_given(step, places[0])
            self.held[step], self.nbytes[step] = 1, chunk.nbytes
        if DISK in places:
            self.files.of[step] = places[DISK]

    def _hold_given(self, step: int, value: Any) -> None:
        """Hold a value that other runs may have, too."""
        self.values[step] = value
        if type(value) in RENEWED:
            self._shared.add(step)

    def _own_value(self, step: int) -> Any:
        """A step's value; a list that other runs have, too, is copied at its first read."""
        if step in self._shared:
            with self._renewing:
                if step in self._shared:
                    self.values[step] = renew(self.values[step])
                    self._shared.discard(step)
        return self.values[step]

    def launch(self, step: int, place: int) -> None:
        self._stage[step] = LAUNCHED
        if self.plan.steps[step].aside:
            self.team.send_to_any(self._run_aside, step)
        else:
            self._launches[place].append(step)

    def copy(self, step: int, src: int, dst: int) -> None:
        if dst == DISK:
            self.team.send_aside("writes", self._write, (step, src))
            return
        self.held[step] += 1
        if src == DISK and self.plan.steps[step].again:
            self.team.send_to_any(self._read_file, (step, dst))
        elif src == DISK:
            self.team.send_aside("reads", self._read_file, (step, dst))
        elif dst == HOST and self.assembly is not None and step in self.assembly.slots:
            place = self.plan.steps[step].place  # not all of them from one thread
            self.team.send(place % len(self.team), self._deliver, [(step, src)])
        else:
            self._soon.append(Copied(step, src, dst))

    def free(self, step: int, place: int) -> None:
        if step in self.chunks:
            self.chunks[step].note_departure(place)
        if place == DISK:
            self.files.forget(step)
            return
        self.held[step] -= 1
        if self.held[step] <= (step in self.written):
            self.values[step] = None
            if self.trimmer is not None:
                self.trimmer.let_go(self.nbytes[step])

    def wait(self) -> list[Event]:
        behind: list[int] = []  # steps for which their own threads have no time yet
        for place, steps in enumerate(self._launches):
            if steps:
                self._launches[place] = []
                if self._coarse:
                    behind += steps[not self._workers[place].is_busy :]
                self._open.update(dict.fromkeys(steps))
                self.team.send(place, self._run, steps)
        if self._long and self._open:
            self._wake(self._open.copy())
        elif behind:
            self._wake(behind)
        out, self._soon = self._soon, []
        if not out:
            return self._events.wait(self.team)
        out += self._events.take_pending()
        return out

    def observe(self, record: RunRecord) -> None:
        self.timed = True

    def follow(self, tape: LaunchTape) -> bool:
        return False  # its threads do not obey in order

    def interrupt(self) -> None:
        self._events.put([Failed(-1, Interrupted())])

    def value(self, step: int) -> Any:
        if self.held[step] <= (step in self.written):
            s = self.plan.steps[step]
            if step in self.files.of:
                return self.files.store.read(self.files.of[step], s.key)
            if s.again:
                return s.read()
        return self._own_value(step)

    def keep_part(self, step: int, path: tuple[int, ...]) -> tuple[dict[int, Any], int]:
        if self.held[step] or step not in self.files.of:
            value = part_of(self.value(step), path)
            return {0: value}, sizeof(value)
        file, value = self.files.part(step, path, self.plan.steps[step].key)
        return {DISK: file}, sizeof(value)

    def keep(self, step: int) -> dict[int, Any]:
        places = {}
        if self.held[step]:
            places[0] = self.values[step]
        if step in self.files.of:
            places[DISK] = self.files.of.pop(step)
        return places or {0: self.value(step)}

    def close(self) -> None:
        self.files.end()
        self.stopped = True
        self._events.close()
        self.values = []
        for step in self.chunks:
            self.files.of.pop(step, None)
        for step in list(self.files.of):
            self.files.forget(step)

    # ---- in the workers

    def _wake(self, waiting: Iterable[int]) -> None:
        """Have threads with nothing to do take what waits for others."""
        idle = [place for place, worker in enumerate(self._workers) if not worker.is_busy]
        if idle:
            wanted = len([i for i in waiting if self._may_be_taken(i)])
            for place in idle[:wanted]:
                self._helped = True
                self.team.send(place, self._run, [])

    def _run(self, batch: list[int]) -> None:
        """Run a thread's own steps in order; where steps are long, then those of others."""
        events: list[Event] = []
        found: tuple[Event, ...] = ()
        report = perf_counter() + REPORT_EVERY
        for i in self._take_steps(batch):
            found = self._run_one(i)
            events += found
            if type(found[0]) is Failed:
                break
            if (now := perf_counter()) > report:
                self._events.put(events)
                events = []
                report = now + REPORT_EVERY
        if events:
            self._events.put(events)
        # a failed task's frames know this frame: they and the failure would hold each other
        del events, found

    def _run_aside(self, i: int) -> None:
        self._events.put([*self._run_one(i)])

    def _take_steps(self, batch: list[int]) -> Iterator[int]:
        """Take steps for a thread: its own first, then others' steps that can run now.

        A step of its own may read what another thread has taken and not made yet. It is left, and
        nobody waits for it: whoever has taken a step of another looks once more when that is made.
        """
        taken, steps = self._open.pop, self.plan.steps
        helps = not batch
        for i in batch:
            if self.stopped:
                return
            if (
                self._helped
                and self._has_pending_input(i)
                and self.refused[steps[i].place].isdisjoint(steps[i].inputs)
            ):
                continue
            if taken(i, i) is None:
                yield i
            else:
                helps = True  # who took it was meant for another one, which still waits
        while self._any and (helps or self._long) and not self.stopped:
            # the last that were launched: their own thread begins with the first
            every = reversed(self._open.copy())
            one = next((i for i in every if self._may_be_taken(i) and taken(i, i) is None), None)
            if one is None:
                return
            helps = True
            yield one

    def _has_pending_input(self, i: int) -> bool:
        """Whether an input of a step is launched and has not ended yet."""
        return LAUNCHED in [self._stage[j] for j in self.plan.steps[i].inputs]

    def _may_be_taken(self, i: int) -> bool:
        """Whether a thread may run a step that was launched on another one.

        A step that was refused memory runs again on its own thread, in order. Until then other
        threads take no step of that thread, except steps that read a refused value: these are
        refused as well.
        """
        step = self.plan.steps[i]
        if self._has_pending_input(i):
            return False
        return not self.refused[step.place] or REFUSED in [self._stage[j] for j in step.inputs]

    def _run_one(self, i: int) -> tuple[Event, ...]:
        """Run a step, and return the events to report."""
        step, meter, begin = self.plan.steps[i], self.meter, perf_counter()
        refused = self.refused[step.place]
        if refused and not refused.isdisjoint(step.inputs):
            refused.add(i)
            self._stage[i] = REFUSED
            return (NoRoom(i, step.place, 0),)
        try:
            value, extra = (
                (self._compute_value(i), None) if meter is None else self._measure_step(i, meter)
            )
            nbytes = self.size(value)
        except MemoryError as error:
            if isinstance(error, OutOfMemory):  # of a computation in the task: it has said all
                return (Failed(i, error),)
            refused.add(i)
            self._stage[i] = REFUSED
            said = f"{type(error).__name__}: {error}" if str(error) else ""
            return (NoRoom(i, step.place, _asked_for(error, step.nbytes), said),)
        except BaseException as error:  # SystemExit and the like belong to the caller, too
            return (Failed(i, error),)
        self.values[i], self.nbytes[i], self.held[i] = value, nbytes, 1
        refused.discard(i)
        self._stage[i] = MADE
        if self._any and not step.aside:
            long = perf_counter() - begin > LONG
            if long:
                self._helped = True  # before anybody helps
            self._long = long
        if self.meter is None and self.unmeasured < inf:
            self.unmeasured -= nbytes
            if self.unmeasured < 0:
                self.meter = self.trimmer
        span = (int(begin * 1e9), perf_counter_ns()) if self.timed else None
        return Issued(i, nbytes, extra, span), Done(i)

    def _compute_value(self, i: int) -> Any:
        """A step's value."""
        step = self.plan.steps[i]
        values = step.values(self._own_value if self._shared else self.values.__getitem__)
        if isinstance(step.task, KernelTask) and (room := self._room(i, step.task)) is not None:
            return step.task(values, room)
        return _copy_if_strided(step.task(values)) if step.aside else step.task(values)

    def _measure_step(self, i: int, trimmer: MemoryTrimmer) -> tuple[Any, int | None]:
        """Compute a step; return its value and working memory in bytes, None if unknown."""
        step, machine = self.plan.steps[i], self.plan.machine
        reads = [self.nbytes[j] or self.plan.steps[j].nbytes for j in step.inputs]
        if step.aside or step.nbytes + sum(reads) < NOTABLE * machine.limit(0):
            trimmer.take(step.nbytes)
            return self._compute_value(i), 0
        seen = trimmer.grown.setdefault((key_split(step.key), step.nbytes), [])
        trimmer.take(step.nbytes + max(seen, default=0))
        if len(seen) >= SAMPLES:
            return self._compute_value(i), max(seen)
        value, grown, exact = trimmer.measure_growth(lambda: self._compute_value(i))
        if grown is not None:
            grown = max(0, grown // self.team.at_work - self.size(value))
            if exact or grown <= machine.arrays * max(step.nbytes, *reads, 0):
                seen.append(grown)
        return value, max(seen, default=None)

    def _room(self, i: int, task: KernelTask) -> Any:
        """The part of a result into which a task writes its value; None for no such part."""
        if self.assembly is None or i not in self.assembly.slots:
            return None
        if self.exact or not self._only_delivered(i):
            return None
        return None if task.array is None else self.assembly.room(i, *task.array)

    def _deliver(self, arguments: list[tuple[int, int]]) -> None:
        assert self.assembly is not None
        for step, src in arguments:
            if self.stopped:
                return
            try:
                if self.assembly.write(step, self.values[step]):
                    if step not in self.plan.direct:
                        self.written.add(step)
                    if self._only_delivered(step):
                        self.values[step] = None
            except BaseException as error:
                self._events.put([Failed(step, error)])
                return
            self._events.put([Copied(step, src, HOST)])

    def _write(self, copy: tuple[int, int]) -> None:
        step, src = copy
        if self.stopped:
            return
        try:
            chunk = self.chunks.get(step)  # whose value no task has changed in place
            self.files.write(
                step,
                self.values[step] if chunk is None else chunk.places.get(0, self.values[step]),
                self.plan.steps[step].key,
                lambda f: self._note_file(step, f),
            )
            self._events.put([Copied(step, src, DISK)])
        except NotSpillable:
            self._events.put([NoRoom(step, DISK, self.plan.steps[step].nbytes)])
        except BaseException as error:
            self._events.put([Failed(step, error)])

    def _note_file(self, step: int, file: Any) -> None:
        if step in self.chunks:
            self.chunks[step].note_arrival(DISK, file)

    def _read_file(self, copy: tuple[int, int]) -> None:
        step, dst = copy
        if self.stopped:
            return
        try:
            s = self.plan.steps[step]
            if self.meter is not None:
                self.meter.take(s.nbytes)
            value = s.read() if s.again else self.files.store.read(self.files.of[step], s.key)
            if step not in self.chunks:
                self.values[step] = value
            else:
                self._hold_given(step, value)
                self.chunks[step].note_arrival(0, value)
        except MemoryError:
            self.held[step] -= 1
            self._events.put([NoRoom(step, dst, self.plan.steps[step].nbytes)])
        except BaseException as error:
            self._events.put([Failed(step, error)])
        else:
            self._events.put([Copied(step, DISK, dst)])

    def _only_delivered(self, step: int) -> bool:
        """Whether a value is needed only as a part of the result."""
        return not self.plan.readers[step] and step not in self.plan.direct


def _copy_if_strided(value: Any) -> Any:
    """Copy a strided block of a memory map to contiguous memory; return others unchanged."""
    if isinstance(value, np.memmap) and not value.flags.c_contiguous:
        return np.ascontiguousarray(value)
    return value


def _asked_for(error: MemoryError, least: int) -> int:
    """The bytes of a refused allocation, if NumPy names them; otherwise `least`, and at least 1.

    `State` reads 0 bytes as a refusal because of other steps.

    >>> _asked_for(MemoryError(), 0)
    1
    """
    return max(1, least, refused_bytes(error))
