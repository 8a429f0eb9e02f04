"""Tasks that send host arrays and blocks of files to devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dask._task_spec import Alias, GraphNode, Task, TaskRef
from dask._task_spec import _execute_subgraph as execute_subgraph
from dask.array.dispatch import to_cupy_dispatch

from .graph import Key


def identity(value: Any) -> Any:
    return value


#: CuPy's functions that bring an array to the device.
SENDERS = {"array", "asanyarray", "asarray"}
#: Bytes below which an array of the host is sent by the task that reads it.
LEAST_SENT = 2**16


def is_sender(function: Any) -> bool:
    """Whether a function of one array brings it to the device and does nothing else."""
    if function is to_cupy_dispatch:
        return True
    home = getattr(function, "__module__", None) or ""
    return home.partition(".")[0] == "cupy" and getattr(function, "__name__", "") in SENDERS


def sent_key(key: Key) -> Key:
    return (f"{key[0]}-sent", *key[1:]) if type(key) is tuple else f"{key}-sent"


class SendExtractor:
    """Takes the sending of an input from the front of tasks. Remembers inner graphs, which all
    blocks of a layer share."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Any, Any]] = {}

    def without(self, task: Any, name: Key) -> Task | None:
        """The task for an input that is on the device already; None where it does more with it, or
        something else first."""
        if type(task) is not Task or task.kwargs:
            return None
        if is_sender(task.func):
            (only,) = task.args if len(task.args) == 1 else (None,)
            return Task(task.key, identity, only) if _refers(only, name) else None
        if task.func is not execute_subgraph:
            return None
        inner, outkey, inkeys, *args = task.args
        places = [n for n, a in enumerate(args) if _refers(a, name)]
        others = (a for n, a in enumerate(args) if n not in places and isinstance(a, GraphNode))
        if not places or any(name in a.dependencies for a in others) or len(args) != len(inkeys):
            return None
        words = id(inner), tuple(places)
        if words not in self.known:
            self.known[words] = inner, _unsent(inner, {inkeys[n] for n in places}, outkey)
        changed = self.known[words][1]
        if changed is None:
            return None
        return Task(task.key, execute_subgraph, changed, outkey, inkeys, *args)


def _refers(argument: Any, name: Key) -> bool:
    return bool(referenced_keys(argument) == name)


def referenced_keys(argument: Any) -> Key:
    """The key of the task that an argument stands for; None for any other argument."""
    if isinstance(argument, TaskRef):
        return argument.key
    return argument.target if isinstance(argument, Alias) else None


def _unsent(inner: Mapping[Key, Any], inputs: set[Key], outkey: Key) -> dict[Key, Any] | None:
    """An inner graph whose inputs are on the device already; None where it does not send them."""
    out = dict(inner)
    if outkey in inputs or inputs & out.keys():
        return None
    for key, task in inner.items():
        if not isinstance(task, GraphNode):
            return None  # of Dask's older kind
        read = inputs & set(task.dependencies)
        if not read:
            continue
        if type(task) is not Task or task.kwargs or len(task.args) != 1:
            return None
        if not is_sender(task.func) or not _refers(task.args[0], next(iter(read))):
            return None
        out[key] = Task(key, identity, task.args[0])
    return out
