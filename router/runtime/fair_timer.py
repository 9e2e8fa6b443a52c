"""Timers by which others are judged: they ring only once the router has had the time to hear them.

After the process stood still (a virtual machine is moved, a laptop sleeps), all timers are due at once, and an event
loop may run them before it reads its sockets. What was sent in time would then count as never sent.
"""

import asyncio
from collections.abc import Callable
from typing import Final

STALL_SECONDS: Final = 0.1
"""Seconds by which a timer is later than a busy event loop makes it."""
GRACE_SECONDS: Final = 1.0
"""Seconds, at most, in which a loop that stood still reads what has come meanwhile."""


class FairTimer:
    """One timer. If it rings late, it rings once more after a grace, and only then calls."""

    __slots__ = ("_call", "_handle", "_loop", "_seconds", "when")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], object]) -> None:
        """`call` is called in so many seconds, unless this is cancelled before."""
        self._loop = loop
        self._seconds = seconds
        self._call = call
        self._set(seconds)

    def cancel(self) -> None:
        """Do not call."""
        self._handle.cancel()

    def _set(self, seconds: float) -> None:
        self.when = self._loop.time() + seconds
        """The time at which it is due, on the loop's clock; uvloop's own handle does not know it if that is now."""
        self._handle = self._loop.call_later(seconds, self._fire)

    def _fire(self) -> None:
        if stalled_since(self._loop, self.when):
            self._set(min(GRACE_SECONDS, self._seconds))
        else:
            self._call()


def stalled_since(loop: asyncio.AbstractEventLoop, due: float) -> bool:
    """Whether the loop stood still, as what was due at this time happens only now."""
    return loop.time() - due > STALL_SECONDS
