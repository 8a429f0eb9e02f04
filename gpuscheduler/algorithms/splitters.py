"""Find where to cut sorted runs, so that each part of their union has the wanted length.

Two rounds: a sample of each run gives two neighbouring values around each cut (the bracket), the
runs count the distinct values between them (the candidates), and the cuts follow exactly. Values
are compared as `ordered_keys`, on the host. The idea is that of exact splitting (Cheng, Shah,
Gilbert, Edelman 2006) and of histogram sort with sampling (Harsh, Kale, Solomonik 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .blocks import array_module, to_host
from .ordered_keys import ordered_keys

#: Elements that the runs together give as a sample, for each run.
SAMPLES = 1024
#: Elements of a run between two values that are looked at on the host.
FEW = 4096

Columns = tuple[Any, ...]


class Sample(NamedTuple):
    """Every `step`-th element of a sorted run."""

    length: int  # elements of the run
    step: int
    keys: Columns  # ordered keys of the elements, NumPy arrays


class Brackets(NamedTuple):
    """For each wanted rank, two values between which its element is: low < element <= high."""

    ranks: Any  # int64: elements that belong in front of each cut
    low: Columns
    has_low: Any  # bool: False where all elements are above
    high: Columns
    has_high: Any  # bool: False where all elements are at or below


class Candidates(NamedTuple):
    """What one run has within each bracket."""

    length: int  # elements of the run
    below: Any  # int64, by bracket: elements at or below its low value
    keys: list[Columns]  # by bracket: the distinct values in it, in order
    counts: list[Any]  # by bracket: how often the run has each


def sample_run(columns: Sequence[Any], runs: int, descending: bool = False) -> Sample:
    """Take every `step`-th element of a run's key columns.

    >>> sample_run([np.arange(10.0)], runs=1).step
    1
    """
    n = int(columns[0].size)
    step = max(1, n // (SAMPLES * runs))
    return Sample(n, step, _keys_of([c[step - 1 :: step] for c in columns], descending))


def find_brackets(samples: Sequence[Sample], ranks: Sequence[int]) -> Brackets:
    """Find values around the elements of the given ranks in the union of the runs.

    A sampled value has, at or below it, its samples times their steps, and less than a step more
    for each run.
    """
    slack = sum(s.step - 1 for s in samples)
    count = len(samples[0].keys)
    keys = tuple(np.concatenate([s.keys[c] for s in samples]) for c in range(count))
    weights = np.concatenate([np.full(s.keys[0].size, s.step, np.int64) for s in samples])
    order = np.lexsort(keys[::-1])
    keys = tuple(k[order] for k in keys)
    total = np.cumsum(weights[order])
    last = _last_rows(keys)
    keys, total = tuple(k[last] for k in keys), total[last]
    wanted = np.asarray(ranks, np.int64)
    low = np.searchsorted(total + slack, wanted, side="left") - 1  # the last with total+slack < t
    high = np.searchsorted(total, wanted, side="left")  # the first with total >= t
    has_low, has_high = low >= 0, high < total.size

    def keys_at(where: Any) -> Columns:
        if not total.size:
            return tuple(np.zeros(wanted.size, k.dtype) for k in keys)
        return tuple(k[np.clip(where, 0, total.size - 1)] for k in keys)

    return Brackets(wanted, keys_at(low), has_low, keys_at(high), has_high)


def find_candidates(
    columns: Sequence[Any], brackets: Brackets, descending: bool = False
) -> Candidates:
    """Count a sorted run's distinct values in each bracket.

    They are at most as many as the elements in the bracket: a value that is often there is sent
    once.
    """
    n, many = int(columns[0].size), brackets.ranks.size
    bounds = tuple(np.concatenate(pair) for pair in zip(brackets.low, brackets.high, strict=True))
    found = count_at_most(columns, bounds, descending)
    low = np.where(brackets.has_low, found[:many], 0)
    high = np.where(brackets.has_high, found[many:], n)
    keys, counts = [], []
    for start, stop in zip(low.tolist(), high.tolist(), strict=True):
        values, often = _count_distinct([c[start:stop] for c in columns], descending)
        keys.append(values)
        counts.append(often)
    return Candidates(n, low, keys, counts)


def find_cuts(candidates: Sequence[Candidates], brackets: Brackets) -> Any:
    """Return where to cut each run: int64 of (runs, ranks + 2), with 0 and the length at the ends.

    The columns sum to the ranks. Equal elements go to the first runs first.
    """
    ranks = brackets.ranks.tolist()
    out = np.zeros((len(candidates), len(ranks) + 2), np.int64)
    for t, rank in enumerate(ranks):
        out[:, t + 1] = _cut([(c.below[t], c.keys[t], c.counts[t]) for c in candidates], rank)
    out[:, -1] = [c.length for c in candidates]
    return out


def merge_candidates(candidates: Sequence[Candidates], bracket: int, rank: int) -> Any:
    """Return the key of the element of a rank, from 1, in the union of the runs.

    Of runs with one key column.
    """
    keys = np.concatenate([c.keys[bracket][0] for c in candidates])
    counts = np.concatenate([c.counts[bracket] for c in candidates])
    order = np.argsort(keys, kind="stable")
    missing = rank - sum(int(c.below[bracket]) for c in candidates)
    return keys[order][np.searchsorted(np.cumsum(counts[order]), missing, side="left")]


def count_at_most(columns: Sequence[Any], bounds: Columns, descending: bool = False) -> Any:
    """Count the elements of sorted columns that are at or below each bound, by bisection.

    >>> count_at_most([np.array([1, 2, 2, 5], "u1")], (np.array([0, 2, 9], "u1"),))
    array([0, 3, 4])
    """
    n, many = int(columns[0].size), bounds[0].size
    low, high = np.zeros(many, np.int64), np.full(many, n, np.int64)
    while (active := low < high).any():
        middle = (low + high) // 2
        here = array_module(columns[0]).asarray(np.minimum(middle, n - 1))
        below = _at_most(_keys_of([c[here] for c in columns], descending), bounds)
        low = np.where(active & below, middle + 1, low)
        high = np.where(active & ~below, middle, high)
    return low


def _keys_of(columns: Sequence[Any], descending: bool) -> Columns:
    """The ordered keys of a few elements, on the host."""
    return tuple(k for c in columns for k in ordered_keys(to_host(c), descending))


def _cut(parts: Sequence[tuple[int, Columns, Any]], rank: int) -> list[int]:
    """Where to cut each run, from the elements below, distinct values and counts of each."""
    below = [int(b) for b, _, _ in parts]
    missing = rank - sum(below)
    if missing <= 0:
        return below
    columns = range(len(parts[0][1]))
    keys = tuple(np.concatenate([k[c] for _, k, _ in parts]) for c in columns)
    counts = np.concatenate([n for _, _, n in parts])
    of_run = np.repeat(np.arange(len(parts)), [n.size for _, _, n in parts])
    order = np.lexsort((of_run, *keys[::-1]))  # equal values in the order of the runs
    total = np.cumsum(counts[order])
    last = int(np.searchsorted(total, missing, side="left"))
    taken = counts[order][: last + 1].copy()
    taken[last] -= total[last] - missing
    more = np.bincount(of_run[order][: last + 1], weights=taken, minlength=len(parts))
    return [b + int(m) for b, m in zip(below, more, strict=True)]


def _count_distinct(columns: Sequence[Any], descending: bool) -> tuple[Columns, Any]:
    """The distinct values of sorted columns, as ordered keys, and how often each is there."""
    n = int(columns[0].size)
    if n > FEW:
        xp = array_module(columns[0])
        changed = None
        for key in (k for c in columns for k in ordered_keys(c, descending)):
            differs = key[1:] != key[:-1]
            changed = differs if changed is None else changed | differs
        last = np.append(to_host(xp.flatnonzero(changed)), n - 1)
        here = xp.asarray(last)
        keys = _keys_of([c[here] for c in columns], descending)
    else:
        keys = _keys_of(columns, descending)
        last = _last_rows(keys)
        keys = tuple(k[last] for k in keys)
    return keys, np.diff(last, prepend=-1)


def _last_rows(keys: Columns) -> Any:
    """Where each distinct row of sorted columns is for the last time."""
    n = keys[0].size
    if not n:
        return np.zeros(0, np.int64)
    changed = np.zeros(n, bool)
    changed[-1] = True
    for k in keys:
        changed[:-1] |= k[1:] != k[:-1]
    return np.flatnonzero(changed)


def _at_most(keys: Columns, bounds: Columns) -> Any:
    """Whether rows are at or below the rows of `bounds`, the first column first."""
    out = keys[-1] <= bounds[-1]
    for k, b in zip(keys[-2::-1], bounds[-2::-1], strict=True):
        out = (k < b) | ((k == b) & out)
    return out
