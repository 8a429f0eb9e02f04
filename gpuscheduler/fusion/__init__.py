"""Tasks become kernels: from a `Graph` to a `Graph`.

legality         Whether a traced task may become a kernel, and whether that pays.
task             Tasks that are kernels, and tasks that pick out what a mask selects.
horizontal       Horizontal fusion: programs that read the same become one.
source           What a task can compute for its readers, and what that costs.
random_draws     Random numbers that a task draws, by their position in an array.
reads            What functions and constants of tasks read, and whether a trace may rely on that.
recipe           What a task computes, apart from its data: parts, constants and words.
captured_inputs  Arrays that functions capture become inputs of kernel tasks.
inline           Inlining: tasks disappear into their readers, which compute the values …
compress         Tasks that select by a mask: kernels that count and write what it selects.
task_trace       Trace a task on symbolic arrays, and judge whether the program is worth a kernel.
fuser            Fuse tasks into kernels: trace each structure once, inline producers, keep …
library_task     Tasks that a library of GPUs computes: sorts, quantiles, FFTs and filters.
portable         Find tasks of the array library, which take arrays of NumPy and of GPUs alike.
residency        Keep NumPy's arrays on GPUs between kernels; functions that are called get them …
"""
