"""Elements that lists of numbers take, in kernels."""

import os
import warnings

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import dask
import dask.array as da
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from tests.frontend.test_index_lists import LISTS, TAKES

from .test_executor import DEVICES, host

pytestmark = pytest.mark.gpu
EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "40"))
SOURCE = np.random.default_rng(0).random((60, 40))


@pytest.fixture(scope="module", params=DEVICES)
def scheduler(request):
    with gpuscheduler.Scheduler(request.param, check=True, fuse_least=0) as s:
        yield s


@pytest.mark.real
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(LISTS, st.lists(st.integers(0, 39), min_size=1, max_size=30), st.data())
def test_any_list_takes_what_numpy_takes(scheduler, rows, columns, data):
    chunks = data.draw(st.sampled_from([(60, 40), (20, 40), (7, 13), (25, 10)]))
    dtype = data.draw(st.sampled_from(["f4", "f8", "i2", "?", "c8", "u1", "f2"]))
    source = (SOURCE * 9).astype(dtype)
    x = da.from_array(source, chunks=chunks).to_backend("cupy")
    kept = data.draw(st.booleans())
    x = x.persist() if kept else x
    take = TAKES[data.draw(st.sampled_from(sorted(TAKES)))]
    z, want = take(x, rows, columns), take(source, rows, columns)
    behind = data.draw(st.sampled_from(["nothing", "sum", "largest", "chain", "turned", "itself"]))
    if behind == "sum":
        z, want = z.sum(axis=0, dtype="c16"), want.sum(axis=0, dtype="c16")
    elif behind == "largest" and dtype != "c8":
        z, want = z.max(axis=1), want.max(axis=1)
    elif behind == "chain":
        z, want = da.where(z == z[:1], z, z[-1:]), np.where(want == want[:1], want, want[-1:])
    elif behind == "turned":
        z, want = z.T, want.T
    elif behind == "itself":
        z, want = da.concatenate([z, z[::-1]]), np.concatenate([want, want[::-1]])
    for _ in range(2):  # the second time by what was learnt
        got = z.compute()
        assert isinstance(got, cupy.ndarray)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(host(got), want, rtol=1e-6)


def test_each_block_of_a_permutation_is_one_kernel():
    """Rows are read where they lie, once, by what sums them up."""
    source, order = np.arange(2.0**18).reshape(512, 512), np.random.default_rng(1).permutation(512)
    with gpuscheduler.Scheduler("cuda:0", check=True) as scheduler:
        x = da.from_array(source, chunks=(128, 256)).to_backend("cupy").persist()
        z = (x[order] * 2 + 1).sum(axis=1)
        plan = scheduler.plan(z)
        assert not any("shuffle" in str(s.key) for s in plan.steps)
        assert not plan.reasons
        np.testing.assert_allclose(host(z.compute()), (source[order] * 2 + 1).sum(axis=1))


ORDER = np.random.default_rng(2).permutation(60)
CASES = {
    "permutation": lambda x: x[ORDER],
    "sums": lambda x: (x[ORDER] * 2 + 1).sum(axis=0),
    "columns": lambda x: x[:, ORDER[ORDER < 40]].max(axis=1),
    "both": lambda x: x[ORDER][:, ORDER[ORDER < 40]].T - 1,
    "of a list": lambda x: x[np.sort(ORDER[:30])][ORDER[ORDER < 30][:17]] + x[:17],
    "of a permutation": lambda x: x[ORDER][np.roll(ORDER, 7)][ORDER].sum(axis=0),
    "again and again": lambda x: x[np.repeat(ORDER, 2)].mean(axis=1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "dtype"), [*[(n, "f4") for n in CASES], ("permutation", "?"), ("sums", "c16")]
)
def test_lists_without_any_order(scheduler, name, dtype):
    source = (SOURCE > 0.5) if dtype == "?" else SOURCE.astype(dtype)
    x = da.from_array(source, chunks=(25, 17)).to_backend("cupy").persist()
    want = CASES[name](source)
    for _ in range(2):
        got = CASES[name](x).compute()
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(host(got), want, rtol=1e-5)


@pytest.mark.parametrize("columns", [3, 5, 7, 9, 12, 20])
def test_no_kernel_has_more_arguments_than_can_be_written(columns):
    """Few elements are read one by one: a kernel of all would have an argument for each."""
    source = np.random.default_rng(3).random((24, 30))
    with (
        gpuscheduler.Scheduler("cuda:0", numpy="gpu", check=True),
        warnings.catch_warnings(record=True) as said,
        dask.config.set({"array.backend": "numpy"}),
    ):
        warnings.simplefilter("always")
        x = da.from_array(source, chunks=(8, 15))
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(30)[:columns]
            z = da.take(x, order, axis=1)
            for got, want in [(z.mean(), source[:, order].mean()), (z, source[:, order])]:
                np.testing.assert_allclose(got.compute(), want, rtol=1e-12)
    assert not [w.message for w in said if issubclass(w.category, RuntimeWarning)]
