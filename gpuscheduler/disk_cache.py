"""Keep compiled code in files that the next process finds.

The cache stores bytes under a key, and knows nothing of compilers: the caller puts into the key
everything that the bytes depend on.

A process runs the bytes as machine code, or unpickles them: whoever can write a file here can run
code as this user. So a file counts only if it is a plain file of this user, which no other user may
write, in a folder of the same kind. Other files are refused with one warning, and the code is
compiled again. Owner and mode come from the open file (`fstat` of a descriptor that follows no
link), so nobody can replace the file in between. Where files have no owners, nothing is kept.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from dask import config

from .forks import new_lock

#: Bytes of all files together; beyond that those go that were not asked for for the longest time,
#: until a quarter of it is free.
MOST_BYTES = 2**30
#: A process looks through the folder at the first file that it adds, and after each so many bytes.
LOOK_EVERY = 2**26
#: Files of ours, of earlier versions, and pieces that a process left behind: nobody else's are
#: touched.
_OURS = re.compile(r"[0-9a-f]{64}\.(kept|cubin)")

_added = LOOK_EVERY  # bytes since this process looked
_lock = new_lock()
_warned: set[Path] = set()  # folders of which this process has said that something is refused
_HAVE_OWNERS = hasattr(os, "geteuid") and os.open in os.supports_dir_fd

#: Others than the owner may write: the group, or everybody. An access list shows as the group's.
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A file or folder that somebody else can have written, and why."""


def directory() -> Path:
    """Where that is: `gpuscheduler.cache-directory` of Dask's configuration."""
    given = config.get("gpuscheduler.cache-directory", None)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(given) if given else Path(base) / "gpuscheduler" / "kernels"


def read(words: Any) -> bytes | None:
    """What was kept under these words; None where nothing was, or where they are None.

    A file that is not whole counts for nothing, and neither does one that somebody else can have
    written.
    """
    if words is None or not _HAVE_OWNERS:
        return None
    path = _file(words)
    try:
        with _opened_folder(path.parent) as folder:
            _refuse_writers(path.parent, folder)
            whole = _content(path, folder)
    except Untrusted as error:
        _warn(path.parent, str(error))
    except OSError:  # there is none
        pass
    else:
        digest, content = whole[:32], whole[32:]
        if _digest(path.name, content) == digest:
            return content
    return None


def keep(words: Any, content: bytes) -> None:
    """Store bytes under a key for the next process.

    A folder that cannot be written costs that process a compilation, and nothing else.

    A folder of this user's that others may write too gets the file: it is found once the folder's
    mode is mended.
    """
    if words is None or not _HAVE_OWNERS:
        return
    path = _file(words)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _opened_folder(path.parent) as folder:
            name = f"{path.name}.{secrets.token_hex(8)}"
            opener = partial(os.open, mode=0o600, dir_fd=folder)
            try:
                with open(name, "xb", opener=opener) as f:  # of a link, this is an error
                    f.write(_digest(path.name, content) + content)
                os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                raise
        _count_bytes(len(content), path.parent)
    except Untrusted as error:
        _warn(path.parent, str(error))
    except OSError:
        pass


def _digest(name: str, content: bytes) -> bytes:
    """Of the content under its name: a file that was renamed counts for nothing."""
    return hashlib.sha256(name.encode() + content).digest()


@contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder that belongs to this user.

    Raises Untrusted for one of somebody else's and for a link, OSError where there is none.

    Python handles Ctrl-C after each call. `extend` opens and remembers in one call: no signal can
    come between the two and leave the folder open.
    """
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise Untrusted(f"{path} is a symbolic link: name the folder itself")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    handles: list[int] = []
    try:
        handles.extend(map(os.open, [path], [flags]))
        _refuse_owner(path, handles[0])
        yield handles[0]
    finally:
        for handle in handles:
            os.close(handle)


def _content(path: Path, folder: int) -> bytes:
    """The bytes of a plain file in that folder that only this user can write."""
    _refuse_kind(path, os.stat(path.name, dir_fd=folder, follow_symlinks=False))
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for who writes to it
    # One expression, as in `_opened_folder`: the file owns its descriptor before Ctrl-C is handled.
    (file,) = map(io.FileIO, map(partial(os.open, dir_fd=folder), [path.name], [flags]))
    with file as f:
        _refuse_kind(path, os.fstat(f.fileno()))  # as it is now
        _refuse_owner(path, f.fileno())
        _refuse_writers(path, f.fileno())
        content = f.read()
        with suppress(OSError):  # on a disk that is only read
            os.utime(f.fileno())
        return content


def _refuse_kind(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise Untrusted(f"{path} is no plain file: remove it")


def _refuse_owner(path: Path, handle: int) -> None:
    owner = os.fstat(handle).st_uid
    if owner != os.geteuid():
        raise Untrusted(f"{path} belongs to user {owner}, and this is user {os.geteuid()}")


def _refuse_writers(path: Path, handle: int) -> None:
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    if mode & _OTHERS:
        raise Untrusted(f"others may write {path} (mode {mode:o}): chmod go-w it")


def _warn(folder: Path, why: str) -> None:
    """Once for each folder."""
    with _lock:
        if folder in _warned:
            return
        _warned.add(folder)
    warnings.warn(
        f"compiled code of the cache {folder} is not used: {why}, or let "
        "gpuscheduler.cache-directory of Dask's configuration name another folder",
        stacklevel=3,
    )


def _file(words: Any) -> Path:
    """`words` are told apart by their `repr`."""
    return directory() / f"{hashlib.sha256(repr(words).encode()).hexdigest()}.kept"


def _count_bytes(nbytes: int, folder: Path) -> None:
    global _added
    with _lock:
        _added += nbytes
        if _added < LOOK_EVERY:
            return
        _added = 0
    trim(folder)


def trim(path: Path) -> None:
    """Delete the files of a folder that were asked for longest ago, if it has too many bytes.

    Other processes may trim or read the folder at the same time.
    """
    with _opened_folder(path) as folder:
        files = sorted(_files(folder))
        total = sum([nbytes for _, nbytes, _ in files])
        if total <= MOST_BYTES:
            return
        for _, nbytes, name in files:
            if total <= MOST_BYTES * 3 // 4:
                return
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            total -= nbytes


def _files(folder: int) -> Iterator[tuple[float, int, str]]:
    """When each file was last asked for, its bytes, and its name."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _OURS.match(entry.name):
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    yield facts.st_mtime, facts.st_size, entry.name
