"""LLVM loops that write the elements of a region in one pass.

NumPy takes the interpreter's lock at each call, so threads that evaluate small blocks wait for
each other. With sixteen threads, whole arrays op by op are several times as fast. A region whose
operations are all known here becomes one LLVM function (Numba brings LLVM along). It runs
without the lock and reads each element once. NumPy evaluates small regions and unknown
operations.

Operations give the same bits as NumPy's. Only functions of the C library (`exp`, `sin`, …) may
differ in the last bit. Sums are at least as accurate: pieces of a row are added in 32 lanes and
then in pairs. Sums of pieces in double precision keep their rounding errors (Knuth's TwoSum).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from ...ir.expr import Expr, View
from . import tuning
from .llvm_code import CompiledLoop, LoopFunction, find_or_write
from .llvm_jit import compile_function
from .llvm_text import LlvmText, NotWritten, RegionLoop, memory_type, total


def map_loop(
    shape: tuple[int, ...], roots: Sequence[Expr], views: Sequence[View]
) -> CompiledLoop | None:
    """Return code that writes the roots' values through the views; None where there is none."""
    try:
        if any(v.strides[-1] != 1 for v in views):
            raise NotWritten("results that do not lie along the rows")
        row = RegionLoop(len(shape), roots)
        written = find_or_write(row.words, lambda: _write_map_loop(row, roots))
        return CompiledLoop(written, row, shape, views)
    except NotWritten:
        return None


def _write_map_loop(row: RegionLoop, roots: Sequence[Expr]) -> LoopFunction:
    text, axes = LlvmText(), row.axes
    row.declare_arguments(text)
    steps = [[row.number("target", (n, k)) for k in range(axes - 1)] for n in range(len(roots))]
    with ExitStack() as stack:
        outer = [stack.enter_context(text.loop(n)) for n in row.lengths[:-1]]
        row.begin(outer)
        ends = [
            text.pointer_to(
                memory_type(r.dtype),
                f"%out{n}",
                total(text, list(zip(steps[n], outer, strict=True))),
            )
            for n, r in enumerate(roots)
        ]
        with text.loop(row.lengths[-1]) as j:
            for value, end, root in zip(row.values(j, roots), ends, roots, strict=True):
                text.store(root.dtype, value, text.pointer_to(memory_type(root.dtype), end, j))
    return LoopFunction(compile_function(text, row, len(roots), ""), tuple(row.ints))


def is_worth_compiling(shape: Sequence[int]) -> bool:
    """Whether a region is large enough."""
    return math.prod(shape) >= tuning.LEAST_POINTS
