"""What an operator sees of rounds and waits: whether every client with a call open has its turn, and how soon."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from router.core.clients.turns import ClientTurns, RoundTimes


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Rounds in which each active client has a turn; see `router.core.clients.turns`."""

    clients: int
    """That have a call open."""
    fair_s: float | None
    """In which each of them could be served one call of mean cost; None before that is known."""
    current_s: float
    """How long the round lasts that is under way."""
    unserved: int
    """Clients that were served nothing in it yet."""
    last_s: float | None
    """How long the one before took; None before one was over."""


@dataclass(frozen=True, slots=True)
class WaitReport:
    """Waits for first tokens and for any service, in seconds and in fair rounds; None while these are not known."""

    waiting_s: float
    """The longest of the calls that wait now."""
    waiting_rounds: float | None
    lately_s: float
    """The longest of those that waited no more in the last minute, answered or given up."""
    lately_rounds: float | None
    unserved_s: float
    """For how long the client with the longest such time has been served nothing while a call of its waited."""
    unserved_rounds: float | None
    unserved_clients: int | None
    """Those of which that is longer than a fair round."""


NO_ROUND: Final = RoundReport(0, None, 0.0, 0, None)
NO_WAIT: Final = WaitReport(0.0, None, 0.0, None, 0.0, None, None)


def round_report(times: RoundTimes) -> RoundReport:
    """As an operator reads it."""
    return RoundReport(times.clients, times.fair_s, times.current_s, times.left, times.last_s)


def wait_report(felt: Sequence[ClientTurns], lately: tuple[float, float], fair: float | None) -> WaitReport:
    """Of what each client feels. `lately`: see `Turns.longest_waits`; `fair`: how long a fair round takes."""
    waiting = [each for each in felt if each.unserved_s is not None]

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
