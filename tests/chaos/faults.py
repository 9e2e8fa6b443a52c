"""The schedule of faults: what fails, when and where, as a function of its seed. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from random import Random
from typing import Final


class Kind(StrEnum):
    """The kind of a fault."""

    KILL = "kill -9"
    """The worker's process is killed, and another one is started on its port."""
    LEAVE = "leaves"
    """The worker gets SIGTERM, exits at once, and comes back."""
    DRAIN = "drained"
    """The operator drains the worker and resumes it; no call fails."""
    HANG = "hangs"
    """The worker's process is stopped: the kernel accepts connections, and nothing answers."""
    SLOW = "slow"
    """Each block of the worker's answers is delayed."""
    RESET = "reset"
    """Streams are cut with RST after a few blocks."""
    GARBAGE = "garbage"
    """The worker sends invalid data, from the first byte on or amid a stream."""
    ERRORS = "5xx"
    """The worker refuses every call with a status of 500 or above."""
    BLIND = "no metrics"
    """The worker's metrics are missing; it still serves calls."""


HARMLESS: Final = frozenset({Kind.DRAIN, Kind.SLOW, Kind.BLIND})
"""Faults that make no call fail."""
AWAY: Final = frozenset({Kind.KILL, Kind.LEAVE, Kind.DRAIN, Kind.HANG, Kind.ERRORS, Kind.GARBAGE})
"""Faults during which a worker does no work; some workers are always without such a fault."""
SHARES: Final = dict.fromkeys(Kind, 1) | {Kind.KILL: 3, Kind.RESET: 2, Kind.HANG: 2}
"""Relative frequency of each kind."""
SHORTEST, LONGEST = 1.0, 4.0
"""Seconds that a fault lasts; a hang has its own duration."""
PAUSE: Final = 0.5
"""Least seconds between two faults of one worker."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at one worker; times are in seconds since the clients began."""

    at: float
    until: float
    worker: int
    kind: Kind


def schedule(seed: int, seconds: float, workers: int, every: float, hang: float) -> tuple[Fault, ...]:
    """Return faults that end within `seconds`, one in `every` seconds on average; equal arguments give equal faults.

    `hang`: seconds that a worker is stopped, which must exceed the router's timeouts. Each kind comes once before any
    comes again, if time allows, and at most half of the workers are away at once.
    """
    random = Random(seed)
    kinds = _kinds(random)
    faults: list[Fault] = []
    now, kind = 0.0, next(kinds)
    while (now := now + random.expovariate(1 / every)) < seconds - SHORTEST:
        free = [worker for worker in range(workers) if _is_free(faults, worker, now)]
        away = sum(fault.kind in AWAY for fault in faults if fault.until > now)
        if not free or (kind in AWAY and away >= workers // 2):
            continue
        lasts = hang if kind is Kind.HANG else random.uniform(SHORTEST, LONGEST)
        faults.append(Fault(now, min(seconds, now + lasts), random.choice(free), kind))
        kind = next(kinds)
    return tuple(faults)


def last_end(faults: Sequence[Fault]) -> float:
    """Return when the last fault ends, in seconds since the clients began."""
    return max((fault.until for fault in faults), default=0.0)


def _kinds(random: Random) -> Iterator[Kind]:
    """Yield every kind once, then each in proportion to its share."""
    yield from random.sample(list(Kind), len(Kind))
    for _ in count():
        yield random.choices(list(SHARES), list(SHARES.values()))[0]


def _is_free(faults: Sequence[Fault], worker: int, now: float) -> bool:
    return all(fault.until + PAUSE <= now for fault in faults if fault.worker == worker)
