"""Persisted collections: on their devices, counted, sent away, brought back, and gone at last."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import subprocess
import sys
import threading
import weakref

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from dask import delayed
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import OutOfMemory, Scheduler
from gpuscheduler.devices import cpu
from gpuscheduler.frontend.chunk import Chunk, ChunkTask, bytes_in
from gpuscheduler.plan.machine import DISK
from gpuscheduler.runtime.loop import run
from gpuscheduler.runtime.persisted import PersistedChunks
from gpuscheduler.values import renew
from tests.support.strategies import EXAMPLES, thorough

SIDE = 50  # elements of a block; 20 kB of float64
BLOCK = SIDE * SIDE * 8


def array(n=4, seed=0):
    return da.random.default_rng(seed).random((n * SIDE, SIDE), chunks=SIDE)


def chunks(s):
    return s._persisted.chunks()


def in_memory(s):
    return sum(c.nbytes for c in chunks(s) if 0 in c.places)


@pytest.fixture
def small(tmp_path):
    """Two devices with room for six blocks together."""
    options = {"spill_directory": str(tmp_path), "check": True, "fuse": False}
    with Scheduler("cpu:2", memory_limit=3 * BLOCK, **options) as s:
        yield s
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_persisted_array_holds_chunks_that_are_counted(small):
    x = array()
    want = x.compute()
    p = x.persist()
    assert {type(t) for t in dict(p.dask).values()} == {ChunkTask}
    first = p.dask[p.__dask_keys__()[0][0]]  # as of a future
    np.testing.assert_array_equal(first.result(), want[: p.chunks[0][0], : p.chunks[1][0]])
    assert len(chunks(small)) == 4
    assert in_memory(small) == 4 * BLOCK
    assert repr(small).endswith("limit 58.59 kiB each, persisted 78.12 kiB>")
    assert "<td>58.59 kiB</td><td>39.06 kiB</td>" in small._repr_html_()
    np.testing.assert_array_equal(p.compute(), want)
    assert small.last.peak[0] >= 4 * BLOCK


def test_chunks_leave_when_a_run_needs_their_room_and_come_back_when_they_are_read(small):
    x, y = array(), array(seed=1)
    want = x.compute()
    p = x.persist()
    (y - y.mean(axis=0)).sum().compute()  # y takes four blocks, and work on it
    assert small.last.peak[0] <= 6 * BLOCK
    assert small.last.spilled[DISK] > 0
    assert in_memory(small) < 4 * BLOCK
    assert "on disk)" in repr(small)
    assert "on disk" in small._repr_html_()
    np.testing.assert_array_equal(p.compute(), want)
    np.testing.assert_array_equal((p + p).compute(), want + want)


def test_more_can_be_persisted_than_there_is_memory(small):
    x = array(20)
    want = x.compute()
    p = x.persist()
    assert in_memory(small) <= 6 * BLOCK
    assert small.hardware.store.nbytes >= 14 * BLOCK
    np.testing.assert_array_equal(p.compute(), want)
    np.testing.assert_allclose((p + p[::-1]).sum().compute(), 2 * want.sum())
    assert small.last.peak[0] <= 6 * BLOCK


def test_chunks_go_with_the_last_collection_that_holds_them(small):
    """At once, with their files, without a look for garbage; work on them keeps none alive."""
    gc.collect()
    gc.disable()
    try:
        p = array(10).persist()
        assert small.hardware.store.nbytes > 0
        total = p.sum()
        total.compute()
        (p + 1).compute()
        part = (p[:SIDE] + 1).persist()
        del p
        assert len(chunks(small)) == 11  # total holds the whole of it
        del total
        assert len(chunks(small)) == 1
        del part
        assert chunks(small) == []
        assert small.hardware.store.nbytes == 0
    finally:
        gc.enable()


def test_what_is_persisted_again_is_the_same_chunks(small):
    p = array().persist()
    before = {id(c) for c in chunks(small)}
    q, r = dask.persist(p, p + 1)
    assert before < {id(c) for c in chunks(small)}
    assert len(chunks(small)) == 8
    np.testing.assert_array_equal((q + 1).compute(), r.compute())


def test_work_follows_the_chunks():
    def where(block):
        return np.array([[threading.current_thread().name]], dtype=object)

    with Scheduler("cpu:3", fuse=False) as s:
        with dask.annotate(device=2):
            one = da.ones(4, chunks=2).map_blocks(lambda b: b + 1).persist()
        names = one.map_blocks(where, dtype=object, new_axis=1).compute()
        assert {name[-1] for name in names.ravel()} == {"2"}
        assert {c.place for c in chunks(s)} == {2}


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_other_schedulers_get_plain_values(small, scheduler):
    x = array(10)
    want = x.compute()
    p = x.persist()
    assert small.hardware.store.nbytes > 0
    np.testing.assert_array_equal((p + 1).compute(scheduler=scheduler), want + 1)
    with Scheduler("cpu:1", fuse=False) as another:
        np.testing.assert_array_equal((p + 1).compute(), want + 1)
        assert chunks(another) == []


def test_pickles_and_copies_hold_plain_values(small):
    x = array(10)
    want = x.compute()
    p = x.persist()
    data = pickle.dumps(p)
    other = copy.deepcopy(dict(p.dask))
    del p
    assert chunks(small) == []
    q = pickle.loads(data)
    np.testing.assert_array_equal(q.compute(), want)
    np.testing.assert_array_equal(q.compute(scheduler="sync"), want)
    np.testing.assert_array_equal(other[x.name, 3, 0](), want[3 * SIDE : 4 * SIDE])


def test_chunks_outlive_their_scheduler(tmp_path):
    """Those in files stay there, until the collection goes."""
    x = array(10)
    with Scheduler("cpu:1", memory_limit=4 * BLOCK, spill_directory=str(tmp_path)) as s:
        want = x.compute()
        p = x.persist()
    assert "persisted" in repr(s)
    assert "closed" in repr(s)
    assert list(tmp_path.iterdir())
    np.testing.assert_array_equal(p.compute(scheduler="sync"), want)
    with Scheduler("cpu:2", memory_limit=4 * BLOCK, fuse=False) as other:
        np.testing.assert_array_equal((p + 1).compute(), want + 1)
        q = p.persist()
        np.testing.assert_array_equal(q.compute(), want)
        assert len(chunks(other)) > 0
        del p, q
    assert not list(tmp_path.iterdir())


def test_delayed_bags_and_dataframes(small):
    d = delayed(sum)([1, 2, 3]).persist()
    assert d.compute() == 6
    assert delayed(lambda v: v + 1)(d).compute() == 7
    bag = db.from_sequence(range(20), npartitions=4).map(lambda v: v * 2).persist()
    assert bag.sum().compute() == 380
    assert bag.filter(lambda v: v > 30).compute() == [32, 34, 36, 38]
    assert len(chunks(small)) == 4  # a number is not worth it
    pd = pytest.importorskip("pandas")
    dd = pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"v": np.arange(100.0)})
    lazy = dd.from_pandas(frame, npartitions=5).persist()
    pd.testing.assert_frame_equal((lazy + 1).compute(), frame + 1)


def test_expression_arrays(small):
    expression_arrays = pytest.importorskip("dask_array")
    p = (expression_arrays.ones((20, 20), chunks=5) + 1).persist()
    assert float((p + p.T).sum().compute()) == 1600
    assert len(chunks(small)) == 16


def test_a_block_that_is_in_an_array_twice(small):
    """One chunk under two names; parts of it that are the whole are further names of these."""
    x = da.ones((14, 19), chunks=(5, 6))
    twice = da.concatenate([x, x]).persist()
    for y in (twice[:, :12], twice[:, :12][::-1], twice[::-1, :12] + twice[:, :12]):
        np.testing.assert_array_equal(y.compute(), y.compute(scheduler="sync"))


def test_two_persisted_arrays_stay_apart_from_what_reads_them(small):
    """Dask would fuse the chunks of both into the sum, where nobody could send them away."""
    p, q = array().persist(), array(seed=1).persist()
    plan = small.plan(p + q)
    assert len(plan.chunks) == 8


def test_by_name_and_by_function():
    x = array()
    for scheduler in ("gpu", gpuscheduler.get):
        p = x.persist(scheduler=scheduler)
        assert isinstance(next(iter(p.dask.values())).func, Chunk)
        np.testing.assert_array_equal(
            p.compute(scheduler=scheduler), x.compute(scheduler=scheduler)
        )


def test_chunks_that_another_run_has_are_used_where_they_are(small):
    """A run inside a task reads what the run around it may move."""
    p = array().persist()
    want = p.sum().compute()

    def inner(block):
        return np.full((1, 1), p.sum().compute())

    got = p.map_blocks(inner, chunks=(1, 1), meta=np.empty((0, 0))).compute()
    np.testing.assert_allclose(got, want)
    assert not small._persisted._loans


def test_a_run_that_fails_leaves_the_chunks_as_they_are(small):
    x = array(10)
    want = x.compute()
    p = x.persist()

    def broken(block):
        raise ZeroDivisionError

    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            (p + p[::-1]).map_blocks(broken, meta=np.empty((0, 0))).compute()
    np.testing.assert_array_equal(p.compute(), want)
    assert not small._persisted._loans


def test_what_cannot_fit_beside_chunks_makes_them_leave_and_else_is_an_error(small):
    p = array(5).persist()
    assert in_memory(small) == 5 * BLOCK
    big = da.ones(5 * BLOCK // 8, chunks=-1).map_blocks(np.copy).persist()
    assert in_memory(small) == 6 * BLOCK
    assert big.sum().compute() == 5 * BLOCK // 8
    with pytest.raises(OutOfMemory, match="needs 160,000 bytes"):
        da.ones(8 * BLOCK // 8, chunks=-1).map_blocks(np.copy).persist()
    assert p.shape == (5 * SIDE, SIDE)


def watched(monkeypatch):
    """The plans that are run."""
    plans = []

    def seen(plan, *args):
        plans.append(plan)
        return run(plan, *args)

    monkeypatch.setattr("gpuscheduler.runtime.loop.run", seen)
    return plans


def test_chunks_that_a_run_neither_reads_nor_needs_the_room_of_are_no_part_of_it(monkeypatch):
    """They are counted all the same, and a thousand of them cost a small computation nothing."""
    plans = watched(monkeypatch)
    with Scheduler("cpu:2", check=True, fuse=False) as s:
        kept = da.ones(1000, chunks=1).persist()
        x = array(2).persist()
        y = (x + 1).sum()
        y.compute()  # then the sizes of its steps are known
        plans.clear()
        y.compute()
        (plan,) = plans
        assert set(plan.chunks) == {i for i, step in enumerate(plan.steps) if step.fixed}
        assert len(plan.chunks) == 2
        peak = s.last.peak[0]
        assert peak >= kept.nbytes + x.nbytes
        del kept
        gc.collect()
        y.compute()
        assert s.last.peak[0] <= peak - 8000


def test_chunks_that_were_no_part_of_a_run_move_when_it_finds_no_room_after_all(small, monkeypatch):
    """A task takes more than anybody knew, and finds no memory as long as there are others'."""
    kept, x = array(2).persist(), array(1, seed=1)
    want, others = x.compute(), kept.compute()
    tries = []

    def greedy(block):
        tries.append(in_memory(small))
        if armed and tries[-1]:
            raise MemoryError
        return block

    y = x.map_blocks(greedy, dtype=x.dtype, meta=x._meta)
    armed = False
    y.compute()  # then the sizes of its steps are known
    armed, plans = True, watched(monkeypatch)
    tries.clear()
    np.testing.assert_array_equal(y.compute(), want)
    assert [len(plan.chunks) for plan in plans] == [0, 2]
    assert tries[0] == 2 * BLOCK
    assert tries[-1] == 0
    assert small.last.spilled[DISK] == 2 * BLOCK
    np.testing.assert_array_equal(kept.compute(), others)


def test_what_a_task_says_of_memory_is_no_reason_to_run_all_again(small):
    """A run inside a task finds no room; the tasks before it have run once."""
    kept, x = array(2).persist(), array(1, seed=1)
    calls = []

    def first(block):
        calls.append("first")
        return block

    def second(block):
        calls.append("second")
        if calls.count("second") > 1:
            raise OutOfMemory("of another run")
        return block

    options = {"dtype": x.dtype, "meta": x._meta}
    y = x.map_blocks(first, **options).map_blocks(second, **options)
    y.compute()
    with pytest.raises(OutOfMemory, match="of another run"):
        y.compute()
    assert calls == ["first", "second"] * 2
    del kept


def test_a_chunk_that_a_graph_has_twice_is_taken_off_once(small):
    a, b = array(1), array(1, seed=1)
    x, y = dask.persist(a, da.concatenate([a, b]))
    kept = array(1, seed=2).persist()
    every = small._persisted.chunks()
    shared = [c for c in every if c.nbytes == BLOCK and c is not every[-1]]
    assert small._persisted.bytes_of_others([*shared, *shared]) == {0: kept.nbytes}
    del x, y


def test_values_that_cannot_be_pickled_stay(small):
    held = delayed(lambda: [threading.Lock(), np.ones(BLOCK // 8)], pure=False)().persist()
    x = array(10)
    assert abs((x - x.mean(axis=0)).sum().compute()) < 1e-6
    assert type(held.compute()[0]) is type(threading.Lock())


def test_a_forked_child_leaves_its_parents_files(tmp_path):
    code = (
        "import os, sys, warnings, dask.array as da, gpuscheduler;"
        "warnings.simplefilter('ignore');"
        f"options = dict(memory_limit=100_000, spill_directory={str(tmp_path)!r});"
        "s = gpuscheduler.Scheduler('cpu:1', **options);"
        "s.__enter__(); p = da.random.random((200, 200), chunks=50).persist();"
        "want = p.sum().compute(); assert s.hardware.store.nbytes; pid = os.fork();"
        "(p.__dict__.clear(), globals().pop('p'), os._exit(0)) if pid == 0 else os.waitpid(pid, 0);"
        "assert abs(p.sum().compute() - want) < 1e-6; print('same')"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert out.stdout.strip() == "same", out.stderr


# ---- any program


@st.composite
def programs(draw):
    """Lines of persist, compute and del on arrays; each line is a word and numbers for it."""
    number = st.integers(0, 99)
    words = ["persist", "add", "mean", "slice", "compute", "del", "product"]
    return draw(
        st.lists(st.tuples(st.sampled_from(words), number, number), min_size=1, max_size=12)
    )


def performed(program, get):
    """The values that the program computes; `get` computes and persists."""
    arrays = [array(3, seed=5), array(4, seed=6)[SIDE:]]
    out = []
    for word, a, b in program:
        x, y = arrays[a % len(arrays)], arrays[b % len(arrays)]
        if word == "persist":
            arrays.append(x.persist(scheduler=get))
        elif word == "add":
            arrays.append(x + y)
        elif word == "mean":
            arrays.append(x - x.mean(axis=0))
        elif word == "slice":
            arrays.append(x[::-1])
        elif word == "product":
            arrays.append(x @ (y.T @ x))
        elif word == "compute":
            out.append(x.compute(scheduler=get))
        elif len(arrays) > 2:
            del arrays[2 + a % (len(arrays) - 2)]
        del x, y
    return out


@pytest.mark.timeout(600)  # a minute by itself
@settings(thorough, max_examples=max(1, EXAMPLES // 10))  # each takes a third of a second
@given(programs(), st.integers(5, 12), st.integers(1, 3))
def test_any_program_gives_the_same_in_little_memory(program, blocks, devices):
    """Never more than the limit, the values of Dask itself, and nothing left behind."""
    want = performed(program, "sync")
    s = Scheduler(
        f"cpu:{devices}",
        memory_limit=blocks * BLOCK // devices + 1,
        check=True,
        fuse=False,
    )
    peaks = []

    def get(dsk, keys, **_):
        out = s.get(dsk, keys)
        peaks.append(s.last.peak[0])
        return out

    get.persist = s.persist
    got = performed(program, get)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert max(peaks, default=0) <= s.hardware.machine.limit(0)
    gc.collect()
    assert chunks(s) == []
    assert s.hardware.store.nbytes == 0
    s.close()


def test_chunks_in_any_order_of_going():
    """A thread lets go of chunks while runs in another move them."""
    s = Scheduler("cpu:2", memory_limit=4 * BLOCK, check=True, fuse=False)
    kept = [array(4, seed=n).persist(scheduler=s.get) for n in range(6)]
    want = [float(p.sum().compute(scheduler=s.get)) for p in kept]
    gone = threading.Event()

    def let_go():
        order = random.Random(0)
        while len(kept) > 2:
            kept.pop(order.randrange(2, len(kept)))
        gone.set()

    thread = threading.Thread(target=let_go)
    thread.start()
    while not gone.is_set():
        for n in range(2):
            np.testing.assert_allclose(kept[n].sum().compute(scheduler=s.get), want[n])
    thread.join()
    alive = weakref.WeakSet(chunks(s))
    kept.clear()
    gc.collect()
    assert not alive
    assert s.hardware.store.nbytes == 0
    s.close()


class Nowhere:
    """Hardware that keeps nothing."""

    def device_value(self, places):
        return None

    def caller_value(self, key, place, places):
        return None

    def forget(self, places):
        pass


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30), st.integers(0, 2)), max_size=60))
def test_bytes_beside_some_are_counted_as_they_come_and_go(steps):
    persisted, other, chunks = PersistedChunks(), PersistedChunks(), []
    for what, n, place in steps:
        one = chunks[n % len(chunks)] if chunks else None
        if what <= 2:
            chunks.append(Chunk(n, place, n + 1, {place: "here"}, Nowhere()))
            persisted.add(chunks[-1])
        elif what == 3:
            other.add(Chunk(n, 0, 1, {0: "here"}, Nowhere()))
        elif one is None:
            continue
        elif what == 4:
            one.note_arrival(place - 1, "here")
        elif what == 5:
            one.note_departure(max(one.places, default=0))
        elif what == 6:
            one.end_run()
        elif n % 2:
            chunks.remove(one)
        else:  # while another thread counts
            lock = threading.Thread(target=persisted._lock.acquire)
            lock.start()
            lock.join()
            chunks.remove(one)
            del one
            persisted._lock = threading.RLock()
        one = None  # or it would not be gone
        some = chunks[::2]
        held = [(p, c.nbytes) for c in chunks[1::2] for p in c.places]
        want = {p: sum(n for q, n in held if q == p) for p, _ in held}
        assert (
            persisted.bytes_of_others(some)
            == persisted.bytes_of_others(some, bytes_in(some))
            == want
        )


def test_what_comes_and_goes_does_not_have_all_counted_again(monkeypatch):
    persisted = PersistedChunks()
    chunks = [Chunk(n, 0, 8, {0: "here"}, Nowhere()) for n in range(5)]
    for one in chunks:
        persisted.add(one)
    del one
    assert persisted.bytes_of_others(()) == {0: 40}
    monkeypatch.setattr(persisted, "chunks", None)  # which would be asked
    for n in range(3):
        chunks.append(Chunk(n, 1, 8, {1: "here"}, Nowhere()))
        persisted.add(chunks[-1])
        del chunks[0]
        assert persisted.bytes_of_others(chunks[-1:]) == {
            p: b for p, b in ((0, 32 - 8 * n), (1, 8 * n)) if b
        }


def test_a_plan_stays_as_it_is_while_others_come_and_go(small):
    """What it knows by heart holds until one of its own chunks moves."""
    x = array(2).persist()
    y = x + 1
    y.compute()
    (entry,) = [e for e in small._plans.entries() if e.plan.own_chunks]
    before = entry.plan_with_own_chunks(), entry.own_bytes()
    kept = [array(1, seed=n).persist() for n in range(3)]
    del kept[1]
    assert entry.plan_with_own_chunks() is before[0]
    assert entry.own_bytes() is before[1]
    chunk = next(c for c in small._persisted.chunks() if c in entry.plan.own_chunks)
    chunk.note_arrival(-1, chunk.places[0])
    assert entry.own_bytes() == {0: 2 * BLOCK, -1: BLOCK}
    assert entry.plan_with_own_chunks().there != before[0].there
    del x


# ---- tasks that change what they are given


def spoil(value):
    """Change lists and sets in place, those inside tuples too; return what there was."""
    before = copy.deepcopy(value)
    for inner in value if isinstance(value, (list, tuple)) else ():
        spoil(inner)
    if isinstance(value, list):
        value.append("spoilt")
    elif isinstance(value, set):
        value.add("spoilt")
    return before


containers = st.recursive(
    st.one_of(st.integers(0, 3), st.sets(st.integers(0, 3), max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)


@given(value=containers)
@thorough
def test_tasks_that_change_persisted_lists_in_place_change_their_own(value):
    """As with Dask's threads, for which a persisted list is one of the graph's."""
    with Scheduler("cpu:2", check=True) as s:
        for scheduler in ("threads", s):
            kept = delayed(copy.deepcopy)(delayed(value, traverse=False))
            kept = kept.persist(scheduler=scheduler)
            for reader in ("threads", s):
                assert delayed(spoil)(kept).compute(scheduler=reader) == value
                assert spoil(kept.compute(scheduler=reader)) == value
                assert kept.compute(scheduler=reader) == value


def test_lists_that_a_run_does_not_read_are_not_copied(monkeypatch):
    copied = []
    monkeypatch.setattr(cpu, "renew", lambda value: copied.append(value) or renew(value))
    with Scheduler("cpu:2"):
        kept = dask.persist(*[delayed(list)(range(1000)) for _ in range(3)])
        copied.clear()
        assert delayed(len)("abc").compute() == 3
        assert not copied
        assert delayed(sum)(kept[0]).compute() == sum(range(1000))
        assert len(copied) == 1
        assert delayed(lambda *lists: [len(v) for v in lists])(*kept).compute() == [1000] * 3
        assert len(copied) == 4
        del kept


def test_a_list_that_holds_itself_is_not_copied():
    value = []
    value += [value, value]
    assert renew(value) is value


def test_a_persisted_bag_keeps_what_tasks_take_out_of_its_partitions(small):
    """Also where it was moved to a file, by the very run whose tasks changed it."""
    blocks = [[np.full(SIDE * SIDE, i), i] for i in range(8)]
    bag = db.from_sequence(range(8), npartitions=8).map_partitions(lambda p: blocks[p[0]][:])
    bag = bag.persist()  # two more than fit
    for _ in range(3):
        taken = bag.map_partitions(lambda p: [p.pop(), p.pop().sum()]).compute()
        assert taken == [v for i in range(8) for v in (i, i * SIDE * SIDE)]
        assert [len(p.compute()) for p in bag.to_delayed()] == [2] * 8
    del bag
