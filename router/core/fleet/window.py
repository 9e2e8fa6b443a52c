"""How much may be in flight at a worker: as little as keeps its engine busy.

What the engine has not started waits in the engine's own queue, where our order no longer counts; so the window bounds
it, and the rest waits here.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Protocol, Self

from router.core.fleet.engine_limits import EngineReport, KvLimit, RequestLimit, TokenLimit, UnstartedLimit
from router.core.fleet.service_rate import Turnover
from router.core.model.load import Limits, Load


class Window(Protocol):
    """Says whether one more request may go to a worker, and hears what becomes of those that went."""

    def fresh(self) -> "Window":
        """One like this for another worker, that has learned nothing."""

    @property
    def kv_limit(self) -> float:
        """Tokens up to which any bound of `Load.kv_peak` is as good as the peak."""

    @property
    def low_tokens(self) -> float:
        """Tokens: with no more than this ahead, the next request may go, however large it is."""

    @property
    def limits(self) -> Limits | None:
        """The limits of now; None without any."""

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """Whether a request with that much uncached input may go now."""

    def full(self, load: Load) -> bool:
        """Whether one more may find no place in the engine's batch, and wait there for more than prefill."""

    def set_kv_capacity(self, kv_tokens: int) -> None:
        """The engine said how much its KV cache holds."""

    def on_start(self, turnover: Turnover) -> None:
        """A request started; this is what starts in a step."""

    def on_report(self, load: Load, report: EngineReport) -> None:
        """The engine reported; this is in flight."""

    def on_empty_report(self) -> None:
        """The engine answered, and told nothing of what it has to do."""

    def on_overload(self, load: Load) -> None:
        """The engine had no room for one more; this is in flight without it."""


class _StaticWindow:
    """What the windows that learn nothing have in common: one serves for all workers."""

    kv_limit = inf
    low_tokens = inf

    def fresh(self) -> Self:
        """See `Window`."""
        return self

    def full(self, load: Load) -> bool:  # noqa: ARG002 - the protocol's signature
        """See `Window`."""
        return False

    def set_kv_capacity(self, kv_tokens: int) -> None:
        """See `Window`."""

    def on_start(self, turnover: Turnover) -> None:
        """See `Window`."""

    def on_report(self, load: Load, report: EngineReport) -> None:
        """See `Window`."""

    def on_empty_report(self) -> None:
        """See `Window`."""

    def on_overload(self, load: Load) -> None:
        """See `Window`."""


@dataclass(frozen=True)
class FixedWindow(_StaticWindow):
    """A fixed limit of requests, and of unstarted uncached tokens."""

    requests: int = 256
    unstarted_tokens: int = 16_384

    @property
    def limits(self) -> Limits:
        """See `Window`."""
        return Limits(self.requests, self.unstarted_tokens)

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """See `Window`. Where nothing waits to start, even a request beyond the limit goes: it could go no better."""
        if load.requests >= self.requests:
            return False
        return not load.unstarted or load.unstarted_tokens + uncached_tokens <= self.unstarted_tokens


@dataclass(frozen=True)
class NoWindow(_StaticWindow):
    """Everything goes at once: the engine's own queue and order rule."""

    @property
    def limits(self) -> None:
        """See `Window`."""

    def admits(self, load: Load, uncached_tokens: int) -> bool:  # noqa: ARG002 - the protocol's signature
        """See `Window`."""
        return True


@dataclass(eq=False, slots=True)
class LearnedWindow:
    """Learns what an engine can take, from the stream of its answers and from what it reports.

    Three limits, each of which keeps out of the engine's queue what would only wait there:

    - unstarted tokens: as many as the engine starts in a few of its steps. A prompt that is being computed counts with
      what is left of it, and when little is left the next one goes, however large it is;
    - requests: as many as the engine ran when it said that others waited, and those that it starts in about a step, so
      that one is there whenever a place falls free;
    - KV tokens: the requests in flight will hold, when they hold most, what the engine's cache was told to hold, or was
      found to hold when it threw requests out.

    The first needs nothing but the streams. Without reports, the other two limit nothing until the engine turns a
    request away or tells its capacity; so the unstarted requests are limited by their number too, to what the engine
    starts in a few of its steps. That holds back no whole answers, whose start is only guessed.
    """

    requests: int = 1024
    unstarted_tokens: int = 16_384
    """The most that it will ever allow, of either."""
    _tokens: TokenLimit = field(init=False)
    _places: RequestLimit = field(init=False)
    _kv: KvLimit = field(init=False)
    _starts: UnstartedLimit = field(init=False)
    _limits: Limits = field(default=Limits(0, 0), init=False)
    _reports: bool = field(default=True, init=False)
    """Whether the engine tells what it has to do; until it was asked, it is taken to."""
    _typical_tokens: float = field(default=1.0, init=False)
    """Uncached input of one request, of late."""

    def __post_init__(self) -> None:
        self._tokens = TokenLimit(self.unstarted_tokens)
        self._places = RequestLimit()
        self._kv = KvLimit()
        self._starts = UnstartedLimit()

    def fresh(self) -> "LearnedWindow":
        """See `Window`."""
        return LearnedWindow(self.requests, self.unstarted_tokens)

    @property
    def kv_limit(self) -> float:
        """See `Window`."""
        return self._kv.limit

    @property
    def low_tokens(self) -> float:
        """See `Window`."""
        return self._tokens.low

    @property
    def limits(self) -> Limits:
        """See `Window`. A few requests more go where none of those in flight waits in the engine.

        While they are the same, they are one object: each of the last requests is remembered with its own.
        """
        requests, tokens = int(min(self.requests, self._places.limit)), self._tokens.limit
        if requests != self._limits.requests or tokens != self._limits.unstarted_tokens:
            self._limits = Limits(requests, tokens)
        return self._limits

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """See `Window`.

        One request may wait in the engine for room in its cache, and a few for a place in its batch: an engine takes up
        what is there sooner than what has to be sent.
        """
        if load.requests >= self.requests or not self._places.admit(load.requests, load.unstarted, load.guessed):
            return False
        if not self._reports and load.unstarted >= self._starts.limit:
            return False
        if load.unstarted == 0:
            return load.kv_peak <= self._kv.limit or load.requests == 0
        if load.kv_peak + uncached_tokens > self._kv.limit:
            return False
        return load.ahead_tokens + uncached_tokens <= self._tokens.limit or load.ahead_tokens <= self._tokens.low

    def full(self, load: Load) -> bool:
        """See `Window`."""
        return load.requests >= self._places.places or load.kv_peak + self._typical_tokens > self._kv.limit

    def set_kv_capacity(self, kv_tokens: int) -> None:
        """See `Window`."""
        self._kv.set_capacity(kv_tokens)

    def on_start(self, turnover: Turnover) -> None:
        """See `Window`."""
        self._tokens.learn(turnover)
        self._places.learn(turnover)
        self._starts.learn(turnover)
        if turnover.tokens > 0.0:
            self._typical_tokens = turnover.tokens / turnover.requests

    def on_report(self, load: Load, report: EngineReport) -> None:
        """See `Window`."""
        self._reports = True
        self._places.on_report(report)
        self._kv.on_report(report, held_back=load.kv_peak + self._typical_tokens > self._kv.limit)

    def on_empty_report(self) -> None:
        """See `Window`."""
        self._reports = False

    def on_overload(self, load: Load) -> None:
        """See `Window`."""
        self._places.on_overload(load.requests)
