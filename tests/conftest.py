"""The repository's root is importable: tests use `graphs` from the source tree."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
