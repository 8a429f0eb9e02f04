"""Plan templates: plans without names and data, reused for alike collections.

A collection that differs from a planned one only in names and data gets its plan from a template.
The rounds of an iteration are alike, for example: the same functions read new blocks under new
names. Fingerprints compare graphs layer by layer, as Dask wrote them: a Blockwise layer is one
task, however many blocks it has. A graph with a part that may mean something else in another graph
has no fingerprint and no template: a mutable argument, a class of arrays of the user's own that
compute, a task that stores its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_not
from types import FunctionType
from typing import Any
from weakref import ref

import numpy as np
from dask._task_spec import DataNode, GraphNode, Task

from ..frontend.captured import Variable, all_unchanged, content
from ..frontend.compiled_task import COMPILED, Chain, CompiledCall
from ..frontend.graph import Graph
from ..frontend.rebuild import attributes_of, swap_parts
from ..frontend.task import OwnTask, TaskDescription, describe, kernels_of
from ..frontend.transfers import SENDING
from ..fusion.horizontal import SequentialTasks, TupleItemKey
from ..fusion.library_task import NumpyTask
from ..fusion.portable import PortableTask
from ..fusion.residency import HostTask
from ..plan.plan import OF_STRUCTURE, Step
from ..tracing.bytecode import ClosureCells
from ..values import FunctionSet
from .comparable import ArraySlot, is_file_array, is_opaque, is_task_data
from .fingerprint import Fingerprint, Key
from .plan_entry import PlanEntry

#: Tasks that send an array to a device.
SENDERS = FunctionSet(*SENDING, np.ascontiguousarray)
#: Tasks that call their parts as they were written.
AS_WRITTEN = (Chain, CompiledCall, HostTask, NumpyTask, PortableTask, SequentialTasks)


class FilledTask(OwnTask):
    """A task with slots for arrays, which are filled when it is called."""

    __slots__ = ("arrays", "key", "task")

    def __init__(self, task: Callable[[dict[Key, Any]], Any], arrays: Sequence[Any]):
        self.task, self.arrays = task, arrays
        self.key = getattr(task, "key", None)

    def __call__(self, values: dict[Key, Any]) -> Any:
        return self._filled_task()(values)

    def _filled_task(self) -> Any:
        return _fill_task(self.task, self.arrays, {})

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self._filled_task(),)

    def with_parts(self, *parts: Any) -> FilledTask:
        (task,) = parts
        return FilledTask(task, ())

    def describe(self) -> TaskDescription:
        return describe(self.task)


@dataclass(slots=True, repr=False)
class PlanTemplate:
    """A plan without data; a step has the numbers of its missing data."""

    entry: PlanEntry
    names: tuple[str, ...]
    own: dict[int, list[int]]  # by step, the numbers of data that its task holds
    constants: dict[int, dict[Key, int]]  # by step, the numbers of its constants that are data
    slots: set[int]  # steps whose tasks have slots
    values: dict[int, tuple[bytes, ...]]  # by number, arrays whose values the plan depends on
    around: tuple[Variable, ...]  # functions and variables that the plan depends on

    def __repr__(self) -> str:
        return f"<Template of {self.entry.plan!r}>"

    def is_valid(self) -> bool:
        """Whether functions and globals that the plan depends on are unchanged."""
        return all_unchanged(self.around) and not self.entry.graph.has_changed()

    def fits(self, like: Fingerprint) -> bool:
        """Whether the arrays of a computation have the values that the plan depends on."""
        return all(content(like.data[n]) == before for n, before in self.values.items())

    def fill(self, like: Fingerprint, wanted: tuple[Key, ...]) -> PlanEntry:
        """Return the plan of a computation with the template's fingerprint."""
        names = dict(zip(self.names, like.names, strict=True))
        data, steps = like.data, []
        known: dict[int, Any] = {}
        base = self.entry.plan
        for i, s in enumerate(base.steps):
            key, constants = _rename_key(s.key, names), s.constants
            own = [data[n] for n in self.own.get(i, ())]
            task: Any = s.task
            if i in self.slots:
                task = _with_arrays(task, data, known)
            if isinstance(task, OwnTask):  # it may remember where its arrays were
                task = task.with_data(tuple(own))
            elif own:
                task = DataNode(key, *own) if type(task) is DataNode else Task(key, task.func, *own)
            if i in self.constants:
                missing = self.constants[i]
                constants = {**constants, **{k: data[n] for k, n in missing.items()}}
            steps.append(Step(
                key, task, s.inputs, s.names, s.sources, constants, s.place, s.nbytes, s.known,
                s.seconds, s.kind, s.fixed, s.picks, s.aside, s.again, s.sent,
            ))  # fmt: skip
        for fact in OF_STRUCTURE:
            getattr(base, fact)  # all plans like it have them, too
        plan = base.with_steps(steps, renamed=names)
        graph = self.graph_of(like, wanted)
        return PlanEntry(
            graph, plan, like=self.entry, choice=self.entry.choice, nbytes=self.entry.nbytes
        )

    def graph_of(self, like: Fingerprint, wanted: tuple[Key, ...]) -> Graph:
        """Return the graph of a computation with the template's fingerprint."""
        names = dict(zip(self.names, like.names, strict=True))
        graph, data = self.entry.graph, like.data
        called = {t: _rename_key(t, names) for w in graph.wanted if (t := graph.alias.get(w))}
        called.update(zip(graph.wanted, wanted, strict=True))
        values = {id(data[n]): (data[n], before) for n, before in self.values.items()}
        values.update(graph.values)
        around = like.around + self.around
        return replace(graph, called=called, around=around, values=values)


def _rename_key(key: Key, names: Mapping[str, str]) -> Key:
    if type(key) is tuple and key and key[0] in names:
        return (names[key[0]], *key[1:])
    if type(key) is TupleItemKey:
        return TupleItemKey(tuple([_rename_key(k, names) for k in key.keys]))
    return names.get(key, key) if type(key) is str else key


def template(planned: PlanEntry, like: Fingerprint) -> PlanTemplate | None:
    """Take the data out of a plan; None where plan and data cannot be told apart."""
    graph, plan = planned.graph, planned.plan
    if graph.data:
        return None
    taken, steps = _DataTaker(graph, like), []
    for i, step in enumerate(plan.steps):
        emptied = taken.empty_step(i, step)
        if emptied is None:
            return None
        steps.append(emptied)
    # what functions read in a module stays, whatever data it is in this round
    if any(type(g[0]) is not ClosureCells and taken.has_data(g[2]) for g in graph.globals):
        return None
    number = taken.number
    less: dict[str, Any] = dict.fromkeys(("nodes", "inner_sizes", "inner_blocks"), {})
    # what has data in it goes: otherwise tasks have other variables by now
    less["globals"] = [
        g for g in graph.globals if type(g[0]) is not ClosureCells or taken.empty(g[2]) is g[2]
    ]
    around = [v for v in (*like.around, *graph.around) if taken.empty(v) is v]
    less["around"] = ()
    less["values"] = {k: v for k, v in graph.values.items() if k not in number}
    less["containers"] = {}  # nobody changes those of what is like something else
    values = {number[k]: before for k, (_, before) in graph.values.items() if k in number}
    plan = plan.with_steps(steps, predicted=None)
    entry = PlanEntry(replace(graph, **less), plan, choice=planned.choice)
    return PlanTemplate(
        entry, like.names, taken.own, taken.constants, taken.slots, values, tuple(around)
    )


class _DataTaker:
    """Takes the data of one computation out of the steps of its plan.

    It owns what it has taken, by step.
    """

    def __init__(self, graph: Graph, like: Fingerprint):
        self.graph = graph
        #: Numbers of data, by their ids; and of those that may be inside tasks.
        self.number: dict[int, int] = {}
        self._inside: dict[int, int] = {}
        for n, value in enumerate(like.data):
            self.number.setdefault(id(value), n)
            if is_task_data(value) or is_opaque(value) or is_file_array(value):
                self._inside.setdefault(id(value), n)
        #: Arrays that are told by their values stay: the template goes when one changes.
        told = {id(it) for it, _ in like.around if type(it) is np.ndarray}
        self._told = told - self.number.keys()
        #: Objects in tasks, and arrays in files, by their ids.
        self._objects = {id(v) for v in like.data if is_opaque(v) or is_file_array(v)}
        self._known: dict[int, Any] = {}
        self._seen: set[int] = set()
        #: Numbers of the data taken out of steps: their own, among constants, and in slots.
        self.own: dict[int, list[int]] = {}
        self.constants: dict[int, dict[Key, int]] = {}
        self.slots: set[int] = set()

    def empty(self, value: Any) -> Any:
        """The value with slots in place of data; the value itself if it has none."""
        number = self._inside

        def swap(it: Any) -> Any:
            return ArraySlot(number[id(it)]) if id(it) in number else it

        return swap_parts(value, swap, self._known)

    def empty_step(self, i: int, step: Step) -> Step | None:
        """A step without its data; None where this cannot be told apart from it."""
        number, beside = self.number, self.graph.beside
        task: Any = step.task
        own: list[Any] = []
        others = step.key in beside  # it may be an array of a module's
        if type(task) is DataNode and (not others or id(task.value) in number):
            own, task = [task.value], DataNode(step.key, None)
        elif step.sent and type(task) is Task and task.func in SENDERS:
            if not others or id(task.args[0]) in number:
                own, task = [*task.args], Task(step.key, task.func, None)
        else:
            if isinstance(task, OwnTask) and task.data:
                own, task = [*task.data], task.with_data(())
            emptied = self.empty(task)
            if emptied is not task:
                if self._objects and not self._calls_objects(task):
                    return None
                self.slots.add(i)
                task = emptied
        constants = {
            k: v
            for k, v in step.constants.items()
            if id(v) in number or (is_task_data(v) and id(v) not in self._told and k not in beside)
        }
        if any(id(v) not in number for v in (*own, *constants.values())) or self.has_data(task):
            return None
        if any(id(v) in self._objects for v in constants.values()) and not _is_as_written(task):
            return None  # a kernel may depend on what is in a file
        rest = {k: v for k, v in step.constants.items() if k not in constants}
        if any(map(self.has_data, rest.values())):  # in what a user's tuple holds, say
            return None
        if own:
            self.own[i] = [number[id(v)] for v in own]
        if constants:
            self.constants[i] = {k: number[id(v)] for k, v in constants.items()}
        if not (own or constants or i in self.slots):
            return step
        return replace(step, task=task, constants=rest)

    def _calls_objects(self, task: Any) -> bool:
        """Whether a task only calls functions with opaque objects, as they are written.

        A kernel may depend on the objects. (No function that holds one is traced today.)
        """
        if not isinstance(task, OwnTask):
            return True
        if _is_as_written(task):
            return all(map(self._calls_objects, task.parts))
        objects = self._objects
        return swap_parts(task, lambda it: None if id(it) in objects else it, {}) is task

    def has_data(self, task: Any) -> bool:
        """Whether a task has data in any of its parts; parts that were searched are skipped."""
        seen, stack = self._seen, [task]
        while stack:
            it = stack.pop()
            if id(it) in seen:
                continue
            seen.add(id(it))
            if id(it) in self._inside:
                return True
            stack += _parts_of(it)
        return False


def _is_as_written(task: Any) -> bool:
    """Whether a task calls its parts as users wrote them, and has no version for GPUs."""
    if not isinstance(task, OwnTask):
        return True
    return type(task) in AS_WRITTEN and getattr(task, "gpu_task", None) is None


def _parts_of(it: Any) -> Iterable[Any]:
    """Return all parts of a task or of a part, also those that `swap_parts` never replaces."""
    kind = type(it)
    if kind in (tuple, list, set, frozenset):
        return it  # type: ignore[no-any-return]
    if kind is dict:
        return it.values()  # type: ignore[no-any-return]
    if kind is partial or kind.__name__ == "curry":
        return [it.func, it.args, it.keywords]
    if kind.__name__ == "Compose":
        return [it.first, *it.funcs]
    if kind is FunctionType:
        # without variables that are not bound yet
        held = [*ClosureCells.of_function(it).values(), it.__defaults__, it.__kwdefaults__]
        held += vars(it).values()
        if it.__code__.co_filename == COMPILED:
            held += [v for k, v in it.__globals__.items() if k != "__builtins__"]
        return held
    if isinstance(it, OwnTask):
        return it.parts
    return attributes_of(it).values() if isinstance(it, GraphNode) else ()


class FilledTemplate:
    """The plan that a template gave last, for computations with the same names and data.

    These get the very same steps. This lives no longer than the first layer that has any of the
    data. It has only a weak reference to the plan that the template was made of, whose graph is
    larger than a plan needs.
    """

    def __init__(
        self,
        template: PlanTemplate,
        like: Fingerprint,
        wanted: tuple[Key, ...],
        entry: PlanEntry | ref[PlanEntry],
        watched: Sequence[Any] = (),
    ):
        self._template, self._entry = template, entry
        self._watched = watched  # references to the layers that have the data
        self._names, self._data, self._wanted = like.names, like.data, wanted
        self._layouts = like.layouts()

    def renew(self, like: Fingerprint, wanted: tuple[Key, ...]) -> PlanEntry | None:
        """The plan for a computation with the same structure; None where it has other data.

        Only results that are one key each may have another name, as each `compute()` gives them.
        """
        if len(like.data) != len(self._data) or any(map(is_not, like.data, self._data)):
            return None
        if like.names != self._names:
            results = set(zip(self._wanted, wanted, strict=True))
            pairs = zip(self._names, like.names, strict=True)
            if not all(a == b or (a, b) in results for a, b in pairs):
                return None
        template, layouts = self._template, like.layouts()
        if layouts is None or layouts != self._layouts:
            return None
        if not (template.is_valid() and template.fits(like)):
            return None
        known = self._entry if isinstance(self._entry, PlanEntry) else self._entry()
        if known is None:
            return None
        self._entry = out = known.for_graph(template.graph_of(like, wanted))
        self._wanted, self._names = wanted, like.names
        return out


# ---- arrays and objects in tasks


def _fill_task(task: Any, data: Sequence[Any], known: dict[int, Any]) -> Any:
    return swap_parts(task, lambda it: data[it.number] if type(it) is ArraySlot else it, known)


def _with_arrays(task: Any, data: Sequence[Any], known: dict[int, Any]) -> Any:
    """Return the task with arrays in its slots.

    A task with kernels reads these arrays as inputs. Only the original task, which runs where the
    kernel does not, has them in its slots.
    """
    if kernels_of(task):
        return task.with_originals(lambda original: FilledTask(original, data))
    return _fill_task(task, data, known)
