/// Reductions: merge the accumulators of threads, and the accumulators of means and variances.

/// An accumulator is a structure with three methods: `clear`; `take`, which adds values of one
/// thread; and `merge`, which adds the accumulator of the points that follow. Lanes of a warp merge
/// first, then warps, always in the same order.
//@ from_lane gather_lanes gather_block gather_lines from_memory
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

/// The same as functions that are called: many inlined copies take long to compile.
//@ gathered_lanes gathered_block gathered_lines
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

//@ added
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

//@ Moment
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

//@ ComplexMoment
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
