"""What a client's weight counts: as it is, or as its part of its group's.

A group's weight W is shared by its members that are active, which is to have something waiting or in flight: member i
counts W · w_i / Σ w_j over the active ones. So a group that makes itself more members has no more than before.

This is the one place where a weight is asked for. A weight that changes during a backlog, because members come and go
or the operator says so, changes what a client is given from then on, and never what it has or owes. What this leaves of
the theorem (DLPM paper, Theorem 4.1): it bounds |W_f/w_f - W_g/w_g| over intervals in which both are backlogged and
both weights stay as they are. Where they change, each stretch between two changes has the theorem's bound for itself,
and over k changes the bounds add up: k + 1 times it, with the least weight seen. Between a whole group and a client
outside, with the group's service over W, the overdrafts of its n members that are in flight add up, so that U counts
n times.
"""

from dataclasses import dataclass

from router.core.model.request import ClientId, GroupId, Request


@dataclass(slots=True)
class Member:
    """A client that has something waiting or in flight."""

    weight: float
    group: GroupId | None
    requests: int = 0


@dataclass(slots=True)
class Group:
    """A group that was seen; it is remembered, for there are no more than an operator has thought of."""

    weight: float
    active: float = 0.0
    """The weights of its active members, added up."""
    members: int = 0
    """How many these are."""
    scale: float = 1.0
    """What a member's weight is multiplied with; of a group without an active member, as it was for the last one."""


class Shares:
    """Who is active, with which weight and in which group. Whatever is asked or told costs the same for any number."""

    def __init__(self) -> None:
        self._members: dict[ClientId, Member] = {}
        self._groups: dict[GroupId, Group] = {}

    def begin(self, request: Request) -> None:
        """One more request of a client waits or is in flight; it says what weight, group and group weight are now."""
        member = self._members.get(request.client)
        if member is None:
            member = self._members[request.client] = Member(request.weight, request.group)
            self._count(member)
        elif member.weight != request.weight or member.group != request.group:
            self._discount(member)
            member.weight, member.group = request.weight, request.group
            self._count(member)
        member.requests += 1
        if request.group is not None and self._groups[request.group].weight != request.group_weight:
            self._groups[request.group].weight = request.group_weight
            self._rescale(self._groups[request.group])

    def end(self, client: ClientId) -> None:
        """One less."""
        member = self._members[client]
        member.requests -= 1
        if not member.requests:
            self._discount(member)
            del self._members[client]

    def is_active(self, client: ClientId) -> bool:
        """Whether a client has anything waiting or in flight."""
        return client in self._members

    def effective_weight(self, request: Request) -> float:
        """What its client's weight counts now, as the last of its requests said it."""
        member = self._members.get(request.client)
        if member is None:
            return request.weight * self.scale(request.group)
        return member.weight if member.group is None else member.weight * self.scale(member.group)

    def scale(self, group: GroupId | None) -> float:
        """What the weights of a group's members are multiplied with now; 1 without a group."""
        if group is None:
            return 1.0
        known = self._groups.get(group)
        return 1.0 if known is None else known.scale

    def fleet_share(self, client: ClientId, weight: float, group: GroupId | None, group_weight: float) -> float:
        """What of the fleet a client has, or would have if it were active: its weight over all active ones' together.

        Of 0 to 1. It takes a look at every active client.
        """
        members = [member for name, member in self._members.items() if name != client]
        groups = {member.group for member in members} - {None, group}
        others = sum(member.weight for member in members if member.group is None)
        others += sum(self._groups[name].weight for name in groups if name is not None)
        if group is None:
            return weight / (weight + others)
        group_weights = sum(member.weight for member in members if member.group == group)
        return weight / (weight + group_weights) * group_weight / (group_weight + others)

    def _count(self, member: Member) -> None:
        if member.group is not None:
            group = self._groups.setdefault(member.group, Group(1.0))
            group.active += member.weight
            group.members += 1
            self._rescale(group)

    def _discount(self, member: Member) -> None:
        if member.group is not None:
            group = self._groups[member.group]
            group.members -= 1
            group.active = group.active - member.weight if group.members else 0.0
            self._rescale(group)

    @staticmethod
    def _rescale(group: Group) -> None:
        if group.members:
            group.scale = group.weight / group.active
