"""Count the bytes that GPUs touch in computations of NumPy's arrays; works without a GPU."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from gpuscheduler.pipeline.choice import GPU, ArraySizes, Choice
from gpuscheduler.pipeline.numpy_arrays import NumpyArrays


@dataclass(eq=False)
class Coverage:
    """Bytes that the runs of this process touch, since it began or since `clear`.

    What the host runs without a plan for GPUs counts with the bytes of its collections.

    >>> with Coverage() as coverage:
    ...     pass
    >>> print(coverage)
    GPUs touch 0.0% of 0 bytes; 0 of 0 runs use them
    """

    on_gpus: int = 0
    touched: int = 0
    runs: int = 0
    gpu_runs: int = 0
    #: Why the latest run was where it was.
    reason: str = ""
    #: Runs to add: the choice, and the graph where there was no plan.
    _new: deque[tuple[Choice, Any]] = field(default_factory=deque, repr=False)
    _patches: list[Any] = field(default_factory=list, repr=False)

    @property
    def share(self) -> float:
        """The part of all bytes that GPUs touch."""
        return self.on_gpus / max(1, self.touched)

    def clear(self) -> None:
        """Begin anew."""
        self._new.clear()
        self.on_gpus = self.touched = self.runs = self.gpu_runs = 0
        self.reason = ""

    def numbers(self) -> dict[str, int]:
        """What it has counted, as a new one can be made of it."""
        names = "on_gpus", "touched", "runs", "gpu_runs"
        return {name: getattr(self, name) for name in names}

    def add_runs(self) -> None:
        """Add the runs since the last time; it is no part of them, so it costs them nothing."""
        while self._new:
            choice, graph = self._new.popleft()
            used = choice.side == GPU
            self.runs += 1
            self.gpu_runs += used
            self.on_gpus += choice.on_gpus * used
            known = choice.on_gpus + choice.on_host
            self.touched += known or (0 if graph is None else ArraySizes.from_graph(graph).nbytes)
            self.reason = choice.reason

    def __str__(self) -> str:
        return (
            f"GPUs touch {self.share:.1%} of {self.touched:,} bytes; "
            f"{self.gpu_runs:,} of {self.runs:,} runs use them"
        )

    def __enter__(self) -> Coverage:
        """Note the runs of all schedulers from now on."""
        mine = threading.local()
        look, compute, note = (
            NumpyArrays.why_on_host, NumpyArrays.compute, NumpyArrays.note_host,
        )  # fmt: skip

        def why_on_host(work: Any, named: Any, dsk: Any, request: Any) -> Any:
            choice = look(work, named, dsk, request)
            mine.graph = None if choice is None else dsk
            return choice

        def computed(work: Any, request: Any, last: Any) -> Any:
            values, took, choice = compute(work, request, last)
            if values is not None:
                self._new.append((choice, None))
            return values, took, choice

        def noted(work: Any, choice: Any, last: Any) -> Any:
            self._new.append((choice, mine.graph))
            mine.graph = None
            return note(work, choice, last)

        new = {"why_on_host": why_on_host, "compute": computed, "note_host": noted}
        for name, function in new.items():
            self._patches.append(patch.object(NumpyArrays, name, function))
            self._patches[-1].start()
        return self

    def __exit__(self, *exc: Any) -> None:
        while self._patches:
            self._patches.pop().stop()
