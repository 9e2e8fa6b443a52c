"""Which clients wait in a queue or have something in flight from there, and what they weigh together."""

from dataclasses import dataclass

from router.core.model.request import ClientId


@dataclass(slots=True)
class Activity:
    """One client's."""

    requests: int
    weight: float
    """Its weight when it became active."""


class ActiveClients:
    """A client is active from the first of its requests to the end of the last."""

    def __init__(self) -> None:
        self._clients: dict[ClientId, Activity] = {}
        self.weight = 0.0
        """Of all together: a count of the clients where each weighs 1."""

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: ClientId) -> bool:
        return client in self._clients

    def add_request(self, client: ClientId, weight: float) -> None:
        """One more request of a client waits or is in flight; its weight counts with the first."""
        activity = self._clients.get(client)
        if activity is None:
            self._clients[client] = Activity(1, weight)
            self.weight += weight
        else:
            activity.requests += 1

    def remove_request(self, client: ClientId) -> None:
        """One less."""
        activity = self._clients[client]
        activity.requests -= 1
        if not activity.requests:
            del self._clients[client]
            self.weight = self.weight - activity.weight if self._clients else 0.0  # no rounding is left over
