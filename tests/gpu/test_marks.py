"""When steps and copies ran, by the clocks of the GPUs."""

from __future__ import annotations

from time import perf_counter_ns

import dask
import dask.array as da
import numpy as np
import pytest
from dask import delayed

from gpuscheduler import Scheduler

cupy = pytest.importorskip("cupy")

from gpuscheduler.devices.choose import cuda_devices
from gpuscheduler.devices.cuda import marks as cuda_marks
from gpuscheduler.devices.cuda.marks import LaneMarks, take_anchor
from gpuscheduler.runtime.observe import Recorder
from tests.runtime.test_observe import alone, calls_while

pytestmark = pytest.mark.gpu


def record():
    return Recorder(perf_counter_ns).begin()


def pairs(n=8, size=2**16):
    """A graph of kernels that devices exchange values in."""
    x = da.random.default_rng(0).random((n * size,), chunks=size)
    return (da.sin(x) * 2 + x[::-1]).sum()


@pytest.fixture
def two():
    devices = "cuda:0,1" if cuda_devices() > 1 else "cuda:0,0"
    with Scheduler(devices, observe="device") as s:
        yield s


def steps_to_run(run):
    return {i for i, fixed in enumerate(run.table.fixed) if not fixed}


# ---- runs by steps and on tapes


def test_each_step_has_a_device_time(two):
    x = pairs().persist()
    for _ in range(3):
        x.compute()
    runs = list(two.recorder.runs)
    assert [r.how for r in runs[-2:]] == ["replay"] * 2
    for run in runs:
        rows = [r for r in two.recorder.rows() if r.run == run.number]
        assert {r.step for r in rows} == steps_to_run(run)
        device = [r for r in rows if r.clock == "device"]
        assert device
        for row in device:
            assert row.begin <= row.end
            assert run.began - 10**6 < row.begin
            assert row.end < perf_counter_ns() + 10**6
            assert row.place == run.table.places[row.step]


def test_rows_of_one_place_do_not_overlap(two):
    """Steps of a place run in order, so their times do as well."""
    pairs().compute()
    for place in (0, 1):
        rows = sorted(
            (r for r in two.recorder.rows() if r.place == place and r.clock == "device"),
            key=lambda r: r.begin,
        )
        assert len(rows) > 1
        assert all(a.end <= b.begin + 1000 for a, b in zip(rows, rows[1:], strict=False))


@pytest.mark.parametrize("observe", ["counters", "steps", "device", "memory"])
def test_results_and_tapes_are_the_same_at_each_level(observe):
    x = np.arange(2.0**16)
    with Scheduler("cuda:0,0", observe=observe) as s:
        a = da.from_array(x, chunks=2**13).map_blocks(cupy.asarray).persist()
        y = (a * 2 + a[::-1]).sum()
        values = [float(y.compute()) for _ in range(4)]
        how = [r.how for r in s.recorder.runs]
    assert values == [float((x * 2 + x[::-1]).sum())] * 4
    assert how[-2:] == ["replay"] * 2


def test_copies_have_device_times(two):
    with dask.annotate(device=0):
        a = delayed(cupy.ones)(2**16)
    with dask.annotate(device=1):
        b = delayed(lambda v: v + 1)(a)
    assert float(b.compute().sum()) == 2**17
    copies = two.recorder.copies()
    (moved,) = [c for c in copies if (c.src, c.dst) == (0, 1)]
    assert moved.clock == "device"
    assert moved.nbytes == 2**19
    assert moved.begin <= moved.end
    (made,) = [r for r in two.recorder.rows() if r.step == moved.step]
    assert made.end <= moved.begin + 1000


def test_copies_to_the_host_have_times():
    with Scheduler("cuda:0", observe="device") as s:
        x = da.from_array(np.arange(2.0**15), chunks=2**12).map_blocks(cupy.asarray) * 2
        got = dask.compute(x.map_blocks(cupy.asnumpy))[0]
        np.testing.assert_array_equal(cupy.asnumpy(got), np.arange(2.0**15) * 2)
        assert {r.clock for r in s.recorder.rows()} <= {"device", "host"}
        assert all(c.begin <= c.end for c in s.recorder.copies())


# ---- replays that are not measured


def test_a_replay_takes_the_times_of_one_that_was_measured(monkeypatch):
    monkeypatch.setattr(cuda_marks, "MARK_EVERY", 4)
    with Scheduler("cuda:0", observe="steps") as s:
        x = pairs().persist()
        for _ in range(12):
            x.compute()
        runs = [r for r in s.recorder.runs if r.how == "replay"]
        assert len(runs) > 8
        clocks = []
        for run in runs:
            rows = [r for r in s.recorder.rows() if r.run == run.number]
            clocks.append({r.clock for r in rows})
            assert {r.step for r in rows} == steps_to_run(run)
    seen = [c for c in clocks if c != {"estimated"}]
    measured = [n for n, c in enumerate(seen) if c == {"device"}]
    assert measured
    assert [b - a for a, b in zip(measured, measured[1:], strict=False)] == [4] * (
        len(measured) - 1
    )
    assert all(c == {"sampled"} for n, c in enumerate(seen) if n not in measured)


# ---- lanes


def test_without_free_events_a_step_has_no_device_time(monkeypatch):
    with cupy.cuda.Device(0):
        marks, stream, run = LaneMarks(perf_counter_ns, most=5), cupy.cuda.Stream(), record()
        begins = [marks.begin(stream) for _ in range(3)]
        with monkeypatch.context() as patch:  # none is over yet
            patch.setattr(marks, "read", lambda wait: None)
            for step, begin in enumerate(begins):
                marks.end(stream, begin, run, step, 0)
        stream.synchronize()
        marks.read()
        assert [m.step for m in run.marks] == [0, 1]
        assert sum(run.missed.values()) == 1
        marks.end(stream, marks.begin(stream), run, 3, 0)  # those that were read are free again
        stream.synchronize()
        marks.read()
    assert [m.step for m in run.marks] == [0, 1, 3]


def test_events_are_used_again():
    with cupy.cuda.Device(0):
        marks, stream, run = LaneMarks(perf_counter_ns, most=4), cupy.cuda.Stream(), record()
        for step in range(20):
            marks.end(stream, marks.begin(stream), run, step, 0)
            stream.synchronize()
            marks.read(wait=False)
        marks.read()
    assert [m.step for m in run.marks] == list(range(20))
    assert not run.missed


def test_an_anchor_is_the_best_of_some():
    times = iter([0, 1000, 2000, 2010, 3000, 3500])
    with cupy.cuda.Device(0):
        anchor = take_anchor(cupy.cuda.Stream(non_blocking=True), lambda: next(times), tries=3)
    assert (anchor.ns, anchor.error) == (2005, 5)


def test_an_old_anchor_is_renewed(monkeypatch):
    with cupy.cuda.Device(0):
        marks = LaneMarks(perf_counter_ns)
        first = marks.anchor
        marks.renew_anchor()
        assert marks.anchor is first
        monkeypatch.setattr(cuda_marks, "RENEW_EVERY", 0)
        marks.renew_anchor()
    assert marks.anchor is not first


def test_a_step_that_fails_leaves_no_time(two):
    def fail(v):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        delayed(fail)(delayed(cupy.ones)(10)).compute()
    (run,) = two.recorder.runs
    run.settle()
    assert {m.step for m in run.marks} < steps_to_run(run)
    assert run.error == "KeyError: 'mine'"


@pytest.mark.real
def test_times_are_those_of_events_around_a_kernel():
    """Beside a pair of events of our own, around a run of a kernel of some milliseconds."""
    with Scheduler("cuda:0", observe="device") as s:
        x = da.from_array(cupy.ones(2**26, "f4"), chunks=2**26)
        y = da.sin(x).sum()
        for _ in range(3):
            y.compute()
        stream = cupy.cuda.get_current_stream()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        y.compute()
        end.record(stream)
        end.synchronize()
        whole = cupy.cuda.get_elapsed_time(begin, end) * 1e6
        last = s.recorder.runs[-1].number
        rows = [r for r in s.recorder.rows() if r.run == last]
    assert {r.clock for r in rows} == {"device"}
    busy = sum(r.end - r.begin for r in rows)
    assert 0 < busy <= whole + 5000
    assert max(r.end for r in rows) - min(r.begin for r in rows) <= whole + 5000


def test_a_profiler_that_is_attached_sees_each_launch():
    pushed, depth = [], [0]

    class Ranges:
        def push(self, label, device, step):
            depth[0] += 1
            pushed.append((label, device, step))

        def pop(self):
            depth[0] -= 1

    with Scheduler("cuda:0") as s:
        s.hardware.ranges = Ranges()
        x = pairs().persist()
        y = (x + 1).sum()
        for _ in range(4):
            pushed.clear()
            y.compute()
            steps = [step for _, _, step in pushed]
            table = s.recorder.runs[-1]
            assert len(steps) == len(set(steps)) == table.steps
        assert table.how == "replay"
        assert {device for _, device, _ in pushed} == {0}
        assert all(label for label, _, _ in pushed)
    assert depth == [0]


# ---- what recording costs: calls are counted, not timed


@alone
def test_a_replay_calls_observers_once_a_run_and_not_for_each_launch():
    """Only at level "device" each launch and each copy are measured: by a few calls."""
    found = {"counters": [], "steps": [], "device": []}
    for links in (20, 60):
        with Scheduler("cuda:0", fuse_least=0) as s:
            x = da.from_array(cupy.ones(64, "f4"), chunks=64).persist()
            z = x.sum()
            for _ in range(links):
                z = da.sin(x + z * 1e-9).sum()
            for level, calls in found.items():
                with s.record(level):
                    for _ in range(4):  # at level "steps" the first replay is measured
                        z.compute()
                    calls.append(calls_while(z.compute))
                run = s.recorder.runs[-1]
                assert (run.how, run.level.name.lower()) == ("replay", level)
    off, steps, device = ([first, second] for first, second in found.values())
    assert off[0] == off[1] > 0
    assert steps[0] == steps[1] < 60
    assert (device[1] - device[0]) / 40 < 20  # for each of the launches that one has more


# ---- notes


def test_each_compilation_is_a_note():
    with Scheduler("cuda:0", fuse_least=0) as s, s.record("steps") as recording:
        x = da.from_array(cupy.ones(64, "f4"), chunks=64)
        (da.sin(x) * 0.4711 + da.cos(x)).sum().compute()
        compiled = s.hardware.kernels.code.compiled
    notes = [n for n in recording.notes() if n.kind == "compile"]
    assert len(notes) == compiled
    assert all(n.fields["seconds"] >= 0 and n.fields["kernel"] for n in notes)
