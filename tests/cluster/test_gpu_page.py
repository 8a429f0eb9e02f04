"""The page of every device of a cluster."""

from __future__ import annotations

import sys
import time
import urllib.request
from types import SimpleNamespace

import dask.array as da
import pytest
from distributed import Client

import gpuscheduler
from gpuscheduler.cluster import gpu_page
from gpuscheduler.cluster.gpu_page import METRIC, PATH, page_html, worker_metric

PATIENCE = 60


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def client():
    with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
        yield client


def metrics(client):
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return [w["metrics"].get(METRIC) for w in workers.values()]


def test_the_devices_of_all_workers_are_on_the_dashboard(client):
    pytest.importorskip("bokeh")
    with gpuscheduler.attach(client, devices="cpu:2", memory_limit="1 GiB") as attached:
        assert int(da.arange(100, chunks=10).sum().compute()) == 4950
        found = until(lambda: all(m := metrics(client)) and sum(x["ended"] for x in m) and m)
        for worker in found:
            assert [d["device"] for d in worker["devices"]] == [0, 1]
            assert all(d["limit"] == 2 * 2**30 for d in worker["devices"])
        assert attached.dashboard_link.endswith(PATH)
        with urllib.request.urlopen(attached.dashboard_link, timeout=30) as answer:
            assert "every device" in answer.read().decode()
        workers = client.cluster.scheduler.workers
        text = page_html(workers)
        assert text.count("<b>device ") == 4
        assert text.count("stages have ended") == 2
    until(lambda: not any(METRIC in w.metrics for w in client.cluster.workers.values()))
    with gpuscheduler.attach(client, devices="cpu:1"):  # the page is there once
        apps = client.cluster.scheduler.http_application.applications
        assert sum(PATH in getattr(app, "app_paths", ()) for app in apps) == 1


def test_a_name_of_a_worker_is_escaped():
    with gpuscheduler.Scheduler("cpu:1") as s:
        sent = worker_metric(s)
    worker = SimpleNamespace(name="<b>", metrics={METRIC: sent})
    text = page_html({"tcp://<i>": worker, "tcp://2": SimpleNamespace(name="2", metrics={})})
    assert "worker &lt;b&gt; at tcp://&lt;i&gt;" in text
    assert "idle now" in text
    sent["devices"][0]["busy"] = 1.0
    assert "runs a step now" in page_html({"tcp://1": worker})
    assert "no worker" in page_html({})


def test_a_closed_scheduler_sends_nothing():
    s = gpuscheduler.Scheduler("cpu:1")
    s.close()
    assert worker_metric(s) == {}


def test_without_a_dashboard_a_cluster_works_as_well(monkeypatch):
    assert not gpu_page.add_page(SimpleNamespace())
    monkeypatch.setitem(sys.modules, "distributed.dashboard.core", None)  # no Bokeh
    scheduler = SimpleNamespace(http_application=SimpleNamespace(applications=[]), http_server=1)
    assert not gpu_page.add_page(scheduler)
