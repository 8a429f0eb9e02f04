"""Random numbers as a function of a key and a position (Philox 4x32-10).

Each depends on a key and on its own number, nothing else.

So they do not depend on chunks, devices or order. The generator is Philox4x32-10 (Salmon, Moraes,
Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The two words of its key are
the low and the high half of a 64-bit key. Element i has the counter i // 2, in the counter's first
two words; the other two are zero. That gives four words r0, r1, r2, r3, and element i has 64 bits:

- ``bits``: ``r0 | r1 << 32`` where i is even, ``r2 | r3 << 32`` where it is odd;
- ``uniform``: ``(bits >> 11) * 2**-53``, or in float32 ``(bits >> 40) * 2**-24``;
- ``normal``: Box and Muller's, for 2k and 2k + 1 together. With ``u = ((bits[2k] >> 11) + 1) *
  2**-53``, ``v = (bits[2k + 1] >> 11) * 2**-53`` and ``r = sqrt(-2 log(u))``, element 2k is
  ``r cos(2πv)`` and element 2k + 1 is ``r sin(2πv)``; float32 is made of 24 bits, likewise.

Other distributions are expressions of these (`draw`), mostly by inversion.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np

from .expr import DType, Expr, View, constant, index

Array = np.ndarray[Any, Any]


def key_of(*material: Any) -> int:
    """Return a 64-bit key of what seeds a generator.

    Seeds are SeedSequences, arrays, states, numbers or bytes. The key is the same in every process
    and on every machine.

    >>> key_of(np.random.SeedSequence(42)), key_of(b"a name", 3)
    (4668048069356360070, 12635355123474865462)
    """
    digest = hashlib.blake2b(digest_size=8)
    _absorb(digest, material)
    return int.from_bytes(digest.digest(), "little")


def _absorb(digest: Any, value: Any) -> None:
    """Add a value, with its type and length, so that no two say the same."""
    if isinstance(value, np.random.SeedSequence):
        value = value.generate_state(8, np.uint32)
    elif isinstance(value, np.random.BitGenerator):
        value = value.state
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        parts: list[Any] = []
        words = f"array {array.dtype.str} {array.shape} ".encode() + array.tobytes()
    elif isinstance(value, dict):
        parts = [part for key in sorted(value) for part in (key, value[key])]
        words = b"dict %d " % len(parts)
    elif isinstance(value, list | tuple):
        parts, words = list(value), b"list %d " % len(value)
    elif isinstance(value, bytes):
        parts, words = [], b"bytes %d " % len(value) + value
    elif isinstance(value, str | int | float | None):
        parts, words = [], f"{type(value).__name__} {value!r} ".encode()
    else:
        raise TypeError(f"the key of random numbers cannot have a value of {type(value).__name__}")
    digest.update(words)
    for part in parts:
        _absorb(digest, part)


# ---- distributions


class _NotDrawn(Exception):
    """These parameters are NumPy's business: arrays, or what it refuses."""


def draw(
    name: str,
    shape: tuple[int, ...],
    first: View,
    key: int,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    base: int | None = None,
) -> Expr | None:
    """Return one chunk of a distribution of NumPy's generators as an expression over `shape`.

    Elements have the numbers that `first` gives, plus `base`. Each continuous distribution also
    takes `dtype`, float64 or float32. None for methods that have no closed form, and for parameters
    that NumPy refuses or that are arrays.

    >>> draw("uniform", (3,), View(0, (1,)), 7, (10, 20))
    add(10.0, multiply(10.0, uniform(index)))
    """
    make = _METHODS.get(name)
    assert len(shape) == len(first.strides)
    if make is None:
        return None
    position = index(first)
    if base is not None:
        position = Expr("add", (position, constant(base, np.int64)), np.int64)
    named = dict(kwargs or {})
    dtype = None if name in _OF_ANY_DTYPE else named.pop("dtype", None)
    try:
        made = make(_ElementDraws(position, key), *args, **named)
        return made if dtype is None else _as_dtype(made, dtype)
    except (_NotDrawn, TypeError, OverflowError):  # TypeError: an argument that it has not
        return None


class _ElementDraws:
    """The independent numbers that one element may draw."""

    def __init__(self, position: Expr, key: int):
        self.position, self.key = position, key

    def new_draws(self) -> _ElementDraws:
        return _ElementDraws(self.position, key_of("another", self.key))

    def __call__(self, op: str, dtype: Any = np.float64) -> Expr:
        return Expr(op, (self.position,), dtype, self.key)

    def uniform(self, dtype: Any = np.float64) -> Expr:
        return self("uniform", dtype)

    def positive_uniform(self) -> Expr:
        """Uniform, but never 0: one in 2**53 that would be is half as much as the next."""
        return _op("maximum", self("uniform"), 2.0**-54)

    def exponential(self, dtype: Any = np.float64) -> Expr:
        return _op("negative", _op("log1p", _op("negative", self("uniform", dtype))))


def _op(name: str, *args: Any, dtype: Any = None) -> Expr:
    """A node; numbers become constants of the other arguments' type."""
    given = next(a.dtype for a in args if isinstance(a, Expr))
    nodes = tuple([a if isinstance(a, Expr) else constant(a, given) for a in args])
    return Expr(name, nodes, given if dtype is None else dtype)


def _shift_and_scale(x: Expr, loc: float, scale: float) -> Expr:
    """loc + scale * x, less what changes nothing."""
    if scale != 1:
        x = _op("multiply", scale, x)
    return x if loc == 0 else _op("add", loc, x)


def _number(value: Any) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise _NotDrawn
    return float(value)


def _scale(value: Any) -> float:
    """A finite number that is not negative, not even -0.0."""
    number = _number(value)
    if math.copysign(1, number) < 0:
        raise _NotDrawn
    return number


def _number_above(value: Any, least: float = 0) -> float:
    number = _number(value)
    if number <= least:
        raise _NotDrawn
    return number


def _floating_dtype(dtype: Any) -> DType:
    found: DType = np.dtype(dtype)
    if found not in (np.dtype(np.float64), np.dtype(np.float32)) or not found.isnative:
        raise _NotDrawn
    return found


def _as_dtype(made: Expr, dtype: Any) -> Expr:
    found = _floating_dtype(dtype)
    if made.dtype.kind != "f":
        raise _NotDrawn
    return made if made.dtype == found else Expr("cast", (made,), found)


def _random(d: _ElementDraws, dtype: Any = np.float64, out: None = None) -> Expr:
    if out is not None:
        raise _NotDrawn
    return d.uniform(_floating_dtype(dtype))


def _uniform(d: _ElementDraws, low: Any = 0.0, high: Any = 1.0, dtype: Any = np.float64) -> Expr:
    low, high = _number(low), _number(high)
    return _shift_and_scale(d.uniform(_floating_dtype(dtype)), low, _scale(high - low))


def _standard_normal(d: _ElementDraws, dtype: Any = np.float64, out: None = None) -> Expr:
    if out is not None:
        raise _NotDrawn
    return d("normal", _floating_dtype(dtype))


def _normals(d: _ElementDraws, loc: Any = 0.0, scale: Any = 1.0, dtype: Any = np.float64) -> Expr:
    return _shift_and_scale(d("normal", _floating_dtype(dtype)), _number(loc), _scale(scale))


def _lognormal(d: _ElementDraws, mean: Any = 0.0, sigma: Any = 1.0) -> Expr:
    return _op("exp", _normals(d, mean, sigma))


def _standard_exponential(
    d: _ElementDraws, dtype: Any = np.float64, method: str = "zig", out: None = None
) -> Expr:
    if out is not None:
        raise _NotDrawn
    return d.exponential(_floating_dtype(dtype))


def _exponential(d: _ElementDraws, scale: Any = 1.0) -> Expr:
    return _shift_and_scale(d.exponential(), 0, _scale(scale))


def _laplace(d: _ElementDraws, loc: Any = 0.0, scale: Any = 1.0) -> Expr:
    u = d.positive_uniform()
    near = _op("minimum", u, _op("subtract", 1, u))
    size = _op("negative", _op("log", _op("multiply", 2, near)))
    signed = _op("copysign", size, _op("subtract", u, 0.5))
    return _shift_and_scale(signed, _number(loc), _scale(scale))


def _logistic(d: _ElementDraws, loc: Any = 0.0, scale: Any = 1.0) -> Expr:
    u = d.positive_uniform()
    odds = _op("log", _op("divide", u, _op("subtract", 1, u)))
    return _shift_and_scale(odds, _number(loc), _scale(scale))


def _gumbel(d: _ElementDraws, loc: Any = 0.0, scale: Any = 1.0) -> Expr:
    e = _op("negative", _op("log1p", _op("negative", d.positive_uniform())))
    return _shift_and_scale(_op("negative", _op("log", e)), _number(loc), _scale(scale))


def _rayleigh(d: _ElementDraws, scale: Any = 1.0) -> Expr:
    return _shift_and_scale(_op("sqrt", _op("multiply", 2, d.exponential())), 0, _scale(scale))


def _weibull(d: _ElementDraws, a: Any) -> Expr:
    return _op("power", d.exponential(), 1 / _number_above(a))


def _pareto(d: _ElementDraws, a: Any) -> Expr:
    return _op("expm1", _op("divide", d.exponential(), _number_above(a)))


def _power(d: _ElementDraws, a: Any) -> Expr:
    return _op("power", d.uniform(), 1 / _number_above(a))


def _standard_cauchy(d: _ElementDraws) -> Expr:
    return _op("tan", _op("multiply", math.pi, _op("subtract", d.uniform(), 0.5)))


def _triangular(d: _ElementDraws, left: Any, mode: Any, right: Any) -> Expr:
    left, mode, right = _number(left), _number(mode), _number(right)
    if not left <= mode <= right or left == right:
        raise _NotDrawn
    base, u = right - left, d.uniform()
    rising = _op("sqrt", _op("multiply", (mode - left) * base, u))
    falling = _op("sqrt", _op("multiply", (right - mode) * base, _op("subtract", 1, u)))
    below = _op("less_equal", u, (mode - left) / base, dtype=bool)
    parts = (below, _op("add", left, rising), _op("subtract", right, falling))
    return Expr("where", parts, np.float64)


def _standard_t(d: _ElementDraws, df: Any) -> Expr:
    """Bailey 1994: a polar method that needs no rejection."""
    df = _number_above(df, 0.2)  # nearer to 0 it overflows
    e = _op("expm1", _op("multiply", 2 / df, d.exponential()))
    turn = _op("cos", _op("multiply", 2 * math.pi, d.new_draws().uniform()))
    return _op("multiply", _op("sqrt", _op("multiply", df, e)), turn)


def _wald(d: _ElementDraws, mean: Any, scale: Any) -> Expr:
    """Return one of the two roots of a quadratic, mean / s and mean * s, without cancellation.

    Source: Michael, Schucany and Haas, 1976.
    """
    mean, scale = _number_above(mean), _number_above(scale)
    w = _op("multiply", mean / (2 * scale), _op("square", d("normal")))
    root = _op("sqrt", _op("multiply", w, _op("add", 2, w)))
    s = _op("add", _op("add", 1, w), root)
    smaller = _op("less_equal", _op("multiply", d.new_draws().uniform(), _op("add", 1, s)), s,
                  dtype=bool)  # fmt: skip
    return Expr("where", (smaller, _op("divide", mean, s), _op("multiply", mean, s)), np.float64)


def _geometric(d: _ElementDraws, p: Any) -> Expr:
    p = _number_above(p, 1e-17)  # below, results do not fit int64
    if p >= 1:
        raise _NotDrawn
    trials = _op("ceil", _op("divide", d.exponential(), -math.log1p(-p)))
    return Expr("cast", (_op("maximum", trials, 1),), np.int64)


def _integers(
    d: _ElementDraws, low: Any, high: Any = None, dtype: Any = np.int64, endpoint: bool = False
) -> Expr:
    """Return `low + floor(x * span)` for a binary fraction x of 64 bits, or of 128.

    There are 128 bits where span is above 2**24, so that no result's probability is off by more
    than one part in 2**40.
    """
    if high is None:
        low, high = 0, low
    if not isinstance(low, Integral) or not isinstance(high, Integral):
        raise _NotDrawn
    found, low, last = np.dtype(dtype), int(low), int(high) - (not endpoint)
    if found.kind not in "biu" or not found.isnative:
        raise _NotDrawn
    least, most = (0, 1) if found.kind == "b" else (np.iinfo(found).min, np.iinfo(found).max)
    if not least <= low <= last <= most:
        raise _NotDrawn
    span = last - low + 1
    number = _integer_below(d, span)
    if low:
        number = _op("add", number, low % 2**64)
    return number if found == np.uint64 else Expr("cast", (number,), found)


def _integer_below(d: _ElementDraws, span: int) -> Expr:
    word = d("bits", np.uint64)
    if span == 2**64:
        return word
    if span & (span - 1) == 0 and span > 1:
        return _op("right_shift", word, 65 - span.bit_length())
    high = _high_product(word, span)
    if span <= 2**24:
        return high
    low = _op("multiply", word, span)
    more = _op("add", low, _high_product(d.new_draws()("bits", np.uint64), span))
    return _op("add", high, Expr("cast", (_op("less", more, low, dtype=bool),), np.uint64))


def _high_product(word: Expr, span: int) -> Expr:
    """`word * span >> 64`, by halves, none of which overflows."""
    over, under = span >> 32, span & 0xFFFF_FFFF
    upper, lower = _op("right_shift", word, 32), _op("bitwise_and", word, 0xFFFF_FFFF)
    middle = _op("add", _op("multiply", upper, under),
                 _op("right_shift", _op("multiply", lower, under), 32))  # fmt: skip
    if not over:
        return _op("right_shift", middle, 32)
    carry = _op("add", _op("multiply", lower, over), _op("bitwise_and", middle, 0xFFFF_FFFF))
    parts = _op("add", _op("right_shift", middle, 32), _op("right_shift", carry, 32))
    return _op("add", _op("multiply", upper, over), parts)


_METHODS: dict[str, Callable[..., Expr]] = {
    "random": _random,
    "uniform": _uniform,
    "standard_normal": _standard_normal,
    "normal": _normals,
    "lognormal": _lognormal,
    "standard_exponential": _standard_exponential,
    "exponential": _exponential,
    "laplace": _laplace,
    "logistic": _logistic,
    "gumbel": _gumbel,
    "rayleigh": _rayleigh,
    "weibull": _weibull,
    "pareto": _pareto,
    "power": _power,
    "standard_cauchy": _standard_cauchy,
    "triangular": _triangular,
    "standard_t": _standard_t,
    "wald": _wald,
    "geometric": _geometric,
    "integers": _integers,
}
#: Methods whose own function takes `dtype`.
_OF_ANY_DTYPE = frozenset(
    {"random", "uniform", "standard_normal", "normal", "standard_exponential", "integers"}
)
