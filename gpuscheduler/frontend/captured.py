"""Parts of functions and containers in tasks, and whether anybody has changed these since."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import CellType, FunctionType
from typing import Any

import numpy as np
from dask.array.core import concatenate_shaped

from ..dask_private import (
    apply_random,
    apply_random_func,
    choice_rng,
    choice_rs,
    concatenate_nested,
)

#: A cell, a function, a partial, a composition, a list, a dictionary or an array, and what it was
#: made of when it was looked at.
Variable = tuple[Any, tuple[Any, ...]]
#: Dask's own functions that draw random numbers, from a seed or a state that they are handed.
DRAWING = (apply_random_func, apply_random, choice_rng, choice_rs)
#: Dask's own functions that get lists and dictionaries and hand them to nobody who changes them.
FRESH = (*DRAWING, concatenate_shaped, concatenate_nested)


def made_of(it: Any) -> tuple[Any, ...]:
    """The parts of a closure, function, partial or container that somebody may change.

    >>> def f(block, *, k=2):
    ...     return block * k
    >>> f.__kwdefaults__["k"] = 3
    >>> made_of(f)[2:]
    ('k', 3)
    """
    if type(it) is CellType:
        return (it.cell_contents,)
    if type(it) is FunctionType:
        given = it.__kwdefaults__ or {}
        return (it.__code__, it.__defaults__, *given, *given.values())
    if type(it) is list:
        return tuple(it)
    if type(it) is np.ndarray:
        return content(it)
    if type(it) is dict:
        return (*it, *it.values())
    if hasattr(it, "funcs"):  # toolz has put it together
        return (it.first, *it.funcs)
    return (it.func, *it.args, *it.keywords, *it.keywords.values())


def content(array: Any) -> tuple[bytes, ...]:
    """What an array holds, and as what it shows that: all that somebody may change in place.

    >>> a = np.arange(2)
    >>> before = content(a)
    >>> a.dtype = "f8"
    >>> content(a)[0] == before[0], content(a) == before
    (True, False)
    """
    return array.tobytes(), f"{array.dtype.str} {array.shape} {array.strides}".encode()


def all_unchanged(around: Iterable[Variable]) -> bool:
    """Whether variables around functions, and these themselves, are what they were."""
    try:
        return all(_are_same(made_of(it), before) for it, before in around)
    except ValueError:  # a variable is no more
        return False


def _are_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    if len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) or all(map(_is_same, now, before))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is bytes and a == b)
