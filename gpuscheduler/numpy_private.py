"""Private names of NumPy, in one place, and what is lost without each.

They were seen in NumPy 2.1 to 2.4. `tests/test_private_names.py` looks each up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Each private name, and what no longer works without it.
LOST = {
    "numpy._NoValue": "traces of functions that NumPy hands its mark for a missing argument",
    "numpy._core.umath.clip": "kernels of `clip`, as a ufunc",
}

#: NumPy's mark for a missing argument.
NO_VALUE: Any = getattr(np, "_NoValue", None)
#: The ufunc behind `numpy.clip`.
CLIP: Any = getattr(getattr(getattr(np, "_core", np), "umath", None), "clip", None)


def refused_bytes(error: MemoryError) -> int:
    """Return the bytes that NumPy could not have; 0 where an error does not say."""
    nbytes = getattr(error, "_total_size", 0)
    return nbytes if isinstance(nbytes, int) else 0
