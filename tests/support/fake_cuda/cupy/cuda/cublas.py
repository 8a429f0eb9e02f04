"""Products of matrices, as cuBLAS has them: by addresses, and along columns first."""

import ctypes

import numpy as np

from .. import _device as d

CUBLAS_FILL_MODE_LOWER, CUBLAS_FILL_MODE_UPPER = 0, 1
CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C = 0, 1, 2
handles = {}  # the device of each
modes = {}  # the math mode of each, where it was set
TF32 = 3


def create():
    handle = max(handles, default=0) + 1
    handles[handle] = d.here.device
    return handle


def destroy(handle):
    del handles[handle]


def setMathMode(handle, mode):
    assert mode in (0, TF32)
    modes[handle] = mode


def _rounded(x, handle):
    """A matrix as tensor cores read it: with 11 significant bits in the mode for these."""
    if modes.get(handle, 0) != TF32 or x.dtype.char not in "fF":
        return x
    parts = np.ascontiguousarray(x).view(np.uint32)
    return ((parts + 0x1000) & np.uint32(0xFFFFE000)).view(x.dtype)


def _matrix(address, rows, columns, pitch, dtype):
    """What is at an address, as a NumPy array."""
    assert pitch >= max(1, rows), "cuBLAS would refuse it"
    size = np.dtype(dtype).itemsize
    count = (columns - 1) * pitch + rows
    raw = np.frombuffer((ctypes.c_char * (count * size)).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(raw, (rows, columns), (size, pitch * size))


def _turned(x, how):
    return (x, x.T, x.conj().T)[how]


def _gemm(dtype):
    def gemm(handle, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        assert handles[handle] == d.here.device, "a handle of another device"
        stream = d.current_stream()
        for address in (a, b):
            d.memory_at(address).read(stream)
        d.memory_at(c).write(stream)
        alpha, beta = (_matrix(x, 1, 1, 1, dtype)[0, 0] for x in (alpha, beta))
        a = _turned(_matrix(a, *((k, m) if transa else (m, k)), lda, dtype), transa)
        b = _turned(_matrix(b, *((n, k) if transb else (k, n)), ldb, dtype), transb)
        a, b = _rounded(a, handle), _rounded(b, handle)
        c = _matrix(c, m, n, ldc, dtype)
        c[...] = alpha * (a @ b) if beta == 0 else alpha * (a @ b) + beta * c

    return gemm


sgemm, dgemm, cgemm, zgemm = map(_gemm, "fdFD")


def _geam(dtype):
    def geam(handle, transa, transb, m, n, alpha, a, lda, beta, b, ldb, c, ldc):
        assert handles[handle] == d.here.device, "a handle of another device"
        stream = d.current_stream()
        alpha, beta = (_matrix(x, 1, 1, 1, dtype)[0, 0] for x in (alpha, beta))
        total = 0
        for factor, trans, at, pitch in ((alpha, transa, a, lda), (beta, transb, b, ldb)):
            if factor:  # what counts nothing is not read
                d.memory_at(at).read(stream)
                rows, columns = (n, m) if trans else (m, n)
                total = total + factor * _turned(_matrix(at, rows, columns, pitch, dtype), trans)
        d.memory_at(c).write(stream)
        _matrix(c, m, n, ldc, dtype)[...] = total

    return geam


sgeam, dgeam, cgeam, zgeam = map(_geam, "fdFD")
