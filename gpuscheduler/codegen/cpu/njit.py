"""Numba's compiler for the loops of this package, with its cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numba.experimental.function_type
from numba.core.entrypoints import init_all

# Numba registers the last types at its first compilation. A thread that looks a type up meanwhile
# fails with "dictionary changed size during iteration": so all are registered here.
init_all()


def njit(**options: Any) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        try:
            return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
        except RuntimeError:  # nowhere to keep a cache
            return numba.njit(nogil=True, error_model="numpy", **options)(function)

    return wrap
