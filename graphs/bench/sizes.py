"""Sizes of the workloads, by the number of GPUs; ours and those in JAX have the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Sizes = dict[str, Callable[[int], Any]]

#: Workloads on inputs that are on the GPUs already; most grow with the GPUs.
SIZES: Sizes = {
    "gauss_sum": lambda n: (n * 2**16, 2**15),
    "standardize": lambda n: (n * 2**16, 2**15),
    "black_scholes": lambda n: n * 2**29,
    "logistic_step": lambda n: (n * 2**23, 256),
    "heat_stencil": lambda n: (int(32768 * n**0.5) // 64 * 64, 8),
    "transpose_sum": lambda n: 65536 if n > 1 else 32768,
    "matmul": lambda n: 32768,
    "tall_skinny_svd": lambda n: (n * 2**23, 128),
}
#: Rows of chunks, where the default of the workload is not the best.
CHUNKS = {"gauss_sum": 8192, "standardize": 8192, "transpose_sum": 4096}
#: Workloads that make their own data: 10¹⁰ points, and 2 TB.
GENERATED = {"haversine_mesh": 100_000, "random_slice_sum": 500_000}
#: The same on the stand-in and on CPUs.
SMALL_SIZES: Sizes = {
    "gauss_sum": lambda n: (n * 64, 32),
    "standardize": lambda n: (n * 64, 32),
    "black_scholes": lambda n: n * 512,
    "heat_stencil": lambda n: (32 * n, 3),
    "transpose_sum": lambda n: 64,
    "matmul": lambda n: 64,
}
SMALL_GENERATED = {"haversine_mesh": 200, "random_slice_sum": 200}
