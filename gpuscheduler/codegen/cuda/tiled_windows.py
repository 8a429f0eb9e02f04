"""Kernels that reduce windows in tiles, in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import tuning
from .accumulators import finish_results, take_values
from .body import Body, KernelLoops, declare_pointers
from .coordinates import LoopSite, magic_of
from .nodes import NodeTree, held_size, part_size
from .operations import TYPES, results
from .statements import enclose, unroll
from .window_reduction import share_windows
from .window_tiles import ColumnTile
from .work_division import limit_blocks


def write_loops(body: Body) -> KernelLoops:
    """Write the loop in which a block makes a tile of results in shared memory."""
    schedule, arguments, places = body.schedule, body.arguments, body.places
    pane, c, axes = schedule.pane, schedule.count, schedule.axes["k"]
    assert pane is not None
    lengths = [x.length for x in axes]
    lengths[-2] = -(-lengths[-2] // pane.rows)
    lengths[-1] = -(-lengths[-1] // pane.columns)
    many = math.prod(lengths)
    blocks = limit_blocks(schedule, many)
    coords, names = places.split("k", lengths, "w", "t", name="pane")
    threads, arrays, made = (
        reduce_columns(body, names) if isinstance(pane, ColumnTile) else fill_tile(body, names)
    )
    for j, (_, _, gives) in enumerate(schedule.kinds):
        size = pane.rows * pane.made_pitch
        arrays += [(f"made{j}_{r}", TYPES[g], size * held_size(g)) for r, g in enumerate(gives)]
    declared, room = [], 0
    for name, kind, nbytes in arrays:
        begin = arguments.slot(("room", name), room)
        declared.append(f"{kind}* const {name} = ({kind}*)(room + {begin});")
        room += -(-nbytes // 16) * 16
    rows, columns = (
        f"({schedule.index}){arguments.slot(('pane', n), n_)}"
        for n, n_ in (("rows", pane.rows), ("columns", pane.columns))
    )
    written = f"(unsigned){arguments.slot('results', pane.rows * pane.columns)}"
    lines = [
        f"const unsigned blocks = (unsigned){arguments.slot('blocks', blocks)};",
        f"const {c} panes = {arguments.number('panes', many)};",
        "if (blockIdx.x >= blocks) return;",
        f"__shared__ Vec<float, 4> whole[{-(-room // 4096) * 256}];",
        "unsigned char* const room = (unsigned char*)whole;",
        *declared,
        threads,
        *declare_pointers(body),
        f"for ({c} w = blockIdx.x; w < panes; w += blocks) {{",
        *coords,
        f"const {schedule.index} above = {names[-2]} * {rows};",
        f"const {schedule.index} first = {names[-1]} * {columns};",
        "{",
        *made,
        "}",
        "__syncthreads();",
        f"for ({c} p = threadIdx.x; p < {written}; p += {tuning.THREADS}u) {{",
        *split_number(body, "p", pane.columns, "results"),
        f"const int at = row * {made_pitch_text(body)} + column + column / {pane.some};",
        f"if ({check_tile(body, 'row', points=False)}) {{",
        *finish_results(body, site_in_tile(body, names, "row"), ""),
        "}",
        "}",
        "}",
    ]  # fmt: skip
    return KernelLoops(lines, blocks)


def site_in_tile(body: Body, names: Sequence[str], row: str) -> LoopSite:
    """Where a point or a result of a pane is, by its row and column."""
    schedule = body.schedule
    coords = {("k", x): name for x, name in enumerate(names)}
    coords["k", len(names) - 2] = f"(above + {row})"
    coords["k", len(names) - 1] = "(first + column)"
    return LoopSite(coords | {("r", x): "0" for x in range(len(schedule.axes["r"]))})


def check_tile(body: Body, row: str, points: bool) -> str:
    """The condition that a row and column of a tile has a result, or a point if `points`."""
    schedule, arguments = body.schedule, body.arguments
    assert schedule.pane is not None
    more = (schedule.pane.down - 1, schedule.pane.window - 1) if points else (0, 0)
    rows, columns = (
        f"({schedule.index}){arguments.slot(('end', n, points), axis.length + extra)}"
        for n, (axis, extra) in enumerate(zip(schedule.axes["k"][-2:], more, strict=True))
    )
    return f"above + {row} < {rows} && first + column < {columns}"


def split_number(body: Body, number: str, wide: int, what: str) -> list[str]:
    """Split a number in a tile into its row, `wide` columns long, and its column."""
    arguments = body.arguments
    wide_ = arguments.slot((what, "wide"), wide)
    magic = arguments.slot((what, "magic"), magic_of(wide))
    return [
        f"const int row = (int)divide((unsigned){number}, {magic});",
        f"const int column = (int){number} - row * (int){wide_};",
    ]


def pitch_text(body: Body) -> str:
    """The text of a tile's pitch."""
    schedule, arguments = body.schedule, body.arguments
    assert schedule.pane is not None
    return f"(int){arguments.slot('pitch', schedule.pane.pitch)}"


def made_pitch_text(body: Body) -> str:
    """The text of the pitch of a tile's results."""
    schedule, arguments = body.schedule, body.arguments
    assert schedule.pane is not None
    return f"(int){arguments.slot('made pitch', schedule.pane.made_pitch)}"


def choose_core(
    body: Body, names: Sequence[str], core: list[str], anywhere: list[str]
) -> list[str]:
    """What is done where all points of a pane lie in the core, and elsewhere."""
    schedule, arguments = body.schedule, body.arguments
    places = [*names[:-2], "above", "first"]
    bounds = []
    for n, (low, high, size) in schedule.within_panes.items():
        low_, high_ = (
            f"({schedule.index}){arguments.slot(('core', n, end), value)}"
            for end, value in enumerate((low, high - size))
        )
        bounds.append(f"{places[n]} >= {low_} && {places[n]} <= {high_}")
    return [f"if ({' && '.join(bounds)}) {{", *core, "} else {", *anywhere, "}"]


def leave_results(body: Body) -> list[str]:
    """Leave results in shared memory, the one before number `t` of which is `own`."""
    schedule = body.schedule
    return [
        f"made{j}_{r}[own + t] = {value};"
        for j, (op, short, gives) in enumerate(schedule.kinds)
        for r, value in enumerate(results(op, short, gives, f"part{j}[0]"))
    ]


def fill_tile(
    body: Body, names: Sequence[str]
) -> tuple[str, list[tuple[str, str, int]], list[str]]:
    """Compute each point of a tile once into shared memory; make a thread's results.

    Returns the name of a thread, the arrays in shared memory (name, type, bytes), and the
    statements.
    """
    schedule, arguments = body.schedule, body.arguments
    pane, c, tree, some = schedule.pane, schedule.count, schedule.tree, schedule.sliding
    assert pane is not None
    site = site_in_tile(body, names, "row")
    arrays: list[tuple[str, str, int]] = []
    takes: list[str] = []  # what takes in a value, of each reduction
    known: dict[int, str] = {}
    for j, (root, (op, short, _)) in enumerate(zip(tree.roots, schedule.kinds, strict=True)):
        if root not in known:
            known[root] = f"points{j}"
            nbytes = pane.rows_read * pane.pitch * held_size(short)
            arrays.append((known[root], TYPES[short], nbytes))
        takes.append(f"const {TYPES[short]} g{j}[1] = {{{known[root]}[at]}};")
        takes.append(f"part{j}[0].take(g{j}{', opens' if op == 'moment' else ''});")
    pitch, many = (
        pitch_text(body),
        f"(unsigned){arguments.slot('points', pane.rows_read * pane.wide)}",
    )
    found = [
        *split_number(body, "p", pane.wide, "points"),
        f"const int to = row * {pitch} + column + column / {some};",
    ]

    def fill_statements(tree: NodeTree, check: str) -> list[str]:
        """Compute what is reduced of each point of a pane, if it is one."""
        x = f"{body.register(tree)}#[u]"
        loads = enclose(body.loads(tree, tree.inputs, site, x))
        stores = [f"{known[root]}[to] = {tree.letter}{own};"
                  for root, own in zip(schedule.tree.roots, tree.roots, strict=True)]  # fmt: skip
        uses = body.compute_elements(tree, site, "u", list(dict.fromkeys(stores)))
        if check:
            loads, uses = ([f"if ({check}) {{", *lines, "}"] for lines in (loads, uses))
        each = f"p < {many}", f"p = i + u * {tuning.THREADS}u"
        return [
            f"for ({c} i = threadIdx.x; i < {many}; i += {tuning.THREADS * schedule.times}u) {{",
            *body.declare_registers(tree, schedule.times),
            *(body.loop_vectors(*each, [*found, *loads]) if loads else []),
            *body.loop_vectors(*each, [*found, *uses]),
            "}",
        ]

    fill = fill_statements(tree, check_tile(body, "row", points=True))
    if schedule.core is not None:
        fill = choose_core(body, names, fill_statements(schedule.core, ""), fill)
    step = [f"const int at = mine + (int)(s + s / {some}u);", *takes]
    if pane.down > 1:
        down, unrolled = f"(int){arguments.slot('down', pane.down)}", []
        if pane.down <= tuning.MOST_AT_ONCE:  # part of the text: its loads are under way at once
            down, unrolled = str(pane.down), ["#pragma unroll"]
        step = [*unrolled, f"for (int q = 0; q < {down}; ++q) {{",
                f"const int at = mine + q * {pitch} + (int)(s + s / {some}u);",
                *takes, "}"]  # fmt: skip
    across = f"(unsigned){arguments.slot('across', pane.columns // some)}"
    threads = f"const int x = threadIdx.x % {across}, y = threadIdx.x / {across};"
    return threads, arrays, [
        *fill,
        "__syncthreads();",
        f"const int mine = y * {pitch} + x * {some + 1};",
        f"const int own = y * {made_pitch_text(body)} + x * {some + 1};",
        *share_windows(body, pane.window, [], step, leave_results(body)),
    ]  # fmt: skip


def reduce_columns(
    body: Body, names: Sequence[str]
) -> tuple[str, list[tuple[str, str, int]], list[str]]:
    """Let each thread reduce its column into shared memory, then reduce along rows.

    Returns the same as `fill_tile`.
    """
    schedule, arguments = body.schedule, body.arguments
    box = schedule.pane
    assert isinstance(box, ColumnTile)
    size, arrays = box.rows * box.pitch, []
    for j, kind in enumerate(schedule.kinds):
        own = [(_array(j, x), "double", size * 8) for x in schedule.moment_members(j)]
        arrays += own or [(f"columns{j}", f"Part{j}", size * part_size(*kind))]
    fill = loop_tile_columns(body, schedule.tree, names, inside=True)
    if schedule.core is not None:
        fill = choose_core(
            body, names, loop_tile_columns(body, schedule.core, names, inside=False), fill
        )
    across = f"(unsigned){arguments.slot('across', box.wide)}"
    threads = (
        f"const int column = threadIdx.x % {across}, up = threadIdx.x / {across} * {box.tall};"
    )
    return threads, arrays, [*fill, "__syncthreads();", *reduce_rows(body)]


def loop_tile_columns(body: Body, tree: NodeTree, names: Sequence[str], inside: bool) -> list[str]:
    """Reduce what lies in a thread's column of a tile.

    Whether there is such a point is asked of each if need be (`inside`).
    """
    schedule, arguments, places = body.schedule, body.arguments, body.places
    box, c, others = schedule.pane, schedule.count, schedule.axes["r"]
    assert isinstance(box, ColumnTile)
    direct = box.down <= tuning.MOST_AT_ONCE
    row = "up + u" if direct else "up + (int)s"
    site = site_in_tile(body, names, row)
    check = check_tile(body, row, points=True) if inside else ""

    def guard_statements(lines: list[str]) -> list[str]:
        return [f"if ({check}) {{", *lines, "}"] if check and lines else lines

    across, inner = places.split("r", [x.length for x in others], "q", "r")
    site.coords |= {("r", x): name for x, name in enumerate(inner)}
    over, end = [], []
    if others:  # all that lies across belongs to a step
        many = arguments.number("deep", math.prod(x.length for x in others))
        over, end = [f"for ({c} q = 0; q < {many}; ++q) {{", *across], ["}"]
    place = f"(up + t) * {pitch_text(body)} + column + column / {box.some}"
    leave = []
    for j in range(len(schedule.kinds)):
        own = [f"{_array(j, x)}[{place}] = part{j}[0].{x};" for x in schedule.moment_members(j)]
        leave += own or [f"columns{j}[{place}] = part{j}[0];"]
    if not direct:
        loads, takes = [], []
        if others:
            point = guard_statements(body.point(tree, site, take_values(body, tree, site, "0")))
            takes = [*over, *point, *end]
        else:
            x = f"{body.register(tree)}#[u]"
            loads = enclose(guard_statements(body.loads(tree, body.loop_inputs(tree), site, x)))
            takes = guard_statements(take_values(body, tree, site, "u"))
        return share_windows(body, box.down, loads, takes, leave, box.tall, tree, "down")
    many_steps = box.tall + box.down - 1
    each = f"int u = 0; u < {many_steps}; ++u"
    loads = guard_statements(
        body.loads(tree, body.loop_inputs(tree), site, f"{body.register(tree)}#[u]")
    )
    into = [f"Part{j} (&part{j})[1] = steps{j}[u];" for j in range(len(schedule.kinds))]
    opens = ["const bool opens = true;"] if schedule.has_moments() else []
    return [
        *[f"Part{j} steps{j}[{many_steps}][1];" for j in range(len(schedule.kinds))],
        *unroll(each, [f"steps{j}[u][0].clear();" for j in range(len(schedule.kinds))]),
        *over,
        *body.declare_registers(tree, many_steps),
        *(unroll(each, enclose(loads)) if loads else []),
        *unroll(each, [*opens, *into, *guard_statements(take_values(body, tree, site, "u"))]),
        *end,
        *merge_steps(body, box.tall, box.down, leave),
    ]


def merge_steps(body: Body, many: int, reach: int, leave: list[str]) -> list[str]:
    """Put together so many windows of steps that a thread has at hand."""
    schedule = body.schedule
    own, bases, joins = [], [], []
    for j, (op, _, _) in enumerate(schedule.kinds):
        own.append(f"Part{j} part{j}[1] = {{steps{j}[t][0]}};")
        bases += [f"to_one_base(steps{j});"] if op == "moment" else []
        join = "add" if op == "moment" else "merge"
        joins.append(f"part{j}[0].{join}(steps{j}[t + u][0]);")
    joined = unroll(f"int u = 1; u < {reach}; ++u", joins)
    return [*bases, *unroll(f"int t = 0; t < {many}; ++t", [*own, *joined, *leave])]


def reduce_rows(body: Body) -> list[str]:
    """Put together along rows what lies in columns."""
    schedule, arguments = body.schedule, body.arguments
    box, c = schedule.pane, schedule.count
    assert isinstance(box, ColumnTile)
    some, each = box.some, box.columns // box.some
    points = box.down * math.prod(x.length for x in schedule.axes["r"])
    held = f"{arguments.slot('points', points)}" if schedule.has_moments() else ""

    def read_column(j: int, to: str, at: str) -> list[str]:
        """What lies in a column."""
        own = [f"{to}.{x} = {_array(j, x)}[{at}];" for x in schedule.moment_members(j)]
        return [*own, f"{to}.of({held});"] if own else [f"{to} = columns{j}[{at}];"]

    if box.window > tuning.MOST_AT_ONCE:
        takes = [f"const int at = mine + (int)(s + s / {some}u);"]
        for j, (op, _, _) in enumerate(schedule.kinds):
            join = f"join(step{j}, opens)" if op == "moment" else f"merge(step{j})"
            takes += [
                f"Part{j} step{j};",
                *read_column(j, f"step{j}", "at"),
                f"part{j}[0].{join};",
            ]
        rows = share_windows(body, box.window, [], takes, leave_results(body))
    else:
        many, steps = some + box.window - 1, []
        for j in range(len(schedule.kinds)):
            steps += read_column(j, f"steps{j}[u][0]", f"mine + u + u / {some}")
        rows = [
            *[f"Part{j} steps{j}[{many}][1];" for j in range(len(schedule.kinds))],
            *unroll(f"int u = 0; u < {many}; ++u", steps),
            *merge_steps(body, some, box.window, leave_results(body)),
        ]
    units = f"(unsigned){arguments.slot('units', box.rows * each)}"
    return [
        f"for ({c} p = threadIdx.x; p < {units}; p += {tuning.THREADS}u) {{",
        *split_number(body, "p", each, "units"),
        f"const int mine = row * {pitch_text(body)} + column * {some + 1};",
        f"const int own = row * {made_pitch_text(body)} + column * {some + 1};",
        *rows,
        "}",
    ]


def _array(j: int, member: str) -> str:
    """What the array is called that has a member of the moments of columns."""
    return f"columns{j}_{member.replace('.', '_')}"
