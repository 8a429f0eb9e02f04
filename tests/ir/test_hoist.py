"""A program in which rows and columns are computed once is the same program."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.codegen.cuda.kernel import generate
from gpuscheduler.fusion.task import compute_program
from gpuscheduler.ir import hoist
from gpuscheduler.ir.hoist import hoist_invariants
from gpuscheduler.tracing.abstract import AbstractArray
from gpuscheduler.tracing.trace import trace_function

EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "60"))
F8 = np.dtype("f8")


def program(function, *arrays):
    return trace_function(function, [AbstractArray(a.shape, a.dtype) for a in arrays])


def values(made, arrays):
    with np.errstate(all="ignore"):
        return compute_program(made, evaluate.evaluate, list(arrays))


def arrays(*shapes):
    return [np.random.default_rng(n).random(s) for n, s in enumerate(shapes)]


def haversine(lat, lon):
    a = np.sin((30 - lat) / 2) ** 2 + np.cos(lat) * 0.5 * np.sin((101 - lon) / 2) ** 2
    return np.arctan2(np.sqrt(a), np.sqrt(1 - a))


def test_a_distance_field_has_one_kernel_for_rows_and_one_for_columns():
    """Of five functions and two square roots, what is left per point is arctan2 and the roots."""
    x = arrays((700, 1), (1, 900))
    before = program(haversine, *x)
    after = hoist_invariants(before)
    assert [k.shape for k in after.kernels] == [(700,), (900,), (700, 900)]
    assert [len(k.outputs) for k in after.kernels] == [2, 1, 1]
    text = repr(after.kernels[-1].outputs[0])
    assert "sin" not in text and "cos" not in text and text.count("sqrt") == 2  # noqa: PT018
    assert after.kernels[-1].operations() < before.kernels[-1].operations() / 2
    np.testing.assert_array_equal(values(after, x), values(before, x))


def test_reductions_and_what_comes_behind_them():
    """The kernels behind one that is split read the arrays that they did."""
    x = arrays((800, 1), (1, 900))

    def function(lat, lon):
        z = haversine(lat, lon)
        return {"mean": z.mean(), "over": (z - z.mean()).max(axis=0), "rows": [z.sum(axis=1)]}

    before = program(function, *x)
    after = hoist_invariants(before)
    assert len(after.kernels) > len(before.kernels)
    got, want = values(after, x), values(before, x)
    for name in ("mean", "over"):
        np.testing.assert_array_equal(got[name], want[name])
    np.testing.assert_array_equal(got["rows"][0], want["rows"][0])


def test_no_more_is_computed_before_than_there_are_arguments_for(monkeypatch):
    """The most work first; several kernels, that are compiled at a time. All is generated."""
    x = arrays((700, 1), (1, 900))

    def waves(x, y):
        sines = sum(np.sin(k * x) * np.cos(y * k) for k in range(1, 200))
        return sines + np.exp(np.sin(x / 3) * np.sin(x / 5)) * y

    before = program(waves, *x)
    after = hoist_invariants(before)
    *small, large = after.kernels
    assert sum(len(k.outputs) for k in small) == hoist.MOST_ARRAYS
    assert max(len(k.outputs) for k in small) <= hoist.MOST_OUTPUTS
    assert any("exp" in repr(o) for k in small for o in k.outputs)
    assert all(generate(k).source for k in after.kernels)
    np.testing.assert_array_equal(values(after, x), values(before, x))
    monkeypatch.setattr(hoist, "MOST_BYTES", 3 * 700 * 8)
    assert sum(len(k.outputs) for k in hoist_invariants(before).kernels[:-1]) <= 3


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: np.sin(x) + np.cos(y), [(40, 1), (1, 50)]),  # few points
        (lambda x, y: x * 2 + y, [(1000, 1), (1, 1000)]),  # cheap ones
        (lambda x: np.sin(x), [(1000, 1000)]),  # different at each
        (lambda x, y: np.sin(x) * y, [(1000, 400), (1000, 400)]),
        (lambda x, y: np.sin(x) * y, [(1000, 500, 1), (1, 1, 3)]),  # hardly fewer
    ],
)
def test_programs_that_stay_as_they_are(function, shapes):
    made = program(function, *arrays(*shapes))
    assert hoist_invariants(made) is made


def test_what_is_put_in_front_takes_little_memory():
    """A function of two of three axes would be as large as many a chunk; what it reads is not."""

    def function(x, y, z):
        return np.exp(np.sin(x) * y) + z

    def shapes(n):
        made = trace_function(
            function, [AbstractArray(s, F8) for s in ((n, 1, 1), (1, 1000, 1), (1, 1, 64))]
        )
        return [k.shape for k in hoist_invariants(made).kernels]

    n = hoist.MOST_BYTES // (8 * 1000)
    assert shapes(n) == [(n, 1000), (n, 1000, 64)]
    assert shapes(n + 1) == [(n + 1,), (n + 1, 1000, 64)]


def test_what_is_chosen_by_place_is_not_read_elsewhere():
    """The rows of two arrays, one behind the other: each has an end."""
    x, y, z = arrays((300, 1), (200, 1), (1, 1000))

    def function(x, y, z):
        return np.exp(np.concatenate([np.sin(x), np.cos(y)])) * z

    before = program(function, x, y, z)
    after = hoist_invariants(before)
    assert [k.shape for k in after.kernels] == [(500,), (500, 1000)]
    np.testing.assert_array_equal(values(after, [x, y, z]), values(before, [x, y, z]))

    def guarded(x, y, z):
        return np.concatenate([np.sin(x) * z, np.cos(y) * z])

    before = program(guarded, x, y, z)
    assert hoist_invariants(before) is before


FUNCTIONS = [np.sin, np.exp, np.sqrt, np.tanh, np.square, np.negative]
JOINS = [np.add, np.multiply, np.maximum, np.arctan2, np.subtract]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_any_program_computes_the_same_bits(data):
    """Functions of coordinates along one axis, two or all, joined and reduced in any way."""
    ndim = data.draw(st.integers(1, 4))
    full = [data.draw(st.sampled_from([1, 2, 17, 40])) for _ in range(ndim)]
    count = data.draw(st.integers(1, 4))
    keep = [[data.draw(st.booleans()) for _ in full] for _ in range(count)]
    shapes = [tuple(n if k else 1 for n, k in zip(full, row, strict=True)) for row in keep]
    plan = tuple(
        (data.draw(st.sampled_from(FUNCTIONS)), data.draw(st.sampled_from(JOINS)),
         data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50)))
        for _ in range(data.draw(st.integers(1, 6)))
    )  # fmt: skip
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, ndim - 1)))))
    ending = data.draw(st.sampled_from(["none", "sum", "var", "argmax"]))

    def function(*x):
        made = list(x)
        for f, join, a, b in plan:
            made.append(join(f(made[a % len(made)]), made[b % len(made)]))
        z = made[-1]
        if ending == "argmax":
            return [z.argmax(), made[-2] * 2]
        return [z if ending == "none" else getattr(z, ending)(axis=axes), made[-2] * 2]

    x = arrays(*shapes)
    before = program(function, *x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hoist, "LEAST_POINTS", 1)
        patch.setattr(hoist, "FEWER", 2)
        patch.setattr(hoist, "LEAST_COST", data.draw(st.sampled_from([1, 10, 30])))
        after = hoist_invariants(before)
    event(f"{len(after.kernels) - len(before.kernels)} kernels in front")
    assert (after is before) == (len(after.kernels) == len(before.kernels))
    rtol = 1e-12 if ending in ("sum", "var") else 0  # blocks of other shapes add up in other orders
    for got, want in zip(values(after, x), values(before, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)
        assert got.shape == want.shape
