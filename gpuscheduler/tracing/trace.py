"""Trace a Python function: run it once on arrays without values.

A trace needs no device and no data; a function that depends on a value raises `NotTraceable`.

`purity` decides which functions may be run so. `array` and the files after it implement arrays
without values. The trace runs a copy of the function, whose global names give the functions that
know such arrays. `lower` puts the recorded operations into kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir.expr import Program
from ..values import map_leaves
from .abstract import (
    AbstractArray,
    FlatArray,
    GeneratedArray,
    KnownArray,
    LibraryCall,
    MaskedPoints,
    MatrixProductArray,
    ScannedArray,
)
from .array import TracedArray, next_input
from .compressed import CompressedArray
from .context import (
    CapturedArrays,
    LibraryTrace,
    MatrixProductTrace,
    NotTraceable,
    TraceContext,
    current,
    is_other,
    with_leaves,
)
from .lower import Lowering
from .purity import is_plain, why_impure
from .reduce import scan

# ruff: isort: off
# Each of these tells the registry what its functions do to arrays without values; later ones
# override or complete what is there, so the order counts.
from .functions import dask_chunks  # noqa: F401
from .functions import creation  # noqa: F401
from .functions import lookup, search  # noqa: F401
from .functions import masked  # noqa: F401
from .functions import medians  # noqa: F401
from .functions import statistics, shapes  # noqa: F401
from .functions import products as matrix_products  # noqa: F401
from .functions import reductions  # noqa: F401
from .functions import library as _library_calls  # noqa: F401

# ruff: isort: on
import functools
import types

import numpy as np
from dask.utils import apply as dask_apply

from ..frontend.compiled_task import COMPILED
from .array import read_beside
from .bytecode import looked_up, replace_globals, root_of
from .context import refuse
from .functions.python_math import TracedComplex
from .purity import CALLED, TRUSTED, is_array, is_curried, is_nothing, is_users
from .registry import CUPY, KNOWN, LIKE, NUMPY, in_numpy, in_place_of


def trace_function(
    call: Callable[..., Any],
    abstract: Sequence[Any],
    products: bool = False,
    beside: CapturedArrays | None = None,
    points: bool = False,
    matrices: Callable[[MatrixProductArray], object] | None = None,
    whole: bool = False,
    library: Callable[[LibraryCall], object] | None = None,
) -> Program:
    """The program of `call(*arguments)`, whose arrays are known as `AbstractArray`s only.

    `products` allows products of arrays with vectors; on the host BLAS computes them. `beside`
    takes the arrays that the function reads beside its arguments; without it, the function may read
    none. With `points`, each element is a Python number for the function. A value that is a product
    of two matrices to which `matrices` agrees raises `MatrixProductTrace`. One that is a call of a
    function that a library of GPUs has, and to which `library` agrees, raises `LibraryTrace`. Parts
    of arrays that the function joins are read where they are, or joined first if `whole`.

    >>> program = trace_function(lambda x: (x * 2).sum(), [AbstractArray((3, 4), np.dtype("f4"))])
    >>> program.kernels[0].reductions[0].arg, program.result
    (multiply(input0, 2.0), Out(array=1, shape=(), scalar=True))
    """
    reason = why_impure(call, points=points)
    if reason:
        raise NotTraceable(reason)
    multiplies = products and matrices is not None
    context = TraceContext(products, beside, points, multiplies, whole, library=library is not None)
    try:
        return _trace_call(call, abstract, context)
    except MatrixProductTrace as error:
        if matrices is not None and error.product is not None and matrices(error.product):
            raise
    except LibraryTrace as error:
        if library is not None and error.call is not None and library(error.call):
            raise
    except NotTraceable:
        if not context.in_library:
            raise
    # once more, to say where it does that
    again = beside and CapturedArrays(beside.dense, beside.every)
    try:
        return _trace_call(call, abstract, TraceContext(products, again, points, whole=whole))
    except NotTraceable as error:
        error.in_library = context.in_library
        raise


def _trace_call(
    call: Callable[..., Any], abstract: Sequence[Any], context: TraceContext
) -> Program:
    beside = context.beside
    token = current.set(context)
    try:
        arguments = [_argument(a) for a in abstract]
        result = adapt_function(call)(*arguments)
        if beside and any(a._expr is not before for a, before in beside.known.values()):
            raise context.refuse("it writes into an array that is not its own")
        if any(is_other(copy, before) for copy, before in context.copied):
            raise context.refuse("it changes a list or a dictionary that it is given")
        if context.refused is not None:  # and the function caught it
            raise NotTraceable(context.refused)
        return Lowering(context).program(result)
    except NotTraceable as error:
        error.operations = context.operations
        raise
    except Exception as error:
        raise NotTraceable(f"{type(error).__name__}: {error}") from error
    finally:
        current.reset(token)


# ------------------------------------------------------------------------------------------------
# What it is given.


def _argument(value: Any) -> Any:
    """What a traced function gets for an argument."""
    if isinstance(value, AbstractArray):
        return next_input(value)
    if isinstance(value, KnownArray):
        return constant_of_task(value.array)
    if isinstance(value, GeneratedArray):
        array = TracedArray(with_leaves(value.expr, lambda leaf: leaf), tuple(value.shape))
        if isinstance(value, ScannedArray):
            return scan(value.op, array, value.axis, value.dtype)
        if isinstance(value, FlatArray):
            return array.reshape(-1)
        if isinstance(value, MaskedPoints):
            mask = TracedArray(with_leaves(value.mask, lambda leaf: leaf), tuple(value.over))
            return CompressedArray(array, mask, value.axis)
        return array
    if isinstance(value, dict | list | tuple) and not is_plain(value):
        return map_leaves(_argument, value)
    if callable(value) and not isinstance(value, type):
        reason = why_impure(value, arrays=current.get().beside is not None)
        if reason:
            raise NotTraceable(reason)
        return adapt_function(value)
    if not is_plain(value):
        raise NotTraceable(f"it reads a {type(value).__module__}.{type(value).__qualname__}")
    return value


def constant_of_task(value: Any) -> Any:
    """What a traced function gets for a constant of its task."""
    if isinstance(value, dict | list | tuple):
        # what is of a derived class is a leaf of its own
        copy = map_leaves(lambda v: v if v is value else constant_of_task(v), value)
        current.get().remember(copy)
        return copy
    if isinstance(value, CALLED) or is_curried(value):
        return adapt_function(value)
    if is_nothing(value):  # no device is asked to make something of it
        return np.empty(value.shape, value.dtype)
    beside = current.get().beside
    if beside is None or not is_array(value):
        return value
    if type(value) is np.ndarray and not beside.every:
        beside.left.append(value)
        seen = value.view()
        seen.flags.writeable = False  # it is the caller's
        return seen
    return read_beside(value)


# ------------------------------------------------------------------------------------------------
# The same function with those in place of the ones it calls.


def adapt_function(function: Any, inside: tuple[Any, ...] = ()) -> Any:
    """`function`, calling what is in `KNOWN`, and NumPy where it calls CuPy."""
    known = in_place_of(function)
    if known is not None:
        return known
    if isinstance(function, functools.partial) or is_curried(function):

        def adapt_argument(value: Any) -> Any:
            return adapt_function(value, inside) if callable(value) else constant_of_task(value)

        args = [adapt_argument(a) for a in function.args]
        words = {
            k: _note_array(v) if k in LIKE else adapt_argument(v)
            for k, v in function.keywords.items()
        }
        return functools.partial(adapt_function(function.func, inside), *args, **words)
    if type(function).__name__ == "Compose" and hasattr(function, "funcs"):
        steps = [adapt_function(f, inside) for f in (function.first, *function.funcs)]
        return lambda *args, **kwargs: functools.reduce(
            lambda value, f: f(value), steps[1:], steps[0](*args, **kwargs)
        )
    if not isinstance(function, types.FunctionType):
        return function
    if function in inside:
        if reason := why_impure(function):  # it would find the arrays themselves
            raise refuse(reason)
        return function
    # a user's globals can change, and arrays are of one run: nothing of them is kept
    if function.__code__.co_filename == COMPILED:
        return _with_adapted(function, inside, constant_of_task)
    return _with_adapted(function, inside) if is_users(function) else function


def _note_array(value: Any) -> Any:
    """Note a NumPy array that does not change: its values may decide what the program does.

    CuPy's arrays are not noted. Dask uses them to say what kind of array to make, and reading them
    waits for a device.
    """
    beside = current.get().beside
    if type(value) is np.ndarray and value.size and beside is not None:
        beside.left.append(value)
    return value


def _captured_value(value: Any) -> Any:
    """What a traced function finds in a variable outside itself."""
    if is_array(value) and current.get().beside is not None:
        return read_beside(value)
    return value


def _module_view(module: types.ModuleType, other: Callable[[Any], Any]) -> Any:
    """A module as a traced function finds it: with no name of its own."""

    class Within:
        def __getattr__(self, name: str) -> Any:
            value = other(getattr(module, name))
            setattr(self, name, value)
            return value

    return Within()


def _is_theirs_alone(module: types.ModuleType) -> bool:
    """Whether a module is of a library whose functions do not call what users have made."""
    return root_of(module) in {*TRUSTED, "dask", "scipy"}


def _with_adapted(
    function: types.FunctionType,
    inside: tuple[Any, ...],
    array: Callable[[Any], Any] = _captured_value,
) -> Any:
    """A copy that finds adapted functions under its global names, and what stands for arrays."""

    asks = "type" in looked_up(function.__code__)  # whether it may ask what is of just this type

    def adapt_value(value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            known = in_numpy(value)
            return (
                known
                if known is not value or _is_theirs_alone(value)
                else _module_view(value, adapt_value)
            )
        if value is complex and current.get().points and not asks:
            return TracedComplex
        if value is np.errstate:
            return _error_state
        if callable(value) and not isinstance(value, type):
            return adapt_function(value, (*inside, function))
        if type(value) is tuple and any(map(callable, value)):
            return tuple(map(adapt_value, value))
        return array(value)

    copy = replace_globals(function, adapt_value)
    if copy.__defaults__:
        copy.__defaults__ = tuple(map(adapt_value, copy.__defaults__))
    if copy.__kwdefaults__:
        copy.__kwdefaults__ = {k: adapt_value(v) for k, v in copy.__kwdefaults__.items()}
    return copy


def _apply_adapted(func: Any, args: Any, kwargs: Any = None) -> Any:
    return (func if isinstance(func, CALLED) else adapt_function(func))(*args, **(kwargs or {}))


KNOWN[dask_apply] = _apply_adapted


def _error_state(**kwargs: Any) -> Any:
    """`numpy.errstate`, of which no kernel does more than to be silent."""
    for name, action in kwargs.items():
        if name != "call" and action not in (None, "ignore", "warn"):
            raise refuse(f"it has NumPy {action} where there are errors ({name}={action!r})")
    return np.errstate(**kwargs)


for _library in (NUMPY, CUPY):
    _library.enter("errstate", _error_state)
