"""Split scans of few long lines into parts that run in parallel.

A scan goes along a line step by step, which is work for one warp or one thread. So three kernels
replace it: the total of each part, the totals before each part, and the scan of each part, to
which these are added (G. Blelloch, "Prefix sums and their applications", 1990). They read the
array twice. The parts, and so the bits, are the same on every run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from .expr import (
    SCANS,
    DType,
    Expr,
    Kernel,
    Reduction,
    View,
    constant,
    index,
    replace_leaves,
    view_of,
    with_view,
)

#: Lines along the fastest axis that are enough: each is the work of a warp.
ROWS = 1024
#: Lines along other axes that are enough: each is the work of a thread.
COLUMNS = 2**15
#: Least elements of a part.
LEAST = 64
#: Elements of an array for which any number of lines is enough.
LITTLE = 2**16
#: Operations of two values that do what a reduction does.
BOTH = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "fmin": "fmin",
        "fmax": "fmax"}  # fmt: skip


@lru_cache(1024)
def parts(shape: tuple[int, ...], axis: int) -> int | None:
    """The number of parts to cut lines into along an axis, or None.

    Parts have one length. None where no good number divides the lines so.

    >>> parts((8192, 8192), 1), parts((2**20,), 0), parts((1_000_003,), 0)
    (1, 1024, None)
    """
    n, points = shape[axis], math.prod(shape)
    lines = points // max(n, 1)
    enough = ROWS if math.prod(shape[axis + 1 :]) == 1 else COLUMNS
    if lines >= enough or points <= LITTLE or n < 2 * LEAST:
        return 1
    wanted = min(-(-enough // lines), math.isqrt(n))  # what the parts come to is a line, too
    least = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    found = sorted(d for d in {*least, *[n // d for d in least]} if n // d >= LEAST)
    near = [d for d in found if wanted <= 16 * d <= 256 * wanted]
    return next((d for d in near if d >= wanted), near[-1]) if near else None


def split_scan(kernel: Kernel, count: int) -> tuple[list[Kernel], Kernel]:
    """Split a scan: kernels in front of it, and the scan that is left.

    The outputs of the kernels have the numbers from `count` on. Other kernels, and scans of
    short lines, are returned alone.
    """
    if not kernel.is_scan:
        return [], kernel
    (axis,) = kernel.axes
    many = parts(kernel.shape, axis)
    if many is None or many == 1:
        return [], kernel
    long = kernel.shape[axis] // many

    def cut(leaf: Expr) -> Expr:
        view = view_of(leaf)
        if view is None:
            return leaf
        s = view.strides[axis]
        return with_view(leaf, View(view.offset, _replace_axis(view.strides, axis, s * long, s)))

    ops = [SCANS[r.op] for r in kernel.reductions]
    types = [carried_as(r) for r in kernel.reductions]
    given = replace_leaves([r.arg for r in kernel.reductions], cut)
    args = [_cast_to(x, t) for x, t in zip(given, types, strict=True)]
    shape = _replace_axis(kernel.shape, axis, many, long)
    small = _replace_axis(kernel.shape, axis, many)
    made = [Expr("reduced", (), t, (j, 0)) for j, t in enumerate(types)]
    totals = Kernel(
        shape, tuple(made),
        tuple([Reduction(op, x, (t,)) for op, x, t in zip(ops, args, types, strict=True)]),
        (axis + 1,),
    )  # fmt: skip
    # the totals of the parts before each one
    step = View.contiguous(small).strides
    first = Expr("equal", (_index_along(small, axis), constant(0, np.int64)), bool)
    moved = [
        Expr(
            "where",
            (first, _neutral_constant(op, t), _input(count + j, t, View(-step[axis], step))),
            t,
        )
        for j, (op, t) in enumerate(zip(ops, types, strict=True))
    ]
    before = Kernel(
        small, tuple(made),
        tuple([replace(r, arg=x, dtypes=(t,))
               for r, x, t in zip(kernel.reductions, moved, types, strict=True)]),
        (axis,),
    )  # fmt: skip
    still = View(0, _replace_axis(step, axis, step[axis], 0))

    def join_leaf(leaf: Expr) -> Expr:
        if leaf.op != "reduced":
            return cut(leaf)
        j = leaf.data[0]
        carried = _input(count + len(made) + j, types[j], still)
        return _cast_to(Expr(BOTH[ops[j]], (carried, made[j]), types[j]), leaf.dtype)

    # leaves only are replaced: `made` stands for itself in what takes its place
    outputs = tuple(replace_leaves(kernel.outputs, join_leaf))
    scans = tuple([replace(r, arg=x, dtypes=(t,))
                   for r, x, t in zip(kernel.reductions, args, types, strict=True)])  # fmt: skip
    strides = None
    if kernel.strides is not None:
        gap = kernel.strides[axis]
        strides = _replace_axis(kernel.strides, axis, gap * long, gap)
    return [totals, before], Kernel(shape, outputs, scans, (axis + 1,), strides)


def _replace_axis(values: tuple[int, ...], axis: int, *new: int) -> tuple[int, ...]:
    return (*values[:axis], *new, *values[axis + 1 :])


def _index_along(shape: tuple[int, ...], axis: int) -> Expr:
    return index(View(0, tuple([int(k == axis) for k in range(len(shape))])))


def _input(n: int, dtype: DType, view: View) -> Expr:
    return Expr("input", (), dtype, (n, view))


def _cast_to(x: Expr, dtype: DType) -> Expr:
    return x if x.dtype == dtype else Expr("cast", (x,), dtype)


def carried_as(scan: Reduction) -> DType:
    """The type of what comes together on the way: sums and products are rounded once, at the end.

    >>> x = Expr("input", (), "f4", (0, View(0, (1,))))
    >>> [carried_as(Reduction(op, x, (x.dtype,))).name for op in ("cumsum", "cummax")]
    ['float64', 'float32']
    """
    (dtype,) = scan.dtypes
    if SCANS[scan.op] in ("sum", "prod") and dtype.kind in "fc":
        return np.dtype("f8" if dtype.kind == "f" else "c16")
    return dtype


def _neutral_constant(op: str, dtype: DType) -> Expr:
    """What changes no value that it comes together with."""
    if op in ("sum", "prod"):
        return constant(int(op == "prod"), dtype)
    if op in ("fmin", "fmax"):
        return constant(np.nan if dtype.kind in "fc" else _end(op == "fmax", dtype), dtype)
    return constant(_end(op == "max", dtype), dtype)


def _end(least: bool, dtype: DType) -> object:
    """The least, or the greatest, of all values."""
    if dtype.kind == "b":
        return not least
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return info.min if least else info.max
    end = -np.inf if least else np.inf
    return complex(end, end) if dtype.kind == "c" else end
