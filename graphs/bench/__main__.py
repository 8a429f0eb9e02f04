"""Run measuring tools: `python -m graphs.bench PART ...`, or `... TOOL [OPTIONS]`, in the root.

Parts, which need GPUs and take several names at once: limits, tasks, copies, overlap, host_results,
sweep, quarter, kernels, fusion, graphs, rounds, generated, meshes, windows. Each prints a short
table; what is timed has run once before. `all` runs every part.

Tools, each with options of its own (`--help`): anew, cluster, eviction, heuristics, host, mixed,
numpy_arrays, observe, several, sorting, sparse, square, tall, usual.
"""

from __future__ import annotations

import importlib
import sys

#: The module of each part.
PARTS = {
    "limits": "copies",
    "tasks": "tasks",
    "copies": "copies",
    "overlap": "copies",
    "host_results": "copies",
    "sweep": "copies",
    "quarter": "copies",
    "kernels": "kernels",
    "fusion": "kernels",
    "graphs": "workloads",
    "rounds": "tasks",
    "generated": "workloads",
    "meshes": "meshes",
    "windows": "windows",
}
TOOLS = (
    "anew", "cluster", "eviction", "heuristics", "host", "mixed", "numpy_arrays", "observe",
    "several", "sorting", "sparse", "square", "tall", "usual",
)  # fmt: skip


def measure_parts(names: list[str]) -> None:
    """Run parts one after the other; one that fails does not stop the others."""
    from .timing import free_memory

    for name in names:
        try:
            getattr(importlib.import_module(f".{PARTS[name]}", __package__), name)()
        except Exception as error:
            print(f"{name} FAILED: {error!r}"[:600])
        free_memory()


def main() -> None:
    """Run the tool or the parts that the command line names."""
    names = sys.argv[1:]
    if names and names[0] in TOOLS:
        sys.argv[:2] = [f"python -m graphs.bench {names[0]}"]
        sys.exit(importlib.import_module(f".{names[0]}", __package__).main())
    elif names == ["all"]:
        measure_parts(list(PARTS))
    elif names and set(names) <= set(PARTS):
        measure_parts(names)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
