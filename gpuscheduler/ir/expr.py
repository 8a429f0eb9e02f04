"""The IR: expressions, kernels and programs.

An `Expr` says what one element is, over an iteration space whose shape is kept beside it. It knows
no array, device or language. It becomes NumPy values or LLVM loops (`codegen/cpu`), CUDA source
(`codegen/cuda`), and bytes and operations (`Kernel.bytes_moved`, `Kernel.operations`).

Nodes (`op`; `args`; `data`):

- ``input``: an element of array number `data[0]`, at the offset that the `View` `data[1]` gives.
- ``index``: the integer that the `View` `data` gives, int64.
- ``constant``: `data` is the value's bytes; see `constant` and `Expr.value`.
- ``reduced``: result `data[1]` of reduction `data[0]` of the same kernel; only in its outputs.
  Of a scan, what it is at the point.
- ``cast``: `args[0]` converted to `dtype`, as `ndarray.astype` converts.
- ``where``: `args[1]` where `args[0]` (bool) holds, else `args[2]`; only the chosen one may be
  read.
- ``taken``: an element of the array that `args[0]`, an ``input``, reads: the one `args[1]` (int64)
  elements further on. It exists wherever it is chosen; if `data` is ANYWHERE, it exists at any
  point.
- ``real``, ``imag``, ``complex``: parts of a complex number, and one made of two parts.
- ``bits``, ``uniform``, ``normal``: random numbers of Philox (see `random`), counter-based: `data`
  is the key, an int below 2**64; `args[0]` is the element's number in its array: an ``index``,
  or one to which an even constant is added.
- ``bin``: the number of the bin that `args[0]` lies in, int64, or the number of bins where it lies
  in none. `data` are the `Bins`.
- ``call``: a Python function of numbers. `data` is the function (a `ScalarFunction`) and
  None, or k for item k of the tuple that it returns.
- the name of any NumPy ufunc (``add``, ``exp``, …): its loop for exactly these argument types,
  which gives `dtype`. Arguments have been cast: no node converts silently. Beyond NumPy's own, the
  names of SciPy's special functions (``erf``, ``gammaln``, …).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

DType = np.dtype[Any]

#: Placeholders for the positions of blocks in their arrays, in programs that serve many blocks: the
#: n-th is `PLACEHOLDER + 2 * n`. No constant of a user is likely to be one of them.
PLACEHOLDER = 0x3B9A_C9FF_5A5A_0000
#: Operations that read nothing from other nodes.
LEAVES = frozenset({"input", "index", "constant", "reduced"})
#: `data` of a ``taken`` node that may also be read where nobody needs it.
ANYWHERE = "anywhere"
#: Operations that draw random numbers.
RANDOM = frozenset({"bits", "uniform", "normal"})
#: Reductions, and how many results each has. The second result of argmin and argmax is the value
#: itself. `moment` gives the mean and the sum of squared deviations from it. `histogram` counts
#: points by their value, a ``bin``. The first axis of its kernel is kept and has a point for each
#: bin; the value does not depend on it. Where the value is complex, its real part is the bin, and
#: the imaginary parts of each bin's points are added. Such a kernel has no other reduction.
REDUCTIONS = {
    "sum": 1, "prod": 1, "min": 1, "max": 1, "fmin": 1, "fmax": 1, "any": 1, "all": 1,
    "argmin": 2, "argmax": 2, "moment": 2, "histogram": 1,
    "cumsum": 1, "cumprod": 1, "cummin": 1, "cummax": 1, "cumfmin": 1, "cumfmax": 1,
}  # fmt: skip
#: Scans, and the reduction that each keeps up to every point, the point included. Kernels of scans
#: have no other reductions, and one reduced axis.
SCANS = {name: name.removeprefix("cum") for name in REDUCTIONS if name.startswith("cum")}


#: Levels of a tree that pickle may recurse into.
DEEP = 50
#: Most characters of an expression's text; the rest is left out.
LONG = 10_000


@dataclass(frozen=True, slots=True)
class View:
    """A way to number the points of an iteration space: `offset + sum(strides[k] * i[k])`."""

    offset: int
    strides: tuple[int, ...]  # in elements, one for each axis of the iteration space

    @classmethod
    def contiguous(cls, shape: tuple[int, ...]) -> View:
        """C order.

        >>> View.contiguous((4, 3))
        View(offset=0, strides=(3, 1))
        """
        strides, step = [], 1
        for length in reversed(shape):
            strides.append(step)
            step *= max(length, 1)
        return cls(0, tuple(reversed(strides)))


class Expr:
    """A node. Immutable, and equal to any other that says the same.

    >>> x = source(0, (5,), "f4")
    >>> y = Expr("add", (x, constant(1, "f4")), "f4")
    >>> y == Expr("add", (source(0, (5,), "f4"), constant(1, "f4")), "f4"), y
    (True, add(input0, 1.0))
    """

    __slots__ = ("_depth", "_hash", "args", "data", "dtype", "op")

    def __init__(self, op: str, args: tuple[Expr, ...], dtype: Any, data: Any = None):
        self.op, self.args, self.data = op, args, data
        self.dtype: DType = np.dtype(dtype)
        self._hash: int = hash((op, self.dtype, data, tuple([a._hash for a in args])))
        self._depth: int = 1 + max([a._depth for a in args], default=0)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:  # strings have other hashes in other processes
        if self._depth <= DEEP:
            return Expr, (self.op, self.args, self.dtype, self.data)
        return _restore, (_pack_nodes((self,)),)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Expr) or self._hash != other._hash:
            return False
        here: dict[int, int] = {}  # which node of the other one each is
        there: set[int] = set()
        stack = [(self, other)]
        while stack:
            a, b = stack.pop()
            known = here.get(id(a))
            if known is not None or id(b) in there:
                if known != id(b):
                    return False
                continue
            if a.op != b.op or a.dtype != b.dtype or len(a.args) != len(b.args) or a.data != b.data:
                return False
            here[id(a)] = id(b)
            there.add(id(b))
            stack += zip(a.args, b.args, strict=True)
        return True

    @property
    def value(self) -> Any:
        """The value of a constant, as a NumPy scalar."""
        return np.frombuffer(self.data, self.dtype)[0]

    def __repr__(self) -> str:
        words: dict[int, str] = {}
        for node in nodes((self,)):
            text = node._text([words[id(a)] for a in node.args])
            words[id(node)] = text if len(text) <= LONG else f"{node.op}(…)"
        return words[id(self)]

    def _text(self, args: list[str]) -> str:
        if self.op == "constant":
            return str(self.value)
        if self.op == "input":
            return f"input{self.data[0]}"
        if self.op == "index":
            return "index"
        if self.op == "cast":
            args.append(self.dtype.name)
        return f"{self.op}({', '.join(args)})"


Words = tuple[list[tuple[str, list[int], DType, Any]], list[int]]


def _pack_nodes(roots: Iterable[Expr]) -> Words:
    """Trees without anything inside another: nodes, arguments by their numbers, and the roots."""
    roots = list(roots)
    every = nodes(roots)
    number = {id(n): k for k, n in enumerate(every)}
    words = [(n.op, [number[id(a)] for a in n.args], n.dtype, n.data) for n in every]
    return words, [number[id(r)] for r in roots]


def _trees(words: Words) -> list[Expr]:
    every: list[Expr] = []
    for op, args, dtype, data in words[0]:
        every.append(Expr(op, tuple([every[n] for n in args]), dtype, data))
    return [every[n] for n in words[1]]


def _restore(words: Words) -> Expr:
    return _trees(words)[0]


def _kernel(words: Words, reductions: list[tuple[str, tuple[DType, ...]]], *rest: Any) -> Kernel:
    args, outputs = (trees := _trees(words))[: len(reductions)], trees[len(reductions) :]
    found = [Reduction(op, a, dtypes) for (op, dtypes), a in zip(reductions, args, strict=True)]
    shape, *others = rest
    return Kernel(shape, tuple(outputs), tuple(found), *others)


def constant(value: Any, dtype: Any) -> Expr:
    """A constant of exactly this dtype.

    >>> constant(-0.0, "f4").value
    np.float32(-0.0)
    """
    dtype = np.dtype(dtype)
    return Expr("constant", (), dtype, np.asarray(value, dtype).tobytes())


def is_zero(node: Expr) -> bool:
    """Whether it is the constant zero."""
    return node.op == "constant" and not node.value


def is_placeholder(value: int) -> bool:
    """Whether it stands for a position that is not known yet.

    >>> is_placeholder(PLACEHOLDER + 2), is_placeholder(2)
    (True, False)
    """
    return 0 <= value - PLACEHOLDER < 2**16


def source(n: int, shape: tuple[int, ...], dtype: Any) -> Expr:
    """Array number `n`, C-contiguous, over its own shape."""
    return Expr("input", (), dtype, (n, View.contiguous(shape)))


def index(view: View) -> Expr:
    return Expr("index", (), np.int64, view)


def view_of(node: Expr) -> View | None:
    """Which elements, or numbers, a leaf gives; None for any other node."""
    if node.op == "input":
        return node.data[1]  # type: ignore[no-any-return]
    return node.data if node.op == "index" else None


def with_view(leaf: Expr, view: View) -> Expr:
    """The same leaf with another view."""
    data = (leaf.data[0], view) if leaf.op == "input" else view
    return Expr(leaf.op, (), leaf.dtype, data)


def nodes(
    roots: Iterable[Expr], below: Callable[[Expr], tuple[Expr, ...]] | None = None
) -> list[Expr]:
    """Return every node below `roots` once, arguments first.

    Equal but distinct nodes stay distinct. `below` returns the arguments of a node that count.
    """
    seen: set[int] = set()
    out: list[Expr] = []
    stack = [*roots]
    stack.reverse()
    while stack:
        node = stack[-1]
        if id(node) not in seen:
            before = len(stack)
            for a in (node.args if below is None else below(node))[::-1]:
                if id(a) not in seen:
                    stack.append(a)
            if len(stack) > before:
                continue
            seen.add(id(node))
            out.append(node)
        stack.pop()
    return out


def substitute(roots: Iterable[Expr], new: Mapping[int, Expr]) -> list[Expr]:
    """Replace some nodes by `new[id(node)]`; nodes that are shared stay shared."""
    roots = list(roots)
    done = dict(new)
    for node in nodes(roots, below=lambda n: () if id(n) in new else n.args):
        if id(node) not in done:
            args = tuple([done[id(a)] for a in node.args])
            same = all(a is b for a, b in zip(args, node.args, strict=True))
            done[id(node)] = node if same else Expr(node.op, args, node.dtype, node.data)
    return [done[id(r)] for r in roots]


def replace_leaves(roots: Iterable[Expr], change: Callable[[Expr], Expr]) -> list[Expr]:
    """Replace each leaf `x` by `change(x)`."""
    roots = list(roots)
    return substitute(roots, {id(n): change(n) for n in nodes(roots) if n.op in LEAVES})


@dataclass(frozen=True)
class Reduction:
    """A reduction `op` (of REDUCTIONS) over the reduced axes of a kernel.

    argmin and argmax count the reduced axes in C order. The kernel chooses the accumulator; the
    results have these dtypes.
    """

    op: str
    arg: Expr
    dtypes: tuple[DType, ...]

    def __post_init__(self) -> None:
        assert len(self.dtypes) == REDUCTIONS[self.op]


@dataclass(frozen=True)
class Kernel:
    """One pass over an iteration space.

    Without reductions each output is an expression over `shape`. With them, reductions are over
    `axes` of `shape`, and outputs are expressions of their results (``reduced`` nodes), and of
    other leaves, over the axes that are kept. Outputs are new, C-contiguous arrays of shape `kept`.
    Scans keep all axes. Where there are `strides`, in elements, outputs lie so instead: as parts of
    larger arrays, or with their axes in another order; of kernels that keep all axes.
    """

    shape: tuple[int, ...]
    outputs: tuple[Expr, ...]
    reductions: tuple[Reduction, ...] = ()
    axes: tuple[int, ...] = ()
    strides: tuple[int, ...] | None = None
    #: Whether the first output is a mask. The others are written where it holds, contiguously, as
    #: columns of one array. Without others, the selected points are counted.
    picks: bool = False

    def __reduce__(self) -> Any:  # what its trees share is there once
        reductions = [(r.op, r.dtypes) for r in self.reductions]
        rest = self.shape, self.axes, self.strides, self.picks
        return _kernel, (_pack_nodes(self.roots), reductions, *rest)

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of each output."""
        if self.is_scan:
            return self.shape
        return tuple(n for k, n in enumerate(self.shape) if k not in self.axes)

    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        """Bytes of each output; for a mask's selection, as if it selected every point."""
        outputs = self.outputs[1:] if self.picks else self.outputs
        return tuple(math.prod(self.output_shape) * o.dtype.itemsize for o in outputs)

    @property
    def is_histogram(self) -> bool:
        """Whether the kernel makes a histogram."""
        return bool(self.reductions) and self.reductions[0].op == "histogram"

    @property
    def is_weighted_histogram(self) -> bool:
        """Whether the kernel makes a histogram of weights."""
        return self.is_histogram and self.reductions[0].arg.dtype.kind == "c"

    @property
    def is_scan(self) -> bool:
        """Whether the kernel is a scan along an axis."""
        return bool(self.reductions) and self.reductions[0].op in SCANS

    @property
    def points(self) -> int:
        """The number of points at which something is computed."""
        return math.prod(self.shape[1:] if self.is_histogram else self.shape)

    @property
    def roots(self) -> tuple[Expr, ...]:
        return (*[r.arg for r in self.reductions], *self.outputs)

    def with_roots(self, roots: Sequence[Expr]) -> Kernel:
        """The same with other roots."""
        n = len(self.reductions)
        args = zip(self.reductions, roots, strict=False)
        reductions = tuple([replace(r, arg=root) for r, root in args])
        return replace(self, reductions=reductions, outputs=tuple(roots[n:]))

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the arrays that it reads, ascending."""
        return tuple(sorted({n.data[0] for n in nodes(self.roots) if n.op == "input"}))

    def bytes_moved(self) -> int:
        """Bytes of all loads and stores, each leaf's by itself.

        `regions.bytes_touched` says how many of these are distinct.
        """
        inner = read_by_leaves([r.arg for r in self.reductions], self.shape)
        outer = read_by_leaves(self.outputs, self.output_shape)
        return sum(self.output_bytes) + sum([nbytes for _, nbytes in (*inner, *outer)])

    def operations(self) -> int:
        """The number of arithmetic operations; a function counts as one."""
        free = LEAVES | {"cast", "taken", "real", "imag", "complex"}

        def count(roots: Iterable[Expr]) -> int:
            return len({n for n in nodes(roots) if n.op not in free})

        inner = count(r.arg for r in self.reductions) + len(self.reductions)
        outer = count(self.outputs)
        return self.points * inner + math.prod(self.output_shape) * outer


def read_by_leaves(
    roots: Iterable[Expr], lengths: Sequence[int]
) -> Iterator[tuple[Expr, int]]:  # fmt: skip
    """Each leaf that reads an array, and the bytes it reads over these lengths."""
    every = set(nodes(roots))
    of_lists = [n for n in every if n.op == "taken"]
    for leaf in every:
        if leaf.op == "input":
            along = _axes_read_along([leaf, *[n for n in of_lists if n.args[0] == leaf]])
            points = math.prod([n for k, n in enumerate(lengths) if k in along])
            yield leaf, points * leaf.dtype.itemsize


def _axes_read_along(roots: Iterable[Expr]) -> set[int]:
    """The axes along which what is read may differ."""
    views = [v for n in nodes(roots) if (v := view_of(n)) is not None]
    return {k for v in views for k, s in enumerate(v.strides) if s}


@dataclass(frozen=True)
class Program:
    """Kernels in order, and the value that they make.

    Arrays are numbered: first the inputs of the program, then the outputs of the kernels, one
    kernel after the other.
    """

    inputs: int
    kernels: tuple[Kernel, ...]
    #: The value of the task: containers with `Out`s for arrays, and whatever else it holds.
    result: Any

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The number of each kernel's first output."""
        out, n = [], self.inputs
        for k in self.kernels:
            out.append(n)
            n += len(k.outputs)
        return tuple(out)


@dataclass(frozen=True, slots=True)
class Out:
    """An array of a program's result: which of its arrays, and the shape that it is given."""

    array: int
    shape: tuple[int, ...]
    scalar: bool = False  # a 0-d result that NumPy would give as a scalar


def leaves(roots: Iterable[Expr]) -> Iterator[Expr]:
    """The distinct leaves below `roots`, in order of appearance."""
    return iter(dict.fromkeys(n for n in nodes(roots) if n.op in LEAVES))


Shape = tuple[int, ...]


def canonical_view(view: View, shape: Shape) -> View:
    """Equal for equal numberings: an axis of length 1 has stride 0."""
    if 0 in shape:
        return View(0, (0,) * len(shape))
    strides = tuple(s if n > 1 else 0 for n, s in zip(shape, view.strides, strict=True))
    return View(view.offset, strides)


def is_contiguous(view: View, shape: Shape) -> bool:
    """Whether a view numbers the points of its space in C order, from 0."""
    return canonical_view(view, shape) == canonical_view(View.contiguous(shape), shape)
