"""Fuse tasks into kernels: trace each structure once, inline producers, keep the reasons.

`FusionPass` goes through a graph once, in its order. It traces a task by its structure: its
functions, and the shapes and dtypes that it reads. What cannot be traced stays a task, with the
reason. Tasks with one reader, or whose value takes no memory, disappear into their readers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
from dask._task_spec import DataNode, Task, TaskRef
from dask.utils import key_split

from ..frontend.chunk import Chunk
from ..frontend.compiled_task import Chain
from ..frontend.graph import CUPY, NUMPY, RESIDENT, Graph, is_plain, layer_of
from ..frontend.task import sequence_of
from ..frontend.task_node import TaskNode
from ..frontend.transfers import SENDING, is_turned, referenced_keys
from ..ir.expr import Out
from ..tracing import context
from ..tracing.abstract import (
    AbstractArray,
    FlatArray,
    KnownArray,
    LibraryCall,
    ScannedArray,
    ViewedInput,
)
from ..tracing.array import MOST_OWN
from ..tracing.context import NOT_KNOWN
from ..tracing.functions.library import enter_scipy
from ..values import leaves, map_leaves
from .captured_inputs import CapturedInputs
from .compress import Selections
from .inline import MOST_READ, Inliner, Offers
from .random_draws import Draws
from .reads import Reads
from .recipe import Candidate, Recipe, array_kind, structure_words
from .source import (
    InlineSource,
    LibraryInputs,
    MatrixProductTask,
    StructureNumbers,
    TraceOutcome,
    select_worth_inlining,
    shared_arrays,
    stores_a_scan,
)
from .task import KernelTask, Key, OptionalTask, PairsTask, count_arrays
from .task_trace import TaskTracer

#: Traced structures per graph, beyond which the rest stays as it is. A trace takes a millisecond,
#: and a graph with more structures repeats too little to gain by it.
MOST_STRUCTURES = 2_000


@dataclass
class FusionPass:
    """Makes the tasks of one graph kernels."""

    graph: Graph
    #: Bytes that a task must touch to become a kernel.
    least: int = 0
    #: Operations that a task must do for each element.
    fewest: int = 1
    #: Whether tasks may disappear into their readers.
    merge: bool = True
    #: Whether two tasks are on one device.
    near: Callable[[Key, Key], bool] | None = None
    #: Whether kernels run on GPUs. There, products of matrices with vectors and copies of parts
    #: become kernels, too, since a launch may do several. Joined parts become one only there.
    on_gpus: bool = False
    #: The device that an array is on.
    home: Callable[[Any], int | None] | None = None
    #: By the layer of each task that is not traced: the layers that Dask has fused there in the
    #: order of their work, and the layers among them that cannot be traced.
    untraced: dict[str, tuple[list[str], set[str]]] = field(default_factory=dict)
    #: The layers among them whose functions a library of GPUs has, too.
    in_library: set[str] = field(default_factory=set)
    #: Tasks that stay as they are and only take a view of what they read.
    views: dict[Key, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.graph
        self.numbers = StructureNumbers()
        #: The outcome of each structure that was traced.
        self.structures: dict[Any, TraceOutcome] = {}
        #: Number and structure of each value.
        self.foreseen: dict[Key, tuple[int, Any]] = {}
        #: Number and structure of arrays, by type, dtype, shape and strides.
        self._described: dict[Any, tuple[int, Any] | None] = {}
        #: Traced tasks, whose parts are known by their ids and so must live on.
        self._alive: list[Any] = []
        #: Tasks that were split off others, by the task that each is in front of.
        self._in_front: dict[Key, Key] = {}
        self.reads = Reads(graph)
        self.draws = Draws(graph, self.numbers)
        self.offers = Offers(self.numbers, self.on_gpus)
        self.inliner = Inliner(graph, self.near, self.on_gpus)
        self.captured = CapturedInputs(graph, self.inliner.readers, self.home)
        self.selections = Selections(graph, self.inliner)
        self.tracer = TaskTracer(
            graph, self.numbers, self.reads, self.offers if self.merge else None, self.fewest,
            self.on_gpus,
        )  # fmt: skip

    def fuse(self) -> Graph:
        """Return the graph with kernels in place of tasks; changes it in place."""
        graph = self.graph
        if not graph.blocks:
            return graph
        if graph.resident:
            enter_scipy()
        graph.globals = self.reads.globals
        self.inliner.count_readers()
        order = list(graph.nodes)
        for key, node in list(graph.nodes.items()):
            task = node.task
            if isinstance(task, DataNode):
                known = self._describe_data(key, task)
                if known is not None:
                    self.foreseen[key] = known
            elif node.sent:
                self._foresee_sent(key, task)
            elif not self._fuse_task(key, self._split_off_scan_end(key)):
                self._split_off_draw(key, task)
                if self.reads.gives_pairs(task):
                    graph.replace(key, PairsTask(node.task))
                if node.block is not None and key not in self.foreseen:
                    self._foresee_block(key)
        if self._in_front:  # also in front of tasks that are inlined by now
            every = [k for key in order for k in (self._in_front.get(key), key)]
            graph.reorder([k for k in every if k in graph.nodes])
        self.captured.put_in_front()
        return graph

    def _split_off_draw(self, key: Key, task: Any) -> None:
        """Split the random numbers off the front of a chain that is not a kernel.

        They are drawn in a kernel all the same, on the device that reads them.
        """
        graph = self.graph
        (name, first), *rest = sequence_of(task)
        if not rest or self.draws.draw(first) is None:
            return
        drawn: Key = getattr(first, "key", None)
        node = graph.add(drawn, first)
        if not self._fuse_task(drawn, first):
            self._put_back(drawn, node)
            return
        graph.replace(key, Chain(rest) if len(rest) > 1 else rest[0][1])
        graph.rewire(key, (name,), (drawn,))
        self.inliner.readers[drawn] = 1
        self._in_front[key] = drawn

    def _put_back(self, key: Key, node: TaskNode) -> None:
        """Make a task that was split off an inner part of another task again."""
        graph = self.graph
        graph.drop(key)
        if node.size is not None:
            graph.inner_sizes[key] = node.size
        if node.block is not None:
            graph.inner_blocks[key] = node.block

    def _split_off_scan_end(self, key: Key) -> Any:
        """Split the last element of a scan off the task that adds it to something.

        Dask's scans have such tasks. Otherwise the sum of each block would be known only after the
        block before it.
        """
        graph = self.graph
        node = graph.nodes[key]
        task: Any = node.task
        if type(task) is not Task or task.kwargs or not self.inliner.sources:
            return task
        for n, part in enumerate(task.args):
            if type(part) is not Task or part.func is not operator.getitem or part.kwargs:
                continue
            name = referenced_keys(part.args[0])
            if name not in node.names or part.dependencies != {name}:
                continue
            at = node.names.index(name)
            target = node.needs[at]
            source = self.inliner.sources.get(target)
            if source is None or not isinstance(source.parts, ScannedArray):
                continue
            if not self.inliner.may_inline(target, key):
                continue
            others = task.args[:n] + task.args[n + 1 :]
            if any(name in getattr(a, "dependencies", ()) for a in others):
                continue
            new = (*key, "last") if isinstance(key, tuple) else (key, "last")
            end = Task(new, part.func, *part.args)
            graph.add(new, end, (target,), (name,))
            args = (*task.args[:n], TaskRef(new), *task.args[n + 1 :])
            task = Task(task.key, task.func, *args)
            graph.replace(key, task)
            names, needs = ((*f[:at], new, *f[at + 1 :]) for f in (node.names, node.needs))
            graph.rewire(key, names, needs)
            self.inliner.readers[new] = 1
            self._in_front[key] = new
            self._fuse_task(new, end)
            break
        return task

    # ---- the structures of values

    def _describe_data(self, key: Key, node: DataNode) -> tuple[int, Any] | None:
        """Return number and structure of a value, or of a persisted chunk."""
        value = node.value.value_on_device() if type(node.value) is Chunk else node.value
        if value is not None:
            return self._describe(value)
        block = self.graph.blocks.get(key)
        if block is None or block.is_sparse:
            return None
        structure = AbstractArray(block.shape, block.dtype)
        return self._number(structure), structure

    def _describe(self, value: Any) -> tuple[int, Any] | None:
        """Return number and structure of a value; None if kernels cannot read it."""
        alike = None
        if type(value).__name__ == "ndarray":  # many have one layout in memory
            alike = type(value), value.dtype, value.shape, value.strides
            if alike in self._described:
                return self._described[alike]
        structure = _structure_of(value)
        known = None if structure is None else (self._number(structure), structure)
        if alike is not None:
            self._described[alike] = known
        return known

    def _foresee(self, key: Key, structure: Any) -> None:
        if structure is not None:
            self.foreseen[key] = self._number(structure), structure

    def _foresee_block(self, key: Key) -> None:
        """Foresee the array that the collection tells of; sparse ones no kernel reads.

        Without axes it is taken for a scalar in a graph of NumPy's arrays on GPUs, as most
        functions give scalars. Nobody asks for its class there.
        """
        block = self.graph.blocks[key]
        if not block.is_sparse:
            scalar = self.graph.resident and block.shape == ()
            self._foresee(key, AbstractArray(block.shape, block.dtype, scalar=scalar))

    def _foresee_sent(self, key: Key, task: Any) -> None:
        """Foresee an array that is sent: without gaps, and with its axes in the same order."""
        array = task.args[0] if getattr(task, "func", None) in SENDING else None
        if not self.graph.resident or type(array) is not np.ndarray or not is_turned(array):
            self._foresee_block(key)
            return
        like = np.empty(array.shape, array.dtype, "F")
        strides = tuple([s // array.itemsize for s in like.strides])
        self._foresee(key, AbstractArray(array.shape, array.dtype, strides))

    def _foresee_traced(self, key: Key, makes: Any) -> None:
        """Foresee what a traced task makes that stays as it is.

        That need not be the one array that the collection tells of.
        """
        self._foresee(key, makes)
        if makes is not None and type(makes) is not AbstractArray:
            arrays = [leaf for leaf in leaves(makes) if isinstance(leaf, AbstractArray)]
            self.graph.note(key, size=sum([a.nbytes for a in arrays]))

    def _number(self, structure: Any) -> int:
        return self.numbers.number(structure_words(structure))

    # ---- one task

    def _fuse_task(self, key: Key, original: Any) -> bool:
        """Make a task a kernel, or offer its value to its readers.

        Return False where neither is possible.
        """
        graph = self.graph
        node = graph.nodes[key]
        targets = dict(zip(node.names, node.needs, strict=True))
        recipe = Recipe(self.draws, self.reads, original)
        task = Candidate(key, original, recipe, node.constants, targets)
        if not self._is_worth_tracing(task) or not self._find_inputs(task):
            return False
        unknown = {n: s for n, s in task.inlined.items() if task.inputs[n][1] is None}
        task, found = self._trace_inlined(task, unknown)
        if task.inlined and found.program is None and found.offer is None and not unknown:
            task = task.with_inlined({})
            found = self._trace_once(task)
        if found.program is None and found.reason.endswith(NOT_KNOWN):
            found = self._trace_with_values(task) or found
        if found.program is None:
            return self._keep_task(task, found)
        self._replace_task(task, found)
        return True

    def _is_worth_tracing(self, task: Candidate) -> bool:
        """Whether a task can be traced, and is large enough; otherwise keeps the reason."""
        key, recipe = task.key, task.recipe
        large = not self.least or bool(recipe.draws)
        large = large or self._count_bytes(task) >= self.least
        if recipe.reason:
            self.graph.note(key, why=recipe.reason)
            if large or self.graph.within.get(layer_of(key), 0) >= self.least:
                self._blame(key, recipe, recipe.impure_steps())
            return False
        if recipe.given and not recipe.names and not recipe.draws:
            # a trace would make the block, here and for each block anew
            self.graph.note(key, why="it makes a block by a function that it is given")
            self._blame(key, recipe)
            return False
        if not large:
            self.graph.note(key, why=f"it touches less than {self.least:,} bytes")
            self._blame(key, recipe)
            return False
        return True

    def _count_bytes(self, task: Candidate) -> int:
        """Return the bytes that a task reads and makes."""
        sizes, sources = self.graph.sizes, self.inliner.sources
        targets = task.targets.values()
        total = sizes.get(task.key, 0) + sum([sizes.get(t, 0) for t in targets])
        selected = [s for t in targets if (s := sources.get(t)) and s.is_selection]
        total += sum([e.nbytes for s in selected for e in leaves(s.expects)])
        return int(total + sum([getattr(c, "nbytes", 0) for c in task.constants.values()]))

    def _find_inputs(self, task: Candidate) -> bool:
        """Find the structure of each input, and which producers to inline.

        Return False, and keep the reason, where an input is not known.
        """
        recipe, inliner = task.recipe, self.inliner
        read = 0  # arrays, by what is inlined
        for n, name in enumerate(recipe.names):
            if name in task.constants:
                known = self._describe(task.constants[name])
            else:
                target = task.targets[name]
                known = self.foreseen.get(target)
                source = inliner.sources.get(target)
                more = 0 if source is None else count_arrays(source.expects)
                if source and read + more <= MOST_READ and inliner.may_inline(target, task.key):
                    task.inlined[n] = source
                    read += more
            if known is None and n not in task.inlined:
                why = f"what {key_split(name)} will be like is not known before it is there"
                self.graph.note(task.key, why=why)
                self._blame(task.key, recipe)
                return False
            task.inputs.append(known or (-1, None))
        return True

    def _trace_inlined(
        self, task: Candidate, unknown: dict[int, InlineSource]
    ) -> tuple[Candidate, TraceOutcome]:
        """Trace a task with its producers, except for producers that should store their values."""
        found = self._trace_once(task)
        if not task.inlined or found.program is None:
            return task, found
        worth = (
            select_worth_inlining(found.program, task.inlined, task.recipe.joins_inputs) | unknown
        )
        if stores_a_scan(found.program):  # each of its readers would store the scan, too
            shared = [n for n, s in worth.items() if isinstance(s.parts, ScannedArray)]
            shared = [n for n in shared if self.inliner.readers[task.target(n)] > 1]
            worth = {n: s for n, s in worth.items() if n not in shared}
        if len(worth) < len(task.inlined):
            task = task.with_inlined(worth)
            found = self._trace_once(task)
        rows = {n: s for n, s in task.inlined.items() if isinstance(s.parts, FlatArray)}
        if rows and found.program is not None:
            less = task.with_inlined({n: s for n, s in task.inlined.items() if n not in rows})
            without = self._trace_once(less)
            stores = len(found.program.kernels) > len(getattr(without.program, "kernels", ()))
            if (
                without.program is not None and stores
            ):  # it would store the rows, to have them on one axis
                task, found = less, without
        return task, found

    def _trace_with_values(self, task: Candidate) -> TraceOutcome | None:
        """Trace a task with the values of its small tables; None without a program."""
        known = list(task.inputs)
        for n, name in enumerate(task.recipe.names if self.on_gpus else ()):
            table = task.constants.get(name)
            if type(table) is not np.ndarray or not is_plain(table.dtype):
                continue
            if table.size > (not self.graph.resident) and table.nbytes <= MOST_OWN:
                words = "known", table.dtype, table.shape, table.tobytes()
                known[n] = self.numbers.number(words), KnownArray(table)
        if known == task.inputs:
            return None
        found = self._trace_once(task.with_inputs(known))
        of_library = found.library is not None or found.in_library
        return found if of_library or found.program is not None else None

    def _trace_once(self, task: Candidate) -> TraceOutcome:
        """Return what becomes of a task's structure, which is traced once."""
        recipe = task.recipe
        numbers = [number for number, _ in task.inputs]
        for n, source in task.inlined.items():
            numbers[n] = -1 - source.number
        draws = tuple([d.number for d in recipe.draws])
        words = (recipe.key, tuple(numbers), draws, shared_arrays(task.inlined.values()))
        found = self.structures.get(words)
        if found is None:
            if len(self.structures) >= MOST_STRUCTURES:
                return TraceOutcome(None, "the graph has too many structures")
            found = self.structures[words] = self._trace(task)
            self._alive.append(recipe.task)
        return found

    def _trace(self, task: Candidate) -> TraceOutcome:
        return self.tracer.trace(task)

    def _blame(self, key: Key, recipe: Recipe, culprits: Iterable[int] = ()) -> None:
        """Remember the steps of a task that cannot be traced: `culprits`, or all."""
        if layer_of(key) not in self.untraced:  # blocks of one array are alike
            names = [layer_of(step) for step in recipe.steps]
            untraceable = {names[n] for n in culprits if n >= 0}
            self.untraced[layer_of(key)] = names, untraceable or set(names)

    # ---- what the graph has in place of a task

    def _replace_task(self, task: Candidate, found: TraceOutcome) -> None:
        """Put a kernel into the graph, and take out the producers that it inlines."""
        graph, key, recipe, program = self.graph, task.key, task.recipe, found.program
        assert program is not None
        kind = array_kind(graph, task)
        captured = [self.captured.name_array(a, kind) for a in found.beside]
        names = task.own_names() + captured
        positions = [p for d in recipe.draws for p in d.positions]
        for source in task.inlined.values():
            names += source.names
            positions += source.positions
        if not names and kind not in (NUMPY, CUPY, RESIDENT):
            graph.note(key, why="whose arrays it makes is not known")
            return
        original = task.task
        if task.inlined:
            original = self.inliner.add_producers(task)
            self.inliner.rewire(task)
        for name, array in zip(captured, found.beside, strict=True):
            self.captured.add_input(key, name, array)
        if found.pairs:
            original = PairsTask(original)
        fused = KernelTask(
            key, program, tuple(names), found.expects, tuple(positions), kind, original
        )  # fmt: skip
        graph.replace(key, OptionalTask(fused) if found.or_none else fused)
        if self.on_gpus:
            self.captured.send_constants(fused, kind)
        if found.or_none:
            return
        graph.note(key, size=found.nbytes)
        self.foreseen[key] = found.number, found.makes
        if found.offer is not None and self.inliner.may_disappear(key):
            self.inliner.sources[key] = found.offer.for_block(fused.names, fused.positions, kind)

    def _keep_task(self, task: Candidate, found: TraceOutcome) -> bool:
        """Keep a task without a program, and its reason; whether readers may compute its value."""
        key, recipe = task.key, task.recipe
        graph = self.graph
        graph.note(key, why=found.reason)
        if found.operations:
            graph.note(key, operations=found.operations)
        if found.product is not None and not task.constants:
            left, right, dtype = found.product
            left, right = (m._replace(name=recipe.names[m.name]) for m in (left, right))
            if left.fits(right, graph.blocks.get(key)):
                graph.note(key, product=MatrixProductTask(left, right, dtype))
        if found.offer is not None and not recipe.draws:
            if not (self.on_gpus and self._compress(task, found.offer)):
                self.selections.offer_to_readers(task, found.offer)
            return True
        if found.product is not None:  # the task is a matrix product and nothing else
            return False
        if found.library is not None:
            graph.note(key, library=_library_inputs(task, found.library))
            self._foresee_traced(key, found.makes)
            return False
        if found.view is None:
            self._foresee_traced(key, found.makes)
            self._blame(key, recipe, {found.culprit})
            if found.in_library and found.culprit >= 0:
                self.in_library.add(layer_of(recipe.steps[found.culprit]))
            return False
        self.foreseen[key] = found.number, found.makes
        self.views[key] = map_leaves(_form_of_view, found.view)
        self._offer_view(task, found.view)
        return True

    def _compress(self, task: Candidate, offer: InlineSource | None) -> bool:
        """Make a task that selects by a mask two kernels, if it can be these."""
        # producers that take long are computed once, and not in both kernels
        cheap = {
            n: s for n, s in task.inlined.items() if s.little or s.free or task.inputs[n][1] is None
        }
        if len(cheap) < len(task.inlined):
            task = task.with_inlined(cheap)
            offer = self._trace_once(task).offer
        if offer is None or not offer.is_selection:
            return False
        if not self.selections.make_compress_task(task, offer):
            return False
        self.graph.note(task.key, why=None)
        return True

    def _offer_view(self, task: Candidate, seen: Any) -> None:
        """Offer a view to the readers of a task that only takes the view."""
        if not self.merge or not isinstance(seen, ViewedInput) or len(task.inputs) != 1:
            return
        if seen.scalar:
            return
        (name,), ((_, whole),) = task.recipe.names, task.inputs
        if name not in task.targets or not isinstance(whole, AbstractArray):
            return
        if self.inliner.may_disappear(task.key):
            self.inliner.sources[task.key] = self.offers.offer_view(name, seen, whole)


def _library_inputs(task: Candidate, call: LibraryCall) -> LibraryInputs:
    """Return a call with the names and structures of the inputs that it reads."""
    numbers = [v.array for v in call.arguments]
    names = tuple([task.recipe.names[n] for n in numbers])
    return LibraryInputs(call, names, tuple([task.inputs[n][1] for n in numbers]))


def regroup_layers(
    names: Sequence[str], untraceable: Set[str], library: Set[str] = frozenset()
) -> dict[str, str]:
    """Decide how to split layers that Dask has fused, as a word for each layer.

    Layers with different words become different tasks. Each run of two or more traceable layers
    gets no words, and becomes a kernel of its own. A single traceable layer stays with its
    neighbours in `untraceable`, which cannot be traced. Each layer in `library`, which a library of
    GPUs computes, is apart from all others.

    >>> regroup_layers(["read", "fft", "abs", "square", "sum"], {"fft"})
    {'read': 'read', 'fft': 'read'}
    >>> regroup_layers(["read", "fft", "sum"], {"fft"})
    {}
    >>> regroup_layers(["read", "fft", "sum"], {"read", "fft"}, {"fft"})
    {'read': 'read', 'fft': 'fft'}
    """
    if not library.isdisjoint(names) and len(names) > 1:
        return _regroup_around(names, untraceable, library)
    runs = [list(run) for _, run in itertools.groupby(names, key=untraceable.__contains__)]
    worth = [untraceable.isdisjoint(run) and len(run) > 1 for run in runs]
    out: dict[str, str] = {}
    if not any(worth):
        return out
    for kernel, group in itertools.groupby(zip(worth, runs, strict=True), key=itemgetter(0)):
        if not kernel:
            together = [name for _, run in group for name in run]
            out.update(dict.fromkeys(together, together[0]))
    return out


def _regroup_around(
    names: Sequence[str], untraceable: Set[str], library: Set[str]
) -> dict[str, str]:
    """Words for layers of which some are apart from all others."""
    out: dict[str, str] = {}
    for apart, run in itertools.groupby(names, key=library.__contains__):
        some = list(run)
        if apart:
            out.update({name: name for name in some})
        elif not untraceable.isdisjoint(some):
            out.update(regroup_layers(some, untraceable) or dict.fromkeys(some, some[0]))
    return out


def _form_of_view(seen: Any) -> Any:
    """Return the form of a view, as a program's result."""
    return Out(seen.array, seen.shape, seen.scalar) if isinstance(seen, ViewedInput) else seen


def _structure_of(value: Any) -> Any:
    """Return the structure of a value; None where it holds what no program can read."""
    if type(value) in (dict, list, tuple):
        parts = [_structure_of(v) for v in leaves(value)]
        if any(p is None for p in parts):
            return None
        return map_leaves(_structure_of, value)
    if isinstance(value, (int, float, complex, bool, str, np.generic)):
        return value
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    flags = getattr(value, "flags", None)
    if not isinstance(dtype, np.dtype) or not isinstance(shape, tuple) or flags is None:
        return None
    return None if isinstance(value, np.ma.MaskedArray) else context.abstract_of(value)
