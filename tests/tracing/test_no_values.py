"""Each traced function, on arrays of odd shapes without values, computes what NumPy computes, or
says why not.

NumPy reads no memory on the way.

All of it runs in a process of its own: what reads memory that is not there ends its process.
"""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.fusion import task
from gpuscheduler.ir.expr import View
from gpuscheduler.tracing.array import FUNCTIONS
from gpuscheduler.tracing.bytecode import words
from gpuscheduler.tracing.context import (
    NotTraceable,
    TraceContext,
    ViewTrace,
    abstract_of,
    apply_view,
    current,
)
from gpuscheduler.tracing.trace import trace_function

RNG = np.random.default_rng(3)
#: Arrays without axes, without elements, of one element, of many axes, with gaps and backwards.
SHAPES = {
    "no axes": RNG.standard_normal(()),
    "no elements": RNG.standard_normal((0,)),
    "no elements in a row": RNG.standard_normal((3, 0)),
    "no rows": RNG.standard_normal((0, 3)),
    "one element": RNG.standard_normal((1,)),
    "one element of many axes": RNG.standard_normal((1, 1, 1)),
    "a few": np.array([0.5, 0.75, 2.0]),
    "five axes": RNG.standard_normal((2, 1, 3, 1, 2)),
    "gaps": RNG.standard_normal((6, 9))[::2, ::-3],
    "other order": RNG.standard_normal((3, 4)).T,
    "spread": np.broadcast_to(RNG.standard_normal((3, 1)), (3, 3)),
    "whole numbers": RNG.integers(-3, 4, (3, 3)),
    "a whole number": np.asarray(RNG.integers(1, 4)),
    "truth": RNG.integers(0, 2, (2, 3)) > 0,
    "complex": RNG.standard_normal((2, 3)) + 1j,
    "a complex number": np.asarray(1.5 - 2j),
}
#: What functions are called with, `f` with an array `x`.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "x": lambda f, x: f(x),
    "x.sum()": lambda f, x: f(x.sum()),
    "x.max() by itself": lambda f, x: f(np.max(x)),
    "axis=None": lambda f, x: f(x, axis=None),
    "axis=0": lambda f, x: f(x, axis=0),
    "axis=-1": lambda f, x: f(x, axis=-1),
    "axis=()": lambda f, x: f(x, axis=()),
    "axis=all": lambda f, x: f(x, axis=tuple(range(x.ndim))),
    "keepdims": lambda f, x: f(x, keepdims=True),
    "axis=-1, keepdims": lambda f, x: f(x, axis=-1, keepdims=True),
    "0": lambda f, x: f(x, 0),
    "1": lambda f, x: f(x, 1),
    "2": lambda f, x: f(x, 2),
    "-1": lambda f, x: f(x, -1),
    "0, 1": lambda f, x: f(x, 0, 1),
    "0, 0": lambda f, x: f(x, 0, 0),
    "1, axis=0": lambda f, x: f(x, 1, axis=0),
    "itself": lambda f, x: f(x, x),
    "itself twice": lambda f, x: f(x, x, x),
    "0.5": lambda f, x: f(x, 0.5),
    "[0.5]": lambda f, x: f(x, [0.5]),
    "[0.25, 0.5], axis=-1": lambda f, x: f(x, [0.25, 0.5], axis=-1),
    "(0, 1)": lambda f, x: f(x, (0, 1)),
    "()": lambda f, x: f(x, ()),
    "(-1,)": lambda f, x: f(x, (-1,)),
    "(1, 1)": lambda f, x: f(x, (1, 1)),
    "its shape": lambda f, x: f(x, x.shape),
    "[]": lambda f, x: f([]),
    "[x]": lambda f, x: f([x]),
    "[x, x]": lambda f, x: f([x, x]),
    "[x, x], axis=0": lambda f, x: f([x, x], axis=0),
    "[x, x], axis=-1": lambda f, x: f([x, x], axis=-1),
    "[x, x], axis=None": lambda f, x: f([x, x], axis=None),
    "4, (-2, 2)": lambda f, x: f(x, 4, (-2.0, 2.0)),
    "[4], [(-2, 2)]": lambda f, x: f(x, [4], [(-2.0, 2.0)]),
    "[-1, 0, 2]": lambda f, x: f(x, [-1.0, 0.0, 2.0]),
    "x > 0, x, x": lambda f, x: f(x > 0, x, x),
    "[x > 0], [x]": lambda f, x: f([x > 0], [x]),
    "[x > 0], [1, 2]": lambda f, x: f(x, [x > 0], [1, 2]),
    "[3, 2], x": lambda f, x: f([3, 2], x),
    "1, mode='edge'": lambda f, x: f(x, 1, mode="edge"),
    "1, mode='reflect'": lambda f, x: f(x, 1, mode="reflect"),
    "1, mode='wrap'": lambda f, x: f(x, 1, mode="wrap"),
    "prepend": lambda f, x: f(x, prepend=0, append=x),
    "minlength": lambda f, x: f(x, minlength=4),
    "'...'": lambda f, x: f("ij->ji", x),
    "'i,i'": lambda f, x: f("i,i", x, x),
    "'ij,ij->i'": lambda f, x: f("ij,ij->i", x, x),
    "','": lambda f, x: f(",", x, x),
    "[0, 0]": lambda f, x: f(x, [0, 0]),
    "[[0, 0]], axis": lambda f, x: f(x, np.zeros((1,) * x.ndim, int), axis=-1),
    "where": lambda f, x: f(x, where=x > 0, initial=0),
    "dtype": lambda f, x: f(x, dtype="f4"),
    "order='F'": lambda f, x: f(x, order="F"),
    "ddof": lambda f, x: f(x, ddof=1),
}
#: With what of these NumPy's functions of elements are called.
OF_UFUNCS = ("x", "x.sum()", "0", "itself", "itself twice", "0.5", "[0.5]", "where", "dtype")
METHODS = words(
    "T mT all any argmax argmin astype clip conj copy cumprod cumsum diagonal dot flatten imag max "
    "mean min prod ravel real repeat reshape round squeeze std sum swapaxes trace transpose var"
)


#: Errors of values that are known when the function runs: a program has no errors.
LENIENT = ("output array is read-only", "in the range [0, 1]", "in the range [0, 100]")


def functions() -> Iterator[tuple[str, Any]]:
    for function in FUNCTIONS:
        yield f"{function.__module__}.{function.__name__}", function
    for name in sorted(METHODS):
        yield f"method {name}", method(name)
    for name, ufunc in vars(np).items():
        if isinstance(ufunc, np.ufunc) and name == ufunc.__name__:
            yield name, ufunc
    for ufunc in (np.add, np.multiply, np.maximum, np.logical_or):
        for name in ("reduce", "accumulate", "outer"):
            yield f"{ufunc.__name__}.{name}", getattr(ufunc, name)


def method(name: str) -> Any:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(x, name)
        return found(*args, **kwargs) if callable(found) else found

    return call


def computed(function: Any, x: Any, **how: Any) -> Any:
    """What the program of a function computes of an array."""
    known = abstract_of(x)
    assert known is not None
    try:
        program = trace_function(function, [known], **how)
    except ViewTrace as error:
        program = error.program
    return task.compute_program(program, evaluate.evaluate, [x])


def own(x: Any) -> Any:
    """A copy with the same strides: functions write into what they are given (`out=x`)."""
    if x.base is None:
        return x.copy("K")
    whole = x.base.copy()
    offset = x.__array_interface__["data"][0] - x.base.__array_interface__["data"][0]
    return np.ndarray(x.shape, x.dtype, whole, offset, x.strides)


def is_same(got: Any, want: Any) -> bool:
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(want):
            return False
        return all(map(is_same, got, want))
    if not isinstance(want, (np.ndarray, np.generic)):
        return type(got) is type(want) and bool(got == want)
    if np.shape(got) != want.shape or np.asarray(got).dtype != want.dtype:
        return False
    if want.dtype.kind not in "fc":
        return bool(np.array_equal(got, want))
    eps = 200 * float(np.finfo(want.dtype).eps)
    return bool(np.allclose(got, want, rtol=eps, atol=eps, equal_nan=True))


def differences(name: str, function: Any) -> Iterator[str]:
    """Of one function, what is not as NumPy has it."""
    few = isinstance(function, np.ufunc)
    calls = {k: v for k, v in CALLS.items() if k in OF_UFUNCS or not few}
    for shape, x in SHAPES.items():
        for call, how in calls.items():

            def one(x: Any, how: Any = how) -> Any:
                return how(function, x)

            try:
                want = one(own(x))
                if "empty" in name:
                    want = np.zeros_like(want)
            except ValueError as error:
                if str(error).endswith(LENIENT):
                    continue
                want = error
            except Exception:  # it is called with something of another kind
                continue
            for products in (False,) if few else (False, True):
                words = f"{name} of {shape}, {call}, products={products}"
                print(words, file=sys.stderr, flush=True)  # the last one, should the process end
                try:
                    got = computed(one, x, products=products)
                except NotTraceable:
                    continue
                except Exception as error:
                    yield f"{words}: its program is none: {error!r}"
                    continue
                if isinstance(want, Exception) or not is_same(got, want):
                    yield f"{words}: gives {got!r}, NumPy {want!r}"


#: Processes that share the functions.
PARTS = 5


def sweep(part: int) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    for name, function in list(functions())[part::PARTS]:
        for found in differences(name, function):
            print(" ".join(found.split()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_traced_functions_of_odd_arrays_read_no_memory(part: int) -> None:
    code = f"from tests.tracing.test_no_values import sweep; sweep({part})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""


#: What NumPy must not do with an array that has no memory, and may do by mistake.
NO_VIEWS: dict[str, Callable[[Any], Any]] = {
    "an element": lambda a: a[(0,) * a.ndim],
    "a scalar": lambda a: a.reshape(-1)[0],
    "a copy": lambda a: a.copy(),
    "a flat copy": lambda a: a.T.flatten(),
    "an index list": lambda a: a[[0, 1]],
    "a sorted copy": lambda a: np.sort(a, axis=0),
    "a list": lambda a: a.tolist(),
}


@pytest.mark.parametrize("what", NO_VIEWS)
def test_numpy_gives_a_view_of_no_memory_or_nothing(what: str) -> None:
    """The address is nobody's: to read there would end the process, as the other test says."""
    token = current.set(TraceContext())
    try:
        with pytest.raises(NotTraceable, match="where a view of"):
            apply_view(View(0, (4, 1)), (3, 4), NO_VIEWS[what])
    finally:
        current.reset(token)


@pytest.mark.parametrize("name", ["median", "nanmedian", "quantile", "nanpercentile"])
@pytest.mark.parametrize("axis", [None, ()])
def test_medians_of_numbers_are_these(name: str, axis: Any) -> None:
    """In a function that is given to `map_blocks`, say, of a deviation."""
    x = RNG.standard_normal((4, 5))
    q = () if name.endswith("median") else (50 if name.startswith("nan") else 0.5,)
    function = getattr(np, name)

    def scaled(x: Any) -> Any:
        return (x - x.mean()) / function(x.std(), *q, axis=axis)

    assert is_same(computed(scaled, x), scaled(x))
