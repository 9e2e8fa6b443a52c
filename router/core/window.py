"""How much may be in flight at a worker: as little as keeps its engine busy.

What the engine has not started waits in the engine's own queue, where our order no longer counts;
so the window bounds it, and the rest waits here.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

FIRST_TOKENS = 4096
"""Unstarted tokens while nothing is learned: two steps of vLLM's."""
SAME_STEP_SECONDS = 0.002
"""First tokens that come so close together are of one step."""
STEP_MEMORY = 0.999
"""What the largest step weighs after one more request has started ..."""
STARTS_MEMORY = 0.98
"""... and what its number of requests weighs: at the beginning an empty engine starts many at once."""


class Load(NamedTuple):
    """What is in flight at one worker."""

    requests: int
    unstarted: int
    """Streamed requests that wait for their first token."""
    unstarted_tokens: int
    """The uncached input tokens of those."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a window lets be in flight at the moment."""

    requests: int
    unstarted_tokens: int


class Window(Protocol):
    """Says whether one more request may go to a worker."""

    def fresh(self) -> "Window":
        """One like this for another worker, that has learned nothing."""

    def started(self, tokens: int, now: float) -> None:
        """A request with that much uncached input has its first token."""

    def reported(self, load: Load, running: int, waiting: int) -> None:
        """The engine says how many requests it runs, and how many wait inside it."""

    @property
    def limits(self) -> Limits | None:
        """The limits of now; None without any."""

    def has_room(self, load: Load) -> bool:
        """Whether any request could go now, however small."""

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """Whether a request with that much uncached input may go now."""


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """A fixed limit of requests, and of unstarted uncached tokens."""

    requests: int = 256
    unstarted_tokens: int = 16_384

    def fresh(self) -> "FixedWindow":
        """See `Window`. It has no state."""
        return self

    def started(self, tokens: int, now: float) -> None:
        """See `Window`."""

    def reported(self, load: Load, running: int, waiting: int) -> None:
        """See `Window`."""

    @property
    def limits(self) -> Limits:
        """See `Window`."""
        return Limits(self.requests, self.unstarted_tokens)

    def has_room(self, load: Load) -> bool:
        """See `Window`."""
        return load.requests < self.requests and (not load.unstarted or load.unstarted_tokens < self.unstarted_tokens)

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """See `Window`. Where nothing waits to start, even a request beyond the limit goes: it could go no better."""
        if load.requests >= self.requests:
            return False
        return not load.unstarted or load.unstarted_tokens + uncached_tokens <= self.unstarted_tokens


@dataclass(frozen=True, slots=True)
class NoWindow:
    """Everything goes at once: the engine's own queue and order rule."""

    def fresh(self) -> "NoWindow":
        """See `Window`. It has no state."""
        return self

    def started(self, tokens: int, now: float) -> None:
        """See `Window`."""

    def reported(self, load: Load, running: int, waiting: int) -> None:
        """See `Window`."""

    @property
    def limits(self) -> None:
        """See `Window`."""

    def has_room(self, load: Load) -> bool:  # noqa: ARG002 - the protocol's signature
        """See `Window`."""
        return True

    def admits(self, load: Load, uncached_tokens: int) -> bool:  # noqa: ARG002 - the protocol's signature
        """See `Window`."""
        return True


@dataclass(eq=False, slots=True)
class LearnedWindow:
    """Learns what an engine can take from the first tokens of its answers, and from what it reports.

    *Unstarted tokens*: two steps' worth, a step being the most that started at one time; at least two requests, since
    one must wait while another is computed. *Requests*: those that an engine runs while it says that others wait inside
    it is all that it can run; the limit is there, with as many to spare as start in a step, in the place of those that
    end in it. An engine that has none waiting though the limit was reached could run more: then it is raised by one.
    """

    requests: int = 1024
    unstarted_tokens: int = 16_384
    """The most that it will ever allow, of either."""
    _running: float | None = field(default=None, init=False)
    """Requests that the engine can run; None while it never had one waiting."""
    _step: float = field(default=0.0, init=False)
    """Tokens: the most that started at one time, of late."""
    _starts: float = field(default=1.0, init=False)
    """Requests that start at one time, of late the most."""
    _burst: int = field(default=0, init=False)
    _burst_starts: int = field(default=0, init=False)
    _burst_time: float = field(default=float("-inf"), init=False)

    def fresh(self) -> "LearnedWindow":
        """See `Window`."""
        return LearnedWindow(self.requests, self.unstarted_tokens)

    @property
    def limits(self) -> Limits:
        """See `Window`."""
        return Limits(self._requests, self._tokens)

    @property
    def _requests(self) -> int:
        return self.requests if self._running is None else min(self.requests, int(self._running + self._starts))

    @property
    def _tokens(self) -> int:
        return min(self.unstarted_tokens, max(FIRST_TOKENS, int(2 * self._step)))

    def has_room(self, load: Load) -> bool:
        """See `Window`."""
        return self.admits(load, 1)

    def admits(self, load: Load, uncached_tokens: int) -> bool:
        """See `Window`. Where nothing waits to start, even a request beyond the limit of tokens goes."""
        if load.requests >= self._requests:
            return False
        return load.unstarted < 2 or load.unstarted_tokens + uncached_tokens <= self._tokens

    def started(self, tokens: int, now: float) -> None:
        """See `Window`."""
        if now > self._burst_time + SAME_STEP_SECONDS:
            self._burst = self._burst_starts = 0
            self._burst_time = now
        self._burst += tokens
        self._burst_starts += 1
        self._step = max(self._step * STEP_MEMORY, self._burst)
        self._starts = max(self._starts * STARTS_MEMORY, self._burst_starts)

    def reported(self, load: Load, running: int, waiting: int) -> None:
        """See `Window`."""
        if waiting and running:
            # What the engine told may be older than what was sent since: only the proportion is taken from it.
            seen = load.requests * running / (running + waiting)
            known = self._running
            self._running = seen if known is None or seen > known else known + (seen - known) / 4
        elif self._running is not None and load.requests >= self._requests:
            self._running = max(self._running, running) + 1
