"""What operations cost on a GPU, in units of one multiplication."""

from __future__ import annotations

#: Cost of an operation in additions, in float32 and in float64.
COSTS = {"add": (1, 1), "subtract": (1, 1), "multiply": (1, 1), "divide": (8, 15),
         "reciprocal": (8, 15), "sqrt": (8, 15), "power": (60, 150), "gammaln": (100, 200),
         "gamma": (100, 200), "bin": (80, 80), "bits": (60, 60), "uniform": (60, 60),
         "normal": (90, 120), "call": (400, 400)}  # fmt: skip
#: Operations that cost at most one addition.
CHEAP = frozenset({
    "where", "cast", "negative", "absolute", "square", "maximum", "minimum", "fmax", "fmin",
    "less", "greater", "less_equal", "greater_equal", "equal", "not_equal", "logical_and",
    "logical_or", "real", "imag", "complex", "bitwise_and", "bitwise_or", "constant", "index",
    "input", "reduced", "taken",
})  # fmt: skip
