"""Where blocks of random numbers lie in their arrays, and from which seed they are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, product
from typing import Any

import numpy as np
from dask._task_spec import Task
from dask.highlevelgraph import Layer

from .captured import RANDOM
from .graph import Key, LoweredCollection, RandomDraw
from .shapes import known_chunks


def draws_random_numbers(task: Any) -> bool:
    """Whether a task makes a block of random numbers."""
    return type(task) is Task and task.func in RANDOM


def locate_draws(
    order: list[Key], tasks: Mapping[Key, Any], lowered: LoweredCollection
) -> dict[Key, RandomDraw]:
    """Where each block of random numbers lies in its array, and the seed of the first block.

    The numbers then depend on nothing else: not on how the array is cut into blocks.
    """
    out: dict[Key, RandomDraw] = {}
    arrays: dict[str, Any] = {}
    from_tasks: dict[str, Any] | None = None
    for key in order:
        task = tasks[key]
        if type(task) is not Task or task.func not in RANDOM or type(key) is not tuple:
            continue
        name = key[0]
        if name not in arrays:
            arrays[name] = _whole_draw(lowered.layers.get(name), name)
        if arrays[name] is None:
            if from_tasks is None:
                from_tasks = _draws_from_tasks(lowered)
            arrays[name] = from_tasks.get(name)
        if arrays[name] is not None:
            seed, shape, starts = arrays[name]
            start = tuple(s[i] for s, i in zip(starts, key[1:], strict=True))
            out[key] = RandomDraw(seed, shape, start)
    return out


def _draws_from_tasks(lowered: LoweredCollection) -> dict[str, Any]:
    """Seed, shape and starts of arrays that came without layers, from the tasks of all blocks."""
    blocks: dict[str, dict[tuple[int, ...], Any]] = {}
    for whole in lowered.wholes or [lowered.dsk]:
        for key, task in whole.items():
            if draws_random_numbers(task) and type(key) is tuple:
                blocks.setdefault(key[0], {})[key[1:]] = task
    return {name: _draw_of_tasks(found) for name, found in blocks.items()}


def _whole_draw(layer: Layer | None, name: str) -> Any:
    """Seed of the first block, shape and starts of the blocks of an array of random numbers."""
    chunks = known_chunks(layer)
    first = None if layer is None or not chunks else layer.get((name, *[0] * len(chunks)))
    if not chunks or not isinstance(first, Task) or first.func not in RANDOM:
        return None
    if len(first.args[3]) != len(chunks):
        return None  # each draw is a vector
    starts = [[0, *accumulate(axis)] for axis in chunks]
    return first.args[2], tuple(sum(axis) for axis in chunks), starts


def _draw_of_tasks(blocks: Mapping[tuple[int, ...], Any]) -> Any:
    """The same of an array of which there are only the tasks; None where some are missing."""
    counts = [max(axis) + 1 for axis in zip(*blocks, strict=True)]
    first = blocks.get((0,) * len(counts))
    if first is None or len(blocks) != math.prod(counts):
        return None
    if any(len(t.args[3]) != len(counts) for t in blocks.values()):
        return None
    if any(
        _seed_number(t.args[2]) != n for n, t in _blocks_with_numbers(first.args[2], blocks, counts)
    ):
        return None  # blocks at the end of an axis have been culled
    lengths = [
        [blocks[(0,) * k + (i,) + (0,) * (len(counts) - k - 1)].args[3][k] for i in range(n)]
        for k, n in enumerate(counts)
    ]
    starts = [[0, *accumulate(axis)] for axis in lengths]
    return first.args[2], tuple(sum(axis) for axis in lengths), starts


def _blocks_with_numbers(
    first: Any, blocks: Mapping[tuple[int, ...], Any], counts: list[int]
) -> Any:
    """Blocks, with the number that the seed of each should have."""
    start = _seed_number(first)
    for n, index in enumerate(product(*map(range, counts))):
        yield None if start is None else start + n, blocks[index]


def _seed_number(seed: Any) -> int | None:
    """Which of all seeds that were made for an array this is; None where it does not tell."""
    if isinstance(seed, np.random.SeedSequence):
        return int(seed.spawn_key[-1]) if seed.spawn_key else None
    base = getattr(seed, "base", None)
    if isinstance(base, np.ndarray):
        return (_address(seed) - _address(base)) // max(int(seed.nbytes), 1)
    return None


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
