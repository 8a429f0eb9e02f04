"""Private names of `dask.array.core` that are reached while Dask's arrays are being imported.

They were seen in Dask 2026.1.1 to 2026.8.0. All others are in `dask_private`, which imports the
whole of `dask.array`. `tests/test_private_names.py` looks each up.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

#: Each private name, and what no longer works without it.
LOST = {
    "dask.array.core._HANDLED_FUNCTIONS": "functions of `gpuscheduler.array` by NumPy's names",
}


def handled_functions() -> MutableMapping[Any, Any]:
    """Return what `da.Array` does for NumPy's functions, by function."""
    from dask.array import core

    return core._HANDLED_FUNCTIONS
