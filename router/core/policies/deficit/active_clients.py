"""The clients with requests that wait in a queue or are in flight from it, and their total weight."""

from dataclasses import dataclass

from router.core.model.request import ClientId


@dataclass(slots=True)
class Activity:
    """The activity of one client."""

    requests: int
    weight: float
    """The client's weight when it became active."""


class ActiveClients:
    """A client is active from the start of its first request to the end of its last."""

    def __init__(self) -> None:
        self._clients: dict[ClientId, Activity] = {}
        self.weight = 0.0
        """The sum of the active clients' weights; their number if each weighs 1."""

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: ClientId) -> bool:
        return client in self._clients

    def weight_with(self, client: ClientId, weight: float) -> float:
        """Return what the sum of weights would be if this client were active."""
        return self.weight if client in self._clients else self.weight + weight

    def add_request(self, client: ClientId, weight: float) -> None:
        """Count a request that waits or is in flight. The client's weight counts with its first request."""
        activity = self._clients.get(client)
        if activity is None:
            self._clients[client] = Activity(1, weight)
            self.weight += weight
        else:
            activity.requests += 1

    def remove_request(self, client: ClientId) -> None:
        """Count a request as ended, withdrawn or moved."""
        activity = self._clients[client]
        activity.requests -= 1
        if not activity.requests:
            del self._clients[client]
            self.weight = self.weight - activity.weight if self._clients else 0.0  # 0.0 drops the rounding error
