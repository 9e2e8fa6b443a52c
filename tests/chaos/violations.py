"""How a run ends: its violations are printed, and what helps to explain them is kept."""

from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Final

MOST_SHOWN: Final = 50


def exit_code(violations: Sequence[str], directory: Path, holds: str) -> int:
    """Print the violations and return the exit code. Without any, the directory is deleted.

    `holds`: says what is in the directory, with its verb.
    """
    for line in violations[:MOST_SHOWN]:
        print(f"violation: {line}")
    if violations:
        print(f"{len(violations)} violations. {holds} in {directory}.")
        return 1
    rmtree(directory)
    print("No violation was found.")
    return 0
