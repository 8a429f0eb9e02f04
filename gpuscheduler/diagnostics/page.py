"""The live page, drawn by Bokeh from snapshots: `python -m gpuscheduler.diagnostics.page`.

It runs in a process of its own, which `serve` starts and which ends when its standard input closes.
A browser gets the next update when it has taken the last one, so a slow one gets fewer.
"""

from __future__ import annotations

import html
import json
import socket
import sys
import threading
from collections.abc import Callable
from time import localtime, strftime, time
from typing import Any

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    FactorRange,
    HoverTool,
    Range1d,
    TabPanel,
    Tabs,
)
from bokeh.models.annotations import BoxAnnotation
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from dask.utils import format_bytes
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from ..plan.machine import place_name
from .colours import BAD, COLOURS, GOOD, IDLE, PARTS, SMALL
from .headline import SHORT, Headline, headlines
from .snapshot_file import is_alive, read_process, remove_stale, snapshot_folder

#: Milliseconds between two updates of a page.
PERIOD = 500
#: Seconds for which the page lives on when the process that computed has ended.
AFTERWARDS = 5.0
#: Seconds without a new snapshot after which the page says so.
STALE = 3.0
WIDTH = 1380


class Colors(dict[str, str]):
    """A colour for each label, which it keeps."""

    def __missing__(self, label: str) -> str:
        self[label] = COLOURS[len(self) % len(COLOURS)]
        return self[label]


# ---- text


def headline_html(found: list[Headline]) -> str:
    """The headlines as one line of boxes."""
    boxes = []
    for h in found:
        color = BAD if h.is_bad else "#222222"
        boxes.append(
            f"<div style='padding:6px 12px;border-left:5px solid {BAD if h.is_bad else GOOD};"
            f"background:#f7f7f7;color:{color};font-size:15px'>{html.escape(h.text)}</div>"
        )
    return f"<div style='display:flex;flex-wrap:wrap;gap:10px'>{''.join(boxes)}</div>"


def _meter(part: float, color: str, height: int = 10) -> str:
    width = max(0.0, min(1.0, part)) * 100
    return (
        f"<div style='background:{IDLE};height:{height}px;width:100%'>"
        f"<div style='background:{color};height:{height}px;width:{width:.1f}%'></div></div>"
    )


def _memory_meter(device: dict[str, Any]) -> str:
    limit = max(1, device["limit"])
    kept = min(device["persisted"], device["values"])
    parts = {"persisted": kept, "values": device["values"] - kept, "working": device["working"]}
    bars = "".join(
        f"<div title='{what} {format_bytes(n)}' style='background:{PARTS[what]};height:10px;"
        f"width:{min(100.0, n / limit * 100):.1f}%'></div>"
        for what, n in parts.items()
    )
    return f"<div style='display:flex;background:{IDLE};height:10px;width:100%'>{bars}</div>"


def card_html(device: dict[str, Any]) -> str:
    """The card of one device."""
    sensors = device["sensors"]
    held = device["values"] + device["working"]
    short = max(held, device["peak"]) > SHORT * device["limit"]
    facts = []
    if (power := sensors.get("power")) is not None:
        facts.append(f"{power:.0f} W")
    if (heat := sensors.get("temperature")) is not None:
        facts.append(f"{heat} °C")
    if (clock := sensors.get("clock")) is not None:
        facts.append(f"{clock} MHz")
    if (used := sensors.get("utilization")) is not None:
        facts.append(f"NVML {used:.0%}")
    facts += [f"throttled: {why}" for why in sensors.get("throttled", ())]
    parts = [f"{what} {format_bytes(device[what])}" for what in PARTS if device[what]]
    parts.append(f"peak {format_bytes(device['peak'])}")
    name = html.escape(str(device["name"]))
    runs = f"runs steps {device['busy']:.0%} of the time"
    if device.get("momentary"):  # it is known of this moment only
        runs = "runs a step now" if device["busy"] else "idle now"
    return (
        "<div style='border:1px solid #ddd;padding:8px 10px;width:255px;font-size:12px'>"
        f"<b>device {device['device']}</b> <span style='color:{SMALL}'>{name}</span>"
        f"<div>{runs}</div>{_meter(device['busy'], GOOD)}"
        f"<div style='color:{BAD if short else 'inherit'}'>memory {format_bytes(held)} of "
        f"{format_bytes(device['limit'])}</div>{_memory_meter(device)}"
        f"<div style='color:{SMALL}'>{', '.join(parts)}</div>"
        f"<div style='color:{SMALL}'>{html.escape(', '.join(facts))}</div></div>"
    )


def runs_html(snapshot: dict[str, Any]) -> str:
    """Progress of the runs under way, and of layers."""
    out = []
    for run in snapshot["runs"]:
        done = 1 - run["left"] / run["steps"] if run["steps"] else 0.0
        what = "waits for memory" if run["waits"] else run["how"]
        count = f"{run['left']:,} of {run['steps']:,} left" if run["steps"] else ""
        where = f" on {run['where']}" if run["where"] else ""
        out.append(
            f"<div>run {run['number']}{html.escape(where)} ({what}, {run['seconds']:.1f} s) "
            f"{count}</div>{_meter(done, GOOD, 8)}"
        )
    last = snapshot["last"]
    if not out and last is not None:
        error = f" failed: {last['error']}" if last["error"] else ""
        out.append(
            f"<div>last: run {last['number']} ({last['how']}), {last['steps']:,} steps in "
            f"{last['seconds']:.3g} s{html.escape(error)}</div>"
        )
    counts = {tuple(key): n for *key, n in snapshot["totals"]}
    total = sum(int(n) for key, n in counts.items() if key[0] == "runs")
    out.append(f"<div style='color:{SMALL}'>{total:,} runs have ended</div>")
    return "".join(out)


def links_html(snapshot: dict[str, Any]) -> str:
    """Bytes over each link, and how fast they go now; what was spilled."""
    rows = [
        f"<tr><td>{place_name(src)} → {place_name(dst)}</td><td>{format_bytes(n)}</td>"
        f"<td>{format_bytes(int(rate))}/s</td></tr>"
        for src, dst, n, rate in sorted(snapshot["links"], key=lambda link: -link[2])[:8]
        if n
    ]
    table = f"<table style='border-spacing:10px 0'>{''.join(rows)}</table>" if rows else "nothing"
    spilled = [
        f"{format_bytes(entry['used'])} on the {place_name(int(place))}"
        for place, entry in snapshot["memories"].items()
        if int(place) < 0 and entry["used"]
    ]
    return f"<b>moved</b> {table}<br><b>spilled now</b> {', '.join(spilled) or 'nothing'}"


def notes_html(snapshot: dict[str, Any]) -> str:
    """The latest notes, the newest first."""
    lines = [
        f"<div>{strftime('%H:%M:%S', localtime(n['time']))} {html.escape(n['text'])}</div>"
        for n in reversed(snapshot["notes"][-12:])
    ]
    return f"<b>notes</b>{''.join(lines) or '<div>none</div>'}"


def with_gaps(times: list[float], values: list[float]) -> dict[str, list[float]]:
    """Points of a line, which is broken where nothing was read for some seconds."""
    out: dict[str, list[float]] = {"time": [], "bytes": []}
    for n, (when, value) in enumerate(zip(times, values, strict=True)):
        if n and when - times[n - 1] > STALE:
            out["time"].append(when)
            out["bytes"].append(float("nan"))
        out["time"].append(when)
        out["bytes"].append(value)
    return out


# ---- one tab


class SchedulerTab:
    """What is drawn of one scheduler."""

    def __init__(self, snapshot: dict[str, Any]):
        self.colors = Colors()
        self.head = Div(width=WIDTH)
        self.cards = Div(width=WIDTH)
        self.runs, self.links, self.notes = Div(width=440), Div(width=440), Div(width=460)
        self.lane_source = ColumnDataSource(
            {
                "left": [],
                "right": [],
                "place": [],
                "color": [],
                "label": [],
                "busy": [],
                "alpha": [],
            }
        )
        self.window = float(snapshot["lanes"]["window"])
        self.lanes = self._lanes()
        self.layer_source = ColumnDataSource(
            {"label": [], "name": [], "seconds": [], "color": [], "steps": [], "line": []}
        )
        self.layers = self._layers()
        self.memory_sources: dict[int, ColumnDataSource] = {}
        self.memory = self._memory(snapshot)
        self.root = column(
            self.head, self.cards, self.lanes, row(self.memory, self.layers),
            row(self.runs, self.links, self.notes),
        )  # fmt: skip
        self.update(snapshot, "")

    def _lanes(self) -> Any:
        plot = figure(
            width=WIDTH, height=170, title="what each device runs, over the last "
            f"{self.window:.0f} seconds (white: idle)", x_range=Range1d(start=-self.window, end=0),
            y_range=FactorRange(), tools="", toolbar_location=None,
        )  # fmt: skip
        plot.xaxis.formatter = CustomJSTickFormatter(code="return tick + ' s'")
        plot.grid.grid_line_color = None
        bars = plot.hbar(
            y="place", left="left", right="right", height=0.8, color="color", alpha="alpha",
            line_color=None, source=self.lane_source,
        )  # fmt: skip
        tips = [("", "@label"), ("busy", "@busy")]
        plot.add_tools(HoverTool(tooltips=tips, renderers=[bars]))
        return plot

    def _layers(self) -> Any:
        plot = figure(
            width=WIDTH // 2, height=270, title="which layers take the time, seconds",
            y_range=FactorRange(), tools="", toolbar_location=None,
        )  # fmt: skip
        bars = plot.hbar(
            y="name", right="seconds", height=0.75, color="color", line_color=None,
            source=self.layer_source,
        )  # fmt: skip
        plot.x_range.start = 0  # type: ignore[attr-defined]
        plot.grid.grid_line_color = None
        plot.yaxis.major_label_text_font_size = "12px"
        tips = [("", "@label"), ("line", "@line"), ("steps", "@steps"), ("seconds", "@seconds")]
        plot.add_tools(HoverTool(tooltips=tips, renderers=[bars]))
        return plot

    def _memory(self, snapshot: dict[str, Any]) -> Any:
        plot = figure(
            width=WIDTH // 2, height=270, title="memory for values (dashed: the limit)",
            x_range=Range1d(start=-self.window, end=0), y_range=Range1d(start=0, end=1), tools="",
            toolbar_location=None,
        )  # fmt: skip
        plot.xaxis.formatter = CustomJSTickFormatter(code="return tick + ' s'")
        limits = {int(p): m["limit"] for p, m in snapshot["memories"].items() if int(p) >= 0}
        for n, (place, limit) in enumerate(limits.items()):
            color = COLOURS[n % len(COLOURS)]
            source = self.memory_sources[place] = ColumnDataSource({"time": [], "bytes": []})
            name = place_name(place) if len(limits) > 1 else "all devices"
            plot.line("time", "bytes", color=color, line_width=2, source=source, legend_label=name)
            if limit:
                plot.line(
                    [-self.window, 0], [limit, limit], color=color, line_dash="dashed",
                    line_width=1.5,
                )  # fmt: skip
        if limits:
            most = max(filter(None, limits.values()), default=1)
            plot.add_layout(BoxAnnotation(
                bottom=SHORT * min(filter(None, limits.values()), default=1), top=2 * most,
                fill_color=BAD, fill_alpha=0.06,
            ))  # fmt: skip
            plot.y_range.end = 1.08 * most  # type: ignore[attr-defined]
            marks = [int(most * n / 4) for n in range(5)]
            plot.yaxis.ticker = marks
            plot.yaxis.major_label_overrides = {m: format_bytes(m) for m in marks}
            plot.legend.location = "top_left"
            plot.legend.background_fill_alpha = 0.6
        return plot

    def update(self, snapshot: dict[str, Any], banner: str) -> None:
        """Draw a snapshot."""
        when = strftime("%H:%M:%S", localtime(snapshot["time"]))
        where = f"{snapshot['program']} · process {snapshot['pid']} · {when}"
        title = f"<div style='font-size:13px;color:{SMALL}'>{html.escape(where)}</div>"
        if banner:
            title += f"<div style='font-size:16px;color:{BAD}'><b>{html.escape(banner)}</b></div>"
        self.head.text = title + headline_html(headlines(snapshot))
        cards = "".join(map(card_html, snapshot["devices"]))
        self.cards.text = f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{cards}</div>"
        self.runs.text = f"<b>runs</b>{runs_html(snapshot)}"
        self.links.text, self.notes.text = links_html(snapshot), notes_html(snapshot)
        for layer in snapshot["layers"]:  # the largest first: they get the strongest colours
            self.colors[layer["label"]]
        self._update_lanes(snapshot)
        self._update_layers(snapshot)
        times = [round(t - snapshot["time"], 2) for t in snapshot["memory"]["times"]]
        for place, source in self.memory_sources.items():
            used = snapshot["memory"]["places"].get(str(place), [0] * len(times))
            source.data = with_gaps(times, used)

    def _update_lanes(self, snapshot: dict[str, Any]) -> None:
        bars = snapshot["lanes"]["bars"]
        places = sorted({*map(int, bars), *(d["device"] for d in snapshot["devices"])})
        names = [place_name(p) for p in reversed(places)]
        if self.lanes.y_range.factors != names:
            self.lanes.y_range.factors = names
            self.lanes.height = 80 + 30 * min(len(names), 16)
        bins = snapshot["lanes"]["bins"]
        width = self.window / bins
        data: dict[str, list[Any]] = {name: [] for name in self.lane_source.data}
        for place, found in bars.items():
            for first, count, label, busy in found:
                left = (first - bins) * width
                data["left"].append(left)
                data["right"].append(left + count * width)
                data["place"].append(place_name(int(place)))
                data["color"].append(self.colors[label])
                data["label"].append(label)
                data["busy"].append(f"{busy:.0%}")
                data["alpha"].append(0.25 + 0.75 * busy)
        self.lane_source.data = data

    def _update_layers(self, snapshot: dict[str, Any]) -> None:
        found = snapshot["layers"][:10]
        names = [f"{f['label']}  {f['line'].split(', ')[-1]}".strip()[:52] for f in found]
        unique = [f"{n}{' ' * k}" for k, n in enumerate(names)]  # a factor may come only once
        if self.layers.y_range.factors != unique[::-1]:
            self.layers.y_range.factors = unique[::-1]
        self.layer_source.data = {
            "label": [f["label"] for f in found], "name": unique,
            "seconds": [f["seconds"] for f in found],
            "color": [self.colors[f["label"]] for f in found],
            "steps": [f"{f['steps']:,} done, {f['left']:,} left" for f in found],
            "line": [f["line"] for f in found],
        }  # fmt: skip


# ---- the document


class Page:
    """The page of one browser: a tab for each scheduler of a process."""

    def __init__(self, document: Any, pid: int, alive: Callable[[], bool]):
        self.document, self.pid, self.alive = document, pid, alive
        self.tabs: dict[int, SchedulerTab] = {}
        self.latest: dict[int, dict[str, Any]] = {}
        self.wait = Div(text="waiting for the first snapshot …")
        self.panel = Tabs(tabs=[])
        document.title = f"gpuscheduler {pid}"
        document.add_root(column(self.wait, self.panel))
        document.add_periodic_callback(self.update, PERIOD)
        self.update()

    def update(self) -> None:
        """Draw what is new."""
        found = {s["scheduler"]: s for s in read_process(self.pid)}
        self.latest.update(found)
        for number, snapshot in self.latest.items():
            banner = ""
            if not self.alive():
                banner = "the process has ended; this is its last state"
            elif number not in found:
                banner = "this scheduler is closed; this is its last state"
            elif time() - snapshot["time"] > STALE:
                banner = "no news for some seconds: the process is busy or stopped"
            tab = self.tabs.get(number)
            if tab is None:
                tab = self.tabs[number] = SchedulerTab(snapshot)
                panel = TabPanel(child=tab.root, title=f"scheduler {number}")
                self.panel.tabs = [*self.panel.tabs, panel]
                self.wait.visible = False
            tab.update(snapshot, banner)


class MetricsHandler(RequestHandler):
    """`/metrics`, for Prometheus."""

    def initialize(self, pid: int) -> None:
        self.pid = pid

    def get(self) -> None:
        """Write the metrics of the process's schedulers."""
        from .metrics import metrics_text

        try:
            text = metrics_text(lambda: read_process(self.pid))
        except ImportError as error:
            self.set_status(501)
            text = str(error).encode()
        self.set_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.write(text)


def serve(pid: int, host: str, port: int, path: str, sockets: list[int]) -> None:
    """Serve the page of a process on open sockets, until standard input closes."""
    ended = threading.Event()

    def is_serving() -> bool:
        return not ended.is_set() and is_alive(pid)

    def document(doc: Any) -> None:
        Page(doc, pid, is_serving)

    loop = IOLoop.current()
    application = BokehTornado(
        {"/": Application(FunctionHandler(document))},
        prefix=path, extra_websocket_origins=_origins(host, port),
        extra_patterns=[("/metrics", MetricsHandler, {"pid": pid})],
        keep_alive_milliseconds=10_000, unused_session_lifetime_milliseconds=5_000,
    )  # fmt: skip
    http_server = HTTPServer(application)
    listening = [socket.socket(fileno=number) for number in sockets]
    for s in listening:
        s.setblocking(False)
    http_server.add_sockets(listening)
    server = BaseServer(loop, application, http_server)
    server.start()

    def await_end() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        ended.set()
        loop.add_callback(loop.call_later, AFTERWARDS if not is_alive(pid) else 1.0, loop.stop)

    threading.Thread(target=await_end, daemon=True).start()
    loop.start()
    server.stop()
    remove_stale(snapshot_folder())


def _origins(host: str, port: int) -> list[str]:
    """The addresses from which a browser may open the page; BOKEH_ALLOW_WS_ORIGIN adds others."""
    names = {"localhost", "127.0.0.1", host, socket.gethostname()}
    return [f"{name}:{port}" for name in sorted(names)]


def main() -> None:
    """Serve as the argument says, which is JSON."""
    serve(**json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
