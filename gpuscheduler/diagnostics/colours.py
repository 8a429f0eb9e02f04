"""Colours of pages and pictures."""

from __future__ import annotations

from collections.abc import Iterable

#: Colours that are told apart by most people (Paul Tol's "bright" and "muted"), for layers.
COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#882255", "#44aa99",
    "#332288", "#999933", "#cc6677", "#117733",
)  # fmt: skip
#: Of layers beyond these.
OTHER = "#999999"
#: Of what is well, of what somebody should look at, of what is idle, and of small print.
GOOD, BAD, IDLE, SMALL = "#2563eb", "#c62828", "#f0f0f1", "#666666"
COPIES_IN, COPIES_OUT = "#0f766e", "#c2410c"
#: Of kernels, and of what runs as it was written.
KERNEL, WRITTEN = "#2e7d32", "#c2410c"
#: Of the parts of a run, in their order.
TIMES = {
    "planning": "#7c3aed",
    "waiting for memory": "#dc2626",
    "running": "#2563eb",
    "handing over": "#64748b",
}
#: Of the parts of a memory.
PARTS = {"values": "#2563eb", "persisted": "#9ecae1", "working": "#ff7f0e"}


def colour_map(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in their order; the same grey for those beyond the colours."""
    out: dict[str, str] = {}
    for name in names:
        if name not in out:
            out[name] = COLOURS[len(out)] if len(out) < len(COLOURS) else OTHER
    return out
