/// Arithmetic of indices.

/// Division by a known number, as a product and a shift; `kernel` computes `magic`.
//@ divide
__device__ __forceinline__ unsigned divide(unsigned n, unsigned long long magic) {
  return (unsigned)((unsigned long long)n * (unsigned)magic >> (magic >> 32));
}

/// The j-th point of planes of `rows` by `columns` points, in patches of 4 rows and 8 columns. A
/// patch is the points of one warp; patches at the edges are smaller. Points beyond the last plane
/// stay beyond it.
//@ patched
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
