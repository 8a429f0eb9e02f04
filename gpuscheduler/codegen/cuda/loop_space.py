"""The axes of loops, with strides along them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoopAxis:
    """Some points in a row, and the strides of each layout along them."""

    length: int
    strides: tuple[int, ...]


def collapse_axes(axes: Iterable[LoopAxis]) -> list[LoopAxis]:
    """Merge neighbouring axes where all layouts go on evenly; drop axes of length 1.

    The points and their order stay the same.

    >>> collapse_axes([LoopAxis(4, (6,)), LoopAxis(1, (5,)), LoopAxis(3, (2,))])
    [LoopAxis(length=12, strides=(2,))]
    >>> collapse_axes([LoopAxis(4, (3, 0)), LoopAxis(3, (1, 1))])
    [LoopAxis(length=4, strides=(3, 0)), LoopAxis(length=3, strides=(1, 1))]
    """
    out: list[LoopAxis] = []
    for axis in axes:
        if axis.length == 1:
            continue
        if out and all(
            s == t * axis.length for s, t in zip(out[-1].strides, axis.strides, strict=True)
        ):
            out[-1] = LoopAxis(out[-1].length * axis.length, axis.strides)
        else:
            out.append(axis)
    return out


def counting_strides(shape: Sequence[int], axes: Iterable[int]) -> list[int]:
    """Strides that number the points along some axes in C order.

    >>> counting_strides((4, 5, 1, 3), (0, 2, 3))
    [3, 0, 0, 1]
    """
    strides, step = [0] * len(shape), 1
    for k in reversed(list(axes)):
        strides[k] = step if shape[k] > 1 else 0
        step *= max(shape[k], 1)
    return strides


def power_above(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def power_below(n: int) -> int:
    """The greatest power of two that is at most n."""
    return 1 << (max(n, 1).bit_length() - 1)
