"""What is logged of runs, and at which level."""

from __future__ import annotations

import gc
import logging
import weakref

import dask.array as da
import pytest

from gpuscheduler import Scheduler
from gpuscheduler.diagnostics import log
from gpuscheduler.diagnostics.log import format_run, log_run, logger
from gpuscheduler.errors import DeviceLost
from gpuscheduler.plan.machine import DISK, HOST
from gpuscheduler.plan.plan import Footprint
from gpuscheduler.runtime.observe import Recorder


def records(caplog, level):
    return [r for r in caplog.records if r.name == "gpuscheduler.run" and r.levelno == level]


def test_each_run_is_a_line_at_debug(caplog):
    with caplog.at_level(logging.DEBUG, "gpuscheduler"), Scheduler("cpu:2") as s:
        for _ in range(2):
            da.ones(100, chunks=10).sum().compute()
    lines = records(caplog, logging.DEBUG)
    assert len(lines) == 2
    assert lines[0].run == s.recorder.runs[0].number
    assert lines[0].steps == s.recorder.runs[0].steps
    assert "plan new" in lines[0].getMessage()
    assert "peak " in lines[0].getMessage()


def test_a_long_run_and_a_failed_one_are_lines_at_info(caplog, monkeypatch):
    def fail(block):
        raise KeyError("mine")

    with caplog.at_level(logging.INFO, "gpuscheduler"), Scheduler("cpu:2"):
        da.ones(100, chunks=10).sum().compute()
        assert not records(caplog, logging.INFO)
        with pytest.raises(KeyError, match="mine"):
            da.ones(4, chunks=2).map_blocks(fail, dtype=float).compute()
        monkeypatch.setattr(log, "LONG", 0.0)
        da.ones(100, chunks=10).sum().compute()
    failed, long = records(caplog, logging.INFO)
    assert failed.getMessage().endswith("KeyError: 'mine'")
    assert " steps in " in long.getMessage()


def test_nothing_is_made_of_a_line_that_nobody_reads(monkeypatch):
    monkeypatch.setattr(log, "format_run", None)
    logging.getLogger("gpuscheduler").setLevel(logging.WARNING)
    try:
        record = Recorder(lambda: 5).begin()
        record.recorder.end(record)
        log_run(record)
    finally:
        logging.getLogger("gpuscheduler").setLevel(logging.NOTSET)


def test_a_line_tells_of_waiting_and_spilling():
    times = iter([0, 10, 20, 30])
    record = Recorder(lambda: next(times)).begin("8 host threads")
    record.planned, record.steps = "template", 1234
    record.planned_ns, record.admitted = 10**9, 3 * 10**9
    record.footprint = Footprint(1.0, {0: 5000}, {}, {HOST: 700, DISK: 0})
    record.recorder.end(record)
    assert format_run(record, 2.5) == (
        f"run {record.number} on 8 host threads: 1,234 steps in 2.5 s; plan template, "
        "waited 2 s for memory, peak 5,000 bytes, spilled 700 bytes to the host"
    )


def test_a_lost_device_is_an_error_of_the_log(caplog, monkeypatch):
    with caplog.at_level(logging.ERROR, "gpuscheduler"), Scheduler("cpu:2") as s:
        monkeypatch.setattr(
            s.hardware, "recognize_loss", lambda error: DeviceLost("it answers no longer")
        )
        with pytest.raises(DeviceLost):
            da.ones(4, chunks=2).map_blocks(lambda b: 1 // 0, dtype=float).compute()
    (line,) = records(caplog, logging.ERROR)
    assert line.getMessage() == "it answers no longer"


# ---- what goes into recordings, too


def test_warnings_failures_and_spilling_are_notes_of_a_recording(tmp_path):
    """All of x has room, and nothing beside it: blocks of it spill."""
    with (
        Scheduler("cpu:2", memory_limit="200 kB", spill_directory=tmp_path, fuse=False) as s,
        s.record("steps") as recording,
    ):
        x = da.ones((500, 100), chunks=(100, 100))
        (x + x[::-1]).sum().compute()
        with pytest.raises(ZeroDivisionError):
            da.ones(4, chunks=2).map_blocks(lambda b: 1 // 0, dtype=float).compute()
        logger("kernels").warning("%s has no kernel", "exp")
        logger("kernels").debug("not of interest")
    notes = {n.kind: n.text for n in recording.notes()}
    assert notes["warning"] == "exp has no kernel"
    assert notes["failed"].startswith("run ")
    assert "ZeroDivisionError" in notes["failed"]
    spilled = sum(recording.runs()[0].footprint.spilled.values())
    assert notes["spill"].startswith(f"run 1, bytes {spilled}, to ")


def test_a_note_tells_of_spilling_and_of_waiting_for_memory():
    recorder = Recorder(iter(range(0, 10**12, 10**9)).__next__)
    record = recorder.begin()
    record.planned_ns = 10**8
    record.note_admission()
    record.footprint = Footprint(1.0, {0: 5000}, {}, {HOST: 700, DISK: 0})
    recorder.end(record)
    assert [(n.kind, n.text) for n in recorder.notes] == [
        ("admit", "run 1, waited 0.9 s for memory"),
        ("spill", "run 1, bytes 700, to host"),
    ]


def test_what_is_logged_of_others_keeps_no_recorder_alive():
    recorder = Recorder(lambda: 5)
    log.note_handler.add(recorder)
    logger("run").warning("here")
    assert [n.text for n in recorder.notes] == ["here"]
    gone = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert gone() is None


def test_a_part_that_does_not_log_is_an_error():
    with pytest.raises(ValueError, match="'pages' is no part that logs"):
        logger("pages")
