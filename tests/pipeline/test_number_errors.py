"""What NumPy does about errors of numbers is done where somebody wants more of it than warnings."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import dask.array as da
import numpy as np
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.fusion.task import KernelTask
from gpuscheduler.pipeline.number_errors import wants_number_errors
from gpuscheduler.tracing.abstract import AbstractArray
from gpuscheduler.tracing.context import NotTraceable
from gpuscheduler.tracing.trace import trace_function

X = np.linspace(-1, 1, 600 * 800).reshape(600, 800)


@contextmanager
def set_error(**actions):
    before = np.seterr(**actions)
    try:
        yield
    finally:
        np.seterr(**before)


@contextmanager
def filtered(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings(*args, **kwargs)
        yield


class Log:
    """What is called, and written to."""

    def __init__(self):
        self.said = set()

    def __call__(self, error, flag):
        self.said.add(error)

    def write(self, text):
        self.said.add(text.strip())


LOG = Log()
WAYS = {
    "raise": lambda: np.errstate(all="raise"),
    "raise of one": lambda: np.errstate(invalid="raise"),
    "call": lambda: np.errstate(invalid="call", call=LOG),
    "log": lambda: np.errstate(invalid="log", call=LOG),
    "seterr": lambda: set_error(all="raise"),
    "warnings": lambda: filtered("error"),
    "numbers": lambda: filtered("error", category=RuntimeWarning),
    "one": lambda: filtered("error", message="invalid value"),
    "arithmetic in a module": lambda: filtered("error", module="."),
}
USUAL = {
    "nothing": lambda: np.errstate(),
    "ignore": lambda: np.errstate(all="ignore"),
    "warn": lambda: np.errstate(all="warn"),
    "other warnings": lambda: filtered("error", category=DeprecationWarning),
    "other texts": lambda: filtered("error", message="something"),
    "ignored after all": lambda: filtered("ignore", category=RuntimeWarning),
}
EXPRESSIONS = {
    "ufunc": lambda x: np.sqrt(x).sum(),
    "function": lambda x: x.map_blocks(lambda b: b / b.clip(0, 0.5), dtype="f8").max(),
    "none": lambda x: (x + 1).sum(),
}


def outcome(expression, **how):
    LOG.said.clear()
    x = da.from_array(X, chunks=(200, 400))
    try:
        value = round(float(EXPRESSIONS[expression](x).compute(**how)), 6)
    except (FloatingPointError, RuntimeWarning) as error:
        value = type(error).__name__
    return str(value), set(LOG.said)


@pytest.fixture(scope="module")
def cpu():
    with Scheduler("cpu:2") as scheduler:
        yield scheduler


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("way", WAYS)
def test_what_the_caller_wants_of_errors_is_what_threads_of_dask_do(cpu, way, expression):
    with WAYS[way]():
        assert wants_number_errors()
        want = outcome(expression, scheduler="threads")
        assert outcome(expression) == want


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("way", USUAL)
def test_where_errors_are_only_told_kernels_compute(cpu, way):
    x = da.from_array(X, chunks=(200, 400))
    with USUAL[way]():
        assert not wants_number_errors()
        assert any(type(s.task) is KernelTask for s in cpu.plan(np.sqrt(x * 2)).steps)


def test_a_kept_plan_is_of_what_the_caller_wanted(cpu):
    """Of the same collection, whichever is first."""
    y = np.sqrt(da.from_array(X, chunks=(200, 400))).sum()
    with np.errstate(all="ignore"):
        assert np.isnan(y.compute())
    for _ in range(2):
        with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
            y.compute()
        with np.errstate(all="ignore"):
            assert np.isnan(y.compute())
    with np.errstate(invalid="raise"):
        assert not any(type(s.task) is KernelTask for s in cpu.plan(y).steps)
    with np.errstate(invalid="ignore"):
        assert any(type(s.task) is KernelTask for s in cpu.plan(y).steps)


def named(b):
    with np.errstate(all="raise"):
        return np.sqrt(b)


def imported(b):
    with state(divide="ignore", invalid="raise"):
        return np.sqrt(b)


def by_variable(b):
    how = {"invalid": "raise"}
    with np.errstate(**how):
        return np.sqrt(b)


def calls(b):
    with np.errstate(invalid="call", call=LOG.__call__):
        return np.sqrt(b)


def prints(b):
    with np.errstate(invalid="print"):
        return np.sqrt(b)


def within(b):
    return named(b) + 1


def tries(b):
    try:
        with np.errstate(invalid="raise"):
            return np.sqrt(b)
    except FloatingPointError:
        return b * 0


def silent(b):
    with np.errstate(all="ignore"), state(divide="warn", invalid="ignore"):
        return np.sqrt(b)


state = np.errstate


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("f", [named, imported, by_variable, within, tries, prints])
def test_a_function_that_wants_errors_gets_them(cpu, f):
    with pytest.raises(NotTraceable, match="where there are errors"):
        trace_function(f, [AbstractArray((4, 5), np.dtype("f8"))])
    z = da.from_array(X, chunks=(200, 400)).map_blocks(f, dtype="f8", meta=np.empty((0, 0)))

    def result(**how):
        try:
            return float(np.nansum(z.compute(**how)))
        except FloatingPointError as error:
            return str(error)

    assert result() == result(scheduler="threads")


def test_a_function_that_wants_to_be_called_is_called(cpu):
    said = []

    def heard(error, flag):
        said.append(error)

    def f(b):
        with np.errstate(invalid="call", call=heard):
            return np.sqrt(b)

    z = da.from_array(X, chunks=(200, 400)).map_blocks(f, dtype="f8", meta=np.empty((0, 0)))
    z.compute()
    assert said == ["invalid value"] * 4  # of six blocks, two have no negative number


def test_a_silent_function_is_a_kernel(cpu):
    (kernel,) = trace_function(silent, [AbstractArray((4, 5), np.dtype("f8"))]).kernels
    assert repr(kernel.outputs[0]) == "sqrt(input0)"


def test_scipys_errors_are_its_own(cpu):
    special = pytest.importorskip("scipy.special")

    def f(b):
        with special.errstate(all="raise"):
            return special.gammaln(b)

    with pytest.raises(NotTraceable, match="errstate"):
        trace_function(f, [AbstractArray((4,), np.dtype("f8"))])
