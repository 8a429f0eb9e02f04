"""Private names of Numba, in one place, and what is lost without each.

They were seen in Numba 0.61 to 0.68 and numba-cuda 0.20 to 0.31. `tests/test_private_names.py`
looks each up. Nothing of Numba is imported before a function here is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

#: Each private name, and what no longer works without it.
LOST = {
    "numba.core.bytecode.FunctionIdentity._unique_ids": "compiled functions are kept on disk",
    "numba.core.compiler.CompileResult._rebuild": "compiled functions are kept on disk",
    "numba.core.compiler.CompileResult._reduce": "compiled functions are kept on disk",
}


def dispatcher_of(function: Any) -> Any:
    """Return the dispatcher inside a function of `numba.vectorize`; others as they are."""
    return getattr(function, "_dispatcher", function)


def keep_ufunc_by(made: Any, cache: Any) -> None:
    """Have `cache` keep what `numba.vectorize` compiles."""
    made._dispatcher.cache = cache


def keep_gufunc_by(made: Any, cache: Any) -> None:
    """Have `cache` keep what `numba.guvectorize` compiles."""
    made.gufunc_builder.nb_func.cache = cache


def number_functions(identities: str, numbers: Iterator[int]) -> bool:
    """Take the numbers of functions that are compiled from now on from an iterator.

    `identities` is the module that has Numba's `FunctionIdentity`. False where there are no such
    numbers.
    """
    try:
        identity = import_module(identities).FunctionIdentity
        next(identity._unique_ids)
    except (ImportError, AttributeError, TypeError):
        return False
    identity._unique_ids = numbers
    return True


def result_state(result: Any) -> Any:
    """Return what Numba has compiled, as it can be pickled."""
    return result._reduce()


def result_of(context: Any, state: Any) -> Any:
    """Return what Numba has compiled, from `result_state`."""
    return import_module("numba.core.compiler").CompileResult._rebuild(context, *state)


@contextmanager
def device_capability(dispatcher: Any, capability: tuple[int, int]) -> Iterator[None]:
    """Tell numba-cuda's `dispatcher` module a compute capability in place of the device's.

    There may be no device, and Numba would compile called functions for the current one.
    """
    before = dispatcher.get_current_device
    device = SimpleNamespace(compute_capability=capability)
    dispatcher.get_current_device = lambda: device
    try:
        yield
    finally:
        dispatcher.get_current_device = before
