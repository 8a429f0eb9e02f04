"""A kernel's arguments: 64-bit words, and what its text declares beside its loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import tuning
from .nodes import DeviceCall, IrNode, dtype_of
from .operations import TYPES
from .schedule import Schedule


class ArgumentSlots:
    """The 64-bit arguments of one item of a launch, by name."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self._known: dict[Any, int] = {}

    def slot_of(self, name: Any, value: int = 0) -> int:
        """The slot of that name, which has one value."""
        word = int(value) & (2**64 - 1)
        if name not in self._known:
            self._known[name] = len(self.words)
            self.words.append(word)
        found = self._known[name]
        assert self.words[found] == word, f"two values of {name}"
        return found

    def __contains__(self, name: Any) -> bool:
        return name in self._known


class Arguments:
    """The arguments of a kernel, functions that it calls, and declarations before it."""

    def __init__(self, schedule: Schedule) -> None:
        #: The type that counts points and elements.
        self.count = schedule.count
        self.slots = ArgumentSlots()
        #: How many of the slots are constants.
        self.constants = 0
        #: Array number and offset of a pointer, by slot.
        self.pointers: dict[int, tuple[int, int]] = {}
        #: Types and tables that the text declares.
        self.structs = [*schedule.structs]
        #: Functions that are called, by symbol.
        self.calls: dict[str, DeviceCall] = {}

    def slot(self, name: Any, value: int = 0) -> str:
        """The text of an argument."""
        return f"S({self.slots.slot_of(name, value)})"

    def number(self, name: Any, value: int) -> str:
        """The text of an argument that counts points or elements."""
        return f"({self.count}){self.slot(name, value)}"

    def constant(self, node: IrNode) -> str:
        """The text of a constant."""
        value, name = (
            np.frombuffer(node.data, dtype_of(node.code)),
            ("constant", node.code, node.data),
        )
        if node.code == "b1":
            return f"{self.slot(name, int(value[0]))} != 0"
        if node.code[0] in "iu":
            return f"({TYPES[node.code]}){self.integer_text(name, int(value[0]))}"
        if node.code in ("f2", "f4"):
            return self.real(name, value.astype("f4"))
        if node.code == "f8":
            return self.real(name, value)
        parts = enumerate(value.view("f4" if node.code == "c8" else "f8"))
        words = [self.real((name, n), part) for n, part in parts]
        return f"{TYPES[node.code]}{{{', '.join(words)}}}"

    def integer_text(self, name: Any, value: int) -> str:
        """The text of an integer; large ones may be filled in later and stay arguments."""
        few = self.constants < tuning.MOST_CONSTANTS
        if name in self.slots or few or abs(value) >= 2**31:
            self.constants += name not in self.slots
            return self.slot(name, value)
        return f"({value})"

    def real(self, name: Any, value: Any) -> str:
        """The text of a real number: an argument, so that other numbers need no other kernel.

        Beyond MOST_CONSTANTS it is part of the text.
        """
        bits = int(value.view(f"u{value.itemsize}").item())
        if name in self.slots or self.constants < tuning.MOST_CONSTANTS:
            self.constants += name not in self.slots
            word = self.slot(name, bits)
        else:
            word = f"0x{bits:x}"
        if value.itemsize == 4:
            return f"__int_as_float((int){word})"
        return f"__longlong_as_double((long long){word})"
