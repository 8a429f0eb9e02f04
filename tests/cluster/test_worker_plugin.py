"""What a worker does beside its stages, on clusters of one process.

Also what becomes of the options of Dask's client.
"""

from __future__ import annotations

import asyncio
import gc
import io
import os
import pickle
import re
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest
from dask import bag, config, delayed
from dask.callbacks import Callback
from dask.core import flatten
from dask.diagnostics import ProgressBar
from dask.tokenize import tokenize
from distributed import Client, Future, LocalCluster, Nanny, futures_of, wait

import gpuscheduler
from gpuscheduler.cluster import worker_plugin
from gpuscheduler.cluster.answer import ClusterResult, RemoteBlock, finish
from gpuscheduler.cluster.progress import RunProgress
from gpuscheduler.cluster.transport import Bundle
from gpuscheduler.diagnostics.progress import ProgressDisplay
from gpuscheduler.errors import Interrupted
from gpuscheduler.frontend.lowering import received_by_scheduler
from gpuscheduler.pipeline import compile
from gpuscheduler.runtime.under_way import runs_under_way
from tests.cluster.test_attach import until
from tests.diagnostics.test_trace_json import threads

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["tests.cluster.test_attach"])
pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("cluster")]
PATIENCE = 100  # seconds, of a busy machine too
LOCAL = {"threads_per_worker": 2, "dashboard_address": ":0", "memory_limit": 0}


@pytest.fixture(scope="module")
def client():
    with Client(n_workers=2, processes=False, **LOCAL) as client:
        yield client


@pytest.fixture
def attached(client):
    with gpuscheduler.attach(client, devices="cpu:1", memory_limit="100 MiB") as attached:
        yield attached


# ---- Dask's configuration


def computes():
    """The thread in which a computation of a task runs."""
    return delayed(lambda: threading.current_thread().name, pure=False)().compute()


def persists():
    return int(da.ones(4, chunks=2).persist().sum().compute())


def rechunks():
    """Of so many blocks that Dask would have the tasks talk to each other."""
    return int(da.ones((400, 400), chunks=(400, 4)).rechunk((4, 400)).sum().compute())


@contextmanager
def beside(function):
    """Meanwhile, in another thread."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def waits(begun, go, n=0):
    begun.write_text("begun")
    until(go.exists)
    return n


def waits_and_computes(begun, go):
    waits(begun, go)
    return computes()


def test_what_a_task_computes_beside_a_running_stage_goes_to_the_cluster(tmp_path):
    """And what the stage computes itself runs on its devices, also after a task got a client."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    with (
        LocalCluster(n_workers=1, processes=True, **LOCAL) as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices="cpu:1"),
    ):
        future = client.compute(delayed(waits_and_computes)(begun, go))
        until(begun.exists)
        try:
            assert "Dask" in client.submit(computes, pure=False).result(PATIENCE)
        finally:
            go.write_text("go")
        assert future.result(PATIENCE) == "gpuscheduler-cpu-0"
        assert delayed(computes)().compute() == "gpuscheduler-cpu-0"
        assert delayed(rechunks)().compute() == 160_000
        assert delayed(persists)().compute() == client.submit(persists).result(PATIENCE) == 4
        assert "Dask" in client.submit(computes, pure=False).result(PATIENCE)


def test_closing_while_a_stage_runs_in_this_process_gives_the_configuration_back(client, tmp_path):
    before = config.get("scheduler", None)
    attached = gpuscheduler.attach(client, devices="cpu:1")
    begun, go = tmp_path / "begun", tmp_path / "go"
    kept = delayed(waits_and_computes)(begun, go).persist()
    until(begun.exists)
    attached.close()
    go.write_text("go")
    wait(futures_of(kept), PATIENCE)
    assert config.get("scheduler", None) == before


def test_what_was_persisted_is_of_use_when_nothing_is_attached_any_more(client):
    attached = gpuscheduler.attach(client, devices="cpu:1")
    a = np.arange(64.0).reshape(8, 8)
    x = (da.from_array(a, chunks=4) + 1).persist()
    number, sequence = dask.persist(delayed(pow)(2, 5), bag.from_sequence(range(8)).map(abs))
    wait([x, number, sequence])
    attached.close()
    assert client.compute.__func__ is Client.compute
    np.testing.assert_array_equal((x + x.T).compute(), a + a.T + 2)
    np.testing.assert_array_equal(client.compute(x[:2]).result(PATIENCE), a[:2] + 1)
    np.testing.assert_array_equal(x.persist().compute(), a + 1)
    assert dask.compute(number + 1, sequence.sum()) == (33, 28)
    with gpuscheduler.attach(client, devices="cpu:1") as again:
        assert len(again.plan(x + 1).holders) == 2
        np.testing.assert_array_equal((x + 1).compute(), a + 2)


@pytest.mark.parametrize("persisted", ["by stages", "by its client"])
def test_what_is_on_a_cluster_is_no_part_of_another_scheduler_s_graph(client, persisted):
    """The error names a block that is there, and its remedies are ones."""
    x = da.arange(8, chunks=4) + 1
    attached = gpuscheduler.attach(client, devices="cpu:1")
    if persisted == "by its client":
        attached.close()
    x = x.persist()
    wait(x)
    attached.close()
    with gpuscheduler.Scheduler("cpu:1"):
        for y in (x, x.sum()):
            with pytest.raises(gpuscheduler.PlanError, match="is on a Dask cluster") as caught:
                y.compute()
            assert any(repr(key) in str(caught.value) for key in flatten(x.__dask_keys__()))
        assert int(x.sum().compute(scheduler=client)) == 36
        with gpuscheduler.attach(client, devices="cpu:1"):
            assert int(x.sum().compute()) == 36


def test_what_a_task_persists_in_this_process_stays_on_its_worker(attached):
    assert delayed(persists)().compute() == 4


def test_a_process_that_has_the_configuration_of_another(client):
    """In which there are nodes, and here are none yet."""
    default, node = worker_plugin._DefaultScheduler(), object()
    with config.set(scheduler=default.get):
        assert default._scheduler_get() == client.get
        default.add(node)
        assert default._scheduler_get() == client.get
        default.discard(node)
        assert config.get("scheduler", None) is None


# ---- results


def test_results_hold_no_array_longer_than_the_caller_does():
    array = np.ones(3)
    gone = weakref.ref(array)
    gc.collect()
    gc.disable()
    try:
        answer = ClusterResult(("x",), {}, {}, {}, {})
        answer.values([Bundle({"x": array})])
        del array
        assert gone() is None
    finally:
        gc.enable()


def test_each_result_is_made_of_what_it_needs(attached, monkeypatch):
    sent = {}
    send = attached._send
    monkeypatch.setattr(attached, "_send", lambda tasks, *a: sent.update(tasks) or send(tasks, *a))
    with dask.annotate(device=0):
        x = da.arange(8, chunks=4) + 1
    with dask.annotate(device=1):
        y = da.arange(8, chunks=4) * 2
    futures = attached.client.compute([x, y, y.sum()])
    assert [f.result().tolist() for f in futures] == [[*range(1, 9)], [*range(0, 16, 2)], 56]
    finishes = [t for t in sent.values() if t.func is finish]
    assert [len(t.dependencies) for t in finishes] == [1, 1, 1]
    assert [len(t.args[0].wanted) for t in finishes] == [1, 1, 1]


def test_what_a_user_s_futures_read_stays_where_it_is(attached):
    """Sixteen arrays on the second worker: so is what is made of them."""
    _, two = sorted(attached.workers)
    client = attached.client
    futures = [client.submit(np.full, 1000, n, workers=[two], pure=False) for n in range(16)]
    wait(futures)
    blocks = [da.from_delayed(delayed(f), (1000,), float) for f in futures]
    total = da.concatenate(blocks).sum()
    assert {stage.worker for stage in attached.plan(total).stages} == {1}
    assert float(total.compute()) == 1000 * sum(range(16))


def test_futures_that_nobody_has_made_yet_are_spread(attached, tmp_path):
    begun, go = tmp_path / "begun", tmp_path / "go"
    futures = [attached.client.submit(waits, begun, go, n) for n in range(16)]
    try:
        plan = attached.plan(*[delayed(abs)(f) for f in futures])
        assert sorted(plan.where_held) == [0] * 8 + [1] * 8
    finally:
        go.write_text("go")


def test_a_block_is_the_task_that_it_becomes_elsewhere():
    block = RemoteBlock(("x", 0), ("y", 0), SimpleNamespace(key="stage"), "tcp://there", 8)
    values = {"stage": Bundle({("y", 0): 7})}
    for same in (block, block.copy(), pickle.loads(pickle.dumps(block))):
        assert same(values) == 7
        assert (same.key, set(same.dependencies)) == (("x", 0), {"stage"})
    other = block.substitute({"stage": "another"}, key="z")
    assert (other.key, other(values)) == ("z", 7)
    assert tokenize(block) == tokenize(block.copy()) != tokenize(other)
    assert repr(block) == "<Block ('x', 0), 8 B on tcp://there>"


# ---- options of Dask's client


def fails_once(flag):
    if not flag.exists():
        flag.write_text("once")
        raise ValueError("the first time")
    return 7


@pytest.mark.parametrize("way", ["compute", "client", "persist", "annotated"])
def test_what_fails_is_tried_again_as_often_as_is_said(attached, tmp_path, way):
    flag, client = tmp_path / "flag", attached.client
    if way == "annotated":
        with dask.annotate(retries=1):
            x = da.from_delayed(delayed(fails_once, pure=False)(flag), (), int)
        assert int((x + 1).compute()) == 8
        return
    x = delayed(fails_once, pure=False)(flag)
    how = {
        "compute": lambda: x.compute(retries=1),
        "client": lambda: client.compute(x, retries=1).result(),
        "persist": lambda: x.persist(retries=1).compute(),
    }
    assert how[way]() == 7


def test_priorities_go_to_the_stages(client, attached, monkeypatch):
    given = []
    get = attached._client_get
    remembering = lambda *a, **k: given.append(k["priority"]) or get(*a, **k)  # noqa: E731
    monkeypatch.setattr(attached, "_client_get", remembering)
    x = da.arange(8, chunks=4)
    with dask.annotate(priority=5):
        y = x + 1
    assert int(y.sum().compute()) == 36
    assert int(client.compute(y.sum(), priority=2).result()) == 36
    assert int(x.sum().compute()) == 28
    assert given == [5, 2, 0]


def test_options_for_single_tasks_go_to_the_client_s_own(client, attached, monkeypatch):
    """Stages would take no notice of them."""
    monkeypatch.setattr(attached, "_make_tasks", None)
    there = {"workers": [min(attached.workers)]}
    x = da.arange(8, chunks=4).sum()
    assert int(x.compute(**there)) == 28
    assert client.compute(x, **there).result() == 28
    kept = client.persist(x, **there)
    assert int(kept.compute(**there)) == 28


# ---- meeting


def test_workers_that_are_not_ready_are_no_missing_workers(client, monkeypatch):
    async def tell_nothing(self, worker):
        pass

    monkeypatch.setattr(worker_plugin.WorkerNode, "_report", tell_nothing)
    with pytest.raises(RuntimeError, match="no worker is ready: inproc://.*logs"):
        gpuscheduler.attach(client, devices="cpu:1")


@pytest.fixture
def deserted():
    """An attached cluster whose only worker has left."""
    with (
        LocalCluster(n_workers=1, processes=False, **LOCAL) as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices="cpu:1") as attached,
    ):
        cluster.scale(0)
        desert(attached)
        yield attached


def desert(attached):
    """Wait until nobody is there, and have that noticed."""
    until(lambda: not attached.client.scheduler_info()["workers"])
    attached.membership.asked_at = 0.0


def test_where_no_worker_is_at_the_moment_an_adaptive_cluster_starts_one(deserted):
    """It may be gone again when the stages are sent: then another one is started for these."""
    client = deserted.client
    client.cluster.adapt(minimum=0, maximum=1, interval="20ms", wait_count=1)
    x = da.arange(8, chunks=4).sum()
    assert int(x.compute()) == 28
    desert(deserted)
    assert int(client.compute(x).result()) == 28
    desert(deserted)
    assert deserted.plan(x).workers == 1


@pytest.mark.parametrize("way", ["compute", "client", "persist"])
def test_stages_for_workers_that_have_all_left_run_on_one_that_comes(deserted, way):
    """Nobody has noticed that they left."""
    client, tasks = deserted.client, deserted.client.cluster.scheduler.tasks
    deserted.membership.workers = {"inproc://gone": worker_plugin.WorkerFacts("cpu", (10**9,), 1e9)}
    deserted.membership.asked_at = time.monotonic() + 10 * PATIENCE
    x = da.arange(8, chunks=4).sum()

    def come():
        until(lambda: len(tasks) > 0)
        client.cluster.scale(1)

    with beside(come):
        if way == "compute":
            assert int(x.compute()) == 28
        elif way == "client":
            assert int(client.compute(x).result(PATIENCE)) == 28
        else:
            x = x.persist()
            wait(x, PATIENCE)
    names = [deserted.name in n for n in client.cluster.scheduler.plugins]
    deserted.close()
    assert names.count(True) == 1
    assert deserted.name not in client.cluster.scheduler.plugins


def test_waiting_for_a_worker_ends_when_one_comes(deserted):
    cluster = deserted.client.cluster

    def come():
        until(lambda: cluster.scheduler.tasks)
        cluster.scale(1)

    with beside(come):
        assert int(da.arange(8, chunks=4).sum().compute()) == 28


@pytest.mark.parametrize("way", ["Ctrl-C", "cancel", "close"])
def test_waiting_for_a_worker_can_be_ended(deserted, way):
    """Nothing is left of it then."""
    client, tasks = deserted.client, deserted.client.cluster.scheduler.tasks

    def end():
        until(lambda: tasks)
        if way == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        elif way == "cancel":
            client.cancel([Future(key, client) for key in list(client.futures)])
        else:
            client.close()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            beside(end),
            pytest.raises(KeyboardInterrupt if way == "Ctrl-C" else CancelledError),
        ):
            da.arange(8, chunks=4).sum().compute()
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: not tasks)


def test_workers_that_are_all_left_out_are_not_waited_for(deserted, monkeypatch):
    def wrong(self, worker):
        raise RuntimeError("it has 99.0")

    monkeypatch.setattr(worker_plugin.WorkerNode, "_devices", wrong)
    deserted.client.cluster.scale(1)
    deserted.client.wait_for_workers(1, timeout=PATIENCE)
    with (
        pytest.warns(UserWarning, match="it has 99.0; it takes no part"),
        pytest.raises(RuntimeError, match="none of the cluster's .* part: not worker inproc://"),
    ):
        da.arange(8, chunks=4).sum().compute()


def test_nothing_to_plan_is_an_error(attached):
    with pytest.raises(gpuscheduler.PlanError, match="nothing to compute"):
        attached.plan()


#: What keeps a worker from taking part, and what is said then.
HINDRANCES = {
    "import gpuscheduler; gpuscheduler.__version__ = '99.0'": "has gpuscheduler 99.0; the client",
    "import sys; sys.modules['gpuscheduler'] = None": "has no gpuscheduler .import of gpuscheduler",
}


def test_a_worker_that_joins_and_cannot_take_part_is_named_once():
    """One has another version, one has not the package."""
    with (
        LocalCluster(n_workers=1, processes=True, **LOCAL) as cluster,
        Client(cluster) as client,
        gpuscheduler.attach(client, devices="cpu:1") as attached,
    ):

        async def join(preload):
            return await Nanny(
                cluster.scheduler_address, nthreads=1, preload=preload, memory_limit=0
            )

        def computed():
            assert int(da.arange(4, chunks=2).sum().compute()) == 6
            return ", not worker tcp://" in repr(attached)

        for hindrance, why in HINDRANCES.items():
            late = client.sync(join, [hindrance + "\n"])
            with pytest.warns(UserWarning, match=why) as warned:
                until(computed)
            address = late.worker_address
            assert [str(w.message).count(f"worker {address}") for w in warned] == [1]
            assert repr(attached).endswith(f": 1 worker of 1 cpu device, not worker {address}>")
            client.sync(late.close)
            until(lambda: len(client.scheduler_info()["workers"]) == 1)
        until(lambda: computed() is False)


def test_a_worker_without_the_package_gets_a_plug_in_that_says_so(monkeypatch):
    pickled = pickle.dumps(worker_plugin.WorkerNode("name", {"devices": "cpu:1"}))
    node = pickle.loads(pickled)
    assert (node.name, node.settings) == ("name", {"devices": "cpu:1"})
    said = []

    async def hear(address, told):
        said.append(told)
        return True

    worker = SimpleNamespace(contact_address="tcp://a", scheduler=SimpleNamespace(name=hear))
    ours = gpuscheduler.__version__
    monkeypatch.setattr(gpuscheduler, "__version__", "99.0")
    monkeypatch.setattr("gpuscheduler._version.__version__", "99.0")
    asyncio.run(pickle.loads(pickled).setup(worker))
    monkeypatch.setitem(sys.modules, "gpuscheduler", None)
    asyncio.run(pickle.loads(pickled).setup(worker))
    wrong, none = said
    remedy = f"; the client has gpuscheduler {ours}: install this version everywhere"
    assert wrong == f"worker tcp://a has gpuscheduler 99.0{remedy}"
    assert none.startswith("worker tcp://a has no gpuscheduler (")
    assert none.endswith(remedy)


# ---- stages that nobody wants any more


def test_a_stage_is_cancelled_while_it_is_planned(attached, monkeypatch):
    """50,000 tasks, planned over and over until somebody stops it."""
    begun = threading.Event()
    plan_graph = compile.plan_graph

    def for_ever(*args):
        begun.set()
        while True:
            plan_graph(*args)

    monkeypatch.setattr(compile, "plan_graph", for_ever)
    collecting = gc.isenabled()
    future = attached.client.compute(da.ones(50_000, chunks=1).map_blocks(np.negative).sum())
    assert begun.wait(PATIENCE)
    running = lambda: any(n.running for n in worker_plugin._default.nodes)  # noqa: E731
    assert running()
    future.cancel()
    until(lambda: not running())  # the cluster's own loop has a third of the interpreter meanwhile
    assert gc.isenabled() == collecting
    monkeypatch.undo()
    assert int(da.arange(4, chunks=2).sum().compute()) == 6


def test_no_exception_comes_while_a_stage_runs(attached):
    def planning():
        return [
            run._thread for node in worker_plugin._default.nodes for run in node.running.values()
        ]

    assert delayed(planning)().compute() == [[]]


def test_what_interrupts_a_stage_that_has_been_planned_comes_later():
    """1. The stage ends planning. 2. It is interrupted: no exception comes, but a look tells."""
    run = worker_plugin._StageRun()
    run.plans()
    run.end_planning()
    run.interrupt()
    assert run.stopped
    with pytest.raises(Interrupted):
        run.check()


def test_an_interruption_that_was_lost_is_found_when_planning_ends():
    """As destructors drop an exception that comes while they run."""
    run = worker_plugin._StageRun()
    run.plans()
    thread = threading.Thread(target=run.interrupt)
    with suppress(Interrupted):
        thread.start()
        until(lambda: False)
    with pytest.raises(Interrupted):
        run.end_planning()
    thread.join()


# ---- progress


def test_a_worker_counts_the_steps_that_it_runs(client, monkeypatch):
    """Of a fused graph these are fewer than its tasks; the last of them is the end of all."""
    told = []
    monkeypatch.setattr(worker_plugin, "REPORT_EVERY", 0)
    monkeypatch.setattr(worker_plugin.WorkerNode, "tell", lambda self, key, done: told.append(done))
    x = da.ones((8, 8), chunks=2)
    y = (x + x.T).sum()
    with gpuscheduler.attach(client, devices="cpu:1", fuse_least=0) as attached:
        assert int(y.compute()) == 128
        assert told.count(1.0) == 2 * len(attached.plan(y).stages)


def test_progress_bar_of_dask_shows_how_far_a_stage_is(attached, monkeypatch, tmp_path):
    """The last of some steps waits until the bar shows something between 0 and 100 %."""
    seen = tmp_path / "seen"

    class Screen(io.StringIO):
        def write(self, text):
            if re.search(r" [1-9][0-9]?% Completed", text):
                seen.write_text(text)
            return super().write(text)

    def wait_for(*_):
        until(seen.exists)
        return 1

    monkeypatch.setattr(worker_plugin, "REPORT_EVERY", 0)
    end = 0
    with dask.annotate(device=0):
        for n in range(9):
            end = delayed(max)(n, end)
        end = delayed(wait_for)(end)
    screen = Screen()
    with ProgressBar(out=screen):
        assert end.compute(optimize_graph=False) == 1
    assert "100% Completed" in screen.getvalue()


def test_a_progress_bar_shows_each_report_of_a_worker():
    screen = io.StringIO()
    run = RunProgress({("a", 0): 10, ("b", 1): 30})
    with run.shown_to([ProgressBar(out=screen, dt=0.001)._callback], {}):
        for stage, done, percent in [("b", 0.2, 15), ("b", 1.0, 75), ("a", 0.5, 87)]:
            run.update(done, (stage, int(stage == "b")))
            until(lambda text=f" {percent}% Completed": text in screen.getvalue())
    assert " 100% Completed" in screen.getvalue()


def test_a_display_follows_a_run_on_a_cluster(attached):
    runs_under_way.forget()
    rows, lines = [], []
    screen = SimpleNamespace(show=rows.extend, finish=lines.extend)
    x = da.from_array(np.arange(100.0), chunks=10)
    with ProgressDisplay(after=0.0, every=0.001, screen=screen):
        assert float((x + 1).sum().compute()) == 5050
        until(lambda: lines and not runs_under_way.runs())
    n = len(attached.plan((x + 1).sum()).graph.tasks)
    assert n in {row.total for row in rows}  # beside those of the workers, which are threads here
    assert any(f": {n} steps in " in line for line in lines)


def test_callbacks_that_hear_of_no_task_on_a_cluster_are_named(attached, caplog):
    with caplog.at_level("INFO", "gpuscheduler.cluster"):
        with Callback(start=lambda dsk: None), ProgressBar(out=io.StringIO()):
            assert delayed(abs)(-1).compute() == 1
        assert not caplog.records
        with Callback(pretask=lambda *_: None):
            assert delayed(abs)(-2).compute() == 2
    (record,) = caplog.records
    assert "callbacks hear of no task" in record.getMessage()


def test_callback_that_has_started_is_told_of_the_end_when_another_one_fails(attached):
    """As by Dask: else a progress bar would go on for ever."""
    ends = []

    def fail(dsk):
        raise ValueError("it cannot start")

    first = Callback(finish=lambda dsk, state, failed: ends.append(failed))
    work = attached._prepare(*received_by_scheduler(delayed(abs)(-1)))
    with (
        pytest.raises(ValueError, match="it cannot start"),
        attached._progress(work, [first._callback, Callback(start=fail)._callback]),
    ):
        pass
    assert ends == [True]
    assert attached._watched == {}


# ---- when steps ran


def test_the_timelines_of_all_workers_are_brought_to_the_client(client, tmp_path):
    path = tmp_path / "run.json"
    with gpuscheduler.attach(client, devices="cpu:2", timeline=True) as attached:
        x = da.random.default_rng(0).random((40, 40), chunks=10)
        (x + x.T).sum().compute()
        attached.timeline(path)
        workers = sorted(attached.workers)
    found = threads(path)  # steps that overlap on a device, as its thread was late, have a row too
    found = {name: rows for name, rows in found.items() if not name[1].endswith(", too")}
    assert sorted(found) == [(f"worker {w}", f"device {d}") for w in workers for d in (0, 1)]
    assert min(map(len, found.values())) > 0


def test_times_are_those_of_the_clock_of_the_cluster_s_scheduler(client):
    def measured(name, delay, dask_worker):
        dask_worker.scheduler_delay = delay  # until its next heartbeat
        trace = worker_plugin._node(dask_worker, name).trace()
        return trace.rows, trace.epoch

    with gpuscheduler.attach(client, devices="cpu:1", timeline=True) as attached:
        da.ones(8, chunks=2).sum().compute()
        early, late = (client.run(measured, attached.name, delay) for delay in (0.0, 1000.0))
    assert any(rows for rows, _ in early.values())
    for worker, (rows, epoch) in early.items():
        assert late[worker] == (rows, epoch + 1000 * 10**9)
