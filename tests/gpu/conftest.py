"""Tests here need CUDA devices; one marked `gpus(n)` needs n. Without them they are skipped.

With tests/support/fake_cuda first on PYTHONPATH the devices are the host, kernels are
compiled as C++, and each test fails that leaves a race; what needs a real one is marked `real`.
Of a test of very many cases, marked `sampled(n)`, all run on GPUs, and there one of n: the same
ones each time, drawn by their names, or all with GPUSCHEDULER_ALL set.
"""

import os
import shutil
from hashlib import sha256

import pytest

from gpuscheduler.devices.choose import cuda_devices

try:
    from cupy import _device as fake
except ImportError:
    fake = None


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(n): needs at least n CUDA devices")
    config.addinivalue_line("markers", "real: needs a real CUDA device")
    config.addinivalue_line("markers", "sampled(n): one of n cases where there is no GPU")


def pytest_collection_modifyitems(config, items):
    if fake and "GPUSCHEDULER_ALL" not in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if not _drawn(item)])
        items[:] = filter(_drawn, items)
    here = cuda_devices()
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        asked = item.get_closest_marker("gpus")
        need = asked.args[0] if asked else 1
        if here < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA devices, there are {here}"))
        elif fake and item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason="needs a real CUDA device"))
        elif fake and shutil.which("g++") is None:
            item.add_marker(pytest.mark.skip(reason="there is no g++ to compile kernels with"))


def _drawn(item):
    sampled = item.get_closest_marker("sampled")
    return not sampled or sha256(item.name.encode()).digest()[0] % sampled.args[0] == 0


if fake:

    @pytest.fixture(autouse=True)
    def no_races():
        for stream in fake.every_stream():
            stream.synchronize()  # what another test has left, on purpose maybe
        fake.races.clear()
        yield
        left = [stream for stream in fake.here.streams.values() if stream.ptr]
        fake.here.streams.clear()  # or the next test would begin there
        assert not fake.races, fake.races[0]
        assert not left, f"the test has left {left} current in its thread"

    @pytest.fixture(scope="session", autouse=True)
    def kernels_for_the_host(tmp_path_factory, libraries):
        """Sources are what is 'compiled'; the host runs them, and what they touch is looked at."""
        from tests.support.host_kernels import kernels_on_host

        with kernels_on_host(libraries, tmp_path_factory.mktemp("cache")):
            yield
