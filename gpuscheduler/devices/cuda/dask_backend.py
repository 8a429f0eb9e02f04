"""Complete Dask's CuPy backend by registration with Dask.

No array type and no API of our own.

With `array.backend` set to `cupy`, Dask (2026.8) makes `ones`, `zeros`, `empty`, `full` and
`arange` on the GPU, and with `arange` also `indices`, `fromfunction` and `tri`. `linspace`, `eye`,
`diag` and `meshgrid` of NumPy arrays stay on the host, and `da.random.default_rng` has only those
distributions that CuPy's own Generator has. After `register()` these work too, and with the
NumPy backend they are Dask's own functions still.

Chunks are made inside the task, on the device that is current there. Graphs hold numbers and
module names only, so this module imports no CuPy and NumPy can stand in for it (`xp="numpy"`).
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Task
from dask.array import creation, linalg, routines
from dask.array.backends import ArrayBackendEntrypoint
from dask.array.backends import array_creation_dispatch as dispatch
from dask.array.core import Array, normalize_chunks
from dask.array.cupy_entry_point import CupyBackendEntrypoint
from dask.base import tokenize
from dask.blockwise import blockwise

from ...dask_private import creation_backends
from ...frontend.tiles import MeshAxis, Tile, Tiles
from ...random import Philox

#: Creation functions that Dask itself does not dispatch and that we fill in.
FILLED = ("linspace", "eye", "diag", "meshgrid")

# Where Dask has bound them. Names imported elsewhere before `register()` stay Dask's own.
BOUND_IN = (da, creation, linalg, routines)

_undo: list[Callable[[], None]] = []


def register() -> None:
    """Fill the holes of Dask's CuPy backend. A second call does nothing.

    `ones` and its kin are dispatched because Dask decorates them with
    `array_creation_dispatch.register_inplace("numpy")`, which keeps the function as the NumPy
    backend's and returns a wrapper that asks the current backend. We decorate the others in the
    same way; as they are defined already, the wrapper has to be bound where Dask bound them.

    >>> import dask.array as da
    >>> register()
    >>> da.linspace(0, 1, 5).compute()  # the NumPy backend, unchanged
    array([0.  , 0.25, 0.5 , 0.75, 1.  ])
    >>> unregister()
    """
    if _undo:
        return
    before = creation_backends().get("cupy")
    dispatch.register_backend("cupy", CupyBackend())
    _undo.append(partial(_put_back, before))
    numpy_backend = dispatch.dispatch("numpy")
    for name in FILLED:
        original = getattr(creation, name)
        wrapper = dispatch.register_inplace("numpy", name=name)(original)
        _undo.append(partial(delattr, numpy_backend, name))
        for module in BOUND_IN:
            if getattr(module, name, None) is original:
                setattr(module, name, wrapper)
                _undo.append(partial(setattr, module, name, original))


def unregister() -> None:
    """Leave Dask as `register` found it."""
    while _undo:
        _undo.pop()()


def _put_back(before: ArrayBackendEntrypoint | None) -> None:
    if before is None:  # Dask had not looked for its own yet, and will
        del creation_backends()["cupy"]
    else:
        dispatch.register_backend("cupy", before)


class CupyBackend(CupyBackendEntrypoint):
    """Dask's CuPy backend and what it leaves out.

    >>> CupyBackend(xp="numpy").eye(3, chunks=2, k=1).compute()
    array([[0., 1., 0.],
           [0., 0., 1.],
           [0., 0., 0.]])
    """

    def __init__(self, xp: str = "cupy"):
        super().__init__()  # type: ignore[no-untyped-call]
        self.xp = xp

    @property
    def default_bit_generator(self) -> Callable[..., Philox]:
        return partial(Philox, library="cupy")

    @property
    def RandomState(self) -> type:
        """CuPy's, by whose type `gpuscheduler.random` tells that the user named none."""
        return _random_state(super().RandomState)

    def linspace(
        self,
        start: Any,
        stop: Any,
        num: int = 50,
        endpoint: bool = True,
        retstep: bool = False,
        chunks: Any = "auto",
        dtype: Any = None,
    ) -> Any:
        """`numpy.linspace`, value for value, however it is chunked."""
        dtype = np.dtype(float if dtype is None else dtype)
        axis = MeshAxis(float(start), float(stop), int(num), bool(endpoint))
        chunk = partial(_linspace, xp=self.xp, axis=axis, dtype=dtype)
        x = self._from_tiles("linspace", chunk, (axis.n,), chunks, dtype)
        return (x, (axis.stop - axis.start) / (axis.parts or 1)) if retstep else x

    def eye(
        self, N: int, chunks: Any = "auto", M: int | None = None, k: int = 0, dtype: Any = float
    ) -> Array:
        if not isinstance(chunks, (int, str)):
            raise ValueError("chunks must be an int or string")
        dtype = np.dtype(float if dtype is None else dtype)
        chunk = partial(_eye, xp=self.xp, k=int(k), dtype=dtype)
        return self._from_tiles("eye", chunk, (N, N if M is None else M), chunks, dtype)

    def diag(self, v: Any, k: int = 0) -> Any:
        """Dask's `diag`, but a 1-D NumPy array gives a diagonal matrix on the GPU."""
        if not isinstance(v, np.ndarray) or v.ndim != 1:
            return dispatch.dispatch("numpy").diag(v, k)
        name = "diag-" + tokenize(v, k, self.xp)
        n = len(v) + abs(k)
        task = Task((name, 0, 0), partial(_diag, xp=self.xp, k=int(k)), v)
        return Array({task.key: task}, name, ((n,), (n,)), meta=self._meta(2, v.dtype))

    def meshgrid(self, *xi: Any, **kwargs: Any) -> Any:
        """Dask's `meshgrid`, but axes that are not yet Dask arrays are put on the GPU."""
        axes = [x if isinstance(x, Array) else self._to_device(da.asarray(x)) for x in xi]
        return dispatch.dispatch("numpy").meshgrid(*axes, **kwargs)

    def _to_device(self, x: Array) -> Any:
        chunk = partial(_asarray, xp=self.xp)
        return da.map_blocks(chunk, x, meta=self._meta(x.ndim, x.dtype))

    def _meta(self, ndim: int, dtype: Any) -> Any:
        return import_module(self.xp).empty((0,) * ndim, dtype=dtype)

    def _from_tiles(
        self, what: str, chunk: Callable[..., Any], shape: tuple[int, ...], chunks: Any, dtype: Any
    ) -> Array:
        """An array whose chunks are `chunk(tile)`: where they lie is all that they depend on."""
        chunks = normalize_chunks(chunks, shape, dtype=dtype)
        name = f"{what}-{tokenize(chunk, chunks)}"
        axes = tuple(range(len(shape)))
        layer = blockwise(chunk, name, axes, Tiles(chunks), axes, numblocks={})
        return Array(layer, name, chunks, meta=self._meta(len(shape), dtype))


class _ByPosition(type):
    """The type of a `RandomState` that stands for numbers by position."""

    by_position = "cupy"


@cache
def _random_state(base: type) -> type:
    """Return a `RandomState` that is CuPy's in all but one attribute."""
    return _ByPosition(base.__name__, (base,), {"__module__": base.__module__})


def _reduce_random_state(made: Any) -> Any:
    return _random_state, made.__bases__


copyreg.pickle(_ByPosition, _reduce_random_state)  # type: ignore[arg-type]


def _linspace(tile: Tile, *, xp: str, axis: MeshAxis, dtype: Any) -> Any:
    """The elements of a linspace in a tile, in NumPy's order of operations.

    cupy.linspace computes `start + i*step` in one kernel, where the compiler fuses multiplication
    and addition, and starts each chunk from a rounded value.

    >>> _linspace(Tile((2,), (2,)), xp="numpy", axis=MeshAxis(0.0, 3.0, 4), dtype="f4")
    array([2., 3.], dtype=float32)
    """
    x = axis.coordinates_of(tile.indices(0, xp))
    return (np.floor(x) if np.issubdtype(dtype, np.integer) else x).astype(dtype)


def _eye(tile: Tile, *, xp: str, k: int, dtype: Any) -> Any:
    """The part of a matrix with ones on its k-th diagonal that is in a tile.

    >>> _eye(Tile((2, 0), (2, 3)), xp="numpy", k=-1, dtype=int)
    array([[0, 1, 0],
           [0, 0, 1]])
    """
    rows, columns = tile.indices(0, xp), tile.indices(1, xp)
    return (columns == rows[:, None] + k).astype(dtype)


def _diag(v: Any, *, xp: str, k: int) -> Any:
    return import_module(xp).diag(_asarray(v, xp=xp), k)


def _asarray(x: Any, *, xp: str) -> Any:
    return import_module(xp).asarray(x)
