/// Quotients, inverses, roots and logarithms of float32, for several values behind one branch.

/// Quotients, inverses and roots are rounded as IEEE 754 demands. They correct the hardware's
/// approximation by its error, which a fused product gives exactly (P. Markstein, 1990). This fails
/// where a number on the way is too large, too small or NaN. Then `rare` is set, and the result must
/// not be used. CUDA's functions do the same, but branch for each number. Here one branch computes
/// the rare ones of several numbers again.
//@ usual_inverse
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

//@ usual_quotient
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

//@ usual_root
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

/// The logarithm of float32: a polynomial of least relative error for a number from 2/3 to 4/3, and
/// a multiple of the logarithm of 2. The largest error is 0.92 units in the last place. `more` is
/// added to the exponent bits of x.
//@ log_of_normal
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

//@ usual_log
__device__ __forceinline__ float usual_log(float x, bool& rare) {
#if __USE_FAST_MATH__
  return logf(x);
#else
  return log_of_normal(x, 0, rare);
#endif
}

//@ log_of
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
