"""Pickle CuPy's kernels by their source instead of their loaded module.

By what they are made of, without what a device has of them.

CuPy 14 pickles a ufunc or a kernel that has run together with its loaded modules, as numbers. A
copy unloads these when it goes, and the kernel that was pickled is gone with it: each later launch
fails (`CUDA_ERROR_INVALID_HANDLE`). Dask makes such copies to name what `map_blocks(cupy.negative)`
gives, and would call it by another name once the function has run.
"""

from __future__ import annotations

import copyreg
import sys
from importlib import import_module
from typing import Any

from dask.base import normalize_token

#: Where CuPy has its ufuncs, and how their names begin.
UFUNCS = {"cupy": "cupy_", "cupyx.scipy.special": "cupyx_scipy_special_"}


def register() -> None:
    """Register the reducers when CuPy is imported: now, or when Dask first meets it."""
    if sys.modules.get("cupy") is not None:
        teach()
    else:
        normalize_token.register_lazy("cupy")(teach)


def teach() -> None:
    """Tell Python how these are pickled. Needs CuPy, and no GPU."""
    import cupy
    from cupy.cuda import function

    for kind, reduced in (
        (cupy.ufunc, _ufunc),
        (cupy.ElementwiseKernel, reduce_kernel),
        (cupy.ReductionKernel, reduce_kernel),
        (function.Module, _load_module),
        (getattr(function, "Function", object), _load_module),
    ):
        if kind.__module__.startswith("cupy"):  # and no stand-in's
            copyreg.pickle(kind, reduced)
    normalize_token.register(cupy.RawKernel, _raw_token)
    normalize_token.register(type(cupy.fuse(_raw_token)), _fusion_token)


def _ufunc(function: Any) -> Any:
    for module, prefix in UFUNCS.items():
        name = function.name.removeprefix(prefix)
        if getattr(sys.modules.get(module), name, None) is function:
            return find_name, (module, name)
    return reduce_kernel(function)


def find_name(module: str, name: str) -> Any:
    """What a module has by a name.

    >>> find_name("math", "sqrt")
    <built-in function sqrt>
    """
    return getattr(import_module(module), name)


def reduce_kernel(kernel: Any) -> Any:
    """Reduce a kernel as CuPy does, without its caches by types and devices.

    Dictionaries of keywords, whose keys are strings, are kept.
    """
    make, arguments, state, *rest = kernel.__reduce_ex__(4)
    kept = [
        {} if isinstance(v, dict) and not all(isinstance(k, str) for k in v) else v for v in state
    ]
    return make, arguments, tuple(kept), *rest


def _load_module(code: Any) -> Any:
    raise TypeError(f"cannot pickle {type(code).__name__!r} object: it is loaded on a device")


def _raw_token(kernel: Any) -> Any:
    k = kernel
    return "RawKernel", k.name, k.code, k.options, k.backend, k.file_path


def _fusion_token(kernel: Any) -> Any:
    return "cupy.fuse", normalize_token(kernel.func), kernel.name
