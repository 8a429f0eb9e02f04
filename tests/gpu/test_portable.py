"""The array library computes NumPy's arrays on GPUs, and gives what it gives on the host."""

from __future__ import annotations

from operator import getitem
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import gpuscheduler
from gpuscheduler import array, linalg
from gpuscheduler.algorithms import tall_graph, tall_kernel
from gpuscheduler.fusion.portable import PortableTask
from gpuscheduler.fusion.residency import HostTask
from gpuscheduler.pipeline import choice, sides
from gpuscheduler.plan.machine import Machine
from tests.support.matrices import check_qr, square_matrix, tall_matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused"),
]

#: Functions of a tall matrix, a square one, a positive one, right sides, and a line of numbers.
FUNCTIONS = {
    "qr": lambda t, a, p, b, v: linalg.qr(t)[1],
    "svd": lambda t, a, p, b, v: linalg.svd(t)[1],
    "lstsq": lambda t, a, p, b, v: linalg.lstsq(t, t[:, :2])[0],
    "pinv": lambda t, a, p, b, v: linalg.pinv(t),
    "matrix_rank": lambda t, a, p, b, v: linalg.matrix_rank(t),
    "cond": lambda t, a, p, b, v: linalg.cond(t),
    "solve": lambda t, a, p, b, v: linalg.solve(a, b),
    "solve by columns": lambda t, a, p, b, v: linalg.solve(a, b, block_size=16),
    "solve, positive": lambda t, a, p, b, v: linalg.solve(p, b, assume_a="pos"),
    "solve, refined": lambda t, a, p, b, v: linalg.solve(a, b[:, 0], refine=True),
    "inv": lambda t, a, p, b, v: linalg.inv(a),
    "det": lambda t, a, p, b, v: linalg.det(a),
    "slogdet, sign": lambda t, a, p, b, v: linalg.slogdet(a)[0],
    "slogdet, logarithm": lambda t, a, p, b, v: linalg.slogdet(a, block_size=16)[1],
    "cholesky": lambda t, a, p, b, v: linalg.cholesky(p),
    "cholesky by columns": lambda t, a, p, b, v: linalg.cholesky(p, block_size=16),
    "sort": lambda t, a, p, b, v: array.sort(v),
    "argsort": lambda t, a, p, b, v: array.argsort(v),
    "sort of rows": lambda t, a, p, b, v: array.sort(a, axis=1),
    "median": lambda t, a, p, b, v: array.median(v, axis=0),
    "percentile": lambda t, a, p, b, v: array.percentile(v, [5, 95], axis=0),
    "unique": lambda t, a, p, b, v: array.unique(v),
    "searchsorted": lambda t, a, p, b, v: array.searchsorted(array.sort(v), b[:, 0]),
    "Dask's svd": lambda t, a, p, b, v: da.linalg.svd(t)[1],
    "Dask's svd, U": lambda t, a, p, b, v: da.linalg.svd(t)[0],
    "Dask's svd, V": lambda t, a, p, b, v: da.linalg.svd(t)[2],
}


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch):
    """Matrices of several blocks are not put into one."""
    monkeypatch.setattr(tall_graph, "SMALL", 0)


def arguments(seed=0, order="C"):
    rng = np.random.default_rng(seed)
    a = square_matrix(40, seed=seed)
    values = (
        tall_matrix(1200, 40, 100, seed=seed), a, a @ a.T + np.eye(40), a[:, :3].copy(),
        rng.integers(-99, 99, 5000) / 4,
    )  # fmt: skip
    chunks = [(300, -1), (15, 15), (15, 15), (15, 3), 1000]
    with dask.config.set({"array.backend": "numpy"}):
        return [
            da.from_array(np.array(v, order=order), chunks=c)
            for v, c in zip(values, chunks, strict=True)
        ]


def library_lines(scheduler, x):
    """The lines of `explain` that say how many tasks of the array library run where."""
    return [str(line) for line in str(scheduler.explain(x)).splitlines() if "array library" in line]


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,0"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_types_are_those_of_the_host(devices, name):
    want = FUNCTIONS[name](*arguments()).compute(scheduler="sync")
    with gpuscheduler.Scheduler(devices, numpy="gpu", check=True) as scheduler:
        lazy = FUNCTIONS[name](*arguments())
        got = lazy.compute()
        (line,) = library_lines(scheduler, lazy)
    assert line.startswith("  GPU")
    assert type(got) is type(want)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["svd", "solve by columns", "sort", "Dask's svd"])
def test_new_data_takes_the_plan_of_the_last(name):
    planned = []
    with gpuscheduler.Scheduler("cuda:0,0", numpy="gpu", check=True) as scheduler:
        for seed in range(3):
            got = FUNCTIONS[name](*arguments(seed)).compute()
            planned.append(scheduler.recorder.runs[-1].planned)
            want = FUNCTIONS[name](*arguments(seed)).compute(scheduler="sync")
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    assert planned == ["new", "cache", "cache"]


@pytest.mark.parametrize("name", ["qr", "solve", "cholesky by columns", "sort", "unique"])
def test_arrays_in_fortran_order_and_persisted_ones(name):
    want = FUNCTIONS[name](*arguments()).compute(scheduler="sync")
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu", check=True):
        turned = arguments(order="F")
        kept = [x.persist() for x in turned]
        for given in (turned, kept):
            got = FUNCTIONS[name](*given).compute()
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
            assert type(got) is np.ndarray


def test_dasks_qr_keeps_the_promise_where_gpus_are_asked_for():
    x = tall_matrix(1200, 40, 1e10)
    with gpuscheduler.Scheduler("cuda:0,0", numpy="gpu", check=True):
        d = da.from_array(x, chunks=(300, -1))
        tall_kernel.branches.clear()
        q, r = dask.compute(*da.linalg.qr(d))
    assert tall_kernel.branches
    check_qr(x, q, r)


@pytest.fixture
def auto(monkeypatch):
    """Chooses by predicted seconds alone: arrays are small here."""
    for name in ("LEAST_BYTES", "LEAST_BLOCK", "LEAST_SECONDS"):
        monkeypatch.setattr(choice, name, 0)
    monkeypatch.setattr(choice.GpuWork, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(choice.HostWork, "seconds", lambda *_: 10.0)
    with gpuscheduler.Scheduler("cuda:0", numpy="auto", check=True) as scheduler:
        yield scheduler


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_host_computes_them_where_that_is_faster(auto, monkeypatch, name):
    """All of them together: what one leaves may be a value that the next one takes apart."""
    monkeypatch.setattr(sides, "portable_seconds", lambda *_: (1e-9, 1e3))
    want = FUNCTIONS[name](*arguments()).compute(scheduler="sync")
    given = [x * 1 for x in arguments()]
    lazy = FUNCTIONS[name](*given)
    np.testing.assert_allclose(lazy.compute(), want, rtol=1e-9, atol=1e-9)
    assert not any(line.startswith("  GPU") for line in library_lines(auto, lazy))


def test_signs_of_dasks_q_are_numpys_unless_gpus_are_asked_for(auto):
    x = tall_matrix(1200, 40, 10)
    d = da.from_array(x, chunks=(300, -1)) * 1
    want = da.linalg.qr(d)[1].compute(scheduler="sync")
    np.testing.assert_allclose(da.linalg.qr(d)[1].compute(), want, atol=1e-12)


def test_arrays_that_gpus_cannot_have_stay_on_the_host():
    rng = np.random.default_rng(0)
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu", check=True) as scheduler:
        for dtype in (np.longdouble, ">f8", "M8[s]", "U3"):
            x = rng.integers(0, 99, 300).astype("i8").astype(dtype)
            lazy = array.sort(da.from_array(x, chunks=100))
            np.testing.assert_array_equal(lazy.compute(), np.sort(x))
            assert not library_lines(scheduler, lazy)


class Answer:
    """A callable object of a user's, which refuses to be compared or put into a set."""

    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("compared")

    def __call__(self, block):
        return np.sort(block)


def test_users_objects_are_called_without_being_looked_at():
    x = np.random.default_rng(0).random(300)
    dsk = {"x": x, "y": (Answer(), "x"), "z": (getitem, "y", 3)}
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu", check=True) as scheduler:
        assert scheduler.get(dsk, "z") == np.sort(x)[3]
        d = da.from_array(x, chunks=100).map_blocks(Answer(), dtype=float, token="answer")
        np.testing.assert_array_equal(array.sort(d).compute(), np.sort(x))


def test_errors_are_those_of_the_host():
    a = np.ones((30, 30))
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu", check=True):
        d = da.from_array(a, chunks=10)
        with pytest.raises(np.linalg.LinAlgError, match="(?s)Singular.*solve_whole"):
            linalg.solve(d, a[0]).compute()
        with pytest.raises(np.linalg.LinAlgError, match="(?s)positive definite.*factor_whole"):
            linalg.cholesky(-d).compute()


def test_small_arrays_of_the_host_are_sent_with_the_task():
    """They are no steps of their own: a task that takes arrays as they are would mix libraries."""
    with gpuscheduler.Scheduler("cuda:0", numpy="gpu", check=True):
        b = np.arange(1.0, 4)
        x = linalg.solve(da.from_array(np.eye(3) * 2, chunks=3), da.from_array(b, chunks=3))
        np.testing.assert_allclose(x.compute(), b / 2)


def test_the_choice_counts_what_the_host_has_taken_over():
    """A plan whose factorizations run on the host is no faster for it than the host alone."""
    task = PortableTask("y", len, operations=10**12, traffic=8 * 10**9)
    machine = Machine.uniform(1)
    host, gpu = choice.library_work(task, machine)
    assert host > 10 * gpu > 0
    on_host = HostTask("y", len, {}, task.traffic)
    on_host.gpu_task = task
    plans = [SimpleNamespace(steps=[step(t)], machine=machine, outputs=()) for t in (task, on_host)]
    (alone, gpus), (alike, beside) = (choice._work(plan, 16) for plan in plans)
    assert alone.seconds(16) == alike.seconds(16)
    assert gpus.library == gpu
    assert beside.hosted >= host / 16


def step(task):
    return SimpleNamespace(
        task=task, sent=False, aside=False, nbytes=0, inputs=(), fixed=False, places=(), known=True
    )
