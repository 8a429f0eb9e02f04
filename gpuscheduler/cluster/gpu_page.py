"""The page `/gpuscheduler` of a cluster's dashboard: every device of every worker.

Workers send what their devices do with each heartbeat, as `distributed` sends its own metrics
(`Worker.metrics`). The page is added to the cluster scheduler's web server by `http_application`
and `dashboard.core.BokehApplication` (distributed 2026.1 to 2026.8); without Bokeh there is none.
"""

from __future__ import annotations

import html
from typing import Any

from tornado.ioloop import IOLoop

from ..diagnostics.log import logger
from ..diagnostics.snapshot import SchedulerFacts, summarize_devices

#: Where the page is.
PATH = "/gpuscheduler"
#: Milliseconds between two updates.
PERIOD = 1000
#: The name of what workers send.
METRIC = "gpuscheduler"


def worker_metric(scheduler: Any) -> dict[str, Any]:
    """What a worker sends of its devices; empty where it has none any more."""
    try:
        return summarize_devices(SchedulerFacts.from_scheduler(scheduler))
    except RuntimeError:  # it is closed
        return {}


def add_page(scheduler: Any) -> bool:
    """Add the page to the cluster's scheduler; False where there is no dashboard."""
    application = getattr(scheduler, "http_application", None)
    if application is None or getattr(scheduler, "http_server", None) is None:
        return False
    if any(PATH in getattr(app, "app_paths", ()) for app in application.applications):
        return True
    try:
        from distributed.dashboard.core import BokehApplication
    except ImportError as error:  # a cluster without Bokeh works as well
        logger("cluster").debug("no page of all devices: %s", error)
        return False
    page = BokehApplication({PATH: draw_page}, scheduler, prefix="")
    application.add_application(page)
    page.initialize(IOLoop.current())
    return True


def draw_page(scheduler: Any, extra: dict[str, Any], document: Any) -> None:
    """Draw the devices of all workers, and again each second."""
    from bokeh.models.widgets import Div

    text = Div(width=1380)

    def update() -> None:
        text.text = page_html(scheduler.workers)

    update()
    document.title = "gpuscheduler: every device"
    document.add_root(text)
    document.add_periodic_callback(update, PERIOD)


def page_html(workers: dict[str, Any]) -> str:
    """The cards of all devices, by worker."""
    from ..diagnostics.page import card_html

    parts = []
    for address, worker in sorted(workers.items()):
        found = worker.metrics.get(METRIC)
        if not found:
            continue
        text = f"{found['left']:,} steps left" if found["runs"] else "no stage runs"
        text += f", {found['ended']:,} stages have ended"
        name = html.escape(f"worker {worker.name} at {address}")
        cards = "".join(map(card_html, found["devices"]))
        parts.append(
            f"<div style='margin:10px 0 4px'><b>{name}</b>: {text}</div>"
            f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{cards}</div>"
        )
    return "".join(parts) or "no worker with gpuscheduler has sent anything yet"
