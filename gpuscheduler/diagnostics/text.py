"""Text of pages: columns, HTML tables, plurals, and files."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape
from os import PathLike, fspath
from typing import Any


def align_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Lines with the cells of each row; the columns in `right` end together.

    >>> align_columns([["a", "1"], ["bcd", "20"]], right=[1])
    ['a     1', 'bcd  20']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if n in right else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]  # fmt: skip


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table with these cells, of which each is escaped."""
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [f"<tr>{first}</tr>"] if head else []
    lines += ["<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def count_of(number: int, noun: str) -> str:
    """A number and its noun.

    >>> count_of(1, "step"), count_of(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'s'[: number != 1]}"


def write_text(
    path: str | PathLike[str], text: str, storage: Mapping[str, Any] | None = None
) -> None:
    """Write a text to a path or a URL of fsspec; compressed where it ends in ``.gz``."""
    import fsspec  # type: ignore[import-untyped]

    options = {"encoding": "utf-8", "compression": "infer", "auto_mkdir": False, **(storage or {})}
    with fsspec.open(fspath(path), "wt", **options) as file:
        file.write(text)
