"""A tape made concrete: which kernel, with which arrays, in what memory. Its second run on the same
lanes makes no arrays and looks at no task: addresses are in one table, what a kernel reads and
writes is gathered from there, and it is launched.

It imports CuPy. `Recorder` watches a run that follows a tape task by task; `Replay` runs it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import ref

import cupy
import numpy as np
from cupy.cuda import Event, Stream, runtime

from .batches import SMALL, Batch
from .expr import Out, View
from .following import is_contiguous
from .fuse import Fused, filled
from .gather import Gathering
from .launch import (
    Kernels,
    Prepared,
    Ready,
    Workspace,
    all_here,
    batch_value,
    queue,
    rounded,
    rows,
)
from .plan import Plan, Step
from .sizes import leaves, map_leaves

#: Bytes that are copied sooner at once than in parts, whatever lies between these.
CLOSE = 2**16
#: Bytes of all that a launch makes which lie in one piece of memory, so that one copy takes them
#: elsewhere.
TOGETHER = 2**23


def one_copy_pays(size: int, nbytes: int) -> bool:
    """Whether so many bytes are copied sooner all at once, with what lies between them."""
    return size <= max(CLOSE, 2 * nbytes)


#: Bytes of a result from which its parts are written to where they belong.
LEAST_WHOLE = 2**24


class Rooms(NamedTuple):
    """A result of which one place writes parts to where they belong in it: by step, the elements in
    front of its part, and the shape of that."""

    place: int
    shape: tuple[int, ...]
    nbytes: int
    dtype: Any  # None where no kernel says it: of the first part that there is
    parts: dict[int, tuple[int, tuple[int, ...]]]
    tasks: dict[int, Fused]  # those that write it there themselves, with the strides of the whole

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes."""
        return tuple([n * self.dtype.itemsize for n in View.contiguous(self.shape).strides])

    def at(self, i: int) -> int:
        """Bytes in front of a part."""
        return self.parts[i][0] * int(self.dtype.itemsize)

    def memory(self) -> Any:
        """Memory for the result, on the current device and stream."""
        return cupy.cuda.alloc(self.nbytes)

    def whole(self, memory: Any) -> Any:
        return cupy.ndarray(self.shape, self.dtype, memory)

    def part(self, i: int, memory: Any) -> Any:
        return cupy.ndarray(self.parts[i][1], self.dtype, memory + self.at(i), self.strides)

    def of(self, dtype: Any) -> Rooms | None:
        """The same, where its parts turn out to be of this type; None where they cannot be."""
        fits = math.prod(self.shape) * dtype.itemsize == self.nbytes
        return self._replace(dtype=dtype) if fits else None


def rooms_of(plan: Plan, gathering: Gathering, place: int | None, kernels: Kernels) -> Rooms | None:
    """Where parts of a result can be written to: those that are made on this place, for nothing
    else. None where there are no such."""
    whole = gathering.whole()
    if whole is None or place is None or len(whole.parts) < 2:
        return None
    strides = View.contiguous(whole.shape).strides
    parts, tasks, types = {}, {}, set[Any]()
    for i, slots in whole.parts.items():
        step, task, part = plan.steps[i], plan.steps[i].task, slots[-1]
        if plan.readers[i] or step.place != place or step.fixed or step.aside or i in plan.lent:
            continue
        if type(task) is Batch:  # several blocks
            continue
        shape = tuple([s.stop - s.start for s in part])
        parts[i] = sum([s.start * n for s, n in zip(part, strides, strict=True)]), shape
        if type(task) is not Fused or task.array is None or task.array[0] != shape:
            continue
        types.add(task.array[1])
        (kernel,), program = task.program.kernels, task.program
        if not is_contiguous(View(0, strides), shape):
            if kernel.kept != kernel.shape or shape != kernel.shape:
                continue
            program = kernels.strided(program, strides)
        tasks[i] = task.of(program)
    if len(types) > 1 or not parts:
        return None
    if types:
        (dtype,) = types
        nbytes = math.prod(whole.shape) * dtype.itemsize
    else:
        dtype = None
        nbytes = sum([plan.steps[i].nbytes * len(slots) for i, slots in whole.parts.items()])
    if nbytes < LEAST_WHOLE:
        return None
    return Rooms(place, whole.shape, nbytes, dtype, parts, tasks)


class Unfit(Exception):
    """Something that a table of addresses does not describe."""


class Lane(Protocol):
    """The streams of a place."""

    device: int
    home: Stream
    incoming: Stream
    work: Workspace

    def mark(self, stream: Stream, block: bool = False) -> Event: ...


class _Seen(NamedTuple):
    """A value on a place, as it was when the recorder saw it."""

    value: Any
    entries: Any  # the same containers with where in the table each array's address is, or -1
    number: int  # of the value; -1 where it was there before


class _Memory:
    """What a run has in hand."""

    __slots__ = ("events", "held", "lanes", "pieces", "table", "whole")

    def __init__(
        self, table: Any, lanes: Sequence[Lane], held: dict[int, dict[int, Any]], count: int
    ):
        self.table, self.lanes, self.held = table, lanes, held
        self.pieces: list[Any] = [None] * count  # of each value
        self.events: list[Any] = [None] * count  # behind its making
        self.whole: Any = None  # of the result


@dataclass(slots=True)
class _Kernel:
    """A kernel of a launch; arrays are in the columns of its slots."""

    prepared: Prepared
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
class _Launch:
    """All kernels of a step."""

    step: int
    number: int
    waits: tuple[int, ...]  # values that have to be here
    sizes: tuple[int, ...]  # bytes of each piece of memory
    which: Any  # piece of each array that it makes
    within: Any  # ... and where in it, bytes
    begin: int  # of their addresses in the table
    end: int
    kernels: list[_Kernel]
    crosses: bool  # whether other places read it
    ready: Ready | None  # where the caller gets the value
    single: bool
    #: Shape and strides of what it makes, where that is part of the run's result.
    part: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def do(self, memory: _Memory, place: int) -> None:
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
        return filled(program, [None] * program.inputs + made, False)


@dataclass(slots=True)
class _Fetch:
    """Copies of a value from another place."""

    step: int
    number: int
    src: int
    source: int  # the value there; -1 where it was there before
    #: bytes, from where; and the entry of each array in it, with where that begins
    pieces: list[tuple[int, int, list[tuple[int, int]]]]

    def do(self, memory: _Memory, place: int) -> None:
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
class _Free:
    number: int

    def do(self, memory: _Memory, place: int) -> None:
        memory.pieces[self.number] = None


@dataclass(slots=True)
class _Given:
    """An array that is there before the run: where its address is kept, and how it has to lie."""

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
    """What a run does, with the addresses of the arrays that it is given still to be filled in."""

    turns: list[tuple[int, list[_Launch | _Fetch | _Free]]]
    given: list[_Given]
    entries: int
    values: int
    results: list[tuple[int, _Launch]]
    into: list[int]  # places that fetch
    between: list[tuple[int, int]]  # pairs of places; what the first one made, the second fetches
    rooms: Rooms | None = None
    table: Any = field(init=False)
    #: With what the addresses were filled in, if they stay what they are as long as that does.
    filled: tuple[int, ref[Plan]] | None = field(default=None, init=False)
    copies: bool = field(init=False)  # whether it copies what it is given to other places

    def __post_init__(self) -> None:
        self.table = np.zeros(self.entries, np.uint64)
        every = [order for _, orders in self.turns for order in orders]
        self.copies = any(type(order) is _Fetch and order.source < 0 for order in every)

    def stands(self, given: tuple[int, Plan] | None) -> bool:
        """Whether it can be run as it was the last time, with the same arrays, which it copies
        nowhere: its streams have waited for what was in the making then."""
        return not self.copies and self._is_filled(given)

    def _is_filled(self, given: tuple[int, Plan] | None) -> bool:
        filled = self.filled
        if filled is None or given is None:
            return False
        return filled[0] == given[0] and filled[1]() is given[1]

    def fits(self, held: dict[int, dict[int, Any]], given: tuple[int, Plan] | None) -> bool:
        """Fill in addresses; False where an array lies in another way than the recorded one.

        They are those of the last run if `given` is what it was then: how often chunks have moved
        before, and whose chunks all arrays are.
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
                    known, every = value, list(leaves(value))
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
        self, lanes: Sequence[Lane], held: dict[int, dict[int, Any]]
    ) -> tuple[list[tuple[int, int, Any, Event]], Any]:
        """Queue everything: the place, step, value and event of each result of the run; and the
        array that these are parts of, if so. Raises CuPy's error where memory is refused."""
        memory = _Memory(self.table, lanes, held, self.values)
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
                whole = rooms.whole(memory.whole)
            for place, orders in self.turns:
                runtime.setDevice(lanes[place].device)
                lanes[place].home.use()
                for order in orders:
                    order.do(memory, place)
            out = []
            for place, launch in self.results:
                runtime.setDevice(lanes[place].device)
                value = launch.value(memory.pieces[launch.number])
                out.append((place, launch.step, value, memory.events[launch.number]))
            return out, whole
        finally:
            self._order(memory)
            for other, stream in before.items():
                runtime.setDevice(other)
                stream.use()
            runtime.setDevice(device)

    def _order(self, memory: _Memory) -> None:
        """What is let go of now may be in use still: what comes next is behind that."""
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


class Recorder:
    """Watches a run that follows a tape. What it has seen is a `Replay`, if nothing was unfit."""

    def __init__(
        self, plan: Plan, lanes: Sequence[Lane], kernels: Kernels, staged: Any,
        rooms: Rooms | None = None,
    ):  # fmt: skip
        self.plan, self.lanes, self.kernels, self.staged = plan, lanes, kernels, staged
        self.rooms = rooms
        self.fit = True
        self.wanted = plan.ends
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._turns: list[tuple[int, list[Any]]] = []
        self._given: list[_Given] = []
        self._entries = 0
        self._within: dict[int, int] = {}  # where in the one piece that a launch makes
        self._values = 0
        self._results: list[tuple[int, _Launch]] = []
        self._into: set[int] = set()
        self._between: set[tuple[int, int]] = set()

    def replay(self) -> Replay | None:
        if not self.fit:
            return None
        into, between = sorted(self._into), sorted(self._between)
        return Replay(
            self._turns, self._given, self._entries, self._values, self._results, into, between,
            self.rooms,
        )  # fmt: skip

    # ---- what the run tells

    def turn(self, place: int) -> None:
        self._turns.append((place, []))

    def launched(self, i: int, waits: Iterable[int], held: dict[int, Any]) -> None:
        """A step was launched, and its value is in `held`."""
        if not self.fit:
            return
        place = self._turns[-1][0]
        try:
            self._launched(place, i, waits, held)
        except Unfit:
            self.fit = False

    def fetched(self, i: int, src: int, held: dict[int, dict[int, Any]]) -> None:
        """A value was copied to the place of this turn."""
        if not self.fit:
            return
        place = self._turns[-1][0]
        try:
            if (src, place) in self.staged:
                raise Unfit
            source = self._at(src, i, held[src])
            copy = held[place][i].value
            number = self._number()
            entries = self._new_entries(copy)
            pieces = self._pieces(source, entries, copy)
            self._seen[place, i] = _Seen(copy, entries, number)
            self._turns[-1][1].append(_Fetch(i, number, src, source.number, pieces))
            self._into.add(place)
            if source.number >= 0:
                self._between.add((src, place))
        except Unfit:
            self.fit = False

    def freed(self, i: int) -> None:
        if self.fit:
            place, orders = self._turns[-1]
            orders.append(_Free(self._seen.pop((place, i)).number))

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

        return map_leaves(entry, value)

    def _at(self, place: int, i: int, held: dict[int, Any]) -> _Seen:
        """A value on a place; one that was there before is given to each run."""
        seen = self._seen.get((place, i))
        if seen is None:
            if not self.plan.steps[i].fixed:
                raise Unfit
            value = held[i].value
            seen = self._seen[place, i] = _Seen(value, self._new_entries(value), -1)
            for n, (leaf, entry) in enumerate(
                zip(leaves(value), leaves(seen.entries), strict=True)
            ):
                if entry >= 0:
                    rest = leaf.data.ptr % 16
                    self._given.append(
                        _Given(
                            place, i, n, entry, leaf.shape, leaf.strides, leaf.dtype,
                            leaf.data.device_id, rest,
                        )
                    )  # fmt: skip
        return seen

    def _pieces(
        self, source: _Seen, entries: Any, copy: Any
    ) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """What has to be copied of a value, and where in it each array of the copy is."""
        arrays = []  # bytes, and entries there and here
        rests = []  # of the copies' addresses, by 16
        for leaf, at, to, here in zip(
            leaves(source.value), leaves(source.entries), leaves(entries), leaves(copy), strict=True
        ):
            if isinstance(leaf, cupy.ndarray) and leaf.nbytes:
                if not (leaf.flags.c_contiguous or leaf.flags.f_contiguous):
                    raise Unfit
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

    def _launched(self, place: int, i: int, waits: Iterable[int], held: dict[int, Any]) -> None:
        step, lane = self.plan.steps[i], self.lanes[place]
        task = step.task
        single = type(task) is Fused
        members: list[Fused] = task.members if type(task) is Batch else [task]  # type: ignore[list-item]
        read, aligned = self._read(place, step, members, held)
        first, part, writes = members[0], None, True
        if self.rooms is not None and i in self.rooms.tasks:
            first, part = self.rooms.tasks[i], self.rooms.at(i)
            writes = not part % 16
        if self.kernels.broken(first.program) or (not first.names and first.kind != "cupy.ndarray"):
            raise Unfit
        every = aligned and writes
        ready = self.kernels.ready(first.program, lane.device, (every, writes), single)
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
        launch = _Launch(
            i, number, tuple([self._seen[place, j].number for j in waits]), sizes,
            np.array(which, np.intp), np.array(within, np.uint64), begin, begin + len(which),
            kernels, bool(self.plan.crossing[i]), ready if wanted else None, single,
            None if part is None else (first.array[0], self.rooms.strides),  # type: ignore[index,union-attr]
        )  # fmt: skip
        self._turns[-1][1].append(launch)
        if wanted:
            self._results.append((place, launch))
        entries = _made_entries(ready, begin, count, single)
        self._seen[place, i] = _Seen(held[i].value, entries, number)

    def _read(
        self, place: int, step: Step, members: list[Fused], held: dict[int, Any]
    ) -> tuple[list[list[tuple[int, int]]], bool]:
        """For each task, where in the table the addresses of its arrays are, and what to add to
        these; and whether all arrays are aligned."""
        parts: dict[Any, tuple[Any, Any, int]] = {}
        picks = step.picks or ((),) * len(step.names)
        for name, j, path in zip(step.names, step.sources, picks, strict=True):
            value, entries, _ = self._at(place, j, held)
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
            if arrays is None or not all_here(arrays, self.lanes[place].device):
                raise Unfit
            aligned = aligned and not any(a.data.ptr % 16 for a in arrays)
            row = []
            for name, expects in fused.inputs():
                if name in step.constants:
                    if any(foreseen is not None for foreseen in expects):
                        raise Unfit
                    continue
                value, entries, offset = parts[name]
                numbers = leaves(entries) if not isinstance(value, cupy.ndarray) else [entries]
                for entry, foreseen in zip(numbers, expects, strict=True):
                    if foreseen is None:
                        continue
                    if entry < 0:
                        raise Unfit
                    row.append((entry, offset))
            out.append(row)
        return out, aligned


def _memory(
    ready: Ready, count: int, single: bool, wanted: bool, part: int | None = None
) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Bytes of each piece of memory for what a launch makes; for each array, item by item, which
    it is in, and where. What the caller gets lies in pieces of its own, which go one by one, or the
    last array in one that there is, `part` bytes behind its begin."""
    sizes: list[int] = []
    which: list[int] = []
    within: list[int] = []
    every = [n for k in ready.kernels for n in k.sizes]
    if not all(every):
        raise Unfit  # nothing is read of an empty array
    if part is not None:
        before = every[:-1]
        return tuple(before), list(range(len(every))), [*[0] * len(before), part]
    if ready.small or (not wanted and sum(map(rounded, every)) * count <= TOGETHER):
        at = 0
        for nbytes in every:
            apart = nbytes if not single and nbytes <= SMALL else rounded(nbytes)
            which += [0] * count
            within += [at + m * apart for m in range(count)]
            at += rounded(apart * count)
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


def _made_entries(ready: Ready, begin: int, count: int, single: bool) -> Any:
    """The value of a launch, with where the address of each of its arrays is."""
    program = ready.program
    sizes = [n for k in ready.kernels for n in k.sizes]

    def of(m: int) -> Any:
        return map_leaves(
            lambda leaf: (
                begin + (leaf.array - program.inputs) * count + m if isinstance(leaf, Out) else -1
            ),
            program.result,
        )

    if single:
        return of(0)
    result = program.result
    if isinstance(result, Out) and sizes[result.array - program.inputs] <= SMALL:
        return of(0)  # one array of all
    return tuple([of(m) for m in range(count)])


def _kernel(
    prepared: Prepared,
    addresses: list[tuple[int, list[tuple[int, int]]]],
    positions: list[tuple[int, ...]],
) -> _Kernel:
    count = len(positions)
    slots = rows(prepared, positions)
    index = [[items[m][0] for _, items in addresses] for m in range(count)]
    offsets = [[items[m][1] % 2**64 for _, items in addresses] for m in range(count)]
    columns = np.array([slot for slot, _ in addresses], np.intp)
    return _Kernel(
        prepared, count, slots, columns, np.array(index, np.intp), np.array(offsets, np.uint64)
    )  # fmt: skip
