/// The kernel that copies rows of 16-byte words into rows that lie `pitch` bytes apart.

//@ copy_rows
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
