"""Whose code a step is: the user's layer, function and line.

Tasks keep what they were made of: a kernel its original tasks, a fused task its inner graph. So
nothing is written down while a graph is planned. What a step comes from is found when somebody
asks: for the note of an error, for a table, for a report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask.utils import key_split

from .plan import Plan

Key = Any
#: Characters of a label at most.
LONGEST = 40


class Origin(NamedTuple):
    """One of the user's operations in a step."""

    layer: str  # "normalise-fa79…", as Dask calls it
    function: str  # "normalise", "numpy.exp", "Model.step"
    code: str  # where that function is defined: "wave.py:6"; "" for builtins
    line: str  # where the user wrote the operation: "wave.py:21"; "" where unknown


@dataclass(eq=False, repr=False, slots=True)
class StepTable:
    """What the steps of a plan are, without their tasks and values: columns by step."""

    keys: list[Key]
    kinds: list[int]  # steps that do the same to different blocks have the same kind
    places: list[int]
    nbytes: list[int]  # of each value, as far as known when the table was made
    seconds: list[float]  # predicted
    inputs: list[tuple[int, ...]]
    aside: bytearray  # whether a step runs beside its device's queue, as it reads or writes a file
    fixed: bytearray  # whether a step's value existed before the run
    labels: dict[int, str]  # by kind: "normalise · exp · sum"
    lines: dict[int, str]  # by kind: "wave.py:20, wave.py:21"
    origins: dict[int, tuple[Origin, ...]]  # by kind

    def label(self, step: int) -> str:
        """The label of a step, for people."""
        return self.labels[self.kinds[step]]

    def line(self, step: int) -> str:
        """The user's lines behind a step, each once: "wave.py:20, wave.py:21"."""
        return self.lines[self.kinds[step]]

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"<StepTable of {len(self.keys):,} steps>"


def step_table(plan: Plan) -> StepTable:
    """The table of a plan's steps; a plan has one, which is made at the first call."""
    known: StepTable | None = plan.__dict__.get("table")
    if known is None or len(known) != len(plan.steps):
        known = plan.__dict__["table"] = _make_table(plan)
    return known


def _make_table(plan: Plan) -> StepTable:
    steps = plan.steps
    first: dict[int, int] = {}
    for i, step in enumerate(steps):
        first.setdefault(step.kind, i)
    origins = {kind: step_origins(plan, i) for kind, i in first.items()}
    return StepTable(
        [s.key for s in steps],
        [s.kind for s in steps],
        [s.place for s in steps],
        [s.nbytes for s in steps],
        [s.seconds for s in steps],
        [s.inputs for s in steps],
        bytearray([s.aside for s in steps]),
        bytearray([s.fixed for s in steps]),
        {kind: label(found) for kind, found in origins.items()},
        {kind: lines(found) for kind, found in origins.items()},
        origins,
    )


def step_origins(plan: Plan, step: int) -> tuple[Origin, ...]:
    """The user's operations in a step, in the order in which they run."""
    return tuple(_origins(plan, step))


def _origins(plan: Plan, step: int) -> Iterator[Origin]:
    key = plan.steps[step].key
    name = key[0] if isinstance(key, tuple) and key else key
    yield Origin(str(name), key_split(key), "", "")


def lines(origins: tuple[Origin, ...]) -> str:
    """The user's lines, each once, in order.

    >>> lines((Origin("a-1", "f", "", "wave.py:3"), Origin("b-1", "exp", "", "wave.py:4")))
    'wave.py:3, wave.py:4'
    """
    return ", ".join(dict.fromkeys([o.line for o in origins if o.line]))


def label(origins: tuple[Origin, ...]) -> str:
    """Functions in order, at most `LONGEST` characters.

    >>> label((Origin("a-1", "normalise", "", ""), Origin("b-1", "exp", "", "")))
    'normalise · exp'
    """
    names = list(dict.fromkeys([o.function for o in origins]))
    out = " · ".join(names)
    while len(out) > LONGEST and len(names) > 2:
        del names[len(names) // 2]
        out = " · … · ".join([" · ".join(names[: -(-len(names) // 2)]), names[-1]])
        if len(names) == 2:
            break
    return out if len(out) <= LONGEST else out[: LONGEST - 1] + "…"
