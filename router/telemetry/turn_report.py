"""Reports on rounds and waits: whether every client with an open call is served, and how soon."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from router.core.clients.turns import ClientTurns, RoundTimes


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Rounds in which every active client is served; `router.core.clients.turns` defines them."""

    clients: int
    """Clients with an open call."""
    fair_s: float | None
    """Seconds in which each of these clients could be served one call of mean cost; None before that is known."""
    current_s: float
    """Seconds since the current round began."""
    unserved: int
    """Clients that have not been served in the current round."""
    last_s: float | None
    """Seconds that the last round took; None before one has ended."""


@dataclass(frozen=True, slots=True)
class WaitReport:
    """The longest waits for a first token and for any service, in seconds and in fair rounds.

    A value in fair rounds is None while their length is not known.
    """

    waiting_s: float
    """Longest wait of the calls that still wait for their first token."""
    waiting_rounds: float | None
    """The same in fair rounds, divided by the turns that the call's client had meanwhile."""
    lately_s: float
    """Longest wait that ended in the last minute, by a first token or because the call was given up."""
    lately_rounds: float | None
    """The same in fair rounds, divided by the turns that the call's client had meanwhile."""
    unserved_s: float
    """Longest time for which a client with a waiting call has been served nothing."""
    unserved_rounds: float | None
    """The same in fair rounds."""
    unserved_clients: int | None
    """Clients with a waiting call that have been served nothing for longer than a fair round."""


NO_ROUND: Final = RoundReport(0, None, 0.0, 0, None)
NO_WAIT: Final = WaitReport(0.0, None, 0.0, None, 0.0, None, None)


def round_report(times: RoundTimes) -> RoundReport:
    """Report the length of rounds."""
    return RoundReport(times.clients, times.fair_s, times.current_s, times.unserved, times.last_s)


def wait_report(turns: Sequence[ClientTurns], lately: tuple[float, float], fair: float | None) -> WaitReport:
    """Report the longest waits of all clients.

    `lately`: the result of `Turns.longest_waits`; `fair`: seconds of a fair round, None while it is not known.
    """
    waiting = [each for each in turns if each.unserved_s is not None]

    def in_rounds(seconds: float) -> float | None:
        return None if fair is None else seconds / fair

    return WaitReport(
        max((each.wait_s for each in waiting), default=0.0),
        in_rounds(max((each.wait_even for each in waiting), default=0.0)),
        lately[0],
        in_rounds(lately[1]),
        max((each.unserved_s or 0.0 for each in waiting), default=0.0),
        in_rounds(max((each.unserved_even for each in waiting), default=0.0)),
        None if fair is None else sum(each.unserved_even > fair for each in waiting),
    )
