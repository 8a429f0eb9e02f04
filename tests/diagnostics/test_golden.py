"""What people and tools read of four small runs, in files that are looked at when they change.

`python -m tests.diagnostics.test_golden` writes the files anew.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dask._task_spec import Task, TaskRef

from gpuscheduler.diagnostics.recording import Recording
from gpuscheduler.diagnostics.report import report_html
from gpuscheduler.diagnostics.trace_json import trace_events
from gpuscheduler.runtime.allocations import AllocationLog
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.observe import Level, Recorder
from gpuscheduler.runtime.simulated import InOrderDevices
from gpuscheduler.runtime.tape import record_tape
from tests.support.strategies import plan_of

GOLDEN = Path(__file__).parent / "golden"


def load(n):
    return np.full(n, 2.0)


def normalise(b):
    return b - b.mean()


def add(a, b):
    return a + b


FUNCTIONS = {"a": load, "b": load, "n": normalise, "e": np.exp, "s": np.sum, "m": add}


def small_plan(*steps, memory, **options):
    """A plan like that of `plan_of`, whose steps run the functions above."""
    plan = plan_of(*steps, memory=memory, kinds=[name for name, *_ in steps], **options)
    made = []
    for step in plan.steps:
        reads = [TaskRef(name) for name in step.names]
        task = Task(step.key, FUNCTIONS[step.key], *(reads or [8]))
        made.append(replace(step, task=task, seconds=2e-3 if step.key == "n" else 1e-3))
    machine = replace(plan.machine, bandwidth=1e9, flops=1e12, host=(1e9,) * len(memory))
    return plan.with_steps(made, machine=machine)


def chain():
    """Four steps on one device; the second takes memory for itself."""
    plan = small_plan(
        ("a", "", 0, 800), ("n", "a", 0, 800), ("e", "n", 0, 800), ("s", "e", 0, 8), memory=(4000,)
    )
    log = AllocationLog()
    log.allocate(1, 512, (normalise.__code__, normalise.__code__.co_firstlineno + 1), 512)
    log.allocate(2, 1024, None)
    log.free(1)
    return plan, [log.sum_up(1, 0)]


def exchange():
    """Two devices: the second waits for what the first makes."""
    return small_plan(
        ("a", "", 0, 800), ("n", "a", 0, 800), ("b", "", 1, 80), ("m", "nb", 1, 80),
        memory=(10**6, 10**6),
    ), []  # fmt: skip


def spill():
    """Room for two values of three."""
    return small_plan(
        ("a", "", 0, 800), ("b", "", 0, 800), ("e", "b", 0, 1600), ("m", "ae", 0, 0),
        memory=(2400,),
    ), []  # fmt: skip


def replay():
    """A launch tape, whose steps have no times of their own."""
    return exchange()[0], []


RUNS = {f.__name__: f for f in (chain, exchange, spill, replay)}


def recorded(name):
    """The recording of a run, by a clock that says 10 µs more each time it is read."""
    plan, allocations = RUNS[name]()
    recorder = Recorder(itertools.count(10_000, 10_000).__next__, base=Level.STEPS)
    limits = dict(enumerate(plan.machine.memory))
    recording = Recording(recorder, Level.MEMORY, lambda: limits, lambda: True)
    with recording:
        record = recorder.begin()
        record.planned, record.planned_ns = "new", recorder.clock()
        record.admitted = recorder.clock()
        if name == "replay":
            record.enter(plan, "replay")
            record.tape, record.queued = record_tape(plan), record.admitted + 50_000
        else:
            record.enter(plan, "steps")
            sizes = {i: step.nbytes for i, step in enumerate(plan.steps)}
            devices = InOrderDevices(plan, sizes)
            state = run(plan, devices, window=1, deep_window=1, record=record)
            record.footprint = state.footprint(1e-3)
        record.allocations.extend(allocations)
        recorder.note("compile", kernel="5b1f", seconds=0.2)
        recorder.end(record)
    return recording


def written(name):
    """All that is read of a run, as text."""
    recording = recorded(name)
    events = trace_events({"here": recording.trace()})
    html = report_html(recording.take_recorded()).partition("<h2>Versions")[0]
    parts = {
        "explain": str(recording.explain()),
        **{f"memory by {by}": str(recording.memory(by)) for by in ("layer", "line", "task")},
        "timeline": "\n".join(json.dumps(event, ensure_ascii=False) for event in events),
        "report": html.partition("</style>")[2].replace("><", ">\n<"),
    }
    text = "".join(f"==== {part}\n{found}\n" for part, found in parts.items())
    return re.sub(r"test_golden\.py:\d+", "test_golden.py:N", text)


@pytest.mark.parametrize("name", RUNS)
def test_what_people_read_is_that_of_the_file(name):
    """Read the difference: if it is meant, write the files anew."""
    assert written(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in RUNS:
        (GOLDEN / f"{name}.txt").write_text(written(name), encoding="utf-8")
