"""How much may be in flight at a worker: as little as keeps its engine busy.

What the engine has not started waits in the engine's own queue, where the router's order no longer applies. The window
bounds that queue, and all other requests wait in the router.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Protocol, Self

from router.core.fleet.engine_limits import EngineReport, KvLimit, RequestLimit, TokenLimit, UnstartedLimit
from router.core.fleet.service_rate import Turnover
from router.core.model.load import Limits, Load


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
        """Current limits; None if there are none."""

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """Return whether a request with this many uncached input tokens may go now."""

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

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """Return whether a request fits both limits.

        If nothing waits to start, a request beyond the token limit goes, too: it would never find a better time.
        """
        if load.requests >= self.requests:
            return False
        return not load.unstarted or load.unstarted_tokens + uncached_tokens <= self.unstarted_tokens


@dataclass(frozen=True)
class NoWindow(_StaticWindow):
    """Sends every request at once, so that the engine's own queue and order apply."""

    @property
    def limits(self) -> None: ...

    def admits(self, load: Load, uncached_tokens: int) -> bool:  # noqa: ARG002 - the protocol's signature
        return True


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
    _limits: Limits = field(default=Limits(0, 0), init=False)
    _reports: bool = field(default=True, init=False)
    """Whether the engine reports its load; assumed until it was polled."""
    _typical_tokens: float = field(default=1.0, init=False)
    """Recent mean of the uncached input of one request."""

    def __post_init__(self) -> None:
        self._tokens = TokenLimit(self.unstarted_tokens)
        self._places = RequestLimit()
        self._kv = KvLimit()
        self._starts = UnstartedLimit()

    def fresh(self) -> "LearnedWindow":
        return LearnedWindow(self.requests, self.unstarted_tokens)

    @property
    def kv_limit(self) -> float:
        return self._kv.limit

    @property
    def low_tokens(self) -> float:
        return self._tokens.low

    @property
    def limits(self) -> Limits:
        """Current limits. A few more requests may go if none of those in flight waits in the engine.

        Equal limits are returned as the same object, because each remembered request keeps a reference to its own.
        """
        requests, tokens = int(min(self.requests, self._places.limit)), self._tokens.limit
        if requests != self._limits.requests or tokens != self._limits.unstarted_tokens:
            self._limits = Limits(requests, tokens)
        return self._limits

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """Return whether a request fits all limits.

        One request may wait in the engine for room in its cache, and a few for a place in its batch: an engine takes up
        waiting requests sooner than requests that have yet to be sent.
        """
        requests, places = load.requests, self._places
        if requests >= self.requests:
            return False
        if requests >= places.limit and not places.admits_more(load.unstarted, load.guessed):
            return False
        if not self._reports and load.unstarted >= self._starts.limit:
            return False
        if load.unstarted == 0:
            return load.kv_peak <= self._kv.limit or requests == 0
        if load.kv_peak + uncached_tokens > self._kv.limit:
            return False
        return load.ahead_tokens + uncached_tokens <= self._tokens.limit or load.ahead_tokens <= self._tokens.low

    def full(self, load: Load) -> bool:
        return load.requests >= self._places.places or load.kv_peak + self._typical_tokens > self._kv.limit

    def set_kv_capacity(self, kv_tokens: int) -> None:
        self._kv.set_capacity(kv_tokens)

    def on_start(self, turnover: Turnover) -> None:
        self._tokens.learn(turnover)
        self._places.learn(turnover)
        self._starts.learn(turnover)
        if turnover.tokens > 0.0:
            self._typical_tokens = turnover.tokens / turnover.requests

    def on_report(self, load: Load, report: EngineReport) -> None:
        self._reports = True
        self._places.on_report(report)
        self._kv.on_report(report, held_back=load.kv_peak + self._typical_tokens > self._kv.limit)

    def on_empty_report(self) -> None:
        self._reports = False

    def on_overload(self, load: Load) -> None:
        self._places.on_overload(load.requests)
