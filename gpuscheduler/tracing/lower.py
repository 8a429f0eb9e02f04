"""Lower a trace to kernels: an `expr.Program`.

Arrays that are reduced over the same axes share one pass. Values that depend on its results alone
are computed at the end of that pass, all others element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..ir.expr import (
    LEAVES,
    SCANS,
    Expr,
    Kernel,
    Out,
    Program,
    Reduction,
    Shape,
    View,
    canonical_view,
    is_contiguous,
    is_zero,
    nodes,
    view_of,
    with_view,
)
from ..ir.regions import simplify_in_box
from ..values import map_leaves
from .abstract import (
    LibraryCall,
    MaskedPoints,
    MatrixProductArray,
    ReductionResult,
    StoredArray,
    ViewedInput,
)
from .array import TracedArray, as_traced
from .compressed import CompressedArray
from .context import (
    MADE,
    MOST_NODES,
    CompressTrace,
    LibraryTrace,
    MatrixProductTrace,
    NotTraceable,
    OptionalTrace,
    TraceContext,
    ValueIfThere,
    ViewTrace,
    change_views,
    made_in,
    node_of,
    squeezed_axes,
    view_over,
    with_leaves,
)


@dataclass
class _Group:
    """What becomes one kernel."""

    depth: int  # it runs after all of lesser depth
    order: int  # and, of equal depth, after those of lesser order
    shape: Shape  # of the iteration space
    axes: Shape  # reduced; () for one that goes element by element
    reductions: list[Reduction] = field(default_factory=list)
    outputs: list[Expr] = field(default_factory=list)
    start: int = 0  # the number of its first output
    scans: bool = False  # along its axes, which are kept

    @property
    def output_shape(self) -> Shape:
        if self.scans:
            return self.shape
        return tuple(n for k, n in enumerate(self.shape) if k not in self.axes)

    @property
    def place(self) -> tuple[int, int]:
        return self.depth, self.order


class Lowering:
    """Puts the arrays that a function made, and its results, into kernels.

    Each array has a home, a group. A reduction's group is all reductions over the same axes of the
    same shape that can run at the same time; scans are apart. What is computed from a group's
    results point for point is computed in that group too, at its end; all else element by element,
    in later groups.
    """

    def __init__(self, context: TraceContext):
        self.context = context
        self.inputs = context.inputs
        self.groups: dict[tuple[int, Shape, Shape, Any], _Group] = {}
        self.home: dict[int, _Group] = {}  # of each array made that is used
        self.body: dict[int, Expr] = {}  # what it is computed from
        self.numbers: dict[int, int] = {}  # array made -> array number of the program

    def program(self, result: Any) -> Program:
        outputs: list[TracedArray] = []
        if isinstance(result, CompressedArray):
            raise self._trace_selection(result)

        def note_output(value: Any) -> Any:
            if isinstance(value, CompressedArray):
                raise NotTraceable("it gives what a mask selects among other values")
            if isinstance(value, np.ndarray):
                value = as_traced(value)
            if isinstance(value, TracedArray):
                outputs.append(value)
            return value

        result = map_leaves(note_output, result)
        if not outputs:
            raise NotTraceable("it computes no array")
        if any(isinstance(m, MatrixProductArray) for m in self.context.made):
            raise self._trace_product(result)
        if any(isinstance(m, LibraryCall) for m in self.context.made):
            raise self._calls_library(result)
        if all(o._expr.op == "input" and o._expr.data[0] < MADE for o in outputs):
            raise ViewTrace(map_leaves(self._as_seen, result), self._program(result, outputs))
        return self._program(result, outputs)

    def _program(self, result: Any, outputs: list[TracedArray]) -> Program:
        exprs = [_make_canonical(o._expr, o.shape) for o in outputs]
        self._settle(exprs)
        homes = self._homes(exprs, [o.shape for o in outputs])
        numbers = iter(self._number(exprs, homes, [o.shape for o in outputs]))
        kernels = tuple(self._kernel(g) for g in self._order_groups())
        if len(nodes([r for k in kernels for r in k.roots])) > MOST_NODES:
            raise NotTraceable(f"it does more than {MOST_NODES} operations")

        def number_output(value: Any) -> Any:
            if isinstance(value, TracedArray):
                return Out(next(numbers), value.shape, value._scalar and not value.shape)
            return value

        return Program(self.inputs, kernels, map_leaves(number_output, result))

    def _trace_selection(self, result: CompressedArray) -> NotTraceable:
        values, mask = result._values, result._mask
        if values.shape == mask.shape == (1,) and made_in(mask._expr):
            return OptionalTrace(self._program(ValueIfThere(values, mask), [values, mask]))
        if made_in(values._expr) or made_in(mask._expr):
            return NotTraceable("it selects by a mask from what it has reduced or copied")
        shape, dtype, over = values.shape, values.dtype, mask.shape
        return CompressTrace(
            MaskedPoints(shape, dtype, values._expr, mask._expr, over, result._axis)
        )

    def _trace_product(self, result: Any) -> MatrixProductTrace:
        expr = result._expr if isinstance(result, TracedArray) else None
        if expr is not None and expr.op == "add" and is_zero(expr.args[1]):
            expr = expr.args[0]  # it is never minus zero
        if expr is not None and expr.op == "input" and made_in(expr):
            number, view = expr.data
            product = self.context.made[number - MADE]
            if isinstance(product, MatrixProductArray) and math.prod(product.shape) == result.size:
                return MatrixProductTrace(product if is_contiguous(view, result.shape) else None)
        return MatrixProductTrace(None)

    def _calls_library(self, result: Any) -> LibraryTrace:
        expr = result._expr if isinstance(result, TracedArray) else None
        if expr is not None and expr.op == "input" and made_in(expr):
            number, view = expr.data
            call = self.context.made[number - MADE]
            whole = isinstance(call, LibraryCall) and call.shape == result.shape
            if whole and is_contiguous(view, result.shape):
                return LibraryTrace(call)
        return LibraryTrace(None)

    def _as_seen(self, value: Any) -> Any:
        if not isinstance(value, TracedArray):
            return value
        number, view = value._expr.data
        copied = not any(value._family is given for given in self.context.given)
        scalar = value._scalar and not value.shape
        return ViewedInput(number, view, value.shape, value.dtype, copied, scalar)

    def _array(self, number: int) -> StoredArray | ReductionResult:
        array = self.context.made[number - MADE]
        assert not isinstance(array, (MatrixProductArray, LibraryCall))
        return array

    def _group(self, depth: int, shape: Shape, axes: Shape = (), alone: Any = None) -> _Group:
        key = (depth, shape, axes, alone)
        if key not in self.groups:
            self.groups[key] = _Group(depth, len(self.groups), shape, axes)
        return self.groups[key]

    def _settle(self, outputs: list[Expr]) -> None:
        """Finds the home of every array that is used, those it reads first."""
        used: set[int] = set()
        left = [m for e in outputs for m in made_in(e)]
        while left:
            number = left.pop()
            if number in used:
                continue
            used.add(number)
            array = self._array(number)
            over = array.over if isinstance(array, ReductionResult) else array.shape
            self.body[number] = _make_canonical(array.roots[0], over)
            left += made_in(self.body[number])
        for number in sorted(used):  # an array is made after those that it reads
            array = self._array(number)
            if isinstance(array, StoredArray):
                self.home[number] = self._group_of(self.body[number], array.shape)
                continue
            depth = max([self.home[m].depth for m in made_in(self.body[number])], default=0)
            reduction = self._reduction(number)
            scans = reduction.op in SCANS
            alone = reduction if reduction.op == "histogram" else scans
            self.home[number] = group = self._group(depth + 1, array.over, array.axes, alone)
            group.scans = scans
            if reduction not in group.reductions:
                group.reductions.append(reduction)

    def _reduction(self, number: int) -> Reduction:
        array = self._array(number)
        assert isinstance(array, ReductionResult)
        return Reduction(array.reduction.op, self.body[number], array.reduction.dtypes)

    def _group_of(self, expr: Expr, shape: Shape) -> _Group:
        """Where an expression over `shape` is computed."""
        made = made_in(expr)
        if not made:
            return self._group(1, shape)
        latest = max((self.home[m] for m in made), key=lambda g: g.place)
        if latest.axes and squeezed_axes(shape) == squeezed_axes(latest.output_shape):
            own = [n for n in nodes((expr,)) if n.op == "input" and n.data[0] in made
                   and self.home[n.data[0]] is latest]  # fmt: skip
            if all(is_contiguous(n.data[1], shape) for n in own):
                return latest
        return self._group(latest.depth + 1, shape)

    def _homes(self, exprs: list[Expr], shapes: list[Shape]) -> list[_Group | None]:
        """The group that computes each output; None for one that is an array made."""
        homes: list[_Group | None] = []
        for expr, shape in zip(exprs, shapes, strict=True):
            whole = expr.op == "input" and expr.data[0] >= MADE
            whole = whole and math.prod(self._array(expr.data[0]).shape) == math.prod(shape)
            whole = whole and is_contiguous(expr.data[1], shape)
            homes.append(None if whole else self._group_of(expr, shape))
        used = [*self.home.values(), *[h for h in homes if h is not None]]
        for k, (home, expr, shape) in enumerate(zip(homes, exprs, shapes, strict=True)):
            if home is None or home.axes:
                continue
            # beside others of its shape: what both read is read once
            small = squeezed_axes(shape)
            beside = [g for g in used if not g.axes and squeezed_axes(g.shape) == small]
            if not any(n.op in ("input", "index") for n in nodes((expr,))):
                beside += [g for g in used if g.axes and squeezed_axes(g.output_shape) == small]
            homes[k] = max(beside, key=lambda g: (bool(g.axes), g.place))
        return homes

    def _number(
        self, exprs: list[Expr], homes: list[_Group | None], shapes: list[Shape]
    ) -> list[int]:
        """Fills each group's outputs; gives the array number of each output of the program."""
        readers = [(self.body[m], None if self._is_result(m) else g) for m, g in self.home.items()]
        readers += [(e, h) for e, h in zip(exprs, homes, strict=True)]
        needed = {m for e, g in readers for m in made_in(e) if self.home[m] is not g}
        count = self.inputs
        at: list[int | None] = [None] * len(exprs)
        for group in sorted(self.groups.values(), key=lambda g: g.place):
            wanted: dict[Expr, int] = {}
            for number in sorted(m for m in needed if self.home[m] is group):
                array = self._array(number)
                view = View.contiguous(array.shape)
                body = self.body[number]
                dtype = body.dtype
                if isinstance(array, ReductionResult):
                    dtype = array.reduction.dtypes[array.which]
                leaf = node_of("input", (), dtype, (number, canonical_view(view, array.shape)))
                built = self._build_output(leaf, array.shape, group)
                self.numbers[number] = count + wanted.setdefault(built, len(wanted))
            for k, home in enumerate(homes):
                if home is group:
                    built = self._build_output(exprs[k], shapes[k], group)
                    at[k] = count + wanted.setdefault(built, len(wanted))
            group.outputs = list(wanted)
            count += len(wanted)
        return [self.numbers[e.data[0]] if n is None else n for e, n in zip(exprs, at, strict=True)]

    def _is_result(self, number: int) -> bool:
        return isinstance(self._array(number), ReductionResult)

    def _build_output(self, expr: Expr, shape: Shape, group: _Group) -> Expr:
        """An output of a group, over the axes that it keeps."""
        memo: dict[Expr, Expr] = {}

        def put(old: Expr) -> Expr:
            view = view_of(old)
            if view is None:
                return old
            if old.op == "input" and (number := old.data[0]) >= MADE:
                array = self._array(number)
                if self.home[number] is group and isinstance(array, ReductionResult):
                    which = group.reductions.index(self._reduction(number))
                    return node_of("reduced", (), old.dtype, (which, array.which))
                if self.home[number] is group:
                    return self._build_output(self.body[number], array.shape, group)
                old = Expr("input", (), old.dtype, (self.numbers[number], view))
            leaf = with_view(old, view_over(view, shape, group.output_shape))
            return node_of(leaf.op, (), leaf.dtype, leaf.data)

        def change_leaf(leaf: Expr) -> Expr:
            if leaf not in memo:
                memo[leaf] = put(leaf)
            return memo[leaf]

        return _graft(expr, change_leaf)

    def _order_groups(self) -> list[_Group]:
        used = [g for g in self.groups.values() if g.outputs]
        return sorted(used, key=lambda g: g.place)

    def _kernel(self, group: _Group) -> Kernel:
        def renumber_leaf(leaf: Expr) -> Expr:
            if leaf.op == "input" and leaf.data[0] >= MADE:
                return node_of("input", (), leaf.dtype, (self.numbers[leaf.data[0]], leaf.data[1]))
            return leaf

        args = _simplify_choices(
            [with_leaves(r.arg, renumber_leaf) for r in group.reductions], group.shape
        )
        reductions = [
            Reduction(r.op, arg, r.dtypes) for r, arg in zip(group.reductions, args, strict=True)
        ]
        outputs = _simplify_choices(group.outputs, group.output_shape)
        return Kernel(group.shape, tuple(outputs), tuple(reductions), group.axes)


def _simplify_choices(roots: list[Expr], shape: Shape) -> list[Expr]:
    """The same without choices by position of which is known what they choose wherever that is."""
    if not any(n.op == "where" for n in nodes(roots)):
        return roots
    return simplify_in_box(roots, tuple([(0, n) for n in shape]))


def _make_canonical(expr: Expr, shape: Shape) -> Expr:
    return change_views(expr, lambda view: canonical_view(view, shape))


def _graft(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The tree with whole trees in place of leaves."""
    new: dict[int, Expr] = {}
    for old in nodes((expr,)):
        if old.op in LEAVES:
            new[id(old)] = change(old)
        else:
            args = tuple([new[id(a)] for a in old.args])
            new[id(old)] = node_of(old.op, args, old.dtype, old.data)
    return new[id(expr)]
