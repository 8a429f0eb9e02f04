"""What was compiled is found by the next process, whole or not at all; the disk does not fill."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from dask import config

from gpuscheduler import disk_cache
from gpuscheduler.tracing import numba_cpu


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_warned", set())
    with config.set({"gpuscheduler.cache-directory": str(tmp_path / "kept")}):
        yield tmp_path / "kept"


def test_what_is_kept_is_found_under_its_words_alone(folder):
    disk_cache.keep(("a", 1), b"code")
    assert disk_cache.read(("a", 1)) == b"code"
    assert disk_cache.read(("a", 2)) is None
    assert folder.stat().st_mode & 0o077 == 0  # nobody else writes code that we run


def test_what_has_no_words_is_not_kept(folder):
    disk_cache.keep(None, b"code")
    assert disk_cache.read(None) is None
    assert not folder.exists()


def test_a_file_that_is_not_whole_counts_for_nothing(folder):
    disk_cache.keep("a", b"code")
    (file,) = folder.iterdir()
    for content in (file.read_bytes()[:-1], b"", file.read_bytes() + b"!"):
        file.write_bytes(content)
        assert disk_cache.read("a") is None


def test_a_renamed_file_counts_for_nothing(folder):
    """Who can rename files here would choose what code runs for what."""
    disk_cache.keep("a", b"code of a")
    disk_cache.keep("b", b"code of b")
    os.replace(disk_cache._file("a"), disk_cache._file("b"))
    assert disk_cache.read("b") is None


# ---- what somebody else can have written


def link(path):
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


#: What is done to the file or to the folder, and what the warning says.
TAMPERED = {
    "file that its group may write": (lambda d, f: f.chmod(0o620), "others may write .*kept"),
    "file that anybody may write": (lambda d, f: f.chmod(0o602), "others may write .*kept"),
    "file that is a link": (lambda d, f: link(f), "kept is no plain file"),
    "file that is a pipe": (lambda d, f: replace_by_pipe(f), "kept is no plain file"),
    "file that is a folder": (lambda d, f: replace_by_folder(f), "kept is no plain file"),
    "folder that its group may write": (lambda d, f: d.chmod(0o770), "may write .*kept .mode 770"),
    "folder that anybody may write": (lambda d, f: d.chmod(0o1777), "others may write .*kept"),
    "folder that is a link": (lambda d, f: link(d), "is a symbolic link"),
}


@pytest.mark.parametrize("tampered", TAMPERED)
def test_what_others_can_have_written_is_refused_with_one_warning(folder, tampered):
    disk_cache.keep("a", b"code")
    disk_cache.keep("b", b"code")
    change, message = TAMPERED[tampered]
    change(folder, disk_cache._file("a"))
    with pytest.warns(UserWarning, match=message) as caught:
        assert disk_cache.read("a") is None
    assert len(caught) == 1
    assert "gpuscheduler.cache-directory" in str(caught[0].message)
    assert disk_cache.read("a") is None  # and says nothing more
    assert disk_cache.read("b") == (None if tampered.startswith("folder") else b"code")


@pytest.mark.parametrize("theirs", ["folder", "file"])
def test_what_belongs_to_somebody_else_is_refused(folder, monkeypatch, theirs):
    disk_cache.keep("a", b"code")
    real = os.fstat
    inode = (folder if theirs == "folder" else disk_cache._file("a")).stat().st_ino

    def fstat(handle):
        facts = real(handle)
        if facts.st_ino != inode:
            return facts
        return SimpleNamespace(st_mode=facts.st_mode, st_uid=facts.st_uid + 1)

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.warns(UserWarning, match="belongs to user"):
        assert disk_cache.read("a") is None
    if theirs == "folder":  # nothing is written there either
        disk_cache.keep("new", b"code")
        assert len(list(folder.iterdir())) == 1


def test_refused_file_is_replaced(folder):
    disk_cache.keep("a", b"planted")
    disk_cache._file("a").chmod(0o666)
    with pytest.warns(UserWarning, match="others may write"):
        assert disk_cache.read("a") is None
    disk_cache.keep("a", b"compiled again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert disk_cache.read("a") == b"compiled again"
    assert disk_cache._file("a").stat().st_mode & 0o777 == 0o600


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_what_others_can_have_written_is_not_unpickled(folder, tmp_path):
    codegen = SimpleNamespace(magic_tuple=lambda: ("a processor",))
    context = SimpleNamespace(codegen=lambda: codegen, refresh=lambda: None)
    kept, mark = numba_cpu._DiskCache("words"), tmp_path / "was unpickled"
    disk_cache.keep(kept._add_processor(context), pickle.dumps(Planted(mark)))
    assert kept.load_overload(None, context) is None
    assert mark.exists()  # ours is
    mark.rmdir()
    disk_cache._file(kept._add_processor(context)).chmod(0o666)
    with pytest.warns(UserWarning, match="others may write"):
        assert kept.load_overload(None, context) is None
    assert not mark.exists()


def test_without_owners_nothing_is_kept(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, "_HAVE_OWNERS", False)
    disk_cache.keep("a", b"code")
    assert disk_cache.read("a") is None
    assert not folder.exists()


def test_a_disk_that_cannot_be_written_does_not_matter(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with config.set({"gpuscheduler.cache-directory": str(tmp_path / "file" / "kept")}):
        disk_cache.keep("a", b"code")
        assert disk_cache.read("a") is None


def aged(folder, seconds):
    for file in folder.iterdir():
        facts = file.stat()
        os.utime(file, (facts.st_atime, facts.st_mtime - seconds))


def test_files_that_nobody_has_asked_for_go_first(folder, monkeypatch):
    """Eight of 1 KiB each, room for four: of the old ones that which was found since is left."""
    monkeypatch.setattr(disk_cache, "MOST_BYTES", 4 * 1056)
    monkeypatch.setattr(disk_cache, "LOOK_EVERY", 8 * 1024)
    monkeypatch.setattr(disk_cache, "_added", 0)
    for n in range(7):
        disk_cache.keep(n, bytes(1024))
        aged(folder, 100)
    others = folder / "mine.txt", folder / f"{'a' * 63}.kept"
    for other in others:
        other.write_bytes(bytes(2**14))
        os.utime(other, (0, 0))
    assert disk_cache.read(0) is not None
    disk_cache.keep(7, bytes(1024))
    assert [n for n in range(8) if disk_cache.read(n)] == [0, 6, 7]
    assert all(other.exists() for other in others)


def test_what_a_killed_process_left_goes_too(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, "MOST_BYTES", 2000)
    disk_cache.keep("a", bytes(1024))
    (file,) = folder.iterdir()
    left = folder / f"{file.name}.x1y2"
    left.write_bytes(bytes(1024))
    os.utime(left, (0, 0))
    disk_cache.trim(folder)
    assert list(folder.iterdir()) == [file]


def test_several_processes_may_make_room_at_once(folder):
    """Each finds what it has just kept, or nothing; none fails."""
    code = """
import sys
from gpuscheduler import disk_cache
disk_cache.MOST_BYTES, disk_cache.LOOK_EVERY = 20_000, 1
for n in range(100):
    content = bytes([n % 256]) * 1000
    disk_cache.keep(n, content)
    for m in (n, n - 7):
        assert disk_cache.read(m) in (None, bytes([m % 256]) * 1000)
"""
    given = {**os.environ, "DASK_GPUSCHEDULER__CACHE_DIRECTORY": str(folder)}
    every = [subprocess.Popen([sys.executable, "-c", code], env=given) for _ in range(3)]
    assert [p.wait() for p in every] == [0, 0, 0]
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 25_000
