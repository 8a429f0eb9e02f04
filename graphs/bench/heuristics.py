"""Numbers of the table `codegen/cuda/tuning` beside another value, in turns, on one GPU.

    python -m graphs.bench heuristics [--only NAME ...] [--mib 256] [--turns 7]

Each case compiles one kernel twice: as the table says, and with another value that switches a
special case off. Results are compared first. A case that gains less than 5 % is a candidate to go.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import cupy
import numpy as np

from gpuscheduler.codegen.cuda import tuning
from gpuscheduler.codegen.cuda.kernel import generate
from gpuscheduler.devices.cuda.kernels import Kernels
from gpuscheduler.devices.cuda.launch import Workspace
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.tracing import abstract, trace

from .. import black_scholes
from .timing import free_memory, on_device

#: A value that no size reaches.
NEVER = 2**60


class Case(NamedTuple):
    """Numbers of the table, what else they could be, and a kernel that they are for."""

    number: str
    other: int | tuple[int, ...]
    function: Callable[..., Any]
    inputs: int = 1
    dtype: str = "f4"
    columns: int = 8192
    #: Rows are so many, or as many as the bytes allow.
    rows: int = 0

    def shapes(self, nbytes: int) -> list[tuple[int, int]]:
        """The shapes of the inputs, of so many bytes each."""
        rows = self.rows or max(nbytes // self.columns // np.dtype(self.dtype).itemsize, 64)
        return [(rows, self.columns)] * self.inputs


def gauss_sum(x: Any) -> Any:
    return np.exp(-0.5 * ((x - 0.1) / 2) ** 2).sum(keepdims=True)


def neighbours(x: Any) -> Any:
    return x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]


def moving_mean(x: Any) -> Any:
    return np.lib.stride_tricks.sliding_window_view(x, 31, 1).mean(-1)


def moving_boxes(x: Any, side: int = 7) -> Any:
    return np.lib.stride_tricks.sliding_window_view(x, (side, side)).sum((-1, -2))


def differences(x: Any) -> Any:
    """Differences down and along, which end at the last row and column."""
    down = np.concatenate([x[1:], x[-1:]]) - x
    return np.concatenate([down[:, 1:], x[:, :1]], 1)


def costly(x: Any) -> Any:
    x = x[:, 1:] + x[:, :-1]
    for _ in range(8):
        x = np.abs(x) ** 0.3 + np.sin(x)
    return x


def histogram(x: Any) -> Any:
    return np.histogram(x, 100, (0, 10))[0]


CASES = (
    Case("TIMES, FLIGHT_BYTES, FLIGHT_COST", (8, 128, NEVER), gauss_sum),
    Case("ROW_WAVES", 64, gauss_sum),
    Case("ROW_WAVES", 64, lambda x: x.var(keepdims=True)),
    Case("ROW_WAVES", 64, lambda x: x.var(keepdims=True), dtype="f8"),
    Case("ROW_WAVES", 64, histogram),
    Case("ROW_WAVES", 32, lambda x: differences(x).var(1), rows=4, columns=2**24),
    Case("SHARED_WAVES", 8, lambda x, y: (x + y.T).sum(keepdims=True), 2, rows=8192),
    Case("COLUMN_WAVES", 8, lambda x: x.sum(0)),
    Case("COLUMN_STEPS", 32, lambda x: x.sum(0), rows=256),
    Case("LANES", 32, lambda x: x.sum(0)),
    Case("DEEP_TIMES", 4, lambda x: x.sum(0), columns=8191),
    Case("COLUMN_BLOCKS", 1, lambda x: x.sum(0)),
    Case("COLUMN_BLOCKS", 1, lambda x: x.sum(0), dtype="f8"),
    Case("COLUMN_BLOCKS", 1, lambda x: x.var(0)),
    Case("EMPTY_PART", 1, lambda x: x.sum(0), columns=2**16),
    Case("EMPTY_PART", 1, lambda x: x.var(0), columns=2**16),
    Case("MANY_COLUMNS", NEVER, lambda x: x.var(0), columns=2**15),
    Case("MANY_COLUMNS", NEVER, lambda x: x.var(0), columns=2**16),
    Case("MANY_COST", NEVER, lambda x: np.exp(np.sin(x)).var(0), columns=2**16),
    Case("FLIGHT_COST", NEVER, lambda x: np.exp(np.sin(x)).sum(keepdims=True)),
    Case("WIDE_STEPS", NEVER, lambda x: x.sum(1), rows=64),
    Case("WAVES", 128, lambda x, y: x + y, 2),
    Case("WAVES", 8, black_scholes.apply, 3, rows=4096),
    Case("STAGED", NEVER, black_scholes.apply, 3),
    Case("MOST_WIDTH", 4, lambda x: x * 2, dtype="u1"),
    Case("LOOSE_LEAST", NEVER, neighbours),
    Case("LOOSE_LEAST", NEVER, lambda x: x[:, 1:] - x[:, :-1]),
    Case("MANY_STEPS", NEVER, lambda x: (neighbours(x) ** 2).sum(keepdims=True)),
    Case("OFTEN", NEVER, lambda x: sum(x[:, n : n - 8] for n in range(8)).sum(keepdims=True)),
    Case("LOOSE_COST", NEVER, costly),
    Case("BESIDE", 0, neighbours),
    Case("MOST_COPIES", 0, histogram),
    Case("MOST_COPIES", 0, lambda x: np.histogram(x, 5, (0, 50))[0]),
    Case("TURNED_LENGTH", NEVER, lambda x, y: x + y.T, 2, rows=8192),
    Case("LEAST_IN_PANES", NEVER, moving_mean),
    Case("LEAST_IN_PANES", NEVER, moving_boxes),
    Case("MOST_AT_ONCE", 1, moving_boxes),
    Case("MOST_AT_ONCE", 1, lambda x: moving_boxes(x, 3)),
)


@contextmanager
def changed(number: str, value: int | tuple[int, ...]) -> Iterator[None]:
    """The table with other values of a number, or of several."""
    names = number.split(", ")
    kept = [getattr(tuning, name) for name in names]
    for name, other in zip(names, value if type(value) is tuple else (value,), strict=True):
        setattr(tuning, name, other)
    try:
        yield
    finally:
        for name, before in zip(names, kept, strict=True):
            setattr(tuning, name, before)


def describe_launches(program: Any) -> list[Any]:
    """The text of each kernel of a program, and all that a launch of it is given."""
    made = [generate(kernel) for kernel in program.kernels]
    return [(m.source, m.blocks, m.slots.tolist()) for m in made]


def measure(case: Case, nbytes: int, turns: int) -> str:
    """The row of a case: milliseconds as the table says, with the other value, and the ratio."""
    dtype = np.dtype(case.dtype)
    shapes = case.shapes(nbytes)
    foreseen = tuple(abstract.AbstractArray(shape, dtype) for shape in shapes)
    program = trace.trace_function(case.function, foreseen)
    names = tuple(range(case.inputs))
    task = KernelTask(case.number, program, names, foreseen, (), None, dict)
    rng = np.random.default_rng(0)
    numbers = [(rng.random(shape, dtype="f4") * 9 + 1).astype(dtype) for shape in shapes]
    values = dict(enumerate(map(cupy.asarray, numbers)))
    launches = [describe_launches(program)]
    with changed(case.number, case.other):
        launches.append(describe_launches(program))
    work, known = Workspace(), [Kernels(), Kernels()]
    found = [known[0].run(task, values, 0, work)]
    with changed(case.number, case.other):
        found.append(known[1].run(task, values, 0, work))
    for a, b in zip(*([f] if isinstance(f, cupy.ndarray) else f for f in found), strict=True):
        assert cupy.allclose(a, b, rtol=1e-4, atol=1e-4), case
    best = [math.inf, math.inf]
    for turn in range(2 * turns):
        n = turn % 2
        best[n] = min(best[n], on_device(lambda: known[n].run(task, values, 0, work), 3))  # noqa: B023
    table, other = (1e3 * t for t in best)
    said = "" if launches[0] != launches[1] else "  the same launch"
    return f"{table:9.4f} {other:9.4f} {other / table:7.3f}{said}"


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="numbers of the table")
    parser.add_argument("--mib", type=int, default=256, help="size of each input")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    print("number                other     table ms  other ms  ratio")
    for n, case in enumerate(CASES):
        if options.only and not {*case.number.split(", ")} & {*options.only}:
            continue
        other = "never" if case.other == NEVER else str(case.other)
        row = measure(case, options.mib * 2**20, options.turns)
        print(f"{case.number:20s} {other:>6s} {row}  (case {n})", flush=True)
        free_memory()


if __name__ == "__main__":
    main()
