"""Dask's fused tasks as plain Python functions, compiled once and shared by all chunks of a layer.

`dask._task_spec._execute_subgraph` orders its inner graph again at every call, which costs ten
times what the arithmetic of a small chunk does. The inner graph is the same object for all chunks
of a Blockwise layer, so here it becomes the source of one function, with every intermediate
deleted after its last use. Nothing is re-ordered, skipped or shared beyond what Dask wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from keyword import iskeyword
from types import CodeType
from typing import Any

from dask._task_spec import (
    Alias,
    DataNode,
    GraphNode,
    NestedContainer,
    Task,
    TaskRef,
    convert_legacy_graph,
)
from dask._task_spec import _execute_subgraph as execute_subgraph

Values = dict[Any, Any]


class Call:
    """A compiled function and the arguments that one chunk gives it. Called like a Dask task."""

    __slots__ = ("args", "function", "key")

    def __init__(self, key: Any, function: Callable[..., Any], args: tuple[Any, ...]):
        self.key, self.function, self.args = key, function, args

    def __call__(self, values: Values) -> Any:
        return self.function(*[_value(a, values) for a in self.args])

    def __repr__(self) -> str:
        return f"<Call {self.key!r} of a fused sub-graph>"


class Chain:
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

    def __repr__(self) -> str:
        return f"<Chain {' -> '.join(str(k) for k, _ in self.tasks)}>"


class Compiler:
    """Turns fused tasks into `Call`s; remembers one function per inner graph object."""

    def __init__(self) -> None:
        # The inner dict is kept beside its function: an id means nothing once its owner is gone.
        self._known: dict[int, tuple[Any, Any, Any, Callable[..., Any]]] = {}

    def __call__(self, task: GraphNode) -> Callable[[Values], Any]:
        if not isinstance(task, Task) or task.func is not execute_subgraph or task.kwargs:
            return task
        inner, outkey, inkeys, *args = task.args
        known = self._known.get(id(inner))
        if known is not None and known[1] == outkey and known[2] == inkeys:
            function = known[3]
        else:
            function = compile_subgraph(inner, outkey, tuple(inkeys), self)
            self._known[id(inner)] = (inner, outkey, inkeys, function)
        return Call(task.key, function, tuple(args))


def compile_subgraph(
    inner: Mapping[Any, Any], outkey: Any, inkeys: tuple[Any, ...], nested: Compiler | None = None
) -> Callable[..., Any]:
    """The function that `_execute_subgraph(inner, outkey, inkeys, *args)` calls again and again.

    >>> from operator import add, mul
    >>> inner = {"b": Task("b", add, TaskRef("a"), 1), "c": Task("c", mul, TaskRef("b"), 2)}
    >>> compile_subgraph(inner, "c", ("a",))(3)
    8
    """
    source = _Source(convert_legacy_graph(inner), inkeys, nested or Compiler())
    text = source.function(outkey)
    namespace: dict[str, Any] = dict(source.constants)
    exec(_code(text), namespace)
    return namespace.pop("fused")  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def _code(text: str) -> CodeType:
    return compile(text, "<fused by gpuscheduler>", "exec")


class _Source:
    """Python source for one inner graph: a line per task, in the order of a depth-first walk."""

    def __init__(self, inner: Mapping[Any, GraphNode], inkeys: tuple[Any, ...], nested: Compiler):
        self.inner, self.inkeys, self.nested = inner, inkeys, nested
        self.constants: dict[str, Any] = {}
        # an outer value wins over an inner task of the same key, as in Dask's own version
        self.names: dict[Any, str] = {k: f"a{n}" for n, k in enumerate(inkeys)}

    def function(self, outkey: Any) -> str:
        parameters = ", ".join(f"a{n}" for n in range(len(self.inkeys)))
        order = [k for k in self._walk(outkey) if k not in self.names]
        last = {d: k for k in order for d in self.inner[k].dependencies}
        lines = []
        for n, key in enumerate(order):
            expression = self._expression(self.inner[key])
            self.names[key] = f"t{n}"
            lines.append(f"    t{n} = {expression}")
            dead = sorted(self.names[d] for d in self.inner[key].dependencies if last[d] is key)
            if dead := [name for name in dead if name[0] == "t"]:
                lines.append(f"    del {', '.join(dead)}")
        body = "\n".join(lines)
        return f"def fused({parameters}):\n{body}\n    return {self.names[outkey]}\n"

    def _walk(self, outkey: Any) -> Iterator[Any]:
        """Inner keys, inputs before readers."""
        done: set[Any] = set()
        stack = [(outkey, False)]
        while stack:
            key, ready = stack.pop()
            if key in done or key in self.names:
                continue
            if ready:
                done.add(key)
                yield key
                continue
            if key not in self.inner:
                raise KeyError(f"the fused task reads {key!r}, which it does not have")
            stack.append((key, True))
            stack += [(d, False) for d in sorted(self.inner[key].dependencies, key=str)]

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
            assert isinstance(call, Call)
            function, args, kwargs = call.function, call.args, {}
        else:
            function, args, kwargs = task.func, task.args, task.kwargs
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
