"""Private names of Dask, in one place: what each is for, and what is lost without it.

They were seen in Dask 2026.1.1 to 2026.8.0. `tests/test_private_names.py` looks each up, on the
oldest and the newest version that is declared. The classes of Dask's tasks (`Task`, `TaskRef`,
`DataNode`, `Alias`, `List`, …) have no public place either: they are imported from
`dask._task_spec` wherever they are needed. `dask_core_private` has what is reached while Dask's
arrays are being imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import dask.array.linalg
import dask.array.random
import dask.array.reductions
import dask.array.routines
import dask.array.wrap
from dask._expr import Expr, FinalizeCompute, HLGExpr, HLGFinalizeCompute, ProhibitReuse
from dask._expr import _HLGExprSequence as HLGExprSequence
from dask._task_spec import _execute_subgraph as execute_subgraph
from dask.array._shuffle import _getitem as take_block
from dask.array._shuffle import concatenate_arrays
from dask.array.core import _concatenate2 as concatenate_nested
from dask.array.core import _pass_extra_kwargs as pass_extra_kwargs
from dask.array.optimization import _optimize_slices as optimize_slices
from dask.array.overlap import _trim as trim_overlap
from dask.array.random import _apply_random as apply_random
from dask.array.random import _apply_random_func as apply_random_func
from dask.array.random import _choice_rng as choice_rng
from dask.array.random import _choice_rs as choice_rs
from dask.array.routines import _chunk_sum as sum_products
from dask.array.routines import _gradient_kernel as gradient_kernel
from dask.highlevelgraph import HighLevelGraph
from dask.utils import random_state_data

#: Each private name, and what no longer works without it.
LOST = {
    "dask._expr.Expr": "looks at parts of expressions write no tasks down",
    "dask._expr.FinalizeCompute": "results of Dask's expressions on clusters",
    "dask._expr.HLGExpr": "the plan cache: `compute()` hands these to a scheduler",
    "dask._expr._HLGExprSequence": "the plan cache, for several collections at once",
    "dask._expr.HLGFinalizeCompute": "pins stay away from the tasks that `compute()` adds",
    "dask._expr.ProhibitReuse._identity": "layers are fused behind a second `compute()`",
    "dask._expr.HLGExpr._optimized_dsk": "collections with an optimizer of their own",
    "dask._task_spec._execute_subgraph": "fused tasks of Dask are neither compiled nor traced",
    "dask.array._shuffle._getitem": "index lists become slices",
    "dask.array._shuffle.concatenate_arrays": "index lists become slices",
    "dask.array.core._concatenate2": "kernels that join nested blocks",
    "dask.array.core._pass_extra_kwargs": "one trace for all blocks of `map_blocks(block_id=)`",
    "dask.array.linalg._wrapped_qr": "QR of tall blocks by Cholesky factors",
    "dask.array.optimization._optimize_slices": "files are read only where slices need them",
    "dask.array.overlap._trim": "one trace for all blocks of `map_overlap`",
    "dask.array.random._apply_random": "plans of `RandomState` that are used again",
    "dask.array.random._apply_random_func": "plans of `Generator` that are used again",
    "dask.array.random._choice_rng": "plans of `Generator.choice` that are used again",
    "dask.array.random._choice_rs": "plans of `RandomState.choice` that are used again",
    "dask.array.random.RandomState()._numpy_state": "`da.random.RandomState` of CuPy arrays",
    "dask.array.random.RandomState()._RandomState": "`da.random.RandomState` of CuPy arrays",
    "dask.array.random.default_rng()._bit_generator": "`gpuscheduler.random`",
    "dask.array.random._wrap_func": "`gpuscheduler.random`, and `da.random` of CuPy arrays",
    "dask.array.routines._block_histogramdd_multiarg": "kernels of `histogramdd`",
    "dask.array.routines._block_histogramdd_rect": "kernels of `histogramdd`",
    "dask.array.routines._chunk_sum": "factors of products of NumPy's matrices on GPUs",
    "dask.array.routines._gradient_kernel": "one trace for all blocks of `gradient`",
    "dask.array.wrap._broadcast_trick_inner": "kernels that make `ones`, `zeros` and `full`",
    "dask.array.backends.array_creation_dispatch._lookup": "holes of the CuPy backend are filled",
    "dask.diagnostics.progress.ProgressBar._pretask": "progress bars that do not slow a run",
    "dask.highlevelgraph.HighLevelGraph._toposort_layers": "pins of layers that Dask fuses",
}
#: Names of which a version of Dask has one: what `da.nanquantile` calls was renamed in 2026.6.
EITHER = {
    "kernels of `nanquantile`": (
        "dask.array.reductions._custom_nanquantile", "dask.array.reductions._custom_quantile",
    ),
}  # fmt: skip

block_histogramdd_multiarg = dask.array.routines._block_histogramdd_multiarg
block_histogramdd_rect = dask.array.routines._block_histogramdd_rect
#: What Dask makes `ones` and the like of: one element, seen as many.
broadcast_one = dask.array.wrap._broadcast_trick_inner.func
wrapped_qr: Any = dask.array.linalg._wrapped_qr
#: What the tasks do by which Dask keeps the names of two computations apart.
prohibit_reuse = ProhibitReuse._identity
#: Under what name the graph of an expression is kept in it.
_GRAPH = "_gpuscheduler_graph"
#: What a copied `Blockwise` layer has to forget.
CACHED_BY_BLOCKWISE = ("_dims", "_cached_dict")

__all__ = [
    "Expr", "FinalizeCompute", "HLGExpr", "HLGExprSequence", "HLGFinalizeCompute",
    "apply_random", "apply_random_func", "choice_rng", "choice_rs", "concatenate_arrays",
    "concatenate_nested", "execute_subgraph", "gradient_kernel", "optimize_slices",
    "pass_extra_kwargs", "sum_products", "take_block", "trim_overlap",
]  # fmt: skip


def nanquantile_functions() -> Iterator[Any]:
    """Yield the functions that `da.nanquantile` may call on a block."""
    for name in ("_custom_nanquantile", "_custom_quantile"):
        if hasattr(dask.array.reductions, name):
            yield getattr(dask.array.reductions, name)


def layers_of(value: Any) -> HighLevelGraph | None:
    """Return the graph of layers that a value is, or holds as an expression; None for others.

    The class is asked: expressions of dataframes look for a column of any name, and may fail.

    >>> import dask.array as da
    >>> len(layers_of(da.ones(3).dask).layers), layers_of(3)
    (1, None)
    """
    if isinstance(value, HLGFinalizeCompute):  # it would build one at each look, of all blocks
        known = vars(value)
        if _GRAPH not in known:
            known[_GRAPH] = value.hlg
        value = known[_GRAPH]
    elif isinstance(getattr(type(value), "hlg", None), property):
        value = value.hlg
    return value if isinstance(value, HighLevelGraph) else None


def optimized_graph(expr: HLGExpr) -> Any:
    """Return the graph of an expression behind its collection's own optimizer."""
    return expr._optimized_dsk


def sort_layers(graph: HighLevelGraph) -> list[str]:
    """Return the names of a graph's layers, each behind those that it reads."""
    return list(graph._toposort_layers())


def creation_backends() -> MutableMapping[str, Any]:
    """Return Dask's backends of array creation that were looked up, by name."""
    from dask.array.backends import array_creation_dispatch

    return array_creation_dispatch._lookup


def wrap_random_methods(around: Callable[[Any], Any]) -> None:
    """Put a function around the one by which Dask's generators make arrays, once."""
    original = dask.array.random._wrap_func
    if not hasattr(original, "__wrapped__"):
        dask.array.random._wrap_func = around(original)


def random_source(rng: Any) -> Any:
    """Return the bit generator, or the class like `RandomState`, that a generator draws from."""
    if isinstance(rng, dask.array.random.RandomState):
        return rng._RandomState
    return getattr(rng, "_bit_generator", None)


def random_states(rng: Any, count: int) -> list[Any]:
    """Return the states of the next blocks of a `RandomState` of Dask."""
    return random_state_data(count, rng._numpy_state)


def is_progress_bars(pretask: Any) -> bool:
    """Return whether a callback's function is that of Dask's `ProgressBar`."""
    module = sys.modules.get("dask.diagnostics.progress")
    return module is not None and pretask is module.ProgressBar._pretask
