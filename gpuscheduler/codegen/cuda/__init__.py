"""Kernels as CUDA C++ text.

call_cost         Which device functions are long enough to be called and not inlined.
device_library    The CUDA C++ functions that kernels call, and which of them a text needs.
skinny            CUDA text for products of small integers with few columns, and its grids.
window_tiles      Choose the tile of window results that a block of threads makes.
operations        CUDA C++ text of each operation, with NumPy's meaning.
nodes             A kernel's expressions as numbered nodes, and their costs.
loop_space        The loops of a kernel and the strides of its inputs along them.
vectorize         Vectorization: how many neighbouring elements a thread takes at a time.
window_schedule   Sliding windows: results of a thread that share reads, and tiles in shared memory.
schedule          The schedule of a kernel: loop order, vector width, tiles and windows.
body              Statements that load and compute a kernel's values at one point.
elementwise       Kernels without reductions: threads along the innermost axis, or in tiles.
reduction         Kernels that reduce: threads and blocks along the reduced axes, or beside them.
window_reduction  Kernels that reduce sliding windows, whose common part threads share.
kernel            Generate a kernel's CUDA source and its arguments.
"""
