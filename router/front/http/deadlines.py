"""Deadlines by which a client must send the rest of a request, and read what it is sent."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Final

from router.front.http.connection_limits import FrontLimits
from router.runtime.fair_timer import FairTimer

LINGER_SECONDS: Final = 5.0
"""Seconds for which input is read and discarded after its call is answered or refused, so that a client that is still
sending can read the answer."""


class Awaiting(Enum):
    """The part of a request that a client must send next."""

    HEAD = auto()
    BODY = auto()
    REST = auto()
    """The rest of a request that is already answered, which is discarded."""


READ_BYTES: Final = 48 * 1024
"""Bytes that a slow client must read within `write_seconds` to get the same time again."""


class Deadlines:
    """The deadlines of one connection: at most one for sending and one for reading."""

    def __init__(self, limits: FrontLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.body_bytes = 0
        """Bytes of the body so far. In each period of `body_seconds`, enough must arrive."""
        self._limits = limits
        self._loop = loop
        self.awaiting: Awaiting | None = None
        """What must be sent by the present deadline; None if there is none."""
        self._body_bytes_before = 0
        """`body_bytes` at the start of the current period."""
        self._sending_timer: FairTimer | None = None
        self._reading_timer: FairTimer | None = None

    def expect(self, awaiting: Awaiting | None, on_late: Callable[[Awaiting], None]) -> None:
        """Start the deadline for a part of a request, or keep it if that part is already awaited; None stops it.

        `on_late` is called when the deadline is missed.
        """
        if awaiting is self.awaiting:
            return
        self.awaiting = awaiting
        if self._sending_timer is not None:
            self._sending_timer.cancel()
            self._sending_timer = None
        if awaiting is not None:
            self._start(awaiting, on_late)

    def expect_reading(self, on_late: Callable[[], None], bytes_read: Callable[[], int]) -> None:
        """Start the deadline for reading, unless it runs. `on_late` is called when it is missed.

        `bytes_read` returns the bytes that the client has read so far; each `READ_BYTES` give it as long again.
        """
        if self._reading_timer is None:
            expire = partial(self._expire_reading, on_late, bytes_read, bytes_read())
            self._reading_timer = FairTimer(self._loop, self._limits.write_seconds, expire)

    def cancel_reading(self) -> None:
        """Stop the deadline for reading, because the client reads fast enough again."""
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _expire_reading(self, on_late: Callable[[], None], bytes_read: Callable[[], int], before: int) -> None:
        self._reading_timer = None
        if bytes_read() - before >= READ_BYTES:
            self.expect_reading(on_late, bytes_read)
        else:
            on_late()

    def cancel(self) -> None:
        """Stop all deadlines, because the connection is closed."""
        self.cancel_reading()
        if self._sending_timer is not None:
            self._sending_timer.cancel()
            self._sending_timer = None

    def _start(self, awaiting: Awaiting, on_late: Callable[[Awaiting], None]) -> None:
        self._body_bytes_before = self.body_bytes
        self._sending_timer = FairTimer(
            self._loop, self._seconds_for(awaiting), partial(self._expire, awaiting, on_late)
        )

    def _seconds_for(self, awaiting: Awaiting) -> float:
        """Return the seconds for a part of a request."""
        if awaiting is Awaiting.REST:
            return LINGER_SECONDS
        return self._limits.head_seconds if awaiting is Awaiting.HEAD else self._limits.body_seconds

    def _expire(self, awaiting: Awaiting, on_late: Callable[[Awaiting], None]) -> None:
        self._sending_timer = None
        if awaiting is Awaiting.BODY and self._body_is_on_time:
            self._start(awaiting, on_late)
        else:
            on_late(awaiting)

    @property
    def _body_is_on_time(self) -> bool:
        """Whether enough of the body has arrived in this period."""
        return self.body_bytes - self._body_bytes_before >= self._limits.body_seconds * self._limits.body_rate
