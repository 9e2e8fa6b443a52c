"""Virtual time: what is to happen, in order."""

import heapq
from collections.abc import Callable
from enum import IntEnum
from itertools import count
from math import inf

Action = Callable[[], object]


class Rank(IntEnum):
    """What goes first of what happens at the same instant.

    Not the order in which things were put on the agenda: of two that fall together, which was put there first may
    depend on whether steps were taken one by one.
    """

    DELIVERY = 0
    """What an engine put out reaches the router."""
    EVENT = 1
    STEP = 2
    """An engine begins a step; it sees all that was submitted up to this instant."""


class Agenda:
    """A clock that jumps from one appointment to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._appointments: list[tuple[float, Rank, int, int, Action]] = []
        self._serial = count()

    def at(self, time: float, action: Action, rank: Rank = Rank.EVENT, place: int = 0) -> None:
        """Do this at that time, or now if that is past; `place` orders what has the same time and rank."""
        heapq.heappush(self._appointments, (max(time, self.now), rank, place, next(self._serial), action))

    def run(self, until: float = inf, going: Callable[[], bool] = lambda: True) -> None:
        """Do what is due before `until`, as long as it is `going`; then it is `until`, if it went so far."""
        appointments = self._appointments
        while going():
            if not appointments or appointments[0][0] >= until:
                self.now = max(self.now, until) if until < inf else self.now
                return
            time, _, _, _, action = heapq.heappop(appointments)
            self.now = time
            action()
