"""The parameters of Preble's placement and order. The settings read them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrebleParameters:
    """Preble placement (E2)."""

    history: float = 180.0
    """H, in seconds: how long a request counts in the load of its worker."""
    decode_seconds: float = 0.025
    """Seconds of a worker's time for each output token."""
    first_output: int = 45
    """Output tokens expected at a worker where no request has ended within H."""
    eviction_cost: bool = True
    """Count the cost of computing again what is evicted for a request."""
    decode_ratio: float = 0.7
    """Explore the worker with the highest cached fraction of recent input, if that is above this value. 0: never."""
    decode_history: float = 30.0
    """Seconds of input that count for that fraction."""
    balance_ratio: float = 1.5
    """Th_bal: relieve the most loaded worker while it has more than this many times the lowest load. 0: never."""
    balance_after: int = 50
    """Requests placed per worker before the first worker is relieved."""
    copy_slowdown: float = 2.0
    """Copy a prefix that only the most loaded worker has when requests wait this many times as long there in the later
    half of H as in the earlier. 0: never."""

    def __post_init__(self) -> None:
        for name in ("history", "decode_history"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        for name in (
            "decode_seconds",
            "first_output",
            "decode_ratio",
            "balance_ratio",
            "balance_after",
            "copy_slowdown",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")


@dataclass(frozen=True, slots=True)
class PriorityGroupsParameters:
    """Priority groups (Preble's)."""

    groups: int = 10
    """P: the number of groups that the cached fraction of a prompt is divided into, of equal size."""

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError("groups must be positive")
