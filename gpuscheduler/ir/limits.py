"""Sizes at which sliding windows and groups of tasks change their schedule."""

from __future__ import annotations

#: Bytes of a result that lies directly behind those of other items of a launch, at most.
CLOSE = 2**16
#: Results along an axis that a thread makes at a time of windows that slide along it, at least and
#: at most, and the points of a tile in which threads follow such windows: their rows stay in the
#: cache. Measured.
LEAST_SLIDING, MOST_SLIDING, SLIDING_TILE = 4, 16, 2**8
