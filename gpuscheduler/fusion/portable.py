"""Find tasks of this package's array library, which take arrays of NumPy and of GPUs alike.

GPUs compute them on NumPy's arrays as on CuPy's, and what only takes their values apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
from dask._task_spec import NestedContainer, Task
from dask.array.core import concatenate3, concatenate_shaped, finalize

from ..dask_private import sum_products
from ..frontend.graph import NUMPY, RESIDENT, BlockInfo, Graph, Key, is_plain
from ..frontend.task import (
    Launcher,
    OwnTask,
    TaskDescription,
    describe,
    kernels_of,
    original_of,
    sequence_of,
    work_identity_of,
)
from ..frontend.task_node import TaskNode

#: Files of functions that take both: most of their time goes into products, or into sorts.
PRODUCTS = (
    "cholesky", "lapack", "lu", "matrices", "randomized", "square", "tall_kernel", "tall_tasks",
)  # fmt: skip
ORDERS = ("distinct", "local_sort", "ordered_keys", "runs", "selection", "sorting", "splitters")
MODULES = frozenset("gpuscheduler.algorithms." + name for name in (*PRODUCTS, *ORDERS))
#: Functions that take values apart, or put them together, whatever library their arrays are of.
TAKING = frozenset(
    [getitem, tuple, list, np.transpose, concatenate3, concatenate_shaped, finalize, sum_products]
)
#: Where the functions are that make containers of what a task reads.
CONTAINERS = "dask._task_spec"


class PortableTask(OwnTask):
    """A task of the array library, for a GPU: arrays that it reads of the host are sent before."""

    __slots__ = ("key", "sent_names", "task")

    def __init__(self, key: Key, task: Any, sent_names: frozenset[Key] = frozenset()):
        self.key, self.task = key, task
        #: Names of values whose arrays are sent, should they be on the host.
        self.sent_names = sent_names

    def __call__(self, values: dict[Key, Any]) -> Any:
        return self.task(values)

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.task,)

    def with_parts(self, *parts: Any) -> PortableTask:
        (task,) = parts
        return PortableTask(self.key, task, self.sent_names)

    @property
    def sequence(self) -> Any:
        return sequence_of(self.task)

    @property
    def original(self) -> Any:
        return original_of(self.task)

    @property
    def work_identity(self) -> Any:
        return work_identity_of(self.task)

    def launch(self, launcher: Launcher, values: dict[Key, Any]) -> Any:
        return launcher.call_portable(self, values)

    def describe(self) -> TaskDescription:
        return describe(self.task)

    def __repr__(self) -> str:
        return f"<PortableTask {self.key!r}>"


def is_portable(graph: Graph, key: Key) -> bool:
    """Whether a task takes arrays of NumPy and of GPUs alike, and GPUs can have all that it reads.

    Tasks before it have been asked: those that are portable have the fact.
    """
    node = graph.nodes[key]
    functions = {f for _, part in sequence_of(node.task) for f in _functions(part)}
    own = {f for f in functions if getattr(f, "__module__", None) in MODULES}
    if not functions or not functions - own <= TAKING:
        return False
    before = [graph.nodes[d] for d in node.needs]
    if not own and not any(n.portable for n in before):
        return False
    return (
        (node.block is None or _is_plain_block(node.block))
        and all(map(_is_for_gpus, before))
        and all(map(_is_plain_value, node.constants.values()))
    )


def _functions(task: Any) -> Iterator[Callable[..., Any] | None]:
    """Yield the functions that a task calls; None for a task that is none of Dask's."""
    if not isinstance(task, Task):
        yield None
        return
    if not isinstance(task, NestedContainer):
        function: Any = task.func
        while isinstance(function, partial):
            function = function.func
        if getattr(function, "__module__", None) != CONTAINERS:
            yield function
    for argument in (*task.args, *task.kwargs.values()):
        if isinstance(argument, Task):
            yield from _functions(argument)


def _is_for_gpus(node: TaskNode) -> bool:
    """Whether GPUs have the value of a task, or can have it."""
    return node.portable or bool(kernels_of(node.task)) or _is_plain_block(node.block)


def _is_plain_block(block: Any) -> bool:
    known = isinstance(block, BlockInfo) and block.kind in (None, NUMPY, RESIDENT)
    return known and is_plain(block.dtype)


def _is_plain_value(value: Any) -> bool:
    """Whether a constant is an array that GPUs can have, or no array at all."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return is_plain(value.dtype)
    return not hasattr(value, "dtype") or isinstance(value, (np.dtype, type))


def count_operations(graph: Graph, node: TaskNode) -> int:
    """Estimate the operations of a portable task: a product of its largest matrix and a square one.

    0 for tasks of other kinds, whose bytes say enough, and where no shape is known.
    """
    found = {getattr(f, "__module__", "") for _, part in sequence_of(node.task)
             for f in _functions(part)}  # fmt: skip
    if not any(module.rpartition(".")[2] in PRODUCTS for module in found & MODULES):
        return 0
    blocks = [graph.nodes[d].block for d in node.needs] + [node.block]
    shapes = [b.shape for b in blocks if isinstance(b, BlockInfo) and len(b.shape) == 2]
    return max([2 * m * n * min(m, n) for m, n in shapes], default=0)
