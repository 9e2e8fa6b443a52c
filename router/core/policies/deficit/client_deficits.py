"""Deficit counters of clients, whose weights may change as members of their groups come and go.

A refill adds to a member's counter what its weight counts then. A group has a clock of its own for that: each refill
round of the table moves it by the group's scale, and a counter is given its own weight's quantum times what the clock
has moved. So a change of scale touches no counter, and costs the same for any number of members.

Members that take turns would each be refilled in their absence, and names that nobody has seen before would each begin
with credit. So a group has a counter besides, as if it was one client of its weight; and a member that begins to be
active has no more than its part of that.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nextafter

from router.core.clients.recent_clients import DEBTOR_LIMIT
from router.core.clients.shares import Shares
from router.core.model.request import ClientId, GroupId, Request
from router.core.policies.deficit.deficits import Counter, DeficitTable


@dataclass(slots=True)
class RefillClock:
    """A group's refills."""

    clock: float
    """The table's rounds since the group was first seen here, each times the group's scale of then."""
    whole: Counter
    """What the group would have as one client."""


class ClientDeficits(DeficitTable[ClientId]):
    """Counters q_i by client, in cost units."""

    def __init__(self, shares: Shares, debtors: int = DEBTOR_LIMIT) -> None:
        """`debtors`: how many debts are kept of who is forgotten."""
        super().__init__(debtors)
        self._shares = shares
        self._paces: dict[GroupId, RefillClock] = {}

    def meet(self, request: Request, quantum: float, *, active: bool) -> bool:
        """Begin its client's counter with one quantum, which is `quantum` for weight 1, or let it have another one.

        `active`: whether it was before this request. Returns whether the quantum of one that exists is another.
        """
        client, group = request.client, request.group
        if group is not None:
            self._meet_group(group, quantum * request.group_weight)
        known = self._counters.get(client)
        moved = known is not None and known.group != group
        if known is not None and moved:
            self._catch_up(known)
            known.group, known.rounds = group, self.rounds if group is None else self._paces[group].clock
        new = self.join(client, quantum * request.weight, 0.0) or moved
        counter = self._counters[client]
        if known is None:
            counter.group = group
            counter.rounds = self._clock(counter)
            counter.credit = self._step(counter)
        if group is not None and not active:
            counter.credit = min(self._catch_up(counter), self._part(counter, self._paces[group].whole))
        return new

    def group_of(self, client: ClientId) -> GroupId | None:
        """The group of a client that is known here."""
        return self._counters[client].group

    def quantum(self, client: ClientId) -> float:
        """What a refill of now adds to a client's credit, in cost units."""
        return self._step(self._counters[client])

    def clock(self, group: GroupId | None) -> float:
        """How many rounds there were, for the members of a group or for who is in none."""
        return self.rounds if group is None else self._paces[group].clock

    def due(self, client: ClientId) -> float:
        """The time on its group's clock at which a client has credit, or is near it, unless it is charged until then.

        Of a client without credit, that is later than now.
        """
        counter = self._counters[client]
        credit = self._catch_up(counter)
        return max(counter.rounds - credit / counter.quantum, nextafter(counter.rounds, inf))

    def let_pass(self, client: ClientId, part: float = 1.0) -> None:
        """Refill until this client has credit, by this part of a quantum a round."""
        before = self.rounds
        self.refill((client,), part)
        for group, pace in self._paces.items():
            pace.clock += (self.rounds - before) * self._shares.scale(group)

    def charge(self, key: ClientId, cost: float) -> None:
        """See `DeficitTable`; its group is charged as well."""
        counter = self._counters.get(key)
        if counter is None:
            return
        counter.credit = self._catch_up(counter) - cost
        if counter.group is not None:
            whole = self._paces[counter.group].whole
            whole.credit = self._catch_up(whole) - cost

    def saved_groups(self) -> Iterator[tuple[GroupId, float, float]]:
        """Each group with what it has as one client, and with its quantum, for `restore_group`; changes nothing.

        Clocks are not saved: a counter is given what its group's clock moves from the time at which it begins or is
        restored, so that clocks which begin at 0 tell the same.
        """
        for group, pace in list(self._paces.items()):
            yield group, self._look(pace.whole), pace.whole.quantum

    def restore_group(self, group: GroupId, credit: float, quantum: float) -> None:
        """Begin with this of a group, so that names which nobody has seen before pay its debt as they did."""
        self._paces[group] = RefillClock(0.0, Counter(credit, quantum, self.rounds, self._beginning))

    def _meet_group(self, group: GroupId, quantum: float) -> None:
        pace = self._paces.get(group)
        if pace is None:
            self._paces[group] = RefillClock(0.0, Counter(quantum, quantum, self.rounds, self._beginning))
        elif pace.whole.quantum != quantum:
            self._catch_up(pace.whole)
            pace.whole.quantum = quantum

    def _part(self, counter: Counter, whole: Counter) -> float:
        """What a member has of what its group has."""
        return self._catch_up(whole) * self._step(counter) / whole.quantum

    def _clock(self, counter: Counter) -> float:
        return self.clock(counter.group)

    def _step(self, counter: Counter) -> float:
        return counter.quantum if counter.group is None else counter.quantum * self._shares.scale(counter.group)

    def _missed(self, counter: Counter) -> float:
        if counter.group is None:
            return self.rounds - counter.rounds
        return (self._paces[counter.group].clock - counter.rounds) / self._shares.scale(counter.group)
