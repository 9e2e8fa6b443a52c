"""The parameters of an order by deficits, for one queue or a pool."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeficitParameters:
    """Quanta, refill rounds, and which eligible clients go before the longest match."""

    quantum: float = 20_000.0
    """Q^u, in cost units: the most that a refill round adds to a client's deficit. Higher: better locality, looser
    fairness."""
    sparse_first: bool = True
    """Among eligible clients, serve those with few requests in flight first: at one worker those with none there, in a
    pool those with fewer than there are workers."""
    head_start: float = 4_000.0
    """Cost units for which a client that begins to wait goes before eligible clients that waited already, unless its
    first input costs more. 0: never."""
    round_seconds: float = 40.0
    """T, in seconds: a refill round adds at most a client's share of what the workers serve in this time. Higher:
    better locality with many clients, longer waits. 0: a round adds Q^u, however long that lasts."""
    overdue_after: float = 1.0
    """Serve a client with nothing in flight first once this many requests per active client were dispatched since its
    last turn. 0: never."""
    overdraft: float = 0.2
    """The largest debt, as a fraction of Q^u, with which such an overdue client may still be served."""
    patience: int = 32
    """How often other requests may go ahead of one that does not fit a worker's window before room is kept for it."""
    oldest_every: int = 16
    """Look at a client's oldest waiting request once every N turns, or in as many as it has requests waiting, if these
    are more. One that is the oldest at two looks goes next, ignoring prefix match (0 = never)."""
    engine_lpm_seconds: float = 10.0
    """Seconds for which a request that a worker has not started delays a refill, if the worker's engine orders by
    longest match itself."""

    def __post_init__(self) -> None:
        if self.quantum <= 0:
            raise ValueError("quantum must be positive")
        if min(self.head_start, self.round_seconds, self.overdue_after, self.overdraft) < 0:
            raise ValueError("head_start, round_seconds, overdue_after and overdraft must not be negative")

    @property
    def deficit_range(self) -> float:
        """The range of deficits with which a client can be eligible, in cost units for weight 1."""
        return self.quantum * (1 + self.overdraft) if self.overdue_after else self.quantum
