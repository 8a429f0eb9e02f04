"""The tool that measures what recording costs: it checks results and rows before it times."""

from __future__ import annotations

import sys

import pytest

from graphs.bench import observe


@pytest.mark.gpu
def test_it_measures_each_level(monkeypatch, capsys):
    words = ["observe", "--steps", "50", "--repeat", "1", "--launches", "16"]
    monkeypatch.setattr(sys, "argv", words)
    observe.main()
    out = capsys.readouterr().out
    assert "50 instant steps" in out
    assert "a replay, 16 blocks on one GPU" in out
    assert out.count("counters") == 3
