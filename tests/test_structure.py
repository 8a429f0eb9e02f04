"""The shape of the package: which room imports which, what is public, and what names say."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import gpuscheduler
from tests.tools import mutants

PACKAGE = Path(gpuscheduler.__file__).parent

#: Rooms, and files outside of rooms: each imports only from those before it.
ROOMS = [
    "_version", "cpython_private", "numpy_private", "dask_core_private", "dask_private",
    "distributed_private", "numba_private", "cupy_private",
    "errors", "sparse_parts", "values", "algorithms", "gc_control", "forks",
    "disk_cache", "ir",
    "codegen", "random", "frontend", "tracing", "fusion", "plan", "runtime", "options", "pipeline",
    "devices", "diagnostics", "scheduler", "default", "iteration", "mesh", "cluster", "array",
    "linalg", "sparse", "fft",
    "__init__", "cli",
    "__main__",
]  # fmt: skip
#: The files of each room: each imports only from those before it.
WITHIN = {
    "algorithms": [
        "register",
        "blocks",
        "ordered_keys",
        "local_sort",
        "sparse_matrices",
        "sparse_block",
        "sparse_dispatch",
        "sparse",
        "products",
        "capacity",
        "cyclic",
        "lapack",
        "matrices",
        "lu",
        "cholesky",
        "square",
        "tall_kernel",
        "tall_tasks",
        "tall_graph",
        "tall",
        "randomized",
        "runs",
        "splitters",
        "sorting",
        "contractions",
        "eigen",
        "fourier",
        "selection",
        "distinct",
    ],  # fmt: skip
    "diagnostics": [
        "text",
        "colours",
        "log",
        "progress",
        "lanes",
        "snapshot_file",
        "snapshot",
        "headline",
        "metrics",
        "serve",
        "page",
        "trace_json",
        "advice",
        "explain",
        "memory",
        "svg",
        "report",
        "recording",
        "observed",
    ],  # fmt: skip
    "ir": [
        "bins",
        "cost",
        "expr",
        "limits",
        "complex_parts",
        "random",
        "regions",
        "rewrite",
        "split_scans",
        "hoist",
        "loop_tiling",
    ],  # fmt: skip
    "codegen": [
        "cpu/tuning",
        "cpu/njit",
        "cpu/llvm_text",
        "cpu/histogram_loops",
        "cpu/philox_loops",
        "cpu/histogram",
        "cpu/philox",
        "cpu/llvm_code",
        "cpu/llvm_jit",
        "cpu/llvm_map",
        "cpu/llvm_reduce",
        "cpu/accumulate",
        "cpu/array_memory",
        "cpu/node_calls",
        "cpu/region",
        "cpu/evaluate",
        "random_block",
        "cuda/tuning",
        "cuda/call_cost",
        "cuda/device_library",
        "cuda/skinny",
        "cuda/window_tiles",
        "cuda/operations",
        "cuda/nodes",
        "cuda/loop_space",
        "cuda/schedule",
        "cuda/kernel_values",
        "cuda/vectorize",
        "cuda/window_schedule",
        "cuda/work_division",
        "cuda/loop_order",
        "cuda/arguments",
        "cuda/statements",
        "cuda/coordinates",
        "cuda/expressions",
        "cuda/random_numbers",
        "cuda/stages",
        "cuda/body",
        "cuda/unaligned",
        "cuda/elementwise",
        "cuda/tiles",
        "cuda/selection",
        "cuda/accumulators",
        "cuda/histogram",
        "cuda/reduction",
        "cuda/window_reduction",
        "cuda/tiled_windows",
        "cuda/scan",
        "cuda/kernel",
    ],  # fmt: skip
    "frontend": [
        "block_ids",
        "captured",
        "lines",
        "chunk",
        "task",
        "compiled_task",
        "linalg_shapes",
        "tiles",
        "task_node",
        "graph",
        "index_lists",
        "rebuild",
        "files",
        "order",
        "transfers",
        "shapes",
        "linear_fusion",
        "builder",
        "lowering",
    ],  # fmt: skip
    "tracing": [
        "abstract",
        "bytecode",
        "registry",
        "purity",
        "context",
        "numba_cpu",
        "array",
        "elementwise",
        "reduce",
        "compressed",
        "indexing",
        "numba_cuda",
        "functions/creation",
        "functions/lookup",
        "functions/medians",
        "functions/reductions",
        "functions/shapes",
        "lower",
        "functions/statistics",
        "functions/dask_chunks",
        "functions/masked",
        "functions/products",
        "functions/library",
        "functions/python_math",
        "functions/search",
        "trace",
        "point_cache",
        "point_function",
    ],  # fmt: skip
    "fusion": [
        "legality",
        "task",
        "horizontal",
        "source",
        "random_draws",
        "reads",
        "recipe",
        "captured_inputs",
        "inline",
        "compress",
        "task_trace",
        "fuser",
        "library_task",
        "portable",
        "residency",
    ],  # fmt: skip
    "plan": [
        "machine",
        "placement",
        "origins",
        "plan",
        "step_table",
        "batching",
        "build",
        "skinny",
        "matmul",
        "min_cut",
        "library_cost",
        "host_cost",
        "working_memory",
    ],  # fmt: skip
    "runtime": [
        "pools",
        "admission",
        "dask_config",
        "events",
        "gather",
        "host_memory",
        "persisted",
        "spill",
        "state",
        "tape",
        "allocations",
        "under_way",
        "observe",
        "protocol",
        "dask_callbacks",
        "loop",
        "simulated",
        "threads",
    ],  # fmt: skip
    "pipeline": [
        "comparable",
        "columns",
        "fingerprint",
        "number_errors",
        "block_qr",
        "tall_layers",
        "reorder",
        "sides",
        "compile",
        "plan_entry",
        "template",
        "cache",
        "gpu_libraries",
        "request",
        "persist",
        "choice",
        "planner",
        "results",
        "execute",
        "numpy_arrays",
        "summary",
    ],  # fmt: skip
    "devices": [
        "cpu",
        "cuda/copies",
        "cuda/pickling",
        "cuda/random_generator",
        "cuda/staging_loops",
        "cuda/staging",
        "cuda/dask_backend",
        "cuda/numpy_fallback",
        "cuda/nvml",
        "cuda/ranges",
        "cuda/launch",
        "cuda/kernel_code",
        "cuda/kernels",
        "cuda/random_kernels",
        "cuda/result_rooms",
        "cuda/arrays",
        "cuda/replay",
        "cuda/lane",
        "cuda/pinned",
        "cuda/recorder",
        "cuda/links",
        "cuda/library_calls",
        "cuda/run_context",
        "cuda/task_launch",
        "cuda/caller_order",
        "cuda/given_values",
        "cuda/host_steps",
        "cuda/step_values",
        "cuda/transfers",
        "cuda/allocations",
        "cuda/file_steps",
        "cuda/marks",
        "cuda/lane_orders",
        "cuda/run_values",
        "cuda/tape_run",
        "cuda/executor",
        "cuda/block_joiner",
        "cuda/hardware",
        "choose",
    ],  # fmt: skip
    "cluster": [
        "stages",
        "wire",
        "cuda_ipc",
        "simulate",
        "transport",
        "gpu_page",
        "answer",
        "progress",
        "worker_plugin",
        "submit",
        "membership",
        "observed",
        "attach",
    ],  # fmt: skip
    "cli": [
        "top",
        "workload",
        "report",
        "commands",
        "command_line",
    ],  # fmt: skip
}
#: What a room must not import, beside the order.
NEVER = [
    ("runtime", "ir codegen tracing fusion devices"),
    ("cluster", "ir codegen tracing fusion"),
    ("scheduler", "ir codegen tracing fusion"),
    ("frontend", "ir codegen"),
    ("pipeline", "devices"),
    ("devices", "pipeline"),
    ("algorithms", "runtime devices scheduler"),
    ("diagnostics", "ir codegen tracing fusion devices"),
    ("codegen/cpu", "codegen/cuda"),
    ("codegen/cuda", "codegen/cpu"),
]
#: Imports against the order that functions make when they run, or that are for types only.
DEFERRED = {
    ("plan/plan", "diagnostics/explain"),
    ("cluster/answer", "cluster/worker_plugin"),
    ("codegen/cpu/region", "codegen/cpu/evaluate"),
    ("devices/cuda/executor", "devices/cuda/hardware"),
    ("devices/cuda/run_context", "devices/cuda/hardware"),
    ("tracing/context", "tracing/array"),
}
#: Where libraries may be imported: when a module is imported itself, and at all.
LIBRARIES = {
    "cupy": (("devices/cuda", "cluster/cuda_ipc"), None),
    "distributed": (("cluster/worker_plugin",), None),
    "bokeh": (("diagnostics/page",), ("diagnostics/page", "cluster/gpu_page")),
    "prometheus_client": ((), ("diagnostics/metrics",)),
    "nvtx": ((), ("devices/cuda/ranges",)),
    "pynvml": ((), ("devices/cuda/nvml",)),
    "numba": (("codegen/cpu", "devices/cuda/staging_loops"), None),
    "llvmlite": (
        ("devices/cuda/staging_loops",),
        ("codegen/cpu", "tracing/numba_cpu", "tracing/numba_cuda"),
    ),
}
#: Files that decide and are tested with numbers: no thread, no clock, no device.
PURE = ["ir", "codegen/cuda", "frontend", "tracing", "fusion", "plan"]
PURE += [f"runtime/{name}" for name in ("events", "state", "tape", "allocations", "observe")]
PURE += [
    f"pipeline/{name}"
    for name in (
        "comparable",
        "columns",
        "fingerprint",
        "template",
        "compile",
        "reorder",
    )
]
IMPURE = {
    "plan/matmul": "cupy",
    "plan/skinny": "cupy",
}
IMPURE_IMPORTS = {"threading", "time", "queue", "concurrent", "multiprocessing", "asyncio", "cupy"}
#: Names of files that say nothing.
FORBIDDEN = {"utils", "util", "helpers", "helper", "common", "core", "manager", "misc", "base"}
#: Files that may have more than MOST_LINES lines, and why.
LONG_FILES = {
    "cluster/stages": "one partitioner: its passes share arrays",
    "cluster/worker_plugin": "the scheduler's plug-in in it could be a file of its own",
    "runtime/state": "one state machine: its parts share arrays",
}
MOST_LINES = 600
#: Files that are read as a whole, with the most lines that they may have.
SHORT_FILES = {"scheduler": 450}
#: Words that name no function when they stand alone: a function is a verb, its value a noun.
LONE_WORDS = """
    about above absolute after again alike alive all along another any approximate around aside
    at away back bare before behind below beside best between both broken brought built busy by
    callable called canonical captured changed cheapest chosen compared compiled contiguous
    copied counted current different direct distinct done down drawn each early either empty
    ended equal even every everything evicted excused expected extreme failed failing fast
    fastest few filled final finished first fixed flat for found from full furthest fused
    generated given greater hashable held hidden high identical immovable impure in inexact inferred
    inner inside into joined kept known largest last late later latest launched least left lent
    like likely local lone long lost low made many merged missing more most movable moved named
    near nested neutral new next of off old on once one only ordered other otherwise outer
    outermost over own partial past persisted pinned placed planned pointwise positive possible
    quiet reachable readable ready real rebuilt recorded registered released renamed renewed
    replaced resident restored running said same seen selected sending sent several shared short
    shown simple small smallest some special spilled square started still stopped strided surely
    taken their there these this those through to together total touched traced transformed
    traversed triangular tried turned typed under unfused unknown unmerged unreadable until up
    us waiting wanted watched what where whether which who whole why wide with within without
    working written
"""
#: Functions that have such a name all the same, and why.
LONE_NAMES = {
    "all": "NumPy's method",
    "any": "NumPy's method",
    "contiguous": "NumPy's word for the C-contiguous view of a shape",
    "empty": "as numpy.empty",
    "full": "numpy.full",
    "held": "public: Scheduler.held",
    "inner": "numpy.inner",
    "real": "a noun: the real part, or a real number",
    "outer": "numpy.outer",
    "total": "a noun: the sum",
    "triangular": "NumPy's distribution",
    "why": "public: Plan.why",
}
#: Words in the first sentence of a docstring.
MOST_WORDS = 20

FILES = sorted(
    str(path.relative_to(PACKAGE)).removesuffix(".py").replace("\\", "/")
    for path in PACKAGE.rglob("*.py")
    if path.parent.name != "graphs"
)
MODULES = [file for file in FILES if "/__init__" not in f"/{file}" or file == "__init__"]


class Import(NamedTuple):
    name: str  # of a library, or the path of a file of ours
    ours: bool
    deferred: bool  # made by a function, or for types only
    line: int


def parse(file: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{file}.py").read_text(encoding="utf-8"))


def imports_of(file: str) -> Iterator[Import]:
    """Every import of a file, its own package's as paths."""
    stack: list[tuple[ast.AST, bool]] = [(parse(file), False)]
    while stack:
        node, deferred = stack.pop()
        if isinstance(node, ast.Import):
            yield from (
                Import(a.name.split(".")[0], False, deferred, node.lineno) for a in node.names
            )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield Import(str(node.module).split(".")[0], False, deferred, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            here = file.split("/")
            folder = here[: len(here) - node.level] + (node.module or "").split(".")
            path = "/".join(filter(None, folder))
            names = [path] if path in FILES else [f"{path}/{a.name}".strip("/") for a in node.names]
            yield from (Import(n, True, deferred, node.lineno) for n in names)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack += [(child, deferred or typing or function) for child in ast.iter_child_nodes(node)]


def rank(file: str) -> tuple[int, int]:
    """Where a file stands: by its room, then by its place in the room."""
    room, _, rest = file.partition("/")
    return ROOMS.index(room), WITHIN[room].index(rest) if rest else 0


def is_in(file: str, place: str) -> bool:
    return file == place or file.startswith(f"{place}/")


def test_every_file_has_its_place_in_the_order():
    named = {f"{room}/{file}" for room, files in WITHIN.items() for file in files}
    named |= {room for room in ROOMS if room not in WITHIN}
    assert set(MODULES) - named == set(), "add the new file to WITHIN, above those that import it"
    assert named - set(MODULES) == set(), "take files that are gone out of WITHIN"


@pytest.mark.parametrize("file", MODULES)
def test_files_import_only_from_those_above(file):
    for name, ours, deferred, line in imports_of(file):
        if ours and rank(name) >= rank(file) and not (deferred and (file, name) in DEFERRED):
            pytest.fail(f"{file}.py:{line} imports {name}, which is below it")


def test_the_order_test_can_fail():
    """`pipeline/execute` imports `runtime/state`: the other way round is against the order."""
    assert "runtime/state" in {i.name for i in imports_of("pipeline/execute")}
    assert rank("runtime/state") < rank("pipeline/execute")


def test_deferred_imports_against_the_order_are_still_made():
    made = {(f, i.name) for f in MODULES for i in imports_of(f) if i.ours and i.deferred}
    assert made >= DEFERRED


@pytest.mark.parametrize(("place", "others"), NEVER)
def test_rooms_do_not_import(place, others):
    for file in [f for f in MODULES if is_in(f, place)]:
        for i in imports_of(file):
            banned = [o for o in others.split() if i.ours and is_in(i.name, o)]
            assert not banned, f"{file}.py:{i.line} imports {i.name}"


@pytest.mark.parametrize("file", MODULES)
def test_libraries_are_imported_only_in_their_places(file):
    for i in imports_of(file):
        if not i.ours and i.name in LIBRARIES:
            at_import, at_all = LIBRARIES[i.name]
            places = at_all if i.deferred else at_import
            allowed = places is None or any(is_in(file, place) for place in places)
            assert allowed, f"{file}.py:{i.line} imports {i.name}"


@pytest.mark.parametrize("file", [f for f in MODULES if any(is_in(f, p) for p in PURE)])
def test_decisions_know_no_thread_no_clock_and_no_device(file):
    names = {i.name for i in imports_of(file) if not i.ours}
    assert names & IMPURE_IMPORTS == set(IMPURE.get(file, "").split())


def test_importing_the_package_imports_no_gpu_library():
    """None that Dask does not: `dask.array` takes CuPy in where it is installed."""
    code = """
import sys
import dask.array
before = set(sys.modules)
import gpuscheduler
print({"cupy", "numba", "distributed"} & (set(sys.modules) - before))
"""
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert out.stdout.strip() == "set()"


def test_names_say_something():
    parts = {part for file in FILES for part in file.split("/")}
    assert not FORBIDDEN & parts


@pytest.mark.parametrize("file", FILES)
def test_every_file_says_what_it_does(file):
    text = ast.get_docstring(parse(file))
    assert text
    assert "." in text or text.endswith((":", "?"))


@pytest.mark.parametrize("room", [f for f in FILES if f.endswith("/__init__")])
def test_rooms_have_no_code_but_a_table_of_their_files(room):
    (docstring,) = parse(room).body
    assert isinstance(docstring, ast.Expr)
    folder = room.removesuffix("/__init__")
    files = {f.removeprefix(f"{folder}/") for f in MODULES if is_in(f, folder)}
    rows = [line.split() for line in docstring.value.value.splitlines()[2:] if line.strip()]
    assert {row[0] for row in rows} == {f.split("/")[0] for f in files if "/" not in f} | {
        f"{f.split('/')[0]}/" for f in files if "/" in f
    }


@pytest.mark.parametrize("file", FILES)
def test_no_file_is_longer_than_a_sitting(file):
    lines = len((PACKAGE / f"{file}.py").read_text(encoding="utf-8").splitlines())
    most = SHORT_FILES.get(file, MOST_LINES)
    assert lines <= most or file in LONG_FILES, f"{lines} lines: split it, or say why not"
    assert file not in LONG_FILES or lines > MOST_LINES, "short again: take it out of LONG_FILES"


MOST_CLASS_LINES = 400
CODEGEN = [f for f in MODULES if is_in(f, "codegen")]


def inherited_layers(files: list[str]) -> dict[str, int]:
    """For each class of some files, how many of their classes it inherits from, in a chain."""
    bases = {
        node.name: [ast.unparse(b) for b in node.bases]
        for f in files
        for node in parse(f).body
        if isinstance(node, ast.ClassDef)
    }

    def layers(name: str) -> int:
        return max((1 + layers(b) for b in bases[name] if b in bases), default=0)

    return {name: layers(name) for name in bases}


def test_code_generation_is_composed_and_not_inherited():
    """A schedule, a body and one emitter for each template: at most one abstract base or record."""
    assert {name: n for name, n in inherited_layers(CODEGEN).items() if n > 1} == {}


def test_the_test_of_inheritance_can_fail(monkeypatch):
    chain = ast.parse("class A: ...\nclass B(A): ...\nclass C(B): ...")
    monkeypatch.setattr(sys.modules[__name__], "parse", lambda file: chain)
    assert inherited_layers(["any"]) == {"A": 0, "B": 1, "C": 2}


@pytest.mark.parametrize("file", CODEGEN)
def test_no_class_of_code_generation_is_long(file):
    lengths = {
        n.name: n.end_lineno - n.lineno + 1 for n in parse(file).body if isinstance(n, ast.ClassDef)
    }
    assert {name: n for name, n in lengths.items() if n > MOST_CLASS_LINES} == {}


def functions() -> Iterator[tuple[str, str]]:
    """Every function and method of the package: its name, and its file and line."""
    for file in FILES:
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, f"{file}.py:{node.lineno}"


def test_functions_are_named_by_verbs_and_nouns():
    """A lone participle, adverb, preposition or adjective says nothing where it is called."""
    lone = set(LONE_WORDS.split())
    found = [
        f"{where}: {name}"
        for name, where in functions()
        if name.strip("_") in lone - LONE_NAMES.keys() and not name.startswith("__")
    ]
    assert found == []


def test_exceptions_for_names_are_still_needed():
    names = {name.strip("_") for name, _ in functions()}
    assert LONE_NAMES.keys() - names == set()
    assert LONE_NAMES.keys() - set(LONE_WORDS.split()) == set()


def first_sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line of each docstring in a tree, and its first sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
            sentence = re.split(r"(?<=[.?!])\s", paragraph)[0]
            yield getattr(node, "lineno", 1), sentence


@pytest.mark.parametrize("folder", ["gpuscheduler", "tests", "graphs", "examples"])
def test_docstrings_begin_with_short_sentences(folder):
    long = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {sentence}"
        for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
        for line, sentence in first_sentences(ast.parse(path.read_text(encoding="utf-8")))
        if len(sentence.split()) > MOST_WORDS
    ]
    assert long == []


def test_docstrings_begin_with_a_line_of_their_own():
    """Otherwise the summary is lost in a paragraph."""
    long = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
                if "\n" in paragraph and not paragraph.startswith(">>>"):
                    long.append(f"{path.relative_to(PACKAGE)}: {paragraph}")
    assert long == []


def test_the_test_of_first_sentences_can_fail():
    code = f'def f():\n    """{"word " * MOST_WORDS}more. And this."""'
    ((_, module), (line, sentence)) = first_sentences(ast.parse(code))
    assert (module, line, len(sentence.split())) == ("", 1, MOST_WORDS + 1)


def test_no_two_classes_have_one_name():
    where = defaultdict(list)
    for file in FILES:
        for node in parse(file).body:
            if isinstance(node, ast.ClassDef):
                where[node.name.lstrip("_")].append(file)
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


@cache
def classes_of_tasks() -> set[str]:
    """The names of our own kinds of tasks: `OwnTask`, and all that derives from it."""
    bases = {
        n.name: {ast.unparse(b) for b in n.bases}
        for f in FILES
        for n in parse(f).body
        if isinstance(n, ast.ClassDef)
    }
    kinds = {"OwnTask"}
    while more := {n for n, b in bases.items() if b & kinds} - kinds:
        kinds |= more
    return kinds


def type_tests(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Lines with a comparison of `type(...)`, and the names that it is compared with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            calls = [n for s in sides for n in ast.walk(s) if isinstance(n, ast.Call)]
            if any(ast.unparse(call.func) == "type" for call in calls):
                names = {n.id for s in sides for n in ast.walk(s) if isinstance(n, ast.Name)}
                yield node.lineno, names


@pytest.mark.parametrize("file", FILES)
def test_no_code_asks_for_the_exact_kind_of_a_task(file):
    """A kind of task says what it can do: a new kind works where the others do."""
    kinds = classes_of_tasks()
    assert {"KernelTask", "Batch", "CompressTask", "Chain"} <= kinds
    asked = [(line, names & kinds) for line, names in type_tests(parse(file)) if names & kinds]
    assert asked == []


def test_the_test_of_exact_kinds_can_fail():
    code = "a = type(t) is Batch or type(t) in (Chain, KernelTask)"
    assert [names & classes_of_tasks() for _, names in type_tests(ast.parse(code))] == [
        {"Batch"}, {"Chain", "KernelTask"}
    ]  # fmt: skip


def test_all_is_what_is_exported():
    """Submodules aside, every public name is in `__all__`, and every name in it is there."""
    public = {
        name
        for name, value in vars(gpuscheduler).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith("gpuscheduler")
    }
    exported = set(gpuscheduler.__all__)
    assert public <= exported
    assert all(hasattr(gpuscheduler, name) for name in exported)
    assert len(exported) == len(gpuscheduler.__all__)


def test_what_is_exported_tells_how_it_is_used():
    for name in set(gpuscheduler.__all__) - {"__version__"}:
        assert (getattr(gpuscheduler, name).__doc__ or "").strip(), name


def test_importing_registers_the_scheduler_with_dask():
    import dask.base

    importlib.import_module("gpuscheduler")
    assert dask.base.named_schedulers["gpu"] is gpuscheduler.get


@pytest.mark.parametrize("folder", ["", "runtime", "devices/cuda"])
def test_tracebacks_leave_out_the_frames_of_every_room(folder):
    import dask

    path = str(PACKAGE / folder / "any_file.py")
    assert any(re.search(pattern, path) for pattern in dask.config.get("admin.traceback.shorten"))


def test_the_list_of_mutants_follows_the_code():
    """Who breaks the code to see whether tests notice finds what to break."""
    for name in (*mutants.MUTANTS, *mutants.FUSION):
        mutants.break_source(name)
