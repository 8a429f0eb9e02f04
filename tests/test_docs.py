"""Run what documents can get wrong: code, commands, tables, links, the picture of the rooms."""

from __future__ import annotations

import ast
import csv
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
from graphs.bench.__main__ import PARTS, TOOLS
from tests.test_structure import MODULES, ROOMS, imports_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpuscheduler"
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
}
README, GUIDE = DOCUMENTS["README.md"], DOCUMENTS["docs/guide.md"]
EXAMPLES = sorted(p.stem for p in (ROOT / "examples").glob("*.py"))
#: The rooms in the picture of docs/how-it-works.md, top to bottom.
PICTURED = [room for room in ROOMS if (PACKAGE / room).is_dir() or room == "scheduler"]


def blocks(language, text):
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def rows(header, text):
    """The rows of the table whose header begins with `header`, each a list of cells."""
    table = text.split(f"\n| {header} |", 1)[1].split("\n\n", 1)[0]
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def commands():
    """Every command that a document shows, once each."""
    consoles = [block for text in DOCUMENTS.values() for block in blocks("console", text)]
    lines = [line for block in consoles for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return list(dict.fromkeys(line.removeprefix("$ ") for line in lines))


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


# ---- the documents


@pytest.mark.parametrize("name", [n for n, text in DOCUMENTS.items() if blocks("python", text)])
def test_python_blocks_of_a_document_run_in_order(name, capsys):
    """Blocks with prompts are doctests, the others are just run; all of a document share names."""
    names = {}
    runner = doctest.DocTestRunner()
    with dask.config.set({"gpuscheduler.devices": "cpu:2"}):
        for number, block in enumerate(blocks("python", DOCUMENTS[name])):
            if ">>>" not in block:
                exec(compile(block, f"{name} block {number}", "exec"), names)
                continue
            test = doctest.DocTestParser().get_doctest(block, names, name, name, 0)
            failed, tried = runner.run(test, clear_globs=False)
            names |= test.globs
            assert tried
            assert not failed, capsys.readouterr().out


def test_the_readme_and_the_guide_have_code():
    assert len(blocks("python", README)) > 3
    assert len(blocks("python", GUIDE)) > 7


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("command", [c for c in commands() if "gpuscheduler " in c])
def test_commands_of_the_documents_run(command, tmp_path):
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *arguments = words[len(settings) :]
    assert program == "gpuscheduler"
    arguments = [{"10000": "1000"}.get(a, a) for a in arguments]  # the same, and takes no time
    out = python("-m", "gpuscheduler", *arguments, cwd=tmp_path, **settings)
    assert out.strip()
    if "--png" in arguments:
        assert (tmp_path / "haversine_mesh.png").read_bytes().startswith(b"\x89PNG")


def test_make_targets_of_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE)
    made = [c.split()[1:] for c in commands() if c.split()[0] == "make"]
    made += [
        words.split() for t in DOCUMENTS.values() for words in re.findall(r"`make ([a-z ]+)`", t)
    ]
    assert made
    for wanted in made:
        assert set(wanted) <= set(targets)
    assert ".DEFAULT_GOAL := run" in makefile
    assert "gpuscheduler run haversine_mesh --png haversine_mesh.png" in makefile


def test_extras_of_the_readme_exist():
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"pip install '\.\[(\w+)\]'", README)
    assert {"cuda12", "cuda13"} <= set(extras)
    for extra in extras:
        assert re.search(rf"^{extra} = \[", metadata, flags=re.MULTILINE)


def test_the_configuration_file_of_the_guide_is_understood():
    (block,) = blocks("yaml", GUIDE)
    settings = yaml.safe_load(block)["gpuscheduler"]
    with dask.config.set({"gpuscheduler": settings}):
        options = gpuscheduler.Options.read()
    assert (options.devices, options.memory_limit) == ("cuda:0,1", "64 GiB")


def test_the_table_of_options_is_the_options():
    table = {name.strip("`"): default.strip("`") for name, _, default in rows("option", GUIDE)}
    assert list(table) == [f.name for f in fields(gpuscheduler.Options)]
    defaults = {name: ast.literal_eval(default) for name, default in table.items()}
    assert defaults.pop("memory_limit") == 0.9  # of what is free: known when the devices are
    for name, default in defaults.items():
        assert getattr(gpuscheduler.Options(), name) == default


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "guide"])
def test_the_device_strings_are_understood(text):
    for string, _ in rows("string", text):
        devices = ast.literal_eval(string.strip("`"))
        if "cuda" not in devices:
            gpuscheduler.Scheduler(devices).close()
        else:
            assert re.fullmatch(r"cuda(:\d+(,\d+)*)?(,cpu:\d+)?", devices)


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "guide"])
def test_the_table_of_commands_is_the_help(text):
    table = {name.strip("`"): cell for name, cell in rows("command", text)}
    assert table.keys() == main.commands.keys()
    for name, cell in table.items():
        assert " ".join(main.commands[name].help.split()).startswith(cell)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_names_exist(name):
    """Paths in backticks, from the root, the package or a room, and scripts of commands."""
    rooms = [p for p in PACKAGE.rglob("*") if p.is_dir()]
    folders = [ROOT, PACKAGE, ROOT / "examples", *rooms]
    text = DOCUMENTS[name]
    names = set(re.findall(r"`((?:[\w.-]+/)*[\w.-]+(?:\.py|\.md|\.csv|\.cuh|/))`", text))
    names |= set(re.findall(r"python ((?:graphs|examples|tests)/[\w/.]+\.py)", text))
    for named in names - {".venv/", "mine.py"}:
        assert any((folder / named).exists() for folder in folders), named


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_of_a_document_lead_somewhere(name):
    text = re.sub(r"```.*?```|`[^`]*`", "", DOCUMENTS[name], flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in link:
            assert ((ROOT / name).parent / link).exists(), link


def room_picture():
    """The rooms from first to last (squares); each dot on a row is a room that this one imports."""
    imports = {room: set() for room in PICTURED}
    for file in MODULES:
        room = file.split("/")[0]
        if room in imports:
            imports[room] |= {i.name.split("/")[0] for i in imports_of(file) if i.ours} - {room}
    width = max(map(len, PICTURED))
    lines = []
    for row, room in enumerate(PICTURED):
        used = [k for k in range(row) if PICTURED[k] in imports[room]]
        marks = ""
        for k, other in enumerate(PICTURED[:row]):
            later = any(other in imports[r] for r in PICTURED[row:])
            line = "┼" if later else "─"
            begun = bool(used) and k >= used[0]
            here = line if begun else "│" if later else " "
            marks += ("●" if k in used else here) + ("─" if begun else " ")
        lines.append(f"{room:{width}}  {marks + '■':{2 * len(PICTURED)}} {first_line(room)}")
    return "\n".join(lines) + "\n"


def first_line(room):
    """The first line of a room's docstring."""
    path = PACKAGE / room / "__init__.py"
    path = path if path.exists() else PACKAGE / f"{room}.py"
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[0]


def test_the_picture_of_the_rooms_is_the_import_graph():
    """`PYTHONPATH=. python tests/test_docs.py` writes it."""
    assert room_picture() in DOCUMENTS["docs/how-it-works.md"]


def test_the_glossary_defines_each_term_once():
    terms = [row[0] for row in rows("term", DOCUMENTS["docs/how-it-works.md"])]
    assert len(terms) >= 20
    assert len(set(terms)) == len(terms)


def test_the_changelog_has_this_version():
    assert f"## {gpuscheduler.__version__}" in DOCUMENTS["CHANGELOG.md"]
    long = [line for line in DOCUMENTS["CHANGELOG.md"].splitlines() if len(line) > 100]
    assert not long


def test_results_are_short_and_have_their_history():
    """Each row of the history has a date, a workload, a metric and a value."""
    results = (ROOT / "graphs" / "RESULTS.md").read_text(encoding="utf-8")
    assert len(results.splitlines()) <= 250
    with (ROOT / "graphs" / "results.csv").open(encoding="utf-8", newline="") as file:
        history = list(csv.DictReader(file))
    columns = "date,machine,commit,command,workload,gpus,metric,value,note"
    assert ",".join(history[0]) == columns
    for row in history:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]), row
        assert all(row[column] for column in ("workload", "metric", "value")), row


def test_measuring_commands_of_the_documents_exist():
    """They name parts or tools of `graphs.bench`, and options that the tool's file reads."""
    results = (ROOT / "graphs" / "RESULTS.md").read_text(encoding="utf-8")
    text = "\n".join([*DOCUMENTS.values(), results])
    lines = re.findall(r"`python\s+-m\s+graphs\.bench\s+([^`]+)`", text)
    assert len(lines) > 20
    for line in lines:
        names = [word for word in line.split() if not word.startswith("-")]
        if names[0] in TOOLS:
            source = (ROOT / "graphs" / "bench" / f"{names[0]}.py").read_text(encoding="utf-8")
            for option in re.findall(r"--[a-z-]+", line):
                assert f'"{option}"' in source, line
        elif names != ["PART"]:
            assert set(names) <= PARTS.keys(), line
    named = set(re.findall(r"`([a-z_]+)`", DOCUMENTS["docs/performance.md"]))
    assert set(TOOLS) - named <= {"usual"}  # which `make usual` runs


# ---- the examples


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path):
    assert python(ROOT / "examples" / f"{name}.py", cwd=tmp_path).strip()


def test_the_climate_example_gives_what_numpy_gives(tmp_path):
    out = python(ROOT / "examples" / "climate.py", "c.png", "--days", "400", cwd=tmp_path)
    (error,) = re.findall(r"largest difference from NumPy: (\S+)", out)
    assert "400 days: ndarray" in out
    assert float(error) < 1e-5
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


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
    path = ROOT / "docs" / "how-it-works.md"
    before, rest = path.read_text(encoding="utf-8").split("<!-- rooms -->\n", 1)
    after = rest.split("<!-- end of rooms -->", 1)[1]
    picture = f"<!-- rooms -->\n```text\n{room_picture()}```\n<!-- end of rooms -->"
    path.write_text(f"{before}{picture}{after}", encoding="utf-8")
