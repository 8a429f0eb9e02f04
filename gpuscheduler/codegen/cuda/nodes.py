"""A kernel's expressions as numbered nodes, and their costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import NotGenerated
from ...ir.cost import CHEAP, COSTS
from ...ir.expr import ANYWHERE, RANDOM, Expr, View, nodes
from . import tuning
from .operations import code

#: Conditions, and whether each holds.
Case = frozenset[tuple[int, bool]]


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """A Python function that a kernel's text calls, and that is linked to it.

    The text declares `symbol`. The same symbol means the same function of the same types.
    """

    symbol: str
    #: As a ``call`` node has it: `.python`, `.name`, `.digest`, `.lasting`, `.repeats`.
    function: Any
    part: int | None  # which item of a tuple, where it returns one
    args: tuple[str, ...]  # codes of types
    gives: str


@dataclass(slots=True)
class IrNode:
    op: str
    code: str
    args: tuple[int, ...]
    data: Any = None


def code_of(expr: Expr) -> str:
    short = code(expr.dtype)
    if short is None:
        raise NotGenerated(f"{expr.op} of {expr.dtype}")
    return short


def simplify_cases(cases: set[Case]) -> set[Case]:
    """Drop cases inside others, and merge two that differ in one condition only."""
    found = set(cases)
    while 1 < len(found) <= tuning.MOST_CASES:
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


class NodeTree:
    """The numbered nodes of expressions: equal nodes once, arguments first.

    Loads and calls have a `guard`: the node that says whether they happen, or None for always. A
    call must not happen without its guard: a loop in it might not end for other arguments.
    """

    def __init__(self, roots: Sequence[Expr], letter: str):
        self.letter = letter
        self.nodes: list[IrNode] = []
        self._known: dict[Any, int] = {}
        self._anywhere: set[int] = set()  # what may be read at any point
        numbers: dict[int, int] = {}
        for expr in nodes(roots, lambda n: n.args[1:] if n.op == "taken" else n.args):
            if expr.op == "taken":
                numbers[id(expr)] = self._add_gather(expr, numbers[id(expr.args[1])])
                continue
            args = tuple(numbers[id(a)] for a in expr.args)
            op = expr.op
            if op in ("power", "float_power"):  # small exponents are part of the structure
                op, args = self._power(op, args)
            data = expr.data if expr.op != "constant" else self._word(expr)
            numbers[id(expr)] = self._add(op, code_of(expr), args, data)
        self.roots = [numbers[id(r)] for r in roots]
        self.inputs = self._nodes_of("input")
        self.indices = self._nodes_of("index")
        self.calls = self._nodes_of("call")
        self.taken = self._nodes_of("taken")
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
        if len(self.nodes) > tuning.MOST_STATEMENTS:
            raise NotGenerated(f"an expression of {len(self.nodes):,} operations")

    def _nodes_of(self, op: str) -> list[int]:
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
            self.nodes.append(IrNode(op, short, args, data))
        return self._known[words]

    def _add_gather(self, expr: Expr, number: int) -> int:
        """Add an element of an array at a computed place.

        The place is counted from the beginning of the array's view, which is part of the pointer.
        """
        array, view = expr.args[0].data
        if any(view.strides):
            evenly = self._add("index", "i8", (), View(0, view.strides))
            number = self._add("add", "i8", (evenly, number))
        found = self._add("taken", code_of(expr), (number,), (array, View(view.offset, ())))
        if expr.data == ANYWHERE:
            self._anywhere.add(found)
        return found

    def _guards(self, known: Callable[[int], bool]) -> dict[int, int | None]:
        """Return, for each node, the node that says whether it is needed; None for always.

        Only conditions that `known` accepts count, and only nodes that read memory need a guard.
        """
        needs: list[set[Case]] = [set() for _ in self.nodes]
        for r in self.roots:
            needs[r].add(frozenset())
        for k in range(len(needs) - 1, -1, -1):
            node = self.nodes[k]
            if not needs[k] or not self.reads[k]:
                continue
            mine = needs[k] = simplify_cases(needs[k])
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
        return {k: self._any_case(found) for k, found in enumerate(needs)}

    def _any_case(self, cases: set[Case]) -> int | None:
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

    def nodes_below(self, roots: Iterable[int], stop: Iterable[int] = ()) -> list[int]:
        """The nodes that `roots` need, ascending; not those that only `stop` needs."""
        out, stops, stack = set(), set(stop), list(roots)
        while stack:
            k = stack.pop()
            if k not in out:
                out.add(k)
                if k not in stops:
                    stack += self.nodes[k].args
        return sorted(out)


def dtype_of(short: str) -> np.dtype[Any]:
    return np.dtype("?" if short == "b1" else short)


def size_of(short: str) -> int:
    return int(short[1:])


def cost_of(node: IrNode) -> int:
    if node.op in CHEAP:
        return 1 if node.op not in ("input", "constant", "index") else 0
    wide = node.code in ("f8", "c8", "c16")
    return COSTS.get(node.op, (20, 40))[wide]


def held_size(short: str) -> int:
    """Bytes of a value in registers."""
    return 4 if short == "f2" else size_of(short)


def part_size(op: str, short: str, gives: Sequence[str]) -> int:
    """Bytes of an accumulator."""
    if op == "moment":
        return 64 if short[0] == "c" else 32
    if op in ("argmin", "argmax"):
        return 32 if short == "c16" else 16
    added = op in ("sum", "prod")  # in double
    return 16 if gives[0] == "c16" or (added and gives[0][0] == "c") else 8
