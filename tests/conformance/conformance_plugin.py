"""A pytest plugin which makes Dask's own tests, unchanged, call another `get`.

What it does:

* redirects every way in which those tests reach a local scheduler (names, modules, the defaults of
  the collections, the config) to the scheduler under test, before the test modules are imported;
* counts the calls, because a forced scheduler that nobody calls passes every test;
* marks the tests of `known_failures.py` as allowed to fail, and skips the few that cannot hold for
  any forced parallel scheduler;
* hides CuPy on a machine without a CUDA device, where `import cupy` works and nothing else does;
* writes one JSON report of all this for the runner (`run.py`).

What it does not: choose tests, or judge the outcome. It is loaded by its top-level name, so that
`test_get_contract.py` can import `get` from the very module that pytest has loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import known_failures
import pytest

SCHEDULER_VARIABLE = "CONFORMANCE_SCHEDULER"  # for the children that a contract test starts
DEFAULT_SCHEDULER = "gpuscheduler:get"

# Tests of how Dask *selects* a scheduler. They run with everything redirected but the config,
# which would decide what they ask.
SELECTION_TESTS = (
    "test_callable_scheduler",
    "test_custom_scheduler",
    "test_default_scheduler",
    "test_emscripten",
    "test_get_scheduler",
    "test_num_workers_config",
    "test_process_initializer",
    "test_raise_get_keyword",
    "test_scheduler_keyword",
    "test_use_cloudpickle",
)

# Tests which no forced parallel scheduler can pass, by construction.
NOT_APPLICABLE = {
    "test_compute_array_bag": "asserts that Array and Bag have different default schedulers",
    "test_persist_array_bag": "asserts that Array and Bag have different default schedulers",
    "test_complex_ordering": "asserts the order in which one thread runs dask.order",
    "test_persist_shorten_traceback": "a scheduler with a persist of its own is one more level",
    "test_store_delayed_target": "looks for arrays in a persisted graph, where ours has tasks",
    "test_store_regions": "looks for arrays in a persisted graph, where ours has tasks",
    "test_ordering": "asserts the order in which one thread runs dask.order",
    "test_local_parents_of_reduction": "asserts the order in which one thread runs dask.order",
    "test_temporary_directory": "asserts on the processes that Bag starts by default",
    "test_array_notimpl_function_dask": "asserts that Dask lacks what our import registers",
    "test_non_existent_func": "asserts that Dask lacks what our import registers",
}

# ... and those that no program can pass.
NOT_FUSED = {
    "test_array_cumreduction_axis[blelloch-None-False-cumprod]": "expects a warning of NumPy's",
    "test_array_cumreduction_axis[blelloch-None-True-cumprod]": "expects a warning of NumPy's",
    "test_array_cumreduction_axis[blelloch-None-False-nancumprod]": "expects a warning of NumPy's",
    "test_array_cumreduction_axis[blelloch-None-True-nancumprod]": "expects a warning of NumPy's",
    "test_svd_compressed_compute[power]": "expects the bits of a vector of the singular value 0",
}

# ... and those that ask the stand-in for CUDA for what it has not.
NOT_ON_STAND_IN = {
    "test_scipy_sparse_indexing[cupyx": "CuPy's sparse matrices",
    "test_randomstate_kwargs": "CuPy's RandomState",
}

SKIPPED_MARKS = {
    "slow": "slow: Dask skips it too without --runslow",
    "array_expr": "about dask.array's own expressions: Dask skips it too without --runarrayexpr",
}

Get = Callable[..., Any]


def load_scheduler(spec: str) -> Get:
    """The object that `module:attribute` names.

    >>> load_scheduler("dask.threaded:get").__module__
    'dask.threaded'
    """
    module, _, attribute = spec.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


class Under:
    """The scheduler under test, and how often it was really called."""

    def __init__(self) -> None:
        self.spec = os.environ.get(SCHEDULER_VARIABLE, DEFAULT_SCHEDULER)
        self.get: Get | None = None
        self.calls = 0
        self.errors = 0
        self.graph_types: Counter[str] = Counter()
        self.coverage: Any = None  # the bytes that GPUs touch, where NumPy's arrays are on them
        self._lock = threading.Lock()

    def count(self, dsk: Any, failed: bool) -> None:
        with self._lock:
            self.calls += 1
            self.errors += failed
            self.graph_types[type(dsk).__name__] += 1
            if self.coverage is not None:
                self.coverage.add_runs()

    def counts(self) -> dict[str, Any]:
        return {
            "calls": self.calls, "errors": self.errors, "graph_types": dict(self.graph_types),
            "coverage": {} if self.coverage is None else self.coverage.numbers(),
        }  # fmt: skip


under_test = Under()


def get(dsk: Any, keys: Any, **kwargs: Any) -> Any:
    """The scheduler under test, counted. One frame only: Dask tests what a traceback shows."""
    assert under_test.get is not None, "no scheduler is loaded: use run.py"
    failed = True
    try:
        values = under_test.get(dsk, keys, **kwargs)
        failed = False
        return values
    finally:
        under_test.count(dsk, failed)


def scheduler_spec() -> str:
    """What `get` stands for, for tests of one scheduler only."""
    return under_test.spec


def force(spec: str) -> None:
    """Redirect Dask's local schedulers to the one that `spec` names."""
    import dask
    import dask.base
    import dask.local
    import dask.threaded

    under_test.spec = spec
    os.environ[SCHEDULER_VARIABLE] = spec
    # Taken before anything is replaced: `dask.threaded:get` must not call itself.
    under_test.get = load_scheduler(spec)
    client = getattr(under_test.get, "__self__", under_test.get)
    if hasattr(client, "persist"):  # dask.persist looks for it there
        get.persist = client.persist  # type: ignore[attr-defined]

    # Dask's assert_eq asks for scheduler="sync" by name, whatever the config says.
    for name in ("sync", "synchronous", "single-threaded", "threads", "threading"):
        dask.base.named_schedulers[name] = get
    for owner, name in ((dask, "get"), (dask.local, "get_sync"), (dask.threaded, "get")):
        setattr(owner, name, get)
    for module, classes in (
        ("dask.delayed", ("Delayed",)),
        ("dask.array.core", ("Array",)),
        ("dask.bag.core", ("Bag", "Item")),
    ):
        # import_module, because the attribute `dask.delayed` is a function
        collections = importlib.import_module(module)
        for name in classes:
            getattr(collections, name).__dask_scheduler__ = staticmethod(get)

    # Dask cuts the frames of these files out of a user's traceback; the frame of `get` above is
    # the harness's own, so it goes too. A scheduler has to see to its own frames.
    shortened = [*dask.config.get("admin.traceback.shorten"), re.escape(__file__)]
    if under_test.coverage is not None:
        shortened.append(re.escape(importlib.import_module("graphs.bench.coverage").__file__))
    dask.config.set({"admin.traceback.shorten": shortened})


def fuse_all() -> None:
    """Make every task a program that can be one, however small."""
    import dask

    from gpuscheduler.pipeline import compile

    dask.config.set({"gpuscheduler.fuse-least": 0})
    compile.FUSE_FEWEST["cpu"] = 1


def cuda_devices() -> int:
    """How many devices the CUDA driver lists, without importing CuPy. 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def hide_cupy() -> None:
    """Make `import cupy` fail, as on a machine where it is not installed."""
    for module in ("cupy", "cupyx", "cupyx.scipy", "cupyx.scipy.sparse"):
        sys.modules[module] = None  # type: ignore[assignment]


#: Set by run.py to the option `numpy`: NumPy's arrays are computed on the stand-in for CUDA.
NUMPY_ON_GPUS = "CONFORMANCE_NUMPY_ON_GPUS"

# On import, because that is before any other plugin: zarr is one, and imports CuPy when it can.
if not cuda_devices() and NUMPY_ON_GPUS not in os.environ:
    hide_cupy()


def numpy_on_gpus(mode: str) -> None:
    """Compute NumPy's arrays on two devices of the stand-in, whose kernels NumPy evaluates.

    With the mode "auto" a coin says where each plan runs, whatever it costs.
    """
    import dask

    from graphs.bench.coverage import Coverage
    from tests.support import interpreted_kernels

    interpreted_kernels.install()
    options = {"devices": "cuda:0,0", "numpy": mode}
    dask.config.set({f"gpuscheduler.{name}": value for name, value in options.items()})
    if mode == "auto":
        interpreted_kernels.flip_coins()
    under_test.coverage = Coverage().__enter__()  # until the process ends


def test_name(item: pytest.Item) -> str:
    """`dask/array/tests/test_wrap.py::test_ones`: the same wherever Dask is installed."""
    path, _, name = item.nodeid.partition("::")
    module = getattr(item, "module", None)
    if module is not None:
        path = module.__name__.replace(".", "/") + ".py"
    return f"{path}::{name}"


def is_selection_test(name: str) -> bool:
    return name.startswith(SELECTION_TESTS)


class Outcomes:
    """What became of each test, and what each process counted. Lives in the controller."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: Counter[str] = Counter()
        self.failures: set[str] = set()
        self.known: dict[str, str] = {}  # listed test -> what it did this time
        self.processes: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = str(dict(report.user_properties).get("conformance_name", report.nodeid))
        listed = known_failures.reason(name) is not None
        if report.failed:
            self.outcomes["failed" if report.when == "call" else "error"] += 1
            self.failures.add(name)
        elif report.skipped:
            expected = hasattr(report, "wasxfail")
            self.outcomes["xfailed" if expected else "skipped"] += 1
            if listed and expected:
                self.known[name] = "failed"
        elif report.when == "call":
            unexpected = hasattr(report, "wasxfail")
            self.outcomes["xpassed" if unexpected else "passed"] += 1
            if listed:
                self.known[name] = "passed"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        counts = getattr(node, "workeroutput", {}).get("conformance")
        if counts is not None:
            self.processes.append(counts)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        processes = [*self.processes, under_test.counts()]
        types: Counter[str] = Counter()
        found = under_test.coverage
        coverage: Counter[str] = Counter()
        for counts in processes:
            types.update(counts["graph_types"])
            coverage.update(counts["coverage"])
        self.path.write_text(
            json.dumps(
                {
                    "outcomes": dict(self.outcomes),
                    "failures": sorted(self.failures),
                    "known": dict(sorted(self.known.items())),
                    "calls": sum(counts["calls"] for counts in processes),
                    "errors": sum(counts["errors"] for counts in processes),
                    "graph_types": dict(types.most_common()),
                    "coverage": "" if found is None else str(type(found)(**coverage)),
                }
            )
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--conformance-scheduler", metavar="MODULE:ATTR", default=DEFAULT_SCHEDULER)
    group.addoption("--conformance-report", metavar="PATH", default=None)
    group.addoption("--conformance-all-failures", action="store_true")
    group.addoption("--conformance-fuse-all", action="store_true")


# Before any conftest.py, which may import from Dask what is to be redirected.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    known = early_config.known_args_namespace
    if NUMPY_ON_GPUS in os.environ:
        numpy_on_gpus(os.environ[NUMPY_ON_GPUS])
    force(known.conformance_scheduler)
    if known.conformance_fuse_all:
        fuse_all()


def pytest_configure(config: pytest.Config) -> None:
    # begun in the background of a shell without job control, it would be ignored, and tests wait
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report = config.getoption("--conformance-report")
    if report and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(report)), "conformance-outcomes")


def pytest_report_header(config: pytest.Config) -> str:
    return f"scheduler under test: {under_test.spec}; CUDA devices: {cuda_devices()}"


# First, so that a `-m` expression sees the same marks as always and xdist the same list everywhere.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = test_name(item)
        item.user_properties.append(("conformance_name", name))
        base = getattr(item, "originalname", item.name)
        if base in NOT_APPLICABLE:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {NOT_APPLICABLE[base]}"))
        fused = config.getoption("--conformance-fuse-all") or NUMPY_ON_GPUS in os.environ
        if item.name in NOT_FUSED and fused:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {NOT_FUSED[item.name]}"))
        if NUMPY_ON_GPUS in os.environ:
            for start, why in NOT_ON_STAND_IN.items():
                if item.name.startswith(start):
                    item.add_marker(pytest.mark.skip(reason=f"not applicable: {why}"))
        for keyword, why in SKIPPED_MARKS.items():
            if keyword in item.keywords:
                item.add_marker(pytest.mark.skip(reason=why))
        why_known = known_failures.reason(name)
        if why_known is not None and not config.getoption("--conformance-all-failures"):
            # Not strict: it may pass with other versions of NumPy, zarr, ... In front, because
            # pytest heeds the first xfail of a test, and Dask's own ones are strict.
            mark = pytest.mark.xfail(reason=f"known: {why_known}", strict=False)
            item.add_marker(mark, append=False)


@pytest.fixture(autouse=True)
def _forced_by_config(request: pytest.FixtureRequest) -> Iterator[None]:
    import dask

    if is_selection_test(request.node.name):
        yield
    else:
        with dask.config.set(scheduler=get):
            yield


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a worker of xdist: send what it counted to the controller
        output["conformance"] = under_test.counts()
