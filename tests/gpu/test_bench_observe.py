"""The tool that measures what recording costs: it checks results and rows before it times."""

from __future__ import annotations

import sys

import pytest

from graphs.bench import observe

from .conftest import fake


@pytest.mark.gpu
def test_it_measures_each_level(monkeypatch, capsys):
    words = ["observe", "--steps", "50", "--repeat", "1", "--launches", "16"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(observe, "SIZES", (2**12,))
    if fake:  # whose kernels do not spin, and whose events have the host's times
        monkeypatch.setattr(observe, "compare_with_events", lambda: True)
        monkeypatch.setattr(observe, "print_sensors", lambda: None)
    assert observe.main() == 0
    out = capsys.readouterr().out
    assert "50 instant steps" in out
    assert "host time on one GPU: replay, 9 steps" in out
    assert out.count("counters") == 3
    assert "apart = b - b.mean()" in out
