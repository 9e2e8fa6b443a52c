"""The queues in which each client waits: only those take in its new priority class. And its turns at them together, to
see which request stays its oldest for long.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from router.core.model.request import ClientId, RequestId

FEW_CHANGES: Final = 16
"""Up to this many new priority classes are taken in one by one; after more, a queue is looked through anew."""


class PriorityChanges:
    """The clients whose priority class has changed, the latest last."""

    __slots__ = ("_latest", "count")

    def __init__(self) -> None:
        self.count = 0
        """How often any client's class has changed."""
        self._latest: list[ClientId] = []

    def add(self, client: ClientId) -> None:
        """Note that a client's class has changed."""
        self.count += 1
        self._latest.append(client)
        if len(self._latest) > 2 * FEW_CHANGES:
            del self._latest[:FEW_CHANGES]

    def since(self, count: int) -> Sequence[ClientId] | None:
        """Return the clients whose class has changed since there were `count` changes; None if these are many."""
        missed = self.count - count
        return None if missed > FEW_CHANGES else self._latest[len(self._latest) - missed :]


class ClassedQueue(Protocol):
    """A queue that keeps its clients by priority class."""

    def take_in_class(self, client: ClientId, priority_class: int) -> None:
        """Let a client of the queue be found in its new priority class."""


class QueuesByClient:
    """The queues, one or several, in which each client waits: only those take in its new priority class. And its turns
    at them together, to see which request stays its oldest for long.
    """

    def __init__(self) -> None:
        self._queues: dict[ClientId, dict[ClassedQueue, None]] = {}
        self._turns: dict[ClientId, int] = {}
        """By client, its turns since its oldest request was last looked at."""
        self._oldest: dict[ClientId, RequestId] = {}
        """By client, the request that was its oldest then."""
        self.changes: Final = PriorityChanges()

    def __len__(self) -> int:
        return len(self._queues)

    def enter(self, client: ClientId, queue: ClassedQueue) -> None:
        """Note that a client begins to wait in a queue."""
        self._queues.setdefault(client, {})[queue] = None

    def leave(self, client: ClientId, queue: ClassedQueue) -> None:
        """Note that a client waits no longer in a queue."""
        queues = self._queues[client]
        del queues[queue]
        if not queues:
            del self._queues[client]
            self._turns.pop(client, None)
            self._oldest.pop(client, None)

    def update_priority(self, client: ClientId, priority_class: int | None) -> None:
        """Let the queues take in the new priority class of a client; None if it is not eligible."""
        self.changes.add(client)
        if priority_class is not None:
            for queue in self._queues.get(client, ()):
                queue.take_in_class(client, priority_class)

    def turns_since_look(self, client: ClientId) -> int:
        """Return how many turns a client has had since its oldest request was last looked at."""
        return self._turns.get(client, 0)

    def note_turn(self, client: ClientId) -> None:
        """Count a turn of a client."""
        self._turns[client] = self._turns.get(client, 0) + 1

    def restart_turns(self, client: ClientId) -> None:
        """Count a client's turns from 0 again."""
        self._turns[client] = 0

    def was_oldest(self, client: ClientId, request: RequestId) -> bool:
        """Return whether this request was a client's oldest at the last look."""
        return self._oldest.get(client) == request

    def stayed_oldest(self, client: ClientId, oldest: RequestId) -> bool:
        """Return whether a client's oldest request was its oldest at the last look, too. If not, this is the last look
        from now on.
        """
        if self.was_oldest(client, oldest):
            return True
        self._oldest[client] = oldest
        self._turns[client] = 0
        return False
