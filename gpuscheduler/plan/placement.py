"""Decide which device runs which task.

Numbers in, numbers out.

Blocks of an array land in contiguous runs over the devices, and work follows the bytes it reads:
element-wise work on aligned arrays moves nothing, a tree reduction combines on each device first.
Where following would leave devices idle for longer than spreading the work would take to move, the
work is spread instead (a thousand tasks that read one small value).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from .machine import Machine

Key = Any

#: How often ties are looked at again, once all of a group are decided.
ROUNDS = 3


def device_of_rank(rank: int, count: int, devices: int) -> int:
    """The device of block `rank` of `count`, in runs.

    >>> [device_of_rank(r, 6, 4) for r in range(6)]
    [0, 0, 1, 2, 2, 3]
    """
    return rank * devices // count


def place_tasks(
    keys: Sequence[Key],
    inputs: Sequence[tuple[int, ...]],
    kinds: Sequence[int],
    nbytes: Sequence[int],
    machine: Machine,
    pins: Mapping[int, int],
) -> list[int]:
    """A device for each task; `inputs` and `pins` are by index, `kinds` groups alike tasks.

    >>> m = Machine.uniform(2)
    >>> place_tasks([("x", 0), ("x", 1), ("y", 0), ("y", 1)], [(), (), (0,), (1,)],
    ...             [0, 0, 1, 1], [8, 8, 8, 8], m, {})
    [0, 1, 0, 1]
    """
    if len(machine.devices) == 1:
        return [0] * len(keys)
    return _Placer(keys, inputs, kinds, nbytes, machine, pins).places()


class _Placer:
    def __init__(
        self,
        keys: Sequence[Key],
        inputs: Sequence[tuple[int, ...]],
        kinds: Sequence[int],
        nbytes: Sequence[int],
        machine: Machine,
        pins: Mapping[int, int],
    ):
        self.keys, self.inputs, self.kinds = keys, inputs, kinds
        self.nbytes, self.machine, self.pins = nbytes, machine, pins
        self.place = [-1] * len(keys)
        self.homes = self._placement_by_position()

    def places(self) -> list[int]:
        for group in self._groups():
            self._place(group)
        return self.place

    def _groups(self) -> list[list[int]]:
        """Tasks of one kind at one height: none of them reads another."""
        height = [0] * len(self.keys)
        groups: dict[tuple[int, int], list[int]] = {}
        for i, inputs in enumerate(self.inputs):
            h = 0
            for j in inputs:
                if height[j] >= h:
                    h = height[j] + 1
            height[i] = h
            groups.setdefault((h, self.kinds[i]), []).append(i)
        return [groups[k] for k in sorted(groups)]

    def _placement_by_position(self) -> list[int]:
        """Where each task would go by its position alone: blocks in row-major, contiguous runs.

        Tasks that are no blocks, and arrays of too few blocks for all devices, are taken together,
        in the order of execution.
        """
        kinds: dict[int, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            kinds.setdefault(kind, []).append(i)
        out = [0] * len(self.keys)
        n = len(self.machine.devices)
        others: list[int] = []
        for members in kinds.values():
            if type(self.keys[members[0]]) is not tuple or len(members) < n:
                others += members
                continue
            # block numbers of different types have no order: keep the order of execution
            with suppress(TypeError):
                members = sorted(members, key=lambda i: self.keys[i][1:])
            self._run(members, out)
        self._run(sorted(others), out)
        return out

    def _run(self, members: list[int], out: list[int]) -> None:
        n = len(self.machine.devices)
        for rank, i in enumerate(members):
            out[i] = device_of_rank(rank, len(members), n)

    def _place(self, group: list[int]) -> None:
        place, homes, pins = self.place, self.homes, self.pins
        free = []
        for i in group:
            if i in pins:
                place[i] = pins[i]
            elif not self.inputs[i]:
                place[i] = homes[i]
            elif len(self.inputs[i]) == 1 and self.nbytes[i] < self.nbytes[self.inputs[i][0]]:
                place[i] = place[self.inputs[i][0]]  # it is cheaper to move what it makes
            else:
                free.append(i)
        if not free:
            return
        follow = self._follow_inputs(free)
        if len(free) > 1 and self._seconds(free, spread := [homes[i] for i in free]) < (
            self._seconds(free, follow)
        ):
            follow = spread
        for i, d in zip(free, follow, strict=True):
            place[i] = d

    def _follow_inputs(self, group: list[int]) -> list[int]:
        """Choose for each task the device that holds the most bytes of its inputs.

        A tie goes to the home device of the task's block if it is among the tied, else to the tied
        device that has the least to fetch.
        """
        place, nbytes, homes = self.place, self.nbytes, self.homes
        fetched = [0] * len(self.machine.devices)  # bytes to fetch; inputs of no bytes count 1
        out, ties = [], []
        for n, i in enumerate(group):
            inputs = self.inputs[i]
            chosen = place[inputs[0]]
            if any(place[j] != chosen for j in inputs):
                held: dict[int, int] = {}
                for j in inputs:
                    held[place[j]] = held.get(place[j], 0) + nbytes[j] + 1
                most = max(held.values())
                best = sorted([d for d, size in held.items() if size == most])
                rest = sum(held.values()) - most
                if type(self.keys[i]) is tuple and homes[i] in best:
                    chosen = homes[i]
                else:
                    chosen = min(best, key=fetched.__getitem__)
                    if len(best) > 1:
                        ties.append((n, best, rest))
                fetched[chosen] += rest
            out.append(chosen)
        for _ in range(ROUNDS):
            for n, best, rest in ties:
                least = min(best, key=fetched.__getitem__)
                if fetched[least] + rest < fetched[out[n]]:
                    fetched[out[n]] -= rest
                    fetched[least] += rest
                    out[n] = least
        return out

    def _seconds(self, group: list[int], where: list[int]) -> float:
        """How long the busiest device takes over a group, with what it must fetch first."""
        machine, nbytes, place = self.machine, self.nbytes, self.place
        busy = [0.0] * len(machine.devices)
        fetched: set[tuple[int, int]] = set()
        for i, d in zip(group, where, strict=True):
            moved = nbytes[i]
            for j in self.inputs[i]:
                moved += nbytes[j]
                if place[j] != d and (j, d) not in fetched:
                    fetched.add((j, d))
                    busy[d] += machine.copy_seconds(nbytes[j], place[j], d)
            busy[d] += machine.step_seconds(moved)
        return max(busy)
