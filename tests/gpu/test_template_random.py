"""Rounds of a Monte Carlo loop with new seeds are planned once on GPUs, too."""

from __future__ import annotations

from contextlib import contextmanager

import dask
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from tests.pipeline.test_template_random import PROGRAMS, check_history, check_rounds, histories

pytestmark = pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused")
SIDES = ["host", "auto", "gpu"]


@contextmanager
def numpy_blocks(**options):
    """A scheduler of GPUs, with which Dask makes NumPy's arrays."""
    with (
        Scheduler(devices="cuda:0,0", fuse_least=0, **options),
        dask.config.set({"array.backend": "numpy"}),
    ):
        yield


@pytest.mark.parametrize("numpy", SIDES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rounds_with_other_seeds_are_planned_once(planned, name, numpy):
    with numpy_blocks(numpy=numpy):
        check_rounds(PROGRAMS[name], planned)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.sampled_from(SIDES), st.booleans())
def test_any_history_of_seeds(history, numpy, timeline):
    check_history(history, numpy_blocks(numpy=numpy, timeline=timeline))
