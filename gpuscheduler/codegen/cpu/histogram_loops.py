"""Numba loops that find, count and weigh values in bins.

A search with branches waits whenever the processor guesses one wrongly. Here a grid of even
cells tells how many edges lie before a value's cell. A search without branches does the rest,
for many values at a time. This is faster than NumPy's way, which sorts the values.
"""

from __future__ import annotations

import numpy as np

from .njit import njit

BATCH = 1024  # values at a time, whose bins stay in the first cache
LANES = 4  # of counters: values in a row are often of the same bin, and each waits for the last
_1 = np.uint32(1)


@njit()
def _locate(x, edges, bins, low, high, scale, before, most, found):  # type: ignore[no-untyped-def]
    """Find the bin of each of a few values; `bins` for values in none.

    Behind `edges` lie as many more numbers as the search may read beyond the last edge.
    """
    first, end, last = edges[0], edges[bins], np.int64(before.size - 1)
    for i in range(x.size):
        v = np.float64(x[i])
        v = min(max(v, low), high) if v == v else low
        # unsigned indices are not looked at for being negative
        found[i] = before[np.uint64(min(np.int64((v - low) * scale), last))]
    step = most
    while step > 0:
        s = np.uint32(step)
        for i in range(x.size):
            k = found[i]
            found[i] = k + s if edges[np.uint64(k + s - _1)] <= x[i] else k
        step >>= 1
    for i in range(x.size):  # behind the last of the edges that are no more than it
        k = min(found[i] - _1, np.uint32(max(bins, 1) - 1))
        found[i] = k if x[i] >= first and x[i] <= end else np.uint32(bins)


@njit()
def count(x, edges, bins, low, high, scale, before, most, counts):  # type: ignore[no-untyped-def]
    found = np.empty(BATCH, np.uint32)
    lanes = np.zeros((LANES, bins + 1), np.int64)
    for start in range(0, x.size, BATCH):
        part = x[start : start + BATCH]
        _locate(part, edges, bins, low, high, scale, before, most, found)
        for i in range(part.size):
            lanes[i % LANES, found[i]] += 1
    for lane in range(LANES):
        for k in range(bins):
            counts[k] += lanes[lane, k]


@njit()
def weigh(x, edges, bins, low, high, scale, before, most, weights, sums):  # type: ignore[no-untyped-def]
    found = np.empty(BATCH, np.uint32)
    for start in range(0, x.size, BATCH):
        part = x[start : start + BATCH]
        _locate(part, edges, bins, low, high, scale, before, most, found)
        for i in range(part.size):
            if found[i] < bins:
                sums[found[i]] += weights[start + i]


@njit()
def find(x, edges, bins, low, high, scale, before, most, out):  # type: ignore[no-untyped-def]
    found = np.empty(BATCH, np.uint32)
    for start in range(0, x.size, BATCH):
        part = x[start : start + BATCH]
        _locate(part, edges, bins, low, high, scale, before, most, found)
        for i in range(part.size):
            out[start + i] = found[i]
