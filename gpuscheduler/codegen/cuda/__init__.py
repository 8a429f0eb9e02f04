"""Kernels as CUDA C++ text.

tuning            Numbers that were chosen by measuring, each with its source.
call_cost         Which device functions are long enough to be called and not inlined.
device_library    The CUDA C++ functions that kernels call, and which of them a text needs.
skinny            CUDA text for products of small integers with few columns, and its grids.
window_tiles      Choose the tile of window results that a block of threads makes.
operations        CUDA C++ text of each operation, with NumPy's meaning.
nodes             A kernel's expressions as numbered nodes, and their costs.
loop_space        The axes of loops, with strides along them.
schedule          The schedule of a kernel: all that is decided before any text is written.
kernel_values     What a kernel computes at its points, and where its core lies.
vectorize         Vectorization: how many neighbouring elements a thread takes at a time.
window_schedule   Sliding windows: results of a thread that share reads, and tiles in shared memory.
work_division     How a kernel's work is divided among blocks and threads.
loop_order        The order of a kernel's loops, and all passes that make its schedule.
arguments         A kernel's arguments, and what its text declares beside its loops.
statements        Pieces of C++ text: declarations, blocks and loops.
coordinates       Where a point lies: its coordinates, its place in each array, and the boundary.
expressions       The text of a kernel's operations.
random_numbers    Statements that draw random numbers, one by one or in pairs.
stages            Vectors that are computed in stages: rare quotients are computed again.
body              Statements that load and compute a kernel's values at one point.
unaligned         Loops over vectors of inputs that do not begin at multiples of a vector.
elementwise       Kernels without reductions: threads go along the innermost axis.
tiles             Kernels that go in tiles of shared memory, and the loop over tiles.
selection         Kernels that pick out what a mask selects, in order.
accumulators      Statements that put values into accumulators and make results of them.
histogram         Histograms: each block counts, or adds up weights, in shared memory.
reduction         Kernels that reduce: threads and blocks along the reduced axes, or beside them.
window_reduction  Kernels that reduce windows which slide along a slow axis.
tiled_windows     Kernels that reduce windows in tiles, in shared memory.
scan              Scans: lanes of a warp go along a line, or each thread has lines of its own.
kernel            Generate a kernel's CUDA source and its arguments.
"""
