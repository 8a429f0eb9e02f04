"""Loop tiling for stencils along a slow axis (2.5-D blocking).

In C order, a plane of many megabytes lies between two uses of an element. A GPU's cache has lost
the element by then. Columns of tiles, walked along the slow axis, keep it: "2.5-D blocking"
(Nguyen et al., SC 2010, doi:10.1109/SC.2010.2), left to the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from .expr import Expr, Kernel, Program, View, nodes, view_of, with_view
from .rewrite import change_leaves

#: Bytes between two uses of an element from which on a kernel is tiled. Measured on H100: with
#: 5.6 MB a seventh of the time is gained, with 32 MB a third (graphs/RESULTS.md).
FAR = 2**22
#: Most points of a tile: rows of memory are long enough, and planes small enough.
TILE = 2**14
#: Least points of a tile.
LEAST = 2**8


def tile_program(program: Program) -> Program:
    """Tile the kernels of a program that read far neighbours."""
    kernels = tuple([columns(k) for k in program.kernels])
    same = all(a is b for a, b in zip(kernels, program.kernels, strict=True))
    return program if same else replace(program, kernels=kernels)


def columns(kernel: Kernel) -> Kernel:
    """Tile a kernel: cut one axis in two and reorder; itself where nothing is gained.

    >>> shape = 64, 1024, 1024
    >>> one, two = [Expr("input", (), "f4", (0, View(n * 2**20, (2**20, 1024, 1)))) for n in (0, 1)]
    >>> columns(Kernel(shape, (Expr("subtract", (two, one), one.dtype),))).shape
    (64, 64, 16, 1024)
    """
    axis = None if kernel.reductions else _tiled_axis(kernel)
    if axis is None:
        return kernel
    shape = kernel.shape
    cut = axis + 1
    while math.prod(shape[cut + 1 :]) > TILE:
        cut += 1
    rest = math.prod(shape[cut + 1 :])
    n = max([d for d in range(1, min(shape[cut], TILE // rest) + 1) if shape[cut] % d == 0])
    if n * rest < LEAST or n * rest == math.prod(shape[axis + 1 :]):
        return kernel

    def swap_lengths(along: Iterable[int], whole: int, part: int) -> tuple[int, ...]:
        a = tuple(along)
        return (*a[:axis], *a[axis + 1 : cut], whole, a[axis], part, *a[cut + 1 :])

    def strides(old: tuple[int, ...]) -> tuple[int, ...]:
        return swap_lengths(old, old[cut] * n, old[cut])

    def leaf(x: Expr) -> Expr:
        view = view_of(x)
        return x if view is None else with_view(x, View(view.offset, strides(view.strides)))

    return replace(
        change_leaves(kernel, leaf),
        shape=swap_lengths(shape, shape[cut] // n, n),
        strides=strides(kernel.strides or View.contiguous(shape).strides),
    )


def _tiled_axis(kernel: Kernel) -> int | None:
    """The one axis along which a kernel reads far neighbours, or None.

    None also where it reads far neighbours along several axes: tiles have edges, and points
    beyond them would be read twice.
    """
    reads: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
    for node in nodes(kernel.roots):
        if node.op == "input":
            number, view = node.data
            reads.setdefault((number, view.strides, node.dtype.itemsize), []).append(view.offset)
    axes, far = set(), 0
    for (_, strides, itemsize), offsets in reads.items():
        apart = max(offsets) - min(offsets)
        for axis, (length, stride) in enumerate(zip(kernel.shape, strides, strict=True)):
            if 0 < stride <= apart < length * stride:
                if any((o - offsets[0]) % stride for o in offsets):
                    return None
                axes.add(axis)
                far = max(far, apart // stride * math.prod(kernel.shape[axis + 1 :]) * itemsize)
                break
    if len(axes) != 1 or far < FAR:
        return None
    (axis,) = axes
    return axis if axis < len(kernel.shape) - 1 else None
