"""Statements that load and compute a kernel's values at one point."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np

from ...errors import NotGenerated
from ...ir.bins import Bins
from ...ir.expr import RANDOM, Kernel
from . import vectorize
from .nodes import DeviceCall, IrNode, NodeTree, dtype_of, size_of
from .operations import STORED, TYPES, approximate_text, cast, load_value, operation, results
from .schedule import LoopSite, PointRange, Schedule

#: Most constants that are arguments.
MOST_CONSTANTS = 128
#: Most elements between two views of an array whose common part is read once.
BESIDE = 8
#: Quotients, roots and logarithms of float32 from which on a vector is computed in stages.
STAGED = 2


class KernelBody(Schedule):
    """The statements that load and compute a point, for all kinds of loops."""

    blocks: int  # of a launch, for each item
    held: int  # results, or lines, of one thread at a time

    def __init__(self, kernel: Kernel, aligned: bool, processors: int, writes: bool):
        super().__init__(kernel, aligned, processors, writes)
        self._check()

    def _check_core(self, site: LoopSite, groups: str = "kr") -> str:
        """The condition that a point, or a vector that begins there, lies in the core."""
        checks = []
        for k, low, length in [x for group in groups for x in self.core_bounds(group)]:
            layout, width = self.axis_layout[k], self.width
            begins = max(length - self.fast_stride(layout) * (width - 1), 0)
            checks.append(
                f"({self.count})({self._offset(layout, site)} - ({self.int})"
                f"{self.slot(('first', k), low)}) < {self.number(('within', k, width), begins)}"
            )
        return " && ".join(checks)

    def _check(self) -> None:
        for tree in self.trees:
            for k, node in enumerate(tree.nodes):
                if node.op == "reduced" and self.reducing and tree is not self.final:
                    raise NotGenerated("a reduced value below a reduction")
                if node.op not in ("input", "index", "constant", "reduced", *RANDOM):
                    self._operation(tree, k)
                elif node.op in RANDOM and self._draw(node) is None:
                    raise NotGenerated(f"{node.op} of {dtype_of(node.code)}")

    def _constant(self, node: IrNode) -> str:
        value, name = (
            np.frombuffer(node.data, dtype_of(node.code)),
            ("constant", node.code, node.data),
        )
        if node.code == "b1":
            return f"{self.slot(name, int(value[0]))} != 0"
        if node.code[0] in "iu":
            return f"({TYPES[node.code]}){self._integer(name, int(value[0]))}"
        if node.code in ("f2", "f4"):
            return self._float(name, value.astype("f4"))
        if node.code == "f8":
            return self._float(name, value)
        parts = enumerate(value.view("f4" if node.code == "c8" else "f8"))
        words = [self._float((name, n), part) for n, part in parts]
        return f"{TYPES[node.code]}{{{', '.join(words)}}}"

    def _integer(self, name: Any, value: int) -> str:
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

    def _operation(self, tree: NodeTree, k: int) -> str:
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
            return load_value(node.code, f"p{tree.letter}{k}[{args[0]}]")
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
            names = ", ".join(dtype_of(t).name for t in types)
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
            numbers = ", ".join(literal(x) for x in edges)
            self.structs.append(f"__device__ const {real} {name}[] = {{{numbers}}};")
        return f"bin_among<{real}>({value}, {name}, {count})"

    def _call(self, node: IrNode, types: list[str]) -> str:
        """The symbol of a function that is called."""
        function, part = node.data
        if "f2" in (*types, node.code):
            raise NotGenerated(f"{function.name} of float16")
        item = [] if part is None else [f"item{part}"]
        symbol = "_".join(["f", function.digest[:16], *types, "gives", node.code, *item])
        self.calls[symbol] = DeviceCall(symbol, function, part, tuple(types), node.code)
        return symbol

    @staticmethod
    def _draw(node: IrNode) -> str | None:
        """The function that makes a random number of its bits."""
        known = {("bits", "u8"), ("uniform", "f8"), ("uniform", "f4"), ("normal", "f8"),
                 ("normal", "f4")}  # fmt: skip
        return f"{node.code}_{node.op}" if (node.op, node.code) in known else None

    def _times(self, coordinate: str, stride: int, name: Any, wide: bool) -> str:
        kind = "long long" if wide else self.int
        text = coordinate if kind == "int" else f"(long long){coordinate}"
        return text if stride == 1 else f"{text} * ({kind}){self.slot(name, stride)}"

    def _offset(self, layout: int, site: LoopSite, wide: bool = False) -> str:
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

    def _position(self, tree: NodeTree, k: int, site: LoopSite) -> str:
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
                magic = self.slot(("magic", group, name, n), magic_of(max(length, 1)))
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

    def _pointer(self, tree: NodeTree, k: int) -> str:
        node = tree.nodes[k]
        n, view = node.data
        if self.loose and tree is self.bodies[-1]:
            first, away = self._find_neighbour(tree, k)
            if away:
                name = f"p{tree.letter}{k}"
                return f"const {STORED[node.code]}* const {name} = p{tree.letter}{first} + {away};"
        slot = self.slots.at(("input", tree.letter, k))
        self.pointers[slot] = n, view.offset * size_of(node.code)
        return f"const {STORED[node.code]}* const p{tree.letter}{k} = " + (
            f"(const {STORED[node.code]}*)S({slot});"
        )

    def _find_neighbour(self, tree: NodeTree, k: int) -> tuple[int, int]:
        """Find the first input that reads the same array in the same steps nearby.

        Returns it and how many elements lie between: what both read is loaded once.
        """
        (n, view), layout = tree.nodes[k].data, self.layout_of[tree.letter, k]
        others = [
            (i, view.offset - other.offset)
            for i in tree.inputs
            for m, other in [tree.nodes[i].data]
            if m == n and self.layout_of[tree.letter, i] == layout
        ]
        near = [(i, away) for i, away in others if abs(away) <= BESIDE]
        return min(near)

    def _loads(
        self, tree: NodeTree, chosen: Iterable[int], site: LoopSite, target: str
    ) -> list[str]:
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
            kind = self.type_of_load(tree, k)
            guard = None if k in either else tree.guards[k]
            check = f"if ({tree.letter}{guard}) " if guard is not None else ""
            name = target.replace("#", str(k))
            if (
                self.loose
                and self.is_vector(tree, k)
                and not vectorize.begins_aligned(self, tree, k)
            ):
                anyhow.append(k)
            else:
                lines.append(f"{check}{name} = *(const {kind}*)({place});")
        vectors = [k for k in chosen if anyhow and self.is_vector(tree, k)]
        known: dict[tuple[int, int], str] = {}  # elements that are there, by who has them and where
        for k in sorted(vectors, key=anyhow.__contains__):  # those that are whole come first
            layout, name = self.layout_of[tree.letter, k], target.replace("#", str(k))
            first, away = self._find_neighbour(tree, k) if tree is self.bodies[-1] else (k, 0)
            guard, mine = tree.guards[k], []
            for e in range(self.width):
                at = e if self.fast_stride(layout) > 0 else -e
                found = known.setdefault((first, away + at), f"{name}.x[{e}]")
                if found == f"{name}.x[{e}]":
                    found = f"(p{tree.letter}{k} + {offsets[layout]})[{at}]"
                mine.append(f"{name}.x[{e}] = {found};")
            if k in anyhow:
                lines += mine if guard is None else [f"if ({tree.letter}{guard}) {{", *mine, "}"]
        return lines

    def _statements(
        self, tree: NodeTree, wanted: Iterable[int], site: LoopSite, inputs: dict[int, str],
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
                text = load_value(node.code, inputs[k])
            elif node.op == "index":
                text = self._position(tree, k, site)
                if element:
                    layout = self.layout_of[tree.letter, k]
                    step = self.fast_stride(layout)
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
                    lines += self._draw_element(tree, k, element)
                    continue
            else:
                text = self._operation(tree, k)
            guard = tree.guards.get(k) if node.op in ("call", "taken") else None
            if guard is None:
                lines.append(let(node.code, f"{tree.letter}{k}", text))
                continue
            others = [n for n in tree.below([guard]) if n not in done]
            before = self._statements(tree, others, site, inputs, element, drawn, done)
            check = f"if ({tree.letter}{guard}) {tree.letter}{k} = {text};"
            lines += [f"{TYPES[node.code]} {tree.letter}{k} = {{}};", "{", *before, check, "}"]
        return lines

    def _first_of(self, tree: NodeTree, either: Any) -> str:
        """The input that has the value of one of several."""
        while isinstance(either, tuple):
            either = either[1]
        return f"{tree.letter}{either}"

    # ---- random numbers

    def _walk(self, tree: NodeTree, k: int) -> tuple[int, int | None] | None:
        """Return the stride of a random number's index, and its parity in a vector's first element.

        The parity is None where it varies. None if it is not so simple.
        """
        node = tree.nodes[k]
        if node.op == "index":
            layout = self.layout_of[tree.letter, k]
            step = self.fast_stride(layout)
            odd: int | None = node.data.offset % 2
            strides = self.strides(layout, "k") + self.strides(layout, "r")
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

    def _oddness(self, tree: NodeTree, k: int, element: str) -> str:
        """Which half of a pair a random number is, as early as it is known."""
        at = tree.nodes[k].args[0]
        walk = self._walk(tree, at)
        if tree in self.bodies and walk is not None and walk[1] is not None:
            step, odd = walk
            if step % 2 == 0 or self.width == 1:
                return "true" if odd else "false"
            return f"(({element} + {odd}) & 1)"
        return f"({tree.letter}{at} & 1)"

    def _key(self, node: IrNode) -> str:
        return self.slot(("key", node.data), node.data)

    def _draw_element(self, tree: NodeTree, k: int, element: str) -> list[str]:
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
        return [*lines, let(node.code, name, text)]

    def _draw_pairs(self, tree: NodeTree, site: LoopSite) -> tuple[list[str], dict[int, str]]:
        """Draw random numbers of a whole vector in pairs: statements, and their names."""
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

    def _inner(self, tree: NodeTree) -> list[int]:
        """The inputs that are loaded in the loop, not before it."""
        if self.pane is not None:
            return list(tree.inputs)
        groups = ("r",) if self.reducing else ("k", "r")
        return [k for k in tree.inputs if not self._is_hoisted(tree, k, groups)]

    def _load_invariants(self, site: LoopSite, bodies: Sequence[NodeTree] = ()) -> list[str]:
        """Loads of what is the same in all of the loop."""
        lines = []
        for tree in bodies or self.bodies:
            inner, x = set(self._inner(tree)), self._register(tree)
            outer = [k for k in tree.inputs if k not in inner]
            lines += [f"{self.type_of_load(tree, k)} {x}{k};" for k in outer]
            lines += self._enclose(self._loads(tree, outer, site, f"{x}#"), bool(outer))
        return lines

    def _register(self, tree: NodeTree) -> str:
        """What inputs are called once they are loaded, before their number."""
        return {"v": "x", "a": "t", "b": "w"}.get(tree.letter, "y")

    @staticmethod
    def _enclose(lines: list[str], wanted: bool = True) -> list[str]:
        return ["{", *lines, "}"] if wanted and lines else []

    def _values(self, tree: NodeTree, element: str, which: str) -> dict[int, str]:
        """What the inputs in registers are called."""
        inner, x = set(self._inner(tree)), self._register(tree)
        out = {}
        for k in tree.inputs:
            if k in inner and self.late and tree is self.tree:
                offset = f"o{self.layout_of[tree.letter, k]}"
                out[k] = f"*(const {self.type_of_load(tree, k)}*)(p{tree.letter}{k} + {offset})"
                continue
            name = f"{x}{k}[{which}]" if k in inner and which else f"{x}{k}"
            out[k] = f"{name}.x[{element}]" if self.is_vector(tree, k) else name
        return out

    def _declare_registers(self, tree: NodeTree, times: int) -> list[str]:
        """Room for what the loop loads. What is loaded under a condition is zero otherwise."""
        out, x = [], self._register(tree)
        for k in self._inner(tree):
            clear = " = {}" if tree.guards[k] is not None else ""
            if tree is not self.tree or k not in self.gone:
                out.append(f"{self.type_of_load(tree, k)} {x}{k}[{times}]{clear};")
        return out

    def _passes(
        self, condition: str, at: str, coords: list[str], site: LoopSite,
        use: Callable[[NodeTree, str], list[str]],
    ) -> list[str]:  # fmt: skip
        """Load what a thread reads at a time, then use it: `use(tree, which)` gives statements for
        one vector. Where it is not in the core, it is loaded when it is used."""
        tree = self.tree if self.core is None else self.core
        inner, loads, uses = self._inner(tree), [], use(tree, "u")
        if self.late and inner:
            layouts = dict.fromkeys(self.layout_of[tree.letter, k] for k in inner)
            offsets = [f"const {self.int} o{n} = {self._offset(n, site)};" for n in layouts]
            return self._loop_vectors(condition, at, [*coords, *offsets, *uses])
        if inner:
            loads = self._loads(tree, inner, site, f"{self._register(tree)}#[u]")
        if self.core is not None:
            holds = f"if ({self._check_core(site)}) {{"
            edge = self._inner(self.tree)
            uses = [
                holds, *uses, "} else {", *self._declare_registers(self.tree, 1),
                *self._enclose(self._loads(self.tree, edge, site, "x#[0]")), *use(self.tree, "0"),
                "}",
            ]  # fmt: skip
            loads = [holds, *loads, "}"] if inner else []
        return [
            *self._declare_registers(tree, self.times),
            *(self._loop_vectors(condition, at, [*coords, *loads]) if inner else []),
            *self._loop_vectors(condition, at, [*coords, *uses]),
        ]

    def _loop_vectors(self, condition: str, at: str, lines: list[str]) -> list[str]:
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

    def _compute_elements(
        self,
        tree: NodeTree,
        site: LoopSite,
        which: str,
        after: list[str],
        before: Sequence[str] = (),
    ) -> list[str]:
        """Compute each element of a vector, with statements before and after."""
        pairs, drawn = self._draw_pairs(tree, site)
        wanted = tree.below(tree.roots, drawn)
        element = "e" if self.width > 1 else ""
        values = self._values(tree, "e", which)

        def statements(chosen: Iterable[int]) -> list[str]:
            return self._statements(tree, chosen, site, values, element, drawn)

        stages = self._plan_stages(tree, wanted, drawn) if not before else {}
        if stages:
            return [*pairs, *self._compute_in_stages(tree, stages, statements, after)]
        lines = [*before, *statements(wanted)]
        if self.width == 1:
            return [*pairs, *lines, *after]
        return [*pairs, *self._loop_elements([*lines, *after])]

    def _loop_elements(self, lines: Iterable[str]) -> list[str]:
        """Statements for each element of a vector."""
        return ["#pragma unroll", f"for (int e = 0; e < {self.width}; ++e) {{", *lines, "}"]

    # ---- in stages

    def _plan_stages(
        self, tree: NodeTree, wanted: Sequence[int], drawn: Container[int]
    ) -> dict[int, int]:
        """The stage in which each node is computed, or nothing where stages do not pay.

        After each stage, its quotients and roots of rare numbers are computed again. Leaves and
        `drawn` nodes have no stage.
        """
        slow = {k for k in wanted if self._approximate_text(tree, k)}
        if self.width == 1 or len(slow) < STAGED or tree.calls or tree.taken:
            return {}
        if tree is self.tree and self.either:
            return {}
        stages: dict[int, int] = {}
        for k in wanted:
            args = tree.nodes[k].args
            if args and k not in drawn:
                stages[k] = max(stages.get(a, 0) + (a in slow) for a in args)
        return stages

    @staticmethod
    def _approximate_text(tree: NodeTree, k: int) -> str | None:
        node = tree.nodes[k]
        return approximate_text(node.op, node.code, [f"{tree.letter}{a}" for a in node.args])

    def _compute_in_stages(
        self, tree: NodeTree, stages: dict[int, int],
        statements: Callable[[Iterable[int]], list[str]], after: list[str],
    ) -> list[str]:  # fmt: skip
        """The same as `_compute_elements`, in `stages`. What later ones need is held until then."""
        v, slow = tree.letter, {k for k in stages if self._approximate_text(tree, k)}
        last = max(stages[k] + (k in slow) for k in stages)
        needed = {a for k in slow for a in tree.nodes[k].args} | slow | {*tree.roots}
        for k, stage in stages.items():
            needed.update(a for a in tree.nodes[k].args if stages.get(a, stage) != stage)
        held = needed & {*stages}
        lines = [f"{TYPES[tree.nodes[k].code]} held{k}[{self.width}];" for k in sorted(held)]

        def held_statements(wanted: Iterable[int]) -> list[str]:
            """Statements for leaves and what is held."""
            found = sorted({*wanted})
            known = [
                f"const {TYPES[tree.nodes[k].code]} {v}{k} = held{k}[e];"
                for k in found
                if k in stages
            ]
            return [*statements(k for k in found if k not in stages), *known]

        for stage in range(last + 1):
            own = [k for k in stages if stages[k] == stage]
            again = [k for k in own if k in slow]
            below = {a for k in own for a in tree.nodes[k].args}
            ends = after if stage == last else []
            body = held_statements((below | {*(tree.roots if ends else ())}) - {*own})
            for k in own:
                text = self._approximate_text(tree, k)
                body += [let(tree.nodes[k].code, f"{v}{k}", text)] if text else statements([k])
                body += [f"held{k}[e] = {v}{k};"] if k in held else []
            if not again:
                lines += self._loop_elements([*body, *ends])
                continue
            exact = held_statements(a for k in again for a in tree.nodes[k].args)
            exact += [f"held{k}[e] = {self._operation(tree, k)};" for k in again]
            lines += ["{", "bool rare = false;", *self._loop_elements([*body, *ends])]
            lines += ["if (rare) {", *self._loop_elements(exact), "}", "}"]
        return ["{", *lines, "}"]

    # ---- points anyhow

    def _loop_unaligned(
        self, group: str, base: LoopSite, use: Callable[[NodeTree, LoopSite, str], list[str]],
        vectors: tuple[str, str, str], others: tuple[str, str],
    ) -> list[str]:  # fmt: skip
        """Write the loops over vectors of unaligned inputs, along a group of axes.

        The group has `n` points. `vectors` are a thread's first vector, the end, and the step. A
        vector that leaves its row or the core is taken apart. Points beyond the core come
        before, so that lanes of a warp do the same: `others` are a thread's first such point and
        the step. Threads beyond the core along the other axes may have a body of their own:
        ``central`` tells them apart.
        """
        width, main = self.width, self.bodies[-1]
        lengths = self._lengths(group, 1)

        def site(names: Sequence[str], number: str) -> LoopSite:
            coords = {(group, a): x for a, x in enumerate(names)}
            return LoopSite(base.coords | coords, base.linear | ({group: number} if number else {}))

        def point(place: LoopSite, number: str, tree: NodeTree, edge: NodeTree | None) -> list[str]:
            lines = self._point(tree, place, use(tree, place, number))
            if edge is None:
                return lines
            others = self._point(edge, place, use(edge, place, number))
            return ["if (central) {", *lines, "} else {", *others, "}"]

        def slabs(kind: str, tree: NodeTree, edge: NodeTree | None = None) -> list[str]:
            slab = self._slabs(group, cuts, kind)
            uses = point(site(slab.names, slab.number), slab.number, tree, edge)
            return self._loop(others[0], slab.total, others[1], [*slab.found, *uses])

        edge = self.partly.get(group)
        if by_row := vectorize.begin_with_rows(self):
            rows, number = [*lengths[:-1], -(-lengths[-1] // width)], ""
            coords, names = self._coordinates(group, rows, "i", group, width, "rows")
        else:
            number = "j"
            coords, names = self._coordinates(group, lengths, "j", group, 1, "whole")
            coords.insert(0, f"const {self.count} j = i * {width}u;")
        here = site(names, number)
        bounded = bool(self.core_bounds(group))
        whole = [self._check_core(here, group)] if bounded else []
        even = vectorize.lie_in_rows(self)
        if lengths[-1] % width and vectorize.core_axis_of_vectors(self) < 0:
            most = self.number("whole", max(lengths[-1] - width + 1, 0))
            whole.append(f"({self.count}){names[-1]} < {most}")
        lines = point(here, number, main, edge)
        cuts = self._find_core_ends(group, width if even else 1)
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
            check = [f"if (!({self._check_core(place, group)})) continue;"] if bounded else []
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

    def _point(self, tree: NodeTree, site: LoopSite, uses: list[str]) -> list[str]:
        """Load what a point, or a vector, reads, then use it."""
        loads = self._loads(tree, self._inner(tree), site, f"{self._register(tree)}#[0]")
        return [*self._declare_registers(tree, 1), *self._enclose(loads), *uses]

    def _loop(self, start: str, end: str, step: str, lines: list[str]) -> list[str]:
        head = f"for ({self.count} i = {start}; i < {end}; i += {step}) {{"
        return [head, *lines, "}"]

    def _find_core_ends(self, group: str, unit: int = 1) -> dict[int, tuple[int, int]]:
        """Where the core begins and ends along the axes that it does not fill.

        Along the last axis of the group it has whole vectors of a `unit`.
        """
        cuts: dict[int, tuple[int, int]] = {}
        last = len(self.axes[group]) - 1
        for k, low, length in self.core_bounds(group):
            (a,) = [a for a, s in enumerate(self.strides(self.axis_layout[k], group)) if s]
            high = low + length
            if a == last:
                low, high = -(-low // unit) * unit, high // unit * unit
            cuts[a] = low, max(low, high)
        if cuts and last not in cuts and (odd := self.axes[group][-1].length % unit):
            cuts[last] = 0, self.axes[group][-1].length - odd
        return cuts

    def _slabs(
        self, group: str, cuts: dict[int, tuple[int, int]], kind: str = "whole"
    ) -> PointRange:
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
        return PointRange(total, self.number(("slabs", kind, group), total), found, names, number)


def let(code: str, name: str, text: str) -> str:
    """A statement that gives a value its name. It is assigned, as a compiler works out, where it
    can, what a name begins with, and follows those within it as often as they occur: a chain of 40
    values, each of which occurs twice in the next, would take it years."""
    return f"{TYPES[code]} {name}; {name} = {text};"


def literal(x: Any) -> str:
    """A number as C++ has it, exactly."""
    if x.dtype.kind == "i":
        return f"{int(x)}ll" if x > np.iinfo(np.int64).min else "(long long)0x8000000000000000ull"
    return f"{float(x)!r}{'f' if x.dtype.itemsize == 4 else ''}"


def magic_of(d: int) -> int:
    """What `divide` needs to divide numbers below 2**31: a factor, and 32 bits up how far to shift.

    >>> m = magic_of(7)
    >>> [n * (m % 2**32) >> (m >> 32) for n in (0, 6, 7, 2**31 - 1)]
    [0, 0, 1, 306783378]
    """
    shift = 31 + (d - 1).bit_length()
    return shift << 32 | -(-(1 << shift) // d)
