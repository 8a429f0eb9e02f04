"""From a graph to a plan: the passes in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import OutOfMemory
from ..frontend.graph import Graph
from ..fusion import horizontal
from ..fusion.fuser import FusionPass, regroup_layers
from ..options import Options
from ..plan.batching import batch_alike
from ..plan.build import make_plan, places_of
from ..plan.machine import Machine
from ..plan.matmul import accumulate_matmul, recognise_matmul
from ..plan.plan import Plan
from ..runtime.gather import ResultAssembly
from ..runtime.protocol import Hardware
from .reorder import reorder_steps

#: Bytes that a task must touch to be worth a kernel, by kind of device.
FUSE_LEAST = {"cpu": 2**18, "cuda": 0}
#: Operations that a task must have to be worth a kernel, by kind of device.
FUSE_FEWEST = {"cpu": 2, "cuda": 0}
#: Most readings of a graph that look for layers to keep apart: an untraceable layer hides others.
MOST_READINGS = 5


def plan_dask(
    read: Callable[[Mapping[str, str]], Graph],
    machine: Machine,
    home: Callable[[Any], int | None] | None,
    kind: str,
    options: Options,
) -> tuple[Graph, Plan]:
    """Read a Dask graph and plan it, with untraceable layers kept apart.

    Dask may have fused untraceable layers with others, which could not be traced either. So `read`
    is called again with a mapping of layers to groups, until that mapping stays the same.
    """
    apart: dict[str, str] = {}
    fused: dict[str, list[str]] = {}
    strange: set[str] = set()
    for _ in range(MOST_READINGS):
        graph = read(apart)
        fuser = _fuser(graph, machine, home, kind, options, merge=True)
        if fuser is None:
            break
        graph, before, apart = fuser.fused(), apart, {}
        for layer, (names, those) in fuser.unfollowed.items():
            fused.setdefault(layer, names)  # as Dask has it
            strange |= those
        for names in fused.values():
            apart |= regroup_layers(names, strange)
        if apart == before:
            break
    return _place_and_batch(graph, machine, home, kind, options, merge=True)


def plan_graph(
    graph: Graph,
    machine: Machine,
    home: Callable[[Any], int | None] | None,
    kind: str,
    options: Options,
    merge: bool = True,
) -> tuple[Graph, Plan]:
    """Fuse, place and batch a graph for devices of this kind, "cpu" or "cuda".

    With `merge` off, tasks stay separate. Changes the graph.
    """
    fuser = _fuser(graph, machine, home, kind, options, merge)
    return _place_and_batch(fuser.fused() if fuser else graph, machine, home, kind, options, merge)


def _fuser(
    graph: Graph,
    machine: Machine,
    home: Callable[[Any], int | None] | None,
    kind: str,
    options: Options,
    merge: bool,
) -> FusionPass | None:
    least = FUSE_LEAST[kind] if options.fuse_least is None else options.fuse_least
    by_position = options.random == "philox"
    if not (options.fuse or by_position):
        return None
    near = _neighbours(graph, machine, home) if merge and options.fuse else None
    return FusionPass(
        graph, least, FUSE_FEWEST[kind], by_position, merge, options.fuse, near,
        on_gpus=kind == "cuda", home=home,
    )  # fmt: skip


def _place_and_batch(
    graph: Graph,
    machine: Machine,
    home: Callable[[Any], int | None] | None,
    kind: str,
    options: Options,
    merge: bool,
) -> tuple[Graph, Plan]:
    """Run the passes behind fusion: merge kernels, place, batch matmuls and launches, reorder."""
    if merge and kind == "cuda":
        recognise_matmul(graph)
    apart, graph = graph, horizontal.merge_siblings(graph) if merge and options.fuse else graph
    unsure = False
    try:
        plan = make_plan(graph, machine, home)
    except OutOfMemory:  # what is made together is there together
        unsure = bool(graph.products)  # but products that are added up need not be
        if graph is apart and not unsure:
            raise
        graph, plan = apart, make_plan(apart, machine, home, refuse=not unsure)
    for put_together in (accumulate_matmul, batch_alike) if merge and kind == "cuda" else ():
        if put_together(graph, plan):
            plan, unsure = make_plan(graph, machine, home), False
    if unsure:
        plan = make_plan(graph, machine, home)
    if merge and kind == "cuda":
        graph, plan = reorder_steps(graph, plan, home)
    plan.reasons = dict(graph.why)
    return graph, plan


def write_in_place(plan: Plan, gathering: ResultAssembly, hardware: Hardware) -> Plan:
    """The plan whose steps write parts of the result into one array, if the devices can.

    Such parts take no memory of their own.
    """
    rooms = hardware.rooms(plan, gathering)
    out = (
        None if rooms is None else plan.written(rooms.parts, rooms.tasks, rooms.place, rooms.nbytes)
    )
    if out is None:
        return plan
    gathering.rooms = rooms
    return out


def _neighbours(
    graph: Graph, machine: Machine, home: Callable[[Any], int | None] | None
) -> Callable[[Any, Any], bool]:
    """A function that says whether two tasks belong on one device.

    Fusion asks it about tasks that read a part of a block, and about steps of reduction trees.
    """
    if machine.shared or len(machine.devices) == 1:
        return lambda a, b: True
    # as it is now: tasks disappear into others while this is asked
    before = graph.copy()
    place: dict[Any, int] = {}

    def near(a: Any, b: Any) -> bool:
        if not place:
            place.update(places_of(before, machine, home))
        return place.get(a, -1) == place.get(b, -2)

    return near
