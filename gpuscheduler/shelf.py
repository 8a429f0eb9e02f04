"""What was compiled, in files that the next process finds: bytes, under the words that decide them.

It knows nothing of compilers: who keeps something here says all that it depends on.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
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


def directory() -> Path:
    """Where that is: `gpuscheduler.cache-directory` of Dask's configuration."""
    given = config.get("gpuscheduler.cache-directory", None)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "gpuscheduler" / "kernels"


def found(words: Any) -> bytes | None:
    """What was kept under these words; None where nothing was, or where they are None. A file that
    is not whole counts for nothing."""
    if words is None:
        return None
    with suppress(OSError):
        path = _file(words)
        whole = path.read_bytes()
        digest, content = whole[:32], whole[32:]
        if hashlib.sha256(content).digest() == digest:
            with suppress(OSError):  # it may be somebody else's, or gone by now
                os.utime(path)
            return content
    return None


def keep(words: Any, content: bytes) -> None:
    """For the next process. A folder that cannot be written costs it a compilation, and nothing
    else."""
    if words is None:
        return
    with suppress(OSError):
        path = _file(words)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(hashlib.sha256(content).digest() + content)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
        _counted(len(content), path.parent)


def _file(words: Any) -> Path:
    """`words` are told apart by their `repr`."""
    return directory() / f"{hashlib.sha256(repr(words).encode()).hexdigest()}.kept"


def _counted(nbytes: int, folder: Path) -> None:
    global _added
    with _lock:
        _added += nbytes
        if _added < LOOK_EVERY:
            return
        _added = 0
    trim(folder)


def trim(folder: Path) -> None:
    """Make room where there is too little. Another process that does the same does no harm, nor
    does one that reads a file that goes."""
    files = sorted(_files(folder))
    total = sum([nbytes for _, nbytes, _ in files])
    if total <= MOST_BYTES:
        return
    for _, nbytes, path in files:
        if total <= MOST_BYTES * 3 // 4:
            return
        with suppress(OSError):
            os.unlink(path)
        total -= nbytes


def _files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """When each was last asked for, its bytes, and where it is."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _OURS.match(entry.name):
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    yield facts.st_mtime, facts.st_size, entry.path
