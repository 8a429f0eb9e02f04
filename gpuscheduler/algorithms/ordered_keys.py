"""Map values of any sortable dtype to unsigned integers that have the same order.

NaN and NaT come last, in both directions. -0.0 and 0.0 are equal. All is done on bits: CuPy's
kernels take denormal float32 numbers for zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import array_module

#: Kinds of dtype that can be sorted: bool, integers, floats, complex, dates, durations, strings.
KINDS = "biufcMmUS"
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def has_ordered_keys(dtype: Any) -> bool:
    """Whether `ordered_keys` can map values of the dtype; not those of extended floats.

    >>> has_ordered_keys("f4"), has_ordered_keys(np.longdouble), has_ordered_keys(object)
    (True, False, False)
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "fc":
        return bool(dtype.itemsize <= (8 if dtype.kind == "f" else 16))
    return bool(dtype.kind in KINDS)


def ordered_keys(x: Any, descending: bool = False) -> tuple[Any, ...]:
    """Return arrays of unsigned integers whose order, the first array first, is that of `x`.

    Parameters
    ----------
    x
        Array of NumPy or CuPy, of any shape, with a dtype of `KINDS`.
    descending
        Give the largest values the least keys; NaN and NaT still have the greatest.

    Returns
    -------
    tuple of arrays
        One for most dtypes, each with the shape of `x`; three for complex numbers.

    >>> ordered_keys(np.array([-1.0, -0.0, 0.0, np.nan], "f2"))
    (array([17407, 32768, 32768, 65535], dtype=uint16),)
    >>> ordered_keys(np.array([-1, 0, 1], "i1"), descending=True)
    (array([128, 127, 126], dtype=uint8),)
    """
    dtype = x.dtype
    if not dtype.isnative:
        x = x.astype(dtype.newbyteorder("="))
    if dtype.kind == "c":
        return _complex_keys(x, descending)
    if dtype.kind in "US":
        return _string_keys(x, descending)
    x = array_module(x).ascontiguousarray(x).reshape(x.shape)
    if dtype.kind == "f":
        return (_float_keys(x, descending),)
    unsigned = x.view(_UNSIGNED[dtype.itemsize])
    if dtype.kind in "iMm":
        unsigned = unsigned ^ _top_bit(unsigned.dtype)
    if dtype.kind in "Mm":
        unsigned = unsigned - unsigned.dtype.type(1)  # NaT, the least, becomes the greatest
        most = _largest_integer(unsigned.dtype)
        if descending:
            xp = array_module(unsigned)
            unsigned = xp.where(unsigned == most, most, most - unsigned.dtype.type(1) - unsigned)
        return (unsigned,)
    return (~unsigned if descending else unsigned,)


def values_of_keys(keys: Any, dtype: Any) -> Any:
    """Return the numbers that `ordered_keys` maps to these keys; of bools, integers and floats.

    >>> x = np.array([-1.5, 0.0, np.inf, np.nan], "f4")
    >>> values_of_keys(ordered_keys(x)[0], x.dtype)
    array([-1.5,  0. ,  inf,  nan], dtype=float32)
    """
    dtype = np.dtype(dtype).newbyteorder("=")
    top = _top_bit(keys.dtype)
    if dtype.kind == "f":
        keys = array_module(keys).where(keys >= top, keys & ~top, ~keys)
    elif dtype.kind == "i":
        keys = keys ^ top
    return keys.view(dtype)


def _float_keys(x: Any, descending: bool) -> Any:
    xp = array_module(x)
    bits = x.view(_UNSIGNED[x.dtype.itemsize])
    kind = bits.dtype
    top, most = _top_bit(kind), _largest_integer(kind)
    infinite = kind.type(np.asarray(np.inf, x.dtype).view(kind))
    bits = xp.where(bits == top, kind.type(0), bits)  # -0.0
    keys = xp.where(bits >= top, ~bits, bits | top)
    if descending:
        keys = ~keys
    return xp.where((bits & ~top) > infinite, most, keys)


def _complex_keys(x: Any, descending: bool) -> tuple[Any, ...]:
    """NumPy's order: where NaN are, then the real, then the imaginary parts."""
    xp = array_module(x)
    real, imaginary = xp.ascontiguousarray(x.real), xp.ascontiguousarray(x.imag)
    place = (xp.isnan(real) * 2 + xp.isnan(imaginary)).astype(np.uint8)
    keys = [_float_keys(part.reshape(x.shape), descending) for part in (real, imaginary)]
    return (place, *keys)


def _string_keys(x: Any, descending: bool) -> tuple[Any, ...]:
    size = 4 if x.dtype.kind == "U" else 1
    n = x.dtype.itemsize // size
    units = np.ascontiguousarray(x).reshape(x.shape)[..., None].view(_UNSIGNED[size])
    units = units.reshape(*x.shape, n)
    return tuple(~units[..., i] if descending else units[..., i] for i in range(n))


def _top_bit(dtype: np.dtype[Any]) -> Any:
    """The unsigned integer of which only the highest bit is set."""
    return dtype.type(1 << (8 * dtype.itemsize - 1))


def _largest_integer(dtype: np.dtype[Any]) -> Any:
    return dtype.type(np.iinfo(dtype).max)
