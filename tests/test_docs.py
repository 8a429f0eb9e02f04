"""What can go false is run: the README's code, commands and tables, the examples."""

from __future__ import annotations

import ast
import doctest
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import dask
import numpy as np
import pytest
import yaml

import gpuscheduler
from gpuscheduler.cli.command_line import main
from tests.test_structure import ORDER

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "gpuscheduler"
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if not p.stem.startswith("__"))
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.py"))


def blocks(language):
    """The README's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def rows(header):
    """The rows of the README's table whose header begins like this, each a list of cells."""
    table = README.split(f"\n| {header} |", 1)[1].split("\n\n", 1)[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def commands():
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [line.removeprefix("$ ") for line in lines]


def environment(**more):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def python(*arguments, cwd, **env):
    """Run Python on CPU devices, with warnings as errors; what it wrote."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        env=environment(**{"DASK_GPUSCHEDULER__DEVICES": "cpu:2"} | env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the README


def test_python_blocks_of_the_readme_run_in_order(capsys):
    """Blocks with prompts are doctests, the others are just run; all share their names."""
    names = {}
    runner = doctest.DocTestRunner()
    with dask.config.set({"gpuscheduler.devices": "cpu:2"}):
        for number, block in enumerate(blocks("python")):
            if ">>>" not in block:
                exec(compile(block, f"README block {number}", "exec"), names)
                continue
            test = doctest.DocTestParser().get_doctest(block, names, "README", "README.md", 0)
            failed, tried = runner.run(test, clear_globs=False)
            names |= test.globs
            assert tried
            assert not failed, capsys.readouterr().out
    assert len(blocks("python")) > 5


@pytest.mark.parametrize("command", [c for c in commands() if "gpuscheduler" in c])
def test_commands_of_the_readme_run(command, tmp_path):
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *arguments = words[len(settings) :]
    assert program == "gpuscheduler"
    arguments = [{"10000": "1000"}.get(a, a) for a in arguments]  # the same, and takes no time
    out = python("-m", "gpuscheduler", *arguments, cwd=tmp_path, **settings)
    assert out.strip()
    if "--png" in arguments:
        assert (tmp_path / "haversine_mesh.png").read_bytes().startswith(b"\x89PNG")


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE)
    others = [c for c in commands() if "gpuscheduler" not in c]
    assert others
    for command in others:
        program, *wanted = command.split()
        assert program == "make"
        assert set(wanted) <= set(targets)
    assert ".DEFAULT_GOAL := run" in makefile
    assert "gpuscheduler run haversine_mesh --png haversine_mesh.png" in makefile


def test_the_configuration_file_of_the_readme_is_understood():
    (block,) = blocks("yaml")
    settings = yaml.safe_load(block)["gpuscheduler"]
    with dask.config.set({"gpuscheduler": settings}):
        options = gpuscheduler.Options.read()
    assert (options.devices, options.memory_limit) == ("cuda:0,1", "64 GiB")


def test_the_table_of_options_is_the_options():
    table = {name.strip("`"): default.strip("`") for name, _, default in rows("option")}
    assert list(table) == [f.name for f in fields(gpuscheduler.Options)]
    defaults = {name: ast.literal_eval(default) for name, default in table.items()}
    assert defaults.pop("memory_limit") == 0.9  # of what is free: known when the devices are
    for name, default in defaults.items():
        assert getattr(gpuscheduler.Options(), name) == default


def test_the_device_strings_are_understood():
    for string, _ in rows("string"):
        devices = ast.literal_eval(string.strip("`"))
        if "cuda" not in devices:
            gpuscheduler.Scheduler(devices).close()
        else:
            assert re.fullmatch(r"cuda(:\d+(,\d+)*)?", devices)


def test_the_table_of_commands_is_the_help():
    table = {name.strip("`"): text for name, text in rows("command")}
    assert table.keys() == main.commands.keys()
    for name, text in table.items():
        assert " ".join(main.commands[name].help.split()).startswith(text)


def first_sentence(module):
    text = ast.get_docstring(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")))
    return re.split(r"(?<=[.?!])(?= |$)", " ".join(text.split()))[0]


def module_table():
    """A row for each module, in the order in which they may import each other."""
    ordered = sorted(MODULES, key=ORDER.index)
    return [[f"`{module}`", first_sentence(module)] for module in ordered]


def test_the_table_of_modules_is_what_the_modules_say():
    """`PYTHONPATH=. python tests/test_docs.py` writes it."""
    assert rows("module") == module_table()


def test_files_that_the_readme_names_exist():
    names = set(re.findall(r"`([\w.]+/?[\w]*\.py|[\w.]+/|\.ci/run)`", README))
    assert {"graphs/", "examples/", ".ci/run", "scheduler.py"} <= names
    for name in names - {".venv"}:
        assert any((folder / name).exists() for folder in (ROOT, PACKAGE, ROOT / "examples")), name


def test_the_changelog_has_an_unreleased_part():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## Unreleased\n\n### \w+\n\n- ", text, flags=re.MULTILINE)


# ---- the examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path):
    assert python(ROOT / "examples" / f"{name}.py", cwd=tmp_path).strip()


def test_the_mesh_example_draws_the_right_distances(tmp_path):
    """The far corner is one degree north and two west: 111.2 km by about 193.4 km."""
    out = python(ROOT / "examples" / "haversine.py", "mesh.png", cwd=tmp_path)
    assert "of 1,000,000 points the farthest is 223.2 km away" in out
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")


def test_the_zeta_example_finds_a_zero(tmp_path):
    out = python(ROOT / "examples" / "zeta.py", "zeta.png", "--n", "300", cwd=tmp_path)
    (sigma, t), *_ = re.findall(r"points at ([\d.]+) \+ ([\d.]+)i", out)
    zeros = 14.1347, 21.0220, 25.0109, 30.4249, 32.9351, 37.5862
    assert abs(float(sigma) - 0.5) < 0.01
    assert min(abs(float(t) - z) for z in zeros) < 0.1
    assert (tmp_path / "zeta.png").read_bytes().startswith(b"\x89PNG")


def test_the_mandelbrot_example_draws_its_centre_black(tmp_path):
    """A small copy of the set lies in the middle: its points stay inside."""
    from matplotlib import image

    python(ROOT / "examples" / "mandelbrot.py", "m.png", "--width", "96", "--height", "60",
           cwd=tmp_path)  # fmt: skip
    picture = image.imread(tmp_path / "m.png")
    assert picture.shape == (60, 96, 4)
    inside = (picture[..., :3] == 0).all(axis=-1)
    assert 0.01 < inside.mean() < 0.1
    assert inside[20:35, 45:60].mean() > 0.5


def test_the_potential_example_agrees_with_itself(tmp_path):
    out = python(ROOT / "examples" / "potential.py", "p.png", "--n", "24", cwd=tmp_path)
    space = runpy.run_path(str(ROOT / "examples" / "potential.py"))
    x = np.meshgrid(*[np.linspace(-2, 2, 24)] * 4, sparse=True)
    assert f"points: {space['potential'](*x).min():.5f} at" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


if __name__ == "__main__":
    before, rest = README.split("\n| module |", 1)
    header, _, rest = rest.split("\n", 2)
    after = rest.split("\n\n", 1)[1]
    table = "".join(f"| {' | '.join(row)} |\n" for row in module_table())
    text = f"{before}\n| module |{header}\n|---|---|\n{table}\n{after}"
    (ROOT / "README.md").write_text(text, encoding="utf-8")
