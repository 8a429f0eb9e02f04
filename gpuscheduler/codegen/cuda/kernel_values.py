"""What a kernel computes at its points, as nodes and accumulators, and where its core lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import NotGenerated
from ...ir.expr import SCANS, Expr, Kernel, View
from ...ir.regions import interior, simplify_in_box
from . import tuning
from .nodes import NodeTree, code_of, dtype_of
from .operations import accumulator, code
from .schedule import Schedule


def describe_values(kernel: Kernel, aligned: bool, processors: int, writes: bool) -> Schedule:
    """Begin a schedule: the nodes that are evaluated, and what takes them in."""
    outs = [code_of(o) for o in kernel.outputs]
    if kernel.reductions:
        roots, kinds, structs = describe_reductions(kernel)
        tree, final = NodeTree(roots, "v"), NodeTree(kernel.outputs, "f")
    else:
        roots, kinds, structs = list(kernel.outputs), [], []
        tree = final = NodeTree(kernel.outputs, "v")
    return Schedule(
        kernel, aligned, processors, writes, outs, roots, tree, final, kinds, structs,
    )  # fmt: skip


def describe_reductions(kernel: Kernel) -> tuple[list[Any], list[Any], list[str]]:
    """The expressions that are reduced, the kinds of reductions, and types of accumulators."""
    roots: list[Any] = []
    names: dict[str, str] = {}  # of accumulators, by their text
    kinds: list[tuple[str, str, list[str]]] = []
    structs: list[str] = []
    for j, r in enumerate(kernel.reductions):
        gives = []
        for d in r.dtypes:
            short = code(np.dtype(d))
            if short is None:
                raise NotGenerated(f"{r.op} that gives {d}")
            gives.append(short)
        if r.op == "histogram":
            assert len(kernel.reductions) == 1
            if reason := too_many(kernel):
                raise NotGenerated(reason)
            roots.append(r.arg)
            kinds.append((r.op, code_of(r.arg), gives))
            continue
        op = SCANS.get(r.op, r.op)
        found = accumulator(op, code_of(r.arg), gives[0], f"Part{j}", r.op in SCANS)
        if found is None:
            raise NotGenerated(f"{r.op} of {r.arg.dtype}")
        text, takes = found
        # the compiler does what it does for a type once
        alike = names.setdefault(text.replace(f"Part{j}", ""), f"Part{j}")
        structs.append(text if alike == f"Part{j}" else f"typedef {alike} Part{j};")
        taken = r.arg if code_of(r.arg) == takes else Expr("cast", (r.arg,), dtype_of(takes))
        roots.append(taken)
        kinds.append((op, takes, gives))
    return roots, kinds, structs


def find_core(schedule: Schedule) -> Schedule:
    """Find the core: a box of points where conditions on indices that guard loads are known.

    Most points lie there, and less is to be computed for them.
    """
    if schedule.scanning or all(g is None for g in schedule.tree.guards.values()):
        return schedule
    shape = schedule.kernel.shape
    found = interior(list(schedule.evaluated), shape)
    if found is None:
        return schedule
    box, roots = found
    core = NodeTree(roots, "c")
    if 2 * len(core.nodes) > len(schedule.tree.nodes):
        return schedule
    within = [
        (k, low, high - low)
        for k, ((low, high), n) in enumerate(zip(box, shape, strict=True))
        if high - low < n
    ]
    return replace(schedule, core=core, within=within)


def leaf_strides(
    kernel: Kernel, tree: NodeTree, k: int, kept: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The strides of a leaf along all axes, which has the `kept` ones only, if any are given."""
    node, shape = tree.nodes[k], kernel.shape
    view: View = node.data[1] if node.op == "input" else node.data
    strides = list(view.strides)
    if kept is not None:
        spread = [0] * len(shape)
        for a, s in zip(kept, strides, strict=True):
            spread[a] = s
        strides = spread
    # along an axis of one point a stride means nothing
    return tuple([0 if n == 1 else s for n, s in zip(shape, strides, strict=True)])


def simplify_within(
    schedule: Schedule, within: Iterable[tuple[int, int, int]], letter: str
) -> tuple[NodeTree, dict[tuple[str, int], int]]:
    """Simplify what is evaluated at points that lie in the core along some axes.

    Returns the nodes, and the layouts of their leaves.
    """
    kernel = schedule.kernel
    box = [(0, n) for n in kernel.shape]
    for k, low, length in within:
        box[k] = low, low + length
    tree = NodeTree(simplify_in_box(list(schedule.evaluated), tuple(box)), letter)
    leaves = (*tree.inputs, *tree.indices)
    return tree, {(letter, k): schedule.layouts[leaf_strides(kernel, tree, k)] for k in leaves}


def too_many(kernel: Kernel) -> str | None:
    """Why a histogram does not fit in shared memory, or None."""
    bins, most = (
        kernel.shape[0],
        tuning.MOST_WEIGHTS if kernel.is_weighted_histogram else tuning.MOST_BINS,
    )
    what = "histogram of weights" if kernel.is_weighted_histogram else "histogram"
    return f"a {what} of {bins:,} bins, more than {most:,}" if bins > most else None
