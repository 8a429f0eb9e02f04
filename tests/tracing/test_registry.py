"""The functions that a trace knows, against a list of their names.

Modules of `tracing/functions/` enter them when they are imported, and some fill only free places: a
changed order of imports shows here. `python -m tests.tracing.test_registry` writes the list anew.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).with_name("known_functions.txt")


def name_of(function):
    """The name of a function; that of a ufunc's method with the ufunc's name."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    name = name or type(function).__name__
    owner = getattr(function, "__self__", None)
    return f"{owner.__name__}.{name}" if isinstance(owner, np.ufunc) else name


def known_functions():
    """A line for each entry: its table, the function, and the function that stands for it."""
    import gpuscheduler.tracing.trace  # noqa: F401
    from gpuscheduler.tracing import array, compressed, registry

    tables = {
        "FUNCTIONS": array.FUNCTIONS,
        "METHODS": array.METHODS,
        "OVER_POINTS": compressed.OVER_POINTS,
        "KNOWN": registry.KNOWN,
        "KNOWN_CURRIED": registry.KNOWN_CURRIED,
        "NUMPY": {name: own for name, (_, own) in registry.NUMPY.own.items()},
        "CUPY": {name: own for name, (_, own) in registry.CUPY.own.items()},
    }
    for module, namespace in registry.OF_NUMBERS.items():
        tables[f"OF_NUMBERS[{module.__name__}]"] = {
            name: own for name, (_, own) in namespace.own.items()
        }
    return sorted(
        f"{table} {key if isinstance(key, str) else name_of(key)} -> {name_of(own)}"
        for table, entries in tables.items()
        for key, own in entries.items()
    )


def listed_in_new_process():
    """The list without what other tests have imported."""
    command = [sys.executable, "-m", "tests.tracing.test_registry", "-"]
    root = Path(__file__).parents[2]
    out = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    return out.stdout.splitlines()


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="has fewer functions")
def test_trace_knows_the_functions_of_the_list():
    assert listed_in_new_process() == GOLDEN.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    text = "".join(f"{line}\n" for line in known_functions())
    if sys.argv[1:]:
        sys.stdout.write(text)
    else:
        GOLDEN.write_text(text, encoding="utf-8")
