"""A kernel as CUDA text, as LLVM, or evaluated by NumPy; no device.

cpu/   Kernels on the CPU: evaluated by NumPy, or as LLVM loops.
cuda/  Kernels as CUDA C++ text.
"""
