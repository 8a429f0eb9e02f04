"""LLVM loops that reduce expressions into accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ...ir.expr import DType, Expr, Reduction, View
from . import tuning
from .llvm_code import (
    EXTREMES,
    MOMENT,
    NOWHERE,
    CompiledLoop,
    LoopFunction,
    find_or_write,
    identity,
    loses_precision,
)
from .llvm_jit import array_literal, compile_function
from .llvm_text import (
    Array,
    LlvmText,
    NotWritten,
    RegionLoop,
    memory_type,
    total,
    value_type,
)

#: Reductions, and the ufunc by which two values become one.
PAIRWISE = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "fmin": "fmin",
         "fmax": "fmax", "any": "logical_or", "all": "logical_and"}  # fmt: skip
#: Reductions that can be compiled.
REDUCED = frozenset({*PAIRWISE, *EXTREMES, "moment"})


def reduction_loop(
    shape: tuple[int, ...],
    roots: Sequence[Expr],
    reductions: Sequence[Reduction],
    types: Sequence[DType],
    target: View,
    position: View,
    along: bool,
    count: int,
    few: bool,
) -> CompiledLoop | None:
    """The compiled loops that reduce values of the roots into states, or None.

    The `count` states have these types and exist already; see `states`. `target` numbers the
    state of a point, and `position` the point among those of its state. `along` says whether
    rows are reduced, `few` that each state has few points.
    """
    try:
        if any(r.op not in REDUCED for r in reductions):
            raise NotWritten("reductions")
        if not along and target.strides[-1] != 1:
            raise NotWritten("results that do not lie along the rows")
        row = RegionLoop(len(shape), roots)
        words = row.words, tuple([r.op for r in reductions]), tuple(types), along, few
        written = find_or_write(
            words, lambda: _write_reduction_loop(row, roots, reductions, types, along, few)
        )
        return CompiledLoop(written, row, shape, [target, position], count)
    except NotWritten:
        return None


def finish_accumulators(op: str, made: list[Array]) -> tuple[Array, ...]:
    """Return states as `accumulate` makes them: rounding errors are in their sums already."""
    if op in EXTREMES:
        return tuple(made)
    return (made[0], made[1], made[3]) if op == "moment" else (made[0],)


def _write_reduction_loop(row: RegionLoop, roots: Sequence[Expr], reductions: Sequence[Reduction],
              types: Sequence[DType], along: bool, few: bool) -> LoopFunction:  # fmt: skip
    text, axes = LlvmText(), row.axes
    row.declare_arguments(text)
    steps = [row.number("target", (0, k)) for k in range(axes - 1)]
    placed = any(r.op in EXTREMES for r in reductions)
    places = [row.number("target", (1, k)) for k in range(axes)] if placed else []
    begin = row.number("first", 1) if placed else "0"
    found, outs = [], 0
    for r, t in zip(reductions, types, strict=True):
        many = (
            MOMENT if r.op == "moment" else 1 + (r.op in EXTREMES or loses_precision(r.op, t, few))
        )
        found.append(_LoopAccumulator(r.op, t, [f"%out{outs + n}" for n in range(many)]))
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
        most = tuning.PIECE if along else tuning.COLUMNS
        start = stack.enter_context(text.loop(row.lengths[-1], most))
        left = text(f"sub nsw i64 {row.lengths[-1]}, {start}")
        less = text(f"icmp slt i64 {left}, {most}")
        return start, text(f"select i1 {less}, i64 {left}, i64 {most}")

    with ExitStack() as stack:
        if along:
            where, position = rows(stack)
            start, count = pieces(stack)
            buffers = [
                text.emit_once(f"alloca [{tuning.PIECE} x {memory_type(t)}], align 64")
                for t in types
            ]
            with text.loop(count) as i:
                values = row.values(text(f"add nsw i64 {start}, {i}"), roots)
                for value, root, s, b in zip(values, roots, found, buffers, strict=True):
                    value = text.cast(value, root.dtype, s.dtype)
                    text.store(s.dtype, value, text.pointer_to(memory_type(s.dtype), b, i))
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
    function = compile_function(text, row, outs, "\n".join(helpers.values()))
    return LoopFunction(function, tuple(row.ints))


class _LoopAccumulator:
    """What a reduction has so far, in a function: arrays, by name."""

    def __init__(self, op: str, dtype: DType, arrays: list[str]):
        self.op, self.dtype, self.arrays = op, dtype, arrays

    def take_piece(
        self, text: LlvmText, where: str, piece: str, count: str, helpers: dict[str, str]
    ) -> None:
        """Merge a piece of a row into one state."""
        op, dtype = self.op, self.dtype
        if op == "moment":
            name = "row_sum_f8"
            helpers[name] = helpers.get(name) or _lanes(name, "sum", dtype, text.used)
            helpers["row_moment"] = _moment()
            words = ", ".join([f"ptr {text.pointer_to('double', a, where)}" for a in self.arrays])
            text.do(f"call void @row_moment(ptr {piece}, i64 {count}, {words})")
            return
        name = f"row_{op}_{dtype.str[1:]}"
        helpers[name] = helpers.get(name) or _lanes(name, op, dtype, text.used)
        found = text(f"call {memory_type(dtype)} @{name}(ptr {piece}, i64 {count})")
        if dtype.kind == "b":
            found = text(f"icmp ne i8 {found}, 0")
        self.take(text, where, found, None)

    def take_extreme(
        self, text: LlvmText, where: str, piece: str, count: str, at: tuple[str, str],
        helpers: dict[str, str],
    ) -> None:  # fmt: skip
        """Merge the position of the extreme of a piece of a row into one state.

        `at` is the position of the piece and the step from one element to the next. The position is
        searched only where the extreme of the piece could change the state.
        """
        dtype, kind, op = self.dtype, memory_type(self.dtype), EXTREMES[self.op]
        name = f"row_{op}_{dtype.str[1:]}"
        helpers[name] = helpers.get(name) or _lanes(name, op, dtype, text.used)
        value = text(f"call {kind} @{name}(ptr {piece}, i64 {count})")
        if dtype.kind == "b":
            value = text(f"icmp ne i8 {value}, 0")
        last = text.load(dtype, text.pointer_to(kind, self.arrays[1], where))
        beats, same = self._compare_extremes(text, value, last)
        matters = text(f"or i1 {beats}, {same}")
        nearest = text.emit_once("alloca i64")
        text.do(f"store i64 {NOWHERE}, ptr {nearest}")
        with text.loop(text(f"select i1 {matters}, i64 {count}, i64 0")) as i:
            here = text.load(dtype, text.pointer_to(kind, piece, i))
            _, it = self._compare_extremes(text, here, value)
            place = total(text, [(at[0], None), (at[1], i)])
            place = text(f"select i1 {it}, i64 {place}, i64 {NOWHERE}")
            least = text(f"load i64, ptr {nearest}")
            nearer = text(f"icmp slt i64 {place}, {least}")
            text.do(
                f"store i64 {text(f'select i1 {nearer}, i64 {place}, i64 {least}')}, ptr {nearest}"
            )
        self.take(text, where, value, text(f"load i64, ptr {nearest}"))

    def _compare_extremes(self, text: LlvmText, value: str, last: str) -> tuple[str, str]:
        """Whether a value is more extreme than another, or equal; NaN is the most extreme."""
        dtype, kind = self.dtype, value_type(self.dtype)
        beats = text.compare("lt" if self.op == "argmin" else "gt", dtype, value, last)
        same = text.compare("eq", dtype, value, last)
        if dtype.kind == "f":
            odd = text(f"fcmp uno {kind} {value}, {value}")
            before = text(f"fcmp uno {kind} {last}, {last}")
            both = text(f"and i1 {odd}, {before}")
            only = text(f"xor i1 {odd}, {both}")
            beats, same = text(f"or i1 {beats}, {only}"), text(f"or i1 {same}, {both}")
        return beats, same

    def finish(self, text: LlvmText, row: RegionLoop) -> None:
        """Add the rounding errors to the sums; those of infinite sums are NaN."""
        if len(self.arrays) == 1 or self.op in EXTREMES:
            return
        total, lost = self.arrays[1:3] if self.op == "moment" else self.arrays
        with text.loop(row.number("states", None)) as k:
            place = text.pointer_to("double", total, k)
            value = text.load(self.dtype, place)
            more = text.load(self.dtype, text.pointer_to("double", lost, k))
            size = text.call("llvm.fabs.f64", "double", value)
            finite = text(f"fcmp olt double {size}, 0x7FF0000000000000")
            more = text(f"select i1 {finite}, double {more}, double -0.0")
            text.store(self.dtype, text(f"fadd double {value}, {more}"), place)
            if self.op == "moment":  # the mean is infinite, or none
                place = text.pointer_to("double", self.arrays[3], k)
                value = text.load(self.dtype, place)
                value = text(f"select i1 {finite}, double {value}, double 0x7FF8000000000000")
                text.store(self.dtype, value, place)

    def before_row(self, text: LlvmText, where: str, position: str) -> Any:
        """Write what is the same for all elements of a row.

        Moments need their count after the row; extremes need their position.
        """
        if self.op != "moment":
            return position
        n = text(f"load double, ptr {text.pointer_to('double', self.arrays[0], where)}, align 1")
        more = text(f"fadd double {n}, 1.0")
        first = text(f"fcmp oeq double {n}, 0.0")
        one = text(f"select i1 {first}, double 1.0, double {n}")
        return first, more, text(f"fdiv double 1.0, {one}"), text(f"fdiv double {n}, {more}")

    def take(self, text: LlvmText, at: str, found: str, known: Any) -> None:
        """Merge a value into a state."""
        if self.op in EXTREMES:
            i8 = np.dtype(np.int64)
            place, there = (
                text.pointer_to("i64", self.arrays[0], at),
                text.pointer_to(memory_type(self.dtype), self.arrays[1], at),
            )
            before, last = text.load(i8, place), text.load(self.dtype, there)
            beats, same = self._compare_extremes(text, found, last)
            earlier = text(f"icmp slt i64 {known}, {before}")
            better = text(f"or i1 {beats}, {text(f'and i1 {same}, {earlier}')}")
            text.store(i8, text(f"select i1 {better}, i64 {known}, i64 {before}"), place)
            kind = value_type(self.dtype)
            text.store(
                self.dtype, text(f"select i1 {better}, {kind} {found}, {kind} {last}"), there
            )
            return
        places = [text.pointer_to(memory_type(self.dtype), a, at) for a in self.arrays]
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
            after = _merge_states(text, self.op, self.dtype, before, found)
            text.store(self.dtype, after, places[0])


def _add(text: LlvmText, place: str, there: str, found: str) -> None:
    """Add by Knuth's TwoSum (The Art of Computer Programming 2, 4.2.2); keep the rounding error."""
    dtype = np.dtype(np.float64)
    before, gone = text.load(dtype, place), text.load(dtype, there)
    after = text(f"fadd double {before}, {found}")
    text.store(dtype, after, place)
    b = text(f"fsub double {after}, {before}")
    a = text(f"fsub double {after}, {b}")
    da, db = text(f"fsub double {before}, {a}"), text(f"fsub double {found}, {b}")
    text.store(dtype, text(f"fadd double {gone}, {text(f'fadd double {da}, {db}')}"), there)


def _merge_states(text: LlvmText, op: str, dtype: DType, a: str, b: str) -> str:
    x = Expr("constant", (), dtype, b"")
    node = Expr(PAIRWISE[op], (x, x), np.dtype(bool) if op in ("any", "all") else dtype)
    return text.operation(node, [a, b])


def _moment() -> str:
    """Write the function that adds a piece of a row to the state of a moment.

    It takes the squared deviations of the piece from its own mean, and merges both states as Chan,
    Golub and LeVeque (1979) do.
    """
    text, f8 = LlvmText(), np.dtype(np.float64)
    text.do("%sum = call double @row_sum_f8(ptr %piece, i64 %count)")
    n = text("sitofp i64 %count to double")
    before = text.load(f8, "%n")
    first = text(f"fcmp oeq double {before}, 0.0")
    zero = text.load(f8, "%origin")
    zero = text(f"select i1 {first}, double {text.load(f8, '%piece')}, double {zero}")
    text.store(f8, zero, "%origin")

    with text.loop("%count") as i:
        at = text.pointer_to("double", "%piece", i)
        text.store(f8, text(f"fsub double {text.load(f8, at)}, {zero}"), at)
    text.do("%off = call double @row_sum_f8(ptr %piece, i64 %count)")
    mean = text(f"fdiv double %off, {n}")
    with text.loop("%count") as i:
        at = text.pointer_to("double", "%piece", i)
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
    text, kind = LlvmText(), memory_type(dtype)
    lanes = text.emit_once(f"alloca [{tuning.LANES} x {kind}], align 64")
    begin = identity(op, dtype)
    with text.loop(str(tuning.LANES)) as i:
        text.store(dtype, array_literal(begin), text.pointer_to(kind, lanes, i))

    def merge_into(place: str, value: str) -> None:
        text.store(dtype, _merge_states(text, op, dtype, text.load(dtype, place), value), place)

    whole = text(f"and i64 %count, {-tuning.LANES}")
    with text.loop(whole, tuning.LANES) as start, text.loop(str(tuning.LANES)) as i:
        j = text(f"add nsw i64 {start}, {i}")
        merge_into(
            text.pointer_to(kind, lanes, i), text.load(dtype, text.pointer_to(kind, "%piece", j))
        )
    rest = text(f"sub nsw i64 %count, {whole}")
    with text.loop(rest) as i:
        j = text(f"add nsw i64 {whole}, {i}")
        merge_into(
            text.pointer_to(kind, lanes, i), text.load(dtype, text.pointer_to(kind, "%piece", j))
        )
    half = tuning.LANES // 2
    while half:
        with text.loop(str(half)) as i:
            other = text.pointer_to(kind, lanes, text(f"add nsw i64 {i}, {half}"))
            merge_into(text.pointer_to(kind, lanes, i), text.load(dtype, other))
        half //= 2
    found = text(f"load {kind}, ptr {lanes}")
    text.do(f"ret {kind} {found}")
    used |= text.used
    return (
        f"define internal {kind} @{name}(ptr nocapture readonly %piece, i64 %count) {{\n"
        f"{text.body()}\n}}\n"
    )
