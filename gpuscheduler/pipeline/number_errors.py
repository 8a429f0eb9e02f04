"""Find out whether NumPy raises, calls or logs on floating-point errors: no kernel does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cpython_private import warning_filters

#: How NumPy's warnings begin, by the names of its errors.
WARNINGS = {
    "divide": "divide by zero encountered",
    "over": "overflow encountered",
    "under": "underflow encountered",
    "invalid": "invalid value encountered",
}


def wants_number_errors() -> bool:
    """Whether NumPy must do more than warn on errors of numbers.

    More is to raise, call, print or log (`numpy.errstate`, `numpy.seterr`), or to warn where a
    filter turns the warning into an error.

    >>> with np.errstate(divide="raise"):
    ...     wants_number_errors()
    True
    """
    actions = np.geterr()
    if not {"ignore", "warn"}.issuperset(actions.values()):
        return True
    filters = warning_filters()
    return any(f[0] == "error" for f in filters) and any(
        action == "warn" and _is_raised(WARNINGS[name], filters) for name, action in actions.items()
    )


def _is_raised(text: str, filters: Sequence[Any]) -> bool:
    """Whether a RuntimeWarning that begins with `text` is an error in at least one module."""
    for action, message, category, module, _ in filters:
        if not issubclass(RuntimeWarning, category) or (message and not message.match(text)):
            continue
        if action == "error" or module is None:
            return bool(action == "error")
    return False
