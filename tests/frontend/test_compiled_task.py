"""Fused tasks as compiled functions: the same values as Dask's, once per layer, nothing held."""

from __future__ import annotations

import gc
import traceback
import weakref
from operator import add, itemgetter, mul

import dask.array as da
import numpy as np
import pytest
from dask._task_spec import (
    Alias,
    DataNode,
    Dict,
    List,
    Set,
    Task,
    TaskRef,
    Tuple,
    _execute_subgraph,
)
from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler.frontend import compiled_task
from gpuscheduler.frontend.compiled_task import (
    Chain,
    CompiledCall,
    SubgraphCompiler,
    compile_subgraph,
)
from tests.support.strategies import graph_of, mix, thorough


def show(*args, **kwargs):
    """What a task was called with, as a value that tells lists from tuples."""
    return repr((args, sorted(kwargs.items())))


@st.composite
def arguments(draw, keys, depth=2):
    """A constant, a reference, or a container of such."""
    leaves = [st.integers(0, 9), st.sampled_from(["text", None, 1.5])]
    if keys:
        leaves.append(st.sampled_from(keys).map(TaskRef))
        leaves.append(st.sampled_from(keys).map(TaskRef))
    if depth:
        inner = arguments(keys, depth - 1)
        several = st.lists(inner, max_size=3)
        leaves.append(several.map(lambda a: List(*a)))
        leaves.append(several.map(lambda a: Tuple(*a)))
        names = st.sampled_from(["a", "b", "not a name"])
        leaves.append(st.dictionaries(names, inner, max_size=2).map(Dict))
        leaves.append(inner.map(lambda a: Task(None, show, a)))
    return draw(st.one_of(leaves))


@st.composite
def inner_graphs(draw, depth=1):
    """An inner graph, the key wanted of it, its input keys and values for them."""
    inkeys = tuple(f"in{i}" for i in range(draw(st.integers(0, 3))))
    inner = {}
    for i in range(draw(st.integers(1, 8))):
        known = [*inkeys, *inner]
        kind = draw(st.sampled_from(["task", "task", "task", "alias", "data", "nested", "list"]))
        key = (f"t{i}", i) if draw(st.booleans()) else f"t{i}"
        if kind == "alias" and known:
            inner[key] = Alias(key, draw(st.sampled_from(known)))
        elif kind == "data":
            inner[key] = DataNode(key, draw(st.integers(0, 9)))
        elif kind == "list":
            inner[key] = List(*draw(st.lists(arguments(known), max_size=3)))
        elif kind == "nested" and depth and known:
            below, out, names, _ = draw(inner_graphs(depth - 1))
            read = [TaskRef(draw(st.sampled_from(known))) for _ in names]
            inner[key] = Task(key, _execute_subgraph, below, out, names, *read)
        else:
            args = draw(st.lists(arguments(known), max_size=3))
            names = st.sampled_from(["x", "axis", "class", "two words"])
            kwargs = draw(st.dictionaries(names, arguments(known), max_size=2))
            inner[key] = Task(key, show, *args, **kwargs)
    outkey = draw(st.sampled_from(list(inner)))
    if inkeys and draw(st.booleans()):  # an outer value wins over an inner task of its name
        inner[inkeys[0]] = Task(inkeys[0], show, "never")
    return inner, outkey, inkeys, tuple(range(100, 100 + len(inkeys)))


@thorough
@given(inner_graphs())
def test_the_function_gives_what_dask_gives(graph):
    inner, outkey, inkeys, values = graph
    expected = _execute_subgraph(inner, outkey, inkeys, *values)
    function = compile_subgraph(inner, outkey, inkeys)
    assert function(*values) == expected
    assert function(*values) == expected  # and again


@pytest.mark.parametrize(
    "node",
    [
        List(TaskRef("a"), List(TaskRef("b"), 1)),
        Tuple(TaskRef("a"), 2),
        Dict({"x": TaskRef("a"), "y": List(TaskRef("b"))}),
        Set(TaskRef("a"), 3),
    ],
    ids=["list", "tuple", "dict", "set"],
)
def test_containers_keep_their_type(node):
    inner = {"c": Task("c", lambda value: value, node)}
    got = compile_subgraph(inner, "c", ("a", "b"))(1, 2)
    assert got == _execute_subgraph(inner, "c", ("a", "b"), 1, 2)
    assert type(got) is type(_execute_subgraph(inner, "c", ("a", "b"), 1, 2))


def test_a_missing_key_is_named():
    inner = {"b": Task("b", add, TaskRef("nowhere"), 1)}
    with pytest.raises(KeyError, match="nowhere"):
        compile_subgraph(inner, "b", ("a",))


def test_a_layer_is_compiled_once_for_all_its_chunks(monkeypatch):
    """Dask would order the inner graph again for each of the 100."""
    compiled = []

    def counting(inner, outkey, inkeys, nested=None):
        compiled.append(outkey)
        return compile_subgraph(inner, outkey, inkeys, nested)

    monkeypatch.setattr(compiled_task, "compile_subgraph", counting)
    counts = []
    for chunks in (10, 100):
        x = da.ones(10 * chunks, chunks=10)
        graph = graph_of(((x + 1) * 2 - x).map_blocks(np.negative, dtype=x.dtype))
        assert len(graph.tasks) == chunks
        assert all(isinstance(t, CompiledCall) for t in graph.tasks.values())
        assert len({t.function for t in graph.tasks.values()}) == 1
        counts.append(len(compiled))
        compiled.clear()
    assert counts[0] == counts[1] <= 2  # Dask nests one fused graph in another


def test_the_same_inner_graph_wanted_for_another_key_is_compiled_again():
    """One inner graph, two outputs: a function each."""
    inner = {"b": Task("b", add, TaskRef("a"), 1), "c": Task("c", add, TaskRef("b"), 1)}
    compiler = SubgraphCompiler()
    b = compiler(Task("x", _execute_subgraph, inner, "b", ("a",), 10))
    c = compiler(Task("y", _execute_subgraph, inner, "c", ("a",), 10))
    assert (b({}), c({})) == (11, 12)


def fused(key, names, constant, order):
    """What Dask makes of a product and a sum, fused one by one: an inner graph for each block."""
    a, b, product, out = names
    inner = {
        product: Task(product, mul, TaskRef(a), TaskRef(b)),
        out: Task(out, add, TaskRef(product), constant),
    }
    values = {a: TaskRef(("a", key)), b: TaskRef(("b", key))}
    inkeys = tuple(sorted((a, b), reverse=order))
    return Task(key, _execute_subgraph, inner, out, inkeys, *[values[k] for k in inkeys])


def test_inner_graphs_that_say_the_same_are_one_function():
    """Whatever their keys are, and in whichever order Dask has their inputs."""
    compiler = SubgraphCompiler()
    blocks = [
        compiler(fused("x", ("a1", "b1", "p1", "o1"), (slice(2), 1.5), False)),
        compiler(fused("y", ("b2", "a2", "o2", "p2"), (slice(2), 1.5), True)),
        compiler(fused("z", ("a3", "b3", "p3", "o3"), (slice(2), 1.5), True)),
    ]
    assert len({id(b.function) for b in blocks}) == 1
    for key, block in zip("xyz", blocks, strict=True):
        assert block.args == (TaskRef(("a", key)), TaskRef(("b", key)))


@pytest.mark.parametrize(
    "constants", [(1, 2), (1, True), (0.0, -0.0), (1, 1.0), ([1], [1]), ((1, [2]), (1, [2]))]
)
def test_inner_graphs_that_say_something_else_are_not(constants):
    """What is equal, but not the same, and what somebody may change."""
    compiler = SubgraphCompiler()
    one, other = (compiler(fused("x", ("a", "b", "p", "o"), c, False)) for c in constants)
    assert one.function is not other.function


def boom(value):
    raise ZeroDivisionError("in the user's own function")


def test_the_users_frame_is_in_the_traceback():
    inner = {"b": Task("b", add, TaskRef("a"), 1), "c": Task("c", boom, TaskRef("b"))}
    with pytest.raises(ZeroDivisionError, match="the user's own") as error:
        compile_subgraph(inner, "c", ("a",))(1)
    assert traceback.extract_tb(error.value.__traceback__)[-1].name == "boom"
    assert traceback.extract_tb(error.value.__traceback__)[-1].filename == __file__


class Value:
    """Something that a weak reference can watch."""


def test_intermediates_are_dropped_after_their_last_use():
    """a - b - c - d. While c is made only b lives; while d is made only c does."""
    seen = []
    made = []

    def make(before):
        gc.collect()
        seen.append([r() is not None for r in made])
        value = Value()
        made.append(weakref.ref(value))
        return value

    inner = {
        "b": Task("b", make, TaskRef("a")),
        "c": Task("c", make, TaskRef("b")),
        "d": Task("d", make, TaskRef("c")),
    }
    compile_subgraph(inner, "d", ("a",))(0)
    assert seen == [[], [True], [False, True]]


def test_a_chain_holds_one_value_at_a_time():
    """The same for tasks that this package joins."""
    alive = []
    made = []

    def make(before):
        alive.append(sum(r() is not None for r in made))
        value = Value()
        made.append(weakref.ref(value))
        return value

    names = "abcd"
    tasks = [(k, Task(k, make, TaskRef(b))) for b, k in zip("x" + names, names, strict=False)]
    Chain(tasks)({"x": 0})
    assert alive == [0, 1, 1, 1]


def test_a_call_reads_its_arguments_from_the_graph():
    """References, nested ones and constants: what Dask's task takes from its dictionary."""
    inner = {"c": Task("c", mix, TaskRef("p"), TaskRef("q"), TaskRef("r"))}
    pick = Task(None, itemgetter(0), List(TaskRef("y"), 7))
    task = Task("k", _execute_subgraph, inner, "c", ("p", "q", "r"), TaskRef("x"), pick, 3)
    call = SubgraphCompiler()(task)
    values = {"x": 1, "y": 2}
    assert call(values) == task(values)
    assert "'k'" in repr(call)


def test_other_tasks_are_left_as_they_are():
    task = Task("k", add, 1, 2)
    assert SubgraphCompiler()(task) is task
