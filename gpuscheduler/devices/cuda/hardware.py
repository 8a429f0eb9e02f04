"""The GPUs of a machine: links, memory limits, and what outlives a run."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Device, Event, Stream, runtime

from ...errors import DeviceLost, OutOfMemory
from ...forks import new_lock
from ...frontend.chunk import Key, Places
from ...plan.machine import DISK, HOST, Machine
from ...plan.plan import Plan, no_room
from ...runtime.gather import ResultAssembly
from ...runtime.host_memory import SpillPassage, available_memory
from ...runtime.pools import CallersPool
from ...runtime.protocol import Lease
from ...runtime.spill import SpillStore
from ...runtime.threads import BorrowedTeam, Team, Teams, Worker
from ...values import deep_leaves, map_deep_leaves
from ..cpu import CpuDevices
from . import copies as cuda_copies
from . import dask_backend
from .arrays import Refused, copy_pinned, is_over, to_current_device
from .block_joiner import BlockJoiner
from .caller_order import has_context
from .executor import CudaDevices
from .file_steps import FEWEST_FILES, FILES, PART_OF_CPUS
from .kernels import Kernels
from .lane import DeviceLane, HeldValue
from .links import Links, measure_host_rates, measure_peer_rate, try_links
from .nvml import PlaceSensors
from .pinned import PIECES, PinnedBlocks, StagingPieces, copy_to_numpy
from .ranges import find_ranges
from .result_rooms import ResultRoom, rooms_of

#: The part of the host's memory, and the bytes for each device, that are for what is on its way to
#: files and from there, at most; pieces may take this part of that.
PASSING, PASSING_BYTES = 1 / 4, 2**32
PART_OF_PIECES = 1 / 4


# ---- devices that do not answer any more

#: Devices on which a kernel has failed, and what CUDA says of each: for the rest of the process.
LOST: dict[int, str] = {}


def devices_left() -> list[int]:
    """All devices that answer."""
    every = range(runtime.getDeviceCount())
    if LOST:
        out = _devices_text(i for i in every if i in LOST)
        warnings.warn(f"{out} no longer: left out", RuntimeWarning, stacklevel=4)
    return [i for i in every if i not in LOST]


def _devices_text(devices: Iterable[int]) -> str:
    """
    >>> _devices_text([1, 2])
    'cuda:1 and cuda:2 answer'
    """
    names = [f"cuda:{i}" for i in devices]
    return f"{' and '.join(names)} answer{'s'[: len(names) == 1]}"


def _lost_error(devices: Iterable[int]) -> DeviceLost:
    """What to say of these, which are lost."""
    gone = [i for i in dict.fromkeys(devices) if i in LOST]
    others = [str(i) for i in range(runtime.getDeviceCount()) if i not in LOST]
    use = f"cuda:{','.join(others)}" if others else "cpu"
    also = ""
    if others and runtime.getDevice() in LOST:  # where CuPy itself computes
        also = f", behind cupy.cuda.Device({others[0]}).use(),"
    return DeviceLost(
        f"{_devices_text(gone)} no longer: {'; '.join(dict.fromkeys(LOST[i] for i in gone))}. "
        "A kernel has "
        "failed there, this one or one before it, and CUDA gives such a device to no process that "
        f"had it: what was there is lost. To go on, use Scheduler(devices={use!r}){also} or start "
        "the process anew"
    )


def _error_of_device(device: int) -> str | None:
    """What CUDA says of a device that does not answer; None where it does."""
    try:
        with Device(device):
            runtime.deviceSynchronize()
    except runtime.CUDARuntimeError as error:
        return str(error)
    return None


def _root(array: Any) -> Any:
    """The array that owns the memory of this one."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


class CudaHardware:
    """The GPUs with these ids, one place for each; a repeated id makes several places on one GPU.

    `limit` turns the free bytes of a place into its memory limit. `staged` are pairs of places
    whose copies go through pinned host memory although they could go directly (for tests).
    """

    kind = "cuda"

    def __init__(
        self,
        ids: list[int],
        limit: Callable[[int], int] = lambda free: int(0.9 * free),
        staged: set[tuple[int, int]] | None = None,
        spill_directory: str | None = None,
        fast_math: bool = False,
        host_memory: int | None = None,
        spill_compression: str | None = None,
        threads: int | None = None,
    ):
        count = runtime.getDeviceCount()
        if LOST and not ids:
            raise _lost_error(LOST)
        if not ids or any(i >= count for i in ids):
            raise RuntimeError(
                f"devices cuda:{','.join(map(str, ids))} were asked for, and this machine has "
                f"{count} CUDA device{'s'[: count != 1]}: use 'cuda', or ids from 0 to {count - 1}"
            )
        if not LOST.keys().isdisjoint(ids):
            raise _lost_error(ids)
        self.ids = ids
        self.names = tuple(_name(i) for i in ids)
        host = int(0.9 * available_memory()) if host_memory is None else host_memory
        self.pinned = PinnedBlocks()
        self.inside = PinnedBlocks(inside=True, limit=host)
        passing = min(int(PASSING * host), PASSING_BYTES * len(ids))
        share = int(PART_OF_PIECES * passing) // len(set(ids))
        cpus = int(PART_OF_CPUS * (os.cpu_count() or 1))
        self.files = max(FEWEST_FILES, min(FILES, cpus // len(ids)))  # threads for each place
        # that compute steps for each place: what CuPy has refused, and functions of NumPy's arrays
        self.host_threads = max(1, (cpus if threads is None else threads) // len(ids))
        most = PIECES * self.files * max(map(ids.count, ids))
        # for arrays that go to each device
        self.pieces = {i: StagingPieces(self.inside, share, most) for i in dict.fromkeys(ids)}
        self.passage = SpillPassage(passing - share * len(self.pieces))
        self.store = SpillStore(spill_directory, compression=spill_compression)
        self.kernels = Kernels(fast_math)
        self.ranges = find_ranges()  # None: no profiler is attached
        self.nvml = PlaceSensors(ids, runtime.getDeviceProperties)
        self._kept: dict[int, dict[int, Any]] = {}  # by the array's id: its copies on devices
        self.lent: dict[int, dict[int, Stream]] = {}  # device -> streams that read results
        self.staged = (staged or set()) | try_links(ids)
        peer = tuple(
            tuple(20e9 if (a, b) in self.staged else 390e9 for b in range(len(ids)))
            for a in range(len(ids))
        )
        memory = tuple(limit(_free_bytes(i) // ids.count(i)) for i in ids)
        self.machine = Machine(memory, peer, (55e9,) * len(ids), host - passing)
        self._teams: dict[int, Teams] = {}
        self._lock = new_lock()
        self._others = [i for i in range(count) if i not in ids]  # devices of the machine

    def in_use(self) -> list[int]:
        """The devices on which the caller may have arrays: these, and others with a context."""
        out = list(dict.fromkeys(self.ids))
        if self._others:
            out += [i for i in self._others if i not in LOST and has_context(i)]
        return out

    def callers_streams(self) -> Iterator[tuple[int, Stream]]:
        """The caller's current stream of each device in use, while that device is current."""
        before = runtime.getDevice()
        try:
            for device in self.in_use():
                runtime.setDevice(device)
                yield device, cupy.cuda.get_current_stream()
        finally:
            runtime.setDevice(before)

    def ignore_errors(self, device: int) -> AbstractContextManager[Any]:
        """Ignore CUDA's errors on a device that the scheduler does not use.

        Such a device may have been lost; a run that does not use it goes on. Code that reads
        something there gets the error.
        """
        return nullcontext() if device in self.ids else suppress(runtime.CUDARuntimeError)

    def device_copy(self, array: Any, place: int) -> Any:
        """The device's copy of a host array that nobody changes; it lives as long as that.

        It is sent on the caller's stream.
        """
        copies = self._kept.get(id(array))
        if copies is None:
            copies = self._kept[id(array)] = {}
            weakref.finalize(array, self._kept.pop, id(array), None).atexit = False
        device = self.ids[place]
        if device not in copies:
            with Device(device):
                copies[device] = cupy.asarray(array)
                self.lend(device, cupy.cuda.get_current_stream())  # runs of other threads read it
        return copies[device]

    def home(self, value: Any) -> int | None:
        found = next((v for v in deep_leaves(value) if isinstance(v, cupy.ndarray)), None)
        if found is None:
            return None
        device = found.device.id
        return self.ids.index(device) if device in self.ids else None

    def device_value(self, places: Places) -> Any:
        for place, held in places.items():
            if place >= 0:
                return held.value
        return None

    def caller_value(self, key: Key, place: int, places: Places) -> Any:
        """A chunk's value on the GPU where it belongs.

        The caller's stream of each device waits until it is made.
        """
        device = self.ids[place]
        if place in places:
            ready = places[place].ready  # a run that may move it forgets this at any time
            if ready is not None and not is_over(ready):
                for other, current in self.callers_streams():
                    with self.ignore_errors(other):
                        current.wait_event(ready)
                        self.lend(other, current)
            return places[place].value
        if HOST in places or DISK in places:
            value = places[HOST].value if HOST in places else self.store.read(places[DISK], key)
            with Device(device):
                return map_deep_leaves(to_current_device, value)
        other = max(places)
        value = self.value_behind(places[other], self.ids[other])
        with Device(device):
            stream = cupy.cuda.get_current_stream()
            moved = map_deep_leaves(lambda v: cuda_copies.copy_to_device(v, device, stream), value)
            stream.synchronize()  # until then the value may not go
            return moved

    def value_behind(self, held: HeldValue, device: int) -> Any:
        """A held value; the caller's current stream of its device waits until it is made."""
        ready = held.ready  # a run that may move it forgets this at any time
        if ready is not None:
            with Device(device):
                current = cupy.cuda.get_current_stream()
                current.wait_event(ready)
                self.lend(device, current)
        return held.value

    def value_on_host(self, key: Key, place: int, places: Places) -> Any:
        if place in places or not {HOST, DISK} & places.keys():
            return map_deep_leaves(self.to_numpy, self.caller_value(key, place, places))
        value = places[HOST].value if HOST in places else self.store.read(places[DISK], key)
        return map_deep_leaves(copy_pinned, value)

    def to_numpy(self, value: Any) -> Any:
        if not isinstance(value, cupy.ndarray):
            return value
        with value.device:
            return copy_to_numpy(value, self.pinned)

    def forget(self, places: Places) -> None:
        if DISK in places:
            self.store.remove(places[DISK])

    def callers_device(self) -> int | None:
        device = runtime.getDevice()
        return self.ids.index(device) if device in self.ids else None

    def settings(self) -> dict[str, Any]:
        dask_backend.register()
        return {"array.backend": "cupy"}

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if np.dtype(dtype).hasobject:
            return np.empty(shape, dtype)
        return self.pinned.array(shape, dtype)

    def can_replay(self, plan: Plan) -> bool:
        return plan.kernels_only

    def copy_in(self, arrays: list[Any], place: int) -> list[Any]:
        """Host arrays on the device of a place, in one copy for all that lie in one buffer."""
        buffers: dict[int, list[int]] = {}
        for n, a in enumerate(arrays):
            buffers.setdefault(id(_root(a)), []).append(n)
        out: list[Any] = [None] * len(arrays)
        with Device(self.ids[place]):
            stream = cupy.cuda.get_current_stream()  # on which the memory may have been in use
            for together in buffers.values():
                first = min(arrays[n].ctypes.data for n in together)
                end = max(arrays[n].ctypes.data + arrays[n].nbytes for n in together)
                held = cupy.empty(end - first, np.uint8)
                kind = runtime.memcpyHostToDevice
                runtime.memcpyAsync(held.data.ptr, first, end - first, kind, stream.ptr)
                for n in together:
                    a, at = arrays[n], arrays[n].ctypes.data - first
                    out[n] = held[at : at + a.nbytes].view(a.dtype).reshape(a.shape)
            stream.synchronize()
        return out

    def rooms(self, plan: Plan, assembly: ResultAssembly) -> ResultRoom | None:
        """The parts of a result that its run can write where they belong in one array."""
        return rooms_of(plan, assembly, self.callers_device(), self.kernels)

    def _joiner(self) -> BlockJoiner:
        return BlockJoiner(self.kernels, self.pinned, self._order_reuse_behind)

    def join(self, blocks: Any, made: Any = None) -> Any:
        return self._joiner().join(blocks, made)

    def bring(self, blocks: Any, boxes: Sequence[tuple[slice, ...]] = (), made: Any = None) -> Any:
        return self._joiner().bring(blocks, boxes, made)

    def send(self, array: Any) -> Any:
        """Copy a host array to the caller's device, and wait: its memory may be reused then."""
        device = runtime.getDevice()
        try:
            out = cupy.asarray(array)
        except Refused as error:
            raise OutOfMemory(no_room(array.nbytes, f"GPU {device}")) from error
        cupy.cuda.get_current_stream().synchronize()
        return out

    def _order_reuse_behind(self, stream: Stream) -> None:
        """Order later runs and the caller's streams behind `stream`.

        It still reads memory that runs have let go of, and writes a result.
        """
        event = Event(disable_timing=True)
        event.record(stream)
        for teams in list(self._teams.values()):
            for team in list(teams.leased):
                for lane in team.lanes:
                    lane.home.wait_event(event)
                    lane.incoming.wait_event(event)
        for device, current in self.callers_streams():
            with self.ignore_errors(device):
                current.wait_event(event)

    def has_other_runs(self, team: Team) -> bool:
        """Whether any other team has a run."""
        return any(t is not team for teams in list(self._teams.values()) for t in teams.leased)

    def lend(self, device: int, stream: Stream) -> None:
        """Remember a stream that was given a result: later runs reuse memory behind it."""
        self.lent.setdefault(device, {})[stream.ptr] = stream

    @property
    def trouble(self) -> str:
        gone = [i for i in dict.fromkeys(self.ids) if i in LOST]
        return f"{_devices_text(gone)} no longer" if gone else ""

    def recognize_loss(self, error: BaseException) -> DeviceLost | None:
        if type(error).__module__.partition(".")[0] not in ("cupy", "cupy_backends", "numba"):
            return None
        for i in dict.fromkeys(self.ids):
            silence = _error_of_device(i)
            if silence is not None:
                LOST[i] = silence
        return _lost_error(self.ids) if self.trouble else None

    @contextmanager
    def lease(self, num_workers: int | None, pool: CallersPool | None) -> Iterator[Lease]:
        if self.trouble:
            raise _lost_error(self.ids)
        n = len(self.ids)
        if pool is not None:
            # the caller's threads: host tasks, and CuPy on the caller's own device
            borrowed = BorrowedTeam(pool)
            yield Lease(
                Machine.uniform(1, memory=self.machine.memory[0]),
                lambda plan, g, *_: CpuDevices(plan, borrowed, g, self.store),
                borrowed.threads,
            )
            return
        if num_workers is not None:
            n = max(1, min(n, num_workers))
        with self._lock:
            teams = self._teams.setdefault(n, Teams(lambda: self._team(n)))
        m = self.machine
        machine = m if n == len(self.ids) else Machine(
            m.memory[:n], tuple(row[:n] for row in m.peer[:n]), m.host[:n], m.host_memory
        )  # fmt: skip
        with teams.lease() as team:
            yield Lease(
                machine, lambda plan, g, told, tape: CudaDevices(plan, team, g, self, told, tape)
            )

    def _team(self, n: int) -> Team:
        lanes = [DeviceLane.create(place, self.ids[place]) for place in range(n)]

        def setup(lane: DeviceLane) -> Callable[[], None]:
            def use() -> None:
                Device(lane.device).use()
                # entered for good, not only used: tasks that enter another stream return to it
                lane.home.__enter__()

            return use

        workers = [
            Worker(f"gpuscheduler-cuda-{lane.place}", setup(lane), lane.close, lane.settle)
            for lane in lanes
        ]
        return Team(workers, lanes, self.files)

    def free(self) -> list[int]:
        """Bytes that are free on each place's GPU now."""
        return [_free_bytes(i) for i in self.ids]

    def links(self) -> Links:
        """Measure every link, one at a time, with copies of 256 MiB."""
        n = len(self.ids)
        gbs = [[0.0] * n for _ in range(n)]
        host = []
        for a in range(n):
            for b in range(n):
                if a != b and (a, b) not in self.staged:
                    gbs[a][b] = measure_peer_rate(self.ids[a], self.ids[b])
            host.append(measure_host_rates(self.ids[a], self.pinned))
        for a, b in self.staged:
            gbs[a][b] = 1 / (1 / host[a][1] + 1 / host[b][0])
        return Links(gbs, host, self.staged)

    def synchronize(self) -> None:
        for i in sorted(set(self.ids)):
            with Device(i):
                runtime.deviceSynchronize()

    def when_short(self, shed: Callable[[], object]) -> None:
        self.pinned.shed = shed

    def when_compiled(self, note: Callable[..., None]) -> None:
        self.kernels.code.note = note

    def close(self) -> None:
        with self._lock:
            every, self._teams = list(self._teams.values()), {}
        for teams in every:
            teams.close()
        self.store.retire()
        for i, pieces in self.pieces.items():
            if i not in LOST:
                pieces.close()
        self.pinned.clear()
        self.pinned.shed = lambda: None
        self.inside.clear()
        for i in sorted(set(self.ids) - LOST.keys()):
            with Device(i):
                cupy.get_default_memory_pool().free_all_blocks()


def _name(device: int) -> str:
    name = runtime.getDeviceProperties(device)["name"]
    return f"{name.decode() if isinstance(name, bytes) else name} (cuda:{device})"


def _free_bytes(device: int) -> int:
    with Device(device):
        return int(runtime.memGetInfo()[0]) + cupy.get_default_memory_pool().free_bytes()
