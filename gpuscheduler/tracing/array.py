"""Traced arrays: expressions over a shape, which behave as NumPy's arrays do.

NumPy's protocols lead each operation here, so that NumPy's own rules for types and shapes hold.
Modules below this one enter what they implement: NumPy's functions in `FUNCTIONS`, methods in
`METHODS`. A result becomes a new leaf, computed once, where it is reduced, where it is broadcast
after a reduction, and where it has to be copied before it can be reshaped.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..frontend import index_lists
from ..ir.expr import (
    LEAVES,
    SCANS,
    DType,
    Expr,
    Shape,
    View,
    nodes,
)
from ..ir.split_scans import BOTH
from .abstract import AbstractArray, StoredArray
from .context import (
    abstract_of,
    apply_view,
    cast_to,
    change_views,
    check_dtype,
    constant,
    current,
    made_in,
    node_of,
    refuse,
)

MOST_PARTS = 64  # of a concatenation
FEW = 64  # elements that are put side by side, to be reduced one by one
#: Scans, by the ufunc that combines two elements.
ACCUMULATED = {BOTH[op]: scan for scan, op in SCANS.items()}

# ------------------------------------------------------------------------------------------------
# The arrays.

#: The function that is called for each of NumPy's functions of arrays.
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
#: The function that is called for a method of ufuncs, or of `TracedArray`. Modules after this one
#: enter theirs here.
METHODS: dict[str, Callable[..., Any]] = {}


def implements(*names: str) -> Callable[[Any], Any]:
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


class UnknownSizeArray(NDArrayOperatorsMixin):
    """An array whose number of elements the trace does not know.

    Operations between both kinds of arrays are its own: `TracedArray` leaves them to it.

    It handles operations between both kinds of arrays: `TracedArray` leaves them to it.
    """

    __array_priority__ = 2e6


class TracedArray(NDArrayOperatorsMixin):
    """An array known by the expression of its elements.

    It behaves as a NumPy array does, as far as no values are needed.
    """

    __array_priority__ = 1e6
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, expr: Expr, shape: Shape, scalar: bool = False, of: TracedArray | None = None
    ):
        self._expr = expr
        self.shape = shape
        self._scalar = scalar  # NumPy would give a scalar
        #: Whoever shares memory with this one in NumPy: what is written to one is seen by all.
        #: Nobody does with a scalar, of which NumPy gives copies alone.
        self._family: list[weakref.ref[TracedArray]] = (
            [] if of is None or of._scalar else of._family
        )
        self._family.append(weakref.ref(self))
        #: What this is a part of, and by which index: `y[1:] += 1` writes through it.
        self._part_of: tuple[TracedArray, tuple[Any, ...]] | None = None
        #: Of one axis: the array, as it was, whose elements these are in order, and what this is
        #: as long as nobody writes to it.
        self._rows: tuple[TracedArray, Expr] | None = None

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
        return f"<TracedArray {self.dtype} {self.shape}>"

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes that arrays have and this class has not."""
        if not name.startswith("_") and any(hasattr(k, name) for k in array_classes()):
            raise refuse(f"it reads .{name} of an array")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[TracedArray]:
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
        if any(isinstance(i, UnknownSizeArray) for i in inputs):
            return NotImplemented
        if method == "__call__":
            return METHODS["__call__"](ufunc, inputs, **kwargs)
        name = ufunc.__name__
        if method == "reduce" or (method == "accumulate" and name in ACCUMULATED):
            return METHODS[method](ufunc, *inputs, **kwargs)
        if method == "outer" and len(inputs) == 2 and not kwargs:
            a, b = (as_traced(i) for i in inputs)
            return METHODS["__call__"](ufunc, (a.reshape(a.shape + (1,) * b.ndim), b))
        raise refuse(f"numpy.{name}.{method} is not element-wise or a reduction")

    def __array_function__(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        if any(issubclass(t, UnknownSizeArray) for t in _types):
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
        return METHODS["write_in_place"](self, self**other)

    # elements

    def __getitem__(self, index: Any) -> TracedArray:
        return cast(TracedArray, METHODS["__getitem__"](self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        METHODS["__setitem__"](self, index, value)

    @property
    def T(self) -> TracedArray:
        return self.transpose()

    @property
    def mT(self) -> TracedArray:
        return self.swapaxes(-1, -2)

    @property
    def real(self) -> TracedArray:
        if self.dtype.kind != "c":
            return self
        return cast(TracedArray, METHODS["part"]("real", self))

    @property
    def imag(self) -> TracedArray:
        if self.dtype.kind != "c":
            return TracedArray(constant(0, self.dtype), self.shape)
        return cast(TracedArray, METHODS["part"]("imag", self))

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = "unsafe", subok: bool = True,
        copy: bool = True,
    ) -> TracedArray:  # fmt: skip
        dtype = check_dtype(dtype)
        if not np.can_cast(self.dtype, dtype, casting):
            raise TypeError(f"Cannot cast array data from {self.dtype} to {dtype}")
        if not copy and dtype == self.dtype:
            return self
        return TracedArray(cast_to(self._expr, dtype), self.shape, self._scalar)

    def copy(self, order: str = "C") -> TracedArray:
        return TracedArray(self._expr, self.shape, self._scalar)

    def __copy__(self) -> TracedArray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> TracedArray:
        return self.copy()

    def fill(self, value: Any) -> None:
        self[...] = value

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> TracedArray:
        wanted = shape[0] if len(shape) == 1 else shape
        return reshape_array(self, wanted, order)

    def ravel(self, order: str = "C") -> TracedArray:
        return reshape_array(self, (-1,), order)

    def flatten(self, order: str = "C") -> TracedArray:
        return self.ravel(order).copy()

    def transpose(self, *axes: Any) -> TracedArray:
        seen = look(self, lambda a: a.transpose(*axes))
        return self if self._scalar else seen

    def swapaxes(self, a: int, b: int) -> TracedArray:
        return look(self, lambda x: x.swapaxes(a, b))

    def repeat(self, repeats: Any, axis: Any = None) -> Any:
        return FUNCTIONS[np.repeat](self, repeats, axis)

    def squeeze(self, axis: Any = None) -> TracedArray:
        view = look(self, lambda a: a.squeeze(axis))
        return self if view.shape == self.shape else view

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> TracedArray:
        return look(self, lambda a: a.diagonal(offset, axis1, axis2))

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
        return FUNCTIONS[np.round](self, decimals, out)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **kwargs: Any) -> Any:
        return FUNCTIONS[np.clip](self, min, max, out, **kwargs)

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
        return self.diagonal(offset, axis1, axis2).sum(-1, dtype=dtype)

    def dot(self, other: Any) -> Any:
        return FUNCTIONS[np.dot](self, other)


#: Bytes of an array that a function makes from nothing and computes with.
MOST_OWN = 2**20


def next_input(known: AbstractArray) -> TracedArray:
    """The next input of the function, as a traced array."""
    context = current.get()
    number, context.inputs = context.inputs, context.inputs + 1
    dtype = check_dtype(known.dtype)
    view = View.contiguous(known.shape)
    if known.strides is not None:
        view = View(0, tuple(known.strides))
    expr = node_of("input", (), dtype, (number, view))
    array = TracedArray(expr, tuple(known.shape), known.scalar)
    context.given.append(array._family)
    return array


def read_beside(array: Any, own: bool = False) -> TracedArray:
    """The traced array for an array that is no argument.

    The task reads the array when it runs. With `own`, the traced function made the array itself:
    its values are stored now, since they stay the same.
    """
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
        if own:
            index_lists.keep_ours(array)
        if own or (beside.dense and type(array) is np.ndarray):
            like = AbstractArray(array.shape, array.dtype)
        made = next_input(like)
        beside.known[word] = made, made._expr
        beside.arrays.append(array)
        beside.expected.append(like)
    return beside.known[word][0]


def as_traced(value: Any, dtype: Any = None) -> TracedArray:
    """An operand as a traced array: constants become one, an array with values cannot."""
    if isinstance(value, TracedArray):
        return value
    if isinstance(value, np.generic | bool | int | float | complex):
        dtype = dtype or np.asarray(value).dtype
        return TracedArray(constant(value, dtype), (), True)
    if isinstance(value, np.ndarray):
        if value.size == 0:
            return TracedArray(constant(0, value.dtype), value.shape)
        first = value[(0,) * value.ndim]
        if all(n == 1 or s == 0 for n, s in zip(value.shape, value.strides, strict=True)):
            return TracedArray(constant(first, value.dtype), value.shape)
        if (beside := current.get().beside) is not None:
            beside.wanted = True
        raise refuse("it uses an array that is neither an input nor computed from one")
    if isinstance(value, list | tuple) and value and all(isinstance(v, TracedArray) for v in value):
        return cast(
            TracedArray, FUNCTIONS[np.concatenate]([look(v, lambda a: a[None]) for v in value])
        )
    raise refuse(f"it computes with a {type(value).__module__}.{type(value).__qualname__}")


def array_classes() -> list[type]:
    """The classes of arrays that the task may get when it runs."""
    context, cupy = current.get(None), sys.modules.get("cupy")
    on_gpus = cupy is not None and (context is None or context.products)
    return [np.ndarray, cupy.ndarray] if on_gpus and cupy is not None else [np.ndarray]


# ------------------------------------------------------------------------------------------------
# Views.


def look(x: TracedArray, how: Callable[[Any], Any]) -> TracedArray:
    """A view of `x`; `how` is the NumPy function that makes it."""
    _, shape = apply_view(View(0, (0,) * x.ndim), x.shape, how)
    expr = change_views(x._expr, lambda view: apply_view(view, x.shape, how)[0])
    return TracedArray(expr, shape, of=x)


def store_array(x: TracedArray) -> TracedArray:
    """The same values, as an array that a kernel writes.

    To NumPy it is still the same array.
    """
    return TracedArray(current.get().keep(StoredArray(x.shape, x._expr), x.dtype), x.shape, of=x)


def broadcast(x: TracedArray, shape: Shape) -> TracedArray:
    """`numpy.broadcast_to`; values computed after a reduction are stored first."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if np.broadcast_shapes(x.shape, shape) != shape:
        raise ValueError(f"shape {x.shape} cannot be broadcast to {shape}")
    if x._expr.op not in LEAVES and math.prod(shape) > x.size and made_in(x._expr):
        x = store_array(x)  # computed once for each of its own elements
    before = (0,) * (len(shape) - x.ndim)
    spread = [n == 1 and m != 1 for n, m in zip(x.shape, shape[len(before) :], strict=True)]

    def change(view: View) -> View:
        own = (0 if s else stride for s, stride in zip(spread, view.strides, strict=True))
        return View(view.offset, (*before, *own))

    return TracedArray(change_views(x._expr, change), shape, of=x)


def reshape_array(x: TracedArray, shape: Any, order: str = "C") -> TracedArray:
    """`x.reshape(shape)`: a view where NumPy gives one, else of a stored array."""
    if order not in ("C", "F"):
        if order in ("A", "K") and x.ndim < 2:
            order = "C"
        else:
            raise refuse(f"it reshapes in order {order!r}")
    wanted = shape if isinstance(shape, tuple | list) else (shape,)
    _, full = apply_view(View.contiguous(x.shape), x.shape, lambda a: a.reshape(wanted, copy=False))
    if full == x.shape:
        return TracedArray(x._expr, x.shape, of=x)

    def reshape_to_full(a: Any) -> Any:
        return a.reshape(full, order=order, copy=False)

    try:
        return look(x, reshape_to_full)
    except ValueError:  # NumPy would copy; so does a kernel
        if order == "F":
            return store_array(x.T).reshape(full[::-1]).T
        out = look(store_array(x), reshape_to_full)
        if out.ndim == 1:
            out._rows = TracedArray(x._expr, x.shape), out._expr
        return out


def expand(x: Any, axis: Any) -> TracedArray:
    """`numpy.expand_dims`."""
    return look(as_traced(x), lambda a: np.expand_dims(a, axis))


def scalar_if_point(x: TracedArray) -> TracedArray:
    """`x`, as a scalar where it has no axes: NumPy gives one there."""
    return TracedArray(x._expr, x.shape, not x.shape)


def apply_expression(expr: Expr, arrays: Sequence[TracedArray]) -> TracedArray:
    """Apply an expression of inputs 0, 1, … to each element of arrays, broadcast together."""
    shape = np.broadcast_shapes(*[a.shape for a in arrays])
    every = [broadcast(a, shape)._expr for a in arrays]
    new: dict[int, Expr] = {}
    for node in nodes((expr,)):
        if node.op == "input":
            new[id(node)] = every[node.data[0]]
        else:
            args = tuple([new[id(a)] for a in node.args])
            new[id(node)] = node_of(node.op, args, node.dtype, node.data)
    return TracedArray(new[id(expr)], shape)
