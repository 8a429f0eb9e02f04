"""A deep zoom into the Mandelbrot set, as a picture.

The function has a loop that ends where the orbit escapes: it is an ordinary Python function of two
numbers, compiled for whatever devices there are.

    python examples/mandelbrot.py mandelbrot.png
    python examples/mandelbrot.py mandelbrot.png --width 1920 --height 1080 --zoom 2e9
"""

import argparse
import math
import time

import gpuscheduler

CENTRE = (-0.743643887037158704752191506114774, 0.131825904205311970493132056385139)


def escape_time(y, x, most):
    """Steps until the orbit of x + iy leaves a circle, made smooth; -1 where it stays inside."""
    zx, zy, n = 0.0, 0.0, 0
    while n < most:
        xx, yy = zx * zx, zy * zy
        if xx + yy > 65536.0:
            return n + 1 - math.log2(math.log2(xx + yy) / 2)
        zx, zy = xx - yy + x, 2 * zx * zy + y
        n += 1
    return -1.0


def zoomed(width, height, zoom, most):
    """The field, (height, width) float64: rows from the top, as pictures have them. Lazy."""
    half = 2 / zoom
    x, y = CENTRE
    rows = gpuscheduler.axis(y + half * height / width, y - half * height / width, height)
    columns = gpuscheduler.axis(x - half, x + half, width)
    return gpuscheduler.mesh(escape_time, (rows, columns), args=(most,))


def draw(field, file):
    import numpy as np
    from matplotlib import colormaps, image

    inside = field < 0
    levels = np.sqrt(np.maximum(field - field[~inside].min(), 0)) if not inside.all() else field
    colours = colormaps["twilight_shifted"](levels / 4 % 1)
    colours[inside] = (0, 0, 0, 1)
    image.imsave(file, colours)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A zoom into the Mandelbrot set.")
    parser.add_argument("file", nargs="?", help="the picture, a PNG")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=400)
    parser.add_argument("--zoom", type=float, default=2e5)
    parser.add_argument("--most", type=int, default=2000, help="steps of an orbit")
    options = parser.parse_args()
    with gpuscheduler.Scheduler() as scheduler:
        print(scheduler)
        z = zoomed(options.width, options.height, options.zoom, options.most)
        began = time.perf_counter()
        field = z.to_backend("numpy").compute()
        seconds = time.perf_counter() - began
        print(f"{field.size:,} points in {seconds:.3g} s, the compiler included")
        print(f"{(field < 0).mean():.1%} of them stay inside for {options.most:,} steps")
    if options.file:
        draw(field, options.file)
