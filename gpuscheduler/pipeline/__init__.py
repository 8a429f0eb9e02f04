"""From a collection to its values: plan once, cache the plan, run it.

comparable     What may be compared of a graph: trust in functions, data, and words.
columns        Words for layers with a task for each block, column by column.
fingerprint    What makes two computations alike: words of their tasks and data.
block_qr       Have GPUs factor the tall blocks of Dask's `qr` and `svd` by Cholesky factors.
tall_layers    Factor the tall matrices of Dask's `qr` and `svd` by one sum of Gram matrices.
sides          Decide which tasks of NumPy's arrays run on GPUs and which on the host, group …
reorder        Reorder steps where devices would wait for each other.
compile        From a graph to a plan: the passes in their order.
plan_entry     A plan as the plan cache keeps it, and beside it what its runs have learned.
template       Plan templates: plans without names and data, reused for alike collections.
cache          The plan cache: collections that were computed before are not planned again.
gpu_libraries  Find out whether a computation names a GPU library, or pins a task to a device.
choice         Choose whether GPUs or the host's threads compute NumPy's arrays, and remember …
number_errors  Find out whether NumPy raises, calls or logs on floating-point errors: no kernel …
request        What a caller asks of `get`: Dask's arguments, completed from Dask's configuration.
persist        Persist collections: rebuild each from the chunks that a scheduler has kept.
planner        Find the plan of a computation in the plan cache, or make it.
execute        Run a plan on leased devices: the fastest way that memory allows.
results        Hand the results of a run to the caller: as values, or as chunks that stay.
numpy_arrays   Compute NumPy's arrays on GPUs, where that is chosen, and tell people where it …
summary        Show a scheduler in one line, and as a table for notebooks.
"""
