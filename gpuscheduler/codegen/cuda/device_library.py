"""The CUDA C++ functions that kernels call, and which of them a text needs.

Files of `library/` have the functions in pieces. A line ``//@ name name~`` begins a piece and has
the names that it defines. Lines that begin with ``///`` are for readers: kernels do not carry them.

A piece that has ``~`` behind its names is a template. It becomes two pieces, as functions of C
come in two types: ``Real`` is double and ``~`` is empty, or ``Real`` is float and ``~`` is an f.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

#: Where the files of CUDA C++ lie.
LIBRARY = Path(__file__).parent / "library"

_WORDS = re.compile(r"[A-Za-z_]\w*")


def read_pieces(text: str) -> Iterator[tuple[list[str], str]]:
    """Split a file's text into pieces: the names that each defines, and its code.

    >>> list(read_pieces("/// Of no piece.\\n//@ one~\\nReal one~();\\n"))
    [(['one'], 'double one();'), (['onef'], 'float onef();')]
    """
    code = re.sub(r"^///.*\n", "", text, flags=re.MULTILINE)
    for piece in re.split(r"^//@ ", code, flags=re.MULTILINE)[1:]:
        names, _, body = piece.partition("\n")
        if "~" not in names:  # elsewhere it is C's operator
            yield names.split(), body.strip("\n")
            continue
        for suffix, real in (("", "double"), ("f", "float")):
            template = body.strip("\n").replace("~", suffix).replace("Real", real)
            yield names.replace("~", suffix).split(), template


def _read_file(name: str) -> dict[str, str]:
    text = (LIBRARY / f"{name}.cuh").read_text(encoding="utf-8")
    return {name: body for names, body in read_pieces(text) for name in names}


#: Files whose pieces kernels may need.
FILES = [
    "storage", "complex", "indices", "quotients", "bins", "integers", "real", "random",
    "reduction", "scan",
]  # fmt: skip
#: The code that defines a name.
PIECES = {name: body for file in FILES for name, body in _read_file(file).items()}
#: Conversions of float16, which are PTX: tests that have no GPU put others in their place.
HALF = PIECES["half_value"]
#: A kernel of its own: rows of 16-byte words, contiguous in `from`, `pitch` bytes apart in `to`.
ROWS_COPIED = "\n" + _read_file("copy")["copy_rows"] + "\n"


def pieces(text: str) -> str:
    """The pieces that a text needs, each after the pieces that it needs itself."""
    found: dict[str, None] = {}
    entered: set[str] = set()

    def visit(words: str) -> None:
        for name in _WORDS.findall(words):
            piece = PIECES.get(name)
            if piece is not None and piece not in entered:
                entered.add(piece)
                visit(piece)
                found[piece] = None

    visit(text)
    return "\n".join(found)
