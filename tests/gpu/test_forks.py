"""Children that are forked while GPUs are in use, where CUDA does not work."""

from __future__ import annotations

import os

import pytest

cupy = pytest.importorskip("cupy")

import dask

from gpuscheduler import Scheduler
from tests.runtime.test_forks import in_a_child, total

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def backend():
    return dask.config.get("array.backend", "numpy")


def test_a_child_of_a_scheduler_over_every_gpu_computes_on_the_host():
    before = backend()
    with Scheduler():
        total()
        inside = backend()
        assert in_a_child(lambda: (total(), backend())) == (200_000.0, before)
        assert (total(), backend()) == (200_000.0, inside)


def test_a_child_of_a_scheduler_over_named_gpus_says_that_they_do_not_work():
    with Scheduler("cuda:0,0"):
        total()
        got = in_a_child(total)  # the stand-in for CUDA works in children
        assert got == 200_000.0 or "GPUs do not work in a process that was forked" in got
        assert total() == 200_000.0
