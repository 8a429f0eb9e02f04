"""A Python function as IR: run on arrays without values, or compiled by Numba.

abstract        Abstract values of a trace: what it knows of arrays, mostly without their elements.
bytecode        What a function's bytecode reads, calls and writes.
registry        The functions that a trace knows, and the functions that replace them.
purity          Purity analysis: which functions may be run on arrays without values.
context         The trace context: one run of a function on arrays without values.
numba_cpu       Compile a Python function of numbers for the CPU with Numba.
array           Traced arrays: expressions over a shape, which behave as NumPy's arrays do.
elementwise     Element-wise operations on traced arrays: ufuncs, `where`, `clip`, `round`, …
reduce          Reductions and scans of traced arrays.
compressed      Elements that a mask selects: `values[mask]`, of which the trace does not know …
indexing        Reading and writing elements of traced arrays: slices, masks and assignment.
numba_cuda      Compile a Python function of numbers to device code and link it into a kernel.
lower           Lower a trace to kernels: an `expr.Program`.
trace           Trace a Python function: run it once on arrays without values.
point_cache     Expressions of functions of points that were traced before.
point_function  Trace the function of a mesh at one point, or compile it with Numba.
functions/      What functions of NumPy, SciPy, Dask and Python do to arrays without values.
"""
