"""Pieces of C++ text: declarations, blocks and loops."""

from __future__ import annotations

from collections.abc import Iterable

from .operations import TYPES


def declare_value(code: str, name: str, text: str) -> str:
    """A statement that gives a value its name. It is assigned, as a compiler works out, where it
    can, what a name begins with, and follows those within it as often as they occur: a chain of 40
    values, each of which occurs twice in the next, would take it years."""
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
    """The last of so many blocks goes on, behind what the others have left."""
    counter = f"counters + {group}" if group else "counters"
    return [
        "__syncthreads();",
        f"if (threadIdx.x == 0) last = atomicAdd({counter}, 1u) == {count} - 1;",
        "__syncthreads();",
        f"if (!last) {otherwise};",
        "__threadfence();",
        f"if (threadIdx.x == 0) counters[{group or 0}] = 0;",
    ]
