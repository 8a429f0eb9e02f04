"""Programs whose functions get seeds and generators: rounds with other seeds equal Dask's.

The plan of the first round serves the others, as a template. A template that keeps something of its
first round would give wrong random numbers without a word.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import Scheduler
from tests.support.strategies import thorough

#: Sources with a state that draws change. They are used by one block, in one order.
STATEFUL = ("Generator", "RandomState", "PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM")
SEEDS = {
    "sequence": np.random.SeedSequence,
    "large pool": lambda s: np.random.SeedSequence(s, pool_size=6),
    "spawned": lambda s: np.random.SeedSequence(9, spawn_key=(s,)),
    "bytes": lambda s: np.random.SeedSequence(s).generate_state(4).tobytes(),
    "int": lambda s: int(np.random.SeedSequence(s).generate_state(1)[0]),
    "array of a state": lambda s: np.random.SeedSequence(s).generate_state(8),
    "tuple of a state": lambda s: np.random.RandomState(s).get_state(),
    "Generator": np.random.default_rng,
    **{name: getattr(np.random, name) for name in STATEFUL[1:]},
}
KEEPS_STATE = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)


def generator_of(source):
    if isinstance(source, (np.random.Generator, np.random.RandomState)):
        return source
    if isinstance(source, tuple):
        state = np.random.RandomState()
        state.set_state(source)
        return state
    if isinstance(source, bytes):
        source = list(np.frombuffer(source, "u4"))
    return np.random.default_rng(source)


def draw(source, size):
    return np.floor(generator_of(source).normal(size=size) * 1000)


def number(source):
    return int(generator_of(source).normal() * 1000)


def peek(source):
    """A number that depends on a source and changes nothing of it."""
    return abs(number(copy.deepcopy(source)))


@dataclass(frozen=True)
class Box:
    source: object
    scale: float = 2.0


class Drawer:
    def __init__(self, source):
        self.source = source

    def draw(self, block):
        return block + draw(self.source, block.shape)

    def __call__(self, block):
        return block * 2 + number(self.source)


def add_draws(block, source):
    return block + draw(source, block.shape)


def add_number(block, source=None):
    return block * 2 + number(source)


def branch(block, source):
    return block + 1 if peek(source) % 2 else block * 3


def select(block, source):
    return np.where(block > peek(source) % 60, block, -block)


def add_both(block, sources):
    return block + number(sources[0]) - number(sources[-1])


def add_item(block, sources):
    return block + number(sources["x"])


def add_box(block, box):
    return block * box.scale + number(box.source)


def compare(block, one, other):
    return block + (1000 if one is other else 0) + peek(one)


def closure(source):
    def inner(block):
        return block + number(source)

    return inner


def default(source):
    def inner(block, source=source):
        return block * 2 - number(source)

    return inner


def mapped(function, *args, **options):
    return lambda b: b.map_blocks(function, *args, dtype="f8", **options)


def from_delayed(make):
    """Add what a delayed task makes, which has sources of its own: such tasks are in no order."""

    def apply(x, y):
        x, y = (copy.deepcopy(v) if isinstance(v, KEEPS_STATE) else v for v in (x, y))
        return lambda b: b + make(x, y, b)

    return apply


def dask_generator(source):
    if isinstance(source, (np.random.RandomState, tuple)):
        return da.random.RandomState(peek(source))
    if isinstance(source, bytes):
        source = peek(source)
    return da.random.default_rng(getattr(source, "bit_generator", source))


def new_generator(source):
    return da.random.default_rng(peek(source))


def by_position(source):
    sequences = (int, np.random.SeedSequence)
    seed = source if isinstance(source, sequences) else peek(source)
    return gpuscheduler.random.default_rng(seed)


def integers(generator, b):
    return generator.integers(0, 99, size=b.shape, chunks=b.chunks)


WAYS = {
    "argument": lambda x, y: mapped(add_draws, x),
    "keyword": lambda x, y: mapped(add_number, source=x),
    "branch": lambda x, y: mapped(branch, x),
    "select": lambda x, y: mapped(select, x),
    "list": lambda x, y: mapped(add_both, [x, y]),
    "tuple": lambda x, y: mapped(add_both, (x, y)),
    "dictionary": lambda x, y: mapped(add_item, {"x": x}),
    "identity": lambda x, y: mapped(compare, x, y),
    "dataclass": lambda x, y: mapped(add_box, Box(x)),
    "closure": lambda x, y: mapped(closure(x)),
    "lambda": lambda x, y: mapped(lambda b: b + number(x) * 2 - number(y)),
    "default": lambda x, y: mapped(default(x)),
    "partial": lambda x, y: mapped(functools.partial(add_number, source=x)),
    "method": lambda x, y: mapped(Drawer(x).draw),
    "callable": lambda x, y: mapped(Drawer(y)),
    "blockwise": lambda x, y: lambda b: da.blockwise(add_draws, "i", b, "i", x, None, dtype="f8"),
    "delayed": from_delayed(
        lambda x, y, b: da.from_delayed(dask.delayed(draw)(x, b.shape), b.shape, "f8")
    ),
    "delayed value": from_delayed(
        lambda x, y, b: da.from_delayed(dask.delayed(draw)(dask.delayed(x), b.shape), b.shape, "f8")
    ),
    "delayed number": from_delayed(
        lambda x, y, b: da.from_delayed(dask.delayed(number)(x), (), "f8")
    ),
    "delayed list": from_delayed(
        lambda x, y, b: da.from_delayed(
            dask.delayed(lambda v: number(v[0]) - number(v[1]))([x, y]), (), "f8"
        )
    ),
    "normal": lambda x, y: (
        lambda b: b + da.floor(dask_generator(x).normal(size=b.shape, chunks=b.chunks) * 1000)
    ),
    "parameters": lambda x, y: (
        lambda b: b + da.floor(100 * dask_generator(x).normal(b, abs(b) + 1, chunks=b.chunks))
    ),
    "choice": lambda x, y: (
        lambda b: b + dask_generator(x).choice(99, size=b.shape, chunks=b.chunks)
    ),
    "weighted choice": lambda x, y: (
        lambda b: (
            b
            + dask_generator(x).choice(
                np.arange(3.0) * peek(y), size=b.shape, chunks=b.chunks, p=[0.2, 0.3, 0.5]
            )
        )
    ),
    "two generators": lambda x, y: (
        lambda b: b + integers(new_generator(x), b) - integers(new_generator(y), b)
    ),
    "permutation": lambda x, y: (
        lambda b: b + new_generator(x).permutation(da.arange(b.size, chunks=b.chunks))
    ),
    "by position": lambda x, y: (
        lambda b: b + integers(by_position(x), b) + integers(by_position(y), b)
    ),
}  # fmt: skip


class History(NamedTuple):
    """A program, and the seeds of its rounds."""

    kinds: list[str]
    uses: list[tuple[str, int, int]]
    blocks: int
    rounds: list[list[int]]
    shares: bool  # equal seeds are one object
    wraps: bool  # bit generators are wrapped in generators
    persists: bool
    end: str

    def build(self, seeds, get):
        known, sources = {}, []
        for kind, seed in zip(self.kinds, seeds, strict=True):
            source = known.get((kind, seed)) if self.shares else None
            if source is None:
                source = known[kind, seed] = SEEDS[kind](seed)
            sources.append(source)
        if self.wraps:
            sources = [
                np.random.Generator(v) if isinstance(v, np.random.BitGenerator) else v
                for v in sources
            ]
        blocks = 1 if any(k in STATEFUL for k in self.kinds) else self.blocks
        array = da.arange(27.0, chunks=27 // blocks)
        for i, (way, x, y) in enumerate(self.uses):
            array = WAYS[way](sources[x], sources[y])(array)
            if self.persists and not i:
                array = array.persist(scheduler=get)
        return getattr(array, self.end)() if self.end else array

    def compute(self, seeds, get):
        """The value, or the kind of error."""
        try:
            return self.build(seeds, get).compute(scheduler=get)
        except Exception as error:
            return type(error)


@st.composite
def histories(draw):
    n = draw(st.integers(1, 3))
    one = st.integers(0, n - 1)
    rounds = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    return History(
        draw(st.lists(st.sampled_from(sorted(SEEDS)), min_size=n, max_size=n)),
        draw(st.lists(st.tuples(st.sampled_from(sorted(WAYS)), one, one), min_size=1, max_size=3)),
        draw(st.sampled_from([1, 3, 9])),
        draw(st.lists(rounds, min_size=2, max_size=5)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(["", "sum", "max"])),
    )


OPTIONS = [
    {"devices": "cpu:2", "fuse_least": 0},
    {"devices": "cpu:1", "fuse_least": 0, "fuse": False},
    {"devices": "cpu:1"},
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@thorough
@given(histories(), st.sampled_from(OPTIONS))
def test_rounds_equal_those_of_dask(history, options):
    with Scheduler(**options) as s:
        for seeds in history.rounds:
            want, got = history.compute(seeds, "sync"), history.compute(seeds, s.get)
            if isinstance(want, type):
                assert isinstance(got, type)
            else:
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sequence", "int", "Generator", "RandomState"])
def test_each_way_into_a_program(way, kind):
    history = History([kind, kind], [(way, 0, 1)], 3, [[1, 2], [3, 0]], False, False, False, "")
    with Scheduler("cpu:1") as s:
        for seeds in history.rounds:
            got = history.build(seeds, s.get).compute()
            np.testing.assert_array_equal(got, history.compute(seeds, "sync"))
