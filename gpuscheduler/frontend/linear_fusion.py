"""Linear fusion: each run of tasks with one reader becomes one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dask._task_spec import DataNode, Task

from ..dask_private import optimize_slices
from .compiled_task import Chain
from .graph import READERS, SLICERS, Compile, Key, layer_of


@dataclass
class LinearFuser:
    """Fuses as Dask's `fuse_linear` does, but without rewriting the tasks.

    A run does not cross from one pin to another, and does not swallow a task in `kept`. Its layers
    have the same word in `apart`, or none.
    """

    #: The tasks of the graph; the last task of a run is replaced by the run.
    tasks: dict[Key, Any]
    #: The steps that each task reads.
    needs: dict[Key, tuple[Key, ...]]
    #: The names under which each task reads them.
    names: dict[Key, tuple[Key, ...]]
    #: The values that each task reads, by name.
    constants: dict[Key, dict[Key, Any]]
    #: The device of tasks that have to run on one; runs are added.
    pins: dict[Key, int]
    #: Tasks that stay steps of their own: the caller wants them, or they run elsewhere.
    kept: set[Key]
    #: Compiles the tasks of a run.
    compiler: Compile
    #: A word for each layer; layers with different words do not fuse.
    apart: Mapping[str, str]

    def fuse(self, order: list[Key], aside: set[Key], again: set[Key]) -> list[Key]:
        """The order without the tasks that became part of a run.

        A task in `aside` that reads a file fuses only with a slice of its block; one that writes a
        file does not fuse. Runs that begin with a task in `aside` or `again` are added there.
        """
        below = self._fusible_pairs(order, aside, again)
        if not below:
            return order
        inner = set(below.values())
        out = []
        for key in order:
            if key in inner:
                continue
            if key in below:
                run = [key]
                while run[-1] in below:
                    run.append(below[run[-1]])
                run.reverse()
                self._join(run)
            out.append(key)
        return out

    def _fusible_pairs(self, order: list[Key], aside: set[Key], again: set[Key]) -> dict[Key, Key]:
        """Each task that fuses with the task it reads, and that task."""
        readers: dict[Key, int] = {}
        for key in order:
            for d in self.needs[key]:
                readers[d] = readers.get(d, 0) + 1
        below: dict[Key, Key] = {}
        pin: dict[Key, int | None] = {}  # where the run that ends in a task has to be
        for key in order:
            own = self.pins.get(key)
            if len(self.needs[key]) == 1:
                (d,) = self.needs[key]
                agree = own is None or pin[d] is None or own == pin[d]
                if agree and readers[d] == 1 and self._may_fuse(key, d, aside):
                    below[key] = d
                    for kind in (aside, again):
                        if d in kind:
                            kind.add(key)
                    own = pin[d] if own is None else own
            pin[key] = own
        inner = set(below.values())
        for key in below:
            if key not in inner and (where := pin[key]) is not None:
                self.pins[key] = where
        return below

    def _may_fuse(self, key: Key, d: Key, aside: set[Key]) -> bool:
        """Whether a task may run in one step with the only task `d` that it reads."""
        task, read = self.tasks[key], self.tasks[d]
        if d in self.kept or isinstance(read, DataNode):  # a value is not a task to run
            return False
        if key in aside or (d in aside and getattr(task, "func", None) not in SLICERS):
            return False
        if self.apart and self.apart.get(layer_of(key)) != self.apart.get(layer_of(d)):
            return False
        return not task.block_fusion and not read.block_fusion

    def _join(self, run: list[Key]) -> None:
        """Put a run, first task first, in the place of its last task."""
        tasks, names = self.tasks, self.names
        first, last = run[0], run[-1]
        aliased = any(names[k] != self.needs[k] for k in run[1:])
        reading = sum(isinstance(tasks[k], Task) and tasks[k].func in READERS for k in run)
        if reading > 1 and not aliased:
            # Dask merges repeated slices so that a file is read once, and only where needed
            fused = Task.fuse(*(tasks[k] for k in run), key=last)
            tasks[last] = self.compiler(optimize_slices({last: fused})[last])
        else:
            known_as = [*(names[k][0] for k in run[1:]), last]
            compiled = (self.compiler(tasks[k]) for k in run)
            tasks[last] = Chain(list(zip(known_as, compiled, strict=True)))
        merged: dict[Key, Any] = {}
        for k in run:
            merged.update(self.constants[k])
        self.constants[last], self.needs[last], names[last] = (
            merged,
            self.needs[first],
            names[first],
        )
