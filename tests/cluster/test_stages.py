"""Any graph, cut for any cluster: every edge is respected, there is no cycle, nothing is lost."""

from __future__ import annotations

import pickle
from itertools import pairwise
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import DataNode, Task, TaskRef
from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler import PlanError
from gpuscheduler.cluster.stages import (
    AHEAD_SECONDS,
    BEFORE,
    BEHIND,
    BESIDE,
    CALLER,
    FEWEST,
    MOST_LEVELS,
    StageGraph,
    cut,
)
from gpuscheduler.frontend.lowering import compile_tasks, from_dask
from gpuscheduler.plan.machine import Machine
from tests.support.strategies import dags, received_by_scheduler, thorough

NETWORK = 1e9


def cluster(workers, memory=2**40):
    return Machine.uniform(workers, memory=memory, peer=NETWORK)


def cut_of(*collections, workers=2, **options):
    graph = from_dask(*received_by_scheduler(*collections), compiled=False)
    return cut(graph, cluster(workers), **options)


@st.composite
def cuts(draw):
    """A Dask graph, the keys that are wanted, and its cut; some tasks may be pinned."""
    dsk, keys = draw(dags(max_tasks=40))
    workers = draw(st.integers(1, 6))
    pins = draw(st.dictionaries(st.sampled_from(sorted(dsk)), st.integers(0, workers - 1)))
    graph = from_dask(dsk, keys, compiled=False)
    pins = {k: w for k, w in pins.items() if k in graph.tasks}
    ahead = draw(st.sampled_from([0.0, AHEAD_SECONDS]))
    return dsk, keys, pins, cut(graph, cluster(workers), pins=pins, ahead=ahead)


def performed(c: StageGraph):
    """Return the caller's values, with stages run one by one.

    Each stage gets only the parcels that it reads. Stages and parcels are pickled on their way, as
    between processes.
    """
    sent: dict[int, dict] = {}
    made: dict[int, dict] = {}

    def parcel(n):
        if n not in sent:
            p = c.parcels[n]
            assert p.source in made, "a parcel of a stage that has not run"
            values = made[p.source]
            sent[n] = pickle.loads(pickle.dumps({k: values[k] for k in p.keys}))
        return sent[n]

    for stage in c.stages:
        for n in stage.after:
            assert c.worker_of(c.parcels[n].source) == stage.worker
            parcel(n)
        given = {k: v for n in c.parcels_of(stage) for k, v in parcel(n).items()}
        portion = pickle.loads(pickle.dumps(c.portion(stage)))
        compile_tasks(portion)
        values = {k: given[k] for keys in stage.reads.values() for k in keys}
        for key, task in portion.tasks.items():
            read = {
                name: values[k]
                for name, k in zip(portion.names[key], portion.needs[key], strict=True)
            }
            values[key] = task(read | portion.constants.get(key, {}))
        made[stage.number] = {k: values[k] for k in stage.outputs}
    got: dict = {}
    for (_, worker), n in c.readers.items():
        if worker == CALLER:
            got |= parcel(n)
    return got


@thorough
@given(cuts())
def test_stages_make_what_the_graph_makes(case):
    dsk, keys, _, c = case
    got = performed(c)
    values = [got.get(c.graph.alias.get(k, k), c.graph.data.get(k)) for k in keys]
    assert tuple(values) == dask.get(dsk, keys)


@thorough
@given(cuts())
def test_every_task_is_in_one_stage_and_stages_have_an_order(case):
    _, _, _, c = case
    every = [k for s in c.stages for k in s.tasks]
    assert sorted(every) == sorted(c.graph.tasks)
    assert [s.number for s in c.stages] == list(range(len(c.stages)))
    assert all(max(s.reads, default=-1) < s.number for s in c.stages)
    assert all(a.level <= b.level for a, b in pairwise(c.stages))
    stage_of = {k: s for s in c.stages for k in s.tasks}
    for key, needs in c.graph.needs.items():
        stage = stage_of[key]
        for d in needs:
            if stage_of[d] is not stage:
                assert d in stage.reads[stage_of[d].number]
                assert d in stage_of[d].outputs
                assert d in c.parcels[c.readers[stage_of[d].number, stage.worker]].keys


@thorough
@given(cuts())
def test_pins_hold(case):
    _, _, pins, c = case
    stage_of = {k: s for s in c.stages for k in s.tasks}
    assert all(stage_of[k].worker == w for k, w in pins.items())


@given(dags(), st.integers(1, 5))
def test_the_cut_of_the_same_graph_is_the_same(case, workers):
    dsk, keys = case
    a, b = (cut(from_dask(dict(dsk), list(keys)), cluster(workers)) for _ in range(2))
    assert (a.stages, a.parcels, a.readers) == (b.stages, b.parcels, b.readers)


@pytest.mark.parametrize(("width", "times"), [(4, 100), (40, 200)])
def test_what_goes_back_and_forth_without_end_stays_on_one_worker_in_the_end(width, times):
    """Each task reads the last task of its own column and of its neighbours.

    Half of the columns are on another worker: each step would be a level.
    """
    dsk = {("x", 0, i): Task(("x", 0, i), int) for i in range(width)}
    for t in range(1, times):
        for i in range(width):
            near = range(max(0, i - 1), min(width, i + 2))
            reads = [TaskRef(("x", t - 1, j)) for j in near]
            dsk["x", t, i] = Task(("x", t, i), max, *reads, 1)
    graph = from_dask(dsk, [("x", times - 1, i) for i in range(width)], compiled=False)
    c = cut(graph, cluster(2), pins={("x", 0, i): 2 * i // width for i in range(width)})
    assert {s.worker for s in c.stages} == {0, 1}
    assert max(s.level for s in c.stages) < max(MOST_LEVELS, len(dsk) // (2 * FEWEST)) < times
    assert set(performed(c).values()) == {1}


def test_the_number_of_cluster_tasks_does_not_grow_with_the_chunks():
    """Thirty thousand chunk tasks on four workers: a few dozen tasks of the cluster."""
    few, many = (
        cut_of((da.ones(n * 10, chunks=10) + 1).sum(split_every=4), workers=4)
        for n in (1_000, 30_000)
    )
    assert len(many.graph.tasks) > 30_000
    assert many.tasks == few.tasks <= 12
    random = da.random.default_rng(0).random
    x = [random((n * 10, n * 10), chunks=10) for n in (10, 40)]
    few, many = (cut_of((a + a.T).sum(), workers=4) for a in x)
    assert many.tasks <= max(few.tasks, 36)


def test_a_value_that_two_stages_read_is_on_their_worker_once():
    """Worker 1 reads x, 800 bytes of worker 0, before it has y and after; y and z are nothing."""
    dsk = {
        "x": Task("x", np.ones, 100),
        "a": Task("a", len, TaskRef("x")),
        "y": Task("y", abs, TaskRef("a")),
        "z": Task("z", max, TaskRef("x"), TaskRef("y")),
    }
    graph = from_dask(dsk, ["z"], compiled=False)
    for key, size in {"x": 800, "a": 0, "y": 0, "z": 0}.items():
        graph.note(key, size=size)
    c = cut(graph, cluster(2), pins={"x": 0, "a": 1, "y": 0, "z": 1})
    assert [s.worker for s in c.stages if "x" in s.reads.get(0, ())] == [1, 1]
    assert c.peak() == [800, 800]


def test_aligned_work_sends_nothing():
    x = da.ones((4000, 10), chunks=(100, 10))
    c = cut_of((x + 1) * 2, workers=4)
    assert c.traffic() == {}
    assert {s.level for s in c.stages} == {0}


def test_a_transpose_sends_what_it_must():
    """Of two row bands of x, each needs half of the other, and its own: half of all crosses."""
    x = da.random.default_rng(0).random((1000, 1000), chunks=100)
    c = cut_of(x + x.T, workers=2)
    assert c.traffic() == {(0, 1): x.nbytes // 4, (1, 0): x.nbytes // 4}
    # two stages for each worker; what the first gives to the other worker, and to the caller
    assert c.tasks == 4 + 2 + 2


# ---- what is sent while others go on


def sent_ahead(c):
    """From and to whom parcels go by themselves, and which parts each worker's levels have."""
    links = [(c.worker_of(c.parcels[n].source), w) for n, w in c.ahead]
    parts = {}
    for s in c.stages:
        parts.setdefault((s.level, s.worker), []).append(s.part)
    return sorted(links), parts


def test_what_another_worker_waits_for_is_made_first_where_it_takes_long_to_send():
    """Of each worker's half of x, half is for the other one. 400 MB at 1 GB/s are worth it."""
    x = da.random.default_rng(0).random((20_000, 20_000), chunks=2000)
    links, parts = sent_ahead(c := cut_of((x + x.T).sum()))
    assert links == [(0, 1), (1, 0)]
    assert parts[0, 0] == parts[0, 1] == [BEFORE, BESIDE]
    first, second = (s for s in c.stages if (s.level, s.worker) == (0, 0))
    assert c.nbytes[first.outputs[0]] == 32_000_000
    assert second.number > first.number
    small = x[:1000, :1000].rechunk(100)
    assert sent_ahead(cut_of((small + small.T).sum()))[0] == []


def test_what_reads_what_another_worker_has_comes_last():
    """Blocks that exist already: each worker adds those of its own while others arrive."""
    x = da.random.default_rng(0).random((20_000, 20_000), chunks=2000)
    blocks = dask.core.flatten(x.__dask_keys__())
    held = {k: DataNode(k, SimpleNamespace(half=k[1] // 5, nbytes=32_000_000)) for k in blocks}
    y = da.Array(held, x.name, x.chunks, x.dtype)
    graph = from_dask(*received_by_scheduler((y + y.T).sum()), home=lambda v: 0, compiled=False)
    c = cut(graph, cluster(2), lambda v: (("half", v.half), v.half))
    links, parts = sent_ahead(c)
    assert links == [(0, 1), (1, 0)]
    assert parts[0, 0] == parts[0, 1] == [BESIDE, BEHIND]
    # a worker of one thread takes the parcels out before it goes on
    first = [s for s in c.stages if s.level == 0 and s.part == BESIDE]
    taken = [[c.parcels[n] for n in s.after] for s in first]
    assert [[p.source for p in mine] for mine in taken] == [[-1], [-2]]
    assert not any(p.whole for mine in taken for p in mine)


def test_nothing_goes_ahead_where_one_worker_reads_the_other_s_devices():
    x = da.random.default_rng(0).random((20_000, 20_000), chunks=2000)
    links, parts = sent_ahead(cut_of((x + x.T).sum(), near={(0, 1)}))
    assert links == [(1, 0)]
    assert parts[0, 0] == [BESIDE]


@pytest.mark.parametrize("workers", [2, 4])
def test_two_that_read_each_other_s_are_in_one_place(workers):
    """x + x.T, summed: of the bytes that cross where each block is made in its own row, half."""
    x = da.random.default_rng(0).random((32_000, 32_000), chunks=1000)
    c = cut_of((x + x.T).sum(), workers=workers)
    crossing = x.nbytes * (1 - 1 / workers)
    traffic = c.traffic().values()
    assert sum(traffic) <= 0.55 * crossing
    assert max(traffic) <= 0.75 * x.nbytes / workers**2  # each link has its share
    load = [sum(s.seconds for s in c.stages if s.worker == w) for w in range(workers)]
    assert max(load) <= 1.3 * sum(load) / workers  # one worker does the end alone


def test_values_that_exist_already_are_read_from_where_they_are():
    dsk = {
        "x": DataNode("x", "on one"),
        "y": DataNode("y", "on two"),
        "a": Task("a", max, TaskRef("x"), TaskRef("y")),
    }
    graph = from_dask(dsk, ["a"], home=lambda v: 0)
    where = {"on one": ("h", 1), "on two": ("i", 1)}
    c = cut(graph, cluster(2), holder=where.get)
    (stage,) = c.stages
    assert stage.worker == 1
    assert stage.reads == {-2: ("y",), -1: ("x",)}
    assert c.tasks == 1


def test_a_pin_to_a_worker_that_is_not_there_is_refused():
    with pytest.raises(PlanError, match="device=5, but the devices are 0 to 1"):
        cut(from_dask({"a": (int,)}, ["a"]), cluster(2), pins={"a": 5})
