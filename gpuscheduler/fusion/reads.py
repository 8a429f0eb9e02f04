"""What functions and constants of tasks read, and whether a trace may rely on that.

A trace holds until something changes that the function read: globals, captured variables, lists
and dictionaries. All of these are noted in the graph, and a kept plan is checked against them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..frontend.compiled_task import literal
from ..frontend.graph import Graph
from ..frontend.task import sequence_of
from ..tracing import purity
from .task import PAIRING, task_function


class Reads:
    """Looks at each function and constant once, and notes in the graph what these read."""

    def __init__(self, graph: Graph):
        self.graph = graph
        #: Globals that functions read: the namespace, the name and the value.
        self.globals: list[Any] = []
        #: Objects that are known by their ids, and so must live on.
        self.alive: list[Any] = []
        #: Hashable words for constants, by the id of the object that many blocks share.
        self._literals: dict[int, Any] = {}
        #: Why each function is not traced, by its id; None where it is.
        self._impure: dict[int, str | None] = {}
        #: Why each constant keeps a task from being traced, by its id.
        self._unfit: dict[int, str | None] = {}
        #: Whether each function calls one of `PAIRING`, by its id.
        self._pairing: dict[int, bool] = {}
        #: Which globals are in the list.
        self._seen_globals: set[tuple[int, str, int]] = set()

    def literal(self, owner: Any, value: Any) -> Any:
        """Return hashable words for a value that many blocks share, as part of `owner`."""
        found = self._literals.get(id(owner))
        if found is None:
            self.alive.append(owner)
            found = self._literals[id(owner)] = literal(value, self.alive)
        return found

    def why_impure(self, function: Any) -> str | None:
        """Return why a function is not traced; None where it is."""
        found = self._impure.get(id(function), False)
        if found is False:
            self.alive.append(function)
            found = self._impure[id(function)] = purity.why_impure(function, arrays=True)
            if found is None:
                for where, name, value in purity.globals_read(function):
                    word = id(where), name, id(value)
                    if word not in self._seen_globals:
                        self._seen_globals.add(word)
                        self.globals.append((where, name, value))
                self.graph.around += purity.functions_read(function)
                self._watch(purity.containers_read(function))
        return found  # type: ignore[return-value]

    def why_unfit(self, constant: Any) -> str | None:
        """Return why a task with this constant is not traced; None where it is."""
        if purity.is_fixed(constant):
            return None
        found = self._unfit.get(id(constant), False)
        if found is False:
            self.alive.append(constant)
            found, containers = purity.reason_against_constant(constant)
            self._unfit[id(constant)] = found
            self._watch(containers)
        return found  # type: ignore[return-value]

    def gives_pairs(self, task: Any) -> bool:
        """Whether a task gives pairs of a value and its place, as Dask's argmin does."""
        return any(self._calls_pairing(task_function(part)) for _, part in sequence_of(task))

    def _calls_pairing(self, function: Any) -> bool:
        known = self._pairing.get(id(function))
        if known is None:
            self.alive.append(function)
            within = any(f in PAIRING for f in purity.functions_in(function))
            known = self._pairing[id(function)] = within
        return known

    def _watch(self, containers: Iterable[Any]) -> None:
        """Note in the graph what is in lists and dictionaries that tasks read."""
        for container in containers:
            alive: list[Any] = []
            words = literal(container, alive)
            self.graph.containers[id(container)] = container, words, alive
