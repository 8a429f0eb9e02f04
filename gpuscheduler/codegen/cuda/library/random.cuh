/// Random numbers: Philox 4x32-10 (Salmon and others 2011).

/// Both words of a pair of elements; `block` is the number of the pair.
//@ philox
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

/// The upper 53 bits as a whole number. Two exact subtractions replace a slow conversion.
//@ upper53
__device__ __forceinline__ double upper53(unsigned long long u) {
  u >>= 11;
  const double high = __hiloint2double(0x45300000, (int)(u >> 32)) - 0x1.00000001p84;
  return high + __hiloint2double(0x43300000, (int)(unsigned)u);
}

//@ u8_bits f8_uniform f4_uniform
__device__ __forceinline__ unsigned long long u8_bits(unsigned long long u) { return u; }
__device__ __forceinline__ double f8_uniform(unsigned long long u) { return upper53(u) * 0x1p-53; }
__device__ __forceinline__ float f4_uniform(unsigned long long u) {
  return (float)(unsigned)(u >> 40) * 0x1p-24f;
}

/// Normal numbers by Box and Muller's radius and angle. Arguments of the logarithm and the root are
/// always ordinary numbers. The angle is in half turns.
//@ f4_normal f4_normals
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

//@ f8_normal f8_normals
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
