"""Nodes of a graph: six methods change them, and nothing is known of a task that is gone."""

from __future__ import annotations

import pickle
from operator import add, mul

import pytest
from dask._task_spec import DataNode, Task, TaskRef
from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler.frontend.graph import FACTS, BlockInfo, Graph
from gpuscheduler.frontend.lowering import from_dask
from gpuscheduler.frontend.task_node import TaskNode


def small():
    """x -> a, b -> c, with facts about each."""
    graph = Graph({}, ("c",), ("c",))
    graph.add("x", DataNode("x", 2.0), size=8)
    graph.add("a", Task("a", add, TaskRef("x"), 1), ("x",), size=8, pin=1)
    graph.add("b", Task("b", mul, TaskRef("x"), 3), ("x",), constants={"k": 7}, why="it is small")
    graph.add("c", Task("c", add, TaskRef("a"), TaskRef("b")), ("a", "b"))
    return graph


class Both:
    """Several tasks as one, with a tuple of their values."""

    def __init__(self, tasks):
        self.tasks = tasks

    def __call__(self, values):
        return tuple(task(values) for task in self.tasks)


def value_of(graph, key):
    """The value of a key, computed task by task."""
    made = {}
    for k, node in graph.nodes.items():
        read = {}
        picks = node.picks or ((),) * len(node.needs)
        for name, need, pick in zip(node.names, node.needs, picks, strict=True):
            value = made[need]
            for n in pick:
                value = value[n]
            read[name] = value
        made[k] = node.task({**read, **node.constants})
    if key in graph.parts:
        holder, path = graph.parts[key]
        value = made[holder]
        for n in path:
            value = value[n]
        return value
    return made[key]


def test_dropped_task_leaves_no_fact_behind():
    graph = small()
    graph.rewire("c", ("a",), ("a",))
    graph.drop("b")
    graph.validate()
    for facts in (
        graph.tasks,
        graph.needs,
        graph.names,
        graph.constants,
        graph.reasons,
        graph.pins,
    ):
        assert "b" not in facts
    assert dict(graph.sizes) == {"x": 8, "a": 8}


def test_views_show_one_fact_of_all_tasks():
    graph = small()
    assert list(graph.tasks) == ["x", "a", "b", "c"]
    assert dict(graph.pins) == {"a": 1}
    assert dict(graph.reasons) == {"b": "it is small"}
    assert dict(graph.constants) == {"b": {"k": 7}}
    assert graph.constants.get("a") is None
    assert graph.pins.get("nobody", 5) == 5
    assert (len(graph.pins), bool(graph.picks), "a" in graph.pins, "b" in graph.pins) == (
        1, False, True, False,
    )  # fmt: skip
    graph.note("a", aside=True, sent=True)
    assert graph.sent_keys == {"a"}
    assert (graph.sent_keys | {"b"}) - graph.aside_keys == {"b"}
    with pytest.raises(KeyError):
        graph.reasons["a"]


def test_note_of_none_takes_a_fact_back():
    graph = small()
    graph.note("b", why=None)
    assert dict(graph.reasons) == {}
    graph.note("b", why="again")
    assert dict(graph.reasons) == {"b": "again"}


def test_unknown_fact_is_refused():
    with pytest.raises(TypeError, match="colour"):
        small().note("a", colour="red")
    assert {"pin", "size", "why", "sent"} <= FACTS


def test_task_is_added_once():
    with pytest.raises(ValueError, match="'a' already"):
        small().add("a", Task("a", add, 1, 1))


def test_order_has_all_tasks():
    with pytest.raises(ValueError, match="leaves out"):
        small().reorder(["x", "a"])


def test_added_task_takes_over_what_is_known_of_its_value():
    """A chain's first task may be split off: its size was one of a value inside the chain."""
    block = BlockInfo((3,), "f8")
    graph = Graph({}, (), (), inner_sizes={"r": 24}, inner_blocks={"r": block})
    assert graph.sizes["r"] == 24
    node = graph.add("r", Task("r", add, 1, 1))
    assert (node.size, node.block) == (24, block)
    graph.validate()
    assert graph.inner_sizes == graph.inner_blocks == {}


def test_merged_tasks_are_one_and_readers_pick_their_items():
    graph = small()
    graph.note("b", pin=1)
    assert value_of(graph, "c") == 9.0
    graph.merge({"ab": (["b", "a"], Both([graph.nodes[k].task for k in "ba"]))})
    graph.validate()
    assert list(graph.nodes) == ["x", "ab", "c"]
    node = graph.nodes["ab"]
    assert (node.needs, node.constants, node.pin, node.size) == (("x",), {"k": 7}, 1, 8)
    assert graph.nodes["c"].picks == ((1,), (0,))
    assert value_of(graph, "c") == 9.0


def test_merged_output_is_a_part():
    graph = small()
    graph.outputs = ("a", "c")
    graph.merge({"ab": (["a", "b"], Both([graph.nodes[k].task for k in "ab"]))})
    graph.validate()
    assert graph.parts == {"a": ("ab", (0,))}
    assert value_of(graph, "a") == 3.0


def test_merged_tasks_merge_again():
    graph = small()
    graph.add("d", Task("d", mul, TaskRef("a"), 10), ("a",))
    graph.merge({"ab": (["a", "b"], Both([graph.nodes[k].task for k in "ab"]))})
    graph.merge({"cd": (["c", "d"], Both([graph.nodes[k].task for k in "cd"]))})
    graph.validate()
    assert graph.nodes["cd"].picks == ((0,), (1,))
    assert value_of(graph, "c") == 9.0


def test_copy_is_changed_without_the_graph():
    graph = small()
    other = graph.copy()
    other.note("a", size=99, pin=None)
    other.rewire("c", (), ())
    other.drop("b")
    graph.validate()
    assert graph.nodes["a"].size == 8
    assert graph.needs["c"] == ("a", "b")
    assert value_of(graph, "c") == 9.0


def test_pickled_graph_is_the_same():
    dsk = {
        "x": Task("x", float, 2), "a": Task("a", add, TaskRef("x"), 1),
        "b": Task("b", mul, TaskRef("x"), 3), "c": Task("c", add, TaskRef("a"), TaskRef("b")),
    }  # fmt: skip
    graph = from_dask(dsk, ["c"], compiled=False)
    graph.note("a", block=BlockInfo((3,), "f8", "numpy.ndarray"), pin=1, sent=True, aside=True)
    again = pickle.loads(pickle.dumps(graph))
    again.validate()
    assert {k: n.facts() for k, n in again.nodes.items()} == {
        k: n.facts() for k, n in graph.nodes.items()
    }
    assert (dict(again.needs), dict(again.names)) == (dict(graph.needs), dict(graph.names))
    assert value_of(again, "c") == value_of(graph, "c") == 9.0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda g: g.drop("a"), "no task before it makes"),
        (lambda g: g.reorder(["a", "x", "b", "c"]), "no task before it makes"),
        (lambda g: setattr(g.nodes["c"], "picks", ((),)), "c"),
        (lambda g: setattr(g.nodes["c"], "names", ("a",)), "c"),
        (lambda g: setattr(g, "outputs", ("c", "gone")), "output"),
        (lambda g: g.parts.update(z=("gone", (0,))), "gone"),
        (lambda g: g.inner_sizes.update(a=3), "size"),
        (lambda g: g.inner_blocks.update(a=3), "block"),
        (lambda g: g.set_constants("b", {"x": 1}), "constant"),
        (lambda g: g.note("a", sent=True), "aside"),
        (lambda g: g.note("a", lent=True), "lends"),
    ],
)
def test_validator_finds_what_is_wrong(spoil, said):
    graph = small()
    graph.validate()
    spoil(graph)
    with pytest.raises(AssertionError, match=said):
        graph.validate()


@given(st.data())
def test_any_merges_keep_every_value(data):
    """Random graphs, of which random tasks at one height become one, again and again."""
    n = data.draw(st.integers(2, 9), label="tasks")
    graph = Graph({}, (), (n - 1,))
    height = {}
    for k in range(n):
        reads = tuple(sorted(data.draw(st.sets(st.integers(0, k - 1), max_size=3)))) if k else ()
        names = tuple(("read", d) for d in reads)
        task = Task(k, lambda *v: 1 + sum(v) % 1000, *[TaskRef(name) for name in names])
        graph.add(k, task, reads, names, {("c", k): k})
        height[k] = 1 + max([height[d] for d in reads], default=0)
    want = value_of(graph, n - 1)
    for turn in range(data.draw(st.integers(0, 3))):
        levels: dict[int, list] = {}
        for key in graph.nodes:
            levels.setdefault(height[key], []).append(key)
        level = data.draw(st.sampled_from(sorted(levels)))
        group = data.draw(st.permutations(levels[level]))[:3]
        holder = ("held", turn)
        height[holder] = level
        if len(group) > 1:
            graph.merge({holder: (group, Both([graph.nodes[k].task for k in group]))})
            if any(h not in graph.nodes for h, _ in graph.parts.values()):
                return  # an output that was merged is not merged again
            graph.reorder(sorted(graph.nodes, key=height.__getitem__))
            graph.validate()
    assert value_of(graph, n - 1) == want


def test_default_facts_take_no_memory():
    node = TaskNode(DataNode("x", 1))
    assert set(vars(node)) == {"task", "needs", "names"}
    assert node.is_data
