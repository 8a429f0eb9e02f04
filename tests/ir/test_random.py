"""Random numbers by position: what the generator is, and that what is drawn is what NumPy means."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler.codegen.cpu import evaluate, node_calls, philox, philox_loops
from gpuscheduler.ir import expr as ir_expr
from gpuscheduler.ir import random
from gpuscheduler.ir.expr import Kernel, View, nodes

N = 200_000


def drawn(name, *args, key=7, shape=(N,), first=None, base=None, **kwargs):
    """What a chunk holds."""
    first = first or View.contiguous(shape)
    expr = random.draw(name, shape, first, key, args, kwargs, base)
    assert node_calls.why_unsupported(expr) is None
    (found,) = evaluate.evaluate(Kernel(shape, (expr,)), [])
    return found


# ---- the generator


def plain(key, counter):
    """Philox4x32-10 as the paper has it, in Python's integers."""
    k, x = list(key), list(counter)
    for _ in range(10):
        p, q = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(q >> 32) ^ x[1] ^ k[0], q & 0xFFFFFFFF, (p >> 32) ^ x[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


def test_the_reference_gives_what_random123_publishes():
    """Of its kat_vectors, "philox4x32 10"."""
    ones = 0xFFFFFFFF
    assert plain([0] * 2, [0] * 4) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert plain([ones] * 2, [ones] * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
def test_bits_are_those_of_the_reference(key, at):
    pair = (at >> 1) % 2**64
    words = plain((key % 2**32, key >> 32), (pair % 2**32, pair >> 32, 0, 0))
    low, high = words[2:] if at & 1 else words[:2]
    assert philox.bits(key, at) == low | high << 32


def test_uniform_and_normal_numbers_are_made_of_bits_as_documented():
    at = np.arange(-5, 20_001)
    words = philox.bits(3, at)
    np.testing.assert_array_equal(philox.uniform(3, at), (words >> 11) * 2.0**-53)
    single = philox.uniform(3, at, "f4")
    assert single.dtype == np.float32
    np.testing.assert_array_equal(single, (words >> 40) * 2.0**-24)
    even, odd = philox.bits(3, at & ~1), philox.bits(3, at | 1)
    for dtype, shift, rtol in (("f8", 11, 1e-14), ("f4", 40, 1e-6)):
        unit = 2.0 ** -(64 - shift)
        r = np.sqrt(-2 * np.log(((even >> shift) + np.uint64(1)) * unit))
        angle = 2 * np.pi * ((odd >> shift) * unit)
        expected = r * np.where(at & 1, np.sin(angle), np.cos(angle))
        found = philox.normal(3, at, dtype)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-14)


def test_logarithms_and_turns_are_as_good_as_numpys():
    rng = np.random.default_rng(0)
    special = np.array([0, 2**64 - 1, 2**11, 2**63, 2**63 - 1], np.uint64)
    even = np.concatenate([rng.integers(0, 2**64, 100_000, np.uint64), special])
    odd = rng.permutation(even)
    a, b = np.empty(even.size), np.empty(even.size)
    philox_loops._box_muller(even, odd, np.uint64(11), 2.0**-53, a, b)
    wide = np.longdouble
    u, v = ((even >> 11).astype(wide) + 1) * wide(2) ** -53, (odd >> 11).astype(wide) * 2.0**-53
    r, angle = np.sqrt(-2 * np.log(u)), 2 * wide("3.14159265358979323846264338327950288") * v
    for found, expected in ((a, r * np.cos(angle)), (b, r * np.sin(angle))):
        assert np.max(np.abs(found - expected)) < 4e-15
        assert np.isfinite(found).all()


# ---- positions


@pytest.mark.parametrize("op", ["bits", "uniform", "normal"])
@pytest.mark.parametrize("step", [1, 2, 3, -1, -2, 1000])
@pytest.mark.parametrize("start", [0, 1, -7, 2**40 + 1])
def test_runs_give_what_single_elements_give(op, step, start):
    dtypes = ["u8"] if op == "bits" else ["f8", "f4"]
    for dtype in map(np.dtype, dtypes):
        at = start + step * np.arange(2500)
        one = np.array([philox.values(op, 5, i, dtype) for i in at[:50]])
        mixed = philox.values(op, 5, np.concatenate([at, at[:1]]), dtype)
        np.testing.assert_array_equal(mixed[:50], one)
        np.testing.assert_array_equal(philox.values(op, 5, at, dtype), mixed[:-1])
        out = np.empty((50, 50), dtype)
        philox.fill(op, 5, View(start, (50 * step, step)), out)
        np.testing.assert_array_equal(out.ravel(), mixed[:-1])
        turned = np.empty((50, 50), dtype).T
        philox.fill(op, 5, View(start, (50 * step, step)), turned)
        np.testing.assert_array_equal(turned, out)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_chunks_do_not_matter(data):
    """Any way to cut an array gives the same values."""
    shape = data.draw(st.tuples(st.integers(1, 30), st.integers(1, 30)))
    view = View.contiguous(shape)
    name, *args = data.draw(st.sampled_from([("normal", 1, 2), ("integers", 0, 10**12),
                                             ("wald", 1.0, 2.0), ("random",)]))  # fmt: skip
    every = drawn(name, *args, shape=shape)
    i = sorted(data.draw(st.tuples(st.integers(0, shape[0]), st.integers(0, shape[0]))))
    j = sorted(data.draw(st.tuples(st.integers(0, shape[1]), st.integers(0, shape[1]))))
    part = (i[1] - i[0], j[1] - j[0])
    start = i[0] * shape[1] + j[0]
    odd = start % 2
    for first, base in ((View(start, view.strides), None), (View(odd, view.strides), start - odd)):
        found = drawn(name, *args, shape=part, first=first, base=base)
        np.testing.assert_array_equal(found, every[slice(*i), slice(*j)])


def test_blocks_of_any_size_draw_the_same():
    expr = random.draw("normal", (40, 50), View(1, (50, 1)), 7)
    turned = random.draw("normal", (40, 50), View(1, (1, 40)), 7)
    for made in (expr, turned):
        kernel = Kernel((40, 50), (made,))
        found = {evaluate.evaluate(kernel, [], n)[0].tobytes() for n in (64, 1000, 1 << 20)}
        assert len(found) == 1


# ---- keys


def test_keys_differ_and_stay():
    parent = np.random.SeedSequence(42)
    material = [*parent.spawn(3), parent, np.arange(3, dtype="u4"), np.arange(3, dtype="u8"),
                b"", b"a", "a", 0, 1, 1.0, None, (1, 2), (12,), [(1,), 2], {"a": 1},
                np.random.PCG64(1), np.random.PCG64(2), np.random.MT19937(1)]  # fmt: skip
    keys = [random.key_of(m) for m in material]
    assert len(set(keys)) == len(keys)
    assert keys == [random.key_of(m) for m in material]
    assert all(0 <= k < 2**64 for k in keys)
    assert random.key_of(np.arange(3, dtype=">u4")) == keys[4]
    with pytest.raises(TypeError, match="key of random numbers cannot have a value of object"):
        random.key_of(object())


def test_keys_are_the_same_in_another_process():
    code = "import numpy as np; from gpuscheduler.ir.random import key_of; "
    code += "print(key_of(np.random.SeedSequence(42), 'x'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == random.key_of(np.random.SeedSequence(42), "x")


# ---- what is drawn

CONTINUOUS = {
    "random": (), "uniform": (-2, 5), "standard_normal": (),
    "normal": (1, 3.5), "lognormal": (0.5, 0.7), "standard_exponential": (), "exponential": (2.5,),
    "laplace": (1, 2), "logistic": (-1, 0.5), "gumbel": (1, 2), "rayleigh": (1.5,),
    "weibull": (1.7,), "pareto": (3,), "power": (2.5,), "standard_cauchy": (),
    "triangular": (-1, 0, 3), "standard_t": (3.5,), "wald": (1.5, 2),
}  # fmt: skip
#: The same in scipy.stats: its name, its shape parameters, and where and how wide it is.
SCIPY = {
    "random": ("uniform",), "uniform": ("uniform", -2, 7),
    "standard_normal": ("norm",), "normal": ("norm", 1, 3.5),
    "lognormal": ("lognorm", 0.7, 0, math.exp(0.5)), "standard_exponential": ("expon",),
    "exponential": ("expon", 0, 2.5), "laplace": ("laplace", 1, 2),
    "logistic": ("logistic", -1, 0.5), "gumbel": ("gumbel_r", 1, 2),
    "rayleigh": ("rayleigh", 0, 1.5), "weibull": ("weibull_min", 1.7), "pareto": ("lomax", 3),
    "power": ("powerlaw", 2.5), "standard_cauchy": ("cauchy",),
    "triangular": ("triang", 0.25, -1, 4), "standard_t": ("t", 3.5),
    "wald": ("invgauss", 1.5 / 2, 0, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTINUOUS)
def test_distributions_are_those_of_their_names(name):
    stats = pytest.importorskip("scipy.stats")
    found = drawn(name, *CONTINUOUS[name])
    assert found.dtype == np.float64
    assert np.isfinite(found).all()
    kind, *parameters = SCIPY[name]
    assert stats.kstest(found, kind, tuple(parameters)).pvalue > 1e-3
    single = drawn(name, *CONTINUOUS[name], dtype="f4")
    assert single.dtype == np.float32
    assert stats.kstest(single.astype("f8"), kind, tuple(parameters)).pvalue > 1e-3
    # and NumPy means the same by these parameters
    method = getattr(np.random.default_rng(0), name)
    theirs = method(*CONTINUOUS[name], size=N)
    assert stats.ks_2samp(found, theirs).pvalue > 1e-3


@pytest.mark.parametrize("name", ["random", "standard_normal", "standard_exponential"])
def test_float32_is_drawn_as_such(name):
    stats = pytest.importorskip("scipy.stats")
    found = drawn(name, dtype=np.float32)
    assert found.dtype == np.float32
    theirs = getattr(np.random.default_rng(0), name)(N, dtype=np.float32)
    assert stats.ks_2samp(found, theirs).pvalue > 1e-3


def test_the_tails_of_normal_numbers_are_there():
    found = philox.normal(1, np.arange(4_000_000))
    for sigmas in (3, 4, 4.5):
        expected = found.size * math.erfc(sigmas / math.sqrt(2))
        assert abs((np.abs(found) > sigmas).sum() - expected) < 5 * math.sqrt(expected)


def test_neighbours_keys_and_further_draws_are_independent():
    at = np.arange(500_000)
    limit = 5 / math.sqrt(at.size)
    x = philox.normal(1, at)
    for lag in (1, 2, 3, 1000):
        assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < limit
        assert abs(np.corrcoef(x[:-lag] ** 2, x[lag:] ** 2)[0, 1]) < limit
    for key in (0, 2, 1 + (1 << 32), random._ElementDraws(None, 1).new_draws().key):
        assert abs(np.corrcoef(x, philox.normal(key, at))[0, 1]) < limit
        assert abs(np.corrcoef(x**2, philox.normal(key, at) ** 2)[0, 1]) < limit
    u = philox.uniform(1, at)
    counts = np.histogram2d(u[::2], u[1::2], 20, [[0, 1], [0, 1]])[0]
    expected = u.size / 2 / 400
    assert abs(((counts - expected) ** 2 / expected).sum() - 399) < 5 * math.sqrt(2 * 399)


def test_every_bit_is_as_often_set():
    words = philox.bits(9, np.arange(200_000))
    ones = [int(((words >> np.uint64(k)) & np.uint64(1)).sum()) for k in range(64)]
    assert max(abs(n - 100_000) for n in ones) < 5 * math.sqrt(50_000)


# ---- integers


@pytest.mark.parametrize(
    ("args", "kwargs", "low", "high", "dtype"),
    [
        ((10,), {}, 0, 9, "i8"),
        ((-3, 4), {}, -3, 3, "i8"),
        ((0, 1), {"endpoint": True}, 0, 1, "i8"),
        ((0, 8), {"dtype": np.uint8}, 0, 7, "u1"),
        ((0, 256), {"dtype": "u1"}, 0, 255, "u1"),
        ((-128, 127), {"dtype": "i1", "endpoint": True}, -128, 127, "i1"),
        ((5,), {"high": 6}, 5, 5, "i8"),
        ((0, 2), {"dtype": bool}, 0, 1, "?"),
        ((0, 3 * 2**40), {}, 0, 3 * 2**40 - 1, "i8"),
        ((-(2**63), 2**63 - 1), {"endpoint": True}, -(2**63), 2**63 - 1, "i8"),
        ((0, 2**64 - 1), {"dtype": "u8"}, 0, 2**64 - 2, "u8"),
        ((2**63, 2**63 + 3), {"dtype": "u8"}, 2**63, 2**63 + 2, "u8"),
    ],
)
def test_integers_are_even_between_their_bounds(args, kwargs, low, high, dtype):
    found = drawn("integers", *args, **kwargs)
    assert found.dtype == dtype
    span = high - low + 1
    assert low <= int(found.min()) <= int(found.max()) <= high
    if span <= 256:
        counts = np.bincount((found.astype(object) - low).astype(int), minlength=span)
        expected = N / span
        chi = ((counts - expected) ** 2 / expected).sum()
        assert chi - (span - 1) < 5 * math.sqrt(2 * span)
    else:
        unit = (found.astype(float) - low) / span
        assert abs(unit.mean() - 0.5) < 5 / math.sqrt(12 * N)
        assert abs(unit.var() - 1 / 12) < 5e-3


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 2**64), st.integers(0, 1000))
def test_integers_are_the_high_part_of_a_product(span, key):
    """floor(word * span / 2**64), of a word of 128 bits where the span is wide."""
    expr = random._integer_below(random._ElementDraws(ir_expr.index(View(0, (1,))), key), span)
    (found,) = evaluate.evaluate(Kernel((3,), (expr,)), [])
    at = np.arange(3)
    word = [int(w) for w in philox.bits(key, at)]
    if span <= 2**24 or span & (span - 1) == 0:
        expected = [w * span >> 64 for w in word]
    else:
        more = [int(w) for w in philox.bits(random.key_of("another", key), at)]
        expected = [((w << 64) + m) * span >> 128 for w, m in zip(word, more, strict=True)]
    assert found.tolist() == expected


def test_geometric_numbers_count_trials():
    stats = pytest.importorskip("scipy.stats")
    for p in (0.05, 0.4, 0.999):
        found = drawn("geometric", p)
        assert found.dtype == np.int64
        most = int(stats.geom.ppf(1 - 1e-3, p))
        counts = np.bincount(np.minimum(found, most), minlength=most + 1)[1:]
        expected = N * np.append(stats.geom.pmf(np.arange(1, most), p), stats.geom.sf(most - 1, p))
        assert ((counts - expected) ** 2 / expected).sum() < most + 6 * math.sqrt(2 * most) + 10


# ---- what is left to NumPy


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("gamma", (2,), {}),
        ("poisson", (), {}),
        ("choice", (5,), {}),
        ("normal", (0, -1), {}),
        ("normal", (0, -0.0), {}),
        ("normal", (np.zeros(3), 1), {}),
        ("normal", (0, math.nan), {}),
        ("geometric", (0.5,), {"dtype": "f4"}),
        ("exponential", (), {"dtype": "i4"}),
        ("laplace", (), {"dtype": "f2"}),
        ("normal", (1j,), {}),
        ("uniform", (1, 0), {}),
        ("uniform", (-1.7e308, 1.7e308), {}),
        ("random", (), {"dtype": "f2"}),
        ("random", (), {"dtype": "i4"}),
        ("random", (), {"out": np.zeros(3)}),
        ("integers", (0,), {}),
        ("integers", (3, 3), {}),
        ("integers", (0, 300), {"dtype": "u1"}),
        ("integers", (-1, 3), {"dtype": "u1"}),
        ("integers", (0, 2.5), {}),
        ("integers", ([1, 2],), {}),
        ("integers", (5,), {"dtype": "f8"}),
        ("triangular", (0, 3, 2), {}),
        ("triangular", (1, 1, 1), {}),
        ("weibull", (-1,), {}),
        ("pareto", (0,), {}),
        ("geometric", (1.5,), {}),
        ("exponential", ("a",), {}),
        ("exponential", (1, 2, 3), {}),
    ],
)
def test_what_it_cannot_draw_is_left_to_numpy(name, args, kwargs):
    assert random.draw(name, (3,), View(0, (1,)), 1, args, kwargs) is None


def test_expressions_say_where_and_of_what():
    expr = random.draw("wald", (3,), View(0, (1,)), 1, (1, 2), {}, base=100)
    draws = {(n.op, n.data) for n in nodes((expr,)) if n.op in ir_expr.RANDOM}
    assert draws == {("normal", 1), ("uniform", random.key_of("another", 1))}
    constants = {n.value.item() for n in nodes((expr,)) if n.op == "constant"}
    assert 100 in constants


@pytest.mark.parametrize(
    ("shape", "strides", "rows"),
    [
        ((1000, 2), (2, 1), 1),  # points: one row
        ((1000, 3), (3, 1), 1),
        ((10, 100, 3), (300, 3, 1), 1),
        ((1000, 2), (3, 1), 0),  # a part of each: drawn by their numbers, many at once
        ((1000, 1), (3, 1), 1),
        ((10, 100), (200, 1), 10),
    ],
)
def test_short_rows_are_drawn_many_at_once(shape, strides, rows, monkeypatch):
    """A loop begun for each point took 40 times as long as to draw it."""
    begun = []
    run = philox._run
    monkeypatch.setattr(philox, "_run", lambda *a: begun.append(len(a[2])) or run(*a))
    out = np.empty(shape)
    philox.fill("normal", 5, View(7, strides), out)
    assert sum(begun) == rows
    at = 7 + sum(s * i for s, i in zip(strides, np.indices(shape), strict=True))
    np.testing.assert_array_equal(out, philox.values("normal", 5, at, np.dtype("f8")))
