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
    """The worker's process is killed, and another is started on its port."""
    LEAVE = "leaves"
    """The worker is asked to end, does so at once, and comes back."""
    DRAIN = "drained"
    """The operator takes it out and puts it back; nothing of it fails."""
    HANG = "hangs"
    """Its process stands still: connections are taken by the kernel, and nobody answers."""
    SLOW = "slow"
    """Each block of its answers is late."""
    RESET = "reset"
    """Streams are cut with RST after a few blocks."""
    GARBAGE = "garbage"
    """It answers with what is no answer, from the first byte on or amid a stream."""
    ERRORS = "5xx"
    """It refuses every call with a status of 500 or above."""
    BLIND = "no metrics"
    """Its metrics are gone; it serves on."""


HARMLESS: Final = frozenset({Kind.DRAIN, Kind.SLOW, Kind.BLIND})
"""By these no call fails."""
AWAY: Final = frozenset({Kind.KILL, Kind.LEAVE, Kind.DRAIN, Kind.HANG, Kind.ERRORS, Kind.GARBAGE})
"""During these a worker does no work: there are always some that do."""
SHARES: Final = dict.fromkeys(Kind, 1) | {Kind.KILL: 3, Kind.RESET: 2, Kind.HANG: 2}
"""How often each kind comes, in proportion."""
SHORTEST, LONGEST = 1.0, 4.0
"""Seconds that a fault lasts; a hang has a length of its own."""
PAUSE: Final = 0.5
"""Seconds, at least, that a worker has for itself between two faults."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong at one worker; times are seconds since the clients began."""

    at: float
    until: float
    worker: int
    kind: Kind


def schedule(seed: int, seconds: float, workers: int, every: float, hang: float) -> tuple[Fault, ...]:
    """Faults that end within `seconds`, one in `every` seconds on average; equal for equal arguments.

    `hang`: seconds that a worker stands still, to be longer than the router waits for it.

    Each kind comes once before any comes again, where the time allows; at most half of the workers are away at once.
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
