"""The bins of a histogram, as NumPy has them.

Bin k holds what is no less than edge k and less than edge k + 1; the last one holds its upper edge,
too (`numpy.histogram`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

#: Types in which numbers are compared with edges.
TYPES = ("i8", "f4", "f8")


def compared(values: Any, edges: Any) -> np.dtype[Any] | None:
    """As which of TYPES values of a type are compared with edges of another; None where none of
    them holds both.

    >>> compared("f2", "f2"), compared("u1", "i4"), compared("u8", "u8")
    (dtype('float32'), dtype('int64'), None)
    """
    both = np.result_type(np.dtype(values), np.dtype(edges))
    if both == np.uint64:  # a float64 does not hold them all
        return None
    return next((np.dtype(t) for t in TYPES if np.can_cast(both, t)), None)


@dataclass(frozen=True)
class Bins:
    """Edges, ascending, of one of TYPES. Values are compared as numbers of this type.

    >>> bins, counts = Bins.of(np.array([0.0, 1.0, 2.0])), np.zeros(2, np.int64)
    >>> bins.count(np.array([-1, 0, 0.99, 1, 2, 2.1, np.nan]), counts)
    >>> bins.even, counts
    (True, array([2, 2]))
    """

    code: str
    words: bytes  # of the edges

    @classmethod
    def of(cls, edges: np.ndarray[Any, Any]) -> Bins:
        return cls(edges.dtype.str[1:], edges.tobytes())

    @cached_property
    def edges(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.words, self.code)

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __repr__(self) -> str:
        return f"{len(self)} bins in [{self.edges[0]}, {self.edges[-1]}]"

    @cached_property
    def step(self) -> float:
        """From one edge to the next where they lie evenly."""
        return float((np.float64(self.edges[-1]) - np.float64(self.edges[0])) / len(self))

    @cached_property
    def inverse(self) -> Any:
        """How many steps there are in one, where edges lie evenly."""
        return self.edges.dtype.type(1 / self.step)

    @cached_property
    def even(self) -> bool:
        """Whether these are `numpy.linspace`'s numbers, bit for bit: edge k is k times the step and
        the first one, the last one itself."""
        kind = self.edges.dtype.type
        with np.errstate(all="ignore"):
            plain = self.code != "i8" and 0 < self.step < np.inf and kind(1 / self.step) < np.inf
        if not plain or len(self) > 2**20:  # of so many a float32 does not find the nearest
            return False
        made = np.arange(len(self)) * self.step + np.float64(self.edges[0])
        return bool((made.astype(self.code) == self.edges[:-1]).all())

    def count(self, x: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> None:
        """Adds to each bin's count, int64, how many of these values lie in it."""
        from . import bin_loops  # Numba takes a while to load

        x = np.ravel(x)
        if self.even:
            bin_loops.count_evenly(x, self.edges, self.inverse, counts)
        else:
            bin_loops.count_among(x, self.edges, counts)

    def weigh(
        self, x: np.ndarray[Any, Any], weights: np.ndarray[Any, Any], sums: np.ndarray[Any, Any]
    ) -> None:
        """Adds to each bin's sum, float64, the weights of those of these values that lie in it.

        >>> bins, sums = Bins.of(np.array([0.0, 1.0, 2.0])), np.zeros(2)
        >>> bins.weigh(np.array([0.5, 1.5, 1.0, 9.0]), np.array([1.0, 2.0, 4.0, 8.0]), sums)
        >>> sums
        array([1., 6.])
        """
        from . import bin_loops  # as above

        x, weights = np.ravel(x), np.ravel(weights)
        if self.even:
            bin_loops.weigh_evenly(x, self.edges, self.inverse, weights, sums)
        else:
            bin_loops.weigh_among(x, self.edges, weights, sums)

    def find(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which bin each of these values lies in, int64; as many as there are for what is in none.

        >>> Bins.of(np.array([0.0, 1.0, 3.0])).find(np.array([-1, 0, 2, 3, np.nan]))
        array([2, 0, 1, 1, 2])
        """
        from . import bin_loops  # as above

        found = np.empty(np.shape(x), np.int64)
        if self.even:
            bin_loops.find_evenly(np.ravel(x), self.edges, self.inverse, found.reshape(-1))
        else:
            bin_loops.find_among(np.ravel(x), self.edges, found.reshape(-1))
        return found
