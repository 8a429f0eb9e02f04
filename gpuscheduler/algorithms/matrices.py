"""Arguments and results of functions of matrices, as blocks of Dask arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.array.core import Array, unify_chunks
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from . import lapack
from .blocks import array_module, module_name
from .capacity import capacity

#: Bytes of a matrix up to which one library call is faster than a graph, whatever the devices.
SMALL = {"cupy": 2**29, "numpy": 2**23}


def inexact_dtype(function: str, *dtypes: Any) -> np.dtype[Any]:
    """The dtype in which NumPy's linear algebra computes.

    >>> inexact_dtype("inv", np.int32), inexact_dtype("solve", np.float32, np.complex64)
    (dtype('float64'), dtype('complex64'))
    """
    for dtype in map(np.dtype, dtypes):
        if dtype.kind not in "biufc" or (dtype.kind in "fc" and dtype.char not in "fdFD"):
            raise TypeError(
                f"{function}: arrays of {dtype} have no linear algebra: "
                "convert to float32, float64, complex64 or complex128 with astype"
            )
    return np.result_type(*[d if np.dtype(d).kind in "fc" else np.float64 for d in dtypes])


def real_part(dtype: Any) -> np.dtype[Any]:
    """The dtype of real and imaginary parts."""
    return np.empty(0, dtype).real.dtype


def as_arrays(function: str, *arrays: Any) -> list[Array]:
    """The arguments of a function as Dask arrays of known shapes."""
    out = []
    for x in arrays:
        x = x if isinstance(x, Array) else da.asarray(x)
        if any(math.isnan(n) for n in x.shape):
            raise ValueError(
                f"{function}: the chunk sizes of an argument are not known: "
                "call x.compute_chunk_sizes() first"
            )
        out.append(x)
    return out


def as_stack(function: str, a: Any, square: bool = True) -> Array:
    """A matrix or a stack of matrices as a Dask array, or `numpy.linalg.LinAlgError`."""
    (a,) = as_arrays(function, a)
    if a.ndim < 2:
        raise np.linalg.LinAlgError(
            f"{function}: {a.ndim}-dimensional array given. Array must be at least two-dimensional"
        )
    if square and a.shape[-1] != a.shape[-2]:
        raise np.linalg.LinAlgError(
            f"{function}: Last 2 dimensions of the array must be square, not "
            f"{a.shape[-2]} x {a.shape[-1]}"
        )
    inexact_dtype(function, a.dtype)
    return a


def empty_meta(a: Array, ndim: int, dtype: Any) -> Any:
    """An empty array of the library of an array's blocks."""
    return array_module(a._meta).empty((0,) * ndim, dtype)


def fits(a: Array, *sizes: float, of: str = "", hint: str = "") -> bool:
    """Whether these many bytes, and as much to work in, fit the memory of one device of an array.

    With a name `of` a function that knows no other way, it raises where they do not.
    """
    nbytes, room = int(sum(sizes)), capacity(module_name(a))
    if room.fits_in_device(nbytes):
        return True
    if of:
        raise NotImplementedError(
            f"{of}: runs on one device and needs {2 * nbytes:,} bytes there with its working "
            f"memory; the limit is {room.nbytes:,}. {hint}"
        )
    return False


def in_one_call(a: Array, *sizes: float) -> bool:
    """Whether one library call on one device is the way for arrays of these many bytes."""
    module = module_name(a)
    return fits(a, *sizes) and (capacity(module).devices == 1 or sum(sizes) <= SMALL[module])


# ---- blocks put together inside a task


def references(a: Array) -> Any:
    """The blocks of an array, as nested lists for a task."""

    def nest_references(keys: Any) -> Any:
        return List(*map(nest_references, keys)) if isinstance(keys, list) else TaskRef(keys)

    return nest_references(a.__dask_keys__())


def assemble(blocks: Any, dtype: Any, order: str = "C") -> Any:
    """Blocks of a matrix or vector as one new array; NumPy's only block may come as it is.

    >>> assemble([[np.ones((1, 2)), np.zeros((1, 1))]], "f4").tolist()
    [[1.0, 1.0, 0.0]]
    """
    rows = [row if isinstance(row, list) else [row] for row in blocks]
    first = rows[0][0]
    xp = array_module(first)
    turned = xp is not np and first.ndim == 2 and order == "F"
    if len(rows) == len(rows[0]) == 1 and not turned:
        return first.astype(dtype, order=order, copy=xp is not np)
    height = sum([row[0].shape[0] for row in rows])
    width = sum([block.shape[1] for block in rows[0]]) if first.ndim == 2 else 1
    out = xp.empty((height, width)[: first.ndim], dtype, order=order)
    down = 0
    for row in rows:
        across, below = 0, down + row[0].shape[0]
        for block in row:
            beside = across + (block.shape[1] if first.ndim == 2 else 1)
            if turned and lapack.can_be_turned(block, dtype):
                lapack.write_turned(block, out.T[across:beside, down:below])
            else:
                out[(slice(down, below), slice(across, beside))[: first.ndim]] = block
            across = beside
        down = below
    return out


def _run_on_whole(
    function: Callable[..., Any],
    dtype: Any,
    order: str,
    blocks: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    return function(*[assemble(b, dtype, order) for b in blocks], **options)


# ---- arrays of what a task makes


def array_of(
    name: str,
    tasks: dict[Any, Any],
    chunks: tuple[tuple[int, ...], ...],
    meta: Any,
    dependencies: Sequence[Any],
) -> Array:
    """The Dask array of these tasks."""
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=dependencies)
    return Array(graph, name, chunks=chunks, meta=meta)


def call_on_whole(
    function: Callable[..., Any],
    arrays: Sequence[Array],
    dtype: Any,
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    order: str = "C",
    **options: Any,
) -> list[Array]:
    """Arrays of one block that one task makes, calling a function on whole arguments.

    `outputs` has a shape and a dtype for each value of the function; one value comes bare.
    """
    name = f"{function.__name__.strip('_')}-{tokenize(function, arrays, dtype, order, options)}"
    blocks = List(*map(references, arrays))

    def task(key: Any) -> Task:
        return Task(key, _run_on_whole, function, np.dtype(dtype), order, blocks, options)

    if len(outputs) == 1:
        shape, kind = outputs[0]
        key = (name, *(0 for _ in shape))
        chunks = tuple((n,) for n in shape)
        return [
            array_of(
                name, {key: task(key)}, chunks, empty_meta(arrays[0], len(shape), kind), arrays
            )
        ]
    whole = f"{name}-all"
    tasks: dict[Any, Any] = {whole: task(whole)}
    needs: Sequence[Any] = arrays
    graph = HighLevelGraph.from_collections(whole, tasks, dependencies=needs)
    return [pick_value(graph, whole, n, *output, arrays[0]) for n, output in enumerate(outputs)]


def pick_value(
    graph: HighLevelGraph, key: Any, n: int, shape: tuple[int, ...], dtype: Any, of: Array
) -> Array:
    """Value `n` of a task's tuple, as an array of one block."""
    owner = key if isinstance(key, str) else key[0]
    name = f"{owner}-{n}"
    block = (name, *(0 for _ in shape))
    layers: dict[str, Any] = {**graph.layers, name: {block: Task(block, getitem, TaskRef(key), n)}}
    needs = {**graph.dependencies, name: {owner}}
    chunks = tuple((size,) for size in shape)
    return Array(
        HighLevelGraph(layers, needs), name, chunks, meta=empty_meta(of, len(shape), dtype)
    )


def call_on_stacks(
    function: Callable[..., Any],
    signature: str,
    *arrays: Array,
    dtypes: Sequence[Any],
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> Any:
    """Call a function on the blocks of stacks, each of which holds whole matrices.

    `signature` is that of `dask.array.apply_gufunc`. Blocks of stacks are on all devices.
    """
    given, made = [_axes(side) for side in signature.split("->")]
    whole = [
        x.rechunk(dict.fromkeys(range(x.ndim - len(axes), x.ndim), -1))
        for x, axes in zip(arrays, given, strict=True)
    ]
    if len(whole) > 1:
        pairs = []
        for x, axes in zip(whole, given, strict=True):
            loop = range(len(axes) - x.ndim, 0)  # counted from the last, as they are broadcast
            pairs += [x, (*loop, *axes)]
        _, whole = unify_chunks(*pairs)
    metas = [empty_meta(whole[0], len(axes), kind) for axes, kind in zip(made, dtypes, strict=True)]
    return da.apply_gufunc(
        function,
        signature,
        *whole,
        meta=tuple(metas) if len(metas) > 1 else metas[0],
        output_sizes=sizes,
        **options,
    )


def _axes(side: str) -> list[tuple[str, ...]]:
    """Names of axes in one side of a signature.

    >>> _axes("(m,n),()")
    [('m', 'n'), ()]
    """
    return [tuple(filter(None, part.split(","))) for part in re.findall(r"\((.*?)\)", side)]
