"""Requests that were dispatched and have no first token yet."""

from collections.abc import Callable

from router.core.model.request import ClientId, Request, RequestId


class AwaitingFirstToken:
    """Dispatched requests of one queue without a first token, in order of dispatch."""

    def __init__(self) -> None:
        self._sent: dict[RequestId, tuple[ClientId, float]] = {}
        """By request, its client and the time of its dispatch."""

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, request: Request, now: float) -> None:
        """Add a request that was dispatched now, if it is streamed: other requests never show when they start."""
        if request.streamed:
            self._sent[request.id] = request.client, now

    def discard(self, request: RequestId) -> None:
        """Remove a request that started or ended, if it is here."""
        self._sent.pop(request, None)

    def has_eligible_since(self, since: float, priority_class: Callable[[ClientId], int | None]) -> bool:
        """Whether an eligible client has a request here that was dispatched after `since`.

        An engine that orders by longest match would serve every request that a refill admits before that one, for ever.
        So at such an engine CHECKREFILL (DLPM paper, Algorithm 1) waits for it as for a request in the router's queue.
        """
        return any(at > since and priority_class(client) is not None for client, at in self._sent.values())
