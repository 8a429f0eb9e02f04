"""Compiled loop nests: how they are kept, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...ir.expr import DType, View
from . import tuning
from .llvm_text import OPEN, Array, NotWritten, RegionLoop

# ---- functions


class LoopFunction(NamedTuple):
    """A function for all regions that differ in their extents, steps, offsets and constants."""

    function: Callable[..., Any]
    ints: tuple[tuple[str, Any], ...]  # numbers that it is given


#: The text of a loop by its structure, or None where there is none.
_written: dict[Any, Any] = {}
_UNKNOWN = object()


def find_or_write(words: Any, write: Callable[[], LoopFunction]) -> LoopFunction:
    """Return the function for a row of expressions; it is written once."""
    found = _written.get(words, _UNKNOWN)
    if found is _UNKNOWN:
        try:
            found = write()
        except NotWritten:
            found = None
        if len(_written) >= tuning.MOST_WRITTEN:
            _written.clear()
        _written[words] = found
    if found is None:
        raise NotWritten("as it was the first time")
    return found  # type: ignore[no-any-return]


class CompiledLoop:
    """A function for a region, and what it is called with."""

    def __init__(self, written: LoopFunction, row: RegionLoop, shape: Sequence[int],
                 views: Sequence[View],
                 states: int = 0):  # fmt: skip
        self.function = written.function
        self.kept: list[Array] = []  # constants, in memory
        #: An array's number, offset, bytes of an element and steps; or a pointer; or which word.
        self.leaves: list[Any] = []
        for leaf in row.leaves:
            if leaf.op == "input":
                array, view = leaf.data
                size = leaf.dtype.itemsize
                self.leaves.append((array, view.offset * size, size, view.strides))
            elif leaf.op == OPEN:
                self.leaves.append(leaf.data)
            elif leaf.op == "constant":
                self.kept.append(np.frombuffer(leaf.data, leaf.dtype).copy())
                self.leaves.append((None, self.kept[-1].ctypes.data, 0, ()))

        def number(what: str, which: Any) -> int:
            if what == "extent":
                return shape[which]
            if what == "states":
                return states
            if what == "start":
                return row.leaves[which].data.offset  # type: ignore[no-any-return]
            if what == "first":
                return views[which].offset
            if what == "target":
                n, k = which
                return views[n].strides[k]
            n, k = which
            leaf = row.leaves[n]
            view = leaf.data if what == "index" else leaf.data[1]
            return view.strides[k]  # type: ignore[no-any-return]

        self.ints = np.array([number(*i) for i in written.ints], np.int64)
        #: Which of these are those of the region's first point, and how they go from there.
        self.moving = [
            (n, row.leaves[which].data.strides if what == "start" else views[which].strides)
            for n, (what, which) in enumerate(written.ints)
            if what in ("start", "first")
        ]
        self.place = self.ints.ctypes.data

    def __call__(self, memory: Any, given: Sequence[Array], targets: Sequence[int]) -> None:
        """Run the loop; `targets` are the addresses to which it writes."""
        words = [self.place]
        for leaf in self.leaves:
            if type(leaf) is int:
                words.append(address(given[leaf]))
                continue
            array, offset, itemsize, _ = leaf
            if array is None:
                words.append(offset)
            else:
                flat, first = memory[array]
                words.append(address(flat) + first * itemsize + offset)
        self.function(*words, *targets)

    def call_at(
        self, origin: Sequence[int], memory: Any, given: Sequence[Array], targets: Sequence[int]
    ) -> None:
        """Run the loop over a box that begins at `origin`, as `targets` do."""
        ints = self.ints.copy()
        for n, strides in self.moving:
            ints[n] += dot_product(origin, strides)
        words = [ints.ctypes.data]
        for leaf in self.leaves:
            if type(leaf) is int:
                words.append(address(given[leaf]))
                continue
            array, offset, itemsize, strides = leaf
            if array is None:
                words.append(offset)
            else:
                flat, first = memory[array]
                first += dot_product(origin, strides)
                words.append(address(flat) + first * itemsize + offset)
        self.function(*words, *targets)


def dot_product(a: Sequence[int], b: Sequence[int]) -> int:
    return sum([x * y for x, y in zip(a, b, strict=True)])


def address(array: Array) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


#: Reductions that give the place of an extreme, and those that give its value.
EXTREMES = {"argmin": "min", "argmax": "max"}
#: A position behind every other.
NOWHERE = 2**63 - 1


def identity(op: str, dtype: DType) -> Any:
    """Return the identity element of an operation: a value that changes no other."""
    if op in ("sum", "prod", "any", "all"):
        return np.array({"sum": 0, "prod": 1, "any": False, "all": True}[op], dtype)
    if dtype.kind == "b":
        return np.array(op in ("min", "fmin"), dtype)
    if dtype.kind == "f":
        far = np.nan if op.startswith("f") else np.inf if op == "min" else -np.inf
        return np.array(far, dtype)
    facts = np.iinfo(dtype)
    return np.array(facts.max if op in ("min", "fmin") else facts.min, dtype)


#: Arrays of a moment's state.
MOMENT = 6


def states(op: str, dtype: DType, shape: tuple[int, ...], few: bool) -> list[Array]:
    """Return the arrays in which a reduction begins.

    A sum of doubles, unless it is of few, is followed by its rounding error. A moment is six
    arrays: the count, the sum, its rounding error, the squared deviations from the mean, the first
    value, and the sum of the differences from the first value. With the first value taken off,
    numbers that are close to each other and far from zero lose no digits. The position of an
    extreme comes before the extreme.
    """
    if op == "moment":
        return [np.zeros(shape) for _ in range(MOMENT)]
    if op in EXTREMES:
        return [np.full(shape, NOWHERE), np.full(shape, identity(EXTREMES[op], dtype))]
    first = np.full(shape, identity(op, dtype))
    return [first, np.zeros(shape)] if loses_precision(op, dtype, few) else [first]


def loses_precision(op: str, dtype: DType, few: bool) -> bool:
    return op == "sum" and dtype == np.float64 and not few
