"""Run Dask's callbacks (progress bar, profilers, cache) around a run.

Decides nothing. There are three ways, by what the active callbacks have:

1. Only `start`, `start_state` and `finish`, or Dask's `ProgressBar`: the run is what it is without
   them. They see counts that are read when they look.
2. A `pretask`: tasks stay as they were, and it is called as each is handed to its device.
3. A `posttask` as well: devices wait for each task, so that the times which a profiler takes are
   true and the values are there.

`ProgressBar` begins to look when its `_pretask` is called (seen in Dask 2026.1 to 2026.8), which
therefore happens once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Set
from typing import Any

from dask._task_spec import DataNode
from dask.callbacks import unpack_callbacks

from ..dask_private import is_progress_bars
from ..frontend.graph import Graph
from ..plan.plan import Plan
from .observe import RunRecord
from .protocol import StepWatcher

Key = Any


def is_progress_bar(callback: Any) -> bool:
    """Whether a callback is Dask's `ProgressBar`, which reads how many tasks are done."""
    return is_progress_bars(getattr(callback[2], "__func__", None)) and not callback[3]


def begin_progress_bars(callbacks: Iterable[Any], dsk: Any, state: Any) -> None:
    """Let each of Dask's progress bars begin to look at this state."""
    for callback in callbacks:
        if is_progress_bar(callback):
            callback[2](None, dsk, state)


class TaskView(MutableMapping[Key, Any]):
    """Tasks by key for callbacks, made when one of them looks.

    >>> view = TaskView(lambda: {"a": 1})
    >>> len(view), view.is_changed
    (1, False)
    """

    def __init__(self, make: Callable[[], dict[Key, Any]]):
        self._make = make
        self._tasks: dict[Key, Any] | None = None
        self.is_changed = False  # whether a callback has written to it

    @property
    def tasks(self) -> dict[Key, Any]:
        if self._tasks is None:
            self._tasks = self._make()
        return self._tasks

    def __getitem__(self, key: Key) -> Any:
        return self.tasks[key]

    def __setitem__(self, key: Key, task: Any) -> None:
        self.is_changed = True
        self.tasks[key] = task

    def __delitem__(self, key: Key) -> None:
        self.is_changed = True
        del self.tasks[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


class StepKeys(Set[Key]):
    """The keys of the steps of a run that are done, or are not; its length is read each time."""

    def __init__(self, run: RunRecord, plan: Plan, done: bool):
        self.run, self.plan, self.done = run, plan, done
        self.total = plan.launch_count

    def __len__(self) -> int:
        run = self.run
        left = 0 if run.is_over else self.total if run.state is None else run.steps_left
        return self.total - left if self.done else left

    def _keys(self) -> list[Key]:
        state = self.run.state
        steps = [(i, s.key) for i, s in enumerate(self.plan.steps) if not s.fixed]
        if state is None:
            return [k for _, k in steps] if self.run.is_over == self.done else []
        done = bytes(state.done)
        return [k for i, k in steps if bool(done[i]) == self.done]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys())

    def __contains__(self, key: object) -> bool:
        return key in self._keys()


class CountedState(dict[str, Any]):
    """The state of a run as Dask's callbacks know it, whose counts are those of the moment.

    All steps that are not done are "ready". What is rarely looked at is made then, as it was before
    the run.
    """

    def __init__(self, run: RunRecord, plan: Plan, graph: Graph):
        none: dict[str, Any] = {"waiting": {}, "running": set(), "released": set()}
        super().__init__(none)
        self["finished"], self["ready"] = StepKeys(run, plan, True), StepKeys(run, plan, False)
        self._plan, self._graph = plan, graph

    def __missing__(self, name: str) -> Any:
        whole = dask_state(self._plan, self._graph)
        for key, value in whole.items():
            self.setdefault(key, value)
        if name not in self:
            raise KeyError(name)
        return self[name]


class DaskCallbacks(StepWatcher):
    """The five callbacks of each active `dask.callbacks.Callback`, as one `StepWatcher`."""

    def __init__(self, active: Iterable[Any]):
        self.active = list(active)
        _, _, self.pretask, self.posttask, _ = unpack_callbacks(self.active)
        #: Whether tasks are waited for, one by one.
        self.exact = bool(self.posttask)
        #: Whether a callback wants to hear of each task.
        self.per_task = self.exact or any(c[2] and not is_progress_bar(c) for c in self.active)
        self.begun: list[Any] = []
        self.dsk: Any = {}
        #: The graph, where a callback has changed it before it was read.
        self.changed: TaskView | None = None
        self.state: dict[str, Any] = {}
        self.kept: set[Key] = set()  # results, which stay in the state's cache
        self.value: Callable[[int], Any] = lambda step: None
        if self.exact and (logger := logging.getLogger("gpuscheduler.run")).isEnabledFor(20):
            names = sorted({_name(f) for f in self.posttask})
            logger.info("each task is waited for, as a callback has a posttask: %s", names)

    def start(self, dsk: Any) -> None:
        """Before the graph is read: a callback may put values in place of tasks."""
        if self.changed is not None:  # they have been told, and one has changed it
            dsk.clear()
            dsk.update(self.changed.tasks)
            self.dsk = dsk
            return
        self.dsk = dsk
        for callback in self.active:
            if callback[0]:
                callback[0](dsk)
            self.begun.append(callback)

    def start_counts(self, run: RunRecord, plan: Plan, graph: Graph) -> None:
        """Show callbacks how much of a run is done, from now on."""
        self.state = CountedState(run, plan, graph)
        for callback in self.active:
            if callback[1]:
                callback[1](self.dsk, self.state)
        begin_progress_bars(self.active, self.dsk, self.state)

    def start_state(self, plan: Plan, graph: Graph) -> None:
        """Show callbacks the state of a run of which they hear each task."""
        self.plan = plan
        self.kept = {plan.steps[i].key for i in plan.outputs}
        self.state = dask_state(plan, graph)
        for callback in self.active:
            if callback[1]:
                callback[1](self.dsk, self.state)

    def note_launch(self, step: int) -> None:
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

    def note_done(self, step: int) -> None:
        s = self.plan.steps[step]
        if isinstance(s.task, DataNode):
            return
        state, value = self.state, self.value(step)
        state["running"].discard(s.key)
        state["finished"].add(s.key)
        if self.exact:
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


def _name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    return type(owner).__name__ if owner is not None else getattr(function, "__qualname__", "?")


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
