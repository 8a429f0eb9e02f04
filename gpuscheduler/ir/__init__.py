"""What a kernel computes, as data; rewrites of it.

bins           The bins of a histogram, as NumPy defines them.
cost           What operations cost on a GPU, in units of one multiplication.
expr           The IR: expressions, kernels and programs.
limits         Sizes at which sliding windows and groups of tasks change their schedule.
complex_parts  Rewrite complex numbers by their parts, where that is less work on a grid.
random         Random numbers as a function of a key and a position (Philox 4x32-10).
regions        Boxes of the iteration space in which choices by position are known.
rewrite        Rewrites of expressions: other views, other input numbers.
split_scans    Split scans of few long lines into parts that run in parallel.
hoist          Loop-invariant code motion: what depends on one axis moves to a small kernel of its …
loop_tiling    Loop tiling for stencils along a slow axis (2.5-D blocking).
"""
