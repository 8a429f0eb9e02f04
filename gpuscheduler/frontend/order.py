"""The order of tasks: depth first, by height."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .graph import Key


def depth_first(needs: Mapping[Key, tuple[Key, ...]], outputs: Iterable[Key]) -> list[Key]:
    """An order in which values live briefly: the deepest branch first.

    A ready task that frees as much as it makes runs at once. `needs` names each input once.

    Linear in the size of the graph; `dask.order.order` takes several times as long, and on the
    workloads of graphs/ holds as much or more (tests/frontend/test_graph.py compares them).

    >>> depth_first({"y2": ("x2", "y1"), "y1": ("x1",), "x1": (), "x2": ()}, ["y2"])
    ['x1', 'y1', 'x2', 'y2']
    """
    return _DepthFirstWalk(needs, outputs).order


class _DepthFirstWalk:
    """A depth-first walk that notices what has become ready on the way."""

    def __init__(self, needs: Mapping[Key, tuple[Key, ...]], outputs: Iterable[Key]):
        self.needs = needs
        self.keep = set(outputs)
        self.readers, self.height = _heights(needs)
        self.missing = {k: len(inputs) for k, inputs in needs.items() if inputs}
        self.unread = {k: len(r) for k, r in self.readers.items()}  # readers still to run
        self.done: set[Key] = set()
        self.order: list[Key] = []
        for output in outputs:
            self._walk(output)

    def _walk(self, output: Key) -> None:
        needs, done, height = self.needs, self.done, self.height
        stack = [output]
        while stack:
            key = stack[-1]
            if key in done or key not in needs:
                stack.pop()
                continue
            todo = [d for d in needs[key] if d not in done]
            if not todo:
                stack.pop()
                self._run(key)
            elif len(todo) == 1:
                stack.append(todo[0])
            else:
                todo.sort(key=height.__getitem__)  # the last is taken first
                tallest = height[todo[-1]]
                level = [d for d in todo if height[d] == tallest]
                stack += [d for d in todo if height[d] != tallest]
                stack += level[::-1]

    def _run(self, key: Key) -> None:
        """Put a task into the order, and behind it the ready ones that free what they read."""
        done, needs, keep, readers = self.done, self.needs, self.keep, self.readers
        missing, unread = self.missing, self.unread
        todo = [key]
        while todo:
            key = todo.pop()
            if key in done:
                continue
            done.add(key)
            self.order.append(key)
            ready = []
            for d in needs[key]:
                left = unread[d] = unread[d] - 1
                if left == 1 and d not in keep:  # one reader left: is it ready?
                    last = next(r for r in readers[d] if r not in done)
                    if not missing[last]:
                        ready.append(last)
            for r in readers.get(key, ()):
                left = missing[r] = missing[r] - 1
                if not left:
                    ready.append(r)
            for r in reversed(ready):
                for d in needs[r]:
                    if unread[d] == 1 and d not in keep:  # it frees what it reads
                        todo.append(r)
                        break


def _heights(
    needs: Mapping[Key, tuple[Key, ...]],
) -> tuple[dict[Key, list[Key]], dict[Key, int]]:
    """The readers of each task, and how many tasks the longest path to it has.

    A cycle is a RuntimeError, as in Dask.
    """
    missing: dict[Key, int] = {}
    readers: dict[Key, list[Key]] = {}
    ready = []
    for key, inputs in needs.items():
        if inputs:
            missing[key] = len(inputs)
            for d in inputs:
                readers.setdefault(d, []).append(key)
        else:
            ready.append(key)
    height = dict.fromkeys(ready, 0)
    for key in ready:
        above = height[key] + 1
        for r in readers.get(key, ()):
            missing[r] -= 1
            if not missing[r]:
                height[r] = above  # its last input is its highest: `ready` is in order of height
                ready.append(r)
    if len(height) != len(needs):
        cycle = sorted(str(k) for k in needs if k not in height)
        raise RuntimeError(f"Cycle detected in the graph, through {', '.join(cycle[:3])}")
    return readers, height
