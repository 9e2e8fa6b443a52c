"""The parameters of the DLPM family. The settings read them."""

from dataclasses import dataclass

from router.core.policies.deficit.parameters import DeficitParameters
from router.core.policies.dlpm.refill_hold import MIN_ISOLATION


@dataclass(frozen=True, slots=True)
class DlpmParameters(DeficitParameters):
    """DLPM order (Algorithm 1)."""

    # At one worker many clients have nothing in flight; the defaults of a pool would make light ones wait longer.
    head_start: float = 2_000.0
    """Cost units for which a client that begins to wait goes before eligible clients that waited already, unless its
    first input costs more. 0: never."""
    round_seconds: float = 0.0
    """T, in seconds: a refill round adds at most a client's share of what the worker serves in this time. 0: a round
    adds Q^u, however long that lasts."""
    overdue_after: float = 0.0
    """Serve a client with nothing in flight here first once this many requests per active client were dispatched since
    its last turn. 0: never."""


@dataclass(frozen=True, slots=True)
class D2lpmParameters:
    """D²LPM placement (Algorithm 2)."""

    quantum: float = 100_000.0
    """Q^w, in cost units: what a refill adds to a client's deficit at each worker. Higher: requests stay longer."""
    charge_full_input: bool = False
    """Charge the whole input, as the paper prints it, instead of its extend tokens; then load never makes a request
    leave."""
    load_ratio: float = 2.0
    """With the extend charge: leave a worker whose load is more than this many times the lightest one's ..."""
    load_slack: int = 4
    """... plus this many requests."""
    steal_loss: int = 256
    """Cached tokens that a request may lose when an idle worker takes it over: about what one prefill step computes
    anyway. Negative: no request is taken over."""
    by_service_rate: bool = True
    """Scale Q^w with each worker's measured service rate, relative to the mean of the fleet."""

    def __post_init__(self) -> None:
        if self.quantum <= 0:
            raise ValueError("quantum must be positive")
        if self.load_ratio < 1 or self.load_slack < 0:
            raise ValueError("load_ratio must be at least 1, and load_slack not negative")


@dataclass(frozen=True, slots=True)
class DlpmHomeParameters(DeficitParameters):
    """DLPM from one pool, with home workers."""

    cached_first: bool = True
    """While many clients wait, let them take turns in rounds, in each of which those whose request is cached go first:
    more cache hits where their prefixes exceed the caches."""
    cached_first_from: int = 8
    """With `cached_first`: rounds begin once this many clients per worker wait, and end when none waits."""
    turn_overdraft: float = 0.5
    """With `cached_first`: the largest debt, as a fraction of Q^u, with which a client may have its turn in a round, or
    be overdue in one."""
    worker_quantum: float = 100_000.0
    """Q^w, in cost units: what a refill adds to a client's deficit at each worker. Higher: fewer copies of a prefix."""
    home_loss: int = 64
    """A worker whose cache holds at most this many tokens less of a prefix than the best is also a home."""
    home_patience: float = 3.0
    """How long a request waits for its home, as a multiple of the time that its prefix takes to compute."""
    # In a pool most of these requests are cold: what is cached goes before them, and computing them evicts it.
    oldest_every: int = 64
    """Look at a client's oldest waiting request once every N turns, or in as many as it has requests waiting, if these
    are more. One that is the oldest at two looks goes next, ignoring prefix match (0 = never)."""
    isolation: float = 0.45
    """How long a refill for a client that was served more than most is delayed while eligible clients have calls
    running that it would slow: from 0, never, to 1, until they have had as much engine time as the requests that the
    last refill admitted. Higher: running calls are slowed less, at the cost of total service."""
    load_ratio: float = 2.0
    """Leave a home with more than this many times the fewest requests in flight on any worker ..."""
    load_slack: int = 4
    """... plus this many requests."""

    def __post_init__(self) -> None:
        DeficitParameters.__post_init__(self)
        if self.worker_quantum <= 0:
            raise ValueError("worker_quantum must be positive")
        if self.load_ratio < 1 or self.load_slack < 0:
            raise ValueError("load_ratio must be at least 1, and load_slack not negative")
        if min(self.turn_overdraft, self.cached_first_from) < 0:
            raise ValueError("turn_overdraft and cached_first_from must not be negative")
        if self.isolation and not MIN_ISOLATION <= self.isolation <= 1:
            raise ValueError(f"isolation must be 0, or from {MIN_ISOLATION} to 1")

    @property
    def deficit_range(self) -> float:
        overdue = self.overdraft if self.overdue_after else 0.0
        return self.quantum * (1 + max(overdue, self.turn_overdraft if self.cached_first else 0.0))


@dataclass(frozen=True, slots=True)
class LpmParameters:
    """LPM order (SGLang's)."""

    cut_off: int = 128
    """While more requests than this wait for a worker, serve them in order of arrival. 0: always by longest match."""

    def __post_init__(self) -> None:
        if self.cut_off < 0:
            raise ValueError("cut_off must not be negative")
