"""The parameters of the simple policies. The settings read them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheAwareParameters:
    """Cache-aware placement (SGLang's)."""

    cache_threshold: float = 0.3
    """A worker must hold more than this fraction of a prompt, or the request goes to the worker with the smallest
    tree."""
    balance_abs_threshold: int = 64
    """The fleet is out of balance if the highest load exceeds the lowest by more than this many requests ..."""
    balance_rel_threshold: float = 1.5
    """... and is more than this many times the lowest; then a request goes to the shortest queue."""
    tree_tokens: int = 2**24
    """The size, in tokens, at which a worker's tree stops growing (SGLang: 2^26 characters)."""

    def __post_init__(self) -> None:
        for name in ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold", "tree_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")


@dataclass(frozen=True, slots=True)
class ConsistentHashParameters:
    """Consistent hashing of prefixes."""

    prefix_chunks: int = 8
    """The number of chunks at the head of a prompt that decide its worker. A chunk is 128 bytes, about 32 tokens."""
    load_factor: float = 0.0
    """A worker takes at most this many times the mean load, rounded up; further requests go to the next worker in line.
    0: no bound."""

    def __post_init__(self) -> None:
        if self.prefix_chunks < 1:
            raise ValueError("prefix_chunks must be positive")
        if self.load_factor and not self.load_factor >= 1:
            raise ValueError("load_factor must be 0 or at least 1")


@dataclass(frozen=True, slots=True)
class RpmParameters:
    """Limits of requests per minute."""

    limit: int = 30
    """Requests of one client that may be served in each minute; the rest wait for the next."""

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError("limit must be positive")
