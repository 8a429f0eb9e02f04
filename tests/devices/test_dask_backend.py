"""What `devices.cuda.dask_backend` adds to Dask, checked with NumPy in CuPy's place."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from dask.array.backends import array_creation_dispatch as dispatch
from dask.array.cupy_entry_point import CupyBackendEntrypoint
from scipy import stats

from gpuscheduler.devices.cuda import dask_backend, random_generator
from gpuscheduler.devices.cuda.dask_backend import BOUND_IN, FILLED, CupyBackend
from gpuscheduler.devices.cuda.random_generator import DeviceGenerator
from gpuscheduler.random import Philox

#: method: parameters and the distribution that it should draw. Read by the tests on GPUs too.
CONTINUOUS = {
    "random": ((), stats.uniform()),
    "standard_normal": ((), stats.norm()),
    "standard_exponential": ((), stats.expon()),
    "standard_gamma": ((2.5,), stats.gamma(2.5)),
    "beta": ((2.0, 3), stats.beta(2, 3)),
    "uniform": ((-2, 3.0), stats.uniform(-2, 5)),
    "normal": ((5, 0.5), stats.norm(5, 0.5)),
    "lognormal": ((0.5, 0.25), stats.lognorm(0.25, scale=np.exp(0.5))),
    "exponential": ((3.0,), stats.expon(scale=3)),
    "gamma": ((2.0, 3.0), stats.gamma(2, scale=3)),
    "chisquare": ((3,), stats.chi2(3)),
    "noncentral_chisquare": ((0.5, 2.0), stats.ncx2(0.5, 2)),
    "f": ((4, 12.0), stats.f(4, 12)),
    "noncentral_f": ((4, 12.0, 1.5), stats.ncf(4, 12, 1.5)),
    "standard_t": ((8,), stats.t(8)),
    "standard_cauchy": ((), stats.cauchy()),
    "gumbel": ((1, 2.0), stats.gumbel_r(1, 2)),
    "laplace": ((1, 2.0), stats.laplace(1, 2)),
    "logistic": ((1, 2.0), stats.logistic(1, 2)),
    "rayleigh": ((2.0,), stats.rayleigh(scale=2)),
    "pareto": ((6.0,), stats.lomax(6)),
    "power": ((3.0,), stats.powerlaw(3)),
    "weibull": ((1.5,), stats.weibull_min(1.5)),
    "triangular": ((-1, 0, 3.0), stats.triang(0.25, -1, 4)),
    "wald": ((2.0, 3.0), stats.invgauss(2 / 3, scale=3)),
    "vonmises": ((0.0, 2.0), stats.vonmises(2.0)),
}
DISCRETE = {
    "binomial": ((10, 0.3), stats.binom(10, 0.3)),
    "geometric": ((0.25,), stats.geom(0.25)),
    "hypergeometric": ((20, 30, 15), stats.hypergeom(50, 20, 15)),
    "integers": ((-3, 9), stats.randint(-3, 9)),
    "logseries": ((0.6,), stats.logser(0.6)),
    "poisson": ((4.5,), stats.poisson(4.5)),
    "negative_binomial": ((5, 0.4), stats.nbinom(5, 0.4)),
    "zipf": ((6.0,), stats.zipf(6)),
}
HOST_ONLY = {"choice", "multivariate_hypergeometric"}


@pytest.fixture
def registered():
    dask_backend.register()
    yield
    dask_backend.unregister()


class Fake(np.ndarray):
    """Stands for cupy.ndarray: what NumPy does with it is one again."""

    def __array_function__(self, func, types, args, kwargs):
        result = super().__array_function__(func, types, args, kwargs)
        return result.view(Fake) if isinstance(result, np.ndarray) else result

    def __getitem__(self, index):  # CuPy has no scalars
        return np.asarray(super().__getitem__(index)).view(Fake)


@pytest.fixture
def fake(monkeypatch):
    """`array.backend` is "cupy", and CuPy is NumPy that makes `Fake`s."""
    module = ModuleType("fakecupy")

    def wrap(name):
        if name == "ndarray":
            return Fake
        return lambda *args, **kwargs: np.asarray(getattr(np, name)(*args, **kwargs)).view(Fake)

    module.__dict__["__getattr__"] = wrap
    monkeypatch.setitem(sys.modules, "fakecupy", module)
    monkeypatch.setattr("dask.array.cupy_entry_point._cupy", lambda strict=True: module)
    monkeypatch.setattr("dask.array.cupy_entry_point.register_cupy", lambda: None)
    dask_backend.register()
    dispatch.register_backend("cupy", CupyBackend(xp="fakecupy"))
    with dask.config.set({"array.backend": "cupy"}):
        yield
    dask_backend.unregister()


@pytest.fixture
def numpy_draws(monkeypatch, registered):
    """`array.backend` is "cupy", and NumPy draws the numbers."""
    make = property(lambda backend: partial(Philox, library="numpy"))
    monkeypatch.setattr(CupyBackend, "default_bit_generator", make)
    with dask.config.set({"array.backend": "cupy"}):
        yield


# Registration


def test_unregister_leaves_dask_as_it_was():
    before = {(m, name): getattr(m, name, None) for m in BOUND_IN for name in FILLED}
    numpy_backend = dict(vars(dispatch.dispatch("numpy")))
    dask_backend.register()
    once = {key: getattr(*key, None) for key in before}
    dask_backend.register()
    assert {key: getattr(*key, None) for key in before} == once
    assert da.linspace is not before[da, "linspace"]
    assert isinstance(dispatch.dispatch("cupy"), CupyBackend)

    dask_backend.unregister()
    dask_backend.unregister()
    assert {key: getattr(*key, None) for key in before} == before
    assert vars(dispatch.dispatch("numpy")) == numpy_backend
    assert type(dispatch.dispatch("cupy")) is CupyBackendEntrypoint


def test_the_numpy_backend_is_unchanged():
    def collections():
        yield da.linspace(0, 1, 10, chunks=3)
        yield da.eye(7, chunks=3, k=1)
        yield da.diag(np.arange(4))
        yield from da.meshgrid(np.arange(3), np.arange(4))
        yield da.random.default_rng(3).normal(size=10, chunks=4)
        yield da.random.RandomState(3).normal(size=10, chunks=4)

    before = list(collections())
    dask_backend.register()
    try:
        after = list(collections())
    finally:
        dask_backend.unregister()
    for old, new in zip(before, after, strict=True):
        assert old.name == new.name
        assert type(new._meta) is np.ndarray
        np.testing.assert_array_equal(old.compute(), new.compute())


def test_errors_keep_their_type(registered):
    with pytest.raises(ValueError, match="Array must be 1d or 2d only"):
        da.diag(np.zeros((2, 2, 2)))


def test_functions_can_be_pickled_while_registered(registered):
    assert pickle.loads(pickle.dumps(da.linspace)) is da.linspace


# Creation


@pytest.mark.parametrize("num", [0, 1, 2, 10, 1000])
@pytest.mark.parametrize("endpoint", [True, False])
@pytest.mark.parametrize("dtype", [None, "f4", "i8"])
@pytest.mark.parametrize("ends", [(0, 1), (-3.3, 7.1), (5, -5), (2, 2), (0, 5e-324)])
def test_linspace_is_numpys_value_for_value(num, endpoint, dtype, ends):
    x = CupyBackend("numpy").linspace(*ends, num, endpoint, chunks=7, dtype=dtype)
    expected = np.linspace(*ends, num, endpoint, dtype=dtype)
    assert x.dtype == expected.dtype
    np.testing.assert_array_equal(x.compute(scheduler="sync"), expected)


def test_linspace_step():
    for endpoint in True, False:
        _, step = CupyBackend("numpy").linspace(1, 3, 5, endpoint, retstep=True)
        assert step == np.linspace(1, 3, 5, endpoint, retstep=True)[1]
    assert CupyBackend("numpy").linspace(1, 3, 1, retstep=True)[1] == 2  # as Dask's


@pytest.mark.parametrize("k", [-9, -4, -1, 0, 2, 3, 9])
@pytest.mark.parametrize(("n", "m"), [(6, None), (5, 8), (8, 5), (0, 3)])
def test_eye(n, m, k):
    x = CupyBackend("numpy").eye(n, 3, m, k, dtype="i4")
    expected = np.eye(n, m, k, dtype="i4")
    assert x.dtype == expected.dtype
    np.testing.assert_array_equal(x.compute(scheduler="sync"), expected)


def test_eye_takes_square_chunks_only():
    with pytest.raises(ValueError, match="chunks must be an int or string"):
        CupyBackend("numpy").eye(4, chunks=(2, 2))


def test_names_depend_on_the_values_and_on_nothing_else():
    b = CupyBackend("numpy")
    assert b.linspace(0, 1, 10).name == b.linspace(0, 1, 10).name
    assert b.linspace(0, 1, 10).name != b.linspace(0, 2, 10).name
    assert b.eye(4).name != b.eye(4, k=1).name
    assert b.linspace(0, 1, 10).name != da.linspace(0, 1, 10).name


def collections():
    x, y = np.arange(3), [0.5, 1.5]
    return {
        "linspace": (da.linspace(0, 1, 7, chunks=3), np.linspace(0, 1, 7)),
        "eye": (da.eye(5, chunks=2), np.eye(5)),
        "indices": (da.indices((3, 4), chunks=2), np.indices((3, 4))),
        "no indices": (da.indices((3, 0), chunks=2), np.indices((3, 0))),
        "fromfunction": (
            da.fromfunction(lambda i, j: i * 10 + j, shape=(3, 4), chunks=2),
            np.fromfunction(lambda i, j: i * 10 + j, (3, 4)),
        ),
        "tri": (da.tri(4, 5, k=1, chunks=2), np.tri(4, 5, k=1)),
        "diag": (da.diag(x, k=-1), np.diag(x, k=-1)),
        "diag of a collection": (da.diag(da.arange(4, chunks=2), k=1), np.diag(np.arange(4), k=1)),
        "meshgrid": (da.meshgrid(x, y)[1], np.meshgrid(x, y)[1]),
        "sparse": (
            da.meshgrid(x, da.linspace(0, 1, 3), sparse=True, indexing="ij")[0],
            np.meshgrid(x, x, sparse=True, indexing="ij")[0],
        ),
    }


@pytest.mark.parametrize("what", collections())
def test_under_the_cupy_backend_nothing_is_on_the_host(fake, what):
    made, expected = collections()[what]
    assert type(made._meta) is Fake
    for chunk in np.ravel(np.array(made.to_delayed(), dtype=object)):
        assert type(chunk.compute(scheduler="sync")) is Fake
    np.testing.assert_array_equal(made.compute(scheduler="sync"), expected)
    assert made.dtype == expected.dtype


def test_what_is_given_as_a_host_array_stays_one(fake):
    x = np.arange(4).reshape(2, 2)
    for made in da.from_array(x), da.asarray(x), da.diag(x), da.meshgrid(da.from_array(x[0]))[0]:
        assert type(made._meta) is np.ndarray


@pytest.mark.parametrize("what", ["linspace", "eye", "diag", "meshgrid"])
def test_graphs_hold_no_device_array(fake, what):
    made, _ = collections()[what]
    assert b"Fake" not in pickle.dumps(dict(made.__dask_graph__()))


# Random numbers


def test_the_methods_are_dasks_and_what_they_draw_from_is_cupys():
    """Every distribution of Dask's Generator is here, made from what CuPy's has."""
    cupys = pytest.importorskip("cupy.random._generator_api").Generator
    methods = {m for m in vars(da.random.Generator) if not m.startswith("_")}
    assert methods == set(CONTINUOUS) | set(DISCRETE) | HOST_ONLY | {"multinomial", "permutation"}

    drawn = set()

    class Recorder(DeviceGenerator):
        def _draw(self, name, *args, **kwargs):
            drawn.add(name)
            return super()._draw(name, *args, **kwargs)

    for method, (args, _) in (CONTINUOUS | DISCRETE).items():
        getattr(Recorder(np.random.SeedSequence(0), "numpy"), method)(*args, size=(3,))
    assert all(hasattr(cupys, name) for name in drawn)
    assert "normal" not in drawn


@pytest.mark.parametrize("method", CONTINUOUS)
def test_continuous(method):
    args, expected = CONTINUOUS[method]
    rng = DeviceGenerator(np.random.SeedSequence(7), "numpy")
    x = getattr(rng, method)(*args, size=(100, 200))
    assert (x.shape, x.dtype) == ((100, 200), np.float64)
    assert stats.kstest(x.ravel(), expected.cdf).pvalue > 0.001
    assert getattr(rng, method)(*args, size=3, dtype="f4").dtype == np.float32
    with pytest.raises(TypeError, match="float32 or float64, not int64"):
        getattr(rng, method)(*args, size=3, dtype=int)


@pytest.mark.parametrize("method", DISCRETE)
def test_discrete(method):
    args, expected = DISCRETE[method]
    x = getattr(DeviceGenerator(np.random.SeedSequence(7), "numpy"), method)(*args, size=(100, 200))
    assert (x.shape, x.dtype) == ((100, 200), np.int64)
    assert abs(x.mean() - expected.mean()) < 5 * expected.std() / np.sqrt(x.size)
    assert x.var() == pytest.approx(expected.var(), rel=variance_error(expected, x.size))


def variance_error(expected, n):
    """Five standard deviations of a sample's variance, relative to it."""
    return 5 * np.sqrt((float(expected.stats(moments="k")) + 2) / n)


def test_multinomial():
    rng = DeviceGenerator(np.random.SeedSequence(7), "numpy")
    x = rng.multinomial(20, [0.5, 0.0, 0.3, 0.2], size=(5000,))
    assert x.shape == (5000, 4)
    assert (x.sum(axis=-1) == 20).all()
    np.testing.assert_allclose(x.mean(axis=0), [10, 0, 6, 4], atol=0.2)
    np.testing.assert_allclose(np.cov(x[:, 0], x[:, 2])[0, 1], -20 * 0.5 * 0.3, atol=0.4)


def test_parameters_may_be_arrays():
    rng = DeviceGenerator(np.random.SeedSequence(7), "numpy")
    loc = np.array([[0.0], [100.0]])
    assert rng.normal(loc, np.array([1e-9, 1e-9, 1e-9])).round().tolist() == [[0] * 3, [100] * 3]
    assert rng.binomial(np.array([0, 7]), np.float32(1)).tolist() == [0, 7]
    assert rng.uniform(np.array([1.0, 5.0]), np.array([1.0, 5.0])).tolist() == [1, 5]


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("normal", (0, -1), "scale < 0"),
        ("chisquare", (0,), "df <= 0"),
        ("binomial", (3, 1.5), "p > 1"),
        ("logseries", (1.0,), "p >= 1"),
        ("triangular", (0, 2, 1), "mode > right"),
        ("hypergeometric", (1, 2, 4), "ngood"),
        ("integers", (3, 3), "no integers from 3 to 2"),
        ("multinomial", (3, [0.9, 0.9, 0.1]), "pvals"),
    ],
)
def test_numbers_that_make_no_sense(method, args, message):
    with pytest.raises(ValueError, match=message):
        getattr(DeviceGenerator(np.random.SeedSequence(0), "numpy"), method)(*args, size=3)


def test_integers_have_the_type_asked_for():
    rng = DeviceGenerator(np.random.SeedSequence(0), "numpy")
    x = rng.integers(250, 255, 100, dtype=np.uint8, endpoint=True)
    assert (x.dtype, x.min(), x.max()) == (np.uint8, 250, 255)
    assert rng.integers(2**63, 2**64, 3, dtype=np.uint64).dtype == np.uint64
    x = rng.integers(-(2**31), 2**31, 10_000, dtype=np.int32)
    assert (x.dtype, x.min() < -(2**30), x.max() > 2**30) == (np.int32, True, True)
    with pytest.raises(NotImplementedError, match="among 18446744073709551616 integers"):
        rng.integers(0, 2**64, 3, dtype=np.uint64)
    with pytest.raises(ValueError, match="do not fit uint8"):
        rng.integers(-1, 5, dtype=np.uint8)
    with pytest.raises(NotImplementedError, match="Generator.integers takes only numbers"):
        rng.integers(np.array([1, 2]), 5)


def test_default_rng_goes_through_dask(numpy_draws):
    def draw(seed):
        return da.random.default_rng(seed).normal(3, 0.5, size=(40, 30), chunks=(7, 11))

    x = draw(5)
    assert str(da.random.default_rng(5)) == "Generator(Philox)"
    assert x.name == draw(5).name != draw(6).name
    values = x.compute(scheduler="sync")
    np.testing.assert_array_equal(values, draw(5).compute(scheduler="threads"))
    assert len(np.unique(values)) == x.size
    assert abs(values.mean() - 3) < 0.1


def test_two_draws_from_one_generator_differ(numpy_draws):
    rng = da.random.default_rng(5)
    assert (rng.random(8).compute() != rng.random(8).compute()).all()


def test_dask_arrays_as_parameters(numpy_draws):
    with dask.config.set({"array.backend": "numpy"}):
        loc = da.arange(6, chunks=3) * 100.0
    x = da.random.default_rng(0).normal(loc, 1e-9, size=(2, 6), chunks=(1, 3))
    assert x.compute().round().tolist() == [[0, 100, 200, 300, 400, 500]] * 2
    x = da.random.default_rng(0).normal(np.array([5.0, 7.0]), scale=1e-9, chunks=1)
    assert x.compute().round().tolist() == [5, 7]


def test_multinomial_through_dask(numpy_draws):
    x = da.random.default_rng(0).multinomial(9, [0.25, 0.75], size=10, chunks=4)
    assert x.shape == x.compute().shape == (10, 2)


def test_no_device_is_asked_while_the_generator_is_made(registered):
    """Without a GPU the bit generator, its children and their tokens can be had all the same."""
    with dask.config.set({"array.backend": "cupy"}):
        rng = da.random.default_rng(3)
    assert rng._bit_generator == Philox(3, library="cupy") != Philox(3)
    dask.base.tokenize(rng._bit_generator.spawn(3))


@pytest.mark.parametrize(
    ("name", "args"), [("choice", (5, 3)), ("multivariate_hypergeometric", ([1, 2], 3))]
)
def test_what_stays_on_the_host_says_so(fake, name, args):
    with pytest.raises(NotImplementedError, match=rf"Generator.{name} .*PCG64\(seed\)\).{name}"):
        getattr(da.random.default_rng(0), name)(*args)


def test_permutations_are_ordered_on_the_host(numpy_draws):
    with dask.config.set({"array.backend": "numpy"}):
        x = da.arange(9, chunks=4)
    assert sorted(da.random.default_rng(0).permutation(x).compute()) == list(range(9))


def test_random_states_are_drawn_by_position_too(fake, monkeypatch):
    """Unless the user says from which `RandomState`."""
    base = type("RandomState", (np.random.RandomState,), {"__module__": "fakecupy"})
    sys.modules["fakecupy"].random = SimpleNamespace(RandomState=base)
    rng = da.random.RandomState(5)
    assert issubclass(rng._RandomState, base)
    assert rng._RandomState.by_position == "cupy"
    monkeypatch.setattr(type(rng._RandomState), "by_position", "numpy")
    calls = (("normal", (3, 2)), ("random_sample", ()), ("randint", (2, 9)), ("tomaxint", ()),
             ("random_integers", (2, 9)), ("random_integers", (5,)), ("gamma", (2,)))  # fmt: skip
    for name, args in calls:
        made = [
            getattr(da.random.RandomState(5), name)(*args, size=(40, 30), chunks=chunks)
            for chunks in (40, (7, 11))
        ]
        a, b = (x.compute(scheduler="sync") for x in made)
        assert (a == b).all() == (name != "gamma")
        assert a.dtype == made[0].dtype == (float if name in FLOATS else int)
        if name == "random_integers":
            assert (a.min(), a.max()) == ((2, 9) if len(args) == 2 else (1, 5))
        elif name == "randint":
            assert (a.min(), a.max()) == (2, 8)
    theirs = da.random.RandomState(5, RandomState=base).normal(size=9, chunks=4)
    ours = da.random.RandomState(5).normal(size=9, chunks=4)
    with dask.config.set({"array.backend": "numpy"}):
        host = da.random.RandomState(5).normal(size=9, chunks=4).compute(scheduler="sync")
    np.testing.assert_array_equal(theirs.compute(scheduler="sync"), host)
    assert not np.isin(ours.compute(scheduler="sync"), host).any()


FLOATS = ("normal", "random_sample", "gamma")


def test_standard_exponential_by_the_ziggurat():
    with pytest.raises(NotImplementedError, match="method='zig'"):
        DeviceGenerator(np.random.SeedSequence(0), "numpy").standard_exponential(3, method="zig")


def test_states_of_a_chunk():
    """As many as the chunk has elements, in whole blocks of 256, and no more than LANES."""
    made = []

    class Xp:
        class random:
            Generator = staticmethod(lambda bits: bits)

            @staticmethod
            def Philox4x3210(seed, size):
                made.append(size)
                return seed.generate_state(1, np.uint32)[0]

    seed = np.random.SeedSequence(3)
    first = [random_generator._source(Xp, seed, n) for n in (0, 1, 256, 257, 10**9)]
    assert made == [256, 256, 256, 512, random_generator.LANES]
    assert len(set(first)) == 1
    assert 2**32 < first[0] < 2**63
