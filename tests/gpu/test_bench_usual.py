"""The tool that times usual expressions beside Dask's threads, with GPUs beside the host."""

from __future__ import annotations

import csv
import sys

import numpy as np
import pytest

pytest.importorskip("cupy")
pytest.importorskip("xarray")

import dask.array as da

from gpuscheduler import Scheduler
from gpuscheduler.errors import GpuUnused
from graphs.bench import usual
from graphs.bench.coverage import Coverage

pytestmark = pytest.mark.gpu


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["usual", *words])
    monkeypatch.setattr(usual, "FEWEST", 1)
    monkeypatch.setattr(usual, "ENOUGH", 0)
    monkeypatch.setattr(usual, "NOISE", 1e9)  # no test depends on time
    usual.main()


def test_it_compares_and_says_where(monkeypatch, capsys, tmp_path):
    rows = ["elementwise: a \\+ 1$", "programs: (arithmetic|dates|bins)$", "files: npy stack"]
    run(
        monkeypatch, "1", "--scheduler", "cuda:0", "--numpy", "gpu", "--only", "|".join(rows),
        "--seconds", "500", "--ahead", "2", "--worst", "1", "--csv", str(tmp_path / "rows.csv"),
    )  # fmt: skip
    out = capsys.readouterr().out
    assert "5 of 5 expressions, 0 above 1.2, 0 with other values" in out
    with open(tmp_path / "rows.csv", newline="") as file:
        found = {row["workload"]: row for row in csv.DictReader(file)}
    assert len(found) == 5
    assert found["elementwise: a + 1"]["note"].endswith("GPU 100% of bytes")
    assert found["files: npy stack"]["gpus"] == "1"


def test_rows_left_when_time_is_over_are_counted(monkeypatch, capsys):
    run(monkeypatch, "1", "--only", "elementwise: a . 1$", "--seconds", "0", "--worst", "1")
    assert "0 of 1 expressions, 0 above 1.2" in capsys.readouterr().out


def test_other_values_are_found():
    three, four = np.ones(3), np.ones(4)
    assert usual.same("programs: x", [three, True], [three, True])
    assert not usual.same("programs: x", [three], [three, three])
    assert not usual.same("programs: x", [three, four], [three, three])
    days = np.array(["2020-01-01", "NaT"], "M8[ns]")
    assert usual.same("programs: x", [days], [days])
    assert not usual.same("programs: x", [days], [days[::-1]])
    assert not usual.same("elementwise: x", three, three * (1 + 1e-6))


def test_coverage_counts_what_gpus_touch():
    x = da.from_array(np.ones((64, 64)), chunks=32)
    with Scheduler("cuda:0", numpy="gpu") as s, Coverage() as coverage:
        for _ in range(2):
            assert (x + 1).sum().compute(scheduler=s.get) == 2 * 64 * 64
        coverage.add_runs()
        touched = coverage.touched
        assert touched >= 2 * x.nbytes
        assert (coverage.on_gpus, coverage.runs, coverage.gpu_runs) == (touched, 2, 2)
        values = x.map_blocks(np.linalg.svd, compute_uv=False, drop_axis=1, dtype="f8")
        with pytest.warns(GpuUnused):
            values.compute(scheduler=s.get)
        coverage.add_runs()
        assert coverage.on_gpus == touched < coverage.touched
        coverage.clear()
        assert coverage.share == 0
    with Scheduler("cuda:0", numpy="host") as s, Coverage() as coverage:
        (x + 1).compute(scheduler=s.get)
        coverage.add_runs()
        assert (coverage.on_gpus, coverage.runs, coverage.reason) == (0, 1, "as asked")
        assert coverage.touched >= 2 * x.nbytes
    with Scheduler("cuda:0", numpy="gpu") as s:  # when the block has ended, nothing is counted
        (x + 1).compute(scheduler=s.get)
    coverage.add_runs()
    assert coverage.runs == 1
