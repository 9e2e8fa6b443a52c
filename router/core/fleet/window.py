"""How much may be in flight at a worker: as little as keeps its engine busy.

What the engine has not started waits in the engine's own queue, where the router's order no longer applies. The window
bounds that queue, and all other requests wait in the router.

A learned window finds out how much the engine starts in a step, how many requests it runs, and how many tokens it can
hold. Each of its limits is infinite, or the smallest sensible value, until observations move it.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple, Protocol, Self

from router.core.fleet.service_rate import Turnover
from router.core.model.load import Limits, Load

FEWEST_TOKENS: Final = 4096
"""Unstarted tokens that are always admitted: two steps of vLLM by default, half a step of SGLang."""
TOKEN_STEPS: Final = 2.5
"""Steps whose tokens may be unstarted: the step being computed, the next one, and half a step more, so that a limit
that is too low grows.
"""
BURST_STEPS: Final = 2
"""The same if a single step was seen to start many more tokens than the average step."""
PEAK_DECAY: Final = 0.999
"""Factor by which the most that a step was seen to start decays with each start."""
FEWEST_REQUESTS: Final = 16
"""Unstarted requests that are always admitted to an engine that reports no metrics."""
REQUEST_STEPS: Final = 4
"""Steps whose requests may be unstarted at such an engine: requests per step vary more than tokens per step."""
LEAST_REACH: Final = 1.5
"""Steps whose requests may wait for a place in the batch; more if they take long to get one."""
MOST_REACH: Final = 20.0
"""The most such steps."""
REACH_GROWTH: Final = 1.25
"""Factor on these steps after a report of a batch with free places, although the limit holds requests back."""
REACH_DECAY: Final = 0.97
"""Factor on these steps after a report of requests that wait in the engine."""
FALL: Final = 0.25
"""Share of the way down to a lower number of running requests that each report takes."""
LEAST_GROWTH: Final = 0.001
"""Relative growth, per report, of a limit of KV tokens that holds requests back."""
MOST_GROWTH: Final = 0.05
"""The largest such growth."""
ACCELERATION: Final = 1.035
"""Factor on this growth with each report."""
NEAR: Final = 0.9
"""Share of the limit of KV tokens that must have been in use before the limit may be too low."""


class EngineReport(NamedTuple):
    """An engine's own report of its load, beside what the router knows at that moment."""

    running: int
    waiting: int
    requests: int
    """Requests in flight from this router."""
    unstarted: int
    new: int
    """Of the unstarted, those sent within the last step, which the engine may not have seen yet."""
    guessed: int
    """Requests without streaming that are guessed to have started."""
    kv_tokens: int
    """KV tokens held by started requests."""
    most_kv_tokens: int
    """The highest value of `kv_tokens` since the previous report."""
    places: int | None = None
    """The most requests that the engine runs at a time; None if it does not report that."""


class TokenLimit:
    """Limit of unstarted tokens."""

    __slots__ = ("_average", "_burst", "_most", "limit", "low")

    def __init__(self, most: int) -> None:
        self._most = most
        self._average = self._burst = 0.0
        self._set()

    def learn(self, turnover: Turnover) -> None:
        """Update the limit after a start. Only the most ever seen counts, since an engine with little to do starts
        less.
        """
        self._average = max(self._average * PEAK_DECAY, turnover.tokens)
        self._burst = max(self._burst * PEAK_DECAY, turnover.burst_tokens)
        self._set()

    def _set(self) -> None:
        wanted = max(FEWEST_TOKENS, TOKEN_STEPS * self._average, BURST_STEPS * self._burst)
        self.limit = int(min(self._most, wanted))
        self.low = self.limit / 2


class UnstartedLimit:
    """Limit of unstarted requests at an engine that reports no metrics.

    Such an engine does not show that requests wait in it for a place, and with short prompts tokens alone are no bound.
    """

    __slots__ = ("_average",)

    def __init__(self) -> None:
        self._average = 0.0

    def learn(self, turnover: Turnover) -> None:
        """Update the limit after a start, as in `TokenLimit.learn`."""
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

    def admits_more(self, unstarted: int, guessed: int) -> bool:
        """Return whether a request may go beyond the limit: while fewer wait than should, so that a limit that is too
        low grows. Requests only guessed to have started since the last report count as waiting.
        """
        return unstarted + max(0, guessed - self._guessed) + self._foreign_waiting < self._spare

    def learn(self, turnover: Turnover) -> None:
        """Update the spare requests after a start."""
        self._turnover = turnover.requests
        self._set()

    def on_report(self, report: EngineReport) -> None:
        """Update the number of places by an engine's report.

        If requests wait in the engine, this router has its share of the places. If none waits, there may be more places
        than known. Waiting requests unknown here belong to another router, were preempted, or were wrongly guessed to
        have started. Requests that wait only for the next step to begin show neither.
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
            # SGLang reports at its prefills, and does not count prefilled requests as running then, so its reports may
            # never show how many run.
            self.places = min(self.places, report.places)
        self._set()

    def on_overload(self, requests: int) -> None:
        """Lower the limit: the engine refused a request while it had `requests` in flight. Later reports raise the
        limit again.
        """
        self.places = min(self.places, max(1.0, float(requests - self._spare)))
        self._reach = LEAST_REACH
        self._set()

    def _set(self) -> None:
        self._spare = 1 + int(self._reach * self._turnover)
        self.limit = self.places + self._spare


class KvLimit:
    """Limit of KV tokens that the requests in flight may come to hold."""

    __slots__ = ("_capacity_known", "_growth", "_last_preempted", "_preempted", "limit")

    def __init__(self) -> None:
        self.limit = inf
        self._capacity_known = False
        self._growth = LEAST_GROWTH
        self._last_preempted = 0
        self._preempted = 0

    def set_capacity(self, tokens: int) -> None:
        """Set the KV capacity that the engine reported. Nothing is left to learn."""
        self.limit = float(tokens)
        self._capacity_known = True

    def on_report(self, report: EngineReport, *, held_back: bool) -> None:
        """Learn the limit: the tokens held when started requests had to wait again, which means they were preempted.

        Two reports in a row must show it, since a single one may be older than what is known here. The limit grows
        while it is reached and nothing is preempted. `held_back`: whether a request is likely to wait here because of
        the limit.
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
        """Return the started requests that waited at both this report and the previous one; 0 if they may be other
        routers'.
        """
        ours = report.running + report.waiting <= report.requests + 1
        preempted = max(0, report.waiting - report.unstarted - report.guessed) if ours else 0
        before, self._last_preempted = self._last_preempted, preempted
        return min(before, preempted)


class Window(Protocol):
    """Decides whether one more request may go to a worker, and observes what happens to the requests that went."""

    def fresh(self) -> "Window":
        """Return a window with the same settings for another worker, with nothing learned."""

    @property
    def kv_limit(self) -> float:
        """Tokens up to which any upper bound of `Load.kv_peak` may replace the exact peak."""

    @property
    def low_tokens(self) -> float:
        """With at most this many tokens ahead, the next request may go, however large it is."""

    @property
    def limits(self) -> Limits | None:
        """Current limits; None if there are none. The same object while they do not change, because each remembered
        request keeps a reference to its own.
        """

    def room(self, load: Load) -> float:
        """Return the most uncached input tokens with which a request may go now: infinite without a limit, and negative
        if none may go.
        """

    def full(self, load: Load) -> bool:
        """Return whether one more request may find no place in the engine's batch, and so wait there for more than
        prefill.
        """

    def set_kv_capacity(self, kv_tokens: int) -> None:
        """Set the capacity of the engine's KV cache in tokens, as the engine reported it."""

    def on_start(self, turnover: Turnover) -> None:
        """Called when a request started, with what currently starts in one step."""

    def on_report(self, load: Load, report: EngineReport) -> None:
        """Called when the engine reported its load; `load` is in flight."""

    def on_empty_report(self) -> None:
        """Called when the engine answered a poll without reporting its load."""

    def on_overload(self, load: Load) -> None:
        """Called when the engine refused a request for lack of room; `load` is in flight without that request."""


class _StaticWindow:
    """Base of windows that learn nothing: one instance serves all workers."""

    kv_limit = inf
    low_tokens = inf

    def fresh(self) -> Self:
        return self

    def full(self, load: Load) -> bool:  # noqa: ARG002 - the protocol's signature
        return False

    def set_kv_capacity(self, kv_tokens: int) -> None: ...

    def on_start(self, turnover: Turnover) -> None: ...

    def on_report(self, load: Load, report: EngineReport) -> None: ...

    def on_empty_report(self) -> None: ...

    def on_overload(self, load: Load) -> None: ...


@dataclass(frozen=True)
class FixedWindow(_StaticWindow):
    """A fixed limit of requests, and of unstarted uncached tokens."""

    requests: int = 256
    unstarted_tokens: int = 16_384

    @property
    def limits(self) -> Limits:
        return Limits(self.requests, self.unstarted_tokens)

    def room(self, load: Load) -> float:
        """Return what both limits leave.

        If nothing waits to start, a request beyond the token limit goes, too: it would never find a better time.
        """
        if load.requests >= self.requests:
            return -1.0
        return self.unstarted_tokens - load.unstarted_tokens if load.unstarted else inf


@dataclass(frozen=True)
class NoWindow(_StaticWindow):
    """Sends every request at once, so that the engine's own queue and order apply."""

    @property
    def limits(self) -> None: ...

    def room(self, load: Load) -> float:  # noqa: ARG002 - the protocol's signature
        return inf


@dataclass(eq=False, slots=True)
class LearnedWindow:
    """Learns what an engine can take, from its streams and its reports.

    Three limits keep out of the engine's queue what would only wait there:

    - unstarted tokens: as many as the engine starts in a few of its steps. A prompt that is being computed counts with
      the rest of it, and when little is left the next request goes, however large it is;
    - requests: as many as the engine ran when it reported others waiting, plus those that it starts in about one step,
      so that one is ready whenever a place in the batch becomes free;
    - KV tokens: the requests in flight may hold, at their peak, what the engine's cache is known to hold, or what it
      was found to hold when the engine preempted requests.

    The first limit needs only the streams. Without reports, the other two limit nothing until the engine refuses a
    request or reports its capacity; so the number of unstarted requests is limited, too, to what the engine starts in a
    few of its steps. That does not hold back answers without streaming, whose start is only guessed.
    """

    requests: int = 1024
    unstarted_tokens: int = 16_384
    """Upper bounds of the learned limits."""
    _tokens: TokenLimit = field(init=False)
    _places: RequestLimit = field(init=False)
    _kv: KvLimit = field(init=False)
    _starts: UnstartedLimit = field(init=False)
    limits: Limits = field(default=Limits(0, 0), init=False)
    """Current limits. A few more requests may go if none of those in flight waits in the engine."""
    _reports: bool = field(default=True, init=False)
    """Whether the engine reports its load; assumed until it was polled."""
    _typical_tokens: float = field(default=1.0, init=False)
    """Recent mean of the uncached input of one request."""
    kv_limit: float = field(default=inf, init=False)
    low_tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = TokenLimit(self.unstarted_tokens)
        self._places = RequestLimit()
        self._kv = KvLimit()
        self._starts = UnstartedLimit()
        self.low_tokens = self._tokens.low
        self._set_limits()

    def fresh(self) -> "LearnedWindow":
        return LearnedWindow(self.requests, self.unstarted_tokens)

    def _set_limits(self) -> None:
        """Update `limits` after a change of what they are made of."""
        requests, tokens = int(min(self.requests, self._places.limit)), self._tokens.limit
        if requests != self.limits.requests or tokens != self.limits.unstarted_tokens:
            self.limits = Limits(requests, tokens)

    def room(self, load: Load) -> float:
        """Return what all limits leave.

        One request may wait in the engine for room in its cache, and a few for a place in its batch: an engine takes up
        waiting requests sooner than requests that have yet to be sent.
        """
        requests, places = load.requests, self._places
        if requests >= self.requests:
            return -1.0
        if requests >= places.limit and not places.admits_more(load.unstarted, load.guessed):
            return -1.0
        if not self._reports and load.unstarted >= self._starts.limit:
            return -1.0
        kv_room = self.kv_limit - load.kv_peak
        if load.unstarted == 0:
            return inf if kv_room >= 0.0 or requests == 0 else -1.0
        ahead = load.ahead_tokens
        return kv_room if ahead <= self.low_tokens else min(kv_room, self._tokens.limit - ahead)

    def full(self, load: Load) -> bool:
        return load.requests >= self._places.places or load.kv_peak + self._typical_tokens > self.kv_limit

    def set_kv_capacity(self, kv_tokens: int) -> None:
        self._kv.set_capacity(kv_tokens)
        self.kv_limit = self._kv.limit

    def on_start(self, turnover: Turnover) -> None:
        self._tokens.learn(turnover)
        self.low_tokens = self._tokens.low
        self._places.learn(turnover)
        self._starts.learn(turnover)
        self._set_limits()
        if turnover.tokens > 0.0:
            self._typical_tokens = turnover.tokens / turnover.requests

    def on_report(self, load: Load, report: EngineReport) -> None:
        self._reports = True
        self._places.on_report(report)
        self._set_limits()
        self._kv.on_report(report, held_back=load.kv_peak + self._typical_tokens > self.kv_limit)
        self.kv_limit = self._kv.limit

    def on_empty_report(self) -> None:
        self._reports = False

    def on_overload(self, load: Load) -> None:
        self._places.on_overload(load.requests)
        self._set_limits()
