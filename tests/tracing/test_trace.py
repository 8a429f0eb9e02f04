"""Functions as programs: what is followed computes what NumPy computes, in the kernels foreseen;
what is not says why."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import operator
import sys
import time
import types
import warnings
from collections.abc import Iterable

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy import empty

from gpuscheduler import Scheduler
from gpuscheduler.codegen.cpu import evaluate
from gpuscheduler.frontend.compiled_task import Chain, CompiledCall, _value, compile_subgraph
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.fusion import task as fusion_task
from gpuscheduler.ir.expr import Expr, View, index, nodes
from gpuscheduler.tracing.abstract import AbstractArray, GeneratedArray
from gpuscheduler.tracing.context import CapturedArrays, NotTraceable
from gpuscheduler.tracing.purity import globals_read, why_impure
from gpuscheduler.tracing.trace import trace_function
from tests.support.strategies import thorough

RNG = np.random.default_rng(7)
SINGLE = RNG.standard_normal((7, 9)).astype("f4")
DOUBLE = RNG.standard_normal((7, 9))
INTS = RNG.integers(-5, 9, (7, 9), dtype="i4")
COMPLEX = DOUBLE + 1j * SINGLE
HOLES = np.where(DOUBLE > 1, np.nan, DOUBLE)
ODD = np.array([[0.0, -0.0, np.inf], [-np.inf, np.nan, 1.5]])
CUBE = RNG.standard_normal((3, 4, 5))


def abstract(value, arrays):
    """`value` with arrays as what is known of them; the arrays themselves go to the list."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        steps = tuple(s // value.itemsize for s in value.strides)
        return AbstractArray(value.shape, value.dtype, steps)
    if type(value) in (list, tuple):
        return type(value)(abstract(v, arrays) for v in value)
    if isinstance(value, dict):
        return {k: abstract(v, arrays) for k, v in value.items()}
    return value


def traced(function, *values):
    """What the program of a function computes."""
    arrays = []
    program = trace_function(function, [abstract(v, arrays) for v in values])
    assert program.inputs == len(arrays)
    with np.errstate(all="ignore"):
        return fusion_task.compute_program(program, evaluate.evaluate, arrays)


def directly(function, *values):
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*values)


def assert_same(got, want, scale=1.0):
    """Equal containers, types and shapes; values to rounding."""
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert list(got) == list(want)
        got, want = list(got.values()), list(want.values())
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w, scale)
        return
    if isinstance(want, np.ndarray | np.generic):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
    if np.asarray(want).dtype.kind in "fc":
        eps = float(np.finfo(np.asarray(want).dtype).eps)
        np.testing.assert_allclose(got, want, rtol=200 * eps, atol=200 * eps * scale)
    else:
        np.testing.assert_array_equal(got, want)


def agree(function, *values):
    assert_same(traced(function, *values), directly(function, *values))


def kernels(function, *values):
    return trace_function(function, [abstract(v, []) for v in values]).kernels


def reason(function, *values):
    with pytest.raises(NotTraceable) as caught:
        trace_function(function, [abstract(v, []) for v in values])
    return str(caught.value)


# ---- what is followed


def masked(x):
    x = x * 1
    x[x < 0] = 0
    return x


def assigned(x):
    y = np.zeros_like(x)
    y[1:-1, 2] = x[1:-1, 2] * 2
    y[0] = 7
    y[::2, ::-1] = 1.5
    y[-1, 1:4] = x[2, 1:4]
    y[:, 0] += x[:, 1]
    y[3:][1:, 4] = 2
    return y


def copied(x):
    y = x * 2
    a, b, c, d = np.array(y), np.asarray(y), np.asarray(y, copy=True), np.array(y, copy=False)
    e = np.ascontiguousarray(x[:, ::2])  # in other places than these are
    a[0], b[1], c[2], d[3], e[3] = 7, 8, 9, 10, 11  # two of these are y itself
    return y, a, b, c, d, e


def in_place(x):
    y = x * 2
    y += 1
    np.multiply(y, y, out=y)
    np.add(y, 1, out=y, where=x > 0)
    return y


def unpacked(x):
    a, *_rest, b = x
    return a + b


def powers(x):
    return x**2, x**0.5, x**-1, x**3, x**1.5, 2.0**x, np.power(x, 2), x**2.0


ELEMENTWISE = {
    "arithmetic": lambda x: (x * 2 + 1) / 3 - -x,
    "integers": lambda x: x.astype("i2") // 3 + x.astype("i2") % 4,
    "weak": lambda x: x + 1 + 2.5 + np.float32(3),
    "strong": lambda x: x.astype("f4") + np.float64(3),
    "comparisons": lambda x: (x > 0) & ~(x <= 1) | (x == x[0]) ^ (x != 0),
    "powers": powers,
    "bits": lambda x: (x.astype("u1") << 1) | (x.astype("u1") & 3),
    "exp": lambda x: np.exp(-0.5 * ((x - 1) / 2) ** 2),
    "divmod": lambda x: divmod(x, 2),
    "modf": np.modf,
    "where": lambda x: np.where(x > 0, x, 0),
    "where of types": lambda x: np.where(x > 0, x.astype("f4"), np.int64(1)),
    "clip": lambda x: (np.clip(x, -0.5, 0.5), x.clip(0), x.clip(max=1), np.clip(x, None, None)),
    "round": lambda x: (np.round(x, 2), x.round(), np.round(x * 100, -1), np.rint(x)),
    "complex": lambda x: (x + 1j).conj() * 2j + (x * 1j).imag + np.angle(x + 2j),
    "real": lambda x: (np.real(x * 1), np.imag(x), np.conj(x * 1)),
    "isclose": lambda x: np.isclose(x, x[0], equal_nan=True),
    "nan_to_num": lambda x: np.nan_to_num(x / (x > 0), posinf=3.0),
    "sinc": np.sinc,
    "arrays of arrays": lambda x: (
        np.asarray(x) * 2, np.array(x, "f4") + 1, np.ascontiguousarray(x.T) * 2,
        np.array([x[0], x[1]]) + 1,
    ),
    "fix": np.fix,
    "heaviside": lambda x: np.heaviside(x, 0.5),
    "select": lambda x: np.select([x > 1, x < 0], [x, -1.0], 5),
    "masked": masked,
    "assigned": assigned,
    "copied": copied,
    "in place": in_place,
    "unpacked": unpacked,
    "T": lambda x: x.T + x.T,
    "views": lambda x: x[1:-1, ::2] * x[-2:0:-1, ::2],
    "ints": lambda x: x[2] + x[:, None, 3].T[0, 0],
    "newaxis": lambda x: x[:, None] + x[None, :],
    "ellipsis": lambda x: x[..., 0] - x[0, ..., 1],
    "flip": lambda x: np.flip(x) + np.fliplr(x) + np.flipud(x) * x[::-1],
    "rot90": lambda x: np.rot90(x) * 2,
    "moveaxis": lambda x: np.moveaxis(x, 0, 1) + np.swapaxes(x, 0, 1) + np.rollaxis(x, 1),
    "reshape": lambda x: (x + 1).reshape(-1) + x.ravel() + x.flatten(),
    "reshape of T": lambda x: (x.T + 1).reshape(-1) * 2,
    "reshape F": lambda x: x.reshape(-1, order="F") + (x * 1).ravel("F"),
    "squeeze": lambda x: (x[:1].squeeze() + 1, np.expand_dims(x * 2, (0, 2))),
    "diagonal": lambda x: np.diagonal(x) + x.diagonal() * 2,
    "windows": lambda x: np.lib.stride_tricks.sliding_window_view(x, 3, 1) * 2,
    "tri": lambda x: (np.tril(x), np.triu(x, 1), np.tril(x, -2)),
    "broadcast": lambda x: np.broadcast_to(x[0] * 2, x.shape) + np.broadcast_arrays(x[0], x)[0],
    "concatenate": lambda x: np.concatenate([x[:2], x[2:] * 2, x[:0], np.zeros_like(x)]),
    "concatenate 1": lambda x: np.concatenate([x, x.astype("i4")], axis=1),
    "concatenate all": lambda x: np.concatenate([x, x[0] * 2], axis=None),
    "concatenate reversed": lambda x: np.concatenate([x[::-1], x.T[:9, :9].T], axis=1),
    "many parts": lambda x: np.concatenate([x * k for k in range(11)], axis=1),
    "stacks": lambda x: (np.stack([x, -x], -1), np.vstack([x[0], x]), np.hstack([x[0], x[1]]),
                         np.dstack([x, x])),
    "block": lambda x: np.block([[x, x * 2], [x[:1], x[:1]]]),
    "atleast": lambda x: np.atleast_3d(x) + np.atleast_1d(x[0, 0]) + np.atleast_2d(x[0])[0, 0],
    "roll": lambda x: (np.roll(x, 2, 0), np.roll(x, (1, -1), (0, 1)), np.roll(x, 3)),
    "split": lambda x: [p * 2 for p in np.array_split(x, 3)] + [p + 1 for p in np.split(x, [2], 1)],
    "pad": lambda x: [np.pad(x, ((1, 2), (0, 1)), mode=m)
                      for m in ("constant", "edge", "wrap", "reflect", "symmetric")],
    "pad constants": lambda x: np.pad(x, 2, constant_values=((1, 2), (3, 4))),
    "diff": lambda x: (np.diff(x), np.diff(x, 2, 0), np.diff(x, prepend=0), np.diff(x > 0)),
    "gradient": lambda x: np.gradient(x) + (np.gradient(x, 0.5, axis=1),),
    "likes": lambda x: (np.ones_like(x), np.zeros_like(x, dtype="i4", shape=3), np.full_like(x, 2)),
    "astype": lambda x: (x.astype("i4"), x.astype(bool), (x > 0).astype("f4"), np.astype(x, "f2")),
    "take": lambda x: np.take(x, 2, axis=1) + np.take(x, 3),
    "outer": lambda x: (np.outer(x[0], x[1]), np.add.outer(x[0], x[:, 1])),
    "meshgrid": lambda x: [m * 2 for m in np.meshgrid(x[0], x[:, 0])]
    + [m + 1 for m in np.meshgrid(x[0], x[1], sparse=True, indexing="ij")],
    "facts": lambda x: (x + 1, x.shape, x.ndim, len(x), np.shape(x), np.result_type(x, 1.0),
                        np.iscomplexobj(x), x.nbytes, np.size(x, 0), np.can_cast(x, "f8")),
    "positive": lambda x: (+x, x.copy() * 1, abs(x), np.sign(x), np.copysign(1, x)),
    "minimum": lambda x: (np.minimum(x, 0), np.fmax(x, x[::-1]), np.hypot(x, 2)),
    "logic": lambda x: (np.logical_and(x, x > 1), np.isfinite(x), np.isposinf(x), np.isneginf(x)),
    "dtype": lambda x: (np.add(x, 1, dtype="f4"), np.divide(x.astype("i4"), 2, dtype="f8")),
    "piecewise": lambda x: (np.piecewise(x, [x < 0, x > 1], [lambda v: -v, np.sqrt, 7]),
                            np.piecewise(x, [x < 0], [lambda v, k: v * k, 1.5], 3)),
    "polyval": lambda x: (np.polyval([1.5, 0, -2, 3], x), np.polyval(np.arange(3), x),
                          np.polyval([], x)),
    "deg": lambda x: np.deg2rad(x) + np.float_power(x, 2) + np.ldexp(x, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("x", [DOUBLE, SINGLE, DOUBLE.T.copy().T], ids=["f8", "f4", "fortran"])
def test_element_by_element(name, x):
    agree(ELEMENTWISE[name], x)


@pytest.mark.parametrize("x", [INTS, INTS > 0, INTS.astype("u2"), COMPLEX], ids="ibuc")
def test_other_types(x):
    agree(lambda x: (x + x, x * 2, np.where(x != 0, x, 1), x.astype("c8"), np.square(x)), x)
    agree(lambda x: (x.sum(), x.sum(0), x.prod(1), x.any(), x.all(1), x.mean(), x.mean(0)), x)
    agree(lambda x: (x.var(), x.std(0), np.var(x, 1, ddof=1)), x)
    if x.dtype.kind != "c":
        agree(np.modf, x)
        agree(np.modf, x.astype("i1"))
        agree(lambda x: (x.min(), x.max(0), x.argmin(1), np.ptp(x * 1, 0), np.round(x)), x)
        agree(lambda x: (np.nansum(x), np.nanmax(x, 1), np.nanmean(x), np.linalg.norm(x)), x)
    if x.dtype.kind in "iu":
        agree(lambda x: (x // 2, x % 3, x << 1, ~x, x**2, x**3, np.round(x, -1), x.clip(1, 3)), x)
        agree(lambda x: (x < 10**12, x >= -(10**12), x.clip(-(10**12), 3)), x)


def test_odd_values():
    """NaN, infinities and negative zero, as NumPy has them."""
    agree(lambda x: (x.max(), x.min(1), x.argmax(), x.argmin(0), x.sum(1), x.any(), x.all(0)), ODD)
    agree(lambda x: (np.nanmax(x), np.nanmin(x, 0), np.nansum(x), x.clip(-1, 1), np.modf(x)), ODD)
    agree(lambda x: (np.maximum(x, 0), np.fmax(x, 0), np.sign(x), x // 1, x % 2, np.rint(x)), ODD)
    agree(lambda x: (x**2, x**0.5, np.sqrt(x), np.nan_to_num(x), np.isclose(x, x)), ODD)
    got = traced(lambda x: (x * -1, x.clip(0, 1), x**0.5), ODD)
    for g, w in zip(got, directly(lambda x: (x * -1, x.clip(0, 1), x**0.5), ODD), strict=True):
        np.testing.assert_array_equal(np.signbit(g), np.signbit(w))


REDUCTIONS = {
    "sum": lambda x: (x.sum(), x.sum(0), x.sum(1, keepdims=True), np.sum(x, axis=(0, 1))),
    "types": lambda x: (x.sum(dtype="f8"), x.astype("f2").sum(0), x.astype("f2").mean()),
    "initial": lambda x: (x.sum(initial=3), x.max(initial=9.0), np.min(x, 0, initial=-9.0)),
    "where": lambda x: (x.sum(where=x > 0), x.mean(0, where=x > 0), x.any(where=x < 0),
                        np.max(x, where=x < 0, initial=-3)),
    "prod": lambda x: x.prod() + np.prod(x, 0),
    "extremes": lambda x: (x.min(), x.max(0), np.amin(x, 1), np.ptp(x, 1), x.argmin(), x.argmax(0),
                           np.argmax(x, axis=1, keepdims=True)),
    "truth": lambda x: ((x > 1).any(), (x > -9).all(0), np.any(x > 0, axis=1), x.all()),
    "mean": lambda x: (x.mean(), x.mean(0), np.mean(x, 1, keepdims=True)),
    "var": lambda x: (x.var(), x.std(0), np.var(x, 1, ddof=1), np.std(x, keepdims=True)),
    "ufuncs": lambda x: (np.add.reduce(x), np.maximum.reduce(x, 1), np.multiply.reduce(x, None),
                         np.logical_or.reduce(x > 1)),
    "norms": lambda x: (np.linalg.norm(x), np.linalg.norm(x, 1), np.linalg.norm(x, np.inf),
                        np.linalg.norm(x, 3, axis=0), np.linalg.norm(x, 0, axis=1),
                        np.linalg.norm(x, axis=1, keepdims=True), np.linalg.norm(x, "fro"),
                        np.linalg.norm(x, -np.inf, axis=0), np.linalg.norm(x, -1)),
    "count": lambda x: (np.count_nonzero(x > 0, axis=0), np.average(x, axis=1), np.trace(x)),
    "of a view": lambda x: (x.T.sum(0), x[::2, 1].mean(), x[None].max((0, 1))),
    "of concatenation": lambda x: np.concatenate([x, x * 2]).sum(0) + np.roll(x, 1, 1).mean(0),
    "of a result": lambda x: x.sum(0).max() + x.max(1).sum(),
    "softmax": lambda x: np.exp(x - x.max(1, keepdims=True))
    / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True),
    "standardised": lambda x: (x - x.mean(0)) / x.std(0),
    "with others": lambda x: x.sum(0) * 2 + x[0] - x.sum(),
    "no axes": lambda x: (x.sum(axis=()), x.any(axis=()), x.max(axis=()), x.mean(axis=())),
    "coarsened": lambda x: x[:6, :8].reshape(3, 2, 4, 2).sum((1, 3)),
    "windows": lambda x: np.lib.stride_tricks.sliding_window_view(x, (3, 2)).mean((-1, -2)),
    "result turned": lambda x: (x.sum(0)[::-1], x.sum(1, keepdims=True).T, x.sum()[None]),
    "result concatenated": lambda x: np.concatenate([x.sum(0), x.max(0) * 2]),
    "stacked": lambda x: np.stack([x.mean(0), x.std(0)]),
    "several": lambda x: {"a": x.sum(0), "b": [x.mean(), (x * 2, None)], "n": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("x", [DOUBLE, SINGLE, DOUBLE.T.copy().T], ids=["f8", "f4", "fortran"])
def test_reductions(name, x):
    agree(REDUCTIONS[name], x)


NANS = {
    "sums": lambda x: (np.nansum(x), np.nansum(x, 0), np.nanprod(x, 1)),
    "means": lambda x: (np.nanmean(x), np.nanmean(x, 0), np.nanmean(x, 1, keepdims=True)),
    "variances": lambda x: (np.nanvar(x), np.nanstd(x, 0), np.nanvar(x, 1, ddof=1)),
    "extremes": lambda x: (np.nanmin(x), np.nanmax(x, 0)),
}


@pytest.mark.parametrize("name", NANS)
@pytest.mark.parametrize("x", [HOLES, HOLES.astype("f4"), DOUBLE], ids=["f8", "f4", "none"])
def test_without_nan(name, x):
    agree(NANS[name], x)


def test_three_axes():
    agree(lambda x: (x.sum((0, 2)), x.max(1, keepdims=True), x.mean((1, 2)), x.argmax(1)), CUBE)
    agree(lambda x: x.transpose(2, 0, 1)[::-1, 1:].sum(1) + 1, CUBE)
    agree(lambda x: (x - x.mean((0, 1))).std(2), CUBE)
    agree(lambda x: np.linalg.norm(x, axis=(0, 2)) + np.trace(x, axis1=0, axis2=1).sum(), CUBE)


SIDE_BY_SIDE = {
    "all": lambda a, b, c: np.concatenate([a, b, c]).sum(),
    "keepdims": lambda a, b, c: np.concatenate([a, b], 1).sum((0, 1), keepdims=True) + c[:, :1],
    "rows": lambda a, b, c: np.concatenate([a, b, c], 0).sum(axis=0),
    "columns": lambda a, b, c: np.concatenate([a, b, c], 1).sum(axis=0),
    "of a product": lambda a, b, c: np.concatenate([a * 2, b, c - a], 1).sum(1),
    "prod": lambda a, b, c: np.concatenate([a, b, c]).prod(0),
    "min": lambda a, b, c: np.concatenate([a, b, c]).min(0, keepdims=True),
    "max": lambda a, b, c: np.concatenate([a, b, c], 1).max(),
    "any": lambda a, b, c: np.concatenate([a > 0, b > 0]).any(0),
    "all of them": lambda a, b, c: np.concatenate([a != 0, b > 1, c < 2]).all(0),
    "mean": lambda a, b, c: np.concatenate([a, b, c]).mean(0),
    "of integers": lambda a, b, c: np.concatenate([a, b]).astype("i2").sum(0),
    "steps": lambda a, b, c: np.concatenate(
        [np.concatenate([a, b]).sum(0, keepdims=True), c]).sum(0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "i4", "?"])
@pytest.mark.parametrize("case", list(SIDE_BY_SIDE))
def test_a_few_side_by_side_are_added_up_one_by_one(case, dtype):
    """So that a step of a tree can be part of the next one's kernel."""
    if dtype == "c8" and case in ("min", "max", "any", "all of them", "of integers"):
        pytest.skip("complex numbers have no order here, and are no integers")
    if dtype == "?" and case == "of a product":
        pytest.skip("NumPy has no minus of bools")
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(0, 3, (n, 3)).astype(dtype) for n in (1, 1, 1))
    agree(SIDE_BY_SIDE[case], a, b, c)
    made = kernels(SIDE_BY_SIDE[case], a, b, c)
    assert not any(k.reductions for k in made)
    if dtype in ("f4", "f8") and "of" not in case:
        agree(SIDE_BY_SIDE[case], a, b * np.nan, c)


def test_floats_side_by_side_add_up_in_double_precision():
    a, b, c = (np.full((1, 1), v, "f4") for v in (2.0**24, 1, 1))
    total = traced(lambda a, b, c: np.concatenate([a, b, c]).sum(), a, b, c)
    assert total == np.float32(2.0**24 + 2)


def test_many_side_by_side_are_a_reduction():
    x = np.ones((3, 40))
    (kernel,) = kernels(lambda x: np.concatenate([x, x * 2]).sum(0), x)
    assert kernel.reductions


def test_arrays_without_elements():
    nothing = np.zeros((0, 3))
    agree(lambda x: (x + 1, x.sum(), x.sum(0), x.prod(1), x.any(), x.mean(1)), nothing)
    agree(lambda x: np.concatenate([x, np.ones_like(x, shape=(2, 3))]), nothing)
    agree(lambda x: (x + 1).reshape(3, 0).T[:, ::-1], nothing)
    assert "zero-size array" in reason(lambda x: x.max(), nothing)


def test_points():
    """Arrays without axes: NumPy gives scalars for most of what is done to them."""
    point = np.array(2.5)
    agree(lambda x: (x + 1, x.sum(), np.sqrt(x), x[None] * 2, x.reshape(1) + 1), point)
    agree(lambda x: (np.where(x > 0, x, 0), x.astype("f4"), x.argmax()), point)


def test_huge_arrays_cost_nothing():
    shape = (1 << 31, 1 << 20)
    program = trace_function(lambda x: x[::-1].T[5:].sum(0), [AbstractArray(shape, np.dtype("f4"))])
    (leaf,) = nodes([program.kernels[0].reductions[0].arg])
    assert leaf.data[1] == View(((1 << 31) - 1) * (1 << 20) + 5, (1, -(1 << 20)))


def test_constants_that_numpy_spreads_are_known():
    agree(lambda x: x * np.broadcast_to(np.float32(3), (7, 9)) + np.ones((1, 1)), SINGLE)
    agree(lambda x: (x * 2, np.broadcast_to(2.0, (3, 3)) + x.sum()), SINGLE)
    agree(lambda x: x * np.eye(3).sum() + np.arange(5).mean(), SINGLE)


def test_arguments_in_containers():
    agree(lambda d: d["a"][0] + d["b"] * d["n"], {"a": [DOUBLE], "b": SINGLE, "n": 3})


def test_an_input_that_needs_no_memory():
    """Element i, j is 9 i + j: made where it is read, from no array."""
    expr = Expr("multiply", (index(View(0, (9, 1))),) * 2, "i8")
    program = trace_function(
        lambda g, x: (g[::2].T * x[0, 0], g.sum(1)),
        [GeneratedArray((7, 9), np.dtype("i8"), expr), AbstractArray((7, 9), np.dtype("f8"))],
    )
    assert program.inputs == 1
    got = fusion_task.compute_program(program, evaluate.evaluate, [DOUBLE])
    square = np.arange(63).reshape(7, 9) ** 2
    assert_same(got, (square[::2].T * DOUBLE[0, 0], square.sum(1)))


def test_special_functions():
    special = pytest.importorskip("scipy.special")
    agree(lambda x: special.erf(x) + special.expit(x.astype("f4")) + special.ndtr(x), DOUBLE)
    assert "values of an array" in reason(lambda x: special.spherical_jn(1, x), DOUBLE)
    assert "zeta is not one of" in reason(lambda x: special.zeta(x, 2), DOUBLE)


# ---- into which kernels


def test_mean_and_deviation_are_one_pass():
    """Two reductions over the same points; root and quotients at their end."""
    (kernel,) = kernels(lambda x: (x.mean(0), x.std(0)), DOUBLE)
    assert [r.op for r in kernel.reductions] == ["sum", "moment"]
    assert [o.op for o in kernel.outputs] == ["divide", "sqrt"]
    assert kernel.axes == (0,)


def test_what_is_broadcast_is_computed_once():
    """x - mean: the mean, quotient and all, is written by the first kernel and read by the next."""
    first, second = kernels(lambda x: x - x.mean(1, keepdims=True), DOUBLE)
    assert first.outputs[0].op == "divide"
    assert [n.op for n in nodes(second.outputs)] == ["input", "input", "subtract"]


def test_equal_work_is_done_once():
    (kernel,) = kernels(lambda x: (np.exp(x) + np.exp(x), x.copy() + 0, x + 0, x + 0), DOUBLE)
    assert len(kernel.outputs) == 2
    assert len({n for n in nodes(kernel.outputs) if n.op == "exp"}) == 1
    assert len(kernels(lambda x: x.sum() + x.sum() * x.mean(), DOUBLE)[0].reductions) == 1


def test_equal_expressions_are_one_output():
    program = trace_function(lambda x: [x + 1, x + 1], [AbstractArray((3,), np.dtype("f8"))])
    assert [o.array for o in program.result] == [1, 1]


def test_outputs_of_a_shape_share_a_kernel():
    """x + 1 has no need to wait for the mean; it goes with what reads x after it."""
    assert len(kernels(lambda x: (x + 1, x - x.mean()), DOUBLE)) == 2


HISTOGRAMS = {
    "a count": (10, (-1, 1)), "edges": ([-1, 0, 0.25, 3], None),
    "equal edges": ([0, 1, 1, 2], None),
    "whole numbers": (np.array([-3, 0, 2, 7]), None), "one point": (3, (0.5, 0.5)),
    "evenly": (np.linspace(0, 1, 8), None), "apart": (np.geomspace(1e-3, 3, 30), None),
    "doubles": (7, (np.float64(-1), np.float64(2))),
}  # fmt: skip


def heights(x, bins, range=None):
    return np.histogram(x, bins, range)[0]


@pytest.mark.parametrize("name", HISTOGRAMS)
@pytest.mark.parametrize("x", [DOUBLE, SINGLE, HOLES, DOUBLE.astype("f2"), INTS, INTS.astype("u1"),
                               ODD, DOUBLE[:0], DOUBLE.T[::2], DOUBLE[:1, 0], np.array(0.5)],
                         ids=lambda x: f"{x.dtype.str}{x.shape}")  # fmt: skip
def test_histograms(name, x):
    bins, span = HISTOGRAMS[name]
    agree(functools.partial(heights, bins=bins, range=span), x)


@given(
    hnp.arrays(st.sampled_from(["f4", "f8", "i2"]), st.integers(0, 40)),
    st.floats(-1e3, 1e3), st.floats(1, 1e6), st.integers(1, 50),
)  # fmt: skip
@thorough
def test_any_histogram(x, low, wide, bins):
    agree(functools.partial(heights, bins=bins, range=(low, low + wide)), x)
    agree(functools.partial(heights, bins=np.linspace(low, low + wide, bins + 1)), x)


def weights_in_bins(x, weights, bins=5, range=(-1, 1)):
    return np.histogram(x, bins, range, weights=weights)[0]


@given(
    hnp.arrays(st.sampled_from(["f4", "f8", "i2"]), st.integers(0, 40)),
    st.sampled_from(["f2", "f4", "f8", "i1", "u2"]), st.integers(0, 2**32), st.integers(1, 50),
)  # fmt: skip
@thorough
def test_any_histogram_of_weights(x, kind, seed, bins):
    # whole numbers add up to the same in any order
    w = np.random.default_rng(seed).integers(0, 100, x.shape).astype(kind)
    for edges, span in ((bins, (-9, 9)), (np.linspace(-9, 9, bins + 1), None)):
        agree(functools.partial(weights_in_bins, bins=edges, range=span), x, w)
    spans = ((-9, 9), (-5, 9))
    of_two = functools.partial(heights_of_two, bins=(bins, 3), range=spans)
    agree(lambda x, y, w: of_two(x, y, weights=w), x, x[::-1], w)


def test_weights_of_a_histogram():
    x, w = DOUBLE, DOUBLE.T.reshape(DOUBLE.shape)

    def heavy(x, w):
        return np.histogram(np.exp(x), 5, (0, 9), weights=w * 2)[0]

    (kernel,) = kernels(heavy, x, w)
    assert (kernel.is_histogram, kernel.is_weighted_histogram, kernel.output_shape) == (
        True,
        True,
        (5,),
    )
    np.testing.assert_allclose(traced(heavy, x, w), heavy(x, w))
    of_them = functools.partial(reason, weights_in_bins, x)
    assert of_them(w[:, :1]) == f"it weighs {x.shape} values by {w[:, :1].shape} weights"
    few = f"it weighs {x.size:,} values of a histogram by "
    for kind in ("?", "i8", "c16"):
        assert of_them(w.astype(kind)) == few + np.dtype(kind).name


def digits(x):
    return np.bincount(np.digitize(x.ravel(), (-1, 0, 0.5, 2)), minlength=5)


@pytest.mark.parametrize(
    ("count", "x"),
    [
        (lambda x: np.bincount(x, minlength=256), INTS.astype("u1").ravel()),
        (lambda x: np.bincount(x, minlength=300), INTS.astype("u1").ravel()),
        (lambda x: np.bincount(x > 0, minlength=2), DOUBLE.ravel()),
        (lambda x: np.bincount(x % 7, minlength=7), INTS.ravel()),
        (lambda x: np.bincount(x.clip(0, 9), minlength=10), INTS.ravel()),
        (lambda x: np.bincount(x & 15, None, 16), INTS.ravel()[:0]),
        (digits, DOUBLE),
        (digits, HOLES),
    ],
)
def test_numbers_are_counted_of_which_the_greatest_is_known(count, x):
    (kernel,) = kernels(count, x)
    assert kernel.is_histogram
    agree(count, x)
    agree(lambda x, w: np.bincount(x % 7, w, 7), INTS.ravel(), INTS.ravel()[::-1].astype("i8"))


def test_numbers_of_which_the_greatest_is_not_known():
    values = "numbers in its bincount are not known to be from 0 to minlength - 1"
    one = INTS.ravel()
    assert reason(lambda x: np.bincount(x, minlength=9), one) == values
    assert reason(lambda x: np.bincount(x % 7), one) == values
    assert reason(lambda x: np.bincount(x % 7, minlength=6), one) == values
    assert reason(lambda x: np.bincount(x, minlength=255), one.astype("u1")) == values
    assert "it counts int32 of shape" in reason(lambda x: np.bincount(x, minlength=9), INTS)
    wide = np.array([2**63 - 1, 3, -5, 7])  # where adding wraps around
    capped = [lambda x: np.maximum(x, 0) + 1, lambda x: np.minimum(x, 0) - 1]
    for f in capped:
        assert reason(lambda x: np.bincount(np.minimum(f(x), 5), minlength=6), wide) == values  # noqa: B023
    assert "it counts float64" in reason(lambda x: np.bincount(x, minlength=9), DOUBLE.ravel())
    weights = "it weighs by complex128"
    assert reason(lambda x, w: np.bincount(x % 7, w, 7), one, one * 1j) == weights
    agree(lambda x, w: np.bincount(x % 7, w, 7), one[:0], one[:0] * 1.0)
    nothing = "its histogram has no bins"
    assert reason(lambda x: np.histogram(x, (1.0,))[0], DOUBLE) == nothing
    assert reason(lambda x: np.histogram(x, (1.0,), weights=x)[0], DOUBLE) == nothing


def test_weights_that_a_mask_selects():
    x, w = DOUBLE, DOUBLE.T.reshape(DOUBLE.shape)
    given = [AbstractArray(a.shape, a.dtype) for a in (x, w)]

    def chosen(x, w):
        return weights_in_bins(x[x > 0], w[x > 0])

    program = trace_function(chosen, given, True)
    got = fusion_task.compute_program(program, evaluate.evaluate, [x, w])
    np.testing.assert_allclose(got, chosen(x, w))
    for other in (lambda x, w: w, lambda x, w: w[x > -1]):
        with pytest.raises(NotTraceable, match="a mask selects the values .*, and not so the wei"):
            trace_function(lambda x, w: weights_in_bins(x[x > 0], other(x, w)), given, True)  # noqa: B023


def heights_of_two(x, y, bins, range=None, weights=None):
    return np.histogramdd((x, y), bins, range, weights=weights)[0]


@given(
    hnp.arrays(st.sampled_from(["f4", "f8", "i2"]), st.tuples(st.integers(0, 40), st.just(2))),
    st.sampled_from(["f4", "f8", "i4"]), st.floats(-1e3, 1e3), st.floats(1, 1e6),
    st.integers(1, 9), st.integers(1, 9),
)  # fmt: skip
@thorough
def test_any_histogram_of_two(x, dtype, low, wide, n, m):
    with np.errstate(all="ignore"):
        y = np.nan_to_num(x[:, 1], posinf=9, neginf=-9).clip(-1e4, 1e4).astype(dtype)
    span = ((low, low + wide), (-1e3, wide))
    of_two = functools.partial(heights_of_two, bins=(n, m), range=span)
    agree(of_two, x[:, 0], y)
    edges = tuple([np.linspace(*s, 5) for s in span])
    agree(functools.partial(heights_of_two, bins=edges), x[:, 0], y)
    agree(lambda x: np.histogramdd(x, n, span)[0], x)


def test_a_histogram_of_two_is_one_pass():
    def of_two(x, y):
        return np.histogramdd((x, np.exp(y)), (5, 4), ((0, 9), (0, 1)))[0]

    kernel, _ = kernels(of_two, DOUBLE[:, 0], DOUBLE[:, 1])  # then their type
    assert (kernel.is_histogram, kernel.output_shape) == (True, (20,))
    one = DOUBLE[:, 0]
    assert "no range" in reason(lambda x: np.histogramdd((x, x), 5), one)
    assert "no range" in reason(lambda x: np.histogramdd((x, x), (5, [0.0, 1.0])), one)
    spans = ((0, 1), (0, 1))
    assert "densities" in reason(lambda x: np.histogramdd((x, x), 5, spans, density=True), one)
    assert "complex" in reason(lambda x: np.histogramdd((x, x * 1j), 5, spans), one)
    assert "depend on" in reason(lambda x: np.histogramdd((x, x), (x, x), spans), one)


def test_a_histogram_is_one_pass_over_what_is_computed():
    (kernel,) = kernels(
        lambda x: np.histogram(np.exp(x) * 2, 5, range=(0, 9))[0][np.newaxis], DOUBLE
    )
    assert (kernel.is_histogram, kernel.output_shape, kernel.points) == (True, (5,), DOUBLE.size)
    both = kernels(
        lambda x, y: [np.histogram(v, 5, range=(0, 9))[0] for v in (x, y, x)], CUBE, CUBE + 1
    )
    assert [k.is_histogram for k in both] == [True, True]


@pytest.mark.parametrize("products", [False, True])
def test_a_histogram_of_what_is_computed_from_a_result(products):
    """The bins are counted where they are found, and stored nowhere."""

    def centred(x):
        return heights((x - x.mean(0)) / x.std(), 4, (-2, 2))

    program = trace_function(centred, [AbstractArray(DOUBLE.shape, DOUBLE.dtype)], products)
    assert program.kernels[-1].is_histogram
    assert_same(fusion_task.compute_program(program, evaluate.evaluate, [DOUBLE]), centred(DOUBLE))


def test_histograms_that_depend_on_values_stay_as_they_are():
    assert reason(lambda x: np.histogram(x, 5), DOUBLE) == "its histogram has no range"
    assert "depend on values" in reason(lambda x: np.histogram(x, "auto", range=(0, 1)), DOUBLE)
    assert "depend on values" in reason(lambda x, y: np.histogram(x, y), DOUBLE, SINGLE[0])
    assert "densities" in reason(lambda x: np.histogram(x, 5, (0, 1), density=True), DOUBLE)
    assert "bool" in reason(lambda x: np.histogram(x > 0, 5, range=(0, 1)), DOUBLE)
    assert "complex128" in reason(lambda x: np.histogram(x * 1j, 5, range=(0, 1)), DOUBLE)
    assert "must be positive" in reason(lambda x: np.histogram(x, 0, range=(0, 1)), DOUBLE)


EDGES = {
    "even": np.linspace(-1, 1, 5),
    "descending": np.linspace(2, -2, 8),
    "integers": np.array([0, 3, 3, 7]),
    "a list": [0.5],
    "single": np.array([-0.1, 0.1], "f4"),
}


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("x", [DOUBLE, SINGLE, HOLES, DOUBLE.astype("f2"), INTS, INTS.astype("u1"),
                               DOUBLE[:0], DOUBLE.T[::2], np.array(0.5)],
                         ids=lambda x: f"{x.dtype.str}{x.shape}")  # fmt: skip
def test_bins_of_values(name, x, right):
    agree(functools.partial(np.digitize, bins=EDGES[name], right=right), x)


@pytest.mark.parametrize("right", [False, True])
def test_bins_whose_edges_are_computed(right):
    edges = np.sort(SINGLE[0])
    agree(lambda x, y: np.digitize(x, y * 2, right), DOUBLE, edges)
    agree(lambda x, y: np.digitize(x, y, right), HOLES, edges[::-1])


def test_bins_that_are_found_by_numpy():
    assert "40 edges" in reason(functools.partial(np.digitize, bins=np.arange(40)), DOUBLE)
    assert "bool" in reason(np.digitize, DOUBLE > 0, SINGLE[0])
    assert "monotonic" in reason(functools.partial(np.digitize, bins=[0, 2, 1]), DOUBLE)
    assert "edges of float64" in reason(functools.partial(np.digitize, bins=[0, np.nan]), DOUBLE)


@pytest.mark.parametrize("x", [DOUBLE, INTS, CUBE, DOUBLE.T[::2], DOUBLE[:0], DOUBLE[0] > 0],
                         ids=lambda x: f"{x.dtype.str}{x.shape}")  # fmt: skip
def test_elements_that_are_repeated(x):
    for times in (0, 1, 3, np.int64(2)):
        agree(lambda x, n=times: np.repeat(x + x, n), x)
        agree(lambda x, n=times: np.repeat(x * 2, n, axis=-1) + 1, x)
        agree(lambda x, n=times: (x + x).repeat(n, 0), x)
    assert "as an array says" in reason(lambda x: np.repeat(x, [1, 2]), DOUBLE)
    assert "negative" in reason(lambda x: np.repeat(x, -1), DOUBLE)


def test_parts_are_put_together_first_where_it_is_asked_for():
    """Once, however deep they are nested; what reads them reads one array."""

    def smooth(x):
        whole = np.block([[x, x[:, :1]], [x[:1], x[:1, :1]]])
        return whole[1:, 1:] + whole[:-1, :-1]

    known = [AbstractArray(DOUBLE.shape, DOUBLE.dtype)]
    (kernel,) = trace_function(smooth, known).kernels
    first, second = trace_function(smooth, known, whole=True).kernels
    assert {n.data[0] for n in nodes(kernel.roots) if n.op == "input"} == {0}
    assert {n.data[0] for n in nodes(second.roots) if n.op == "input"} == {1}
    assert first.shape == (DOUBLE.shape[0] + 1, DOUBLE.shape[1] + 1)
    program = trace_function(
        lambda x: np.concatenate([np.concatenate([x, x]), x]) * 2, known, whole=True
    )
    assert len(program.kernels) == 2
    for function in (smooth, lambda x: np.concatenate([np.concatenate([x, x + 1], 1)] * 2)[1:] * 2):
        program = trace_function(function, known, whole=True)
        assert_same(
            fusion_task.compute_program(program, evaluate.evaluate, [DOUBLE]), function(DOUBLE)
        )


def test_choices_that_are_known_everywhere_are_not_made():
    """The ends of what is rolled are cut off."""
    (kernel,) = kernels(lambda x: np.roll(x, 1, 0)[1:], DOUBLE)
    assert all(n.op != "where" for n in nodes(kernel.roots))


def test_independent_reductions_share_a_pass():
    assert len(kernels(lambda x, y: (x.sum(1), (x * y).max(1), y.argmin(1)), DOUBLE, DOUBLE)) == 1
    assert len(kernels(lambda x: (x.sum(1), x.sum(0)), DOUBLE)) == 2


def test_counts_are_no_kernel_of_their_own():
    """Dask's mean_chunk: how many elements there were is written with the sums."""
    from dask.array.reductions import mean_chunk

    (kernel,) = kernels(functools.partial(mean_chunk, axis=(0,), keepdims=True), DOUBLE)
    assert [o.op for o in kernel.outputs] == ["reduced", "constant"]


def test_moments_are_one_pass():
    from dask.array.reductions import moment_chunk

    chunk = functools.partial(moment_chunk, axis=(1,), keepdims=True, dtype="f8")
    (kernel,) = kernels(chunk, DOUBLE)
    assert [r.op for r in kernel.reductions] == ["moment"]
    agree(chunk, DOUBLE)


def test_a_reshape_that_copies_is_a_kernel():
    first, second = kernels(lambda x: (x.T + 1).reshape(-1).reshape(3, 21).sum(1), DOUBLE)
    assert first.shape == (9, 7)
    assert second.shape == (3, 21)


def test_the_same_twice():
    one, two = (
        trace_function(REDUCTIONS["softmax"], [AbstractArray((3, 4), np.dtype("f4"))]) for _ in "ab"
    )
    assert one == two


# ---- Dask's tasks


def task_parts(task, values):
    """The function and the arguments of a task, as the scheduler has them."""
    if isinstance(task, CompiledCall):
        return task.function, [_value(a, values) for a in task.args]
    if isinstance(task, Task):
        words = {k: _value(v, values) for k, v in task.kwargs.items()}
        function = functools.partial(task.func, **words) if words else task.func
        return function, [_value(a, values) for a in task.args]
    return None


def perform(task, values, reasons):
    parts = task_parts(task, values)
    if parts is not None:
        try:
            return traced(parts[0], *parts[1])
        except NotTraceable as why:
            reasons.append(str(why))
    return task(values)


def computed(collection):
    """The value of a Dask array by followed tasks, and why some were not."""
    graph = from_dask(collection.__dask_graph__(), collection.__dask_keys__())
    values, reasons = dict(graph.data), []
    for key, task in graph.tasks.items():
        needs = zip(graph.names[key], graph.needs[key], strict=True)
        known = {**graph.constants.get(key, {}), **{name: values[k] for name, k in needs}}
        for name, step in task.tasks if isinstance(task, Chain) else [(key, task)]:
            values[key] = known[name] = perform(step, known, reasons)

    def filled(keys):
        if isinstance(keys, list):
            return [filled(k) for k in keys]
        return values[graph.alias.get(keys, keys)]

    return da.core.finalize(filled(collection.__dask_keys__())), reasons


def chunked(x):
    return da.from_array(x, chunks=(4, 5))


def assigned_chunks(x):
    x = x.copy()
    x[2:5, 1] = 3
    x[x > 1] = 0
    return x


DASK = {
    "chain": lambda x, y: (x * 2 + 1) * y - x,
    "fused": lambda x, y: da.exp(-0.5 * ((x - y) / 2) ** 2).sum(),
    "sums": lambda x, y: da.stack([x.sum(), y.prod(), x.min(), y.max()]),
    "axes": lambda x, y: x.sum(0) + y.max(0) - x.prod(0),
    "truth": lambda x, y: (x > 1).any() & (y > -9).all(),
    "mean": lambda x, y: x.mean() + y.mean(0),
    "var": lambda x, y: x.var() + y.std(0) + da.var(x, 0, ddof=1),
    "moment": lambda x, y: da.reductions.moment(y, 3, axis=0),
    "argmin": lambda x, y: x.argmin() + y.argmax(),
    "argmax 0": lambda x, y: x.argmax(0) + da.argmin(y, axis=0, keepdims=True),
    "nans": lambda x, y: da.nansum(x) + da.nanmean(y, 0) + da.nanmax(x, 0),
    "nan var": lambda x, y: da.nanstd(x) + da.nanvar(y, axis=0),
    "norm": lambda x, y: da.linalg.norm(x) + da.linalg.norm(y, 1, axis=0),
    "softmax": lambda x, y: (
        da.exp(x - x.max(1, keepdims=True))
        / da.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)
    ),
    "where": lambda x, y: da.where(x > 0, x, 0) + da.where(y > 0, y, -y),
    "clip": lambda x, y: da.clip(x, -0.5, 0.5) + da.round(y, 2),
    "slices": lambda x, y: x[1:-1, ::2] * y[-2:0:-1, ::2],
    "concatenate": lambda x, y: da.concatenate([x, y * 2], 0) + 1,
    "stack": lambda x, y: da.stack([x, y + 1]) * 2,
    "roll": lambda x, y: da.roll(x, 2, 0) * 2,
    "overlap": lambda x, y: x.map_overlap(lambda a: a * 2 - a[::-1], depth=1, boundary="reflect"),
    "blocks": lambda x, y: x.map_blocks(lambda a, b: np.where(a > 0, a, b) + 1, y),
    "diff": lambda x, y: da.diff(x, axis=0) + da.gradient(y)[0][1:],
    "arange": lambda x, y: x[0] * da.arange(9, chunks=5) + da.arange(0, 0.9, 0.1, chunks=5),
    "linspace": lambda x, y: x[0] * da.linspace(0, 1, 9, chunks=5),
    "ones": lambda x, y: x * da.ones((7, 9), chunks=(4, 5)) + da.full((7, 9), 3.0, chunks=(4, 5)),
    "eye": lambda x, y: da.eye(7, chunks=4) * 3 + x[:, :7],
    "tri": lambda x, y: da.tril(x[:, :7].rechunk(4)) * 2,
    "fromfunction": lambda x, y: (
        da.fromfunction(lambda i, j: i * 2 + j, shape=(7, 9), chunks=4) * y.rechunk(4)
    ),
    "meshgrid": lambda x, y: sum(da.meshgrid(x[0], y[1])),
    "rechunk": lambda x, y: x.rechunk(3) * 2,
    "coarsen": lambda x, y: da.coarsen(np.sum, x[:6, :8].rechunk(4), {0: 2, 1: 2}),
    "reshape": lambda x, y: (x + 1).reshape(-1) * 2,
    "complex": lambda x, y: abs((x + 1j * y).conj() * 2) + (x * 1j).imag + da.angle(y + 1j),
    "complex var": lambda x, y: (x + 1j * y).var(0),
    "tests": lambda x, y: da.isclose(x, y) | da.isnan(y) | (da.nan_to_num(x) > 2),
    "integers": lambda x, y: x.astype("i4") // 3 + y.astype("i4") % 4,
    "ptp": lambda x, y: da.ptp(x, 0) + da.count_nonzero(y > 0) + da.average(x, axis=0),
    "weights": lambda x, y: da.average(x, weights=abs(y)),
    "outer": lambda x, y: da.outer(x[0], y[1]),
    "histogram": lambda x, y: da.histogram(x * y, 9, (-2, 2), density=True)[0],
    "histogram of two": lambda x, y: da.histogram2d(
        x.ravel(), y.ravel(), [4, 3], [(-2, 2), (-1, 1)]
    )[0],
    "histogram of rows": lambda x, y: da.histogramdd(
        x.rechunk({1: -1})[:, :2], [4, 3], [(-2, 2), (-1, 1)]
    )[0],
    "pad": lambda x, y: da.pad(x, 1) * 2,
    "out": lambda x, y: da.add(x, y, where=x > 0, out=da.zeros_like(y)),
    "assigned": lambda x, y: assigned_chunks(x) + 1,
    "standardised": lambda x, y: (x - x.mean(0)) / x.std(0),
    "views": lambda x, y: da.moveaxis(x, 0, 1) * 2 + y[:1].squeeze()[:, None],
    "functions": lambda x, y: da.sinc(x) + da.modf(y)[0] + da.ldexp(x, 2),
    "select": lambda x, y: da.select([x > 0, y > 0], [x, y], 0),
}


@pytest.mark.parametrize("name", DASK)
def test_tasks_of_dask(name):
    """Every task either takes a view or is followed, and the whole is what Dask computes."""
    x, y = chunked(DOUBLE), chunked(SINGLE.astype("f8"))
    want = directly(lambda: DASK[name](x, y).compute(scheduler="sync"))
    got, reasons = computed(DASK[name](x, y))
    assert_same(np.asarray(got), np.asarray(want))
    allowed = ("it only takes a view", "it computes no array")  # the latter of scalars
    assert [r for r in reasons if r not in allowed] == []


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("it multiplies matrices", lambda x: da.tensordot(x, x, 2)),
        ("cumsum", lambda x: x.cumsum(0)),
        ("partition", lambda x: da.topk(x, 2)),
        ("all values are NaN", lambda x: da.nanargmax(x)),
        ("into bins", lambda x: da.digitize(x, np.arange(40))),
        ("more than one result", lambda x: da.frexp(x)[0]),
    ],
)
def test_tasks_that_stay_as_they_are(name, expression):
    got, reasons = computed(expression(chunked(DOUBLE)))
    assert any(name in r for r in reasons)
    assert_same(np.asarray(got), np.asarray(expression(chunked(DOUBLE)).compute(scheduler="sync")))


def test_known_functions_inside_compiled_ones():
    """Two levels of fused functions; the inner one calls what Dask's own would take two passes."""
    from dask._task_spec import TaskRef
    from dask.array.reductions import moment_chunk

    inner = {"b": Task("b", moment_chunk, TaskRef("a"), axis=(0,), keepdims=True)}
    fused = compile_subgraph(inner, "b", ("a",))
    outer = {
        "c": Task("c", fused, TaskRef("a")),
        "d": Task("d", operator.getitem, TaskRef("c"), "M"),
    }
    function = compile_subgraph(outer, "d", ("a",))
    (kernel,) = kernels(function, DOUBLE)
    assert [r.op for r in kernel.reductions] == ["moment"]
    agree(function, DOUBLE)


# ---- products with vectors

PRODUCTS = {
    "@": [
        (np.matmul, *shapes)
        for shapes in (
            ((5, 7), (7,)), ((7,), (7, 5)), ((7,), (7,)), ((5, 7), (7, 1)), ((1, 7), (7, 5)),
            ((1, 7), (7, 1)), ((3, 5, 7), (7,)), ((3, 5, 7), (3, 7, 1)), ((3, 1, 7), (3, 7, 4)),
            ((1, 5, 7), (3, 7, 1)), ((7,), (2, 7, 5)), ((5, 1), (1,)), ((0, 7), (7,)),
            ((5, 0), (0,)),
        )
    ],
    "dot": [
        (np.dot, *shapes)
        for shapes in (
            ((5, 7), (7,)), ((7,), (7, 5)), ((7,), (7,)), ((2, 5, 7), (7,)), ((7,), (3, 7, 5)),
            ((), (3, 4)), ((5, 7), (7, 1)),
        )
    ],
    "inner and vdot": [
        (np.inner, (5, 7), (7,)), (np.inner, (7,), (7,)), (np.inner, (), (3,)),
        (np.vdot, (5, 7), (5, 7)), (np.vdot, (7,), (7,)),
    ],
    "tensordot": [
        (lambda a, b: np.tensordot(a, b), (5, 7), (5, 7)),
        (lambda a, b: np.tensordot(a, b, ([1], [0])), (5, 7), (7,)),
        (lambda a, b: np.tensordot(a, b, ([0, 1], [2, 0])), (5, 7), (7, 3, 5)),
        (lambda a, b: np.tensordot(a, b, (-1, -1)), (2, 5, 7), (7,)),
        (lambda a, b: np.tensordot(a, b, 1), (2, 5, 7), (7,)),
    ],
    "einsum": [
        (lambda a, b, words=words: np.einsum(words, a, b), *shapes)
        for words, *shapes in (
            ("ij,j->i", (5, 7), (7,)), ("ij, ij -> i", (5, 7), (5, 7)), ("ij,ij->", (5, 7), (5, 7)),
            ("ij,i", (5, 7), (5,)), ("ijk,k->ji", (2, 5, 7), (7,)), ("ij,ji->j", (5, 7), (7, 5)),
            ("ij,j->ji", (5, 7), (7,)),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("dtypes", ["ff", "df", "Ff", "ii", "??", "ee", "Bh", "DD"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_vectors(name, dtypes):
    """One pass over the larger operand; NumPy's types, also of numbers and of arrays of no axes."""
    rng = np.random.default_rng(1)
    for function, *shapes in PRODUCTS[name]:
        a, b = (
            (rng.normal(0, 2, s) + (1j * rng.normal(0, 2, s) if t in "FD" else 0)).astype(t)
            for s, t in zip(shapes, dtypes, strict=True)
        )
        arrays = []
        program = trace_function(function, [abstract(v, arrays) for v in (a, b)], products=True)
        assert len(program.kernels) == 1
        with np.errstate(all="ignore"):
            got = fusion_task.compute_program(program, evaluate.evaluate, arrays)
        assert_same(got, directly(function, a, b), scale=100.0)


@pytest.mark.parametrize(
    ("why", "function", "shapes"),
    [
        ("multiplies matrices", np.matmul, ((5, 7), (7, 3))),
        ("multiplies matrices", np.dot, ((5, 7), (7, 3))),
        ("multiplies matrices", lambda a, b: np.einsum("ij,kj->ik", a, b), ((5, 7), (4, 7))),
        ("takes a diagonal", lambda a, b: np.einsum("ii,i->i", a, b), ((5, 5), (5,))),
        ("its einsum has", lambda a, b: np.einsum("...j,j->...", a, b), ((5, 7), (7,))),
        ("mismatch", np.matmul, ((5, 7), (6,))),
        ("mismatch", np.matmul, ((5, 1), (6,))),
        ("enough dimensions", np.matmul, ((), (6,))),
        ("shape-mismatch", np.dot, ((5, 7), (6,))),
        ("do not match", lambda a, b: np.einsum("ij,j->i", a, b), ((5, 7), (6,))),
        ("do not fit", lambda a, b: np.einsum("ijk,j->i", a, b), ((5, 7), (7,))),
        ("is in no operand", lambda a, b: np.einsum("ij,j->k", a, b), ((5, 7), (7,))),
        ("out=", lambda a, b: np.matmul(a, b, out=np.empty(5)), ((5, 7), (7,))),
    ],
)
def test_products_that_are_not_followed(why, function, shapes):
    given = [AbstractArray(s, np.dtype("f8")) for s in shapes]
    with pytest.raises(NotTraceable, match=why):
        trace_function(function, given, products=True)


# ---- what is not followed

SCALE = 3.0
TABLE = [1.0, 2.0]


def caught(x):
    try:
        return x * float(x.sum())
    except Exception:
        return x + 1


REFUSED = {
    "numpy.linalg.qr is not element-wise": lambda x: np.linalg.qr(x),
    "numpy.sort is not element-wise": lambda x: np.sort(x),
    "it multiplies matrices": lambda x: x @ x.T,
    "numpy.add.accumulate": lambda x: np.add.accumulate(x),
    "how many elements it selects": lambda x: x[x > 0],
    "asks for an attribute of a function": lambda x: x * getattr(empty, "factor", 2.0),
    "it asks for an attribute of a": lambda x: x * (2 if hasattr(masked_view, "factor") else 3),
    "indexes with an array": lambda x: x[[0, 1]],
    "needs the values of an array (bool or if)": lambda x: x if x.sum() > 0 else -x,
    "needs the values of an array (float)": lambda x: x * float(x.sum()),
    "needs the values of an array (as a NumPy array)": lambda x: np.require(x) + 1,
    "needs the values of an array (item)": lambda x: x * x.max().item(),
    "it only takes a view": lambda x: x[1:].T,
    "it computes no array": lambda x: x.shape,
    "neither an input nor computed": lambda x: x * np.arange(9.0),
    "numpy.frexp has more than one result": lambda x: np.frexp(x),
    "concatenates 65 arrays": lambda x: np.concatenate([x] * 65),
    "makes an array of 70,368,744,177,664 elements": lambda x: np.empty(2**46, dtype="u1"),
    "makes an array of 9,999,999,999,999 elements": lambda x: x + np.arange(1, 1e13)[0] * 0,
    "array of 1,099,511,627,776 elements": lambda x: x + np.broadcast_to(1.0, 2**40).sum(),
    "array of 1,000,000,000 elements": lambda x: x + np.linspace(0, 1, num=10**9)[0],
    "array of 2,000,000 elements": lambda x: x + empty(2_000_000).sum(),
    "array of 4,000,000 elements": lambda x: x + np.eye(2000).sum() + np.indices((2, 2)).sum(),
    "it iterates over": lambda x: sum(row for row in np.concatenate([x] * 10)),
    "of which there are views": lambda x: masked_view(x * 1),
    "writes into an array that it is given": lambda x: np.add(x, 1, out=np.empty(())),
    "assigns an array through a mask": lambda x: masked_array(x * 1),
    "type object": lambda x: x.astype("O"),
    "asks for positions": lambda x: np.where(x > 0),
    "computes with a builtins.str": lambda x: x + "a",
    "broadcast": lambda x: x + x.T,
    "Integers to negative": lambda x: x.astype(int) ** -1,
    "out of bounds": lambda x: x.astype("u1") + 300,
    "may be negative": lambda x: x.astype(int) ** x.astype(int),
    "IndexError": lambda x: x[99] + 1,
    "does too many operations": lambda x: functools.reduce(np.add, range(50_000), x),
    "more than 4000 operations": lambda x: functools.reduce(np.add, range(5000), x),
}  # fmt: skip


def masked_view(y):
    row = y[0]
    y[1:] = 0
    return y + row


def masked_array(y):
    y[y > 0] = y[0]
    return y


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_followed_says_why(why):
    assert why in reason(REFUSED[why], DOUBLE)


def seen_through_another_name(x):
    y = x * 1
    flat = y.ravel()
    flat[0] = 5
    return y


def seen_in_parts(x):
    y = x * 1j
    y.real[...] = 5
    return y


def view_of_a_view(x):
    y = x * 1
    y[1:][1:] += 1
    return y


def rows(x):
    y = x * 1
    for row in y:
        row += 1
    return y


@pytest.mark.parametrize("writes", [seen_through_another_name, seen_in_parts, view_of_a_view, rows])
def test_writes_that_other_arrays_would_see(writes):
    """In NumPy they share memory. Here they do not, so the function is not followed."""
    assert "it writes into" in reason(writes, DOUBLE)


def test_what_a_function_does_to_its_input_stays_inside():
    def adds(x):
        x += 1
        x[0] = 0
        return x * 2

    want = directly(adds, DOUBLE.copy())
    before = DOUBLE.copy()
    assert_same(traced(adds, DOUBLE), want)
    assert_same(DOUBLE, before)


def test_a_refusal_cannot_be_swallowed():
    assert "float" in reason(caught, DOUBLE)


def test_strange_inputs():
    for dtype in ("O", "M8[s]", ">f8", "U3", [("a", "f8")]):
        assert "type" in reason(lambda x: x + 1, np.zeros(3, dtype))
    assert "reads a threading" in reason(lambda x, y: x, DOUBLE, __import__("threading").Event())


def test_interrupts_are_not_refusals():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace_function(interrupted, [AbstractArray((3,), np.dtype("f8"))])


# ---- whose code may be followed

HIDDEN = 2.0


def scaled(x):
    return helper(x) * SCALE


def helper(x):
    return np.sqrt(abs(x)) + HIDDEN


def generator(x):
    yield x


def writes(x):
    global HIDDEN
    HIDDEN = 3
    return x


def imports(x):
    import math

    return x + math.pi


def nested(x):
    def inner(y, k=2):
        return [y * k + z for z in range(3)]

    return sum(inner(x)) + (lambda a: a)(1)


def sets(x):
    x.name = 1
    return x


def recursive(x, n=3):
    return x if n == 0 else recursive(x * 2, n - 1)


def around(k):
    return lambda x: x * k


def counted():
    n = 0

    def count(x):
        nonlocal n
        n += 1
        return x + n

    return count


class Thing:
    def method(self, x):
        return x

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    "function",
    [
        scaled, helper, nested, recursive, around(3), around((1, 2)), operator.add, np.sin, np.sum,
        functools.partial(scaled), functools.partial(np.sum, axis=0), lambda x: np.linalg.norm(x),
        lambda x: max(len(x), 3) * x.T.astype(np.float32) + np.pi, lambda x: x[..., None],
        lambda x: isinstance(x, np.ndarray) and x, da.chunk.sum, da.reductions.mean_chunk,
        functools.partial(around(scaled)), da.core._enforce_dtype, da.chunk.argmin,
    ],
)  # fmt: skip
def test_pure_functions(function):
    assert why_impure(function) is None


def mine():
    """A module of a user's."""
    module = types.ModuleType("mine")
    exec(  # as a file would be
        "import math\nimport numpy as np\n"
        "SCALE, LIST, ARRAY = 2.5, [1], np.arange(4.0)\n"
        "def gain(b): return np.sqrt(b) * SCALE + math.sqrt(4)\n"
        "def loud(b): print(b)\n"
        "def _other(b): return b * 100\n"
        "def _module(b): return b * 1000\n",
        vars(module),
    )
    return module


MINE = mine()


@pytest.mark.parametrize(
    ("why", "function"),
    [
        ("calls print", lambda x: print(x)),
        ("reads TABLE, a list, which can change", lambda x: x * TABLE[0]),
        ("numpy.random", lambda x: x + np.random.random(3)),
        ("numpy.load", lambda x: x + np.load("f")),
        ("calls time.time", lambda x: x * time.time()),
        ("calls importlib.import_module", lambda x: importlib.import_module("numpy").sin(x)),
        ("calls print", lambda x: MINE.loud(x)),
        ("uses the module mine", lambda x: x * MINE.missing),
        ("reads MINE.LIST, a list", lambda x: x * MINE.LIST[0]),
        ("writes a global", writes),
        ("imports", imports),
        ("generator", generator),
        ("sets an attribute", sets),
        ("variable outside itself", counted()),
        ("reads k, a list", around([1])),
        ("calls a method", Thing().method),
        ("an object of type", Thing()),
        ("open", functools.partial(open, "f")),
        ("calls print", functools.partial(map, print)),
        ("not defined", lambda x: x + nowhere),  # noqa: F821
        ("passes on the module numpy", lambda x: getattr(np, "random")),  # noqa: B009
        ("calls print", lambda x: nested(x) + (lambda y: print(y))(x)),
        ("draws random numbers", da.random._apply_random),
        ("load_store_chunk", da.core.load_store_chunk),
        ("calls a method", RNG.normal),
        ("reads a _io", functools.partial(operator.add, __import__("io").BytesIO())),
        ("calls print", around(print)),
    ],
)
def test_impure_functions(why, function):
    assert why in (why_impure(function) or "")
    assert why in reason(function, DOUBLE)


def answer(function, *args):
    """What it says in the end, be it an error, and what it prints."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = function(*args)
    except Exception as error:
        said = error
    return said, printed.getvalue()


SCIPYS = {  # calls that draw numbers, read files, or tell settings
    "scipy.sparse.random(2, 2)": "_construct.random",
    "scipy.sparse.random_array((2, 2))": "random_array",
    "scipy.stats.bootstrap((T,), np.mean)": "bootstrap",
    "scipy.cluster.vq.kmeans(T, 2)": "kmeans",
    "scipy.optimize.dual_annealing(abs, [(0, 1)])": "dual_annealing",
    "scipy.stats.qmc.Sobol(1)": "Sobol",
    "scipy.spatial.transform.Rotation.random()": "Rotation",
    "scipy.stats.norm.rvs()": "norm_gen",
    "scipy.io.loadmat('f')": "loadmat",
    "scipy.io.mmread('f')": "mmread",
    "scipy.io.wavfile.read('f')": "read",
    "scipy.sparse.load_npz('f')": "load_npz",
    "scipy.fft.get_workers()": "get_workers",
    "scipy.special.errstate()": "errstate",
    "scipy.show_config()": "show",
}


@pytest.mark.parametrize("call", SCIPYS)
def test_scipys_functions_that_give_another_value_each_time_are_impure(call):
    """A kernel kept one for all blocks and all runs."""
    for module in ("cluster.vq", "fft", "io.wavfile", "optimize", "spatial.transform", "stats.qmc"):
        importlib.import_module(f"scipy.{module}")
    names = {"np": np, "scipy": importlib.import_module("scipy"), "T": 2.0}
    assert SCIPYS[call] in (why_impure(eval(f"lambda b: b + {call}", names)) or "")
    assert why_impure(eval("lambda b: b + scipy.special.expit(b)", names)) is None
    assert why_impure(eval("lambda b: b + scipy.linalg.inv(np.eye(2))", names)) is None


@pytest.mark.parametrize("word", ["now", "today", "NOW"])
def test_the_time_is_that_of_the_call(word):
    """A kernel kept the time of its making."""
    for f in (
        lambda b: b + np.datetime64("now").astype("f8"),
        lambda b: b + np.array(["today", "2020-01-01"], "M8[D]").astype("f8"),
        lambda b: b + np.datetime64(word).astype("f8"),
        lambda b, w=word: b + np.datetime64(w).astype("f8"),
        functools.partial(lambda b, w: b + np.datetime64(w).astype("f8"), w=word),
        functools.partial(lambda b, w: b + np.datetime64(w[0]).astype("f8"), w=[word]),
    ):
        assert "reads the clock by" in (why_impure(f) or "")
    assert why_impure(lambda b: b + np.datetime64("2020-01-01").astype("f8")) is None


def test_each_block_draws_rotations_of_its_own():
    from scipy.spatial.transform import Rotation

    x = da.from_array(np.zeros(8), chunks=4) + 0
    y = x.map_blocks(lambda b: b + Rotation.random().as_quat(), dtype="f8", meta=np.empty(0)) * 1
    with Scheduler("cpu:2", fuse_least=0) as s:
        drawn = np.stack([y.compute(scheduler=s).reshape(2, 4) for _ in range(2)]).reshape(4, 4)
    assert len({tuple(q) for q in drawn}) == 4


def test_each_run_reads_files_by_scipy(tmp_path):
    from scipy.io import loadmat, savemat

    path = str(tmp_path / "a.mat")
    x = da.from_array(np.zeros(8), chunks=4) + 0
    y = x.map_blocks(lambda b: b + loadmat(path)["a"].ravel(), dtype="f8", meta=np.empty(0)) * 2
    with Scheduler("cpu:2", fuse_least=0) as s:
        for n in range(3):
            savemat(path, {"a": np.full(4, float(n))})
            np.testing.assert_array_equal(y.compute(scheduler=s), np.full(8, 2.0 * n))


@pytest.mark.parametrize("taken", ["", "b"])
def test_functions_that_tell_numpys_settings_or_print_are_impure(taken):
    """A kernel kept what they had told: `np.get_printoptions()`, `np.getbufsize()`."""
    found, args = set(), [np.array([1 / 3])] if taken else []
    for name, function in vars(np).items():
        if not callable(function) or isinstance(function, type) or name == "test":
            continue
        before = answer(function, *args)
        size = np.setbufsize(16384)
        try:
            with np.printoptions(precision=3), np.errstate(divide="print", call=print):
                after = answer(function, *args)
        finally:
            np.setbufsize(size)
        if repr(before) != repr(after) or before[1]:
            found.add(name)
            assert why_impure(eval(f"lambda b: np.{name}({taken})", {"np": np})), name
    assert found >= ({"info", "array2string"} if taken else {"get_printoptions", "getbufsize"})


@pytest.mark.parametrize("setting", ["precision", "threshold"])
def test_a_changed_setting_of_numpy_is_seen_by_the_next_run(setting):
    x = da.from_array(np.ones(6), chunks=3) + 1
    y = x.map_blocks(lambda b: b * np.get_printoptions()[setting], dtype="f8") * 2
    with Scheduler("cpu:2", fuse_least=0) as s:
        for value in (3, 5, 3):
            with np.printoptions(**{setting: value}):
                np.testing.assert_equal(y.compute(scheduler=s), np.full(6, 4.0 * value))


def test_names_that_a_function_depends_on():
    """Numbers, modules and functions, in what it calls too; variables around it as well."""
    reads = {name: value for _, name, value in globals_read(scaled)}
    assert reads["SCALE"] == 3.0
    assert reads["HIDDEN"] == 2.0
    assert reads["helper"] is helper
    ((where, name, value),) = globals_read(around(5))
    assert (name, value, where["k"]) == ("k", 5, 5)


def test_functions_of_a_users_module(monkeypatch):
    """What it holds may change, as a global may."""
    x = da.from_array(np.arange(16.0), chunks=4)
    z = x.map_blocks(lambda b: MINE.gain(b) * b + MINE.SCALE + MINE.ARRAY)

    def want(scale):
        return (
            (np.sqrt(np.arange(16.0)) * scale + 2) * np.arange(16.0)
            + scale
            + np.tile(np.arange(4.0), 4)
        )

    with Scheduler("cpu:2", fuse_least=0) as scheduler:
        assert all(
            isinstance(s.task, fusion_task.KernelTask) for s in scheduler.plan(z).steps if s.inputs
        )
        np.testing.assert_allclose(z.compute(), want(2.5))
        named = x.map_blocks(lambda b: MINE._other(b) + MINE._module(b))
        np.testing.assert_allclose(named.compute(), 1100 * np.arange(16.0))
        monkeypatch.setattr(MINE, "SCALE", 4.0)
        np.testing.assert_allclose(z.compute(), want(4.0))
        monkeypatch.setattr(MINE, "gain", lambda b: 0 * b)
        np.testing.assert_allclose(z.compute(), 4.0 + np.tile(np.arange(4.0), 4))


def test_a_changed_global_is_seen():
    space = {"np": np}
    exec("k = 1\ndef f(x): return x * k", space)
    ((where, name, value),) = [r for r in globals_read(space["f"]) if r[1] == "k"]
    assert where[name] is value
    space["k"] = 2
    assert where[name] is not value


def test_functions_of_cupy_are_those_of_numpy():
    cupy = pytest.importorskip("cupy")
    special = pytest.importorskip("cupyx.scipy.special")

    def on_device(x):
        return cupy.where(x > 0, cupy.exp(x), 0) + cupy.sum(x, axis=0) + special.erf(x)

    from scipy.special import erf

    def on_host(x):
        return np.where(x > 0, np.exp(x), 0) + np.sum(x, axis=0) + erf(x)

    assert_same(traced(on_device, DOUBLE), on_host(DOUBLE))
    assert_same(traced(functools.partial(cupy.sum, axis=0), DOUBLE), DOUBLE.sum(0))
    assert_same(traced(cupy.sin, DOUBLE), np.sin(DOUBLE))


# ---- any program

DTYPES = ["?", "i1", "u2", "i4", "i8", "f4", "f8"]
EXACT = [np.negative, np.abs, np.square, np.positive, np.isfinite]
SMOOTH = [np.sqrt, np.exp, np.sin, np.arctan]
STEPPED = [np.floor, np.sign, np.isnan, np.logical_not, np.trunc]
BINARY = [operator.add, operator.sub, operator.mul, np.minimum, np.maximum, np.fmin]
DIVIDED = [operator.truediv, np.hypot, np.arctan2]
COMPARED = [
    operator.lt, operator.eq, operator.ne, np.logical_and, operator.floordiv, operator.mod,
    np.heaviside, np.copysign,
]  # fmt: skip
NUMBERS = [0, 1, 2, -3, 0.5, -1.25, True, np.float32(1.5), np.int16(3), np.float64(-2)]
VIEWS = [
    lambda a, axis: np.flip(a, axis), lambda a, axis: np.roll(a, 1, axis),
    lambda a, axis: np.moveaxis(a, axis, 0), lambda a, axis: np.concatenate([a, a * 2], axis),
    lambda a, axis: np.concatenate([a[::-1], a[:1], a]), lambda a, axis: a.reshape(-1),
    lambda a, axis: a.T, lambda a, axis: np.expand_dims(a, axis), lambda a, axis: a[0] + a,
    lambda a, axis: np.swapaxes(a, 0, axis)[1:], lambda a, axis: a[::2].copy(),
    lambda a, axis: a[..., ::-1, None], lambda a, axis: np.squeeze(a), lambda a, axis: a[-1],
    lambda a, axis: np.diff(a, axis=axis) if a.dtype != bool else a, lambda a, axis: a[:, ..., 0],
    lambda a, axis: np.stack([a, a], axis), lambda a, axis: np.broadcast_to(a, (2, *a.shape)),
]  # fmt: skip
REDUCERS = ["sum", "min", "max", "any", "all", "mean", "var", "prod", "argmin", "argmax"]


def with_number(operation, number, a):
    return operation(a, number)


def reduced_by(name, axis, keepdims, a):
    return getattr(a, name)(axis=axis, keepdims=keepdims)


def viewed_by(how, axis, a):
    return how(a, axis)


class Steps:
    """Draws functions for arrays, and keeps for each how far rounding may have taken it: 0 where
    it is exact. What jumps (a comparison, say) is only done to exact arrays."""

    def __init__(self, data, values):
        self.data, self.have = data, list(values)
        self.eps = [0.0] * len(values)
        self.plan = []

    def pick(self, options):
        return self.data.draw(st.sampled_from(options))

    def drawn(self):
        a, b = (self.data.draw(st.integers(0, len(self.have) - 1)) for _ in "ab")
        exact, array = not self.eps[a], np.asarray(self.have[a])
        kind = self.pick(["unary", "binary", "binary", "number", "view", "view", "reduce"])
        if kind == "unary":
            function = self.pick(EXACT + SMOOTH + STEPPED * exact)
            return function, (a,), function in SMOOTH
        if kind == "binary":
            both = exact and not self.eps[b]
            function = self.pick(BINARY + DIVIDED + COMPARED * both)
            return function, (a, b), function in DIVIDED
        if kind == "number":
            function = self.pick(BINARY + DIVIDED + COMPARED * exact)
            number = self.pick(NUMBERS)
            return functools.partial(with_number, function, number), (a,), function in DIVIDED
        axis = self.data.draw(st.integers(0, max(array.ndim - 1, 0)))
        if kind == "view":
            return functools.partial(viewed_by, self.pick(VIEWS), axis), (a,), False
        names = REDUCERS[: 10 if array.dtype.kind in "biu" else 7]
        name = self.pick(names if exact else ["sum", "min", "max", "mean", "var"])
        axis = self.pick([axis, None]) if array.ndim else None
        keep = self.data.draw(st.booleans())
        return functools.partial(reduced_by, name, axis, keep), (a,), name in ("mean", "var", "sum")

    def add(self):
        function, args, rounds = self.drawn()
        try:
            value = directly(function, *[self.have[k] for k in args])
        except (TypeError, ValueError, OverflowError, IndexError):
            return  # NumPy refuses
        known = np.asarray(value)
        if known.dtype.kind not in "biuf" or known.size > 10_000:
            return
        if np.abs(np.nan_to_num(known.astype("f8"), posinf=0, neginf=0)).max(initial=0) > 1e6:
            return
        eps = max(self.eps[k] for k in args)
        if known.dtype.kind == "f" and (rounds or eps):
            eps = max(eps, float(np.finfo(known.dtype).eps))
        self.have.append(value)
        self.eps.append(eps)
        self.plan.append((function, args))


@thorough
@given(st.data())
def test_any_program_computes_what_numpy_computes(data):
    """Views, arithmetic of mixed types and reductions, in any order and depth."""
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    numbers = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = [
        np.asarray(numbers.integers(-6, 7, shape) / 2).astype(data.draw(st.sampled_from(DTYPES)))
        for _ in range(2)
    ]
    if len(shape) > 1 and data.draw(st.booleans()):
        values[0] = np.ascontiguousarray(values[0].T).T
    steps = Steps(data, values)
    for _ in range(data.draw(st.integers(1, 8))):
        steps.add()
    plan, first = tuple(steps.plan), len(values)

    def program(*arrays):
        made = list(arrays)
        for function, args in plan:
            made.append(function(*[made[k] for k in args]))
        return made[first:]

    try:
        got = traced(program, *values)
    except NotTraceable as why:
        if str(why) not in ("it only takes a view", "it computes no array"):
            raise
        return
    largest = max(np.max(np.abs(np.nan_to_num(np.asarray(v, "f8"), posinf=0, neginf=0)), initial=1)
                  for v in steps.have)  # fmt: skip
    for g, w, eps in zip(got, steps.have[first:], steps.eps[first:], strict=True):
        assert np.asarray(g).dtype == np.asarray(w).dtype
        assert np.shape(g) == np.shape(w)
        if np.asarray(w).dtype.kind == "f":
            g, w = np.asarray(g, "f8"), np.asarray(w, "f8")
        np.testing.assert_allclose(g, w, rtol=300 * eps, atol=300 * eps * largest)


def test_workloads_that_come_with_the_package_are_users_code():
    """They are `graphs` in a checkout and `gpuscheduler.graphs` where the package is installed."""
    made = types.ModuleType("gpuscheduler.graphs.mine")
    exec("import os\ndef block(n):\n    return os.getpid() + n", vars(made))
    sys.modules[made.__name__] = made
    try:
        assert "os" in why_impure(made.block)
    finally:
        del sys.modules[made.__name__]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_one_divided_by_something_is_its_reciprocal(dtype):
    """To the last bit, which a kernel computes with less work."""
    x = np.array([3, -7, 0.1, 0, -0.0, np.inf, np.nan, 6e-8, 5e-324, 1e300], "f8")
    with np.errstate(all="ignore"):
        x = x.astype(dtype)
        want = 1 / x
        program = trace_function(lambda x: 1 / x, [AbstractArray(x.shape, x.dtype)])
        (kernel,) = program.kernels
        assert {n.op for n in nodes(kernel.outputs)} == {"reciprocal", "input"}
        (got,) = evaluate.evaluate(kernel, [x])
    np.testing.assert_array_equal(got.view(f"u{x.itemsize}"), want.view(f"u{x.itemsize}"))


#: What functions ask of what an array is, and not of its values.
ASKED = {
    "an array": lambda b: isinstance(b, np.ndarray),
    "another": lambda b: isinstance(b, (int, list, np.ma.MaskedArray)),
    "abstract": lambda b: isinstance(b, Iterable),
    "one": lambda b: isinstance(b[0, 0], np.ndarray),
    "number": lambda b: isinstance(b.sum(), float),
    "of NumPy": lambda b: isinstance(b.max() * 2, np.floating | int),
    "truth": lambda b: isinstance(b[0, 0] > 0, np.bool_),
    "scalar": lambda b: np.isscalar(b.sum()),
    "no scalar": lambda b: np.isscalar(b),
    "type": lambda b: type(b) is np.ndarray,
    "class": lambda b: b.__class__ is np.ndarray,
    "subclass": lambda b: issubclass(type(b), np.ndarray),
    "name": lambda b: type(b).__name__ == "ndarray",
    "get": lambda b: hasattr(b, "get"),
    "interface": lambda b: hasattr(b, "__array_interface__"),
    "GPU's": lambda b: hasattr(b, "__cuda_array_interface__"),
    "strides": lambda b: hasattr(b, "strides"),
    "default": lambda b: getattr(b, "strides", (0,))[0] > 0,
    "base": lambda b: getattr(b, "base", 1) is None,
    "own": lambda b: hasattr(b, "_expr"),
    "matched": lambda b: matched(b),
    "attempt": lambda b: attempt(b),
}


def matched(b):
    match b:
        case np.ndarray():
            return True
    return False


def attempt(b):
    try:
        b.sort(axis=0, kind="stable")
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("asked", ASKED)
def test_what_an_array_is_is_what_it_will_be(asked):
    ask = ASKED[asked]

    def f(b):
        b = b + 1
        return b * 2 + 1 if ask(b) else b * 3 - 1

    x = np.random.default_rng(0).random((60, 50))
    y = da.from_array(x, chunks=(30, 50)).map_blocks(f, dtype="f8", meta=np.empty((0, 0)))
    with Scheduler("cpu:2", fuse_least=0):
        np.testing.assert_allclose(y.compute(), y.compute(scheduler="sync"), rtol=1e-14)


def test_what_an_array_of_the_host_is_needs_no_task_of_its_own():
    def f(b):
        if not isinstance(b, np.ndarray) or isinstance(b, np.ma.MaskedArray):
            raise TypeError
        return b * 2 + 1

    x = da.from_array(DOUBLE, chunks=-1).map_blocks(f, meta=np.empty((0, 0)))
    with Scheduler("cpu:2", fuse_least=0) as s:
        assert all(type(t.task) is fusion_task.KernelTask for t in s.plan(x).steps)


#: Programs that differed from NumPy's: in values, types or shapes.
POINT = np.array(1.5)
NUMPYS = {
    "flip": (lambda x: np.flip(x * 2), POINT), "flip some": (lambda x: np.flip(x, 0) * 2, CUBE),
    "transpose": (lambda x: np.transpose(x.sum()), DOUBLE),
    "round": (lambda x: np.round(x) * 1, np.array(3)), "nan_to_num": (np.nan_to_num, POINT),
    "like": (lambda x: np.full_like(x, 2.5), POINT),
    "array": (lambda x: np.array(x.sum()), DOUBLE),
    "asarray": (lambda x: np.asarray(x.sum()), DOUBLE),
    "ndmin": (lambda x: np.array(x * 2, ndmin=4), CUBE),
    "contiguous": (lambda x: np.ascontiguousarray(x * 2), POINT),
    "squared": (lambda x: (x.max() > 0) ** 2, DOUBLE),
    "least": (lambda x: min(x.sum(), x.max()), DOUBLE),
    "squeezed": (lambda x: x * 2 if np.squeeze(x) is x else x * 3, DOUBLE),
    "less": (lambda x: x * 2 if np.squeeze(x) is x else x * 3, DOUBLE[:1]),
    "at least": (lambda x: x * 2 if np.atleast_2d(x) is x else x * 3, DOUBLE),
    "spread": (lambda x: x * 2 if np.broadcast_to(x, x.shape) is x else x * 3, DOUBLE),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPYS)
def test_small_things_are_as_in_numpy(name):
    agree(*NUMPYS[name])


@pytest.mark.parametrize(
    ("x", "y"), [((1,), (1,)), ((1, 1), (1,)), ((3, 1), (1,)), ((1, 1), (1, 1))]
)
def test_products_of_one_element(x, y):
    x, y = np.full(x, 2.5), np.full(y, 3.0)
    program = trace_function(
        np.dot, [AbstractArray(x.shape, x.dtype), AbstractArray(y.shape, y.dtype)], True
    )
    assert_same(fusion_task.compute_program(program, evaluate.evaluate, [x, y]), np.dot(x, y))


def test_a_histogram_of_one_element_on_a_gpu():
    program = trace_function(
        lambda x: heights(x, [0, 1, 2, 3]), [AbstractArray((1,), DOUBLE.dtype)], True
    )
    (kernel,) = program.kernels
    assert kernel.is_histogram


def shared(x):
    y = x * 2
    z = np.ascontiguousarray(y)
    z += 1
    return y


def unlike(x):
    x = x * 2
    x[x > 0] = np.nan
    return x


#: What is an error, or depends on values, in NumPy.
ERRORS = {
    "rounded": (lambda x: np.round(x > 0, 1), DOUBLE),
    "gradient": (lambda x: np.gradient(x > 0), DOUBLE),
    "joined": (lambda x: np.concatenate([x, x], dtype="i4"), DOUBLE),
    "padded": (lambda x: np.pad(x, 1, constant_values=np.nan), INTS),
    "too large": (lambda x: np.pad(x.astype("u1"), 1, constant_values=300), INTS),
    "not a number": (unlike, INTS),
    "arg": (lambda x: x.argmax(axis=()), DOUBLE),
    "ptp": (lambda x: x.ptp(), DOUBLE),
    "einsum": (lambda x: np.einsum("ij,j->i", x, x[0], dtype="f4"), DOUBLE),
    "types": (lambda x: max(x.sum(), x.max()), INTS),
    "numbers": (lambda x: min(x.sum(), 2.5), INTS),
    "real": (lambda x: x.var(dtype="f8"), COMPLEX),
    "product": (lambda x: np.matmul(x, x[0], dtype="f8"), SINGLE),
    "shared": (shared, DOUBLE),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("products", [False, True])
def test_what_numpy_has_to_say_itself_is_not_followed(name, products):
    function, x = ERRORS[name]
    with pytest.raises(NotTraceable):
        trace_function(function, [AbstractArray(x.shape, x.dtype)], products, CapturedArrays())


def test_classes_that_draw_or_open_or_choose_are_not_called_while_tracing():
    """They were, by their own names, as `numpy.random.RandomState` was not by its module's."""
    from numpy import float32, memmap, vectorize
    from numpy.random import PCG64, Generator, RandomState

    for f, reason in [
        (lambda b: b + RandomState().rand(), "draws random numbers"),
        (lambda b: b + Generator(PCG64()).random(), "draws random numbers"),
        (lambda b: b + memmap("x", shape=b.shape), "memmap"),
        (lambda b: vectorize(abs)(b), "vectorize"),
    ]:
        assert reason in (why_impure(f) or ""), f
    assert why_impure(lambda b: b * float32(2)) is None
