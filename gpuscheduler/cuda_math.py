"""CUDA C++ text for the operations of expressions: one value at a time, with NumPy's meaning.

`operation` and `cast` give the text of one node. What they call is CUDA's own mathematics or in
`PIECES`, of which `pieces` takes what a text needs: no kernel carries the rest.

Types have short codes here, kind and bytes: ``b1``, ``i4``, ``f2``, ``c16``. A float16 value is
held as a float that float16 can represent, and rounded after every operation, as NumPy does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Code -> C++ type of a value in a register.
TYPES = {
    "b1": "bool", "i1": "signed char", "i2": "short", "i4": "int", "i8": "long long",
    "u1": "unsigned char", "u2": "unsigned short", "u4": "unsigned", "u8": "unsigned long long",
    "f2": "float", "f4": "float", "f8": "double",
    "c8": "Complex<float>", "c16": "Complex<double>",
}  # fmt: skip
#: Code -> C++ type in memory, where it is another.
STORED = TYPES | {"b1": "unsigned char", "f2": "unsigned short"}

#: What stands for no value: NaN, or zero where the type has none.
_NAN, _NANF = "__longlong_as_double(0x7ff8000000000000ll)", "__int_as_float(0x7fc00000)"
NOT_A_NUMBER = {short: f"({kind})0" for short, kind in TYPES.items()} | {
    "f2": _NANF, "f4": _NANF, "f8": _NAN,
    "c8": f"Complex<float>{{{_NANF}, {_NANF}}}", "c16": f"Complex<double>{{{_NAN}, {_NAN}}}",
}  # fmt: skip


def code(dtype: np.dtype[Any]) -> str | None:
    """
    >>> code(np.dtype("float16")), code(np.dtype("longdouble"))
    ('f2', None)
    """
    short = f"{dtype.kind}{dtype.itemsize}"
    return short if short in TYPES and dtype.isnative else None


# ---- pieces of CUDA C++, by the names of what they define

PIECES: dict[str, str] = {}


def _piece(text: str, *names: str) -> None:
    for name in names:
        PIECES[name] = text.strip("\n")


def _real(text: str, *names: str) -> None:
    """Functions of `Real`, for double under their names and for float with an f behind these, as C
    has it. ``~`` stands for that f."""
    for suffix, real, word in (("", "double", "long long"), ("f", "float", "int")):
        body = text.replace("~", suffix).replace("Real", real).replace("Word", word)
        _piece(body, *[n + suffix for n in names])


# What no headers means: these are declared by the compiler itself.
_piece(
    """
template<class T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Vec { T x[N]; };
""",
    "Vec",
)
_piece(
    """
template<class T> struct alignas(2 * sizeof(T)) Complex { T x, y; };
""",
    "Complex",
)
HALF = """
__device__ __forceinline__ float half_value(unsigned short h) {
  float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x;
}
__device__ __forceinline__ unsigned short half_bits(float x) {
  unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h;
}
__device__ __forceinline__ float half_round(float x) { return half_value(half_bits(x)); }
__device__ __forceinline__ float half_of_double(double x) {
  unsigned short h; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(h) : "d"(x)); return half_value(h);
}
"""
_piece(HALF, "half_value", "half_bits", "half_round", "half_of_double")

# Division by a known number; `kernel` has what its magic is.
_piece(
    """
__device__ __forceinline__ unsigned divide(unsigned n, unsigned long long magic) {
  return (unsigned)((unsigned long long)n * (unsigned)magic >> (magic >> 32));
}
""",
    "divide",
)

# Quotients, inverses and roots of float32, rounded as IEEE 754 has it. They take the hardware's
# approximation and correct it by its error, which a fused product has exactly (P. Markstein, 1990),
# where nothing on the way is too large or too small for that, or no number; where something may be,
# `rare` is set and the result is not to be used. CUDA's own do the same, but look at each number by
# itself, and branch: these are for several, of which a single branch computes the rare ones again.
_piece(
    """
__device__ __forceinline__ float usual_inverse(float x, bool& rare) {
#if __USE_FAST_MATH__
  return 1 / x;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  r = fmaf(r, fmaf(-x, r, 1.0f), r);
  rare |= !(fabsf(r) > 0x1p-127f);
  return r;
#endif
}
""",
    "usual_inverse",
)
_piece(
    """
__device__ __forceinline__ float usual_quotient(float a, float b, bool& rare) {
#if __USE_FAST_MATH__
  return a / b;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = fmaf(r, fmaf(-b, r, 1.0f), r);
  float q = a * r;
  q = fmaf(fmaf(-b, q, a), r, q);
  rare |= !(fabsf(q) > 0x1p-125f) | !(fabsf(a) > 0x1p-101f);
  return q;
#endif
}
""",
    "usual_quotient",
)
_piece(
    """
__device__ __forceinline__ float usual_root(float x, bool& rare) {
#if __USE_FAST_MATH__
  return sqrtf(x);
#else
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  float s = x * y;
  s = fmaf(fmaf(-s, s, x), 0.5f * y, s);
  rare |= !(s > 0x1p-50f);
  return s;
#endif
}
""",
    "usual_root",
)

# The logarithm of float32: that of a number from 2/3 to 4/3, by a polynomial of least relative
# error, and a multiple of the logarithm of 2. The worst is 0.92 units in the last place. `more` is
# added to the exponent of x, as it lies in a float32.
_piece(
    """
__device__ __forceinline__ float log_of_normal(float x, int more, bool& rare) {
  const int whole = (__float_as_int(x) - 0x3f2aaaab) & 0xff800000;
  const float k = (float)(whole + more), f = __int_as_float(__float_as_int(x) - whole) - 1;
  float p = -0x1.07c48cp-3f;
  p = fmaf(p, f, 0x1.1e6ccap-3f);
  p = fmaf(p, f, -0x1.f332b8p-4f);
  p = fmaf(p, f, 0x1.1ed562p-3f);
  p = fmaf(p, f, -0x1.559c66p-3f);
  p = fmaf(p, f, 0x1.99d05p-3f);
  p = fmaf(p, f, -0x1.fffefap-3f);
  p = fmaf(p, f, 0x1.555506p-2f);
  p = fmaf(p, f, -0.5f);
  rare |= fabsf(k) > 125 * 0x1p23f;
  return fmaf(k, 0x1.62e43p-24f, fmaf(p * f, f, f));
}
""",
    "log_of_normal",
)
_piece(
    """
__device__ __forceinline__ float usual_log(float x, bool& rare) {
#if __USE_FAST_MATH__
  return logf(x);
#else
  return log_of_normal(x, 0, rare);
#endif
}
""",
    "usual_log",
)
_piece(
    """
__device__ __forceinline__ float log_of(float x) {
#if __USE_FAST_MATH__
  return logf(x);
#else
  bool rare = false;
  const float y = log_of_normal(x, 0, rare);
  if (!rare) return y;
  if (!(x > 0)) return x == 0 ? -__int_as_float(0x7f800000) : __int_as_float(0x7fc00000);
  if (!(x < __int_as_float(0x7f800000))) return x;
  const bool large = x > 1;
  return log_of_normal(large ? x * 0x1p-64f : x * 0x1p64f, large ? 64 << 23 : -(64 << 23), rare);
#endif
}
""",
    "log_of",
)

# The j-th point of planes of so many rows and columns, where planes are gone through in patches of
# 4 rows and 8 columns, as far as these go: what a warp has at a time. Points that are none stay so.
_piece(
    """
template<class Count>
__device__ __forceinline__ Count patched(Count j, Count rows, Count columns) {
  const Count plane = j / (rows * columns);
  j -= plane * rows * columns;
  const Count band = j / (4 * columns);
  j -= band * 4 * columns;
  const Count high = rows - band * 4 < 4 ? rows - band * 4 : 4, whole = columns / 8;
  Count patch = j / (8 * high);
  patch = patch < whole ? patch : whole;
  j -= patch * 8 * high;
  const Count wide = patch < whole ? 8 : columns - whole * 8, row = j / wide;
  return (plane * rows + band * 4 + row) * columns + patch * 8 + (j - row * wide);
}
""",
    "patched",
)

# The number of the bin that x lies in, `count` where it is in none. Edge k is k times `step` and
# `first`, rounded as NumPy's linspace rounds; `last` belongs to the last bin.
_piece(
    """
template<class Real> __device__ __forceinline__ Real even_edge(double first, double step, int k) {
  return (Real)__dadd_rn(__dmul_rn((double)k, step), first);
}
template<class Real> __device__ __forceinline__ long long even_bin(
    Real x, double first, double step, double last, int count) {
  if (!(x >= (Real)first && x <= (Real)last)) return count;
  int k = (int)((x - (Real)first) * (Real)(1 / step));
  k = k < count - 1 ? k : count - 1;
  while (k > 0 && x < even_edge<Real>(first, step, k)) --k;
  while (k + 1 < count && x >= even_edge<Real>(first, step, k + 1)) ++k;
  return k;
}
""",
    "even_bin",
)
_piece(
    """
template<class Real>
__device__ __forceinline__ long long bin_among(Real x, const Real* edges, int count) {
  if (!(x >= edges[0] && x <= edges[count])) return count;
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (x >= edges[middle]) low = middle; else high = middle;
  }
  return low;
}
""",
    "bin_among",
)
# One more in a bin, in the copy of the counters that this lane has.
_piece(
    """
__device__ __forceinline__ void count_bin(
    unsigned* table, long long k, unsigned bins, unsigned copies) {
  if ((unsigned long long)k < bins)
    atomicAdd(table + ((unsigned)k << copies) + (threadIdx.x & ((1u << copies) - 1)), 1u);
}
""",
    "count_bin",
)
# A weight and the bin that it belongs to. Lanes of a warp that have the same one put together what
# they have, two and two, as in Westphal, "Voting and shuffling to optimize atomic operations"
# (NVIDIA, 2015); all of them take part. What is in no bin is not looked at.
_piece(
    """
struct Weight {
  unsigned bin = ~0u;
  double weight = 0.0;
  __device__ __forceinline__ void hold(Complex<double> x, unsigned bins) {
    if (x.x >= 0.0 && x.x < (double)bins) { bin = (unsigned)x.x; weight = x.y; }
  }
};
__device__ __forceinline__ void weigh_bin(double* table, const Weight& held, unsigned bins) {
  const unsigned lane = threadIdx.x & 31, bin = held.bin;
  const unsigned alike = __match_any_sync(~0u, bin), before = alike & ((1u << lane) - 1);
  unsigned behind = bin < bins ? alike & (~1u << lane) : 0u, rank = __popc(before);
  double sum = held.weight;
  while (__any_sync(~0u, behind != 0)) {
    const int next = __ffs(behind);
    const double other = __shfl_sync(~0u, sum, next ? next - 1 : (int)lane);
    if (next) sum += other;
    behind &= ~__ballot_sync(~0u, rank & 1);
    rank >>= 1;
  }
  if (!before && bin < bins) table[bin] += sum;
  __syncwarp();
}
""",
    "Weight",
    "weigh_bin",
)

# Conversions of floating point to integers, as x86-64 does them: what does not fit becomes the
# least number.
_piece(
    """
__device__ __forceinline__ int to_int(double x) {
  return x > -2147483649.0 && x < 2147483648.0 ? (int)x : (int)0x80000000u;
}
__device__ __forceinline__ long long to_long(double x) {
  return x >= -9223372036854775808.0 && x < 9223372036854775808.0
      ? (long long)x : (long long)0x8000000000000000ull;
}
__device__ __forceinline__ int to_int(float x) {
  return x >= -2147483648.0f && x < 2147483648.0f ? (int)x : (int)0x80000000u;
}
__device__ __forceinline__ long long to_long(float x) {
  return x >= -9223372036854775808.0f && x < 9223372036854775808.0f
      ? (long long)x : (long long)0x8000000000000000ull;
}
template<class T> __device__ __forceinline__ unsigned long long to_unsigned_long(T x) {
  return x < (T)9223372036854775808.0 ? (unsigned long long)to_long(x)
      : (unsigned long long)to_long(x - (T)9223372036854775808.0) ^ 0x8000000000000000ull;
}
""",
    "to_int",
    "to_long",
    "to_unsigned_long",
)

# Integers. Division by zero gives 0, quotients round down, and a shift by too much leaves nothing.
_piece(
    """
template<class T> __device__ T int_floor_divide(T a, T b) {
  if (b == 0) return 0;
  if ((T)-1 < (T)0 && b == (T)-1) return (T)(0ull - (unsigned long long)a);
  const T q = (T)(a / b);
  return (T)(q * b) != a && ((a < 0) != (b < 0)) ? (T)(q - 1) : q;
}
""",
    "int_floor_divide",
)
_piece(
    """
template<class T> __device__ T int_fmod(T a, T b) {
  if (b == 0 || ((T)-1 < (T)0 && b == (T)-1)) return 0;
  return (T)(a % b);
}
template<class T> __device__ T int_remainder(T a, T b) {
  const T r = int_fmod(a, b);
  return r != 0 && ((r < 0) != (b < 0)) ? (T)(r + b) : r;
}
""",
    "int_fmod",
    "int_remainder",
)
_piece(
    """
template<class T> __device__ T int_power(T a, T b) {
  if (b < 0) return a == 1 ? (T)1 : (T)(a == (T)-1 ? ((b & 1) ? -1 : 1) : 0);
  unsigned long long x = (unsigned long long)a, r = 1;
  for (unsigned long long n = (unsigned long long)b; n; n >>= 1) {
    if (n & 1) r *= x;
    x *= x;
  }
  return (T)r;
}
""",
    "int_power",
)
_piece(
    """
template<class T> __device__ T int_left_shift(T a, T b) {
  return (unsigned long long)b < 8 * sizeof(T) ? (T)((unsigned long long)a << b) : (T)0;
}
template<class T> __device__ T int_right_shift(T a, T b) {
  return (unsigned long long)b < 8 * sizeof(T) ? (T)(a >> b) : (T)(a < 0 ? -1 : 0);
}
""",
    "int_left_shift",
    "int_right_shift",
)
_piece(
    """
template<class T> __device__ unsigned long long int_size(T a) {
  const unsigned long long x = a < 0 ? 0ull - (unsigned long long)a : (unsigned long long)a;
  return sizeof(T) < 8 ? x & ((1ull << (8 * sizeof(T) % 64)) - 1) : x;
}
template<class T> __device__ T int_gcd(T a, T b) {
  unsigned long long x = int_size(a), y = int_size(b);
  while (y) { const unsigned long long r = x % y; x = y; y = r; }
  return (T)x;
}
template<class T> __device__ T int_lcm(T a, T b) {
  const unsigned long long g = int_size(int_gcd(a, b));
  return g ? (T)(int_size(a) / g * int_size(b)) : (T)0;
}
""",
    "int_size",
    "int_gcd",
    "int_lcm",
)
_piece(
    """
__device__ __forceinline__ bool mixed_less(long long a, unsigned long long b) {
  return a < 0 || (unsigned long long)a < b;
}
__device__ __forceinline__ bool mixed_less(unsigned long long a, long long b) {
  return b >= 0 && a < (unsigned long long)b;
}
__device__ __forceinline__ bool mixed_equal(long long a, unsigned long long b) {
  return a >= 0 && (unsigned long long)a == b;
}
__device__ __forceinline__ bool mixed_equal(unsigned long long a, long long b) {
  return mixed_equal(b, a);
}
""",
    "mixed_less",
    "mixed_equal",
)

# Real numbers. x - x is 0 for finite x only.
_real("__device__ __forceinline__ bool is_finite~(Real x) { return x - x == 0; }", "is_finite")
_real(
    "__device__ __forceinline__ bool is_infinite~(Real x) { return x == x && !(x - x == 0); }",
    "is_infinite",
)
for _f, _bits in (("", "__double_as_longlong"), ("f", "__float_as_int")):
    _piece(
        f"__device__ __forceinline__ bool negative_bit{_f}({'float' if _f else 'double'} x) "
        f"{{ return {_bits}(x) < 0; }}",
        f"negative_bit{_f}",
    )
_real(
    """
__device__ __forceinline__ Real sign_of~(Real x) {
  return x > 0 ? (Real)1 : x < 0 ? (Real)-1 : x == 0 ? (Real)0 : x;
}
""",
    "sign_of",
)
_real(
    """
__device__ __forceinline__ Real larger~(Real a, Real b) { return a >= b || a != a ? a : b; }
__device__ __forceinline__ Real smaller~(Real a, Real b) { return a <= b || a != a ? a : b; }
""",
    "larger",
    "smaller",
)
_real(
    """
__device__ Real remainder_of~(Real a, Real b) {
  Real mod = fmod~(a, b);
  if (b == 0) return mod;
  if (mod != 0) return (b < 0) != (mod < 0) ? mod + b : mod;
  return copysign~((Real)0, b);
}
__device__ Real quotient_of~(Real a, Real b) {
  if (b == 0) return a / b;
  Real mod = fmod~(a, b), div = (a - mod) / b;
  if (mod != 0 && (b < 0) != (mod < 0)) div -= 1;
  if (div == 0) return copysign~((Real)0, a / b);
  const Real whole = floor~(div);
  return div - whole > (Real)0.5 ? whole + 1 : whole;
}
""",
    "remainder_of",
    "quotient_of",
)
_real(
    """
__device__ __forceinline__ Real step_of~(Real x, Real middle) {
  return x != x ? x : x == 0 ? middle : x < 0 ? (Real)0 : (Real)1;
}
""",
    "step_of",
)
_real(
    """
__device__ Real log_add_exp~(Real a, Real b) {
  if (a == b) return a + (Real)0.693147180559945309417232121458176568;
  const Real d = a - b;
  return d > 0 ? a + log1p~(exp~(-d)) : d <= 0 ? b + log1p~(exp~(d)) : d;
}
""",
    "log_add_exp",
)
_real(
    """
__device__ Real log_add_exp2~(Real a, Real b) {
  if (a == b) return a + 1;
  const Real d = a - b, e = (Real)1.44269504088896340735992468100189214;
  return d > 0 ? a + e * log1p~(exp2~(-d)) : d <= 0 ? b + e * log1p~(exp2~(d)) : d;
}
""",
    "log_add_exp2",
)
_real("__device__ Real expit_of~(Real x) { return 1 / (1 + exp~(-x)); }", "expit_of")
_real("__device__ Real logit_of~(Real x) { return log~(x / (1 - x)); }", "logit_of")
_real(
    "__device__ Real exprel_of~(Real x) { return x == 0 ? (Real)1 : expm1~(x) / x; }", "exprel_of"
)
_real(  # as SciPy has it
    "__device__ Real log_gamma~(Real x) { return is_infinite~(x) ? x : lgamma~(x); }", "log_gamma"
)
_real(
    """
__device__ __forceinline__ Real scaled~(Real x, long long n) {
  return ldexp~(x, (int)(n > 100000 ? 100000 : n < -100000 ? -100000 : n));
}
""",
    "scaled",
)
_real(
    """
__device__ __forceinline__ Real cube_of~(Real x) { return (Real)((double)x * x * x); }
__device__ __forceinline__ Real fourth_of~(Real x) {
  const double y = (double)x * x;
  return (Real)(y * y);
}
""",
    "cube_of",
    "fourth_of",
)

# Complex numbers, after NumPy's loops (division is Smith's) and C's formulas.
_real(
    """
__device__ __forceinline__ Complex<Real> times~(Complex<Real> a, Complex<Real> b) {
  return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};
}
__device__ __forceinline__ Complex<Real> times_real~(Complex<Real> a, Real b) {
  return {a.x * b, a.y * b};
}
""",
    "times",
    "times_real",
)
_real(
    """
__device__ Complex<Real> over~(Complex<Real> a, Complex<Real> b) {
  const Real x = fabs~(b.x), y = fabs~(b.y);
  if (x >= y) {
    if (x == 0 && y == 0) return {a.x / x, a.y / x};
    const Real r = b.y / b.x, s = (Real)1 / (b.x + b.y * r);
    return {(a.x + a.y * r) * s, (a.y - a.x * r) * s};
  }
  const Real r = b.x / b.y, s = (Real)1 / (b.y + b.x * r);
  return {(a.x * r + a.y) * s, (a.y * r - a.x) * s};
}
""",
    "over",
)
_real(
    """
__device__ Complex<Real> one_over~(Complex<Real> a) {
  if (fabs~(a.y) <= fabs~(a.x)) {
    const Real r = a.y / a.x, d = a.x + a.y * r;
    return {1 / d, -r / d};
  }
  const Real r = a.x / a.y, d = a.x * r + a.y;
  return {r / d, -1 / d};
}
""",
    "one_over",
)
_real(
    """
__device__ Complex<Real> complex_exp~(Complex<Real> a) {
  if (a.y == 0) return {exp~(a.x), a.y};
  Real s, c;
  sincos~(a.y, &s, &c);
  if (is_infinite~(a.x) && a.x < 0 && !is_finite~(a.y)) return {0, copysign~((Real)0, a.y)};
  if (is_infinite~(a.x) && a.x > 0 && !is_finite~(a.y)) return {a.x, a.y - a.y};
  const Real big = sizeof(Real) == 4 ? (Real)88 : (Real)709;
  if (a.x > big && is_finite~(a.x)) {  // e to the a.x alone may be too much
    const Real half = exp~(a.x / 2);
    return {half * c * half, half * s * half};
  }
  const Real e = exp~(a.x);
  return {e * c, e * s};
}
""",
    "complex_exp",
)
_real(
    """
__device__ Complex<Real> complex_log~(Complex<Real> a) {
  Real x = fabs~(a.x), y = fabs~(a.y), m = x > y ? x : y, n = x > y ? y : x, r;
  if (m > (Real)0.5 && m < 2 && n < 2) {  // near the unit circle the logarithm is small
    r = log1p~((m - 1) * (m + 1) + n * n) / 2;
  } else {
    r = log~(hypot~(a.x, a.y));
  }
  return {r, atan2~(a.y, a.x)};
}
""",
    "complex_log",
)
_real(
    """
__device__ Complex<Real> complex_sqrt~(Complex<Real> a) {
  if (a.x == 0 && a.y == 0) return {0, a.y};
  if (is_infinite~(a.y)) return {fabs~(a.y), a.y};
  if (a.x != a.x) return {a.x, a.x};
  if (is_infinite~(a.x)) {
    const Real nan = a.y - a.y;
    return negative_bit~(a.x) ? Complex<Real>{fabs~(nan), copysign~(a.x, a.y)}
                              : Complex<Real>{a.x, copysign~(nan, a.y)};
  }
  const Real scale = (fabs~(a.x) > (Real)1e30 || fabs~(a.y) > (Real)1e30) ? (Real)0.25 : (Real)1;
  const Real x = a.x * scale, y = a.y * scale, back = scale == 1 ? (Real)1 : (Real)2;
  if (x >= 0) {
    const Real t = sqrt~((x + hypot~(x, y)) / 2);
    return {t * back, y / (2 * t) * back};
  }
  const Real t = sqrt~((-x + hypot~(x, y)) / 2);
  return {fabs~(y) / (2 * t) * back, copysign~(t, y) * back};
}
""",
    "complex_sqrt",
)
# What is not finite, and the signs of zeros, are those of C's standard, Annex G. Sines and cosines
# of infinity times zero would be NaN there.
_real(
    """
__device__ __forceinline__ Complex<Real> half_exps~(Real x) {  // factors of half of e to the |x|
  const Real h = exp~(fabs~(x) / 2);  // e to the |x| alone may be too much
  return {h, h / 2};
}
""",
    "half_exps",
)
_real(
    """
__device__ Complex<Real> complex_sinh~(Complex<Real> a) {
  if (a.y == 0) return {sinh~(a.x), a.y};
  if (!is_finite~(a.y)) {
    const Real nan = a.y - a.y;
    return {a.x == 0 ? a.x : is_infinite~(a.x) ? fabs~(a.x) : nan, nan};
  }
  Real s, c;
  sincos~(a.y, &s, &c);
  if (fabs~(a.x) > (sizeof(Real) == 4 ? (Real)88 : (Real)709) && is_finite~(a.x)) {
    const Complex<Real> e = half_exps~(a.x);
    return {copysign~((Real)1, a.x) * (e.x * c) * e.y, e.x * s * e.y};
  }
  return {sinh~(a.x) * c, cosh~(a.x) * s};
}
""",
    "complex_sinh",
)
_real(
    """
__device__ Complex<Real> complex_cosh~(Complex<Real> a) {
  if (a.y == 0) return {cosh~(a.x), a.x != a.x ? a.y : copysign~((Real)1, a.x) * a.y};
  if (!is_finite~(a.y)) {
    const Real nan = a.y - a.y;
    if (a.x == 0) return {nan, 0};
    return {is_infinite~(a.x) ? fabs~(a.x) : nan, nan};
  }
  Real s, c;
  sincos~(a.y, &s, &c);
  if (fabs~(a.x) > (sizeof(Real) == 4 ? (Real)88 : (Real)709) && is_finite~(a.x)) {
    const Complex<Real> e = half_exps~(a.x);
    return {e.x * c * e.y, copysign~((Real)1, a.x) * (e.x * s) * e.y};
  }
  return {cosh~(a.x) * c, sinh~(a.x) * s};
}
""",
    "complex_cosh",
)
_real(
    """
__device__ Complex<Real> complex_sin~(Complex<Real> a) {
  const Complex<Real> w = complex_sinh~({-a.y, a.x});
  return {w.y, -w.x};
}
__device__ Complex<Real> complex_cos~(Complex<Real> a) {
  return complex_cosh~({-a.y, a.x});
}
""",
    "complex_sin",
    "complex_cos",
)
_real(
    """
__device__ Complex<Real> complex_tanh~(Complex<Real> a) {  // Kahan's
  if (!is_finite~(a.y)) {
    const Real nan = a.y - a.y;
    if (is_infinite~(a.x)) return {copysign~((Real)1, a.x), copysign~((Real)0, a.y)};
    return {a.x == 0 ? a.x : nan, nan};
  }
  if (a.x != a.x) return {a.x, a.y == 0 ? a.y : a.x};
  const Real most = sizeof(Real) == 4 ? (Real)11 : (Real)22;
  if (fabs~(a.x) >= most && is_finite~(a.y)) {
    const Real e = exp~(-fabs~(a.x));
    return {copysign~((Real)1, a.x), 4 * sin~(a.y) * cos~(a.y) * e * e};
  }
  const Real t = tan~(a.y), beta = 1 + t * t, s = sinh~(a.x), rho = sqrt~(1 + s * s);
  const Real d = 1 + beta * s * s;
  return {beta * rho * s / d, t / d};
}
""",
    "complex_tanh",
)
_real(
    """
__device__ Complex<Real> complex_tan~(Complex<Real> a) {
  const Complex<Real> t = complex_tanh~({-a.y, a.x});
  return {t.y, -t.x};
}
""",
    "complex_tan",
)
# W. Kahan, "Branch cuts for complex elementary functions", 1987; infinities, NaNs and the signs of
# zeros are those of C's standard, Annex G.
_piece(
    "constexpr double half_pi = 0x1.921fb54442d18p+0, ln2 = 0x1.62e42fefa39efp-1;", "half_pi", "ln2"
)
_real(
    """
__device__ __forceinline__ bool is_large~(Complex<Real> a) {  // whose square a 1 does not change
  const Real most = sizeof(Real) == 4 ? (Real)1e7 : (Real)1e15;
  return fabs~(a.x) > most || fabs~(a.y) > most;
}
""",
    "is_large",
)
_real(
    """
__device__ Complex<Real> log_of_large~(Complex<Real> a) {
  return {log~(hypot~(a.x / 4, a.y / 4)) + (Real)0x1.62e42fefa39efp+0, atan2~(a.y, a.x)};
}
""",
    "log_of_large",
)
_real(
    """
__device__ Complex<Real> complex_arccos~(Complex<Real> a) {
  if (a.x != a.x || a.y != a.y) {
    if (is_infinite~(a.x)) return {a.y + a.y, -fabs~(a.x)};
    if (is_infinite~(a.y)) return {a.x + a.x, -a.y};
    if (a.x == 0) return {(Real)half_pi, a.y + a.y};
    return {a.x + a.y, a.x + a.y};
  }
  if (is_large~(a)) {
    const Complex<Real> w = log_of_large~(a);
    const Real y = w.x + (Real)ln2;
    return {fabs~(w.y), negative_bit~(a.y) ? y : -y};
  }
  const Complex<Real> m = complex_sqrt~({1 - a.x, -a.y}), p = complex_sqrt~({1 + a.x, a.y});
  const Real y = asinh~(p.x * m.y - p.y * m.x);
  return {2 * atan2~(m.x, p.x), y == 0 ? copysign~(y, -a.y) : y};
}
""",
    "complex_arccos",
)
_real(
    """
__device__ Complex<Real> complex_arcsinh~(Complex<Real> a) {
  if (a.x != a.x || a.y != a.y) {
    if (is_infinite~(a.x)) return {a.x, a.y + a.y};
    if (is_infinite~(a.y)) return {a.y, a.x + a.x};
    if (a.y == 0) return {a.x + a.x, a.y};
    return {a.x + a.y, a.x + a.y};
  }
  if (is_large~(a)) {
    const Complex<Real> w = log_of_large~({fabs~(a.x), fabs~(a.y)});
    return {copysign~(w.x + (Real)ln2, a.x), copysign~(w.y, a.y)};
  }
  // i times the arcsine of -i a
  const Complex<Real> m = complex_sqrt~({1 - a.y, a.x}), p = complex_sqrt~({1 + a.y, -a.x});
  const Real x = asinh~(m.y * p.x - m.x * p.y);
  return {copysign~(x, a.x), atan2~(a.y, m.x * p.x - m.y * p.y)};
}
""",
    "complex_arcsinh",
)
_real(
    """
__device__ Complex<Real> complex_arccosh~(Complex<Real> a) {
  const Complex<Real> w = complex_arccos~(a);
  if (w.x != w.x && w.y != w.y) return {w.y, w.x};
  if (w.x != w.x) return {fabs~(w.y), w.x};
  if (w.y != w.y) return {w.y, a.x == 0 ? w.x : w.y};
  return {fabs~(w.y), copysign~(w.x, a.y)};
}
""",
    "complex_arccosh",
)
_real(
    """
__device__ Complex<Real> complex_arctanh~(Complex<Real> a) {
  const Real x = fabs~(a.x), y = fabs~(a.y);
  if (a.y == 0 && x <= 1) return {atanh~(a.x), a.y};
  if (a.x == 0) return {a.x, atan~(a.y)};
  if (a.x != a.x || a.y != a.y) {
    if (is_infinite~(a.x)) return {copysign~((Real)0, a.x), a.y + a.y};
    if (is_infinite~(a.y)) return {copysign~((Real)0, a.x), copysign~((Real)half_pi, a.y)};
    return {a.x + a.y, a.x + a.y};
  }
  if (is_large~(a)) {  // the real part of 1 / a
    if (is_infinite~(x) || is_infinite~(y))
      return {copysign~((Real)0, a.x), copysign~((Real)half_pi, a.y)};
    const Real m = x > y ? x : y, u = x / m, v = y / m;
    return {copysign~(u / (u * u + v * v) / m, a.x), copysign~((Real)half_pi, a.y)};
  }
  Real s, t;
  if (x == 1) {
    s = y < 1 ? log~(sqrt~(sqrt~(4 + y * y)) / sqrt~(y)) : log1p~(4 / y / y) / 4;
    t = ((Real)half_pi + atan~(y / 2)) / 2;
  } else {
    s = log1p~(4 * x / ((1 - x) * (1 - x) + y * y)) / 4;
    t = atan2~(2 * y, (1 - x) * (1 + x) - y * y) / 2;
  }
  return {copysign~(s, a.x), copysign~(t, a.y)};
}
""",
    "complex_arctanh",
)
for _name, _hyperbolic in (("arcsin", "arcsinh"), ("arctan", "arctanh")):
    _real(
        f"""
__device__ Complex<Real> complex_{_name}~(Complex<Real> a) {{  // with the two parts exchanged
  const Complex<Real> w = complex_{_hyperbolic}~({{a.y, a.x}});
  return {{w.y, w.x}};
}}
""",
        f"complex_{_name}",
    )
_real(
    """
__device__ Complex<Real> complex_expm1~(Complex<Real> a) {
  const Real s = sin~(a.y / 2);
  return {expm1~(a.x) * cos~(a.y) - 2 * s * s, exp~(a.x) * sin~(a.y)};
}
__device__ Complex<Real> complex_log1p~(Complex<Real> a) {
  return {log~(hypot~(a.x + 1, a.y)), atan2~(a.y, a.x + 1)};
}
""",
    "complex_expm1",
    "complex_log1p",
)
# C's product: what has an infinite part is infinite, though the other be NaN (Annex G.5.1).
_real(
    """
__device__ Complex<Real> times_in_c~(Complex<Real> a, Complex<Real> b) {
  const Complex<Real> r = times~(a, b);
  if (r.x == r.x || r.y == r.y) return r;
  const Real zero = 0;
  bool again = false;
  if (is_infinite~(a.x) || is_infinite~(a.y)) {
    a = {copysign~((Real)is_infinite~(a.x), a.x), copysign~((Real)is_infinite~(a.y), a.y)};
    if (b.x != b.x) b.x = copysign~(zero, b.x);
    if (b.y != b.y) b.y = copysign~(zero, b.y);
    again = true;
  }
  if (is_infinite~(b.x) || is_infinite~(b.y)) {
    b = {copysign~((Real)is_infinite~(b.x), b.x), copysign~((Real)is_infinite~(b.y), b.y)};
    if (a.x != a.x) a.x = copysign~(zero, a.x);
    if (a.y != a.y) a.y = copysign~(zero, a.y);
    again = true;
  }
  if (!again && (is_infinite~(a.x * b.x) || is_infinite~(a.y * b.y) || is_infinite~(a.x * b.y) ||
                 is_infinite~(a.y * b.x))) {
    if (a.x != a.x) a.x = copysign~(zero, a.x);
    if (a.y != a.y) a.y = copysign~(zero, a.y);
    if (b.x != b.x) b.x = copysign~(zero, b.x);
    if (b.y != b.y) b.y = copysign~(zero, b.y);
    again = true;
  }
  if (!again) return r;
  const Real endless = -log~(zero);
  return {endless * (a.x * b.x - a.y * b.y), endless * (a.x * b.y + a.y * b.x)};
}
""",
    "times_in_c",
)
_real(
    """
__device__ Complex<Real> complex_power~(Complex<Real> a, Complex<Real> b) {
  if (b.x == 0 && b.y == 0) return {1, 0};
  if (a.x == 0 && a.y == 0) {
    if (b.x > 0) return {0, 0};
    const Real nan = (a.x - a.x) / (a.x - a.x);
    return {nan, nan};
  }
  if (b.y == 0 && b.x == rint~(b.x) && fabs~(b.x) < 100) {
    const int n = (int)fabs~(b.x);
    Complex<Real> r = {1, 0}, p = a;
    if (n == 1) r = a;
    else if (n == 2) r = times~(a, a);
    else if (n == 3) r = times~(a, times~(a, a));
    else {
      for (int mask = 1;;) {
        if (n & mask) r = times~(r, p);
        mask <<= 1;
        if (n < mask) break;
        p = times~(p, p);
      }
    }
    return b.x < 0 ? over~({1, 0}, r) : r;
  }
  return complex_exp~(times_in_c~(b, complex_log~(a)));
}
""",
    "complex_power",
)
_real(
    """
__device__ __forceinline__ bool complex_less~(Complex<Real> a, Complex<Real> b) {
  return (a.x < b.x && a.y == a.y && b.y == b.y) || (a.x == b.x && a.y < b.y);
}
__device__ __forceinline__ bool complex_less_equal~(Complex<Real> a, Complex<Real> b) {
  return (a.x < b.x && a.y == a.y && b.y == b.y) || (a.x == b.x && a.y <= b.y);
}
__device__ __forceinline__ bool complex_isnan~(Complex<Real> a) {
  return a.x != a.x || a.y != a.y;
}
""",
    "complex_less",
    "complex_less_equal",
    "complex_isnan",
)
_real(
    """
__device__ Complex<Real> complex_sign~(Complex<Real> a) {
  const Real m = hypot~(a.x, a.y);
  if (m == 0) return {0, 0};
  if (is_infinite~(m)) {
    if (is_infinite~(a.x) && is_infinite~(a.y)) return {a.x - a.x, a.x - a.x};
    return {is_infinite~(a.x) ? copysign~((Real)1, a.x) : (Real)0,
            is_infinite~(a.y) ? copysign~((Real)1, a.y) : (Real)0};
  }
  return {a.x / m, a.y / m};
}
""",
    "complex_sign",
)

# Random numbers: Philox 4x32-10 (Salmon and others 2011). `block` numbers pairs of elements.
_piece(
    """
__device__ __forceinline__ void philox(unsigned long long key, long long block,
                                       unsigned long long& even, unsigned long long& odd) {
  unsigned k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
  unsigned a = (unsigned)block, b = (unsigned)((unsigned long long)block >> 32), c = 0, d = 0;
  #pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long p = 0xD2511F53ull * a, q = 0xCD9E8D57ull * c;
    a = (unsigned)(q >> 32) ^ b ^ k0;
    b = (unsigned)q;
    c = (unsigned)(p >> 32) ^ d ^ k1;
    d = (unsigned)p;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  even = a | (unsigned long long)b << 32;
  odd = c | (unsigned long long)d << 32;
}
""",
    "philox",
)
# The 53 upper bits as a whole number: conversions are slow, these two subtractions are exact.
_piece(
    """
__device__ __forceinline__ double upper53(unsigned long long u) {
  u >>= 11;
  const double high = __hiloint2double(0x45300000, (int)(u >> 32)) - 0x1.00000001p84;
  return high + __hiloint2double(0x43300000, (int)(unsigned)u);
}
""",
    "upper53",
)
_piece(
    """
__device__ __forceinline__ unsigned long long u8_bits(unsigned long long u) { return u; }
__device__ __forceinline__ double f8_uniform(unsigned long long u) { return upper53(u) * 0x1p-53; }
__device__ __forceinline__ float f4_uniform(unsigned long long u) {
  return (float)(unsigned)(u >> 40) * 0x1p-24f;
}
""",
    "u8_bits",
    "f8_uniform",
    "f4_uniform",
)
# Box and Muller's radius and angle. The logarithm and the root know that their arguments are
# ordinary numbers; the angle is in half turns, and `quarter` turns it back by a quarter.
_piece(
    """
__device__ __forceinline__ float f4_radius(unsigned long long u) {
  bool rare = false;  // it is not
  const float log = usual_log((float)((unsigned)(u >> 40) + 1u) * 0x1p-24f, rare);
  return usual_root(fmaf(-2.0f, log, 1e-30f), rare);  // never of 0
}
__device__ __forceinline__ float f4_turns(unsigned long long u) {
  return (float)(unsigned)(u >> 40) * 0x1p-23f;
}
__device__ __forceinline__ float f4_normal(unsigned long long even, unsigned long long odd,
                                           bool second) {
  const float t = f4_turns(odd);
  return f4_radius(even) * (second ? sinpif(t) : cospif(t));
}
__device__ __forceinline__ void f4_normals(unsigned long long even, unsigned long long odd,
                                           float& x, float& y) {
  const float r = f4_radius(even);
  float s, c;
  sincospif(f4_turns(odd), &s, &c);
  x = r * c;
  y = r * s;
}
""",
    "f4_normal",
    "f4_normals",
)
_piece(
    """
// sqrt(-2 log((n + 1) / 2**53)) for the upper 53 bits n: the logarithm of fdlibm's e_log.c, without
// the cases that do not occur, and a root by Newton's method. A few units in the last place.
__device__ __forceinline__ double f8_radius(unsigned long long u) {
  const double x = upper53(u) + 1.0;
  int high = __double2hiint(x);
  const int more = (high & 0xfffff) > 0x6a09d;  // above the root of two: half of it
  const int k = (high >> 20) - 1023 - 53 + more;
  high = (high & 0xfffff) | (more ? 0x3fe00000 : 0x3ff00000);
  const double f = __hiloint2double(high, __double2loint(x)) - 1.0, d = 2.0 + f;
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(d));
  r = fma(fma(-d, r, 1.0), r, r);
  r = fma(fma(-d, r, 1.0), r, r);
  const double s = f * r, z = s * s, half = 0.5 * f * f;
  double p = 1.479819860511658591e-01;
  p = fma(p, z, 1.531383769920937332e-01);
  p = fma(p, z, 1.818357216161805012e-01);
  p = fma(p, z, 2.222219843214978396e-01);
  p = fma(p, z, 2.857142874366239149e-01);
  p = fma(p, z, 3.999999999940941908e-01);
  p = fma(p, z, 6.666666666666735130e-01);
  p = fma(p, z, half);
  const double e = __hiloint2double(0x43300000, k ^ 0x80000000) - 0x1.00000800p52;
  const double low = fma(s, p, e * 1.90821492927058770002e-10);
  const double log = fma(e, 6.93147180369123816490e-01, f - (half - low));
  const double t = fma(-2.0, log, 1e-300);  // never 0
  double y;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(t));
  double g = t * y, h = 0.5 * y;
  const double off = fma(-g, h, 0.5);
  g = fma(g, off, g);
  h = fma(h, off, h);
  return fma(fma(-g, g, t), h, g);
}
// Sine and cosine of the upper 53 bits as parts of a turn, by fdlibm's k_sin.c and k_cos.c.
__device__ __forceinline__ void f8_turned(unsigned long long u, double& sine, double& cosine) {
  const long long n = (long long)(u >> 11);
  const int quarter = (int)((n + (1ll << 50)) >> 51);  // the nearest
  const long long rest = n - ((long long)quarter << 51);
  const double x = __longlong_as_double(0x4338000000000000ll + rest) - 0x1.8p52;
  const double y = x * 0x1.921fb54442d18p-51, z = y * y;
  double a = 1.58969099521155010221e-10, b = -1.13596475577881948265e-11;
  a = fma(a, z, -2.50507602534068634195e-08);
  b = fma(b, z, 2.08757232129817482790e-09);
  a = fma(a, z, 2.75573137070700676789e-06);
  b = fma(b, z, -2.75573143513906633035e-07);
  a = fma(a, z, -1.98412698298579493134e-04);
  b = fma(b, z, 2.48015872894767294178e-05);
  a = fma(a, z, 8.33333333332248946124e-03);
  b = fma(b, z, -1.38888888888741095749e-03);
  a = fma(a, z, -1.66666666666666324348e-01);
  b = fma(b, z, 4.16666666666666019037e-02);
  a = fma(y * z, a, y);
  b = fma(z, fma(z, b, -0.5), 1.0);
  const double s = quarter & 1 ? b : a, c = quarter & 1 ? a : b;
  const unsigned flip_s = (unsigned)(quarter & 2) << 30;
  const unsigned flip_c = (unsigned)((quarter + 1) & 2) << 30;
  sine = __hiloint2double(__double2hiint(s) ^ flip_s, __double2loint(s));
  cosine = __hiloint2double(__double2hiint(c) ^ flip_c, __double2loint(c));
}
__device__ __forceinline__ double f8_normal(unsigned long long even, unsigned long long odd,
                                            bool second) {
  double s, c;
  f8_turned(odd, s, c);
  return f8_radius(even) * (second ? s : c);
}
__device__ __forceinline__ void f8_normals(unsigned long long even, unsigned long long odd,
                                           double& x, double& y) {
  const double r = f8_radius(even);
  double s, c;
  f8_turned(odd, s, c);
  x = r * c;
  y = r * s;
}
""",
    "f8_normal",
    "f8_normals",
)

# Where three values of int are compared, the compiler (of CUDA 12.8 to 13.3, for compute capability
# 9.0 and 10.0) loses the sign of a negated one (pytorch/pytorch#190973): min(min(-x, y), z) becomes
# min(x, y, z). Of what is written in this way it does not know that it is one. So are those of 64
# bits, of which it may find that 32 do.
_piece(
    """
__device__ __forceinline__ int negated(int x) {
  int y;
  asm("{ .reg .b32 t; not.b32 t, %1; add.s32 %0, t, 1; }" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ long long negated(long long x) {
  long long y;
  asm("{ .reg .b64 t; not.b64 t, %1; add.s64 %0, t, 1; }" : "=l"(y) : "l"(x));
  return y;
}
""",
    "negated",
)
# What is being reduced, one structure for each: `clear`, `take` some values of one thread, `merge`
# with what comes behind. Lanes of a warp, and then warps, put their parts together in an order that
# is always the same.
_piece(
    """
template<class A> __device__ __forceinline__ A from_lane(const A& a, int down) {
  union { A a; unsigned words[sizeof(A) / 4]; } u, v;
  u.a = a;
  #pragma unroll
  for (int i = 0; i < sizeof(A) / 4; ++i) {
    v.words[i] = __shfl_down_sync(0xffffffffu, u.words[i], down);
  }
  return v.a;
}
template<class A> __device__ __forceinline__ void gather_lanes(A& a, int lanes) {
  for (int down = lanes >> 1; down; down >>= 1) {
    const A other = from_lane(a, down);
    a.merge(other);
  }
}
template<class A> __device__ __forceinline__ void gather_block(A& a, void* shared) {
  A* parts = (A*)shared;
  gather_lanes(a, 32);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = a;
  __syncthreads();
  a = parts[threadIdx.x & 7];
  gather_lanes(a, 8);
}
template<class A> __device__ __forceinline__ void gather_lines(
    A& a, int lines, int width, void* shared) {
  A* parts = (A*)shared;
  const int x = threadIdx.x % width, y = threadIdx.x / width;
  for (int half = lines >> 1; half; half >>= 1) {
    __syncthreads();
    if (y >= half && y < 2 * half) parts[(y - half) * width + x] = a;
    __syncthreads();
    if (y < half) {
      const A other = parts[y * width + x];
      a.merge(other);
    }
  }
}
template<class A> __device__ __forceinline__ A from_memory(const A* p) {
  union { A a; unsigned long long words[sizeof(A) / 8]; } u;
  #pragma unroll
  for (int i = 0; i < sizeof(A) / 8; ++i) u.words[i] = __ldcg((const unsigned long long*)p + i);
  return u.a;
}
""",
    "from_lane",
    "gather_lanes",
    "gather_block",
    "gather_lines",
    "from_memory",
)
# The same as functions that are called: code that is there many times takes long to compile.
_piece(
    """
template<class A> __device__ __noinline__ A gathered_lanes(A a, int lanes) {
  gather_lanes(a, lanes);
  return a;
}
template<class A> __device__ __noinline__ A gathered_block(A a, void* shared) {
  gather_block(a, shared);
  return a;
}
template<class A> __device__ __noinline__ A gathered_lines(
    A a, int lines, int width, void* shared) {
  gather_lines(a, lines, width, shared);
  return a;
}
""",
    "gathered_lanes",
    "gathered_block",
    "gathered_lines",
)
# Scans: what comes together along the lanes of a warp, as far as before each of them.
_piece(
    """
template<class A> __device__ __forceinline__ A from_lane_before(const A& a, int up, int lanes) {
  union { A a; unsigned words[sizeof(A) / 4]; } u, v;
  u.a = a;
  #pragma unroll
  for (int i = 0; i < sizeof(A) / 4; ++i) {
    v.words[i] = __shfl_up_sync(0xffffffffu, u.words[i], up, lanes);
  }
  return v.a;
}
template<class A> __device__ __forceinline__ A from_last_lane(const A& a, int lanes) {
  union { A a; unsigned words[sizeof(A) / 4]; } u, v;
  u.a = a;
  #pragma unroll
  for (int i = 0; i < sizeof(A) / 4; ++i) {
    v.words[i] = __shfl_sync(0xffffffffu, u.words[i], lanes - 1, lanes);
  }
  return v.a;
}
template<class A> __device__ __forceinline__ A before_lane(
    const A& own, A& carry, int lanes, int lane) {
  A all = own;
  for (int up = 1; up < lanes; up <<= 1) {
    A before = from_lane_before(all, up, lanes);
    before.merge(all);
    if (lane >= up) all = before;
  }
  const A before = from_lane_before(all, 1, lanes), last = from_last_lane(all, lanes);
  A out = carry;
  if (lane > 0) out.merge(before);
  carry.merge(last);
  return out;
}
template<class A, class T> __device__ __forceinline__ void take_one(A& a, const T& x) {
  const T values[1] = {x};
  a.take(values);
}
template<class A, class T, int N> __device__ __forceinline__ void take_all(A& a, const T (&x)[N]) {
  #pragma unroll
  for (int i = 0; i < N; ++i) take_one(a, x[i]);
}
""",
    "from_lane_before",
    "from_last_lane",
    "before_lane",
    "take_one",
    "take_all",
)
_piece(
    """
template<class T, int N> __device__ __forceinline__ T added(const T (&x)[N]) {
  T y[N];
  #pragma unroll
  for (int i = 0; i < N; ++i) y[i] = x[i];
  #pragma unroll
  for (int n = N / 2; n; n /= 2) {
    #pragma unroll
    for (int i = 0; i < n; ++i) y[i] = y[i] + y[i + n];
  }
  return y[0];
}
""",
    "added",
)
_piece(
    """
// Sums of deviations from the first value, and of their squares. That first value k is one of the
// n, so n * (k - mean)^2 <= n * m2: what cancels in m2() costs n roundings of m2 at most.
struct alignas(8) Moment {
  unsigned long long n;
  double k, sum, squares;
  __device__ __forceinline__ void clear() { n = 0; k = sum = squares = 0; }
  template<class T, int N> __device__ __forceinline__ void take(
      const T (&x)[N], bool may_be_first = true) {
    if (may_be_first && n == 0) {
      const double first = (double)x[0];
      k = first - first == 0 ? first : 0;
    }
    #pragma unroll
    for (int i = 0; i < N; ++i) {
      const double d = (double)x[i] - k;
      sum += d;
      squares = fma(d, d, squares);
    }
    n += N;
  }
  __device__ __forceinline__ double mean() const { return k + sum / (double)n; }
  __device__ __forceinline__ double m2() const {
    const double m = n == 0 ? 0 : squares - sum * (sum / (double)n);
    return m < 0 ? 0 : m;
  }
  __device__ __forceinline__ void move(double to) {  // deviations from another value
    const double apart = k - to, count = (double)n;
    squares = fma(apart, fma(count, apart, 2 * sum), squares);
    sum = fma(count, apart, sum);
    k = to;
  }
  __device__ __forceinline__ void begin(const Moment& b) {  // with the same k
    clear();
    k = b.k;
  }
  __device__ __forceinline__ void of(unsigned long long values) { n = values; }
  __device__ __forceinline__ void lead(const Moment& b) { if (b.sum - b.sum == 0) k = b.k; }
  __device__ __forceinline__ void follow(const Moment& b) { move(b.k); }
  __device__ __forceinline__ void join(Moment b, bool may_be_first) {
    if (may_be_first && n == 0) k = b.k;
    b.move(k);
    add(b);
  }
  __device__ __forceinline__ void add(const Moment& b) {  // of the same k
    n += b.n;
    sum += b.sum;
    squares += b.squares;
  }
  __device__ __forceinline__ void settle() {  // deviations from the mean, if that is finite
    const double to = n == 0 ? 0 : mean();
    if (n == 0 || to - to != 0) return;
    squares = m2();
    k = to;
    sum = 0;
  }
  // Chan, Golub and LeVeque 1979, of two that are settled: few divisions, which need registers.
  __device__ __forceinline__ void merge(const Moment& b) {
    if (b.n == 0) return;
    if (n == 0) { *this = b; return; }
    const double apart = b.k - k, share = (double)b.n / (double)(n + b.n);
    squares += b.squares + apart * apart * ((double)n * share);
    sum += b.sum;
    k = apart - apart == 0 ? k + apart * share : k * (1 - share) + b.k * share;
    n += b.n;
  }
};
// Steps of windows go over to one k, that of the first whose values are finite.
template<class M, int N> __device__ __forceinline__ void to_one_base(M (&steps)[N][1]) {
  M base;
  base.clear();
  #pragma unroll
  for (int u = N - 1; u >= 0; --u) base.lead(steps[u][0]);
  #pragma unroll
  for (int u = 0; u < N; ++u) steps[u][0].follow(base);
}
// Threads that belong together go over to the first one's k, and then only add.
template<> __device__ __forceinline__ void gather_lanes<Moment>(Moment& a, int lanes) {
  a.move(__shfl_sync(0xffffffffu, a.k, threadIdx.x & 31 & -lanes));
  for (int down = lanes >> 1; down; down >>= 1) {
    const Moment other = from_lane(a, down);
    a.add(other);
  }
}
template<> __device__ __forceinline__ void gather_lines<Moment>(
    Moment& a, int lines, int width, void* shared) {
  if (lines == 1) return;  // there is room for half a block's threads
  Moment* parts = (Moment*)shared;
  const int x = threadIdx.x % width, y = threadIdx.x / width;
  __syncthreads();
  if (y == 0) parts[x] = a;
  __syncthreads();
  a.move(parts[x].k);
  for (int half = lines >> 1; half; half >>= 1) {
    __syncthreads();
    if (y >= half && y < 2 * half) parts[(y - half) * width + x] = a;
    __syncthreads();
    if (y < half) {
      const Moment other = parts[y * width + x];
      a.add(other);
    }
  }
}
""",
    "Moment",
)
_piece(
    """
struct alignas(8) ComplexMoment {
  Moment real, imag;
  __device__ __forceinline__ void clear() { real.clear(); imag.clear(); }
  template<class T, int N> __device__ __forceinline__ void take(
      const Complex<T> (&x)[N], bool may_be_first = true) {
    T a[N], b[N];
    #pragma unroll
    for (int i = 0; i < N; ++i) { a[i] = x[i].x; b[i] = x[i].y; }
    real.take(a, may_be_first);
    imag.take(b, may_be_first);
  }
  __device__ __forceinline__ void begin(const ComplexMoment& b) {
    real.begin(b.real);
    imag.begin(b.imag);
  }
  __device__ __forceinline__ void add(const ComplexMoment& b) {
    real.add(b.real);
    imag.add(b.imag);
  }
  __device__ __forceinline__ void of(unsigned long long values) { real.n = imag.n = values; }
  __device__ __forceinline__ void lead(const ComplexMoment& b) {
    real.lead(b.real);
    imag.lead(b.imag);
  }
  __device__ __forceinline__ void follow(const ComplexMoment& b) {
    real.follow(b.real);
    imag.follow(b.imag);
  }
  __device__ __forceinline__ void join(const ComplexMoment& b, bool may_be_first) {
    real.join(b.real, may_be_first);
    imag.join(b.imag, may_be_first);
  }
  __device__ __forceinline__ void settle() { real.settle(); imag.settle(); }
  __device__ __forceinline__ void merge(ComplexMoment b) {
    b.settle();
    settle();
    real.merge(b.real);
    imag.merge(b.imag);
  }
  // NumPy divides by a complex number: what is not finite in one part shows in the other
  __device__ __forceinline__ Complex<double> mean() const {
    const double a = real.mean(), b = imag.mean();
    return {a + b * 0, b - a * 0};
  }
};
""",
    "ComplexMoment",
)

_WORDS = re.compile(r"[A-Za-z_]\w*")


def pieces(text: str) -> str:
    """The pieces that a text calls, and those that these call, each behind what it needs."""
    found: dict[str, None] = {}
    entered: set[str] = set()

    def visit(words: str) -> None:
        for name in _WORDS.findall(words):
            piece = PIECES.get(name)
            if piece is not None and piece not in entered:
                entered.add(piece)
                visit(piece)
                found[piece] = None

    visit(text)
    return "\n".join(found)


# ---- functions that are called

#: Instructions that a kernel has of long functions, about, from which on they are called: where
#: each is there as often as it is used, the kernel takes long to compile (10,000: a second).
MOST_INSTRUCTIONS = 3000
#: Long functions: how many numbers they take, and their instructions for float and for double, as
#: compiled for compute capability 9.0; 0 where they are short.
LONG = {
    "acos": (1, 0, 134), "acosh": (1, 82, 255), "asin": (1, 0, 71), "asinh": (1, 80, 275),
    "atan2": (2, 66, 140), "atanh": (1, 0, 177), "cos": (1, 92, 68), "cosh": (1, 0, 65),
    "cyl_bessel_i0": (1, 63, 193), "cyl_bessel_i1": (1, 65, 196), "erf": (1, 0, 82),
    "erfc": (1, 0, 171), "erfcinv": (1, 0, 445), "erfinv": (1, 0, 287), "expit_of": (1, 0, 85),
    "expm1": (1, 0, 78), "fmod": (2, 76, 258), "j0": (1, 154, 374), "j1": (1, 156, 373),
    "log": (1, 0, 87), "log10": (1, 0, 90), "log1p": (1, 0, 149), "log2": (1, 0, 90),
    "log_add_exp": (2, 98, 426), "log_add_exp2": (2, 90, 422), "log_gamma": (1, 227, 182),
    "logit_of": (1, 0, 114), "normcdf": (1, 62, 187), "normcdfinv": (1, 0, 453),
    "pow": (2, 93, 101), "quotient_of": (2, 136, 356), "remainder_of": (2, 86, 272),
    "sin": (1, 90, 68), "sinh": (1, 0, 133), "tan": (1, 90, 107), "tanh": (1, 0, 103),
    "tgamma": (1, 170, 616), "y0": (1, 368, 907), "y1": (1, 396, 941),
}  # fmt: skip
#: The same of complex numbers.
LONG_COMPLEX = {
    "complex_arccos": (1, 603, 1141), "complex_arccosh": (1, 614, 1161),
    "complex_arcsin": (1, 600, 1144), "complex_arcsinh": (1, 600, 1144),
    "complex_arctan": (1, 425, 1035), "complex_arctanh": (1, 425, 1035),
    "complex_cos": (1, 245, 486), "complex_cosh": (1, 238, 480), "complex_exp": (1, 166, 326),
    "complex_expm1": (1, 314, 326), "complex_log": (1, 191, 442), "complex_log1p": (1, 145, 289),
    "complex_power": (2, 640, 1040), "complex_sign": (1, 109, 155), "complex_sin": (1, 253, 520),
    "complex_sinh": (1, 245, 515), "complex_sqrt": (1, 151, 205), "complex_tan": (1, 392, 565),
    "complex_tanh": (1, 390, 560), "one_over": (1, 82, 113), "over": (2, 126, 168),
}  # fmt: skip
#: Name -> instructions, type, and how many numbers it takes.
_LENGTHS = {
    name + suffix: (length, wrap.format(real), takes)
    for table, wrap in ((LONG, "{}"), (LONG_COMPLEX, "Complex<{}>"))
    for name, (takes, *lengths) in table.items()
    for suffix, real, length in zip(("f", ""), ("float", "double"), lengths, strict=True)
    if length
}
_CALLS = re.compile(r"\b(\w+)\(")


def length_of(text: str) -> int:
    """The instructions of the long functions that a text has.

    >>> length_of("const float v2 = sinf(v1);"), length_of("const float v2 = v1 * v1;")
    (90, 0)
    """
    return sum(_LENGTHS.get(name, (0, "", 0))[0] for name in _CALLS.findall(text))


def called(text: str, copies: int) -> tuple[str, str]:
    """A text that is compiled `copies` times over, with functions in it that are called where they
    would be too long in their places, the longest first; and these functions. Where the compiler
    is told to be fast they are short, and stay.

    >>> called("double y = sin(x);", 4)
    ('double y = sin(x);', '')
    >>> text, functions = called("double y = tgamma(x) + sin(x);", 8)
    >>> text
    'double y = called_tgamma(x) + sin(x);'
    >>> print(functions.splitlines()[-1])
    __device__ CALLED double called_tgamma(double x) { return tgamma(x); }
    """
    found: dict[str, int] = {}
    for name in _CALLS.findall(text):
        if name in _LENGTHS:
            found[name] = found.get(name, 0) + copies * _LENGTHS[name][0]
    total, lines = sum(found.values()), []
    for name, length in sorted(found.items(), key=lambda x: (-x[1], x[0])):
        if total <= MOST_INSTRUCTIONS:
            break
        total -= length
        _, kind, takes = _LENGTHS[name]
        names = ["x", "y"][:takes]
        given = ", ".join(f"{kind} {n}" for n in names)
        body = f"return {name}({', '.join(names)});"
        lines.append(f"__device__ CALLED {kind} called_{name}({given}) {{ {body} }}")
        text = re.sub(rf"\b{name}\(", f"called_{name}(", text)
    if not lines:
        return text, ""
    how = ("#if __USE_FAST_MATH__", "#define CALLED __forceinline__", "#else",
           "#define CALLED __noinline__", "#endif")  # fmt: skip
    return text, "\n".join([*how, *lines])


# ---- operations

#: NumPy's and SciPy's names -> functions of real numbers in C, to which floats add an f.
FUNCTIONS = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arcsinh": "asinh", "arccosh": "acosh",
    "arctanh": "atanh", "arctan2": "atan2", "absolute": "fabs", "power": "pow",
    "float_power": "pow", "gamma": "tgamma", "gammaln": "log_gamma", "ndtr": "normcdf",
    "ndtri": "normcdfinv", "i0": "cyl_bessel_i0", "i1": "cyl_bessel_i1", "sign": "sign_of",
    "remainder": "remainder_of", "floor_divide": "quotient_of", "maximum": "larger",
    "minimum": "smaller", "heaviside": "step_of", "logaddexp": "log_add_exp",
    "logaddexp2": "log_add_exp2", "expit": "expit_of", "logit": "logit_of", "exprel": "exprel_of",
    "cube": "cube_of", "fourth": "fourth_of",
} | {
    name: name
    for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh",
        "cosh", "tanh", "sqrt", "cbrt", "floor", "ceil", "trunc", "rint", "fabs", "hypot", "fmod",
        "copysign", "nextafter", "fmax", "fmin", "erf", "erfc", "erfinv", "erfcinv", "j0", "j1",
        "y0", "y1",
    )
}  # fmt: skip
_COMPARISONS = {
    "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">",
    "greater_equal": ">=",
}  # fmt: skip
_MIXED = {
    "equal": "mixed_equal({0}, {1})", "not_equal": "!mixed_equal({0}, {1})",
    "less": "mixed_less({0}, {1})", "less_equal": "!mixed_less({1}, {0})",
    "greater": "mixed_less({1}, {0})", "greater_equal": "!mixed_less({0}, {1})",
}  # fmt: skip
_LOGICAL = {
    "logical_and": "{0} && {1}", "logical_or": "{0} || {1}", "logical_xor": "{0} != {1}",
    "logical_not": "!{0}",
}  # fmt: skip
_ALWAYS = {"isnan": "false", "isinf": "false", "isfinite": "true"}
_BOOLS = _LOGICAL | {
    "add": "{0} || {1}", "multiply": "{0} && {1}", "maximum": "{0} || {1}",
    "minimum": "{0} && {1}", "fmax": "{0} || {1}", "fmin": "{0} && {1}",
    "bitwise_or": "{0} || {1}", "bitwise_and": "{0} && {1}", "bitwise_xor": "{0} != {1}",
    "invert": "!{0}", "absolute": "{0}", "positive": "{0}", "conjugate": "{0}",
    "floor": "{0}", "ceil": "{0}", "trunc": "{0}",
}  # fmt: skip
_UNITS = {
    "deg2rad": ("(0.017453292519943295)", "(3.141592654f / 180.0f)"),
    "rad2deg": ("(57.29577951308232)", "(180.0f / 3.141592654f)"),
}  # fmt: skip
_REALS = {
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "divide": "{0} / {1}",
    "negative": "-{0}", "positive": "{0}", "conjugate": "{0}", "square": "{0} * {0}",
    "reciprocal": "1 / {0}", "isnan": "{0} != {0}",
}  # fmt: skip
#: What needs no rounding to float16, which its arguments are already.
_EXACT = frozenset({
    "negative", "positive", "conjugate", "absolute", "fabs", "sign", "floor", "ceil", "trunc",
    "rint", "maximum", "minimum", "fmax", "fmin", "copysign", "heaviside", "fmod",
})  # fmt: skip
_USUAL = {
    "divide": "usual_quotient", "reciprocal": "usual_inverse", "sqrt": "usual_root",
    "log": "usual_log",
}  # fmt: skip
_INTEGERS = {
    "add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}", "negative": "0u - {0}",
    "square": "{0} * {0}",
}  # fmt: skip
_COMPLEX = {
    "add": "{{{0}.x + {1}.x, {0}.y + {1}.y}}", "subtract": "{{{0}.x - {1}.x, {0}.y - {1}.y}}",
    "multiply": "times~({0}, {1})", "divide": "over~({0}, {1})", "negative": "{{-{0}.x, -{0}.y}}",
    "positive": "{0}", "conjugate": "{{{0}.x, -{0}.y}}", "square": "times~({0}, {0})",
    "reciprocal": "one_over~({0})", "absolute": "hypot~({0}.x, {0}.y)",
    "equal": "{0}.x == {1}.x && {0}.y == {1}.y", "not_equal": "{0}.x != {1}.x || {0}.y != {1}.y",
    "isnan": "{0}.x != {0}.x || {0}.y != {0}.y",
    "isfinite": "is_finite~({0}.x) && is_finite~({0}.y)",
    "isinf": "is_infinite~({0}.x) || is_infinite~({0}.y)", "sign": "complex_sign~({0})",
    "rint": "{{rint~({0}.x), rint~({0}.y)}}",
    "exp2": "complex_exp~(times_real~({0}, (Real)0x1.62e42fefa39efp-1))",
    "log2": "times_real~(complex_log~({0}), (Real)0x1.71547652b82fep+0)",
    "log10": "times_real~(complex_log~({0}), (Real)0x1.bcb7b1526e50ep-2)",
    "power": "complex_power~({0}, {1})", "float_power": "complex_power~({0}, {1})",
    "less": "complex_less~({0}, {1})", "less_equal": "complex_less_equal~({0}, {1})",
    "greater": "complex_less~({1}, {0})", "greater_equal": "complex_less_equal~({1}, {0})",
    "maximum": "complex_isnan~({0}) || complex_less_equal~({1}, {0}) ? {0} : {1}",
    "minimum": "complex_isnan~({0}) || complex_less_equal~({0}, {1}) ? {0} : {1}",
    "fmax": "complex_isnan~({1}) || complex_less_equal~({1}, {0}) ? {0} : {1}",
    "fmin": "complex_isnan~({1}) || complex_less_equal~({0}, {1}) ? {0} : {1}",
} | {
    name: f"complex_{name}~({{0}})"
    for name in (
        "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh",
        "arcsin", "arccos", "arctan", "arcsinh", "arccosh", "arctanh",
    )
}  # fmt: skip
_ALIASES = {
    "true_divide": "divide", "mod": "remainder", "abs": "absolute", "conj": "conjugate",
    "bitwise_not": "invert", "degrees": "rad2deg", "radians": "deg2rad", "pow": "power",
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atan2": "arctan2", "atanh": "arctanh", "bitwise_invert": "invert",
    "bitwise_left_shift": "left_shift", "bitwise_right_shift": "right_shift",
}  # fmt: skip


def operation(op: str, types: Sequence[str], gives: str, args: Sequence[str]) -> str | None:
    """What computes one operation, of arguments that are names; None where there is nothing.

    >>> operation("add", ("f8", "f8"), "f8", ("x", "y"))
    'x + y'
    >>> operation("exp", ("f4",), "f4", ("x",)), operation("exp", ("f2",), "f2", ("x",))
    ('expf(x)', 'half_round(expf(x))')
    """
    op, kind = _ALIASES.get(op, op), types[0][0]
    if op in _LOGICAL:
        return _LOGICAL[op].format(*[f"({truth(t, a)})" for t, a in zip(types, args, strict=True)])
    if op == "ldexp":
        text = f"scaled{'' if gives == 'f8' else 'f'}({args[0]}, {args[1]})"
        return f"half_round({text})" if gives == "f2" else text
    if len(set(types)) > 1:
        mixed = set(types) == {"i8", "u8"} and op in _MIXED
        return _MIXED[op].format(*args) if mixed else None
    if op in _COMPARISONS and kind != "c":
        return f"{args[0]} {_COMPARISONS[op]} {args[1]}"
    if op in _ALWAYS and kind in "biu":
        return _ALWAYS[op]
    if kind == "b":
        return _BOOLS[op].format(*args) if op in _BOOLS and gives == "b1" else None
    if kind in "iu":
        return _integer(op, types[0], gives, args)
    if kind == "f":
        return _float(op, types[0], gives, args)
    if op not in _COMPLEX:
        return None
    suffix, real = ("", "double") if types[0] == "c16" else ("f", "float")
    text = _COMPLEX[op].replace("~", suffix).replace("Real", real).format(*args)
    return TYPES[gives] + text if text.startswith("{") else text


def _integer(op: str, short: str, gives: str, args: Sequence[str]) -> str | None:
    name = TYPES[short]
    wide = "unsigned long long" if short[1] == "8" else "unsigned"
    if op == "negative" and short[0] == "i":
        return f"({name})negated(({'long long' if short[1] == '8' else 'int'}){args[0]})"
    if op in _INTEGERS:
        words = [f"({wide}){a}" for a in args]
        return f"({name})({_INTEGERS[op].format(*words)})"
    if op in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        sign = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}[op]
        return f"({name})({args[0]} {sign} {args[1]})"
    if op in ("maximum", "fmax", "minimum", "fmin"):
        sign = ">=" if op in ("maximum", "fmax") else "<="
        return f"{args[0]} {sign} {args[1]} ? {args[0]} : {args[1]}"
    if op in (
        "floor_divide", "fmod", "remainder", "power", "left_shift", "right_shift", "gcd", "lcm"
    ):  # fmt: skip
        return f"int_{op}<{name}>({', '.join(args)})"
    (x, *_) = args
    if op == "divide" and gives == "f8":
        return f"(double){x} / (double){args[1]}"
    if op in ("positive", "conjugate", "floor", "ceil", "trunc"):
        return x
    if op == "invert":
        return f"({name})~{x}"
    if op == "absolute":
        return x if short[0] == "u" else f"{x} < 0 ? ({name})(0u - ({wide}){x}) : {x}"
    if op == "sign":
        return f"({name})(({x} > 0) - ({x} < 0))" if short[0] == "i" else f"({name})({x} > 0)"
    if op == "reciprocal":
        return cast("f8", short, f"(1.0 / (double){x})")
    if op == "bitwise_count":
        return f"(unsigned char)__popcll(int_size({x}))"
    return None


def _float(op: str, short: str, gives: str, args: Sequence[str]) -> str | None:
    f = "" if short == "f8" else "f"
    if op in ("isinf", "isfinite", "signbit"):
        name = {"isinf": "is_infinite", "isfinite": "is_finite", "signbit": "negative_bit"}[op]
        return f"{name}{f}({args[0]})"
    if op == "nextafter" and short == "f2":
        return None
    if op in _REALS:
        text = _REALS[op].format(*args)
    elif op in _UNITS:
        text = f"{args[0]} * {_UNITS[op][f == 'f']}"
    elif op == "log" and short == "f4":
        text = f"log_of({args[0]})"
    elif op in FUNCTIONS:
        text = f"{FUNCTIONS[op]}{f}({', '.join(args)})"
    else:
        return None
    return f"half_round({text})" if gives == "f2" and op not in _EXACT else text


def usual(op: str, short: str, args: Sequence[str]) -> str | None:
    """What computes a quotient, inverse, root or logarithm of `args`, unless ``rare`` is true after
    it; None of what there is nothing faster than `operation`.

    >>> usual("true_divide", "f4", ("x", "y")), usual("sqrt", "f8", ("x",))
    ('usual_quotient(x, y, rare)', None)
    """
    name = _USUAL.get(_ALIASES.get(op, op))
    return f"{name}({', '.join(args)}, rare)" if name and short == "f4" else None


def truth(short: str, x: str) -> str:
    """Whether a value is true."""
    if short == "b1":
        return x
    return f"{x}.x != 0 || {x}.y != 0" if short[0] == "c" else f"{x} != 0"


def cast(old: str, new: str, x: str) -> str:
    """A value in another type. A real number that an integer type does not hold becomes what it
    becomes on x86-64: the least int32 or int64; the lowest bits of that in shorter types."""
    if old == new:
        return x
    if new == "b1":
        return truth(old, x)
    if new[0] == "c":
        part = "f4" if new == "c8" else "f8"
        if old[0] == "c":
            real = TYPES[part]
            return f"{TYPES[new]}{{({real}){x}.x, ({real}){x}.y}}"
        return f"{TYPES[new]}{{{cast(old, part, x)}, 0}}"
    if old[0] == "c":
        return cast("f4" if old == "c8" else "f8", new, f"{x}.x")
    if new == "f2":
        return f"half_of_double({x})" if old == "f8" else f"half_round((float){x})"
    if old[0] == "f" and new[0] in "iu":
        function = {"i8": "to_long", "u4": "to_long", "u8": "to_unsigned_long"}.get(new, "to_int")
        return f"({TYPES[new]}){function}({x})"
    return x if TYPES[old] == TYPES[new] else f"({TYPES[new]}){x}"


def loaded(short: str, x: str) -> str:
    """The value of what is in memory."""
    if short == "f2":
        return f"half_value({x})"
    return f"{x} != 0" if short == "b1" else x


def stored(short: str, x: str) -> str:
    """What is written to memory."""
    return f"half_bits({x})" if short == "f2" else x


# ---- reductions


def accumulator(
    op: str, short: str, gives: str, name: str, scans: bool = False
) -> tuple[str, str] | None:
    """The structure that accumulates a reduction, or `scans`, and the code of the values that it
    takes; None where there is none. `short` is what is reduced, `gives` the type of the first
    result."""
    if op == "moment":
        if short[0] == "c":
            return f"typedef ComplexMoment {name};", short
        return f"typedef Moment {name};", "f8" if short[0] in "iub" else short
    if op in ("any", "all"):
        sign, start = ("||", "false") if op == "any" else ("&&", "true")
        return _simple(name, "bool", start, f"v {sign} x", f"v {sign} o.v"), "b1"
    if op in ("sum", "prod") and gives != "b1":
        return _added(op, gives, name, scans), gives
    if op in ("sum", "prod"):
        return accumulator("any" if op == "sum" else "all", short, gives, name)
    if op in ("argmin", "argmax"):
        return _argument(op, short, name), short
    extreme = {"min": "minimum", "max": "maximum"}.get(op, op)
    step = operation(extreme, (short, short), short, ("v", "x"))
    join = operation(extreme, (short, short), short, ("v", "o.v"))
    return _simple(name, TYPES[short], _first(op, short), str(step), str(join)), short


def _first(op: str, short: str) -> str:
    """What gives way to any value, in a minimum or maximum."""
    least = op in ("max", "fmax")
    if short[0] == "c":
        part = _first(op, "f4" if short == "c8" else "f8")
        return f"{TYPES[short]}{{{part}, {part}}}"
    if short == "b1":
        return "false" if least else "true"
    if short[0] == "f":
        if op in ("fmax", "fmin"):
            bits = "0x7ff8000000000000ll" if short == "f8" else "0x7fc00000"
        elif short == "f8":
            bits = "(long long)0xfff0000000000000ull" if least else "0x7ff0000000000000ll"
        else:
            bits = "(int)0xff800000u" if least else "0x7f800000"
        return f"{'__longlong_as_double' if short == 'f8' else '__int_as_float'}({bits})"
    size = 8 * int(short[1])
    if short[0] == "u":
        return "0" if least else f"({TYPES[short]})~0ull"
    low = f"(1ull << {size - 1})"
    return f"({TYPES[short]}){low if least else f'({low} - 1)'}"


def _simple(name: str, kind: str, start: str, step: str, join: str) -> str:
    return f"""
struct alignas(8) {name} {{
  {kind} v;
  __device__ __forceinline__ void clear() {{ v = {start}; }}
  template<int N> __device__ __forceinline__ void take(const {kind} (&values)[N]) {{
    #pragma unroll
    for (int i = 0; i < N; ++i) {{ const {kind} x = values[i]; v = {step}; }}
  }}
  __device__ __forceinline__ void merge(const {name}& o) {{ v = {join}; }}
}};""".strip("\n")


def _added(op: str, gives: str, name: str, scans: bool) -> str:
    """Sums and products. Those of floating point are of doubles; what a thread has at hand is
    added up in its own type first."""
    kind, sign = TYPES[gives], "+" if op == "sum" else "*"
    if gives[0] in "iu":
        wide = f"unsigned {'long long' if gives[1] == '8' else 'int'}"
        return _simple(name, kind, str(int(op == "prod")), f"({kind})(({wide})v {sign} ({wide})x)",
                       f"({kind})(({wide})v {sign} ({wide})o.v)")  # fmt: skip
    if gives[0] == "f":
        take = "v += (double)added(x);"
        if op == "prod":
            take = "for (int i = 0; i < N; ++i) v *= (double)x[i];"
        return f"""
struct alignas(8) {name} {{
  double v;
  __device__ __forceinline__ void clear() {{ v = {int(op == "prod")}; }}
  template<int N> __device__ __forceinline__ void take(const {kind} (&x)[N]) {{ {take} }}
  __device__ __forceinline__ void merge(const {name}& o) {{ v = v {sign} o.v; }}
}};""".strip("\n")
    step = "{v.x + (double)x[i].x, v.y + (double)x[i].y}"
    join = "{v.x + o.v.x, v.y + o.v.y}"
    member, none, count = "", "", ""
    if op == "prod":
        step = "times(v, Complex<double>{(double)x[i].x, (double)x[i].y})"
        join = "times(v, o.v)"
    if op == "prod" and scans:  # what comes first, as it is: NaN times one is NaN in both parts
        step = "n++ ? " + step + " : Complex<double>{(double)x[i].x, (double)x[i].y}"
        join = f"!o.n ? v : n ? {join} : o.v"
        member, none, count = "unsigned long long n;", "n = 0;", "n += o.n;"
    return f"""
struct alignas(16) {name} {{
  Complex<double> v;
  {member}
  __device__ __forceinline__ void clear() {{ v = {{{int(op == "prod")}, 0}}; {none} }}
  template<int N> __device__ __forceinline__ void take(const {kind} (&x)[N]) {{
    #pragma unroll
    for (int i = 0; i < N; ++i) v = {step};
  }}
  __device__ __forceinline__ void merge(const {name}& o) {{ v = {join}; {count} }}
}};""".strip("\n")


def _argument(op: str, short: str, name: str) -> str:
    """The first of the extremes; NaN is more extreme than all. `i` is negative for none yet."""
    kind, odd = TYPES[short], "{0} != {0}"
    if short[0] == "c":
        odd = f"complex_isnan{'f' if short == 'c8' else ''}({{0}})"
    beats = operation("less" if op == "argmin" else "greater", (short, short), "b1", ("x", "v"))
    equal = operation("equal", (short, short), "b1", ("x", "v"))
    return f"""
struct alignas({16 if short == "c16" else 8}) {name} {{
  long long i;
  {kind} v;
  __device__ __forceinline__ void clear() {{ i = -1; v = {{}}; }}
  __device__ __forceinline__ void see({kind} x, long long j) {{
    const bool none = {odd.format("x")}, before = {odd.format("v")};
    const bool same = none ? before : !before && ({equal});
    const bool better = none ? !before : !before && ({beats});
    if (i < 0 || better || (same && j < i)) {{ i = j; v = x; }}
  }}
  template<int N> __device__ __forceinline__ void take(
      const {kind} (&x)[N], long long first, long long step) {{
    #pragma unroll
    for (int k = 0; k < N; ++k) see(x[k], first + k * step);
  }}
  __device__ __forceinline__ void merge(const {name}& o) {{ if (o.i >= 0) see(o.v, o.i); }}
}};""".strip("\n")


def results(op: str, short: str, gives: Sequence[str], x: str) -> list[str]:
    """The results of a reduction, by what has accumulated in `x`."""
    if op == "moment":
        if short[0] == "c":
            return [cast("c16", gives[0], f"{x}.mean()"),
                    cast("f8", gives[1], f"({x}.real.m2() + {x}.imag.m2())")]  # fmt: skip
        return [cast("f8", gives[0], f"{x}.mean()"), cast("f8", gives[1], f"{x}.m2()")]
    if op in ("argmin", "argmax"):
        return [cast("i8", gives[0], f"{x}.i"), cast(short, gives[1], f"{x}.v")]
    held = short
    if op in ("any", "all") or (op in ("sum", "prod") and gives[0] == "b1"):
        held = "b1"
    elif op in ("sum", "prod"):
        held = {"f": "f8", "c": "c16"}.get(gives[0][0], gives[0])
    return [cast(held, gives[0], f"{x}.v")]


#: Rows of 16-byte words, one behind the other in `from` and `pitch` bytes apart in `to`.
ROWS_COPIED = """
extern "C" __global__ void copy_rows(char* to, unsigned long long pitch, const uint4* from,
                                     unsigned long long words, unsigned long long rows) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long r = blockIdx.y; r < rows; r += gridDim.y) {
    uint4* const q = (uint4*)(to + r * pitch);
    const uint4* const p = from + r * words;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += 4 * step) {
      uint4 x[4];
      #pragma unroll
      for (int u = 0; u < 4; ++u) if (i + u * step < words) x[u] = p[i + u * step];
      #pragma unroll
      for (int u = 0; u < 4; ++u) if (i + u * step < words) q[i + u * step] = x[u];
    }
  }
}
"""
