"""Private names of CuPy, in one place, and what is lost without each.

They were seen in CuPy 13.4 to 14.2. `tests/test_private_names.py` looks each up. CuPy is not
imported before a function here is called. What sparse matrices keep is in `sparse_parts`.
"""

from __future__ import annotations

from typing import Any

#: Each private name, and what no longer works without it.
LOST = {
    "cupy._core.get_compute_type": "products in another precision, where the user asks for one",
}


def compute_type(dtype: Any) -> int | None:
    """Return CuPy's number for the precision of products; None where it has none."""
    import cupy

    asked = getattr(getattr(cupy, "_core", None), "get_compute_type", None)
    return None if asked is None else int(asked(dtype))
