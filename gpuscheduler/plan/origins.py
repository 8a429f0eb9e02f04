"""Whose code a step is: the user's layer, function and line.

Tasks keep what they were made of: a kernel its original tasks, a fused task its inner graph. So
nothing is written down while a graph is planned. What a step comes from is found when somebody
asks: for the note of an error, for a table, for a report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import Task
from dask.utils import key_split

from ..dask_private import execute_subgraph
from ..frontend import lines as user_lines
from ..frontend.compiled_task import CompiledCall, InnerStep
from ..frontend.graph import layer_of
from ..frontend.task import OwnTask

Key = Any
#: Characters of a label at most.
LONGEST = 40
#: Lines of a step that are shown.
MOST_LINES = 5
#: Layers of which Dask makes several for one operation: "mean_chunk", "sum-aggregate".
_PART = re.compile(r"^chunk_|(?:_chunk|_combine|_agg)?(?:-partial|-aggregate)?$|-merge$|-split$")
_TREE = re.compile(r"(?:_combine|_agg)?(?:-partial|-aggregate)$")
#: Libraries whose functions have short names in labels.
_SHORT = ("numpy", "cupy", "scipy", "operator", "_operator", "math", "builtins")
#: How deep functions are looked for in functions that call them.
_DEPTH = 6


class Origin(NamedTuple):
    """One of the user's operations in a step."""

    layer: str  # "normalise-fa79…", as Dask calls it
    function: str  # "normalise", "numpy.exp", "Model.step", "sum (tree)"
    code: str  # where that function is defined: "wave.py:6"; "" where it is no function of Python
    line: str  # where the user wrote the operation: "wave.py:21"; "" where unknown


class _Call(NamedTuple):
    """A task of Dask's inside a step."""

    key: Key
    function: Any


def task_origins(
    task: Any, key: Key, renamed: Mapping[str, str] | None = None
) -> tuple[Origin, ...]:
    """The user's operations in a task, in the order in which they run, each once.

    `renamed` has other names for layers: those of the collection that a template's plan is for.
    """
    out: dict[Origin, None] = {}
    for call in _calls(task, key):
        out[_origin(call, renamed or {})] = None
    every = list(out)
    results = [o for o in every if o.function == "result"]
    if len(results) < len(every):  # a step of its own is worth a name
        every = [o for o in every if o.function != "result"]
    return tuple(every)


def layer_lines(tasks: Mapping[Key, Any]) -> dict[str, str]:
    """The lines on which the user wrote the layers of these tasks, as far as they are known.

    Of tasks of one layer the first tells which others it has inside.
    """
    out: dict[str, str] = {}
    seen: set[str] = set()
    for key, task in tasks.items():
        layer = layer_of(key)
        if layer not in seen:
            seen.add(layer)
            with suppress(Exception):  # of a user's object: its line is only not known
                out.update({o.layer: o.line for o in task_origins(task, key) if o.line})
    return out


def _calls(task: Any, key: Key) -> Iterator[_Call]:
    """The tasks of Dask's that a task was made of, producers first."""
    if isinstance(task, CompiledCall):
        yield from _inner_calls(task.steps, task.function)
    elif isinstance(task, OwnTask):
        for name, inner in _inner_tasks(task, key):
            yield from _calls(inner, name)
    elif type(task) is Task and task.func is execute_subgraph:
        for name, inner in task.args[0].items():
            yield from _calls(inner, name)
    elif type(task) is Task:
        yield _Call(key, _users_function([task.func, *task.args, *task.kwargs.values()]))
    else:
        yield _Call(key, getattr(task, "func", None))


def _inner_tasks(task: OwnTask, key: Key) -> Iterator[tuple[Key, Any]]:
    """The tasks in a task of ours, with the keys of their values, producers first."""
    if task.original is not task:
        yield key, task.original
    elif len(task.sequence) > 1:
        yield from task.sequence
    else:
        before = getattr(task, "before", None)  # of a `TaskWithProducers`
        if isinstance(before, list):
            yield from before
            yield key, task.task
            return
        parts = [part for part in task.parts if isinstance(part, OwnTask | Task)]
        keys = getattr(task.key, "keys", ())  # of several values
        if callable(keys) or len(keys) != len(parts):
            keys = [getattr(part, "key", None) or key for part in parts]
        yield from zip(keys, parts, strict=True)


def _inner_calls(steps: tuple[InnerStep, ...], function: Any) -> Iterator[_Call]:
    known = function.__globals__
    for step in steps:
        values = [known.get(name) for name in step.constants]
        if step.steps and values:
            yield from _inner_calls(step.steps, values[-1])
        elif values:
            yield _Call(step.key, _users_function([values[-1], *values[:-1]]))


def _users_function(candidates: list[Any], depth: int = 0) -> Any:
    """The user's function among these: the called one, or one that Dask's own is given."""
    first = candidates[0] if candidates else None
    if depth > _DEPTH:
        return first
    if _is_users(first):
        return first
    for value in candidates:
        if isinstance(value, partial):
            inner = [value.func, *value.args, *value.keywords.values()]
            found = _users_function(inner, depth + 1)
        elif type(value).__name__ == "Compose":
            found = _users_function([*reversed(value.funcs), value.first], depth + 1)
        elif isinstance(value, FunctionType) and value.__closure__ and _is_of_dask(value):
            inner = [_content(cell) for cell in value.__closure__]
            found = _users_function([value.__name__, *inner], depth + 1)
        else:
            found = value
        if _is_users(found):
            return found
    while isinstance(first, partial):
        first = first.func
    return first


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _is_users(value: Any) -> bool:
    code = code_of(value)
    if code is None:
        return False
    return user_lines.is_users_code(code.co_filename, getattr(value, "__module__", "") or "")


def code_of(value: Any) -> CodeType | None:
    """The code of a function of Python, also of a method or of an object that is called."""
    value = getattr(value, "pyfunc", None) or value  # np.vectorize
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        return value.__code__
    py_func = getattr(value, "py_func", None)  # of Numba
    if isinstance(py_func, FunctionType):
        return py_func.__code__
    if isinstance(value, type) or not callable(value):
        return None
    call = type(value).__call__
    return call.__code__ if isinstance(call, FunctionType) else None


def _is_of_dask(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("dask", "distributed", "gpuscheduler", "toolz", "tlz")


def _origin(call: _Call, renamed: Mapping[str, str]) -> Origin:
    layer = layer_of(call.key)
    layer = renamed.get(layer, layer)
    code = code_of(call.function)
    where = ""
    if code is not None and _is_users(call.function):
        where = user_lines.place_in_file(code.co_filename, code.co_firstlineno)
    return Origin(layer, function_name(call.function, layer), where, user_lines.line_of(layer))


def function_name(function: Any, layer: str) -> str:
    """The name of a function, for people; that of the layer where the function is Dask's.

    >>> function_name(np.exp, "exp-1"), function_name(None, "mean_agg-aggregate-1")
    ('numpy.exp', 'mean (tree)')
    """
    name = key_split(layer)
    if name.startswith("finalize"):
        return "result"
    if isinstance(function, np.ufunc):
        return f"numpy.{function.__name__}"
    function = getattr(function, "pyfunc", None) or function
    own = getattr(function, "__qualname__", "") or getattr(type(function), "__qualname__", "")
    own = own.rpartition("<locals>.")[2]
    module = (getattr(function, "__module__", None) or "").partition(".")[0]
    if function is None or _is_of_dask(function) or not own or module in ("builtins", "functools"):
        short = _PART.sub("", name) or name
        return f"{short} (tree)" if _TREE.search(name) else short
    if module in _SHORT:
        return f"{module.lstrip('_')}.{own}"
    return "lambda" if own == "<lambda>" else own


def label(origins: tuple[Origin, ...]) -> str:
    """Functions in order, at most `LONGEST` characters; the user's own stay longest.

    >>> label((Origin("a-1", "normalise", "", ""), Origin("b-1", "numpy.exp", "", "")))
    'normalise · exp'
    """
    names: list[tuple[str, bool]] = []  # and whether they are the user's
    for origin in origins:
        first, _, rest = origin.function.partition(".")
        short = rest if first in ("numpy", "cupy", "scipy", "operator", "math") else origin.function
        if not names or names[-1][0] != short:
            names.append((short, bool(origin.code)))
    if [name for name, _ in names] == ["result"] and (where := lines(origins)):
        return f"result of {where}"
    if len(names) > 1 and names[-1][0] == f"{names[-2][0]} (tree)":  # one reduction, one kernel
        names.pop()
    kept = list(range(len(names)))
    while len(out := _join_names(names, kept)) > LONGEST and len(kept) > 1:
        inner = kept[1:-1]
        others = [n for n in kept[:-1] if not names[n][1]]
        less = [n for n in inner if not names[n][1]] or others or inner or kept[:1]
        kept.remove(less[len(less) // 2])
    return out if len(out) <= LONGEST else out[: LONGEST - 1] + "…"


def _join_names(names: list[tuple[str, bool]], kept: list[int]) -> str:
    """The kept names, with dots where others are left out."""
    out, before = [], -1
    for n in kept:
        if n > before + 1:
            out.append("…")
        out.append(names[n][0])
        before = n
    return " · ".join(out)


def lines(origins: tuple[Origin, ...]) -> str:
    """The user's lines, each once, in order; of many the first ones and the last.

    >>> lines((Origin("a-1", "f", "", "wave.py:3"), Origin("b-1", "exp", "", "wave.py:4")))
    'wave.py:3, wave.py:4'
    """
    found = list(dict.fromkeys([o.line for o in origins if o.line]))
    if len(found) > MOST_LINES:
        found[MOST_LINES - 1 : -1] = ["…"]
    return ", ".join(found)


def describe_task(task: Any, key: Key, renamed: Mapping[str, str] | None = None) -> str:
    """A task for people: "normalise · sum (wave.py:21)"; "" where its key says as much."""
    try:
        origins = task_origins(task, key, renamed)
    except Exception:  # of a user's object: the error that is told here matters more
        return ""
    where = lines(origins)
    words = label(origins)
    if not where:
        return "" if words == key_split(key) else words
    return f"{words} ({where})"


def failed_at(
    traceback: TracebackType | None, is_users: Callable[[CodeType], bool] | None = None
) -> str:
    """Where in the user's code an exception was raised: "bad (wave.py:9)"; "" where in none."""
    out = ""
    while traceback is not None:
        frame = traceback.tb_frame
        code = frame.f_code
        own = user_lines.is_users_frame(frame) if is_users is None else is_users(code)
        if own:
            name = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]
            name = "a lambda" if name == "<lambda>" else name
            out = f"{name} ({user_lines.place_in_file(code.co_filename, traceback.tb_lineno)})"
        traceback = traceback.tb_next
    return out
