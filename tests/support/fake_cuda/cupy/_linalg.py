"""`cupy.linalg` on the stand-in: it looks for failures only where it is told to, as CuPy does."""

import threading
from contextlib import contextmanager

import numpy as np

_state = threading.local()
#: Functions of NumPy's that CuPy lacks.
LACKS = {"matrix_norm", "multi_dot", "svdvals", "vecdot", "vector_norm", "trace", "diagonal",
         "outer", "tensordot"}  # fmt: skip


@contextmanager
def errstate(*, linalg=None, **others):
    assert not others
    assert linalg in ("ignore", "raise")
    before = getattr(_state, "linalg", "ignore")
    _state.linalg = linalg
    try:
        yield
    finally:
        _state.linalg = before


def checked(name, function):
    """A function of NumPy's; a failure that CuPy would not look for is one of whoever calls."""

    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except np.linalg.LinAlgError as error:
            if "must be" in str(error) or "dimension" in str(error):
                raise
            assert getattr(_state, "linalg", "ignore") == "raise", f"{name} would give noise"
            raise np.linalg.LinAlgError(f"Error reported by {name} in cuSOLVER.") from error

    return call


class Linalg:
    def __init__(self, called):
        self._called = called

    def __getattr__(self, name):
        if name in LACKS:
            raise AttributeError(f"module 'cupy.linalg' has no attribute {name!r}")
        function = getattr(np.linalg, name)
        if isinstance(function, type):
            return function

        def call(*args, **kwargs):
            if name in ("solve", "inv", "cholesky", "eigh", "eigvalsh", "eig", "eigvals"):
                assert all(a.dtype.char != "e" for a in args if hasattr(a, "dtype"))
                if name == "solve" and args[0].shape[:-2] != args[1].shape[:-2]:
                    raise ValueError("a must have (..., M, M) shape and b must have (..., M, K)")
            result = self._called(checked(name, function), args, kwargs)
            if name in ("eig", "eigvals"):
                return _complex(result)
            return tuple(result) if isinstance(result, tuple) else result

        call.__name__, call.__module__ = name, "cupy"
        return call


def _complex(result):
    """CuPy's eigenvalues of matrices without symmetry are always complex."""
    if isinstance(result, tuple):
        return tuple(map(_complex, result))
    return result.astype(np.result_type(result.dtype, np.complex64))
