"""Loop-invariant code motion: what depends on one axis moves to a small kernel of its own.

The small kernel runs in front of the large one. This is for GPUs; on the CPU,
`codegen/cpu/region` does the same within a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from ..values import map_leaves
from .cost import CHEAP, COSTS
from .expr import (
    Expr,
    Kernel,
    Out,
    Program,
    View,
    nodes,
    replace_leaves,
    substitute,
    view_of,
    with_view,
)
from .rewrite import renumber_arrays

#: Least cost of an expression at one point, in additions, to be worth a kernel of its own.
LEAST_COST = 10
#: Least points of a kernel whose invariants move: the launch of another takes no time beside it.
LEAST_POINTS = 2**18
#: How many times fewer points an invariant must have.
FEWER = 16
#: Most bytes of all invariants of a kernel: no plan knows of this memory.
MOST_BYTES = 2**24
#: Most arrays of invariants: each is an argument, of which a kernel may have some 500.
MOST_ARRAYS = 256
#: Most outputs of one small kernel: several kernels compile at the same time.
MOST_OUTPUTS = 16


def hoist_invariants(program: Program) -> Program:
    """Move loop-invariant expressions of a program to kernels of their own."""
    return split_kernels(program, _split)


def split_kernels(
    program: Program, split: Callable[[Kernel, int], tuple[list[Kernel], Kernel]]
) -> Program:
    """Replace each kernel by the kernels that `split` makes of it.

    `split` gets a kernel and the number of its first new array. It returns kernels that come
    before, whose outputs have the numbers from there on, and the kernel that reads them.
    """
    number = {n: n for n in range(program.inputs)}
    count = program.inputs
    kernels: list[Kernel] = []
    for start, kernel in zip(program.starts, program.kernels, strict=True):
        before, rest = split(renumber_arrays(kernel, number.__getitem__), count)
        count += sum(len(k.outputs) for k in before)
        number.update({start + n: count + n for n in range(len(kernel.outputs))})
        count += len(kernel.outputs)
        kernels += [*before, rest]
    if len(kernels) == len(program.kernels):
        return program
    result = map_leaves(
        lambda v: replace(v, array=number[v.array]) if isinstance(v, Out) else v, program.result
    )
    return Program(program.inputs, tuple(kernels), result)


def _split(kernel: Kernel, count: int) -> tuple[list[Kernel], Kernel]:
    """Split the invariants off a kernel; their outputs have the numbers from `count` on."""
    roots = [r.arg for r in kernel.reductions] or list(kernel.outputs)
    shape = kernel.shape
    long = frozenset(k for k, n in enumerate(shape) if n > 1)
    if math.prod(shape) < LEAST_POINTS:
        return [], kernel
    along = _varying_axes(roots, long)
    groups: dict[frozenset[int], list[Expr]] = {}
    for node in _choose_affordable(list(_outermost_candidates(roots, along, shape)), along, shape):
        groups.setdefault(along[id(node)], []).append(node)
    before: list[Kernel] = []
    new: dict[int, Expr] = {}
    for axes in sorted(groups, key=sorted):
        order = sorted(axes)
        small = tuple(shape[k] for k in order)
        own = View.contiguous(small).strides
        strides = tuple(own[order.index(k)] if k in axes else 0 for k in range(len(shape)))
        found = dict.fromkeys(groups[axes])  # equal nodes once
        for n, node in enumerate(found):
            leaf = Expr("input", (), node.dtype, (count + n, View(0, strides)))
            new.update({id(other): leaf for other in groups[axes] if other == node})
        count += len(found)
        outputs = _restrict_axes(list(found), order)
        parts = range(0, len(outputs), MOST_OUTPUTS)
        before += [Kernel(small, tuple(outputs[n : n + MOST_OUTPUTS])) for n in parts]
    if not before:
        return [], kernel
    changed = substitute(roots, new)
    if not kernel.reductions:
        return before, replace(kernel, outputs=tuple(changed))
    reductions = [replace(r, arg=a) for r, a in zip(kernel.reductions, changed, strict=True)]
    return before, replace(kernel, reductions=tuple(reductions))


def _varying_axes(roots: list[Expr], long: frozenset[int]) -> dict[int, frozenset[int]]:
    """The axes along which each node's value may differ."""
    out: dict[int, frozenset[int]] = {}
    for node in nodes(roots):
        view = view_of(node)
        if view is not None:
            out[id(node)] = frozenset(k for k, s in enumerate(view.strides) if s) & long
        else:
            out[id(node)] = frozenset().union(*[out[id(a)] for a in node.args])
    return out


def _outermost_candidates(
    roots: list[Expr], along: dict[int, frozenset[int]], shape: tuple[int, ...]
) -> Iterable[Expr]:
    """The expressions worth a kernel of their own that lie inside no other such one."""
    points = math.prod(shape)
    free: dict[int, bool] = {}  # it reads no array and calls nothing: it is harmless anywhere
    for node in nodes(roots):
        own = node.op not in ("input", "call", "reduced")
        free[id(node)] = own and all(free[id(a)] for a in node.args)
    stack = [(r, True) for r in roots]
    seen: set[tuple[int, bool]] = set()
    taken: set[int] = set()
    while stack:
        node, always = stack.pop()  # whether it is evaluated at every point
        if (id(node), always) in seen:
            continue
        seen.add((id(node), always))
        axes = along[id(node)]
        length = math.prod(shape[k] for k in axes)
        small = axes and FEWER * length <= points and length * node.dtype.itemsize <= MOST_BYTES
        if small and (always or free[id(node)]) and _cost(node) >= LEAST_COST:
            if id(node) not in taken:
                taken.add(id(node))
                yield node
            continue
        stack += [(a, always and not (node.op == "where" and n)) for n, a in enumerate(node.args)]


def _choose_affordable(
    found: list[Expr], along: dict[int, frozenset[int]], shape: tuple[int, ...]
) -> list[Expr]:
    """Choose the expressions that there is memory for, the most work first."""
    arrays, room = MOST_ARRAYS, MOST_BYTES
    chosen: set[Expr] = set()
    distinct = {node: along[id(node)] for node in found}
    for node in sorted(distinct, key=_cost, reverse=True):
        nbytes = math.prod(shape[k] for k in distinct[node]) * node.dtype.itemsize
        if arrays and nbytes <= room:
            arrays, room = arrays - 1, room - nbytes
            chosen.add(node)
    return [node for node in found if node in chosen]


def _cost(root: Expr) -> int:
    """The cost of an expression at a point, in additions."""
    total = 0
    for node in nodes((root,)):
        if node.op in CHEAP or not node.args:
            total += bool(node.args)
        else:
            wide = node.dtype.kind in "fc" and node.dtype != np.float32
            total += COSTS.get(node.op, (20, 40))[wide]
    return total


def _restrict_axes(roots: list[Expr], axes: list[int]) -> list[Expr]:
    """The same expressions over these axes alone."""

    def change(leaf: Expr) -> Expr:
        view = view_of(leaf)
        if view is None:
            return leaf
        return with_view(leaf, View(view.offset, tuple([view.strides[k] for k in axes])))

    return replace_leaves(roots, change)
