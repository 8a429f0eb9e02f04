"""Machine code for CPU devices: what a region of a kernel computes, in one pass and in one call.

NumPy takes the interpreter's lock again at each call. Many threads that evaluate small blocks stand
in each other's way: with sixteen, op by op on whole arrays is several times as fast. A region whose
operations are all known here is written as a function for LLVM (Numba brings it along), which runs
without that lock and reads each element once. What is not known, and what is small, is NumPy's.

Operations give the same bits as NumPy's, but for functions of the C library (`exp`, `sin`, …): the
last bit of these may be another. Sums are at least as accurate: pieces of a row are added in 32
lanes and then in pairs, and double precision sums of pieces with what was lost to rounding (Knuth's
TwoSum).
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import shelf
from .expr import DType, Expr, Reduction, View, nodes

Array = np.ndarray[Any, Any]

#: Points of a region from which on it is worth code of its own: to compile it takes 50 ms, once
#: for each kernel on a machine.
LEAST_POINTS = 2**17
#: Elements of a row that are computed before they are added up, and columns that are added up
#: beside each other: their states are in the fastest cache.
PIECE, COLUMNS = 1024, 512
#: Bytes from one element of a row to the next, at most. Beyond two lines of the cache NumPy, which
#: goes along the shorter steps, is faster, up to five times for columns of 2**k rows.
APART = 128
#: Numbers that are added up beside each other.
LANES = 32
#: Cores from which on functions of the C library are called: NumPy's own take a half to a quarter
#: of their time in one thread, and as many threads have to wait for each other at each call.
MANY = 8
#: Arrays, constants and results of one function, at most.
MOST_POINTERS = 60
#: A constant that each call of `blocks.evaluate` gives; in no kernel but there and here.
OPEN = "open"

_TYPES = {
    "b1": "i8", "i1": "i8", "u1": "i8", "i2": "i16", "u2": "i16", "i4": "i32", "u4": "i32",
    "i8": "i64", "u8": "i64", "f4": "float", "f8": "double",
}  # fmt: skip
_FLOAT = {"add": "fadd", "subtract": "fsub", "multiply": "fmul", "true_divide": "fdiv",
          "divide": "fdiv"}  # fmt: skip
_INT = {"add": "add", "subtract": "sub", "multiply": "mul", "bitwise_and": "and",
        "bitwise_or": "or", "bitwise_xor": "xor"}  # fmt: skip
_SHIFT = frozenset({"left_shift", "right_shift"})
_BOOL = {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "logical_and": "and",
         "logical_or": "or", "logical_xor": "xor", "add": "or", "multiply": "and", "maximum": "or",
         "minimum": "and", "not_equal": "xor"}  # fmt: skip
_COMPARE = {"equal": "eq", "not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt",
            "greater_equal": "ge"}  # fmt: skip
_ROUND = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "rint": "nearbyint",
          "sqrt": "sqrt", "absolute": "fabs", "fabs": "fabs"}  # fmt: skip
#: NumPy's names of what the C library has.
_LIBRARY = {
    "exp": "exp", "expm1": "expm1", "log": "log", "log1p": "log1p", "log2": "log2",
    "log10": "log10", "sin": "sin", "cos": "cos", "tan": "tan", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "arctan2": "atan2", "sinh": "sinh", "cosh": "cosh",
    "tanh": "tanh", "hypot": "hypot", "cbrt": "cbrt", "power": "pow", "float_power": "pow",
}  # fmt: skip
_CHOICES = {"maximum": ("ge", 0), "minimum": ("le", 0), "fmax": ("ge", 1), "fmin": ("le", 1)}


class NotWritten(Exception):
    """There is no code for an operation, a type, or a way through memory."""


def _llvm(dtype: DType) -> str:
    """The type of elements in memory."""
    if dtype.kind not in "biuf" or dtype.str[1:] not in _TYPES or not dtype.isnative:
        raise NotWritten(dtype)
    return _TYPES[dtype.str[1:]]


def _value(dtype: DType) -> str:
    """The type of a value on the way."""
    return "i1" if dtype.kind == "b" else _llvm(dtype)


# ---- functions as text


class _Text:
    """One function in LLVM's language, line by line."""

    def __init__(self) -> None:
        self.entry: list[str] = []  # what is done once, first
        self.lines: list[str] = []
        self.used: set[str] = set()  # functions that it calls
        self._count = 0

    def new(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def __call__(self, text: str) -> str:
        name = self.new()
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def once(self, text: str) -> str:
        name = self.new()
        self.entry.append(f"  {name} = {text}")
        return name

    @contextmanager
    def loop(self, count: str, step: int = 1) -> Iterator[str]:
        place, n = self.once("alloca i64"), self._count
        self.do(f"store i64 0, ptr {place}")
        self.do(f"br label %head{n}")
        self.lines.append(f"head{n}:")
        i = self(f"load i64, ptr {place}")
        more = self(f"icmp slt i64 {i}, {count}")
        self.do(f"br i1 {more}, label %body{n}, label %done{n}")
        self.lines.append(f"body{n}:")
        yield i
        after = self(f"add nsw i64 {i}, {step}")
        self.do(f"store i64 {after}, ptr {place}")
        self.do(f"br label %head{n}")
        self.lines.append(f"done{n}:")

    def at(self, kind: str, base: str, i: str) -> str:
        return self(f"getelementptr inbounds {kind}, ptr {base}, i64 {i}")

    def load(self, dtype: DType, place: str) -> str:
        kind = _llvm(dtype)
        found = self(f"load {kind}, ptr {place}, align 1")
        return self(f"icmp ne i8 {found}, 0") if dtype.kind == "b" else found

    def store(self, dtype: DType, value: str, place: str) -> None:
        kind = _llvm(dtype)
        if dtype.kind == "b":
            value = self(f"zext i1 {value} to i8")
        self.do(f"store {kind} {value}, ptr {place}, align 1")

    def body(self) -> str:
        return "\n".join(["entry:", *self.entry, "  br label %begin", "begin:", *self.lines])

    # ---- operations

    def call(self, name: str, kind: str, *args: str) -> str:
        self.used.add(f"declare {kind} @{name}({', '.join([kind] * len(args))})")
        return self(f"call {kind} @{name}({', '.join(f'{kind} {a}' for a in args)})")

    def cast(self, value: str, given: DType, wanted: DType) -> str:
        a, b = _value(given), _value(wanted)
        if given == wanted:
            return value
        if wanted.kind == "b":
            return self.truth(value, given)
        if wanted.kind == "f":
            if given.kind == "f":
                if given.itemsize == wanted.itemsize:
                    return value
                way = "fpext" if wanted.itemsize > given.itemsize else "fptrunc"
            else:
                way = "sitofp" if given.kind == "i" else "uitofp"
        elif given.kind == "f":
            raise NotWritten("a cast to integers: what is out of range is the processor's affair")
        elif a == b:
            return value
        elif given.kind != "b" and given.itemsize > wanted.itemsize:
            way = "trunc"
        else:
            way = "sext" if given.kind == "i" else "zext"
        return self(f"{way} {a} {value} to {b}")

    def truth(self, value: str, dtype: DType) -> str:
        if dtype.kind == "b":
            return value
        kind = _value(dtype)
        if dtype.kind == "f":
            return self(f"fcmp une {kind} {value}, 0.0")
        return self(f"icmp ne {kind} {value}, 0")

    def compare(self, how: str, dtype: DType, a: str, b: str) -> str:
        if dtype.kind == "f":
            order = "u" if how == "ne" else "o"
            return self(f"fcmp {order}{how} {_value(dtype)} {a}, {b}")
        sign = "" if how in ("eq", "ne") else "s" if dtype.kind == "i" else "u"
        return self(f"icmp {sign}{how} {_value(dtype)} {a}, {b}")

    def chosen(self, op: str, dtype: DType, a: str, b: str) -> str:
        """The larger or the smaller, as NumPy chooses; `fmax` and `fmin` let NaNs go."""
        how, odd = _CHOICES[op]
        first = self.compare(how, dtype, a, b)
        kind = _value(dtype)
        if dtype.kind == "f":
            x = (a, b)[odd]
            unordered = self(f"fcmp uno {kind} {x}, {x}")
            first = self(f"or i1 {first}, {unordered}")
        return self(f"select i1 {first}, {kind} {a}, {kind} {b}")

    def operation(self, node: Expr, args: list[str]) -> str:
        op, dtype = node.op, node.dtype
        types = [a.dtype for a in node.args]
        kind = _value(dtype)
        if op == "cast":
            return self.cast(args[0], types[0], dtype)
        if op == "where":
            return self(f"select i1 {args[0]}, {kind} {args[1]}, {kind} {args[2]}")
        first = types[0]
        for t in types:
            _llvm(t)
        if any(t != first for t in types):
            raise NotWritten(op)
        if op in ("logical_and", "logical_or", "logical_xor", "logical_not"):
            args = [self.truth(a, first) for a in args]
            if op == "logical_not":
                return self(f"xor i1 {args[0]}, true")
            return self(f"{_BOOL[op]} i1 {args[0]}, {args[1]}")
        if op in ("isnan", "isfinite", "isinf") and first.kind in "biu":
            return "true" if op == "isfinite" else "false"
        if first.kind == "b":
            if op in ("invert", "bitwise_not"):
                return self(f"xor i1 {args[0]}, true")
            if op == "equal":
                different = self(f"xor i1 {args[0]}, {args[1]}")
                return self(f"xor i1 {different}, true")
            if op not in _BOOL:
                raise NotWritten(op)
            return self(f"{_BOOL[op]} i1 {args[0]}, {args[1]}")
        if op in _COMPARE:
            return self.compare(_COMPARE[op], first, *args)
        if op in ("isnan", "isfinite", "isinf", "signbit") and first.kind == "f":
            return self._classified(op, first, args[0])
        if dtype != first:
            raise NotWritten(op)
        if op in _CHOICES:
            return self.chosen(op, dtype, *args)
        if op == "positive":
            return args[0]
        if op == "sign":
            return self._sign(dtype, args[0])
        if op == "square":
            return self(f"{'fmul' if dtype.kind == 'f' else 'mul'} {kind} {args[0]}, {args[0]}")
        if dtype.kind == "f":
            if op == "power" and node.args[1].op == "constant" and node.args[1].value == 0.5:
                raise NotWritten("NumPy takes the root, of -inf, too")
            return self._of_floats(op, dtype, args)
        if op in _INT:
            return self(f"{_INT[op]} {kind} {args[0]}, {args[1]}")
        if op in _SHIFT:
            return self._shifted(op, dtype, *args)
        if op == "negative":
            return self(f"sub {kind} 0, {args[0]}")
        if op in ("invert", "bitwise_not"):
            return self(f"xor {kind} {args[0]}, -1")
        if op == "absolute":
            if dtype.kind == "u":
                return args[0]
            other = self(f"sub {kind} 0, {args[0]}")
            below = self(f"icmp slt {kind} {args[0]}, 0")
            return self(f"select i1 {below}, {kind} {other}, {kind} {args[0]}")
        raise NotWritten(op)

    def _shifted(self, op: str, dtype: DType, a: str, b: str) -> str:
        """Shifts by no less than a number has bits, or by less than none, leave nothing, or the
        sign: as NumPy has it, where the processor does as it likes."""
        kind, bits = _value(dtype), 8 * dtype.itemsize
        how = "shl" if op == "left_shift" else "ashr" if dtype.kind == "i" else "lshr"
        inside = self(f"icmp ult {kind} {b}, {bits}")
        by = self(f"select i1 {inside}, {kind} {b}, {kind} 0")
        found = self(f"{how} {kind} {a}, {by}")
        rest = self(f"ashr {kind} {a}, {bits - 1}") if how == "ashr" else "0"
        return self(f"select i1 {inside}, {kind} {found}, {kind} {rest}")

    def _sign(self, dtype: DType, x: str) -> str:
        """One with the sign of a number; 0 of zeros, and what is no number stays that."""
        kind = _value(dtype)
        zero, one, less = ("0.0", "1.0", "-1.0") if dtype.kind == "f" else ("0", "1", "-1")
        above = self.compare("gt", dtype, x, zero)
        if dtype.kind == "u":
            return self(f"select i1 {above}, {kind} {one}, {kind} {zero}")
        below = self.compare("lt", dtype, x, zero)
        rest = zero
        if dtype.kind == "f":
            odd = self(f"fcmp uno {kind} {x}, {x}")
            rest = self(f"select i1 {odd}, {kind} {x}, {kind} {zero}")
        rest = self(f"select i1 {below}, {kind} {less}, {kind} {rest}")
        return self(f"select i1 {above}, {kind} {one}, {kind} {rest}")

    def _classified(self, op: str, dtype: DType, x: str) -> str:
        kind = _value(dtype)
        if op == "signbit":
            bits = _TYPES[f"i{dtype.itemsize}"]
            return self(f"icmp slt {bits} {self(f'bitcast {kind} {x} to {bits}')}, 0")
        if op == "isnan":
            return self(f"fcmp uno {kind} {x}, {x}")
        size = self.call(f"llvm.fabs.{_suffix(kind)}", kind, x)
        how = "oeq" if op == "isinf" else "olt"
        return self(f"fcmp {how} {kind} {size}, 0x7FF0000000000000")

    def _of_floats(self, op: str, dtype: DType, args: list[str]) -> str:
        kind = _value(dtype)
        if op in _FLOAT:
            return self(f"{_FLOAT[op]} {kind} {args[0]}, {args[1]}")
        if op == "negative":
            return self(f"fneg {kind} {args[0]}")
        if op == "reciprocal":
            return self(f"fdiv {kind} 1.0, {args[0]}")
        if op in _ROUND:
            return self.call(f"llvm.{_ROUND[op]}.{_suffix(kind)}", kind, args[0])
        if op in _LIBRARY and cores() >= MANY and _library_has(_LIBRARY[op]):
            return self.call(_LIBRARY[op] + "f" * (kind == "float"), kind, *args)
        raise NotWritten(op)


def _suffix(kind: str) -> str:
    return "f32" if kind == "float" else "f64"


# ---- values of a row


class _Row:
    """The expressions of a region in a function: what they read, as its arguments."""

    def __init__(self, axes: int, roots: Sequence[Expr]):
        self.axes, self.order = axes, nodes(roots)
        self.slots: dict[int, int] = {}
        self.leaves: list[Expr] = []  # each has a pointer, or numbers
        numbers: dict[Any, int] = {}  # of nodes that say the same
        words: list[Any] = [axes]
        for node in self.order:
            args = tuple([self.slots[id(a)] for a in node.args])
            new = len(numbers)
            number = numbers.setdefault((node.op, node.dtype, node.data, args), new)
            self.slots[id(node)] = number
            if number == new:
                words.append((node.op, node.dtype, args, _written_of(node)))
                if not node.args:
                    self.leaves.append(node)
        words += [self.slots[id(r)] for r in roots]
        #: What the function's text is made of, and equal where that is.
        self.words = tuple(words)

    def begins(self, text: _Text) -> None:
        """Declare what the function is given."""
        self.text, axes = text, self.axes
        self.fixed: dict[int, str] = {}  # what is the same at every point
        self.ints: list[tuple[str, Any]] = []  # numbers that the function is given
        self.lengths = [self.number("extent", k) for k in range(axes)]
        self.pointers: list[str] = []
        self._strides: dict[int, list[str]] = {}
        self.apart: dict[int, str] = {}  # how far the elements of a row are, if not beside
        for n, leaf in enumerate(self.leaves):
            self._declare(n, leaf)

    def number(self, what: str, which: Any) -> str:
        place = self.text.once(f"getelementptr inbounds i64, ptr %ints, i64 {len(self.ints)}")
        self.ints.append((what, which))
        return self.text.once(f"load i64, ptr {place}")

    def _declare(self, n: int, leaf: Expr) -> None:
        slot = self.slots[id(leaf)]
        if leaf.op == "index":
            steps = [self.number("index", (n, k)) for k in range(self.axes)]
            self._strides[n] = [self.number("start", n), *steps]
            return
        if leaf.op not in ("input", "constant", OPEN):
            raise NotWritten(leaf.op)
        self.pointers.append(f"%leaf{n}")
        kind = _llvm(leaf.dtype)
        if leaf.op == "input":
            *outer, inner = leaf.data[1].strides
            if abs(inner) * leaf.dtype.itemsize > APART:
                raise NotWritten("memory that is not read along the rows")
            if any(outer) or inner:
                steps = [self.number("stride", (n, k)) for k in range(self.axes - 1)]
                self._strides[n] = steps
                if inner not in (0, 1):
                    self.apart[n] = self.number("stride", (n, self.axes - 1))
                return
        found = self.text.once(f"load {kind}, ptr %leaf{n}, align 1")
        if leaf.dtype.kind == "b":
            found = self.text.once(f"icmp ne i8 {found}, 0")
        self.fixed[slot] = found

    def begin(self, outer: list[str]) -> None:
        """Where each leaf's row begins; what is the same along it."""
        text = self.text
        self.rows: dict[int, str] = {}
        self.same = dict(self.fixed)
        for n, leaf in enumerate(self.leaves):
            if n not in self._strides:
                continue
            if leaf.op == "index":
                start, *steps = self._strides[n]
                self.rows[n] = total(text, [(start, None), *zip(steps, outer, strict=False)])
                continue
            where = total(text, list(zip(self._strides[n], outer, strict=True)))
            row = text.at(_llvm(leaf.dtype), f"%leaf{n}", where)
            if leaf.data[1].strides[-1]:
                self.rows[n] = row
            else:
                self.same[self.slots[id(leaf)]] = text.load(leaf.dtype, row)

    def values(self, j: str, roots: Sequence[Expr]) -> list[str]:
        """The roots' values at one point of the row."""
        text, found = self.text, dict(self.same)
        for n, leaf in enumerate(self.leaves):
            if n not in self.rows:
                continue
            if leaf.op == "index":
                step = text(f"mul i64 {self._strides[n][-1]}, {j}")
                value = text(f"add i64 {self.rows[n]}, {step}")
            else:
                at = text(f"mul i64 {self.apart[n]}, {j}") if n in self.apart else j
                value = text.load(leaf.dtype, text.at(_llvm(leaf.dtype), self.rows[n], at))
            found[self.slots[id(leaf)]] = value
        for node in self.order:
            slot = self.slots[id(node)]
            if slot not in found:
                args = [found[self.slots[id(a)]] for a in node.args]
                found[slot] = text.operation(node, args)
        return [found[self.slots[id(r)]] for r in roots]


def _written_of(node: Expr) -> Any:
    """What the text of a function has of a node beyond its operation: constants and steps through
    memory are what it is given."""
    if node.op == "constant" or node.op == OPEN or node.op == "index":
        return None
    if node.op == "input":
        *outer, inner = node.data[1].strides
        near = abs(inner) * node.dtype.itemsize <= APART
        return any(outer), inner if inner in (0, 1) else None, near
    half = node.op == "power" and node.args[1].op == "constant" and node.args[1].value == 0.5
    return node.data, half


def total(text: _Text, parts: Sequence[tuple[str, str | None]]) -> str:
    """A sum of products."""
    out = "0"
    for a, b in parts:
        a = a if b is None else text(f"mul nsw i64 {a}, {b}")
        out = text(f"add nsw i64 {out}, {a}")
    return out


# ---- functions


class _Written(NamedTuple):
    """A function for all regions that differ in their extents, steps, offsets and constants."""

    function: Callable[..., Any]
    ints: tuple[tuple[str, Any], ...]  # numbers that it is given


#: By what the text is made of: to write it takes longer than many a region. None: there is none.
_written: dict[Any, Any] = {}
_UNKNOWN = object()
MOST_WRITTEN = 4096


def _known(words: Any, write: Callable[[], _Written]) -> _Written:
    """The function of a row, written once."""
    found = _written.get(words, _UNKNOWN)
    if found is _UNKNOWN:
        try:
            found = write()
        except NotWritten:
            found = None
        if len(_written) >= MOST_WRITTEN:
            _written.clear()
        _written[words] = found
    if found is None:
        raise NotWritten("as it was the first time")
    return found  # type: ignore[no-any-return]


class Code:
    """A function for a region, and what it is called with."""

    def __init__(self, written: _Written, row: _Row, shape: Sequence[int], views: Sequence[View],
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
        """`targets` are the addresses of what it writes."""
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
        """The same for a box of the region that begins elsewhere. `targets` begin there, too."""
        ints = self.ints.copy()
        for n, strides in self.moving:
            ints[n] += _dot(origin, strides)
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
                first += _dot(origin, strides)
                words.append(address(flat) + first * itemsize + offset)
        self.function(*words, *targets)


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum([x * y for x, y in zip(a, b, strict=True)])


def address(array: Array) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def writing(shape: tuple[int, ...], roots: Sequence[Expr], views: Sequence[View]) -> Code | None:
    """Code that writes the roots' values to memory that is numbered by the views; None where there
    is none."""
    try:
        if any(v.strides[-1] != 1 for v in views):
            raise NotWritten("results that do not lie along the rows")
        row = _Row(len(shape), roots)
        written = _known(row.words, lambda: _writing(row, roots))
        return Code(written, row, shape, views)
    except NotWritten:
        return None


def _writing(row: _Row, roots: Sequence[Expr]) -> _Written:
    text, axes = _Text(), row.axes
    row.begins(text)
    steps = [[row.number("target", (n, k)) for k in range(axes - 1)] for n in range(len(roots))]
    with ExitStack() as stack:
        outer = [stack.enter_context(text.loop(n)) for n in row.lengths[:-1]]
        row.begin(outer)
        ends = [
            text.at(
                _llvm(r.dtype), f"%out{n}", total(text, list(zip(steps[n], outer, strict=True)))
            )
            for n, r in enumerate(roots)
        ]
        with text.loop(row.lengths[-1]) as j:
            for value, end, root in zip(row.values(j, roots), ends, roots, strict=True):
                text.store(root.dtype, value, text.at(_llvm(root.dtype), end, j))
    return _Written(_function(text, row, len(roots), ""), tuple(row.ints))


#: Reductions, and the ufunc by which two values become one.
PAIRWISE = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "fmin": "fmin",
         "fmax": "fmax", "any": "logical_or", "all": "logical_and"}  # fmt: skip
#: What says where an extreme is, and the reduction that says which it is.
EXTREMES = {"argmin": "min", "argmax": "max"}
#: What there is code for.
REDUCED = frozenset({*PAIRWISE, *EXTREMES, "moment"})
#: Behind every position.
NOWHERE = 2**63 - 1


def identity(op: str, dtype: DType) -> Any:
    """A value that changes no other."""
    if op in ("sum", "prod", "any", "all"):
        return np.array({"sum": 0, "prod": 1, "any": False, "all": True}[op], dtype)
    if dtype.kind == "b":
        return np.array(op in ("min", "fmin"), dtype)
    if dtype.kind == "f":
        far = np.nan if op.startswith("f") else np.inf if op == "min" else -np.inf
        return np.array(far, dtype)
    facts = np.iinfo(dtype)
    return np.array(facts.max if op in ("min", "fmin") else facts.min, dtype)


def reducing(
    shape: tuple[int, ...],
    roots: Sequence[Expr],
    reductions: Sequence[Reduction],
    types: Sequence[DType],
    target: View,
    position: View,
    along: bool,
    count: int,
    few: bool,
) -> Code | None:
    """Code that reduces the roots' values into states of these types, that are there already, and
    are numbered by `target`, `count` of them; points by `position`, among those of their state;
    `along` says whether rows are reduced, and `few` that each state is of few points. See `states`.
    None where there is no code."""
    try:
        if any(r.op not in REDUCED for r in reductions):
            raise NotWritten("reductions")
        if not along and target.strides[-1] != 1:
            raise NotWritten("results that do not lie along the rows")
        row = _Row(len(shape), roots)
        words = row.words, tuple([r.op for r in reductions]), tuple(types), along, few
        written = _known(words, lambda: _reducing(row, roots, reductions, types, along, few))
        return Code(written, row, shape, [target, position], count)
    except NotWritten:
        return None


#: Arrays of a moment's state.
MOMENT = 6


def states(op: str, dtype: DType, shape: tuple[int, ...], few: bool) -> list[Array]:
    """What a reduction begins with. A sum of doubles, but of few, is followed by what it lost to
    rounding; a moment is a count, a sum, what that lost, the squared deviations from the mean, the
    first value, and the sum of what the others are beyond that: numbers that are near to each other
    and far from zero lose nothing by it. Where an extreme is comes before the extreme itself."""
    if op == "moment":
        return [np.zeros(shape) for _ in range(MOMENT)]
    if op in EXTREMES:
        return [np.full(shape, NOWHERE), np.full(shape, identity(EXTREMES[op], dtype))]
    first = np.full(shape, identity(op, dtype))
    return [first, np.zeros(shape)] if _lossy(op, dtype, few) else [first]


def finished(op: str, made: list[Array]) -> tuple[Array, ...]:
    """States as others make them: without what was lost, which is in them at the end."""
    if op in EXTREMES:
        return tuple(made)
    return (made[0], made[1], made[3]) if op == "moment" else (made[0],)


def _lossy(op: str, dtype: DType, few: bool) -> bool:
    return op == "sum" and dtype == np.float64 and not few


def _reducing(row: _Row, roots: Sequence[Expr], reductions: Sequence[Reduction],
              types: Sequence[DType], along: bool, few: bool) -> _Written:  # fmt: skip
    text, axes = _Text(), row.axes
    row.begins(text)
    steps = [row.number("target", (0, k)) for k in range(axes - 1)]
    placed = any(r.op in EXTREMES for r in reductions)
    places = [row.number("target", (1, k)) for k in range(axes)] if placed else []
    begin = row.number("first", 1) if placed else "0"
    found, outs = [], 0
    for r, t in zip(reductions, types, strict=True):
        many = MOMENT if r.op == "moment" else 1 + (r.op in EXTREMES or _lossy(r.op, t, few))
        found.append(_State(r.op, t, [f"%out{outs + n}" for n in range(many)]))
        outs += many
    helpers: dict[str, str] = {}

    def rows(stack: ExitStack) -> tuple[str, str]:
        """Where the state of a row, or of its first element, is, and the row's position."""
        outer = [stack.enter_context(text.loop(n)) for n in row.lengths[:-1]]
        row.begin(outer)
        position = total(text, [(begin, None), *zip(places, outer, strict=False)])
        return total(text, list(zip(steps, outer, strict=True))), position

    def pieces(stack: ExitStack) -> tuple[str, str]:
        """Where each piece of a row begins, and how long it is."""
        most = PIECE if along else COLUMNS
        start = stack.enter_context(text.loop(row.lengths[-1], most))
        left = text(f"sub nsw i64 {row.lengths[-1]}, {start}")
        less = text(f"icmp slt i64 {left}, {most}")
        return start, text(f"select i1 {less}, i64 {left}, i64 {most}")

    with ExitStack() as stack:
        if along:
            where, position = rows(stack)
            start, count = pieces(stack)
            buffers = [text.once(f"alloca [{PIECE} x {_llvm(t)}], align 64") for t in types]
            with text.loop(count) as i:
                values = row.values(text(f"add nsw i64 {start}, {i}"), roots)
                for value, root, s, b in zip(values, roots, found, buffers, strict=True):
                    value = text.cast(value, root.dtype, s.dtype)
                    text.store(s.dtype, value, text.at(_llvm(s.dtype), b, i))
            if placed:
                position = total(text, [(position, None), (places[-1], start)])
            for s, b in zip(found, buffers, strict=True):
                if s.op in EXTREMES:
                    s.take_extreme(text, where, b, count, (position, places[-1]), helpers)
                else:
                    s.take_piece(text, where, b, count, helpers)
        else:  # the states of a piece stay in the cache
            start, count = pieces(stack)
            where, position = rows(stack)
            where = text(f"add nsw i64 {where}, {start}")
            facts = [s.before_row(text, where, position) for s in found]
            with text.loop(count) as i:
                values = row.values(text(f"add nsw i64 {start}, {i}"), roots)
                at = text(f"add nsw i64 {where}, {i}")
                for value, root, s, known in zip(values, roots, found, facts, strict=True):
                    s.take(text, at, text.cast(value, root.dtype, s.dtype), known)
    for s in found:
        s.finish(text, row)
    function = _function(text, row, outs, "\n".join(helpers.values()))
    return _Written(function, tuple(row.ints))


class _State:
    """What a reduction has so far, in a function: arrays, by name."""

    def __init__(self, op: str, dtype: DType, arrays: list[str]):
        self.op, self.dtype, self.arrays = op, dtype, arrays

    def take_piece(
        self, text: _Text, where: str, piece: str, count: str, helpers: dict[str, str]
    ) -> None:
        """Put a piece of a row to one state."""
        op, dtype = self.op, self.dtype
        if op == "moment":
            name = "row_sum_f8"
            helpers[name] = helpers.get(name) or _lanes(name, "sum", dtype, text.used)
            helpers["row_moment"] = _moment()
            words = ", ".join([f"ptr {text.at('double', a, where)}" for a in self.arrays])
            text.do(f"call void @row_moment(ptr {piece}, i64 {count}, {words})")
            return
        name = f"row_{op}_{dtype.str[1:]}"
        helpers[name] = helpers.get(name) or _lanes(name, op, dtype, text.used)
        found = text(f"call {_llvm(dtype)} @{name}(ptr {piece}, i64 {count})")
        if dtype.kind == "b":
            found = text(f"icmp ne i8 {found}, 0")
        self.take(text, where, found, None)

    def take_extreme(
        self, text: _Text, where: str, piece: str, count: str, at: tuple[str, str],
        helpers: dict[str, str],
    ) -> None:  # fmt: skip
        """Put where a piece of a row has its extreme to one state; `at` is the position of the
        piece and the step from one element to the next. It is looked for where it could matter."""
        dtype, kind, op = self.dtype, _llvm(self.dtype), EXTREMES[self.op]
        name = f"row_{op}_{dtype.str[1:]}"
        helpers[name] = helpers.get(name) or _lanes(name, op, dtype, text.used)
        value = text(f"call {kind} @{name}(ptr {piece}, i64 {count})")
        if dtype.kind == "b":
            value = text(f"icmp ne i8 {value}, 0")
        last = text.load(dtype, text.at(kind, self.arrays[1], where))
        beats, same = self._compared(text, value, last)
        matters = text(f"or i1 {beats}, {same}")
        nearest = text.once("alloca i64")
        text.do(f"store i64 {NOWHERE}, ptr {nearest}")
        with text.loop(text(f"select i1 {matters}, i64 {count}, i64 0")) as i:
            here = text.load(dtype, text.at(kind, piece, i))
            _, it = self._compared(text, here, value)
            place = total(text, [(at[0], None), (at[1], i)])
            place = text(f"select i1 {it}, i64 {place}, i64 {NOWHERE}")
            least = text(f"load i64, ptr {nearest}")
            nearer = text(f"icmp slt i64 {place}, {least}")
            text.do(
                f"store i64 {text(f'select i1 {nearer}, i64 {place}, i64 {least}')}, ptr {nearest}"
            )
        self.take(text, where, value, text(f"load i64, ptr {nearest}"))

    def _compared(self, text: _Text, value: str, last: str) -> tuple[str, str]:
        """Whether a value is more extreme than another one, or the same; no number is the most."""
        dtype, kind = self.dtype, _value(self.dtype)
        beats = text.compare("lt" if self.op == "argmin" else "gt", dtype, value, last)
        same = text.compare("eq", dtype, value, last)
        if dtype.kind == "f":
            odd = text(f"fcmp uno {kind} {value}, {value}")
            before = text(f"fcmp uno {kind} {last}, {last}")
            both = text(f"and i1 {odd}, {before}")
            only = text(f"xor i1 {odd}, {both}")
            beats, same = text(f"or i1 {beats}, {only}"), text(f"or i1 {same}, {both}")
        return beats, same

    def finish(self, text: _Text, row: _Row) -> None:
        """Add what was lost; what was lost to an infinite sum is no number."""
        if len(self.arrays) == 1 or self.op in EXTREMES:
            return
        total, lost = self.arrays[1:3] if self.op == "moment" else self.arrays
        with text.loop(row.number("states", None)) as k:
            place = text.at("double", total, k)
            value = text.load(self.dtype, place)
            more = text.load(self.dtype, text.at("double", lost, k))
            size = text.call("llvm.fabs.f64", "double", value)
            finite = text(f"fcmp olt double {size}, 0x7FF0000000000000")
            more = text(f"select i1 {finite}, double {more}, double -0.0")
            text.store(self.dtype, text(f"fadd double {value}, {more}"), place)
            if self.op == "moment":  # the mean is infinite, or none
                place = text.at("double", self.arrays[3], k)
                value = text.load(self.dtype, place)
                value = text(f"select i1 {finite}, double {value}, double 0x7FF8000000000000")
                text.store(self.dtype, value, place)

    def before_row(self, text: _Text, where: str, position: str) -> Any:
        """What is the same for all elements of a row: of moments, of how many they are now; of
        extremes, their position."""
        if self.op != "moment":
            return position
        n = text(f"load double, ptr {text.at('double', self.arrays[0], where)}, align 1")
        more = text(f"fadd double {n}, 1.0")
        first = text(f"fcmp oeq double {n}, 0.0")
        one = text(f"select i1 {first}, double 1.0, double {n}")
        return first, more, text(f"fdiv double 1.0, {one}"), text(f"fdiv double {n}, {more}")

    def take(self, text: _Text, at: str, found: str, known: Any) -> None:
        """Put a value to a state."""
        if self.op in EXTREMES:
            i8 = np.dtype(np.int64)
            place, there = (
                text.at("i64", self.arrays[0], at),
                text.at(_llvm(self.dtype), self.arrays[1], at),
            )
            before, last = text.load(i8, place), text.load(self.dtype, there)
            beats, same = self._compared(text, found, last)
            earlier = text(f"icmp slt i64 {known}, {before}")
            better = text(f"or i1 {beats}, {text(f'and i1 {same}, {earlier}')}")
            text.store(i8, text(f"select i1 {better}, i64 {known}, i64 {before}"), place)
            kind = _value(self.dtype)
            text.store(
                self.dtype, text(f"select i1 {better}, {kind} {found}, {kind} {last}"), there
            )
            return
        places = [text.at(_llvm(self.dtype), a, at) for a in self.arrays]
        if self.op == "moment":  # Welford 1962, of what is beyond the first value
            first, more, part, share = known
            count, summed, lost, squares, origin, beyond = places
            text.store(self.dtype, more, count)
            _add(text, summed, lost, found)
            zero = text.load(self.dtype, origin)
            zero = text(f"select i1 {first}, double {found}, double {zero}")
            text.store(self.dtype, zero, origin)
            off = text(f"fsub double {found}, {zero}")
            before = text.load(self.dtype, beyond)
            text.store(self.dtype, text(f"fadd double {before}, {off}"), beyond)
            apart = text(f"fsub double {off}, {text(f'fmul double {before}, {part}')}")
            square = text(f"fmul double {apart}, {text(f'fmul double {apart}, {share}')}")
            square = text(f"fadd double {text.load(self.dtype, squares)}, {square}")
            text.store(self.dtype, square, squares)
        elif len(places) == 2:
            _add(text, places[0], places[1], found)
        else:
            before = text.load(self.dtype, places[0])
            after = _together(text, self.op, self.dtype, before, found)
            text.store(self.dtype, after, places[0])


def _add(text: _Text, place: str, there: str, found: str) -> None:
    """Knuth's TwoSum (The Art of Computer Programming 2, 4.2.2): the sum, beside what it loses."""
    dtype = np.dtype(np.float64)
    before, gone = text.load(dtype, place), text.load(dtype, there)
    after = text(f"fadd double {before}, {found}")
    text.store(dtype, after, place)
    b = text(f"fsub double {after}, {before}")
    a = text(f"fsub double {after}, {b}")
    da, db = text(f"fsub double {before}, {a}"), text(f"fsub double {found}, {b}")
    text.store(dtype, text(f"fadd double {gone}, {text(f'fadd double {da}, {db}')}"), there)


def _together(text: _Text, op: str, dtype: DType, a: str, b: str) -> str:
    x = Expr("constant", (), dtype, b"")
    node = Expr(PAIRWISE[op], (x, x), np.dtype(bool) if op in ("any", "all") else dtype)
    return text.operation(node, [a, b])


def _moment() -> str:
    """A function that puts a piece of a row to the state of a moment: squared deviations of the
    piece from its own mean, and Chan, Golub and LeVeque (1979) for both together."""
    text, f8 = _Text(), np.dtype(np.float64)
    text.do("%sum = call double @row_sum_f8(ptr %piece, i64 %count)")
    n = text("sitofp i64 %count to double")
    before = text.load(f8, "%n")
    first = text(f"fcmp oeq double {before}, 0.0")
    zero = text.load(f8, "%origin")
    zero = text(f"select i1 {first}, double {text.load(f8, '%piece')}, double {zero}")
    text.store(f8, zero, "%origin")

    with text.loop("%count") as i:
        at = text.at("double", "%piece", i)
        text.store(f8, text(f"fsub double {text.load(f8, at)}, {zero}"), at)
    text.do("%off = call double @row_sum_f8(ptr %piece, i64 %count)")
    mean = text(f"fdiv double %off, {n}")
    with text.loop("%count") as i:
        at = text.at("double", "%piece", i)
        off = text(f"fsub double {text.load(f8, at)}, {mean}")
        text.store(f8, text(f"fmul double {off}, {off}"), at)
    text.do("%own = call double @row_sum_f8(ptr %piece, i64 %count)")
    beyond = text.load(f8, "%beyond")
    text.store(f8, text(f"fadd double {beyond}, %off"), "%beyond")
    apart = text(f"fsub double {mean}, {text(f'fdiv double {beyond}, {before}')}")
    after = text(f"fadd double {before}, {n}")
    share = text(f"fmul double {before}, {text(f'fdiv double {n}, {after}')}")
    far = text(f"fmul double {apart}, {text(f'fmul double {apart}, {share}')}")
    far = text(f"select i1 {first}, double 0.0, double {far}")
    squares = text(f"fadd double {text.load(f8, '%m2')}, %own")
    text.store(f8, text(f"fadd double {squares}, {far}"), "%m2")
    text.store(f8, after, "%n")
    _add(text, "%total", "%lost", "%sum")
    names = ("n", "total", "lost", "m2", "origin", "beyond")
    words = ", ".join(["ptr %piece", "i64 %count", *[f"ptr %{name}" for name in names]])
    return f"define internal void @row_moment({words}) {{\n{text.body()}\n  ret void\n}}\n"


def _lanes(name: str, op: str, dtype: DType, used: set[str]) -> str:
    """A function that reduces a piece of a row, in lanes."""
    text, kind = _Text(), _llvm(dtype)
    lanes = text.once(f"alloca [{LANES} x {kind}], align 64")
    begin = identity(op, dtype)
    with text.loop(str(LANES)) as i:
        text.store(dtype, _literal(begin), text.at(kind, lanes, i))

    def into(place: str, value: str) -> None:
        text.store(dtype, _together(text, op, dtype, text.load(dtype, place), value), place)

    whole = text(f"and i64 %count, {-LANES}")
    with text.loop(whole, LANES) as start, text.loop(str(LANES)) as i:
        j = text(f"add nsw i64 {start}, {i}")
        into(text.at(kind, lanes, i), text.load(dtype, text.at(kind, "%piece", j)))
    rest = text(f"sub nsw i64 %count, {whole}")
    with text.loop(rest) as i:
        j = text(f"add nsw i64 {whole}, {i}")
        into(text.at(kind, lanes, i), text.load(dtype, text.at(kind, "%piece", j)))
    half = LANES // 2
    while half:
        with text.loop(str(half)) as i:
            other = text.at(kind, lanes, text(f"add nsw i64 {i}, {half}"))
            into(text.at(kind, lanes, i), text.load(dtype, other))
        half //= 2
    found = text(f"load {kind}, ptr {lanes}")
    text.do(f"ret {kind} {found}")
    used |= text.used
    return (
        f"define internal {kind} @{name}(ptr nocapture readonly %piece, i64 %count) {{\n"
        f"{text.body()}\n}}\n"
    )


def _literal(value: Array) -> str:
    if value.dtype.kind == "f":  # LLVM writes floats as the doubles that they are
        return "0x" + np.float64(value).tobytes()[::-1].hex().upper()
    return ("true" if value else "false") if value.dtype.kind == "b" else str(int(value))


def _function(text: _Text, row: _Row, outs: int, helpers: str) -> Callable[..., Any]:
    pointers = [*row.pointers, *[f"%out{n}" for n in range(outs)]]
    if len(pointers) > MOST_POINTERS:
        raise NotWritten("too many arrays")
    words = ["ptr noalias nocapture readonly %ints"]
    words += [f"ptr noalias nocapture readonly {p}" for p in row.pointers]
    words += [f"ptr noalias nocapture %out{n}" for n in range(outs)]
    main = f"define void @kernel({', '.join(words)}) {{\n{text.body()}\n  ret void\n}}\n"
    return _compiled("\n".join([*sorted(text.used), helpers, main]), 1 + len(pointers))


# ---- compiling


@lru_cache(1)
def _target() -> Any:
    """LLVM and what it compiles for; None where there is none, or one that is too old."""
    try:
        import llvmlite.binding as llvm  # type: ignore[import-untyped,unused-ignore]

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        triple = llvm.get_process_triple()

        def machine() -> Any:  # an engine takes the one that it is given with it
            return llvm.Target.from_triple(triple).create_target_machine(
                cpu=cpu, features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
            )

        llvm.create_pass_builder(machine(), llvm.create_pipeline_tuning_options(3))
        return llvm, machine, (triple, cpu, features, llvm.llvm_version_info)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None


@lru_cache(256)
def _library_has(name: str) -> bool:
    """Whether the process has a function of the C library, for floats and doubles."""
    target = _target()
    return target is not None and all(target[0].address_of_symbol(n) for n in (name, f"{name}f"))


_lock, _PID = threading.Lock(), os.getpid()
_functions: dict[str, Any] = {}
_engines: list[Any] = []  # whose memory the functions are in


def _compiled(source: str, arguments: int) -> Callable[..., Any]:
    found = _functions.get(source)
    if found is None:
        if os.getpid() != _PID:
            raise NotWritten("another thread may have held the lock when this process was forked")
        with _lock:
            found = _functions.get(source)
            if found is None:
                found = _functions[source] = _made(source, arguments)
    if found is _BROKEN:
        raise NotWritten("LLVM did not compile it")
    return found  # type: ignore[no-any-return]


_BROKEN = object()


def _made(source: str, arguments: int) -> Any:
    target = _target()
    if target is None:
        return _BROKEN
    llvm, machine, facts = target
    words = ("host", facts, source)
    code = shelf.found(words)
    try:
        if code is None:
            code = _object(llvm, machine(), source)
            shelf.keep(words, code)
        empty = llvm.parse_assembly("")
        empty.triple = facts[0]
        made = llvm.ObjectFileRef.from_data(code)
        engine = llvm.create_mcjit_compiler(empty, machine())
        engine.add_object_file(made)
        engine.finalize_object()
        place = engine.get_function_address("kernel")
        if not place:
            raise RuntimeError("no function of this name")
    except Exception as error:
        warnings.warn(
            f"a kernel is evaluated by NumPy, as LLVM did not compile it: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return _BROKEN
    _engines.append(engine)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_size_t] * arguments)(place)


def _object(llvm: Any, machine: Any, source: str) -> bytes:
    module = llvm.parse_assembly(source)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)  # type: ignore[no-any-return]


@lru_cache(1)
def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worth(shape: Sequence[int]) -> bool:
    """Whether a region is large enough."""
    return math.prod(shape) >= LEAST_POINTS
