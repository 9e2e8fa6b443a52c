"""How evenly the greedy clients are served, window by window, as measured by the clients. Pure."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final, NamedTuple

WINDOW: Final = 5.0
"""Seconds over which service is compared."""


class Sample(NamedTuple):
    """The service of the clients at one moment, in seconds since they began."""

    at: float
    service: Mapping[str, float]
    waiting: Mapping[str, int]


class Window(NamedTuple):
    """Jain's index of the service of those clients that waited during the whole window, which ends here."""

    end: float
    jain: float
    clients: int


def jain_index(shares: list[float]) -> float:
    """Return Jain's index: 1 if all are equal, 1/n if one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def windows(samples: list[Sample], since: float, seconds: float = WINDOW) -> list[Window]:
    """Return the windows from `since` on in which some client waited, one ending at each sample."""
    found = []
    times = [sample.at for sample in samples]
    for last, sample in enumerate(samples):
        first = bisect_right(times, sample.at - seconds) - 1
        if first < 0 or times[first] < since:
            continue
        between = samples[first : last + 1]
        backlogged = [name for name in sample.service if all(each.waiting[name] for each in between)]
        shares = [sample.service[name] - samples[first].service[name] for name in backlogged]
        if len(shares) > 1:
            found.append(Window(sample.at, jain_index(shares), len(shares)))
    return found


def recovered(found: list[Window], least: float) -> float | None:
    """Return when the index reached this for the first time, or None."""
    return next((window.end for window in found if window.jain >= least), None)
