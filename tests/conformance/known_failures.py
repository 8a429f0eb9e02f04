"""Tests of Dask that fail with Dask's own threaded scheduler too, in this harness, and why.

Measured with dask 2026.8.0, dask-array 0.7.1, NumPy 2.4.6 and zarr 3.1.6. An entry may fail and
may pass: what it does depends on the settings of pytest and the versions of other packages, not on
the scheduler. A name without `[parameters]` stands for all of them. A test which the installed
Dask does not have is simply never met. To measure the list again:

    python tests/conformance/run.py array --scheduler dask.threaded:get --all-failures
"""

from __future__ import annotations

KNOWN_FAILURES: dict[str, str] = {
    # `pytest.raises(SomeWarning)`: these need warnings to be errors, which Dask's repository asks
    # of pytest and its wheel does not. Both pass with `-W error`.
    "dask/array/tests/test_reductions.py::test_nanquantile_all_nan": (
        "expects a RuntimeWarning of NumPy to be an error"
    ),
    "dask/array/tests/test_array_core.py::test_zarr_risky_shards_warns": (
        "expects a PerformanceWarning of Dask to be an error"
    ),
    "dask_array/tests/test_reductions.py::test_nanquantile_all_nan": (
        "expects a RuntimeWarning of NumPy to be an error"
    ),
    "dask_array/tests/test_collection.py::test_is_dask_collection_doesnt_materialize": (
        "marked xfail(strict) until Dask knows dask_array; Dask 2026.8 does, so that it passes"
    ),
}


def reason(name: str) -> str | None:
    """Why `path::test[parameters]` may fail; None for a test that has to pass.

    >>> reason("dask/array/tests/test_wrap.py::test_ones") is None
    True
    """
    return KNOWN_FAILURES.get(name) or KNOWN_FAILURES.get(name.partition("[")[0])
