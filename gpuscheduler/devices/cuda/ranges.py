"""NVTX ranges around launches, for Nsight Systems and other tools that are attached.

The package `nvtx` hands out a domain that does nothing where no tool is attached: then no ranges
are made at all. Without the package, ranges of CuPy are used if a tool is named in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

#: The domain in which our ranges are shown.
DOMAIN = "gpuscheduler"
#: The environment variable by which tools attach themselves to NVTX.
INJECTION = "NVTX_INJECTION64_PATH"


class Ranges(Protocol):
    """Where ranges are shown."""

    def push(self, label: str, device: int, step: int) -> None:
        """Begin a range in the calling thread."""

    def pop(self) -> None:
        """End the range that the calling thread has begun last."""


class DomainRanges:
    """Ranges in an NVTX domain: a category for each device, the step as payload."""

    def __init__(self, domain: Any):
        self._domain = domain

    def push(self, label: str, device: int, step: int) -> None:
        # which registers the label, and names the category, at their first use
        attributes = self._domain.get_event_attributes(
            message=label, category=f"device {device}", payload=step
        )
        self._domain.push_range(attributes)

    def pop(self) -> None:
        self._domain.pop_range()


class CupyRanges:
    """Ranges of CuPy's binding: label and colour only."""

    def __init__(self, nvtx: Any):
        self._nvtx = nvtx

    def push(self, label: str, device: int, step: int) -> None:
        self._nvtx.RangePush(label, device)

    def pop(self) -> None:
        self._nvtx.RangePop()


def find_ranges(environment: Mapping[str, str] = os.environ) -> Ranges | None:
    """Where to show ranges; None where no tool is attached."""
    try:
        import nvtx  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        if INJECTION not in environment:
            return None
        try:
            from cupy.cuda import nvtx as cupy_nvtx
        except ImportError:
            return None
        return CupyRanges(cupy_nvtx)
    domain = nvtx.get_domain(DOMAIN)
    return None if type(domain).__name__ == "DummyDomain" else DomainRanges(domain)
