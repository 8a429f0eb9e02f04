"""Conjugate gradients on the matrix of Poisson's equation on a square, and a power iteration.

The matrix has five diagonals and is stored by rows in sparse blocks, one or more for each device. A
block has only the columns that its rows touch, so of the vector only the neighbours' edges go to
other devices. One graph has many rounds: it is planned once, and no number comes to the host before
its end.

`python examples/conjugate_gradients.py --n 512 --devices cuda`
"""

import argparse
import time
from itertools import pairwise

import dask
import dask.array as da
import numpy as np
import scipy.sparse
from dask.delayed import delayed

import gpuscheduler
from gpuscheduler import sparse


def poisson_rows(n, first, last, module):
    """Rows `first` to `last` of the grid as a CSR matrix over the unknowns that these touch.

    `module` is `scipy.sparse` or CuPy's `cupyx.scipy.sparse`, with the arrays to match.
    """
    xp = np if module is scipy.sparse else __import__("cupy")
    above, below = int(first > 0), int(last < n)
    rows, columns = (last - first) * n, (last - first + above + below) * n
    at = xp.arange(columns) % n
    data = xp.full((5, columns), -1.0)
    data[2] = 4
    data[1, at == n - 1] = 0  # the left neighbour of a first point is none
    data[3, at == 0] = 0
    offsets = [above * n + k for k in (-n, -1, 0, 1, n)]
    matrix = module.dia_matrix((data, offsets), shape=(rows, columns))
    return matrix.tocsr()


class Poisson:
    """The matrix of an n × n grid in row blocks, each with the part of a vector that it reads."""

    def __init__(self, n, blocks, module=scipy.sparse):
        edges = [n * i // blocks for i in range(blocks + 1)]
        empty = module.csr_matrix((0, 0))
        make = delayed(poisson_rows, pure=True)
        self.chunks = (tuple((b - a) * n for a, b in pairwise(edges)),)
        self.parts, self.reads = [], []
        for first, last in pairwise(edges):
            reads = slice(max(first - 1, 0) * n, min(last + 1, n) * n)
            shape = ((last - first) * n, reads.stop - reads.start)
            block = make(n, first, last, module)
            rows = da.from_delayed(block, shape, dtype="f8", meta=empty)
            self.parts.append(sparse.asarray(rows))
            self.reads.append(reads)

    def persist(self):
        """Make the blocks now, and keep them on the devices."""
        self.parts = list(dask.persist(*self.parts))

    def __matmul__(self, x):
        pairs = zip(self.parts, self.reads, strict=True)
        return da.concatenate([part @ x[reads].rechunk(-1) for part, reads in pairs])


def conjugate_gradients(a, b, rounds):
    """The solution of a @ x = b after some rounds from zero, and the norm of what is left."""
    x, r = b * 0, b
    p, rr = r, (r * r).sum()
    for _ in range(rounds):
        q = a @ p
        alpha = rr / (p * q).sum()
        x, r = x + alpha * p, r - alpha * q
        before, rr = rr, (r * r).sum()
        p = r + (rr / before) * p
    return x, da.sqrt(rr)


def largest_eigenvalue(a, v, rounds):
    """The largest eigenvalue of a symmetric matrix, by power iteration from `v`."""
    for _ in range(rounds):
        w = a @ v
        v = w / da.sqrt((w * w).sum())
    return (v * (a @ v)).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=64, help="points along each side of the grid")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--blocks", type=int, default=0, help="by default one for each device")
    parser.add_argument("--devices", default="cpu:2")
    options = parser.parse_args()
    with gpuscheduler.Scheduler(options.devices) as scheduler:
        module = scipy.sparse
        if options.devices.startswith("cuda"):
            import cupyx.scipy.sparse as module
        count = len(scheduler.hardware.machine.memory)
        a = Poisson(options.n, options.blocks or count, module)
        a.persist()
        b = da.ones(options.n**2, chunks=a.chunks).persist()
        x, left = conjugate_gradients(a, b, options.rounds)
        for run in ("planned and run", "run again"):
            begin = time.perf_counter()
            solution, norm = dask.compute(x, left)
            seconds = time.perf_counter() - begin
            print(f"{options.rounds} rounds of CG, {run}: {seconds:.3f} s")
        middle = float(solution[len(solution) // 2 + options.n // 2])
        print(f"norm of what is left: {float(norm):.2e}, in the middle: {middle:.3f}")
        eigenvalue = float(largest_eigenvalue(a, b, 50).compute())
        print(f"largest eigenvalue after 50 rounds: {eigenvalue:.4f} (8 at most)")


if __name__ == "__main__":
    main()
