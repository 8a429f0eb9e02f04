"""The bins of a histogram, as NumPy defines them.

Bin k holds values from edge k on that are less than edge k + 1. The last bin also holds its
upper edge (`numpy.histogram`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

#: Types in which numbers are compared with edges.
TYPES = ("i8", "f4", "f8")
#: Cells of the grid in which edges are looked up, at least: they fit the first cache.
LEAST_CELLS = 2**12


def comparison_dtype(values: Any, edges: Any) -> np.dtype[Any] | None:
    """Return the one of TYPES in which values are compared with edges; None where none holds both.

    >>> comparison_dtype("f2", "f2"), comparison_dtype("u1", "i4"), comparison_dtype("u8", "u8")
    (dtype('float32'), dtype('int64'), None)
    """
    both = np.result_type(np.dtype(values), np.dtype(edges))
    if both == np.uint64:  # a float64 does not hold them all
        return None
    return next((np.dtype(t) for t in TYPES if np.can_cast(both, t)), None)


@dataclass(frozen=True)
class Bins:
    """Edges, ascending, of one of TYPES. Values are compared as numbers of this type.

    >>> bins = Bins.from_edges(np.array([0.0, 1.0, 2.0]))
    >>> bins.is_even, len(bins)
    (True, 2)
    """

    code: str
    words: bytes  # of the edges

    @classmethod
    def from_edges(cls, edges: np.ndarray[Any, Any]) -> Bins:
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
    def is_even(self) -> bool:
        """Return whether edges are `numpy.linspace`'s numbers, bit for bit.

        Edge k is k times the step plus the first edge; the last edge is the given one.
        """
        kind = self.edges.dtype.type
        with np.errstate(all="ignore"):
            plain = self.code != "i8" and 0 < self.step < np.inf and kind(1 / self.step) < np.inf
        if not plain or len(self) > 2**20:  # of so many a float32 does not find the nearest
            return False
        made = np.arange(len(self)) * self.step + np.float64(self.edges[0])
        return bool((made.astype(self.code) == self.edges[:-1]).all())

    @cached_property
    def grid(self) -> tuple[Any, ...]:
        """Return the tables by which `codegen/cpu/histogram_loops.py` finds bins.

        These are the edges with padding, the count of bins, the ends of a grid of even cells, cells
        in one unit, how many edges lie in cells before each cell, and the first step of a search
        among the edges of one cell.

        Numbers go to cells in their order, rounding included: so edges in cells before a number's
        are no more than it, and those in cells behind are more.
        """
        finite = self.edges[np.isfinite(self.edges)].astype(np.float64)
        cells = max(LEAST_CELLS, 4 << len(self).bit_length())
        low, high = finite[[0, -1]] if len(finite) else np.zeros(2)
        with np.errstate(all="ignore"):
            scale = cells / (high - low)
            if not (0 < scale < np.inf and high - low < np.inf):  # all in one cell
                low, high, scale = 0.0, 0.0, 0.0
            places = (np.clip(self.edges.astype(np.float64), low, high) - low) * scale
        cell = np.minimum(places.astype(np.int64), cells - 1)
        before = np.searchsorted(cell, np.arange(cells)).astype(np.uint32)
        most = 1 << (int(np.bincount(cell).max()).bit_length() - 1)
        edges = np.concatenate([self.edges, np.full(2 * most, self.edges[-1])])
        return edges, len(self), float(low), float(high), float(scale), before, most
