"""Which bin values lie in: counts, weighted sums and indices, by compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.bins import Bins


def count(bins: Bins, x: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> None:
    """Add to each bin's count, int64, how many of these values lie in it.

    >>> bins, counts = Bins.from_edges(np.array([0.0, 1.0, 2.0])), np.zeros(2, np.int64)
    >>> count(bins, np.array([-1, 0, 0.99, 1, 2, 2.1, np.nan]), counts)
    >>> counts
    array([2, 2])
    """
    from . import histogram_loops  # Numba takes a while to load

    histogram_loops.count(np.ravel(x), *bins.grid, counts)


def weigh(
    bins: Bins, x: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], sums: np.ndarray[Any, Any]
) -> None:
    """Add the weights of values to the sums (float64) of their bins.

    >>> bins, sums = Bins.from_edges(np.array([0.0, 1.0, 2.0])), np.zeros(2)
    >>> weigh(bins, np.array([0.5, 1.5, 1.0, 9.0]), np.array([1.0, 2.0, 4.0, 8.0]), sums)
    >>> sums
    array([1., 6.])
    """
    from . import histogram_loops  # as above

    histogram_loops.weigh(np.ravel(x), *bins.grid, np.ravel(weights), sums)


def find(bins: Bins, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which bin each of these values lies in, int64; as many as there are for what is in none.

    >>> find(Bins.from_edges(np.array([0.0, 1.0, 3.0])), np.array([-1, 0, 2, 3, np.nan]))
    array([2, 0, 1, 1, 2])
    """
    from . import histogram_loops  # as above

    found = np.empty(np.shape(x), np.int64)
    histogram_loops.find(np.ravel(x), *bins.grid, found.reshape(-1))
    return found
