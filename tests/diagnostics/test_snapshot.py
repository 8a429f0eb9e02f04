"""Snapshots: what is in them, how they are written and read, and who writes them."""

from __future__ import annotations

import gc
import json
import os
import stat
import subprocess
import sys
import threading
import time

import dask.array as da
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuscheduler import Scheduler
from gpuscheduler.diagnostics import snapshot, snapshot_file
from gpuscheduler.diagnostics.headline import headlines
from gpuscheduler.diagnostics.lanes import LaneReader
from gpuscheduler.diagnostics.snapshot import SchedulerFacts, SnapshotTaker, sampler
from gpuscheduler.diagnostics.snapshot_file import (
    HEADER,
    MAGIC,
    SIZE,
    VERSION,
    SnapshotError,
    SnapshotFile,
    find_snapshots,
    make_folder,
    read_process,
    read_snapshot,
    remove_stale,
    watch,
)
from gpuscheduler.plan.machine import HOST
from gpuscheduler.runtime.observe import Level

PATIENCE = 60


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "gpuscheduler"


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


# ---- files


@given(st.lists(st.dictionaries(st.text(max_size=9), st.integers()), min_size=1, max_size=5))
def test_what_is_written_last_is_read(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("snapshots") / "1-1"
    file = SnapshotFile(path)
    assert read_snapshot(path) is None  # nothing was written yet
    for value in values:
        file.write(json.dumps(value).encode())
        assert read_snapshot(path) == value
    assert path.stat().st_size == SIZE
    file.close()
    assert not path.exists()
    assert read_snapshot(path) is None


def test_a_file_is_for_its_user_alone(folder):
    made = make_folder()
    assert made == folder
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    file = SnapshotFile(made / "1-1")
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.close()


def test_a_folder_that_others_may_enter_is_refused(folder):
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(SnapshotError, match="XDG_RUNTIME_DIR"):
        make_folder()


def test_without_a_folder_a_scheduler_is_not_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    threads = threading.active_count()
    with pytest.raises(OSError, match="no place for snapshots"):
        Scheduler("cpu:2", dashboard="top")
    until(lambda: threading.active_count() == threads)
    with Scheduler("cpu:2"):  # others are unaffected
        assert int(da.arange(10, chunks=5).sum().compute()) == 45


def test_a_torn_snapshot_is_not_read(tmp_path):
    """A writer that stopped in the middle; the reader gives up, and reads the next one."""
    path = tmp_path / "1-1"
    file = SnapshotFile(path)
    file.write(b'{"a": 1}')
    file._map[: HEADER.size] = HEADER.pack(MAGIC, VERSION, 3, 8)
    pauses = []
    assert read_snapshot(path, pauses.append) is None
    assert len(pauses) == snapshot_file.TRIES

    def go_on(_):
        file.write(b'{"b": 2}')

    file._map[: HEADER.size] = HEADER.pack(MAGIC, VERSION, 3, 8)
    assert read_snapshot(path, go_on) == {"b": 2}
    file.close()


def test_a_file_of_another_version_is_an_error(tmp_path):
    path = tmp_path / "1-1"
    path.write_bytes(HEADER.pack(MAGIC, VERSION + 1, 2, 2) + b"{}")
    with pytest.raises(SnapshotError, match="version"):
        read_snapshot(path)
    path.write_bytes(b"no")
    assert read_snapshot(path) is None


def test_readers_see_whole_snapshots_while_they_are_written(tmp_path):
    path = tmp_path / "1-1"
    file = SnapshotFile(path)
    file.write(b"[0, 0]")
    seen, over = [], threading.Event()

    def read():
        while not over.is_set():
            seen.append(read_snapshot(path))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(300):
        file.write(json.dumps([n] * (1 + n % 700)).encode())
    until(lambda: len(seen) > 30)
    over.set()
    for thread in threads:
        thread.join()
    file.close()
    assert all(len(set(found)) == 1 for found in seen if found is not None)


def test_files_of_processes_that_have_ended_are_removed(folder):
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    make_folder()
    gone, mine = folder / f"{int(done.stdout)}-1", folder / f"{os.getpid()}-7"
    for path in (gone, mine):
        SnapshotFile(path)._map.close()
        watch(path)
    assert set(find_snapshots(folder)) == {(int(done.stdout), 1), (os.getpid(), 7)}
    remove_stale(folder)
    assert [p.name for p in sorted(folder.iterdir())] == [mine.name, f"{mine.name}.watched"]


# ---- what is in a snapshot


def double(block):
    return block * 2


def work(n=64):
    x = da.arange(n * 100, chunks=100)
    return (x + 1).map_blocks(double).sum()


def test_a_snapshot_has_devices_layers_and_runs():
    with Scheduler("cpu:2", memory_limit="1 GiB", observe="steps") as s:
        taker = SnapshotTaker(SchedulerFacts.from_scheduler(s), "wave.py")
        kept = da.ones(2**17, chunks=2**14).persist()
        for _ in range(3):
            work().compute()
        found = json.loads(taker.encode())
        del kept
    assert found["program"] == "wave.py"
    assert found["pid"] == os.getpid()
    assert [d["device"] for d in found["devices"]] == [0, 1]
    assert all(d["persisted"] == 2**20 == d["values"] for d in found["devices"])
    assert all(d["limit"] == 2 * 2**30 for d in found["devices"])  # which they share
    assert sum(layer["steps"] for layer in found["layers"]) == sum(r.steps for r in s.recorder.runs)
    assert any("double" in layer["label"] for layer in found["layers"])
    assert found["last"]["steps"] == s.recorder.runs[-1].steps
    assert found["runs"] == []
    bars = [b for bars in found["lanes"]["bars"].values() for b in bars]
    assert bars
    assert all(
        first >= 0 and n >= 1 and first + n <= found["lanes"]["bins"] for first, n, *_ in bars
    )
    assert found["memory"]["places"]["0"][-1] >= 2**20


def test_seconds_of_layers_are_those_of_the_rows():
    with Scheduler("cpu:2", observe="steps") as s:
        reader = LaneReader(s.recorder)
        for _ in range(4):
            work().compute()
            reader.read()
        rows = s.recorder.rows()
        want = sum(r.end - r.begin for r in rows) / 1e9
        totals = reader.totals()
    assert sum(t.seconds for t in totals) == pytest.approx(want)
    assert sum(t.steps for t in totals) == len(rows)
    assert {t.label for t in totals} == {r.label for r in rows}


def test_lanes_are_bounded_in_memory_and_time():
    with Scheduler("cpu:2", observe="steps") as s:
        reader = LaneReader(s.recorder, window=0.01, bins=5)
        for _ in range(10):
            work(200).compute()
            reader.read()
            assert all(len(lanes) <= 6 for lanes in reader._busy.values())
        now = s.recorder.clock()
        assert all(b.first + b.bins <= 5 for bars in reader.bars(now).values() for b in bars)
        assert reader.bars(now + 10**12) == {p: [] for p in reader._busy}


def test_a_run_under_way_tells_how_much_is_left():
    seen, over = [], threading.Event()
    with Scheduler("cpu:2", observe="steps") as s:
        taker = SnapshotTaker(SchedulerFacts.from_scheduler(s), "wave.py")

        def look(block):
            if block.size and not seen:
                seen.append(taker.take())
            return block

        x = da.arange(40, chunks=4).map_blocks(look, dtype=int)
        assert int(x.sum().compute()) == 780
        over.set()
    (found,) = seen
    (run,) = found["runs"]
    assert run["left"] >= 1
    assert run["steps"] >= run["left"]
    assert run["how"] == "steps"
    assert headlines(found)[0].text.startswith(f"run {run['number']}: ")
    assert sum(layer["left"] for layer in found["layers"]) <= run["left"]


@pytest.mark.parametrize("observe", ["counters", "steps"])
def test_a_step_that_runs_for_long_is_seen_before_it_ends(observe):
    """Also in a run that began before anybody looked."""
    begun, over = threading.Event(), threading.Event()

    def waiting(block):
        if block.size:
            begun.set()
            assert over.wait(PATIENCE)
        return block

    with Scheduler("cpu:2", observe=observe) as s:
        x = da.ones(8, chunks=4).map_blocks(waiting, dtype=float)
        thread = threading.Thread(target=x.compute)
        thread.start()
        try:
            assert begun.wait(PATIENCE)
            reader = LaneReader(s.recorder)
            reader.since -= 10**9
            until(lambda: reader.read() or reader.bars(s.recorder.clock()))
            until(lambda: reader.read() or any("waiting" in t.label for t in reader.totals()))
            now = s.recorder.clock()
            labels = {b.label for bars in reader.bars(now).values() for b in bars}
            assert any("waiting" in label for label in labels)
        finally:
            over.set()
            thread.join()


def test_sampled_seconds_are_those_that_went_by():
    """Between two looks no more time than there was goes to a device."""
    with Scheduler("cpu:1") as s:
        looks = []

        def look(block):
            if block.size:
                looks.append(s.recorder.clock())
                reader.read()
                looks.append(s.recorder.clock())
            return block

        reader = LaneReader(s.recorder)
        x = da.arange(40, chunks=4).map_blocks(look, dtype=int)
        x.sum().compute()
        went_by = (looks[-1] - looks[0]) / 1e9
        assert sum(t.seconds for t in reader.totals()) <= went_by + 1e-6


def test_host_rows_are_in_the_lane_of_the_host():
    with Scheduler("cpu:2", observe="steps") as s:
        reader = LaneReader(s.recorder)
        work().compute()
        record = s.recorder.runs[-1]
        record.is_host = True
        reader.read()
    assert set(reader._busy) == {HOST}


def test_a_long_snapshot_is_cut_until_it_fits(monkeypatch):
    with Scheduler("cpu:2", observe="steps") as s:
        taker = SnapshotTaker(SchedulerFacts.from_scheduler(s), "wave.py")
        for n in range(50):
            s.recorder.note("x" * 150, number=n)
        work().compute()
        whole = taker.encode()
        assert json.loads(whole)["notes"]
        monkeypatch.setattr(snapshot, "SIZE", len(whole) - 3000)
        cut = json.loads(taker.encode())
        assert cut["notes"] == []
        assert cut["devices"]
        monkeypatch.setattr(snapshot, "SIZE", 100)
        with pytest.raises(ValueError, match="too long"):
            taker.encode()


# ---- who writes


def test_snapshots_are_written_while_somebody_looks(monkeypatch):
    with Scheduler("cpu:2", dashboard="top") as s:
        ((_, path),) = find_snapshots().items()
        assert s.recorder.level == Level.COUNTERS
        assert read_snapshot(path) is None
        work().compute()
        until(lambda: list(read_process(os.getpid())))
        assert s.recorder.level == Level.STEPS
        work().compute()
        until(lambda: next(read_process(os.getpid()))["layers"])
        monkeypatch.setattr(snapshot_file, "WATCHED", -1.0)  # nobody looks any more
        until(lambda: s.recorder.level == Level.COUNTERS)
    assert find_snapshots() == {}
    assert sampler._thread is None


@pytest.mark.parametrize("others", [0, 1])
def test_a_scheduler_that_is_collected_waits_for_no_lock(others):
    """Garbage is collected in any thread, also in one that holds the sampler's lock."""
    kept = [Scheduler("cpu:2", dashboard="top") for _ in range(others)]
    gone = Scheduler("cpu:2", dashboard="top")

    def collect():
        nonlocal gone
        with sampler._lock:
            del gone
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    until(lambda: len(find_snapshots()) == others)
    for s in kept:
        s.close()
    until(lambda: sampler._thread is None)
    with Scheduler("cpu:2", dashboard="top"):  # which starts the thread again
        work().compute()
        until(lambda: list(read_process(os.getpid())))


def test_a_snapshot_that_cannot_be_taken_harms_no_run(monkeypatch, caplog):
    def fail(self):
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(SnapshotTaker, "encode", fail)
    with Scheduler("cpu:2", dashboard="top"):
        list(read_process(os.getpid()))
        until(lambda: caplog.records)
        assert int(da.arange(10, chunks=5).sum().compute()) == 45
    assert len([r for r in caplog.records if r.name == "gpuscheduler.dashboard"]) == 1


def test_a_scheduler_without_a_page_says_how_to_get_one():
    with Scheduler("cpu:2") as s, pytest.raises(RuntimeError, match="dashboard=True"):
        _ = s.dashboard
    with Scheduler("cpu:2", dashboard="top") as s, pytest.raises(RuntimeError, match="no page"):
        _ = s.dashboard


def test_two_schedulers_have_two_files():
    with Scheduler("cpu:2", dashboard="top") as a, Scheduler("cpu:2", dashboard="top") as b:
        assert len(find_snapshots()) == 2
        found = until(lambda: (f := list(read_process(os.getpid()))) and len(f) == 2 and f)
        assert {f["scheduler"] for f in found} == {a.number, b.number}
    assert find_snapshots() == {}
