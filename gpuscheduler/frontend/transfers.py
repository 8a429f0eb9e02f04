"""Tasks that send host arrays and blocks of files to devices, or bring blocks to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dask._task_spec import Alias, GraphNode, Task, TaskRef
from dask.array.dispatch import to_cupy_dispatch, to_numpy_dispatch

from ..dask_private import execute_subgraph
from ..values import FunctionSet
from .graph import BlockInfo, Key, Value, is_plain


def identity(value: Any) -> Any:
    """Return the value."""
    return value


def keep_order(array: np.ndarray) -> np.ndarray:
    """Copy an array without gaps, with its axes in memory as they are."""
    return array.copy("K")


#: Functions of steps that send an array to a device.
SENDING = FunctionSet(identity, keep_order)
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
    """The key of the step that sends the value of a key."""
    return (f"{key[0]}-sent", *key[1:]) if type(key) is tuple else f"{key}-sent"


class SendExtractor:
    """Takes the sending of an input from the front of tasks.

    It remembers inner graphs, which all blocks of a layer share.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Any, Any]] = {}

    def without_sending(self, task: Any, name: Key) -> Task | None:
        """The task for an input that is on the device already.

        None where the task does more with the input, or does not begin by sending it.
        """
        if type(task) is not Task or task.kwargs:
            return None
        if is_sender(task.func):
            (only,) = task.args if len(task.args) == 1 else (None,)
            return Task(task.key, identity, only) if _refers_to(only, name) else None
        if task.func is not execute_subgraph:
            return None
        inner, outkey, inkeys, *args = task.args
        places = [n for n, a in enumerate(args) if _refers_to(a, name)]
        others = (a for n, a in enumerate(args) if n not in places and isinstance(a, GraphNode))
        if not places or any(name in a.dependencies for a in others) or len(args) != len(inkeys):
            return None
        words = id(inner), tuple(places)
        if words not in self.known:
            self.known[words] = inner, _remove_sending(inner, {inkeys[n] for n in places}, outkey)
        changed = self.known[words][1]
        if changed is None:
            return None
        return Task(task.key, execute_subgraph, changed, outkey, inkeys, *args)


def _refers_to(argument: Any, name: Key) -> bool:
    return bool(referenced_keys(argument) == name)


def referenced_keys(argument: Any) -> Key:
    """The key of the task that an argument stands for; None for any other argument."""
    if isinstance(argument, TaskRef):
        return argument.key
    return argument.target if isinstance(argument, Alias) else None


def _remove_sending(
    inner: Mapping[Key, Any], inputs: set[Key], outkey: Key
) -> dict[Key, Any] | None:
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
        if not is_sender(task.func) or not _refers_to(task.args[0], next(iter(read))):
            return None
        out[key] = Task(key, identity, task.args[0])
    return out


@dataclass(slots=True)
class SendingSteps:
    """Tables of tasks, into which steps are put that send arrays ahead of their readers."""

    tasks: dict[Key, Any]
    alias: Mapping[Key, Key]
    needs: dict[Key, tuple[Key, ...]]
    names: dict[Key, tuple[Key, ...]]
    constants: dict[Key, dict[Key, Any]]
    #: The steps that were put in, and one reader of each.
    readers: dict[Key, Key] = field(default_factory=dict)

    def send(self, key: Key, name: Key, array: Any, function: Callable[[Any], Any]) -> None:
        """Have a step send the array that the task `key` reads as the constant `name`."""
        first = sent_key(self.alias.get(name, name))
        if first not in self.needs:
            self.tasks[first] = Task(first, function, array)
            self.needs[first] = self.names[first] = ()
            self.constants[first], self.readers[first] = {}, key
        self.constants[key] = {d: v for d, v in self.constants[key].items() if d != name}
        self.needs[key] = (*self.needs[key], first)
        self.names[key] = (*self.names[key], name)


def send_arrays(
    tasks: dict[Key, Any],
    alias: Mapping[Key, Key],
    needs: dict[Key, tuple[Key, ...]],
    names: dict[Key, tuple[Key, ...]],
    constants: dict[Key, dict[Key, Any]],
) -> dict[Key, Key]:
    """Put steps that send host arrays in front of the tasks that begin with sending them.

    Changes all tables but `alias`: the tasks no longer send. Returns these steps, and one reader of
    each.
    """
    steps = SendingSteps(tasks, alias, needs, names, constants)
    out, send = steps.readers, SendExtractor()
    for key, given in [(k, c) for k, c in constants.items() if c]:
        for name, value in given.items():
            if type(value) not in (np.ndarray, np.memmap) or value.nbytes < LEAST_SENT:
                continue
            task = send.without_sending(tasks[key], name) if is_plain(value.dtype) else None
            if task is None:
                continue
            if task.func is identity:  # it does nothing else
                tasks[key] = Task(key, identity, value)
                constants[key], out[key] = {}, key
                break
            tasks[key] = task
            steps.send(key, name, value, identity)
    return out


def send_all_arrays(
    tasks: dict[Key, Any],
    alias: Mapping[Key, Key],
    needs: dict[Key, tuple[Key, ...]],
    names: dict[Key, tuple[Key, ...]],
    constants: dict[Key, dict[Key, Any]],
) -> dict[Key, Key]:
    """Put steps that send host arrays in front of all tasks that read them.

    Small arrays stay where they are, for tasks may depend on their values, unless they are blocks
    with gaps: a kernel is compiled for the strides that it reads, and a copy has no gaps. Changes
    all tables but `alias`. Returns these steps, and one reader of each.
    """
    steps = SendingSteps(tasks, alias, needs, names, constants)
    for key, given in [(k, c) for k, c in constants.items() if c]:
        for name, value in given.items():
            function = _sending_function(name, value)
            if function is None:
                continue
            steps.send(key, name, value, function)
    return steps.readers


def _sending_function(name: Key, value: Any) -> Callable[[Any], Any] | None:
    """The function of a step that sends an array; None for what is not sent ahead of its reader."""
    if type(value) is not np.ndarray or not is_plain(value.dtype) or not value.ndim:
        return None
    gaps = not (value.flags.c_contiguous or value.flags.f_contiguous)
    if value.nbytes < LEAST_SENT and not (gaps and type(name) is tuple):
        return None
    axes = [(s, n) for s, n in zip(value.strides, value.shape, strict=True) if n > 1]
    if not gaps or axes == sorted(axes, reverse=True):
        return identity
    return keep_order if axes == sorted(axes) and axes[0][0] > 0 else None


def is_turned(array: np.ndarray) -> bool:
    """Whether the first axis of an array is the fastest in memory, and no other order will do."""
    axes = [s for s, n in zip(array.strides, array.shape, strict=True) if n > 1]
    return len(axes) > 1 and axes == sorted(axes) and axes[0] > 0 and not array.flags.c_contiguous


def send_files(
    sources: Set[Key],
    tasks: dict[Key, Any],
    needs: Mapping[Key, tuple[Key, ...]],
    names: Mapping[Key, tuple[Key, ...]],
    value_of: Callable[[Key], Value],
) -> dict[Key, Key]:
    """Take the sending of a block of a file from its readers, where all of them begin with it.

    Changes `tasks`. Returns the blocks, which go to their device at once, and one reader of each.
    """
    out: dict[Key, Key] = {}
    send = SendExtractor()
    readers: dict[Key, dict[Key, list[Key]]] = {}  # source -> reader -> its names there
    for key, inputs in needs.items():
        for name, d in zip(names[key], inputs, strict=True):
            if d in sources:
                readers.setdefault(d, {}).setdefault(key, []).append(name)
    for key, reading in readers.items():
        block = value_of(key)
        if not isinstance(block, BlockInfo) or not is_plain(block.dtype):
            continue
        if block.nbytes < LEAST_SENT:
            continue
        if any(len(known_as) > 1 for known_as in reading.values()):
            continue
        unsent = {r: send.without_sending(tasks[r], name) for r, (name,) in reading.items()}
        if all(t is not None for t in unsent.values()):
            tasks.update(unsent)
            out[key] = next(iter(reading))
    return out


def send_all_files(sources: Set[Key], value_of: Callable[[Key], Value]) -> dict[Key, Key]:
    """The blocks of files that kernels can read: all go to their device at once.

    Returns them, each as its own reader, for a block of a file is pinned by nothing.
    """
    known = {key: value_of(key) for key in sources}
    return {
        key: key for key, block in known.items()
        if isinstance(block, BlockInfo) and is_plain(block.dtype) and block.nbytes >= LEAST_SENT
    }  # fmt: skip


def without_conversion(task: Any) -> Any:
    """The task without its last step, `to_numpy_dispatch`; None where it has another last step."""
    if not isinstance(task, Task) or task.kwargs:
        return None
    if task.func is to_numpy_dispatch and len(task.args) == 1:
        return Task(task.key, identity, task.args[0])
    if task.func is execute_subgraph:
        inner, outkey, inkeys, *args = task.args
        last = inner.get(outkey)
        if isinstance(last, Task) and last.func is to_numpy_dispatch and not last.kwargs:
            (source,) = last.args
            if (name := referenced_keys(source)) is not None:
                return Task(task.key, execute_subgraph, inner, name, inkeys, *args)
    return None
