"""The spill store: evicted values in files, one for each.

The files are in a private folder. Arrays are written from their own memory and read into the
memory of the new array, without a copy between. A store makes its folder for the first value, and
removes it when it is closed and at exit. A process that was killed leaves its folder behind: the
next store in the same directory finds its lock free, and removes the folder. Knows no device and no
plan.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import os
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from dask import config

from ..errors import NotSpillable, SpillError
from ..forks import new_lock, new_rlock
from ..values import part_of

try:
    import fcntl
except ImportError:  # not on this system: folders of processes that were killed stay
    fcntl = None  # type: ignore[assignment]

PREFIX = "gpuscheduler-spill-"
LOCK = "lock"
#: What can compress files, and what it is called in Python: those with `compress`, `decompress`.
#: Python has zstd from 3.14 on, and the same as a package before.
CODECS = {
    "zlib": ("zlib",),
    "lz4": ("lz4.block",),
    "zstd": ("compression.zstd", "backports.zstd"),
}
#: Bytes that are compressed at once.
PIECE = 2**22
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class SpillFile:
    """A value on disk: a pickle, and behind it the buffers of its arrays."""

    path: str
    sizes: tuple[int, ...]  # bytes of the pickle, then of each buffer
    fixed: tuple[bool, ...]  # whether each buffer is read-only
    pid: int  # of the process that wrote it
    nbytes: int  # of the file


@dataclass(frozen=True, slots=True)
class Codec:
    """How pieces of files are made smaller, and become what they were.

    >>> codec = Codec.from_name("zlib")
    >>> codec.decompress(codec.compress(b"0" * 1000)) == b"0" * 1000
    True
    """

    compress: Callable[[Any], bytes]
    decompress: Callable[[Any], bytes]

    @classmethod
    def from_name(cls, name: str) -> Codec:
        module: Any = None
        for known_as in CODECS.get(name, ()):
            with contextlib.suppress(ImportError):
                module = importlib.import_module(known_as)
                break
        if module is None:
            tried = " or ".join(CODECS.get(name, ()))
            why = f"there is no {tried} here" if tried else "nobody knows it"
            raise ValueError(
                f"spill_compression={name!r}: {why}; use None or one of {', '.join(CODECS)}"
            )
        fast = {"level": 1} if name == "zlib" else {}
        return cls(partial(module.compress, **fast), module.decompress)


def empty_bytes(nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


class SpillStore:
    """Values in files under `directory`, as they are or compressed; `opened` opens them.

    >>> store = SpillStore()
    >>> file = store.write({"x": np.arange(3), "n": 5}, key="a")
    >>> store.read(file, key="a")
    {'x': array([0, 1, 2]), 'n': 5}
    >>> store.remove(file)
    >>> store.close()
    """

    def __init__(
        self,
        directory: str | None = None,
        opened: Callable[..., Any] = open,
        compression: str | None = None,
    ):
        self.directory, self.opened = directory, opened
        self.codec = None if compression is None else Codec.from_name(compression)
        self.nbytes = self.peak = 0  # in files now, and at most
        self._folder: str | None = None
        self._numbers = count()
        # collecting garbage may remove a file of a persisted collection while the lock is held
        self._lock = new_rlock()
        self._end: Any = None
        self._retired = False
        remove_abandoned(self.base)

    @property
    def base(self) -> str:
        """The directory under which the folder is made."""
        temporary = config.get("temporary-directory", None)
        return str(self.directory or temporary or tempfile.gettempdir())

    def write(self, value: Any, key: Any) -> SpillFile:
        """A new file of a value; none where `NotSpillable` or `SpillError` is raised."""
        buffers: list[pickle.PickleBuffer] = []
        try:
            head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            parts = [memoryview(head), *(b.raw() for b in buffers)]
        except Exception as error:  # user code: whatever it raises means that it cannot be done
            raise NotSpillable(f"{key!r} cannot be pickled: {error}") from error
        path = os.path.join(self.base, f"{PREFIX}*")
        try:
            path = os.path.join(self._place(), str(next(self._numbers)))
            with self.opened(path, "wb", buffering=0) as f:
                nbytes = sum([self._write(f, part) for part in parts])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise self._make_spill_error(key, error) from error
        sizes, fixed = tuple(p.nbytes for p in parts), tuple(p.readonly for p in parts)
        file = SpillFile(path, sizes, fixed, os.getpid(), nbytes)
        with self._lock:
            self.nbytes += file.nbytes
            self.peak = max(self.peak, self.nbytes)
        return file

    def read(self, file: SpillFile, key: Any, empty: Callable[[int], Any] = empty_bytes) -> Any:
        """The value again; `empty(nbytes)` gives the memory for each of its arrays."""
        buffers = []
        try:
            with self.opened(file.path, "rb", buffering=0) as f:
                for size in file.sizes:
                    buffers.append(empty(size))
                    self._read_into(f, memoryview(buffers[-1]).cast("B"))
        except OSError as error:
            raise _read_error(file, key, error) from error
        views = [
            memoryview(b).toreadonly() if fixed else b
            for b, fixed in zip(buffers, file.fixed, strict=True)
        ]
        return pickle.loads(views[0], buffers=views[1:])

    def _write(self, f: Any, part: memoryview) -> int:
        """Bytes that a part takes in a file."""
        if self.codec is None:
            _write_all(f, part)
            return part.nbytes
        part, nbytes = part.cast("B") if part.nbytes else memoryview(b""), 0
        for start in range(0, part.nbytes, PIECE):  # so that little is there twice
            packed = self.codec.compress(part[start : start + PIECE])
            _write_all(f, memoryview(len(packed).to_bytes(8, "little") + packed))
            nbytes += 8 + len(packed)
        return nbytes

    def _read_into(self, f: Any, view: memoryview) -> None:
        if self.codec is None:
            _read_all(f, view)
            return
        for start in range(0, view.nbytes, PIECE):
            length, piece = bytearray(8), view[start : start + PIECE]
            _read_all(f, memoryview(length))
            nbytes = int.from_bytes(length, "little")
            if nbytes > 2 * PIECE:
                raise OSError(errno.EIO, "the file is not what was written")
            packed = bytearray(nbytes)
            _read_all(f, memoryview(packed))
            try:
                piece[:] = self.codec.decompress(packed)
            except MemoryError:
                raise
            except Exception as error:  # each library has its own
                raise OSError(errno.EIO, f"the file is not what was written: {error}") from error

    def remove(self, file: SpillFile) -> None:
        if os.getpid() != file.pid:  # a child has its parent's chunks, and not their files
            return
        with contextlib.suppress(OSError):  # the store may be closed, its folder gone
            os.unlink(file.path)
        with self._lock:
            self.nbytes -= file.nbytes
            last = self._retired and not self.nbytes
        if last:
            self.close()

    def retire(self) -> None:
        """Close as soon as the last file is gone.

        Files of persisted collections stay as long as these do, at most until the process ends.
        """
        with self._lock:
            self._retired = True
            last = not self.nbytes
        if last:
            self.close()

    def close(self) -> None:
        """Remove the folder with everything in it; the next write makes a new one."""
        with self._lock:
            end, self._folder, self._end = self._end, None, None
        if end is not None:
            end()
        _remove_forgotten()

    def _place(self) -> str:
        with self._lock:
            if self._folder is None:
                base = self.base
                remove_abandoned(base)
                self._folder, lock = _private_folder(base)
                _made[self._folder] = lock, os.getpid(), weakref.ref(self)
                self._end = weakref.finalize(self, _remove, self._folder)
            return self._folder

    def _make_spill_error(self, key: Any, error: OSError) -> SpillError:
        remedy = "free space there, or name another" if error.errno in FULL else "name another"
        out = SpillError(
            f"{key!r} does not fit in memory and could not be written to {self.base}: "
            f"{error.strerror or error}: {remedy} directory with spill_directory, "
            "or raise memory_limit"
        )
        out.errno = error.errno
        return out


class RunFiles:
    """The files of one run, by step: one that is written when the run has ended is removed."""

    def __init__(self, store: SpillStore):
        self.store = store
        self.of: dict[int, SpillFile] = {}
        self._read: tuple[int, Any] | None = None  # by `part`: a step and its value
        self._ended = False
        self._ending = new_lock()  # a file comes to be before the end, or goes

    def write(self, step: int, value: Any, key: Any, came: Callable[[SpillFile], None]) -> None:
        """Write a value into a file, and call `came` with it if the run has not ended.

        Raises as `SpillStore.write` does.
        """
        file = self.store.write(value, key)
        with self._ending:
            if not self._ended:
                self.of[step] = file
                came(file)
                return
        self.store.remove(file)

    def part(self, step: int, path: tuple[int, ...], key: Any) -> tuple[SpillFile, Any]:
        """Write a part of a spilled value into its own file; return both.

        The value read last is kept, since the parts of one step are asked for one after the other.
        """
        if self._read is None or self._read[0] != step:
            self._read = step, self.store.read(self.of[step], key)
        part = part_of(self._read[1], path)
        return self.store.write(part, key), part

    def forget(self, step: int) -> None:
        file = self.of.pop(step, None)
        if file is not None:
            self.store.remove(file)

    def end(self) -> None:
        self._read = None
        with self._ending:
            self._ended = True


def _read_error(file: SpillFile, key: Any, error: OSError) -> SpillError:
    gone = error.errno == errno.ENOENT
    out = SpillError(
        f"{key!r} was written to {file.path}, which "
        + (
            "is gone: something else has removed it"
            if gone
            else f"cannot be read any more: {error.strerror or error}"
        )
        + "; compute it again, and let spill_directory name one that nothing else clears"
    )
    out.errno = error.errno
    return out


def _write_all(f: Any, view: memoryview) -> None:
    view = view.cast("B") if view.nbytes else memoryview(b"")
    while view:  # one call writes 2 GiB at most
        view = view[f.write(view) :]


def _read_all(f: Any, view: memoryview) -> None:
    while view:
        n = f.readinto(view)
        if not n:
            raise OSError(errno.EIO, "the file is shorter than what was written")
        view = view[n:]


# ---- folders


def _private_folder(base: str) -> tuple[str, FileIO]:
    """A new folder that only this user may enter, and its lock, which this process holds.

    Somebody who removes abandoned folders may come between any two lines of this:
    1. the folder has no lock file yet: it is empty, so it may be removed; opening the file fails.
    2. the file is there and not locked: the folder may be removed; then the file is another one,
       or none, when the lock is ours.
    In both cases another folder is made.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base)
        path = os.path.join(folder, LOCK)
        try:
            # an object that owns it: a Ctrl-C behind `os.open` would lose the number
            lock = FileIO(path, "a+", opener=partial(os.open, mode=0o600))
        except FileNotFoundError:
            continue
        if fcntl is None:
            return folder, lock
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return folder, lock
        lock.close()


#: Folders of this process that are there: the lock, who made it, and the store.
_made: dict[str, tuple[FileIO, int, weakref.ref[SpillStore]]] = {}


def _remove(folder: str) -> None:
    lock, pid, _ = _made.pop(folder, (None, -1, None))
    if lock is None:
        return
    with lock:
        if os.getpid() == pid:  # a child has the finalizers of its parent, and not its files
            shutil.rmtree(folder, ignore_errors=True)


@atexit.register
def _remove_forgotten() -> None:
    """Remove folders whose stores are gone or have let go of them.

    Ctrl-C in a finalizer ends the finalizer, and Python goes on without the rest of it.
    """
    for folder, (_, _, store) in list(_made.items()):
        if getattr(store(), "_folder", None) != folder:
            _remove(folder)


def remove_abandoned(base: str) -> None:
    """Remove the folders of this user whose processes are gone."""
    if fcntl is None:
        return
    try:
        with os.scandir(base) as every:  # of which there may be many: this takes least
            found = sorted([entry.path for entry in every if entry.name.startswith(PREFIX)])
    except OSError:  # the first write says what is wrong with it
        return
    for folder in map(Path, found):
        with contextlib.suppress(OSError):  # somebody else's, or just removed by somebody else
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            try:
                lock = FileIO(folder / LOCK, "r+")
            except FileNotFoundError:
                folder.rmdir()  # only where it is empty
                continue
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
