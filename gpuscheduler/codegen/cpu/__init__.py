"""Kernels on the CPU: evaluated by NumPy, or as LLVM loops.

tuning           Numbers that were chosen by measuring, each with its source.
njit             Numba's compiler for the loops of this package, with its cache on disk.
llvm_text        LLVM IR as text: types, values and the statements of one loop nest.
histogram_loops  Numba loops that find, count and weigh values in bins.
philox_loops     Numba loops that draw Philox random numbers.
histogram        Which bin values lie in: counts, weighted sums and indices, by compiled loops.
philox           Philox 4x32-10 random numbers by position, evaluated on the CPU.
llvm_code        Compiled loop nests: how they are kept, and what they are given.
llvm_jit         LLVM IR becomes machine code in memory, and objects in the disk cache.
llvm_map         LLVM loops that write the elements of a region in one pass.
llvm_reduce      LLVM loops that reduce expressions into accumulators.
accumulate       Accumulators of reductions and scans, evaluated with NumPy.
array_memory     Arrays as memory: their elements by address, and where views lie in it.
node_calls       The NumPy calls that compute the nodes of a region, and what NumPy cannot compute.
region           A region of a kernel: operations that are evaluated box by box with NumPy.
evaluate         Evaluate kernels with NumPy, in blocks that fit the cache, or with compiled LLVM …
"""
