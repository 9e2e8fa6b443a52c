"""How far each active client is behind an even share of what the fleet serves, by weight, in cost units.

The service gap (`service_gap`) compares clients while both have requests in the router's queue. That is the theorem's
notion and has its bound, but it never sees a client with one call open at a time: its interval ends with each dispatch.
The lag counts every client that has a call anywhere, waiting or in flight, as the word is used of fair queueing: what
it would have been served by an even division, less what it was served.

- Service is divided evenly, by weight, among the clients that have a call open at that moment.
- A client's even share counts only while a call of its waits for its first token. Whoever has nothing waiting asks for
  no more than it gets, so what others are served meanwhile is no unfairness.
- Its own service counts always. A lag does not fall below 0: to have been served more than others, while they asked
  for less, is no debt.
- An interval ends after a client was idle for `turns.IDLE_SECONDS`. In the shorter pauses between two calls a lag stays
  as it is, so that a client with one call open at a time is compared over all its calls.

While the same clients are active and one waits all the time, its lag is a weighted mean of its gaps to all of them, so
no larger than the largest of these. Nothing bounds it for a client that waits in the engines as well.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Lag:
    """One client's."""

    behind: float = 0.0
    """Up to `since`; cost units per weight."""
    since: float = 0.0
    """The even share until which `behind` is counted."""
    waits: bool = False
    surplus: float = 0.0
    """What it was served when it was not behind. What is given back of charges that were too high counts against this
    first: a charge that took no lag away leaves none when it is taken back."""


class EvenShare:
    """What a client of weight 1 that waited all the time would have been served so far."""

    def __init__(self) -> None:
        self._share = 0.0
        self.weight = 0.0
        """Of the clients that have a call open, together."""

    def add_service(self, cost: float) -> None:
        """The fleet served so much, or gave it back."""
        if self.weight > 0.0:
            self._share += cost / self.weight

    def begin_waiting(self, lag: Lag) -> None:
        """A call of this client waits from now on."""
        lag.waits, lag.since = True, self._share

    def end_waiting(self, lag: Lag) -> None:
        """None of this client's waits any more."""
        lag.behind, lag.waits = self.lag_of(lag), False

    def lag_of(self, lag: Lag) -> float:
        """A client's lag now; slightly negative where others were given back something while it waited."""
        return lag.behind + self._share - lag.since if lag.waits else lag.behind

    def add_client_service(self, lag: Lag, service: float) -> None:
        """A client was served so much per weight, or was given it back."""
        if service >= 0.0 and not (lag.waits or lag.behind):  # as of nearly every token that streams
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
