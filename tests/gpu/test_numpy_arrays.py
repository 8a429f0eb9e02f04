"""NumPy's arrays on GPUs give what Dask's threads would give.

So do the arrays that called functions get to see.
"""

import pickle
import threading
import warnings
from functools import partial

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from dask.base import collections_to_expr, flatten
from dask.callbacks import Callback
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import GpuUnused, PlanError
from gpuscheduler.cli import commands
from gpuscheduler.devices.cuda.kernel_code import CompileFailed, KernelCode
from gpuscheduler.devices.cuda.kernels import Kernels
from gpuscheduler.fusion.residency import HostTask
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.pipeline import choice, numpy_arrays
from tests.support.strategies import EXAMPLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused"),
]

NUMPY = {"array.backend": "numpy"}


def called(block):
    """The block sorted, by a function that neither kernels nor libraries of GPUs compute."""
    rows = block.reshape(-1, block.shape[-1]).tolist()
    return np.array([sorted(row) for row in rows], block.dtype).reshape(block.shape)


RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal((96, 120)).astype("f4")
WHOLE = RANDOM.integers(-9, 9, (96, 120))


@pytest.fixture(params=["cuda:0", "cuda:0,0"])
def gpus(request):
    with (
        gpuscheduler.Scheduler(request.param, numpy="gpu", check=True) as s,
        dask.config.set(NUMPY),
    ):
        yield s


@pytest.fixture
def gpu():
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu", check=True) as s, dask.config.set(NUMPY):
        yield s


@pytest.fixture
def auto(monkeypatch):
    """Chooses by seconds alone, which the test sets: (seconds on GPUs, seconds on the host)."""
    monkeypatch.setattr(choice, "LEAST_BYTES", 0)
    monkeypatch.setattr(choice, "LEAST_BLOCK", 0)
    monkeypatch.setattr(choice, "LEAST_SECONDS", 0)
    foreseen = [1.0, 10.0]
    monkeypatch.setattr(choice.GpuWork, "seconds", lambda *_: foreseen[0])
    monkeypatch.setattr(choice.HostWork, "seconds", lambda *_: foreseen[1])
    with gpuscheduler.Scheduler("cuda:0", check=True) as s, dask.config.set(NUMPY):
        s.foreseen = foreseen
        yield s


def blocks(array=A, chunks=(32, 40)):
    return da.from_array(array, chunks=chunks)


def on_gpus(s):
    return not s.last.where


def same(got, wanted, rtol=1e-5):
    """Types, dtypes, shapes, and numbers up to rounding."""
    assert type(got) is type(wanted)
    if isinstance(wanted, (tuple, list)):
        for a, b in zip(got, wanted, strict=True):
            same(a, b)
        return
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    if wanted.dtype.kind in "fc":
        # what is left of large terms that cancel has the rounding of these
        sizes = np.abs(np.asarray(np.ma.filled(wanted, 0)))
        scale = float(np.max(sizes, initial=0, where=np.isfinite(sizes)))
        atol = max(rtol * 10, 8 * float(np.finfo(wanted.dtype).eps) * scale)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)
    else:
        np.testing.assert_array_equal(got, wanted)
    if isinstance(got, np.ndarray):
        assert got.flags.writeable


PROGRAMS = {
    "a number": lambda x: x.sum(),
    "numbers": lambda x: da.stack([x.min(), x.max()]),
    "a mean": lambda x: x.mean(),
    "a deviation": lambda x: x.std(axis=0),
    "turned": lambda x: (x[:, :96] + x[:, :96].T).max(axis=1),
    "blocks": lambda x: da.exp(-x),
    "one block": lambda x: (x + 1).rechunk(-1),
    "one row": lambda x: (x + 1).sum(axis=0).rechunk(-1),
    "made": lambda x: da.ones((50, 60), chunks=(20, 60)).sum(axis=0) + da.arange(60, chunks=60),
    "a mask": lambda x: x[x > 0.5],
    "places": lambda x: x.argmax(axis=1),
    "one place": lambda x: x.argmin(),
    "a scan": lambda x: x.cumsum(axis=1),
    "parts": lambda x: x[::2, 3:],
    "a row": lambda x: x[5],
    "an element": lambda x: x[3, 4],
    "an element of a kernel's": lambda x: (x + 1)[3, 4],
    "as it is": lambda x: x,
    "integers": lambda x: (x * 3).astype("i4") // 2,
    "booleans": lambda x: (x > 0) & (x < 1),
    "complex": lambda x: (x + 1j) * 2,
    "rounded to halves": lambda x: x.astype("f2") + np.float16(1),
    "sorted": lambda x: x.rechunk((32, -1)).map_blocks(np.sort) + 1,
    "transformed": lambda x: abs(da.fft.rfft(x.rechunk((32, -1)), axis=1)),
    "a product": lambda x: x @ x.T,
    "factors": lambda x: da.linalg.svd(x.rechunk((32, -1)).T[:, :32].rechunk((40, 32)))[1],
    "unique": lambda x: da.unique((x * 3).astype(int)),
    "a histogram": lambda x: da.histogram(x, bins=9, range=(-2, 2))[0],
    "percentiles": lambda x: da.percentile(x.ravel(), [10, 50]),
    "objects": lambda x: x.astype(object).map_blocks(lambda b: b * 2).astype("f4").sum(),
    "dates": lambda x: (x * 100).astype("m8[s]").max(),
    "texts": lambda x: (x * 9).astype(int).astype("U3"),
    "masked": lambda x: da.ma.masked_greater(x, 0).sum(axis=0),
    "big-endian": lambda x: x.astype(">f4") + 1,
    "several": lambda x: da.concatenate([x.min(axis=0), x.max(axis=0), x.sum(axis=0)]),
    "overlapping": lambda x: x.map_overlap(lambda b: b * 2, depth=1, boundary="reflect"),
    "a table": lambda x: x.map_blocks(lambda b, t: b + t[:, None], np.arange(32.0)[:32]),
    "a big table": lambda x: x * np.arange(120 * 200, dtype="f4")[: 120 * 96].reshape(96, 120),
    "a turned table": lambda x: x + np.asfortranarray(A),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_dasks_threads(gpus, name):
    c = PROGRAMS[name](blocks())
    same(c.compute(), c.compute(scheduler="threads"))
    assert on_gpus(gpus)
    assert gpus.last.coverage is not None
    same(c.compute(), c.compute(scheduler="threads"))  # by the plan that is kept


@pytest.mark.parametrize("name", ["a number", "blocks", "places", "one block", "a mask"])
def test_results_of_alike_collections(gpus, name, planned):
    """Of a template: with other data, and other names."""
    for n in range(3):
        c = PROGRAMS[name](blocks(A + n))
        same(c.compute(), c.compute(scheduler="threads"))
    assert on_gpus(gpus)
    assert len(planned) <= 3  # a graph may be read twice


def test_large_results_are_new_arrays_in_pinned_memory(gpu):
    a = np.ones((400, 400))
    x = da.from_array(a, chunks=200)
    first, second = (x + 1).compute(), (x + 1).compute()
    assert type(first) is np.ndarray
    first[:] = 7
    assert (second == 2).all()
    assert (x.compute() == 1).all()
    assert not np.shares_memory(x.compute(), a)


def test_arrays_of_any_layout(gpus):
    turned = np.asfortranarray(A)
    cube = RANDOM.random((12, 16, 20))
    layouts = {
        "F": turned, "gaps": np.repeat(A, 2, axis=1)[:, ::2], "F, gaps": turned[::2, ::3],
        "reversed": A[::-1, ::-1], "repeated": np.broadcast_to(A[0], A.shape),
        "turned cube": cube.transpose(0, 2, 1), "no element": A[:0], "0-d": np.array(3.0),
    }  # fmt: skip
    for name, array in layouts.items():
        for scale in (1, 40):  # small and large blocks
            x = da.from_array(np.concatenate([array] * scale) if array.ndim else array, chunks=-1)
            for c in (x + 1, (x * 2).sum(), x.map_blocks(np.sort) if array.ndim else x):
                got, wanted = c.compute(), c.compute(scheduler="threads")
                assert (name, type(got)) == (name, type(wanted))
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-3)


# ---- what called functions see


class Seen:
    """What a function that is called on each block has been given."""

    def __init__(self):
        self.facts, self.orders, self.lock = {}, {}, threading.Lock()
        self.exact = True  # whether no kernel comes before: what one makes is in C order

    def __call__(self, block, number, block_info=None):
        where = None if block_info is None else block_info[0]["chunk-location"]
        flags = block.flags
        fact = type(block), block.dtype.str, block.shape, flags.writeable
        with self.lock:
            self.facts[number, where] = fact
            self.orders[number, where] = flags.c_contiguous, flags.f_contiguous
        return block


def elementwise(draw, x):
    return draw(st.sampled_from([
        lambda x: x + 1, lambda x: x * x, abs, lambda x: x > 0, lambda x: x.astype("i2"),
        lambda x: da.where(x > 0, x, -x), lambda x: x.T, lambda x: x[::2], lambda x: x[:, 1:],
    ]))(x)  # fmt: skip


def reduced(draw, x):
    return draw(st.sampled_from([
        lambda x: x - x.mean(), lambda x: x + x.sum(axis=0), lambda x: x.cumsum(axis=0),
        lambda x: x.rechunk((7, 9)), lambda x: x - x.max(axis=1, keepdims=True),
        lambda x: da.concatenate([x, x + 1]),
    ]))(x)  # fmt: skip


@st.composite
def programs(draw):
    """A random program with functions in it that are called: a function of an array and of what
    they tell."""
    steps = draw(st.lists(st.sampled_from([elementwise, reduced, "call", "sort"]), max_size=6))
    order = draw(st.sampled_from("CF"))
    dtype = draw(st.sampled_from(["f4", "f8", "i4", "u1"]))
    chunks = draw(st.sampled_from([(8, 9), (20, 24), (5, 24)]))
    array = np.array(RANDOM.integers(0, 9, (20, 24)), dtype=dtype, order=order)
    x = da.from_array(array, chunks=chunks)
    told, fused = [], False
    for step in [*steps, "call"]:
        if step == "call":
            told.append(Seen())
            told[-1].exact = not fused
            x = x.map_blocks(told[-1], len(told), dtype=x.dtype, meta=x._meta)
        elif step == "sort":
            x = x.map_blocks(np.sort, dtype=x.dtype, meta=x._meta)
        else:
            x = x.astype("i2") if x.dtype == bool else x  # NumPy subtracts no booleans
            x, fused = step(draw, x), True
    return x, told


@settings(
    max_examples=EXAMPLES, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(programs())
def test_called_functions_see_what_dasks_threads_give_them(gpu, program):
    x, told = program
    wanted = x.compute(scheduler="threads")
    there = [(dict(seen.facts), dict(seen.orders)) for seen in told]
    for seen in told:
        seen.facts.clear()
    got = x.compute()
    assert on_gpus(gpu)
    same(got, wanted)
    for seen, (facts, orders) in zip(told, there, strict=True):
        assert seen.facts == facts
        assert not seen.exact or seen.orders == orders


def test_a_called_function_gets_scalars_where_numpy_has_some(gpu):
    """Not arrays without axes, of which some functions make something else."""
    kinds = []

    def told(value):
        kinds.append(type(value))
        return value

    total = blocks().sum()
    same(dask.delayed(told)(total).compute(), total.compute(scheduler="threads"))
    assert set(kinds) == {np.float32}


def summed(told, part, axis, keepdims):
    return np.sum(told(part), axis=axis, keepdims=keepdims)


#: How functions of users get values of an array: functions of the function and of the array.
WAYS = {
    "a gufunc": lambda f, x: da.apply_gufunc(
        lambda b: f(b), "(i)->(i)", x.rechunk({1: -1}), output_dtypes=x.dtype
    ),
    "a gufunc of numbers": lambda f, x: da.apply_gufunc(
        lambda b: f(b).sum(-1), "(i)->()", x.rechunk({1: -1}), output_dtypes=float
    ),
    "a reduction": lambda f, x: da.reduction(
        x, partial(summed, f), partial(summed, f), axis=0, dtype=float, split_every=2
    ),
    "parts of a reduction": lambda f, x: da.reduction(
        x, partial(np.max), lambda parts, axis, keepdims: len(f(parts)), concatenate=False,
        dtype=int, axis=(0, 1),
    ),
    "a number": lambda f, x: x.map_blocks(lambda b, s: (f(s), b)[1], x.max(), dtype=x.dtype),
    "a mean": lambda f, x: x.map_blocks(lambda b, s: (f(s), b)[1], x.mean(), dtype=x.dtype),
    "an element": lambda f, x: x.map_blocks(lambda b, s: (f(s), b)[1], x[0, 0], dtype=x.dtype),
    "a row": lambda f, x: x.map_blocks(lambda b, s: (f(s), b)[1], x[:1], dtype=x.dtype)
    if x.numblocks[0] == 1 else dask.delayed(f)(x[:1]),
    "edges": lambda f, x: x.map_overlap(lambda b: f(b), depth=1, boundary="reflect"),
    "lists": lambda f, x: da.blockwise(
        lambda parts: f(parts)[0], "ij", x, "ik", new_axes={"j": 1}, dtype=float,
        concatenate=None, meta=np.empty((0, 0)),
    ).map_blocks(lambda b: np.ones((1, 1)), dtype=float, chunks=(1, 1)),
    "a whole array": lambda f, x: dask.delayed(f)(x),
    "a block": lambda f, x: dask.delayed(f)(x.to_delayed()[0, 0]),
    "containers": lambda f, x: dask.delayed(f)([x.sum(), {"a": (x.max(), x[0])}]),
}  # fmt: skip


def facts_of(value):
    """What a function may learn of a value, other than its elements and its order in memory."""
    if isinstance(value, dict):
        return {k: facts_of(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [facts_of(v) for v in value]
    if isinstance(value, np.ndarray):
        return np.ndarray, type(value), value.dtype.str, value.shape, value.flags.writeable
    return type(value)


@settings(
    max_examples=max(10, EXAMPLES // 3), deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(st.data(), st.sampled_from(sorted(WAYS)))
def test_whatever_calls_a_function_gives_it_what_dasks_threads_give(gpu, data, way):
    dtype, chunks = (
        data.draw(st.sampled_from(["f4", "f8", "i4"])),
        data.draw(st.sampled_from([7, 24])),
    )
    x = da.from_array(RANDOM.integers(0, 9, (20, 24)).astype(dtype), chunks=chunks)
    for step in data.draw(st.lists(st.sampled_from([elementwise, reduced]), max_size=3)):
        x = step(data.draw, x.astype("i2") if x.dtype == bool else x)
    seen, lock = [], threading.Lock()

    def told(value):
        with lock:
            seen.append(repr(facts_of(value)))
        return value

    c = WAYS[way](told, x)
    both = []
    for scheduler in ("threads", gpu):
        seen.clear()
        value = c.compute(scheduler=scheduler)
        both.append((sorted(seen), repr(facts_of(value))))
    assert both[0] == both[1]


SCALARS = {
    "a sum": lambda s: s,
    "a type": lambda s: s.astype("f8"),
    "a view": lambda s: s.T,
    "an axis less": lambda s: s[None][0],
    "rounded": lambda s: s.round(2),
    "chosen": lambda s: da.where(s > 0, s, s + 1),
    "called": lambda s: s.map_blocks(lambda b: b * (2 if isinstance(b, np.ndarray) else 3)),
    "passed on": lambda s: s.map_blocks(lambda b: b),
    "an array": lambda s: s.map_blocks(lambda b: np.asarray(b)),
    "an axis more": lambda s: s.map_blocks(lambda b: np.array([b, b]), chunks=(2,), new_axis=0),
    "an element": lambda s: blocks()[0, 0],
    "an element of a kernel's": lambda s: (blocks() + 1)[3, 3],
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_beside_other_results(gpu, name):
    """Alone, with arrays, and with what is no array: then Dask has a step of its own for each."""
    c = SCALARS[name](blocks().sum())
    for others in ((), (blocks().sum(), blocks() + 1), (dask.delayed(3), blocks().max() > 1)):
        got = dask.compute(c, *others)
        assert on_gpus(gpu)
        wanted = dask.compute(c, *others, scheduler="threads")
        assert [type(v) for v in got] == [type(v) for v in wanted]
        same(got[0], wanted[0], rtol=1e-4)
    kind = dask.delayed(type)(c)  # what a function is given
    assert kind.compute() is kind.compute(scheduler="threads")


@pytest.mark.parametrize(
    "function",
    [np.asarray, np.asanyarray, lambda b: np.asarray(b), lambda b: b[1:], lambda b: b.T,
     lambda b: np.asarray(b)[::2], lambda b: (b, np.atleast_2d(b))[1], lambda b: b],
)  # fmt: skip
@pytest.mark.parametrize("kernel", [False, True])
def test_functions_that_take_views_get_no_cupy_arrays(gpu, function, kernel):
    x = blocks() + 1 if kernel else blocks()
    y = x.map_blocks(function, dtype=x.dtype, meta=x._meta)
    z = y.map_blocks(np.sort, dtype=x.dtype, meta=x._meta)  # it is called, with what was made
    expr = collections_to_expr([y, z], True).optimize()
    keys = list(flatten([y.__dask_keys__(), z.__dask_keys__()]))
    with warnings.catch_warnings(record=True) as said:
        values = gpu.get(expr, keys)
    assert on_gpus(gpu)
    assert [str(w.message) for w in said if not issubclass(w.category, GpuUnused)] == []
    for got, wanted in zip(values, dask.get(expr, keys), strict=True):
        assert type(got) is type(wanted)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "function",
    [lambda b: b @ b.T, lambda b: b.T @ b, lambda b: np.inner(b, b[:3]), np.sort, np.ravel],
)
def test_blocks_of_other_shapes_than_the_collection_says(gpu, function):
    x = blocks(A[:, :96], (32, 48))
    y = x.map_blocks(function, dtype=x.dtype, meta=x._meta)
    expr = collections_to_expr([y], True).optimize()
    keys = list(flatten(y.__dask_keys__()))
    for got, wanted in zip(gpu.get(expr, keys), dask.get(expr, keys), strict=True):
        same(got, wanted, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The inplace keyword", "ignore:Computing mixed collections")
def test_dataframes_are_not_asked_for_what_arrays_have(gpu, tmp_path):
    """Their expressions look for a column of each name, and some fail at that."""
    pytest.importorskip("pyarrow")
    dd, pd = pytest.importorskip("dask.dataframe"), pytest.importorskip("pandas")
    frame = pd.DataFrame({"hlg": np.arange(20.0), "walk": 1})
    x = dd.from_pandas(frame, npartitions=2)
    assert float(x.hlg.sum().compute()) == 190
    x.to_parquet(str(tmp_path / "x"))
    back = dd.read_parquet(str(tmp_path / "x"))
    written = back.to_parquet(str(tmp_path / "y"), compute=False)
    assert dask.compute(back.hlg.sum(), blocks().max(), written)[0] == 190


def test_a_called_function_may_write_to_its_block(gpus):
    """It has one of its own, or one that all readers of the host share, as with Dask's threads."""

    def doubles(block):
        block *= 2
        return block

    x = (blocks(A.copy()) + 1).map_blocks(doubles) + 1
    wanted = (A + 1) * 2 + 1
    for _ in range(2):
        np.testing.assert_allclose(x.compute(), wanted, rtol=1e-6)
    kept = (blocks() + 1).persist()
    for _ in range(2):
        np.testing.assert_allclose(kept.map_blocks(doubles).compute(), (A + 1) * 2, rtol=1e-6)
    np.testing.assert_allclose(kept.compute(), A + 1, rtol=1e-6)


def test_an_array_of_the_caller_that_has_changed_is_read_again(gpu):
    b = np.zeros(20_000)
    y = da.zeros(20_000, chunks=-1).map_blocks(lambda z: z + b)
    assert y.sum().compute() == 0
    b += 1
    assert y.sum().compute() == 20_000


@pytest.mark.parametrize("error", ["a kernel that does not compile", "a kernel that is broken"])
def test_a_kernel_that_does_not_work_runs_as_its_functions_with_numpys_arrays(
    gpu, monkeypatch, error
):
    if error == "a kernel that is broken":
        monkeypatch.setattr(Kernels, "is_broken", lambda *_: True)
    else:

        def fails(*_, **__):
            raise CompileFailed("no such instruction")

        monkeypatch.setattr(KernelCode, "get_prepared", fails)
    kinds = []

    def told(block):
        kinds.append(type(block))
        return block

    first = ((blocks() + 1).map_blocks(told) * 2).sum(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for c in (first, first.sum(), (blocks() * 3)[blocks() > 0]):
            same(c.compute(), c.compute(scheduler="threads"))
    assert set(kinds) == {np.ndarray}


def test_errors_of_called_functions_are_raised_once(gpu):
    calls = []

    def fails(block):
        calls.append(1)
        raise ValueError(f"no {type(block).__name__}")

    x = (da.from_array(A, chunks=-1) + 1).map_blocks(fails, dtype=float, meta=np.empty((0, 0)))
    with pytest.raises(ValueError, match="no ndarray"):
        x.compute()
    assert len(calls) == 1


# ---- options


def test_gpu_only_names_what_is_no_kernel(monkeypatch):
    monkeypatch.setattr(choice, "MOST_CALLED", 1000)
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu-only") as s, dask.config.set(NUMPY):
        same(blocks().sum().compute(), blocks().sum().compute(scheduler="threads"))
        assert on_gpus(s)
        with pytest.raises(PlanError, match=r'numpy="gpu-only".*9 of called: it needs'):
            blocks().map_blocks(called).compute()


@pytest.mark.filterwarnings("default::gpuscheduler.errors.GpuUnused")
def test_gpu_warns_of_what_is_called_on_the_host():
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu") as s, dask.config.set(NUMPY):
        x = (blocks().map_blocks(called) + 1).sum()
        with pytest.warns(GpuUnused, match="on the host are 9 of"):
            x.compute()
        with warnings.catch_warnings(record=True) as said:
            x.compute()  # it was said
        assert not said
        assert 0 < s.last.coverage < 1


def test_host_touches_no_gpu(monkeypatch):
    with gpuscheduler.Scheduler("cuda:0", numpy="host") as s, dask.config.set(NUMPY):
        monkeypatch.setattr(s.hardware, "lease", None)
        same((blocks() + 1).compute(), A + np.float32(1))
        assert s.last.where
        assert s.last.coverage == 0
        assert "as asked" in str(s.explain(blocks() + 1))


def test_float_error_state_keeps_all_on_the_host(gpu):
    x = blocks(np.zeros((96, 120)))
    with np.errstate(divide="raise", invalid="raise"), pytest.raises(FloatingPointError):
        (1 / x).compute()
    assert np.isinf((1 / x).compute()).all()
    assert on_gpus(gpu)


def test_callbacks_and_caches_see_numpys_values_on_the_host(gpu):
    seen = []

    class Told(Callback):
        def _posttask(self, key, result, dsk, state, worker_id):
            seen.append(type(result))

    with Told():
        (blocks() + 1).sum().compute()
    assert gpu.last.where
    assert cupy.ndarray not in seen


def test_what_has_no_arrays_runs_on_the_host(gpu):
    names = dask.delayed(lambda: threading.current_thread().name)
    assert "cpu" in names().compute()
    assert gpu.last.where
    assert gpu.get({"a": 1, "b": (sum, ["a", "a"])}, "b") == 2
    assert "it has no arrays" in str(gpu.plan(names()))


def test_without_memory_for_host_threads_gpus_still_compute():
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu", host_memory=0) as s, dask.config.set(NUMPY):
        c = blocks().map_blocks(called).sum(axis=0)
        same(c.compute(), c.compute(scheduler="threads"), rtol=1e-4)
        assert on_gpus(s)


# ---- the choice


def test_auto_takes_gpus_where_they_are_faster(auto):
    c = da.exp(blocks()).sum()
    same(c.compute(), c.compute(scheduler="threads"))
    assert on_gpus(auto)
    assert auto.last.coverage == 1
    assert "on 1 GPU: they are faster" in str(auto.explain(c))
    auto.foreseen[:] = 8.0, 10.0
    c = da.exp(blocks(A + 1)).sum(axis=0)
    same(c.compute(), c.compute(scheduler="threads"))
    assert auto.last.where
    assert "the way to a GPU and back takes as long" in str(auto.explain(c))


def test_auto_leaves_small_work_to_the_host():
    with gpuscheduler.Scheduler("cuda:0") as s, dask.config.set(NUMPY):
        c = blocks().sum()
        c.compute()
        assert s.last.where
        assert "its arrays have" in str(s.plan(c))


def test_auto_leaves_graphs_to_the_host_where_called_functions_take_most(auto, monkeypatch):
    monkeypatch.setattr(choice, "MOST_CALLED", 1000)
    auto.foreseen[:] = 8, 10
    c = (blocks().map_blocks(called) + 1).sum()
    same(c.compute(), c.compute(scheduler="threads"), rtol=1e-4)
    assert auto.last.where
    assert "GPUs would save too little; functions are called" in str(auto.explain(c))


def test_auto_tries_the_other_side_where_runs_are_slow(auto):
    """A run takes more than twice as long as was foreseen for the host: the next is there."""
    auto.foreseen[:] = 1e-12, 1e-11
    c = da.exp(blocks()).sum(axis=0)
    sides = []
    for _ in range(4):
        same(c.compute(), c.compute(scheduler="threads"))
        sides.append(on_gpus(auto))
    assert sides[:3] == [True, True, False]
    assert "took" in str(auto.explain(c))


def test_memory_that_gpus_do_not_have(auto, monkeypatch):
    """The host has it: what was begun is done there."""
    limit = 400_000
    c = da.exp(da.from_array(RANDOM.random((300, 300)), chunks=-1)).sum(axis=0)
    with gpuscheduler.Scheduler("cuda:0", memory_limit=limit) as s:
        same(c.compute(), c.compute(scheduler="threads"))
        assert s.last.where
    with (
        gpuscheduler.Scheduler("cuda:0", memory_limit=limit, numpy="gpu-only"),
        pytest.raises(gpuscheduler.OutOfMemory),
    ):
        c.compute()


def test_spilling_gives_the_same(gpus):
    with gpuscheduler.Scheduler(gpus.options.devices, memory_limit=400_000, numpy="gpu") as s:
        x = blocks(RANDOM.random((400, 400)), chunks=80)
        y = x + 1
        c = (y - y.mean(axis=0)).map_blocks(called) + y.T
        same(c.compute(), c.compute(scheduler="threads"))
        assert on_gpus(s)


def test_a_long_run_on_the_host_says_why_once(auto, monkeypatch):
    monkeypatch.setattr(numpy_arrays, "_reason_given", False)
    monkeypatch.setattr(numpy_arrays, "LONG", 0.0)
    auto.foreseen[:] = 8.0, 10.0
    warnings.simplefilter("default", GpuUnused)
    with pytest.warns(GpuUnused, match="the way to a GPU and back takes as long"):
        blocks().sum().compute()
    with warnings.catch_warnings(record=True) as said:
        (blocks() + 1).sum().compute()
    assert not said


def test_comparing_finds_a_difference(gpu, monkeypatch):
    monkeypatch.setenv("GPUSCHEDULER_COMPARE", "1")
    c = (blocks() + 1).sum(axis=0)
    same(c.compute(), c.compute(scheduler="threads"))
    real = gpu._numpy.compute

    def wrong(request, last):
        values, took, chosen = real(request, last)
        return [v + 1 for v in values], took, chosen

    monkeypatch.setattr(gpu._numpy, "compute", wrong)
    with pytest.raises(gpuscheduler.SidesDiffer, match="other numbers on GPUs"):
        c.compute()


def test_plans_say_what_runs_where(gpu):
    x = blocks()
    text = str(gpu.explain(x.map_blocks(called) + 1))
    assert text.startswith('numpy="gpu": on 1 GPU: as asked')
    assert "it needs the values of an array (tolist)" in text
    plan = gpu.plan((x + 1).sum())
    kinds = {type(s.task) for s in plan.steps if not s.fixed and not s.sent}
    assert HostTask not in kinds
    assert KernelTask in kinds or len(kinds) == 1


# ---- persisted


def test_persisted_chunks_stay_on_gpus_and_are_numpys(gpus):
    x = (blocks() + 1).persist()
    chunks = [task.func for task in dict(x.dask).values()]
    assert all(chunk.resident for chunk in chunks)
    assert all(type(v.value) is cupy.ndarray for c in chunks for v in c.places.values())
    wanted = A + 1
    same(x.compute(), wanted)
    same(x.compute(scheduler="threads"), wanted)
    same(x.compute(scheduler="sync"), wanted)
    same(np.asarray(x), wanted)
    same(pickle.loads(pickle.dumps(x)).compute(scheduler="threads"), wanted)
    same(x.sum(axis=0).compute(), wanted.sum(axis=0))
    assert on_gpus(gpus)
    same((x[:50] * 2).compute(), wanted[:50] * 2)
    same(x.map_blocks(called).compute(), x.map_blocks(called).compute(scheduler="threads"))
    assert "cupy" not in repr(x)
    assert "cupy" not in x._repr_html_()


def test_arrays_of_the_host_go_to_gpus_when_they_are_persisted(gpus):
    x = blocks().persist()
    chunks = [task.func for task in dict(x.dask).values()]
    assert all(type(v.value) is cupy.ndarray for c in chunks for v in c.places.values())
    same(x.compute(), A)
    for n in range(3):
        same((x + n).sum().compute(), (x + n).sum().compute(scheduler="threads"))
    assert gpus.last.traffic.get((-1, 0), 0) == 0


def test_auto_keeps_what_is_persisted_on_gpus(monkeypatch):
    monkeypatch.setattr(choice, "LEAST_BYTES", 0)
    monkeypatch.setattr(choice, "LEAST_BLOCK", 0)
    with gpuscheduler.Scheduler("cuda:0", memory_limit=400_000) as s, dask.config.set(NUMPY):
        for x in (blocks().persist(), (blocks() + 1).persist()):
            chunks = [task.func for task in dict(x.dask).values()]
            assert all(type(v.value) is cupy.ndarray for c in chunks for v in c.places.values())
            same(x.sum(axis=0).compute(), x.sum(axis=0).compute(scheduler="threads"), rtol=1e-4)
            assert on_gpus(s)
            same((x * 2).compute(), x.compute(scheduler="threads") * 2)
            assert on_gpus(s)
        large = blocks(RANDOM.random((400, 400)), chunks=100).persist()
        assert s.last.where  # it would not fit
        same(large.compute(), large.compute(scheduler="threads"))


def test_persisted_numbers_are_numpys(gpu):
    total = blocks().sum().persist()
    same(total.compute(), blocks().sum().compute(scheduler="threads"))
    same(total.compute(scheduler="threads"), blocks().sum().compute(scheduler="threads"))


def test_values_of_called_functions_are_persisted_on_gpus(gpus):
    x = blocks().map_blocks(called).persist()
    same((x + 1).compute(), x.compute(scheduler="threads") + np.float32(1))
    objects = blocks().astype(object).persist()
    assert objects.compute()[3, 4] == A[3, 4]


def test_persisted_chunks_that_had_to_leave(gpus):
    with gpuscheduler.Scheduler(gpus.options.devices, memory_limit=200_000, numpy="gpu"):
        kept = [(blocks(RANDOM.random((120, 120)), chunks=60) + n).persist() for n in range(6)]
        sums = [float(x.sum().compute(scheduler="threads")) for x in kept]
        again = [float(x.sum().compute()) for x in kept]
        np.testing.assert_allclose(sums, again)


def test_persisted_arrays_meet_cupys(gpu):
    """In a graph with CuPy's own arrays, functions that are called get NumPy's of these."""
    x = (blocks() + 1).persist()
    both = x.map_blocks(cupy.asarray) + blocks().map_blocks(cupy.asarray)
    np.testing.assert_allclose(cupy.asnumpy(both.compute()), 2 * A + 1, rtol=1e-4)
    kinds = []

    def told(block):
        kinds.append(type(block))
        return block

    seen = x.map_blocks(told, meta=np.empty((0, 0), "f4"))
    total = dask.compute(seen.sum(), both.sum())
    np.testing.assert_allclose(float(total[0]), (A + 1).sum(), rtol=1e-4)
    assert set(kinds) == {np.ndarray}


def test_other_schedulers_get_numpys_values_after_it_is_closed():
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu"), dask.config.set(NUMPY):
        x = (blocks() + 1).persist()
    same(x.compute(scheduler="threads"), A + np.float32(1))
    same(x.sum(axis=0).compute(), (A + 1).sum(axis=0))


# ---- files


def test_blocks_of_files_go_to_gpus(gpus, tmp_path):
    a = RANDOM.random((200, 300))
    np.save(tmp_path / "a.npy", a)
    x = da.from_array(np.load(tmp_path / "a.npy", mmap_mode="r"), chunks=100)
    same((x + 1).sum(axis=0).compute(), (a + 1).sum(axis=0))
    assert on_gpus(gpus)
    same(x.map_blocks(called).compute(), x.map_blocks(called).compute(scheduler="threads"))
    both = da.concatenate([x.map_blocks(called), x + 1])
    same(both.compute(), both.compute(scheduler="threads"))
    kept = x.persist()
    same((kept + 1).sum().compute(), (x + 1).sum().compute(scheduler="threads"))


class MaskedFile:
    """Gives masked arrays, as variables of netCDF4 do, and says that these are plain."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, 2

    def __getitem__(self, index):
        return np.ma.masked_greater(self.array[index], 0.5)


def test_masks_of_blocks_of_files_are_kept(gpus):
    a = RANDOM.random((200, 200))
    x = da.from_array(MaskedFile(a), chunks=100, asarray=False, meta=np.empty((0, 0)))
    c = (x + 1).sum(axis=0)
    np.testing.assert_allclose(c.compute(), c.compute(scheduler="threads"))
    np.testing.assert_allclose(
        c.compute(), np.ma.masked_greater(a, 0.5).sum(axis=0) + (a <= 0.5).sum(axis=0)
    )


def test_results_are_written_to_files(gpus, tmp_path):
    zarr = pytest.importorskip("zarr")
    x = blocks(RANDOM.random((200, 300)), chunks=100)
    (x + 1).to_zarr(str(tmp_path / "z.zarr"))
    np.testing.assert_allclose(zarr.open(str(tmp_path / "z.zarr"))[:], (x + 1).compute())
    out = np.zeros((200, 300))
    da.store(x * 2, out)
    np.testing.assert_allclose(out, (x * 2).compute(scheduler="threads"))
    assert on_gpus(gpus)


def test_info_says_where_numpy_arrays_are_computed(capsys):
    with dask.config.set({"gpuscheduler.numpy": "gpu"}):
        commands.info("cuda:0", None)
    assert "NumPy arrays are computed on GPUs wherever they can be" in capsys.readouterr().out


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_repeated_runs_follow_their_launch_tape(devices):
    with gpuscheduler.Scheduler(devices, numpy="gpu") as s, dask.config.set(NUMPY):
        x = blocks().persist()
        for c in (da.exp(x).sum(), (x - x.mean(axis=0)).max()):
            wanted = c.compute(scheduler="threads")
            for _ in range(5):
                same(c.compute(), wanted, rtol=1e-4)
            assert [r.how for r in s.recorder.records()][-1] in ("tape", "replay")
        fresh = [(x + n).sum() for n in range(4)]
        for c in fresh:
            same(c.compute(), c.compute(scheduler="threads"), rtol=1e-4)


def test_xarrays_scores_are_numpys():
    """Group by month, rolling means: what examples/climate.py computes, on GPUs and on the host."""
    climate = pytest.importorskip("examples.climate", reason="xarray is not there")
    whole = climate.temperatures(120, 6)
    want = climate.scores(whole)
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu") as s, dask.config.set(NUMPY):
        lazy = climate.scores(whole.chunk(lat=3, time=60))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = lazy.compute()
        assert s.last.coverage > 0.5
    assert type(got.values) is np.ndarray
    np.testing.assert_allclose(got.values, want.values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reduce", ["sum", "max", "mean", "std"])
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (2, 2, 1), (29, 1)])
def test_blocks_of_one_row_beside_what_all_rows_give(gpus, rows, reduce):
    """What such a block gives disappears into what reads the block: both read it once."""
    whole = A[: sum(rows), :8]
    x = da.from_array(whole, chunks=(rows, 8))
    got = (x - getattr(x, reduce)(axis=0, keepdims=True)).compute()
    same(got, whole - getattr(whole, reduce)(axis=0, keepdims=True))
