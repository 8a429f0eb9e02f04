"""Run several ways in turns and take the medians of their times; works without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Function = Callable[[], Any]


def seconds(function: Function, wait: Callable[[], Any]) -> float:
    """Seconds of one call, the devices' work included; `wait` waits for it."""
    wait()
    start = time.perf_counter()
    result = function()
    wait()
    took = time.perf_counter() - start
    del result
    return took


def in_turns(
    functions: dict[str, Function],
    wait: Callable[[], Any],
    runs: int,
    needed: Sequence[str] = ("ours",),
) -> dict[str, float]:
    """The median seconds of each, run in turns after one run more.

    A peer that is not `needed` and fails in that first run is left out: it may lack the memory.
    """
    times: dict[str, list[float]] = {}
    for name, function in functions.items():
        try:
            seconds(function, wait)
        except Exception as error:
            if name in needed:
                raise
            print(f"without {name}: {str(error)[:200]}")
        else:
            times[name] = []
    for _ in range(runs):
        for name, taken in times.items():
            taken.append(seconds(functions[name], wait))
    return {name: median(taken) for name, taken in times.items()}
