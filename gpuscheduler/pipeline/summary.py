"""Show a scheduler in one line, and as a table for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dask.utils import format_bytes

from ..plan.machine import DISK, HOST
from ..runtime.protocol import Hardware

#: Where persisted chunks are when they are on no device.
AWAY = {HOST: "on the host", DISK: "on disk"}


@dataclass(frozen=True)
class SchedulerSummary:
    """What people see of a scheduler."""

    hardware: Hardware
    mine: Mapping[int, int]  # bytes of its own persisted chunks by place
    hosts: Mapping[int, int]  # bytes of those of the host's threads by their places
    host_threads: int  # beside those of the devices
    is_closed: bool

    @cached_property
    def persisted_bytes(self) -> Mapping[int, int]:
        """Bytes of all persisted chunks by place."""
        out = {**self.mine}
        for place, nbytes in self.hosts.items():  # the threads' memory is the host's
            where = min(place, HOST)
            out[where] = out.get(where, 0) + nbytes
        return out

    @property
    def threads(self) -> str:
        """The host's threads in words; "" where there are none."""
        n = self.host_threads
        return f"{n} host thread{'s'[: n > 1]}" if n else ""

    @property
    def bytes_elsewhere(self) -> list[tuple[str, str]]:
        """Where persisted chunks are beside the devices, and their bytes."""
        return [
            (where, format_bytes(self.persisted_bytes[place]))
            for place, where in AWAY.items()
            if place in self.persisted_bytes
        ]

    def line(self) -> str:
        """One line: devices, limits, persisted bytes and lost devices."""
        hardware, machine = self.hardware, self.hardware.machine
        n = len(machine.devices)
        limits = " / ".join(dict.fromkeys(format_bytes(m) for m in machine.memory))
        facts = [f"{n} {hardware.kind} device{'s'[: n > 1]}", f"memory limit {limits} each"]
        if self.threads:
            facts.append(self.threads)
        if self.persisted_bytes:
            away = ", ".join(f"{nbytes} {where}" for where, nbytes in self.bytes_elsewhere)
            held = format_bytes(sum(self.persisted_bytes.values()))
            facts.append(f"persisted {held}" + (f" ({away})" if away else ""))
        if hardware.trouble:
            facts.append(hardware.trouble)
        if self.is_closed:
            facts.append("closed")
        return f"<Scheduler on {', '.join(facts)}>"

    def html(self) -> str:
        """A table with one row for each device."""
        machine, names, held = self.hardware.machine, self.hardware.names, self.persisted_bytes
        rows = [
            (str(d), names[d], format_bytes(machine.memory[d]), format_bytes(held.get(d, 0)))
            for d in machine.devices
        ]
        rows += [("", where, "", nbytes) for where, nbytes in self.bytes_elsewhere]
        if self.threads:
            rows.append(("", self.threads, format_bytes(machine.host_memory), ""))
        table = "".join(f"<tr>{''.join(f'<td>{v}</td>' for v in row)}</tr>" for row in rows)
        return (
            f"<b>gpuscheduler.Scheduler</b>{' (closed)' if self.is_closed else ''}"
            "<table><tr><th>device</th><th>name</th><th>memory limit</th><th>persisted</th></tr>"
            f"{table}</table>"
        )
