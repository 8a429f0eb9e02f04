"""Traced arrays: views, writing, element-wise operations and reductions without values.

Views, writing, element by element, reduced. NumPy's functions by their names are in modules of
their own, which enter them in `FUNCTIONS`.

A `TracedArray` is an expression over its shape. NumPy's protocols lead each operation here, so
that NumPy's own rules for types and shapes hold. The result of a reduction is a new leaf; so is
whatever is computed from one and then broadcast, or has to be copied before it can be reshaped.
What a mask selects is `CompressedArray`: how many elements it has is known when the
function has run.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..frontend import index_lists
from ..ir.expr import (
    LEAVES,
    REDUCTIONS,
    SCANS,
    DType,
    Expr,
    Reduction,
    Shape,
    View,
    canonical,
    is_contiguous,
    nodes,
    view_of,
)
from ..ir.limits import LEAST_SLIDING
from ..ir.regions import simplify_in_box
from ..ir.split_scans import BOTH
from .abstract import AbstractArray, ReductionResult, StoredArray
from .bytecode import words
from .context import (
    MADE,
    abstract_of,
    apply_view,
    cast_to,
    change_views,
    check_dtype,
    constant,
    current,
    made_in,
    no_out,
    node_of,
    nothing,
    refuse,
    with_leaves,
)

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

# ------------------------------------------------------------------------------------------------
# The arrays.

#: What is called for NumPy's functions of arrays, and for methods of its ufuncs.
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
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


class TracedArray(NDArrayOperatorsMixin):
    """An array known by the expression of its elements. It behaves as a NumPy array does, as far
    as that needs no values."""

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
        """Of what arrays have and this has not: whoever asks for it would be told that they have
        not, too."""
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
        if any(
            isinstance(i, CompressedArray) for i in inputs
        ):  # which knows what to do with arrays
            return NotImplemented
        if method == "__call__":
            return _ufunc(ufunc, inputs, **kwargs)
        name = ufunc.__name__
        if method == "reduce" or (method == "accumulate" and name in ACCUMULATED):
            return METHODS[method](ufunc, *inputs, **kwargs)
        if method == "outer" and len(inputs) == 2 and not kwargs:
            a, b = (as_traced(i) for i in inputs)
            return _ufunc(ufunc, (a.reshape(a.shape + (1,) * b.ndim), b))
        raise refuse(f"numpy.{name}.{method} is not element-wise or a reduction")

    def __array_function__(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        if any(issubclass(t, CompressedArray) for t in _types):
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
        return _write_in_place(self, self**other)

    # elements

    def __getitem__(self, index: Any) -> TracedArray:
        if (selected := _select_by_mask(self, index)) is not None:
            return cast(TracedArray, selected)  # it stands for an array, too
        if (found := METHODS["index"](self, index)) is not None:
            return cast(TracedArray, found)
        index = _basic(index)
        # with an Ellipsis NumPy gives a view always, and never reads
        out = look(self, lambda a: a[index if ... in index else (*index, ...)])
        if (last := _last_of_scan(self, out)) is not None:
            out = TracedArray(last, out.shape, of=self)
        if not out.shape and ... not in index:
            return TracedArray(out._expr, (), True)
        if not self._scalar:
            out._part_of = (self, index)
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, TracedArray) and value._part_of is not None:
            whole, place = value._part_of
            if whole is self and not isinstance(index, TracedArray) and place == _basic(index):
                return  # written already
        if isinstance(value, CompressedArray):
            _write(self, _put_back(self, index, value))
            return
        # as NumPy says: a number of Python's that the type cannot hold is an error
        new = as_traced(value, self.dtype if type(value) in (int, float, complex) else None)
        part = TracedArray(cast_to(new._expr, self.dtype), new.shape)
        if isinstance(index, TracedArray) and index.dtype == bool:
            if part.size != 1 or index.shape != self.shape[: index.ndim]:
                raise refuse("it assigns an array through a mask")
            mask = index.reshape(index.shape + (1,) * (self.ndim - index.ndim))
            part = reshape_array(part, ())
            _write(self, either(mask, part, self))
            return
        if self._scalar:  # through a mask Dask does it, having asked whether it is a number
            raise refuse("it writes an element of a scalar")
        _write(self, _assign_index(self, _basic(index), part))

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
        return _part("real", self)

    @property
    def imag(self) -> TracedArray:
        if self.dtype.kind != "c":
            return TracedArray(constant(0, self.dtype), self.shape)
        return _part("imag", self)

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
        no_out(out)
        return round_array(self, decimals)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **kwargs: Any) -> Any:
        no_out(out, kwargs)
        return clip_array(self, min, max)

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
        return self.diagonal(offset, axis1, axis2).sum(-1, dtype=dtype)

    def dot(self, other: Any) -> Any:
        return FUNCTIONS[np.dot](self, other)


#: Bytes of an array that a function makes from nothing and computes with.
MOST_OWN = 2**20


def next_input(known: AbstractArray) -> TracedArray:
    """The next input of the function."""
    following = current.get()
    number, following.inputs = following.inputs, following.inputs + 1
    dtype = check_dtype(known.dtype)
    view = View.contiguous(known.shape)
    if known.strides is not None:
        view = View(0, tuple(known.strides))
    array = TracedArray(node_of("input", (), dtype, (number, view)), tuple(known.shape))
    following.given.append(array._family)
    return array


def read_beside(array: Any, own: bool = False) -> TracedArray:
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
        if isinstance(i, TracedArray) and i._expr.op != "constant":
            raise refuse("it indexes with an array")
        if isinstance(i, list | tuple | np.ndarray) and np.ndim(i):
            raise refuse("it indexes with an array")
        return operator.index(i)

    return tuple(one(i) for i in (index if isinstance(index, tuple) else (index,)))


def _ends(s: slice) -> tuple[Any, Any, Any]:
    return s.start, s.stop, s.step


def array_classes() -> list[type]:
    """What arrays may be when the task runs."""
    following, cupy = current.get(None), sys.modules.get("cupy")
    on_gpus = cupy is not None and (following is None or following.products)
    return [np.ndarray, cupy.ndarray] if on_gpus and cupy is not None else [np.ndarray]


# ------------------------------------------------------------------------------------------------
# Views.


def look(x: TracedArray, how: Callable[[Any], Any]) -> TracedArray:
    """`how(x)` for a NumPy function `how` that gives a view."""
    _, shape = apply_view(View(0, (0,) * x.ndim), x.shape, how)
    expr = change_views(x._expr, lambda view: apply_view(view, x.shape, how)[0])
    return TracedArray(expr, shape, of=x)


def store_array(x: TracedArray) -> TracedArray:
    """The same values, as an array that a kernel writes. To NumPy it is still the same array."""
    return TracedArray(current.get().keep(StoredArray(x.shape, x._expr), x.dtype), x.shape, of=x)


def broadcast(x: TracedArray, shape: Shape) -> TracedArray:
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
    if order not in ("C", "F"):
        if order in ("A", "K") and x.ndim < 2:
            order = "C"
        else:
            raise refuse(f"it reshapes in order {order!r}")
    wanted = shape if isinstance(shape, tuple | list) else (shape,)
    _, full = apply_view(View.contiguous(x.shape), x.shape, lambda a: a.reshape(wanted, copy=False))
    if full == x.shape:
        return TracedArray(x._expr, x.shape, of=x)

    def how(a: Any) -> Any:
        return a.reshape(full, order=order, copy=False)

    try:
        return look(x, how)
    except ValueError:  # NumPy would copy; so does a kernel
        if order == "F":
            return store_array(x.T).reshape(full[::-1]).T
        out = look(store_array(x), how)
        if out.ndim == 1:
            out._rows = TracedArray(x._expr, x.shape), out._expr
        return out


def expand(x: Any, axis: Any) -> TracedArray:
    return look(as_traced(x), lambda a: np.expand_dims(a, axis))


# ------------------------------------------------------------------------------------------------
# Writing: the name is bound to a new expression, as long as nobody else would see it.


def _write(x: TracedArray, value: TracedArray) -> None:
    whole, place = x._part_of or (None, ())
    others = [r() for r in x._family]
    if any(o is not None and o is not x and o is not whole for o in others):
        raise refuse("it writes into an array of which there are views")
    if value.shape != x.shape:
        value = broadcast(value, x.shape)
    value = TracedArray(cast_to(value._expr, x.dtype), x.shape)
    if whole is not None:
        if whole._part_of is not None:
            raise refuse("it writes into a view of a view")
        whole._expr = _assign_index(whole, place, value)._expr
    x._expr = value._expr


def _write_in_place(x: TracedArray, value: Any) -> Any:
    """`x` after an in-place operation; a scalar is replaced, as in NumPy, and so is a point of a
    mesh, which is a number."""
    value = as_traced(value)
    if x._scalar or current.get().points:
        return value
    if not np.can_cast(value.dtype, x.dtype, "same_kind"):
        raise TypeError(f"Cannot cast ufunc output from {value.dtype} to {x.dtype}")
    if value.shape != x.shape:
        raise ValueError(f"non-broadcastable output operand with shape {x.shape}")
    _write(x, value)
    return x


def axis_index(shape: Shape, axis: int) -> Expr:
    """The position along one axis, over `shape`."""
    strides = tuple(int(k == axis) for k in range(len(shape)))
    return node_of("index", (), np.int64, View(0, strides))


def apply(ufunc: Any, *args: Any) -> Expr:
    """A node of a ufunc for int64 or bool arguments that need no promotion."""
    exprs = tuple(a if isinstance(a, Expr) else constant(a, np.int64) for a in args)
    dtypes = ufunc.resolve_dtypes((*[e.dtype for e in exprs], None))
    return node_of(ufunc.__name__, exprs, dtypes[-1])


def _assign_index(x: TracedArray, index: tuple[Any, ...], value: TracedArray) -> TracedArray:
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
    _, target = apply_view(
        View(0, (0,) * x.ndim),
        x.shape,
        lambda a: a[(*index, ...)[: len(index) + (... not in index)]],
    )
    while value.ndim > len(target) and value.shape[0] == 1:
        value = value[0]
    value = broadcast(value, target)
    condition: Expr | None = None
    moves: list[tuple[int, int] | None] = []  # (start, step) of each axis; None: an int

    def also(more: Expr) -> None:
        nonlocal condition
        condition = more if condition is None else apply(np.logical_and, condition, more)

    for axis, (entry, length) in enumerate(zip(entries, x.shape, strict=True)):
        i = axis_index(x.shape, axis)
        if not isinstance(entry, slice):
            at = normalize_axis_index(entry, length)
            if length > 1:
                also(apply(np.equal, i, at))
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
            also(apply(np.greater_equal, i, low))
        if high < length - 1:
            also(apply(np.less_equal, i, high))
        if abs(points.step) > 1:
            offset = apply(np.subtract, i, low) if low else i
            also(apply(np.equal, apply(np.remainder, offset, abs(points.step)), 0))

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

    placed = TracedArray(change_views(value._expr, change), x.shape)
    if condition is None:
        return placed
    return either(TracedArray(condition, x.shape), placed, x)


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
    value = elementwise(ufunc, name, inputs, dtype, casting)
    if isinstance(out, tuple):
        (out,) = out
    if out is ...:
        out, value = None, TracedArray(value._expr, value.shape)
    if out is not None and not isinstance(out, TracedArray):
        raise refuse("it writes into an array that it is given (out=)")
    if where is not True:
        if out is None:
            out = TracedArray(constant(0, value.dtype), value.shape)
        elif not np.can_cast(value.dtype, out.dtype, "same_kind"):
            raise TypeError(f"Cannot cast ufunc output from {value.dtype} to {out.dtype}")
        value = either(where, value.astype(out.dtype), out)
    if out is None:
        return value
    if casting == "unsafe" and not out._scalar:
        value = value.astype(out.dtype)
    return _write_in_place(out, value)


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


def elementwise(
    ufunc: Any, name: str, inputs: Sequence[Any], dtype: Any = None, casting: Any = "same_kind"
) -> TracedArray:
    weak = [type(a) if type(a) in (int, float, complex) else None for a in inputs]
    arrays = [None if w else as_traced(a) for w, a in zip(weak, inputs, strict=True)]
    kinds = [w or a.dtype for w, a in zip(weak, arrays, strict=True)]  # type: ignore[union-attr]
    signature = (*[None] * len(kinds), None if dtype is None else np.dtype(dtype))
    dtypes = ufunc.resolve_dtypes((*kinds, None), signature=signature, casting=casting)
    for d in dtypes:
        check_dtype(d)
    shape = np.broadcast_shapes(*[a.shape for a in arrays if a is not None])
    exprs: list[Expr] = []
    for array, value, d in zip(arrays, inputs, dtypes, strict=False):
        if array is not None:
            exprs.append(cast_to(broadcast(array, shape)._expr, d))
            continue
        try:
            exprs.append(constant(value, d))
        except OverflowError:
            if name not in _COMPARE or len(inputs) != 2:
                raise
            # an int that the type cannot hold: every comparison with it has one answer
            probe = [np.zeros((), a.dtype) if a is not None else v
                     for a, v in zip(arrays, inputs, strict=True)]  # fmt: skip
            return TracedArray(constant(ufunc(*probe), bool), shape, not shape)
    if all(e.op == "constant" for e in exprs):
        with np.errstate(all="ignore"):
            folded = ufunc(*[e.value for e in exprs], dtype=dtypes[-1] if dtype else None)
        return TracedArray(constant(folded, dtypes[-1]), shape, not shape)
    return TracedArray(_operation(name, exprs, dtypes[-1]), shape, not shape)


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


def scalar_if_point(x: TracedArray) -> TracedArray:
    """What NumPy gives as a scalar when it has no axes."""
    return TracedArray(x._expr, x.shape, not x.shape)


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
    x = as_traced(x)
    x = np.positive(x.astype(np.modf.resolve_dtypes((x.dtype, None, None))[0]))
    whole = np.trunc(x)
    part = either(np.isinf(x), 0.0, np.subtract(x, whole))
    return np.copysign(part, x), whole


def _part(name: str, x: TracedArray) -> TracedArray:
    """The real or the imaginary parts of complex numbers: in NumPy a view, so one of the family."""
    dtype = np.zeros((), x.dtype).real.dtype
    if x._expr.op == "constant":
        expr = constant(getattr(x._expr.value, name), dtype)
    else:
        expr = node_of(name, (x._expr,), dtype)
    return TracedArray(expr, x.shape, x._scalar, of=x)


def complex_of(real: TracedArray, imag: TracedArray, dtype: DType) -> TracedArray:
    return TracedArray(
        node_of("complex", (real._expr, imag._expr), dtype), real.shape, real._scalar
    )


def either(condition: Any, a: Any, b: Any) -> TracedArray:
    """`numpy.where`: one of two values, in their common type."""
    dtype = np.result_type(*[v.dtype if isinstance(v, TracedArray) else v for v in (a, b)])
    condition = as_traced(condition)
    arrays = [as_traced(v, dtype) if not isinstance(v, TracedArray) else v for v in (a, b)]
    shape = np.broadcast_shapes(condition.shape, *[v.shape for v in arrays])
    chosen = cast_to(broadcast(condition, shape)._expr, bool)
    left, right = (cast_to(broadcast(v, shape)._expr, dtype) for v in arrays)
    if chosen.op == "constant":
        return TracedArray(left if chosen.value else right, shape)
    if left is right:
        return TracedArray(left, shape)
    return TracedArray(node_of("where", (chosen, left, right), dtype), shape)


def clip_array(
    x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None
) -> Any:
    low, high = (None if v is nothing else v for v in (low, high))
    low = min if low is None and min is not nothing else low
    high = max if high is None and max is not nothing else high
    if x.dtype.kind in "iu":  # a Python int that the type cannot hold is no bound
        limits = np.iinfo(x.dtype)
        low = None if type(low) is int and low <= limits.min else low
        high = None if type(high) is int and high >= limits.max else high
    if low is None and high is None:
        if x.dtype.kind == "b":
            raise refuse("it clips what is true or false to nothing, which is an error")
        return TracedArray(x._expr, x.shape, not x.shape)
    if low is None:
        return np.minimum(x, high)
    if high is None:
        return np.maximum(x, low)
    return elementwise(_CLIP, "clip", (x, low, high))


def round_array(x: TracedArray, decimals: int = 0) -> Any:
    decimals = operator.index(decimals)  # one of NumPy's would change the type
    if x.dtype.kind == "c":
        return complex_of(round_array(x.real, decimals), round_array(x.imag, decimals), x.dtype)
    if x.dtype.kind == "b":
        if decimals:
            raise refuse("it rounds what is true or false to decimals")
        return scalar_if_point(x.astype(np.float16))
    if x.dtype.kind in "iu":
        if decimals >= 0:
            return scalar_if_point(x)
        scale = 10.0**-decimals
        return (np.rint(x / scale) * scale).astype(x.dtype)
    if decimals == 0:
        return np.rint(x)
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return np.rint(x * scale) / scale
    return np.rint(x / scale) * scale


def apply_expression(expr: Expr, arrays: Sequence[TracedArray]) -> TracedArray:
    """What an expression of single elements of inputs 0, 1, … is of each element of arrays, which
    are broadcast against each other."""
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


# ------------------------------------------------------------------------------------------------
# Reductions.


def axes_of(x: TracedArray, axis: Any) -> Shape:
    if axis is None or axis is nothing:
        return tuple(range(x.ndim))
    return tuple(sorted(normalize_axis_tuple(axis, x.ndim)))


def reduce(
    op: str, x: TracedArray, axes: Shape, dtypes: Sequence[Any], keepdims: Any = False
) -> list[TracedArray]:
    """The results of one reduction."""
    keep = keepdims is not nothing and bool(keepdims)
    types = tuple(np.dtype(d) for d in dtypes)
    if not axes and op == "prod" and x.dtype.kind == "c":
        raise refuse("it multiplies complex numbers along no axis")  # NumPy's infinities are odd
    if not axes:  # nothing to reduce: each element is its own result
        zero = TracedArray(constant(0, types[0]), x.shape)
        own = {"argmin": (zero, x), "argmax": (zero, x)}.get(op, (x,))
        if op == "moment":
            own = (x, x - x)  # NaN where x is none that has a distance
        return [scalar_if_point(v.astype(t)) for v, t in zip(own, types, strict=True)]
    # elsewhere it would be fewer tasks for many threads
    short = current.get().products and current.get().short
    one = short and x.size and op not in ("prod", "histogram")
    if one and all(x.shape[k] == 1 for k in axes):
        # each row is one element
        element = reshape_array(x, reduced_shape(x, axes, False))
        if op == "sum" and x.dtype.kind in "fc":
            element = np.add(element, x.dtype.type(0))  # a sum is never minus zero
        every = reduce(op, element, (), types)
        shape = reduced_shape(x, axes, keep)
        return [reshape_array(v, shape) for v in every] if keep else every
    if op == "sum" and (total := _count_constant(x, axes, types[0])) is not None:
        return [scalar_if_point(broadcast(total, reduced_shape(x, axes, keep)))]
    if op in ADDED_UP and (
        _is_few(x)
        or (short and _is_short(x, axes) and not _are_windows(x, axes))
        or (short and _are_weighted(x, axes))
    ):
        return [_one_by_one(op, x, axes, types[0], keep)]
    if op in ("argmin", "argmax") and short and _are_a_few(x, axes):
        return _first_of(op, x, axes, types, keep)
    results = []
    for which in range(REDUCTIONS[op]):
        result = ReductionResult(x.shape, axes, Reduction(op, x._expr, types), which)
        leaf = current.get().keep(result, types[which])
        out = TracedArray(leaf, result.shape, not result.shape)
        if keep:
            out = look(out, lambda a: np.expand_dims(a, axes))
        results.append(out)
    return results


def _is_few(x: TracedArray) -> bool:
    """Whether these are a few results put side by side, as in each step of a tree."""
    expr = x._expr
    while expr.op == "cast":
        (expr,) = expr.args
    return expr.op == "where" and expr.args[0].op == "less" and 0 < x.size <= FEW


def _count_constant(x: TracedArray, axes: Shape, dtype: DType) -> TracedArray | None:
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
    return TracedArray(constant(total, dtype), ()) if 0 <= total <= most else None


def _is_short(x: TracedArray, axes: Shape) -> bool:
    """Whether rows are a few elements of arrays that are side by side along these axes."""
    expr = x._expr
    while expr.op == "cast":
        (expr,) = expr.args
    beside = expr.op == "where" and expr.args[0].op == "less"
    return beside and 0 < math.prod(x.shape[k] for k in axes) <= SHORT


def _are_windows(x: TracedArray, axes: Shape) -> bool:
    """Whether rows are windows that slide along an axis, though not along that where elements lie
    one behind the other: of such, kernels make several results at a time."""
    views = [v for n in nodes([x._expr]) if (v := view_of(n)) is not None]
    others = [k for k, n in enumerate(x.shape) if n > 1 and k not in axes]
    return any(
        x.shape[r] >= LEAST_SLIDING
        and all(v.strides[a] == v.strides[r] for v in views)
        and max([abs(v.strides[a]) for v in views], default=0) > 1
        for a in others
        for r in axes
    )


def _are_a_few(x: TracedArray, axes: Shape) -> bool:
    """Whether rows are short windows that slide, or a few arrays side by side."""
    if x.dtype.kind == "c" or not 0 < math.prod(x.shape[k] for k in axes) <= SHORT:
        return False
    return _is_short(x, axes) or any(slides for slides, _ in _slides(x, axes))


def _slides(x: TracedArray, axes: Shape) -> list[tuple[bool, bool]]:
    """Of each leaf whether it goes along one of these axes as along another one, and whether it
    goes along them at all."""
    views = [v for n in nodes([x._expr]) if (v := view_of(n)) is not None]
    others = [k for k, n in enumerate(x.shape) if n > 1 and k not in axes]
    return [
        (
            any(v.strides[r] and v.strides[a] == v.strides[r] for a in others for r in axes),
            any(v.strides[r] for r in axes),
        )
        for v in views
    ]


def _are_weighted(x: TracedArray, axes: Shape) -> bool:
    """Whether rows are windows that slide over an array, beside what is the same for all of them:
    kernels share what slides, and a few products of both."""
    if not 0 < math.prod(x.shape[k] for k in axes) <= FEW:
        return False
    leaves = _slides(x, axes)
    return any(s for s, _ in leaves) and any(along and not s for s, along in leaves)


def elements(x: TracedArray, axes: Shape) -> list[TracedArray]:
    """What there is along some axes, of which each has these with length one."""
    out = []
    for place in itertools.product(*[range(x.shape[k]) for k in axes]):
        index: list[Any] = [slice(None)] * x.ndim
        for k, i in zip(axes, place, strict=True):
            index[k] = slice(i, i + 1)
        # with an Ellipsis NumPy gives a view always, of an array without axes, too
        part = look(x, lambda a, index=(*index, ...): a[index])  # type: ignore[misc]
        (expr,) = simplify_in_box([part._expr], tuple([(0, n) for n in part.shape]))
        out.append(TracedArray(with_leaves(expr, lambda leaf: leaf), part.shape))
    return out


def _one_by_one(op: str, x: TracedArray, axes: Shape, dtype: DType, keep: bool) -> TracedArray:
    """A reduction of a few as operations on elements: so one step of a tree may disappear into the
    next. Floating point adds up in double precision, as it does in kernels."""
    wide = dtype
    if op in ("sum", "prod") and dtype.kind in "fc":
        wide = np.dtype(np.float64 if dtype.kind == "f" else np.complex128)
    out: TracedArray | None = None
    for part in elements(x, axes):
        part = TracedArray(cast_to(part._expr, wide), part.shape)
        both = ADDED_UP[op]
        out = part if out is None else elementwise(both, both.__name__, (out, part))
    assert out is not None
    out = TracedArray(cast_to(out._expr, dtype), out.shape)
    if keep:
        return out
    return scalar_if_point(
        reshape_array(out, [n for k, n in enumerate(out.shape) if k not in axes])
    )


def _first_of(
    op: str, x: TracedArray, axes: Shape, types: Sequence[DType], keep: bool
) -> list[TracedArray]:
    """Where the first of the extreme values of a few is, and this value; a NaN is more extreme than
    any number."""
    further = np.less if op == "argmin" else np.greater
    (best, *rest), real = elements(x, axes), x.dtype.kind == "f"
    at: Any = TracedArray(constant(0, types[0]), best.shape)
    for n, value in enumerate(rest, 1):
        better: Any = further(value, best)
        if real:
            better = np.logical_and(np.logical_or(better, np.isnan(value)), ~np.isnan(best))
        at, best = either(better, types[0].type(n), at), either(better, value, best)
    shape = reduced_shape(x, axes, keep)
    found = [reshape_array(at, shape), reshape_array(best.astype(types[1]), shape)]
    return found if keep else [scalar_if_point(v) for v in found]


def reduced_shape(x: TracedArray, axes: Shape, keepdims: Any) -> Shape:
    if keepdims is not nothing and keepdims:
        return tuple(1 if k in axes else n for k, n in enumerate(x.shape))
    return tuple(n for k, n in enumerate(x.shape) if k not in axes)


def scan(op: str, x: TracedArray, axis: int, dtype: DType) -> TracedArray:
    result = ReductionResult(x.shape, (axis,), Reduction(op, x._expr, (dtype,)), 0)
    return TracedArray(current.get().keep(result, dtype), x.shape)


def _last_of_scan(x: TracedArray, out: TracedArray) -> Expr | None:
    """What comes together along all of an axis, where `out` is the last of a scan `x`; None for
    any other part of it: all but that one need the scan."""
    if x._expr.op != "input" or x._expr.data[0] < MADE or not out.size:
        return None
    scan, view = current.get().made[x._expr.data[0] - MADE], x._expr.data[1]
    if not isinstance(scan, ReductionResult) or scan.reduction.op not in SCANS:
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
    whole = TracedArray(scan.reduction.arg, shape)
    return reduce(op, whole, scan.axes, (value,), found is kept)[0]._expr


# ------------------------------------------------------------------------------------------------
# What a mask selects.


class CompressedArray(NDArrayOperatorsMixin):
    """`values[mask]`, of which it is not known how many elements it has: the values at all points,
    and where they count. The axes of the mask, from `axis` on, are one axis of it. What is computed
    element by element is computed at all points; a reduction along that axis is one over those
    points at which the mask holds."""

    __array_priority__ = 2e6
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: TracedArray, mask: TracedArray, axis: int):
        self._values, self._mask, self._axis = values, mask, axis
        self._shared = False  # whether it has its elements in common with another one

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
        if not name.startswith("_") and any(hasattr(k, name) for k in array_classes()):
            raise refuse(f"it reads .{name} of what a mask selects")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _unknown(self, *_: Any, **__: Any) -> Any:
        raise refuse("it needs to know how many elements a mask selects")

    __len__ = __iter__ = __bool__ = __int__ = __float__ = __complex__ = __index__ = _unknown
    __array__ = _unknown
    size = shape = nbytes = property(_unknown)

    def __getitem__(self, index: Any) -> CompressedArray:
        if isinstance(index, tuple):
            return self._part(index)
        mask: Any = np.logical_and(self._mask, self._points(index))
        return CompressedArray(self._values, mask, self._axis)

    def _part(self, index: tuple[Any, ...]) -> CompressedArray:
        """All that is selected of some of the other axes: in NumPy a view."""
        first, *others = index or (None,)
        basic = all(type(i) is slice or isinstance(i, (int, np.integer)) for i in others)
        whole = type(first) is slice and first == slice(None)
        if self._axis or not whole or not basic:
            return self._unknown()  # type: ignore[no-any-return]
        every = (slice(None),) * self._mask.ndim
        out = CompressedArray(self._values[(*every, *others)], self._mask, 0)
        out._shared = self._shared = True
        return out

    def _refuse_if_shared(self) -> None:
        if self._shared:
            raise refuse("it writes to a part of what a mask selects")

    def __setitem__(self, index: Any, value: Any) -> None:
        if index is ... and value is self:
            return  # written already
        self._refuse_if_shared()
        new: Any = np.where(with_values(self, self._points(index)), value, self)
        if np.ndim(value) or new.dtype != self.dtype:
            raise refuse("it assigns an array through a mask")
        self._values = new._values

    def _points(self, index: Any) -> Any:
        """Where another mask holds that has an element for each of this one's."""
        if not isinstance(index, CompressedArray) or index.dtype != bool or self.ndim > 1:
            return self._unknown()
        if not alike(self, index) or index._values.shape != self._values.shape:
            return self._unknown()
        return index._values

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "reduce":
            axis = () if inputs[1:] or "axis" in kwargs else (0,)
            return _reduce_selected(ufunc.reduce, *inputs, *axis, **kwargs)
        if method != "__call__" or ufunc.signature is not None:
            raise refuse(f"numpy.{ufunc.__name__}.{method} of what a mask selects")
        out, where = kwargs.pop("out", None), kwargs.pop("where", True)
        (out,) = out if isinstance(out, tuple) else (out,)
        if not any(isinstance(i, CompressedArray) for i in inputs) or (
            where is not True and out is None
        ):
            raise refuse("it uses out= or where= with what a mask selects")
        result = _at_all_points(ufunc, inputs, kwargs)
        if out is None:
            return result
        if where is not True:
            result = _at_all_points(np.where, (where, result, out))
        if not isinstance(out, CompressedArray) or not alike(out, result):
            raise refuse("it writes into an array that it is given (out=)")
        return out._written(result, kwargs.get("casting", "same_kind"))

    def _written(self, result: CompressedArray, casting: str = "same_kind") -> CompressedArray:
        self._refuse_if_shared()
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
        return TracedArray.__pow__(cast(TracedArray, self), other)

    def __ipow__(self, other: Any) -> Any:
        return self._written(self**other)

    def astype(self, dtype: Any, *args: Any, copy: bool = True, **kwargs: Any) -> CompressedArray:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return with_values(self, self._values.astype(dtype, *args, **kwargs))

    def copy(self, order: str = "C") -> CompressedArray:
        return with_values(self, self._values)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> CompressedArray:
        return self.copy()

    def ravel(self, order: str = "C") -> CompressedArray:
        return self if self.ndim == 1 else self._unknown()

    def flatten(self, order: str = "C") -> CompressedArray:
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
        no_out(None, {"correction": kwargs.get("correction")})  # which the function has alone
        return np.var(self, *args, **kwargs)

    def std(self, *args: Any, **kwargs: Any) -> Any:
        no_out(None, {"correction": kwargs.get("correction")})
        return np.std(self, *args, **kwargs)

    def min(self, *args: Any, **kwargs: Any) -> Any:
        return np.min(self, *args, **kwargs)

    def max(self, *args: Any, **kwargs: Any) -> Any:
        return np.max(self, *args, **kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        return np.any(self, *args, **kwargs)

    def all(self, *args: Any, **kwargs: Any) -> Any:
        return np.all(self, *args, **kwargs)


def _select_by_mask(x: TracedArray, index: Any) -> CompressedArray | None:
    """What an index selects in which there is a mask, beside slices; None of any other index."""
    entries = index if isinstance(index, tuple) else (index,)
    masks = [i for i in entries if isinstance(i, TracedArray) and i.dtype == bool and i.shape]
    if not masks:
        return None
    others = [i for i in entries if i is not masks[0]]
    if len(others) < len(entries) - 1 or not all(i is ... or type(i) is slice for i in others):
        raise refuse("it indexes with an array")
    (mask,) = masks
    if mask.ndim == x.ndim == 1 and len(entries) == 1 and mask.shape == x.shape:
        whole, where = (
            _array_of_rows(x),
            _array_of_rows(mask),
        )  # which have to be copied to have one axis
        if whole is not None and where is not None and whole.shape == where.shape:
            return CompressedArray(whole.copy(), where.copy(), 0)
    here = [i is mask for i in entries].index(True)
    every = (slice(None),) * mask.ndim
    basic = (*entries[:here], *every, *entries[here + 1 :])
    axis = here
    if ... in entries[:here]:
        axis += x.ndim - len(basic)  # the Ellipsis is one entry, for that many axes and one
    seen = x[basic]
    if seen.shape[axis : axis + mask.ndim] != mask.shape:
        raise IndexError(f"a mask of shape {mask.shape} for an array of shape {x.shape}")
    if mask.ndim < x.ndim and not current.get().products:
        raise refuse("it selects along an axis by a mask: NumPy reads no more than that")
    return CompressedArray(seen.copy(), mask.copy(), axis)


def _array_of_rows(x: TracedArray) -> TracedArray | None:
    """The array whose elements these are one after the other, if there is one."""
    return x._rows[0] if x._rows is not None and x._rows[1] is x._expr else None


def _put_back(x: TracedArray, index: Any, value: CompressedArray) -> TracedArray:
    """`x` after `x[mask] = value`, where that is of the same elements."""
    before = _select_by_mask(x, index) if isinstance(index, TracedArray) else None
    if before is None or not alike(before, value) or value._values.shape != x.shape:
        raise refuse("it assigns an array through a mask")
    return either(mask_over(value), value._values.astype(x.dtype), x)


def with_values(like: CompressedArray, values: TracedArray) -> CompressedArray:
    return CompressedArray(values, like._mask, like._axis)


def mask_over(x: CompressedArray) -> TracedArray:
    """The mask, with axes of length one in place of the other axes of the values."""
    own = range(x._axis, x._axis + x._mask.ndim)
    around = tuple([k for k in range(x._values.ndim) if k not in own])
    return expand(x._mask, around) if around else x._mask


def nan_elsewhere(x: CompressedArray) -> TracedArray:
    """The values at all points, NaN at those that are not selected."""
    if x.dtype.kind in "iu" and x.itemsize <= 4:
        x = x.astype(np.float64)
    if x.dtype.kind != "f":
        raise refuse(f"it makes a histogram of {x.dtype} that a mask selects")
    return either(mask_over(x), x._values, x.dtype.type(np.nan))


def alike(a: CompressedArray, b: CompressedArray) -> bool:
    """Whether both have the same axes, of which the same points are selected."""
    same = a._axis == b._axis and a.ndim == b.ndim and a._mask.shape == b._mask.shape
    return same and a._mask._expr == b._mask._expr


def _at_all_points(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] = {}
) -> CompressedArray:
    """A function that goes element by element."""
    every = (*args, *kwargs.values())
    first = next(v for v in every if isinstance(v, CompressedArray))
    if any(isinstance(v, (list, tuple)) for v in every):
        raise refuse("it computes with a list and what a mask selects")

    if not current.get().products and function.__name__ not in _CHEAP:
        raise refuse(f"it computes {function.__name__} of what a mask selects: of fewer elements")

    def values(v: Any) -> Any:
        if isinstance(v, CompressedArray):
            return v._values if alike(v, first) else first._unknown()
        if isinstance(v, np.ndarray):
            v = as_traced(v)
        if not isinstance(v, TracedArray) or not v.shape:
            return v
        # which of its axes meets the one of the selected elements
        at = v.ndim - (first.ndim - first._axis)
        if v.ndim > first.ndim or (at >= 0 and v.shape[at] != 1):
            first._unknown()
        more = first._mask.ndim - 1
        return v if at < 0 or not more else expand(v, tuple(range(at, at + more)))

    result = function(*map(values, args), **{k: values(v) for k, v in kwargs.items()})
    if not isinstance(result, TracedArray) or result.ndim != first._values.ndim:
        raise refuse(f"{getattr(function, '__name__', 'it')} of what a mask selects")
    return with_values(first, result)


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
    if name is None or not isinstance(a, CompressedArray):
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
    axes = axes_of(a, axis)  # type: ignore[arg-type]
    if name == "norm" and a.ndim > 1:
        raise refuse("a norm of what a mask selects along an axis")
    first, more = a._axis, a._mask.ndim - 1
    others = tuple([k if k < first else k + more for k in axes if k != first])
    if first not in axes:
        if not axes:
            raise refuse("it reduces what a mask selects along no axis")
        values = function(a._values, axis=others, keepdims=keep, **given)
        return CompressedArray(
            values, a._mask, first if keep else first - sum(k < first for k in axes)
        )
    every = tuple(sorted((*others, *range(first, first + more + 1))))
    total = OVER_POINTS[name](a._values, mask_over(a), every, **given)
    return expand(total, axes) if keep else total


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
