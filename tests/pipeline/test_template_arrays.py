"""Arrays in tasks are data: arguments of a function, and arrays that it captures.

A collection with other arrays in their place is not planned again, and never computed with those of
another round.
"""

import functools
import gc
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor

import dask.array as da
import numpy as np
import pytest
import toolz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.pipeline import compile
from gpuscheduler.plan.plan import Plan

A = np.random.default_rng(0).random((8, 6))


def x():
    return da.from_array(A, chunks=(4, 6))


def scaled(b, w, k=0.0):
    return b * w + k


def held(b, w):
    """Nothing that can be followed."""
    return np.asarray(list(b * w))


def nested(b, both):
    return b * both[0] + both[1]


FORMS = {
    "argument": (lambda w, v: x().map_blocks(scaled, w, k=v), lambda w, v: A * w + v),
    "closure": (lambda w, v: x().map_blocks(lambda b: b * w - v), lambda w, v: A * w - v),
    "default": (
        lambda w, v: x().map_blocks(lambda b, w=w, *, v=v: b * w - v), lambda w, v: A * w - v,
    ),
    "partial": (
        lambda w, v: x().map_blocks(functools.partial(scaled, w=w)) + v, lambda w, v: A * w + v,
    ),
    "function that is given": (
        lambda w, v: x().map_blocks(lambda b, f: f(b) + v, functools.partial(scaled, w=w)),
        lambda w, v: A * w + v,
    ),
    "function around a function": (
        lambda w, v: x().map_blocks(lambda b: (lambda f: f(b))(lambda c: c * w) + v),
        lambda w, v: A * w + v,
    ),
    "summed": (
        lambda w, v: x().map_blocks(scaled, w, v).sum(axis=0),
        lambda w, v: (A * w + v).sum(axis=0),
    ),
    "two steps": (
        lambda w, v: x().map_blocks(scaled, w).map_blocks(scaled, v), lambda w, v: A * w * v,
    ),
    "tuple": (lambda w, v: x().map_blocks(nested, (w, v)), lambda w, v: A * w + v),
    "tuple around": (
        lambda w, v: (lambda both: x().map_blocks(lambda b: b * both[0] + both[1], dtype="f8"))(
            (w, v)
        ),
        lambda w, v: A * w + v,
    ),
    "function with arrays around": (
        lambda w, v: (lambda f: x().map_blocks(lambda b: f(b) + v))(lambda b: b * w),
        lambda w, v: A * w + v,
    ),
    "partial around": (
        lambda w, v: (lambda f: x().map_blocks(lambda b: f(b)))(
            functools.partial(lambda b, w, k: b * w + k, w=w, k=v)
        ),
        lambda w, v: A * w + v,
    ),
    "blockwise": (
        lambda w, v: da.blockwise(scaled, "ij", x(), "ij", w, None, v, None, dtype="f8"),
        lambda w, v: A * w + v,
    ),
    "beside an array": (
        lambda w, v: x().map_blocks(scaled, w) + da.from_array(v, chunks=6),
        lambda w, v: A * w + v,
    ),
    "one array twice": (
        lambda w, v: x().map_blocks(scaled, w, k=w) + v, lambda w, v: A * w + w + v,
    ),
    "not followed": (lambda w, v: x().map_blocks(held, w, dtype="f8") + v, lambda w, v: A * w + v),
    "not followed, closure": (
        lambda w, v: x().map_blocks(lambda b: held(b, w) + v, dtype="f8"), lambda w, v: A * w + v,
    ),
}  # fmt: skip


def rounds(count=4):
    g = np.random.default_rng(1)
    return [(g.random(6), g.random(6)) for _ in range(count)]


@pytest.fixture(autouse=True)
def one_operation_is_enough(monkeypatch):
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)


@pytest.fixture
def scheduler():
    with Scheduler(devices="cpu:2", fuse_least=0, check=True) as s:
        yield s


@pytest.mark.parametrize("form", FORMS)
def test_rounds_are_planned_once(scheduler, planned, form):
    make, want = FORMS[form]
    for w, v in rounds():
        y = make(w, v)
        for _ in range(2):
            np.testing.assert_allclose(y.compute(), want(w, v), rtol=1e-14)
    assert len(planned) == 1
    # those of an early round, once more
    np.testing.assert_allclose(make(*rounds()[0]).compute(), want(*rounds()[0]), rtol=1e-14)
    fused = any(type(s.task) is KernelTask for s in scheduler.plan(y).steps)
    assert fused or "not" in form or form == "tuple around"


@pytest.mark.usefixtures("only_new_garbage")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fuse", [True, False])
def test_they_are_not_kept(form, fuse):
    make, _ = FORMS[form]
    with Scheduler("cpu:2", fuse_least=0, fuse=fuse) as s:
        for w, v in rounds(3):
            w, v = w.copy(), v.copy()
            gone = [weakref.ref(w), weakref.ref(v)]
            y = make(w, v)
            y.compute()
            y.compute()
            del w, v, y
            gc.collect()
            assert [r() for r in gone] == [None, None]
        assert not s._plans


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_as_foreseen(scheduler, form, monkeypatch):
    """Programs that do not fit are the tasks as they were: with the arrays of this round."""
    make, want = FORMS[form]
    make(*rounds()[0]).compute()
    monkeypatch.setattr(KernelTask, "arrays", lambda *_, **__: None)
    for w, v in rounds():
        np.testing.assert_allclose(make(w, v).compute(), want(w, v), rtol=1e-14)


@pytest.mark.parametrize("fuse", [True, False])
def test_values_that_were_looked_at(planned, fuse):
    """Where they are others it is planned again; and so where they change in between."""

    def by(b, w, at):
        return b * float(w[int(at[0])]) + w.max()

    with Scheduler("cpu:2", fuse_least=0, fuse=fuse) as s:
        for k, n in ((2.0, 1), (2.0, 1), (3.0, 2), (3.0, 2)):
            w, at = np.full(6, k), np.arange(6)[::-1].copy()
            y = x().map_blocks(by, w, at, dtype="f8")
            assert all(type(t.task) is KernelTask for t in s.plan(y).steps) == fuse
            np.testing.assert_allclose(y.compute(), A * k + k)
            assert len(planned) == (n if fuse else 1)
        w[:] = 5
        np.testing.assert_allclose(y.compute(), A * 5 + 5)
        w[0], at[:] = 7, 0
        np.testing.assert_allclose(y.compute(), A * 7 + 7)


@pytest.mark.parametrize("fuse", [True, False])
def test_variables_of_a_later_round_that_change(fuse):
    """Its functions are others than those that were planned, and have variables of their own."""

    def made(k):
        w = np.full(6, k)
        y = x().map_blocks(lambda b: b * w + k if fuse else held(b, w) + k, dtype="f8")

        def change(n):
            nonlocal w, k
            w, k = np.full(6, n), n

        return y, change

    with Scheduler("cpu:2", fuse_least=0):
        stays, *every = [made(2.0) for _ in range(4)]
        np.testing.assert_allclose(stays[0].compute(), A * 2 + 2)
        for n, (y, change) in enumerate(every):
            np.testing.assert_allclose(y.compute(), A * 2 + 2)
            change(n + 3.0)
            np.testing.assert_allclose(y.compute(), A * (n + 3) + n + 3)
            np.testing.assert_allclose((y - 1).compute(), A * (n + 3) + n + 2)
        for n, (y, _) in enumerate(every):
            np.testing.assert_allclose(y.compute(), A * (n + 3) + n + 3)


def test_a_number_around_a_function_of_a_later_round_that_changes(scheduler):
    def made(k):
        def change(n):
            nonlocal k
            k = n

        return x().map_blocks(lambda b: b * k + 1, dtype="f8"), change

    stays, _ = made(2.0)
    np.testing.assert_allclose(stays.compute(), A * 2 + 1)
    for n in range(3):
        y, change = made(2.0)
        np.testing.assert_allclose(y.compute(), A * 2 + 1)
        change(n)
        np.testing.assert_allclose(y.compute(), A * n + 1)


def test_they_are_read_when_a_task_runs(scheduler, planned):
    for w, _ in rounds():
        y = x().map_blocks(scaled, w)
        y.compute()
        w *= 2
        np.testing.assert_allclose(y.compute(), A * w)
    assert len(planned) == 1


def test_one_is_not_two(scheduler):
    w, v = rounds()[0]
    for one, two in ((w, w), (w, v), (v, v), (v, w), (w, w.copy())):
        got = x().map_blocks(scaled, one, k=two).compute()
        np.testing.assert_allclose(got, A * one + two, rtol=1e-14)


def test_arrays_of_another_kind(scheduler, planned):
    """Another dtype, shape or order in memory is another plan."""
    w = np.random.default_rng(2).random((8, 12))
    every = [w[0, ::2], w[1, :6], w[2:3, :6], w[3, :6].astype("f4"), np.float64(2), w[0, :1]]
    for other in every * 2:
        got = x().map_blocks(scaled, other, dtype="f8").compute()
        np.testing.assert_allclose(got, A * other, rtol=1e-6)
    assert len(planned) == len(every)


def test_a_task_that_writes_to_its_array(scheduler):
    """It is this round's array that is written to."""

    def counts(b, seen):
        seen[0] += 1
        return b

    for _ in range(3):
        seen = np.zeros(1)
        x().map_blocks(counts, seen, dtype="f8", meta=np.empty((0, 0))).compute()
        assert seen[0] == 2


def test_a_function_that_calls_itself(scheduler):
    for w, _ in rounds():

        def power(b, n, w=w):
            return b * w if n == 0 else power(b, n - 1) * w

        np.testing.assert_allclose(x().map_blocks(power, 2, dtype="f8").compute(), A * w**3)


def test_threads_compute_rounds_at_the_same_time(scheduler):
    def one(n):
        w, v = np.full(6, n), np.full(6, n / 2)
        for make, want in FORMS.values():
            got = make(w, v).compute(scheduler=scheduler.get)
            np.testing.assert_allclose(got, want(w, v), rtol=1e-14)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(16)))


def test_a_plan_is_what_a_fresh_one_would_be(scheduler):
    for make, _ in FORMS.values():
        (w, v), (other, more) = rounds(2)
        scheduler.plan(make(w, v))
        found: Plan = scheduler.plan(make(other, more))
        with Scheduler(devices="cpu:2", fuse_least=0) as fresh:
            want = fresh.plan(make(other, more))
        assert [(s.nbytes, s.place, type(s.task)) for s in found.steps] == [
            (s.nbytes, s.place, type(s.task)) for s in want.steps
        ]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(list(FORMS)), st.integers(0, 3)), min_size=2, max_size=6))
def test_any_order(every):
    choice = rounds()
    with Scheduler("cpu:2", fuse_least=0):
        for form, n in every:
            make, want = FORMS[form]
            np.testing.assert_allclose(make(*choice[n]).compute(), want(*choice[n]), rtol=1e-14)


def curried(w, v, b):
    return b * w + v


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("around", [True, False])
def test_arrays_in_functions_of_toolz(fuse, around):
    with Scheduler("cpu:2", fuse_least=0, fuse=fuse):
        for w, v in rounds():
            for f, want in (
                (toolz.curry(curried)(w, v), A * w + v),
                (toolz.curry(curried, w)(v), A * w + v),
                (toolz.compose(functools.partial(curried, w, v), np.sqrt), np.sqrt(A) * w + v),
                (toolz.compose(np.sqrt, functools.partial(curried, w, v)), np.sqrt(A * w + v)),
            ):
                y = x().map_blocks((lambda b, f=f: f(b)) if around else f, dtype="f8")
                np.testing.assert_allclose(y.compute(), want, rtol=1e-14)


@pytest.mark.parametrize("fuse", [True, False])
def test_which_of_two_functions_is_given_again(fuse):
    def three(b, f, g, h):
        return f(b) + 2 * g(b) + 4 * h(b)

    def times(w):
        return lambda b, k: b * w + k

    with Scheduler("cpu:2", fuse_least=0, fuse=fuse):
        for order in ((0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0)):
            w = rounds()[0]
            every = [times(v) for v in w]
            given = [functools.partial(every[n], k=1.0) for n in order]
            want = sum((A * w[n] + 1) * 2**k for k, n in enumerate(order))
            got = x().map_blocks(three, *given, dtype="f8").compute()
            np.testing.assert_allclose(got, want, rtol=1e-14)


W = np.random.default_rng(3).random(6)


def with_global(b, w):
    return b * w + W


def with_default(b, w, k=W):
    return b * w + k


def decorated(function):
    own = W

    @functools.wraps(function)
    def inside(b, w):
        return function(b, w) + own

    return inside


@decorated
def with_closure(b, w):
    return b * w


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    "f",
    [with_global, with_default, with_closure, lambda b, w: b * w + W,
     lambda b, w: with_default(b, w), lambda b, w: with_closure(b, w)],
)  # fmt: skip
def test_an_array_of_the_module_is_data_too(f, fuse):
    with Scheduler("cpu:2", fuse_least=0, fuse=fuse):
        for w in (W, *rounds()[0], W):
            got = x().map_blocks(f, w, dtype="f8").compute()
            np.testing.assert_allclose(got, A * w + W, rtol=1e-14)


@pytest.mark.parametrize("fuse", [True, False])
def test_an_array_of_the_module_is_data_too_and_changes(fuse, monkeypatch):
    with Scheduler("cpu:2", fuse_least=0, fuse=fuse):
        y = x().map_blocks(with_global, W, dtype="f8")
        np.testing.assert_allclose(y.compute(), A * W + W, rtol=1e-14)
        before = W
        monkeypatch.setitem(globals(), "W", W + 1)
        np.testing.assert_allclose(y.compute(), A * before + W, rtol=1e-14)


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_function_that_writes_its_variables(fuse, within):
    """They are those of this round, not of the one that was planned."""

    def made(w):
        seen, most = np.zeros(0), 0

        def f(b):
            nonlocal seen
            seen = b * w
            return b

        def g(b):
            def inner():
                nonlocal most
                if b.max() * w.max() > 5:
                    most = 1

            inner()
            return b

        y = x().map_blocks(g if within else f, dtype="f8", meta=np.empty((0, 0)))
        return y, lambda: most if within else len(seen)

    with Scheduler("cpu:2", fuse_least=0, fuse=fuse):
        for k in (1.0, 20.0, 30.0, 1.0):
            y, get = made(np.full(6, k))
            y.compute()
            assert get() == (int(k > 10) if within else 4)


def test_functions_in_functions(scheduler):
    """A template that cannot be made is none."""

    def around(f):
        return lambda b: f(b) + 1

    for depth in range(60, 200, 5):
        for w, _ in rounds(2):

            def f(b, w=w):
                return b * w

            for _ in range(depth):
                f = around(f)
            got = x().map_blocks(f, dtype="f8", meta=np.empty((0, 0))).compute()
            np.testing.assert_allclose(got, A * w + depth, rtol=1e-12)


@pytest.mark.parametrize("word", ["like", "meta"])
def test_arrays_that_only_say_which_librarys_they_are(scheduler, word):
    """Unless a function of a user's looks at their values."""

    def by(b, like=None, meta=None):
        return b * float((meta if like is None else like)[0])

    for w, _ in rounds():
        y = x().map_blocks(functools.partial(by, **{word: w}), dtype="f8")
        np.testing.assert_allclose(y.compute(), A * w[0], rtol=1e-14)
        w[0] = 9
        np.testing.assert_allclose(y.compute(), A * 9, rtol=1e-14)


def with_empty_variable(function):
    @functools.wraps(function)
    def inside(b, w):
        return never if b.ndim > 5 else function(b, w)

    if function is None:
        never = None
    return inside


@with_empty_variable
def not_bound(b, w):
    return b * w


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("f", [not_bound, lambda b, w: not_bound(b, w)])
def test_a_variable_of_a_modules_function_that_is_not_bound(f, fuse):
    with Scheduler("cpu:2", fuse_least=0, fuse=fuse):
        for w in rounds()[0]:
            y = x().map_blocks(f, w, dtype="f8", meta=np.empty((0, 0)))
            np.testing.assert_allclose(y.compute(), A * w)
            y = x().map_blocks(f, 2, dtype="f8", meta=np.empty((0, 0)))
            np.testing.assert_allclose(y.compute(), A * 2)


class Factor:
    """An object around a function: no array, and nothing that can be followed."""

    __array_ufunc__ = None

    def __init__(self, w):
        self.w = w

    def __rmul__(self, b):
        return b * self.w


def decorated(f):
    @functools.wraps(f)
    def inner(*args, **kwargs):
        return f(*args, **kwargs)

    return inner


def around_factor(w):
    def scale(b: np.ndarray, k: float = 1.0) -> np.ndarray:
        """Words that a function is asked for."""
        return b * w * k

    scale.__module__ = "of.somebody"
    return scale


def by_signature(b, f):
    return f(b, k=2.0) if "k" in inspect.signature(f).parameters else f(b)


#: What functions ask of a function that they are given.
ASKED = {
    "signature": by_signature,
    "words": lambda b, f: f(b) * len(f.__doc__ or ""),
    "annotations": lambda b, f: f(b) * len(f.__annotations__),
    "names": lambda b, f: f(b) * len(f.__name__ + f.__qualname__ + f.__module__),
    "unwrapped": lambda b, f: getattr(f, "__wrapped__", f)(b, k=3.0),
    "called unwrapped": lambda b, f: f.__wrapped__(b) if hasattr(f, "__wrapped__") else f(b),
    "attribute": lambda b, f: f(b) * getattr(f, "gain", 5.0),
}


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("factor", [float, np.array, Factor])
@pytest.mark.parametrize("asked", ASKED)
def test_functions_that_are_asked_what_they_are(asked, factor, fuse):
    """Those that are traced, and those of later rounds, say the same as the user's."""
    every = []
    with Scheduler("cpu:2", fuse_least=0, fuse=fuse):
        for n, value in enumerate([2.0, 3.0, 2.0]):
            plain = around_factor(factor(value))
            twice = decorated(decorated(around_factor(factor(value))))
            with_gain = decorated(around_factor(factor(value)))
            with_gain.gain = value + n
            for f in (plain, twice, with_gain):
                y = x().map_blocks(ASKED[asked], f, dtype="f8", meta=np.empty((0, 0)))
                due = y.compute(scheduler="sync")
                every.append((y, due))
                np.testing.assert_allclose(y.compute(), due, rtol=1e-12)
        for y, due in every:
            np.testing.assert_allclose(y.compute(), due, rtol=1e-12)
