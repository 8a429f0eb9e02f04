"""Random numbers by their position: each depends on a key and on its own number, nothing else.

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

#: Rows of fewer elements are drawn many at once: to begin one takes as long as to draw so many.
SHORT_ROW = 32


def key_of(*material: Any) -> int:
    """A 64-bit key made of what seeds a generator: SeedSequences, arrays, states, numbers, bytes.
    It is the same in every process and on every machine.

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
        raise TypeError(f"{type(value).__name__} is nothing that a key is made of")
    digest.update(words)
    for part in parts:
        _absorb(digest, part)


# ---- numbers


def bits(key: int, at: Any) -> Array:
    """64 random bits for each element's number.

    >>> [hex(b) for b in bits(0, [0, 1])]
    ['0xe169c58d6627e8d5', '0x9b00dbd8bc57ac4c']
    """
    return values("bits", key, at, np.dtype(np.uint64))


def uniform(key: int, at: Any, dtype: Any = np.float64) -> Array:
    """Numbers from 0 to just below 1."""
    return values("uniform", key, at, np.dtype(dtype))


def normal(key: int, at: Any, dtype: Any = np.float64) -> Array:
    """Numbers of the standard normal distribution."""
    return values("normal", key, at, np.dtype(dtype))


def values(op: str, key: int, at: Any, dtype: DType) -> Array:
    """What the node `op` (``bits``, ``uniform``, ``normal``) gives for elements of any numbers."""
    at = np.asarray(at, np.int64)
    out = np.empty(at.shape, dtype)
    flat = at.reshape(-1)
    if flat.size > 2:
        step = flat[1] - flat[0]
        if (flat[1:] - flat[:-1] == step).all():
            _run(op, key, flat[:1], int(step), out.reshape(1, -1))
            return out
    _run_at(op, key, flat, out.reshape(-1))
    return out


def fill(op: str, key: int, view: View, out: Array) -> None:
    """The same for elements that a view numbers, written into `out`. Where it has a stride of 0,
    `out` has a length of 1."""
    if not out.size:
        return
    target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    lengths, strides = _merged(out.shape, view.strides)
    starts: Any = np.array([view.offset], np.int64)
    for n, s in zip(lengths[:-1], strides[:-1], strict=True):
        starts = (starts[:, None] + s * np.arange(n)).reshape(-1)
    if lengths[-1] < SHORT_ROW and len(starts) > 1:
        places = starts[:, None] + strides[-1] * np.arange(lengths[-1])
        _run_at(op, key, places.reshape(-1), target.reshape(-1))
    else:
        _run(op, key, starts, strides[-1], target.reshape(-1, lengths[-1]))
    if target is not out:
        out[...] = target


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Lengths and strides of fewer axes, one at least, that give the same numbers in C order.

    >>> _merged((5, 1, 4, 2), (100, 9, 2, 1))
    ([5, 8], [100, 1])
    """
    lengths, steps = [1], [0]
    for n, s in zip(shape, strides, strict=True):
        if lengths[-1] == 1:
            lengths[-1], steps[-1] = n, s
        elif n != 1 and steps[-1] == s * n:
            lengths[-1], steps[-1] = lengths[-1] * n, s
        elif n != 1:
            lengths.append(n)
            steps.append(s)
    return lengths, steps


def _run(op: str, key: int, starts: Array, step: int, out: Array) -> None:
    """Draw rows: element k of a row has the number of its start plus k steps."""
    from . import philox_loops as loops  # which imports Numba

    if op == "bits":
        loops.bits(*_words(key), starts, step, out)
    elif op == "uniform":
        loops.uniform(*_words(key), starts, step, out, _shift(out))
    elif op == "normal":
        loops.normal(*_words(key), starts, step, out, _shift(out))
    else:
        raise ValueError(f"{op} is no kind of random number")


def _run_at(op: str, key: int, places: Array, out: Array) -> None:
    """Draw elements of any numbers."""
    from . import philox_loops as loops  # as above

    if op == "bits":
        loops.bits_at(*_words(key), places, out)
    elif op == "uniform":
        loops.uniform_at(*_words(key), places, out, _shift(out))
    elif op == "normal":
        loops.normal_at(*_words(key), places, out, _shift(out))
    else:
        raise ValueError(f"{op} is no kind of random number")


def _words(key: int) -> tuple[np.uint64, np.uint64]:
    return np.uint64(key & 0xFFFF_FFFF), np.uint64(key >> 32)


def _shift(out: Array) -> np.uint64:
    """How many of 64 bits are more than fractions of a type have."""
    return np.uint64(40 if out.dtype == np.float32 else 11)


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
    """One chunk of what a method of NumPy's generators, old or new, draws: an expression over
    `shape`, of elements with the numbers that `first` gives, plus `base`. None for methods that
    have no closed form, and for parameters that NumPy refuses or that are arrays.

    >>> draw("uniform", (3,), View(0, (1,)), 7, (10, 20))
    add(10.0, multiply(10.0, uniform(index)))
    """
    make = _METHODS.get(name)
    assert len(shape) == len(first.strides)
    if make is None:
        return None
    at = index(first)
    if base is not None:
        at = Expr("add", (at, constant(base, np.int64)), np.int64)
    try:
        return make(_Draws(at, key), *args, **(kwargs or {}))
    except (_NotDrawn, TypeError, OverflowError):  # TypeError: an argument that it has not
        return None


class _Draws:
    """The independent numbers that one element may draw."""

    def __init__(self, at: Expr, key: int):
        self.at, self.key = at, key

    def another(self) -> _Draws:
        return _Draws(self.at, key_of("another", self.key))

    def __call__(self, op: str, dtype: Any = np.float64) -> Expr:
        return Expr(op, (self.at,), dtype, self.key)

    def uniform(self, dtype: Any = np.float64) -> Expr:
        return self("uniform", dtype)

    def positive(self) -> Expr:
        """Uniform, but never 0: one in 2**53 that would be is half as much as the next."""
        return _op("maximum", self("uniform"), 2.0**-54)

    def exponential(self, dtype: Any = np.float64) -> Expr:
        return _op("negative", _op("log1p", _op("negative", self("uniform", dtype))))


def _op(name: str, *args: Any, dtype: Any = None) -> Expr:
    """A node; numbers become constants of the other arguments' type."""
    given = next(a.dtype for a in args if isinstance(a, Expr))
    nodes = tuple([a if isinstance(a, Expr) else constant(a, given) for a in args])
    return Expr(name, nodes, given if dtype is None else dtype)


def _shifted(x: Expr, loc: float, scale: float) -> Expr:
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


def _above(value: Any, least: float = 0) -> float:
    number = _number(value)
    if number <= least:
        raise _NotDrawn
    return number


def _floating(dtype: Any) -> DType:
    found: DType = np.dtype(dtype)
    if found not in (np.dtype(np.float64), np.dtype(np.float32)) or not found.isnative:
        raise _NotDrawn
    return found


def _random(d: _Draws, dtype: Any = np.float64, out: None = None) -> Expr:
    if out is not None:
        raise _NotDrawn
    return d.uniform(_floating(dtype))


def _uniform(d: _Draws, low: Any = 0.0, high: Any = 1.0) -> Expr:
    low, high = _number(low), _number(high)
    return _shifted(d.uniform(), low, _scale(high - low))


def _standard_normal(d: _Draws, dtype: Any = np.float64, out: None = None) -> Expr:
    if out is not None:
        raise _NotDrawn
    return d("normal", _floating(dtype))


def _normals(d: _Draws, loc: Any = 0.0, scale: Any = 1.0) -> Expr:
    return _shifted(d("normal"), _number(loc), _scale(scale))


def _lognormal(d: _Draws, mean: Any = 0.0, sigma: Any = 1.0) -> Expr:
    return _op("exp", _normals(d, mean, sigma))


def _standard_exponential(
    d: _Draws, dtype: Any = np.float64, method: str = "zig", out: None = None
) -> Expr:
    if out is not None:
        raise _NotDrawn
    return d.exponential(_floating(dtype))


def _exponential(d: _Draws, scale: Any = 1.0) -> Expr:
    return _shifted(d.exponential(), 0, _scale(scale))


def _laplace(d: _Draws, loc: Any = 0.0, scale: Any = 1.0) -> Expr:
    u = d.positive()
    near = _op("minimum", u, _op("subtract", 1, u))
    size = _op("negative", _op("log", _op("multiply", 2, near)))
    signed = _op("copysign", size, _op("subtract", u, 0.5))
    return _shifted(signed, _number(loc), _scale(scale))


def _logistic(d: _Draws, loc: Any = 0.0, scale: Any = 1.0) -> Expr:
    u = d.positive()
    odds = _op("log", _op("divide", u, _op("subtract", 1, u)))
    return _shifted(odds, _number(loc), _scale(scale))


def _gumbel(d: _Draws, loc: Any = 0.0, scale: Any = 1.0) -> Expr:
    e = _op("negative", _op("log1p", _op("negative", d.positive())))
    return _shifted(_op("negative", _op("log", e)), _number(loc), _scale(scale))


def _rayleigh(d: _Draws, scale: Any = 1.0) -> Expr:
    return _shifted(_op("sqrt", _op("multiply", 2, d.exponential())), 0, _scale(scale))


def _weibull(d: _Draws, a: Any) -> Expr:
    return _op("power", d.exponential(), 1 / _above(a))


def _pareto(d: _Draws, a: Any) -> Expr:
    return _op("expm1", _op("divide", d.exponential(), _above(a)))


def _power(d: _Draws, a: Any) -> Expr:
    return _op("power", d.uniform(), 1 / _above(a))


def _standard_cauchy(d: _Draws) -> Expr:
    return _op("tan", _op("multiply", math.pi, _op("subtract", d.uniform(), 0.5)))


def _triangular(d: _Draws, left: Any, mode: Any, right: Any) -> Expr:
    left, mode, right = _number(left), _number(mode), _number(right)
    if not left <= mode <= right or left == right:
        raise _NotDrawn
    base, u = right - left, d.uniform()
    rising = _op("sqrt", _op("multiply", (mode - left) * base, u))
    falling = _op("sqrt", _op("multiply", (right - mode) * base, _op("subtract", 1, u)))
    below = _op("less_equal", u, (mode - left) / base, dtype=bool)
    parts = (below, _op("add", left, rising), _op("subtract", right, falling))
    return Expr("where", parts, np.float64)


def _standard_t(d: _Draws, df: Any) -> Expr:
    """Bailey 1994: a polar method that needs no rejection."""
    df = _above(df, 0.2)  # nearer to 0 it overflows
    e = _op("expm1", _op("multiply", 2 / df, d.exponential()))
    turn = _op("cos", _op("multiply", 2 * math.pi, d.another().uniform()))
    return _op("multiply", _op("sqrt", _op("multiply", df, e)), turn)


def _wald(d: _Draws, mean: Any, scale: Any) -> Expr:
    """Michael, Schucany and Haas 1976: one of the two roots of a quadratic, mean / s and mean * s,
    here without cancellation."""
    mean, scale = _above(mean), _above(scale)
    w = _op("multiply", mean / (2 * scale), _op("square", d("normal")))
    root = _op("sqrt", _op("multiply", w, _op("add", 2, w)))
    s = _op("add", _op("add", 1, w), root)
    smaller = _op("less_equal", _op("multiply", d.another().uniform(), _op("add", 1, s)), s,
                  dtype=bool)  # fmt: skip
    return Expr("where", (smaller, _op("divide", mean, s), _op("multiply", mean, s)), np.float64)


def _geometric(d: _Draws, p: Any) -> Expr:
    p = _above(p, 1e-17)  # below, results do not fit int64
    if p >= 1:
        raise _NotDrawn
    trials = _op("ceil", _op("divide", d.exponential(), -math.log1p(-p)))
    return Expr("cast", (_op("maximum", trials, 1),), np.int64)


def _integers(
    d: _Draws, low: Any, high: Any = None, dtype: Any = np.int64, endpoint: bool = False
) -> Expr:
    """`low + floor(x * span)` where x is a binary fraction of 64 bits, of 128 where span is above
    2**24: the probability of no result is off by more than one part in 2**40."""
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
    number = _below(d, span)
    if low:
        number = _op("add", number, low % 2**64)
    return number if found == np.uint64 else Expr("cast", (number,), found)


def _below(d: _Draws, span: int) -> Expr:
    word = d("bits", np.uint64)
    if span == 2**64:
        return word
    if span & (span - 1) == 0 and span > 1:
        return _op("right_shift", word, 65 - span.bit_length())
    high = _high_product(word, span)
    if span <= 2**24:
        return high
    low = _op("multiply", word, span)
    more = _op("add", low, _high_product(d.another()("bits", np.uint64), span))
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


def _randint(d: _Draws, low: Any, high: Any = None, dtype: Any = int) -> Expr:
    return _integers(d, low, high, dtype)


def _random_integers(d: _Draws, low: Any, high: Any = None) -> Expr:
    if high is None:
        low, high = 1, low
    return _integers(d, low, high, int, endpoint=True)


_METHODS: dict[str, Callable[..., Expr]] = {
    "random": _random,
    "random_sample": lambda d: _random(d),
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
    "randint": _randint,
    "random_integers": _random_integers,
}
