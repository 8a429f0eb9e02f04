"""What a function's bytecode reads, calls and writes."""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from ..frontend.rebuild import like_function


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class ClosureCells(Mapping[str, Any]):
    """The variables that a function has from the one around it, now."""

    def __init__(self, cells: Mapping[str, types.CellType]):
        self.cells = cells

    @classmethod
    def of_function(cls, function: types.FunctionType) -> ClosureCells:
        names = function.__code__.co_freevars
        return cls(dict(zip(names, function.__closure__ or (), strict=True)))

    def one_cell(self, name: str) -> ClosureCells:
        """This one alone: what is kept of it keeps no other."""
        return ClosureCells({name: self.cells[name]} if name in self.cells else {})

    def __getitem__(self, name: str) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # still empty
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.cells if name in self)

    def __len__(self) -> int:
        return len(list(iter(self)))


BUILTINS: Mapping[str, Any] = types.MappingProxyType(vars(builtins))
builtins_of = attrgetter("__builtins__")  # which type checkers do not agree that functions have


def narrow_module(
    module: types.ModuleType, names: set[str], other: Callable[[Any, set[str]], Any]
) -> types.ModuleType:
    """A module with `other(value, names)` in place of each value that code asks a module for.

    `names` are the names that the code may ask of the value.
    """
    copy = types.ModuleType(module.__name__)
    for name in sorted(names & vars(module).keys()):
        setattr(copy, name, other(vars(module)[name], names - {name}))
    return copy


def names_read(code: types.CodeType) -> set[str]:
    """Every global and attribute name that a code object, or one inside it, may look up.

    If their values are the same, the function does the same.
    """
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*[names_read(c) for c in inner])


_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


@functools.lru_cache(1024)
def looked_up(code: types.CodeType) -> frozenset[str]:
    """The names that it does look up as globals, and no others: what to replace."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in _LOADS}
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(names).union(*[looked_up(c) for c in inner])


@functools.lru_cache(4096)
def variables_written(code: types.CodeType) -> frozenset[str]:
    """The variables around a function that it, or a function in it, writes."""
    steps = dis.get_instructions(code)
    own = {i.argval for i in steps if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = [variables_written(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(own.union(*inner) & set(code.co_freevars))


def root_module(f: Any) -> str:
    return str(getattr(f, "__module__", "") or "").partition(".")[0]


def root_of(module: types.ModuleType) -> str:
    return module.__name__.partition(".")[0]


def type_name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def replace_globals(
    function: types.FunctionType, other: Callable[[Any], Any]
) -> types.FunctionType:
    """A copy of a function that finds `other(value)` under each global and closure name.

    Later assignments to these names do not reach the copy.
    """
    outside = ChainMap(function.__globals__, BUILTINS)  # type: ignore[arg-type]
    names = looked_up(function.__code__) & outside.keys()
    space = {n: other(outside[n]) for n in sorted(names)}
    space["__name__"] = function.__globals__.get("__name__")
    space["__builtins__"] = builtins  # for NumPy's C code, which imports with them
    cells = ClosureCells.of_function(function)
    around = {n: types.CellType(other(v)) for n, v in cells.items()}
    closure = tuple([around.get(n, cell) for n, cell in cells.cells.items()])
    # whoever reads an attribute that a user gave it runs as it is written
    given, named = function.__defaults__, function.__kwdefaults__
    return like_function(function, space, given, closure, named, {})
