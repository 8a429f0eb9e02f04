"""`SparseBlock`: one sparse matrix that answers NumPy's functions, as a block of a Dask array.

An operation that keeps zeros zero gives a sparse block: what is not stored is never made. One with
a dense array gives a dense block, but for products, which stay sparse. What would make every zero
something else (`exp(s)`, `s + 1`) is refused. Matrices are of SciPy or of CuPy (`cupyx`); only
methods that both have are called.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from numbers import Number
from typing import Any

import numpy as np
from dask.array import routines

from ..sparse_parts import CUPYX, PYDATA, SCIPY, arrays_of, library_of
from .sparse_matrices import (
    BOTH,
    as_csr,
    cut,
    empty_csr,
    lengths_of_parts,
    parse_index,
    sparse_module,
    with_data,
)

REFUSED = (
    "{} of sparse blocks would store every zero as something else: use "
    "gpuscheduler.sparse.todense(x) first, if there is memory for all zeros"
)


class SparseBlock(np.lib.mixins.NDArrayOperatorsMixin):
    """A canonical matrix of SciPy or CuPy, of two dimensions, or three with one of length 1.

    `unit` is the place of that axis. Dask's `matmul` adds one to what it multiplies.

    >>> import scipy.sparse
    >>> block = SparseBlock(scipy.sparse.eye_array(3, format="csr"))
    >>> (block * 2) @ np.ones(3)
    array([2., 2., 2.])
    """

    __slots__ = ("matrix", "unit")
    __array_priority__ = 1000.0

    def __init__(self, matrix: Any, unit: int | None = None):
        self.matrix, self.unit = matrix, unit

    def replace_matrix(self, matrix: Any) -> SparseBlock:
        """The same block around another matrix."""
        return SparseBlock(matrix, self.unit)

    def __reduce__(self) -> Any:
        return import_module(f"{__package__}.sparse_dispatch").load_block, (self.matrix, self.unit)

    def __repr__(self) -> str:
        return f"<SparseBlock {self.shape} of {self.matrix!r}>"

    # ---- facts

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.matrix.shape
        shape = [int(rows), int(columns)]
        if self.unit is not None:
            shape.insert(self.unit, 1)
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return 2 if self.unit is None else 3

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.matrix.dtype)

    @property
    def nbytes(self) -> int:
        return sum(int(a.nbytes) for a in arrays_of(self.matrix))

    @property
    def xp(self) -> Any:
        """NumPy or CuPy, of whose arrays the matrix is."""
        return sys.modules["cupy"] if library_of(type(self.matrix)) == CUPYX else np

    @property
    def T(self) -> SparseBlock:
        return self.transpose()

    def __len__(self) -> int:
        return self.shape[0]

    def __dask_tokenize__(self) -> Any:
        from dask.base import normalize_token

        made = [a.get() if hasattr(a, "get") else a for a in arrays_of(self.matrix)]
        kind = type(self.matrix)
        return normalize_token((f"{kind.__module__}.{kind.__name__}", self.shape, self.unit, made))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(REFUSED.format("a NumPy array"))

    # ---- methods that Dask calls

    def astype(self, dtype: Any, copy: bool = True, **_: Any) -> SparseBlock:
        """The matrix with elements of another type."""
        same = np.dtype(dtype) == self.dtype
        return self if same and not copy else self.replace_matrix(self.matrix.astype(dtype))

    def copy(self, order: str = "C") -> SparseBlock:
        return self.replace_matrix(self.matrix.copy())

    def toarray(self) -> Any:
        """A dense array of NumPy's or CuPy's, with all zeros stored."""
        return self.matrix.toarray().reshape(self.shape)

    def conj(self) -> SparseBlock:
        return self.replace_matrix(self.matrix.conj())

    def transpose(self, *axes: Any) -> SparseBlock:
        """Two axes swapped; of three, the axis of length 1 may go anywhere."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = tuple(order) if order else tuple(range(self.ndim))[::-1]
        order = tuple(operator.index(a) % self.ndim for a in order)
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(f"axes {order} do not match a block of {self.ndim} dimensions")
        kept = [a for a in order if a != self.unit]
        unit = None if self.unit is None else order.index(self.unit)
        matrix = as_csr(self.matrix.T) if kept[0] > kept[1] else self.matrix
        return SparseBlock(matrix, unit)

    def squeeze(self, axis: Any = None) -> SparseBlock:
        """Without the added axis of length 1."""
        axes = axis if isinstance(axis, (tuple, list)) else (axis,)
        if self.unit is None or axes not in ((None,), (self.unit,), (self.unit - 3,)):
            raise ValueError(f"cannot squeeze axis {axis} of a sparse block {self.shape}")
        return SparseBlock(self.matrix)

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        """Without or with an axis of length 1; a block without elements takes any shape."""
        new = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if new == self.shape:
            return self
        if not self.size and 0 in new:
            return self.xp.zeros(new, self.dtype)
        lengths = list(self.matrix.shape)
        for place in range(3):
            if len(new) == 3 and new == (*lengths[:place], 1, *lengths[place:]):
                return SparseBlock(self.matrix, place)
        if new == tuple(lengths):
            return SparseBlock(self.matrix)
        raise NotImplementedError(
            f"sparse blocks keep their two axes, and {self.shape} would become {new}: use "
            "gpuscheduler.sparse.todense(x) first"
        )

    def sum(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False
    ) -> Any:
        return reduce_sum(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
        return reduce_extremum(self, "max", axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
        return reduce_extremum(self, "min", axis=axis, keepdims=keepdims)

    def __getitem__(self, index: Any) -> Any:
        return take_index(self, index)

    # ---- NumPy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if out is not None or kwargs.pop("where", True) is not True:
            raise TypeError(f"{ufunc.__name__} of sparse blocks has no out= and no where=")
        dtype = kwargs.pop("dtype", None)
        if method == "reduce" and ufunc in REDUCERS and len(inputs) == 1:
            return REDUCERS[ufunc](inputs[0], dtype=dtype, **kwargs)
        if method != "__call__" or ufunc.nout != 1:
            raise TypeError(REFUSED.format(f"{ufunc.__name__}.{method}"))
        if ufunc is np.matmul:
            made = multiply_matrices(*inputs)
        else:
            made = apply_ufunc(ufunc, inputs, kwargs)
        return made if dtype is None or made.dtype == dtype else made.astype(dtype)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """What CuPy calls where its array is the first operand of one of its ufuncs."""
        ufunc = getattr(np, str(kernel.name).removeprefix("cupy_"), None)
        if not isinstance(ufunc, np.ufunc):
            raise TypeError(REFUSED.format(kernel.name))
        return self.__array_ufunc__(ufunc, "__call__", *args, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function not in FUNCTIONS:
            name = f"{function.__module__}.{function.__name__}"
            raise TypeError(
                f"{name} is not there for sparse blocks: use gpuscheduler.sparse.todense(x) first"
            )
        return FUNCTIONS[function](*args, **kwargs)


# ---- making blocks


def as_block(value: Any, form: str = "csr") -> SparseBlock:
    """A sparse block of a dense array or of any sparse matrix.

    >>> as_block(np.eye(2)).matrix.nnz
    2
    """
    if isinstance(value, SparseBlock):
        value = value.matrix
    if library_of(type(value)) is None and not hasattr(value, "tocsr"):
        if getattr(value, "ndim", None) != 2:
            raise ValueError(
                f"a sparse block has two dimensions, and this {type(value).__name__} has "
                f"{getattr(value, 'ndim', 'none')}"
            )
        module = sparse_module(value)
        value = getattr(module, "csr_array", module.csr_matrix)(value)
    elif library_of(type(value)) is None:
        value = value.tocsr()
    elif form == "dia" and library_of(type(value)) != PYDATA:
        if value.format == "dia" or library_of(type(value)) == SCIPY:
            return SparseBlock(value.todia())
        form = "csr"  # CuPy makes no DIA of other formats
    made = as_csr(value)
    return SparseBlock(made if form == "csr" else made.asformat(form))


# ---- element-wise


def apply_ufunc(ufunc: Any, inputs: Sequence[Any], kwargs: Any) -> Any:
    """A ufunc of one or two operands, of which at least one is sparse."""
    sparse = [x for x in inputs if isinstance(x, SparseBlock)]
    if len(inputs) > 2:
        raise TypeError(REFUSED.format(ufunc.__name__))
    if len(sparse) == len(inputs) == 2:
        return _of_both(ufunc, *inputs)
    if len(inputs) == 1 or any(_is_number(x) for x in inputs):
        return _of_stored(ufunc, inputs, kwargs)
    return _of_dense(ufunc, inputs, kwargs)


def _is_number(x: Any) -> bool:
    return isinstance(x, (Number, np.generic)) or getattr(x, "ndim", None) == 0


def _of_stored(ufunc: Any, inputs: Sequence[Any], kwargs: Any) -> SparseBlock:
    """Applied to the stored elements, where that keeps zeros zero."""
    (block,) = (x for x in inputs if isinstance(x, SparseBlock))
    zero = np.zeros((), block.dtype)[()]
    with np.errstate(all="ignore"):
        made = ufunc(*[zero if x is block else _host_number(x) for x in inputs], **kwargs)
    if made != 0:
        raise TypeError(REFUSED.format(ufunc.__name__))
    matrix = as_csr(block.matrix)
    data = ufunc(*[matrix.data if x is block else x for x in inputs], **kwargs)
    return block.replace_matrix(with_data(matrix, data))


def _host_number(x: Any) -> Any:
    """A number; one that a GPU holds counts as 1, for nobody waits for it."""
    return x if isinstance(x, (Number, np.generic, np.ndarray)) else x.dtype.type(1)


def _of_both(ufunc: Any, a: SparseBlock, b: SparseBlock) -> SparseBlock:
    if ufunc not in BOTH:
        raise TypeError(REFUSED.format(ufunc.__name__))
    if a.shape != b.shape:
        raise ValueError(
            f"sparse blocks of different shapes, {a.shape} and {b.shape}, are not broadcast: use "
            "gpuscheduler.sparse.todense(x) for the small one"
        )
    if not a.matrix.nnz and not b.matrix.nnz:
        nothing = ufunc(np.zeros(0, a.dtype), np.zeros(0, b.dtype))
        return a.replace_matrix(empty_csr(a.matrix, a.matrix.shape, nothing.dtype))
    made = BOTH[ufunc](as_csr(a.matrix), as_csr(b.matrix))
    return a.replace_matrix(as_csr(made))


def _of_dense(ufunc: Any, inputs: Sequence[Any], kwargs: Any) -> Any:
    """A dense result, but for products and quotients of a sparse by a dense operand."""
    first, second = inputs
    block, other = (first, second) if isinstance(first, SparseBlock) else (second, first)
    shape = np.broadcast_shapes(block.shape, other.shape)
    product = ufunc is np.multiply or (ufunc is np.true_divide and first is block)
    if product and shape == block.shape and block.unit is None and other.ndim <= 2:
        if not block.matrix.nnz:
            nothing = ufunc(np.zeros(0, block.dtype), np.ones(0, other.dtype))
            return block.replace_matrix(empty_csr(block.matrix, block.matrix.shape, nothing.dtype))
        if ufunc is np.true_divide:
            other = 1 / other
        made = as_csr(block.matrix).multiply(block.xp.atleast_2d(other))
        return block.replace_matrix(as_csr(made))
    dense = [x.toarray() if isinstance(x, SparseBlock) else x for x in inputs]
    return ufunc(*dense, **kwargs)


# ---- products


def multiply_matrices(a: Any, b: Any) -> Any:
    """`a @ b`, of which one or both are sparse: sparse where both are."""
    if isinstance(a, SparseBlock) and isinstance(b, SparseBlock):
        if a.unit is not None or b.unit is not None:
            raise NotImplementedError("sparse blocks of three dimensions are not multiplied")
        _check_lengths(a, b, a.shape[1], b.shape[0])
        if not a.matrix.nnz or not b.matrix.nnz:
            dtype = np.result_type(a.dtype, b.dtype)
            return SparseBlock(empty_csr(a.matrix, (a.shape[0], b.shape[1]), dtype))
        return SparseBlock(as_csr(as_csr(a.matrix) @ as_csr(b.matrix)))
    block, dense = (a, b) if isinstance(a, SparseBlock) else (b, a)
    if block.unit is not None or dense.ndim not in (1, 2):
        raise NotImplementedError(
            f"shapes {a.shape} and {b.shape}: sparse blocks multiply vectors and matrices only"
        )
    if not block.matrix.nnz:
        _check_lengths(a, b, a.shape[-1], b.shape[0])
        return block.xp.zeros(a.shape[:-1] + b.shape[1:], np.result_type(a.dtype, b.dtype))
    if block is a:
        _check_lengths(a, b, a.shape[1], b.shape[0])
        if dense.ndim == 2 and b.shape[1] == 1:  # a product with a vector is faster
            return (block.matrix @ dense[:, 0])[:, None]
        return block.matrix @ dense
    _check_lengths(a, b, a.shape[-1], b.shape[0])
    turned = (block.matrix if block.matrix.format == "csc" else as_csr(block.matrix)).T
    if dense.ndim == 2 and a.shape[0] == 1:
        return (turned @ dense[0])[None]
    return (turned @ dense.T).T


def _check_lengths(a: Any, b: Any, n: int, m: int) -> None:
    if n != m:
        raise ValueError(f"matmul of shapes {a.shape} and {b.shape}: {n} columns meet {m} rows")


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Sums over one axis of each of two operands, of which at least one is sparse."""
    if isinstance(axes, int):
        axes = (list(range(a.ndim - axes, a.ndim)), list(range(axes)))
    left, right = ([x] if isinstance(x, (int, np.integer)) else list(x) for x in axes)
    if len(left) != 1 or len(right) != 1 or a.ndim > 2 or b.ndim > 2:
        raise NotImplementedError(
            "tensordot of sparse blocks sums over one axis of vectors and matrices"
        )
    a = a.T if left[0] % a.ndim == 0 and a.ndim == 2 else a
    b = b.T if right[0] % b.ndim == 1 else b
    return multiply_matrices(a, b)


def multiply_chunks(a: Any, b: Any) -> Any:
    """What Dask's chunk function of `matmul` does; that one asks CuPy alone for CuPy's arrays."""
    return multiply_matrices(a, b)[..., None, :]


#: Dask's chunk function of `matmul` (private; 2026.1 to 2026.8).
DASK_MATMUL = routines._matmul


# ---- reductions


def reduced_axes(block: SparseBlock, axis: Any) -> tuple[int, ...]:
    """The axes over which a reduction goes, in order."""
    if axis is None:
        return tuple(range(block.ndim))
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    return tuple(sorted({operator.index(a) % block.ndim for a in axes}))


def _finish(block: SparseBlock, made: Any, axes: tuple[int, ...], keepdims: Any) -> Any:
    """A result over the axes of the matrix as an array of the shape that NumPy gives."""
    return block.xp.asarray(made).reshape(reduced_shape(block, axes, keepdims))


def reduced_shape(block: SparseBlock, axes: tuple[int, ...], keepdims: Any) -> tuple[int, ...]:
    """The shape that a reduction over axes gives."""
    if keepdims:
        return tuple(1 if a in axes else n for a, n in enumerate(block.shape))
    return tuple(n for a, n in enumerate(block.shape) if a not in axes)


def _matrix_axis(block: SparseBlock, axes: tuple[int, ...]) -> Any:
    """Which axis of the matrix is reduced: None for both, () for none."""
    places = [a for a in range(block.ndim) if a != block.unit]
    reduced = [n for n, a in enumerate(places) if a in axes]
    if not reduced:
        return ()
    return None if len(reduced) == 2 else reduced[0]


def reduce_sum(
    block: SparseBlock, axis: Any = None, dtype: Any = None, keepdims: Any = False, **_: Any
) -> Any:
    """Sum of elements, as a dense array.

    >>> reduce_sum(as_block(np.eye(3)), axis=0, keepdims=True)
    array([[1., 1., 1.]])
    """
    axes = reduced_axes(block, axis)
    over = _matrix_axis(block, axes)
    if over == ():
        return _finish(block, block.matrix.toarray(), axes, keepdims)
    matrix = as_csr(block.matrix)
    if not matrix.nnz:
        shape = reduced_shape(block, axes, keepdims)
        return block.xp.zeros(shape, dtype or _sum_dtype(matrix.dtype))
    if over is None:
        made = matrix.data.sum(dtype=dtype or _sum_dtype(matrix.dtype))
    else:
        made = matrix.sum(axis=over, dtype=dtype or _sum_dtype(matrix.dtype))
    return _finish(block, made, axes, keepdims)


def _sum_dtype(dtype: Any) -> np.dtype[Any]:
    """The type in which NumPy sums."""
    return np.zeros(0, dtype).sum().dtype


def reduce_extremum(
    block: SparseBlock, name: str, axis: Any = None, keepdims: Any = False, **given: Any
) -> Any:
    """The largest or least element, zeros included, as a dense array."""
    if given.get("dtype") is not None:
        raise TypeError(f"{name} of sparse blocks has no dtype=")
    axes = reduced_axes(block, axis)
    over = _matrix_axis(block, axes)
    if over == ():
        return _finish(block, block.matrix.toarray(), axes, keepdims)
    rows, columns = block.matrix.shape
    if not (rows and columns if over is None else (rows, columns)[over]):
        raise ValueError(f"{name} of no elements: zero-size array to a reduction operation")
    matrix = as_csr(block.matrix)
    if not matrix.nnz:
        return block.xp.zeros(reduced_shape(block, axes, keepdims), block.dtype)
    if over is None:
        made = getattr(matrix.data, name)()
        if matrix.nnz < rows * columns:
            made = getattr(np, f"{name}imum")(made, made.dtype.type(0))
        return _finish(block, made, axes, keepdims)
    return _finish(block, getattr(matrix, name)(axis=over).toarray(), axes, keepdims)


def reduce_any(block: SparseBlock, axis: Any = None, keepdims: Any = False, **_: Any) -> Any:
    return reduce_sum(block != 0, axis=axis, keepdims=keepdims) > 0


def count_nonzero(block: SparseBlock, axis: Any = None, *, keepdims: Any = False) -> Any:
    return reduce_sum(block != 0, axis=axis, dtype=np.intp, keepdims=keepdims)


def reduce_nansum(
    block: SparseBlock, axis: Any = None, dtype: Any = None, keepdims: Any = False, **_: Any
) -> Any:
    numbers = _of_data(block, lambda d: block.xp.where(block.xp.isnan(d), d.dtype.type(0), d))
    return reduce_sum(numbers, axis, dtype, keepdims)


REDUCERS: dict[Any, Callable[..., Any]] = {
    np.add: reduce_sum,
    np.maximum: lambda x, **given: reduce_extremum(x, "max", **given),
    np.minimum: lambda x, **given: reduce_extremum(x, "min", **given),
    np.logical_or: reduce_any,
}


# ---- parts and joins


def take_index(block: SparseBlock, index: Any) -> Any:
    """A part of a block: slices and a list of numbers keep it sparse.

    One row or one column is a dense vector, as there are no sparse ones.
    """
    found = parse_index(block.shape, block.unit, index)
    if found is None:  # nothing is left of the axis of length 1
        shape = np.broadcast_to(np.empty(()), block.shape)[index].shape
        return block.xp.zeros(shape, block.dtype)
    parts, units, gone = found
    matrix = cut(as_csr(block.matrix), parts)
    if len(gone) == 2 and not units:
        return block.xp.asarray(matrix)
    if gone:
        made = matrix.toarray() if hasattr(matrix, "toarray") else block.xp.asarray(matrix)
        shape = [n for a, n in enumerate(lengths_of_parts(block.matrix, parts)) if a not in gone]
        for place in units:
            shape.insert(place, 1)
        return made.reshape(shape)
    if len(units) > 1:
        raise NotImplementedError(f"a sparse block gets one more axis at most: {index!r}")
    return SparseBlock(matrix, units[0] if units else None)


def concatenate(blocks: Sequence[Any], axis: int = 0, **_: Any) -> SparseBlock:
    """Blocks one below the other, or side by side."""
    blocks = list(blocks)
    if any(not isinstance(b, SparseBlock) for b in blocks):
        raise TypeError("sparse and dense blocks are not joined: convert one of the arrays")
    first = blocks[0]
    ndim = first.ndim
    axis = operator.index(axis) % ndim
    if any(b.unit != first.unit for b in blocks) or axis == first.unit:
        raise NotImplementedError("sparse blocks are joined along the axes of the matrix")
    if len(blocks) == 1:
        return first
    if first.unit is not None and axis > first.unit:
        axis -= 1
    dtype = np.result_type(*[b.dtype for b in blocks])
    if not any(b.matrix.nnz for b in blocks):
        shape = list(first.matrix.shape)
        shape[axis] = sum(b.matrix.shape[axis] for b in blocks)
        return first.replace_matrix(empty_csr(first.matrix, tuple(shape), dtype))
    module = sparse_module(first.matrix)
    join = module.hstack if axis else module.vstack
    made = join([as_csr(b.matrix) for b in blocks], format="csr")
    return first.replace_matrix(as_csr(made.astype(dtype, copy=False)))  # CuPy makes floats of bool


def take(block: SparseBlock, indices: Any, axis: int | None = None, **_: Any) -> Any:
    """Rows or columns by their numbers."""
    if axis is None:
        raise NotImplementedError("take of sparse blocks needs axis=")
    where: list[Any] = [slice(None)] * block.ndim
    where[operator.index(axis) % block.ndim] = indices
    return take_index(block, tuple(where))


def full_like(
    block: SparseBlock, value: Any, dtype: Any = None, shape: Any = None, **_: Any
) -> Any:
    """A dense array, as NumPy's `full_like`: of the block's library."""
    shape = block.shape if shape is None else shape
    return block.xp.full(shape, value, dtype=dtype or block.dtype)


def zeros_like(block: SparseBlock, dtype: Any = None, shape: Any = None, **_: Any) -> Any:
    if shape is None or (not isinstance(shape, int) and len(shape) == 2):
        kind = type(as_csr(block.matrix))
        made = kind(
            block.matrix.shape if shape is None else tuple(shape), dtype=dtype or block.dtype
        )
        return SparseBlock(made, block.unit if shape is None else None)
    return full_like(block, 0, dtype, shape)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: reduce_sum,
    np.nansum: reduce_nansum,
    np.max: lambda x, axis=None, **given: reduce_extremum(x, "max", axis, **_kept_keywords(given)),
    np.min: lambda x, axis=None, **given: reduce_extremum(x, "min", axis, **_kept_keywords(given)),
    np.any: reduce_any,
    np.count_nonzero: count_nonzero,
    np.concatenate: concatenate,
    np.take: take,
    np.dot: multiply_matrices,
    np.tensordot: tensordot,
    np.transpose: lambda x, axes=None: x.transpose(*([axes] if axes is not None else [])),
    np.squeeze: lambda x, axis=None: x.squeeze(axis),
    np.reshape: lambda x, shape, **_: x.reshape(shape),
    np.real: lambda x: x if x.dtype.kind != "c" else _of_data(x, lambda data: data.real.copy()),
    np.imag: lambda x: _of_data(x, lambda data: data.imag.copy()),
    np.round: lambda x, decimals=0: _of_data(x, lambda data: x.xp.around(data, decimals)),
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
    np.size: lambda x: x.size,
    np.zeros_like: zeros_like,
    np.full_like: full_like,
    np.ones_like: lambda x, **given: full_like(x, 1, **given),
    np.empty_like: lambda x, dtype=None, shape=None, **_: zeros_like(x, dtype, shape),
    np.copy: lambda x, **_: x.copy(),
    np.nan_to_num: lambda x, **given: _of_data(x, lambda d: x.xp.nan_to_num(d, **given)),
}  # fmt: skip


def _kept_keywords(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in given.items() if k in ("keepdims", "dtype")}


def _of_data(block: SparseBlock, f: Callable[[Any], Any]) -> SparseBlock:
    """The block with a function of its stored elements, which keeps zeros zero."""
    matrix = as_csr(block.matrix)
    return block.replace_matrix(with_data(matrix, f(matrix.data)))
