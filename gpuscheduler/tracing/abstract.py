"""Abstract values of a trace: what it knows of arrays, mostly without their elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..ir.expr import SCANS, DType, Expr, Reduction, Shape, View


@dataclass(frozen=True, slots=True)
class ViewedInput:
    """A view of an input, or what it shows in memory of its own (`copied`)."""

    array: int
    view: View
    shape: Shape
    dtype: DType
    copied: bool = False
    scalar: bool = False  # NumPy gives a scalar


@dataclass(frozen=True, slots=True)
class AbstractArray:
    """What is known of an array that is an input."""

    shape: Shape
    dtype: DType
    strides: Shape | None = None  # in elements; None: C-contiguous
    scalar: bool = False  # a scalar of NumPy's

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class KnownArray:
    """An array whose values a function may ask for: it is as it will be when the task runs."""

    array: Any


@dataclass(frozen=True, slots=True)
class GeneratedArray:
    """An array that needs no memory: `expr` over `shape`. It takes no input number."""

    shape: Shape
    dtype: DType
    expr: Expr


@dataclass(frozen=True, slots=True)
class ScannedArray(GeneratedArray):
    """What a scan makes of `expr`, along an axis."""

    op: str
    axis: int


@dataclass(frozen=True, slots=True)
class FlatArray(GeneratedArray):
    """The elements of `expr` over `shape`, in order, as an array of one axis."""


@dataclass(frozen=True, slots=True)
class MaskedPoints(GeneratedArray):
    """The points of `expr` at which `mask` holds, as `x[mask]` gives them.

    The axes of the mask, from `axis` on, become one axis, of unknown length.
    """

    mask: Expr
    over: Shape  # the shape of the mask
    axis: int


# ------------------------------------------------------------------------------------------------
# One run of one function: its nodes, and the arrays that it makes on the way.


@dataclass(frozen=True)
class StoredArray:
    """An array that is computed from others, element by element, and kept."""

    shape: Shape
    expr: Expr

    @property
    def roots(self) -> tuple[Expr, ...]:
        return (self.expr,)


@dataclass(frozen=True)
class ReductionResult:
    """Result `which` of a reduction over `axes` of `over`, or of a scan along them."""

    over: Shape
    axes: Shape
    reduction: Reduction
    which: int

    @property
    def shape(self) -> Shape:
        if self.reduction.op in SCANS:
            return self.over
        return tuple(n for k, n in enumerate(self.over) if k not in self.axes)

    @property
    def roots(self) -> tuple[Expr, ...]:
        return (self.reduction.arg,)


@dataclass(frozen=True)
class MatrixProductArray:
    """The product of two matrices, each a view of an input.

    They have (rows, inner) and (inner, columns) elements. No kernel computes the product: it may
    only be the result of a whole function.
    """

    shape: Shape
    left: ViewedInput
    right: ViewedInput

    @property
    def roots(self) -> tuple[Expr, ...]:
        return ()


@dataclass(frozen=True)
class LibraryCall:
    """A call of a function of NumPy or SciPy that a library of GPUs has, too.

    Equal for blocks of one layout: which arrays it is for is said elsewhere.
    """

    name: str  # as people write it: "numpy.fft.rfft"
    arguments: tuple[ViewedInput, ...]
    #: All other arguments, by name; arrays among them as `ConstantArray`s.
    options: tuple[tuple[str, Any], ...]
    shape: Shape
    dtype: DType
    #: Whether its result may differ by more than rounding, in a way that its documentation allows.
    loose: bool = False

    @property
    def roots(self) -> tuple[Expr, ...]:
        return ()


class ConstantArray(NamedTuple):
    """A small array of the caller's, by value."""

    dtype: str
    shape: Shape
    data: bytes

    @classmethod
    def from_array(cls, array: np.ndarray) -> ConstantArray:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        """Return the array, which cannot be written to.

        >>> ConstantArray.from_array(np.arange(3.0)).array()
        array([0., 1., 2.])
        """
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)
