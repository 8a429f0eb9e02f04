"""Register our functions with Dask, so that `np.sort(x)` of a dask array is lazy.

A dask array looks for a function of `dask.array` of the same name first, then for one that was
registered by `dask.array.core.implements`. So only names that Dask lacks reach ours, and nothing is
patched. Where Dask gains a function, Dask's is used.

Reaches into Dask (2026.1 to 2026.8): `dask.array.core.implements`, which has no page in Dask's
reference, and the dict that it fills, `_HANDLED_FUNCTIONS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType
from typing import Any

from dask import config

#: By function, as an attribute of `numpy`, the file of this room that has one of its last name.
FUNCTIONS: dict[str, str] = {
    "argpartition": "selection",
    "argsort": "sorting",
    "cross": "products",
    "inner": "products",
    "intersect1d": "distinct",
    "kron": "products",
    "lexsort": "sorting",
    "linalg.cond": "tall",
    "linalg.cross": "contractions",
    "linalg.det": "square",
    "linalg.diagonal": "contractions",
    "linalg.eig": "eigen",
    "linalg.eigh": "eigen",
    "linalg.eigvals": "eigen",
    "linalg.eigvalsh": "eigen",
    "linalg.matmul": "contractions",
    "linalg.matrix_norm": "tall",
    "linalg.matrix_power": "contractions",
    "linalg.matrix_rank": "tall",
    "linalg.matrix_transpose": "products",
    "linalg.multi_dot": "contractions",
    "linalg.outer": "contractions",
    "linalg.pinv": "tall",
    "linalg.slogdet": "square",
    "linalg.svdvals": "tall",
    "linalg.tensordot": "contractions",
    "linalg.tensorinv": "contractions",
    "linalg.tensorsolve": "contractions",
    "linalg.trace": "contractions",
    "linalg.vecdot": "contractions",
    "linalg.vector_norm": "tall",
    "matrix_transpose": "products",
    "partition": "selection",
    "setdiff1d": "distinct",
    "setxor1d": "distinct",
    "sort": "sorting",
    "sort_complex": "sorting",
    "take_along_axis": "products",
    "unique_all": "distinct",
    "unique_counts": "distinct",
    "unique_inverse": "distinct",
    "unique_values": "distinct",
}
#: The module of Dask after whose import the functions are registered.
_DASK = "dask.array.core"

#: NumPy's functions that are registered now, each with the function that was.
_registered: dict[Any, Callable[..., Any]] = {}


def register() -> None:
    """Register all `FUNCTIONS` that no other package has registered.

    `gpuscheduler.register-functions: false` in Dask's configuration switches it off. Functions that
    the installed NumPy lacks are left out.
    """
    if not config.get("gpuscheduler.register-functions", True):
        return
    import numpy as np
    from dask.array import core

    from ..dask_core_private import handled_functions

    for name, file in FUNCTIONS.items():
        try:
            function = attrgetter(name)(np)
        except AttributeError:
            continue
        if function not in handled_functions():
            _registered[function] = core.implements(function)(_import_when_called(function, file))


def unregister() -> None:
    """Take back what `register` has registered."""
    from ..dask_core_private import handled_functions

    for function, ours in _registered.items():
        if handled_functions().get(function) is ours:
            del handled_functions()[function]
    _registered.clear()


def register_with_dask() -> None:
    """Register now if Dask's arrays are imported, else right after their import.

    To import them takes most of a second, which a program without arrays need not spend.
    """
    dask = sys.modules.get(_DASK)
    if dask is None:
        sys.meta_path.insert(0, _Finder())
    elif hasattr(dask, "implements"):
        register()


def _import_when_called(function: Any, file: str) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        module = import_module(f".{file}", __package__)
        return getattr(module, function.__name__)(*args, **kwargs)

    return call


class _Finder:
    """Finds one module as the other finders do, with a loader that registers after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DASK:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads a module by its own loader, restores this one, and registers our functions."""

    def __init__(self, loader: Any):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        register()
