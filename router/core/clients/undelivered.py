"""What clients were charged for calls that a dead front took with it, for as long as they may repeat such a call.

A client that makes the same call again, with the same Idempotency-Key, pays only for what it has not paid already. That
holds once for each such call, and only if nothing of its answer had been delivered: so a repeated key buys nothing.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from router.core.model.cost import Tokens
from router.core.model.request import ClientId, Request

SECONDS: Final = 60.0
"""Seconds after the death of a front in which a call may be repeated."""
MOST: Final = 10_000
"""Calls that are remembered at most; beyond it, the oldest are forgotten."""


class UndeliveredCall(NamedTuple):
    """A call whose front has died."""

    charged: Tokens
    until: float
    """When it is forgotten."""


class Undelivered:
    """The calls of dead fronts that may be repeated."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._calls: OrderedDict[tuple[ClientId, bytes], UndeliveredCall] = OrderedDict()

    def add(self, request: Request, charged: Tokens | None, now: float) -> None:
        """Remember what a request was charged whose front has died, if it may be repeated."""
        if request.retry_key is None or charged is None:
            return
        self.remember(request, UndeliveredCall(charged, now + SECONDS))

    def take(self, request: Request, now: float) -> UndeliveredCall | None:
        """Return the call that this request repeats, and forget that; None if it repeats none."""
        if request.retry_key is None or (call := self._calls.pop((request.client, request.retry_key), None)) is None:
            return None
        return call if now <= call.until else None

    def remember(self, request: Request, call: UndeliveredCall) -> None:
        """Remember a call that this request repeats, for another request: no worker computed this one."""
        assert request.retry_key is not None
        key = (request.client, request.retry_key)
        self._calls.pop(key, None)
        self._calls[key] = call
        if len(self._calls) > self._most:
            self._calls.popitem(last=False)
