"""The CUDA reading of a kernel: source text, and the arguments that go with it. No device here.

The text depends on the structure of a kernel only: its operations and types, which leaves are
equal, how many axes are left when those that lie evenly are merged, and along which of them a
leaf's stride is 0 or 1. Shapes, strides, constants and the keys of random numbers are arguments,
64-bit words in slots, so that one compilation serves all blocks of an array, and one launch may
carry several.

Each launch reads and writes memory once. There are six ways of going through it:

- element-wise: threads go along the innermost axis, some elements each; where a leaf is transposed,
  in tiles that are turned around in shared memory.
- reductions that take in the fastest axis: lanes of a warp, or whole blocks, go along it.
- other reductions: threads lie along the fastest kept axis and go along the reduced ones.
- reductions of windows that slide along another axis: each thread makes several results along it,
  which share most of what they read.
- reductions of windows that slide along the fastest axis: a block has what they slide over in
  shared memory, or, where they slide down columns as well, what lies in these (`panes`).
- scans: lanes of a warp go along a line and put together what they have, or each thread goes along
  a line of its own where neighbouring lines lie side by side.

Where there are few results, several blocks share one: each leaves its part in scratch memory, and
the last one to finish puts the parts together, in order. The same bits come out on every run.

A view below a `where` may reach outside its array only where the condition is made of indices and
constants: it is then loaded if the condition chooses it. A condition on values guards nothing.
Where such conditions are settled for most points at once (a block between the edges of its
neighbours), these points have a body of their own, and the others come before them: most of these
with a body that knows where they lie along some axes. Results that lie beyond that core are made
by threads of their own. Vectors are written also where what they are made of begins anywhere
(edges, shifts, odd rows): each element of that is then read by itself, once, or with others that
lie evenly.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import panes
from .bins import Bins
from .cuda_math import (
    NOT_A_NUMBER,
    STORED,
    TYPES,
    accumulator,
    cast,
    code,
    loaded,
    operation,
    pieces,
    results,
    stored,
)
from .expr import ANYWHERE, LEAVES, RANDOM, SCANS, Expr, Kernel, View, constant, nodes, substituted
from .panes import MOST_AT_ONCE, SLIDING_WORDS, THREADS, Box, Pane
from .regions import interior, settled

#: Bytes of arguments that a kernel can have, and items of a launch.
MOST_BYTES, MOST_ITEMS = 4000, 32
#: Columns from which a thread may have four of them, with all that a mean and a variance need: with
#: fewer, too few threads have work. Measured.
MANY_COLUMNS = 2**15
#: Blocks per processor: enough that it does not matter when the last ones end.
WAVES, SHARED_WAVES = 128, 32
ROW_WAVES, COLUMN_WAVES, LANES = 8, 3, 8
#: Constants that are arguments, at most.
MOST_CONSTANTS = 128
#: Statements that a kernel may have: more take the compiler minutes.
MOST_STATEMENTS = 20_000
#: Work of the elements that a thread takes side by side. It is all compiled as often as there are
#: elements (thirty functions of complex numbers eight times: 41 s, once: 1.6 s), and where there is
#: as much to do it does not matter how the little is loaded.
MOST_COST = 1024
#: Bytes of columns that a multiprocessor's cache has room for beside what else goes through it, and
#: columns that a warp goes along at a time.
KEPT_BYTES, LEAST_COLUMNS = 96 * 1024, 64
#: Bytes of inputs of one thread at a time, beyond which it has no registers for them all: of 255;
#: and that it has room for in a quarter of these.
LATE_BYTES, FEW_BYTES = 1000, 128
#: What each element of a vector may cost whose parts are read one by one: the code is there twice.
#: And how long rows have to be.
LOOSE_COST, LOOSE_LEAST = 256, 64
#: Places in each array that a reduction reads at each point, from which on it is worth while to
#: read them one by one, but each once.
OFTEN = 5
#: Points from which on it is worth while to reduce those beyond the core by themselves.
MANY_STEPS = 2**14
#: Bytes of a result that lies directly behind those of other items of a launch, at most.
CLOSE = 2**16
#: Elements from one view to another of the same array, at most, whose common part is read once.
BESIDE = 8
#: Bytes of shared memory for tiles; there are 48 KiB.
TILES = 40 * 1024
#: Bins of a histogram that have room there, and how many counters blocks have if that is enough.
MOST_BINS, COUNTERS = TILES // 4, 4096
#: Results along an axis that a thread makes at a time of windows that slide along it, at least and
#: at most, and the points of a tile in which threads follow such windows: their rows stay in the
#: cache. Measured.
LEAST_SLIDING, MOST_SLIDING, SLIDING_TILE = 4, 16, 2**8
#: Threads of a processor that have work then, at least.
SLIDING_THREADS = 2 * THREADS
#: Nodes of what they reduce, at most, and how often these may be there: the compiler's time.
MOST_SLIDING_NODES, SLIDING_STATEMENTS = 100, 2000
#: Results from which on windows lie in panes.
LEAST_IN_PANES = 2**14
#: The members of a moment, but for how many there are.
MOMENT = ("k", "sum", "squares")
#: Points and elements that 32 bits can count, and go on by some steps.
SMALL = 2**31 - 2**27
#: What takes about as long as this many additions, in float32 and float64.
COSTS = {"add": (1, 1), "subtract": (1, 1), "multiply": (1, 1), "divide": (8, 15),
         "reciprocal": (8, 15), "sqrt": (8, 15), "power": (60, 150), "gammaln": (100, 200),
         "gamma": (100, 200), "bin": (80, 80), "bits": (60, 60), "uniform": (60, 60),
         "normal": (90, 120), "call": (400, 400)}  # fmt: skip
CHEAP = frozenset({
    "where", "cast", "negative", "absolute", "square", "maximum", "minimum", "fmax", "fmin",
    "less", "greater", "less_equal", "greater_equal", "equal", "not_equal", "logical_and",
    "logical_or", "real", "imag", "complex", "bitwise_and", "bitwise_or", "constant", "index",
    "input", "reduced", "taken",
})  # fmt: skip


class NotGenerated(Exception):
    """This kernel has no CUDA reading: `str(error)` says which operation of which dtypes."""


@dataclass(frozen=True, slots=True)
class Call:
    """A Python function that a kernel's text calls: what is to be linked to it. The text declares
    `symbol`; the same symbol means the same function, of the same types."""

    symbol: str
    #: As a ``call`` node has it: `.python`, `.name`, `.digest`, `.lasting`, `.repeats`.
    function: Any
    part: int | None  # which item of a tuple, where it returns one
    args: tuple[str, ...]  # codes of types
    gives: str


#: What the compiler is told, by whether a kernel takes a single item.
ONLY = {True: "-DONLY_ONE", False: "-DONLY_MANY"}


@dataclass(frozen=True, slots=True)
class Generated:
    """A kernel's source, and how it is launched: on `blocks` x items blocks of `threads`, with one
    argument, the slots of all items one after the other. The entry `name` takes `most` items (its
    argument has that size, whatever comes in it), `name + "_one"` a single one. The source has both
    but for what `ONLY` defines: each takes as long to compile as the other."""

    source: str
    name: str
    slots: np.ndarray[Any, Any]  # uint64, of one item; pointers are still to be filled in
    inputs: tuple[tuple[int, int, int], ...]  # slot, array number, bytes to add to its pointer
    outputs: tuple[int, ...]  # slot of each output's pointer
    scratch: tuple[int, int] | None  # slot, bytes of memory that is the item's own
    counters: tuple[int, int] | None  # slot, number of uint32 that are zero, and are left so
    blocks: int
    threads: int
    most: int
    calls: tuple[Call, ...] = ()  # what the source needs beside itself


def generate(
    kernel: Kernel, aligned: bool = True, processors: int = 132, writes: bool | None = None
) -> Generated:
    """The CUDA reading of a kernel, for arrays of which each begins at a multiple of 16 bytes
    (`aligned`), or at least those that it makes (`writes`), on a device with so many processors.

    >>> from gpuscheduler.expr import constant, source
    >>> def add(x, y):
    ...     return Expr("add", (x, y), "f4")
    >>> small, large = (generate(Kernel((n,), (add(source(0, (n,), "f4"), constant(k, "f4")),)))
    ...                 for n, k in ((8, 1), (2**20, 2.5)))
    >>> small.source == large.source, small.blocks, large.blocks
    (True, 1, 256)
    """
    writes = aligned if writes is None else writes
    return _Generator(_without_sums(kernel), aligned, processors, writes).generated()


def _without_sums(kernel: Kernel) -> Kernel:
    """The same kernel, with sums of float32 made from the means of the same values, which are
    float64 until then: a mean and a variance, as they are often wanted together."""
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    every = kernel.reductions
    moments = {r.arg: j for j, r in enumerate(every) if r.op == "moment"}
    gone: dict[int, int] = {}  # sums, and the moments that know them
    for j, r in enumerate(every):
        if r.op == "sum" and (r.arg.dtype, *r.dtypes) == (single, single):
            found = moments.get(r.arg, moments.get(Expr("cast", (r.arg,), double)))
            if found is not None:
                gone[j] = found
    count = math.prod(kernel.shape[k] for k in kernel.axes)
    if not gone or not count:  # nothing has no mean, and its sum is zero
        return kernel
    left = [j for j in range(len(every)) if j not in gone]
    number = {j: n for n, j in enumerate(left)}
    new: dict[int, Expr] = {}
    for node in nodes(kernel.outputs):
        if node.op != "reduced":
            continue
        j, which = node.data
        if j in gone:
            mean = Expr("reduced", (), double, (number[gone[j]], 0))
            value = Expr("multiply", (mean, constant(float(count), double)), double)
        else:
            wide = j in gone.values() and which == 0
            value = Expr("reduced", (), double if wide else node.dtype, (number[j], which))
        same = value.dtype == node.dtype
        new[id(node)] = value if same else Expr("cast", (value,), node.dtype)
    means = {j: (double, every[j].dtypes[1]) for j in gone.values()}
    reductions = tuple([replace(every[j], dtypes=means.get(j, every[j].dtypes)) for j in left])
    outputs = tuple(substituted(kernel.outputs, new))
    return replace(kernel, outputs=outputs, reductions=reductions)


# ---- the tree as numbered nodes


@dataclass(slots=True)
class _Node:
    op: str
    code: str
    args: tuple[int, ...]
    data: Any = None


#: Of what `_operation` gives the text for any types.
ANY_TYPE = frozenset(
    {"cast", "where", "taken", "real", "imag", "complex", "call", "bin", *LEAVES, *RANDOM}
)


def unwritten(kernel: Kernel) -> str | None:
    """What of a kernel there is no CUDA for; None where there is all.

    >>> from .expr import constant
    >>> unwritten(Kernel((), (Expr("nextafter", (constant(1, "f2"),) * 2, "f2"),)))
    'nextafter of float16, float16'
    """
    try:
        for node in nodes(kernel.roots):
            types, gives = [_code(a) for a in node.args], _code(node)
            if node.op in ANY_TYPE:
                continue
            if operation(node.op, types, gives, ["x"] * len(types)) is None:
                return f"{node.op} of {', '.join(a.dtype.name for a in node.args)}"
    except NotGenerated as error:
        return str(error)
    if kernel.counts:
        return _too_many(kernel.shape[0])
    for r in kernel.reductions:
        made = code(np.dtype(r.dtypes[0]))
        if made is None or accumulator(SCANS.get(r.op, r.op), _code(r.arg), made, "Part") is None:
            return f"{r.op} of {r.arg.dtype}"
    return None


def _too_many(bins: int) -> str | None:
    return f"a histogram of {bins:,} bins, more than {MOST_BINS:,}" if bins > MOST_BINS else None


def _code(expr: Expr) -> str:
    short = code(expr.dtype)
    if short is None:
        raise NotGenerated(f"{expr.op} of {expr.dtype}")
    return short


#: So many of these are looked at for two that are one.
MOST_CASES = 64
#: Conditions, and whether each holds.
_Case = frozenset[tuple[int, bool]]


def _fewest(cases: set[_Case]) -> set[_Case]:
    """The same cases without those inside others, and with one for two that differ in whether one
    condition holds."""
    found = set(cases)
    while 1 < len(found) <= MOST_CASES:
        both = next(
            (
                (case, other)
                for case in found
                for c, holds in case
                if (other := case - {(c, holds)} | {(c, not holds)}) in found
            ),
            None,
        )
        if both is None:
            break
        found = found - {*both} | {both[0] & both[1]}
    return {case for case in found if not any(other < case for other in found)}


class _Tree:
    """Equal nodes once, arguments first. What an input's load and a call depend on is its `guard`,
    a node (None where it happens always): a loop may have no end for arguments not meant for it."""

    def __init__(self, roots: Sequence[Expr], letter: str):
        self.letter = letter
        self.nodes: list[_Node] = []
        self._known: dict[Any, int] = {}
        self._anywhere: set[int] = set()  # what may be read at any point
        numbers: dict[int, int] = {}
        for expr in nodes(roots, lambda n: n.args[1:] if n.op == "taken" else n.args):
            if expr.op == "taken":
                numbers[id(expr)] = self._taken(expr, numbers[id(expr.args[1])])
                continue
            args = tuple(numbers[id(a)] for a in expr.args)
            op = expr.op
            if op in ("power", "float_power"):  # small exponents are part of the structure
                op, args = self._power(op, args)
            data = expr.data if expr.op != "constant" else self._word(expr)
            numbers[id(expr)] = self._add(op, _code(expr), args, data)
        self.roots = [numbers[id(r)] for r in roots]
        self.inputs = self._all("input")
        self.indices = self._all("index")
        self.calls = self._all("call")
        self.taken = self._all("taken")
        self.reads: list[bool] = []  # whether there is an input or a call below
        self.values: list[bool] = []  # ... or anything else that is not known from the index
        for n in self.nodes:
            below = any(self.reads[a] for a in n.args)
            self.reads.append(n.op in ("input", "call", "taken") or below)
            known = n.op not in RANDOM | {"input", "reduced", "call", "taken"}
            self.values.append(not known or any(self.values[a] for a in n.args))
        needs = self._guards(lambda c: not self.values[c])
        self.guards = {k: needs[k] for k in (*self.inputs, *self.calls)}
        if self.taken:  # these are not read ahead: a condition may depend on what is
            needs = self._guards(lambda c: True)
            self.guards.update({k: needs[k] for k in self.taken if k not in self._anywhere})
        if len(self.nodes) > MOST_STATEMENTS:
            raise NotGenerated(f"an expression of {len(self.nodes):,} operations")

    def _all(self, op: str) -> list[int]:
        return [k for k, n in enumerate(self.nodes) if n.op == op]

    def _word(self, expr: Expr) -> Any:
        """A constant's value; PLACEHOLDERs and NaNs come through bit by bit."""
        return expr.data

    def _power(self, op: str, args: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        base, exponent = (self.nodes[a] for a in args)
        if exponent.op == "constant" and base.code in ("f4", "f8") and exponent.code == base.code:
            value = np.frombuffer(exponent.data, exponent.code)[0]
            name = {3.0: "cube", 4.0: "fourth"}.get(float(value))
            if name:
                return name, args[:1]
        return op, args

    def _add(self, op: str, short: str, args: tuple[int, ...], data: Any = None) -> int:
        words = op, short, args, data
        if words not in self._known:
            self._known[words] = len(self.nodes)
            self.nodes.append(_Node(op, short, args, data))
        return self._known[words]

    def _taken(self, expr: Expr, number: int) -> int:
        """An element of an array at a place that is computed. The place is counted from where the
        array's view begins: that is part of the pointer."""
        array, view = expr.args[0].data
        if any(view.strides):
            evenly = self._add("index", "i8", (), View(0, view.strides))
            number = self._add("add", "i8", (evenly, number))
        found = self._add("taken", _code(expr), (number,), (array, View(view.offset, ())))
        if expr.data == ANYWHERE:
            self._anywhere.add(found)
        return found

    def _guards(self, known: Callable[[int], bool]) -> dict[int, int | None]:
        """The node that says whether each node is needed where it reads something; None for what
        always is. `known` are the conditions that count."""
        needs: list[set[_Case]] = [set() for _ in self.nodes]
        for r in self.roots:
            needs[r].add(frozenset())
        for k in range(len(needs) - 1, -1, -1):
            node = self.nodes[k]
            if not needs[k] or not self.reads[k]:
                continue
            mine = needs[k] = _fewest(needs[k])
            if node.op != "where" or not known(node.args[0]) or node.args[1] == node.args[2]:
                for a in node.args:
                    needs[a] |= mine
                continue
            c, *choices = node.args
            if self.reads[c]:
                needs[c] |= mine
            for choice, holds in zip(choices, (True, False), strict=True):
                if self.reads[choice]:
                    needs[choice] |= {case | {(c, holds)} for case in mine}
        return {k: self._any(found) for k, found in enumerate(needs)}

    def _any(self, cases: set[_Case]) -> int | None:
        """Whether one of these is given; None where that is so in any case."""
        out: int | None = None
        for case in sorted(cases, key=sorted):
            every: int | None = None
            for condition, holds in sorted(case):
                this = condition if holds else self._add("logical_not", "b1", (condition,))
                every = this if every is None else self._add("logical_and", "b1", (every, this))
            if every is None:
                return None
            out = every if out is None else self._add("logical_or", "b1", (out, every))
        return out

    def below(self, roots: Iterable[int], stop: Iterable[int] = ()) -> list[int]:
        """The nodes that `roots` need, ascending; not those that only `stop` needs."""
        out, stops, stack = set(), set(stop), list(roots)
        while stack:
            k = stack.pop()
            if k not in out:
                out.add(k)
                if k not in stops:
                    stack += self.nodes[k].args
        return sorted(out)


# ---- the iteration space


@dataclass(frozen=True, slots=True)
class Axis:
    """Some points in a row, and the strides of each layout along them."""

    length: int
    strides: tuple[int, ...]


def collapsed(axes: Iterable[Axis]) -> list[Axis]:
    """Fewer axes for the same points in the same order: none of length 1, and neighbours are one
    where all layouts go evenly from one to the next.

    >>> collapsed([Axis(4, (6,)), Axis(1, (5,)), Axis(3, (2,))])
    [Axis(length=12, strides=(2,))]
    >>> collapsed([Axis(4, (3, 0)), Axis(3, (1, 1))])
    [Axis(length=4, strides=(3, 0)), Axis(length=3, strides=(1, 1))]
    """
    out: list[Axis] = []
    for axis in axes:
        if axis.length == 1:
            continue
        if out and all(
            s == t * axis.length for s, t in zip(out[-1].strides, axis.strides, strict=True)
        ):
            out[-1] = Axis(out[-1].length * axis.length, axis.strides)
        else:
            out.append(axis)
    return out


class _Slots:
    """The arguments of one item, by what they are."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self._known: dict[Any, int] = {}

    def at(self, name: Any, value: int = 0) -> int:
        """The slot of that name, which has one value."""
        word = int(value) & (2**64 - 1)
        if name not in self._known:
            self._known[name] = len(self.words)
            self.words.append(word)
        found = self._known[name]
        assert self.words[found] == word, f"two values of {name}"
        return found

    def __contains__(self, name: Any) -> bool:
        return name in self._known


@dataclass(slots=True)
class _Site:
    """Where in the iteration space a piece of code is: what its coordinates are called."""

    coords: dict[tuple[str, int], str]  # group of axes and number in it
    linear: dict[str, str] = field(default_factory=dict)  # number of the point within its group


@dataclass(slots=True)
class _Slab:
    """Points, or vectors, that are found by their number i: how many, the argument that says so,
    statements that find the point's coordinates and its number among all, and what these are
    called."""

    points: int
    total: str
    found: list[str]
    names: list[str]
    number: str


@dataclass(slots=True)
class _Results:
    """How results of a reduction are made: what is declared first, a loop's body, and how often
    that is to run."""

    declared: list[str]
    work: list[str]
    units: int


class _Generator:
    def __init__(self, kernel: Kernel, aligned: bool, processors: int, writes: bool):
        self.kernel, self.aligned, self.processors = kernel, aligned, processors
        self.writes = writes  # whether its outputs begin at multiples of a vector
        self.width = self.times = 1  # elements side by side, and how many times over
        self.at_once = 1  # blocks that a multiprocessor shall have room for
        self.sliding = 0  # results of windows that a thread makes, one behind the other
        self.pane: Pane | None = None
        self.down_axis = -1  # along which the rows of a pane lie
        self.either: dict[int, Any] = {}  # see `_find_either`
        self.gone: set[int] = set()
        self.slots = _Slots()
        self.constants = 0  # among them
        self.pointers: dict[int, tuple[int, int]] = {}  # slot -> array number and offset
        self.scratch: tuple[int, int] | None = None
        self.counters: tuple[int, int] | None = None
        self.reducing, self.scanning = bool(kernel.reductions), kernel.scans
        self.structs: list[str] = []
        self.calls: dict[str, Call] = {}
        self.outs = [_code(o) for o in kernel.outputs]
        if self.reducing:
            self._reductions()
            self.final = _Tree(kernel.outputs, "f")
        else:
            self.evaluated = list(kernel.outputs)
            self.tree = self.final = _Tree(kernel.outputs, "v")
        self._interior()
        self._space()
        self._check()

    # ---- what is reduced

    def _reductions(self) -> None:
        roots = []
        self.kinds: list[tuple[str, str, list[str]]] = []  # operation, what it takes, results
        for j, r in enumerate(self.kernel.reductions):
            gives = []
            for d in r.dtypes:
                short = code(np.dtype(d))
                if short is None:
                    raise NotGenerated(f"{r.op} that gives {d}")
                gives.append(short)
            if r.op == "histogram":
                assert len(self.kernel.reductions) == 1
                if reason := _too_many(self.kernel.shape[0]):
                    raise NotGenerated(reason)
                roots.append(r.arg)
                self.kinds.append((r.op, "i8", gives))
                continue
            op = SCANS.get(r.op, r.op)
            found = accumulator(op, _code(r.arg), gives[0], f"Part{j}", r.op in SCANS)
            if found is None:
                raise NotGenerated(f"{r.op} of {r.arg.dtype}")
            text, takes = found
            self.structs.append(text)
            taken = r.arg if _code(r.arg) == takes else Expr("cast", (r.arg,), _dtype(takes))
            roots.append(taken)
            self.kinds.append((op, takes, gives))
        self.evaluated = roots
        self.tree = _Tree(roots, "v")

    def _interior(self) -> None:
        """Where conditions on indices guard loads, most points may lie where it is known which of
        them hold: there less is to be done."""
        self.core: _Tree | None = None
        # where only some axes are known to be in the core: a group of them, or the last one of a
        # group ("last") and the others of it ("others")
        self.partly: dict[str, _Tree] = {}
        self.apart: dict[str, _Tree] = {}
        self.within: list[tuple[int, int, int]] = []  # axis, first, length: where the core lies
        if self.scanning or all(g is None for g in self.tree.guards.values()):
            return
        found = interior(self.evaluated, self.kernel.shape)
        if found is None:
            return
        box, roots = found
        core = _Tree(roots, "c")
        if 2 * len(core.nodes) <= len(self.tree.nodes):
            self.core = core
            for k, ((low, high), n) in enumerate(zip(box, self.kernel.shape, strict=True)):
                if high - low < n:
                    self.within.append((k, low, high - low))

    def _within(self, group: str) -> list[tuple[int, int, int]]:
        """Where the core lies along some axes: the number of one, its first point and length."""
        return [x for x in self.within if x[0] in self.groups[group]]

    def _inside(self, site: _Site, groups: str = "kr") -> str:
        """Whether a point, or a vector that begins there, lies in the core along these axes."""
        checks = []
        for k, low, length in [x for group in groups for x in self._within(group)]:
            layout, width = self.axis_layout[k], self.width
            begins = max(length - self._fast(layout) * (width - 1), 0)
            checks.append(
                f"({self.count})({self._offset(layout, site)} - ({self.int})"
                f"{self.slot(('first', k), low)}) < {self.number(('within', k, width), begins)}"
            )
        return " && ".join(checks)

    @property
    def bodies(self) -> list[_Tree]:
        """What is evaluated at each point."""
        if self.scanning:
            return [self.tree, self.final]
        core = [self.core] if self.core is not None else []
        return list(dict.fromkeys([self.tree, *self.partly.values(), *self.apart.values(), *core]))

    @property
    def trees(self) -> list[_Tree]:
        return list(dict.fromkeys([*self.bodies, self.final]))

    # ---- axes

    def _space(self) -> None:
        """Sort the axes into those that are kept and those that are reduced, the fastest one of
        all last in its group, and merge what can be merged."""
        kernel, rank = self.kernel, len(self.kernel.shape)
        axes = set(kernel.axes) if self.reducing else set()
        kept = [k for k in range(rank) if k not in axes]
        over = [k for k in range(rank) if k in axes]
        self.layouts: dict[tuple[int, ...], int] = {}
        self.moved: set[int] = set()  # layouts of memory, not of indices alone
        self.layout_of: dict[tuple[str, int], int] = {}  # letter and node

        def layout(strides: Sequence[int], memory: bool) -> int:
            n = self.layouts.setdefault(tuple(strides), len(self.layouts))
            if memory:
                self.moved.add(n)
            return n

        for tree in self.trees:
            for k in (*tree.inputs, *tree.indices):
                strides = self._leaf_strides(tree, k, kept)
                self.layout_of[tree.letter, k] = layout(strides, tree.nodes[k].op == "input")
        self.axis_layout = {
            k: layout([int(a == k) for a in range(rank)], False) for k, _, _ in self.within
        }
        self.points = math.prod(kernel.shape[k] for k in kept)
        self.reach = math.prod(kernel.shape[k] for k in over)
        last, order = self._fastest(kept, over)
        panes = self._panes(kept, over)
        slides = self._slides(kept, over, last) if panes is None else None
        if panes is not None:
            last = panes[-1][0]
        if slides is not None:
            order = [slides[1], *[k for k in order if k != slides[1]]]
        if self.sliding:
            self.core, self.within, self.axis_layout = None, [], {}
        self.out_layout = -1  # where outputs lie one behind the other
        if kernel.strides is not None:
            assert self.scanning or not self.reducing
            self.out_layout = layout(kernel.strides, True)
        elif self.reducing:
            whole = range(rank) if self.scanning else kept
            self.out_layout = layout(_counting(kernel.shape, whole), True)
        if any(r.op in ("argmin", "argmax") for r in kernel.reductions):
            self.position = layout(_counting(kernel.shape, over), False)
        layouts = list(self.layouts)
        self.rows = last in over or not kept or self.points == 1 or kernel.counts
        self.groups = {"k": kept, "r": order}
        if last in kept:
            self.groups["k"] = [*[k for k in kept if k != last], last]
        self.axes: dict[str, list[Axis]] = {}
        for name, ks in self.groups.items():
            if 0 in (kernel.shape[k] for k in ks):
                self.axes[name] = [Axis(0, (0,) * len(layouts))]
            else:
                every = [Axis(kernel.shape[k], tuple(s[k] for s in layouts)) for k in ks]
                self.axes[name] = collapsed(every)
        self.along = "r" if self.reducing and self.rows else "k"
        self._tiles()
        self._width()
        if slides is not None:
            self._slide(slides)
        if panes is not None:
            self._lie_in_panes(panes)
        if self.sliding:
            self._find_either()
        self._panels()
        self._small()

    def _may_slide(self) -> list[tuple[int, ...]] | None:
        """The layouts of all that is reduced, where it may be put together in parts."""
        orders = any(r.op in ("argmin", "argmax", "histogram") for r in self.kernel.reductions)
        tree = self.tree
        if not self.reducing or self.scanning or orders or tree.taken or tree.calls:
            return None
        if len(tree.nodes) > MOST_SLIDING_NODES or not self.points:
            return None
        every = {self.layout_of[tree.letter, k] for k in (*tree.inputs, *tree.indices)}
        return [s for s, n in self.layouts.items() if n in every]

    def _panes(self, kept: list[int], over: list[int]) -> list[tuple[int, int]] | None:
        """The axes along which windows slide and reach, where one of them, the last, is that along
        which elements lie one behind the other, and that before it that down which columns lie, if
        there are any: what is reduced goes to shared memory."""
        layouts, shape = self._may_slide(), self.kernel.shape
        over = [r for r in over if shape[r] > 1]
        if layouts is None or not over or self.points < LEAST_IN_PANES:
            return None
        pairs, rest = [], []
        for r in over:
            along = [a for a in kept if all(s[a] == s[r] for s in layouts)]
            if along and any(s[r] for s in layouts):
                pairs.append((along[0], r))
            else:
                rest.append(r)
        memory = {n for k in self.tree.inputs for n in [self.layout_of[self.tree.letter, k]]}
        inputs = [s for s, n in self.layouts.items() if n in memory]
        fast = [(a, r) for a, r in pairs if any(abs(s[a]) == 1 for s in inputs)]
        if len(fast) != 1 or len({a for a, _ in pairs}) < len(pairs):
            return None
        # what lies in a column is put together first: of the longest windows
        slow = sorted([p for p in pairs if p not in fast], key=lambda p: (shape[p[1]], p[0]))
        pairs = [*slow, *fast]
        self._choose_pane(kept, pairs, rest)
        self.sliding = 0 if self.pane is None else self.pane.some
        return None if self.pane is None else pairs

    def _choose_pane(self, kept: list[int], pairs: list[tuple[int, int]], rest: list[int]) -> None:
        """A box where windows slide down columns, too, if there is room, or a pane where there is
        nothing else."""
        shape, (a, r) = self.kernel.shape, pairs[-1]
        if len(pairs) > 1:
            rows, down = pairs[-2][0], shape[pairs[-2][1]]
        else:
            others = [k for k in kept if k != a and shape[k] > 1]
            rows, down = others[-1] if others else -1, 1
        high = shape[rows] if rows >= 0 else 1
        windows = panes.Windows(
            along=shape[a], rows=high, planes=self.points // (shape[a] * high), window=shape[r],
            down=down, deep=math.prod(shape[k] for k in (*rest, *[r for _, r in pairs[:-2]])),
            made=sum(_held_size(g) for _, _, gives in self.kinds for g in gives),
            moments=any(op == "moment" for op, _, _ in self.kinds),
        )  # fmt: skip
        if len(pairs) > 1:
            held = words = 0
            for j, kind in enumerate(self.kinds):
                if own := len(self._members(j)):
                    held += 8 * own
                    words += 2 * (own - own // len(MOMENT))  # all deviate from the same
                else:
                    held += _part_size(*kind)
                    words += _part_size(*kind) // 4
            reads = 8 + sum(_cost(n) for n in self.tree.nodes)
            self.pane = panes.box(windows, held, words, reads, self.processors)
        if self.pane is None and not rest and len(pairs) <= 2:
            values = {root: _held_size(short) for root, (_, short, _) in
                      zip(self.tree.roots, self.kinds, strict=True)}  # fmt: skip
            self.pane = panes.pane(windows, sum(values.values()), self.processors)
        self.down_axis = rows

    def _lie_in_panes(self, pairs: list[tuple[int, int]]) -> None:
        """Put the axes that panes lie along last."""
        assert self.pane is not None
        (a, r), rows, layouts = pairs[-1], self.down_axis, list(self.layouts)

        def axis(k: int) -> Axis:
            if k < 0:
                return Axis(1, (0,) * len(layouts))
            return Axis(self.kernel.shape[k], tuple(s[k] for s in layouts))

        self.width, self.times, self.at_once = 1, 4, 1
        within = self._core_of_panes(pairs)
        others = [k for k in self.groups["k"] if k not in (a, rows)]
        places = {k: n for n, k in enumerate([*others, rows, a])}
        every = [axis(k) for k in others]
        if not any(k in within for k in others):
            every = collapsed(every)
            places = {rows: len(every), a: len(every) + 1}
        self.within_panes = {places[k]: bounds for k, bounds in within.items()}
        self.axes["k"] = [*every, axis(rows), axis(a)]
        self.axes["r"] = [axis(r)]
        if isinstance(self.pane, Box):
            gone = {r for _, r in pairs[-2:]}
            self.axes["r"] = collapsed(axis(k) for k in self.groups["r"] if k not in gone)

    def _core_of_panes(self, pairs: list[tuple[int, int]]) -> dict[int, tuple[int, int, int]]:
        """Where it is known of all points of a pane what is chosen there by position: that and
        whether there are such points is not asked of each then. By axis the first one and the end
        of these points, and how many of them a pane has."""
        assert self.pane is not None
        shape = list(self.kernel.shape)
        for a, r in pairs:
            shape[a], shape[r] = shape[a] + shape[r] - 1, 1
        box, roots = interior(self.evaluated, tuple(shape)) or (None, self.evaluated)
        box = box or tuple([(0, n) for n in shape])
        core = _Tree(roots, "c")
        rows, along = self.down_axis, pairs[-1][0]
        reaches = {a: self.kernel.shape[r] for a, r in pairs}
        cut = [k for k, n in enumerate(shape) if k not in (rows, along) and box[k] != (0, n)]
        leaves = {k: self._leaf_strides(core, k, ()) for k in (*core.inputs, *core.indices)}
        if any(k not in reaches for k in cut) or not all(
            s in self.layouts for s in leaves.values()
        ):
            return {}
        self.core = core
        self.layout_of |= {(core.letter, k): self.layouts[s] for k, s in leaves.items()}
        within = {along: (*box[along], self.pane.wide)} | {k: (*box[k], reaches[k]) for k in cut}
        return within if rows < 0 else within | {rows: (*box[rows], self.pane.high)}

    def _find_either(self) -> None:
        """Values that are one of several inputs, by what is known from the index: such a one is a
        single load, from a place that is chosen. `either` has the conditions and inputs of each
        (condition, one, other), by the first of the inputs and by the node, which has then what
        that input has; `gone` are the other nodes that nobody wants any longer."""
        tree = self.tree
        uses = [0] * len(tree.nodes)
        for n in tree.nodes:
            for a in n.args:
                uses[a] += 1
        for root in tree.roots:
            uses[root] += 1

        def known(op: str, *args: int) -> int:
            return tree._known.get((op, "b1", args, None), -1)

        def both(guard: int | None, condition: int) -> int:
            return condition if guard is None else known("logical_and", guard, condition)

        def of(k: int, guard: int | None, leaves: list[int], wheres: list[int]) -> Any:
            node = tree.nodes[k]
            if node.op == "input" and uses[k] == 1 and tree.guards[k] == guard:
                leaves.append(k)
                return k
            if node.op != "where" or tree.values[node.args[0]] or (wheres and uses[k] > 1):
                return None
            wheres.append(k)
            c, a, b = node.args
            one = of(a, both(guard, c), leaves, wheres)
            other = of(b, both(guard, known("logical_not", c)), leaves, wheres)
            return None if one is None or other is None else (c, one, other)

        for k in range(len(tree.nodes) - 1, -1, -1):
            leaves: list[int] = []
            wheres: list[int] = []
            if k in self.gone or tree.nodes[k].op != "where":
                continue
            found = of(k, None, leaves, wheres)
            if found is not None and len({self._kind(tree, n) for n in leaves}) == 1:
                self.either[k] = self.either[leaves[0]] = found
                self.gone |= {*leaves[1:], *wheres[1:]}

    def _slides(self, kept: list[int], over: list[int], last: int) -> tuple[int, int] | None:
        """The axes along which windows slide and reach, where there are any, and how many results
        a thread makes along the first (`sliding`): those along which all that is reduced goes
        alike."""
        layouts, shape = self._may_slide(), self.kernel.shape
        if layouts is None or last not in kept:
            return None
        found = [
            (shape[r], a, r)
            for a in kept
            for r in over
            if a != last and all(s[a] == s[r] for s in layouts) and any(s[a] for s in layouts)
        ]
        window, a, r = max(found, default=(0, -1, -1))
        room = self._sliding_room()
        some = _power_below(min(MOST_SLIDING, window, shape[a], room))
        if not found or some < LEAST_SLIDING:
            return None
        self.sliding = some
        return a, r

    def _sliding_room(self) -> int:
        """Results that a thread may have, so that there are enough threads."""
        return self.points // (SLIDING_THREADS * self.processors)

    def _slide(self, slides: tuple[int, int]) -> None:
        """Put the axis along which windows slide before the last one, of which a part goes in a
        tile, so that threads which read the same do so at the same time."""
        a, r = slides
        layouts, shape = list(self.layouts), self.kernel.shape
        words = 0  # that each part has of its own
        for op, short, gives in self.kinds:
            words += _part_size(op, short, gives) // (8 if op == "moment" else 4)
        room = self._sliding_room()
        self.width = min(self.width, 4 if self.sliding == LEAST_SLIDING else 2)

        def fits(some: int, width: int) -> bool:
            registers = (some - 1) * width * words <= SLIDING_WORDS
            text = 2 * some * width * len(self.tree.nodes) <= SLIDING_STATEMENTS
            return registers and text and some * width <= room

        while self.width > 1 and not fits(self.sliding, self.width):
            self.width //= 2
        while self.sliding > LEAST_SLIDING and not fits(self.sliding, self.width):
            self.sliding //= 2
        self.times = 4 if self.sliding == LEAST_SLIDING else 8
        self.at_once = 1

        def axis(k: int) -> Axis:
            return Axis(shape[k], tuple(s[k] for s in layouts))

        *others, fast = collapsed(axis(k) for k in self.groups["k"] if k != a)
        part = fast.length
        if part > SLIDING_TILE:
            tiles = range(self.width, SLIDING_TILE + 1, self.width)
            found = max([n for n in tiles if part % n == 0], default=0)
            part = found if found >= 32 else part
        if part < fast.length:
            others.append(Axis(fast.length // part, tuple([s * part for s in fast.strides])))
        self.axes["k"] = [*others, axis(a), Axis(part, fast.strides)]
        self.axes["r"] = [axis(r), *collapsed(axis(k) for k in self.groups["r"] if k != r)]

    def _leaf_strides(self, tree: _Tree, k: int, kept: Sequence[int]) -> tuple[int, ...]:
        """The strides of a leaf along all axes, of which the outputs of a reduction have `kept`."""
        node, shape = tree.nodes[k], self.kernel.shape
        view: View = node.data[1] if node.op == "input" else node.data
        strides = list(view.strides)
        if self.reducing and tree is self.final and not self.scanning:
            spread = [0] * len(shape)
            for a, s in zip(kept, strides, strict=True):
                spread[a] = s
            strides = spread
        # along an axis of one point a stride means nothing
        return tuple([0 if n == 1 else s for n, s in zip(shape, strides, strict=True)])

    def _fastest(self, kept: list[int], over: list[int]) -> tuple[int, list[int]]:
        """The axis that threads lie along, and the order of the reduced ones."""
        shape = self.kernel.shape
        if not self.reducing:
            return (kept[-1] if kept else -1), []
        if self.scanning:  # along which it writes
            return max([k for k, n in enumerate(shape) if n > 1], default=over[-1]), over
        weights = dict.fromkeys(range(len(shape)), 0.0)
        dominant: tuple[int, ...] | None = None
        most = -1
        for tree_node in self.tree.inputs:
            node = self.tree.nodes[tree_node]
            strides = list(self.layouts)[self.layout_of[self.tree.letter, tree_node]]
            covered = math.prod(n for n, s in zip(shape, strides, strict=True) if s)
            for k, s in enumerate(strides):
                if abs(s) == 1:  # so many bytes lie one behind the other along it
                    weights[k] += int(node.code[1:]) * covered
            if covered > most:
                dominant, most = strides, covered
        for tree_node in self.tree.taken:
            strides = self._strides_beside(tree_node)
            for k, s in enumerate(strides):
                if abs(s) == 1:
                    weights[k] += int(self.tree.nodes[tree_node].code[1:]) * math.prod(shape)
            if math.prod(shape) > most:
                dominant, most = strides, math.prod(shape)
        long = [k for k in range(len(shape)) if shape[k] > 1]
        if not long:
            return (over[-1] if over else kept[-1] if kept else -1), over
        last = max(long, key=lambda k: (weights[k], k))
        if dominant is not None:
            steps = dominant
            over = sorted(over, key=lambda k: (-abs(steps[k]) if steps[k] else -(2**62), k))
        if last in over:
            over = [*[k for k in over if k != last], last]
        return last, over

    def _strides_beside(self, k: int) -> tuple[int, ...]:
        """The strides of an element that is taken, but for what its number is computed of."""
        place = self.tree.nodes[self.tree.nodes[k].args[0]]
        first = place.args[0] if place.op == "add" else self.tree.nodes[k].args[0]
        if self.tree.nodes[first].op != "index":
            return (0,) * len(self.kernel.shape)
        return list(self.layouts)[self.layout_of[self.tree.letter, first]]

    def _strides(self, layout: int, group: str) -> list[int]:
        return [a.strides[layout] for a in self.axes[group]]

    def _fast(self, layout: int) -> int:
        """The stride along the axis that threads lie along."""
        strides = self._strides(layout, self.along)
        return strides[-1] if strides else 0

    def _tiles(self) -> None:
        """Whether to go in tiles: a leaf lies along another axis than its readers."""
        self.turned: set[int] = set()  # layouts that are read turned around
        group = "r" if self.reducing else "k"
        axes = self.axes[group]
        self.across = -1
        if len(axes) < 2 or (self.reducing and self.axes["k"]) or axes[-1].length < 16:
            return
        votes: dict[int, list[int]] = {}
        for k in self.tree.inputs:
            layout = self.layout_of[self.tree.letter, k]
            strides = self._strides(layout, group)
            fast = min((a for a, s in enumerate(strides) if s), default=-1,
                       key=lambda a: (abs(strides[a]), -a))  # fmt: skip
            if fast in (-1, len(axes) - 1) or axes[fast].length < 16 or abs(strides[fast]) > 4:
                continue
            if abs(strides[-1]) >= 8:
                votes.setdefault(fast, []).append(layout)
        if votes:
            self.across = max(votes, key=lambda a: (len(votes[a]), a))
            self.turned = set(votes[self.across])
            self.core, self.within = None, []

    def _width(self) -> None:
        """How many elements a thread takes side by side, and how many times over."""
        tree = self.tree
        every = [(body, k) for body in self.bodies for k in body.inputs]
        axes = self.axes[self.along]
        length = axes[-1].length if axes else 1
        sizes = [_size(c) for c in self.outs] if self.scanning or not self.reducing else []
        if self.reducing and not self.rows and self._fast(self.out_layout) == 1:
            sizes += [max(_size(c), 4) for c in self.outs]
        plain = self.across < 0 and self.aligned
        if self.kernel.strides is not None:
            plain = plain and self._fast(self.out_layout) == 1
        for body, k in every:
            step = self._fast(self.layout_of[body.letter, k])
            if step == 1:
                sizes.append(_size(body.nodes[k].code))
            plain = plain and step in (0, 1) and not self._varies(body, body.guards[k])
        plain = plain and not any(self._fast(n) for n in self.axis_layout.values())
        draws = [n for n in tree.nodes if n.op in RANDOM]
        if not sizes or (draws and not tree.inputs and self.reducing):
            sizes = [4 if any(n.code == "f4" for n in draws) else 8]
        width = max(1, min(8, 16 // min(sizes))) if plain else 1
        while width > 1 and not (length % width == 0 and self._even(width)):
            width //= 2
        most = tree if self.core is None else self.core  # where most points are
        cost = sum(_cost(n) for n in most.nodes)
        while width > 2 and width * len(tree.nodes) > MOST_STATEMENTS // 8:
            width //= 2
        while not tree.calls and width > 1 and width * cost > MOST_COST:
            width //= 2
        if tree.calls:  # each is there as often as a thread has elements, to be compiled anew
            again = any(tree.nodes[k].data[0].repeats for k in tree.calls)
            width = 1 if again else min(width, 4)  # loops do not run side by side
        columns = self.reducing and not self.rows and self.across < 0
        if columns and self.scanning and self.points // width < MANY_COLUMNS:
            width = 1  # or too few threads have a column
        columns = columns and not self.scanning
        moments = columns and any(r.op == "moment" for r in self.kernel.reductions)
        many = moments and width >= 4 and self.points >= MANY_COLUMNS and cost < 16
        if moments:  # each column keeps much in registers
            width = min(width, 4 if many else 2)
        self.width = width
        # three blocks at least on each multiprocessor, or too few loads are under way
        self.at_once = 2 if many else 3 if columns else 1
        each = sum(
            _size(most.nodes[k].code) * (width if self._fast(self.layout_of[most.letter, k]) else 1)
            for k in most.inputs
        )
        deep = columns or (self.scanning and width == 1)
        times = 8 if many or (deep and each <= 8) else 4
        while times > 1 and (times * each > (128 if many else 64) or times * width * cost > 512):
            times //= 2
        self.times = times if tree.inputs else 1
        #: Whether inputs are loaded where they are used, and not all of them before.
        self.late = each > LATE_BYTES and self.core is None and self.across < 0
        self.late = self.late and not (columns or self.scanning)
        self.late = self.late and all(tree.guards[k] is None for k in tree.inputs)
        if self.late:
            self.width = self.times = 1
        #: Whether vectors are written of what is read one by one.
        self.loose = self.width == 1 and not self.late and self._may_be_loose(cost)
        if self.loose:
            self.width, self.times = self._loose_width(), 1
            each *= self.width
            self.at_once = min(self.at_once, 2) if each <= 2 * FEW_BYTES else 1
            room = each <= FEW_BYTES < 4 * len(tree.inputs) and self.core is not None
            if room and not columns and self.points > 1:
                self.at_once = 4  # registers are for the core: what is beyond it may spill
            self._take_apart()
        else:
            self.partly = {}

    def _may_be_loose(self, cost: int) -> bool:
        """Whether threads take neighbours side by side although what they read does not begin at
        multiples of a vector, or ends within one: edges and shifts. They read it one by one then,
        each element once, and write vectors."""
        if self.across >= 0 or cost > LOOSE_COST or self.scanning or self.kernel.counts:
            return False
        if self.sliding:
            return False
        main, axes = self.bodies[-1], self.axes[self.along]
        if any(n.op in (*RANDOM, "taken", "call") for tree in self.bodies for n in tree.nodes):
            return False
        if not main.inputs or not axes or axes[-1].length < LOOSE_LEAST:
            return False
        sizes = [_size(c) for c in self.outs]
        if self.reducing:
            often = len(main.inputs) >= OFTEN * len({main.nodes[k].data[0] for k in main.inputs})
            fits = (often or self.core is not None) and self.points * self.reach > MANY_STEPS
            fits = fits and (self.rows or self.writes) and self._may_leave_the_core()
        elif self.out_layout >= 0:
            fits = self._even_rows(self._loose_width())
        else:
            fits = not any(n * self.points <= CLOSE and n * self.points % 16 for n in sizes)
        if not fits or not (self.reducing or (self.writes and max(sizes) <= 8)):
            return False
        return all(
            abs(self._fast(self.layout_of[main.letter, k])) <= 1 and main.guards[k] is None
            for k in main.inputs
        )

    def _may_leave_the_core(self) -> bool:
        """Whether a reduction's results, or what is reduced, may lie beyond the core along some
        axes while vectors lie in it along the others: with the bodies `partly`."""
        along, across = ("r", "k") if self.rows else ("k", "r")  # vectors lie along the first
        for group in (along, across) if self._within(across) else ():
            if group != along and not self._within(along):
                continue  # no point of these lies beyond the core along the others
            tree = self._settled(self._within(group), {"k": "a", "r": "b"}[group])
            self.partly[group] = tree
            if group == along and not self._side_by_side(tree):
                return False
        return True

    def _settled(self, within: Iterable[tuple[int, int, int]], letter: str) -> _Tree:
        """What is evaluated where points are known to be in the core along some axes."""
        box = [(0, n) for n in self.kernel.shape]
        for k, low, length in within:
            box[k] = low, low + length
        tree = _Tree(settled(self.evaluated, tuple(box)), letter)
        for k in (*tree.inputs, *tree.indices):
            self.layout_of[letter, k] = self.layouts[self._leaf_strides(tree, k, ())]
        return tree

    def _side_by_side(self, tree: _Tree) -> bool:
        """Whether a tree's inputs can be read for the points of a vector at once."""
        return all(
            abs(self._fast(self.layout_of[tree.letter, k])) <= 1
            and not self._varies(tree, tree.guards[k])
            for k in tree.inputs
        )

    def _take_apart(self) -> None:
        """Points beyond the core are of three kinds, where vectors lie in rows: those that are in
        it along the last axis, and come as vectors; those that are in it along all others; and the
        few that are left."""
        down = self.reducing and not self.rows
        if self.core is None or self.partly or down or not self._even_vectors():
            return
        within, last = self._within(self.along), self._fast_axis()
        fast, others = [x for x in within if x[0] == last], [x for x in within if x[0] != last]
        tree = self._settled(fast, "a") if fast else self.tree
        if not others or not self._side_by_side(tree):
            return
        self.apart = {"last": tree}
        if fast or self.axes[self.along][-1].length % self.width:
            self.apart["others"] = self._settled(others, "b")

    def _fast_axis(self) -> int:
        """The kernel's axis that vectors lie along, if the core ends along it; or -1."""
        return next((k for k, n in self.axis_layout.items() if self._fast(n)), -1)

    def _by_row(self) -> bool:
        """Whether vectors that are read anyhow begin with each row of the output."""
        return self.along == "k" and self.out_layout >= 0 and not self.reducing

    def _even_vectors(self) -> bool:
        """Whether vectors that are read anyhow lie in rows, of which the last may not be whole."""
        return self._by_row() or self.axes[self.along][-1].length % self.width == 0

    def _loose_width(self) -> int:
        main, columns = self.bodies[-1], self.reducing and not self.rows
        sizes = [_size(main.nodes[k].code) for k in main.inputs]
        sizes += [_size(c) for c in self.outs if columns or not self.reducing]
        width = max(2, min(4, 16 // max(sizes)))
        if columns:  # each thread has the results of a vector
            if any(r.op == "moment" for r in self.kernel.reductions):
                width = min(width, 2)
            length = self.axes["k"][-1].length
            even = max(sizes) <= 8 and self._fast(self.out_layout) == 1
            while width > 1 and not (even and length % width == 0 and self._even_rows(width)):
                width //= 2
        return width

    def _panels(self) -> None:
        """Go through all rows of a part of the columns, then of the next part, where each row reads
        what is the same in all: of so many columns that this stays in a multiprocessor's cache."""
        axes, tree = self.axes["r"], self.tree
        whole = self.reducing and self.points == 1 and not (self.scanning or self.kernel.counts)
        if not whole or self.across >= 0 or len(axes) < 2 or axes[0].length == 0 or self.loose:
            return
        odd = any(n.op in (*RANDOM, "taken") for n in tree.nodes)
        if odd or any(tree.guards[k] is not None for k in tree.inputs):
            return
        each = 0  # bytes of a column that all rows read
        for k in tree.inputs:
            *others, last = self._strides(self.layout_of[tree.letter, k], "r")
            each += _size(tree.nodes[k].code) * bool(last and not any(others))
        columns = axes[-1].length
        if each * columns <= KEPT_BYTES:
            return
        unit = max(self.width, 2)
        most = KEPT_BYTES // each // unit * unit
        for part in range(most, LEAST_COLUMNS - 1, -unit):
            if columns % part == 0:
                fast = axes[-1].strides
                far = Axis(columns // part, tuple([s * part for s in fast]))
                self.axes["r"] = [far, *axes[:-1], Axis(part, fast)]
                return

    def _varies(self, tree: _Tree, condition: int | None) -> bool:
        """Whether a condition on indices may differ between neighbours along the fastest axis."""
        return condition is not None and any(
            tree.nodes[k].op == "index" and self._fast(self.layout_of[tree.letter, k])
            for k in tree.below([condition])
        )

    def _even(self, width: int) -> bool:
        """Whether such vectors begin at multiples of what is loaded at a time."""
        every = [(body, k) for body in self.bodies for k in body.inputs]
        even = all(
            self._fast(self.layout_of[tree.letter, k]) != 1 or self._read_evenly(tree, k, width)
            for tree, k in every
        )
        return even and (self.kernel.strides is None or self._even_rows(width))

    def _read_evenly(self, tree: _Tree, k: int, width: int) -> bool:
        """Whether vectors that begin at multiples along the fastest axis do so in an input, where
        elements lie one behind the other along that axis."""
        layout, node = self.layout_of[tree.letter, k], tree.nodes[k]
        size = _size(node.code)
        others = self._strides(layout, "k") + self._strides(layout, "r")
        others.remove(1)
        steps = (*others, node.data[1].offset)
        return not any(s * size % min(16, width * size) for s in steps)

    def _begins_evenly(self, tree: _Tree, k: int) -> bool:
        """The same of one of those inputs that are read anyhow."""
        if not self.aligned or self._fast(self.layout_of[tree.letter, k]) != 1:
            return False
        axes = self.axes[self.along]
        rows = len(axes) == 1 or self._even_vectors()
        return rows and self._read_evenly(tree, k, self.width)

    def _even_rows(self, width: int) -> bool:
        """Whether each row of the outputs begins at a multiple of such a vector."""
        others = self._strides(self.out_layout, "k") + self._strides(self.out_layout, "r")
        if self._fast(self.out_layout) != 1:
            return False
        others.remove(1)
        sizes = [_size(c) for c in self.outs]
        return not any(s * n % min(16, width * n) for n in sizes for s in others)

    def _small(self) -> None:
        """Whether 32 bits are enough to count points and elements."""
        furthest = max(self.points, self.reach)
        for n in self.moved:
            span = sum(
                abs(a.strides[n]) * (a.length - 1) for axes in self.axes.values() for a in axes
            )
            furthest = max(furthest, span)
        self.small = furthest < SMALL
        self.int = "int" if self.small else "long long"
        self.count = "unsigned" if self.small else "unsigned long long"

    def _check(self) -> None:
        for tree in self.trees:
            for k, node in enumerate(tree.nodes):
                if node.op == "reduced" and self.reducing and tree is not self.final:
                    raise NotGenerated("a reduced value below a reduction")
                if node.op not in ("input", "index", "constant", "reduced", *RANDOM):
                    self._operation(tree, k)
                elif node.op in RANDOM and self._draw(node) is None:
                    raise NotGenerated(f"{node.op} of {_dtype(node.code)}")

    # ---- values

    def slot(self, name: Any, value: int = 0) -> str:
        return f"S({self.slots.at(name, value)})"

    def number(self, name: Any, value: int) -> str:
        """An argument that counts."""
        return f"({self.count}){self.slot(name, value)}"

    def _constant(self, node: _Node) -> str:
        value, name = (
            np.frombuffer(node.data, _dtype(node.code)),
            ("constant", node.code, node.data),
        )
        if node.code == "b1":
            return f"{self.slot(name, int(value[0]))} != 0"
        if node.code[0] in "iu":
            return f"({TYPES[node.code]}){self._whole(name, int(value[0]))}"
        if node.code in ("f2", "f4"):
            return self._float(name, value.astype("f4"))
        if node.code == "f8":
            return self._float(name, value)
        parts = enumerate(value.view("f4" if node.code == "c8" else "f8"))
        words = [self._float((name, n), part) for n, part in parts]
        return f"{TYPES[node.code]}{{{', '.join(words)}}}"

    def _whole(self, name: Any, value: int) -> str:
        """The same; places that are filled in later are large and stay arguments."""
        if name in self.slots or self.constants < MOST_CONSTANTS or abs(value) >= 2**31:
            self.constants += name not in self.slots
            return self.slot(name, value)
        return f"({value})"

    def _float(self, name: Any, value: Any) -> str:
        """An argument, so that other numbers need no other kernel; of very many, part of the
        text."""
        bits = int(value.view(f"u{value.itemsize}").item())
        if name in self.slots or self.constants < MOST_CONSTANTS:
            self.constants += name not in self.slots
            word = self.slot(name, bits)
        else:
            word = f"0x{bits:x}"
        if value.itemsize == 4:
            return f"__int_as_float((int){word})"
        return f"__longlong_as_double((long long){word})"

    def _operation(self, tree: _Tree, k: int) -> str:
        """The text of a node that is no leaf."""
        node = tree.nodes[k]
        args = [f"{tree.letter}{a}" for a in node.args]
        types = [tree.nodes[a].code for a in node.args]
        if node.op == "cast":
            return cast(types[0], node.code, args[0])
        if node.op == "where":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if node.op == "call":
            return f"of_{self._call(node, types)}({', '.join(args)})"
        if node.op == "taken":
            return loaded(node.code, f"p{tree.letter}{k}[{args[0]}]")
        if node.op in ("real", "imag"):
            if types[0][0] != "c":
                return args[0] if node.op == "real" else f"({TYPES[node.code]})0"
            return f"{args[0]}.{'x' if node.op == 'real' else 'y'}"
        if node.op == "complex":
            return f"{TYPES[node.code]}{{{args[0]}, {args[1]}}}"
        if node.op == "bin":
            return self._bin(node.data, args[0])
        text = operation(node.op, types, node.code, args)
        if text is None:
            names = ", ".join(_dtype(t).name for t in types)
            raise NotGenerated(f"{node.op} of {names}")
        return text

    def _bin(self, bins: Bins, value: str) -> str:
        """The number of a value's bin. Edges that lie evenly are arguments, others are part of the
        text."""
        real, edges = TYPES[bins.code], bins.edges
        count = f"(int){self.slot(('bins', bins), len(bins))}"
        if bins.even:
            words = {"first": edges[0], "step": bins.step, "last": edges[-1]}
            given = [
                "__longlong_as_double((long long)"
                f"{self.slot((name, bins), int(np.float64(x).view('u8')))})"
                for name, x in words.items()
            ]
            return f"even_bin<{real}>({value}, {', '.join(given)}, {count})"
        name = f"edges_{hashlib.sha256(bins.words).hexdigest()[:12]}_{bins.code}"
        if not any(name in s for s in self.structs):
            numbers = ", ".join(_literal(x) for x in edges)
            self.structs.append(f"__device__ const {real} {name}[] = {{{numbers}}};")
        return f"bin_among<{real}>({value}, {name}, {count})"

    def _call(self, node: _Node, types: list[str]) -> str:
        """The symbol of a function that is called."""
        function, part = node.data
        if "f2" in (*types, node.code):
            raise NotGenerated(f"{function.name} of float16")
        item = [] if part is None else [f"item{part}"]
        symbol = "_".join(["f", function.digest[:16], *types, "gives", node.code, *item])
        self.calls[symbol] = Call(symbol, function, part, tuple(types), node.code)
        return symbol

    @staticmethod
    def _draw(node: _Node) -> str | None:
        """The function that makes a random number of its bits."""
        known = {("bits", "u8"), ("uniform", "f8"), ("uniform", "f4"), ("normal", "f8"),
                 ("normal", "f4")}  # fmt: skip
        return f"{node.code}_{node.op}" if (node.op, node.code) in known else None

    def _times(self, coordinate: str, stride: int, name: Any, wide: bool) -> str:
        kind = "long long" if wide else self.int
        text = coordinate if kind == "int" else f"(long long){coordinate}"
        return text if stride == 1 else f"{text} * ({kind}){self.slot(name, stride)}"

    def _offset(self, layout: int, site: _Site, wide: bool = False) -> str:
        """The number that a layout gives, from its own first one on."""
        terms = []
        for group, axes in self.axes.items():
            strides = [a.strides[layout] for a in axes]
            if not any(strides):
                continue
            even = all(
                s == t.strides[layout] * t.length for s, t in zip(strides, axes[1:], strict=False)
            )
            last = len(axes) - 1
            if even and group in site.linear:
                name = "stride", layout, group, last
                terms.append(self._times(f"({site.linear[group]})", strides[-1], name, wide))
                continue
            for a, s in enumerate(strides):
                if s:
                    name = "stride", layout, group, a
                    terms.append(self._times(f"({site.coords[group, a]})", s, name, wide))
        return " + ".join(terms) or "0"

    def _position(self, tree: _Tree, k: int, site: _Site) -> str:
        """The value of an index leaf."""
        offset = self.slot(("offset", tree.letter, k), tree.nodes[k].data.offset)
        layout = self.layout_of[tree.letter, k]
        return f"(long long){offset} + {self._offset(layout, site, wide=True)}"

    def _coordinates(self, group: str, lengths: Sequence[int], linear: str, letter: str,
                     unit: int = 1, name: str = "") -> tuple[list[str], list[str]]:  # fmt: skip
        """Statements that split the number of a point, and what the coordinates are then called.
        The last one counts in `unit`s."""
        lines, names = [], [f"{letter}{n}" for n in range(len(lengths))]
        rest = linear
        scale = f" * {unit}u" if unit > 1 else ""
        for n in range(len(lengths) - 1, 0, -1):
            length = lengths[n]
            size = self.number(("length", group, name, n), length)
            if self.small:
                magic = self.slot(("magic", group, name, n), _magic(max(length, 1)))
                whole = f"divide({rest}, {magic})"
            else:
                whole = f"{rest} / {size}"
            lines.append(f"const {self.count} {letter}q{n} = {whole};")
            lines.append(
                f"const {self.int} {letter}{n} = ({self.int})"
                f"(({rest} - {letter}q{n} * {size}){scale});"
            )
            rest, scale = f"{letter}q{n}", ""
        if lengths:
            lines.append(f"const {self.int} {letter}0 = ({self.int})({rest}{scale});")
        return lines, names

    def _lengths(self, group: str, width: int) -> list[int]:
        lengths = [a.length for a in self.axes[group]]
        if lengths and width > 1:
            lengths[-1] //= width
        return lengths

    # ---- statements

    def _pointer(self, tree: _Tree, k: int) -> str:
        node = tree.nodes[k]
        n, view = node.data
        if self.loose and tree is self.bodies[-1]:
            first, away = self._beside(tree, k)
            if away:
                name = f"p{tree.letter}{k}"
                return f"const {STORED[node.code]}* const {name} = p{tree.letter}{first} + {away};"
        slot = self.slots.at(("input", tree.letter, k))
        self.pointers[slot] = n, view.offset * _size(node.code)
        return f"const {STORED[node.code]}* const p{tree.letter}{k} = " + (
            f"(const {STORED[node.code]}*)S({slot});"
        )

    def _beside(self, tree: _Tree, k: int) -> tuple[int, int]:
        """The first input that reads an array in the same steps as another one does, near to it,
        and how many elements that is behind it: what both read is then loaded once."""
        (n, view), layout = tree.nodes[k].data, self.layout_of[tree.letter, k]
        others = [
            (i, view.offset - other.offset)
            for i in tree.inputs
            for m, other in [tree.nodes[i].data]
            if m == n and self.layout_of[tree.letter, i] == layout
        ]
        near = [(i, away) for i, away in others if abs(away) <= BESIDE]
        return min(near)

    def _hoisted(self, tree: _Tree, k: int, groups: Iterable[str]) -> bool:
        """Whether an input is the same for all points along these axes."""
        layout = self.layout_of[tree.letter, k]
        still = not any(any(self._strides(layout, g)) for g in groups)
        return still and tree.guards[k] is None

    def _vector(self, tree: _Tree, k: int) -> bool:
        return (
            self.width > 1
            and tree in self.bodies
            and abs(self._fast(self.layout_of[tree.letter, k])) == 1
        )

    def _kind(self, tree: _Tree, k: int) -> str:
        stored_as = STORED[tree.nodes[k].code]
        return f"Vec<{stored_as}, {self.width}>" if self._vector(tree, k) else stored_as

    def _loads(self, tree: _Tree, chosen: Iterable[int], site: _Site, target: str) -> list[str]:
        """Statements that load inputs, each if its guard holds. `target` names the variable of one,
        with its number for ``#``."""
        chosen = list(chosen)
        lines = []
        needed = [g for k in chosen if (g := tree.guards[k]) is not None]
        if needed:
            lines += self._statements(tree, tree.below(needed), site, {})
        offsets: dict[int, str] = {}
        anyhow: list[int] = []  # vectors that begin anywhere are read one by one
        for k in chosen:
            layout = self.layout_of[tree.letter, k]
            if layout not in offsets:
                offsets[layout] = f"o{len(offsets)}"
                text = self._offset(layout, site)
                lines.append(f"const {self.int} {offsets[layout]} = {text};")
        either, gone = (self.either, self.gone) if tree is self.tree else ({}, set())

        def place_of(k: Any) -> str:
            if isinstance(k, tuple):
                return f"({tree.letter}{k[0]} ? {place_of(k[1])} : {place_of(k[2])})"
            return f"p{tree.letter}{k} + {offsets[self.layout_of[tree.letter, k]]}"

        for k in chosen:
            if k in gone:
                continue
            place = place_of(either.get(k, k))
            kind = self._kind(tree, k)
            guard = None if k in either else tree.guards[k]
            check = f"if ({tree.letter}{guard}) " if guard is not None else ""
            name = target.replace("#", str(k))
            if self.loose and self._vector(tree, k) and not self._begins_evenly(tree, k):
                anyhow.append(k)
            else:
                lines.append(f"{check}{name} = *(const {kind}*)({place});")
        vectors = [k for k in chosen if anyhow and self._vector(tree, k)]
        known: dict[tuple[int, int], str] = {}  # elements that are there, by who has them and where
        for k in sorted(vectors, key=anyhow.__contains__):  # those that are whole come first
            layout, name = self.layout_of[tree.letter, k], target.replace("#", str(k))
            first, away = self._beside(tree, k) if tree is self.bodies[-1] else (k, 0)
            guard, mine = tree.guards[k], []
            for e in range(self.width):
                at = e if self._fast(layout) > 0 else -e
                found = known.setdefault((first, away + at), f"{name}.x[{e}]")
                if found == f"{name}.x[{e}]":
                    found = f"(p{tree.letter}{k} + {offsets[layout]})[{at}]"
                mine.append(f"{name}.x[{e}] = {found};")
            if k in anyhow:
                lines += mine if guard is None else [f"if ({tree.letter}{guard}) {{", *mine, "}"]
        return lines

    def _statements(
        self, tree: _Tree, wanted: Iterable[int], site: _Site, inputs: dict[int, str],
        element: str = "", drawn: dict[int, str] | None = None, done: Iterable[int] = (),
    ) -> list[str]:  # fmt: skip
        """One statement for each node. `inputs` are the values in memory, `element` the number of
        the element in its vector, `drawn` random numbers that there are already, `done` nodes that
        have their statements."""
        lines = []
        done = set(done)
        either = self.either if tree is self.tree else {}
        for k in wanted:
            done.add(k)
            node = tree.nodes[k]
            if either and k in self.gone:
                continue
            if k in either and node.op == "where":
                text = self._first_of(tree, either[k])
            elif node.op == "input":
                text = loaded(node.code, inputs[k])
            elif node.op == "index":
                text = self._position(tree, k, site)
                if element:
                    layout = self.layout_of[tree.letter, k]
                    step = self._fast(layout)
                    name = "stride", layout, self.along, len(self.axes[self.along]) - 1
                    text += f" + {self._times(element, step, name, True)}" if step else ""
            elif node.op == "constant":
                text = self._constant(node)
            elif node.op == "reduced":
                j, r = node.data
                op, takes, gives = self.kinds[j]
                x = f"part{j}[{'e' if self.held > 1 else 0}]"
                found = x if op == "histogram" else results(op, takes, gives, x)[r]
                if self.pane is not None:
                    found = f"made{j}_{r}[at]"
                text = cast(gives[r], node.code, found)
            elif node.op in RANDOM:
                if drawn and k in drawn:
                    text = f"{drawn[k]}[{element}]"
                else:
                    lines += self._drawing(tree, k, element)
                    continue
            else:
                text = self._operation(tree, k)
            guard = tree.guards.get(k) if node.op in ("call", "taken") else None
            if guard is None:
                lines.append(_let(node.code, f"{tree.letter}{k}", text))
                continue
            others = [n for n in tree.below([guard]) if n not in done]
            before = self._statements(tree, others, site, inputs, element, drawn, done)
            check = f"if ({tree.letter}{guard}) {tree.letter}{k} = {text};"
            lines += [f"{TYPES[node.code]} {tree.letter}{k} = {{}};", "{", *before, check, "}"]
        return lines

    def _first_of(self, tree: _Tree, either: Any) -> str:
        """The input that has the value of one of several."""
        while isinstance(either, tuple):
            either = either[1]
        return f"{tree.letter}{either}"

    # ---- random numbers

    def _walk(self, tree: _Tree, k: int) -> tuple[int, int | None] | None:
        """Of a random number's index: its stride from one element to the next, and whether it is
        odd for the first element of a vector (None: that varies). None if it is not so simple."""
        node = tree.nodes[k]
        if node.op == "index":
            layout = self.layout_of[tree.letter, k]
            step = self._fast(layout)
            odd: int | None = node.data.offset % 2
            strides = self._strides(layout, "k") + self._strides(layout, "r")
            if step % 2 and self.width == 1:
                odd = None
            own = self.axes[self.along]
            others = sum(s % 2 for s in strides) - (step % 2 if own else 0)
            return step, None if others else odd
        if node.op == "constant" and node.code == "i8":
            return 0, int(np.frombuffer(node.data, np.int64)[0]) % 2
        if node.op == "add" and node.code == "i8":
            found = [self._walk(tree, a) for a in node.args]
            if found[0] and found[1]:
                (s, a), (t, b) = found[0], found[1]
                return s + t, None if a is None or b is None else (a + b) % 2
        return None

    def _oddness(self, tree: _Tree, k: int, element: str) -> str:
        """Which half of a pair a random number is, as early as it is known."""
        at = tree.nodes[k].args[0]
        walk = self._walk(tree, at)
        if tree in self.bodies and walk is not None and walk[1] is not None:
            step, odd = walk
            if step % 2 == 0 or self.width == 1:
                return "true" if odd else "false"
            return f"(({element} + {odd}) & 1)"
        return f"({tree.letter}{at} & 1)"

    def _key(self, node: _Node) -> str:
        return self.slot(("key", node.data), node.data)

    def _drawing(self, tree: _Tree, k: int, element: str) -> list[str]:
        node, letter = tree.nodes[k], tree.letter
        odd = self._oddness(tree, k, element)
        name = f"{letter}{k}"
        lines = [
            f"unsigned long long {name}x, {name}y;",
            f"philox({self._key(node)}, {letter}{node.args[0]} >> 1, {name}x, {name}y);",
        ]
        if node.op == "normal":
            text = f"{self._draw(node)}({name}x, {name}y, {odd})"
        else:
            text = f"{self._draw(node)}({odd} ? {name}y : {name}x)"
        return [*lines, _let(node.code, name, text)]

    def _pairs(self, tree: _Tree, site: _Site) -> tuple[list[str], dict[int, str]]:
        """Random numbers of a whole vector where they come in pairs, and what they are called."""
        lines: list[str] = []
        drawn: dict[int, str] = {}
        if self.width == 1:
            return lines, drawn
        for k, node in enumerate(tree.nodes):
            if node.op not in RANDOM or self._walk(tree, node.args[0]) != (1, 0):
                continue
            name = drawn[k] = f"d{k}"
            kind = TYPES[node.code]
            before = self._statements(tree, tree.below(node.args), site, {}, "")
            both = f"{name}[e], {name}[e + 1]"
            if node.op == "normal":
                make = f"{self._draw(node)}s(x, y, {both});"
            else:
                make = f"{name}[e] = {self._draw(node)}(x); {name}[e + 1] = {self._draw(node)}(y);"
            lines += [
                f"{kind} {name}[{self.width}];",
                "{",
                *before,
                "#pragma unroll",
                f"for (int e = 0; e < {self.width}; e += 2) {{",
                "unsigned long long x, y;",
                f"philox({self._key(node)}, ({tree.letter}{node.args[0]} + e) >> 1, x, y);",
                make,
                "}",
                "}",
            ]
        return lines, drawn

    # ---- the body of a loop over points

    def _inner(self, tree: _Tree) -> list[int]:
        """The inputs that are loaded in the loop, not before it."""
        if self.pane is not None:
            return list(tree.inputs)
        groups = ("r",) if self.reducing else ("k", "r")
        return [k for k in tree.inputs if not self._hoisted(tree, k, groups)]

    def _before(self, site: _Site, bodies: Sequence[_Tree] = ()) -> list[str]:
        """Loads of what is the same in all of the loop."""
        lines = []
        for tree in bodies or self.bodies:
            inner, x = set(self._inner(tree)), self._register(tree)
            outer = [k for k in tree.inputs if k not in inner]
            lines += [f"{self._kind(tree, k)} {x}{k};" for k in outer]
            lines += self._scoped(self._loads(tree, outer, site, f"{x}#"), bool(outer))
        return lines

    def _register(self, tree: _Tree) -> str:
        """What inputs are called once they are loaded, before their number."""
        return {"v": "x", "a": "t", "b": "w"}.get(tree.letter, "y")

    @staticmethod
    def _scoped(lines: list[str], wanted: bool = True) -> list[str]:
        return ["{", *lines, "}"] if wanted and lines else []

    def _values(self, tree: _Tree, element: str, which: str) -> dict[int, str]:
        """What the inputs in registers are called."""
        inner, x = set(self._inner(tree)), self._register(tree)
        out = {}
        for k in tree.inputs:
            if k in inner and self.late and tree is self.tree:
                offset = f"o{self.layout_of[tree.letter, k]}"
                out[k] = f"*(const {self._kind(tree, k)}*)(p{tree.letter}{k} + {offset})"
                continue
            name = f"{x}{k}[{which}]" if k in inner and which else f"{x}{k}"
            out[k] = f"{name}.x[{element}]" if self._vector(tree, k) else name
        return out

    def _declared(self, tree: _Tree, times: int) -> list[str]:
        """Room for what the loop loads. What is loaded under a condition is zero otherwise."""
        out, x = [], self._register(tree)
        for k in self._inner(tree):
            clear = " = {}" if tree.guards[k] is not None else ""
            if tree is not self.tree or k not in self.gone:
                out.append(f"{self._kind(tree, k)} {x}{k}[{times}]{clear};")
        return out

    def _passes(
        self, condition: str, at: str, coords: list[str], site: _Site,
        use: Callable[[_Tree, str], list[str]],
    ) -> list[str]:  # fmt: skip
        """Load what a thread reads at a time, then use it: `use(tree, which)` gives statements for
        one vector. Where it is not in the core, it is loaded when it is used."""
        tree = self.tree if self.core is None else self.core
        inner, loads, uses = self._inner(tree), [], use(tree, "u")
        if self.late and inner:
            layouts = dict.fromkeys(self.layout_of[tree.letter, k] for k in inner)
            offsets = [f"const {self.int} o{n} = {self._offset(n, site)};" for n in layouts]
            return self._each(condition, at, [*coords, *offsets, *uses])
        if inner:
            loads = self._loads(tree, inner, site, f"{self._register(tree)}#[u]")
        if self.core is not None:
            holds = f"if ({self._inside(site)}) {{"
            edge = self._inner(self.tree)
            uses = [
                holds, *uses, "} else {", *self._declared(self.tree, 1),
                *self._scoped(self._loads(self.tree, edge, site, "x#[0]")), *use(self.tree, "0"),
                "}",
            ]  # fmt: skip
            loads = [holds, *loads, "}"] if inner else []
        return [
            *self._declared(tree, self.times),
            *(self._each(condition, at, [*coords, *loads]) if inner else []),
            *self._each(condition, at, [*coords, *uses]),
        ]

    def _each(self, condition: str, at: str, lines: list[str]) -> list[str]:
        """Statements for each of the vectors that a thread has at a time."""
        return [
            "#pragma unroll",
            f"for (int u = 0; u < {self.times}; ++u) {{",
            f"const {self.count} {at};",
            f"if ({condition}) {{",
            *lines,
            "}",
            "}",
        ]

    def _elements(
        self, tree: _Tree, site: _Site, which: str, after: list[str], before: Sequence[str] = ()
    ) -> list[str]:
        """What is computed of each element of a vector, and what is done before and after that."""
        pairs, drawn = self._pairs(tree, site)
        wanted = tree.below(tree.roots, drawn)
        element = "e" if self.width > 1 else ""
        values = self._values(tree, "e", which)
        lines = [*before, *self._statements(tree, wanted, site, values, element, drawn)]
        if self.width == 1:
            return [*pairs, *lines, *after]
        return [*pairs, "#pragma unroll", f"for (int e = 0; e < {self.width}; ++e) {{",
                *lines, *after, "}"]  # fmt: skip

    # ---- element-wise

    def _loosely(self) -> list[str]:
        """Vectors of the output, in which what is read lies anyhow."""
        m = -(-self.points // self.width)
        if self.out_layout >= 0:  # vectors of a row, which begins at a multiple of one
            *rows, last = self._lengths("k", 1)
            m = math.prod(rows) * -(-last // self.width)
        self.blocks = max(1, min(-(-m // THREADS), self.processors * WAVES))

        def use(tree: _Tree, site: _Site, number: str) -> list[str]:
            if self.out_layout < 0:
                return self._stores(tree, site, f"({self.int}){number}", "0")
            place = f"const {self.int} to = {self._offset(self.out_layout, site)};"
            return [place, *self._stores(tree, site, "to", "0")]

        first, step = f"blockIdx.x * {THREADS}u + threadIdx.x", f"({self.count})blocks * {THREADS}u"
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {self.count} n = {self.number('n', self.points)}, m = {self.number('m', m)};",
            "if (n == 0 || blockIdx.x >= blocks) return;",
            *self._pointers(),
            *self._before(_Site({}, {"k": "0"})),
            *self._anyhow("k", _Site({}), use, (first, "m", step), (first, step)),
        ]  # fmt: skip

    def _anyhow(
        self, group: str, base: _Site, use: Callable[[_Tree, _Site, str], list[str]],
        vectors: tuple[str, str, str], others: tuple[str, str],
    ) -> list[str]:  # fmt: skip
        """Loops over the vectors of the `n` points of a group of axes, `vectors` being a thread's
        first one, past its last one, and from one to the next. What they read lies anyhow. A vector
        that does not lie in one row, or in the core, is taken apart. Points beyond the core come
        before, by themselves, so that lanes of a warp do the same: `others` are a thread's first
        one of these, and from one to the next. Where there is a body for threads that are not in
        the core along the other axes, ``central`` says which are."""
        width, main = self.width, self.bodies[-1]
        lengths = self._lengths(group, 1)

        def site(names: Sequence[str], number: str) -> _Site:
            coords = {(group, a): x for a, x in enumerate(names)}
            return _Site(base.coords | coords, base.linear | ({group: number} if number else {}))

        def point(place: _Site, number: str, tree: _Tree, edge: _Tree | None) -> list[str]:
            lines = self._point(tree, place, use(tree, place, number))
            if edge is None:
                return lines
            others = self._point(edge, place, use(edge, place, number))
            return ["if (central) {", *lines, "} else {", *others, "}"]

        def slabs(kind: str, tree: _Tree, edge: _Tree | None = None) -> list[str]:
            slab = self._slabs(group, cuts, kind)
            uses = point(site(slab.names, slab.number), slab.number, tree, edge)
            return self._loop(others[0], slab.total, others[1], [*slab.found, *uses])

        edge = self.partly.get(group)
        if by_row := self._by_row():
            rows, number = [*lengths[:-1], -(-lengths[-1] // width)], ""
            coords, names = self._coordinates(group, rows, "i", group, width, "rows")
        else:
            number = "j"
            coords, names = self._coordinates(group, lengths, "j", group, 1, "whole")
            coords.insert(0, f"const {self.count} j = i * {width}u;")
        here = site(names, number)
        bounded = bool(self._within(group))
        whole = [self._inside(here, group)] if bounded else []
        even = self._even_vectors()
        if lengths[-1] % width and self._fast_axis() < 0:
            most = self.number("whole", max(lengths[-1] - width + 1, 0))
            whole.append(f"({self.count}){names[-1]} < {most}")
        lines = point(here, number, main, edge)
        cuts = self._cuts(group, width if even else 1)
        beyond = slabs("core", self.apart["last"]) if self.apart else []
        self.width = 1
        if whole and even and bounded:  # what is in no whole vector of the core is beyond it
            lines = [f"if ({' && '.join(whole)}) {{", *lines, "}"]
        elif whole:
            if by_row:
                end = self.number(("length", group, "whole", len(lengths) - 1), lengths[-1])
                inner = [
                    f"const {self.int} ke = {names[-1]} + one;", f"if (ke >= {end}) break;"
                ]  # fmt: skip
                place = site([*names[:-1], "ke"], "")
            else:
                inner, others_ = self._coordinates(group, lengths, "je", f"{group}e", 1, "whole")
                inner[:0] = [f"const {self.count} je = j + one;", "if (je >= n) break;"]
                place = site(others_, "je")
            check = [f"if (!({self._inside(place, group)})) continue;"] if bounded else []
            lines = [
                f"if ({' && '.join(whole)}) {{", *lines, "} else {", "#pragma unroll 1",
                f"for (int one = 0; one < {width}; ++one) {{",
                *inner, *check, *point(place, "je", main, edge), "}", "}",
            ]  # fmt: skip
        if "others" in self.apart:
            beyond += slabs("last", self.apart["others"]) + slabs("beyond", self.tree)
        elif bounded and self.partly:
            beyond = slabs("whole", self.partly["k"], self.tree)
        elif bounded and not self.apart:
            beyond = slabs("whole", self.tree)
        self.width = width
        return [*beyond, *self._loop(*vectors, [*coords, *lines])]

    def _linear(self, group: str, lengths: Sequence[int], names: Sequence[str]) -> str:
        """A point's number among all of a group of axes."""
        linear = names[0]
        for n in range(1, len(lengths)):
            whole = self.number(("length", group, "whole", n), lengths[n])
            linear = f"(({self.count}){linear} * {whole} + {names[n]})"
        return linear

    def _point(self, tree: _Tree, site: _Site, uses: list[str]) -> list[str]:
        """Load what a point, or a vector, reads, then use it."""
        loads = self._loads(tree, self._inner(tree), site, f"{self._register(tree)}#[0]")
        return [*self._declared(tree, 1), *self._scoped(loads), *uses]

    def _loop(self, start: str, end: str, step: str, lines: list[str]) -> list[str]:
        head = f"for ({self.count} i = {start}; i < {end}; i += {step}) {{"
        return [head, *lines, "}"]

    def _cuts(self, group: str, unit: int = 1) -> dict[int, tuple[int, int]]:
        """Where the core begins and ends along each of a group's axes where it is not all. Along
        the last one it has whole vectors of a `unit`."""
        cuts: dict[int, tuple[int, int]] = {}
        last = len(self.axes[group]) - 1
        for k, low, length in self._within(group):
            (a,) = [a for a, s in enumerate(self._strides(self.axis_layout[k], group)) if s]
            high = low + length
            if a == last:
                low, high = -(-low // unit) * unit, high // unit * unit
            cuts[a] = low, max(low, high)
        if cuts and last not in cuts and (odd := self.axes[group][-1].length % unit):
            cuts[last] = 0, self.axes[group][-1].length - odd
        return cuts

    def _slabs(self, group: str, cuts: dict[int, tuple[int, int]], kind: str = "whole") -> _Slab:
        """Points that are not in the core. They lie in slabs before and behind it along one axis
        after the other. Of another `kind` are those that are in the core along the last axis
        ("core": vectors then), those that are in it along all others ("last"), and those that are
        neither ("beyond")."""
        lengths = [a.length for a in self.axes[group]]
        last, steps = len(lengths) - 1, 1
        begin, sizes = [0] * len(lengths), list(lengths)  # of what is left
        order, gap = sorted(cuts), cuts.get(last, (0, lengths[-1]))
        if kind == "last":
            order = [last]
            for a in cuts:
                if a != last:
                    begin[a], sizes[a] = cuts[a][0], cuts[a][1] - cuts[a][0]
        elif kind != "whole":
            order = [a for a in order if a != last]
            if kind == "core":
                steps = self.width
                begin[last], sizes[last] = gap[0], (gap[1] - gap[0]) // steps
            else:
                sizes[last] = lengths[last] - (gap[1] - gap[0])
        names = [f"{group}e{n}" for n in range(len(lengths))]
        total, chosen = 0, []
        for a in order:
            low, high = cuts[a]
            for behind, (start, size) in enumerate(((0, low), (high, lengths[a] - high))):
                where, slab = [], [*sizes[:a], size, *sizes[a + 1 :]]
                for x in range(last, -1, -1):
                    at, length = start if x == a else begin[x], slab[x]
                    word = kind, group, a, x, behind and x == a
                    from_ = self.number(("from", *word), at)
                    scale = f" * {steps}u" if x == last and steps > 1 else ""
                    where.append(f"{names[x]} = ({self.int})({from_} + rest % ")
                    where[-1] += f"{self.number(('slab', *word), length)}{scale});"
                    if x:
                        where.append(f"rest /= {self.number(('slab', *word), length)};")
                many = self.number(("slab", kind, group, a, behind), math.prod(slab))
                chosen += [f"if (rest < {many}) {{", *where, "break;", "}", f"rest -= {many};"]
                total += math.prod(slab)
            begin[a], sizes[a] = low, high - low
        found = [
            f"{self.count} rest = i;",
            f"{self.int} {', '.join(f'{x} = 0' for x in names)};",
            "do {", *chosen, "} while (0);",
        ]  # fmt: skip
        if kind == "beyond":
            from_, many = (
                f"({self.int}){self.slot((word, group), n)}"
                for word, n in (("gap", gap[0]), ("gap length", gap[1] - gap[0]))
            )
            found.append(f"if ({names[last]} >= {from_}) {names[last]} += {many};")
        number = f"{group}at"
        found.append(f"const {self.count} {number} = {self._linear(group, lengths, names)};")
        return _Slab(total, self.number(("slabs", kind, group), total), found, names, number)

    def _elementwise(self) -> list[str]:
        if self.loose:
            return self._loosely()
        width = self.width
        n = self.points // width
        step = f"(({self.count})blocks * {THREADS}u)"
        self.blocks = max(1, min(-(-n // (THREADS * self.times)), self.processors * WAVES))
        lines = [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {self.count} n = {self.number('n', n)};",
            "if (n == 0 || blockIdx.x >= blocks) return;",
        ]
        lengths = self._lengths("k", width)
        coords, names = self._coordinates("k", lengths, "j", "k", width)
        site = _Site({("k", a): x for a, x in enumerate(names)}, {"k": f"j * {width}u"})
        at = f"i + u * {step}"
        if self.tree.calls and len(lengths) > 1:
            # points that lie close together take similar branches: the lanes of a warp lie in a
            # patch, not in a line
            rows, columns = (
                self.number(("length", "k", "", n), lengths[n])
                for n in (len(lengths) - 2, len(lengths) - 1)
            )
            at = f"patched<{self.count}>({at}, {rows}, {columns})"
        place, where = f"({self.int})(j * {width}u)", []
        if self.out_layout >= 0:
            where = [f"const {self.int} to = {self._offset(self.out_layout, site)};"]
            place = "to"
        body = self._passes(
            "j < n", f"j = {at}", coords, site,
            lambda tree, u: [*where, *self._stores(tree, site, place, u)],
        )  # fmt: skip
        return [
            *lines,
            *self._pointers(),
            *self._before(_Site({}, {"k": "0"})),
            f"for ({self.count} i = blockIdx.x * {THREADS}u + threadIdx.x; i < n; "
            f"i += {step} * {self.times}u) {{",
            *body,
            "}",
        ]

    def _stores(
        self, tree: _Tree, site: _Site, place: str, which: str, before: Sequence[str] = ()
    ) -> list[str]:
        """Compute the outputs of a vector of points and write them; `before` comes before each."""
        width = self.width
        declared, after, writes = [], [], []
        for n, (short, root) in enumerate(zip(self.outs, tree.roots, strict=True)):
            value = stored(short, f"{tree.letter}{root}")
            if width == 1:
                after.append(f"q{n}[{place}] = {value};")
                continue
            kind = f"Vec<{STORED[short]}, {width}>"
            declared.append(f"{kind} out{n};")
            after.append(f"out{n}.x[e] = {value};")
            writes.append(f"*({kind}*)(q{n} + {place}) = out{n};")
        return [*declared, *self._elements(tree, site, which, after, before), *writes]

    def _pointers(self) -> list[str]:
        """What is read and written, by name."""
        lines = []
        for tree in self.trees:
            lines += [self._pointer(tree, k) for k in (*tree.inputs, *tree.taken)]
        for n, short in enumerate(self.outs):
            slot = self.slots.at(("output", n))
            lines.append(f"{STORED[short]}* const q{n} = ({STORED[short]}*)S({slot});")
        return lines

    # ---- tiles

    def _tile(self, group: str, first: str, step: str, use: Any) -> list[str]:
        """A loop over tiles of 32 x 32, from number `first` on; `use(site)` gives the statements
        for one point."""
        axes = self.axes[group]
        last, across = len(axes) - 1, self.across
        rest = [a for a in range(last) if a != across]
        counts = [axes[a].length for a in rest]
        counts += [-(-axes[across].length // 32), -(-axes[last].length // 32)]
        coords, names = self._coordinates(group, counts, "w", "t", name="tile")
        turned, room = [], TILES
        for k in self._inner(self.tree):
            tile = 32 * 33 * _size(self.tree.nodes[k].code)
            if self.layout_of[self.tree.letter, k] in self.turned and tile <= room:
                turned.append(k)
                room -= tile
        straight = [k for k in self._inner(self.tree) if k not in turned]

        def site(row: str, column: str) -> _Site:
            found = {(group, a): names[n] for n, a in enumerate(rest)}
            found[group, across] = f"t{len(rest)} * 32 + {row}"
            found[group, last] = f"t{len(rest) + 1} * 32 + {column}"
            return _Site(found)

        def inside(place: _Site) -> str:
            return " && ".join(
                f"{place.coords[group, a]} < ({self.int})"
                f"{self.slot(('length', group, 'edge', a), axes[a].length)}"
                for a in (across, last)
            )

        def each(row: str, column: str, lines: Any) -> list[str]:
            place = site(row, column)
            return ["#pragma unroll", "for (int u = 0; u < 4; ++u) {",
                    f"if ({inside(place)}) {{", *lines(place), "}", "}"]  # fmt: skip

        line = "(ty + 8 * u)"
        shared = [f"__shared__ {STORED[self.tree.nodes[k].code]} turn{k}[32][33];" for k in turned]
        # in shared memory the elements have no constructors, so that these lie there untouched
        declared = [f"{STORED[self.tree.nodes[k].code]} x{k}[4]"
                    f"{' = {}' if self.tree.guards[k] is not None else ''};"
                    for k in (*straight, *turned)]  # fmt: skip
        fetch = [f"x{k}[u] = turn{k}[tx][{line}];" for k in turned]
        turning = each("tx", line, lambda s: self._loads(self.tree, turned, s, "x#[u]"))
        keep = ["#pragma unroll", "for (int u = 0; u < 4; ++u) {",
                *[f"turn{k}[{line}][tx] = x{k}[u];" for k in turned], "}"]  # fmt: skip
        loads = each(line, "tx", lambda s: self._loads(self.tree, straight, s, "x#[u]"))
        return [
            *shared,
            "const int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;",
            f"for ({self.count} w = {first}; w < tiles; w += {step}) {{",
            *coords,
            *declared,
            *turning,
            *(loads if straight else []),
            *keep,
            "__syncthreads();",
            *each(line, "tx", lambda s: [*fetch, *use(s)]),
            "__syncthreads();",
            "}",
        ]

    def _tile_count(self, group: str) -> int:
        axes = self.axes[group]
        count = 1
        for a, axis in enumerate(axes):
            tiled = a in (self.across, len(axes) - 1)
            count *= -(-axis.length // 32) if tiled else axis.length
        return count

    def _tiled(self) -> list[str]:
        tiles = self._tile_count("k")
        self.blocks = max(1, min(tiles, self.processors * WAVES))
        self.times = 4
        axes = self.axes["k"]

        def use(site: _Site) -> list[str]:
            place = ""
            for a, axis in enumerate(axes):
                length = f"({self.int}){self.slot(('edge', a), axis.length)}"
                coordinate = f"({site.coords['k', a]})"
                place = f"({place}) * {length} + {coordinate}" if place else coordinate
            if self.out_layout >= 0:
                place = self._offset(self.out_layout, site)
            stores = self._stores(self.tree, site, "at", "u")
            return [f"const {self.int} at = {place};", *stores]

        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {self.count} tiles = {self.number('tiles', tiles)};",
            "if (blockIdx.x >= blocks || tiles == 0) return;",
            *self._pointers(),
            *self._before(_Site({}, {})),
            *self._tile("k", "blockIdx.x", "blocks", use),
        ]

    # ---- reductions

    def _steps(self) -> int:
        """Vectors along the reduced axes, or points where vectors lie beside each other."""
        return -(-self.reach // self.width) if self.rows else self.reach

    def _shares(self, results_: int) -> tuple[int, int, int, int]:
        """How a reduction is divided: results of a block at a time, lanes for each of them, how
        many blocks share these, and how many steps each of them does."""
        rows = self.rows
        steps = self._steps()
        if self.across >= 0:
            steps = self._tile_count("r")
            share = max(1, min(steps // 2, self.processors * SHARED_WAVES // 2))
            return 1, THREADS, share, 0
        if rows and not self.wide:
            lanes = max(_power_above(-(-steps // 4)), min(8, _power_above(steps)))
            lanes = min(lanes, 32)
            return THREADS // lanes, lanes, 1, max(steps, 1)
        if rows:
            waves = ROW_WAVES * (4 if self.partly else 1)  # some results take longer
            room = self.processors * waves // max(results_, 1)
            share = max(1, min(room, -(-steps // (THREADS * self.times * 2))))
            long = -(-max(steps, 1) // share)
            long = -(-long // THREADS) * THREADS
            return 1, THREADS, max(1, -(-steps // long)), long
        if results_ >= 32:
            lanes = min(LANES, _power_below(max(steps // 4, 1)))
            side = THREADS // lanes
            while side > 32 and side // 2 >= results_:
                side, lanes = side // 2, lanes * 2
        else:
            side = _power_above(max(results_, 1))
            lanes = THREADS // side
        groups = max(1, -(-results_ // side))
        slots = self.processors * COLUMN_WAVES
        room = slots // groups or _evenly(groups, slots)
        share = max(1, min(room, -(-steps // (lanes * 8))))
        long = -(-max(steps, 1) // share)
        return side, lanes, max(1, -(-steps // long)), long

    def _is_wide(self) -> bool:
        """Whether a whole block, not a warp, goes along a row."""
        steps = self._steps()
        return self.across >= 0 or (
            steps > 256 and -(-self.points // 8) < self.processors * 8
        )  # fmt: skip

    def _reducing(self) -> list[str]:
        self.wide = self.rows and self._is_wide()
        self.held = 1 if self.rows else self.width  # results of one thread
        steps = self._steps() if self.across < 0 else self._tile_count("r")
        shared = self.wide or not self.rows  # whether blocks may share results
        every = self._results()
        total, before = "groups * share" if shared else "groups", []
        work = [f"for (unsigned w = blockIdx.x; w < {total}; w += blocks) {{", *every.work, "}"]
        units = every.units
        if self.loose and not self.rows and self._within("k"):
            # those that are beyond the core come before, by themselves
            width = self.width
            self.held = self.width = 1
            others = self._results("beyond", width)
            self.held = self.width = width
            units += others.units
            mine = self.slot(("units", "beyond"), others.units)
            before = [f"const unsigned others = (unsigned){mine};"]
            work = [
                f"for (unsigned v = blockIdx.x; v < {total} + others; v += blocks) {{",
                "if (v < others) {", "const unsigned w = v;", *others.declared, *others.work,
                "} else {", "const unsigned w = v - others;", *every.work, "}", "}",
            ]  # fmt: skip
        self.blocks = max(1, min(units, self.processors * WAVES))
        room = f"__shared__ Largest kept[{THREADS // 2}];", "__shared__ bool last;"
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {self.count} steps = {self.number('steps', steps)};",
            *before,
            "if (blockIdx.x >= blocks) return;",
            *(room if shared else ()),
            *self._pointers(),
            *every.declared,
            "if (results == 0) return;",
            *work,
        ]

    def _results(self, name: str = "", unit: int = 1) -> _Results:
        """A loop's body that makes results of one thread or several: all of them, or those that lie
        beyond the core, whose parts have a `name` then, and `unit` is how many there are in a
        vector of the others."""
        c, shared = self.count, self.wide or not self.rows
        live = ["const bool live = o < results;"]
        if name:
            slab = self._slabs("k", self._cuts("k", unit))
            results_ = slab.points
            number = slab.number
            site = _Site({("k", a): x for a, x in enumerate(slab.names)}, {"k": number})
            live = [*live, f"const {c} i = live ? o : 0;", *slab.found]
            bodies = [self.tree, *filter(None, [self.partly.get("r")])]
            kept: list[str] = []
        else:
            results_ = self.points // self.held
            kept, names = self._coordinates("k", self._lengths("k", self.held), "o", "k", self.held)
            site = _Site({("k", a): x for a, x in enumerate(names)}, {"k": f"o * {self.held}u"})
            bodies, number = self.bodies, "o"
            if self.loose and not self.rows:
                bodies = [*filter(None, [self.partly.get("k")]), self.bodies[-1]]
                if inside := self._inside(site, "k"):
                    live = [*kept, f"const bool live = o < results && {inside};"]
        side, lanes, share, long = self._shares(results_)
        groups = -(-results_ // side)
        units = groups * share
        if units >= 2**31:
            raise NotGenerated(f"a reduction to {self.points:,} results")

        def word(what: str) -> Any:
            return (what, name) if name else what

        declared = [
            f"const {c} results = {self.number(word('results'), results_)};",
            f"const unsigned groups = (unsigned){self.slot(word('groups'), groups)};",
        ]
        if shared:
            declared += [
                f"const unsigned share = (unsigned){self.slot(word('share'), share)};",
                f"const {c} long_ = {self.number(word('long'), long)};",
            ]
        if self.wide:
            declared.append(f"const int lanes = {THREADS}, x = 0, y = threadIdx.x;")
            declared.append("const unsigned side = 1;")
        else:
            across = ("/", "%") if self.rows else ("%", "/")
            divisor = "lanes" if self.rows else "side"
            declared += [
                f"const int lanes = (int){self.slot(word('lanes'), lanes)};",
                f"const unsigned side = {THREADS}u / lanes;",
                f"const int x = threadIdx.x {across[0]} {divisor}, "
                f"y = threadIdx.x {across[1]} {divisor};",
            ]
        if shared:
            declared += self._scratch(groups, share, side, name)
        work = [
            "const unsigned group = w / share, part = w % share;"
            if shared
            else "const unsigned group = w;",
            f"const {c} o = ({c})group * side + x;",
            *live,
        ]
        for j in range(len(self.kinds)):
            work.append(f"Part{j} part{j}[{self.held}];")
            work += self._over_held([f"part{j}[e].clear();"])
        work += [
            "if (live && steps) {",
            *kept,
            *self._before(_Site({**site.coords}, {**site.linear, "r": "0"}), bodies),
            *self._accumulated(site, shared, bool(name)),
            "}",
            *self._gathered(),
            *(self._combined() if shared else []),
            "if (y == 0 && live) {",
            *kept,
            *self._finished(site, number),
            "}",
        ]
        return _Results(declared, work, units)

    def _counting(self) -> list[str]:
        """A histogram. Each block counts in shared memory, in as many copies as there is room for,
        so that few lanes of a warp want the same counter, and adds what it has to the totals. The
        last block leaves these zero. Integers add up to the same in any order."""
        bins, steps = self.kernel.shape[0], self.reach // self.width
        copies = min(5, (COUNTERS // bins).bit_length() - 1) if bins <= COUNTERS else 0
        most = COUNTERS if bins <= COUNTERS else MOST_BINS
        self.wide, self.held = True, 1
        blocks = min(-(-steps // (THREADS * self.times)), self.processors * ROW_WAVES)
        long = -(-max(steps, 1) // max(blocks, 1))
        long = -(-long // THREADS) * THREADS
        self.blocks = max(1, -(-steps // long))
        if self.reach // self.blocks >= 2**31:
            raise NotGenerated(f"a histogram of {self.reach:,} points")
        counters = self.slots.at("counters")
        self.counters = counters, 2 + 2 * bins
        site = _Site({("k", 0): "(int)o"} if self.axes["k"] else {})
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {self.count} steps = {self.number('steps', steps)};",
            f"const {self.count} long_ = {self.number('long', long)};",
            f"const unsigned bins = (unsigned){self.slot('bins', bins)};",
            f"const unsigned copies = (unsigned){self.slot('copies', copies)};",
            "if (blockIdx.x >= blocks) return;",
            f"__shared__ unsigned table[{most}];",
            "__shared__ bool last;",
            f"unsigned* const counters = (unsigned*)S({counters});",
            "unsigned long long* const totals = (unsigned long long*)(counters + 2);",
            f"for (unsigned k = threadIdx.x; k < bins << copies; k += {THREADS}u) table[k] = 0;",
            "__syncthreads();",
            *self._pointers(),
            f"const unsigned lanes = {THREADS}u, y = threadIdx.x, part = blockIdx.x;",
            "if (steps) {",
            *self._before(_Site({}, {"r": "0"})),
            *self._accumulated(_Site({}), True, False),
            "}",
            "__syncthreads();",
            f"for (unsigned k = threadIdx.x; k < bins; k += {THREADS}u) {{",
            "unsigned n = 0;",
            "for (unsigned c = 0; c < 1u << copies; ++c)",
            "  n += table[(k << copies) + ((c + threadIdx.x) & ((1u << copies) - 1))];",
            "if (n) atomicAdd(totals + k, (unsigned long long)n);",
            "}",
            "__threadfence();",
            "__syncthreads();",
            "if (threadIdx.x == 0) last = atomicAdd(counters, 1u) == blocks - 1;",
            "__syncthreads();",
            "if (!last) return;",
            "__threadfence();",
            "if (threadIdx.x == 0) counters[0] = 0;",
            f"for ({self.count} o = threadIdx.x; o < bins; o += {THREADS}u) {{",
            "const long long part0[1] = {(long long)atomicExch(totals + o, 0ull)};",
            *self._finished(site),
            "}",
        ]

    def _over_held(self, lines: list[str]) -> list[str]:
        """The same for all results of a thread, each with its number e."""
        if self.held == 1:
            return [x.replace("[e]", "[0]").replace(" + e)", ")") for x in lines]
        return ["#pragma unroll", f"for (int e = 0; e < {self.held}; ++e) {{", *lines, "}"]

    def _accumulated(self, site: _Site, shared: bool, beyond: bool) -> list[str]:
        """The loop along the reduced axes, of results `beyond` the core perhaps."""
        width = self.width if self.rows else 1
        first = f"({self.count})part * long_" if shared else "0"
        end = "steps < begin + long_ ? steps : begin + long_" if shared else "steps"
        bounds = [f"const {self.count} begin = {first};", f"const {self.count} end = {end};"]
        others = ("part * lanes + y", "share * lanes") if shared else ("y", "lanes")
        if self.loose and self.rows:
            central = self._inside(site, "k") if self.partly else ""
            return [
                *bounds, f"const {self.count} n = {self.number('n', self.reach)};",
                *([f"const bool central = {central};"] if central else []),
                *self._anyhow(
                    "r", site, lambda tree, place, _: self._taken(tree, place, "0"),
                    ("begin + y", "end", "lanes"), others,
                ),
            ]  # fmt: skip
        if self.loose:
            return [*bounds, *self._down(site, beyond, others)]
        if self.across >= 0:
            self.times = 4

            def use(place: _Site) -> list[str]:
                return self._taken(self.tree, place, "u")

            tiles = f"const {self.count} tiles = steps;"
            return [tiles, *self._tile("r", "part", "share", use)]
        coords, names = self._coordinates("r", self._lengths("r", width), "j", "r", width)
        place = _Site(
            site.coords | {("r", a): x for a, x in enumerate(names)},
            site.linear | {"r": f"j * {width}u"},
        )
        body = self._passes(
            "j < end", "j = r + u * lanes", coords, place,
            lambda tree, u: self._taken(tree, place, u),
        )  # fmt: skip
        return [
            *bounds,
            f"for ({self.count} r = begin + y; r < end; r += lanes * {self.times}u) {{",
            *body,
            "}",
        ]

    def _down(self, site: _Site, beyond: bool, others: tuple[str, str]) -> list[str]:
        """The loop of threads that have results side by side, where what they read lies anyhow:
        vectors of the core, and by themselves points that are beyond it along the reduced axes, or
        all points of one result beyond it."""
        lengths = self._lengths("r", 1)

        def point(tree: _Tree, names: Sequence[str], number: str) -> list[str]:
            coords = {("r", a): x for a, x in enumerate(names)}
            place = _Site(site.coords | coords, site.linear | {"r": number})
            return self._point(tree, place, self._taken(tree, place, "0"))

        def steps(lines: list[str], start: str = "begin", end: str = "end") -> list[str]:
            head = f"for ({self.count} j = {start} + y; j < {end}; j += lanes) {{"
            return [head, *coords, *lines, "}"]

        coords, names = self._coordinates("r", lengths, "j", "r", 1, "whole")
        if beyond:
            inside, outside = self.partly.get("r", self.tree), self.tree
        else:
            inside, outside = self.bodies[-1], self.partly.get("k", self.tree)
        main = point(inside, names, "j")
        if not self._within("r"):
            return steps(main)
        slab = self._slabs("r", self._cuts("r"))
        uses = point(outside, slab.names, slab.number)
        last = self._loop(others[0], slab.total, others[1], [*slab.found, *uses])
        if len(lengths) > 1:
            place = _Site({("r", a): x for a, x in enumerate(names)}, {"r": "j"})
            return [*last, *steps([f"if ({self._inside(place, 'r')}) {{", *main, "}"])]
        ((k, low, length),) = self._within("r")
        below, above = (
            self.number(("core", n), value) for n, value in enumerate((low, low + length))
        )
        return [
            *last,
            f"const {self.count} from = begin > {below} ? begin : {below};",
            f"const {self.count} past = end < {above} ? end : {above};",
            *steps(main, "from", "past"),
        ]

    def _taken(self, tree: _Tree, site: _Site, which: str) -> list[str]:
        """Compute the values of a vector of points and put them into the accumulators."""
        width = self.width
        together = width if self.rows else 1
        declared, after, takes = [], [], []
        if any(op in ("argmin", "argmax") for op, _, _ in self.kinds):
            text = self._offset(self.position, site, wide=True)
            declared.append(f"const long long at = {text};")
        for j, ((op, short, _), root) in enumerate(zip(self.kinds, tree.roots, strict=True)):
            value = f"{tree.letter}{root}"
            extra = ""
            if op in ("argmin", "argmax"):
                step = self._fast(self.position) if self.rows else 0
                name = "stride", self.position, self.along, len(self.axes[self.along]) - 1
                extra = ", at, " + (self._times("1", step, name, True) if step else "0")
            elif op == "moment" and self.across < 0 and not self.loose:
                # the vectors of a step are there in order
                extra = ", opens" if self.sliding else ", u == 0"
            kind = TYPES[short]
            if op == "histogram":
                after.append(f"count_bin(table, {value}, bins, copies);")
            elif together > 1:
                declared.append(f"{kind} g{j}[{together}];")
                after.append(f"g{j}[e] = {value};")
                takes.append(f"part{j}[0].take(g{j}{extra});")
            else:
                target = "e" if self.held > 1 else "0"
                after.append(f"const {kind} g{j}[1] = {{{value}}};")
                after.append(f"part{j}[{target}].take(g{j}{extra});")
        return [*declared, *self._elements(tree, site, which, after), *takes]

    def _gathered(self) -> list[str]:
        """Put the parts of a block's threads together."""
        lines = []
        for j in range(len(self.kinds)):
            lines += self._over_held([self._gather(f"part{j}[e]")])
        return lines

    def _gather(self, part: str) -> str:
        if self.wide:
            return f"gather_block({part}, kept);"
        if self.rows:
            return f"gather_lanes({part}, lanes);"
        return f"gather_lines({part}, lanes, side, kept);"

    def _scratch(self, groups: int, share: int, side: int, name: str) -> list[str]:
        """Where the blocks that share results leave their parts."""
        many = -(-groups * share * side * self.held // 2) * 2  # parts may be 16 bytes long
        sizes = [_part_size(op, short, gives) for op, short, gives in self.kinds]
        slot, counters = self.slots.at("scratch"), self.slots.at("counters")
        taken, counting = (at[1] if at else 0 for at in (self.scratch, self.counters))
        if share > 1:
            self.scratch = slot, taken + many * sum(sizes)
            self.counters = counters, counting + groups
        behind = [f" + {self.slot((what, name), n)}" if name else ""
                  for what, n in (("scratch", taken), ("counters", counting))]  # fmt: skip
        lines = [
            f"unsigned char* const scratch = (unsigned char*)S({slot}){behind[0]};",
            f"unsigned* const counters = (unsigned*)S({counters}){behind[1]};",
        ]
        before = 0
        room = self.slot(("room", name), many)
        for j, size in enumerate(sizes):
            lines.append(f'static_assert(sizeof(Part{j}) == {size}, "scratch");')
            lines.append(f"Part{j}* const left{j} = (Part{j}*)(scratch + {before} * {room});")
            before += size
        return lines

    def _combined(self) -> list[str]:
        """The last of the blocks that share results goes on with what all of them have left."""
        own = f"(((unsigned long long)w * side + x) * {self.held} + e)"
        theirs = f"((((unsigned long long)group * share + p) * side + x) * {self.held} + e)"
        if self.held == 1:
            own, theirs = own.replace(" + e)", ")"), theirs.replace(" + e)", ")")
        leave, take = [], []
        for j in range(len(self.kinds)):
            settle = [f"part{j}[e].settle();"] if self.kinds[j][0] == "moment" else []
            leave += self._over_held([*settle, f"left{j}[{own}] = part{j}[e];"])
            # one of a thread's results after the other: all at once would take all its registers
            take += [
                "#pragma unroll 1",
                f"for (int e = 0; e < {self.held}; ++e) {{",
                f"Part{j} whole;",
                "whole.clear();",
                "if (live) for (unsigned p = y; p < share; p += lanes) {",
                f"whole.merge(from_memory(left{j} + {theirs}));",
                "}",
                self._gather("whole"),
                f"if (y == 0 && live) left{j}[{own}] = whole;",
                "}",
                *self._over_held([f"if (y == 0 && live) part{j}[e] = left{j}[{own}];"]),
            ]
        return [
            "if (share > 1) {",
            "if (y == 0 && live) {",
            *leave,
            "__threadfence();",
            "}",
            "__syncthreads();",
            "if (threadIdx.x == 0) last = atomicAdd(counters + group, 1u) == share - 1;",
            "__syncthreads();",
            "if (!last) continue;",
            "__threadfence();",
            "if (threadIdx.x == 0) counters[group] = 0;",
            *take,
            "}",
        ]

    def _finished(self, site: _Site, number: str = "o") -> list[str]:
        """The outputs, of results that are complete; `number` says which result a point has, where
        they are in order."""
        tree = self.final
        held = self.held
        coords = dict(site.coords)
        linear = {"k": f"o * {held}u + e" if held > 1 else number} if number else {}
        if held > 1:
            last = len(self.axes["k"]) - 1
            coords["k", last] = f"{coords['k', last]} + e"
        place = _Site(coords, linear)
        declared = []
        for k in tree.inputs:
            clear = " = {}" if tree.guards[k] is not None else ""
            declared.append(f"{STORED[tree.nodes[k].code]} z{k}{clear};")
        body = [*declared]
        body += self._scoped(self._loads(tree, tree.inputs, place, "z#"), bool(tree.inputs))
        values = {k: f"z{k}" for k in tree.inputs}
        wanted = tree.below(tree.roots)
        body += self._statements(tree, wanted, place, values)
        offset = self._offset(self.out_layout, place)
        vector = held > 1 and self._fast(self.out_layout) == 1
        before, after = [], []
        for n, (short, root) in enumerate(zip(self.outs, tree.roots, strict=True)):
            value = stored(short, f"{tree.letter}{root}")
            if vector:
                kind = f"Vec<{STORED[short]}, {held}>"
                before.append(f"{kind} out{n};")
                body.append(f"out{n}.x[e] = {value};")
                start = self._offset(self.out_layout, site)
                after.append(f"*({kind}*)(q{n} + ({start})) = out{n};")
            else:
                body.append(f"q{n}[{offset}] = {value};")
        if held == 1:
            return body
        return [*before, "#pragma unroll", f"for (int e = 0; e < {held}; ++e) {{", *body, "}",
                *after]  # fmt: skip

    # ---- windows

    def _windows(self) -> list[str]:
        """Each thread goes along all that some results one behind the other reduce."""
        some, width, c, tree = self.sliding, self.width, self.count, self.tree
        self.held = width
        axes, (window, *others) = self.axes["k"], self.axes["r"]
        at = len(axes) - 2  # the axis that they slide along
        lengths = self._lengths("k", width)
        lengths[at] = -(-lengths[at] // some)
        n = math.prod(lengths)
        self.blocks = max(1, min(-(-n // THREADS), self.processors * WAVES))
        coords, names = self._coordinates("k", lengths, "i", "k", width)
        across, inner = self._coordinates("r", [x.length for x in others], "q", "r")
        site = _Site({("k", x): name for x, name in enumerate(names)})
        site.coords["k", at] = "begin"
        place = _Site(site.coords | {("r", 0): "(int)s"})
        place.coords |= {("r", x + 1): name for x, name in enumerate(inner)}
        reduced = [("r", x) for x in range(1 + len(others))]
        loads: list[str] = []
        if others:  # all that lies across belongs to a step
            many = self.number("across", math.prod(x.length for x in others))
            takes = self._point(tree, place, self._taken(tree, place, "0"))
            takes = [f"for ({c} q = 0; q < {many}; ++q) {{", *across, *takes, "}"]
        else:
            loads = self._scoped(self._loads(tree, self._inner(tree), place, "x#[u]"))
            takes = self._taken(tree, place, "u")
        last = f"({self.int}){self.slot('last', axes[at].length - some)}"
        here = _Site({**site.coords, ("k", at): "(begin + t)"})
        finished = ["if (t >= skip) {", *self._finished(here, ""), "}"]
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {c} n = {self.number('n', n)};",
            "if (n == 0 || blockIdx.x >= blocks) return;",
            *self._pointers(),
            *self._loop(
                f"blockIdx.x * {THREADS}u + threadIdx.x", "n", f"({c})blocks * {THREADS}u",
                [
                    *coords,
                    f"const {self.int} mine = {names[at]} * {some};",
                    f"const {self.int} begin = mine < {last} ? mine : {last};",
                    f"const {self.int} skip = mine - begin;",
                    *self._before(_Site(site.coords | dict.fromkeys(reduced, "0"))),
                    *self._shared(window.length, loads, takes, finished),
                ],
            ),
        ]  # fmt: skip

    def _shared(
        self, window: int, loads: list[str], takes: list[str], finished: list[str],
        some: int = 0, tree: _Tree | None = None, name: str = "window",
    ) -> list[str]:  # fmt: skip
        """Results of windows one behind the other. Most of what these reduce they share (`shared`);
        what lies before that is put together from its end backwards (`head`), what lies behind it
        from its begin on (`tail`): van Herk, Pattern Recognition Letters 13 (1992). Step `s` is
        loaded, and taken in, and result `t` is `finished`."""
        some, width, c = some or self.sliding, self.width, self.count

        def room(times: int) -> list[str]:
            return self._declared(tree or self.tree, times) if loads else []

        def every(own: str, moments: str = "") -> list[str]:
            """The same for all reductions, and for all results side by side."""
            return self._over_held(
                [
                    (moments if moments and op == "moment" else own).replace("#", str(j))
                    for j, (op, _, _) in enumerate(self.kinds)
                ]
            )

        def joined(other: str) -> list[str]:
            return every(f"part#[e].merge({other});", f"part#[e].add({other});")

        def parts(name: str, many: str = "") -> list[str]:
            return [f"Part{j} {name}{j}{many}[{width}];" for j in range(len(self.kinds))]

        def into(name: str, which: str = "") -> list[str]:
            """What takes in values from here on."""
            return [f"Part{j} (&part{j})[{width}] = {name}{j}{which};"
                    for j in range(len(self.kinds))]  # fmt: skip

        reach = f"({c}){self.slot(name, window)}"
        shared = [
            f"for ({c} r = {some - 1}; r < {reach}; r += {self.times}u) {{",
            *room(self.times),
            *(self._each(f"s < {reach}", "s = r + u", loads) if loads else []),
            *self._each(
                f"s < {reach}", "s = r + u",
                ["const bool opens = u == 0;", *into("shared"), *takes],
            ),
            "}",
        ]  # fmt: skip
        ahead, closed = f"int u = 0; u < {some - 1}; ++u", "const bool opens = false;"
        head = [
            *room(some - 1),
            *(_unrolled(ahead, [f"const {c} s = u;", *loads]) if loads else []),
            *_unrolled(
                f"int u = {some - 2}; u >= 0; --u",
                [f"const {c} s = u;", closed, *into("head", "[u]"),
                 *every("part#[e].clear();", "part#[e].begin(shared#[e]);"), *takes,
                 f"if (u < {some - 2}) {{", *joined("head#[u + 1][e]"), "}"],
            ),
        ]  # fmt: skip
        tail = [
            *room(some - 1),
            *(_unrolled(ahead, [f"const {c} s = {reach} + u;", *loads]) if loads else []),
            *_unrolled(
                f"int t = 0; t < {some}; ++t",
                ["if (t) {", "const int u = t - 1;", f"const {c} s = {reach} + u;", closed,
                 *into("tail"), *takes, "}", *parts("part"), *every("part#[e] = shared#[e];"),
                 f"if (t < {some - 1}) {{", *joined("head#[t][e]"), "}",
                 "if (t) {", *joined("tail#[e]"), "}", *finished],
            ),
        ]  # fmt: skip
        return [
            *parts("shared"), *every("shared#[e].clear();"), *shared,
            *parts("head", f"[{some - 1}]"), "{", *head, "}",
            *parts("tail"), *every("tail#[e].clear();", "tail#[e].begin(shared#[e]);"),
            "{", *tail, "}",
        ]  # fmt: skip

    def _paned(self) -> list[str]:
        """A block makes a pane of results at a time, and leaves them in shared memory, so that they
        are written one beside the other."""
        pane, c, axes = self.pane, self.count, self.axes["k"]
        assert pane is not None
        self.held = 1
        lengths = [x.length for x in axes]
        lengths[-2] = -(-lengths[-2] // pane.rows)
        lengths[-1] = -(-lengths[-1] // pane.columns)
        many = math.prod(lengths)
        self.blocks = max(1, min(many, self.processors * WAVES))
        coords, names = self._coordinates("k", lengths, "w", "t", name="pane")
        threads, arrays, made = self._boxed(names) if isinstance(pane, Box) else self._filled(names)
        for j, (_, _, gives) in enumerate(self.kinds):
            size = pane.rows * pane.made_pitch
            arrays += [
                (f"made{j}_{r}", TYPES[g], size * _held_size(g)) for r, g in enumerate(gives)
            ]
        declared, room = [], 0
        for name, kind, nbytes in arrays:
            begin = self.slot(("room", name), room)
            declared.append(f"{kind}* const {name} = ({kind}*)(room + {begin});")
            room += -(-nbytes // 16) * 16
        rows, columns = (
            f"({self.int}){self.slot(('pane', n), n_)}"
            for n, n_ in (("rows", pane.rows), ("columns", pane.columns))
        )
        write = f"(unsigned){self.slot('results', pane.rows * pane.columns)}"
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {c} panes = {self.number('panes', many)};",
            "if (blockIdx.x >= blocks) return;",
            f"__shared__ Vec<float, 4> whole[{-(-room // 4096) * 256}];",
            "unsigned char* const room = (unsigned char*)whole;",
            *declared,
            threads,
            *self._pointers(),
            f"for ({c} w = blockIdx.x; w < panes; w += blocks) {{",
            *coords,
            f"const {self.int} above = {names[-2]} * {rows};",
            f"const {self.int} first = {names[-1]} * {columns};",
            "{",
            *made,
            "}",
            "__syncthreads();",
            f"for ({c} p = threadIdx.x; p < {write}; p += {THREADS}u) {{",
            *self._split("p", pane.columns, "results"),
            f"const int at = row * {self._made_pitch()} + column + column / {pane.some};",
            f"if ({self._inside_pane('row', points=False)}) {{",
            *self._finished(self._in_pane(names, "row"), ""),
            "}",
            "}",
            "}",
        ]  # fmt: skip

    def _in_pane(self, names: Sequence[str], row: str) -> _Site:
        """Where a point or a result of a pane is, by its row and column."""
        coords = {("k", x): name for x, name in enumerate(names)}
        coords["k", len(names) - 2] = f"(above + {row})"
        coords["k", len(names) - 1] = "(first + column)"
        return _Site(coords | {("r", x): "0" for x in range(len(self.axes["r"]))})

    def _inside_pane(self, row: str, points: bool) -> str:
        """Whether there is such a result, or such a point."""
        assert self.pane is not None
        more = (self.pane.down - 1, self.pane.window - 1) if points else (0, 0)
        rows, columns = (
            f"({self.int}){self.slot(('end', n, points), axis.length + extra)}"
            for n, (axis, extra) in enumerate(zip(self.axes["k"][-2:], more, strict=True))
        )
        return f"above + {row} < {rows} && first + column < {columns}"

    def _split(self, number: str, wide: int, what: str) -> list[str]:
        """The row and the column of one of many."""
        wide_, magic = self.slot((what, "wide"), wide), self.slot((what, "magic"), _magic(wide))
        return [
            f"const int row = (int)divide((unsigned){number}, {magic});",
            f"const int column = (int){number} - row * (int){wide_};",
        ]

    def _pitch(self) -> str:
        assert self.pane is not None
        return f"(int){self.slot('pitch', self.pane.pitch)}"

    def _made_pitch(self) -> str:
        assert self.pane is not None
        return f"(int){self.slot('made pitch', self.pane.made_pitch)}"

    def _central(self, names: Sequence[str], core: list[str], anywhere: list[str]) -> list[str]:
        """What is done where all points of a pane lie in the core, and elsewhere."""
        places = [*names[:-2], "above", "first"]
        bounds = []
        for n, (low, high, size) in self.within_panes.items():
            low_, high_ = (
                f"({self.int}){self.slot(('core', n, end), value)}"
                for end, value in enumerate((low, high - size))
            )
            bounds.append(f"{places[n]} >= {low_} && {places[n]} <= {high_}")
        return [f"if ({' && '.join(bounds)}) {{", *core, "} else {", *anywhere, "}"]

    def _results_left(self) -> list[str]:
        """Leave results in shared memory, the one before number `t` of which is `own`."""
        return [
            f"made{j}_{r}[own + t] = {value};"
            for j, (op, short, gives) in enumerate(self.kinds)
            for r, value in enumerate(results(op, short, gives, f"part{j}[0]"))
        ]

    def _filled(self, names: Sequence[str]) -> tuple[str, list[tuple[str, str, int]], list[str]]:
        """Compute what is reduced of each point of a pane once, and leave that in shared memory, of
        which each thread makes some results. What threads are called, arrays in shared memory
        (name, type, bytes), and what is done."""
        pane, c, tree, some = self.pane, self.count, self.tree, self.sliding
        assert pane is not None
        site = self._in_pane(names, "row")
        arrays: list[tuple[str, str, int]] = []
        takes: list[str] = []  # what takes in a value, of each reduction
        known: dict[int, str] = {}
        for j, (root, (op, short, _)) in enumerate(zip(tree.roots, self.kinds, strict=True)):
            if root not in known:
                known[root] = f"points{j}"
                nbytes = pane.high * pane.pitch * _held_size(short)
                arrays.append((known[root], TYPES[short], nbytes))
            takes.append(f"const {TYPES[short]} g{j}[1] = {{{known[root]}[at]}};")
            takes.append(f"part{j}[0].take(g{j}{', opens' if op == 'moment' else ''});")
        pitch, many = self._pitch(), f"(unsigned){self.slot('points', pane.high * pane.wide)}"
        found = [
            *self._split("p", pane.wide, "points"),
            f"const int to = row * {pitch} + column + column / {some};",
        ]

        def filled(tree: _Tree, check: str) -> list[str]:
            """Compute what is reduced of each point of a pane, if it is one."""
            x = f"{self._register(tree)}#[u]"
            loads = self._scoped(self._loads(tree, tree.inputs, site, x))
            stores = [f"{known[root]}[to] = {tree.letter}{own};"
                      for root, own in zip(self.tree.roots, tree.roots, strict=True)]  # fmt: skip
            uses = self._elements(tree, site, "u", list(dict.fromkeys(stores)))
            if check:
                loads, uses = ([f"if ({check}) {{", *lines, "}"] for lines in (loads, uses))
            each = f"p < {many}", f"p = i + u * {THREADS}u"
            return [
                f"for ({c} i = threadIdx.x; i < {many}; i += {THREADS * self.times}u) {{",
                *self._declared(tree, self.times),
                *(self._each(*each, [*found, *loads]) if loads else []),
                *self._each(*each, [*found, *uses]),
                "}",
            ]

        fill = filled(tree, self._inside_pane("row", points=True))
        if self.core is not None:
            fill = self._central(names, filled(self.core, ""), fill)
        step = [f"const int at = mine + (int)(s + s / {some}u);", *takes]
        if pane.down > 1:
            down, unrolled = f"(int){self.slot('down', pane.down)}", []
            if pane.down <= MOST_AT_ONCE:  # part of the text: its loads are under way at once
                down, unrolled = str(pane.down), ["#pragma unroll"]
            step = [*unrolled, f"for (int q = 0; q < {down}; ++q) {{",
                    f"const int at = mine + q * {pitch} + (int)(s + s / {some}u);",
                    *takes, "}"]  # fmt: skip
        across = f"(unsigned){self.slot('across', pane.columns // some)}"
        threads = f"const int x = threadIdx.x % {across}, y = threadIdx.x / {across};"
        return threads, arrays, [
            *fill,
            "__syncthreads();",
            f"const int mine = y * {pitch} + x * {some + 1};",
            f"const int own = y * {self._made_pitch()} + x * {some + 1};",
            *self._shared(pane.window, [], step, self._results_left()),
        ]  # fmt: skip

    def _boxed(self, names: Sequence[str]) -> tuple[str, list[tuple[str, str, int]], list[str]]:
        """Each thread puts together what lies in its column, of results one below the other, and
        leaves that in shared memory; then of that what lies along a row. As `_filled`."""
        box = self.pane
        assert isinstance(box, Box)
        size, arrays = box.rows * box.pitch, []
        for j, kind in enumerate(self.kinds):
            own = [(_array(j, x), "double", size * 8) for x in self._members(j)]
            arrays += own or [(f"columns{j}", f"Part{j}", size * _part_size(*kind))]
        fill = self._columns(self.tree, names, inside=True)
        if self.core is not None:
            fill = self._central(names, self._columns(self.core, names, inside=False), fill)
        across = f"(unsigned){self.slot('across', box.wide)}"
        threads = (
            f"const int column = threadIdx.x % {across}, up = threadIdx.x / {across} * {box.tall};"
        )
        return threads, arrays, [*fill, "__syncthreads();", *self._along_rows()]

    def _members(self, j: int) -> list[str]:
        """What a moment consists of but for its count, which is known. Each lies in an array of its
        own: threads read from different banks then."""
        op, short, _ = self.kinds[j]
        if op != "moment":
            return []
        return (
            [f"{x}.{m}" for x in ("real", "imag") for m in MOMENT] if short[0] == "c" else [*MOMENT]
        )

    def _columns(self, tree: _Tree, names: Sequence[str], inside: bool) -> list[str]:
        """What lies in a thread's column of a box. Whether there are such points is asked of each
        if need be (`inside`)."""
        box, c, others = self.pane, self.count, self.axes["r"]
        assert isinstance(box, Box)
        direct = box.down <= MOST_AT_ONCE
        row = "up + u" if direct else "up + (int)s"
        site = self._in_pane(names, row)
        check = self._inside_pane(row, points=True) if inside else ""

        def asked(lines: list[str]) -> list[str]:
            return [f"if ({check}) {{", *lines, "}"] if check and lines else lines

        across, inner = self._coordinates("r", [x.length for x in others], "q", "r")
        site.coords |= {("r", x): name for x, name in enumerate(inner)}
        over, end = [], []
        if others:  # all that lies across belongs to a step
            many = self.number("deep", math.prod(x.length for x in others))
            over, end = [f"for ({c} q = 0; q < {many}; ++q) {{", *across], ["}"]
        place = f"(up + t) * {self._pitch()} + column + column / {box.some}"
        leave = []
        for j in range(len(self.kinds)):
            own = [f"{_array(j, x)}[{place}] = part{j}[0].{x};" for x in self._members(j)]
            leave += own or [f"columns{j}[{place}] = part{j}[0];"]
        if not direct:
            loads, takes = [], []
            if others:
                point = asked(self._point(tree, site, self._taken(tree, site, "0")))
                takes = [*over, *point, *end]
            else:
                x = f"{self._register(tree)}#[u]"
                loads = self._scoped(asked(self._loads(tree, self._inner(tree), site, x)))
                takes = asked(self._taken(tree, site, "u"))
            return self._shared(box.down, loads, takes, leave, box.tall, tree, "down")
        many_steps = box.tall + box.down - 1
        each = f"int u = 0; u < {many_steps}; ++u"
        loads = asked(self._loads(tree, self._inner(tree), site, f"{self._register(tree)}#[u]"))
        into = [f"Part{j} (&part{j})[1] = steps{j}[u];" for j in range(len(self.kinds))]
        opens = ["const bool opens = true;"] if self._has_moments() else []
        return [
            *[f"Part{j} steps{j}[{many_steps}][1];" for j in range(len(self.kinds))],
            *_unrolled(each, [f"steps{j}[u][0].clear();" for j in range(len(self.kinds))]),
            *over,
            *self._declared(tree, many_steps),
            *(_unrolled(each, self._scoped(loads)) if loads else []),
            *_unrolled(each, [*opens, *into, *asked(self._taken(tree, site, "u"))]),
            *end,
            *self._joined(box.tall, box.down, leave),
        ]

    def _has_moments(self) -> bool:
        return any(op == "moment" for op, _, _ in self.kinds)

    def _joined(self, many: int, reach: int, leave: list[str]) -> list[str]:
        """Put together so many windows of steps that a thread has at hand."""
        own, bases, joins = [], [], []
        for j, (op, _, _) in enumerate(self.kinds):
            own.append(f"Part{j} part{j}[1] = {{steps{j}[t][0]}};")
            bases += [f"to_one_base(steps{j});"] if op == "moment" else []
            join = "add" if op == "moment" else "merge"
            joins.append(f"part{j}[0].{join}(steps{j}[t + u][0]);")
        joined = _unrolled(f"int u = 1; u < {reach}; ++u", joins)
        return [*bases, *_unrolled(f"int t = 0; t < {many}; ++t", [*own, *joined, *leave])]

    def _along_rows(self) -> list[str]:
        """Put together along rows what lies in columns."""
        box, c = self.pane, self.count
        assert isinstance(box, Box)
        some, each = box.some, box.columns // box.some
        points = box.down * math.prod(x.length for x in self.axes["r"])
        held = f"{self.slot('points', points)}" if self._has_moments() else ""

        def read(j: int, to: str, at: str) -> list[str]:
            """What lies in a column."""
            own = [f"{to}.{x} = {_array(j, x)}[{at}];" for x in self._members(j)]
            return [*own, f"{to}.of({held});"] if own else [f"{to} = columns{j}[{at}];"]

        if box.window > MOST_AT_ONCE:
            takes = [f"const int at = mine + (int)(s + s / {some}u);"]
            for j, (op, _, _) in enumerate(self.kinds):
                join = f"join(step{j}, opens)" if op == "moment" else f"merge(step{j})"
                takes += [f"Part{j} step{j};", *read(j, f"step{j}", "at"), f"part{j}[0].{join};"]
            rows = self._shared(box.window, [], takes, self._results_left())
        else:
            many, steps = some + box.window - 1, []
            for j in range(len(self.kinds)):
                steps += read(j, f"steps{j}[u][0]", f"mine + u + u / {some}")
            rows = [
                *[f"Part{j} steps{j}[{many}][1];" for j in range(len(self.kinds))],
                *_unrolled(f"int u = 0; u < {many}; ++u", steps),
                *self._joined(some, box.window, self._results_left()),
            ]
        units = f"(unsigned){self.slot('units', box.rows * each)}"
        return [
            f"for ({c} p = threadIdx.x; p < {units}; p += {THREADS}u) {{",
            *self._split("p", each, "units"),
            f"const int mine = row * {self._pitch()} + column * {some + 1};",
            f"const int own = row * {self._made_pitch()} + column * {some + 1};",
            *rows,
            "}",
        ]

    # ---- scans

    def _scan(self) -> list[str]:
        """A line after the other, or lines side by side. All lanes of a warp take part in what they
        put together, also where they have no points."""
        width, c = self.width, self.count
        self.held = 1 if self.rows else width  # lines of one thread
        steps = self._steps()
        results_ = self.points // self.held
        lanes = min(32, _power_above(steps)) if self.rows else 1
        groups = -(-results_ // (THREADS // lanes))
        if groups >= 2**31:
            raise NotGenerated(f"a scan along {self.points:,} lines")
        self.blocks = max(1, min(groups, self.processors * WAVES))
        kept, names = self._coordinates("k", self._lengths("k", self.held), "o", "k", self.held)
        unit = width if self.rows else 1
        along, steps_ = self._coordinates("r", self._lengths("r", unit), "j", "r", unit)
        site = _Site(
            {("k", a): x for a, x in enumerate(names)}
            | {("r", a): x for a, x in enumerate(steps_)},
            {"k": f"o * {self.held}u", "r": f"j * {unit}u"},
        )
        if self.rows:
            own = [
                f"const int lanes = (int){self.slot('lanes', lanes)};",
                f"const unsigned side = {THREADS}u / lanes;",
                "const int x = threadIdx.x / lanes, y = threadIdx.x % lanes;",
            ]
        else:
            own = [
                "const int lanes = 1, x = threadIdx.x, y = 0;",
                f"const unsigned side = {THREADS}u;",
            ]
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {c} results = {self.number('results', results_)};",
            f"const {c} steps = {self.number('steps', steps)};",
            f"const unsigned groups = (unsigned){self.slot('groups', groups)};",
            "if (results == 0 || steps == 0 || blockIdx.x >= blocks) return;",
            *own,
            *self._pointers(),
            "for (unsigned w = blockIdx.x; w < groups; w += blocks) {",
            f"const {c} o = ({c})w * side + x;",
            "const bool live = o < results;",
            *kept,
            *self._still(site),
            *self._scan_parts(),
            f"for ({c} r = 0; r < steps; r += lanes * {self.times}u) {{",
            *self._scan_steps(along, site),
            "}",
            "}",
        ]

    def _still(self, site: _Site) -> list[str]:
        """Loads of what is the same along a line."""
        place = _Site(site.coords, site.linear | {"r": "0"})
        lines = []
        for tree in self.bodies:
            inner, x = set(self._inner(tree)), self._register(tree)
            outer = [k for k in tree.inputs if k not in inner]
            lines += [f"{self._kind(tree, k)} {x}{k} = {{}};" for k in outer]
            loads = self._loads(tree, outer, place, f"{x}#")
            lines += ["if (live) {", *loads, "}"] if outer else []
        return lines

    def _scan_parts(self) -> list[str]:
        """What has come together so far: of the lines of a thread, or of all lanes of one."""
        name = "carry" if self.rows else "part"
        lines = []
        for j in range(len(self.kinds)):
            lines.append(f"Part{j} {name}{j}[{self.held}];")
            lines += self._over_held([f"{name}{j}[e].clear();"])
        return lines

    def _scan_steps(self, along: list[str], site: _Site) -> list[str]:
        """What a thread does at a time."""
        width, at, condition = self.width, "j = r + u * lanes + y", "live && j < steps"
        declared, loads = [], []
        for tree in self.bodies:
            inner = self._inner(tree)
            declared += self._declared(tree, self.times)
            target = f"{self._register(tree)}#[u]"
            loads += self._scoped(self._loads(tree, inner, site, target), bool(inner))
        values, whole, takes = [], [], []
        for j, root in enumerate(self.tree.roots):
            e = "e" if width > 1 else "0"
            values.append(f"g{j}[{e}] = {self.tree.letter}{root};")
            if self.rows:
                whole += [
                    f"Part{j} part{j}[1];",
                    f"part{j}[0].clear();",
                    f"if (here) take_all(part{j}[0], g{j});",
                    f"part{j}[0] = before_lane(part{j}[0], carry{j}[0], lanes, y);",
                ]
            held = "e" if self.held > 1 else "0"
            takes.append(f"take_one(part{j}[{held}], g{j}[{e}]);")
        room = [f"{TYPES[short]} g{j}[{width}];" for j, (_, short, _) in enumerate(self.kinds)]
        place = self._offset(self.out_layout, site)
        return [
            *declared,
            *(self._each(condition, at, [*along, *loads]) if loads else []),
            "#pragma unroll",
            f"for (int u = 0; u < {self.times}; ++u) {{",
            f"const {self.count} {at};",
            f"const bool here = {condition};",
            *along,
            *room,
            "if (here) {",
            *self._elements(self.tree, site, "u", values),
            "}",
            *whole,
            "if (here) {",
            f"const {self.int} at = {place};",
            *self._stores(self.final, site, "at", "u", takes),
            "}",
            "}",
        ]

    # ---- the whole text

    def generated(self) -> Generated:
        if self.kernel.counts:
            body = self._counting()
        elif self.scanning:
            body = self._scan()
        elif self.pane is not None:
            body = self._paned()
        elif self.sliding:
            body = self._windows()
        elif self.reducing:
            body = self._reducing()
        elif self.across >= 0:
            body = self._tiled()
        else:
            body = self._elementwise()
        count = len(self.slots.words)
        if count * 8 > MOST_BYTES:
            raise NotGenerated(f"a kernel of {count} arguments")
        most = max(1, min(MOST_ITEMS, MOST_BYTES // (8 * count)))
        text = self._text(_indented(body), count, most)
        name = f"{self._name()}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        outputs = tuple(self.slots.at(("output", n)) for n in range(len(self.outs)))
        slots = np.array(self.slots.words, np.uint64)
        inputs = tuple((slot, *what) for slot, what in self.pointers.items())
        return Generated(
            text.replace("NAME", name), name, slots, inputs, outputs, self.scratch, self.counters,
            self.blocks, THREADS, most, tuple(self.calls.values()),
        )  # fmt: skip

    def _name(self) -> str:
        """Words that tell a person what this is."""
        trees = (self.tree, self.final) if self.reducing else (self.tree,)
        every = [n for tree in trees for n in tree.nodes]
        quiet = {"input", "index", "constant", "cast", "reduced", "real", "imag", "complex"}
        words = [n.data[0].name if n.op == "call" else n.op for n in every if n.op not in quiet]
        words = [re.sub(r"\W", "", w) for w in words]
        words = [*list(dict.fromkeys(words))[:4], *[r.op for r in self.kernel.reductions][:2]]
        return "_".join(["fused", *words])[:60]

    def _text(self, body: str, slots: int, most: int) -> str:
        parts = "\n".join([*self.structs, *map(_declared, self.calls.values())])
        largest = ""
        if self.reducing and not self.kernel.counts:
            names = [f"Part{j}" for j in range(len(self.kinds))]
            members = " ".join(f"{n} {n.lower()};" for n in names)
            largest = f"union alignas(16) Largest {{ {members} }};"
        bounds = THREADS if self.at_once == 1 else f"{THREADS}, {self.at_once}"
        return f"""{pieces(parts + body)}
{parts}
{largest}
template<int N> struct Items {{ unsigned long long s[N][{slots}]; }};
#define S(k) items.s[item][k]
template<class A> __device__ __forceinline__ void work(const A& items, unsigned item) {{
{body}
}}
#ifndef ONLY_ONE
extern "C" __global__ void __launch_bounds__({bounds})
NAME(const __grid_constant__ Items<{most}> items) {{ work(items, blockIdx.y); }}
#endif
#ifndef ONLY_MANY
extern "C" __global__ void __launch_bounds__({bounds})
NAME_one(const __grid_constant__ Items<1> items) {{ work(items, 0); }}
#endif
"""


# ---- small matters


def _declared(call: Call) -> str:
    """What is linked, and a function that calls it: its result is no number where it raised."""
    kind, symbol = TYPES[call.gives], call.symbol
    takes, given, passed = [], [], []
    for n, short in enumerate(call.args):
        given.append(f"{TYPES[short]} x{n}")
        if short[0] == "c":
            takes += [TYPES["f4" if short == "c8" else "f8"]] * 2
            passed += [f"x{n}.x", f"x{n}.y"]
        else:
            takes.append(STORED[short])
            passed.append(f"x{n}")
    stored_as = STORED[call.gives]
    return f"""
extern "C" __device__ int {symbol}({", ".join([f"{stored_as}*", *takes])});
__device__ __forceinline__ {kind} of_{symbol}({", ".join(given)}) {{
  {stored_as} y = {{}};
  if ({symbol}({", ".join(["&y", *passed])})) return {NOT_A_NUMBER[call.gives]};
  return {loaded(call.gives, "y")};
}}""".strip("\n")


def _array(j: int, member: str) -> str:
    """What the array is called that has a member of the moments of columns."""
    return f"columns{j}_{member.replace('.', '_')}"


def _unrolled(head: str, lines: list[str]) -> list[str]:
    return ["#pragma unroll", f"for ({head}) {{", *lines, "}"]


def _let(code: str, name: str, text: str) -> str:
    """A statement that gives a value its name. It is assigned, as a compiler works out, where it
    can, what a name begins with, and follows those within it as often as they occur: a chain of 40
    values, each of which occurs twice in the next, would take it years."""
    return f"{TYPES[code]} {name}; {name} = {text};"


def _literal(x: Any) -> str:
    """A number as C++ has it, exactly."""
    if x.dtype.kind == "i":
        return f"{int(x)}ll" if x > np.iinfo(np.int64).min else "(long long)0x8000000000000000ull"
    return f"{float(x)!r}{'f' if x.dtype.itemsize == 4 else ''}"


def _evenly(groups: int, slots: int) -> int:
    """In how many parts to do each group so that, of `slots` at a time, the last ones are no small
    rest."""
    waste = {n: -groups * n % slots / (groups * n) for n in range(1, 5)}
    return min(waste, key=lambda n: (waste[n] > 0.05, waste[n] if waste[n] > 0.05 else n))


def _dtype(short: str) -> np.dtype[Any]:
    return np.dtype("?" if short == "b1" else short)


def _size(short: str) -> int:
    return int(short[1:])


def _cost(node: _Node) -> int:
    if node.op in CHEAP:
        return 1 if node.op not in ("input", "constant", "index") else 0
    wide = node.code in ("f8", "c8", "c16")
    return COSTS.get(node.op, (20, 40))[wide]


def _held_size(short: str) -> int:
    """Bytes of a value in registers."""
    return 4 if short == "f2" else _size(short)


def _part_size(op: str, short: str, gives: Sequence[str]) -> int:
    """Bytes of an accumulator."""
    if op == "moment":
        return 64 if short[0] == "c" else 32
    if op in ("argmin", "argmax"):
        return 32 if short == "c16" else 16
    added = op in ("sum", "prod")  # in double
    return 16 if gives[0] == "c16" or (added and gives[0][0] == "c") else 8


def _counting(shape: Sequence[int], axes: Iterable[int]) -> list[int]:
    """Strides that number the points along some axes in C order.

    >>> _counting((4, 5, 1, 3), (0, 2, 3))
    [3, 0, 0, 1]
    """
    strides, step = [0] * len(shape), 1
    for k in reversed(list(axes)):
        strides[k] = step if shape[k] > 1 else 0
        step *= max(shape[k], 1)
    return strides


def _power_above(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()


def _power_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _magic(d: int) -> int:
    """What `divide` needs to divide numbers below 2**31: a factor, and 32 bits up how far to shift.

    >>> m = _magic(7)
    >>> [n * (m % 2**32) >> (m >> 32) for n in (0, 6, 7, 2**31 - 1)]
    [0, 0, 1, 306783378]
    """
    shift = 31 + (d - 1).bit_length()
    return shift << 32 | -(-(1 << shift) // d)


def _indented(lines: Iterable[str]) -> str:
    out, depth = [], 1
    for line in lines:
        depth -= line.startswith("}")
        out.append("  " * depth + line)
        depth += line.endswith("{")
    return "\n".join(out)
