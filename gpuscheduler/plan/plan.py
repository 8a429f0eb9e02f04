"""The plan: each step's place, inputs and estimates, in order.

A plan is data, and never changes. What runs learn of kinds of steps stands in its `RunHistory`,
which alike plans share. `Plan.with_sizes` makes a plan with true sizes for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from dask._task_spec import DataNode
from dask.utils import key_split

from ..frontend.chunk import Chunk
from ..frontend.graph import GatherTask
from ..frontend.task import kernels_only, launches_only
from .machine import DISK, HOST, Machine
from .origins import describe_task

Key = Any

#: A plan that may take more than this part of a memory has to count working memory, too.
SHORT = 1 / 2
#: Lines of text that a plan has of what runs where.
MOST_SIDES = 6


@dataclass(slots=True)
class Step:
    """One task on one device."""

    key: Key
    task: Callable[[dict[Key, Any]], Any]
    inputs: tuple[int, ...]  # earlier steps, each once
    names: tuple[Key, ...]  # the keys under which the task reads `sources`
    sources: tuple[int, ...]  # the step behind each name
    constants: dict[Key, Any]  # values of the graph that the task reads as they are
    place: int
    nbytes: int  # estimate of the value; of a plan that was tried, its size
    known: bool  # whether the collection told the size; otherwise it is a guess
    seconds: float  # estimate
    kind: int  # steps that do the same to different blocks have the same kind
    fixed: bool = False  # the value is the graph's own: letting go of it would free nothing
    picks: tuple[tuple[int, ...], ...] = ()  # where in each source's value what it reads is
    aside: bool = False  # it reads a file or writes one, while its device works
    again: bool = False  # ... and what it has read can be read again
    sent: bool = False  # ... and goes to its device at once

    def with_size(self, nbytes: int) -> Step:
        """Return the same step with another size of its value."""
        return Step(
            self.key, self.task, self.inputs, self.names, self.sources, self.constants, self.place,
            nbytes, self.known, self.seconds, self.kind, self.fixed, self.picks, self.aside,
            self.again, self.sent,
        )  # fmt: skip

    def read(self) -> Any:
        """The value, read from its file; of a step that can be read `again`."""
        return self.task(dict(self.constants))

    def values(self, value: Callable[[int], Any]) -> dict[Key, Any]:
        """What the task is called with, given the value of each step that it reads."""
        if self.picks:
            out = {}
            for name, i, path in zip(self.names, self.sources, self.picks, strict=True):
                part = value(i)
                for n in path:
                    part = part[n]
                out[name] = part
        else:
            out = {name: value(i) for name, i in zip(self.names, self.sources, strict=True)}
        if self.constants:
            out.update(self.constants)
        return out


@dataclass(frozen=True)
class Footprint:
    """Time, memory and traffic of a run, predicted or measured, by place.

    Places are devices, HOST and DISK. Measured memory is that of values alone. Predicted memory of
    devices also has the working memory seen in earlier runs, of one task at a time.

    >>> print(Footprint(0.5, {0: 10**6, HOST: 0, DISK: 0}, {(0, 1): 2000}, {HOST: 0, DISK: 0}))
    0.5 s; peak memory 1,000,000 bytes on device 0; moved 2,000 bytes from 0 to 1
    """

    seconds: float
    peak: dict[int, int]  # bytes, by memory: what devices share has the number of the first
    traffic: dict[tuple[int, int], int]  # bytes, by link
    spilled: dict[int, int]  # bytes that had to leave for the host and for the disk
    where: str = ""  # what ran it, where that was not the scheduler's devices
    #: The part of all bytes touched that GPUs touched, of a computation of NumPy's arrays.
    coverage: float | None = None

    def __str__(self) -> str:
        def place_text(place: int) -> str:
            if self.where and place != DISK:  # the threads' memory is the host's
                return "the result" if place == HOST else "the host"
            return {HOST: "the host", DISK: "the disk"}.get(place, str(place))

        device = "" if self.where else "device "
        peaks = [
            f"{n:,} bytes on {device * (p >= 0)}{place_text(p)}"
            for p, n in sorted(self.peak.items(), reverse=True)
            if n or p >= 0
        ]
        links = [
            f"{n:,} bytes from {place_text(a)} to {place_text(b)}"
            for (a, b), n in sorted(self.traffic.items())
            if n
        ]
        spilled = [
            f"{n:,} bytes to {place_text(p)}"
            for p, n in sorted(self.spilled.items(), reverse=True)
            if n
        ]
        on = f" on {self.where}" if self.where else ""
        out = f"{self.seconds:.3g} s{on}; peak memory {', '.join(peaks)}"
        for what, facts in (("moved", links), ("spilled", spilled)):
            if facts:
                out += f"; {what} {', '.join(facts)}"
        if self.coverage is not None:
            out += f"; GPUs touched {self.coverage:.0%} of the bytes"
        return out


class PassReport(NamedTuple):
    """What one pass of the compiler did to a graph."""

    name: str
    #: Tasks of the graph before the pass.
    before: int
    #: Tasks of the graph behind it.
    after: int


@dataclass(slots=True)
class RunHistory:
    """What runs have shown of kinds of steps, by the number of the kind.

    Alike plans share one. Runs may learn at the same time.
    """

    #: Most working memory seen, in bytes.
    extra: dict[int, int] = field(default_factory=dict)
    #: Working memory of such steps in other plans, in bytes; `extra` overrides it.
    foreseen: Mapping[int, int] = field(default_factory=dict)
    #: Kinds whose values were copied, as parts of larger arrays.
    parts: set[int] = field(default_factory=set)
    #: Kinds that mix host arrays and device arrays.
    mixed: set[int] = field(default_factory=set)
    #: Kinds that run on the host, as CuPy has refused them.
    hosted: set[int] = field(default_factory=set)
    #: Kinds whose arrays go to a device from where they are.
    pinned: set[int] = field(default_factory=set)

    def learn(self, extra: Mapping[int, int]) -> bool:
        """Note working memory by kind of step; whether any took more than was seen before."""
        more = {k: n for k, n in extra.items() if n > self.extra.get(k, -1)}
        for kind, n in more.items():  # other runs may learn at the same time
            self.extra[kind] = max(n, self.extra.get(kind, 0))
        return bool(more)


#: Cached facts of a plan that hold for any plan with the same tasks, inputs and places.
OF_STRUCTURE = (
    "readers", "crossings", "launch_count", "launches_only", "kernels_only", "fixed_steps",
    "result_steps",
)  # fmt: skip
#: ... and those that hold where fixed values are the same ones, too.
OF_VALUES = ("chunks", "own_chunks")


@dataclass(frozen=True, repr=False)
class Plan:
    """The steps of a computation in order; runs share it, and nothing changes it.

    `with_facts`, `with_steps` and `with_sizes` make other plans of it.
    """

    steps: list[Step]
    outputs: tuple[int, ...]  # steps whose values the caller gets
    machine: Machine
    deliver: frozenset[int] = frozenset()  # outputs that go to the host as soon as they are done
    direct: frozenset[int] = frozenset()  # outputs that the caller gets as they are
    writes: frozenset[int] = frozenset()  # steps that store a block, and run on their devices
    lent: frozenset[int] = frozenset()  # ... those whose values are arrays of the caller's
    gathers: dict[Key, GatherTask] = field(default_factory=dict)
    index: dict[Key, int] = field(default_factory=dict)
    predicted: Footprint | None = None
    #: Likely bytes of steps of unknown size that read unknown sizes, by step; 0 for no guess.
    likely: Mapping[int, int] = field(default_factory=dict)
    #: Persisted chunks that this run may move, by fixed step: their places when it starts.
    there: Mapping[int, Set[int]] = field(default_factory=dict)
    #: Bytes in each place of values that this run does not move.
    others: Mapping[int, int] = field(default_factory=dict)
    #: Outputs that are written into one array.
    into: frozenset[int] = frozenset()
    #: Bytes of that array by place; they are part of `others`.
    whole: Mapping[int, int] = field(default_factory=dict)
    #: Why tasks are no fused kernels, by the keys of `index`.
    reasons: Mapping[Key, str] = field(default_factory=dict, repr=False, compare=False)
    #: What each pass of the compiler did, in their order.
    passes: tuple[PassReport, ...] = field(default=(), repr=False, compare=False)
    tried: bool = False  # whether the sizes are those of a run
    #: What runs of this plan and of plans like it have shown.
    history: RunHistory = field(default_factory=RunHistory, repr=False, compare=False)
    where: str = ""  # what runs it, where that is not the scheduler's devices, for people
    resident: bool = False  # whether GPUs compute NumPy's arrays
    choice_text: str = ""  # what people are told of the choice between GPUs and the host
    #: ... and of each group of tasks: a line each.
    sides: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    bound: bool = False  # whether some steps have to run on the devices that they are on
    once: bool = False  # whether nobody will run it again
    #: Names of layers in the tasks of its template, and here.
    renamed: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def with_facts(self, **facts: Any) -> Plan:
        """Return the same plan with other facts than steps, by the names of its fields."""
        return replace(self, **facts)._know(self, *OF_STRUCTURE, *OF_VALUES)

    def with_steps(self, steps: list[Step], **facts: Any) -> Plan:
        """Return the plan for steps with other values, sizes or times, which read the same."""
        return replace(self, steps=steps, **facts)._know(self, *OF_STRUCTURE)

    def with_sizes(
        self, nbytes: Sequence[int | None], tried: bool = True, but: Container[int] = ()
    ) -> Plan:
        """Return the plan with true sizes by step, behind a run; itself where nothing is new.

        `nbytes` may have more sizes: chunks beside the plan are behind its steps. Steps in `but`
        wrote their values elsewhere: their size of 0 teaches nothing.
        """
        steps = None
        for i, (step, size) in enumerate(zip(self.steps, nbytes, strict=False)):
            known = step.fixed or size is None or (not size and i in but)
            if not known and step.nbytes != size:
                steps = steps or list(self.steps)
                steps[i] = step.with_size(size)  # type: ignore[arg-type]
        if steps is None and self.tried == tried:
            return self
        out = replace(self, steps=self.steps if steps is None else steps, tried=tried)
        return out._know(self, *OF_STRUCTURE, *OF_VALUES)

    def _know(self, other: Plan, *facts: str) -> Plan:
        """Take over cached facts of another plan, as far as that has them, and return the plan."""
        known = vars(other)
        vars(self).update({name: known[name] for name in facts if name in known})
        return self

    def with_cached(self, **facts: Any) -> Plan:
        """Return this plan with cached facts that are at hand, by the names of its properties."""
        vars(self).update(facts)
        return self

    @cached_property
    def chunks(self) -> dict[int, Chunk]:
        """The fixed steps that are persisted chunks."""
        return {i: c for i, s in enumerate(self.steps) if (c := chunk_of(s)) is not None}

    def with_chunks(self, chunks: Iterable[Chunk], others: Mapping[int, int] | None = None) -> Plan:
        """The same plan for a run that may move these chunks, which it may read or not.

        `others` are bytes by place of chunks that the run must not move.
        """
        index = {id(c): i for i, c in self.chunks.items()}
        steps, there = list(self.steps), {}
        held = dict(self.chunks)
        devices = len(self.machine.devices)
        for chunk in chunks:
            i = index.get(id(chunk), len(steps))
            places = frozenset(p for p in chunk.places if p < devices or self.machine.shared)
            if not places:
                continue  # on a device that is not among these
            if i == len(steps):
                if chunk.place >= devices and not self.machine.shared:
                    continue
                steps.append(_step_of(chunk, chunk.place % devices))
                held[i] = chunk
            there[i] = places
        more = len(steps) - len(self.steps)
        return replace(self, steps=steps, there=there, others=others or {}).with_cached(
            readers=self.readers + [[] for _ in range(more)],
            crossings=self.crossings + bytearray(more),
            chunks=held,
        )

    @cached_property
    def movable_chunks(self) -> dict[int, Chunk]:
        """The persisted chunks that this run may move, by step."""
        return {i: self.chunks[i] for i in self.there}

    @cached_property
    def result_steps(self) -> frozenset[int]:
        """The steps whose values the caller gets."""
        return frozenset(self.outputs)

    @cached_property
    def own_chunks(self) -> list[Chunk]:
        """The persisted chunks that the plan reads, each once."""
        return list(dict.fromkeys(self.chunks.values()))

    @cached_property
    def launch_count(self) -> int:
        """The number of steps to run."""
        return len(self.steps) - len(self.fixed_steps)

    @cached_property
    def fixed_steps(self) -> list[int]:
        """The steps whose values exist before the run."""
        return [i for i, s in enumerate(self.steps) if s.fixed]

    @cached_property
    def launches_only(self) -> bool:
        """Whether GPUs compute all steps by launches alone."""
        return all(launches_only(s.task) for s in self.steps if not s.fixed)

    @cached_property
    def kernels_only(self) -> bool:
        """Whether GPUs compute all steps by launches of generated kernels alone."""
        return all(kernels_only(s.task) for s in self.steps if not s.fixed)

    @property
    def why(self) -> dict[int, str]:
        """Why steps are no fused kernels, by step."""
        index = self.index
        return {index[k]: reason for k, reason in self.reasons.items() if k in index}

    @cached_property
    def readers(self) -> list[list[int]]:
        """The steps that read each step."""
        return step_readers([s.inputs for s in self.steps])

    @cached_property
    def crossings(self) -> bytearray:
        """Which steps are read on other devices than their own, or by a step that runs aside."""
        aside = [i for i, s in enumerate(self.steps) if s.aside]
        return crossing_steps([s.inputs for s in self.steps], [s.place for s in self.steps], aside)

    @cached_property
    def may_be_short(self) -> bool:
        """Whether values may leave too little room for the working memory of tasks."""
        return self.is_short(self.working_memory)

    def is_short(self, working: int) -> bool:
        """Whether `working` bytes of working memory in each memory may be too much."""
        limit, others = self.machine.limit, self.others
        return any(
            n + others.get(memory, 0) + working > SHORT * limit(memory)
            for memory, n in self.bytes_by_memory().items()
        )

    def bytes_by_memory(self, but: Container[int] = ()) -> dict[int, int]:
        """Bytes of all values made in or copied to each memory, without the steps `but`."""
        machine, steps = self.machine, self.steps
        if machine.shared:
            counted = [i for i in range(len(steps)) if i not in but and not self.is_callers(i)]
            return {0: sum([steps[i].nbytes for i in counted])}
        out: dict[int, int] = dict.fromkeys(machine.memories, 0)
        for i, (step, readers) in enumerate(zip(steps, self.readers, strict=True)):
            if i not in but:
                for place in {step.place, *[steps[r].place for r in readers]}:
                    out[place] += step.nbytes
        return out

    def with_result_array(
        self, into: Collection[int], parts: Container[int], place: int, nbytes: int
    ) -> Plan | None:
        """The same plan, whose steps `into` write into one array of `nbytes` on `place`.

        The array stays as long as the run. The values of the steps in `parts` take no memory beside
        it. None where the array might not fit.
        """
        memory, of = self.machine.memory_of(place), self.machine.memory_of
        if not (self.tried or all(s.known for s in self.steps)):
            return None
        others = {**self.others, memory: self.others.get(memory, 0) + nbytes}
        mine = [i for i, s in enumerate(self.steps) if of(s.place) == memory]
        steps = [
            replace(s, nbytes=0, known=True) if i in parts else s for i, s in enumerate(self.steps)
        ]
        stay = {i for i in mine if steps[i].fixed and i not in self.there}
        free = self.machine.limit(memory) - others[memory] - self.task_memory
        free -= sum([steps[i].nbytes for i in stay])
        for i in mine:
            needed = {i, *steps[i].inputs}.difference(stay)
            if not steps[i].fixed and sum([steps[j].nbytes for j in needed]) > free:
                return None
        out = replace(
            self, steps=steps, others=others, into=frozenset(into), whole={memory: nbytes}
        )
        return out.with_cached(readers=self.readers, crossings=self.crossings, chunks=self.chunks)

    def is_callers(self, i: int) -> bool:
        """Whether step `i` is the caller's own value, which no run moves."""
        return self.steps[i].fixed and i not in self.there

    @property
    def working_memory(self) -> int:
        """Working memory of one task on each device, in bytes: guessed until it was seen."""
        machine = self.machine
        if not machine.arrays:
            return self.task_memory
        chunks = self.chunks  # the caller's own values are read in parts, mostly
        sizes = [s.nbytes for i, s in enumerate(self.steps) if not s.fixed or i in chunks]
        guess = machine.arrays * len(machine.devices) * max(sizes, default=0)
        return max(guess, self.task_memory)

    @property
    def task_memory(self) -> int:
        """Working memory of one task on each device, in bytes, as far as it was seen."""
        return self.at_once * max(self.task_memory_by_kind.values(), default=0)

    @property
    def task_memory_by_kind(self) -> dict[int, int]:
        """Known working memory in bytes, by kind of step."""
        return {**self.history.foreseen, **self.history.extra}

    @property
    def at_once(self) -> int:
        """The number of tasks that run in one memory at the same time."""
        return len(self.machine.devices) if self.machine.shared else 1

    @property
    def unknown_count(self) -> int:
        """The number of steps of unknown size; 0 once the plan has run."""
        return 0 if self.tried else len(self.likely)

    @property
    def qualifier(self) -> str:
        """A qualifier of predictions from unknown sizes: "about ", "at least " or ""."""
        if not self.unknown_count:
            return ""
        return "about " if all(self.likely.values()) else "at least "

    def traffic(self, nbytes: Mapping[int, int] | None = None) -> dict[tuple[int, int], int]:
        """Bytes that cross each link when nothing is evicted: each value once per device.

        `nbytes` are true sizes by step; by default the plan's.
        """
        out: dict[tuple[int, int], int] = {}
        for i, step in enumerate(self.steps):
            size = step.nbytes if nbytes is None else nbytes[i]
            for d in sorted({self.steps[r].place for r in self.readers[i]} - {step.place}):
                out[step.place, d] = out.get((step.place, d), 0) + size
        return out

    def __repr__(self) -> str:
        """One line, however many steps there are; `str` says more."""
        n, devices = len(self.steps), len(self.machine.devices)
        sure = "" if self.predicted is None else f", {self.qualifier}{self.predicted.seconds:.3g} s"
        return f"<Plan of {n:,} step{'s'[: n != 1]} on {devices} device{'s'[: devices != 1]}{sure}>"

    def _repr_html_(self) -> str:
        """A page for notebooks: what runs as what, and what it costs; some kB for any plan."""
        from ..diagnostics.explain import explain_plan

        is_gpu = not (self.machine.shared or self.where)
        return explain_plan(self, self.predicted, is_gpu)._repr_html_()

    def __str__(self) -> str:
        devices = self.machine.devices
        count = [0] * len(devices)
        seconds = [0.0] * len(devices)
        for s in self.steps:
            count[s.place] += 1
            seconds[s.place] += s.seconds
        lines = [f"{len(self.steps)} steps on {self.where or f'{len(devices)} devices'}"]
        one = "thread" if self.where else "device"
        lines += [f"  {one} {d}: {count[d]} steps, {seconds[d]:.3g} s" for d in devices]
        if not self.machine.shared:  # else nothing has to move
            links = sorted(self.traffic().items())
            lines += [f"  {a} -> {b}: {n:,} bytes" for (a, b), n in links]
        if self.choice_text:
            told = [self.choice_text, *[f"  {line}" for line in self.sides[:MOST_SIDES]]]
            lines[1:1] = [f"  {line}" for line in told]
        together: dict[str, list[str]] = {}
        for i, reason in sorted(self.why.items()):
            together.setdefault(reason, []).append(key_split(self.steps[i].key))
        for reason, names in together.items():
            layers = ", ".join(dict.fromkeys(names))
            lines.append(f"  no kernel: {len(names)} of {layers}: {reason}")
        if self.unknown_count:
            lines.append(
                f"  {self.unknown_count} of these steps: of unknown size until they have run"
            )
        if self.predicted is not None:
            lines.append(f"  predicted: {self.qualifier}{self.predicted}")
        return "\n".join(lines)


def chunk_of(step: Step) -> Chunk | None:
    """The persisted chunk that a step stands for."""
    if step.fixed and type(step.task) is DataNode and type(step.task.value) is Chunk:
        return step.task.value
    return None


def _step_of(chunk: Chunk, place: int) -> Step:
    """A step for a chunk that the plan does not read; it holds no reference to the chunk."""
    step: Step | None = chunk.step
    if step is None or step.place != place:
        key, nbytes, none = chunk.key, chunk.nbytes, DataNode(chunk.key, None)
        step = Step(key, none, (), (), (), {}, place, nbytes, True, 0.0, kind=-1, fixed=True)
        chunk.step = step
    return step


def step_readers(inputs: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """The steps that read each step, from the inputs of each step."""
    out: list[list[int]] = [[] for _ in inputs]
    for i, reads in enumerate(inputs):
        for j in reads:
            out[j].append(i)
    return out


def crossing_steps(
    inputs: Sequence[tuple[int, ...]], places: Sequence[int], aside: Iterable[int]
) -> bytearray:
    """Which steps are read on other devices than their own, or by a step that runs aside."""
    out = bytearray(len(inputs))
    for reads, place in zip(inputs, places, strict=True):
        for j in reads:
            if places[j] != place:
                out[j] = 1
    for i in aside:
        for j in inputs[i]:
            out[j] = 1
    return out


def no_room(nbytes: int, where: str, what: str = "the result is one CuPy array") -> str:
    """The message for a result that no place has room for, with the remedy."""
    return (
        f"{what} of {nbytes:,} bytes, which {where} has no room for: use "
        '.to_backend("numpy") to get it on the host, .persist() to leave its blocks where they '
        "are, or reduce it first"
    )


def does_not_fit(
    step: Step,
    need: int,
    place: int,
    machine: Machine,
    held: int = 0,
    renamed: Mapping[str, str] | None = None,
) -> str:
    """The message for a step that does not fit a device, with the remedy.

    `held` are bytes of values that cannot be moved away. `renamed` is as for `Plan`.
    """
    words = describe_task(step.task, step.key, renamed)
    whose_code = f"{words}: " if words else ""
    limit = machine.limit(machine.memory_of(place))
    whose = "of all devices together" if machine.shared else "there"
    beside = f", beside {held:,} bytes of values that cannot be moved" if held else ""
    return (
        f"{whose_code}{step.key!r} needs {need:,} bytes on device {place} for its inputs and its "
        f"result{beside}, and the memory limit {whose} is {limit:,} bytes: use smaller chunks, or "
        "raise memory_limit"
    )
