"""Find the plan of a computation in the plan cache, or make it.

A collection that was computed before has its plan in the cache. One that is like another gets its
plan from a template. All others are read from Dask and compiled (`compile`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dask._task_spec import DataNode

from ..frontend import lowering
from ..frontend.chunk import Chunk
from ..frontend.graph import Graph, wanted_keys
from ..gc_control import put_aside, without_garbage_collection
from ..options import Options
from ..plan.plan import Plan
from ..plan.working_memory import WorkingMemory
from ..runtime.dask_callbacks import DaskCallbacks, TaskView
from ..runtime.observe import RunRecord
from ..runtime.protocol import Hardware, Lease
from . import compile
from .cache import PlanCache, build_expression, signature
from .choice import choose
from .number_errors import wants_number_errors
from .plan_entry import PlanEntry
from .request import ComputeRequest
from .tall_layers import choose_rewriting

#: Graphs of `Planner.plan_graph` whose plans are kept.
KEPT_GRAPHS = 32
#: Plans with more steps than this are hidden from the garbage collector (`gc.freeze`) while they
#: run: otherwise it would scan them twice.
MANY_STEPS = 20_000


@dataclass(eq=False, repr=False)
class Planner:
    """Finds or makes the plans of one scheduler."""

    hardware: Hardware
    options: Options
    cache: PlanCache
    working_memory: WorkingMemory
    host_threads: int = 1  # that may compute NumPy's arrays in place of GPUs
    #: Plans of `plan_graph`, by the names under which they are kept.
    _graphs: dict[Any, PlanEntry] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget every plan."""
        self.cache.clear()
        self._graphs.clear()

    def plan_request(
        self,
        request: ComputeRequest,
        lease: Lease,
        callbacks: DaskCallbacks | None,
        record: RunRecord | None = None,
    ) -> PlanEntry:
        """Read and plan for callbacks and for Dask's cache of values; else find or plan."""
        if request.cache is None and callbacks is not None and not callbacks.per_task:
            view = TaskView(lambda: lowering.lower_for_callbacks(build_expression(request.dsk)))
            callbacks.start(view)
            if not view.is_changed:
                return self.find_or_plan(request.dsk, request.keys, lease, record)
            callbacks.changed = view
        elif callbacks is None and request.cache is None:
            return self.find_or_plan(request.dsk, request.keys, lease, record)
        expr = build_expression(request.dsk)
        return self.plan_expression(expr, request.keys, lease, request.cache, callbacks)

    def find_or_plan(
        self,
        dsk: Any,
        keys: Any,
        lease: Lease,
        record: RunRecord | None = None,
        resident: bool = False,
        keep: bool = False,
    ) -> PlanEntry:
        """The plan of this collection or of one like it, from the cache if it was made before.

        Notes in the `record` which of these it was: "cache", "template" or "new". GPUs compute a
        `resident` collection of NumPy's arrays, and may `keep` what they make.
        """
        wanted, how = wanted_keys(keys), "cache"
        known = signature(dsk, wanted)
        plan_new = partial(self.plan_expression, resident=resident, keep=keep)
        if known is None:
            found = plan_new(build_expression(dsk), keys, lease)
            found.plan = found.plan.with_facts(once=True)
            if record is not None:
                record.planned = "new"
            return found
        where = lease.machine, self.front_device(lease), self._run_options().fuse, resident, keep
        entry = self.cache.find(known, *where)
        if entry is None:
            dsk, how = build_expression(dsk), "template"
            with without_garbage_collection():
                like = self.cache.likeness(dsk, wanted, self._home_finder(lease, resident))
                if like is not None:
                    entry = self.cache.find_like(like, wanted, *where)
            if entry is None:
                entry, how = plan_new(dsk, keys, lease), "new"
                if like is not None:
                    with without_garbage_collection():
                        self.cache.learn_from(dsk, like, *where, entry=entry)
            self.cache.keep(known, *where, entry=entry)
        if record is not None:
            record.planned = how
        return entry

    def plan_expression(
        self,
        dsk: Any,
        keys: Any,
        lease: Lease,
        values: MutableMapping[Any, Any] | None = None,
        callbacks: DaskCallbacks | None = None,
        resident: bool = False,
        keep: bool = False,
    ) -> PlanEntry:
        """Read a Dask graph and plan it.

        `values` is Dask's cache of values by key. With it, or with callbacks, tasks stay as they
        were: callbacks see them.
        """
        started = callbacks.start if callbacks else None
        home = self._home_finder(lease, resident)
        kind, options = self.hardware.kind, self._run_options()
        rewrite: lowering.Rewrite = lowering.keep_layers
        if values is None:
            rewrite = choose_rewriting(kind, options, resident)
        with without_garbage_collection():

            def read_graph(apart: Mapping[str, str]) -> Graph:
                return lowering.from_dask(
                    dsk, keys, values, started, home, self.front_device(lease),
                    send=kind == "cuda" and lease.threads is None, apart=apart,
                    resident=resident, keep=keep, rewrite=rewrite,
                )  # fmt: skip

            if callbacks is None and values is None:
                graph, plan = compile.plan_dask(
                    read_graph, lease.machine, home, kind, options, self.host_threads
                )
            else:
                graph = read_graph({})
                if values is not None:  # tasks may look into it for the values of the graph
                    for constants in graph.constants.values():
                        values.update(constants)
                graph, plan = compile.plan_graph(
                    graph, lease.machine, home, kind, options, merge=False
                )
            choice = None
            if resident:
                choice = choose(graph, plan, options.numpy, self.host_threads)
                plan = plan.with_facts(resident=True)
            self.working_memory.foresee(plan)
            if len(plan.steps) > MANY_STEPS:
                put_aside()
            return PlanEntry(graph, plan, choice=choice)

    def plan_graph(
        self, make: Callable[[], Graph], given: Mapping[Any, Any], lease: Lease, known: Any = None
    ) -> PlanEntry:
        """The plan of a graph that reads the `given` values; kept without them as `known`."""
        homes = tuple([self.hardware.home(v) for v in given.values()])
        name = (known, homes, self._run_options().fuse)
        found = self._graphs.get(name) if known is not None else None
        if found is None:
            found = self._plan_new_graph(make(), given, lease)
            if known is not None:
                self._graphs[name] = found
                while len(self._graphs) > KEPT_GRAPHS:
                    self._graphs.pop(next(iter(self._graphs)), None)
        plan = _with_values(found.plan, given)
        return PlanEntry(found.graph, plan, like=found, sizes_only=True)

    def _plan_new_graph(self, graph: Graph, given: Mapping[Any, Any], lease: Lease) -> PlanEntry:
        lowering.compile_tasks(graph)
        graph.put_in_front({k: DataNode(k, v) for k, v in given.items()})
        with without_garbage_collection():
            graph, plan = compile.plan_graph(
                graph, lease.machine, self.hardware.home, self.hardware.kind, self._run_options()
            )
        for key in given:  # the values themselves are not kept with the plan
            if key in graph.nodes:
                graph.replace(key, DataNode(key, None))
        return PlanEntry(graph, _with_values(plan, dict.fromkeys(given)))

    def _run_options(self) -> Options:
        """The options of a run that begins now.

        No kernel raises, calls or prints as NumPy does. Where the caller wants that, tasks of CPU
        devices run unfused.
        """
        if self.hardware.kind == "cpu" and self.options.fuse and wants_number_errors():
            return replace(self.options, fuse=False)
        return self.options

    def _home_finder(self, lease: Lease, resident: bool = False) -> Callable[[Any], int | None]:
        """A function that says which of the lease's devices holds a value, if any.

        Tasks of any other than a `resident` graph get NumPy's arrays that GPUs keep as such.
        """
        n, shared = len(lease.machine.devices), lease.machine.shared

        def device_of(value: Any) -> int | None:
            if type(value) is Chunk:
                here = value.keeper is self.hardware and value.resident <= resident
                place = value.place if here else None
                if place is not None and shared:
                    return place % n
            else:
                place = self.hardware.home(value)
            return place if place is not None and place < n else None

        return device_of

    def front_device(self, lease: Lease) -> int | None:
        """The device of the lease where the calling thread expects small results, if any."""
        front = self.hardware.callers_device()
        return front if front is not None and front < len(lease.machine.devices) else None


def _with_values(plan: Plan, values: Mapping[Any, Any]) -> Plan:
    """The plan with these values of the graph, by key."""
    steps = list(plan.steps)
    for key, value in values.items():
        i = plan.index[key]
        steps[i] = replace(steps[i], task=DataNode(key, value))
    return plan.with_steps(steps)
