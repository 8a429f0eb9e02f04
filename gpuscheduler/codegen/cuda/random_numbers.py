"""Statements that draw random numbers, one by one or in pairs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ir.expr import RANDOM
from .expressions import NodeText
from .nodes import NodeTree
from .operations import TYPES
from .schedule import Schedule
from .statements import declare_value


class RandomText:
    """The text of random numbers."""

    def __init__(self, schedule: Schedule, nodes: NodeText) -> None:
        self.schedule, self.nodes = schedule, nodes

    def walk(self, tree: NodeTree, k: int) -> tuple[int, int | None] | None:
        """Return the stride of a random number's index, and its parity in a vector's first element.

        The parity is None where it varies. None if it is not so simple.
        """
        schedule = self.schedule
        node = tree.nodes[k]
        if node.op == "index":
            layout = schedule.layout_of[tree.letter, k]
            step = schedule.fast_stride(layout)
            odd: int | None = node.data.offset % 2
            strides = schedule.strides(layout, "k") + schedule.strides(layout, "r")
            if step % 2 and schedule.width == 1:
                odd = None
            own = schedule.axes[schedule.thread_group]
            others = sum(s % 2 for s in strides) - (step % 2 if own else 0)
            return step, None if others else odd
        if node.op == "constant" and node.code == "i8":
            return 0, int(np.frombuffer(node.data, np.int64)[0]) % 2
        if node.op == "add" and node.code == "i8":
            found = [self.walk(tree, a) for a in node.args]
            if found[0] and found[1]:
                (s, a), (t, b) = found[0], found[1]
                return s + t, None if a is None or b is None else (a + b) % 2
        return None

    def pair_half(self, tree: NodeTree, k: int, element: str) -> str:
        """Which half of a pair a random number is, as early as it is known."""
        schedule = self.schedule
        at = tree.nodes[k].args[0]
        walk = self.walk(tree, at)
        if tree in schedule.bodies and walk is not None and walk[1] is not None:
            step, odd = walk
            if step % 2 == 0 or schedule.width == 1:
                return "true" if odd else "false"
            return f"(({element} + {odd}) & 1)"
        return f"({tree.letter}{at} & 1)"

    def draw_element(self, tree: NodeTree, k: int, element: str) -> list[str]:
        """Draw the number of one element."""
        node, letter = tree.nodes[k], tree.letter
        odd = self.pair_half(tree, k, element)
        name = f"{letter}{k}"
        lines = [
            f"unsigned long long {name}x, {name}y;",
            f"philox({self.nodes.key(node)}, {letter}{node.args[0]} >> 1, {name}x, {name}y);",
        ]
        if node.op == "normal":
            text = f"{self.nodes.draw(node)}({name}x, {name}y, {odd})"
        else:
            text = f"{self.nodes.draw(node)}({odd} ? {name}y : {name}x)"
        return [*lines, declare_value(node.code, name, text)]

    def draw_pairs(
        self, tree: NodeTree, statements: Callable[[list[int]], list[str]]
    ) -> tuple[list[str], dict[int, str]]:
        """Draw random numbers of a whole vector in pairs: statements, and their names.

        `statements` gives those of the nodes that a number's place is made of.
        """
        schedule = self.schedule
        lines: list[str] = []
        drawn: dict[int, str] = {}
        if schedule.width == 1:
            return lines, drawn
        for k, node in enumerate(tree.nodes):
            if node.op not in RANDOM or self.walk(tree, node.args[0]) != (1, 0):
                continue
            name = drawn[k] = f"d{k}"
            kind = TYPES[node.code]
            before = statements(tree.nodes_below(node.args))
            both = f"{name}[e], {name}[e + 1]"
            if node.op == "normal":
                make = f"{self.nodes.draw(node)}s(x, y, {both});"
            else:
                draw = self.nodes.draw(node)
                make = f"{name}[e] = {draw}(x); {name}[e + 1] = {draw}(y);"
            lines += [
                f"{kind} {name}[{schedule.width}];",
                "{",
                *before,
                "#pragma unroll",
                f"for (int e = 0; e < {schedule.width}; e += 2) {{",
                "unsigned long long x, y;",
                f"philox({self.nodes.key(node)}, ({tree.letter}{node.args[0]} + e) >> 1, x, y);",
                make,
                "}",
                "}",
            ]
        return lines, drawn
