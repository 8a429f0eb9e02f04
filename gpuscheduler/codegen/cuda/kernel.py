"""Generate a kernel's CUDA source and its arguments.

The text depends on the structure of a kernel only: its operations and types, which leaves are
equal, how many loops are left when axes are merged, and along which loops a leaf's stride is 0
or 1. Shapes, strides, constants and the keys of random numbers are arguments: 64-bit words in
slots. So one compilation serves all blocks of an array, and one launch may carry several.

Each launch reads and writes memory once. `loop_order` decides the schedule, and `body` writes the
statements at a point, from the numbered nodes of `nodes`. `TEMPLATES` chooses the function that
writes the loops, by the schedule:

- element-wise (`elementwise`): threads go along the innermost axis, some elements each. Where an
  input is transposed, tiles are turned in shared memory (`tiles`).
- reductions along the fastest axis (`reduction`): lanes of a warp, or whole blocks, go along it.
- other reductions (`reduction`): threads lie along the fastest kept axis and go along the reduced
  axes.
- windows that slide along another axis (`window_reduction`): each thread makes several results,
  which share most reads.
- windows that slide along the fastest axis (`tiled_windows`): a block loads the points into shared
  memory. Where windows slide down columns as well, it loads the reduced columns.
- scans (`scan`): lanes of a warp go along a line and merge. Where neighbouring lines are
  contiguous, each thread goes along a line of its own.
- histograms (`histogram`): each block counts, or adds up weights, in shared memory.
- selections (`selection`): one kernel counts the elements that a mask selects, another writes them.

Where there are few results, several blocks share one. Each leaves its part in scratch memory,
and the last block to finish merges the parts in order. The same bits come out on every run.

A view below a `where` may reach outside its array only where the condition is made of indices
and constants. It is then loaded if the condition selects it. A condition on values guards
nothing.

Where such conditions are known for most points at once (the core: a block between the edges of
its neighbours), these points have a body of their own. The others come first, most of them with
a body that knows their place along some axes. Threads of their own make results beyond the core.
Vectors are also written of unaligned inputs (edges, shifts, odd rows): each of their elements is
then read once, alone or with aligned neighbours.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import NotGenerated
from ...ir.expr import LEAVES, RANDOM, SCANS, Expr, Kernel, constant, nodes, substitute
from . import (
    elementwise,
    histogram,
    reduction,
    scan,
    selection,
    tiled_windows,
    tiles,
    tuning,
    window_reduction,
)
from .arguments import Arguments
from .body import Body, KernelLoops
from .call_cost import mark_called_functions
from .device_library import pieces
from .kernel_values import too_many
from .loop_order import make_schedule
from .nodes import DeviceCall, code_of
from .operations import NOT_A_NUMBER, STORED, TYPES, accumulator, code, load_value, operation
from .schedule import Schedule

#: Most bytes of a kernel's arguments.
MOST_BYTES = 4000
#: Most items of a launch.
MOST_ITEMS = 32
#: The compiler's option, by whether a kernel takes a single item.
ONLY = {True: "-DONLY_ONE", False: "-DONLY_MANY"}
#: Operations that `_operation` writes for any types.
ANY_TYPE = frozenset(
    {"cast", "where", "taken", "real", "imag", "complex", "call", "bin", *LEAVES, *RANDOM}
)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel's CUDA source, and how it is launched.

    A launch has `blocks` x items blocks of `threads`. Its one argument is the slots of all
    items, one after the other. The entry `name` takes up to `most` items (its argument has that
    size for any number of them), `name + "_one"` takes one item. The source has both entries,
    unless `ONLY` selects one: each takes as long to compile as the other.
    """

    source: str
    #: The entry that takes several items.
    name: str
    #: Arguments of one item, uint64; its pointers are still to be filled in.
    slots: np.ndarray[Any, Any]
    #: Of each input: slot, array number, bytes to add to its pointer.
    inputs: tuple[tuple[int, int, int], ...]
    #: Slot of each output's pointer.
    outputs: tuple[int, ...]
    #: Slot and bytes of the item's own scratch memory.
    scratch: tuple[int, int] | None
    #: Slot and number of uint32 counters, which are zero before and after a launch.
    counters: tuple[int, int] | None
    #: Blocks of each item.
    blocks: int
    #: Threads of a block.
    threads: int
    #: Most items of a launch.
    most: int
    #: Functions that the source calls and does not define.
    calls: tuple[DeviceCall, ...] = ()
    #: Parts of a mask whose selected points warps count.
    units: int = 0


def generate(
    kernel: Kernel, aligned: bool = True, processors: int = 132, writes: bool | None = None
) -> KernelSource:
    """Generate the CUDA source of a kernel, for a device with so many processors.

    `aligned` says that every array begins at a multiple of 16 bytes, `writes` that the outputs
    do.

    >>> from gpuscheduler.ir.expr import constant, source
    >>> def add(x, y):
    ...     return Expr("add", (x, y), "f4")
    >>> small, large = (generate(Kernel((n,), (add(source(0, (n,), "f4"), constant(k, "f4")),)))
    ...                 for n, k in ((8, 1), (2**20, 2.5)))
    >>> small.source == large.source, small.blocks, large.blocks
    (True, 1, 256)
    """
    writes = aligned if writes is None else writes
    return write_kernel(make_schedule(_derive_sums(kernel), aligned, processors, writes))


def _derive_sums(kernel: Kernel) -> Kernel:
    """Replace sums of float32 by the means of the same values, which are float64.

    A mean and a variance are often wanted together.
    """
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    every = kernel.reductions
    moments = {r.arg: j for j, r in enumerate(every) if r.op == "moment"}
    gone: dict[int, int] = {}  # sums, and the moments that know them
    for j, r in enumerate(every):
        if r.op == "sum" and (r.arg.dtype, *r.dtypes) == (single, single):
            found = moments.get(r.arg, moments.get(Expr("cast", (r.arg,), double)))
            if found is not None:
                gone[j] = found
    count = math.prod(kernel.shape[k] for k in kernel.axes)
    if not gone or not count:  # nothing has no mean, and its sum is zero
        return kernel
    left = [j for j in range(len(every)) if j not in gone]
    number = {j: n for n, j in enumerate(left)}
    new: dict[int, Expr] = {}
    for node in nodes(kernel.outputs):
        if node.op != "reduced":
            continue
        j, which = node.data
        if j in gone:
            mean = Expr("reduced", (), double, (number[gone[j]], 0))
            value = Expr("multiply", (mean, constant(float(count), double)), double)
        else:
            wide = j in gone.values() and which == 0
            value = Expr("reduced", (), double if wide else node.dtype, (number[j], which))
        same = value.dtype == node.dtype
        new[id(node)] = value if same else Expr("cast", (value,), node.dtype)
    means = {j: (double, every[j].dtypes[1]) for j in gone.values()}
    reductions = tuple([replace(every[j], dtypes=means.get(j, every[j].dtypes)) for j in left])
    outputs = tuple(substitute(kernel.outputs, new))
    return replace(kernel, outputs=outputs, reductions=reductions)


def why_not_generated(kernel: Kernel) -> str | None:
    """Why there is no CUDA for a kernel: the operation and its types, or None.

    >>> from gpuscheduler.ir.expr import constant
    >>> why_not_generated(Kernel((), (Expr("nextafter", (constant(1, "f2"),) * 2, "f2"),)))
    'nextafter of float16, float16'
    """
    try:
        for node in nodes(kernel.roots):
            types, gives = [code_of(a) for a in node.args], code_of(node)
            if node.op in ANY_TYPE:
                continue
            if operation(node.op, types, gives, ["x"] * len(types)) is None:
                return f"{node.op} of {', '.join(a.dtype.name for a in node.args)}"
    except NotGenerated as error:
        return str(error)
    if kernel.is_histogram:
        return too_many(kernel)
    for r in kernel.reductions:
        made = code(np.dtype(r.dtypes[0]))
        if made is None or accumulator(SCANS.get(r.op, r.op), code_of(r.arg), made, "Part") is None:
            return f"{r.op} of {r.arg.dtype}"
    return None


#: Templates, each with the condition on a schedule: a kernel has the first that fits.
TEMPLATES: tuple[tuple[Callable[[Schedule], Any], Callable[[Body], KernelLoops]], ...] = (
    (lambda s: s.kernel.is_weighted_histogram, histogram.write_weighted_loops),
    (lambda s: s.kernel.is_histogram, histogram.write_loops),
    (lambda s: s.scanning, scan.write_loops),
    (lambda s: s.pane is not None, tiled_windows.write_loops),
    (lambda s: s.sliding, window_reduction.write_loops),
    (lambda s: s.reducing, reduction.write_loops),
    (lambda s: s.kernel.picks, selection.write_loops),
    (lambda s: s.across >= 0, tiles.write_loops),
    (lambda s: s.loose, elementwise.write_unaligned_loops),
    (lambda s: True, elementwise.write_loops),
)


def write_kernel(schedule: Schedule) -> KernelSource:
    """Write a kernel's text as its schedule says, by its template."""
    arguments = Arguments(schedule)
    body = Body(schedule, arguments)
    body.nodes.check()
    loops = next(write for fits, write in TEMPLATES if fits(schedule))(body)
    count = len(arguments.slots.words)
    if count * 8 > MOST_BYTES:
        raise NotGenerated(f"a kernel of {count} arguments")
    most = max(1, min(MOST_ITEMS, MOST_BYTES // (8 * count)))
    text = _make_text(schedule, arguments, _indent(loops.lines), count, most)
    name = f"{_name(schedule)}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    outputs = tuple(arguments.slots.slot_of(("output", n)) for n in range(len(schedule.outs)))
    scratch, counters = (
        (arguments.slots.slot_of(what), room) if room else None
        for what, room in (("scratch", loops.scratch), ("counters", loops.counters))
    )
    slots = np.array(arguments.slots.words, np.uint64)
    inputs = tuple((slot, *what) for slot, what in arguments.pointers.items())
    return KernelSource(
        text.replace("NAME", name), name, slots, inputs, outputs, scratch, counters, loops.blocks,
        tuning.THREADS, most, tuple(arguments.calls.values()), loops.units,
    )  # fmt: skip


def _name(schedule: Schedule) -> str:
    """Words that tell a person what this is."""
    trees = (schedule.tree, schedule.final) if schedule.reducing else (schedule.tree,)
    every = [n for tree in trees for n in tree.nodes]
    quiet = {"input", "index", "constant", "cast", "reduced", "real", "imag", "complex"}
    words = [n.data[0].name if n.op == "call" else n.op for n in every if n.op not in quiet]
    words = [re.sub(r"\W", "", w) for w in words]
    words = [*list(dict.fromkeys(words))[:4], *[r.op for r in schedule.kernel.reductions][:2]]
    if schedule.kernel.picks:
        words.append("picked" if len(schedule.outs) > 1 else "counted")
    return "_".join(["fused", *words])[:60]


def _make_text(schedule: Schedule, arguments: Arguments, body: str, slots: int, most: int) -> str:
    """The whole text: the pieces of the library that it needs, declarations, and two entries."""
    parts = "\n".join([*arguments.structs, *map(_declare_call, arguments.calls.values())])
    largest = ""
    if schedule.reducing and not schedule.kernel.is_histogram:
        names = [f"Part{j}" for j in range(len(schedule.kinds))]
        members = " ".join(f"{n} {n.lower()};" for n in names)
        largest = f"union alignas(16) Largest {{ {members} }};"
    bounds = tuning.THREADS if schedule.at_once == 1 else f"{tuning.THREADS}, {schedule.at_once}"
    body, functions = mark_called_functions(body, schedule.width * schedule.times)
    return f"""{pieces(parts + functions + body)}
{parts}
{functions}
{largest}
template<int N> struct Items {{ unsigned long long s[N][{slots}]; }};
#define S(k) items.s[item][k]
template<class A> __device__ __forceinline__ void work(const A& items, unsigned item) {{
{body}
}}
#ifndef ONLY_ONE
extern "C" __global__ void __launch_bounds__({bounds})
NAME(const __grid_constant__ Items<{most}> items) {{ work(items, blockIdx.y); }}
#endif
#ifndef ONLY_MANY
extern "C" __global__ void __launch_bounds__({bounds})
NAME_one(const __grid_constant__ Items<1> items) {{ work(items, 0); }}
#endif
"""


def _declare_call(call: DeviceCall) -> str:
    """What is linked, and a function that calls it: its result is no number where it raised."""
    kind, symbol = TYPES[call.gives], call.symbol
    takes, given, passed = [], [], []
    for n, short in enumerate(call.args):
        given.append(f"{TYPES[short]} x{n}")
        if short[0] == "c":
            takes += [TYPES["f4" if short == "c8" else "f8"]] * 2
            passed += [f"x{n}.x", f"x{n}.y"]
        else:
            takes.append(STORED[short])
            passed.append(f"x{n}")
    stored_as = STORED[call.gives]
    return f"""
extern "C" __device__ int {symbol}({", ".join([f"{stored_as}*", *takes])});
__device__ __forceinline__ {kind} of_{symbol}({", ".join(given)}) {{
  {stored_as} y = {{}};
  if ({symbol}({", ".join(["&y", *passed])})) return {NOT_A_NUMBER[call.gives]};
  return {load_value(call.gives, "y")};
}}""".strip("\n")


def _indent(lines: Iterable[str]) -> str:
    out, depth = [], 1
    for line in lines:
        depth -= line.startswith("}")
        out.append("  " * depth + line)
        depth += line.endswith("{")
    return "\n".join(out)
