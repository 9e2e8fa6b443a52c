"""The clients that the core remembers: all that have a live request, and the most recent of the others.

So no number of invented client names fills the memory. A forgotten client is forgotten everywhere: by the ledger, by
the measures of fairness, and by the policy, except for what the client owes. `RecentClients` chooses the clients to
forget, or an operator does. Other wishes of an operator that concern a client, and none of its requests, are applied
here as well.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, assert_never

from router.core.clients.fairness import Fairness
from router.core.clients.ledger import Ledger
from router.core.clients.shares import Shares
from router.core.model.events import Credited, Forgotten
from router.core.model.request import ClientId
from router.core.policies.base import Policy

CHECKS_PER_ARRIVAL: Final = 4
"""Clients checked at each arrival while there are too many."""


class RecentClients:
    """All remembered clients, from the least to the most recent."""

    def __init__(self, limit: int) -> None:
        """`limit`: how many clients without requests waiting or in flight are remembered."""
        self._limit = limit
        # Not a plain dict, which finds its first key by walking past all keys removed before it.
        self._clients: OrderedDict[ClientId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def touch(self, client: ClientId) -> None:
        """Mark a client as the most recent."""
        self._clients[client] = None
        self._clients.move_to_end(client)

    def drop(self, client: ClientId) -> None:
        """Forget a client, however recent it is."""
        self._clients.pop(client, None)

    def to_forget(self, busy: Callable[[ClientId], bool]) -> list[ClientId]:
        """Remove and return a few of the least recent clients beyond the limit, none for which `busy` is true."""
        found = []
        for _ in range(min(CHECKS_PER_ARRIVAL, len(self._clients) - self._limit)):
            client, _nothing = self._clients.popitem(last=False)
            if busy(client):
                self._clients[client] = None
            else:
                found.append(client)
        return found


class KnownClients:
    """Remembers clients and forgets them everywhere at once."""

    def __init__(self, limit: int, shares: Shares, ledger: Ledger, fairness: Fairness, policy: Policy) -> None:
        """`limit`: how many clients without a live request are remembered; `shares`: knows which clients have one."""
        self.weights: dict[ClientId, float] = {}
        """Every remembered client, with the weight of its latest request."""
        self._recent = RecentClients(limit)
        self._shares = shares
        self._ledger = ledger
        self._fairness = fairness
        self._policy = policy

    def remember(self, client: ClientId, weight: float) -> None:
        """Remember a client, as the most recent one, with its present weight."""
        self.weights[client] = weight
        self._recent.touch(client)

    def apply(self, event: Credited | Forgotten) -> None:
        """Apply an operator's wish for a client. A client with a live request is not forgotten."""
        match event:
            case Credited(client, cost):
                self._policy.grant(client, cost)
                self._fairness.credit_granted(client, cost)
            case Forgotten(client):
                if client in self.weights and not self._shares.is_active(client):
                    self._recent.drop(client)
                    self._forget(client)
            case _:
                assert_never(event)

    def forget_surplus(self) -> None:
        """Forget a few clients that have no live request, because more than `limit` are remembered."""
        for client in self._recent.to_forget(self._shares.is_active):
            self._forget(client)

    def _forget(self, client: ClientId) -> None:
        del self.weights[client]
        self._ledger.forget(client)
        self._fairness.forget(client)
        self._policy.forget(client)
