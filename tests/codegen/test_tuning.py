"""The table of numbers that were chosen by measuring: each says where it comes from."""

import csv
import re
from pathlib import Path

from gpuscheduler.codegen.cuda import tuning

ROOT = Path(__file__).parents[2]
TEXT = Path(tuning.__file__).read_text(encoding="utf-8")
SOURCES = ("Row: ", "No row", "A limit of the ")


def entries():
    """Each name with the comment above it."""
    found = {}
    for match in re.finditer(r"((?:^#: .*\n)+)^([A-Z][A-Z_, ]+) = ", TEXT, re.M):
        comment = match[1].replace("\n#: ", " ").removeprefix("#: ")
        found |= dict.fromkeys(match[2].split(", "), comment)
    return found


def rows_named(comment):
    return re.findall(r'(\d{4}-\d\d-\d\d) "(.+?)"', comment)


def test_every_number_says_where_it_comes_from():
    names = {name for name in vars(tuning) if name.isupper()}
    assert names == set(entries())
    for name, comment in entries().items():
        assert any(source in comment for source in SOURCES), name
        assert "Row: " not in comment or rows_named(comment), name


def test_rows_of_numbers_were_measured():
    with (ROOT / "graphs/results.csv").open(encoding="utf-8", newline="") as file:
        known = {(row["date"], row["workload"]) for row in csv.DictReader(file)}
    named = {row for comment in entries().values() for row in rows_named(comment)}
    assert len(named) > 10
    assert named - known == set()


def test_numbers_are_read_when_they_are_used():
    """A copy of one in another module would stay as it was where a test changes it."""
    names = "|".join(name for name in vars(tuning) if name.isupper())
    for path in Path(tuning.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(rf"from \.tuning import|^({names}) = ", text, re.M) or (
            path.name == "tuning.py"
        )
