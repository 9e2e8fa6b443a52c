"""The load of one worker, and the limits that its window sets."""

from dataclasses import dataclass
from typing import NamedTuple


class Load(NamedTuple):
    """The requests in flight at one worker."""

    requests: int = 0
    unstarted: int = 0
    """Requests that wait for their first token. Streams show their first token; for other answers it is a guess."""
    unstarted_tokens: int = 0
    """Uncached input tokens of the unstarted requests."""
    ahead_tokens: float = 0.0
    """Those of `unstarted_tokens` that the engine has still to compute, estimated from its prefill rate."""
    guessed: int = 0
    """Requests without streaming whose first token is guessed to exist."""
    kv_peak: float = 0.0
    """KV tokens that the requests in flight, and one more request without input, will hold at their peak."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a window currently allows in flight."""

    requests: int
    unstarted_tokens: int
