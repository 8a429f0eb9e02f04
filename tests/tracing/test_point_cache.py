"""A function of points that was traced before is not traced again, unless something has changed."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import axis, mesh
from gpuscheduler.tracing import point_cache, point_function

FACTOR = 2.0
PAIR = (3.0, 4.0)
ARRAY = np.array([1.0, 2.0])
ENDS = axis(0.25, 1, 4), axis(0.5, 2, 3)
X, Y = np.asarray(ENDS[0])[:, None], np.asarray(ENDS[1])[None, :]


def scaled(x):
    return x * FACTOR + PAIR[0]


def calls(x, y):
    return scaled(x) + math.cos(y) + abs(x)


def reads_an_array(x, y):
    return x * ARRAY[0] + y


def with_default(x, y, k=2.0, *, m=3.0):
    return x * k + y * m


def made(k):
    return lambda x, y: x * k + y


@pytest.fixture(autouse=True)
def traces(monkeypatch):
    """One for each function that is traced, or looked at for that."""
    point_cache._known.clear()
    real, every = point_function._trace_at_lengths, []
    monkeypatch.setattr(point_function, "_trace_at_lengths", lambda *a: every.append(a) or real(*a))
    return every


def values(f, *args, **kwargs):
    return np.asarray(mesh(f, ENDS, args, **kwargs).compute(scheduler="sync"))


def expected(f, *args):
    return np.vectorize(f)(np.broadcast_to(X, (4, 3)), Y, *args)


def test_a_function_is_traced_once(traces):
    names = set()
    for _ in range(4):
        np.testing.assert_allclose(values(calls), expected(calls))
        names.add(mesh(calls, ENDS).name)
        names.add(mesh(made(5.0), ENDS).name)
    assert len(traces) == 4  # each function with two kinds of probes
    assert len(names) == 2


@pytest.mark.parametrize("name", ["FACTOR", "PAIR", "scaled", "abs", "math"])
def test_names_that_change(monkeypatch, name):
    np.testing.assert_allclose(values(calls), expected(calls))
    other = {
        "FACTOR": 5.0, "PAIR": (7.0, 4.0), "scaled": lambda x: x - 1, "abs": lambda x: x * 9,
        "math": np,
    }[name]  # fmt: skip
    monkeypatch.setitem(globals(), name, other)
    np.testing.assert_allclose(values(calls), expected(calls))
    monkeypatch.undo()
    np.testing.assert_allclose(values(calls), expected(calls))


def test_code_that_changes(monkeypatch):
    for g in (calls, scaled):
        before = values(calls)
        other = (lambda x, y: x - y) if g is calls else (lambda x: x / 3)
        monkeypatch.setattr(g, "__code__", other.__code__)
        np.testing.assert_allclose(values(calls), expected(calls))
        assert not np.allclose(values(calls), before)
        monkeypatch.undo()
        np.testing.assert_allclose(values(calls), before)


def test_defaults_that_change(monkeypatch):
    np.testing.assert_allclose(values(with_default), expected(with_default))
    monkeypatch.setattr(with_default, "__defaults__", (7.0,))
    np.testing.assert_allclose(values(with_default), X * 7 + Y * 3)
    monkeypatch.setattr(with_default, "__kwdefaults__", {"m": 0.5})
    np.testing.assert_allclose(values(with_default), X * 7 + Y * 0.5)


def test_what_somebody_writes_to():
    for number in (1.0, 5.0, 9.0):
        ARRAY[0] = number
        np.testing.assert_allclose(values(reads_an_array), X * number + Y)


def test_numbers_that_are_nearly_the_same():
    same = [0.0, -0.0, 1, 1.0, True, np.float32(1), np.float64(1), 1 + 0j, np.int8(1), 2**70]
    seen = {}
    for _ in range(2):
        for n, k in enumerate(same):
            for way, f in enumerate((made(k), lambda x, y, k=k: math.copysign(x, k) + y)):
                if way and isinstance(k, complex):
                    continue
                found = mesh(f, ENDS, dtype="f4")
                before = seen.setdefault((n, way), (found.name, found.dtype))
                assert before == (found.name, found.dtype)
                once = point_cache._known.copy()
                point_cache._known.clear()
                assert mesh(f, ENDS, dtype="f4").name == found.name
                point_cache._known.update(once)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_types_and_arguments_count(dtype):
    for k in (1, 2.5, np.float32(3)):
        found = mesh(lambda x, y, k: x * k + y, ENDS, (k,), dtype=dtype)
        assert found.dtype == dtype
        np.testing.assert_allclose(
            found.compute(scheduler="sync"), X.astype(dtype) * k + Y.astype(dtype), rtol=1e-6
        )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["FACTOR", "PAIR", "default", "variable", "nothing"]),
            st.sampled_from([0.0, -0.0, 1.0, 2, True, 3.5]),
        ),
        min_size=2, max_size=6,
    )
)  # fmt: skip
def test_any_changes_in_any_order(changes):
    space = globals()
    before, k = (FACTOR, PAIR, with_default.__defaults__), 1.0
    try:
        for what, value in changes:
            if what == "FACTOR":
                space["FACTOR"] = value
            elif what == "PAIR":
                space["PAIR"] = (value, 1)
            elif what == "default":
                with_default.__defaults__ = (value,)
            elif what == "variable":
                k = value
            for f in (calls, with_default, made(k)):
                np.testing.assert_allclose(values(f), expected(f))
                name = mesh(f, ENDS).name
                point_cache._known.clear()
                assert mesh(f, ENDS).name == name
    finally:
        space["FACTOR"], space["PAIR"], with_default.__defaults__ = before
