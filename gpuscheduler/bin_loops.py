"""The loops of `bins`, compiled by Numba when they first run."""

from __future__ import annotations

from .philox_loops import compiled

# Both find the same bin, or as many as there are; the first one begins where it is, or next to it.


@compiled(inline="always")
def _evenly(v, edges, inverse):  # type: ignore[no-untyped-def]
    last = edges.size - 2
    k = last + 1
    if v >= edges[0] and v <= edges[last + 1]:
        k = min(int((v - edges[0]) * inverse), last)
        while v < edges[k]:
            k -= 1
        while k < last and v >= edges[k + 1]:
            k += 1
    return k


@compiled(inline="always")
def _among(v, edges):  # type: ignore[no-untyped-def]
    low, high = 0, edges.size - 1
    if not (v >= edges[0] and v <= edges[-1]):
        low = high
    while high - low > 1:
        middle = (low + high) >> 1
        if v >= edges[middle]:
            low = middle
        else:
            high = middle
    return low


@compiled()
def count_evenly(x, edges, inverse, counts):  # type: ignore[no-untyped-def]
    for v in x:
        k = _evenly(v, edges, inverse)
        if k < counts.size:
            counts[k] += 1


@compiled()
def count_among(x, edges, counts):  # type: ignore[no-untyped-def]
    for v in x:
        k = _among(v, edges)
        if k < counts.size:
            counts[k] += 1


@compiled()
def weigh_evenly(x, edges, inverse, weights, sums):  # type: ignore[no-untyped-def]
    for i, v in enumerate(x):
        k = _evenly(v, edges, inverse)
        if k < sums.size:
            sums[k] += weights[i]


@compiled()
def weigh_among(x, edges, weights, sums):  # type: ignore[no-untyped-def]
    for i, v in enumerate(x):
        k = _among(v, edges)
        if k < sums.size:
            sums[k] += weights[i]


@compiled()
def find_evenly(x, edges, inverse, found):  # type: ignore[no-untyped-def]
    for i, v in enumerate(x):
        found[i] = _evenly(v, edges, inverse)


@compiled()
def find_among(x, edges, found):  # type: ignore[no-untyped-def]
    for i, v in enumerate(x):
        found[i] = _among(v, edges)
