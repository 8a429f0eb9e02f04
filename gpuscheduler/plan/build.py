"""Make a plan of a graph: place, size and time of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from dask._task_spec import DataNode
from dask.core import flatten

from ..errors import OutOfMemory, PlanError
from ..frontend.files import array_written
from ..frontend.graph import GatherTask, Graph, pinned_device
from ..frontend.task import OwnTask, bytes_touched_by, work_identity_of
from ..frontend.task_node import TaskNode, used_facts
from ..frontend.tiles import boxes_alike
from ..values import sizeof
from .machine import HOST, Machine
from .placement import place_tasks
from .plan import Key, Plan, Step, chunk_of, crossing_steps, does_not_fit, step_readers

#: A host result is first assembled on its devices if it has at least so many blocks.
MANY_BLOCKS = 16
#: ... and its contiguous boxes on one device have at least so many blocks on average.
MANY_IN_BOX = 8
#: ... and its blocks have at most so many bytes on average.
SMALL_BLOCK = 2**22
#: ... and its blocks on one device have at most so many bytes together.
MOST_TOGETHER = 2**30
#: ... and take at most one part in so many of the device's memory.
PART_TOGETHER = 16
#: A sparse block of unknown size is taken for at most one part in so many of a memory.
PART_OF_SPARSE = 8


def make_plan(
    graph: Graph,
    machine: Machine,
    home: Callable[[Any], int | None] | None = None,
    refuse: bool = True,
) -> Plan:
    """Make and place a step for each task of the graph.

    `home` says which device holds a value. With `refuse`, a step that can never fit a device raises
    OutOfMemory.
    """
    placed = placed_tasks(graph, machine, home)
    keys, index, sources, inputs, kinds, given, nbytes, known, places = placed
    seconds = machine.step_seconds
    nodes = list(graph.nodes.values())
    used = used_facts(nodes)

    def facts(fact: str) -> Iterable[Any]:
        """The fact of every node; nothing is looked up where none has it."""
        return map(attrgetter(fact), nodes) if fact in used else repeat(getattr(TaskNode, fact))

    steps = [
        Step(
            key, node.task, reads, node.names, source, constants, place, size, sure,
            machine.copy_seconds(size, HOST, place)
            if is_sent
            else seconds(size + (sum([nbytes[j] for j in reads]) if reads else 0)),
            kind, is_given, picks, is_aside, is_again, is_sent,
        )
        for (
            key, node, reads, source, place, size, sure, kind, is_given, constants, picks,
            is_aside, is_again, is_sent,
        ) in zip(
            keys, nodes, inputs, sources, places, nbytes, known, kinds, given, facts("constants"),
            facts("picks"), facts("aside"), facts("again"), facts("sent"),
            strict=False,  # what repeats has no end
        )
    ]  # fmt: skip
    for step in steps:
        touched = bytes_touched_by(step.task)  # of kernels, which read parts of arrays
        if touched is not None:
            step.seconds = seconds(touched)
    for step, node in zip(steps, nodes if "operations" in used else (), strict=False):
        if node.operations:
            step.seconds = max(step.seconds, machine.product_seconds(node.operations))
    index.update({k: index[holder] for k, (holder, _) in graph.parts.items()})
    outputs = tuple(dict.fromkeys([index[k] for k in graph.outputs if k in index]))
    for key, gather in graph.gathers.items() if graph.gpus else ():
        if gather.to_host and not gather.together:
            boxes = _put_together(gather, graph, index, steps, machine)
            graph.gathers[key] = replace(gather, together=boxes)
    delivered = _delivered_outputs(graph, index)
    inside = _inner_bytes(graph, steps)
    likely = _guess_sizes(steps, inside)
    for i, size in likely.items():
        steps[i].nbytes = size
    if refuse:
        _refuse_what_cannot_fit(steps, machine, inside)
    wanted = (graph.alias.get(k, k) for k in graph.wanted)
    direct = frozenset(index[k] for k in wanted if k in index)
    stores = enumerate(nodes if "written" in used or "stores" in used else ())
    writes = frozenset([i for i, n in stores if n.written or (n.stores and not n.aside)])
    lent = frozenset([i for i, n in enumerate(nodes if "lent" in used else ()) if n.lent])
    for i in lent:
        steps[i].nbytes = 0
    bound = "pin" in used and any(n.pin is not None for n in nodes)
    # what is in lists here is not looked up in all of these steps again
    aside = [i for i, n in enumerate(nodes if "aside" in used else ()) if n.aside]
    plan = Plan(
        steps, outputs, machine, delivered, direct, writes, lent, graph.gathers, index,
        likely=likely, bound=bound,
    )  # fmt: skip
    return plan.with_cached(
        readers=step_readers(inputs), crossings=crossing_steps(inputs, places, aside)
    )


def places_of(
    graph: Graph, machine: Machine, home: Callable[[Any], int | None] | None = None
) -> dict[Key, int]:
    """The place where each task of the graph would run; refuses nothing."""
    placed = placed_tasks(graph, machine, home)
    return dict(zip(placed.keys, placed.places, strict=True))


class PlacedTasks(NamedTuple):
    """The tasks of a graph by their numbers, with what decides where they run."""

    keys: list[Key]
    numbers: dict[Key, int]
    sources: list[tuple[int, ...]]
    inputs: list[tuple[int, ...]]
    kinds: list[int]
    given: list[bool]  # whether it is a value of the graph
    nbytes: list[int]
    known: list[bool]
    places: list[int]


def placed_tasks(
    graph: Graph,
    machine: Machine,
    home: Callable[[Any], int | None] | None,
    pins: Mapping[Key, int] | None = None,
) -> PlacedTasks:
    """Number the tasks of a graph and decide where each would run.

    `pins` are in place of those of the graph.
    """
    nodes = list(graph.nodes.values())
    keys = list(graph.nodes)
    index = {k: i for i, k in enumerate(keys)}
    sources = [tuple([index[d] for d in node.needs]) for node in nodes]
    used = used_facts(nodes)
    twice = graph.alias or ("picks" in used and any(node.picks for node in nodes))
    inputs = [tuple(dict.fromkeys(s)) for s in sources] if twice else sources
    kinds = _kinds(graph)
    given = [isinstance(node.task, DataNode) for node in nodes]
    most = min(machine.memory, default=0) // PART_OF_SPARSE
    most //= len(machine.memory) if machine.shared else 1
    nbytes, known = _sizes(nodes, inputs, given, most)
    held = home if any(given) or "stores" in used else None
    fixed = {}
    if held is not None or pins or "pin" in used:
        fixed = _pins(graph, machine, held, pins)
    places = place_tasks(keys, inputs, kinds, nbytes, machine, fixed)
    return PlacedTasks(keys, index, sources, inputs, kinds, given, nbytes, known, places)


def _kinds(graph: Graph) -> list[int]:
    """Blocks of one array are alike, and so are calls of one function."""
    numbers: dict[Any, int] = {}
    out = []
    for key, node in graph.nodes.items():
        array = type(key) is tuple and key
        kind = key[0] if array else id(work_identity_of(node.task))
        out.append(numbers.setdefault(kind, len(numbers)))
    return out


def _sizes(
    nodes: Sequence[TaskNode],
    inputs: list[tuple[int, ...]],
    given: Sequence[bool],
    most_sparse: int,
) -> tuple[list[int], list[bool]]:
    """Bytes of each value: as the collection says, or as large as the largest thing it reads.

    A sparse block of unknown size is taken for at most `most_sparse` bytes, or as if it had no
    zeros.
    """
    nbytes: list[int] = []
    known: list[bool] = []
    for node, reads, is_given in zip(nodes, inputs, given, strict=True):
        size = sizeof(node.task.value) if is_given else node.size  # type: ignore[attr-defined]
        known.append(size is not None)
        if size is None:
            size = 0
            for j in reads:
                if nbytes[j] > size:
                    size = nbytes[j]
            if node.block is not None and node.block.is_sparse:
                most = min(node.block.nbytes, most_sparse)
                size = min(size or most, most)
        nbytes.append(size)
    return nbytes, known


def _inner_bytes(graph: Graph, steps: Sequence[Step]) -> dict[int, list[int]]:
    """Return bytes of each task's value in steps of unknown size that run several tasks.

    They are 0 where they are not known.
    """
    sizes = graph.sizes
    return {
        i: [sizes.get(key, 0) for key, _ in sequence]
        for i, step in enumerate(steps)
        if not step.known
        and isinstance(step.task, OwnTask)
        and len(sequence := step.task.sequence) > 1
    }


def _guess_sizes(steps: Sequence[Step], inside: Mapping[int, list[int]]) -> dict[int, int]:
    """Guess bytes of steps of which nothing is known.

    The guess is their share in what is made of them, or the largest value that they read. These are
    guesses: a sum is smaller than its parts.
    """
    out = {i: 0 for i, s in enumerate(steps) if not s.known and not s.nbytes}
    if not out:
        return out
    for i, step in enumerate(steps):
        made = step.nbytes if step.known else inside.get(i, [0])[0]
        for j in step.inputs:
            if j in out:
                out[j] = max(out[j], -(-made // len(step.inputs)))
    for i in out:
        out[i] = max([out[i], *(out.get(j, 0) for j in steps[i].inputs)])
    return out


def _pins(
    graph: Graph,
    machine: Machine,
    home: Callable[[Any], int | None] | None,
    pins: Mapping[Key, int] | None,
) -> dict[int, int]:
    """Where annotations and values that already live on a device put their tasks."""
    out: dict[int, int] = {}
    n = len(machine.devices)
    for i, (key, node) in enumerate(graph.nodes.items()):
        if home is not None and isinstance(node.task, DataNode):
            place = home(node.task.value)
            if place is not None:
                out[i] = place
                continue
        asked = node.pin if pins is None else pins.get(key)
        if asked is None:
            continue
        pin = pinned_device(asked, n)
        if pin is None:
            continue
        if not isinstance(pin, int) or not 0 <= pin < n:
            raise PlanError(
                f"{key!r} is annotated with device={pin!r}, but the devices are 0 to {n - 1}: "
                "use one of those numbers in dask.annotate(device=...)"
            )
        out[i] = pin
    for i, (key, node) in enumerate(graph.nodes.items() if home is not None else ()):
        if node.stores and (array := array_written(graph, key)) is not None:
            place = home(array)  # type: ignore[misc]
            if place is not None:  # elsewhere it would write to a copy
                out[i] = place
    return out


def _delivered_outputs(graph: Graph, index: Mapping[Key, int]) -> frozenset[int]:
    found = [
        _made_for(g, graph, index) for g in graph.gathers.values() if g.to_host and not g.together
    ]
    return frozenset([i for made in found for i in made if i >= 0])


def _made_for(gather: GatherTask, graph: Graph, index: Mapping[Key, int]) -> list[int]:
    """The step of each block; -1 where it has none."""
    return [index.get(graph.alias.get(b, b), -1) for b in flatten(gather.blocks)]


def _put_together(
    gather: GatherTask,
    graph: Graph,
    index: Mapping[Key, int],
    steps: Sequence[Step],
    machine: Machine,
) -> tuple[tuple[slice, ...], ...]:
    """Boxes of blocks that their device concatenates before a result goes to the host.

    Empty where each block is copied by itself. Concatenation pays for many small blocks: each copy
    takes the host some 100 µs, whatever the size (measured).
    """
    made = _made_for(gather, graph, index)
    if gather.chunks is None or len(made) < MANY_BLOCKS or min(made) < 0:
        return ()
    theirs = [steps[i] for i in made]
    if not all(s.known and _is_made_on_device(s.task) for s in theirs):
        return ()
    for place in {s.place for s in theirs}:
        sizes = [s.nbytes for s in theirs if s.place == place]
        part = machine.memory[place] // PART_TOGETHER
        if sum(sizes) > min(len(sizes) * SMALL_BLOCK, MOST_TOGETHER, part):
            return ()
    places = np.array([s.place for s in theirs])
    boxes = boxes_alike(places.reshape([len(c) for c in gather.chunks]))
    return tuple(boxes) if len(boxes) * MANY_IN_BOX <= len(made) else ()


def _is_made_on_device(task: Any) -> bool:
    return isinstance(task, OwnTask) and task.on_device


def _refuse_what_cannot_fit(
    steps: Iterable[Step], machine: Machine, inside: Mapping[int, list[int]]
) -> None:
    everything = list(steps)
    for i, made in inside.items():
        place = everything[i].place
        if max(made) > machine.limit(machine.memory_of(place)):
            raise OutOfMemory(does_not_fit(everything[i], max(made), place, machine))
    for step in everything:
        if not step.known:
            continue
        involved = [step, *(everything[j] for j in step.inputs)]
        if machine.shared:  # the graph's own values are in the caller's own memory; chunks are not
            involved = [s for s in involved if not s.fixed or chunk_of(s) is not None]
        need = sum(s.nbytes for s in involved if s.known)
        if need > machine.limit(machine.memory_of(step.place)):
            raise OutOfMemory(does_not_fit(step, need, step.place, machine))
