"""Factor the tall matrices of Dask's own `qr` and `svd` by one sum of Gram matrices on GPUs.

Dask factors each block of rows, then the factors R of all blocks on top of each other. So each
block waits for a small Cholesky factorization, or for two. Here the layers that give Q and R are
replaced by those of `gpuscheduler.linalg.qr`, which factors a sum over all blocks. Names, chunks
and what reads them stay as they are.

Reaches into Dask (2026.1 to 2026.8): names of the layers of `dask.array.linalg.tsqr`. Layers of
other names stay as they are, and `block_qr` replaces the functions in them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import numpy as np
from dask._task_spec import Alias
from dask.array.core import Array
from dask.blockwise import Blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from ..algorithms.tall_graph import factorize_blocks
from ..algorithms.tall_kernel import is_tall
from ..dask_private import wrapped_qr
from ..frontend.graph import CUPY, NUMPY
from ..frontend.lines import share_line
from ..frontend.lowering import Rewrite, keep_layers
from ..options import Options


class _Factorization(NamedTuple):
    """The layers of one `tsqr`: of the matrix, and those that give Q and R, or U, S and Vᴴ."""

    matrix: str
    q: str
    r: str
    #: Empty for a QR.
    svd: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TallRewriter:
    """Replaces the layers that give Q and R of tall matrices, of these libraries' blocks.

    With `only_svd`, only those with an SVD behind them: signs of Q differ from NumPy's, and signs
    of the SVD do not depend on these.

    >>> import dask.array as da
    >>> q, r = da.linalg.qr(da.ones((4000, 40), chunks=(1000, 40)))
    >>> TallRewriter((CUPY,))(q.dask) is q.dask, TallRewriter((NUMPY,))(q.dask) is q.dask
    (True, False)
    """

    libraries: tuple[str, ...]
    only_svd: bool = False

    def __call__(self, hlg: HighLevelGraph) -> HighLevelGraph:
        """Return the graph with other layers of the same names; itself where it has none."""
        out = hlg
        for found in _factorizations(hlg):
            if self.only_svd and not found.svd:
                continue
            matrix = _as_matrix(hlg, found.matrix, self.libraries)
            if matrix is not None:
                out = _replace_layers(out, found, matrix)
        return out


def choose_rewriting(kind: str, options: Options, resident: bool = False) -> Rewrite:
    """Return the function that replaces layers, for devices of this kind and these options.

    In a `resident` graph GPUs compute NumPy's arrays.
    """
    if kind != "cuda" or options.tall_qr != "auto":
        return keep_layers
    if resident:
        return TallRewriter((NUMPY,), only_svd=options.numpy == "auto")
    return TallRewriter((CUPY,))


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
        svd = tuple([f"getitem{token}-{part}" for part in ("u4", "s2", "v2")])
        # with unknown lengths, Dask asks each block; layers of `x[mask]` do not say so
        if not layers.get(f"q-blocksizes{token}"):
            matrix = str(layer.indices[0][0])
            yield _Factorization(matrix, q, r, svd if layers.keys() >= set(svd) else ())


def _as_matrix(hlg: HighLevelGraph, name: str, libraries: Collection[str]) -> Array | None:
    """Return the matrix that a layer is; None where it is not tall, or of another library."""
    facts = hlg.layers[name].collection_annotations if name in hlg.layers else None
    if not facts or facts.get("chunk_type") not in libraries:
        return None
    chunks, shape, dtype = (facts.get(k) for k in ("chunks", "shape", "dtype"))
    if chunks is None or shape is None or np.isnan(np.sum(shape)) or not is_tall(shape):
        return None
    if dtype is None or np.dtype(dtype).char not in "fdFD" or not np.dtype(dtype).isnative:
        return None
    library = import_module(str(facts["chunk_type"]).partition(".")[0])
    return Array(hlg, name, chunks, meta=library.empty((0, 0), dtype))


def _replace_layers(hlg: HighLevelGraph, found: _Factorization, matrix: Array) -> HighLevelGraph:
    """Have other layers give the blocks of Q and R, and those of the SVD of NumPy's blocks.

    CuPy's SVD of R, and products with it, are on GPUs as Dask has them.
    """
    factors = factorize_blocks(matrix)
    made = {found.q: factors.q(), found.r: factors.r()}
    if found.svd and isinstance(matrix._meta, np.ndarray):
        made |= zip(found.svd, factors.svd(), strict=True)
    layers, dependencies = dict(hlg.layers), dict(hlg.dependencies)
    for graph in [array.dask for array in made.values()]:
        new = [name for name in graph.layers if name not in layers]
        layers |= {name: graph.layers[name] for name in new}
        dependencies |= {name: graph.dependencies[name] for name in new}
        share_line(found.q, new)
    for name, array in made.items():
        keys = list(flatten(array.__dask_keys__()))
        layer = MaterializedLayer({(name, *k[1:]): Alias((name, *k[1:]), k) for k in keys})
        layer.collection_annotations = array.dask.layers[array.name].collection_annotations
        layers[name], dependencies[name] = layer, {array.name}
    return HighLevelGraph(layers, dependencies)
