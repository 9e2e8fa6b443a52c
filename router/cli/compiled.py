"""Whether this is a compiled build (`make compiled`)."""

from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parents[1]


def is_compiled(file: str = "core/scheduler.py") -> bool:
    """Return whether a file of the package is compiled: whether Python would load another instead. Imports nothing."""
    path = PACKAGE / file
    found = PathFinder.find_spec(path.stem, [str(path.parent)])
    return found is not None and found.origin != str(path)
