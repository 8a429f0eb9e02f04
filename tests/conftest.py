"""The repository's root is importable: tests use `graphs` from the source tree."""

import gc
import os
import sys
import time
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from dask import config

import gpuscheduler
from gpuscheduler.frontend import lowering
from gpuscheduler.plan import working_memory
from gpuscheduler.runtime import dask_config

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Where kernels that are compiled for the host are kept: one directory for all workers."""
    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "libraries"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture
def only_new_garbage():
    """Hide older objects from the garbage collector.

    A test that collects garbage many times would look at all modules each time, for a fifth of a
    second. Meanwhile no run puts anything aside by itself.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=[1, 2, 3])
def like_gpus(request, monkeypatch):
    """CPU devices that are planned for as GPUs are: blocks have a home, and stay there."""
    devices = request.param
    with gpuscheduler.Scheduler(f"cpu:{devices}", fuse_least=0) as s:
        monkeypatch.setattr(s.hardware, "kind", "cuda")

        def home(value):
            block = isinstance(value, np.ndarray) and value.ndim == 2 and value.size > 1
            return crc32(value.tobytes()) % devices if block else None

        monkeypatch.setattr(s.hardware, "home", home)
        yield s


@pytest.fixture
def planned(monkeypatch):
    """Grows by one with each plan that is made."""
    calls = []
    real = lowering.from_dask

    def counting(dsk, keys, *args, **kwargs):
        calls.append(keys)
        return real(dsk, keys, *args, **kwargs)

    monkeypatch.setattr(lowering, "from_dask", counting)
    return calls


@pytest.fixture(autouse=True)
def _nothing_was_seen_before():
    """What tasks take is not known from other tests, or from whoever has worked here."""
    files = {}
    with pytest.MonkeyPatch.context() as patch:  # a test's own is undone before its fixtures are
        patch.setattr(working_memory, "known_working_memory", lambda kind: files.get(kind, {}))
        patch.setattr(working_memory, "keep", files.__setitem__)
        yield


@pytest.fixture(autouse=True)
def _dask_says_no_other_scheduler(request, _before=[]):  # noqa: B006
    """A client that is closed puts back what Dask's configuration was when it began: another one,
    maybe, that is gone. It does so late, in its own thread; tests that know nothing of it wait, and
    say after which test there is one that nobody has."""
    last, _before[:] = (_before or ["none"])[0], [request.node.nodeid]
    if "distributed" in sys.modules:
        from distributed.client import Client, _get_global_client

        end = time.monotonic() + 10
        while any(c.status == "closing" for c in list(Client._instances)):
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        if _get_global_client() is not None:
            return
    if (found := config.get("scheduler", None)) is not None and not dask_config._current:
        config.pop("scheduler")
        pytest.fail(f"nobody is there, but Dask's configuration has {found!r}: see {last}")
