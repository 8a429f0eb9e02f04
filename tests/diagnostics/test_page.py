"""The live page: what starts it, what it shows, and what happens when something is missing."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.diagnostics import serve
from gpuscheduler.diagnostics.headline import headlines
from gpuscheduler.diagnostics.metrics import Collector
from gpuscheduler.diagnostics.serve import PORT, listen
from gpuscheduler.diagnostics.snapshot import SchedulerFacts, SnapshotTaker
from gpuscheduler.diagnostics.snapshot_file import find_snapshots
from tests.support.browser import CHROMIUM, take_screenshot

pytest.importorskip("bokeh")

from gpuscheduler.diagnostics import page

PATIENCE = 90
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return None


def taken_snapshot(**changes):
    """A snapshot of a small run, with changes to its first device."""
    with Scheduler("cpu:2", memory_limit="1 GiB", observe="steps") as s:
        taker = SnapshotTaker(SchedulerFacts.from_scheduler(s), "wave.py")
        (da.ones(10_000, chunks=1000) + 1).sum().compute()
        found = json.loads(taker.encode())
    found["devices"][0] |= changes
    return found


# ---- what it says in a few words


def test_headlines_name_the_layer_the_waiting_device_and_the_memory():
    found = taken_snapshot()
    for device, busy in zip(found["devices"], (0.9, 0.1), strict=True):
        device |= {"busy": busy, "limit": 100 * 2**20, "values": 95 * 2**20, "peak": 0}
    found["layers"] = [
        {"label": "normalise", "line": "wave.py:20", "seconds": 3.0, "steps": 9, "left": 0},
        {"label": "exp", "line": "", "seconds": 1.0, "steps": 9, "left": 0},
    ]
    said = {h.what: (h.text, h.is_bad) for h in headlines(found)}
    assert said["layer"] == ("normalise (wave.py:20) takes 75%", False)
    assert said["devices"] == ("device 1 waits; the busiest runs steps 90% of the time", True)
    assert said["memory"] == ("memory is short: 95.00 MiB of 100.00 MiB at most", True)
    assert said["runs"][0].startswith("idle; run ")
    found["devices"][1]["busy"] = 0.8
    found["devices"] = [d | {"values": 2**20} for d in found["devices"]]
    said = {h.what: (h.text, h.is_bad) for h in headlines(found)}
    assert said["devices"] == ("devices run steps 85% of the time", False)
    assert said["memory"] == ("memory is not short: 1.00 MiB of 100.00 MiB at most", False)
    found["memories"]["-1"]["used"] = 2**20
    assert headlines(found)[3].text.endswith("; 1.00 MiB spilled")
    run = {"number": 7, "how": "steps", "steps": 9, "left": 4, "waits": False}
    found["runs"], found["more_runs"] = [run, run | {"waits": True}, run | {"steps": 0}, run], 2
    assert headlines(found)[0].text == (
        "run 7: 4 of 9 steps left, run 7 waits for memory, run 7 is being planned and 3 more runs"
    )


def test_what_users_name_is_escaped():
    found = taken_snapshot(name="<script>")
    found["program"] = "<img>"
    found["layers"][0]["label"] = "<b>"
    tab = page.SchedulerTab(found)
    assert "<script>" not in tab.cards.text
    assert "&lt;script&gt;" in tab.cards.text
    assert "<img>" not in tab.head.text


def test_a_tab_draws_each_snapshot():
    found = taken_snapshot(sensors={"power": 612.0, "temperature": 58, "throttled": ["heat"]})
    tab = page.SchedulerTab(found)
    assert "612 W" in tab.cards.text
    assert "throttled: heat" in tab.cards.text
    bars = sum(map(len, found["lanes"]["bars"].values()))
    assert len(tab.lane_source.data["left"]) == bars > 0
    assert all(-30 <= left <= 0 for left in tab.lane_source.data["left"])
    assert list(tab.layer_source.data["seconds"]) == [f["seconds"] for f in found["layers"]]
    found["layers"] *= 3  # of one name: a factor of Bokeh's may come only once
    tab.update(found, "the process has ended")
    assert "the process has ended" in tab.head.text
    assert len(set(tab.layers.y_range.factors)) == len(tab.layers.y_range.factors)


def test_a_line_is_broken_where_nothing_was_read():
    points = page.with_gaps([-20.0, -19.5, -1.0, -0.5], [1, 2, 3, 4])
    assert points["time"] == [-20.0, -19.5, -1.0, -1.0, -0.5]
    assert np.isnan(points["bytes"][2])


# ---- starting it


def test_a_taken_port_is_an_error_and_no_scheduler_is_made():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        threads = threading.active_count()
        with pytest.raises(OSError, match=rf"port {port} of localhost cannot be used"):
            Scheduler("cpu:2", dashboard=f":{port}")
        until(lambda: threading.active_count() == threads)
    assert find_snapshots() == {}


def test_any_free_port_will_do(caplog, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        monkeypatch.setattr(serve, "PORT", taken.getsockname()[1])
        with caplog.at_level(logging.INFO, "gpuscheduler.dashboard"):
            sockets = listen("localhost", None)
        assert sockets[0].getsockname()[1] != serve.PORT
    for s in sockets:
        s.close()
    (record,) = caplog.records
    assert "hosting the dashboard on port" in record.getMessage()
    assert PORT == 8788


def test_a_page_has_its_port_from_the_first_moment(served):
    """Another process that starts at the same time cannot take the port from the child."""
    port = served.dashboard._server.port
    with pytest.raises(OSError, match=f"port {port} of localhost cannot be used"):
        listen("localhost", port)


def test_schedulers_that_start_at_the_same_time_have_a_page_each():
    code = (
        "import sys, gpuscheduler\n"
        "with gpuscheduler.Scheduler('cpu:1', dashboard=True) as s:\n"
        "    print(s.dashboard.url, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT,
        )
        for _ in range(3)
    ]  # fmt: skip
    try:
        urls = [p.stdout.readline().strip() for p in processes]
        assert len(set(urls)) == 3
        for url in urls:
            assert "bokeh" in until(lambda url=url: fetch(url))
    finally:
        for p in processes:
            p.communicate(timeout=60)


def test_without_bokeh_the_scheduler_is_not_made(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install bokeh"):
        Scheduler("cpu:2", dashboard=True)
    assert find_snapshots() == {}
    with Scheduler("cpu:2", dashboard="top"):
        assert find_snapshots()


def test_an_open_address_gives_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(
        serve.subprocess, "Popen", lambda *a, **k: SimpleNamespace(
            wait=lambda *_: 0, stdin=None, poll=lambda: None
        ),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "gpuscheduler.dashboard"):
        sockets = listen("0.0.0.0", 0)
        server = serve.PageServer("0.0.0.0", sockets)
        server._waiter.join()
    for s in sockets:
        s.close()
    assert "can be read by whoever reaches it" in caplog.text
    assert re.fullmatch(r"http://localhost:\d+/[\w\-]{16}/", server.url)


def test_the_link_follows_dasks_template(monkeypatch):
    from dask import config

    server = SimpleNamespace(host="localhost", port=8788, path="/secret", url="http://x/secret/")
    dashboard = serve.Dashboard(SimpleNamespace(number=1), server)
    with config.set({"distributed.dashboard.link": "/proxy/{port}/status"}):
        assert dashboard.link == "/proxy/8788/secret/"
        assert "src='/proxy/8788/secret/'" in dashboard._repr_html_()
    with config.set({"distributed.dashboard.link": "{NO_SUCH_VARIABLE}/{port}"}):
        assert dashboard.link == server.url


@pytest.fixture
def served():
    with Scheduler("cpu:2", memory_limit="1 GiB", dashboard=True) as s:
        until(lambda: fetch(s.dashboard.url))
        yield s


def test_the_page_and_the_metrics_are_served(served):
    url = served.dashboard.url
    assert "bokeh" in fetch(url)
    assert fetch(url.replace(url.split("/")[3], "guess")) is None  # of whoever guesses the path
    (da.ones(1000, chunks=100) + 1).sum().compute()
    text = until(lambda: (t := fetch(f"{url}metrics")) and "gpuscheduler_runs_total{" in t and t)
    assert re.search(
        r'gpuscheduler_memory_bytes{place="device 1",scheduler="\d+-\d+",what="limit"}', text
    )
    with Scheduler("cpu:2", dashboard=True) as other:  # which shares the page
        assert other.dashboard.url == url
    assert served.dashboard._server.is_running
    process = served.dashboard._server.process
    served.close()
    assert process.wait(PATIENCE) is not None


def test_a_child_that_is_killed_is_a_line_of_the_log(served, caplog):
    with caplog.at_level(logging.WARNING, "gpuscheduler.dashboard"):
        os.kill(served.dashboard._server.process.pid, signal.SIGKILL)
        until(lambda: caplog.records)
        assert int(da.arange(10, chunks=5).sum().compute()) == 45
    (record,) = caplog.records
    assert "not started again" in record.getMessage()


def test_the_process_that_computes_imports_no_bokeh():
    code = (
        "import sys, gpuscheduler; s = gpuscheduler.Scheduler('cpu:2', dashboard=True); "
        "print(s.dashboard.url); s.close(); "
        "print({'bokeh', 'prometheus_client', 'nvtx', 'pynvml'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "set()"


# ---- metrics


def test_a_collector_reads_a_scheduler_when_it_is_scraped():
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    with Scheduler("cpu:2", memory_limit="1 GiB") as s:
        registry.register(Collector(s))
        name = f"{os.getpid()}-{s.number}"
        ok = {"how": "steps", "result": "ok", "scheduler": name}
        assert registry.get_sample_value("gpuscheduler_runs_total", ok) is None
        (da.ones(1000, chunks=100) + 1).sum().compute()
        with pytest.raises(ZeroDivisionError):
            da.ones(4, chunks=2).map_blocks(lambda b: 1 // 0, dtype=float).compute()
        assert registry.get_sample_value("gpuscheduler_runs_total", ok) == 1
        failed = ok | {"result": "error"}
        assert registry.get_sample_value("gpuscheduler_runs_total", failed) == 1
        steps = registry.get_sample_value("gpuscheduler_steps_total", {"scheduler": name})
        assert steps == sum(r.steps for r in s.recorder.runs)
        kept = da.ones(2**17, chunks=2**14).persist()
        place = {"place": "device 0", "scheduler": name, "what": "persisted"}
        assert registry.get_sample_value("gpuscheduler_memory_bytes", place) == 2**20
        del kept


def test_metrics_without_their_package_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="pip install prometheus-client"):
        Collector(list)


# ---- in a browser


#: Seconds after which a page is looked at, until all is there: a busy machine draws late.
LOOKS = 8.0, 20.0, 40.0


def screenshot(url, path, seconds):
    """A picture of a page, as an array, and what the browser's console said."""
    lines = take_screenshot(url, path, (1400, 900), seconds)
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB")).astype(int), lines


def has_color(picture, color, least=30):
    """Whether so many points of a picture have a colour, about."""
    want = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(picture - want).max(axis=2) < 12).sum()) >= least


def first_task(block):
    return np.sort(block, axis=0)


def second_task(block):
    return np.cumsum(block, axis=1)


def missing_parts(picture):
    """What a picture of the page of two devices whose memory is half full does not show."""
    colors, out = page.COLOURS[:2], []
    if not any(has_color(picture[240:420], color) for color in colors):
        out.append("lanes")
    if not any(has_color(picture[420:720, 700:], color, 300) for color in colors):
        out.append("layers")
    # the line of memory: at about half of the dashed line of the limit, which is at 1 / 1.08
    box = picture[420:680, 60:690]
    blue = np.array(list(bytes.fromhex(colors[0][1:])))
    if len(np.flatnonzero((np.abs(box - blue).max(axis=2) < 40).sum(axis=1) > 8)) < 2:
        out.append("memory")
    return out


@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
def test_a_browser_shows_layers_lanes_and_memory(served, tmp_path):
    over = threading.Event()

    def compute():
        x = da.random.default_rng(0).random((2000, 2000), chunks=500)
        while not over.is_set():
            x.map_blocks(first_task).map_blocks(second_task).sum().compute()

    kept = da.ones(2**27, chunks=2**24).persist()  # the half of all memory
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for seconds in LOOKS:
            picture, console = screenshot(served.dashboard.url, tmp_path / "page.png", seconds)
            assert not [line for line in console if "error" in line.lower()]
            if not (missing := missing_parts(picture)):
                break
    finally:
        over.set()
        thread.join()
    del kept
    if keep := os.environ.get("GPUSCHEDULER_SCREENSHOTS"):
        shutil.copy(tmp_path / "page.png", keep)
    assert not missing


def picture_of_a_killed_process(path, seconds):
    """A picture of the page of a process that is killed when the half of some seconds is over."""
    code = (
        "import gpuscheduler, dask.array as da, time\n"
        "s = gpuscheduler.Scheduler('cpu:2', dashboard=True)\n"
        "print(s.dashboard.url, flush=True)\n"
        "while True: (da.ones(1000, chunks=100) + 1).sum().compute(scheduler=s)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        url = process.stdout.readline().strip()
        until(lambda: fetch(url))
        until(lambda: "gpuscheduler_runs_total{" in (fetch(f"{url}metrics") or ""))
        killer = threading.Timer(seconds / 2, process.kill)
        killer.start()
        picture, _ = screenshot(url, path, seconds)
        killer.join()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return picture


@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
def test_the_page_of_a_process_that_was_killed_shows_its_end(tmp_path):
    pictures = (picture_of_a_killed_process(tmp_path / "page.png", s) for s in LOOKS)
    assert any(has_color(picture[:120], page.BAD, 50) for picture in pictures)  # the banner
