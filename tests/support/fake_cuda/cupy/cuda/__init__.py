"""Devices, streams, events and memory."""

from .. import _device as d
from .._device import Event, PinnedMemory, Stream  # noqa: F401
from . import cublas, cusolver, device, driver, function, memory, nvrtc, runtime  # noqa: F401


class _Null:
    """`Stream.null` is the current device's."""

    def __get__(self, instance, owner):
        return d.null()


Stream.null = _Null()


def get_cublas_handle():
    mine = vars(d.here).setdefault("cublas", {})
    if d.here.device not in mine:
        mine[d.here.device] = cublas.create()
    return mine[d.here.device]


def get_current_stream(device_id=-1):
    return d.current_stream(None if device_id < 0 else device_id)


def PinnedMemoryPointer(mem, offset):
    return d.pinned_buffer(mem, offset)


def get_elapsed_time(start, end):
    return d.elapsed(start, end)


class Device:
    def __init__(self, device=None):  # noqa: F811
        self.id = d.here.device if device is None else int(device)
        if not 0 <= self.id < d.DEVICES:
            raise runtime.CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._before = []

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self):
        return hash(self.id)

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def use(self):
        runtime.setDevice(self.id)
        return self

    def __enter__(self):
        self._before.append(d.here.device)
        return self.use()

    def __exit__(self, *_):
        runtime.setDevice(self._before.pop())

    def synchronize(self):
        with self:
            runtime.deviceSynchronize()

    @property
    def attributes(self):
        return {"MultiProcessorCount": d.PROCESSORS}

    @property
    def compute_capability(self):
        return "90"


class MemoryHook:
    """Hears of the memory that the thread takes from pools, and gives back, while it is entered."""

    name = "MemoryHook"

    def __enter__(self):
        if self.name in vars(d.hooks):
            raise KeyError(f"memory hook {self.name} already exists")
        vars(d.hooks)[self.name] = self
        return self

    def __exit__(self, *_):
        del vars(d.hooks)[self.name]

    def alloc_postprocess(self, **_): ...

    def malloc_postprocess(self, **_): ...

    def free_postprocess(self, **_): ...


class MemoryPointer:
    def __init__(self, mem, ptr, device_id):
        self.mem, self.ptr, self.device_id = mem, ptr, device_id
        self.device = Device(device_id)

    def __add__(self, nbytes):
        return MemoryPointer(self.mem, self.ptr + nbytes, self.device_id)


def alloc(nbytes):
    pooled = d.pools[d.here.device].allocate(nbytes)
    return MemoryPointer(pooled, pooled.memory.ptr, d.here.device)
