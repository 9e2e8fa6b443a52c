"""What one end of a channel has sent, until the other end confirms that it has handled it.

If only the connection breaks, both ends live on, and each sends again what the other has missed: so every message is
handled once, and in order.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

MOST_BYTES: Final = 16 * 1024 * 1024
"""Bytes that are kept at most."""


class Unconfirmed:
    """Encoded messages, numbered in the order in which they were sent."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._payloads: deque[bytes] = deque()
        self._bytes = 0
        self._before = 0
        """The number of the last message that is not kept."""

    def begin(self, number: int) -> None:
        """Keep nothing that was sent so far. `number`: of the last message."""
        self._payloads.clear()
        self._bytes, self._before = 0, number

    def add(self, payload: bytes) -> None:
        """Keep the next message, and drop the oldest if there are too many bytes."""
        self._payloads.append(payload)
        self._bytes += len(payload)
        while self._bytes > self._most_bytes:
            self._drop()

    def confirm(self, number: int) -> None:
        """Drop what the other end has handled: all up to the message with this number."""
        while self._payloads and self._before < number:
            self._drop()

    def after(self, number: int) -> Sequence[bytes] | None:
        """Return what was sent after the message with this number; None if that is not all kept."""
        missed = number - self._before
        return None if missed < 0 else list(islice(self._payloads, missed, None))

    def _drop(self) -> None:
        self._bytes -= len(self._payloads.popleft())
        self._before += 1
