"""Private names of other libraries: each is in the file of its library, and is still there.

`make versions` runs this file with the oldest and the newest Python, Dask and NumPy. A name that is
gone fails its test, which says what no longer works.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import gpuscheduler

PACKAGE = Path(gpuscheduler.__file__).parent
LIBRARIES = {
    "dask": "dask_private",
    "dask's core": "dask_core_private",
    "distributed": "distributed_private",
    "numba": "numba_private",
    "cupy": "cupy_private",
    "numpy": "numpy_private",
    "cpython": "cpython_private",
}
#: Libraries whose private names only these files may import.
WATCHED = {"dask", "distributed", "cupy", "cupyx", "numba", "llvmlite", "numpy", "scipy", "toolz"}
#: The classes of Dask's tasks are imported from here everywhere.
SHARED = "dask._task_spec"
#: Attributes with an underscore that are public: those of named tuples.
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
#: Functions with an underscore that Python's documentation has.
DOCUMENTED = {"sys._getframe", "sys._current_frames"}
PRIVATE = sorted(
    (library, name)
    for library, file in LIBRARIES.items()
    for name in import_module(f"gpuscheduler.{file}").LOST
)
FILES = sorted(p for p in PACKAGE.rglob("*.py") if not p.stem.endswith("_private"))


def look_up(path: str):
    """The object at a dotted path; a part in parentheses is called with these numbers."""
    words = path.split(".")
    for n in range(len(words), 0, -1):
        if any("(" in word for word in words[:n]):
            continue
        try:
            found = import_module(".".join(words[:n]))
        except ImportError:
            continue
        for word in words[n:]:
            name, call, arguments = re.fullmatch(r"(\w+)(\((\d*)\))?", word).groups()
            found = getattr(found, name)
            if call:
                found = found(*[int(a) for a in [arguments] if a])
        return found
    raise ImportError(path)


@pytest.mark.parametrize(("library", "name"), PRIVATE, ids=[name for _, name in PRIVATE])
def test_private_name_is_there(library, name):
    lost = import_module(f"gpuscheduler.{LIBRARIES[library]}").LOST[name]
    if library not in ("cpython", "numpy", "dask", "dask's core"):
        pytest.importorskip(name.partition(".")[0], exc_type=ImportError)
    try:
        look_up(name)
    except (ImportError, AttributeError) as error:
        if name.startswith("numpy._core") and look_up("numpy.__version__") < "2":
            pytest.skip("of NumPy 2")
        version = getattr(import_module(name.partition(".")[0]), "__version__", "")
        pytest.fail(f"{name} is gone ({library} {version}): {error}. Lost: {lost}")


def test_either_name_is_there():
    from gpuscheduler import dask_private

    for lost, names in dask_private.EITHER.items():
        found = []
        for name in names:
            try:
                found.append(look_up(name))
            except AttributeError:
                continue
        assert found, f"none of {names}. Lost: {lost}"
    assert list(dask_private.nanquantile_functions())


def test_blockwise_layers_keep_what_a_copy_has_to_forget():
    import dask.array as da

    from gpuscheduler.dask_private import CACHED_BY_BLOCKWISE

    x = da.ones(4, chunks=2) + 1
    layer = x.dask.layers[x.name]
    assert layer.dims
    assert dict(layer)
    lost = "one trace for all blocks of map_overlap: a copied layer would keep its old blocks"
    assert set(CACHED_BY_BLOCKWISE) <= vars(layer).keys(), lost


def test_looking_up_a_name_that_is_gone_fails():
    with pytest.raises(AttributeError):
        look_up("dask.array.core._no_such_name")
    with pytest.raises(ImportError):
        look_up("no_such_library._name")


@pytest.mark.parametrize("file", LIBRARIES.values())
def test_file_says_in_which_versions_names_were_seen(file):
    text = import_module(f"gpuscheduler.{file}").__doc__
    assert re.search(r"seen in [\w-]+ [\d.]+ to [\d.]+", text), text
    assert all(import_module(f"gpuscheduler.{file}").LOST.values())


def names_of_ours() -> set[str]:
    """All names with an underscore that some file of the package defines."""
    out = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                out.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                out.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                out.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                out.add(node.value)  # as in __slots__
    return out


def reaches(tree: ast.AST, ours: set[str]) -> list[str]:
    """Private names of other libraries that a file imports or asks objects for."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            words = node.module.split(".")
            if words[0] == "unittest":
                out.append(node.module)
            if words[0] not in WATCHED:
                continue
            private = any(w.startswith("_") for w in words) and node.module != SHARED
            out += [
                f"{node.module}.{a.name}" for a in node.names if private or a.name.startswith("_")
            ]
        elif isinstance(node, ast.Attribute):
            name = node.attr
            private = name.startswith("_") and not name.startswith("__") and name not in ours
            if private and ast.unparse(node) not in DOCUMENTED:
                out.append(ast.unparse(node))
    return [name for name in out if name.rpartition(".")[2] not in OF_NAMED_TUPLES]


@pytest.fixture(scope="module")
def ours():
    return names_of_ours()


def test_private_names_are_used_only_in_the_files_of_their_libraries(ours):
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in FILES
        if (names := reaches(ast.parse(path.read_text(encoding="utf-8")), ours))
    }
    assert found == {}, "import these in the file of the library, and enter them in its LOST"


def test_the_test_of_private_names_can_fail(ours):
    code = (
        "from dask.array.core import _concatenate2\nfrom dask._expr import HLGExpr\n"
        "from dask._task_spec import Task, _execute_subgraph\nfrom unittest.mock import patch\n"
        "x._no_such_private_name\ny._replace(a=1)\nself.nodes\n"
    )
    assert reaches(ast.parse(code), ours) == [
        "dask.array.core._concatenate2", "dask._expr.HLGExpr",
        "dask._task_spec._execute_subgraph", "unittest.mock", "x._no_such_private_name",
    ]  # fmt: skip


def test_capability_of_a_device_is_told_and_taken_back():
    """Numba asks its dispatcher for the device; there may be none."""
    from types import SimpleNamespace

    from gpuscheduler.numba_private import device_capability

    dispatcher = SimpleNamespace(get_current_device=lambda: "the device")
    with device_capability(dispatcher, (9, 0)):
        assert dispatcher.get_current_device().compute_capability == (9, 0)
    with suppress(KeyError), device_capability(dispatcher, (8, 0)):
        raise KeyError
    assert dispatcher.get_current_device() == "the device"


def test_locks_frames_and_filters_of_python():
    import threading
    import warnings

    from gpuscheduler import cpython_private

    lock = threading.Lock()
    lock.acquire()
    cpython_private.open_lock(lock)
    assert not lock.locked()
    mine = threading.RLock()
    with mine:
        cpython_private.open_lock(mine)
        assert mine._is_owned()  # the thread that forked goes on with it

    def inner():
        return cpython_private.frame_of_caller().f_code.co_name

    assert inner() == "test_locks_frames_and_filters_of_python"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="quite unlikely")
        first = cpython_private.warning_filters()[0]
        assert first[0] == "error"
    assert importlib.import_module("gpuscheduler.cpython_private") is cpython_private


TRACED = """
import sys, threading
from gpuscheduler.cpython_private import discard_error, raise_in_thread

seen = []

def interrupted():
    for pending in (False, True, False):
        try:
            if pending:
                raise_in_thread(threading.get_ident(), KeyError)
        except KeyError:
            pass
        discard_error(KeyError)
        seen.append(pending)

thread = threading.Thread(target=interrupted)
thread.start()
thread.join()
sys.settrace(lambda *_: None)
print(len(seen), (lambda: "traced")())
"""


def test_tracers_work_once_an_error_has_been_discarded():
    """Python 3.11 hangs in the first function that is traced where an error is taken back."""
    done = subprocess.run(
        [sys.executable, "-c", TRACED],
        capture_output=True, text=True, timeout=60, check=True, cwd=PACKAGE.parent,
    )  # fmt: skip
    assert done.stdout == "3 traced\n"
