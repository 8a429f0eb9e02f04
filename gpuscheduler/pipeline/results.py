"""Hand the results of a run to the caller: as values, or as chunks that stay on the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.core import flatten

from ..frontend.chunk import Chunk, ChunkTask
from ..frontend.graph import GatherTask, Graph
from ..fusion.residency import as_numpy
from ..ir.expr import Out
from ..plan.plan import Plan
from ..runtime.gather import ResultAssembly
from ..runtime.persisted import PersistedChunks
from ..runtime.protocol import Devices, Hardware
from ..values import map_leaves, part_of


@dataclass(slots=True, eq=False)
class RunResults:
    """A finished run whose devices still hold its values."""

    graph: Graph
    plan: Plan
    devices: Devices
    assembly: ResultAssembly
    nbytes: list[int]  # true size of each step's value
    to_numpy: Callable[[Any], Any]  # copies an array of a device to the host


def collect_values(results: RunResults, keys: Iterable[Any] | None = None) -> list[Any]:
    """Return the values of these keys; of the wanted keys by default.

    No function in here calls itself: the cycle would hold the graph, and chunks in it, until the
    garbage collector runs.
    """
    graph, plan, devices = results.graph, results.plan, results.devices

    def value(key: Any) -> Any:
        target = graph.alias.get(key, key)
        if target in graph.data:
            return graph.data[target]
        made = devices.value(plan.index[target])
        # several values may have been made together
        return part_of(made, graph.parts[target][1]) if target in graph.parts else made

    def numpy_value(key: Any) -> Any:
        form = graph.forms.get(graph.alias.get(key, key))
        return as_numpy(value(key), form, results.to_numpy)

    def numpy_result(key: Any, gather: GatherTask | None) -> Any:
        if gather is None:
            return numpy_value(key)
        assembly = results.assembly
        if gather.key not in assembly.targets:  # blocks of GPUs alone are put together there
            kinds = {type(value(block)) for block in flatten([gather.blocks])}
            if len(kinds) == 1:
                return map_leaves(results.to_numpy, assembly.result(gather, value))
        return assembly.result(gather, numpy_value)

    def wanted_value(key: Any) -> Any:
        gather = graph.gathers.get(graph.alias.get(key, key))
        if graph.resident:
            return numpy_result(key, gather)
        return value(key) if gather is None else results.assembly.result(gather, value)

    return [wanted_value(key) for key in (graph.wanted if keys is None else keys)]


def keep_chunks(results: RunResults, hardware: Hardware, persisted: PersistedChunks) -> list[Any]:
    """Return tasks for the wanted keys whose values stay on the devices, now persisted."""
    graph, plan = results.graph, results.plan
    made: dict[Any, Chunk] = {}

    def chunk(key: Any) -> Any:
        target = graph.alias.get(key, key)
        i = plan.index.get(target)
        # a number of NumPy's is not worth keeping on a GPU
        passed = target in graph.gathers or isinstance(graph.forms.get(target), Out)
        if passed or target in graph.data or i is None or i in plan.lent:
            (value,) = collect_values(results, [key])
            return value
        if target not in made:
            known = plan.chunks.get(i)
            made[target] = _keep_step(results, target, i, hardware) if known is None else known
            if known is None:
                persisted.add(made[target])
        found = made[target]
        if _is_number(found):
            return found.device_value()
        return ChunkTask(graph.called.get(key, key), found)

    return [chunk(key) for key in graph.wanted]


def _keep_step(results: RunResults, key: Any, i: int, hardware: Hardware) -> Chunk:
    """Take the value of step `i` over from the devices."""
    graph, devices, nbytes = results.graph, results.devices, results.nbytes[i]
    if key in graph.parts:  # one of several values that were made together
        places, nbytes = devices.keep_part(i, graph.parts[key][1])
    else:
        places = devices.keep(i)
    place = results.plan.steps[i].place
    return Chunk(graph.called.get(key, key), place, nbytes, places, hardware, graph.resident)


def _is_number(chunk: Chunk) -> bool:
    """Whether the value is a scalar or a string, which is not worth keeping on a device."""
    return isinstance(chunk.device_value(), (bool, int, float, complex, str, np.generic))


def nest_values(keys: Any, values: Iterator[Any]) -> Any:
    """Arrange values in the nested tuples that Dask expects for nested lists of keys."""
    return tuple(nest_values(k, values) for k in keys) if isinstance(keys, list) else next(values)
