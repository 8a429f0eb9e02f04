"""LLVM loops that write the elements of a region in one pass.

What a region of a kernel computes, in one pass and in one call.

NumPy takes the interpreter's lock again at each call. Many threads that evaluate small blocks stand
in each other's way: with sixteen, op by op on whole arrays is several times as fast. A region whose
operations are all known here is written as a function for LLVM (Numba brings it along), which runs
without that lock and reads each element once. What is not known, and what is small, is NumPy's.

Operations give the same bits as NumPy's, but for functions of the C library (`exp`, `sin`, …): the
last bit of these may be another. Sums are at least as accurate: pieces of a row are added in 32
lanes and then in pairs, and double precision sums of pieces with what was lost to rounding (Knuth's
TwoSum).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from ...ir.expr import Expr, View
from .llvm_code import CompiledLoop, LoopFunction, find_or_write
from .llvm_jit import compile_function
from .llvm_text import LlvmText, NotWritten, RegionLoop, memory_type, total

#: Points of a region from which on it is worth code of its own: to compile it takes 50 ms, once
#: for each kernel on a machine.
LEAST_POINTS = 2**17


def map_loop(
    shape: tuple[int, ...], roots: Sequence[Expr], views: Sequence[View]
) -> CompiledLoop | None:
    """Code that writes the roots' values to memory that is numbered by the views; None where there
    is none."""
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
    row.begins(text)
    steps = [[row.number("target", (n, k)) for k in range(axes - 1)] for n in range(len(roots))]
    with ExitStack() as stack:
        outer = [stack.enter_context(text.loop(n)) for n in row.lengths[:-1]]
        row.begin(outer)
        ends = [
            text.at(
                memory_type(r.dtype),
                f"%out{n}",
                total(text, list(zip(steps[n], outer, strict=True))),
            )
            for n, r in enumerate(roots)
        ]
        with text.loop(row.lengths[-1]) as j:
            for value, end, root in zip(row.values(j, roots), ends, roots, strict=True):
                text.store(root.dtype, value, text.at(memory_type(root.dtype), end, j))
    return LoopFunction(compile_function(text, row, len(roots), ""), tuple(row.ints))


def is_worth_compiling(shape: Sequence[int]) -> bool:
    """Whether a region is large enough."""
    return math.prod(shape) >= LEAST_POINTS
