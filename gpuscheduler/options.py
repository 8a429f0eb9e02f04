"""Options of a `Scheduler`: their defaults, what each may be, and where they are read from.

Everything is checked before anything starts: a wrong value is a ValueError that names the option,
and unknown keys of Dask's configuration are one warning.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from dask import config
from dask.utils import parse_bytes

from .runtime.observe import Level
from .runtime.spill import CODECS
from .runtime.state import DEEP_WINDOW, WINDOW

#: Devices that one Scheduler may have: each CPU device is a thread.
MOST_DEVICES = max(1024, os.cpu_count() or 1)
#: Where NumPy's arrays may be computed on a machine with GPUs.
NUMPY_MODES = "auto", "gpu", "gpu-only", "host"
#: Host and port of a page; without a host it is localhost.
ADDRESS = re.compile(r"([\w.\-]*):(\d{1,5})")
DEVICES = re.compile(
    r"(auto)|cpu(?::(\d+))?|(cuda)(?::(\d+(?:,\d+)*))?(?P<beside>,cpu(?::(?P<threads>\d+))?)?"
)


@dataclass(frozen=True)
class Options:
    """Options of a `Scheduler`; each is also `gpuscheduler.NAME` in Dask's configuration.

    Parameters
    ----------
    devices, memory_limit
        See `Scheduler`.
    window, deep_window
        Steps that may be under way on one device. The second holds while all that they make and
        fetch is small beside the device's memory.
    fuse
        Run chains of array operations, and the reductions behind them, as one kernel. Without it,
        each operation runs by itself.
    fuse_least
        Bytes that a task must touch to be worth a kernel. Default: 0 on GPUs, 256 KiB on CPU
        devices.
    fast_math
        Compile GPU kernels with CUDA's ``--use_fast_math``: products and sums are rounded together,
        and denormal float32 numbers are zero. Float32 division, roots, exponentials, logarithms,
        sines and cosines are approximate; the CUDA programming guide gives their errors. Sines and
        cosines of large arguments have no correct digit. Without it, each operation is rounded as
        in NumPy. No effect on CPU devices.
    matmul_precision
        How GPUs multiply matrices of float32 and complex64. ``"strict"``: with all digits.
        ``"tf32"``: with 11 significant bits of each element, on tensor cores: several times as
        fast, with errors up to about 2**-10 of ``abs(a) @ abs(b)``. Factorizations and
        `gpuscheduler.linalg` stay strict. No effect on CPU devices and on other dtypes.
    tall_qr
        How GPUs factor the tall blocks of `da.linalg.qr` and `da.linalg.svd`. ``"auto"``: by
        Cholesky factors, as `gpuscheduler.linalg.qr`; Q and R may differ from NumPy's in the signs
        of columns and rows. ``"householder"``: by NumPy's algorithm. No effect on CPU devices.
    numpy
        Where NumPy's arrays are computed on a machine with GPUs; results are NumPy's in any case.
        ``"auto"``: each computation on GPUs where that is expected to take at most 0.7 of the
        host's time or reads what GPUs keep, else on the host. ``"gpu"``: every kernel on GPUs,
        whatever it costs; a warning names the functions that are called on the host.
        ``"gpu-only"``: the same, and a `PlanError` where such a function touches 1 MiB or more.
        ``"host"``: on the host. No effect on CPU devices.
    host_memory
        Host memory for values spilled from the GPUs and for the host's own threads, in the form of
        ``memory_limit``. Values that do not fit go to files. A quarter of it, up to 4 GiB per GPU,
        buffers traffic to and from files, of spilled values and of stores. One value in each
        direction and 2 MiB per GPU are always let through. With 0 nothing is spilled to host memory
        and each GPU's thread computes NumPy blocks, one at a time. Default: 0.9 of the available
        memory. No effect on CPU devices, whose memory is the host's.
    spill_directory
        Where spilled values are written, in a folder that only this user may enter. Default: Dask's
        ``temporary-directory``, else the system's.
    spill_compression
        Compression of spilled values: ``"zlib"``, or ``"lz4"`` (package lz4) and ``"zstd"`` (Python
        3.14, or package backports.zstd). Default: none, which is faster on most disks.
    plan_memory
        Host memory for cached plans, about, in the form of ``memory_limit``; 0 for no cache. Plans
        are also dropped while host memory is short. A step takes 2 to 3 KB.
    dashboard
        A live page of the devices, in a browser: True, or an address such as ``":8788"``. ``"top"``
        is for ``gpuscheduler top`` and metrics only. See `Scheduler.dashboard`.
    progress
        Show how far runs are that take longer than a second: see `gpuscheduler.progress`.
    timeline
        Keep where and when the latest steps ran, for `Scheduler.timeline`: at least
        ``observe="device"``.
    observe
        How much is recorded of runs. ``"counters"``: one record for each run. ``"steps"``: also
        when steps and copies ran, and the memory over time. ``"device"``: also by the clocks of the
        GPUs. ``"memory"``: also what steps on GPUs allocate, by line, which is slow.
        `Scheduler.record` raises it for a while.
    check
        Validate the scheduler's state after each event; slow.

    Raises
    ------
    ValueError
        if an option has a value that it cannot have.

    >>> with config.set({"gpuscheduler.memory-limit": "2 GiB"}):
    ...     Options.read(devices="cpu:2")
    Options(devices='cpu:2', memory_limit='2 GiB', window=4, deep_window=64, fuse=True, \
fuse_least=None, fast_math=False, matmul_precision='strict', tall_qr='auto', \
numpy='auto', host_memory=None, spill_directory=None, spill_compression=None, \
plan_memory='256 MiB', dashboard=False, progress=False, timeline=False, observe='counters', \
check=False)
    """

    devices: str = "auto"  # "auto", "cpu", "cpu:4", "cuda", "cuda:0,2"; "cuda:0,0" is two on one
    memory_limit: int | str | float | None = None  # per device: bytes, "8 GiB" or a fraction
    window: int = WINDOW  # steps under way on one device
    deep_window: int = DEEP_WINDOW  # ... where all they make and fetch is small beside the memory
    fuse: bool = True  # run chains of array operations as one kernel
    fuse_least: int | None = None  # bytes that a task must touch to be worth a kernel
    fast_math: bool = False  # faster kernels that are less exact than NumPy
    matmul_precision: str = "strict"  # how GPUs multiply matrices of float32: "strict", "tf32"
    tall_qr: str = "auto"  # how GPUs factor tall blocks for Dask: "auto", "householder"
    numpy: str = "auto"  # where NumPy's arrays are computed: "auto", "gpu", "gpu-only", "host"
    host_memory: int | str | float | None = None  # for values that leave the GPUs, before files
    spill_directory: str | None = None  # where files of evicted values are made
    spill_compression: str | None = None  # of these: "zlib", or "lz4", "zstd" where there is one
    plan_memory: int | str | float = "256 MiB"  # for plans that are kept; 0 for none
    dashboard: bool | str = False  # a live page: True, or an address; "top" without a page
    progress: bool = False  # show how far runs are
    timeline: bool = False  # keep where and when the latest steps ran
    observe: str = "counters"  # how much is recorded: "counters", "steps", "device", "memory"
    check: bool = False  # validate the state after each event (slow)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            check_option(field.name, value)
            if isinstance(field.default, bool) and _is_flag(
                value
            ):  # the environment may say 0 and 1
                object.__setattr__(self, field.name, bool(value))

    @classmethod
    def read(cls, **given: Any) -> Options:
        """Arguments first, then Dask's configuration, then the defaults."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise TypeError(f"unknown option {unknown[0]!r}: the options are {', '.join(known)}")
        configured = read_configuration()
        out = {name: value for name, value in given.items() if value is not None}
        for name, value in configured.items():
            if value is not None and name not in out:
                check_option(name, value, f"gpuscheduler.{name.replace('_', '-')}")
                if name in known:
                    out[name] = value
        return cls(**out)


def read_configuration() -> dict[str, Any]:
    """The known settings below `gpuscheduler` in Dask's configuration; one warning for others."""
    section = config.get("gpuscheduler", None)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ValueError(
            f"gpuscheduler={section!r} in Dask's configuration: use a mapping of options, such as "
            "{'devices': 'cpu:4'}"
        )
    said = {str(key).replace("-", "_"): value for key, value in section.items()}
    if unknown := sorted(said.keys() - MAY_BE.keys()):
        names = [_name_with_suggestion(name) for name in unknown]
        known = ", ".join(name.replace("_", "-") for name in MAY_BE)
        warnings.warn(
            f"Dask's configuration has unknown keys below gpuscheduler: {', '.join(names)}; "
            f"they are ignored. Known are {known}",
            stacklevel=4,  # whoever makes a Scheduler
        )
    return {name: said[name] for name in MAY_BE if name in said}


def _name_with_suggestion(name: str) -> str:
    alike = difflib.get_close_matches(name, MAY_BE, n=1)
    suggestion = f" (did you mean {alike[0].replace('_', '-')!r}?)" if alike else ""
    return f"{name.replace('_', '-')!r}{suggestion}"


def check_option(name: str, value: Any, key: str | None = None) -> None:
    """Raise ValueError where an option cannot be this; `key` is where Dask's configuration has it.

    >>> check_option("window", 0)
    Traceback (most recent call last):
    ValueError: window=0: use a whole number from 1
    """
    accepts, words = MAY_BE[name]
    if not accepts(value):
        where = f" ({key} in Dask's configuration)" if key else ""
        raise ValueError(f"{name}={value!r}{where}: use {words}")


def parse_devices(value: Any) -> tuple[str, int | None, list[int] | None] | None:
    """The kind of a device string, how many CPU devices, and ids of GPUs; None for other values.

    >>> parse_devices("cpu:4"), parse_devices("cuda:0,2"), parse_devices("cpu:0")
    (('cpu', 4, None), ('cuda', None, [0, 2]), None)
    """
    found = DEVICES.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return None
    auto, count, cuda, ids = found.groups()[:4]
    chosen = [int(i) for i in ids.split(",")] if ids else None
    n = int(count) if count else None
    if not 1 <= (1 if n is None else n) <= MOST_DEVICES or len(chosen or ()) > MOST_DEVICES:
        return None
    if not 0 <= int(found["threads"] or 0) <= MOST_DEVICES:
        return None
    return auto or cuda or "cpu", n, chosen


def parse_host_threads(value: str) -> int | None:
    """The threads of the host beside GPUs in a device string; None where it says no number.

    >>> [parse_host_threads(d) for d in ("cuda:0,1,cpu:12", "cuda,cpu", "cuda", "cpu:4")]
    [12, None, None, None]
    """
    found = DEVICES.fullmatch(value.strip())
    return int(found["threads"]) if found and found["threads"] else None


def parse_limit(limit: Any, free: int, least: int = 1) -> int | None:
    """Bytes that a limit of `free` bytes means, `least` at least; None for what is no limit.

    >>> parse_limit("1 kiB", 8000), parse_limit(0.5, 8000), parse_limit(None, 8000)
    (1024, 4000, 7200)
    >>> parse_limit("much", 8000), parse_limit(True, 8000), parse_limit(1.5, 8000)
    (None, None, None)
    """
    if limit is None:
        limit = 0.9
    if isinstance(limit, np.generic):
        limit = limit.item()
    if isinstance(limit, float) and 0 < limit <= 1:
        return int(limit * free)
    if isinstance(limit, bool) or (isinstance(limit, float) and not limit.is_integer()):
        return None
    if isinstance(limit, str) and not any(map(str.isdigit, limit)):  # 1, to Dask
        return None
    nbytes = -1
    with suppress(ValueError, TypeError, AttributeError):
        nbytes = int(parse_bytes(limit))
    return nbytes if nbytes >= least else None


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_flag(value: Any) -> bool:
    return _is_bool(value) or (isinstance(value, int) and value in (0, 1))


def _is_number_from(least: int) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        whole = isinstance(value, (int, np.integer)) and not _is_bool(value)
        return whole and int(value) >= least

    return accepts


def _is_one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in words


def _or_none(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _is_address(value: Any) -> bool:
    found = ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return found is not None and int(found[2]) < 2**16


def _is_path(value: Any) -> bool:
    return value is None or isinstance(value, (str, os.PathLike))


_FLAG = _is_flag, "True or False"
_LIMIT = "bytes, a string such as '8 GiB', or a fraction up to 1.0"

#: What each setting may be: whether it accepts a value, and that in words.
MAY_BE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "devices": (
        lambda value: parse_devices(value) is not None,
        "'auto', 'cpu', 'cpu:4', 'cuda', 'cuda:0,2', or 'cuda,cpu:12' (at least one device, at "
        f"most {MOST_DEVICES})",
    ),
    "memory_limit": (lambda value: parse_limit(value, 2**40) is not None, _LIMIT),
    "window": (_is_number_from(1), "a whole number from 1"),
    "deep_window": (_is_number_from(1), "a whole number from 1"),
    "fuse": _FLAG,
    "fuse_least": (_or_none(_is_number_from(0)), "a whole number of bytes from 0, or None"),
    "fast_math": _FLAG,
    "matmul_precision": (_is_one_of("strict", "tf32"), "'strict' or 'tf32'"),
    "tall_qr": (_is_one_of("auto", "householder"), "'auto' or 'householder'"),
    "numpy": (_is_one_of(*NUMPY_MODES), "'auto', 'gpu', 'gpu-only' or 'host'"),
    "host_memory": (lambda value: parse_limit(value, 2**40, least=0) is not None, _LIMIT),
    "spill_directory": (_is_path, "the path of a directory, or None"),
    "spill_compression": (
        _or_none(_is_one_of(*CODECS)),
        f"None or one of {', '.join(map(repr, CODECS))}",
    ),
    "plan_memory": (
        lambda value: value is not None and parse_limit(value, 2**40, least=0) is not None,
        _LIMIT,
    ),
    "dashboard": (
        lambda value: _is_flag(value) or value == "top" or _is_address(value),
        "True, False, 'top', or an address such as ':8788' or '0.0.0.0:8788'",
    ),
    "progress": _FLAG,
    "timeline": _FLAG,
    "observe": (
        _is_one_of(*[level.name.lower() for level in Level]),
        ", ".join([repr(level.name.lower()) for level in Level]),
    ),
    "check": _FLAG,
    # not options of a Scheduler, but of the process
    "cache_directory": (_is_path, "the path of a directory, or None"),
    "ipc": _FLAG,
    "register_functions": _FLAG,
    "sort_runs": (_or_none(_is_number_from(1)), "a whole number from 1, or None"),
}
