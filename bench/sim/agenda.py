"""Virtual time: a queue of actions ordered by time."""

import heapq
from collections.abc import Callable
from enum import IntEnum
from itertools import count
from math import inf

Action = Callable[[], object]


class Rank(IntEnum):
    """The order of actions at the same instant.

    Insertion order would not do: which of two simultaneous actions was scheduled first may depend on whether the
    engine's steps were taken one by one or in one jump.
    """

    DELIVERY = 0
    """The output of an engine reaches the router."""
    EVENT = 1
    STEP = 2
    """An engine begins a step, with all that was submitted up to this instant."""


class Agenda:
    """A clock that jumps from one scheduled action to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._appointments: list[tuple[float, Rank, int, int, Action]] = []
        self._serial = count()

    def at(self, time: float, action: Action, rank: Rank = Rank.EVENT, place: int = 0) -> None:
        """Schedule `action` for `time`, or for now if that is past. `place` orders actions of equal time and rank."""
        heapq.heappush(self._appointments, (max(time, self.now), rank, place, next(self._serial), action))

    def run(self, until: float = inf, going: Callable[[], bool] = lambda: True) -> None:
        """Run the actions before `until` while `going()` is true. If all have run, the time is `until` afterwards."""
        appointments = self._appointments
        while going():
            if not appointments or appointments[0][0] >= until:
                self.now = max(self.now, until) if until < inf else self.now
                return
            time, _, _, _, action = heapq.heappop(appointments)
            self.now = time
            action()
