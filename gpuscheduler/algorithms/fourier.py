"""Discrete Fourier transforms along any axes of chunked arrays.

An axis is transformed where blocks hold all of it. So axes in one chunk come first; then the array
is rechunked to make others whole, and split along axes that are done (the slab transposition of
distributed transforms). `plan_transforms` finds the order that moves the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.array.core import Array
from dask.array.fft import fftfreq, fftshift, ifftshift, rfftfreq

from .blocks import array_module, module_name
from .capacity import capacity
from .matrices import empty_meta

__all__ = [
    "fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifft2", "ifftn", "ifftshift",
    "ihfft", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftfreq", "rfftn",
]  # fmt: skip

Chunks = tuple[tuple[int, ...], ...]

#: Bytes that a transform takes for each byte of its argument: argument, result and working memory.
WORK = 4
#: Elements of a block up to which it does not pay to keep several.
FEW = 2**16
#: The functions of several axes, by that of one.
OF_SEVERAL = {"fft": "fftn", "ifft": "ifftn"}


class Transform(NamedTuple):
    """One transform along one axis."""

    function: str  # of `numpy.fft`: fft, ifft, rfft, irfft, hfft or ihfft
    axis: int
    n: int  # as NumPy's functions get it: of the argument, or of a real result
    length: int  # of the axis of the result


class TransformStep(NamedTuple):
    """What is done next: a rechunk if there is one, then transforms on each block."""

    chunks: Chunks | None  # None where they stay
    transforms: tuple[Transform, ...]


#: Elements that are moved, and the steps.
Way = tuple[float, tuple[TransformStep, ...]]


def plan_transforms(
    chunks: Chunks, transforms: Sequence[Transform], limit: float = math.inf, few: int = 0
) -> tuple[TransformStep, ...] | None:
    """The steps that move the fewest elements; None where a block would exceed `limit` elements.

    `transforms` are on different axes. A real transform is before all others, and one to real
    numbers is after them. Blocks of more than `few` elements do not get much larger, which would
    leave devices idle, unless there is no other way.

    >>> x = Transform("fft", 0, 8, 8), Transform("fft", 1, 4, 4)
    >>> [(step.chunks, len(step.transforms)) for step in plan_transforms(((4, 4), (4,)), x)]
    [(None, 1), (((8,), (2, 2)), 1)]
    """

    for growth in (2, 16, math.inf):
        bound = min(limit, max(few, growth * _largest_block(chunks)))
        steps = _fewest_moves(chunks, tuple(transforms), bound)
        if steps is not None or bound == limit:
            return steps
    return None


def _fewest_moves(
    chunks: Chunks, transforms: tuple[Transform, ...], limit: float
) -> tuple[TransformStep, ...] | None:
    """The same, with blocks of at most `limit` elements after each rechunk."""

    @cache
    def search_best(
        rest: tuple[Transform, ...], chunks: Chunks
    ) -> tuple[float, tuple[TransformStep, ...]] | None:
        if not rest:
            return 0, ()
        now, later = _split_transforms(rest, chunks)
        if now:
            after = search_best(later, _chunks_after(chunks, now))
            return after and (after[0], (TransformStep(None, now), *after[1]))
        found = []
        size = math.prod(sum(c) for c in chunks)
        for count in range(1, len(rest) + 1):
            for whole in combinations(rest, count):
                new = make_whole(chunks, {t.axis for t in whole}, {t.axis for t in rest}, limit)
                if _largest_block(new) > limit:
                    continue
                now, later = _split_transforms(rest, new)
                after = search_best(later, _chunks_after(new, now)) if now else None
                if after is not None:
                    steps = (TransformStep(new, now), *after[1])
                    found.append((size + after[0], _largest_block(new), len(steps), steps))
        if not found:
            return None
        cost, _, _, steps = min(found, key=lambda way: way[:3])
        return cost, steps

    way = search_best(transforms, chunks)
    return None if way is None else way[1]


def _largest_block(chunks: Chunks) -> int:
    """Elements of the largest block."""
    return math.prod(max(c, default=0) for c in chunks)


def _split_transforms(
    rest: tuple[Transform, ...], chunks: Chunks
) -> tuple[tuple[Transform, ...], tuple[Transform, ...]]:
    """Transforms that blocks can make now, and those after them."""
    now: list[Transform] = []
    later = list(rest)
    while True:
        for t in later:
            first = t.function in ("rfft", "ihfft") or all(
                other.function not in ("rfft", "ihfft") for other in later
            )
            last = t.function not in ("irfft", "hfft") or len(later) == 1
            if len(chunks[t.axis]) == 1 and first and last:
                now.append(t)
                later.remove(t)
                break
        else:
            return tuple(now), tuple(later)


def _chunks_after(chunks: Chunks, now: Sequence[Transform]) -> Chunks:
    """Chunks after transforms of whole axes."""
    out = list(chunks)
    for t in now:
        out[t.axis] = (t.length,)
    return tuple(out)


def make_whole(
    chunks: Chunks, whole: set[int], wanted: set[int], limit: float = math.inf
) -> Chunks:
    """Chunks with some axes in one piece, and as many blocks as before or as `limit` asks for.

    Axes that are not `wanted` are split first, and others only if these are too short.

    >>> make_whole(((4, 4), (4,)), {0}, {0})
    ((8,), (2, 2))
    """
    out = [(sum(c),) if axis in whole else c for axis, c in enumerate(chunks)]
    blocks = max(math.prod(map(len, chunks)), math.prod(map(sum, chunks)) / limit)
    others = [axis for axis in range(len(chunks)) if axis not in whole]
    others.sort(key=lambda axis: (axis in wanted, -sum(chunks[axis]), axis))
    for axis in others:
        missing = blocks / math.prod(map(len, out))
        if missing <= 1:
            break
        size = sum(chunks[axis])
        pieces = min(size, math.ceil(missing * len(out[axis])))
        if pieces > len(out[axis]):
            out[axis] = tuple(size * (n + 1) // pieces - size * n // pieces for n in range(pieces))
    return tuple(out)


# ---- graphs


def _run(a: Array, transforms: Sequence[Transform], norm: str | None) -> Array:
    """Transform along axes, all of which are different."""
    name = transforms[0].function if transforms else "fft"
    if norm not in (None, "backward", "ortho", "forward"):
        raise ValueError(f"{name}: norm={norm!r}: must be 'backward', 'ortho' or 'forward'")
    dtype = _result_type(a.dtype, transforms)
    if any(math.isnan(n) for axis in a.chunks for n in axis):
        if any(len(a.chunks[t.axis]) > 1 for t in transforms):
            raise ValueError(
                f"{name}: the chunk sizes of an argument are not known: "
                "call x.compute_chunk_sizes() first"
            )
        steps: Sequence[TransformStep] = [TransformStep(None, tuple(transforms))]
    else:
        each = max(dtype.itemsize, a.dtype.itemsize) * WORK
        room = capacity(module_name(a)).nbytes
        limit = room / each
        found = plan_transforms(a.chunks, transforms, limit, FEW)
        if found is None:
            raise NotImplementedError(
                f"{name}: an axis of {a.shape} is longer than one device can transform: a "
                f"block needs {int(_longest_line(a.shape, transforms) * each):,} bytes there with "
                f"its working memory, and the limit is {room:,}. Filter or cut the signal "
                "into overlapping parts, as with dask.array.overlap"
            )
        steps = found
    x = a
    for step in steps:
        if step.chunks is not None:
            x = x.rechunk(step.chunks)
        kind = _result_type(x.dtype, step.transforms)
        chunks = _chunks_after(x.chunks, step.transforms)
        plain: Any = tuple(map(tuple, step.transforms))
        function: Any = _transform_block
        x = x.map_blocks(
            function, plain, norm, kind.str, chunks=chunks, meta=empty_meta(a, a.ndim, kind)
        )
    return x


def _longest_line(shape: tuple[int, ...], transforms: Sequence[Transform]) -> int:
    """Elements of one line of the longest axis."""
    return max(shape[t.axis] for t in transforms)


def _result_type(dtype: Any, transforms: Sequence[Transform]) -> np.dtype[Any]:
    x: Any = np.ones(2, dtype)
    for t in _in_order(transforms):
        x = getattr(np.fft, t.function)(x)
    return x.dtype


def _in_order(transforms: Sequence[Transform]) -> list[Transform]:
    """Real transforms first, those to real numbers last."""
    rank = {"rfft": 0, "ihfft": 0, "irfft": 2, "hfft": 2}
    return sorted(transforms, key=lambda t: rank.get(t.function, 1))


def _transform_block(
    block: Any, plain: Sequence[tuple[Any, ...]], norm: str | None, dtype: str
) -> Any:
    """Transform a block; the arguments are plain values, of which plans can be kept."""
    transforms = [Transform(*t) for t in plain]
    if not block.size:
        shape = [*block.shape]
        for t in transforms:
            shape[t.axis] = t.length
        return array_module(block).empty(tuple(shape), dtype)
    library = array_module(block).fft
    several: list[Transform] = []
    for t in _in_order(transforms):
        if t.function in OF_SEVERAL:
            several.append(t)
            continue
        block = _transform_several(library, block, several, norm)
        several = []
        block = getattr(library, t.function)(block, n=t.n, axis=t.axis, norm=norm)
    return _transform_several(library, block, several, norm).astype(dtype, copy=False)


def _transform_several(
    library: Any, block: Any, transforms: Sequence[Transform], norm: str | None
) -> Any:
    """Transforms of one kind along several axes, in one call."""
    if not transforms:
        return block
    function = getattr(library, OF_SEVERAL[transforms[0].function])
    lengths, axes = [t.n for t in transforms], [t.axis for t in transforms]
    return function(block, s=lengths, axes=axes, norm=norm)


# ---- functions


def _argument(function: str, a: Any) -> Array:
    a = a if isinstance(a, Array) else da.asarray(a)
    if a.dtype.kind not in "biufc":
        raise TypeError(f"{function}: arrays of {a.dtype} have no Fourier transform")
    return a


def _of_axis(function: str, a: Array, n: Any, axis: Any) -> Transform:
    if not isinstance(axis, (int, np.integer)) or not -a.ndim <= axis < a.ndim:
        raise np.exceptions.AxisError(f"{function}: axis {axis} of an array of {a.ndim} axes")
    axis = int(axis) % a.ndim
    size = a.shape[axis]
    to_real = function in ("irfft", "hfft")
    if n is None:
        if math.isnan(size):
            raise ValueError(f"{function}: the length of axis {axis} is not known: pass n=")
        n = 2 * (size - 1) if to_real else size
    n = int(n)
    if n < 1:
        raise ValueError(f"{function}: Invalid number of FFT data points ({n}) along axis {axis}")
    return Transform(function, axis, n, n // 2 + 1 if function in ("rfft", "ihfft") else n)


def _transform_axis(function: str, a: Any, n: Any, axis: int, norm: str | None) -> Array:
    a = _argument(function, a)
    if function in ("rfft", "ihfft") and a.dtype.kind == "c":
        raise TypeError(f"{function}: takes real numbers, not {a.dtype}; use fft")
    return _run(a, [_of_axis(function, a, n, axis)], norm)


def _several_axes(function: str, last: str, a: Any, s: Any, axes: Any, norm: str | None) -> Array:
    """Transform along `axes`, the last of them by another function."""
    a = _argument(last, a)
    if last == "rfft" and a.dtype.kind == "c":
        raise TypeError(f"{last}n: takes real numbers, not {a.dtype}; use fftn")
    if axes is None:
        axes = list(range(a.ndim)) if s is None else list(range(a.ndim - len(s), a.ndim))
    axes = [axes] if isinstance(axes, (int, np.integer)) else list(axes)
    lengths = [None] * len(axes) if s is None else [None if n in (None, -1) else n for n in s]
    if len(lengths) != len(axes):
        raise ValueError(f"{function}n: s has {len(lengths)} lengths for {len(axes)} axes")
    if not axes:
        if last != function:
            raise ValueError(f"{last}n: at least 1 axis must be transformed")
        return a.astype(_result_type(a.dtype, [Transform(last, 0, 2, 2)]))
    made = [
        _of_axis(last if n == len(axes) - 1 else function, a, length, axis)
        for n, (length, axis) in enumerate(zip(lengths, axes, strict=True))
    ]
    if len({t.axis for t in made}) == len(made):
        return _run(a, made, norm)
    if last != function:
        raise NotImplementedError(f"{last}n: an axis is named twice in {axes}")
    for t in made[::-1]:  # one that is named twice is transformed twice
        a = _run(a, [_of_axis(function, a, t.n, t.axis)], norm)
    return a


def fft(a: Any, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """Return the discrete Fourier transform along one axis, whatever its chunks.

    The axis of the result has `n` points, those of the axis by default.
    See `fftn` for arguments, chunks and errors.

    >>> fft(da.array([1.0, 0.0, 0.0, 0.0]).rechunk(2)).compute().real.tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return _transform_axis("fft", a, n, axis, norm)


def ifft(a: Any, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """Return the inverse discrete Fourier transform along one axis.

    The axis of the result has `n` points, those of the axis by default.
    See `fftn` for arguments, chunks and errors.

    >>> ifft(fft(da.arange(3.0, chunks=1))).compute().real.round(9).tolist()
    [0.0, 1.0, 2.0]
    """
    return _transform_axis("ifft", a, n, axis, norm)


def rfft(a: Any, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """Return the non-negative frequencies of the transform of real numbers.

    The axis of the result has `n // 2 + 1` points, where `n` is its length by default.
    See `fftn` for arguments, chunks and errors.

    >>> rfft(da.ones(4, chunks=2)).compute().real.tolist()
    [4.0, 0.0, 0.0]
    """
    return _transform_axis("rfft", a, n, axis, norm)


def irfft(a: Any, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """Return the real numbers whose transform has these non-negative frequencies.

    The axis of the result has `n` points, twice the axis less two by default.
    See `fftn` for arguments, chunks and errors.

    >>> irfft(da.array([4.0, 0.0, 0.0]).rechunk(2)).compute().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return _transform_axis("irfft", a, n, axis, norm)


def hfft(a: Any, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """Return the real transform of a signal with Hermitian symmetry.

    The axis of the result has `n` points, twice the axis less two by default.
    See `fftn` for arguments, chunks and errors.

    >>> hfft(da.array([1.0, 0.0, 0.0]).rechunk(2)).compute().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return _transform_axis("hfft", a, n, axis, norm)


def ihfft(a: Any, n: int | None = None, axis: int = -1, norm: str | None = None) -> Array:
    """Return the inverse of `hfft`.

    The axis of the result has `n // 2 + 1` points, where `n` is its length by default.
    See `fftn` for arguments, chunks and errors.

    >>> ihfft(da.ones(4, chunks=2)).compute().real.tolist()
    [1.0, 0.0, 0.0]
    """
    return _transform_axis("ihfft", a, n, axis, norm)


def fftn(a: Any, s: Any = None, axes: Any = None, norm: str | None = None) -> Array:
    """Return the discrete Fourier transform along several axes, whatever their chunks.

    Parameters
    ----------
    a
        Array of numbers.
    s
        Lengths of the transformed axes; longer ones are filled with zeros. -1 and None stay.
    axes
        The axes that are transformed: all, or as many of the last ones as `s` has lengths.
    norm
        `"backward"`, `"ortho"` or `"forward"`, as NumPy has it.

    Returns
    -------
    transform
        Array of NumPy's shape and dtype, in the chunks of the last step: an axis that was chunked
        is whole, and another one may be split. `rechunk` moves all of the result once more.

    Raises
    ------
    NotImplementedError
        If one axis is longer than one device can transform.
    ValueError
        If chunk sizes along an axis are not known, or a length is below 1.

    Notes
    -----
    Each rechunk moves the array once: with axes in one chunk and axes that are chunked, one is
    enough in most cases.

    Examples
    --------
    >>> x = da.ones((4, 4), chunks=2)
    >>> fftn(x).compute().real[0, 0]
    np.float64(16.0)
    """
    return _several_axes("fft", "fft", a, s, axes, norm)


def ifftn(a: Any, s: Any = None, axes: Any = None, norm: str | None = None) -> Array:
    """Return the inverse of `fftn`. See `fftn`."""
    return _several_axes("ifft", "ifft", a, s, axes, norm)


def rfftn(a: Any, s: Any = None, axes: Any = None, norm: str | None = None) -> Array:
    """Return `fftn` of real numbers, of the last axis the non-negative frequencies. See `fftn`."""
    return _several_axes("fft", "rfft", a, s, axes, norm)


def irfftn(a: Any, s: Any = None, axes: Any = None, norm: str | None = None) -> Array:
    """Return the inverse of `rfftn`: real numbers. See `fftn`."""
    return _several_axes("ifft", "irfft", a, s, axes, norm)


def fft2(a: Any, s: Any = None, axes: Any = (-2, -1), norm: str | None = None) -> Array:
    """Return `fftn` along two axes, the last ones by default."""
    return _several_axes("fft", "fft", a, s, axes, norm)


def ifft2(a: Any, s: Any = None, axes: Any = (-2, -1), norm: str | None = None) -> Array:
    """Return `ifftn` along two axes, the last ones by default."""
    return _several_axes("ifft", "ifft", a, s, axes, norm)


def rfft2(a: Any, s: Any = None, axes: Any = (-2, -1), norm: str | None = None) -> Array:
    """Return `rfftn` along two axes, the last ones by default."""
    return _several_axes("fft", "rfft", a, s, axes, norm)


def irfft2(a: Any, s: Any = None, axes: Any = (-2, -1), norm: str | None = None) -> Array:
    """Return `irfftn` along two axes, the last ones by default."""
    return _several_axes("ifft", "irfft", a, s, axes, norm)
