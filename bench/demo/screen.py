"""Where the demo shows how far it is: in place on a terminal, line by line elsewhere, or nowhere."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TextIO

from bench.demo.figures import Phase
from bench.demo.table import HEAD, UNKNOWN, client_lines, policy_lines, policy_row
from bench.demo.trial import Glance

PLAIN_SECONDS: Final = 5.0
"""Between two lines about the same phase."""


class Screen(Protocol):
    """Is told of what goes on."""

    def begins(self, policy: str, url: str) -> None:
        """It is this policy's turn; its router listens there."""

    def show(self, glance: Glance) -> None:
        """The policy whose turn it is looks like this."""


class Terminal:
    """Draws one table over the other: all policies, and the clients of the one whose turn it is."""

    def __init__(self, stream: TextIO, policies: Sequence[str], size: Callable[[], os.terminal_size]) -> None:
        """`size`: of the terminal at the moment."""
        self._stream = stream
        self._size = size
        self._glances: dict[str, Glance | None] = dict.fromkeys(policies)
        self._policy = ""
        self._url = ""
        self._height = 0

    def begins(self, policy: str, url: str) -> None:
        """See `Screen`."""
        self._policy, self._url = policy, url

    def show(self, glance: Glance) -> None:
        """See `Screen`."""
        self._glances[self._policy] = glance
        heading = f"{self._policy} at {self._url} (and {self._url}/fairness); times are the emulated GPUs', in seconds"
        width, height = self._size()
        # A line that wrapped, or a table that scrolled, could not be drawn over.
        lines = ["", heading, "", *policy_lines(self._glances), "", *client_lines(glance)][: height - 1]
        back = f"\x1b[{self._height}F" if self._height else ""
        self._stream.write(f"{back}\x1b[J" + "".join(f"{line[: width - 1]}\n" for line in lines))
        self._stream.flush()
        self._height = len(lines)


class Plain:
    """Prints a line when something else begins, and now and then."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._policy = ""
        self._phase: Phase | None = None
        self._due = 0.0

    def begins(self, policy: str, url: str) -> None:
        """See `Screen`."""
        print(f"{policy} at {url}", file=self._stream, flush=True)
        self._policy, self._phase = policy, None

    def show(self, glance: Glance) -> None:
        """See `Screen`."""
        if glance.phase is self._phase and self._clock() < self._due:
            return
        self._phase, self._due = glance.phase, self._clock() + PLAIN_SECONDS
        cells = zip(HEAD[1:], policy_row(self._policy, glance)[1:], strict=True)
        known = [f"{name} {cell}".strip() for name, cell in cells if cell != UNKNOWN]
        print(f"{self._policy}:", ", ".join(known), file=self._stream, flush=True)


class Nowhere:
    """Shows nothing."""

    def begins(self, policy: str, url: str) -> None:
        """See `Screen`."""

    def show(self, glance: Glance) -> None:
        """See `Screen`."""
