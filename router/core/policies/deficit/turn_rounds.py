"""Rounds in which each client that takes turns has one.

This is start-time fair queueing (Goyal, Vin and Cheng, 1996) with turns of equal length. A client that begins to wait
takes its turn in the current round, or in the next one if it has had a turn in the current one. Clients of an earlier
round go first, and a round begins with its first turn. So in one queue whose clients may all go, each other client has
at most two turns while one waits: one of an earlier round, and one of its own. A later round may begin at another
worker while clients of an earlier one wait for theirs.

Why rounds: turns in a fixed order scan the caches cyclically. Where the prefixes of all clients exceed the caches, each
is then evicted before its client's next turn. In a round, what is cached goes first, and what is computed last is still
cached in the next.
"""

from collections.abc import Callable
from typing import Final

from router.core.model.request import ClientId

LITTLE_CHUNKS: Final = 16
"""A request of which at most this many chunks (about 512 tokens) are not cached has little to compute."""


class TurnRounds:
    """The round in which each waiting client takes its next turn."""

    __slots__ = ("_had_turn", "_may_be_admitted", "_on_admission_change", "_rounds", "admitted", "current")

    def __init__(
        self, may_be_admitted: Callable[[ClientId], bool], on_admission_change: Callable[[ClientId], None]
    ) -> None:
        """`may_be_admitted` returns whether a client may take its turn of a round although it is in debt.
        `on_admission_change` is called with each client whose admission begins or ends.
        """
        self._may_be_admitted = may_be_admitted
        self._on_admission_change = on_admission_change
        self.current = 0
        """The latest round of which a turn was taken."""
        self.admitted: set[ClientId] = set()
        """Waiting clients that may have their turn of the current round in spite of a debt."""
        self._had_turn: set[ClientId] = set()
        """The clients that have had their turn in the current round."""
        self._rounds: dict[ClientId, int] = {}

    def __len__(self) -> int:
        """Return the number of clients that wait."""
        return len(self._rounds)

    def join(self, client: ClientId) -> None:
        """Let a client that begins to wait take its turn in the current round, or in the next if it has had one."""
        self._place(client)
        self.admit(client)

    def _place(self, client: ClientId) -> None:
        self._rounds[client] = self.current + (client in self._had_turn)

    def admit(self, client: ClientId) -> None:
        """Let a waiting client in debt have its turn of the current round, if it has had none and its debt allows that.
        Called whenever it may have become so.
        """
        if client not in self.admitted and self.has_turn(client) and self._may_be_admitted(client):
            self.admitted.add(client)
            self._on_admission_change(client)

    def admit_all(self) -> None:
        """Admit each waiting client that may be. Takes time in proportion to them."""
        for client in self._rounds:
            self.admit(client)

    def end_admission(self, client: ClientId) -> None:
        """Let an admitted client have its turn only without a debt."""
        self.admitted.remove(client)
        self._on_admission_change(client)

    def round_of(self, client: ClientId) -> int:
        """Return the round in which a waiting client takes its next turn."""
        return self._rounds[client]

    def has_turn(self, client: ClientId) -> bool:
        """Return whether a waiting client has not had its turn in the current round."""
        return self._rounds[client] <= self.current

    def take(self, client: ClientId, *, may_begin: bool) -> bool:
        """Count a turn of a waiting client. Returns whether a round began with it.

        `may_begin`: whether a round may begin with it, which is so if it went as one of those that take turns.

        Takes time in proportion to the waiting clients when a round begins, which is once in as many turns.
        """
        at = self._rounds[client]
        begins = may_begin and at > self.current
        if begins:
            self.current = at
            self._had_turn.clear()
        # A turn of an earlier round leaves the client its turn of this one, unless it had it in debt.
        if at >= self.current or client in self.admitted:
            self._had_turn.add(client)
        self._place(client)
        if begins:
            self.admit_all()
        if client in self.admitted:
            self.end_admission(client)
        return begins

    def leave(self, client: ClientId) -> None:
        """Count a client as no longer waiting."""
        del self._rounds[client]
        self.admitted.discard(client)

    def forget(self, client: ClientId) -> None:
        """Drop what is known of a client that does not wait."""
        self._had_turn.discard(client)
