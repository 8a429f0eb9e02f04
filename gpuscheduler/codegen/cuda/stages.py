"""Vectors that are computed in stages: rare quotients and roots of a stage are computed again."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from . import tuning
from .expressions import NodeText
from .nodes import NodeTree
from .operations import TYPES, approximate_text
from .schedule import Schedule
from .statements import declare_value, loop_elements


def plan_stages(
    schedule: Schedule, tree: NodeTree, wanted: Sequence[int], drawn: Container[int]
) -> dict[int, int]:
    """The stage in which each node is computed, or nothing where stages do not pay.

    After each stage, its quotients and roots of rare numbers are computed again. Leaves and
    `drawn` nodes have no stage.
    """
    slow = {k for k in wanted if approximate_node(tree, k)}
    if schedule.width == 1 or len(slow) < tuning.STAGED or tree.calls or tree.taken:
        return {}
    if tree is schedule.tree and schedule.either:
        return {}
    stages: dict[int, int] = {}
    for k in wanted:
        args = tree.nodes[k].args
        if args and k not in drawn:
            stages[k] = max(stages.get(a, 0) + (a in slow) for a in args)
    return stages


def approximate_node(tree: NodeTree, k: int) -> str | None:
    """The text of a node that is right but for rare numbers, or None."""
    node = tree.nodes[k]
    return approximate_text(node.op, node.code, [f"{tree.letter}{a}" for a in node.args])


def compute_in_stages(
    schedule: Schedule, nodes: NodeText, tree: NodeTree, stages: dict[int, int],
    statements: Callable[[Iterable[int]], list[str]], after: list[str],
) -> list[str]:  # fmt: skip
    """Compute each element of a vector in `stages`; what later ones need is held until then."""
    v, slow = tree.letter, {k for k in stages if approximate_node(tree, k)}
    last = max(stages[k] + (k in slow) for k in stages)
    needed = {a for k in slow for a in tree.nodes[k].args} | slow | {*tree.roots}
    for k, stage in stages.items():
        needed.update(a for a in tree.nodes[k].args if stages.get(a, stage) != stage)
    held = needed & {*stages}
    lines = [f"{TYPES[tree.nodes[k].code]} held{k}[{schedule.width}];" for k in sorted(held)]

    def held_statements(wanted: Iterable[int]) -> list[str]:
        """Statements for leaves and what is held."""
        found = sorted({*wanted})
        known = [
            f"const {TYPES[tree.nodes[k].code]} {v}{k} = held{k}[e];" for k in found if k in stages
        ]
        return [*statements(k for k in found if k not in stages), *known]

    for stage in range(last + 1):
        own = [k for k in stages if stages[k] == stage]
        again = [k for k in own if k in slow]
        below = {a for k in own for a in tree.nodes[k].args}
        ends = after if stage == last else []
        body = held_statements((below | {*(tree.roots if ends else ())}) - {*own})
        for k in own:
            text = approximate_node(tree, k)
            body += (
                [declare_value(tree.nodes[k].code, f"{v}{k}", text)] if text else statements([k])
            )
            body += [f"held{k}[e] = {v}{k};"] if k in held else []
        if not again:
            lines += loop_elements(schedule.width, [*body, *ends])
            continue
        exact = held_statements(a for k in again for a in tree.nodes[k].args)
        exact += [f"held{k}[e] = {nodes.operation(tree, k)};" for k in again]
        lines += ["{", "bool rare = false;", *loop_elements(schedule.width, [*body, *ends])]
        lines += ["if (rare) {", *loop_elements(schedule.width, exact), "}", "}"]
    return ["{", *lines, "}"]
