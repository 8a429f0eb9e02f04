"""The prices of European call options by the formula of Black and Scholes, in float32.

    d1 = (log(S / K) + (r + v² / 2) T) / (v √T),  d2 = d1 - v √T
    price = S N(d1) - K exp(-r T) N(d2)

(F. Black, M. Scholes: "The pricing of options and corporate liabilities", 1973.) A long chain of
elementwise work on three inputs. N is the normal distribution function, for which neither NumPy nor
Dask has a function: it is Abramowitz and Stegun's 26.2.17, with an error below 7.5e-8, as in the
CUDA sample BlackScholes, whose parameters these are too.
"""

from __future__ import annotations

import math
from typing import Any

import dask.array as da
import numpy as np

from . import _blocks

RATE = 0.02  # riskless, per year
VOLATILITY = 0.30
PRICES = (5.0, 30.0)  # of the stock
STRIKES = (1.0, 100.0)
YEARS = (0.25, 10.0)
SEED = 7
SLOPE = 0.2316419
SERIES = (0.31938153, -0.356563782, 1.781477937, -1.821255978, 1.330274429)

SMALL = 40_000
FULL = 2**31
RTOL = 1e-5
ATOL = 5e-5  # of prices up to 30: the formula subtracts

erfc = np.frompyfunc(math.erfc, 1, 1)


def inputs(
    size: int, chunks: _blocks.Chunks = None, xp: str = "numpy"
) -> tuple[da.Array, da.Array, da.Array]:
    """Stock prices, strikes and years to expiry: uniform random float32, `size` of each."""
    grid = _blocks.grid((size,), "f4", chunks, (0,))
    stock, strike, years = (
        low + (high - low) * _blocks.uniform((size,), grid, "f4", SEED + i, xp)
        for i, (low, high) in enumerate((PRICES, STRIKES, YEARS))
    )
    return stock, strike, years


def apply(stock: Any, strike: Any, years: Any) -> Any:
    """The call prices, of arrays of Dask or of any library that takes NumPy's functions."""
    spread = VOLATILITY * np.sqrt(years)
    d1 = (np.log(stock / strike) + (RATE + VOLATILITY**2 / 2) * years) / spread
    d2 = d1 - spread
    return stock * _normal_cdf(d1) - strike * np.exp(-RATE * years) * _normal_cdf(d2)


def build(size: int, chunks: _blocks.Chunks = None, xp: str = "numpy") -> da.Array:
    """The prices of `size` options."""
    prices: da.Array = apply(*inputs(size, chunks, xp))
    return prices


def reference(size: int, window: _blocks.Window | None = None) -> Any:
    """The prices, or their part at `window`, in float64 with the exact distribution function."""
    where = window or _blocks.whole((size,))
    stock, strike, years = (
        low + (high - low) * _blocks.uniform_block(where, (size,), "f4", SEED + i).astype("f8")
        for i, (low, high) in enumerate((PRICES, STRIKES, YEARS))
    )
    spread = VOLATILITY * np.sqrt(years)
    d1 = (np.log(stock / strike) + (RATE + VOLATILITY**2 / 2) * years) / spread
    d2 = d1 - spread
    n1, n2 = (erfc(-d / math.sqrt(2)).astype("f8") / 2 for d in (d1, d2))
    return (stock * n1 - strike * np.exp(-RATE * years) * n2).astype("f4")


def bytes_moved(size: int) -> int:
    """Three inputs read once, the prices written."""
    return 4 * 4 * size


def flops(size: int) -> int:
    """52 per option: nineteen for each distribution function and fourteen around the two."""
    return 52 * size


def _normal_cdf(d: Any) -> Any:
    """N(d): a fifth-degree polynomial of 1 / (1 + 0.23 |d|) times the density."""
    k = 1 / (1 + SLOPE * np.fabs(d))
    series = SERIES[-1] * k
    for coefficient in reversed(SERIES[:-1]):
        series = (series + coefficient) * k
    tail = np.exp(-0.5 * d * d) * series * (1 / math.sqrt(math.tau))
    return np.where(d > 0, 1 - tail, tail)
