"""Start the live page: a child process that draws what snapshots say.

The process that computes writes numbers, and another one draws: Bokeh in a thread of the first
would take the interpreter from those that launch. The child ends when its standard input closes.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import finalize

from dask import config

from ..forks import new_lock
from ..options import ADDRESS
from .log import logger
from .snapshot import SchedulerFacts, sampler

#: The port of the page, where it is free.
PORT = 8788
#: Seconds for which a child may take to end.
PATIENCE = 5.0


def parse_address(value: Any) -> tuple[str, int | None] | None:
    """Host and port of the option `dashboard`; None for what is no address.

    The port is None where any will do.

    >>> parse_address(True), parse_address(":9000"), parse_address("0.0.0.0:80"), parse_address("x")
    (('localhost', None), ('localhost', 9000), ('0.0.0.0', 80), None)
    """
    if value is True:
        return "localhost", None
    found = ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else (found[1] or "localhost", int(found[2]))


def listen(host: str, port: int | None) -> list[socket.socket]:
    """Listening sockets on a port; without one on `PORT`, or on any that is free.

    The child is given them: between a look for a free port and its use another could take it.
    Raises OSError for a port that is taken.
    """
    for wanted in (PORT, 0) if port is None else (port,):
        try:
            sockets = _bind(host, wanted)
        except OSError as error:
            if port is None and wanted:
                continue
            raise OSError(
                error.errno, f"dashboard: port {port} of {host} cannot be used ({error}); "
                "use dashboard=True for one that is free"
            ) from error  # fmt: skip
        if wanted == 0 and port is None:
            logger("dashboard").info(
                "port %d is in use; hosting the dashboard on port %d instead",
                PORT, sockets[0].getsockname()[1],
            )  # fmt: skip
        return sockets
    raise AssertionError("sockets were bound or an error raised")


def _bind(host: str, port: int) -> list[socket.socket]:
    """Sockets on one port of each address of a host: localhost has one of IPv4 and one of IPv6."""
    found = {(kind, to[0]): None for kind, _, _, _, to in socket.getaddrinfo(host, port)}
    sockets: list[socket.socket] = []
    try:
        for kind, address in sorted(found):
            try:
                sockets.append(socket.create_server((address, port), family=kind))
            except OSError as error:
                if not (
                    sockets and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                ):  # IPv6 is switched off
                    raise
            port = sockets[0].getsockname()[1]
    except BaseException:
        for s in sockets:
            s.close()
        raise
    return sockets


def require_bokeh() -> None:
    """Raise ImportError where the page cannot be drawn, before anything starts."""
    if find_spec("bokeh") is None:
        raise ImportError(
            "the dashboard needs bokeh: pip install bokeh (or dask[diagnostics]); dashboard='top', "
            "for gpuscheduler top, works without it"
        )


class PageServer:
    """The child process of one page."""

    def __init__(self, host: str, sockets: list[socket.socket]):
        self.host, self.port = host, int(sockets[0].getsockname()[1])
        if host not in ("localhost", "127.0.0.1", "::1"):
            logger("dashboard").warning(
                "the dashboard on %s:%d can be read by whoever reaches it and knows its path",
                host, self.port,
            )  # fmt: skip
        #: Other users of the machine reach localhost, too: they cannot guess this.
        self.path = f"/{secrets.token_urlsafe(12)}"
        self.users = 0  # schedulers
        self.pid = os.getpid()
        self._closing = False
        files = [s.fileno() for s in sockets]
        arguments = {
            "pid": self.pid, "host": host, "port": self.port, "path": self.path, "sockets": files,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpuscheduler.diagnostics.page", json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the process that computes
            pass_fds=files,
        )  # fmt: skip
        self._waiter = threading.Thread(
            target=self._await_end, name="gpuscheduler-dashboard", daemon=True
        )
        self._waiter.start()

    @property
    def url(self) -> str:
        host = "localhost" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}{self.path}/"

    @property
    def is_running(self) -> bool:
        return self.pid == os.getpid() and self.process.poll() is None

    def _await_end(self) -> None:
        code = self.process.wait()
        if not self._closing:
            logger("dashboard").warning(
                "the dashboard's process has ended (%s); it is not started again", code
            )

    def close(self) -> None:
        """End the child."""
        if self.pid != os.getpid():
            return
        self._closing = True
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._waiter.join(PATIENCE)


class Dashboard:
    """The live page of a scheduler; `url` leads to it.

    In a notebook it is shown as a link and an inline frame.
    """

    def __init__(self, observed: SchedulerFacts, server: PageServer):
        self._number, self._server = observed.number, server

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return self._server.url

    @property
    def link(self) -> str:
        """The address by Dask's template ``distributed.dashboard.link``, as behind a proxy."""
        template = config.get("distributed.dashboard.link", None)
        if not template or template == "{scheme}://{host}:{port}/status":
            return self.url
        given = {
            "scheme": "http", "host": self._server.host, "port": self._server.port, **os.environ
        }  # fmt: skip
        try:
            return (
                str(template).format(**given).removesuffix("status") + f"{self._server.path[1:]}/"
            )
        except KeyError:
            return self.url

    def __repr__(self) -> str:
        return f"<Dashboard {self.link}>"

    def _repr_html_(self) -> str:
        link = self.link
        return (
            f"<a href='{link}' target='_blank'>{link}</a><br>"
            f"<iframe src='{link}' width='100%' height='640' style='border:0'></iframe>"
        )


_lock = new_lock()
_servers: list[PageServer] = []


def open_dashboard(scheduler: Any, option: Any) -> Dashboard | None:
    """Write snapshots of a scheduler, and show them as the option says.

    "top" writes snapshots only: None. Schedulers of one process share a page. A scheduler that
    cannot have its page is closed.

    Raises
    ------
    ImportError
        without Bokeh.
    OSError
        for a port that is taken, or where snapshots cannot be written.
    """
    try:
        return _open(SchedulerFacts.from_scheduler(scheduler), option)
    except BaseException:
        scheduler.close()
        raise


def _open(observed: SchedulerFacts, option: Any) -> Dashboard | None:
    program = Path(sys.argv[0] or "python").name
    if option == "top":
        _add(observed, program)
        return None
    address = parse_address(option)
    if address is None:
        raise ValueError(f"dashboard={option!r}: use True, 'top', or an address such as ':8788'")
    host, port = address
    require_bokeh()
    with _lock:
        _servers[:] = [s for s in _servers if s.is_running]
        for server in _servers:
            if server.host == host and port in (None, server.port):
                break
        else:
            server = _start(host, port)
        try:
            _add(observed, program)
        except BaseException:
            if not server.users:
                server.close()
            raise
        if not server.users:
            _servers.append(server)
        server.users += 1
    return Dashboard(observed, server)


def _start(host: str, port: int | None) -> PageServer:
    """The child of a new page, which has the listening sockets for itself."""
    sockets = listen(host, port)
    try:
        return PageServer(host, sockets)
    finally:
        for s in sockets:
            s.close()


def _add(observed: SchedulerFacts, program: str) -> None:
    """Write snapshots of a scheduler, at most as long as there is one."""
    sampler.add(observed, program)
    finalize(observed.scheduler(), sampler.remove_later, observed.number).atexit = False


def require_page(dashboard: Dashboard | None) -> Dashboard:
    """The dashboard; raises RuntimeError where there is none."""
    if dashboard is None:
        raise RuntimeError("this scheduler has no page: make it with Scheduler(dashboard=True)")
    return dashboard


def close_dashboard(number: int, dashboard: Dashboard | None) -> None:
    """Write no more snapshots of a scheduler; the last one ends the page."""
    sampler.remove(number)
    if dashboard is None:
        return
    server = dashboard._server
    with _lock:
        server.users -= 1
        last = server.users <= 0
        if last and server in _servers:
            _servers.remove(server)
    if last:
        server.close()
