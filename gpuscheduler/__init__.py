"""Plain Dask on every GPU of a machine, from one process.

>>> import dask.array as da
>>> import gpuscheduler
>>> x = da.ones((1000, 1000), chunks=250)
>>> float((x + x.T).sum().compute(scheduler="gpu"))
2000000.0
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import dask.base
import dask.config
import yaml

from ._version import __version__
from .algorithms import register
from .devices.cuda import pickling
from .frontend import lines

if TYPE_CHECKING:
    from .algorithms.cyclic import Cyclic
    from .cluster.attach import attach
    from .cluster.simulate import simulate
    from .default import report
    from .diagnostics.progress import progress
    from .errors import DeviceLost, GpuUnused, NotCompiled, OutOfMemory, PlanError, SidesDiffer
    from .iteration import Iteration
    from .mesh import axis, geomaxis, mesh
    from .options import Options
    from .scheduler import Scheduler

__all__ = [
    "Cyclic", "DeviceLost", "GpuUnused", "Iteration", "NotCompiled", "Options", "OutOfMemory",
    "PlanError", "Scheduler", "SidesDiffer", "__version__", "attach", "axis", "geomaxis", "get",
    "mesh", "progress", "report", "simulate",
]  # fmt: skip

#: The module of each public name. They are imported at first use: Dask's arrays take most of a
#: second, and the command line's help needs none.
_MODULES = {
    "Cyclic": "algorithms.cyclic",
    "DeviceLost": "errors",
    "GpuUnused": "errors",
    "Iteration": "iteration",
    "NotCompiled": "errors",
    "Options": "options",
    "OutOfMemory": "errors",
    "PlanError": "errors",
    "Scheduler": "scheduler",
    "SidesDiffer": "errors",
    "attach": "cluster.attach",
    "axis": "mesh",
    "geomaxis": "mesh",
    "mesh": "mesh",
    "report": "default",
    "progress": "diagnostics.progress",
    "simulate": "cluster.simulate",
}
#: Public modules, imported at first use, too.
_SUBMODULES = {"array", "linalg", "random", "sparse"}


def get(dsk: Any, keys: Any, **kwargs: Any) -> Any:
    """Dask's `get` on the innermost entered `Scheduler`, or on one over every device.

    >>> get({"a": 1, "b": (sum, ["a", "a"])}, ["b", ["a"]])
    (2, (1,))
    """
    from .default import current_scheduler

    return current_scheduler().get(dsk, keys, **kwargs)


def _persist(collections: Any, **kwargs: Any) -> list[Any]:
    """The same for Dask's `persist`."""
    from .default import current_scheduler

    return current_scheduler().persist(collections, **kwargs)


get.persist = _persist  # type: ignore[attr-defined]  # where Dask looks for it


def __getattr__(name: str) -> Any:
    """Import what a public name stands for."""
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name == "arange":  # by which Dask's `permutation` begins: ours draws the order on the host
        return import_module("numpy").arange
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


class _Package(ModuleType):
    """`gpuscheduler.mesh` is the function, whoever imports the module of that name, and when."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

dask.base.named_schedulers["gpu"] = get
pickling.register()

# A section that is no mapping would be replaced by the defaults: it stays, to be refused when it
# is read.
if isinstance(dask.config.get("gpuscheduler", None) or {}, Mapping):
    _defaults = Path(__file__).with_name("gpuscheduler.yaml").read_text(encoding="utf-8")
    dask.config.update_defaults(yaml.safe_load(_defaults))
    lines.register()
register.register_with_dask()

# Tracebacks show the user's frames, not the scheduler's: Dask leaves its own out in the same way.
_shorten = dask.config.get("admin.traceback.shorten", [])
_ours = re.escape(os.path.dirname(__file__)) + r"[\\/](?:\w+[\\/])*\w+\.py"
if _ours not in _shorten:
    dask.config.set({"admin.traceback.shorten": [*_shorten, _ours]})
