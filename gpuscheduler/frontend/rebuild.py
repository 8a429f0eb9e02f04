"""Rebuild tasks and functions with some parts substituted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import WRAPPER_ASSIGNMENTS, partial
from operator import is_not
from types import CellType, FunctionType
from typing import Any

from dask._task_spec import GraphNode, TaskRef

from .compiled_task import COMPILED
from .task import OwnTask

_PLAIN = (int, float, bool, str, type(None), TaskRef)


def swap_parts(it: Any, swap: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    """A value with other parts, or the value itself where no part changes.

    `known` holds the values that were rebuilt before, and their parts.
    """
    if type(it) in _PLAIN:
        return it
    if id(it) in known:
        return known[id(it)][1]
    other = swap(it)
    if other is not it:
        return other
    known[id(it)] = it, it  # a function may be among its own variables
    other = _put_together(it, lambda part: swap_parts(part, swap, known))
    known[id(it)] = it, other
    return other


def _put_together(it: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(it)
    if kind in (tuple, list):
        parts = [change(v) for v in it]
        return kind(parts) if any(map(is_not, parts, it)) else it
    if kind is dict:
        values = change([*it.values()])
        return dict(zip(it, values, strict=True)) if any(map(is_not, values, it.values())) else it
    if kind is partial:
        before = it.func, it.args, it.keywords
        function, args, keywords = parts = [change(v) for v in before]
        return partial(function, *args, **keywords) if any(map(is_not, parts, before)) else it
    if kind is FunctionType:  # a module's own counts as itself, with all that it has
        return it if has_name(it) else _function_with(it, change)
    if isinstance(it, OwnTask):
        held = it.parts
        parts = [change(v) for v in held]
        return it.with_parts(*parts) if any(map(is_not, parts, held)) else it
    if not isinstance(it, GraphNode):
        return it
    new = {n: change(v) for n, v in attributes_of(it).items()}
    if not any(getattr(it, n) is not v for n, v in new.items()):
        return it
    other = object.__new__(kind)
    for name, value in new.items():
        setattr(other, name, value)
    return other


def attributes_of(it: GraphNode) -> dict[str, Any]:
    """The attributes of a task of Dask, by name."""
    names = [n for c in type(it).__mro__ for n in getattr(c, "__slots__", ())]
    names += getattr(it, "__dict__", {})
    return {n: getattr(it, n) for n in names if n != "__weakref__" and hasattr(it, n)}


def _function_with(f: FunctionType, change: Callable[[Any], Any]) -> FunctionType:
    compiled = f.__code__.co_filename == COMPILED
    names = {k: v for k, v in f.__globals__.items() if k != "__builtins__"} if compiled else None
    cells = f.__closure__ or ()
    try:
        contents = [c.cell_contents for c in cells]
    except ValueError:  # not bound yet
        return f
    before = names, contents, f.__defaults__, f.__kwdefaults__, vars(f)
    names, contents, given, named, own = parts = [change(v) for v in before]
    if not any(map(is_not, parts, before)):
        return f
    new = [c if c.cell_contents is v else CellType(v) for c, v in zip(cells, contents, strict=True)]
    space = f.__globals__ if names is None else {**f.__globals__, **names}
    return like_function(f, space, given, tuple(new), named, own)


def like_function(
    f: FunctionType, space: dict[str, Any], given: Any, cells: Any, named: Any, own: dict[str, Any]
) -> FunctionType:
    """A copy of a function with other globals, defaults, closure, keyword defaults, attributes.

    Its name, its annotations and what else Python says of functions are the same.
    """
    out = FunctionType(f.__code__, space, f.__name__, given, cells)
    out.__kwdefaults__ = named
    for name in WRAPPER_ASSIGNMENTS:
        setattr(out, name, getattr(f, name))
    vars(out).update(own)
    return out


def has_name(v: Any) -> bool:
    """Whether it is a function of a module, under its own name."""
    name, module = getattr(v, "__qualname__", None), getattr(v, "__module__", None)
    return callable(v) and vars(sys.modules.get(str(module), sys)).get(str(name)) is v
