"""An emulated engine in virtual time: its steps are appointments."""

from collections.abc import Callable, Sequence
from functools import partial

from bench.agenda import Agenda, Rank
from bench.meters import TimeWeighted
from workers.engine import Engine
from workers.model import Output, Request

SHALLOW = 32
"""Waiting requests up to which their uncached tokens are counted at every change."""
DEEP_SECONDS = 0.5
"""How often they are counted when there are more."""

Deliver = Callable[[Sequence[Output]], None]


class EmulatedWorker:
    """Steps one engine for as long as it has work."""

    def __init__(self, engine: Engine, place: int, agenda: Agenda, latency: float, deliver: Deliver) -> None:
        """`place`: its own among all workers. `latency`: from the end of a step to `deliver`, in seconds."""
        self.engine = engine
        self.busy_seconds = 0.0
        self.waiting_requests = TimeWeighted()
        self.waiting_tokens = TimeWeighted()
        self._place = place
        self._agenda = agenda
        self._latency = latency
        self._deliver = deliver
        self._stepping = False
        self._count_due = 0.0

    def submit(self, request: Request) -> None:
        """Hand it to the engine; raises what the engine raises."""
        self.engine.submit(request)
        self._measure()
        if not self._stepping:
            self._stepping = True
            self._agenda.at(self._agenda.now, self._step, Rank.STEP, self._place)

    def abort(self, request: str) -> bool:
        """Let the engine forget it; False if it is not there."""
        known = self.engine.abort(request)
        self._measure()
        return known

    def catch_up(self) -> None:
        """Let the engine have done all that began before now."""

    def _step(self) -> None:
        """Begin the next step, or rest."""
        if not self.engine.has_work:
            self._stepping = False
            return
        elapsed, outputs = self.engine.step()
        self.busy_seconds += elapsed
        self._measure()
        end = self._agenda.now + elapsed
        if outputs:
            self._agenda.at(end + self._latency, partial(self._deliver, outputs), Rank.DELIVERY, self._place)
        self._agenda.at(end, self._step, Rank.STEP, self._place)

    def _measure(self) -> None:
        """Note how much waits in the engine: that changes by submission, abortion and steps that prefill."""
        now, waiting = self._agenda.now, self.engine.waiting
        self.waiting_requests.change(now, waiting)
        if waiting <= SHALLOW or now >= self._count_due:
            self._count_due = now + DEEP_SECONDS
            self.waiting_tokens.change(now, self.engine.waiting_uncached_tokens())
