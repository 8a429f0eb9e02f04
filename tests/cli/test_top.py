"""`gpuscheduler top`: what it reads and prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dask.array as da
import pytest
from click.testing import CliRunner

from gpuscheduler import Scheduler
from gpuscheduler.cli import command_line, top
from gpuscheduler.diagnostics.snapshot_file import SnapshotFile, make_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(top, "PATIENCE", 60.0)


def call(*arguments):
    return CliRunner().invoke(command_line.main, ["top", *arguments])


def test_without_a_scheduler_it_says_how_to_get_one(monkeypatch):
    result = call("--once")
    assert result.exit_code == 1
    assert "no scheduler of this user writes snapshots" in result.output
    assert "dashboard='top'" in result.output
    assert "process 1:" in call("1", "--once").output


def test_it_prints_devices_and_layers():
    with Scheduler("cpu:2", memory_limit="1 GiB", dashboard="top"):
        assert json.loads(call("--json").output)[0]["runs"] == []  # from now on it is recorded
        x = (da.ones(10_000, chunks=1000) + 1).sum()
        for _ in range(3):
            x.compute()
        result = call("--once")
        assert result.exit_code == 0, result.output
        for text in ("pid", str(os.getpid()), "host thread 0", "2.00 GiB", "memory is not short"):
            assert text in result.output
        for _ in range(1000):
            (found,) = json.loads(call(str(os.getpid()), "--json").output)
            if found["layers"]:
                break
            x.compute()
    assert found["pid"] == os.getpid()
    assert found["layers"]
    assert found["last"]["error"] == ""


def test_a_process_that_has_ended_is_said_to_have(tmp_path):
    code = (
        "import gpuscheduler, os, dask.array as da\n"
        "from gpuscheduler.diagnostics.snapshot_file import watch, find_snapshots, read_snapshot\n"
        "import time\n"
        "s = gpuscheduler.Scheduler('cpu:2', dashboard='top')\n"
        "((_, path),) = find_snapshots().items()\n"
        "watch(path)\n"
        "while read_snapshot(path) is None: time.sleep(0.05)\n"
        "os._exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 3
    result = call("--once")
    assert result.exit_code == 0, result.output
    assert "the process has ended" in result.output


def test_a_file_of_another_version_is_one_line():
    path = make_folder() / f"{os.getpid()}-1"
    SnapshotFile(path)._map.close()
    path.write_bytes(b"something else entirely, and long enough for a header")
    result = call("--once")
    assert result.exit_code == 1
    assert "no snapshot of this version" in result.output


def test_it_imports_no_arrays_and_no_gpus():
    code = (
        "import sys, click.testing; from gpuscheduler.cli import command_line; "
        "click.testing.CliRunner().invoke(command_line.main, ['top', '--once']); "
        "print({'dask.array', 'cupy', 'bokeh', 'numba', 'distributed'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "set()"
