"""Rounds of a Monte Carlo loop: each has new seeds, which are data of a plan that is made once."""

from __future__ import annotations

import copy
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest
import toolz
from dask._task_spec import Task
from dask.highlevelgraph import MaterializedLayer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.pipeline.fingerprint import _LayerWords

SIZE, CHUNKS = 60, 6  # ten blocks: layers of so many are told column by column
A = np.arange(60.0)


def price(z):
    """The mean pay-off of an option."""
    return da.maximum(100 * da.exp(0.02 + 0.2 * z) - 100, 0).mean()


def draw(seed):
    return np.random.default_rng(seed).normal(size=60)


def draw_beside(block, seed):
    return block + np.random.default_rng(seed).normal(size=block.shape)


def draw_by_parts(block, seeds, block_id=None):
    return block + np.random.Generator(np.random.MT19937(seeds[block_id[0] % 2])).random(3)


def rng(s):
    return da.random.default_rng(s)


def one_seed(s):
    return np.random.SeedSequence(s, spawn_key=(7,))


def hypot_of_two(g, h, chunks=CHUNKS):
    return da.hypot(g.normal(size=SIZE, chunks=chunks), h.random(size=SIZE, chunks=chunks)).sum()


#: Programs of a seed.
PROGRAMS = {
    "price": lambda s: price(rng(s).normal(size=SIZE, chunks=CHUNKS)),
    "price of few blocks": lambda s: price(rng(s).normal(size=SIZE, chunks=25)),
    "float32": lambda s: price(rng(s).standard_normal(size=SIZE, chunks=CHUNKS, dtype="f4")),
    "integers": lambda s: (rng(s).integers(0, 99, size=(8, 9), chunks=4) * 2).sum(axis=0),
    "poisson": lambda s: rng(s).poisson(4, size=SIZE, chunks=CHUNKS).mean(),
    "multinomial": lambda s: rng(s).multinomial(20, [0.2, 0.3, 0.5], size=SIZE, chunks=CHUNKS),
    "of an array": lambda s: rng(s).normal(da.from_array(A, chunks=6), 2.0, chunks=CHUNKS) * 2,
    "choice": lambda s: rng(s).choice(10, size=SIZE, chunks=CHUNKS).mean(),
    "choice of an array": lambda s: (
        rng(s).choice(np.arange(4.0), size=SIZE, chunks=CHUNKS, p=[0.1, 0.2, 0.3, 0.4]).mean()
    ),
    "choice without replacement": lambda s: rng(s).choice(60, 30, False, chunks=30) + 1,
    "bootstrap": lambda s: da.map_blocks(
        lambda i, a: a[i], rng(s).integers(0, 60, size=(40, 60), chunks=(4, 60)), A, dtype="f8"
    ).mean(axis=1),
    "two arrays of one": lambda s: hypot_of_two(*[rng(s)] * 2),
    "two generators": lambda s: hypot_of_two(rng(s), rng([s, 1])),
    "philox": lambda s: rng(np.random.Philox(s)).normal(size=SIZE, chunks=CHUNKS).mean(),
    "state": lambda s: price(da.random.RandomState(s).normal(size=SIZE, chunks=CHUNKS)),
    "state, few blocks": lambda s: price(da.random.RandomState(s).normal(size=SIZE, chunks=25)),
    "integers of a state": lambda s: da.random.RandomState(s).randint(0, 9, size=60, chunks=6) + 1,
    "choice of a state": lambda s: da.random.RandomState(s).choice(9, size=SIZE, chunks=6) * 2,
    "seed in a function": lambda s: da.zeros(60, chunks=6).map_blocks(
        draw_beside, one_seed(s), dtype="f8"
    ),
    "seed of another key": lambda s: da.zeros(60, chunks=60) + da.from_delayed(
        dask.delayed(draw)(dask.delayed(one_seed(s))), (60,), dtype="f8"
    ),
    "seeds in a function": lambda s: da.zeros(60, chunks=3).map_blocks(
        draw_by_parts, tuple(one_seed(s).spawn(2)), dtype="f8"
    ),
}  # fmt: skip


def check_rounds(program, planned):
    """Rounds with other seeds have the values of Dask's threads, and are planned once."""
    before, counts, seen = [], [], set()
    for seed in (3, 4, 2**31, 4):
        x, want = program(seed), program(seed)
        for made, due in [(x, want), (x, want), *before]:  # choices draw on, each time
            expected = due.compute(scheduler="sync")
            rtol = 1e-5 if np.asarray(expected).dtype == np.float32 else 1e-12
            np.testing.assert_allclose(made.compute(), expected, rtol=rtol)
        seen.add(np.asarray(expected).tobytes())
        counts.append(len(planned))
        before = [(x, want)]
    assert counts[1:] == [counts[0]] * 3
    assert len(seen) > 2


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_rounds_with_other_seeds_are_planned_once(planned, name, fuse):
    with Scheduler(devices="cpu:2", check=True, fuse=fuse, fuse_least=0):
        check_rounds(PROGRAMS[name], planned)


def test_unseeded_arrays_are_planned_once(planned):
    values, counts = [], []
    with Scheduler(devices="cpu:2", fuse_least=0):
        for _ in range(3):
            values.append(float(da.random.normal(size=SIZE, chunks=CHUNKS).sum().compute()))
            counts.append(len(planned))
    assert len({*values}) == 3
    assert counts[2] == counts[0]


def test_persisted_draws_are_planned_once(planned):
    counts = []
    with Scheduler(devices="cpu:2", fuse_least=0):
        for seed in range(4):
            x = rng(seed).normal(size=SIZE, chunks=CHUNKS)
            y = x.persist()
            got = dask.compute(y.sum(), (y * y).mean())
            want = dask.compute(x.sum(), (x * x).mean(), scheduler="sync")
            np.testing.assert_allclose(got, want, rtol=1e-12)
            counts.append(len(planned))
    assert counts[3] == counts[0]


# ---- what must not be taken for another


def sources():
    """Generators of all kinds, and seeds of all types."""
    seeds = st.one_of(
        st.integers(0, 3),
        st.lists(st.integers(0, 2**33), min_size=1, max_size=3),
        st.builds(partial(np.random.SeedSequence, 1), spawn_key=st.tuples(st.integers(0, 2))),
        st.builds(lambda n: np.random.SeedSequence(n, pool_size=8), st.integers(0, 2)),
    )
    bits = ["PCG64", "Philox", "MT19937", "SFC64", "PCG64DXSM"]
    return st.tuples(st.sampled_from(["default", "default", "state", *bits]), seeds)


def generator(kind, seed):
    if kind == "default":
        return rng(seed)
    if kind != "state":
        return rng(getattr(np.random, kind)(seed))
    if not isinstance(seed, np.random.SeedSequence):
        seed = np.random.SeedSequence(seed)
    return da.random.RandomState(seed.generate_state(2))


METHODS = {
    "normal": lambda g, c: g.normal(1, 2, size=24, chunks=c),
    "uniform": lambda g, c: g.uniform(size=24, chunks=c),
    "poisson": lambda g, c: g.poisson(3, size=24, chunks=c),
    "choice": lambda g, c: g.choice(9, size=24, chunks=c),
    "of an array": lambda g, c: g.normal(da.from_array(A[:24], chunks=c), 1.0, chunks=c),
}
OPERATIONS = {
    "add": lambda x, y: x + 2 * y,
    "maximum": lambda x, y: da.maximum(x, y) - y,
    "concatenate": lambda x, y: da.concatenate([x, y])[::2],
    "index": lambda x, y: x[3:20] * y[4:21],
    "mean": lambda x, y: x - y.mean(),
}


@st.composite
def programs(draw):
    """Which generators draw by which methods, and what is done with that."""
    count = draw(st.integers(1, 2))
    kinds = [draw(sources())[0] for _ in range(count)]
    draws = draw(
        st.lists(
            st.tuples(st.integers(0, count - 1), st.sampled_from(sorted(METHODS))),
            min_size=1,
            max_size=3,
        )
    )
    steps = [draw(st.sampled_from(sorted(OPERATIONS))) for _ in draws[1:]]
    end = draw(st.sampled_from(["none", "sum", "max"]))
    return kinds, draws, steps, draw(st.sampled_from([3, 12])), end


def build(program, kinds, seeds):
    _, draws, steps, chunks, end = program
    seeds = copy.deepcopy(seeds)  # to spawn from one changes it
    generators = [generator(k, s) for k, s in zip(kinds, seeds, strict=True)]
    made = [METHODS[method](generators[n], chunks) for n, method in draws]
    out = made[0]
    for step, other in zip(steps, made[1:], strict=True):
        n = min(len(out), len(other))
        out = OPERATIONS[step](out[:n], other[:n]) if n > 21 else out + other[:n]
    return out if end == "none" else getattr(out, end)()


@st.composite
def histories(draw):
    """One program, and rounds: mostly of the same kinds of generators, with other seeds."""
    program = draw(programs())
    rounds = []
    for _ in range(draw(st.integers(2, 4))):
        kinds = list(program[0])
        if draw(st.integers(0, 4)) == 0:
            kinds[draw(st.integers(0, len(kinds) - 1))] = draw(sources())[0]
        seeds = [draw(sources())[1] for _ in kinds]
        if draw(st.booleans()):
            seeds = [seeds[0]] * len(seeds)  # then two may draw the same numbers
        rounds.append((kinds, seeds, draw(st.booleans())))
    return program, rounds


def check_history(history, scheduler):
    """Each round gives what Dask's threads give, at first and again, and so do earlier rounds."""
    program, rounds = history
    before = []
    with scheduler:
        for kinds, seeds, swap in rounds:
            if swap:
                kinds, seeds = kinds[::-1], seeds[::-1]
            pair = [build(program, kinds, seeds) for _ in range(2)]
            for made, due in [pair, pair, *before]:
                want = due.compute(scheduler="sync")
                got = made.compute()
                assert np.asarray(got).dtype == np.asarray(want).dtype
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
            before = [*before[-1:], pair]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.booleans())
def test_any_history_of_seeds(history, fuse):
    check_history(history, Scheduler(devices="cpu:2", fuse=fuse, fuse_least=0))


def test_a_seed_that_is_compared_elsewhere_is_told_by_its_value():
    """Nobody puts another object into what toolz makes of a function and its arguments."""

    def told(seed, rows):
        task = Task("k", toolz.curry(np.add), toolz.curry(draw_beside, seed=seed))
        layer = MaterializedLayer({("x", n): task for n in range(rows)})
        return _LayerWords().fingerprint(layer)

    for rows in (1, 9):
        a, b = (told(np.random.SeedSequence(n), rows) for n in (1, 2))
        assert a.words != b.words
        assert a.words == told(np.random.SeedSequence(1), rows).words
