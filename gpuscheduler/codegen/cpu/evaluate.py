"""Evaluate kernels with NumPy, in blocks that fit the cache, or with compiled LLVM loops.

A block is a box of the iteration space, and each node is one call of a ufunc on it. So no array
of the size of an operand is made, except the outputs. Large regions are evaluated by machine
code instead (`llvm_map`, `llvm_reduce`).

Where views reach outside their arrays for points that a `where` does not choose, the space is
cut into regions in which the choice is known. Where such cuts are not possible, only the chosen
points are read. The same cuts limit calls of Python functions to the points that need them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...ir.bins import Bins
from ...ir.expr import (
    SCANS,
    DType,
    Expr,
    Kernel,
    Reduction,
    View,
    nodes,
    replace_leaves,
    substitute,
)
from ...ir.regions import Box, cut_for, simplify_in_box
from ...ir.split_scans import BOTH, carried_as
from . import histogram, llvm_code, llvm_map, llvm_reduce, tuning
from .accumulate import (
    Array,
    PairwiseMerger,
    State,
    accumulation_dtype,
    allocate_state,
    broadcast_view,
    drop_first_axis,
    finish_state,
    identity_state,
    merge_states,
    reduce_block,
    reorder_axes,
    reorder_view,
)
from .array_memory import BufferMemory, buffer_memory, memory_extent, view_bounds
from .llvm_text import OPEN
from .node_calls import GUARDED
from .region import Bounds, Region, RegionRun, block_boxes


def evaluate(
    kernel: Kernel,
    arrays: Mapping[int, Array] | Sequence[Array],
    block_bytes: int = tuning.BLOCK_BYTES,
    words: Mapping[Expr, Expr] | None = None,
    out: Array | None = None,
) -> tuple[Array, ...]:
    """Return the outputs of a kernel, C-contiguous and of shape `kernel.output_shape`.

    `words` has other constants for some of its constants: that costs much less than another kernel.
    `out` is the array, of any strides, for the output of a kernel that has one.

    >>> from gpuscheduler.ir.expr import Expr, constant, source
    >>> x = source(0, (5,), "f8")
    >>> evaluate(Kernel((5,), (Expr("add", (x, constant(1, "f8")), "f8"),)), [np.arange(5.0)])
    (array([1., 2., 3., 4., 5.]),)
    """
    if kernel.is_scan:
        return _evaluate_scans(kernel, arrays, block_bytes, words, out)
    every = {n: arrays[n] for n in kernel.inputs}
    bounds = {n: memory_extent(a) for n, a in every.items()}
    facts = _facts(kernel)
    outside = any(low < bounds[n][0] or high > bounds[n][1] for n, low, high in facts.reach)
    known = tuple(bounds.items()) if outside or facts.chooses else None
    strides = None
    if out is not None and not out.flags.c_contiguous:
        strides = tuple([s // out.itemsize for s in out.strides])
    where = known, block_bytes, tuple(words) if words else (), strides
    plan = facts.plans.get(where)
    if plan is None:
        plan = facts.plans[where] = _plan(kernel, *where)
    given = [np.asarray(w.value) for w in words.values()] if words else []
    memory = {n: buffer_memory(a) for n, a in every.items()}
    for n, dtype in plan.dtypes:
        if memory[n].flat.dtype != dtype:
            raise TypeError(f"array {n} is {memory[n].flat.dtype}, the kernel reads {dtype}")
    if plan.reductions:
        results = _evaluate_reductions(plan, memory, given)
        if out is None and plan.output_results is not None:
            return tuple([np.asarray(results[n], order="C") for n in plan.output_results])
        for n, result in enumerate(results):
            memory[-1 - n] = BufferMemory(result.reshape(-1), 0)
    outs = (
        [np.empty(kernel.output_shape, o.dtype) for o in kernel.outputs] if out is None else [out]
    )
    # machine code writes to memory, whatever is there
    fresh = out is None or not (
        out.dtype != kernel.outputs[0].dtype
        or out.shape != kernel.output_shape
        or any(np.may_share_memory(out, a) for a in every.values())
    )
    for part in plan.outputs:
        part.write(memory, outs, given, fresh)
    return tuple(outs)


def _evaluate_scans(
    kernel: Kernel,
    arrays: Mapping[int, Array] | Sequence[Array],
    block_bytes: int,
    words: Mapping[Expr, Expr] | None,
    out: Array | None,
) -> tuple[Array, ...]:
    """Return the outputs of a kernel of scans: evaluate its arguments, scan them, then the rest."""
    args, outputs, first = _around_scans(kernel)
    values = evaluate(args, arrays, block_bytes, words)
    every = {n: arrays[n] for n in kernel.inputs}
    for n, (scan, value) in enumerate(zip(kernel.reductions, values, strict=True)):
        join = getattr(np, BOTH[SCANS[scan.op]])
        found = join.accumulate(value, kernel.axes[0], carried_as(scan))
        every[first + n] = found.astype(scan.dtypes[0], copy=False)
    return evaluate(outputs, every, block_bytes, words, out)


@lru_cache(1024)
def _around_scans(kernel: Kernel) -> tuple[Kernel, Kernel, int]:
    """Split a kernel of scans into a kernel of their arguments and one that reads their results.

    Returns both as kernels, and the number of the first array of results.
    """
    first = max(kernel.inputs, default=-1) + 1
    whole = View.contiguous(kernel.shape)

    def change(leaf: Expr) -> Expr:
        if leaf.op != "reduced":
            return leaf
        return Expr("input", (), leaf.dtype, (first + leaf.data[0], whole))

    args = Kernel(kernel.shape, tuple([r.arg for r in kernel.reductions]))
    return args, Kernel(kernel.shape, tuple(replace_leaves(kernel.outputs, change))), first


class _KernelFacts(NamedTuple):
    """What is known of a kernel."""

    kernel: Kernel
    reach: tuple[tuple[int, int, int], ...]
    chooses: bool
    plans: dict[Any, _EvaluationPlan]


#: By the kernels' ids: to hash one takes as long as the rest of what is done before it runs.
_known: dict[int, _KernelFacts] = {}
MOST_KNOWN, MOST_PLANS = 1024, 64


def _facts(kernel: Kernel) -> _KernelFacts:
    found = _known.get(id(kernel))
    if found is None or found.kernel is not kernel or len(found.plans) > MOST_PLANS:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        found = _known[id(kernel)] = _KernelFacts(
            kernel, _reach(kernel), _chooses_calls(kernel), {}
        )
    return found


@lru_cache(1024)
def _reach(kernel: Kernel) -> tuple[tuple[int, int, int], ...]:
    """Return the first and last element that a kernel's leaves read of each array."""
    found: dict[int, tuple[int, int]] = {}
    spaces = (
        ([r.arg for r in kernel.reductions], kernel.shape),
        (kernel.outputs, kernel.output_shape),
    )
    for roots, shape in spaces:
        if 0 in shape:
            continue
        box = tuple((0, n) for n in shape)
        for node in nodes(roots):
            if node.op == "input":
                n, view = node.data
                low, high = view_bounds(view, box)
                old = found.get(n, (low, high))
                found[n] = min(low, old[0]), max(high, old[1])
    return tuple((n, low, high) for n, (low, high) in found.items())


@lru_cache(1024)
def _chooses_calls(kernel: Kernel) -> bool:
    """Whether a kernel calls a function at some of its points only."""
    choices = [n for n in nodes(kernel.roots) if n.op == "where"]
    return any(n.op == "call" for n in nodes([a for c in choices for a in c.args[1:]]))


def _regions(
    roots: list[Expr], box: Box, bounds: Bounds
) -> Iterator[tuple[Box, list[Expr]]]:  # fmt: skip
    """Divide a box into regions, each with the expression to evaluate there.

    In a region every view lies inside its array, except below ``guarded`` nodes, and each ``where``
    of which the choice is known there is replaced by what it chooses.
    """
    roots = simplify_in_box(roots, box)
    bad: dict[int, bool] = {}  # does it read, somewhere in this box, outside an array?
    calls: dict[int, bool] = {}  # does it call what may have no end for points not meant for it?
    for node in nodes(roots):
        below = node.args[:1] if node.op == GUARDED else node.args
        calls[id(node)] = node.op == "call" or any(calls[id(a)] for a in below)
        if node.op == "input":
            low, high = view_bounds(node.data[1], box)
            first, last = bounds.get(node.data[0], (low, high))
            bad[id(node)] = low < first or high > last
        else:
            bad[id(node)] = any(bad[id(a)] for a in below)
    stack, seen = list(roots), set()
    while stack:
        node = stack.pop()
        if id(node) in seen or not (bad[id(node)] or calls[id(node)]):
            continue
        seen.add(id(node))
        if node.op == "input":
            raise IndexError(f"{node!r} is read outside of the array, at {node.data[1]}")
        either = node.op == "where" and node.args[1:]
        if either and any(bad[id(a)] or calls[id(a)] for a in either):
            condition = node.args[0]
            cut = cut_for(condition, box)
            if cut is not None:
                axis, places = cut
                for start, stop in zip(places, places[1:], strict=False):
                    part = (*box[:axis], (start, stop), *box[axis + 1 :])
                    yield from _regions(roots, part, bounds)
                return
            if not any(bad[id(a)] for a in either):
                stack += node.args
                continue
            marked = Expr(GUARDED, node.args, node.dtype)
            yield from _regions(substitute(roots, {id(node): marked}), box, bounds)
            return
        stack += node.args[:1] if node.op == GUARDED else node.args
    yield box, roots


@dataclass(frozen=True)
class _EvaluationPlan:
    outputs: list[Region]
    reductions: tuple[Reduction, ...]
    regions: list[Region]  # of what is reduced; their views are that of the kept, and positions
    kernel: Kernel
    dtypes: tuple[tuple[int, DType], ...]

    @cached_property
    def codes(self) -> list[llvm_code.CompiledLoop | None]:
        """Machine code for the reductions in each region; None where it does not pay.

        The code of the only region makes states of the kernel's kept shape. That of one of several
        regions makes states of the region's own kept shape.
        """
        return [self._code(region) for region in self.regions]

    def _code(self, region: Region) -> llvm_code.CompiledLoop | None:
        whole = self.kernel.shape
        if not llvm_map.is_worth_compiling(whole) or tuning.SMALL_PART * math.prod(
            region.shape
        ) < math.prod(whole):
            return None
        target, count = region.views[0], math.prod(self.kernel.output_shape)
        if len(self.regions) > 1:
            target = broadcast_view(View.contiguous(region.kept), region.stays, len(region.shape))
            count = math.prod(region.kept)
        return self.reducer(region.shape, region.exprs, target, region, count)[0]

    def reducer(
        self, shape: tuple[int, ...], exprs: Sequence[Expr], target: View, region: Region,
        count: int,
    ) -> tuple[llvm_code.CompiledLoop | None, Sequence[int]]:  # fmt: skip
        """Return machine code that reduces a box of a region, and the order of its axes.

        It reduces to `count` states, numbered by `target`.
        """
        position, order = region.views[-1], list(range(len(shape)))
        along = len(shape) - 1 in region.reduced
        few = shape[-1] <= tuning.FEW_POINTS
        if along and few and region.stays:  # many results beside each other
            last = region.stays[-1]
            order = [*[k for k in range(len(shape)) if k != last], last]
            shape, along = tuple([shape[k] for k in order]), False
            exprs, target = reorder_axes(exprs, order), reorder_view(target, order)
            position = reorder_view(position, order)
        types = [accumulation_dtype(r) for r in self.reductions]
        code = llvm_reduce.reduction_loop(
            shape,
            exprs,
            self.reductions,
            types,
            target,
            position,
            along,
            count,
            self.has_few_points,
        )
        return code, order

    @cached_property
    def has_few_points(self) -> bool:
        """Whether so few points are reduced that sums must round as NumPy's do."""
        return math.prod([self.kernel.shape[k] for k in self.kernel.axes]) <= tuning.FEW_POINTS

    @cached_property
    def output_results(self) -> list[int] | None:
        """The numbers of the results that the outputs are; None if an output is anything else."""
        numbers = [(r, j) for r, x in enumerate(self.reductions) for j in range(len(x.dtypes))]
        outputs = self.kernel.outputs
        if any(o.op != "reduced" for o in outputs) or len(set(outputs)) < len(outputs):
            return None
        return [numbers.index(o.data) for o in outputs]

    def states(
        self,
        code: llvm_code.CompiledLoop,
        shape: tuple[int, ...],
        memory: dict[int, BufferMemory],
        given: Sequence[Array],
        origin: Sequence[int] | None = None,
    ) -> list[State]:
        """Run machine code over a region, or its box at `origin`; return states of `shape`."""
        made = [
            llvm_code.states(r.op, accumulation_dtype(r), shape, self.has_few_points)
            for r in self.reductions
        ]
        places = [llvm_code.address(a) for found in made for a in found]
        if origin is None:
            code(memory, given, places)
        else:
            code.call_at(origin, memory, given, places)
        return [
            llvm_reduce.finish_accumulators(r.op, found)
            for r, found in zip(self.reductions, made, strict=True)
        ]


@lru_cache(1024)
def _plan(
    kernel: Kernel, bounds: tuple[tuple[int, tuple[int, int]], ...] | None, block_bytes: int,
    words: tuple[Expr, ...], strides: tuple[int, ...] | None = None,
) -> _EvaluationPlan:  # fmt: skip
    kept = tuple(k for k in range(len(kernel.shape)) if k not in kernel.axes)
    numbers: dict[tuple[int, int], int] = {}
    for r, reduction in enumerate(kernel.reductions):
        for j in range(len(reduction.dtypes)):
            numbers[r, j] = len(numbers)
    whole = View.contiguous(kernel.output_shape)

    def change(leaf: Expr) -> Expr:
        if leaf.op == "constant" and leaf in words:
            return Expr(OPEN, (), leaf.dtype, words.index(leaf))
        if leaf.op != "reduced":
            return leaf
        return Expr("input", (), leaf.dtype, (-1 - numbers[leaf.data], whole))

    def regions(roots: list[Expr], shape: tuple[int, ...]) -> list[tuple[Box, list[Expr]]]:
        box = tuple((0, n) for n in shape)
        if 0 in shape:
            return []
        if bounds is None:
            return [(box, roots)]
        known = dict(bounds)
        known.update({-1 - n: (0, math.prod(kernel.output_shape) - 1) for n in numbers.values()})
        return list(_regions(roots, box, known))

    outputs = []
    target = whole if strides is None else View(0, strides)
    for box, roots in regions(replace_leaves(kernel.outputs, change), kernel.output_shape):
        outputs.append(Region(box, roots, [target] * len(roots), frozenset(), block_bytes))
    inner = []
    if kernel.is_histogram:
        # once for each point, not for each bin, too
        _, wanted = _histogram_parts(kernel)
        wanted = replace_leaves(wanted, lambda leaf: drop_first_axis(change(leaf)))
        for box, roots in regions(wanted, kernel.shape[1:]):
            axes = frozenset(range(len(box)))
            views = [View(0, (0,) * len(box))] * len(roots)
            inner.append(Region(box, roots, views, axes, block_bytes))
    elif kernel.reductions:
        target = broadcast_view(whole, kept, len(kernel.shape))
        over = [n for k, n in enumerate(kernel.shape) if k in kernel.axes]
        reduced_axes = tuple(sorted(kernel.axes))
        position = broadcast_view(View.contiguous(tuple(over)), reduced_axes, len(kernel.shape))
        for box, roots in regions(
            replace_leaves([r.arg for r in kernel.reductions], change), kernel.shape
        ):
            views = [target, position]
            inner.append(Region(box, roots, views, frozenset(kernel.axes), block_bytes))
    reads = {n.data[0]: n.dtype for n in nodes(kernel.roots) if n.op == "input"}
    return _EvaluationPlan(outputs, kernel.reductions, inner, kernel, tuple(reads.items()))


def _evaluate_reductions(
    plan: _EvaluationPlan, memory: dict[int, BufferMemory], given: Sequence[Array]
) -> list[Array]:
    """Return the results of all reductions, over the kept axes."""
    kernel = plan.kernel
    if kernel.is_histogram:
        return [_evaluate_histogram(plan, memory, given)]
    states: list[State] | None = None
    seen: Array | None = None
    for region, code in zip(plan.regions, plan.codes, strict=True):
        if code is not None and len(plan.regions) == 1:
            states = plan.states(code, kernel.output_shape, memory, given)
            break
        if states is None:
            states = [allocate_state(r, kernel.output_shape) for r in plan.reductions]
            seen = np.zeros(kernel.output_shape, bool) if len(plan.regions) > 1 else None
        if code is not None:
            found = plan.states(code, region.kept, memory, given)
            _enter(plan, region, found, (0,) * len(region.shape), region.shape, states, seen)
        else:
            _reduce_region(plan, RegionRun(region, memory, given), states, seen)
    if states is None:
        states = [identity_state(r, kernel) for r in plan.reductions]
    out = []
    for reduction, state in zip(plan.reductions, states, strict=True):
        out += finish_state(reduction, state)
    return out


def _histogram_parts(kernel: Kernel) -> tuple[Bins | None, list[Expr]]:
    """Return a histogram's bins and the values to count, or None and the numbers of bins.

    Behind these come weights, if there are any.
    """
    value, weights = kernel.reductions[0].arg, []
    if kernel.is_weighted_histogram:
        if value.op == "complex":
            value, weight = value.args
        else:
            value, weight = (Expr(part, (value,), np.float64) for part in ("real", "imag"))
        weights = [weight]
        if value.op == "cast" and value.args[0].op == "bin":
            (value,) = value.args
    if value.op == "bin":
        return value.data, [*value.args, *weights]
    return None, [value, *weights]


def _evaluate_histogram(
    plan: _EvaluationPlan, memory: dict[int, BufferMemory], given: Sequence[Array]
) -> Array:
    """Return the count of values in each bin, or the sum of their weights."""
    (reduction,) = plan.reductions
    kernel = plan.kernel
    bins, _ = _histogram_parts(kernel)
    total = np.zeros(kernel.output_shape, np.float64 if kernel.is_weighted_histogram else np.int64)
    count = len(total)
    for region in plan.regions:
        run = RegionRun(region, memory, given)
        for origin, size in block_boxes(region.shape, region.block, range(len(region.shape))):
            values, *rest = [np.broadcast_to(v, size) for v in run.block(origin, size)]
            weights = rest[0] if rest else None
            if bins is None:
                number = np.minimum(values.ravel(), count).astype(np.intp, copy=False)
                heavy = None if weights is None else weights.ravel()
                total += np.bincount(number, heavy, count + 1)[:count]
            elif weights is None:
                histogram.count(bins, values, total)
            else:
                histogram.weigh(bins, values, weights, total)
    return total.astype(reduction.dtypes[0], copy=False)


def _reduce_region(
    plan: _EvaluationPlan, run: RegionRun, states: list[State], seen: Array | None
) -> None:
    region, drawn = run.region, run.region.drawn_numbers
    if drawn is not None and not drawn.has_reducing_code(plan):
        drawn = None
    room = [] if drawn is None else drawn.room()
    axes = range(len(region.shape))
    reduced = tuple(sorted(region.reduced))
    kept, position = region.stays, region.views[1]
    block = region.block if drawn is None else drawn.block
    for outer, _ in block_boxes(region.shape, block, kept):
        sums: list[PairwiseMerger] = [PairwiseMerger(r.op) for r in plan.reductions]
        for inner, _ in block_boxes(region.shape, block, reduced):
            origin = tuple([outer[k] if k in kept else inner[k] for k in axes])
            size = tuple(
                [min(b, n - o) for o, n, b in zip(origin, region.shape, block, strict=True)]
            )
            if drawn is not None:
                found = drawn.states(plan, run.memory, run.given, room, origin, size)
                for tree, state in zip(sums, found, strict=True):
                    tree.add(state)
                continue
            values = run.block(origin, size)
            first = position.offset + sum(o * s for o, s in zip(origin, position.strides,
                                                                strict=True))  # fmt: skip
            for reduction, tree, value in zip(plan.reductions, sums, values, strict=True):
                value = np.broadcast_to(value, size) if np.shape(value) != size else value
                tree.add(reduce_block(reduction, value, reduced, first, position.strides))
        _enter(plan, region, [t.total() for t in sums], outer, size, states, seen)


def _enter(
    plan: _EvaluationPlan, region: Region, found: list[State], origin: tuple[int, ...],
    lengths: tuple[int, ...], states: list[State], seen: Array | None,
) -> None:  # fmt: skip
    """Merge the states of a part of a region into `states`; `seen` marks results that have one."""
    target = region.views[0]
    start = target.offset + sum(o * target.strides[k] for k, o in enumerate(origin))
    shape = tuple([lengths[k] for k in region.stays])

    def part(a: Array) -> Array:
        strides = tuple([target.strides[k] * a.itemsize for k in region.stays])
        return np.ndarray(shape, a.dtype, a, start * a.itemsize, strides)

    for reduction, values, state in zip(plan.reductions, found, states, strict=True):
        views = tuple([part(s) for s in state])
        if seen is not None:
            known = part(seen)
            with np.errstate(all="ignore"):
                merged = merge_states(reduction.op, views, values)
            values = tuple([np.where(known, m, f) for m, f in zip(merged, values, strict=True)])
        for view, value in zip(views, values, strict=True):
            view[...] = value
    if seen is not None:
        part(seen)[...] = True
