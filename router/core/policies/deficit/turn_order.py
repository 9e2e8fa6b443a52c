"""The turns of waiting clients: who has a head start, whose last turn is the longest ago, and who is overdue for one.

A client that begins to wait has a *head start* if the input of its first request costs no more than that, and until it
was charged more. Clients with a head start take turns, like new flows in FQ-CoDel (RFC 8290, section 4.2): by longest
match, some of many clients with one call open each would wait until all others have used up a quantum. In a pool they
may do so in rounds (`TurnRounds`), one turn each: first those that have begun to wait, then those that always have a
call waiting, and in both parts first those whose request has little to compute.

A client is late for a turn when, since it began to wait or last had one, so many requests were dispatched that each
active client could have had one.
"""

from typing import Final

from router.core.model.prompt_key import CHUNK_BYTES
from router.core.model.request import ClientId, Request
from router.core.policies.deficit.turn_rounds import LITTLE_CHUNKS, TurnRounds

CLOCK_BITS: Final = 64
"""Enough for all turns of a fleet."""


def chunks_of(request: Request) -> int:
    """Return the number of whole chunks of a request's prompts."""
    return sum([prompt.size for prompt in request.prompts]) // CHUNK_BYTES


class TurnOrder:
    """Keeps when each waiting client had its last turn."""

    __slots__ = (
        "_checks",
        "_last",
        "_overdue_after",
        "_renewed",
        "clock",
        "dispatches",
        "head_starts",
        "last_turn",
        "rounds",
    )

    def __init__(self, overdue_after: float) -> None:
        """`overdue_after`: dispatches per active client after which a client is late for a turn."""
        self._overdue_after = overdue_after
        self.rounds: TurnRounds | None = None
        """The rounds in which clients take turns; None while they take them in a fixed order. Set from outside."""
        self._last: dict[ClientId, int] = {}
        """By waiting client, the clock value of its last turn or of the start of its wait. Values are unique."""
        self.last_turn: Final = self._last.__getitem__
        """The clock value of a waiting client's last turn."""
        self.clock = 0
        """Counts turns, starts of waits and renewed head starts: while it stands, no waiting client gets another turn.
        Rounds, too, begin with the start of a wait. Read only for others."""
        self.dispatches = 0
        """Requests dispatched so far. Counted from outside."""
        self._checks: dict[ClientId, int] = {}
        """By waiting client, the number of dispatches at its last turn, the start of its wait or its last check for
        being late, in increasing order."""
        self.head_starts: Final[dict[ClientId, float]] = {}
        """What is left of the head start of each waiting client that has one, in cost units. Read only for others."""
        self._renewed: set[ClientId] = set()
        """Waiting clients whose head start was renewed since they began to wait."""

    def join(self, client: ClientId, head_start: float, cost: float) -> None:
        """Put a client that begins to wait behind all others, with this head start, in cost units, unless the input of
        its request costs as much.
        """
        if head_start > cost:
            self.head_starts[client] = head_start
        self.move_to_back(client)

    def renew(self, client: ClientId, head_start: float, cost: float) -> None:
        """Give a client that waits already a whole head start again, unless the input of its new request costs as
        much. In rounds it goes after those that have begun to wait.
        """
        if head_start > cost:
            self.head_starts[client] = head_start
            self._renewed.add(client)
            self.clock += 1

    def move_to_back(self, client: ClientId) -> None:
        """Put a waiting client behind all others, as it had a turn."""
        self.clock += 1
        self._last[client] = self.clock
        self._checks.pop(client, None)
        self._checks[client] = self.dispatches

    def leave(self, client: ClientId) -> None:
        """Count a client as no longer waiting."""
        del self._last[client], self._checks[client]
        self._renewed.discard(client)
        if client in self.head_starts:
            del self.head_starts[client]

    def use_up(self, client: ClientId, cost: float) -> bool:
        """Charge a client's head start; returns whether that is used up now."""
        left = self.head_starts[client] = self.head_starts[client] - cost
        if left <= 0:
            del self.head_starts[client]
        return left <= 0

    def turn(self, request: Request, unmatched: int) -> int:
        """Return when a client has its turn with a waiting request; earlier is less. The client whose last turn is the
        longest ago goes first; where clients take turns in rounds, within an earlier round, without a renewed head
        start and with little to compute.

        `unmatched`: minus the chunks of the request that are cached.
        """
        last = self._last[request.client]
        if self.rounds is None:
            return last
        much = chunks_of(request) + unmatched > LITTLE_CHUNKS
        place = 4 * self.rounds.round_of(request.client) + 2 * (request.client in self._renewed) + much
        return (place << CLOCK_BITS) + last

    def pop_late(self, active: int) -> list[ClientId]:
        """Return the waiting clients that are late for a turn. Each is late again only after as many dispatches from
        now.

        `active`: the number of active clients.
        """
        threshold = self.dispatches - self._overdue_after * active
        late: list[ClientId] = []
        for client, at in self._checks.items():
            if at > threshold:
                break
            late.append(client)
        for client in late:
            del self._checks[client]
            self._checks[client] = self.dispatches
        return late
