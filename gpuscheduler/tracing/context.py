"""The trace context: one run of a function on arrays without values.

The context holds the nodes of the trace, each once, the arrays that the function makes, and the
reason why it cannot go on. Operations on arrays are in `array` and the files after it.

An array is an expression of its elements over its shape. A view changes the `View` of each leaf:
NumPy makes the same view of an array that has these strides and no memory. Arrays that a function
makes have numbers from `MADE` on, until `lower` puts them into kernels.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import numpy_private
from ..ir.expr import LEAVES, DType, Expr, Program, Shape, View, nodes, view_of, with_view
from .abstract import (
    AbstractArray,
    LibraryCall,
    MaskedPoints,
    MatrixProductArray,
    ReductionResult,
    StoredArray,
)
from .purity import CHANGEABLE

if TYPE_CHECKING:
    from .array import TracedArray

#: Numbers of arrays that the function itself makes; below are the program's inputs.
MADE = 1 << 40
MOST_NODES = 4000  # in a program; compiling more takes longer than running them one by one saves
_KINDS = frozenset("?bhilqBHILQefdFD")  # the type characters that an expression can hold
#: How a reason ends that is none where the values of small tables are known.
NOT_KNOWN = "whose values are not known"
nothing: Any = numpy_private.NO_VALUE


class NotTraceable(Exception):
    """The function did something that has no expression.

    `str(error)` says what; `operations` is the number of operations of a product of matrices, and
    `in_library` says whether a library of GPUs has a function that was called.
    """

    operations = 0
    in_library = False


class ViewTrace(NotTraceable):
    """It computes nothing: `result` is its value, with `Seen`s for arrays; `program` copies it."""

    def __init__(self, result: Any, program: Program):
        super().__init__("it only takes a view")
        self.result, self.program = result, program


class CompressTrace(NotTraceable):
    """How many elements its value has depends on values: it is `masked`, over its inputs."""

    def __init__(self, masked: MaskedPoints):
        super().__init__("how many elements it selects by a mask is known when it has run")
        self.masked = masked


class OptionalTrace(NotTraceable):
    """The value is an array of one element, or of none.

    `program` computes the element, and whether there is one.
    """

    def __init__(self, program: Program):
        super().__init__("whether it has an element is known when it has run")
        self.program = program


class ValueIfThere(NamedTuple):
    """What such a program makes. Its type is in no block of the caller's, which may be tuples."""

    value: Any
    there: Any


class MatrixProductTrace(NotTraceable):
    """The value is the `product` of two matrices, each a view of an input.

    Without `product`, the function does something else with one.
    """

    def __init__(self, product: MatrixProductArray | None):
        super().__init__("it multiplies matrices")
        self.product = product


class LibraryTrace(NotTraceable):
    """The value is what a `call` of a library's function makes of views of inputs.

    Without `call`, the function does something else beside such a call.
    """

    def __init__(self, call: LibraryCall | None):
        super().__init__("it calls a function of a library")
        self.call = call


#: Whatever a function makes that is an array of its own.
MadeArray = StoredArray | ReductionResult | MatrixProductArray | LibraryCall


class CapturedArrays:
    """Arrays that functions read beside their arguments.

    They come from a variable outside, a constant of the task, or the function itself. They become
    inputs behind the arguments, in the order of `arrays`; with `dense`, NumPy's arrays count as
    contiguous.

    A constant of the task that is NumPy's, and what is made from nothing, stays what it is unless
    `every` one is to be an input: some functions want their values (of indices, of bins). Such
    constants are in `left`; `wanted` says that a function computed with an array that was none.
    """

    def __init__(self, dense: bool = False, every: bool = False):
        self.dense, self.every, self.wanted = dense, every, False
        self.left: list[Any] = []
        self.arrays: list[Any] = []
        self.expected: list[AbstractArray] = []  # what programs take them for
        self.known: dict[Any, tuple[TracedArray, Expr]] = {}


class TraceContext:
    """The nodes of one run, each once, and the arrays made."""

    def __init__(
        self,
        products: bool = False,
        beside: CapturedArrays | None = None,
        points: bool = False,
        matrices: bool = False,
        whole: bool = False,
        library: bool = False,
    ) -> None:
        self.products, self.points, self.operations = products, points, 0
        #: Whether calls of functions that a library of GPUs has may be values; and whether there
        #: were such calls.
        self.library, self.in_library = library, False
        #: Whether parts of arrays that are put together shall be an array that a kernel writes;
        #: and what those are, by the number (`id`) of the leaf that reads them.
        self.whole = whole
        self.parts: dict[int, Expr] = {}
        self.matrices = matrices  # whether products of two matrices may be values
        self.short = True  # whether short rows may be reduced one by one
        self.beside = beside
        self.known: dict[Any, Expr] = {}
        self.made: list[MadeArray] = []
        self.numbers: dict[MadeArray, int] = {}
        self.inputs = 0
        self.given: list[list[weakref.ref[TracedArray]]] = []  # the families of arguments
        #: Copies of lists and dictionaries that the function is given, and what they hold.
        self.copied: list[tuple[Any, list[Any]]] = []
        self.refused: str | None = None  # why: the error itself would hold the caller's frames

    def node(self, op: str, args: tuple[Expr, ...], dtype: Any, data: Any = None) -> Expr:
        dtype = np.dtype(dtype)
        key = (op, dtype, data, tuple([id(a) for a in args]))
        found = self.known.get(key)
        if found is None:
            if len(self.known) > 10 * MOST_NODES:
                raise self.refuse("it does too many operations")
            found = self.known[key] = Expr(op, args, dtype, data)
        return found

    def refuse(self, reason: str) -> NotTraceable:
        """The error to raise; it is remembered, should the function catch it."""
        self.refused = self.refused or reason
        return NotTraceable(reason)

    def remember(self, copy: Any) -> None:
        """What a copy of a constant holds, which the function should leave as it is."""
        if type(copy) in CHANGEABLE:
            self.copied.append((copy, _held_values(copy)))
        if type(copy) in (*CHANGEABLE, tuple):
            for value in copy.values() if type(copy) is dict else copy:
                self.remember(value)

    def is_beside(self, array: TracedArray) -> bool:
        """Whether it is such an array, or a view of one."""
        known = self.beside.known.values() if self.beside else ()
        return any(array._family is made._family for made, _ in known)

    def keep(self, array: MadeArray, dtype: DType) -> Expr:
        """The leaf that reads an array made here, over its own shape."""
        number = self.numbers.get(array)
        if number is None:
            number = self.numbers[array] = MADE + len(self.made)
            self.made.append(array)
        return self.node("input", (), dtype, (number, View.contiguous(array.shape)))


current: ContextVar[TraceContext] = ContextVar("trace context")


def _held_values(container: Any) -> list[Any]:
    """What a list or a dictionary holds, in order."""
    if type(container) is list:
        return list(container)
    return [*container.keys(), *container.values()]


def is_other(container: Any, before: list[Any]) -> bool:
    now = _held_values(container)
    return len(now) != len(before) or any(map(operator.is_not, now, before))


def abstract_of(array: Any) -> AbstractArray | None:
    """What a program knows of an array; None of one that it cannot read."""
    if array.dtype.hasobject or array.dtype.metadata:  # which functions may ask for
        return None
    if array.flags.c_contiguous:
        return AbstractArray(array.shape, array.dtype)
    itemsize = array.dtype.itemsize
    if any(s % itemsize for s in array.strides):
        return None
    return AbstractArray(array.shape, array.dtype, tuple([s // itemsize for s in array.strides]))


def node_of(op: str, args: tuple[Expr, ...], dtype: Any, data: Any = None) -> Expr:
    return current.get().node(op, args, dtype, data)


def refuse(reason: str) -> NotTraceable:
    return current.get().refuse(reason)


def check_dtype(dtype: Any) -> DType:
    dtype = np.dtype(dtype)
    if dtype.char not in _KINDS or not dtype.isnative:
        raise refuse(f"its arrays are of type {dtype}")
    return dtype  # type: ignore[no-any-return]


def constant(value: Any, dtype: Any) -> Expr:
    dtype = check_dtype(dtype)
    with np.errstate(all="ignore"):
        return node_of("constant", (), dtype, np.asarray(value, dtype).tobytes())


def cast_to(expr: Expr, dtype: Any) -> Expr:
    dtype = check_dtype(dtype)
    if expr.dtype == dtype:
        return expr
    if expr.op == "constant":
        value = expr.value
        if dtype.kind not in "cb" and expr.dtype.kind == "c":
            value = value.real
        with np.errstate(all="ignore"):
            return constant(np.asarray(value).astype(dtype), dtype)
    return node_of("cast", (expr,), dtype)


def with_leaves(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The same tree with other leaves, among the nodes of this run."""
    new: dict[int, Expr] = {}
    for old in nodes((expr,)):
        if old.op in LEAVES:
            leaf = change(old)
            new[id(old)] = node_of(leaf.op, (), leaf.dtype, leaf.data)
        else:
            args = tuple([new[id(a)] for a in old.args])
            new[id(old)] = node_of(old.op, args, old.dtype, old.data)
    return new[id(expr)]


def made_in(expr: Expr) -> list[int]:
    """The numbers of the arrays made here that an expression reads, ascending."""
    return sorted({n.data[0] for n in nodes((expr,)) if n.op == "input" and n.data[0] >= MADE})


def no_out(out: Any, others: Mapping[str, Any] | None = None) -> None:
    if out is not None and out is not nothing:
        raise refuse("it writes into an array that it is given (out=)")
    for name, value in (others or {}).items():
        if value is not nothing and value is not None:
            raise refuse(f"it uses {name}=")


# ------------------------------------------------------------------------------------------------
# Views.

_HERE = 1 << 61  # an address that is nobody's


class _MemorylessBuffer:
    """Gives NumPy an array with these strides and no memory.

    Its elements have no bytes: whatever NumPy does with them (a copy, an element as a scalar, a
    sort), it reads and writes nothing at that address.
    """

    def __init__(self, shape: Shape, strides: Shape):
        self.__array_interface__ = {
            "version": 3, "typestr": "|V0", "data": (_HERE, False), "shape": shape,
            "strides": strides,
        }  # fmt: skip


def apply_view(view: View, shape: Shape, how: Callable[[Any], Any]) -> tuple[View, Shape]:
    """What a NumPy view operation makes of a view of `shape`.

    >>> apply_view(View(0, (4, 1)), (3, 4), lambda a: a[1:, ::-2])
    (View(offset=7, strides=(4, -2)), (2, 2))

    Raises NotTraceable where `how` gives anything but a view: a copy, or an element.
    """
    seen = how(np.asarray(_MemorylessBuffer(shape, view.strides)))
    if type(seen) is not np.ndarray:
        raise refuse("it reads an element where a view of an array is needed")
    moved = seen.__array_interface__["data"][0] - _HERE if seen.size else 0
    moved = (moved + (1 << 63)) % (1 << 64) - (1 << 63)
    if abs(moved) > _HERE >> 1:  # in memory that NumPy has made
        raise refuse("it copies an array where a view of it is needed")
    return View(view.offset + moved, tuple(seen.strides)), tuple(seen.shape)


def change_views(expr: Expr, change: Callable[[View], View]) -> Expr:
    """The expression with `change` done to each leaf's view."""
    memo: dict[View, View] = {}

    def change_leaf(leaf: Expr) -> Expr:
        view = view_of(leaf)
        if view is None:
            return leaf
        if view not in memo:
            memo[view] = change(view)
        return with_view(leaf, memo[view])

    return with_leaves(expr, change_leaf)


def squeezed_axes(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def view_over(view: View, shape: Shape, other: Shape) -> View:
    """A view of `shape` as one of `other`, which differs in axes of length 1 only."""
    strides = iter([s for n, s in zip(shape, view.strides, strict=True) if n != 1])
    return View(view.offset, tuple(0 if n == 1 else next(strides) for n in other))
