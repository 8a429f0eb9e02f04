"""A CuPy whose devices are the host, for tests: `python -m pytest tests/gpu` with this folder first
on PYTHONPATH. NumPy computes; memory, streams and events are those of `_device`, which finds races.

It has what the package and its tests call, and refuses what CuPy refuses: arrays of the host among
its own.
"""

import numpy as _np

from . import _device as d
from . import _linalg, cuda, random  # noqa: F401

__version__ = "14.2.0"

float16, float32, float64 = _np.float16, _np.float32, _np.float64
complex64, complex128, bool_ = _np.complex64, _np.complex128, _np.bool_
int8, int16, int32, int64 = _np.int8, _np.int16, _np.int32, _np.int64
uint8, uint16, uint32, uint64 = _np.uint8, _np.uint16, _np.uint32, _np.uint64
pi, inf, nan, newaxis, e = _np.pi, _np.inf, _np.nan, None, _np.e
dtype = _np.dtype


class ndarray(_np.lib.mixins.NDArrayOperatorsMixin):
    """An array in a device's memory: `_a` is how the host sees it."""

    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        dtype = _np.dtype(dtype)
        if dtype.kind in "OUSMm":
            raise ValueError(f"Unsupported dtype {dtype}")
        shape = (shape,) if isinstance(shape, (int, _np.integer)) else tuple(shape)
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= int(n)
        if memptr is None:
            memptr = cuda.alloc(nbytes)
        self._pooled = memptr.mem
        memory = self._pooled.memory
        at = memptr.ptr - memory.raw.ctypes.data
        self._a = _np.ndarray(shape, dtype, memory.raw, at, strides, order or "C")

    @classmethod
    def _view(cls, a, pooled):
        self = cls.__new__(cls)
        self._a, self._pooled, self._of = a, pooled, pooled
        return self

    _of = None
    base = property(lambda self: self._of)

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    strides = property(lambda self: self._a.strides)
    flags = property(lambda self: self._a.flags)
    T = property(lambda self: self.transpose())
    real = property(lambda self: _called(_np.real, (self,), {}))
    imag = property(lambda self: _called(_np.imag, (self,), {}))
    device = property(lambda self: cuda.Device(self._pooled.memory.device))

    @property
    def data(self):
        return cuda.MemoryPointer(self._pooled, self._a.ctypes.data, self._pooled.memory.device)

    def get(self, stream=None, order="C", out=None, blocking=True):
        stream = stream or cuda.get_current_stream(self.device.id)
        self._pooled.memory.read(stream)
        stream.synchronize()
        if out is None:
            return _np.array(self._a, order="K")
        if out.shape != self.shape or out.dtype != self.dtype:
            raise ValueError("Shape or dtype mismatch")
        out[...] = self._a
        return out

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed: use .get()")

    def __len__(self):
        return len(self._a)

    def __repr__(self):
        return repr(self.get())

    def __format__(self, spec):
        return format(self.get(), spec)

    def item(self, *args):
        return self.get().item(*args)

    def tolist(self):
        return self.get().tolist()

    def __float__(self):
        return float(self.get())

    def __int__(self):
        return int(self.get())

    def __index__(self):
        return self.get().__index__()

    def __bool__(self):
        return bool(self.get())

    def __complex__(self):
        return complex(self.get())

    def __iter__(self):
        return (self[n] for n in range(len(self)))

    def __reduce__(self):
        return array, (self.get(),)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        for x in inputs:
            if hasattr(x, "__cupy_override_elementwise_kernel__"):
                if ufunc is _np.matmul:
                    raise TypeError(f"Unsupported type {type(x)}")
                kernel = _Kind(f"cupy_{ufunc.__name__}")
                return x.__cupy_override_elementwise_kernel__(kernel, *inputs, **kwargs)
        return _called(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        if function in _OWN:
            kwargs.pop("like", None)
            return _OWN[function](*args, **kwargs)
        return _called(function, args, kwargs)

    def __setitem__(self, key, value):
        if _hosts((value,)):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        key = _wrapped(self.shape, key)
        _called(_np.ndarray.__setitem__, (self, key, value), {}, writes=(self,), hosts=True)

    def __getitem__(self, key):
        keys = key if type(key) is tuple else (key,)
        if all(isinstance(k, (int, _np.integer)) and type(k) is not bool for k in keys):
            key = (*keys, ...)  # a point, too, is a view
        key = _wrapped(self.shape, key)
        return _called(_np.ndarray.__getitem__, (self, key), {}, hosts=True)

    def __deepcopy__(self, memo):
        return self.copy()


class _Kind:
    """A kernel of CuPy's, as far as types that override it look."""

    def __init__(self, name):
        self.name = name


def _method(name):
    function = getattr(_np.ndarray, name)

    def method(self, *args, **kwargs):
        writes = (self,) if name in ("fill", "sort", "partition") else ()
        return _called(function, (self, *args), kwargs, writes)

    method.__name__ = name
    return method


METHODS = """all any argmax argmin argsort astype clip conj conjugate copy cumprod cumsum diagonal
dot fill flatten max mean min nonzero partition prod ravel repeat reshape round searchsorted sort
squeeze std sum swapaxes trace transpose var view"""
for _name in METHODS.split():
    setattr(ndarray, _name, _method(_name))
ndarray.take = lambda self, *args, **kwargs: take(self, *args, **kwargs)


def _order(a, axis=-1):
    """Stable, as CuPy's; of one line of float32 and float64, CUB puts NaN with a sign first."""
    values = a.astype(_np.float32) if a.dtype == float16 else a
    order = _np.argsort(values, axis=axis, kind="stable")
    if a.ndim == 1 and a.dtype in (float32, float64):
        last = _np.isnan(a[order]) & _np.signbit(a[order])
        order = _np.concatenate([order[last], order[~last]])
    return order


def _sort_in_place(a, axis=-1):
    a[...] = _np.take_along_axis(a, _order(a, axis), axis)


def argsort(a, axis=-1, kind=None):
    if axis is None:
        a, axis = a.ravel(), -1
    return _called(_order, (a, axis), {})


def sort(a, axis=-1, kind=None):
    out, axis = (a.flatten(), -1) if axis is None else (a.copy(), axis)
    out.sort(axis)
    return out


ndarray.argsort = argsort
ndarray.sort = lambda self, axis=-1, kind=None: _called(
    _sort_in_place, (self, axis), {}, writes=(self,)
)


def _plain(value, reads):
    if isinstance(value, ndarray):
        reads.append(value)
        return value._a
    if type(value) in (list, tuple):
        return type(value)([_plain(v, reads) for v in value])
    if type(value) is dict:
        return {k: _plain(v, reads) for k, v in value.items()}
    return value


def _numbers(index):
    """An index as NumPy's array of integers, where it is one that CuPy wraps round."""
    if type(index) is list:
        index = [i._a if isinstance(i, ndarray) else i for i in index]
    elif not isinstance(index, (ndarray, _np.ndarray)):
        return None
    index = index._a if isinstance(index, ndarray) else _np.asarray(index)
    return index if index.dtype.kind in "iu" and index.size else None


def _wrapped(shape, key):
    """The same index with arrays of integers modulo the lengths of their axes.

    CuPy does not check the bounds of such arrays.
    """
    keys = key if type(key) is tuple else (key,)
    if all(_numbers(k) is None for k in keys):
        return key

    def takes(k):
        if k is None or k is Ellipsis:
            return 0
        return k.ndim if getattr(getattr(k, "dtype", None), "kind", "") == "b" else 1

    out, axis = [], 0
    for k in keys:
        if k is Ellipsis:
            axis += len(shape) - sum(map(takes, keys))
        numbers = _numbers(k)
        if numbers is None or axis >= len(shape) or not shape[axis]:
            out.append(k)
        else:
            if isinstance(k, ndarray):
                k._pooled.memory.read(cuda.get_current_stream())
            out.append(numbers.astype(_np.int64) % shape[axis])
        axis += takes(k)
    return tuple(out) if type(key) is tuple else out[0]


def take(a, indices, axis=None, out=None, mode="wrap"):
    """It wraps round, too."""
    return _called(_np.take, (a, indices, axis, out, "wrap"), {}, hosts=True)


def _hosts(value):
    if type(value) is _np.ndarray:  # of a point, too
        return True
    return type(value) in (list, tuple) and any(map(_hosts, value))


def _called(function, args, kwargs, writes=(), hosts=False):
    """NumPy's answer, in the current device's memory; views stay views."""
    if not hosts and _hosts(args):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    reads, outs = [], []
    plain = _plain(tuple(args), reads)
    named = {k: _plain(v, outs if k == "out" else reads) for k, v in kwargs.items()}
    result = function(*plain, **named)
    stream = cuda.get_current_stream()
    viewed = []
    found = _back(result, outs, reads, viewed, stream)
    if not viewed or outs or writes:
        for array in reads:
            if array.nbytes:  # else nothing is read
                array._pooled.memory.read(stream)
    for array in (*outs, *writes):
        array._pooled.memory.write(stream)
    return found


def _back(value, outs, reads, viewed, stream):
    if isinstance(value, _np.generic):
        value = _np.asarray(value)
    if type(value) is _np.ndarray:
        for array in outs:
            if value is array._a:
                return array
        for array in reads:
            if value.size and _np.may_share_memory(value, array._a):
                viewed.append(array)
                return ndarray._view(value, array._pooled)
        return _stored(value, stream)
    if isinstance(value, (list, tuple)):
        items = [_back(v, outs, reads, viewed, stream) for v in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _stored(value, stream=None):
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    out = ndarray(value.shape, value.dtype, order=order)
    out._a[...] = value
    out._pooled.memory.write(stream or cuda.get_current_stream())
    return out


def empty(shape, dtype=float, order="C"):
    out = ndarray(shape, dtype, order=order)
    raw = out._pooled.memory
    if raw.size < 2**24:  # noise, not what happens to lie there
        raw.raw[:] = 0xA5
    return out


def array(obj, dtype=None, copy=True, order="K", ndmin=0):
    if isinstance(obj, ndarray):
        return obj.astype(dtype or obj.dtype, order=order)
    reads = []
    value = _np.array(_plain(obj, reads), dtype=dtype, order=order, ndmin=ndmin)
    for a in reads:
        a._pooled.memory.read(cuda.get_current_stream())
    if value.dtype.kind in "OUSMm":
        raise ValueError(f"Unsupported dtype {value.dtype}")
    return _stored(value)


def asarray(a, dtype=None, order=None):
    if isinstance(a, ndarray) and (dtype is None or a.dtype == dtype):
        return a
    return array(a, dtype, order=order or "K")


asanyarray = asarray


def ascontiguousarray(a, dtype=None):
    a = asarray(a, dtype)
    return a if a.flags.c_contiguous else a.copy(order="C")


def asfortranarray(a, dtype=None):
    a = asarray(a, dtype)
    return a if a.flags.f_contiguous else a.copy(order="F")


def asnumpy(a, stream=None, order="C", out=None):
    return a.get(stream) if isinstance(a, ndarray) else _np.asarray(a)


def _like(make):
    def like(a, *args, dtype=None, order="K", shape=None, **kwargs):
        shape = a.shape if shape is None else shape
        return make(shape, *args, dtype=dtype or a.dtype)

    return like


def _created(name):
    function = getattr(_np, name)

    def create(*args, **kwargs):
        kwargs.pop("like", None)
        result = function(*_plain(args, []), **_plain(kwargs, []))
        return tuple(map(_stored, result)) if type(result) is tuple else _stored(result)

    create.__name__ = name
    return create


CREATED = ["zeros", "ones", "full", "arange", "linspace", "eye", "tri", "identity", "indices"]
for _name in CREATED:
    globals()[_name] = _created(_name)
empty_like, zeros_like, ones_like = map(_like, (empty, globals()["zeros"], globals()["ones"]))


def full_like(a, value, dtype=None, order="K", subok=None, shape=None):
    return globals()["full"](a.shape if shape is None else shape, value, dtype=dtype or a.dtype)


_OWN = {
    _np.empty_like: empty_like,
    _np.zeros_like: zeros_like,
    _np.take: take,
    _np.sort: sort,
    _np.argsort: argsort,
    _np.ones_like: ones_like,
    _np.full_like: full_like,
    **{
        getattr(_np, name): globals()[name]
        for name in ("empty", "array", "asarray", "asanyarray", *CREATED)
    },
}


def get_default_memory_pool():
    return _Pools()


class _Pools:
    """Of the current device, as CuPy's is."""

    used_bytes = staticmethod(lambda: d.pools[d.here.device].used)
    total_bytes = staticmethod(lambda: d.pools[d.here.device].held)
    free_bytes = staticmethod(lambda: _Pools.total_bytes() - _Pools.used_bytes())
    free_all_blocks = staticmethod(lambda: d.pools[d.here.device].free_all_blocks())

    @staticmethod
    def set_limit(size=None):
        d.pools[d.here.device].limit = size or 0


class _Kernel:
    def __init__(self, *_, **__):
        raise NotImplementedError("there is no compiler")


class ElementwiseKernel(_Kernel):
    pass


class ReductionKernel(_Kernel):
    pass


class RawKernel(_Kernel):
    pass


class _Fusion:
    def __init__(self, func):
        self.func, self.name = func, func.__name__

    def __call__(self, *args):
        return self.func(*args)


def fuse(function):
    return _Fusion(function)


class _Function:
    """A function of NumPy's that takes arrays of the device."""

    def __init__(self, function, name):
        self._function, self.__name__, self.__module__ = function, name, "cupy"

    def __call__(self, *args, **kwargs):
        if self._function is _np.matmul:
            for x in args:
                if not isinstance(x, ndarray):
                    raise TypeError(f"Unsupported type {type(x)}")
        return _called(self._function, args, kwargs)


def __getattr__(name):
    function = getattr(_np, name)  # an AttributeError is as right for CuPy
    if isinstance(function, type) or not callable(function):
        return function
    made = globals()[name] = _Function(function, name)
    return made


linalg = _linalg.Linalg(_called)
