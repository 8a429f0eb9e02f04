"""Where each step of a graph runs, and what it should cost.

machine         The hardware as numbers: a test can invent any machine.
placement       Decide which device runs which task.
origins         Whose code a step is: the user's layer, function and line.
plan            The plan: each step's place, inputs and estimates, in order.
step_table      What the steps of a plan are, without their tasks and values.
batching        Batch alike programs on one device into one launch.
build           Make a plan of a graph: place, size and time of each step.
skinny          Multiply small integers with few columns of floating-point numbers.
matmul          Sums of products of matrices as one task, added up by cuBLAS in place.
min_cut         Divide groups of tasks between GPUs and the host at the least cost: a minimum cut.
library_cost    Predict what a call of a library's function takes on the host and on a GPU.
host_cost       Predict what kernels and copies take on the host's threads, beside what GPUs take.
working_memory  Predict working memory of tasks from earlier runs, of this process and of others.
"""
