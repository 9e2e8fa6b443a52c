"""The clients with requests that wait in a queue or are in flight from it."""

from dataclasses import dataclass
from typing import Final

from router.core.clients.shares import Shares
from router.core.model.request import ClientId, Request


@dataclass(slots=True)
class Activity:
    """The activity of one client."""

    requests: int
    weight: float
    """The client's weight when it became active."""


class ActiveClients:
    """The active clients, and their total weight. A client is active from the start of its first request to the end of
    its last.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.clients: Final[dict[ClientId, Activity]] = {}
        self.weight = 0.0
        """The sum of the active clients' weights; their number if each weighs 1."""

    def __len__(self) -> int:
        return len(self.clients)

    def __contains__(self, client: ClientId) -> bool:
        return client in self.clients

    def weight_with(self, request: Request) -> float:
        """Return what the sum of weights would be if this request's client were active."""
        return self.weight if request.client in self.clients else self.weight + self._weight_of(request)

    def add_request(self, request: Request) -> None:
        """Count a request that waits or is in flight. The client's weight counts with its first request."""
        activity = self.clients.get(request.client)
        if activity is None:
            weight = self._weight_of(request)
            self.clients[request.client] = Activity(1, weight)
            self.weight += weight
        else:
            activity.requests += 1

    def _weight_of(self, request: Request) -> float:
        return self._shares.ungrouped.get(request.client) or self._shares.effective_weight(request)

    def remove_request(self, client: ClientId) -> None:
        """Count a request as ended, withdrawn or moved."""
        activity = self.clients[client]
        activity.requests -= 1
        if not activity.requests:
            del self.clients[client]
            self.weight = self.weight - activity.weight if self.clients else 0.0  # 0.0 drops the rounding error
