"""Kernels that reduce sliding windows, whose common part threads share.

Threads share what these have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .body import magic_of
from .nodes import NodeTree, held_size, part_size
from .operations import TYPES, results
from .reduction import ReductionKernel
from .schedule import WAVES, LoopSite
from .window_tiles import MOST_AT_ONCE, THREADS, ColumnTile


class WindowReductionKernel(ReductionKernel):
    """The loops of windows that slide along a slow axis, and of those in panes."""

    # ---- windows

    def _write_windows(self) -> list[str]:
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
        site = LoopSite({("k", x): name for x, name in enumerate(names)})
        site.coords["k", at] = "begin"
        place = LoopSite(site.coords | {("r", 0): "(int)s"})
        place.coords |= {("r", x + 1): name for x, name in enumerate(inner)}
        reduced = [("r", x) for x in range(1 + len(others))]
        loads: list[str] = []
        if others:  # all that lies across belongs to a step
            many = self.number("across", math.prod(x.length for x in others))
            takes = self._point(tree, place, self._take_values(tree, place, "0"))
            takes = [f"for ({c} q = 0; q < {many}; ++q) {{", *across, *takes, "}"]
        else:
            loads = self._enclose(self._loads(tree, self._inner(tree), place, "x#[u]"))
            takes = self._take_values(tree, place, "u")
        last = f"({self.int}){self.slot('last', axes[at].length - some)}"
        here = LoopSite({**site.coords, ("k", at): "(begin + t)"})
        finished = ["if (t >= skip) {", *self._finish_results(here, ""), "}"]
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
                    *self._load_invariants(LoopSite(site.coords | dict.fromkeys(reduced, "0"))),
                    *self._share_windows(window.length, loads, takes, finished),
                ],
            ),
        ]  # fmt: skip

    def _share_windows(
        self, window: int, loads: list[str], takes: list[str], finished: list[str],
        some: int = 0, tree: NodeTree | None = None, name: str = "window",
    ) -> list[str]:  # fmt: skip
        """Results of windows one behind the other. Most of what these reduce they share (`shared`);
        what lies before that is put together from its end backwards (`head`), what lies behind it
        from its begin on (`tail`): van Herk, Pattern Recognition Letters 13 (1992). Step `s` is
        loaded, and taken in, and result `t` is `finished`."""
        some, width, c = some or self.sliding, self.width, self.count

        def room(times: int) -> list[str]:
            return self._declare_registers(tree or self.tree, times) if loads else []

        def for_every_result(own: str, moments: str = "") -> list[str]:
            """The same for all reductions, and for all results side by side."""
            return self._loop_results(
                [
                    (moments if moments and op == "moment" else own).replace("#", str(j))
                    for j, (op, _, _) in enumerate(self.kinds)
                ]
            )

        def merge_statements(other: str) -> list[str]:
            return for_every_result(f"part#[e].merge({other});", f"part#[e].add({other});")

        def parts(name: str, many: str = "") -> list[str]:
            return [f"Part{j} {name}{j}{many}[{width}];" for j in range(len(self.kinds))]

        def declare_accumulators(name: str, which: str = "") -> list[str]:
            """What takes in values from here on."""
            return [f"Part{j} (&part{j})[{width}] = {name}{j}{which};"
                    for j in range(len(self.kinds))]  # fmt: skip

        reach = f"({c}){self.slot(name, window)}"
        shared = [
            f"for ({c} r = {some - 1}; r < {reach}; r += {self.times}u) {{",
            *room(self.times),
            *(self._loop_vectors(f"s < {reach}", "s = r + u", loads) if loads else []),
            *self._loop_vectors(
                f"s < {reach}", "s = r + u",
                ["const bool opens = u == 0;", *declare_accumulators("shared"), *takes],
            ),
            "}",
        ]  # fmt: skip
        ahead, closed = f"int u = 0; u < {some - 1}; ++u", "const bool opens = false;"
        head = [
            *room(some - 1),
            *(_unroll(ahead, [f"const {c} s = u;", *loads]) if loads else []),
            *_unroll(
                f"int u = {some - 2}; u >= 0; --u",
                [f"const {c} s = u;", closed, *declare_accumulators("head", "[u]"),
                 *for_every_result("part#[e].clear();", "part#[e].begin(shared#[e]);"), *takes,
                 f"if (u < {some - 2}) {{", *merge_statements("head#[u + 1][e]"), "}"],
            ),
        ]  # fmt: skip
        tail = [
            *room(some - 1),
            *(_unroll(ahead, [f"const {c} s = {reach} + u;", *loads]) if loads else []),
            *_unroll(
                f"int t = 0; t < {some}; ++t",
                ["if (t) {", "const int u = t - 1;", f"const {c} s = {reach} + u;", closed,
                 *declare_accumulators("tail"), *takes, "}", *parts("part"),
                 *for_every_result("part#[e] = shared#[e];"),
                 f"if (t < {some - 1}) {{", *merge_statements("head#[t][e]"), "}",
                 "if (t) {", *merge_statements("tail#[e]"), "}", *finished],
            ),
        ]  # fmt: skip
        return [
            *parts("shared"), *for_every_result("shared#[e].clear();"), *shared,
            *parts("head", f"[{some - 1}]"), "{", *head, "}",
            *parts("tail"), *for_every_result("tail#[e].clear();", "tail#[e].begin(shared#[e]);"),
            "{", *tail, "}",
        ]  # fmt: skip

    def _write_tiled_windows(self) -> list[str]:
        """Let a block make a tile of results in shared memory, then write it."""
        pane, c, axes = self.pane, self.count, self.axes["k"]
        assert pane is not None
        self.held = 1
        lengths = [x.length for x in axes]
        lengths[-2] = -(-lengths[-2] // pane.rows)
        lengths[-1] = -(-lengths[-1] // pane.columns)
        many = math.prod(lengths)
        self.blocks = max(1, min(many, self.processors * WAVES))
        coords, names = self._coordinates("k", lengths, "w", "t", name="pane")
        threads, arrays, made = (
            self._reduce_columns(names) if isinstance(pane, ColumnTile) else self._fill_tile(names)
        )
        for j, (_, _, gives) in enumerate(self.kinds):
            size = pane.rows * pane.made_pitch
            arrays += [(f"made{j}_{r}", TYPES[g], size * held_size(g)) for r, g in enumerate(gives)]
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
            f"if ({self._check_tile('row', points=False)}) {{",
            *self._finish_results(self._site_in_tile(names, "row"), ""),
            "}",
            "}",
            "}",
        ]  # fmt: skip

    def _site_in_tile(self, names: Sequence[str], row: str) -> LoopSite:
        """Where a point or a result of a pane is, by its row and column."""
        coords = {("k", x): name for x, name in enumerate(names)}
        coords["k", len(names) - 2] = f"(above + {row})"
        coords["k", len(names) - 1] = "(first + column)"
        return LoopSite(coords | {("r", x): "0" for x in range(len(self.axes["r"]))})

    def _check_tile(self, row: str, points: bool) -> str:
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
        wide_, magic = self.slot((what, "wide"), wide), self.slot((what, "magic"), magic_of(wide))
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

    def _choose_core(self, names: Sequence[str], core: list[str], anywhere: list[str]) -> list[str]:
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

    def _leave_results(self) -> list[str]:
        """Leave results in shared memory, the one before number `t` of which is `own`."""
        return [
            f"made{j}_{r}[own + t] = {value};"
            for j, (op, short, gives) in enumerate(self.kinds)
            for r, value in enumerate(results(op, short, gives, f"part{j}[0]"))
        ]

    def _fill_tile(self, names: Sequence[str]) -> tuple[str, list[tuple[str, str, int]], list[str]]:
        """Compute each point of a tile once into shared memory; make a thread's results.

        Returns the name of a thread, the arrays in shared memory (name, type, bytes), and the
        statements.
        """
        pane, c, tree, some = self.pane, self.count, self.tree, self.sliding
        assert pane is not None
        site = self._site_in_tile(names, "row")
        arrays: list[tuple[str, str, int]] = []
        takes: list[str] = []  # what takes in a value, of each reduction
        known: dict[int, str] = {}
        for j, (root, (op, short, _)) in enumerate(zip(tree.roots, self.kinds, strict=True)):
            if root not in known:
                known[root] = f"points{j}"
                nbytes = pane.high * pane.pitch * held_size(short)
                arrays.append((known[root], TYPES[short], nbytes))
            takes.append(f"const {TYPES[short]} g{j}[1] = {{{known[root]}[at]}};")
            takes.append(f"part{j}[0].take(g{j}{', opens' if op == 'moment' else ''});")
        pitch, many = self._pitch(), f"(unsigned){self.slot('points', pane.high * pane.wide)}"
        found = [
            *self._split("p", pane.wide, "points"),
            f"const int to = row * {pitch} + column + column / {some};",
        ]

        def fill_statements(tree: NodeTree, check: str) -> list[str]:
            """Compute what is reduced of each point of a pane, if it is one."""
            x = f"{self._register(tree)}#[u]"
            loads = self._enclose(self._loads(tree, tree.inputs, site, x))
            stores = [f"{known[root]}[to] = {tree.letter}{own};"
                      for root, own in zip(self.tree.roots, tree.roots, strict=True)]  # fmt: skip
            uses = self._compute_elements(tree, site, "u", list(dict.fromkeys(stores)))
            if check:
                loads, uses = ([f"if ({check}) {{", *lines, "}"] for lines in (loads, uses))
            each = f"p < {many}", f"p = i + u * {THREADS}u"
            return [
                f"for ({c} i = threadIdx.x; i < {many}; i += {THREADS * self.times}u) {{",
                *self._declare_registers(tree, self.times),
                *(self._loop_vectors(*each, [*found, *loads]) if loads else []),
                *self._loop_vectors(*each, [*found, *uses]),
                "}",
            ]

        fill = fill_statements(tree, self._check_tile("row", points=True))
        if self.core is not None:
            fill = self._choose_core(names, fill_statements(self.core, ""), fill)
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
            *self._share_windows(pane.window, [], step, self._leave_results()),
        ]  # fmt: skip

    def _reduce_columns(
        self, names: Sequence[str]
    ) -> tuple[str, list[tuple[str, str, int]], list[str]]:
        """Let each thread reduce its column into shared memory, then reduce along rows.

        Returns the same as `_fill_tile`.
        """
        box = self.pane
        assert isinstance(box, ColumnTile)
        size, arrays = box.rows * box.pitch, []
        for j, kind in enumerate(self.kinds):
            own = [(_array(j, x), "double", size * 8) for x in self.moment_members(j)]
            arrays += own or [(f"columns{j}", f"Part{j}", size * part_size(*kind))]
        fill = self._loop_tile_columns(self.tree, names, inside=True)
        if self.core is not None:
            fill = self._choose_core(
                names, self._loop_tile_columns(self.core, names, inside=False), fill
            )
        across = f"(unsigned){self.slot('across', box.wide)}"
        threads = (
            f"const int column = threadIdx.x % {across}, up = threadIdx.x / {across} * {box.tall};"
        )
        return threads, arrays, [*fill, "__syncthreads();", *self._reduce_rows()]

    def _loop_tile_columns(self, tree: NodeTree, names: Sequence[str], inside: bool) -> list[str]:
        """What lies in a thread's column of a box. Whether there are such points is asked of each
        if need be (`inside`)."""
        box, c, others = self.pane, self.count, self.axes["r"]
        assert isinstance(box, ColumnTile)
        direct = box.down <= MOST_AT_ONCE
        row = "up + u" if direct else "up + (int)s"
        site = self._site_in_tile(names, row)
        check = self._check_tile(row, points=True) if inside else ""

        def guard_statements(lines: list[str]) -> list[str]:
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
            own = [f"{_array(j, x)}[{place}] = part{j}[0].{x};" for x in self.moment_members(j)]
            leave += own or [f"columns{j}[{place}] = part{j}[0];"]
        if not direct:
            loads, takes = [], []
            if others:
                point = guard_statements(
                    self._point(tree, site, self._take_values(tree, site, "0"))
                )
                takes = [*over, *point, *end]
            else:
                x = f"{self._register(tree)}#[u]"
                loads = self._enclose(
                    guard_statements(self._loads(tree, self._inner(tree), site, x))
                )
                takes = guard_statements(self._take_values(tree, site, "u"))
            return self._share_windows(box.down, loads, takes, leave, box.tall, tree, "down")
        many_steps = box.tall + box.down - 1
        each = f"int u = 0; u < {many_steps}; ++u"
        loads = guard_statements(
            self._loads(tree, self._inner(tree), site, f"{self._register(tree)}#[u]")
        )
        into = [f"Part{j} (&part{j})[1] = steps{j}[u];" for j in range(len(self.kinds))]
        opens = ["const bool opens = true;"] if self._has_moments() else []
        return [
            *[f"Part{j} steps{j}[{many_steps}][1];" for j in range(len(self.kinds))],
            *_unroll(each, [f"steps{j}[u][0].clear();" for j in range(len(self.kinds))]),
            *over,
            *self._declare_registers(tree, many_steps),
            *(_unroll(each, self._enclose(loads)) if loads else []),
            *_unroll(each, [*opens, *into, *guard_statements(self._take_values(tree, site, "u"))]),
            *end,
            *self._merge_steps(box.tall, box.down, leave),
        ]

    def _has_moments(self) -> bool:
        return any(op == "moment" for op, _, _ in self.kinds)

    def _merge_steps(self, many: int, reach: int, leave: list[str]) -> list[str]:
        """Put together so many windows of steps that a thread has at hand."""
        own, bases, joins = [], [], []
        for j, (op, _, _) in enumerate(self.kinds):
            own.append(f"Part{j} part{j}[1] = {{steps{j}[t][0]}};")
            bases += [f"to_one_base(steps{j});"] if op == "moment" else []
            join = "add" if op == "moment" else "merge"
            joins.append(f"part{j}[0].{join}(steps{j}[t + u][0]);")
        joined = _unroll(f"int u = 1; u < {reach}; ++u", joins)
        return [*bases, *_unroll(f"int t = 0; t < {many}; ++t", [*own, *joined, *leave])]

    def _reduce_rows(self) -> list[str]:
        """Put together along rows what lies in columns."""
        box, c = self.pane, self.count
        assert isinstance(box, ColumnTile)
        some, each = box.some, box.columns // box.some
        points = box.down * math.prod(x.length for x in self.axes["r"])
        held = f"{self.slot('points', points)}" if self._has_moments() else ""

        def read_column(j: int, to: str, at: str) -> list[str]:
            """What lies in a column."""
            own = [f"{to}.{x} = {_array(j, x)}[{at}];" for x in self.moment_members(j)]
            return [*own, f"{to}.of({held});"] if own else [f"{to} = columns{j}[{at}];"]

        if box.window > MOST_AT_ONCE:
            takes = [f"const int at = mine + (int)(s + s / {some}u);"]
            for j, (op, _, _) in enumerate(self.kinds):
                join = f"join(step{j}, opens)" if op == "moment" else f"merge(step{j})"
                takes += [
                    f"Part{j} step{j};",
                    *read_column(j, f"step{j}", "at"),
                    f"part{j}[0].{join};",
                ]
            rows = self._share_windows(box.window, [], takes, self._leave_results())
        else:
            many, steps = some + box.window - 1, []
            for j in range(len(self.kinds)):
                steps += read_column(j, f"steps{j}[u][0]", f"mine + u + u / {some}")
            rows = [
                *[f"Part{j} steps{j}[{many}][1];" for j in range(len(self.kinds))],
                *_unroll(f"int u = 0; u < {many}; ++u", steps),
                *self._merge_steps(some, box.window, self._leave_results()),
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


def _array(j: int, member: str) -> str:
    """What the array is called that has a member of the moments of columns."""
    return f"columns{j}_{member.replace('.', '_')}"


def _unroll(head: str, lines: list[str]) -> list[str]:
    return ["#pragma unroll", f"for ({head}) {{", *lines, "}"]
