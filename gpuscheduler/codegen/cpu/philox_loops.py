"""Numba loops that draw Philox random numbers."""

from __future__ import annotations

import math

import numpy as np

from .njit import njit

# Below, every integer is of one type: Numba makes floats of int64 and uint64 together. What must
# become vector instructions has no branch and no call. Nothing here lets the compiler reorder
# floating point operations, so the results are the same on every processor.

_LOW, _32, _11, _40 = np.uint64(0xFFFF_FFFF), np.uint64(32), np.uint64(11), np.uint64(40)
_M0, _M1 = np.uint64(0xD251_1F53), np.uint64(0xCD9E_8D57)
_W0, _W1 = np.uint64(0x9E37_79B9), np.uint64(0xBB67_AE85)
_0 = np.uint64(0)
PAIRS = 512  # pairs at a time, in buffers that stay in the first cache


@njit(inline="always")
def _block(low, high, counter):  # type: ignore[no-untyped-def]
    """The 64 bits of both elements of a pair."""
    a, b, c, d = counter & _LOW, counter >> _32, _0, _0
    for _ in range(10):
        p, q = _M0 * a, _M1 * c
        a, b, c, d = (q >> _32) ^ b ^ low, q & _LOW, (p >> _32) ^ d ^ high, p & _LOW
        low, high = (low + _W0) & _LOW, (high + _W1) & _LOW
    return a | (b << _32), c | (d << _32)


@njit()
def _pairs(low, high, start, step, even, odd):  # type: ignore[no-untyped-def]
    """The bits of the pairs in which elements start, start + step, … are."""
    for k in range(even.size):
        even[k], odd[k] = _block(low, high, np.uint64((start + k * step) >> 1))


@njit()
def _spread(start, step, even, odd, out):  # type: ignore[no-untyped-def]
    """Take each element's part of its pair."""
    n = out.size
    if step == 1:
        first = start & 1
        if first:
            out[0] = odd[0]
        whole = (n - first) // 2
        for k in range(whole):
            out[first + 2 * k] = even[first + k]
            out[first + 2 * k + 1] = odd[first + k]
        if first + 2 * whole < n:
            out[n - 1] = even[first + whole]
    elif step & 1:
        for k in range(n):
            out[k] = odd[k] if (start + k * step) & 1 else even[k]
    elif start & 1:
        for k in range(n):
            out[k] = odd[k]
    else:
        for k in range(n):
            out[k] = even[k]


@njit(inline="always")
def _part(start, step, n):  # type: ignore[no-untyped-def]
    """The next elements of n, the step between pairs, and the number of pairs."""
    if step == 1:
        first = start & 1
        m = min(n, 2 * PAIRS - first)
        return m, 2, (m + first + 1) // 2
    m = min(n, PAIRS)
    return m, step, m


@njit()
def bits(low, high, starts, step, out):  # type: ignore[no-untyped-def]
    even, odd = np.empty(PAIRS, np.uint64), np.empty(PAIRS, np.uint64)
    for row in range(starts.size):
        done, n = 0, out.shape[1]
        while done < n:
            start = starts[row] + done * step
            m, stride, pairs = _part(start, step, n - done)
            _pairs(low, high, start, stride, even[:pairs], odd[:pairs])
            _spread(start, step, even, odd, out[row, done : done + m])
            done += m


@njit()
def uniform(low, high, starts, step, out, shift):  # type: ignore[no-untyped-def]
    even, odd = np.empty(PAIRS, np.uint64), np.empty(PAIRS, np.uint64)
    words = np.empty(2 * PAIRS, np.uint64)
    unit = 2.0**-53 if shift == _11 else 2.0**-24
    for row in range(starts.size):
        done, n = 0, out.shape[1]
        while done < n:
            start = starts[row] + done * step
            m, stride, pairs = _part(start, step, n - done)
            _pairs(low, high, start, stride, even[:pairs], odd[:pairs])
            _spread(start, step, even, odd, words[:m])
            for k in range(m):
                out[row, done + k] = np.int64(words[k] >> shift) * unit
            done += m


@njit(inline="always")
def _log(x):  # type: ignore[no-untyped-def]
    """The logarithm of a normal positive number, as FreeBSD's e_log.c computes it."""
    w = np.float64(x).view(np.int64) + np.int64(0x3FF0_0000_0000_0000 - 0x3FE6_A09E_0000_0000)
    k = (w >> 52) - 1023
    m = (w & np.int64(0x000F_FFFF_FFFF_FFFF)) + np.int64(0x3FE6_A09E_0000_0000)
    f = np.int64(m).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w4 = z * z
    odd = w4 * (0.3999999999940941908 + w4 * (0.2222219843214978396 + w4 * 0.1531383769920937332))
    even = z * (
        0.6666666666666735130
        + w4 * (0.2857142874366239149 + w4 * (0.1818357216161805012 + w4 * 0.1479819860511658591))
    )
    half = 0.5 * f * f
    tail = s * (half + (odd + even)) + k * 1.90821492927058770002e-10
    return k * 6.93147180369123816490e-01 - ((half - tail) - f)


@njit(inline="always")
def _cos_and_sin(v):  # type: ignore[no-untyped-def]
    """Cosine and sine of 2πv, for v from 0 to 1.

    The polynomials are those of FreeBSD's k_cos.c and k_sin.c.
    """
    t = 4.0 * v
    quarter = np.int64(t + 0.5)
    x = (t - quarter) * (math.pi / 2)
    z = x * x
    s = x + x * z * (
        -1.66666666666666324348e-01
        + z
        * (
            8.33333333332248946124e-03
            + z
            * (
                -1.98412698298579493134e-04
                + z
                * (
                    2.75573137070700676789e-06
                    + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)
                )
            )
        )
    )
    c = 1.0 - (
        0.5 * z
        - z
        * z
        * (
            4.16666666666666019037e-02
            + z
            * (
                -1.38888888888741095749e-03
                + z
                * (
                    2.48015872894767294178e-05
                    + z
                    * (
                        -2.75573143513906633035e-07
                        + z * (2.08757232129817482790e-09 + z * -1.13596475577881948265e-11)
                    )
                )
            )
        )
    )
    cosine = s if quarter & 1 else c
    sine = c if quarter & 1 else s
    cosine = -cosine if (quarter + 1) & 2 else cosine
    sine = -sine if quarter & 2 else sine
    return cosine, sine


@njit()
def _box_muller(even, odd, shift, unit, a, b):  # type: ignore[no-untyped-def]
    for k in range(even.size):
        u = np.float64(np.int64(even[k] >> shift) + 1) * unit
        v = np.float64(np.int64(odd[k] >> shift)) * unit
        r = np.sqrt(-2.0 * _log(u))
        cosine, sine = _cos_and_sin(v)
        a[k], b[k] = r * cosine, r * sine


@njit()
def normal(low, high, starts, step, out, shift):  # type: ignore[no-untyped-def]
    even, odd = np.empty(PAIRS, np.uint64), np.empty(PAIRS, np.uint64)
    a, b = np.empty(PAIRS), np.empty(PAIRS)
    unit = 2.0**-53 if shift == _11 else 2.0**-24
    for row in range(starts.size):
        done, n = 0, out.shape[1]
        while done < n:
            start = starts[row] + done * step
            m, stride, pairs = _part(start, step, n - done)
            _pairs(low, high, start, stride, even[:pairs], odd[:pairs])
            _box_muller(even[:pairs], odd[:pairs], shift, unit, a[:pairs], b[:pairs])
            _spread(start, step, a, b, out[row, done : done + m])
            done += m


# The same for elements of any numbers, each of which has its pair drawn for itself.


@njit()
def _draw_at(low, high, places, even, odd):  # type: ignore[no-untyped-def]
    for k in range(places.size):
        even[k], odd[k] = _block(low, high, np.uint64(places[k] >> 1))


@njit()
def _choose(places, even, odd, out):  # type: ignore[no-untyped-def]
    for k in range(places.size):
        out[k] = odd[k] if places[k] & 1 else even[k]


@njit()
def bits_at(low, high, places, out):  # type: ignore[no-untyped-def]
    even, odd = np.empty(PAIRS, np.uint64), np.empty(PAIRS, np.uint64)
    for start in range(0, out.size, PAIRS):
        part = places[start : start + PAIRS]
        _draw_at(low, high, part, even, odd)
        _choose(part, even, odd, out[start : start + PAIRS])


@njit()
def uniform_at(low, high, places, out, shift):  # type: ignore[no-untyped-def]
    even, odd = np.empty(PAIRS, np.uint64), np.empty(PAIRS, np.uint64)
    words = np.empty(PAIRS, np.uint64)
    unit = 2.0**-53 if shift == _11 else 2.0**-24
    for start in range(0, out.size, PAIRS):
        part = places[start : start + PAIRS]
        _draw_at(low, high, part, even, odd)
        _choose(part, even, odd, words)
        for k in range(part.size):
            out[start + k] = np.int64(words[k] >> shift) * unit


@njit()
def normal_at(low, high, places, out, shift):  # type: ignore[no-untyped-def]
    even, odd = np.empty(PAIRS, np.uint64), np.empty(PAIRS, np.uint64)
    a, b = np.empty(PAIRS), np.empty(PAIRS)
    unit = 2.0**-53 if shift == _11 else 2.0**-24
    for start in range(0, out.size, PAIRS):
        part = places[start : start + PAIRS]
        n = part.size
        _draw_at(low, high, part, even, odd)
        _box_muller(even[:n], odd[:n], shift, unit, a[:n], b[:n])
        _choose(part, a, b, out[start : start + n])
