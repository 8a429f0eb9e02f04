"""CUDA text for products of small integers with few columns, and the grids of its kernels.

A library call converts all integers first: eight bytes are written and read for each byte. Here
integers become doubles in registers, and FP64 tensor cores add their products up.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from .device_library import LIBRARY, read_pieces

#: Columns of the right matrix, at most.
MOST_COLUMNS = 32
#: Elements of the matrix of integers from which the kernels are worth their launch.
FEWEST = 2**20
#: Dtypes of the left matrix, by NumPy's characters.
INTEGERS = "?bBhH"
#: ... and of the right matrix.
FACTORS = {"f": "float", "d": "double"}
#: Fragments that one instruction multiplies, from compute capability 9.0 on, by kernel. A block of
#: 62500 x 20000 uint8 and 20 columns took on an H200, with 1, 2 and 4 of them: 2.55, 2.02 and
#: 1.92 ms by rows, 2.33, 2.55 and 2.40 ms by columns (`graphs.bench tall --only skinny`).
DEPTHS = {"skinny_rows": 4, "skinny_columns": 1}
#: Rows of the inner axis that one step of a kernel takes, at most: shares are multiples of it.
STEP = 64


class Geometry(NamedTuple):
    """How a kernel is launched."""

    kernel: str  # the name of its entry
    threads: int
    blocks: tuple[int, int]  # along the result, and shares of the inner axis
    share: int  # length of the inner axis for each of these


def make_source(
    kernel: str,
    integer: np.dtype[np.generic],
    factor: str,
    columns: int,
    even: bool,
    capability: int,
) -> str:
    """Return the CUDA text of both kernels, as is best for one of them.

    `kernel` is the name of that one, `integer` the dtype of the left matrix, `factor` the character
    of the right one's, `even` whether rows begin at multiples of 16 bytes, and `capability` 90 for
    compute capability 9.0.
    """
    depth = DEPTHS[kernel] if capability >= 90 else 1
    defined = {
        "SIZE": integer.itemsize,
        "SIGNED": "true" if integer.kind == "i" else "false",
        "TILES": -(-columns // 8),
        "FACTOR": FACTORS[factor],
        "EVEN": "true" if even else "false",
        "DEPTH": depth,
    }
    if capability < 90:
        defined["OLD"] = 1
    text = Path(LIBRARY / "skinny.cuh").read_text(encoding="utf-8")
    ((_, body),) = read_pieces(text)
    return "\n".join([*(f"#define {k} {v}" for k, v in defined.items()), body, ""])


def make_geometry(turned: bool, length: int, inner: int, processors: int) -> Geometry:
    """Return the launch for a result of `length` rows, on a device with so many multiprocessors.

    `turned` says whether the rows of the result lie along the rows of the integers in memory.

    >>> make_geometry(False, 62500, 20000, 132)
    Geometry(kernel='skinny_rows', threads=256, blocks=(245, 1), share=20032)
    >>> make_geometry(True, 20000, 62500, 132)
    Geometry(kernel='skinny_columns', threads=128, blocks=(79, 4), share=15680)
    """
    kernel, threads, each = ("skinny_columns", 128, 2) if turned else ("skinny_rows", 256, 1)
    across = -(-length // 256)
    wanted = 1 if across >= each * processors else -(-each * processors // across)
    share = -(-inner // min(wanted, max(1, inner // (4 * STEP))))
    share = max(STEP, -(-share // STEP) * STEP)
    return Geometry(kernel, threads, (across, max(1, -(-inner // share))), share)
