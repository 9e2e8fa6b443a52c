"""How agent sessions are recognized and admitted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionParameters:
    """The settings of the gate. Raises ValueError if one of them is invalid."""

    by_label: bool = True
    """Whether the labels of calls say which session they belong to."""
    by_prefix: bool = True
    """Whether a call without a label belongs to the session that its prompt continues."""
    fill: float = 0.92
    """The share of a worker's KV cache in which sessions get places. Their contexts can grow beyond it."""
    idle: float = 40.0
    """Seconds without a call after which a session can lose its place to any that waits."""
    idle_after_turn: float = 5.0
    """The same if its last answer ended the turn, or it has made only one call."""
    turn: float = 2.0
    """A session's turn, as a multiple of what its context costs to prefill. After it, the session can lose its place to
    one of a client with less service; before, to one of a client with so much less that a turn does not make up for it.
    """
    growth: int = 2000
    """Tokens that a context is expected to grow by, in addition to which it is reserved."""
    grace: int = 4000
    """Calls with fewer input tokens are not held back."""
    limit: int = 20_000
    """Sessions that are remembered."""

    def __post_init__(self) -> None:
        if not 0.0 < self.fill <= 1.0:
            raise ValueError("fill must be above 0 and at most 1")
        if min(self.idle, self.idle_after_turn, self.turn, self.growth, self.grace) < 0 or self.limit < 1:
            raise ValueError("idle limits, turn, growth and grace must not be negative, and limit must be positive")
