"""Arrays that functions capture become inputs of kernel tasks.

A function may read an array that is no argument: a global, a variable around it, a constant of the
task. NumPy arrays that tasks of CuPy arrays read are sent to the GPUs, by one step for all readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from dask._task_spec import DataNode, Task

from ..frontend import index_lists
from ..frontend.graph import BlockInfo, Graph, is_on_gpus
from .task import KernelTask, Key

#: First part of the names of captured arrays.
BESIDE = "beside"
#: Bytes of an index list that stays on its device as long as its plan. Larger ones are sent in
#: each run.
MOST_KEPT = 2**20


class CapturedInputs:
    """Names captured arrays, and makes them inputs or constants of the tasks that read them."""

    def __init__(
        self,
        graph: Graph,
        readers: dict[Key, int],
        home: Callable[[Any], int | None] | None = None,
    ):
        self.graph = graph
        #: How many tasks read each value: shared with the pass.
        self.readers = readers
        #: The device that an array is on.
        self.home = home
        #: Name of each array, by its id and by whether it is sent. The array must live on.
        self._names: dict[tuple[int, bool], tuple[Key, Any]] = {}
        #: Tasks for arrays that are on devices, or are sent there.
        self._nodes: dict[Key, Any] = {}
        #: How many tasks are given each constant, by its id.
        self._uses: Counter[int] | None = None

    def name_array(self, array: Any, kind: str | None) -> Key:
        """Return the name of a captured array for readers that make arrays of this kind."""
        sent = is_on_gpus(kind) and type(array) is np.ndarray
        known = self._names.get((id(array), sent))
        if known is None:
            known = self._names[id(array), sent] = (BESIDE, len(self._names)), array
            name = known[0]
            self.graph.beside.add(name)
            if sent and array.nbytes <= MOST_KEPT and index_lists.is_ours(array):
                self._nodes[name] = DataNode(name, array)
            elif sent:
                self._nodes[name] = Task(name, np.ascontiguousarray, array)
            elif self.home is not None and self.home(array) is not None:
                self._nodes[name] = DataNode(name, array)
            if name in self._nodes:
                self.readers[name] = 0
        return known[0]

    def add_input(self, key: Key, name: Key, array: Any) -> None:
        """Let a task read a captured array, as an input or as a constant.

        Arrays with a task of their own are inputs.
        """
        graph, node = self.graph, self.graph.nodes[key]
        if name not in self._nodes:
            graph.set_constants(key, {**node.constants, name: array})
        elif name not in node.names:
            graph.rewire(key, (*node.names, name), (*node.needs, name))
            self.readers[name] += 1

    def send_constants(self, fused: KernelTask, kind: str | None) -> None:
        """Send NumPy constants of several tasks to the GPUs by one step."""
        graph, key = self.graph, fused.key
        task = graph.nodes[key]
        constants = task.constants
        read = {k for k, foreseen in fused.inputs() if any(foreseen)}
        tables = {
            k: v
            for k, v in constants.items()
            if k in read and type(v) is np.ndarray and v.ndim and self._count_uses(v) > 1
        }
        near = [graph.blocks.get(k) for k in task.needs]
        kinds = [kind, *[b.kind for b in near if b is not None]]
        if not tables or not any(map(is_on_gpus, kinds)):
            return
        names, needs = task.names, task.needs
        for name, array in tables.items():
            node = self.name_array(array, "cupy.ndarray")
            names, needs = (*names, name), (*needs, node)
            self.readers[node] += 1
        left = {k: v for k, v in constants.items() if k not in tables}
        graph.rewire(key, names, needs, left)

    def _count_uses(self, table: Any) -> int:
        if self._uses is None:
            every = self.graph.constants.values()
            self._uses = Counter(id(v) for given in every for v in given.values())
        return self._uses[id(table)]

    def put_in_front(self) -> None:
        """Put the tasks of captured arrays that are read in front of the graph."""
        if not self._nodes:
            return
        graph = self.graph
        nodes = {k: n for k, n in self._nodes.items() if self.readers[k]}
        graph.put_in_front(nodes)
        for key, node in nodes.items():
            if type(node) is DataNode and type(node.value) is np.ndarray:
                graph.note(key, sent=True)
            if type(node) is Task:
                (array,) = node.args
                block = BlockInfo(array.shape, array.dtype, "cupy.ndarray")
                graph.note(key, block=block, size=array.nbytes, aside=True, sent=True)
                if not graph.store_keys and not graph.written_keys:  # whose target it may be
                    graph.note(key, again=True)
