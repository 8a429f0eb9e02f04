"""Compile Dask's fused tasks into plain Python functions, shared by a layer's chunks.

`dask._task_spec._execute_subgraph` sorts its inner graph again at every call, which costs ten times
as much as the arithmetic of a small chunk. All chunks of a Blockwise layer share one inner graph
object, so this file makes one function of it, which deletes each intermediate value after its last
use. It reorders, skips and shares nothing beyond what Dask wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache, partial
from keyword import iskeyword
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import (
    Alias,
    DataNode,
    GraphNode,
    NestedContainer,
    Task,
    TaskRef,
    convert_legacy_graph,
)
from dask.array.slicing import setitem

from ..dask_private import execute_subgraph
from .task import OwnTask, TaskDescription, describe

Values = dict[Any, Any]

#: The file of the functions that are made here.
COMPILED = "<fused by gpuscheduler>"
#: ... and the line of such a file on which the first step is; each has one.
FIRST_LINE = 2
#: Constants of these types are the same where they are equal.
_ATOMS = (int, float, complex, bool, str, bytes, type(None))


class InnerStep(NamedTuple):
    """A task of an inner graph."""

    key: Any
    #: Its functions, and what else it has: the names that the compiled function has for them.
    constants: tuple[str, ...]
    arguments: tuple[int, ...] = ()  # those of the compiled function that it is given
    #: Of one that Dask has fused before: what is done there, and what that is given, by its names.
    steps: tuple[InnerStep, ...] = ()
    given: tuple[str, ...] = ()

    def look_inside(
        self, function: Any, arguments: Sequence[Any]
    ) -> tuple[Any, tuple[InnerStep, ...], list[Any]]:
        """The called function, its steps, and the arguments that are known before it runs."""
        own = function.__globals__
        known = {**own, **{f"a{n}": a for n, a in enumerate(arguments)}}
        return own[self.constants[-1]], self.steps, [known.get(name) for name in self.given]


class CompiledCall(OwnTask):
    """A compiled function and the arguments that one chunk gives it. Called like a Dask task."""

    __slots__ = ("args", "function", "key", "steps")

    def __init__(
        self,
        key: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        steps: tuple[InnerStep, ...] = (),
    ):
        self.key, self.function, self.args = key, function, args
        self.steps = steps  # what the function does, one after the other

    def __call__(self, values: Values) -> Any:
        return self.function(*[_value(a, values) for a in self.args])

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.function, *self.args

    def with_parts(self, *parts: Any) -> CompiledCall:
        function, *args = parts
        return CompiledCall(self.key, function, tuple(args), self.steps)

    def describe(self) -> TaskDescription:
        n = len(self.steps)
        return TaskDescription(f"call of {n} fused task{'s'[: n != 1]}")

    def __repr__(self) -> str:
        return f"<Call {self.key!r} of a fused sub-graph>"


class Chain(OwnTask):
    """Tasks of which each reads only the one before (and constants): one step, one value kept."""

    __slots__ = ("key", "tasks")

    def __init__(self, tasks: list[tuple[Any, Callable[[Values], Any]]]):
        self.key, self.tasks = tasks[-1][0], tasks

    def __call__(self, values: Values) -> Any:
        env = dict(values)
        value = before = None
        for key, task in self.tasks:
            value = task(env)
            if before is not None:
                del env[before]
            env[key] = value
            before = key
        return value

    @property
    def parts(self) -> tuple[Any, ...]:
        return tuple([task for _, task in self.tasks])

    def with_parts(self, *parts: Any) -> Chain:
        return Chain([(key, part) for (key, _), part in zip(self.tasks, parts, strict=True)])

    @property
    def sequence(self) -> list[tuple[Any, Callable[[Values], Any]]]:
        return self.tasks

    def describe(self) -> TaskDescription:
        words = [describe(task).words for _, task in self.tasks]
        return TaskDescription(f"chain of {', '.join(words)}")

    def __repr__(self) -> str:
        return f"<Chain {' -> '.join(str(k) for k, _ in self.tasks)}>"


#: A function, the places of its arguments among those that Dask gives it, and its steps.
Compiled = tuple[Callable[..., Any], list[int], tuple[InnerStep, ...]]


class SubgraphCompiler:
    """Turns fused tasks into `CompiledCall`s.

    It remembers one function for each inner graph object, and for each content of inner graphs:
    where Dask fuses tasks one by one, each has an inner graph of its own.
    """

    def __init__(self) -> None:
        # The inner dict is kept beside its function: an id means nothing once its owner is gone.
        self._known: dict[int, tuple[Any, Any, Any, Compiled]] = {}
        self._alike: dict[Any, Callable[..., Any]] = {}
        self._alive: list[Any] = []  # what is known by its id

    def __call__(self, task: GraphNode) -> Callable[[Values], Any]:
        if not isinstance(task, Task):
            return task
        if task.func is not execute_subgraph or task.kwargs:
            if task.func is setitem:
                return Task(task.key, set_elements, *task.args, **task.kwargs)
            return task
        inner, outkey, inkeys, *args = task.args
        known = self._known.get(id(inner))
        if known is not None and known[1] == outkey and known[2] == inkeys:
            function, places, steps = known[3]
        else:
            function, places, steps = self._function(inner, outkey, list(inkeys))
            self._known[id(inner)] = inner, outkey, inkeys, (function, places, steps)
        return CompiledCall(task.key, function, tuple([args[n] for n in places]), steps)

    def _function(self, inner: Mapping[Any, Any], outkey: Any, inkeys: list[Any]) -> Compiled:
        """The function of an inner graph, the places of its arguments in `inkeys`, and its steps.

        Dask has `inkeys` in any order; the arguments come in the order in which they are first
        read.
        """
        nodes = convert_legacy_graph(inner)
        read = _in_order(nodes, outkey, set(inkeys))
        places = [inkeys.index(k) for k in read if k in inkeys]
        places += [n for n in range(len(inkeys)) if n not in places]
        source = SourceWriter(nodes, tuple([inkeys[n] for n in places]), self)
        text = source.function(outkey, read)
        words = text, tuple([literal(c, self._alive, False) for c in source.constants.values()])
        if words not in self._alike:
            self._alike[words] = source.compile_text(text)
        return self._alike[words], places, tuple(source.steps)


def compile_subgraph(
    inner: Mapping[Any, Any],
    outkey: Any,
    inkeys: tuple[Any, ...],
    nested: SubgraphCompiler | None = None,
) -> Callable[..., Any]:
    """The function that `_execute_subgraph(inner, outkey, inkeys, *args)` calls again and again.

    >>> from operator import add, mul
    >>> inner = {"b": Task("b", add, TaskRef("a"), 1), "c": Task("c", mul, TaskRef("b"), 2)}
    >>> compile_subgraph(inner, "c", ("a",))(3)
    8
    """
    nodes = convert_legacy_graph(inner)
    source = SourceWriter(nodes, inkeys, nested or SubgraphCompiler())
    return source.compile_text(source.function(outkey, _in_order(nodes, outkey, set(inkeys))))


def _in_order(inner: Mapping[Any, GraphNode], outkey: Any, given: Set[Any]) -> list[Any]:
    """Inner keys and those `given`, inputs before readers, in the order of a depth-first walk."""
    done: dict[Any, None] = {}
    stack = [(outkey, False)]
    while stack:
        key, ready = stack.pop()
        if key in done:
            continue
        # an outer value wins over an inner task of the same key, as in Dask's own version
        if ready or key in given:
            done[key] = None
            continue
        if key not in inner:
            raise KeyError(f"the fused task reads {key!r}, which it does not have")
        stack.append((key, True))
        read = dict.fromkeys([*references(inner[key]), *sorted(inner[key].dependencies, key=str)])
        stack += [(d, False) for d in reversed(read)]
    return list(done)


def references(node: Any) -> Iterator[Any]:
    """The keys that a task reads, as it names them."""
    if isinstance(node, TaskRef):
        yield node.key
    elif isinstance(node, Alias):
        yield node.target
    elif isinstance(node, Task):
        for argument in (*node.args, *node.kwargs.values()):
            yield from references(argument)


@lru_cache(maxsize=4096)
def _code(text: str) -> CodeType:
    return compile(text, COMPILED, "exec")


class SourceWriter:
    """Python source for one inner graph: a line per task, in the order of a depth-first walk."""

    def __init__(
        self, inner: Mapping[Any, GraphNode], inkeys: tuple[Any, ...], nested: SubgraphCompiler
    ):
        self.inner, self.inkeys, self.nested = inner, inkeys, nested
        self.constants: dict[str, Any] = {}
        self.names: dict[Any, str] = {k: f"a{n}" for n, k in enumerate(inkeys)}
        self.steps: list[InnerStep] = []
        #: The steps of the fused task that was called last, and what it was given.
        self.called: tuple[tuple[InnerStep, ...], tuple[str, ...]] = (), ()

    def compile_text(self, text: str) -> Callable[..., Any]:
        namespace: dict[str, Any] = dict(self.constants)
        exec(_code(text), namespace)
        return namespace.pop("fused")  # type: ignore[no-any-return]

    def function(self, outkey: Any, read: Iterable[Any]) -> str:
        """The source of the function that computes `outkey`, doing what is `read` in this order."""
        parameters = ", ".join(f"a{n}" for n in range(len(self.inkeys)))
        order = [k for k in read if k not in self.names]
        last = {d: k for k in order for d in self.inner[k].dependencies}
        lines = []
        for n, key in enumerate(order):
            before = len(self.constants)
            expression = self._expression(self.inner[key])
            constants = tuple(self.constants)[before:]
            read = [n for n, k in enumerate(self.inkeys) if k in self.inner[key].dependencies]
            fused = getattr(self.inner[key], "func", None) is execute_subgraph
            steps, given = self.called if fused else ((), ())
            self.steps.append(InnerStep(key, constants, tuple(read), steps, given))
            self.names[key] = f"t{n}"
            line = f"    t{n} = {expression}"
            dead = sorted(self.names[d] for d in self.inner[key].dependencies if last[d] is key)
            if dead := [name for name in dead if name[0] == "t"]:
                line += f"; del {', '.join(dead)}"
            lines.append(line)
        body = "\n".join(lines)
        return f"def fused({parameters}):\n{body}\n    return {self.names[outkey]}\n"

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _expression(self, node: Any) -> str:
        if isinstance(node, TaskRef):
            return self.names[node.key]
        if isinstance(node, Alias):
            return self.names[node.target]
        if isinstance(node, DataNode):
            return self._constant(node.value)
        if not isinstance(node, GraphNode):
            return self._constant(node)
        if not node.dependencies and isinstance(node, NestedContainer):
            return f"{self._constant(node)}()"
        return self._call(node)

    def _call(self, task: GraphNode) -> str:
        assert isinstance(task, Task)
        if task.func is execute_subgraph and not task.kwargs:
            call = self.nested(task)
            assert isinstance(call, CompiledCall)
            function, args, kwargs = call.function, call.args, {}
            words = [self._expression(a) for a in args]
            self.called = call.steps, tuple(words)
        else:
            function = set_elements if task.func is setitem else task.func
            args, kwargs = task.args, task.kwargs
            words = [self._expression(a) for a in args]
        odd = {k: v for k, v in kwargs.items() if not k.isidentifier() or iskeyword(k)}
        words += [f"{k}={self._expression(v)}" for k, v in kwargs.items() if k not in odd]
        if odd:
            pairs = ", ".join(f"{k!r}: {self._expression(v)}" for k, v in odd.items())
            words.append(f"**{{{pairs}}}")
        return f"{self._constant(function)}({', '.join(words)})"


def _value(argument: Any, values: Values) -> Any:
    if isinstance(argument, TaskRef):
        return values[argument.key]
    if isinstance(argument, GraphNode):
        return argument({k: values[k] for k in argument.dependencies})
    return argument


def literal(value: Any, alive: list[Any], mutable: bool = True) -> Any:
    """A key that is equal for equal values.

    Values that it cannot compare, and mutable ones unless `mutable`, get a key by identity; they
    are appended to `alive`.
    """
    kind = type(value)

    def words(v: Any) -> Any:
        return literal(v, alive, mutable)

    if kind in _ATOMS:
        return kind, repr(value) if kind is float or kind is complex else value
    if kind is tuple or (kind is list and mutable):
        return kind, tuple([words(v) for v in value])
    if kind is slice:
        return kind, words(value.start), words(value.stop), words(value.step)
    if kind is dict and mutable:
        return kind, tuple([(words(k), words(v)) for k, v in value.items()])
    if isinstance(value, np.generic) and (mutable or not isinstance(value, np.void)):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, (np.dtype, type)):
        return value
    if kind is partial:
        return kind, words(value.func), words(value.args), words(value.keywords)
    if isinstance(value, NestedContainer) and not value.dependencies:  # made anew at each call
        return kind, tuple([words(v) for v in value.args])
    if kind is DataNode:
        return kind, words(value.value)
    first = getattr(value, "first", None)  # toolz.Compose
    if first is not None and isinstance(getattr(value, "funcs", None), tuple):
        return kind, words(first), words(value.funcs)
    alive.append(value)
    known = kind is FunctionType or kind is BuiltinFunctionType or isinstance(value, np.ufunc)
    return "function" if known else kind, id(value)


def set_elements(x: Any, v: Any, indices: list[Any]) -> Any:
    """Dask's `setitem`, also with indices that are no arrays of NumPy's.

    Indices of elements that are in other blocks come as the length of the block. Dask takes these
    out of NumPy's arrays only (dask/dask#11730), and CuPy wraps them round, to the first element.
    """
    inside: list[Any] = list(indices)
    for axis, (index, length) in enumerate(zip(indices, x.shape, strict=False)):
        kind = getattr(getattr(index, "dtype", None), "kind", "")
        if kind in ("i", "u") and getattr(index, "ndim", 0) == 1 and type(index) is not np.ndarray:
            inside[axis] = index[index < length]
    return setitem(x, v, inside)
