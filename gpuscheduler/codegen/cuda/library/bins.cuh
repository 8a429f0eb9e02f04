/// Histograms: the bin of a value, and counts or sums of weights by bin.

/// The number of the bin of x, or `count` where x lies in no bin. Edge k is `first + k * step`,
/// rounded as NumPy's linspace rounds. `last` belongs to the last bin.
//@ even_bin
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

//@ bin_among
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

/// Add one to a bin, in this lane's copy of the counters.
//@ count_bin
__device__ __forceinline__ void count_bin(
    unsigned* table, long long k, unsigned bins, unsigned copies) {
  if ((unsigned long long)k < bins)
    atomicAdd(table + ((unsigned)k << copies) + (threadIdx.x & ((1u << copies) - 1)), 1u);
}

/// A weight and its bin. Lanes of a warp that hold the same bin add their weights in pairs, after
/// Westphal, "Voting and shuffling to optimize atomic operations" (NVIDIA, 2015). All lanes take
/// part. Weights without a bin are left out.
//@ Weight weigh_bin
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
