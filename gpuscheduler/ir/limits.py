"""Sizes at which sliding windows and groups of tasks change their schedule."""

from __future__ import annotations

#: Most bytes of a result that lies directly behind results of other items of a launch.
#: No row.
CLOSE = 2**16
#: Least results of sliding windows that a thread makes at a time.
#: No row: the gain of sliding windows is in the table of `codegen/cuda/tuning`.
LEAST_SLIDING = 4
#: Most results of sliding windows that a thread makes at a time.
#: No row.
MOST_SLIDING = 16
#: Most points of a tile in which threads follow sliding windows: its rows stay in the cache.
#: No row.
SLIDING_TILE = 2**8
