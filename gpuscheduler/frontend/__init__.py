"""A Dask collection as a `Graph`: tasks, what they read, what is known of them.

block_ids      Give blocks that a function treats alike one position, so that they share a kernel.
captured       Parts of functions and containers in tasks, and whether anybody has changed these …
lines          Remember on which line of the user's code each Dask array was made.
chunk          A persisted chunk as Dask sees it, and who keeps its value.
task           The interface of this package's own kinds of tasks, and its defaults for Dask's …
compiled_task  Compile Dask's fused tasks into plain Python functions, shared by a layer's chunks.
linalg_shapes  Shapes that factorizations and stacks make of known shapes.
tiles          A block's position in its array, and the coordinates there.
task_node      What is known of one task of a graph, and views of one fact for all tasks.
graph          The types of a graph: tasks, what they read, and what is known of them.
index_lists    Index lists as a few slices, where they are regular.
rebuild        Rebuild tasks and functions with some parts substituted.
files          Blocks that are read from files, and arrays that blocks are stored in.
order          The order of tasks: depth first, by height.
transfers      Tasks that send host arrays and blocks of files to devices, or bring blocks to …
shapes         Estimate shapes and sizes of blocks that Dask does not say, from the blocks around …
linear_fusion  Linear fusion: each run of tasks with one reader becomes one step.
builder        Build a `Graph` from Dask's tasks: cull, order, and note what is known.
lowering       Lower a Dask graph or expression to a `Graph` for the planner.
"""
