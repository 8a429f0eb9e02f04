"""The report: one file that answers what takes the time, who waits, and whether memory is short."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import Scheduler
from gpuscheduler.diagnostics.colours import COLOURS, colour_map
from gpuscheduler.diagnostics.recording import Recording
from gpuscheduler.diagnostics.report import Recorded, RunFacts, busy_part, report_html
from gpuscheduler.diagnostics.svg import (
    BINS,
    MOST_POINTS,
    Lane,
    Spans,
    bin_spans,
    draw_lanes,
    draw_steps,
    round_ticks,
    thin_out,
)
from gpuscheduler.diagnostics.trace_json import Trace
from gpuscheduler.plan.machine import HOST, Machine
from gpuscheduler.runtime.events import Done, Issued, Launch
from gpuscheduler.runtime.observe import CopyRow, Level, MemorySample, Recorder, Row, Turn
from tests.diagnostics.test_explain import parsed
from tests.runtime.test_observe import alone, calls_of
from tests.support.browser import CHROMIUM, browse, take_screenshot
from tests.support.strategies import plan_of, thorough


def untraceable(b):
    return b - np.percentile(b, 75)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "run.html"
    with Scheduler("cpu:2", fuse_least=0), gpuscheduler.report(path, timeline=True) as recording:
        x = da.random.default_rng(0).random((600, 600), chunks=100)
        (da.exp(x.map_blocks(untraceable)) + 1).sum().compute()
        (x + x.T).mean(axis=0).compute()
    return path, path.read_text(encoding="utf-8"), recording


# ---- the file


def test_it_answers_three_questions_at_the_top(written):
    _, text, _ = written
    top = text.split("<h2>")[0]
    for question in ("Which layer takes the time?", "Which device waits?", "Is memory short?"):
        assert question in top


def test_it_has_lanes_memory_layers_source_and_versions(written):
    _, text, recording = written
    page = "".join(parsed(text).text)
    for words in (
        "Devices over time", "Memory over time", "Layers", "Source", "Versions and options",
        "device 0", "device 1", "untraceable", "exp · add · sum", "NumPy", "limit",
        "gpuscheduler.report(path, timeline=True)", "gpuscheduler: 2 runs",
    ):  # fmt: skip
        assert words in page
    assert len(recording.runs()) == 2


def test_it_loads_nothing_and_runs_nothing(written):
    _, text, _ = written
    tags = {tag for tag, _ in parsed(text).seen}
    assert not tags & {"script", "link", "iframe", "img", "object", "embed"}
    assert not re.search(r"(?:src|href|url)\s*[=(]", text)
    assert not re.search(r"\son\w+=", text)


def test_it_is_small(written):
    assert os.path.getsize(written[0]) < 300_000


def test_the_timeline_is_beside_it(written):
    path = written[0].with_name("run.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        assert json.load(file)["traceEvents"]


def test_it_is_written_where_the_block_raises(tmp_path):
    path = tmp_path / "run.html"

    def block():
        with gpuscheduler.report(path, code=False):
            da.ones(4, chunks=2).sum().compute()
            raise ZeroDivisionError

    with Scheduler("cpu:1"), pytest.raises(ZeroDivisionError):
        block()
    text = path.read_text(encoding="utf-8")
    assert "ended by an error" in text.split("<h2>")[0]
    assert "ZeroDivisionError" in text
    assert "<h2>Source</h2>" not in text


def test_a_task_that_fails_is_named(tmp_path):
    def fail(b):
        raise ValueError("<no>")

    path = tmp_path / "run.html"
    with Scheduler("cpu:1"), pytest.raises(ValueError, match="no"), gpuscheduler.report(path):
        da.ones(4, chunks=2).map_blocks(fail, dtype=float).compute()
    assert "ValueError: &lt;no&gt;" in path.read_text(encoding="utf-8")


def test_a_report_that_cannot_be_written_is_a_warning_and_hides_no_error(tmp_path):
    path = tmp_path / "missing" / "run.html"
    warned = pytest.warns(UserWarning, match=r"missing.*was not written")
    with Scheduler("cpu:1"), warned, gpuscheduler.report(path):
        da.ones(4, chunks=2).sum().compute()
    warned = pytest.warns(UserWarning, match="not written")
    with Scheduler("cpu:1"), warned, pytest.raises(KeyError), gpuscheduler.report(path):
        raise KeyError


def test_a_block_in_which_nothing_ran_has_a_report(tmp_path):
    path = tmp_path / "run.html"
    with Scheduler("cpu:1"), gpuscheduler.report(path):
        pass
    assert "gpuscheduler: 0 runs" in path.read_text(encoding="utf-8")


def test_a_url_goes_through_fsspec():
    fsspec = pytest.importorskip("fsspec")
    with Scheduler("cpu:1"), gpuscheduler.report("memory://folder/run.html"):
        da.ones(4, chunks=2).sum().compute()
    with fsspec.open("memory://folder/run.html", "rt") as file:
        assert "Devices over time" in file.read()


def long_recording(steps, runs):
    """A recording of runs of many steps, without running them."""
    clock = itertools.count(1, 1000)
    recorder = Recorder(clock.__next__, base=Level.STEPS, most=10**7)
    recording = Recording(recorder, Level.STEPS, lambda: {0: 100, 1: 100}, lambda: True)
    plan = plan_of(*[(chr(0x4E00 + i), "", i % 2) for i in range(steps)], memory=(10**6, 10**6))
    with recording:
        for _ in range(runs):
            record = recorder.begin()
            record.enter(plan, "steps")
            record.memories = (0, 1)
            for i in range(steps):
                done = [Issued(i, 8), Done(i)]
                record.turns.append(Turn(clock.__next__(), [Launch(i, i % 2)], done, (i, 0)))
            recorder.end(record)
    return recording


def test_a_full_report_is_small():
    """Eight devices, each of which runs something else in each bin, with memories that change."""
    n, devices = 20_000, range(8)
    rows = [
        Row(1, i, ("x", i), f"layer {i % 70}", "wave.py:1", i % 8, i, i, i + 1 + i % 5, 8, "device")
        for i in range(n)
    ]
    memory = [MemorySample(1, i, {p: i * (p + 1) % 97 for p in devices}) for i in range(n)]
    copies = [CopyRow(1, i, "layer 1", i % 8, HOST, i, i + 2, 8, "device") for i in range(0, n, 40)]
    machine = Machine.uniform(8, memory=100)
    run = RunFacts(1, "steps", "new", 0, 0, 0, n, n, "", 0)
    found = Recorded(Trace(rows, copies, memory), machine, (run,), None, None)
    text = report_html({"here": found})
    assert len(text) < 300_000
    parsed(text)


@alone
def test_a_row_costs_a_few_calls():
    """A recording of a million rows is reported in seconds: counted, not timed."""
    calls = []
    for steps in (1000, 3000):
        recording = long_recording(steps, 1)
        calls.append(calls_of(lambda r=recording: report_html(r.take_recorded())))
    assert (calls[1] - calls[0]) / 2000 < 90


def test_its_size_does_not_grow_with_the_steps():
    sizes = [len(report_html(long_recording(2000, runs).take_recorded())) for runs in (1, 10)]
    assert sizes[1] < 300_000
    assert sizes[1] < 3 * sizes[0] + 50_000


@thorough
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12))
def test_time_in_which_several_steps_run_counts_once(pieces):
    begin, end = (
        np.array(x, np.int64) for x in ([a for a, _ in pieces], [a + n for a, n in pieces])
    )
    busy = {ns for a, n in pieces for ns in range(a, a + n)}
    assert busy_part(begin, end, 0, 100) == len(busy) / 100


# ---- SVG


SPANS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 200), st.sampled_from("abc")), max_size=40
)


@thorough
@given(SPANS)
def test_bins_lie_in_the_lane_in_order_and_name_what_ran(spans):
    made = Spans.read((a, a + n, name) for a, n, name in spans)
    out = bin_spans(made, 0, 1200)
    assert all(0 <= a < b <= BINS and 0 < part <= 1 for a, b, _, part in out)
    assert all(x[1] <= y[0] for x, y in itertools.pairwise(out))
    assert {name for _, _, name, _ in out} <= {name for _, _, name in spans}
    assert bool(out) == bool(spans)
    for first, behind, name, part in out:  # beside a slow count
        assert (name, part) == busiest(spans, first, 1200 / BINS)
        assert (name, part) == busiest(spans, behind - 1, 1200 / BINS)


def busiest(spans, k, width):
    """The name that was busy longest in a bin, and about which part of it all were."""
    busy = {}
    for a, n, name in spans:
        low = min(BINS - 1, int(a / width))
        took = min(a + n, (k + 1) * width) - max(a, k * width)
        if low == k:
            took = max(took, 1e-3 * width)
        busy[name] = busy.get(name, 0.0) + max(took, 0.0)
    part = sum(busy.values()) / width
    first = next(name for _, _, name in spans if busy[name] >= max(busy.values()) - 1e-9)
    return first, 1.0 if part > 0.9 else 0.6 if part > 0.5 else 0.3


@thorough
@given(SPANS)
def test_pictures_are_well_formed_and_bounded(spans):
    lanes = [Lane("<device> & 0", Spans.read((a, a + n, name) for a, n, name in spans))]
    text = draw_lanes(lanes, 0, 1200, colour_map("abc"))
    points = [a for a, _, _ in sorted(spans)], [n for _, n, _ in sorted(spans)]
    text += draw_steps({"values": points}, 0, 1200, 300, {}, str, 250)
    parsed(text)
    assert len(text) < 400_000
    assert "nan" not in text


@thorough
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5000))
def test_thinning_keeps_the_largest_and_the_last(values):
    times, kept = thin_out(range(len(values)), values)
    assert len(times) <= MOST_POINTS + 1
    assert max(kept) == max(values)
    assert times[-1] == len(values) - 1
    assert times.tolist() == sorted(times)
    assert [values[n] for n in times] == kept.tolist()


@thorough
@given(st.floats(1e-9, 1e15))
def test_ticks_are_few_and_within(span):
    found = round_ticks(span)
    assert 1 <= len(found) <= 12
    assert all(0 <= t <= span * (1 + 1e-9) for t in found)


def test_colours_end_in_grey():
    found = colour_map([str(n) for n in range(20)])
    assert len(set(found.values())) == len(COLOURS) + 1


# ---- in a browser


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian package chromium)")
def test_a_browser_shows_it(written, tmp_path):
    path, _, _ = written
    out = browse(path.as_uri(), "--dump-dom")
    assert "CONSOLE" not in out.stderr
    for words in ("device 0", "device 1", "untraceable", "Which layer takes the time?"):
        assert words in out.stdout


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian package chromium)")
def test_its_lanes_have_the_colours_of_two_layers(written, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path, text, _ = written
    picture = tmp_path / "run.png"
    take_screenshot(path.as_uri(), picture, (1400, 900))
    pixels = (image.imread(picture)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    seen = {tuple(p) for p in np.unique(pixels, axis=0)}
    used = re.findall(r'<i style="background:#(\w{6})"', text)[:2]
    for colour in used:
        assert tuple(bytes.fromhex(colour)) in seen
