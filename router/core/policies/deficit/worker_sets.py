"""The sets of workers that clients wait for, and the refill rounds that are owed to them.

Where workers serve different models, a refill at one worker may find clients that wait for other workers only and are
eligible, or would be after fewer rounds. A counter holds at most one quantum, so further rounds would add nothing to
such a client, but a quantum each to others that wait for the same workers in debt: these would pass it again and again.
So no more rounds of a refill count for a set of workers once a client that waits for exactly these is eligible. The set
is owed the others, one at most, and receives them once none of its waiting clients is eligible: otherwise sets that
share workers would get unequal numbers of rounds.

As in miDRR ("Scheduling Packets over Multiple Interfaces while Respecting User Preferences", CoNEXT 2013), a client is
served by the workers that it can use, and rounds elsewhere cost it nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from router.core.model.request import ClientId, WorkerId
from router.core.policies.deficit.deficits import NO_LIMITS, ClientDeficits, WorkerSet


class WorkerSets:
    """Assigns the set of workers that it waits for to each client, while workers serve different requests."""

    def __init__(self, deficits: ClientDeficits) -> None:
        self._deficits = deficits
        self._workers_of: Callable[[str], WorkerSet] | None = None
        """The workers that serve a route; None while all serve the same routes."""
        self.divided = False
        """Whether workers serve different routes."""
        self._owed: dict[WorkerSet, float] = {}
        """Rounds owed to each set, counted as the fraction of a quantum that they add."""
        self.changed = False
        """Whether a set may have ceased to have an eligible waiting client since `add_owed` was called last. Set from
        outside when a client ceases to be eligible, or to wait."""

    def divide(self, workers_of: Callable[[str], WorkerSet] | None) -> bool:
        """Set which workers serve a route; None if all serve the same routes. Returns whether that may change a set.

        Then no client has a set any more, and none is owed rounds.
        """
        if self._workers_of is None and workers_of is None:
            return False
        self._workers_of, self.divided = workers_of, workers_of is not None
        self._owed.clear()
        self._deficits.forget_workers()
        return True

    def assign(self, client: ClientId, routes: Iterable[str]) -> bool:
        """Count the rounds of a client that waits on these routes by the workers that serve them; returns whether these
        are others than before.
        """
        if self._workers_of is None:
            return False
        self.changed = True
        return self._deficits.set_workers(client, frozenset[WorkerId]().union(*map(self._workers_of, routes)))

    def refill_limits(
        self, client: ClientId, eligible: Collection[ClientId], needy: Iterable[ClientId], fraction: float
    ) -> Mapping[WorkerSet, float]:
        """Return how many rounds of a refill for this client may count for other sets than its own.

        `eligible`: the waiting clients that are; `needy`: of those that are not, at least the first of each set to
        become so; `fraction`: what a round adds, in quanta, in which the limits are given.
        """
        if self._workers_of is None:
            return NO_LIMITS
        limits: dict[WorkerSet, float] = dict.fromkeys(self._of(eligible), 0.0)
        for each in needy:
            if (workers := self._deficits.workers_of(each)) is not None:
                needed = fraction * self._deficits.rounds_to_positive(each, fraction)
                limits[workers] = min(needed, limits.get(workers, needed))
        if (own := self._deficits.workers_of(client)) is not None:
            limits.pop(own, None)
        return limits

    def owe(self, limits: Mapping[WorkerSet, float], rounds: float) -> None:
        """Owe the sets the rounds of a refill that did not count for them because of these limits."""
        for workers, limit in limits.items():
            if limit < rounds:
                self._owed[workers] = min(1.0, self._owed.get(workers, 0.0) + rounds - limit)

    def add_owed(self, eligible: Collection[ClientId]) -> bool:
        """Add the rounds that are owed to sets without an eligible waiting client; returns whether there were any."""
        if not self._owed or not self.changed:
            return False
        self.changed = False
        paid = [*self._owed.keys() - self._of(eligible)]
        for workers in paid:
            self._deficits.add_rounds(workers, self._owed.pop(workers))
        return bool(paid)

    def _of(self, clients: Iterable[ClientId]) -> set[WorkerSet]:
        return {workers for each in clients if (workers := self._deficits.workers_of(each)) is not None}
