"""Sparse matrices taken apart into their arrays, and put together again.

One table of types by name: nothing of SciPy, CuPy or pydata/sparse is imported before a matrix of
theirs is met. It reaches into these libraries (seen in SciPy 1.15 to 1.17, CuPy 14.2 and sparse
0.16 to 0.19): the instance dictionary holds all that a matrix is, with `_shape`, and in CuPy's
compressed formats a `_descr` of cuSPARSE. Subclasses of the user's are not taken apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

#: Where the types of each library live: the start of their modules' names.
SCIPY, CUPYX, PYDATA = "scipy.sparse", "cupyx.scipy.sparse", "sparse"
_COMPRESSED, _COORDINATES, _DIAGONALS = (
    ("data", "indices", "indptr"),
    ("data",),
    ("data", "offsets"),
)
#: The attributes of each format that are arrays; coordinates are added (see `_coordinates`).
ATTRIBUTES = {
    "csr": _COMPRESSED, "csc": _COMPRESSED, "bsr": _COMPRESSED, "coo": _COORDINATES,
    "dia": _DIAGONALS,
}  # fmt: skip
#: pydata's types, by name. `coords` is one array there.
PYDATA_ATTRIBUTES = {
    "COO": ("data", "coords"), "GCXS": _COMPRESSED, "CSR": _COMPRESSED, "CSC": _COMPRESSED,
}  # fmt: skip
#: Types of the package's own that hold one matrix, by name and module.
WRAPPERS = {("SparseBlock", "gpuscheduler.algorithms.sparse_block")}
#: What CuPy's matrices hold: dtypes by `char`.
CUPY_DTYPES = "?fdFD"
#: Facts of a matrix that are made anew for other arrays, or belong to one process.
_DROPPED = "_descr", "_cache", "_csr", "_csc"


class SparseParts:
    """A sparse matrix whose arrays are elsewhere: in pinned memory, in a buffer, on another device.

    It can be pickled where none of the libraries is installed. `facts` is the matrix's instance
    dictionary without arrays: shape, whether indices are sorted, and so on.
    """

    __slots__ = ("arrays", "facts", "library", "name")

    def __init__(self, library: str, name: str, facts: dict[str, Any], arrays: Sequence[Any]):
        self.library, self.name, self.facts, self.arrays = library, name, facts, tuple(arrays)

    def __reduce__(self) -> Any:
        return SparseParts, (self.library, self.name, self.facts, self.arrays)

    def __repr__(self) -> str:
        return f"<parts of {self.library}.{self.name}>"


def _find_library(kind: type) -> str | None:
    """The library of a type that is taken apart; None for any other type.

    >>> import scipy.sparse
    >>> library_of(scipy.sparse.csr_array), library_of(np.ndarray)
    ('scipy.sparse', None)
    """
    if kind is SparseParts:
        return ""
    module, name = kind.__module__, kind.__name__
    if (name, module) in WRAPPERS:
        return module
    for library in (SCIPY, CUPYX):
        if module.startswith(library + ".") and name.endswith(("_matrix", "_array")):
            return library if name[:3] in ATTRIBUTES else None
    inside = module.partition(".")[0] == PYDATA and "_backend" in module
    return PYDATA if inside and name in PYDATA_ATTRIBUTES else None


#: The library of a type; types are looked up many times.
library_of: Callable[[Any], str | None] = lru_cache(maxsize=256)(_find_library)


def is_scipys(kind: type) -> bool:
    """Whether a type is a sparse matrix of SciPy's, or a subclass of one."""
    return any(c.__module__.startswith(SCIPY) for c in kind.__mro__)


def unwrap_sparse(value: Any) -> Any:
    """The matrix that a block of the package's own holds; any other value as it is."""
    kind = type(value)
    held = (kind.__name__, kind.__module__) in WRAPPERS and value.ndim == 2
    return value.matrix if held else value


def is_sparse_type(name: str | None) -> bool:
    """Whether Dask's name of a chunk type is that of a sparse matrix.

    >>> is_sparse_type("scipy.sparse._csr.csr_array"), is_sparse_type("numpy.ndarray")
    (True, False)
    """
    starts = (f"{SCIPY}.", f"{CUPYX}.", f"{PYDATA}.")
    return name is not None and (name.endswith(".SparseBlock") or name.startswith(starts))


def arrays_of(value: Any) -> tuple[Any, ...]:
    """The arrays of a sparse matrix, in the order that `rebuild` takes them.

    >>> import scipy.sparse
    >>> [a.tolist() for a in arrays_of(scipy.sparse.eye_array(2, format="csr"))]
    [[1.0, 1.0], [0, 1], [0, 1, 2]]
    """
    kind = type(value)
    if kind is SparseParts:
        return value.arrays  # type: ignore[no-any-return]
    library, name = library_of(kind), kind.__name__
    if name == "SparseBlock":
        return (value.matrix,)
    if library == PYDATA:
        return tuple([getattr(value, a) for a in PYDATA_ATTRIBUTES[name]])
    arrays = tuple([getattr(value, a) for a in ATTRIBUTES[name[:3]]])
    return (*arrays, *_coordinates(value)) if name[:3] == "coo" else arrays


def rebuild(value: Any, arrays: Sequence[Any]) -> Any:
    """The matrix with other arrays: a matrix of SciPy or of CuPy, as the arrays are.

    `SparseParts` where these are no arrays. A matrix that CuPy has no type for stays as it is.

    >>> import scipy.sparse
    >>> eye = scipy.sparse.eye_array(2, format="csr")
    >>> rebuild(eye, [a + 0 for a in arrays_of(eye)]).toarray().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> rebuild(eye, [1, 2, 3])
    <parts of scipy.sparse.csr_array>
    """
    kind = type(value)
    if kind.__name__ == "SparseBlock":
        return value.replace_matrix(arrays[0])
    if kind is SparseParts:
        library, name, facts = value.library, value.name, value.facts
    else:
        library, name, facts = library_of(kind), kind.__name__, _facts(value)
    target = _library_of_arrays(library, arrays)
    if target is None:
        return SparseParts(library, name, facts, arrays)
    if target == CUPYX and library != CUPYX and not _has_counterpart(library, name, facts, arrays):
        if kind is not SparseParts:
            return value
        target, arrays = library, [a.get() for a in arrays]
    return _put_together(target, name, facts, arrays)


def _facts(value: Any) -> dict[str, Any]:
    kind = type(value)
    if library_of(kind) == PYDATA:
        gone: tuple[str, ...] = PYDATA_ATTRIBUTES[kind.__name__]
    else:
        gone = (*ATTRIBUTES[kind.__name__[:3]], "coords", "row", "col")
    return {k: v for k, v in vars(value).items() if k not in gone and k not in _DROPPED}


def _coordinates(value: Any) -> tuple[Any, ...]:
    """Of SciPy's and CuPy's COO; older versions and CuPy have `row` and `col`."""
    coords = vars(value).get("coords")
    return (value.row, value.col) if coords is None else tuple(coords)


def _library_of_arrays(library: str, arrays: Sequence[Any]) -> str | None:
    """Whose matrix can hold these arrays; None where they are no arrays."""
    if all(isinstance(a, np.ndarray) for a in arrays):
        return SCIPY if library == CUPYX else library
    cupy = sys.modules.get("cupy")
    if cupy is not None and all(isinstance(a, cupy.ndarray) for a in arrays):
        return CUPYX
    return None


def _has_counterpart(library: str, name: str, facts: dict[str, Any], arrays: Sequence[Any]) -> bool:
    """Whether CuPy has a type for a matrix of the host."""
    flat = len(facts.get("_shape", ())) == 2
    return library == SCIPY and name[:3] != "bsr" and flat and arrays[0].dtype.char in CUPY_DTYPES


def _put_together(library: str, name: str, facts: dict[str, Any], arrays: Sequence[Any]) -> Any:
    """A matrix without its constructor, which looks at values, and may wait for a device."""
    module = import_module(library)
    kind = getattr(module, name)
    out = kind.__new__(kind)
    state = vars(out)
    state.update(facts)
    if library == PYDATA:
        state.update(zip(PYDATA_ATTRIBUTES[name], arrays, strict=True))
        if name == "COO":
            state["_cache"] = None
        return out
    form = name[:3]
    state.update(zip(ATTRIBUTES[form], arrays, strict=False))
    if form == "coo":
        coords = tuple(arrays[1:])
        if not hasattr(kind, "row"):  # CuPy keeps one row of numbers for 1-D arrays, too
            state["row"], state["col"] = coords
        else:
            state["coords"] = coords[-len(facts["_shape"]) :]
    if library == CUPYX and form in ("csr", "csc"):
        state["_descr"] = import_module("cupyx.cusparse").MatDescriptor.create()
    return out
