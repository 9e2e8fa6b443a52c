"""How far each active client is behind an even share of the fleet's service, by weight, in cost units.

The service gap (`service_gap`) compares clients while both have requests in the router's queue. That is the theorem's
notion and has a bound, but it never sees a client with one request at a time, whose interval ends with each dispatch.
The lag counts every client with a request anywhere, waiting or in flight. It is the lag of fair queueing: what an even
division would have served the client, minus what it was served.

- Service is divided evenly, by weight, among the clients that have a request at that moment.
- A client's even share counts only while one of its requests waits for its first token. A client with nothing waiting
  asks for no more than it gets, so serving others meanwhile is not unfair.
- Its own service always counts. A lag never falls below 0: a client that was served more than others while they asked
  for less owes nothing.
- An interval ends after a client was idle for `turns.IDLE_SECONDS`. In shorter pauses between two requests the lag
  stays as it is, so that a client with one request at a time is compared over all its requests.

While the same clients are active and one waits all the time, its lag is a weighted mean of its gaps to all of them, so
it does not exceed the largest of these. Nothing bounds the lag of a client whose requests also wait in the engines.
"""

from dataclasses import dataclass


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
