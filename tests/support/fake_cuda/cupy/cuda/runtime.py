"""The few functions of the CUDA runtime that are called."""

import ctypes
from types import SimpleNamespace

import numpy as np

from .. import _device as d

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = range(4)
memcpyDefault = 4
hostAllocDefault, hostAllocPortable = 0, 1
memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)


class CUDARuntimeError(RuntimeError):
    pass


def getDeviceCount():
    d.alive(d.here.device)
    return d.DEVICES


def getDevice():
    return d.here.device


def setDevice(device):
    if not 0 <= device < d.DEVICES:
        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    d.here.device = device


def deviceSynchronize():
    d.alive(d.here.device)
    with d.lock:
        for stream in d.every_stream():
            if stream.device_id == d.here.device:
                d.finish(stream.clock)


def getDeviceProperties(device):
    return {"name": f"Fake GPU {device}".encode(), "totalGlobalMem": d.MEMORY}


def memGetInfo():
    return d.MEMORY - d.pools[d.here.device].held, d.MEMORY


def driverGetVersion():
    return 13000


def runtimeGetVersion():
    return 13000


def deviceCanAccessPeer(device, peer):
    return int(d.PEERS)


def deviceEnablePeerAccess(peer):
    return None


def _stream(ptr):
    if not ptr:
        return d.null()
    return d.handles[ptr]


def memcpy(to, source, nbytes, kind):
    d.copy(to, source, nbytes, d.null())
    d.null().synchronize()


def memcpyAsync(to, source, nbytes, kind, stream):
    d.copy(to, source, nbytes, _stream(stream))


def memcpy2DAsync(to, pitch, source, source_pitch, width, rows, kind, stream):
    d.copy(to, source, width, _stream(stream), rows, pitch, source_pitch)


def memcpy3DAsync(parameters, stream):
    words = np.ctypeslib.as_array((ctypes.c_uint64 * 20).from_address(parameters)).tolist()
    array, *position, source, source_pitch, _, source_rows = words[:8]
    other_array, *other_position, to, pitch, _, to_rows, width, rows, planes, kind = words[8:]
    if any([array, other_array, *position, *other_position]) or kind not in (2, 3):
        raise CUDARuntimeError("cudaErrorInvalidValue: not what this copies")
    if width > min(pitch, source_pitch) or rows > min(to_rows, source_rows):
        raise CUDARuntimeError("cudaErrorInvalidPitchValue: rows or planes overlap")
    for n in range(planes):
        begin, end = source + n * source_pitch * source_rows, to + n * pitch * to_rows
        d.copy(end, begin, width, _stream(stream), rows, pitch, source_pitch)


def memcpyPeerAsync(to, to_device, source, source_device, nbytes, stream):
    for address, device in ((to, to_device), (source, source_device)):
        found = d.memory_at(address)
        if nbytes and (found is None or found.device != device):
            raise CUDARuntimeError("cudaErrorInvalidValue: not memory of this device")
    if to_device != source_device and not d.PEERS:
        raise CUDARuntimeError("cudaErrorPeerAccessNotEnabled")
    d.copy(to, source, nbytes, _stream(stream))


def memcpyPeer(to, to_device, source, source_device, nbytes):
    memcpyPeerAsync(to, to_device, source, source_device, nbytes, 0)
    d.null().synchronize()


def memsetAsync(to, value, nbytes, stream):
    import ctypes

    found = d.memory_at(to)
    if found is not None:
        found.write(_stream(stream))
    ctypes.memset(to, value, nbytes)


def streamSynchronize(stream):
    _stream(stream).synchronize()


def pointerGetAttributes(pointer):
    found = d.memory_at(pointer)
    kind = memoryTypeUnregistered
    if found is not None:
        kind = memoryTypeHost if found.device < 0 else memoryTypeDevice
    return SimpleNamespace(type=kind, device=getattr(found, "device", 0))


def hostRegister(pointer, nbytes, flags):
    d.Registered(pointer, nbytes)


def hostUnregister(pointer):
    d.memory_at(pointer).leave()
