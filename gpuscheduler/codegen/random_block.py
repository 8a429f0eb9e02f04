"""The chunk function of arrays of random numbers that are drawn by position.

A call knows all that it needs: the array, and where its block lies in it. So any scheduler draws
the same numbers. Schedulers of ours look at the arguments instead, and make the block in a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from ..ir import random
from ..ir.expr import PLACEHOLDER, Expr, Kernel, View, constant
from .cpu import evaluate

#: What draws blocks of CuPy's, by name: a device is needed for that, and none here.
CUPY_BLOCKS = "gpuscheduler.devices.cuda.random_kernels"
#: What has the distributions without a closed form there.
CUPY_GENERATOR = "gpuscheduler.devices.cuda.random_generator"
#: Methods of NumPy's generators that take `dtype`.
OF_ANY_DTYPE = ("random", "standard_normal", "standard_exponential", "standard_gamma", "integers")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """Stands for an argument that each block has its own part of."""

    number: int


@dataclass(frozen=True, slots=True)
class RandomArray:
    """An array of random numbers, as data.

    >>> x = RandomArray("uniform", 7, (4, 3))
    >>> whole = draw_block(x, (0, 0), (4, 3))
    >>> bool((draw_block(x, (2, 1), (2, 2)) == whole[2:, 1:]).all())
    True
    """

    #: A method of `numpy.random.Generator`.
    method: str
    #: Of 64 bits: what all numbers of the array depend on, beside their positions.
    key: int
    shape: Shape
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    #: The module whose arrays the blocks are: "numpy" or "cupy".
    library: str = "numpy"

    def position(self, start: Shape) -> int:
        """The number of an element among all, in C order."""
        strides = View.contiguous(self.shape).strides
        return sum([n * step for n, step in zip(start, strides, strict=True)])

    def expression(self, size: Shape, parity: int) -> Expr | None:
        """A block as an expression; None for methods and parameters without a closed form.

        Positions count from the placeholder on, which stands for the even number before the
        block's first position; `parity` is the difference.
        """
        first = View(parity, View.contiguous(self.shape).strides)
        return random.draw(
            self.method, size, first, self.key, self.args, dict(self.kwargs), base=PLACEHOLDER
        )

    def call(self, generator: Any, size: Shape | None, given: Sequence[Any]) -> Any:
        """What the method of a generator gives for a block, whose parts of arrays are `given`."""
        args = [given[a.number] if type(a) is Argument else a for a in self.args]
        named = {k: given[a.number] if type(a) is Argument else a for k, a in self.kwargs}
        dtype = None
        if isinstance(generator, np.random.Generator) and self.method not in OF_ANY_DTYPE:
            dtype = named.pop("dtype", None)
        made = getattr(generator, self.method)(*args, size=size, **named)
        if dtype is None:
            return made
        if made.dtype.kind != "f" or np.dtype(dtype) not in (np.float32, np.float64):
            raise TypeError(
                f"Generator.{self.method}: dtype={dtype!r}: use float32 or float64, "
                "and only for a continuous distribution"
            )
        return made.astype(dtype, copy=False)

    def seed(self, start: Shape) -> np.random.SeedSequence:
        """What seeds the generator of a block that has no closed form."""
        return np.random.SeedSequence([self.key, self.position(start)])


def draw_block(array: RandomArray, start: Shape, size: Shape, *given: Any) -> Any:
    """Draw the block of an array that begins at `start`, on the current device.

    `size` is the block's shape, less the axes of a draw that is a vector. Numbers with a closed
    form depend on the array's key and on their position; the others on the block, too.
    """
    if array.library != "numpy":
        return import_module(CUPY_BLOCKS).draw_block(array, start, size, given)
    return draw_on_host(array, start, size, given)


def draw_on_host(array: RandomArray, start: Shape, size: Shape, given: Sequence[Any]) -> Any:
    """Draw a block as an array of NumPy."""
    position = array.position(start)
    expr = array.expression(size, position % 2)
    if expr is None:
        return array.call(np.random.Generator(np.random.Philox(array.seed(start))), size, given)
    words = {constant(PLACEHOLDER, np.int64): constant(position - position % 2, np.int64)}
    with np.errstate(all="ignore"):
        (out,) = evaluate.evaluate(_kernel(expr, size), (), words=words)
    return out


@lru_cache(256)
def _kernel(expr: Expr, shape: Shape) -> Kernel:
    return Kernel(shape, (expr,))
