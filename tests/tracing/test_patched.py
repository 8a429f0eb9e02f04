"""A library's function may be replaced between two runs of a collection, as tests do that mock it.

Each run calls the function that is there at that time.
"""

from __future__ import annotations

import math
from unittest import mock

import dask.array as da
import numpy as np
import numpy.linalg as linalg
import pytest
import scipy.special

from gpuscheduler import Scheduler
from gpuscheduler.fusion.task import KernelTask

X = np.linspace(0.5, 2, 400 * 400).reshape(400, 400)


def by_module(b):
    return np.sqrt(b * b) + np.pi


def by_inner_module(b):
    return b / np.linalg.norm(b)


def by_alias(b):
    return b / linalg.norm(b)


def by_special(b):
    return scipy.special.expit(b) * 2


def by_python(b):
    return b * math.sqrt(4.0)


def by_made(b):
    return b + np.ones(b.shape) + np.asarray(b)


def by_another(b):
    return by_module(b) - 1


def by_inner_function(b):
    def root(v):
        return np.sqrt(v)

    return root(b) + 1


def times_three(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 3


CASES = {
    "module": (by_module, np, "sqrt"),
    "number": (by_module, np, "pi"),
    "inner module": (by_inner_module, np.linalg, "norm"),
    "whole module": (by_inner_module, np, "linalg"),
    "alias": (by_alias, np.linalg, "norm"),
    "special": (by_special, scipy.special, "expit"),
    "Python's": (by_python, math, "sqrt"),
    "made": (by_made, np, "ones"),
    "converted": (by_made, np, "asarray"),
    "another function": (by_another, np, "sqrt"),
    "inner function": (by_inner_function, np, "sqrt"),
    "lambda": (lambda b: np.sqrt(b) * 2, np, "sqrt"),
}


class Other:
    """A module in place of another."""

    @staticmethod
    def norm(x):
        return 2.0


@pytest.fixture
def patch(case):
    def patched():
        _, module, name = CASES[case]
        before = getattr(module, name)
        new = Other if name == "linalg" else 5.0 if name == "pi" else times_three(before)
        return mock.patch.object(module, name, new)

    return patched


@pytest.mark.parametrize("again", ["the same", "one like it"])
@pytest.mark.parametrize("first", ["patched", "as it is"])
@pytest.mark.parametrize("case", CASES)
def test_a_patched_function_is_called_and_then_no_more(case, patch, first, again):
    function = CASES[case][0]

    def collection():
        return da.from_array(X, chunks=200).map_blocks(function, dtype="f8").sum()

    def values(**how):
        y = collection()
        out = []
        for n in range(4):
            y = y if again == "the same" else collection()
            if (n % 2 == 0) == (first == "patched"):
                with patch():
                    out.append(float(y.compute(**how)))
            else:
                out.append(float(y.compute(**how)))
        return out

    want = values(scheduler="sync")
    assert want[0] != want[1]
    with Scheduler("cpu:2", fuse_least=0):
        np.testing.assert_allclose(values(), want)


def test_what_is_read_in_a_library_is_looked_at_once():
    """However many functions read it: who computes again waits for each look."""
    x = da.from_array(X, chunks=200)
    for n in range(5):
        x = x.map_blocks(lambda b, n=n: np.sqrt(b) + np.pi * n, dtype="f8")
    with Scheduler("cpu:2", fuse_least=0) as scheduler:
        x.compute()
        assert any(type(s.task) is KernelTask for s in scheduler.plan(x).steps)
        (entry,) = scheduler._plans.entries()
        names = [name for where, name, _ in entry.graph.globals if where is vars(np)]
        assert sorted(names) == ["pi", "sqrt"]
