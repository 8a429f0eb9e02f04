"""Compute NumPy's arrays on GPUs, where that is chosen, and tell people where it is not.

A computation that names no GPU library comes here first (`Scheduler._compute`). What this refuses,
for a reason in words, is computed by the host's threads.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any

import numpy as np
from dask.callbacks import Callback

from ..errors import GpuUnused, OutOfMemory, SidesDiffer
from ..frontend.graph import Graph, wanted_keys
from ..frontend.task import host_only
from ..gc_control import garbage_spared
from ..options import Options
from ..plan.plan import Footprint, Plan
from ..runtime.observe import RunRecord
from ..runtime.protocol import Hardware, Lease
from ..values import leaves
from .choice import GPU, HOST, ArraySizes, Choice, called_reasons
from .execute import PlanExecutor, PlanRun
from .gpu_libraries import GpuUse
from .number_errors import wants_number_errors
from .plan_entry import PlanEntry
from .planner import Planner
from .request import ComputeRequest

#: With this in the environment each computation on GPUs is done on the host, too, and compared.
COMPARE = "GPUSCHEDULER_COMPARE"
#: Relative and absolute errors (in parts of the largest number) that a comparison lets pass.
TOLERANCE = {"f": 1e-4, "d": 1e-9, "F": 1e-4, "D": 1e-9, "e": 5e-2}
#: Seconds from which a run that used no GPU gives its reason, once in a process.
LONG = 1.0

_reason_given = False  # whether a long run has given its reason


@dataclass(eq=False, repr=False)
class NumpyArrays:
    """Computes NumPy's arrays on the GPUs of one scheduler."""

    options: Options
    hardware: Hardware
    planner: Planner
    executor: PlanExecutor
    #: The record of one run, which ends with the block.
    recorded: Callable[[], AbstractContextManager[RunRecord]]
    forked: bool = False  # whether the GPUs are the parent process's

    def why_on_host(self, use: GpuUse, dsk: Any, request: ComputeRequest | None) -> Choice | None:
        """The choice of the host where that is sure without a plan; None where a plan will tell."""
        reason = self._sure_reason(use, dsk, request)
        return None if reason is None else Choice(HOST, reason)

    def _sure_reason(self, use: GpuUse, dsk: Any, request: ComputeRequest | None) -> str | None:
        if self.options.numpy == "host":
            return "as asked"
        if self.forked:
            return "GPUs do not work in a forked process"
        if not self.options.fuse:
            return "without fuse=True there are no kernels"
        if wants_number_errors():
            return "NumPy is to raise, call or log errors of numbers, which no kernel does"
        if request is not None:
            if request.pool is not None or request.cache is not None:
                return "it has a pool or a cache of its own"
            if request.callbacks or Callback.active:
                return "callbacks see each of its tasks"
        if use.keeps:
            return None
        sizes = ArraySizes.from_graph(dsk)
        if not sizes.arrays:
            return "it has no arrays that Dask knows of"
        return sizes.small_reason() if self.options.numpy == "auto" else None

    def compute(
        self, request: ComputeRequest, last: Footprint | None
    ) -> tuple[list[Any] | None, Footprint | None, Choice]:
        """Values of a request in order, what their run took, and the choice.

        Without values, the host is to compute; `last` is then returned as it is. A run that GPUs
        have no memory for is left to the host, unless it stores something.
        """
        choice = Choice(HOST, "")
        run: PlanRun | None = None
        began = perf_counter_ns()
        try:
            with garbage_spared(), self.hardware.lease(request.num_workers, None) as lease:
                entry = self.plan(request.dsk, request.keys, lease, request.keep)
                choice = entry.choice
                if choice.side == HOST:
                    return None, last, choice
                if not choice.runs:
                    self._warn_of_calls(entry.graph, entry.plan)
                rerun = bool(request.rerun_exceptions_locally)
                with self.recorded() as record:
                    record.planned = "cache" if choice.runs else "new"
                    record.planned_ns = record.recorder.clock()
                    record.began = record.planned_ns - (perf_counter_ns() - began)
                    run = PlanRun(entry, lease, request.keep, rerun=rerun, record=record)
                    values = self.executor.execute(run)
                    record.footprint = run.took
        except OutOfMemory as error:
            stores = run is not None and (run.graph.store_keys or run.graph.written_keys)
            if stores or self.options.numpy == "gpu-only":
                raise
            why = f"GPUs have no memory for it: {error}"
            return None, last, replace(choice, side=HOST, reason=why, learns=False)
        if run.took is None:
            return values, last, choice
        choice.note(GPU, run.took.seconds)
        return values, replace(run.took, coverage=choice.coverage), choice

    def compare(self, request: ComputeRequest, values: list[Any], host: Callable[[], Any]) -> None:
        """Compare values with those of the scheduler that `host` gives, where that is asked for."""
        if os.environ.get(COMPARE, "") in ("", "0") or request.keep:
            return
        if (scheduler := host()) is not None:
            keys = list(wanted_keys(request.keys))
            compare_values(keys, values, list(scheduler._compute(replace(request, keys=keys))))

    def plan_where_chosen(
        self, use: GpuUse, dsk: Any, predict: Callable[[], PlanEntry]
    ) -> tuple[Plan | None, str]:
        """The plan on GPUs, which `predict` gives; None where the host computes. And why."""
        choice = self.why_on_host(use, dsk, None)
        plan: Plan | None = None
        if choice is None:
            try:
                entry = predict()
                plan, choice = entry.plan, entry.choice
            except OutOfMemory as error:
                choice = Choice(HOST, f"GPUs have no memory for it: {error}")
        said = choice.text(self.options.numpy, self.hardware.names)
        return (plan if choice.side == GPU else None), said

    def note_host(self, choice: Choice, last: Footprint | None) -> Footprint | None:
        """Note what a run on the host took, which is returned with a coverage of 0."""
        if last is None:
            return None
        if choice.gpu_seconds or choice.host_seconds:  # there was something to choose
            choice.note(HOST, last.seconds)
            if self.options.numpy == "auto":
                warn_of_long_run(last.seconds, choice.reason, ", ".join(self.hardware.names))
        return replace(last, coverage=0.0)

    def plan(self, dsk: Any, keys: Any, lease: Lease, keep: bool = False) -> PlanEntry:
        """The plan on GPUs, with the choice."""
        return self.planner.find_or_plan(dsk, keys, lease, resident=True, keep=keep)

    def _warn_of_calls(self, graph: Graph, plan: Plan) -> None:
        """Name the functions that are called on the host although GPUs were asked for."""
        called = [s.task for s in plan.steps if host_only(s.task)]
        if called and self.options.numpy == "gpu":
            said = "; ".join(called_reasons(graph, called))
            warnings.warn(f'numpy="gpu": on the host are {said}', GpuUnused, stacklevel=2)


def warn_of_long_run(seconds: float, reason: str, machine: str) -> None:
    """Say once in a process why a long run has used no GPU."""
    global _reason_given
    if seconds < LONG or _reason_given:
        return
    _reason_given = True
    warnings.warn(
        f"a computation of NumPy arrays took {seconds:.1f} s on the host; {machine} did nothing: "
        f'{reason}. Scheduler.explain(x) says more; Scheduler(numpy="gpu") uses GPUs wherever '
        'they can be used, and numpy="host" never, without this warning',
        GpuUnused,
        stacklevel=2,
    )


def compare_values(keys: Any, mine: list[Any], theirs: list[Any]) -> None:
    """Compare values of GPUs with those of the host.

    Raises
    ------
    SidesDiffer
        where a type, dtype or shape differs, or a number by more than rounding explains.

    >>> compare_values(["x"], [np.ones(2)], [np.ones(2)])
    >>> compare_values(["x"], [np.ones(2)], [np.array([1, 2.0])])
    Traceback (most recent call last):
    gpuscheduler.errors.SidesDiffer: 'x' has other numbers on GPUs than on the host: ...
    """
    for key, a, b in zip(_flatten_keys(keys), mine, theirs, strict=True):
        for one, other in zip(leaves(a), leaves(b), strict=True):
            why = _difference(one, other)
            if why:
                raise SidesDiffer(f"{key!r} has other {why}")


def _flatten_keys(keys: Any) -> Iterator[Any]:
    if isinstance(keys, list):
        for k in keys:
            yield from _flatten_keys(k)
    else:
        yield keys


def _difference(a: Any, b: Any) -> str:
    where = "on GPUs than on the host"
    if type(a) is not type(b):
        return f"types {where}: {type(a).__name__} and {type(b).__name__}"
    if not isinstance(a, (np.ndarray, np.generic)):
        return ""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"arrays {where}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
    tolerance = TOLERANCE.get(a.dtype.char, 0.0)
    numbers = a.dtype.kind in "fc"
    if numbers:
        finite = np.abs(np.asarray(b)[np.isfinite(b)])
        least = tolerance * float(finite.max(initial=0))
        same = np.isclose(a, b, rtol=tolerance, atol=least, equal_nan=True)
    else:
        same = np.asarray(a == b)
    if same.all():
        return ""
    at = tuple(int(n) for n in np.argwhere(~np.asarray(same))[0])
    first = f"{np.asarray(a)[at]!r} and {np.asarray(b)[at]!r} at {at}"
    return f"numbers {where}: {int((~same).sum()):,} of {same.size:,}, {first}"
