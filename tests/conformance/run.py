"""Run Dask's own tests, unchanged, through `gpuscheduler.get` (or through another scheduler).

    python tests/conformance/run.py TARGET [-n WORKERS] [--scheduler MODULE:ATTR] [pytest args]
    python tests/conformance/run.py array --gpu   # dask.array's CuPy tests; needs a CUDA device

Each target is a run of pytest in a process of its own. At the end it prints what happened, how
often the scheduler was really called, and which of the failures that Dask's threaded scheduler
also has were met. It exits with an error when any other test failed, when a run broke off, and
when a run never called the scheduler.

It installs nothing, and measures nothing but the time that each target took.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# What pytest collects. Modules which the installed Dask does not have are left out.
TARGETS: dict[str, tuple[str, ...]] = {
    "core": (
        "dask.tests.test_base",
        "dask.tests.test_cache",
        "dask.tests.test_callbacks",
        "dask.tests.test_composite_expr",
        "dask.tests.test_context",
        "dask.tests.test_core",
        "dask.tests.test_expr",
        "dask.tests.test_graph_manipulation",
        "dask.tests.test_highgraph",
        "dask.tests.test_hlgexpr",
        "dask.tests.test_layers",
        "dask.tests.test_local",
        "dask.tests.test_order",
        "dask.tests.test_task_spec",
        "dask.tests.test_threaded",
        "dask.tests.test_traceback",
        "dask.tests.test_typing",
        "dask.tests.test_utils_test",
        "dask.diagnostics.tests",
    ),
    "bag": ("dask.bag.tests",),
    "delayed": ("dask.tests.test_delayed",),
    "array": ("dask.array.tests",),
    "array-fast": tuple(
        f"dask.array.tests.test_{module}"
        for module in (
            *("array_core", "atop", "creation", "gufunc", "linalg", "map_blocks", "masked"),
            *("optimization", "overlap", "random", "rechunk", "reductions", "shuffle"),
            *("slicing", "sparse", "ufunc"),
        )
    ),
    "dask_array": ("dask_array.tests",),
}
# In one process: half of the time of small ones goes into their beginning.
TARGETS["but-arrays"] = TARGETS["core"] + TARGETS["bag"] + TARGETS["delayed"]
# What is most about fusion, in a quarter of the time; every task that can be a program is one.
TARGETS["array-fused"] = tuple(
    f"dask.array.tests.test_{module}"
    for module in ("creation", "map_blocks", "overlap", "random", "reductions", "slicing", "ufunc")
)
FUSED = ("array-fused",)
# NumPy's arrays on the stand-in for CUDA: Dask's tests, and those of libraries on top of Dask.
TARGETS["numpy-gpu"] = TARGETS["array-fast"]
TARGETS["xarray-gpu"] = ("xarray.tests.test_dask", "xarray.tests.test_duck_array_ops")
ON_GPUS = ("numpy-gpu", "xarray-gpu")
# Half of the time of test_reductions goes into quantiles, each of which is one map_blocks.
PYTEST_ARGS: dict[str, tuple[str, ...]] = {
    "contract": ("-W", "error"),
    "array-fast": ("-k", "not quantile"),
    "array-fused": ("-k", "not quantile"),
    "numpy-gpu": ("-k", "not quantile"),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "ci": ("contract", "but-arrays", "array-fast", "array-fused"),
    "all": ("contract", "core", "bag", "delayed", "array", "dask_array"),
}
CHOICES = ("contract", *TARGETS, *GROUPS)


@dataclass(frozen=True)
class Run:
    """What one pytest process did."""

    target: str
    exit_status: int
    seconds: float
    outcomes: dict[str, int]
    failures: list[str]  # the known ones are not among them
    known: dict[str, str]  # listed test -> "failed" or "passed"
    calls: int  # of the scheduler under test
    errors: int  # calls that raised, as many tests ask for
    graph_types: dict[str, int]
    coverage: str = ""  # what GPUs touched, in words, of targets with NumPy's arrays on them

    @property
    def problem(self) -> str | None:
        """Why this run counts as a failure, in words."""
        if self.failures:
            return f"{len(self.failures)} failed"
        if self.exit_status != 0:
            return f"pytest exited with {self.exit_status}"
        if not self.calls:
            return "the scheduler under test was never called"
        return None


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def what_to_collect(target: str) -> list[str]:
    """The arguments by which pytest finds the tests of `target`."""
    if target == "contract":
        return [str(HERE / "test_get_contract.py")]
    modules = [module for module in TARGETS[target] if installed(module)]
    if target == "dask_array" and modules:
        # A path, so that pytest reads the options in its conftest.py in time.
        spec = importlib.util.find_spec("dask_array")
        assert spec is not None
        assert spec.origin is not None
        return [str(Path(spec.origin).parent / "tests")]
    return ["--pyargs", *modules] if modules else []


def run_target(target: str, options: argparse.Namespace, pytest_args: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # The contract starts threads, counts them and interrupts processes: one worker.
        workers = 0 if target == "contract" else options.n
        command = [
            *(sys.executable, "-m", "pytest", "-p", "conformance_plugin"),
            *("-c", str(HERE / "conformance.ini"), "--rootdir", str(HERE)),
            *("-p", "no:cacheprovider", "-q", "-rfE"),
            *("--conformance-scheduler", options.scheduler, "--conformance-report", str(report)),
            *(["--conformance-all-failures"] if options.all_failures else []),
            *(["--conformance-fuse-all"] if options.fuse_all or target in FUSED else []),
            *(["-n", str(workers)] if workers else []),
            *("-m", "gpu" if options.gpu else "not gpu"),
            *what_to_collect(target),
            *PYTEST_ARGS.get(target, ()),
            *pytest_args,
        ]
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH")]
        more = {}
        if target in ON_GPUS:
            paths.insert(0, str(ROOT / "tests" / "support" / "fake_cuda"))
            more["CONFORMANCE_NUMPY_ON_GPUS"] = options.numpy
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)} | more
        started = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, check=False)
        seconds = time.perf_counter() - started
        said: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return Run(
        target=target,
        exit_status=done.returncode,
        seconds=seconds,
        outcomes=said.get("outcomes", {}),
        failures=said.get("failures", []),
        known=said.get("known", {}),
        calls=said.get("calls", 0),
        errors=said.get("errors", 0),
        graph_types=said.get("graph_types", {}),
        coverage=said.get("coverage", ""),
    )


def describe(run: Run) -> str:
    """The lines about one run.

    >>> run = Run("bag", 0, 25.0, {"passed": 244}, [], {"dask/t.py::t": "failed"}, 533, 9, {})
    >>> print(describe(run))
    bag: ok: 244 passed, 25 s; the scheduler was called 533 times (9 raised)
      known failure, as listed: dask/t.py::t
    """
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(run.outcomes.items()))
    lines = [
        f"{run.target}: {run.problem or 'ok'}: {outcomes or 'no tests'}, {run.seconds:.0f} s; "
        f"the scheduler was called {run.calls} times ({run.errors} raised)"
    ]
    if run.graph_types:
        types = ", ".join(f"{count} {name}" for name, count in run.graph_types.items())
        lines.append(f"  graphs: {types}")
    if run.coverage:
        lines.append(f"  {run.coverage}")
    for name, outcome in run.known.items():
        listed = "known failure, as listed" if outcome == "failed" else "listed, and passed here"
        lines.append(f"  {listed}: {name}")
    lines += [f"  FAILED, not a known failure: {name}" for name in run.failures]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python tests/conformance/run.py",
        description="Run Dask's own tests through a scheduler.",
    )
    parser.add_argument("target", choices=CHOICES)
    parser.add_argument("--scheduler", default="gpuscheduler:get", metavar="MODULE:ATTR")
    parser.add_argument("-n", type=int, default=2, help="pytest-xdist workers; 0 for none")
    parser.add_argument(
        "--gpu", action="store_true", help="array: run the tests marked gpu instead"
    )
    parser.add_argument(
        "--all-failures", action="store_true", help="do not allow the known failures"
    )
    parser.add_argument(
        "--fuse-all", action="store_true", help="make programs of tasks however small they are"
    )
    parser.add_argument(
        "--numpy", choices=("gpu", "auto", "host"), default="gpu",
        help="where the targets ...-gpu compute; auto flips a coin for each plan",
    )  # fmt: skip
    options, pytest_args = parser.parse_known_args(arguments)
    if options.gpu and options.target != "array":
        parser.error("only the target array has tests marked gpu")
    return options, pytest_args


def main(arguments: Sequence[str] | None = None) -> int:
    options, pytest_args = parse(arguments)
    runs = []
    for target in GROUPS.get(options.target, (options.target,)):
        if what_to_collect(target):
            runs.append(run_target(target, options, pytest_args))
        elif target == options.target:
            print(f"{target}: none of its tests are installed")
            return 1
        else:
            print(f"{target}: left out, its tests are not installed")
    print(f"\nConformance of {options.scheduler}:")
    for run in runs:
        print(describe(run))
    return int(any(run.problem for run in runs))


if __name__ == "__main__":
    sys.exit(main())
