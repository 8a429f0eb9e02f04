"""Choose whether GPUs or the host's threads compute NumPy's arrays, and remember what they took.

A whole computation goes one way. `choose` compares predictions for its plan on GPUs (`host_cost`).
What runs took is noted: where one side takes more than twice as long as was predicted for the
other, the other side is tried, and then the faster of the two stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dask._task_spec import DataNode, Task
from dask.utils import format_bytes, key_split

from ..dask_private import layers_of
from ..errors import PlanError
from ..frontend.graph import Graph
from ..frontend.task import host_only, kernels_of
from ..frontend.transfers import SENDING
from ..fusion.library_task import LibraryTask
from ..fusion.portable import PortableTask
from ..fusion.residency import HostTask
from ..plan.host_cost import GpuWork, HostWork, program_seconds
from ..plan.library_cost import gpu_seconds, host_seconds, portable_seconds, product_seconds
from ..plan.machine import STEP_SECONDS, Machine
from ..plan.matmul import MatmulSumTask
from ..plan.plan import Plan, Step, chunk_of
from .sides import HOSTED

#: Tasks that libraries compute on GPUs.
IN_LIBRARIES = (LibraryTask, MatmulSumTask, PortableTask)
#: GPUs are chosen where they should take at most this part of the host's time.
MARGIN = 0.7
#: Work of fewer seconds on the host stays there.
LEAST_SECONDS = 3e-3
#: Bytes that called functions may touch in all beside kernels of GPUs.
MOST_CALLED = 2**20
#: Bytes of all arrays of a computation, and of its blocks on average, below which it stays on the
#: host without a plan for GPUs.
LEAST_BYTES, LEAST_BLOCK = 2**25, 2**17
#: What is persisted stays on GPUs if it takes at most this part of their memory.
PART_KEPT = 0.8
#: The host may make values beside GPUs that take this part of the memory it has for values.
PART_HOSTED = 0.5
#: A run that takes so many times what was predicted for the other side has the other side tried.
SLOWER = 2.0
GPU, HOST = "gpu", "host"


@dataclass(eq=False)
class Choice:
    """Where a plan runs, why, and what it took there: shared by all plans like this one."""

    side: str  # GPU or HOST
    reason: str
    gpu_seconds: float = 0.0  # predicted
    host_seconds: float = 0.0  # predicted
    #: Bytes that kernels of GPUs touch, and called functions of the host.
    on_gpus: int = 0
    on_host: int = 0
    up: int = 0
    down: int = 0
    #: Whether the side may change when runs turn out slow.
    learns: bool = False
    #: Runs, and the least seconds that a run took behind the first, by side.
    runs: dict[str, int] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        """The part of all bytes touched that GPUs touch.

        >>> Choice(GPU, "", 0.1, 0.2, on_gpus=300, on_host=100).coverage
        0.75
        """
        return self.on_gpus / max(1, self.on_gpus + self.on_host)

    def note(self, side: str, seconds: float) -> None:
        """Note what a run took; the first of a side compiles, and says nothing.

        >>> choice = Choice(GPU, "", 0.1, 0.2, learns=True)
        >>> for seconds in (5.0, 0.5):
        ...     choice.note(GPU, seconds)
        >>> choice.side, choice.reason
        ('host', 'it took 0.5 s on GPUs, and 0.2 s were foreseen for the host')
        """
        n = self.runs[side] = self.runs.get(side, 0) + 1
        if n == 1:
            return
        self.took[side] = min(seconds, self.took.get(side, seconds))
        if self.learns and side == self.side:
            self._reconsider()

    def _reconsider(self) -> None:
        other = HOST if self.side == GPU else GPU
        mine, theirs = self.took[self.side], self.took.get(other)
        foreseen = {GPU: self.gpu_seconds, HOST: self.host_seconds}[other]
        if self.runs.get(other, 0) == 1 and theirs is None:
            return  # it was tried, and has only compiled
        if mine <= SLOWER * (foreseen if theirs is None else theirs):
            return
        what = "were foreseen for" if theirs is None else "were taken by"
        seconds = foreseen if theirs is None else theirs
        here, there = ("GPUs", "the host") if self.side == GPU else ("the host", "GPUs")
        self.reason = f"it took {mine:.2g} s on {here}, and {seconds:.2g} s {what} {there}"
        self.side = other

    def text(self, mode: str, gpus: Sequence[str]) -> str:
        """What people are told of it, in one line.

        >>> Choice(HOST, "it is small", 0.001, 0.002).text("auto", ["a GPU"])
        'numpy="auto": on the host: it is small (0.001 s foreseen on GPUs, 0.002 s on the host)'
        """
        n = len(gpus)
        where = f"{n} GPU{'s'[: n != 1]}" if self.side == GPU else "the host"
        out = f'numpy="{mode}": on {where}: {self.reason}'
        if not (self.gpu_seconds or self.host_seconds):
            return out
        facts = f"{self.gpu_seconds:.2g} s foreseen on GPUs, {self.host_seconds:.2g} s on the host"
        out += f" ({facts})"
        if self.side == GPU:
            out += f"; GPUs touch {self.coverage:.0%} of the bytes, of which "
            out += f"{format_bytes(self.up)} go there and {format_bytes(self.down)} come back"
        return out


@dataclass(frozen=True, slots=True)
class ArraySizes:
    """What the collections of a computation say of its arrays."""

    arrays: int  # layers that are arrays
    nbytes: int  # of those of known shape
    blocks: int  # of those of known shape

    @classmethod
    def from_graph(cls, dsk: Any) -> ArraySizes:
        """Add up what layers say.

        >>> import dask.array as da
        >>> ArraySizes.from_graph((da.ones(100, chunks=50) + 1).dask)
        ArraySizes(arrays=2, nbytes=1600, blocks=4)
        """
        arrays = nbytes = blocks = 0
        for graph in list(dsk.walk()) if hasattr(dsk, "walk") else [dsk]:
            if (layers := layers_of(graph)) is None:
                continue
            for layer in layers.layers.values():
                facts = layer.collection_annotations or {}
                shape, dtype, chunks = (facts.get(k) for k in ("shape", "dtype", "chunks"))
                if shape is None or dtype is None:
                    continue
                arrays += 1
                if chunks and not np.isnan(shape).any():
                    nbytes += int(np.prod(shape, dtype=np.float64)) * np.dtype(dtype).itemsize
                    blocks += int(np.prod([len(c) for c in chunks], dtype=np.int64))
        return cls(arrays, nbytes, blocks)

    def small_reason(self) -> str | None:
        """Why the arrays are too small for a plan on GPUs; None where they are not.

        >>> ArraySizes(1, 1600, 1).small_reason()
        'its arrays have 1.56 kiB in all'
        """
        if self.nbytes < LEAST_BYTES:
            return f"its arrays have {format_bytes(self.nbytes)} in all"
        if self.nbytes < LEAST_BLOCK * self.blocks:
            return f"its blocks have {format_bytes(self.nbytes // self.blocks)} on average"
        return None


def choose(graph: Graph, plan: Plan, mode: str, threads: int) -> Choice:
    """Choose the side of a plan for GPUs; `mode` is the option `numpy`.

    Raises
    ------
    PlanError
        with "gpu-only", where a task that touches 1 MiB or more is called on the host.
    """
    machine = plan.machine
    host, gpu = _work(plan, threads)
    host_seconds = host.seconds(threads)
    gpu_seconds = gpu.seconds(len(machine.devices), machine.bandwidth, STEP_SECONDS)
    called: dict[int, Any] = {i: s.task for i, s in enumerate(plan.steps) if host_only(s.task)}
    on_host = sum([t.touched_bytes for t in called.values()])
    choice = Choice(
        GPU, "", gpu_seconds, host_seconds, gpu.touched, on_host,
        gpu.up + gpu.up_gaps + gpu.up_made, gpu.down,
    )  # fmt: skip
    if mode in ("gpu", "gpu-only"):
        choice.reason = "as asked"
        large = {i: t for i, t in called.items() if t.touched_bytes >= MOST_CALLED}
        if mode == "gpu-only" and large:
            said = "; ".join(called_reasons(graph, large.values()))
            raise PlanError(
                f'numpy="gpu-only", and some work is no kernel of a GPU: {said}. Use '
                'numpy="gpu" to have it called on the host'
            )
        return choice
    choice.learns = True
    choice.side, choice.reason = _choose_side(
        graph, plan, choice, list(called.values()), gpu.touched
    )
    return choice


def _choose_side(
    graph: Graph, plan: Plan, choice: Choice, called: list[HostTask], touched: int
) -> tuple[str, str]:
    unknown = sum([t.touched_bytes for t in called if t.gpu_task is None])
    if graph.keep and unknown < MOST_CALLED and _fits_gpus(plan):
        choice.learns = False
        return GPU, "they keep what is persisted"
    if not touched:
        choice.learns = False
        possible = any(t.gpu_task is not None for t in called)
        return HOST, "the way to a GPU and back takes as long" if possible else (
            "nothing of it is a kernel"
        )
    mixed = unknown >= MOST_CALLED
    if any(chunk_of(s) is not None for s in plan.steps) and not mixed:
        choice.learns = False
        return GPU, "it reads arrays that GPUs keep"
    if choice.host_seconds < LEAST_SECONDS:
        return HOST, "it is little work"
    by_call = sorted([t for t in called if t.gpu_task is None], key=lambda t: -t.touched_bytes)
    first = called_reasons(graph, by_call)[0] if mixed else ""
    if choice.gpu_seconds <= MARGIN * choice.host_seconds:
        if not _fits_host(plan):
            return HOST, "the host has no room for what called functions make beside GPUs"
        return GPU, f"they are faster; functions are called on the host, {first}" if mixed else (
            "they are faster"
        )
    if mixed:
        said = f"functions are called on {format_bytes(unknown)}, {first}"
        return HOST, f"GPUs would save too little; {said}"
    return HOST, "the way to a GPU and back takes as long"


def bytes_made_on_host(plan: Plan) -> int:
    """Bytes of all that the host makes itself beside GPUs, as far as they are known."""
    tasks: list[Any] = [s.task for s in plan.steps if host_only(s.task)]
    return sum([int(task.made) for task in tasks])


def _fits_host(plan: Plan) -> bool:
    """Whether the host has room for all that it makes itself, which no run evicts."""
    return bytes_made_on_host(plan) <= PART_HOSTED * plan.machine.host_memory


def _fits_gpus(plan: Plan) -> bool:
    """Whether GPUs have room for what a computation leaves on them."""
    return sum([plan.steps[i].nbytes for i in plan.outputs]) <= PART_KEPT * sum(plan.machine.memory)


def called_reasons(graph: Graph, called: Any) -> list[str]:
    """Why tasks are called on the host, each reason once, with the layers that it is for."""
    together: dict[str, dict[str, int]] = {}
    for task in called:
        reason = graph.reasons.get(task.key, "it is no kernel")
        names = together.setdefault(reason, {})
        name = key_split(task.key)
        names[name] = names.get(name, 0) + 1
    return [
        f"{', '.join(f'{n} of {name}' for name, n in names.items())}: {reason}"
        for reason, names in together.items()
    ]


def _work(plan: Plan, threads: int) -> tuple[HostWork, GpuWork]:
    """The work of a plan: on the host alone, or on GPUs and the host beside them."""
    seconds: dict[int, float] = {}  # by program: alike blocks share one
    facts = dict.fromkeys(
        ("kernels", "library", "called", "touched", "tasks", "blocks", "up", "up_gaps", "up_made",
         "fetched", "read", "hosted", "to_host"), 0.0,
    )  # fmt: skip
    theirs = dict.fromkeys(("kernels", "touched", "called"), 0.0)  # of all this, the host's

    def add_task(task: Any, into: dict[str, float]) -> None:
        for kernel in kernels_of(task):
            program = kernel.program
            if id(program) not in seconds:
                seconds[id(program)] = program_seconds(program)
            into["kernels"] += seconds[id(program)]
            into["touched"] += kernel.touched_bytes
        if isinstance(task, IN_LIBRARIES):
            mine, gpus = library_work(task, plan.machine)
            into["kernels"] += mine
            into["called"] += task.traffic
            if into is facts:
                facts["library"] += gpus

    for step in plan.steps:
        _add_read(step, facts)
        task: Any = step.task
        runs = host_only(task) or isinstance(task, IN_LIBRARIES)
        facts["tasks"] += len(kernels_of(task)) or runs
        if not host_only(task):
            add_task(task, facts)
            continue
        if task.gpu_task is None:
            theirs["called"] += task.touched_bytes
        else:
            add_task(task.gpu_task, theirs)
        facts["hosted"] += HOSTED
        facts["up_made"] += step.nbytes * task.sends
        facts["blocks"] += task.sends
        reads = [plan.steps[k] for k in step.inputs]
        facts["to_host"] += sum([r.nbytes for r in reads if not host_only(r.task) and not r.aside])
    n = {k: int(v) for k, v in facts.items() if k not in ("kernels", "library", "hosted")}
    made = sum([plan.steps[i].nbytes for i in plan.outputs])
    every = {k: facts[k] + theirs[k] for k in theirs}
    host = HostWork(
        every["kernels"], int(every["touched"]), n["tasks"], made, n["fetched"], n["read"],
        int(every["called"]),
    )  # fmt: skip
    beside = HostWork(theirs["kernels"], int(theirs["touched"]), called=int(theirs["called"]))
    launches = len({id(s.task) for s in plan.steps if not s.fixed})
    gpu = GpuWork(
        n["touched"] + n["called"], launches, n["blocks"], n["up"], n["up_gaps"],
        made + n["to_host"], n["read"], facts["library"],
        beside.seconds(threads) + facts["hosted"], n["up_made"],
    )  # fmt: skip
    return host, gpu


def _add_read(step: Step, facts: dict[str, float]) -> None:
    """Add what a step only reads or sends: of a persisted chunk, of a file, or of the host."""
    if chunk_of(step) is not None:
        facts["fetched"] += step.nbytes
    elif step.sent:
        facts["blocks"] += 1
        facts[_transfer_kind(step)] += step.nbytes
    facts["read"] += step.nbytes * (step.aside and not step.sent)


def library_work(task: Any, machine: Machine) -> tuple[float, float]:
    """Seconds of one thread of the host, and of one GPU, for what a library computes."""
    if isinstance(task, LibraryTask):
        return host_seconds(task.call), gpu_seconds(task.call, machine.bandwidth)
    if isinstance(task, PortableTask):
        return portable_seconds(task.operations, task.traffic, machine)
    on_host = product_seconds(task.operations, task.dtype)
    return on_host, task.operations / machine.flops


def _transfer_kind(step: Step) -> str:
    """How the array of a step goes to its device: a file, or a host array with gaps or without."""
    task: Any = step.task
    if type(task) is DataNode:
        return "up"
    array = task.args[0] if type(task) is Task and task.func in SENDING else None
    if type(array) is not np.ndarray:
        return "read"
    return "up" if array.flags.c_contiguous or array.flags.f_contiguous else "up_gaps"
