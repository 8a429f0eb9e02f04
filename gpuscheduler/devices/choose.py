"""The hardware that a device string names."""

from __future__ import annotations

import ctypes
import importlib.util
import os

from dask.utils import format_bytes

from ..options import check_option, parse_devices, parse_host_threads, parse_limit
from ..runtime.host_memory import available_memory
from ..runtime.protocol import Hardware
from . import cpu
from .cpu import CpuHardware


def find_hardware(
    devices: str,
    memory_limit: int | str | float | None,
    spill_directory: str | None = None,
    fast_math: bool = False,
    host_memory: int | str | float | None = None,
    spill_compression: str | None = None,
) -> Hardware:
    """The hardware that a device string names.

    >>> find_hardware("cpu:3", "1 GiB").machine.memory
    (1073741824, 1073741824, 1073741824)
    """
    check_option("devices", devices)
    parsed = parse_devices(devices)
    assert parsed is not None
    kind, count, ids = parsed
    host = _limit(host_memory, available_memory(), "host_memory", least=0)
    if kind == "cuda" and not has_cupy():
        raise RuntimeError(_without_cupy(devices, driver_version()))
    if kind == "cuda":
        _check_cuda(devices)
    if kind == "cuda" or (kind == "auto" and cuda_devices()):
        from .cuda.hardware import CudaHardware, devices_left

        chosen = ids or devices_left()
        if chosen or kind == "cuda":
            return CudaHardware(
                chosen,
                lambda free: _limit(memory_limit, free),
                spill_directory=spill_directory,
                fast_math=fast_math,
                host_memory=host,
                spill_compression=spill_compression,
                threads=host_threads(devices),
            )
    n = cpu.cpu_count() if count is None else count
    limit = _limit(memory_limit, available_memory() // n)
    return CpuHardware(n, limit, spill_directory, spill_compression)


def host_threads(devices: str) -> int:
    """Threads of the host that compute beside the GPUs of a device string.

    >>> host_threads("cuda:0,cpu:3")
    3
    """
    asked = parse_host_threads(devices)
    return cpu.cpu_count() if asked is None else asked


def cuda_devices() -> int:
    """The number of CUDA devices; 0 without CuPy or a driver.

    Also 0 in a process forked from one that uses CUDA: it does not work there.
    """
    if _gpus_left or not has_cupy():
        return 0
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


_gpus_left = False  # whether this process was forked from one that used GPUs


def leave_gpus_to_parent() -> None:
    """Remember that this process was forked from one that uses GPUs."""
    global _gpus_left
    _gpus_left = True


def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver of this machine can run; None where there is none."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        if driver.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):  # no such library, or a stub of it
        return None
    return version.value // 1000, version.value % 1000 // 10


def _without_cupy(devices: str, driver: tuple[int, int] | None) -> str:
    """What to do where devices need CuPy, and it is not installed.

    >>> _without_cupy("cuda", (13, 0)).split(". ")[1]
    "This machine's NVIDIA driver runs CUDA 13.0: pip install 'gpuscheduler[cuda13]'"
    """
    problem = f"devices={devices!r} needs CuPy, which is not installed."
    if driver is None:
        return (
            f"{problem} This machine has no NVIDIA driver either: use devices='cpu', or install "
            "the driver, and pip install 'gpuscheduler[cuda13]' (or [cuda12], for a driver of CUDA "
            "12)"
        )
    runs = f"{problem} This machine's NVIDIA driver runs CUDA {driver[0]}.{driver[1]}"
    if driver < (12, 0):
        return f"{runs}, which is too old: install one of CUDA 12 or later, or use devices='cpu'"
    return f"{runs}: pip install 'gpuscheduler[cuda{min(driver[0], 13)}]'"


def _check_cuda(devices: str) -> None:
    """Raise an error that says what to do where CUDA does not start."""
    import cupy

    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        driver = driver_version()
        if driver is None:
            remedy = "This machine has no NVIDIA driver: use devices='cpu', or install the driver"
        else:
            remedy = (
                f"The NVIDIA driver runs CUDA {driver[0]}.{driver[1]}: use devices='cpu', or see "
                "whether nvidia-smi lists a GPU, and whether CuPy is one for this CUDA"
            )
        raise RuntimeError(f"devices={devices!r} needs a GPU: {error}. {remedy}") from error


def _limit(
    limit: int | str | float | None, free: int, name: str = "memory_limit", least: int = 1
) -> int:
    nbytes = parse_limit(limit, free, least)
    if nbytes is None:
        check_option(name, limit)
        raise ValueError(
            f"{name}={limit!r} gives 0 bytes of the {format_bytes(free)} that are free: use a "
            "larger value"
        )
    return nbytes
