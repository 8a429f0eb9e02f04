"""QR of tall blocks: the promise for every input, and every branch taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler.algorithms import tall_kernel
from gpuscheduler.algorithms.tall_kernel import (
    apply_factor,
    cholesky_qr,
    end_factor,
    householder_qr,
    make_gram,
    next_factor,
    start_factor,
    tall_qr,
    unit_roundoff,
)
from tests.support.matrices import check_qr, tall_matrix


def taken(function, *args):
    """A function's value, and the branches that were taken."""
    tall_kernel.branches.clear()
    value = function(*args)
    return value, list(tall_kernel.branches)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("condition", [1, 10, 1e4, 1e8, 1e12, 1e14, 1e17])
def test_promise_holds_for_every_condition(condition, dtype):
    x = tall_matrix(2000, 40, condition, dtype)
    check_qr(x, *tall_qr(x), promise=1)


@pytest.mark.parametrize(
    ("condition", "branches"),
    [
        (1, ["plain", "orthonormal"]),
        (1e4, ["plain", "library", "first order"]),
        (1e6, ["plain", "library", "near"]),
        (1e10, ["shift", "library", "library", "far", "first order"]),
        (1e13, ["shift", "library", "library", "far", "near"]),
        (1e17, ["shift", "library", "failed: factor", "householder"]),
    ],
)
def test_branches_follow_the_condition(condition, branches):
    _, found = taken(tall_qr, tall_matrix(4000, 60, condition))
    assert [f.removeprefix("solve by the ") for f in found] == branches


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
def test_diagonal_blocks_are_inverted_where_their_condition_is_small(dtype, monkeypatch):
    monkeypatch.setattr(tall_kernel, "TOGETHER", 16)
    x = tall_matrix(2000, 200, 1e6, dtype)
    (q, r), branches = taken(tall_qr, x)
    assert "solve" in branches
    check_qr(x, q, r, promise=1)


def test_a_bad_diagonal_block_is_solved_by_the_library_alone(monkeypatch):
    monkeypatch.setattr(tall_kernel, "TOGETHER", 16)
    x = tall_matrix(2000, 96, 2)
    x[:, 21] = x[:, 20] + 1e-4 * x[:, 21]
    (q, r), branches = taken(tall_qr, x)
    assert branches[:2] == ["plain", "solve by the library"]
    check_qr(x, q, r, promise=1)
    factor = start_factor(make_gram(x), 2.0**-53)
    assert [i is None for i in factor["inverses"]] == [False, True] + 4 * [False]


@pytest.mark.parametrize("condition", [2, 1e6, 1e10])
def test_factors_are_in_rows(condition, monkeypatch):
    """Each block would turn them again, and parts of them would be copied."""
    monkeypatch.setattr(tall_kernel, "TOGETHER", 16)
    x = tall_matrix(2000, 40, condition)
    factor = start_factor(make_gram(x), 2.0**-53)
    for _ in range(2):
        assert factor["factor"].flags.c_contiguous
        assert all(i is None or i.flags.c_contiguous for i in factor.get("inverses", []))
        x = apply_factor(x, factor)
        factor = next_factor(make_gram(x), factor)
        if factor["how"] == "keep":
            break


def adversaries():
    x = tall_matrix(1200, 40, 10)
    equal, zero, huge, random = x.copy(), x.copy(), x.copy(), np.random.default_rng(1)
    equal[:, 5] = equal[:, 7]
    zero[:, 5] = 0
    huge[3] *= 1e12
    locked = x.copy()
    locked.flags.writeable = False
    return {
        "equal columns": equal,
        "a zero column": zero,
        "all zero": x * 0,
        "one element": np.eye(1200, 40)[::-1] * 3,
        "one huge row": huge,
        "large": x * 1e200,
        "small": x * 1e-200,
        "columns graded": x * np.logspace(150, -150, 40),
        "columns graded within squares": x * np.logspace(60, -60, 40),
        "rows graded": x * np.logspace(150, -150, 1200)[:, None],
        "Fortran order": np.asfortranarray(x),
        "strided": np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2],
        "read-only": locked,
        "integers": random.integers(-9, 9, (1200, 40)),
        "rank one": np.outer(random.standard_normal(1200), random.standard_normal(40)),
        "Vandermonde": np.vander(np.linspace(0, 1, 1200), 40),
        "single, large": (x * 1e37).astype("f4"),
        "single, small": (x * 1e-30).astype("f4"),
        "single, graded": (x * np.logspace(36, -36, 40)).astype("f4"),
        "single, equal": equal.astype("f4"),
    }


@pytest.mark.parametrize("name", adversaries())
@pytest.mark.filterwarnings("error")
def test_promise_holds_for_adversaries(name):
    x = adversaries()[name]
    q, r = tall_qr(x)
    check_qr(x if x.dtype.kind == "f" else x.astype(float), q, r, promise=1)


@pytest.mark.parametrize("shape", [(1200, 0), (0, 0), (40, 40), (60, 40), (3, 8), (1, 1), (900, 1)])
def test_other_shapes_are_factored_by_the_library(shape):
    x = np.random.default_rng(2).standard_normal(shape)
    q, r = tall_qr(x)
    assert q.shape == (shape[0], min(shape))
    assert r.shape == (min(shape), shape[1])
    np.testing.assert_allclose(q @ r, x, atol=1e-13)
    np.testing.assert_allclose(q.T @ q, np.eye(min(shape)), atol=1e-13)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("error")
def test_nan_and_infinity_are_passed_on(value):
    x = tall_matrix(1200, 40, 10)
    x[7, 3] = value
    (q, r), branches = taken(tall_qr, x)
    assert branches == ["failed: range", "householder"]
    assert np.isnan(q).any()
    assert np.isnan(r).any()


def test_a_step_that_is_not_positive_definite_fails():
    bad = np.full((40, 40), 2.0) + np.eye(40)
    bad[0, 1] = bad[1, 0] = 100  # no shift of rounding's size mends it
    factor, branches = taken(start_factor, bad, 2.0**-53)
    assert (factor["how"], branches) == ("failed", ["failed: shifted factor"])


def test_a_step_that_overflows_fails():
    x = tall_matrix(1200, 40, 10)
    first = start_factor(make_gram(x), 2.0**-53)
    second, branches = taken(next_factor, np.full((40, 40), np.nan), first)
    assert (second["how"], branches) == ("failed", ["failed: overflow"])
    np.testing.assert_array_equal(second["r"], first["r"])


def test_a_last_step_that_is_far_off_fails_with_the_factor_before():
    x = tall_matrix(2000, 40, 1e10)
    first = start_factor(make_gram(x), 2.0**-53)
    gram = make_gram(apply_factor(x, first))
    assert next_factor(gram, first)["how"] == "solve"
    last, branches = taken(end_factor, gram, first)
    assert (last["how"], branches[-1]) == ("failed", "failed: too many steps")
    np.testing.assert_array_equal(last["r"], first["r"])
    after = next_factor(gram, last)
    assert (after["how"], after["done"]) == ("failed", False)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("condition", [10, 1e3, 1e6, 1e10, 1e15])
def test_too_few_steps_give_right_factors_or_none(steps, condition, monkeypatch):
    """A factor that was found after the last step is not applied, so it must not be in R."""
    monkeypatch.setattr(tall_kernel, "MOST_STEPS", steps)
    x = tall_matrix(1200, 40, condition)
    found, branches = taken(cholesky_qr, x)
    if found is None:
        assert branches[-1] == "failed: too many steps"
    else:
        check_qr(x, *found)
    assert (found is None) == (steps == 1 and condition > 10 or steps == 2 and condition > 1e6)
    check_qr(x, *tall_qr(x))


def test_a_failure_after_the_last_step_is_named(monkeypatch):
    monkeypatch.setattr(tall_kernel, "MOST_STEPS", 1)
    x = np.random.default_rng(0).standard_normal((600, 1)) @ np.ones((1, 100))
    found, branches = taken(cholesky_qr, x)
    assert found is None
    assert branches[-1] == "failed: factor"


def test_a_factor_that_is_done_keeps_its_blocks():
    x = tall_matrix(1200, 40, 10)
    first = start_factor(make_gram(x), 2.0**-53)
    q = apply_factor(x, first)
    second = next_factor(make_gram(q), first)
    third = next_factor(None, second)
    assert (third["how"], third["done"]) == ("keep", True)
    assert apply_factor(q, third) is q


def test_single_precision_is_added_up_in_pieces(monkeypatch):
    x = tall_matrix(1000, 40, 10, "f4")
    whole = make_gram(x)
    monkeypatch.setattr(tall_kernel, "PIECE", 64 * 40)
    assert whole.dtype == np.float64
    np.testing.assert_allclose(make_gram(x), whole, rtol=1e-13, atol=1e-15)


def test_columns_are_scaled_back():
    x = tall_matrix(300, 40, 10)
    for scale in (1e300, 1e-300):
        q, r = householder_qr(x * scale)
        np.testing.assert_allclose(q @ (r / scale), x, atol=1e-14)


def test_without_scipy_results_are_as_good(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(tall_kernel, "import_module", missing)
    x = tall_matrix(1200, 40, 1e10)
    (q, r), branches = taken(tall_qr, x)
    assert "solve by the library" in branches
    check_qr(x, q, r, promise=1)


@settings(deadline=None)
@given(
    rows=st.integers(4, 12),
    columns=st.integers(32, 48),
    powers=st.lists(st.integers(-40, 40), min_size=48, max_size=48),
    rank=st.integers(0, 48),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(["f4", "f8", "c8", "c16"]),
)
def test_promise_holds_for_graded_matrices_of_any_rank(rows, columns, powers, rank, seed, dtype):
    rng = np.random.default_rng(seed)
    m = rows * columns
    x = rng.standard_normal((m, rank)) @ rng.standard_normal((rank, columns))
    x = (x * 2.0 ** np.array(powers[:columns])).astype(dtype)
    q, r = tall_qr(x)
    check_qr(x, q, r)
    q, again = tall_qr(np.ascontiguousarray(q))  # Q has the identity as its R
    np.testing.assert_allclose(
        again, np.eye(columns), atol=30 * columns**1.5 * unit_roundoff(dtype)
    )
