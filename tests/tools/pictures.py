"""Make the pictures of docs/observing.md anew: `python -m tests.tools.pictures [FOLDER]`.

Needs Chromium (Debian's package) and Bokeh. Look at each picture: would you know within ten seconds
which layer takes the time, which device waits, and whether memory is short?
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.browser import take_screenshot

ROOT = Path(__file__).parents[2]
#: What the pictures show.
PROGRAM = """
import dask
import dask.array as da
import gpuscheduler
import numpy as np


def normalise(b):
    return (b - np.percentile(b, 75)) / b.std()


def build(side=6000, chunks=1000):
    x = gpuscheduler.random.default_rng(0).random((side, side), chunks=chunks)
    return x, (da.exp(x.map_blocks(normalise)) + 1).sum()
"""
STILL = """
from wave import *

with gpuscheduler.Scheduler("cpu:2", memory_limit="60 MiB") as scheduler:
    x, y = build()
    open("explain.html", "w").write("<meta charset=utf-8>" + scheduler.explain(y)._repr_html_())
    with gpuscheduler.report("report.html"):
        y.compute()
        (x + x.T).mean(axis=0).compute()
"""
LIVE = """
import sys
from wave import *

scheduler = gpuscheduler.Scheduler("cpu:4", dashboard=True, memory_limit="80 MiB")
print(scheduler.dashboard.url, flush=True)
with scheduler:
    x, _ = build(3000, 500)
    x = x.persist()
    with dask.annotate(device=0):
        z = x.map_blocks(normalise)
    while True:
        (z + 1).sum().compute()
        (x * 2).sum().compute()
"""


def make_pictures(folder: Path) -> None:
    """Run the programs, and write what they show."""
    with tempfile.TemporaryDirectory() as work:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{work}"}
        for name, text in (("wave", PROGRAM), ("still", STILL), ("live", LIVE)):
            Path(work, f"{name}.py").write_text(text.lstrip(), encoding="utf-8")
        subprocess.run([sys.executable, "still.py"], check=True, cwd=work, env=env)
        take_screenshot(f"file://{work}/explain.html", folder / "explain.png", (1240, 290))
        take_screenshot(f"file://{work}/report.html", folder / "report.png", (1240, 1020))
        live = subprocess.Popen(
            [sys.executable, "live.py"], cwd=work, env=env, stdout=subprocess.PIPE, text=True
        )
        try:
            url = live.stdout.readline().strip()
            for _ in range(2):  # it is recorded while somebody looks
                take_screenshot(url, folder / "live-page.png", (1400, 820), 25.0)
        finally:
            live.kill()
            live.wait()


if __name__ == "__main__":
    make_pictures(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "pictures")
