"""Conjugate gradients on the matrix of Poisson's equation on a square, and a power iteration.

The matrix has five diagonals and is stored by rows in sparse blocks, one or more for each device. A
block has only the columns that its rows touch, so of the vector only the neighbours' edges go to
other devices. The graph of 25 rounds is built and planned once, by an `Iteration`. No number comes
to the host before their end.

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
    """Blocks of rows of the matrix of an n × n grid, with the vector parts that they read."""

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


def step_of(a):
    """One round of conjugate gradients with a matrix, as a function of its state."""

    def step(x, r, p, rr):
        q = a @ p
        alpha = rr / (p * q).sum()
        x, r = x + alpha * p, r - alpha * q
        before, rr = rr, (r * r).sum()
        return x, r, r + (rr / before) * p, rr

    return step


def first_state(b):
    """Solution, what is left, direction, and the square of what is left, at x = 0."""
    return dask.persist(b * 0, b, b * 1, (b * b).sum())


def conjugate_gradients(a, b, rounds):
    """The solution of a @ x = b after some rounds from zero, and the norm of what is left."""
    state, step = (b * 0, b, b, (b * b).sum()), step_of(a)
    for _ in range(rounds):
        state = step(*state)
    return state[0], da.sqrt(state[3])


def solve(a, b, tolerance, rounds=25):
    """The solution to a tolerance, and how many rounds it took: looked at after each 25."""
    state, count = first_state(b), 0
    run = gpuscheduler.Iteration(step_of(a), *state, rounds=rounds)
    while float(state[3].compute()) > (tolerance**2) * b.size:
        state, count = run(*state), count + rounds
    return state[0], count


def largest_eigenvalue(a, v, rounds):
    """The largest eigenvalue of a symmetric matrix, by power iteration from `v`."""
    for _ in range(rounds):
        w = a @ v
        v = w / da.sqrt((w * w).sum())
    return (v * (a @ v)).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=64, help="points along each side of the grid")
    parser.add_argument("--tolerance", type=float, default=1e-8)
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
        begin = time.perf_counter()
        x, rounds = solve(a, b, options.tolerance)
        middle = float(x[len(x) // 2 + options.n // 2].compute())
        seconds = time.perf_counter() - begin
        print(f"{rounds} rounds of CG in {seconds:.3f} s; in the middle: {middle:.3f}")
        left = float(da.linalg.norm(b - a @ x).compute())
        print(f"norm of what is left: {left:.2e}")
        eigenvalue = float(largest_eigenvalue(a, b, 50).compute())
        print(f"largest eigenvalue after 50 rounds: {eigenvalue:.4f} (8 at most)")


if __name__ == "__main__":
    main()
