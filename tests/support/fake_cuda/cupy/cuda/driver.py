"""What the driver says where something is wrong, and functions of it for code that is compiled."""

import ctypes

from .. import _device as d
from . import runtime

WRONG = 999


class CUDADriverError(RuntimeError):
    pass


def _of_c(function, words):
    """The address of a function for C, which says whether anything is wrong."""

    def called(*args):
        try:
            function(*args)
        except Exception:
            return WRONG
        return 0

    made = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * words)(called)
    _kept.append(made)
    return ctypes.cast(made, ctypes.c_void_p).value


_kept = []


def addresses():
    """Of copies to a device, and of recording events and waiting for them."""
    return (
        _of_c(lambda to, source, n, stream: runtime.memcpyAsync(to, source, n, 1, stream), 4),
        _of_c(lambda event, stream: d.events[event].record(runtime._stream(stream)), 2),
        _of_c(lambda event: d.events[event].synchronize(), 1),
    )
