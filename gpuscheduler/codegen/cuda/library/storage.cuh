/// Values as they lie in memory: vectors of neighbours, and float16.
///
/// Kernels include no headers: the compiler declares all that these texts use.

//@ Vec
template<class T, int N> struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Vec { T x[N]; };

//@ half_value half_bits half_round half_of_double
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
