"""Computations that are nearly the same as an earlier one, and must not be taken for it. Each case
gives collections one after the other, and changes something in between; each is compared with what
Dask makes of it at that moment."""

from __future__ import annotations

import functools
import inspect
import operator
import warnings

import dask.array as da
import numpy as np
import pytest
import toolz
from dask.utils import Dispatch

from gpuscheduler import Scheduler, axis, mesh
from gpuscheduler.pipeline import compile

CASES = {}
FACTOR = [2.0]


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def numbers():
    return da.from_array(np.arange(6.0), chunks=3)


def times_factor(x, *_):
    return x * FACTOR[0]


def blocks(function, **kwargs):
    return numbers().map_blocks(function, dtype="f8", **kwargs)


def by_factors(make, again=True):
    """A new collection for each factor, and the first of all once more."""
    first = None
    for FACTOR[0] in (2.0, 5.0):
        first = first if first is not None else make()
        yield make()
        if again:
            yield first


@case
def long_seeds():
    for n in (1, 2):
        seed = np.arange(2000)
        seed[1000] = n
        yield da.random.default_rng(seed).normal(size=4, chunks=2)
        yield blocks(
            lambda x, s: x + np.random.default_rng(s).random(), s=np.random.SeedSequence(seed)
        )


@case
def seeds_that_numpy_prints_in_short():
    with np.printoptions(threshold=5):
        for n in (1, 2):
            seed = np.array([1, 2, 3, 4, n, 5, 6, 7, 8])
            yield da.random.default_rng(seed).normal(size=4, chunks=2)


@case
def meshes_of_functions_of_arrays():
    return by_factors(lambda: mesh(times_factor, (axis(0, 3, 4),), how="numpy"), again=False)


@case
def objects_of_toolz_with_functions_in_them():
    yield from by_factors(lambda: blocks(toolz.excepts(ValueError, times_factor)))
    both = toolz.juxt(times_factor, times_factor)
    yield from by_factors(lambda: blocks(lambda x: both(x)[1]))


@case
def dispatches():
    told = Dispatch()
    told.register(object, times_factor)
    yield from by_factors(lambda: blocks(told))


@case
def objects_of_numpy_that_can_change():
    p = np.poly1d([1.0, 2.0])
    y = blocks(lambda x: p(x))
    for value in (2.0, 50.0):
        p[0] = value
        yield y
        yield blocks(lambda x: p(x))


@case
def compositions():
    both = toolz.compose(np.sqrt, np.abs)
    y = blocks(both)
    yield y
    both.first = np.square
    yield y


def named(name):
    def function(x):
        return x

    function.__name__ = name
    return function


@case
def names_of_functions():
    for name in ("sin", "exp"):
        g = named(name)
        yield blocks(lambda x, f: getattr(np, f.__name__)(x), f=named(name))
        yield blocks(lambda x, g=g: getattr(np, g.__name__)(x))


@case
def texts_and_annotations_of_functions():
    for number in (2, 3):
        g = named("g")
        g.__doc__, g.__annotations__ = "x" * number, {"x": number}
        yield blocks(lambda x, f: x * len(f.__doc__), f=g)
        yield blocks(lambda x, f: x * f.__annotations__["x"], f=g)


@case
def what_functions_are_wrapped_around():
    def wrapped(inner):
        @functools.wraps(inner)
        def outer(*args):
            return args

        return outer

    for inner in (lambda a: a, lambda a, b: (a, b)):
        yield blocks(lambda x, f: x * len(inspect.signature(f).parameters), f=wrapped(inner))


@case
def attributes_of_partials():
    for scale in (1.0, 3.0):
        p = functools.partial(np.add, 1)
        p.scale = scale
        yield blocks(lambda x, p: x * p.scale, p=p)


@case
def partials_that_are_made_others():
    p = functools.partial(operator.add, 1.0)
    y = blocks(p)
    yield y
    p.__setstate__((operator.add, (5.0,), {}, None))
    yield y
    p.__setstate__((operator.mul, (5.0,), {}, None))
    yield y


@case
def dictionaries_that_are_graphs():
    raw = {("raw", 0): np.arange(3.0), ("raw", 1): np.arange(3.0)}
    x = da.Array(raw, "raw", ((3, 3),), dtype="f8")
    y = x + 1
    yield y
    raw["raw", 0] = np.full(3, 9.0)
    yield y
    yield x + 1
    raw["raw", 1] = (np.full, 3, 5.0)
    yield y
    yield x + 1
    raw["raw", 1] = (np.full, 3, 6.0)
    yield y
    yield x + 1


@case
def arrays_that_show_the_same_in_another_way():
    k = np.arange(6.0).reshape(2, 3)
    y = blocks(lambda x, k: x + k.strides[0], k=k)
    z = blocks(functools.partial(lambda x, k: x + k.itemsize, k=k))
    yield y
    yield z
    with warnings.catch_warnings():  # some of NumPy's versions advise against it
        warnings.simplefilter("ignore")
        k.dtype = "f4"
    yield y
    yield z


@case
def types_with_something_beside_them():
    for scale in (2.0, 3.0):
        dtype = np.dtype("f8", metadata={"scale": scale})
        x = da.from_array(np.arange(4.0).astype(dtype), chunks=2)
        yield x.map_blocks(lambda x: x * x.dtype.metadata["scale"], dtype="f8")
        yield blocks(lambda x, dt: x * dt.metadata["scale"], dt=dtype)
    for char in "lq":
        yield blocks(lambda x, dt: x + ord(dt.char), dt=np.dtype(char))


@case
def functions_with_builtins_of_their_own():
    space = {"__builtins__": {"abs": lambda v: v * 100}}
    exec("def f(x): return abs(x)", space)
    yield blocks(space["f"])
    space["__builtins__"]["abs"] = lambda v: v * 7
    yield blocks(space["f"])


@case
def numbers_of_a_class_of_their_own():
    class Scaled(float):
        __slots__ = ()
        scale = 2

        @property
        def scaled(self):
            return self * type(self).scale

    k = Scaled(3.0)
    y = blocks(lambda x, k: x + k.scaled, k=k)
    z = blocks(lambda x: x + k.scaled)
    for Scaled.scale in (2, 5):
        yield y
        yield z


@pytest.mark.parametrize("name", CASES)
def test_each_is_what_it_is_now(name, monkeypatch):
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    with Scheduler("cpu:2", fuse_least=0):
        for y in CASES[name]():
            expected = y.compute(scheduler="sync")
            for _ in range(2):
                np.testing.assert_allclose(y.compute(), expected, rtol=1e-12)


def test_what_is_drawn_for_a_mesh_is_drawn_each_time(monkeypatch):
    monkeypatch.setitem(compile.FUSE_FEWEST, "cpu", 1)
    with Scheduler("cpu:2", fuse_least=0):
        y = mesh(lambda x: x * 0 + np.random.random(), (axis(0, 3, 2),), how="numpy")
        assert len({float(y.compute()[0]) for _ in range(4)}) == 4
