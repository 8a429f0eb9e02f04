"""`gpuscheduler top`: what the schedulers of this user do now, read from their snapshots.

It starts no scheduler, and imports neither CuPy nor Dask's arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import sleep, time
from typing import Any

import click
from dask.utils import format_bytes
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..diagnostics.headline import SHORT, headlines
from ..diagnostics.snapshot_file import (
    EVERY,
    SnapshotError,
    find_snapshots,
    is_alive,
    read_snapshot,
    watch,
)

#: Seconds for which a scheduler may take to write its first snapshot.
PATIENCE = 4 * EVERY
NOTHING = (
    "no scheduler of this user writes snapshots: make it with Scheduler(dashboard='top') or "
    "dashboard=True, or set DASK_GPUSCHEDULER__DASHBOARD=top"
)


def top(pid: int | None, once: bool, as_json: bool, every: float) -> None:
    """Show the schedulers of a process, or of all: `gpuscheduler top`."""
    console = Console()
    try:
        found = read_all(pid, PATIENCE)
    except SnapshotError as error:
        raise click.ClickException(str(error)) from error
    if not found:
        raise click.ClickException(NOTHING if pid is None else f"process {pid}: {NOTHING}")
    if as_json:
        click.echo(json.dumps(found))
        return
    if once:
        console.print(render(found, time()))
        return
    with Live(render(found, time()), console=console, auto_refresh=False, screen=False) as live:
        while found:
            sleep(every)
            found = read_all(pid, 0.0) or []
            if found:
                live.update(render(found, time()), refresh=True)


def read_all(
    pid: int | None, patience: float, pause: Callable[[float], None] = sleep
) -> list[dict[str, Any]]:
    """The latest snapshots of this user's processes; waits so many seconds for fresh ones."""
    end = time() + patience
    asked = time()
    while True:
        paths = {k: p for k, p in find_snapshots().items() if pid is None or k[0] == pid}
        out, is_stale = [], False
        for (owner, _), path in paths.items():
            watch(path)
            found = read_snapshot(path)
            alive = is_alive(owner)
            if found is not None:
                found["ended"] = not alive
                out.append(found)
            if alive and (found is None or found["time"] < asked - 2 * EVERY):
                is_stale = True
        if not is_stale or time() > end:
            return out
        pause(EVERY / 5)


def render(found: list[dict[str, Any]], now: float) -> RenderableType:
    """A table for each scheduler."""
    parts: list[RenderableType] = []
    for snapshot in found:
        parts += [_title(snapshot, now), _device_table(snapshot)]
        if layers := snapshot["layers"][:5]:
            parts.append(_layer_table(layers))
    return Group(*parts)


def _title(snapshot: dict[str, Any], now: float) -> Text:
    text = Text(f"{snapshot['program']}  pid {snapshot['pid']}  ", style="bold")
    if snapshot.get("ended"):
        text.append("the process has ended; its last state  ", style="red")
    elif now - snapshot["time"] > 3:
        text.append(f"no news for {now - snapshot['time']:.0f} s  ", style="red")
    for line in headlines(snapshot):
        text.append(f"\n  {line.text}", style="not bold red" if line.is_bad else "not bold")
    return text


def _device_table(snapshot: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    sensed = any(d["sensors"].get("power") is not None for d in snapshot["devices"])
    names = ["device", "name", "busy", "values", "working", "persisted", "limit"]
    for name in [*names, *(["NVML", "power", "heat"] if sensed else []), "links in / out"]:
        table.add_column(name, justify="left" if name == "name" else "right", no_wrap=True)
    rates: dict[int, list[float]] = {d["device"]: [0.0, 0.0] for d in snapshot["devices"]}
    for src, dst, _, rate in snapshot["links"]:
        if dst in rates:
            rates[dst][0] += rate
        if src in rates:
            rates[src][1] += rate
    for d in snapshot["devices"]:
        short = d["values"] + d["working"] > SHORT * d["limit"]
        sensors = d["sensors"]
        more = []
        if sensed:
            used, power = sensors.get("utilization"), sensors.get("power")
            heat = sensors.get("temperature")
            more = [
                "" if used is None else f"{used:.0%}", "" if power is None else f"{power:.0f} W",
                "" if heat is None else f"{heat} °C",
            ]  # fmt: skip
        into, out = (f"{rate / 1e9:.1f}" for rate in rates[d["device"]])
        table.add_row(
            str(d["device"]), str(d["name"]), f"{d['busy']:.0%}", format_bytes(d["values"]),
            format_bytes(d["working"]), format_bytes(d["persisted"]), format_bytes(d["limit"]),
            *more, f"{into} / {out} GB/s", style="red" if short else "",
        )  # fmt: skip
    return table


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("layer", "line", "seconds", "steps", "left"):
        table.add_column(name, justify="left" if name in ("layer", "line") else "right")
    for layer in layers:
        table.add_row(
            layer["label"], layer["line"], f"{layer['seconds']:.2f}", f"{layer['steps']:,}",
            f"{layer['left']:,}",
        )  # fmt: skip
    return table
