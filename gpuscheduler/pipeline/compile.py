"""From a graph to a plan: the passes in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OutOfMemory
from ..frontend.graph import Graph
from ..fusion import horizontal
from ..fusion.fuser import FusionPass, regroup_layers
from ..fusion.residency import finish_residency, make_resident, move_to_host
from ..options import Options
from ..plan.batching import batch_alike
from ..plan.build import make_plan, places_of
from ..plan.machine import Machine
from ..plan.matmul import accumulate_matmul, recognise_matmul
from ..plan.plan import PassReport, Plan
from ..runtime.gather import ResultAssembly
from ..runtime.protocol import Hardware
from .block_qr import use_tall_qr
from .reorder import reorder_steps
from .sides import SideChooser, SideLine, moved_keys, side_lines

#: Bytes that a task must touch to be worth a kernel, by kind of device.
FUSE_LEAST = {"cpu": 2**18, "cuda": 0}
#: Operations that a task must have to be worth a kernel, by kind of device.
FUSE_FEWEST = {"cpu": 2, "cuda": 0}
#: Most readings of a graph that look for layers to keep apart: an untraceable layer hides others.
MOST_READINGS = 5


@dataclass(slots=True, eq=False)
class Compilation:
    """A graph on its way to a plan: what the passes are given, and what they change."""

    graph: Graph
    machine: Machine
    #: The device that holds a value, if any.
    home: Callable[[Any], int | None] | None
    #: Kind of the devices, "cpu" or "cuda".
    kind: str
    options: Options
    #: Whether tasks may become one: with callbacks, each of them has to run.
    merge: bool = True
    #: Threads of the host that may compute beside GPUs.
    threads: int = 1
    plan: Plan | None = None
    #: What runs where, and why, for people.
    sides: tuple[SideLine, ...] = ()
    #: The graph before horizontal fusion, which may need less memory.
    unmerged: Graph | None = None
    #: Whether the plan may not fit: products that are added up may need less memory.
    unsure: bool = False
    #: What each pass did.
    reports: list[PassReport] = field(default_factory=list)
    #: The fusion pass over the graph as it was read last.
    fusion: FusionPass | None = None

    @property
    def on_gpus(self) -> bool:
        """Whether GPUs run the plan."""
        return self.kind == "cuda"

    def get_plan(self) -> Plan:
        """Return the plan, behind the pass that makes it."""
        assert self.plan is not None
        return self.plan


def fuse(c: Compilation) -> None:
    """Make tasks kernels, and inline producers."""
    fusion = _fusion_pass(c)
    if fusion is not None:
        c.graph, c.fusion = fusion.fuse(), fusion


def keep_arrays_on_gpus(c: Compilation) -> None:
    """Have NumPy's arrays stay on GPUs, and functions that are called get them on the host.

    With `numpy="auto"` the host also computes what should take longer on GPUs, with the way there.
    """
    if c.graph.resident:
        views = {} if c.fusion is None else c.fusion.views
        all_there = c.options.numpy in ("gpu", "gpu-only")
        facts = make_resident(c.graph, views, loose=all_there)
        chooser = SideChooser(c.graph, facts, c.machine, c.threads, c.home)
        if all_there or c.graph.keep:
            c.sides = side_lines(chooser.as_asked())
        else:
            groups = chooser.choose_sides()
            move_to_host(c.graph, moved_keys(groups), facts)
            c.sides = side_lines(groups)
        finish_residency(c.graph, facts)


def multiply_matrices(c: Compilation) -> None:
    """Have each product of two matrices made by a task that does nothing but launch."""
    if c.merge and c.on_gpus:
        recognise_matmul(c.graph, c.options.matmul_precision)


def factor_tall_blocks(c: Compilation) -> None:
    """Have GPUs factor tall blocks by Cholesky factors."""
    if c.on_gpus and c.options.tall_qr == "auto":
        use_tall_qr(c.graph)


def fuse_horizontally(c: Compilation) -> None:
    """Join kernels that read the same."""
    if c.merge and c.options.fuse:
        c.unmerged, c.graph = c.graph, horizontal.merge_siblings(c.graph)


def place(c: Compilation) -> None:
    """Give each task a device, and estimates."""
    try:
        c.plan = make_plan(c.graph, c.machine, c.home)
    except OutOfMemory:  # what is made together is there together
        c.unsure = bool(c.graph.products)  # but products that are added up need not be
        unmerged = c.unmerged or c.graph
        if c.graph is unmerged and not c.unsure:
            raise
        c.graph = unmerged
        c.plan = make_plan(unmerged, c.machine, c.home, refuse=not c.unsure)


def add_up_products(c: Compilation) -> None:
    """Add products of matrices up by cuBLAS, on the device that makes them."""
    _put_together(c, accumulate_matmul)


def batch(c: Compilation) -> None:
    """Compute alike kernels of one device by one launch."""
    _put_together(c, batch_alike)


def check_memory(c: Compilation) -> None:
    """Refuse a plan with a step that does not fit its device."""
    if c.unsure:
        c.plan = make_plan(c.graph, c.machine, c.home)


def reorder(c: Compilation) -> None:
    """Run first what others wait for."""
    if c.merge and c.on_gpus:
        c.graph, c.plan = reorder_steps(c.graph, c.get_plan(), c.home)


def _put_together(c: Compilation, change: Callable[[Graph, Plan], bool]) -> None:
    if c.merge and c.on_gpus and change(c.graph, c.get_plan()):
        c.plan, c.unsure = make_plan(c.graph, c.machine, c.home), False


#: The passes, in their order.
PASSES: tuple[Callable[[Compilation], None], ...] = (
    fuse,
    keep_arrays_on_gpus,
    multiply_matrices,
    factor_tall_blocks,
    fuse_horizontally,
    place,
    add_up_products,
    batch,
    check_memory,
    reorder,
)


def run_pass(c: Compilation, compiler_pass: Callable[[Compilation], None]) -> None:
    """Run a pass, and note how many tasks there are before and after it.

    With the option `check`, validates the graph after the pass.
    """
    before = len(c.graph.nodes)
    compiler_pass(c)
    if c.options.check:
        c.graph.validate()
    c.reports.append(PassReport(compiler_pass.__name__, before, len(c.graph.nodes)))


def plan_dask(
    read: Callable[[Mapping[str, str]], Graph],
    machine: Machine,
    home: Callable[[Any], int | None] | None,
    kind: str,
    options: Options,
    threads: int = 1,
) -> tuple[Graph, Plan]:
    """Read a Dask graph and plan it, with untraceable layers kept apart.

    Dask may have fused untraceable layers with others, which could not be traced either. So `read`
    is called again with a mapping of layers to groups, until that mapping stays the same.
    """
    apart: dict[str, str] = {}
    fused: dict[str, list[str]] = {}
    untraceable: set[str] = set()
    library: set[str] = set()
    for _ in range(MOST_READINGS):
        c = Compilation(read(apart), machine, home, kind, options, threads=threads)
        run_pass(c, fuse)
        if c.fusion is None:
            break
        before, apart = apart, {}
        for layer, (names, those) in c.fusion.untraced.items():
            fused.setdefault(layer, names)  # as Dask has it
            untraceable |= those
        library |= c.fusion.in_library
        for names in fused.values():
            apart |= regroup_layers(names, untraceable, library)
        if apart == before:
            break
    return _run_passes(c, PASSES[1:])


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
    return _run_passes(Compilation(graph, machine, home, kind, options, merge), PASSES)


def _run_passes(
    c: Compilation, passes: Sequence[Callable[[Compilation], None]]
) -> tuple[Graph, Plan]:
    for one in passes:
        run_pass(c, one)
    return c.graph, c.get_plan().with_facts(
        reasons={k: n.why for k, n in c.graph.nodes.items() if n.why is not None},
        passes=tuple(c.reports),
        sides=c.sides,
    )


def _fusion_pass(c: Compilation) -> FusionPass | None:
    options, kind = c.options, c.kind
    least = FUSE_LEAST[kind] if options.fuse_least is None else options.fuse_least
    if not options.fuse:
        return None
    near = _neighbours(c.graph, c.machine, c.home) if c.merge else None
    return FusionPass(
        c.graph, least, FUSE_FEWEST[kind], c.merge, near,
        on_gpus=c.on_gpus, home=c.home,
    )  # fmt: skip


def write_in_place(plan: Plan, assembly: ResultAssembly, hardware: Hardware) -> Plan:
    """The plan whose steps write parts of the result into one array, if the devices can.

    Such parts take no memory of their own.
    """
    rooms = hardware.rooms(plan, assembly)
    out = (
        None
        if rooms is None
        else plan.with_result_array(rooms.parts, rooms.tasks, rooms.place, rooms.nbytes)
    )
    if out is None:
        return plan
    assembly.rooms = rooms
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

    def is_near(a: Any, b: Any) -> bool:
        if not place:
            place.update(places_of(before, machine, home))
        return place.get(a, -1) == place.get(b, -2)

    return is_near
