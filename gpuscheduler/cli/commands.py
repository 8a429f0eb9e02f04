"""The commands: show devices, run a workload, print its plan, measure it.

A workload is a module with a function `build(size, chunks, xp)` that returns a lazy Dask
collection. It is a reference workload, given by its name, or a user's file, given by its path.
graphs/__init__.py lists the optional parts of a workload (`reference`, `bytes_moved`, `flops`,
`SMALL`, ...). The options of the commands are in `command_line`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import click
import dask.threaded
from dask._task_spec import Task, TaskRef
from dask.utils import format_bytes, parse_bytes
from rich.console import Console
from rich.table import Table

from .. import default
from ..diagnostics.explain import Explanation, explain_plan
from ..diagnostics.progress import ProgressDisplay, TerminalScreen
from ..diagnostics.text import write_text
from ..errors import OutOfMemory, PlanError
from ..frontend.graph import Graph
from ..frontend.lowering import from_dask, received_by_scheduler
from ..fusion.task import cuda_source
from ..options import Options
from ..pipeline.compile import plan_dask, write_in_place
from ..pipeline.tall_layers import choose_rewriting
from ..plan.machine import Machine
from ..plan.plan import Footprint, Plan
from ..plan.working_memory import WorkingMemory
from ..runtime.gather import ResultAssembly
from ..runtime.protocol import Hardware
from ..runtime.simulated import predict
from ..scheduler import Scheduler
from .report import (
    check_value,
    compare_footprints,
    device_tables,
    draw,
    figure_class,
    kernel_tables,
    kernels,
    label,
    optional_versions,
    pass_table,
    prediction_table,
    rates,
    timing_line,
    versions,
    workload_table,
)
from .workload import (
    CommandError,
    compute_and_hold,
    format_devices,
    format_seconds,
    is_lazy_array,
    load,
    time_alternately,
    workload_names,
)

#: Bytes of memory of each device that `plan --pretend` simulates.
H200 = 141 * 10**9


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Print errors of memory and planning as one line, without a traceback."""
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
        raise CommandError(str(error)) from error


def read_options() -> Options:
    try:
        return Options.read()
    except ValueError as error:
        raise CommandError(str(error)) from error


# ---- info


#: Where NumPy's arrays are computed, by the option `numpy`.
NUMPY = {
    "auto": 'numpy="auto": NumPy arrays are computed on GPUs where that should be faster.',
    "gpu": 'numpy="gpu": NumPy arrays are computed on GPUs wherever they can be.',
    "gpu-only": 'numpy="gpu-only": NumPy arrays are computed on GPUs, or not at all.',
    "host": 'numpy="host": NumPy arrays are computed on the host.',
}


@errors_as_one_line()
def info(devices: str | None, memory_limit: str | None) -> None:
    """Print the devices, their links and the versions: `gpuscheduler info`."""
    console = Console()
    with scheduler(devices, memory_limit) as s:
        for part in device_tables(s.hardware):
            console.print(part)
        if s.host_threads:
            room = format_bytes(s.hardware.machine.host_memory)
            console.print(
                f"What has nothing to do with a GPU runs on {s.host_threads} host threads, within "
                f"{room}."
            )
        if s.hardware.kind == "cuda":
            console.print(NUMPY[s.options.numpy], highlight=False)
        found = versions(s.hardware.kind) | optional_versions()
        console.print(", ".join(f"{name} {v}" for name, v in found.items()))


# ---- run


@errors_as_one_line()
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
    report: str | None = None,
) -> None:
    """Run a workload, and print times and memory: `gpuscheduler run`."""
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
        with default.report(report, scheduler=s, code=False) if report else nullcontext():
            for turn in range(1 + repeat):
                value = None  # a large result may fit only once
                gc.collect()
                display = ProgressDisplay(
                    s.recorder,
                    after=1.0 if progress is None else 0.0,
                    screen=TerminalScreen(console),
                )
                with display if show and turn == 0 else nullcontext():
                    begin = time.perf_counter()
                    value = compute_and_hold(x)
                    times.append(time.perf_counter() - begin)
        took = s.last
        correct, verdict = check_value(work, size, value, check)
        where = format_devices(s.hardware)
        what = f"{work.name} {label(size, x)}"
        facts = [timing_line(*times), *rates(work, size, x, min(times)), verdict]
        click.echo(f"{what} on {where}: {', '.join(filter(None, facts))}")
        if took is not None:
            click.echo(f"memory: {compare_footprints(took, foreseen, s.hardware.machine, surely)}")
        if figure and png:
            draw(work, value, png, what, figure)
    if not correct:
        raise click.ClickException(f"the result of {work.name} differs from NumPy's")


def predicted_run(x: Any, s: Scheduler) -> tuple[str, Footprint]:
    """Predict a run of x, with how sure that is.

    The scheduler learns nothing of x.
    """
    hardware = s.hardware
    planned = plan_of(x, hardware.machine, hardware, s.options)
    return planned.qualifier, predict(planned, s.options.window, s.options.deep_window)


# ---- plan


@errors_as_one_line()
def plan(
    name: str,
    size: Any,
    chunks: Any,
    devices: str | None,
    memory_limit: str | None,
    pretend: int | None,
    source: bool,
    passes: bool,
    html: str | None = None,
) -> None:
    """Print the plan of a workload: `gpuscheduler plan`."""
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
            where = format_devices(s.hardware)
    foreseen = predict(planned, options.window, options.deep_window)
    unknown = f" ({planned.unknown_count:,} of unknown size)" if planned.unknown_count else ""
    click.echo(
        f"{work.name} {label(size, x)} on {where}: {len(planned.steps):,} steps{unknown}, "
        f"predicted {planned.qualifier}{format_seconds(foreseen.seconds)}"
    )
    for table in (
        *prediction_table(planned, foreseen),
        *(kernel_tables(planned) if source else ()),
    ):
        console.print(table)
    kind = "cuda" if pretend else s.hardware.kind
    page = explain_plan(planned, foreseen, is_gpu=kind == "cuda")
    click.echo(str(page))
    if html:
        write_html(html, page)
    if passes:
        console.print(pass_table(planned))
    if source:
        for text in sorted({cuda_source(k) for k in kernels(planned)}):
            click.echo(text)


def write_html(path: str, page: Explanation) -> None:
    try:
        write_text(path, f"<!doctype html><meta charset='utf-8'>{page._repr_html_()}\n")
    except OSError as error:
        raise click.ClickException(f"--html: {error}") from error


def pretended_limit(text: str | None) -> int:
    limit = limit_of(text or "0.9")
    try:
        return int(limit * H200) if isinstance(limit, float) else int(parse_bytes(limit or 0))
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r}: use bytes, a string such as '8 GiB', or a fraction up to 1.0",
            param_hint="--memory-limit",
        ) from error


def plan_of(
    x: Any,
    machine: Machine,
    hardware: Hardware | None = None,
    options: Options | None = None,
) -> Plan:
    """The plan that computing x would run; on GPUs, where there is no hardware."""
    dsk, keys = received_by_scheduler(x, by=compute_and_hold)
    home, kind = (hardware.home, hardware.kind) if hardware is not None else (None, "cuda")
    options = options or Options()
    rewrite = choose_rewriting(kind, options)

    def read_graph(apart: Mapping[str, str]) -> Graph:
        send = kind == "cuda"
        return from_dask(dsk, keys, home=home, send=send, apart=apart, rewrite=rewrite)

    graph, plan = plan_dask(read_graph, machine, home, kind, options)
    WorkingMemory(kind).foresee(plan)
    return (
        plan
        if hardware is None
        else write_in_place(plan, ResultAssembly(plan, graph.alias), hardware)
    )


# ---- bench


@errors_as_one_line()
def bench(
    names: tuple[str, ...],
    size: Any,
    chunks: Any,
    devices: str | None,
    memory_limit: str | None,
    repeat: int,
    count: int,
) -> None:
    """Measure a workload, or the scheduler itself: `gpuscheduler bench`."""
    console = Console()
    works = [load(name) for name in names or workload_names() if name != "tasks"]
    sizes = [work.size(size) for work in works]
    with scheduler(devices, memory_limit) as s:
        if works:
            console.print(workload_table(works, sizes, chunks, s, repeat))
        if "tasks" in names:
            console.print(task_table(count, s, repeat))


def task_table(count: int, s: Scheduler, repeat: int) -> Table:
    n = len(s.hardware.machine.devices)
    table = Table("shape", "gpuscheduler", "Dask's threads", "ratio")
    table.title = f"µs per task, of {count:,} that do nothing, on {format_devices(s.hardware)}"
    for shape, (dsk, keys) in idle_tasks(count).items():
        a, b = time_alternately(
            partial(s.get, dsk, keys),
            partial(dask.threaded.get, dsk, keys, num_workers=n),
            repeat,
        )
        each = [f"{seconds / count * 1e6:.2f}" for seconds in (a, b)]
        table.add_row(shape, *each, f"{a / b:.2f}")
    return table


def idle_tasks(n: int) -> dict[str, tuple[dict[Any, Task], list[Any]]]:
    """Graphs of n tasks that do nothing, by shape, each with the keys to compute.

    >>> {shape: (len(dsk), len(keys)) for shape, (dsk, keys) in idle_tasks(7).items()}
    {'independent': (7, 7), 'chain': (7, 1), 'tree': (7, 1)}
    """
    independent = {i: Task(i, _do_nothing) for i in range(n)}
    chain = {i: Task(i, _do_nothing, *([TaskRef(i - 1)] if i else [])) for i in range(n)}
    tree = {
        i: Task(i, _do_nothing, *(TaskRef(j) for j in (2 * i + 1, 2 * i + 2) if j < n))
        for i in range(n)
    }
    return {
        "independent": (independent, list(independent)),
        "chain": (chain, [n - 1]),
        "tree": (tree, [0]),
    }


def _do_nothing(*_: Any) -> None:
    return None
