"""`gpuscheduler.random`, and that random numbers belong to the collection, not to its scheduler."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from dask.diagnostics import ProgressBar
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import gpuscheduler
from gpuscheduler import Scheduler
from gpuscheduler.codegen.random_block import RandomArray, draw_block
from gpuscheduler.random import Generator, Philox, default_rng

#: Parameters for each method of `Generator`. Those in the second table have no closed form.
CLOSED = {
    "random": (), "uniform": (-2, 5), "standard_normal": (), "normal": (1, 3.5),
    "lognormal": (0.5, 0.7), "standard_exponential": (), "exponential": (2.5,),
    "laplace": (1, 2), "logistic": (-1, 0.5), "gumbel": (1, 2), "rayleigh": (1.5,),
    "weibull": (1.7,), "pareto": (3,), "power": (2.5,), "standard_cauchy": (),
    "triangular": (-1, 0, 3), "standard_t": (3.5,), "wald": (1.5, 2), "geometric": (0.25,),
    "integers": (-3, 900),
}  # fmt: skip
BY_BLOCK = {
    "beta": (2.0, 3), "binomial": (10, 0.3), "chisquare": (3,), "f": (4, 12.0),
    "gamma": (2.0, 3.0), "hypergeometric": (20, 30, 15), "logseries": (0.6,),
    "multinomial": (20, [0.5, 0.0, 0.3, 0.2]), "multivariate_hypergeometric": ([5, 7], 6),
    "negative_binomial": (5, 0.4), "noncentral_chisquare": (0.5, 2.0),
    "noncentral_f": (4, 12.0, 1.5), "poisson": (4.5,), "standard_gamma": (2.5,),
    "vonmises": (0.0, 2.0), "zipf": (6.0,),
}  # fmt: skip
METHODS = CLOSED | BY_BLOCK
#: Dask 2026.8 does not say that each of these draws is a vector.
DASKS_FAULTS = {"multivariate_hypergeometric"}
DEVICES = ["cpu:1", "cpu:3"]


def draw(method, seed=5, size=(61, 40), chunks=(32, 23), **kwargs):
    return getattr(default_rng(seed), method)(*METHODS[method], size=size, chunks=chunks, **kwargs)


@pytest.fixture(scope="module")
def cluster():
    with (
        LocalCluster(1, threads_per_worker=2, processes=False, dashboard_address=":0") as made,
        Client(made) as client,
    ):
        yield client


def test_every_method_of_dasks_generator_is_here():
    methods = {m for m in vars(da.random.Generator) if not m.startswith("_")}
    assert methods == METHODS.keys() | {"choice", "permutation"}


# ---- the same numbers everywhere


@pytest.mark.parametrize("method", METHODS)
def test_every_scheduler_draws_the_same_bits(method):
    x = draw(method)
    want = x.compute(scheduler="sync")
    assert (want.shape, want.dtype) == (x.shape, x.dtype)
    np.testing.assert_array_equal(x.compute(scheduler="threads"), want)
    for devices in DEVICES:
        with Scheduler(devices, fuse_least=0):
            np.testing.assert_array_equal(x.compute(), want)
    np.testing.assert_array_equal(draw(method).compute(scheduler="threads"), want)
    assert not np.array_equal(draw(method, seed=6).compute(scheduler="sync"), want)


def test_clusters_draw_the_same_bits(cluster):
    every = {m: draw(m) for m in METHODS}
    theirs = {m: getattr(da.random.default_rng(5), m)(*a, size=40, chunks=9)
              for m, a in METHODS.items() if m not in DASKS_FAULTS}  # fmt: skip
    for arrays in (every, theirs):
        want = dask.compute(arrays, scheduler="sync")[0]
        (found,) = dask.compute(arrays)  # by the client
        for method in arrays:
            np.testing.assert_array_equal(found[method], want[method])
        with gpuscheduler.attach(cluster, "cpu:2", "1 GiB"):
            (found,) = dask.compute(arrays)
        for method in arrays:
            np.testing.assert_array_equal(found[method], want[method])


@pytest.mark.parametrize("method", sorted(METHODS.keys() - DASKS_FAULTS))
@pytest.mark.parametrize("make", [da.random.default_rng, np.random.default_rng])
def test_numpys_generators_draw_dasks_numbers(method, make):
    """Whether the seed or the bit generator is the user's own."""
    rng = da.random.default_rng(make(3))
    x = getattr(rng, method)(*METHODS[method], size=(40, 30), chunks=16)
    want = x.compute(scheduler="sync")
    with Scheduler("cpu:3", fuse_least=0):
        np.testing.assert_array_equal(x.compute(), want)


@pytest.mark.parametrize(
    "make",
    [
        lambda: da.random.RandomState(5).normal(3, 2, size=(41, 30), chunks=(10, 7)),
        lambda: da.random.RandomState(5).randint(0, 9, size=(41, 30), chunks=(10, 7)),
        lambda: da.random.RandomState(5).choice(100, size=300, chunks=50),
        lambda: da.random.default_rng(1).permutation(300),
        # whose bit generators are in the graph, and go on with each run, under any scheduler
        lambda: da.random.default_rng(1).choice(100, size=300, chunks=50),
    ],
)
def test_other_ways_to_numpys_generators_draw_dasks_numbers(make):
    want = make().compute(scheduler="sync")
    with Scheduler("cpu:2", fuse_least=0):
        np.testing.assert_array_equal(make().compute(), want)
        np.testing.assert_allclose(((make() + 1) * 2).sum().compute(), ((want + 1) * 2).sum())


def test_functions_of_dasks_module_draw_dasks_numbers():
    x = da.random.normal(3, 2, size=(41, 30), chunks=8)
    want = x.compute(scheduler="sync")
    with Scheduler("cpu:2", fuse_least=0):
        np.testing.assert_array_equal(x.compute(), want)


@pytest.mark.parametrize("fuse", [True, False])
def test_numbers_depend_on_the_seed_and_the_position_alone(fuse):
    """The chunks, the devices, fusion, the part asked for and the other results do not matter."""

    def normal(chunks):
        return default_rng(5).normal(3, 2, size=(41, 30), chunks=chunks)

    want = normal((41, 30)).compute(scheduler="sync")
    assert abs(want.mean() - 3) < 0.3
    with Scheduler("cpu:3", fuse=fuse, fuse_least=0):
        for chunks in [(41, 30), (10, 17), (1, 30), (41, 3), ((0, 40, 1), (0, 29, 1))]:
            x = normal(chunks)
            for each in (x, x[7:30:3, ::-2], x[40, 29]):
                np.testing.assert_array_equal(each.compute(), each.compute(scheduler="sync"))
            np.testing.assert_array_equal(x[7:30:3, ::-2].compute(), want[7:30:3, ::-2])
            np.testing.assert_array_equal((x + x.T.rechunk(4).T).compute(), 2 * want)
            kept = x.persist()
            np.testing.assert_array_equal((kept - x).compute(), 0 * want)
            (given,) = dask.optimize(x)
            np.testing.assert_array_equal(given.compute(), want)
            with ProgressBar(out=io.StringIO()):
                np.testing.assert_array_equal((x * 1).compute(), want)


def test_numbers_inside_delayed_are_the_same():
    """Dask hands over the tasks without saying how the array is cut up, and fused."""
    x = default_rng(5).random((20, 20), chunks=8)
    want = x.compute(scheduler="sync")
    u, s, v = da.linalg.svd(x.rechunk(20))  # of which a part is delayed
    with Scheduler("cpu:2"):
        a, b = dask.compute(dask.delayed(np.negative)(x + 1), x)
        np.testing.assert_array_equal(a, -want - 1)
        np.testing.assert_array_equal(b, want)
        np.testing.assert_array_equal(dask.delayed(np.negative)(x[:5]).compute(), -want[:5])
        np.testing.assert_allclose((u * s @ v).compute(), want)
        for (i, j), part in np.ndenumerate((x * 2).to_delayed()):
            np.testing.assert_array_equal(part.compute(), 2 * x.blocks[i, j].compute())
        got = gpuscheduler.get(dict(x.dask), (x.name, 2, 1))
        np.testing.assert_array_equal(got, want[16:, 8:16])


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_any_chunks_of_any_array_give_the_same(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    method = data.draw(st.sampled_from(sorted(CLOSED)))
    dtype = data.draw(st.sampled_from(["f4", "f8"]))
    kwargs = {} if method in ("integers", "geometric") else {"dtype": dtype}

    def made():
        chunks = tuple([data.draw(st.integers(1, max(n, 1))) for n in shape])
        return draw(method, size=shape, chunks=chunks, **kwargs)

    x, y = made(), made()
    want = x.compute(scheduler="sync")
    assert want.dtype == x.dtype == kwargs.get("dtype", np.int64)
    with Scheduler("cpu:2", fuse_least=0):
        np.testing.assert_array_equal(y.compute(), want)
        np.testing.assert_allclose((y * 2).sum().compute(), (want * 2).sum(), rtol=1e-5)


def test_large_blocks_are_the_same():
    """Those are drawn by compiled loops."""
    for method in CLOSED:
        x = draw(method, size=100_000, chunks=60_001)
        want = x.compute(scheduler="sync")
        with Scheduler("cpu:2"):
            np.testing.assert_array_equal(x.compute(), want)
            np.testing.assert_allclose((x / 2 + 1).max().compute(), want.max() / 2 + 1, rtol=1e-14)


# ---- what numbers


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_uniform_and_normal_numbers_of_different_blocks_are_independent(dtype):
    rng = default_rng(11)
    u = rng.random((64, 4096), chunks=(1, 4096), dtype=dtype).compute(scheduler="sync")
    n = rng.normal(size=(64, 4096), chunks=(1, 4096), dtype=dtype).compute(scheduler="sync")
    assert stats.kstest(u.ravel().astype("f8"), "uniform").pvalue > 1e-3
    assert stats.kstest(n.ravel().astype("f8"), "norm").pvalue > 1e-3
    for x in (u, n):
        c = np.corrcoef(x)[np.triu_indices(64, 1)]
        assert np.abs(c).max() < 5.5 / np.sqrt(4096)  # of 2,016 normal ones
        assert abs(np.corrcoef(x.ravel()[1:], x.ravel()[:-1])[0, 1]) < 5 / np.sqrt(x.size)
    assert abs(stats.kurtosis(n, axis=None)) < 0.06
    assert not np.isin(u[0], u[1:]).any() or dtype == "f4"


@pytest.mark.parametrize("method", BY_BLOCK)
def test_numbers_by_block_are_of_their_distribution(method):
    """Those of other blocks are others, and the mean is NumPy's."""
    x = draw(method, size=(200, 100), chunks=(50, 100))
    values = x.compute(scheduler="threads")
    theirs = getattr(np.random.default_rng(0), method)(*METHODS[method], size=(200, 100))
    assert (values.dtype, values.shape) == (theirs.dtype, theirs.shape)
    error = np.sqrt(2 * theirs.var(axis=(0, 1)) / 20_000)
    assert (np.abs(values.mean(axis=(0, 1)) - theirs.mean(axis=(0, 1))) <= 5 * error).all()
    assert not np.array_equal(values[:50], values[50:100])


def test_no_two_arrays_are_the_same():
    rng = default_rng(1)
    arrays = [rng.random(1000, chunks=100), rng.random(1000, chunks=100)]
    arrays += [child.random(1000, chunks=100) for child in (*rng.spawn(2), default_rng(1))]
    with Scheduler("cpu:2"):
        a, b, c, d, again = dask.compute(*arrays)
    np.testing.assert_array_equal(a, again)
    every = np.concatenate([a, b, c, d])
    assert len(np.unique(every)) == every.size


def test_an_array_does_not_depend_on_the_chunks_of_the_one_before():
    found = []
    for chunks in (10, 100):
        rng = default_rng(3)
        rng.random(100, chunks=chunks)
        found.append(rng.random(5, chunks=2).compute(scheduler="sync"))
    np.testing.assert_array_equal(*found)


def test_numbers_stay_what_they_are():
    """In the next version, too: users keep seeds."""
    rng = default_rng(42)
    assert rng.integers(0, 1000, size=4, chunks=3).compute(scheduler="sync").tolist() == FIRST[0]
    assert rng.random(2, chunks=1).compute(scheduler="sync").tolist() == FIRST[1]
    bits = np.random.SeedSequence(42).spawn(1)[0]
    key = gpuscheduler.ir.random.key_of(bits)
    again = draw_block(RandomArray("integers", key, (4,), (0, 1000)), (0,), (4,))
    assert again.tolist() == FIRST[0]


FIRST = [[225, 298, 416, 603], [0.870799247309468, 0.26157393297717724]]


# ---- arguments


def test_parameters_may_be_arrays():
    low = np.arange(100.0)
    for each in (low, da.from_array(low, chunks=30)):
        x = default_rng(1).uniform(each, each + 0.5, size=(2, 100), chunks=(1, 30), dtype="f4")
        want = x.compute(scheduler="sync")
        assert want.dtype == x.dtype == np.float32
        assert ((want >= low - 1e-4) & (want < low + 0.5001)).all()
        with Scheduler("cpu:2", fuse_least=0):
            np.testing.assert_array_equal(x.compute(), want)
    for method in ("multinomial", "multivariate_hypergeometric"):
        given = [np.array(a) if isinstance(a, list) else a for a in METHODS[method]]
        made = getattr(default_rng(5), method)(*given, size=(61, 40), chunks=(32, 23))
        np.testing.assert_array_equal(made.compute(), draw(method).compute())
    x = default_rng(1).normal(scale=np.array([1e-9, 1.0]), chunks=1)
    assert abs(x.compute()[0]) < 1e-7
    assert default_rng(1).poisson(da.zeros((), dtype="f8")).compute() == 0


def test_sizes():
    rng = default_rng(0)
    assert rng.random().compute().shape == ()
    assert rng.random(7).chunks == ((7,),)
    assert rng.random((3, 0, 2)).compute(scheduler="sync").shape == (3, 0, 2)
    with dask.config.set({"array.chunk-size": "8 kiB"}):
        x = rng.random((100, 100), chunks="auto", dtype="f4")
        assert max(map(max, x.chunks)) < 50
        assert x.compute().shape == (100, 100)
    assert rng.multinomial(3, [0.5, 0.5], size=(4,), chunks=2).chunks == ((2, 2), (2,))


def test_integers_have_the_type_asked_for():
    rng = default_rng(0)
    x = rng.integers(250, 255, 100, dtype=np.uint8, endpoint=True, chunks=30)
    values = x.compute()
    assert (x.dtype, values.dtype, values.min(), values.max()) == ("u1", "u1", 250, 255)
    wide = rng.integers(0, 2**64, 1000, dtype=np.uint64).compute()
    assert wide.dtype == np.uint64
    assert wide.max() > 2**63


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "error"),
    [
        ("normal", (0, -1), {}, ValueError),
        ("normal", (0, 1), {"dtype": "i4"}, TypeError),
        ("gamma", (2,), {"dtype": "f2"}, TypeError),
        ("poisson", (2,), {"dtype": "f4"}, TypeError),
        ("poisson", (-2,), {}, ValueError),
        ("integers", (3, 3), {}, ValueError),
        ("integers", (0, 300), {"dtype": "u1"}, ValueError),
        ("random", (), {"out": np.zeros(3)}, NotImplementedError),
        ("choice", (5,), {}, NotImplementedError),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(method, args, kwargs, error):
    with pytest.raises(error):
        getattr(default_rng(0), method)(*args, **kwargs)


def test_permutations():
    rng = default_rng(4)
    a, b = rng.permutation(100).compute(), rng.permutation(100).compute()
    assert sorted(a) == sorted(b) == list(range(100))
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(default_rng(4).permutation(100).compute(), a)
    x = default_rng(4).permutation(da.arange(100, chunks=9) * 2)
    np.testing.assert_array_equal(x.compute(), 2 * a)
    with pytest.raises(TypeError, match="use permutation"):
        rng.shuffle(da.arange(3))


# ---- seeds, names, pickles


def test_names_are_those_of_seed_and_arguments():
    def name(seed=1, chunks=3, args=(1, 2)):
        return default_rng(seed).normal(*args, size=9, chunks=chunks).name

    assert name() == name()
    assert len({name(), name(seed=2), name(chunks=4), name(args=(1, 3))}) == 4
    x = default_rng(1).normal(1, 2, size=9, chunks=3)
    assert x.name.startswith("normal-")
    assert len({x.name, default_rng(1).uniform(1, 2, size=9, chunks=3).name}) == 2


def test_seeds():
    sequence = np.random.SeedSequence([1, 2, 3])
    a = default_rng([1, 2, 3]).random(3).compute()
    np.testing.assert_array_equal(default_rng(sequence).random(3).compute(), a)
    np.testing.assert_array_equal(default_rng(Philox([1, 2, 3])).random(3).compute(), a)
    rng = default_rng(1)
    assert default_rng(rng) is da.random.default_rng(rng) is rng
    assert isinstance(rng, Generator)
    assert rng.bit_generator == Philox(1) != Philox(2)
    assert rng.bit_generator.seed_seq.entropy == 1
    assert default_rng().bit_generator != default_rng().bit_generator
    assert str(rng) == "Generator(Philox)"
    with pytest.raises(ValueError, match="'torch': use 'numpy' or 'cupy'"):
        Philox(1, library="torch")


def test_generators_and_arrays_pickle():
    rng = default_rng(5)
    rng.random(3)
    copy = pickle.loads(pickle.dumps(rng))
    x, y = rng.normal(size=9, chunks=2), copy.normal(size=9, chunks=2)
    assert x.name == y.name
    z = pickle.loads(pickle.dumps(x))
    np.testing.assert_array_equal(z.compute(), y.compute(scheduler="sync"))


def test_a_block_finds_what_it_needs_in_a_fresh_process():
    x = default_rng(5).gamma(2.0, size=4, chunks=4)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)({}).tolist())"
    task = dict(x.dask)[x.name, 0]
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, input=pickle.dumps(task), capture_output=True, check=True)
    assert done.stdout.decode().strip() == str(x.compute(scheduler="sync").tolist())


def test_a_new_seed_takes_no_plan_of_an_old_one():
    with Scheduler("cpu:2", fuse_least=0, check=True):
        for _ in range(2):
            for seed in (1, 2, 3):
                x = draw("normal", seed=seed)
                want = x.compute(scheduler="sync")
                np.testing.assert_array_equal(x.compute(), want)
                np.testing.assert_array_equal((x + 1).compute(), want + 1)
