"""Predict what kernels and copies take on the host's threads, beside what GPUs take.

The rates are those of one machine (an H200 and 16 cores, `graphs/bench/host.py`). They need be
right by a factor of two: a GPU is chosen only where it is much faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ir.expr import Kernel, Program, nodes, view_of
from ..ir.regions import bytes_touched
from .library_cost import CALLED

#: Bytes per second that one thread of the host reads and writes in a kernel, and that all do.
THREAD, HOST = 3.6e9, 58e9
#: Seconds of one thread for an operation on one number: in a loop that is vectorised, of a function
#: of libm, of a division or root, and to draw a random number.
SIMPLE, FUNCTION, DIVISION, DRAWN = 0.3e-9, 7e-9, 1e-9, 10e-9
#: Seconds of one thread to read a number of an array whose fastest axis is not the kernel's.
TURNED = 16e-9
#: Seconds of one thread to sort a number into a bin, or to go on with a scan or a moment.
BINNED, SCANNED, MOMENT = 5e-9, 3e-9, 1.5e-9
#: Seconds that a task takes while it has the interpreter to itself.
TASK = 30e-6
#: Bytes per second: of host arrays to GPUs, in one piece each or with gaps; of results to the host;
#: to new memory of the host; and of files to the host.
UP, UP_GAPS, DOWN, NEW, FILES = 41e9, 33e9, 50e9, 35e9, 3e9
#: Bytes per second to GPUs of what the host's threads have made: CuPy copies pageable memory.
UP_MADE = 10e9
#: Seconds to send one block, beside its bytes: threads send several at once.
BLOCK = 25e-6

_DIVISIONS = frozenset({
    "divide", "true_divide", "reciprocal", "sqrt", "floor_divide", "remainder", "fmod", "mod",
})  # fmt: skip
_FUNCTIONS = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh",
    "tanh", "arcsin", "arccos", "arctan", "arctan2", "arcsinh", "arccosh", "arctanh", "power",
    "float_power", "hypot", "cbrt", "logaddexp", "logaddexp2", "erf", "erfc", "gammaln", "gamma",
    "call",
})  # fmt: skip
_FREE = frozenset({"constant", "input", "index", "reduced", "real", "imag", "complex"})


def operation_seconds(op: str) -> float:
    """Seconds of one thread for an operation on one number."""
    if op in _FREE:
        return 0.0
    if op in _FUNCTIONS:
        return FUNCTION
    if op in _DIVISIONS:
        return DIVISION
    if op in ("bits", "uniform", "normal"):
        return DRAWN
    return BINNED if op == "bin" else SIMPLE


def kernel_seconds(kernel: Kernel) -> float:
    """Seconds of one thread of the host for a kernel.

    >>> from gpuscheduler.ir.expr import Expr, source
    >>> x = source(0, (10**6,), "f4")
    >>> plus, root = (Kernel((10**6,), (Expr(op, (x, x), "f4"),)) for op in ("add", "power"))
    >>> f"{kernel_seconds(plus):.2g} {kernel_seconds(root):.2g}"
    '0.0022 0.007'
    """
    inner, outer = nodes([r.arg for r in kernel.reductions]), nodes(kernel.outputs)
    if not kernel.reductions:
        inner, outer = outer, []
    each = sum([operation_seconds(n.op) for n in inner])
    each += TURNED * sum([_is_turned(kernel, n) for n in inner])
    for reduction in kernel.reductions:
        if reduction.op == "moment":
            each += MOMENT
        else:
            each += SCANNED if kernel.is_scan else SIMPLE
    kept = math.prod(kernel.output_shape) * sum([operation_seconds(n.op) for n in outer])
    return max(bytes_touched(kernel) / THREAD, kernel.points * each + kept)


def _is_turned(kernel: Kernel, leaf: object) -> bool:
    """Whether a leaf reads an array along another axis than the kernel's last."""
    view = view_of(leaf) if getattr(leaf, "op", "") == "input" else None  # type: ignore[arg-type]
    if view is None or len(view.strides) != len(kernel.shape):
        return False
    steps = [abs(s) for s, n in zip(view.strides, kernel.shape, strict=True) if n > 1]
    return bool(steps) and steps[-1] > 1 and 1 in steps[:-1]


def program_seconds(program: Program) -> float:
    """Seconds of one thread of the host for all kernels of a program."""
    return sum([kernel_seconds(k) for k in program.kernels])


@dataclass(frozen=True, slots=True)
class HostWork:
    """What a computation is for the host's threads."""

    kernels: float = 0.0  # seconds of one thread
    touched: int = 0  # bytes that these read and write
    tasks: int = 0  # tasks of all kinds
    made: int = 0  # bytes of results
    fetched: int = 0  # bytes of arrays that are on GPUs
    read: int = 0  # bytes of files
    called: int = 0  # bytes that functions of libraries read and make

    def seconds(self, threads: int) -> float:
        """Predict seconds of so many threads.

        >>> f"{HostWork(kernels=1.6, touched=10**9, tasks=64).seconds(16):.2g}"
        '0.1'
        """
        busy = max(self.kernels / threads, self.touched / HOST + self.called / CALLED)
        moved = self.made / NEW + self.fetched / DOWN
        return max(busy + moved + TASK * self.tasks, self.read / FILES)


@dataclass(frozen=True, slots=True)
class GpuWork:
    """What the same computation is for GPUs."""

    touched: int = 0  # bytes that kernels read and write
    tasks: int = 0  # kernels, and steps that send
    blocks: int = 0  # arrays that are sent
    up: int = 0  # bytes of these without gaps
    up_gaps: int = 0  # ... and with gaps
    down: int = 0  # bytes of results
    read: int = 0  # bytes of files
    library: float = 0.0  # seconds of one GPU in functions of libraries
    hosted: float = 0.0  # seconds of the host's threads beside
    up_made: int = 0  # bytes that these make and send

    def seconds(self, gpus: int, bandwidth: float, step: float) -> float:
        """Predict seconds of so many GPUs: kernels and copies go on beside each other."""
        kernels = (self.touched / bandwidth + self.library) / gpus + step * self.tasks
        links = min(gpus, 2)  # beyond that the host's memory limits the copies
        sent = self.up / UP + self.up_gaps / UP_GAPS + self.up_made / UP_MADE
        up = sent / links + BLOCK * self.blocks
        down = self.down / (DOWN * links)
        longest = max(kernels, up, down, self.read / FILES, self.hosted)
        # the first block arrives before anything runs, the last leaves when all is over
        return longest + (up + down) / max(16, self.blocks)
