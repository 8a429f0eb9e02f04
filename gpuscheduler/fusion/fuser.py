"""Fuse tasks into kernels: trace each structure once, inline producers, keep the reasons.

What a chunk function does to symbolic arrays is a program for the device.

A task is followed once per structure (its functions, and the shapes and dtypes that it reads); what
cannot be followed stays as it is, and the reason is kept. A task that only one other reads, and
those that need no memory, disappear into their readers. Blocks of random numbers are drawn by
their position, so that they do not depend on how an array is cut up.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from dask._task_spec import DataNode, Task, TaskRef
from dask.utils import key_split

from ..codegen.cuda.kernel import unwritten
from ..frontend import index_lists
from ..frontend.captured import RANDOM, content
from ..frontend.chunk import Chunk
from ..frontend.compiled_task import Chain, literal
from ..frontend.graph import BlockInfo, Graph, RandomDraw, is_plain, layer_of
from ..frontend.transfers import referenced_keys
from ..ir import expr as ir_expr
from ..ir import random
from ..ir.expr import (
    PLACEHOLDER,
    Expr,
    Kernel,
    Out,
    Program,
    View,
    nodes,
    rebuilt,
    view_of,
    with_view,
)
from ..ir.rewrite import renumber_arrays, renumber_leaf
from ..tracing import context, purity, trace
from ..tracing.abstract import (
    AbstractArray,
    FlatArray,
    GeneratedArray,
    KnownArray,
    MaskedPoints,
    MatrixProductArray,
    ScannedArray,
    ViewedInput,
)
from ..tracing.array import FEW, MOST_OWN
from ..tracing.context import (
    MOST_NODES,
    NOT_KNOWN,
    CompressTrace,
    MatrixProductTrace,
    NotTraceable,
    OptionalTrace,
    ViewTrace,
    squeezed_axes,
    view_over,
)
from ..values import leaves, map_leaves, sizeof
from .legality import (
    has_windows_over_edges,
    is_mosaic,
    operations_per_point,
    pays_as_kernel,
    reads_too_many_places,
    unreadable,
)
from .random_draws import generator_kind, plain_arguments
from .recipe import Recipe, reads_with_inlined, structure_words, tile_of
from .source import (
    BORROWED,
    LITTLE_WORK,
    InlineSource,
    MatrixInput,
    MatrixProductTask,
    TraceOutcome,
    UnfusedTask,
    is_cheaper_computed,
    lend_source,
    return_arrays,
    shared_arrays,
    sliced_share,
    stores_a_scan,
    work_per_element,
    worth_inlining,
)
from .task import (
    PAIRING,
    CompressTask,
    KernelTask,
    Key,
    OptionalTask,
    PairsTask,
    TaskWithProducers,
    Values,
    count_arrays,
    original_task,
    placeholder,
    task_function,
)

#: First part of the names of arrays that functions read beside what they are given.
BESIDE = "beside"
#: Bytes of a list that stays on its device as long as its plan; larger ones are sent in each run.
MOST_KEPT = 2**20
#: Followed structures per graph, beyond which the rest stays as it is: following takes a
#: millisecond, and such a graph repeats too little to gain by it.
MOST_STRUCTURES = 2_000
#: Arrays that a task may read because of what disappears into it: its kernel has an argument for
#: each, and they are all there at once.
MOST_READ = 64
#: Numbers of each element that a mask selects, at most, for kernels to pick it out.
MOST_COLUMNS = 8


# ---- the pass


@dataclass
class FusionPass:
    """Follows the tasks of one graph.

    `least` is how many bytes a task must touch to be worth a program, and `fewest` how many
    operations it must do for each element. `philox` has random numbers drawn by position; with
    `merge`, tasks may disappear into their readers. Without `follow`, nothing but random numbers
    becomes a program: what is drawn does not depend on it.
    """

    graph: Graph
    least: int = 0
    fewest: int = 1
    philox: bool = True
    merge: bool = True
    follow: bool = True
    near: Callable[[Key, Key], bool] | None = None  # whether two tasks are on one device
    #: There, products of arrays with vectors are programs, too, and what copies a part: a
    #: launch may do several. What joins such parts is one there only.
    on_gpus: bool = False
    home: Callable[[Any], int | None] | None = None  # the device that an array is on
    reasons: dict[Key, str] = field(default_factory=dict)  # why tasks stay as they are
    operations: dict[Key, int] = field(default_factory=dict)  # of those that multiply matrices
    #: Of tasks that are not followed, by the layer of each: the layers that Dask has fused there in
    #: the order of their work, and those of them that keep it from being followed.
    unfollowed: dict[str, tuple[list[str], set[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.structures: dict[Any, TraceOutcome] = {}
        self.foreseen: dict[Key, tuple[int, Any]] = {}  # number and structure of a value
        self.sources: dict[Key, InlineSource] = {}
        self.numbers: dict[Any, int] = {}
        self.pickers: dict[Any, tuple[Program, tuple[int, ...]] | None] = {}
        self.seeds: dict[int, int] = {}
        self.literals: dict[int, Any] = {}
        self.impure: dict[int, str | None] = {}
        self.unfit: dict[int, str | None] = {}
        self.pairing: dict[int, bool] = {}
        self.drawn: dict[Any, tuple[Expr | None, int]] = {}
        self.given: dict[Any, tuple[int, Any] | None] = {}  # what arrays that are there are like
        self.lengths: dict[int, tuple[Expr, int]] = {}  # the numbers along one axis of a tile
        self.alive: list[Any] = []  # what is known by its id must live on
        self.before: dict[Key, Key] = {}  # tasks that were put in front of others
        #: Arrays that functions read, by their id, and by whether they are sent.
        self.beside: dict[tuple[int, bool], tuple[Key, Any]] = {}
        self.given_to: Counter[int] | None = None  # how many tasks, by the id of a constant
        self.nodes: dict[Key, Any] = {}  # ... those that are on devices, or sent there
        self.globals: list[Any] = []
        self.read: set[tuple[int, str, int]] = set()  # which these are: each is looked at once
        self.readers: dict[Key, int] = {}
        self.takers: dict[Key, list[Key]] = {}  # the readers themselves, when it was asked for them
        self.outputs = set(self.graph.outputs)

    def fused(self) -> Graph:
        """The graph with programs in place of tasks. Changes it."""
        graph = self.graph
        if not graph.blocks and not graph.draws:
            return graph
        graph.why, graph.globals = self.reasons, self.globals
        graph.operations = self.operations
        for inputs in graph.needs.values():
            for d in inputs:
                self.readers[d] = self.readers.get(d, 0) + 1
        order = list(graph.tasks)
        for key, task in list(graph.tasks.items()):
            if isinstance(task, DataNode):
                known = self._value_of(key, task)
                if known is not None:
                    self.foreseen[key] = known
            elif key in graph.sent:
                block = graph.blocks[key]
                self._foresee(key, AbstractArray(block.shape, block.dtype))
            elif not ((self.follow or self._placed(task)) and self._task(key, self._apart(key))):
                self._split(key, task)
                if self.follow and self._pairs(task):
                    graph.tasks[key] = PairsTask(graph.tasks[key])
                if key in graph.blocks and key not in self.foreseen:
                    block = graph.blocks[key]
                    self._foresee(key, AbstractArray(block.shape, block.dtype))
        if self.before:  # also in front of what has disappeared into its readers by now
            order = [k for key in order for k in (self.before.get(key), key) if k in graph.tasks]
            graph.tasks = {k: graph.tasks[k] for k in order}
        if self.nodes:
            self._put_beside({k: n for k, n in self.nodes.items() if self.readers[k]})
        return graph

    def _put_beside(self, nodes: dict[Key, Any]) -> None:
        graph = self.graph
        graph.put_in_front(nodes)
        for key, node in nodes.items():
            if type(node) is DataNode and type(node.value) is np.ndarray:
                graph.sent.add(key)
            if type(node) is Task:
                (array,) = node.args
                graph.blocks[key] = BlockInfo(array.shape, array.dtype, "cupy.ndarray")
                graph.sizes[key] = array.nbytes
                graph.aside.add(key)
                graph.sent.add(key)
                if not graph.stores and not graph.written:  # whose target it may be
                    graph.again.add(key)

    def _split(self, key: Key, task: Any) -> None:
        """Take the random numbers off the front of a chain that is not a program: they are drawn by
        position all the same."""
        graph = self.graph
        if type(task) is not Chain or self.draw(task.tasks[0][1]) is None:
            return
        (name, first), *rest = task.tasks
        drawn: Key = getattr(first, "key", None)
        graph.names[drawn], graph.needs[drawn] = (), ()
        if not self._task(drawn, first):
            del graph.names[drawn], graph.needs[drawn]
            return
        graph.tasks[key] = Chain(rest) if len(rest) > 1 else rest[0][1]
        graph.names[key], graph.needs[key] = (name,), (drawn,)
        self.readers[drawn] = 1
        self.before[key] = drawn

    def _apart(self, key: Key) -> Any:
        """A task that adds the last of a scan to something, as Dask's do: the last is a task of its
        own, or what each block comes to would be known one block after the other."""
        graph = self.graph
        task = graph.tasks[key]
        if type(task) is not Task or task.kwargs or not self.sources:
            return task
        for n, part in enumerate(task.args):
            if type(part) is not Task or part.func is not operator.getitem or part.kwargs:
                continue
            name = referenced_keys(part.args[0])
            if name not in graph.names[key] or part.dependencies != {name}:
                continue
            at = graph.names[key].index(name)
            target = graph.needs[key][at]
            source = self.sources.get(target)
            if source is None or not isinstance(source.parts, ScannedArray):
                continue
            if not self._may_inline(target, key):
                continue
            others = task.args[:n] + task.args[n + 1 :]
            if any(name in getattr(a, "dependencies", ()) for a in others):
                continue
            new = (*key, "last") if isinstance(key, tuple) else (key, "last")
            graph.tasks[new] = Task(new, part.func, *part.args)
            graph.names[new], graph.needs[new] = (name,), (target,)
            args = (*task.args[:n], TaskRef(new), *task.args[n + 1 :])
            graph.tasks[key] = task = Task(task.key, task.func, *args)
            for facts in (graph.names, graph.needs):
                facts[key] = (*facts[key][:at], new, *facts[key][at + 1 :])
            self.readers[new] = 1
            self.before[key] = new
            self._task(new, graph.tasks[new])
            break
        return task

    def _value_of(self, key: Key, node: DataNode) -> tuple[int, Any] | None:
        """Number and structure of a value; of a persisted chunk, also while it is away."""
        value = node.value.shown() if type(node.value) is Chunk else node.value
        if value is not None:
            return self._given(value)
        block = self.graph.blocks.get(key)
        structure = None if block is None else AbstractArray(block.shape, block.dtype)
        return None if structure is None else (self._number(structure), structure)

    def _foresee(self, key: Key, structure: Any) -> None:
        if structure is not None:
            self.foreseen[key] = self._number(structure), structure

    def _given(self, value: Any) -> tuple[int, Any] | None:
        """Number and structure of a value that is there."""
        alike = None
        if type(value).__name__ == "ndarray":  # of which many lie in memory alike
            alike = type(value), value.dtype, value.shape, value.strides
            if alike in self.given:
                return self.given[alike]
        structure = _abstract(value)
        known = None if structure is None else (self._number(structure), structure)
        if alike is not None:
            self.given[alike] = known
        return known

    def _number(self, structure: Any) -> int:
        return self.numbers.setdefault(structure_words(structure), len(self.numbers))

    # ---- one task

    def _task(self, key: Key, task: Any) -> bool:
        """Make a task a program, if it can be one."""
        graph = self.graph
        recipe = Recipe(self, task)
        constants = graph.constants.get(key, {})
        targets = dict(zip(graph.names[key], graph.needs[key], strict=True))
        large = not self.least or bool(recipe.draws)
        large = large or self._touched(key, targets, constants) >= self.least
        if recipe.reason:
            self.reasons[key] = recipe.reason
            if large or graph.within.get(layer_of(key), 0) >= self.least:
                self._blame(key, recipe, recipe.impure_steps())
            return False
        if recipe.given and not recipe.names and not recipe.draws:
            # to look at it would be to make its block, here and for each block anew
            self.reasons[key] = "it makes a block by a function that it is given"
            self._blame(key, recipe)
            return False
        if not large:
            self.reasons[key] = f"it touches less than {self.least:,} bytes"
            self._blame(key, recipe)
            return False
        plain: list[tuple[int, Any]] = []
        inlined: dict[int, InlineSource] = {}
        read = 0  # arrays, by what is inlined
        for n, name in enumerate(recipe.names):
            if name in constants:
                known = self._given(constants[name])
            else:
                target = targets[name]
                known = self.foreseen.get(target)
                source = self.sources.get(target)
                more = 0 if source is None else count_arrays(source.expects)
                if source and read + more <= MOST_READ and self._may_inline(target, key):
                    inlined[n] = source
                    read += more
            if known is None and n not in inlined:
                self.reasons[key] = (
                    f"what {key_split(name)} will be like is not known before it is there"
                )
                self._blame(key, recipe)
                return False
            plain.append(known or (-1, None))
        unknown = {n: s for n, s in inlined.items() if plain[n][1] is None}
        found = self._follow(recipe, plain, inlined)
        if inlined and found.program is not None:
            worth = worth_inlining(found.program, inlined, recipe.joins) | unknown
            if stores_a_scan(found.program):  # and so would each of its readers
                shared = [n for n, s in worth.items() if isinstance(s.parts, ScannedArray)]
                shared = [n for n in shared if self.readers[targets[recipe.names[n]]] > 1]
                worth = {n: s for n, s in worth.items() if n not in shared}
            if len(worth) < len(inlined):
                inlined = worth
                found = self._follow(recipe, plain, inlined)
            rows = {n: s for n, s in inlined.items() if isinstance(s.parts, FlatArray)}
            if rows and found.program is not None:
                less = {n: s for n, s in inlined.items() if n not in rows}
                without = self._follow(recipe, plain, less)
                stores = len(found.program.kernels) > len(getattr(without.program, "kernels", ()))
                if without.program is not None and stores:  # its rows, to have them on one axis
                    inlined, found = less, without
        if inlined and found.program is None and found.offer is None and not unknown:
            inlined = {}
            found = self._follow(recipe, plain, inlined)
        if found.program is None and found.reason.endswith(NOT_KNOWN):
            found = self._followed_with_values(recipe, plain, inlined, constants) or found
        if found.program is None:
            self.reasons[key] = found.reason
            if found.operations:
                self.operations[key] = found.operations
            if found.product is not None and not constants:
                left, right, dtype = found.product
                left, right = (m._replace(name=recipe.names[m.name]) for m in (left, right))
                graph.products[key] = MatrixProductTask(left, right, dtype)
            if found.offer is not None and not recipe.draws:
                if not self._picks(key, task, recipe, found.offer, plain, inlined, targets):
                    self._selects(key, task, recipe, found.offer, inlined, targets)
                return True
            if found.product is not None:  # it is that and nothing else
                return False
            if found.view is None:
                self._stays(key, found.makes)
                self._blame(key, recipe, {found.culprit})
                return False
            self._view(key, recipe, found, plain, targets)
            return True
        self._settle(key, task, recipe, found, inlined, targets)
        return True

    def _followed_with_values(
        self,
        recipe: Recipe,
        plain: list[tuple[int, Any]],
        inlined: dict[int, InlineSource],
        constants: dict[Key, Any],
    ) -> TraceOutcome | None:
        """A task that is followed if the values of small tables that it is given are known."""
        known = list(plain)
        for n, name in enumerate(recipe.names if self.on_gpus else ()):
            table = constants.get(name)
            if type(table) is not np.ndarray or not is_plain(table.dtype):
                continue
            if table.size > 1 and table.nbytes <= MOST_OWN:
                words = "known", table.dtype, table.shape, table.tobytes()
                known[n] = self.numbers.setdefault(words, len(self.numbers)), KnownArray(table)
        if known == plain:
            return None
        found = self._follow(recipe, known, inlined)
        return None if found.program is None else found

    def _blame(self, key: Key, recipe: Recipe, culprits: Iterable[int] = ()) -> None:
        """Remember which steps of a task are not followed: if it is none of them, it is all."""
        if layer_of(key) not in self.unfollowed:  # blocks of one array are alike
            names = [layer_of(step) for step in recipe.steps]
            strange = {names[n] for n in culprits if n >= 0}
            self.unfollowed[layer_of(key)] = names, strange or set(names)

    def _touched(self, key: Key, targets: dict[Key, Key], constants: dict[Key, Any]) -> int:
        sizes = self.graph.sizes
        total = sizes.get(key, 0) + sum([sizes.get(t, 0) for t in targets.values()])
        selected = [s for t in targets.values() if (s := self.sources.get(t)) and s.selects]
        total += sum([e.nbytes for s in selected for e in leaves(s.expects)])
        return int(total + sum([getattr(c, "nbytes", 0) for c in constants.values()]))

    def _may_inline(self, target: Key, reader: Key) -> bool:
        source, readers = self.sources[target], self.readers[target]
        if not (source.free or readers == 1):
            times = self._in_slices(target, reader) if source.little else None
            if not is_cheaper_computed(source, readers if times is None else times):
                return False
        if not source.far:
            return True
        # a small part of something large: if that is elsewhere, only the part should come
        graph, near = self.graph, self.near
        whole = [d for d in graph.needs[target] if d not in graph.beside]
        return near is not None and all(near(reader, d) for d in whole)

    def _in_slices(self, target: Key, reader: Key) -> float | None:
        """How often a block is read as a whole by slices of it, as steps of a change of chunks have
        them; None where anybody reads it otherwise, and it is stored anyway. Each reader asks: not
        where there are very many."""
        graph, shape = self.graph, self.sources[target].shape
        many = self.readers[target] > MOST_READ
        if many or not self.on_gpus or sliced_share(graph.tasks[reader], shape) is None:
            return None
        if not self.takers:
            for key, inputs in graph.needs.items():
                for d in inputs:
                    self.takers.setdefault(d, []).append(key)
        left = [k for k in self.takers.get(target, ()) if target in graph.needs.get(k, ())]
        if len(left) != self.readers[target]:  # others read it by now
            return None
        parts = [sliced_share(graph.tasks[k], shape) for k in left]
        return None if None in parts else sum(parts)  # type: ignore[arg-type]

    def _stays(self, key: Key, makes: Any) -> None:
        """Foresee what a task makes that was followed and stays as it is: not always the one array
        that the collection tells of."""
        self._foresee(key, makes)
        if makes is not None and type(makes) is not AbstractArray:
            arrays = [leaf for leaf in leaves(makes) if isinstance(leaf, AbstractArray)]
            self.graph.sizes[key] = sum([a.nbytes for a in arrays])

    def _follow(
        self, recipe: Recipe, plain: list[tuple[int, Any]], inlined: dict[int, InlineSource]
    ) -> TraceOutcome:
        numbers = [number for number, _ in plain]
        for n, source in inlined.items():
            numbers[n] = -1 - source.number
        draws = tuple([d.number for d in recipe.draws])
        words = (recipe.key, tuple(numbers), draws, shared_arrays(inlined.values()))
        found = self.structures.get(words)
        if found is None:
            if len(self.structures) >= MOST_STRUCTURES:
                return TraceOutcome(None, "the graph has too many structures")
            found = self.structures[words] = self._followed(recipe, plain, inlined)
            self.alive.append(recipe.task)
        return found

    def _followed(
        self, recipe: Recipe, plain: list[tuple[int, Any]], inlined: dict[int, InlineSource]
    ) -> TraceOutcome:
        """Run a task on symbolic arrays."""
        draws, arrays, shared = 0, 0, shared_arrays(inlined.values())
        arguments: list[Any] = []
        borrowed: list[InlineSource] = []
        generated: list[Any] = []
        for source in recipe.draws:
            generated.append(lend_source(source, draws, arrays))
            draws += len(source.positions)
        for n, (_, structure) in enumerate(plain):
            if n in inlined:
                source = inlined[n]
                arguments.append(lend_source(source, draws, arrays, shared))
                draws += len(source.positions)
                arrays += count_arrays(source.expects)
                borrowed.append(source)
            else:
                arguments.append(structure)
        count = len(arguments)
        every = [*arguments, *generated]
        own = [known for n, known in enumerate(plain) if n not in inlined]

        def call(*values: Any) -> Any:
            return recipe.perform(values[:count], values[count:])

        def product(made: MatrixProductArray) -> MatrixProductTask | None:
            plain = not (borrowed or generated or beside.arrays)
            return _of_matrices(made, arguments) if plain else None

        copies, or_none, beside = False, False, context.CapturedArrays(dense=self.on_gpus)
        try:
            try:
                program = trace.trace_function(call, every, self.on_gpus, beside, matrices=product)
            except NotTraceable as error:
                known = isinstance(error, (ViewTrace, CompressTrace, OptionalTrace))
                if known or not (beside.left or beside.wanted):
                    raise
                beside = context.CapturedArrays(dense=self.on_gpus, every=True)
                program = trace.trace_function(call, every, self.on_gpus, beside, matrices=product)
        except ViewTrace as error:
            if beside.arrays:
                return TraceOutcome(None, str(error))
            if not (self.on_gpus and _is_copy(error.result, arguments)):
                makes = map_leaves(_laid, error.result)
                return TraceOutcome(
                    None, str(error), makes, number=self._number(makes), view=error.result
                )
            program, copies = error.program, True
        except CompressTrace as error:
            expects = _read([s for _, s in own], borrowed)
            offer = None
            if self.merge and not beside.arrays and _are_arrays(expects):
                self._note(beside.left)
                first = count_arrays(expects) - arrays
                offer = self._offered_selection(error.masked, expects, first)
            return TraceOutcome(None, str(error), offer=offer)
        except OptionalTrace as error:
            program, or_none = error.program, True
        except MatrixProductTrace as error:
            made = None if error.product is None else product(error.product)
            return TraceOutcome(None, str(error), operations=error.operations, product=made)
        except NotTraceable as error:
            culprit = recipe.step_of(error)
            return TraceOutcome(None, str(error), operations=error.operations, culprit=culprit)
        too_much = reads_too_many_places if self.on_gpus else has_windows_over_edges
        if any(map(too_much, program.kernels)):
            again = context.CapturedArrays(dense=self.on_gpus, every=beside.every)
            with suppress(NotTraceable):
                program = trace.trace_function(call, every, self.on_gpus, again, whole=True)
                beside = again
        makes = _made_by(program)
        number = self._number(makes)
        stays = partial(TraceOutcome, None, makes=None if or_none else makes, number=number)
        if reason := unreadable(program):
            return stays(reason)
        if self.on_gpus and (reason := next(filter(None, map(unwritten, program.kernels)), None)):
            return stays(f"there is no kernel for {reason}")
        if (
            not self.on_gpus
            and not generated
            and any(is_mosaic(k) or has_windows_over_edges(k) for k in program.kernels)
        ):
            return stays("it joins parts of arrays: NumPy does it faster than to choose")
        few = not copies and not generated and not borrowed
        if few and operations_per_point(program) < self.fewest and not pays_as_kernel(program):
            return stays("it is one operation: NumPy's own is as fast")
        program = return_arrays(program, arrays)
        self._note(beside.left)
        others = beside.expected

        def held(v: Any, array: Any) -> int:
            if isinstance(v, Out) and (self.on_gpus or not v.scalar):
                return int(array.nbytes)
            return 0 if self.on_gpus else sizeof(0.0 if isinstance(v, Out) else v)

        pairs = zip(leaves(program.result), leaves(makes), strict=True)
        nbytes = sum([held(*pair) for pair in pairs])
        expects = _read([*[s for _, s in own], *others], borrowed)
        found = TraceOutcome(
            program, "", makes, nbytes, number, expects,
            pairs=self._pairs(recipe.task), beside=tuple(beside.arrays), or_none=or_none,
        )  # fmt: skip
        found.offer = None if or_none else self._offered(found)
        if found.offer is not None and copies:  # each reader may as well read the whole
            found.offer.free = True
        return found

    def _note(self, arrays: Iterable[Any]) -> None:
        """Remember arrays whose values are part of a program by now."""
        for array in arrays:
            if id(array) not in self.graph.values:
                self.graph.values[id(array)] = array, content(array)

    def _settle(
        self,
        key: Key,
        task: Any,
        recipe: Recipe,
        found: TraceOutcome,
        inlined: dict[int, InlineSource],
        targets: dict[Key, Key],
    ) -> None:
        """Put the program into the graph, and take out what has disappeared into it."""
        graph, program = self.graph, found.program
        assert program is not None
        names = [name for n, name in enumerate(recipe.names) if n not in inlined]
        kind = self._kind(key, recipe, inlined)
        beside = [self._beside(a, kind) for a in found.beside]
        names += beside
        positions = [p for d in recipe.draws for p in d.positions]
        for source in inlined.values():
            names += source.names
            positions += source.positions
        if not names and kind not in ("numpy.ndarray", "cupy.ndarray"):
            self.reasons[key] = "whose arrays it makes is not known"
            return
        original = task
        if inlined:
            original = self._with_sources(task, recipe, inlined, targets)
            self._rewire(key, recipe, inlined, targets)
        for name, array in zip(beside, found.beside, strict=True):
            self._read_beside(key, name, array)
        if found.pairs:
            original = PairsTask(original)
        fused = graph.tasks[key] = KernelTask(
            key, program, tuple(names), found.expects, tuple(positions), kind, original
        )  # fmt: skip
        if self.on_gpus:
            self._send_constants(fused, kind)
        if found.or_none:
            graph.tasks[key] = OptionalTask(fused)
            return
        graph.sizes[key] = found.nbytes
        self.foreseen[key] = found.number, found.makes
        if found.offer is not None and key not in graph.pins and key not in self.outputs:
            self.sources[key] = found.offer.of(fused.names, fused.positions, kind)

    def _beside(self, array: Any, kind: str | None) -> Key:
        """The name of an array that functions read beside what they are given, which are of this
        kind. One of NumPy's is sent to the GPUs, for CuPy's; of what nobody changes that is
        done once."""
        sent = kind == "cupy.ndarray" and type(array) is np.ndarray
        known = self.beside.get((id(array), sent))
        if known is None:
            known = self.beside[id(array), sent] = (BESIDE, len(self.beside)), array
            name = known[0]
            self.graph.beside.add(name)
            if sent and array.nbytes <= MOST_KEPT and index_lists.is_ours(array):
                self.nodes[name] = DataNode(name, array)
            elif sent:
                self.nodes[name] = Task(name, np.ascontiguousarray, array)
            elif self.home is not None and self.home(array) is not None:
                self.nodes[name] = DataNode(name, array)
            if name in self.nodes:
                self.readers[name] = 0
        return known[0]

    def _read_beside(self, key: Key, name: Key, array: Any) -> None:
        graph = self.graph
        if name not in self.nodes:
            graph.constants[key] = {**graph.constants.get(key, {}), name: array}
        elif name not in graph.names[key]:
            graph.names[key] = (*graph.names[key], name)
            graph.needs[key] = (*graph.needs[key], name)
            self.readers[name] += 1

    def _send_constants(self, fused: KernelTask, kind: str | None) -> None:
        """What a program of CuPy's arrays is given of NumPy's, as tables and weights are, is sent
        to the GPUs by a step of its own, where several tasks are given it: once for all of them."""
        graph, key = self.graph, fused.key
        constants = graph.constants.get(key, {})
        read = {k for k, foreseen in fused.inputs() if any(foreseen)}
        tables = {
            k: v
            for k, v in constants.items()
            if k in read and type(v) is np.ndarray and v.ndim and self._are_given(v) > 1
        }
        near = [self.graph.blocks.get(k) for k in graph.needs[key]]
        kinds = [kind, *[b.kind for b in near if b is not None]]
        if not tables or "cupy.ndarray" not in kinds:
            return
        for name, array in tables.items():
            node = self._beside(array, "cupy.ndarray")
            graph.names[key] = (*graph.names[key], name)
            graph.needs[key] = (*graph.needs[key], node)
            self.readers[node] += 1
        graph.constants[key] = {k: v for k, v in constants.items() if k not in tables}

    def _are_given(self, table: Any) -> int:
        """To how many tasks an array is given."""
        if self.given_to is None:
            every = self.graph.constants.values()
            self.given_to = Counter(id(v) for given in every for v in given.values())
        return self.given_to[id(table)]

    def _kind(self, key: Key, recipe: Recipe, inlined: dict[int, InlineSource]) -> str | None:
        """The type of the arrays that a task makes: what they are drawn or made as, or what the
        collections of its steps say. What CuPy's arrays are computed to is CuPy's, whatever else
        Dask takes it for: a histogram, say."""
        for source in (*recipe.draws, *inlined.values()):
            if source.kind:
                return source.kind
        blocks = [self.graph.blocks.get(k) for k in (key, *recipe.parts)]
        kinds = [b.kind for b in blocks if b is not None and b.kind]
        kinds += recipe.kinds
        if not kinds:  # as Dask's own steps between collections are: they keep what they get
            near = [self.graph.blocks.get(k) for k in self.graph.needs[key]]
            kinds = [b.kind for b in near if b is not None and b.kind]
        return "cupy.ndarray" if "cupy.ndarray" in kinds else next(iter(kinds), None)

    def _view(
        self,
        key: Key,
        recipe: Recipe,
        found: TraceOutcome,
        plain: list[tuple[int, Any]],
        targets: dict[Key, Key],
    ) -> None:
        """A task that only takes a view stays; its readers may take the view for themselves."""
        self.foreseen[key] = found.number, found.makes
        seen = found.view
        if not self.merge or not isinstance(seen, ViewedInput) or key in self.outputs:
            return
        if key in self.graph.pins or len(plain) != 1 or recipe.names[0] not in targets:
            return
        ((_, whole),) = plain
        if not isinstance(whole, AbstractArray):
            return
        far = math.prod(whole.shape) > 2 * math.prod(seen.shape)
        expr = Expr("input", (), seen.dtype, (0, seen.view))
        number = self.numbers.setdefault(("source", expr, seen, whole), len(self.numbers))
        self.sources[key] = InlineSource(
            seen.shape, expr, tuple(recipe.names), (whole,), (), None, True, far, number
        )

    def _with_sources(
        self, task: Any, recipe: Recipe, inlined: dict[int, InlineSource], targets: dict[Key, Key]
    ) -> Callable[[Values], Any]:
        """The task as it was, behind those that it now replaces."""
        names = recipe.names
        return TaskWithProducers(task, [
            (names[n], self._replaced(targets[names[n]], source).function)
            for n, source in inlined.items()
        ])  # fmt: skip

    def _replaced(self, target: Key, source: InlineSource) -> UnfusedTask:
        """What a task is that disappears into a reader."""
        graph = self.graph
        return source.apart or UnfusedTask(
            graph.names[target], graph.needs[target], graph.constants.get(target, {}),
            original_task(graph.tasks[target]),
        )  # fmt: skip

    def _facts_with(
        self,
        key: Key,
        recipe: Recipe,
        inlined: dict[int, InlineSource],
        targets: dict[Key, Key],
    ) -> tuple[tuple[Key, ...], tuple[Key, ...], dict[Key, Any]]:
        """Names, inputs and constants of a task that does what it reads from others itself."""
        constants = dict(self.graph.constants.get(key, {}))
        kept = [name for n, name in enumerate(recipe.names) if n not in inlined]
        new = {name: targets[name] for name in kept if name in targets}
        for n, source in inlined.items():
            before = self._replaced(targets[recipe.names[n]], source)
            constants.update(before.constants)
            new.update(zip(before.names, before.needs, strict=True))
        return tuple(new), tuple(new.values()), constants

    def _rewire(
        self,
        key: Key,
        recipe: Recipe,
        inlined: dict[int, InlineSource],
        targets: dict[Key, Key],
    ) -> None:
        graph = self.graph
        facts = self._facts_with(key, recipe, inlined, targets)
        graph.names[key], graph.needs[key], constants = facts
        if constants:
            graph.constants[key] = constants
        for n, source in inlined.items():
            target = targets[recipe.names[n]]
            for d in self._replaced(target, source).needs:
                self.readers[d] += 1
            self.readers[target] -= 1
            if not self.readers[target] and target not in self.outputs:
                self._drop(target)

    def _drop(self, key: Key) -> None:
        graph = self.graph
        needs = graph.needs[key]
        for facts in (graph.tasks, graph.needs, graph.names, graph.constants, graph.pins):
            facts.pop(key, None)
        for d in needs:
            self.readers[d] -= 1
            if not self.readers[d] and d not in self.outputs:  # its readers do without
                self._drop(d)

    def _offered(self, found: TraceOutcome) -> InlineSource | None:
        """What a task makes as an expression for its readers, where that may save its memory."""
        program, made = found.program, found.makes
        assert program is not None
        if not self.merge or len(program.kernels) != 1:
            return None
        (kernel,), result = program.kernels, program.result
        if kernel.scans:
            return self._offered_scan(found, kernel)
        if type(result) is Out and len(result.shape) == 1 < len(kernel.shape):
            return self._offered_rows(found, kernel)
        outs = [out for out in leaves(result) if isinstance(out, Out) and not out.scalar]
        if kernel.reductions or len(outs) < max(len(list(leaves(result))), len(kernel.outputs)):
            return None
        expects = found.expects
        every = list(leaves(made))
        one = isinstance(result, Out)
        shown = tuple if one else squeezed_axes
        if any(shown(m.shape) != shown(kernel.shape) for m in every):
            return None
        if not _are_arrays(expects):
            return None
        # steps of a tree meet on each device before they meet on one
        tiny = count_arrays(expects) > 1 and math.prod(kernel.shape) <= FEW
        nbytes = sum(m.nbytes for m in every)
        far = tiny or sum(e.nbytes for e in leaves(expects)) > 2 * nbytes

        def part(out: Out) -> GeneratedArray:
            expr = kernel.outputs[out.array - program.inputs]
            if out.shape != kernel.shape:  # axes of length one are more, or fewer
                (expr,) = rebuilt(
                    [expr], lambda leaf: _broadcast_leaf(leaf, kernel.shape, out.shape)
                )
            return GeneratedArray(out.shape, expr.dtype, expr)

        parts = None if one else map_leaves(part, result)
        # readers of alike ones have one program, and that what each reads has as many leaves
        words = ("source", kernel.outputs, structure_words(made), structure_words(expects))
        number = self.numbers.setdefault(words, len(self.numbers))
        root = kernel.outputs[0]
        little = self.on_gpus and parts is None and work_per_element(root) <= LITTLE_WORK
        return InlineSource(
            kernel.shape, root, (), expects, (), None, False, far, number, little, parts
        )  # fmt: skip

    def _offered_rows(self, found: TraceOutcome, kernel: Kernel) -> InlineSource | None:
        """An array of several axes, of which a task makes one: a reader that is not interested in
        their order may take it as it is."""
        made, expects = found.makes, found.expects
        if kernel.reductions or len(kernel.outputs) > 1 or not _are_arrays(expects):
            return None
        (root,) = kernel.outputs
        words = ("rows", root, kernel.shape, structure_words(expects))
        number = self.numbers.setdefault(words, len(self.numbers))
        far = sum(e.nbytes for e in leaves(expects)) > 2 * made.nbytes
        return InlineSource(
            made.shape, root, (), expects, (), None, False, far, number,
            self.on_gpus and work_per_element(root) <= LITTLE_WORK,
            FlatArray(kernel.shape, root.dtype, root),
        )  # fmt: skip

    def _offered_scan(self, found: TraceOutcome, kernel: Kernel) -> InlineSource | None:
        """A scan that is what a task makes: one reader may want each part, another the last one
        only, as Dask's have it."""
        made, expects = found.makes, found.expects
        (scan, *others), (output, *more) = kernel.reductions, kernel.outputs
        if others or more or output.op != "reduced" or not _are_arrays(expects):
            return None
        if not isinstance(made, AbstractArray) or made.shape != kernel.shape:
            return None
        words = ("scan", kernel, structure_words(expects))
        number = self.numbers.setdefault(words, len(self.numbers))
        part = ScannedArray(kernel.shape, made.dtype, scan.arg, scan.op, kernel.axes[0])
        far = any(e.nbytes > 2 * made.nbytes for e in leaves(expects))
        return InlineSource(
            kernel.shape, scan.arg, (), expects, (), None, False, far, number,
            work_per_element(scan.arg) <= LITTLE_WORK, part,
        )  # fmt: skip

    def _offered_selection(
        self, masked: MaskedPoints, expects: tuple[Any, ...], own: int
    ) -> InlineSource:
        """What a mask selects, for readers that reduce it: then nobody has to find out how many
        elements that is. `own` of the arrays are not borrowed."""

        def change(leaf: Expr) -> Expr:
            return renumber_leaf(leaf, lambda n: own + n - BORROWED if n >= BORROWED else n)

        expr, mask = rebuilt([masked.expr, masked.mask], change)
        masked = replace(masked, expr=expr, mask=mask)
        words = ("selection", masked, structure_words(expects))
        number = self.numbers.setdefault(words, len(self.numbers))
        little = work_per_element(expr) + work_per_element(mask) <= LITTLE_WORK
        return InlineSource(
            masked.shape, expr, (), expects, (), None, False, False, number, little, masked
        )  # fmt: skip

    def _selects(
        self,
        key: Key,
        task: Any,
        recipe: Recipe,
        offer: InlineSource,
        inlined: dict[int, InlineSource],
        targets: dict[Key, Key],
    ) -> None:
        """A task that selects by a mask stays; its readers may do that for themselves."""
        if key in self.graph.pins or key in self.outputs:
            return
        names, positions = reads_with_inlined(recipe, inlined)
        source = offer.of(tuple(names), tuple(positions), self._kind(key, recipe, inlined))
        source.free = source.little and not positions
        function = self._with_sources(task, recipe, inlined, targets) if inlined else task
        source.apart = UnfusedTask(*self._facts_with(key, recipe, inlined, targets), function)
        self.sources[key] = source

    def _picks(
        self,
        key: Key,
        task: Any,
        recipe: Recipe,
        offer: InlineSource | None,
        plain: list[tuple[int, Any]],
        inlined: dict[int, InlineSource],
        targets: dict[Key, Key],
    ) -> bool:
        """Make a task that selects by a mask two kernels, if it can be these."""
        if not self.on_gpus:
            return False
        # what takes long is computed once, and not in both kernels
        some = {n: s for n, s in inlined.items() if s.little or s.free or plain[n][1] is None}
        if len(some) < len(inlined):
            offer = self._follow(recipe, plain, some).offer
        if offer is None or not offer.selects:
            return False
        names, positions = reads_with_inlined(recipe, some)
        first = tuple([names.index(name) for name in names])  # a value and its mask are of the same
        words = offer.number, first
        if words not in self.pickers:
            self.pickers[words] = _picker(offer, first)
        picker = self.pickers[words]
        if picker is None:
            return False
        program, columns = picker
        function = task
        if some:
            function = self._with_sources(task, recipe, some, targets)
            self._rewire(key, recipe, some, targets)
        fused = KernelTask(
            key, program, tuple(names), offer.expects, tuple(positions),
            self._kind(key, recipe, some), function,
        )  # fmt: skip
        graph = self.graph
        graph.tasks[key] = CompressTask(fused, columns)
        self.reasons.pop(key, None)
        if key not in graph.pins and key not in self.outputs:
            source = self.sources[key] = offer.of(fused.names, fused.positions, fused.kind)
            source.free = source.little and not positions
            constants = graph.constants.get(key, {})
            source.apart = UnfusedTask(graph.names[key], graph.needs[key], constants, function)
        return True

    # ---- blocks that depend on where they lie

    def _placed(self, task: Any) -> bool:
        """Whether a task draws random numbers, or makes a tile of an array from nothing."""
        if self.draw(task) is not None:
            return True
        return type(task) is Task and any(tile_of(a) is not None for a in task.args)

    def draw(self, task: Any) -> InlineSource | None:
        """A block of random numbers as its readers may compute it; None for other tasks."""
        if not self.philox or type(task) is not Task or task.func not in RANDOM:
            return None
        where = self.graph.draws.get(task.key)
        if where is None or task.dependencies:
            return None
        strides = View.contiguous(where.shape).strides
        position = sum([n * step for n, step in zip(where.start, strides, strict=True)])
        shape = tuple(task.args[3])
        words = ("draw", id(where.seed), shape, position % 2)
        if words not in self.drawn:
            _, name, _, _, args, kwargs = (plain_arguments(a) for a in task.args)
            expr = random.draw(
                name, shape, View(position % 2, strides), self._seed(where), tuple(args),
                dict(kwargs), base=PLACEHOLDER,
            )  # fmt: skip
            number = self.numbers.setdefault(("drawn", expr, shape), len(self.numbers))
            self.drawn[words] = expr, number
        expr, number = self.drawn[words]
        if expr is None:
            return None
        block = self.graph.blocks.get(task.key)
        kind = block.kind if block is not None else generator_kind(task.args[0])
        even = position - position % 2
        return InlineSource(shape, expr, (), (), (even,), kind, False, False, number)

    def numbers_of(self, start: int, length: int) -> InlineSource:
        """The numbers of a tile's elements along one of its axes."""
        if length not in self.lengths:
            axis = Expr("index", (), np.int64, View(0, (1,)))
            expr = Expr("add", (axis, placeholder(0)), np.int64)
            number = self.numbers.setdefault(("tile", length), len(self.numbers))
            self.lengths[length] = expr, number
        expr, number = self.lengths[length]
        return InlineSource((length,), expr, (), (), (start,), None, False, False, number)

    def _seed(self, where: RandomDraw) -> int:
        if id(where.seed) not in self.seeds:
            self.alive.append(where.seed)
            self.seeds[id(where.seed)] = random.key_of(where.seed)
        return self.seeds[id(where.seed)]

    # ---- functions and other literals

    def _pairs(self, task: Any) -> bool:
        """Whether a task gives pairs of a value and its place."""
        parts = task.tasks if type(task) is Chain else [(None, task)]
        return any(self._calls_pairing(task_function(part)) for _, part in parts)

    def _calls_pairing(self, function: Any) -> bool:
        known = self.pairing.get(id(function))
        if known is None:
            self.alive.append(function)
            within = any(f in PAIRING for f in purity.functions_in(function))
            known = self.pairing[id(function)] = within
        return known

    def literal(self, owner: Any, value: Any) -> Any:
        """Words for a value that many blocks share: `owner` is the object that they share."""
        found = self.literals.get(id(owner))
        if found is None:
            self.alive.append(owner)
            found = self.literals[id(owner)] = literal(value, self.alive)
        return found

    def why_impure(self, function: Any) -> str | None:
        found = self.impure.get(id(function), False)
        if found is False:
            self.alive.append(function)
            found = self.impure[id(function)] = purity.impure(function, arrays=True)
            if found is None:
                for where, name, value in purity.globals_read(function):
                    word = id(where), name, id(value)
                    if word not in self.read:
                        self.read.add(word)
                        self.globals.append((where, name, value))
                self.graph.around += purity.functions_read(function)
                self._watch(purity.containers_read(function))
        return found  # type: ignore[return-value]

    def why_unfit(self, constant: Any) -> str | None:
        """Why no function is followed that a task gives this constant to."""
        if purity.is_fixed(constant):
            return None
        found = self.unfit.get(id(constant), False)
        if found is False:
            self.alive.append(constant)
            found, containers = purity.unfit(constant)
            self.unfit[id(constant)] = found
            self._watch(containers)
        return found  # type: ignore[return-value]

    def _watch(self, containers: Iterable[Any]) -> None:
        """Remember what is in lists and dictionaries of tasks."""
        for container in containers:
            alive: list[Any] = []
            words = literal(container, alive)
            self.graph.containers[id(container)] = container, words, alive


def better_apart(names: Sequence[str], strange: Set[str]) -> dict[str, str]:
    """Words for layers that Dask has fused: those with different words had better be tasks of their
    own, for two or more that can be followed are a kernel. One by itself stays with the strange.

    >>> better_apart(["read", "fft", "abs", "square", "sum"], {"fft"})
    {'read': 'read', 'fft': 'read'}
    >>> better_apart(["read", "fft", "sum"], {"fft"})
    {}
    """
    runs = [list(run) for _, run in itertools.groupby(names, key=strange.__contains__)]
    worth = [strange.isdisjoint(run) and len(run) > 1 for run in runs]
    out: dict[str, str] = {}
    if not any(worth):
        return out
    for kernel, group in itertools.groupby(zip(worth, runs, strict=True), key=itemgetter(0)):
        if not kernel:
            together = [name for _, run in group for name in run]
            out.update(dict.fromkeys(together, together[0]))
    return out


def _picker(offer: InlineSource, first: Sequence[int]) -> tuple[Program, tuple[int, ...]] | None:
    """The kernels that pick out what a mask selects, and the shape of each element. Of each value
    that is read, the `first` one is the same."""
    masked = offer.parts
    rows = len(masked.over)
    counts = [count_arrays((structure,)) for structure in offer.expects]
    if masked.axis or not math.prod(masked.over) or not sum(counts):
        return None
    shape = tuple(masked.shape[rows:])
    if math.prod(shape) > MOST_COLUMNS or not math.prod(shape):
        return None

    def column(place: tuple[int, ...]) -> Expr:
        def change(leaf: Expr) -> Expr:
            view = view_of(leaf)
            if view is None:
                return leaf
            offset = sum([i * s for i, s in zip(place, view.strides[rows:], strict=True)])
            return with_view(leaf, View(view.offset + offset, view.strides[:rows]))

        return rebuilt([masked.expr], change)[0]

    columns = [column(place) for place in np.ndindex(shape)]
    begins = [0, *itertools.accumulate(counts)]
    number = {
        begins[n] + i: begins[m] + i
        for n, (m, count) in enumerate(zip(first, counts, strict=True))
        for i in range(count)
    }
    kernels = tuple(
        [
            renumber_arrays(
                Kernel(masked.over, (masked.mask, *rest), picks=True), number.__getitem__
            )
            for rest in ((), columns)
        ]
    )
    every = nodes(kernels[1].roots)
    # what takes long is computed once, and not twice
    loops = [n for n in every if n.op == "call" and n.data[0].repeats]
    if loops or len(every) > MOST_NODES or any(map(unwritten, kernels)):
        return None
    return Program(sum(counts), kernels, None), shape


def _broadcast_leaf(leaf: Expr, shape: tuple[int, ...], other: tuple[int, ...]) -> Expr:
    view = view_of(leaf)
    return leaf if view is None else with_view(leaf, view_over(view, shape, other))


def _made_by(program: Program) -> Any:
    """The structure of a program's value, which is made of what its kernels make."""
    dtypes: dict[int, Any] = {}
    for start, kernel in zip(program.starts, program.kernels, strict=True):
        dtypes.update({start + n: o.dtype for n, o in enumerate(kernel.outputs)})
    return map_leaves(
        lambda v: AbstractArray(v.shape, dtypes[v.array]) if isinstance(v, Out) else v,
        program.result,
    )


def _abstract(value: Any) -> Any:
    """What is known of a value that is there; None where it holds what no program can read."""
    if type(value) in (dict, list, tuple):
        parts = [_abstract(v) for v in leaves(value)]
        if any(p is None for p in parts):
            return None
        return map_leaves(_abstract, value)
    if isinstance(value, (int, float, complex, bool, str, np.generic)):
        return value
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    flags = getattr(value, "flags", None)
    if not isinstance(dtype, np.dtype) or not isinstance(shape, tuple) or flags is None:
        return None
    return None if isinstance(value, np.ma.MaskedArray) else context.abstract_of(value)


def _is_copy(seen: Any, arguments: list[Any]) -> bool:
    """Whether views are to be copied: where the task does so itself, and of what is at most half,
    so that the whole can be let go of, and so that little goes to other devices."""
    wholes = [a for a in leaves(arguments) if isinstance(a, AbstractArray)]
    return all(
        v.copied or 2 * math.prod(v.shape) <= math.prod(wholes[v.array].shape)
        for v in leaves(seen)
        if isinstance(v, ViewedInput)
    )


def _of_matrices(product: MatrixProductArray, arguments: list[Any]) -> MatrixProductTask | None:
    """A product of arguments, by their numbers; None where it is one of parts of them."""
    if not all(isinstance(a, AbstractArray) for a in arguments):
        return None
    sides = []
    for seen in (product.left, product.right):
        array = arguments[seen.array]
        strides = array.strides or View.contiguous(array.shape).strides
        long = [(n, s) for n, s in zip(array.shape, strides, strict=True) if n != 1]
        shown = [*zip(seen.shape, seen.view.strides, strict=True)]
        if seen.view.offset or shown not in (long, long[::-1]):
            return None
        sides.append(MatrixInput(seen.array, (long[0][0], long[1][0]), shown != long))
    left, right = sides
    return MatrixProductTask(left, right, product.left.dtype)


def _laid(v: Any) -> Any:
    """What is known of a view, or of a copy of it."""
    if not isinstance(v, ViewedInput):
        return v
    same = v.copied or ir_expr.is_contiguous(View(0, v.view.strides), v.shape)
    return AbstractArray(v.shape, v.dtype, None if same else v.view.strides)


def _read(own: Iterable[Any], borrowed: Iterable[InlineSource]) -> tuple[Any, ...]:
    """What is foreseen of the values that a task reads: its own, and what sources read."""
    return (*own, *[structure for source in borrowed for structure in source.expects])


def _are_arrays(structures: tuple[Any, ...]) -> bool:
    """Whether values are arrays, or containers of nothing else."""
    return all(isinstance(leaf, AbstractArray) for leaf in leaves(structures))
