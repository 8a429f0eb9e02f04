"""Plain Dask on every GPU of a machine, from one process.

>>> import dask.array as da
>>> import gpuscheduler
>>> x = da.ones((1000, 1000), chunks=250)
>>> float((x + x.T).sum().compute(scheduler="gpu"))
2000000.0
"""

from __future__ import annotations

import dask.base

from .graph import PlanError
from .plan import OutOfMemory
from .scheduler import Options, Scheduler, get

__all__ = ["Options", "OutOfMemory", "PlanError", "Scheduler", "get"]
__version__ = "0.1.0"

dask.base.named_schedulers["gpu"] = get
