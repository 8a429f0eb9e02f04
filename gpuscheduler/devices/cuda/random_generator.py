"""A generator of one block's random numbers, for distributions without a closed form."""

from __future__ import annotations

from importlib import import_module
from numbers import Integral, Real
from typing import Any

import numpy as np
from dask.array.core import Array


class DeviceGenerator:
    """`numpy.random.Generator` for one chunk, on the current device.

    CuPy's Generator has some distributions; the others are computed from those. Parameters are
    numbers or arrays; numbers are checked, arrays are not, as that would have to wait for the
    device. Continuous distributions also take `dtype`, float32 or float64.

    >>> seed = np.random.SeedSequence(1)
    >>> DeviceGenerator(seed, xp="numpy").uniform(2, 3, size=(2, 2), dtype="f4").dtype
    dtype('float32')
    """

    def __init__(self, seed: np.random.SeedSequence, xp: str = "cupy"):
        self._seed, self._xp = seed, import_module(xp)
        self._source: Any = None

    # The distributions that CuPy's Generator has.

    def random(self, size: Any = None, dtype: Any = np.float64, out: None = None) -> Any:
        _no_out("random", out)
        return self._draw("random", size=_shape(size), dtype=_float(dtype))

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: None = None) -> Any:
        _no_out("standard_normal", out)
        return self._draw("standard_normal", size=_shape(size), dtype=_float(dtype))

    def standard_exponential(
        self, size: Any = None, dtype: Any = np.float64, method: str = "inv", out: None = None
    ) -> Any:
        _no_out("standard_exponential", out)
        if method != "inv":
            raise NotImplementedError(
                f"Generator.standard_exponential cannot use method={method!r} on CuPy arrays; "
                "leave the argument out: the distribution is the same"
            )
        return self._as_dtype(dtype, self._draw("standard_exponential", size=_shape(size)))

    def standard_gamma(
        self, shape: Any, size: Any = None, dtype: Any = np.float64, out: None = None
    ) -> Any:
        _no_out("standard_gamma", out)
        shape = self._number("shape", shape, least=0)
        return self._as_dtype(dtype, self._draw("standard_gamma", shape, size=_shape(size, shape)))

    def beta(self, a: Any, b: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        a, b = self._number("a", a, above=0), self._number("b", b, above=0)
        return self._as_dtype(dtype, self._draw("beta", a, b, size=_shape(size, a, b)))

    def binomial(self, n: Any, p: Any, size: Any = None) -> Any:
        n, p = self._integer("n", n, least=0), self._number("p", p, least=0, most=1)
        return self._draw("binomial", n, p, size=_shape(size, n, p))

    def geometric(self, p: Any, size: Any = None) -> Any:
        p = self._number("p", p, above=0, most=1)
        return self._draw("geometric", p, size=_shape(size, p))

    def hypergeometric(self, ngood: Any, nbad: Any, nsample: Any, size: Any = None) -> Any:
        """Draw how many of `nsample` items are good, without replacement, as NumPy's Generator."""
        good = self._integer("ngood", ngood, least=0)
        bad = self._integer("nbad", nbad, least=0)
        sample = self._integer("nsample", nsample, least=0)
        if (
            isinstance(good, int)
            and isinstance(bad, int)
            and isinstance(sample, int)
            and good + bad < sample
        ):
            raise ValueError(f"ngood + nbad < nsample: {good} + {bad} < {sample}")
        shape = _shape(size, good, bad, sample)
        return self._draw("hypergeometric", good, bad, sample, size=shape)

    def integers(
        self,
        low: Any,
        high: Any = None,
        size: Any = None,
        dtype: Any = np.int64,
        endpoint: bool = False,
    ) -> Any:
        if high is None:
            low, high = 0, low
        if not (
            isinstance(low, (int, float, np.number)) and isinstance(high, (int, float, np.number))
        ):
            raise NotImplementedError(
                "Generator.integers takes only numbers as bounds on CuPy arrays, not arrays; "
                "scale and floor what Generator.random gives"
            )
        dtype = np.dtype(dtype)
        low, last = int(low), int(high) - (not endpoint)
        bounds = np.iinfo(dtype)
        if low > last:
            raise ValueError(f"no integers from {low} to {last}")
        if low < bounds.min or last > bounds.max:
            raise ValueError(f"bounds {low} and {last} do not fit {dtype.name}")
        span, shape = last - low, _shape(size)
        if span >= 2**63:
            raise NotImplementedError(
                f"Generator.integers cannot choose among {span + 1} integers on CuPy arrays, "
                f"only among {2**63}; ask for a narrower range and combine two draws"
            )
        # CuPy adds `low` in the type asked for: only the wide types are sure not to overflow.
        wide = np.uint64 if dtype == np.uint64 else np.int64
        if 2**31 <= span < 2**32:  # https://github.com/cupy/cupy/issues/9745: silently wrong
            y = self._draw("integers", 0, 2**62, size=shape, dtype=np.int64) % (span + 1) + low
        else:
            y = self._draw("integers", low, last, size=shape, dtype=wide, endpoint=True)
        return self._xp.asarray(y, dtype=dtype)

    def logseries(self, p: Any, size: Any = None) -> Any:
        p = self._number("p", p, above=0, below=1)
        return self._draw("logseries", p, size=_shape(size, p))

    def poisson(self, lam: Any = 1.0, size: Any = None) -> Any:
        lam = self._number("lam", lam, least=0)
        return self._draw("poisson", lam, size=_shape(size, lam))

    # Distributions computed from those above.

    def uniform(
        self, low: Any = 0.0, high: Any = 1.0, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        low, high = self._number("low", low), self._number("high", high)
        y = self.random(_shape(size, low, high), dtype)
        return self._as_dtype(dtype, _scale_and_shift(y, low, high - low))

    def normal(
        self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        loc, scale = self._number("loc", loc), self._number("scale", scale, least=0)
        y = self.standard_normal(_shape(size, loc, scale), dtype)
        return self._as_dtype(dtype, _scale_and_shift(y, loc, scale))

    def lognormal(
        self, mean: Any = 0.0, sigma: Any = 1.0, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        mean, sigma = self._number("mean", mean), self._number("sigma", sigma, least=0)
        return self._as_dtype(dtype, self._xp.exp(self.normal(mean, sigma, size, dtype)))

    def exponential(self, scale: Any = 1.0, size: Any = None, dtype: Any = np.float64) -> Any:
        scale = self._number("scale", scale, least=0)
        return self._as_dtype(dtype, _scale_and_shift(self._exponential(size, scale), 0.0, scale))

    def gamma(self, shape: Any, scale: Any = 1.0, size: Any = None, dtype: Any = np.float64) -> Any:
        shape, scale = self._number("shape", shape), self._number("scale", scale, least=0)
        y = self.standard_gamma(shape, _shape(size, shape, scale))
        return self._as_dtype(dtype, _scale_and_shift(y, 0.0, scale))

    def chisquare(self, df: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        df = self._number("df", df, above=0)
        return self._as_dtype(dtype, 2.0 * self.standard_gamma(df / 2, size))

    def noncentral_chisquare(
        self, df: Any, nonc: Any, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        df, nonc = self._number("df", df, above=0), self._number("nonc", nonc, least=0)
        shape = _shape(size, df, nonc)
        # A Poisson mixture of chi-squares with df + 2k degrees of freedom
        return self._as_dtype(
            dtype, 2.0 * self.standard_gamma(df / 2 + self.poisson(nonc / 2, shape), shape)
        )

    def f(self, dfnum: Any, dfden: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        dfnum, dfden = self._number("dfnum", dfnum), self._number("dfden", dfden)
        shape = _shape(size, dfnum, dfden)
        y = self.chisquare(dfnum, shape) / dfnum
        return self._as_dtype(dtype, y / (self.chisquare(dfden, shape) / dfden))

    def noncentral_f(
        self, dfnum: Any, dfden: Any, nonc: Any, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        dfnum, dfden = self._number("dfnum", dfnum), self._number("dfden", dfden)
        nonc = self._number("nonc", nonc)
        shape = _shape(size, dfnum, dfden, nonc)
        y = self.noncentral_chisquare(dfnum, nonc, shape) / dfnum
        return self._as_dtype(dtype, y / (self.chisquare(dfden, shape) / dfden))

    def standard_t(self, df: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        df = self._number("df", df, above=0)
        shape = _shape(size, df)
        root = self._xp.sqrt(self.chisquare(df, shape) / df)
        return self._as_dtype(dtype, self.standard_normal(shape) / root)

    def standard_cauchy(self, size: Any = None, dtype: Any = np.float64) -> Any:
        return self._as_dtype(dtype, self._xp.tan(np.pi * (self._open_uniform(_shape(size)) - 0.5)))

    def gumbel(
        self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        loc, scale = self._number("loc", loc), self._number("scale", scale, least=0)
        y = -self._xp.log(-self._xp.log(self._open_uniform(_shape(size, loc, scale))))
        return self._as_dtype(dtype, _scale_and_shift(y, loc, scale))

    def laplace(
        self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        loc, scale = self._number("loc", loc), self._number("scale", scale, least=0)
        # The difference of two exponential variables: no logarithm of zero to avoid
        y = self._exponential(size, loc, scale) - self._exponential(size, loc, scale)
        return self._as_dtype(dtype, _scale_and_shift(y, loc, scale))

    def logistic(
        self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        loc, scale = self._number("loc", loc), self._number("scale", scale, least=0)
        u = self._open_uniform(_shape(size, loc, scale))
        return self._as_dtype(
            dtype, _scale_and_shift(self._xp.log(u) - self._xp.log1p(-u), loc, scale)
        )

    def rayleigh(self, scale: Any = 1.0, size: Any = None, dtype: Any = np.float64) -> Any:
        scale = self._number("scale", scale, least=0)
        y = self._xp.sqrt(2.0 * self._exponential(size, scale))
        return self._as_dtype(dtype, _scale_and_shift(y, 0.0, scale))

    def pareto(self, a: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        a = self._number("a", a, above=0)
        return self._as_dtype(dtype, self._xp.expm1(self._exponential(size, a) / a))

    def power(self, a: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        a = self._number("a", a, above=0)
        return self._as_dtype(dtype, (-self._xp.expm1(-self._exponential(size, a))) ** (1 / a))

    def weibull(self, a: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        a = self._number("a", a, least=0)
        y = self._exponential(size, a)
        if isinstance(a, float) and a == 0:
            return self._as_dtype(dtype, 0.0 * y)  # as NumPy
        return self._as_dtype(dtype, y ** (1 / a))

    def triangular(
        self, left: Any, mode: Any, right: Any, size: Any = None, dtype: Any = np.float64
    ) -> Any:
        left, right = self._number("left", left), self._number("right", right)
        mode = self._number("mode", mode)
        for a, b, text in ((left, mode, "left > mode"), (mode, right, "mode > right")):
            if isinstance(a, float) and isinstance(b, float) and a > b:
                raise ValueError(f"{text}: {a} > {b}")
        if isinstance(left, float) and isinstance(right, float) and left == right:
            raise ValueError(f"left == right: {left}")
        u = self.random(_shape(size, left, mode, right))
        base = right - left
        rising = left + self._xp.sqrt(u * ((mode - left) * base))
        falling = right - self._xp.sqrt((1.0 - u) * ((right - mode) * base))
        return self._as_dtype(dtype, self._xp.where(u * base <= mode - left, rising, falling))

    def wald(self, mean: Any, scale: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        mean, scale = self._number("mean", mean, above=0), self._number("scale", scale, above=0)
        shape = _shape(size, mean, scale)
        # Michael, Schucany and Haas: one of the roots of a quadratic in a chi-square variable,
        # here its smaller one, written so that nothing cancels
        r = mean**0.5 * abs(self.standard_normal(shape))
        x = mean * (4.0 * scale) / (r + self._xp.sqrt(r * r + 4.0 * scale)) ** 2
        chosen = self.random(shape) * (mean + x) <= mean
        return self._as_dtype(dtype, self._xp.where(chosen, x, mean * (mean / x)))

    def negative_binomial(self, n: Any, p: Any, size: Any = None) -> Any:
        n, p = self._number("n", n, above=0), self._number("p", p, above=0, most=1)
        shape = _shape(size, n, p)
        return self.poisson(self.gamma(n, (1.0 - p) / p, shape), shape)

    def multinomial(self, n: Any, pvals: Any, size: Any = None) -> Any:
        n = self._integer("n", n, least=0)
        p = [float(x) for x in pvals]
        if min(p) < 0 or sum(p[:-1]) > 1 + 1e-12:
            raise ValueError(f"pvals < 0 or sum(pvals[:-1]) > 1: {p}")
        shape = _shape(size, n)
        left = self._xp.broadcast_to(self._xp.asarray(n), shape).astype(np.int64)
        counts = self._xp.empty((*shape, len(p)), dtype=np.int64)
        remaining = 1.0
        # What the earlier categories have left over is binomial in the next one.
        for i, share in enumerate(p[:-1]):
            ratio = min(1.0, share / remaining) if remaining > 0 else 0.0
            counts[..., i] = self.binomial(left, ratio, shape)
            left = left - counts[..., i]
            remaining -= share
        counts[..., -1] = left
        return counts

    # Distributions that need rejection sampling: CuPy has them in its legacy RandomState only.

    def vonmises(self, mu: Any, kappa: Any, size: Any = None, dtype: Any = np.float64) -> Any:
        mu, kappa = self._number("mu", mu), self._number("kappa", kappa, least=0)
        return self._as_dtype(
            dtype, self._random_state().vonmises(mu, kappa, size=_shape(size, mu, kappa))
        )

    def zipf(self, a: Any, size: Any = None) -> Any:
        a = self._number("a", a, above=1)
        return self._random_state().zipf(a, size=_shape(size, a))

    # Methods that cannot work chunk by chunk on a GPU.

    def choice(self, *args: Any, **kwargs: Any) -> Any:
        raise _host_only("choice")

    def shuffle(self, *args: Any, **kwargs: Any) -> Any:
        raise _host_only("shuffle")

    def multivariate_hypergeometric(self, *args: Any, **kwargs: Any) -> Any:
        raise _host_only("multivariate_hypergeometric")

    def _draw(self, name: str, *args: Any, size: tuple[int, ...], **kwargs: Any) -> Any:
        if self._source is None:
            n = int(np.prod(size, dtype=np.int64))
            self._source = _source(self._xp, self._seed, n)
        return getattr(self._source, name)(*args, size=size, **kwargs)

    def _random_state(self) -> Any:
        return self._xp.random.RandomState(self._seed.generate_state(4))

    def _exponential(self, size: Any, *parameters: Any) -> Any:
        return self._draw("standard_exponential", size=_shape(size, *parameters))

    def _open_uniform(self, shape: tuple[int, ...]) -> Any:
        """Uniform in the open interval (0, 1)."""
        return self._xp.maximum(self.random(shape), 2.0**-54)

    def _number(self, name: str, x: Any, **bounds: float) -> Any:
        if isinstance(x, Array):  # while Dask infers the meta of the result
            x = x._meta
        if not isinstance(x, Real):
            return self._xp.asarray(x)
        _check(name, float(x), **bounds)
        return float(x)

    def _integer(self, name: str, x: Any, **bounds: float) -> Any:
        x = self._number(name, x, **bounds) if not isinstance(x, Integral) else int(x)
        if isinstance(x, (int, float)):
            _check(name, x, **bounds)
            return int(x)
        return x

    def _as_dtype(self, dtype: Any, x: Any) -> Any:
        return self._xp.asarray(x, dtype=_float(dtype))


#: States in CuPy's generator, and so GPU threads that draw: more would only cost memory.
LANES = 2**17


def _source(xp: Any, seed: np.random.SeedSequence, n: int) -> Any:
    """The array module's own generator, for a chunk of n elements.

    The number of states depends on the chunk alone, so that every device draws the same. It has
    to be a multiple of 256, or CuPy's kernels write past its end. Philox, as its states cost
    nothing to set up; each chunk sets up its own.
    """
    if xp is np:
        return np.random.Generator(np.random.Philox(seed))
    lanes = min(LANES, max(1, -(-n // 256)) * 256)
    return xp.random.Generator(xp.random.Philox4x3210(_WideSeed.from_sequence(seed), size=lanes))


class _WideSeed(np.random.SeedSequence):
    """Gives CuPy a seed of 63 bits, as many as it can use.

    CuPy asks for 32 bits only. With these, two of 10,000 chunks have equal seeds with a probability
    of one in a hundred.

    >>> seed = np.random.SeedSequence(3)
    >>> _WideSeed.from_sequence(seed).generate_state(1, np.uint32)
    array([6233904063939786893], dtype=uint64)
    """

    @classmethod
    def from_sequence(cls, seed: np.random.SeedSequence) -> _WideSeed:
        return cls(seed.entropy, spawn_key=seed.spawn_key, pool_size=seed.pool_size)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return super().generate_state(n_words, np.uint64) >> np.uint64(1)


def _shape(size: Any, *parameters: Any) -> tuple[int, ...]:
    if size is None:
        return np.broadcast_shapes(*(getattr(p, "shape", ()) for p in parameters))
    return (int(size),) if isinstance(size, Integral) else tuple(size)


def _scale_and_shift(y: Any, loc: Any, scale: Any) -> Any:
    """`loc + scale*y` in y's own memory."""
    if not (isinstance(scale, float) and scale == 1.0):
        y *= scale
    if not (isinstance(loc, float) and loc == 0.0):
        y += loc
    return y


def _float(dtype: Any) -> np.dtype[Any]:
    asked: np.dtype[Any] = np.dtype(dtype)
    if asked not in (np.float32, np.float64):
        raise TypeError(f"dtype must be float32 or float64, not {asked.name}")
    return asked


def _check(
    name: str,
    x: float,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    if least is not None and x < least:
        raise ValueError(f"{name} < {least}: {x}")
    if above is not None and x <= above:
        raise ValueError(f"{name} <= {above}: {x}")
    if below is not None and x >= below:
        raise ValueError(f"{name} >= {below}: {x}")
    if most is not None and x > most:
        raise ValueError(f"{name} > {most}: {x}")


def _no_out(name: str, out: Any) -> None:
    if out is not None:
        raise NotImplementedError(
            f"Generator.{name} cannot write to out= on CuPy arrays: each chunk makes its own array"
        )


def _host_only(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"Generator.{name} is not supported for CuPy arrays; draw on the host: "
        f"da.random.default_rng(numpy.random.PCG64(seed)).{name}(...), "
        'then .to_backend("cupy") what it gives'
    )
