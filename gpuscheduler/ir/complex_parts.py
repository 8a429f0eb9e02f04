"""Rewrite complex numbers by their parts, where that is less work on a grid.

The typical case is a wave: a product of factors that depend on one axis each.

`exp(a + b i)` is `exp(a)` times the cosine and the sine of b. Where a depends on other axes than
b, each factor is computed once per row or column. A real number times a complex one takes two
products, instead of four products and two sums. Both rules need numbers that are known to be
finite: the bounds of axes tell.

The sign of a zero in the result may change, as between C and NumPy. Where this could become
another value (the root or the logarithm of a negative number, a quotient), nothing is rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .expr import DType, Expr, constant, nodes

Range = tuple[float, float]
Parts = tuple[Expr, Expr]

#: Largest numbers that are known to be finite, with room for what is computed of them ...
LARGE = {4: 1e30, 8: 1e250}
#: ... and exponents that neither overflow nor lose digits.
EXPONENT = {4: 80.0, 8: 690.0}
#: What a number must be larger than to be divided by.
SMALL = 1e-30
#: Numbers that may have become zero.
TINY = {4: 1e-36, 8: 1e-300}
#: What gives the same for both zeros, and what gives zeros of other signs and nothing else.
ABSORBING = frozenset({
    "absolute", "less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "isnan",
    "isinf", "isfinite",
})  # fmt: skip
PASSING = frozenset({
    "add", "subtract", "multiply", "negative", "conjugate", "exp", "sin", "cos", "sinh", "cosh",
    "tanh", "real", "imag", "complex", "cast", "where", "square",
})  # fmt: skip
#: More than what a rounding adds to a number, relative to it.
ROUNDING = 1e-6


def by_parts(root: Expr, ranges: Sequence[Range | None]) -> Expr:
    """Rewrite complex operations by real and imaginary parts where this keeps the value.

    Signs of zeros may change. `ranges` has the least and the largest value of each input, where
    they are known.

    >>> x, t = (Expr("input", (), "f8", (n, None)) for n in range(2))
    >>> z = Expr("exp", (Expr("complex", (x, t), "c16"),), "c16")
    >>> by_parts(z, [(-1, 1), (0, 9)])
    complex(multiply(exp(input0), cos(input1)), multiply(exp(input0), sin(input1)))
    >>> by_parts(z, [(-1, 1), None])
    exp(complex(input0, input1))
    """
    if not any(n.op in ("exp", "multiply") and n.dtype.kind == "c" for n in nodes((root,))):
        return root
    return ComplexPartsRewriter(ranges).rewrite(root)


class ComplexPartsRewriter:
    def __init__(self, ranges: Sequence[Range | None]):
        self.input_ranges = ranges
        self.made: dict[Any, Expr] = {}  # equal nodes are one
        self.ranges: dict[int, Range | None] = {}
        self.exact: set[int] = set()  # nodes whose zeros must have the sign that they had
        #: What stands for each node of the old tree, and its parts if it is complex. Whether these
        #: are less work than the node.
        self.new: dict[int, Expr] = {}
        self.parts: dict[int, Parts] = {}
        self.better: set[int] = set()

    def rewrite(self, root: Expr) -> Expr:
        every = nodes((root,))
        self.exact = nodes_with_exact_zeros(every)
        for node in every:
            found = self._parts(node) if node.dtype.kind == "c" else None
            if found is not None:
                parts, better = found
                self.parts[id(node)] = parts
                if better or any(id(a) in self.better for a in node.args):
                    self.better.add(id(node))
                    self.new[id(node)] = self.node("complex", parts, node.dtype)
                    continue
            self.new[id(node)] = self._keep_value(node)
        return self.new[id(root)]

    def _keep_value(self, node: Expr) -> Expr:
        if node.op in ("real", "imag") and id(node.args[0]) in self.better:
            return self.parts[id(node.args[0])][node.op == "imag"]
        args = tuple([self.new[id(a)] for a in node.args])
        return self.node(node.op, args, node.dtype, node.data)

    def node(self, op: str, args: tuple[Expr, ...], dtype: DType, data: Any = None) -> Expr:
        key = op, tuple(map(id, args)), dtype, data
        if key not in self.made:
            self.made[key] = Expr(op, args, dtype, data)
        return self.made[key]

    def constant(self, value: Any, dtype: DType) -> Expr:
        return self.node("constant", (), dtype, constant(value, dtype).data)

    # ---- parts

    def _parts(self, node: Expr) -> tuple[Parts, bool] | None:
        """The real and the imaginary part, and whether they are less work than the number."""
        real = np.dtype(f"f{node.dtype.itemsize // 2}")
        if node.op == "constant":
            value = node.value
            return (self.constant(value.real, real), self.constant(value.imag, real)), False
        if node.op == "complex":
            first, second = [self.new[id(a)] for a in node.args]
            return (first, second), False
        if node.op == "cast" and node.args[0].dtype.kind != "c":
            whole = self.new[id(node.args[0])]
            return (self._cast(whole, real), self.constant(0, real)), False
        every = [self.parts.get(id(a)) for a in node.args]
        args = [p for p in every if p is not None]
        if len(args) < len(every):
            return None
        if node.op == "multiply":
            return self._product(node)
        if node.op == "exp":
            return self._exp(*args[0], real)
        if node.op == "cast":
            first, second = [self._cast(x, real) for x in args[0]]
        elif node.op == "conjugate":
            first, second = args[0][0], self.node("negative", (args[0][1],), real)
        elif node.op in ("negative", "add", "subtract"):
            first, second = [self.node(node.op, x, real) for x in zip(*args, strict=True)]
        else:
            return None
        return (first, second), False

    def _cast(self, x: Expr, dtype: DType) -> Expr:
        if x.op == "constant":
            return self.constant(x.value, dtype)
        return x if x.dtype == dtype else self.node("cast", (x,), dtype)

    def _product(self, node: Expr) -> tuple[Parts, bool] | None:
        """Return the parts of a real number times a complex one, as C and Python 3.14 multiply.

        Where the result must be exact, this needs the signs of the products by zero that it leaves
        out: they must be known, or not matter.
        """
        for n, factor in enumerate(map(self._real, node.args)):
            parts = self.parts[id(node.args[1 - n])]
            if factor is None or self._real(node.args[1 - n]) is not None:
                continue
            if None in [self.range_of(x) for x in (factor, *parts)]:
                return None
            pairs = [(p, factor) if n else (factor, p) for p in parts]
            first, second = [self.node("multiply", pair, factor.dtype) for pair in pairs]
            if id(node) not in self.exact:
                return (first, second), True
            if np.signbit(self.parts[id(node.args[n])][1].value):
                return None
            # without the products by zero: first - 0 * y, and second + 0 * x
            signs = [self._sign(p) for p in parts]
            real = self._with_zero(first, -signs[1])
            imag = self._with_zero(second, signs[0])
            return None if real is None or imag is None else ((real, imag), True)
        return None

    def _sign(self, x: Expr) -> int:
        """1 or -1 of a number that has always this sign, else 0."""
        low, high = self.range_of(x) or (0.0, 0.0)
        return int(low > 0) - int(high < 0)

    def _with_zero(self, x: Expr, sign: int) -> Expr | None:
        """The sum of a number and a zero of this sign, where that is known."""
        if self._sign(x) or sign < 0:
            return x
        return self.node("add", (x, self.constant(0, x.dtype)), x.dtype) if sign else None

    def _real(self, node: Expr) -> Expr | None:
        """What it was before it was made complex."""
        whole, rest = self.parts[id(node)]
        made = node.op == "constant" or (node.op == "cast" and node.args[0].dtype.kind != "c")
        return whole if made and rest.op == "constant" and rest.value == 0 else None

    def _exp(self, exponent: Expr, angle: Expr, real: DType) -> tuple[Parts, bool] | None:
        ends = self.range_of(exponent)
        if ends is None or self.range_of(angle) is None:
            return None
        if max(map(abs, ends)) > EXPONENT[real.itemsize]:
            return None
        first, second = [self.node(name, (angle,), real) for name in ("cos", "sin")]
        if ends != (0, 0):
            size = self.node("exp", (exponent,), real)
            first, second = [self.node("multiply", (size, x), real) for x in (first, second)]
        return (first, second), True

    # ---- what numbers lie between

    def range_of(self, root: Expr) -> Range | None:
        """The least and the largest value, if it is real and known to be finite."""
        for node in nodes((root,), below=lambda n: () if id(n) in self.ranges else n.args):
            if id(node) not in self.ranges:
                self.ranges[id(node)] = self._range(node)
        return self.ranges[id(root)]

    def _range(self, node: Expr) -> Range | None:
        every = [self.ranges[id(a)] for a in node.args]
        args = [r for r in every if r is not None]
        ends: Iterable[float] | None = None
        if node.op == "input":
            ends = self.input_ranges[node.data[0]]
        elif node.op == "constant":
            ends = (node.value, node.value) if node.dtype.kind in "iuf" else None
        elif node.dtype.kind == "f" and len(args) == len(every):
            squared = node.op == "multiply" and node.args[0] is node.args[1]
            ends = _square_ends(args[0]) if squared else RANGES.get(node.op, _unknown_range)(*args)
        if ends is None:
            return None
        low, high = float(min(ends)), float(max(ends))
        low, high = low - abs(low) * ROUNDING, high + abs(high) * ROUNDING
        tiny = TINY.get(node.dtype.itemsize, 0.0)
        low, high = (0.0 if 0 < low < tiny else low), (0.0 if -tiny < high < 0 else high)
        most = LARGE.get(node.dtype.itemsize, 0.0)
        return (low, high) if -most <= low and high <= most else None


def nodes_with_exact_zeros(every: Sequence[Expr]) -> set[int]:
    """The nodes of which the signs of zeros may decide on values."""
    found: set[int] = set()
    for node in reversed(every):
        if node.op in ABSORBING:
            continue
        args = node.args
        if node.op in PASSING and id(node) not in found:
            continue
        if node.op == "divide" and id(node) not in found:
            args = args[1:]
        found.update(map(id, args))
    return found


Ends = Callable[..., Iterable[float] | None]


def _unknown_range(*args: Range) -> None:
    return None


def _corners(f: Callable[[float, float], float]) -> Ends:
    return lambda a, b: [f(x, y) for x in a for y in b]


def _rising_bounds(
    f: Callable[[float], float], least: float = -math.inf, most: float = math.inf
) -> Ends:
    """Of a function that grows, where all is between these."""
    return lambda a: [f(x) for x in a] if least <= a[0] and a[1] <= most else None


def _constant_range(low: float, high: float) -> Ends:
    return lambda *args: (low, high)


def _quotient(a: Range, b: Range) -> Iterable[float] | None:
    if b[0] <= 0 <= b[1] or min(map(abs, b)) < SMALL:
        return None
    return [x / y for x in a for y in b]


def _absolute_ends(a: Range) -> Iterable[float]:
    ends = [abs(x) for x in a]
    return [0.0, *ends] if a[0] <= 0 <= a[1] else ends


def _square_ends(a: Range) -> Iterable[float]:
    return [x * x for x in _absolute_ends(a)]


#: By the names of functions of finite numbers: between which numbers the result is, where that
#: follows from those between which the arguments are.
RANGES: dict[str, Ends] = {
    "add": _corners(lambda x, y: x + y), "subtract": _corners(lambda x, y: x - y),
    "multiply": _corners(lambda x, y: x * y), "divide": _quotient,
    "minimum": _corners(min), "maximum": _corners(max),
    "negative": lambda a: [-x for x in a], "absolute": _absolute_ends, "square": _square_ends,
    "reciprocal": lambda a: _quotient((1.0, 1.0), a),
    "hypot": lambda a, b: [0.0, *[math.hypot(x, y) for x in a for y in b]],
    "cast": _rising_bounds(float), "positive": _rising_bounds(float),
    "sqrt": _rising_bounds(math.sqrt, 0),
    "log": _rising_bounds(math.log, SMALL), "log1p": _rising_bounds(math.log1p, -0.99),
    "exp": _rising_bounds(math.exp, most=700), "expm1": _rising_bounds(math.expm1, most=700),
    "sinh": _rising_bounds(math.sinh, -700, 700), "tanh": _rising_bounds(math.tanh),
    "arctan": _rising_bounds(math.atan),
    "radians": _rising_bounds(math.radians), "degrees": _rising_bounds(math.degrees),
    "sin": _constant_range(-1, 1), "cos": _constant_range(-1, 1),
    "arctan2": _constant_range(-math.pi, math.pi),
}  # fmt: skip
