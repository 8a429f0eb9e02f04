"""What was compiled is found by the next process, whole or not at all; the disk does not fill."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from dask import config

from gpuscheduler import shelf


@pytest.fixture
def folder(tmp_path):
    with config.set({"gpuscheduler.cache-directory": str(tmp_path / "kept")}):
        yield tmp_path / "kept"


def test_what_is_kept_is_found_under_its_words_alone(folder):
    shelf.keep(("a", 1), b"code")
    assert shelf.found(("a", 1)) == b"code"
    assert shelf.found(("a", 2)) is None
    assert folder.stat().st_mode & 0o077 == 0  # nobody else writes code that we run


def test_what_has_no_words_is_not_kept(folder):
    shelf.keep(None, b"code")
    assert shelf.found(None) is None
    assert not folder.exists()


def test_a_file_that_is_not_whole_counts_for_nothing(folder):
    shelf.keep("a", b"code")
    (file,) = folder.iterdir()
    for content in (file.read_bytes()[:-1], b"", file.read_bytes() + b"!"):
        file.write_bytes(content)
        assert shelf.found("a") is None


def test_a_disk_that_cannot_be_written_does_not_matter(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with config.set({"gpuscheduler.cache-directory": str(tmp_path / "file" / "kept")}):
        shelf.keep("a", b"code")
        assert shelf.found("a") is None


def aged(folder, seconds):
    for file in folder.iterdir():
        facts = file.stat()
        os.utime(file, (facts.st_atime, facts.st_mtime - seconds))


def test_files_that_nobody_has_asked_for_go_first(folder, monkeypatch):
    """Eight of 1 KiB each, room for four: of the old ones that which was found since is left."""
    monkeypatch.setattr(shelf, "MOST_BYTES", 4 * 1056)
    monkeypatch.setattr(shelf, "LOOK_EVERY", 8 * 1024)
    monkeypatch.setattr(shelf, "_added", 0)
    for n in range(7):
        shelf.keep(n, bytes(1024))
        aged(folder, 100)
    others = folder / "mine.txt", folder / f"{'a' * 63}.kept"
    for other in others:
        other.write_bytes(bytes(2**14))
        os.utime(other, (0, 0))
    assert shelf.found(0) is not None
    shelf.keep(7, bytes(1024))
    assert [n for n in range(8) if shelf.found(n)] == [0, 6, 7]
    assert all(other.exists() for other in others)


def test_what_a_killed_process_left_goes_too(folder, monkeypatch):
    monkeypatch.setattr(shelf, "MOST_BYTES", 2000)
    shelf.keep("a", bytes(1024))
    (file,) = folder.iterdir()
    left = folder / f"{file.name}.x1y2"
    left.write_bytes(bytes(1024))
    os.utime(left, (0, 0))
    shelf.trim(folder)
    assert list(folder.iterdir()) == [file]


def test_several_processes_may_make_room_at_once(folder):
    """Each finds what it has just kept, or nothing; none fails."""
    code = """
import sys
from gpuscheduler import shelf
shelf.MOST_BYTES, shelf.LOOK_EVERY = 20_000, 1
for n in range(100):
    content = bytes([n % 256]) * 1000
    shelf.keep(n, content)
    for m in (n, n - 7):
        assert shelf.found(m) in (None, bytes([m % 256]) * 1000)
"""
    given = {**os.environ, "DASK_GPUSCHEDULER__CACHE_DIRECTORY": str(folder)}
    every = [subprocess.Popen([sys.executable, "-c", code], env=given) for _ in range(3)]
    assert [p.wait() for p in every] == [0, 0, 0]
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 25_000
