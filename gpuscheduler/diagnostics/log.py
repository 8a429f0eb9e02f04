"""Loggers of the package: who writes what at which level."""

from __future__ import annotations

import logging

#: The parts of the package that log, each as a child of `gpuscheduler`.
PARTS = ("plan", "run", "memory", "kernels", "cluster", "dashboard")

logging.getLogger("gpuscheduler").addHandler(logging.NullHandler())


def logger(part: str) -> logging.Logger:
    """The logger of one part of the package.

    >>> logger("run").name
    'gpuscheduler.run'
    """
    if part not in PARTS:
        raise ValueError(f"{part!r} is no part that logs: {', '.join(PARTS)}")
    return logging.getLogger(f"gpuscheduler.{part}")
