"""Purity analysis: which functions may be run on arrays without values.

The analysis reads the bytecode of a function and of the functions that it calls; it runs none of
them.

A function may be traced if it neither reads nor changes anything but its arguments. The analysis
reports the global names that the function reads, so that a cached plan can be checked against their
present values. Libraries that are known to be pure are not read. `registry.KNOWN` says which
functions are replaced wherever they are called.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from dask.array import dispatch
from dask.utils import Dispatch

from ..frontend.captured import Variable, made_of
from ..frontend.compiled_task import COMPILED
from ..frontend.lines import is_users_code
from ..frontend.rebuild import attributes_of
from ..frontend.tiles import MeshAxis
from .bytecode import BUILTINS, ClosureCells, builtins_of, root_module, root_of, type_name, words
from .registry import LIKE, in_place_of

#: What tasks may be given although it can be changed: functions get copies when they are traced.
CHANGEABLE = (list, dict)
#: What a task may be given to call.
CALLED = (types.FunctionType, functools.partial)


def is_curried(function: Any) -> bool:
    """Whether it is what toolz makes of a function and some of its arguments."""
    return type(function).__name__ == "curry" and hasattr(function, "func")


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's or CuPy's with elements, and of no class of its own."""
    return _is_theirs(value) and bool(value.size)


def is_nothing(value: Any) -> bool:
    """Whether it is such an array without elements, as Dask has them to say what to make."""
    return _is_theirs(value) and not value.size


def _is_theirs(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] in ("numpy", "cupy")


# ------------------------------------------------------------------------------------------------
# Whose code may be run on arrays without values, and once for many chunks.

_SAFE_BUILTINS = words(
    "abs all any bool bytes callable complex dict divmod enumerate filter float frozenset getattr "
    "hasattr int isinstance issubclass iter len list map max min next pow range repr reversed "
    "round set slice sorted str sum tuple zip"
)
_NUMPY_DENIED = words(
    "random load save savez savez_compressed fromfile memmap genfromtxt loadtxt savetxt seterr "
    "seterrcall setbufsize set_printoptions ctypeslib f2py testing DataSource frompyfunc vectorize "
    "isscalar geterr geterrcall getbufsize get_printoptions array2string array_repr array_str "
    "info show_config show_runtime"
)
#: What decides whether NumPy's and SciPy's functions raise errors, for whoever runs later.
_SPECIAL_DENIED = ("errstate", "seterr")
#: What else of SciPy's tells or changes how its functions work, and modules that read files.
_SCIPY_DENIED = words(
    "geterr get_workers set_workers set_backend set_global_backend skip_backend register_backend "
    "test"
)
_SCIPY_FILES = ("scipy.io", "scipy.datasets", "scipy.sparse._matrix_io", "scipy.__config__")
#: Parameters that say where a library's function draws its numbers from.
_DRAWN_FROM = frozenset({"rng", "random_state", "seed"})
_MODULES = frozenset(
    {"numpy", "numpy.linalg", "math", "cmath", "operator", "cupy", "cupy.linalg", "scipy.special",
     "cupyx.scipy.special", "numpy.lib.stride_tricks", "functools"}
)  # fmt: skip
TRUSTED = words(
    "numpy scipy cupy cupyx cupy_backends operator _operator math cmath functools _functools "
    "itertools toolz tlz cytoolz gpuscheduler builtins"
)
_DASK_TRUSTED = ("dask.array", "dask.utils", "dask.core", "dask.blockwise", "dask._task_spec")
#: Whose functions call the methods and functions of the arrays that they are given.
_DISPATCHING = words("dask gpuscheduler operator _operator toolz tlz cytoolz functools")
#: Whose objects hold no functions of others, and stay what they are.
_OBJECTS = ("builtins", "cupy", "functools", "operator", "_operator", "scipy.special",
            *_DASK_TRUSTED)  # fmt: skip
_DASK_DENIED = frozenset({"store_chunk", "load_store_chunk", "load_chunk", "_apply_random",
                          "_apply_random_func", "_choice_rng", "_choice_rs"})  # fmt: skip
Read = tuple[Mapping[str, Any], str, Any]  # where a name was looked up, the name, what it was


#: How the reason begins why a function of points is not traced, nor compiled, that has a `try`.
CATCHES = "it catches errors, which neither symbols nor compiled arithmetic raise"


def why_impure(function: Any, arrays: bool = False, points: bool = False) -> str | None:
    """The reason why a function cannot run once for all chunks, or None for one that can.

    Such a function reads or changes something that it is not given. It may read `arrays` where each
    run looks at them again. With `points`, it gets Python's numbers, whose operations raise errors
    that it may catch.

    >>> why_impure(lambda x: abs(x) + 1)
    >>> why_impure(lambda x: print(x))
    'it calls print'
    """
    return _PurityReader(arrays, points).check_callable(function)


def catches_errors(code: types.CodeType) -> bool:
    """Whether code, or code inside it, has a `try`; `with` alone is none.

    >>> def halved(x):
    ...     try:
    ...         return x / 2
    ...     except TypeError:
    ...         return 0
    >>> catches_errors(halved.__code__), catches_errors((lambda x: [v / 2 for v in x]).__code__)
    (True, False)
    """
    steps = [i.opname for i in dis.get_instructions(code)]
    # a `with` has a handler of its own; so has, since Python 3.12, a comprehension, of other steps
    handlers = steps.count("PUSH_EXC_INFO") + steps.count("SETUP_FINALLY")
    return handlers > steps.count("WITH_EXCEPT_START") * ("SETUP_WITH" not in steps) or any(
        catches_errors(c) for c in code.co_consts if isinstance(c, types.CodeType)
    )


def globals_read(function: Any) -> list[Read]:
    """The outside names that a pure function and its callees read: `(where, name, value)`.

    A plan made from the function holds while `where[name] is value`.
    """
    reading = _PurityReader(arrays=True)
    reading.check_callable(function)
    return reading.reads


def functions_read(function: Any) -> tuple[Variable, ...]:
    """Users' functions and partials that a pure function is made of, and what these were."""
    reading = _PurityReader(arrays=True)
    reading.check_callable(function)
    return tuple(reading.functions)


def reads_of_points(function: Any) -> tuple[list[Read], list[Variable], list[Any]]:
    """Names, functions and containers that a pure function of points reads."""
    reading = _PurityReader(points=True)
    reading.check_callable(function)
    return reading.reads, reading.functions, reading.containers


def containers_read(function: Any) -> list[Any]:
    """Lists and dictionaries that a pure function was made with, which anybody may change.

    They belong to partials and compiled sub-graphs. A user's function may read no others.
    """
    reading = _PurityReader(arrays=True)
    reading.check_callable(function)
    return reading.containers


def reason_against_constant(constant: Any) -> tuple[str | None, list[Any]]:
    """The reason why a trace cannot use a constant of a task; also its lists and dictionaries.

    >>> reason_against_constant((1, [2, 3]))
    (None, [[2, 3]])
    >>> reason_against_constant(np.random.default_rng(0))[0]
    'it reads a numpy.random._generator.Generator'
    """
    reading = _PurityReader(arrays=True)
    return reading.check_all([constant]), reading.containers


class _PurityReader:
    """One look through a function and what it calls."""

    def __init__(self, arrays: bool = False, points: bool = False) -> None:
        self.arrays = arrays  # whether functions may read some
        self.points = points  # whether they get numbers of Python's
        self.reads: list[Read] = []
        self.containers: list[Any] = []
        self.functions: list[Variable] = []
        self.seen: set[int] = set()

    def check_callable(self, f: Any) -> str | None:
        """Why not, for anything that can be called."""
        if id(f) in self.seen or in_place_of(f) is not None:
            return None
        self.seen.add(id(f))
        if isinstance(f, functools.partial):
            self.functions.append((f, made_of(f)))
            words = [v for k, v in f.keywords.items() if k not in LIKE]
            return self.check_all([f.func, *f.args, *words])
        if type(f).__name__ == "Compose" and hasattr(f, "funcs"):
            self.functions.append((f, made_of(f)))
            return self.check_all([f.first, *f.funcs])
        if is_curried(f):
            self.functions.append((f, made_of(f)))
            return self.check_all([f.func, *f.args, *f.keywords.values()])
        if isinstance(f, np.ufunc):
            return None
        if isinstance(f, types.FunctionType):
            if f.__code__.co_filename == COMPILED:
                return self.check_all([v for k, v in f.__globals__.items() if k != "__builtins__"])
            return (
                self._function(f)
                if is_users(f)
                else self._refuse_untrusted(f) or self._refuse_wrapped(f)
            )
        if isinstance(f, types.MethodType):
            return f"it calls a method of a {type_name(f.__self__)}"
        if isinstance(f, types.BuiltinFunctionType):
            owner = f.__self__
            if owner is not None and not isinstance(owner, types.ModuleType):
                return f"it calls a method of a {type_name(owner)}"
        if isinstance(f, type):
            # those of SciPy draw numbers (Rotation, Sobol), or read files
            if root_module(f) not in TRUSTED - {"scipy"}:
                return f"it calls {type_name(f)}"
            return None if root_module(f) == "builtins" else self._refuse_untrusted(f)
        module = type(f).__module__
        if module.startswith("gpuscheduler."):  # with a user's function in it, maybe
            return self.check_all([v for v in attributes_of(f).values() if callable(v)])
        if isinstance(f, Dispatch):
            own = any(f is v for v in vars(dispatch).values())
            return None if own else "it calls a dask.utils.Dispatch, which can change"
        if module.startswith(_OBJECTS) or type(f).__name__ == "_ArrayFunctionDispatcher":
            return self._refuse_untrusted(f)
        return f"it calls an object of type {module}.{type(f).__qualname__}"

    def check_all(self, values: Sequence[Any]) -> str | None:
        """Why not, for the first of several constants or functions."""
        for value in values:
            if type(value) in CHANGEABLE:
                self.containers.append(value)
            reason: str | None
            if _is_present(value):
                reason = f"it reads the clock by {value!r}"
            elif _is_tuple(value) or type(value) is list:
                reason = self.check_all(value)
            elif type(value) is dict:
                reason = self.check_all(list(value.values()))
            elif isinstance(value, np.ndarray) and value.dtype.hasobject:
                reason = "it reads an array of objects"
            elif (
                is_fixed(value)
                or (isinstance(value, type) and is_plain(value))
                or type(value) is np.ndarray
                or type(value).__module__ == "dask._task_spec"
                or (self.arrays and (is_array(value) or is_nothing(value)))
            ):
                reason = None
            elif callable(value):
                reason = self.check_callable(value)
            else:
                reason = f"it reads a {type(value).__module__}.{type(value).__qualname__}"
            if reason:
                return reason
        return None

    def _refuse_untrusted(self, f: Any) -> str | None:
        name = str(getattr(f, "__name__", ""))
        module = str(getattr(f, "__module__", None) or type(f).__module__)
        root = module.partition(".")[0]
        if module.startswith(("numpy.random", "cupy.random", "dask.array.random")):
            return f"it calls {module}.{name}, which draws random numbers"
        if module == "gpuscheduler.codegen.random_block":
            return "it draws random numbers that have no closed form"
        if module.startswith(("cupy.cuda", "cupy_backends")):
            return f"it calls {module}.{name}, which looks at the device"
        if name in _DASK_DENIED:
            return f"it calls {module}.{name}"
        if root in ("numpy", "cupy") and name in _NUMPY_DENIED:
            return f"it calls {root}.{name}"
        if root == "scipy" and (
            name in _SPECIAL_DENIED or name in _SCIPY_DENIED or module.startswith(_SCIPY_FILES)
        ):
            return f"it calls {module}.{name}"
        if isinstance(f, types.FunctionType) and _draws_numbers(f):
            return f"it calls {module}.{name}, which draws random numbers"
        if root == "builtins" and not _is_safe(name):
            return f"it calls {name}"
        if root not in {*TRUSTED, "dask"}:
            return f"it calls {module}.{name}"
        if root == "dask" and not module.startswith(_DASK_TRUSTED):
            return f"it calls {module}.{name}"
        return None

    def _refuse_wrapped(self, f: types.FunctionType) -> str | None:
        """Why not, for what a library's function was made to call."""
        inner = [v for v in ClosureCells.of_function(f).values() if callable(v)]
        own = f.__globals__["__name__"].startswith("gpuscheduler.")
        return None if own else self.check_all(inner)

    def _function(self, f: types.FunctionType) -> str | None:
        """Why not, for a function of a user: by what its code names."""
        self.functions.append((f, made_of(f)))
        defaults = [*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]
        for value in defaults:
            reason = self._constant(value, "a default")
            if reason:
                return reason
        if f.__code__.co_flags & _GENERATOR:
            return "it is a generator"
        if self.points and catches_errors(f.__code__):
            return f"{CATCHES} ({f.__qualname__})"
        if builtins_of(f) is not vars(builtins):
            return "it has builtins of its own"
        return self._code(f.__code__, f, ClosureCells.of_function(f))

    def _code(self, code: types.CodeType, f: types.FunctionType, cells: ClosureCells) -> str | None:
        steps = _steps(code)
        for kind, names in steps:
            if kind == "stop":
                return names[0]
            if kind == "cell":
                where: Mapping[str, Any] = cells.one_cell(names[0])
            elif names[0] in f.__globals__:
                where = f.__globals__
            else:
                where = BUILTINS
                self.reads.append((f.__globals__, names[0], None))  # as long as there is no such
            if names[0] not in where:
                if kind == "cell":
                    continue  # a variable of a function around this one, inside f
                return f"it reads {names[0]}, which is not defined"
            value = where[names[0]]
            reason = self._check_named(names, value, where)
            if reason:
                return reason
        for constant in code.co_consts:
            if _is_present(constant):
                return f"it reads the clock by {constant!r}"
            if isinstance(constant, types.CodeType):
                if constant.co_flags & _GENERATOR and constant.co_name != "<genexpr>":
                    return "it defines a generator"
                reason = self._code(constant, f, cells)
                if reason:
                    return reason
        return None

    def _check_named(
        self, names: tuple[str, ...], value: Any, where: Mapping[str, Any]
    ) -> str | None:
        """Why not, for `a.b.c` that the code reads, `a` being `value`."""
        name = names[0]
        self.reads.append((where, name, value))
        for attribute in names[1:]:
            if attribute.startswith("__"):
                return f"it reads {name}.{attribute}"
            if not isinstance(value, types.ModuleType):
                if isinstance(value, types.FunctionType):
                    return f"it reads an attribute of the function {name}"
                break  # a method or attribute of a constant
            known = value.__name__ in _MODULES or root_of(value) in ("numpy", "cupy", "cupyx")
            known = known or (value.__name__ == "scipy" and attribute == "special")
            if value.__name__.startswith("cupy.cuda"):  # which device, which stream
                return f"it uses the module {value.__name__}"
            if not known:  # of which all is looked at as what a global name stands for is
                if attribute not in vars(value):
                    return f"it uses the module {value.__name__}"
                where = vars(value)
                self.reads.append((where, attribute, where[attribute]))
            root = root_of(value)
            if attribute in _NUMPY_DENIED and root in ("numpy", "cupy"):
                return f"it reads {value.__name__}.{attribute}"
            if attribute in _SPECIAL_DENIED and root in ("scipy", "cupyx"):
                return f"it reads {value.__name__}.{attribute}"
            if not hasattr(value, attribute):
                return f"it reads {value.__name__}.{attribute}, which is not there"
            inner = getattr(value, attribute)
            if known and attribute in vars(value):  # a user may have put it there, or may do so
                self.reads.append((vars(value), attribute, inner))
            value, name = inner, f"{name}.{attribute}"
        if isinstance(value, types.ModuleType):
            return f"it passes on the module {value.__name__}"
        if callable(value):
            if where is BUILTINS:
                return None if _is_safe(name) else f"it calls {name}"
            reason = self.check_callable(value)
            if reason and isinstance(value, types.FunctionType):
                module = value.__module__
                if not is_users_code(value.__code__.co_filename, module):  # nor is the reason
                    return f"it calls {module}.{value.__qualname__}"
            return reason
        return self._constant(value, name)

    def _constant(self, value: Any, name: str) -> str | None:
        if _is_present(value):
            return f"it reads the clock by {value!r}"
        if is_fixed(value) or (self.arrays and is_array(value)):
            return None
        if type(value) is tuple:
            if any(map(is_array, value)):
                return f"it reads {name}, a tuple with an array, which can change"
            return next(filter(None, (self._constant(v, name) for v in value)), None)
        if callable(value):
            return self.check_callable(value)
        return f"it reads {name}, a {type(value).__qualname__}, which can change"


def _is_present(value: Any) -> bool:
    """Whether it means the time of the call to NumPy, as in `np.datetime64("now")`.

    >>> _is_present("Today"), _is_present(("now", 3)), _is_present("2020-01-01")
    (True, True, False)
    """
    if type(value) is tuple:
        return any(map(_is_present, value))
    return type(value) is str and value.lower() in ("now", "today")


def _draws_numbers(f: types.FunctionType) -> bool:
    """Whether a library's function takes a source of random numbers.

    >>> from scipy.sparse import random, vstack
    >>> _draws_numbers(random), _draws_numbers(vstack)
    (True, False)
    """
    code = getattr(inspect.unwrap(f), "__code__", None)
    if code is None:
        return False
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return not _DRAWN_FROM.isdisjoint(named)


_GENERATOR = 0x20 | 0x80 | 0x200  # generator, coroutine, asynchronous generator


@functools.lru_cache(maxsize=4096)
def _steps(code: types.CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a code object looks up outside itself: dotted names, or what it may not do."""
    out: list[tuple[str, tuple[str, ...]]] = []
    chain: tuple[str, list[str]] | None = None
    free = set(code.co_freevars)
    for step in dis.get_instructions(code):
        op, name = step.opname, step.argval
        if op in ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOP"):
            continue
        if op in ("LOAD_ATTR", "LOAD_METHOD") and name in _OF_TYPES:
            out.append(("stop", (f"it reads {name}",)))
        if chain is not None and op in ("LOAD_ATTR", "LOAD_METHOD"):
            chain[1].append(name)
            continue
        if chain is not None:
            out.append((chain[0], tuple(chain[1])))
            chain = None
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = ("global", [name])
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in free:
            chain = ("cell", [name])
        elif op in _FORBIDDEN_STEPS or (op in ("STORE_DEREF", "DELETE_DEREF") and name in free):
            out.append(("stop", (_FORBIDDEN_STEPS.get(op, "it writes a variable outside itself"),)))
    if chain is not None:
        out.append((chain[0], tuple(chain[1])))
    return tuple(out)


#: Attributes that say what is not so of arrays that have no values.
_OF_TYPES = ("__class__", "__dict__", "__sizeof__", "__array_interface__",
             "__cuda_array_interface__")  # fmt: skip
_FORBIDDEN_STEPS = {
    "MATCH_CLASS": "it matches a class",
    "STORE_GLOBAL": "it writes a global", "DELETE_GLOBAL": "it writes a global",
    "STORE_NAME": "it writes a global", "STORE_ATTR": "it sets an attribute",
    "DELETE_ATTR": "it sets an attribute", "IMPORT_NAME": "it imports a module",
    "LOAD_BUILD_CLASS": "it defines a class", "IMPORT_STAR": "it imports a module",
}  # fmt: skip


def _is_safe(name: str) -> bool:
    """A builtin that only looks at what it is given."""
    value = BUILTINS.get(name)
    return name in _SAFE_BUILTINS or (isinstance(value, type) and issubclass(value, BaseException))


def functions_in(function: Any) -> Iterator[Any]:
    """A function, and the functions inside it.

    These are the parts of a partial, of a composition, or of a compiled sub-graph.
    """
    yield function
    if isinstance(function, functools.partial):
        inner = [function.func, *function.args, *function.keywords.values()]
    elif type(function).__name__ == "Compose" and hasattr(function, "funcs"):
        inner = [function.first, *function.funcs]
    elif isinstance(function, types.FunctionType) and function.__code__.co_filename == COMPILED:
        inner = [v for k, v in function.__globals__.items() if k != "__builtins__"]
    else:
        return
    for value in inner:
        if callable(value):
            yield from functions_in(value)


def takes_any_arrays(function: Any) -> bool:
    """Whether a function, and those inside it, take GPUs' arrays where NumPy's are expected.

    >>> takes_any_arrays(np.transpose), takes_any_arrays(np.asarray), takes_any_arrays(lambda x: x)
    (True, False, False)
    """
    return all(map(_dispatches, functions_in(function)))


def _dispatches(f: Any) -> bool:
    kind = type(f)
    if isinstance(f, (np.ufunc, functools.partial, type)):
        return True
    if kind.__name__ in ("_ArrayFunctionDispatcher", "Compose"):
        return True
    if isinstance(f, types.FunctionType):
        if f.__code__.co_filename == COMPILED:
            return True
        if is_users(f):
            return False
    module = getattr(f, "__module__", None) or kind.__module__
    return str(module).partition(".")[0] in _DISPATCHING


def is_users(f: types.FunctionType) -> bool:
    """Not of one of the libraries whose functions are known to be pure."""
    module = str(f.__globals__.get("__name__"))
    if module.partition(".")[0] not in {*TRUSTED, "dask"} or ".tests." in module:
        return True
    if module.startswith("gpuscheduler.graphs."):  # workloads are as users write them
        return True
    home = sys.modules.get(module)
    return home is None or vars(home) is not f.__globals__


_NUMPYS = (np.dtype, np.generic)
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), slice, range, MeshAxis, *_NUMPYS,
)  # fmt: skip


def is_fixed(value: Any) -> bool:
    """A constant that nobody can change.

    >>> class Named(float):
    ...     __slots__ = ()
    >>> is_fixed((1, 2.5)), is_fixed(Named(1)), is_fixed(np.zeros(1, "i4, i4")[0])
    (True, False, False)
    """
    if type(value) is frozenset or _is_tuple(value):
        return all(is_fixed(v) for v in value)
    if isinstance(value, np.void) or (hasattr(value, "__dict__") and type(value) is not MeshAxis):
        return False  # a record is a part of its array
    return type(value) in _PLAIN or isinstance(value, _NUMPYS)


def _is_tuple(value: Any) -> bool:
    """Whether it is a tuple, maybe with names for its items, and no methods or more of its own."""
    kind = type(value)
    if kind is tuple or not isinstance(value, tuple):
        return kind is tuple
    own = {name for name in vars(kind) if not name.startswith("_")}
    return own == set(getattr(kind, "_fields", ())) and not hasattr(value, "__dict__")


def is_plain(value: Any) -> bool:
    """A constant that a task may hold."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(is_plain(v) for v in value.values())
    if isinstance(value, type):
        return root_module(value) in TRUSTED or issubclass(value, Exception)
    return isinstance(value, (*_PLAIN, np.ndarray))
