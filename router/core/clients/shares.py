"""The effective weight of a client: its own weight, or its part of its group's weight.

A group's weight W is shared by its active members, which are those with a request waiting or in flight: member i has
the effective weight W · w_i / Σ w_j, summed over active members. So a group gains nothing by adding members.

This is the only source of weights. A weight may change during a backlog, because members come and go or the operator
sets it. That changes what a client is given from then on, and never what it has or owes. The theorem (DLPM paper,
Theorem 4.1) bounds |W_f/w_f - W_g/w_g| over intervals in which both clients are backlogged and both weights are
constant. If weights change, each stretch between two changes has the theorem's bound, and over k changes the bounds add
up to k + 1 times the bound with the smallest weight seen. Between a whole group and a client outside, with the group's
service divided by W, the overdrafts of the group's n members in flight add up, so that U counts n times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from router.core.model.request import ClientId, GroupId, Request


@dataclass(slots=True)
class Member:
    """A client with a request waiting or in flight."""

    weight: float
    group: GroupId | None
    requests: int = 0


@dataclass(slots=True)
class Group:
    """A group that was seen. Groups are never forgotten: there are only as many as the operator has configured."""

    weight: float
    active: float = 0.0
    """Total weight of the active members."""
    members: int = 0
    """Number of active members."""
    scale: float = 1.0
    """Factor of a member's weight. Without active members, the value for the last one."""


class Shares:
    """The active clients with their weights and groups. All operations but `fleet_share` take constant time."""

    def __init__(self) -> None:
        self._members: dict[ClientId, Member] = {}
        self._ungrouped: dict[ClientId, float] = {}
        self.ungrouped: Final[Mapping[ClientId, float]] = self._ungrouped
        """The effective weights of the active clients without a group; read-only. Those of others depend on more."""
        self._groups: dict[GroupId, Group] = {}

    def add_request(self, request: Request) -> float:
        """Count one more request of a client, waiting or in flight, and take its weight, group and group weight from
        the request. Returns the client's effective weight.
        """
        member, weight, group = self._members.get(request.client), request.weight, request.group
        if member is None:
            member = self._members[request.client] = Member(weight, group)
            self._count(member)
        elif member.weight != weight or member.group != group:
            self._discount(member)
            member.weight, member.group = weight, group
            self._count(member)
        member.requests += 1
        if group is None:
            self._ungrouped[request.client] = weight
            return weight
        self._ungrouped.pop(request.client, None)
        if self._groups[group].weight != request.group_weight:
            self._groups[group].weight = request.group_weight
            self._rescale(self._groups[group])
        return weight * self._groups[group].scale

    def remove_request(self, client: ClientId) -> None:
        """Count one request of the client less."""
        member = self._members[client]
        member.requests -= 1
        if not member.requests:
            self._discount(member)
            del self._members[client]
            self._ungrouped.pop(client, None)

    def is_active(self, client: ClientId) -> bool:
        """Return whether a client has a request waiting or in flight."""
        return client in self._members

    def effective_weight(self, request: Request) -> float:
        """Return the current effective weight of the request's client, by the client's latest request."""
        member = self._members.get(request.client)
        if member is None:
            return request.weight * self.scale(request.group)
        return member.weight if member.group is None else member.weight * self.scale(member.group)

    def scale(self, group: GroupId | None) -> float:
        """Return the current factor of the weights of a group's members; 1 without a group."""
        if group is None:
            return 1.0
        known = self._groups.get(group)
        return 1.0 if known is None else known.scale

    def fleet_share(self, client: ClientId, weight: float, group: GroupId | None, group_weight: float) -> float:
        """Return the share of the fleet, 0 to 1, that a client has or would have if active: its part of all active
        weight.

        Takes time linear in the number of active clients.
        """
        members = [member for name, member in self._members.items() if name != client]
        groups = {member.group for member in members} - {None, group}
        alone = sum([member.weight for member in members if member.group is None], 0.0)
        others = alone + sum([self._groups[name].weight for name in groups if name is not None], 0.0)
        if group is None:
            return weight / (weight + others)
        group_weights = sum([member.weight for member in members if member.group == group], 0.0)
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
