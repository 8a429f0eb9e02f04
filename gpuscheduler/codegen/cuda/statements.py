"""Pieces of C++ text: declarations, blocks and loops."""

from __future__ import annotations

from collections.abc import Iterable

from .operations import TYPES


def declare_value(code: str, name: str, text: str) -> str:
    """A statement that gives a value its name.

    The value is assigned after the declaration. A compiler works out initial values where it can,
    and those within them as often as they occur: in a chain of 40 values, each of which occurs
    twice in the next, that takes years.
    """
    return f"{TYPES[code]} {name}; {name} = {text};"


def enclose(lines: list[str], wanted: bool = True) -> list[str]:
    """A block of statements, if there are any."""
    return ["{", *lines, "}"] if wanted and lines else []


def loop_elements(width: int, lines: Iterable[str]) -> list[str]:
    """Statements for each element of a vector."""
    return unroll(f"int e = 0; e < {width}; ++e", lines)


def unroll(head: str, lines: Iterable[str]) -> list[str]:
    """A loop that is unrolled whole."""
    return ["#pragma unroll", f"for ({head}) {{", *lines, "}"]


def choose_last_block(count: str, otherwise: str, group: str = "") -> list[str]:
    """Let only the last of `count` blocks go on: it sees what the others have written."""
    counter = f"counters + {group}" if group else "counters"
    return [
        "__syncthreads();",
        f"if (threadIdx.x == 0) last = atomicAdd({counter}, 1u) == {count} - 1;",
        "__syncthreads();",
        f"if (!last) {otherwise};",
        "__threadfence();",
        f"if (threadIdx.x == 0) counters[{group or 0}] = 0;",
    ]
