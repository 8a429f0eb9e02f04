"""The Numba loop of `staging`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ...codegen.cpu.njit import njit

_WORD = ir.IntType(64)


def _calls(count: int) -> Any:
    """A function that calls the C function at an address with so many words.

    It returns the C function's int.
    """
    of_c = ir.FunctionType(ir.IntType(32), [_WORD] * count)

    def generate_store(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address, *words = args
        function = builder.inttoptr(address, of_c.as_pointer())
        return builder.call(function, words)

    signature = types.int32(types.int64, *[types.int64] * count)
    if count == 1:

        @intrinsic
        def call(typing, address, a):  # type: ignore[no-untyped-def]
            return signature, generate_store

    elif count == 2:

        @intrinsic
        def call(typing, address, a, b):  # type: ignore[no-untyped-def]
            return signature, generate_store

    else:

        @intrinsic
        def call(typing, address, a, b, c, d):  # type: ignore[no-untyped-def]
            return signature, generate_store

    return call


_call1, _call2, _call4 = map(_calls, (1, 2, 4))


@intrinsic
def _copy_bytes(typing, to, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy bytes from one address to another."""

    def generate_copy(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = ir.IntType(8).as_pointer()
        to, source = (builder.inttoptr(a, pointer) for a in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate_copy


@njit()
def send(  # type: ignore[no-untyped-def]
    to, source, rows, width, pitch, ring, part, events, sent, stream, copy, record, wait
):
    """Copy strided rows of the host to contiguous device memory, through a ring of pinned buffers.

    `to` and `source` are addresses, `width` and `pitch` bytes of a row and from one to the next.
    `ring` is the address of the buffers of `part` bytes each, of which `sent` were sent before.
    `copy`, `record` and `wait` are addresses of CUDA's functions. Returns how many buffers were
    sent by now, and CUDA's error code, 0 for success. Copies may still be running on the stream.
    """
    row, column, at = 0, 0, 0
    while row < rows:
        k = sent % events.size
        if sent >= events.size:
            said = _call1(wait, events[k])
            if said:
                return sent, said
        begin, filled = ring + k * part, 0
        while filled < part and row < rows:
            n = min(part - filled, width - column)
            _copy_bytes(begin + filled, source + row * pitch + column, n)  # type: ignore[call-arg]
            filled += n
            column += n
            if column == width:
                row, column = row + 1, 0
        said = _call4(copy, to + at, begin, filled, stream)
        if said:
            return sent, said
        sent += 1
        at += filled
        said = _call2(record, events[k], stream)
        if said:
            return sent, said
    return sent, 0
