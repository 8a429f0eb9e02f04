"""What a task can compute for its readers, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import Task

from ..frontend.graph import SLICERS
from ..ir.expr import Expr, Kernel, Out, Program, nodes, rebuilt
from ..ir.rewrite import renumber_arrays, renumber_leaf
from ..tracing.abstract import FlatArray, GeneratedArray, MaskedPoints
from ..values import leaves, map_leaves
from .task import Key, Values, count_arrays, placeholder

#: Arrays that a reader reads in place of what its producer would have made have such numbers while
#: the reader is followed.
BORROWED = 1_000_000
#: Readers that may each compute a value for themselves, and how much work that may be on a GPU: so
#: many sums or products of an element. To write it, and to read it, takes as long as some dozens.
FEW_READERS, LITTLE_WORK = 3, 24
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
    """Numbers structures of values 0, 1, … in the order in which they are first met."""

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
    expr: Expr  # its arrays have the numbers 0, 1, …, its placeholders the numbers 0, 1, …
    names: tuple[Key, ...]  # the tasks that make its arrays
    expects: tuple[Any, ...]  # of the values of these: arrays, and containers of nothing but arrays
    positions: tuple[int, ...]
    kind: str | None
    free: bool  # it reads and draws nothing: any number of readers may have it
    far: bool  # it reads much more than it makes
    number: int  # among all structures that were foreseen
    little: bool = False  # computing it is little work
    #: Of a value that is several arrays, all of them, in its containers; `expr` is one. Of a scan,
    #: the scan of `expr`. Of what a mask selects, `MaskedPoints`.
    parts: Any = None
    #: Where the task that makes it stays: what that would be if it read what `expr` reads.
    apart: UnfusedTask | None = None

    def of(
        self, names: tuple[Key, ...], positions: tuple[int, ...], kind: str | None
    ) -> InlineSource:
        """The same of another block."""
        free = self.free or (not names and not positions)
        return InlineSource(
            self.shape, self.expr, names, self.expects, positions, kind, free, self.far,
            self.number, self.little, self.parts,
        )  # fmt: skip

    @property
    def selects(self) -> bool:
        """Whether it is what a mask selects."""
        return isinstance(self.parts, MaskedPoints)


@dataclass(frozen=True, slots=True)
class UnfusedTask:
    """A task's inputs and constants, and its function for them."""

    names: tuple[Key, ...]
    needs: tuple[Key, ...]
    constants: dict[Key, Any]
    function: Callable[[Values], Any]


class MatrixInput(NamedTuple):
    """An input of a product, as a matrix: rows and columns as it lies in memory, and whether the
    product is of its transpose."""

    name: Key
    shape: tuple[int, int]
    turned: bool


class MatrixProductTask(NamedTuple):
    """A task whose value is the product of two matrices that are there as they are."""

    left: MatrixInput
    right: MatrixInput
    dtype: np.dtype[Any]


@dataclass(slots=True)
class TraceOutcome:
    """What became of one structure of task."""

    program: Program | None
    reason: str = ""
    makes: Any = None  # the structure of its value
    nbytes: int = 0  # ... its bytes
    number: int = -1  # ... among all that were foreseen
    expects: tuple[Any, ...] = ()  # the structures of the values that it reads
    view: Any = None  # its value, where that is only a view of what it reads
    pairs: bool = False  # whether it gives pairs of a value and its place
    offer: InlineSource | None = (
        None  # its value as readers may compute it, but for where a block lies
    )
    operations: int = 0  # in products of matrices
    product: MatrixProductTask | None = None  # whose value it is, with numbers for names
    culprit: int = -1  # which of a task's steps was not followed, if one
    or_none: bool = False  # whether its value is one element, or none
    beside: tuple[Any, ...] = ()  # arrays that its functions read beside what it is given


def worth_inlining(
    program: Program, inlined: dict[int, InlineSource], joins: bool
) -> dict[int, InlineSource]:
    """Those of which the reader does not compute each element many times over. Elements that are
    taken by lists are put together: one is read for each of the reader's; and so are all, where it
    joins them."""
    points = max((math.prod(k.shape) for k in program.kernels), default=0)
    lists = [s for s in inlined.values() if s.little and (joins or _takes(s.expr))]
    together = sum([math.prod(s.shape) for s in lists])

    def worth(s: InlineSource) -> bool:
        return s.free or 2 * (together if s in lists else math.prod(s.shape)) >= points

    return {n: s for n, s in inlined.items() if worth(s)}


@lru_cache(1024)
def _takes(root: Expr) -> bool:
    return any(n.op == "taken" for n in nodes((root,)))


def stores_a_scan(program: Program) -> bool:
    """Whether one of its kernels reads what another one has scanned."""
    read = {n for kernel in program.kernels for n in kernel.inputs}
    return any(
        not read.isdisjoint(range(start, start + len(kernel.outputs)))
        for start, kernel in zip(program.starts, program.kernels, strict=True)
        if kernel.scans
    )


@lru_cache(1024)
def _move_leaf(expr: Expr, shape: tuple[int, ...]) -> int:
    return Kernel(shape, (expr,)).bytes_moved()


def is_cheaper_computed(source: InlineSource, times: float) -> bool:
    """Whether to compute a value so many times is sooner done than that one task writes it, and as
    much is read."""
    if not source.little or times > FEW_READERS or source.positions:
        return False
    made = math.prod(source.shape) * source.expr.dtype.itemsize
    over = source.parts.shape if isinstance(source.parts, FlatArray) else source.shape
    read = _move_leaf(source.expr, over) - made
    return times * read < read + (1 + times) * made


def sliced_share(task: Any, shape: tuple[int, ...]) -> float | None:
    """How much of a block a task takes that only takes a slice of it; None of others."""
    index = task.args[1] if type(task) is Task and len(task.args) == 2 else None
    if getattr(task, "func", None) not in SLICERS or task.kwargs or type(index) is not tuple:
        return None
    if len(index) != len(shape) or any(type(i) is not slice for i in index) or 0 in shape:
        return None
    return math.prod(len(range(n)[i]) / n for n, i in zip(shape, index, strict=True))


def work_per_element(root: Expr) -> int:
    """About how many sums or products an element takes; many, where that is not known."""
    return sum([_work_of(n) for n in nodes((root,)) if n.args and n.op != "cast"])


def _work_of(node: Expr) -> int:
    wide = max([a.dtype.itemsize for a in node.args])
    if node.op == "taken" or node.op in _SUMS:
        return 1
    if node.op in _QUOTIENTS:
        return 8 if wide <= 4 else 16
    return 8 if node.op in _FUNCTIONS and wide <= 4 else LITTLE_WORK + 1


def shared_arrays(sources: Iterable[InlineSource]) -> tuple[int, ...]:
    """Of each array that sources read, which one is the same, if several select by masks: else
    nobody would know that two select by one mask. Empty where there is nothing to know."""
    sources = list(sources)
    if sum([s.selects for s in sources]) < 2:
        return ()
    first: dict[Any, int] = {}
    out: list[int] = []
    for number, source in enumerate(sources):
        for name, structure in zip(source.names, source.expects, strict=True):
            count = count_arrays((structure,))
            owner = None if source.selects else number
            out += [first.setdefault((owner, name, k), len(out) + k) for k in range(count)]
    return tuple(out) if len(set(out)) < len(out) else ()


def lend_source(source: InlineSource, draws: int, arrays: int, shared: Sequence[int] = ()) -> Any:
    """A source with numbers of its own, among the reader's others; those that are the same have
    one."""
    words = {placeholder(n): placeholder(draws + n) for n in range(len(source.positions))}

    def number(n: int) -> int:
        return BORROWED + (shared[arrays + n] if shared else arrays + n)

    def change(leaf: Expr) -> Expr:
        return words.get(leaf) or renumber_leaf(leaf, number)

    if source.parts is None:
        (expr,) = rebuilt([source.expr], change)
        return GeneratedArray(source.shape, expr.dtype, expr)
    if isinstance(source.parts, MaskedPoints):
        expr, mask = rebuilt([source.expr, source.parts.mask], change)
        return replace(source.parts, expr=expr, mask=mask)
    every = iter(rebuilt([part.expr for part in leaves(source.parts)], change))
    return map_leaves(lambda part: replace(part, expr=next(every)), source.parts)


def return_arrays(program: Program, borrowed: int) -> Program:
    """Number the arrays that were borrowed behind the program's own inputs."""
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
