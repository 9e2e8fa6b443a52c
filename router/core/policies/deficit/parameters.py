"""The parameters of an order by deficits, in one queue or in a pool."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeficitParameters:
    """Credit, rounds, and who goes before the longest match."""

    quantum: float = 20_000.0
    """Q^u, in cost units: the most that a round adds to a client's credit. More: better locality, looser fairness."""
    sparse_first: bool = True
    """Among clients with credit, those with few requests in flight go first: at one worker those with nothing in
    flight there, in a pool those with fewer than there are workers."""
    head_start: float = 4_000.0
    """For how much, in cost units, a client that begins to wait goes before those with credit that waited already; not
    if the input that it begins with costs more. 0: never."""
    round_seconds: float = 40.0
    """T: a round adds no more to each client's credit than its share of what the workers serve in this time. More:
    better locality with many clients, longer waits. 0: a round adds Q^u, however long that lasts."""
    overdue_after: float = 1.0
    """A client with nothing in flight goes first when, since its last turn, so many requests went for each active
    client. 0: never."""
    overdraft: float = 0.2
    """The debt, as a share of Q^u, with which it may still go then."""
    patience: int = 32
    """How many may go in the turn of a request that does not fit a worker's window; then room is kept for it."""
    oldest_every: int = 16
    """One in so many requests of a waiting client is its oldest, whatever its match; 0 for none."""
    engine_lpm_seconds: float = 10.0
    """At a worker whose engine itself orders by longest match, how long one that it has not begun holds up a refill."""

    def __post_init__(self) -> None:
        if self.quantum <= 0:
            raise ValueError("quantum must be positive")
        if min(self.head_start, self.round_seconds, self.overdue_after, self.overdraft) < 0:
            raise ValueError("head_start, round_seconds, overdue_after and overdraft must not be negative")

    @property
    def deficit_range(self) -> float:
        """How far a client's credit may lie, in cost units for weight 1, above that with which it may just go."""
        return self.quantum * (1 + self.overdraft) if self.overdue_after else self.quantum
