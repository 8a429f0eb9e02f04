"""Chromium without a screen: pictures of pages, and what the browser's console says."""

from __future__ import annotations

import http.server
import shutil
import socketserver
import subprocess
import tempfile
import threading
import time
from pathlib import Path

#: Debian's package chromium.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: No first-run pages, and nothing of the network.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr",
]  # fmt: skip
#: Seconds that a browser may take.
PATIENCE = 120


def browse(url: str, *flags: str) -> subprocess.CompletedProcess:
    """Open an address; `--dump-dom` prints the page, the console's lines are in `stderr`."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)


def take_screenshot(url: str, path: Path, size: tuple[int, int], seconds: float = 0.0) -> list[str]:
    """Write a picture of a page as it is after some seconds; returns the console's lines."""
    holder = _Holder(url, size, seconds)
    try:
        address = f"http://localhost:{holder.server_address[1]}/" if seconds else url
        done = browse(
            address, f"--window-size={size[0]},{size[1]}", f"--screenshot={path}",
            *["--virtual-time-budget=3000"] * (seconds > 0),
        )  # fmt: skip
    finally:
        holder.shutdown()
        holder.server_close()
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


class _Holder(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves a page around the page, which is loaded only when some seconds are over.

    Chromium's virtual time stands still while something is loaded, so that what comes by a
    websocket meanwhile is drawn.
    """

    daemon_threads = True

    def __init__(self, url: str, size: tuple[int, int], seconds: float):
        self.url, self.size, self.seconds = url, size, seconds
        super().__init__(("localhost", 0), _Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/slow":
            time.sleep(self.server.seconds)
            return
        width, height = self.server.size
        style = f"border:0;width:{width}px;height:{height}px"
        frame = f"<iframe src='{self.server.url}' style='{style}'></iframe>"
        self.wfile.write(f"<body style='margin:0'>{frame}<img src='/slow' width=0>".encode())

    def log_message(self, *args):
        pass
