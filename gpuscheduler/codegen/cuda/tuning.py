"""Numbers that were chosen by measuring: widths, unrolling, sizes of blocks and tiles, limits.

`python -m graphs.bench heuristics` measures special cases beside kernels without them.

Each number says where it comes from: a row of `graphs/results.csv`, by its date and workload, with
what was measured; a limit of the hardware or the language; or "no row" where nobody has recorded
one. Times are milliseconds unless they say otherwise. `tests/codegen/test_tuning.py` looks the rows
up.
"""

from __future__ import annotations

# ---- blocks of threads

#: Threads of a block.
#: No row.
THREADS = 256
#: Blocks per multiprocessor: so many that the end of the last ones does not matter.
#: Row: 2026-11-28 "x + y, 16 blocks": 1.540 with 4, 1.481 with 64, 1.470 with 128; "16 blocks" of
#: black_scholes: 2.312 with 8, 2.337 with 64, 2.384 with 128.
WAVES = 64
#: Blocks per multiprocessor where each has a table in shared memory.
#: No row.
SHARED_WAVES = 32
#: Blocks per multiprocessor that share the results of rows, or counts in bins.
#: Row: 2026-11-28 "gauss_sum, 4 loads": 2.765 with 8, 2.722 with 64; "gauss_sum, one block of 256
#: MiB": 0.0684 with 8, 0.0765 with 64; "variance, one block of 256 MiB": 0.0747 and 0.1231.
ROW_WAVES = 8
#: Blocks per multiprocessor that share the results of columns.
#: No row.
COLUMN_WAVES = 3
#: Most part of all blocks that may be missing when the last ones of many columns run.
#: No row.
EMPTY_PART = 0.05
#: Lanes of a block for each column.
#: No row.
LANES = 8
#: Steps along a row from which on a whole block, not a warp, goes along it.
#: No row.
WIDE_STEPS = 256
#: Steps of a row for each lane, where several rows lie in a warp.
#: No row.
LANE_STEPS = 4
#: Steps of each lane of a column, at least, where blocks share it.
#: No row.
COLUMN_STEPS = 8
#: Points from which a warp picks those that a mask selects, before it goes on to others.
#: Row: 2026-11-27 "flatnonzero(x > .99)": 13.5 before, 5.1 anew. Other numbers have no row.
PICKED = 1024

# ---- vectors: how many elements a thread takes at a time

#: Bytes of a load or a store.
#: A limit of the hardware.
LOAD_BYTES = 16
#: Most elements of a vector.
#: No row.
MOST_WIDTH = 8
#: Vectors that a thread has under way at a time, and where columns or lines are narrow.
#: Row: 2026-11-28 "gauss_sum, 4 loads": 2.722, and 2.703 with 8. For narrow columns no row.
TIMES, DEEP_TIMES = 4, 8
#: Most bytes that a thread has under way, and for MANY_COLUMNS.
#: No row.
FLIGHT_BYTES, MANY_FLIGHT_BYTES = 64, 128
#: Most cost of the elements that a thread has under way.
#: No row.
FLIGHT_COST = 512
#: Blocks that a multiprocessor has room for where columns are reduced: fewer loads are under way
#: otherwise. For MANY_COLUMNS, whose threads need more registers.
#: No row.
COLUMN_BLOCKS, MANY_COLUMN_BLOCKS = 3, 2
#: Most columns of a thread with all that a mean and a variance need, and for MANY_COLUMNS.
#: No row.
MOMENT_WIDTH, MANY_MOMENT_WIDTH = 2, 4
#: Columns from which on a thread may have four of them with all that a mean and a variance need.
#: With fewer columns too few threads have work.
#: Row: 2026-11-28 "variance of 65,536 columns, one block of 256 MiB": 0.1113, and 0.1036 without.
#: It stays: the other kernel spills registers with 32,768 columns, and "standardize" was not timed.
MANY_COLUMNS = 2**15
#: Cost of a point from which on MANY_COLUMNS does not apply.
#: No row.
MANY_COST = 16
#: Most cost of the elements that a thread takes side by side. All of it is compiled once for each
#: element. Where there is so much to compute, the width of loads does not matter.
#: No row: a commit of 2026-11-24 has 41 s and 1.6 s to compile thirty functions of complex numbers.
MOST_COST = 1024
#: Most instructions of a kernel's long functions that are inlined, of all elements.
#: Row: 2026-11-28 "complex128 power": 23 s before, 0.56 s now, to compile 90 of them.
MOST_INSTRUCTIONS = 3000
#: Most elements of a vector for which a compiled Python function is called.
#: No row.
CALLED_WIDTH = 4
#: Quotients, roots and logarithms of float32 from which on a vector is computed in stages.
#: No row of this number alone; black_scholes has five, logistic_step one.
STAGED = 2

# ---- inputs that are loaded in other ways

#: Bytes of a thread's inputs beyond which 255 registers do not hold them all.
#: Row: 2026-11-24 "the same, tiles of 5000²": 114.7 before, 91.8 now.
LATE_BYTES = 1000
#: Bytes of columns that a multiprocessor's cache holds beside everything else.
#: Row: 2026-11-24 "the same, tiles of 5000²": 174.1 before, 114.7 now.
KEPT_BYTES = 96 * 1024
#: Least columns of a part that a warp goes along at a time.
#: No row.
LEAST_COLUMNS = 64
#: Least length of rows whose vectors are read one by one.
#: Row: 2026-11-25 "one heat step": 5.8 before, 3.5 with such vectors; of other lengths no row.
LOOSE_LEAST = 64
#: Most cost of an element of a vector that is read one by one: its code is there twice.
#: No row.
LOOSE_COST = 256
#: Most elements of a vector that is read one by one.
#: No row.
LOOSE_WIDTH = 4
#: Most elements between two views of an array whose common part is read once.
#: Row: 2026-11-25 "nine points, 16384² float64": 4.3 before, 2.9 now; of other numbers no row.
BESIDE = 8
#: Places in each array that a reduction reads at each point, from which on it reads them one by
#: one, but each once.
#: No row: a commit of 2026-11-25.
OFTEN = 5
#: Points from which on a reduction takes those beyond the core by themselves.
#: Row: 2026-11-25 "..., sum of squares": 8.9 before, 4.2 now; of other numbers no row.
MANY_STEPS = 2**14

# ---- tiles in shared memory

#: Bytes of shared memory that a block has without asking for more.
#: A limit of the hardware.
MOST_SHARED = 48 * 1024
#: Bytes of shared memory for tiles.
#: No row.
TILES = 40 * 1024
#: Least length of an axis that tiles of 32 by 32 are turned along.
#: No row.
TURNED_LENGTH = 16
#: Most elements between neighbours along the axis that is turned, and least along the other.
#: No row.
TURNED_NEAR, TURNED_FAR = 4, 8
#: Most bins of a histogram whose counters fit in TILES.
#: Row: 2026-11-27 "... of 1000 bins; of 5": 6.1, 4.4 anew.
MOST_BINS = TILES // 4
#: Counters of a block, where a histogram has few bins.
#: No row.
COUNTERS = 4096
#: Most copies of a histogram's counters in a block: two to this.
#: No row.
MOST_COPIES = 5
#: Most bins of a histogram of weights whose sums fit in TILES.
#: Row: 2026-11-27 "histogram2d, 50 × 50 bins, weights": 4.9 again.
MOST_WEIGHTS = TILES // 8
#: Most bins of a histogram of weights that has a table for each warp.
#: Row: 2026-11-27 "histogram(x, 100, (0, 1), weights=w)": 92 before, 2.6 again.
FEW_WEIGHTS = 2048
#: Most sums of weights that blocks leave for the last one to add up.
#: No row.
SUMS = 2**18

# ---- sliding windows

#: Least threads of a multiprocessor that must have work.
#: Row: 2026-11-25 "moving mean of 31, 512 × 2048 × 1024, along an axis in blocks of 64":
#: 78.9 before, 10.0 with sliding windows; of other numbers no row.
SLIDING_THREADS = 2 * THREADS
#: Most nodes of an expression that windows reduce.
#: No row.
MOST_SLIDING_NODES = 100
#: Most statements of a kernel with sliding windows: they bound the compiler's time.
#: No row.
SLIDING_STATEMENTS = 2000
#: Results from which on windows are reduced in tiles.
#: Row: 2026-11-26 "7 × 7": 12.4 before, 4.7 in tiles; of other numbers no row.
LEAST_IN_PANES = 2**14
#: Longest window whose elements may all be under way at once.
#: No row: a commit of 2026-11-25 says that a sum of nine took longer so than one by one.
MOST_AT_ONCE = 8
#: Results of a thread down a column of a column tile, without and with moments. Moments need more
#: registers.
#: Row: 2026-11-26 "15 × 15": 16.0 before, 6.0 in column tiles; of other numbers no row.
TALL = {False: (12, 8, 6, 4, 2), True: (4, 2)}
#: Results of a thread along a row of a column tile, without and with moments.
#: Row: 2026-11-26 "15 × 15", as TALL.
SIDE = {False: (8, 4, 2), True: (4, 2)}
#: Most words of a thread for the steps of windows that it holds at once.
#: No row.
BOX_WORDS = 48
#: Most words of a thread for the parts of its results that they do not share.
#: No row.
SLIDING_WORDS = 128

# ---- the compiler's time, and the language

#: Points and elements that 32 bits count, with room for some steps more.
#: A limit of the language.
SMALL = 2**31 - 2**27
#: Most constants that are arguments.
#: No row: more than a kernel's arguments hold beside its pointers and strides.
MOST_CONSTANTS = 128
#: Most statements of a kernel: more take the compiler minutes.
#: No row.
MOST_STATEMENTS = 20_000
#: Most cases that are compared in pairs, to merge them.
#: No row.
MOST_CASES = 64
#: Places in a kernel that merge the parts of a block's threads, from which on they call a function.
#: Inlined each time, it takes long to compile.
#: No row: a commit of 2026-11-27 has 1 s for eight variances.
MOST_INLINED = 8
#: Bytes of a part from which on a function merges it: for less, a call is more code than merging.
#: No row.
LEAST_CALLED = 32
