"""Inlining on GPUs: readers compute cheap values, and read stacks of thin blocks once."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask.array as da
from dask._task_spec import DataNode

import gpuscheduler

pytestmark = pytest.mark.gpu

DEVICES = ["cuda:0", "cuda:0,0", pytest.param("cuda:0,1", marks=pytest.mark.gpus(2))]
LIMITS = [None, 600_000]
R = np.random.default_rng(0)
A, B = R.standard_normal((96, 128)), R.standard_normal((96, 128))
S = R.standard_normal((20, 32, 48))
S[3, 5], S[4, 6], S[:, 7], S[5, 8] = np.nan, np.inf, -0.0, -np.inf


def x(array=A, chunks=(24, 64)):
    return da.from_array(cupy.asarray(array), chunks=chunks)


def kernels(scheduler, *collections):
    """Return how many steps compute something."""
    steps = scheduler.plan(*collections).steps
    return sum(not isinstance(s.task, DataNode) for s in steps)


def softmax(xp, a):
    e = xp.exp(a - a.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def correlation(xp, a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a * b).mean() / (a.std() * b.std())


def twice(xp, a, b):
    c = a * 2 + b
    return (c * c).sum() / abs(c).max()


def steps(xp, a):
    c = a * 2 + 1
    return (c[1:] - c[:-1]).sum(axis=0) + c.sum(axis=0)


FORMS = {
    "softmax": (softmax, (A.astype("f4"),)),
    "softmax, double": (softmax, (A,)),
    "correlation": (correlation, (A, B)),
    "twice": (twice, (A, B)),
    "steps": (steps, (A,)),
    "centred": (lambda xp, a: ((a - a.mean(axis=0)) ** 2).sum() / (a - a.mean(axis=0)).max(), (A,)),
    "many readers": (
        lambda xp, a: (lambda c: [c.sum(), c.max(), c.min(), (c * c).sum(), c.std()])(a / 3 - 1),
        (A,),
    ),
    "both wanted": (lambda xp, a: (lambda c: [c, (c * c).sum()])(a - 1), (A,)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", DEVICES)
def test_values_with_several_readers(devices, form, limit):
    make, arrays = FORMS[form]
    want = make(np, *arrays)
    with gpuscheduler.Scheduler(devices=devices, memory_limit=limit):
        for persist in (False, True):
            given = [x(a).persist() if persist else x(a) for a in arrays]
            found = make(da, *given)
            every = found if isinstance(found, list) else [found]
            for _ in range(3):
                got = da.compute(*every)
                for g, w in zip(got, want if isinstance(want, list) else [want], strict=True):
                    np.testing.assert_allclose(
                        cupy.asnumpy(g), w, rtol=1e-9 if w.dtype == "f8" else 1e-5, atol=1e-7
                    )


def stored(scheduler, y):
    """Return how many steps store a value as large as a block."""
    return sum(s.nbytes >= 24 * 64 * 8 for s in scheduler.plan(y).steps if not s.fixed)


def test_cheap_values_are_inlined_into_several_readers():
    with gpuscheduler.Scheduler("cuda:0") as s:
        a, b = x().persist(), x(B).persist()
        c = a * 2 + b
        assert stored(s, (c * c).sum() / abs(c).max()) == 0
        assert stored(s, correlation(da, a, b)) == 0
        d = da.exp(da.sin(a) * da.cos(b))  # in double precision: that takes long
        assert stored(s, (d * d).sum() / abs(d).max()) > 0


REDUCED = {
    "sum": lambda a: a.sum(axis=0), "mean": lambda a: a.mean(axis=0),
    "max": lambda a: a.max(axis=0), "min": lambda a: a.min(axis=0),
    "std": lambda a: a.std(axis=0), "any": lambda a: (a > 1).any(axis=0),
    "all": lambda a: (a > -1).all(axis=0), "argmax": lambda a: a.argmax(axis=0),
    "prod": lambda a: a.prod(axis=0), "count": lambda a: (a > 0).sum(axis=0),
    "kept": lambda a: a.sum(axis=0, keepdims=True) + a.mean(axis=0, keepdims=True),
    "anomaly": lambda a: a - a.mean(axis=0), "of two axes": lambda a: a.sum(axis=(0, 2)),
    "of all": lambda a: a.mean(),
}  # fmt: skip


KINDS = [(name, "f4") for name in REDUCED]
KINDS += [(name, "f8") for name in ("sum", "max", "std")]
KINDS += [(name, dtype) for dtype in ("f2", "i1", "u8", "?", "c8") for name in ("sum", "mean")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_reductions_of_stacks_of_thin_blocks(name, dtype):
    made = S if dtype in ("f8", "f4", "f2") else np.nan_to_num(S, posinf=3, neginf=-3) * 30
    array = made.astype("c16") * (1 + 1j) if dtype == "c8" else abs(made) if dtype == "u8" else made
    array = array.astype(dtype)
    reduce = REDUCED[name]
    with np.errstate(all="ignore"):
        want = reduce(array)
    if name == "argmax" and array.dtype.kind == "f":
        array = np.nan_to_num(array)  # Dask has an order of its own for NaN in several blocks
        want = reduce(array)
    with gpuscheduler.Scheduler("cuda:0,0"):
        for chunks in ((1, 16, 48), (3, 32, 48)):
            y = reduce(x(array, chunks))
            got = cupy.asnumpy(y.compute())
            assert got.dtype == want.dtype == y.dtype
            tolerance = {2: 2e-2, 4: 1e-4}.get(array.dtype.itemsize, 1e-9)
            tolerance = 1e-4 if dtype == "c8" else tolerance
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
            if want.dtype.kind == "f" and name in ("sum", "max", "min"):
                np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("name", ["sum", "mean", "max", "any"])
def test_stack_of_thin_blocks_is_read_once(name):
    with gpuscheduler.Scheduler("cuda:0") as s:
        z = x(S, (1, 32, 48)).persist()
        assert kernels(s, REDUCED[name](z)) == 1


@pytest.mark.gpus(2)
def test_each_gpu_reduces_its_own_blocks():
    with gpuscheduler.Scheduler("cuda:0,1") as s:
        z = x(S, (1, 32, 48)).persist()
        y = z.sum(axis=0)
        y.compute()
        moved = sum(n for (a, b), n in s.last.traffic.items() if a >= 0 and b >= 0)
        assert moved <= 4 * 32 * 48 * 8
