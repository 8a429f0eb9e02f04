"""Run the command line as `python -m gpuscheduler`."""

from __future__ import annotations

from .cli.command_line import main

if __name__ == "__main__":
    main(prog_name="python -m gpuscheduler")
