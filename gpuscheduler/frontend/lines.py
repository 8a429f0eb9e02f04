"""Remember on which line of the user's code each Dask array was made.

Dask calls the functions in its setting `array_plugins` for each new `Array` (dask/array/core.py,
`Array.__new__`, tested there; seen in Dask 2026.1.1 to 2026.8.0). The setting has no default.

Kept are a code object and a number for each of the latest arrays, and no frame.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

from dask import config

from ..cpython_private import frame_of_caller

#: Arrays whose lines are kept: the latest.
MOST = 2**14
#: Libraries whose frames are not the user's, beside the standard library and those in Dask's
#: setting `distributed.diagnostics.computations.ignore-modules`.
LIBRARIES = {
    "dask", "distributed", "gpuscheduler", "numpy", "cupy", "cupyx", "scipy", "xarray", "toolz",
    "cytoolz", "tlz", "pandas", "numba", "sparse", "sklearn", "skimage", "dask_image", "dask_ml",
    "flox", "pytest", "_pytest", "pluggy", "xdist", "IPython", "ipykernel", "numpy_groupies",
}  # fmt: skip
_STANDARD = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_CELL = re.compile(r"<ipython-input-(\d+)-|[\\/]ipykernel_\d+[\\/]")
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/]")

#: Where each array was made, by its name.
_lines: dict[str, tuple[CodeType, int] | str] = {}
#: Whether code of a file is the user's.
_own_files: dict[str, bool] = {}


def note_line(array: Any) -> None:
    """Note where an array is made; Dask calls this for each."""
    frame: FrameType | None = frame_of_caller()
    while frame is not None and not is_users_frame(frame):
        frame = frame.f_back
    if frame is not None:
        _lines[array.name] = frame.f_code, frame.f_lineno
        _drop_oldest()


def know_lines(lines: Mapping[str, str]) -> None:
    """Note where arrays were made in another process, by their names."""
    for name, line in lines.items():
        _lines.setdefault(name, line)
        _drop_oldest()


def share_line(name: str, others: Iterable[str]) -> None:
    """Note of other arrays that they were made where this one was."""
    found = _lines.get(name)
    for other in others:
        if found is None:
            _lines.pop(other, None)
        else:
            _lines[other] = found
            _drop_oldest()


def _drop_oldest() -> None:
    if len(_lines) > MOST:
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread did it
            del _lines[next(iter(_lines))]


def is_users_frame(frame: FrameType) -> bool:
    """Whether a frame runs the user's own code."""
    file = frame.f_code.co_filename
    own = _own_files.get(file)
    if own is None:
        if len(_own_files) > MOST:  # each cell and each `exec` may have a name of its own
            _own_files.clear()
        own = _own_files[file] = is_users_code(file, frame.f_globals.get("__name__", ""))
    return own


def is_users_code(file: str, module: Any) -> bool:
    """Whether a module of this name, in this file, is the user's and no library."""
    module = str(module)  # users may call it anything
    if module.startswith("gpuscheduler.graphs."):  # which lie elsewhere in a working tree
        return True
    if file.startswith(_PACKAGE):
        return False
    if file.startswith(("<frozen", _STANDARD)) or file == "<fused by gpuscheduler>":
        return False
    if _INSTALLED.search(file):
        return False
    first = module.partition(".")[0]
    if first in LIBRARIES:
        return False
    return first not in config.get("distributed.diagnostics.computations.ignore-modules", ())


def line_of(name: str) -> str:
    """Where the array of this name was made: "wave.py:21"; "" where that is not known.

    >>> line_of("no such array")
    ''
    """
    found = _lines.get(name)
    if isinstance(found, str):  # of another process
        return found
    return "" if found is None else place_in_file(found[0].co_filename, found[1])


def place_in_file(file: str, line: int) -> str:
    """A line for people: relative to the working folder, or only the name of the file.

    >>> place_in_file("<stdin>", 3), place_in_file("<ipython-input-4-1f2e>", 2)
    ('<stdin>:3', 'cell 4:2')
    """
    if cell := _CELL.search(file):
        return f"cell {cell[1]}:{line}" if cell[1] else f"cell:{line}"
    if file.startswith("<"):
        return f"{file}:{line}"
    with suppress(OSError, ValueError):
        inside = os.path.relpath(file)
        if not inside.startswith(os.pardir):
            return f"{inside}:{line}"
    return f"{os.path.basename(file)}:{line}"


class _Plugins(dict[str, Any]):
    """A setting that is iterated over, and that JSON writes as an empty mapping.

    Dask sends its whole configuration as JSON to the workers of an `SSHCluster`.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter((note_line,))


def _registered_plugins() -> list[Any]:
    known = config.get("array_plugins", None)
    return [] if known is None else list(known)  # ours looks empty, and is not


def register() -> None:
    """Have Dask call `note_line`, unless `gpuscheduler.lines` is False in its configuration."""
    if config.get("gpuscheduler.lines", True) is False:
        return
    known = _registered_plugins()
    if note_line not in known:
        config.set(array_plugins=[*known, note_line] if known else _Plugins())


def unregister() -> None:
    """Have Dask no longer call `note_line`."""
    known = _registered_plugins()
    if note_line in known:
        config.set(array_plugins=[f for f in known if f is not note_line])
