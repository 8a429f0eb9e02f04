"""Files of snapshots: where they are, how they are written and read.

A snapshot is JSON in a memory-mapped file of fixed size. A reader that hangs costs nothing, and a
snapshot can be read after its process has crashed. The header has a magic word, the version of the
layout, a sequence number that is odd while somebody writes, and the length.

This file imports nothing that takes long: `gpuscheduler top` reads snapshots.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

#: Bytes of a snapshot's file.
SIZE = 2**18
MAGIC = b"gpusched"
#: The layout of the header and of the JSON.
VERSION = 1
HEADER = struct.Struct("<8sIII")
#: Seconds between two snapshots.
EVERY = 0.5
#: Seconds for which a look of a reader counts.
WATCHED = 5.0
#: Times that a reader tries to find a snapshot that nobody is writing.
TRIES = 100
_NAME = re.compile(r"(\d+)-(\d+)")


class SnapshotError(OSError):
    """A folder or a file of snapshots that cannot be used."""


def snapshot_folder() -> Path:
    """The folder of this user's snapshots, which others may not enter.

    It is `gpuscheduler` in `$XDG_RUNTIME_DIR`, or one in the system's temporary directory.
    """
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "gpuscheduler"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"gpuscheduler-{user}"


def make_folder() -> Path:
    """Make the folder of snapshots, for this user alone."""
    folder = snapshot_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid"):
            found = folder.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise SnapshotError(f"{folder} is not this user's alone")
    except OSError as error:
        raise SnapshotError(
            f"there is no place for snapshots of the scheduler: {error}; set XDG_RUNTIME_DIR to a "
            "folder that can be written"
        ) from error
    return folder


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number."""
    if os.name == "nt":
        return True  # asking could end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def find_snapshots(folder: Path | None = None) -> dict[tuple[int, int], Path]:
    """The files of snapshots, by process and by number of the scheduler."""
    out = {}
    with suppress(OSError):
        for path in (folder or snapshot_folder()).iterdir():
            if found := _NAME.fullmatch(path.name):
                out[int(found[1]), int(found[2])] = path
    return dict(sorted(out.items()))


def remove_stale(folder: Path) -> None:
    """Remove the files of processes that have ended."""
    for (pid, _), path in find_snapshots(folder).items():
        if not is_alive(pid):
            for old in (path, _watched_path(path)):
                with suppress(OSError):
                    old.unlink()


def _watched_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.watched")


class SnapshotFile:
    """The file that one scheduler writes."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "w+b", opener=partial(os.open, mode=0o600)) as f:
            f.truncate(SIZE)
            self._map = mmap.mmap(f.fileno(), SIZE)
        self._sequence = 0
        self._map[: HEADER.size] = HEADER.pack(MAGIC, VERSION, 0, 0)

    def write(self, text: bytes) -> None:
        """Replace the snapshot."""
        if len(text) > SIZE - HEADER.size:
            raise ValueError(f"a snapshot of {len(text):,} bytes is too long")
        begin = HEADER.size
        self._map[:begin] = HEADER.pack(MAGIC, VERSION, self._sequence + 1, len(text))
        self._map[begin : begin + len(text)] = text
        self._sequence += 2
        self._map[:begin] = HEADER.pack(MAGIC, VERSION, self._sequence, len(text))

    def is_watched(self, now: float) -> bool:
        """Whether somebody has looked in the latest seconds."""
        with suppress(OSError):
            return now - _watched_path(self.path).stat().st_mtime < WATCHED
        return False

    def close(self) -> None:
        """Remove the file."""
        self._map.close()
        for path in (self.path, _watched_path(self.path)):
            with suppress(OSError):
                path.unlink()


def watch(path: Path) -> None:
    """Say that somebody reads a snapshot, so that it is written."""
    with suppress(OSError):
        _watched_path(path).touch(mode=0o600)


def read_snapshot(path: Path, pause: Callable[[float], None] = sleep) -> dict[str, Any] | None:
    """The latest snapshot of a file; None where there is none, or it is being written for long.

    Raises `SnapshotError` for a file of another version or none of ours.
    """
    for _ in range(TRIES):
        try:
            with path.open("rb") as file:
                data = file.read(SIZE)
                again = os.pread(file.fileno(), HEADER.size, 0) if hasattr(os, "pread") else b""
        except OSError:
            return None
        if len(data) < HEADER.size:
            return None
        magic, version, sequence, length = HEADER.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise SnapshotError(f"{path} is no snapshot of this version of gpuscheduler")
        if not sequence:
            return None
        if not sequence % 2 and (not again or again == data[: HEADER.size]):
            with suppress(ValueError):
                found: dict[str, Any] = json.loads(data[HEADER.size : HEADER.size + length])
                return found
        pause(0.001)
    return None


def read_process(pid: int) -> Iterator[dict[str, Any]]:
    """The snapshots of one process, which is asked to go on writing them."""
    for (owner, _), path in find_snapshots().items():
        if owner == pid:
            watch(path)
            if (found := read_snapshot(path)) is not None:
                yield found
