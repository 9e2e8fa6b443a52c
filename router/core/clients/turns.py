"""Waits, turns and lags of active clients: which wait, for how long, how long unserved, and how long a round takes.

A client is *active* while it has a request anywhere, waiting or in flight. A request waits until its first token, in
the router or in an engine; an answer that is not streamed waits until its first token is believed to be computed. A
client is *unserved* while one of its requests waits and the client is served nothing, not even by its other requests.

A *fair round* is the time in which each active client could be served one request of mean cost: clients · mean cost /
S, where S is what the workers can serve in a second. A measured round is over when every client that had an open
request at its beginning was served or has no open request any more.

Waits are also given in fair rounds. A client's own requests take turns one after the other, so a request is expected to
wait one round for each of its client's requests that were answered meanwhile, and one for itself; proportionally longer
if the client weighs less than the mean.

The *lag* of a client is how far it is behind an even share of the fleet's service, by weight, in cost units. The
service gap (`fairness`) compares clients while both have requests in the router's queue. That is the theorem's
notion and has a bound, but it never sees a client with one request at a time, whose interval ends with each dispatch.
The lag counts every client with a request anywhere, waiting or in flight. It is the lag of fair queueing: what an even
division would have served the client, minus what it was served.

- Service is divided evenly, by weight, among the clients that have a request at that moment.
- A client's even share counts only while one of its requests waits for its first token. A client with nothing waiting
  asks for no more than it gets, so serving others meanwhile is not unfair.
- Its own service always counts. A lag never falls below 0: a client that was served more than others while they asked
  for less owes nothing.
- An interval ends after a client was idle for `IDLE_SECONDS`. In shorter pauses between two requests the lag stays as
  it is, so that a client with one request at a time is compared over all its requests.

While the same clients are active and one waits all the time, its lag is a weighted mean of its gaps to all of them, so
it does not exceed the largest of these. Nothing bounds the lag of a client whose requests also wait in the engines.

Sums and maxima over the last minute are kept in steps of one second, with bounded memory and constant cost per
addition.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from math import floor, inf
from typing import Final, NamedTuple

from router.core.model.request import ClientId, RequestId

MINUTE: Final = 60.0
"""Length of the window in seconds. One second more may be counted, because values of one second are kept together."""
NO_SECOND: Final[list[float]] = []


class MinuteSums:
    """Two sums over the same events."""

    __slots__ = ("_first", "_last", "_next", "_second", "_seconds")

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque()
        """Each second with an addition, and what was added to both sums in it."""
        self._last = NO_SECOND
        """The last of them, until `_next`, when another one begins."""
        self._next = -inf
        self._first = self._second = 0.0

    def add(self, first: float, second: float, now: float) -> None:
        """Add to both sums. `now` must not decrease."""
        if now >= self._next:
            self._begin(now)
        last = self._last
        last[1] += first
        last[2] += second
        self._first += first
        self._second += second

    def _begin(self, now: float) -> None:
        """Begin a new second."""
        self._forget(now)
        at = floor(now)
        self._next = at + 1.0
        self._last = [at, 0.0, 0.0]
        self._seconds.append(self._last)

    def totals(self, now: float) -> tuple[float, float]:
        """Return both sums over the last minute."""
        self._forget(now)
        return self._first, self._second

    def _forget(self, now: float) -> None:
        seconds = self._seconds
        while seconds and seconds[0][0] < now - MINUTE:
            _, first, second = seconds.popleft()
            self._first -= first
            self._second -= second
        if not seconds:  # drop accumulated rounding errors
            self._first = self._second = 0.0
            self._last, self._next = NO_SECOND, -inf


class MinuteMaximum:
    """The largest value of the last minute."""

    __slots__ = ("_falling",)

    def __init__(self) -> None:
        self._falling: deque[tuple[int, float]] = deque()
        """Seconds, oldest first, with their values; each value is larger than all later ones."""

    def add(self, value: float, now: float) -> None:
        """Add a value. `now` must not decrease."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        if not falling or falling[-1][0] != int(now):
            falling.append((int(now), value))

    def largest(self, now: float) -> float:
        """Return the largest value of the last minute; 0 if there was none."""
        while self._falling and self._falling[0][0] < now - MINUTE:
            self._falling.popleft()
        return self._falling[0][1] if self._falling else 0.0


IDLE_SECONDS: Final = 0.5
"""A client without a request for this long is no longer active: longer than an answer and the next request are under
way, and shorter than people read or tools run.
"""
LEAST_ROUND_SECONDS: Final = 1.0
"""Minimum of a fair round. With few clients the computed time is shorter, but then requests wait
for their own prefill.
"""


class Wait:
    """A request without a first token. Never changes."""

    __slots__ = ("answered", "since")

    def __init__(self, since: float, answered: int) -> None:
        self.since = since
        self.answered = answered
        """Requests of its client that had been answered when the wait began."""


@dataclass(slots=True)
class Lag:
    """The lag of one client."""

    behind: float = 0.0
    """Lag up to `since`, in cost units per weight."""
    since: float = 0.0
    """The even share up to which `behind` is counted."""
    waits: bool = False
    surplus: float = 0.0
    """Service while the client was not behind. Refunds of charges that were too high reduce the surplus first: taking
    back a charge that reduced no lag must leave no lag.
    """


class EvenShare:
    """The service so far of an imaginary client of weight 1 that waited all the time."""

    def __init__(self) -> None:
        self._share = 0.0
        self.weight = 0.0
        """Total weight of the clients that have a request."""

    def add_service(self, cost: float) -> None:
        """Add service of the fleet, in cost units; negative for a refund."""
        if self.weight > 0.0:
            self._share += cost / self.weight

    def begin_waiting(self, lag: Lag) -> None:
        """Begin to count the even share of a client with a waiting request."""
        lag.waits, lag.since = True, self._share

    def end_waiting(self, lag: Lag) -> None:
        """Stop counting the even share of a client that has no request waiting any more."""
        lag.behind, lag.waits = self.lag_of(lag), False

    def lag_of(self, lag: Lag) -> float:
        """Return a client's current lag; slightly negative if others were refunded while the client waited."""
        return lag.behind + self._share - lag.since if lag.waits else lag.behind

    def add_client_service(self, lag: Lag, service: float) -> None:
        """Subtract a client's service per weight from its lag; negative for a refund."""
        if service >= 0.0 and not (lag.waits or lag.behind):  # fast path, taken by nearly every streamed token
            lag.surplus += service
            return
        behind = self.lag_of(lag)
        lag.since = self._share
        if service < 0.0:
            excess = min(-service, lag.surplus)
            lag.surplus -= excess
            lag.behind = behind - service - excess
        else:
            lag.behind = max(0.0, behind - service)
            lag.surplus += max(0.0, service - max(0.0, behind))


@dataclass(slots=True)
class ActiveClient:
    """A client with an open request, or that had one less than `IDLE_SECONDS` ago."""

    weight: float
    round: int
    """The last round in which the client was served, or in which it takes no part."""
    requests: int = 0
    waits: dict[RequestId, Wait] = field(default_factory=dict)
    """Waiting requests in order of arrival."""
    answered: int = 0
    """Requests that had their first token."""
    unserved_since: float | None = None
    """When the client was last served, or its requests began to wait; None if none has begun to wait since it was
    served.

    Carried over if a request is given up and another one follows at once.
    """
    lag: Lag = field(default_factory=Lag)


class ClientTurns(NamedTuple):
    """Lag and waits of one client. Times named `even` are scaled to a client of mean weight."""

    lag: float
    """Cost units per weight; see above."""
    unserved_s: float | None
    """Seconds for which the client is unserved; None while none of its requests waits."""
    unserved_even: float
    wait_s: float
    """Seconds for which the client's oldest waiting request waits."""
    wait_even: float
    """`wait_s` for a client of mean weight, divided by the requests that were answered meanwhile plus one."""


class RoundTimes(NamedTuple):
    """Durations of rounds, in seconds."""

    clients: int
    """Clients with an open request."""
    fair_s: float | None
    """A fair round; None before anything was served."""
    current_s: float
    """Time since the current round began; 0 if there is none."""
    unserved: int
    """Clients not served yet in the current round."""
    last_s: float | None
    """Duration of the previous round; None before one was over."""


NOT_ACTIVE: Final = ClientTurns(0.0, None, 0.0, 0.0, 0.0)


class Turns:
    """The turns of all active clients. Every method takes constant time (amortised), for any number of clients."""

    def __init__(self) -> None:
        self._clients: dict[ClientId, ActiveClient] = {}
        self._idle: OrderedDict[ClientId, float] = OrderedDict()
        """When each client without an open request became idle, the earliest first."""
        self._even_share = EvenShare()
        self._last_minute = MinuteSums()
        """Cost served, and requests answered."""
        self._mean_cost: float | None = None
        """Mean cost of a request, in the minute before the last first token."""
        self._waits, self._even_waits = MinuteMaximum(), MinuteMaximum()
        self._round = 0
        self._unserved = 0
        self._round_began: float | None = None
        """When the current round began."""
        self._last_round: float | None = None

    def request_opened(self, client: ClientId, request: RequestId, weight: float, since: float, now: float) -> None:
        """Add a request that has waited since `since`."""
        entry = self._activate(client, weight, now)
        if not entry.waits:
            self._even_share.begin_waiting(entry.lag)
            if entry.unserved_since is None:
                entry.unserved_since = since
        entry.waits[request] = Wait(since, entry.answered)

    def request_resumed(self, client: ClientId, weight: float, now: float) -> None:
        """Add a request that came back after its answer had begun at another worker. It does not wait for a first
        token.
        """
        self._activate(client, weight, now)

    def request_answered(self, client: ClientId, request: RequestId, now: float) -> None:
        """Record that a request's first token arrived or is believed to be computed. Ignored if recorded before."""
        entry = self._clients.get(client)
        if entry is not None and request in entry.waits:
            self._end_wait(entry, request, now)
            entry.answered += 1
            self._last_minute.add(0.0, 1.0, now)
            cost, calls = self._last_minute.totals(now)
            self._mean_cost = max(0.0, cost) / calls
            self._serve(entry, now)

    def request_closed(self, client: ClientId, request: RequestId, now: float) -> None:
        """Remove a request, whether it was answered or not."""
        entry = self._clients[client]
        if request in entry.waits:
            self._end_wait(entry, request, now)
        entry.requests -= 1
        if not entry.requests:
            self._idle[client] = now
            self._even_share.weight = self._even_share.weight - entry.weight if self._active else 0.0
            self._have_turn(entry, now)

    def add_service(self, client: ClientId, request: RequestId, cost: float, weight: float, now: float) -> None:
        """Add service of a client, in cost units; negative for a refund.

        The charge for a request that ends without a first token is service, but does not count as a turn.
        """
        self._last_minute.add(cost, 0.0, now)
        self._even_share.add_service(cost)
        if (entry := self._clients.get(client)) is not None:
            self._even_share.add_client_service(entry.lag, cost / weight)
            if cost > 0.0 and request not in entry.waits:
                self._serve(entry, now)

    def forget(self, client: ClientId) -> None:
        """Forget a client without open requests."""
        if client in self._idle:
            del self._idle[client], self._clients[client]

    def client_turns(self, client: ClientId, now: float) -> ClientTurns:
        """Return a client's lag and waits. Changes after `now` count as if they happened at `now`."""
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
        """Return the service of all clients in the last minute, in cost units."""
        return self._last_minute.totals(now)[0]

    def longest_waits(self, now: float) -> tuple[float, float]:
        """Return the longest waits that ended in the last minute, in seconds: as measured, and as in
        `ClientTurns.wait_even`.
        """
        return self._waits.largest(now), self._even_waits.largest(now)

    def rounds(self, rate: float | None, now: float) -> RoundTimes:
        """Return the durations of rounds. `rate`: cost units that the workers can serve in a
        second; None if not known.
        """
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
        """Forget clients idle for too long. Each client is forgotten once per time it came, so the
        cost is amortised.
        """
        while self._idle:
            client, since = next(iter(self._idle.items()))
            if since >= now - IDLE_SECONDS:
                return
            del self._idle[client], self._clients[client]

    def _end_wait(self, entry: ActiveClient, request: RequestId, now: float) -> None:
        wait = entry.waits.pop(request)
        seconds, turns, weight = now - wait.since, entry.answered - wait.answered + 1, self._even_weight(entry)
        self._waits.add(seconds, now)
        self._even_waits.add(seconds * weight / turns, now)
        if not entry.waits:
            self._even_share.end_waiting(entry.lag)

    def _even_weight(self, entry: ActiveClient) -> float:
        """Return the client's weight divided by the mean of the active clients, at most 1."""
        together = self._even_share.weight
        return min(1.0, entry.weight * self._active / together) if together > 0.0 else 1.0

    def _serve(self, entry: ActiveClient, now: float) -> None:
        entry.unserved_since = now if entry.waits else None
        if entry.round < self._round:
            self._have_turn(entry, now)

    def _have_turn(self, entry: ActiveClient, now: float) -> None:
        """Count that a client was served in the current round, or has nothing left to serve."""
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
