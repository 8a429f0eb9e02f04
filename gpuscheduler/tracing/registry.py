"""The functions that a trace knows, and the functions that replace them."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from .bytecode import words

#: Keywords of arrays that only say which library's they are.
LIKE = ("like", "meta")


# ------------------------------------------------------------------------------------------------
# What is called in place of other functions.

#: What is called in place of a function, wherever a task calls it.
KNOWN: dict[Any, Callable[..., Any]] = {}
#: In place of functions that toolz has given some of their arguments; it gets these, too.
KNOWN_CURRIED: dict[Any, Callable[..., Any]] = {}


def instead_of(function: Any) -> Callable[[Any], Any]:
    def enter(own: Any) -> Any:
        KNOWN[function] = own
        return own

    return enter


class NumpyNamespace:
    """A module as a traced function finds it.

    It gives the module's present values, but an `own` function in place of a value that is still
    the one it was entered for.
    """

    def __init__(self, module: types.ModuleType):
        self.module = module
        self.own: dict[str, tuple[Any, Any]] = {}  # what was there, and what is called instead

    def enter(self, name: str, function: Any) -> None:
        self.own[name] = getattr(self.module, name, None), function

    def __getattr__(self, name: str) -> Any:
        there = getattr(self.module, name, None) if name in self.own else None
        if name in self.own and self.own[name][0] is there:
            return self.own[name][1]
        return getattr(self.module, name)


NUMPY, CUPY = NumpyNamespace(np), NumpyNamespace(np)
CONVERTING = words("array asarray asanyarray ascontiguousarray asfortranarray")
#: Python's modules of functions of numbers, as a traced function finds them.
OF_NUMBERS: dict[types.ModuleType, NumpyNamespace] = {}


def in_place_of(function: Any) -> Any:
    try:
        if type(function).__name__ == "curry" and function.func in KNOWN_CURRIED:
            return functools.partial(KNOWN_CURRIED[function.func], *function.args)
        known = KNOWN.get(function)
    except Exception:  # not hashable: a user's object may say so by any error
        return None
    if known is None and (getattr(function, "__module__", None) or "").startswith("cupy"):
        known = in_numpy(function)
    if known is None and type(function).__module__.startswith("cupy"):
        known = in_numpy(function)
    return None if known is function else known


def in_numpy(value: Any) -> Any:
    """The NumPy or SciPy function (or module) for one of CuPy or Python; else the same."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
        if name in ("cupy", "numpy"):
            return CUPY if name == "cupy" else NUMPY
        if value in OF_NUMBERS:
            return OF_NUMBERS[value]
        if name == "cupyx.scipy.special":
            return scipy_special() or value
        return value
    name = str(getattr(value, "__name__", ""))
    if name.startswith("cupyx_scipy_special_"):
        return getattr(scipy_special(), name.removeprefix("cupyx_scipy_special_"), value)
    found = getattr(np, name.removeprefix("cupy_"), value)
    return getattr(CUPY, name) if name in CONVERTING else KNOWN.get(found, found)


def scipy_special() -> Any:
    try:
        return importlib.import_module("scipy.special")
    except ImportError:
        return None
