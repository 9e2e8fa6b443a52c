"""Who leads: the rules of the lease, pure. `store` asks Valkey or Redis, `kubernetes_lease` asks Kubernetes, and both
report the answers here.

A leader holds the lease and an *epoch*. Each new leader takes an epoch that is higher than all that the store, the
replica or a front has seen, and fronts obey the highest that they have seen. So the epoch keeps decisions apart. The
lease only says when another may lead: it may end early or late without harm.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from types import TracebackType
from typing import Final, Protocol, Self

LEASE_SECONDS: Final = 2.0
"""Seconds after its last renewal in which the lease ends, unless renewals come late."""
START_SECONDS: Final = 10.0
"""Seconds for which a new leader has the lease at first, and again and again until it serves."""
LONGEST_START_SECONDS: Final = 60.0
"""Seconds after which a new leader that does not serve makes the lease no longer."""
RENEW_SECONDS: Final = 0.5
"""Seconds between two renewals."""
LATE_SECONDS: Final = 1.0
"""Seconds after the renewal before from which on a renewal is late: the machine, or the store, is too busy."""
LONGEST_LEASE_SECONDS: Final = 15.0
"""Seconds that the lease of a busy leader lasts at most: as long as client-go's usual one."""
BUSY_SECONDS: Final = 60.0
"""Seconds for which the lease is longer after a late renewal."""
POLL_SECONDS: Final = 0.1
"""Seconds between two looks at a lease that nobody holds, by those that wait for it and by fronts."""
LONGEST_POLL_SECONDS: Final = 0.5
"""Seconds between two looks at a lease that lasts longer than that: they would show nothing new but a hand-over."""
RETURN_SECONDS: Final = 2 * LEASE_SECONDS
"""Seconds for which a store that has lost its data is left to a leader that may still live."""
HAND_OVER_SECONDS: Final = 3.0
"""Seconds after which a leader that has released the lease takes it again, if nobody else has."""


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """What the lease says of the leader."""

    epoch: int
    replica: str
    """The name of the replica."""
    run: str
    """The run of the scheduler: no other has this word."""
    address: str
    """Where fronts connect, HOST:PORT."""
    since: float
    """When it took the lease, in seconds since 1970 by its own clock."""

    @property
    def rest(self) -> str:
        """The record without the epoch, which the store puts before it."""
        return f"{self.replica} {self.run} {self.address} {self.since:.3f}"

    def encoded(self) -> str:
        """Return the record as text."""
        return f"{self.epoch} {self.rest}"

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the record of a text. Raises ValueError if it is none. What a newer router has added is ignored."""
        epoch, replica, run, address, since, *_ = text.split(" ")
        return cls(int(epoch), replica, run, address, float(since))


@dataclass(frozen=True, slots=True)
class StoreView:
    """What the store says at one moment."""

    leader: LeaderRecord | None
    """Who holds the lease; None if it has ended."""
    epoch: int
    """The highest epoch that was stored; 0 if none was."""
    seconds_left: float = field(default=0.0, compare=False)
    """Seconds until the lease ends, if it is not renewed."""

    @property
    def looks_again_after(self) -> float:
        """Seconds until the next look, so that the end of the lease is seen at once."""
        return min(LONGEST_POLL_SECONDS, max(POLL_SECONDS, self.seconds_left))


class LeaseStore(Protocol):
    """Where the lease is. Every method but `renew` raises `StoreUnreachable` if it does not answer."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    async def view(self) -> StoreView:
        """Return who holds the lease, and the highest epoch."""

    async def acquire(self, wanted: LeaderRecord, floor: int) -> LeaderRecord | None:
        """Take the lease for a start. Returns the record with its epoch, above `floor`; None if another holds it."""

    async def renew(self, record: LeaderRecord, seconds: float) -> "Renewal":
        """Hold the lease for `seconds` from now on. Raises nothing."""

    async def raise_epoch(self, record: LeaderRecord, epoch: int) -> None:
        """Store that there was this epoch, if the holder of this record leads."""

    async def release(self, record: LeaderRecord) -> None:
        """End the lease, if the holder of this record has it."""

    async def manifest(self) -> bytes | None:
        """Return the manifest of the saved state; None if there is none."""

    async def waiting(self, replica: str = "") -> Sequence[str]:
        """Return the replicas that wait for the lease. `replica`: one that says so now."""


class Candidacy:
    """When a replica that waits may take the lease."""

    def __init__(self, replica: str, began: float = inf) -> None:
        """`began`: when this run began to wait, in seconds since 1970 by the replica's own clock."""
        self._replica = replica
        self._began = began
        self.highest = 0
        """The highest epoch that this replica has seen."""
        self._lost_at: float | None = None
        """When the store was first seen to have lost its data; None while it has them."""
        self._ends_at = -inf
        """When the lease ends that was seen last, if it is not renewed."""
        self._free_at: float | None = None
        """From when on a lease is free that is held no more; None while it is held."""

    def may_take(self, view: StoreView, now: float) -> bool:
        """Return whether to take the lease now, after a look at the store. `now`: when the look began, in seconds of a
        clock that never goes backwards.

        A lease of this replica's own is one of a run that has died. It is left to end if that run may have died before
        it served, as it had led for no longer than one can that does not serve: the next one would die, too. If the
        lease is gone and the epoch with it, the store has lost its data: then the leader has `RETURN_SECONDS` to come
        back to it.

        A lease that was given up early is left alone until every front has seen that nobody holds it, and so looks
        often. Else fronts would come to the next leader one by one, and calls would wait for the last. Meanwhile a
        leader that hands over goes on; only after one that failed before it served is nobody leading for that long.
        """
        forgot = view.epoch < self.highest
        self.highest = max(self.highest, view.epoch, 0 if view.leader is None else view.leader.epoch)
        if view.leader is not None:
            self._lost_at = self._free_at = None
            self._ends_at = now + view.seconds_left
            own = view.leader.replica == self._replica
            return own and self._began - view.leader.since >= LONGEST_START_SECONDS + START_SECONDS
        if not forgot:
            self._lost_at = None
            return self._is_free(now)
        if self._lost_at is None:
            self._lost_at = now
        return now - self._lost_at >= RETURN_SECONDS

    def _is_free(self, now: float) -> bool:
        if self._free_at is None:
            given_up = now < self._ends_at - POLL_SECONDS
            self._free_at = now + LONGEST_POLL_SECONDS if given_up else now
        return now >= self._free_at


class Renewal(StrEnum):
    """What became of a renewal."""

    KEPT = "kept"
    SUPERSEDED = "superseded"
    """Another leads, with a higher epoch."""
    UNREACHABLE = "unreachable"
    """The store did not answer."""


class Tenure:
    """A leader's time with the lease."""

    def __init__(self, record: LeaderRecord) -> None:
        self.record: Final = record
        self._released_at: float | None = None
        self._renews_at: float | None = None
        """When the last renewal began; None before the first, and after a hand-over."""
        self._late: deque[tuple[float, float]] = deque()
        """Late renewals of the last `BUSY_SECONDS`, each with the seconds after which it came, and when: those after
        which none was as late, so that the first is the latest of all.
        """
        self.unreachable = False
        """Whether the store did not answer the last time."""
        self.over = False
        """Whether another leads: this leader only serves the fronts that do not know of the other one yet."""

    def seconds_for(self, now: float) -> float:
        """Begin a renewal. Returns for how many seconds it is to hold the lease.

        A lease lasts as long as four renewals take. On a machine that renews late it is longer, or else another replica
        would lead, which costs the busy machine even more. `now`: seconds of a clock that never goes backwards.
        """
        before, self._renews_at = self._renews_at, now
        gap = 0.0 if before is None else now - before
        while self._late and now - self._late[0][1] > BUSY_SECONDS:
            self._late.popleft()
        if gap > LATE_SECONDS:
            while self._late and self._late[-1][0] <= gap:
                self._late.pop()
            self._late.append((gap, now))
        late = self._late[0][0] if self._late else 0.0
        return min(LONGEST_LEASE_SECONDS, max(LEASE_SECONDS, late * LEASE_SECONDS / RENEW_SECONDS))

    def answered(self, renewal: Renewal) -> None:
        """Note what became of a renewal.

        A leader whose store does not answer goes on: its fronts will hear of a higher epoch, should there be one.
        """
        self.unreachable = renewal is Renewal.UNREACHABLE
        self.over = self.over or renewal is Renewal.SUPERSEDED

    def heard(self, epoch: int) -> None:
        """Note that a front has seen this epoch."""
        self.over = self.over or epoch > self.record.epoch

    def hand_over(self, now: float) -> None:
        """Renew the lease no more, so that another replica takes it.

        `now`: seconds of a clock that never goes backwards.
        """
        self._released_at, self._renews_at = now, None

    def renews(self, now: float) -> bool:
        """Return whether to renew the lease now: not while it is handed over, and not once another leads.

        A hand-over that nobody has answered in time is given up.
        """
        if self._released_at is not None and now >= self._released_at + HAND_OVER_SECONDS:
            self._released_at = None
        return self._released_at is None and not self.over
