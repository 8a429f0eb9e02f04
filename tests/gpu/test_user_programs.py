"""Programs that people write with Dask and CuPy give NumPy's results, with much and with little
memory.

Most of their functions are no kernels of the package.
"""

import importlib

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
pytest.importorskip("scipy")

import dask
import dask.array as da

import gpuscheduler
from gpuscheduler.devices.choose import cuda_devices

pytestmark = [pytest.mark.gpu, pytest.mark.real]

RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal((256, 320))
B = RANDOM.standard_normal((320, 192))
CUBE = RANDOM.random((24, 64, 72))
COUNTS = RANDOM.integers(0, 50, 4000)
HOLES = np.where(RANDOM.random(A.shape) < 0.1, np.nan, A)
SQUARE = A[:, :256] @ A[:, :256].T + 300 * np.eye(256)
TALL = A[:, :40]

DEVICES = [("cuda:0", None), ("cuda:0,0", "3 MB")]
if cuda_devices() > 1:
    DEVICES += [("cuda", None), ("cuda", "3 MB")]


def scipy_of(block, module):
    """SciPy's or CuPy's module, as the block asks for."""
    library = "cupyx.scipy" if isinstance(block, cupy.ndarray) else "scipy"
    return importlib.import_module(f"{library}.{module}")


def smooth(block):
    return scipy_of(block, "ndimage").gaussian_filter(block, 2, mode="constant")


def edges(block):
    ndimage = scipy_of(block, "ndimage")
    return ndimage.sobel(block, 0) ** 2 + ndimage.sobel(block, 1) ** 2


def special(block):
    module = scipy_of(block, "special")
    return module.erf(block) + module.gammaln(abs(block) + 1)


def sparse(block):
    matrix = scipy_of(block, "sparse").csr_matrix(block * (block > 1))
    return matrix.dot(block.T[:, :5] * 0 + 1)


def power_iteration(of):
    a, v = of(SQUARE / 300, (64, 64)), of(A[:256, 0], 64)
    for _ in range(6):
        v = a @ v
        v = v / da.sqrt((v * v).sum())
    return v


def means(of):
    """Lloyd's algorithm: groups of points, and the middle of each."""
    p = of(A[:, :2], (32, 2))
    c = p[:4]
    for _ in range(3):
        nearest = ((p[:, None, :] - c[None]) ** 2).sum(-1).argmin(1)
        groups = [(nearest == k)[:, None] for k in range(4)]
        c = da.stack([(p * g).sum(0) / g.sum() for g in groups])
    return c


def blocks_of_delayed(of):
    xp = cupy if of is on_gpu else np
    full = dask.delayed(lambda i: xp.full((10, 10), i, "f8"))
    meta = xp.empty((0, 0))
    return da.concatenate([da.from_delayed(full(i), (10, 10), meta=meta) for i in range(7)])


def assigned(of):
    a = of(A, (64, 80)).copy()
    a[a < 0] = 0
    a[3:9, ::2] = 7
    return a


def grouped(of):
    xarray = pytest.importorskip("xarray")
    where = {"t": np.arange(24) % 4}
    a = xarray.DataArray(of(CUBE, (8, 32, 36)), dims=("t", "y", "x"), coords=where)
    return (a.groupby("t").mean() - a.mean("t")).data


def by_blocks(f):
    return lambda of: f(of(A, (64, 80)))


def by_rows(f):
    return lambda of: f(of(A, (64, -1)))


def in_windows(f, depth, boundary):
    return by_blocks(lambda a: a.map_overlap(f, depth=depth, boundary=boundary, dtype="f8"))


CASES = {
    "smooth": in_windows(smooth, 12, 0.0),
    "edges": in_windows(edges, 2, "nearest"),
    "fft": by_rows(lambda a: abs(da.fft.fft(a, axis=1)).sum(axis=0)),
    "fft2": by_blocks(lambda a: da.fft.ifft2(da.fft.fft2(a.rechunk(-1)) * 2).real),
    "gufunc": by_rows(
        lambda a: da.apply_gufunc(lambda b: b.std(-1), "(i)->()", a, output_dtypes="f8")
    ),
    "along an axis": by_rows(
        lambda a: da.apply_along_axis(lambda b: b[::2] + b[1::2], 1, a, dtype="f8", shape=(160,))
    ),
    "einsum": lambda of: da.einsum("ij,jk->ik", of(A, (64, 80)), of(B, (80, 96))),
    "tensordot": lambda of: da.tensordot(
        of(CUBE, (8, 32, 36)), of(CUBE, (8, 32, 36)), axes=((1, 2), (1, 2))
    ),
    "holes": lambda of: da.stack(
        [f(of(HOLES, (64, 80)), 0) for f in (da.nanmean, da.nanstd, da.nanmax, da.nansum)]
    ),
    "cumulative": by_blocks(lambda a: a.cumsum(axis=0) + a.cumprod(axis=1)),
    "histogram": by_blocks(lambda a: da.histogram(a, bins=30, range=(-3, 3))[0]),
    "weights": by_blocks(
        lambda a: da.histogram(a.ravel(), np.linspace(-3, 3, 20), weights=abs(a).ravel())[0]
    ),
    "bincount": lambda of: da.bincount(of(COUNTS, 500), minlength=60),
    "topk": by_blocks(lambda a: a.topk(5, axis=1)),
    "argtopk": by_blocks(lambda a: a.argtopk(-4, axis=0)),
    "mask": by_blocks(lambda a: a[a > 1].sum()),
    "unknown lengths": by_blocks(lambda a: a.ravel()[a.ravel() > 1.5]),
    "assigned": assigned,
    "lists": by_blocks(lambda a: a[[3, 200, 7, 7, 100]][:, [1, 300, 5]]),
    "every third": by_blocks(lambda a: (a[np.arange(0, len(a), 3)] * 2 + 1).sum(axis=0)),
    "seasons": by_blocks(lambda a: a[np.flatnonzero(np.arange(len(a)) % 90 < 30)].mean(axis=1)),
    "descending": by_blocks(lambda a: a[:, np.arange(a.shape[1] - 1, -1, -1)] - a),
    "permutation": by_blocks(lambda a: a[np.random.default_rng(5).permutation(len(a))].cumsum(0)),
    "points": by_blocks(lambda a: a.vindex[[3, 200, 7], [1, 300, 5]]),
    "where": by_blocks(lambda a: da.where(a > 0, a, -a / 2)),
    "coarsen": by_blocks(lambda a: da.coarsen(np.mean, a, {0: 4, 1: 5})),
    "pad": by_blocks(lambda a: da.pad(a, ((3, 5), (2, 0)), constant_values=1.5)),
    "differences": by_blocks(lambda a: da.diff(da.roll(a, 17, axis=1), axis=0)),
    "gradient": by_blocks(lambda a: da.gradient(a)[1]),
    "qr": lambda of: abs(da.linalg.qr(of(TALL, (64, 40)))[1]),
    "svd": lambda of: da.linalg.svd(of(TALL, (64, 40)))[1],
    "cholesky": lambda of: da.linalg.cholesky(of(SQUARE, (64, 64))),
    "lstsq": lambda of: da.linalg.lstsq(of(TALL, (64, 40)), of(A[:, 41], 64))[0],
    "norm": by_blocks(lambda a: da.linalg.norm(a, axis=1)),
    "corrcoef": by_blocks(lambda a: da.corrcoef(a[:20])),
    "special": by_blocks(lambda a: a.map_blocks(special, dtype="f8")),
    "place of a block": by_blocks(
        lambda a: a.map_blocks(
            lambda b, block_info=None: b + block_info[0]["array-location"][0][0], dtype="f8"
        )
    ),
    "delayed": blocks_of_delayed,
    "reshape": lambda of: of(CUBE, (8, 32, 36)).reshape(24, -1).T,
    "rechunk": by_blocks(lambda a: a.rechunk((100, 33)).rechunk((17, 320)) + 1),
    "strides": lambda of: da.moveaxis(of(CUBE, (8, 32, 36)), 0, -1)[..., ::3].sum(axis=1),
    "searchsorted": lambda of: da.searchsorted(of(np.sort(A.ravel()), 10_000), of(A[0], 80)),
    "bins": by_blocks(lambda a: da.digitize(a, np.linspace(-2, 2, 9)) * 2),
    "triangles": lambda of: da.tril(of(SQUARE, 64)) + da.triu(of(SQUARE, 64), 2),
    "repeat": by_blocks(lambda a: da.repeat(da.tile(a[:20, :30], (2, 3)), 2, axis=0)),
    "argmin": by_blocks(lambda a: a.argmin()),
    "moments": by_blocks(lambda a: a.var(axis=1, ddof=1) + da.reductions.moment(a, 3, axis=1)),
    "complex": by_blocks(lambda a: da.angle(a + 1j * a[::-1]) + abs(da.exp(1j * a))),
    "windows": by_blocks(lambda a: da.lib.stride_tricks.sliding_window_view(a, 5, axis=1).mean(-1)),
    "sparse": by_rows(lambda a: a.map_blocks(sparse, dtype="f8", chunks=(a.chunks[0], (5,)))),
    "power iteration": power_iteration,
    "means": means,
    "xarray": grouped,
}


def on_host(a, chunks):
    return da.from_array(a, chunks=chunks)


def on_gpu(a, chunks):
    return on_host(a, chunks).to_backend("cupy")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("devices", "limit"), DEVICES)
def test_what_people_write(name, devices, limit):
    """The second time by what was learnt, and then persisted."""
    make = CASES[name]
    expected = make(on_host).compute(scheduler="sync")
    close = {"rtol": 1e-7, "atol": 1e-9}
    with gpuscheduler.Scheduler(devices, limit, check=True):
        for _ in range(2):
            got = make(on_gpu).compute()
            assert got.dtype == expected.dtype
            np.testing.assert_allclose(cupy.asnumpy(got), expected, **close)
        kept = make(on_gpu).persist()
        np.testing.assert_allclose(cupy.asnumpy((kept * 2).compute()), expected * 2, **close)
