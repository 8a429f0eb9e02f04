"""The text of a kernel's operations."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from ...errors import NotGenerated
from ...ir.bins import Bins
from ...ir.expr import RANDOM
from .arguments import Arguments
from .nodes import DeviceCall, IrNode, NodeTree, dtype_of
from .operations import TYPES, cast, load_value, operation
from .schedule import Schedule


class NodeText:
    """The text of nodes, from the names of their arguments."""

    def __init__(self, schedule: Schedule, arguments: Arguments) -> None:
        self.schedule, self.arguments = schedule, arguments

    def check(self) -> None:
        """Raise NotGenerated where a node has no text."""
        schedule = self.schedule
        for tree in schedule.trees:
            for k, node in enumerate(tree.nodes):
                if node.op == "reduced" and schedule.reducing and tree is not schedule.final:
                    raise NotGenerated("a reduced value below a reduction")
                if node.op not in ("input", "index", "constant", "reduced", *RANDOM):
                    self.operation(tree, k)
                elif node.op in RANDOM and self.draw(node) is None:
                    raise NotGenerated(f"{node.op} of {dtype_of(node.code)}")

    def operation(self, tree: NodeTree, k: int) -> str:
        """The text of a node that is no leaf."""
        node = tree.nodes[k]
        args = [f"{tree.letter}{a}" for a in node.args]
        types = [tree.nodes[a].code for a in node.args]
        if node.op == "cast":
            return cast(types[0], node.code, args[0])
        if node.op == "where":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if node.op == "call":
            return f"of_{self.call(node, types)}({', '.join(args)})"
        if node.op == "taken":
            return load_value(node.code, f"p{tree.letter}{k}[{args[0]}]")
        if node.op in ("real", "imag"):
            if types[0][0] != "c":
                return args[0] if node.op == "real" else f"({TYPES[node.code]})0"
            return f"{args[0]}.{'x' if node.op == 'real' else 'y'}"
        if node.op == "complex":
            return f"{TYPES[node.code]}{{{args[0]}, {args[1]}}}"
        if node.op == "bin":
            return self.bin(node.data, args[0])
        text = operation(node.op, types, node.code, args)
        if text is None:
            names = ", ".join(dtype_of(t).name for t in types)
            raise NotGenerated(f"{node.op} of {names}")
        return text

    def bin(self, bins: Bins, value: str) -> str:
        """Write the number of a value's bin.

        Evenly spaced edges are arguments; other edges are part of the text.
        """
        arguments = self.arguments
        real, edges = TYPES[bins.code], bins.edges
        count = f"(int){arguments.slot(('bins', bins), len(bins))}"
        if bins.is_even:
            words = {"first": edges[0], "step": bins.step, "last": edges[-1]}
            given = [
                "__longlong_as_double((long long)"
                f"{arguments.slot((name, bins), int(np.float64(x).view('u8')))})"
                for name, x in words.items()
            ]
            return f"even_bin<{real}>({value}, {', '.join(given)}, {count})"
        name = f"edges_{hashlib.sha256(bins.words).hexdigest()[:12]}_{bins.code}"
        if not any(name in s for s in arguments.structs):
            numbers = ", ".join(literal(x) for x in edges)
            arguments.structs.append(f"__device__ const {real} {name}[] = {{{numbers}}};")
        return f"bin_among<{real}>({value}, {name}, {count})"

    def call(self, node: IrNode, types: list[str]) -> str:
        """The symbol of a function that is called."""
        arguments = self.arguments
        function, part = node.data
        if "f2" in (*types, node.code):
            raise NotGenerated(f"{function.name} of float16")
        item = [] if part is None else [f"item{part}"]
        symbol = "_".join(["f", function.digest[:16], *types, "gives", node.code, *item])
        arguments.calls[symbol] = DeviceCall(symbol, function, part, tuple(types), node.code)
        return symbol

    @staticmethod
    def draw(node: IrNode) -> str | None:
        """The function that makes a random number of its bits."""
        known = {("bits", "u8"), ("uniform", "f8"), ("uniform", "f4"), ("normal", "f8"),
                 ("normal", "f4")}  # fmt: skip
        return f"{node.code}_{node.op}" if (node.op, node.code) in known else None

    def key(self, node: IrNode) -> str:
        """The text of a random number's key."""
        return self.arguments.slot(("key", node.data), node.data)


def literal(x: Any) -> str:
    """A number as C++ has it, exactly."""
    if x.dtype.kind == "i":
        return f"{int(x)}ll" if x > np.iinfo(np.int64).min else "(long long)0x8000000000000000ull"
    return f"{float(x)!r}{'f' if x.dtype.itemsize == 4 else ''}"
