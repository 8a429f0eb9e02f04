"""Tasks of code that was written for NumPy. With a table, weights or edges of NumPy's beside blocks
of CuPy's, which computes with no array of the host, such a task is called again with copies of
these; one that asks for what CuPy does not have, with copies of the blocks on the host.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import cupy
import numpy as np

from .batches import Batch
from .graph import is_plain, is_sender
from .reading import is_users
from .rebuilt import like_function, swapped
from .sizes import leaves, map_leaves

Values = dict[Any, Any]
Task = Callable[[Values], Any]

#: What CuPy raises for arrays of the host, and NumPy for arrays of CuPy's.
SAID = (TypeError, NotImplementedError, AttributeError, ValueError)
#: Functions and methods that write to an array that they are given.
WRITERS = {
    "at", "copyto", "fill", "itemset", "partition", "place", "put", "put_along_axis", "putmask",
    "resize", "setfield", "shuffle", "sort",
}  # fmt: skip


class _Writes(Exception):
    """A function writes to variables around it, which another function would not."""


def says_so(error: BaseException) -> bool:
    """Whether an error may be for an array of the host."""
    return type(error) is not ValueError or "numpy.ndarray" in str(error)


def on_device(values: Values) -> Values | None:
    """Values with arrays of the current device in place of those of the host, as kernels read them;
    None where there is none of these, or none of the others."""
    every = [v for value in values.values() for v in leaves(value)]
    if not any(isinstance(v, cupy.ndarray) for v in every) or not any(map(_is_of_host, every)):
        return None
    return {k: map_leaves(_copied, v) for k, v in values.items()}


def refused(error: BaseException) -> bool:
    """Whether CuPy raised an error, or NumPy for an array of CuPy's."""
    of = getattr(error, "obj", None)  # which has no such attribute
    if isinstance(of, cupy.ndarray) or _is_cupys(getattr(of, "__name__", "")):
        return True
    if any(word in str(error) for word in ("cupy", "__array_ufunc__", "__array_function__")):
        return True
    at = error.__traceback__
    while at is not None:
        if _is_cupys(at.tb_frame.f_globals.get("__name__", "")):
            return True
        at = at.tb_next
    return False


def _is_cupys(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in ("cupy", "cupyx")


class Moved:
    """A task, and what it is called with, with arrays of the current device in place of those of
    the host, or `home` the other way around: among its values, its arguments, and the variables
    around its functions."""

    def __init__(self, task: Task, values: Values, home: bool = False):
        self._home = home
        self._known: dict[int, Any] = {}
        self._copies: list[tuple[Any, Any]] = []
        self._there = False  # whether there are arrays of the other kind, or what makes them
        self._writes = False  # whether a function may write to an array
        self.values = {k: map_leaves(self._swap, v) for k, v in values.items()}
        self._there = self._there and not home  # what others have made, a task does not write to
        self.task: Task = task
        if type(task) is not Batch:  # whose members are programs, and have no arrays
            self.task = swapped(task, self._swap, self._known)

    def found(self) -> Moved | None:
        # on a device nothing was done; on the host, a call that failed may have begun to write
        fits = not (self._there and self._writes) if self._home else self._there
        return self if fits and self._copies else None

    def changed(self) -> bool:
        """Whether the task has written to a copy: nobody would see it."""
        if not (self._writes or self._home):  # of what was called before, not all is seen
            return False
        return any(_differ(copy, self._copy(v)) for v, copy in self._copies)

    def _swap(self, it: Any) -> Any:
        if callable(it) and is_sender(it):
            self._there = self._there or not self._home
            return np.array if self._home else it  # a copy, as a device's is
        if type(it) is FunctionType:
            return self._function(it)
        if not self._moves(it):
            self._there = self._there or isinstance(it, np.ndarray if self._home else cupy.ndarray)
            return it
        if id(it) not in self._known:
            copy = self._copy(it)
            self._copies.append((it, copy))
            self._known[id(it)] = it, copy
        return self._known[id(it)][1]

    def _look_around(self, f: FunctionType, seen: set[int]) -> None:
        """What a function, and those of its user that it calls by name, may write to."""
        if id(f) in seen or not is_users(f):
            return
        seen.add(id(f))
        self._writes = self._writes or any(map(_may_write, _steps(f.__code__)))
        for name in f.__code__.co_names:
            it = f.__globals__.get(name)
            if type(it) is FunctionType:
                self._look_around(it, seen)
            self._there = self._there or isinstance(it, np.ndarray | list | dict)
        for cell in f.__closure__ or ():
            with suppress(ValueError):  # not bound yet
                it = cell.cell_contents
                self._there = self._there or isinstance(it, dict)

    def _moves(self, it: Any) -> bool:
        return type(it) is cupy.ndarray if self._home else _is_of_host(it)

    def _copy(self, it: Any) -> Any:
        return cupy.asnumpy(it) if self._home else _copied(it)

    def _function(self, f: FunctionType) -> Any:
        """A function that reads arrays among the variables of its module."""
        if not is_users(f):
            return f
        steps = list(_steps(f.__code__))
        around = f.__code__.co_freevars  # what an inner function shares with this one is its own
        if any(s.opname == "STORE_GLOBAL" for s in steps) or any(
            s.opname == "STORE_DEREF" and s.argval in around for s in steps
        ):
            raise _Writes
        self._writes = self._writes or any(map(_may_write, steps))
        space = f.__globals__
        if self._home:
            self._look_around(f, set())
        read = [n for n in f.__code__.co_names if self._moves(space.get(n))]
        if not read:
            return f
        space = {**space, **{n: self._swap(space[n]) for n in read}}
        out = like_function(f, space, f.__defaults__, f.__closure__, f.__kwdefaults__)
        return swapped(out, self._swap, self._known)


def moved(task: Task, values: Values, home: bool = False) -> Moved | None:
    """The task with all its arrays on the current device, or on the host; None where none or all of
    them are, or that would mean another thing."""
    try:
        return Moved(task, values, home).found()
    except _Writes:
        return None


def sent(value: Any) -> Any:
    """A value that was made on the host, with its arrays on the current device."""
    return map_leaves(_copied, value)


def _is_of_host(value: Any) -> bool:
    return type(value) is np.ndarray and is_plain(value.dtype)


def _copied(value: Any) -> Any:
    """A copy on the current device; what is seen many times over there is copied once."""
    if not _is_of_host(value):
        return value
    if not value.size or 0 not in value.strides:
        return cupy.asarray(value)
    once = value[tuple([slice(1) if s == 0 else slice(None) for s in value.strides])]
    return cupy.broadcast_to(cupy.asarray(once), value.shape)


def _differ(a: Any, b: Any) -> bool:
    """Whether two arrays of one type differ in any bit."""
    xp = cupy if isinstance(a, cupy.ndarray) else np
    a, b = (xp.ascontiguousarray(v).view(np.uint8) for v in (a, b))
    return bool((a != b).any())


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _steps(inner)


def _may_write(step: dis.Instruction) -> bool:
    """Whether it may write to an array: of which, is not told."""
    if step.opname in ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"):
        return True
    if step.opname.startswith("INPLACE") or (step.opname == "BINARY_OP" and "=" in step.argrepr):
        return True
    said = step.argval
    return said in WRITERS if type(said) is str else type(said) is tuple and "out" in said
