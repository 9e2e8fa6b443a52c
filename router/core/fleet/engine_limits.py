"""What a learned window finds out of an engine: how much it starts in a step, how many it runs, how much it can hold.

Each limit is infinite, or the least that is sensible, until something shows that it should not be.
"""

from math import inf
from typing import NamedTuple

from router.core.fleet.service_rate import Turnover

FEWEST_TOKENS = 4096
"""Unstarted tokens that are let through in any case: two steps of vLLM by default, half a step of SGLang."""
TOKEN_STEPS = 2.5
"""Steps whose tokens may be unstarted: of the one that is computed, of the next, and of half a step more, so that a
limit that is too low grows."""
BURST_STEPS = 2
"""Likewise, where a single step was seen to start much more than the average one."""
PEAK_DECAY = 0.999
"""What is left of the most that a step was seen to start, with each start."""
FEWEST_REQUESTS = 16
"""Unstarted requests that are let through in any case to an engine that tells no metrics."""
REQUEST_STEPS = 4
"""Steps whose requests may be unstarted there: how many start differs more from step to step than their tokens do."""
LEAST_REACH, MOST_REACH = 1.5, 20.0
"""Steps whose requests may wait for a place; more where they take long to get there."""
REACH_GROWTH, REACH_DECAY = 1.25, 0.97
FALL = 0.25
"""How much of the way down to a lower number of running requests is gone with each report."""
LEAST_GROWTH, MOST_GROWTH, ACCELERATION = 0.001, 0.05, 1.035
"""By which share a limit of KV tokens that holds requests back grows with each report, and how that itself grows."""
NEAR = 0.9
"""Share of the limit of KV tokens that must have been held, before it may be too low."""


class EngineReport(NamedTuple):
    """An engine's own word on what it has to do, beside what is known here at that moment."""

    running: int
    waiting: int
    requests: int
    """In flight to it from here."""
    unstarted: int
    new: int
    """Of the unstarted, those sent so lately that the engine may not have looked at them: a step ago at most."""
    guessed: int
    """Whole answers whose start is guessed."""
    kv_tokens: int
    """Held by what started."""
    most_kv_tokens: int
    """The highest that this was since the report before."""
    places: int | None = None
    """The most requests that it runs at a time, where it tells."""


class TokenLimit:
    """Unstarted tokens."""

    __slots__ = ("_average", "_burst", "_most", "limit", "low")

    def __init__(self, most: int) -> None:
        self._most = most
        self._average = self._burst = 0.0
        self._set()

    def learn(self, turnover: Turnover) -> None:
        """A request started. What matters is the most that was ever seen: an engine with little to do starts less."""
        self._average = max(self._average * PEAK_DECAY, turnover.tokens)
        self._burst = max(self._burst * PEAK_DECAY, turnover.burst_tokens)
        self._set()

    def _set(self) -> None:
        wanted = max(FEWEST_TOKENS, TOKEN_STEPS * self._average, BURST_STEPS * self._burst)
        self.limit = int(min(self._most, wanted))
        self.low = self.limit / 2


class UnstartedLimit:
    """Unstarted requests of an engine that tells no metrics.

    It does not say that requests wait in it for a place, and where prompts are short, tokens alone are no bound.
    """

    __slots__ = ("_average",)

    def __init__(self) -> None:
        self._average = 0.0

    def learn(self, turnover: Turnover) -> None:
        """A request started; see `TokenLimit.learn`."""
        self._average = max(self._average * PEAK_DECAY, turnover.requests)

    @property
    def limit(self) -> int:
        return max(FEWEST_REQUESTS, int(REQUEST_STEPS * self._average))


class RequestLimit:
    """Requests in flight: those that the engine runs, and a few that wait for a place."""

    __slots__ = ("_foreign_waiting", "_guessed", "_reach", "_spare", "_turnover", "limit", "places")

    def __init__(self) -> None:
        self.places = inf
        """How many of this router's requests the engine runs at a time; infinite while none was said to wait."""
        self.limit = inf
        self._spare = 1
        self._reach = LEAST_REACH
        self._turnover = 0.0
        self._foreign_waiting = 0
        self._guessed = 0

    def admit(self, requests: int, unstarted: int, guessed: int) -> bool:
        """Whether one more may go. Beyond the limit one may while fewer wait than are to, so that a limit that is too
        low grows; what is only guessed to have started since the last report is taken to wait.
        """
        if requests < self.limit:
            return True
        return unstarted + max(0, guessed - self._guessed) + self._foreign_waiting < self._spare

    def learn(self, turnover: Turnover) -> None:
        """A request started."""
        self._turnover = turnover.requests
        self._set()

    def on_report(self, report: EngineReport) -> None:
        """Where some wait, this router has its share of the places. Where none does, there may be more than was known.

        Waiting ones that are not known here are another router's, or were thrown out, or were guessed to have started.
        Those that wait for the next step to begin show neither.
        """
        self._foreign_waiting = max(0, report.waiting - report.unstarted)
        self._guessed = report.guessed
        if report.waiting > report.new and report.running:
            share = report.requests * report.running / (report.running + report.waiting)
            if self.places < inf and share < self.places:
                self.places += FALL * (share - self.places)
            else:
                self.places = share
            self._reach = max(LEAST_REACH, self._reach * REACH_DECAY)
        elif not report.running and not report.requests:
            self.places = inf
        elif not report.waiting and report.requests >= self.limit:
            if report.running < self.places:
                self._reach = min(MOST_REACH, self._reach * REACH_GROWTH)
            self.places = max(self.places, min(report.running, report.requests)) + 1.0
        if report.places is not None:
            # SGLang's reports come with its prefills, and then count none of what was prefilled as running: they may
            # never show how many run.
            self.places = min(self.places, report.places)
        self._set()

    def on_overload(self, requests: int) -> None:
        """The engine had no room for one more than these: nothing is spare. Its reports show when there is more."""
        self.places = min(self.places, max(1.0, float(requests - self._spare)))
        self._reach = LEAST_REACH
        self._set()

    def _set(self) -> None:
        self._spare = 1 + int(self._reach * self._turnover)
        self.limit = self.places + self._spare


class KvLimit:
    """Tokens that the requests in flight may come to hold."""

    __slots__ = ("_capacity_known", "_growth", "_last_preempted", "_preempted", "limit")

    def __init__(self) -> None:
        self.limit = inf
        self._capacity_known = False
        self._growth = LEAST_GROWTH
        self._last_preempted = 0
        self._preempted = 0

    def set_capacity(self, tokens: int) -> None:
        """The engine said how much its cache holds: nothing is left to find."""
        self.limit = tokens
        self._capacity_known = True

    def on_report(self, report: EngineReport, *, held_back: bool) -> None:
        """Find the limit: what was held when started requests came to wait again, for two reports in a row since one
        alone may be older than what is known here. It grows while it is met and nothing is thrown out.

        `held_back`: whether a request is likely to wait here for the limit's sake.
        """
        if self._capacity_known:
            return
        before, self._preempted = self._preempted, self._lasting_preempted(report)
        started = max(1, report.requests - report.unstarted)
        held = report.most_kv_tokens * (1 - min(before, started) / started)
        if self._preempted > before and held > 0:
            self.limit = min(self.limit, held)
            self._growth = LEAST_GROWTH
        elif self.limit < inf:
            if not report.waiting:
                self.limit = max(self.limit, report.kv_tokens)
            if held_back and report.most_kv_tokens >= NEAR * self.limit:
                self._growth = min(MOST_GROWTH, self._growth * ACCELERATION)
                self.limit *= 1 + self._growth

    def _lasting_preempted(self, report: EngineReport) -> int:
        """Started requests that waited at this report and at the one before; none where others' may be among them."""
        ours = report.running + report.waiting <= report.requests + 1
        preempted = max(0, report.waiting - report.unstarted - report.guessed) if ours else 0
        before, self._last_preempted = self._last_preempted, preempted
        return min(before, preempted)
