"""What is predicted before a run, beside what the run takes."""

from __future__ import annotations

from dataclasses import replace

import dask
import dask.array as da
import numpy as np
import pytest
from dask import delayed
from dask.array import stats
from hypothesis import given

from gpuscheduler import Scheduler
from gpuscheduler.cli import workload
from gpuscheduler.errors import OutOfMemory
from gpuscheduler.frontend import linalg_shapes
from gpuscheduler.plan.machine import DISK, HOST, Machine
from gpuscheduler.plan.plan import Footprint
from gpuscheduler.runtime.simulated import predict
from gpuscheduler.runtime.state import State
from tests.support.strategies import alter, cases, plan_of, thorough


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", workload.workload_names())
def test_no_workload_takes_more_than_was_predicted(name, devices, share, fuse):
    """With memory for all of it, and for less.

    Before the first run, which tells the sizes that Dask cannot know, and after it.
    """
    work = workload.load(name)
    x = work.build(work.size("small"), None, "numpy")
    with Scheduler(f"cpu:{devices}", memory_limit="1 GiB", fuse=fuse) as s:
        plan = s.plan(x)
        most = plan.predicted.peak[0]
        x.compute()
        assert most >= s.last.peak[0]
        steps = s.plan(x).steps
    least = max(s.nbytes + sum(steps[j].nbytes for j in s.inputs) for s in steps)
    limit = max(int(share * most), least) // devices + 1
    with Scheduler(f"cpu:{devices}", memory_limit=limit, fuse=fuse) as s:
        for _ in range(3):
            foreseen = s.plan(x).predicted
            x.compute()
            assert foreseen.peak[0] >= s.last.peak[0]


#: What Dask says too little of: between their steps are several arrays, or longer ones.
REDUCTIONS = {
    "mean": lambda x: x.mean(axis=0),
    "std": lambda x: x.std(axis=1),
    "skewness": lambda x: stats.skew(x, axis=0),
    "argmax": lambda x: x.argmax(axis=0),
    "nanargmin": lambda x: da.nanargmin(x, axis=1),
    "topk": lambda x: da.topk(x, 3, axis=0),
    "argtopk": lambda x: da.argtopk(x, -3, axis=0),
    "bincount": lambda x: da.bincount((x.ravel() * 9).astype(int), minlength=10),
    "histogram": lambda x: da.histogram(x, bins=5, range=(0, 1))[0],
    "standard": lambda x: (x - x.mean(axis=0)) / x.std(axis=0),
    "several": lambda x: [x.mean(axis=0), x.std(axis=0), x.max(axis=0), x + 1],
    "median": lambda x: da.median(x, axis=0),
    "sums so far": lambda x: x.cumsum(axis=0),
}


def grown(monkeypatch, run):
    """What steps have that made more than was known of them while it ran."""
    out, issued = [], State._handle_issued

    def looked_at(state, event):
        step = state.plan.steps[event.step]
        if not state.guess[event.step] and event.nbytes > state.nbytes[event.step]:
            out.append((step.key, state.nbytes[event.step], event.nbytes))
        issued(state, event)

    with monkeypatch.context() as patch:
        patch.setattr(State, "_handle_issued", looked_at)
        run()
    return out


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_no_step_makes_more_than_is_known(name, fuse, monkeypatch):
    """Else a limit would be passed: nobody looks once a size is known."""
    data = np.random.default_rng(0).random((40, 40))
    for chunks in [(10, 20), (2, 40), (40, 2)]:
        x = da.from_array(data, chunks=chunks)
        with Scheduler("cpu:2", fuse=fuse, fuse_least=0):
            assert not grown(monkeypatch, lambda x=x: dask.compute(REDUCTIONS[name](x)))


def test_sizes_that_nobody_knows_are_estimated_and_said_to_be(monkeypatch):
    """Triangles of 20 x 20 from QR, 16 of them and then 2.

    Dask knows only the sizes of stacks of them.
    """
    monkeypatch.setattr(linalg_shapes, "MAKE", {})
    work = workload.load("tall_skinny_svd")
    lazy = work.build((4000, 20), None, "numpy")
    with Scheduler("cpu:2", memory_limit="1 MiB", fuse=False) as s:
        plan = s.plan(lazy)
        assert len(plan.steps) == 19
        assert set(plan.likely.values()) == {3200}
        assert str(plan).splitlines()[-2:] == [
            "  19 of these steps: of unknown size until they have run",
            f"  predicted: about {plan.predicted}",
        ]
        lazy.compute()
        after = s.plan(lazy)
        assert "unknown" not in str(after)
        assert "predicted: about" not in str(after)
        assert after.predicted.peak[0] <= plan.predicted.peak[0]


def test_where_nothing_can_be_said_of_a_size_it_is_said_so():
    with Scheduler("cpu:1") as s:
        text = str(s.plan(delayed(np.ones)(1000)))
    assert "1 of these steps: of unknown size" in text
    assert "predicted: at least " in text


@pytest.mark.parametrize(("need", "known"), [("38,400", {}), ("41,600", linalg_shapes.MAKE)])
def test_a_limit_is_hopeless_where_a_step_makes_more_on_its_way(need, known, monkeypatch):
    """A block of 240 x 20, and the two factors of one."""
    monkeypatch.setattr(linalg_shapes, "MAKE", known)
    work = workload.load("tall_skinny_svd")
    with Scheduler("cpu:1", memory_limit=38_000) as s:
        lazy = work.build((4000, 20), None, "numpy")
        with pytest.raises(OutOfMemory, match=f"needs {need} bytes .* is 38,000 bytes"):
            s.plan(lazy)


def test_the_factors_of_matrices_have_known_sizes():
    """Of float32, too, and of what is no matrix's shape for NumPy alone: blocks of few rows."""
    x = da.random.default_rng(0).normal(size=(100, 8), chunks=(10, 8)).astype("f4")
    short = x.rechunk((5, 8))
    wide, u = da.linalg.qr(x.T), da.linalg.lu(x[:8])[2]
    with Scheduler("cpu:1", fuse=False) as s:
        for lazy in (  # of several blocks, or read: the copy of a single one has no known size
            *da.linalg.svd(x), *da.linalg.svd(short), wide[0].rechunk(4), wide[1],
            *da.linalg.tsqr(short), u.rechunk(4), da.linalg.svd_compressed(x, 3, seed=0)[1],
        ):  # fmt: skip
            plan = s.plan(lazy)
            assert not plan.unknown_count, lazy
            known = {step.key: step.nbytes for step in plan.steps if step.known}
            lazy.compute()
            seen = {step.key: step.nbytes for step in s.plan(lazy).steps}
            assert {k: seen[k] for k in known} == known


@thorough
@given(cases(exact=True))
def test_no_run_takes_more_than_its_memory_whatever_is_predicted(case):
    foreseen = predict(case.plan, case.window, case.deep_window, case.ahead)
    state = case.run(case.devices())
    limit = case.plan.machine.limit
    assert all(foreseen.peak[p] <= limit(p) and n <= limit(p) for p, n in state.peak.items())


def test_what_tasks_take_is_in_the_prediction():
    """A prediction has three values of 8 bytes and the most that a task takes, within the limit.

    A task that takes more than there is runs when nothing else is there.
    """
    steps = ("a", "", 0), ("b", "a", 0), ("c", "ab", 0), ("d", "", 1)
    for limit, extra, peak in ((1000, 0, 24), (1000, 50, 74), (60, 20, 44), (60, 50, 74)):
        plan = plan_of(*steps, memory=(limit, limit), wanted="cd", kinds="xxyz")
        plan.history.extra = {ord("x"): 10, ord("y"): extra} if extra else {}
        foreseen = predict(plan)
        assert foreseen.peak[0] == peak
        assert foreseen.peak[1] == 8 + extra  # whatever kinds these are


def test_the_clock_foresees_what_is_spilled():
    """a, b and c are made before a is read again, and two fit.

    One goes to the host, or, where that has no room, to the disk.
    """
    steps = ("a", "", 0), ("b", "", 0), ("c", "b", 0), ("d", "ac", 0, 0)
    plan = plan_of(*steps, memory=(16,))
    assert predict(plan).spilled == {HOST: 8, DISK: 0}
    alter(plan, machine=replace(plan.machine, host_memory=0))
    foreseen = predict(plan)
    assert foreseen.spilled == {HOST: 0, DISK: 8}
    assert foreseen.traffic == {(0, DISK): 8, (DISK, 0): 8}
    assert foreseen.seconds > predict(plan_of(*steps, memory=(99,))).seconds


def test_a_plan_that_cannot_work_is_refused_before_anything_starts():
    ran = []
    with Scheduler("cpu:2", memory_limit=1000):
        x = da.ones(1000, chunks=500).map_blocks(lambda b: ran.append(1) or b, meta=np.empty(0))
        with pytest.raises(OutOfMemory, match="lambda.* needs 4,000 bytes .* is 2,000 bytes"):
            x.compute()
        with Scheduler("cpu:2", memory_limit=1000) as s, pytest.raises(OutOfMemory, match="lambda"):
            s.plan(x)
    assert not ran


def test_scheduler_plan_prints_it():
    with Scheduler("cpu:2", memory_limit="1 MiB", fuse=False) as s:
        x = da.random.default_rng(0).random((1000, 500), chunks=100)
        text = str(s.plan((x - x.mean()).sum()))
    assert "predicted: " in text
    assert "bytes on device 0" in text
    assert "bytes to the disk" in text


def test_a_footprint_in_words():
    machine = Machine.uniform(2)
    assert list(machine.memories) == [0, 1]
    footprint = Footprint(2.0, {DISK: 0, HOST: 8, 0: 8, 1: 0}, {(0, HOST): 8}, {HOST: 8, DISK: 0})
    assert str(footprint) == (
        "2 s; peak memory 0 bytes on device 1, 8 bytes on device 0, 8 bytes on the host; "
        "moved 8 bytes from 0 to the host; spilled 8 bytes to the host"
    )


def test_a_prediction_counts_no_value_of_the_callers_on_cpu_devices():
    """Of 1000 bytes that are the caller's, a makes 8 and takes 10."""
    plan = plan_of(("x", "", 0, 1000), ("a", "x", 0), memory=(100,), fixed="x")
    alter(plan, machine=Machine.uniform(1, memory=100, shared=True))
    plan.history.extra = {1: 10}
    assert predict(plan).peak[0] == 18


@pytest.mark.parametrize(
    ("product", "operations"),
    [
        (lambda x, y: x @ y, 2),
        (lambda x, y: x @ x.T, 2),
        (lambda x, y: da.tensordot(x, y, axes=1), 2),
        (lambda x, y: da.einsum("ij,jk->ik", x, y), 2),
        (lambda x, y: (1j * x).persist() @ y, 8),
    ],
)
def test_products_of_matrices_take_as_long_as_their_operations(product, operations):
    n = 1024
    with Scheduler("cpu:1") as s:
        x, y = da.random.random((2, n, n), chunks=(1, n // 2, n // 2)).persist()
        plan = s.plan(product(x, y))
        expected = operations * n**3 / s.hardware.machine.flops
        assert expected < plan.predicted.seconds < 2 * expected
        several = s.plan(product(x, y) + 1).predicted.seconds
        assert expected < several < 2 * expected


@pytest.mark.parametrize(
    ("product", "operations"),
    [
        (lambda x: (x @ x).sum(), 2 * 100 * 256**3),
        (lambda x: x @ x[:1], 2 * 100 * 256**3),
        (lambda x: da.tensordot(x, x, axes=([0, 1], [0, 1])), 2 * 100 * 256**3),
        (lambda x: da.einsum("bij,bjk,bkl->bil", x, x, x), 2 * 100 * 256**4),
    ],
)
def test_operations_of_products_are_those_of_their_lengths(product, operations):
    """Of several in one task, of small ones with a large one, and with a sum behind them."""
    with Scheduler("cpu:1") as s:
        x = da.random.random((100, 256, 256), chunks=(50, 256, 256)).persist()
        steps = [q.seconds for q in s.plan(product(x)).steps]
        expected = operations / s.hardware.machine.flops
        assert expected < sum(steps) < 1.5 * expected


def test_threads_do_not_run_far_ahead_of_who_reads_large_values():
    """Three blocks become one: there are few of the three at once, however much memory there is."""
    x = da.from_array(np.ones((8000, 1000)), chunks=(500, 1000))  # blocks of 4 MB
    y = da.stack([x, x + 1, x + 2]).mean(axis=0)
    with Scheduler("cpu:1", memory_limit="16 GiB", fuse=False) as s:
        peak = s.plan(y).predicted.peak[0]
        y.compute()
        assert s.last.peak[0] <= peak < y.nbytes + 16 * 2 * 4_000_000
