"""What is in flight at one worker, and the limits that its window sets."""

from dataclasses import dataclass
from typing import NamedTuple


class Load(NamedTuple):
    """What is in flight at one worker."""

    requests: int = 0
    unstarted: int = 0
    """Those that wait for their first token. A stream shows it; of a whole answer it is guessed."""
    unstarted_tokens: int = 0
    """The uncached input tokens of those."""
    ahead_tokens: float = 0.0
    """Of those, what the engine has still to compute, by its pace."""
    guessed: int = 0
    """Whole answers whose first token is guessed to exist."""
    kv_peak: float = 0.0
    """What all of them will hold when they hold most, with one more request that brings no input."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a window lets be in flight at the moment."""

    requests: int
    unstarted_tokens: int
