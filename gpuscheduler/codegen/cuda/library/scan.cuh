/// Scans: merge accumulators along the lanes of a warp, up to each lane.

//@ from_lane_before from_last_lane before_lane take_one take_all
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
