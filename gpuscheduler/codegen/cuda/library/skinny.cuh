/// Products of matrices of small integers with few columns of floating-point numbers.
///
/// Each integer is read once, becomes a double in registers, and is multiplied by FP64 tensor cores
/// (`mma`). A warp has 32 lanes: g = lane / 4 is a row of a fragment of the left matrix, and
/// j = lane % 4 is a column of it and a row of the right one. Whoever includes this text defines
///   SIZE    bytes of an integer, 1 or 2         SIGNED  whether it has a sign
///   TILES   columns of the result, in eights    FACTOR  the type of the right matrix
///   EVEN    whether vector loads are aligned     DEPTH   fragments that are multiplied at once
/// Results are parts of sums, in double precision: one for each `blockIdx.y`.

//@ skinny
#define STRIDE (TILES * 8 + 4)  // of rows of the right matrix in shared memory: no bank conflicts

template <int N> struct Bits;
template <> struct Bits<1> { typedef unsigned char type; };
template <> struct Bits<2> { typedef unsigned short type; };
typedef Bits<SIZE>::type Integer;

// c[0] and c[1] are 8 x 8 elements each: both get the products of `DEPTH` fragments of the left
// matrix, 8 x 4 elements each, with fragments of the right one.
__device__ __forceinline__ void multiply(double (&c)[2][2], const double (&a)[2][DEPTH],
                                         const double (&b)[DEPTH]) {
#if DEPTH == 1 && defined(OLD)  // before compute capability 9.0
  #pragma unroll
  for (int t = 0; t < 2; ++t)
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+d"(c[t][0]), "+d"(c[t][1]) : "d"(a[t][0]), "d"(b[0]));
#elif DEPTH == 1
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
               "{%0,%1,%2,%3};"
               : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[1][0]), "+d"(c[1][1])
               : "d"(a[0][0]), "d"(a[1][0]), "d"(b[0]));
#elif DEPTH == 2
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[1][0]), "+d"(c[1][1])
               : "d"(a[0][0]), "d"(a[1][0]), "d"(a[0][1]), "d"(a[1][1]), "d"(b[0]), "d"(b[1]));
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, "
               "{%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, {%0,%1,%2,%3};"
               : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[1][0]), "+d"(c[1][1])
               : "d"(a[0][0]), "d"(a[1][0]), "d"(a[0][1]), "d"(a[1][1]), "d"(a[0][2]),
                 "d"(a[1][2]), "d"(a[0][3]), "d"(a[1][3]), "d"(b[0]), "d"(b[1]), "d"(b[2]),
                 "d"(b[3]));
#endif
}

// Element n of words in registers. 2^52 + v has the bits of v in its low word.
__device__ __forceinline__ double number(const unsigned* words, int n) {
  const unsigned word = words[n * SIZE / 4], at = n % (4 / SIZE) * 8 * SIZE;
  const unsigned sign = SIGNED ? 1u << (8 * SIZE - 1) : 0u;
  const unsigned v = word >> at & ((1u << 8 * SIZE) - 1);
  return __hiloint2double(0x43300000, (int)(v ^ sign)) - (4503599627370496.0 + sign);
}

// Elements from `from` on, `count` of them and no more than are `left`.
template <int count>
__device__ __forceinline__ void load(unsigned* words, const Integer* from, long long left) {
  if (EVEN && left >= count) {
    if (count * SIZE == 16) {
      const uint4 v = *(const uint4*)from;
      words[0] = v.x; words[1] = v.y; words[2] = v.z; words[3] = v.w;
    } else {
      const uint2 v = *(const uint2*)from;
      words[0] = v.x; words[1] = v.y;
    }
    return;
  }
  #pragma unroll
  for (int i = 0; i < count * SIZE / 4; ++i) words[i] = 0;
  #pragma unroll
  for (int n = 0; n < count; ++n)
    if (n < left) words[n * SIZE / 4] |= (unsigned)from[n] << n % (4 / SIZE) * 8 * SIZE;
}

// Rows k0 to k0 + ROWS of the right matrix, in registers: zeros from row `last` on.
template <int ROWS, int THREADS, int EACH>
__device__ __forceinline__ void fetch(double (&next)[EACH], const FACTOR* w, long long down,
                                      long long along, long long k0, long long last, int columns) {
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = threadIdx.x + i * THREADS, n = at % (TILES * 8);
    const long long k = k0 + at / (TILES * 8);
    const bool there = at < ROWS * TILES * 8 && k < last && n < columns;
    next[i] = there ? (double)w[k * down + n * along] : 0.0;
  }
}

// ... and in shared memory. Row k goes where `number` finds it: element k % RUN of lane k / RUN.
template <int ROWS, int THREADS, int EACH, int RUN>
__device__ __forceinline__ void put(double* tile, const double (&next)[EACH]) {
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = threadIdx.x + i * THREADS, k = at / (TILES * 8);
    const int row = RUN > 1 ? k % RUN * 4 + k / RUN : k;
    if (at < ROWS * TILES * 8) tile[row * STRIDE + at % (TILES * 8)] = next[i];
  }
}

// x @ w, for x of (rows, inner) elements, rows `pitch` elements apart: 32 rows for each warp.
extern "C" __global__ void __launch_bounds__(256, TILES > 3 || DEPTH > 1 ? 1 : 2)
skinny_rows(const Integer* x, long long pitch, const FACTOR* w, long long down, long long along,
            double* out, long long rows, long long inner, int columns, long long share) {
  constexpr int RUN = 16 / SIZE, CHUNK = 4 * RUN, EACH = (CHUNK * TILES * 8 + 255) / 256;
  __shared__ double tile[2][CHUNK * STRIDE];
  const int lane = threadIdx.x % 32, j = lane % 4, g = lane / 4;
  const long long row = (blockIdx.x * 8ll + threadIdx.x / 32) * 32 + g;
  const long long first = blockIdx.y * share;
  const long long last = first + share < inner ? first + share : inner;
  double c[2][TILES][2][2] = {};
  const Integer* from[4];
  #pragma unroll
  for (int t = 0; t < 4; ++t)
    from[t] = x + (row + 8 * t < rows ? row + 8 * t : rows - 1) * pitch;
  double next[EACH];
  unsigned words[4][4], ahead[4][4];
  fetch<CHUNK, 256, EACH>(next, w, down, along, first, last, columns);
  #pragma unroll
  for (int t = 0; t < 4; ++t) load<RUN>(words[t], from[t] + first + RUN * j, inner - first - RUN * j);
  put<CHUNK, 256, EACH, RUN>(tile[0], next);
  __syncthreads();
  int now = 0;
  for (long long k = first; k < last; k += CHUNK) {
    const bool more = k + CHUNK < last;
    if (more) {
      fetch<CHUNK, 256, EACH>(next, w, down, along, k + CHUNK, last, columns);
      const long long at = k + CHUNK + RUN * j;
      #pragma unroll
      for (int t = 0; t < 4; ++t) load<RUN>(ahead[t], from[t] + at, inner - at);
    }
    #pragma unroll
    for (int s = 0; s < RUN; s += DEPTH) {
      double b[TILES][DEPTH];
      #pragma unroll
      for (int i = 0; i < TILES; ++i)
        #pragma unroll
        for (int d = 0; d < DEPTH; ++d)
          b[i][d] = tile[now][(4 * (s + d) + j) * STRIDE + 8 * i + g];
      #pragma unroll
      for (int t = 0; t < 2; ++t) {
        double a[2][DEPTH];
        #pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
          a[0][d] = number(words[2 * t], s + d);
          a[1][d] = number(words[2 * t + 1], s + d);
        }
        #pragma unroll
        for (int i = 0; i < TILES; ++i) multiply(c[t][i], a, b[i]);
      }
    }
    if (more) {
      put<CHUNK, 256, EACH, RUN>(tile[1 - now], next);
      #pragma unroll
      for (int t = 0; t < 4; ++t)
        #pragma unroll
        for (int i = 0; i < 4; ++i) words[t][i] = ahead[t][i];
    }
    __syncthreads();
    now = 1 - now;
  }
  #pragma unroll
  for (int t = 0; t < 4; ++t)
    #pragma unroll
    for (int i = 0; i < TILES; ++i)
      #pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int column = 8 * i + 2 * j + p;
        if (row + 8 * t < rows && column < columns)
          out[(blockIdx.y * rows + row + 8 * t) * columns + column] = c[t / 2][i][t % 2][p];
      }
}

// transpose(x) @ w, for x of (inner, length) elements: 64 columns of x for each warp.
extern "C" __global__ void __launch_bounds__(128, 2)
skinny_columns(const Integer* x, long long pitch, const FACTOR* w, long long down, long long along,
               double* out, long long length, long long inner, int columns, long long share) {
  constexpr int CHUNK = 16, STEPS = CHUNK / 4, EACH = (CHUNK * TILES * 8 + 127) / 128;
  __shared__ double tile[2][CHUNK * STRIDE];
  const int lane = threadIdx.x % 32, j = lane % 4, g = lane / 4;
  const long long m = (blockIdx.x * 4ll + threadIdx.x / 32) * 64 + 8 * g;
  const long long start = m < length ? m : 0;  // what lies beyond is not stored
  const long long first = blockIdx.y * share;
  const long long last = first + share < inner ? first + share : inner;
  double c[4][TILES][2][2] = {};
  double next[EACH];
  unsigned words[STEPS][2 * SIZE], ahead[STEPS][2 * SIZE];
  fetch<CHUNK, 128, EACH>(next, w, down, along, first, last, columns);
  #pragma unroll
  for (int q = 0; q < STEPS; ++q) {
    const long long k = first + 4 * q + j < inner ? first + 4 * q + j : inner - 1;
    load<8>(words[q], x + k * pitch + start, length - start);
  }
  put<CHUNK, 128, EACH, 1>(tile[0], next);
  __syncthreads();
  int now = 0;
  for (long long k0 = first; k0 < last; k0 += CHUNK) {
    const bool more = k0 + CHUNK < last;
    if (more) {
      fetch<CHUNK, 128, EACH>(next, w, down, along, k0 + CHUNK, last, columns);
      #pragma unroll
      for (int q = 0; q < STEPS; ++q) {
        const long long at = k0 + CHUNK + 4 * q + j, k = at < inner ? at : inner - 1;
        load<8>(ahead[q], x + k * pitch + start, length - start);
      }
    }
    #pragma unroll
    for (int q = 0; q < STEPS; q += DEPTH) {
      double b[TILES][DEPTH];
      #pragma unroll
      for (int i = 0; i < TILES; ++i)
        #pragma unroll
        for (int d = 0; d < DEPTH; ++d)
          b[i][d] = tile[now][(4 * (q + d) + j) * STRIDE + 8 * i + g];
      #pragma unroll
      for (int s = 0; s < 4; ++s) {
        double a[2][DEPTH];
        #pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
          a[0][d] = number(words[q + d], 2 * s);
          a[1][d] = number(words[q + d], 2 * s + 1);
        }
        #pragma unroll
        for (int i = 0; i < TILES; ++i) multiply(c[s][i], a, b[i]);
      }
    }
    if (more) {
      put<CHUNK, 128, EACH, 1>(tile[1 - now], next);
      #pragma unroll
      for (int q = 0; q < STEPS; ++q)
        #pragma unroll
        for (int i = 0; i < 2 * SIZE; ++i) words[q][i] = ahead[q][i];
    }
    __syncthreads();
    now = 1 - now;
  }
  #pragma unroll
  for (int s = 0; s < 8; ++s)
    #pragma unroll
    for (int i = 0; i < TILES; ++i)
      #pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int column = 8 * i + 2 * j + p;
        if (m + s < length && column < columns)
          out[(blockIdx.y * length + m + s) * columns + column] = c[s / 2][i][s % 2][p];
      }
}
