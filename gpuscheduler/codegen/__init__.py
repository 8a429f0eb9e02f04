"""A kernel as CUDA text, as LLVM, or evaluated by NumPy; no device.

cpu/          Kernels on the CPU: evaluated by NumPy, or as LLVM loops.
cuda/         Kernels as CUDA C++ text.
random_block  The chunk function of arrays of random numbers that are drawn by position.
"""
