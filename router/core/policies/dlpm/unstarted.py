"""Requests that were dispatched and have no first token yet."""

from collections.abc import Callable

from router.core.model.request import ClientId, Request, RequestId


class AwaitingFirstToken:
    """Those of one queue, in the order of their dispatch."""

    def __init__(self) -> None:
        self._sent: dict[RequestId, tuple[ClientId, float]] = {}
        """The client of each, and when it was dispatched."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, request: Request, now: float) -> None:
        """It was dispatched now; one that does not stream never shows its start, so it does not count."""
        if request.streamed:
            self._sent[request.id] = request.client, now

    def discard(self, request: RequestId) -> None:
        """It has started or ended, whether it is here or not."""
        self._sent.pop(request, None)

    def has_eligible_since(self, since: float, priority_class: Callable[[ClientId], int | None]) -> bool:
        """Whether a client that may go has one here that was dispatched after this time.

        An engine that orders by longest match would put every request that a refill lets through before that one, for
        ever; so at such an engine CHECKREFILL (DLPM paper, Algorithm 1) is to wait for it as for one in our queue.
        """
        return any(at > since and priority_class(client) is not None for client, at in self._sent.values())
