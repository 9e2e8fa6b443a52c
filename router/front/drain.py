"""The router's own end: while it drains, the calls under way go on and no new one is taken."""

import time
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from router.errors import ShuttingDown
from router.front.exchange import Exchange, new_request_id


class CallCounter:
    """Counts the calls that are under way: those that have entered it, and not left it yet."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> None:
        self.calls += 1

    def __exit__(self, *_: object) -> None:
        self.calls -= 1


class Drain:
    """Whether the router still takes calls, and how many are under way."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: how long calls under way have to end, once draining has begun."""
        self._seconds = seconds
        self._clock = clock
        self._until: float | None = None
        self._under_way = CallCounter()

    def begin(self) -> None:
        """Take no new call from now on; to be asked once."""
        self._until = self._clock() + self._seconds

    @property
    def begun(self) -> bool:
        """Whether new calls are refused."""
        return self._until is not None

    @property
    def over(self) -> bool:
        """Whether the router may end: no call is under way any more, or the time for that is up."""
        return self._until is not None and (self.idle or self._clock() >= self._until)

    @property
    def idle(self) -> bool:
        """Whether no call is under way."""
        return not self._under_way.calls

    def track_call(self) -> CallCounter:
        """A call is under way as long as the context is entered."""
        return self._under_way


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a call that came after draining began; its body is not read, and its connection ends with the answer."""
    exchange = Exchange(scope, receive, send)
    exchange.request_id = new_request_id()
    await exchange.fail(ShuttingDown())
