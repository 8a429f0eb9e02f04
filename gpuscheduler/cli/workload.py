"""Workloads of the command line: names, files, sizes and timings."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import math
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import click
import dask.threaded
import numpy as np

from ..default import current_scheduler
from ..runtime.protocol import Hardware

Size = int | tuple[int, ...]
#: Bytes of a result above which it stays in its chunks, where they were made.
HELD = 2**30
#: Bytes moved and operations that NumPy may spend to check a result without `--check`.
AFFORDABLE = (2**28, 2**33)
#: Elements along each axis of the windows in which larger results are checked.
CORNER = 64
#: Pixels along each side of a drawing; larger fields are thinned out.
PIXELS = 2000


class CommandError(click.ClickException):
    """A request that is not possible: printed as one line, with exit status 2."""

    exit_code = 2


def format_devices(hardware: Hardware) -> str:
    n = len(hardware.machine.devices)
    return f"{n} {hardware.kind} device{'s'[: n != 1]}"


# ---- workloads


@dataclass(frozen=True)
class Workload:
    """A module with `build`, and whatever else of the contract it has."""

    name: str
    module: ModuleType

    def get(self, name: str) -> Any:
        return getattr(self.module, name, None)

    def size(self, given: Any) -> Size:
        """The size that was asked for, of the kind that this workload takes."""
        small, full = self.get("SMALL"), self.get("FULL")
        if given == "full" and full is not None:
            return _size(full)
        if small is None:
            if given is None or isinstance(given, str):
                raise click.UsageError(f"{self.name} has no size of its own: give it --size")
            return _size(given)
        if given is None:
            return tuple(4 * n for n in small) if isinstance(small, tuple) else 4 * int(small)
        if given == "small":
            return _size(small)
        if np.shape(given) != np.shape(small):
            raise click.UsageError(f"{self.name} takes a size such as {size_text(small)}")
        return _size(given)

    def build(self, size: Size, chunks: Any, xp: str) -> Any:
        """The lazy collection. A user's `build` need not take `chunks` or `xp`."""
        function = self.get("build")
        takes = inspect.signature(function).parameters
        options = {"xp": xp} if chunks is None else {"xp": xp, "chunks": chunks}
        if chunks is not None and "chunks" not in takes:
            raise click.UsageError(f"{self.name} does not take --chunks: its build has no `chunks`")
        x = function(size, **{name: v for name, v in options.items() if name in takes})
        if not dask.is_dask_collection(x):
            kind = type(x).__name__
            raise CommandError(
                f"{self.name}: build gives no Dask collection, but an object of {kind}"
            )
        return x

    def is_affordable(self, size: Size) -> bool:
        """Whether NumPy can do all of it while somebody waits."""
        costs = [self.get(name) for name in ("bytes_moved", "flops")]
        return all(not f or f(size) <= most for f, most in zip(costs, AFFORDABLE, strict=True))

    def windows(self, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
        """Both ends and the middle of a large result; none where `reference` knows no windows."""
        reference = self.get("reference")
        if not reference or "window" not in inspect.signature(reference).parameters or not shape:
            return []
        starts = ([max(0, int(f * (n - CORNER))) for n in shape] for f in (0, 0.5, 1))
        return [
            tuple(slice(a, min(a + CORNER, n)) for a, n in zip(at, shape, strict=True))
            for at in starts
        ]

    def tolerance(self, size: Size) -> tuple[float, float]:
        rtol = self.get("rtol")
        return rtol(size) if rtol else self.get("RTOL") or 0.0, self.get("ATOL") or 0.0


def _size(given: Any) -> Size:
    return given if isinstance(given, tuple) else int(given)


def size_text(size: Size, by: str = ",") -> str:
    """A size as it is written: `400,250`."""
    return by.join(map(str, size)) if isinstance(size, tuple) else str(size)


def reference_workloads() -> ModuleType | None:
    """The package of reference workloads: the installed one, or a folder `graphs` close by."""
    if importlib.util.find_spec("gpuscheduler.graphs") is not None:
        return importlib.import_module("gpuscheduler.graphs")
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (root / "graphs" / "__init__.py").exists():
            if str(root) not in sys.path:
                sys.path.append(str(root))
            return importlib.import_module("graphs")
    return None


def workload_names() -> list[str]:
    """The names of the reference workloads; measuring tools and private modules are none."""
    package = reference_workloads()
    if package is None:
        return []
    modules = [m for m in pkgutil.iter_modules(package.__path__) if not m.ispkg]
    return sorted(m.name for m in modules if m.name[0] != "_")


def load(name: str) -> Workload:
    """The workload of that name, or in that file."""
    if name.endswith(".py"):
        return Workload(Path(name).stem, _from_file(Path(name)))
    if name not in workload_names():
        known = ", ".join(workload_names()) or "none found"
        raise click.UsageError(
            f"no workload {name!r}: there are {known}; or give the path of a .py file with a "
            "function build(size)"
        )
    package = reference_workloads()
    assert package is not None
    return Workload(name, importlib.import_module(f"{package.__name__}.{name}"))


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    name = f"workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CommandError(_why_not_loaded(path, error)) from error
    if not callable(getattr(module, "build", None)):
        raise CommandError(f"{path} has no function build(size), which gives a Dask collection")
    return module


def _why_not_loaded(path: Path, error: Exception) -> str:
    """One line that says what is wrong with a user's file, and where."""
    if isinstance(error, SyntaxError):
        file, line, what = error.filename or path, error.lineno, f"syntax error: {error.msg}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if f.filename == str(path)]
        file, line = path, lines[-1] if lines else None
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    package = reference_workloads()
    if isinstance(error, ImportError) and "relative import" in str(error):
        what = "it imports from its package (`from . import ...`), and is run by its path: "
        if package is not None and path.resolve().parent == Path(package.__path__[0]).resolve():
            what += f"say its name, {path.stem}, as it is a reference workload"
        else:
            what += "import by full names instead"
    return f"{file}{f', line {line}' if line else ''}: {what}"


# ---- computing


def is_lazy_array(x: Any) -> bool:
    return hasattr(type(x), "chunks")  # of the type: a Delayed has any attribute


def is_too_large(x: Any) -> bool:
    """Whether a result stays in its chunks, too large for one host array."""
    return is_lazy_array(x) and bool(x.nbytes > HELD)


def on_host(x: Any) -> Any:
    """x with NumPy chunks, where its chunks are on a GPU."""
    away = is_lazy_array(x) and type(x._meta).__module__.startswith("cupy")
    return x.to_backend("numpy") if away else x


def compute_and_hold(x: Any, **options: Any) -> Any:
    """Compute x: one NumPy value, or chunks on their devices if it is too large."""
    if is_too_large(x):
        chunks = dask.persist(x, **options)[0]
        current_scheduler().hardware.synchronize()
        return chunks
    return dask.compute(on_host(x), **options)[0]


def time_call(function: Callable[[], Any]) -> float:
    """Seconds that a call takes; its value is dropped afterwards."""
    gc.collect()
    begin = time.perf_counter()
    value = function()
    seconds = time.perf_counter() - begin
    del value
    return seconds


def format_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds / 1e-6)} µs"


def format_rate(rate: float, unit: str) -> str:
    """Format a rate with three digits and a prefix."""
    power = max(0, min(4, int(math.log10(max(rate, 1)) // 3)))
    prefix = ("", "k", "M", "G", "T")[power]
    return f"{three_digits(rate / 1000**power)} {f'{prefix}{unit}'.strip()}"


def three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def time_alternately(
    ours: Callable[[], Any], theirs: Callable[[], Any], repeat: int
) -> tuple[float, float]:
    """Median seconds of two functions that run in turn, `repeat` times each.

    Each first runs once unmeasured. The order changes every time.
    """
    ours(), theirs()
    times: dict[Any, list[float]] = {ours: [], theirs: []}
    for turn in range(repeat):
        for function in (ours, theirs) if turn % 2 else (theirs, ours):
            times[function].append(time_call(function))
    return median(times[ours]), median(times[theirs])
