"""Command lines of Python programs that belong to this installation."""

import sys
from pathlib import Path
from typing import Final

SOURCE: Final = str(Path(__file__).parents[2])
"""The folder from which this program was imported."""


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of this installation.

    `python -m` looks in the working folder first, and a file there may have any name: `router` is a common one. So that
    is left out, unless this program itself is found there only.
    """
    only_there = SOURCE in sys.path[:1] and SOURCE not in sys.path[1:]
    safe = () if only_there else ("-P",)
    return (sys.executable, *safe, "-m", module, *arguments)
