"""One page for a computation, and the advice on it."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.diagnostics import advice
from gpuscheduler.diagnostics.advice import Advice, Facts, LayerFacts, give_advice
from gpuscheduler.diagnostics.explain import (
    MOST_ROWS,
    ExplainedLayer,
    Explanation,
    MemoryUse,
    explain_plan,
    explain_table,
    peak_steps,
)
from gpuscheduler.plan.machine import HOST, Machine
from gpuscheduler.plan.plan import Footprint
from gpuscheduler.plan.step_table import step_table
from tests.runtime.test_observe import alone, calls_of
from tests.support.strategies import plan_of

PLENTY = (10**9, 10**9)


def untraceable(b):
    return b - np.percentile(b, 75)


@pytest.fixture(scope="module")
def scheduler():
    with Scheduler("cpu:2", fuse_least=0) as s:
        yield s


@pytest.fixture(scope="module")
def array():
    x = da.from_array(np.ones((400, 400)), chunks=100)
    return (da.exp(x.map_blocks(untraceable)) + 1).sum()


# ---- what the page says


def test_it_names_layers_lines_kernels_and_reasons(scheduler, array):
    page = scheduler.explain(array)
    rows = {r.label.removeprefix("array · "): r for r in page.rows}
    assert page.steps == sum(r.times for r in page.rows)
    assert rows["exp · add · sum"].how == "kernel"
    assert rows["untraceable"].how == "as written"
    assert "percentile" in rows["untraceable"].reason or "quantile" in rows["untraceable"].reason
    assert rows["untraceable"].code.startswith("tests/diagnostics/test_explain.py:")
    assert all("test_explain.py" in r.line for r in page.rows)
    assert rows["exp · add · sum"].reads == 400 * 400 * 8
    assert rows["untraceable"].makes == 400 * 400 * 8
    assert page.measured is None
    text = str(page)
    for word in ("Predicted", "not fused: ", "untraceable: ", "links:", "spilled:   nothing"):
        assert word in text
    assert all(len(line) < 240 for line in text.splitlines())


def test_it_computes_nothing(scheduler):
    def never(b):
        raise AssertionError

    x = da.ones((40, 40), chunks=20).map_blocks(never, dtype=float)
    runs = len(scheduler.recorder.runs)
    assert scheduler.explain(x).steps >= 4
    assert len(scheduler.recorder.runs) == runs


def test_after_a_run_it_has_measured_times_beside_predicted_ones(scheduler, array):
    with scheduler.record("steps") as recording:
        array.compute(scheduler=scheduler)
    page = recording.explain()
    assert page.measured is not None
    assert page.clock == "thread"
    assert all(r.measured is not None for r in page.rows)
    busy = sum(r.measured for r in page.rows)
    assert busy <= 2 * page.measured * 1.05
    assert "measured" in str(page)
    assert "run " in str(page)


def test_measure_runs_once(scheduler, array):
    runs = len(scheduler.recorder.runs)
    page = scheduler.explain(array, measure=True)
    assert len(scheduler.recorder.runs) == runs + 1
    assert page.measured is not None


def test_nothing_recorded_is_nothing_to_explain(scheduler):
    with scheduler.record("steps") as recording:
        pass
    with pytest.raises(RuntimeError, match="nothing to explain"):
        recording.explain()


def test_links_and_the_step_at_the_peak():
    """b is read on the other device; most is alive while d runs."""
    plan = plan_of(
        ("a", "", 0, 100), ("b", "a", 0, 300), ("c", "b", 1, 50), ("d", "c", 1, 700),
        memory=PLENTY,
    )  # fmt: skip
    page = explain_plan(plan, None, is_gpu=True)
    assert page.links == {(0, 1): 300}
    peaks = peak_steps(step_table(plan), plan.machine)
    assert peaks == {0: (1, 400), 1: (3, 750)}
    assert "device 0 → device 1: 300 B" in str(page)


def test_the_limit_is_the_larger_of_bandwidth_and_arithmetic():
    plan = plan_of(("a", "", 0), memory=PLENTY)
    table = step_table(plan)
    machine = Machine.uniform(2, bandwidth=1e9, flops=1e12)
    work = table.work[0]
    from gpuscheduler.diagnostics.explain import _describe_bound

    assert _describe_bound(machine, 1.0, 5e8, 1e9) == "memory 50%"
    assert _describe_bound(machine, 1.0, 1e6, 9e11) == "arithmetic 90%"
    assert _describe_bound(machine, None, 1e6, 1e9) == ""
    assert work.kernels == 0


def test_long_pages_end_with_how_many_more_there_are(scheduler):
    x = da.ones((8, 8), chunks=8)
    many = [x.map_blocks(named(n)) for n in range(MOST_ROWS + 9)]
    page = scheduler.explain(*many)
    assert len(page.rows) > MOST_ROWS
    assert f"and {len(page.rows) - MOST_ROWS} more" in str(page)


def named(n):
    def function(b):
        return b + n

    function.__qualname__ = function.__name__ = f"function_{n}"
    return function


def test_it_can_be_read_by_tools(scheduler, array):
    page = scheduler.explain(array)
    assert json.loads(json.dumps(page.to_dict()))["steps"] == page.steps


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.stack, self.seen, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html):
    out = Tags()
    out.feed(html)
    assert not out.stack
    return out


def test_html_is_well_formed_and_escapes_names(scheduler):
    def strange(b):
        return b + 1

    strange.__qualname__ = "<script>alert(1)</script>"
    x = da.ones((400, 400), chunks=200).map_blocks(strange)
    html = scheduler.explain(x.sum())._repr_html_()
    page = parsed(html)
    assert "script" not in {tag for tag, _ in page.seen}
    assert "alert(1)" in "".join(page.text)


def test_a_large_plan_is_explained_in_few_bytes():
    steps = [(chr(0x4E00 + i), "", i % 2) for i in range(20_000)]
    plan = plan_of(*steps, memory=PLENTY, kinds=["a" if i % 3 else "b" for i in range(20_000)])
    page = explain_plan(plan, None, is_gpu=False)
    assert len(page._repr_html_()) < 60_000
    assert page.steps == 20_000
    assert plan._repr_html_() == page._repr_html_()
    assert len(repr(plan)) < 100


def test_a_page_of_long_names_is_explained_in_few_bytes():
    """Names, lines and reasons of any length, with characters that HTML escapes."""
    long, line = "a<b&c" * 5000, ", ".join(["wave<1>.py:1234"] * 5)
    row = ExplainedLayer(long[:40], line, long, "as written", long, 1, 2, 3, 0.1, 0.2, "memory 9%")
    memory = (MemoryUse(0, "device 0", 1, 2, "at"),)
    page = Explanation(
        1, 1, "", (row,) * 1000, memory, {}, {}, (Advice("memory", long, "memory", 1.0),) * 5,
        why={long: [long] * 9},
    )  # fmt: skip
    assert len(page._repr_html_()) < 60_000


@alone
def test_a_step_costs_a_few_calls_to_explain():
    """A plan of 100,000 steps is explained in half a second: counted, not timed."""
    found = []
    for n in (1000, 3000):
        steps = [(chr(0x4E00 + i), "", i % 2) for i in range(n)]
        plan = plan_of(*steps, memory=PLENTY, kinds=["a"] * n)
        found.append(calls_of(lambda p=plan: explain_plan(p, None, is_gpu=False)._repr_html_()))
    assert (found[1] - found[0]) / 2000 < 30


# ---- advice: each rule speaks, and is silent


LAYER = LayerFacts("normalise", "wave.py:20", 16, 1.0, True, "")
FINE = Facts(
    devices=2, is_gpu=True, layers=[LAYER], busy=[0.5, 0.5], chunk_bytes=[2**26] * 16,
    step_seconds=[1e-2] * 16, seconds=1.0, predicted=0.9, measured=1.0, touched=2**30,
)  # fmt: skip
SPEAKS = {
    "small chunks": replace(FINE, chunk_bytes=[2**19] * 2000, step_seconds=[1e-5] * 2000),
    "few blocks": replace(FINE, layers=[replace(LAYER, times=3)]),
    "traffic": replace(FINE, link_bytes=2**29, moving_layer="transpose"),
    "memory": replace(FINE, spilled=2**20, fullest_at='"sum" (wave.py:3)'),
    "broken chain": replace(
        FINE, layers=[LAYER, replace(LAYER, is_kernel=False, reason="it calls sort")]
    ),
    "host fallback": replace(FINE, layers=[replace(LAYER, on_host=True, reads=2**20)]),
    "sent again": replace(FINE, sent=2**30, sent_runs=2, sent_seconds=0.5),
    "planned anew": replace(FINE, planning=0.5, once=True),
    "imbalance": replace(FINE, busy=[1.0, 0.1]),
    "prediction": replace(FINE, predicted=0.1),
}
SILENT = {
    "small chunks": replace(FINE, chunk_bytes=[2**19] * 900, step_seconds=[1e-5] * 900),
    "few blocks": replace(FINE, devices=1, layers=[replace(LAYER, times=1)]),
    "traffic": replace(FINE, link_bytes=2**27),
    "memory": replace(FINE, fullest=0.89),
    "broken chain": replace(
        FINE, layers=[LAYER, replace(LAYER, seconds=0.1, is_kernel=False, reason="it calls sort")]
    ),
    "host fallback": FINE,
    "sent again": replace(FINE, sent=2**30, sent_runs=1, sent_seconds=0.5),
    "planned anew": replace(FINE, planning=0.5),
    "imbalance": replace(FINE, busy=[0.6, 0.5]),
    "prediction": replace(FINE, predicted=0.5),
}


def test_a_computation_without_trouble_gets_no_advice():
    assert give_advice(FINE) == []


def test_every_rule_is_tested():
    names = {rule.__name__.replace("_", " ") for rule in advice.RULES}
    assert names == set(SPEAKS) == set(SILENT)


@pytest.mark.parametrize("rule", SPEAKS)
def test_a_rule_speaks_behind_its_threshold(rule):
    (found,) = [a for a in give_advice(SPEAKS[rule]) if a.rule == rule]
    assert found.text
    assert found.section
    assert "\n" not in str(found)


@pytest.mark.parametrize("rule", SILENT)
def test_a_rule_is_silent_before_its_threshold(rule):
    assert rule not in [a.rule for a in give_advice(SILENT[rule])]


def test_what_saves_most_is_said_first():
    facts = replace(FINE, busy=[1.0, 0.1], planning=5.0, once=True, seconds=1.0)
    assert [a.rule for a in give_advice(facts)] == ["planned anew", "imbalance"]


def test_advice_follows_from_a_real_plan(scheduler, array):
    page = scheduler.explain(array)
    text = " ".join(map(str, page.advice))
    assert "untraceable" in text
    assert "not fused" in text


def test_spilling_is_foreseen():
    plan = plan_of(("a", "", 0, 60), ("b", "a", 0, 30), memory=(100,))
    foreseen = Footprint(1.0, {0: 90, HOST: 0}, {(0, HOST): 60}, {HOST: 60})
    page = explain_table(step_table(plan), plan.machine, True, predicted=foreseen)
    assert "60 B to host" in str(page)
    assert "memory" in [a.rule for a in page.advice]
