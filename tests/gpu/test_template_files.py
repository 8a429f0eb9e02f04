"""Collections on other files than an earlier one are not planned again on GPUs, too."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pipeline.test_template_files import (
    KINDS,
    Files,
    check_history,
    check_rounds,
    histories,
)

from .test_template_random import SIDES, numpy_blocks

pytestmark = pytest.mark.filterwarnings("ignore::gpuscheduler.errors.GpuUnused")


@pytest.mark.parametrize("numpy", SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_alike_files_are_planned_once(tmp_path, planned, kind, numpy):
    with numpy_blocks(numpy=numpy):
        check_rounds(Files(tmp_path), kind, inline=False)
    if numpy != "gpu" or KINDS.index(kind) > 2:  # kernels read small memory maps as a whole
        assert len(planned) <= 2  # a graph may be read twice


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories(), st.sampled_from(SIDES), st.booleans())
def test_any_history_of_files(tmp_path_factory, history, numpy, timeline):
    files = Files(tmp_path_factory.mktemp("files"))
    check_history(files, history, numpy_blocks(numpy=numpy, timeline=timeline))
