"""Build a `Graph` from Dask's tasks: cull, order, and note what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np
from dask._task_spec import (
    Alias,
    DataNode,
    GraphNode,
    NestedContainer,
    Task,
    TaskRef,
    convert_legacy_task,
)
from dask.array.core import finalize
from dask.core import flatten
from dask.highlevelgraph import Layer, MaterializedLayer

from ..dask_private import execute_subgraph
from ..errors import PlanError
from . import linalg_shapes
from .chunk import Chunk
from .compiled_task import SubgraphCompiler, references
from .files import (
    array_library,
    block_read,
    is_in_file,
    may_be_same_store,
    store_targets,
    stores_block,
    stores_last,
)
from .graph import (
    CUPY,
    NOTHING,
    NUMPY,
    RESIDENT,
    SLICERS,
    BlockInfo,
    Compile,
    GatherTask,
    Graph,
    Key,
    LoweredCollection,
    Value,
    is_chunk,
    is_plain,
    layer_of,
    wanted_keys,
)
from .linear_fusion import LinearFuser
from .order import depth_first
from .shapes import (
    block_sizes,
    collection_block,
    holds_tasks,
    indexed_value,
    known_chunks,
    linalg_value,
    selects_by_value,
    stored_bytes,
)
from .task_node import TaskNode
from .transfers import (
    identity,
    send_all_arrays,
    send_all_files,
    send_arrays,
    send_files,
    without_conversion,
)


def holds_chunks(layer: Layer) -> bool:
    """Whether a layer is of persisted chunks."""
    return isinstance(layer, MaterializedLayer) and is_chunk(next(iter(layer.values()), None))


# ---- from one dictionary to a Graph


class GraphBuilder:
    """Walks the graph from the wanted keys: resolves, converts, gathers, orders, chains."""

    def __init__(
        self,
        lowered: LoweredCollection,
        keys: Any,
        cache: Mapping[Key, Any],
        home: Callable[[Any], int | None] | None,
        skip_aliases: bool = True,
        front: int | None = None,
    ):
        self.front, self.send, self.gpus = front, False, False
        self.resident = False  # whether its arrays are NumPy's, and GPUs compute them
        self.keep = False  # ... and keep them
        self.apart = NOTHING  # words of layers: those that have different ones do not fuse
        self.skip_aliases = skip_aliases  # callbacks expect to see each of them run
        self.lowered, self.dsk, self.cache, self.home = lowered, lowered.dsk, cache, home
        self.wanted = wanted_keys(keys)
        self.all_keys: Any = GraphOrCache(self.dsk, cache) if cache else self.dsk
        self.compiler: Compile = SubgraphCompiler()
        self.tasks: dict[Key, Any] = {}  # in order of discovery
        self.data: dict[Key, Any] = {}
        self.alias: dict[Key, Key] = {}
        self.gathers: dict[Key, GatherTask] = {}
        self.reads: dict[Key, tuple[Key, ...]] = {}  # a task's dependencies, as it names them
        self.values: dict[Key, Value] = {}  # what is known of them, of some

    def graph(self) -> Graph:
        """Build the graph."""
        outputs = self._discover()
        stay = self._sent_outputs(outputs) if self.send and self.resident and self.keep else {}
        needs, names, constants = self._edges()
        sources = {k: a for k in needs if (a := self._source(k, constants)) is not None}
        sent: dict[Key, Key] = {}  # steps, and one reader of each
        if self.send and self.resident:
            sent = send_all_arrays(self.tasks, self.alias, needs, names, constants)
            files = sources.keys() if self.keep else sources.keys() - set(outputs)
            sent |= stay | send_all_files(files, self._value)
        elif self.send:
            sent = send_arrays(self.tasks, self.alias, needs, names, constants)
            if sources:
                files = sources.keys() - set(outputs)
                sent |= send_files(files, self.tasks, needs, names, self._value)
        # one task may be read under two names
        once = {k: tuple(dict.fromkeys(v)) for k, v in needs.items()} if self.alias else needs
        order = depth_first(once, outputs)
        pins = self._pins(order)
        for key, reader in sent.items():
            if reader in pins:
                pins.setdefault(key, pins[reader])
        for k in order:  # what one reads is before it
            self.values[k] = self._value(k)
        values = {k: v for k, v in self.values.items() if v is not None}
        blocks = {k: v for k, v in values.items() if isinstance(v, BlockInfo)}
        for key in sent:
            if key in blocks:
                blocks[key] = replace(blocks[key], kind="cupy.ndarray")
            else:
                value = self.tasks[key].args[0]
                blocks[key] = BlockInfo(value.shape, value.dtype, "cupy.ndarray")
        if self.resident:
            for key, block in blocks.items():
                if is_plain(block.dtype) and block.kind in (None, NUMPY, CUPY):
                    blocks[key] = replace(block, kind=RESIDENT)
        sizes = block_sizes(values | blocks, self.tasks)
        within = self._largest_inside(order)
        stores = [k for k in order if stores_block(self.tasks[k])]
        for key in stores:
            if (nbytes := stored_bytes(self.tasks[key])) is not None:
                sizes[key] = nbytes
        kept, compiler = set(outputs), self.compiler
        for k in self._leave_on_device(needs):
            if k in blocks:  # what Dask converts to NumPy is of its other library
                blocks[k] = replace(blocks[k], kind="cupy.ndarray")
        targets = [self._argument(k, 1, constants) for k in stores]
        fused: dict[int, list[Any]] = {}
        stored = {
            k: [self._argument_value(k, a, constants) for a in found]
            for k in order
            if (found := store_targets(self.tasks[k], fused))
        }
        on_gpus = self._where_written(
            {k: [t] for k, t in zip(stores, targets, strict=True)} | stored
        )
        pins.update(on_gpus)
        targets += [t for found in stored.values() for t in found]
        again = self._readable_again(sources, sent.keys(), targets, kept)
        aside = {*sources, *[k for k in stores if k not in on_gpus], *sent}
        if self.lowered.fusable:
            # what follows runs on the device, and these beside it, or where an array is
            alone = kept.union(sent, on_gpus, stored)
            aside.update(on_gpus)
            fuser = LinearFuser(
                self.tasks, needs, names, constants, pins, alone, compiler, self.apart
            )
            order = fuser.fuse(order, aside, again)
            aside.difference_update(on_gpus)
        lent = [k for k in on_gpus if stores_last(self.tasks[k])]
        nodes = {
            k: TaskNode(compiler(self.tasks[k]), needs[k], names[k], constants[k]) for k in order
        }
        inner: dict[str, dict[Key, Any]] = {"size": {}, "block": {}}
        for fact, table in (("pin", pins), ("size", sizes), ("block", blocks)):
            for k, value in table.items():
                if k in nodes:
                    setattr(nodes[k], fact, value)
                elif fact in inner:  # it is inside a chain
                    inner[fact][k] = value
        for flag, keys in (
            ("aside", aside), ("stores", stores), ("written", (*on_gpus, *stored)), ("lent", lent),
            ("again", again), ("sent", sent),
        ):  # fmt: skip
            for k in keys:
                if k in nodes:
                    setattr(nodes[k], flag, True)
        return Graph(
            nodes, self.wanted, outputs, {k: v for k, v in self.data.items() if k in kept},
            self.alias, self.gathers, inner["size"], inner["block"], within, gpus=self.gpus,
            resident=self.resident, keep=self.keep,
        )  # fmt: skip

    def _sent_outputs(self, outputs: tuple[Key, ...]) -> dict[Key, Key]:
        """Steps that send outputs which are arrays of the host, for GPUs to keep these."""
        out: dict[Key, Key] = {}
        for key in outputs:
            value = self.data.get(key)
            if type(value) is np.ndarray and value.ndim and is_plain(value.dtype):
                self.tasks[key] = Task(key, identity, self.data.pop(key))
                self.reads[key], out[key] = (), key
        return out

    def _readable_again(
        self, sources: Mapping[Key, Any], sent: Set[Key], targets: list[Any], kept: set[Key]
    ) -> set[Key]:
        """Steps whose file or host array no task writes: they can be read a second time."""

        def is_written(array: Any) -> bool:
            return any(may_be_same_store(array, t) for t in targets)

        fresh = {id(a): not is_written(a) for a in sources.values()}
        again = {k for k, a in sources.items() if fresh[id(a)]}
        for key in sent:
            if key in kept:  # it has to be somewhere at the end
                again.discard(key)
            elif key not in sources and not is_written(self.tasks[key].args[0]):
                again.add(key)
        return again

    def _source(self, key: Key, constants: Mapping[Key, dict[Key, Any]]) -> Any:
        """The array in a file of which a task takes a block; None for other tasks."""
        array, _ = block_read(self.tasks[key], constants[key])
        return array if is_in_file(array) else None

    def _discover(self) -> tuple[Key, ...]:
        """Collect the tasks that the wanted keys need; return the keys to compute for them."""
        outputs: dict[Key, None] = {}
        for key in self.wanted:
            target = self._resolve(key, None)
            gather = self._recognise_gather(target)
            if gather is None:
                outputs[target] = None
            else:
                if self.home is not None:
                    gather = replace(gather, blocks=self._add_chunk_readers(gather.blocks))
                self.gathers[target] = gather
                outputs.update((self._resolve(b, target), None) for b in flatten(gather.blocks))
        tasks, dsk = self.tasks, self.dsk
        same: dict[int, Key] = {}  # values on devices
        stack = list(reversed(outputs))
        while stack:
            key = stack.pop()
            if key in tasks or key in self.data:
                continue
            task = dsk.get(key)
            if type(task) is not Task or type(task.func) is Chunk:
                task = self._node(key)
                if task is None:
                    continue
                if type(task) is DataNode and key not in outputs:
                    first = same.setdefault(id(task.value), key)
                    if first != key:  # the caller's array under another name
                        self.alias[key] = first
                        continue
            tasks[key] = task
            self.reads[key] = reads = _sort_keys(task.dependencies)
            for d in reads:
                if d in tasks:
                    continue
                target = d if type(dsk.get(d)) is Task else self._resolve(d, key)
                if target not in tasks and target not in self.data:
                    stack.append(target)
        for key, target in self.alias.items():  # of one that has become an alias since
            self.alias[key] = self.alias.get(target, target)
        return tuple(outputs)

    def _node(self, key: Key) -> GraphNode | None:
        """The task of a key; None (and an entry in `data`) where it is a value."""
        task = self.dsk[key] if key in self.dsk else DataNode(key, self.cache[key])
        if not isinstance(task, GraphNode):
            task = convert_legacy_task(key, task, self.all_keys)
        if is_chunk(task):
            chunk: Chunk = task.func  # type: ignore[union-attr]
            value = chunk if self._is_here(task) else chunk.device_value()
            if value is None:  # another scheduler's, and not in memory: the task reads it
                return task
        elif isinstance(task, GraphNode) and not isinstance(task, DataNode):
            return task
        else:
            value = task.value if isinstance(task, DataNode) else task
        if self.home is not None and self.home(value) is not None:
            return DataNode(key, value)
        self.data[key] = value
        return None

    def _is_here(self, task: Any) -> bool:
        return self.home is not None and self.home(task.func) is not None

    def _add_chunk_readers(self, blocks: Any) -> Any:
        """Add a task that reads each persisted chunk of a gather; return the keys to gather.

        The chunk's device then copies it into the result on the host when the task runs.
        """
        if isinstance(blocks, list):
            return [self._add_chunk_readers(b) for b in blocks]
        target = self._resolve(blocks, None)
        chunk = self.dsk.get(target)
        if not (is_chunk(chunk) and self._is_here(chunk)):
            return blocks
        name, *index = target
        block = (f"{name}-block", *index)
        self.dsk[block] = Task(block, identity, TaskRef(target))
        return block

    def _resolve(self, key: Key, reader: Key) -> Key:
        """Follow aliases to a key with a task or a value."""
        first, seen = key, 0
        while True:
            if key in self.alias:
                key = self.alias[key]
            elif key not in self.dsk:
                if key in self.cache:
                    break
                if reader is None and key == first:
                    raise KeyError(key)
                of = first if reader is None else reader
                raise PlanError(
                    f"Missing dependency {key!r} of {of!r}: neither the graph nor cache= has it"
                )
            else:
                task = self.dsk[key]
                if _is_future(task) and task.key not in self.cache:
                    raise PlanError(
                        f"{key!r} is on a Dask cluster, and not in this process: compute it by "
                        "its client, as in x.compute(scheduler=client), or attach(client) again"
                    )
                if not isinstance(task, GraphNode) and _may_be_alias(task):
                    task = convert_legacy_task(key, task, self.all_keys)
                if not isinstance(task, Alias):
                    break
                if not self.skip_aliases and task.target in self.dsk:
                    break
                if task.target == key and key in self.cache:
                    break
                key = task.target
            seen += 1
            if seen > len(self.dsk) + len(self.alias) + 1:
                raise RuntimeError(f"Cycle detected in the graph: {first!r} is an alias of itself")
        if key != first:
            self.alias[first] = key
        return key

    def _recognise_gather(self, key: Key) -> GatherTask | None:
        """The gather of an array's blocks that a wanted key stands for, if any.

        None leaves the key to its own task: it is no `finalize` of an array, or copies a single
        block, and GPUs do not compute NumPy's arrays.
        """
        task = self.dsk.get(key)
        if not (isinstance(task, Task) and task.func is finalize and len(task.args) == 1):
            return None
        blocks = key_lists(task.args[0])
        if blocks is None:
            return None
        flat = list(flatten(blocks))
        if not all(type(k) is tuple for k in flat):
            return None
        layer = self.lowered.layers.get(flat[0][0])
        chunks = known_chunks(layer)
        is_single = len(flat) == 1 and not self._is_converted(flat[0])
        if is_single and not (self.resident and chunks is not None and len(flat[0]) > 1):
            return None
        if chunks is not None and [len(c) for c in chunks] != _numblocks(blocks):
            chunks = None
        annotations = (layer.collection_annotations if layer is not None else None) or {}
        # of what a mask selects, chunks are unknown, and Dask takes the type for NumPy's
        to_host = chunks is not None and annotations.get("chunk_type") == "numpy.ndarray"
        if is_single and not to_host:
            return None
        return GatherTask(key, blocks, chunks, to_host, converted=self.resident)

    def _is_converted(self, block: Key) -> bool:
        """Whether a block is the result of `.to_backend("numpy")`, in an array with axes."""
        task = self.dsk.get(self._resolve(block, None))
        return len(block) > 1 and isinstance(task, Task) and without_conversion(task) is not None

    def _leave_on_device(self, needs: Mapping[Key, tuple[Key, ...]]) -> list[Key]:
        """Drop `.to_backend("numpy")` from the blocks of gathers, and return these blocks.

        The gather copies the blocks to the host itself: all devices write into the result at once,
        where each task would have waited for its own copy first.
        """
        read = {d for inputs in needs.values() for d in inputs}
        read.update(self.alias.get(k, k) for k in self.wanted)
        out: list[Key] = []
        for key, gather in self.gathers.items():
            blocks = [self.alias.get(b, b) for b in flatten(gather.blocks)]
            if gather.chunks is None or any(b in read or b not in self.tasks for b in blocks):
                continue
            bare = [without_conversion(self.tasks[b]) for b in blocks]
            if all(t is not None for t in bare):
                self.tasks.update(zip(blocks, bare, strict=True))
                self.gathers[key] = replace(gather, to_host=True, converted=True)
                out += blocks
        return out

    def _edges(self) -> tuple[dict[Key, Any], dict[Key, Any], dict[Key, Any]]:
        """For each task, its inputs, their names in the task, and its constants by name."""
        needs: dict[Key, tuple[Key, ...]] = {}
        names: dict[Key, tuple[Key, ...]] = {}
        constants: dict[Key, dict[Key, Any]] = {}
        alias, data, tasks = self.alias, self.data, self.tasks
        for key, reads in self.reads.items():
            if not alias and not data:
                needs[key] = names[key] = reads
                constants[key] = {}
                continue
            targets = [alias.get(d, d) for d in reads]
            pairs = [(d, t) for d, t in zip(reads, targets, strict=True) if t in tasks]
            names[key] = tuple(d for d, _ in pairs)
            needs[key] = tuple(t for _, t in pairs)  # one twice, where it has two names
            constants[key] = {
                d: data[t] for d, t in zip(reads, targets, strict=True) if t not in tasks
            }
        return needs, names, constants

    def _pins(self, order: list[Key]) -> dict[Key, int]:
        """The device of each task that is pinned to one."""
        pins = self.lowered.pins
        out = {k: pins[k] for k in order if pins.get(k) is not None} if pins else {}
        if self.front is not None:
            for key in self.wanted:
                if getattr(self.tasks.get(key), "func", None) is finalize:
                    out.setdefault(key, self.front)
        return out

    def _where_written(self, stores: Mapping[Key, list[Any]]) -> dict[Key, int]:
        """The device of each task that stores to an array on a GPU.

        The task has to run there: on another device it would write to a copy of the array.
        """
        out: dict[Key, int] = {}
        if self.home is None or not self.gpus:
            return out
        for key, target in [(k, t) for k, targets in stores.items() for t in targets]:
            if type(target) is Chunk and self.home(target) is not None:
                shown = target.device_value()
                if shown is None or array_library(shown) == "cupy":
                    raise PlanError(
                        f"{key!r} stores to a persisted array, which may leave its GPU at any "
                        "time: compute() it, and store to the array that this gives"
                    )
            elif array_library(target) == "cupy":
                device = self.home(target)
                if device is None:
                    raise PlanError(
                        f"{key!r} stores to an array on GPU {target.device.id}, which is none of "
                        "those that this runs on (the scheduler's, or the first num_workers of "
                        "them): store to an array on one of these, or to one of NumPy's"
                    )
                if out.setdefault(key, device) != device:
                    raise PlanError(
                        f"{key!r} stores to arrays on several GPUs, by tasks that Dask has fused: "
                        "store to one after the other"
                    )
        return out

    def _argument(self, key: Key, n: int, constants: dict[Key, dict[Key, Any]]) -> Any:
        """The n-th argument of a task, if it is a value of the graph, on a device or not."""
        return self._argument_value(key, self.tasks[key].args[n], constants)

    def _argument_value(self, key: Key, argument: Any, constants: dict[Key, dict[Key, Any]]) -> Any:
        """The value that an argument stands for."""
        if isinstance(argument, (TaskRef, Alias)):
            name = argument.key if isinstance(argument, TaskRef) else argument.target
            given = self.tasks.get(self.alias.get(name, name))
            argument = given if isinstance(given, DataNode) else constants[key].get(name)
        return argument.value if isinstance(argument, DataNode) else argument

    def _value(self, key: Key) -> Value:
        """The blocks in a value, as far as they are known."""
        if not self.lowered.layers:
            return None
        task = self.tasks.get(key)
        if stored_bytes(task) is not None:
            return None
        if selects_by_value(task):  # Dask says of the result that it has the chunks of the whole
            return None
        if type(key) is tuple:
            block = collection_block(self.lowered.layers.get(key[0]), key[1:])
            if block is not None:
                return block
        inner: Mapping[Key, Any] = {}
        if isinstance(task, Task) and task.func is execute_subgraph:
            inner, last = task.args[:2]
            task = inner.get(last)
        if not isinstance(task, Task):
            return None
        if task.func in SLICERS and len(task.args) > 1:
            source, index = task.args[:2]
            if not isinstance(source, (TaskRef, Alias)):
                return None
            (name,) = references(source)
            whole = self._read_value(name, inner, key)
            return indexed_value(whole, index.value if isinstance(index, DataNode) else index)
        function = linalg_shapes.name_of(task.func)
        if function not in linalg_shapes.MAKE or task.kwargs or holds_tasks(task.args):
            return None
        return linalg_value(
            function, [self._read_value(name, inner, key) for name in references(task)]
        )

    def _read_value(self, name: Key, inner: Mapping[Key, Any], key: Key) -> Value:
        """What is known of what a task reads: it, or one of the tasks that Dask fused with it."""
        if name not in inner:
            name = self.alias.get(name, name)
            return self.values[name] if name in self.values else self._value(name)
        if type(name) is str and type(key) is tuple:  # the array, and which of the axes of `key`
            _, *axes = name.split("_.")
            block = [key[1:][int(n)] for n in axes if n.isdigit() and int(n) < len(key) - 1]
            return collection_block(self.lowered.layers.get(layer_of(name)), tuple(block))
        return None

    def _largest_inside(self, order: list[Key]) -> dict[str, int]:
        """For each layer, the bytes of the largest value inside its fused tasks."""
        out: dict[str, int] = {}
        for key in order:
            task = self.tasks[key]
            if not (isinstance(task, Task) and task.func is execute_subgraph):
                continue
            if type(key) is tuple and key[0] not in out:
                inner = task.args[0]
                values = [self._read_value(name, inner, key) for name in inner]
                known = [b for b in values if isinstance(b, BlockInfo) and not b.is_sparse]
                out[key[0]] = max([b.nbytes for b in known], default=0)
        return out


class GraphOrCache:
    """Membership in the graph or in the cache, for Dask's converter of legacy tasks."""

    def __init__(self, *mappings: Mapping[Key, Any]):
        self.mappings = mappings

    def __contains__(self, key: object) -> bool:
        return any(key in m for m in self.mappings)


def _is_future(task: Any) -> bool:
    """Whether it stands for a value that a cluster holds."""
    if type(task) is Task or type(task) is TaskRef:
        return False
    return isinstance(task, TaskRef) or getattr(task, "__dask_future__", False)


def _may_be_alias(task: Any) -> bool:
    if isinstance(task, (int, float, str)):
        return True
    if type(task) is tuple:
        return not (task and callable(task[0]))
    return bool(getattr(task, "__dask_future__", False))


def _sort_keys(keys: frozenset[Key]) -> tuple[Key, ...]:
    """Sets have no order; plans do."""
    if len(keys) < 2:
        return tuple(keys)
    try:
        return tuple(sorted(keys))
    except TypeError:
        return tuple(sorted(keys, key=lambda k: (type(k).__name__, str(k))))


def key_lists(node: Any) -> Any:
    """Nested lists of keys from nested `List`s of `TaskRef`s; None where there is anything else."""
    if isinstance(node, TaskRef):
        return node.key
    if isinstance(node, NestedContainer) and node.klass is list:
        items = [key_lists(a) for a in node.args]
        return None if any(i is None for i in items) else items
    return None


def _numblocks(blocks: Any) -> list[int]:
    counts = []
    while isinstance(blocks, list):
        counts.append(len(blocks))
        blocks = blocks[0]
    return counts
