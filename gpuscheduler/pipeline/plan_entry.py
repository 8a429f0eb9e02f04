"""A plan as the plan cache keeps it, and beside it what its runs have learned."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..frontend.chunk import Chunk, bytes_in, count_moves
from ..frontend.graph import Graph
from ..plan.plan import Plan


class _Referable:
    """What weak references may refer to, although it has slots."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class _PlanWithOwnChunks:
    """A plan that may move its own chunks: launches are replayed for the very same plan."""

    #: The number of `moves` that it is for, the plan without chunks, and the one with them.
    latest: tuple[int, Plan, Plan] | None = None


@dataclass(slots=True, eq=False, repr=False)
class PlanEntry(_Referable):
    """A graph and its plan, and what runs of the plan have learned.

    Runs of one entry may be under way at the same time, and learn at the same time. The plan itself
    never changes: `learn` puts one with true sizes in its place.
    """

    graph: Graph
    plan: Plan
    #: The entry of the template that the plan was made from; its first run learns for that, too.
    like: PlanEntry | None = None
    #: Whether `like` is a plan without given values, which learns sizes alone.
    sizes_only: bool = False
    #: Whether GPUs or the host compute NumPy arrays, and why: a `choice.Choice`, which all entries
    #: of a template share; None where nothing is to be chosen.
    choice: Any = None
    #: Bytes of the plan's steps, about; 0 where nobody has counted.
    nbytes: int = 0
    #: The launch tape of the plan; False where there can be none. That of `like` comes first.
    tape: Any = field(default=None, init=False)
    #: Most bytes needed in each memory, once asked for; ENDLESS if other chunks had to move before.
    most: dict[int, int] | None = field(default=None, init=False)
    #: The number of `moves` for which each of its chunks was in its planned place alone.
    calm: int = field(default=-1, init=False)
    #: Chunks among the plan's own that its scheduler has made.
    ours: list[Chunk] | None = field(default=None, init=False)
    #: The latest result of `plan_with_chunks`, and the chunks that it is for.
    _beside: tuple[Any, Plan] | None = field(default=None, init=False)
    #: The latest result of `plan_with_own_chunks`, which alike entries share.
    _own: _PlanWithOwnChunks = field(default_factory=_PlanWithOwnChunks, init=False)
    #: The latest result of `own_bytes`, and the number of `moves` that it is for.
    _own_bytes: tuple[int, dict[int, int]] = field(default=(-1, {}), init=False)

    def __repr__(self) -> str:
        return f"<Entry of {self.plan!r}>"

    def for_graph(self, graph: Graph) -> PlanEntry:
        """Return an entry of the same plan, with what its runs have learned, for another graph.

        The graph must be alike, with the same names and the very same data.
        """
        out = PlanEntry(graph, self.plan, self.like, self.sizes_only, self.choice, self.nbytes)
        out.tape, out.most, out.calm, out.ours = self.tape, self.most, self.calm, self.ours
        out._beside, out._own, out._own_bytes = self._beside, self._own, self._own_bytes
        return out

    @property
    def base(self) -> PlanEntry:
        """The entry whose launch tape the plan follows."""
        return self if self.like is None or self.sizes_only else self.like

    def plan_with_chunks(self, chunks: Sequence[Chunk], others: Mapping[int, int]) -> Plan:
        """Return the plan for a run that may move these chunks, and no others.

        `others` are bytes by place of chunks that the run must not move.
        """
        plan = self.plan
        if not chunks and not others:
            return plan
        known = [others, *[(id(c), *c.places) for c in chunks]]
        latest = self._beside
        if latest is not None and latest[0] == known:
            return latest[1]
        out = plan.with_chunks(chunks, others)
        if len(out.steps) == len(plan.steps) and plan.tried and plan is self.plan:
            self._beside = known, out  # it holds these chunks: they will be the same ones
        return out

    def plan_with_own_chunks(self) -> Plan:
        """Return the plan for a run that may move its own chunks, and no others."""
        latest, plan, known = count_moves(), self.plan, self._own.latest
        if known is None or known[0] != latest or known[1] is not plan:
            out = self.plan_with_chunks(plan.own_chunks, {})
            self._own.latest = known = latest, plan, out
        return known[2]

    def own_bytes(self) -> dict[int, int]:
        """Return the bytes of its own chunks in each place, with replicas."""
        latest, (when, known) = count_moves(), self._own_bytes
        if when != latest:
            known = bytes_in(self.plan.own_chunks)
            self._own_bytes = latest, known
        return known

    def learn(
        self, nbytes: list[int], extra: Mapping[int, int] | None = None, but: Container[int] = ()
    ) -> bool:
        """Put a plan with true sizes in the place of the plan, for its next run.

        `nbytes` are sizes by step, `extra` is working memory by kind of step. Steps in `but` wrote
        their values elsewhere: their size of 0 teaches nothing. True if more working memory was
        seen than before.
        """
        more = self.plan.history.learn(extra or {})
        self._take_sizes(nbytes, but, True, more)
        if self.like is not None and not self.like.plan.tried:
            self.like._take_sizes(nbytes, but, not self.sizes_only, more)
        return more

    def _take_sizes(self, nbytes: list[int], but: Container[int], tried: bool, more: bool) -> None:
        before, plan = self.plan, self.plan.with_sizes(nbytes, tried, but)
        if plan is before and more:
            plan = plan.with_facts()  # whether memory is short is another question now
        self.plan = plan
        if plan is not before:
            self._beside = None
        if plan.steps is not before.steps or more:
            self.tape = self.most = None
