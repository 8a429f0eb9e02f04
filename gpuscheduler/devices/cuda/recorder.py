"""Record the launches of a run, to replay them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np

from ...frontend.task import kernels_of, members_of
from ...fusion.task import KernelTask
from ...ir.expr import Out
from ...plan.batching import SMALL
from ...plan.plan import Plan, Step
from ...values import deep_leaves, map_deep_leaves
from .kernels import Kernels
from .launch import PreparedKernel, PreparedProgram, all_on_device, argument_rows, round_up
from .replay import (
    TOGETHER,
    NotReplayable,
    Replay,
    ReplayFetch,
    ReplayFree,
    ReplayInput,
    ReplayKernel,
    ReplayLane,
    ReplayLaunch,
)
from .result_rooms import ResultRoom, one_copy_pays


class _RecordedValue(NamedTuple):
    """A value on a place, as it was when the recorder saw it."""

    value: Any
    entries: Any  # the same containers with where in the table each array's address is, or -1
    number: int  # of the value; -1 where it was there before


class ReplayRecorder:
    """Records a run that follows a tape, and makes a `Replay` of it where it can be replayed."""

    def __init__(
        self, plan: Plan, lanes: Sequence[ReplayLane], kernels: Kernels, staged: Any,
        rooms: ResultRoom | None = None,
    ):  # fmt: skip
        self.plan, self.lanes, self.kernels, self.staged = plan, lanes, kernels, staged
        self.rooms = rooms
        self.fit = True
        self.wanted = plan.result_steps
        self._seen: dict[tuple[int, int], _RecordedValue] = {}
        self._turns: list[tuple[int, list[Any]]] = []
        self._given: list[ReplayInput] = []
        self._entries = 0
        self._within: dict[int, int] = {}  # where in the one piece that a launch makes
        self._values = 0
        self._results: list[tuple[int, ReplayLaunch]] = []
        self._into: set[int] = set()
        self._between: set[tuple[int, int]] = set()

    def replay(self) -> Replay | None:
        """The replay of the recorded run; None where it cannot be replayed."""
        if not self.fit:
            return None
        into, between = sorted(self._into), sorted(self._between)
        return Replay(
            self._turns, self._given, self._entries, self._values, self._results, into, between,
            self.rooms,
        )  # fmt: skip

    # ---- what the run tells

    def begin_lane(self, place: int) -> None:
        """Begin with a lane's next orders."""
        self._turns.append((place, []))

    def record_launch(self, i: int, waits: Iterable[int], held: dict[int, Any]) -> None:
        """Record the launch of a step, whose value is in `held`."""
        if not self.fit:
            return
        place = self._turns[-1][0]
        try:
            self._record_launch(place, i, waits, held)
        except NotReplayable:
            self.fit = False

    def record_fetch(self, i: int, src: int, held: dict[int, dict[int, Any]]) -> None:
        """Record the copy of a value to the lane that was begun last."""
        if not self.fit:
            return
        place = self._turns[-1][0]
        try:
            if (src, place) in self.staged:
                raise NotReplayable
            source = self._recorded_value(src, i, held[src])
            copy = held[place][i].value
            number = self._number()
            entries = self._new_entries(copy)
            pieces = self._pieces(source, entries, copy)
            self._seen[place, i] = _RecordedValue(copy, entries, number)
            self._turns[-1][1].append(ReplayFetch(i, number, src, source.number, pieces))
            self._into.add(place)
            if source.number >= 0:
                self._between.add((src, place))
        except NotReplayable:
            self.fit = False

    def record_free(self, i: int) -> None:
        """Record that a step's value is let go."""
        if self.fit:
            place, orders = self._turns[-1]
            orders.append(ReplayFree(self._seen.pop((place, i)).number))

    # ---- what it makes of that

    def _number(self) -> int:
        self._values += 1
        return self._values - 1

    def _entry(self, count: int = 1) -> int:
        self._entries += count
        return self._entries - count

    def _new_entries(self, value: Any) -> Any:
        def entry(leaf: Any) -> int:
            return self._entry() if isinstance(leaf, cupy.ndarray) and leaf.nbytes else -1

        return map_deep_leaves(entry, value)

    def _recorded_value(self, place: int, i: int, held: dict[int, Any]) -> _RecordedValue:
        """A value on a place; one that was there before is given to each run."""
        seen = self._seen.get((place, i))
        if seen is None:
            if not self.plan.steps[i].fixed:
                raise NotReplayable
            value = held[i].value
            seen = self._seen[place, i] = _RecordedValue(value, self._new_entries(value), -1)
            for n, (leaf, entry) in enumerate(
                zip(deep_leaves(value), deep_leaves(seen.entries), strict=True)
            ):
                if entry >= 0:
                    rest = leaf.data.ptr % 16
                    self._given.append(
                        ReplayInput(
                            place, i, n, entry, leaf.shape, leaf.strides, leaf.dtype,
                            leaf.data.device_id, rest,
                        )
                    )  # fmt: skip
        return seen

    def _pieces(
        self, source: _RecordedValue, entries: Any, copy: Any
    ) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """What has to be copied of a value, and where in it each array of the copy is."""
        arrays = []  # bytes, and entries there and here
        rests = []  # of the copies' addresses, by 16
        for leaf, at, to, here in zip(
            deep_leaves(source.value),
            deep_leaves(source.entries),
            deep_leaves(entries),
            deep_leaves(copy),
            strict=True,
        ):
            if isinstance(leaf, cupy.ndarray) and leaf.nbytes:
                if not (leaf.flags.c_contiguous or leaf.flags.f_contiguous):
                    raise NotReplayable
                arrays.append((leaf.nbytes, at, to))
                rests.append(here.data.ptr % 16)
        within = self._within
        if arrays and all(at in within for _, at, _ in arrays):
            first = min(arrays, key=lambda a: within[a[1]])[1]
            size = max(within[at] + n for n, at, _ in arrays) - within[first]
            # kernels that read the copies were chosen for arrays that are aligned so
            same = all(
                (within[at] - within[first]) % 16 == rest
                for (_, at, _), rest in zip(arrays, rests, strict=True)
            )
            if same and one_copy_pays(size, sum(n for n, _, _ in arrays)):
                return [(size, first, [(to, within[at] - within[first]) for _, at, to in arrays])]
        return [(n, at, [(to, 0)]) for n, at, to in arrays]

    def _record_launch(
        self, place: int, i: int, waits: Iterable[int], held: dict[int, Any]
    ) -> None:
        step, lane = self.plan.steps[i], self.lanes[place]
        task = step.task
        single, members = not members_of(task), list[KernelTask](kernels_of(task))
        read, aligned = self._read_addresses(place, step, members, held)
        first, part, writes = members[0], None, True
        if self.rooms is not None and i in self.rooms.tasks:
            first, part = self.rooms.tasks[i], self.rooms.offset_of(i)
            writes = not part % 16
        if self.kernels.is_broken(first.program) or (not first.names and not first.makes_on_device):
            raise NotReplayable
        every = aligned and writes
        ready = self.kernels.code.get_prepared(first.program, lane.device, (every, writes), single)
        given, count = ready.program.inputs, len(members)
        wanted = i in self.wanted
        sizes, which, within = _memory(ready, count, single, wanted, part)
        begin = self._entry(len(which))
        if len(sizes) == 1:
            self._within.update(enumerate(within, begin))
        kernels = []
        done = 0
        for prepared in ready.kernels:
            made = prepared.generated
            addresses = []  # of each slot: entries and offsets of all items
            for slot, n, offset in made.inputs:
                if n < given:
                    addresses.append((slot, [(e, d + offset) for e, d in [r[n] for r in read]]))
                else:
                    start = begin + (n - given) * count
                    addresses.append((slot, [(start + m, offset) for m in range(count)]))
            for slot, _, _ in prepared.outputs:
                start = begin + done * count
                addresses.append((slot, [(start + m, 0) for m in range(count)]))
                done += 1
            kernels.append(_kernel(prepared, addresses, [f.positions for f in members]))
        number = self._number()
        launch = ReplayLaunch(
            i, number, tuple([self._seen[place, j].number for j in waits]), sizes,
            np.array(which, np.intp), np.array(within, np.uint64), begin, begin + len(which),
            kernels, bool(self.plan.crossings[i]), ready if wanted else None, single,
            None if part is None else (first.array[0], self.rooms.strides),  # type: ignore[index,union-attr]
        )  # fmt: skip
        self._turns[-1][1].append(launch)
        if wanted:
            self._results.append((place, launch))
        entries = _made_entries(ready, begin, count, single)
        self._seen[place, i] = _RecordedValue(held[i].value, entries, number)

    def _read_addresses(
        self, place: int, step: Step, members: list[KernelTask], held: dict[int, Any]
    ) -> tuple[list[list[tuple[int, int]]], bool]:
        """Return where the table has the addresses of each task's arrays, and what to add to them.

        Returns also whether all arrays are aligned.
        """
        parts: dict[Any, tuple[Any, Any, int]] = {}
        picks = step.picks or ((),) * len(step.names)
        for name, j, path in zip(step.names, step.sources, picks, strict=True):
            value, entries, _ = self._recorded_value(place, j, held)
            offset = 0
            for n in path:
                part = value[n]
                if isinstance(value, cupy.ndarray):
                    offset += n * value.strides[0]
                else:
                    entries = entries[n]
                value = part
            parts[name] = value, entries, offset
        values = {name: value for name, (value, _, _) in parts.items()} | step.constants
        out, aligned = [], True
        for fused in members:
            arrays = fused.arrays(values)
            if arrays is None or not all_on_device(arrays, self.lanes[place].device):
                raise NotReplayable
            aligned = aligned and not any(a.data.ptr % 16 for a in arrays)
            row = []
            for name, expects in fused.inputs():
                if name in step.constants:
                    if any(foreseen is not None for foreseen in expects):
                        raise NotReplayable
                    continue
                value, entries, offset = parts[name]
                numbers = deep_leaves(entries) if not isinstance(value, cupy.ndarray) else [entries]
                for entry, foreseen in zip(numbers, expects, strict=True):
                    if foreseen is None:
                        continue
                    if entry < 0:
                        raise NotReplayable
                    row.append((entry, offset))
            out.append(row)
        return out, aligned


def _memory(
    ready: PreparedProgram, count: int, single: bool, wanted: bool, part: int | None = None
) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Return the bytes of each piece of memory that a launch needs for its results.

    Returns also, item by item, which piece each array is in, and where. What the caller gets lies
    in pieces of its own, which go one by one, or the last array in one that there is, `part` bytes
    behind its begin.
    """
    sizes: list[int] = []
    which: list[int] = []
    within: list[int] = []
    every = [n for k in ready.kernels for n in k.sizes]
    if not all(every):
        raise NotReplayable  # nothing is read of an empty array
    if part is not None:
        before = every[:-1]
        return tuple(before), list(range(len(every))), [*[0] * len(before), part]
    if ready.small or (not wanted and sum(map(round_up, every)) * count <= TOGETHER):
        at = 0
        for nbytes in every:
            apart = nbytes if not single and nbytes <= SMALL else round_up(nbytes)
            which += [0] * count
            within += [at + m * apart for m in range(count)]
            at += round_up(apart * count)
        return (at,), which, within
    for nbytes in every:
        if single or nbytes > SMALL:
            which += range(len(sizes), len(sizes) + count)
            within += [0] * count
            sizes += [nbytes] * count
        else:
            which += [len(sizes)] * count
            within += [m * nbytes for m in range(count)]
            sizes.append(nbytes * count)
    return tuple(sizes), which, within


def _made_entries(ready: PreparedProgram, begin: int, count: int, single: bool) -> Any:
    """The value of a launch, with where the address of each of its arrays is."""
    program = ready.program
    sizes = [n for k in ready.kernels for n in k.sizes]

    def member_result(m: int) -> Any:
        return map_deep_leaves(
            lambda leaf: (
                begin + (leaf.array - program.inputs) * count + m if isinstance(leaf, Out) else -1
            ),
            program.result,
        )

    if single:
        return member_result(0)
    result = program.result
    if isinstance(result, Out) and sizes[result.array - program.inputs] <= SMALL:
        return member_result(0)  # one array of all
    return tuple([member_result(m) for m in range(count)])


def _kernel(
    prepared: PreparedKernel,
    addresses: list[tuple[int, list[tuple[int, int]]]],
    positions: list[tuple[int, ...]],
) -> ReplayKernel:
    count = len(positions)
    slots = argument_rows(prepared, positions)
    index = [[items[m][0] for _, items in addresses] for m in range(count)]
    offsets = [[items[m][1] % 2**64 for _, items in addresses] for m in range(count)]
    columns = np.array([slot for slot, _ in addresses], np.intp)
    return ReplayKernel(
        prepared, count, slots, columns, np.array(index, np.intp), np.array(offsets, np.uint64)
    )  # fmt: skip
