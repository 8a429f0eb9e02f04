"""Arrays that users' functions read beside their blocks: arguments, variables, defaults."""

import collections
import functools
import gc
import itertools
import weakref

import dask
import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.tracing.context import NotTraceable
from gpuscheduler.tracing.trace import trace_function

A = np.random.default_rng(0).normal(size=(8, 6))
W, V = np.linspace(1, 2, 6), np.arange(12.0)[::2]
SCALE = np.linspace(3, 4, 6)


@pytest.fixture
def scheduler():
    with Scheduler("cpu:2", check=True, fuse_least=0) as s:
        yield s


def x():
    return da.from_array(A, chunks=(3, 6))


def scaled(b, w, k=0.0):
    return b * w + k


def by_global(b):
    return b * SCALE - 1


def by_default(b, w=W):
    return b * w + 1


def by_own_of(xp, n):
    """A function that makes an array and writes to it, for NumPy or CuPy."""

    def by_own(b):
        t = xp.arange(float(n))
        t[0] = 3
        c = b * t
        t[0] = 5
        return c + t

    return by_own


def normed(b, w):
    return b * (w / w.sum()) + 1


def nested(b, many):
    return b * many[0] + many[1][None, :]


FORMS = {
    "argument": (lambda x: x.map_blocks(scaled, W), A * W),
    "inside a chain": (
        lambda x: ((x + 1).map_blocks(scaled, W) * 2).sum(1), ((A + 1) * W * 2).sum(1),
    ),
    "keyword": (lambda x: x.map_blocks(scaled, W, k=V), A * W + V),
    "partial": (lambda x: x.map_blocks(functools.partial(scaled, w=W, k=V)), A * W + V),
    "global": (lambda x: x.map_blocks(by_global), A * SCALE - 1),
    "closure": (lambda x: x.map_blocks(lambda b, q=W * 2: (lambda: b * q - 1)()), A * W * 2 - 1),
    "default": (lambda x: x.map_blocks(by_default), A * W + 1),
    "made by itself": (
        lambda x: x.map_blocks(by_own_of(np, 6)), A * [3, 1, 2, 3, 4, 5] + [5, 1, 2, 3, 4, 5],
    ),
    "reduced": (lambda x: x.map_blocks(normed, W), A * (W / W.sum()) + 1),
    "list": (lambda x: x.map_blocks(nested, [W, V]), A * W + V),
    "backwards": (lambda x: x.map_blocks(scaled, W[::-1]), A * W[::-1]),
    "twice": (lambda x: x.map_blocks(scaled, W) + x.map_blocks(scaled, V, k=W), A * (W + V) + W),
    "blockwise": (
        lambda x: da.blockwise(scaled, "ij", x, "ij", W, None, k=V, dtype="f8"), A * W + V,
    ),
    "integers": (
        lambda x: x.map_blocks(scaled, np.arange(6, dtype="i2"), k=1), A * np.arange(6) + 1,
    ),
    "made larger": (lambda x: x.map_blocks(lambda b: b[:, None] * A[None, :3, :] + 1,
                                           new_axis=1, chunks=(x.chunks[0], (3,), (6,))),
                    A[:, None] * A[None, :3] + 1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_captured_arrays_are_read_by_kernels(scheduler, form):
    make, want = FORMS[form]
    y = make(x())
    assert all(type(s.task) is KernelTask for s in scheduler.plan(y).steps)
    for _ in range(3):
        np.testing.assert_allclose(y.compute(), want, rtol=1e-14)
    np.testing.assert_allclose(y.compute(scheduler="sync"), want, rtol=1e-14)


@pytest.mark.parametrize("form", ["argument", "keyword", "partial", "default", "blockwise"])
def test_captured_arrays_are_read_at_run_time(scheduler, form):
    """As in Dask, writes between computes are seen, also with a kept plan."""
    weights = np.ones(6)
    by = functools.partial(scaled, w=weights)
    y = {
        "argument": lambda: x().map_blocks(scaled, weights),
        "keyword": lambda: x().map_blocks(scaled, w=weights),
        "partial": lambda: x().map_blocks(by),
        "default": lambda: x().map_blocks(lambda b, w=weights: b * w + 0.0),
        "blockwise": lambda: da.blockwise(scaled, "ij", x(), "ij", weights, None, dtype="f8"),
    }[form]()
    np.testing.assert_array_equal(y.compute(), A)
    weights[:] = W
    np.testing.assert_array_equal(y.compute(), A * W)


@pytest.mark.parametrize("fuse", [True, False])
def test_captured_values_that_the_trace_reads_are_checked_at_run_time(fuse):
    """With other values the task does something else."""
    with Scheduler("cpu:2", fuse_least=0, fuse=fuse) as s:
        w, at = np.array([2.0, 3.0]), np.array([0, 1, 2, 0, 0, 0])
        y = x().map_blocks(lambda b, w: b * float(w[1]) + w.max(), w, dtype="f8")
        z = x().map_blocks(lambda b, at: b[:, at] * 2, at, dtype="f8")
        assert all(type(t.task) is KernelTask for t in s.plan(y).steps) == fuse
        for k in range(3):
            w[:], at[:] = k, np.arange(6)[::-1] * (k == 1)
            np.testing.assert_array_equal(y.compute(), A * k + k)
            np.testing.assert_array_equal(z.compute(), A[:, at] * 2)


def test_global_replaced_by_another_array_is_seen(scheduler, monkeypatch):
    y = x().map_blocks(by_global)
    np.testing.assert_array_equal(y.compute(), A * SCALE - 1)
    monkeypatch.setitem(globals(), "SCALE", W)
    np.testing.assert_array_equal(y.compute(), A * W - 1)
    monkeypatch.setitem(globals(), "SCALE", np.ones((1, 1)))
    np.testing.assert_array_equal(y.compute(), A - 1)


def test_collection_built_again_reuses_its_plan(scheduler, planned, monkeypatch):
    """Its function is the same one, and so is the array."""
    for k in range(3):
        y = da.from_array(A + k, chunks=(3, 6)).map_blocks(by_global).sum()
        np.testing.assert_allclose(y.compute(), ((A + k) * SCALE - 1).sum())
    assert len(planned) == 1
    monkeypatch.setitem(globals(), "SCALE", W)
    y = da.from_array(A + 9, chunks=(3, 6)).map_blocks(by_global).sum()
    np.testing.assert_allclose(y.compute(), ((A + 9) * W - 1).sum())


def test_captured_arrays_are_freed_with_the_collection(scheduler):
    weights = np.ones(6)
    alive = weakref.ref(weights)
    y = x().map_blocks(scaled, weights)
    y.compute()
    del weights
    assert alive() is not None
    del y
    gc.collect()
    assert alive() is None


def adds(b, w):
    w += 1
    return b * w


def gives(b):
    return SCALE[: len(b)]


@pytest.mark.parametrize("fuse", [True, False])
def test_functions_that_write_or_return_captured_arrays_stay_tasks(fuse):
    with Scheduler("cpu:1", fuse_least=0, fuse=fuse) as s:
        w = np.zeros(6)
        y = x().map_blocks(adds, w, dtype="f8", meta=np.empty((0, 0)))
        assert not any(type(t.task) is KernelTask for t in s.plan(y).steps)
        assert not w.any()  # to look at a function changes nothing
        np.testing.assert_array_equal(y.compute(), np.concatenate([A[:3], 2 * A[3:6], 3 * A[6:]]))
        z = x().map_blocks(gives, drop_axis=1, chunks=((3, 3, 2),), dtype="f8", meta=np.empty(0))
        np.testing.assert_array_equal(z.compute(), SCALE[[0, 1, 2, 0, 1, 2, 0, 1]])


def test_trace_without_captured_arrays_refuses_a_global_array():
    from gpuscheduler.tracing.abstract import AbstractArray

    block = AbstractArray((3, 6), np.dtype("f8"))
    with pytest.raises(NotTraceable, match="reads SCALE, a ndarray, which can change"):
        trace_function(functools.partial(by_global), [block])


@pytest.mark.parametrize("dtype", ["O", "M8[s]", "f2", "?", "c16"])
def test_captured_arrays_of_any_dtype(scheduler, dtype):
    w = np.arange(6).astype(dtype)
    block = np.arange(48).reshape(8, 6).astype("m8[s]" if dtype == "M8[s]" else "i8")
    made = (block + w).dtype
    z = da.from_array(block, chunks=(3, 6)).map_blocks(lambda b, w: (b + w) + b, w, dtype=made)
    got, want = dask.compute(z)[0], block + w + block
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype


class Held:
    def __init__(self, w):
        self.w = w


TUPLE = (np.ones(6), 1)
WRITTEN = np.ones(6)


def by_global_written(b):
    return b * WRITTEN + 1


def recursive(b, n):
    return b * WRITTEN + 1 if n == 0 else recursive(b, n - 1) * WRITTEN


def by_text(b):
    return b * len(str(WRITTEN.tolist())) + 1


def mapped(x, f, *args, **kwargs):
    return x.map_blocks(f, *args, dtype="f8", meta=np.empty((0, 0)), **kwargs)


#: Ways to an array that is `w`, which is written to between two computes.
WAYS = {
    "list": lambda x, w: mapped(x, lambda b, a: b * a[0] + 1, [w]),
    "nested": lambda x, w: mapped(x, lambda b, a: b * a["k"][0] + 1, {"k": (w, 2)}),
    "keyword list": lambda x, w: mapped(x, lambda b, a=None: b * a[0] + 1, a=[w]),
    "partial": lambda x, w: mapped(x, functools.partial(lambda b, a: b * a[0] + 1, a=[w])),
    "object": lambda x, w: mapped(x, lambda b, p: b * p.w + 1, Held(w)),
    "tuple": lambda x, w: mapped(x, lambda b: b * TUPLE[0] + 1),
    "function": lambda x, w: mapped(x, lambda b, f: f(b), by_global_written),
    "default function": lambda x, w: mapped(x, lambda b, f=by_global_written: f(b)),
    "recursive": lambda x, w: mapped(x, recursive, 2),
    "block_id": lambda x, w: mapped(x, lambda b, block_id=None: b * w + block_id[0]),
    "block_info": lambda x, w: mapped(
        x, lambda b, block_info=None: b * w + block_info[0]["chunk-location"][0]
    ),
    "text": lambda x, w: mapped(x, by_text),
    "sum": lambda x, w: mapped(x, lambda b, a: b * a.sum() + float(a[1]), w),
    "sum of a list": lambda x, w: mapped(x, lambda b, a: b * a[0].sum() + 1, [w]),
    "sum of a global": lambda x, w: mapped(x, lambda b: b * WRITTEN.sum() + 1),
    "condition": lambda x, w: mapped(x, lambda b, a: b * 2 if a.max() > 3 else b + 1, w),
    "one element": lambda x, w: mapped(x, lambda b, a: b * a + 1, w[:1]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_captured_array_written_between_computes_is_seen(scheduler, monkeypatch, way):
    """However a function comes by an array: what it does is what Dask does, each time."""
    w = np.arange(1.0, 7.0)
    for name in ("WRITTEN", "TUPLE"):
        monkeypatch.setitem(globals(), name, (w, 1) if name == "TUPLE" else w)
    y = WAYS[way](x(), w)
    for k in range(4):
        w[:] = np.arange(1.0, 7.0) * k + k * k
        np.testing.assert_allclose(y.compute(), y.compute(scheduler="sync"), rtol=1e-14)


def puts(b, w):
    w[0] = 9.0
    return b * 2 + 1


def puts_in_list(b, a):
    a[0][0] = 9.0
    return b * 2 + 1


def puts_through(b):
    t = np.ascontiguousarray(WRITTEN)
    t[0] = 9.0
    return b * t


@pytest.mark.parametrize("way", [
    lambda x, w: x.map_blocks(puts, w, dtype="f8", meta=np.empty((0, 0))),
    lambda x, w: x.map_blocks(puts_in_list, [w], dtype="f8", meta=np.empty((0, 0))),
    lambda x, w: x.map_blocks(puts_through, dtype="f8", meta=np.empty((0, 0))),
])  # fmt: skip
def test_functions_write_to_captured_arrays_at_run_time(scheduler, monkeypatch, way):
    """The function writes when its task runs, and not while it is traced."""
    w = np.zeros(6)
    monkeypatch.setitem(globals(), "WRITTEN", w)
    y = way(x(), w)
    for _ in range(3):
        w[0] = 0
        scheduler.plan(y)
        assert w[0] == 0
        y.compute()
        assert w[0] == 9


@pytest.mark.parametrize("fuse", [True, False])
def test_function_arguments_are_called_by_tasks_alone(fuse):
    """`map_blocks` hands a function with `block_id` on: to look at it does nothing."""
    calls = []

    def counts(b, block_id=None):
        calls.append(block_id)
        return b + block_id[0]

    def makes(block_id=None):
        calls.append(block_id)
        return np.full((3, 6), block_id[0])

    meta = np.empty((0, 0))
    with Scheduler("cpu:2", fuse_least=0, fuse=fuse) as s:
        y = mapped(x(), counts)
        z = da.map_blocks(makes, chunks=((3, 3), (6,)), dtype="f8", meta=meta)
        s.plan(y)
        s.plan(z)
        assert not calls
        np.testing.assert_array_equal(y.compute(), A + np.repeat([0, 1, 2], [3, 3, 2])[:, None])
        np.testing.assert_array_equal(z.compute(), np.repeat([0, 1], 3)[:, None] * np.ones(6))
        assert sorted(calls) == [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0)]


class Counted:
    """An object that counts how often it was called."""

    def __init__(self):
        self.n = 0

    def next(self):
        self.n += 1
        return self.n


#: Arguments that can be changed: what is made of one, and what changes it.
CHANGED = {
    "list": (lambda: [1], lambda o: o[0], lambda o: o.append(o.pop() + 4)),
    "length": (lambda: [1], len, lambda o: o.append(5)),
    "nested": (lambda: ({"a": [1]},), lambda o: o[0]["a"][0], lambda o: o[0]["a"].insert(0, 5)),
    "dictionary": (lambda: {"a": 1}, lambda o: o["a"], lambda o: o.update(a=5)),
    "derived": (lambda: collections.Counter(a=1), lambda o: o["a"], lambda o: o.update(a=5)),
    "set": (lambda: {1}, len, lambda o: o.update({2, 3})),
    "bytes": (lambda: bytearray(b"\1"), lambda o: o[0], lambda o: o.insert(0, 5)),
    "object": (Counted, lambda o: o.n + 1, Counted.next),
    "array of objects": (
        lambda: np.array([[1], [2, 3]], dtype=object), lambda o: o[0][0],
        lambda o: o[0].insert(0, 5),
    ),
}  # fmt: skip
TAKEN = {
    "position": lambda f, o: mapped(x(), f, o),
    "keyword": lambda f, o: mapped(x(), f, o=o),
    "partial": lambda f, o: mapped(x(), functools.partial(f, o=o)),
    "chain": lambda f, o: (mapped(x() + 1, f, o=o) * 2).sum(axis=0),
    "blockwise": lambda f, o: da.blockwise(f, "ij", x(), "ij", o=o, dtype="f8"),
}


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("what", CHANGED)
def test_arguments_changed_between_computes_are_seen(scheduler, what, taken):
    make, value, change = CHANGED[what]
    o = make()
    y = TAKEN[taken](lambda b, o=None: b * value(o) + 2, o)
    for _ in range(3):
        np.testing.assert_allclose(y.compute(), y.compute(scheduler="sync"), rtol=1e-14)
        change(o)


#: Functions that change what they are given, or draw from it.
USES = {
    "generator": (lambda: np.random.default_rng(0), lambda b, o: b * o.random() + 1),
    "old generator": (lambda: np.random.RandomState(0), lambda b, o: b * o.random_sample() + 1),
    "iterator": (lambda: itertools.count(1), lambda b, o: b * next(o) + 1),
    "object": (Counted, lambda b, o: b * o.next() + 1),
    "append": (list, lambda b, o: o.append(1) or b * 2 + 1),
    "pop": (lambda: list(range(9)), lambda b, o: b * o.pop() + 1),
    "dictionary": (dict, lambda b, o: o.update({len(o): 2}) or b * 2 + 1),
}


@pytest.mark.parametrize("taken", ["position", "partial"])
@pytest.mark.parametrize("use", USES)
def test_tasks_change_arguments_in_dasks_order(use, taken):
    """In Dask's order, with one device: nothing is done to it before, and nothing once for all."""
    make, f = USES[use]
    got, left = [], []
    for fuse in (True, False):
        with Scheduler("cpu:1", fuse_least=0, fuse=fuse):
            o = make()
            y = TAKEN[taken](f, o)
            got.append([y.compute(), y.compute()])
            left.append(f(1, o))
    np.testing.assert_array_equal(*got)
    assert left[0] == left[1]
    if use not in ("append", "dictionary"):
        assert not np.array_equal(*got[0])
