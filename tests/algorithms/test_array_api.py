"""`gpuscheduler.linalg` beside the array API standard: signatures, dtypes and shapes of stacks."""

import inspect

import dask.array as da
import numpy as np
import pytest
from array_api_compat import numpy as standard

from gpuscheduler import linalg

#: The standard's functions, on stacks: what they get, and the shapes of results.
N = (2, 3, 4, 4)
FUNCTIONS = {
    "cholesky": ((N,), [N]),
    "cross": (((2, 3), (2, 3)), [(2, 3)]),
    "det": ((N,), [(2, 3)]),
    "diagonal": ((N,), [(2, 3, 4)]),
    "eigh": ((N,), [(2, 3, 4), N]),
    "eigvalsh": ((N,), [(2, 3, 4)]),
    "inv": ((N,), [N]),
    "matmul": (((2, 3, 4), (4, 5)), [(2, 3, 5)]),
    "matrix_norm": ((N,), [(2, 3)]),
    "matrix_power": ((N, 3), [N]),
    "matrix_rank": ((N,), [(2, 3)]),
    "matrix_transpose": (((2, 3, 4),), [(2, 4, 3)]),
    "outer": (((3,), (4,)), [(3, 4)]),
    "pinv": (((2, 4, 3),), [(2, 3, 4)]),
    "qr": (((2, 4, 3),), [(2, 4, 3), (2, 3, 3)]),
    "slogdet": ((N,), [(2, 3), (2, 3)]),
    "solve": ((N, (2, 3, 4, 5)), [(2, 3, 4, 5)]),
    "svd": (((2, 4, 3),), [(2, 4, 3), (2, 3), (2, 3, 3)]),
    "svdvals": (((2, 4, 3),), [(2, 3)]),
    "tensordot": (((2, 3, 4), (3, 4, 5)), [(2, 5)]),
    "trace": ((N,), [(2, 3)]),
    "vecdot": (((2, 3), (2, 3)), [(2,)]),
    "vector_norm": (((2, 3),), [()]),
}
REAL = {"eigh": 0, "eigvalsh": 0, "matrix_norm": 0, "slogdet": 1, "svd": 1, "svdvals": 0,
        "vector_norm": 0}  # fmt: skip


def argument(shape, dtype):
    """A positive definite matrix where it may be one."""
    if isinstance(shape, int):
        return shape
    a = np.random.default_rng(0).standard_normal(shape)
    if len(shape) > 1 and shape[-1] == shape[-2]:
        a = a @ a.swapaxes(-1, -2) + np.eye(shape[-1])
    return (a + (0j if np.dtype(dtype).kind == "c" else 0)).astype(dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_stacks_have_the_shapes_and_dtypes_of_the_standard(name, dtype):
    shapes, results = FUNCTIONS[name]
    given = [argument(shape, dtype) for shape in shapes]
    lazy = [x if isinstance(x, int) else da.from_array(x, chunks=2) for x in given]
    made = getattr(linalg, name)(*lazy)
    made = made if isinstance(made, tuple) else (made,)
    assert [x.shape for x in made] == results
    for n, x in enumerate(made):
        real = REAL.get(name) == n
        want = np.dtype(dtype).char.lower() if real else dtype
        if name == "matrix_rank":
            assert x.dtype.kind == "i"
        else:
            assert x.dtype == want
        value = np.asarray(x.compute(scheduler="sync"))
        assert (value.shape, value.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_take_what_the_standard_has(name):
    """Keywords of the standard are ours; so are positions."""
    theirs = getattr(standard.linalg, name, None) or getattr(standard, name)
    ours = inspect.signature(getattr(linalg, name)).parameters
    if isinstance(theirs, np.ufunc):
        pytest.skip("NumPy's own has keywords of ufuncs")
    wanted = inspect.signature(theirs).parameters
    for parameter in wanted.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in ("xp", "axes"):
            assert parameter.name in ours
    positions = [p for p in wanted.values() if p.kind in (p.POSITIONAL_ONLY,)]
    mine = [p for p in ours.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert len(mine) >= len(positions)
