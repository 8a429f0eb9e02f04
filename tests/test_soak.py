"""A short soak; `python tests/tools/soak.py --minutes 30` is a long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_few_seconds_of_everything_leave_nothing_behind():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(ROOT / "tests" / "tools" / "soak.py"), "--seconds", "5"]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "nothing is left" in out.stdout
