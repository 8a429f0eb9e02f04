"""Riemann's zeta function over the critical strip: where is it small, and how large does it get?

Computed by the alternating series with P. Borwein's coefficients ("An efficient algorithm for the
Riemann zeta function", 2000, algorithm 2): 30 terms give 12 digits up to height 40. Each term is a
complex power, exp(-sigma log k) times the cosine and the sine of t log k: what depends on one axis
is computed once per row or column, and what is left for each point are products and sums.

    python examples/zeta.py zeta.png
    python examples/zeta.py --n 50000     # 2.5 thousand million points; none is stored
"""

import argparse
import cmath
import math
import time

import gpuscheduler

SIGMA, HEIGHT = (0.1, 2.0), (1.0, 40.0)
TERMS = 30


def coefficients(n):
    """(d_k - d_n) (-1)**k / d_n for k < n, which weight the terms."""
    d, total = [], 0
    for i in range(n + 1):
        total += (
            n * math.factorial(n + i - 1) * 4**i // (math.factorial(n - i) * math.factorial(2 * i))
        )
        d.append(total)
    return tuple((-1) ** k * (d[k] - d[n]) / d[n] for k in range(n))


WEIGHTS = coefficients(TERMS)


def size_of_zeta(sigma, t):
    """|ζ(σ + it)|."""
    s = complex(sigma, t)
    total = 0j
    for k in range(TERMS):
        total += WEIGHTS[k] * cmath.exp(-s * math.log(k + 1.0))
    return abs(-total / (1 - cmath.exp((1 - s) * math.log(2.0))))


def strip(n):
    """|ζ| on n x n points: rows are heights, columns real parts. Lazy."""
    heights, parts = gpuscheduler.axis(*HEIGHT, n), gpuscheduler.axis(*SIGMA, n)
    return gpuscheduler.mesh(lambda t, sigma: size_of_zeta(sigma, t), (heights, parts))


def draw(field, file):
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 7), layout="constrained")
    plot = figure.add_subplot(xlabel="σ", ylabel="t")
    plot.set_title("log |ζ(σ + it)|")
    extent = (*SIGMA, *HEIGHT)
    image = plot.imshow(
        np.log(field), origin="lower", extent=extent, aspect="auto", vmin=-3, vmax=1.5
    )
    plot.axvline(0.5, color="white", linewidth=0.7)
    figure.colorbar(image, ax=plot)
    figure.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The zeta function over the critical strip.")
    parser.add_argument("file", nargs="?", help="draw it into this PNG")
    parser.add_argument("--n", type=int, default=400, help="points along each side (400)")
    options = parser.parse_args()
    with gpuscheduler.Scheduler() as scheduler:
        print(scheduler)
        z = strip(options.n)
        began = time.perf_counter()
        at = int(z.argmin().compute())
        seconds = time.perf_counter() - began
        row, column = divmod(at, options.n)
        t = HEIGHT[0] + row * (HEIGHT[1] - HEIGHT[0]) / (options.n - 1)
        sigma = SIGMA[0] + column * (SIGMA[1] - SIGMA[0]) / (options.n - 1)
        print(f"smallest of {z.size:,} points at {sigma:.4f} + {t:.4f}i, in {seconds:.3g} s")
        print("known zeros: 0.5 + 14.1347i, 21.0220i, 25.0109i, 30.4249i, 32.9351i, 37.5862i")
        if options.file:
            step = max(1, options.n // 800)
            draw(z[::step, ::step].to_backend("numpy").compute(), options.file)
