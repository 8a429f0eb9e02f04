"""A real cluster of two worker processes, each with a scheduler of its own over two CPU devices."""

from __future__ import annotations

import gc
import gzip
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import cloudpickle
import dask
import dask.array as da
import numpy as np
import psutil
import pytest
from dask import bag, delayed
from dask.callbacks import Callback
from dask.utils import get_scheduler_lock, key_split
from distributed import Client, LocalCluster, Lock, SchedulerPlugin, futures_of, wait
from distributed.security import Security
from hypothesis import HealthCheck, given, settings

import gpuscheduler
from gpuscheduler import PlanError
from gpuscheduler.cluster.progress import RunProgress
from gpuscheduler.cluster.stages import BEFORE, BEHIND, BESIDE
from gpuscheduler.cluster.wire import Unreachable
from gpuscheduler.pipeline.cache import PlanCache
from tests.support.strategies import dags

# the workers need not be able to import the tests
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["tests.support.strategies"])

# one process runs them all, with one cluster
pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("cluster")]
PATIENCE = 100  # seconds: a slow machine may take long, a lost signal takes for ever
GRAPHS = sorted(p.stem for p in (Path(__file__).parents[2] / "graphs").glob("[!_]*.py"))
#: As Dask computes: bit for bit the same.
EXACT = {"devices": "cpu:2", "memory_limit": "1 GiB", "fuse": False}


@pytest.fixture(scope="module")
def client():
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),  # it will come back
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
    ):
        cluster.scheduler.add_plugin(Counting(), name="counting")
        yield client


class Counting(SchedulerPlugin):
    """Counts the tasks that the cluster's scheduler, which is in this process, is told of."""

    tasks = 0
    names: set[str] = set()  # as its dashboard shows them

    def update_graph(self, scheduler, *, tasks, **_):
        Counting.tasks += len(tasks)
        Counting.names |= {key_split(key) for key in tasks}


@pytest.fixture(scope="module")
def shared(client):
    with gpuscheduler.attach(client, **EXACT) as attached:
        yield attached


@pytest.fixture
def attached(client, shared):
    """The cluster with all its workers."""
    client.cluster.scale(2)
    client.wait_for_workers(2, timeout=PATIENCE)
    return shared


def until(condition):
    """Wait for what other processes do."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


# ---- answers


@pytest.mark.parametrize("name", GRAPHS)
def test_reference_workloads_are_bit_for_bit_those_of_dask(attached, name):
    module = importlib.import_module(f"graphs.{name}")
    x = module.build(module.SMALL)
    (got,), (expected,) = dask.compute(x), dask.compute(x, scheduler="sync")
    np.testing.assert_array_equal(got, expected, strict=True)


def test_with_default_options_the_bits_are_those_of_one_scheduler(client, attached):
    different = []
    with (
        gpuscheduler.attach(client, devices="cpu:2") as attached,
        gpuscheduler.Scheduler("cpu:2") as scheduler,
    ):
        for name in GRAPHS:
            module = importlib.import_module(f"graphs.{name}")
            x = module.build(module.SMALL)
            got, expected = (dask.compute(x, scheduler=s.get)[0] for s in (attached, scheduler))
            if got.tobytes() != expected.tobytes():
                different.append(name)
    assert different == []


@settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(case=dags())
def test_any_graph_gives_what_dask_gives(attached, case):
    dsk, keys = case
    assert attached.get(dsk, keys) == dask.get(dsk, keys)


def test_other_collections_and_several_at_once(attached):
    numbers = bag.from_sequence(range(40), npartitions=4)
    x = da.arange(40, chunks=10)
    assert dask.compute(numbers.sum(), x.max(), delayed(len)("abc")) == (780, 39, 3)


def test_xarray_objects_are_computed_this_way(attached):
    xarray = pytest.importorskip("xarray")
    z = xarray.DataArray(da.arange(100, chunks=10), dims="t")
    before = Counting.tasks
    assert int((z * 2).sum().compute()) == 9900
    assert 1 <= Counting.tasks - before <= 6


def test_results_of_unknown_shape_and_of_odd_types(attached):
    x = da.from_array(np.arange(20.0), chunks=5)
    np.testing.assert_array_equal(x[x > 7].compute(), np.arange(8.0, 20))
    assert delayed({"a": [1, (2, None)]}).compute() == {"a": [1, (2, None)]}
    assert x.mean().compute() == 9.5


def test_a_computation_in_a_task_runs_on_its_worker(attached):
    def nested(n):
        return int(da.ones(n, chunks=2).sum().compute())

    assert delayed(nested)(7).compute() == 7


def test_what_a_client_sends_itself_works_as_ever(attached):
    client = attached.client
    assert client.submit(pow, 2, 5).result() == 32
    assert client.gather(client.map(abs, [-1, -2])) == [1, 2]
    assert client.get({"x": (pow, 2, 5)}, "x", sync=False).result() == 32
    future = client.submit(np.arange, 6)
    assert delayed(sum)(future).compute() == 15
    assert delayed(len)([future, [future, 1], {"a": future}]).compute() == 3
    assert delayed(np.concatenate)([future, future]).compute().sum() == 30


def twice_apart(b):
    return (b - b.mean()) * 2


def test_a_report_has_the_lanes_and_the_user_s_lines_of_all_workers(attached, tmp_path):
    path = tmp_path / "run.html"
    x = da.random.default_rng(0).random((400, 400), chunks=50)
    with attached.report(path, "steps", timeline=True):
        (x.map_blocks(twice_apart) + 1).sum().compute()
    text = path.read_text(encoding="utf-8")
    for words in (
        "on 2 workers", "worker 0: device 1", "worker 1: device 0", "twice_apart",
        "test_attach.py:", "Devices over time", "Memory over time", "attached.report(path",
    ):  # fmt: skip
        assert words in text
    assert "<script" not in text
    with gzip.open(tmp_path / "run.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    lines = {e["args"]["line"] for e in events if e["ph"] == "X" and "line" in e["args"]}
    assert any("test_attach.py:" in line for line in lines)


# ---- shuffles, locks, ports


def test_blocks_are_shuffled_by_tasks(attached):
    """Where there is a client, Dask would have tasks that talk to each other."""
    a = np.arange(40_000.0).reshape(200, 200)
    x = (da.from_array(a, chunks=(200, 2)) + 0).persist()
    y = x.rechunk((2, 200))
    np.testing.assert_array_equal(y.compute(), a)
    pandas = pytest.importorskip("pandas")
    frames = importlib.import_module("dask.dataframe")
    one = pandas.DataFrame({"k": np.arange(60) % 7, "v": np.arange(60.0)})
    df = frames.from_pandas(one, npartitions=5).persist()
    merged = df.merge(df, on="k").compute()
    assert all(attached.plan(c).stages for c in (y, df.merge(df, on="k")))
    assert merged.v_x.sum() == one.merge(one, on="k").v_x.sum()
    assert list(df.set_index("v").compute().k) == list(one.k)
    assert df.groupby("k").v.median().compute()[0] == one.groupby("k").v.median()[0]


@pytest.mark.parametrize("way", ["compute", "client", "persist"])
def test_a_shuffle_peer_to_peer_is_run_by_the_cluster_itself(attached, way):
    """Also of blocks that were persisted here."""
    a = np.arange(2500.0).reshape(50, 50)
    x = (da.from_array(a, chunks=(50, 5)) + 0).persist().rechunk((5, 50), method="p2p")
    with pytest.raises(PlanError, match="a peer-to-peer shuffle"):
        attached.plan(x)
    how = {
        "compute": lambda: (x + 1).compute(),
        "client": lambda: attached.client.compute([x + 1], sync=True)[0],
        "persist": lambda: (x.persist() + 1).compute(),
    }
    np.testing.assert_array_equal(how[way](), a + 1)


class Door:
    """Writes blocks, and fails where somebody else is writing one, in whatever process."""

    def __init__(self, path):
        self.path = path

    def __setitem__(self, index, block):
        with self.path.open("x"):
            time.sleep(0.02)
        self.path.unlink()


def test_locks_are_those_of_the_cluster(attached, tmp_path):
    assert type(get_scheduler_lock(da.ones(3))) is Lock
    da.store(da.ones(16, chunks=1), Door(tmp_path / "inside"), lock=True)
    locks = pytest.importorskip("xarray.backends.locks")
    assert locks.get_dask_scheduler() == "distributed"


def listening():
    """The ports on which this process listens."""
    connections = psutil.Process().net_connections("inet")
    return sorted({c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN})


def test_nobody_listens_on_other_ports_than_before(client, attached):
    before = listening(), client.run(listening)
    assert before[0]
    with gpuscheduler.attach(client, **EXACT):
        x = da.ones((100, 100), chunks=50).persist()
        assert float((x + x.T).sum().compute()) == 20_000
        assert (listening(), client.run(listening)) == before


# ---- few tasks


def test_the_cluster_sees_stages_and_no_chunks(attached):
    x = da.from_array(np.arange(4000.0), chunks=2)
    y = (x + 1).sum()
    cut = attached.plan(y)
    assert len(cut.graph.tasks) > 2000
    before = Counting.tasks
    assert float(y.compute()) == 4000 * 4001 / 2
    assert Counting.tasks - before == cut.tasks <= 6


def test_stages_are_named_after_their_last_tasks(attached):
    x = da.from_array(np.arange(100.0), chunks=10)
    Counting.names.clear()
    np.log1p(x).compute()
    assert Counting.names == {"log1p.stage0"}


def test_a_plan_says_what_is_cut(attached):
    """Of two row bands of x, each needs half of the other's."""
    x = da.random.default_rng(0).random((600, 600), chunks=(300, 300))
    text = str(attached.plan(x + x.T))
    assert "6 tasks on 2 workers: 4 stages in 2 levels, 8 tasks of the cluster" in text
    assert "worker 1: 2 stages of" in text
    assert "peak memory 2,880,000 bytes" in text
    assert "0 -> 1: 720,000 bytes" in text
    assert "1 -> 0: 720,000 bytes" in text


def test_a_collection_is_cut_once(attached):
    y = da.from_array(np.arange(100.0), chunks=10).sum()
    assert attached.plan(y) is attached.plan(y)
    assert float(y.compute()) == float(y.compute()) == 4950


def test_devices_of_all_workers_are_numbered(attached):
    def where(dask_worker=None):
        return threading.current_thread().name, os.getpid()

    def on(device):
        with dask.annotate(device=device):
            return delayed(where)(pure=False)

    names, pids = zip(*dask.compute(*[on(d) for d in range(4)]), strict=True)
    assert [n[-1] for n in names] == ["0", "1", "0", "1"]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    with pytest.raises(PlanError, match="device=4, but the devices of the cluster are 0 to 3"):
        on(4).compute()


# ---- persisted collections


def kept(client):
    """Values that the workers hold for the client, and their bytes."""
    held = client.run(lambda dask_worker: [v for v in dask_worker.data.values()
                                           if type(v).__name__ == "Bundle"])  # fmt: skip
    return sum(len(v) for v in held.values())


def test_persisted_blocks_stay_on_their_workers_and_are_used_there(attached):
    client = attached.client
    a = np.arange(10_000.0).reshape(100, 100)
    x = (da.from_array(a, chunks=10) * 2).persist()
    assert len(futures_of(x)) == 2  # one for each worker, whatever the number of blocks
    wait(x)
    cut = attached.plan(x + 1)
    assert cut.traffic() == {}
    assert len(cut.holders) == 2
    np.testing.assert_array_equal((x + x.T).compute(), 2 * (a + a.T))
    np.testing.assert_array_equal(x.compute(), 2 * a)
    y = x.persist()
    assert {f.key for f in futures_of(y)} == {f.key for f in futures_of(x)}
    z = (x + 1).persist()
    np.testing.assert_array_equal(z[3:7, 90:].compute(), 2 * a[3:7, 90:] + 1)
    assert float(client.compute(x.sum()).result()) == 2 * a.sum()


def test_values_of_the_caller_are_sent_once_and_stay(attached, monkeypatch):
    sent = []
    send = attached._send
    remembering = lambda tasks, *a: sent.append(len(pickle.dumps(tasks))) or send(tasks, *a)  # noqa: E731
    monkeypatch.setattr(attached, "_send", remembering)
    a = np.random.default_rng(0).random((300, 300))
    x = da.from_array(a, chunks=50).persist()
    assert len(futures_of(x)) == 2
    assert sent.pop() > a.nbytes
    np.testing.assert_array_equal((x + 1).compute(), a + 1)
    assert sent.pop() < a.nbytes / 10
    np.testing.assert_array_equal(x.compute(), a)
    assert sent == [] or sent.pop() < a.nbytes / 10
    frame = {"a": [1, (2, None)]}
    value, sequence = dask.persist(delayed(frame), bag.from_sequence(range(9), npartitions=3))
    assert futures_of([value, sequence])
    assert dask.compute(value, sequence.sum()) == (frame, 36)
    assert not any(loose for _, loose in attached.plan(sequence.map(abs), value).holders)


def test_what_is_persisted_is_as_any_other_collection_for_the_cluster(attached):
    client = attached.client
    a = np.arange(10_000.0).reshape(100, 100)
    x = (da.from_array(a, chunks=10) * 2).persist()
    there = list(attached.workers)[:1]
    assert client.submit(lambda x: float(x.sum().compute()), x).result(PATIENCE) == 2 * a.sum()
    np.testing.assert_array_equal((x + x.T).compute(workers=there), 2 * (a + a.T))
    np.testing.assert_array_equal(client.compute(x, workers=there).result(PATIENCE), 2 * a)
    assert float(delayed(np.sum)(x).compute(workers=there)) == 2 * a.sum()
    client.publish_dataset(published=x)
    try:
        again = client.get_dataset("published")
        del x
        gc.collect()
        np.testing.assert_array_equal(again.compute(workers=there), 2 * a)
        np.testing.assert_array_equal((again + again.T).compute(), 2 * (a + a.T))
    finally:
        client.unpublish_dataset("published")


def test_releasing_a_persisted_collection_frees_its_memory(attached):
    client = attached.client
    gc.collect()
    until(lambda: kept(client) == 0)
    x = da.ones((100, 100), chunks=10).persist()
    wait(x)
    assert kept(client) == 2
    x.sum().compute()
    del x
    gc.collect()
    until(lambda: kept(client) == 0)


def test_client_compute_gives_futures_and_persist_collections(attached):
    client = attached.client
    x = da.arange(100, chunks=10)
    future = client.compute(x + 1)
    np.testing.assert_array_equal(future.result(), np.arange(1, 101))
    assert client.compute([x.sum(), x.max(), 5], sync=True) == [4950, 99, 5]
    p = client.persist(x + 1)
    assert int(p.sum().compute()) == 5050
    assert client.compute(x.sum(), workers=list(attached.workers)[:1]).result() == 4950


def test_results_do_not_go_by_way_of_the_cluster_s_scheduler(attached, monkeypatch):
    client, handlers = attached.client, attached.client.cluster.scheduler.handlers
    asked = []
    gather = handlers["gather"]
    monkeypatch.setitem(handlers, "gather", lambda **k: asked.append(k) or gather(**k))
    x = da.ones((1000, 1000), chunks=250)
    assert client.compute([x, x.sum()], sync=True)[1] == x.compute().sum() == 1_000_000
    assert asked == []
    assert client.gather(client.submit(abs, -1)) == 1
    assert len(asked) == 1


# ---- failures


class OurError(ValueError):
    pass


def test_an_exception_comes_with_its_type_key_device_and_worker(attached):
    def fails(block):
        raise OurError(f"a block of {block.size}")

    x = da.ones(40, chunks=10).map_blocks(fails, meta=np.ones(0), name="fails-here")
    with pytest.raises(ValueError, match="a block of 10") as caught:
        x.compute()
    notes = caught.value.__notes__
    assert any("while running ('fails-here', " in n and " on device " in n for n in notes)
    assert any(n.startswith("on worker tcp://") for n in notes)
    frames = []
    tb = caught.value.__traceback__
    while tb is not None:
        frames.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    assert frames[-1] == "fails"
    assert int(da.arange(4, chunks=2).sum().compute()) == 6


def takes_long(begun):
    """Say that it has begun, and go on for longer than anybody waits."""
    begun.write_text("begun")
    time.sleep(10 * PATIENCE)
    return 1


def test_a_cancelled_computation_ends_and_the_workers_take_new_work(attached, tmp_path):
    client = attached.client
    begun = tmp_path / "begun"
    future = client.compute(delayed(takes_long)(begun))
    until(begun.exists)
    future.cancel()
    begin = time.monotonic()
    with dask.annotate(device=0):
        on_first = delayed(abs)(-1, pure=False)
    with dask.annotate(device=2):
        on_second = delayed(abs)(-2, pure=False)
    assert dask.compute(on_first, on_second) == (1, 2)
    assert time.monotonic() - begin < PATIENCE


def test_ctrl_c_ends_a_computation_and_the_workers_take_new_work(attached, tmp_path):
    client = attached.client
    begun = tmp_path / "begun"

    def interrupt():
        until(begun.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            delayed(takes_long)(begun).compute()
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert dask.compute(*[delayed(abs)(-n) for n in range(8)]) == tuple(range(8))
    running = lambda dask_worker: sum(  # noqa: E731
        len(p.running) for n, p in dask_worker.plugins.items() if n.startswith("gpuscheduler")
    )
    until(lambda: sum(client.run(running).values()) == 0)


def test_a_worker_that_dies_is_replaced_and_the_answer_is_right(attached, tmp_path):
    client = attached.client
    flag = tmp_path / "died"

    def dies_once(block, block_id=None):
        if block_id == (3,) and not flag.exists():
            flag.write_text("once")
            os.kill(os.getpid(), signal.SIGKILL)
        return block + 1

    x = da.arange(60, chunks=10)
    y = x.map_blocks(dies_once, dtype=x.dtype, meta=np.empty(0, x.dtype))
    before = set(client.scheduler_info(n_workers=-1)["workers"])
    assert int((y + y[::-1]).sum().compute()) == 2 * sum(range(1, 61))
    assert flag.exists()
    client.wait_for_workers(2, timeout=PATIENCE)
    assert set(client.scheduler_info(n_workers=-1)["workers"]) != before


def test_a_worker_that_joins_later_takes_part_and_one_that_leaves_does_not(attached):
    client = attached.client
    x = da.arange(60, chunks=10)
    assert attached.plan(x + 1).workers == 2
    client.cluster.scale(3)
    client.wait_for_workers(3, timeout=PATIENCE)
    until(lambda: attached.plan(x + 2).workers == 3)
    assert int((x + 1).sum().compute()) == sum(range(1, 61))
    client.cluster.scale(2)
    until(lambda: attached.plan(x + 3).workers == 2)
    assert int((x + 2).sum().compute()) == sum(range(2, 62))


def test_another_version_on_a_worker_is_named(client, attached, monkeypatch):
    ours = gpuscheduler.__version__
    monkeypatch.setattr(gpuscheduler, "__version__", "99.0")
    monkeypatch.setattr("gpuscheduler._version.__version__", "99.0")
    with pytest.raises(RuntimeError) as caught:
        gpuscheduler.attach(client, devices="cpu:1")
    text = str(caught.value)
    for worker in client.scheduler_info(n_workers=-1)["workers"]:
        assert f"worker {worker} has gpuscheduler {ours}" in text
    assert "the client has gpuscheduler 99.0: install this version everywhere" in text


def test_a_worker_without_the_package_is_named(client, attached):
    worker, other = client.scheduler_info(n_workers=-1)["workers"]

    def hide():
        sys.modules["hidden"], sys.modules["gpuscheduler"] = sys.modules["gpuscheduler"], None

    def show():
        sys.modules["gpuscheduler"] = sys.modules.pop("hidden")

    client.run(hide, workers=[worker])
    try:
        with pytest.raises(RuntimeError, match=f"worker {worker} has no gpuscheduler") as caught:
            gpuscheduler.attach(client, devices="cpu:1")
        assert other not in str(caught.value)
    finally:
        client.run(show, workers=[worker])


def test_devices_that_a_worker_has_not_are_an_error_that_names_it(client, attached):
    with pytest.raises(RuntimeError, match="worker tcp://.*cuda|worker tcp://.*CUDA"):
        gpuscheduler.attach(client, devices="cuda:77")


def test_a_wrong_option_is_refused_at_once(client):
    with pytest.raises(TypeError, match="unknown option 'colour'"):
        gpuscheduler.attach(client, colour="red")


# ---- leaving


def test_closing_gives_everything_back(client, attached):
    """Also while another one is attached: that one is in place again."""

    def found():
        names = "scheduler", "array.rechunk.method", "dataframe.shuffle.method"
        return client.get, client.compute, [dask.config.get(name, None) for name in names]

    before = found()
    attached = gpuscheduler.attach(client, devices="cpu:1", memory_limit="100 MiB")
    assert (
        repr(attached)
        == f"<AttachedCluster at {client.scheduler.address}: 2 workers of 1 cpu device>"
    )
    assert client.compute == attached.compute
    assert int(da.arange(4, chunks=2).sum().compute()) == 6
    attached.close()
    attached.close()
    assert found() == before
    assert repr(attached) == "<AttachedCluster, closed>"
    name = attached.name
    plugins = client.run(lambda dask_worker: name in dask_worker.plugins)
    assert not any(plugins.values())
    with pytest.raises(RuntimeError, match="not attached any more"):
        da.arange(4, chunks=2).compute(scheduler=attached.get)


# ---- progress


def test_steps_that_are_done_are_told_to_the_client(attached):
    """Two tasks of one stage: when the second has begun, the client is told of the first."""
    seen = []

    class Seen(Callback):
        def _start_state(self, dsk, state):
            self.state = state
            seen.append((len(state["finished"]), len(state["ready"])))

        def _finish(self, dsk, state, failed):
            seen.append((len(state["finished"]), len(state["ready"]), failed))

    x = da.from_array(np.arange(100.0), chunks=10)
    with Seen():
        assert float((x + 1).sum().compute()) == 5050
    n = len(attached.plan((x + 1).sum()).graph.tasks)
    assert seen == [(0, n), (n, 0, False)]
    progress = RunProgress({("a", 0): 10, ("b", 1): 30})
    progress.update(0.5, ("b", 1))
    assert (len(progress.state["finished"]), len(progress.state["ready"])) == (15, 25)


def test_a_worker_reports_how_far_a_stage_is(attached, tmp_path):
    """The last of many steps waits until the client has heard of the others."""
    heard = tmp_path / "heard"

    class Listening(Callback):
        def _start_state(self, dsk, state):
            def listen():
                until(lambda: len(state["finished"]) > 0)
                heard.write_text("yes")

            self.thread = threading.Thread(target=listen)
            self.thread.start()

        def _finish(self, dsk, state, failed):
            self.thread.join()

    def last(*_):
        until(heard.exists)
        return 1

    def slowly(n, _):
        time.sleep(0.02)
        return n

    with dask.annotate(device=0):
        before = 0
        for n in range(40):
            before = delayed(slowly)(n, before)
        end = delayed(last)(before)
    with Listening():
        assert end.compute(optimize_graph=False) == 1


def test_a_large_value_that_two_stages_read_is_sent_once(attached):
    """As tasks of the cluster there are the two stages, and the value."""
    table = delayed(np.arange(200_000.0), pure=False)

    def look(total, table, n):
        return total + table[n]

    with dask.annotate(device=0):
        first = delayed(look)(1.0, table, 7)
    with dask.annotate(device=3):
        second = delayed(look)(first, table, 8)
    before = Counting.tasks
    assert float(second.compute()) == 1 + 7 + 8
    plan = attached.plan(second)
    assert len(plan.stages) == 2
    assert Counting.tasks - before == plan.tasks + 1


def test_what_cannot_be_copied_from_another_worker_is_sent(shared, monkeypatch):
    """As when a stage runs elsewhere because its worker has left: it is all computed again."""
    asked = []
    gather = shared.client.gather

    def failing(futures, direct=None):
        asked.append(set(shared.membership.near))
        if len(asked) == 1:
            raise Unreachable("it is on another machine")
        return gather(futures, direct=direct)

    monkeypatch.setattr(shared.membership, "near", {("a", "b")})
    monkeypatch.setattr(
        shared.membership, "find_near", lambda: None
    )  # should a worker be new by now
    monkeypatch.setattr(shared.client, "gather", failing)
    x = da.ones((100, 100), chunks=50)
    assert float((x + x.T).sum().compute()) == 20_000
    assert asked == [{("a", "b")}, set()]


def test_what_takes_long_to_send_goes_ahead_and_the_answer_is_the_same(attached, monkeypatch):
    """Blocks of a computation, and persisted ones, between two workers of one thread each."""
    monkeypatch.setattr("gpuscheduler.cluster.stages.AHEAD_SECONDS", 0.0)
    monkeypatch.setattr(attached, "_plans", PlanCache())
    a = np.random.default_rng(4).random((400, 400))
    x = da.from_array(a, chunks=50) * 2
    p = x.persist()
    b = 2 * a
    parts = set()
    answers = [
        ((x + x.T).sum(), (b + b.T).sum()),
        ((x + x.T) @ x, (b + b.T) @ b),
        (p + p.T, b + b.T),
        (p @ p.T + x, b @ b.T + b),
    ]
    for y, expected in answers:
        cut = attached.plan(y)
        assert cut.ahead
        parts |= {s.part for s in cut.stages}
        before = Counting.tasks
        np.testing.assert_allclose(y.compute(), expected)
        assert Counting.tasks - before == cut.tasks + len(cut.holders)
    assert parts == {BEFORE, BESIDE, BEHIND}


def test_a_cluster_with_tls():
    """Nothing of ours but the cluster's own connections: certificates are asked for on all."""
    pytest.importorskip("cryptography")
    security = Security.temporary()
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", security=security
        ) as cluster,
        Client(cluster, security=security) as client,
    ):
        assert all(address.startswith("tls://") for address in client.scheduler_info()["workers"])
        with gpuscheduler.attach(client, **EXACT) as attached:
            a = np.random.default_rng(1).random((200, 200))
            x = da.from_array(a, chunks=50).persist()
            y = (x + x.T).sum(axis=0)
            assert attached.plan(y).traffic()
            np.testing.assert_allclose(y.compute(), (a + a.T).sum(axis=0))


def test_a_cluster_of_processes_that_were_started_by_hand(tmp_path):
    """`dask scheduler` and two `dask worker`, found by their address."""
    file = tmp_path / "cluster.json"
    common = ["--scheduler-file", file, "--dashboard-address", ":0"]
    worker = ["worker", *common, "--nthreads", "1", "--no-nanny", "--local-directory", tmp_path]
    scheduler = ["scheduler", *common, "--host", "127.0.0.1", "--port", "0"]
    with ExitStack() as stack:
        for arguments in (scheduler, worker, worker):
            with open(tmp_path / "log", "a") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "dask", *arguments], stdout=log, stderr=log
                )
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.terminate)
        until(lambda: file.exists() and file.read_text().rstrip().endswith("}"))
        with Client(json.loads(file.read_text())["address"]) as client:
            client.wait_for_workers(2, timeout=PATIENCE)
            with gpuscheduler.attach(client, **EXACT) as attached:
                for name in ("transpose_sum", "gauss_sum"):
                    module = importlib.import_module(f"graphs.{name}")
                    x = module.build(module.SMALL)
                    assert attached.plan(x).workers == 2
                    assert x.compute() == x.compute(scheduler="sync")
