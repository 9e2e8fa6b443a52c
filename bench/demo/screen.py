"""Show the progress of the demo: in place on a terminal, line by line elsewhere, or not at all."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TextIO

from bench.demo.figures import Phase
from bench.demo.table import HEAD, UNKNOWN, client_lines, policy_lines, policy_row
from bench.demo.trial import Snapshot

PLAIN_SECONDS: Final = 5.0
"""Interval between two lines about the same phase."""


class Screen(Protocol):
    """Shows the progress of the demo."""

    def start_policy(self, policy: str, url: str) -> None:
        """Called when a policy's run begins, with the address of its router."""

    def show(self, snapshot: Snapshot) -> None:
        """Called with new figures of the current policy."""


class TerminalScreen:
    """Redraws one table in place: all policies, and the clients under the current policy."""

    def __init__(self, stream: TextIO, policies: Sequence[str], size: Callable[[], os.terminal_size]) -> None:
        """`size`: returns the current size of the terminal."""
        self._stream = stream
        self._size = size
        self._snapshots: dict[str, Snapshot | None] = dict.fromkeys(policies)
        self._policy = ""
        self._url = ""
        self._height = 0

    def start_policy(self, policy: str, url: str) -> None:
        self._policy, self._url = policy, url

    def show(self, snapshot: Snapshot) -> None:
        self._snapshots[self._policy] = snapshot
        heading = f"{self._policy} at {self._url} (and {self._url}/fairness); times are the emulated GPUs', in seconds"
        width, height = self._size()
        # If a line wrapped or the table scrolled, the next table would not cover it.
        lines = ["", heading, "", *policy_lines(self._snapshots), "", *client_lines(snapshot)][: height - 1]
        back = f"\x1b[{self._height}F" if self._height else ""
        self._stream.write(f"{back}\x1b[J" + "".join(f"{line[: width - 1]}\n" for line in lines))
        self._stream.flush()
        self._height = len(lines)


class PlainScreen:
    """Prints a line when a phase begins, and then at intervals."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._policy = ""
        self._phase: Phase | None = None
        self._next_line_at = 0.0

    def start_policy(self, policy: str, url: str) -> None:
        print(f"{policy} at {url}", file=self._stream, flush=True)
        self._policy, self._phase = policy, None

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.phase is self._phase and self._clock() < self._next_line_at:
            return
        self._phase, self._next_line_at = snapshot.phase, self._clock() + PLAIN_SECONDS
        cells = zip(HEAD[1:], policy_row(self._policy, snapshot)[1:], strict=True)
        known = [f"{name} {cell}".strip() for name, cell in cells if cell != UNKNOWN]
        print(f"{self._policy}:", ", ".join(known), file=self._stream, flush=True)


class NoScreen:
    """Shows nothing."""

    def start_policy(self, policy: str, url: str) -> None: ...

    def show(self, snapshot: Snapshot) -> None: ...
