"""What the commands of the command line do: run a workload, print its plan, measure it.

A workload is a module with a function `build(size, chunks, xp)` that gives a lazy Dask collection:
one of the reference workloads by its name, or a file of the user's by its path. What else it may
offer (`reference`, `bytes_moved`, `flops`, `SMALL`, ...) is written in graphs/__init__.py, and is
used where it is there. Nothing here schedules. What may be said is in `cli`.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import math
import pkgutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import click
import dask
import dask.threaded
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.callbacks import Callback
from dask.utils import format_bytes, key_split, parse_bytes
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import __version__
from .batches import Batch
from .cpu import available_memory
from .expr import Kernel
from .fuse import Fused, program_of
from .gather import Gathering
from .graph import Graph, PlanError, from_dask, received
from .kernel import generate
from .machine import DISK, ENDLESS, HOST, Machine
from .options import Options
from .plan import Footprint, OutOfMemory, Plan
from .pretend import predict
from .regions import bytes_touched
from .run import Hardware
from .scheduler import Scheduler, current, driver_version, has_cupy, plan_dask, written
from .taken import Taken
from .tree import NotGenerated

Size = int | tuple[int, ...]

H200 = 141 * 10**9  # bytes of memory on the device that `plan --pretend` pretends
HELD = 2**30  # bytes; a larger result stays in its chunks, where they were made
AFFORDABLE = (2**28, 2**33)  # bytes moved, flops: so much NumPy may do to check a result unasked
CORNER = 64  # elements along each axis of the windows at which larger results are checked
PIXELS = 2000  # along each side of a drawing; larger fields are thinned out


class Refused(click.ClickException):
    """What was asked for cannot be: one line, and exit status 2."""

    exit_code = 2


@contextmanager
def refusing() -> Iterator[None]:
    """What the scheduler refuses to do is one line."""
    try:
        yield
    except (OutOfMemory, PlanError) as error:
        raise click.ClickException(str(error)) from error


def limit_of(text: str | None) -> str | float | None:
    """A fraction as a float; anything else is for the scheduler to read.

    >>> limit_of("0.5"), limit_of("8 GiB")
    (0.5, '8 GiB')
    """
    try:
        fraction = float(text or "")
    except ValueError:
        return text
    return fraction if 0 < fraction <= 1 else text


def scheduler(devices: str | None, memory_limit: str | None) -> Scheduler:
    try:
        return Scheduler(devices=devices, memory_limit=limit_of(memory_limit))
    except (ValueError, RuntimeError, ImportError) as error:
        raise Refused(str(error)) from error


def read_options() -> Options:
    try:
        return Options.read()
    except ValueError as error:
        raise Refused(str(error)) from error


def devices_said(hardware: Hardware) -> str:
    n = len(hardware.machine.devices)
    return f"{n} {hardware.kind} device{'s'[: n != 1]}"


# ---- workloads


@dataclass(frozen=True)
class Workload:
    """A module with `build`, and whatever else of the contract it has."""

    name: str
    module: ModuleType

    def has(self, name: str) -> Any:
        return getattr(self.module, name, None)

    def size(self, given: Any) -> Size:
        """The size that was asked for, of the kind that this workload takes."""
        small, full = self.has("SMALL"), self.has("FULL")
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
            raise click.UsageError(f"{self.name} takes a size such as {said(small)}")
        return _size(given)

    def build(self, size: Size, chunks: Any, xp: str) -> Any:
        """The lazy collection. A user's `build` need not take `chunks` or `xp`."""
        function = self.has("build")
        takes = inspect.signature(function).parameters
        options = {"xp": xp} if chunks is None else {"xp": xp, "chunks": chunks}
        if chunks is not None and "chunks" not in takes:
            raise click.UsageError(f"{self.name} does not take --chunks: its build has no `chunks`")
        x = function(size, **{name: v for name, v in options.items() if name in takes})
        if not dask.is_dask_collection(x):
            kind = type(x).__name__
            raise Refused(f"{self.name}: build gives no Dask collection, but an object of {kind}")
        return x

    def affordable(self, size: Size) -> bool:
        """Whether NumPy can do all of it while somebody waits."""
        costs = [self.has(name) for name in ("bytes_moved", "flops")]
        return all(not f or f(size) <= most for f, most in zip(costs, AFFORDABLE, strict=True))

    def windows(self, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
        """Both ends and the middle of a large result; none where `reference` knows no windows."""
        reference = self.has("reference")
        if not reference or "window" not in inspect.signature(reference).parameters or not shape:
            return []
        starts = ([max(0, int(f * (n - CORNER))) for n in shape] for f in (0, 0.5, 1))
        return [
            tuple(slice(a, min(a + CORNER, n)) for a, n in zip(at, shape, strict=True))
            for at in starts
        ]

    def tolerance(self, size: Size) -> tuple[float, float]:
        rtol = self.has("rtol")
        return rtol(size) if rtol else self.has("RTOL") or 0.0, self.has("ATOL") or 0.0


def _size(given: Any) -> Size:
    return given if isinstance(given, tuple) else int(given)


def said(size: Size, by: str = ",") -> str:
    """A size as it is written: `400,250`."""
    return by.join(map(str, size)) if isinstance(size, tuple) else str(size)


def reference_workloads() -> ModuleType | None:
    """The package of reference workloads: the installed one, or a folder `graphs` close by."""
    if importlib.util.find_spec("gpuscheduler.graphs") is not None:
        return importlib.import_module("gpuscheduler.graphs")
    for root in (Path(__file__).parents[1], Path.cwd()):
        if (root / "graphs" / "__init__.py").exists():
            if str(root) not in sys.path:
                sys.path.append(str(root))
            return importlib.import_module("graphs")
    return None


def workload_names() -> list[str]:
    package = reference_workloads()
    if package is None:
        return []
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_")


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
        raise Refused(f"there is no file {path}")
    name = f"workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Refused(_why_not_loaded(path, error)) from error
    if not callable(getattr(module, "build", None)):
        raise Refused(f"{path} has no function build(size), which gives a Dask collection")
    return module


def _why_not_loaded(path: Path, error: Exception) -> str:
    """What is wrong with a file of the user's, and where, in one line."""
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


def too_large(x: Any) -> bool:
    """Whether a result stays in its chunks on the devices, rather than become one host array."""
    return is_lazy_array(x) and bool(x.nbytes > HELD)


def on_host(x: Any) -> Any:
    """x with NumPy chunks, where its chunks are on a GPU."""
    away = is_lazy_array(x) and type(x._meta).__module__.startswith("cupy")
    return x.to_backend("numpy") if away else x


def held(x: Any, **options: Any) -> Any:
    """x computed: one NumPy value, or, when that is too large, chunks where they were made."""
    if too_large(x):
        chunks = dask.persist(x, **options)[0]
        current().hardware.synchronize()
        return chunks
    return dask.compute(on_host(x), **options)[0]


def timed(function: Callable[[], Any]) -> float:
    """Seconds that a call takes; its value is dropped afterwards."""
    gc.collect()
    begin = time.perf_counter()
    value = function()
    seconds = time.perf_counter() - begin
    del value
    return seconds


class Bar(Callback):
    """Dask's callbacks as a progress bar."""

    def __init__(self, label: str, console: Console):
        super().__init__()
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(TextColumn("{task.description}"), *columns, console=console)
        self.label = label

    def _start_state(self, dsk: Any, state: Any) -> None:
        self.task = self.progress.add_task(
            self.label, total=len(state["waiting"]) + len(state["ready"])
        )
        self.progress.start()

    def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker_id: Any) -> None:
        self.progress.advance(self.task)

    def _finish(self, dsk: Any, state: Any, errored: bool) -> None:
        self.progress.stop()


def seconds_said(seconds: float) -> str:
    """
    >>> [seconds_said(s) for s in (1234.5, 0.01234, 1.2e-6)]
    ['1234 s', '12.3 ms', '1.2 µs']
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds / 1e-6)} µs"


def rate_said(rate: float, unit: str) -> str:
    """
    >>> rate_said(8.12e8, " points/s"), rate_said(1.5e12, "FLOP/s"), rate_said(12, "B/s")
    ('812 M points/s', '1.5 TFLOP/s', '12 B/s')
    """
    power = max(0, min(4, int(math.log10(max(rate, 1)) // 3)))
    prefix = ("", "k", "M", "G", "T")[power]
    return f"{three_digits(rate / 1000**power)} {f'{prefix}{unit}'.strip()}"


def three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


# ---- info


@refusing()
def info(devices: str | None, memory_limit: str | None) -> None:
    """What `gpuscheduler info` does."""
    console = Console()
    with scheduler(devices, memory_limit) as s:
        for part in described(s.hardware):
            console.print(part)
        if s.host_threads:
            room = format_bytes(s.hardware.machine.host_memory)
            console.print(
                f"What has nothing to do with a GPU runs on {s.host_threads} host threads, within "
                f"{room}."
            )
        console.print(", ".join(f"{name} {v}" for name, v in versions(s.hardware.kind).items()))


def described(hardware: Any) -> Iterable[Table | str]:
    """Tables of the devices and of the links between them."""
    machine, kind = hardware.machine, hardware.kind
    table = Table("device", "name", "memory free", "memory limit", title=f"{kind} devices")
    free = hardware.free() if hasattr(hardware, "free") else None
    for d in machine.devices:
        room = format_bytes(free[d]) if free else format_bytes(available_memory())
        table.add_row(
            str(d),
            hardware.names[d],
            room if free or machine.shared else "unknown",
            format_bytes(machine.memory[d]),
        )
    yield table
    if machine.shared:
        yield "The devices share the host's memory: copies between them cost nothing."
    elif hasattr(hardware, "links"):
        yield from links_described(hardware.links())


def links_described(links: Any) -> Iterable[Table | str]:
    """What was measured between each two devices, and between each and the host."""
    count = len(links.gbs)
    table = Table("from \\ to", *map(str, range(count)), "host", title="links, GB/s")
    for a in range(count):
        cells = [
            "-" if a == b else f"{links.gbs[a][b]:.0f}{'*' * ((a, b) in links.staged)}"
            for b in range(count)
        ]
        table.add_row(str(a), *cells, f"{links.host[a][1]:.0f}")
    table.add_row("host", *(f"{h2d:.0f}" for h2d, _ in links.host), "-")
    yield table
    if links.staged:
        yield "* through pinned host memory: these devices cannot copy to each other directly."


def versions(kind: str) -> dict[str, str]:
    out = {"gpuscheduler": __version__, "python": sys.version.split()[0]}
    out |= {name: version(name) for name in ("dask", "numpy")}
    if not has_cupy():
        driver = driver_version()
        cuda = f" (the driver runs CUDA {driver[0]}.{driver[1]})" if driver else ""
        return out | {"cupy": f"not installed{cuda}"}
    import cupy  # here, for it takes long, and only this command asks

    out["cupy"] = cupy.__version__
    if kind == "cuda":
        runtime = cupy.cuda.runtime
        for name, number in (
            ("CUDA driver", runtime.driverGetVersion()),
            ("CUDA runtime", runtime.runtimeGetVersion()),
        ):
            out[name] = f"{number // 1000}.{number % 1000 // 10}"
    return out


# ---- run


@refusing()
def run(
    name: str,
    size: Any,
    chunks: Any,
    devices: str | None,
    memory_limit: str | None,
    check: bool | None,
    png: str | None,
    repeat: int,
    progress: bool | None,
) -> None:
    """What `gpuscheduler run` does."""
    work = load(name)
    figure = figure_class() if png else None
    size = work.size(size)
    console = Console(stderr=True)
    show = console.is_terminal if progress is None else progress
    with scheduler(devices, memory_limit) as s:
        x = work.build(size, chunks, "cupy" if s.hardware.kind == "cuda" else "numpy")
        if figure and not (is_lazy_array(x) and x.ndim == 2):
            raise click.UsageError(f"--png: the result of {work.name} is not two-dimensional")
        surely, foreseen = predicted_run(x, s)  # before anything has told its size
        value, times = None, []
        for turn in range(1 + repeat):
            value = None  # a large result may fit only once
            gc.collect()
            with Bar(work.name, console) if show and turn == 0 else nullcontext():
                begin = time.perf_counter()
                value = held(x)
                times.append(time.perf_counter() - begin)
        took = s.last
        correct, verdict = checked(work, size, value, check)
        where = devices_said(s.hardware)
        what = f"{work.name} {label(size, x)}"
        facts = [timing(*times), *rates(work, size, x, min(times)), verdict]
        click.echo(f"{what} on {where}: {', '.join(filter(None, facts))}")
        if took is not None:
            click.echo(f"memory: {compared(took, foreseen, s.hardware.machine, surely)}")
        if figure and png:
            draw(work, value, png, what, figure)
    if not correct:
        raise click.ClickException(f"the result of {work.name} is not NumPy's")


def predicted_run(x: Any, s: Scheduler) -> tuple[str, Footprint]:
    """What computing x should take, and how sure that is. The scheduler knows no more of x than
    before."""
    hardware = s.hardware
    planned = plan_of(x, hardware.machine, hardware, s.options)
    return planned.surely, predict(planned, s.options.window, s.options.deep_window)


def compared(
    took: Footprint, foreseen: Footprint | None, machine: Machine, surely: str = ""
) -> str:
    """Memory and spilling as they were, beside what was predicted."""

    def with_prediction(what: str, real: int, predicted: int | None) -> str:
        said = "" if predicted is None else f" (predicted {surely}{format_bytes(predicted)})"
        return f"{what} {format_bytes(real)}{said}"

    peaks = foreseen.peak if foreseen else {}
    facts = [
        with_prediction(memory_said(m, machine), took.peak[m], peaks.get(m))
        for m in machine.memories
    ]
    for place in (HOST, DISK):
        expected = foreseen.spilled[place] if foreseen else 0
        if took.spilled[place] or expected:
            what = f"spilled to the {place_said(place)}"
            facts.append(with_prediction(what, took.spilled[place], expected))
    return ", ".join(facts)


def memory_said(memory: int, machine: Machine) -> str:
    return "peak" if len(machine.memories) == 1 else f"peak of device {memory}"


def label(size: Size, x: Any) -> str:
    """The size; of a square field, both sides."""
    square = isinstance(size, int) and is_lazy_array(x) and x.shape == (size, size)
    return said(x.shape if square else size, "x")


def timing(first: float, *others: float) -> str:
    if not others:
        return f"{seconds_said(first)} (one run, planning included)"
    return f"{seconds_said(min(others))} (first run {seconds_said(first)})"


def rates(work: Workload, size: Size, x: Any, seconds: float) -> Iterable[str]:
    if is_lazy_array(x) and x.ndim and not math.isnan(x.size):
        yield rate_said(x.size / seconds, " points/s")
    for name, unit in (("bytes_moved", "B/s"), ("flops", "FLOP/s")):
        if count := work.has(name):
            yield rate_said(count(size) / seconds, unit)


def checked(work: Workload, size: Size, value: Any, check: bool | None) -> tuple[bool, str]:
    """Whether `value` is what NumPy gives, and that in words."""
    reference = work.has("reference")
    if check is False or (reference is None and check is None):
        return True, ""
    if reference is None:
        raise click.UsageError(f"--check: {work.name} has no function reference(size)")
    chunked = is_lazy_array(value)
    windows: list[tuple[slice, ...]] = []
    if chunked or not work.affordable(size):
        windows = work.windows(np.shape(value))
        if not windows and not check:
            return True, "not checked (--check does, and takes a while)"
    pairs = [
        (on_host(value[w]).compute() if chunked else value[w], reference(size, w)) for w in windows
    ] or [(held_whole(value), reference(size))]
    rtol, atol = work.tolerance(size)
    correct = all(
        np.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True) for got, expected in pairs
    )
    verdict = f"{'equals' if correct else 'DIFFERS from'} NumPy {closeness(pairs)}"
    return correct, verdict + (f" at {len(windows)} places" if windows else "")


def held_whole(value: Any) -> Any:
    return on_host(value).compute() if is_lazy_array(value) else value


def closeness(pairs: Iterable[tuple[Any, Any]]) -> str:
    """How far results are from what was expected, relative to the largest number.

    >>> closeness([(np.array([1.0, 2.0001]), np.array([1.0, 2.0]))])
    'to 1e-04'
    """
    worst = 0.0
    for got, expected in pairs:
        scale = float(np.nanmax(np.abs(expected), initial=0.0)) or 1.0
        worst = max(worst, float(np.nanmax(np.abs(got - expected), initial=0.0)) / scale)
    return f"to {10 ** math.ceil(math.log10(worst)):.0e}" if worst else "exactly"


def figure_class() -> Any:
    """Matplotlib's Figure, which draws into files without any display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.ClickException(
            "--png needs matplotlib: pip install 'gpuscheduler[plot]'"
        ) from error
    return Figure


def draw(work: Workload, value: Any, png: str, title: str, figure: Any) -> None:
    """A picture of a field. Its axes are indices, or what the workload's AXES says they are."""
    step = max(1, math.ceil(max(value.shape) / PIXELS))
    rows, columns = value.shape
    axes = work.has("AXES") or {"row": (0, rows - 1), "column": (0, columns - 1)}
    (y, (bottom, top)), (x, (left, right)) = axes.items()
    drawing = figure(figsize=(7, 6), layout="constrained")
    plot = drawing.add_subplot(xlabel=x, ylabel=y, title=title)
    image = plot.imshow(
        held_whole(value[::step, ::step]),
        origin="lower" if work.has("AXES") else "upper",
        extent=(left, right, bottom, top) if work.has("AXES") else (left, right, top, bottom),
        aspect="auto",
    )
    drawing.colorbar(image, ax=plot)
    try:
        drawing.savefig(png)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--png: {error}") from error


# ---- plan


@refusing()
def plan(
    name: str,
    size: Any,
    chunks: Any,
    devices: str | None,
    memory_limit: str | None,
    pretend: int | None,
    source: bool,
) -> None:
    """What `gpuscheduler plan` does."""
    work = load(name)
    size = work.size(size)
    console, options = Console(), read_options()
    if pretend:
        if devices:
            raise click.UsageError("--pretend and --devices: use one of them")
        machine = Machine.uniform(pretend, memory=pretended_limit(memory_limit))
        x = work.build(size, chunks, "numpy")
        planned, where = plan_of(x, machine), f"{pretend} pretended H200"
    else:
        with scheduler(devices, memory_limit) as s:
            x = work.build(size, chunks, "cupy" if s.hardware.kind == "cuda" else "numpy")
            hardware = s.hardware
            planned = plan_of(x, hardware.machine, hardware, s.options)
            where = devices_said(s.hardware)
    foreseen = predict(planned, options.window, options.deep_window)
    unknown = f" ({planned.unknown:,} of unknown size)" if planned.unknown else ""
    click.echo(
        f"{work.name} {label(size, x)} on {where}: {len(planned.steps):,} steps{unknown}, "
        f"predicted {planned.surely}{seconds_said(foreseen.seconds)}"
    )
    for table in (*predicted(planned, foreseen), *programs(planned)):
        console.print(table)
    if source:
        for text in sorted({cuda_source(k) for k in kernels(planned)}):
            click.echo(text)


def pretended_limit(text: str | None) -> int:
    limit = limit_of(text or "0.9")
    try:
        return int(limit * H200) if isinstance(limit, float) else int(parse_bytes(limit or 0))
    except ValueError as error:
        raise click.BadParameter(f"{text!r}", param_hint="--memory-limit") from error


def plan_of(
    x: Any,
    machine: Machine,
    hardware: Hardware | None = None,
    options: Options | None = None,
) -> Plan:
    """The plan that computing x would run; on GPUs, where there is no hardware."""
    dsk, keys = received(x, by=held)
    home, kind = (hardware.home, hardware.kind) if hardware is not None else (None, "cuda")

    def read(apart: Mapping[str, str]) -> Graph:
        return from_dask(dsk, keys, home=home, send=kind == "cuda", apart=apart)

    graph, plan = plan_dask(read, machine, home, kind, options or Options())
    Taken(kind).foresee(plan)
    return plan if hardware is None else written(plan, Gathering(plan, graph.alias), hardware)


def predicted(planned: Plan, foreseen: Footprint) -> Iterable[Table]:
    machine = planned.machine
    table = Table("device", "steps", "busy", "peak memory", "limit", title="devices")
    for d in machine.devices:
        mine = [s.seconds for s in planned.steps if s.place == d]
        memory = machine.memory_of(d)
        table.add_row(
            str(d),
            f"{len(mine):,}",
            seconds_said(sum(mine)),
            planned.surely + format_bytes(foreseen.peak[memory]) if memory == d else "the same",
            format_bytes(machine.limit(memory)) if memory == d else "the same",
        )
    for place in (HOST, DISK):
        if nbytes := foreseen.spilled[place]:
            limit = format_bytes(machine.limit(place)) if machine.limit(place) < ENDLESS else ""
            what = f"{format_bytes(nbytes)} spilled"
            table.add_row(place_said(place), "", what, format_bytes(foreseen.peak[place]), limit)
    yield table
    moved = {
        link: n for link, n in foreseen.moved.items() if n and not (machine.shared and HOST in link)
    }
    if moved:
        links = Table("from", "to", "bytes", title="links")
        for (src, dst), nbytes in sorted(moved.items()):
            links.add_row(place_said(src), place_said(dst), format_bytes(nbytes))
        yield links


def members(planned: Plan) -> Iterator[Fused]:
    """The fused tasks of a plan, those of a batch one by one."""
    for step in planned.steps:
        if isinstance(step.task, Batch):
            yield from step.task.members
        elif (fused := program_of(step.task)) is not None:
            yield fused


def kernels(planned: Plan) -> Iterator[Kernel]:
    """The distinct kernels of a plan."""
    programs = {id(f.program): f.program for f in members(planned)}
    return (k for p in programs.values() for k in p.kernels)


def cuda_source(kernel: Kernel) -> str:
    try:
        return generate(kernel).source
    except NotGenerated as error:
        return f"// none: {error}"


def programs(planned: Plan) -> Iterator[Table]:
    """The fused kernels, what each launch does, and why other tasks are none."""
    counts = Counter(k for f in members(planned) for k in f.program.kernels)
    if counts:
        table = Table("kernel", "times", "bytes", "operations", title="fused kernels")
        rows: dict[str, list[int]] = {}
        for kernel, times in counts.items():
            row = rows.setdefault(kernel_said(kernel), [0, 0, 0])
            row[0] += times
            row[1] += times * bytes_touched(kernel)
            row[2] += times * kernel.operations()
        for name, (times, nbytes, operations) in rows.items():
            table.add_row(name, f"{times:,}", format_bytes(nbytes), f"{operations:.3g}")
        yield table
    reasons = Counter((why, key_split(planned.steps[i].key)) for i, why in planned.why.items())
    if reasons:
        table = Table("steps", "of", "why they are no kernel", title="operation by operation")
        for (reason, name), times in reasons.most_common():
            table.add_row(f"{times:,}", name, reason)
        yield table


def kernel_said(kernel: Kernel) -> str:
    try:
        return generate(kernel).name
    except NotGenerated as error:
        return f"none on a GPU: {error}"


def place_said(place: int) -> str:
    return {HOST: "host", DISK: "disk"}.get(place, str(place))


# ---- bench


@refusing()
def bench(
    names: tuple[str, ...],
    size: Any,
    chunks: Any,
    devices: str | None,
    memory_limit: str | None,
    repeat: int,
    count: int,
) -> None:
    """What `gpuscheduler bench` does."""
    console = Console()
    works = [load(name) for name in names or workload_names() if name != "tasks"]
    sizes = [work.size(size) for work in works]
    with scheduler(devices, memory_limit) as s:
        if works:
            console.print(workload_table(works, sizes, chunks, s, repeat))
        if "tasks" in names:
            console.print(task_table(count, s, repeat))


def workload_table(
    works: list[Workload], sizes: list[Size], chunks: Any, s: Scheduler, repeat: int
) -> Table:
    n = len(s.hardware.machine.devices)
    table = Table("workload", "size", "gpuscheduler", "Dask's threads", "ratio")
    table.title = f"median of {repeat} runs on {devices_said(s.hardware)}"
    for work, size in zip(works, sizes, strict=True):
        theirs = work.build(size, chunks, "numpy")
        ours = work.build(size, chunks, "cupy") if s.hardware.kind == "cuda" else theirs
        a, b = in_turns(
            partial(held, ours, scheduler=s.get),
            partial(held, theirs, scheduler="threads", num_workers=n),
            repeat,
        )
        table.add_row(work.name, said(size), seconds_said(a), seconds_said(b), f"{a / b:.2f}")
    return table


def task_table(count: int, s: Scheduler, repeat: int) -> Table:
    n = len(s.hardware.machine.devices)
    table = Table("shape", "gpuscheduler", "Dask's threads", "ratio")
    table.title = f"µs per task, of {count:,} that do nothing, on {devices_said(s.hardware)}"
    for shape, (dsk, keys) in idle_tasks(count).items():
        a, b = in_turns(
            partial(s.get, dsk, keys),
            partial(dask.threaded.get, dsk, keys, num_workers=n),
            repeat,
        )
        each = [f"{seconds / count * 1e6:.2f}" for seconds in (a, b)]
        table.add_row(shape, *each, f"{a / b:.2f}")
    return table


def in_turns(
    ours: Callable[[], Any], theirs: Callable[[], Any], repeat: int
) -> tuple[float, float]:
    """Medians; each runs once unmeasured, and who comes first changes."""
    ours(), theirs()
    times: dict[Any, list[float]] = {ours: [], theirs: []}
    for turn in range(repeat):
        for function in (ours, theirs) if turn % 2 else (theirs, ours):
            times[function].append(timed(function))
    return median(times[ours]), median(times[theirs])


def idle_tasks(n: int) -> dict[str, tuple[dict[Any, Task], list[Any]]]:
    """Graphs of n tasks that do nothing, and what to ask of them.

    >>> {shape: (len(dsk), len(keys)) for shape, (dsk, keys) in idle_tasks(7).items()}
    {'independent': (7, 7), 'chain': (7, 1), 'tree': (7, 1)}
    """
    independent = {i: Task(i, _nothing) for i in range(n)}
    chain = {i: Task(i, _nothing, *([TaskRef(i - 1)] if i else [])) for i in range(n)}
    tree = {
        i: Task(i, _nothing, *(TaskRef(j) for j in (2 * i + 1, 2 * i + 2) if j < n))
        for i in range(n)
    }
    return {
        "independent": (independent, list(independent)),
        "chain": (chain, [n - 1]),
        "tree": (tree, [0]),
    }


def _nothing(*_: Any) -> None:
    return None
