"""Whether a traced task may become a kernel, and whether that pays."""

from __future__ import annotations

import math

from ..codegen.cpu import llvm_reduce, node_calls, tuning
from ..codegen.cuda.kernel import generate
from ..errors import NotGenerated
from ..ir.expr import Kernel, Program, nodes
from ..ir.regions import count_boxes, interior

#: Bytes from which on an array is large.
LARGE = 2**20
#: A program with this many conditions on a point's position may be slower than Dask's own way.
CHOICES = 3
#: It is slower where the boxes in which all conditions are known have fewer points on average.
BOX_POINTS = 2**15
#: A kernel that reads fewer places than this can always be written for a GPU.
MANY_PLACES = 100


def is_mosaic(kernel: Kernel) -> bool:
    """Whether a kernel chooses by position among many parts, in boxes of few points each.

    Arrays put side by side do so, and edges that are treated differently from the interior.
    """
    chosen = {n.args[0] for n in nodes(kernel.roots) if n.op == "where"}
    by_position = [c for c in chosen if all(n.op != "input" for n in nodes((c,)))]
    if len(by_position) < CHOICES:
        return False
    inner = [r.arg for r in kernel.reductions]
    return any(
        math.prod(shape) < BOX_POINTS * count_boxes(roots, shape)
        and interior(roots, shape) is not None
        for roots, shape in ((inner, kernel.shape), (kernel.outputs, kernel.output_shape))
        if roots
    )


def has_windows_over_edges(kernel: Kernel) -> bool:
    """Whether a kernel chooses by position what it reduces, differently for each result.

    Then there are no boxes in which all choices are known, and NumPy joins arrays in less time.
    """
    inner = nodes([r.arg for r in kernel.reductions])
    places = [n for n in nodes([n.args[0] for n in inner if n.op == "where"]) if n.op == "index"]
    return any(
        any(s for k, s in enumerate(n.data.strides) if k in kernel.axes and kernel.shape[k] > 1)
        and any(s for k, s in enumerate(n.data.strides) if k not in kernel.axes)
        for n in places
    )


def reads_too_many_places(kernel: Kernel) -> bool:
    """Whether a kernel reads too many places to be written for a GPU."""
    if sum(node.op == "input" for node in nodes(kernel.roots)) < MANY_PLACES:
        return False
    try:
        generate(kernel)
    except NotGenerated:
        return True
    return False


def operations_per_point(program: Program) -> float:
    """Return the operations for each point of the program's largest kernel.

    A moment counts as three, since NumPy makes two arrays on the way.
    """
    points = max((k.points for k in program.kernels), default=0)
    moments = sum(k.points for k in program.kernels for r in k.reductions if r.op == "moment")
    return (sum(k.operations() for k in program.kernels) + 2 * moments) / max(points, 1)


def pays_as_kernel(program: Program) -> bool:
    """Whether a single operation is faster as a program than in NumPy.

    Two kinds are. One makes a large array from a few points for each element: it may be part of a
    result, and is written there at once. The other reduces short rows: NumPy calls a loop for each.
    """
    kernel = max(program.kernels, key=lambda k: k.points, default=None)
    if kernel is None or operations_per_point(program) < 1:
        return False
    if any(r.op not in llvm_reduce.REDUCED for r in kernel.reductions):
        return False
    last, most = len(kernel.shape) - 1, tuning.FEW_POINTS
    if last in kernel.axes and kernel.shape[last] <= most < math.prod(kernel.output_shape):
        return True
    few = math.prod([kernel.shape[k] for k in kernel.axes]) <= most
    return few and sum(kernel.output_bytes) >= LARGE


def why_unreadable(program: Program) -> str | None:
    """Return why NumPy cannot evaluate a program; None where it can."""
    for kernel in program.kernels:
        for root in kernel.roots:
            if reason := node_calls.why_unsupported(root):
                return reason
    return None
