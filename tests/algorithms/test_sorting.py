"""sort, argsort and lexsort give NumPy's stable values, with the chunks of the input."""

from __future__ import annotations

import os
from itertools import product

import dask
import dask.array as da
import numpy as np
import pytest
from dask.base import tokenize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuscheduler import Scheduler
from gpuscheduler.algorithms import local_sort, runs, splitters
from gpuscheduler.array import argsort, lexsort, sort, sort_complex

usual = settings(max_examples=int(os.environ.get("GPUSCHEDULER_EXAMPLES", "100")), deadline=None)
RNG = np.random.default_rng(7)
N = 3000


def adversaries():
    """Inputs that break sorts, by name."""
    ramp = np.arange(N)
    return {
        "random": RNG.random(N),
        "float32": RNG.standard_normal(N).astype("f4"),
        "float16": RNG.standard_normal(N).astype("f2"),
        "all equal": np.ones(N),
        "two values": RNG.integers(0, 2, N),
        "sorted": ramp,
        "reversed": ramp[::-1],
        "organ pipe": np.minimum(ramp, ramp[::-1]),
        "saw-tooth": ramp % 17,
        "some nan": np.where(RNG.random(N) < 0.1, np.nan, RNG.random(N)),
        "negative nan": np.copysign(np.where(RNG.random(N) < 0.1, np.nan, RNG.random(N)), -1),
        "all nan": np.full(N, np.nan),
        "signed zeros": np.where(ramp % 3 == 1, 1.0, np.copysign(0.0, RNG.random(N) - 0.5)),
        "infinities": RNG.choice([np.inf, -np.inf, 0.0, np.nan, 1.0], N),
        "denormals": RNG.integers(-50, 50, N) * np.float32(1e-45),
        "zipf": RNG.zipf(1.5, N),
        "int8": RNG.integers(-128, 128, N).astype("i1"),
        "uint64 extremes": RNG.choice(np.array([0, 1, 2**63, 2**64 - 1], "u8"), N),
        "int64 extremes": RNG.choice(np.array([-(2**63), -1, 0, 2**63 - 1]), N),
        "bool": RNG.random(N) < 0.3,
        "complex": RNG.integers(0, 5, N) + 1j * RNG.integers(0, 5, N),
        "complex nan": RNG.choice([1, 1j, complex(np.nan, 1), complex(1, np.nan),
                                   complex(np.nan, np.nan), complex(np.nan, 0)], N),
        "dates": RNG.integers(0, 50, N).astype("M8[s]"),
        "not a time": np.where(RNG.random(N) < 0.1, np.timedelta64("NaT", "ns"),
                               RNG.integers(-9, 9, N).astype("m8[ns]")),
        "strings": RNG.choice(["b", "abc", "", "ab", "é"], N),
        "bytes": RNG.choice([b"b", b"abc", b"", b"\xff"], N),
        "big-endian": RNG.standard_normal(N).astype(">f8"),
        "long double": RNG.standard_normal(N).astype(np.longdouble),
    }  # fmt: skip


ADVERSARIES = adversaries()
#: Even, uneven, and with empty blocks.
CHUNKS = {
    "even": (500,) * 6,
    "uneven": (1, 2000, 499, 0, 100, 400),
    "empty": (0, 0, 3000, 0, 0),
    "one": (3000,),
}


def dask_array(x, chunks):
    """A 1-D array whose chunks may be empty; Dask's own functions leave empty ones out."""
    name = f"given-{tokenize(x, chunks)}"
    parts = np.split(x, np.cumsum(chunks)[:-1])
    return da.Array({(name, i): p for i, p in enumerate(parts)}, name, (chunks,), meta=x[:0])


def unknown(x):
    """The same array with chunks of unknown size along its first axis."""
    out = da.Array(x.dask, x.name, ((np.nan,) * x.numblocks[0], *x.chunks[1:]), meta=x._meta)
    return out


def descending_indices(x):
    """Stable, largest first, NaN last: by ranks of the distinct values."""
    missing = np.isnat(x) if x.dtype.kind in "mM" else np.isnan(x) if x.dtype.kind in "fc" else None
    _, rank = np.unique(x, return_inverse=True, equal_nan=True)
    rank = -rank.astype(np.int64)
    if missing is not None:
        rank[missing] = 1
    return np.argsort(rank, kind="stable")


def assert_same(got, expected):
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
    if expected.dtype.kind == "f":
        zeros = expected == 0
        np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(expected[zeros]))


@pytest.fixture(params=[1, 2, 5], ids="{} runs".format)
def with_runs(request):
    with dask.config.set({"gpuscheduler.sort-runs": request.param}):
        yield request.param


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_sort_and_argsort_of_adversaries(name, chunks, with_runs, monkeypatch):
    monkeypatch.setattr(splitters, "SAMPLES", 16)
    monkeypatch.setattr(splitters, "FEW", 50)
    x, lengths = ADVERSARIES[name], CHUNKS[chunks]
    lazy = dask_array(x, lengths)
    for made, expected in [
        (np.sort(lazy), np.sort(x, kind="stable")),
        (np.argsort(lazy), np.argsort(x, kind="stable")),
    ]:
        assert made.chunks == (lengths,)
        assert made.dtype == expected.dtype
        blocks = dask.compute(*made.to_delayed().ravel(), scheduler="sync")
        assert tuple(map(len, blocks)) == lengths
        assert {b.dtype for b in blocks} == {expected.dtype}
        assert_same(np.concatenate(blocks, dtype=expected.dtype), expected)


@pytest.mark.parametrize("name", [n for n in ADVERSARIES if not n.startswith("complex nan")])
def test_descending_puts_nan_last_and_keeps_ties_in_order(name, with_runs, monkeypatch):
    monkeypatch.setattr(splitters, "SAMPLES", 4)
    x = ADVERSARIES[name]
    lazy, order = dask_array(x, CHUNKS["uneven"]), descending_indices(x)
    assert_same(sort(lazy, descending=True).compute(scheduler="sync"), x[order])
    assert_same(argsort(lazy, descending=True).compute(scheduler="sync"), order)


def test_descending_complex_with_nan_is_the_order_of_its_indices(with_runs):
    x = ADVERSARIES["complex nan"]
    lazy = dask_array(x, CHUNKS["even"])
    order = argsort(lazy, descending=True).compute(scheduler="sync")
    ordered = sort(lazy, descending=True).compute(scheduler="sync")
    np.testing.assert_array_equal(ordered, x[order])
    assert np.isnan(ordered[(~np.isnan(x)).sum() :]).all()


@pytest.mark.parametrize("scheduler", ["sync", "threads", "cpu:1", "cpu:4"])
@pytest.mark.parametrize("number", [1, 4])
def test_each_scheduler_gives_the_same(scheduler, number):
    x = ADVERSARIES["some nan"]
    lazy, keys = (
        dask_array(x, CHUNKS["uneven"]),
        dask_array(ADVERSARIES["saw-tooth"], CHUNKS["uneven"]),
    )
    with dask.config.set({"gpuscheduler.sort-runs": number}):
        lazies = [sort(lazy), argsort(lazy), lexsort((lazy, keys)), sort(unknown(lazy))]
    if scheduler.startswith("cpu"):
        with Scheduler(scheduler, check=True):
            got = dask.compute(*lazies)
    else:
        got = dask.compute(*lazies, scheduler=scheduler)
    expected = [np.sort(x), np.argsort(x, kind="stable"),
                np.lexsort((x, ADVERSARIES["saw-tooth"])), np.sort(x)]  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["random", "signed zeros", "strings", "two values"])
def test_unknown_chunks_keep_their_lengths(name, with_runs):
    x = ADVERSARIES[name]
    keep = RNG.random(N) < 0.4
    lazy = dask_array(x, CHUNKS["uneven"])
    picked = lazy[dask_array(keep, CHUNKS["uneven"])]
    lengths = [len(b) for b in dask.compute(*picked.to_delayed().ravel(), scheduler="sync")]
    for made, expected in [
        (sort(picked), np.sort(x[keep], kind="stable")),
        (argsort(picked), np.argsort(x[keep], kind="stable")),
        (sort(picked, descending=True), x[keep][descending_indices(x[keep])]),
        (lexsort((picked, picked)), np.argsort(x[keep], kind="stable")),
    ]:
        blocks = dask.compute(*made.to_delayed().ravel(), scheduler="sync")
        assert [len(b) for b in blocks] == lengths
        assert np.isnan(made.chunks[0]).all()
        assert_same(np.concatenate(blocks), expected)


@usual
@given(st.data())
def test_sort_of_any_small_array(data):
    """Any dtype, lengths of blocks, runs and sample sizes; NaN, ties and empty blocks."""
    dtype = data.draw(
        st.sampled_from(["i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "?", "M8[s]"])
    )
    lengths = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=7)))
    elements = hnp.from_dtype(np.dtype(dtype))
    if data.draw(st.booleans()):
        few = data.draw(st.lists(elements, min_size=1, max_size=3))
        elements = st.sampled_from(few)
    x = data.draw(hnp.arrays(dtype, sum(lengths), elements=elements))
    lazy = dask_array(x, lengths)
    if data.draw(st.booleans()):
        lazy = unknown(lazy)
    with (
        pytest.MonkeyPatch.context() as patch,
        dask.config.set({"gpuscheduler.sort-runs": data.draw(st.integers(1, 6))}),
    ):
        patch.setattr(splitters, "SAMPLES", data.draw(st.integers(1, 5)))
        patch.setattr(splitters, "FEW", data.draw(st.sampled_from([0, 4096])))
        ordered, order = sort(lazy), argsort(lazy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitters, "SAMPLES", data.draw(st.integers(1, 5)))
        got, indices = dask.compute(ordered, order, scheduler="sync")
    assert_same(got, np.sort(x, kind="stable"))
    assert_same(indices, np.argsort(x, kind="stable"))


@usual
@given(st.data())
def test_sort_along_any_axis(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    x = data.draw(hnp.arrays(data.draw(st.sampled_from(["f4", "i2", "f8", "c16"])), shape))
    axis = data.draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1)))
    lazy = da.from_array(x, chunks=data.draw(st.integers(1, 4)))
    with dask.config.set({"gpuscheduler.sort-runs": data.draw(st.integers(1, 3))}):
        ordered, order = np.sort(lazy, axis=axis), np.argsort(lazy, axis=axis)
        falling = sort(lazy, axis=axis, descending=True)
    expected = np.sort(x, axis=axis, kind="stable")
    assert ordered.shape == order.shape == expected.shape
    if axis is not None:
        assert ordered.chunks == order.chunks == lazy.chunks
    ordered, order, falling = dask.compute(ordered, order, falling, scheduler="sync")
    assert_same(ordered, expected)
    assert_same(order, np.argsort(x, axis=axis, kind="stable"))
    if axis is None:
        np.testing.assert_array_equal(falling, sort(x.ravel(), descending=True))
    elif x.dtype.kind != "c":
        nan = np.isnan(falling) if x.dtype.kind == "f" else np.zeros(falling.shape, bool)
        line = np.moveaxis(falling, axis, -1)
        missing = np.moveaxis(nan, axis, -1)
        with np.errstate(invalid="ignore"):
            falls = (line[..., 1:] <= line[..., :-1]) | missing[..., 1:]
        assert falls.all()
        assert (missing[..., 1:] >= missing[..., :-1]).all()
        np.testing.assert_array_equal(np.sort(falling, axis=axis), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("most", [1e9, 1000, 100])
def test_lines_of_any_length_beside_the_memory(axis, most, monkeypatch):
    """Blocks of whole lines, blocks that are rechunked, and long lines sorted one by one."""
    monkeypatch.setattr("gpuscheduler.algorithms.sorting.most_line_bytes", lambda *_: most)
    x = RNG.integers(0, 30, (20, 3, 7) if axis == 0 else (3, 20, 7) if axis == 1 else (3, 7, 20))
    lazy = da.from_array(x, chunks=(3, 2, 4))
    with dask.config.set({"gpuscheduler.sort-runs": 3}):
        ordered, order = sort(lazy, axis=axis), argsort(lazy, axis=axis)
        by_keys = lexsort((lazy, -lazy // 4), axis=axis)
    assert ordered.chunks == order.chunks == lazy.chunks
    np.testing.assert_array_equal(ordered, np.sort(x, axis=axis))
    np.testing.assert_array_equal(order, np.argsort(x, axis=axis, kind="stable"))
    np.testing.assert_array_equal(by_keys, np.lexsort((x, -x // 4), axis=axis))


@pytest.mark.parametrize("dtype", ["f8", "f4", "i8", "i4", "f2", "M8[s]", "u4"])
@pytest.mark.parametrize("many", [False, True])
def test_long_lines_are_sorted_by_packed_words(dtype, many):
    """NumPy's fast paths: packed indices, ties put in order, and zeros restored."""
    most = 9 if many else 60000 if dtype == "f2" else 10**6
    x = RNG.integers(0 if dtype[0] == "u" else -most, most, 20000)
    x = x.astype("i4").astype(dtype) if dtype != "M8[s]" else x.astype(dtype)
    if dtype[0] == "f":
        x[::7] = np.nan
        x[::5] = np.copysign(0, RNG.random(4000) - 0.5)
    order = np.argsort(x.astype("f4") if dtype == "f2" else x, kind="stable")
    np.testing.assert_array_equal(local_sort.argsort(x), order)
    assert_same(x[order], local_sort.sort_pieces([x]))
    assert_same(local_sort.sort_pieces([x]), np.sort(x, kind="stable"))
    pair = np.stack([x, x[::-1]])
    assert_same(local_sort.sort_lines(pair, 1), np.sort(pair, axis=1, kind="stable"))
    np.testing.assert_array_equal(local_sort.argsort_lines(pair, 1), np.argsort(pair, 1, "stable"))


@usual
@given(st.data())
def test_short_lines_are_sorted_as_words_of_line_and_key(data):
    """What CuPy's blocks take; here on NumPy's."""
    dtype = data.draw(st.sampled_from(["f4", "i2", "u4", "?", "f2", "i4"]))
    x = data.draw(hnp.arrays(dtype, st.tuples(st.integers(1, 5), st.integers(1, 6))))
    got = local_sort._sort_packed(x)
    if got is None:
        assert x.dtype.kind == "f"
        assert (np.signbit(x) & (x == 0)).any()
    else:
        assert_same(got, np.sort(x.astype("f4") if dtype == "f2" else x, axis=1).astype(dtype))
    assert local_sort._sort_packed(x.astype("f8")) is None


@usual
@given(st.data())
def test_lexsort_of_any_keys(data):
    n = data.draw(st.integers(0, 20))
    dtypes = data.draw(st.lists(st.sampled_from(["i1", "f4", "u8", "U2", "c8", "f8"]), min_size=1,
                                max_size=4))  # fmt: skip
    keys = [data.draw(hnp.arrays(d, n, elements=_few(d, data))) for d in dtypes]
    chunks = [data.draw(st.integers(1, 5)) for _ in keys]
    lazy = tuple(da.from_array(k, chunks=c) for k, c in zip(keys, chunks, strict=True))
    with dask.config.set({"gpuscheduler.sort-runs": data.draw(st.integers(1, 4))}):
        order = np.lexsort(lazy)
    assert_same(order.compute(scheduler="sync"), np.lexsort(keys))


def _few(dtype, data):
    elements = hnp.from_dtype(np.dtype(dtype))
    return st.sampled_from(data.draw(st.lists(elements, min_size=1, max_size=3)))


def test_lexsort_takes_rows_of_one_array():
    x = RNG.integers(0, 4, (3, 50))
    np.testing.assert_array_equal(np.lexsort(da.from_array(x, chunks=(2, 13))), np.lexsort(x))


@usual
@given(st.data())
def test_cuts_sum_to_the_ranks_and_candidates_are_few(data):
    lengths = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=5))
    values = data.draw(st.sampled_from([2, 30, 10**6]))
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    made = [np.sort(rng.integers(0, values, n)) for n in lengths]
    ranks = sorted(data.draw(st.lists(st.integers(0, sum(lengths)), min_size=1, max_size=4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitters, "SAMPLES", data.draw(st.integers(1, 20)))
        samples = [splitters.sample_run([r], len(made)) for r in made]
        brackets = splitters.find_brackets(samples, ranks)
        found = [splitters.find_candidates([r], brackets) for r in made]
    cuts = splitters.find_cuts(found, brackets)
    np.testing.assert_array_equal(cuts[:, 1:-1].sum(axis=0), ranks)
    assert (np.diff(cuts, axis=1) >= 0).all()
    for t, rank in enumerate(ranks):
        left = np.concatenate([r[: c[t + 1]] for r, c in zip(made, cuts, strict=True)])
        right = np.concatenate([r[c[t + 1] :] for r, c in zip(made, cuts, strict=True)])
        assert left.size == rank
        assert not left.size or not right.size or left.max() <= right.min()
        sent = sum(c.counts[t].size for c in found)
        assert sent <= 3 * sum(s.step for s in samples) + len(made)


def test_sort_refuses_what_has_no_order():
    with pytest.raises(TypeError, match=r"sort: dtype object has no order here: use numbers"):
        np.sort(da.from_array(np.array([1, None], object), chunks=1))
    with pytest.raises(TypeError, match="argsort: dtype"):
        np.argsort(da.zeros(3, dtype=[("a", int)]))
    with pytest.raises(TypeError, match="order="):
        np.sort(da.ones(3), order="a")
    with pytest.raises(ValueError, match="kind='bogo'"):
        np.sort(da.ones(3), kind="bogo")
    with pytest.raises(ValueError, match="not both"):
        np.sort(da.ones(3), kind="stable", stable=True)
    with pytest.raises(np.exceptions.AxisError):
        np.sort(da.ones(3), axis=1)
    with pytest.raises(np.exceptions.AxisError):
        np.sort(da.asarray(3.0))
    with pytest.raises(TypeError, match=r"MaskedArray: use NumPy's"):
        sort(da.ma.masked_equal(da.ones(3), 1))
    with pytest.raises(ValueError, match="use equal ones"):
        np.lexsort((da.ones(3), da.ones(4)))
    with pytest.raises(TypeError, match="no keys"):
        lexsort(())


def test_lines_over_unknown_chunks_name_the_remedy(monkeypatch):
    monkeypatch.setattr("gpuscheduler.algorithms.sorting.lines_fit", lambda *_: False)
    x = unknown(da.ones((8, 8), chunks=4))
    with pytest.raises(ValueError, match=r"call x.compute_chunk_sizes\(\) before"):
        sort(x, axis=1)


def test_sort_complex_is_numpys():
    for x in (np.array([3, 1], "i1"), np.array([3.0, 1, 2]), np.array([1j, 1])):
        assert_same(sort_complex(da.from_array(x, chunks=1)).compute(), np.sort_complex(x))


def test_graph_of_unknown_chunks_grows_with_the_number_of_blocks():
    """Not with its square: each block reads the lengths of all as one value."""
    with dask.config.set({"gpuscheduler.sort-runs": 1}):
        reads = [
            sum(len(task.dependencies) for task in dict(sort(unknown(x)).dask).values())
            for x in (da.ones(n, chunks=1) for n in (20, 40))
        ]
    assert reads[1] < 2.2 * reads[0]


def test_read_only_blocks_stay_as_they_are():
    x = np.arange(10)[::-1].copy()
    x.flags.writeable = False
    lazy = da.from_array(x, chunks=5, asarray=False)
    np.testing.assert_array_equal(np.sort(lazy), np.arange(10))
    np.testing.assert_array_equal(np.sort(lazy.rechunk(10)), np.arange(10))
    np.testing.assert_array_equal(x, np.arange(10)[::-1])


def test_a_sort_of_another_array_of_equal_chunks_is_not_planned_again(planned):
    with Scheduler("cpu:2"), dask.config.set({"gpuscheduler.sort-runs": 3}):
        for seed in (1, 2, 3):
            x = np.random.default_rng(seed).random(1000)
            np.testing.assert_array_equal(np.sort(da.from_array(x, chunks=100)), np.sort(x))
    assert len(planned) == 1


@pytest.mark.parametrize(
    ("nbytes", "machine", "expected"),
    [
        (1e6, (4, 1e9), 1),  # small
        (4e9, (1, 100e9), 1),  # there is room
        (4e9, (2, 100e9), 1),  # two halves and a merge take as long
        (4e9, (4, 100e9), 4),
        (64e9, (4, 16e9), 12),  # out of core
        (64e9, (1, 16e9), 12),
        (float("nan"), (4, 16e9), 4),
        (4e9, None, 8),
    ],
)
def test_number_of_runs_suits_the_devices(nbytes, machine, expected):
    machine = machine and runs.SortDevices(*machine)
    assert runs.count_runs(nbytes, 100, machine) == expected
    assert runs.count_runs(nbytes, 2, machine) <= 2
    cheap = runs.count_runs(nbytes, 100, machine, is_merge_cheap=True)
    assert cheap == (2 if machine and machine.devices == 2 else expected)


def test_machine_is_that_of_the_entered_scheduler():
    assert runs.machine_in_use("numpy") is None
    with Scheduler("cpu:3", memory_limit=1000):
        assert runs.machine_in_use("numpy") == runs.SortDevices(3, 1000)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "U3"])
def test_two_threads_share_a_sort_where_merging_is_cheap(dtype, monkeypatch):
    monkeypatch.setattr(runs, "SMALL", 0)
    x = (RNG.random(4000) * 90).astype("i4").astype(dtype)
    with Scheduler("cpu:2", check=True):
        lazy = da.from_array(x, chunks=500)
        order, values = argsort(lazy), sort(lazy)
        sorted_runs = [str(k[0]) for k in dict(order.dask) if "-run-" in str(k[0])]
        assert len(sorted_runs) == 2
        assert any("-run-" in str(k[0]) for k in dict(values.dask)) == (dtype in ("c16", "U3"))
        np.testing.assert_array_equal(order.compute(), np.argsort(x, kind="stable"))
        np.testing.assert_array_equal(values.compute(), np.sort(x))


def test_runs_are_many_where_memory_is_short():
    """16 MB with 8 MiB: it is computed, and the values are right."""
    x = RNG.random(2 * 10**6)
    with Scheduler("cpu:2", memory_limit="4 MiB", check=True):
        lazy = da.from_array(x, chunks=50_000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs, "SMALL", 0)
            made = np.sort(lazy)
        assert sum(str(key[0]).startswith("sort-run-") for key in dict(made.dask)) == 12
        total = da.stack([made[:-1] <= made[1:]]).all()
        assert total.compute()
        np.testing.assert_array_equal(made[::1000].compute(), np.sort(x)[::1000])


def test_groups_of_blocks_are_contiguous_and_complete():
    for lengths, n in product([(5, 5, 5), (0, 0), (1, 100, 1, 1), (np.nan,) * 7], (1, 2, 3, 9)):
        groups = runs.group_blocks(lengths, n)
        assert [b for g in groups for b in g] == list(range(len(lengths)))
        assert 1 <= len(groups) <= n
