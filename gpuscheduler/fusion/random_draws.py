"""Random numbers that a task draws, by their position in an array."""

from __future__ import annotations

from typing import Any

from dask._task_spec import GraphNode


def generator_kind(generator: Any) -> str | None:
    """The type of the arrays that a bit generator's or a RandomState's class makes."""
    library = getattr(generator, "xp", None) or str(getattr(generator, "__module__", ""))
    return {"cupy": "cupy.ndarray", "numpy": "numpy.ndarray"}.get(library.partition(".")[0])


def plain_arguments(value: Any) -> Any:
    """Arguments of a random task without Dask's containers."""
    if isinstance(value, GraphNode):
        return value({})
    return value
