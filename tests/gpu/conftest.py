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
        assert not fake.races, fake.races[0]

    @pytest.fixture(scope="session", autouse=True)
    def kernels_for_the_host(tmp_path_factory, libraries):
        """Sources are what is 'compiled'; the host runs them, and what they touch is looked at."""
        import cupy
        import numpy as np

        from gpuscheduler.devices.cuda import kernels as cuda_kernels
        from gpuscheduler.devices.cuda import staging
        from gpuscheduler.tracing import numba_cuda
        from tests.support.cuda_on_host import Host

        host = Host(libraries)
        function = cuda_kernels.Kernels._function

        def found(kernels, made, device, single):
            function(kernels, made, device, single)  # as on a GPU: found, or compiled, and loaded

            def run(grid, block, args):
                stream = cupy.cuda.get_current_stream()
                items = np.frombuffer(args[0].tobytes(), np.uint64).reshape(-1, len(made.slots))
                for row in items[: grid[1]].tolist():
                    for slot, _, offset in made.inputs:
                        _touched((row[slot] - offset) % 2**64).read(stream)
                    own = [s[0] for s in (made.scratch, made.counters) if s]
                    for slot in (*made.outputs, *own):
                        _touched(row[slot]).write(stream)
                host.launched(made, items, grid[0], grid[1], single)

            return run

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
            patch.setattr(cuda_kernels, "compile_kernel", lambda source, *_: source.encode())
            patch.setattr(numba_cuda, "compile_call", lambda *_: b"")
            patch.setattr(cuda_kernels.Kernels, "_function", found)
            driver = staging.DriverCalls(*cupy.cuda.driver.addresses())
            patch.setattr(staging, "calls", lambda: driver)
            yield

    def _touched(address):
        found = fake.memory_at(address)
        assert found is not None, "a kernel was given an address that is no memory of a device"
        return found
