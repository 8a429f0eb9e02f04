"""Handles of libraries, one for each thread and device."""

from .. import _device as d
from . import cusolver


def get_cusolver_handle():
    mine = vars(d.here).setdefault("cusolver", {})
    if d.here.device not in mine:
        mine[d.here.device] = cusolver.create()
    return mine[d.here.device]
