"""Boxes of the iteration space in which choices by position are known.

Such choices are concatenations, and blocks with the edges of their neighbours around them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product

import numpy as np

from .expr import Expr, Kernel, View, is_placeholder, nodes, read_by_leaves

Box = tuple[tuple[int, int], ...]  # first and past the last, for each axis

#: Boxes in which it is looked at what a kernel reads, at most.
MOST_BOXES = 64
#: Places along an axis that are looked at one by one where a comparison turns along others, too, at
#: most; and how many points there are at each, at least.
SHORT, PLACE_POINTS = 16, 2**12

COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip


def as_affine(node: Expr, axes: int) -> View | None:
    """An integer expression as a View, where it is one."""
    if node.op == "index":
        return node.data  # type: ignore[no-any-return]
    if node.op == "constant" and node.dtype.kind in "iu":
        value = int(node.value)
        return None if is_placeholder(value) else View(value, (0,) * axes)
    if node.op in ("add", "subtract", "multiply") and node.dtype == np.int64:
        a, b = (as_affine(x, axes) for x in node.args)
        if a is None or b is None:
            return None
        if node.op == "multiply":
            if any(a.strides):
                a, b = b, a
            if any(a.strides):
                return None
            return View(a.offset * b.offset, tuple(a.offset * s for s in b.strides))
        sign = 1 if node.op == "add" else -1
        strides = tuple(s + sign * t for s, t in zip(a.strides, b.strides, strict=True))
        return View(a.offset + sign * b.offset, strides)
    return None


def _sides(node: Expr, axes: int) -> tuple[View, View] | None:
    """What a comparison compares, where that is two integers that go evenly."""
    if node.op not in COMPARISONS or any(a.dtype.kind not in "iu" for a in node.args):
        return None
    a, b = (as_affine(x, axes) for x in node.args)
    return None if a is None or b is None else (a, b)


def _difference(node: Expr, box: Box) -> tuple[int, int | None, int] | None:
    """A comparison as `start + stride * i <op> 0` along an axis (None: no axis)."""
    sides = _sides(node, len(box))
    if sides is None:
        return None
    a, b = sides
    start, axis, stride = a.offset - b.offset, None, 0
    for k, (s, t) in enumerate(zip(a.strides, b.strides, strict=True)):
        if s == t:
            continue
        if box[k][1] - box[k][0] == 1:
            start += (s - t) * box[k][0]
        elif axis is not None:
            return None
        else:
            axis, stride = k, s - t
    return start, axis, stride


def _cuts(op: str, start: int, stride: int) -> set[int]:
    """Where along its axis the truth of a comparison may change."""
    at = -(start // stride)  # the first i with start + stride * i >= 0, for a positive stride
    if stride < 0:
        at = start // -stride + 1  # the first i with start + stride * i < 0
    exact = start % stride == 0
    zero = -start // stride
    if exact and op in ("equal", "not_equal"):
        return {zero, zero + 1}
    if exact and op in ("less_equal", "greater"):
        return {zero + 1} if stride > 0 else {zero}
    if exact:
        return {zero} if stride > 0 else {zero + 1}
    return set() if op in ("equal", "not_equal") else {at}


def truth_in(node: Expr, box: Box) -> bool | None:
    """A condition's value, where it is the same in the whole box."""
    if node.op == "constant":
        return bool(node.value)
    if node.op in ("logical_not", "invert") and node.dtype == bool:
        inner = truth_in(node.args[0], box)
        return None if inner is None else not inner
    if node.op in ("logical_and", "logical_or", "bitwise_and", "bitwise_or"):
        if any(a.dtype != bool for a in node.args):
            return None
        found = [truth_in(a, box) for a in node.args]
        settles = node.op.endswith("_or")
        if settles in found:
            return settles
        return None if None in found else not settles
    difference = _difference(node, box)
    if difference is None:
        return None
    start, axis, stride = difference
    if axis is None:
        return COMPARISONS[node.op](start, 0)
    low, high = box[axis]
    if any(low < c < high for c in _cuts(node.op, start, stride)):
        return None
    return COMPARISONS[node.op](start + stride * low, 0)


def _short_axis(node: Expr, box: Box) -> int | None:
    """The shortest of the axes along which a comparison's sides differ, if it is short."""
    sides = _sides(node, len(box))
    if sides is None:
        return None
    a, b = sides
    lengths = [
        (high - low, k)
        for k, (low, high) in enumerate(box)
        if a.strides[k] != b.strides[k] and high - low > 1
    ]
    length, k = min(lengths)
    points = math.prod([high - low for low, high in box])
    return k if length <= SHORT and points >= length * PLACE_POINTS else None


def cut_for(condition: Expr, box: Box) -> tuple[int, list[int]] | None:
    """An axis, and where to cut it so that more is known of a condition.

    Cuts lie where the condition changes. Where it changes along several axes at once, they are
    all places of a short one of them.
    """
    for node in nodes((condition,)):
        difference = _difference(node, box)
        if difference is None:
            short = _short_axis(node, box)
            if short is not None:
                return short, list(range(box[short][0], box[short][1] + 1))
            continue
        start, axis, stride = difference
        if axis is None:
            continue
        low, high = box[axis]
        inside = sorted(c for c in _cuts(node.op, start, stride) if low < c < high)
        if inside:
            return axis, [low, *inside, high]
    return None


def interior(roots: Sequence[Expr], shape: tuple[int, ...]) -> tuple[Box, list[Expr]] | None:
    """A box of at least half of all points in which the most choices are known, or None.

    Returns the box and the roots, simplified there.

    >>> from gpuscheduler.ir.expr import constant, index, source
    >>> row = index(View(0, (1, 0)))
    >>> edge = Expr("less", (row, constant(1, "i8")), "?")
    >>> x = source(0, (64, 8), "f4")
    >>> interior([Expr("where", (edge, constant(0, "f4"), x), "f4")], (64, 8))
    (((1, 64), (0, 8)), [input0])
    """
    whole = tuple([(0, n) for n in shape])
    inside = tuple(
        [
            max(zip(ends, ends[1:], strict=False), key=lambda part: part[1] - part[0])
            for ends in _ends_along(roots, shape)
        ]
    )
    if inside == whole or 2 * math.prod([b - a for a, b in inside]) < math.prod(shape):
        return None
    return inside, simplify_in_box(roots, inside)


def count_boxes(roots: Sequence[Expr], shape: tuple[int, ...]) -> int:
    """Count the boxes that are needed to know all choices by position.

    >>> from gpuscheduler.ir.expr import constant, index, source
    >>> edge = Expr("less", (index(View(0, (1, 0))), constant(1, "i8")), "?")
    >>> x = source(0, (64, 8), "f4")
    >>> count_boxes([Expr("where", (edge, constant(0, "f4"), x), "f4")], (64, 8))
    2
    """
    return math.prod([len(ends) - 1 for ends in _ends_along(roots, shape)])


def _ends_along(roots: Sequence[Expr], shape: tuple[int, ...]) -> list[list[int]]:
    """The ends of each axis, and where choices by position may change in between."""
    whole = tuple([(0, n) for n in shape])
    cuts: list[set[int]] = [set() for _ in shape]
    chosen = [n.args[0] for n in nodes(roots) if n.op == "where"]
    for condition in {id(c): c for c in chosen}.values():
        for node in nodes((condition,)):
            start, axis, stride = _difference(node, whole) or (0, None, 0)
            if axis is not None:
                cuts[axis] |= _cuts(node.op, start, stride)
    return [
        [0, *sorted([c for c in places if 0 < c < n]), n]
        for n, places in zip(shape, cuts, strict=True)
    ]


def simplify_in_box(roots: Sequence[Expr], box: Box) -> list[Expr]:
    """What is left of the roots where they are evaluated in a box only.

    >>> from gpuscheduler.ir.expr import constant, index, source
    >>> first = Expr("less", (index(View(0, (1,))), constant(1, "i8")), "?")
    >>> choice = Expr("where", (first, source(0, (1,), "f4"), source(1, (1,), "f4")), "f4")
    >>> simplify_in_box([choice], ((0, 1),)), simplify_in_box([choice], ((1, 2),))
    ([input0], [input1])
    """
    new: dict[int, Expr] = {}
    holds: dict[int, bool | None] = {}  # of choices, whether the first is chosen everywhere

    def reachable_arguments(node: Expr) -> tuple[Expr, ...]:
        if node.op != "where":
            return node.args
        if id(node) not in holds:
            holds[id(node)] = truth_in(node.args[0], box)
        first = holds[id(node)]
        return node.args if first is None else (node.args[1 if first else 2],)

    for node in nodes(roots, reachable_arguments):
        if holds.get(id(node)) is not None:
            new[id(node)] = new[id(reachable_arguments(node)[0])]
        elif any(new[id(a)] is not a for a in node.args):
            args = tuple([new[id(a)] for a in node.args])
            new[id(node)] = Expr(node.op, args, node.dtype, node.data)
        else:
            new[id(node)] = node
    return [new[id(r)] for r in roots]


def bytes_touched(kernel: Kernel) -> int:
    """Return the bytes that a kernel reads and writes.

    Of what it chooses by position only the chosen part counts; elements that it reads at several
    offsets count once.

    >>> x = [Expr("input", (), "f8", (0, View(n, (1,)))) for n in (0, 1)]
    >>> bytes_touched(Kernel((1000,), (Expr("subtract", tuple(x), "f8"),)))
    16000
    """
    return sum(kernel.output_bytes) + sum(bytes_read(kernel).values())


def bytes_read(kernel: Kernel) -> Mapping[int, int]:
    """The same that it reads, of each array. Computed once for each kernel."""
    known: Mapping[int, int] | None = kernel.__dict__.get("bytes_read")
    if known is None:
        inner = _read_places([r.arg for r in kernel.reductions], kernel.shape)
        known = kernel.__dict__["bytes_read"] = inner + _read_places(
            kernel.outputs, kernel.output_shape
        )
    return known


def _read_places(roots: Sequence[Expr], shape: tuple[int, ...]) -> Counter[int]:
    total: Counter[int] = Counter()
    if 0 in shape or not roots:
        return total
    ends = _ends_along(roots, shape)
    if math.prod([len(places) - 1 for places in ends]) > MOST_BOXES:
        ends = [[0, n] for n in shape]
    for box in product(*map(pairwise, ends)):
        most: dict[tuple[int, tuple[int, ...]], int] = {}  # bytes, by array and steps through it
        for leaf, nbytes in read_by_leaves(simplify_in_box(roots, box), [b - a for a, b in box]):
            n, view = leaf.data
            most[n, view.strides] = max(most.get((n, view.strides), 0), nbytes)
        for (n, _), nbytes in most.items():
            total[n] += nbytes
    return total
