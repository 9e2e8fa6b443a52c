"""The clients that the core knows: all that have anything under way, and of the others those that came last.

One that is forgotten is forgotten everywhere: by the ledger, by what watches fairness and by the policy, which keeps
what it owes. Which ones are, `recent_clients` says, or an operator. What else an operator wants for a client, and is
not a word about one of its requests, comes here too.
"""

from typing import assert_never

from router.core.clients.fairness import Fairness
from router.core.clients.ledger import Ledger
from router.core.clients.recent_clients import RecentClients
from router.core.clients.shares import Shares
from router.core.model.events import Credited, Forgotten
from router.core.model.request import ClientId
from router.core.policies.base import Policy


class KnownClients:
    """Every client remembered, and the way in which one is forgotten."""

    def __init__(self, limit: int, shares: Shares, accounts: Ledger, fairness: Fairness, policy: Policy) -> None:
        """`limit`: how many are remembered that have nothing under way; `shares`: knows which have."""
        self.weights: dict[ClientId, float] = {}
        """Every client remembered, with the weight it had when it came last."""
        self._recent = RecentClients(limit)
        self._shares = shares
        self._accounts = accounts
        self._fairness = fairness
        self._policy = policy

    def remember(self, client: ClientId, weight: float) -> None:
        """A client is there."""
        self.weights[client] = weight
        self._recent.touch(client)

    def apply(self, wish: Credited | Forgotten) -> None:
        """What an operator wants for a client; one that has anything under way is not forgotten."""
        match wish:
            case Credited(client, cost):
                self._policy.grant(client, cost)
                self._fairness.credit_granted(client, cost)
            case Forgotten(client):
                if client in self.weights and not self._shares.is_active(client):
                    self._recent.drop(client)
                    self._forget(client)
            case _:
                assert_never(wish)

    def forget_surplus(self) -> None:
        """Forget a few of those that have nothing under way, if there are too many."""
        for client in self._recent.to_forget(self._shares.is_active):
            self._forget(client)

    def _forget(self, client: ClientId) -> None:
        del self.weights[client]
        self._accounts.forget(client)
        self._fairness.forget(client)
        self._policy.forget(client)
