"""Numbers that were chosen by measuring: widths, unrolling, sizes of blocks and tiles, limits."""

from __future__ import annotations

# ---- window_tiles

#: Threads of a block.
THREADS = 256
#: Bytes of shared memory.
MOST_SHARED = 48 * 1024
#: Longest window whose elements may all be under way at once. With nine, a sum took longer than one
#: by one.
MOST_AT_ONCE = 8
#: Results of a thread down a column of a column tile, without and with moments. Moments need more
#: registers. Measured.
TALL = {False: (12, 8, 6, 4, 2), True: (4, 2)}
#: Results of a thread along a row of a column tile, without and with moments. Measured.
SIDE = {False: (8, 4, 2), True: (4, 2)}
#: Most words of a thread for the steps of windows that it holds at once.
BOX_WORDS = 48
#: Most words of a thread for the parts of its results that they do not share.
SLIDING_WORDS = 128

# ---- schedule

#: Blocks per multiprocessor: so many that the end of the last ones does not matter.
WAVES = 128
#: Blocks per multiprocessor where each has a table in shared memory.
SHARED_WAVES = 32
#: Bytes of columns that a multiprocessor's cache holds beside everything else.
KEPT_BYTES = 96 * 1024
#: Least columns of a part that a warp goes along at a time.
LEAST_COLUMNS = 64
#: Bytes of shared memory for tiles, of 48 KiB.
TILES = 40 * 1024
#: Most bins of a histogram whose counters fit there.
MOST_BINS = TILES // 4
#: Counters of a block, where a histogram has few bins.
COUNTERS = 4096
#: Most bins of a histogram of weights whose sums fit there.
MOST_WEIGHTS = TILES // 8
#: Most bins of a histogram of weights that has a table for each warp.
FEW_WEIGHTS = 2048
#: Points and elements that 32 bits count, with room for some steps more.
SMALL = 2**31 - 2**27

# ---- vectorize

#: Columns from which on a thread may have four of them with all that a mean and a variance need.
#: With fewer columns too few threads have work. Measured.
MANY_COLUMNS = 2**15
#: Most cost of the elements that a thread takes side by side. All of it is compiled once for each
#: element: thirty functions of complex numbers eight times took 41 s, once 1.6 s. Where there is so
#: much to compute, the width of loads does not matter.
MOST_COST = 1024
#: Cost of a point from which on a kernel computes for longer than it reads and writes.
HEAVY = 128
#: Bytes of a thread's inputs beyond which 255 registers do not hold them all.
LATE_BYTES = 1000
#: Bytes of a thread's inputs that a quarter of the registers holds.
FEW_BYTES = 128
#: Most cost of an element of a vector that is read one by one: its code is there twice.
LOOSE_COST = 256
#: Least length of rows whose vectors are read one by one.
LOOSE_LEAST = 64
#: Places in each array that a reduction reads at each point, from which on it reads them one by
#: one, but each once.
OFTEN = 5
#: Points from which on a reduction takes those beyond the core by themselves.
MANY_STEPS = 2**14

# ---- elementwise

#: Most blocks per processor of kernels that compute for longer than they read and write, where
#: threads have fewer than VECTORS vectors. On an H200 black_scholes takes 2.32 ms so for 16 blocks
#: of an array and 2.40 ms for 64. With as many as other kernels have, it takes 2.38 and 2.54 ms.
HEAVY_WAVES = 8
#: Vectors of a thread, one after the other, from which on HEAVY_WAVES does not apply.
VECTORS = 8
#: Points from which a warp picks those that a mask selects, before it goes on to others.
PICKED = 1024

# ---- reduction

#: Blocks per processor that share the results of rows: so many that the last to finish is short.
ROW_WAVES = 64
#: Blocks per processor that share the results of columns.
COLUMN_WAVES = 3
#: Lanes of a block for each column.
LANES = 8
#: Blocks per processor that share results whose parts are long to merge, or counts in bins. The
#: variance of 256 MiB on an H100 takes 190 us with 64 and 136 us with 8.
FEWER_WAVES = 8
#: Most sums of weights that blocks leave for the last one to add up.
SUMS = 2**18
#: Places in a kernel that merge the parts of a block's threads, from which on they call a function.
#: Inlined each time, it takes long to compile (eight variances: 1 s).
MOST_INLINED = 8
#: Bytes of a part from which on a function merges it: for less, a call is more code than merging.
LEAST_CALLED = 32

# ---- body

#: Most constants that are arguments.
MOST_CONSTANTS = 128
#: Most elements between two views of an array whose common part is read once.
BESIDE = 8
#: Quotients, roots and logarithms of float32 from which on a vector is computed in stages.
STAGED = 2

# ---- window_schedule

#: Least threads of a multiprocessor that must have work.
SLIDING_THREADS = 2 * THREADS
#: Most nodes of an expression that windows reduce.
MOST_SLIDING_NODES = 100
#: Most statements of a kernel with sliding windows: they bound the compiler's time.
SLIDING_STATEMENTS = 2000
#: Results from which on windows are reduced in tiles.
LEAST_IN_PANES = 2**14

# ---- call_cost

#: Instructions of long functions in a kernel from which on these are called. Inlined at each use,
#: they take long to compile (10,000 instructions: a second).
MOST_INSTRUCTIONS = 3000

# ---- nodes

#: Most statements of a kernel: more take the compiler minutes.
MOST_STATEMENTS = 20_000
#: Most cases that are compared in pairs, to merge them.
MOST_CASES = 64
