"""How much may be in flight at a worker: as little as keeps its engine busy.

What the engine has not started waits in the engine's own queue, where our order no longer counts;
so the window bounds it, and the rest waits here.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


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

    @property
    def limits(self) -> None:
        """See `Window`."""

    def has_room(self, load: Load) -> bool:  # noqa: ARG002 - the protocol's signature
        """See `Window`."""
        return True

    def admits(self, load: Load, uncached_tokens: int) -> bool:  # noqa: ARG002 - the protocol's signature
        """See `Window`."""
        return True
