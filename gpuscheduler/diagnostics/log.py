"""Loggers of the package: who writes what at which level.

ERROR: a device is lost. WARNING: a step runs on the host, or without its kernel; the page's process
has ended. INFO: a run of more than a second has ended; how far it is, without a screen. DEBUG: each
run, where its plan came from, how long it waited for memory. Nothing is logged per step.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from weakref import WeakSet

from ..plan.machine import DISK, HOST
from ..runtime.observe import Recorder, RunRecord

#: The parts of the package that log, each as a child of `gpuscheduler`.
PARTS = ("run", "kernels", "cluster", "dashboard")


class NoteHandler(logging.Handler):
    """Writes warnings and errors of the package into recordings, too."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._recorders: WeakSet[Recorder] = WeakSet()

    def add(self, recorder: Recorder) -> None:
        """Note down what is logged, as long as there is this recorder."""
        with self.lock or nullcontext():
            self._recorders.add(recorder)

    def emit(self, record: logging.LogRecord) -> None:
        for recorder in self._recorders:
            recorder.note(record.levelname.lower(), text=record.getMessage())


note_handler = NoteHandler()
logging.getLogger("gpuscheduler").addHandler(note_handler)


def logger(part: str) -> logging.Logger:
    """The logger of one part of the package.

    >>> logger("run").name
    'gpuscheduler.run'
    """
    if part not in PARTS:
        raise ValueError(f"{part!r} is no part that logs: use one of {', '.join(PARTS)}")
    return logging.getLogger(f"gpuscheduler.{part}")


#: Seconds from which the end of a run is worth a line at INFO.
LONG = 1.0
_runs = logging.getLogger("gpuscheduler.run")


def log_run(record: RunRecord) -> None:
    """Log the end of a run: at INFO if it took long or failed, else at DEBUG."""
    seconds = record.seconds
    level = logging.INFO if seconds > LONG or record.error else logging.DEBUG
    if not _runs.isEnabledFor(level):
        return
    _runs.log(
        level, "%s", format_run(record, seconds),
        extra={"run": record.number, "steps": record.steps, "how": record.how, "seconds": seconds},
    )  # fmt: skip


def format_run(record: RunRecord, seconds: float) -> str:
    """A run that has ended, in one line."""
    where = f" on {record.where}" if record.where else ""
    if record.error:
        return f"run {record.number}{where} failed after {seconds:.3g} s: {record.error}"
    facts = [f"plan {record.planned}"] if record.planned else []
    waited = (record.admitted - record.planned_ns) / 1e9 if record.planned_ns else 0.0
    if waited > 1e-3:
        facts.append(f"waited {waited:.3g} s for memory")
    took = record.footprint
    if took is not None:
        facts.append(f"peak {max(took.peak.values(), default=0):,} bytes")
        for place, name in ((HOST, "host"), (DISK, "disk")):
            if nbytes := took.spilled.get(place, 0):
                facts.append(f"spilled {nbytes:,} bytes to the {name}")
    end = f"; {', '.join(facts)}" if facts else ""
    return f"run {record.number}{where}: {record.steps:,} steps in {seconds:.3g} s{end}"
