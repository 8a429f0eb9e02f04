"""Tables, figures and texts that the command line prints."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
import numpy as np
from dask.utils import format_bytes
from rich.table import Table

from .._version import __version__
from ..codegen.cuda.kernel import generate
from ..devices.choose import driver_version, has_cupy
from ..devices.cpu import cpu_count
from ..errors import NotGenerated
from ..frontend.task import kernels_of
from ..fusion.task import KernelTask
from ..ir.expr import Kernel
from ..ir.regions import bytes_touched
from ..plan.machine import DISK, ENDLESS, HOST, Machine, place_name
from ..plan.plan import Footprint, Plan
from ..runtime.host_memory import available_memory
from ..scheduler import Scheduler
from . import workload
from .workload import (
    Size,
    Workload,
    compute_and_hold,
    format_devices,
    format_rate,
    format_seconds,
    is_lazy_array,
    on_host,
    size_text,
    time_alternately,
)


def device_tables(hardware: Any) -> Iterable[Table | str]:
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
        yield from format_links(hardware.links())
    if hasattr(hardware, "nvml"):
        yield from sensor_tables(hardware.nvml)


def sensor_tables(nvml: Any) -> Iterable[Table | str]:
    """A table of what NVML measures on each device; unknown values are left empty."""
    sensors, facts = nvml.sensors(), nvml.facts()
    if not any(s.total for s in sensors):
        yield "NVML is not available: install the package nvidia-ml-py and NVIDIA's driver."
        return
    table = Table(
        "device", "in use", "other processes", "power", "temperature", "clock", "ECC errors",
        "NVLinks", "PCIe",
        title=f"NVML, driver {facts[0].driver}",
    )  # fmt: skip

    def format_known(value: Any, text: str = "{}") -> str:
        return "" if value is None else text.format(value)

    for device, (s, f) in enumerate(zip(sensors, facts, strict=True)):
        throttled = f", throttled by {' and '.join(s.throttled)}" if s.throttled else ""
        pcie = f.pcie_sent, f.pcie_received
        table.add_row(
            str(device),
            "" if s.used is None else f"{format_bytes(s.used)} of {format_bytes(s.total)}",
            "" if f.others is None else format_bytes(f.others),
            format_known(s.power, "{:.0f}") + format_known(s.power_limit, " of {:.0f} W"),
            format_known(s.temperature, "{} °C"),
            format_known(s.clock) + format_known(s.clock_max, " of {} MHz") + throttled,
            format_known(f.ecc_errors),
            str(len(f.nvlinks)),
            "" if None in pcie else " / ".join(f"{format_bytes(n)}/s" for n in pcie),
        )
    yield table


def format_links(links: Any) -> Iterable[Table | str]:
    """A table of measured bandwidths between devices and the host, and its footnote."""
    count = len(links.gbs)
    table = Table("from \\ to", *map(str, range(count)), "host", title="links, GB/s")
    for a, (_, d2h) in enumerate(links.host):
        cells = [
            "-" if a == b else f"{links.gbs[a][b]:.0f}{'*' * ((a, b) in links.staged)}"
            for b in range(count)
        ]
        table.add_row(str(a), *cells, f"{d2h:.0f}")
    table.add_row("host", *(f"{h2d:.0f}" for h2d, _ in links.host), "-")
    yield table
    if links.staged:
        yield "* through pinned host memory: these devices cannot copy to each other directly."


#: Packages that observing uses where they are installed, by the names of their distributions.
OPTIONAL = {"nvtx": "nvtx", "bokeh": "bokeh", "nvidia-ml-py": "nvml"}
OPTIONAL |= {"prometheus-client": "prometheus_client"}


def optional_versions() -> dict[str, str]:
    """Versions of optional packages, "not installed" for others."""
    out = {}
    for package, name in OPTIONAL.items():
        try:
            out[name] = version(package)
        except PackageNotFoundError:
            out[name] = "not installed"
    return out


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


def compare_footprints(
    took: Footprint, foreseen: Footprint | None, machine: Machine, surely: str = ""
) -> str:
    """A text of memory and spilling, measured beside predicted."""

    def with_prediction(what: str, real: int, predicted: int | None) -> str:
        said = "" if predicted is None else f" (predicted {surely}{format_bytes(predicted)})"
        return f"{what} {format_bytes(real)}{said}"

    peaks = foreseen.peak if foreseen else {}
    facts = [
        with_prediction(memory_label(m, machine), took.peak[m], peaks.get(m))
        for m in machine.memories
    ]
    for place in (HOST, DISK):
        expected = foreseen.spilled[place] if foreseen else 0
        if took.spilled[place] or expected:
            what = f"spilled to the {place_name(place)}"
            facts.append(with_prediction(what, took.spilled[place], expected))
    return ", ".join(facts)


def memory_label(memory: int, machine: Machine) -> str:
    return "peak" if len(machine.memories) == 1 else f"peak of device {memory}"


def label(size: Size, x: Any) -> str:
    """The size; of a square field, both sides."""
    square = isinstance(size, int) and is_lazy_array(x) and x.shape == (size, size)
    return size_text(x.shape if square else size, "x")


def timing_line(first: float, *others: float) -> str:
    if not others:
        return f"{format_seconds(first)} (one run, planning included)"
    return f"{format_seconds(min(others))} (first run {format_seconds(first)})"


def rates(work: Workload, size: Size, x: Any, seconds: float) -> Iterable[str]:
    if is_lazy_array(x) and x.ndim and not math.isnan(x.size):
        yield format_rate(x.size / seconds, " points/s")
    for name, unit in (("bytes_moved", "B/s"), ("flops", "FLOP/s")):
        if count := work.get(name):
            yield format_rate(count(size) / seconds, unit)


def check_value(work: Workload, size: Size, value: Any, check: bool | None) -> tuple[bool, str]:
    """Compare a workload's value with NumPy's: whether it is right, and a text that says so.

    `check` is the flag of the command line. None checks where NumPy's value is affordable. Where
    nothing is checked, returns True, with an empty text or one that says so.
    """
    reference = work.get("reference")
    if check is False or (reference is None and check is None):
        return True, ""
    if reference is None:
        raise click.UsageError(f"--check: {work.name} has no function reference(size)")
    chunked = is_lazy_array(value)
    windows: list[tuple[slice, ...]] = []
    if chunked or not work.is_affordable(size):
        windows = work.windows(np.shape(value))
        if not windows and not check:
            return True, "not checked (--check does, and takes a while)"
    pairs = [
        (on_host(value[w]).compute() if chunked else value[w], reference(size, w)) for w in windows
    ] or [(fetch_whole(value), reference(size))]
    rtol, atol = work.tolerance(size)
    correct = all(
        np.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True) for got, expected in pairs
    )
    verdict = f"{'equals' if correct else 'DIFFERS from'} NumPy {precision_text(pairs)}"
    return correct, verdict + (f" at {len(windows)} places" if windows else "")


def fetch_whole(value: Any) -> Any:
    return on_host(value).compute() if is_lazy_array(value) else value


def precision_text(pairs: Iterable[tuple[Any, Any]]) -> str:
    """The largest difference of results from expected ones, relative to the largest.

    >>> precision_text([(np.array([1.0, 2.0001]), np.array([1.0, 2.0]))])
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
    step = max(1, math.ceil(max(value.shape) / workload.PIXELS))
    rows, columns = value.shape
    axes = work.get("AXES") or {"row": (0, rows - 1), "column": (0, columns - 1)}
    (y, (bottom, top)), (x, (left, right)) = axes.items()
    drawing = figure(figsize=(7, 6), layout="constrained")
    plot = drawing.add_subplot(xlabel=x, ylabel=y, title=title)
    image = plot.imshow(
        fetch_whole(value[::step, ::step]),
        origin="lower" if work.get("AXES") else "upper",
        extent=(left, right, bottom, top) if work.get("AXES") else (left, right, top, bottom),
        aspect="auto",
    )
    drawing.colorbar(image, ax=plot)
    try:
        drawing.savefig(png)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--png: {error}") from error


def prediction_table(planned: Plan, foreseen: Footprint) -> Iterable[Table]:
    machine = planned.machine
    table = Table("device", "steps", "busy", "peak memory", "limit", title="devices")
    for d in machine.devices:
        mine = [s.seconds for s in planned.steps if s.place == d]
        memory = machine.memory_of(d)
        table.add_row(
            str(d),
            f"{len(mine):,}",
            format_seconds(sum(mine)),
            planned.qualifier + format_bytes(foreseen.peak[memory]) if memory == d else "the same",
            format_bytes(machine.limit(memory)) if memory == d else "the same",
        )
    for place in (HOST, DISK):
        if nbytes := foreseen.spilled[place]:
            limit = format_bytes(machine.limit(place)) if machine.limit(place) < ENDLESS else ""
            what = f"{format_bytes(nbytes)} spilled"
            table.add_row(place_name(place), "", what, format_bytes(foreseen.peak[place]), limit)
    yield table
    traffic = {
        link: nbytes
        for link, nbytes in foreseen.traffic.items()
        if nbytes and not (machine.shared and HOST in link)
    }
    if traffic:
        links = Table("from", "to", "bytes", title="links")
        for (src, dst), nbytes in sorted(traffic.items()):
            links.add_row(place_name(src), place_name(dst), format_bytes(nbytes))
        yield links


def kernel_tasks(planned: Plan) -> Iterator[KernelTask]:
    """The kernel tasks of a plan, those of batches one by one."""
    for step in planned.steps:
        yield from kernels_of(step.task)


def kernels(planned: Plan) -> Iterator[Kernel]:
    """The distinct kernels of a plan."""
    programs = {id(f.program): f.program for f in kernel_tasks(planned)}
    return (k for p in programs.values() for k in p.kernels)


def pass_table(planned: Plan) -> Table:
    """A table of the compiler's passes, with the tasks of the graph before and behind each."""
    table = Table("pass", "tasks before", "tasks after", title="passes")
    for report in planned.passes:
        table.add_row(report.name, f"{report.before:,}", f"{report.after:,}")
    return table


def kernel_tables(planned: Plan) -> Iterator[Table]:
    """A table of the fused kernels and their launches; nothing where there are none."""
    counts = Counter(k for f in kernel_tasks(planned) for k in f.program.kernels)
    if counts:
        table = Table("kernel", "times", "bytes", "operations", title="fused kernels")
        rows: dict[str, list[int]] = {}
        for kernel, times in counts.items():
            row = rows.setdefault(kernel_label(kernel), [0, 0, 0])
            row[0] += times
            row[1] += times * bytes_touched(kernel)
            row[2] += times * kernel.operations()
        for name, (times, nbytes, operations) in rows.items():
            table.add_row(name, f"{times:,}", format_bytes(nbytes), f"{operations:.3g}")
        yield table


def kernel_label(kernel: Kernel) -> str:
    try:
        return generate(kernel).name
    except NotGenerated as error:
        return f"none on a GPU: {error}"


def workload_table(
    works: list[Workload], sizes: list[Size], chunks: Any, s: Scheduler, repeat: int
) -> Table:
    """Time workloads here and with Dask's threaded scheduler, in turns, as a table of medians.

    On CPU devices Dask gets as many threads as there are devices; beside GPUs it gets every core.
    """
    on_gpus = s.hardware.kind == "cuda"
    threads = cpu_count() if on_gpus else len(s.hardware.machine.devices)
    table = Table("workload", "size", "gpuscheduler", f"Dask, {threads} threads", "ratio")
    table.title = f"median of {repeat} runs on {format_devices(s.hardware)}"
    for work, size in zip(works, sizes, strict=True):
        theirs = work.build(size, chunks, "numpy")
        ours = work.build(size, chunks, "cupy") if on_gpus else theirs
        our_time, dask_time = time_alternately(
            partial(compute_and_hold, ours, scheduler=s.get),
            partial(compute_and_hold, theirs, scheduler="threads", num_workers=threads),
            repeat,
        )
        times = format_seconds(our_time), format_seconds(dask_time)
        table.add_row(work.name, size_text(size), *times, f"{our_time / dask_time:.2f}")
    return table
