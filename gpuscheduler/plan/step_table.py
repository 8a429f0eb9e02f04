"""What the steps of a plan are, without their tasks and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..frontend.compiled_task import CompiledCall
from ..frontend.graph import layer_of
from ..frontend.task import describe, host_only, members_of, sequence_of, work_identity_of
from .origins import Origin, label, lines, task_origins
from .plan import Plan

Key = Any
#: Groups of one kind of step at most; each takes some 20 µs to find out where it comes from.
MOST_GROUPS = 64


class GroupWork(NamedTuple):
    """What one step of a group does."""

    words: str  # "kernel", "batch of 16 kernel tasks", "call of add"
    kernels: int  # that it launches; 0 where it runs as it was written
    touched: int  # bytes that these read and write
    operations: int  # of arithmetic in these
    reason: str  # why it is no kernel; "" for kernels, and where nobody has asked
    reads_file: bool  # whether it reads a file or writes one, beside its device
    on_host: bool  # whether it runs on the host, as CuPy has refused it


@dataclass(eq=False, repr=False, slots=True)
class StepTable:
    """Columns by step, and what the steps of each group come from."""

    keys: list[Key]
    kinds: list[int]  # as in the plan: blocks of one array, or calls of one function
    groups: list[int]  # steps of one group run the same code, so they have one label
    places: list[int]
    nbytes: list[int]  # of each value, as far as known when the table was made
    seconds: list[float]  # predicted
    inputs: list[tuple[int, ...]]
    aside: bytearray  # whether a step runs beside its device's queue, as it reads or writes a file
    fixed: bytearray  # whether a step's value existed before the run
    labels: dict[int, str]  # by group: "normalise · exp · sum"
    lines: dict[int, str]  # by group: "wave.py:20, wave.py:21"
    origins: dict[int, tuple[Origin, ...]]  # by group
    work: dict[int, GroupWork]  # by group
    outputs: frozenset[int]  # steps whose values the caller gets

    def label(self, step: int) -> str:
        """The label of a step, for people."""
        return self.labels[self.groups[step]]

    def line(self, step: int) -> str:
        """The user's lines behind a step, each once: "wave.py:20, wave.py:21"."""
        return self.lines[self.groups[step]]

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<StepTable of {len(self.keys):,} steps>"


def step_table(plan: Plan) -> StepTable:
    """The table of a plan's steps; a plan has one, which is made at the first call."""
    known: StepTable | None = vars(plan).get("table")
    if known is None:
        known = _make_table(plan)
        plan.with_cached(table=known)
    return known


def _make_table(plan: Plan) -> StepTable:
    steps = plan.steps
    numbers: dict[Any, int] = {}
    of_kind: dict[int, list[int]] = {}  # groups of each kind
    groups: list[int] = []
    first: list[int] = []
    for i, step in enumerate(steps):
        key = step.key
        layer = None if type(key) is tuple else layer_of(key)  # which the kind says, else
        code = step.kind, layer, _code_of(step.task)
        group = numbers.get(code)
        if group is None:
            mine = of_kind.setdefault(step.kind, [])
            if len(mine) < MOST_GROUPS:
                group = len(first)
                first.append(i)
                mine.append(group)
            else:
                group = mine[-1]
            numbers[code] = group
        groups.append(group)
    origins = {
        group: task_origins(steps[i].task, steps[i].key, plan.renamed)
        for group, i in enumerate(first)
    }
    return StepTable(
        [s.key for s in steps],
        [s.kind for s in steps],
        groups,
        [s.place for s in steps],
        [s.nbytes for s in steps],
        [s.seconds for s in steps],
        [s.inputs for s in steps],
        bytearray([s.aside for s in steps]),
        bytearray([s.fixed for s in steps]),
        {group: label(found) for group, found in origins.items()},
        {group: lines(found) for group, found in origins.items()},
        origins,
        {group: _work_of(plan, i) for group, i in enumerate(first)},
        plan.result_steps,
    )


def _work_of(plan: Plan, i: int) -> GroupWork:
    step = plan.steps[i]
    found = describe(step.task)
    return GroupWork(
        found.words,
        len(found.kernels),
        sum([k.nbytes for k in found.kernels]),
        sum([k.operations for k in found.kernels]),
        plan.reasons.get(step.key, ""),
        step.aside and not step.sent,
        step.kind in plan.history.hosted and not host_only(step.task),
    )


def _code_of(task: Any) -> Any:
    """What is the same for tasks that run the same code."""
    if isinstance(task, CompiledCall):
        return id(task.function), id(task.steps)
    if len(sequence_of(task)) > 1:
        return tuple([_code_of(inner) for _, inner in sequence_of(task)])
    return type(task), len(members_of(task)), id(work_identity_of(task))
