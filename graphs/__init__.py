"""The reference workloads, one per file: for tests (small), benchmarks (large) and examples.

A module NAME offers

* `build(size, chunks=None, xp="numpy")`: the work as a lazy Dask array, whose chunks are made by
  the library `xp` from the start; `chunks` is anything Dask takes, None is a sensible choice and
  an int or `"auto"` divides only the axes that may be divided;
* `inputs(size, chunks, xp)` and `apply(*inputs)`, where there are inputs: `build` is the one after
  the other, and a benchmark can persist the inputs in between;
* `reference(size)`: what `build(size).compute()` gives, in plain NumPy, within `RTOL` and `ATOL`.
  Where the answer is an array, `reference(size, window)` is a part of it, made without the rest,
  so that a result too large for the host can be checked;
* `bytes_moved(size)`: the least that `apply` moves through device memory: each input read once,
  each output written once; and
* `flops(size)`: its floating-point operations, each elementary function counted as one;
* `SMALL` and `FULL`: the size for tests and the size for four GPUs of 141 GB.

Inputs depend on nothing but the size: not on the chunks, not on the library.
"""
