"""Numbers of CPU kernels that were chosen by measuring, each with its source.

As in `codegen/cuda/tuning`: a row of `graphs/results.csv`, a limit, or the word that there is no
row. Constants of the compiled loops (`philox_loops`, `histogram_loops`) stand with them, for Numba
compiles them in.
"""

from __future__ import annotations

# ---- NumPy, in pieces

#: Bytes of one temporary: a few of them fit the cache that cores share. Smaller ones, which fit a
#: core's own cache, are no faster in one thread. In two threads they take up to four times as long,
#: for each NumPy call takes the interpreter's lock.
#: No row: measured with 2 cores and with 16, and not recorded.
BLOCK_BYTES = 4 * 1024 * 1024
#: Most points that are added one after the other, as NumPy does along all axes but the last. Rows
#: of no more points are reduced side by side.
#: No row: longer rows were measured to be faster one by one, which was not recorded.
FEW_POINTS = 16
#: Bytes of random numbers that are drawn for machine code at once: they stay in a core's cache.
#: No row.
DRAWN_BYTES = 2**20
#: Rows of fewer elements are drawn many at once: to begin one takes as long as to draw so many.
#: No row.
SHORT_ROW = 32

# ---- machine code

#: Points of a region from which on it is compiled: this takes 50 ms, once for each kernel on a
#: machine.
#: Row: 2026-11-23 "x.var()": 194 in pieces, 60 as machine code; of other sizes no row.
LEAST_POINTS = 2**17
#: A region with fewer than one in this many of a kernel's points is not compiled.
#: No row.
SMALL_PART = 64
#: Elements of a row that are computed before they are added up: they stay in the fastest cache.
#: No row.
PIECE = 1024
#: Columns that are added up side by side: their states stay in the fastest cache.
#: Row: 2026-11-23 "x.std(axis=0)": 209 in pieces, 80 as machine code; of other numbers no row.
COLUMNS = 512
#: Numbers that are added up side by side.
#: No row.
LANES = 32
#: Most bytes from one element of a row to the next. Beyond two lines of the cache NumPy is faster,
#: up to five times for columns of 2**k rows: it goes along the shorter steps.
#: No row.
APART = 128
#: Cores from which on functions of the C library are called. NumPy's take a half to a quarter of
#: the time in one thread, but many threads wait for each other at each call.
#: Row: 2026-11-23 "(sin(x) * x).sum() (NumPy's, below eight cores)".
MANY = 8
#: Most arrays, constants and results of one function.
#: No row.
MOST_POINTERS = 60
#: Most loops whose text is kept. Writing takes longer than many regions take to run.
#: No row.
MOST_WRITTEN = 4096
