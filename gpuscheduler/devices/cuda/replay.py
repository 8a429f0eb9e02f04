"""Replay a launch tape: kernels, arrays and addresses in one table.

Which kernel, with which arrays, in what memory. Its second run on the same lanes makes no arrays
and looks at no task: addresses are in one table, what a kernel reads and writes is gathered from
there, and it is launched.

It imports CuPy. `Recorder` watches a run that follows a tape task by task; `Replay` runs it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import cupy
import numpy as np
from cupy.cuda import Event, Stream, runtime

from ...fusion.task import fill_result
from ...plan.batching import SMALL
from ...plan.plan import Plan
from ...runtime.observe import RunRecord
from ...values import deep_leaves
from .launch import PreparedKernel, PreparedProgram, Workspace, batch_value, queue
from .result_rooms import ResultRoom

#: Bytes of all that a launch makes which lie in one piece of memory, so that one copy takes them
#: elsewhere.
TOGETHER = 2**23


class NotReplayable(Exception):
    """Something that a table of addresses does not describe."""


class ReplayLane(Protocol):
    """The streams of a place."""

    device: int
    home: Stream
    incoming: Stream
    work: Workspace

    def mark(self, stream: Stream, block: bool = False) -> Event: ...


class _ReplayMemory:
    """What a run has in hand."""

    __slots__ = ("events", "held", "lanes", "pieces", "table", "whole")

    def __init__(
        self, table: Any, lanes: Sequence[ReplayLane], held: dict[int, dict[int, Any]], count: int
    ):
        self.table, self.lanes, self.held = table, lanes, held
        self.pieces: list[Any] = [None] * count  # of each value
        self.events: list[Any] = [None] * count  # behind its making
        self.whole: Any = None  # of the result


@dataclass(slots=True)
class ReplayKernel:
    """A kernel of a launch; arrays are in the columns of its slots."""

    prepared: PreparedKernel
    count: int
    slots: Any
    columns: Any
    index: Any  # of the table, for each item and column
    offsets: Any  # bytes to add

    def launch(self, table: Any, work: Workspace) -> None:
        slots, count = self.slots, self.count
        slots[:count, self.columns] = table[self.index] + self.offsets
        queue(self.prepared, slots, slots, count, work)


@dataclass(slots=True)
class ReplayLaunch:
    """All kernels of a step."""

    step: int
    number: int
    waits: tuple[int, ...]  # values that have to be here
    sizes: tuple[int, ...]  # bytes of each piece of memory
    which: Any  # piece of each array that it makes
    within: Any  # ... and where in it, bytes
    begin: int  # of their addresses in the table
    end: int
    kernels: list[ReplayKernel]
    crosses: bool  # whether other places read it
    ready: PreparedProgram | None  # where the caller gets the value
    single: bool
    #: Shape and strides of what it makes, where that is part of the run's result.
    part: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def do(self, memory: _ReplayMemory, place: int) -> None:
        lane, table, events = memory.lanes[place], memory.table, memory.events
        for number in self.waits:
            lane.home.wait_event(events[number])
        pieces = [cupy.cuda.alloc(n) for n in self.sizes]
        if self.part is not None:
            pieces.append(memory.whole)
        if len(pieces) == 1:
            table[self.begin : self.end] = self.within + pieces[0].ptr
        elif pieces:
            begins = np.array([p.ptr for p in pieces], np.uint64)
            table[self.begin : self.end] = begins[self.which] + self.within
        memory.pieces[self.number] = pieces
        for kernel in self.kernels:
            kernel.launch(table, lane.work)
        if self.crosses or self.ready is not None:
            memory.events[self.number] = lane.mark(lane.home)

    def value(self, pieces: list[Any]) -> Any:
        """What the caller gets."""
        assert self.ready is not None
        program, count = self.ready.program, self.kernels[0].count
        which, within = self.which.tolist(), self.within.tolist()
        if self.part is not None:
            shape, strides = self.part
            dtype = self.ready.kernels[-1].outputs[-1][2]
            return cupy.ndarray(shape, dtype, pieces[-1] + within[-1], strides)
        made: list[Any] = []
        at = 0
        for prepared in self.ready.kernels:
            for (_, shape, dtype), nbytes in zip(prepared.outputs, prepared.sizes, strict=True):
                if not self.single and nbytes <= SMALL:
                    first = pieces[which[at]] + within[at]
                    made.append(cupy.ndarray((count, *shape), dtype, first))
                else:
                    mine = [
                        cupy.ndarray(shape, dtype, pieces[which[at + m]] + within[at + m])
                        for m in range(count)
                    ]
                    made.append(mine[0] if self.single else mine)
                at += count
        if not self.single:
            return batch_value(program, made)
        return fill_result(program, [None] * program.inputs + made, False)


@dataclass(slots=True)
class ReplayFetch:
    """Copies of a value from another place."""

    step: int
    number: int
    src: int
    source: int  # the value there; -1 where it was there before
    #: bytes, from where; and the entry of each array in it, with where that begins
    pieces: list[tuple[int, int, list[tuple[int, int]]]]

    def do(self, memory: _ReplayMemory, place: int) -> None:
        lane, there, table = memory.lanes[place], memory.lanes[self.src], memory.table
        stream = lane.incoming
        if self.source >= 0:
            stream.wait_event(memory.events[self.source])
        stream.use()
        kept = []
        for nbytes, begin, parts in self.pieces:
            piece = cupy.cuda.alloc(nbytes)
            kept.append(piece)
            to, at = piece.ptr, int(table[begin])
            if there.device == lane.device:
                kind = runtime.memcpyDeviceToDevice
                runtime.memcpyAsync(to, at, nbytes, kind, stream.ptr)
            else:
                runtime.memcpyPeerAsync(to, lane.device, at, there.device, nbytes, stream.ptr)
            for entry, offset in parts:
                table[entry] = to + offset
        lane.home.use()
        memory.pieces[self.number] = kept
        memory.events[self.number] = done = lane.mark(stream)
        if self.source < 0:
            memory.held[self.src][self.step].reads.append(done)


@dataclass(slots=True)
class ReplayFree:
    number: int

    def do(self, memory: _ReplayMemory, place: int) -> None:
        memory.pieces[self.number] = None


@dataclass(slots=True)
class ReplayInput:
    """An array that exists before the run: the place of its address, and its layout."""

    place: int
    step: int
    leaf: int
    entry: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    device: int
    rest: int  # of its address, by 16


@dataclass(eq=False)
class Replay:
    """The launches of a run, with open places for the addresses of its inputs."""

    turns: list[tuple[int, list[ReplayLaunch | ReplayFetch | ReplayFree]]]
    given: list[ReplayInput]
    entries: int
    values: int
    results: list[tuple[int, ReplayLaunch]]
    into: list[int]  # places that fetch
    between: list[tuple[int, int]]  # pairs of places; what the first one made, the second fetches
    rooms: ResultRoom | None = None
    table: Any = field(init=False)
    #: With what the addresses were filled in, if they stay what they are as long as that does.
    filled: tuple[int, ref[Plan]] | None = field(default=None, init=False)
    #: The latest run whose launches were measured, and how many runs ago that was.
    sample: RunRecord | None = field(default=None, init=False)
    since: int = field(default=0, init=False)
    copies: bool = field(init=False)  # whether it copies what it is given to other places

    def __post_init__(self) -> None:
        self.table = np.zeros(self.entries, np.uint64)
        every = [order for _, orders in self.turns for order in orders]
        self.copies = any(type(order) is ReplayFetch and order.source < 0 for order in every)

    def is_current(self, given: tuple[int, Plan] | None) -> bool:
        """Whether the last run's addresses still hold, and no input has to be copied.

        Then its streams have waited for the making of these inputs.
        """
        return not self.copies and self._is_filled(given)

    def _is_filled(self, given: tuple[int, Plan] | None) -> bool:
        filled = self.filled
        if filled is None or given is None:
            return False
        return filled[0] == given[0] and filled[1]() is given[1]

    def fill_addresses(
        self, held: dict[int, dict[int, Any]], given: tuple[int, Plan] | None
    ) -> bool:
        """Fill in addresses; False where an array's layout differs from the recorded one.

        The addresses are the last run's if `given` has not changed: the count of moved chunks
        before, and the plan whose chunks all arrays are.
        """
        if self._is_filled(given):
            return True
        self.filled = None
        table, known = self.table, None
        every: Sequence[Any] = ()
        for g in self.given:
            value = held[g.place][g.step].value
            if type(value) is cupy.ndarray:
                array = value
            else:
                if value is not known:
                    known, every = value, list(deep_leaves(value))
                array = every[g.leaf] if g.leaf < len(every) else None
            if type(array) is not cupy.ndarray or array.strides != g.strides:
                return False
            memory = array.data
            address = memory.ptr
            if address % 16 != g.rest or memory.device_id != g.device:
                return False
            if array.shape != g.shape or array.dtype != g.dtype:
                return False
            table[g.entry] = address
        if given is not None:
            self.filled = given[0], ref(given[1])
        return True

    def run(
        self, lanes: Sequence[ReplayLane], held: dict[int, dict[int, Any]], probe: Any = None
    ) -> tuple[list[tuple[int, int, Any, Event]], Any]:
        """Queue all launches; a probe measures each of them and each copy.

        Returns place, step, value and event of each result, and the array that holds the results,
        if one does. Raises CuPy's error where memory is refused.
        """
        memory = _ReplayMemory(self.table, lanes, held, self.values)
        device = runtime.getDevice()
        before = {}
        for lane in lanes:
            if lane.device not in before:
                runtime.setDevice(lane.device)
                before[lane.device] = cupy.cuda.get_current_stream()
        whole, rooms = None, self.rooms
        try:
            if rooms is not None:
                runtime.setDevice(lanes[rooms.place].device)
                lanes[rooms.place].home.use()
                memory.whole = rooms.memory()
                whole = rooms.whole_array(memory.whole)
            if probe is None:
                for place, orders in self.turns:
                    runtime.setDevice(lanes[place].device)
                    lanes[place].home.use()
                    for order in orders:
                        order.do(memory, place)
            else:
                self._queue_measured(memory, probe)
            out = []
            for place, launch in self.results:
                runtime.setDevice(lanes[place].device)
                value = launch.value(memory.pieces[launch.number])
                out.append((place, launch.step, value, memory.events[launch.number]))
            return out, whole
        finally:
            self._order_later_work(memory)
            for other, stream in before.items():
                runtime.setDevice(other)
                stream.use()
            runtime.setDevice(device)

    def _queue_measured(self, memory: _ReplayMemory, probe: Any) -> None:
        """Queue all launches, each measured from when its inputs are there."""
        lanes, events = memory.lanes, memory.events
        for place, orders in self.turns:
            lane = lanes[place]
            runtime.setDevice(lane.device)
            lane.home.use()
            for order in orders:
                if type(order) is ReplayLaunch:
                    for number in order.waits:
                        lane.home.wait_event(events[number])
                    with probe.measure(lane, lane.home, order.step):
                        order.do(memory, place)
                elif type(order) is ReplayFetch:
                    if order.source >= 0:
                        lane.incoming.wait_event(events[order.source])
                    with probe.measure(lane, lane.incoming, order.step, order.src):
                        order.do(memory, place)
                else:
                    order.do(memory, place)

    def _order_later_work(self, memory: _ReplayMemory) -> None:
        """Have later work wait for kernels and copies that still use memory freed here.

        1. The incoming stream of each device that fetches waits for the device's kernels.
        2. The home stream of each device that is fetched from waits for these copies.
        """
        lanes = memory.lanes
        copied = {}
        for place in self.into:
            lane = lanes[place]
            runtime.setDevice(lane.device)
            copied[place] = lane.mark(lane.incoming)
            lane.incoming.wait_event(lane.mark(lane.home))
        for src, dst in self.between:
            runtime.setDevice(lanes[src].device)
            lanes[src].home.wait_event(copied[dst])
