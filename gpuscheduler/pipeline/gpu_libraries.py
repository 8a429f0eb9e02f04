"""Find out whether a computation names a GPU library, or pins a task to a device.

An array of one, a function that uses one, a pin to a GPU.

A computation that names none is the host's: none of its tasks would find a GPU's array. Functions
are read and nothing is called, so what a function finds out only when it runs is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from dask._task_spec import Alias, DataNode, Task, TaskRef
from dask.blockwise import Blockwise
from dask.highlevelgraph import Layer, MaterializedLayer

from ..dask_private import Expr, HLGExpr, layers_of
from ..frontend.chunk import Chunk
from ..frontend.graph import PIN, is_pin_rule
from ..frontend.transfers import is_sender
from .comparable import Items, has_items, items_of

#: Libraries whose arrays are on GPUs, or may be.
GPU = frozenset({
    "cucim", "cudf", "cugraph", "cuml", "cupy", "cupy_backends", "cupyx", "cuspatial", "dask_cudf",
    "jax", "jaxlib", "kvikio", "numba_cuda", "pycuda", "pylibcudf", "pylibraft", "rmm",
    "tensorflow", "torch", "triton", "warp",
})  # fmt: skip
#: Libraries whose functions get no GPU's array unless they are given one: they are not read.
HOST = sys.stdlib_module_names - {"__main__"} | {
    "bottleneck", "cftime", "cloudpickle", "cytoolz", "dask", "distributed", "fsspec", "h5netcdf",
    "h5py", "llvmlite", "matplotlib", "netCDF4", "numba", "numbagg", "numcodecs", "numpy",
    "numpy_groupies", "pandas", "pint", "pyarrow", "rasterio", "rioxarray", "scipy", "skimage",
    "sklearn", "sparse", "tlz", "toolz", "xarray", "zarr", __name__.partition(".")[0],
}  # fmt: skip
#: Of these, those whose objects hold what users gave them.
HOLDERS = frozenset({"cytoolz", "dask", "functools", "tlz", "toolz", "xarray"})
_ATOMS = frozenset({
    bool, bytearray, bytes, complex, float, int, range, slice, str, type(None), type(Ellipsis),
    np.dtype, Alias, CodeType, TaskRef,
})  # fmt: skip
#: Objects that are visited in one layer, at most; others are taken to have no GPU library.
MOST = 200_000

#: A dictionary of globals or a cell, a name there, and what it was.
Watched = tuple[Any, str, Any]


def library(name: str | None) -> str | None:
    """The GPU library that a module is of.

    >>> library("cupy.linalg"), library("numba.cuda.compiler"), library("numba.core")
    ('cupy', 'numba.cuda', None)
    """
    if not isinstance(name, str):
        return None
    root = name.partition(".")[0]
    if root in GPU:
        return root
    return "numba.cuda" if name == "numba.cuda" or name.startswith("numba.cuda.") else None


def _is_pinned(expr: Any) -> bool:
    """Whether expressions that are no graphs of layers pin a task to a device.

    Layers say so themselves; to ask a graph of layers would have Dask optimise it once more.
    """
    nodes = list(expr.walk())
    if any(isinstance(node, HLGExpr) for node in nodes):
        roots = [op for op in expr.operands if hasattr(op, "walk")] if len(nodes) > 1 else []
        return any(_is_pinned(root) for root in roots)
    if not hasattr(expr, "__dask_annotations__"):
        return False
    pins = expr.__dask_annotations__().get(PIN, {}).values()
    return any(p is not None and not is_pin_rule(p) for p in pins)


class GpuUse(NamedTuple):
    """Why a computation has to run on GPUs, if it has to."""

    gpu_library: str | None  # the library or annotation that it names; None without any
    keeps: bool = False  # whether it reads NumPy's arrays that GPUs keep


class Libraries:
    """Finds GPU libraries in computations, and remembers the layers that were searched."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Layer], GpuUse, list[Watched], Items]] = {}

    def look(self, dsk: Any) -> GpuUse:
        """Return which GPU library or annotation a computation names, if any.

        >>> import dask
        >>> import dask.array as da
        >>> with dask.annotate(device=0):
        ...     x = da.ones(4, chunks=2)
        >>> libraries = Libraries()
        >>> for y in (da.ones(4) + 1, x + 1):
        ...     print(libraries.look(y.dask).gpu_library)
        None
        device=
        """
        graphs = [dsk]
        if hasattr(dsk, "walk") and hasattr(dsk, "operands"):
            if _is_pinned(dsk):
                return GpuUse(f"{PIN}=")
            graphs = list(dsk.walk())
        look, keeps = _Look(), False
        for graph in graphs:
            if (layers := layers_of(graph)) is not None:
                found, kept = self._layers(layers.layers.values())
                keeps = keeps or kept
            elif isinstance(graph, Mapping):
                found = look.find_library(graph.values())
            else:
                # expressions among these are walked, too: looked at from here, a graph of layers
                # would be a mapping, and write down the tasks of all blocks
                operands = getattr(graph, "operands", ())
                found = look.find_library([x for x in operands if not isinstance(x, Expr)])
            if found is not None:
                return GpuUse(found)
        return GpuUse(None, keeps or look.keeps)

    def _layers(self, layers: Iterable[Layer]) -> GpuUse:
        keeps = False
        for layer in layers:  # what the collections themselves say, first
            facts = layer.collection_annotations
            if facts and (found := library(facts.get("chunk_type"))):
                return GpuUse(found)
            pin = (layer.annotations or {}).get(PIN)
            if pin is not None and not is_pin_rule(pin):
                return GpuUse(f"{PIN}=")
        for layer in layers:
            use = self._layer(layer)
            if use.gpu_library is not None:
                return use
            keeps = keeps or use.keeps
        return GpuUse(None, keeps)

    def _layer(self, layer: Layer) -> GpuUse:
        key = id(layer)
        known = self._known.get(key)
        if known is not None and known[0]() is layer:
            _, found, watched, items = known
            if _are_unchanged(watched) and has_items(layer, items):
                return found
        look = _Look()
        found = GpuUse(look.find_library(_layer_contents(layer)), look.keeps)
        if look.sure:
            gone = partial(_forget, ref(self), key)
            self._known[key] = ref(layer, gone), found, look.watched, items_of(layer)
        return found


def _forget(libraries: ref[Libraries], key: int, _: Any) -> None:
    if (alive := libraries()) is not None:
        alive._known.pop(key, None)


def _are_unchanged(watched: Iterable[Watched]) -> bool:
    """Whether variables are what they were."""
    for where, name, value in watched:
        now = where.get(name) if type(where) is dict else _content(where)
        if now is not value:
            return False
    return True


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _layer_contents(layer: Layer) -> Iterable[Any]:
    """All that a layer consists of beside names and numbers."""
    if isinstance(layer, Blockwise):
        given = [value for value, index in layer.indices if index is None]
        return [layer.task, *given, *layer.io_deps.values()]
    if type(layer) is MaterializedLayer:
        return layer.mapping.values()
    return list(_parts(layer))


def _parts(value: Any) -> Iterator[Any]:
    """The attributes of an object."""
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)


class _Look:
    """One search through a layer, which visits each object once."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}  # held, or another object might have the same identity
        self.watched: list[Watched] = []
        self.sure = True  # whether what is `watched` is all that may change
        self.keeps = False  # whether there were arrays of NumPy's that GPUs keep
        self.todo: list[Any] = []

    def find_library(self, values: Iterable[Any]) -> str | None:
        """Return the first GPU library among these things; None without one."""
        self.todo += values
        todo, seen = self.todo, self.seen
        while todo:
            value = todo.pop()
            kind = type(value)
            if kind in _ATOMS or id(value) in seen:
                continue
            seen[id(value)] = value
            if len(seen) > MOST:
                self.sure = False
                return None
            read = _READ.get(kind)
            found = read(self, value) if read is not None else self._library_of_object(value)
            if found is not None:
                return found
        return None

    def _items(self, values: Any) -> None:
        kinds = set(map(type, values))
        if not kinds <= _ATOMS:
            self.todo += values

    def _look_at_changeable(self, values: Any) -> None:
        self.sure = False  # anybody may put something else into it
        self._items(values)

    def _mapping(self, values: Mapping[Any, Any]) -> None:
        self._items(values.values())

    def _array(self, array: Any) -> None:
        if array.dtype.hasobject:
            self._look_at_changeable(array.ravel().tolist())

    def _task(self, task: Any) -> str | None:
        if is_sender(task.func):
            return "cupy"
        self.todo.append(task.func)
        self.todo += task.args
        if task.kwargs:
            self.todo += task.kwargs.values()
        return None

    def _data(self, node: DataNode) -> None:
        self.todo.append(node.value)

    def _chunk(self, chunk: Chunk) -> str | None:
        if getattr(chunk.keeper, "kind", "") != "cuda":
            return None
        self.keeps = self.keeps or chunk.resident
        return None if chunk.resident else "a persisted array"

    def _look_at_partial(self, it: Any) -> None:
        self.todo += (it.func, *it.args, *it.keywords.values())

    def _method(self, it: MethodType) -> None:
        self.todo += (it.__func__, it.__self__)

    def _module(self, module: ModuleType) -> str | None:
        return library(module.__name__)

    def _builtin(self, function: Any) -> str | None:
        own = getattr(function, "__self__", None)
        if own is not None and not isinstance(own, ModuleType):
            self.todo.append(own)
        return library(getattr(function, "__module__", None))

    def _function(self, f: FunctionType) -> str | None:
        if is_sender(f):
            return "cupy"
        home = f.__module__ or ""
        if found := library(home):
            return found
        self.todo += f.__defaults__ or ()
        self.todo += (f.__kwdefaults__ or {}).values()
        for cell in f.__closure__ or ():
            value = _content(cell)
            self.watched.append((cell, "", value))
            self.todo.append(value)
        return None if home.partition(".")[0] in HOST else self._code(f)

    def _code(self, f: FunctionType) -> str | None:
        """What a function of the user's says, and those that are written in it."""
        names: dict[str, None] = {}
        codes = [f.__code__]
        while codes:
            code = codes.pop()
            names |= dict.fromkeys(code.co_names)
            codes += [c for c in code.co_consts if type(c) is CodeType]
        known = f.__globals__
        for name in names:
            if found := library(name):  # imported where it is needed
                return found
            if name not in known:
                continue
            value = known[name]
            self.watched.append((known, name, value))
            self.todo.append(value)
            if type(value) is ModuleType and value.__name__.partition(".")[0] not in HOST:
                inside = vars(value)  # a module of the user's: what of it the function may mean
                for n in names.keys() & inside.keys():
                    self.watched.append((inside, n, inside[n]))
                    self.todo.append(inside[n])
        return None

    def _class(self, cls: Any) -> str | None:
        home = getattr(cls, "__module__", None)
        if found := library(home):
            return found
        if str(home).partition(".")[0] not in HOST:
            for part in vars(cls).values():
                part = getattr(part, "__func__", getattr(part, "fget", part))
                if type(part) is FunctionType:
                    self.todo.append(part)
            self.todo += [c for c in cls.__mro__[1:] if c is not object]
        return None

    def _library_of_object(self, value: Any) -> str | None:
        cls = type(value)
        if isinstance(value, Task):
            return self._task(value)
        if isinstance(value, np.ndarray):
            self._array(value)
            return None
        if isinstance(value, (type, BuiltinFunctionType)):
            return self._class(value) if isinstance(value, type) else self._builtin(value)
        home = getattr(cls, "__module__", None)
        if found := library(home):
            return found
        if isinstance(value, Mapping):
            self._mapping(value)
            return None
        if isinstance(value, (tuple, list, set, frozenset)):
            self._look_at_changeable(value)
            return None
        root = str(home).partition(".")[0]
        if root == "zarr":
            return _zarr_library()
        if root in HOLDERS:
            self.todo += getattr(value, "operands", None) or _parts(value)
        elif root not in HOST:
            self.sure = False
            self.todo += (cls, *_parts(value))
        return None


def _zarr_library() -> str | None:
    """What Zarr makes its blocks with, which a user may have set."""
    config = getattr(sys.modules.get("zarr"), "config", None)
    buffer = config.get("buffer", "") if config is not None else ""
    return "cupy" if ".gpu." in str(buffer) else None


_READ: dict[type, Callable[[_Look, Any], str | None]] = {  # some say nothing
    tuple: _Look._items,
    frozenset: _Look._items,
    list: _Look._look_at_changeable,
    set: _Look._look_at_changeable,
    dict: _Look._mapping,
    np.ndarray: _Look._array,
    Task: _Look._task,
    DataNode: _Look._data,
    Chunk: _Look._chunk,
    partial: _Look._look_at_partial,
    MethodType: _Look._method,
    ModuleType: _Look._module,
    BuiltinFunctionType: _Look._builtin,
    FunctionType: _Look._function,
    type: _Look._class,
}
