"""Run CUDA kernels on the host with the stand-in for CuPy, and look at what they touch."""

from contextlib import contextmanager

import pytest


@contextmanager
def kernels_on_host(libraries, cache):
    """Compile sources as C++ and launch them on the host, while this is entered.

    `libraries` is the folder of compiled kernels, `cache` the one of the package's disk cache.
    Yields the `Host` that launches them.
    """
    import cupy
    import numpy as np
    from cupy import _device as fake

    from gpuscheduler.devices.cuda import kernel_code, staging
    from gpuscheduler.tracing import numba_cuda
    from tests.support.cuda_on_host import Host

    host = Host(libraries)
    function = kernel_code.KernelCode._function

    def touched(address):
        found = fake.memory_at(address)
        assert found is not None, "a kernel was given an address that is no memory of a device"
        return found

    def found(code, made, device, single):
        function(code, made, device, single)  # as on a GPU: found, or compiled, and loaded

        def run(grid, block, args):
            stream = cupy.cuda.get_current_stream()
            items = np.frombuffer(args[0].tobytes(), np.uint64).reshape(-1, len(made.slots))
            for row in items[: grid[1]].tolist():
                for slot, _, offset in made.inputs:
                    touched((row[slot] - offset) % 2**64).read(stream)
                own = [s[0] for s in (made.scratch, made.counters) if s]
                for slot in (*made.outputs, *own):
                    touched(row[slot]).write(stream)
            host.launched(made, items, grid[0], grid[1], single)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(kernel_code, "compile_kernel", lambda source, *_: source.encode())
        patch.setattr(numba_cuda, "compile_call", lambda *_: b"")
        patch.setattr(kernel_code.KernelCode, "_function", found)
        driver = staging.DriverCalls(*cupy.cuda.driver.addresses())
        patch.setattr(staging, "calls", lambda: driver)
        yield host
