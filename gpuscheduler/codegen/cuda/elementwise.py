"""Kernels without reductions: threads along the innermost axis, or in tiles.

Threads along the innermost axis, or through tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .body import KernelBody
from .nodes import NodeTree, size_of
from .operations import STORED, store_value
from .schedule import TILES, WAVES, LoopSite
from .window_tiles import THREADS

#: Most blocks per processor of kernels that compute for longer than they read and write, where
#: threads have fewer than VECTORS vectors. On an H200 black_scholes takes 2.32 ms so for 16 blocks
#: of an array and 2.40 ms for 64. With as many as other kernels have, it takes 2.38 and 2.54 ms.
HEAVY_WAVES = 8
#: Vectors of a thread, one after the other, from which on HEAVY_WAVES does not apply.
VECTORS = 8
#: Points from which a warp picks those that a mask selects, before it goes on to others.
PICKED = 1024


class ElementwiseKernel(KernelBody):
    """The loops of an element-wise kernel, and the tiles that reductions go through as well."""

    def _write_elementwise(self) -> list[str]:
        if self.loose:
            return self._write_unaligned()
        width = self.width
        n = self.points // width
        step = f"(({self.count})blocks * {THREADS}u)"
        self.blocks = max(1, min(-(-n // (THREADS * self.times)), self.processors * WAVES))
        if self.heavy:
            fewer = max(self.processors * HEAVY_WAVES, -(-n // (THREADS * VECTORS)))
            self.blocks = min(self.blocks, fewer)
        lines = [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {self.count} n = {self.number('n', n)};",
            "if (n == 0 || blockIdx.x >= blocks) return;",
        ]
        lengths = self._lengths("k", width)
        coords, names = self._coordinates("k", lengths, "j", "k", width)
        site = LoopSite({("k", a): x for a, x in enumerate(names)}, {"k": f"j * {width}u"})
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
            *self._load_invariants(LoopSite({}, {"k": "0"})),
            f"for ({self.count} i = blockIdx.x * {THREADS}u + threadIdx.x; i < n; "
            f"i += {step} * {self.times}u) {{",
            *body,
            "}",
        ]

    def _write_unaligned(self) -> list[str]:
        """Vectors of the output, in which what is read lies anyhow."""
        m = -(-self.points // self.width)
        if self.out_layout >= 0:  # vectors of a row, which begins at a multiple of one
            *rows, last = self._lengths("k", 1)
            m = math.prod(rows) * -(-last // self.width)
        self.blocks = max(1, min(-(-m // THREADS), self.processors * WAVES))

        def use(tree: NodeTree, site: LoopSite, number: str) -> list[str]:
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
            *self._load_invariants(LoopSite({}, {"k": "0"})),
            *self._loop_unaligned("k", LoopSite({}), use, (first, "m", step), (first, step)),
        ]  # fmt: skip

    def _write_selection(self) -> list[str]:
        """What a mask selects, in order. A warp goes through so many points; without values it
        counts those at which the mask holds. With these, it is told how many there are up to the
        end of what each warp goes through."""
        width, c = self.width, self.count
        n, held = self.points // width, self.times * width
        unit = PICKED // width  # vectors; both kernels have parts of as many points
        self.units = units = -(-n // unit)
        self.blocks = max(1, min(-(-units * 32 // THREADS), self.processors * WAVES))
        coords, names = self._coordinates("k", self._lengths("k", width), "j", "k", width)
        site = LoopSite({("k", a): x for a, x in enumerate(names)}, {"k": f"j * {width}u"})
        columns = self.outs[1:]
        at = f"u * {width} + e" if width > 1 else "u"

        def use(tree: NodeTree, which: str) -> list[str]:
            mask, *values = [f"{tree.letter}{root}" for root in tree.roots]
            after = [f"here[{at}] = {mask};"]
            for m, (short, value) in enumerate(zip(columns, values, strict=True)):
                after.append(f"value{m}[{at}] = {store_value(short, value)};")
            return self._compute_elements(tree, site, which, after)

        body = self._passes("j < n", "j = first + u * 32u + lane", coords, site, use)
        begin, end = "unsigned total = 0;", ["if (lane == 0) ((unsigned*)q0)[w] = total;"]
        takes = [
            "#pragma unroll",
            f"for (int h = 0; h < {held}; ++h) total += __popc(__ballot_sync(~0u, here[h]));",
        ]
        if columns:
            number = f"(at + before) * {len(columns)}" if len(columns) > 1 else "at + before"
            writes = [f"q{1 + m}[{number}] = value{m}[{at}];" for m in range(len(columns))]
            each = ["#pragma unroll", f"for (int e = 0; e < {width}; ++e) {{"]
            begin, end = "long long at = w ? ((const long long*)q0)[w - 1] : 0;", []
            takes = [
                "#pragma unroll",
                f"for (int u = 0; u < {self.times}; ++u) {{",
                "unsigned before = 0, all = 0;",
                *each,
                f"const unsigned some = __ballot_sync(~0u, here[{at}]);",
                "before += __popc(some & ((1u << lane) - 1));",
                "all += __popc(some);",
                "}",
                *each,
                f"if (here[{at}]) {{",
                *writes,
                "++before;",
                "}",
                "}",
                "at += all;",
                "}",
            ]
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {c} n = {self.number('n', n)}, units = {self.number('units', units)};",
            "if (n == 0 || blockIdx.x >= blocks) return;",
            *self._pointers(),
            *self._load_invariants(LoopSite({}, {"k": "0"})),
            "const unsigned lane = threadIdx.x & 31;",
            f"for ({c} w = (blockIdx.x * {THREADS}u + threadIdx.x) / 32; w < units; "
            f"w += blocks * {THREADS // 32}u) {{",
            begin,
            f"for ({c} first = w * {unit}u; first < (w + 1) * {unit}u && first < n; "
            f"first += {32 * self.times}u) {{",
            f"bool here[{held}] = {{}};",
            *[f"{STORED[short]} value{m}[{held}];" for m, short in enumerate(columns)],
            *body,
            *takes,
            "}",
            *end,
            "}",
        ]

    def _stores(
        self, tree: NodeTree, site: LoopSite, place: str, which: str, before: Sequence[str] = ()
    ) -> list[str]:
        """Compute the outputs of a vector of points and write them; `before` comes before each."""
        width = self.width
        declared, after, writes = [], [], []
        for n, (short, root) in enumerate(zip(self.outs, tree.roots, strict=True)):
            value = store_value(short, f"{tree.letter}{root}")
            if width == 1:
                after.append(f"q{n}[{place}] = {value};")
                continue
            kind = f"Vec<{STORED[short]}, {width}>"
            declared.append(f"{kind} out{n};")
            after.append(f"out{n}.x[e] = {value};")
            writes.append(f"*({kind}*)(q{n} + {place}) = out{n};")
        return [*declared, *self._compute_elements(tree, site, which, after, before), *writes]

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
            tile = 32 * 33 * size_of(self.tree.nodes[k].code)
            if self.layout_of[self.tree.letter, k] in self.turned and tile <= room:
                turned.append(k)
                room -= tile
        straight = [k for k in self._inner(self.tree) if k not in turned]

        def site(row: str, column: str) -> LoopSite:
            found = {(group, a): names[n] for n, a in enumerate(rest)}
            found[group, across] = f"t{len(rest)} * 32 + {row}"
            found[group, last] = f"t{len(rest) + 1} * 32 + {column}"
            return LoopSite(found)

        def is_inside(place: LoopSite) -> str:
            return " && ".join(
                f"{place.coords[group, a]} < ({self.int})"
                f"{self.slot(('length', group, 'edge', a), axes[a].length)}"
                for a in (across, last)
            )

        def for_each_site(row: str, column: str, lines: Any) -> list[str]:
            place = site(row, column)
            return ["#pragma unroll", "for (int u = 0; u < 4; ++u) {",
                    f"if ({is_inside(place)}) {{", *lines(place), "}", "}"]  # fmt: skip

        line = "(ty + 8 * u)"
        shared = [f"__shared__ {STORED[self.tree.nodes[k].code]} turn{k}[32][33];" for k in turned]
        # in shared memory the elements have no constructors, so that these lie there untouched
        declared = [f"{STORED[self.tree.nodes[k].code]} x{k}[4]"
                    f"{' = {}' if self.tree.guards[k] is not None else ''};"
                    for k in (*straight, *turned)]  # fmt: skip
        fetch = [f"x{k}[u] = turn{k}[tx][{line}];" for k in turned]
        turning = for_each_site("tx", line, lambda s: self._loads(self.tree, turned, s, "x#[u]"))
        keep = ["#pragma unroll", "for (int u = 0; u < 4; ++u) {",
                *[f"turn{k}[{line}][tx] = x{k}[u];" for k in turned], "}"]  # fmt: skip
        loads = for_each_site(line, "tx", lambda s: self._loads(self.tree, straight, s, "x#[u]"))
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
            *for_each_site(line, "tx", lambda s: [*fetch, *use(s)]),
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

    def _write_tiled(self) -> list[str]:
        tiles = self._tile_count("k")
        self.blocks = max(1, min(tiles, self.processors * WAVES))
        self.times = 4
        axes = self.axes["k"]

        def use(site: LoopSite) -> list[str]:
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
            *self._load_invariants(LoopSite({}, {})),
            *self._tile("k", "blockIdx.x", "blocks", use),
        ]
