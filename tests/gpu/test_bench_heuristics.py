"""The tool that measures numbers of the table beside other values."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from gpuscheduler.codegen.cuda import tuning
from gpuscheduler.tracing import abstract, trace
from graphs.bench import heuristics


@pytest.mark.parametrize("n", range(len(heuristics.CASES)))
def test_other_values_make_other_kernels(n):
    case = heuristics.CASES[n]
    foreseen = tuple(abstract.AbstractArray(s, np.dtype(case.dtype)) for s in case.shapes(2**28))
    program = trace.trace_function(case.function, foreseen)
    names, as_it_is = case.number.split(", "), heuristics.describe_launches(program)
    before = [getattr(tuning, name) for name in names]
    with heuristics.changed(case.number, case.other):
        assert heuristics.describe_launches(program) != as_it_is
    assert [getattr(tuning, name) for name in names] == before


def test_it_compares_and_measures(monkeypatch, capsys):
    words = ["heuristics", "--only", "ROW_WAVES", "--mib", "1", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", words)
    heuristics.main()
    assert "ROW_WAVES" in capsys.readouterr().out
