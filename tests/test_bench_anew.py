"""The table of graphs/bench/anew.py: each workload has a row, and values are compared."""

import sys

import numpy as np
import pytest

from graphs.bench import anew


def test_the_table_has_a_row_for_each_workload(monkeypatch, capsys):
    names = ["gauss_sum", "x + 1", "haversine_mesh"]
    words = ["anew", "--devices", "cpu:2", "--blocks", "4", "--rounds", "1", "--new-data"]
    monkeypatch.setattr(sys, "argv", [*words, "--only", ",".join(names)])
    anew.main()
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row[:24].strip() for row in rows] == ["gauss_sum", "haversine_mesh", "x + 1"]
    for row in rows:
        blocks, build, again, new, ratio = map(float, row[24:].split())
        assert blocks == 4
        assert ratio == pytest.approx(new / (build + again), rel=0.05, abs=0.01)


def test_values_that_differ_are_refused():
    case = anew.Case("sum", lambda: (), sum, reference=lambda: 3.0)
    anew.check(case, np.float64(3), np.float64(3))
    with pytest.raises(AssertionError):
        anew.check(case, np.float64(3), np.float64(4))
    with pytest.raises(AssertionError):
        anew.check(case, np.float64(4), np.float64(4))
