"""Runs that follow a tape, task by task and by addresses: the same values, and nothing left."""

import gc
import importlib
import threading
import time

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler import disk_cache
from gpuscheduler.devices.cuda import (
    executor,
    given_values,
    kernel_code,
    kernels,
    lane_orders,
    launch,
    replay,
)
from gpuscheduler.devices.cuda import recorder as cuda_recorder

from .test_executor import DEVICES, GRAPHS, come_back_elsewhere, host, used_bytes

pytestmark = pytest.mark.gpu

#: Graphs that are all kernels of ours, when their arrays are on the devices.
KERNELS = set(GRAPHS) - {"matmul", "tall_skinny_svd"}


@pytest.fixture(params=DEVICES)
def runs(request):
    with gpuscheduler.Scheduler(devices=request.param) as s:
        yield s


@pytest.fixture
def count(monkeypatch):
    """How often a tape was followed task by task, and by addresses."""
    seen = {"tasks": 0, "addresses": 0}

    def counted(name, old):
        def call(*args):
            seen[name] += 1
            return old(*args)

        return call

    recorder, run = cuda_recorder.ReplayRecorder.__init__, replay.Replay.run
    monkeypatch.setattr(cuda_recorder.ReplayRecorder, "__init__", counted("tasks", recorder))
    monkeypatch.setattr(replay.Replay, "run", counted("addresses", run))
    return seen


def persisted(arrays):
    return [a.persist() if hasattr(a, "persist") else a for a in arrays]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", GRAPHS)
def test_each_graph_again_and_again(name, runs, count):
    module = importlib.import_module(f"graphs.{name}")
    if hasattr(module, "inputs"):
        y = module.apply(*persisted(module.inputs(module.SMALL, None, "cupy")))
    else:
        y = module.build(module.SMALL, None, "cupy")
    first = host(y.compute())
    for way in (y.compute, lambda: y.persist().compute()):
        before = dict(count)
        for turn in range(20):  # on a busy host some runs find memory elsewhere
            np.testing.assert_array_equal(host(way()), first)
            if turn >= 3 and (name not in KERNELS or count["addresses"] > before["addresses"]):
                break
        if name in KERNELS:
            assert count["tasks"] > before["tasks"]
            assert count["addresses"] > before["addresses"]


def test_nothing_is_left_behind(runs):
    before = used_bytes()
    x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
    y = (x + x.T).sum(axis=0)
    for _ in range(3):
        y.persist()
    held = used_bytes()
    for _ in range(10):
        y.persist()
    assert used_bytes() <= held
    del x, y
    runs._plans.clear()
    gc.collect()
    runs.hardware.synchronize()
    for teams in runs.hardware._teams.values():
        for team in teams.idle:
            for lane in team.lanes:
                with cupy.cuda.Device(lane.device):
                    lane.sweep(wait=True)
                lane.work = launch.Workspace()
    assert used_bytes() <= before


def test_a_tape_holds_no_chunks(runs):
    """What was persisted goes with its collection, though its template stays, and its tape."""
    x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
    for _ in range(4):
        (x + 1).sum(axis=0).compute()
    assert runs._persisted.chunks()
    del x
    assert not runs._persisted.chunks()


def test_rounds_of_an_iteration_have_other_arrays_each_time(runs, count):
    rng = np.random.default_rng(1)
    x0 = rng.random((48, 40))
    x = da.from_array(cupy.asarray(x0), chunks=(12, 20)).persist()
    u, want = x, x0
    for _ in range(8):
        u = (u / 2 + x[::-1]).persist()
        want = want / 2 + x0[::-1]
        np.testing.assert_array_equal(host(u.compute()), want)
    assert count["addresses"] >= 4
    sums = [float((x * k).sum().compute()) for k in (2.0, 3.0)]
    np.testing.assert_allclose(sums, [2 * x0.sum(), 3 * x0.sum()])


def test_collections_that_are_alike_take_turns_and_nothing_moves_meanwhile(runs, count):
    """They share a tape, and each has its own addresses."""
    x = [da.random.default_rng(n).random((64, 64), chunks=16).persist() for n in range(3)]
    y = [(a * 2 - 1).sum(axis=0) for a in x]
    expected = [host(a.compute()) for a in y]
    for n in (0, 1, 2, 2, 1, 0, 0, 2):
        np.testing.assert_array_equal(host(y[n].compute()), expected[n])
    assert count["addresses"] >= 8


def test_a_result_is_the_callers_own_and_stays_as_it_is(runs):
    x = da.random.default_rng(0).random((40, 40), chunks=10).persist()
    y = x * 2
    kept = [y.persist() for _ in range(5)]
    want = host(kept[0].compute())
    blocks = kept[-1].blocks[0, 0].compute()
    blocks.fill(-1)  # what a caller does to one must not be seen in another
    for k in kept[:-1]:
        np.testing.assert_array_equal(host(k.compute()), want)


def test_what_the_caller_has_queued_comes_first(runs, count):
    """An array of the graph that is written to between runs, on another stream than ours."""
    blocks = {("written", i, j): cupy.zeros((16, 16), "f4") for i in range(4) for j in range(4)}
    x = da.Array(blocks, "written", ((16,) * 4,) * 2, meta=cupy.zeros((0, 0), "f4"))
    y = (x + x.T).sum()
    for n in range(6):
        for block in blocks.values():
            block.fill(n)
        got = y.compute()
        for block in blocks.values():
            block.fill(-1)
        assert float(got) == 2 * n * 64 * 64
    assert count["addresses"]


@pytest.mark.gpus(2)
def test_a_result_of_several_devices_is_joined_behind_its_making():
    """Known plans end before their kernels do: what is joined must wait for those of each GPU."""
    a = np.random.default_rng(0).random((512, 512))
    delay = 1 if hasattr(cupy, "_device") else 300  # the stand-in finds races by itself
    with cupy.cuda.Device(1):
        late = cupy.zeros(2**22)
    with gpuscheduler.Scheduler(devices="cuda:0,1"):
        x = da.from_array(cupy.asarray(a), chunks=128).persist()
        k = da.from_array(cupy.ones((512, 512)), chunks=128).persist()
        for n in range(6):
            y = x * k if n < 3 else x + k
            with cupy.cuda.Device(1):
                for _ in range(delay):
                    late.fill(n)
            want = a if n < 3 else a + 1
            np.testing.assert_array_equal(host(y.compute()), want)


def test_a_chunk_that_was_away_is_read_where_it_is_now(count):
    """Pointers are looked up for each run, and where a chunk is not on its device there is none."""
    with gpuscheduler.Scheduler(devices="cuda:0,0") as s:
        x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
        y = (x + 1).sum(axis=0)
        want = host(y.compute())
        for _ in range(3):
            np.testing.assert_array_equal(host(y.compute()), want)
        followed = count["addresses"]
        assert followed
        (chunk, *_) = s._persisted.chunks()
        moved = come_back_elsewhere(s, chunk)
        np.testing.assert_array_equal(host(y.compute()), want)
        assert count["addresses"] == followed + 1
        chunk.note_arrival(1 - chunk.place, moved)  # in two places: not as it was foreseen
        np.testing.assert_array_equal(host(y.compute()), want)
        assert count["addresses"] == followed + 1


def test_arrays_that_lie_in_another_way_are_not_read_by_addresses(count):
    """Collections that are alike share a tape; their arrays may be in another order in memory."""
    rng = np.random.default_rng(0)
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        for n, order in enumerate("CCCCFFCF"):
            a = rng.random((32, 32))
            x = da.from_array(cupy.asarray(a, order=order), chunks=16, name=f"given-{n}")
            got = host((x.map_blocks(lambda b: b * 2) + 1).sum(axis=1).compute())
            np.testing.assert_allclose(got, (a * 2 + 1).sum(axis=1))
        misaligned = cupy.arange(33 * 32, dtype="f8")[1 : 1 + 32 * 32].reshape(32, 32)
        for _ in range(3):
            x = da.from_array(misaligned, chunks=16, name="misaligned")
            got = host((x.map_blocks(lambda b: b * 2) + 1).sum(axis=1).compute())
            np.testing.assert_allclose(got, (host(misaligned) * 2 + 1).sum(axis=1))
    assert count["addresses"]


def test_memory_that_is_refused_after_all_lets_the_run_begin_anew(count, monkeypatch):
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
        y = (x + x.T).sum(axis=0) * 2
        want = host(y.compute())
        for _ in range(3):
            y.compute()
        for last in range(1, 6):
            alloc, left = cupy.cuda.alloc, [last]

            def refusing(n, alloc=alloc, left=left):
                left[0] -= 1
                if not left[0]:
                    raise cupy.cuda.memory.OutOfMemoryError(n, 0, 0)
                return alloc(n)

            with monkeypatch.context() as patch:
                patch.setattr(cupy.cuda, "alloc", refusing)
                np.testing.assert_array_equal(host(y.compute()), want)
        followed = count["addresses"]
        np.testing.assert_array_equal(host(y.compute()), want)
        assert count["addresses"] == followed + 1


def test_others_chunks_may_leave_too_little_for_it(count):
    with gpuscheduler.Scheduler(devices="cuda:0", memory_limit=3 * 2**20) as s:
        x = da.ones((256, 256), chunks=128).persist()  # half a MiB
        y = x * 3
        for _ in range(4):
            np.testing.assert_array_equal(host(y.persist().compute()), np.full((256, 256), 3.0))
        followed = count["addresses"]
        assert followed
        others = [da.full((256, 256), n, chunks=128).persist() for n in range(5)]
        for _ in range(3):
            np.testing.assert_array_equal(host(y.persist().compute()), np.full((256, 256), 3.0))
        assert s.last is not None
        assert s.last.peak[0] <= 3 * 2**20
        for n, other in enumerate(others):
            np.testing.assert_array_equal(host(other.compute()), np.full((256, 256), float(n)))


def test_several_threads_have_each_their_own(runs):
    x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
    y = (x + x.T).sum(axis=0)
    want = host(y.compute())
    wrong = []

    def again():
        for _ in range(8):
            got = host(y.compute(scheduler=runs.get))
            if not np.array_equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=again) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_kernel_that_cannot_be_had_is_not_recorded(count, monkeypatch):
    def refused(*_):
        raise kernel_code.CompileFailed("no")

    monkeypatch.setattr(kernel_code, "compile_kernel", refused)
    monkeypatch.setattr(disk_cache, "read", lambda words: None)
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        blocks = {("given", i): cupy.arange(16.0) + 16 * i for i in range(4)}
        x = da.Array(blocks, "given", ((16,) * 4,), meta=cupy.zeros(0))
        y = (x * 5 + 1).sum()
        with pytest.warns(RuntimeWarning, match="operation by operation"):
            got = [float(y.compute()) for _ in range(4)]
    assert got == [(np.arange(64.0) * 5 + 1).sum()] * 4
    assert not count["addresses"]


def test_an_error_in_a_task_names_it(monkeypatch):
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
        y = (x + 1).sum(axis=0)
        y.compute()

        def broken(*_):
            raise ValueError("broken")

        monkeypatch.setattr(kernels.Kernels, "run_batch", broken)
        monkeypatch.setattr(kernels.Kernels, "run", broken)
        with pytest.raises(ValueError, match="broken") as error:
            y.compute()
        assert any("while running" in note for note in error.value.__notes__)
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        monkeypatch.undo()
        assert np.isfinite(host((x + 1).sum(axis=0).compute())).all()


@pytest.mark.parametrize("level", ["counters", "steps", "device"])
def test_what_is_recorded_follows_the_tape_all_the_same(count, level):
    """Otherwise another execution would be recorded than the one in question."""
    with gpuscheduler.Scheduler(devices="cuda:0,0", observe=level) as s:
        x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
        y = (x + 1).sum()
        for _ in range(3):
            y.compute()
        records = list(s.recorder.runs)[1:]
        assert [r.how for r in records] == ["steps", "replay", "replay"]
        assert count["tasks"]
        assert len({r.steps for r in records}) == 1
        for record in records[1:]:
            rows = [row for row in s.recorder.rows() if row.run == record.number]
            assert len(rows) == (record.steps if level != "counters" else 0)
            early = record.admitted - 100_000  # ns: what the devices' clocks may be off
            assert all(early <= row.begin <= row.end for row in rows)


def test_what_somebody_watches_follows_no_tape(count):
    """Callbacks and the checks want to hear of each step."""
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
        y = (x + 1).sum()
        y.compute()
    with gpuscheduler.Scheduler(devices="cuda:0,0", check=True):
        for _ in range(3):
            y.compute()
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        seen = []
        with dask.callbacks.Callback(posttask=lambda key, *_: seen.append(key)):
            y.compute()
            before = len(seen)
            y.compute()
        assert before
        assert len(seen) == 2 * before
    assert not count["addresses"]
    assert not count["tasks"]


def test_the_footprint_is_that_of_a_run(runs):
    x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
    y = (x + x.T).sum(axis=0)
    y.compute()
    first = runs.last
    for _ in range(3):
        y.compute()
    assert runs.last.traffic == first.traffic
    assert runs.last.spilled == first.spilled
    for device, nbytes in first.peak.items():
        assert runs.last.peak.get(device, 0) >= nbytes or device < 0


def test_runs_with_lists_and_masks_are_repeated_by_heart(runs, count):
    """Lists are sent once, and stay on the devices as long as their plan; masks are made anew."""
    source = np.random.default_rng(0).random((120, 40))
    order = np.random.default_rng(1).permutation(120)
    x = da.from_array(source, chunks=(30, 40)).to_backend("cupy").persist()
    cases = {
        "list": ((x[order] * 2).sum(axis=1), (source[order] * 2).sum(axis=1)),
        "some": (x[order[:50]].mean(axis=0), source[order[:50]].mean(axis=0)),
        "mask": (x[x > 0.5].sum(), source[source > 0.5].sum()),
    }
    for z, want in cases.values():
        before = count["addresses"]
        for _ in range(4):
            np.testing.assert_allclose(host(z.compute()), want)
        assert count["addresses"] > before
    # another list of as many is another collection, and the same plan
    other = np.roll(order, 17)
    for _ in range(3):
        got = host((x[other] * 2).sum(axis=1).compute())
        np.testing.assert_allclose(got, (source[other] * 2).sum(axis=1))


def test_a_list_is_on_the_devices_as_long_as_it_lives():
    with gpuscheduler.Scheduler(devices="cuda:0,0") as s:
        array = np.arange(10)
        first, second = s.hardware.device_copy(array, 0), s.hardware.device_copy(array, 1)
        np.testing.assert_array_equal(host(first), array)
        assert first is second  # one device
        assert s.hardware.device_copy(array.copy(), 0) is not first
        assert len(s.hardware._kept) == 1
        del array
        assert not s.hardware._kept


def test_a_run_right_behind_another_is_followed_all_the_same(monkeypatch):
    """Threads let go of what the first, which is planned, has held: that takes some time."""
    clear, follow, followed = lane_orders.LaneOrders.clear, executor.CudaDevices.follow, []

    def slowly(self, place):
        time.sleep(0.004)
        clear(self, place)

    def seen(self, tape):
        followed.append(follow(self, tape))
        return followed[-1]

    monkeypatch.setattr(lane_orders.LaneOrders, "clear", slowly)
    monkeypatch.setattr(executor.CudaDevices, "follow", seen)
    with gpuscheduler.Scheduler(devices="cuda:0,0"):
        y = (da.ones((64, 64), chunks=8).to_backend("cupy").persist() + 1).to_backend("numpy")
        for _ in range(5):
            np.testing.assert_array_equal(y.compute(), np.full((64, 64), 2.0))
    assert followed[-1]


@pytest.fixture
def order(monkeypatch):
    """What a run does first: look at its chunks, or queue its kernels."""
    seen = []

    def told(cls, name, word):
        real = getattr(cls, name)

        def call(*args):
            seen.append(word)
            return real(*args)

        monkeypatch.setattr(cls, name, call)

    told(given_values.GivenValues, "take_chunks", "looks")
    told(replay.Replay, "run", "queues")
    return seen


@pytest.mark.parametrize(
    ("f", "copies"),
    [(lambda x: x + 1, False), (lambda x: x + x.T, True), (lambda x: x.max(axis=0), False)],
    ids=["here", "chunks fetched", "results fetched"],
)
def test_what_is_run_again_is_queued_before_its_chunks_are_looked_at(runs, order, f, copies):
    x = da.random.default_rng(0).random((64, 64), chunks=16).persist()
    want, y = f(host(x.compute())), f(x).persist
    runs.hardware.synchronize()
    for _ in range(4):
        np.testing.assert_array_equal(host(y().compute()), want)  # this waits until all is there
    away = copies and len(runs.hardware.ids) > 1
    expected = ["looks", "queues"] if away else ["queues", "looks"]
    for _ in range(20):  # on a busy host some runs find streams that are not idle yet
        order.clear()
        kept = y()
        if order == expected:
            break
    else:
        pytest.fail(f"it {' and '.join(order)}")
    del x
    np.testing.assert_array_equal(host(kept.compute()), want)  # of chunks that are gone by now


def test_chunks_that_other_streams_make_are_looked_at_once(order):
    """A run has waited for them then, and so have those behind it. (The caller's stream and the
    default one are between them, too: to leave out the waiting alone is no race.)"""
    delay = 1 if hasattr(cupy, "_device") else 300
    late = cupy.zeros(2**22)
    with gpuscheduler.Scheduler(devices="cuda:0") as s:
        x = da.from_array(cupy.arange(4096.0), chunks=512).persist()
        for n in range(8):
            with s.hardware.lease(None, None):  # as a run that goes on: the next has other streams
                for _ in range(delay):
                    late.fill(n)
                made = (x * (n + 2)).persist()
            y = made - 1
            order.clear()
            for _ in range(4):
                got = y.persist()
            np.testing.assert_array_equal(host(got.compute()), np.arange(4096.0) * (n + 2) - 1)
    assert ["looks", "queues", "queues", "looks"] in [order[k : k + 4] for k in range(len(order))]


def test_a_chunk_that_comes_back_elsewhere_is_looked_at_first(order):
    with gpuscheduler.Scheduler(devices="cuda:0") as s:
        x = da.from_array(cupy.arange(4096.0), chunks=512).persist()
        y = x * 3
        for _ in range(5):
            np.testing.assert_array_equal(host(y.persist().compute()), np.arange(4096.0) * 3)
        come_back_elsewhere(s, s._persisted.chunks()[0])
        order.clear()
        kept = y.persist()
        assert order[0] == "looks"
        np.testing.assert_array_equal(host(kept.compute()), np.arange(4096.0) * 3)
