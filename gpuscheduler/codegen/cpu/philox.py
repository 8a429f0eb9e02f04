"""Philox 4x32-10 random numbers by position, evaluated on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.expr import DType, View
from ...ir.random import Array
from . import tuning

# ---- numbers


def bits(key: int, positions: Any) -> Array:
    """Return 64 random bits for each position.

    >>> [hex(b) for b in bits(0, [0, 1])]
    ['0xe169c58d6627e8d5', '0x9b00dbd8bc57ac4c']
    """
    return values("bits", key, positions, np.dtype(np.uint64))


def uniform(key: int, positions: Any, dtype: Any = np.float64) -> Array:
    """Return uniform random numbers in [0, 1), one for each position."""
    return values("uniform", key, positions, np.dtype(dtype))


def normal(key: int, positions: Any, dtype: Any = np.float64) -> Array:
    """Return standard normal random numbers, one for each position."""
    return values("normal", key, positions, np.dtype(dtype))


def values(op: str, key: int, positions: Any, dtype: DType) -> Array:
    """Return what the node `op` (``bits``, ``uniform``, ``normal``) draws at these positions."""
    positions = np.asarray(positions, np.int64)
    out = np.empty(positions.shape, dtype)
    flat = positions.reshape(-1)
    if flat.size > 2:
        step = flat[1] - flat[0]
        if (flat[1:] - flat[:-1] == step).all():
            _run(op, key, flat[:1], int(step), out.reshape(1, -1))
            return out
    _run_at(op, key, flat, out.reshape(-1))
    return out


def fill(op: str, key: int, view: View, out: Array) -> None:
    """Write the random numbers of the elements that a view numbers into `out`.

    Where the view has a stride of 0, `out` has a length of 1.
    """
    if not out.size:
        return
    target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    lengths, strides = _merge_axes(out.shape, view.strides)
    starts: Any = np.array([view.offset], np.int64)
    for n, s in zip(lengths[:-1], strides[:-1], strict=True):
        starts = (starts[:, None] + s * np.arange(n)).reshape(-1)
    if lengths[-1] < tuning.SHORT_ROW and len(starts) > 1:
        places = starts[:, None] + strides[-1] * np.arange(lengths[-1])
        _run_at(op, key, places.reshape(-1), target.reshape(-1))
    else:
        _run(op, key, starts, strides[-1], target.reshape(-1, lengths[-1]))
    if target is not out:
        out[...] = target


def _merge_axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return lengths and strides of fewer axes, at least one, for the same numbers in C order.

    >>> _merge_axes((5, 1, 4, 2), (100, 9, 2, 1))
    ([5, 8], [100, 1])
    """
    lengths, steps = [1], [0]
    for n, s in zip(shape, strides, strict=True):
        if lengths[-1] == 1:
            lengths[-1], steps[-1] = n, s
        elif n != 1 and steps[-1] == s * n:
            lengths[-1], steps[-1] = lengths[-1] * n, s
        elif n != 1:
            lengths.append(n)
            steps.append(s)
    return lengths, steps


def _run(op: str, key: int, starts: Array, step: int, out: Array) -> None:
    """Draw rows: element k of a row has the number of its start plus k steps."""
    from . import philox_loops as loops  # which imports Numba

    if op == "bits":
        loops.bits(*_key_halves(key), starts, step, out)
    elif op == "uniform":
        loops.uniform(*_key_halves(key), starts, step, out, _shift(out))
    elif op == "normal":
        loops.normal(*_key_halves(key), starts, step, out, _shift(out))
    else:
        raise ValueError(f"{op} is no kind of random number")


def _run_at(op: str, key: int, places: Array, out: Array) -> None:
    """Draw the numbers of any positions."""
    from . import philox_loops as loops  # as above

    if op == "bits":
        loops.bits_at(*_key_halves(key), places, out)
    elif op == "uniform":
        loops.uniform_at(*_key_halves(key), places, out, _shift(out))
    elif op == "normal":
        loops.normal_at(*_key_halves(key), places, out, _shift(out))
    else:
        raise ValueError(f"{op} is no kind of random number")


def _key_halves(key: int) -> tuple[np.uint64, np.uint64]:
    return np.uint64(key & 0xFFFF_FFFF), np.uint64(key >> 32)


def _shift(out: Array) -> np.uint64:
    """Return how many of 64 bits the fraction of a dtype cannot hold."""
    return np.uint64(40 if out.dtype == np.float32 else 11)
