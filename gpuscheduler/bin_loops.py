"""The loops of `bins`, compiled by Numba when they first run."""

from __future__ import annotations

from .philox_loops import compiled

# All find the same bin; the even ones begin where it is, or next to it.


@compiled()
def count_evenly(x, edges, inverse, counts):  # type: ignore[no-untyped-def]
    last = edges.size - 2
    for v in x:
        if v >= edges[0] and v <= edges[last + 1]:
            k = min(int((v - edges[0]) * inverse), last)
            while v < edges[k]:
                k -= 1
            while k < last and v >= edges[k + 1]:
                k += 1
            counts[k] += 1


@compiled()
def count_among(x, edges, counts):  # type: ignore[no-untyped-def]
    for v in x:
        if v >= edges[0] and v <= edges[-1]:
            low, high = 0, edges.size - 1
            while high - low > 1:
                middle = (low + high) >> 1
                if v >= edges[middle]:
                    low = middle
                else:
                    high = middle
            counts[low] += 1


@compiled()
def find_evenly(x, edges, inverse, found):  # type: ignore[no-untyped-def]
    last = edges.size - 2
    for i, v in enumerate(x):
        k = last + 1
        if v >= edges[0] and v <= edges[last + 1]:
            k = min(int((v - edges[0]) * inverse), last)
            while v < edges[k]:
                k -= 1
            while k < last and v >= edges[k + 1]:
                k += 1
        found[i] = k


@compiled()
def find_among(x, edges, found):  # type: ignore[no-untyped-def]
    for i, v in enumerate(x):
        low, high = 0, edges.size - 1
        if v >= edges[0] and v <= edges[-1]:
            while high - low > 1:
                middle = (low + high) >> 1
                if v >= edges[middle]:
                    low = middle
                else:
                    high = middle
        else:
            low = high
        found[i] = low
