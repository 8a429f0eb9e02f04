"""LLVM IR becomes machine code in memory, and objects in the disk cache."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import disk_cache
from . import tuning
from .llvm_text import Array, LlvmText, NotWritten, RegionLoop, compile_target


def array_literal(value: Array) -> str:
    if value.dtype.kind == "f":  # LLVM writes floats as the doubles that they are
        return "0x" + np.float64(value).tobytes()[::-1].hex().upper()
    return ("true" if value else "false") if value.dtype.kind == "b" else str(int(value))


def compile_function(
    text: LlvmText, row: RegionLoop, outs: int, helpers: str
) -> Callable[..., Any]:
    pointers = [*row.pointers, *[f"%out{n}" for n in range(outs)]]
    if len(pointers) > tuning.MOST_POINTERS:
        raise NotWritten("too many arrays")
    words = ["ptr noalias nocapture readonly %ints"]
    words += [f"ptr noalias nocapture readonly {p}" for p in row.pointers]
    words += [f"ptr noalias nocapture %out{n}" for n in range(outs)]
    main = f"define void @kernel({', '.join(words)}) {{\n{text.body()}\n  ret void\n}}\n"
    return _find_or_compile("\n".join([*sorted(text.used), helpers, main]), 1 + len(pointers))


_lock, _PID = threading.Lock(), os.getpid()
_functions: dict[str, Any] = {}
_engines: list[Any] = []  # whose memory the functions are in


def _find_or_compile(source: str, arguments: int) -> Callable[..., Any]:
    found = _functions.get(source)
    if found is None:
        if os.getpid() != _PID:
            raise NotWritten("a forked process cannot compile: the lock may be held for ever")
        with _lock:
            found = _functions.get(source)
            if found is None:
                found = _functions[source] = _compile(source, arguments)
    if found is _BROKEN:
        raise NotWritten("LLVM did not compile it")
    return found  # type: ignore[no-any-return]


_BROKEN = object()


def _compile(source: str, arguments: int) -> Any:
    target = compile_target()
    if target is None:
        return _BROKEN
    llvm, machine, facts = target
    words = ("host", facts, source)
    code = disk_cache.read(words)
    try:
        if code is None:
            code = _object(llvm, machine(), source)
            disk_cache.keep(words, code)
        empty = llvm.parse_assembly("")
        empty.triple = facts[0]
        made = llvm.ObjectFileRef.from_data(code)
        engine = llvm.create_mcjit_compiler(empty, machine())
        engine.add_object_file(made)
        engine.finalize_object()
        place = engine.get_function_address("kernel")
        if not place:
            raise RuntimeError("no function of this name")
    except Exception as error:
        warnings.warn(
            f"a kernel is evaluated by NumPy, as LLVM did not compile it: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return _BROKEN
    _engines.append(engine)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_size_t] * arguments)(place)


def _object(llvm: Any, machine: Any, source: str) -> bytes:
    module = llvm.parse_assembly(source)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)  # type: ignore[no-any-return]
