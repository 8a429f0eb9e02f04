"""Products of several matrices, powers, tensor equations and the array API's names: NumPy's."""

import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscheduler.algorithms import contractions


@pytest.mark.parametrize("shape", [(5, 5), (3, 4, 4), (2, 1, 3, 3), (1, 1), (0, 0)])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 10, -1, -3])
def test_matrix_power(shape, n):
    a = np.random.default_rng(0).standard_normal(shape)
    for chunks in (2, -1):
        got = contractions.matrix_power(da.from_array(a, chunks=chunks), n)
        want = np.linalg.matrix_power(a, n)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got.compute(scheduler="sync"), want, rtol=1e-8, atol=1e-9)


def test_matrix_power_of_integers_is_exact():
    for dtype in ("i8", "i4", "u1", "?"):
        a = np.array([[1, 1], [1, 0]], dtype)
        _check_power(a)


def _check_power(a):
    got = contractions.matrix_power(da.from_array(a, chunks=1), 80)
    assert got.dtype == a.dtype
    np.testing.assert_array_equal(got.compute(), np.linalg.matrix_power(a, 80))


def test_matrix_power_takes_few_products():
    x = da.ones((8, 8), chunks=8)
    power = contractions.matrix_power(x, 1024)
    products = [name for name in power.dask.layers if "matmul" in name or "contract" in name]
    assert len(products) <= 2 * 10
    with pytest.raises(TypeError, match="integer"):
        contractions.matrix_power(x, 1.5)
    with pytest.raises(np.linalg.LinAlgError, match="one length"):
        contractions.matrix_power(x[:3], 2)
    with pytest.raises(np.linalg.LinAlgError, match="[Ss]ingular"):
        contractions.matrix_power(x, -2).compute()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_multi_dot(data):
    count = data.draw(st.integers(2, 5))
    sides = data.draw(st.lists(st.integers(1, 7), min_size=count + 1, max_size=count + 1))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s) for s in zip(sides, sides[1:], strict=False)]
    if data.draw(st.booleans()):
        arrays[0] = arrays[0][0]
    if data.draw(st.booleans()):
        arrays[-1] = arrays[-1][:, 0]
    want = np.linalg.multi_dot(arrays)
    got = contractions.multi_dot([da.from_array(a, chunks=3) for a in arrays])
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got.compute(scheduler="sync"), want, rtol=1e-9, atol=1e-12)


@given(st.lists(st.integers(1, 50), min_size=3, max_size=8))
def test_the_order_is_the_cheapest(sides):
    def cheapest(i, j):
        if i == j:
            return 0
        ends = sides[i] * sides[j + 1]
        return min(cheapest(i, k) + cheapest(k + 1, j) + ends * sides[k + 1] for k in range(i, j))

    def cost(i, j):
        if i == j:
            return 0
        k = split[i, j]
        return cost(i, k) + cost(k + 1, j) + sides[i] * sides[k + 1] * sides[j + 1]

    split = contractions.chain_order(sides)
    assert cost(0, len(sides) - 2) == cheapest(0, len(sides) - 2)


def test_multi_dot_refuses():
    x = da.ones((3, 3))
    with pytest.raises(ValueError, match="at least two"):
        contractions.multi_dot([x])
    with pytest.raises(np.linalg.LinAlgError, match="array 1"):
        contractions.multi_dot([x, x[0], x])
    with pytest.raises(ValueError, match="arrays 1 and 2"):
        contractions.multi_dot([x, x, da.ones((2, 3))])


def test_tensor_equations():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2, 3, 6))
    b = rng.standard_normal((2, 3))
    got = contractions.tensorsolve(da.from_array(a, chunks=2), da.from_array(b, chunks=1))
    np.testing.assert_allclose(got.compute(), np.linalg.tensorsolve(a, b), rtol=1e-9)
    c = rng.standard_normal((6, 2, 4, 3))[:, :, :1]
    right = rng.standard_normal((6, 1))
    got = contractions.tensorsolve(da.from_array(c), right, axes=(1,))
    np.testing.assert_allclose(got, np.linalg.tensorsolve(c, right, axes=(1,)), rtol=1e-9)
    d = rng.standard_normal((4, 6, 8, 3))
    for ind in (2,):
        got = contractions.tensorinv(da.from_array(d, chunks=3), ind)
        np.testing.assert_allclose(got.compute(), np.linalg.tensorinv(d, ind), rtol=1e-7)
    got = contractions.tensorinv(da.from_array(rng.standard_normal((6, 3, 2))), ind=1)
    assert got.shape == (3, 2, 6)
    with pytest.raises(ValueError, match="ind"):
        contractions.tensorinv(d, 0)
    with pytest.raises(np.linalg.LinAlgError, match="square"):
        contractions.tensorinv(d[:, :, :4])
    with pytest.raises(np.linalg.LinAlgError, match="first axes"):
        contractions.tensorsolve(a, b.T)
    with pytest.raises(np.linalg.LinAlgError, match="square"):
        contractions.tensorsolve(a[..., :5], b)


ALIASES = {
    "vecdot": lambda la, x, y: la.vecdot(x, y),
    "vecdot along 0": lambda la, x, y: la.vecdot(x, y, axis=0),
    "vecdot, broadcast": lambda la, x, y: la.vecdot(x, y[0]),
    "matmul": lambda la, x, y: la.matmul(x, y.T),
    "outer": lambda la, x, y: la.outer(x[0], y[1]),
    "trace": lambda la, x, y: la.trace(x),
    "trace, above": lambda la, x, y: la.trace(x, offset=1),
    "diagonal": lambda la, x, y: la.diagonal(x, offset=-1),
    "tensordot": lambda la, x, y: la.tensordot(x, y, axes=((0, 1), (0, 1))),
    "cross": lambda la, x, y: la.cross(x, y),
    "matrix_transpose": lambda la, x, y: la.matrix_transpose(x),
}


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("dtype", ["f8", "c16", "i4", "u1", "f4"])
def test_array_api_names(name, dtype):
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 9, (4, 3)).astype(dtype) for _ in range(2))
    if dtype == "c16":
        x = x + 1j * y[::-1]
    want = ALIASES[name](np.linalg, x, y)
    got = ALIASES[name](np.linalg, da.from_array(x, chunks=2), da.from_array(y, chunks=(3, 2)))
    assert isinstance(got, da.Array)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got.compute(scheduler="sync"), want)


def test_array_api_names_refuse():
    x = da.ones((4, 4), chunks=2)
    with pytest.raises(ValueError, match="one axis"):
        contractions.outer(x, x)
    with pytest.raises(ValueError, match="three elements"):
        contractions.cross(x, x)
    with pytest.raises(ValueError, match="one length"):
        contractions.vecdot(x, x[:, :3])
    with pytest.raises(ValueError, match="one length"):
        contractions.vecdot(x, np.float64(3))
    assert contractions.vecdot(x > 0, x > 0).dtype == bool
