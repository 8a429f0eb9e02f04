"""What one step allocates, by the line that does it: noted while it runs, summed up at its end."""

from __future__ import annotations

from collections import Counter
from types import CodeType
from typing import NamedTuple

#: Code of the user's and a line of it; None where only code of libraries runs.
Site = tuple[CodeType, int] | None


class SiteUse(NamedTuple):
    """What one line allocates in one step; bytes."""

    site: Site
    working: int  # freed by the step's end, when the step has most of such memory
    most: int  # at once, with what is part of the step's value
    total: int  # of all its allocations
    acquired: int  # that the pool took from the device for them
    times: int  # that it allocates
    largest: int  # allocation


class StepAllocations(NamedTuple):
    """What one step allocates on its device."""

    step: int
    place: int
    uses: tuple[SiteUse, ...]  # by line, in the order of their first allocation

    @property
    def working_memory(self) -> int:
        """The most bytes at once that were freed by the step's end."""
        return sum([use.working for use in self.uses])


class AllocationLog:
    """The allocations of one step, in order.

    >>> log = AllocationLog()
    >>> log.allocate(7, 512, None); log.allocate(8, 1024, None); log.free(7)
    >>> (use,) = log.sum_up(0, 0).uses
    >>> use.working, use.most, use.total, use.times
    (512, 1536, 1536, 2)
    """

    def __init__(self) -> None:
        #: What was allocated: bytes, line, and bytes that the pool took from the device.
        self._made: list[tuple[int, Site, int]] = []
        #: Numbers of `_made` in order; for what is freed, their complement.
        self._order: list[int] = []
        #: The number of each allocation that is not freed, by its name.
        self._alive: dict[int, int] = {}

    def allocate(self, name: int, nbytes: int, site: Site, acquired: int = 0) -> None:
        """Note an allocation; no other one has its name until it is freed."""
        self._alive[name] = len(self._made)
        self._order.append(len(self._made))
        self._made.append((nbytes, site, acquired))

    def free(self, name: int) -> None:
        """Note that an allocation is freed; one from before the step is nothing of it."""
        number = self._alive.pop(name, None)
        if number is not None:
            self._order.append(~number)

    def sum_up(self, step: int, place: int) -> StepAllocations:
        """Return the sums by line; what is alive now is part of the step's value."""
        kept = set(self._alive.values())
        now: Counter[Site] = Counter()
        most: Counter[Site] = Counter()
        working = best = 0
        at_best: Counter[Site] = Counter()
        temporary: Counter[Site] = Counter()
        for n in self._order:
            sign, number = (1, n) if n >= 0 else (-1, ~n)
            nbytes, site, _ = self._made[number]
            now[site] += sign * nbytes
            most[site] = max(most[site], now[site])
            if number not in kept:
                temporary[site] += sign * nbytes
                working += sign * nbytes
                if working > best:
                    best, at_best = working, Counter(temporary)
        mine: dict[Site, list[tuple[int, int]]] = {}
        for nbytes, site, acquired in self._made:
            mine.setdefault(site, []).append((nbytes, acquired))
        return StepAllocations(step, place, tuple([
            SiteUse(
                site, at_best[site], most[site], sum([n for n, _ in found]),
                sum([a for _, a in found]), len(found), max([n for n, _ in found]),
            )
            for site, found in mine.items()
        ]))  # fmt: skip
