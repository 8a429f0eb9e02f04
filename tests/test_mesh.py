"""A function on every point of a grid is what NumPy makes of broadcast coordinates."""

from __future__ import annotations

import cmath
import functools
import math
import operator
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import dask
import dask.array as da
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import NotCompiled, Scheduler, axis, geomaxis, mesh
from gpuscheduler.codegen.cpu import evaluate as cpu_evaluate
from gpuscheduler.frontend.tiles import Tile, Tiles
from gpuscheduler.fusion.task import KernelTask, compute_program
from gpuscheduler.ir import hoist
from gpuscheduler.ir.expr import PLACEHOLDER, constant
from gpuscheduler.ir.hoist import hoist_invariants
from gpuscheduler.ir.rewrite import change_leaves
from gpuscheduler.mesh import MOST_TILES, MeshTile
from gpuscheduler.runtime.gather import ResultTarget
from tests.support.cuda_on_host import COMPILER, Host, aligned

#: `GPUSCHEDULER_EXAMPLES=1000 pytest tests/test_mesh.py` looks harder.
EXAMPLES = int(os.environ.get("GPUSCHEDULER_EXAMPLES", "30"))
FEW = settings(max_examples=EXAMPLES, deadline=None)
FACTOR = 2.5


@pytest.fixture(scope="module")
def cpu():
    with Scheduler(devices="cpu:2", check=True) as scheduler:
        yield scheduler


def grid(*axes, indexing="ij"):
    return np.meshgrid(*axes, indexing=indexing, sparse=True)


def steps(scheduler, x):
    return [s.task for s in scheduler.plan(x).steps]


# ---- functions


def distance(x, y):
    return math.sqrt(x * x + y * y)


def as_numpy(x, y):
    return np.sqrt(x * x + y * y)


def with_constants(x, y, scale, shift):
    return scale * math.exp(-((x - shift) ** 2)) + math.atan2(y, x) * FACTOR


def escape(x, y, most):
    c, z, n = complex(x, y), 0j, 0
    while n < most and z.real * z.real + z.imag * z.imag < 4.0:
        z, n = z * z + c, n + 1
    return n


def helped(x):
    return x * x if x > 0 else -x


def with_helper(x, y):
    return helped(x) + helped(y)


def decides_by_factor(x, y):
    return x * FACTOR if x > y else y


@numba.njit
def compiled_helper(x):
    return x + 1 if x > 0 else x - 1


def with_compiled_helper(x, y):
    return compiled_helper(x) * y


def polar(x, y):
    return math.hypot(x, y), math.atan2(y, x)


def branching_pair(x, y):
    if x > y:
        return x - y, 1
    return y - x, 0


def zeta(x, y):
    total = 0j
    for n in range(1, 30):
        total += cmath.exp(-complex(x, y) * math.log(n))
    return total


def compiled_zeta(x, y):
    return zeta(x, y)


def at_each_point(function, *axes):
    every = np.meshgrid(*axes, indexing="ij")
    return np.vectorize(function)(*every)


X, Y = np.linspace(-1, 1, 13), np.linspace(-2, 2, 10)
AXES = axis(-1, 1, 13), axis(-2, 2, 10)


@pytest.mark.parametrize("chunks", ["auto", 4, (5, 10), ((1, 12), (3, 3, 4))])
@pytest.mark.parametrize(
    "f", [distance, as_numpy, with_helper, with_compiled_helper, zeta, compiled_zeta]
)
def test_what_f_gives_at_each_point(cpu, f, chunks):
    z = mesh(f, AXES, chunks=chunks, how="numba" if f is compiled_zeta else "auto")
    wanted = at_each_point(getattr(f, "py_func", f), X, Y)
    assert z.shape == (13, 10)
    assert z.dtype == wanted.dtype
    np.testing.assert_allclose(z.compute(), wanted, rtol=1e-13)
    np.testing.assert_allclose(z.compute(scheduler="threads"), wanted, rtol=1e-13)


def test_a_function_that_decides_is_compiled_and_one_that_computes_is_followed(cpu):
    """Both become kernels; the second has no call in it."""
    for f, called in ((distance, False), (with_helper, True)):
        z = mesh(f, AXES, chunks=5)
        every = steps(cpu, z)
        assert all(type(t) is KernelTask for t in every)
        (program,) = {t.program for t in every if t.program.kernels[0].shape == (5, 5)}
        assert ("call" in repr(program.kernels[0].outputs[0])) is called


COMPLEX = {
    "exp": lambda x, y: cmath.exp(complex(x, y)),
    "wave": lambda x, y: cmath.exp(3j * x) * cmath.exp(-2j * y) + cmath.exp(1j * (x - y)),
    "sum": lambda x, y: sum(0.5**k * cmath.exp(complex(0, k * x)) for k in range(5)) * y,
    "parts": lambda x, y: complex(x, y).real - complex(y, x).imag + complex(x).imag,
    "conjugate": lambda x, y: complex(x, y) * complex(x, y).conjugate(),
    "of complex": lambda x, y: complex(complex(x, 1), complex(y, x)),
    "imag": lambda x, y: complex(imag=x, real=y) + 1,
    "size": lambda x, y: abs(complex(x, y) - 0.5),
    "phase": lambda x, y: cmath.phase(complex(x + 3, y)),
    "polar": lambda x, y: sum(cmath.polar(complex(x + 3, y))),
    "rect": lambda x, y: cmath.rect(x * x, y),
    "root": lambda x, y: cmath.sqrt(x) + cmath.sqrt(complex(x, y + 3)),
    "log": lambda x, y: cmath.log(complex(x, y + 3)) + cmath.log(complex(2 + x, y), 10),
    "real logs": lambda x, y: math.log(x + 3, 10) + math.log(5, y + 4) + math.log(x + 2, y + 7),
    "base": lambda x, y: cmath.log(2, complex(x, y + 3)),
    "log10": lambda x, y: cmath.log10(complex(x, y + 3)),
    "sines": lambda x, y: cmath.sin(complex(x, y)) + cmath.cos(complex(y, x)) * cmath.tan(x),
    "hyperbolic": lambda x, y: cmath.sinh(complex(x, y)) + cmath.cosh(x) + cmath.tanh(y + 1j),
    "arcs": lambda x, y: cmath.acos(complex(x, y + 3)) + cmath.asin(y + 3 + 1j) + cmath.atan(x),
    "area": lambda x, y: cmath.asinh(x + 3 + 1j) + cmath.acosh(y + 5) + cmath.atanh(x / 3 + 1j),
    "finite": lambda x, y: cmath.isfinite(complex(x, y)) and not cmath.isnan(complex(x, y)),
    "power": lambda x, y: complex(x + 3, y) ** 2 / complex(y, x + 3),
    "constant": lambda x, y: cmath.pi * x + cmath.e * y + abs(cmath.exp(1j)),
    "type": lambda x, y: complex(x, y) * isinstance(1j, complex) * (not isinstance("", complex)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_of_pythons(cpu, name):
    """Functions of `cmath`, and `complex` itself, are followed."""
    f = COMPLEX[name]
    wanted = at_each_point(f, X, Y)
    for axes in (AXES, (X, Y)):  # the ends of arrays are not known
        z = mesh(f, axes, chunks=6, how="auto" if name == "finite" else "trace")
        assert z.dtype == wanted.dtype
        np.testing.assert_allclose(z.compute(), wanted, rtol=1e-13, atol=1e-14)
    single = mesh(f, AXES, chunks=6, dtype="f4", how="auto" if name == "finite" else "trace")
    assert single.dtype.itemsize == max(1, wanted.dtype.itemsize // 2)
    np.testing.assert_allclose(single.compute(), wanted, rtol=2e-5, atol=2e-6)


def test_complex_where_it_is_a_type(cpu):
    """What asks for the type itself is not followed; NumPy's types are what they were."""
    z = mesh(lambda x, y: (x + y).astype(complex), AXES, how="trace")
    assert z.dtype == np.complex128
    z = mesh(lambda x, y: np.zeros(2, complex)[0] + x * y, AXES, how="trace")
    np.testing.assert_array_equal(z.compute(), X[:, None] * Y)
    with pytest.raises(NotCompiled, match="it calls type"):
        mesh(lambda x, y: complex(x, y) if type(x * 1j) is complex else x, AXES, how="trace")
    with pytest.raises(NotCompiled, match="from text"):
        mesh(lambda x, y: complex("1j", x), AXES, how="trace")


def test_blocks_are_no_numbers_of_pythons(cpu):
    """Where tasks make such a number they stay tasks, and their errors come out."""
    x = da.ones((4, 4), chunks=2)
    with pytest.raises(TypeError):
        x.map_blocks(lambda b: b * cmath.exp(b), dtype="c16").compute()
    z = x.map_blocks(lambda b: b * complex(b.sum(), 1), dtype="c16")
    np.testing.assert_array_equal(z.compute(), np.full((4, 4), 4 + 1j))


def powers(x, y):
    z = complex(x, y)
    term = total = z
    for k in range(1, 4):
        term *= z / k
        total += term
    return total


def sine(x, y):
    total = term = x
    for k in range(1, 6):
        term *= -x * x / (2 * k * (2 * k + 1))
        total += term
    return total * y


def steps_of(x, y):
    out, s = [], x * y
    for _ in range(3):
        out.append(s)
        s += x * y
    return sum(out)


def by_a_helper(x, y):
    def more(v):
        v += 1
        return v

    v = x * y
    return more(v) - v


def grown(x, y):
    t = y**2
    t += math.cos(x + y)
    return t


@pytest.mark.parametrize("how", ["trace", "auto"])
@pytest.mark.parametrize("f", [powers, sine, steps_of, by_a_helper, grown])
def test_points_are_numbers_also_for_operators_in_place(cpu, f, how):
    """What has another name stays what it is, and a number may become a wider one."""
    z = mesh(f, AXES, chunks=6, how=how)
    np.testing.assert_allclose(z.compute(), at_each_point(f, X, Y), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: sum((k + 1) ** -2 * math.cos(k * x + y) for k in range(160)),
        lambda x, y: sum(3**k / 4**k * math.sin(x + k) for k in range(160)) * y,
        lambda x, y: sum(math.sin(k * x) for k in range(500)) * y,
    ],
)
def test_long_loops_are_followed(cpu, f):
    """Numba's integers would be others."""
    z = mesh(f, AXES, chunks=5)
    assert "call" not in repr(steps(cpu, z)[0].program)
    np.testing.assert_allclose(z.compute(), at_each_point(f, X, Y), rtol=1e-11)


CUTS = {
    "root": lambda x, y: cmath.sqrt(-2 * complex(x, y)),
    "of a wave": lambda x, y: cmath.sqrt(-1 * cmath.exp(1j * y)) * x,
    "log": lambda x, y: cmath.log(-2 * (complex(x, y) + 5)),
    "power": lambda x, y: (-2 * complex(x, y)) ** 0.5,
    "real": lambda x, y: cmath.sqrt(x * complex(y + 3, 0)),
    "constant": lambda x, y: cmath.sqrt(complex(x, y) * complex(-1, 0)),
    "phase": lambda x, y: cmath.phase(-3 * complex(x + 9, y)),
    "quotient": lambda x, y: abs(1 / (0.5 * complex(x + 3, y))),
}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python's products have other zeros")
@pytest.mark.parametrize("name", CUTS)
def test_zeros_have_the_sign_that_decides(cpu, name):
    """On which side of a cut a number lies. Points of both axes are zero."""
    f = CUTS[name]
    x, y = np.linspace(-1, 1, 5), np.linspace(-2, 2, 5)
    z = mesh(f, (axis(-1, 1, 5), axis(-2, 2, 5)), how="trace")
    np.testing.assert_allclose(z.compute(), at_each_point(f, x, y), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: math.sqrt(complex(x, y)), lambda x, y: math.log(complex(x, y)),
        lambda x, y: math.floor(complex(x, y)), lambda x, y: max(complex(x, y), complex(y, x)),
    ],
)  # fmt: skip
def test_functions_of_real_numbers_take_no_complex_ones(cpu, f):
    with pytest.raises(NotCompiled, match="with a complex number"):
        mesh(f, AXES)


def test_complex_numbers_are_as_precise_as_their_parts(cpu):
    single = [
        lambda x, y: complex(complex(x, y)), lambda x, y: complex(complex(x, y), 1),
        lambda x, y: complex(0, complex(x, y)), lambda x, y: complex(2j, x),
        lambda x, y: complex(x, 2j), lambda x, y: complex(x > 0, y),
        lambda x, y: cmath.exp(1j * x), lambda x, y: cmath.rect(2, y) * x,
    ]  # fmt: skip
    for f in single:
        assert mesh(f, AXES, dtype="f4").dtype == np.complex64
        np.testing.assert_allclose(
            mesh(f, AXES, dtype="f4").compute(), at_each_point(f, X, Y), rtol=1e-5, atol=1e-6
        )
    assert mesh(lambda x, y: cmath.exp(x > y), AXES).dtype == np.complex128
    assert mesh(lambda x, y: cmath.phase(x > y), AXES).dtype == np.float64
    assert mesh(lambda x, y: cmath.polar(math.floor(x))[0], AXES).dtype == np.float64


@pytest.mark.parametrize(
    "f", [lambda x, y: (math.sin(x), math.cos(y)), lambda x, y: [math.sin(x), math.cos(y) * x]]
)
def test_results_along_different_axes(cpu, f):
    both = da.compute(*mesh(f, AXES, chunks=6, how="trace"))
    for k, z in enumerate(both):
        wanted = at_each_point(lambda x, y, k=k: f(x, y)[k], X, Y)
        np.testing.assert_allclose(z, wanted, rtol=1e-14)
    with pytest.raises(NotCompiled, match="depends on others"):
        mesh(lambda x, y: (x - x.sum(), y), AXES, how="trace")


def test_whole_coordinates_are_not_what_the_ends_say(cpu):
    """Of 0.5 there is 0, whose logarithm is infinite."""
    axes = axis(0.5, 3.5, 4), axis(1, 3, 3)
    z = mesh(lambda x, y: complex(math.log(x), y) * 2, axes, dtype="i8", how="trace")
    with np.errstate(all="ignore"):
        want = (np.log(np.array([0, 1, 2, 3.0]))[:, None] + 1j * np.array([1, 2, 3])) * 2
    np.testing.assert_array_equal(np.isnan(z.compute()), np.isnan(want))


def test_a_logarithm_of_zero_is_no_error(cpu):
    z = mesh(lambda x, y: math.log(0, x + 3) + y, AXES, how="trace")
    with np.errstate(all="ignore"):
        want = -np.inf / np.log(X + 3)[:, None] + Y
    np.testing.assert_array_equal(z.compute(), want)


def test_tiles_that_are_alike_share_one_program(cpu):
    """Where they lie is all in which they differ, and that is not in the program."""
    z = mesh(distance, (axis(0, 1, 1000), axis(0, 1, 1000)), chunks=100)
    assert len({id(t.program) for t in steps(cpu, z)}) == 1
    np.testing.assert_allclose(
        z.compute(), as_numpy(*grid(*[np.linspace(0, 1, 1000)] * 2)), rtol=1e-15
    )


def test_args_are_numbers_behind_the_coordinates(cpu):
    z = mesh(with_constants, AXES, args=(3, 0.25), chunks=6)
    wanted = at_each_point(lambda x, y: with_constants(x, y, 3, 0.25), X, Y)
    np.testing.assert_allclose(z.compute(), wanted, rtol=1e-13)
    counts = mesh(escape, AXES, args=(50,), chunks=6)
    assert counts.dtype == np.int64
    np.testing.assert_array_equal(
        counts.compute(), at_each_point(lambda x, y: escape(x, y, 50), X, Y)
    )


@numba.vectorize
def larger(x, y):
    return x if x > y else y


def scaled(s, x, y, by=2.0, function=math.sin):
    return s * function(x) * by if x > y else y


def exp(x, y):
    """Of the name of what it calls."""
    return np.exp(x) if x > y else y


@pytest.mark.parametrize(
    ("f", "python"),
    [
        (functools.partial(scaled, 3.0, by=4), lambda x, y: scaled(3.0, x, y, 4)),
        (lambda x, y, by=2.0: x * by if x > y else y, None),
        (lambda *p: p[0] if p[0] > p[1] else p[1], None),
        (larger, larger.py_func if hasattr(larger, "py_func") else max),
        (exp, lambda x, y: math.exp(x) if x > y else y),
        (lambda x, y: math.hypot(x, y, 2) + math.dist((x, 1), (y, 3)), None),
        (lambda x, y: x, None),
    ],
)
def test_functions_as_people_have_them(cpu, f, python):
    got = mesh(f, AXES, chunks=5).compute()
    np.testing.assert_allclose(got, at_each_point(python or f, X, Y), rtol=1e-15)


def test_coordinates_themselves_are_arrays(cpu):
    x, y = mesh(lambda x, y: [x, y], AXES, chunks=5)
    np.testing.assert_array_equal(x.compute(), np.meshgrid(X, Y, indexing="ij")[0])
    np.testing.assert_array_equal(y.compute(), np.meshgrid(X, Y, indexing="ij")[1])


def test_device_functions_of_cuda_are_plain_functions_elsewhere(cpu):
    cuda = pytest.importorskip("numba.cuda")

    @cuda.jit(device=True)
    def helper(x):
        return x + 1 if x > 0.5 else x

    z = mesh(lambda x, y: helper(x) * y, AXES, chunks=5)
    np.testing.assert_allclose(z.compute(), np.outer(np.where(X > 0.5, X + 1, X), Y))


def test_complex_axes(cpu):
    z = mesh(lambda x, y: x * y, ([1j, 2], [1.0, 3]))
    np.testing.assert_array_equal(z.compute(), [[1j, 3j], [2, 6]])


def test_functions_of_a_users_module(cpu):
    """Followed, and compiled where they decide by values."""
    mine = types.ModuleType("mine")
    mine.SCALE, mine.helper, mine.gain = 2.5, branchy_helper, plain_helper
    for f in (lambda x, y: mine.gain(x) * mine.SCALE + y, lambda x, y: mine.helper(x) * y):
        want = [[f(x, y) for y in Y] for x in X]
        np.testing.assert_allclose(mesh(f, AXES, chunks=5).compute(), want)


def branchy_helper(x):
    return x if x > 0.5 else -x


def plain_helper(x):
    return math.sin(x) + 1


@pytest.mark.parametrize("n", [50_000, 100_000, 10**7, 2**20 + 2**18])
def test_tiles_are_alike_where_nothing_is_said_and_such_are_near(n):
    sides, primes = mesh(distance, (axis(0, 1, n), axis(0, 1, 99_991))).chunks
    assert len(set(sides)) == 1
    assert sides[0] % 4 == 0
    assert sum(sides) == n
    assert len(set(primes)) == 2
    assert sum(primes) == 99_991
    assert sides[0] * primes[0] <= max(1.5 * 2**24, 1.5 * n * 99_991 / MOST_TILES)
    free = mesh(distance, (axis(0, 1, n),) * 2, chunks={0: 3000, 1: "auto"}).chunks
    assert set(free[0]) == {3000, n % 3000}
    assert len(set(free[1])) == 1


def test_tiles_of_a_very_long_axis_are_alike():
    (line,) = mesh(lambda x: x, (axis(0, 1, 10**12),)).chunks
    assert len(set(line)) == 1
    assert sum(line) == 10**12


def test_chunks_by_their_bytes(cpu):
    z = mesh(distance, (axis(0, 1, 1000), axis(0, 1, 1000)), chunks="1 MiB")
    assert z.chunksize == da.ones((1000, 1000), chunks="1 MiB").chunksize
    assert mesh(distance, (axis(0, 1, 1000),) * 2, chunks={0: 100}).chunksize[0] == 100


@pytest.mark.parametrize("along", [{}, {"axis": 0}])
@pytest.mark.parametrize("name", ["argmin", "argmax"])
def test_where_the_extreme_is_has_a_program_for_each_kind_of_tile(cpu, name, along):
    """Where a tile begins is no number of its own in the program."""
    every = [axis(-2, 2, 30), axis(0, 1, 37), axis(0, 3, 20)]
    z = mesh(lambda a, b, c: (a * a - 1) ** 2 + np.cos(9 * b) + (c - a) ** 2, every, chunks=10)
    lazy = getattr(z, name)(**along)
    programs = {id(t.program) for t in steps(cpu, lazy) if isinstance(t, KernelTask)}
    assert 1 <= len(programs) <= 8  # tiles have two lengths along one axis; and steps of trees
    np.testing.assert_array_equal(lazy.compute(), getattr(z.compute(), name)(**along))


@pytest.mark.parametrize("f", [polar, branching_pair])
def test_a_tuple_is_as_many_arrays(cpu, f):
    first, second = mesh(f, AXES, chunks=5)
    wanted = [at_each_point(lambda x, y, k=k: f(x, y)[k], X, Y) for k in (0, 1)]
    for got, want in zip(dask.compute(first, second), wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize(
    ("f", "dtype"),
    [(lambda x, y: x > y, "?"), (lambda x, y: complex(x, y) if x > 0 else 0j, "c16"),
     (lambda x, y: 3, "i8"), (lambda x, y: 1.5, "f8"), (lambda x, y: y, "f8"),
     (lambda x, y: math.floor(x) % 3, "i8"), (lambda x, y: x > 0 and y > 0, "?")],
)  # fmt: skip
def test_types_of_what_f_gives(cpu, f, dtype):
    z = mesh(f, AXES, chunks=5)
    assert z.dtype == np.dtype(dtype)
    got = z.compute()
    assert got.dtype == z.dtype
    np.testing.assert_array_equal(got, at_each_point(f, X, Y))


@pytest.mark.parametrize("f", [distance, with_helper, with_constants])
def test_float32_coordinates_give_float32(cpu, f):
    args = (2.0, 0.5) if f is with_constants else ()
    z = mesh(f, AXES, args=args, dtype="f4", chunks=5)
    assert z.dtype == np.float32
    wanted = at_each_point(lambda x, y: f(x, y, *args), X.astype("f4"), Y.astype("f4"))
    np.testing.assert_allclose(z.compute(), wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("f", [lambda z: z * 2.5 if abs(z) > 1 else z, lambda z: z * 2.5])
def test_complex64_coordinates_give_complex64(cpu, f):
    points = np.array([0.5 + 1j, -2j, 0.25, 3], "c8")
    z = mesh(f, (points,), dtype="c8")
    assert z.dtype == np.complex64
    np.testing.assert_allclose(z.compute(), at_each_point(f, points), rtol=1e-6)


def test_integer_coordinates(cpu):
    z = mesh(lambda i, j: (i * 7 + j) % 5, (axis(0, 9, 10), [3, 1, 4]), dtype=int, chunks=4)
    np.testing.assert_array_equal(
        z.compute(), (np.arange(10)[:, None] * 7 + np.array([3, 1, 4])) % 5
    )


def test_xy_indexing_is_numpys(cpu):
    third = np.array([0.5, 1.5])
    f = lambda x, y, z: x + 10 * y + 100 * z  # noqa: E731
    z = mesh(f, (*AXES, third), chunks=4, indexing="xy")
    np.testing.assert_allclose(z.compute(), f(*np.meshgrid(X, Y, third, indexing="xy")))


@pytest.mark.parametrize("kind", [np.asarray, list, functools.partial(da.from_array, chunks=3)])
def test_axes_that_are_arrays(cpu, kind):
    """Coordinates of any spacing, cut as the tiles are."""
    points = np.array([0.0, 0.1, 1.0, 10.0, 11.0, 12.5, -3.0])
    z = mesh(distance, (kind(points), AXES[1]), chunks=(2, 4))
    np.testing.assert_allclose(z.compute(), as_numpy(*grid(points, Y)), rtol=1e-15)
    np.testing.assert_allclose(
        z[3:, ::2].sum().compute(), as_numpy(*grid(points[3:], Y[::2])).sum()
    )


@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5, 6])
def test_one_to_six_dimensions(cpu, ndim):
    sides = [np.linspace(0, 1, 2 + k) for k in range(ndim)]
    f = lambda *x: functools.reduce(operator.mul, [1 + v for v in x])  # noqa: E731
    z = mesh(f, [axis(0, 1, 2 + k) for k in range(ndim)], chunks=2)
    wanted = functools.reduce(operator.mul, [1 + v for v in grid(*sides)])
    np.testing.assert_allclose(z.compute(), wanted, rtol=1e-14)


# ---- axes


@pytest.mark.parametrize("endpoint", [True, False])
@pytest.mark.parametrize(("start", "stop", "n"), [
    (0, 1, 11), (29, 31, 1000), (-3.5, 2e-3, 77), (5, 5, 4), (1, -1, 2), (2, 3, 1),
    (0, 5e-324, 3), (1e300, -1e300, 9),
])  # fmt: skip
def test_an_axis_is_linspace_to_the_last_bit(start, stop, n, endpoint):
    got = np.asarray(axis(start, stop, n, endpoint))
    np.testing.assert_array_equal(got, np.linspace(start, stop, n, endpoint))


@pytest.mark.parametrize("endpoint", [True, False])
@pytest.mark.parametrize(("start", "stop", "n"), [
    (1, 1000, 4), (1e-12, 1e9, 333), (-2, -8, 3), (7, 0.1, 50), (3, 3, 1),
])  # fmt: skip
def test_a_geometric_axis_is_geomspace(start, stop, n, endpoint):
    got, want = (
        np.asarray(geomaxis(start, stop, n, endpoint)),
        np.geomspace(start, stop, n, endpoint),
    )
    np.testing.assert_allclose(got, want, rtol=5e-16)
    assert got[0] == start
    assert not endpoint or n == 1 or got[-1] == stop


def test_axes_longer_than_32_bits_can_count(cpu):
    """Their ends are exact, and their middle is where it belongs."""
    n = 3 * 10**9 + 1
    z = mesh(lambda x, y: x + 0 * y, (axis(0, 3e9, n), axis(0, 1, 2**40 // n + 1)))
    assert z.size > 2**40
    np.testing.assert_array_equal(z[-3:, -1].compute(), np.arange(n - 3, n))
    np.testing.assert_array_equal(z[n // 2 : n // 2 + 2, 5].compute(), [1.5e9, 1.5e9 + 1])


def test_tiles_are_never_too_many():
    """Where nothing is said about chunks, huge meshes have huge tiles."""
    z = mesh(distance, (axis(0, 1, 10**7), axis(0, 1, 10**6)))
    assert z.npartitions < 2 * MOST_TILES
    assert mesh(distance, (axis(0, 1, 100), axis(0, 1, 100))).npartitions == 1


# ---- what comes behind


REDUCTIONS = ["sum", "mean", "min", "max", "argmin", "argmax", "std", "any", "all", "var", "prod"]


@pytest.mark.parametrize("along", [None, 0, 1])
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("f", [as_numpy, with_helper])
def test_reductions(cpu, f, name, along):
    z = mesh(f, AXES, chunks=(5, 4))
    wanted = getattr(at_each_point(f, X, Y), name)(axis=along)
    got = getattr(z, name)(axis=along).compute()
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_a_reduction_never_stores_the_grid(cpu):
    """8 GiB of float64, within a limit of 4 MiB: every step makes a few numbers."""
    with Scheduler(devices="cpu:2", memory_limit="4 MiB") as scheduler:
        z = mesh(lambda x, y: x * y, (axis(0, 1, 2**15), axis(0, 1, 2**15)), chunks=2**13)
        assert max(s.nbytes for s in scheduler.plan(z.sum()).steps) < 1000
        assert math.isclose(z.sum().compute(), 2**30 / 4, rel_tol=1e-9)


def test_expressions_behind_a_mesh_are_part_of_its_kernel(cpu):
    z = mesh(with_helper, AXES, chunks=5)
    above = (z > 3).sum()
    chosen = da.where(z > 1, da.sin(z), 0).mean()
    values = at_each_point(with_helper, X, Y)
    assert above.compute() == (values > 3).sum()
    np.testing.assert_allclose(chosen.compute(), np.where(values > 1, np.sin(values), 0).mean())
    assert max(s.nbytes for s in cpu.plan(chosen).steps) <= 32  # one number; a tile has 200 bytes


def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def test_calls_are_made_where_they_are_meant(cpu):
    """Of 0, and of what lies before an axis begins, this function has no end."""
    z = mesh(collatz, (axis(1, 40, 40),), dtype=int, chunks=16)
    w = mesh(collatz, (axis(1, 8, 8),), dtype=int)
    both = da.concatenate([z, w + 1, z[::-1]]).rechunk(50)
    kernels = [t.program.kernels[0] for t in steps(cpu, both) if isinstance(t, KernelTask)]
    assert any("where" in repr(kernel.outputs[0]) for kernel in kernels)
    one = [collatz(n) for n in range(1, 41)]
    np.testing.assert_array_equal(both.compute(), [*one, *[n + 1 for n in one[:8]], *one[::-1]])
    assert da.pad(z, 3).sum().compute() == sum(one)


def test_histograms(cpu):
    z = mesh(as_numpy, AXES, chunks=5)
    counts, edges = da.histogram(z, bins=7, range=(0, 3))
    wanted, _ = np.histogram(as_numpy(*grid(X, Y)), bins=7, range=(0, 3))
    np.testing.assert_array_equal(counts.compute(), wanted)


def test_a_histogram_of_a_mesh_stores_no_tile(cpu):
    z = mesh(distance, (axis(0, 1, 10**6), axis(0, 1, 10**6)))
    counts, _ = da.histogram(z, bins=100, range=(0, 1))
    assert max(s.nbytes for s in cpu.plan(counts).steps) <= 8 * 100
    assert max(cpu.plan(counts).predicted.peak.values()) < 2**20


def test_slices_compute_what_they_read(cpu):
    """3 x 4 points of 10^12, whose tiles have 2 * 10^8."""
    z = mesh(distance, (axis(0, 1, 10**6), axis(0, 1, 10**6)))
    part = z[10:16:2, -4:]
    (task,) = steps(cpu, part)
    assert [k.shape for k in task.program.kernels] == [(3, 4)]
    x, y = np.linspace(0, 1, 10**6)[10:16:2], np.linspace(0, 1, 10**6)[-4:]
    np.testing.assert_allclose(part.compute(), as_numpy(*grid(x, y)), rtol=1e-15)


def test_without_fusion_too(cpu):
    with Scheduler(devices="cpu:2", fuse=False):
        z = mesh(with_helper, AXES, chunks=5)
        np.testing.assert_allclose(z.sum().compute(), at_each_point(with_helper, X, Y).sum())


def test_the_same_bits_for_any_number_of_devices():
    z = mesh(with_constants, (axis(0, 1, 700), axis(0, 1, 900)), args=(2.0, 0.1))
    sums = set()
    for n in (1, 2, 4):
        with Scheduler(devices=f"cpu:{n}"):
            sums.add(float(z.sum().compute()))
    assert len(sums) == 1


def test_results_go_to_zarr_tile_by_tile(cpu, tmp_path):
    zarr = pytest.importorskip("zarr")
    z = mesh(as_numpy, AXES, chunks=5)
    z.to_zarr(str(tmp_path / "z.zarr"))
    np.testing.assert_allclose(zarr.open(str(tmp_path / "z.zarr"))[:], as_numpy(*grid(X, Y)))


def test_results_go_into_an_array_on_the_host(cpu):
    out = np.zeros((13, 10))
    da.store(mesh(as_numpy, AXES, chunks=5), out, lock=False)
    np.testing.assert_allclose(out, as_numpy(*grid(X, Y)))


@pytest.fixture
def points(monkeypatch):
    """How many points are computed, counted anew after each look."""
    shapes = []
    evaluate = cpu_evaluate.evaluate

    def watched(kernel, *args, **kwargs):
        shapes.append(kernel.shape)
        return evaluate(kernel, *args, **kwargs)

    def look():
        found = sum(map(math.prod, shapes))
        shapes.clear()
        return found

    monkeypatch.setattr(cpu_evaluate, "evaluate", watched)
    return look


@pytest.mark.parametrize("kind", [lambda a: a, np.asarray])
@pytest.mark.parametrize(
    "index",
    [np.s_[[3, 5, 7], :], np.s_[:, [99, 0, 0, 42]], np.s_[np.arange(100) % 10 == 3],
     np.s_[[8, 2, 90], ::3], np.s_[::-7, [1, 3]], np.s_[5, [60, 3]], np.s_[[7], 3],
     np.s_[[-1], 9:]],
)  # fmt: skip
def test_index_lists_compute_what_they_read(cpu, points, index, kind):
    """Of 10^4 points in 16 tiles; on axes by formula, whatever else is cut. What is taken of arrays
    is no part of a program, and so is none of what is cut behind it."""
    z = mesh(with_helper, (axis(-2, 2, 100), kind(axis(0, 1, 100))), chunks=25, indexing="xy")
    part = z[index]
    wanted = z.compute()[index]
    assert points() == z.size
    np.testing.assert_array_equal(part.compute(), wanted)
    most = part.size if kind is not np.asarray else 300
    assert part.size <= points() <= max(most, part.size)
    np.testing.assert_array_equal(part.compute(scheduler="threads"), wanted)
    np.testing.assert_allclose((part * 2).sum().compute(), wanted.sum() * 2)


def test_one_list_behind_the_other(cpu, points):
    z = mesh(distance, AXES, chunks=4)
    both = z[[1, 5, 9]][:, [7, 2]]
    wanted = z.compute()[[1, 5, 9]][:, [7, 2]]
    points()
    np.testing.assert_array_equal(both.compute(), wanted)
    assert points() <= 3 * 10
    cut = z[11:1:-3][[0, 3, 1]]
    np.testing.assert_array_equal(cut.compute(), z[11:1:-3].compute()[[0, 3, 1]])
    np.testing.assert_array_equal(
        dask.compute(z, z[[2, 3]])[1], z.compute()[[2, 3]]
    )  # the tiles are wanted, too


# ---- how f is understood


def test_globals_are_settled_when_the_mesh_is_made(cpu, monkeypatch):
    z = mesh(with_constants, AXES, args=(1.0, 0.0))
    before = z.sum().compute()
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 100.0)
    assert z.sum().compute() == before
    assert mesh(with_constants, AXES, args=(1.0, 0.0)).name != z.name


def test_names_say_what_is_computed():
    """Equal meshes have equal names, and others have others."""
    z = mesh(with_helper, AXES)
    assert z.name == mesh(with_helper, AXES).name
    others = [
        mesh(distance, AXES), mesh(with_helper, AXES, chunks=5),
        mesh(with_helper, AXES, dtype="f4"), mesh(with_helper, (AXES[0], axis(-2, 2.5, 10))),
        mesh(with_helper, (Y, AXES[1])), mesh(with_helper, (X, AXES[1])),
        mesh(escape, AXES, args=(3,)), mesh(escape, AXES, args=(4,)),
    ]  # fmt: skip
    assert len({z.name, *[o.name for o in others]}) == 1 + len(others)


def test_names_are_the_same_in_every_process():
    code = (
        "from tests.test_mesh import *; "
        "print(mesh(with_helper, AXES).name, mesh(with_compiled_helper, AXES).name, "
        "mesh(distance, AXES).name)"
    )
    root = Path(__file__).parents[1]
    outs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(outs) == 1


def test_a_mesh_goes_to_other_processes(cpu):
    for f in (distance, with_helper):
        z = mesh(f, AXES, chunks=5)
        copy = pickle.loads(pickle.dumps(z))
        np.testing.assert_array_equal(copy.compute(), z.compute())


def test_numpys_way_on_request(cpu):
    """It is called with arrays that are broadcast against each other, and may do anything."""
    seen = []

    def anything(x, y):
        seen.append((x.shape, y.shape))
        return np.where(x > 0, x, 0) * np.cumsum(np.ones_like(y), axis=1)

    z = mesh(anything, AXES, chunks=(5, 10), how="numpy")
    assert z.dtype == np.float64
    np.testing.assert_allclose(z.compute(), anything(*grid(X, Y)))
    assert ((5, 1), (1, 10)) in seen


@pytest.mark.parametrize("several", [tuple, list])
def test_numpys_way_gives_as_many_arrays_as_f(cpu, several):
    first, second = mesh(lambda x, y: several([x + y, x > y]), AXES, chunks=5, how="numpy")
    x, y = grid(X, Y)
    assert second.dtype == bool
    np.testing.assert_array_equal(first.compute(), x + y)
    np.testing.assert_array_equal(second.compute(), x > y)


def test_it_can_be_said_how(cpu):
    """Traced, no call is left; compiled, one; called with arrays, there is no expression."""
    what = {}
    for how in ("trace", "numba", "numpy"):
        z = mesh(as_numpy, AXES, how=how)
        np.testing.assert_allclose(z.compute(), as_numpy(*grid(X, Y)), rtol=1e-15)
        (chunk,) = [f for t in dict(z.dask).values() for f in [t.func] if type(f) is MeshTile]
        what[how] = getattr(chunk.what, "op", None)
    assert what == {"trace": "sqrt", "numba": "call", "numpy": None}
    assert mesh(decides_by_factor, AXES, how="auto").dtype == np.float64
    with pytest.raises(NotCompiled, match="cannot be traced"):
        mesh(decides_by_factor, AXES, how="trace")
    with pytest.raises(ValueError, match="ambiguous"):
        mesh(decides_by_factor, (X, Y), how="numpy").compute()


TABLE = (0.5, 2.5)


def catches_a_root(x, y):
    try:
        return math.sqrt(y)
    except ValueError:
        return -1.0


def catches_a_logarithm(x, y):
    try:
        value = math.log(y) + x
    except (ValueError, ArithmeticError) as error:
        value = float(len(str(error)))
    return value


def catches_a_quotient(x, y):
    try:
        return 1 / (x - x)
    except ZeroDivisionError:
        return -1.0


def catches_an_overflow(x, y):
    try:
        return math.exp(500 * y)
    except OverflowError:
        return -1.0


def catches_an_index(x, y):
    try:
        return TABLE[int(3 * y)] + x
    except IndexError:
        return -2.0


def catches_its_own(x, y):
    try:
        if y < 0:
            raise ValueError("negative")
        assert x < 0.5
    except ValueError:
        return -1.0
    except AssertionError:
        return -2.0
    return x + y


def ends_in_order(x, y):
    n = 0.0
    try:
        n += x
    finally:
        n += y
    return n


def calls_what_catches(x, y):
    return catches_a_root(x, y) + 2 * x


catches_with_arguments = functools.partial(catches_a_root, 1.0)


def calls_a_partial(x, y):
    return catches_with_arguments(y) + x


def catches_inside(x, y):
    def root(v):
        try:
            return math.sqrt(v)
        except ValueError:
            return -v

    return root(x) + root(y)


def decides_and_catches(x, y):
    if x > 0.5:
        return catches_a_root(x, y)
    return y


def gives_two_and_catches(x, y):
    return catches_a_root(x, y), x


CATCHING = [
    catches_a_root, catches_a_logarithm, catches_a_quotient, catches_an_overflow, catches_an_index,
    catches_its_own, ends_in_order, calls_what_catches, calls_a_partial, catches_inside,
    decides_and_catches, gives_two_and_catches, functools.partial(catches_a_root),
]  # fmt: skip


def by_python(f, *axes):
    """What a loop over the coordinates gives."""
    with np.errstate(all="ignore"):
        return np.array([[f(x, y) for y in axes[1]] for x in axes[0]])


@pytest.mark.filterwarnings("ignore:divide by zero")  # as the loop does
@pytest.mark.parametrize("scheduler", ["gpu", "threads", None])
@pytest.mark.parametrize("f", CATCHING)
def test_functions_that_catch_errors_give_what_python_gives(cpu, f, scheduler):
    want = by_python(f, np.linspace(0.1, 1, 3), np.linspace(-1, 1, 4))
    axes = axis(0.1, 1, 3), axis(-1, 1, 4)
    with pytest.warns(UserWarning, match="called in Python for each point of its mesh"):
        z = mesh(f, axes, chunks=(2, 3))
    for part, values in zip(
        z if type(z) is tuple else (z,), np.moveaxis(want, 2, 0) if want.ndim > 2 else want[None],
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(part.compute(scheduler=scheduler), values)
        np.testing.assert_allclose((part + 1).sum().compute(), (values + 1).sum())
    for how in ("trace", "numba"):
        with pytest.raises(NotCompiled, match="catches errors|functools.partial"):
            mesh(f, axes, how=how)


#: As text, since pytest makes something else of an `assert`.
CHECKS = """
def checks_what_it_is_given(x, y, k):
    if k < 0:
        raise ValueError("k")
    assert k > 0
    with np.errstate(all="ignore"):
        return np.sqrt(y) * k + x
"""


def test_functions_that_only_raise_are_compiled(cpu):
    space = {"np": np}
    exec(CHECKS, space)
    checks_what_it_is_given = space["checks_what_it_is_given"]
    x, y = grid(X, Y)
    for f, args in ((checks_what_it_is_given, (2.0,)), (raises_below, ())):
        z = mesh(f, AXES, args=args)
        assert not hasattr(z.dask[next(iter(z.dask))].func.what, "part")
        with np.errstate(all="ignore"):
            want = by_python(lambda *p, f=f, args=args: f(*p, *args), x.ravel(), y.ravel())
        np.testing.assert_allclose(z.compute(), want, rtol=1e-14)
    with pytest.raises(ValueError, match="k"):
        mesh(checks_what_it_is_given, AXES, args=(-1.0,), how="python")


def raises_below(x, y):
    if x * x < -1:
        raise ValueError("imaginary")
    return x - y


class Scaled:
    """What scientists keep the numbers of a model in."""

    k = 2.0

    def at(self, x, y):
        return self.k * x + y

    __call__ = at


def test_python_calls_whatever_can_be_called(cpu):
    model, numbers = Scaled(), {"k": 2.0}
    x, y = grid(X, Y)
    for f in (model, model.at, lambda x, y: model.k * x + y, lambda x, y: numbers["k"] * x + y):
        with pytest.raises(NotCompiled, match="how='python'"):
            mesh(f, AXES)
        z = mesh(f, AXES, chunks=5, how="python")
        np.testing.assert_array_equal(z.compute(), 2 * x + y)
        np.testing.assert_array_equal(z.compute(scheduler="threads"), 2 * x + y)


def test_python_gives_one_type_of_numbers(cpu):
    axes = axis(0, 1, 6), axis(0, 1, 6)
    with pytest.raises(TypeError, match="give one dtype everywhere"):
        mesh(lambda x, y: 0.5 if x == 0.2 else 1, axes, how="python").compute()
    with pytest.raises(TypeError, match="as many numbers everywhere"):
        mesh(lambda x, y: (x, y) if x > 0.9 else x, axes, how="python")
    with pytest.raises(TypeError, match="a mesh is of numbers"):
        mesh(lambda x, y: "text", axes, how="python")
    assert mesh(lambda x, y: x, axes, dtype="f4", how="python").compute().dtype == np.float32
    assert mesh(lambda x: x, (da.arange(4),), how="python").compute().tolist() == [0, 1, 2, 3]


def uses_a_file(x, y):
    return x + len(open("numbers").read()) if x > y else y


def gives_text(x, y):
    return "low" if x < y else "high"


def unknown_name(x, y):
    return undefined(x) if x > y else y  # noqa: F821


def looks_around(x, y):
    return x - x.mean() + y


def looks_at_the_first(x, y):
    return x[0] + 0 * x + y


def misspelt(x, y):
    if x > y:
        return np.sine(x)
    return y


@pytest.mark.parametrize(
    ("f", "words"),
    [(uses_a_file, "uses_a_file"), (gives_text, "gives"), (unknown_name, "undefined"),
     (looks_around, "mean"), (looks_at_the_first, "depends"),
     (lambda x, y: x * len(x) + y, "depends on how many"), (lambda x, y: x + y.size, "how many"),
     (misspelt, r"test_mesh.py, line \d+: return np.sine")],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_with_its_place(f, words):
    with pytest.raises(NotCompiled, match=words) as caught:
        mesh(f, AXES)
    assert "how='numpy'" in str(caught.value)
    assert "test_mesh.py" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: axis(0, math.inf, 5), ValueError, "finite"),
        (lambda: axis(0, 1, 0), ValueError, "at least one"),
        (lambda: axis(0, 1, 2.5), TypeError, "2.5 points: a whole number"),
        (lambda: axis(0, "one", 5), TypeError, "a real number to another: 0, 'one'"),
        (lambda: geomaxis(None, 1, 5), TypeError, "a real number"),
        (lambda: mesh(lambda x: x, AXES), TypeError, r"<lambda>\(x\) .* 2 axes: too many"),
        (lambda: mesh(distance, AXES[:1]), TypeError, "for each of 1 axis: missing"),
        (lambda: mesh(distance, AXES, args=(1,)), TypeError, "2 axes and 1 of args: too many"),
        (lambda: mesh(math.hypot(3, 4), AXES), TypeError, "5.0 is no function"),
        (lambda: geomaxis(0, 1, 5), ValueError, "zero"),
        (lambda: geomaxis(-1, 1, 5), ValueError, "sign"),
        (lambda: geomaxis(1, -1e-300, 5), ValueError, "sign"),
        (lambda: mesh(distance, AXES[0]), TypeError, "a sequence"),
        (lambda: mesh(escape, AXES, args=50), TypeError, "a tuple"),
        (lambda: mesh(distance, AXES, chunks=0), ValueError, "at least one point"),
        (lambda: mesh(distance, (AXES[0], [1j, 2]), dtype="f8"), TypeError, "complex"),
        (lambda: mesh(distance, ()), ValueError, "0 axes"),
        (lambda: mesh(lambda *x: x[0], [AXES[0]] * 7), ValueError, "7 axes"),
        (lambda: mesh(distance, (AXES[0], np.ones((2, 2)))), ValueError, "axis 1 is 2-dim"),
        (lambda: mesh(distance, (AXES[0], [])), ValueError, "no points"),
        (lambda: mesh(distance, (AXES[0], np.array(["a"]))), ValueError, "axis 1"),
        (lambda: mesh(escape, AXES, args=("fifty",)), TypeError, "fifty"),
        (lambda: mesh(distance, AXES, indexing="yx"), ValueError, "indexing='yx'"),
        (lambda: mesh(distance, AXES, how="cython"), ValueError, "how='cython'"),
        (lambda: mesh(distance, AXES, dtype="U3"), TypeError, "dtype"),
        (lambda: mesh(distance, AXES, chunks=(5, (3, 3))), ValueError, "(?i)chunks"),
        (lambda: mesh(distance, (AXES[0], da.ones(9)[da.ones(9) > 0])), ValueError, "not known"),
    ],
)
def test_bad_input_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_an_exception_of_f_comes_out_with_its_key(cpu):
    def picky(x, y):
        if x > 0.9:
            raise ValueError("too far")
        return x + y

    with pytest.raises(ValueError, match="too far") as caught:
        mesh(picky, AXES, chunks=(10, 10)).compute()
    assert re.search(r"\('picky-\w+', 1, 0\)", "".join(caught.value.__notes__))
    assert mesh(distance, AXES).sum().compute() > 0


# ---- on GPUs: the text of the kernels, run on the host


@pytest.fixture
def emulated(libraries, monkeypatch):
    """Plans for GPUs, whose kernels' text is compiled for the host's processor."""
    host = Host(libraries)

    def call(task, values, out=None):
        words = {
            constant(PLACEHOLDER + 2 * n, np.int64): constant(p, np.int64)
            for n, p in enumerate(task.positions)
        }

        def evaluate(kernel, every):
            kernel = change_leaves(kernel, lambda leaf: words.get(leaf, leaf))
            kernels.append(kernel)
            arrays = [aligned(np.ascontiguousarray(a)) for a in every]
            return host.run([kernel], [arrays], processors=2)[0]

        return compute_program(hoist_invariants(task.program), evaluate, task.arrays(values))

    kernels = []
    monkeypatch.setattr(KernelTask, "__call__", call)
    monkeypatch.setattr(hoist, "LEAST_POINTS", 1)
    with Scheduler(devices="cpu:2") as scheduler:
        monkeypatch.setattr(scheduler.hardware, "kind", "cuda", raising=False)
        yield kernels


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
@pytest.mark.parametrize("f", [distance, with_helper, with_constants, zeta, compiled_zeta, escape])
def test_kernels_for_gpus_compute_the_same(emulated, f):
    """Rows and columns in kernels of their own, places filled in, functions linked."""
    how = "auto"
    if f in (with_helper, compiled_zeta, escape):
        pytest.importorskip("cuda.bindings.nvjitlink", reason="numba-cuda is not installed")
        f, how = (zeta, "numba") if f is compiled_zeta else (f, how)
    args = {with_constants: (2.0, 0.25), escape: (20,)}.get(f, ())
    x, y = np.linspace(-1, 1, 60), np.linspace(-2, 2, 50)
    axes = axis(-1, 1, 60), axis(-2, 2, 50)
    z = mesh(f, axes, args=args, chunks=(40, 50), how=how, backend="numpy")
    wanted = at_each_point(lambda x, y: f(x, y, *args), x, y)
    np.testing.assert_allclose(z.compute(), wanted, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(z[::7, 3:].compute(), wanted[::7, 3:], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(z.sum().compute(), wanted.sum(), rtol=1e-12)
    assert any(k.shape == (40,) for k in emulated) is (
        f is with_constants or (f is zeta and how == "auto")
    )


@pytest.mark.skipif(COMPILER is None, reason="there is no g++")
def test_a_function_is_settled_before_it_is_compiled_for_a_gpu(emulated, monkeypatch):
    """That is when its kernel first runs."""
    pytest.importorskip("cuda.bindings.nvjitlink", reason="numba-cuda is not installed")
    z = mesh(decides_by_factor, AXES, backend="numpy")
    before = at_each_point(decides_by_factor, X, Y)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 100.0)
    np.testing.assert_allclose(z.compute(), before)
    after = mesh(decides_by_factor, AXES, backend="numpy")
    np.testing.assert_allclose(after.compute(), at_each_point(decides_by_factor, X, Y))


# ---- any function, any grid


UNARY = [
    "math.sin({})", "math.exp(-abs({}))", "math.fabs({})", "abs({})", "np.sqrt(abs({}))", "-{}",
    "math.atan({})", "math.floor({})", "np.tanh({})", "({} * 0.5) ** 2",
]  # fmt: skip
BINARY = [
    "({} + {})", "({} - {})", "({} * {})", "math.hypot({}, {})", "math.atan2({}, {})",
    "min({}, {})", "max({}, {})", "math.copysign({}, {})", "np.maximum({}, {})",
]  # fmt: skip


@st.composite
def functions(draw, arity):
    """A function of one result or several, each a tree of operations; some decide by value."""

    def tree(level):
        kind = draw(st.sampled_from(["unary", "binary", "if", "leaf"] if level else ["leaf"]))
        if kind == "leaf":
            return draw(st.sampled_from([*"uvwxyz"[-arity:], "0.75", "(1 + z)"]))
        if kind == "unary":
            return draw(st.sampled_from(UNARY)).format(tree(level - 1))
        if kind == "binary":
            return draw(st.sampled_from(BINARY)).format(tree(level - 1), tree(level - 1))
        return f"({tree(level - 1)} if {tree(level - 1)} > 0 else {tree(level - 1)})"

    trees = [tree(draw(st.integers(0, 3))) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
    result = trees[0] if len(trees) == 1 else f"({', '.join(trees)})"
    text = f"lambda {', '.join('uvwxyz'[-arity:])}: {result}"
    return text, eval(text, {"math": math, "np": np})


@FEW
@given(st.data())
def test_any_function_over_any_grid(data):
    """By whichever way it is understood; NumPy's own way is the reference of what it gives."""
    ndim = data.draw(st.integers(1, 6))
    most = {1: 40, 2: 9, 3: 7}.get(ndim, 4)
    lengths = [data.draw(st.integers(1, most)) for _ in range(ndim)]
    _, f = data.draw(functions(ndim))
    indexing = data.draw(st.sampled_from(["ij", "xy"]))
    dtype = data.draw(st.sampled_from(["f8", "f8", "f4", "i8"]))
    axes, points = [], []
    for n in lengths:
        start, stop = (data.draw(st.integers(-8, 8)) / 4 for _ in "ab")
        points.append(np.linspace(start, stop, n))
        formula = data.draw(st.booleans())
        axes.append(axis(start, stop, n) if formula else points[-1])
    every = np.meshgrid(*[p.astype(dtype) for p in points], indexing=indexing)
    shape = every[0].shape
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    found = mesh(f, axes, chunks=chunks, dtype=dtype, indexing=indexing)
    cut = tuple(slice(data.draw(st.integers(0, n)), None, 2) for n in shape)
    k = data.draw(st.integers(0, ndim - 1))
    numbers = data.draw(st.lists(st.integers(0, shape[k] - 1), min_size=1, max_size=5))
    listed = (slice(None),) * k + (numbers,)
    parts = found if isinstance(found, tuple) else (found,)
    close = {"f4": 1e-4}.get(dtype, 1e-12)
    with Scheduler(devices="cpu:2", check=True):
        for part, z in enumerate(parts):
            assert z.shape == shape
            assert all(max(c) <= n for c, n in zip(z.chunks, chunks, strict=True))
            got = z.compute()
            assert got.dtype == z.dtype
            np.testing.assert_array_equal(z[cut].compute(), got[cut])
            np.testing.assert_array_equal(z[listed].compute(), got[listed])
            one = (lambda *p, part=part: f(*p)[part]) if isinstance(found, tuple) else f
            with np.errstate(all="ignore"):
                wanted = np.vectorize(one, otypes=[z.dtype])(*every)
            np.testing.assert_allclose(got, wanted, rtol=close, atol=close)


# ---- the parts


def test_a_tile_is_where_its_block_lies():
    tiles = Tiles(((3, 2), (4, 4, 1)))
    assert tiles.numblocks == (2, 3)
    assert tiles[1, 2] == Tile((3, 8), (2, 1))
    np.testing.assert_array_equal(tiles[1, 2].indices(0), [3, 4])


def test_the_package_has_them():
    assert gpuscheduler.mesh is mesh
    assert {"axis", "geomaxis", "mesh", "NotCompiled"} <= set(gpuscheduler.__all__)


@pytest.mark.parametrize("chunks", [(16, 40), (7, 13), (5, 40), (31, 17)])
def test_tiles_are_written_into_the_result(chunks, monkeypatch):
    """By the task that computes them, wherever they lie in it; once."""
    copied = []

    class Watched(np.ndarray):
        def __setitem__(self, where, value):
            copied.append(where)
            super().__setitem__(where, value)

    room = ResultTarget.room

    def watched(self, slices, shape, dtype):
        part = room(self, slices, shape, dtype)
        return None if part is None else part.view(Watched)

    axes = axis(0, 3, 31), axis(1, 2, 40)
    z = mesh(lambda y, x: y * 10 + x, axes, chunks=chunks)
    want = np.linspace(0, 3, 31)[:, None] * 10 + np.linspace(1, 2, 40)
    with Scheduler("cpu:3", fuse_least=0):
        np.testing.assert_array_equal(z.compute(), want)
        monkeypatch.setattr(ResultTarget, "room", watched)
        np.testing.assert_array_equal(z.compute(), want)
        assert copied == []
        with dask.callbacks.Callback(posttask=lambda *event: None):
            np.testing.assert_array_equal(z.compute(), want)  # they are somebody else's, too
        assert len(copied) == z.npartitions
        np.testing.assert_array_equal((z + z.sum()).compute(), want + want.sum())
