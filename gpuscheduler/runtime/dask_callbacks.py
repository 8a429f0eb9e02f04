"""Run Dask's callbacks (progress bar, profilers, cache) around a run.

Decides nothing.

`pretask` fires when a step is handed to its device and `posttask` when it is done there. Where
devices work asynchronously they wait for each step while callbacks are active, so that the times
which a profiler takes are true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dask._task_spec import DataNode
from dask.callbacks import unpack_callbacks

from ..frontend.graph import Graph
from ..plan.plan import Plan
from .protocol import StepWatcher

Key = Any


class DaskCallbacks(StepWatcher):
    """The five callbacks of each active `dask.callbacks.Callback`, as one `StepWatcher`."""

    def __init__(self, active: Iterable[Any]):
        self.active = list(active)
        _, _, self.pretask, self.posttask, _ = unpack_callbacks(self.active)
        self.begun: list[Any] = []
        self.dsk: dict[Key, Any] = {}
        self.state: dict[str, Any] = {}
        self.kept: set[Key] = set()  # results, which stay in the state's cache
        self.value: Callable[[int], Any] = lambda step: None

    def start(self, dsk: dict[Key, Any]) -> None:
        """Before the graph is read: a callback may put values in place of tasks."""
        self.dsk = dsk
        for callback in self.active:
            if callback[0]:
                callback[0](dsk)
            self.begun.append(callback)

    def start_state(self, plan: Plan, graph: Graph) -> None:
        self.plan = plan
        self.kept = {plan.steps[i].key for i in plan.outputs}
        self.state = dask_state(plan, graph)
        for callback in self.active:
            if callback[1]:
                callback[1](self.dsk, self.state)

    def launched(self, step: int) -> None:
        s = self.plan.steps[step]
        if isinstance(s.task, DataNode):
            return
        state = self.state
        if s.key in state["running"]:  # it was refused for memory, and comes again
            return
        if s.key in state["waiting"]:
            del state["waiting"][s.key]
        else:
            state["ready"].remove(s.key)
        state["running"].add(s.key)
        for f in self.pretask:
            f(s.key, self.dsk, state)

    def done(self, step: int) -> None:
        s = self.plan.steps[step]
        if isinstance(s.task, DataNode):
            return
        state, value = self.state, self.value(step)
        state["running"].discard(s.key)
        state["finished"].add(s.key)
        state["cache"][s.key] = value
        for d in state["dependencies"][s.key]:
            waiting = state["waiting_data"].get(d)
            if waiting is not None:
                waiting.discard(s.key)
                if not waiting:
                    state["released"].add(d)
                    state["cache"].pop(d, None)
        if not state["waiting_data"].get(s.key) and s.key not in self.kept:
            state["cache"].pop(s.key, None)
        for f in self.posttask:
            f(s.key, value, self.dsk, state, s.place)

    def finish(self, failed: bool) -> None:
        for callback in self.begun:
            if callback[4]:
                callback[4](self.dsk, self.state, failed)


def dask_state(plan: Plan, graph: Graph) -> dict[str, Any]:
    """The dictionaries that Dask's own callbacks expect to see; they change as the run goes on."""
    keys = [s.key for s in plan.steps]
    work = {s.key for s in plan.steps if not isinstance(s.task, DataNode)}
    needs = {s.key: {keys[i] for i in s.inputs} for s in plan.steps}
    readers = {k: {keys[r] for r in rs} for k, rs in zip(keys, plan.readers, strict=True)}
    data = {k: v for c in graph.constants.values() for k, v in c.items()} | graph.data
    return {
        "dependencies": {**{k: set() for k in data}, **needs},
        "dependents": {**{k: set() for k in data}, **readers},
        "waiting": {k: set(needs[k]) for k in keys if k in work and needs[k] & work},
        "waiting_data": {k: set(rs) for k, rs in readers.items()},
        "cache": dict(data),
        "ready": [k for k in keys if k in work and not needs[k] & work],
        "running": set(),
        "finished": set(),
        "released": set(),
    }
