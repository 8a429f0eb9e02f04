"""Factor the tall matrices of Dask's own `qr` and `svd` by one sum of Gram matrices on GPUs.

Dask factors each block of rows, then the factors R of all blocks on top of each other. So each
block waits for a small Cholesky factorization, or for two. Here the layers that give Q and R are
replaced by those of `gpuscheduler.linalg.qr`, which factors a sum over all blocks. Names, chunks
and what reads them stay as they are.

Reaches into Dask (2026.1 to 2026.8): names of the layers of `dask.array.linalg.tsqr`. Layers of
other names stay as they are, and `block_qr` replaces the functions in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple

import numpy as np
from dask._task_spec import Alias
from dask.array.core import Array
from dask.blockwise import Blockwise
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from ..algorithms.tall_graph import factorize_blocks
from ..algorithms.tall_kernel import is_tall
from ..dask_private import wrapped_qr
from ..frontend.lines import share_line
from ..frontend.lowering import Rewrite, keep_layers
from ..options import Options

#: What layers of CuPy's blocks say that their blocks are.
CUPY = "cupy.ndarray"


class _Factorization(NamedTuple):
    """The layers of one `tsqr`: of the matrix, and those that give Q and R."""

    matrix: str
    q: str
    r: str


def choose_rewriting(kind: str, options: Options) -> Rewrite:
    """Return the function that replaces layers, for devices of this kind and these options."""
    return factor_tall_layers if kind == "cuda" and options.tall_qr == "auto" else keep_layers


def factor_tall_layers(hlg: HighLevelGraph) -> HighLevelGraph:
    """Replace the layers that give Q and R of tall matrices of CuPy's blocks.

    >>> import dask.array as da
    >>> q, r = da.linalg.qr(da.ones((4000, 40), chunks=(1000, 40)))
    >>> factor_tall_layers(q.dask) is q.dask  # blocks of NumPy's
    True
    """
    out = hlg
    for found in _factorizations(hlg):
        matrix = _as_matrix(hlg, found.matrix)
        if matrix is not None:
            out = _replace_layers(out, found, matrix)
    return out


def _factorizations(hlg: HighLevelGraph) -> Iterator[_Factorization]:
    """Find the layers of `tsqr` by their names, and by the function of their blocks."""
    layers = hlg.layers
    for name, layer in layers.items():
        if not (name.startswith("qr-") and type(layer) is Blockwise):
            continue
        if layer.task.func is not wrapped_qr or layer.annotations or len(layer.indices) != 1:
            continue
        token = name.removeprefix("qr")
        q, ends = f"dot{token}-q3", (f"r-inner{token}", f"getitem{token}-r2")
        r = next((end for end in ends if end in layers), None)
        if r is None or q not in layers or layers[q].annotations or layers[r].annotations:
            continue
        # with unknown lengths, Dask asks each block; layers of `x[mask]` do not say so
        if not layers.get(f"q-blocksizes{token}"):
            yield _Factorization(str(layer.indices[0][0]), q, r)


def _as_matrix(hlg: HighLevelGraph, name: str) -> Array | None:
    """Return the matrix that a layer is; None where it is not tall, or its blocks not CuPy's."""
    facts = hlg.layers[name].collection_annotations if name in hlg.layers else None
    if not facts or facts.get("chunk_type") != CUPY:
        return None
    chunks, shape, dtype = (facts.get(k) for k in ("chunks", "shape", "dtype"))
    if chunks is None or shape is None or np.isnan(np.sum(shape)) or not is_tall(shape):
        return None
    if dtype is None or np.dtype(dtype).char not in "fdFD":
        return None
    meta = import_module(CUPY.partition(".")[0]).empty((0, 0), dtype)
    return Array(hlg, name, chunks, meta=meta)


def _replace_layers(hlg: HighLevelGraph, found: _Factorization, matrix: Array) -> HighLevelGraph:
    """Have other layers give the blocks of Q and R."""
    factors = factorize_blocks(matrix)
    q, r = factors.q(), factors.r()
    layers, dependencies = dict(hlg.layers), dict(hlg.dependencies)
    for graph in (q.dask, r.dask):
        new = [name for name in graph.layers if name not in layers]
        layers |= {name: graph.layers[name] for name in new}
        dependencies |= {name: graph.dependencies[name] for name in new}
        share_line(found.q, new)
    for name, array in ((found.q, q), (found.r, r)):
        keys = [(name, i, 0) for i in range(array.numblocks[0])]
        layer = MaterializedLayer({key: Alias(key, (array.name, *key[1:])) for key in keys})
        layer.collection_annotations = array.dask.layers[array.name].collection_annotations
        layers[name], dependencies[name] = layer, {array.name}
    return HighLevelGraph(layers, dependencies)
