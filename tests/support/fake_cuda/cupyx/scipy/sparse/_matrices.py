"""CuPy 14.2's sparse types, as far as the package and its tests call them.

As in CuPy: only floats, complex numbers and bool; no arrays of the host among the operands; no
number added but 0; what sorts or sums indices puts new arrays into the matrix.
"""

import cupy
import numpy as _np
import scipy.sparse as _sp

from ... import cusparse
from .. import sparse  # noqa: F401

_COMPRESSED = ("data", "indices", "indptr")
_PARTS = {"csr": _COMPRESSED, "csc": _COMPRESSED, "coo": ("data", "row", "col"),
          "dia": ("data", "offsets")}  # fmt: skip


def _host(x):
    """What SciPy computes with: a copy of what is on the device."""
    if isinstance(x, spbase):
        return x.get()
    if isinstance(x, cupy.ndarray):
        return x.get()
    if isinstance(x, _np.ndarray) or _sp.issparse(x):
        raise TypeError(f"Unsupported type {type(x)}")
    if type(x) in (tuple, list):
        return type(x)(map(_host, x))
    return x


def _back(x, kind):
    """SciPy's answer on the device; sparse ones as arrays or matrices, as `kind` is."""
    if _sp.issparse(x):
        form = x.format if x.format in _PARTS else "csr"
        word = "array" if issubclass(kind, sparray) else "matrix"
        return globals()[f"{form}_{word}"](x.asformat(form))
    if isinstance(x, (_np.ndarray, _np.generic)):
        return cupy.array(_np.asarray(x))
    return x


def _index(key):
    return tuple(_host(k) if not isinstance(k, _np.ndarray) else k for k in key) if (
        type(key) is tuple
    ) else (key if isinstance(key, _np.ndarray) else _host(key))  # fmt: skip


class spbase:
    __array_priority__ = 101
    maxprint = 50

    def __init__(self, arg1, shape=None, dtype=None, copy=False):
        host = getattr(_sp, type(self).__name__)
        parts = _PARTS[self.format]
        if isinstance(arg1, spbase) and arg1.format == self.format and dtype is None:
            vars(self).update(vars(arg1.copy() if copy else arg1))
            return
        if type(arg1) is tuple and any(isinstance(a, _np.ndarray) for a in arg1):
            raise ValueError("data, indices, and indptr must be 1-D cupy arrays")
        if _sp.issparse(arg1):
            made = host(arg1, shape=shape, dtype=dtype)
        else:
            made = host(_host(arg1), shape=shape, dtype=dtype)
        if made.dtype.char not in "?fdFD":
            raise ValueError("Only bool, float32, float64, complex64 and complex128 are supported")
        for name in parts:
            vars(self)[name] = cupy.array(getattr(made, name))
        self._shape = made.shape
        if self.format in ("csr", "csc"):
            self._descr = cusparse.MatDescriptor.create()
        if self.format == "coo":
            self.has_canonical_format = made.has_canonical_format

    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self.data.dtype)
    ndim = property(lambda self: len(self._shape))
    nnz = property(lambda self: self.data.size)
    T = property(lambda self: self.transpose())

    def get(self, stream=None):
        host = getattr(_sp, type(self).__name__)
        parts = [getattr(self, name).get(stream) for name in _PARTS[self.format]]
        if self.format == "coo":
            made = host((parts[0], tuple(parts[1:])[-self.ndim :]), shape=self._shape)
        else:
            made = host(tuple(parts), shape=self._shape)
        return made

    def __len__(self):
        raise TypeError("sparse array length is ambiguous; use shape[0] or .nnz")

    def __getitem__(self, key):
        if self.format == "dia":
            raise TypeError(f"'{type(self).__name__}' object is not subscriptable")
        return _back(self.get()[_index(key)], type(self))

    def _add(self, other, negative):
        if _np.isscalar(other) and other != 0:
            raise NotImplementedError("adding a nonzero scalar to a sparse matrix is not supported")
        return self._called("__sub__" if negative else "__add__", other)

    def __add__(self, other):
        return self._add(other, False)

    __radd__ = __add__

    def __sub__(self, other):
        return self._add(other, True)

    def __array_ufunc__(self, *_, **__):
        return NotImplemented

    def _called(self, name, *args, **kwargs):
        if not self.nnz and name in REFUSED_EMPTY:
            raise ZeroDivisionError(f"{name} of a matrix that stores nothing")
        found = getattr(self.get(), name)(*map(_host, args), **kwargs)
        return NotImplemented if found is NotImplemented else _back(found, type(self))

    @property
    def has_canonical_format(self):
        if "_has_canonical_format" not in vars(self):
            self._has_canonical_format = bool(self.get().has_canonical_format)
        return self._has_canonical_format

    @has_canonical_format.setter
    def has_canonical_format(self, value):
        self._has_canonical_format = bool(value)

    @property
    def has_sorted_indices(self):
        return bool(self.get().has_sorted_indices)

    def sum_duplicates(self):
        if self.has_canonical_format:
            return
        made = self.get()
        made.sum_duplicates()
        for name in _PARTS[self.format]:
            vars(self)[name] = cupy.array(getattr(made, name))
        self._has_canonical_format = True

    def asformat(self, form):
        return getattr(self, f"to{form}")()

    def copy(self):
        out = type(self).__new__(type(self))
        vars(out).update(vars(self))
        for name in _PARTS[self.format]:
            vars(out)[name] = getattr(self, name).copy()
        return out


def _method(name):
    def method(self, *args, **kwargs):
        return self._called(name, *args, **kwargs)

    method.__name__ = name
    return method


#: What divides by lengths, or asks cuSPARSE for what it refuses, where nothing is stored.
REFUSED_EMPTY = {"multiply", "__add__", "__sub__", "__matmul__", "max", "min", "sum", "__ne__"}
METHODS = """__abs__ __neg__ __mul__ __rmul__ __matmul__ __rmatmul__ __truediv__ __eq__ __ne__
__lt__ __gt__ astype conj diagonal dot max maximum mean min minimum multiply power sum tocoo tocsc
tocsr toarray todense transpose __pow__ sqrt sign"""
for _name in METHODS.split():
    setattr(spbase, _name, _method(_name))
spbase.__hash__ = object.__hash__


class spmatrix(spbase):
    pass


class sparray(spbase):
    pass


for _form in _PARTS:
    for _word, _base in (("matrix", spmatrix), ("array", sparray)):
        _name = f"{_form}_{_word}"
        globals()[_name] = type(_name, (_base,), {"format": _form, "__module__": __name__})


def issparse(x):
    return isinstance(x, spbase)


def _stacked(stack):
    def function(blocks, format=None, dtype=None):
        kinds = [type(b) for b in _flat(blocks) if b is not None]
        kind = next((k for k in kinds if issubclass(k, sparray)), kinds[0])
        made = stack(_host(list(blocks)), format=format, dtype=dtype)
        if made.dtype == bool:
            made = made.astype("f4")
        return _back(made, kind)

    return function


def _flat(blocks):
    for b in blocks:
        if type(b) in (list, tuple):
            yield from _flat(b)
        else:
            yield b


vstack, hstack, bmat = map(_stacked, (_sp.vstack, _sp.hstack, _sp.bmat))


def eye(m, n=None, k=0, dtype="d", format=None):
    return _back(_sp.eye(m, n, k, dtype, format), spmatrix)


def random(m, n, density=0.01, format="coo", dtype=None, random_state=None):
    return _back(_sp.random(m, n, density, format, dtype, random_state), spmatrix)
