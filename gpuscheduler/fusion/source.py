"""What a task can compute for its readers, and what that costs.

An `InlineSource` is a task's value as an expression. A reader lends it numbers of its own, is
traced with it, and gives the numbers back. Costs decide whether that beats reading a stored array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import Task

from ..frontend.graph import SLICERS, BlockInfo
from ..ir.expr import Expr, Kernel, Out, Program, nodes, replace_leaves
from ..ir.rewrite import renumber_arrays, renumber_leaf
from ..tracing.abstract import (
    AbstractArray,
    FlatArray,
    GeneratedArray,
    LibraryCall,
    MaskedPoints,
)
from ..values import leaves, map_leaves
from .task import Key, Values, count_arrays, placeholder

#: Inputs of inlined producers are numbered from here while their reader is traced.
BORROWED = 1_000_000
#: Readers that may each compute a value for themselves, at most.
FEW_READERS = 3
#: Sums or products of each element that count as little work on a GPU. To write and to read an
#: element takes as long as some dozens.
LITTLE_WORK = 24
_SUMS = frozenset({
    "add", "subtract", "multiply", "negative", "absolute", "fabs", "square", "maximum", "minimum",
    "fmax", "fmin", "where", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "logical_and", "logical_or", "logical_not", "conjugate", "isnan",
})  # fmt: skip
_QUOTIENTS = frozenset({"divide", "reciprocal", "sqrt"})
_FUNCTIONS = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sin", "cos",
})  # fmt: skip


class StructureNumbers:
    """Numbers structures of values 0, 1, … in the order of their first appearance."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, words: Any) -> int:
        """Return the number of a structure, by words that can be looked up."""
        return self._numbers.setdefault(words, len(self._numbers))


@dataclass(slots=True, eq=False)  # frozen would take three times as long to make, for each block
class InlineSource:
    """A value that a task makes and its readers may compute for themselves instead."""

    shape: tuple[int, ...]
    #: An element of the value. Its arrays and its placeholders are numbered 0, 1, …
    expr: Expr
    #: The tasks that make its arrays.
    names: tuple[Key, ...]
    #: The structures of these tasks' values: arrays, and containers of nothing but arrays.
    expects: tuple[Any, ...]
    #: What stands for its placeholders in this block.
    positions: tuple[int, ...]
    #: Type of the arrays that the task makes, where it reads none.
    kind: str | None
    #: Whether any number of readers may compute it, since it reads and draws nothing.
    free: bool
    #: Whether it reads much more than it makes.
    far: bool
    #: Its number among all structures.
    number: int
    #: Whether computing it is little work.
    little: bool = False
    #: All arrays of a value with several, in its containers; `expr` is one of them. For a scan a
    #: `ScannedArray` of `expr`, for what a mask selects `MaskedPoints`.
    parts: Any = None
    #: For a task that stays: the same task, if it read what `expr` reads.
    apart: UnfusedTask | None = None

    def for_block(
        self, names: tuple[Key, ...], positions: tuple[int, ...], kind: str | None
    ) -> InlineSource:
        """Return the same source for another block."""
        free = self.free or (not names and not positions)
        return InlineSource(
            self.shape, self.expr, names, self.expects, positions, kind, free, self.far,
            self.number, self.little, self.parts,
        )  # fmt: skip

    @property
    def is_selection(self) -> bool:
        """Whether the value is what a mask selects."""
        return isinstance(self.parts, MaskedPoints)


@dataclass(frozen=True, slots=True)
class UnfusedTask:
    """A task's inputs and constants, and its function for them."""

    names: tuple[Key, ...]
    needs: tuple[Key, ...]
    constants: Mapping[Key, Any]
    function: Callable[[Values], Any]


class MatrixInput(NamedTuple):
    """An input of a matrix product."""

    name: Key
    #: Rows and columns as the matrix lies in memory.
    shape: tuple[int, int]
    #: Whether the product is of its transpose.
    turned: bool

    def fits(self, right: MatrixInput, block: BlockInfo | None) -> bool:
        """Whether the product with another has the shape that the collection says.

        It need not have it: a function may make other blocks.
        """
        if block is None:
            return True
        shape, sides = block.shape, (self.shape[self.turned], right.shape[not right.turned])
        ends = range(len(shape) + 1)
        return any((math.prod(shape[:n]), math.prod(shape[n:])) == sides for n in ends)


class MatrixProductTask(NamedTuple):
    """A task whose value is the product of two inputs, each a whole matrix."""

    left: MatrixInput
    right: MatrixInput
    dtype: np.dtype[Any]


class LibraryInputs(NamedTuple):
    """A task whose value is a call of a function that a library of GPUs has."""

    call: LibraryCall
    #: The inputs that the call's arguments are views of, and their structures.
    names: tuple[Key, ...]
    expects: tuple[AbstractArray, ...]


@dataclass(slots=True)
class TraceOutcome:
    """What becomes of tasks of one structure: a program, or the reason for none."""

    program: Program | None
    #: Why there is no program.
    reason: str = ""
    #: The structure of the value.
    makes: Any = None
    #: Bytes of the value.
    nbytes: int = 0
    #: Number of the value's structure.
    number: int = -1
    #: The structures of the inputs.
    expects: tuple[Any, ...] = ()
    #: The value, where it is only a view of an input.
    view: Any = None
    #: Whether the value is pairs of a value and its place.
    pairs: bool = False
    #: The value as readers may compute it, whichever block it is.
    offer: InlineSource | None = None
    #: Operations in matrix products.
    operations: int = 0
    #: The matrix product that the value is, with numbers of inputs for their names.
    product: MatrixProductTask | None = None
    #: The call of a library's function that the value is, with numbers of inputs for their names.
    library: LibraryCall | None = None
    #: Whether some step of the task is a function that a library of GPUs has.
    in_library: bool = False
    #: The step of the task that could not be traced; -1 if none is known.
    culprit: int = -1
    #: Whether the value is an array of one element, or of none.
    or_none: bool = False
    #: Arrays that the functions read besides their arguments.
    beside: tuple[Any, ...] = ()


def select_worth_inlining(
    program: Program, inlined: dict[int, InlineSource], joins: bool
) -> dict[int, InlineSource]:
    """Return the producers whose elements the reader does not compute many times over.

    Producers whose elements are taken by index lists count together, since the reader takes one
    element from any of them. So do all producers that the reader joins.
    """
    points = max((math.prod(k.shape) for k in program.kernels), default=0)
    lists = [s for s in inlined.values() if s.little and (joins or _takes_by_list(s.expr))]
    together = sum([math.prod(s.shape) for s in lists])

    def is_worth(s: InlineSource) -> bool:
        return s.free or 2 * (together if s in lists else math.prod(s.shape)) >= points

    return {n: s for n, s in inlined.items() if is_worth(s)}


@lru_cache(1024)
def _takes_by_list(root: Expr) -> bool:
    return any(n.op == "taken" for n in nodes((root,)))


def stores_a_scan(program: Program) -> bool:
    """Whether a kernel of a program reads what another one has scanned."""
    read = {n for kernel in program.kernels for n in kernel.inputs}
    return any(
        not read.isdisjoint(range(start, start + len(kernel.outputs)))
        for start, kernel in zip(program.starts, program.kernels, strict=True)
        if kernel.is_scan
    )


@lru_cache(1024)
def _bytes_moved(expr: Expr, shape: tuple[int, ...]) -> int:
    return Kernel(shape, (expr,)).bytes_moved()


def is_cheaper_computed(source: InlineSource, times: float) -> bool:
    """Whether computing a value `times` times is faster than storing it once and reading it."""
    if not source.little or times > FEW_READERS or source.positions:
        return False
    made = math.prod(source.shape) * source.expr.dtype.itemsize
    over = source.parts.shape if isinstance(source.parts, FlatArray) else source.shape
    read = _bytes_moved(source.expr, over) - made
    return times * read < read + (1 + times) * made


def sliced_share(task: Any, shape: tuple[int, ...]) -> float | None:
    """Return the part of a block, 0 to 1, that a slicing task takes; else None."""
    index = task.args[1] if type(task) is Task and len(task.args) == 2 else None
    if getattr(task, "func", None) not in SLICERS or task.kwargs or type(index) is not tuple:
        return None
    if len(index) != len(shape) or any(type(i) is not slice for i in index) or 0 in shape:
        return None
    return math.prod(len(range(n)[i]) / n for n, i in zip(shape, index, strict=True))


def work_per_element(root: Expr) -> int:
    """Return about how many sums or products an element takes; many if unknown."""
    return sum([_work_of(n) for n in nodes((root,)) if n.args and n.op != "cast"])


def _work_of(node: Expr) -> int:
    wide = max([a.dtype.itemsize for a in node.args])
    if node.op == "taken" or node.op in _SUMS:
        return 1
    if node.op in _QUOTIENTS:
        return 8 if wide <= 4 else 16
    return 8 if node.op in _FUNCTIONS and wide <= 4 else LITTLE_WORK + 1


def shared_arrays(sources: Iterable[InlineSource]) -> tuple[int, ...]:
    """Return, for each array that sources read, the first one that is the same array.

    Only for several sources that select by masks, to see that they select by one mask. Empty
    otherwise, and where all arrays differ.
    """
    sources = list(sources)
    if sum([s.is_selection for s in sources]) < 2:
        return ()
    first: dict[Any, int] = {}
    out: list[int] = []
    for number, source in enumerate(sources):
        for name, structure in zip(source.names, source.expects, strict=True):
            count = count_arrays((structure,))
            owner = None if source.is_selection else number
            out += [first.setdefault((owner, name, k), len(out) + k) for k in range(count)]
    return tuple(out) if len(set(out)) < len(out) else ()


def lend_source(source: InlineSource, draws: int, arrays: int, shared: Sequence[int] = ()) -> Any:
    """Return a source as an argument of its reader, with numbers of its own.

    `draws` and `arrays` are the placeholders and arrays of the arguments before. Arrays that are
    the same, as `shared` says, have one number.
    """
    words = {placeholder(n): placeholder(draws + n) for n in range(len(source.positions))}

    def number(n: int) -> int:
        return BORROWED + (shared[arrays + n] if shared else arrays + n)

    def change(leaf: Expr) -> Expr:
        return words.get(leaf) or renumber_leaf(leaf, number)

    if source.parts is None:
        (expr,) = replace_leaves([source.expr], change)
        return GeneratedArray(source.shape, expr.dtype, expr)
    if isinstance(source.parts, MaskedPoints):
        expr, mask = replace_leaves([source.expr, source.parts.mask], change)
        return replace(source.parts, expr=expr, mask=mask)
    every = iter(replace_leaves([part.expr for part in leaves(source.parts)], change))
    return map_leaves(lambda part: replace(part, expr=next(every)), source.parts)


def renumber_borrowed(program: Program, borrowed: int) -> Program:
    """Renumber borrowed arrays of a program, so that they follow its own inputs."""
    if not borrowed:
        return program
    own = program.inputs

    def number(n: int) -> int:
        if n >= BORROWED:
            return own + n - BORROWED
        return n if n < own else n + borrowed

    kernels = tuple(renumber_arrays(k, number) for k in program.kernels)
    result = map_leaves(
        lambda v: replace(v, array=number(v.array)) if isinstance(v, Out) else v,
        program.result,
    )
    return Program(own + borrowed, kernels, result)
