"""The usual expressions of NumPy's blocks, of dask.array and xarray, that `usual` times."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import dask
import dask.array as da
import numpy as np

Table = dict[str, Callable[[], Any]]


# ---- data


def arrays(mib: float) -> SimpleNamespace:
    """Arrays of NumPy blocks in memory, most of `mib` MiB."""
    rng = np.random.default_rng(0)
    side = max(64, int((mib * 2**17) ** 0.5) // 64 * 64)
    chunk = side // 4
    a = rng.standard_normal((side, side))
    b = rng.random((side, side)) + 0.5
    whole = rng.integers(0, 1000, (side, side))
    n = side * side
    d = SimpleNamespace(side=side, chunk=chunk, n=n, piece=n // 8)

    def cut(array: Any, chunks: Any = chunk) -> Any:
        return da.from_array(array, chunks=chunks, name=False)

    d.cut = cut
    d.a, d.b = cut(a), cut(b)
    d.f4, d.i8, d.i4 = cut(a.astype("f4")), cut(whole), cut(whole.astype("i4"))
    d.u1 = cut((whole % 256).astype("u1"))
    d.mask = cut(a > 0.5)
    holes = a.copy()
    holes[a > 2] = np.nan
    d.holes = cut(holes)
    d.rows = cut(a, (side // 8, side))
    d.c16 = cut(a[: side // 2] + 1j * b[: side // 2])
    d.v, d.w = cut(a.reshape(-1), d.piece), cut(b.reshape(-1), d.piece)
    d.ints, d.small = cut(whole.reshape(-1), d.piece), cut(whole.reshape(-1) % 50, d.piece)
    d.v4 = cut(a.reshape(-1).astype("f4"), d.piece)
    d.row, d.column = cut(a[0]), cut(a[:, :1], (chunk, 1))
    third = n // 24 * 8
    d.points = cut(a.reshape(-1)[: 3 * third].reshape(-1, 3), (third // 8, 3))
    d.pairs = cut(a.reshape(-1, 2), (n // 16, 2))
    d.octets = cut(a.reshape(-1, 8), (n // 64, 8))
    d.narrow = cut(a.reshape(-1, 32), (n // 256, 32))
    deep = (32, side // 8, side // 4)
    d.cube = cut(a.reshape(-1)[: int(np.prod(deep))].reshape(deep), (8, side // 16, side // 4))
    d.image = cut(b.astype("f4").reshape(-1)[: n // 3 * 3].reshape(-1, 3), (n // 24, 3))
    d.table = rng.random(1000)
    d.list = np.sort(rng.choice(side, side // 8, replace=False))
    d.shuffled = rng.permutation(side)
    d.uneven = np.sort(rng.standard_normal(60))
    d.whole_edges = np.unique(np.geomspace(1, 1000, 60).astype(int))
    return d


# ---- expressions


def creation(d: Any) -> Table:
    n, c = (d.side, d.side), d.chunk
    return {
        "ones": lambda: da.ones(n, chunks=c),
        "zeros + 1": lambda: da.zeros(n, chunks=c) + 1,
        "full f4": lambda: da.full(n, 2.5, chunks=c, dtype="f4"),
        "arange": lambda: da.arange(d.n, chunks=d.piece),
        "arange f8 sum": lambda: da.arange(d.n, chunks=d.piece, dtype="f8").sum(),
        "linspace": lambda: da.linspace(0, 1, d.n, chunks=d.piece),
        "eye": lambda: da.eye(d.side, chunks=c),
        "indices": lambda: da.indices(n, chunks=c)[0],
        "meshgrid hypot": lambda: da.hypot(*da.meshgrid(*[da.arange(d.side, chunks=c)] * 2)),
        "fromfunction": lambda: da.fromfunction(lambda i, j: i * 2.0 + j, shape=n, chunks=c),
        "tri": lambda: da.tri(d.side, chunks=c),
        "diag of vector": lambda: da.diag(d.row),
        "ones_like": lambda: da.ones_like(d.a),
        "copy": lambda: d.a.copy(),
    }


def elementwise(d: Any) -> Table:
    a, b, i = d.a, d.b, d.i8
    return {
        "a + 1": lambda: a + 1,
        "a + b": lambda: a + b,
        "f4 * 2 + 1": lambda: d.f4 * 2 + 1,
        "a / b": lambda: a / b,
        "a ** 2": lambda: a**2,
        "a ** 3": lambda: a**3,
        "b ** 0.5": lambda: b**0.5,
        "b ** 1.7": lambda: b**1.7,
        "b ** a": lambda: b**a,
        "-abs": lambda: -abs(a),
        "sqrt": lambda: da.sqrt(b),
        "exp": lambda: da.exp(a),
        "exp f4": lambda: da.exp(d.f4),
        "log": lambda: da.log(b),
        "log1p(exp)": lambda: da.log1p(da.exp(a)),
        "sin": lambda: da.sin(a),
        "sin f4": lambda: da.sin(d.f4),
        "sin ** 2 + cos ** 2": lambda: da.sin(a) ** 2 + da.cos(a) ** 2,
        "tanh": lambda: da.tanh(a),
        "arctan2": lambda: da.arctan2(a, b),
        "hypot": lambda: da.hypot(a, b),
        "sigmoid": lambda: 1 / (1 + da.exp(-a)),
        "gaussian": lambda: da.exp(-0.5 * ((a - 0.1) / 2) ** 2),
        "standardize": lambda: (a - a.mean(axis=0)) / a.std(axis=0),
        "polynomial": lambda: 3 * a**3 + 2 * a**2 - a + 4,
        "where": lambda: da.where(a > 0, a, 0),
        "where of three": lambda: da.where(a > 1, 1, da.where(a < -1, -1, a)),
        "clip": lambda: da.clip(a, -1, 1),
        "clip ints": lambda: da.clip(i, 10, 500),
        "maximum": lambda: da.maximum(a, b),
        "round 2": lambda: da.round(a, 2),
        "floor": lambda: da.floor(a),
        "rint astype int": lambda: da.rint(a).astype(int),
        "astype f4": lambda: a.astype("f4"),
        "astype i4": lambda: a.astype("i4"),
        "u1 astype f4 / 255": lambda: d.u1.astype("f4") / 255,
        "u1 + u1": lambda: d.u1 + d.u1,
        "isnan": lambda: da.isnan(d.holes),
        "nan_to_num": lambda: da.nan_to_num(d.holes),
        "comparison": lambda: (a > 0) & (b < 1),
        "logical_or": lambda: da.logical_or(a > 1, a < -1),
        "i8 + 1": lambda: i + 1,
        "i8 // 7": lambda: i // 7,
        "i8 % 7": lambda: i % 7,
        "i4 * i4": lambda: d.i4 * d.i4,
        "i8 & 255": lambda: i & 255,
        "i8 << 2": lambda: i << 2,
        "a // 0.3": lambda: a // 0.3,
        "a % 0.3": lambda: a % 0.3,
        "sign": lambda: da.sign(a),
        "complex square": lambda: d.c16 * d.c16,
        "complex abs": lambda: abs(d.c16),
        "complex exp": lambda: da.exp(d.c16),
        "angle": lambda: da.angle(d.c16),
        "a + row": lambda: a + d.row,
        "a * column": lambda: a * d.column,
        "points - point": lambda: d.points - np.array([1.0, 2.0, 3.0]),
        "image * weights": lambda: d.image * np.array([0.3, 0.6, 0.1], "f4"),
        "digitize uneven": lambda: da.digitize(d.v, d.uneven),
        "searchsorted": lambda: da.searchsorted(da.from_array(d.uneven, chunks=-1), d.v),
        "isin": lambda: da.isin(i, [1, 5, 100, 700]),
        "map_blocks sqrt": lambda: b.map_blocks(np.sqrt),
        "map_blocks of a chain": lambda: a.map_blocks(lambda x: (x - x.mean()) * 2),
        "apply_along_axis": lambda: da.apply_along_axis(np.ptp, 1, d.rows, dtype="f8", shape=()),
    }


def reductions(d: Any) -> Table:
    a, p = d.a, d.points
    return {
        "sum": lambda: a.sum(),
        "sum axis 0": lambda: a.sum(axis=0),
        "sum axis 1": lambda: a.sum(axis=1),
        "sum f4": lambda: d.f4.sum(),
        "sum i8": lambda: d.i8.sum(),
        "sum i4 axis 0": lambda: d.i4.sum(axis=0),
        "sum u1": lambda: d.u1.sum(),
        "mean": lambda: a.mean(),
        "mean f4 axis 0": lambda: d.f4.mean(axis=0),
        "mean u1": lambda: d.u1.mean(),
        "std": lambda: a.std(),
        "std axis 0": lambda: a.std(axis=0),
        "var axis 1": lambda: a.var(axis=1),
        "var f4": lambda: d.f4.var(),
        "min": lambda: a.min(),
        "max axis 0": lambda: a.max(axis=0),
        "max axis 1": lambda: a.max(axis=1),
        "max i4": lambda: d.i4.max(),
        "ptp axis 0": lambda: da.ptp(a, axis=0),
        "argmax": lambda: a.argmax(),
        "argmax axis 0": lambda: a.argmax(axis=0),
        "argmin axis 1": lambda: a.argmin(axis=1),
        "argmax i4 axis 1": lambda: d.i4.argmax(axis=1),
        "prod axis 0": lambda: d.b.prod(axis=0),
        "any": lambda: (a > 4).any(),
        "all axis 1": lambda: (a < 3).all(axis=1),
        "count_nonzero": lambda: da.count_nonzero(d.mask),
        "count of a condition": lambda: (a > 0).sum(),
        "mean of a condition axis 0": lambda: (a > 0).mean(axis=0),
        "nansum": lambda: da.nansum(d.holes),
        "nanmean axis 0": lambda: da.nanmean(d.holes, axis=0),
        "nanmax axis 1": lambda: da.nanmax(d.holes, axis=1),
        "nanstd": lambda: da.nanstd(d.holes),
        "nanargmax axis 0": lambda: da.nanargmax(da.where(a > 2, np.nan, a), axis=0),
        "median axis 1": lambda: da.median(d.rows, axis=1),
        "nanmedian axis 1": lambda: da.nanmedian(d.cut(np.asarray(d.rows), d.rows.chunks), axis=1),
        "percentile": lambda: da.percentile(d.v, [10, 50, 90]),
        "quantile axis 1": lambda: da.quantile(d.rows, 0.9, axis=1),
        "median short axis": lambda: da.median(d.points, axis=1),
        "sum of squares": lambda: (a**2).sum(),
        "sum(exp) axis 0": lambda: da.exp(a).sum(axis=0),
        "dot as sum": lambda: (a * d.b).sum(),
        "rms axis 1": lambda: da.sqrt((a**2).mean(axis=1)),
        "average weights": lambda: da.average(a, axis=0, weights=d.b),
        "points sum axis 1": lambda: p.sum(axis=1),
        "points mean axis 0": lambda: p.mean(axis=0),
        "points norm": lambda: da.linalg.norm(p, axis=1),
        "pairs norm": lambda: da.linalg.norm(d.pairs, axis=1),
        "octets norm": lambda: da.linalg.norm(d.octets, axis=1),
        "points distance": lambda: da.sqrt(((p - np.array([1.0, 2, 3])) ** 2).sum(axis=1)),
        "octets max axis 1": lambda: d.octets.max(axis=1),
        "octets argmax axis 1": lambda: d.octets.argmax(axis=1),
        "pairs std axis 1": lambda: d.pairs.std(axis=1),
        "narrow sum axis 1": lambda: d.narrow.sum(axis=1),
        "narrow std axis 0": lambda: d.narrow.std(axis=0),
        "image mean axis 1": lambda: d.image.mean(axis=1),
        "cube mean axis 0": lambda: d.cube.mean(axis=0),
        "cube max axis 1": lambda: d.cube.max(axis=1),
        "cube std axes 1, 2": lambda: d.cube.std(axis=(1, 2)),
        "complex sum": lambda: d.c16.sum(),
        "complex mean axis 0": lambda: d.c16.mean(axis=0),
        "f4 norm": lambda: da.linalg.norm(d.f4),
        "softmax axis 1": lambda: (lambda e: e / e.sum(axis=1, keepdims=True))(da.exp(d.rows)),
        "logsumexp axis 1": lambda: da.log(da.exp(d.rows).sum(axis=1)),
        "topk": lambda: da.topk(d.v, 10),
        "anomaly axis 0": lambda: d.a - d.a.mean(axis=0),
        "corrcoef of two": lambda: ((d.v - d.v.mean()) * (d.w - d.w.mean())).mean(),
    }


def scans(d: Any) -> Table:
    return {
        "cumsum": lambda: d.v.cumsum(axis=0),
        "cumsum axis 0": lambda: d.a.cumsum(axis=0),
        "cumsum axis 1": lambda: d.a.cumsum(axis=1),
        "cumsum ints": lambda: d.ints.cumsum(axis=0),
        "cumprod": lambda: d.b.cumprod(axis=1),
        "nancumsum": lambda: da.nancumsum(d.holes, axis=1),
        "diff": lambda: da.diff(d.v),
        "diff axis 0": lambda: da.diff(d.a, axis=0),
        "gradient": lambda: da.gradient(d.a, axis=0),
        "cumsum of short rows": lambda: d.octets.cumsum(axis=1),
        "cumsum last of condition": lambda: (d.a > 0).cumsum(axis=1)[:, -1],
    }


def sorting(d: Any) -> Table:
    return {
        "unique": lambda: da.unique(d.small),
        "unique counts": lambda: da.unique(d.small, return_counts=True)[1],
        "topk axis 1": lambda: da.topk(d.rows, 5, axis=1),
        "argtopk": lambda: da.argtopk(d.v, 5),
        "sort of blocks": lambda: d.rows.map_blocks(np.sort),
        "argsort of blocks": lambda: d.rows.map_blocks(np.argsort, dtype="i8"),
        "tenth least of blocks": lambda: d.rows.map_blocks(
            lambda x: np.partition(x, 9, axis=1)[:, 9], dtype="f8", drop_axis=1
        ),
        "nonzero": lambda: da.nonzero(d.v > 2)[0],
        "argwhere": lambda: da.argwhere(d.a > 2),
        "isin sorted": lambda: da.isin(d.ints, np.arange(0, 1000, 7)),
    }


def indexing(d: Any) -> Table:
    a, cube = d.a, d.cube
    return {
        "slice": lambda: a[10:-10, 20:-20],
        "every other row": lambda: a[::2],
        "every other column": lambda: a[:, ::2],
        "reversed": lambda: a[::-1],
        "reversed columns": lambda: a[:, ::-1],
        "list of rows": lambda: a[d.list],
        "list of columns": lambda: a[:, d.list],
        "shuffled rows": lambda: a[d.shuffled],
        "boolean mask": lambda: d.v[d.v > 1],
        "boolean mask sum": lambda: d.v[d.v > 1].sum(),
        "mask of two dimensions": lambda: a[a > 1],
        "mask of rows": lambda: a[d.column[:, 0] > 0],
        "take": lambda: da.take(a, d.list, axis=1),
        "table[ints]": lambda: d.ints.map_blocks(lambda i, t: t[i], d.table, dtype="f8"),
        "vindex": lambda: a.vindex[d.list, d.list],
        "compress": lambda: da.compress(np.arange(d.side) % 3 == 0, a, axis=0),
        "set slice": lambda: assigned(a, np.s_[5:50], 0),
        "set mask": lambda: assigned(a, a > 1, 1.0),
        "transpose": lambda: a.T,
        "transpose + a": lambda: a + a.T,
        "transpose sum axis 0": lambda: (a.T * 2).sum(axis=0),
        "cube transposed": lambda: cube.transpose(2, 0, 1),
        "moveaxis sum": lambda: da.moveaxis(cube, 0, -1).sum(axis=-1),
        "reshape": lambda: d.rows.reshape(-1),
        "reshape narrow sum": lambda: d.rows.reshape(d.side, -1, 8).sum(axis=2),
        "ravel": lambda: d.rows.ravel() + 1,
        "concatenate": lambda: da.concatenate([a, d.b], axis=0),
        "concatenate + 1": lambda: da.concatenate([a, d.b], axis=1) + 1,
        "stack": lambda: da.stack([a, d.b]),
        "stack mean": lambda: da.stack([a, d.b], axis=-1).mean(axis=-1),
        "hstack": lambda: da.hstack([a, d.b]),
        "block": lambda: da.block([[a, d.b], [d.b, a]]),
        "roll": lambda: da.roll(a, 7, axis=0),
        "flip": lambda: da.flip(a, 1),
        "rot90": lambda: da.rot90(a),
        "pad constant": lambda: da.pad(a, 5),
        "pad reflect": lambda: da.pad(a, 5, mode="reflect"),
        "tile": lambda: da.tile(d.row, (64, 1)),
        "repeat": lambda: da.repeat(d.v[: d.n // 4], 4),
        "broadcast_to sum": lambda: da.broadcast_to(d.row, (256, d.side)).sum(axis=0),
        "rechunk": lambda: a.rechunk((d.side, d.side // 8)),
        "rechunk rows sum": lambda: a.rechunk((d.side // 8, -1)).sum(axis=1),
        "triu": lambda: da.triu(a),
        "tril sum": lambda: da.tril(a).sum(),
        "diagonal": lambda: da.diagonal(a) + 0,
        "newaxis, outer": lambda: d.row[:, None] * d.row[None],
        "coarsen": lambda: da.coarsen(np.mean, a, {0: 4, 1: 4}),
        "column of points": lambda: d.points[:, 0] + d.points[:, 1],
        "stack of columns": lambda: da.stack([d.v, d.w], axis=-1),
        "shifted difference": lambda: a[1:] - a[:-1],
    }


def assigned(array: Any, where: Any, value: Any) -> Any:
    array = array.copy()
    array[where] = value
    return array


def histograms(d: Any) -> Table:
    edges, v = d.uneven, d.v
    logs = np.geomspace(1e-3, 4, 100)
    span = {"range": (-4, 4)}
    return {
        "even f8": lambda: da.histogram(v, 50, **span)[0],
        "even 1000": lambda: da.histogram(v, 1000, **span)[0],
        "even f4": lambda: da.histogram(d.v4, 50, **span)[0],
        "even ints": lambda: da.histogram(d.ints, 50, range=(0, 1000))[0],
        "even i4": lambda: da.histogram(d.i4, 50, range=(0, 1000))[0],
        "even u1": lambda: da.histogram(d.u1, 256, range=(0, 256))[0],
        "even of 2-d": lambda: da.histogram(d.a, 50, **span)[0],
        "even arange of ints": lambda: da.histogram(d.ints, np.arange(0, 1001, 10))[0],
        "even density": lambda: da.histogram(v, 50, density=True, **span)[0],
        "uneven f8": lambda: da.histogram(v, edges)[0],
        "uneven f8 1000": lambda: da.histogram(v, np.sort(d.table * 8 - 4))[0],
        "uneven logarithmic": lambda: da.histogram(v, logs)[0],
        "uneven f4": lambda: da.histogram(d.v4, edges)[0],
        "uneven f4 of f4": lambda: da.histogram(d.v4, edges.astype("f4"))[0],
        "uneven ints": lambda: da.histogram(d.ints, d.whole_edges)[0],
        "uneven i4": lambda: da.histogram(d.i4, d.whole_edges)[0],
        "uneven i4, floats": lambda: da.histogram(d.i4, np.geomspace(1, 1000, 60))[0],
        "uneven u1": lambda: da.histogram(d.u1, d.whole_edges[:40])[0],
        "three edges": lambda: da.histogram(v, [-1.0, 0.0, 5.0])[0],
        "weights even": lambda: da.histogram(v, 50, weights=d.w, **span)[0],
        "weights uneven": lambda: da.histogram(v, edges, weights=d.w)[0],
        "of sqrt": lambda: da.histogram(da.sqrt(d.w), np.geomspace(0.1, 2, 40))[0],
        "histogram2d": lambda: da.histogram2d(v, d.w, bins=[edges, np.linspace(0, 2, 20)])[0],
        "histogram2d even": lambda: da.histogram2d(v, d.w, bins=20, range=((-4, 4), (0, 2)))[0],
        "histogramdd": lambda: da.histogramdd(d.points, bins=(5, 5, 5), range=[(-4, 4)] * 3)[0],
        "bincount": lambda: da.bincount(d.ints, minlength=1000),
        "bincount weights": lambda: da.bincount(d.small, weights=d.v, minlength=50),
    }


def algebra(d: Any) -> Table:
    q = d.a[: d.side // 2, : d.side // 2]
    tall = d.narrow
    return {
        "matmul": lambda: q @ q,
        "matmul f4": lambda: d.f4[: d.side, : d.chunk] @ d.f4[: d.chunk],
        "matmul + 1": lambda: q @ q + 1,
        "matrix @ vector": lambda: d.a @ d.row,
        "x.T @ x": lambda: tall.T @ tall,
        "tensordot": lambda: da.tensordot(d.cube, d.cube, axes=((1, 2), (1, 2))),
        "einsum ij,ij->i": lambda: da.einsum("ij,ij->i", d.a, d.b),
        "einsum ij,jk": lambda: da.einsum("ij,jk->ik", q, q),
        "points @ rotation": lambda: d.points @ np.eye(3),
        "dot": lambda: da.dot(d.v, d.w),
        "outer": lambda: da.outer(d.row, d.row),
        "norm": lambda: da.linalg.norm(d.a),
        "norm axis 1": lambda: da.linalg.norm(d.a, axis=1),
        "qr of tall": lambda: da.linalg.qr(tall)[1],
        "svd of tall": lambda: da.linalg.svd(tall)[1],
        "lstsq of tall": lambda: da.linalg.lstsq(tall, d.narrow[:, 0])[0],
        "cov": lambda: da.cov(tall.T),
        "corrcoef": lambda: da.corrcoef(tall.T),
        "gradient step": lambda: tall.T @ (1 / (1 + da.exp(-(tall @ np.ones(32))))),
        "fft": lambda: da.fft.fft(d.rows),
        "rfft power": lambda: abs(da.fft.rfft(d.rows)) ** 2,
    }


def random(d: Any) -> Table:
    n, c = (d.side, d.side), d.chunk
    points, third = d.n // 4, d.n // 32

    def rng() -> Any:
        return da.random.default_rng(int(time.perf_counter_ns()))

    def draws(name: str, *args: Any, **options: Any) -> Callable[[], Any]:
        return lambda: getattr(rng(), name)(*args, size=n, chunks=c, **options)

    def close(k: int) -> Any:
        return ((rng().random((points, k), chunks=(third, k)) ** 2).sum(axis=1) < 1).mean()

    def length(k: int) -> Any:
        return da.linalg.norm(rng().standard_normal((points, k), chunks=(third, k)), axis=1).mean()

    return {
        "random": draws("random"),
        "random f4": draws("random", dtype="f4"),
        "random sum": lambda: rng().random(n, chunks=c).sum(),
        "uniform": draws("uniform", -1, 1),
        "standard_normal": draws("standard_normal"),
        "normal": draws("normal", 10, 3),
        "normal mean": lambda: rng().normal(10, 1, size=n, chunks=c).mean(),
        "normal f4": draws("standard_normal", dtype="f4"),
        "lognormal": draws("lognormal"),
        "exponential": draws("exponential", 2.0),
        "integers 6": draws("integers", 1, 7),
        "integers 2": draws("integers", 0, 2),
        "integers 1000": draws("integers", 0, 1000),
        "integers 256": draws("integers", 0, 256),
        "integers 2**40": draws("integers", 0, 2**40 + 7),
        "integers i4": draws("integers", 0, 1000, dtype="i4"),
        "integers u1": draws("integers", 0, 200, dtype="u1"),
        "integers mean": lambda: rng().integers(0, 100, size=n, chunks=c).mean(),
        "integers bincount": lambda: da.bincount(
            rng().integers(0, 100, size=d.n, chunks=d.piece), minlength=100
        ),
        "randint": lambda: da.random.RandomState(1).randint(0, 100, size=n, chunks=c),
        "poisson": draws("poisson", 3.0),
        "binomial": draws("binomial", 10, 0.3),
        "gamma": draws("gamma", 2.0),
        "beta": draws("beta", 2.0, 3.0),
        "geometric": draws("geometric", 0.3),
        "laplace": draws("laplace"),
        "rayleigh": draws("rayleigh"),
        "weibull": draws("weibull", 1.5),
        "standard_t": draws("standard_t", 5.0),
        "triangular": draws("triangular", 0.0, 0.5, 1.0),
        "pi of pairs": lambda: close(2),
        "pi of threes": lambda: close(3),
        "pi of eights": lambda: close(8),
        "pi of x and y": lambda: (
            rng().random(points, chunks=third) ** 2 + rng().random(points, chunks=third) ** 2 < 1
        ).mean(),
        "norm of normal pairs": lambda: length(2),
        "norm of normal threes": lambda: length(3),
        "first of threes": lambda: rng().random((points, 3), chunks=(third, 3))[:, 0],
        "random columns": lambda: rng().random((3, points), chunks=(3, third)).sum(axis=0),
        "random walk": lambda: (rng().integers(0, 2, size=n, chunks=(c, -1)) * 2 - 1).cumsum(1),
        "choice": lambda: rng().choice(1000, size=points, chunks=third),
        "bootstrap mean": lambda: (d.a + rng().normal(0, 0.1, size=n, chunks=c)).mean(axis=0),
    }


def windows(d: Any) -> Table:
    a, v = d.a, d.v

    def moving(x: Any, n: int, axis: int = -1) -> Any:
        return da.lib.stride_tricks.sliding_window_view(x, n, axis=axis)

    def heat(b: Any) -> Any:
        c = b.copy()
        c[1:-1, 1:-1] += 0.1 * (b[2:, 1:-1] + b[:-2, 1:-1] + b[1:-1, 2:] + b[1:-1, :-2]
                                - 4 * b[1:-1, 1:-1])  # fmt: skip
        return c

    return {
        "moving mean": lambda: moving(v, 7).mean(axis=-1),
        "moving max": lambda: moving(v, 5).max(axis=-1),
        "moving std": lambda: moving(v, 5).std(axis=-1),
        "moving mean axis 0": lambda: moving(a, 7, 0).mean(axis=-1),
        "moving sum of 30": lambda: moving(v, 30).sum(axis=-1),
        "moving median": lambda: da.median(moving(v[: d.n // 8], 5), axis=-1),
        "map_overlap heat": lambda: a.map_overlap(heat, depth=1, boundary="reflect"),
        "map_overlap laplacian": lambda: a.map_overlap(
            lambda b: np.roll(b, 1, 0) + np.roll(b, -1, 0) - 2 * b, depth=1, boundary=0
        ),
        "map_overlap diff": lambda: v.map_overlap(
            lambda b: b - np.roll(b, 1), depth=1, boundary="none"
        ),
        "five point stencil": lambda: (
            a[2:, 1:-1] + a[:-2, 1:-1] + a[1:-1, 2:] + a[1:-1, :-2] - 4 * a[1:-1, 1:-1]
        ),
        "shift and mean": lambda: (v[2:] + v[1:-1] + v[:-2]) / 3,
        **filters(a),
    }


def filters(a: Any) -> Table:
    with suppress(ImportError):
        from scipy import ndimage  # type: ignore[import-untyped]

        return {
            "gaussian_filter": lambda: a.map_overlap(
                ndimage.gaussian_filter, 8, "reflect", sigma=2
            ),
            "uniform_filter": lambda: a.map_overlap(ndimage.uniform_filter, 3, "reflect", size=5),
        }
    return {}


def masks(d: Any) -> Table:
    m = da.ma.masked_greater(d.a, 1)
    return {
        "masked sum": lambda: m.sum(),
        "masked mean axis 0": lambda: da.ma.filled(m.mean(axis=0), 0),
        "filled": lambda: da.ma.filled(m, 0),
        "masked arithmetic": lambda: da.ma.filled(m * 2 + 1, -1),
        "masked_where std": lambda: da.ma.masked_where(d.b > 1, d.a).std(),
        "masked_invalid mean": lambda: da.ma.masked_invalid(d.holes).mean(),
    }


def labelled(d: Any) -> Table:
    """xarray's, of some years of days on a grid."""
    import pandas as pd  # type: ignore[import-untyped]
    import xarray as xr

    days = max(730, d.n // 4096)
    values = np.resize(np.asarray(d.rows).reshape(-1), (days, 64, 64))
    time_ = pd.date_range("2000-01-01", periods=days)
    coords = {"time": time_, "lat": np.linspace(-90, 90, 64), "lon": np.arange(64) * 5.0}
    whole = xr.DataArray(values, coords, ("time", "lat", "lon"), name="t")
    x = whole.chunk(time=-(-days // 8))
    spatial = whole.chunk(time=-1, lat=16)
    holes = x.where(x < 2).persist(scheduler="threads")
    weights = np.cos(np.deg2rad(x.lat))
    months = xr.DataArray(np.asarray(time_.month), dims="time", coords={"time": time_})

    return {
        "mean time": lambda: x.mean("time").data,
        "mean lat, lon": lambda: x.mean(("lat", "lon")).data,
        "std time": lambda: x.std("time").data,
        "holes mean time": lambda: holes.mean("time").data,
        "max time": lambda: x.max("time").data,
        "anomaly": lambda: (x - x.mean("time")).data,
        "standardized": lambda: ((x - x.mean("time")) / x.std("time")).data,
        "weighted mean": lambda: x.weighted(weights).mean(("lat", "lon")).data,
        "where fillna": lambda: x.where(x > 0).fillna(0).data,
        "isel": lambda: x.isel(time=slice(10, -10), lat=slice(5, 50)).data,
        "sel nearest": lambda: (x.sel(lat=[10, 20, 30], method="nearest") + 1).data,
        "shift difference": lambda: (x - x.shift(time=1)).data,
        "diff time": lambda: x.diff("time").data,
        "rolling mean": lambda: x.rolling(time=7).mean().data,
        "rolling max": lambda: x.rolling(time=7, center=True).max().data,
        "anomaly rolling": lambda: (x - x.mean("time")).rolling(time=30).mean().data,
        "coarsen": lambda: x.coarsen(lat=2, lon=2).mean().data,
        "quantile": lambda: spatial.quantile(0.9, "time").data,
        "quantile of rechunked": lambda: x.chunk(time=-1).quantile(0.9, "time").data,
        "quantile without holes": lambda: spatial.quantile(0.9, "time", skipna=False).data,
        "quantiles": lambda: spatial.quantile([0.1, 0.5, 0.9], "time").data,
        "median": lambda: spatial.median("time").data,
        "climatology": lambda: x.groupby(months.rename("m")).mean("time").data,
        "resample": lambda: x.resample(time="30D").mean().data,
        "cumsum": lambda: x.cumsum("time").data,
        "interp": lambda: spatial.interp(lon=np.arange(60) * 5 + 2.5).data,
        "polyfit": lambda: spatial.polyfit("time", 1).polyfit_coefficients.data,
        "differentiate": lambda: spatial.differentiate("lon").data,
        "integrate": lambda: spatial.integrate("lon").data,
        "stack": lambda: (x.stack(cell=("lat", "lon")) * 2).data,
        "transpose": lambda: x.transpose("lon", "lat", "time").data,
        "corr": lambda: xr.corr(x, x.shift(lat=1), "time").data,
        "argmax": lambda: spatial.argmax("time").data,
        "concat": lambda: xr.concat([x, x + 1], "run").data,
        "clip": lambda: x.clip(-1, 1).data,
    }


#: Programs that call a function for each point, or format each: they get fewer points.
FORMATTED = ("slopes", "dataframe", "a plot")


def programs(d: Any) -> Table:
    """xarray's users' programs, as the tests have them, which compute by themselves."""
    xarray_programs = importlib.import_module("tests.support.xarray_programs")
    with suppress(ImportError):  # xarray imports it at first use, and several threads at once fail
        importlib.import_module("flox.xarray")
    shape = 360, 64, max(8, d.n // 2**14)
    whole = xarray_programs.temperatures(shape=shape)
    t = whole.chunk(time=90, lat=16)
    few = whole[:, :, :8].chunk(time=90, lat=16)

    def computed(name: str) -> list[Any]:
        value = xarray_programs.run(name, few if name in FORMATTED else t)
        return list(xarray_programs.arrays(value))

    return {name: partial(partial, computed, name) for name in xarray_programs.PROGRAMS}


def files(d: Any, folder: str) -> Table:
    """What is read from files and written to them, all in the system's cache."""
    found: Table = {}
    a, b = d.a, d.b
    np.save(f"{folder}/a.npy", np.asarray(a))
    mapped = np.load(f"{folder}/a.npy", mmap_mode="r")
    found["memory map sum"] = lambda: d.cut(mapped).sum()
    found["memory map, axis 0"] = lambda: (d.cut(mapped) * 2).mean(axis=0)
    found["npy stack"] = lambda: delayed_stack(a + 1, f"{folder}/stack")
    with suppress(ImportError):
        import h5py  # type: ignore[import-untyped]

        with h5py.File(f"{folder}/a.h5", "w") as file:
            file.create_dataset("a", data=np.asarray(a))
            file.create_dataset("c", data=np.asarray(a), chunks=(d.chunk, d.chunk))
        opened = h5py.File(f"{folder}/a.h5", "r")
        found["h5py sum"] = lambda: d.cut(opened["a"]).sum()
        found["h5py chunks mean axis 1"] = lambda: d.cut(opened["c"]).mean(axis=1)
    with suppress(ImportError):
        import zarr

        where = f"{folder}/a.zarr"
        for array, name in ((a, "a"), (b, "b")):
            made = zarr.create_array(
                f"{where}/{name}", shape=array.shape, chunks=(d.chunk,) * 2, dtype="f8"
            )
            made[:] = np.asarray(array)
        found["zarr sum"] = lambda: da.from_zarr(f"{where}/a").sum()
        found["zarr arithmetic"] = lambda: (
            da.from_zarr(f"{where}/a") * 2 + da.from_zarr(f"{where}/b")
        )
        out: Any = zarr.create_array(
            f"{where}/out", shape=a.shape, chunks=(d.chunk,) * 2, dtype="f8", overwrite=True
        )
        found["to zarr"] = lambda: da.store(a, out, compute=False, lock=False)
        found["arithmetic to zarr"] = lambda: da.store(a * 2 + b, out, compute=False, lock=False)
        found["anomaly to zarr"] = lambda: da.store(
            a - a.mean(axis=0), out, compute=False, lock=False
        )
        with suppress(ImportError):
            found.update(datasets(d, folder))
    return found


def delayed_stack(array: Any, folder: str) -> Any:
    """`da.to_npy_stack`, which computes at once, as a collection."""
    os.makedirs(folder, exist_ok=True)
    return dask.delayed(
        [
            dask.delayed(np.save)(f"{folder}/{n}.npy", block)
            for n, block in enumerate(array.to_delayed().ravel())
        ]
    )


def datasets(d: Any, folder: str) -> Table:
    """xarray's, from zarr to zarr."""
    import xarray as xr

    days = max(256, d.n // 4096) // 8 * 8
    values = np.resize(np.asarray(d.rows).reshape(-1), (days, 64, 64))
    whole = xr.Dataset({"t": (("time", "lat", "lon"), values)})
    source, target = f"{folder}/source.zarr", f"{folder}/target.zarr"
    whole.chunk(time=days // 8).to_zarr(source, mode="w")

    def opened() -> Any:
        return xr.open_zarr(source).t

    def written(x: Any) -> Any:
        return x.rename("t").to_dataset().chunk(time=days // 8, lat=-1, lon=-1).to_zarr(
            target, mode="w", compute=False
        )  # fmt: skip

    return {
        "xarray zarr mean": lambda: opened().mean("time").data,
        "xarray zarr anomaly": lambda: (opened() - opened().mean("time")).data,
        "xarray to_zarr": lambda: written(opened() + 1),
        "xarray anomaly rolling to_zarr": lambda: written(
            (opened() - opened().mean("time")).rolling(time=7, min_periods=1).mean()
        ),
    }


GROUPS: tuple[Callable[[Any], Table], ...] = (
    creation, elementwise, reductions, scans, sorting, indexing, histograms, algebra, random,
    windows, masks, labelled, programs,
)  # fmt: skip


def expressions(d: Any, folder: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each expression's name, and what makes a collection of it, or a partial that computes."""
    for group in GROUPS:
        with suppress(ImportError):
            for name, make in group(d).items():
                yield f"{group.__name__}: {name}", make
    for name, make in files(d, folder).items():
        yield f"files: {name}", make
