"""Factorizations, as cuSOLVER has them: by addresses, and along columns first."""

import numpy as np
import scipy.linalg

from .. import _device as d
from .cublas import _matrix

handles = {}  # the device of each


def create():
    handle = max(handles, default=0) + 1
    handles[handle] = d.here.device
    return handle


def _size(handle, m, n, a, lda):
    assert handles[handle] == d.here.device, "a handle of another device"
    return 1


def _getrf(dtype):
    def getrf(handle, m, n, a, lda, work, pivots, info):
        assert handles[handle] == d.here.device, "a handle of another device"
        stream = d.current_stream()
        d.memory_at(a).read(stream)
        for address in (a, work, pivots, info):
            d.memory_at(address).write(stream)
        matrix = _matrix(a, m, n, lda, dtype)
        (function,) = scipy.linalg.get_lapack_funcs(("getrf",), (matrix,))
        lu, order, found = function(matrix)
        matrix[...] = lu if found == 0 else np.where(np.isfinite(lu), lu, np.nan)
        _matrix(pivots, min(m, n), 1, min(m, n), np.int32)[:, 0] = order + 1
        _matrix(info, 1, 1, 1, np.int32)[0, 0] = found

    return getrf


sgetrf, dgetrf, cgetrf, zgetrf = map(_getrf, "fdFD")
sgetrf_bufferSize = dgetrf_bufferSize = cgetrf_bufferSize = zgetrf_bufferSize = _size


def _potrf_size(handle, uplo, n, a, lda):
    assert handles[handle] == d.here.device, "a handle of another device"
    return 1


def _potrf(dtype):
    def potrf(handle, uplo, n, a, lda, work, lwork, info):
        assert handles[handle] == d.here.device, "a handle of another device"
        stream = d.current_stream()
        d.memory_at(a).read(stream)
        for address in (a, work, info):
            d.memory_at(address).write(stream)
        matrix = _matrix(a, n, n, lda, dtype)
        (function,) = scipy.linalg.get_lapack_funcs(("potrf",), (matrix,))
        factor, found = function(matrix, lower=uplo == 0, clean=False)
        part = np.tril if uplo == 0 else np.triu
        matrix[...] = np.where(part(np.ones((n, n), bool)), factor, matrix)  # the rest stays
        _matrix(info, 1, 1, 1, np.int32)[0, 0] = found

    return potrf


spotrf, dpotrf, cpotrf, zpotrf = map(_potrf, "fdFD")
spotrf_bufferSize = dpotrf_bufferSize = cpotrf_bufferSize = zpotrf_bufferSize = _potrf_size
