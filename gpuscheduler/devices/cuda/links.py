"""How fast devices reach each other and the host, tried once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import cupy
import numpy as np
from cupy.cuda import Device, Stream, runtime

from .pinned import PinnedBlocks

#: Bytes of the buffers with which links are tried and measured.
TRIAL_BYTES = 2**20
MEASURED_BYTES = 2**28


# ---- what lives longer than a run


@dataclass(frozen=True)
class Links:
    """Measured rates, in GB/s: between devices, and to and from the host."""

    gbs: list[list[float]]
    host: list[tuple[float, float]]
    staged: set[tuple[int, int]]


#: Pinned memory of what goes to other processes.
CROSSING = PinnedBlocks()


# ---- links


def try_links(ids: list[int]) -> set[tuple[int, int]]:
    """Enable every pair of GPUs both ways and copy a known pattern; the pairs that fail."""
    bad = set()
    answers: dict[tuple[int, int], bool] = {}
    for a, source in enumerate(ids):
        for b, destination in enumerate(ids):
            if source == destination:
                continue
            pair = (source, destination)
            if pair not in answers:
                answers[pair] = _enable(*pair) and _known_answer(*pair)
            if not answers[pair]:
                bad.add((a, b))
    return bad


#: Pairs of GPUs that have been enabled in this process: to do it again is an error of CUDA's.
_ENABLED: set[tuple[int, int]] = set()


def _enable(source: int, destination: int) -> bool:
    for a, b in ((source, destination), (destination, source)):
        if (a, b) in _ENABLED:
            continue
        if not runtime.deviceCanAccessPeer(a, b):
            return False
        with Device(a):
            try:
                runtime.deviceEnablePeerAccess(b)
            except runtime.CUDARuntimeError as error:
                if "AlreadyEnabled" not in str(error):
                    return False
        _ENABLED.add((a, b))
    return True


def _known_answer(source: int, destination: int) -> bool:
    """Whether bytes that go from one GPU to the other arrive as they were."""
    pattern = np.arange(TRIAL_BYTES // 4, dtype=np.uint32) * np.uint32(2654435761)
    try:
        with Device(source):
            there = cupy.asarray(pattern)
            runtime.deviceSynchronize()
        with Device(destination):
            here = cupy.zeros(len(pattern), dtype=np.uint32)
            runtime.deviceSynchronize()
            runtime.memcpyPeer(here.data.ptr, destination, there.data.ptr, source, there.nbytes)
            runtime.deviceSynchronize()
            return bool((here.get() == pattern).all())
    except runtime.CUDARuntimeError:
        return False


def measure_peer_rate(source: int, destination: int) -> float:
    with Device(source):
        there = cupy.zeros(MEASURED_BYTES, dtype=np.uint8)
        runtime.deviceSynchronize()
    with Device(destination):
        here = cupy.zeros(MEASURED_BYTES, dtype=np.uint8)
        runtime.deviceSynchronize()
        stream = Stream(non_blocking=True)

        def copy() -> None:
            runtime.memcpyPeerAsync(
                here.data.ptr, destination, there.data.ptr, source, MEASURED_BYTES, stream.ptr
            )

        return _rate(copy, stream)


def measure_host_rates(device: int, pinned: PinnedBlocks) -> tuple[float, float]:
    host = pinned.array((MEASURED_BYTES,), np.uint8)
    with Device(device):
        there = cupy.zeros(MEASURED_BYTES, dtype=np.uint8)
        runtime.deviceSynchronize()
        stream = Stream(non_blocking=True)

        def rate(to: int, source: int, kind: int) -> float:
            def copy() -> None:
                runtime.memcpyAsync(to, source, MEASURED_BYTES, kind, stream.ptr)

            return _rate(copy, stream)

        on_device, pinned_at = there.data.ptr, host.ctypes.data
        return (
            rate(on_device, pinned_at, runtime.memcpyHostToDevice),
            rate(pinned_at, on_device, runtime.memcpyDeviceToHost),
        )


def _rate(copy: Callable[[], None], stream: Stream) -> float:
    """GB/s of a copy of MEASURED_BYTES: the best of three."""
    copy()
    stream.synchronize()
    best = float("inf")
    for _ in range(3):
        begin = perf_counter()
        copy()
        stream.synchronize()
        best = min(best, perf_counter() - begin)
    return MEASURED_BYTES / best / 1e9


def gather_on_host(arrays: list[Any], starts: list[int], nbytes: int) -> Any:
    """Copy arrays of any devices into one pinned host buffer, each at its start.

    All copies are queued at once, with one wait for each device.
    """
    buffer = CROSSING.array((nbytes,), np.uint8)
    devices = sorted({a.device.id for a in arrays})
    held = []
    for device in devices:
        with Device(device):
            stream = cupy.cuda.get_current_stream()
            for a, start in zip(arrays, starts, strict=True):
                if a.device.id != device or not a.nbytes:
                    continue
                a = cupy.ascontiguousarray(a)
                held.append(a)
                to, kind = buffer.ctypes.data + start, runtime.memcpyDeviceToHost
                runtime.memcpyAsync(to, a.data.ptr, a.nbytes, kind, stream.ptr)
    for device in devices:
        with Device(device):
            cupy.cuda.get_current_stream().synchronize()
    return buffer
