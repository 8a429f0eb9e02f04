"""Persist collections: rebuild each from the chunks that a scheduler has kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask.base import persist as dask_persist
from dask.utils import shorten_traceback

from .cache import read_collections
from .request import ComputeRequest


def persist_collections(
    collections: Any,
    optimize_graph: bool,
    compute: Callable[[ComputeRequest], Any],
    instead: Any,
    arguments: dict[str, Any],
) -> list[Any]:
    """Compute collections by `compute`, and rebuild each from its chunks.

    `instead` is the scheduler that Dask is to use in place of this one, which has ended.
    """
    if instead:
        arguments |= {"traverse": False, "optimize_graph": optimize_graph}
        return list(dask_persist(*collections, scheduler=instead, **arguments))
    if any(hasattr(c, "__dask_exprs__") for c in collections):  # Dask puts these together again

        def get(dsk: Any, keys: Any, **kwargs: Any) -> Any:
            return compute(ComputeRequest.read(dsk, keys, True, kwargs))

        options = {"traverse": False, "optimize_graph": optimize_graph, "scheduler": get}
        return list(dask_persist(*collections, **options, **arguments))
    expr, every = read_collections(collections, optimize_graph)
    rebuilt = [c.__dask_postpersist__() for c in collections]
    with shorten_traceback():
        wanted = [k for keys in every for k in keys]
        values = iter(compute(ComputeRequest.read(expr, wanted, True, arguments)))
    return [
        rebuild(dict(zip(keys, values)), *state)  # noqa: B905 - as many as there are keys
        for (rebuild, state), keys in zip(rebuilt, every, strict=True)
    ]
