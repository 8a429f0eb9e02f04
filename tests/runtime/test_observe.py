"""One recording: it changes nothing, costs nothing when it is off, and its sums are true."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import random
import subprocess
import sys
import threading

import dask
import dask.array as da
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.plan.machine import DISK, HOST
from gpuscheduler.runtime.events import Copied, Copy, Done, Issued, Launch, NoRoom
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.observe import (
    Level,
    Mark,
    Recorder,
    Turn,
    decode_copies,
    decode_memory,
    decode_rows,
)
from gpuscheduler.runtime.simulated import InOrderDevices
from gpuscheduler.runtime.tape import record_tape
from tests.support.strategies import cases, plan_of, thorough

PLENTY = (10**9, 10**9)


def recorder(level="counters", **options):
    """A recorder whose clock counts calls."""
    return Recorder(itertools.count(1).__next__, base=Level.read(level), **options)


def recorded(plan, level="steps", devices=None, **options):
    """The record of one run."""
    record = recorder(level).begin()
    record.enter(plan, "steps")
    run(plan, devices or InOrderDevices(plan), record=record, **options)
    record.recorder.end(record)
    return record


def record_of(plan, *turns, admitted=0):
    """The record of turns that are written down: (ns, instructions, events)."""
    record = recorder("steps").begin()
    record.enter(plan, "steps")
    record.admitted, record.memories = admitted, (0,)
    record.turns.extend([Turn(ns, ordered, events, (0,)) for ns, ordered, events in turns])
    record.recorder.end(record)
    return record


def spans(record):
    return [(r.key, r.place, r.begin, r.end, r.clock) for r in decode_rows(record)]


# ---- what rows say


def test_a_step_begins_when_the_one_before_it_on_its_device_is_done():
    """a and b wait on device 0, c is alone on device 1."""
    plan = plan_of(("a", "", 0), ("b", "a", 0), ("c", "", 1), memory=PLENTY, wanted="bc")
    record = record_of(
        plan,
        (30, [Launch(0, 0), Launch(1, 0), Launch(2, 1)], [Issued(0, 8), Done(0)]),
        (40, [], [Issued(2, 8), Done(2)]),
        (50, [], [Issued(1, 8), Done(1)]),
        admitted=10,
    )
    assert spans(record) == [
        ("a", 0, 10, 30, "host"), ("c", 1, 10, 40, "host"), ("b", 0, 30, 50, "host"),
    ]  # fmt: skip


def test_what_reads_files_goes_on_beside_its_device():
    plan = plan_of(("r", "", 0), ("a", "", 0), memory=PLENTY, wanted="ra")
    plan.steps[0].aside = True
    record = record_of(
        plan,
        (20, [Launch(0, 0), Launch(1, 0)], [Issued(1, 8), Done(1)]),
        (30, [], [Issued(0, 8), Done(0)]),
    )
    assert spans(record) == [("a", 0, 0, 20, "host"), ("r", 0, 0, 30, "host")]


def test_a_thread_s_own_times_are_preferred_to_the_loop_s():
    plan = plan_of(("a", "", 0), memory=PLENTY)
    record = record_of(plan, (90, [Launch(0, 0)], [Issued(0, 8, 0, (20, 30)), Done(0)]))
    assert spans(record) == [("a", 0, 20, 30, "thread")]


def test_device_times_are_preferred_to_all_others():
    plan = plan_of(("a", "", 0), memory=PLENTY)
    record = record_of(plan, (90, [Launch(0, 0)], [Issued(0, 8), Done(0)]))
    record.marks.append(Mark(0, 0, 40, 44))
    record.marks.append(Mark(0, 1, 44, 50, src=0))
    assert spans(record) == [("a", 0, 40, 44, "device")]
    (copy,) = decode_copies(record)
    assert (copy.src, copy.dst, copy.begin, copy.end, copy.nbytes) == (0, 1, 44, 50, 8)


def test_copies_say_from_where_to_where_and_how_many_bytes():
    plan = plan_of(("a", "", 0), ("b", "a", 1), memory=PLENTY)
    record = record_of(
        plan,
        (20, [Launch(0, 0)], [Issued(0, 100), Done(0)]),
        (50, [Copy(0, 0, 1), Launch(1, 1)], [Copied(0, 0, 1)]),
    )
    (copy,) = decode_copies(record)
    assert copy[1:] == (0, "mix", 0, 1, 20, 50, 100, "host")


def test_a_replay_without_device_times_is_drawn_from_predictions():
    """Device 0 is busiest, and fills the run; b is predicted to take three times as long as a."""
    plan = plan_of(("a", "", 0), ("b", "", 0), ("c", "", 1), memory=PLENTY, wanted="abc")
    plan.steps[1].seconds = 3e-3
    record = recorder("steps").begin()
    record.enter(plan, "replay")
    record.tape, record.admitted, record.queued = record_tape(plan), 1000, 5000
    rows = {r.key: (r.begin, r.end, r.clock) for r in decode_rows(record)}
    assert rows == {
        "a": (1000, 2000, "estimated"), "b": (2000, 5000, "estimated"),
        "c": (1000, 2000, "estimated"),
    }  # fmt: skip


def test_a_level_has_a_name_and_a_wrong_one_is_refused():
    assert Level.read("device") is Level.DEVICE
    with pytest.raises(ValueError, match="'counters', 'steps', 'device'"):
        Level.read("everything")


# ---- observation changes nothing


@settings(thorough)
@given(st.one_of(cases(), cases(full=True)), st.integers(0, 2**32))
def test_the_same_happens_at_every_level(case, seed):
    """The same orders in the same sequence, refusals and all."""
    logs = []
    for level in ("counters", "steps", "device", "memory"):
        case.rng = random.Random(seed)
        devices, plan = case.devices(), case.plan
        record = recorder(level).begin()
        record.enter(plan, "steps")
        run(
            plan, devices, None, case.window, case.deep_window, case.ahead, check=True,
            record=record,
        )  # fmt: skip
        logs.append(devices.log)
        assert bool(record.turns) == (level != "counters" and bool(devices.log))
    assert all(log == logs[0] for log in logs)


def test_a_plan_is_found_and_run_alike_whatever_is_recorded():
    found = []
    for level in ("counters", "steps", "device", "memory"):
        with Scheduler("cpu:2", observe=level) as scheduler:
            x = da.ones((400, 400), chunks=100)
            for _ in range(3):
                assert float((x + 1).sum().compute()) == 320_000
            y = (x + 1).sum()
            for _ in range(3):
                y.compute()
            found.append([(r.how, r.planned, r.steps) for r in scheduler.recorder.runs])
    assert all(runs == found[0] for runs in found)
    assert {planned for _, planned, _ in found[0]} >= {"new", "cache"}


# ---- off, it costs nothing per step


#: In the environment of a process that runs one test of these.
ALONE = "GPUSCHEDULER_TEST_ALONE"


def alone(test):
    """Run a test in a process of its own.

    CPython 3.11 may loop for ever at a call where `sys.setprofile` meets other tests' threads.
    """

    @functools.wraps(test)
    def run_alone(*args, request, **kwargs):
        if os.environ.get(ALONE):
            return test(*args, **kwargs)
        plugins = ["xdist", "benchmark", "cacheprovider"]
        without = [word for name in plugins for word in ("-p", f"no:{name}")]
        command = [sys.executable, "-m", "pytest", "-q", *without]
        done = subprocess.run(
            [*command, f"{inspect.getfile(test)}::{request.node.name}"],
            env={**os.environ, ALONE: "1"}, capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:]

    signature = inspect.signature(test)
    request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY)
    run_alone.__signature__ = signature.replace(
        parameters=[*signature.parameters.values(), request]
    )
    return run_alone


def calls_while(function):
    """How many calls of functions of the observers a call makes, in any thread."""
    count, places = [0], ("observe.py", "marks.py", "diagnostics")

    def profile(frame, event, arg):
        if event == "call" and any(p in frame.f_code.co_filename for p in places):
            count[0] += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count[0]


def calls_of(function):
    """How many functions a call enters, of Python and of C."""
    count = [0]

    def profile(frame, event, arg):
        count[0] += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count[0]


@pytest.mark.parametrize("level", ["counters", "steps"])
@alone
def test_nothing_is_called_per_step(level):
    """Off, runs of 1,000 and of 3,000 steps make the same calls; on, a few for each turn."""
    found = []
    for n in (1000, 3000):
        record = recorder(level).begin()
        plan = plan_of(*[(chr(0x4E00 + i), "", i % 2) for i in range(n)], memory=PLENTY)
        record.enter(plan, "steps")
        devices = InOrderDevices(plan)
        found.append(calls_while(lambda p=plan, d=devices, r=record: run(p, d, record=r)))
    assert found[0] > 0
    assert found[0] == found[1] or level != "counters"
    assert found[1] < 200


@alone
def test_off_nothing_is_called_per_step_of_a_real_scheduler():
    found = []
    with Scheduler("cpu:2") as scheduler:
        for n in (1000, 3000):
            dsk = {("x", i): (int,) for i in range(n)}
            found.append(calls_while(lambda d=dsk: scheduler.get(d, list(d))))
    assert found[0] == found[1] > 0


# ---- sums


def spilled_bytes(copies):
    """Bytes that went to the host and to the disk."""
    out = {HOST: 0, DISK: 0}
    for row in copies:
        if row.dst in out:
            out[row.dst] += row.nbytes
    return out


@settings(thorough)
@given(cases(persisted=False))
def test_recorded_bytes_are_those_of_the_footprint(case):
    plan = case.plan
    record = recorder("steps").begin()
    record.enter(plan, "steps")
    devices = case.devices()
    state = run(plan, devices, None, case.window, case.deep_window, case.ahead, record=record)
    took, moved = state.footprint(0.0), {}
    assert len(decode_rows(record)) == sum(not s.fixed for s in plan.steps)
    for row in decode_copies(record):
        moved[row.src, row.dst] = moved.get((row.src, row.dst), 0) + row.nbytes
    refused = any(type(e) is NoRoom for turn in record.turns for e in turn.events)
    if not refused:
        assert {k: n for k, n in moved.items() if n} == {k: n for k, n in took.traffic.items() if n}
        spilled = spilled_bytes(decode_copies(record))
        assert all(spilled[p] >= n for p, n in took.spilled.items())
    for sample in decode_memory(record):
        assert all(used <= took.peak[place] for place, used in sample.used.items())


def test_what_spills_is_recorded():
    """Room for two values: a has to leave while c is made of b."""
    plan = plan_of(("a", "", 0), ("b", "", 0), ("c", "b", 0), ("d", "ac", 0), memory=(24,))
    plan.steps[2].nbytes = 16
    plan.steps[3].nbytes = 0
    record = recorded(plan, devices=InOrderDevices(plan, {0: 8, 1: 8, 2: 16, 3: 0}))
    assert spilled_bytes(decode_copies(record))[HOST] == 8
    assert [(c.label, c.src, c.dst) for c in decode_copies(record)] == [
        ("mix", 0, HOST), ("mix", HOST, 0),
    ]  # fmt: skip
    assert max(s.used[0] for s in decode_memory(record)) == 24
    assert {DISK, HOST} <= set(record.memories)


# ---- bounds


def test_old_turns_are_dropped_and_the_latest_stay():
    plan = plan_of(*[(chr(0x4E00 + i), "", 0) for i in range(300)], memory=PLENTY)
    r = recorder("steps", most=1000)
    for _ in range(3):
        record = r.begin()
        record.enter(plan, "steps")
        run(plan, InOrderDevices(plan), window=1, deep_window=1, record=record)
        r.end(record)
    kept = sum(len(t.instructions) + len(t.events) for x in r.runs for t in x.turns)
    assert 500 < kept <= 1000
    assert len(r.runs[0].turns) == 0 < len(r.runs[2].turns)
    assert r.runs[0].dropped
    assert len({row.run for row in r.rows()}) < 3


def test_one_long_run_drops_its_own_oldest_turns():
    plan = plan_of(*[(chr(0x4E00 + i), "", 0) for i in range(2000)], memory=PLENTY)
    r = recorder("steps", most=1000)
    record = r.begin()
    record.enter(plan, "steps")
    run(plan, InOrderDevices(plan), window=1, deep_window=1, record=record)
    assert sum(len(t.instructions) + len(t.events) for t in record.turns) <= 1000 + 4 * 256
    r.end(record)
    assert [row.step for row in r.rows()][-1] == 1999


def test_finished_runs_hold_no_plan_and_no_error():
    class Weakly(Exception):
        pass

    def fail():
        raise Weakly("no\nmore")

    with Scheduler("cpu:1", observe="steps") as scheduler:
        with pytest.raises(Weakly):
            scheduler.get({"a": (fail,)}, "a")
        record = scheduler.recorder.runs[-1]
    assert record.error == "Weakly: no"
    assert record.plan is record.state is None
    assert not scheduler.recorder.running
    assert scheduler.recorder.totals["runs", "steps", "error"] == 1


def test_readers_may_read_while_runs_go_on():
    stop, failures, read = threading.Event(), [], [0]

    with Scheduler("cpu:2", observe="steps") as scheduler:
        scheduler.recorder.most = 100

        def look():
            try:
                while not stop.is_set():
                    read[0] += len(scheduler.recorder.rows()) + len(scheduler.recorder.copies())
                    [decode_memory(record) for record in scheduler.recorder.records()]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for t in threads:
            t.start()
        x = da.ones((200, 200), chunks=20)
        for _ in range(10):
            assert float((x + 1).sum().compute(optimize_graph=False)) == 80_000
        stop.set()
        for t in threads:
            t.join()
    assert not failures


# ---- observers and recordings


class Seen:
    def __init__(self):
        self.what = []

    def run_began(self, record):
        self.what.append(("began", record.number))

    def run_ended(self, record):
        self.what.append(("ended", record.number, record.error))


def test_observers_hear_of_runs_and_one_that_raises_is_removed(caplog):
    class Raises:
        def run_began(self, record):
            pass

        def run_ended(self, record):
            raise KeyError("mine")

    seen = Seen()
    with Scheduler("cpu:1") as scheduler:
        scheduler.observers.extend([Raises(), seen])
        with caplog.at_level("WARNING", "gpuscheduler.run"):
            dask.delayed(len)("abc").compute()
        dask.delayed(len)("ab").compute()
        assert scheduler.observers == [seen]
    assert seen.what == [("began", 1), ("ended", 1, ""), ("began", 2), ("ended", 2, "")]
    assert "observer" in caplog.text
    assert "KeyError: 'mine'" in caplog.text


def test_a_recording_has_the_runs_of_its_block_and_no_others():
    with Scheduler("cpu:2") as scheduler:
        x = da.ones(100, chunks=25)
        x.sum().compute()
        with scheduler.record("steps") as recording:
            x.mean().compute()
            (x + 1).max().compute()
        x.min().compute()
        assert scheduler.recorder.level is Level.COUNTERS
        assert len(recording.runs()) == 2
        assert {row.run for row in recording.rows()} == {r.number for r in recording.runs()}
        assert all(r.begin <= r.end for r in recording.rows())
        assert recording.samples()
        assert len(scheduler.recorder.runs) == 4


def test_recordings_may_overlap():
    """Also where the one that began first ends first."""
    with Scheduler("cpu:1") as scheduler:
        a, b = scheduler.record("steps"), scheduler.record("device")
        a.__enter__()
        assert scheduler.recorder.level is Level.STEPS
        b.__enter__()
        assert scheduler.recorder.level is Level.DEVICE
        a.end()
        assert scheduler.recorder.level is Level.DEVICE
        b.end()
        assert scheduler.recorder.level is Level.COUNTERS


def test_a_run_says_how_its_time_was_spent():
    with Scheduler("cpu:1") as scheduler:
        da.ones(100, chunks=25).sum().compute()
        r = scheduler.recorder.runs[-1]
    assert 0 < r.began <= r.planned_ns <= r.admitted <= r.queued <= r.ended
    assert (r.how, r.planned) == ("steps", "new")
    assert r.footprint is not None
