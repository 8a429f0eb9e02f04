"""Call CuPy's functions for NumPy's and SciPy's, so that they give what these give.

`tracing.functions.library` says which calls come here. Sorts and quantiles put NaN and signed zeros
where NumPy does. Transforms and filters of infinities or NaN are NumPy's and SciPy's own: libraries
differ in which elements these spread to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import cupy
from cupy.cuda import runtime

from ...algorithms.local_sort import argsort_lines, sort_lines
from ...fusion.library_task import LibraryTask
from ...tracing.abstract import ConstantArray, LibraryCall, ViewedInput
from .arrays import is_refusal
from .numpy_fallback import send_value

Arrays = Sequence[Any]

_logger = logging.getLogger("gpuscheduler.run")
#: Calls that CuPy has refused: later ones go to the host at once.
_refused: set[LibraryCall] = set()
#: So many of them are remembered.
MOST_REFUSED = 1000


def call(task: LibraryTask, values: dict[Any, Any], bring: Callable[[Any], Any]) -> Any:
    """Call a library's function on the current device and stream; the host's where it refuses."""
    made = None
    if task.call not in _refused:
        there = {name: send_value(values[name]) for name in task.inputs.names}
        arrays = task.arrays(there, cupy.ndarray)
        if arrays is not None and all(type(a) is cupy.ndarray for a in arrays):
            made = _call_on_gpu(task.call, arrays)
    return task.call_on_host(values, bring) if made is None else made


def _call_on_gpu(of: LibraryCall, arrays: Arrays) -> Any:
    """The value of a call; None where the host has to make it."""
    try:
        views = [_viewed(a, seen) for a, seen in zip(arrays, of.arguments, strict=True)]
        value = _compute(of, views)
    except Exception as error:
        if is_refusal(error) or isinstance(error, runtime.CUDARuntimeError):
            raise
        _remember_refusal(of, f"refused: {error!r}")
        return None
    if value is None:
        return None
    if value.shape != of.shape or value.dtype != of.dtype:
        found = f"{value.dtype} {value.shape} and not {of.dtype} {of.shape}"
        _remember_refusal(of, f"gives {found}")
        return None
    return cupy.ascontiguousarray(value)


def _remember_refusal(of: LibraryCall, what: str) -> None:
    if len(_refused) >= MOST_REFUSED:
        _refused.clear()
    _refused.add(of)
    _logger.warning("%s runs on the host: CuPy's %s", of.name, what)


def _viewed(array: Any, seen: ViewedInput) -> Any:
    """The view of an array that an argument is."""
    size = array.itemsize
    strides = tuple([s * size for s in seen.view.strides])
    at = array.data + seen.view.offset * size
    return cupy.ndarray(seen.shape, array.dtype, at, strides)


def _compute(of: LibraryCall, arrays: Arrays) -> Any:
    library, _, name = of.name.rpartition(".")
    options = {k: v.array() if type(v) is ConstantArray else v for k, v in of.options}
    if library == "numpy":
        return NUMPYS[name](of, arrays[0], **options)
    finite = [cupy.isfinite(a).all() for a in arrays]  # all are launched before the host waits
    if not all(map(bool, finite)):
        return None
    if library == "scipy.ndimage":
        filters = import_module("cupyx.scipy.ndimage")
        if len(arrays) > 1:
            options["weights"] = arrays[1]
        elif "weights" in options:
            options["weights"] = cupy.asarray(options["weights"])
        return getattr(filters, name)(arrays[0], **options)
    return getattr(cupy.fft, name)(arrays[0], **options)  # SciPy's are the same


def _sort(of: LibraryCall, x: Any, axis: int | None) -> Any:
    x = x.reshape(-1) if axis is None else x
    return sort_lines(x, axis or 0)


def _argsort(of: LibraryCall, x: Any, axis: int | None) -> Any:
    x = x.reshape(-1) if axis is None else x
    return argsort_lines(x, axis or 0)


def _quantiles(of: LibraryCall, x: Any, axes: tuple[int, ...], ranks: Any) -> Any:
    """Quantiles along some axes, by NumPy's formula; NaN where a line has one."""
    left = [k for k in range(x.ndim) if k not in axes]
    lines = x.transpose(*left, *axes).reshape(*[x.shape[k] for k in left], -1)
    lines = sort_lines(lines, lines.ndim - 1)
    nan = cupy.isnan(lines[..., -1])
    out = cupy.empty((len(ranks), *nan.shape), of.dtype)
    for n, (low, high, weight) in enumerate(ranks):
        a, b = lines[..., low], lines[..., high]
        if weight is None:
            value = a if low == high else (a + b) / a.dtype.type(2)
        else:
            step = (b - a).astype(of.dtype)
            if weight >= 0.5:
                value = b - step * of.dtype.type(1 - weight)
            else:
                value = a + step * of.dtype.type(weight)
        out[n] = cupy.where(nan, lines[..., -1], value)
    return out.reshape(of.shape)


NUMPYS: dict[str, Callable[..., Any]] = {
    "sort": _sort, "partition": _sort, "argsort": _argsort, "argpartition": _argsort,
    "median": _quantiles, "quantile": _quantiles, "percentile": _quantiles,
}  # fmt: skip
