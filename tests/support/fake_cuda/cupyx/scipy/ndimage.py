"""Filters of `scipy.ndimage` for the stand-in's arrays, with CuPy's arguments."""

import numpy as np
import scipy.ndimage as _scipy
from cupy import _called, asarray, ndarray

EDGES = {"mode": "reflect", "cval": 0.0}
#: The arguments behind the input, and their defaults.
ARGUMENTS = {
    "gaussian_filter": {
        "sigma": None, "order": 0, "output": None, **EDGES, "truncate": 4.0, "radius": None,
        "axes": None,
    },
    "uniform_filter": {"size": 3, "output": None, **EDGES, "origin": 0, "axes": None},
    "convolve": {"weights": None, "output": None, **EDGES, "origin": 0, "axes": None},
    "correlate": {"weights": None, "output": None, **EDGES, "origin": 0, "axes": None},
    "convolve1d": {"weights": None, "axis": -1, "output": None, **EDGES, "origin": 0},
    "correlate1d": {"weights": None, "axis": -1, "output": None, **EDGES, "origin": 0},
    "maximum_filter": {
        "size": None, "footprint": None, "output": None, **EDGES, "origin": 0, "axes": None,
    },
    "minimum_filter": {
        "size": None, "footprint": None, "output": None, **EDGES, "origin": 0, "axes": None,
    },
    "median_filter": {
        "size": None, "footprint": None, "output": None, **EDGES, "origin": 0, "axes": None,
    },
    "sobel": {"axis": -1, "output": None, **EDGES},
    "prewitt": {"axis": -1, "output": None, **EDGES},
    "laplace": {"output": None, **EDGES, "axes": None},
}  # fmt: skip


def _filter(name):
    known = ARGUMENTS[name]

    def filtered(input, *args, **kwargs):
        given = {**dict(zip(known, args, strict=False)), **kwargs}
        if unknown := given.keys() - known.keys():
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown.pop()!r}")
        if "weights" in given and not isinstance(given["weights"], ndarray):
            raise AttributeError("'numpy.ndarray' object has no attribute 'data.ptr'")
        x = asarray(input)
        if not isinstance(input, ndarray):
            raise TypeError(f"Unsupported type {type(input)}")

        def run(a, weights=None):
            more = {} if weights is None else {"weights": weights}
            rest = {k: v for k, v in given.items() if k != "weights"}
            return np.asarray(getattr(_scipy, name)(a, **more, **rest))

        return _called(run, (x, *([given["weights"]] if "weights" in given else [])), {})

    filtered.__name__ = name
    return filtered


for _name in ARGUMENTS:
    globals()[_name] = _filter(_name)
