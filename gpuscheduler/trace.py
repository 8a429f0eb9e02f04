"""What a Python function does to arrays, as an `expr.Program`: it is run once on arrays that hold
no values. No device, no data: what depends on a value cannot be followed, and says so.

A `Traced` array is an expression over its shape. NumPy's protocols lead each operation here, so
that NumPy's own rules for types and shapes hold; a view changes the `View` of each leaf, by the
same NumPy view operation on an array that has its strides and no memory. The result of a
reduction is a new leaf; so is whatever is computed from one and then broadcast, or has to be
copied before it can be reshaped. Such leaves have numbers from `MADE` on until `_Assembly` has
put them into kernels: what is reduced over the same axes in one pass, what is computed from the
results alone at its end, and the rest element by element.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dask.utils import apply as dask_apply

# They enter what they know of arrays when they are imported.
from . import chunk_functions, creation, masks, numpy_functions  # noqa: F401
from .arrays import Selected, Traced, next_input, read_beside, scan, traced
from .expr import (
    LEAVES,
    SCANS,
    Expr,
    Kernel,
    Out,
    Program,
    Reduction,
    View,
    nodes,
    view_of,
    with_view,
)
from .following import (
    MADE,
    MOST_NODES,
    Abstract,
    Beside,
    Following,
    Generated,
    Masked,
    OneOrNone,
    OnlySelects,
    OnlyView,
    Result,
    Scanned,
    Seen,
    Shape,
    Stage,
    Unfollowed,
    canonical,
    current,
    is_contiguous,
    is_other,
    made_in,
    node_of,
    refuse,
    reviewed,
    squeezed,
    view_over,
    with_leaves,
)
from .python_numbers import Complex
from .reading import (
    CALLED,
    KNOWN,
    LIKE,
    TRUSTED,
    impure,
    in_numpy,
    in_place_of,
    is_array,
    is_curried,
    is_nothing,
    is_plain,
    is_users,
    looked_up,
    replaced,
    root_of,
)
from .sizes import map_leaves
from .subgraph import COMPILED


def follow(
    call: Callable[..., Any],
    abstract: Sequence[Any],
    products: bool = False,
    beside: Beside | None = None,
    points: bool = False,
) -> Program:
    """The program of `call(*arguments)`, whose arrays are known as `Abstract`s only. With
    `products`, those of arrays with vectors, too: on the host they are the business of BLAS.
    Arrays that it reads beside its arguments are put into `beside`; without that, it may not.
    Of `points` each element is a number of Python's for the function.

    >>> program = follow(lambda x: (x * 2).sum(), [Abstract((3, 4), np.dtype("f4"))])
    >>> program.kernels[0].reductions[0].arg, program.result
    (multiply(input0, 2.0), Out(array=1, shape=(), scalar=True))
    """
    reason = impure(call)
    if reason:
        raise Unfollowed(reason)
    following = Following(products, beside, points)
    token = current.set(following)
    try:
        arguments = [_argument(a) for a in abstract]
        result = adapted(call)(*arguments)
        if beside and any(a._expr is not before for a, before in beside.known.values()):
            raise following.refuse("it writes into an array that is not its own")
        if any(is_other(copy, before) for copy, before in following.copied):
            raise following.refuse("it changes a list or a dictionary that it is given")
        if following.refused is not None:  # and the function caught it
            raise Unfollowed(following.refused)
        return _Assembly(following).program(result)
    except Unfollowed as error:
        error.operations = following.operations
        raise
    except Exception as error:
        raise Unfollowed(f"{type(error).__name__}: {error}") from error
    finally:
        current.reset(token)


# ------------------------------------------------------------------------------------------------
# What it is given.


def _argument(value: Any) -> Any:
    """What a function that is followed gets for an argument."""
    if isinstance(value, Abstract):
        return next_input(value)
    if isinstance(value, Generated):
        array = Traced(with_leaves(value.expr, lambda leaf: leaf), tuple(value.shape))
        if isinstance(value, Scanned):
            return scan(value.op, array, value.axis, value.dtype)
        if isinstance(value, Masked):
            mask = Traced(with_leaves(value.mask, lambda leaf: leaf), tuple(value.over))
            return Selected(array, mask, value.axis)
        return array
    if isinstance(value, dict | list | tuple) and not is_plain(value):
        return map_leaves(_argument, value)
    if callable(value) and not isinstance(value, type):
        reason = impure(value, arrays=current.get().beside is not None)
        if reason:
            raise Unfollowed(reason)
        return adapted(value)
    if not is_plain(value):
        raise Unfollowed(f"it reads a {type(value).__module__}.{type(value).__qualname__}")
    return value


def constant_of_task(value: Any) -> Any:
    """What a function that is followed gets for a constant of its task."""
    if isinstance(value, dict | list | tuple):
        # what is of a derived class is a leaf of its own
        copy = map_leaves(lambda v: v if v is value else constant_of_task(v), value)
        current.get().remember(copy)
        return copy
    if isinstance(value, CALLED) or is_curried(value):
        return adapted(value)
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


def _apply_adapted(func: Any, args: Any, kwargs: Any = None) -> Any:
    return (func if isinstance(func, CALLED) else adapted(func))(*args, **(kwargs or {}))


KNOWN[dask_apply] = _apply_adapted


def adapted(function: Any, inside: tuple[Any, ...] = ()) -> Any:
    """`function`, calling what is in `KNOWN`, and NumPy where it calls CuPy."""
    known = in_place_of(function)
    if known is not None:
        return known
    if isinstance(function, functools.partial) or is_curried(function):

        def given(value: Any) -> Any:
            return adapted(value, inside) if callable(value) else constant_of_task(value)

        args = [given(a) for a in function.args]
        words = {k: _noted(v) if k in LIKE else given(v) for k, v in function.keywords.items()}
        return functools.partial(adapted(function.func, inside), *args, **words)
    if type(function).__name__ == "Compose" and hasattr(function, "funcs"):
        steps = [adapted(f, inside) for f in (function.first, *function.funcs)]
        return lambda *args, **kwargs: functools.reduce(
            lambda value, f: f(value), steps[1:], steps[0](*args, **kwargs)
        )
    if not isinstance(function, types.FunctionType):
        return function
    if function in inside:
        if reason := impure(function):  # it would find the arrays themselves
            raise refuse(reason)
        return function
    # a user's globals can change, and arrays are of one run: nothing of them is kept
    if function.__code__.co_filename == COMPILED:
        return _with_adapted(function, inside, constant_of_task)
    return _with_adapted(function, inside) if is_users(function) else function


def _noted(value: Any) -> Any:
    """An array that stays what it is: its values may decide what a program does. Not one of CuPy's:
    Dask gives these to say what to make, and to look at them is to wait for a device."""
    beside = current.get().beside
    if type(value) is np.ndarray and value.size and beside is not None:
        beside.left.append(value)
    return value


def _beside(value: Any) -> Any:
    """What a function that is followed finds in a variable outside itself."""
    if is_array(value) and current.get().beside is not None:
        return read_beside(value)
    return value


class _Within:
    """A module as a function that is followed finds it."""

    def __init__(self, module: types.ModuleType, other: Callable[[Any], Any]):
        self._module, self._other = module, other

    def __getattr__(self, name: str) -> Any:
        value = self._other(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _is_theirs_alone(module: types.ModuleType) -> bool:
    """Whether a module is of a library whose functions do not call what users have made."""
    return root_of(module) in {*TRUSTED, "dask", "scipy"}


def _with_adapted(
    function: types.FunctionType,
    inside: tuple[Any, ...],
    array: Callable[[Any], Any] = _beside,
) -> Any:
    """A copy that finds adapted functions under its global names, and what stands for arrays."""

    asks = "type" in looked_up(function.__code__)  # whether it may ask what is of just this type

    def other(value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            known = in_numpy(value)
            return known if known is not value or _is_theirs_alone(value) else _Within(value, other)
        if value is complex and current.get().points and not asks:
            return Complex
        if callable(value) and not isinstance(value, type):
            return adapted(value, (*inside, function))
        if type(value) is tuple and any(map(callable, value)):
            return tuple(map(other, value))
        return array(value)

    copy = replaced(function, other)
    if copy.__defaults__:
        copy.__defaults__ = tuple(map(other, copy.__defaults__))
    if copy.__kwdefaults__:
        copy.__kwdefaults__ = {k: other(v) for k, v in copy.__kwdefaults__.items()}
    return copy


# ------------------------------------------------------------------------------------------------
# Kernels.


@dataclass
class _Group:
    """What becomes one kernel."""

    depth: int  # it runs after all of lesser depth
    order: int  # and, of equal depth, after those of lesser order
    shape: Shape  # of the iteration space
    axes: Shape  # reduced; () for one that goes element by element
    reductions: list[Reduction] = field(default_factory=list)
    outputs: list[Expr] = field(default_factory=list)
    start: int = 0  # the number of its first output
    scans: bool = False  # along its axes, which are kept

    @property
    def kept(self) -> Shape:
        if self.scans:
            return self.shape
        return tuple(n for k, n in enumerate(self.shape) if k not in self.axes)

    @property
    def place(self) -> tuple[int, int]:
        return self.depth, self.order


class _Assembly:
    """Puts the arrays that a function made, and its results, into kernels.

    Each array has a home, a group. A reduction's group is all reductions over the same axes of the
    same shape that can run at the same time; scans are apart. What is computed from a group's
    results point for point is computed in that group too, at its end; all else element by element,
    in later groups.
    """

    def __init__(self, following: Following):
        self.following = following
        self.inputs = following.inputs
        self.groups: dict[tuple[int, Shape, Shape, Any], _Group] = {}
        self.home: dict[int, _Group] = {}  # of each array made that is used
        self.body: dict[int, Expr] = {}  # what it is computed from
        self.numbers: dict[int, int] = {}  # array made -> array number of the program

    def program(self, result: Any) -> Program:
        outputs: list[Traced] = []
        if isinstance(result, Selected):
            raise self._only_selects(result)

        def noted(value: Any) -> Any:
            if isinstance(value, Selected):
                raise Unfollowed("it gives what a mask selects among other values")
            if isinstance(value, np.ndarray):
                value = traced(value)
            if isinstance(value, Traced):
                outputs.append(value)
            return value

        result = map_leaves(noted, result)
        if not outputs:
            raise Unfollowed("it computes no array")
        if all(o._expr.op == "input" and o._expr.data[0] < MADE for o in outputs):
            raise OnlyView(map_leaves(self._as_seen, result), self._program(result, outputs))
        return self._program(result, outputs)

    def _program(self, result: Any, outputs: list[Traced]) -> Program:
        exprs = [_canonically(o._expr, o.shape) for o in outputs]
        self._settle(exprs)
        homes = self._homes(exprs, [o.shape for o in outputs])
        numbers = iter(self._number(exprs, homes, [o.shape for o in outputs]))
        kernels = tuple(self._kernel(g) for g in self._ordered())
        if len(nodes([r for k in kernels for r in k.roots])) > MOST_NODES:
            raise Unfollowed(f"it does more than {MOST_NODES} operations")

        def named(value: Any) -> Any:
            if isinstance(value, Traced):
                return Out(next(numbers), value.shape, value._scalar and not value.shape)
            return value

        return Program(self.inputs, kernels, map_leaves(named, result))

    def _only_selects(self, result: Selected) -> Unfollowed:
        values, mask = result._values, result._mask
        if values.shape == mask.shape == (1,) and made_in(mask._expr):
            return OneOrNone(self._program((values, mask), [values, mask]))
        if made_in(values._expr) or made_in(mask._expr):
            return Unfollowed("it selects by a mask from what it has reduced or copied")
        shape, dtype, over = values.shape, values.dtype, mask.shape
        return OnlySelects(Masked(shape, dtype, values._expr, mask._expr, over, result._axis))

    def _as_seen(self, value: Any) -> Any:
        if not isinstance(value, Traced):
            return value
        number, view = value._expr.data
        copied = not any(value._family is given for given in self.following.given)
        return Seen(number, view, value.shape, value.dtype, copied)

    def _array(self, number: int) -> Stage | Result:
        return self.following.made[number - MADE]

    def _group(self, depth: int, shape: Shape, axes: Shape = (), alone: Any = None) -> _Group:
        key = (depth, shape, axes, alone)
        if key not in self.groups:
            self.groups[key] = _Group(depth, len(self.groups), shape, axes)
        return self.groups[key]

    def _settle(self, outputs: list[Expr]) -> None:
        """Finds the home of every array that is used, those it reads first."""
        used: set[int] = set()
        left = [m for e in outputs for m in made_in(e)]
        while left:
            number = left.pop()
            if number in used:
                continue
            used.add(number)
            array = self._array(number)
            over = array.over if isinstance(array, Result) else array.shape
            self.body[number] = _canonically(array.roots[0], over)
            left += made_in(self.body[number])
        for number in sorted(used):  # an array is made after those that it reads
            array = self._array(number)
            if isinstance(array, Stage):
                self.home[number] = self._home(self.body[number], array.shape)
                continue
            depth = max([self.home[m].depth for m in made_in(self.body[number])], default=0)
            reduction = self._reduction(number)
            scans = reduction.op in SCANS
            alone = reduction if reduction.op == "histogram" else scans
            self.home[number] = group = self._group(depth + 1, array.over, array.axes, alone)
            group.scans = scans
            if reduction not in group.reductions:
                group.reductions.append(reduction)

    def _reduction(self, number: int) -> Reduction:
        array = self._array(number)
        assert isinstance(array, Result)
        return Reduction(array.reduction.op, self.body[number], array.reduction.dtypes)

    def _home(self, expr: Expr, shape: Shape) -> _Group:
        """Where an expression over `shape` is computed."""
        made = made_in(expr)
        if not made:
            return self._group(1, shape)
        latest = max((self.home[m] for m in made), key=lambda g: g.place)
        if latest.axes and squeezed(shape) == squeezed(latest.kept):
            own = [n for n in nodes((expr,)) if n.op == "input" and n.data[0] in made
                   and self.home[n.data[0]] is latest]  # fmt: skip
            if all(is_contiguous(n.data[1], shape) for n in own):
                return latest
        return self._group(latest.depth + 1, shape)

    def _homes(self, exprs: list[Expr], shapes: list[Shape]) -> list[_Group | None]:
        """The group that computes each output; None for one that is an array made."""
        homes: list[_Group | None] = []
        for expr, shape in zip(exprs, shapes, strict=True):
            whole = expr.op == "input" and expr.data[0] >= MADE
            whole = whole and math.prod(self._array(expr.data[0]).shape) == math.prod(shape)
            whole = whole and is_contiguous(expr.data[1], shape)
            homes.append(None if whole else self._home(expr, shape))
        used = [*self.home.values(), *[h for h in homes if h is not None]]
        for k, (home, expr, shape) in enumerate(zip(homes, exprs, shapes, strict=True)):
            if home is None or home.axes:
                continue
            # beside others of its shape: what both read is read once
            small = squeezed(shape)
            beside = [g for g in used if not g.axes and squeezed(g.shape) == small]
            if not any(n.op in ("input", "index") for n in nodes((expr,))):
                beside += [g for g in used if g.axes and squeezed(g.kept) == small]
            homes[k] = max(beside, key=lambda g: (bool(g.axes), g.place))
        return homes

    def _number(
        self, exprs: list[Expr], homes: list[_Group | None], shapes: list[Shape]
    ) -> list[int]:
        """Fills each group's outputs; gives the array number of each output of the program."""
        readers = [(self.body[m], None if self._is_result(m) else g) for m, g in self.home.items()]
        readers += [(e, h) for e, h in zip(exprs, homes, strict=True)]
        needed = {m for e, g in readers for m in made_in(e) if self.home[m] is not g}
        count = self.inputs
        at: list[int | None] = [None] * len(exprs)
        for group in sorted(self.groups.values(), key=lambda g: g.place):
            wanted: dict[Expr, int] = {}
            for number in sorted(m for m in needed if self.home[m] is group):
                array = self._array(number)
                view = View.contiguous(array.shape)
                body = self.body[number]
                dtype = body.dtype
                if isinstance(array, Result):
                    dtype = array.reduction.dtypes[array.which]
                leaf = node_of("input", (), dtype, (number, canonical(view, array.shape)))
                built = self._built(leaf, array.shape, group)
                self.numbers[number] = count + wanted.setdefault(built, len(wanted))
            for k, home in enumerate(homes):
                if home is group:
                    built = self._built(exprs[k], shapes[k], group)
                    at[k] = count + wanted.setdefault(built, len(wanted))
            group.outputs = list(wanted)
            count += len(wanted)
        return [self.numbers[e.data[0]] if n is None else n for e, n in zip(exprs, at, strict=True)]

    def _is_result(self, number: int) -> bool:
        return isinstance(self._array(number), Result)

    def _built(self, expr: Expr, shape: Shape, group: _Group) -> Expr:
        """An output of a group, over the axes that it keeps."""
        memo: dict[Expr, Expr] = {}

        def put(old: Expr) -> Expr:
            view = view_of(old)
            if view is None:
                return old
            if old.op == "input" and (number := old.data[0]) >= MADE:
                array = self._array(number)
                if self.home[number] is group and isinstance(array, Result):
                    which = group.reductions.index(self._reduction(number))
                    return node_of("reduced", (), old.dtype, (which, array.which))
                if self.home[number] is group:
                    return self._built(self.body[number], array.shape, group)
                old = Expr("input", (), old.dtype, (self.numbers[number], view))
            leaf = with_view(old, view_over(view, shape, group.kept))
            return node_of(leaf.op, (), leaf.dtype, leaf.data)

        def changed(leaf: Expr) -> Expr:
            if leaf not in memo:
                memo[leaf] = put(leaf)
            return memo[leaf]

        return _grafted(expr, changed)

    def _ordered(self) -> list[_Group]:
        used = [g for g in self.groups.values() if g.outputs]
        return sorted(used, key=lambda g: g.place)

    def _kernel(self, group: _Group) -> Kernel:
        def numbered(leaf: Expr) -> Expr:
            if leaf.op == "input" and leaf.data[0] >= MADE:
                return node_of("input", (), leaf.dtype, (self.numbers[leaf.data[0]], leaf.data[1]))
            return leaf

        reductions = [
            Reduction(r.op, with_leaves(r.arg, numbered), r.dtypes) for r in group.reductions
        ]
        return Kernel(group.shape, tuple(group.outputs), tuple(reductions), group.axes)


def _canonically(expr: Expr, shape: Shape) -> Expr:
    return reviewed(expr, lambda view: canonical(view, shape))


def _grafted(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The tree with whole trees in place of leaves."""
    new: dict[int, Expr] = {}
    for old in nodes((expr,)):
        if old.op in LEAVES:
            new[id(old)] = change(old)
        else:
            args = tuple([new[id(a)] for a in old.args])
            new[id(old)] = node_of(old.op, args, old.dtype, old.data)
    return new[id(expr)]
