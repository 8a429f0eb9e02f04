"""Prometheus metrics of schedulers, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..plan.machine import place_name
from .snapshot import SchedulerFacts, SnapshotTaker

Snapshots = Callable[[], Iterable[dict[str, Any]]]


class Collector:
    """A collector for a registry of `prometheus_client`.

    Parameters
    ----------
    source
        A `Scheduler`, or a function that gives snapshots, as `snapshot.read_process` does.

    Raises
    ------
    ImportError
        without the package prometheus_client.

    >>> import gpuscheduler
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> registry = CollectorRegistry()
    >>> with gpuscheduler.Scheduler("cpu:2") as scheduler:
    ...     registry.register(Collector(scheduler))
    ...     text = generate_latest(registry).decode()
    >>> 'gpuscheduler_memory_bytes{place="device 0",scheduler=' in text
    True
    """

    def __init__(self, source: Any):
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "metrics need prometheus_client: pip install prometheus-client"
            ) from (error)
        if hasattr(source, "recorder"):
            taker = SnapshotTaker(SchedulerFacts.from_scheduler(source), "")
            self._snapshots: Snapshots = lambda: [taker.take()]
        else:
            self._snapshots = source

    def describe(self) -> list[Any]:
        """Nothing: a registry then asks for no metrics when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """The families of metrics. No label names a layer or a key: these are unbounded."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def counter(name: str, text: str, *labels: str) -> Any:
            return CounterMetricFamily(f"gpuscheduler_{name}", text, labels=["scheduler", *labels])

        def gauge(name: str, text: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"gpuscheduler_{name}", text, labels=["scheduler", *labels])

        runs = counter("runs", "Runs that have ended.", "how", "result")
        seconds = counter("run_seconds", "Seconds that runs took.")
        steps = counter("steps", "Steps of runs that have ended.")
        plans = counter("plans", "Plans, by where they came from.", "planned")
        moved = counter("moved_bytes", "Bytes copied, by link.", "src", "dst")
        spilled = counter("spilled_bytes", "Bytes that had to leave a device.", "place")
        left = gauge("steps_left", "Steps of runs under way that are not done.")
        memory = gauge("memory_bytes", "Bytes of memory.", "place", "what")
        busy = gauge("device_busy_ratio", "Part of the last second in which steps ran.", "device")
        used = gauge("device_utilization_ratio", "Utilisation, as NVML reads it.", "device")
        power = gauge("device_power_watts", "Power, as NVML reads it.", "device")
        simple = {"seconds": seconds, "steps": steps}
        for found in self._snapshots():
            number = f"{found['pid']}-{found['scheduler']}"
            for *key, value in found["totals"]:
                if key[0] in simple:
                    simple[key[0]].add_metric([number], value)
                elif key[0] == "runs":
                    runs.add_metric([number, key[1] or "none", key[2]], value)
                elif key[0] == "planned":
                    plans.add_metric([number, key[1] or "none"], value)
                elif key[0] == "spilled":
                    spilled.add_metric([number, place_name(int(key[1]))], value)
            for src, dst, nbytes, _ in found["links"]:
                moved.add_metric([number, place_name(src), place_name(dst)], nbytes)
            left.add_metric([number], sum(run["left"] for run in found["runs"]))
            for device in found["devices"]:
                name = str(device["device"])
                for what in ("values", "working", "persisted", "peak", "limit"):
                    memory.add_metric([number, f"device {name}", what], device[what])
                busy.add_metric([number, name], device["busy"])
                sensors = device["sensors"]
                if sensors.get("utilization") is not None:
                    used.add_metric([number, name], sensors["utilization"])
                if sensors.get("power") is not None:
                    power.add_metric([number, name], sensors["power"])
        yield from (runs, seconds, steps, plans, moved, spilled, left, memory, busy, used, power)


def metrics_text(snapshots: Snapshots) -> bytes:
    """The text that Prometheus scrapes."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Collector(snapshots))
    return generate_latest(registry)
