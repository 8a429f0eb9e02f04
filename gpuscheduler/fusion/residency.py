"""Keep NumPy's arrays on GPUs between kernels; functions that are called get them on the host.

`make_resident` follows fusion for a graph of NumPy's arrays whose kernels run on GPUs.
The graph then is what a user would have written with `to_backend`: arrays of the host are sent by
steps of their own, ahead of the kernels that read them (`frontend.transfers.send_all_arrays`). What
is no kernel becomes a `HostTask`, for which values are brought to the host. Results come home as
NumPy's: `as_numpy` has the scalars where NumPy has some.

`move_to_host` makes some of the tasks for GPUs ones of the host. `finish_residency` ends it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask._task_spec import DataNode, Task, TaskRef

from ..frontend.graph import RESIDENT, Graph, is_plain
from ..frontend.task import (
    TaskDescription,
    WrappingTask,
    describe,
    kernels_of,
    original_of,
)
from ..frontend.task_node import TaskNode
from ..frontend.transfers import LEAST_SENT, SENDING, identity, sent_key
from ..ir.expr import Out
from ..values import leaves, map_leaves
from .library_task import LibraryTask, NumpyTask
from .portable import PortableTask, make_portable, touched_bytes
from .task import KernelTask, Key

Values = dict[Key, Any]
Form = Any  # the result of a program: containers with an `Out` for each array
SCALAR = Out(0, (), True)
#: Tasks of GPUs that are no kernels.
LIBRARIES = (LibraryTask, NumpyTask, PortableTask)
#: Bytes that a program must touch to be worth its compilation for the host.
LEAST_PROGRAM = 2**18


class HostTask(WrappingTask):
    """A task that is called on the host with NumPy's values, wherever these were made."""

    __slots__ = ("_touched", "forms", "gpu_task", "key", "made", "sends", "task")
    host_only = True

    def __init__(
        self,
        key: Key,
        task: Callable[[Values], Any],
        forms: Mapping[Key, Form],
        touched: int = 0,
        made: int = 0,
    ):
        self.key, self.task = key, task
        #: Whether the value goes to a device, which keeps it.
        self.sends = False
        self._touched = touched
        #: Bytes of its value, as far as they are known.
        self.made = made
        #: The task for GPUs in whose place it is; None of one that no GPU computes.
        self.gpu_task: Any = None
        #: Where NumPy has scalars in values that kernels make, by their names.
        self.forms = dict(forms)

    def __call__(self, values: Values) -> Any:
        return self.task(values)

    @property
    def touched_bytes(self) -> int:
        """Bytes that the task reads and makes, as far as they are known."""
        return self._touched

    def with_parts(self, *parts: Any) -> HostTask:
        (task,) = parts
        out = HostTask(self.key, task, self.forms, self._touched, self.made)
        out.sends, out.gpu_task = self.sends, self.gpu_task
        return out

    def describe(self) -> TaskDescription:
        return TaskDescription(f"{describe(self.task).words} on the host")

    def call(self, values: Values, bring: Callable[[Any], Any]) -> Any:
        """Call the task; `bring` copies an array of a device to the host, and keeps other values.

        >>> task = HostTask("y", lambda values: type(values["x"]), {"x": SCALAR})
        >>> task.call({"x": np.array(1.5)}, lambda value: value)
        <class 'numpy.float64'>
        """
        forms = self.forms
        return self.task({k: as_numpy(v, forms.get(k), bring) for k, v in values.items()})

    def __repr__(self) -> str:
        return f"<HostTask {self.key!r}>"


def as_numpy(value: Any, form: Form, bring: Callable[[Any], Any]) -> Any:
    """A value with its arrays brought to the host, and scalars where NumPy has some.

    `form` is the result of the program that made the value; None where it has no scalars.

    >>> as_numpy((np.array(2), np.ones(1)), (SCALAR, Out(1, (1,))), lambda v: v)
    (np.int64(2), array([1.]))
    """
    if form is None:
        return map_leaves(bring, value)
    if isinstance(form, Out):
        value = bring(value)
        return value[()] if form.scalar and getattr(value, "shape", None) == () else value
    if type(form) is dict and type(value) is dict and value.keys() == form.keys():
        return {k: as_numpy(v, form[k], bring) for k, v in value.items()}
    if type(form) in (tuple, list) and type(value) is type(form) and len(value) == len(form):
        return type(form)([as_numpy(v, f, bring) for v, f in zip(value, form, strict=True)])
    return map_leaves(bring, value)


def form_of(task: Any) -> Form:
    """Where NumPy has scalars in what a kernel task makes; None where it has none."""
    if kernels_of(task) != (task,):
        return None
    return _with_scalars(task.program.result)


def _with_scalars(form: Form) -> Form:
    """The form, if it has scalars; None otherwise."""
    return form if any(isinstance(v, Out) and v.scalar for v in leaves(form)) else None


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """What is known of the values of a graph, on whichever side they are made."""

    forms: dict[Key, Form]
    sizes: dict[Key, int]


def make_resident(graph: Graph, views: Mapping[Key, Form], loose: bool = False) -> ValueFacts:
    """Make each task of a fused graph one of GPUs, or a task of the host. Changes the graph.

    Tasks in `views` only take a view of what they read, be it on a device or not; `views` has the
    forms of what they make. With `loose`, GPUs make calls whose results may differ as their
    documentation allows.
    """
    forms: dict[Key, Form] = {}
    sizes = dict(graph.sizes)  # of values of the host as well
    for key, node in list(graph.nodes.items()):
        if kernels := kernels_of(node.task):
            for fused in kernels:
                fused.kind = RESIDENT
            forms[key] = form_of(node.task)
        elif node.is_data or node.sent or node.aside:
            continue
        elif _is_identity(node.task):
            forms[key] = forms.get(node.needs[0]) if node.needs else None
        elif key in views:
            without_axes = node.block is not None and node.block.shape == ()
            forms[key] = SCALAR if without_axes else _with_scalars(views[key])
        elif node.product is not None and node.block is not None:
            graph.replace(key, NumpyTask(_host_task(graph, key, forms, sizes)))
            graph.note(key, why=None)
        elif node.library is not None and (loose or not node.library.call.loose):
            task = LibraryTask(key, node.library, _host_task(graph, key, forms, sizes))
            graph.replace(key, task)
            graph.note(key, why=None)
        elif portable := make_portable(graph, key, sizes):
            graph.replace(key, portable)
            graph.note(key, operations=portable.operations, why=None)
        else:
            _call_on_host(graph, key, forms, sizes)
    return ValueFacts(forms, sizes)


def move_to_host(graph: Graph, keys: Iterable[Key], facts: ValueFacts) -> None:
    """Have the host compute kernels and calls of libraries. Changes the graph.

    The host runs the same programs, but for those so small that NumPy is as fast.
    """
    for key in keys:
        task = graph.nodes[key].task
        if isinstance(task, LibraryTask):
            graph.replace(key, task.on_host.task)
        elif isinstance(task, NumpyTask):
            graph.replace(key, task.task.task)
        elif isinstance(task, PortableTask):
            graph.replace(key, task.task)
        elif not (isinstance(task, KernelTask) and task.touched_bytes >= LEAST_PROGRAM):
            random = any(k.positions for k in kernels_of(task))
            graph.replace(key, task if random else original_of(task))
        graph.note(key, product=None)
        _call_on_host(graph, key, facts.forms, facts.sizes)
        graph.nodes[key].task.gpu_task = task  # type: ignore[attr-defined]


def finish_residency(graph: Graph, facts: ValueFacts) -> None:
    """Send what the host makes to the tasks of GPUs that read it. Changes the graph."""
    _send_host_values(graph, facts)
    _note_sent_values(graph)
    forms = facts.forms
    graph.forms = {k: forms[k] for k in graph.outputs if forms.get(k) is not None}
    _drop_unread(graph)


def _send_host_values(graph: Graph, facts: ValueFacts) -> None:
    """Have a value of the host that GPUs read sent once, by a thread of the host.

    Small ones go with what reads them.
    """
    readers: dict[Key, list[Key]] = {}
    for key, node in graph.nodes.items():
        if _runs_on_gpus(node):
            for d in node.needs:
                if isinstance(graph.nodes[d].task, HostTask):
                    readers.setdefault(d, []).append(key)
    if not readers:
        return
    others = {
        d for node in graph.nodes.values() for d in node.needs
        if not _runs_on_gpus(node)
    }.union(graph.outputs)  # fmt: skip
    sent: dict[Key, Key] = {}
    for key, mine in readers.items():
        node = graph.nodes[key]
        block, task = node.block, node.task
        if block is None or not is_plain(block.dtype) or block.is_sparse or not block.shape:
            continue
        if block.nbytes < LEAST_SENT or node.picks or task.sends:  # type: ignore[attr-defined]
            continue
        if key not in others:
            task.sends = True  # type: ignore[attr-defined]
            graph.note(key, size=block.nbytes)
            continue
        new = sent[key] = sent_key(key)
        sender = HostTask(new, Task(new, identity, TaskRef(key)), {}, block.nbytes)
        sender.sends = True
        graph.add(new, sender, (key,), (key,), size=block.nbytes, block=block)
        for reader in mine:
            there = graph.nodes[reader]
            needs = tuple([new if d == key else d for d in there.needs])
            graph.rewire(reader, there.names, needs)
    if sent:
        graph.reorder([k for key in list(graph.nodes) if key not in sent.values()
                       for k in ((key, sent[key]) if key in sent else (key,))])  # fmt: skip


def _note_sent_values(graph: Graph) -> None:
    """Tell portable tasks which of the values that they read may be on the host.

    These are all but those of other portable tasks, which may have numbers there on purpose.
    """
    for key, node in graph.nodes.items():
        if isinstance(node.task, PortableTask):
            reads = zip(node.names, node.needs, strict=True)
            names = {n for n, d in reads if not isinstance(graph.nodes[d].task, PortableTask)}
            graph.replace(key, node.task.with_sent_names(frozenset(names.union(node.constants))))


def _runs_on_gpus(node: TaskNode) -> bool:
    return bool(kernels_of(node.task)) or isinstance(node.task, LIBRARIES)


def _is_identity(task: Any) -> bool:
    return getattr(task, "func", getattr(task, "function", None)) is identity


def _call_on_host(graph: Graph, key: Key, forms: Mapping[Key, Form], sizes: dict[Key, int]) -> None:
    """Make a task one of the host's, and have it read arrays of the host where they are."""
    node = graph.nodes[key]
    picks = node.picks
    reads = list(zip(node.names, node.needs, strict=True))
    mine = {n: array for n, d in reads if (array := _host_array(graph, d)) is not None}
    if mine:
        reads = [(n, d) for n, d in reads if n not in mine]
        assert not picks  # tasks are merged behind this
        names, needs = tuple([n for n, _ in reads]), tuple([d for _, d in reads])
        graph.rewire(key, names, needs, {**node.constants, **mine})
    for _, d in reads:  # blocks of files, which kernels can read from the host as well
        if graph.nodes[d].sent and graph.nodes[d].aside:
            graph.note(d, sent=None)
    called = _host_task(graph, key, forms, sizes)
    block = node.block
    if graph.keep and key in graph.outputs and block is not None and is_plain(block.dtype):
        called.sends = True
    else:
        graph.note(key, size=0)  # of a device's memory
    graph.replace(key, called)


def _host_task(
    graph: Graph, key: Key, forms: Mapping[Key, Form], sizes: Mapping[Key, int]
) -> HostTask:
    """The task of a key, to be called with NumPy's values."""
    node = graph.nodes[key]
    reads = list(zip(node.names, node.needs, strict=True))
    given = {n: form for n, d in reads if (form := forms.get(d)) is not None}
    return HostTask(key, node.task, given, touched_bytes(key, node, sizes), sizes.get(key, 0))


def _host_array(graph: Graph, key: Key) -> Any:
    """The array of the host that a step sends; None for other steps."""
    task: Any = graph.nodes[key].task
    if not graph.nodes[key].sent:
        return None
    if isinstance(task, DataNode):
        return task.value if type(task.value) is np.ndarray else None
    array = task.args[0] if type(task) is Task and len(task.args) == 1 else None
    function = getattr(task, "func", None)
    sends = function in SENDING or function is np.ascontiguousarray
    return array if sends and type(array) is np.ndarray else None


def _drop_unread(graph: Graph) -> None:
    """Take out steps whose arrays nobody reads any more."""
    read = {d for node in graph.nodes.values() for d in node.needs}.union(graph.outputs)
    for key in [k for k, node in graph.nodes.items() if node.sent and k not in read]:
        graph.drop(key)
        graph.beside.discard(key)
