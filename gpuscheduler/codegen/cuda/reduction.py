"""Kernels that reduce: threads and blocks along the reduced axes, or beside them.

Rows: lanes of a warp or a whole block go along the reduced axes. Columns: each thread has
results of its own and goes down the reduced axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import NotGenerated
from .elementwise import ElementwiseKernel
from .loop_space import power_above, power_below
from .nodes import NodeTree, part_size
from .operations import STORED, TYPES, store_value
from .schedule import (
    COUNTERS,
    FEW_WEIGHTS,
    MOST_BINS,
    MOST_WEIGHTS,
    SHARED_WAVES,
    WAVES,
    LoopSite,
    ResultLoop,
)
from .window_tiles import THREADS

#: Blocks per processor that share the results of rows: so many that the last to finish is short.
ROW_WAVES = 64
#: Blocks per processor that share the results of columns.
COLUMN_WAVES = 3
#: Lanes of a block for each column.
LANES = 8
#: Blocks per processor that share results whose parts are long to merge, or counts in bins. The
#: variance of 256 MiB on an H100 takes 190 us with 64 and 136 us with 8.
FEWER_WAVES = 8
#: Most sums of weights that blocks leave for the last one to add up.
SUMS = 2**18
#: Places in a kernel that merge the parts of a block's threads, from which on they call a function.
#: Inlined each time, it takes long to compile (eight variances: 1 s).
MOST_INLINED = 8
#: Bytes of a part from which on a function merges it: for less, a call is more code than merging.
LEAST_CALLED = 32


class ReductionKernel(ElementwiseKernel):
    """The loops of a kernel that reduces."""

    # ---- reductions

    def _steps(self) -> int:
        """Vectors along the reduced axes, or points where vectors lie beside each other."""
        return -(-self.reach // self.width) if self.rows else self.reach

    def _shares(self, results_: int) -> tuple[int, int, int, int]:
        """Decide how a reduction is divided among blocks and lanes.

        Returns how many results a block makes at a time, lanes for each, how many blocks share
        them, and how many steps each block does.
        """
        rows = self.rows
        steps = self._steps()
        if self.across >= 0:
            steps = self._tile_count("r")
            share = max(1, min(steps // 2, self.processors * SHARED_WAVES // 2))
            return 1, THREADS, share, 0
        if rows and not self.wide:
            lanes = max(power_above(-(-steps // 4)), min(8, power_above(steps)))
            lanes = min(lanes, 32)
            return THREADS // lanes, lanes, 1, max(steps, 1)
        if rows:
            room = self.processors * ROW_WAVES // max(results_, 1)
            if any(part_size(*kind) >= LEAST_CALLED for kind in self.kinds):
                # beyond the core some parts take longer than others
                room = min(room, self.processors * FEWER_WAVES * (4 if self.partly else 1))
            often = min(2 * self.times, 8)  # steps of a thread, at least
            share = max(1, min(room, -(-steps // (THREADS * often))))
            long = -(-max(steps, 1) // share)
            long = -(-long // THREADS) * THREADS
            return 1, THREADS, max(1, -(-steps // long)), long
        if results_ >= 32:
            lanes = min(LANES, power_below(max(steps // 4, 1)))
            side = THREADS // lanes
            while side > 32 and side // 2 >= results_:
                side, lanes = side // 2, lanes * 2
        else:
            side = power_above(max(results_, 1))
            lanes = THREADS // side
        groups = max(1, -(-results_ // side))
        slots = self.processors * COLUMN_WAVES
        room = slots // groups or _divide_evenly(groups, slots)
        share = max(1, min(room, -(-steps // (lanes * 8))))
        long = -(-max(steps, 1) // share)
        return side, lanes, max(1, -(-steps // long)), long

    def _is_wide(self) -> bool:
        """Whether a whole block, not a warp, goes along a row."""
        steps = self._steps()
        return self.across >= 0 or (
            steps > 256 and -(-self.points // 8) < self.processors * 8
        )  # fmt: skip

    def _write_reduction(self) -> list[str]:
        self.wide = self.rows and self._is_wide()
        if self.wide and self.deeper and self.times == 4:
            self.times = 8
        self.held = 1 if self.rows else self.width  # results of one thread
        steps = self._steps() if self.across < 0 else self._tile_count("r")
        shared = self.wide or not self.rows  # whether blocks may share results
        every = self._results()
        total, before = "groups * share" if shared else "groups", []
        work = [f"for (unsigned w = blockIdx.x; w < {total}; w += blocks) {{", *every.work, "}"]
        units = every.units
        if self.loose and not self.rows and self.core_bounds("k"):
            # those that are beyond the core come before, by themselves
            width = self.width
            self.held = self.width = 1
            others = self._results("beyond", width)
            self.held = self.width = width
            units += others.units
            mine = self.slot(("units", "beyond"), others.units)
            before = [f"const unsigned others = (unsigned){mine};"]
            work = [
                f"for (unsigned v = blockIdx.x; v < {total} + others; v += blocks) {{",
                "if (v < others) {", "const unsigned w = v;", *others.declared, *others.work,
                "} else {", "const unsigned w = v - others;", *every.work, "}", "}",
            ]  # fmt: skip
        self.blocks = max(1, min(units, self.processors * WAVES))
        room = f"__shared__ Largest kept[{THREADS // 2}];", "__shared__ bool last;"
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {self.count} steps = {self.number('steps', steps)};",
            *before,
            "if (blockIdx.x >= blocks) return;",
            *(room if shared else ()),
            *self._pointers(),
            *every.declared,
            "if (results == 0) return;",
            *work,
        ]

    def _results(self, name: str = "", unit: int = 1) -> ResultLoop:
        """Write a loop's body that makes one or several results of a thread.

        It makes all results, or only those beyond the core. The parts of the latter have a `name`,
        and `unit` is the number of results in a vector of the others.
        """
        c, shared = self.count, self.wide or not self.rows
        live = ["const bool live = o < results;"]
        if name:
            slab = self._slabs("k", self._find_core_ends("k", unit))
            results_ = slab.points
            number = slab.number
            site = LoopSite({("k", a): x for a, x in enumerate(slab.names)}, {"k": number})
            live = [*live, f"const {c} i = live ? o : 0;", *slab.found]
            bodies = [self.tree, *filter(None, [self.partly.get("r")])]
            kept: list[str] = []
        else:
            results_ = self.points // self.held
            kept, names = self._coordinates("k", self._lengths("k", self.held), "o", "k", self.held)
            site = LoopSite({("k", a): x for a, x in enumerate(names)}, {"k": f"o * {self.held}u"})
            bodies, number = self.bodies, "o"
            if self.loose and not self.rows:
                bodies = [*filter(None, [self.partly.get("k")]), self.bodies[-1]]
                if inside := self._check_core(site, "k"):
                    live = [*kept, f"const bool live = o < results && {inside};"]
        side, lanes, share, long = self._shares(results_)
        groups = -(-results_ // side)
        units = groups * share
        if units >= 2**31:
            raise NotGenerated(f"a reduction to {self.points:,} results")

        def word(what: str) -> Any:
            return (what, name) if name else what

        declared = [
            f"const {c} results = {self.number(word('results'), results_)};",
            f"const unsigned groups = (unsigned){self.slot(word('groups'), groups)};",
        ]
        if shared:
            declared += [
                f"const unsigned share = (unsigned){self.slot(word('share'), share)};",
                f"const {c} long_ = {self.number(word('long'), long)};",
            ]
        if self.wide:
            declared.append(f"const int lanes = {THREADS}, x = 0, y = threadIdx.x;")
            declared.append("const unsigned side = 1;")
        else:
            across = ("/", "%") if self.rows else ("%", "/")
            divisor = "lanes" if self.rows else "side"
            declared += [
                f"const int lanes = (int){self.slot(word('lanes'), lanes)};",
                f"const unsigned side = {THREADS}u / lanes;",
                f"const int x = threadIdx.x {across[0]} {divisor}, "
                f"y = threadIdx.x {across[1]} {divisor};",
            ]
        if shared:
            declared += self._scratch(groups, share, side, name)
        work = [
            "const unsigned group = w / share, part = w % share;"
            if shared
            else "const unsigned group = w;",
            f"const {c} o = ({c})group * side + x;",
            *live,
        ]
        for j in range(len(self.kinds)):
            work.append(f"Part{j} part{j}[{self.held}];")
            work += self._loop_results([f"part{j}[e].clear();"])
        work += [
            "if (live && steps) {",
            *kept,
            *self._load_invariants(LoopSite({**site.coords}, {**site.linear, "r": "0"}), bodies),
            *self._loop_reduced(site, shared, bool(name)),
            "}",
            *self._merge_block(),
            *(self._merge_shares() if shared else []),
            "if (y == 0 && live) {",
            *kept,
            *self._finish_results(site, number),
            "}",
        ]
        return ResultLoop(declared, work, units)

    def _write_histogram(self) -> list[str]:
        """A histogram. Each block counts in shared memory, in as many copies as there is room for,
        so that few lanes of a warp want the same counter, and adds what it has to the totals. The
        last block leaves these zero. Integers add up to the same in any order."""
        bins = self.kernel.shape[0]
        copies = min(5, (COUNTERS // bins).bit_length() - 1) if bins <= COUNTERS else 0
        most = COUNTERS if bins <= COUNTERS else MOST_BINS
        counters = self.slots.at("counters")
        self.counters = counters, 2 + 2 * bins
        divided = self._divide_points()
        if self.reach // self.blocks >= 2**31:
            raise NotGenerated(f"a histogram of {self.reach:,} points")
        site = LoopSite({("k", 0): "(int)o"} if self.axes["k"] else {})
        return [
            *divided,
            f"const unsigned copies = (unsigned){self.slot('copies', copies)};",
            "if (blockIdx.x >= blocks) return;",
            f"__shared__ unsigned table[{most}];",
            "__shared__ bool last;",
            f"unsigned* const counters = (unsigned*)S({counters});",
            "unsigned long long* const totals = (unsigned long long*)(counters + 2);",
            f"for (unsigned k = threadIdx.x; k < bins << copies; k += {THREADS}u) table[k] = 0;",
            "__syncthreads();",
            *self._pointers(),
            f"const unsigned lanes = {THREADS}u, y = threadIdx.x, part = blockIdx.x;",
            "if (steps) {",
            *self._load_invariants(LoopSite({}, {"r": "0"})),
            *self._loop_reduced(LoopSite({}), True, False),
            "}",
            "__syncthreads();",
            f"for (unsigned k = threadIdx.x; k < bins; k += {THREADS}u) {{",
            "unsigned n = 0;",
            "for (unsigned c = 0; c < 1u << copies; ++c)",
            "  n += table[(k << copies) + ((c + threadIdx.x) & ((1u << copies) - 1))];",
            "if (n) atomicAdd(totals + k, (unsigned long long)n);",
            "}",
            "__threadfence();",
            *_choose_last_block("blocks", "return"),
            f"for ({self.count} o = threadIdx.x; o < bins; o += {THREADS}u) {{",
            "const long long part0[1] = {(long long)atomicExch(totals + o, 0ull)};",
            *self._finish_results(site),
            "}",
        ]

    def _divide_points(self, most: int = 2**31) -> list[str]:
        """Divide the points of a histogram among at most `most` blocks, as arguments."""
        steps = self.reach // self.width
        self.wide, self.held = True, 1
        blocks = min(-(-steps // (THREADS * self.times)), self.processors * FEWER_WAVES, most)
        long = -(-max(steps, 1) // max(blocks, 1))
        long = -(-long // THREADS) * THREADS
        self.blocks = max(1, -(-steps // long))
        return [
            f"const unsigned blocks = (unsigned){self.slot('blocks', self.blocks)};",
            f"const {self.count} steps = {self.number('steps', steps)};",
            f"const {self.count} long_ = {self.number('long', long)};",
            f"const unsigned bins = (unsigned){self.slot('bins', self.kernel.shape[0])};",
        ]

    def _write_weighted_histogram(self) -> list[str]:
        """A histogram of weights. Lanes of a warp that have the same bin add up what they have, and
        the first of them adds that to a table; each warp has one of its own, or takes turns with
        others. Blocks leave their sums in memory, and the last one adds these up: always in the
        same order."""
        bins, warps = self.kernel.shape[0], THREADS // 32
        most = FEW_WEIGHTS if bins * warps <= FEW_WEIGHTS else MOST_WEIGHTS
        tables = min(warps, most // bins)
        counters, sums = self.slots.at("counters"), self.slots.at("scratch")
        divided = self._divide_points(max(self.processors, SUMS // bins))
        self.counters, self.scratch = (counters, 2), (sums, self.blocks * bins * 8)
        side = min(THREADS, power_above(bins))
        site = LoopSite({("k", 0): "(int)o"} if self.axes["k"] else {})
        return [
            *divided,
            f"const unsigned tables = (unsigned){self.slot('tables', tables)};",
            "if (blockIdx.x >= blocks) return;",
            f"__shared__ double table[{most}];",
            "__shared__ bool last;",
            f"unsigned* const counters = (unsigned*)S({counters});",
            f"double* const sums = (double*)S({sums});",
            f"for (unsigned k = threadIdx.x; k < bins * tables; k += {THREADS}u) table[k] = 0.0;",
            "__syncthreads();",
            *self._pointers(),
            f"const unsigned lanes = {THREADS}u, y = threadIdx.x, part = blockIdx.x;",
            "const unsigned warp = threadIdx.x / 32;",
            "if (steps) {",
            *self._load_invariants(LoopSite({}, {"r": "0"})),
            *self._loop_weights(),
            "}",
            "__syncthreads();",
            f"for (unsigned k = threadIdx.x; k < bins; k += {THREADS}u) {{",
            "double sum = table[k];",
            "for (unsigned n = 1; n < tables; ++n) sum += table[n * bins + k];",
            "sums[part * bins + k] = sum;",
            "}",
            "__threadfence();",
            *_choose_last_block("blocks", "return"),
            f"const unsigned side = (unsigned){self.slot('side', side)};",
            f"const unsigned every = {THREADS}u / side, group = threadIdx.x / side;",
            "for (unsigned k = threadIdx.x % side; k < bins; k += side) {",
            "double sum = 0.0;",
            "#pragma unroll 8",
            "for (unsigned n = group; n < blocks; n += every) sum += __ldcg(sums + n * bins + k);",
            "table[group * bins + k] = sum;",
            "}",
            "__syncthreads();",
            f"for ({self.count} o = threadIdx.x; o < bins; o += {THREADS}u) {{",
            "double part0[1] = {table[o]};",
            "for (unsigned n = 1; n < every; ++n) part0[0] += table[n * bins + o];",
            *self._finish_results(site),
            "}",
        ]

    def _loop_weights(self) -> list[str]:
        """The loop along the reduced axes. All threads of a block go through it as often, whether
        they have points or not: they put together what they have."""
        items, c = self.times * self.width, self.count
        return [
            *self._bounds(True),
            f"for ({c} first = begin; first < end; first += lanes * {self.times}u) {{",
            f"const {c} r = first + y;",
            f"Weight held[{items}];",
            *self._vectors(LoopSite({}), self.width),
            "for (unsigned n = 0; n < lanes / 32; n += tables) {",
            "if (warp >= n && warp < n + tables) {",
            "double* const mine = table + (warp - n) * bins;",
            "#pragma unroll",
            f"for (int h = 0; h < {items}; ++h) weigh_bin(mine, held[h], bins);",
            "}",
            "if (tables < lanes / 32) __syncthreads();",
            "}",
            "}",
        ]

    def _loop_results(self, lines: list[str]) -> list[str]:
        """The same for all results of a thread, each with its number e."""
        if self.held == 1:
            return [x.replace("[e]", "[0]").replace(" + e)", ")") for x in lines]
        return ["#pragma unroll", f"for (int e = 0; e < {self.held}; ++e) {{", *lines, "}"]

    def _loop_reduced(self, site: LoopSite, shared: bool, beyond: bool) -> list[str]:
        """The loop along the reduced axes, of results `beyond` the core perhaps."""
        width = self.width if self.rows else 1
        bounds = self._bounds(shared)
        others = ("part * lanes + y", "share * lanes") if shared else ("y", "lanes")
        if self.loose and self.rows:
            central = self._check_core(site, "k") if self.partly else ""
            return [
                *bounds, f"const {self.count} n = {self.number('n', self.reach)};",
                *([f"const bool central = {central};"] if central else []),
                *self._loop_unaligned(
                    "r", site, lambda tree, place, _: self._take_values(tree, place, "0"),
                    ("begin + y", "end", "lanes"), others,
                ),
            ]  # fmt: skip
        if self.loose:
            return [*bounds, *self._loop_columns(site, beyond, others)]
        if self.across >= 0:
            self.times = 4

            def use(place: LoopSite) -> list[str]:
                return self._take_values(self.tree, place, "u")

            tiles = f"const {self.count} tiles = steps;"
            return [tiles, *self._tile("r", "part", "share", use)]
        return [
            *bounds,
            f"for ({self.count} r = begin + y; r < end; r += lanes * {self.times}u) {{",
            *self._vectors(site, width),
            "}",
        ]

    def _bounds(self, shared: bool) -> list[str]:
        """What a block goes through along the reduced axes."""
        first = f"({self.count})part * long_" if shared else "0"
        end = "steps < begin + long_ ? steps : begin + long_" if shared else "steps"
        return [f"const {self.count} begin = {first};", f"const {self.count} end = {end};"]

    def _vectors(self, site: LoopSite, width: int) -> list[str]:
        """What a thread takes at a time of these, from `r` on."""
        coords, names = self._coordinates("r", self._lengths("r", width), "j", "r", width)
        place = LoopSite(
            site.coords | {("r", a): x for a, x in enumerate(names)},
            site.linear | {"r": f"j * {width}u"},
        )
        return self._passes(
            "j < end", "j = r + u * lanes", coords, place,
            lambda tree, u: self._take_values(tree, place, u),
        )  # fmt: skip

    def _loop_columns(self, site: LoopSite, beyond: bool, others: tuple[str, str]) -> list[str]:
        """The loop of threads that have neighbouring results, of unaligned inputs.

        Vectors of the core come together. Points beyond it along the reduced axes come alone, as
        do all points of a result beyond the core.
        """
        lengths = self._lengths("r", 1)

        def point(tree: NodeTree, names: Sequence[str], number: str) -> list[str]:
            coords = {("r", a): x for a, x in enumerate(names)}
            place = LoopSite(site.coords | coords, site.linear | {"r": number})
            return self._point(tree, place, self._take_values(tree, place, "0"))

        def steps(lines: list[str], start: str = "begin", end: str = "end") -> list[str]:
            head = f"for ({self.count} j = {start} + y; j < {end}; j += lanes) {{"
            return [head, *coords, *lines, "}"]

        coords, names = self._coordinates("r", lengths, "j", "r", 1, "whole")
        if beyond:
            inside, outside = self.partly.get("r", self.tree), self.tree
        else:
            inside, outside = self.bodies[-1], self.partly.get("k", self.tree)
        main = point(inside, names, "j")
        if not self.core_bounds("r"):
            return steps(main)
        slab = self._slabs("r", self._find_core_ends("r"))
        uses = point(outside, slab.names, slab.number)
        last = self._loop(others[0], slab.total, others[1], [*slab.found, *uses])
        if len(lengths) > 1:
            place = LoopSite({("r", a): x for a, x in enumerate(names)}, {"r": "j"})
            return [*last, *steps([f"if ({self._check_core(place, 'r')}) {{", *main, "}"])]
        ((k, low, length),) = self.core_bounds("r")
        below, above = (
            self.number(("core", n), value) for n, value in enumerate((low, low + length))
        )
        return [
            *last,
            f"const {self.count} from = begin > {below} ? begin : {below};",
            f"const {self.count} past = end < {above} ? end : {above};",
            *steps(main, "from", "past"),
        ]

    def _take_values(self, tree: NodeTree, site: LoopSite, which: str) -> list[str]:
        """Compute the values of a vector of points and put them into the accumulators."""
        width = self.width
        together = width if self.rows else 1
        declared, after, takes = [], [], []
        if any(op in ("argmin", "argmax") for op, _, _ in self.kinds):
            text = self._offset(self.position, site, wide=True)
            declared.append(f"const long long at = {text};")
        for j, ((op, short, _), root) in enumerate(zip(self.kinds, tree.roots, strict=True)):
            value = f"{tree.letter}{root}"
            extra = ""
            if op in ("argmin", "argmax"):
                step = self.fast_stride(self.position) if self.rows else 0
                name = "stride", self.position, self.along, len(self.axes[self.along]) - 1
                extra = ", at, " + (self._times("1", step, name, True) if step else "0")
            elif op == "moment" and self.across < 0 and not self.loose:
                # the vectors of a step are there in order
                extra = ", opens" if self.sliding else ", u == 0"
            kind = TYPES[short]
            if op == "histogram" and short == "c16":
                e = "e" if width > 1 else "0"
                after.append(f"held[u * {width} + {e}].hold({value}, bins);")
            elif op == "histogram":
                after.append(f"count_bin(table, {value}, bins, copies);")
            elif together > 1:
                declared.append(f"{kind} g{j}[{together}];")
                after.append(f"g{j}[e] = {value};")
                takes.append(f"part{j}[0].take(g{j}{extra});")
            else:
                target = "e" if self.held > 1 else "0"
                after.append(f"const {kind} g{j}[1] = {{{value}}};")
                after.append(f"part{j}[{target}].take(g{j}{extra});")
        return [*declared, *self._compute_elements(tree, site, which, after), *takes]

    def _merge_block(self) -> list[str]:
        """Put the parts of a block's threads together."""
        lines = []
        for j in range(len(self.kinds)):
            lines += self._loop_results([self._merge_threads(f"part{j}[e]", j)])
        return lines

    def _merge_threads(self, part: str, j: int) -> str:
        if self.wide:
            what, others = "block", "kept"
        elif self.rows:
            what, others = "lanes", "lanes"
        else:
            what, others = "lines", "lanes, side, kept"
        many = len(self.kinds) * (self.held + 1) > MOST_INLINED
        if many and part_size(*self.kinds[j]) >= LEAST_CALLED:
            return f"{part} = gathered_{what}({part}, {others});"
        return f"gather_{what}({part}, {others});"

    def _scratch(self, groups: int, share: int, side: int, name: str) -> list[str]:
        """Where the blocks that share results leave their parts."""
        many = -(-groups * share * side * self.held // 2) * 2  # parts may be 16 bytes long
        sizes = [part_size(op, short, gives) for op, short, gives in self.kinds]
        slot, counters = self.slots.at("scratch"), self.slots.at("counters")
        taken, counting = (at[1] if at else 0 for at in (self.scratch, self.counters))
        if share > 1:
            self.scratch = slot, taken + many * sum(sizes)
            self.counters = counters, counting + groups
        behind = [f" + {self.slot((what, name), n)}" if name else ""
                  for what, n in (("scratch", taken), ("counters", counting))]  # fmt: skip
        lines = [
            f"unsigned char* const scratch = (unsigned char*)S({slot}){behind[0]};",
            f"unsigned* const counters = (unsigned*)S({counters}){behind[1]};",
        ]
        before = 0
        room = self.slot(("room", name), many)
        for j, size in enumerate(sizes):
            lines.append(f'static_assert(sizeof(Part{j}) == {size}, "scratch");')
            lines.append(f"Part{j}* const left{j} = (Part{j}*)(scratch + {before} * {room});")
            before += size
        return lines

    def _merge_shares(self) -> list[str]:
        """Let the last block that shares results merge the parts of all blocks."""
        own = f"(((unsigned long long)w * side + x) * {self.held} + e)"
        theirs = f"((((unsigned long long)group * share + p) * side + x) * {self.held} + e)"
        if self.held == 1:
            own, theirs = own.replace(" + e)", ")"), theirs.replace(" + e)", ")")
        leave, take = [], []
        for j in range(len(self.kinds)):
            settle = [f"part{j}[e].settle();"] if self.kinds[j][0] == "moment" else []
            leave += self._loop_results([*settle, f"left{j}[{own}] = part{j}[e];"])
            # one of a thread's results after the other: all at once would take all its registers
            take += [
                "#pragma unroll 1",
                f"for (int e = 0; e < {self.held}; ++e) {{",
                f"Part{j} whole;",
                "whole.clear();",
                "if (live) for (unsigned p = y; p < share; p += lanes) {",
                f"whole.merge(from_memory(left{j} + {theirs}));",
                "}",
                self._merge_threads("whole", j),
                f"if (y == 0 && live) left{j}[{own}] = whole;",
                "}",
                *self._loop_results([f"if (y == 0 && live) part{j}[e] = left{j}[{own}];"]),
            ]
        return [
            "if (share > 1) {",
            "if (y == 0 && live) {",
            *leave,
            "__threadfence();",
            "}",
            *_choose_last_block("share", "continue", "group"),
            *take,
            "}",
        ]

    def _finish_results(self, site: LoopSite, number: str = "o") -> list[str]:
        """The outputs, of results that are complete; `number` says which result a point has, where
        they are in order."""
        tree = self.final
        held = self.held
        coords = dict(site.coords)
        linear = {"k": f"o * {held}u + e" if held > 1 else number} if number else {}
        if held > 1:
            last = len(self.axes["k"]) - 1
            coords["k", last] = f"{coords['k', last]} + e"
        place = LoopSite(coords, linear)
        declared = []
        for k in tree.inputs:
            clear = " = {}" if tree.guards[k] is not None else ""
            declared.append(f"{STORED[tree.nodes[k].code]} z{k}{clear};")
        body = [*declared]
        body += self._enclose(self._loads(tree, tree.inputs, place, "z#"), bool(tree.inputs))
        values = {k: f"z{k}" for k in tree.inputs}
        wanted = tree.below(tree.roots)
        body += self._statements(tree, wanted, place, values)
        offset = self._offset(self.out_layout, place)
        vector = held > 1 and self.fast_stride(self.out_layout) == 1
        before, after = [], []
        for n, (short, root) in enumerate(zip(self.outs, tree.roots, strict=True)):
            value = store_value(short, f"{tree.letter}{root}")
            if vector:
                kind = f"Vec<{STORED[short]}, {held}>"
                before.append(f"{kind} out{n};")
                body.append(f"out{n}.x[e] = {value};")
                start = self._offset(self.out_layout, site)
                after.append(f"*({kind}*)(q{n} + ({start})) = out{n};")
            else:
                body.append(f"q{n}[{offset}] = {value};")
        if held == 1:
            return body
        return [*before, "#pragma unroll", f"for (int e = 0; e < {held}; ++e) {{", *body, "}",
                *after]  # fmt: skip


def _choose_last_block(count: str, otherwise: str, group: str = "") -> list[str]:
    """The last of so many blocks goes on, behind what the others have left."""
    counter = f"counters + {group}" if group else "counters"
    return [
        "__syncthreads();",
        f"if (threadIdx.x == 0) last = atomicAdd({counter}, 1u) == {count} - 1;",
        "__syncthreads();",
        f"if (!last) {otherwise};",
        "__threadfence();",
        f"if (threadIdx.x == 0) counters[{group or 0}] = 0;",
    ]


def _divide_evenly(groups: int, slots: int) -> int:
    """Choose parts of each group: of `slots` at a time, the last are no small rest."""
    waste = {n: -groups * n % slots / (groups * n) for n in range(1, 5)}
    return min(waste, key=lambda n: (waste[n] > 0.05, waste[n] if waste[n] > 0.05 else n))
