"""Tasks become kernels: from a `Graph` to a `Graph`.

legality      Whether a traced task may become a kernel, and whether that pays.
task          Tasks that are kernels, and those that pick out what a mask selects.
horizontal    Horizontal fusion: programs that read the same become one.
source        What a task can compute for its readers, and what that costs.
random_draws  Random numbers that a task draws, by their position in an array.
recipe        What a task computes, apart from its data: parts, constants and words.
fuser         Fuse tasks into kernels: trace each structure once, inline producers, keep the …
"""
