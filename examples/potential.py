"""The deepest point of a potential of four coordinates, by looking everywhere.

Two particles on a line in a double well with a ripple, bound to a frame that moves with them: rough
enough that methods that go downhill end in the wrong place. What depends on one coordinate only is
computed once for each of its values, not once per point.

    python examples/potential.py
    python examples/potential.py --n 1000     # a million million points
"""

import argparse
import time

import numpy as np

import gpuscheduler

SIDE = (-2.0, 2.0)


def potential(a, b, u, v):
    """For NumPy arrays or numbers, whichever it is given."""
    well = (a**2 - 1) ** 2 + (b**2 - 1) ** 2
    ripple = 0.15 * np.cos(9 * a) + 0.1 * np.sin(11 * b)
    frame = 0.5 * (u - a) ** 2 + 0.5 * (v + b) ** 2 + 0.2 * np.sin(5 * u) * np.cos(7 * v)
    return well + ripple + frame + 0.3 * a * b


def points(n):
    """Its values on n**4 points. Lazy."""
    return gpuscheduler.mesh(potential, [gpuscheduler.axis(*SIDE, n)] * 4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The minimum of a potential on a 4-D grid.")
    parser.add_argument("--n", type=int, default=60, help="points along each side (60)")
    options = parser.parse_args()
    with gpuscheduler.Scheduler() as scheduler:
        print(scheduler)
        z = points(options.n)
        began = time.perf_counter()
        at = int(z.argmin().compute())
        seconds = time.perf_counter() - began
    where = np.linspace(*SIDE, options.n)[list(np.unravel_index(at, z.shape))]
    print(f"lowest of {z.size:,} points: {potential(*where):.5f} at {np.round(where, 3).tolist()}")
    print(f"{seconds:.3g} s, the compiler included: {z.size / seconds:.3g} points/s")
