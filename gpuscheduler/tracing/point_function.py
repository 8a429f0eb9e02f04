"""Trace the function of a mesh at one point, or compile it with Numba."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import NotCompiled
from ..ir.complex_parts import by_parts
from ..ir.expr import DType, Expr, Out, View, constant, nodes, replace_leaves
from . import context, trace
from .abstract import AbstractArray, ViewedInput
from .context import NotTraceable, ViewTrace
from .numba_cpu import ScalarFunction, python_function
from .point_cache import find_expressions, keep_expressions
from .purity import CATCHES

#: Lengths of arrays with which a function is traced, twice. All are different primes: the length of
#: an axis, or of several that were joined, tells which they were. A function that treats each point
#: alike gives the same expression both times.
_PROBES = ((2, 3, 5, 7, 11, 13), (17, 19, 23, 29, 31, 37))


# ---- what the function computes, at one point


class ResultTuple(list[Any]):
    """Results of a function that gives a tuple or a list."""


def point_expressions(
    f: Callable[..., Any],
    types: list[DType],
    args: tuple[Any, ...],
    how: str,
    xp: str,
    ranges: Sequence[tuple[float, float] | None],
) -> list[Any] | None:
    """The value of `f` as expressions of inputs 0, 1, …: one, or `ResultTuple`.

    None where only Python can compute it.
    """
    name = getattr(f, "__name__", repr(f))
    why = ""
    if how != "numba":
        try:
            expressions = _trace_points(f, types, args)
            expressions[:] = [_by_parts(e, ranges) for e in expressions]
            return expressions
        except NotTraceable as error:
            why = str(error)
            if how == "trace":
                raise NotCompiled(f"{name} cannot be traced: {why}") from None
            if why.startswith(CATCHES):
                _warn_of_python(name, why)
                return None
    try:
        return _compile_points(f, types, args, xp)
    except NotCompiled as error:
        if how == "auto" and CATCHES in str(error):
            _warn_of_python(name, str(error))
            return None
        also = f" (and it cannot be traced: {why})" if why else ""
        raise NotCompiled(
            f"{error}{also}. Rewrite that part, or pass how='numpy' to call it with arrays, "
            "or how='python' to call it for each point"
        ) from error.__cause__


def _warn_of_python(name: str, why: str) -> None:
    warnings.warn(
        f"{name} is called in Python for each point of its mesh, which takes microseconds for "
        f"each: {why}. Without the try it can be compiled: what is outside the domain of an "
        "operation is NaN or infinite then. how='python' says that this is meant",
        stacklevel=4,
    )


def _by_parts(expr: Expr, ranges: Sequence[tuple[float, float] | None]) -> Expr:
    """The same by the parts of complex numbers, if that is not too much for a kernel."""
    new = by_parts(expr, ranges)
    return new if len(nodes((new,))) <= context.MOST_NODES // 2 else expr


def bind_arguments(f: Any, count: int) -> Any:
    """A function with arguments already given as one of `count` arguments."""
    if not isinstance(f, functools.partial) or python_function(f.func) is None:
        return f
    inner = python_function(f.func)
    space = {"f": f.func, **{f"g{n}": a for n, a in enumerate(f.args)}}
    space |= {f"k_{name}": value for name, value in f.keywords.items()}
    words = [f"g{n}" for n in range(len(f.args))] + [f"a{n}" for n in range(count)]
    words += [f"{name}=k_{name}" for name in f.keywords]
    names = ", ".join([f"a{n}" for n in range(count)])
    made = eval(f"lambda {names}: f({', '.join(words)})", space)
    made.__name__ = made.__qualname__ = inner.__name__  # type: ignore[union-attr]
    return made


def _trace_points(f: Callable[..., Any], types: list[DType], args: tuple[Any, ...]) -> list[Any]:
    function = python_function(f) or f
    known = find_expressions(function, types, args)
    if known is not None:
        return known
    call = functools.partial(_call_at_points, function, args)
    out, again = [_trace_at_lengths(call, types, lengths) for lengths in _PROBES]
    if type(out) is not type(again) or list(map(expression_tokens, out)) != list(
        map(expression_tokens, again)
    ):
        raise NotTraceable("what it gives depends on how many points there are")
    keep_expressions(function, types, args, out)
    return out


def _trace_at_lengths(
    call: Callable[..., Any], types: list[DType], lengths: Sequence[int]
) -> list[Any]:
    count = len(types)
    lengths = lengths[:count]
    shapes = [tuple(lengths[k] if k == j else 1 for j in range(count)) for k in range(count)]
    probes = [AbstractArray(s, t) for s, t in zip(shapes, types, strict=True)]
    try:
        program = trace.trace_function(call, probes, points=True)
        result = program.result
    except ViewTrace as error:
        program, result = None, error.result
    several = isinstance(result, (tuple, list))
    out = [
        _element_expression(part, program, lengths) for part in (result if several else [result])
    ]
    return ResultTuple(out) if several else out


def _call_at_points(function: Callable[..., Any], args: tuple[Any, ...], *points: Any) -> Any:
    return function(*points, *args)


def _element_expression(part: Any, program: Any, lengths: Sequence[int]) -> Expr:
    """A part of a program's result as an expression of single elements of its inputs."""
    if isinstance(part, ViewedInput):
        return _element(Expr("input", (), part.dtype, (part.array, part.view)), part.shape, lengths)
    if isinstance(part, (bool, int, float, complex, np.number, np.bool_)):
        return constant(part, np.asarray(part).dtype)
    if not isinstance(part, Out):
        raise NotTraceable(f"it gives a {type(part).__name__}")
    if any(k.reductions for k in program.kernels):
        raise NotTraceable("what it gives at one point depends on others")
    if part.array < program.inputs:
        raise NotTraceable("it gives what it was given in another form")
    *_, (start, kernel) = [
        (s, k) for s, k in zip(program.starts, program.kernels, strict=True) if s <= part.array
    ]
    root = kernel.outputs[part.array - start]
    (expr,) = replace_leaves([root], lambda leaf: _element(leaf, kernel.shape, lengths))
    return expr


def _element(leaf: Expr, shape: tuple[int, ...], lengths: Sequence[int]) -> Expr:
    """An element of a coordinate's array where the function reads just that one of it."""
    if leaf.op == "constant":
        return leaf
    if leaf.op == "input":
        n, view = leaf.data
        if n >= len(lengths):  # another kernel's
            raise NotTraceable("what it gives at one point depends on others")
        along = [(m, s) for m, s in zip(shape, view.strides, strict=True) if s and m > 1]
        if view.offset == 0 and along == [(lengths[n], 1)]:
            return Expr("input", (), leaf.dtype, (n, View(0, ())))
    raise NotTraceable("what it gives at one point depends on others")


def _compile_points(
    f: Callable[..., Any], types: list[DType], args: tuple[Any, ...], xp: str
) -> list[Any]:
    function = ScalarFunction(f)
    lesser = types[0].char in "efF"
    points = [Expr("input", (), t, (k, View(0, ()))) for k, t in enumerate(types)]
    others = [constant(a, _argument_dtype(a, types[0])) for a in args]
    operands = (*points, *others)
    given = function.results(tuple([e.dtype for e in operands]), compiled=xp == "numpy")
    several = isinstance(given, tuple)
    out = ResultTuple() if several else []
    for k, dtype in enumerate(given if isinstance(given, tuple) else (given,)):
        if lesser and dtype.kind in "fc":  # its constants are float64 for Numba, but not for NumPy
            dtype = np.dtype(dtype.kind + str(4 if dtype.kind == "f" else 8))
        out.append(Expr("call", operands, dtype, (function, k if several else None)))
    return out


def _argument_dtype(value: Any, like: DType) -> DType:
    if isinstance(value, np.generic):
        return value.dtype
    if isinstance(value, float) and like.kind in "fc":
        return np.dtype(f"f{like.itemsize // (1 if like.kind == 'f' else 2)}")
    return np.asarray(value).dtype


def expression_tokens(expr: Expr) -> Any:
    """The same words in every process for expressions that are equal."""
    every = nodes((expr,))
    number = {id(node): n for n, node in enumerate(every)}
    return [
        (
            node.op,
            node.dtype.str,
            (node.data[0].digest, node.data[1]) if node.op == "call" else repr(node.data),
            [number[id(a)] for a in node.args],
        )
        for node in every
    ]
