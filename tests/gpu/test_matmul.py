"""Products of matrices: what is added up of them is one task."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler.fusion.source import MatrixInput
from gpuscheduler.plan.matmul import MatmulSumTask, _uses_default_precision
from gpuscheduler.runtime.threads import Team

pytestmark = pytest.mark.gpu

DEVICES = ["cuda:0", "cuda:0,0", "cuda"]
RTOL = {"f4": 2e-5, "c8": 2e-5, "f2": 2e-2}
PRODUCTS = {
    "matmul": lambda m, x, y: x @ y.T,
    "dot": lambda m, x, y: x.dot(y.T),
    "tensordot": lambda m, x, y: m.tensordot(x, y, axes=(1, 1)),
    "tensordot, others first": lambda m, x, y: m.tensordot(x.T, y, axes=(0, 1)),
    "einsum": lambda m, x, y: m.einsum("ij,kj->ik", x, y),
    "einsum, turned": lambda m, x, y: m.einsum("ij,kj->ki", x, y),
    "and more": lambda m, x, y: (x @ y.T) * 2 + 1,
    "turned": lambda m, x, y: (x @ y.T).T,
    "two of them": lambda m, x, y: x @ y.T + y @ x.T,
    "twice": lambda m, x, y: (x @ y.T) + (x @ y.T) * 2,
    "of its own": lambda m, x, y: x.T @ x,
    "of what is computed": lambda m, x, y: (x * 2) @ y.T,
    "a part": lambda m, x, y: (x @ y.T)[3:20, ::2],
    "reduced": lambda m, x, y: (x @ y.T).max(axis=0),
    "a vector": lambda m, x, y: x @ y[0],
    "stacks": lambda m, x, y: m.stack([x, y]) @ y.T,
    "again": lambda m, x, y: x @ (y.T @ y),
}


def host(a):
    return a.get() if isinstance(a, cupy.ndarray) else a


def added_up(scheduler, collection):
    """How many products each task adds up that does."""
    tasks = [s.task for s in scheduler.plan(collection).steps]
    return [len(t.pairs) for t in tasks if type(t) is MatmulSumTask and len(t.pairs) > 1]


def matrices(dtype="f4", chunks=((8, 9), (7, 9)), shape=(60, 40)):
    rng = np.random.default_rng(0)
    sources = [(rng.random(shape) * 9).astype(dtype) for _ in chunks]
    if dtype[0] == "c":
        sources = [x + dtype_of(x)(1j) * x[::-1] for x in sources]
    every = zip(sources, chunks, strict=True)
    return sources, [da.from_array(x, chunks=c).to_backend("cupy").persist() for x, c in every]


def dtype_of(x):
    return x.dtype.type


@pytest.fixture(scope="module", params=DEVICES)
def scheduler(request):
    with gpuscheduler.Scheduler(request.param, check=True, fuse_least=0) as s:
        yield s


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_numpys(scheduler, name):
    (left, right), (x, y) = matrices()
    z, want = PRODUCTS[name](da, x, y), PRODUCTS[name](np, left, right)
    for _ in range(3):
        got = z.compute()
        assert isinstance(got, cupy.ndarray)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(host(got), want, rtol=2e-5)
    np.testing.assert_allclose(z.to_backend("numpy").compute(), want, rtol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["f8", "c8", "c16", "f2", "i4"])
def test_other_types(scheduler, dtype):
    (left, right), (x, y) = matrices(dtype)
    for name in ("matmul", "and more", "of its own"):
        z, want = PRODUCTS[name](da, x, y), PRODUCTS[name](np, left, right)
        got = z.compute()
        assert (got.dtype, got.shape) == (z.dtype, want.shape)
        np.testing.assert_allclose(host(got).astype(want.dtype), want, rtol=RTOL.get(dtype, 1e-12))
    sums = added_up(scheduler, x @ y.T)
    assert bool(sums) is (dtype in ("f8", "c8", "c16"))


def test_a_block_of_a_product_is_one_task():
    """Five products each: one task, and no kernel. What is done with their sum is one kernel more.

    x @ y.T: 8 by 9 blocks, and the inner axis in 5
    """
    with gpuscheduler.Scheduler("cuda:0", fuse_least=0) as scheduler:
        _, (x, y) = matrices()
        plan = scheduler.plan(x @ y.T)
        steps = [s for s in plan.steps if not s.fixed]
        assert [type(s.task) for s in steps] == [MatmulSumTask] * 72
        assert {len(s.task.pairs) for s in steps} == {5}
        assert set(plan.reasons.values()) == {"it multiplies matrices"}
        assert len(added_up(scheduler, (x @ y.T) * 2 + 1)) == 72
        assert scheduler.plan((x @ y.T) * 2 + 1).launch_count == 144


def test_a_product_of_two_factors_that_others_read_stays():
    """Its own value is wanted, too."""
    with gpuscheduler.Scheduler("cuda:0", fuse_least=0) as scheduler:
        (left, right), (x, y) = matrices(chunks=((60, 20), (60, 20)))
        a, b = x[:, :20] @ y[:, :20].T, x[:, 20:] @ y[:, 20:].T
        one, both = dask.compute(a, a + b, scheduler=scheduler.get)
        np.testing.assert_allclose(host(one), left[:, :20] @ right[:, :20].T, rtol=2e-5)
        np.testing.assert_allclose(host(both), left @ right.T, rtol=2e-5)


def test_no_more_is_read_at_once_than_there_is_room_for():
    """A task reads two blocks of 4 kB for each product: a twelfth of the memory has four."""
    with gpuscheduler.Scheduler("cuda:0", memory_limit="400 kB", fuse_least=0) as scheduler:
        (left, right), (x, y) = matrices(chunks=((32, 32), (32, 32)), shape=(64, 640))
        z = x @ y.T
        assert added_up(scheduler, z) == [4] * 5 * 4
        for _ in range(3):
            np.testing.assert_allclose(host(z.compute()), left @ right.T, rtol=2e-5)
        assert max(scheduler.last.peak.values()) <= 400_000


@pytest.mark.gpus(2)
def test_products_are_added_up_on_each_device():
    """Long and narrow: each device adds up those of its own rows, and one their sums."""
    with gpuscheduler.Scheduler("cuda", fuse_least=0) as scheduler:
        count = len(scheduler.hardware.machine.devices)
        (left, _), (x, _) = matrices(chunks=((10, 20), (10, 20)), shape=(160, 20))
        z = x.T @ x
        sums = [s for s in scheduler.plan(z).steps if type(s.task) is MatmulSumTask]
        assert {s.place for s in sums} == set(range(count))
        np.testing.assert_allclose(host(z.compute()), left.T @ left, rtol=2e-5)


@pytest.mark.parametrize("how", ["float64", "another shape", "NumPy's"])
def test_arrays_that_are_not_as_foreseen(how):
    """The products are those of the tasks themselves."""
    (left, right), _ = matrices("f8" if how == "float64" else "f4", shape=(6, 4))
    left = left[:4] if how == "another shape" else left
    xp = np if how == "NumPy's" else cupy
    values = {"a": xp.asarray(left), "b": xp.asarray(right)}
    sides = MatrixInput("a", (6, 4), False), MatrixInput("b", (6, 4), True)
    shape = (len(left), 1, 6)
    sums = MatmulSumTask(
        "z", shape, np.dtype("f4"), [sides, sides], [lambda v: v["a"] @ v["b"].T] * 2
    )
    got = sums(values)
    assert (type(got), got.shape) == (xp.ndarray, shape)
    np.testing.assert_allclose(host(got), 2 * (left @ right.T)[:, None], rtol=2e-5)


def test_parts_of_one_array_are_copied_once_before_their_products():
    """Six by six blocks of two arrays: each is read by six products, none of which slices."""
    n, c = 1536, 256
    left, right = (da.from_array(cupy.ones((n, n), "f4"), c, asarray=False) for _ in range(2))
    with gpuscheduler.Scheduler("cuda:0,0") as scheduler:
        plan = scheduler.plan(left @ right)
        products = [i for i, why in plan.why.items() if why == "it multiplies matrices"]
        assert len(products) == 6**3
        read = {j for i in products for j in plan.steps[i].inputs}
        assert not any(plan.steps[j].fixed for j in read)
        assert float((left @ right).sum().compute()) == n**3


STORED = {
    "rows": lambda a: a,
    "columns": cupy.asfortranarray,
    "turned": lambda a: cupy.ascontiguousarray(a.T).T,
    "parts of rows": lambda a: cupy.concatenate([a, a * 0], axis=1)[:, : a.shape[1]],
    "every other": lambda a: cupy.repeat(a, 2, axis=1)[:, ::2],
    "backwards": lambda a: cupy.ascontiguousarray(a[::-1])[::-1],
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("first", STORED)
@pytest.mark.parametrize("second", STORED)
def test_however_matrices_are_stored(first, second, dtype):
    rng = np.random.default_rng(0)
    a, b = (STORED[s](cupy.asarray(rng.random((12, 9)).astype(dtype))) for s in (first, second))
    sides = MatrixInput("a", a.shape, False), MatrixInput("b", b.shape, True)
    want = host(a) @ host(b).T
    for count in (1, 3):
        sums = MatmulSumTask("z", want.shape, np.dtype(dtype), [sides] * count, [])
        got = sums({"a": a, "b": b})
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(host(got), count * want, rtol=RTOL.get(dtype, 1e-12))


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
def test_products_are_launched_by_the_caller(devices, monkeypatch):
    """Single ones, too: no thread of a device is woken for them, and no handle is the caller's."""
    for chunks, count in (((20, 40), 1), ((20, 10), 4)):
        with gpuscheduler.Scheduler(devices, fuse_least=0) as scheduler:
            (left, right), (x, y) = matrices(chunks=(chunks, chunks))
            z = x @ y.T
            z.compute()
            steps = [s for s in scheduler.plan(z).steps if type(s.task) is MatmulSumTask]
            assert sum(len(s.task.pairs) for s in steps) == 9 * count
            with monkeypatch.context() as patch:
                patch.setattr(Team, "send", lambda *a: pytest.fail("a thread is asked"))
                patch.setattr(cupy.cuda, "get_cublas_handle", lambda: pytest.fail("the caller's"))
                np.testing.assert_allclose(host(z.compute()), left @ right.T, rtol=2e-5)


@pytest.mark.real
def test_another_precision_that_was_asked_for_is_cupys_business():
    """TensorFloat-32 has ten bits of a factor."""
    from cupy._core import _routines_linalg as linalg

    left, right = (np.random.default_rng(n).random((512, 512), "f4") for n in (0, 1))
    sides = MatrixInput("a", (512, 512), False), MatrixInput("b", (512, 512), False)
    sums = MatmulSumTask("z", (512, 512), np.dtype("f4"), [sides, sides], [])
    values, want = {"a": cupy.asarray(left), "b": cupy.asarray(right)}, 2 * (left @ right)
    before = linalg.get_compute_type(np.dtype("f4"))
    linalg.set_compute_type(np.dtype("f4"), linalg.COMPUTE_TYPE_TF32)
    try:
        assert not _uses_default_precision(np.dtype("f4"))
        rough = host(sums(values))
    finally:
        linalg.set_compute_type(np.dtype("f4"), before)
    assert _uses_default_precision(np.dtype("f4"))
    assert abs(host(sums(values)) - want).max() < 1e-3 < abs(rough - want).max() < 1


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_any_product(scheduler, data):
    draw = data.draw
    m, k, n = (draw(st.integers(1, 30)) for _ in range(3))
    cuts = [draw(st.integers(1, length)) for length in (m, k, n)]
    dtype = draw(st.sampled_from(["f4", "f8", "c16"]))
    rng = np.random.default_rng(m * k * n)
    left, right = (rng.random(s).astype(dtype) for s in ((m, k), (k, n)))
    turned = draw(st.booleans()), draw(st.booleans())
    x = da.from_array(left, chunks=(cuts[0], cuts[1])).to_backend("cupy")
    y = da.from_array(right, chunks=(cuts[1], cuts[2])).to_backend("cupy")
    if turned[0]:  # blocks that lie the other way round
        x = da.from_array(left.T.copy(), chunks=(cuts[1], cuts[0])).to_backend("cupy").T
    if turned[1]:
        y = y.map_blocks(cupy.asfortranarray)
    x, y = (a.persist() if draw(st.booleans()) else a for a in (x, y))
    z, want = x @ y, left @ right
    if draw(st.booleans()):
        z, want = (z + 1).sum(axis=0), (want + 1).sum(axis=0)
    for _ in range(2):
        np.testing.assert_allclose(host(z.compute()), want, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning")
@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_any_product_in_little_memory(data):
    """Where a few blocks have room: sums go on from what was added up before, blocks leave."""
    draw = data.draw
    side, sides = draw(st.sampled_from([16, 24])), [draw(st.integers(1, 6)) for _ in range(3)]
    m, k, n = (draw(st.integers(max(1, side * c - 7), side * c)) for c in sides)
    dtype = draw(st.sampled_from(["f4", "f8", "c8"]))
    rng = np.random.default_rng(m * k * n)
    left, right = (rng.random(s).astype(dtype) for s in ((m, k), (k, n)))
    limit = draw(st.integers(5, 16)) * max(4096, side**2 * left.itemsize)
    devices = draw(st.sampled_from(DEVICES))
    with gpuscheduler.Scheduler(devices, memory_limit=limit, check=True, fuse_least=0) as s:
        x, y = (da.from_array(a, chunks=side).to_backend("cupy") for a in (left, right))
        x, y = (a.persist() if draw(st.booleans()) else a for a in (x, y))
        z, want = x @ y, left @ right
        if draw(st.booleans()):
            z, want = z * 2 + 1, want * 2 + 1
        for _ in range(2):
            np.testing.assert_allclose(z.to_backend("numpy").compute(), want, rtol=1e-4)
            assert all(s.last.peak[d] <= limit for d in s.hardware.machine.devices)


# ---- small integers with few columns


SKINNY = {
    "x @ w": lambda x, w, y: x @ w,
    "x.T @ y": lambda x, w, y: x.T @ y,
    "w.T @ x.T": lambda x, w, y: w.T @ x.T,
    "y.T @ x": lambda x, w, y: y.T @ x,
    "dot": lambda x, w, y: x.dot(w),
    "and more": lambda x, w, y: (x @ w) * 2 + 1,
}


def skinny(dtype, factor, columns=20, shape=(300, 200)):
    rng = np.random.default_rng(1)
    kind = np.dtype(dtype)
    x = rng.random(shape) < 0.5 if kind.kind == "b" else rng.integers(
        np.iinfo(kind).min, np.iinfo(kind).max, shape, dtype=kind, endpoint=True
    )  # fmt: skip
    w, y = (rng.standard_normal((n, columns)).astype(factor) for n in shape[::-1])
    lazy = [
        da.from_array(v, chunks=c).to_backend("cupy").persist()
        for v, c in ((x, (70, 64)), (w, (64, -1)), (y, (70, -1)))
    ]
    return (x, w, y), lazy


@pytest.mark.parametrize("devices", DEVICES[:2])
@pytest.mark.parametrize("name", SKINNY)
@pytest.mark.parametrize(
    ("dtype", "factor"), [("u1", "f8"), ("i1", "f4"), ("?", "f8"), ("u2", "f4")]
)
def test_small_integers_with_few_columns_are_one_sum(devices, name, dtype, factor):
    plain, lazy = skinny(dtype, factor)
    with gpuscheduler.Scheduler(devices) as s:
        product = SKINNY[name](*lazy)
        tasks = [step.task for step in s.plan(product).steps]
        assert any(type(task) is MatmulSumTask for task in tasks)
        got = host(product.compute())
    want = SKINNY[name](*[a.astype("f8") for a in plain])
    assert got.dtype == np.result_type(dtype, factor)
    size = abs(want).max()
    np.testing.assert_allclose(got, want, atol=size * (1e-13 if factor == "f8" else 3e-7))


@pytest.mark.parametrize("columns", [33, 64])
def test_more_columns_are_the_librarys(columns):
    plain, (x, w, _) = skinny("u1", "f8", columns)
    with gpuscheduler.Scheduler("cuda:0") as s:
        assert not added_up(s, x @ w)
        np.testing.assert_allclose(host((x @ w).compute()), plain[0] @ plain[1], atol=1e-9)


@pytest.mark.parametrize("devices", DEVICES[:2])
def test_svd_compressed_of_small_integers(devices):
    (x, *_), _ = skinny("u1", "f8")
    d = da.from_array(x, chunks=(70, 200)).to_backend("cupy").persist()
    with gpuscheduler.Scheduler(devices):
        _, s, _ = da.linalg.svd_compressed(d, 3, n_power_iter=2, seed=0)
        got = host(s.compute())
    want = np.linalg.svd(x.astype("f8"), compute_uv=False)[:3]
    np.testing.assert_allclose(got, want, rtol=0.05)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


@pytest.mark.real
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "?"])
@pytest.mark.parametrize("columns", [1, 8, 20, 32])
@pytest.mark.parametrize("shape", [(300, 256), (1000, 130), (5000, 20000)])
def test_kernels_multiply_small_integers(monkeypatch, shape, columns, dtype, turned):
    from gpuscheduler.plan import skinny as launched

    monkeypatch.setattr(launched, "FEWEST", 0)
    monkeypatch.setattr(launched, "_convert_and_multiply", None)  # none is converted
    rng = np.random.default_rng(2)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        x = cupy.asarray(rng.random(shape) < 0.5)
    else:
        limits = np.iinfo(kind)
        x = cupy.asarray(rng.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True))
    x = x.T if turned else x
    for factor in ("f4", "f8"):
        w = cupy.asarray(rng.standard_normal((x.shape[1], columns)).astype(factor))
        got = launched.multiply_skinny(x, w)
        want = x.astype("f8") @ w.astype("f8")
        assert float(abs(got - want).max()) <= 1e-13 * float(abs(want).max()) * x.shape[1] ** 0.5
        got = launched.multiply_skinny(w.T, x.T)
        assert float(abs(got - want.T).max()) <= 1e-13 * float(abs(want).max()) * x.shape[1] ** 0.5
