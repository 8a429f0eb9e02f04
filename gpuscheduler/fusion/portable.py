"""Find tasks of this package's array library, which take arrays of NumPy and of GPUs alike.

GPUs compute them on NumPy's arrays as on CuPy's, and what only takes their values apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import getitem
from types import FunctionType
from typing import Any

import numpy as np
from dask._task_spec import NestedContainer, Task
from dask.array.core import concatenate3, concatenate_shaped, finalize

from ..dask_private import sum_products
from ..frontend.graph import NUMPY, RESIDENT, BlockInfo, Graph, Key, is_plain
from ..frontend.task import Launcher, WrappingTask, kernels_of, sequence_of
from ..frontend.task_node import TaskNode
from ..values import FunctionSet

#: Files of functions that take both: most of their time goes into products, or into sorts.
PRODUCTS = (
    "cholesky", "lapack", "lu", "matrices", "randomized", "square", "tall_kernel", "tall_tasks",
)  # fmt: skip
ORDERS = ("distinct", "local_sort", "ordered_keys", "runs", "selection", "sorting", "splitters")
MODULES = frozenset("gpuscheduler.algorithms." + name for name in (*PRODUCTS, *ORDERS))
#: Functions that take values apart, or put them together, whatever library their arrays are of.
TAKING = FunctionSet(
    getitem, tuple, list, np.transpose, concatenate3, concatenate_shaped, finalize, sum_products
)
#: Where the functions are that make containers of what a task reads.
CONTAINERS = "dask._task_spec"


class PortableTask(WrappingTask):
    """A task of the array library, for a GPU: arrays that it reads of the host are sent before."""

    __slots__ = ("key", "operations", "sent_names", "task", "traffic")

    def __init__(
        self,
        key: Key,
        task: Any,
        operations: int = 0,
        traffic: int = 0,
        sent_names: frozenset[Key] = frozenset(),
    ):
        self.key, self.task = key, task
        #: Operations, and bytes that it reads and makes, as far as they are known.
        self.operations, self.traffic = operations, traffic
        #: Names of values whose arrays are sent, should they be on the host.
        self.sent_names = sent_names

    def __call__(self, values: dict[Key, Any]) -> Any:
        return self.task(values)

    def with_parts(self, *parts: Any) -> PortableTask:
        (task,) = parts
        return PortableTask(self.key, task, self.operations, self.traffic, self.sent_names)

    def with_sent_names(self, names: frozenset[Key]) -> PortableTask:
        """Return the same task with other names of values that are sent."""
        return PortableTask(self.key, self.task, self.operations, self.traffic, names)

    @property
    def sequence(self) -> Any:
        return sequence_of(self.task)

    def launch(self, launcher: Launcher, values: dict[Key, Any]) -> Any:
        return launcher.call_portable(self, values)

    def __repr__(self) -> str:
        return f"<PortableTask {self.key!r}>"


def make_portable(graph: Graph, key: Key, sizes: Mapping[Key, int]) -> PortableTask | None:
    """Return a task for GPUs if all its functions take arrays of NumPy and of GPUs alike.

    None if it has others, or reads what GPUs cannot have. Tasks before it have been replaced.
    `sizes` has the bytes of values.
    """
    node = graph.nodes[key]
    functions = [f for _, part in sequence_of(node.task) for f in _functions(part)]
    own = [_module_of(f) for f in functions if _module_of(f) in MODULES]
    if not functions or not all(_module_of(f) in MODULES or f in TAKING for f in functions):
        return None
    before = [graph.nodes[d] for d in node.needs]
    if not own and not any(isinstance(n.task, PortableTask) for n in before):
        return None
    values = node.constants.values()
    if not (all(map(_is_for_gpus, before)) and all(map(_is_plain_value, values))):
        return None
    if node.block is not None and not _is_plain_block(node.block):
        return None
    products = any(module.rpartition(".")[2] in PRODUCTS for module in own)
    operations = _count_operations([n.block for n in (*before, node)]) if products else 0
    return PortableTask(key, node.task, operations, touched_bytes(key, node, sizes))


def touched_bytes(key: Key, node: TaskNode, sizes: Mapping[Key, int]) -> int:
    """Return the bytes that a task reads and makes, as far as they are known."""
    held = sum([getattr(c, "nbytes", 0) for c in node.constants.values()])
    return held + sizes.get(key, 0) + sum([sizes.get(d, 0) for d in node.needs])


def _functions(task: Any) -> Iterator[Callable[..., Any] | None]:
    """Yield the functions that a task calls; None for a task that is none of Dask's."""
    if not isinstance(task, Task):
        yield None
        return
    if not isinstance(task, NestedContainer):
        function: Any = task.func
        while isinstance(function, partial):
            function = function.func
        if _module_of(function) != CONTAINERS:
            yield function
    for argument in (*task.args, *task.kwargs.values()):
        if isinstance(argument, Task):
            yield from _functions(argument)


def _module_of(function: Any) -> str:
    """The module of a Python function; empty for users' objects, which may say anything."""
    return str(function.__module__) if type(function) is FunctionType else ""


def _is_for_gpus(node: TaskNode) -> bool:
    """Whether GPUs have the value of a task, or can have it."""
    made_there = isinstance(node.task, PortableTask) or bool(kernels_of(node.task))
    return made_there or _is_plain_block(node.block)


def _is_plain_block(block: Any) -> bool:
    known = isinstance(block, BlockInfo) and block.kind in (None, NUMPY, RESIDENT)
    return known and is_plain(block.dtype)


def _is_plain_value(value: Any) -> bool:
    """Whether a constant is an array that GPUs can have, or no array at all."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return is_plain(value.dtype)
    return not hasattr(value, "dtype") or isinstance(value, (np.dtype, type))


def _count_operations(blocks: list[Any]) -> int:
    """Estimate operations: a product of the largest of these matrices and a square one."""
    shapes = [b.shape for b in blocks if isinstance(b, BlockInfo) and len(b.shape) == 2]
    return max([2 * m * n * min(m, n) for m, n in shapes], default=0)
