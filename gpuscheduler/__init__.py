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
from collections.abc import Mapping
from pathlib import Path

import dask.base
import dask.config
import yaml

from . import pickled
from .attach import attach
from .graph import PlanError
from .mesh import axis, geomaxis, mesh
from .options import Options
from .plan import OutOfMemory
from .scalar import NotCompiled
from .scheduler import Scheduler, get
from .simulate import simulate

__all__ = [
    "NotCompiled", "Options", "OutOfMemory", "PlanError", "Scheduler", "attach", "axis", "geomaxis",
    "get", "mesh", "simulate",
]  # fmt: skip
__version__ = "0.1.0"

dask.base.named_schedulers["gpu"] = get
pickled.register()

# A section that is no mapping would be replaced by the defaults: it stays, to be refused when it
# is read.
if isinstance(dask.config.get("gpuscheduler", None) or {}, Mapping):
    _defaults = Path(__file__).with_name("gpuscheduler.yaml").read_text(encoding="utf-8")
    dask.config.update_defaults(yaml.safe_load(_defaults))

# Tracebacks show the user's frames, not the scheduler's: Dask leaves its own out in the same way.
_shorten = dask.config.get("admin.traceback.shorten", [])
_ours = re.escape(os.path.dirname(__file__)) + r"[\\/]\w+\.py"
if _ours not in _shorten:
    dask.config.set({"admin.traceback.shorten": [*_shorten, _ours]})
