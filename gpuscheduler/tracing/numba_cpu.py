"""Compile a Python function of numbers for the CPU with Numba.

CPU devices call the result as a NumPy ufunc.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import json
import linecache
import os
import pickle
import re
import secrets
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, cached_property, partial
from importlib import import_module, metadata
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from .. import disk_cache
from ..errors import NotCompiled
from ..forks import new_rlock
from ..gc_control import of_things_that_stay
from ..ir.expr import DType
from ..numba_private import (
    dispatcher_of,
    keep_gufunc_by,
    keep_ufunc_by,
    number_functions,
    result_of,
    result_state,
)
from .bytecode import names_read, narrow_module, replace_globals
from .purity import CATCHES, catches_errors

#: How functions are compiled for CPU devices: NumPy's rules for division by zero, and no lock held.
HOW: dict[str, Any] = {"error_model": "numpy", "nogil": True}


class ScalarFunction:
    """A plain Python function that takes and gives numbers.

    It is equal to another that has the same code and finds the same values under the names that it
    reads. These values are read now: they may change before it is compiled. It raises NotCompiled
    for a function with a `try`: a division by zero is no error by NumPy's rules, so the function
    would give other values than in Python.

    >>> def halvings(n):
    ...     steps = 0
    ...     while n % 2 == 0:
    ...         n, steps = n // 2, steps + 1
    ...     return steps
    >>> f = ScalarFunction(halvings)
    >>> f.results((np.dtype("i8"),))
    dtype('int64')
    >>> f.ufunc((np.dtype("i8"),), np.dtype("i8"))(np.array([8, 7, 12]))
    array([3, 0, 2])
    """

    def __init__(self, python: Callable[..., Any]):
        function = python_function(python)
        if function is None:
            raise NotCompiled(f"{python!r} is not a Python function: Numba cannot compile it")
        self._given = function
        self.python = _freeze_globals(function, {})
        self.name = function.__name__
        odd: list[Any] = []
        every: dict[Any, int] = {}
        words = _words_of(self.python, every, set(), odd)
        self.digest = hashlib.sha256(repr(words).encode()).hexdigest()
        catching = next((f for f in every if _has_try(f)), None)
        if catching is not None:
            raise NotCompiled(f"{place(catching)}: {CATCHES}")
        #: Whether it has a loop, or what it calls.
        self.repeats = any(_has_loop(f) for f in every)
        #: Whether the digest means the same in other processes.
        self.lasting = not odd
        self._lock = new_rlock()
        self._results: dict[Any, Any] = {}
        self._ufuncs: dict[Any, np.ufunc] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScalarFunction) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<ScalarFunction {self.name}>"

    def __reduce__(self) -> Any:
        return ScalarFunction, (self._given,)

    def results(self, types: tuple[DType, ...], compiled: bool = True) -> DType | tuple[DType, ...]:
        """What it gives for arguments of these types: one dtype, or a tuple of them.

        It is `compiled` on the way, as CPU devices will want it; else no code is made.

        Raises
        ------
        NotCompiled
            where Numba does not know what to do with it.
        """
        with self._lock:
            key = types, compiled
            if key not in self._results:
                words = self._words_of("results" if compiled else "types", types)
                found = _decode_types(disk_cache.read(words))
                if found is None:
                    with of_things_that_stay():
                        infer = self._infer_type if compiled else self._infer_without_code
                        found = infer(types)
                    disk_cache.keep(words, _encode_types(found))
                self._results[key] = found
            return self._results[key]  # type: ignore[no-any-return]

    def ufunc(self, types: tuple[DType, ...], gives: DType, part: int | None = None) -> np.ufunc:
        """It as a NumPy ufunc with one loop, which holds no lock; of several results, one."""
        with self._lock:
            key = types, gives, part
            if key not in self._ufuncs:
                import numba

                one = self._wrapper(len(types), part)
                from_dtype = numba.from_dtype
                signature = from_dtype(gives)(*[from_dtype(t) for t in types])
                vectorize: Any = numba.vectorize
                made = vectorize(nopython=True)(one)
                keep_ufunc_by(made, _DiskCache(self._words_of("ufunc", types, gives, part)))
                made.add(signature)
                self._ufuncs[key] = made.build_ufunc().ufunc
            return self._ufuncs[key]

    def rows(
        self,
        types: tuple[DType, ...],
        gives: DType,
        part: int | None,
        varies: tuple[bool, ...],
    ) -> Callable[..., Any]:
        """Return the function for arrays of which some have one element along the last axis.

        Which, `varies` says. What depends on these alone is computed once for each row, where the
        compiler finds it.
        """
        with self._lock:
            key = types, gives, part, varies
            if key not in self._ufuncs:
                import numba

                names = [f"a{n}" for n in range(len(types))]
                here = [f"{a}[i]" if v else a for a, v in zip(names, varies, strict=True)]
                text = (
                    f"def loop({', '.join(names)}, out):\n"
                    f"    for i in range(len(out)):\n        out[i] = f({', '.join(here)})\n"
                )
                one = numba.njit(**HOW)(self._wrapper(len(types), part))
                space: dict[str, Any] = {"f": one, "__name__": __name__}
                exec(text, space)
                kinds = [numba.from_dtype(t) for t in types]
                given = [k[:] if v else k for k, v in zip(kinds, varies, strict=True)]
                signature = (*given, numba.from_dtype(gives)[:])
                layout = ",".join(["(n)" if v else "()" for v in varies]) + "->(n)"
                guvectorize: Any = numba.guvectorize
                made = guvectorize(layout, nopython=True)(space["loop"])
                words = self._words_of("rows", types, gives, part, varies)
                keep_gufunc_by(made, _DiskCache(words))
                made.add(signature)
                self._ufuncs[key] = made.build_ufunc().ufunc
            return partial(_by_rows, self._ufuncs[key], varies)

    def _words_of(self, what: str, types: tuple[DType, ...], *others: Any) -> Any:
        """What decides what is made of it; None where that is not known."""
        if not self.lasting or (what not in ("results", "types") and not numbered_apart()):
            return None
        return what, self.digest, [t.str for t in types], others, _version()

    def _infer_type(self, types: tuple[DType, ...]) -> Any:
        from numba.core.errors import NumbaError

        function = self._wrapper(len(types))
        try:
            given = _return_type(function, types, HOW)
        except Exception as error:  # Numba's compiler lets some through that are not its own
            own = isinstance(error, NumbaError)
            said = reason(error) if own else f"{type(error).__name__}: {error}"
            if ", line " not in said and (name := _MISSING.search(said)):
                said += _line_of(self.python.__code__, name[1])
            raise NotCompiled(f"{place(self.python)}: {said}") from error
        return self._numbers(given)

    def _infer_without_code(self, types: tuple[DType, ...]) -> Any:
        """The same without code."""
        with suppress(Exception):  # whatever it is that fails: the compiler says what is wrong
            how = {**HOW, "pipeline_class": _until_typed()}
            function = self._wrapper(len(types), compiled=jit(self.python, how))
            return self._numbers(_return_type(function, types, how))
        return self._infer_type(types)

    def _wrapper(self, count: int, part: int | None = None, compiled: Any = None) -> Any:
        """A function of `count` arguments that calls this; `part` selects a result."""
        names = ", ".join([f"a{n}" for n in range(count)])
        item = "" if part is None else f"[{part}]"
        space = {"f": compiled or self._compiled_function, "__name__": __name__}
        return eval(f"lambda {names}: f({names}){item}", space)

    @cached_property
    def _compiled_function(self) -> Any:
        return jit(self.python)

    def _numbers(self, given: Any) -> Any:
        import numba

        if isinstance(given, numba.types.BaseTuple):
            return tuple([self._number(t) for t in given.types])  # type: ignore[attr-defined,unused-ignore]
        return self._number(given)

    def _number(self, given: Any) -> DType:
        from numba.np import numpy_support

        try:
            dtype = numpy_support.as_dtype(getattr(given, "literal_type", given))
        except Exception:
            dtype = None
        if dtype is None or dtype.kind not in "biufc":
            raise NotCompiled(
                f"{place(self.python)}: it gives {given}: a function of a mesh gives a number, "
                "or a tuple of numbers"
            )
        return dtype


def _by_rows(function: Any, varies: tuple[bool, ...], *args: Any, out: Any = None) -> Any:
    every = zip(args, varies, strict=True)
    return function(*[a if v or not a.ndim else a[..., 0] for a, v in every], out=out)


def python_function(function: Any) -> types.FunctionType | None:
    """The Python function inside Numba's objects; None where there is none."""
    inner = dispatcher_of(function)
    inner = getattr(inner, "py_func", inner)
    return inner if isinstance(inner, types.FunctionType) else None


def _freeze_globals(function: types.FunctionType, known: dict[Any, Any]) -> types.FunctionType:
    """A copy for which its names, and those of what it calls, keep what they mean now."""

    def current_value(value: Any, names: set[str]) -> Any:
        inner = python_function(value)
        if inner is not None and not _is_library(inner.__globals__):
            copy = known.get(inner) or _freeze_globals(inner, known)
            if inner is value:
                return copy
            return type(value)(copy, targetoptions=value.targetoptions)  # one of Numba's
        if isinstance(value, types.ModuleType) and not _is_library(vars(value)):
            return narrow_module(value, names, current_value)
        return value.copy() if isinstance(value, np.ndarray) else value

    known[function] = function  # should it call itself: that is refused when it is compiled
    value = partial(current_value, names=names_read(function.__code__))
    known[function] = replace_globals(function, value)
    return known[function]  # type: ignore[no-any-return]


def jit(function: types.FunctionType, how: dict[str, Any] = HOW) -> Any:
    """The function compiled, with the plain functions that it calls compiled as well."""
    import numba

    done: dict[types.FunctionType, Any] = {}

    def other_value(value: Any) -> Any:
        kind = type(value).__name__
        if isinstance(value, types.ModuleType) and not _is_library(vars(value)):
            return narrow_module(value, {*vars(value)}, lambda part, _: other_value(part))
        if kind == "CUDADispatcher":  # of `cuda.jit(device=True)`
            return compile_once(value.py_func)
        again = kind == "CPUDispatcher" and how is not HOW  # of `njit`, to be compiled another way
        inner = value.py_func if again else value
        own = isinstance(inner, types.FunctionType) and not _is_library(inner.__globals__)
        return compile_once(inner) if own else value

    def compile_once(f: types.FunctionType) -> Any:
        if f not in done:
            done[f] = None
            copy = replace_globals(f, other_value)
            copy.__globals__["__name__"] = __name__  # where another process finds a module
            done[f] = numba.njit(**how)(copy)
        if done[f] is None:
            raise NotCompiled(f"{place(f)}: it calls itself; write a loop")
        return done[f]

    return compile_once(function)


def _return_type(function: Any, types: tuple[DType, ...], how: dict[str, Any]) -> Any:
    """Numba's type of what a function gives, having compiled it."""
    import numba

    numbered_apart()  # what is compiled here may become part of what is kept
    one: Any = numba.njit(**how)(function)
    signature = tuple([numba.from_dtype(t) for t in types])
    one.compile(signature)
    return one.overloads[signature].signature.return_type


@cache
def _until_typed() -> Any:
    """Return Numba's compiler up to its types; only its own functions can call what it makes."""
    parts = "compiler", "compiler_machinery", "typed_passes", "typing"
    inside: Any = [import_module(f"numba.core.{name}") for name in parts]
    compiler, machinery, passes, typing = inside

    @machinery.register_pass(mutates_CFG=False, analysis_only=True)
    class Typed(machinery.AnalysisPass):  # type: ignore[misc,name-defined]
        _name = "typed"

        def __init__(self) -> None:
            machinery.AnalysisPass.__init__(self)

        def run_pass(self, state: Any) -> bool:
            state.cr = compiler.compile_result(
                typing_context=state.typingctx,
                target_context=state.targetctx,
                # never called; but Numba forgets all that it knows by it when this goes, so it
                # must be nobody else's
                entry_point=[].append,
                signature=typing.signature(state.return_type, *state.args),
                objectmode=False,
                metadata=state.metadata,
            )
            return False

    class UntilTyped(compiler.CompilerBase):  # type: ignore[misc,name-defined]
        def define_pipelines(self) -> list[Any]:
            written = compiler.DefaultPassBuilder
            steps = machinery.PassManager("typed")
            steps.passes += written.define_untyped_pipeline(self.state).passes
            steps.passes += written.define_typed_pipeline(self.state).passes
            steps.add_pass(passes.NoPythonSupportedFeatureValidation, "what Numba lacks")
            steps.add_pass(passes.IRLegalization, "what it does not allow")
            steps.add_pass(Typed, "types")
            steps.finalize()
            return [steps]

    return UntilTyped


def _is_library(space: Mapping[str, Any]) -> bool:
    """Whether a module, by its names, is one of which Numba knows what is in it."""
    libraries = ("numpy", "numba", "math", "cmath", "operator", "scipy")
    return str(space.get("__name__")).partition(".")[0] in libraries


def place(function: types.FunctionType) -> str:
    """Where a function is, for people."""
    code = function.__code__
    return f"{function.__qualname__} ({code.co_filename}, line {code.co_firstlineno})"


_UNSAID = re.compile(r"\x1b\[[\d;]*m| at 0x[\da-f]+")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_SIGNATURE = re.compile(r"^ >>> (.*)$", re.MULTILINE)
_MISSING = re.compile(r"(?:name|attribute) '(\w+)'")
_WHY = re.compile(r"specific error:\n\s*(.*)")


def reason(error: BaseException) -> str:
    """What Numba says, and the innermost line of the user's code that it names."""
    text = _UNSAID.sub("", str(error))
    words = [x for x in text.splitlines() if x.strip() and not x.startswith("Failed in ")]
    said = [words[0] if words else type(error).__name__]
    said += [m[1].strip() for m in (_SIGNATURE.search(text), _WHY.search(text)) if m]
    return "; ".join(said)[:400] + _place(text)


def _place(text: str) -> str:
    for file, line in _PLACE.findall(text):
        if file.startswith("<"):  # a few words of ours
            continue
        if "numba" not in Path(file).parts and _ROOM.parent not in Path(file).parents:
            code = linecache.getline(file, int(line)).strip()
            return f" ({Path(file).name}, line {line}{f': {code}' if code else ''})"
    return ""


def _line_of(code: types.CodeType, name: str) -> str:
    """Where code reads a name, for people."""
    for read in dis.get_instructions(code):
        if read.argval == name:
            line = next(n for a, b, n in code.co_lines() if a <= read.offset < b and n)
            text = linecache.getline(code.co_filename, line).strip()
            return f" ({Path(code.co_filename).name}, line {line}{f': {text}' if text else ''})"
    return ""


def _has_loop(function: types.FunctionType) -> bool:
    """Whether its own code goes back to where it was."""
    return not _is_library(function.__globals__) and _goes_back(function.__code__)


def _has_try(function: types.FunctionType) -> bool:
    """Whether its own code has a `try`."""
    return not _is_library(function.__globals__) and catches_errors(function.__code__)


def _goes_back(code: types.CodeType) -> bool:
    jumps = {*dis.hasjrel, *dis.hasjabs}
    if any(i.opcode in jumps and i.argval <= i.offset for i in dis.get_instructions(code)):
        return True
    return any(isinstance(c, types.CodeType) and _goes_back(c) for c in code.co_consts)


# ---- which functions are the same


def _words_of(value: Any, seen: dict[Any, int], names: set[str], odd: list[Any]) -> Any:
    """Return words that decide what a function computes, equal in every process.

    Values of which nothing of the kind is known are added to `odd`. Of a module that is what code
    that reads these names may ask of it.
    """
    function = python_function(value)
    if function is not None:
        if function in seen:
            return "function", seen[function]
        seen[function] = len(seen)
        code = function.__code__
        outside = function.__globals__
        names = names_read(code)
        around = [_contents(c) for c in function.__closure__ or ()]
        given = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
        options = getattr(dispatcher_of(value), "targetoptions", {})
        return (
            _code_words(code),
            [(n, _words_of(outside[n], seen, names, odd)) for n in sorted(names & outside.keys())],
            [_words_of(v, seen, names, odd) for v in (*around, *given)],
            [(n, _words_of(v, seen, names, odd)) for n, v in sorted(options.items())],
        )
    if isinstance(value, types.ModuleType):
        space = vars(value)
        own = [] if _is_library(space) else sorted(names & space.keys())
        return value.__name__, [(n, _words_of(space[n], seen, names - {n}, odd)) for n in own]
    if isinstance(value, types.CodeType):
        return _code_words(value)
    if isinstance(value, enum.EnumMeta):
        members: Iterable[Any] = value.__members__.values()
        return value.__name__, [_words_of(v, seen, names, odd) for v in members]
    if isinstance(value, enum.Enum):
        kinds = [k.__name__ for k in type(value).__mro__]
        return kinds, value.name, _words_of(value.value, seen, names, odd)
    kind = type(value)
    if kind in (tuple, list):
        return kind.__name__, [_words_of(v, seen, names, odd) for v in value]
    if isinstance(value, tuple) and (fields := getattr(kind, "_fields", None)):
        return kind.__name__, fields, [_words_of(v, seen, names, odd) for v in value]
    if kind is np.ndarray and not value.dtype.hasobject:
        layout = value.flags.c_contiguous, value.flags.f_contiguous
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return repr(value.dtype), value.shape, layout, content
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return kind.__name__, repr(value.dtype), value.tobytes().hex()
    if kind in (bool, int, float, complex, str, bytes, type(None), range, type(...)):
        return kind.__name__, repr(value)
    if kind.__module__ == "numba.core.types.scalars":
        return kind.__name__, repr(value)
    home = _library_module(value)
    if home:
        return kind.__name__, home, value.__name__
    odd.append(value)
    return kind.__name__, id(value)


def _code_words(code: types.CodeType) -> Any:
    inner: Iterable[Any] = code.co_consts
    constants = [_code_words(c) if isinstance(c, types.CodeType) else repr(c) for c in inner]
    takes = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    handlers = getattr(code, "co_exceptiontable", b"").hex()  # since Python 3.11
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_name, code.co_code.hex(), handlers, constants, takes, names


def _library_module(value: Any) -> str:
    """The module of a library, or Python's own, in which a value is found by its name."""
    name = getattr(value, "__name__", None)
    for home in (getattr(value, "__module__", None), "numpy", "scipy.special"):
        module = sys.modules.get(str(home))
        if module is None or not (home == "builtins" or _is_library(vars(module))):
            continue
        if isinstance(name, str) and getattr(module, name, None) is value:
            return str(home)
    return ""


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


# ---- on disk

_ROOM = Path(__file__).parent
#: Files that decide which machine code Numba makes of a function: part of the key under which it
#: is kept on disk.
DECIDES_CODE = tuple(
    _ROOM / f"{name}.py" for name in ("bytecode", "purity", "registry", "numba_cpu")
)


def versions(packages: Iterable[str], files: Iterable[Path]) -> str:
    """A key of Python, these packages and these files of ours, which decide the compiled code."""
    words = [sys.version.split()[0]]
    for name in packages:
        try:
            words.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            words.append(f"no {name}")
    own = hashlib.sha256(b"".join([f.read_bytes() for f in files])).hexdigest()
    return ", ".join([*words, own[:16]])


def numbered_apart(identities: str = "numba.core.bytecode") -> bool:
    """Let the functions that Numba compiles from now on have names that no other process gives.

    Their symbols have numbers in them, which are counted from 1 in each process. Where code comes
    from another one, two functions would have one name, and the one that is there first would be
    called for both. False where this Numba has no such numbers: then nothing can be kept.
    """
    return _numbered_apart(identities, os.getpid())


@cache
def _numbered_apart(identities: str, process: int) -> bool:
    return number_functions(identities, count(secrets.randbits(60)))


class _DiskCache:
    """Numba's compiled code in the disk cache; a failed read or write costs a compilation."""

    def __init__(self, words: Any):
        self.words = words

    def load_overload(self, signature: Any, context: Any) -> Any:
        content = disk_cache.read(self._add_processor(context))
        if content is None:
            return None
        with suppress(Exception):
            context.refresh()
            return result_of(context, pickle.loads(content))
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        serialize: Any = import_module("numba.core.serialize")
        made = result._asdict()
        if made["lifted"] or made["library"].has_dynamic_globals:  # it has addresses in it
            return
        with suppress(Exception):
            disk_cache.keep(
                self._add_processor(result.target_context), serialize.dumps(result_state(result))
            )

    def _add_processor(self, context: Any) -> Any:
        """With the processor, of which the code is."""
        return None if self.words is None else (self.words, context.codegen().magic_tuple())


@cache
def _version() -> str:
    return versions(("numba", "llvmlite", "numpy", "numba-scipy"), DECIDES_CODE)


def _encode_types(gives: DType | tuple[DType, ...]) -> bytes:
    """
    >>> _decode_types(_encode_types((np.dtype(bool), np.dtype("f8"))))
    (dtype('bool'), dtype('float64'))
    >>> _decode_types(_encode_types(np.dtype("i4")))
    dtype('int32')
    """
    words = [d.str for d in gives] if isinstance(gives, tuple) else gives.str
    return json.dumps(words).encode()


def _decode_types(content: bytes | None) -> Any:
    if content is None:
        return None
    words = json.loads(content)
    return tuple([np.dtype(w) for w in words]) if isinstance(words, list) else np.dtype(words)
