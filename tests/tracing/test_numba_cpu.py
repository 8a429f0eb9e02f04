"""Functions of numbers: which are the same one, and that they stay what they are."""

from __future__ import annotations

import cmath
import collections
import ctypes
import enum
import math
import os
import pickle
import subprocess
import sys
import types

import numba
import numpy as np
import pytest
from dask import config
from numba.core.registry import cpu_target

from gpuscheduler import NotCompiled, disk_cache
from gpuscheduler.tracing import numba_cpu
from gpuscheduler.tracing.numba_cpu import ScalarFunction

F8 = np.dtype("f8")
SCALE = 2.0
TABLE = np.array([1.0, 2.0])
settings = types.ModuleType("settings")
settings.inner = types.ModuleType("settings.inner")
kind: object = None


def scaled(x):
    return x * SCALE if x > 0 else x


def by_module(x):
    return x * settings.K if x > 0 else x * settings.inner.K


def by_kind(x):
    return x if kind else -x


def by_member(x):
    return x * kind.A.value if x > 0 else x


def from_table(x):
    return TABLE[0] if x > 0 else TABLE[1]


@numba.njit
def compiled_scaled(x):
    return x * SCALE


def compiled_twice(x):
    return 2 * compiled_scaled(x) if x > 0 else x


def twice(x):
    return 2 * scaled(x)


def thrice(x):
    return 3 * scaled(x)


def sum_of_both(x):
    return twice(x) + thrice(x)


def endless(x):
    return endless(x - 1) if x > 0 else x


def odd(n):
    return even(n - 1) if n > 0 else False


def even(n):
    return odd(n - 1) if n > 0 else True


def values(function, x=(1.0, -1.0)):
    return function.ufunc((F8,), F8)(np.array(x)).tolist()


def here(name, value, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], name, value)


# ---- which are the same


def test_functions_are_equal_that_compute_the_same():
    def first(x):
        return x * SCALE if x > 0 else x

    def other(x):
        return x * SCALE if x > 1 else x

    again = type(first)(first.__code__, first.__globals__, "first")
    assert ScalarFunction(first) == ScalarFunction(again)
    assert ScalarFunction(first) != ScalarFunction(other)
    assert len({ScalarFunction(first), ScalarFunction(again), ScalarFunction(other)}) == 2


@pytest.mark.parametrize("where", [settings, settings.inner])
def test_what_a_module_holds_is_part_of_a_function(where, monkeypatch):
    monkeypatch.setattr(settings, "K", 1.0, raising=False)
    monkeypatch.setattr(settings.inner, "K", 1.0, raising=False)
    before = ScalarFunction(by_module)
    assert before == ScalarFunction(by_module)
    monkeypatch.setattr(where, "K", 3.0)
    assert before != ScalarFunction(by_module)
    monkeypatch.setattr(settings, "unread", 1.0, raising=False)
    monkeypatch.setattr(where, "K", 1.0)
    assert before == ScalarFunction(by_module)


def colours(**values):
    return enum.IntEnum("Colour", values, module=__name__)


@pytest.mark.parametrize(
    ("one", "other"),
    [(colours(A=1, B=2).A, colours(A=1, B=2).B), (colours(A=1).A, colours(A=2).A),
     (numba.float32, numba.float64), (range(3), range(4)), (np.float32(1), np.float64(1)),
     (math.sin, math.cos), (np.zeros(2), np.zeros((2, 1)))],
)  # fmt: skip
def test_values_count_by_what_they_are(one, other, monkeypatch):
    here("kind", one, monkeypatch)
    before = ScalarFunction(by_kind)
    here("kind", other, monkeypatch)
    assert before != ScalarFunction(by_kind)


def test_classes_of_constants_count_by_their_members(monkeypatch):
    found = []
    for value in (1, 2, 1):
        here("kind", colours(A=value), monkeypatch)
        found.append(ScalarFunction(by_member))
    assert found[0] == found[2] != found[1]


def parsed(text, **space):
    exec(text, space)
    return space["f"]


Point, Turned = (collections.namedtuple("Point", names) for names in ("x y", "y x"))


@pytest.mark.parametrize(
    ("one", "other"),
    [(lambda: numba.njit(lambda x: x / 3), lambda: numba.njit(fastmath=True)(lambda x: x / 3)),
     (lambda: Point(1, 2), lambda: Turned(1, 2)), (lambda: 1, lambda: True),
     (lambda: 0.0, lambda: -0.0), (lambda: np.float64(0.0), lambda: np.float64(-0.0)),
     (lambda: np.ones((2, 2)), lambda: np.ones((2, 2), order="F")[::1, :1]),
     (lambda: enum.Enum("C", "A B").A, lambda: enum.IntEnum("C", "A B").A)],
)  # fmt: skip
def test_values_that_look_alike_are_told_apart(one, other, monkeypatch):
    found = []
    for make in (one, one, other):
        here("kind", make(), monkeypatch)
        found.append(ScalarFunction(by_kind))
    assert found[0] == found[1] != found[2]
    assert all(f.lasting for f in found)


@pytest.mark.parametrize(
    ("one", "other"),
    [("def f(x, y): return y", "def f(x, *y): return y"),
     ("def f(x, y): return y", "def f(x, *, y): return y"),
     ("def f(x): return 1 if x else 2", "def f(x): return 1 if x else 2.0")],
)  # fmt: skip
def test_code_that_looks_alike_is_told_apart(one, other):
    assert ScalarFunction(parsed(one)) == ScalarFunction(parsed(one))
    assert ScalarFunction(parsed(one)) != ScalarFunction(parsed(other))


class Far(ValueError):
    pass


@pytest.mark.parametrize(
    "value",
    [object(), Far, Point, ctypes.CDLL(None).abs, [object()], {1: 2}, type("Int", (int,), {})(3)],
)
def test_what_may_be_another_in_another_process_is_not_kept(value, monkeypatch):
    here("kind", value, monkeypatch)
    function = ScalarFunction(by_kind)
    assert not function.lasting
    assert function == ScalarFunction(by_kind)
    copy = [object()] if type(value) is list else type("Other", (), {})()
    here("kind", copy, monkeypatch)
    assert function != ScalarFunction(by_kind)


@pytest.mark.parametrize(
    "value",
    [math.sin, np.sin, np, abs, complex, numba.float32, np.float32, np.where, 2.5, (1, "a"), len,
     range(3), np.arange(3), np.zeros(2, [("a", "f8")])],
)  # fmt: skip
def test_what_is_the_same_everywhere_is_kept(value, monkeypatch):
    here("kind", value, monkeypatch)
    assert ScalarFunction(by_kind).lasting


def test_a_function_repeats_that_has_a_loop_or_calls_one_that_has():
    def waits(x):
        while x > 1:
            x /= 2
        return x

    def calls(x):
        return waits(x) + 1

    def decides(x):
        return np.angle(x) if x > 0 or x < -1 else math.sin(x)

    def inside(x):
        def inner(y):
            return max([y for _ in range(3)])

        return inner(x)

    every = waits, calls, inside, decides
    assert [ScalarFunction(f).repeats for f in every] == [True, True, True, False]


@pytest.mark.parametrize("compiled", [True, False])
def test_types_are_found_by_the_next_process(compiled, tmp_path, monkeypatch):
    with config.set({"gpuscheduler.cache-directory": str(tmp_path)}):
        assert ScalarFunction(scaled).results((F8,), compiled) == F8
        pair = lambda x: (x > 0, 1.5 if x else 2)  # noqa: E731
        given = ScalarFunction(pair).results((F8,), compiled)
        for way in ("_infer_type", "_infer_without_code"):
            monkeypatch.setattr(ScalarFunction, way, None)  # there is no need for it
        assert ScalarFunction(scaled).results((F8,), compiled) == F8
        assert ScalarFunction(pair).results((F8,), compiled) == given == (np.dtype(bool), F8)
        here("kind", object(), monkeypatch)
        for f, types_ in ((twice, (F8,)), (scaled, (np.dtype("f4"),)), (by_kind, (F8,))):
            with pytest.raises(TypeError, match="not callable"):
                ScalarFunction(f).results(types_, compiled)
        here("SCALE", 3, monkeypatch)
        with pytest.raises(TypeError, match="not callable"):
            ScalarFunction(scaled).results((F8,), compiled)


# ---- types without code


def power_sum(z, n):
    total = 0j
    for k in range(n):
        total += cmath.exp(-z * math.log(k + 1.0)) * WEIGHTS[k]
    return abs(total), total, n, z.real > 0


def several_types(x):
    if x > 2:
        return 1
    return np.float32(x) if x > 1 else compiled_twice(x)


WEIGHTS = (1.0, -0.5, 0.25)
EVERY_TYPE = [
    (scaled, "f8"), (scaled, "f4"), (scaled, "i2"), (sum_of_both, "f8"), (compiled_twice, "f4"),
    (several_types, "f8"), (thrice, "u8"), (from_table, "f4"), (power_sum, "c16 i8"),
]  # fmt: skip


@pytest.fixture
def no_code(monkeypatch):
    """Nothing can be compiled for the processor, and no types are on disk. (What Numba has written
    in Python itself, `bool(None)` say, it compiles in any case.)"""
    passes = pytest.importorskip("numba.core.typed_passes")

    def refuse(self, state):
        raise NotImplementedError("no code here")

    monkeypatch.setattr(passes.NativeLowering, "run_pass", refuse)
    monkeypatch.setattr(disk_cache, "read", lambda words: None)


@pytest.mark.parametrize(("f", "types_"), EVERY_TYPE)
def test_types_are_known_without_code(f, types_, no_code):
    types_ = tuple(map(np.dtype, types_.split()))
    found = ScalarFunction(f).results(types_, compiled=False)
    with pytest.raises(NotCompiled, match="no code here"):
        ScalarFunction(f).results(types_)
    with pytest.MonkeyPatch.context() as patch:
        passes = sys.modules["numba.core.typed_passes"]
        patch.setattr(passes.NativeLowering, "run_pass", passes.BaseNativeLowering.run_pass)
        assert ScalarFunction(f).results(types_) == found


def test_helpers_are_not_left_without_code():
    """They are the user's own, and other functions' too."""
    function = ScalarFunction(compiled_twice)
    assert function.results((F8,), compiled=False) == F8
    assert values(function) == [4, -1]
    assert compiled_scaled(2.0) == 4


def test_what_numba_forgets_with_a_function_is_nobody_elses():
    """It does when the function goes; by what stands for its code, which there is none of here."""
    known = cpu_target.target_context._defns
    cpu_target.target_context.refresh()
    before = {f: len(known[f].versions) for f in list(known)}
    function = numba.njit(pipeline_class=numba_cpu._until_typed())(scaled)
    function.compile((numba.float64,))
    function._make_finalizer()()
    assert {f: len(known[f].versions) for f in before} == before


def reads_no_file(x):
    return x + len(open("numbers").read())


def misspelt(x):
    return np.sine(x) if x > 0 else x


def gives_text(x):
    return "low" if x < 0 else "high"


@pytest.mark.parametrize("f", [reads_no_file, misspelt, gives_text, endless])
def test_what_is_wrong_is_said_in_the_same_words_without_code(f):
    said = []
    for compiled in (True, False):
        with pytest.raises(NotCompiled) as caught:
            ScalarFunction(f).results((F8,), compiled)
        said.append((str(caught.value), type(caught.value.__cause__)))
    assert said[0] == said[1]


def test_a_numba_with_other_insides_compiles(monkeypatch):
    def none():
        raise AttributeError("no such pass")

    monkeypatch.setattr(numba_cpu, "_until_typed", none)
    monkeypatch.setattr(disk_cache, "read", lambda words: None)
    assert ScalarFunction(twice).results((F8,), compiled=False) == F8


def test_divisions_by_zero_are_numpys():
    """Of points one by one, and of rows."""
    function = ScalarFunction(lambda x, y: y / x if x < 2 else y // x)
    x, y = np.array([0.0, 1.0, 4.0]), np.array([1.0, -1.0, 9.0])
    want = [np.inf, -1, 2]
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(function.ufunc((F8, F8), F8)(x, y), want)
        for varies, given, wanted in (
            ((True, True), x, want),
            ((False, True), x[:1], [np.inf, -np.inf, np.inf]),
        ):
            by_rows = function.rows((F8, F8), F8, None, varies)
            np.testing.assert_array_equal(by_rows(given, y, out=np.empty(3)), wanted)


# ---- settled


def test_a_function_stays_what_it_was_when_it_was_given(monkeypatch):
    """Compiled late, as on a GPU: its globals, modules, tables and helpers have changed by then."""
    monkeypatch.setattr(settings, "K", 1.0, raising=False)
    monkeypatch.setattr(settings.inner, "K", 1.0, raising=False)
    here("TABLE", TABLE.copy(), monkeypatch)
    functions = scaled, by_module, from_table, twice, compiled_twice
    every = [ScalarFunction(f) for f in functions]
    here("SCALE", 50.0, monkeypatch)
    monkeypatch.setattr(settings.inner, "K", 50.0)
    TABLE[:] = 50.0
    assert [values(f) for f in every] == [[2, -1], [1, -1], [1, 2], [4, -2], [4, -1]]
    assert [f.python(1.0) for f in every] == [2, 1, 1, 4, 4]
    assert not any(f == ScalarFunction(g) for f, g in zip(every, functions, strict=True))


def test_cells_are_settled():
    factor = 2.0

    def scaled(x):
        return x * factor if x > 0 else x

    function = ScalarFunction(scaled)
    factor = 50.0
    assert values(function) == [2, -1]
    assert values(ScalarFunction(scaled)) == [50, -1]


def test_what_another_process_gets_is_the_function_itself():
    """A copy has no place in a module that it could be found by."""
    function = ScalarFunction(twice)
    copy = pickle.loads(pickle.dumps(function))
    assert copy == function
    assert values(copy) == values(function)


# ---- helpers


def test_helpers_that_numba_knows_keep_how_they_are_compiled():
    cuda = pytest.importorskip("numba.cuda")

    @numba.njit(error_model="python")
    def inverse(x):
        return 1 / x

    @cuda.jit(device=True)
    def doubled(x):
        return 2 * x

    function = ScalarFunction(lambda x: inverse(x) if x > 1 else 0.0)
    assert values(function, [2.0]) == [0.5]
    assert function.python.__closure__[0].cell_contents.targetoptions["error_model"] == "python"
    found = ScalarFunction(lambda x: doubled(x)).python.__closure__[0].cell_contents
    assert found.targetoptions["device"]
    assert found.py_func(2) == 4


def test_a_helper_of_two_functions_is_compiled_once():
    assert values(ScalarFunction(sum_of_both)) == [10, -5]


@pytest.mark.parametrize("f", [endless, odd])
def test_functions_that_call_themselves_are_refused(f):
    with pytest.raises(
        NotCompiled, match=rf"{f.__name__} \(.*test_numba_cpu.py, line \d+\): it calls"
    ):
        ScalarFunction(f).results((F8,))


AGAIN = """
import sys
import numpy as np
from numba.core import codegen
from gpuscheduler.tracing import numba_cpu

K, F8, made = float(sys.argv[1]), np.dtype("f8"), []
finalize = codegen.CPUCodeLibrary.finalize

def seen(library):
    made.append(library.name)
    finalize(library)

codegen.CPUCodeLibrary.finalize = seen

def helper(x):
    if x < -5:
        raise ValueError("too small")
    return x * K if x > 0 else x

def f(x, y):
    return helper(x) + y, 1.5

function = numba_cpu.ScalarFunction(f)
types = F8, F8
function.results(types)
x, y = np.array([1.0, 2.0, -4.0]), np.array([3.0])
one = function.ufunc(types, F8, 0)(x, y).tolist()
rows = function.rows(types, F8, 0, (True, False))(x, y, out=np.empty(3)).tolist()
try:
    function.ufunc(types, F8, 0)(x - 3, y)
except ValueError as error:
    print(one, rows, error, "helper" in str(made))
"""


def test_another_process_compiles_no_function_for_the_processor(tmp_path):
    """But where a number that a helper reads is another."""

    def run(factor):
        given = {**os.environ, "DASK_GPUSCHEDULER__CACHE_DIRECTORY": str(tmp_path)}
        command = [sys.executable, "-c", AGAIN, factor]
        return subprocess.run(
            command, env=given, capture_output=True, text=True, check=True
        ).stdout.strip()

    values = "[5.0, 7.0, -1.0] [5.0, 7.0, -1.0] too small"
    assert run("2") == f"{values} True"
    assert run("2") == f"{values} False"
    assert run("3") == "[6.0, 9.0, -1.0] [6.0, 9.0, -1.0] too small True"


APART = """
import sys
import numpy as np
from gpuscheduler import Scheduler, axis, mesh

def adding(k):
    def helper(x):
        return x + k if x > 0.5 else x * k

    return lambda x, y: helper(x) + helper(y)

x = np.linspace(0, 2, 7)
with Scheduler("cpu:1"):
    for k in map(float, sys.argv[1:]):
        f = adding(k)
        found = mesh(f, (axis(0, 2, 7), axis(0, 2, 7))).compute()
        assert np.array_equal(found, [[f(a, b) for b in x] for a in x]), k
"""


def test_functions_of_another_process_are_not_taken_for_those_of_this_one(tmp_path):
    """Numba counts what it compiles, and names code by that: in each process from 1 on. What one
    has compiled third must not be called for what the other compiles third."""
    given = {**os.environ, "DASK_GPUSCHEDULER__CACHE_DIRECTORY": str(tmp_path)}
    for order in ("1234", "56214", "786321"):
        command = [sys.executable, "-c", APART, *order]
        subprocess.run(command, env=given, check=True, timeout=120)
