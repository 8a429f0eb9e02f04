"""Build a `Graph` from Dask's tasks: cull, order, and note what is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, product
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
from dask._task_spec import _execute_subgraph as execute_subgraph
from dask.array.core import finalize
from dask.array.dispatch import to_numpy_dispatch
from dask.array.optimization import GETTERS, _optimize_slices
from dask.core import flatten
from dask.highlevelgraph import Layer, MaterializedLayer

from ..errors import PlanError
from . import linalg_shapes, transfers
from .captured import RANDOM
from .chunk import Chunk
from .compiled_task import Chain, SubgraphCompiler, references
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
    NOTHING,
    SLICERS,
    BlockInfo,
    Compile,
    GatherTask,
    Graph,
    Key,
    LoweredCollection,
    RandomDraw,
    Value,
    is_chunk,
    is_plain,
    layer_of,
    wanted_keys,
)
from .order import depth_first
from .shapes import (
    block_sizes,
    collection_block,
    holds_tasks,
    indexed_value,
    linalg_value,
    selects_by_value,
    stored_bytes,
)
from .transfers import SendExtractor, identity, referenced_keys, sent_key


def draws_random_numbers(task: Any) -> bool:
    return type(task) is Task and task.func in RANDOM


def holds_chunks(layer: Layer) -> bool:
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
        outputs = self._discover()
        needs, names, constants = self._edges()
        sources = {k: a for k in needs if (a := self._source(k, constants)) is not None}
        sent: dict[Key, Key] = {}  # steps, and one reader of each
        if self.send:
            sent = self._sent_arrays(needs, names, constants)
            if sources:
                sent |= self._sent_files(sources.keys() - set(outputs), needs, names)
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
        sizes = block_sizes(values | blocks, self.tasks)
        within = self._within(order)
        draws = self._draws(order)
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
            k: [self._given(k, a, constants) for a in found]
            for k in order
            if (found := store_targets(self.tasks[k], fused))
        }
        on_gpus = self._where_written(
            {k: [t] for k, t in zip(stores, targets, strict=True)} | stored
        )
        pins.update(on_gpus)
        targets += [t for found in stored.values() for t in found]
        fresh = {id(a): not any(may_be_same_store(a, t) for t in targets) for a in sources.values()}
        again = {k for k, a in sources.items() if fresh[id(a)]}
        aside = {*sources, *[k for k in stores if k not in on_gpus], *sent}
        for key in sent:
            if key in kept:  # it has to be somewhere at the end
                again.discard(key)
            elif key not in sources:
                array = self.tasks[key].args[0]
                if not any(may_be_same_store(array, t) for t in targets):
                    again.add(key)
        if self.lowered.fusable:
            # what follows runs on the device, and these beside it, or where an array is
            alone = kept.union(sent, on_gpus, stored)
            aside.update(on_gpus)
            files = aside, again
            order = _chain(
                order, self.tasks, needs, names, constants, pins, alone, files, compiler, self.apart
            )
            aside.difference_update(on_gpus)
        return Graph(
            {k: compiler(self.tasks[k]) for k in order},
            {k: needs[k] for k in order},
            {k: names[k] for k in order},
            {k: c for k in order if (c := constants[k])},
            self.wanted,
            outputs,
            {k: v for k, v in self.data.items() if k in kept},
            self.alias,
            pins,
            sizes,
            self.gathers,
            blocks,
            within,
            draws,
            aside=aside,
            stores=stores,
            written={*on_gpus, *stored},
            lent={k for k in on_gpus if stores_last(self.tasks[k])},
            again=again,
            sent=set(sent),
            gpus=self.gpus,
        )

    def _sent_arrays(
        self, needs: dict[Key, Any], names: dict[Key, Any], constants: dict[Key, dict[Key, Any]]
    ) -> dict[Key, Key]:
        """Put steps in front of tasks that begin with sending an array of the host to the device,
        and take this from them. These steps, and one reader of each."""
        out: dict[Key, Key] = {}
        send = SendExtractor()
        for key, given in [(k, c) for k, c in constants.items() if c]:
            for name, value in given.items():
                if (
                    type(value) not in (np.ndarray, np.memmap)
                    or value.nbytes < transfers.LEAST_SENT
                ):
                    continue
                task = send.without(self.tasks[key], name) if is_plain(value.dtype) else None
                if task is None:
                    continue
                if task.func is identity:  # it does nothing else
                    self.tasks[key] = Task(key, identity, value)
                    constants[key], out[key] = {}, key
                    break
                first = sent_key(self.alias.get(name, name))
                if first not in needs:
                    self.tasks[first] = Task(first, identity, value)
                    needs[first] = names[first] = ()
                    constants[first], out[first] = {}, key
                self.tasks[key] = task
                constants[key] = {d: v for d, v in constants[key].items() if d != name}
                needs[key], names[key] = (*needs[key], first), (*names[key], name)
        return out

    def _sent_files(
        self, sources: Set[Key], needs: Mapping[Key, Any], names: Mapping[Key, Any]
    ) -> dict[Key, Key]:
        """The blocks of files that go to their device at once, as all that read them would send
        them, and one reader of each. Takes it from these."""
        out: dict[Key, Key] = {}
        send = SendExtractor()
        readers: dict[Key, dict[Key, list[Key]]] = {}  # source -> reader -> its names there
        for key, inputs in needs.items():
            for name, d in zip(names[key], inputs, strict=True):
                if d in sources:
                    readers.setdefault(d, {}).setdefault(key, []).append(name)
        for key, reading in readers.items():
            block = self._value(key)
            if not isinstance(block, BlockInfo) or not is_plain(block.dtype):
                continue
            if block.nbytes < transfers.LEAST_SENT:
                continue
            if any(len(known_as) > 1 for known_as in reading.values()):
                continue
            tasks = {r: send.without(self.tasks[r], name) for r, (name,) in reading.items()}
            if all(t is not None for t in tasks.values()):
                self.tasks.update(tasks)
                out[key] = next(iter(reading))
        return out

    def _source(self, key: Key, constants: Mapping[Key, dict[Key, Any]]) -> Any:
        """The array in a file of which a task takes a block; None for other tasks."""
        array, _ = block_read(self.tasks[key], constants[key])
        return array if is_in_file(array) else None

    def _discover(self) -> tuple[Key, ...]:
        """Everything that is wanted, directly or not; the keys to compute for it."""
        outputs: dict[Key, None] = {}
        for key in self.wanted:
            target = self._resolve(key, None)
            gather = self._gather(target)
            if gather is None:
                outputs[target] = None
            else:
                if self.home is not None:
                    gather = replace(gather, blocks=self._brought_back(gather.blocks))
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
            value = chunk if self._is_here(task) else chunk.shown()
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

    def _brought_back(self, blocks: Any) -> Any:
        """Keys of blocks that are gathered. A persisted chunk gets a task that reads it, so that it
        is brought back when its turn comes, and written into the result by its device."""
        if isinstance(blocks, list):
            return [self._brought_back(b) for b in blocks]
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
                if reader is None:
                    raise KeyError(key)
                raise PlanError(
                    f"Missing dependency {key!r} of {reader!r}: neither the graph nor cache= has it"
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

    def _gather(self, key: Key) -> GatherTask | None:
        """Whether a wanted key is only the blocks of an array, put together."""
        task = self.dsk.get(key)
        if not (isinstance(task, Task) and task.func is finalize and len(task.args) == 1):
            return None
        blocks = key_lists(task.args[0])
        if blocks is None:
            return None
        flat = list(flatten(blocks))
        if not all(type(k) is tuple for k in flat):
            return None
        if len(flat) == 1 and not self._is_converted(flat[0]):  # Dask's task makes a copy
            return None
        layer = self.lowered.layers.get(flat[0][0])
        chunks = _known_chunks(layer)
        if chunks is not None and [len(c) for c in chunks] != _numblocks(blocks):
            chunks = None
        facts = (layer.collection_annotations if layer is not None else None) or {}
        # of what a mask selects Dask does not know the type: it says NumPy's
        of_numpy = chunks is not None and facts.get("chunk_type") == "numpy.ndarray"
        return GatherTask(key, blocks, chunks, of_numpy)

    def _is_converted(self, block: Key) -> bool:
        """Whether a block, of an array with axes, is fetched to the host by its own task."""
        task = self.dsk.get(self._resolve(block, None))
        return len(block) > 1 and isinstance(task, Task) and _without_conversion(task) is not None

    def _leave_on_device(self, needs: Mapping[Key, tuple[Key, ...]]) -> list[Key]:
        """Take `.to_backend("numpy")` off the blocks of a gather: the gather copies them itself.
        Which blocks these are.

        Each device then writes its blocks straight into the result, all at once, where the task
        would have waited for its own copy first.
        """
        read = {d for inputs in needs.values() for d in inputs}
        read.update(self.alias.get(k, k) for k in self.wanted)
        out: list[Key] = []
        for key, gather in self.gathers.items():
            blocks = [self.alias.get(b, b) for b in flatten(gather.blocks)]
            if gather.chunks is None or any(b in read or b not in self.tasks for b in blocks):
                continue
            bare = [_without_conversion(self.tasks[b]) for b in blocks]
            if all(t is not None for t in bare):
                self.tasks.update(zip(blocks, bare, strict=True))
                self.gathers[key] = replace(gather, to_host=True, converted=True)
                out += blocks
        return out

    def _edges(self) -> tuple[dict[Key, Any], dict[Key, Any], dict[Key, Any]]:
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
        pins = self.lowered.pins
        out = {k: pins[k] for k in order if pins.get(k) is not None} if pins else {}
        if self.front is not None:
            for key in self.wanted:
                if getattr(self.tasks.get(key), "func", None) is finalize:
                    out.setdefault(key, self.front)
        return out

    def _where_written(self, stores: Mapping[Key, list[Any]]) -> dict[Key, int]:
        """Of tasks that store to these, those that write to an array of a GPU: which device.

        They run there, as other tasks do: anywhere else they would write to a copy of it.
        """
        out: dict[Key, int] = {}
        if self.home is None or not self.gpus:
            return out
        for key, target in [(k, t) for k, targets in stores.items() for t in targets]:
            if type(target) is Chunk and self.home(target) is not None:
                shown = target.shown()
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
        return self._given(key, self.tasks[key].args[n], constants)

    def _given(self, key: Key, argument: Any, constants: dict[Key, dict[Key, Any]]) -> Any:
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
            whole = self._read(name, inner, key)
            return indexed_value(whole, index.value if isinstance(index, DataNode) else index)
        function = linalg_shapes.name_of(task.func)
        if function not in linalg_shapes.MAKE or task.kwargs or holds_tasks(task.args):
            return None
        return linalg_value(function, [self._read(name, inner, key) for name in references(task)])

    def _read(self, name: Key, inner: Mapping[Key, Any], key: Key) -> Value:
        """What is known of what a task reads: it, or one of the tasks that Dask fused with it."""
        if name not in inner:
            name = self.alias.get(name, name)
            return self.values[name] if name in self.values else self._value(name)
        if type(name) is str and type(key) is tuple:  # the array, and which of the axes of `key`
            _, *axes = name.split("_.")
            block = [key[1:][int(n)] for n in axes if n.isdigit() and int(n) < len(key) - 1]
            return collection_block(self.lowered.layers.get(layer_of(name)), tuple(block))
        return None

    def _within(self, order: list[Key]) -> dict[str, int]:
        out: dict[str, int] = {}
        for key in order:
            task = self.tasks[key]
            if not (isinstance(task, Task) and task.func is execute_subgraph):
                continue
            if type(key) is tuple and key[0] not in out:
                inner = task.args[0]
                values = [self._read(name, inner, key) for name in inner]
                out[key[0]] = max([b.nbytes for b in values if isinstance(b, BlockInfo)], default=0)
        return out

    def _draws(self, order: list[Key]) -> dict[Key, RandomDraw]:
        """Where each block of random numbers lies. What is drawn there may then depend on that, and
        on the seed of the first block, alone: not on how the array is cut up."""
        out: dict[Key, RandomDraw] = {}
        arrays: dict[str, Any] = {}
        for key in order:
            task = self.tasks[key]
            if type(task) is not Task or task.func not in RANDOM or type(key) is not tuple:
                continue
            name = key[0]
            if name not in arrays:
                arrays[name] = _whole_draw(self.lowered.layers.get(name), name)
            if arrays[name] is None:
                arrays.update(self._whole_draws)
                arrays.setdefault(name, None)
            if arrays[name] is not None:
                seed, shape, starts = arrays[name]
                start = tuple(s[i] for s, i in zip(starts, key[1:], strict=True))
                out[key] = RandomDraw(seed, shape, start)
        return out

    @cached_property
    def _whole_draws(self) -> dict[str, Any]:
        """The same for arrays that came without their layers: what all their blocks say."""
        blocks: dict[str, dict[tuple[int, ...], Any]] = {}
        for whole in self.lowered.wholes or [self.dsk]:
            for key, task in whole.items():
                if draws_random_numbers(task) and type(key) is tuple:
                    blocks.setdefault(key[0], {})[key[1:]] = task
        return {name: _put_together(found) for name, found in blocks.items()}


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


def _without_conversion(task: Any) -> Any:
    """The same task before its last step, `to_numpy_dispatch`; None where that is not its last."""
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


def _numblocks(blocks: Any) -> list[int]:
    counts = []
    while isinstance(blocks, list):
        counts.append(len(blocks))
        blocks = blocks[0]
    return counts


def _known_chunks(layer: Layer | None) -> tuple[tuple[int, ...], ...] | None:
    facts = layer.collection_annotations if layer is not None else None
    chunks = facts.get("chunks") if facts else None
    if chunks is None or any(math.isnan(c) for axis in chunks for c in axis):
        return None
    return tuple(tuple(int(c) for c in axis) for axis in chunks)


def _whole_draw(layer: Layer | None, name: str) -> Any:
    """Seed of the first block, shape and starts of the blocks of an array of random numbers."""
    chunks = _known_chunks(layer)
    first = None if layer is None or not chunks else layer.get((name, *[0] * len(chunks)))
    if not chunks or not isinstance(first, Task) or first.func not in RANDOM:
        return None
    if len(first.args[3]) != len(chunks):
        return None  # each draw is a vector
    starts = [[0, *accumulate(axis)] for axis in chunks]
    return first.args[2], tuple(sum(axis) for axis in chunks), starts


def _put_together(blocks: Mapping[tuple[int, ...], Any]) -> Any:
    """The same of an array of which there are only the tasks; None where some are missing."""
    counts = [max(axis) + 1 for axis in zip(*blocks, strict=True)]
    first = blocks.get((0,) * len(counts))
    if first is None or len(blocks) != math.prod(counts):
        return None
    if any(len(t.args[3]) != len(counts) for t in blocks.values()):
        return None
    if any(_number(t.args[2]) != n for n, t in _number_blocks(first.args[2], blocks, counts)):
        return None  # blocks at the end of an axis have been culled
    lengths = [
        [blocks[(0,) * k + (i,) + (0,) * (len(counts) - k - 1)].args[3][k] for i in range(n)]
        for k, n in enumerate(counts)
    ]
    starts = [[0, *accumulate(axis)] for axis in lengths]
    return first.args[2], tuple(sum(axis) for axis in lengths), starts


def _number_blocks(first: Any, blocks: Mapping[tuple[int, ...], Any], counts: list[int]) -> Any:
    """Blocks, with the number that the seed of each should have."""
    start = _number(first)
    for n, index in enumerate(product(*map(range, counts))):
        yield None if start is None else start + n, blocks[index]


def _number(seed: Any) -> int | None:
    """Which of all seeds that were made for an array this is; None where it does not tell."""
    if isinstance(seed, np.random.SeedSequence):
        return int(seed.spawn_key[-1]) if seed.spawn_key else None
    base = getattr(seed, "base", None)
    if isinstance(base, np.ndarray):
        return (_address(seed) - _address(base)) // max(int(seed.nbytes), 1)
    return None


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _chain(
    order: list[Key],
    tasks: dict[Key, Any],
    needs: dict[Key, tuple[Key, ...]],
    names: dict[Key, tuple[Key, ...]],
    constants: dict[Key, dict[Key, Any]],
    pins: dict[Key, int],
    kept: set[Key],
    files: tuple[set[Key], set[Key]],
    compiler: Compile,
    apart: Mapping[str, str],
) -> list[Key]:
    """Make each linear run of tasks one step, as Dask's `fuse_linear` would, without rewriting it.

    A run does not cross from one pin to another, and does not swallow what the caller wants. A run
    is of layers that have the same word in `apart`, or none. What reads a file may only be sliced
    in the same run, and what writes one is a run by itself; a run that reads a file is put into the
    sets in `files`.
    """
    aside, again = files
    readers: dict[Key, int] = {}
    for key in order:
        for d in needs[key]:
            readers[d] = readers.get(d, 0) + 1
    below: dict[Key, Key] = {}  # task -> the one task whose only reader it is
    pin: dict[Key, int | None] = {}  # ... and where the run that ends in it must be
    for key in order:
        own = pins.get(key)
        if len(needs[key]) == 1:
            (d,) = needs[key]
            agree = own is None or pin[d] is None or own == pin[d]
            fits = agree and readers[d] == 1 and d not in kept
            fits = fits and not isinstance(tasks[d], DataNode)  # a value is not a task to run
            fits = fits and key not in aside
            fits = fits and not (apart and apart.get(layer_of(key)) != apart.get(layer_of(d)))
            fits = fits and (d not in aside or getattr(tasks[key], "func", None) in SLICERS)
            if fits and not tasks[key].block_fusion and not tasks[d].block_fusion:
                below[key] = d
                for kind in files:
                    if d in kind:
                        kind.add(key)
                own = pin[d] if own is None else own
        pin[key] = own
    if not below:
        return order
    inner = set(below.values())
    out = []
    for key in order:
        if key in inner:
            continue
        if key in below:
            run = [key]
            while run[-1] in below:
                run.append(below[run[-1]])
            run.reverse()
            _join(run, tasks, needs, names, constants, compiler)
            where = pin[key]
            if where is not None:
                pins[key] = where
        out.append(key)
    return out


def _join(
    run: list[Key],
    tasks: dict[Key, Any],
    needs: dict[Key, tuple[Key, ...]],
    names: dict[Key, tuple[Key, ...]],
    constants: dict[Key, dict[Key, Any]],
    compiler: Compile,
) -> None:
    first, last = run[0], run[-1]
    aliased = any(names[k] != needs[k] for k in run[1:])
    reading = sum(isinstance(tasks[k], Task) and tasks[k].func in GETTERS for k in run)
    if reading > 1 and not aliased:
        # Dask merges repeated slices so that a file is read once, and only where needed
        fused = Task.fuse(*(tasks[k] for k in run), key=last)
        tasks[last] = compiler(_optimize_slices({last: fused})[last])
    else:
        known_as = [*(names[k][0] for k in run[1:]), last]
        tasks[last] = Chain(list(zip(known_as, (compiler(tasks[k]) for k in run), strict=True)))
    merged: dict[Key, Any] = {}
    for k in run:
        merged.update(constants[k])
    constants[last], needs[last], names[last] = merged, needs[first], names[first]
