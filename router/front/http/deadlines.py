"""Until when a client has to send what it owes, and to read what it is sent."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Final

from router.front.http.connection_limits import FrontLimits
from router.runtime.fair_timer import FairTimer

LINGER_SECONDS: Final = 5.0
"""Seconds for which what comes is read and thrown away once its call is answered or refused, so that its sender gets to
read that."""


class Awaiting(Enum):
    """What a client has still to send."""

    HEAD = auto()
    BODY = auto()
    REST = auto()
    """Of what is answered already: nothing more of it is of use."""


READ_BYTES: Final = 48 * 1024
"""A client that is waited for reads at least so much in its time."""


class Deadlines:
    """Those of one connection, at most one for what comes and one for what goes."""

    def __init__(self, limits: FrontLimits, loop: asyncio.AbstractEventLoop) -> None:
        self.body_bytes = 0
        """Bytes of the body so far, of which enough have to come in each of its times."""
        self._limits = limits
        self._loop = loop
        self._owed: Awaiting | None = None
        self._content_before = 0
        """When the body's time began."""
        self._sending: FairTimer | None = None
        self._reading: FairTimer | None = None

    def expect(self, owed: Awaiting | None, late: Callable[[Awaiting], None]) -> None:
        """Let it owe this from now on; if it did already, its time goes on. When that is over, `late` is called."""
        if owed is self._owed:
            return
        self._owed = owed
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        if owed is not None:
            self._begin(owed, late)

    def expect_reading(self, late: Callable[[], None], read: Callable[[], int]) -> None:
        """It does not read what it is sent; `late` is called unless it does in time.

        `read`: how many bytes it has read so far; every `READ_BYTES` of them give it as long again.
        """
        if self._reading is None:
            expire = partial(self._expire_reading, late, read, read())
            self._reading = FairTimer(self._loop, self._limits.write_seconds, expire)

    def cancel_reading(self) -> None:
        """It does."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _expire_reading(self, late: Callable[[], None], read: Callable[[], int], before: int) -> None:
        self._reading = None
        if read() - before >= READ_BYTES:
            self.expect_reading(late, read)
        else:
            late()

    def cancel(self) -> None:
        """It is gone."""
        self.cancel_reading()
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _begin(self, owed: Awaiting, late: Callable[[Awaiting], None]) -> None:
        self._content_before = self.body_bytes
        self._sending = FairTimer(self._loop, self._allowed(owed), partial(self._expire, owed, late))

    def _allowed(self, owed: Awaiting) -> float:
        """Seconds for what is owed."""
        if owed is Awaiting.REST:
            return LINGER_SECONDS
        return self._limits.head_seconds if owed is Awaiting.HEAD else self._limits.body_seconds

    def _expire(self, owed: Awaiting, late: Callable[[Awaiting], None]) -> None:
        self._sending = None
        if owed is Awaiting.BODY and self._in_time:
            self._begin(owed, late)
        else:
            late(owed)

    @property
    def _in_time(self) -> bool:
        """Whether the body comes no slower than it may."""
        return self.body_bytes - self._content_before >= self._limits.body_seconds * self._limits.body_rate
