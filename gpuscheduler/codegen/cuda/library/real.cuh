/// Real numbers, for double and float, with NumPy's and SciPy's meaning.

/// x - x is 0 for finite x only.
//@ is_finite~
__device__ __forceinline__ bool is_finite~(Real x) { return x - x == 0; }

//@ is_infinite~
__device__ __forceinline__ bool is_infinite~(Real x) { return x == x && !(x - x == 0); }

//@ negative_bit
__device__ __forceinline__ bool negative_bit(double x) { return __double_as_longlong(x) < 0; }

//@ negative_bitf
__device__ __forceinline__ bool negative_bitf(float x) { return __float_as_int(x) < 0; }

//@ sign_of~
__device__ __forceinline__ Real sign_of~(Real x) {
  return x > 0 ? (Real)1 : x < 0 ? (Real)-1 : x == 0 ? (Real)0 : x;
}

//@ larger~ smaller~
__device__ __forceinline__ Real larger~(Real a, Real b) { return a >= b || a != a ? a : b; }
__device__ __forceinline__ Real smaller~(Real a, Real b) { return a <= b || a != a ? a : b; }

//@ remainder_of~ quotient_of~
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

//@ step_of~
__device__ __forceinline__ Real step_of~(Real x, Real middle) {
  return x != x ? x : x == 0 ? middle : x < 0 ? (Real)0 : (Real)1;
}

//@ log_add_exp~
__device__ Real log_add_exp~(Real a, Real b) {
  if (a == b) return a + (Real)0.693147180559945309417232121458176568;
  const Real d = a - b;
  return d > 0 ? a + log1p~(exp~(-d)) : d <= 0 ? b + log1p~(exp~(d)) : d;
}

//@ log_add_exp2~
__device__ Real log_add_exp2~(Real a, Real b) {
  if (a == b) return a + 1;
  const Real d = a - b, e = (Real)1.44269504088896340735992468100189214;
  return d > 0 ? a + e * log1p~(exp2~(-d)) : d <= 0 ? b + e * log1p~(exp2~(d)) : d;
}

//@ expit_of~
__device__ Real expit_of~(Real x) { return 1 / (1 + exp~(-x)); }

//@ logit_of~
__device__ Real logit_of~(Real x) { return log~(x / (1 - x)); }

//@ exprel_of~
__device__ Real exprel_of~(Real x) { return x == 0 ? (Real)1 : expm1~(x) / x; }

/// Keeps the sign of an infinity, as SciPy does.
//@ log_gamma~
__device__ Real log_gamma~(Real x) { return is_infinite~(x) ? x : lgamma~(x); }

//@ scaled~
__device__ __forceinline__ Real scaled~(Real x, long long n) {
  return ldexp~(x, (int)(n > 100000 ? 100000 : n < -100000 ? -100000 : n));
}

//@ cube_of~ fourth_of~
__device__ __forceinline__ Real cube_of~(Real x) { return (Real)((double)x * x * x); }
__device__ __forceinline__ Real fourth_of~(Real x) {
  const double y = (double)x * x;
  return (Real)(y * y);
}
