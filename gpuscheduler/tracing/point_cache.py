"""Expressions of functions of points that were traced before.

A function is known by its code and the namespace of its module. What was traced holds as long as
all is the same that the trace read: globals, attributes of modules, captured variables, defaults,
and the functions that it calls. Only functions that read nothing but numbers, strings, tuples of
these, modules and functions are kept: nobody changes such values in place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..frontend.captured import Variable, all_unchanged, made_of
from ..frontend.rebuild import has_name
from ..ir.expr import DType
from .bytecode import ClosureCells
from .purity import Read, reads_of_points

#: Functions that are kept at most.
MOST = 256
_ATOMS = (bool, int, float, complex, str, type(None))

_known: dict[Any, _Traced] = {}


class _Traced(NamedTuple):
    """What a trace gave, and all that it read."""

    expressions: list[Any]
    space: Mapping[str, Any]  # of the function's module
    reads: list[Read]  # outside the function's own variables
    around: list[Variable]  # functions that it calls

    def is_valid(self, space: Mapping[str, Any]) -> bool:
        """Whether all is the same that the trace read, for a function of this namespace."""
        if self.space is not space or not all_unchanged(self.around):
            return False
        return all(where.get(name) is value for where, name, value in self.reads)


def find_expressions(f: Any, types: Sequence[DType], args: tuple[Any, ...]) -> list[Any] | None:
    """The expressions of a function that was traced before; None where it has to be traced."""
    key = _key_of(f, types, args)
    found = None if key is None else _known.get(key)
    if found is None:
        return None
    if not found.is_valid(f.__globals__):
        _known.pop(key, None)
        return None
    return type(found.expressions)(found.expressions)


def keep_expressions(
    f: Any, types: Sequence[DType], args: tuple[Any, ...], expressions: list[Any]
) -> None:
    """Keep what the trace of a function gave, if nothing that it read changes unseen."""
    key = _key_of(f, types, args)
    if key is None:
        return
    every, functions, containers = reads_of_points(f)
    around = [(g, made) for g, made in functions if g is not f]
    plain = [type(g) is FunctionType and not g.__closure__ and not vars(g) for g, _ in around]
    if containers or not all(plain):
        return
    reads = [r for r in every if type(r[0]) is not ClosureCells]  # the key has those of cells
    if not all(_stays(value) for _, _, value in reads):
        return
    if not all(_stays(v) for _, (_, *given) in around for v in given):
        return
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = _Traced(type(expressions)(expressions), f.__globals__, reads, around)


def _key_of(f: Any, types: Sequence[DType], args: tuple[Any, ...]) -> Any:
    """Words for a function, its own variables, and what it is called with; None for others."""
    if type(f) is not FunctionType or vars(f):
        return None
    module = sys.modules.get(f.__module__ or "")
    if module is None or vars(module) is not f.__globals__:
        return None  # nobody else holds that namespace
    try:
        code, defaults, *named = made_of(f)
        cells = tuple([c.cell_contents for c in f.__closure__ or ()])
        dtypes = tuple([(t.char, t.str) for t in types])
        return f.__module__, code, dtypes, _words((defaults, tuple(named), cells, args))
    except (TypeError, ValueError):  # another kind of value, or a cell that is not bound yet
        return None


def _words(value: Any) -> Any:
    """Words for a value that stays what it is: equal for values that compute the same."""
    if type(value) in _ATOMS:
        return type(value), repr(value)
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return type(value), value.dtype.str, value.tobytes()
    if type(value) is tuple:
        return (tuple, *map(_words, value))
    raise TypeError(f"{type(value)} may change")


def _stays(value: Any) -> bool:
    """Whether nobody can change a value in place without a change that is looked for."""
    if isinstance(value, (ModuleType, BuiltinFunctionType, np.ufunc)):
        return True
    if has_name(value) and str(value.__module__).partition(".")[0] in ("builtins", "numpy"):
        return True
    if type(value) is FunctionType:  # it is among those that are called
        return not vars(value) and has_name(value)
    try:
        _words(value)
    except TypeError:
        return False
    return True
