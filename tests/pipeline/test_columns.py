"""Layers that are told column by column are as alike as those whose tasks are told one by one."""

import copy
import operator
from functools import partial
from itertools import pairwise

import dask.array as da
import numpy as np
import pytest
import toolz
from dask._task_spec import Alias, DataNode, List, Task, TaskRef
from dask.highlevelgraph import MaterializedLayer
from dask.utils import apply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler.pipeline import fingerprint
from gpuscheduler.pipeline.columns import short_integers
from gpuscheduler.pipeline.comparable import NotComparable
from gpuscheduler.pipeline.fingerprint import FEWEST_ROWS, _LayerWords


def users(x, *args):
    return x


def made(k):
    return lambda x, *args: x * k


#: Values that are nearly the same, and whatever may stand in a task.
ATOMS = [
    0, 1, True, False, 1.0, 0.0, -0.0, float("nan"), 1j, 2**63, 2**70, -1, None, Ellipsis, "x", "y",
    "add", b"x", np.float64(1), np.int64(1), np.bool_(True), np.dtype("f8"), np.dtype("f4"), int,
    slice(0, 1), slice(0, 1.0), slice(None, 1), slice(None, None, 2), users, np.add,
    operator.getitem, made(2), made(3), made, partial(np.add, 1), partial(np.add, 1.0),
    np.random.SeedSequence(1), np.random.SeedSequence(2), np.random.SeedSequence([1, 2]),
    np.random.SeedSequence(1, spawn_key=(1,)), np.arange(3), np.arange(3.0), np.zeros(0),
    TaskRef(("x", 0)), TaskRef(("x", 1)), TaskRef(("y", 0)), TaskRef("x"), Alias(("x", 0)),
]  # fmt: skip
KEYS = [
    ("x", 0), ("x", 1), ("x", 0, 0), ("y", 0), ("x", 1.5), ("x", "extra", 0), ("add", 2), "x",
    ("x", True), ("x", np.int64(0)), ("x", -1), ("x", 2**31), ("x", 2**40), ("".join("xx"), 0),
    ("".join("xx"), 1),
]  # fmt: skip
FUNCTIONS = [
    np.add, operator.getitem, users, made(2), made(3), partial(np.sum, axis=0),
    partial(np.sum, axis=1), da.core.concatenate_shaped, np.concatenate,
]  # fmt: skip


def nested(atoms, width=3):
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.lists(inner, max_size=width).map(tuple),
            st.lists(inner, max_size=width),
            st.lists(inner, max_size=width).map(lambda v: List(*v)),
            st.dictionaries(st.sampled_from(["k", "l"]), inner, max_size=2),
            st.lists(inner, max_size=2).map(lambda v: Task(None, np.add, *v)),
        ),
        max_leaves=4,
    )


VALUES = nested(st.sampled_from(ATOMS))
LEGACY = st.recursive(
    st.one_of(st.sampled_from(KEYS), st.sampled_from(ATOMS[:12]), st.sampled_from(KEYS[:2])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.sampled_from(KEYS[:4]), min_size=1, max_size=3),
        st.tuples(st.sampled_from(FUNCTIONS), inner),
    ),
    max_leaves=5,
)


@st.composite
def items(draw):
    kind = draw(st.sampled_from(["task", "task", "getitem", "legacy", "legacy", "alias", "data"]))
    if kind == "task":
        args = draw(st.lists(VALUES, max_size=3))
        kwargs = draw(st.dictionaries(st.sampled_from(["a", "b"]), VALUES, max_size=1))
        return Task("key", draw(st.sampled_from(FUNCTIONS)), *args, **kwargs)
    if kind == "getitem":
        bounds = st.builds(slice, st.integers(0, 1), st.sampled_from([1, 2, None]))
        ref = TaskRef(draw(st.sampled_from(KEYS)))
        return Task("key", operator.getitem, ref, (draw(bounds), draw(bounds)))
    if kind == "legacy":
        if draw(st.booleans()):
            return (draw(st.sampled_from(FUNCTIONS)), draw(LEGACY))
        keys = st.lists(st.sampled_from(KEYS[:5]), min_size=1, max_size=3)
        return (draw(st.sampled_from(FUNCTIONS[:3])), draw(st.lists(keys, min_size=1, max_size=2)))
    if kind == "alias":
        return Alias(draw(st.sampled_from(KEYS)))
    return draw(st.sampled_from([np.arange(4.0), DataNode("key", np.arange(2)), DataNode("k", 5)]))


@st.composite
def pairs(draw):
    """Two layers that differ in one item, or in one key, or in nothing."""
    every = draw(st.lists(items(), min_size=1, max_size=5))
    every = [draw(st.sampled_from(every)) for _ in range(draw(st.integers(1, 6)))]
    keys = [("made", n) for n in range(len(every))]
    other, others = list(every), list(keys)
    n = draw(st.integers(0, len(every) - 1))
    what = draw(st.sampled_from(["item", "item", "key", "swap", "nothing"]))
    if what == "item":
        other[n] = draw(items())
    elif what == "key":
        others[n] = draw(st.sampled_from([("made", 0, n), ("made", n + 0.5), ("other", n)]))
    elif what == "swap":
        other.reverse()
    return dict(zip(keys, every, strict=True)), dict(zip(others, other, strict=True))


def told(mapping, fewest):
    before, fingerprint.FEWEST_ROWS = fingerprint.FEWEST_ROWS, fewest
    try:
        return _LayerWords().fingerprint(MaterializedLayer(mapping))
    except NotComparable:
        return None
    finally:
        fingerprint.FEWEST_ROWS = before


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs())
def test_layers_are_as_alike_as_their_tasks(pair):
    columns = [told(m, 1) for m in pair]
    tasks = [told(m, 10**9) for m in pair]
    for c, t, m in zip(columns, tasks, pair, strict=True):
        if c is None or t is None:
            assert c is None or t is not None, "columns compare what tasks do not"
            continue
        assert c == told(m, 1) or c.words == told(m, 1).words
        assert c.plain == t.plain
        assert set(c.names) == set(t.names)
        assert c.makes == t.makes
        assert sorted(map(str, c.data)) == sorted(map(str, t.data))
        assert {id(v) for v, _ in t.around} == {id(v) for v, _ in c.around}
    if None in columns or None in tasks:
        return
    if columns[0].words == columns[1].words and columns[0].data == columns[1].data:
        assert tasks[0].words == tasks[1].words
        assert tasks[0].data == tasks[1].data


X, Y = TaskRef(("x", 0)), TaskRef(("y", 0))
P, Q, R = ("x", 0), ("x", 1), ("y", 0)
F, G = np.add, np.subtract


def task(*args, **kwargs):
    return Task("key", np.add, *args, **kwargs)


#: The blocks of a result, as one task reads all of them.
BLOCKS = [TaskRef(("x", n)) for n in range(10)]


def rows_of(*lengths):
    ends = np.cumsum((0, *lengths)).tolist()
    return List(*[List(*BLOCKS[a:b]) for a, b in pairwise(ends)])


#: Pairs of columns of tasks that differ in one thing.
DIFFERENT = {
    "truth": ([task(1), task(0)], [task(True), task(False)]),
    "floats": ([task(1), task(2)], [task(1.0), task(2.0)]),
    "zeros": ([task(0.0)], [task(-0.0)]),
    "large integers": ([task(2**70)], [task(2**71)]),
    "arguments": ([task(1), task(2)], [task(2), task(1)]),
    "types": ([task(1), task(None)], [task(None), task(1)]),
    "keywords": ([task(1, a=2)], [task(1, b=2)]),
    "a keyword or not": ([task(1, 2)], [task(1, a=2)]),
    "strings": ([task("p", "qr")], [task("pq", "r")]),
    "bounds": ([task(slice(0, 1))], [task(slice(0, 1, 1))]),
    "bounds in another order": (
        [task(slice(0, 1)), task(slice(1, 2))], [task(slice(0, 2)), task(slice(1, 1))]
    ),
    "tuples and lists": ([task((1, 2))], [task(List(1, 2))]),
    "where tuples end": ([task((1,)), task((2, 3))], [task((1, 2)), task((3,))]),
    "where lists of keys end": ([(F, [P]), (F, [Q, R])], [(F, [P, Q]), (F, [R])]),
    "where lists of lists end": ([(F, [[P], [Q, R]])], [(F, [[P, Q], [R]])]),
    "where nothing is": ([(F, []), (F, [P])], [(F, [P]), (F, [])]),
    "names": ([(F, [P]), (F, [R])], [(F, [P]), (F, [("x", 0)])]),
    "which name": ([(F, [P, R, P])], [(F, [P, R, R])]),
    "indices": ([(F, [("x", 0, 0), ("x", 1)])], [(F, [("x", 0), ("x", 0, 1)])]),
    "which function": ([(F, P), (F, Q), (G, R)], [(F, P), (G, R), (F, Q)]),
    "which function of tasks": (
        [task(X), task(Y), Task("k", G, X)], [task(X), Task("k", G, X), task(Y)]
    ),
    "calls and keys": ([(F, (G, P), Q)], [(F, P, (G, Q))]),
    "blocks of a result": ([task(List(*BLOCKS))], [task(List(*BLOCKS[::-1]))]),
    "where rows of blocks end": ([task(rows_of(1, 2, *[1] * 7))], [task(rows_of(2, 1, *[1] * 7))]),
    "aliases": ([Alias(P), Alias(Q)], [Alias(Q), Alias(P)]),
    "data and values": ([DataNode("k", 5), np.ones(2)], [np.ones(2), DataNode("k", 5)]),
    "producers": ([task(X)], [Task("key", np.add, X, _data_producer=True)]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("more", [0, 9])
def test_what_differs_has_other_words(name, more):
    rest = [(np.multiply, [("z", n)]) for n in range(more)]
    a, b = ({("made", n): v for n, v in enumerate([*some, *rest])} for some in DIFFERENT[name])
    found, others = told(a, 1), told(b, 1)
    assert found is not None
    assert others is not None
    assert (found.words, found.data) != (others.words, others.data)
    assert told(dict(a), 1).words == found.words


#: Integers at the ends of 32 bits, and what is like an integer, or has the same bytes.
NEARLY = [
    0, 1, -1, 5, 105, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**63, 2**70, True, False, None,
    1.0, np.int64(1), np.int32(1), np.uint64(1), np.float64(1), "i", b"i\0\0\0", "iiii", (1,), [1],
    np.arange(1), np.zeros(5, "u1"), slice(1), int, operator.getitem,
]  # fmt: skip


def is_short(v):
    return type(v) is int and -(2**31) <= v < 2**31


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(NEARLY) | st.integers(-(2**33), 2**33) | st.binary(max_size=9)))
def test_short_integers_are_told_from_all_that_is_like_them(column):
    found = short_integers(column)
    assert (found is not None) == all(map(is_short, column))
    short = [v for v in column if is_short(v)]
    assert (found == short_integers(short)) == (len(short) == len(column))
    if short:
        other = [*short[:-1], short[-1] ^ 1]
        assert short_integers(short) not in (None, short_integers(other), short_integers(short[1:]))


def test_long_tuples_differ_in_each_value_and_its_type():
    """As the lengths of an array's chunks, which a Blockwise layer has."""
    ones = [1, True, 1.0, np.int64(1), np.float64(1), np.bool_(True), "1", b"1", 2**40, 2**70, None]
    every = [(2,) * 8, (2,) * 9, *[(*[1] * 8, v) for v in ones], (*[2**40] * 8, 1)]
    words = [_LayerWords()(v) for v in every]
    assert not any(a == b for n, a in enumerate(words) for b in words[:n])
    assert words == [_LayerWords()(copy.deepcopy(v)) for v in every]


def test_equal_layers_have_equal_words():
    """Made anew, with the same functions."""

    def layer(n=20):
        x = da.ones((n, n), chunks=1)
        some = (x.sum(), x[::2], x.rechunk(2), da.concatenate([x, x]), da.cumsum(x, 0), x.mean(0))
        return [m for y in some for m in y.dask.layers.values() if type(m) is MaterializedLayer]

    many = 0
    for a, b in zip(layer(), layer(), strict=True):
        many += len(a) >= FEWEST_ROWS
        assert told(a.mapping, 1).words == told(b.mapping, 1).words
    assert many >= 10


def test_seeds_that_differ_anywhere():
    """They are data; where nobody can put another one, they are told by what they say."""
    seeds = [
        np.random.SeedSequence(1), np.random.SeedSequence(2), np.random.SeedSequence([1]),
        np.random.SeedSequence(1, spawn_key=(1,)), np.random.SeedSequence(1, spawn_key=(2,)),
        np.random.SeedSequence(1, pool_size=8),
    ]  # fmt: skip
    seeds.append(copy.deepcopy(seeds[0]))
    seeds[-1].spawn(1)
    layers = [{("x", n): Task("k", users, s, n) for n in range(9)} for s in seeds]
    found = [told(m, 1) for m in layers]
    assert all(f.words == found[0].words for f in found)
    assert all(set(map(id, f.inside)) == {id(s)} for f, s in zip(found, seeds, strict=True))
    layers = [{("x", n): Task("k", toolz.curry(users, s), n) for n in range(9)} for s in seeds]
    words = [told(m, 1).words for m in layers]
    assert not any(a == b for n, a in enumerate(words) for b in words[:n])


@pytest.mark.parametrize("where", ["head", "inside"])
def test_a_function_that_is_applied_counts(where):
    def layer(f):
        if where == "head":
            return {("x", n): (apply, f, [("y", n)]) for n in range(9)}
        return {("x", n): (np.add, (f, ("y", n)), 1) for n in range(9)}

    a, b = told(layer(np.sin), 1), told(layer(np.cos), 1)
    assert a.words != b.words
    mixed = {**layer(np.sin), ("x", 4): layer(np.cos)["x", 4]}
    assert told(mixed, 1).words not in (a.words, b.words)
