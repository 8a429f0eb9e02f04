"""Tests here need CUDA devices; one marked `gpus(n)` needs n. Without them they are skipped."""

import pytest

from gpuscheduler.scheduler import cuda_devices


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(n): needs at least n CUDA devices")


def pytest_collection_modifyitems(items):
    here = cuda_devices()
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        asked = item.get_closest_marker("gpus")
        need = asked.args[0] if asked else 1
        if here < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA devices, there are {here}"))
