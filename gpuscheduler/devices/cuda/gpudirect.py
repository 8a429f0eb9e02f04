"""Read blocks of files straight into GPU memory, by GPUDirect Storage.

By GPUDirect Storage, where KvikIO is installed and the machine has it.

What is read so are blocks of arrays that lie in a file as they would in memory: of h5py's datasets
without chunks and filters, and of NumPy's memory maps. All else goes through pinned memory, and so
does what KvikIO cannot read.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from ...forks import new_lock

#: Bytes that lie in one piece in the file, at least: small ones are read faster by the host.
LEAST = 2**20
#: Files that are kept open; each takes two of the process's handles.
MOST_FILES = 32


class DirectFiles:
    """The files that are read directly, kept open.

    `wanted` is ``"auto"`` (where GPUDirect Storage works), True (by KvikIO in any case, which goes
    through the host's memory where it does not) or False.
    """

    def __init__(self, wanted: bool | str = "auto"):
        self._lock = new_lock()
        self._files: dict[tuple[str, int], Any] = {}  # by path and inode
        self._refused: set[tuple[str, int]] = set()  # that it could not read: it costs time to try
        self._kvikio: Any = None
        if wanted is not False:
            try:
                self._kvikio = importlib.import_module("kvikio")
                if wanted == "auto" and self._through_host():
                    self._kvikio = None
            except (ImportError, OSError) as error:
                if wanted is True:
                    raise ImportError(
                        f"direct_storage=True needs KvikIO, which cannot be imported: {error}; "
                        "pip install kvikio-cu12 (or -cu13), or leave the option out"
                    ) from error

    def _through_host(self) -> bool:
        defaults = importlib.import_module("kvikio.defaults")
        return bool(defaults.is_compat_mode_preferred())

    def __bool__(self) -> bool:
        return self._kvikio is not None

    def takes(self, nbytes: int) -> bool:
        """Whether a block of so many bytes is worth a look at where it is."""
        return self._kvikio is not None and nbytes >= LEAST

    def read(self, found: FileBlock | None, out: Any) -> bool:
        """Read a block of a file into `out`; False where that is not possible.

        `out` is a C-contiguous array of a device, and no work on it is under way.
        """
        if self._kvikio is None or found is None:
            return False
        path, inode, start = found.path, found.inode, found.start
        if (path, inode) in self._refused:
            return False
        pieces = list(runs(found.view))
        if not pieces or pieces[0][1] < LEAST:
            return False
        try:
            file = self._file(path, inode)
            if file is None:
                return False
            flat = out.reshape(-1).view(np.uint8)
            reads, at = [], 0
            for offset, nbytes in pieces:
                part = flat[at : at + nbytes]
                reads.append((file.pread(part, nbytes, start + offset), nbytes))
                at += nbytes
            if all(read.get() == nbytes for read, nbytes in reads):
                return True
            raise OSError(f"{path} has become shorter")
        except Exception as error:
            warnings.warn(
                f"{path} is read through the host's memory, as KvikIO cannot read it: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            with self._lock:
                self._refused.add((path, inode))
                self._files.pop((path, inode), None)
            return False

    def _file(self, path: str, inode: int) -> Any:
        with self._lock:
            file = self._files.get((path, inode))
            if file is None and _inode(path) == inode:
                file = self._files[path, inode] = self._kvikio.CuFile(path, "r")
                if os.fstat(file.fileno()).st_ino != inode:  # replaced in between
                    self._files.pop((path, inode)).close()
                    file = None
                while len(self._files) > MOST_FILES:  # it closes when nobody reads it any more
                    self._files.pop(next(iter(self._files)))
            return file

    def close(self) -> None:
        with self._lock:
            files, self._files = list(self._files.values()), {}
        for file in files:
            with suppress(Exception):
                file.close()


class FileBlock(NamedTuple):
    """A block of an array, and where it lies."""

    path: str
    inode: int  # the path may be another file's by now
    start: int  # bytes before its first element
    view: Any  # an array that lies as it does; of a dataset, one without memory: not to be read
    source: Any  # what gives the block when it is indexed so
    index: Any


def in_file(array: Any) -> FileBlock | None:
    """Where an array of the host is mapped from, for reading only; None for others."""
    root, base = None, array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            root = base
        base = base.base
    if root is None or root.mode != "r" or not root.filename:
        return None
    inode = _mapped_inode(root.ctypes.data)
    if inode is None:
        return None
    start = array.ctypes.data - root.ctypes.data + root.offset
    return FileBlock(os.fspath(root.filename), inode, start, array, array, ...)


def in_dataset(source: Any, index: Any) -> FileBlock | None:
    """Where a block of an h5py dataset lies in its file.

    None for datasets with filters, for files that may be written to, and for other sources.
    """
    if type(source).__module__.partition(".")[0] != "h5py" or not isinstance(index, tuple):
        return None
    try:
        file, start = source.file, source.id.get_offset()
        plain = source.dtype.isnative and source.dtype.kind in "biufc"
        if start is None or source.chunks is not None or file.mode != "r" or not plain:
            return None
        if source.external or source.is_virtual or file.driver != "sec2":
            return None
        if not all(isinstance(i, (int, np.integer, slice)) for i in index):
            return None
        inode = os.fstat(file.id.get_vfd_handle()).st_ino
        one = np.zeros(1, source.dtype)
        strides = np.cumprod((one.itemsize, *source.shape[:0:-1]))[::-1]
        whole = np.lib.stride_tricks.as_strided(one, source.shape, strides, writeable=False)
        view = whole[(*index, ...)]  # an array also where one element is meant
        start += view.ctypes.data - one.ctypes.data
        return FileBlock(file.filename, inode, start, view, source, index)
    except (AttributeError, OSError, TypeError, ValueError):  # of another h5py than we know
        return None


def _inode(path: str) -> int | None:
    """The inode of a file; None where there is none any more."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _mapped_inode(address: int) -> int | None:
    """The inode of the file that is mapped at an address of this process."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, _, _, inode, *_ = line.split()
            begin, end = span.split("-")
            if int(begin, 16) <= address < int(end, 16):
                return int(inode) or None
    return None


def runs(array: Any) -> Iterator[tuple[int, int]]:
    """The contiguous pieces of an array in C order: offset and length in bytes.

    None of an array that does not lie in C order.

    >>> a = np.zeros((4, 6), "f8")
    >>> list(runs(a)), list(runs(a[1:3])), list(runs(a[:2, 1:3]))
    ([(0, 192)], [(0, 96)], [(0, 16), (48, 16)])
    >>> list(runs(a.T)), list(runs(a[:, ::2]))
    ([], [])
    """
    nbytes, axis = array.itemsize, array.ndim
    while axis and (array.shape[axis - 1] == 1 or array.strides[axis - 1] == nbytes):
        axis -= 1
        nbytes *= array.shape[axis]
    strides = array.strides[:axis]
    if axis == array.ndim > 0 and array.size > 1 or any(s < nbytes for s in strides):
        return
    if list(strides) != sorted(strides, reverse=True):
        return
    for index in np.ndindex(*array.shape[:axis]):
        yield sum(i * s for i, s in zip(index, strides, strict=True)), nbytes
