"""Predict working memory of tasks from earlier runs, of this process and of others.

A prediction is a guess: what a plan's own steps take replaces it (`RunHistory.learn`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from types import FunctionType
from typing import Any

from dask._task_spec import GraphNode, NestedContainer, Task, TaskRef
from dask.utils import key_split

from .. import disk_cache
from ..forks import new_lock
from ..frontend.compiled_task import CompiledCall, InnerStep
from ..frontend.task import sequence_of
from ..fusion.portable import PortableTask
from ..values import sizeof
from .plan import Plan

#: Bytes that a task must touch for its working memory to matter.
LEAST = 2**20
#: Kinds of task that are kept, the latest.
MOST = 4096


class WorkingMemory:
    """Working memory that kinds of tasks took on devices of one kind, "cpu" or "cuda"."""

    def __init__(self, kind: str):
        self.kind = kind
        self._seen: dict[str, int] | None = None
        self._lock = new_lock()

    def foresee(self, plan: Plan) -> None:
        """Tell a plan's history which working memory is foreseen, by kind of step."""
        with self._lock:
            if self._seen is None:
                self._seen = known_working_memory(self.kind)
            seen = self._seen
        foreseen = dict(declared_working_memory(plan))
        if seen:
            found = ((kind, seen.get(words)) for kind, words in _kinds(plan))
            foreseen |= {kind: nbytes for kind, nbytes in found if nbytes}
        if foreseen:
            plan.history.foreseen = foreseen

    def learn(self, plan: Plan) -> None:
        """Keep the working memory that a plan's kinds of steps have taken."""
        took = {k: n for k, n in plan.history.extra.items() if n}
        if not took:
            return
        now = {words: took[kind] for kind, words in _kinds(plan) if kind in took}
        with self._lock:
            seen = self._seen or {}
            now = {words: n for words, n in now.items() if n > seen.get(words, 0)}
            if now:
                seen = {**seen, **known_working_memory(self.kind)}  # other processes have seen more
                self._seen = dict(list({**seen, **now}.items())[-MOST:])
                keep(self.kind, self._seen)


def declared_working_memory(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield kinds of steps whose function declares its working memory, and the bytes.

    Its attribute `working_memory` is called with the bytes of each value that the task reads, in
    the order of its arguments.
    """
    found: set[int] = set()
    for step in plan.steps:
        task = _inner_task(step.task)
        if step.kind in found or not isinstance(task, Task):
            continue
        found.add(step.kind)
        declare = None
        with suppress(Exception):  # a user's object may give anything, or raise anything
            declare = getattr(task.func, "working_memory", None)
        if callable(declare):
            sizes = {name: sizeof(value) for name, value in step.constants.items()}
            names = zip(step.names, step.sources, strict=True)
            sizes |= {name: plan.steps[j].nbytes for name, j in names}
            yield (
                step.kind,
                int(declare(*[sizes[k] for k in _argument_keys(task.args) if k in sizes])),
            )


def _inner_task(task: Any) -> Any:
    """The task that a portable one computes with a GPU's arrays; others as they are."""
    return task.task if isinstance(task, PortableTask) else task


def _argument_keys(arguments: Iterable[Any]) -> Iterator[Any]:
    """The keys that arguments name, in order."""
    for argument in arguments:
        if isinstance(argument, TaskRef):
            yield argument.key
        elif isinstance(argument, NestedContainer):
            yield from _argument_keys(argument.args)


def known_working_memory(kind: str) -> dict[str, int]:
    """Read the working memory that processes of this machine have seen, by kind of task."""
    content = disk_cache.read(_words_of(kind))
    return {} if content is None else json.loads(content)


def keep(kind: str, seen: dict[str, int]) -> None:
    """Write the working memory of kinds of tasks for other processes."""
    disk_cache.keep(_words_of(kind), json.dumps(seen).encode())


def _words_of(kind: str) -> tuple[str, ...]:
    return "taken", "1", kind


def _kinds(plan: Plan) -> Iterator[tuple[int, str]]:
    """Yield kinds of steps that may need working memory, and a digest of their tasks and sizes."""
    found: set[int] = set()
    steps = plan.steps
    for step in steps:
        if step.kind in found or step.fixed or step.aside:
            continue
        found.add(step.kind)
        read = [steps[j].nbytes for j in step.inputs]
        if step.nbytes + sum(read) < LEAST:
            continue
        what = _describe_task(step.task)
        if what is not None:
            words = what, read, step.nbytes if step.known else None
            yield step.kind, sha256(repr(words).encode()).hexdigest()[:24]


def _describe_task(task: Any) -> Any:
    """Describe a task in words that another process repeats.

    None for a task that needs no working memory, or is of an unknown type.
    """
    task = _inner_task(task)
    sequence = sequence_of(task)
    if len(sequence) > 1:
        return [_describe_task(part) for _, part in sequence]
    if isinstance(task, CompiledCall):
        return [_step(s) for s in task.steps]
    if isinstance(task, GraphNode) and hasattr(task, "func"):
        return [_name(task.func), *[_name(a) for a in _arguments(task) if callable(a)]]
    return None


def _step(step: InnerStep) -> Any:
    return key_split(step.key), [_step(s) for s in step.steps]


def _arguments(task: Any) -> Iterator[Any]:
    for part in (*task.args, *task.kwargs.values()):
        if isinstance(part, NestedContainer):
            yield from _arguments(part)
        elif not isinstance(part, GraphNode):
            yield part


def _name(function: Any) -> str:
    if isinstance(function, partial):
        return _name(function.func)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if isinstance(function, FunctionType):  # there may be many of one name
        return f"{name} {sha256(function.__code__.co_code).hexdigest()[:12]}"
    return f"{name} {type(function).__name__}"
