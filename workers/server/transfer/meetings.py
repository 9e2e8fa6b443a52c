"""I/O: where the two legs of a request meet if both were sent at once: by a room (SGLang), by a transfer id (Mooncake).

Either leg may come first, and nobody tells one leg that the other has failed: it waits until its own time is over.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

from workers.server.clock import EmulatedClock
from workers.server.loop import Mailbox

KEPT: Final = 10_000
"""Meetings that are remembered although a leg never came."""
SLICE: Final = 0.5
"""Real seconds after which a question is answered, although there is no news."""


class Offer(NamedTuple):
    """KV that a prefill engine has for the decode engine."""

    fingerprint: int
    """Of the prompt."""
    rank: int
    cached_tokens: int
    tokens: int


class Meeting:
    """One request's."""

    def __init__(self) -> None:
        self.joined = asyncio.Event()
        """Set when the decode leg has memory and waits."""
        self.offered = asyncio.Event()
        """Set when there is an offer."""
        self.offer: Offer | None = None

    def make(self, offer: Offer) -> None:
        """Offer KV. A second offer replaces the first."""
        self.offer = offer
        self.offered.set()


class Meetings:
    """All meetings at one prefill worker, by room or transfer id."""

    def __init__(self) -> None:
        self._meetings: OrderedDict[str, Meeting] = OrderedDict()

    def at(self, key: str) -> Meeting:
        """Return a meeting, which may be new."""
        meeting = self._meetings.setdefault(key, Meeting())
        if len(self._meetings) > KEPT:
            self._meetings.popitem(last=False)
        return meeting

    def forget(self, key: str) -> None:
        """End a meeting that one leg has not come to."""
        self._meetings.pop(key, None)

    async def wait_for_offer(self, key: str) -> Offer | None:
        """Return what is offered, and end the meeting; None if there is nothing yet."""
        meeting = self.at(key)
        meeting.joined.set()
        try:
            async with asyncio.timeout(SLICE):
                await meeting.offered.wait()
        except TimeoutError:
            return None
        self._meetings.pop(key, None)
        return meeting.offer


async def unless_interrupted(
    coroutine: Coroutine[Any, Any, Any], mailbox: Mailbox, clock: EmulatedClock, seconds: float
) -> bool:
    """Wait for a coroutine. Returns False if the call is over before it ends. Raises TimeoutError after `seconds`."""
    task, over = asyncio.create_task(coroutine), asyncio.create_task(mailbox.interrupted.wait())
    try:
        done, _ = await asyncio.wait({task, over}, timeout=clock.real(seconds), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        over.cancel()
    if not done:
        raise TimeoutError
    return over not in done
