"""Deficit counters of clients whose weights may change as members of their groups come and go.

A refill adds to a member's counter according to the member's weight at that time. For that, each group has a clock of
its own: each refill round of the table advances it by the group's scale, and a counter receives its own weight's
quantum times the advance of the clock. So a change of scale touches no counter, and costs the same for any number of
members.

Members that take turns would each be refilled in their absence, and client names never seen before would each start
with a positive deficit. So a group also has a counter of its own, as if it were one client of its weight, and a member
that becomes active has at most its share of that counter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nextafter

from router.core.clients.recent_clients import DEBTOR_LIMIT
from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request
from router.core.policies.deficit.deficits import DeficitCounter, DeficitTable


@dataclass(slots=True)
class RefillClock:
    """The refill clock and the counter of a group."""

    clock: float
    """The table's rounds since the group was first seen here, each times the group's scale at that time."""
    group_counter: DeficitCounter
    """The counter that the group would have if it were one client."""


class ClientDeficits(DeficitTable[ClientId]):
    """Counters q_i by client, in cost units."""

    def __init__(self, shares: Shares, debtors: int = DEBTOR_LIMIT) -> None:
        """`debtors`: how many counters of forgotten clients are kept because they are in debt."""
        super().__init__(debtors)
        self._shares = shares
        self._refill_clocks: dict[GroupId, RefillClock] = {}

    def register(self, request: Request, quantum: float, *, active: bool) -> bool:
        """Start the counter of the request's client with one quantum, which is `quantum` for weight 1, or update its
        quantum.

        `active`: whether the client was active before this request. Returns whether the quantum of an existing counter
        changed.
        """
        client, group = request.client, request.group
        known = self._counters.get(client)
        if group is not None:
            self._register_group(group, quantum * request.group_weight)
        elif known is not None and known.group is None and not self._debtors.keys:
            return self._set_quantum(known, quantum * request.weight)
        moved = known is not None and known.group != group
        if known is not None and moved:
            self._catch_up(known)
            known.group, known.rounds = group, self.rounds if group is None else self._refill_clocks[group].clock
        new = self.join(client, quantum * request.weight, 0.0) or moved
        counter = self._counters[client]
        if known is None:
            counter.group = group
            counter.rounds = self._clock(counter)
            counter.deficit = self._refill_amount(counter)
        if group is not None and not active:
            counter.deficit = min(
                self._catch_up(counter), self._member_part(counter, self._refill_clocks[group].group_counter)
            )
        return new

    def group_of(self, client: ClientId) -> GroupId | None:
        """The group of a known client."""
        return self._counters[client].group

    def quantum(self, client: ClientId) -> float:
        """What a refill adds now to a client's deficit, in cost units."""
        return self._refill_amount(self._counters[client])

    def clock(self, group: GroupId | None) -> float:
        """The number of refill rounds so far, as counted for the members of a group or, for None, for clients without a
        group.
        """
        return self.rounds if group is None else self._refill_clocks[group].clock

    def refill_time(self, client: ClientId) -> float:
        """The time on its group's clock at which a client's deficit is positive, or nearly so, unless the client is
        charged before.

        For a client without a positive deficit, that time is always later than now.
        """
        counter = self._counters[client]
        deficit = self._catch_up(counter)
        return max(counter.rounds - deficit / counter.quantum, nextafter(counter.rounds, inf))

    def refill_for(self, client: ClientId, fraction: float = 1.0) -> None:
        """Refill until this client's deficit is positive, by this fraction of a quantum per round."""
        before = self.rounds
        self.refill((client,), fraction)
        for group, refill_clock in self._refill_clocks.items():
            refill_clock.clock += (self.rounds - before) * self._shares.scale(group)

    def charge(self, key: ClientId, cost: float) -> float:
        """Also charges the client's group."""
        counter = self._counters.get(key)
        if counter is None:
            return 0.0
        counter.deficit = self._catch_up(counter) - cost
        if counter.group is not None:
            group_counter = self._refill_clocks[counter.group].group_counter
            group_counter.deficit = self._catch_up(group_counter) - cost
        return counter.deficit

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Yield each group with its deficit and quantum, for `restore_group`. Changes nothing.

        Clocks are not saved: a counter receives the advance of its group's clock since the counter started or was
        restored, so clocks that restart at 0 give the same result.
        """
        for group, refill_clock in list(self._refill_clocks.items()):
            yield group, self._current(refill_clock.group_counter), refill_clock.group_counter.quantum

    def restore_group(self, group: GroupId, deficit: float, quantum: float) -> None:
        """Load a group's counter, so that new client names share the group's debt as they did before the restart."""
        self._refill_clocks[group] = RefillClock(0.0, DeficitCounter(deficit, quantum, self.rounds, self._epoch))

    def _register_group(self, group: GroupId, quantum: float) -> None:
        refill_clock = self._refill_clocks.get(group)
        if refill_clock is None:
            self._refill_clocks[group] = RefillClock(0.0, DeficitCounter(quantum, quantum, self.rounds, self._epoch))
        elif refill_clock.group_counter.quantum != quantum:
            self._catch_up(refill_clock.group_counter)
            refill_clock.group_counter.quantum = quantum

    def _member_part(self, counter: DeficitCounter, group_counter: DeficitCounter) -> float:
        """A member's share of its group's deficit."""
        return self._catch_up(group_counter) * self._refill_amount(counter) / group_counter.quantum

    def _clock(self, counter: DeficitCounter) -> float:
        return self.clock(counter.group)

    def _refill_amount(self, counter: DeficitCounter) -> float:
        return counter.quantum if counter.group is None else counter.quantum * self._shares.scale(counter.group)

    def _missed_rounds(self, counter: DeficitCounter) -> float:
        if counter.group is None:
            return self.rounds - counter.rounds
        return (self._refill_clocks[counter.group].clock - counter.rounds) / self._shares.scale(counter.group)
