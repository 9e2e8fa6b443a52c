"""Judges a run: whether each call ended in a permitted way, and how many calls survived the faults that they met.
Pure.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .clients import Outcome
from .evidence import Evidence, Harm
from .faults import HARMLESS, Fault, Kind
from .reading import Ending
from .service import Window, recovered

TRIES: Final = 3
"""Workers at which the router tries a request by default."""
CUTTING: Final = frozenset({Kind.KILL, Kind.LEAVE, Kind.RESET})
RESTART: Final = 15.0
"""Seconds that a restarted process may take to listen again."""
SHARE: Final = 0.99
"""Least share of completed streams, of those whose worker failed and that another worker can continue."""
JAIN: Final = 0.95
RECOVERY: Final = 15.0
"""Seconds after the last fault within which Jain's index must reach `JAIN`."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many of a set of calls were completed."""

    completed: int
    of: int

    @property
    def value(self) -> float:
        """The share completed; 1 if the set is empty."""
        return self.completed / self.of if self.of else 1.0

    def __str__(self) -> str:
        """Return the count and the percentage, for printing."""
        return f"{self.completed} of {self.of} ({self.value:.2%})"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on all calls."""

    endings: Counter[Ending]
    errors: Counter[str]
    """By status or code."""
    wrong: tuple[str, ...]
    """Calls that ended in no permitted way."""
    unexplained: tuple[str, ...]
    """Errors of calls that met no fault."""
    errors_amid: tuple[str, ...]
    """The streams of `amid` that were not completed."""
    amid: Share
    """Streams whose worker failed amid them, with tries left."""
    exhausted: Share
    """Streams whose worker failed amid them, as many times as a request is tried."""
    killed: Share
    """The streams of both kinds whose worker was killed or left."""
    before: Share
    """Calls whose worker failed before the first token."""


def judge(outcomes: Sequence[Outcome], evidence: Evidence, faults: Sequence[Fault] = ()) -> Judgement:
    """Compare the outcomes with the faults that the calls, or the connections before any call, have met."""
    harms = {outcome.request: _harms(outcome, evidence) for outcome in outcomes}
    stayed = [outcome for outcome in outcomes if outcome.verdict.ending is not Ending.VANISHED]
    lost = [outcome for outcome in stayed if harms[outcome.request]]
    cut = [each for each in lost if each.ask.continuable and any(harm.begun for harm in harms[each.request])]
    amid = [each for each in cut if len(harms[each.request]) < TRIES]
    ends = (Kind.KILL, Kind.LEAVE)
    killed = [each for each in cut if any(harm.begun and harm.kind in ends for harm in harms[each.request])]
    before = [each for each in lost if not any(harm.begun for harm in harms[each.request])]
    errors = [outcome for outcome in stayed if outcome.verdict.ending is Ending.ERROR]
    return Judgement(
        endings=Counter(outcome.verdict.ending for outcome in outcomes),
        errors=Counter(outcome.verdict.why for outcome in errors),
        wrong=tuple(_line(each, harms[each.request]) for each in stayed if each.verdict.ending is Ending.WRONG),
        unexplained=tuple(
            _line(each, ()) for each in errors if not harms[each.request] and not _unconnected(each, faults)
        ),
        errors_amid=tuple(_line(e, harms[e.request]) for e in amid if e.verdict.ending is Ending.ERROR),
        amid=_share(amid),
        exhausted=_share([each for each in cut if each not in amid]),
        killed=_share(killed),
        before=_share(before),
    )


def objections(judgement: Judgement) -> list[str]:
    """Describe the calls that ended in a way that is not permitted; empty if there are none."""
    found = [f"wrong: {each}" for each in judgement.wrong]
    found += [f"unexplained: {each}" for each in judgement.unexplained]
    if judgement.amid.value < SHARE:
        found.append(f"of the streams that lost their worker, {judgement.amid} were completed")
    return found


def fairness_objections(found: Sequence[Window], over: float) -> list[str]:
    """Explain why service is not even again after the last fault; empty if it is."""
    back = recovered(list(found), JAIN)
    if back is None or back > over + RECOVERY:
        best = max((window.jain for window in found), default=0.0)
        return [f"Jain's index was not above {JAIN} within {RECOVERY:g} s of the last fault; at most {best:.3f}"]
    return []


def _harms(outcome: Outcome, evidence: Evidence) -> tuple[Harm, ...]:
    return tuple(harm for harm in evidence.of(outcome.request) if harm.kind not in HARMLESS)


def _unconnected(outcome: Outcome, faults: Sequence[Fault]) -> bool:
    """Return whether a call failed to connect while faults cut connections: the kernel does that without any record."""
    cut = [fault for fault in faults if fault.kind in CUTTING and fault.at <= outcome.ended]
    return outcome.verdict.why.endswith("worker_unreachable") and any(
        outcome.sent <= fault.until + RESTART for fault in cut
    )


def _share(outcomes: Sequence[Outcome]) -> Share:
    return Share(sum(outcome.verdict.ending is Ending.COMPLETE for outcome in outcomes), len(outcomes))


def _line(outcome: Outcome, harms: Sequence[Harm]) -> str:
    form = f"{outcome.ask.path}{' streamed' if outcome.ask.streamed else ''} x{len(outcome.ask.texts)}"
    befell = ", ".join(f"{harm.kind}{' amid' if harm.begun else ''} at {harm.worker}" for harm in harms) or "nothing"
    times = f"sent {outcome.sent:.2f}, ended {outcome.ended:.2f}"
    return f"{outcome.request} ({form}), {times}, {befell}: {outcome.verdict.why}"
