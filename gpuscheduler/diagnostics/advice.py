"""Rules that say what would make a computation faster.

A rule gets `Facts` and returns advice or None. It is pure, and speaks only where its threshold is
passed: one line, the section of the guide, and the seconds that it may save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from dask.utils import format_bytes

#: Pieces of advice that are shown.
SHOWN = 5
#: Steps shorter than this are small, in seconds.
SMALL_STEP = 50e-6
#: ... which matters for so many.
MANY_STEPS = 1000
#: Reasons of tasks that are no kernels and need not be.
_NO_FAULT = ("it touches less", "it multiplies", "it is one operation")
#: Bytes of chunks that keep any device busy.
GOOD_CHUNK = 2**26


@dataclass(frozen=True, slots=True)
class Advice:
    """One line that may save time."""

    rule: str
    text: str
    #: Where the guide says more.
    section: str
    #: That it may save at most.
    seconds: float

    def __str__(self) -> str:
        return f"{self.text} (guide: {self.section})"


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What rules know of one row."""

    label: str
    line: str
    times: int
    seconds: float  # on all devices together
    is_kernel: bool
    reason: str
    code: str = ""  # where the function is defined that is no kernel
    on_host: bool = False
    reads: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules know of a computation."""

    devices: int
    #: On GPUs small steps cost the host's time, and links are there.
    is_gpu: bool
    layers: Sequence[LayerFacts]
    #: Seconds of work on each device.
    busy: Sequence[float]
    #: Bytes of the largest value of each step.
    chunk_bytes: Sequence[int]
    #: Seconds of each step.
    step_seconds: Sequence[float]
    #: Predicted, or measured where it has run.
    seconds: float
    predicted: float | None = None
    measured: float | None = None
    #: Bytes that cross links between devices.
    link_bytes: int = 0
    #: Bytes that come from the host in a run, and in how many of the runs looked at.
    sent: int = 0
    sent_runs: int = 0
    sent_seconds: float = 0.0
    #: Bytes that kernels and tasks touch.
    touched: int = 0
    spilled: int = 0
    #: The largest part of a memory that is used, and the step at which that is.
    fullest: float = 0.0
    fullest_at: str = ""
    #: Seconds of planning, and whether the plan cannot be kept.
    planning: float = 0.0
    once: bool = False
    #: Layer that moves most.
    moving_layer: str = ""
    pinned: bool = False


def small_chunks(f: Facts) -> Advice | None:
    """Many short steps: the time is that of scheduling."""
    if len(f.step_seconds) < MANY_STEPS or median(f.step_seconds) >= SMALL_STEP:
        return None
    size = median([n for n in f.chunk_bytes if n] or [0])
    text = (
        f"chunks of {format_bytes(int(size))} make {len(f.step_seconds):,} short steps: "
        f"rechunk to {format_bytes(GOOD_CHUNK)}"
    )
    return Advice("small chunks", text, "chunks", f.seconds * 0.5)


def few_blocks(f: Facts) -> Advice | None:
    """Fewer blocks than keep all devices busy."""
    most = max([layer.times for layer in f.layers], default=0)
    if f.devices < 2 or most >= 2 * f.devices or f.seconds < 1e-3:
        return None
    text = (
        f"at most {most} block{'s'[: most != 1]} for {f.devices} devices: use smaller chunks, "
        f"{4 * f.devices} or more"
    )
    return Advice("few blocks", text, "chunks", f.seconds * (1 - most / (2 * f.devices)))


def traffic(f: Facts) -> Advice | None:
    """Much of what is touched crosses links."""
    if not f.touched or f.link_bytes <= 0.25 * f.touched:
        return None
    text = (
        f"{format_bytes(f.link_bytes)} cross links between devices, most for {f.moving_layer}: "
        "rechunk along the axis that it reads whole"
    )
    return Advice("traffic", text, "chunks", f.seconds * f.link_bytes / (f.link_bytes + f.touched))


def memory(f: Facts) -> Advice | None:
    """Memory is short."""
    if not f.spilled and f.fullest <= 0.9:
        return None
    what = f"{format_bytes(f.spilled)} are spilled" if f.spilled else f"{f.fullest:.0%} are used"
    text = f"memory is short at {f.fullest_at or 'its peak'} ({what}): use smaller chunks, raise "
    text += "memory_limit, or let go of persisted collections"
    return Advice("memory", text, "memory", f.seconds * 0.3 if f.spilled else 0.0)


def broken_chain(f: Facts) -> Advice | None:
    """A function that cannot be traced takes much of the time."""
    total = sum([layer.seconds for layer in f.layers])
    slow = [
        layer for layer in f.layers if layer.reason and not layer.is_kernel and layer.seconds > 0
    ]
    if not slow or not total:
        return None
    worst = max(slow, key=lambda layer: layer.seconds)
    part = worst.seconds / total
    if part <= 0.2 or worst.reason.startswith(_NO_FAULT):
        return None
    where = f" ({worst.code or worst.line})" if worst.code or worst.line else ""
    text = f"{worst.label}{where} takes {part:.0%} of the time, not fused: {worst.reason}"
    return Advice("broken chain", text, "what becomes a kernel", worst.seconds * 0.5)


def host_fallback(f: Facts) -> Advice | None:
    """CuPy refused a function, so it runs on the host."""
    found = [layer for layer in f.layers if layer.on_host]
    if not found:
        return None
    worst = max(found, key=lambda layer: layer.seconds)
    text = (
        f"{worst.label} runs on the host, as CuPy refused it: {format_bytes(worst.reads)} are "
        "copied there"
    )
    return Advice("host fallback", text, "what becomes a kernel", worst.seconds)


def sent_again(f: Facts) -> Advice | None:
    """Host arrays are sent in each run."""
    if f.sent_runs < 2 or f.sent_seconds <= 0.2 * f.seconds:
        return None
    text = f"{format_bytes(f.sent)} of host arrays are sent in each of {f.sent_runs} runs: "
    return Advice("sent again", text + "call .persist() on them once", "persist", f.sent_seconds)


def planned_anew(f: Facts) -> Advice | None:
    """Planning takes long, and the plan cannot be kept."""
    if not f.once or f.planning <= 0.3 * max(f.seconds, f.planning):
        return None
    text = (
        f"planning takes {f.planning:.2g} s of each run, and the plan cannot be kept: an argument "
        "is a list or an object of your own class"
    )
    return Advice("planned anew", text, "iterations", f.planning)


def imbalance(f: Facts) -> Advice | None:
    """One device has much more to do than the others."""
    if len(f.busy) < 2 or not sum(f.busy) or f.seconds < 1e-3:
        return None
    mean = sum(f.busy) / len(f.busy)
    most = max(f.busy)
    if most <= 1.5 * mean:
        return None
    device = list(f.busy).index(most)
    text = f"device {device} has {most / mean:.1f} times the work of the mean: "
    text += "dask.annotate(device=) puts it there" if f.pinned else "use more and smaller blocks"
    return Advice("imbalance", text, "devices", most - mean)


def prediction(f: Facts) -> Advice | None:
    """The prediction is off by a factor of three."""
    if not f.measured or not f.predicted or f.measured < 1e-3:
        return None
    ratio = f.measured / f.predicted
    if 1 / 3 < ratio < 3:
        return None
    text = f"it took {ratio:.2g} times as long as predicted: a second run may be placed better"
    return Advice("prediction", text, "predictions", 0.0)


RULES: tuple[Callable[[Facts], Advice | None], ...] = (
    small_chunks, few_blocks, traffic, memory, broken_chain, host_fallback, sent_again,
    planned_anew, imbalance, prediction,
)  # fmt: skip


def give_advice(facts: Facts) -> list[Advice]:
    """All advice that applies, that which may save most first."""
    found = [advice for rule in RULES if (advice := rule(facts)) is not None]
    return sorted(found, key=lambda a: -a.seconds)
