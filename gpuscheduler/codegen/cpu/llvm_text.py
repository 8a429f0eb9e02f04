"""LLVM IR as text: types, values and the statements of one loop nest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from ...ir.expr import DType, Expr, nodes
from . import tuning

Array = np.ndarray[Any, Any]
#: A constant that each call of `evaluate` gives. Only kernels made there have it.
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
#: NumPy's names of the C library's functions.
_LIBRARY = {
    "exp": "exp", "expm1": "expm1", "log": "log", "log1p": "log1p", "log2": "log2",
    "log10": "log10", "sin": "sin", "cos": "cos", "tan": "tan", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "arctan2": "atan2", "sinh": "sinh", "cosh": "cosh",
    "tanh": "tanh", "hypot": "hypot", "cbrt": "cbrt", "power": "pow", "float_power": "pow",
}  # fmt: skip
_CHOICES = {"maximum": ("ge", 0), "minimum": ("le", 0), "fmax": ("ge", 1), "fmin": ("le", 1)}


class NotWritten(Exception):
    """There is no code for an operation, a type, or a way through memory."""


def memory_type(dtype: DType) -> str:
    """Return LLVM's type of an element in memory."""
    if dtype.kind not in "biuf" or dtype.str[1:] not in _TYPES or not dtype.isnative:
        raise NotWritten(dtype)
    return _TYPES[dtype.str[1:]]


def value_type(dtype: DType) -> str:
    """Return LLVM's type of a value in a register."""
    return "i1" if dtype.kind == "b" else memory_type(dtype)


# ---- functions as text


class LlvmText:
    """One function in LLVM's language, line by line."""

    def __init__(self) -> None:
        self.entry: list[str] = []  # what is done once, first
        self.lines: list[str] = []
        self.used: set[str] = set()  # functions that it calls
        self._count = 0

    def new_name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def __call__(self, text: str) -> str:
        name = self.new_name()
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def emit_once(self, text: str) -> str:
        name = self.new_name()
        self.entry.append(f"  {name} = {text}")
        return name

    @contextmanager
    def loop(self, count: str, step: int = 1) -> Iterator[str]:
        place, n = self.emit_once("alloca i64"), self._count
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

    def pointer_to(self, kind: str, base: str, i: str) -> str:
        return self(f"getelementptr inbounds {kind}, ptr {base}, i64 {i}")

    def load(self, dtype: DType, place: str) -> str:
        kind = memory_type(dtype)
        found = self(f"load {kind}, ptr {place}, align 1")
        return self(f"icmp ne i8 {found}, 0") if dtype.kind == "b" else found

    def store(self, dtype: DType, value: str, place: str) -> None:
        kind = memory_type(dtype)
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
        a, b = value_type(given), value_type(wanted)
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
        kind = value_type(dtype)
        if dtype.kind == "f":
            return self(f"fcmp une {kind} {value}, 0.0")
        return self(f"icmp ne {kind} {value}, 0")

    def compare(self, how: str, dtype: DType, a: str, b: str) -> str:
        if dtype.kind == "f":
            order = "u" if how == "ne" else "o"
            return self(f"fcmp {order}{how} {value_type(dtype)} {a}, {b}")
        sign = "" if how in ("eq", "ne") else "s" if dtype.kind == "i" else "u"
        return self(f"icmp {sign}{how} {value_type(dtype)} {a}, {b}")

    def choose(self, op: str, dtype: DType, a: str, b: str) -> str:
        """Write NumPy's larger or smaller of two values; `fmax` and `fmin` skip NaN."""
        how, odd = _CHOICES[op]
        first = self.compare(how, dtype, a, b)
        kind = value_type(dtype)
        if dtype.kind == "f":
            x = (a, b)[odd]
            unordered = self(f"fcmp uno {kind} {x}, {x}")
            first = self(f"or i1 {first}, {unordered}")
        return self(f"select i1 {first}, {kind} {a}, {kind} {b}")

    def operation(self, node: Expr, args: list[str]) -> str:
        op, dtype = node.op, node.dtype
        types = [a.dtype for a in node.args]
        kind = value_type(dtype)
        if op == "cast":
            return self.cast(args[0], types[0], dtype)
        if op == "where":
            return self(f"select i1 {args[0]}, {kind} {args[1]}, {kind} {args[2]}")
        first = types[0]
        for t in types:
            memory_type(t)
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
            return self._write_classification(op, first, args[0])
        if dtype != first:
            raise NotWritten(op)
        if op in _CHOICES:
            return self.choose(op, dtype, *args)
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
            return self._write_shift(op, dtype, *args)
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

    def _write_shift(self, op: str, dtype: DType, a: str, b: str) -> str:
        """Write NumPy's shift: by too many or negative bits leaves 0 or the sign.

        Processors leave these cases open.
        """
        kind, bits = value_type(dtype), 8 * dtype.itemsize
        how = "shl" if op == "left_shift" else "ashr" if dtype.kind == "i" else "lshr"
        inside = self(f"icmp ult {kind} {b}, {bits}")
        by = self(f"select i1 {inside}, {kind} {b}, {kind} 0")
        found = self(f"{how} {kind} {a}, {by}")
        rest = self(f"ashr {kind} {a}, {bits - 1}") if how == "ashr" else "0"
        return self(f"select i1 {inside}, {kind} {found}, {kind} {rest}")

    def _sign(self, dtype: DType, x: str) -> str:
        """Write the sign of a number: 1, -1, 0 for zeros, and NaN for NaN."""
        kind = value_type(dtype)
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

    def _write_classification(self, op: str, dtype: DType, x: str) -> str:
        kind = value_type(dtype)
        if op == "signbit":
            bits = _TYPES[f"i{dtype.itemsize}"]
            return self(f"icmp slt {bits} {self(f'bitcast {kind} {x} to {bits}')}, 0")
        if op == "isnan":
            return self(f"fcmp uno {kind} {x}, {x}")
        size = self.call(f"llvm.fabs.{_suffix(kind)}", kind, x)
        how = "oeq" if op == "isinf" else "olt"
        return self(f"fcmp {how} {kind} {size}, 0x7FF0000000000000")

    def _of_floats(self, op: str, dtype: DType, args: list[str]) -> str:
        kind = value_type(dtype)
        if op in _FLOAT:
            return self(f"{_FLOAT[op]} {kind} {args[0]}, {args[1]}")
        if op == "negative":
            return self(f"fneg {kind} {args[0]}")
        if op == "reciprocal":
            return self(f"fdiv {kind} 1.0, {args[0]}")
        if op in _ROUND:
            return self.call(f"llvm.{_ROUND[op]}.{_suffix(kind)}", kind, args[0])
        if op in _LIBRARY and cores() >= tuning.MANY and _library_has(_LIBRARY[op]):
            return self.call(_LIBRARY[op] + "f" * (kind == "float"), kind, *args)
        raise NotWritten(op)


def _suffix(kind: str) -> str:
    return "f32" if kind == "float" else "f64"


# ---- values of a row


class RegionLoop:
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
                words.append((node.op, node.dtype, args, written_operation(node)))
                if not node.args:
                    self.leaves.append(node)
        words += [self.slots[id(r)] for r in roots]
        #: What the function's text is made of, and equal where that is.
        self.words = tuple(words)

    def declare_arguments(self, text: LlvmText) -> None:
        """Declare the arguments of the function."""
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
        place = self.text.emit_once(f"getelementptr inbounds i64, ptr %ints, i64 {len(self.ints)}")
        self.ints.append((what, which))
        return self.text.emit_once(f"load i64, ptr {place}")

    def _declare(self, n: int, leaf: Expr) -> None:
        slot = self.slots[id(leaf)]
        if leaf.op == "index":
            steps = [self.number("index", (n, k)) for k in range(self.axes)]
            self._strides[n] = [self.number("start", n), *steps]
            return
        if leaf.op not in ("input", "constant", OPEN):
            raise NotWritten(leaf.op)
        self.pointers.append(f"%leaf{n}")
        kind = memory_type(leaf.dtype)
        if leaf.op == "input":
            *outer, inner = leaf.data[1].strides
            if abs(inner) * leaf.dtype.itemsize > tuning.APART:
                raise NotWritten("memory that is not read along the rows")
            if any(outer) or inner:
                steps = [self.number("stride", (n, k)) for k in range(self.axes - 1)]
                self._strides[n] = steps
                if inner not in (0, 1):
                    self.apart[n] = self.number("stride", (n, self.axes - 1))
                return
        found = self.text.emit_once(f"load {kind}, ptr %leaf{n}, align 1")
        if leaf.dtype.kind == "b":
            found = self.text.emit_once(f"icmp ne i8 {found}, 0")
        self.fixed[slot] = found

    def begin(self, outer: list[str]) -> None:
        """Write where each leaf's row begins, and values that are constant along the row."""
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
            row = text.pointer_to(memory_type(leaf.dtype), f"%leaf{n}", where)
            if leaf.data[1].strides[-1]:
                self.rows[n] = row
            else:
                self.same[self.slots[id(leaf)]] = text.load(leaf.dtype, row)

    def values(self, j: str, roots: Sequence[Expr]) -> list[str]:
        """Write the values of the roots at one point of the row."""
        text, found = self.text, dict(self.same)
        for n, leaf in enumerate(self.leaves):
            if n not in self.rows:
                continue
            if leaf.op == "index":
                step = text(f"mul i64 {self._strides[n][-1]}, {j}")
                value = text(f"add i64 {self.rows[n]}, {step}")
            else:
                at = text(f"mul i64 {self.apart[n]}, {j}") if n in self.apart else j
                value = text.load(
                    leaf.dtype, text.pointer_to(memory_type(leaf.dtype), self.rows[n], at)
                )
            found[self.slots[id(leaf)]] = value
        for node in self.order:
            slot = self.slots[id(node)]
            if slot not in found:
                args = [found[self.slots[id(a)]] for a in node.args]
                found[slot] = text.operation(node, args)
        return [found[self.slots[id(r)]] for r in roots]


def written_operation(node: Expr) -> Any:
    """Return what distinguishes a node's text beyond its operation.

    Constants and steps through memory are arguments of the function, and do not count.
    """
    if node.op == "constant" or node.op == OPEN or node.op == "index":
        return None
    if node.op == "input":
        *outer, inner = node.data[1].strides
        near = abs(inner) * node.dtype.itemsize <= tuning.APART
        return any(outer), inner if inner in (0, 1) else None, near
    half = node.op == "power" and node.args[1].op == "constant" and node.args[1].value == 0.5
    return node.data, half


def total(text: LlvmText, parts: Sequence[tuple[str, str | None]]) -> str:
    """A sum of products."""
    out = "0"
    for a, b in parts:
        a = a if b is None else text(f"mul nsw i64 {a}, {b}")
        out = text(f"add nsw i64 {out}, {a}")
    return out


# ---- compiling


@lru_cache(1)
def compile_target() -> Any:
    """Return LLVM and its machine; None without LLVM, or one without pass builders."""
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
    target = compile_target()
    return target is not None and all(target[0].address_of_symbol(n) for n in (name, f"{name}f"))


@lru_cache(1)
def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
