"""Rounds of an iteration by one graph: values, plans, names, errors."""

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.sparse

import gpuscheduler
from gpuscheduler import Iteration, sparse


def heat(u, total):
    inner = (u + 0.1 * (da.roll(u, 1) + da.roll(u, -1) - 2 * u)).rechunk(u.chunks)
    return inner, total + (inner * inner).sum()


def expected(u, rounds):
    total = 0.0
    for _ in range(rounds):
        u = u + 0.1 * (np.roll(u, 1) + np.roll(u, -1) - 2 * u)
        total += (u * u).sum()
    return u, total


def start(seed=0):
    u = np.random.default_rng(seed).random(100)
    return u, dask.persist(da.from_array(u, chunks=30), da.zeros((), chunks=()))


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:3"])
@pytest.mark.parametrize("rounds", [1, 4])
def test_values_are_numpys(devices, rounds):
    with gpuscheduler.Scheduler(devices, check=True, fuse_least=0):
        u, state = start()
        run = Iteration(heat, *state, rounds=rounds)
        for _ in range(3):
            state = run(*state)
        wanted, total = expected(u, 3 * rounds)
        np.testing.assert_allclose(state[0].compute(), wanted)
        np.testing.assert_allclose(float(state[1].compute()), total)


def test_on_any_scheduler():
    with dask.config.set(scheduler="sync"):
        u, state = start()
        run = Iteration(heat, *state, rounds=2)
        state = run(*run(*state))
        np.testing.assert_allclose(state[0].compute(), expected(u, 4)[0])
        np.testing.assert_allclose(float(state[1].compute()), expected(u, 4)[1])


def test_the_graph_is_planned_once(planned):
    with gpuscheduler.Scheduler("cpu:2"):
        _, state = start()
        run = Iteration(heat, *state, rounds=3)
        for _ in range(2):  # at first the state is arrays of the caller's
            state = run(*state)
        before = len(planned)
        for _ in range(4):
            state = run(*state)
        assert len(planned) == before


def test_results_have_names_of_their_own():
    with gpuscheduler.Scheduler("cpu:2", check=True):
        u, state = start()
        run = Iteration(heat, *state, rounds=2)
        first = run(*state)
        second = run(*first)
        other = run(*start(1)[1])
        assert len({a.name for a in (*state, *first, *second, *other)}) == 8
        difference = (second[0] - first[0] + other[0]).compute()
        wanted = expected(u, 4)[0] - expected(u, 2)[0] + expected(start(1)[0], 2)[0]
        np.testing.assert_allclose(difference, wanted)


def test_a_state_that_is_not_persisted_is_computed():
    with gpuscheduler.Scheduler("cpu:2", check=True):
        u, state = start()
        run = Iteration(heat, *state, rounds=2)
        out, _ = run(da.from_array(u, chunks=30) * 1, da.ones((), chunks=()) * 0)
        np.testing.assert_allclose(out.compute(), expected(u, 2)[0])


def test_one_array_and_a_sparse_matrix():
    m = scipy.sparse.random_array((60, 60), density=0.1, format="csr", rng=0)
    with gpuscheduler.Scheduler("cpu:2", check=True):
        a = sparse.asarray(m, chunks=(20, 60)).persist()
        v = da.ones(60, chunks=20).persist()

        def step(x):
            y = a @ x
            return y / da.linalg.norm(y)

        run = Iteration(step, v, rounds=5)
        (v,) = run(*run(v))
        x = np.ones(60)
        for _ in range(10):
            x = m @ x
            x /= np.linalg.norm(x)
        np.testing.assert_allclose(v.compute(), x)
    assert repr(run) == "<Iteration of 5 rounds over 1 array>"


def test_a_state_larger_than_the_memory(tmp_path):
    with gpuscheduler.Scheduler(
        "cpu:1", memory_limit="1 MiB", spill_directory=str(tmp_path), check=True
    ) as s:
        x = da.ones((512, 512), chunks=(64, 512)).persist()
        run = Iteration(lambda a: a + 1, x, rounds=2)
        for _ in range(3):
            (x,) = run(x)
        assert s.last.spilled[-2] > 0
        assert float(x.mean().compute()) == 7
        del x
    assert not list(tmp_path.iterdir())


def test_errors_name_what_is_wrong_and_the_remedy():
    x = da.ones(10, chunks=5)
    with pytest.raises(ValueError, match="rounds=0"):
        Iteration(lambda a: a, x, rounds=0)
    with pytest.raises(TypeError, match="argument 0 of the state is a ndarray"):
        Iteration(lambda a: a, np.ones(3))
    with pytest.raises(ValueError, match="takes 1 arrays and gives 2"):
        Iteration(lambda a: (a, a), x)
    with pytest.raises(ValueError, match=r"result 0 of the step.*float32.*astype"):
        Iteration(lambda a: a.astype("f4"), x)
    with pytest.raises(ValueError, match=r"result 0 of the step has chunks \(\(10,\),\)"):
        Iteration(lambda a: a.rechunk(10), x)
    with pytest.raises(TypeError, match="result 0 of the step is a int"):
        Iteration(lambda a: 3, x)
    with pytest.raises(ValueError, match="unknown chunks"):
        Iteration(lambda a: a, x[x > 0])
    run = Iteration(lambda a: a + 1, x)
    with pytest.raises(ValueError, match="2 arrays were given"):
        run(x, x)
    with pytest.raises(ValueError, match=r"argument 0 has chunks \(\(10,\),\)"):
        run(x.rechunk(10))
    with pytest.raises(TypeError, match="argument 0 is a ndarray"):
        run(np.ones(10))
