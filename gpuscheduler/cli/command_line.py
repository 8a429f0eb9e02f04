"""The command line: commands, their options and their help.

The work of the commands is in `commands`, which is imported when a command runs: Dask and NumPy
take a second to load, and `--help` needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .._version import __version__


class Commands(click.Group):
    """Ctrl-C is quiet."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpuscheduler")
def main() -> None:
    """Plain Dask on every GPU of a machine, from one process."""


class SizeType(click.ParamType):
    """`1000`, `400,250`, or one of some words."""

    def __init__(self, name: str, *words: str):
        self.name, self.words = name, words

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str) or value in self.words:
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = (0,)
        if min(numbers) < 1:
            words = "".join(f", or {word!r}" for word in self.words)
            self.fail(f"{value!r}: use a number such as 1000, or 400,250{words}", param, ctx)
        return numbers if len(numbers) > 1 else numbers[0]


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option(
        "--memory-limit",
        metavar="LIMIT",
        help="What values may take on each device: '8 GiB', bytes, or a fraction such as 0.5 of "
        "what is free.  [default: 0.9]",
    )(command)
    return click.option(
        "--devices",
        metavar="STR",
        help="'auto' (every GPU; CPU devices where there is none), 'cpu', 'cpu:4', 'cuda', "
        "'cuda:0,2'.  [default: Dask's configuration, else auto]",
    )(command)


size_option = click.option(
    "--size",
    type=SizeType("N|N,M", "small", "full"),
    help="Size of the workload; 'small' is what the tests use, 'full' fills four large GPUs.  "
    "[default: four times small]",
)
chunks_option = click.option(
    "--chunks",
    type=SizeType("N|N,M", "auto"),
    help="Size of the chunks, or 'auto'.  [default: the workload's choice]",
)


@main.command()
@device_options
def info(**said: Any) -> None:
    """Show the devices, their memory, the links between them, and versions."""
    from . import commands

    commands.info(**said)


@main.command()
@click.argument("pid", required=False, type=int)
@click.option("--once", is_flag=True, help="Print the state once.")
@click.option("--json", "as_json", is_flag=True, help="Print the state once, as JSON.")
@click.option(
    "--every",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.1),
    help="Seconds between two looks.",
)
def top(**said: Any) -> None:
    """Show what schedulers do now: devices, memory, layers.

    Reads what schedulers of this user with dashboard=True or dashboard="top" write; PID names one
    process.
    """
    from . import top as command

    command.top(**said)


@main.command()
@click.argument("name")
@size_option
@chunks_option
@device_options
@click.option(
    "--check/--no-check",
    default=None,
    help="Compare the result with NumPy's.  [default: all of it where that is quick, else parts "
    "of it where the workload can]",
)
@click.option("--png", metavar="FILE", help="Draw a two-dimensional result.")
@click.option(
    "--repeat",
    default=3,
    show_default=True,
    type=click.IntRange(0),
    help="Runs after the first; the best is reported.",
)
@click.option("--report", metavar="FILE", type=click.Path(), help="Write a report of it as HTML.")
@click.option(
    "--progress/--no-progress",
    default=None,
    help="Show a progress bar during the first run.  [default: on a terminal]",
)
def run(**said: Any) -> None:
    """Run the workload NAME, and say how fast it was and whether it is right.

    NAME is a reference workload, such as haversine_mesh, or the path of a .py file with a function
    build(size) that gives a Dask collection.

    The first run includes planning. A result of more than 1 GiB stays in its chunks on the
    devices.
    """
    from . import commands

    commands.run(**said)


@main.command()
@click.argument("name")
@size_option
@chunks_option
@device_options
@click.option(
    "--pretend",
    metavar="N",
    type=click.IntRange(1),
    help="Plan for N H200 GPUs that need not be there.",
)
@click.option("--source", is_flag=True, help="Print the CUDA source of each kernel.")
@click.option("--passes", is_flag=True, help="Print the tasks before and after each pass.")
@click.option("--html", metavar="FILE", type=click.Path(), help="Write the page as HTML, too.")
def plan(**said: Any) -> None:
    """Plan the workload NAME and predict its run. Computes nothing.

    Prints the steps, the busy time and the peak memory of each device, what is spilled, the bytes
    over each link, the fused kernels, why other tasks are none, and advice.
    """
    from . import commands

    commands.plan(**said)


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@size_option
@chunks_option
@device_options
@click.option(
    "--repeat",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="Timed runs of each; medians are reported.",
)
@click.option(
    "--n",
    "count",
    default=100_000,
    show_default=True,
    type=click.IntRange(1),
    help="How many tasks, for 'bench tasks'.",
)
def bench(**said: Any) -> None:
    """Time workloads against Dask's threaded scheduler, in this process, in turns.

    Without NAME, all reference workloads. `bench tasks` times tasks that do nothing, in three
    shapes. Each runs once before it is timed. Both schedulers get as many threads as there are
    devices; on GPUs, Dask's works on NumPy.

    BLAS has threads of its own, and they get in the way of both: set OMP_NUM_THREADS=1.
    """
    from . import commands

    commands.bench(**said)
