"""Vectorization: how many neighbouring elements a thread takes at a time."""

from __future__ import annotations

from ...ir import limits
from ...ir.expr import RANDOM
from .call_cost import MOST_INSTRUCTIONS, length_of
from .loop_space import LoopSpace
from .nodes import MOST_STATEMENTS, NodeTree, cost_of, size_of
from .operations import operation

#: Columns from which on a thread may have four of them with all that a mean and a variance need.
#: With fewer columns too few threads have work. Measured.
MANY_COLUMNS = 2**15
#: Most cost of the elements that a thread takes side by side. All of it is compiled once for each
#: element: thirty functions of complex numbers eight times took 41 s, once 1.6 s. Where there is so
#: much to compute, the width of loads does not matter.
MOST_COST = 1024
#: Cost of a point from which on a kernel computes for longer than it reads and writes.
HEAVY = 128
#: Bytes of a thread's inputs beyond which 255 registers do not hold them all.
LATE_BYTES = 1000
#: Bytes of a thread's inputs that a quarter of the registers holds.
FEW_BYTES = 128
#: Most cost of an element of a vector that is read one by one: its code is there twice.
LOOSE_COST = 256
#: Least length of rows whose vectors are read one by one.
LOOSE_LEAST = 64
#: Places in each array that a reduction reads at each point, from which on it reads them one by
#: one, but each once.
OFTEN = 5
#: Points from which on a reduction takes those beyond the core by themselves.
MANY_STEPS = 2**14


def choose_vector_width(space: LoopSpace) -> None:
    """Choose the elements of a vector, and the vectors of a thread at a time.

    Sets `width`, `times`, `at_once`, `deeper`, `heavy`, `late` and `loose` of the space, and the
    bodies for points beyond the core.
    """
    tree = space.tree
    every = [(body, k) for body in space.bodies for k in body.inputs]
    axes = space.axes[space.along]
    length = axes[-1].length if axes else 1
    outs = (space.scanning or not space.reducing) and not space.kernel.picks
    sizes = [size_of(c) for c in space.outs] if outs else []
    if space.reducing and not space.rows and space.fast_stride(space.out_layout) == 1:
        sizes += [max(size_of(c), 4) for c in space.outs]
    plain = space.across < 0 and space.aligned
    if space.kernel.strides is not None:
        plain = plain and space.fast_stride(space.out_layout) == 1
    for body, k in every:
        step = space.fast_stride(space.layout_of[body.letter, k])
        if step == 1:
            sizes.append(size_of(body.nodes[k].code))
        plain = plain and step in (0, 1) and not space.varies(body, body.guards[k])
    plain = plain and not any(space.fast_stride(n) for n in space.axis_layout.values())
    draws = [n for n in tree.nodes if n.op in RANDOM]
    if not sizes or (draws and not tree.inputs and space.reducing):
        sizes = [4 if any(n.code == "f4" for n in draws) else 8]
    width = max(1, min(8, 16 // min(sizes))) if plain else 1
    while width > 1 and not (length % width == 0 and are_aligned(space, width)):
        width //= 2
    most = tree if space.core is None else space.core  # where most points are
    cost, long = sum(cost_of(n) for n in most.nodes), count_instructions(most)
    while width > 2 and width * len(tree.nodes) > MOST_STATEMENTS // 8:
        width //= 2
    while not tree.calls and width > 1 and width * cost > MOST_COST:
        width //= 2
    while width > 1 and width * long > MOST_INSTRUCTIONS:
        width //= 2  # sooner than that long functions are called
    if tree.calls:  # each is there as often as a thread has elements, to be compiled anew
        again = any(tree.nodes[k].data[0].repeats for k in tree.calls)
        width = 1 if again else min(width, 4)  # loops do not run side by side
    columns = space.reducing and not space.rows and space.across < 0
    if columns and space.scanning and space.points // width < MANY_COLUMNS:
        width = 1  # or too few threads have a column
    columns = columns and not space.scanning
    moments = columns and any(r.op == "moment" for r in space.kernel.reductions)
    many = moments and width >= 4 and space.points >= MANY_COLUMNS and cost < 16
    if moments:  # each column keeps much in registers
        width = min(width, 4 if many else 2)
    space.width = width
    # three blocks at least on each multiprocessor, or too few loads are under way
    space.at_once = 2 if many else 3 if columns else 1
    each = sum(
        size_of(most.nodes[k].code)
        * (width if space.fast_stride(space.layout_of[most.letter, k]) else 1)
        for k in most.inputs
    )
    deep = columns or (space.scanning and width == 1)
    times = 8 if many or (deep and each <= 8) else 4
    while times > 1 and (times * each > (128 if many else 64) or times * width * cost > 512):
        times //= 2
    while times > 1 and times * width * long > MOST_INSTRUCTIONS:
        times //= 2
    space.times = times if tree.inputs else 1
    #: Whether a block along a row that does four things at a time may do eight.
    space.deeper = each <= 16 and 8 * width * cost <= MOST_COST and space.across < 0
    space.deeper = space.deeper and 8 * width * long <= MOST_INSTRUCTIONS
    #: Whether it computes for longer than it reads and writes.
    space.heavy = cost >= HEAVY and not tree.calls
    #: Whether inputs are loaded where they are used, and not all of them before.
    space.late = each > LATE_BYTES and space.core is None and space.across < 0
    space.late = space.late and not (columns or space.scanning)
    space.late = space.late and all(tree.guards[k] is None for k in tree.inputs)
    if space.late:
        space.width = space.times = 1
    #: Whether vectors are written of what is read one by one.
    space.loose = space.width == 1 and not space.late and can_read_unaligned(space, cost)
    if space.loose:
        space.width, space.times = unaligned_width(space), 1
        each *= space.width
        space.at_once = min(space.at_once, 2) if each <= 2 * FEW_BYTES else 1
        room = each <= FEW_BYTES < 4 * len(tree.inputs) and space.core is not None
        if room and not columns and space.points > 1:
            space.at_once = 4  # registers are for the core: what is beyond it may spill
        split_boundary(space)
    else:
        space.partly = {}


def count_instructions(tree: NodeTree) -> int:
    """Count the instructions of a point's long functions."""
    total = 0
    for node in tree.nodes:
        if node.args and cost_of(node) > 1 and node.op != "call":
            types = [tree.nodes[a].code for a in node.args]
            text = operation(node.op, types, node.code, ["x"] * len(types))
            total += length_of(text or "")
    return total


def can_read_unaligned(space: LoopSpace, cost: int) -> bool:
    """Whether threads write vectors of inputs that do not begin at multiples of a vector.

    Edges and shifts are such inputs. Threads then read each of their elements once, one by one.
    """
    if space.across >= 0 or cost > LOOSE_COST or space.scanning:
        return False
    if space.kernel.counts or space.kernel.picks:
        return False
    if space.sliding:
        return False
    main, axes = space.bodies[-1], space.axes[space.along]
    if any(n.op in (*RANDOM, "taken", "call") for tree in space.bodies for n in tree.nodes):
        return False
    if not main.inputs or not axes or axes[-1].length < LOOSE_LEAST:
        return False
    sizes = [size_of(c) for c in space.outs]
    if space.reducing:
        often = len(main.inputs) >= OFTEN * len({main.nodes[k].data[0] for k in main.inputs})
        fits = (often or space.core is not None) and space.points * space.reach > MANY_STEPS
        fits = fits and (space.rows or space.writes) and can_leave_core(space)
    elif space.out_layout >= 0:
        fits = are_rows_aligned(space, unaligned_width(space))
    else:
        fits = not any(n * space.points <= limits.CLOSE and n * space.points % 16 for n in sizes)
    if not fits or not (space.reducing or (space.writes and max(sizes) <= 8)):
        return False
    return all(
        abs(space.fast_stride(space.layout_of[main.letter, k])) <= 1 and main.guards[k] is None
        for k in main.inputs
    )


def can_leave_core(space: LoopSpace) -> bool:
    """Whether a reduction may leave the core along some axes, while vectors stay in it.

    Vectors lie in the core along the other axes. The bodies for this become `partly` of the
    space.
    """
    along, across = ("r", "k") if space.rows else ("k", "r")  # vectors lie along the first
    for group in (along, across) if space.core_bounds(across) else ():
        if group != along and not space.core_bounds(along):
            continue  # no point of these lies beyond the core along the others
        tree = space.simplify_within(space.core_bounds(group), {"k": "a", "r": "b"}[group])
        space.partly[group] = tree
        if group == along and not can_read_vectors(space, tree):
            return False
    return True


def can_read_vectors(space: LoopSpace, tree: NodeTree) -> bool:
    """Whether a tree's inputs can be read for all points of a vector at once."""
    return all(
        abs(space.fast_stride(space.layout_of[tree.letter, k])) <= 1
        and not space.varies(tree, tree.guards[k])
        for k in tree.inputs
    )


def split_boundary(space: LoopSpace) -> None:
    """Choose bodies for points beyond the core, where vectors lie in rows.

    Such points are of three kinds: points in the core along the last axis, which come as
    vectors; points in the core along all other axes; and the few that are left.
    """
    down = space.reducing and not space.rows
    if space.core is None or space.partly or down or not lie_in_rows(space):
        return
    within, last = space.core_bounds(space.along), core_axis_of_vectors(space)
    fast, others = [x for x in within if x[0] == last], [x for x in within if x[0] != last]
    tree = space.simplify_within(fast, "a") if fast else space.tree
    if not others or not can_read_vectors(space, tree):
        return
    space.apart = {"last": tree}
    if fast or space.axes[space.along][-1].length % space.width:
        space.apart["others"] = space.simplify_within(others, "b")


def core_axis_of_vectors(space: LoopSpace) -> int:
    """The kernel's axis that vectors lie along, if the core ends along it; or -1."""
    return next((k for k, n in space.axis_layout.items() if space.fast_stride(n)), -1)


def begin_with_rows(space: LoopSpace) -> bool:
    """Whether unaligned vectors begin with each row of the output."""
    return space.along == "k" and space.out_layout >= 0 and not space.reducing


def lie_in_rows(space: LoopSpace) -> bool:
    """Whether each unaligned vector lies in one row. The last one of a row may be shorter."""
    return begin_with_rows(space) or space.axes[space.along][-1].length % space.width == 0


def unaligned_width(space: LoopSpace) -> int:
    """The width of vectors whose elements are read one by one."""
    main, columns = space.bodies[-1], space.reducing and not space.rows
    sizes = [size_of(main.nodes[k].code) for k in main.inputs]
    sizes += [size_of(c) for c in space.outs if columns or not space.reducing]
    width = max(2, min(4, 16 // max(sizes)))
    if columns:  # each thread has the results of a vector
        if any(r.op == "moment" for r in space.kernel.reductions):
            width = min(width, 2)
        length = space.axes["k"][-1].length
        even = max(sizes) <= 8 and space.fast_stride(space.out_layout) == 1
        while width > 1 and not (even and length % width == 0 and are_rows_aligned(space, width)):
            width //= 2
    return width


def are_aligned(space: LoopSpace, width: int) -> bool:
    """Whether vectors of this width begin at multiples of a load in all arrays."""
    every = [(body, k) for body in space.bodies for k in body.inputs]
    even = all(
        space.fast_stride(space.layout_of[tree.letter, k]) != 1
        or is_input_aligned(space, tree, k, width)
        for tree, k in every
    )
    return even and (space.kernel.strides is None or are_rows_aligned(space, width))


def is_input_aligned(space: LoopSpace, tree: NodeTree, k: int, width: int) -> bool:
    """Whether vectors of this width begin at multiples of a load in an input.

    The input's elements are contiguous along the fastest axis, and vectors begin at multiples of
    their width along it.
    """
    layout, node = space.layout_of[tree.letter, k], tree.nodes[k]
    size = size_of(node.code)
    others = space.strides(layout, "k") + space.strides(layout, "r")
    others.remove(1)
    steps = (*others, node.data[1].offset)
    return not any(s * size % min(16, width * size) for s in steps)


def begins_aligned(space: LoopSpace, tree: NodeTree, k: int) -> bool:
    """Whether unaligned vectors are aligned in this one input."""
    if not space.aligned or space.fast_stride(space.layout_of[tree.letter, k]) != 1:
        return False
    axes = space.axes[space.along]
    rows = len(axes) == 1 or lie_in_rows(space)
    return rows and is_input_aligned(space, tree, k, space.width)


def are_rows_aligned(space: LoopSpace, width: int) -> bool:
    """Whether each row of the outputs begins at a multiple of a vector."""
    others = space.strides(space.out_layout, "k") + space.strides(space.out_layout, "r")
    if space.fast_stride(space.out_layout) != 1:
        return False
    others.remove(1)
    sizes = [size_of(c) for c in space.outs]
    return not any(s * n % min(16, width * n) for n in sizes for s in others)
