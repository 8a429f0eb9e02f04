"""Whether a traced task may become a kernel, and whether that pays."""

from __future__ import annotations

import math

from ..codegen.cpu import evaluate, llvm_reduce, region
from ..codegen.cuda.kernel import generate
from ..errors import NotGenerated
from ..ir.expr import Kernel, Program, nodes
from ..ir.regions import count_boxes, interior

#: Bytes of an array that is large.
LARGE = 2**20
#: Conditions on where a point is with which a program takes NumPy longer than Dask's own way, where
#: there are fewer points than this in each box, on average, in which all of them are known.
CHOICES, BOX_POINTS = 3, 2**15
#: Places that a kernel may read, of which it is not asked whether it can be written for a GPU.
MANY_PLACES = 100


def is_mosaic(kernel: Kernel) -> bool:
    """Whether it chooses by position among much that is the same in most places, as parts of arrays
    side by side and edges that are treated in another way are, in boxes of few points each."""
    chosen = {n.args[0] for n in nodes(kernel.roots) if n.op == "where"}
    by_position = [c for c in chosen if all(n.op != "input" for n in nodes((c,)))]
    if len(by_position) < CHOICES:
        return False
    inner = [r.arg for r in kernel.reductions]
    return any(
        math.prod(shape) < BOX_POINTS * count_boxes(roots, shape)
        and interior(roots, shape) is not None
        for roots, shape in ((inner, kernel.shape), (kernel.outputs, kernel.kept))
        if roots
    )


def has_windows_over_edges(kernel: Kernel) -> bool:
    """Whether it is chosen by position what it reduces, in another way from result to result. There
    are no boxes then in which all is known, and NumPy copies arrays together in less time."""
    inner = nodes([r.arg for r in kernel.reductions])
    places = [n for n in nodes([n.args[0] for n in inner if n.op == "where"]) if n.op == "index"]
    return any(
        any(s for k, s in enumerate(n.data.strides) if k in kernel.axes and kernel.shape[k] > 1)
        and any(s for k, s in enumerate(n.data.strides) if k not in kernel.axes)
        for n in places
    )


def reads_too_many_places(kernel: Kernel) -> bool:
    """Whether it reads so many places that it cannot be written for a GPU."""
    if sum(node.op == "input" for node in nodes(kernel.roots)) < MANY_PLACES:
        return False
    try:
        generate(kernel)
    except NotGenerated:
        return True
    return False


def operations_per_point(program: Program) -> float:
    """Operations for each point of the program's largest kernel. A moment is three: NumPy makes
    two arrays on the way."""
    points = max((k.points for k in program.kernels), default=0)
    moments = sum(k.points for k in program.kernels for r in k.reductions if r.op == "moment")
    return (sum(k.operations() for k in program.kernels) + 2 * moments) / max(points, 1)


def pays_as_kernel(program: Program) -> bool:
    """Whether one operation is faster as a program: one that makes a large array, of a few points
    for each element, which may be part of a result and is written there at once; and a reduction of
    short rows, for which NumPy calls its loop row by row."""
    kernel = max(program.kernels, key=lambda k: k.points, default=None)
    if kernel is None or operations_per_point(program) < 1:
        return False
    if any(r.op not in llvm_reduce.REDUCED for r in kernel.reductions):
        return False
    last, most = len(kernel.shape) - 1, evaluate.FEW_POINTS
    if last in kernel.axes and kernel.shape[last] <= most < math.prod(kernel.kept):
        return True
    few = math.prod([kernel.shape[k] for k in kernel.axes]) <= most
    return few and sum(kernel.made) >= LARGE


def unreadable(program: Program) -> str | None:
    """Why NumPy cannot read a program; None where it can."""
    for kernel in program.kernels:
        for root in kernel.roots:
            if reason := region.why_unsupported(root):
                return reason
    return None
