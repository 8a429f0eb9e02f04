"""What a cluster shows of its runs: timelines and reports of all workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from os import PathLike
from typing import Any
from uuid import uuid4

from ..diagnostics.report import Recorded, Report
from ..diagnostics.trace_json import write_trace
from ..runtime.observe import Level
from .membership import Membership, worker_label

#: Characters of a worker's name that are too many beside a lane.
LONG = 12


class ObservedCluster:
    """The part of `AttachedCluster` by which people look at runs."""

    membership: Membership

    def _addresses(self) -> list[str]:
        raise NotImplementedError

    def timeline(self, path: str | PathLike[str]) -> None:
        """Write a file for Perfetto that shows where and when each step ran.

        Needs `attach(..., timeline=True)`. Each worker is a process, each of its devices a thread.
        Times are those of the clock of the cluster's scheduler.
        """
        write_trace(path, self._ask_workers("trace"))

    def report(
        self,
        path: str | PathLike[str],
        level: str = "device",
        *,
        code: bool = True,
        timeline: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Report:
        """Write a report of what all workers run in a `with` block, as one HTML file.

        It has the lanes of every device of every worker, their memories, copies and layers. The
        parameters are those of `gpuscheduler.report`.
        """
        recording = ClusterRecording(self, Level.read(level))
        return Report(path, recording, code, timeline, storage_options)

    def _ask_workers(self, method: str, *args: Any) -> dict[str, Any]:
        """What the nodes of all workers answer, by the workers' names, in order."""
        found = self.membership.ask(method, *args, workers=self._addresses())
        for answer in found.values():
            if isinstance(answer, Exception):
                raise answer
        return {worker_label(address): found[address] for address in sorted(found)}


class ClusterRecording:
    """The runs of a cluster's workers while a `with` block goes on."""

    def __init__(self, cluster: ObservedCluster, level: Level):
        self._cluster, self._level = cluster, level
        self._name = uuid4().hex
        self._found: dict[str, Recorded] = {}

    def __enter__(self) -> ClusterRecording:
        self._cluster._ask_workers("begin_recording", self._name, self._level)
        return self

    def end(self) -> None:
        """End the recording on all workers, and fetch what they have recorded."""
        found = self._cluster._ask_workers("end_recording", self._name)
        there = {worker: answer for worker, answer in found.items() if answer is not None}
        names = Counter([name for name, _ in there.values()])
        self._found = {
            f"worker {name}" if names[name] == 1 and len(name) < LONG else worker: one
            for worker, (name, one) in there.items()
        }

    def take_recorded(self) -> dict[str, Recorded]:
        """What a report shows, by worker; nothing of workers that joined in between."""
        return self._found
