"""The deepest point of a potential of four coordinates, by looking everywhere.

Two particles on a line in a double well with a ripple, bound to a frame that moves with them: rough
enough that methods that go downhill end in the wrong place. What depends on one coordinate only is
computed once for each of its values, not once per point.

    python examples/potential.py potential.png
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


def draw(lowest, file):
    """The lowest value for each place of the two particles, wherever the frame is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    plot = figure.add_subplot(xlabel="a", ylabel="b")
    plot.set_title("lowest potential of all u and v")
    image = plot.imshow(lowest.T, origin="lower", extent=(*SIDE, *SIDE), vmax=2.5)
    plot.contour(lowest.T, extent=(*SIDE, *SIDE), levels=range(8), colors="white", linewidths=0.5)
    figure.colorbar(image, ax=plot)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The minimum of a potential on a 4-D grid.")
    parser.add_argument("file", nargs="?", help="draw two of its coordinates into this PNG")
    parser.add_argument("--n", type=int, default=60, help="points along each side (60)")
    options = parser.parse_args()
    with gpuscheduler.Scheduler() as scheduler:
        print(scheduler)
        z = points(options.n)
        began = time.perf_counter()
        at = int(z.argmin().compute())
        seconds = time.perf_counter() - began
        if options.file:
            draw(z.min(axis=(2, 3)).to_backend("numpy").compute(), options.file)
    where = np.linspace(*SIDE, options.n)[list(np.unravel_index(at, z.shape))]
    print(f"lowest of {z.size:,} points: {potential(*where):.5f} at {np.round(where, 3).tolist()}")
    print(f"{seconds:.3g} s, the compiler included: {z.size / seconds:.3g} points/s")
