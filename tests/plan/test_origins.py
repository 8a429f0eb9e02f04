"""Whose code a step is: the user's layer, function and line, for many programs."""

from __future__ import annotations

import inspect
import json
import operator
import os
import subprocess
import sys
from functools import partial

import dask
import dask.array as da
import numpy as np
import pytest
from dask import config
from hypothesis import given
from hypothesis import strategies as st

import gpuscheduler
from gpuscheduler import OutOfMemory, Scheduler
from gpuscheduler.frontend import lines
from gpuscheduler.plan.origins import LONGEST, Origin, label, task_origins
from gpuscheduler.plan.step_table import step_table
from tests.support.strategies import thorough

HERE = os.path.join("tests", "plan", "test_origins.py")


def here(offset=0):
    """The line of the caller, as it is shown."""
    return f"{HERE}:{inspect.currentframe().f_back.f_lineno + offset}"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


@pytest.fixture(scope="module")
def scheduler():
    with Scheduler("cpu:2") as s:
        yield s


def table_of(scheduler, *collections):
    return step_table(scheduler.plan(*collections))


def functions(scheduler, *collections):
    """The functions of all steps, without those that only make or sum up."""
    found = table_of(scheduler, *collections).origins.values()
    return {o.function for origins in found for o in origins}


def normalise(b):
    return (b - b.mean()) / b.std()


def scaled(b, factor=2):
    return b * factor


class Model:
    def step(self, b):
        return b + 1

    def __call__(self, b):
        return b - 1

    @staticmethod
    def fixed(b):
        return b * 3


def made_in_a_function():
    def inner(b):
        return b + 5

    return inner


def one_element(v):
    return v + 1


by_element = np.vectorize(one_element, otypes=["f8"])


def with_block_id(b, block_id=None):
    return b + sum(block_id or ())


def with_block_info(b, block_info=None):
    return b + len(block_info or ())


#: Of a seed that no other test uses: equal arrays share a name, and the line that made it last.
X = da.random.default_rng(20261128).random((40, 40), chunks=20)
N = da.ones((40, 40), chunks=20)
AXIS = gpuscheduler.axis(0, 1, 20)

#: Programs, and a function that some step of each must name.
PROGRAMS = {
    "map_blocks": (lambda: X.map_blocks(normalise), "normalise"),
    "map_blocks with arguments": (lambda: X.map_blocks(scaled, factor=3), "scaled"),
    "a lambda": (lambda: X.map_blocks(lambda b: b + 1), "lambda"),
    "partial": (lambda: X.map_blocks(partial(scaled, factor=4)), "scaled"),
    "partial of partial": (lambda: X.map_blocks(partial(partial(scaled), factor=4)), "scaled"),
    "a method": (lambda: X.map_blocks(Model().step), "Model.step"),
    "a static method": (lambda: X.map_blocks(Model.fixed), "Model.fixed"),
    "an object": (lambda: X.map_blocks(Model()), "Model"),
    "an inner function": (lambda: X.map_blocks(made_in_a_function()), "inner"),
    "block_id": (lambda: X.map_blocks(with_block_id), "with_block_id"),
    "block_info": (lambda: X.map_blocks(with_block_info), "with_block_info"),
    "map_overlap": (lambda: X.map_overlap(normalise, depth=1), "normalise"),
    "vectorize": (lambda: X.map_blocks(by_element, dtype="f8"), "one_element"),
    "two in a chain": (lambda: X.map_blocks(scaled).map_blocks(normalise), "normalise"),
    "the first of a chain": (lambda: X.map_blocks(scaled).map_blocks(normalise), "scaled"),
    "behind arithmetic": (lambda: (X + 1).map_blocks(normalise).sum(), "normalise"),
    "blockwise": (lambda: da.blockwise(operator.add, "ij", X, "ij", N, "ij"), "operator.add"),
    "a user's blockwise": (
        lambda: da.blockwise(scaled, "ij", X, "ij", dtype="f8"),
        "scaled",
    ),
    "elemwise": (lambda: da.elementwise(X) if hasattr(da, "elementwise") else X + 1, "add"),
    "a ufunc": (lambda: da.exp(X), "numpy.exp"),
    "NumPy's ufunc": (lambda: np.sin(X), "numpy.sin"),
    "an operator": (lambda: X * 2, "operator.mul"),
    "where": (lambda: da.where(X > 0.5, X, 0), "where"),
    "sum": (lambda: X.sum(), "sum"),
    "its tree": (lambda: X.sum(split_every=2), "sum (tree)"),
    "mean": (lambda: X.mean(), "mean"),
    "std": (lambda: X.std(), "var"),
    "max": (lambda: X.max(), "max"),
    "argmax": (lambda: X.argmax(axis=0), "arg-reduce"),
    "cumsum": (lambda: X.cumsum(axis=0), "cumsum"),
    "transpose": (lambda: X.T + 0, "transpose"),
    "rechunk": (lambda: X.rechunk(30), "rechunk"),
    "slicing": (lambda: X[3:30:2], "getitem"),
    "random": (lambda: X + 1, "random"),
    "a matrix product": (lambda: X @ N, "matmul"),
    "tensordot": (lambda: da.tensordot(X, N), "tensordot"),
    "fft": (lambda: da.fft.fft(X.rechunk((20, 40))), "fft"),
    "reduction": (
        lambda: da.reduction(X, _chunk, _aggregate, dtype="f8"),
        "_chunk",
    ),
    "its aggregation": (
        lambda: da.reduction(X, _chunk, _aggregate, dtype="f8"),
        "_aggregate",
    ),
    "apply_along_axis": (lambda: da.apply_along_axis(_along, 0, X), "_along"),
    "apply_gufunc": (
        lambda: da.apply_gufunc(_gufunc, "(i)->()", X.rechunk((20, 40)), output_dtypes="f8"),
        "_gufunc",
    ),
    "delayed": (lambda: dask.delayed(normalise)(np.ones(3)), "normalise"),
    "a delayed array": (
        lambda: da.from_delayed(dask.delayed(np.ones)((4, 4)), (4, 4), "f8").map_blocks(scaled),
        "scaled",
    ),
    "a list comprehension": (
        lambda: da.concatenate([X.map_blocks(scaled, factor=k) for k in range(2)]),
        "scaled",
    ),
    "stack": (lambda: da.stack([X.map_blocks(scaled), X]), "scaled"),
    "mesh": (
        lambda: gpuscheduler.mesh(hill, (AXIS, AXIS)),
        "hill",
    ),
}  # fmt: skip


def _chunk(b, axis=None, keepdims=False):
    return b.sum(axis=axis, keepdims=keepdims)


def _aggregate(b, axis=None, keepdims=False):
    return b.sum(axis=axis, keepdims=keepdims)


def _along(column):
    return np.sort(column)


def _gufunc(b):
    return b.mean(axis=-1)


def hill(y, x):
    return np.sin(y + x)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "apart"])
def test_a_step_names_the_function(name, fuse):
    program, function = PROGRAMS[name]
    with Scheduler("cpu:2", fuse=fuse, fuse_least=0) as scheduler:
        found = functions(scheduler, program())
    assert found & {function, f"operator.{function}", f"numpy.{function}"}


def test_the_line_is_the_one_that_the_user_wrote(scheduler):
    x = X.map_blocks(normalise)
    first = here(-1)
    y = (da.exp(x) + 1).sum()
    second = here(-1)
    table = table_of(scheduler, y)
    origins = {o.function: o.line for found in table.origins.values() for o in found}
    assert origins["normalise"] == first
    assert origins["numpy.exp"] == origins["operator.add"] == origins["numpy.sum"] == second
    assert origins["sum (tree)"] == second


def test_the_line_sees_through_helpers_of_dask(scheduler):
    x = da.random.default_rng(20261129).random(
        (40, 40), chunks=20
    )  # the line of X may be forgotten
    y = x.mean()
    where = here(-1)
    lines_of = {o.line for found in table_of(scheduler, y).origins.values() for o in found}
    assert where in lines_of
    assert all(line.startswith(HERE) for line in lines_of)


def test_the_code_is_where_a_function_is_defined(scheduler):
    (origin,) = [
        o
        for found in table_of(scheduler, X.map_blocks(normalise)).origins.values()
        for o in found
        if o.function == "normalise"
    ]
    assert origin.code == f"{HERE}:{normalise.__code__.co_firstlineno}"
    assert origin.layer.startswith("normalise-")


@pytest.mark.parametrize(("file", "module", "own"), [
    ("/home/me/wave.py", "wave", True),  # as a module of the standard library is called
    (inspect.getfile(json), "json", False),
    ("/src/graphs/matmul.py", "gpuscheduler.graphs.matmul", True),  # a reference workload
    (inspect.getfile(lines), "gpuscheduler.frontend.lines", False),
    ("/home/me/dask/array/core.py", "dask.array.core", False),  # installed for development
    ("/venv/lib/python3.11/site-packages/flox/core.py", "mine", False),
])  # fmt: skip
def test_code_is_the_user_s_where_it_is_of_no_library(file, module, own):
    assert lines.is_users_code(file, module) == own


def test_code_that_is_executed_and_cells_have_lines():
    space = {"X": X}
    exec(compile("y = X + 1\n\nz = y * 2", "<ipython-input-7-abc>", "exec"), space)
    assert lines.line_of(space["y"].name) == "cell 7:1"
    assert lines.line_of(space["z"].name) == "cell 7:3"
    exec("y = X - 17", space)
    assert lines.line_of(space["y"].name) == "<string>:1"
    place = lines.place_in_file("/tmp/ipykernel_123/45.py", 4)
    assert place == "cell:4"


def test_xarray_s_frames_are_not_the_user_s():
    xarray = pytest.importorskip("xarray")
    a = xarray.DataArray(X, dims=("y", "x"))
    b = a + 41
    where = here(-1)
    assert lines.line_of(b.data.name) == where


def test_a_plan_from_a_template_shows_the_second_program_s_lines():
    with Scheduler("cpu:2", fuse_least=0) as scheduler:
        found = []
        for seed in (1, 2):
            x = da.random.default_rng(seed).random((40, 40), chunks=20)
            y = x.map_blocks(normalise).sum() if seed == 1 else x.map_blocks(normalise).sum()
            table = table_of(scheduler, y)
            found.append({o.layer for origins in table.origins.values() for o in origins})
            y.compute()
        assert scheduler.recorder.runs[-1].planned in ("template", "cache")
    assert not found[0] & found[1]


def test_templates_know_the_new_names_of_layers():
    with Scheduler("cpu:2", fuse_least=0) as scheduler:

        def program(values):
            return (da.from_array(values, chunks=20) + 1).sum()

        a, b = program(np.ones((40, 40))), program(np.zeros((40, 40)))
        first, second = scheduler.plan(a), scheduler.plan(b)
        assert second.renamed
        layers = {o.layer for found in step_table(second).origins.values() for o in found}
        names = set(b.dask.layers)
        assert {name for name in layers if not name.startswith("finalize")} <= names
        assert not layers & {o.layer for t in step_table(first).origins.values() for o in t}


# ---- labels


ORIGIN = st.builds(
    Origin,
    st.just("a-1"),
    st.sampled_from(["f", "numpy.exp", "sum", "sum (tree)", "a_function_with_a_name", "x" * 60]),
    st.sampled_from(["", "wave.py:1"]),
    st.just("wave.py:2"),
)  # fmt: skip


@thorough
@given(st.lists(ORIGIN, min_size=1, max_size=12))
def test_labels_are_short_and_begin_or_end_with_what_runs(origins):
    words = label(tuple(origins))
    assert 0 < len(words) <= LONGEST


def test_the_user_s_functions_stay_longest_in_a_label():
    names = ["random", "getitem", "mine", "overlap", "transpose", "rechunk", "sum"]
    origins = [Origin("a", n, "wave.py:3" if n == "mine" else "", "") for n in names]
    words = label(tuple(origins))
    assert "mine" in words
    assert "…" in words
    assert words.endswith("sum")


def test_a_result_that_is_a_step_says_whose():
    with Scheduler("cpu:1") as scheduler:
        plan = scheduler.plan(da.ones(4, chunks=4))
        words = list(step_table(plan).labels.values())
    assert words == ["ones_like"] or words[0].startswith("ones")


# ---- errors


def bad(b):
    if b.size:
        raise ValueError("no")
    return b


def test_an_error_names_the_function_and_both_lines():
    x = (X + 1).map_blocks(bad, dtype="f8").sum()
    where = here(-1)
    with Scheduler("cpu:2"), pytest.raises(ValueError, match="no") as error:
        x.compute()
    (note,) = error.value.__notes__
    assert note.startswith("while running ('sum-")
    assert "bad" in note
    assert where in note
    assert note.endswith(f"; it failed in bad ({HERE}:{bad.__code__.co_firstlineno + 2})")


def test_running_out_of_memory_names_the_layer_and_line():
    x = da.ones((1000, 1000), chunks=1000).map_blocks(scaled)
    where = here(-1)
    with Scheduler("cpu:1", memory_limit=1000, fuse=False), pytest.raises(OutOfMemory) as error:
        x.compute()
    assert where in str(error.value)
    assert "smaller chunks" in str(error.value)


def test_an_object_that_cannot_be_looked_at_does_not_hide_an_error():
    class Strange:
        def __getattr__(self, name):
            raise RuntimeError("mine")

        def __call__(self, *args):
            raise KeyError("the error that matters")

    with Scheduler("cpu:1") as scheduler, pytest.raises(KeyError, match="that matters"):
        scheduler.get({"a": (Strange(),)}, "a")


# ---- where lines come from


def test_the_setting_of_dask_is_still_there():
    """Clear where Dask no longer calls `array_plugins`: then lines are empty, nothing else."""
    seen = []
    with config.set(array_plugins=[seen.append]):
        y = da.ones(3)
    assert [a.name for a in seen] == [y.name]


def test_the_configuration_can_still_be_sent_as_json():
    code = (
        "import dask, gpuscheduler, json; from dask import config; "
        "config.serialize(config.global_config); "
        "print(json.dumps(config.get('array_plugins')), len(list(config.get('array_plugins'))))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["{}", "1"]
    assert json.dumps(config.get("array_plugins"))


def test_lines_can_be_switched_off():
    lines.unregister()
    try:
        assert lines.line_of((X + 123456).name) == ""
    finally:
        lines.register()
    y = X + 12345.5
    assert lines.line_of(y.name) == here(-1)


def test_other_plugins_stay():
    seen = []
    lines.unregister()
    try:
        with config.set(array_plugins=[seen.append]):
            lines.register()
            y = X + 54321
            assert lines.line_of(y.name) == here(-1)
            assert y.name in [a.name for a in seen]
    finally:
        lines.register()


def test_only_the_latest_lines_are_kept(monkeypatch):
    monkeypatch.setattr(lines, "MOST", 10)
    monkeypatch.setattr(lines, "_lines", {})
    made = [X + k for k in range(1000, 1030)]
    assert len(lines._lines) <= 10
    assert lines.line_of(made[-1].name)
    assert not lines.line_of(made[0].name)


def test_no_frame_is_kept():
    y = X + 777
    code, number = lines._lines[y.name]
    assert inspect.iscode(code)
    assert type(number) is int


def test_an_unknown_task_has_an_origin_all_the_same():
    (origin,) = task_origins(object(), ("strange-1", 0))
    assert (origin.layer, origin.line) == ("strange-1", "")
