"""Which clients are backlogged in which queue, as fairness is defined (DLPM paper, Definition 3.1).

A request that is dispatched on arrival waits for no time at all, and begins no backlog.
"""

from typing import Protocol

from router.core.model.request import ClientId, WorkerId


class BacklogWatcher(Protocol):
    """Observer of the start and end of clients' backlogs."""

    def backlog_began(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """The client's first request waits in this queue."""

    def backlog_ended(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """No request of the client waits in this queue any more."""


class Backlog:
    """Waiting requests per client and queue. A queue belongs to one worker, or is the pool of all workers (None)."""

    def __init__(self) -> None:
        self._waiting: dict[WorkerId | None, dict[ClientId, int]] = {}
        self._watchers: list[BacklogWatcher] = []

    def subscribe(self, watcher: BacklogWatcher) -> None:
        """Notify this watcher whenever a client's backlog in a queue begins or ends."""
        self._watchers.append(watcher)

    def add(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """Count one more waiting request of the client."""
        clients = self._waiting.setdefault(queue, {})
        clients[client] = clients.get(client, 0) + 1
        if clients[client] == 1:
            for watcher in self._watchers:
                watcher.backlog_began(queue, client, now)

    def remove(self, queue: WorkerId | None, client: ClientId, now: float) -> None:
        """Count one waiting request of the client less."""
        clients = self._waiting[queue]
        clients[client] -= 1
        if not clients[client]:
            del clients[client]
            for watcher in self._watchers:
                watcher.backlog_ended(queue, client, now)
        if not clients:
            del self._waiting[queue]

    def length(self, queue: WorkerId | None) -> int:
        """Return the number of requests that wait in this queue."""
        return sum(self._waiting.get(queue, {}).values())

    def of_client(self, client: ClientId) -> int:
        """Return the number of one client's requests that wait in any queue."""
        return sum(clients.get(client, 0) for clients in self._waiting.values())
