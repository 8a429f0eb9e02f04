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

import builtins
import cmath
import functools
import itertools
import math
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from dask.array import chunk as dask_chunk
from dask.array import reductions as dask_reductions
from dask.array import wrap as dask_wrap
from dask.array.dispatch import numel_lookup
from dask.array.optimization import GETTERS
from dask.core import flatten
from dask.utils import apply as dask_apply
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple
from numpy.lib.mixins import NDArrayOperatorsMixin

from . import takes
from .bins import Bins, compared
from .expr import (
    LEAVES,
    RANDOM,
    REDUCTIONS,
    SCANS,
    DType,
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
    abstract_of,
    canonical,
    cast_to,
    checked,
    constant,
    current,
    is_contiguous,
    is_other,
    made_in,
    no_out,
    node_of,
    nothing,
    refuse,
    reviewed,
    squeezed,
    view_over,
    viewed,
    with_leaves,
)
from .reading import (
    CALLED,
    CONVERTING,
    CUPY,
    KNOWN,
    KNOWN_CURRIED,
    LIKE,
    NUMPY,
    OF_NUMBERS,
    TRUSTED,
    impure,
    in_numpy,
    in_place_of,
    instead_of,
    is_array,
    is_curried,
    is_nothing,
    is_plain,
    is_users,
    looked_up,
    replaced,
    root_of,
    scipy_special,
    words,
)
from .regions import settled
from .scans import BOTH, parts
from .sizes import map_leaves
from .subgraph import COMPILED

MOST_PARTS = 64  # of a concatenation
SHORT = 16  # elements of a row of arrays side by side, to be reduced one by one
FEW = 64  # elements that are put side by side, to be reduced one by one
#: Scans, by the function of two that does what they do.
ACCUMULATED = {BOTH[op]: scan for scan, op in SCANS.items()}
#: What reduces two elements.
ADDED_UP = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "any": np.logical_or, "all": np.logical_and,
}  # fmt: skip
#: SciPy's functions that have a name in an expression.
SPECIAL = words("erf erfc erfinv erfcinv gamma gammaln ndtr ndtri expit logit i0 i1 j0 j1 y0 y1")
NUMPY_ALSO = frozenset({"exp2", "expm1", "log1p", "cbrt"})  # SciPy's ufuncs that are NumPy's too


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
        return _input(value)
    if isinstance(value, Generated):
        array = Traced(with_leaves(value.expr, lambda leaf: leaf), tuple(value.shape))
        if isinstance(value, Scanned):
            return _scan(value.op, array, value.axis, value.dtype)
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
    return _read_beside(value)


def _look(x: Traced, how: Callable[[Any], Any]) -> Traced:
    """`how(x)` for a NumPy function `how` that gives a view."""
    _, shape = viewed(View(0, (0,) * x.ndim), x.shape, how)
    expr = reviewed(x._expr, lambda view: viewed(view, x.shape, how)[0])
    return Traced(expr, shape, of=x)


def _kept(x: Traced) -> Traced:
    """The same values, as an array that a kernel writes. To NumPy it is still the same array."""
    return Traced(current.get().keep(Stage(x.shape, x._expr), x.dtype), x.shape, of=x)


def _broadcast(x: Traced, shape: Shape) -> Traced:
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if np.broadcast_shapes(x.shape, shape) != shape:
        raise ValueError(f"shape {x.shape} cannot be broadcast to {shape}")
    if x._expr.op not in LEAVES and math.prod(shape) > x.size and made_in(x._expr):
        x = _kept(x)  # computed once for each of its own elements
    before = (0,) * (len(shape) - x.ndim)
    spread = [n == 1 and m != 1 for n, m in zip(x.shape, shape[len(before) :], strict=True)]

    def change(view: View) -> View:
        own = (0 if s else stride for s, stride in zip(spread, view.strides, strict=True))
        return View(view.offset, (*before, *own))

    return Traced(reviewed(x._expr, change), shape, of=x)


def _reshape(x: Traced, shape: Any, order: str = "C") -> Traced:
    if order not in ("C", "F"):
        if order in ("A", "K") and x.ndim < 2:
            order = "C"
        else:
            raise refuse(f"it reshapes in order {order!r}")
    wanted = shape if isinstance(shape, tuple | list) else (shape,)
    _, full = viewed(View.contiguous(x.shape), x.shape, lambda a: a.reshape(wanted, copy=False))
    if full == x.shape:
        return Traced(x._expr, x.shape, of=x)

    def how(a: Any) -> Any:
        return a.reshape(full, order=order, copy=False)

    try:
        return _look(x, how)
    except ValueError:  # NumPy would copy; so does a kernel
        if order == "F":
            return _kept(x.T).reshape(full[::-1]).T
        return _look(_kept(x), how)


# ------------------------------------------------------------------------------------------------
# The arrays.

#: What is called for NumPy's functions of arrays, and for methods of its ufuncs.
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
METHODS: dict[str, Callable[..., Any]] = {}


def _implements(*names: str) -> Callable[[Any], Any]:
    """Enters a function under NumPy's names, as far as this NumPy has them."""

    def enter(function: Any) -> Any:
        for name in names:
            place: Any = np
            for word in name.split("."):
                place = getattr(place, word, None)
            if place is not None:
                FUNCTIONS[place] = function
        return function

    return enter


class Traced(NDArrayOperatorsMixin):
    """An array known by the expression of its elements. It behaves as a NumPy array does, as far
    as that needs no values."""

    __array_priority__ = 1e6
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr, shape: Shape, scalar: bool = False, of: Traced | None = None):
        self._expr = expr
        self.shape = shape
        self._scalar = scalar  # NumPy would give a scalar
        #: Whoever shares memory with this one in NumPy: what is written to one is seen by all.
        self._family: list[weakref.ref[Traced]] = [] if of is None else of._family
        self._family.append(weakref.ref(self))
        #: What this is a part of, and by which index: `y[1:] += 1` writes through it.
        self._part_of: tuple[Traced, tuple[Any, ...]] | None = None

    # what it is

    @property
    def dtype(self) -> DType:
        return self._expr.dtype

    @property
    def flags(self) -> SimpleNamespace:
        """Dask copies small parts of arrays that do not own their data."""
        return SimpleNamespace(owndata=self._family[0]() is self)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __repr__(self) -> str:
        if current.get(None) is not None:
            raise refuse("it needs the values of an array (as text)")
        return f"<Traced {self.dtype} {self.shape}>"

    def __getattr__(self, name: str) -> Any:
        """Of what arrays have and this has not: whoever asks for it would be told that they have
        not, too."""
        if not name.startswith("_") and any(hasattr(k, name) for k in _array_classes()):
            raise refuse(f"it reads .{name} of an array")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Traced]:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        if len(self) > MOST_PARTS:
            raise refuse(f"it iterates over {len(self)} elements of an array")
        return iter([self[i] for i in range(len(self))])

    # values, which it has not

    def _value(self, what: str) -> Any:
        if self._expr.op == "constant" and self.size == 1:
            return self._expr.value
        raise refuse(f"it needs the values of an array ({what})")

    def __bool__(self) -> bool:
        return bool(self._value("bool or if"))

    def __int__(self) -> int:
        return int(self._value("int"))

    def __float__(self) -> float:
        return float(self._value("float"))

    def __complex__(self) -> complex:
        return complex(self._value("complex"))

    def __index__(self) -> int:
        return operator.index(self._value("as an index"))

    def item(self, *args: Any) -> Any:
        return self._value("item").item()

    def tolist(self) -> Any:
        raise refuse("it needs the values of an array (tolist)")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise refuse("it needs the values of an array (as a NumPy array)")

    # protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(i, Selected) for i in inputs):  # which knows what to do with arrays
            return NotImplemented
        if method == "__call__":
            return _ufunc(ufunc, inputs, **kwargs)
        name = ufunc.__name__
        if method == "reduce" or (method == "accumulate" and name in ACCUMULATED):
            return METHODS[method](ufunc, *inputs, **kwargs)
        if method == "outer" and len(inputs) == 2 and not kwargs:
            a, b = (_array(i) for i in inputs)
            return _ufunc(ufunc, (a.reshape(a.shape + (1,) * b.ndim), b))
        raise refuse(f"numpy.{name}.{method} is not element-wise or a reduction")

    def __array_function__(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        if any(issubclass(t, Selected) for t in _types):
            return NotImplemented
        known = FUNCTIONS.get(func)
        if known is None:
            module = getattr(func, "__module__", None) or "numpy"
            raise refuse(f"{module}.{func.__name__} is not element-wise or a reduction")
        return known(*args, **kwargs)

    # operators that NumPy treats apart

    def __pow__(self, other: Any) -> Any:
        if self._scalar and self.dtype == bool:  # which NumPy gives the type of `other`
            return np.power(self, other)
        if type(other) is int and (other == 2 or (other == -1 and self.dtype.kind in "fc")):
            return np.square(self) if other == 2 else np.reciprocal(self)
        if type(other) is float and other == 0.5 and self.dtype.kind in "fc":
            return np.sqrt(self)
        return np.power(self, other)

    def __ipow__(self, other: Any) -> Any:
        return _written(self, self**other)

    # elements

    def __getitem__(self, index: Any) -> Traced:
        if (selected := _selected(self, index)) is not None:
            return cast(Traced, selected)  # it stands for an array, too
        index = _basic(index)
        # with an Ellipsis NumPy gives a view always, and never reads
        out = _look(self, lambda a: a[index if ... in index else (*index, ...)])
        if (last := _last_of_scan(self, out)) is not None:
            out = Traced(last, out.shape, of=self)
        if not out.shape and ... not in index:
            return Traced(out._expr, (), True)
        out._part_of = (self, index)
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, Traced) and value._part_of is not None:
            whole, place = value._part_of
            if whole is self and not isinstance(index, Traced) and place == _basic(index):
                return  # written already
        if isinstance(value, Selected):
            _write(self, _put_back(self, index, value))
            return
        # as NumPy says: a number of Python's that the type cannot hold is an error
        new = _array(value, self.dtype if type(value) in (int, float, complex) else None)
        part = Traced(cast_to(new._expr, self.dtype), new.shape)
        if isinstance(index, Traced) and index.dtype == bool:
            if part.size != 1 or index.shape != self.shape[: index.ndim]:
                raise refuse("it assigns an array through a mask")
            mask = index.reshape(index.shape + (1,) * (self.ndim - index.ndim))
            part = _reshape(part, ())
            _write(self, _where(mask, part, self))
            return
        _write(self, _assigned(self, _basic(index), part))

    @property
    def T(self) -> Traced:
        return self.transpose()

    @property
    def mT(self) -> Traced:
        return self.swapaxes(-1, -2)

    @property
    def real(self) -> Traced:
        if self.dtype.kind != "c":
            return self
        return _part("real", self)

    @property
    def imag(self) -> Traced:
        if self.dtype.kind != "c":
            return Traced(constant(0, self.dtype), self.shape)
        return _part("imag", self)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = "unsafe", subok: bool = True,
        copy: bool = True,
    ) -> Traced:  # fmt: skip
        dtype = checked(dtype)
        if not np.can_cast(self.dtype, dtype, casting):
            raise TypeError(f"Cannot cast array data from {self.dtype} to {dtype}")
        if not copy and dtype == self.dtype:
            return self
        return Traced(cast_to(self._expr, dtype), self.shape, self._scalar)

    def copy(self, order: str = "C") -> Traced:
        return Traced(self._expr, self.shape, self._scalar)

    def __copy__(self) -> Traced:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Traced:
        return self.copy()

    def fill(self, value: Any) -> None:
        self[...] = value

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> Traced:
        wanted = shape[0] if len(shape) == 1 else shape
        return _reshape(self, wanted, order)

    def ravel(self, order: str = "C") -> Traced:
        return _reshape(self, (-1,), order)

    def flatten(self, order: str = "C") -> Traced:
        return self.ravel(order).copy()

    def transpose(self, *axes: Any) -> Traced:
        if self._scalar:
            return self
        return _look(self, lambda a: a.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> Traced:
        return _look(self, lambda x: x.swapaxes(a, b))

    def squeeze(self, axis: Any = None) -> Traced:
        view = _look(self, lambda a: a.squeeze(axis))
        return self if view.shape == self.shape else view

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Traced:
        return _look(self, lambda a: a.diagonal(offset, axis1, axis2))

    def conj(self) -> Any:
        return np.conjugate(self) if self.dtype.kind == "c" else self

    conjugate = conj

    # reductions

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.sum](self, *args, **kwargs)

    def prod(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.prod](self, *args, **kwargs)

    def min(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.min](self, *args, **kwargs)

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.max](self, *args, **kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.any](self, *args, **kwargs)

    def all(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.all](self, *args, **kwargs)

    def argmin(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.argmin](self, *args, **kwargs)

    def argmax(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.argmax](self, *args, **kwargs)

    def cumsum(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.cumsum](self, *args, **kwargs)

    def cumprod(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.cumprod](self, *args, **kwargs)

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.mean](self, *args, **kwargs)

    def var(self, *args: Any, **kwargs: Any) -> Any:
        return FUNCTIONS[np.var](self, *args, **kwargs)

    def std(self, *args: Any, **kwargs: Any) -> Any:
        return np.sqrt(FUNCTIONS[np.var](self, *args, **kwargs))

    def round(self, decimals: int = 0, out: Any = None) -> Any:
        no_out(out)
        return _round(self, decimals)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **kwargs: Any) -> Any:
        no_out(out, kwargs)
        return _clip(self, min, max)

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
        return self.diagonal(offset, axis1, axis2).sum(-1, dtype=dtype)

    def dot(self, other: Any) -> Any:
        return FUNCTIONS[np.dot](self, other)


#: Bytes of an array that a function makes from nothing and computes with.
MOST_OWN = 2**20


def _input(known: Abstract) -> Traced:
    """The next input of the function."""
    following = current.get()
    number, following.inputs = following.inputs, following.inputs + 1
    dtype = checked(known.dtype)
    view = View.contiguous(known.shape)
    if known.strides is not None:
        view = View(0, tuple(known.strides))
    array = Traced(node_of("input", (), dtype, (number, view)), tuple(known.shape))
    following.given.append(array._family)
    return array


def _read_beside(array: Any, own: bool = False) -> Traced:
    """What stands for an array that is no argument. It is read when the task runs, but for the
    function's `own`, which is now as it will be then."""
    beside = current.get().beside
    assert beside is not None
    word: Any = id(array)
    if own and array.nbytes > MOST_OWN:
        raise refuse(f"it makes an array of {array.nbytes:,} bytes")
    if own:
        word = array.dtype, array.shape, array.tobytes()
    if word not in beside.known:
        like = abstract_of(array)
        if like is None:
            raise refuse(f"it reads an array of {array.dtype}")
        if own or (beside.dense and type(array) is np.ndarray):
            like = Abstract(array.shape, array.dtype)
        made = _input(like)
        beside.known[word] = made, made._expr
        beside.arrays.append(array)
        beside.expected.append(like)
    return beside.known[word][0]


def _array(value: Any, dtype: Any = None) -> Traced:
    """An operand as a traced array: constants become one, an array with values cannot."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, np.generic | bool | int | float | complex):
        dtype = dtype or np.asarray(value).dtype
        return Traced(constant(value, dtype), (), True)
    if isinstance(value, np.ndarray):
        if value.size == 0:
            return Traced(constant(0, value.dtype), value.shape)
        first = value[(0,) * value.ndim]
        if all(n == 1 or s == 0 for n, s in zip(value.shape, value.strides, strict=True)):
            return Traced(constant(first, value.dtype), value.shape)
        if (beside := current.get().beside) is not None:
            beside.wanted = True
        raise refuse("it uses an array that is neither an input nor computed from one")
    if isinstance(value, list | tuple) and value and all(isinstance(v, Traced) for v in value):
        return cast(Traced, FUNCTIONS[np.concatenate]([_look(v, lambda a: a[None]) for v in value]))
    raise refuse(f"it computes with a {type(value).__module__}.{type(value).__qualname__}")


def _lifted(value: Any, like: DType) -> Traced:
    """`value`, a Python number in the type of what it meets, as NumPy's promotion has it."""
    if type(value) in (int, float, complex):
        return _array(value, np.result_type(like, type(value)(0)))
    return _array(value)


def _basic(index: Any) -> tuple[Any, ...]:
    """An index that gives a view, as a tuple; the numbers in it as ints."""

    def one(i: Any) -> Any:
        if i is None or i is ...:
            return i
        if isinstance(i, slice):
            return slice(*[None if v is None else operator.index(v) for v in _ends(i)])
        if isinstance(i, bool | np.bool_):
            raise refuse("it indexes with True or False")
        if isinstance(i, str):
            raise refuse("it reads a field of records")
        if isinstance(i, Traced) and i._expr.op != "constant":
            raise refuse("it indexes with an array")
        if isinstance(i, list | tuple | np.ndarray) and np.ndim(i):
            raise refuse("it indexes with an array")
        return operator.index(i)

    return tuple(one(i) for i in (index if isinstance(index, tuple) else (index,)))


def _ends(s: slice) -> tuple[Any, Any, Any]:
    return s.start, s.stop, s.step


# ------------------------------------------------------------------------------------------------
# Writing: the name is bound to a new expression, as long as nobody else would see it.


def _write(x: Traced, value: Traced) -> None:
    whole, place = x._part_of or (None, ())
    others = [r() for r in x._family]
    if any(o is not None and o is not x and o is not whole for o in others):
        raise refuse("it writes into an array of which there are views")
    if value.shape != x.shape:
        value = _broadcast(value, x.shape)
    value = Traced(cast_to(value._expr, x.dtype), x.shape)
    if whole is not None:
        if whole._part_of is not None:
            raise refuse("it writes into a view of a view")
        whole._expr = _assigned(whole, place, value)._expr
    x._expr = value._expr


def _written(x: Traced, value: Any) -> Any:
    """`x` after an in-place operation; a scalar is replaced, as in NumPy, and so is a point of a
    mesh, which is a number."""
    value = _array(value)
    if x._scalar or current.get().points:
        return value
    if not np.can_cast(value.dtype, x.dtype, "same_kind"):
        raise TypeError(f"Cannot cast ufunc output from {value.dtype} to {x.dtype}")
    if value.shape != x.shape:
        raise ValueError(f"non-broadcastable output operand with shape {x.shape}")
    _write(x, value)
    return x


def _axis_index(shape: Shape, axis: int) -> Expr:
    """The position along one axis, over `shape`."""
    strides = tuple(int(k == axis) for k in range(len(shape)))
    return node_of("index", (), np.int64, View(0, strides))


def _apply(ufunc: Any, *args: Any) -> Expr:
    """A node of a ufunc for int64 or bool arguments that need no promotion."""
    exprs = tuple(a if isinstance(a, Expr) else constant(a, np.int64) for a in args)
    dtypes = ufunc.resolve_dtypes((*[e.dtype for e in exprs], None))
    return node_of(ufunc.__name__, exprs, dtypes[-1])


def _assigned(x: Traced, index: tuple[Any, ...], value: Traced) -> Traced:
    """`x` after `x[index] = value`: value where the index points, shifted to where it belongs."""
    # the index, with one entry for each axis of x
    given = [i for i in index if i is not None and i is not ...]
    if any(i is None for i in index):
        raise refuse("it assigns through an index with None")
    here = index.index(...) if ... in index else len(index)
    rest = [slice(None)] * (x.ndim - len(given))
    entries = [*index[:here], *rest, *index[here + 1 :]]
    if len(entries) != x.ndim:
        raise IndexError(f"too many indices for an array of {x.ndim} dimensions")
    _, target = viewed(
        View(0, (0,) * x.ndim),
        x.shape,
        lambda a: a[(*index, ...)[: len(index) + (... not in index)]],
    )
    while value.ndim > len(target) and value.shape[0] == 1:
        value = value[0]
    value = _broadcast(value, target)
    condition: Expr | None = None
    moves: list[tuple[int, int] | None] = []  # (start, step) of each axis; None: an int

    def also(more: Expr) -> None:
        nonlocal condition
        condition = more if condition is None else _apply(np.logical_and, condition, more)

    for axis, (entry, length) in enumerate(zip(entries, x.shape, strict=True)):
        i = _axis_index(x.shape, axis)
        if not isinstance(entry, slice):
            at = normalize_axis_index(entry, length)
            if length > 1:
                also(_apply(np.equal, i, at))
            moves.append(None)
            continue
        points = range(length)[entry]
        moves.append((points.start, points.step))
        if len(points) == length:
            continue
        if not points:
            return x.copy()
        low, high = min(points[0], points[-1]), max(points[0], points[-1])
        if low > 0:
            also(_apply(np.greater_equal, i, low))
        if high < length - 1:
            also(_apply(np.less_equal, i, high))
        if abs(points.step) > 1:
            offset = _apply(np.subtract, i, low) if low else i
            also(_apply(np.equal, _apply(np.remainder, offset, abs(points.step)), 0))

    def change(view: View) -> View:
        offset, strides, own = view.offset, [], iter(view.strides)
        for move in moves:
            if move is None:
                strides.append(0)
                continue
            stride, (start, step) = next(own), move
            if stride % step:
                raise refuse("it assigns to every n-th element")
            strides.append(stride // step)
            offset -= stride // step * start
        return View(offset, tuple(strides))

    placed = Traced(reviewed(value._expr, change), x.shape)
    if condition is None:
        return placed
    return _where(Traced(condition, x.shape), placed, x)


# ------------------------------------------------------------------------------------------------
# Element by element.


def _ufunc(
    ufunc: Any, inputs: Sequence[Any], out: Any = None, where: Any = True, dtype: Any = None,
    casting: Any = "same_kind", signature: Any = None, order: Any = "K", subok: Any = True,
) -> Any:  # fmt: skip
    name = "matmul" if ufunc is np.matmul else _name_of(ufunc)
    if signature is not None:
        raise refuse(f"it gives {name} a signature")
    if ufunc is np.matmul:
        no_out(out, {"dtype": dtype})
        return FUNCTIONS[np.matmul](*inputs)
    if name in ("divmod", "modf"):
        no_out(out, {"dtype": dtype, "where": where if where is not True else None})
        return _divmod(*inputs) if name == "divmod" else _modf(*inputs)
    if ufunc.nout != 1:
        raise refuse(f"numpy.{name} has more than one result")
    value = _elementwise(ufunc, name, inputs, dtype, casting)
    if isinstance(out, tuple):
        (out,) = out
    if out is ...:
        out, value = None, Traced(value._expr, value.shape)
    if out is not None and not isinstance(out, Traced):
        raise refuse("it writes into an array that it is given (out=)")
    if where is not True:
        if out is None:
            out = Traced(constant(0, value.dtype), value.shape)
        elif not np.can_cast(value.dtype, out.dtype, "same_kind"):
            raise TypeError(f"Cannot cast ufunc output from {value.dtype} to {out.dtype}")
        value = _where(where, value.astype(out.dtype), out)
    if out is None:
        return value
    if casting == "unsafe" and not out._scalar:
        value = value.astype(out.dtype)
    return _written(out, value)


def _name_of(ufunc: Any) -> str:
    """The name that an expression has for a ufunc of NumPy or SciPy."""
    name = str(ufunc.__name__)
    if getattr(ufunc, "signature", None) is not None:
        raise refuse(f"numpy.{name} is not element-wise or a reduction")
    if getattr(np, name, None) is ufunc:
        return name
    if ufunc is _CLIP:
        return "clip"
    if name in SPECIAL | NUMPY_ALSO and isinstance(ufunc, np.ufunc) and _is_scipy(ufunc, name):
        return name
    raise refuse(f"{name} is not one of NumPy's element-wise functions")


def _is_scipy(ufunc: Any, name: str) -> bool:
    special = sys.modules.get("scipy.special")
    return special is not None and getattr(special, name, None) is ufunc


_CLIP = getattr(getattr(np, "_core", np), "umath", None)
_CLIP = getattr(_CLIP, "clip", None)


def _elementwise(
    ufunc: Any, name: str, inputs: Sequence[Any], dtype: Any = None, casting: Any = "same_kind"
) -> Traced:
    weak = [type(a) if type(a) in (int, float, complex) else None for a in inputs]
    arrays = [None if w else _array(a) for w, a in zip(weak, inputs, strict=True)]
    kinds = [w or a.dtype for w, a in zip(weak, arrays, strict=True)]  # type: ignore[union-attr]
    signature = (*[None] * len(kinds), None if dtype is None else np.dtype(dtype))
    dtypes = ufunc.resolve_dtypes((*kinds, None), signature=signature, casting=casting)
    for d in dtypes:
        checked(d)
    shape = np.broadcast_shapes(*[a.shape for a in arrays if a is not None])
    exprs: list[Expr] = []
    for array, value, d in zip(arrays, inputs, dtypes, strict=False):
        if array is not None:
            exprs.append(cast_to(_broadcast(array, shape)._expr, d))
            continue
        try:
            exprs.append(constant(value, d))
        except OverflowError:
            if name not in _COMPARE or len(inputs) != 2:
                raise
            # an int that the type cannot hold: every comparison with it has one answer
            probe = [np.zeros((), a.dtype) if a is not None else v
                     for a, v in zip(arrays, inputs, strict=True)]  # fmt: skip
            return Traced(constant(ufunc(*probe), bool), shape, not shape)
    if all(e.op == "constant" for e in exprs):
        with np.errstate(all="ignore"):
            folded = ufunc(*[e.value for e in exprs], dtype=dtypes[-1] if dtype else None)
        return Traced(constant(folded, dtypes[-1]), shape, not shape)
    return Traced(_operation(name, exprs, dtypes[-1]), shape, not shape)


_COMPARE = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})


def _operation(name: str, exprs: list[Expr], dtype: Any) -> Expr:
    """A node, or what NumPy's loop for these arguments does in other words."""
    if name == "clip":
        x, low, high = exprs
        if low.op == high.op == "constant" and low.value == low.value and high.value == high.value:
            # bounds that are the same for all keep the sign of zero
            for bound, beyond in ((low, "less"), (high, "greater")):
                over = node_of(beyond, (x, bound), bool)
                x = node_of("where", (over, bound, x), dtype)
            return x
        return node_of("minimum", (node_of("maximum", (x, low), dtype), high), dtype)
    if name == "power":
        base, exponent = exprs
        if exponent.op == "constant":
            if exponent.dtype.kind == "i" and exponent.value < 0:
                raise ValueError("Integers to negative integer powers are not allowed.")
            if exponent.value == 2 and base.dtype == dtype:
                return node_of("square", (base,), dtype)
        elif exponent.dtype.kind == "i":
            raise refuse("it raises integers to integer powers that may be negative")
    if name == "divide" and _has_exact_inverse(exprs[1]):  # the same bits, and far faster on a GPU
        inverse = constant(1 / exprs[1].value, exprs[1].dtype)
        return node_of("multiply", (exprs[0], inverse), dtype)
    if name == "divide" and _is_one(exprs[0]):
        return node_of("reciprocal", (exprs[1],), dtype)  # the same bits as well
    if name == "positive" or (name == "conjugate" and exprs[0].dtype.kind != "c"):
        return exprs[0]
    return node_of(name, tuple(exprs), dtype)


def _scalar_if_point(x: Traced) -> Traced:
    """What NumPy gives as a scalar when it has no axes."""
    return Traced(x._expr, x.shape, not x.shape)


def _is_one(x: Expr) -> bool:
    return x.op == "constant" and x.dtype.kind == "f" and bool(x.value == 1)


def _has_exact_inverse(divisor: Expr) -> bool:
    """Whether it is a power of two whose inverse is a normal number, too."""
    if divisor.op != "constant" or divisor.dtype.kind != "f":
        return False
    value, least = divisor.value, float(np.finfo(divisor.dtype).smallest_normal)
    fraction, _ = math.frexp(value)
    return abs(fraction) == 0.5 and least <= abs(value) <= 1 / least


def _divmod(a: Any, b: Any) -> tuple[Any, Any]:
    return np.floor_divide(a, b), np.remainder(a, b)


def _modf(x: Any) -> tuple[Any, Any]:
    x = _array(x)
    x = np.positive(x.astype(np.modf.resolve_dtypes((x.dtype, None, None))[0]))
    whole = np.trunc(x)
    part = _where(np.isinf(x), 0.0, np.subtract(x, whole))
    return np.copysign(part, x), whole


def _part(name: str, x: Traced) -> Traced:
    """The real or the imaginary parts of complex numbers: in NumPy a view, so one of the family."""
    dtype = np.zeros((), x.dtype).real.dtype
    if x._expr.op == "constant":
        expr = constant(getattr(x._expr.value, name), dtype)
    else:
        expr = node_of(name, (x._expr,), dtype)
    return Traced(expr, x.shape, x._scalar, of=x)


def _complex(real: Traced, imag: Traced, dtype: DType) -> Traced:
    return Traced(node_of("complex", (real._expr, imag._expr), dtype), real.shape, real._scalar)


def _where(condition: Any, a: Any, b: Any) -> Traced:
    """`numpy.where`: one of two values, in their common type."""
    dtype = np.result_type(*[v.dtype if isinstance(v, Traced) else v for v in (a, b)])
    condition = _array(condition)
    arrays = [_array(v, dtype) if not isinstance(v, Traced) else v for v in (a, b)]
    shape = np.broadcast_shapes(condition.shape, *[v.shape for v in arrays])
    chosen = cast_to(_broadcast(condition, shape)._expr, bool)
    left, right = (cast_to(_broadcast(v, shape)._expr, dtype) for v in arrays)
    if chosen.op == "constant":
        return Traced(left if chosen.value else right, shape)
    if left is right:
        return Traced(left, shape)
    return Traced(node_of("where", (chosen, left, right), dtype), shape)


def _clip(x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = (None if v is nothing else v for v in (low, high))
    low = min if low is None and min is not nothing else low
    high = max if high is None and max is not nothing else high
    if x.dtype.kind in "iu":  # a Python int that the type cannot hold is no bound
        limits = np.iinfo(x.dtype)
        low = None if type(low) is int and low <= limits.min else low
        high = None if type(high) is int and high >= limits.max else high
    if low is None and high is None:
        return Traced(x._expr, x.shape, not x.shape)
    if low is None:
        return np.minimum(x, high)
    if high is None:
        return np.maximum(x, low)
    return _elementwise(_CLIP, "clip", (x, low, high))


def _round(x: Traced, decimals: int = 0) -> Any:
    decimals = operator.index(decimals)  # one of NumPy's would change the type
    if x.dtype.kind == "c":
        return _complex(_round(x.real, decimals), _round(x.imag, decimals), x.dtype)
    if x.dtype.kind == "b":
        if decimals:
            raise refuse("it rounds what is true or false to decimals")
        return _scalar_if_point(x.astype(np.float16))
    if x.dtype.kind in "iu":
        if decimals >= 0:
            return _scalar_if_point(x)
        scale = 10.0**-decimals
        return (np.rint(x / scale) * scale).astype(x.dtype)
    if decimals == 0:
        return np.rint(x)
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return np.rint(x * scale) / scale
    return np.rint(x / scale) * scale


# ------------------------------------------------------------------------------------------------
# Reductions.


def _axes(x: Traced, axis: Any) -> Shape:
    if axis is None or axis is nothing:
        return tuple(range(x.ndim))
    return tuple(sorted(normalize_axis_tuple(axis, x.ndim)))


def _reduce(
    op: str, x: Traced, axes: Shape, dtypes: Sequence[Any], keepdims: Any = False
) -> list[Traced]:
    """The results of one reduction."""
    keep = keepdims is not nothing and bool(keepdims)
    types = tuple(np.dtype(d) for d in dtypes)
    if not axes and op == "prod" and x.dtype.kind == "c":
        raise refuse("it multiplies complex numbers along no axis")  # NumPy's infinities are odd
    if not axes:  # nothing to reduce: each element is its own result
        zero = Traced(constant(0, types[0]), x.shape)
        own = {"argmin": (zero, x), "argmax": (zero, x)}.get(op, (x,))
        if op == "moment":
            own = (x, x - x)  # NaN where x is none that has a distance
        return [_scalar_if_point(v.astype(t)) for v, t in zip(own, types, strict=True)]
    # elsewhere it would be fewer tasks for many threads
    short = current.get().products and current.get().short
    one = short and x.size and op not in ("prod", "histogram")
    if one and all(x.shape[k] == 1 for k in axes):
        # each row is one element
        element = _reshape(x, _reduced_shape(x, axes, False))
        if op == "sum" and x.dtype.kind in "fc":
            element = np.add(element, x.dtype.type(0))  # a sum is never minus zero
        every = _reduce(op, element, (), types)
        shape = _reduced_shape(x, axes, keep)
        return [_reshape(v, shape) for v in every] if keep else every
    if op == "sum" and (total := _counted(x, axes, types[0])) is not None:
        return [_scalar_if_point(_broadcast(total, _reduced_shape(x, axes, keep)))]
    if op in ADDED_UP and (_is_few(x) or (short and _is_short(x, axes))):
        return [_one_by_one(op, x, axes, types[0], keep)]
    results = []
    for which in range(REDUCTIONS[op]):
        result = Result(x.shape, axes, Reduction(op, x._expr, types), which)
        leaf = current.get().keep(result, types[which])
        out = Traced(leaf, result.shape, not result.shape)
        if keep:
            out = _look(out, lambda a: np.expand_dims(a, axes))
        results.append(out)
    return results


def _is_few(x: Traced) -> bool:
    """Whether these are a few results put side by side, as in each step of a tree."""
    expr = x._expr
    while expr.op == "cast":
        (expr,) = expr.args
    return expr.op == "where" and expr.args[0].op == "less" and 0 < x.size <= FEW


def _counted(x: Traced, axes: Shape, dtype: DType) -> Traced | None:
    """The sum of a whole number that is everywhere, as counts of elements are; None where it may
    have to be rounded."""
    expr = x._expr
    if expr.op != "constant" or dtype.kind not in "iuf" or not x.size:
        return None
    value = np.frombuffer(expr.data, expr.dtype)[0]
    if not np.isfinite(value) or value != np.trunc(value):
        return None
    total = int(value) * math.prod(x.shape[k] for k in axes)
    most = np.iinfo(dtype).max if dtype.kind in "iu" else 2 ** (np.finfo(dtype).nmant + 1)
    return Traced(constant(total, dtype), ()) if 0 <= total <= most else None


def _is_short(x: Traced, axes: Shape) -> bool:
    """Whether rows are a few elements of arrays that are side by side along these axes."""
    expr = x._expr
    while expr.op == "cast":
        (expr,) = expr.args
    beside = expr.op == "where" and expr.args[0].op == "less"
    return beside and 0 < math.prod(x.shape[k] for k in axes) <= SHORT


def _one_by_one(op: str, x: Traced, axes: Shape, dtype: DType, keep: bool) -> Traced:
    """A reduction of a few as operations on elements: so one step of a tree may disappear into the
    next. Floating point adds up in double precision, as it does in kernels."""
    wide = dtype
    if op in ("sum", "prod") and dtype.kind in "fc":
        wide = np.dtype(np.float64 if dtype.kind == "f" else np.complex128)
    out: Traced | None = None
    for place in itertools.product(*[range(x.shape[k]) for k in axes]):
        index: list[Any] = [slice(None)] * x.ndim
        for k, i in zip(axes, place, strict=True):
            index[k] = slice(i, i + 1)
        part = _look(x, lambda a, index=tuple(index): a[index])  # type: ignore[misc]
        (expr,) = settled([part._expr], tuple([(0, n) for n in part.shape]))
        part = Traced(cast_to(with_leaves(expr, lambda leaf: leaf), wide), part.shape)
        both = ADDED_UP[op]
        out = part if out is None else _elementwise(both, both.__name__, (out, part))
    assert out is not None
    out = Traced(cast_to(out._expr, dtype), out.shape)
    if keep:
        return out
    return _scalar_if_point(_reshape(out, [n for k, n in enumerate(out.shape) if k not in axes]))


def _scan(op: str, x: Traced, axis: int, dtype: DType) -> Traced:
    result = Result(x.shape, (axis,), Reduction(op, x._expr, (dtype,)), 0)
    return Traced(current.get().keep(result, dtype), x.shape)


def _last_of_scan(x: Traced, out: Traced) -> Expr | None:
    """What comes together along all of an axis, where `out` is the last of a scan `x`; None for
    any other part of it: all but that one need the scan."""
    if x._expr.op != "input" or x._expr.data[0] < MADE or not out.size:
        return None
    scan, view = current.get().made[x._expr.data[0] - MADE], x._expr.data[1]
    if not isinstance(scan, Result) or scan.reduction.op not in SCANS:
        return None
    ((axis,), shape) = scan.axes, scan.over
    if shape != x.shape or not is_contiguous(view, shape):
        return None
    kept = tuple(1 if k == axis else n for k, n in enumerate(shape))
    last = View.contiguous(shape)
    last = View((shape[axis] - 1) * last.strides[axis], last.strides)
    without = tuple(n for k, n in enumerate(shape) if k != axis)
    found = next((s for s in (kept, without) if s == out.shape), None)
    if found is None:
        return None
    strides = last.strides if found is kept else last.strides[:axis] + last.strides[axis + 1 :]
    if canonical(out._expr.data[1], found) != canonical(View(last.offset, strides), found):
        return None
    ((value,), op) = scan.reduction.dtypes, SCANS[scan.reduction.op]
    whole = Traced(scan.reduction.arg, shape)
    return _reduce(op, whole, scan.axes, (value,), found is kept)[0]._expr


@functools.cache
def _sum_dtype(dtype: DType, ufunc: Any) -> DType:
    return ufunc.reduce(np.zeros(0, dtype)).dtype  # type: ignore[no-any-return]


def _add_up(
    op: str, ufunc: Any, x: Traced, axis: Any, dtype: Any, keepdims: Any, initial: Any, where: Any
) -> Traced:
    none = dtype is None or dtype is nothing  # not `==`: a float64 equals None
    dtype = checked(_sum_dtype(x.dtype, ufunc) if none else dtype)
    value = Traced(cast_to(x._expr, dtype), x.shape)
    neutral = 0 if op == "sum" else 1
    if where is not True and where is not nothing:
        value = _where(where, value, dtype.type(neutral))
    (out,) = _reduce(op, value, _axes(x, axis), (dtype,), keepdims)
    if initial is not nothing and initial != neutral:
        out = _elementwise(ufunc, ufunc.__name__, (_array(initial, dtype), out))
    return out


def _sum(
    x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False,
    initial: Any = nothing, where: Any = True,
) -> Traced:  # fmt: skip
    no_out(out)
    return _add_up("sum", np.add, _array(x), axis, dtype, keepdims, initial, where)


def _prod(
    x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False,
    initial: Any = nothing, where: Any = True,
) -> Traced:  # fmt: skip
    no_out(out)
    return _add_up("prod", np.multiply, _array(x), axis, dtype, keepdims, initial, where)


def _not_empty(x: Traced, axes: Shape, what: str) -> None:
    if 0 in [x.shape[k] for k in axes]:
        raise ValueError(f"zero-size array to {what} which has no identity")


def _extreme(
    op: str, x: Any, axis: Any = None, out: Any = None, keepdims: Any = False,
    initial: Any = nothing, where: Any = True,
) -> Traced:  # fmt: skip
    no_out(out)
    x, axes = _array(x), _axes(x, axis)
    ufunc = {"min": np.minimum, "max": np.maximum, "fmin": np.fmin, "fmax": np.fmax}[op]
    if op in ("fmin", "fmax") and x.dtype.kind not in "fc":
        op = op[1:]
    if initial is nothing:
        _not_empty(x, axes, f"reduction operation {ufunc.__name__}")
    if where is not True and where is not nothing:
        if initial is nothing:
            raise ValueError("a reduction with a mask needs an initial value")
        x = _where(where, x, _array(initial, x.dtype).astype(x.dtype))
    if initial is not nothing and 0 in [x.shape[k] for k in axes]:
        return _broadcast(_array(initial, x.dtype), _reduced_shape(x, axes, keepdims))
    (value,) = _reduce(op, x, axes, (x.dtype,), keepdims)
    if initial is not nothing:
        value = _elementwise(ufunc, ufunc.__name__, (_array(initial, x.dtype), value))
    return value


def _reduced_shape(x: Traced, axes: Shape, keepdims: Any) -> Shape:
    if keepdims is not nothing and keepdims:
        return tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    return tuple(n for k, n in enumerate(x.shape) if k not in axes)


def _truth(
    op: str, x: Any, axis: Any = None, out: Any = None, keepdims: Any = False, *,
    where: Any = True,
) -> Traced:  # fmt: skip
    no_out(out)
    x = _array(x)
    value = Traced(cast_to(x._expr, bool), x.shape)
    if where is not True and where is not nothing:
        value = _where(where, value, np.bool_(op == "all"))
    return _reduce(op, value, _axes(x, axis), (bool,), keepdims)[0]


def _arg(op: str, x: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Traced:
    no_out(out)
    x, axes = _array(x), _axes(x, None if axis is None else operator.index(axis))
    if 0 in [x.shape[k] for k in axes]:
        raise ValueError(f"attempt to get {op} of an empty sequence")
    return _reduce(op, x, axes, (np.intp, x.dtype), keepdims)[0]


def _count(x: Traced, axes: Shape) -> np.intp:
    return np.intp(math.prod(x.shape[k] for k in axes))


def _divided(total: Traced, count: Any) -> Any:
    """A sum by a count, in the type of the sum: computed in float64, as NumPy does."""
    return np.true_divide(total, count).astype(total.dtype)


def _mean(
    x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *,
    where: Any = True,
) -> Any:  # fmt: skip
    no_out(out)
    x = _array(x)
    axes, half = _axes(x, axis), False
    if dtype is None or dtype is nothing:
        half = x.dtype == np.float16
        dtype = {"b": np.float64, "i": np.float64, "u": np.float64}.get(x.dtype.kind, x.dtype)
        dtype = np.float32 if half else dtype
    count: Any = _count(x, axes)
    total = _sum(x, axes, dtype, keepdims=keepdims, where=where)
    if where is not True and where is not nothing:
        count = _sum(_broadcast(_array(where), x.shape), axes, np.intp, keepdims=keepdims)
    mean = _divided(total, count)
    return mean.astype(np.float16) if half else mean


def _var(
    x: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0,
    keepdims: Any = False, *, where: Any = True, mean: Any = nothing, correction: Any = nothing,
) -> Any:  # fmt: skip
    no_out(out, {"mean": mean})
    if where is not True and where is not nothing:
        raise refuse("it computes a variance with where=")
    x, ddof = _array(x), correction if correction is not nothing else ddof
    axes = _axes(x, axis)
    if dtype is None or dtype is nothing:
        dtype = np.float64 if x.dtype.kind in "biu" else x.dtype
    dtype = np.dtype(dtype)
    if dtype.kind not in "fc" or (dtype.kind == "f" and x.dtype.kind == "c"):
        raise refuse(f"it computes a variance of {x.dtype} in {dtype}")
    divisor = np.maximum(_count(x, axes) - ddof, 0)
    if dtype.kind == "c":
        mean = _divided(_sum(x, axes, dtype, keepdims=True), _count(x, axes))
        away = np.subtract(x, mean)
        total = _sum(np.square(away.real) + np.square(away.imag), axes, keepdims=keepdims)
        return _divided(total, divisor)
    _, squares = _moment(x, axes, dtype, keepdims)
    return np.true_divide(squares, divisor).astype(dtype)


def _moment(x: Traced, axes: Shape, dtype: DType, keepdims: Any) -> list[Traced]:
    """Mean, and sum of squared deviations from it, in one pass; half precision in single."""
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    return _reduce("moment", x.astype(wide), axes, (wide, wide), keepdims)


def _ufunc_reduce(
    ufunc: Any, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: Any = False,
    initial: Any = nothing, where: Any = True,
) -> Traced:  # fmt: skip
    name = ufunc.__name__
    if isinstance(out, tuple):
        (out,) = out
    x = _array(x)
    if name in ("bitwise_or", "bitwise_and") and x.dtype == bool:
        name = {"bitwise_or": "logical_or", "bitwise_and": "logical_and"}[name]
    if name in ("add", "multiply"):
        function = _sum if name == "add" else _prod
        return function(x, axis, dtype, out, keepdims, initial, where)
    if name in ("minimum", "maximum", "fmin", "fmax") and dtype is None:
        op = {"minimum": "min", "maximum": "max"}.get(name, name)
        return _extreme(op, x, axis, out, keepdims, initial, where)
    if name in ("logical_or", "logical_and") and initial is nothing:
        return _truth("any" if name == "logical_or" else "all", x, axis, out, keepdims, where=where)
    raise refuse(f"numpy.{name}.reduce has no expression")


def _accumulated(
    ufunc: Any, x: Any, axis: Any = 0, dtype: Any = None, out: Any = None
) -> Traced:  # fmt: skip
    """What `ufunc.accumulate` gives, along one axis."""
    no_out(out[0] if isinstance(out, tuple) else out)
    x, name = _array(x), ufunc.__name__
    _only_on_gpus(f"{name}.accumulate")
    if dtype is None or dtype is nothing:
        dtype = _accumulated_dtype(x.dtype, ufunc)
    value: Traced = x.astype(checked(dtype))
    axis = normalize_axis_index(axis, x.ndim)
    if parts(x.shape, axis) is None:
        raise refuse(f"it accumulates along {x.shape[axis]:,} elements: no equal parts share that")
    if x.shape[axis] == 1 or not x.size:
        return value
    return _scan(ACCUMULATED[name], value, axis, value.dtype)


@functools.cache
def _accumulated_dtype(dtype: DType, ufunc: Any) -> DType:
    return ufunc.accumulate(np.zeros(1, dtype)).dtype  # type: ignore[no-any-return]


def _only_on_gpus(name: str) -> None:
    """NumPy's own scans go through an array once, too."""
    if not current.get().products:
        raise refuse(f"numpy.{name} is not element-wise or a reduction")


def _cumulated(
    ufunc: Any, x: Any, axis: Any = None, dtype: Any = None, out: Any = None
) -> Traced:  # fmt: skip
    """`cumsum` and its like: along an axis, or of all elements in order."""
    _only_on_gpus(ACCUMULATED[ufunc.__name__])
    x = _array(x)
    if axis is None or axis is nothing:
        x, axis = x.reshape(-1), 0
    return _accumulated(ufunc, x, axis, dtype, out)


for _name, _function in {
    "sum": _sum, "prod": _prod, "mean": _mean, "var": _var,
    "any": functools.partial(_truth, "any"), "all": functools.partial(_truth, "all"),
    "argmin": functools.partial(_arg, "argmin"), "argmax": functools.partial(_arg, "argmax"),
}.items():  # fmt: skip
    _implements(_name)(_function)
for _name, _op in {"min": "min", "amin": "min", "max": "max", "amax": "max",
                   "nanmin": "fmin", "nanmax": "fmax"}.items():  # fmt: skip
    _implements(_name)(functools.partial(_extreme, _op))
for _name, _ufunc_of in {"cumsum": np.add, "cumprod": np.multiply}.items():
    _implements(_name)(functools.partial(_cumulated, _ufunc_of))
METHODS["reduce"], METHODS["accumulate"] = _ufunc_reduce, _accumulated

# ------------------------------------------------------------------------------------------------
# Parts put together.


def _concatenate(
    parts: Sequence[Any], axis: Any = 0, out: Any = None, *, dtype: Any = None,
    casting: Any = "same_kind",
) -> Traced:  # fmt: skip
    no_out(out)
    arrays = [_array(p) for p in parts]
    if axis is None:
        arrays, axis = [a.ravel() for a in arrays], 0
    if not arrays:
        raise ValueError("need at least one array to concatenate")
    axis = normalize_axis_index(axis, arrays[0].ndim)
    if len(arrays) > MOST_PARTS:
        raise refuse(f"it concatenates {len(arrays)} arrays")
    dtype = checked(dtype or np.result_type(*[a.dtype for a in arrays]))
    for a in arrays:
        if not np.can_cast(a.dtype, dtype, casting):
            raise TypeError(f"Cannot cast array data from {a.dtype} to {dtype}")
    rest = {a.shape[:axis] + a.shape[axis + 1 :] for a in arrays}
    if len(rest) > 1:
        raise ValueError(
            "all the input array dimensions except for the concatenation axis must match"
        )
    shape = list(arrays[0].shape)
    shape[axis] = sum(a.shape[axis] for a in arrays)
    pieces: list[tuple[int, Expr]] = []  # where each begins, and its values over the whole
    start = 0
    for a in arrays:
        length = a.shape[axis]
        if length:
            whole = cast_to(reviewed(a._expr, _shifted(axis, start, length)), dtype)
            if not pieces or pieces[-1][1] is not whole:
                pieces.append((start, whole))
        start += length
    if not pieces:
        return Traced(constant(0, dtype), tuple(shape))
    return Traced(_choice(pieces, _axis_index(tuple(shape), axis)), tuple(shape))


def _shifted(axis: int, start: int, length: int) -> Callable[[View], View]:
    """Views of a part over the whole: right where the part is, beyond its array elsewhere."""

    def change(view: View) -> View:
        strides = list(view.strides)
        if length == 1:
            strides[axis] = 0
        return View(view.offset - start * strides[axis], tuple(strides))

    return change


def _choice(pieces: list[tuple[int, Expr]], at: Expr) -> Expr:
    """The piece that a position falls into, by halving."""
    if len(pieces) == 1:
        return pieces[0][1]
    half = len(pieces) // 2
    left, right = _choice(pieces[:half], at), _choice(pieces[half:], at)
    return node_of("where", (_apply(np.less, at, pieces[half][0]), left, right), left.dtype)


def _stack(arrays: Sequence[Any], axis: int = 0, out: Any = None, **kwargs: Any) -> Traced:
    arrays = [_array(a) for a in arrays]
    if len({a.shape for a in arrays}) > 1:
        raise ValueError("all input arrays must have the same shape")
    return _concatenate([_expand(a, axis) for a in arrays], axis, out, **kwargs)


def _expand(x: Any, axis: Any) -> Traced:
    return _look(_array(x), lambda a: np.expand_dims(a, axis))


def _at_least(ndim: int, *arrays: Any) -> Any:
    """`numpy.atleast_1d` and its like."""
    like = {1: np.atleast_1d, 2: np.atleast_2d, 3: np.atleast_3d}[ndim]
    parts = [_array(a) for a in arrays]
    out = tuple(p if p.ndim >= ndim else _look(p, like) for p in parts)
    return out[0] if len(out) == 1 else out


def _stacked(ndim: int, axis: int, arrays: Sequence[Any], **kwargs: Any) -> Traced:
    """`numpy.hstack` and its like."""
    parts = [_at_least(ndim, a) for a in arrays]
    if axis == 1 and parts[0].ndim == 1:
        axis = 0
    return _concatenate(parts, axis, **kwargs)


def _block(parts: Any) -> Traced:
    def depth(p: Any) -> int:
        return 1 + max(depth(q) for q in p) if isinstance(p, list) else 0

    def most(p: Any) -> int:
        return max(most(q) for q in p) if isinstance(p, list) else _array(p).ndim

    levels = depth(parts)
    ndim = max(levels, most(parts))

    def join(p: Any, level: int) -> Traced:
        if not isinstance(p, list):
            a = _array(p)
            return a.reshape((1,) * (ndim - a.ndim) + a.shape)
        return _concatenate([join(q, level + 1) for q in p], ndim - levels + level)

    return join(parts, 0)


def _roll(x: Traced, shift: Any, axis: Any = None) -> Traced:
    if axis is None:
        return _roll(x.ravel(), shift, 0).reshape(x.shape)
    shifts, axes = np.broadcast_arrays(shift, axis)
    for s, a in zip(shifts.ravel().tolist(), axes.ravel().tolist(), strict=True):
        a = normalize_axis_index(a, x.ndim)
        s = s % x.shape[a] if x.shape[a] else 0
        if s:
            all_before = (slice(None),) * a
            ends = x[(*all_before, slice(-s, None))], x[(*all_before, slice(None, -s))]
            x = _concatenate(ends, a)
    return x.copy()


def _split(x: Traced, parts: Any, axis: int = 0) -> list[Traced]:
    length = x.shape[axis]
    if isinstance(parts, int | np.integer):
        each, extra = divmod(length, int(parts))
        sizes = extra * [each + 1] + (int(parts) - extra) * [each]
        ends = [0, *itertools.accumulate(sizes)]
    else:
        ends = [0, *[operator.index(p) for p in parts], length]
    before = (slice(None),) * normalize_axis_index(axis, x.ndim)
    return [x[(*before, slice(a, b))] for a, b in itertools.pairwise(ends)]


def _even_split(x: Traced, parts: Any, axis: int = 0) -> list[Traced]:
    if isinstance(parts, int | np.integer) and x.shape[axis] % parts:
        raise ValueError("array split does not result in an equal division")
    return _split(x, parts, axis)


def _pad(x: Any, width: Any, mode: Any = "constant", **kwargs: Any) -> Any:
    x = _array(x)
    values = kwargs.pop("constant_values", 0)
    if kwargs or mode not in ("constant", "edge", "wrap", "reflect", "symmetric"):
        raise refuse(f"it pads with mode {mode!r}")
    widths = np.broadcast_to(np.asarray(width), (x.ndim, 2)).tolist()
    if any(n < 0 for pair in widths for n in pair):
        raise refuse("it pads an axis by less than nothing")
    fills = np.broadcast_to(np.asarray(values), (x.ndim, 2))
    for axis, (before, after) in enumerate(widths):
        ends = []
        for side, n in enumerate((before, after)):
            if n == 0:
                continue
            shape = list(x.shape)
            shape[axis] = n
            if mode == "constant":
                value = fills[axis, side].item()  # one that the type cannot hold is an error
                part = Traced(constant(value, x.dtype), tuple(shape))
            else:
                part = _border(x, axis, n, mode, bool(side))
            ends.append((side, part))
        parts = [p for s, p in ends if s == 0] + [x] + [p for s, p in ends if s == 1]
        x = _concatenate(parts, axis) if len(parts) > 1 else x
    return x if np.any(widths) else Traced(x._expr, x.shape)  # a copy, whatever it pads


def _border(x: Traced, axis: int, n: int, mode: str, behind: bool) -> Traced:
    """What `numpy.pad` puts before an axis, or behind it."""
    length, all_before = x.shape[axis], (slice(None),) * axis
    if mode == "edge":
        shape = list(x.shape)
        shape[axis] = n
        end = x[(*all_before, slice(length - 1, length) if behind else slice(0, 1))]
        return _broadcast(end, tuple(shape))
    skip = int(mode == "reflect")
    if n > length - skip:
        raise refuse("it pads an axis by more than its length")
    if mode == "wrap":
        return x[(*all_before, slice(0, n) if behind else slice(length - n, length))]
    points = range(length - n - skip, length - skip) if behind else range(skip, n + skip)
    piece = x[(*all_before, slice(points.start, points.stop))]
    return piece[(*all_before, slice(None, None, -1))]


# ------------------------------------------------------------------------------------------------
# NumPy's functions.

_VIEWS = (
    "transpose matrix_transpose permute_dims moveaxis swapaxes rollaxis expand_dims "
    "fliplr flipud rot90 diagonal lib.stride_tricks.sliding_window_view linalg.diagonal "
    "linalg.matrix_transpose"
)


def _as_view(name: str) -> None:
    function: Any = np
    for word in name.split("."):
        function = getattr(function, word, None)

    def view(x: Any, *args: Any, **kwargs: Any) -> Traced:
        x = _array(x)
        out = _look(x, lambda a: function(a, *args, **kwargs))
        return x if x._scalar and not out.shape else out

    _implements(name)(view)


for _name in _VIEWS.split():
    _as_view(_name)
for _name, _function in {
    "concatenate": _concatenate, "concat": _concatenate, "stack": _stack, "block": _block,
    "vstack": functools.partial(_stacked, 2, 0), "row_stack": functools.partial(_stacked, 2, 0),
    "hstack": functools.partial(_stacked, 1, 1), "dstack": functools.partial(_stacked, 3, 2),
    "atleast_1d": functools.partial(_at_least, 1), "atleast_2d": functools.partial(_at_least, 2),
    "atleast_3d": functools.partial(_at_least, 3), "roll": _roll, "array_split": _split,
    "split": _even_split, "pad": _pad,
}.items():  # fmt: skip
    _implements(_name)(_function)


@_implements("histogram")
def _histogram(
    a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None
) -> tuple[Traced, np.ndarray[Any, Any]]:
    if density or weights is not None:
        raise refuse("it weighs a histogram")
    x = _nan_elsewhere(a) if isinstance(a, Selected) else _array(a)
    if any(isinstance(v, Traced) for v in (bins, range)) or isinstance(bins, str):
        raise refuse("the bins of its histogram depend on values")
    if range is None and np.ndim(bins) == 0:
        raise refuse("its histogram has no range")
    if x.dtype.kind not in "iuf":
        raise refuse(f"it makes a histogram of {x.dtype}")
    edges = np.histogram_bin_edges(np.empty(0, x.dtype), bins, range)
    x = x if x.ndim else x.reshape(1)
    # along a first axis, for the bins: a kernel finds the bin of each value once all the same
    expr = reviewed(_bin(x, edges)._expr, lambda view: View(view.offset, (0, *view.strides)))
    spread = Traced(expr, (len(edges) - 1, *x.shape))
    axes = tuple([k + 1 for k in _axes(x, None)])
    (found,) = _reduce("histogram", spread, axes, (np.intp,))
    return found, edges


def _bin(x: Traced, edges: np.ndarray[Any, Any]) -> Traced:
    """Which bin each value is in; their count for what is in none."""
    kind = compared(x.dtype, edges.dtype)
    if kind is None:
        raise refuse(f"it makes a histogram of {x.dtype} with edges of {edges.dtype}")
    ours = Bins.of(edges.astype(kind))
    return Traced(node_of("bin", (cast_to(x._expr, kind),), np.int64, ours), x.shape)


@_implements("std")
def _std(*args: Any, **kwargs: Any) -> Any:
    return np.sqrt(_var(*args, **kwargs))


@_implements("where")
def _where_function(condition: Any, *choices: Any) -> Traced:
    if len(choices) != 2:
        raise refuse("numpy.where with one argument asks for positions")
    return _where(condition, *choices)


@_implements("clip")
def _clip_function(
    a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None,
    max: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    no_out(out, kwargs)
    return _clip(_array(a), a_min, a_max, min=min, max=max)


@_implements("round", "around")
def _round_function(a: Any, decimals: int = 0, out: Any = None) -> Any:
    no_out(out)
    return _round(_array(a), decimals)


@_implements("ptp")
def _ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    no_out(out)
    x = _array(a)
    return np.subtract(x.max(axis, keepdims=keepdims), x.min(axis, keepdims=keepdims))


@_implements("count_nonzero")
def _count_nonzero(a: Any, axis: Any = None, *, keepdims: Any = False) -> Traced:
    return _sum(_array(a).astype(bool), axis, np.intp, keepdims=keepdims)


@_implements("average")
def _average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False
) -> Any:
    if weights is not None or returned:
        raise refuse("it computes a weighted average, which is an error where weights add to 0")
    return _mean(a, axis, keepdims=keepdims)


def _without_nan(x: Traced, value: Any) -> Traced:
    if x.dtype.kind not in "fc":
        return x
    return _where(np.isnan(x), _array(x.dtype.type(value)), x)


@_implements("nansum")
def _nansum(a: Any, *args: Any, **kwargs: Any) -> Traced:
    return _sum(_without_nan(_array(a), 0), *args, **kwargs)


@_implements("nanprod")
def _nanprod(a: Any, *args: Any, **kwargs: Any) -> Traced:
    return _prod(_without_nan(_array(a), 1), *args, **kwargs)


@_implements("nancumsum")
def _nancumsum(a: Any, *args: Any, **kwargs: Any) -> Traced:
    return _cumulated(np.add, _without_nan(_array(a), 0), *args, **kwargs)


@_implements("nancumprod")
def _nancumprod(a: Any, *args: Any, **kwargs: Any) -> Traced:
    return _cumulated(np.multiply, _without_nan(_array(a), 1), *args, **kwargs)


@_implements("cumulative_sum")
def _cumulative_sum(
    x: Any, /, *, axis: Any = None, dtype: Any = None, out: Any = None,
    include_initial: bool = False, ufunc: Any = np.add,
) -> Traced:  # fmt: skip
    x = _array(x)
    if axis is None and x.ndim != 1:
        raise ValueError("axis must be specified for an array of more than one dimension")
    axis = 0 if axis is None else normalize_axis_index(axis, x.ndim)
    found = _accumulated(ufunc, x, axis, dtype, out)
    if not include_initial:
        return found
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return _concatenate([_filled(shape, ufunc.identity, found.dtype), found], axis)


_implements("cumulative_prod")(functools.partial(_cumulative_sum, ufunc=np.multiply))


@_implements("nanmean")
def _nanmean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *,
    where: Any = True,
) -> Any:  # fmt: skip
    no_out(out, None if where in (True, nothing) else {"where": where})
    x = _array(a)
    if x.dtype.kind not in "fc":
        return _mean(x, axis, dtype, keepdims=keepdims)
    count = _sum(~np.isnan(x), axis, np.intp, keepdims=keepdims)
    return _divided(_sum(_without_nan(x, 0), axis, dtype, keepdims=keepdims), count)


@_implements("nanvar")
def _nanvar(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0,
    keepdims: Any = False, *, where: Any = True, mean: Any = nothing, correction: Any = nothing,
) -> Any:  # fmt: skip
    no_out(out, {"mean": mean} | ({} if where in (True, nothing) else {"where": where}))
    x, ddof = _array(a), correction if correction is not nothing else ddof
    if x.dtype.kind not in "fc":
        return _var(x, axis, dtype, ddof=ddof, keepdims=keepdims)
    total, count = _squares(x, cast(Traced, ~np.isnan(x)), axis, dtype, keepdims)
    degrees = _reshape(count, total.shape) - ddof
    variance = _where(degrees <= 0, total.dtype.type(np.nan), _divided(total, degrees))
    return _scalar_if_point(variance)


def _squares(
    x: Traced, there: Traced, axis: Any, dtype: Any, keepdims: Any
) -> tuple[Traced, Traced]:  # fmt: skip
    """The sum of squared deviations of those that are there from their mean, and how many these
    are."""
    count = _sum(there, axis, np.intp, keepdims=True)
    mean = _divided(_sum(x, axis, dtype, keepdims=True, where=there), count)
    away = _where(there, np.subtract(x, mean).astype(x.dtype), x.dtype.type(0))
    squares = np.square(away.real) + np.square(away.imag) if x.dtype.kind == "c" else away * away
    return _sum(squares, axis, dtype, keepdims=keepdims), count


@_implements("nanstd")
def _nanstd(*args: Any, **kwargs: Any) -> Any:
    return np.sqrt(_nanvar(*args, **kwargs))


@_implements("nanargmin", "nanargmax")
def _nanarg(*args: Any, **kwargs: Any) -> Traced:
    raise refuse("numpy.nanargmin is an error where all values are NaN")


@_implements("linalg.norm")
def _norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    x = _array(x)
    if x.dtype.kind not in "fc":
        x = x.astype(np.float64)
    if ord is not None and axis is None and x.ndim not in (1, 2):
        raise ValueError("Improper number of dimensions to norm.")
    axes = _axes(x, axis)

    def root() -> Any:
        squares = np.square(x.real) + np.square(x.imag) if x.dtype.kind == "c" else np.square(x)
        return np.sqrt(squares.sum(axes, keepdims=keepdims))

    if ord is None and (axis is None or len(axes) <= 2):
        return root()
    if len(axes) == 2:
        pair = tuple(normalize_axis_tuple(axis if axis is not None else (0, 1), x.ndim))
        if ord in ("fro", "f"):
            return root()
        if ord in (1, -1, math.inf, -math.inf):
            first = pair[0] if abs(ord) == 1 else pair[1]
            (second,) = set(pair) - {first}
            sums = np.abs(x).sum(first, keepdims=True)
            worst = sums.max(second, keepdims=True) if ord > 0 else sums.min(second, keepdims=True)
            return worst if keepdims else _scalar_if_point(worst.squeeze(pair))
        raise refuse(f"the matrix norm {ord!r} needs singular values")
    if len(axes) != 1 or isinstance(ord, str):
        raise ValueError("Improper number of dimensions to norm.")
    if ord == math.inf:
        return np.abs(x).max(axes, keepdims=keepdims)
    if ord == -math.inf:
        return np.abs(x).min(axes, keepdims=keepdims)
    if ord == 0:
        return (x != 0).astype(x.real.dtype).sum(axes, keepdims=keepdims)
    if ord == 1:
        return np.abs(x).sum(axes, keepdims=keepdims)
    if ord == 2:
        return root()
    powers = np.power(np.abs(x), ord).sum(axes, keepdims=keepdims)
    return np.power(powers, np.reciprocal(ord, dtype=powers.dtype))


@_implements("broadcast_to")
def _broadcast_to(array: Any, shape: Any, subok: bool = False) -> Traced:
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    x = _array(array)
    return Traced(_broadcast(x, shape)._expr, shape, of=x)


@_implements("broadcast_arrays")
def _broadcast_arrays(*args: Any, subok: bool = False) -> tuple[Traced, ...]:
    arrays = [_array(a) for a in args]
    shape = np.broadcast_shapes(*[a.shape for a in arrays])
    return tuple(_broadcast(a, shape) for a in arrays)


@_implements("meshgrid")
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    arrays = [_array(x) for x in xi]
    n = len(arrays)
    out = [a.reshape((1,) * k + (-1,) + (1,) * (n - 1 - k)) for k, a in enumerate(arrays)]
    if indexing == "xy" and n > 1:
        out = [a.swapaxes(0, 1) for a in out]
    return tuple(out) if sparse else _broadcast_arrays(*out)


@_implements("reshape")
def _reshape_function(
    a: Any, /, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: Any = None
) -> Traced:
    return _reshape(_array(a), newshape if shape is None else shape, order)


@_implements("ravel")
def _ravel(a: Any, order: str = "C") -> Traced:
    return _array(a).ravel(order)


@_implements("copy")
def _copy(a: Any, order: str = "K", subok: bool = False) -> Traced:
    return _array(a).copy()


@_implements("astype")
def _astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Traced:
    return _array(x).astype(dtype, copy=copy)


@_implements("squeeze")
def _squeeze(a: Any, axis: Any = None) -> Traced:
    return _array(a).squeeze(axis)


@_implements("flip")
def _flip(m: Any, axis: Any = None) -> Traced:
    x = _array(m)
    axes = _axes(x, axis)
    return x[tuple([slice(None, None, -1 if k in axes else None) for k in range(x.ndim)])]


@_implements("take")
def _take(a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> Traced:
    no_out(out)
    if not isinstance(indices, int | np.integer) or mode != "raise":
        raise refuse("it indexes with an array")
    x = _array(a)
    x, axis = (x.ravel(), 0) if axis is None else (x, normalize_axis_index(axis, x.ndim))
    return x[(*(slice(None),) * axis, indices)]


def _like(value: Any) -> Callable[..., Traced]:
    def like(
        a: Any, *args: Any, dtype: Any = None, order: str = "K", subok: bool = True,
        shape: Any = None, device: Any = None,
    ) -> Traced:  # fmt: skip
        a = _array(a)
        if dtype is None and args:
            dtype = args[0]
        if dtype is not None and np.dtype(dtype).fields is not None:
            raise TypeError("structured arrays cannot be traced")  # Dask has another way then
        return _full(a, value, dtype, shape)

    return like


def _full(a: Traced, value: Any, dtype: Any, shape: Any) -> Traced:
    shape = a.shape if shape is None else shape
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    fill = _array(value, None if isinstance(value, Traced) else a.dtype if dtype is None else dtype)
    fill = fill.astype(a.dtype if dtype is None else dtype)
    return Traced(_broadcast(fill, shape)._expr, shape)


for _name, _value in {"ones_like": 1, "zeros_like": 0, "empty_like": 0}.items():
    _implements(_name)(_like(_value))


@_implements("full_like")
def _full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True,
    shape: Any = None, *, device: Any = None,
) -> Traced:  # fmt: skip
    return _full(_array(a), fill_value, dtype, shape)


@_implements("trace")
def _trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None,
           out: Any = None) -> Any:  # fmt: skip
    no_out(out)
    return _array(a).trace(offset, axis1, axis2, dtype)


def _below(shape: Shape, k: int) -> Traced:
    """Where column <= row + k, over the last two axes."""
    row, column = (_axis_index(shape, len(shape) - n) for n in (2, 1))
    if k:
        row = _apply(np.add, row, k)
    return Traced(_apply(np.greater_equal, row, column), shape)


@_implements("tril")
def _tril(m: Any, k: int = 0) -> Traced:
    x = _array(m)
    if x.ndim < 2:
        raise refuse("it makes a triangle of a vector")
    return _where(_below(x.shape, k), x, x.dtype.type(0))


@_implements("triu")
def _triu(m: Any, k: int = 0) -> Traced:
    x = _array(m)
    if x.ndim < 2:
        raise refuse("it makes a triangle of a vector")
    return _where(_below(x.shape, k - 1), x.dtype.type(0), x)


@_implements("diff")
def _diff(
    a: Any, n: int = 1, axis: int = -1, prepend: Any = nothing, append: Any = nothing
) -> Traced:
    if n < 0:
        raise refuse("it takes differences of an order below zero")
    x = _array(a)
    axis = normalize_axis_index(axis, x.ndim)
    before = (slice(None),) * axis

    def end(v: Any) -> list[Traced]:
        if v is nothing or v is None:
            return []
        v = _array(v)
        return [v if v.ndim else _broadcast(v, x.shape[:axis] + (1,) + x.shape[axis + 1 :])]

    parts = [*end(prepend), x, *end(append)]
    x = _concatenate(parts, axis) if len(parts) > 1 else x
    for _ in range(n):
        pair = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        step: Any = np.not_equal if x.dtype == bool else np.subtract
        x = step(*pair)
    return x


@_implements("gradient")
def _gradient(f: Any, *spacing: Any, axis: Any = None, edge_order: int = 1) -> Any:
    x = _array(f)
    axes = _axes(x, axis) if axis is None else normalize_axis_tuple(axis, x.ndim)
    steps = list(spacing) * (len(axes) if len(spacing) == 1 else 1) or [1.0] * len(axes)
    if len(steps) != len(axes) or edge_order != 1 or any(np.ndim(s) for s in steps):
        raise refuse("it takes a gradient over points that are not evenly spaced")
    if x.dtype.kind in "iu":
        x = x.astype(np.float64)
    out = []
    for k, h in zip(axes, steps, strict=True):
        if x.shape[k] < 2:
            raise ValueError("Shape of array too small to calculate a numerical gradient")

        def at(a: Any, b: Any, k: int = k) -> Traced:
            return x[(*(slice(None),) * k, slice(a, b))]

        middle = (at(2, None) - at(None, -2)) / (2.0 * h)
        first, last = (at(1, 2) - at(0, 1)) / h, (at(-1, None) - at(-2, -1)) / h
        out.append(_concatenate([first, middle, last], k).astype(x.dtype))  # whatever h is
    return out[0] if len(axes) == 1 else tuple(out)


@_implements("fix")
def _fix(x: Any, out: Any = None) -> Any:
    no_out(out)
    return np.trunc(_array(x))


@_implements("real")
def _real(val: Any) -> Traced:
    return _array(val).real


@_implements("imag")
def _imag(val: Any) -> Traced:
    return _array(val).imag


@_implements("angle")
def _angle(z: Any, deg: bool = False) -> Any:
    z = _array(z)
    imag = z.imag if z.dtype.kind == "c" else 0
    a = np.arctan2(imag, z.real)
    return a * (180 / math.pi) if deg else a


@_implements("sinc")
def _sinc(x: Any) -> Any:
    x = np.pi * _array(x)
    small = np.finfo(x.dtype).eps if x.dtype.kind == "f" else 1e-20
    y = _where(x != 0, x, x.dtype.type(small))
    return np.sin(y) / y


@_implements("isposinf")
def _isposinf(x: Any, out: Any = None) -> Any:
    no_out(out)
    return np.logical_and(np.isinf(x), ~np.signbit(x))


@_implements("isneginf")
def _isneginf(x: Any, out: Any = None) -> Any:
    no_out(out)
    return np.logical_and(np.isinf(x), np.signbit(x))


@_implements("nan_to_num")
def _nan_to_num(
    x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None
) -> Any:
    x = _array(x)
    if not copy:
        raise refuse("it writes into an array that it is given (copy=False)")
    if x.dtype.kind not in "fc":
        return _scalar_if_point(x)
    if x.dtype.kind == "c":
        parts = [_nan_to_num(p, True, nan, posinf, neginf) for p in (x.real, x.imag)]
        return _complex(parts[0], parts[1], x.dtype)
    limits, kind = np.finfo(x.dtype), x.dtype.type
    high = kind(limits.max if posinf is None else posinf)
    low = kind(limits.min if neginf is None else neginf)
    finite = _where(_isposinf(x), high, _where(_isneginf(x), low, x))
    return _scalar_if_point(_where(np.isnan(x), kind(nan), finite))


@_implements("isclose")
def _isclose(
    a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False
) -> Traced:
    x = a if type(a) in (int, float, complex) else _array(a)
    y = float(b) if isinstance(b, int) else b
    if not isinstance(y, float | complex):
        y = _array(y)
        y = y.astype(np.result_type(y.dtype, 1.0))
    result = np.less_equal(abs(x - y), atol + rtol * abs(y)) & np.isfinite(y) | (x == y)
    if equal_nan:
        result = result | (np.isnan(x) & np.isnan(y))
    return result  # type: ignore[no-any-return]


@_implements("select")
def _select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Traced:
    if len(conditions) != len(choices) or not conditions:
        raise ValueError("list of cases must be same length as list of conditions")
    every = [*choices, default]
    dtype = np.result_type(*[v.dtype if isinstance(v, Traced) else v for v in every])
    out: Any = _array(default, dtype).astype(dtype)
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        if _array(condition).dtype != bool:
            raise TypeError("invalid entry in condlist: should be boolean ndarray")
        out = _where(condition, _array(choice, dtype).astype(dtype), out)
    return out  # type: ignore[no-any-return]


@_implements("outer")
def _outer(a: Any, b: Any, out: Any = None) -> Any:
    no_out(out)
    return np.multiply(_array(a).ravel()[:, None], _array(b).ravel()[None, :])


# ---- products of arrays with vectors


def _contracted(
    operands: Sequence[Traced], labels: Sequence[Sequence[Any]], out: Sequence[Any], dtype: DType
) -> Traced:
    """The sum of products of operands whose axes have these labels, over those that are not `out`.

    Only where one operand has them all: it is read once, and the others beside it. What else there
    is, as the product of two matrices, does more with each element than a kernel here would.
    """
    following = current.get()
    lengths: dict[Any, int] = {}
    for x, names in zip(operands, labels, strict=True):
        if len(set(names)) < len(names):
            raise refuse("it takes a diagonal in a product")
        for name, n in zip(names, x.shape, strict=True):
            if lengths.setdefault(name, n) == 1:
                lengths[name] = n
            elif n not in (1, lengths[name]):
                raise ValueError(f"lengths {lengths[name]} and {n} do not match")
    long = [name for name, n in lengths.items() if n != 1]
    whole = next((n for n in labels if set(long) <= set(n)), None)
    if whole is None or not following.products:
        following.operations += (8 if dtype.kind == "c" else 2) * math.prod(lengths.values())
        raise refuse("it multiplies matrices")
    left = iter([name for name in out if name in long])
    order = [next(left) if name in out else name for name in whole if name in long]
    product: Any = None
    for x, names in zip(operands, labels, strict=True):
        has = [name for name in order if name in names and x.shape[names.index(name)] != 1]

        def laid(a: Any, names: Sequence[Any] = names, has: Sequence[Any] = has) -> Any:
            """With its axes where the product has them."""
            axes = [names.index(name) for name in has]
            a = a.transpose([*axes, *(k for k in range(a.ndim) if k not in axes)])
            a = a[(..., *(0,) * (a.ndim - len(axes)))]
            return a[(..., *[slice(None) if name in has else None for name in order])]

        part = _look(x, laid).astype(dtype)
        product = part if product is None else product * part
    over = tuple([k for k, name in enumerate(order) if name not in out])
    (total,) = _reduce("any" if dtype.kind == "b" else "sum", product, over, (dtype,))
    shape = tuple([slice(None) if name in long else None for name in out])
    return _look(total, lambda a: a[shape]) if out else _scalar_if_point(total)


@_implements("matmul")
def _matmul(a: Any, b: Any, out: Any = None, **kwargs: Any) -> Traced:
    no_out(out, kwargs)
    a, b = _array(a), _array(b)
    if not a.ndim or not b.ndim:
        raise ValueError("matmul: Input operand does not have enough dimensions")
    batch = list(range(max(a.ndim, b.ndim) - 2))
    rows, columns = ["row"] * (a.ndim > 1), ["column"] * (b.ndim > 1)
    of_a, of_b = batch[len(batch) - max(a.ndim - 2, 0) :], batch[len(batch) - max(b.ndim - 2, 0) :]
    if a.shape[-1] != b.shape[-1 - len(columns)]:
        raise ValueError("matmul: Input operand 1 has a mismatch in its core dimension 0")
    labels = [*of_a, *rows, "inner"], [*of_b, "inner", *columns]
    dtype = np.result_type(a.dtype, b.dtype)
    return _contracted((a, b), labels, [*batch, *rows, *columns], dtype)


@_implements("tensordot")
def _tensordot(a: Any, b: Any, axes: Any = 2) -> Traced:
    a, b = _array(a), _array(b)
    if isinstance(axes, int):
        axes = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    one, other = ([k] if isinstance(k, int) else list(k) for k in axes)
    one = [normalize_axis_index(k, a.ndim) for k in one]
    other = [normalize_axis_index(k, b.ndim) for k in other]
    if [a.shape[k] for k in one] != [b.shape[k] for k in other]:
        raise ValueError("shape-mismatch for sum")
    of_a: list[Any] = [("a", k) for k in range(a.ndim)]
    of_b: list[Any] = [("b", k) for k in range(b.ndim)]
    for j, k in zip(one, other, strict=True):
        of_b[k] = of_a[j]
    summed = {of_a[k] for k in one}
    out = [name for name in (*of_a, *of_b) if name not in summed]
    product = _contracted((a, b), (of_a, of_b), out, np.result_type(a.dtype, b.dtype))
    return Traced(product._expr, product.shape)


@_implements("dot")
def _dot(a: Any, b: Any, out: Any = None) -> Any:
    no_out(out)
    a, b = _array(a), _array(b)
    if not a.ndim or not b.ndim:
        return np.multiply(a, b)
    return _scalar_if_point(_tensordot(a, b, ([a.ndim - 1], [max(b.ndim - 2, 0)])))


@_implements("inner")
def _inner(a: Any, b: Any) -> Any:
    a, b = _array(a), _array(b)
    if not a.ndim or not b.ndim:
        return np.multiply(a, b)
    return _scalar_if_point(_tensordot(a, b, ([a.ndim - 1], [b.ndim - 1])))


@_implements("vdot")
def _vdot(a: Any, b: Any) -> Any:
    a, b = _array(a), _array(b)
    return _dot((np.conj(a) if a.dtype.kind == "c" else a).ravel(), b.ravel())


@_implements("einsum")
def _einsum(
    subscripts: Any, *operands: Any, out: Any = None, dtype: Any = None, optimize: Any = False,
    **kwargs: Any,
) -> Traced:  # fmt: skip
    kwargs = {k: v for k, v in kwargs.items() if (k, v) not in _USUAL}
    no_out(out, kwargs)
    if not isinstance(subscripts, str) or "." in subscripts:
        raise refuse("its einsum is not a plain one")
    given, arrow, wanted = subscripts.replace(" ", "").partition("->")
    if not arrow:
        letters = given.replace(",", "")
        wanted = "".join(sorted(n for n in set(letters) if letters.count(n) == 1))
    arrays = [_array(x) for x in operands]
    labels = [list(word) for word in given.split(",")]
    if [len(names) for names in labels] != [x.ndim for x in arrays]:
        raise ValueError("einsum: the subscripts do not fit the operands")
    if not set(wanted) <= set(given):
        raise ValueError("einsum: an output subscript is in no operand")
    result = np.result_type(*[x.dtype for x in arrays]) if dtype is None else np.dtype(dtype)
    if not all(np.can_cast(x.dtype, result) for x in arrays):
        raise TypeError(f"einsum: the operands cannot be cast safely to {result}")
    return _contracted(arrays, labels, list(wanted), result)


#: What einsum is told by those who want nothing special.
_USUAL = (("casting", "safe"), ("order", "K"))


@_implements("can_cast")
def _can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    return np.can_cast(getattr(from_, "dtype", from_), getattr(to, "dtype", to), casting)


@_implements("result_type")
def _result_type(*args: Any) -> DType:
    return np.result_type(*[a.dtype if isinstance(a, Traced) else a for a in args])


@_implements("min_scalar_type")
def _min_scalar_type(a: Traced) -> DType:
    return a.dtype


@_implements("common_type")
def _common_type(*arrays: Any) -> Any:
    return np.common_type(*[np.zeros(1, a.dtype) for a in arrays])


@_implements("iscomplexobj")
def _iscomplexobj(x: Traced) -> bool:
    return x.dtype.kind == "c"


@_implements("isrealobj")
def _isrealobj(x: Traced) -> bool:
    return x.dtype.kind != "c"


@_implements("shape")
def _shape(a: Any) -> Shape:
    return _array(a).shape


@_implements("ndim")
def _ndim(a: Any) -> int:
    return _array(a).ndim


@_implements("size")
def _size(a: Any, axis: Any = None) -> int:
    x = _array(a)
    return x.size if axis is None else math.prod(x.shape[k] for k in _axes(x, axis))


# ------------------------------------------------------------------------------------------------
# What a mask selects.


class Selected(NDArrayOperatorsMixin):
    """`values[mask]`, of which it is not known how many elements it has: the values at all points,
    and where they count. The axes of the mask, from `axis` on, are one axis of it. What is computed
    element by element is computed at all points; a reduction along that axis is one over those
    points at which the mask holds."""

    __array_priority__ = 2e6
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Traced, mask: Traced, axis: int):
        self._values, self._mask, self._axis = values, mask, axis

    @property
    def dtype(self) -> DType:
        return self._values.dtype

    @property
    def ndim(self) -> int:
        return self._values.ndim - self._mask.ndim + 1

    @property
    def flags(self) -> SimpleNamespace:
        return SimpleNamespace(owndata=True)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __repr__(self) -> str:
        if current.get(None) is not None:
            raise refuse("it needs the values of an array (as text)")
        return f"<Selected {self.dtype} of {self._values.shape}>"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and any(hasattr(k, name) for k in _array_classes()):
            raise refuse(f"it reads .{name} of what a mask selects")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _unknown(self, *_: Any, **__: Any) -> Any:
        raise refuse("it needs to know how many elements a mask selects")

    __len__ = __iter__ = __bool__ = __int__ = __float__ = __complex__ = __index__ = _unknown
    __array__ = _unknown
    size = shape = nbytes = property(_unknown)

    def __getitem__(self, index: Any) -> Selected:
        mask: Any = np.logical_and(self._mask, self._points(index))
        return Selected(self._values, mask, self._axis)

    def __setitem__(self, index: Any, value: Any) -> None:
        if index is ... and value is self:
            return  # written already
        new: Any = np.where(_with_values(self, self._points(index)), value, self)
        if np.ndim(value) or new.dtype != self.dtype:
            raise refuse("it assigns an array through a mask")
        self._values = new._values

    def _points(self, index: Any) -> Any:
        """Where another mask holds that has an element for each of this one's."""
        if not isinstance(index, Selected) or index.dtype != bool or self.ndim > 1:
            return self._unknown()
        if not _alike(self, index) or index._values.shape != self._values.shape:
            return self._unknown()
        return index._values

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "reduce":
            axis = () if inputs[1:] or "axis" in kwargs else (0,)
            return _reduce_selected(ufunc.reduce, *inputs, *axis, **kwargs)
        if method != "__call__":
            raise refuse(f"numpy.{ufunc.__name__}.{method} of what a mask selects")
        out = kwargs.pop("out", None)
        (out,) = out if isinstance(out, tuple) else (out,)
        result = _at_all_points(ufunc, inputs, kwargs)
        if out is None:
            return result
        if not isinstance(out, Selected) or not _alike(out, result):
            raise refuse("it writes into an array that it is given (out=)")
        return out._written(result, kwargs.get("casting", "same_kind"))

    def _written(self, result: Selected, casting: str = "same_kind") -> Selected:
        if self._values.shape != result._values.shape:
            self._unknown()
        self._values = result._values.astype(self.dtype, casting=casting)
        return self

    def __array_function__(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        if func in _POINTWISE:
            return _at_all_points(func, args, kwargs)
        if func in _REDUCING:
            return _reduce_selected(func, *args, **kwargs)
        if func is np.histogram and current.get().products:
            return FUNCTIONS[np.histogram](*args, **kwargs)
        module = getattr(func, "__module__", None) or "numpy"
        raise refuse(f"{module}.{func.__name__} of what a mask selects")

    _scalar = False

    def __pow__(self, other: Any) -> Any:
        return Traced.__pow__(cast(Traced, self), other)

    def __ipow__(self, other: Any) -> Any:
        return self._written(self**other)

    def astype(self, dtype: Any, *args: Any, copy: bool = True, **kwargs: Any) -> Selected:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return _with_values(self, self._values.astype(dtype, *args, **kwargs))

    def copy(self, order: str = "C") -> Selected:
        return _with_values(self, self._values)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> Selected:
        return self.copy()

    def ravel(self, order: str = "C") -> Selected:
        return self if self.ndim == 1 else self._unknown()

    def flatten(self, order: str = "C") -> Selected:
        return self.ravel().copy()

    def conj(self) -> Any:
        return np.conjugate(self) if self.dtype.kind == "c" else self

    conjugate = conj

    def round(self, decimals: int = 0, out: Any = None) -> Any:
        no_out(out)
        return np.round(self, decimals)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **kwargs: Any) -> Any:
        no_out(out, kwargs)
        return np.clip(self, min, max)

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        return np.sum(self, *args, **kwargs)

    def prod(self, *args: Any, **kwargs: Any) -> Any:
        return np.prod(self, *args, **kwargs)

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        return np.mean(self, *args, **kwargs)

    def var(self, *args: Any, **kwargs: Any) -> Any:
        return np.var(self, *args, **kwargs)

    def std(self, *args: Any, **kwargs: Any) -> Any:
        return np.std(self, *args, **kwargs)

    def min(self, *args: Any, **kwargs: Any) -> Any:
        return np.min(self, *args, **kwargs)

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return np.max(self, *args, **kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        return np.any(self, *args, **kwargs)

    def all(self, *args: Any, **kwargs: Any) -> Any:
        return np.all(self, *args, **kwargs)


def _selected(x: Traced, index: Any) -> Selected | None:
    """What an index selects in which there is a mask, beside slices; None of any other index."""
    entries = index if isinstance(index, tuple) else (index,)
    masks = [i for i in entries if isinstance(i, Traced) and i.dtype == bool and i.shape]
    if not masks:
        return None
    others = [i for i in entries if i is not masks[0]]
    if len(others) < len(entries) - 1 or not all(i is ... or type(i) is slice for i in others):
        raise refuse("it indexes with an array")
    (mask,) = masks
    here = [i is mask for i in entries].index(True)
    whole = (slice(None),) * mask.ndim
    basic = (*entries[:here], *whole, *entries[here + 1 :])
    axis = here
    if ... in entries[:here]:
        axis += x.ndim - len(basic)  # the Ellipsis is one entry, for that many axes and one
    seen = x[basic]
    if seen.shape[axis : axis + mask.ndim] != mask.shape:
        raise IndexError(f"a mask of shape {mask.shape} for an array of shape {x.shape}")
    if mask.ndim < x.ndim and not current.get().products:
        raise refuse("it selects along an axis by a mask: NumPy reads no more than that")
    return Selected(seen.copy(), mask.copy(), axis)


def _put_back(x: Traced, index: Any, value: Selected) -> Traced:
    """`x` after `x[mask] = value`, where that is of the same elements."""
    before = _selected(x, index) if isinstance(index, Traced) else None
    if before is None or not _alike(before, value) or before._values.shape != value._values.shape:
        raise refuse("it assigns an array through a mask")
    return _where(_mask_over(value), value._values.astype(x.dtype), x)


def _with_values(like: Selected, values: Traced) -> Selected:
    return Selected(values, like._mask, like._axis)


def _mask_over(x: Selected) -> Traced:
    """The mask, with axes of length one in place of the other axes of the values."""
    own = range(x._axis, x._axis + x._mask.ndim)
    around = tuple([k for k in range(x._values.ndim) if k not in own])
    return _expand(x._mask, around) if around else x._mask


def _nan_elsewhere(x: Selected) -> Traced:
    """The values at all points, NaN at those that are not selected."""
    if x.dtype.kind in "iu" and x.itemsize <= 4:
        x = x.astype(np.float64)
    if x.dtype.kind != "f":
        raise refuse(f"it makes a histogram of {x.dtype} that a mask selects")
    return _where(_mask_over(x), x._values, x.dtype.type(np.nan))


def _alike(a: Selected, b: Selected) -> bool:
    """Whether both have the same axes, of which the same points are selected."""
    same = a._axis == b._axis and a.ndim == b.ndim and a._mask.shape == b._mask.shape
    return same and a._mask._expr == b._mask._expr


def _at_all_points(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = {}) -> Selected:
    """A function that goes element by element."""
    first = next(v for v in (*args, *kwargs.values()) if isinstance(v, Selected))

    if not current.get().products and function.__name__ not in _CHEAP:
        raise refuse(f"it computes {function.__name__} of what a mask selects: of fewer elements")

    def values(v: Any) -> Any:
        if isinstance(v, Selected):
            return v._values if _alike(v, first) else first._unknown()
        if isinstance(v, np.ndarray):
            v = _array(v)
        if not isinstance(v, Traced) or not v.shape:
            return v
        # which of its axes meets the one of the selected elements
        at = v.ndim - (first.ndim - first._axis)
        if v.ndim > first.ndim or (at >= 0 and v.shape[at] != 1):
            first._unknown()
        more = first._mask.ndim - 1
        return v if at < 0 or not more else _expand(v, tuple(range(at, at + more)))

    result = function(*map(values, args), **{k: values(v) for k, v in kwargs.items()})
    if not isinstance(result, Traced) or result.ndim != first._values.ndim:
        raise refuse(f"{getattr(function, '__name__', 'it')} of what a mask selects")
    return _with_values(first, result)


#: What processors compute of all elements as soon as NumPy picks out those that are wanted.
_CHEAP = words(
    "add subtract multiply divide negative positive absolute square sqrt maximum minimum where "
    "equal not_equal less less_equal greater greater_equal logical_and logical_or logical_not "
    "bitwise_and bitwise_or invert conjugate isnan isfinite clip copy"
)
#: Functions of NumPy's that go element by element, beyond ufuncs.
_POINTWISE = frozenset({
    np.where, np.clip, np.round, np.around, np.nan_to_num, np.isclose, np.angle, np.sinc, np.fix,
    np.isposinf, np.isneginf, np.copy,
})  # fmt: skip


def _reduce_selected(function: Any, a: Any, *args: Any, **given: Any) -> Any:
    """One of NumPy's reductions, or `ufunc.reduce`."""
    name = _REDUCING.get(function)
    if name is None or not isinstance(a, Selected):
        raise refuse(f"{function.__name__} of what a mask selects")
    names = ["axis", "dtype", "out"] if name in _WITH_TYPE else ["axis"]
    names = ["ord", "axis"] if name == "norm" else names
    if len(args) > len(names):
        raise refuse(f"it gives {name} many arguments")
    given = {**dict(zip(names, args, strict=False)), **given}
    keep, axis = given.pop("keepdims", False), given.pop("axis", None)
    no_out(given.pop("out", None))
    where = given.pop("where", True)
    if where is not True and where is not nothing:
        raise refuse("it uses where= with what a mask selects")
    keep = keep is not nothing and bool(keep)
    axes = _axes(a, axis)  # type: ignore[arg-type]
    first, more = a._axis, a._mask.ndim - 1
    others = tuple([k if k < first else k + more for k in axes if k != first])
    if first not in axes:
        if not axes:
            raise refuse("it reduces what a mask selects along no axis")
        values = function(a._values, axis=others, keepdims=keep, **given)
        return Selected(values, a._mask, first if keep else first - sum(k < first for k in axes))
    every = tuple(sorted((*others, *range(first, first + more + 1))))
    total = OVER_POINTS[name](a._values, _mask_over(a), every, **given)
    return _expand(total, axes) if keep else total


#: What reduces over those points at which a mask holds.
OVER_POINTS: dict[str, Callable[..., Any]] = {}
#: Reductions of what a mask selects, by their functions; and those whose second argument is a type.
_REDUCING = {
    **{getattr(np, name): name for name in words(
        "sum prod mean var std any all count_nonzero min max average nansum nanprod nanmean nanvar "
        "nanstd"
    )},
    np.amin: "min", np.amax: "max", np.linalg.norm: "norm",
    np.add.reduce: "sum", np.multiply.reduce: "prod", np.minimum.reduce: "min",
    np.maximum.reduce: "max", np.logical_or.reduce: "any", np.logical_and.reduce: "all",
}  # fmt: skip
_WITH_TYPE = words("sum prod mean var std nansum nanprod nanmean nanvar nanstd")


def _with_where(function: Any, change: Any = None) -> Callable[..., Any]:
    """A reduction that takes `where=`, of what `change` makes of the values."""

    def reduced(x: Traced, mask: Traced, axes: Shape, **given: Any) -> Any:
        return function(change(x) if change else x, axes, where=mask, **given)

    return reduced


def _count_where(x: Traced, mask: Traced, axes: Shape) -> Any:
    return _sum(np.logical_and(x, mask), axes, np.intp)


def _extreme_where(op: str, x: Traced, mask: Traced, axes: Shape, initial: Any = nothing) -> Any:
    if initial is nothing:
        raise refuse(f"the {op} of what a mask selects is an error where that is nothing")
    return _extreme(op, x, axes, initial=initial, where=mask)


def _norm_where(x: Traced, mask: Traced, axes: Shape, ord: Any = None) -> Any:
    if ord not in (None, 2) or len(axes) > mask.ndim:
        raise refuse("a norm of what a mask selects")
    x = x if x.dtype.kind in "fc" else x.astype(np.float64)
    square = np.square(x.real) + np.square(x.imag) if x.dtype.kind == "c" else np.square(x)
    return np.sqrt(_sum(square, axes, where=mask))


def _nanmean_where(x: Traced, mask: Traced, axes: Shape, dtype: Any = None) -> Any:
    if x.dtype.kind not in "fc":
        return _mean(x, axes, dtype, where=mask)
    count = _sum(np.logical_and(~np.isnan(x), mask), axes, np.intp)
    return _divided(_sum(_without_nan(x, 0), axes, dtype, where=mask), count)


def _var_where(
    x: Traced, mask: Traced, axes: Shape, dtype: Any = None, ddof: Any = 0,
    correction: Any = nothing, nan: bool = False, **others: Any,
) -> Any:  # fmt: skip
    no_out(None, {"dtype": dtype, **others})
    ddof, half = correction if correction is not nothing else ddof, x.dtype == np.float16
    if x.dtype.kind not in "fc":
        x, nan = x.astype(np.float64), False
    x = x.astype(np.float32) if half else x
    there: Any = np.logical_and(mask, ~np.isnan(x)) if nan else _broadcast(mask, x.shape)
    total, count = _squares(x, there, axes, None, False)
    degrees = _reshape(count, total.shape) - ddof
    if not nan:
        degrees = np.maximum(degrees, 0)
    variance = _divided(total, degrees)
    if nan:
        variance = _where(degrees <= 0, total.dtype.type(np.nan), variance)
    variance = variance.astype(np.float16) if half else variance
    return _scalar_if_point(variance)


def _std_where(*args: Any, **kwargs: Any) -> Any:
    return np.sqrt(_var_where(*args, **kwargs))


OVER_POINTS |= {
    "sum": _with_where(_sum), "prod": _with_where(_prod), "mean": _with_where(_mean),
    "average": _with_where(_mean), "count_nonzero": _count_where, "norm": _norm_where,
    "any": _with_where(functools.partial(_truth, "any")),
    "all": _with_where(functools.partial(_truth, "all")),
    "min": functools.partial(_extreme_where, "min"),
    "max": functools.partial(_extreme_where, "max"),
    "nansum": _with_where(_sum, functools.partial(_without_nan, value=0)),
    "nanprod": _with_where(_prod, functools.partial(_without_nan, value=1)),
    "nanmean": _nanmean_where, "var": _var_where, "std": _std_where,
    "nanvar": functools.partial(_var_where, nan=True),
    "nanstd": functools.partial(_std_where, nan=True),
}  # fmt: skip


def _chunk_extreme(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Dask's `chunk_min` or `chunk_max`, which of nothing make nothing."""

    def extreme(x: Any, axis: Any = None, keepdims: Any = None) -> Any:
        if not isinstance(x, Selected):
            return function(x, axis=axis, keepdims=keepdims)
        if x.ndim > 1 or not keepdims or x.dtype.kind == "c":
            return x._unknown()
        worst = _furthest(x.dtype, op == "min")
        value = _extreme(op, _where(x._mask, x._values, _array(worst)))
        return Selected(value.reshape(1), _truth("any", x._mask).reshape(1), 0)

    return extreme


def _furthest(dtype: DType, up: bool) -> Any:
    """The greatest or the least value of a type."""
    if dtype.kind == "b":
        return np.bool_(up)
    if dtype.kind == "f":
        return dtype.type(np.inf if up else -np.inf)
    return dtype.type(np.iinfo(dtype).max if up else np.iinfo(dtype).min)


for _op, _function in (("min", dask_reductions.chunk_min), ("max", dask_reductions.chunk_max)):
    KNOWN[_function] = _chunk_extreme(_op, _function)


@numel_lookup.register(Selected)  # type: ignore[untyped-decorator]
def _numel_selected(x: Selected, **kwargs: Any) -> Any:
    """How many elements a reduction over `axis` adds up: the points that are selected, and as many
    as the other axes are long."""
    axis, dtype = kwargs.get("axis"), kwargs.get("dtype", np.float64)
    ones = _with_values(x, Traced(constant(1, dtype), x._values.shape))
    axis = tuple(axis) if isinstance(axis, list) else axis
    return np.sum(ones, axis=axis, dtype=dtype, keepdims=kwargs.get("keepdims", False))


# ------------------------------------------------------------------------------------------------
# Dask's functions that are better said in other words.


@numel_lookup.register(Traced)  # type: ignore[untyped-decorator]
def _numel(x: Traced, **kwargs: Any) -> Any:
    """How many elements a reduction over `axis` adds up, as an array of the reduced shape."""
    axis, dtype = kwargs.get("axis"), kwargs.get("dtype", np.float64)
    keepdims = kwargs.get("keepdims", False)
    if axis is None and not keepdims:
        return np.prod(x.shape, dtype=dtype)
    axes = _axes(x, tuple(axis) if isinstance(axis, list) else axis)
    count = math.prod(x.shape[k] for k in axes)
    return Traced(constant(count, dtype), _reduced_shape(x, axes, keepdims))


@instead_of(dask_reductions.moment_chunk)
def _moment_chunk(
    A: Any, order: int = 2, sum: Any = dask_chunk.sum, numel: Any = dask_reductions.numel,
    dtype: Any = "f8", computing_meta: bool = False, implicit_complex_dtype: bool = False,
    axis: Any = None, keepdims: Any = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Mean and squared deviations in one pass over the chunk, where Dask takes two."""
    dtype = np.dtype(dtype)
    two = not (isinstance(A, Traced) and A.dtype.kind != "c" and dtype.kind == "f" and A.size)
    if two or computing_meta or order != 2 or kwargs or sum is not dask_chunk.sum:
        return dask_reductions.moment_chunk(
            A, order=order, sum=sum, numel=numel, dtype=dtype, computing_meta=computing_meta,
            implicit_complex_dtype=implicit_complex_dtype, axis=axis, keepdims=keepdims, **kwargs,
        )  # fmt: skip
    axes = _axes(A, axis)
    mean, squares = _moment(A, axes, dtype, keepdims)
    count = Traced(constant(_count(A, axes), np.int64), mean.shape)
    return {
        "total": np.multiply(mean, _count(A, axes)).astype(dtype),
        "n": count,
        "M": _expand(squares.astype(dtype), -1),
    }


def _few_moments(
    pairs: Any, order: int, sum: Any, axis: Any, others: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What a few moments make together, of blocks that are one element thick and whose counts are
    known, element by element and in double precision. None of others: then nothing is reduced one
    by one, for sums are in what Dask adds up next, and each element of that would take them anew.
    """
    few = None
    if others.keys() <= {"keepdims"}:
        few = _beside_each_other(list(flatten([pairs])), order, sum, axis)
    if few is None:
        current.get().short = False
    return few


def _beside_each_other(
    every: list[Any], order: int, sum: Any, axis: Any
) -> dict[str, Any] | None:  # fmt: skip
    if order != 2 or sum is not np.sum or not current.get().products or len(every) > SHORT:
        return None
    totals, counts, squares = ([p[name] for p in every] for name in ("total", "n", "M"))
    arrays = [a for a in (*totals, *counts) if isinstance(a, Traced)]
    if len(arrays) < 2 * len(every) or any(a.shape != arrays[0].shape for a in arrays):
        return None
    first = arrays[0]
    thick = any(first.shape[k] != 1 for k in _axes(first, axis)) or not first.size
    if thick or first.dtype.kind != "f" or any(n._expr.op != "constant" for n in counts):
        return None
    numbers = [int(n._expr.value) for n in counts]
    n = np.int64(builtins.sum(numbers))
    wide = [t.astype(np.float64) for t in totals]
    total = functools.reduce(np.add, wide)
    mean, away = np.true_divide(total, n), []
    for t, k, m in zip(wide, numbers, squares, strict=True):
        square = np.square(np.subtract(t if k == 1 else np.true_divide(t, np.int64(k)), mean))
        own = m[..., 0].astype(np.float64)
        away += [own, square if k == 1 else np.multiply(square, np.float64(k))]
    return {"total": total, "n": n, "M": functools.reduce(np.add, away)}


@instead_of(dask_reductions.moment_combine)
def _moment_combine(
    pairs: Any, order: int = 2, ddof: Any = 0, dtype: Any = "f8", sum: Any = np.sum,
    axis: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    few = _few_moments(pairs, order, sum, axis, kwargs)
    if few is None:
        return dask_reductions.moment_combine(pairs, order, ddof, dtype, sum, axis, **kwargs)
    first = next(flatten([pairs]))
    total = few["total"].astype(first["total"].dtype)
    count = Traced(constant(few["n"], np.int64), total.shape)
    return {"total": total, "n": count, "M": _expand(few["M"].astype(first["M"].dtype), -1)}


@instead_of(dask_reductions.moment_agg)
def _moment_agg(
    pairs: Any, order: int = 2, ddof: Any = 0, dtype: Any = "f8", sum: Any = np.sum,
    axis: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    few = _few_moments(pairs, order, sum, axis, kwargs)
    if few is None:
        return dask_reductions.moment_agg(pairs, order, ddof, dtype, sum, axis, **kwargs)
    squares, left = few["M"], few["n"] - ddof
    shape = _reduced_shape(squares, _axes(squares, axis), kwargs.get("keepdims", False))
    variance = np.true_divide(squares, np.float64(left if left >= 0 else np.nan))
    return _scalar_if_point(_reshape(variance.astype(dtype), shape))


@instead_of(dask_reductions._nanargmin)
def _nanargmin(x: Any, axis: Any, **kwargs: Any) -> Traced:
    return dask_chunk.argmin(_without_nan(_array(x), np.inf), axis, **kwargs)  # type: ignore[no-any-return]


@instead_of(dask_reductions._nanargmax)
def _nanargmax(x: Any, axis: Any, **kwargs: Any) -> Traced:
    return dask_chunk.argmax(_without_nan(_array(x), -np.inf), axis, **kwargs)  # type: ignore[no-any-return]


#: Dask's argument functions: the reduction, and what a NaN counts as.
_ARGS: dict[Any, tuple[str, float | None]] = {
    dask_chunk.argmin: ("argmin", None), dask_chunk.argmax: ("argmax", None),
    dask_reductions._nanargmin: ("argmin", np.inf), _nanargmin: ("argmin", np.inf),
    dask_reductions._nanargmax: ("argmax", -np.inf), _nanargmax: ("argmax", -np.inf),
}  # fmt: skip


def _first_best(argfunc: Any, x: Traced, axis: int | None) -> tuple[Traced, Traced]:
    """Where the extreme value is along an axis (or at all), and the value; axes kept."""
    op, nan = _ARGS[argfunc]
    whole = x if nan is None else _without_nan(x, nan)
    axes = _axes(x, axis)
    at, value = _reduce(op, whole, axes, (np.int64, x.dtype), True)
    if nan is not None:  # the value is NaN where all are
        value = _extreme("fmin" if op == "argmin" else "fmax", x, axes, keepdims=True)
    return at, value


@instead_of(dask_reductions.arg_chunk)
def _arg_chunk(func: Any, argfunc: Any, x: Any, axis: Any, offset_info: Any) -> Any:
    along = None if len(axis) == x.ndim or x.ndim == 1 else axis[0]
    _not_empty(x, _axes(x, along), "reduction operation " + _ARGS[argfunc][0])
    at, value = _first_best(argfunc, x, along)
    if x.ndim and along is None:
        offset, total = offset_info
        place: Any = 0
        for k, n in enumerate(x.shape):
            inner = math.prod(x.shape[k + 1 :])
            here = at // inner if inner > 1 else at
            here = here % n if k else here
            place = place + (here + _one(offset[k])) * math.prod(total[k + 1 :])
        at = place
    elif x.ndim:
        at = at + _one(offset_info)
    return {"vals": value, "arg": at}


def _one(number: Any) -> Any:
    """A number that is given as such, or as the only one of an array."""
    return _reshape(number, ()) if isinstance(number, Traced) else int(number)


def _arg_merge(data: Any, axis: Any, argfunc: Any, keepdims: bool) -> tuple[Traced, Traced]:
    values, places = data["vals"], data["arg"]
    along = None if len(axis) == values.ndim or values.ndim == 1 else axis[0]
    at, value = _first_best(argfunc, values, along)
    position = View.contiguous(values.shape)
    if along is not None:
        position = View(0, tuple(int(k == along) for k in range(values.ndim)))
    index = Traced(node_of("index", (), np.int64, position), values.shape)
    # the one place that belongs to the best value, among zeros
    chosen = _where(index == at, places, places.dtype.type(0))
    place = _sum(chosen, along, places.dtype, keepdims=keepdims)
    return place, value if keepdims else _reshape(value, place.shape)


@instead_of(dask_reductions.arg_combine)
def _arg_combine(argfunc: Any, data: Any, axis: Any = None, **kwargs: Any) -> Any:
    place, value = _arg_merge(data, axis, argfunc, True)
    return {"vals": value, "arg": place}


@instead_of(dask_reductions.arg_agg)
def _arg_agg(
    argfunc: Any, data: Any, axis: Any = None, keepdims: bool = False, **kwargs: Any
) -> Any:
    return _arg_merge(data, axis, argfunc, keepdims)[0]


@instead_of(dask_reductions.nanarg_agg)
def _nanarg_agg(*args: Any, **kwargs: Any) -> Any:
    raise refuse("numpy.nanargmin is an error where all values are NaN")


def _getting(getter: Callable[..., Any]) -> Callable[..., Any]:
    def get(a: Any, b: Any, asarray: bool = True, lock: Any = None) -> Any:
        if lock:
            raise refuse("it takes a lock")
        return getter(a, b, asarray=asarray)

    return get


for _getter in GETTERS:
    if "asarray" in _getter.__code__.co_varnames:
        KNOWN[_getter] = _getting(_getter)


@instead_of(takes.taken)
def _taken(x: Any, axis: int, slices: Iterable[slice]) -> Any:
    """A view: what makes it copies it, and readers that are kernels write into nothing."""
    return takes.joined(takes.parts_of(_array(x), axis, slices), axis)


@instead_of(takes.picked)
def _picked(x: Any, axis: int, numbers: Any, length: int) -> Any:
    """Elements of an array along an axis, by their numbers, of which each is less than `length`."""
    if not current.get().products:
        raise refuse("it indexes with an array: NumPy's own is as fast")
    x, numbers = _array(x), _array(numbers)
    if x.shape[axis] != length:  # they are read without a look at how many there are
        raise refuse(f"it takes elements of {length}, and there are {x.shape[axis]}")
    shape = (*x.shape[:axis], numbers.size, *x.shape[axis + 1 :])
    if 0 in x.shape or 0 in shape:
        return Traced(constant(0, x.dtype), shape)
    line = _look(numbers, lambda a: a.reshape((-1,) + (1,) * (x.ndim - axis - 1)))
    number = cast_to(_broadcast(line, shape)._expr, np.int64)

    def scaled(step: int) -> Expr:
        return number if step == 1 else _apply(np.multiply, number, step)

    new: dict[int, Expr] = {}
    for old in nodes((x._expr,)):
        args = tuple([new[id(a)] for a in old.args])
        view = view_of(old)
        step = 0 if view is None or x.shape[axis] == 1 else view.strides[axis]
        if view is not None:
            still = View(view.offset, (*view.strides[:axis], 0, *view.strides[axis + 1 :]))
            leaf = with_view(old, still)
            found = node_of(leaf.op, (), leaf.dtype, leaf.data)
            if step and old.op == "index":
                found = _apply(np.add, found, scaled(step))
            elif step:
                found = node_of("taken", (found, scaled(step)), leaf.dtype)
        elif old.op == "taken" and args[0].op == "taken":
            base, place = args[0].args
            found = node_of("taken", (base, _apply(np.add, place, args[1])), old.dtype)
        elif old.op in RANDOM:
            raise refuse("it takes random numbers by a list")
        else:
            found = node_of(old.op, args, old.dtype, old.data)
        new[id(old)] = found
    return Traced(new[id(x._expr)], shape)


@instead_of(takes.reordered)
def _reordered(arrays: list[Any], axis: int, numbers: Any) -> Any:
    return _picked(takes.joined(arrays, axis), axis, numbers, numbers.size)


#: What Dask makes ones, zeros and the like of: one element, seen as many.
_UNIFORM = dask_wrap._broadcast_trick_inner.func


def _uniform(
    like: Callable[..., Any], shape: Any, meta: Any = (), *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = getattr(meta, "dtype", np.dtype(float))
    if like is np.empty_like:
        like = np.zeros_like
    value = like(np.empty((), kwargs["dtype"]), *args, shape=(), **kwargs)
    return Traced(constant(value, value.dtype), _shape_of(shape))


KNOWN_CURRIED[_UNIFORM] = _uniform


def _shape_of(shape: Any) -> Shape:
    return tuple(map(int, shape)) if isinstance(shape, Iterable) else (int(shape),)


@instead_of(dask_chunk.arange)
def _arange(start: Any, stop: Any, step: Any, length: int, dtype: Any, like: Any = None) -> Any:
    """`start + i * step` as `numpy.arange` computes it: from its first two elements."""
    dtype = checked(dtype)
    pair = np.arange(start, start + 2 * step, step, dtype=dtype)[:2]
    n = min(len(range(int(length))), len(np.broadcast_to(0, (_arange_length(start, stop, step),))))
    i = Traced(_axis_index((n,), 0), (n,))
    if dtype.kind in "iu":
        return i.astype(dtype) * dtype.type(pair[1] - pair[0]) + pair[0]
    if dtype.kind != "f" or len(pair) < 2:
        raise refuse(f"it makes a range of type {dtype}")
    wide = np.float32 if dtype == np.float16 else dtype
    delta = np.subtract(pair[1], pair[0], dtype=wide)
    return (i.astype(wide) * delta + pair[0].astype(wide)).astype(dtype)


def _arange_length(start: Any, stop: Any, step: Any) -> int:
    return max(0, int(math.ceil((stop - start) / step)))


@instead_of(dask_chunk.linspace)
def _linspace(start: Any, stop: Any, num: int, endpoint: bool = True, dtype: Any = None) -> Any:
    """`numpy.linspace`: its last point is `stop` itself."""
    parts = num - 1 if endpoint else num
    if not all(isinstance(v, int | float | np.number) for v in (start, stop)) or parts <= 0:
        raise refuse("it spaces points between arrays")
    wide = np.result_type(start, stop, float(num))
    if wide != np.float64 or num < 1:
        raise refuse(f"it spaces points of type {wide}")
    delta = np.float64(stop) - np.float64(start)
    step = delta / parts
    i = Traced(_axis_index((num,), 0), (num,))
    scaled = i.astype(wide) * step if step != 0 else i.astype(wide) / parts * delta
    points = scaled + np.float64(start)
    if endpoint and num > 1:
        points = _where(i == num - 1, np.float64(stop), points)
    dtype = np.dtype(wide if dtype is None else dtype)
    return np.floor(points).astype(dtype) if dtype.kind in "iu" else points.astype(dtype)


@instead_of(np.zeros)
def _zeros(shape: Any, dtype: Any = float, order: str = "C", **kwargs: Any) -> Any:
    return _filled(shape, 0, dtype)


@instead_of(np.ones)
def _ones(shape: Any, dtype: Any = float, order: str = "C", **kwargs: Any) -> Any:
    return _filled(shape, 1, dtype)


@instead_of(np.full)
def _full_of(
    shape: Any, fill_value: Any, dtype: Any = None, order: str = "C", **kwargs: Any
) -> Any:
    return _filled(shape, fill_value, dtype)


def _filled(shape: Any, value: Any, dtype: Any) -> Traced:
    shape = (shape,) if isinstance(shape, int | np.integer) else shape
    shape = tuple(operator.index(n) for n in shape)
    fill = _array(value if isinstance(value, Traced) else np.full((), value, dtype))
    fill = fill if dtype is None else fill.astype(dtype)
    return Traced(_broadcast(fill, shape)._expr, shape)


@instead_of(np.eye)
def _eye(
    N: int, M: int | None = None, k: int = 0, dtype: Any = float, order: str = "C", **kwargs: Any
) -> Any:
    shape = (int(N), int(N if M is None else M))
    row, column = (_axis_index(shape, axis) for axis in (0, 1))
    on = _apply(np.equal, column, _apply(np.add, row, int(k)) if k else row)
    return Traced(on, shape).astype(dtype)


# ------------------------------------------------------------------------------------------------
# Python's own functions of numbers.


def _like_nothing(function: Any) -> Callable[..., Any]:
    """`numpy.full_like` and its like of an array without elements, which only says what to make:
    one of CuPy's would be made while the function is followed."""

    @functools.wraps(function)
    def made(a: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("shape") is None or not is_nothing(a):
            return function(a, *args, **kwargs)
        return FUNCTIONS[function](_filled((0,), 0, a.dtype), *args, **kwargs)

    return made


for _function in (np.full_like, np.ones_like, np.zeros_like, np.empty_like):
    KNOWN[_function] = _like_nothing(_function)


def _apply_adapted(func: Any, args: Any, kwargs: Any = None) -> Any:
    return (func if isinstance(func, CALLED) else adapted(func))(*args, **(kwargs or {}))


KNOWN[dask_apply] = _apply_adapted


def _of_numbers(python: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """`own` where an argument is an array, else Python's: its numbers change no type."""
    where = f"{python.__module__}.{python.__name__}"

    @functools.wraps(python)
    def either(*args: Any, **kwargs: Any) -> Any:
        every = [v for a in args for v in (a if isinstance(a, (tuple, list)) else (a,))]
        known = [v for v in every if isinstance(v, Traced)]
        if any(v.dtype.kind == "c" for v in known) and python.__module__ != "cmath":
            raise refuse(f"it calls {where} with a complex number")
        if known and current.get().beside is not None:  # no mesh, whose points are numbers
            if python not in (min, max):  # which may be an error, and changes no type
                raise refuse(f"it makes a number of Python's by {where}")
            if any(v.shape for v in known):
                raise refuse(f"it calls {python.__name__} with an array")
        return own(*args, **kwargs) if known else python(*args, **kwargs)

    return either


def _array_classes() -> list[type]:
    """What arrays may be when the task runs."""
    following, cupy = current.get(None), sys.modules.get("cupy")
    on_gpus = cupy is not None and (following is None or following.products)
    return [np.ndarray, cupy.ndarray] if on_gpus and cupy is not None else [np.ndarray]


def _is_instance(value: Any, kinds: Any) -> bool:
    """Where all that the array may be when the task runs agrees on it."""
    if type(value) not in (Traced, Selected):
        return isinstance(value, kinds)
    number, arrays = value.dtype.type, _array_classes()
    if current.get().beside is None:  # a mesh: of points one by one, or of many at once
        python = {"f": np.float64, "c": np.complex128}.get(value.dtype.kind, number)
        may_be = [python, *arrays]
    elif value.ndim:
        may_be = arrays
    else:  # NumPy's scalars are 0-dimensional arrays of CuPy's, whose class is NumPy's by now
        may_be = [number] if value._scalar and len(arrays) == 1 else [number, *arrays]
    answers = {issubclass(k, kinds) for k in may_be}
    if len(answers) > 1:
        raise refuse("it asks for the type of an array")
    return answers.pop()


def _has(value: Any, name: str) -> bool:
    if type(value) not in (Traced, Selected):
        return hasattr(value, name)
    answers = {hasattr(k, name) for k in _array_classes()}
    if len(answers) > 1:
        raise refuse(f"it asks whether an array has .{name}")
    return answers.pop()


KNOWN[isinstance], KNOWN[hasattr] = _is_instance, _has


def _lesser(a: Any, b: Any) -> Any:
    return np.where(np.less(b, a), b, a)  # of a NaN and a number, Python gives the first


def _greater(a: Any, b: Any) -> Any:
    return np.where(np.greater(b, a), b, a)


def _best_of(choose: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def best(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or kwargs:
            raise refuse("it looks for the least or greatest element one by one")
        types = {a.dtype for a in args if isinstance(a, Traced)}
        if current.get().beside is not None and types != {_result_type(*args)}:
            raise refuse("it looks for the least or greatest of values of several types")
        return _scalar_if_point(functools.reduce(choose, args))

    return best


def _whole(rounding: Any) -> Callable[[Any], Any]:
    return lambda x: rounding(x).astype(np.int64) if _array(x).dtype.kind == "f" else x


def _logarithm(x: Any, base: Any = None) -> Any:
    return _log(x) if base is None else _log(x) / _log(base)


def _log(x: Any) -> Any:
    """Of a number of Python's it is one, and changes no type."""
    if isinstance(x, Traced):
        return np.log(x)
    with np.errstate(all="ignore"):
        return np.log(x if isinstance(x, complex) else float(x)).item()


def _distance(*coordinates: Any) -> Any:
    if len(coordinates) < 2:
        return abs(coordinates[0]) if coordinates else 0.0
    return functools.reduce(np.hypot, coordinates)


def _between(p: Sequence[Any], q: Sequence[Any]) -> Any:
    return _distance(*[a - b for a, b in zip(p, q, strict=True)])


def _special_of(name: str) -> Callable[..., Any]:
    def special(*args: Any) -> Any:
        library = scipy_special()
        if library is None:
            raise refuse(f"it calls math.{name}, which SciPy would be needed for")
        return getattr(library, name)(*args)

    return special


#: NumPy's names for functions of Python's `math`.
_MATH_NAMES = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atan2": "arctan2", "atanh": "arctanh", "pow": "power", "degrees": "degrees",
    "radians": "radians", "gcd": "gcd", "lcm": "lcm",
    **{name: name for name in words(
        "cbrt copysign cos cosh exp exp2 expm1 fabs fmod isfinite isinf isnan ldexp log10 "
        "log1p log2 nextafter sin sinh sqrt tan tanh"
    )},
}  # fmt: skip
_MATH_OWN: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, numpys) for name, numpys in _MATH_NAMES.items()},
    "floor": _whole(np.floor), "ceil": _whole(np.ceil), "trunc": _whole(np.trunc),
    "log": _logarithm, "hypot": _distance, "dist": _between,
    "gamma": _special_of("gamma"), "lgamma": _special_of("gammaln"),
    "erf": _special_of("erf"), "erfc": _special_of("erfc"),
}  # fmt: skip


def _as_complex(x: Any) -> Any:
    """A number of `cmath`'s, as precise as `x`."""
    if not isinstance(x, Traced):
        return complex(x)
    return x.astype(np.result_type(x.dtype, np.complex64 if x.dtype.kind in "fc" else complex))


def _complex_logarithm(*args: Any) -> Any:
    return _logarithm(*map(_as_complex, args))


def _of_complex(numpys: Any) -> Callable[[Any], Any]:
    return lambda z: numpys(_as_complex(z))


def _phase(z: Any) -> Any:
    z = _as_complex(z)
    return np.arctan2(z.imag, z.real)


def _polar(z: Any) -> tuple[Any, Any]:
    return abs(_as_complex(z)), _phase(z)


def _rect(r: Any, phi: Any) -> Any:
    turn = np.exp(1j * phi) if isinstance(phi, Traced) else cmath.rect(1, phi)
    return _number_of_parts(r * turn.real, r * turn.imag)


def _number_of_parts(real: Any = 0, imag: Any = 0) -> Any:
    """What `complex` makes of two numbers: `real + imag * 1j`."""
    if isinstance(real, str):
        raise refuse("it reads a number from text")
    given = [v.dtype for v in (real, imag) if isinstance(v, Traced)]
    for dtype in given:
        if dtype.kind not in "biufc":
            raise refuse(f"it makes a complex number of {dtype}")
    some = [t for t in given if t.kind != "b"]
    single = bool(some) and all(t in (np.float32, np.complex64) for t in some)
    wide = np.dtype(np.float32 if single else np.float64)

    def parts(v: Any) -> tuple[Traced, Traced]:
        v = _array(v)
        both = (v.real, v.imag) if v.dtype.kind == "c" else (v, _array(0.0))
        return both[0].astype(wide), both[1].astype(wide)

    (a, b), (c, d) = parts(real), parts(imag)
    whole, rest = a, c  # (a + bi) + (c + di) i
    if _array(imag).dtype.kind == "c":
        whole = a - d
    if _array(real).dtype.kind == "c":
        rest = b + c
    a, c = cast(list[Traced], np.broadcast_arrays(whole, rest))
    return _scalar_if_point(_complex(a, c, np.result_type(wide, np.complex64)))


class _ComplexType(type(complex)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, complex)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, complex)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known = any(isinstance(v, Traced) for v in (*args, *kwargs.values()))
        return (_number_of_parts if known else complex)(*args, **kwargs)


class _Complex(complex, metaclass=_ComplexType):
    """The type `complex` for functions of a mesh, whose numbers are arrays while these are
    followed."""

    dtype = np.dtype(complex)  # NumPy asks for it


_CMATH_NAMES = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atanh": "arctanh",
    **{name: name for name in words(
        "cos cosh exp isfinite isinf isnan log10 sin sinh sqrt tan tanh"
    )},
}  # fmt: skip
_CMATH_OWN: dict[str, Callable[..., Any]] = {
    **{name: _of_complex(getattr(np, numpys)) for name, numpys in _CMATH_NAMES.items()},
    "log": _complex_logarithm,
    "phase": _phase, "polar": _polar, "rect": _rect,
}  # fmt: skip
for _module, _functions in ((math, _MATH_OWN), (cmath, _CMATH_OWN)):
    OF_NUMBERS[_module] = SimpleNamespace(**vars(_module))
    for _name, _own in _functions.items():
        if hasattr(_module, _name):  # not in every version of Python
            KNOWN[getattr(_module, _name)] = _of_numbers(getattr(_module, _name), _own)
            setattr(OF_NUMBERS[_module], _name, KNOWN[getattr(_module, _name)])
KNOWN[min] = _of_numbers(min, _best_of(_lesser))
KNOWN[max] = _of_numbers(max, _best_of(_greater))


def applied(expr: Expr, arrays: Sequence[Traced]) -> Traced:
    """What an expression of single elements of inputs 0, 1, … is of each element of arrays, which
    are broadcast against each other."""
    shape = np.broadcast_shapes(*[a.shape for a in arrays])
    every = [_broadcast(a, shape)._expr for a in arrays]
    new: dict[int, Expr] = {}
    for node in nodes((expr,)):
        if node.op == "input":
            new[id(node)] = every[node.data[0]]
        else:
            args = tuple([new[id(a)] for a in node.args])
            new[id(node)] = node_of(node.op, args, node.dtype, node.data)
    return Traced(new[id(expr)], shape)


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
        return _read_beside(value)
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
            return _Complex
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


#: Elements of an array that is made while a function is followed, at most: it is made on the host,
#: where a large one takes its time.
MOST_MADE = 2**20


def _of_shape(shape: Any, *_: Any, **__: Any) -> int:
    return math.prod(_shape_of(shape))


def _of_rows(N: int, M: int | None = None, *_: Any, **__: Any) -> int:
    return int(N) * int(N if M is None else M)


def _of_range(start: Any, stop: Any = None, step: Any = 1, *_: Any, **__: Any) -> int:
    start, stop = (0, start) if stop is None else (start, stop)
    return _arange_length(start, stop, 1 if step is None else step)


def _of_points(start: Any, stop: Any, num: int = 50, *_: Any, **__: Any) -> int:
    return int(num)


#: NumPy's functions that make arrays of nothing, and how many elements.
_MAKERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(words("empty zeros ones full"), _of_shape),
    "indices": lambda dimensions, *_, **__: _of_shape(dimensions) * len(dimensions),
    "fromfunction": lambda function, shape, **_: _of_shape(shape),
    "broadcast_to": lambda array, shape, **_: _of_shape(shape),
    "eye": _of_rows, "tri": _of_rows, "identity": lambda n, *_, **__: int(n) ** 2,
    "arange": _of_range,
    **dict.fromkeys(words("linspace logspace geomspace"), _of_points),
}  # fmt: skip


def _little(name: str) -> Callable[..., Any]:
    make, count = getattr(np, name), _MAKERS[name]

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(v, Traced) for v in (*args, *kwargs.values())):
            elements = count(*args, **kwargs)
            if elements > MOST_MADE:
                raise refuse(f"it makes an array of {elements:,} elements")
        value = make(*args, **kwargs)
        beside = current.get().beside
        if beside is not None and beside.every and is_array(value) and value.size > 1:
            return _read_beside(value, own=True).copy()
        return value

    return made


def _converted(name: str) -> Callable[..., Any]:
    """A function that makes an array of what may be one already."""
    make = getattr(np, name)

    @functools.wraps(make)
    def made(a: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        inside = a if isinstance(a, (list, tuple)) else (a,)
        if not any(isinstance(v, Traced) for v in inside):
            return make(a, dtype, *args, **kwargs)
        x = _array(a)
        following, contiguous = current.get(), name in ("ascontiguousarray", "asfortranarray")
        # what is written to a copy is not written to `a`
        copies = name == "array" or (name == "ascontiguousarray" and not following.is_beside(x))
        copy = kwargs.get("copy", copies)
        out = x.astype(x.dtype if dtype is None else dtype, copy=bool(copy))
        own = not any(x._family is given for given in following.given)
        if contiguous and own and out.dtype == x.dtype:  # whether it is a copy is not known
            out = Traced(out._expr, out.shape, of=x)
        elif out._scalar:
            out = Traced(out._expr, ())
        missing = kwargs.get("ndmin", int(contiguous)) - out.ndim
        return _look(out, lambda a: a[(None,) * missing]) if missing > 0 else out

    return made


def _sent(name: str) -> Callable[..., Any]:
    """CuPy's may move what is on the host. NumPy has nothing like that, which is refused, but for
    what is on the devices before the function runs."""
    make, beside = getattr(np, name), _converted(name)

    @functools.wraps(make)
    def made(a: Any, *args: Any, **kwargs: Any) -> Any:
        there = isinstance(a, Traced) and current.get().is_beside(a)
        return (beside if there else make)(a, *args, **kwargs)

    return made


for _name in _MAKERS:
    setattr(NUMPY, _name, _little(_name))
    setattr(CUPY, _name, getattr(NUMPY, _name))
for _name in CONVERTING - {"asfortranarray"}:
    setattr(NUMPY, _name, _converted(_name))
for _name in CONVERTING:
    setattr(CUPY, _name, _sent(_name))
for _name in vars(NUMPY):
    KNOWN.setdefault(getattr(np, _name), getattr(NUMPY, _name))  # under a name of its own

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
                value = _array(value)
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
