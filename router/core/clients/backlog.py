"""Who waits where: the definition of "backlogged" that fairness is measured by (DLPM paper, Definition 3.1)."""

from typing import Protocol

from router.core.model.request import ClientId, WorkerId


class BacklogWatcher(Protocol):
    """Hears of the beginning and the end of a client's backlog in a queue."""

    def backlog_began(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """The first request of this client waits there."""

    def backlog_ended(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """None of this client's waits there any more."""

    def passed_through(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """A request of this client, of which none waited there, had its turn as it came."""
        self.backlog_began(queue, client, now)
        self.backlog_ended(queue, client, now)


class Backlog:
    """Which clients wait in which queue; a queue is a worker's, or None for a pool."""

    def __init__(self) -> None:
        self._waiting: dict[WorkerId | None, dict[ClientId, int]] = {}
        self._watchers: list[BacklogWatcher] = []

    def subscribe(self, watcher: BacklogWatcher) -> None:
        """Tell this watcher when a client's backlog in a queue begins and ends."""
        self._watchers.append(watcher)

    def add(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """One more request of this client waits there."""
        clients = self._waiting.setdefault(queue, {})
        clients[client] = clients.get(client, 0) + 1
        if clients[client] == 1:
            for watcher in self._watchers:
                watcher.backlog_began(queue, client, now)

    def remove(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """One less."""
        clients = self._waiting[queue]
        clients[client] -= 1
        if not clients[client]:
            del clients[client]
            for watcher in self._watchers:
                watcher.backlog_ended(queue, client, now)
        if not clients:
            del self._waiting[queue]

    def pass_through(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """A request of this client, who has none there, is given out without having waited."""
        for watcher in self._watchers:
            watcher.passed_through(queue, client, now)

    def length(self, queue: WorkerId | None) -> int:
        """Requests that wait there."""
        return sum(self._waiting.get(queue, {}).values())

    def of_client(self, client: ClientId) -> int:
        """Requests of one client that wait anywhere."""
        return sum(clients.get(client, 0) for clients in self._waiting.values())
