"""Clients and workers leave nothing behind on a cluster when they go, and nobody waits for them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import contextmanager
from itertools import permutations
from types import SimpleNamespace

import cloudpickle
import dask.array as da
import pytest
from dask import config, delayed
from distributed import Client, LocalCluster, fire_and_forget

import gpuscheduler
from gpuscheduler import scheduler as scheduler_module
from gpuscheduler.cluster import worker_plugin
from tests.cluster.test_attach import until

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["tests.cluster.test_attach"])
pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("cluster")]
PATIENCE = 100
LOCAL = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": 0}
NAMES = "scheduler", "array.rechunk.method", "dataframe.shuffle.method", "array.backend"


@pytest.fixture
def cluster():
    """In this process, with a client that nothing is attached to."""
    with LocalCluster(processes=False, **LOCAL) as cluster, Client(cluster) as client:
        yield SimpleNamespace(client=client, scheduler=cluster.scheduler, cluster=cluster)


def said():
    return [config.get(name, None) for name in NAMES]


def left(dask_worker):
    """What a worker has of attached clients."""
    plugins = [name for name in dask_worker.plugins if name.startswith("gpuscheduler")]
    handlers = [name for name in dask_worker.handlers if name.startswith("gpuscheduler")]
    return plugins + handlers + ours(), said()


#: Threads that other tests have left in this process.
EARLIER = set()


@pytest.fixture(autouse=True)
def _ignore_earlier_threads():
    EARLIER.update(t.ident for t in threading.enumerate())


def ours():
    """Threads of schedulers in this process, but those of other tests."""
    threads = [t for t in threading.enumerate() if t.ident not in EARLIER]
    return [t.name for t in threads if t.name.startswith("gpuscheduler")]


def total():
    return da.ones((8, 8), chunks=4).sum()


# ---- clients


CHILD = """
import os, signal, sys
import dask.array as da, gpuscheduler
from distributed import Client
client = Client(sys.argv[1])
gpuscheduler.attach(client, devices="cpu:2")
assert da.ones((8, 8), chunks=4).sum().compute() == 64
if sys.argv[2] == "close":
    client.close()
elif sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_client_that_ends_without_closing_leaves_nothing_on_the_cluster():
    """It ends as processes do, closes only itself, or is killed."""
    with LocalCluster(processes=True, **LOCAL) as cluster, Client(cluster) as client:
        before = client.run(left)
        scheduler = cluster.scheduler
        kept = set(scheduler.plugins), set(scheduler.handlers), set(scheduler.worker_plugins)
        assert list(before.values())[0][0] == []
        for how in ("exit", "close", "kill"):
            child = [sys.executable, "-c", CHILD, cluster.scheduler_address, how]
            code = subprocess.run(child, timeout=PATIENCE, check=False).returncode
            assert (code != 0) == (how == "kill")
            until(lambda: client.run(left) == before)
            until(lambda: not any(name.startswith("gpuscheduler") for name in scheduler.plugins))
            plugins = set(scheduler.plugins)
            assert (plugins, set(scheduler.handlers), set(scheduler.worker_plugins)) == kept


@pytest.mark.parametrize("how", ["close", "with", "shutdown"])
def test_closing_a_client_closes_what_is_attached_to_it(how):
    """Also Dask's configuration says what it said before, at once."""
    before = said()
    client = Client(processes=False, **LOCAL)
    attached = gpuscheduler.attach(client, devices="cpu:1")
    assert said() != before
    if how == "with":
        with client:
            pass
    else:
        getattr(client, how)()
    assert client.status == "closed"
    assert repr(attached) == "<AttachedCluster, closed>"
    assert said() == before
    assert int(total().compute()) == 64
    until(lambda: not ours())
    client.close()


def test_where_the_cluster_is_gone_dask_computes_as_without_it():
    """Nothing closes the client, but the client itself."""
    before = said()
    cluster = LocalCluster(processes=False, **LOCAL)
    client = Client(cluster)
    gpuscheduler.attach(client, devices="cpu:1")
    cluster.close()
    until(lambda: client.status == "closed")
    assert int(total().compute()) == 64
    assert said() == before


def test_what_others_want_of_a_client_that_is_gone_is_done_first(cluster, tmp_path):
    """`fire_and_forget`: the stage runs to its end, and only then the nodes are removed."""
    begun, go, done = (tmp_path / name for name in ("begun", "go", "done"))

    def work():
        begun.write_text("begun")
        until(go.exists)
        done.write_text("done")

    client = Client(cluster.cluster, set_as_default=False)
    attached = gpuscheduler.attach(client, devices="cpu:1")
    fire_and_forget(client.compute(delayed(work)()))
    until(begun.exists)
    client.close()
    client_id = client.id
    until(lambda: client_id not in cluster.scheduler.clients)
    assert attached.name in cluster.scheduler.plugins
    go.write_text("go")
    until(done.exists)
    until(lambda: attached.name not in cluster.scheduler.plugins)
    until(lambda: not ours())


def test_client_whose_connection_was_lost_is_attached_again(cluster):
    """It was taken for gone; what it had is removed, and what it has now is new."""
    with gpuscheduler.attach(cluster.client, devices="cpu:1") as attached:
        assert int(total().compute()) == 64
        first = attached.name
        lost = threading.Event()

        def lose():
            cluster.client.scheduler_comm.comm.abort()
            lost.set()

        cluster.client.loop.add_callback(lose)
        assert lost.wait(PATIENCE)
        until(lambda: first not in cluster.scheduler.plugins)
        until(lambda: cluster.client.status == "running")
        attached.membership.asked_at = 0.0
        assert int(total().compute()) == 64
        assert attached.name != first
        assert [n for n in cluster.scheduler.plugins if n.startswith("gpusch")] == [attached.name]
    assert not ours()


# ---- attachments


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_attachments_of_one_client_are_closed_in_any_order(cluster, order):
    client = cluster.client
    own = said(), client.get, client.compute, client.persist, client.close, client.shutdown
    before = set(vars(client))
    attached = {n: gpuscheduler.attach(client, devices="cpu:1") for n in range(3)}
    for n in order:
        x = total()
        assert x.compute() == client.compute(x).result(PATIENCE) == client.persist(x).compute()
        assert client.compute == attached[max(attached)].compute
        attached.pop(n).close()
    assert (
        said(), client.get, client.compute, client.persist, client.close, client.shutdown
    ) == own  # fmt: skip
    assert set(vars(client)) == before  # `_close` among them
    x = total()
    assert x.compute() == client.compute(x).result(PATIENCE) == client.persist(x).compute()


# ---- workers


@contextmanager
def slow(monkeypatch):
    """Keep workers that join now from getting ready until this ends.

    Gives two events: one has begun, and it may go on.
    """
    begun, go = threading.Event(), threading.Event()
    make = scheduler_module.Scheduler

    def scheduler(**options):
        begun.set()
        assert go.wait(PATIENCE)
        return make(**options)

    monkeypatch.setattr(worker_plugin, "Scheduler", scheduler)
    try:
        yield begun, go
    finally:
        go.set()


def test_nobody_waits_for_a_worker_that_is_not_ready(cluster, monkeypatch):
    """It does not answer, as one would that is gone: the others compute, and it joins later."""
    with gpuscheduler.attach(cluster.client, devices="cpu:1") as attached:
        with slow(monkeypatch) as (begun, _):
            cluster.cluster.scale(2)
            assert begun.wait(PATIENCE)
            attached.membership.asked_at = 0.0
            assert int(total().compute()) == 64
            assert attached.plan(total()).workers == 1
        until(lambda: attached.plan(total()).workers == 2)


def test_worker_that_leaves_before_it_is_ready_is_no_concern_of_anybody(cluster, monkeypatch):
    """Warnings are errors here."""
    with gpuscheduler.attach(cluster.client, devices="cpu:1") as attached:
        with slow(monkeypatch) as (begun, go):
            cluster.cluster.scale(2)
            assert begun.wait(PATIENCE)
            attached.membership.asked_at = 0.0
            assert int(total().compute()) == 64
            go.set()
            cluster.cluster.scale(1)
            until(lambda: len(cluster.scheduler.workers) == 1)
        attached.membership.asked_at = 0.0
        assert int(total().compute()) == 64
        assert attached.membership.left_out == set()
    until(lambda: not ours())


def test_worker_that_is_getting_ready_when_the_client_leaves_keeps_nothing(cluster, monkeypatch):
    attached = gpuscheduler.attach(cluster.client, devices="cpu:1")
    with slow(monkeypatch) as (begun, _):
        cluster.cluster.scale(2)
        assert begun.wait(PATIENCE)
        attached.close()
    until(lambda: not ours())
    assert [things for things, _ in cluster.client.run(left).values()] == [[], []]


class Fake:
    """A cluster's scheduler as `Attachment` sees it, with two workers. `b` never answers."""

    def __init__(self):
        self.workers = {"a": None, "b": None}
        self.asked = asyncio.Event()

    async def broadcast(self, *, msg, workers, on_error):
        (worker,) = workers
        if worker == "b":
            self.asked.set()
            await asyncio.Event().wait()
        return {worker: "its answer"}


def test_question_to_a_worker_that_leaves_is_not_waited_for():
    async def answers():
        scheduler = Fake()
        attachment = worker_plugin.Attachment("name", "client", scheduler)
        question = asyncio.ensure_future(attachment.ask({"op": "name"}, ["a", "b", "long gone"]))
        await scheduler.asked.wait()
        del scheduler.workers["b"]
        attachment.remove_worker(scheduler, "b", stimulus_id="test")
        return await question, attachment.asked

    assert asyncio.run(answers()) == ({"a": "its answer"}, set())


def test_plug_in_that_comes_after_it_was_removed_is_removed(cluster):
    """1. A worker joins, and is given the plug-in. 2. The client leaves, and the worker is asked to
    remove the plug-in. 3. The worker adds it."""

    async def add(dask_worker):
        return await dask_worker.plugin_add(
            worker_plugin.WorkerNode("gpuscheduler-gone", {"devices": "cpu:1"})
        )

    cluster.client.run(add)
    assert [things for things, _ in cluster.client.run(left).values()] == [[]]
