"""A progress bar on a terminal."""

import time
from typing import TextIO

CELLS = 40
SECONDS = 0.2
"""Interval between two updates."""


class ProgressBar:
    """Rewrites one line; prints nothing if the stream is not a terminal."""

    def __init__(self, stream: TextIO, unit: str) -> None:
        """`unit`: the unit printed after the numbers."""
        self._stream = stream
        self._unit = unit
        self._shown = stream.isatty()
        self._due = 0.0

    def show(self, done: float, total: float) -> None:
        """Show the progress."""
        if self._shown and time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS
            bar = ("#" * int(min(1.0, done / total) * CELLS)).ljust(CELLS, ".")
            print(f"\r[{bar}] {done:.1f} of {total:g} {self._unit}", end="", file=self._stream, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self._shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
