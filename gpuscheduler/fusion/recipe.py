"""What a task computes, apart from its data: parts, constants and words.

Blocks of one array have tasks that differ in names and positions only. A `Recipe` leaves these out:
its `key` is equal for such tasks, so that one trace serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dask._task_spec import Alias, DataNode, GraphNode, NestedContainer, Task, TaskRef
from dask.array import reductions as dask_reductions
from dask.array.core import concatenate_shaped

from ..frontend.captured import FRESH
from ..frontend.compiled_task import COMPILED, FIRST_LINE, CompiledCall, InnerStep, literal
from ..frontend.graph import CUPY, RESIDENT, Graph
from ..frontend.task import sequence_of
from ..frontend.tiles import Tile
from ..tracing import purity, registry, trace
from ..tracing.abstract import AbstractArray
from ..values import leaves
from .random_draws import Draws
from .reads import Reads
from .source import InlineSource
from .task import Key


class Recipe:
    """A task without the names of its inputs: like blocks have one `key`."""

    __slots__ = (
        "_at", "_draws", "_fresh", "_numbers", "_parts", "_reads", "_tiles", "draws", "given",
        "key", "kinds", "names", "reason", "task",
    )  # fmt: skip

    def __init__(self, draws: Draws, reads: Reads, task: Any):
        self._draws, self._reads, self.task = draws, reads, task
        #: Inputs that depend on where the block lies, and on nothing else.
        self.draws: list[InlineSource] = []
        #: Where in `draws` the indices of each tile begin.
        self._tiles: dict[Tile, int] = {}
        #: Why the task is not traced; None where it is.
        self.reason: str | None = None
        #: Whether a function is among the task's constants.
        self.given = False
        #: Types of the arrays without elements that the task is given as `like` or `meta`.
        self.kinds: list[str] = []
        #: Whether nobody changes the lists of the call that is being read.
        self._fresh = False
        #: The part that is being performed.
        self._at = 0
        #: What stands for each name in `key`.
        self._numbers: dict[Key, Any] = {}
        self._parts = [(name, _with_tile(part)) for name, part in sequence_of(task)]
        self.names: list[Key] = []
        words: list[Any] = []
        for name, part in self._parts:
            draw = draws.draw(part)
            if draw is not None:
                words.append("draw")
                self.draws.append(draw)
            elif isinstance(part, CompiledCall):
                self._check(part.function)
                words.append((id(part.function), tuple([self._words_of(a) for a in part.args])))
            else:
                words.append(self._words_of(part))
            self._numbers[name] = -len(words)
        self.key = tuple(words)

    @property
    def joins_inputs(self) -> bool:
        """Whether the task begins by joining all of its inputs."""
        _, first = self._parts[0]
        joined = getattr(first, "func", None) is concatenate_shaped
        return joined and first.dependencies >= set(self.names)

    @property
    def parts(self) -> list[Key]:
        """Keys of the task's parts, in order: a part may be several fused steps."""
        return [name for name, _ in self._parts]

    @property
    def steps(self) -> list[Key]:
        """Keys of the task's steps, in order."""
        return [key for part in self._parts for key, _ in self._steps(*part)]

    def _steps(self, name: Key, part: Any) -> Sequence[tuple[Key, Iterable[Any]]]:
        """Return key and arguments of each step of a part, in order."""
        if isinstance(part, CompiledCall) and part.steps:
            return list(_flatten_steps(part.function, part.steps, part.args))
        return [(name, () if self._draws.draw(part) is not None else [part])]

    def impure_steps(self) -> Iterator[int]:
        """Yield the numbers of the steps whose functions or constants cannot be traced."""
        reads = self._reads
        every = [step for part in self._parts for step in self._steps(*part)]
        for n, (_, parts) in enumerate(every):
            for value in leaves([v for part in parts for v in _given_constants(part)]):
                function = callable(value) and not isinstance(value, type)
                if (reads.why_impure if function else reads.why_unfit)(value):
                    yield n
                    break

    def takes_any_arrays(self) -> bool:
        """Whether all functions that the task calls take arrays of GPUs as they take NumPy's."""
        every = [parts for part in self._parts for _, parts in self._steps(*part)]
        given = leaves([v for parts in every for part in parts for v in _given_constants(part)])
        return all(purity.takes_any_arrays(v) for v in given if callable(v))

    def step_of(self, error: BaseException) -> int:
        """Return the number of the step that raised an error in `perform`, or -1."""
        before = sum([len(self._steps(*part)) for part in self._parts[: self._at]])
        if self._at == len(self._parts):
            return -1
        _, part = self._parts[self._at]
        if not isinstance(part, CompiledCall):
            return before
        steps = part.steps
        for line in _error_lines(error):
            n = line - FIRST_LINE
            before += sum([_count_steps(s) for s in steps[:n]])
            steps = steps[n].steps
            if not steps:
                return before
        return -1

    def _words_of(self, node: Any) -> Any:
        kind = type(node)
        if kind is TaskRef or kind is Alias:
            name = node.key if kind is TaskRef else node.target
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = len(self.names)
                self.names.append(name)
            return TaskRef, number
        if kind is DataNode:
            if type(node.value) is Tile:
                return Tile, self._add_tile(node.value)
            self._look_at(node.value)
            return self._reads.literal(node, node.value)
        if kind is Tile:
            return Tile, self._add_tile(node)
        if isinstance(node, NestedContainer):
            return node.klass, tuple([self._words_of(a) for a in node.args])
        if isinstance(node, Task):
            self._check(node.func)
            before, self._fresh = self._fresh, any(node.func is f for f in FRESH)
            words = [self._reads.literal(node.func, node.func)]
            words += [self._words_of(a) for a in node.args]
            if node.kwargs:
                words += [(k, self._words_of(v)) for k, v in node.kwargs.items()]
            self._fresh = before
            return tuple(words)
        if isinstance(node, GraphNode):
            self.reason = f"it is a {kind.__name__}"
            return None
        self._look_at(node)
        return literal(node, self._reads.alive)

    def _look_at(self, value: Any) -> None:
        """Check a constant: functions, which the task may call, and arrays without elements."""
        for part in leaves(value):
            if purity.is_nothing(part):
                self.kinds.append(f"{type(part).__module__.partition('.')[0]}.ndarray")
        if isinstance(value, purity.CALLED):
            self.given = True
            self._check(value)
        elif self.reason is None and not self._fresh:
            self.reason = self._reads.why_unfit(value)

    def _add_tile(self, tile: Tile) -> int:
        """Return where in `draws` a tile's indices begin, and append them if they are new."""
        number = self._tiles.setdefault(tile, len(self.draws))
        if number == len(self.draws):
            sides = zip(tile.start, tile.shape, strict=True)
            self.draws += [self._draws.numbers_of(*side) for side in sides]
        return number

    def _check(self, function: Any) -> None:
        if self.reason is None:
            self.reason = self._reads.why_impure(function)

    def perform(self, values: Sequence[Any], drawn: Sequence[Any]) -> Any:
        """Do what the task does, on these values and draws, and return its value."""
        env: dict[Key, Any] = dict(zip(self.names, values, strict=True))
        tiles = {
            t: UnknownTile(t.shape, drawn[n : n + len(t.shape)]) for t, n in self._tiles.items()
        }
        theirs = {n + k for t, n in self._tiles.items() for k in range(len(t.shape))}
        random = iter([d for n, d in enumerate(drawn) if n not in theirs])
        value = None
        for n, (name, part) in enumerate(self._parts):
            self._at = n
            if self._draws.draw(part) is not None:
                value = next(random)
            elif isinstance(part, CompiledCall):
                function = trace.adapt_function(part.function)
                value = function(*[_evaluate_task(a, env, tiles) for a in part.args])
            else:
                value = _evaluate_task(part, env, tiles)
            env[name] = value
        self._at = len(self._parts)
        return value


def _plain_arguments(value: Any) -> Any:
    """Return an argument of a task without Dask's containers."""
    return value({}) if isinstance(value, GraphNode) else value


def _flatten_steps(
    function: Any, steps: Iterable[InnerStep], arguments: Sequence[Any]
) -> Iterator[tuple[Key, Iterable[Any]]]:
    """Yield key and arguments of each step of a compiled function, however often Dask fused."""
    own = function.__globals__
    for step in steps:
        if step.steps:
            yield from _flatten_steps(*step.look_inside(function, arguments))
        else:
            yield step.key, [
                *map(own.get, step.constants), *map(arguments.__getitem__, step.arguments)
            ]  # fmt: skip


def _count_steps(step: InnerStep) -> int:
    return sum(map(_count_steps, step.steps)) or 1


def _error_lines(error: BaseException | None) -> Iterator[int]:
    """Yield the lines of compiled functions that raised an error, from outside in."""
    while error is not None:
        at = error.__traceback__
        while at is not None:
            if at.tb_frame.f_code.co_filename == COMPILED:
                yield at.tb_lineno
            at = at.tb_next
        error = error.__cause__


def _given_constants(node: Any) -> Iterator[Any]:
    """Yield the functions and other constants in a task."""
    if isinstance(node, DataNode):
        yield node.value
    elif isinstance(node, Task):
        if not isinstance(node, NestedContainer):
            yield node.func
        for part in (*node.args, *node.kwargs.values()):
            yield from _given_constants(part)
    elif not isinstance(node, (GraphNode, TaskRef, Tile)):
        yield node


def _with_tile(part: Any) -> Any:
    """Return a task of Dask's argmin or argmax with its block's position as a `Tile`.

    As a number, the position would make each block a structure of its own.
    """
    function: Any = getattr(part, "func", None)
    if type(part) is not Task or getattr(function, "func", None) is not dask_reductions.arg_chunk:
        return part
    *given, where = part.args
    try:
        begin, whole = ((where,), None) if isinstance(where, int) else where
        place = Tile(tuple([int(b) for b in begin]), (1,) * len(begin))
    except (TypeError, ValueError):  # of another Dask than we know
        return part
    return Task(part.key, function, *given, Task(None, _place, place, whole), **part.kwargs)


def _place(tile: Tile, whole: tuple[int, ...] | None) -> Any:
    """Return a block's position as `arg_chunk` takes it, for one axis or for all."""
    begin = tuple([tile.indices(k) for k in range(len(tile.shape))])
    return begin[0] if whole is None else (begin, whole)


def tile_of(node: Any) -> Tile | None:
    """Return the tile that an argument is; None for others."""
    value = node.value if type(node) is DataNode else node
    return value if type(value) is Tile else None


@dataclass(frozen=True, slots=True)
class UnknownTile:
    """Stands for a `Tile` whose place is not known yet."""

    shape: tuple[int, ...]
    axes: Sequence[Any]

    def indices(self, axis: int, xp: str = "numpy") -> Any:
        """Return the symbolic indices along an axis."""
        return self.axes[axis]


def _evaluate_task(node: Any, env: dict[Key, Any], tiles: dict[Tile, UnknownTile]) -> Any:
    """Return the value of a task or an argument, by functions that take symbolic arrays."""
    if (tile := tile_of(node)) is not None:
        return tiles[tile]
    if isinstance(node, TaskRef):
        return env[node.key]
    if isinstance(node, Alias):
        return env[node.target]
    if isinstance(node, DataNode):
        return trace.constant_of_task(node.value)
    if isinstance(node, NestedContainer):
        return trace.constant_of_task(node({d: env[d] for d in node.dependencies}))
    if isinstance(node, Task):
        args = [_evaluate_task(a, env, tiles) for a in node.args]
        kwargs = {
            k: _plain_arguments(v) if k in registry.LIKE else _evaluate_task(v, env, tiles)
            for k, v in node.kwargs.items()
        }
        return trace.adapt_function(node.func)(*args, **kwargs)
    return trace.constant_of_task(node)


@dataclass(slots=True, eq=False)
class Candidate:
    """A task that may become a kernel, and what it reads."""

    key: Key
    task: Any
    recipe: Recipe
    #: Constants of the task, by name.
    constants: Mapping[Key, Any]
    #: The task that makes each other input, by name.
    targets: dict[Key, Key]
    #: Number and structure of each of the recipe's names; (-1, None) where these are not known.
    inputs: list[tuple[int, Any]] = field(default_factory=list)
    #: Producers that the task computes for itself, by their numbers among the recipe's names.
    inlined: dict[int, InlineSource] = field(default_factory=dict)

    def own_names(self) -> list[Key]:
        """Return the names of the inputs that are not inlined."""
        return [name for n, name in enumerate(self.recipe.names) if n not in self.inlined]

    def target(self, n: int) -> Key:
        """Return the task that makes the recipe's name number `n`."""
        return self.targets[self.recipe.names[n]]

    def with_inlined(self, inlined: dict[int, InlineSource]) -> Candidate:
        """Return the same task with other producers inlined."""
        return replace(self, inlined=inlined)

    def with_inputs(self, inputs: list[tuple[int, Any]]) -> Candidate:
        """Return the same task with other structures of its inputs."""
        return replace(self, inputs=inputs)


def reads_with_inlined(task: Candidate) -> tuple[list[Key], list[int]]:
    """Return the names that a task reads with its inlined producers, and their positions."""
    names = task.own_names()
    positions: list[int] = []
    for source in task.inlined.values():
        names += source.names
        positions += source.positions
    return names, positions


def array_kind(graph: Graph, task: Candidate) -> str | None:
    """Return the type of the arrays that a task makes; None if unknown.

    Draws and inlined producers say it, or else the collections of the task's steps. A task with
    CuPy arrays among these makes CuPy arrays, even where Dask takes the result for NumPy's, as it
    does for a histogram.
    """
    for source in (*task.recipe.draws, *task.inlined.values()):
        if source.kind:
            return source.kind
    known = graph.blocks
    blocks = [known.get(k) for k in (task.key, *task.recipe.parts)]
    kinds = [b.kind for b in blocks if b is not None and b.kind]
    kinds += task.recipe.kinds
    if not kinds:  # as Dask's own steps between collections are: they keep what they get
        near = [known.get(k) for k in graph.nodes[task.key].needs]
        kinds = [b.kind for b in near if b is not None and b.kind]
    return next((kind for kind in (CUPY, RESIDENT) if kind in kinds), next(iter(kinds), None))


def structure_words(structure: Any) -> Any:
    """Return a structure of a value as hashable words."""
    kind = type(structure)
    if kind is AbstractArray:
        return structure
    if kind is dict:
        return kind, tuple([(k, structure_words(v)) for k, v in structure.items()])
    if kind is tuple or kind is list:
        return kind, tuple([structure_words(v) for v in structure])
    return literal(structure, [])
