"""The NumPy calls that compute the nodes of a region, and what NumPy cannot compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from ...ir.bins import Bins
from ...ir.expr import RANDOM, DType, Expr, View, nodes
from . import histogram, philox
from .accumulate import Array
from .array_memory import BufferMemory
from .llvm_text import OPEN

#: Ufuncs that have a bug in NumPy; see `_call_packed`.
_PACKED = frozenset({"isfinite", "isinf", "isnan", "signbit", "negative"})
#: Operations that no ufunc computes.
STRUCTURAL = frozenset({"taken", "cast", "where", "real", "imag", "complex", "bin"})
#: A `where` of which only the chosen points may be read; only inside this room.
GUARDED = "guarded"


class Inputs(Protocol):
    """What calls that read memory themselves are given: `region.RegionRun` has it."""

    #: The arrays, by number.
    memory: Mapping[int, BufferMemory]
    #: Constants that are given for each run.
    given: Sequence[Array]


def why_unsupported(expr: Expr) -> str | None:
    """Why NumPy cannot evaluate an expression; None where it can.

    >>> from gpuscheduler.ir.expr import source
    >>> why_unsupported(Expr("frobnicate", (source(0, (5,), "f4"),), "f4"))
    'NumPy has no function frobnicate of float32'
    """
    for node in nodes((expr,)):
        if not node.args or node.op in STRUCTURAL or node.op in RANDOM or node.op == "call":
            continue
        reason = _refuse_unknown(node.op, tuple([a.dtype for a in node.args]), node.dtype)
        if reason is not None:
            return reason
    return None


@lru_cache(4096)
def _refuse_unknown(op: str, types: tuple[DType, ...], gives: DType) -> str | None:
    reason = f"NumPy has no function {op} of {', '.join(t.name for t in types)}"
    try:
        function = _ufunc(op)
        if function.nin != len(types) or function.nout != 1 or function.signature is not None:
            return reason
        found = function.resolve_dtypes((*types, None))
    except (NotImplementedError, TypeError):
        return reason
    return None if found[-1] == gives else f"{reason} that gives {gives.name}"


@lru_cache(256)
def _ufunc(op: str) -> np.ufunc:
    function = getattr(np, op, None)
    if not isinstance(function, np.ufunc):
        try:
            from scipy import special  # type: ignore[import-untyped,unused-ignore]
        except ImportError:  # SciPy is not required
            special = None
        function = getattr(special, op, None)
    if not isinstance(function, np.ufunc):
        raise NotImplementedError(f"no function {op} in NumPy, nor in SciPy where it is installed")
    return function


def varying_shape(lengths: tuple[int, ...], varies: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple([n if v else 1 for n, v in zip(lengths, varies, strict=True)])


# ---- nodes as calls that take `out`


def make_call(node: Expr, along: tuple[bool, ...] | None = None) -> Callable[..., Any]:
    """Return the function that computes a node from its arguments.

    `along` tells which arguments vary along the last axis, where only some do.
    """
    if node.op == "cast":
        return partial(_cast, node.dtype)
    if node.op == "where":
        return partial(_choose, node.dtype)
    if node.op == "clip":
        return np.clip
    if node.op in ("real", "imag"):
        return partial(_part, node.op)
    if node.op == "complex":
        return partial(_complex, node.dtype)
    if node.op == "bin":
        return partial(_bin, node.data)
    if node.op in RANDOM:
        return partial(_drawn_at, node.op, node.data, node.dtype)
    if node.op == "call":
        function, part = node.data
        types = tuple([a.dtype for a in node.args])
        if along is not None:
            return function.rows(types, node.dtype, part, along)  # type: ignore[no-any-return]
        return function.ufunc(types, node.dtype, part)  # type: ignore[no-any-return]
    if node.op in _PACKED:
        return partial(_call_packed, _ufunc(node.op))
    return _ufunc(node.op)


def _call_packed(function: np.ufunc, a: Any, out: Array | None = None) -> Any:
    """Call a ufunc on contiguous arrays: NumPy (to 2.4) has a bug for others with AVX-512.

    With an `out` that has strides they write past it. Every fourth negative of four bytes, or
    eighth of eight, is that of another number.
    """
    if out is None or out.flags.c_contiguous:
        return function(a, out=out)
    out[...] = function(a)
    return out


def _cast(dtype: DType, a: Any, out: Array | None = None) -> Any:
    if out is None:
        return a.astype(dtype)
    np.copyto(out, a, casting="unsafe")
    return out


def _choose(dtype: DType, c: Any, a: Any, b: Any, out: Array | None = None) -> Any:
    return np.where(c, a, b)  # of memory of its own: to copy that to `out` would only cost


def _bin(bins: Bins, a: Any, out: Array | None = None) -> Any:
    found = histogram.find(bins, a)
    if out is None:
        return found
    out[...] = found
    return out


def _part(name: str, a: Any, out: Array | None = None) -> Any:
    found = a.real if name == "real" else a.imag
    if out is None:
        return found
    out[...] = found
    return out


def _complex(dtype: DType, a: Any, b: Any, out: Array | None = None) -> Any:
    if out is None:
        out = np.empty(np.broadcast_shapes(np.shape(a), np.shape(b)), dtype)
    out.real = a
    out.imag = b
    return out


def _drawn_at(op: str, key: int, dtype: DType, positions: Any, out: Array | None = None) -> Any:
    found = np.asarray(philox.values(op, key, np.asarray(positions), dtype))
    if out is None:
        return found
    out[...] = found
    return out


def draw_numbers(
    op: str, key: int, dtype: DType, view: View, run: Any, origin: tuple[int, ...],
    lengths: tuple[int, ...], *shifts: Any, out: Array | None = None,
) -> Array:  # fmt: skip
    """Draw random numbers at evenly spaced positions."""
    varies = tuple([s != 0 for s in view.strides])
    if out is None:
        out = np.empty(varying_shape(lengths, varies), dtype)
    first = view.offset + sum(o * s for o, s in zip(origin, view.strides, strict=True))
    first += sum(int(s) for s in shifts)
    philox.fill(op, key, View(first, view.strides), out)
    return out


def index_numbers(
    view: View, run: Any, origin: tuple[int, ...], lengths: tuple[int, ...],
    out: Array | None = None,
) -> Array:  # fmt: skip
    first = view.offset
    for o, s in zip(origin, view.strides, strict=True):
        first += o * s
    found: Any = None
    for k, s in enumerate(view.strides):
        if s:
            along = np.arange(first, first + lengths[k] * s, s, dtype=np.int64)
            shape = [1] * len(lengths)
            shape[k] = -1
            along = along.reshape(shape)
            found, first = along if found is None else found + along, 0
    return found  # type: ignore[no-any-return]


def take_elements(
    array: int, view: View, run: Inputs, origin: tuple[int, ...], lengths: tuple[int, ...],
    indices: Any, out: Array | None = None,
) -> Array:  # fmt: skip
    """Return the elements of an array at computed indices."""
    flat, first = run.memory[array]
    evenly: Any = index_numbers(view, run, origin, lengths) if any(view.strides) else view.offset
    # what is not chosen may be anywhere
    found: Array = flat.take(first + evenly + np.asarray(indices), mode="clip")
    if out is None:
        return found if found.ndim else np.broadcast_to(found, lengths)
    out[...] = found
    return out


def evaluate_where(
    node: Expr, run: Inputs, origin: tuple[int, ...], lengths: tuple[int, ...],
    condition: Any, out: Array | None = None,
) -> Array:  # fmt: skip
    """Evaluate a `where` of which only the chosen points may be read."""
    if out is None:
        out = np.empty(lengths, node.dtype)
    mask = np.broadcast_to(condition, lengths)
    for chosen, branch in ((mask, node.args[1]), (~mask, node.args[2])):
        points = [p + o for p, o in zip(np.nonzero(chosen), origin, strict=True)]
        out[chosen] = _evaluate_at(branch, points, len(points[0]), run)
    return out


def _evaluate_at(root: Expr, points: list[Array], count: int, run: Inputs) -> Any:
    """Evaluate an expression at some points, given by their coordinates."""
    values: dict[int, Any] = {}

    def view_indices(view: View) -> Any:
        total: Any = np.full(count, view.offset, np.int64)
        for stride, coordinate in zip(view.strides, points, strict=True):
            if stride:
                total += stride * coordinate
        return total

    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if id(node) in values:
            continue
        branching = node.op in ("where", GUARDED)
        below = node.args[:1] if branching else node.args
        below = node.args[1:] if node.op == "taken" else below
        if not ready:
            stack.append((node, True))
            stack += [(a, False) for a in below]
        elif node.op == "constant":
            values[id(node)] = np.broadcast_to(node.value, (count,))
        elif node.op == OPEN:
            values[id(node)] = np.broadcast_to(run.given[node.data], (count,))
        elif node.op == "index":
            values[id(node)] = view_indices(node.data)
        elif node.op == "input":
            n, view = node.data
            flat, first = run.memory[n]
            where = view_indices(view) + first
            if count and (where.min() < 0 or where.max() >= flat.size):
                raise IndexError(f"{node!r} is read outside of the array, at {view}")
            values[id(node)] = flat[where]
        elif node.op == "taken":
            n, view = node.args[0].data
            flat, first = run.memory[n]
            where = view_indices(view) + first + values[id(node.args[1])]
            values[id(node)] = flat.take(where, mode="clip")
        elif branching:
            mask = values[id(node.args[0])]
            out: Array = np.empty(count, node.dtype)
            for chosen, branch in ((mask, node.args[1]), (~mask, node.args[2])):
                some = [p[chosen] for p in points]
                out[chosen] = _evaluate_at(branch, some, int(np.count_nonzero(chosen)), run)
            values[id(node)] = out
        else:
            values[id(node)] = make_call(node)(*[values[id(a)] for a in node.args])
    return values[id(root)]
