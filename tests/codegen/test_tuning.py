"""The tables of numbers that were chosen by measuring: each says where it comes from."""

import csv
import re
from pathlib import Path

import pytest

from gpuscheduler.codegen.cpu import tuning as cpu_tuning
from gpuscheduler.codegen.cuda import tuning as cuda_tuning

ROOT = Path(__file__).parents[2]
SOURCES = ("Row: ", "No row", "A limit of the ")
each_table = pytest.mark.parametrize("table", [cpu_tuning, cuda_tuning], ids=["cpu", "cuda"])


def entries(table):
    """Each name with the comment above it."""
    text = Path(table.__file__).read_text(encoding="utf-8")
    found = {}
    for match in re.finditer(r"((?:^#: .*\n)+)^([A-Z][A-Z_, ]+) = ", text, re.M):
        comment = match[1].replace("\n#: ", " ").removeprefix("#: ")
        found |= dict.fromkeys(match[2].split(", "), comment)
    return found


def rows_named(comment):
    return re.findall(r'(\d{4}-\d\d-\d\d) "(.+?)"', comment)


@each_table
def test_every_number_says_where_it_comes_from(table):
    names = {name for name in vars(table) if name.isupper()}
    assert names == set(entries(table))
    for name, comment in entries(table).items():
        assert any(source in comment for source in SOURCES), name
        assert "Row: " not in comment or rows_named(comment), name


@each_table
def test_rows_of_numbers_were_measured(table):
    with (ROOT / "graphs/results.csv").open(encoding="utf-8", newline="") as file:
        known = {(row["date"], row["workload"]) for row in csv.DictReader(file)}
    named = {row for comment in entries(table).values() for row in rows_named(comment)}
    assert len(named) > 2
    assert named - known == set()


@each_table
def test_numbers_are_read_when_they_are_used(table):
    """A copy of one in another module would stay as it was where a test changes it."""
    names = {name for name in vars(table) if name.isupper()}
    for path in Path(table.__file__).parent.glob("*.py"):
        if path.stem not in ("tuning", "histogram_loops"):  # Numba compiles its numbers in
            text = path.read_text(encoding="utf-8")
            assert not re.search(rf"from \.tuning import|^({'|'.join(names)}) = ", text, re.M), path
