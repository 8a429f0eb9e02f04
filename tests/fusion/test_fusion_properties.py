"""Any expression of arrays has Dask's values, shapes and dtypes when all of it is fused."""

from __future__ import annotations

import os
import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from dask.callbacks import Callback
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.pipeline import compile

#: `GPUSCHEDULER_EXAMPLES=3000 pytest tests/fusion/test_fusion_properties.py` looks harder.
EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "60"))

DTYPES = ("f8", "f4", "i8", "i4", "u1", "bool", "c16")
#: What sources are, and how arrays of values become some: GPUs have their own.
KINDS = ["array", "array", "ones", "arange"]
from_values = da.from_array


@pytest.fixture(scope="module")
def scheduler():
    before = dict(compile.FUSE_FEWEST)
    compile.FUSE_FEWEST["cpu"] = 1
    with Scheduler("cpu:2", fuse_least=0, check=True) as s:
        yield s
    compile.FUSE_FEWEST.update(before)


@st.composite
def chunks(draw, length):
    """Lengths of blocks: also 1, and 0."""
    if length == 0:
        return (0,)
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    ends = [0, *cuts, length]
    return tuple(b - a for a, b in zip(ends, ends[1:], strict=False))


@st.composite
def sources(draw, shape=None):
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    seed = draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        values = rng.random(shape) < 0.5
    elif dtype.kind == "c":
        values = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    elif dtype.kind == "f":
        values = rng.normal(size=shape) * 3
        if values.size and draw(st.booleans()):
            values.flat[seed % values.size] = draw(st.sampled_from([np.nan, np.inf, -0.0]))
    else:
        values = rng.integers(0, 100, size=shape)
    values = np.asarray(values).astype(dtype)
    if values.ndim > 1 and draw(st.booleans()):
        values = np.asfortranarray(values)
    cut = tuple(draw(chunks(n)) for n in shape)
    kind = draw(st.sampled_from(KINDS))
    if kind == "ones":
        return da.ones(shape, chunks=cut, dtype=dtype)
    if kind == "arange" and shape and dtype.kind != "b":
        flat = da.arange(int(np.prod(shape)), chunks=5, dtype=dtype)
        return flat.reshape(shape) if flat.size else da.zeros(shape, dtype=dtype, chunks=cut)
    return from_values(values, chunks=cut)


def twice(block):
    return block + block


def softened(block):
    return np.where(block > 1, 1, block) * 0.5


def added(block):
    return block + 1


def printing(block):
    """A function that cannot be traced, as its code shows."""
    print(end="")
    return block


def asking(block):
    """A function whose trace fails midway."""
    return block if (block == block).any() else block * 1


def with_info(block, block_info=None):
    return block + block_info[0]["chunk-location"][0]


UNARY = (np.negative, np.absolute, np.sin, np.tanh, np.floor, np.isnan, np.square, np.sign,
         np.exp, np.sqrt, np.logical_not, np.conj)  # fmt: skip
BINARY = (np.add, np.subtract, np.multiply, np.maximum, np.less, np.equal, np.logical_and,
          np.true_divide, np.floor_divide, np.power, np.arctan2, np.fmod)  # fmt: skip
REDUCTIONS = ("sum", "mean", "min", "max", "any", "all", "var", "std", "prod", "argmin", "argmax")


@st.composite
def expressions(draw, most=8):
    """Draw a Dask array that takes a few steps."""
    pool = [draw(sources())]
    for _ in range(draw(st.integers(1, most))):
        x = draw(st.sampled_from(pool))
        try:
            made = draw(st.sampled_from(STEPS))(draw, x, pool)
        except (AssertionError, IndexError, NotImplementedError, TypeError, ValueError):
            # beyond Dask
            continue
        if made is not None:
            pool.append(made)
    pick = draw(st.integers(1, min(3, len(pool))))
    return pool[-pick:]


def _unary(draw, x, pool):
    f = draw(st.sampled_from(UNARY))
    try:
        f(np.ones(1, x.dtype))
    except TypeError:
        return None
    return f(x)


def _binary(draw, x, pool):
    f = draw(st.sampled_from(BINARY))
    other = draw(st.sampled_from([*pool, 2, -1.5, np.float32(3), True]))
    try:
        np.broadcast_shapes(x.shape, np.shape(other))
        f(np.ones(1, x.dtype), np.ones(1, getattr(other, "dtype", type(other))))
    except (TypeError, ValueError):
        return None
    if f is np.power:
        x = np.absolute(x).astype("f8")
    return f(x, other) if draw(st.booleans()) or f is np.power else f(other, x)


def _slice(draw, x, pool):
    index = []
    for n in x.shape:
        if n and draw(st.integers(0, 4)) == 0:
            index.append(draw(st.integers(-n, n - 1)))
            continue
        end = st.one_of(st.none(), st.integers(-n - 1, n + 1))
        step = draw(st.sampled_from([1, 1, 2, 3, -1]))
        if 0 in (c for axis in x.chunks for c in axis):
            step = abs(step)  # Dask's own slices are wrong here
        index.append(slice(draw(end), draw(end), step))
    return x[tuple(index)]


def _reduce(draw, x, pool):
    name = draw(st.sampled_from(REDUCTIONS))
    if x.dtype.kind == "c" and name in ("min", "max", "argmin", "argmax"):
        return None
    axis = draw(st.sampled_from([None, *range(x.ndim)]))
    if x.ndim > 1 and not name.startswith("arg"):
        axis = draw(st.sampled_from([axis, tuple(range(x.ndim))[:2]]))
    over = range(x.ndim) if axis is None else np.atleast_1d(axis)
    empty = any(0 in x.chunks[a] for a in over)
    if empty and name in ("min", "max", "argmin", "argmax", "mean", "var", "std"):
        return None
    if name == "prod":
        x = np.sign(x) if x.dtype.kind not in "bc" else x.astype(bool)
    if name in ("argmin", "argmax"):
        return getattr(da, name)(x, axis=axis) if x.ndim else None
    kwargs = {"split_every": draw(st.sampled_from([None, 2]))}
    if name in ("sum", "mean") and draw(st.booleans()):
        kwargs["dtype"] = np.dtype("c16" if x.dtype.kind == "c" else "f8")
    return getattr(da, name)(x, axis=axis, keepdims=draw(st.booleans()), **kwargs)


def _transpose(draw, x, pool):
    return x.transpose(draw(st.permutations(range(x.ndim))))


def _join(draw, x, pool):
    others = [y for y in pool if y.shape == x.shape]
    other = draw(st.sampled_from(others))
    if not x.ndim:
        return da.stack([x, other])
    axis = draw(st.integers(0, x.ndim - 1))
    if draw(st.booleans()):
        return da.concatenate([x, other], axis=axis) if x.ndim else None
    return da.stack([x, other], axis=axis) if x.ndim < 4 else None


def _where(draw, x, pool):
    try:
        return da.where(x > 0 if x.dtype.kind != "c" else x.real > 0, x,
                        draw(st.sampled_from([0, 1.5, x])))  # fmt: skip
    except TypeError:
        return None


def _astype(draw, x, pool):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    if x.dtype.kind == "c" and dtype.kind not in "cb":
        x = x.real
    if x.dtype.kind == "f" and dtype.kind in "iu":
        x = da.where(np.absolute(x) < 100, np.absolute(x), 0)
    return x.astype(dtype)


def _map_blocks(draw, x, pool):
    f = draw(st.sampled_from([twice, softened, added, with_info, printing, asking]))
    if (f is softened and x.dtype.kind == "c") or (f is with_info and not x.ndim):
        return None
    if f is with_info:
        return (x * 1.0).map_blocks(f, dtype=(x * 1.0).dtype)
    dtype = f(np.ones(1, x.dtype)).dtype
    return x.map_blocks(f, dtype=dtype, meta=x._meta.astype(dtype))


def _reshape(draw, x, pool):
    return x.ravel() if draw(st.booleans()) else x[..., None]


def _rechunk(draw, x, pool):
    return x.rechunk(tuple(draw(chunks(n)) for n in x.shape)) if x.size else None


def _persist(draw, x, pool):
    return x.persist()


def _broadcast(draw, x, pool):
    return da.broadcast_to(x, (2, *x.shape)) if x.ndim < 4 else None


STEPS = (_unary, _unary, _binary, _binary, _binary, _slice, _reduce, _reduce, _transpose, _join,
         _where, _astype, _map_blocks, _reshape, _rechunk, _persist, _broadcast)  # fmt: skip


def of_moments(x):
    """Whether an expression has variances.

    Rounding alone may decide whether values that should be equal have one.
    """
    return any(name.startswith(("var", "std", "moment")) for name in x.dask.layers)


def same(got, want, moments=False):
    if want.shape:  # what has no axes may be an array or a scalar
        assert type(got) is type(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if want.dtype.kind in "fc":
        single = want.dtype.itemsize == (8 if want.dtype.kind == "c" else 4)
        rtol = 2e-3 if single else 1e-7
        finite = np.abs(want)[np.isfinite(want)]
        scale = float(finite.max()) if finite.size else 1.0
        least = 64 * np.finfo(want.dtype).eps if moments else 0
        np.testing.assert_allclose(got, want, rtol=rtol, atol=max(least, rtol * min(scale, 1e30)))
    else:
        np.testing.assert_array_equal(got, want)


def examples(count, **more):
    """As many as that, with a scheduler that is theirs together, as long as it takes."""
    allowed = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ]
    return settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=allowed, **more
    )


@examples(EXAMPLES)
@given(data=st.data())
def test_any_expression_equals_dasks_value(scheduler, data):
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        arrays = data.draw(expressions())
        try:
            want = dask.compute(*arrays, scheduler="sync")
            arrays[-1].compute(scheduler="sync")
            with Callback(pretask=lambda *_: None):
                arrays[-1].compute(scheduler="sync")
            arrays[-1].persist(scheduler="sync").compute(scheduler="sync")
        except Exception:  # Dask's own: blocks of nothing, mostly
            return
        for _ in range(2):
            for x, g, w in zip(arrays, dask.compute(*arrays), want, strict=True):
                same(g, w, of_moments(x))
        moments = of_moments(arrays[-1])
        with Callback(pretask=lambda *_: None):
            same(arrays[-1].compute(), want[-1], moments)
        same(arrays[-1].persist().compute(), want[-1], moments)
