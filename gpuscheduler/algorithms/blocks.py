"""Keys, chunks and array modules of the blocks of an array."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def array_module(block: Any) -> ModuleType:
    """The library of a block's type: NumPy, or the package that defines the type.

    >>> import numpy as np
    >>> array_module(np.ones(3)).__name__
    'numpy'
    """
    name = type(block).__module__.partition(".")[0]
    return sys.modules[name if name == "cupy" else "numpy"]
