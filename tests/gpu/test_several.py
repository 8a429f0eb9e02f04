"""The measuring tool for several GPUs, at small sizes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import gpuscheduler
from graphs.bench import several, timing, workloads


@pytest.fixture
def asked(tmp_path):
    return SimpleNamespace(small=True, repeat=2, out=str(tmp_path / "out"))


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """The counts of GPUs that there are in tests, at most two."""
    for module in (several, workloads):
        monkeypatch.setattr(module, "COUNTS", [n for n in timing.COUNTS if n <= 2])


#: CuPy says so where a task reads an array that lies on another GPU.
ELSEWHERE = pytest.mark.filterwarnings("ignore:The device where the array resides")


@ELSEWHERE
@pytest.mark.gpus(2)
def test_values_on_other_gpus_are_right(asked, capsys):
    several.races(asked)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(several.CAPTURES) + len(several.programs_on_another_gpu())
    assert all(line.endswith("0 of 2 wrong") for line in lines)


@ELSEWHERE
@pytest.mark.gpus(2)
def test_a_wrong_value_is_a_failure(asked, monkeypatch):
    monkeypatch.setitem(several.CAPTURES, "in a list", lambda k, n: several.dask.delayed(n))
    with pytest.raises(AssertionError, match="2 results are wrong"):
        several.races(asked)


def test_functions_of_the_library_are_checked_and_timed(asked, capsys):
    several.library(asked)
    assert len(capsys.readouterr().out.splitlines()) == len(several.library_rows(1))


@pytest.mark.parametrize("name", several.library_rows(1))
def test_a_wrong_result_of_the_library_is_a_failure(name):
    """Zeros are in order and solve nothing: the check of each function sees them."""
    make, apply, check = several.library_rows(1)[name]
    with gpuscheduler.Scheduler("cuda:0"):
        x = make().persist()
        first, *others = apply(x)
        with pytest.raises(AssertionError):
            check(x, (first * 0, *others))


def test_another_value_than_that_of_jax_is_a_failure(asked, monkeypatch):
    rows = {("transpose_sum", 1): {"ms": 1.0, "value": -1.0}}
    monkeypatch.setattr(several, "jax_times", lambda _: rows)
    with pytest.raises(AssertionError, match=r"transpose_sum on 1 GPUs: .*, by JAX -1.0"):
        several.beside_jax(asked)


def test_the_table_has_the_times_of_jax(asked, monkeypatch, capsys):
    times = {("gauss_sum", n): {"ms": 1.0} for n in (1, 2)} | {("matmul", 1): {"error": "no room"}}
    monkeypatch.setattr(several, "jax_times", lambda _: times)
    several.beside_jax(asked)
    text = capsys.readouterr().out
    assert text.count("gauss_sum") == text.count("random_slice_sum") == len(several.COUNTS)
    assert "JAX: no room" in text


def test_a_report_and_a_timeline_are_written(asked, tmp_path):
    several.page(asked)
    assert "Devices over time" in (tmp_path / "out" / "run.html").read_text()
    assert "traceEvents" in (tmp_path / "out" / "run.json").read_text()


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    def fail(_):
        raise ValueError("broken")

    seen = []
    monkeypatch.setattr(several, "PARTS", {"races": fail, "page": seen.append})
    monkeypatch.setattr(sys, "argv", ["several", "--small"])
    assert several.main() == 1
    assert len(seen) == 1
    assert "failed: races" in capsys.readouterr().out


def test_without_jax_the_table_is_ours_alone():
    code = (
        "import sys; sys.modules['jax'] = None; from graphs.bench import jax_peers as j; j.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "JAX is not installed" in done.stderr
