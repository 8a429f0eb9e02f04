/// Integers, with NumPy's meaning.

/// Conversions of floating point to integers, as on x86-64: a value out of range becomes the least
/// integer.
//@ to_int to_long to_unsigned_long
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

/// Division by zero gives 0, quotients round down, and a shift by all bits or more leaves nothing.
//@ int_floor_divide
template<class T> __device__ T int_floor_divide(T a, T b) {
  if (b == 0) return 0;
  if ((T)-1 < (T)0 && b == (T)-1) return (T)(0ull - (unsigned long long)a);
  const T q = (T)(a / b);
  return (T)(q * b) != a && ((a < 0) != (b < 0)) ? (T)(q - 1) : q;
}

//@ int_fmod int_remainder
template<class T> __device__ T int_fmod(T a, T b) {
  if (b == 0 || ((T)-1 < (T)0 && b == (T)-1)) return 0;
  return (T)(a % b);
}
template<class T> __device__ T int_remainder(T a, T b) {
  const T r = int_fmod(a, b);
  return r != 0 && ((r < 0) != (b < 0)) ? (T)(r + b) : r;
}

//@ int_power
template<class T> __device__ T int_power(T a, T b) {
  if (b < 0) return a == 1 ? (T)1 : (T)(a == (T)-1 ? ((b & 1) ? -1 : 1) : 0);
  unsigned long long x = (unsigned long long)a, r = 1;
  for (unsigned long long n = (unsigned long long)b; n; n >>= 1) {
    if (n & 1) r *= x;
    x *= x;
  }
  return (T)r;
}

//@ int_left_shift int_right_shift
template<class T> __device__ T int_left_shift(T a, T b) {
  return (unsigned long long)b < 8 * sizeof(T) ? (T)((unsigned long long)a << b) : (T)0;
}
template<class T> __device__ T int_right_shift(T a, T b) {
  return (unsigned long long)b < 8 * sizeof(T) ? (T)(a >> b) : (T)(a < 0 ? -1 : 0);
}

//@ int_size int_gcd int_lcm
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

//@ mixed_less mixed_equal
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

/// Negation that the compiler cannot see. With three ints the compiler of CUDA 12.8 to 13.3, for
/// compute capability 9.0 and 10.0, loses the sign of a negated one (pytorch/pytorch#190973):
/// min(min(-x, y), z) becomes min(x, y, z). The 64-bit form is needed as well, for the compiler may
/// find that 32 bits are enough.
//@ negated
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
