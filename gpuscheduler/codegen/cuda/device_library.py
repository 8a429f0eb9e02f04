"""Functions of CUDA C++ that kernels call, and which of them a text needs."""

from __future__ import annotations

import re

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
