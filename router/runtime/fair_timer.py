"""Timers for timeouts of peers, which do not blame a peer for a stall of the router itself.

After the process was stalled (a virtual machine is migrated, a laptop sleeps), all timers expire at once, and the event
loop may run them before it reads its sockets. Data that a peer sent in time would then count as never sent.
"""

import asyncio
from collections.abc import Callable
from typing import Final

STALL_SECONDS: Final = 0.1
"""A timer that fires later than this shows a stall; a merely busy event loop is never so late."""
GRACE_SECONDS: Final = 1.0
"""Most time given to a loop after a stall to read what has arrived meanwhile."""


class FairTimer:
    """A one-shot timer. If it fires late, it waits for a grace period once more before it calls back."""

    __slots__ = ("_callback", "_loop", "_seconds", "cancel", "when")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]) -> None:
        """Call `callback` in this many seconds, unless the timer is cancelled before."""
        self._loop = loop
        self._seconds = seconds
        self._callback = callback
        self._set(seconds)

    def _set(self, seconds: float) -> None:
        self.when = self._loop.time() + seconds
        """When the timer expires, on the loop's clock. Kept here because uvloop's handle does not report it once the
        time has come."""
        self.cancel = self._loop.call_later(seconds, self._fire).cancel
        """Cancels the callback. Called once for nearly every timer, so it is the handle's own method."""

    def _fire(self) -> None:
        if fired_late(self._loop, self.when):
            self._set(min(GRACE_SECONDS, self._seconds))
        else:
            self._callback()


def fired_late(loop: asyncio.AbstractEventLoop, due: float) -> bool:
    """True if the loop has been stalled: a timer due at this time fires only now, too late for a busy loop."""
    return loop.time() - due > STALL_SECONDS
