"""What every Dask `get(dsk, keys, **kwargs)` has to do, one promise per test.

It starts from `GetFunctionTestMixin`, which Dask publishes for authors of schedulers, and adds
what the mixin leaves out and collections, callbacks and users rely on. It knows nothing about
GPUs, plans or memory. Run it by `python tests/conformance/run.py contract`. `dask.threaded:get`
passes it too, but for what is marked as its defect or as ours alone.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from conformance_plugin import SCHEDULER_VARIABLE, get, scheduler_spec
from dask._task_spec import Alias, DataNode, Dict, List, Task, TaskRef
from dask.callbacks import Callback
from dask.highlevelgraph import HighLevelGraph
from dask.utils import apply
from dask.utils_test import GetFunctionTestMixin, add, inc

# A scheduler that hangs should fail a test, not the run.
pytestmark = pytest.mark.timeout(60)

OURS = scheduler_spec().startswith("gpuscheduler")
THREADED = scheduler_spec().startswith("dask.threaded")

only_ours = pytest.mark.skipif(not OURS, reason="about gpuscheduler only")


class TestMixin(GetFunctionTestMixin):
    get = staticmethod(get)


def graph(*tasks: Task) -> dict[Any, Any]:
    return {task.key: task for task in tasks}


def noted(runs: list[int], value: Any) -> Any:
    """Leave a trace of having run."""
    runs.append(1)
    return value


def get_with(how: str, dsk: Any, keys: Any, **options: Any) -> Any:
    """The two ways to give `get` an option."""
    if how == "keyword":
        return get(dsk, keys, **options)
    with dask.config.set(options):
        return get(dsk, keys)


def fail(error: BaseException) -> None:
    raise error


# --- keys: what is asked for, and the shape of the answer ----------------------------------------

CHAIN = {"x": 1, "y": (inc, "x"), "z": (inc, "y")}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("z", 3),
        (["z"], (3,)),
        (["z", "x"], (3, 1)),
        ([["z", "y"], ["x"]], ((3, 2), (1,))),
        ([[["z"]], "x"], (((3,),), 1)),
        ([], ()),
        ([[], ["x"], []], ((), (1,), ())),
    ],
)
def test_the_answer_has_the_shape_of_the_keys(keys: Any, expected: Any) -> None:
    assert get(CHAIN, keys) == expected


def test_an_empty_graph() -> None:
    assert get({}, []) == ()


def test_a_duplicate_key_is_computed_once_and_returned_twice() -> None:
    runs: list[int] = []
    dsk = graph(Task("x", lambda: noted(runs, object())))
    first, second, (third,) = get(dsk, ["x", "x", ["x"]])
    assert first is second is third
    assert runs == [1]


@pytest.mark.parametrize("key", ["x", 7, ("x", 0), ("x", 0, 1.9), (("x", 1), "y"), b"x", 1.5])
def test_every_kind_of_key(key: Any) -> None:
    dsk = {key: Task(key, inc, 1), "end": Task("end", inc, TaskRef(key))}
    assert get(dsk, key) == 2
    assert get(dsk, [key, "end"]) == (2, 3)


def test_a_tuple_is_one_key_and_not_a_list_of_keys() -> None:
    assert get({("x", 0): (inc, 1), "x": 5}, ("x", 0)) == 2


@pytest.mark.parametrize("keys", ["nope", ["x", "nope"], [["x"], ["nope"]]])
def test_a_missing_output_key_raises_keyerror(keys: Any) -> None:
    with pytest.raises(KeyError):
        get(CHAIN, keys)


def test_a_missing_dependency_raises() -> None:
    with pytest.raises((ValueError, KeyError)):
        get(graph(Task("y", inc, TaskRef("nope"))), "y")


def test_a_cycle_raises() -> None:
    dsk = graph(Task("a", inc, TaskRef("b")), Task("b", inc, TaskRef("a")))
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)cycle"):
        get(dsk, "a")


def test_only_needed_tasks_run() -> None:
    runs: list[int] = []
    dsk = {"a": (runs.append, 1), "b": (inc, 1), "c": (inc, "a")}
    assert get(dsk, "b") == 2
    assert runs == []


def test_each_task_runs_once() -> None:
    runs: list[int] = []
    dsk = graph(Task("root", lambda: noted(runs, 1)))
    dsk |= graph(*(Task(("leaf", i), inc, TaskRef("root")) for i in range(20)))
    assert get(dsk, ["root", *(("leaf", i) for i in range(20))]) == (1, *[2] * 20)
    assert runs == [1]


def test_the_users_graph_is_left_alone() -> None:
    dsk = {"x": 1, "y": (inc, "x"), "z": [(inc, "y"), "x"]}
    before = dict(dsk)
    assert get(dsk, "z") == [3, 1]
    assert get(dsk, "z") == [3, 1]
    assert list(dsk) == list(before)
    assert all(dsk[key] is before[key] for key in before)


# --- graphs: what may be in one ------------------------------------------------------------------


def test_task_spec_nodes() -> None:
    dsk = {
        "x": DataNode("x", 1),
        "y": Task("y", inc, TaskRef("x")),
        "z": Alias("z", "y"),
        "w": Task("w", add, TaskRef("z"), y=TaskRef("x")),
    }
    assert get(dsk, [["w", "z"], ["x"]]) == ((3, 2), (1,))


def test_nested_containers_of_references() -> None:
    dsk = {
        "x": DataNode("x", 1),
        "y": Task("y", lambda values: values, List(TaskRef("x"), List(TaskRef("x"), 5))),
        "z": Task("z", lambda values: values, Dict({"a": TaskRef("x"), "b": 2})),
        "n": Task("n", inc, Task(None, inc, TaskRef("x"))),
    }
    assert get(dsk, ["y", "z", "n"]) == ([1, [1, 5]], {"a": 1, "b": 2}, 3)


def test_data_as_output() -> None:
    value = object()
    assert get({"x": DataNode("x", value)}, "x") is value
    assert get({"x": value}, ["x"])[0] is value


def test_alias_as_output() -> None:
    dsk = {"x": Task("x", inc, 1), "y": Alias("y", "x"), "z": Alias("z", "y")}
    assert get(dsk, "z") == 2
    assert get(dsk, ["z", "x", "y"]) == (2, 2, 2)


def test_alias_of_data_as_output() -> None:
    dsk = {"x": DataNode("x", None), "y": Alias("y", "x")}
    assert get(dsk, "y") is None
    assert get(dsk, ["x", "y"]) == (None, None)


def test_a_long_chain_of_aliases() -> None:
    dsk: dict[Any, Any] = {0: Task(0, inc, 1)}
    dsk |= {i: Alias(i, i - 1) for i in range(1, 1000)}
    dsk["end"] = Task("end", inc, TaskRef(999))
    assert get(dsk, ["end", 500]) == (3, 2)


def test_an_alias_and_its_target_are_one_object() -> None:
    dsk = {"x": Task("x", object), "y": Alias("y", "x")}
    first, second = get(dsk, ["x", "y"])
    assert first is second


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((add, "x", "y"), 3),
        ((add, (inc, "x"), (inc, (inc, "y"))), 6),
        ((sum, ["x", "y", (inc, "x")]), 5),
        ((sum, ["x", (sum, ["x", "y"])]), 4),
        (["x", ["y", (inc, "x")], "text"], [1, [2, 2], "text"]),
        ("x", 1),
        ("no such key", "no such key"),
        ((apply, int, ["11"], (dict, [["base", "y"]])), 3),
        ((len, "text"), 4),
        (("x", 0), 10),
        ((inc, ("x", 0)), 11),
        ((isinstance, "x", int), True),
    ],
)
def test_legacy_graphs(value: Any, expected: Any) -> None:
    assert get({"x": 1, "y": 2, ("x", 0): 10, "out": value}, "out") == expected


def test_legacy_and_new_tasks_in_one_graph() -> None:
    dsk = {"x": (inc, 1), "y": Task("y", inc, TaskRef("x")), "z": (add, "x", "y")}
    assert get(dsk, "z") == 5


def test_high_level_graph() -> None:
    layers: dict[str, Any] = {"a": {"x": 1, "y": (inc, "x")}, "b": {"z": (add, "x", "y")}}
    assert get(HighLevelGraph(layers, {"a": set(), "b": {"a"}}), ["z", "y"]) == (3, 2)


def test_expression() -> None:
    da = pytest.importorskip("dask.array")
    from dask._expr import HLGExpr

    total = (da.ones(8, chunks=4) + 1).sum()
    expression = HLGExpr.from_collection(total).optimize()
    assert get(expression, list(dask.core.flatten(expression.__dask_keys__())))[0] == 16


def test_collections_computed_together() -> None:
    da = pytest.importorskip("dask.array")
    db = pytest.importorskip("dask.bag")
    x = da.arange(10, chunks=3)
    odd = db.range(5, npartitions=2).filter(lambda i: i % 2)
    # Neighbours of one kind: Dask 2026.8 groups them, and returns the groups in another order
    # than asked when kinds alternate. That is decided before `get` is called.
    total, data, three, odds = dask.compute(x.sum(), x, dask.delayed(add)(1, 2), odd)
    assert (total, data.tolist(), three, odds) == (45, list(range(10)), 3, [1, 3])


@pytest.mark.parametrize("optimize_graph", [True, False])
def test_persist(optimize_graph: bool) -> None:
    da = pytest.importorskip("dask.array")
    x = da.arange(10, chunks=3).persist(optimize_graph=optimize_graph)
    assert (x + 1).sum().compute(optimize_graph=optimize_graph) == 55


# --- size ----------------------------------------------------------------------------------------


def test_a_chain_of_20_000_tasks() -> None:
    n = 20_000
    dsk: dict[Any, Any] = {0: DataNode(0, 0)}
    dsk |= graph(*(Task(i, inc, TaskRef(i - 1)) for i in range(1, n + 1)))
    assert get(dsk, n) == n


def test_a_fan_in_of_5_000() -> None:
    n = 5_000
    dsk = graph(*(Task(("x", i), inc, i) for i in range(n)))
    dsk |= graph(Task("sum", lambda *values: sum(values), *(TaskRef(("x", i)) for i in range(n))))
    assert get(dsk, "sum") == n * (n + 1) // 2


def test_5_000_outputs() -> None:
    n = 5_000
    dsk = graph(*(Task(("x", i), inc, i) for i in range(n)))
    assert get(dsk, [("x", i) for i in range(n)]) == tuple(range(1, n + 1))


# --- values: whatever a task returns is data -----------------------------------------------------


class Touchy:
    """A value that refuses every question but identity."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __bool__(self) -> bool:
        raise AssertionError("taken for a truth value")

    def __len__(self) -> int:
        raise AssertionError("measured")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        0,
        "",
        (),
        [],
        {},
        {1},
        float("nan"),
        ...,
        NotImplemented,
        Touchy(),
        ValueError("returned, not raised"),
        (inc, 1),
        [(inc, 1)],
        "x",
        ("x", 0),
        ["x", "y"],
        {"x": "y"},
        inc,
        int,
        threading.Lock(),
        TaskRef("x"),
        DataNode("x", 1),
        dask.delayed(inc)(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_is_never_looked_into(value: Any) -> None:
    dsk = graph(
        Task("x", lambda: value),
        Task("y", lambda x: x, TaskRef("x")),
        Task("same", lambda x, y: x is value and y is value, TaskRef("x"), TaskRef("y")),
    )
    out, same = get(dsk, ["y", "same"])
    assert out is value
    assert same is True


def test_arrays_as_data() -> None:
    np = pytest.importorskip("numpy")
    value = np.arange(6)
    dsk = {"x": DataNode("x", value), "y": Task("y", add, TaskRef("x"), 1)}
    x, y = get(dsk, ["x", "y"])
    assert x is value
    assert y.tolist() == [1, 2, 3, 4, 5, 6]


def test_generators() -> None:
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    dsk = graph(Task("x", count, 4), Task("y", list, TaskRef("x")), Task("z", count, 2))
    values, rest = get(dsk, ["y", "z"])
    assert values == [0, 1, 2, 3]
    assert list(rest) == [0, 1]


def test_a_coroutine_is_handed_back() -> None:
    """Dask's local schedulers do not await (`distributed` does), whatever `Task.is_coro` says."""

    async def f(x: int) -> int:
        return x + 1

    coroutine = get(graph(Task("x", f, 1)), "x")
    assert inspect.iscoroutine(coroutine)
    coroutine.close()


@pytest.mark.parametrize(
    "func",
    [functools.partial(add, 1), (1).__add__, lambda x: 1 + x],
    ids=["partial", "builtin method", "lambda"],
)
def test_every_kind_of_callable(func: Callable[[int], int]) -> None:
    assert get(graph(Task("x", func, 2)), "x") == 3


# --- life of the data ----------------------------------------------------------------------------


class Big:
    """Something that can be watched."""


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    """Worker threads let go of their last argument a moment after the answer is there."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    return condition()


def test_intermediates_are_released() -> None:
    """make i -> use i, fifty times, then `end`, which sees no `Big` alive."""
    alive: list[weakref.ref[Big]] = []

    def make() -> Big:
        big = Big()
        alive.append(weakref.ref(big))
        return big

    def still_alive(*_: Any) -> int:
        wait_until(lambda: all(ref() is None for ref in alive))
        return sum(ref() is not None for ref in alive)

    dsk: dict[Any, Any] = {}
    for i in range(50):
        dsk |= graph(Task(("make", i), make), Task(("use", i), id, TaskRef(("make", i))))
    dsk |= graph(Task("end", still_alive, *(TaskRef(("use", i)) for i in range(50))))
    assert get(dsk, "end") == 0
    assert len(alive) == 50


def test_a_wanted_intermediate_is_kept() -> None:
    dsk = graph(Task("x", Big), Task("y", id, TaskRef("x")), Task("z", inc, TaskRef("y")))
    x, z = get(dsk, ["x", "z"])
    assert z == id(x) + 1


def test_nothing_holds_the_results_afterwards() -> None:
    dsk = graph(Task("x", Big), Task("y", lambda x: (x, Big()), TaskRef("x")))
    x, y = get(dsk, ["x", "y"])
    refs = [weakref.ref(x), weakref.ref(y[0]), weakref.ref(y[1])]
    del x, y
    assert wait_until(lambda: all(ref() is None for ref in refs))


def test_nothing_holds_the_data_after_a_failure() -> None:
    refs: list[weakref.ref[Big]] = []

    def make() -> Big:
        big = Big()
        refs.append(weakref.ref(big))
        return big

    def check(big: Big) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        get(graph(Task("x", make), Task("y", check, TaskRef("x"))), "y")
    assert len(refs) == 1
    assert wait_until(lambda: refs[0]() is None)


# --- errors --------------------------------------------------------------------------------------


def frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Custom(Exception):
    """Not to be rebuilt from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.second = second


@pytest.mark.parametrize("num_workers", [None, 1, 4])
def test_the_users_exception_with_the_users_frames(num_workers: int | None) -> None:
    error = Custom(1, 2)

    def inner() -> None:
        raise error

    def outer(x: int) -> None:
        inner()

    dsk = graph(Task("x", inc, 1), Task("y", outer, TaskRef("x")), Task("z", inc, TaskRef("y")))
    with pytest.raises(Custom) as caught:
        get(dsk, "z", num_workers=num_workers)
    assert caught.value is error
    assert frames(caught.value)[-2:] == ["outer", "inner"]


def test_one_of_several_errors_is_raised() -> None:
    def boom(i: int) -> None:
        raise [ValueError, KeyError, OSError][i % 3](i)

    dsk = graph(*(Task(("x", i), boom, i) for i in range(30)))
    with pytest.raises((ValueError, KeyError, OSError)) as caught:
        get(dsk, list(dsk))
    assert frames(caught.value)[-1] == "boom"
    assert type(caught.value) in (ValueError, KeyError, OSError)


def test_nothing_downstream_of_an_error_runs() -> None:
    runs: list[Any] = []
    dsk = graph(
        Task("x", fail, ValueError("no")),
        Task("y", runs.append, TaskRef("x")),
        Task("z", runs.append, TaskRef("y")),
    )
    with pytest.raises(ValueError, match="no"):
        get(dsk, "z")
    assert runs == []


def test_an_error_leaves_the_scheduler_usable() -> None:
    for _ in range(20):
        dsk = graph(*(Task(i, inc, i) for i in range(9)), Task(9, fail, ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            get(dsk, list(dsk))
        assert get(CHAIN, "z") == 3


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_a_base_exception_from_a_task_propagates(kind: type[BaseException]) -> None:
    with pytest.raises(kind) as caught:
        get(graph(Task("x", fail, kind(3)), Task("y", inc, TaskRef("x"))), "y")
    assert type(caught.value) is kind
    assert caught.value.args == (3,)
    assert get(CHAIN, "z") == 3


def test_stopiteration_from_a_task_propagates() -> None:
    with pytest.raises(StopIteration):
        get(graph(Task("x", fail, StopIteration(3))), "x")


@pytest.mark.parametrize("how", ["keyword", "config"])
def test_rerun_exceptions_locally(how: str) -> None:
    """The failing task runs once more, in the caller's thread, where a debugger can stop."""
    threads: list[int] = []

    def boom(x: int) -> None:
        threads.append(threading.get_ident())
        raise ValueError(f"boom {x}")

    dsk = graph(Task("x", inc, 1), Task("y", boom, TaskRef("x")))
    with pytest.raises(ValueError, match="boom 2") as caught:
        get_with(how, dsk, "y", rerun_exceptions_locally=True)
    assert len(threads) == 2
    assert threads[1] == threading.get_ident()
    assert frames(caught.value)[-1] == "boom"


def test_no_rerun_unless_asked() -> None:
    runs: list[int] = []

    def boom() -> None:
        runs.append(1)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        get(graph(Task("x", boom)), "x")
    assert runs == [1]


INTERRUPTED = """
import os, signal, sys, threading, time
import conformance_plugin
from dask._task_spec import Task, TaskRef

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
conformance_plugin.force(os.environ[conformance_plugin.SCHEDULER_VARIABLE])
get = conformance_plugin.get
end = threading.Event()

def wait():
    print("started", flush=True)
    end.wait(30)

try:
    get({"x": Task("x", wait), "y": Task("y", id, TaskRef("x"))}, "y")
except KeyboardInterrupt:
    print("interrupted", flush=True)
else:
    sys.exit("get returned")
dsk = {("x", i): Task(("x", i), abs, -i) for i in range(10)}
assert get(dsk, list(dsk), num_workers=2) == tuple(range(10))
end.set()
assert get(dsk, list(dsk)) == tuple(range(10))
print("computed", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_ends_a_computation_and_the_next_one_works() -> None:
    here = Path(__file__).parent
    environment = os.environ | {
        SCHEDULER_VARIABLE: scheduler_spec(),
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
    }
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "started\n"
            time.sleep(0.1)  # now it waits in get, which is the case to test
            sent = time.monotonic()
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "interrupted\n"
            assert time.monotonic() - sent < 20  # the task waits 30 seconds
            assert child.stdout.readline() == "computed\n"
            assert child.wait(20) == 0
        finally:
            child.kill()


# --- callbacks -----------------------------------------------------------------------------------

STATE_KEYS = {
    "cache",
    "dependencies",
    "dependents",
    "finished",
    "ready",
    "released",
    "running",
    "waiting",
    "waiting_data",
}
TWO = graph(Task("a", inc, 1), Task("b", inc, TaskRef("a")))


class Log(Callback):  # type: ignore[misc]
    """Every call in order, as Dask gives it."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def add(self, *event: Any) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())

    def _start(self, dsk: Any) -> None:
        self.add("start", sorted(map(str, dsk)))

    def _start_state(self, dsk: Any, state: Any) -> None:
        self.add("start_state", set(state))

    def _pretask(self, key: Any, dsk: Any, state: Any) -> None:
        self.add("pretask", key)

    def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker: Any) -> None:
        self.add("posttask", key, result)

    def _finish(self, dsk: Any, state: Any, failed: bool) -> None:
        self.add("finish", failed)


def test_callbacks_come_in_order() -> None:
    with Log() as log:
        get(TWO, "b")
    (start, (name, keys), *rest) = log.events
    assert start == ("start", ["a", "b"])
    assert name == "start_state"
    assert keys >= STATE_KEYS
    assert rest == [
        ("pretask", "a"),
        ("posttask", "a", 2),
        ("pretask", "b"),
        ("posttask", "b", 3),
        ("finish", False),
    ]


def test_callbacks_run_in_the_callers_thread() -> None:
    with Log() as log:
        get({("x", i): (inc, i) for i in range(50)}, [("x", i) for i in range(50)])
    assert log.threads == {threading.get_ident()}
    assert len(log.events) == 103


def test_callbacks_as_keyword() -> None:
    log = Log()
    get(TWO, "b", callbacks=[log._callback])
    assert [event[0] for event in log.events][-1] == "finish"
    assert len(log.events) == 7


def test_callbacks_without_functions() -> None:
    with Callback(), Callback(finish=lambda dsk, state, failed: None):
        assert get(TWO, "b") == 3


def test_callbacks_of_a_failure() -> None:
    dsk = TWO | graph(Task("c", fail, ValueError("no")), Task("d", add, TaskRef("b"), TaskRef("c")))
    with pytest.raises(ValueError, match="no"), Log() as log:
        get(dsk, "d")
    assert ("pretask", "c") in log.events
    assert "c" not in [event[1] for event in log.events if event[0] == "posttask"]
    assert ("pretask", "d") not in log.events
    assert log.events[-1] == ("finish", True)
    assert [event[0] for event in log.events].count("finish") == 1


def test_finish_is_called_when_the_graph_is_bad() -> None:
    with pytest.raises((ValueError, KeyError)), Log() as log:
        get(graph(Task("y", inc, TaskRef("nope"))), "y")
    assert log.events[0][0] == "start"
    assert log.events[-1] == ("finish", True)


@pytest.mark.parametrize("where", ["start", "start_state", "pretask", "posttask"])
def test_an_error_in_a_callback_is_raised(where: str) -> None:
    def boom(*_: Any) -> None:
        raise ValueError("in a callback")

    failed: list[bool] = []
    callback = Callback(finish=lambda dsk, state, f: failed.append(f), **{where: boom})
    with pytest.raises(ValueError, match="in a callback"), callback:
        get(TWO, "b")
    assert failed == ([] if where == "start" else [True])
    assert get(TWO, "b") == 3


def test_the_state_lives() -> None:
    """ProgressBar reads the sizes of these sets from a thread of its own, during the run."""
    seen: list[int] = []
    states: list[Any] = []

    def start_state(dsk: Any, state: Any) -> None:
        states.append(state)
        assert len(state["finished"]) == 0
        assert len(state["ready"]) + len(state["waiting"]) == 20

    def pretask(key: Any, dsk: Any, state: Any) -> None:
        assert state is states[0]
        assert key in state["running"]
        assert key not in state["ready"]
        assert key not in state["waiting"]
        assert key in dsk

    def posttask(key: Any, result: Any, dsk: Any, state: Any, worker: Any) -> None:
        assert state is states[0]
        assert key in state["finished"]
        assert key not in state["running"]
        assert set(state["dependencies"][key]) == ({("x", key[1] - 1)} if key[1] else set())
        assert result == key[1] + 1
        seen.append(len(state["finished"]))

    def finish(dsk: Any, state: Any, failed: bool) -> None:
        assert state is states[0]
        assert not state["ready"]
        assert not state["waiting"]
        assert not state["running"]

    dsk = graph(Task(("x", 0), inc, 0))
    dsk |= graph(*(Task(("x", i), inc, TaskRef(("x", i - 1))) for i in range(1, 20)))
    with Callback(start_state=start_state, pretask=pretask, posttask=posttask, finish=finish):
        assert get(dsk, ("x", 19)) == 20
    assert seen == list(range(1, 21))


def test_start_may_replace_a_task_by_data() -> None:
    """As dask.cache.Cache does: `b` is known already, so that `a` does not run."""
    runs: list[int] = []
    dsk = graph(
        Task("a", lambda: noted(runs, 1)),
        Task("b", inc, TaskRef("a")),
        Task("c", inc, TaskRef("b")),
    )

    def start(dsk: Any) -> None:
        dsk["b"] = 10

    with Callback(start=start):
        assert get(dsk, "c") == 11
        assert get(dsk, ["b", "c"]) == (10, 11)
    assert runs == []
    assert get(dsk, "c") == 3


def test_start_may_replace_a_task_by_an_array() -> None:
    np = pytest.importorskip("numpy")

    def start(dsk: Any) -> None:
        dsk["a"] = np.arange(3)

    with Callback(start=start):
        assert get(TWO, "b").tolist() == [1, 2, 3]


def test_dask_cache() -> None:
    pytest.importorskip("cachey")
    from dask.cache import Cache

    runs: list[int] = []

    def slow(x: int) -> int:
        runs.append(x)
        time.sleep(0.01)
        return x + 1

    dsk = graph(Task("a", slow, 1), Task("b", slow, TaskRef("a")))
    with Cache(1e9) as cache:
        assert get(dsk, "b") == 3
        assert get(dsk, "b") == 3
        assert cache.cache.data["b"] == 3
    assert runs == [1, 2]


def test_callbacks_do_not_see_nested_computations() -> None:
    dsk = graph(Task("outer", lambda: get({"inner": (inc, 1)}, "inner")))
    with Log() as log:
        assert get(dsk, "outer") == 2
    assert [event[1] for event in log.events if event[0] == "pretask"] == ["outer"]


def test_progress_bar_and_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    from dask.diagnostics import ProgressBar
    from dask.diagnostics.profile import Profiler

    with ProgressBar(dt=0.001), Profiler() as profiler:
        assert get(TWO, "b") == 3
    assert "100% Completed" in capsys.readouterr().out
    assert {result.key for result in profiler.results} == {"a", "b"}
    assert all(result.end_time >= result.start_time for result in profiler.results)


# --- where tasks run -----------------------------------------------------------------------------


class Crowd:
    """How many tasks are inside at once, and in which threads they have been."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds
        self.inside = 0
        self.most = 0
        self.threads: set[int] = set()
        self.names: set[str] = set()
        self.lock = threading.Lock()

    def visit(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.threads.add(threading.get_ident())
            self.names.add(threading.current_thread().name)
        time.sleep(self.seconds)
        with self.lock:
            self.inside -= 1

    def graph(self, n: int) -> dict[Any, Any]:
        return graph(*(Task(("x", i), self.visit) for i in range(n)))


@pytest.mark.parametrize("how", ["keyword", "config"])
def test_one_worker_is_serial(how: str) -> None:
    crowd = Crowd()
    dsk = crowd.graph(20)
    get_with(how, dsk, list(dsk), num_workers=1)
    assert crowd.most == 1
    assert len(crowd.threads) == 1


@only_ours  # a wrong number stays in Dask's own scheduler
@pytest.mark.parametrize("wrong", [-1, 2.0, 2.5, "two", [2]])
def test_a_wrong_number_of_workers_is_an_error_that_says_so_and_changes_nothing(wrong: Any) -> None:
    """A team of 2.0 threads was found again under 2, and could not be made."""
    for how in ("keyword", "configuration"):
        with pytest.raises(ValueError, match="num_workers=.*: use a whole number") as caught:
            get_with(how, CHAIN, "z", num_workers=wrong)
        assert repr(wrong) in str(caught.value)
        assert get_with(how, CHAIN, "z", num_workers=2) == 3
        assert get_with(how, CHAIN, "z", num_workers=np.int64(2)) == 3


def test_num_workers_run_at_once_and_no_more() -> None:
    barrier = threading.Barrier(4)
    dsk = graph(*(Task(("x", i), barrier.wait, 20) for i in range(4)))
    assert sorted(get(dsk, list(dsk), num_workers=4)) == [0, 1, 2, 3]
    crowd = Crowd()
    dsk = crowd.graph(30)
    get(dsk, list(dsk), num_workers=4)
    assert crowd.most <= 4


@pytest.mark.parametrize("how", ["keyword", "config"])
def test_pool_of_concurrent_futures(how: str) -> None:
    crowd = Crowd()
    dsk = crowd.graph(20)
    with ThreadPoolExecutor(3, thread_name_prefix="the users") as pool:
        get_with(how, dsk, list(dsk), pool=pool)
    assert all(name.startswith("the users") for name in crowd.names)
    assert crowd.most <= 3


def test_pool_of_multiprocessing() -> None:
    theirs: set[int] = set()
    crowd = Crowd()
    dsk = crowd.graph(20)
    with ThreadPool(3, initializer=lambda: theirs.add(threading.get_ident())) as pool:
        get(dsk, list(dsk), pool=pool)
    assert crowd.threads <= theirs
    assert crowd.most <= 3


def test_the_users_pool_stays_open() -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert get(CHAIN, "z", pool=pool) == 3
        with pytest.raises(ValueError, match="no"):
            get(graph(Task("x", fail, ValueError("no"))), "x", pool=pool)
        assert pool.submit(inc, 1).result() == 2


def test_sixteen_callers_at_once() -> None:
    """Each thread has its own graph and gets its own answer, errors included."""
    start = threading.Barrier(16)
    answers: dict[int, Any] = {}

    def call(caller: int) -> None:
        dsk = graph(*(Task(("x", i), add, i, caller) for i in range(50)))
        dsk |= graph(Task("sum", lambda *v: sum(v), *(TaskRef(("x", i)) for i in range(50))))
        if caller % 4 == 0:
            dsk |= graph(Task("sum", fail, ValueError(caller)))
        start.wait(20)
        try:
            answers[caller] = get(dsk, "sum")
        except ValueError as error:
            answers[caller] = error.args[0]

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert answers == {i: 1225 + 50 * i if i % 4 else i for i in range(16)}


def test_nested_get() -> None:
    """More outer tasks than workers, each waiting for a computation of its own: no deadlock."""

    def outer(i: int) -> int:
        inner = {("x", j): (inc, j) for j in range(3)}
        return sum(get(inner, list(inner))) + i

    dsk = graph(*(Task(("f", i), outer, i) for i in range(32)))
    assert get(dsk, list(dsk)) == tuple(6 + i for i in range(32))


def test_nested_three_deep() -> None:
    def nest(depth: int) -> int:
        if not depth:
            return 1
        dsk = graph(*(Task(("x", depth, i), nest, depth - 1) for i in range(3)))
        return sum(get(dsk, list(dsk)))

    assert nest(4) == 81


def test_nested_compute_of_collections() -> None:
    def inner(i: int) -> int:
        return int(dask.delayed(add)(i, 1).compute())

    assert dask.delayed(sum)([dask.delayed(inner)(i) for i in range(8)]).compute() == 36


variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


@pytest.mark.parametrize("num_workers", [None, 1, 4])
def test_tasks_see_the_callers_context(num_workers: int | None) -> None:
    dsk = graph(*(Task(("x", i), variable.get) for i in range(8)))
    assert get(dsk, list(dsk), num_workers=num_workers) == (0,) * 8  # the threads are warm now
    token = variable.set(5)
    try:
        assert get(dsk, list(dsk), num_workers=num_workers) == (5,) * 8
    finally:
        variable.reset(token)


def test_a_task_does_not_change_the_callers_context() -> None:
    get(graph(Task("x", variable.set, 7)), "x")
    assert variable.get() == 0
    dsk = graph(Task("y", variable.get))
    assert get(dsk, "y") == 0


def test_annotations_are_seen_by_tasks() -> None:
    dsk = graph(Task("x", lambda: dask.get_annotations().get("device")))
    with dask.annotate(device=3):
        assert get(dsk, "x") == 3
    assert get(dsk, "x") is None


def test_annotated_collections() -> None:
    da = pytest.importorskip("dask.array")
    with dask.annotate(priority=1):
        x = da.arange(10, chunks=3) + 1
    with dask.annotate(retries=2):
        y = dask.delayed(inc)(1)
    assert dask.compute(x.sum(), y) == (55, 2)


def test_threads_do_not_pile_up() -> None:
    dsk = {("x", i): (inc, i) for i in range(10)}
    before = threading.active_count()
    for _ in range(20):
        for num_workers in (None, 2, 4):
            get(dsk, list(dsk), num_workers=num_workers)
    assert threading.active_count() <= before + 6 + (os.cpu_count() or 1)


# --- keywords ------------------------------------------------------------------------------------


def test_unknown_keywords_are_ignored() -> None:
    assert get(CHAIN, "z", foo="bar", num_workers=2, traverse=False) == 3
    assert dask.delayed(inc)(1).compute(foo="bar") == 2


@pytest.mark.parametrize(
    "chunksize",
    [
        1,
        4,
        pytest.param(-1, marks=pytest.mark.skipif(THREADED, reason="divides by zero: dask#10297")),
    ],
)
def test_chunksize(chunksize: int) -> None:
    dsk = {("x", i): (inc, i) for i in range(20)}
    assert get(dsk, list(dsk), chunksize=chunksize) == tuple(range(1, 21))


@pytest.mark.parametrize("how", ["keyword", "config"])
def test_cache_supplies_what_the_graph_lacks(how: str) -> None:
    dsk = graph(Task("y", inc, TaskRef("x")))
    assert get_with(how, dsk, "y", cache={"x": 1}) == 2


@pytest.mark.skipif(
    THREADED, reason="dask.local takes the cached value for a truth value: `not cache.get(key)`"
)
@pytest.mark.parametrize("value", [0, None, [], False])
def test_cache_supplies_falsy_values(value: Any) -> None:
    dsk = graph(Task("y", lambda x: [x], TaskRef("x")))
    assert get(dsk, "y", cache={"x": value}) == [value]


@pytest.mark.skipif(
    THREADED, reason="dask.local takes the cached value for a truth value: `not cache.get(key)`"
)
def test_cache_supplies_arrays() -> None:
    np = pytest.importorskip("numpy")
    dsk = graph(Task("y", add, TaskRef("x"), 1))
    assert get(dsk, "y", cache={"x": np.arange(3)}).tolist() == [1, 2, 3]


# --- how it is chosen ----------------------------------------------------------------------------


def test_as_callable() -> None:
    assert dask.delayed(inc)(1).compute(scheduler=get) == 2
    with dask.config.set(scheduler=get):
        assert dask.delayed(inc)(1).compute() == 2


@only_ours
@pytest.mark.parametrize("name", ["gpu", "GPU"])
def test_by_name(name: str) -> None:
    import gpuscheduler

    assert dask.base.get_scheduler(scheduler=name) is gpuscheduler.get
    assert dask.delayed(inc)(1).compute(scheduler=name) == 2
    with dask.config.set(scheduler=name):
        assert dask.delayed(inc)(1).compute() == 2


@only_ours
def test_importing_it_changes_no_default() -> None:
    """Only a name is added: nobody gets this scheduler who did not ask for it."""
    script = (
        "import dask, dask.array as da\n"
        "before = da.Array.__dask_scheduler__, dict(dask.base.named_schedulers)\n"
        "import gpuscheduler\n"
        "assert da.Array.__dask_scheduler__ is before[0]\n"
        "names = dict(dask.base.named_schedulers)\n"
        "assert names.pop('gpu') is gpuscheduler.get\n"
        "assert names == before[1]\n"
        "assert dask.config.get('scheduler', None) is None\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
