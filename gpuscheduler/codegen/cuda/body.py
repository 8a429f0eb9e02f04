"""Statements that load and compute a kernel's values at one point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...ir.expr import RANDOM
from . import tuning, vectorize
from .arguments import Arguments
from .coordinates import Coordinates, LoopSite
from .expressions import NodeText
from .nodes import NodeTree, size_of
from .operations import STORED, TYPES, cast, load_value, results
from .random_numbers import RandomText
from .schedule import Schedule
from .stages import compute_in_stages, plan_stages
from .statements import declare_value, enclose, loop_elements, unroll


@dataclass(frozen=True, slots=True)
class KernelLoops:
    """The text of a kernel's loops, and how it is launched."""

    lines: list[str]
    #: Blocks of each item.
    blocks: int
    #: Parts of a mask whose selected points warps count.
    units: int = 0
    #: Bytes of scratch memory that blocks share.
    scratch: int = 0
    #: Counters that blocks share.
    counters: int = 0


class Body:
    """The statements that load and compute a point, for all kinds of loops."""

    def __init__(self, schedule: Schedule, arguments: Arguments) -> None:
        self.schedule, self.arguments = schedule, arguments
        self.places = Coordinates(schedule, arguments)
        self.nodes = NodeText(schedule, arguments)
        self.random = RandomText(schedule, self.nodes)

    def narrow(self) -> Body:
        """The body of single points and results, not of vectors."""
        return Body(replace(self.schedule, width=1, held=1), self.arguments)

    def pointer(self, tree: NodeTree, k: int) -> str:
        """Declare the pointer of an input."""
        schedule, arguments = self.schedule, self.arguments
        node = tree.nodes[k]
        n, view = node.data
        if schedule.loose and tree is schedule.bodies[-1]:
            first, away = self.find_neighbour(tree, k)
            if away:
                name = f"p{tree.letter}{k}"
                return f"const {STORED[node.code]}* const {name} = p{tree.letter}{first} + {away};"
        slot = arguments.slots.slot_of(("input", tree.letter, k))
        arguments.pointers[slot] = n, view.offset * size_of(node.code)
        return f"const {STORED[node.code]}* const p{tree.letter}{k} = " + (
            f"(const {STORED[node.code]}*)S({slot});"
        )

    def find_neighbour(self, tree: NodeTree, k: int) -> tuple[int, int]:
        """Find the first input that reads the same array in the same steps nearby.

        Returns it and how many elements lie between: what both read is loaded once.
        """
        schedule = self.schedule
        (n, view), layout = tree.nodes[k].data, schedule.layout_of[tree.letter, k]
        others = [
            (i, view.offset - other.offset)
            for i in tree.inputs
            for m, other in [tree.nodes[i].data]
            if m == n and schedule.layout_of[tree.letter, i] == layout
        ]
        near = [(i, away) for i, away in others if abs(away) <= tuning.BESIDE]
        return min(near)

    def loads(
        self, tree: NodeTree, chosen: Iterable[int], site: LoopSite, target: str
    ) -> list[str]:
        """Write statements that load inputs, each if its guard holds.

        `target` names the variable of an input, with the input's number for ``#``.
        """
        schedule = self.schedule
        chosen = list(chosen)
        lines = []
        needed = [g for k in chosen if (g := tree.guards[k]) is not None]
        if needed:
            lines += self.statements(tree, tree.nodes_below(needed), site, {})
        offsets: dict[int, str] = {}
        anyhow: list[int] = []  # vectors that begin anywhere are read one by one
        for k in chosen:
            layout = schedule.layout_of[tree.letter, k]
            if layout not in offsets:
                offsets[layout] = f"o{len(offsets)}"
                text = self.places.offset(layout, site)
                lines.append(f"const {schedule.index} {offsets[layout]} = {text};")
        either, gone = (schedule.either, schedule.gone) if tree is schedule.tree else ({}, set())

        def place_of(k: Any) -> str:
            if isinstance(k, tuple):
                return f"({tree.letter}{k[0]} ? {place_of(k[1])} : {place_of(k[2])})"
            return f"p{tree.letter}{k} + {offsets[schedule.layout_of[tree.letter, k]]}"

        for k in chosen:
            if k in gone:
                continue
            place = place_of(either.get(k, k))
            kind = schedule.type_of_load(tree, k)
            guard = None if k in either else tree.guards[k]
            check = f"if ({tree.letter}{guard}) " if guard is not None else ""
            name = target.replace("#", str(k))
            if (
                schedule.loose
                and schedule.is_vector(tree, k)
                and not vectorize.begins_aligned(schedule, tree, k)
            ):
                anyhow.append(k)
            else:
                lines.append(f"{check}{name} = *(const {kind}*)({place});")
        vectors = [k for k in chosen if anyhow and schedule.is_vector(tree, k)]
        known: dict[tuple[int, int], str] = {}  # elements that are there, by who has them and where
        for k in sorted(vectors, key=anyhow.__contains__):  # those that are whole come first
            layout, name = schedule.layout_of[tree.letter, k], target.replace("#", str(k))
            first, away = self.find_neighbour(tree, k) if tree is schedule.bodies[-1] else (k, 0)
            guard, mine = tree.guards[k], []
            for e in range(schedule.width):
                at = e if schedule.fast_stride(layout) > 0 else -e
                found = known.setdefault((first, away + at), f"{name}.x[{e}]")
                if found == f"{name}.x[{e}]":
                    found = f"(p{tree.letter}{k} + {offsets[layout]})[{at}]"
                mine.append(f"{name}.x[{e}] = {found};")
            if k in anyhow:
                lines += mine if guard is None else [f"if ({tree.letter}{guard}) {{", *mine, "}"]
        return lines

    def statements(
        self, tree: NodeTree, wanted: Iterable[int], site: LoopSite, inputs: dict[int, str],
        element: str = "", drawn: dict[int, str] | None = None, done: Iterable[int] = (),
    ) -> list[str]:  # fmt: skip
        """Write one statement for each node.

        `inputs` are the values in memory, by node. `element` is the number of the element in its
        vector, `drawn` are random numbers that exist already, and `done` are nodes that have their
        statements.
        """
        schedule = self.schedule
        lines = []
        done = set(done)
        either = schedule.either if tree is schedule.tree else {}
        for k in wanted:
            done.add(k)
            node = tree.nodes[k]
            if either and k in schedule.gone:
                continue
            if k in either and node.op == "where":
                text = self.first_of(tree, either[k])
            elif node.op == "input":
                text = load_value(node.code, inputs[k])
            elif node.op == "index":
                text = self.places.index_value(tree, k, site)
                if element:
                    layout = schedule.layout_of[tree.letter, k]
                    step = schedule.fast_stride(layout)
                    name = (
                        "stride",
                        layout,
                        schedule.thread_group,
                        len(schedule.axes[schedule.thread_group]) - 1,
                    )
                    text += f" + {self.places.multiply(element, step, name, True)}" if step else ""
            elif node.op == "constant":
                text = self.arguments.constant(node)
            elif node.op == "reduced":
                j, r = node.data
                op, takes, gives = schedule.kinds[j]
                x = f"part{j}[{'e' if schedule.held > 1 else 0}]"
                found = x if op == "histogram" else results(op, takes, gives, x)[r]
                if schedule.pane is not None:
                    found = f"made{j}_{r}[at]"
                text = cast(gives[r], node.code, found)
            elif node.op in RANDOM:
                if drawn and k in drawn:
                    text = f"{drawn[k]}[{element}]"
                else:
                    lines += self.random.draw_element(tree, k, element)
                    continue
            else:
                text = self.nodes.operation(tree, k)
            guard = tree.guards.get(k) if node.op in ("call", "taken") else None
            if guard is None:
                lines.append(declare_value(node.code, f"{tree.letter}{k}", text))
                continue
            others = [n for n in tree.nodes_below([guard]) if n not in done]
            before = self.statements(tree, others, site, inputs, element, drawn, done)
            check = f"if ({tree.letter}{guard}) {tree.letter}{k} = {text};"
            lines += [f"{TYPES[node.code]} {tree.letter}{k} = {{}};", "{", *before, check, "}"]
        return lines

    def first_of(self, tree: NodeTree, either: Any) -> str:
        """The input that has the value of one of several."""
        while isinstance(either, tuple):
            either = either[1]
        return f"{tree.letter}{either}"

    def loop_inputs(self, tree: NodeTree) -> list[int]:
        """The inputs that are loaded in the loop, not before it."""
        schedule = self.schedule
        if schedule.pane is not None:
            return list(tree.inputs)
        groups = ("r",) if schedule.reducing else ("k", "r")
        return [k for k in tree.inputs if not schedule.is_hoisted(tree, k, groups)]

    def load_invariants(self, site: LoopSite, bodies: Sequence[NodeTree] = ()) -> list[str]:
        """Loads of what is the same in all of the loop."""
        schedule = self.schedule
        lines = []
        for tree in bodies or schedule.bodies:
            inner, x = set(self.loop_inputs(tree)), self.register(tree)
            outer = [k for k in tree.inputs if k not in inner]
            lines += [f"{schedule.type_of_load(tree, k)} {x}{k};" for k in outer]
            lines += enclose(self.loads(tree, outer, site, f"{x}#"), bool(outer))
        return lines

    def register(self, tree: NodeTree) -> str:
        """What inputs are called once they are loaded, before their number."""
        return {"v": "x", "a": "t", "b": "w"}.get(tree.letter, "y")

    def values(self, tree: NodeTree, element: str, which: str) -> dict[int, str]:
        """What the inputs in registers are called."""
        schedule = self.schedule
        inner, x = set(self.loop_inputs(tree)), self.register(tree)
        out = {}
        for k in tree.inputs:
            if k in inner and schedule.loads_late and tree is schedule.tree:
                offset = f"o{schedule.layout_of[tree.letter, k]}"
                out[k] = f"*(const {schedule.type_of_load(tree, k)}*)(p{tree.letter}{k} + {offset})"
                continue
            name = f"{x}{k}[{which}]" if k in inner and which else f"{x}{k}"
            out[k] = f"{name}.x[{element}]" if schedule.is_vector(tree, k) else name
        return out

    def declare_registers(self, tree: NodeTree, times: int) -> list[str]:
        """Room for what the loop loads. What is loaded under a condition is zero otherwise."""
        schedule = self.schedule
        out, x = [], self.register(tree)
        for k in self.loop_inputs(tree):
            clear = " = {}" if tree.guards[k] is not None else ""
            if tree is not schedule.tree or k not in schedule.gone:
                out.append(f"{schedule.type_of_load(tree, k)} {x}{k}[{times}]{clear};")
        return out

    def load_and_use(
        self, condition: str, point: str, coords: list[str], site: LoopSite,
        use: Callable[[NodeTree, str], list[str]],
    ) -> list[str]:  # fmt: skip
        """Write the loops that load what a thread reads at a time, and then use it.

        `point` defines the number of a vector, such as "j = first + u"; the loops run while
        `condition` on it holds. `use(tree, which)` gives statements for one vector. Outside the
        core inputs are loaded where they are used.
        """
        schedule = self.schedule
        tree = schedule.tree if schedule.core is None else schedule.core
        inner, loads, uses = self.loop_inputs(tree), [], use(tree, "u")
        if schedule.loads_late and inner:
            layouts = dict.fromkeys(schedule.layout_of[tree.letter, k] for k in inner)
            index = schedule.index
            offsets = [f"const {index} o{n} = {self.places.offset(n, site)};" for n in layouts]
            return self.loop_vectors(condition, point, [*coords, *offsets, *uses])
        if inner:
            loads = self.loads(tree, inner, site, f"{self.register(tree)}#[u]")
        if schedule.core is not None:
            holds = f"if ({self.places.check_core(site)}) {{"
            edge = self.loop_inputs(schedule.tree)
            uses = [
                holds, *uses, "} else {", *self.declare_registers(schedule.tree, 1),
                *enclose(self.loads(schedule.tree, edge, site, "x#[0]")), *use(schedule.tree, "0"),
                "}",
            ]  # fmt: skip
            loads = [holds, *loads, "}"] if inner else []
        return [
            *self.declare_registers(tree, schedule.times),
            *(self.loop_vectors(condition, point, [*coords, *loads]) if inner else []),
            *self.loop_vectors(condition, point, [*coords, *uses]),
        ]

    def loop_vectors(self, condition: str, point: str, lines: list[str]) -> list[str]:
        """Statements for each of the vectors that a thread has at a time."""
        schedule = self.schedule
        return unroll(
            f"int u = 0; u < {schedule.times}; ++u",
            [f"const {schedule.count} {point};", f"if ({condition}) {{", *lines, "}"],
        )

    def compute_elements(
        self,
        tree: NodeTree,
        site: LoopSite,
        which: str,
        after: list[str],
        before: Sequence[str] = (),
    ) -> list[str]:
        """Compute each element of a vector, with statements before and after."""
        schedule = self.schedule
        pairs, drawn = self.random.draw_pairs(
            tree, lambda below: self.statements(tree, below, site, {})
        )
        wanted = tree.nodes_below(tree.roots, drawn)
        element = "e" if schedule.width > 1 else ""
        values = self.values(tree, "e", which)

        def statements(chosen: Iterable[int]) -> list[str]:
            return self.statements(tree, chosen, site, values, element, drawn)

        stages = plan_stages(schedule, tree, wanted, drawn) if not before else {}
        if stages:
            staged = compute_in_stages(schedule, self.nodes, tree, stages, statements, after)
            return [*pairs, *staged]
        lines = [*before, *statements(wanted)]
        if schedule.width == 1:
            return [*pairs, *lines, *after]
        return [*pairs, *loop_elements(schedule.width, [*lines, *after])]

    def point(self, tree: NodeTree, site: LoopSite, uses: list[str]) -> list[str]:
        """Load what a point, or a vector, reads, then use it."""
        loads = self.loads(tree, self.loop_inputs(tree), site, f"{self.register(tree)}#[0]")
        return [*self.declare_registers(tree, 1), *enclose(loads), *uses]

    def loop(self, start: str, end: str, step: str, lines: list[str]) -> list[str]:
        """A loop over the numbers of points."""
        head = f"for ({self.schedule.count} i = {start}; i < {end}; i += {step}) {{"
        return [head, *lines, "}"]


def declare_pointers(body: Body) -> list[str]:
    """What is read and written, by name."""
    schedule, arguments = body.schedule, body.arguments
    lines = []
    for tree in schedule.trees:
        lines += [body.pointer(tree, k) for k in (*tree.inputs, *tree.taken)]
    for n, short in enumerate(schedule.outs):
        slot = arguments.slots.slot_of(("output", n))
        lines.append(f"{STORED[short]}* const q{n} = ({STORED[short]}*)S({slot});")
    return lines
