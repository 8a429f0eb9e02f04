"""Tasks become kernels: what a chunk function does to symbolic arrays is a program for the device.

A task is followed once per structure (its functions, and the shapes and dtypes that it reads); what
cannot be followed stays as it is, and the reason is kept. A task that only one other reads, and
those that need no memory, disappear into their readers. Blocks of random numbers are drawn by
their position, so that they do not depend on how an array is cut up.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import Alias, DataNode, GraphNode, NestedContainer, Task, TaskRef
from dask.array import reductions as dask_reductions
from dask.array.core import concatenate_shaped
from dask.utils import key_split

from . import blocks, following, host_code, philox, reading, takes, trace
from .arrays import FEW, MOST_OWN
from .expr import (
    PLACEHOLDER,
    Expr,
    Kernel,
    Out,
    Program,
    View,
    constant,
    nodes,
    rebuilt,
    view_of,
    with_view,
)
from .following import (
    MOST_NODES,
    NOT_KNOWN,
    Abstract,
    Flat,
    Generated,
    Known,
    Masked,
    Multiplies,
    OneOrNone,
    OnlySelects,
    OnlyView,
    Product,
    Scanned,
    Seen,
    Unfollowed,
    ValueIfThere,
    squeezed,
    view_over,
)
from .graph import (
    FRESH,
    RANDOM,
    SLICERS,
    Block,
    Draw,
    Graph,
    content,
    is_plain,
    layer_of,
    referred,
)
from .grid import Tile
from .kernel import generate, unwritten
from .persisted import Chunk
from .regions import bytes_touched, count_boxes, interior
from .sizes import leaves, map_leaves, sizeof
from .subgraph import COMPILED, FIRST_LINE, Call, Chain, Step, literal
from .tree import NotGenerated

Key = Any
Values = dict[Any, Any]

#: Arrays that a reader reads in place of what its producer would have made have such numbers while
#: the reader is followed.
BORROWED = 1_000_000
#: First part of the names of arrays that functions read beside what they are given.
BESIDE = "beside"
#: Bytes of a list that stays on its device as long as its plan; larger ones are sent in each run.
MOST_KEPT = 2**20
#: Dask's functions that give records of a value and its place, where they are given NumPy arrays.
PAIRING = (dask_reductions.arg_chunk, dask_reductions.arg_combine)
#: Followed structures per graph, beyond which the rest stays as it is: following takes a
#: millisecond, and such a graph repeats too little to gain by it.
MOST_STRUCTURES = 2_000
#: Arrays that a task may read because of what disappears into it: its kernel has an argument for
#: each, and they are all there at once.
MOST_READ = 64
#: Readers that may each compute a value for themselves, and how much work that may be on a GPU: so
#: many sums or products of an element. To write it, and to read it, takes as long as some dozens.
FEW_READERS, LITTLE_WORK = 3, 24
#: Numbers of each element that a mask selects, at most, for kernels to pick it out.
MOST_COLUMNS = 8
_SUMS = frozenset({
    "add", "subtract", "multiply", "negative", "absolute", "fabs", "square", "maximum", "minimum",
    "fmax", "fmin", "where", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "logical_and", "logical_or", "logical_not", "conjugate", "isnan",
})  # fmt: skip
_QUOTIENTS = frozenset({"divide", "reciprocal", "sqrt"})
_FUNCTIONS = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sin", "cos",
})  # fmt: skip
#: Bytes of an array that is large.
LARGE = 2**20
#: Conditions on where a point is with which a program takes NumPy longer than Dask's own way, where
#: there are fewer points than this in each box, on average, in which all of them are known.
CHOICES, BOX_POINTS = 3, 2**15
#: Places that a kernel may read, of which it is not asked whether it can be written for a GPU.
MANY_PLACES = 100


class Fused:
    """A task that is a program for a device. Called like any other task, it computes with NumPy."""

    __slots__ = ("expects", "key", "kind", "names", "original", "positions", "program")

    def __init__(
        self,
        key: Key,
        program: Program,
        names: tuple[Key, ...],
        expects: tuple[Any, ...],
        positions: tuple[int, ...],
        kind: str | None,
        original: Callable[[Values], Any],
    ):
        self.key, self.program, self.original = key, program, original
        self.names = names  # the keys of the values that it reads
        self.expects = expects  # what is foreseen of each: an `Abstract`, or containers of some
        self.positions = positions  # what stands for the placeholders in this block
        self.kind = kind  # type of the arrays that it makes, where it reads none

    def arrays(self, values: Values, copy: type[Any] | None = None) -> list[Any] | None:
        """The arrays that it reads; None where values are not as foreseen, their containers and
        numbers included: a collection may say of a block that it is an array, and its task give a
        tuple. Those of the type `copy` that only lie otherwise in memory (one element seen as many,
        transposed) are copied."""
        out: list[Any] = []
        for name, foreseen in zip(self.names, self.expects, strict=True):
            value = values[name]
            if type(foreseen) is not Abstract:
                if not _collect(value, foreseen, copy, out):
                    return None
                continue
            array = _as_foreseen(value, foreseen, copy)
            if array is None:
                return None
            out.append(array)
        return out

    def inputs(self) -> Iterator[tuple[Key, list[Abstract | None]]]:
        """The key of each value that it reads, and what is foreseen of that value's leaves: None of
        what is no array."""
        for name, structure in zip(self.names, self.expects, strict=True):
            yield name, _expected(structure)

    def of(self, program: Program) -> Fused:
        """The same task with another program."""
        return Fused(
            self.key, program, self.names, self.expects, self.positions, self.kind, self.original
        )  # fmt: skip

    @property
    def on_device(self) -> bool:
        """Whether GPUs make its value, where there are some."""
        return bool(self.names) or self.kind == "cupy.ndarray"

    @property
    def copies(self) -> bool:
        """Whether it only copies parts of what it reads."""
        return all(r.op == "input" for k in self.program.kernels for r in k.roots)

    @property
    def touched(self) -> int:
        """Bytes that it reads and writes."""
        return sum([bytes_touched(k) for k in self.program.kernels])

    @property
    def array(self) -> tuple[tuple[int, ...], Any] | None:
        """Shape and dtype of its value, where that is the one array that its one kernel makes."""
        kernels, result = self.program.kernels, self.program.result
        if len(kernels) != 1 or len(kernels[0].outputs) != 1 or type(result) is not Out:
            return None
        if result.scalar or result.shape != kernels[0].kept:
            return None
        return result.shape, kernels[0].outputs[0].dtype

    def __call__(self, values: Values, out: Any = None) -> Any:
        """Its value; written to `out` where that is given, which is like its `array`, and where it
        is computed as a program."""
        arrays = self.arrays(values, np.ndarray)
        if arrays is not None:  # what NumPy computed without axes, it gives as a scalar
            arrays = [np.asarray(a) if isinstance(a, np.generic) else a for a in arrays]
        if arrays is None or not all(type(a) is np.ndarray for a in arrays):
            return self.original(values)
        if not arrays and self.kind != "numpy.ndarray":
            return self.original(values)
        words = {_placeholder(n): constant(p, np.int64) for n, p in enumerate(self.positions)}

        def evaluate(kernel: Kernel, every: list[Any]) -> Iterable[Any]:
            return blocks.evaluate(kernel, every, words=words, out=out)

        # a kernel warns of nothing, on any device
        with np.errstate(all="ignore"):
            return computed(self.program, evaluate, arrays)

    def __repr__(self) -> str:
        n = len(self.program.kernels)
        return f"<Fused {self.key!r}: {n} kernel{'s'[: n != 1]}>"


class OrNone:
    """A task whose value is an array of one element, or of none: `fused` makes that element, and
    whether there is one."""

    __slots__ = ("fused", "key")

    def __init__(self, fused: Fused):
        self.fused, self.key = fused, fused.key

    def __call__(self, values: Values) -> Any:
        return self.found(self.fused(values))

    @staticmethod
    def found(made: Any) -> Any:
        """The value, given what `fused` made, or the value that was made in another way."""
        if type(made) is not ValueIfThere:
            return made
        return made.value if bool(made.there[0]) else made.value[:0]


class Picked:
    """A task whose value is what a mask selects: how many elements that is, one kernel of `fused`
    counts, and the other one writes them where they belong. For CPU devices it stays what it
    was."""

    __slots__ = ("columns", "fused", "key")

    def __init__(self, fused: Fused, columns: tuple[int, ...]):
        self.fused, self.key = fused, fused.key
        self.columns = columns  # shape of each element

    def __call__(self, values: Values) -> Any:
        return self.fused.original(values)

    def __repr__(self) -> str:
        return f"<Picked {self.key!r}>"


def _as_foreseen(value: Any, foreseen: Abstract, copy: type[Any] | None) -> Any:
    """The array that a value is, perhaps as a copy; None where that is not as foreseen."""
    if getattr(value, "shape", None) != foreseen.shape:
        return None
    if getattr(value, "dtype", None) != foreseen.dtype:
        return None
    if _laid_out(value, foreseen):
        return value
    return value.copy() if foreseen.strides is None and type(value) is copy else None


def _collect(value: Any, foreseen: Any, copy: type[Any] | None, out: list[Any]) -> bool:
    """Append the arrays in containers to `out`; whether all in these is as foreseen."""
    if type(foreseen) is Abstract:
        array = _as_foreseen(value, foreseen, copy)
        out.append(array)
        return array is not None
    if type(foreseen) is Known:  # a constant of the task itself
        return True
    if type(value) is not type(foreseen):
        return False
    if type(foreseen) is dict:
        if list(value) != list(foreseen):
            return False
        value, foreseen = value.values(), foreseen.values()
    elif not isinstance(foreseen, (tuple, list)):
        return bool(literal(value, []) == literal(foreseen, []))
    if len(value) != len(foreseen):
        return False
    return all(_collect(v, f, copy, out) for v, f in zip(value, foreseen, strict=True))


def _laid_out(array: Any, foreseen: Abstract) -> bool:
    """Whether an array's elements lie in memory as foreseen."""
    if foreseen.strides is None:
        flags = getattr(array, "flags", None)
        return flags is not None and bool(flags.c_contiguous)
    itemsize = foreseen.dtype.itemsize
    strides = getattr(array, "strides", None)
    if strides is None:
        return False
    return all(
        s == t * itemsize or n < 2
        for s, t, n in zip(strides, foreseen.strides, foreseen.shape, strict=True)
    )


def computed(
    program: Program,
    evaluate: Callable[[Kernel, list[Any]], Iterable[Any]],
    arrays: Sequence[Any],
    scalars: bool = True,
) -> Any:
    """The value of a program, given what evaluates a kernel. 0-d results become NumPy's scalars
    where NumPy would give these, and `scalars` holds."""
    every = list(arrays)
    for kernel in program.kernels:
        every += evaluate(kernel, every)
    return filled(program, every, scalars)


def filled(program: Program, every: Sequence[Any], scalars: bool) -> Any:
    """The value of a program, given all of its arrays."""

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, Out):
            return leaf
        array = every[leaf.array]
        if array.shape != leaf.shape:
            array = array.reshape(leaf.shape)
        return array[()] if scalars and leaf.scalar else array

    return map_leaves(value, program.result)


@cache
def _placeholder(n: int) -> Expr:
    return constant(PLACEHOLDER + 2 * n, np.int64)


def _is_mosaic(kernel: Kernel) -> bool:
    """Whether it chooses by position among much that is the same in most places, as parts of arrays
    side by side and edges that are treated in another way are, in boxes of few points each."""
    chosen = {n.args[0] for n in nodes(kernel.roots) if n.op == "where"}
    by_position = [c for c in chosen if all(n.op != "input" for n in nodes((c,)))]
    if len(by_position) < CHOICES:
        return False
    inner = [r.arg for r in kernel.reductions]
    return any(
        math.prod(shape) < BOX_POINTS * count_boxes(roots, shape)
        and interior(roots, shape) is not None
        for roots, shape in ((inner, kernel.shape), (kernel.outputs, kernel.kept))
        if roots
    )


def _has_windows_over_edges(kernel: Kernel) -> bool:
    """Whether it is chosen by position what it reduces, in another way from result to result. There
    are no boxes then in which all is known, and NumPy copies arrays together in less time."""
    inner = nodes([r.arg for r in kernel.reductions])
    places = [n for n in nodes([n.args[0] for n in inner if n.op == "where"]) if n.op == "index"]
    return any(
        any(s for k, s in enumerate(n.data.strides) if k in kernel.axes and kernel.shape[k] > 1)
        and any(s for k, s in enumerate(n.data.strides) if k not in kernel.axes)
        for n in places
    )


def _takes_too_much(kernel: Kernel) -> bool:
    """Whether it reads so many places that it cannot be written for a GPU."""
    if sum(node.op == "input" for node in nodes(kernel.roots)) < MANY_PLACES:
        return False
    try:
        generate(kernel)
    except NotGenerated:
        return True
    return False


def changed(kernel: Kernel, change: Callable[[Expr], Expr]) -> Kernel:
    """The kernel with each leaf `x` replaced by `change(x)`."""
    return kernel.with_roots(rebuilt(kernel.roots, change))


def renumbered(kernel: Kernel, number: Callable[[int], int]) -> Kernel:
    """The kernel with other numbers for its arrays."""
    return changed(kernel, lambda leaf: _numbered(leaf, number))


def _numbered(leaf: Expr, number: Callable[[int], int]) -> Expr:
    if leaf.op != "input":
        return leaf
    n, view = leaf.data
    return Expr("input", (), leaf.dtype, (number(n), view))


# ---- what is known of values before they are there


@dataclass(slots=True, eq=False)  # frozen would take three times as long to make, for each block
class Source:
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
    #: the scan of `expr`. Of what a mask selects, `Masked`.
    parts: Any = None
    #: Where the task that makes it stays: what that would be if it read what `expr` reads.
    apart: Apart | None = None

    def of(self, names: tuple[Key, ...], positions: tuple[int, ...], kind: str | None) -> Source:
        """The same of another block."""
        free = self.free or (not names and not positions)
        return Source(
            self.shape, self.expr, names, self.expects, positions, kind, free, self.far,
            self.number, self.little, self.parts,
        )  # fmt: skip

    @property
    def selects(self) -> bool:
        """Whether it is what a mask selects."""
        return isinstance(self.parts, Masked)


@dataclass(frozen=True, slots=True)
class Apart:
    """A task's inputs and constants, and its function for them."""

    names: tuple[Key, ...]
    needs: tuple[Key, ...]
    constants: dict[Key, Any]
    function: Callable[[Values], Any]


class Matrix(NamedTuple):
    """An input of a product, as a matrix: rows and columns as it lies in memory, and whether the
    product is of its transpose."""

    name: Key
    shape: tuple[int, int]
    turned: bool


class MatrixProduct(NamedTuple):
    """A task whose value is the product of two matrices that are there as they are."""

    left: Matrix
    right: Matrix
    dtype: np.dtype[Any]


@dataclass(slots=True)
class Followed:
    """What became of one structure of task."""

    program: Program | None
    reason: str = ""
    makes: Any = None  # the structure of its value
    nbytes: int = 0  # ... its bytes
    number: int = -1  # ... among all that were foreseen
    expects: tuple[Any, ...] = ()  # the structures of the values that it reads
    view: Any = None  # its value, where that is only a view of what it reads
    pairs: bool = False  # whether it gives pairs of a value and its place
    offer: Source | None = None  # its value as readers may compute it, but for where a block lies
    operations: int = 0  # in products of matrices
    product: MatrixProduct | None = None  # whose value it is, with numbers for names
    culprit: int = -1  # which of a task's steps was not followed, if one
    or_none: bool = False  # whether its value is one element, or none
    beside: tuple[Any, ...] = ()  # arrays that its functions read beside what it is given


# ---- the pass


@dataclass
class Fuser:
    """Follows the tasks of one graph.

    `least` is how many bytes a task must touch to be worth a program, and `fewest` how many
    operations it must do for each element. `philox` has random numbers drawn by position; with
    `merge`, tasks may disappear into their readers. Without `follow`, nothing but random numbers
    becomes a program: what is drawn does not depend on it.
    """

    graph: Graph
    least: int = 0
    fewest: int = 1
    philox: bool = True
    merge: bool = True
    follow: bool = True
    near: Callable[[Key, Key], bool] | None = None  # whether two tasks are on one device
    #: There, products of arrays with vectors are programs, too, and what copies a part: a
    #: launch may do several. What joins such parts is one there only.
    on_gpus: bool = False
    home: Callable[[Any], int | None] | None = None  # the device that an array is on
    reasons: dict[Key, str] = field(default_factory=dict)  # why tasks stay as they are
    operations: dict[Key, int] = field(default_factory=dict)  # of those that multiply matrices
    #: Of tasks that are not followed, by the layer of each: the layers that Dask has fused there in
    #: the order of their work, and those of them that keep it from being followed.
    unfollowed: dict[str, tuple[list[str], set[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.structures: dict[Any, Followed] = {}
        self.foreseen: dict[Key, tuple[int, Any]] = {}  # number and structure of a value
        self.sources: dict[Key, Source] = {}
        self.numbers: dict[Any, int] = {}
        self.pickers: dict[Any, tuple[Program, tuple[int, ...]] | None] = {}
        self.seeds: dict[int, int] = {}
        self.literals: dict[int, Any] = {}
        self.impure: dict[int, str | None] = {}
        self.unfit: dict[int, str | None] = {}
        self.pairing: dict[int, bool] = {}
        self.drawn: dict[Any, tuple[Expr | None, int]] = {}
        self.given: dict[Any, tuple[int, Any] | None] = {}  # what arrays that are there are like
        self.lengths: dict[int, tuple[Expr, int]] = {}  # the numbers along one axis of a tile
        self.alive: list[Any] = []  # what is known by its id must live on
        self.before: dict[Key, Key] = {}  # tasks that were put in front of others
        #: Arrays that functions read, by their id, and by whether they are sent.
        self.beside: dict[tuple[int, bool], tuple[Key, Any]] = {}
        self.given_to: Counter[int] | None = None  # how many tasks, by the id of a constant
        self.nodes: dict[Key, Any] = {}  # ... those that are on devices, or sent there
        self.globals: list[Any] = []
        self.read: set[tuple[int, str, int]] = set()  # which these are: each is looked at once
        self.readers: dict[Key, int] = {}
        self.takers: dict[Key, list[Key]] = {}  # the readers themselves, when it was asked for them
        self.outputs = set(self.graph.outputs)

    def fused(self) -> Graph:
        """The graph with programs in place of tasks. Changes it."""
        graph = self.graph
        if not graph.blocks and not graph.draws:
            return graph
        graph.why, graph.globals = self.reasons, self.globals
        graph.operations = self.operations
        for inputs in graph.needs.values():
            for d in inputs:
                self.readers[d] = self.readers.get(d, 0) + 1
        order = list(graph.tasks)
        for key, task in list(graph.tasks.items()):
            if isinstance(task, DataNode):
                known = self._value_of(key, task)
                if known is not None:
                    self.foreseen[key] = known
            elif key in graph.sent:
                block = graph.blocks[key]
                self._foresee(key, Abstract(block.shape, block.dtype))
            elif not ((self.follow or self._placed(task)) and self._task(key, self._apart(key))):
                self._split(key, task)
                if self.follow and self._pairs(task):
                    graph.tasks[key] = _Pairs(graph.tasks[key])
                if key in graph.blocks and key not in self.foreseen:
                    block = graph.blocks[key]
                    self._foresee(key, Abstract(block.shape, block.dtype))
        if self.before:  # also in front of what has disappeared into its readers by now
            order = [k for key in order for k in (self.before.get(key), key) if k in graph.tasks]
            graph.tasks = {k: graph.tasks[k] for k in order}
        if self.nodes:
            self._put_beside({k: n for k, n in self.nodes.items() if self.readers[k]})
        return graph

    def _put_beside(self, nodes: dict[Key, Any]) -> None:
        graph = self.graph
        graph.put_in_front(nodes)
        for key, node in nodes.items():
            if type(node) is DataNode and type(node.value) is np.ndarray:
                graph.sent.add(key)
            if type(node) is Task:
                (array,) = node.args
                graph.blocks[key] = Block(array.shape, array.dtype, "cupy.ndarray")
                graph.sizes[key] = array.nbytes
                graph.aside.add(key)
                graph.sent.add(key)
                if not graph.stores and not graph.written:  # whose target it may be
                    graph.again.add(key)

    def _split(self, key: Key, task: Any) -> None:
        """Take the random numbers off the front of a chain that is not a program: they are drawn by
        position all the same."""
        graph = self.graph
        if type(task) is not Chain or self.draw(task.tasks[0][1]) is None:
            return
        (name, first), *rest = task.tasks
        drawn: Key = getattr(first, "key", None)
        graph.names[drawn], graph.needs[drawn] = (), ()
        if not self._task(drawn, first):
            del graph.names[drawn], graph.needs[drawn]
            return
        graph.tasks[key] = Chain(rest) if len(rest) > 1 else rest[0][1]
        graph.names[key], graph.needs[key] = (name,), (drawn,)
        self.readers[drawn] = 1
        self.before[key] = drawn

    def _apart(self, key: Key) -> Any:
        """A task that adds the last of a scan to something, as Dask's do: the last is a task of its
        own, or what each block comes to would be known one block after the other."""
        graph = self.graph
        task = graph.tasks[key]
        if type(task) is not Task or task.kwargs or not self.sources:
            return task
        for n, part in enumerate(task.args):
            if type(part) is not Task or part.func is not operator.getitem or part.kwargs:
                continue
            name = referred(part.args[0])
            if name not in graph.names[key] or part.dependencies != {name}:
                continue
            at = graph.names[key].index(name)
            target = graph.needs[key][at]
            source = self.sources.get(target)
            if source is None or not isinstance(source.parts, Scanned):
                continue
            if not self._may_inline(target, key):
                continue
            others = task.args[:n] + task.args[n + 1 :]
            if any(name in getattr(a, "dependencies", ()) for a in others):
                continue
            new = (*key, "last") if isinstance(key, tuple) else (key, "last")
            graph.tasks[new] = Task(new, part.func, *part.args)
            graph.names[new], graph.needs[new] = (name,), (target,)
            args = (*task.args[:n], TaskRef(new), *task.args[n + 1 :])
            graph.tasks[key] = task = Task(task.key, task.func, *args)
            for facts in (graph.names, graph.needs):
                facts[key] = (*facts[key][:at], new, *facts[key][at + 1 :])
            self.readers[new] = 1
            self.before[key] = new
            self._task(new, graph.tasks[new])
            break
        return task

    def _value_of(self, key: Key, node: DataNode) -> tuple[int, Any] | None:
        """Number and structure of a value; of a persisted chunk, also while it is away."""
        value = node.value.shown() if type(node.value) is Chunk else node.value
        if value is not None:
            return self._given(value)
        block = self.graph.blocks.get(key)
        structure = None if block is None else Abstract(block.shape, block.dtype)
        return None if structure is None else (self._number(structure), structure)

    def _foresee(self, key: Key, structure: Any) -> None:
        if structure is not None:
            self.foreseen[key] = self._number(structure), structure

    def _given(self, value: Any) -> tuple[int, Any] | None:
        """Number and structure of a value that is there."""
        alike = None
        if type(value).__name__ == "ndarray":  # of which many lie in memory alike
            alike = type(value), value.dtype, value.shape, value.strides
            if alike in self.given:
                return self.given[alike]
        structure = _abstract(value)
        known = None if structure is None else (self._number(structure), structure)
        if alike is not None:
            self.given[alike] = known
        return known

    def _number(self, structure: Any) -> int:
        return self.numbers.setdefault(_words(structure), len(self.numbers))

    # ---- one task

    def _task(self, key: Key, task: Any) -> bool:
        """Make a task a program, if it can be one."""
        graph = self.graph
        recipe = _Recipe(self, task)
        constants = graph.constants.get(key, {})
        targets = dict(zip(graph.names[key], graph.needs[key], strict=True))
        large = not self.least or bool(recipe.draws)
        large = large or self._touched(key, targets, constants) >= self.least
        if recipe.reason:
            self.reasons[key] = recipe.reason
            if large or graph.within.get(layer_of(key), 0) >= self.least:
                self._blame(key, recipe, recipe.impure_steps())
            return False
        if recipe.given and not recipe.names and not recipe.draws:
            # to look at it would be to make its block, here and for each block anew
            self.reasons[key] = "it makes a block by a function that it is given"
            self._blame(key, recipe)
            return False
        if not large:
            self.reasons[key] = f"it touches less than {self.least:,} bytes"
            self._blame(key, recipe)
            return False
        plain: list[tuple[int, Any]] = []
        inlined: dict[int, Source] = {}
        read = 0  # arrays, by what is inlined
        for n, name in enumerate(recipe.names):
            if name in constants:
                known = self._given(constants[name])
            else:
                target = targets[name]
                known = self.foreseen.get(target)
                source = self.sources.get(target)
                more = 0 if source is None else _count_arrays(source.expects)
                if source and read + more <= MOST_READ and self._may_inline(target, key):
                    inlined[n] = source
                    read += more
            if known is None and n not in inlined:
                self.reasons[key] = (
                    f"what {key_split(name)} will be like is not known before it is there"
                )
                self._blame(key, recipe)
                return False
            plain.append(known or (-1, None))
        unknown = {n: s for n, s in inlined.items() if plain[n][1] is None}
        found = self._follow(recipe, plain, inlined)
        if inlined and found.program is not None:
            worth = _worth(found.program, inlined, recipe.joins) | unknown
            if _stores_a_scan(found.program):  # and so would each of its readers
                shared = [n for n, s in worth.items() if isinstance(s.parts, Scanned)]
                shared = [n for n in shared if self.readers[targets[recipe.names[n]]] > 1]
                worth = {n: s for n, s in worth.items() if n not in shared}
            if len(worth) < len(inlined):
                inlined = worth
                found = self._follow(recipe, plain, inlined)
            rows = {n: s for n, s in inlined.items() if isinstance(s.parts, Flat)}
            if rows and found.program is not None:
                less = {n: s for n, s in inlined.items() if n not in rows}
                without = self._follow(recipe, plain, less)
                stores = len(found.program.kernels) > len(getattr(without.program, "kernels", ()))
                if without.program is not None and stores:  # its rows, to have them on one axis
                    inlined, found = less, without
        if inlined and found.program is None and found.offer is None and not unknown:
            inlined = {}
            found = self._follow(recipe, plain, inlined)
        if found.program is None and found.reason.endswith(NOT_KNOWN):
            found = self._followed_with_values(recipe, plain, inlined, constants) or found
        if found.program is None:
            self.reasons[key] = found.reason
            if found.operations:
                self.operations[key] = found.operations
            if found.product is not None and not constants:
                left, right, dtype = found.product
                left, right = (m._replace(name=recipe.names[m.name]) for m in (left, right))
                graph.products[key] = MatrixProduct(left, right, dtype)
            if found.offer is not None and not recipe.draws:
                if not self._picks(key, task, recipe, found.offer, plain, inlined, targets):
                    self._selects(key, task, recipe, found.offer, inlined, targets)
                return True
            if found.product is not None:  # it is that and nothing else
                return False
            if found.view is None:
                self._stays(key, found.makes)
                self._blame(key, recipe, {found.culprit})
                return False
            self._view(key, recipe, found, plain, targets)
            return True
        self._settle(key, task, recipe, found, inlined, targets)
        return True

    def _followed_with_values(
        self,
        recipe: _Recipe,
        plain: list[tuple[int, Any]],
        inlined: dict[int, Source],
        constants: dict[Key, Any],
    ) -> Followed | None:
        """A task that is followed if the values of small tables that it is given are known."""
        known = list(plain)
        for n, name in enumerate(recipe.names if self.on_gpus else ()):
            table = constants.get(name)
            if type(table) is not np.ndarray or not is_plain(table.dtype):
                continue
            if table.size > 1 and table.nbytes <= MOST_OWN:
                words = "known", table.dtype, table.shape, table.tobytes()
                known[n] = self.numbers.setdefault(words, len(self.numbers)), Known(table)
        if known == plain:
            return None
        found = self._follow(recipe, known, inlined)
        return None if found.program is None else found

    def _blame(self, key: Key, recipe: _Recipe, culprits: Iterable[int] = ()) -> None:
        """Remember which steps of a task are not followed: if it is none of them, it is all."""
        if layer_of(key) not in self.unfollowed:  # blocks of one array are alike
            names = [layer_of(step) for step in recipe.steps]
            strange = {names[n] for n in culprits if n >= 0}
            self.unfollowed[layer_of(key)] = names, strange or set(names)

    def _touched(self, key: Key, targets: dict[Key, Key], constants: dict[Key, Any]) -> int:
        sizes = self.graph.sizes
        total = sizes.get(key, 0) + sum([sizes.get(t, 0) for t in targets.values()])
        selected = [s for t in targets.values() if (s := self.sources.get(t)) and s.selects]
        total += sum([e.nbytes for s in selected for e in leaves(s.expects)])
        return int(total + sum([getattr(c, "nbytes", 0) for c in constants.values()]))

    def _may_inline(self, target: Key, reader: Key) -> bool:
        source, readers = self.sources[target], self.readers[target]
        if not (source.free or readers == 1):
            times = self._in_slices(target, reader) if source.little else None
            if not _sooner_computed(source, readers if times is None else times):
                return False
        if not source.far:
            return True
        # a small part of something large: if that is elsewhere, only the part should come
        graph, near = self.graph, self.near
        whole = [d for d in graph.needs[target] if d not in graph.beside]
        return near is not None and all(near(reader, d) for d in whole)

    def _in_slices(self, target: Key, reader: Key) -> float | None:
        """How often a block is read as a whole by slices of it, as steps of a change of chunks have
        them; None where anybody reads it otherwise, and it is stored anyway. Each reader asks: not
        where there are very many."""
        graph, shape = self.graph, self.sources[target].shape
        many = self.readers[target] > MOST_READ
        if many or not self.on_gpus or _part_taken(graph.tasks[reader], shape) is None:
            return None
        if not self.takers:
            for key, inputs in graph.needs.items():
                for d in inputs:
                    self.takers.setdefault(d, []).append(key)
        left = [k for k in self.takers.get(target, ()) if target in graph.needs.get(k, ())]
        if len(left) != self.readers[target]:  # others read it by now
            return None
        parts = [_part_taken(graph.tasks[k], shape) for k in left]
        return None if None in parts else sum(parts)  # type: ignore[arg-type]

    def _stays(self, key: Key, makes: Any) -> None:
        """Foresee what a task makes that was followed and stays as it is: not always the one array
        that the collection tells of."""
        self._foresee(key, makes)
        if makes is not None and type(makes) is not Abstract:
            arrays = [leaf for leaf in leaves(makes) if isinstance(leaf, Abstract)]
            self.graph.sizes[key] = sum([a.nbytes for a in arrays])

    def _follow(
        self, recipe: _Recipe, plain: list[tuple[int, Any]], inlined: dict[int, Source]
    ) -> Followed:
        numbers = [number for number, _ in plain]
        for n, source in inlined.items():
            numbers[n] = -1 - source.number
        draws = tuple([d.number for d in recipe.draws])
        words = (recipe.key, tuple(numbers), draws, _shared(inlined.values()))
        found = self.structures.get(words)
        if found is None:
            if len(self.structures) >= MOST_STRUCTURES:
                return Followed(None, "the graph has too many structures")
            found = self.structures[words] = self._followed(recipe, plain, inlined)
            self.alive.append(recipe.task)
        return found

    def _followed(
        self, recipe: _Recipe, plain: list[tuple[int, Any]], inlined: dict[int, Source]
    ) -> Followed:
        """Run a task on symbolic arrays."""
        draws, arrays, shared = 0, 0, _shared(inlined.values())
        arguments: list[Any] = []
        borrowed: list[Source] = []
        generated: list[Any] = []
        for source in recipe.draws:
            generated.append(_lent(source, draws, arrays))
            draws += len(source.positions)
        for n, (_, structure) in enumerate(plain):
            if n in inlined:
                source = inlined[n]
                arguments.append(_lent(source, draws, arrays, shared))
                draws += len(source.positions)
                arrays += _count_arrays(source.expects)
                borrowed.append(source)
            else:
                arguments.append(structure)
        count = len(arguments)
        every = [*arguments, *generated]
        own = [known for n, known in enumerate(plain) if n not in inlined]

        def call(*values: Any) -> Any:
            return recipe.perform(values[:count], values[count:])

        def product(made: Product) -> MatrixProduct | None:
            plain = not (borrowed or generated or beside.arrays)
            return _of_matrices(made, arguments) if plain else None

        copies, or_none, beside = False, False, following.Beside(dense=self.on_gpus)
        try:
            try:
                program = trace.follow(call, every, self.on_gpus, beside, matrices=product)
            except Unfollowed as error:
                known = isinstance(error, (OnlyView, OnlySelects, OneOrNone))
                if known or not (beside.left or beside.wanted):
                    raise
                beside = following.Beside(dense=self.on_gpus, every=True)
                program = trace.follow(call, every, self.on_gpus, beside, matrices=product)
        except OnlyView as error:
            if beside.arrays:
                return Followed(None, str(error))
            if not (self.on_gpus and _is_copy(error.result, arguments)):
                makes = map_leaves(_laid, error.result)
                return Followed(
                    None, str(error), makes, number=self._number(makes), view=error.result
                )
            program, copies = error.program, True
        except OnlySelects as error:
            expects = _read([s for _, s in own], borrowed)
            offer = None
            if self.merge and not beside.arrays and _are_arrays(expects):
                self._note(beside.left)
                first = _count_arrays(expects) - arrays
                offer = self._offered_selection(error.masked, expects, first)
            return Followed(None, str(error), offer=offer)
        except OneOrNone as error:
            program, or_none = error.program, True
        except Multiplies as error:
            made = None if error.product is None else product(error.product)
            return Followed(None, str(error), operations=error.operations, product=made)
        except Unfollowed as error:
            culprit = recipe.step_of(error)
            return Followed(None, str(error), operations=error.operations, culprit=culprit)
        too_much = _takes_too_much if self.on_gpus else _has_windows_over_edges
        if any(map(too_much, program.kernels)):
            again = following.Beside(dense=self.on_gpus, every=beside.every)
            with suppress(Unfollowed):
                program = trace.follow(call, every, self.on_gpus, again, whole=True)
                beside = again
        makes = _made_by(program)
        number = self._number(makes)
        stays = partial(Followed, None, makes=None if or_none else makes, number=number)
        if reason := unreadable(program):
            return stays(reason)
        if self.on_gpus and (reason := next(filter(None, map(unwritten, program.kernels)), None)):
            return stays(f"there is no kernel for {reason}")
        if (
            not self.on_gpus
            and not generated
            and any(_is_mosaic(k) or _has_windows_over_edges(k) for k in program.kernels)
        ):
            return stays("it joins parts of arrays: NumPy does it faster than to choose")
        few = not copies and not generated and not borrowed
        if few and _operations(program) < self.fewest and not _gains(program):
            return stays("it is one operation: NumPy's own is as fast")
        program = _returned(program, arrays)
        self._note(beside.left)
        others = beside.expected

        def held(v: Any, array: Any) -> int:
            if isinstance(v, Out) and (self.on_gpus or not v.scalar):
                return int(array.nbytes)
            return 0 if self.on_gpus else sizeof(0.0 if isinstance(v, Out) else v)

        pairs = zip(leaves(program.result), leaves(makes), strict=True)
        nbytes = sum([held(*pair) for pair in pairs])
        expects = _read([*[s for _, s in own], *others], borrowed)
        found = Followed(
            program, "", makes, nbytes, number, expects,
            pairs=self._pairs(recipe.task), beside=tuple(beside.arrays), or_none=or_none,
        )  # fmt: skip
        found.offer = None if or_none else self._offered(found)
        if found.offer is not None and copies:  # each reader may as well read the whole
            found.offer.free = True
        return found

    def _note(self, arrays: Iterable[Any]) -> None:
        """Remember arrays whose values are part of a program by now."""
        for array in arrays:
            if id(array) not in self.graph.values:
                self.graph.values[id(array)] = array, content(array)

    def _settle(
        self,
        key: Key,
        task: Any,
        recipe: _Recipe,
        found: Followed,
        inlined: dict[int, Source],
        targets: dict[Key, Key],
    ) -> None:
        """Put the program into the graph, and take out what has disappeared into it."""
        graph, program = self.graph, found.program
        assert program is not None
        names = [name for n, name in enumerate(recipe.names) if n not in inlined]
        kind = self._kind(key, recipe, inlined)
        beside = [self._beside(a, kind) for a in found.beside]
        names += beside
        positions = [p for d in recipe.draws for p in d.positions]
        for source in inlined.values():
            names += source.names
            positions += source.positions
        if not names and kind not in ("numpy.ndarray", "cupy.ndarray"):
            self.reasons[key] = "whose arrays it makes is not known"
            return
        original = task
        if inlined:
            original = self._with_sources(task, recipe, inlined, targets)
            self._rewire(key, recipe, inlined, targets)
        for name, array in zip(beside, found.beside, strict=True):
            self._read_beside(key, name, array)
        if found.pairs:
            original = _Pairs(original)
        fused = graph.tasks[key] = Fused(
            key, program, tuple(names), found.expects, tuple(positions), kind, original
        )  # fmt: skip
        if self.on_gpus:
            self._send_constants(fused, kind)
        if found.or_none:
            graph.tasks[key] = OrNone(fused)
            return
        graph.sizes[key] = found.nbytes
        self.foreseen[key] = found.number, found.makes
        if found.offer is not None and key not in graph.pins and key not in self.outputs:
            self.sources[key] = found.offer.of(fused.names, fused.positions, kind)

    def _beside(self, array: Any, kind: str | None) -> Key:
        """The name of an array that functions read beside what they are given, which are of this
        kind. One of NumPy's is sent to the GPUs, for CuPy's; of what nobody changes that is
        done once."""
        sent = kind == "cupy.ndarray" and type(array) is np.ndarray
        known = self.beside.get((id(array), sent))
        if known is None:
            known = self.beside[id(array), sent] = (BESIDE, len(self.beside)), array
            name = known[0]
            self.graph.beside.add(name)
            if sent and array.nbytes <= MOST_KEPT and takes.is_ours(array):
                self.nodes[name] = DataNode(name, array)
            elif sent:
                self.nodes[name] = Task(name, np.ascontiguousarray, array)
            elif self.home is not None and self.home(array) is not None:
                self.nodes[name] = DataNode(name, array)
            if name in self.nodes:
                self.readers[name] = 0
        return known[0]

    def _read_beside(self, key: Key, name: Key, array: Any) -> None:
        graph = self.graph
        if name not in self.nodes:
            graph.constants[key] = {**graph.constants.get(key, {}), name: array}
        elif name not in graph.names[key]:
            graph.names[key] = (*graph.names[key], name)
            graph.needs[key] = (*graph.needs[key], name)
            self.readers[name] += 1

    def _send_constants(self, fused: Fused, kind: str | None) -> None:
        """What a program of CuPy's arrays is given of NumPy's, as tables and weights are, is sent
        to the GPUs by a step of its own, where several tasks are given it: once for all of them."""
        graph, key = self.graph, fused.key
        constants = graph.constants.get(key, {})
        read = {k for k, foreseen in fused.inputs() if any(foreseen)}
        tables = {
            k: v
            for k, v in constants.items()
            if k in read and type(v) is np.ndarray and v.ndim and self._are_given(v) > 1
        }
        near = [self.graph.blocks.get(k) for k in graph.needs[key]]
        kinds = [kind, *[b.kind for b in near if b is not None]]
        if not tables or "cupy.ndarray" not in kinds:
            return
        for name, array in tables.items():
            node = self._beside(array, "cupy.ndarray")
            graph.names[key] = (*graph.names[key], name)
            graph.needs[key] = (*graph.needs[key], node)
            self.readers[node] += 1
        graph.constants[key] = {k: v for k, v in constants.items() if k not in tables}

    def _are_given(self, table: Any) -> int:
        """To how many tasks an array is given."""
        if self.given_to is None:
            every = self.graph.constants.values()
            self.given_to = Counter(id(v) for given in every for v in given.values())
        return self.given_to[id(table)]

    def _kind(self, key: Key, recipe: _Recipe, inlined: dict[int, Source]) -> str | None:
        """The type of the arrays that a task makes: what they are drawn or made as, or what the
        collections of its steps say. What CuPy's arrays are computed to is CuPy's, whatever else
        Dask takes it for: a histogram, say."""
        for source in (*recipe.draws, *inlined.values()):
            if source.kind:
                return source.kind
        blocks = [self.graph.blocks.get(k) for k in (key, *recipe.parts)]
        kinds = [b.kind for b in blocks if b is not None and b.kind]
        kinds += recipe.kinds
        if not kinds:  # as Dask's own steps between collections are: they keep what they get
            near = [self.graph.blocks.get(k) for k in self.graph.needs[key]]
            kinds = [b.kind for b in near if b is not None and b.kind]
        return "cupy.ndarray" if "cupy.ndarray" in kinds else next(iter(kinds), None)

    def _view(
        self,
        key: Key,
        recipe: _Recipe,
        found: Followed,
        plain: list[tuple[int, Any]],
        targets: dict[Key, Key],
    ) -> None:
        """A task that only takes a view stays; its readers may take the view for themselves."""
        self.foreseen[key] = found.number, found.makes
        seen = found.view
        if not self.merge or not isinstance(seen, Seen) or key in self.outputs:
            return
        if key in self.graph.pins or len(plain) != 1 or recipe.names[0] not in targets:
            return
        ((_, whole),) = plain
        if not isinstance(whole, Abstract):
            return
        far = math.prod(whole.shape) > 2 * math.prod(seen.shape)
        expr = Expr("input", (), seen.dtype, (0, seen.view))
        number = self.numbers.setdefault(("source", expr, seen, whole), len(self.numbers))
        self.sources[key] = Source(
            seen.shape, expr, tuple(recipe.names), (whole,), (), None, True, far, number
        )

    def _with_sources(
        self, task: Any, recipe: _Recipe, inlined: dict[int, Source], targets: dict[Key, Key]
    ) -> Callable[[Values], Any]:
        """The task as it was, behind those that it now replaces."""
        names = recipe.names
        return _Behind(task, [
            (names[n], self._replaced(targets[names[n]], source).function)
            for n, source in inlined.items()
        ])  # fmt: skip

    def _replaced(self, target: Key, source: Source) -> Apart:
        """What a task is that disappears into a reader."""
        graph = self.graph
        return source.apart or Apart(
            graph.names[target], graph.needs[target], graph.constants.get(target, {}),
            _original(graph.tasks[target]),
        )  # fmt: skip

    def _facts_with(
        self,
        key: Key,
        recipe: _Recipe,
        inlined: dict[int, Source],
        targets: dict[Key, Key],
    ) -> tuple[tuple[Key, ...], tuple[Key, ...], dict[Key, Any]]:
        """Names, inputs and constants of a task that does what it reads from others itself."""
        constants = dict(self.graph.constants.get(key, {}))
        kept = [name for n, name in enumerate(recipe.names) if n not in inlined]
        new = {name: targets[name] for name in kept if name in targets}
        for n, source in inlined.items():
            before = self._replaced(targets[recipe.names[n]], source)
            constants.update(before.constants)
            new.update(zip(before.names, before.needs, strict=True))
        return tuple(new), tuple(new.values()), constants

    def _rewire(
        self,
        key: Key,
        recipe: _Recipe,
        inlined: dict[int, Source],
        targets: dict[Key, Key],
    ) -> None:
        graph = self.graph
        facts = self._facts_with(key, recipe, inlined, targets)
        graph.names[key], graph.needs[key], constants = facts
        if constants:
            graph.constants[key] = constants
        for n, source in inlined.items():
            target = targets[recipe.names[n]]
            for d in self._replaced(target, source).needs:
                self.readers[d] += 1
            self.readers[target] -= 1
            if not self.readers[target] and target not in self.outputs:
                self._drop(target)

    def _drop(self, key: Key) -> None:
        graph = self.graph
        needs = graph.needs[key]
        for facts in (graph.tasks, graph.needs, graph.names, graph.constants, graph.pins):
            facts.pop(key, None)
        for d in needs:
            self.readers[d] -= 1
            if not self.readers[d] and d not in self.outputs:  # its readers do without
                self._drop(d)

    def _offered(self, found: Followed) -> Source | None:
        """What a task makes as an expression for its readers, where that may save its memory."""
        program, made = found.program, found.makes
        assert program is not None
        if not self.merge or len(program.kernels) != 1:
            return None
        (kernel,), result = program.kernels, program.result
        if kernel.scans:
            return self._offered_scan(found, kernel)
        if type(result) is Out and len(result.shape) == 1 < len(kernel.shape):
            return self._offered_rows(found, kernel)
        outs = [out for out in leaves(result) if isinstance(out, Out) and not out.scalar]
        if kernel.reductions or len(outs) < max(len(list(leaves(result))), len(kernel.outputs)):
            return None
        expects = found.expects
        every = list(leaves(made))
        one = isinstance(result, Out)
        shown = tuple if one else squeezed
        if any(shown(m.shape) != shown(kernel.shape) for m in every):
            return None
        if not _are_arrays(expects):
            return None
        # steps of a tree meet on each device before they meet on one
        tiny = _count_arrays(expects) > 1 and math.prod(kernel.shape) <= FEW
        nbytes = sum(m.nbytes for m in every)
        far = tiny or sum(e.nbytes for e in leaves(expects)) > 2 * nbytes

        def part(out: Out) -> Generated:
            expr = kernel.outputs[out.array - program.inputs]
            if out.shape != kernel.shape:  # axes of length one are more, or fewer
                (expr,) = rebuilt([expr], lambda leaf: _over(leaf, kernel.shape, out.shape))
            return Generated(out.shape, expr.dtype, expr)

        parts = None if one else map_leaves(part, result)
        # readers of alike ones have one program, and that what each reads has as many leaves
        words = ("source", kernel.outputs, _words(made), _words(expects))
        number = self.numbers.setdefault(words, len(self.numbers))
        root = kernel.outputs[0]
        little = self.on_gpus and parts is None and _work(root) <= LITTLE_WORK
        return Source(
            kernel.shape, root, (), expects, (), None, False, far, number, little, parts
        )  # fmt: skip

    def _offered_rows(self, found: Followed, kernel: Kernel) -> Source | None:
        """An array of several axes, of which a task makes one: a reader that is not interested in
        their order may take it as it is."""
        made, expects = found.makes, found.expects
        if kernel.reductions or len(kernel.outputs) > 1 or not _are_arrays(expects):
            return None
        (root,) = kernel.outputs
        words = ("rows", root, kernel.shape, _words(expects))
        number = self.numbers.setdefault(words, len(self.numbers))
        far = sum(e.nbytes for e in leaves(expects)) > 2 * made.nbytes
        return Source(
            made.shape, root, (), expects, (), None, False, far, number,
            self.on_gpus and _work(root) <= LITTLE_WORK, Flat(kernel.shape, root.dtype, root),
        )  # fmt: skip

    def _offered_scan(self, found: Followed, kernel: Kernel) -> Source | None:
        """A scan that is what a task makes: one reader may want each part, another the last one
        only, as Dask's have it."""
        made, expects = found.makes, found.expects
        (scan, *others), (output, *more) = kernel.reductions, kernel.outputs
        if others or more or output.op != "reduced" or not _are_arrays(expects):
            return None
        if not isinstance(made, Abstract) or made.shape != kernel.shape:
            return None
        words = ("scan", kernel, _words(expects))
        number = self.numbers.setdefault(words, len(self.numbers))
        part = Scanned(kernel.shape, made.dtype, scan.arg, scan.op, kernel.axes[0])
        far = any(e.nbytes > 2 * made.nbytes for e in leaves(expects))
        return Source(
            kernel.shape, scan.arg, (), expects, (), None, False, far, number,
            _work(scan.arg) <= LITTLE_WORK, part,
        )  # fmt: skip

    def _offered_selection(self, masked: Masked, expects: tuple[Any, ...], own: int) -> Source:
        """What a mask selects, for readers that reduce it: then nobody has to find out how many
        elements that is. `own` of the arrays are not borrowed."""

        def change(leaf: Expr) -> Expr:
            return _numbered(leaf, lambda n: own + n - BORROWED if n >= BORROWED else n)

        expr, mask = rebuilt([masked.expr, masked.mask], change)
        masked = replace(masked, expr=expr, mask=mask)
        words = ("selection", masked, _words(expects))
        number = self.numbers.setdefault(words, len(self.numbers))
        little = _work(expr) + _work(mask) <= LITTLE_WORK
        return Source(
            masked.shape, expr, (), expects, (), None, False, False, number, little, masked
        )  # fmt: skip

    def _selects(
        self,
        key: Key,
        task: Any,
        recipe: _Recipe,
        offer: Source,
        inlined: dict[int, Source],
        targets: dict[Key, Key],
    ) -> None:
        """A task that selects by a mask stays; its readers may do that for themselves."""
        if key in self.graph.pins or key in self.outputs:
            return
        names, positions = _read_with(recipe, inlined)
        source = offer.of(tuple(names), tuple(positions), self._kind(key, recipe, inlined))
        source.free = source.little and not positions
        function = self._with_sources(task, recipe, inlined, targets) if inlined else task
        source.apart = Apart(*self._facts_with(key, recipe, inlined, targets), function)
        self.sources[key] = source

    def _picks(
        self,
        key: Key,
        task: Any,
        recipe: _Recipe,
        offer: Source | None,
        plain: list[tuple[int, Any]],
        inlined: dict[int, Source],
        targets: dict[Key, Key],
    ) -> bool:
        """Make a task that selects by a mask two kernels, if it can be these."""
        if not self.on_gpus:
            return False
        # what takes long is computed once, and not in both kernels
        some = {n: s for n, s in inlined.items() if s.little or s.free or plain[n][1] is None}
        if len(some) < len(inlined):
            offer = self._follow(recipe, plain, some).offer
        if offer is None or not offer.selects:
            return False
        names, positions = _read_with(recipe, some)
        first = tuple([names.index(name) for name in names])  # a value and its mask are of the same
        words = offer.number, first
        if words not in self.pickers:
            self.pickers[words] = _picker(offer, first)
        picker = self.pickers[words]
        if picker is None:
            return False
        program, columns = picker
        function = task
        if some:
            function = self._with_sources(task, recipe, some, targets)
            self._rewire(key, recipe, some, targets)
        fused = Fused(
            key, program, tuple(names), offer.expects, tuple(positions),
            self._kind(key, recipe, some), function,
        )  # fmt: skip
        graph = self.graph
        graph.tasks[key] = Picked(fused, columns)
        self.reasons.pop(key, None)
        if key not in graph.pins and key not in self.outputs:
            source = self.sources[key] = offer.of(fused.names, fused.positions, fused.kind)
            source.free = source.little and not positions
            constants = graph.constants.get(key, {})
            source.apart = Apart(graph.names[key], graph.needs[key], constants, function)
        return True

    # ---- blocks that depend on where they lie

    def _placed(self, task: Any) -> bool:
        """Whether a task draws random numbers, or makes a tile of an array from nothing."""
        if self.draw(task) is not None:
            return True
        return type(task) is Task and any(_tile(a) is not None for a in task.args)

    def draw(self, task: Any) -> Source | None:
        """A block of random numbers as its readers may compute it; None for other tasks."""
        if not self.philox or type(task) is not Task or task.func not in RANDOM:
            return None
        where = self.graph.draws.get(task.key)
        if where is None or task.dependencies:
            return None
        strides = View.contiguous(where.shape).strides
        position = sum([n * step for n, step in zip(where.start, strides, strict=True)])
        shape = tuple(task.args[3])
        words = ("draw", id(where.seed), shape, position % 2)
        if words not in self.drawn:
            _, name, _, _, args, kwargs = (_plain(a) for a in task.args)
            expr = philox.draw(
                name, shape, View(position % 2, strides), self._seed(where), tuple(args),
                dict(kwargs), base=PLACEHOLDER,
            )  # fmt: skip
            number = self.numbers.setdefault(("drawn", expr, shape), len(self.numbers))
            self.drawn[words] = expr, number
        expr, number = self.drawn[words]
        if expr is None:
            return None
        block = self.graph.blocks.get(task.key)
        kind = block.kind if block is not None else _kind_drawn(task.args[0])
        even = position - position % 2
        return Source(shape, expr, (), (), (even,), kind, False, False, number)

    def numbers_of(self, start: int, length: int) -> Source:
        """The numbers of a tile's elements along one of its axes."""
        if length not in self.lengths:
            axis = Expr("index", (), np.int64, View(0, (1,)))
            expr = Expr("add", (axis, _placeholder(0)), np.int64)
            number = self.numbers.setdefault(("tile", length), len(self.numbers))
            self.lengths[length] = expr, number
        expr, number = self.lengths[length]
        return Source((length,), expr, (), (), (start,), None, False, False, number)

    def _seed(self, where: Draw) -> int:
        if id(where.seed) not in self.seeds:
            self.alive.append(where.seed)
            self.seeds[id(where.seed)] = philox.key_of(where.seed)
        return self.seeds[id(where.seed)]

    # ---- functions and other literals

    def _pairs(self, task: Any) -> bool:
        """Whether a task gives pairs of a value and its place."""
        parts = task.tasks if type(task) is Chain else [(None, task)]
        return any(self._calls_pairing(_function(part)) for _, part in parts)

    def _calls_pairing(self, function: Any) -> bool:
        known = self.pairing.get(id(function))
        if known is None:
            self.alive.append(function)
            within = any(f in PAIRING for f in reading.functions_in(function))
            known = self.pairing[id(function)] = within
        return known

    def literal(self, owner: Any, value: Any) -> Any:
        """Words for a value that many blocks share: `owner` is the object that they share."""
        found = self.literals.get(id(owner))
        if found is None:
            self.alive.append(owner)
            found = self.literals[id(owner)] = literal(value, self.alive)
        return found

    def why_impure(self, function: Any) -> str | None:
        found = self.impure.get(id(function), False)
        if found is False:
            self.alive.append(function)
            found = self.impure[id(function)] = reading.impure(function, arrays=True)
            if found is None:
                for where, name, value in reading.globals_read(function):
                    word = id(where), name, id(value)
                    if word not in self.read:
                        self.read.add(word)
                        self.globals.append((where, name, value))
                self.graph.around += reading.functions_read(function)
                self._watch(reading.containers_read(function))
        return found  # type: ignore[return-value]

    def why_unfit(self, constant: Any) -> str | None:
        """Why no function is followed that a task gives this constant to."""
        if reading.is_fixed(constant):
            return None
        found = self.unfit.get(id(constant), False)
        if found is False:
            self.alive.append(constant)
            found, containers = reading.unfit(constant)
            self.unfit[id(constant)] = found
            self._watch(containers)
        return found  # type: ignore[return-value]

    def _watch(self, containers: Iterable[Any]) -> None:
        """Remember what is in lists and dictionaries of tasks."""
        for container in containers:
            alive: list[Any] = []
            words = literal(container, alive)
            self.graph.containers[id(container)] = container, words, alive


def better_apart(names: Sequence[str], strange: Set[str]) -> dict[str, str]:
    """Words for layers that Dask has fused: those with different words had better be tasks of their
    own, for two or more that can be followed are a kernel. One by itself stays with the strange.

    >>> better_apart(["read", "fft", "abs", "square", "sum"], {"fft"})
    {'read': 'read', 'fft': 'read'}
    >>> better_apart(["read", "fft", "sum"], {"fft"})
    {}
    """
    runs = [list(run) for _, run in itertools.groupby(names, key=strange.__contains__)]
    worth = [strange.isdisjoint(run) and len(run) > 1 for run in runs]
    out: dict[str, str] = {}
    if not any(worth):
        return out
    for kernel, group in itertools.groupby(zip(worth, runs, strict=True), key=itemgetter(0)):
        if not kernel:
            together = [name for _, run in group for name in run]
            out.update(dict.fromkeys(together, together[0]))
    return out


class _Pairs:
    """A task of Dask's argmin or argmax whose pairs are two arrays, as those of programs are, and
    not one of records: a reader may have blocks of either kind."""

    def __init__(self, task: Callable[[Values], Any]):
        self.task = task
        self.key = getattr(task, "key", None)

    def __call__(self, values: Values) -> Any:
        value = self.task(values)
        if isinstance(value, np.ndarray) and value.dtype.names == ("vals", "arg"):
            return {name: value[name].copy() for name in value.dtype.names}
        return value


def _function(task: Any) -> Any:
    return task.function if type(task) is Call else getattr(task, "func", None)


class _Behind:
    """A task with others in front of it that only it reads."""

    def __init__(self, task: Callable[[Values], Any], before: list[tuple[Key, Any]]):
        self.task, self.before = task, before

    def __call__(self, values: Values) -> Any:
        return self.task({**values, **{name: t(values) for name, t in self.before}})


def program_of(task: Any) -> Fused | None:
    """What a task is as a program, if it is one."""
    if isinstance(task, OrNone | Picked):
        return task.fused
    return task if isinstance(task, Fused) else None


def _original(task: Any) -> Any:
    return task.original if isinstance(task, Fused) else task


def _worth(program: Program, inlined: dict[int, Source], joins: bool) -> dict[int, Source]:
    """Those of which the reader does not compute each element many times over. Elements that are
    taken by lists are put together: one is read for each of the reader's; and so are all, where it
    joins them."""
    points = max((math.prod(k.shape) for k in program.kernels), default=0)
    lists = [s for s in inlined.values() if s.little and (joins or _takes(s.expr))]
    together = sum([math.prod(s.shape) for s in lists])

    def worth(s: Source) -> bool:
        return s.free or 2 * (together if s in lists else math.prod(s.shape)) >= points

    return {n: s for n, s in inlined.items() if worth(s)}


@lru_cache(1024)
def _takes(root: Expr) -> bool:
    return any(n.op == "taken" for n in nodes((root,)))


def _stores_a_scan(program: Program) -> bool:
    """Whether one of its kernels reads what another one has scanned."""
    read = {n for kernel in program.kernels for n in kernel.inputs}
    return any(
        not read.isdisjoint(range(start, start + len(kernel.outputs)))
        for start, kernel in zip(program.starts, program.kernels, strict=True)
        if kernel.scans
    )


@lru_cache(1024)
def _moved(expr: Expr, shape: tuple[int, ...]) -> int:
    return Kernel(shape, (expr,)).bytes_moved()


def _sooner_computed(source: Source, times: float) -> bool:
    """Whether to compute a value so many times is sooner done than that one task writes it, and as
    much is read."""
    if not source.little or times > FEW_READERS or source.positions:
        return False
    made = math.prod(source.shape) * source.expr.dtype.itemsize
    over = source.parts.shape if isinstance(source.parts, Flat) else source.shape
    read = _moved(source.expr, over) - made
    return times * read < read + (1 + times) * made


def _part_taken(task: Any, shape: tuple[int, ...]) -> float | None:
    """How much of a block a task takes that only takes a slice of it; None of others."""
    index = task.args[1] if type(task) is Task and len(task.args) == 2 else None
    if getattr(task, "func", None) not in SLICERS or task.kwargs or type(index) is not tuple:
        return None
    if len(index) != len(shape) or any(type(i) is not slice for i in index) or 0 in shape:
        return None
    return math.prod(len(range(n)[i]) / n for n, i in zip(shape, index, strict=True))


def _work(root: Expr) -> int:
    """About how many sums or products an element takes; many, where that is not known."""
    return sum([_work_of(n) for n in nodes((root,)) if n.args and n.op != "cast"])


def _work_of(node: Expr) -> int:
    wide = max([a.dtype.itemsize for a in node.args])
    if node.op == "taken" or node.op in _SUMS:
        return 1
    if node.op in _QUOTIENTS:
        return 8 if wide <= 4 else 16
    return 8 if node.op in _FUNCTIONS and wide <= 4 else LITTLE_WORK + 1


def _shared(sources: Iterable[Source]) -> tuple[int, ...]:
    """Of each array that sources read, which one is the same, if several select by masks: else
    nobody would know that two select by one mask. Empty where there is nothing to know."""
    sources = list(sources)
    if sum([s.selects for s in sources]) < 2:
        return ()
    first: dict[Any, int] = {}
    out: list[int] = []
    for number, source in enumerate(sources):
        for name, structure in zip(source.names, source.expects, strict=True):
            count = _count_arrays((structure,))
            owner = None if source.selects else number
            out += [first.setdefault((owner, name, k), len(out) + k) for k in range(count)]
    return tuple(out) if len(set(out)) < len(out) else ()


def _lent(source: Source, draws: int, arrays: int, shared: Sequence[int] = ()) -> Any:
    """A source with numbers of its own, among the reader's others; those that are the same have
    one."""
    words = {_placeholder(n): _placeholder(draws + n) for n in range(len(source.positions))}

    def number(n: int) -> int:
        return BORROWED + (shared[arrays + n] if shared else arrays + n)

    def change(leaf: Expr) -> Expr:
        return words.get(leaf) or _numbered(leaf, number)

    if source.parts is None:
        (expr,) = rebuilt([source.expr], change)
        return Generated(source.shape, expr.dtype, expr)
    if isinstance(source.parts, Masked):
        expr, mask = rebuilt([source.expr, source.parts.mask], change)
        return replace(source.parts, expr=expr, mask=mask)
    every = iter(rebuilt([part.expr for part in leaves(source.parts)], change))
    return map_leaves(lambda part: replace(part, expr=next(every)), source.parts)


def _returned(program: Program, borrowed: int) -> Program:
    """Number the arrays that were borrowed behind the program's own inputs."""
    if not borrowed:
        return program
    own = program.inputs

    def number(n: int) -> int:
        if n >= BORROWED:
            return own + n - BORROWED
        return n if n < own else n + borrowed

    kernels = tuple(renumbered(k, number) for k in program.kernels)
    result = map_leaves(
        lambda v: replace(v, array=number(v.array)) if isinstance(v, Out) else v,
        program.result,
    )
    return Program(own + borrowed, kernels, result)


def _read_with(recipe: _Recipe, inlined: Mapping[int, Source]) -> tuple[list[Key], list[int]]:
    """What a task reads that computes some of its inputs itself, and their positions."""
    names = [name for n, name in enumerate(recipe.names) if n not in inlined]
    positions: list[int] = []
    for source in inlined.values():
        names += source.names
        positions += source.positions
    return names, positions


def _picker(offer: Source, first: Sequence[int]) -> tuple[Program, tuple[int, ...]] | None:
    """The kernels that pick out what a mask selects, and the shape of each element. Of each value
    that is read, the `first` one is the same."""
    masked = offer.parts
    rows = len(masked.over)
    counts = [_count_arrays((structure,)) for structure in offer.expects]
    if masked.axis or not math.prod(masked.over) or not sum(counts):
        return None
    shape = tuple(masked.shape[rows:])
    if math.prod(shape) > MOST_COLUMNS or not math.prod(shape):
        return None

    def column(place: tuple[int, ...]) -> Expr:
        def change(leaf: Expr) -> Expr:
            view = view_of(leaf)
            if view is None:
                return leaf
            offset = sum([i * s for i, s in zip(place, view.strides[rows:], strict=True)])
            return with_view(leaf, View(view.offset + offset, view.strides[:rows]))

        return rebuilt([masked.expr], change)[0]

    columns = [column(place) for place in np.ndindex(shape)]
    begins = [0, *itertools.accumulate(counts)]
    number = {
        begins[n] + i: begins[m] + i
        for n, (m, count) in enumerate(zip(first, counts, strict=True))
        for i in range(count)
    }
    kernels = tuple(
        [
            renumbered(Kernel(masked.over, (masked.mask, *rest), picks=True), number.__getitem__)
            for rest in ((), columns)
        ]
    )
    every = nodes(kernels[1].roots)
    # what takes long is computed once, and not twice
    loops = [n for n in every if n.op == "call" and n.data[0].repeats]
    if loops or len(every) > MOST_NODES or any(map(unwritten, kernels)):
        return None
    return Program(sum(counts), kernels, None), shape


def _over(leaf: Expr, shape: tuple[int, ...], other: tuple[int, ...]) -> Expr:
    view = view_of(leaf)
    return leaf if view is None else with_view(leaf, view_over(view, shape, other))


def _made_by(program: Program) -> Any:
    """The structure of a program's value, which is made of what its kernels make."""
    dtypes: dict[int, Any] = {}
    for start, kernel in zip(program.starts, program.kernels, strict=True):
        dtypes.update({start + n: o.dtype for n, o in enumerate(kernel.outputs)})
    return map_leaves(
        lambda v: Abstract(v.shape, dtypes[v.array]) if isinstance(v, Out) else v, program.result
    )


def _operations(program: Program) -> float:
    """Operations for each point of the program's largest kernel. A moment is three: NumPy makes
    two arrays on the way."""
    points = max((k.points for k in program.kernels), default=0)
    moments = sum(k.points for k in program.kernels for r in k.reductions if r.op == "moment")
    return (sum(k.operations() for k in program.kernels) + 2 * moments) / max(points, 1)


def _gains(program: Program) -> bool:
    """Whether one operation is faster as a program: one that makes a large array, of a few points
    for each element, which may be part of a result and is written there at once; and a reduction of
    short rows, for which NumPy calls its loop row by row."""
    kernel = max(program.kernels, key=lambda k: k.points, default=None)
    if kernel is None or _operations(program) < 1:
        return False
    if any(r.op not in host_code.REDUCED for r in kernel.reductions):
        return False
    last, most = len(kernel.shape) - 1, blocks.FEW_POINTS
    if last in kernel.axes and kernel.shape[last] <= most < math.prod(kernel.kept):
        return True
    few = math.prod([kernel.shape[k] for k in kernel.axes]) <= most
    return few and sum(kernel.made) >= LARGE


def unreadable(program: Program) -> str | None:
    """Why NumPy cannot read a program; None where it can."""
    for kernel in program.kernels:
        for root in kernel.roots:
            if reason := blocks.supported(root):
                return reason
    return None


def _abstract(value: Any) -> Any:
    """What is known of a value that is there; None where it holds what no program can read."""
    if type(value) in (dict, list, tuple):
        parts = [_abstract(v) for v in leaves(value)]
        if any(p is None for p in parts):
            return None
        return map_leaves(_abstract, value)
    if isinstance(value, (int, float, complex, bool, str, np.generic)):
        return value
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    flags = getattr(value, "flags", None)
    if not isinstance(dtype, np.dtype) or not isinstance(shape, tuple) or flags is None:
        return None
    return None if isinstance(value, np.ma.MaskedArray) else following.abstract_of(value)


def _is_copy(seen: Any, arguments: list[Any]) -> bool:
    """Whether views are to be copied: where the task does so itself, and of what is at most half,
    so that the whole can be let go of, and so that little goes to other devices."""
    wholes = [a for a in leaves(arguments) if isinstance(a, Abstract)]
    return all(
        v.copied or 2 * math.prod(v.shape) <= math.prod(wholes[v.array].shape)
        for v in leaves(seen)
        if isinstance(v, Seen)
    )


def _of_matrices(product: Product, arguments: list[Any]) -> MatrixProduct | None:
    """A product of arguments, by their numbers; None where it is one of parts of them."""
    if not all(isinstance(a, Abstract) for a in arguments):
        return None
    sides = []
    for seen in (product.left, product.right):
        array = arguments[seen.array]
        strides = array.strides or View.contiguous(array.shape).strides
        long = [(n, s) for n, s in zip(array.shape, strides, strict=True) if n != 1]
        shown = [*zip(seen.shape, seen.view.strides, strict=True)]
        if seen.view.offset or shown not in (long, long[::-1]):
            return None
        sides.append(Matrix(seen.array, (long[0][0], long[1][0]), shown != long))
    left, right = sides
    return MatrixProduct(left, right, product.left.dtype)


def _laid(v: Any) -> Any:
    """What is known of a view, or of a copy of it."""
    if not isinstance(v, Seen):
        return v
    same = v.copied or following.is_contiguous(View(0, v.view.strides), v.shape)
    return Abstract(v.shape, v.dtype, None if same else v.view.strides)


def _read(own: Iterable[Any], borrowed: Iterable[Source]) -> tuple[Any, ...]:
    """What is foreseen of the values that a task reads: its own, and what sources read."""
    return (*own, *[structure for source in borrowed for structure in source.expects])


def _are_arrays(structures: tuple[Any, ...]) -> bool:
    """Whether values are arrays, or containers of nothing else."""
    return all(isinstance(leaf, Abstract) for leaf in leaves(structures))


def _count_arrays(structures: tuple[Any, ...]) -> int:
    return sum([isinstance(leaf, Abstract) for leaf in leaves(structures)])


def _expected(structure: Any) -> list[Abstract | None]:
    return [s if isinstance(s, Abstract) else None for s in leaves(structure)]


# ---- tasks as structures


class _Recipe:
    """A task without the names of what it reads: `key` is the same for blocks that are alike."""

    __slots__ = (
        "_at", "_fresh", "_fuser", "_numbers", "_parts", "_tiles", "draws", "given", "key", "kinds",
        "names", "reason", "task",
    )  # fmt: skip

    def __init__(self, fuser: Fuser, task: Any):
        self._fuser, self.task = fuser, task
        self.draws: list[Source] = []  # what depends on where the block lies, and on nothing else
        self._tiles: dict[Tile, int] = {}  # where in `draws` a tile's numbers begin
        self.reason: str | None = None
        self.given = False  # whether it is given a function
        self.kinds: list[str] = []  # of arrays without elements, which say what to make
        self._fresh = False  # whether nobody changes the lists that come
        self._at = 0  # the part that is performed
        self._numbers: dict[Key, Any] = {}  # what a name stands for in `key`
        parts = task.tasks if type(task) is Chain else [(task.key, task)]
        self._parts = [(name, _with_place(part)) for name, part in parts]
        self.names: list[Key] = []
        words: list[Any] = []
        for name, part in self._parts:
            draw = fuser.draw(part)
            if draw is not None:
                words.append("draw")
                self.draws.append(draw)
            elif type(part) is Call:
                self._check(part.function)
                words.append((id(part.function), tuple([self._walk(a) for a in part.args])))
            else:
                words.append(self._walk(part))
            self._numbers[name] = -len(words)
        self.key = tuple(words)

    @property
    def joins(self) -> bool:
        """Whether all that it reads is put side by side."""
        _, first = self._parts[0]
        joined = getattr(first, "func", None) is concatenate_shaped
        return joined and first.dependencies >= set(self.names)

    @property
    def parts(self) -> list[Key]:
        """The keys of what it does one after the other; Dask may have fused some of these."""
        return [name for name, _ in self._parts]

    @property
    def steps(self) -> list[Key]:
        """The same, and what Dask has fused one by one."""
        return [key for part in self._parts for key, _ in self._steps(*part)]

    def _steps(self, name: Key, part: Any) -> Sequence[tuple[Key, Iterable[Any]]]:
        """What a part does one after the other, each with what it is given."""
        if type(part) is Call and part.steps:
            return list(_flat(part.function, part.steps, part.args))
        return [(name, () if self._fuser.draw(part) is not None else [part])]

    def impure_steps(self) -> Iterator[int]:
        """Which of its steps have functions or constants that keep it from being followed."""
        fuser = self._fuser
        every = [step for part in self._parts for step in self._steps(*part)]
        for n, (_, parts) in enumerate(every):
            for value in leaves([v for part in parts for v in _given(part)]):
                function = callable(value) and not isinstance(value, type)
                if (fuser.why_impure if function else fuser.why_unfit)(value):
                    yield n
                    break

    def step_of(self, error: BaseException) -> int:
        """Which step an error was raised in while it was performed; -1 if in none."""
        before = sum([len(self._steps(*part)) for part in self._parts[: self._at]])
        if self._at == len(self._parts):
            return -1
        _, part = self._parts[self._at]
        if type(part) is not Call:
            return before
        steps = part.steps
        for line in _lines(error):
            n = line - FIRST_LINE
            before += sum([_count(s) for s in steps[:n]])
            steps = steps[n].steps
            if not steps:
                return before
        return -1

    def _walk(self, node: Any) -> Any:
        kind = type(node)
        if kind is TaskRef or kind is Alias:
            name = node.key if kind is TaskRef else node.target
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = len(self.names)
                self.names.append(name)
            return TaskRef, number
        if kind is DataNode:
            if type(node.value) is Tile:
                return Tile, self._number(node.value)
            self._look_at(node.value)
            return self._fuser.literal(node, node.value)
        if kind is Tile:
            return Tile, self._number(node)
        if isinstance(node, NestedContainer):
            return node.klass, tuple([self._walk(a) for a in node.args])
        if isinstance(node, Task):
            self._check(node.func)
            before, self._fresh = self._fresh, any(node.func is f for f in FRESH)
            words = [self._fuser.literal(node.func, node.func)]
            words += [self._walk(a) for a in node.args]
            if node.kwargs:
                words += [(k, self._walk(v)) for k, v in node.kwargs.items()]
            self._fresh = before
            return tuple(words)
        if isinstance(node, GraphNode):
            self.reason = f"it is a {kind.__name__}"
            return None
        self._look_at(node)
        return literal(node, self._fuser.alive)

    def _look_at(self, value: Any) -> None:
        """At functions among a task's constants, which its own may call, and at arrays."""
        for part in leaves(value):
            if reading.is_nothing(part):
                self.kinds.append(f"{type(part).__module__.partition('.')[0]}.ndarray")
        if isinstance(value, reading.CALLED):
            self.given = True
            self._check(value)
        elif self.reason is None and not self._fresh:
            self.reason = self._fuser.why_unfit(value)

    def _number(self, tile: Tile) -> int:
        """Which of the task's tiles it is. Their shapes are in those of `draws`."""
        number = self._tiles.setdefault(tile, len(self.draws))
        if number == len(self.draws):
            sides = zip(tile.start, tile.shape, strict=True)
            self.draws += [self._fuser.numbers_of(*side) for side in sides]
        return number

    def _check(self, function: Any) -> None:
        if self.reason is None:
            self.reason = self._fuser.why_impure(function)

    def perform(self, values: Sequence[Any], drawn: Sequence[Any]) -> Any:
        """Do what the task does, on other values."""
        env: dict[Key, Any] = dict(zip(self.names, values, strict=True))
        tiles = {t: Somewhere(t.shape, drawn[n : n + len(t.shape)]) for t, n in self._tiles.items()}
        theirs = {n + k for t, n in self._tiles.items() for k in range(len(t.shape))}
        random = iter([d for n, d in enumerate(drawn) if n not in theirs])
        value = None
        for n, (name, part) in enumerate(self._parts):
            self._at = n
            if self._fuser.draw(part) is not None:
                value = next(random)
            elif type(part) is Call:
                function = trace.adapted(part.function)
                value = function(*[_evaluated(a, env, tiles) for a in part.args])
            else:
                value = _evaluated(part, env, tiles)
            env[name] = value
        self._at = len(self._parts)
        return value


def _flat(
    function: Any, steps: Iterable[Step], arguments: Sequence[Any]
) -> Iterator[tuple[Key, Iterable[Any]]]:
    """The steps of a compiled function, also where Dask has fused in several rounds, each with what
    it is given."""
    own = function.__globals__
    for step in steps:
        if step.steps:
            yield from _flat(*step.inside(function, arguments))
        else:
            yield step.key, [
                *map(own.get, step.constants), *map(arguments.__getitem__, step.arguments)
            ]  # fmt: skip


def _count(step: Step) -> int:
    return sum(map(_count, step.steps)) or 1


def _lines(error: BaseException | None) -> Iterator[int]:
    """The lines of compiled functions in which an error was raised, from outside in."""
    while error is not None:
        at = error.__traceback__
        while at is not None:
            if at.tb_frame.f_code.co_filename == COMPILED:
                yield at.tb_lineno
            at = at.tb_next
        error = error.__cause__


def _given(node: Any) -> Iterator[Any]:
    """The functions and other constants in a task."""
    if isinstance(node, DataNode):
        yield node.value
    elif isinstance(node, Task):
        if not isinstance(node, NestedContainer):
            yield node.func
        for part in (*node.args, *node.kwargs.values()):
            yield from _given(part)
    elif not isinstance(node, (GraphNode, TaskRef, Tile)):
        yield node


def _with_place(part: Any) -> Any:
    """The same task of Dask's argmin or argmax, with where its block begins as a place: else that
    would be a number of its own in each block's structure."""
    function: Any = getattr(part, "func", None)
    if type(part) is not Task or getattr(function, "func", None) is not dask_reductions.arg_chunk:
        return part
    *given, where = part.args
    try:
        begin, whole = ((where,), None) if isinstance(where, int) else where
        place = Tile(tuple([int(b) for b in begin]), (1,) * len(begin))
    except (TypeError, ValueError):  # of another Dask than we know
        return part
    return Task(part.key, function, *given, Task(None, _place, place, whole), **part.kwargs)


def _place(tile: Tile, whole: tuple[int, ...] | None) -> Any:
    """As `arg_chunk` is given it: of all axes, with the array's shape, or of one."""
    begin = tuple([tile.numbers(k) for k in range(len(tile.shape))])
    return begin[0] if whole is None else (begin, whole)


def _tile(node: Any) -> Tile | None:
    """The tile that an argument is."""
    value = node.value if type(node) is DataNode else node
    return value if type(value) is Tile else None


@dataclass(frozen=True, slots=True)
class Somewhere:
    """Stands for a `Tile` whose place is not known yet."""

    shape: tuple[int, ...]
    axes: Sequence[Any]

    def numbers(self, axis: int, xp: str = "numpy") -> Any:
        return self.axes[axis]


def _evaluated(node: Any, env: dict[Key, Any], tiles: dict[Tile, Somewhere]) -> Any:
    """The value of a task or of its argument, by the functions that symbolic arrays know."""
    if (tile := _tile(node)) is not None:
        return tiles[tile]
    if isinstance(node, TaskRef):
        return env[node.key]
    if isinstance(node, Alias):
        return env[node.target]
    if isinstance(node, DataNode):
        return trace.constant_of_task(node.value)
    if isinstance(node, NestedContainer):
        return trace.constant_of_task(node({d: env[d] for d in node.dependencies}))
    if isinstance(node, Task):
        args = [_evaluated(a, env, tiles) for a in node.args]
        kwargs = {
            k: _plain(v) if k in reading.LIKE else _evaluated(v, env, tiles)
            for k, v in node.kwargs.items()
        }
        return trace.adapted(node.func)(*args, **kwargs)
    return trace.constant_of_task(node)


def _kind_drawn(generator: Any) -> str | None:
    """The type of the arrays that a bit generator's or a RandomState's class makes."""
    library = getattr(generator, "xp", None) or str(getattr(generator, "__module__", ""))
    return {"cupy": "cupy.ndarray", "numpy": "numpy.ndarray"}.get(library.partition(".")[0])


def _plain(value: Any) -> Any:
    """Arguments of a random task without Dask's containers."""
    if isinstance(value, GraphNode):
        return value({})
    return value


def _words(structure: Any) -> Any:
    """A structure of a value, to be looked up by."""
    kind = type(structure)
    if kind is Abstract:
        return structure
    if kind is dict:
        return kind, tuple([(k, _words(v)) for k, v in structure.items()])
    if kind is tuple or kind is list:
        return kind, tuple([_words(v) for v in structure])
    return literal(structure, [])
