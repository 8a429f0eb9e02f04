"""The command line: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import dask
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from gpuscheduler._version import __version__
from gpuscheduler.cli import command_line, report, workload
from gpuscheduler.devices.cuda.nvml import DeviceFacts, Sensors
from gpuscheduler.frontend import linalg_shapes
from gpuscheduler.pipeline.compile import PASSES
from gpuscheduler.plan.machine import Machine

pytestmark = pytest.mark.usefixtures("only_new_garbage")  # each measurement begins without any

ROOT = Path(__file__).parents[2]

MINE = """
import dask.array as da
import numpy as np

{more}

def build(size, chunks=10):
    return da.ones((size, size), chunks=chunks)
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run a command in an empty folder, on two CPU devices unless it says otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments, code=0):
        if arguments[0] != "--help" and not {"--devices", "--pretend"} & set(arguments):
            arguments += ("--devices", "cpu:2")
        result = CliRunner().invoke(command_line.main, [str(a) for a in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return call


@pytest.fixture
def mine(tmp_path):
    """A workload of the user's, with more of the contract where a test asks for it."""

    def mine(more=""):
        path = tmp_path / "mine.py"
        path.write_text(MINE.format(more=more))
        return path

    yield mine
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]


def printed(parts):
    console = Console(width=120)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


# ---- help


@pytest.mark.parametrize("command", [None, *command_line.main.commands])
def test_help_is_complete(command):
    """Each command has a text, and each option says what it is for."""
    words = ["--help"] if command is None else [command, "--help"]
    result = CliRunner().invoke(command_line.main, words)
    assert result.exit_code == 0
    assert "Usage:" in result.output
    if command is None:
        assert all(name in result.output for name in command_line.main.commands)
    else:
        for parameter in command_line.main.commands[command].params:
            assert parameter.param_type_name == "argument" or parameter.help, parameter.name


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"], ["bench", "-h"]])
def test_help_loads_no_arrays(words):
    """These take most of a second to import."""
    code = """
import sys
from gpuscheduler.cli.command_line import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"numpy", "dask.array", "distributed", "numba", "rich"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, *words]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "gpuscheduler" in out or "Usage" in out
    assert out.splitlines()[-1] == "[]"


# ---- info


def test_info_shows_devices_and_versions(call):
    out = call("info", "--devices", "cpu:3", "--memory-limit", "1 GiB")
    assert out.count("host thread") == 3
    assert out.count("1.00 GiB") == 3
    assert "share the host's memory" in out
    assert f"numpy {np.__version__}" in out


@dataclass
class FakeLinks:
    gbs: list = field(default_factory=lambda: [[0, 391.2], [19.6, 0]])
    staged: set = field(default_factory=lambda: {(1, 0)})
    host: list = field(default_factory=lambda: [(55.1, 53.0), (54.2, 52.0)])


class FakeGPUs:
    """Two GPUs that are not there; from the second to the first there is no direct way."""

    kind = "cuda"
    names = ("NVIDIA H200", "NVIDIA H200")
    machine = Machine.uniform(2, memory=120 * 2**30)

    def links(self):
        return FakeLinks()


def test_info_shows_the_links_between_gpus_and_marks_those_through_the_host():
    out = printed(report.device_tables(FakeGPUs()))
    rows = [re.findall(r"[\w*.-]+", line) for line in out.splitlines()]
    assert ["0", "-", "391", "53"] in rows
    assert ["1", "20*", "-", "52"] in rows
    assert ["host", "55", "54", "-"] in rows
    assert "* through pinned host memory" in out


def test_info_shows_what_is_free_where_the_hardware_knows():
    class Knows(FakeGPUs):
        def free(self):
            return [130 * 2**30, 60 * 2**30]

    assert "unknown" in printed(report.device_tables(FakeGPUs()))
    out = printed(report.device_tables(Knows()))
    assert "130.00 GiB" in out
    assert "60.00 GiB" in out


def test_info_shows_what_nvml_tells():
    class Nvml:
        def __init__(self, *sensors):
            self.found = sensors

        def sensors(self):
            return list(self.found)

        def facts(self):
            return [DeviceFacts("H200", "570.86", 0, 2**30, (0, 1), 10**9, None)] * len(self.found)

    known = Sensors(2**34, 2**37, 0.5, 612.4, 700.0, 58, 1755, 1980, ("heat", "power limit"))
    out = " ".join(printed(report.sensor_tables(Nvml(known, Sensors()))).split())
    for text in ("570.86", "16.00", "128.00", "612", "700", "58", "1.00", "1980", "heat"):
        assert text in out
    assert "NVML is not available" in printed(report.sensor_tables(Nvml(Sensors())))


def test_info_names_optional_packages(call, monkeypatch):
    out = " ".join(call("info", "--devices", "cpu:1").split())
    assert f"bokeh {report.version('bokeh')}" in out
    monkeypatch.setitem(report.OPTIONAL, "no-such-package-of-ours", "nothing")
    assert report.optional_versions()["nothing"] == "not installed"


# ---- run


def test_run_prints_two_lines_and_checks_against_numpy(call):
    out = call("run", "haversine_mesh", "--size", "100")
    assert re.fullmatch(
        r"haversine_mesh 100x100 on 2 cpu devices: [\d.]+ m?s \(first run [\d.]+ m?s\), "
        r"[\d.]+ [kM] points/s, [\d.]+ [kMG]B/s, [\d.]+ [kMG]FLOP/s, equals NumPy [\w -]+\n"
        r"memory: peak [\d.]+ kiB \(predicted [\d.]+ kiB\)\n",
        out,
    )


@pytest.mark.parametrize("name", workload.workload_names())
def test_every_reference_workload_is_right_at_its_small_size(call, name):
    assert "equals NumPy" in call("run", name, "--size", "small", "--repeat", "0")


def test_there_are_reference_workloads():
    assert "haversine_mesh" in workload.workload_names()
    assert not [name for name in workload.workload_names() if name.startswith("_")]


def test_run_takes_chunks_and_a_memory_limit(call):
    out = call("run", "standardize", "--size", "80,30", "--chunks", "20", "--memory-limit", "0.25")
    assert "standardize 80x30 on 2 cpu devices" in out


def test_run_says_what_was_spilled_and_what_was_predicted(call):
    out = call("run", "transpose_sum", "--size", "small", "--memory-limit", "150000")
    assert re.search(r"peak [\d.]+ kiB \(predicted .* spilled to the disk .* \(predicted", out)
    assert "equals NumPy" in out


def test_run_draws_fields(call, tmp_path):
    call("run", "hillshade", "--size", "60,70", "--png", tmp_path / "field.png")
    assert (tmp_path / "field.png").read_bytes().startswith(b"\x89PNG")


def test_large_results_stay_in_chunks_and_are_checked_at_windows(call, tmp_path, monkeypatch):
    monkeypatch.setattr(workload, "HELD", 1000)
    monkeypatch.setattr(workload, "PIXELS", 50)
    out = call("run", "haversine_mesh", "--size", "300", "--png", tmp_path / "field.png")
    assert "equals NumPy" in out
    assert "at 3 places" in out
    assert (tmp_path / "field.png").exists()


def test_what_takes_too_long_to_check_is_not_checked_unless_asked(call, monkeypatch):
    monkeypatch.setattr(workload, "AFFORDABLE", (0, 0))
    assert "not checked" in call("run", "gauss_sum", "--size", "small")
    assert "equals NumPy" in call("run", "gauss_sum", "--size", "small", "--check")
    assert "at 3 places" in call("run", "matmul", "--size", "small")
    assert "NumPy" not in call("run", "matmul", "--size", "small", "--no-check")


def test_progress_goes_to_stderr(call, tmp_path):
    result = CliRunner().invoke(
        command_line.main,
        ["run", "haversine_mesh", "--size", "50", "--devices", "cpu:2", "--progress"],
    )
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 2
    assert re.search(r"run \d+: \d+ steps in ", result.stderr)
    assert not CliRunner().invoke(command_line.main, ["run", "matmul", "--size", "small"]).stderr


def test_run_takes_a_file_of_the_users(call, mine):
    out = call("run", mine(), "--size", "20", "--chunks", "10,10", "--repeat", "1")
    assert re.match(r"mine 20x20 on 2 cpu devices: [^,]*, [\d.]+ [kM] points/s\n", out)


def test_a_wrong_result_is_an_error(call, mine):
    path = mine("def reference(size):\n    return np.full((size, size), 1.1)")
    out = call("run", path, "--size", "20", code=1)
    assert "DIFFERS from NumPy to 1e-01" in out
    assert "Error: the result of mine differs from NumPy's" in out


def test_a_drawing_has_the_axes_that_the_workload_names(mine, tmp_path):
    from matplotlib.figure import Figure

    made = []

    def figure(**options):
        made.append(Figure(**options))
        return made[-1]

    work = workload.load(str(mine("AXES = {'latitude': (29, 31), 'longitude': (99, 101)}")))
    report.draw(work, np.ones((4, 4)), str(tmp_path / "a.png"), "title", figure)
    plot = made[0].axes[0]
    assert (plot.get_xlabel(), plot.get_ylabel()) == ("longitude", "latitude")
    assert plot.get_ylim() == (29, 31)


# ---- plan


def test_plan_predicts_for_gpus_that_are_not_there(call):
    out = call("plan", "transpose_sum", "--size", "full", "--pretend", "4")
    assert re.match(
        r"transpose_sum 65536 on 4 pretended H200: \d+ steps, predicted [\d.]+ m?s", out
    )
    assert "118.18 GiB" in out
    links = out.split("links")[1].split("runs as")[0]
    moved = {
        (int(a), int(b)): float(n)
        for a, b, n in re.findall(r"device (\d) +│ device (\d) +│ ([\d.]+) MiB", links)
    }
    assert sum(moved.values()) == 96 * 64  # a pair of blocks is read by one kernel, once
    fetched = [sum(n for (_, b), n in moved.items() if b == d) for d in range(4)]
    assert fetched == [24 * 64] * 4


def test_run_writes_a_report(call, tmp_path):
    path = tmp_path / "run.html"
    call("run", "standardize", "--size", "small", "--devices", "cpu:2", "--report", str(path))
    text = path.read_text(encoding="utf-8")
    assert "Which layer takes the time?" in text
    assert "<h2>Source</h2>" not in text


def test_plan_explains_itself_and_writes_that_as_html(call, tmp_path):
    path = tmp_path / "plan.html"
    out = call("plan", "standardize", "--size", "small", "--pretend", "2", "--html", str(path))
    assert "runs as" in out
    assert "links:" in out
    assert "<table" in path.read_text(encoding="utf-8")
    missing = tmp_path / "missing" / "plan.html"
    words = ("plan", "standardize", "--size", "small", "--pretend", "2", "--html", str(missing))
    assert "--html" in call(*words, code=1)


def test_plan_is_the_same_each_time(call):
    words = ("plan", "standardize", "--size", "small", "--pretend", "3")
    assert call(*words) == call(*words)


def test_plan_prints_the_passes(call):
    out = call("plan", "standardize", "--size", "small", "--pretend", "2", "--passes")
    rows = re.findall(r"(\w+) +│ +([\d,]+) +│ +([\d,]+)", out.split("passes")[1])
    assert [name for name, *_ in rows] == [one.__name__ for one in PASSES]
    assert all(a == b for (_, _, a), (_, b, _) in zip(rows, rows[1:], strict=False))
    assert "tasks before" not in call("plan", "standardize", "--size", "small", "--pretend", "2")


def test_plan_says_what_will_be_spilled(call):
    words = ("plan", "transpose_sum", "--size", "small", "--memory-limit", "150000")
    assert re.search(r"disk .* spilled", call(*words))
    out = call("plan", "matmul", "--size", "65536", "--pretend", "2", "--memory-limit", "16 GiB")
    assert re.search(r"host .* GiB spilled", out)


def test_plan_says_where_sizes_are_not_known(call, monkeypatch):
    """What the factors of matrices are is known: without that, nobody would."""
    out = call("plan", "tall_skinny_svd", "--size", "small", "--devices", "cpu:2")
    assert "19 steps, predicted " in out
    monkeypatch.setattr(linalg_shapes, "MAKE", {})
    out = call("plan", "tall_skinny_svd", "--size", "small", "--devices", "cpu:2")
    assert "19 steps (19 of unknown size), predicted about " in out
    assert re.search(r"about 5\d.\d\d kiB", out)
    words = "plan", "tall_skinny_svd", "--size", "33554432,128", "--pretend", "4"
    assert "predicted at least " in call(*words)


def test_run_predicts_before_it_runs(call, tmp_path):
    """What the task gives is known behind the first run only."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import dask, numpy as np\ndef build(n):\n    return dask.delayed(np.ones)(n)\n"
    )
    out = call("run", str(path), "--size", "1000", "--devices", "cpu:1")
    assert "peak 7.81 kiB (predicted at least 0 B)" in out


def test_plan_computes_nothing(call, mine):
    path = mine("def never(x):\n    raise AssertionError")
    text = path.read_text()
    path.write_text(text.replace("s=chunks)", "s=chunks).map_blocks(never, dtype=float)"))
    assert "mine 20x20 on 2 cpu devices: " in call("plan", path, "--size", "20")


def test_plan_refuses_what_cannot_fit(call):
    out = call(
        *("plan", "haversine_mesh", "--size", "1000", "--pretend", "2"),
        *("--memory-limit", "1000"),
        code=1,
    )
    assert re.search(r"Error: .* needs [\d,]+ bytes on device \d .* 1,000 bytes", out)
    assert len(out.splitlines()) == 1


# ---- bench


def test_bench_compares_with_dask(call):
    out = call("bench", "gauss_sum", "matmul", "--size", "small", "--repeat", "1", code=0)
    for name in ("gauss_sum", "matmul"):
        assert re.search(rf"{name} .*\d m?s .*\d m?s .*\d\.\d\d", out)


def test_bench_counts_microseconds_per_task(call):
    out = call("bench", "tasks", "--n", "100", "--repeat", "1")
    for shape in ("independent", "chain", "tree"):
        assert re.search(rf"{shape} (.*\d\.\d\d){{3}}", out)


def test_time_alternately_changes_who_comes_first():
    calls = []
    workload.time_alternately(lambda: calls.append("ours"), lambda: calls.append("theirs"), 2)
    assert calls == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


# ---- errors


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("run", "haversin"), 2, "no workload 'haversin': there are black_scholes, gauss_sum, "),
        (("plan", "nowhere.py"), 2, "there is no file nowhere.py"),
        (("run", "gauss_sum", "--size", "9"), 2, "gauss_sum takes a size such as 400,250"),
        (("run", "matmul", "--size", "9,9"), 2, "matmul takes a size such as 256"),
        (("run", "matmul", "--size", "big"), 2, "'big': use a number such as 1000, or 400,250"),
        (("run", "matmul", "--size", "0"), 2, "'0': use a number"),
        (("run", "gauss_sum", "--png", "x.png"), 2, "gauss_sum is not two-dimensional"),
        (("run", "matmul", "--png", "x.gifs"), 1, "--png: "),
        (("run", "matmul", "--devices", "gpu"), 2, "devices='gpu': use 'auto', 'cpu', 'cpu:4'"),
        (("run", "matmul", "--memory-limit", "much"), 2, "memory_limit='much': use bytes"),
        (("plan", "matmul", "--pretend", "2", "--memory-limit", "much"), 2, "much"),
        (("plan", "matmul", "--pretend", "2", "--devices", "cpu"), 2, "use one of them"),
        (("run", "matmul", "--memory-limit", "1000"), 1, "bytes on device"),
    ],
)
def test_errors_are_one_line(call, words, code, message):
    out = call(*words, code=code)
    assert message in out
    errors = [line for line in out.splitlines() if line.startswith("Error: ")]
    assert errors == out.splitlines()[-1:]


def test_a_file_without_build_is_refused(call, tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert "has no function build(size)" in call("run", tmp_path / "empty.py", code=2)


BROKEN = {
    "syntax": ("def build(size:\n", "line 1: syntax error: "),
    "encoding": ("# coding: nothing\nx = 1\n", "syntax error: "),
    "import": ("import math\nimport not_there\n", "line 2: ModuleNotFoundError: No module named"),
    "name": ("\n\nx = nothing\n", "line 3: NameError: name 'nothing' is not defined"),
    "lines": ("raise ValueError('a\\nb')", "line 1: ValueError: a b"),
    "relative": ("from . import _roots", "import by full names instead"),
    "value": ("def build(size):\n    return 3", "build gives no Dask collection, but an object of"),
}


@pytest.mark.parametrize("command", ["run", "plan", "bench"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_is_one_line_and_status_2(call, tmp_path, command, broken):
    text, message = BROKEN[broken]
    path = tmp_path / "mine.py"
    path.write_text(text)
    out = call(command, path, "--size", "10", code=2)
    assert re.fullmatch(r"Error: [^\n]*\n", out), out
    assert "mine" in out
    assert message in out


def test_a_file_of_a_reference_workload_says_its_name(call):
    out = call("run", ROOT / "graphs" / "haversine_mesh.py", code=2)
    assert len(out.splitlines()) == 1
    assert "say its name, haversine_mesh," in out


@pytest.mark.parametrize("command", ["run", "plan", "bench", "info"])
def test_wrong_options_are_one_line_and_status_2(call, command):
    words = [] if command == "info" else ["matmul"]
    for option, value in (("devices", "cpu:0"), ("devices", "gpu"), ("memory-limit", "much")):
        out = call(command, *words, f"--{option}", value, code=2)
        assert re.fullmatch(rf"Error: {option.replace('-', '_')}='{value}': use [^\n]*\n", out)


def test_wrong_configuration_is_one_line_and_status_2(call):
    with dask.config.set({"gpuscheduler.window": 0}):
        for words in (("run", "matmul"), ("plan", "matmul"), ("plan", "matmul", "--pretend", "2")):
            out = call(*words, code=2)
            assert out.startswith("Error: window=0 (gpuscheduler.window in Dask's configuration)")
            assert len(out.splitlines()) == 1


def test_a_file_of_the_users_says_what_it_lacks(call, mine):
    assert "give it --size" in call("run", mine(), code=2)
    out = call("run", mine(), "--size", "20", "--check", code=2)
    assert "mine has no function reference(size)" in out


def test_the_users_own_exceptions_come_out_as_they_are(call, mine):
    path = mine("def fail(x):\n    raise KeyError('mine')")
    text = path.read_text()
    path.write_text(text.replace("s=chunks)", "s=chunks).map_blocks(fail, dtype=float)"))
    with pytest.raises(KeyError, match="mine"):
        call("run", path, "--size", "20")


def test_without_matplotlib_a_drawing_names_the_extra(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = call("run", "matmul", "--png", "x.png", code=1)
    assert "pip install 'gpuscheduler[plot]'" in out


# ---- as a program


def test_ctrl_c_ends_quietly_with_130(tmp_path):
    """The task tells that it runs by making a file, and would run for long."""
    path = tmp_path / "slow.py"
    path.write_text(
        "import pathlib, time, dask\n"
        "def work(size):\n"
        "    pathlib.Path('begun').touch()\n"
        "    for _ in range(1000 * size):\n"
        "        time.sleep(0.001)\n"
        "def build(size):\n"
        "    return dask.delayed(work)(size)\n"
    )
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        "from gpuscheduler.cli.command_line import main; main()",
    ]
    process = subprocess.Popen(
        [*command, "run", str(path), "--size", "60", "--devices", "cpu:1"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "")


def test_python_m_gpuscheduler_is_the_command_line(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "gpuscheduler", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"gpuscheduler, version {__version__}")
