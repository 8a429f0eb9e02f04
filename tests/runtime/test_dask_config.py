"""Dask's configuration, whoever sets it and in whatever order they end."""

import dask
import dask.array as da
import pytest
from dask import config
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.runtime.dask_config import ConfigOverride
from tests.cluster.test_attach import until

LOCAL = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0", "memory_limit": 0}
NAMES = "a", "b.c"


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from(NAMES)), st.integers(0, 1))))
def test_what_is_said_is_always_what_the_latest_has_set(moves):
    """`moves`: which one begins, or ends if it is there, and what it says of which."""
    with config.set({"b": {"c": "before"}}):
        there = {}
        for who, names, value in moves:
            if who in there:
                there.pop(who).end()
            elif names:
                there[who] = ConfigOverride(dict.fromkeys(names, value))
            for name, default in zip(NAMES, (None, "before"), strict=True):
                said = [s.values[name] for s in there.values() if name in s.values]
                assert config.get(name, None) == [default, *said][-1]
        for one in there.values():
            one.end()
            one.end()
        assert config.get("a", "nothing") == "nothing"
        assert config.get("b.c") == "before"


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from(NAMES)), st.integers(0, 1))))
def test_what_a_place_has_is_always_what_the_latest_has_set_there(moves):
    """In a place that is not Dask's configuration, beside another one where the same names are."""
    place, other = {"b.c": "before"}, {}
    beside = ConfigOverride(dict.fromkeys(NAMES, "other"), other)
    there = {}
    for who, names, value in moves:
        if who in there:
            there.pop(who).end()
        elif names:
            there[who] = ConfigOverride(dict.fromkeys(names, value), place)
        for name, default in zip(NAMES, (None, "before"), strict=True):
            said = [s.values[name] for s in there.values() if name in s.values]
            assert place.get(name) == [default, *said][-1]
    for one in there.values():
        one.end()
    assert place == {"b.c": "before"}
    beside.end()
    assert other == {}


def test_schedulers_that_end_in_the_order_in_which_they_began():
    x = da.arange(8, chunks=4).sum()
    first, second = gpuscheduler.Scheduler("cpu:1"), gpuscheduler.Scheduler("cpu:1")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert config.get("scheduler") == second.get
    assert int(x.compute()) == 28
    second.__exit__(None, None, None)
    assert config.get("scheduler", None) is None


@pytest.fixture(params=[False, True], ids=["threads", "processes"])
def cluster(request):
    with LocalCluster(processes=request.param, **LOCAL) as cluster:
        yield cluster


def test_a_client_that_is_closed_before_what_is_attached_to_it(cluster):
    client = Client(cluster)
    attached = gpuscheduler.attach(client, devices="cpu:1")
    client.close()
    attached.close()
    assert config.get("scheduler", None) is None
    assert int(da.arange(8, chunks=4).sum().compute()) == 28


def test_workers_that_leave_and_come_while_they_are_attached():
    """In this process they set the configuration, too."""
    with LocalCluster(processes=False, **LOCAL) as cluster, Client(cluster) as client:
        attached = gpuscheduler.attach(client, devices="cpu:1")
        cluster.scale(0)
        until(lambda: not client.scheduler_info()["workers"])
        cluster.scale(1)
        client.wait_for_workers(1)
        assert int(da.arange(8, chunks=4).sum().compute()) == 28
        attached.close()
        assert config.get("scheduler") == "dask.distributed"
        assert int(da.arange(8, chunks=4).sum().compute()) == 28
    assert config.get("scheduler", None) is None


@pytest.mark.parametrize("what", ["attached", "scheduler"])
def test_a_client_that_puts_back_what_has_ended(cluster, what):
    """Then what there was before computes, and the configuration says so again."""
    x = da.arange(8, chunks=4).sum()
    with Client(cluster) as first:
        ours = (
            gpuscheduler.attach(first, devices="cpu:1")
            if what == "attached"
            else gpuscheduler.Scheduler("cpu:1").__enter__()
        )
        get = config.get("scheduler")
        second = Client(cluster)
        ours.__exit__(None, None, None)
    second.close()
    assert config.get("scheduler", None) == get
    assert int(x.compute()) == 28
    assert config.get("scheduler", None) is None
    config.set(scheduler=get)
    assert int(dask.persist(x)[0].compute()) == 28
    assert config.get("scheduler", None) is None


def test_a_scheduler_that_is_closed_and_asked_for_says_so():
    x = da.arange(8, chunks=4).sum()
    with gpuscheduler.Scheduler("cpu:1") as s:
        s.close()
        with pytest.raises(RuntimeError, match="make a new Scheduler"):
            x.compute()
    with pytest.raises(RuntimeError, match="make a new Scheduler"):
        x.compute(scheduler=s.get)
