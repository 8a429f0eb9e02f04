"""What a snapshot says in a few words: which layer, which device, how much memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from dask.utils import format_bytes

#: The part of a memory from which it counts as short.
SHORT = 0.9
#: A device that is busy for less than this part of the time waits, if others are not.
WAITS = 0.5


class Headline(NamedTuple):
    """One fact; `is_bad` where somebody should look."""

    what: str  # "layer", "devices", "memory", "runs"
    text: str
    is_bad: bool = False


def headlines(snapshot: dict[str, Any]) -> list[Headline]:
    """Runs, the layer that takes the time, devices that wait, and memory, in this order."""
    return [
        _runs_headline(snapshot),
        _layer_headline(snapshot),
        _devices_headline(snapshot),
        _memory_headline(snapshot),
    ]


def _runs_headline(snapshot: dict[str, Any]) -> Headline:
    runs = snapshot["runs"]
    if not runs:
        last = snapshot["last"]
        if last is None:
            return Headline("runs", "nothing has run yet")
        how = f"failed: {last['error']}" if last["error"] else f"took {last['seconds']:.3g} s"
        return Headline("runs", f"idle; run {last['number']} {how}", bool(last["error"]))
    texts = []
    for run in runs[:3]:
        if run["waits"]:
            texts.append(f"run {run['number']} waits for memory")
        elif not run["steps"]:
            texts.append(f"run {run['number']} is being planned")
        else:
            texts.append(f"run {run['number']}: {run['left']:,} of {run['steps']:,} steps left")
    more = len(runs) - 3 + snapshot["more_runs"]
    return Headline("runs", ", ".join(texts) + (f" and {more} more runs" if more > 0 else ""))


def _layer_headline(snapshot: dict[str, Any]) -> Headline:
    layers = snapshot["layers"]
    every = sum(layer["seconds"] for layer in layers)
    if not every:
        return Headline("layer", "no steps have been seen yet")
    first = layers[0]
    where = f" ({first['line']})" if first["line"] else ""
    return Headline("layer", f"{first['label']}{where} takes {first['seconds'] / every:.0%}")


def _devices_headline(snapshot: dict[str, Any]) -> Headline:
    devices = snapshot["devices"]
    busy = [d["busy"] for d in devices]
    most = max(busy, default=0.0)
    mean = sum(busy) / len(busy) if busy else 0.0
    waiting = [d["device"] for d in devices if d["busy"] < WAITS * most]
    if most < 0.05:
        return Headline("devices", "all devices are idle")
    if waiting:
        names = ", ".join(map(str, waiting[:8])) + (" …" if len(waiting) > 8 else "")
        text = f"device{'s'[: len(waiting) > 1]} {names} wait{'s'[: len(waiting) == 1]}"
        return Headline("devices", f"{text}; the busiest runs steps {most:.0%} of the time", True)
    return Headline("devices", f"devices run steps {mean:.0%} of the time")


def _memory_headline(snapshot: dict[str, Any]) -> Headline:
    fullest: dict[str, Any] | None = None
    part = -1.0
    for d in snapshot["devices"]:
        most = max(d["peak"], d["values"] + d["working"])
        held = most / d["limit"] if d["limit"] else 0.0
        if held > part:
            fullest, part = d, held
    if fullest is None:
        return Headline("memory", "no device")
    peak = max(fullest["peak"], fullest["values"] + fullest["working"])
    text = f"{format_bytes(peak)} of {format_bytes(fullest['limit'])} at most"
    several = len({d["memory"] for d in snapshot["devices"]}) > 1
    where = f" on device {fullest['device']}" if several else ""
    spilled = sum(entry["used"] for place, entry in snapshot["memories"].items() if int(place) < 0)
    is_short = peak > SHORT * fullest["limit"] or spilled > 0
    end = f"; {format_bytes(spilled)} spilled" if spilled else ""
    word = "memory is short: " if is_short else "memory is not short: "
    return Headline("memory", f"{word}{text}{where}{end}", is_short)
