"""When active clients get their turn: who waits, for how long and since when unserved, and how long a round takes.

A client is *active* while it has a call anywhere, waiting or in flight. A call waits until its first token, be it here
or in an engine; one that comes whole, until it is believed to be computed. A client is *unserved* while a call of its
waits and it is served nothing, not even through another of its calls.

A *fair round* is the time in which each active client could be served one call of mean cost: clients · mean cost / S,
where S is what the workers can serve in a second. A round as it went is over when every client that had a call open at
its beginning was served something or has none open any more.

A wait is also told in fair rounds. A client's own calls have their turns one after the other, so a call is to wait a
round for each of its client's that were answered meanwhile, and one for itself; where a client weighs less than the
mean, that much longer.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from router.core.clients.last_minute import MinuteMaximum, MinuteSums
from router.core.clients.service_lag import EvenShare, Lag
from router.core.model.request import ClientId, RequestId

IDLE_SECONDS: Final = 0.5
"""A client without a call for so long is active no more: longer than an answer and the next call are on their way, and
shorter than people read or tools work."""
LEAST_ROUND_SECONDS: Final = 1.0
"""A fair round is not told as shorter: with few clients it is, and then what a call waits for is its own prefill."""


class Wait(NamedTuple):
    """A call that has no first token yet."""

    since: float
    answered: int
    """How many of its client's calls had been answered then."""


@dataclass(slots=True)
class ActiveClient:
    """One that has a call open, or had one a moment ago."""

    weight: float
    round: int
    """The last round in which it was served, or of which it is no part."""
    requests: int = 0
    waits: dict[RequestId, Wait] = field(default_factory=dict)
    """In order of arrival."""
    answered: int = 0
    """Calls that had their first token."""
    unserved_since: float | None = None
    """When it was served last, or its calls began to wait; None if it was served and none has begun to wait since.

    It goes on where a call is given up and another follows at once."""
    lag: Lag = field(default_factory=Lag)


class ClientTurns(NamedTuple):
    """What one client feels; the times `even` are in terms of a client of mean weight."""

    lag: float
    """Cost units per weight, see `service_lag`."""
    unserved_s: float | None
    """None while nothing of its waits."""
    unserved_even: float
    wait_s: float
    """Of its oldest call that waits."""
    wait_even: float
    """The same for each of its calls that were answered meanwhile and itself."""


class RoundTimes(NamedTuple):
    """Rounds, in seconds."""

    clients: int
    """That have a call open."""
    fair_s: float | None
    """None before anything was served."""
    current_s: float
    """How long the round lasts that is under way; 0 without any."""
    unserved: int
    """Clients that were not served in it yet."""
    last_s: float | None
    """How long the one before took; None before one was over."""


NOT_ACTIVE: Final = ClientTurns(0.0, None, 0.0, 0.0, 0.0)


class Turns:
    """All active clients. Each happening costs the same for any number of them, and so does each question."""

    def __init__(self) -> None:
        self._clients: dict[ClientId, ActiveClient] = {}
        self._idle: OrderedDict[ClientId, float] = OrderedDict()
        """Those without a call, and since when, the first first."""
        self._even_share = EvenShare()
        self._last_minute = MinuteSums()
        """Cost served, and calls answered."""
        self._mean_cost: float | None = None
        """Of a call, in the minute before the last first token."""
        self._waits, self._even_waits = MinuteMaximum(), MinuteMaximum()
        self._round = 0
        self._unserved = 0
        self._round_began: float | None = None
        """Of the round under way."""
        self._last_round: float | None = None

    def request_opened(self, client: ClientId, request: RequestId, weight: float, since: float, now: float) -> None:
        """A call that has waited since then is there."""
        entry = self._activate(client, weight, now)
        if not entry.waits:
            self._even_share.begin_waiting(entry.lag)
            if entry.unserved_since is None:
                entry.unserved_since = since
        entry.waits[request] = Wait(since, entry.answered)

    def request_resumed(self, client: ClientId, weight: float, now: float) -> None:
        """A call is there again whose answer had begun at another worker."""
        self._activate(client, weight, now)

    def request_answered(self, client: ClientId, request: RequestId, now: float) -> None:
        """Its first token is here, or is believed to be; nothing happens if it was before."""
        entry = self._clients.get(client)
        if entry is not None and request in entry.waits:
            self._end_wait(entry, request, now)
            entry.answered += 1
            self._last_minute.add(0.0, 1.0, now)
            cost, calls = self._last_minute.totals(now)
            self._mean_cost = max(0.0, cost) / calls
            self._serve(entry, now)

    def request_closed(self, client: ClientId, request: RequestId, now: float) -> None:
        """It is gone, answered or not."""
        entry = self._clients[client]
        if request in entry.waits:
            self._end_wait(entry, request, now)
        entry.requests -= 1
        if not entry.requests:
            self._idle[client] = now
            self._even_share.weight = self._even_share.weight - entry.weight if self._active else 0.0
            self._have_turn(entry, now)

    def add_service(self, client: ClientId, request: RequestId, cost: float, weight: float, now: float) -> None:
        """A client was served at this cost, or this much was given back.

        What is charged for a call that ends without a first token is service, and no turn.
        """
        self._last_minute.add(cost, 0.0, now)
        self._even_share.add_service(cost)
        if (entry := self._clients.get(client)) is not None:
            self._even_share.add_client_service(entry.lag, cost / weight)
            if cost > 0.0 and request not in entry.waits:
                self._serve(entry, now)

    def forget(self, client: ClientId) -> None:
        """A client without a call is not remembered."""
        if client in self._idle:
            del self._idle[client], self._clients[client]

    def client_turns(self, client: ClientId, now: float) -> ClientTurns:
        """What a client feels now; what came after this time counts as if it came then."""
        entry = self._clients.get(client)
        if entry is None or self._idle.get(client, now) < now - IDLE_SECONDS:
            return NOT_ACTIVE
        lag = max(0.0, self._even_share.lag_of(entry.lag))
        if not entry.waits or entry.unserved_since is None:
            return ClientTurns(lag, None, 0.0, 0.0, 0.0)
        oldest = next(iter(entry.waits.values()))
        unserved, wait = max(0.0, now - entry.unserved_since), max(0.0, now - oldest.since)
        even = self._even_weight(entry)
        turns = entry.answered - oldest.answered + 1
        return ClientTurns(lag, unserved, unserved * even, wait, wait * even / turns)

    def cost_served(self, now: float) -> float:
        """What all clients together were served in the last minute, in cost units."""
        return self._last_minute.totals(now)[0]

    def longest_waits(self, now: float) -> tuple[float, float]:
        """Of calls that waited no more in the last minute, in seconds: as it was, and as `ClientTurns.wait_even`."""
        return self._waits.largest(now), self._even_waits.largest(now)

    def rounds(self, rate: float | None, now: float) -> RoundTimes:
        """`rate`: what the workers can serve in a second, in cost units; None where that is not known."""
        fair = None
        if rate and self._mean_cost is not None:
            fair = max(LEAST_ROUND_SECONDS, self._active * self._mean_cost / rate)
        current = 0.0 if self._round_began is None else now - self._round_began
        return RoundTimes(self._active, fair, current, self._unserved, self._last_round)

    @property
    def _active(self) -> int:
        return len(self._clients) - len(self._idle)

    def _activate(self, client: ClientId, weight: float, now: float) -> ActiveClient:
        self._forget_idle(now)
        entry = self._clients.get(client)
        if entry is None:
            entry = self._clients[client] = ActiveClient(weight, self._round)
        elif entry.requests:
            self._even_share.weight -= entry.weight
        entry.weight = weight
        self._even_share.weight += weight
        if not entry.requests:
            self._idle.pop(client, None)
            entry.round = self._round
            if self._round_began is None:
                self._begin_round(now)
        entry.requests += 1
        return entry

    def _forget_idle(self, now: float) -> None:
        """No more than came since this was done last: each client is forgotten once for each time it came."""
        while self._idle:
            client, since = next(iter(self._idle.items()))
            if since >= now - IDLE_SECONDS:
                return
            del self._idle[client], self._clients[client]

    def _end_wait(self, entry: ActiveClient, request: RequestId, now: float) -> None:
        wait = entry.waits.pop(request)
        seconds, turns = now - wait.since, entry.answered - wait.answered + 1
        self._waits.add(seconds, now)
        self._even_waits.add(seconds * self._even_weight(entry) / turns, now)
        if not entry.waits:
            self._even_share.end_waiting(entry.lag)

    def _even_weight(self, entry: ActiveClient) -> float:
        """A client's weight over the mean of the active ones, at most 1."""
        together = self._even_share.weight
        return min(1.0, entry.weight * self._active / together) if together > 0.0 else 1.0

    def _serve(self, entry: ActiveClient, now: float) -> None:
        entry.unserved_since = now if entry.waits else None
        if entry.round < self._round:
            self._have_turn(entry, now)

    def _have_turn(self, entry: ActiveClient, now: float) -> None:
        """A client was served in the round under way, or has nothing to be served."""
        if entry.round < self._round:
            entry.round = self._round
            self._unserved -= 1
            if not self._unserved and self._round_began is not None:
                self._last_round, self._round_began = now - self._round_began, None
                if self._active:
                    self._begin_round(now)

    def _begin_round(self, now: float) -> None:
        self._round += 1
        self._unserved, self._round_began = self._active, now
