"""Which ranks a URL has, and which of them step together: what the settings and the engine say. Pure."""

from dataclasses import dataclass
from typing import Final, Literal

from router.core.model.request import BarrierId, WorkerId

NO_GROUP: Final = "none"
"""As a worker's group: its ranks wait for no other."""


@dataclass(frozen=True, slots=True)
class RankRules:
    """The settings about ranks."""

    ranks: Literal["auto", "off"] | int = "auto"
    barrier: Literal["auto", "off"] = "auto"

    def used(self, reported: frozenset[int] | None) -> frozenset[int]:
        """Return the ranks that are workers of their own; empty if the URL is one worker.

        `reported`: those that the engine has; None if it does not say.
        """
        if self.ranks == "off":
            return frozenset()
        if self.ranks == "auto":
            # With vLLM's hybrid load balancing, a server's metrics name its ranks by their numbers in the whole fleet,
            # and its calls by their numbers in the server. All but the first server lack the number 0.
            return reported if reported is not None and len(reported) > 1 and 0 in reported else frozenset()
        named = frozenset(range(self.ranks))
        used = named if reported is None else named & reported
        return used if len(named) > 1 else frozenset()

    def out_of_range(self, reported: frozenset[int] | None) -> frozenset[int]:
        """Return the ranks that the settings name and the engine does not have."""
        if reported is None or not isinstance(self.ranks, int) or self.ranks == 1:
            return frozenset()
        return frozenset(range(self.ranks)) - reported

    def barrier_of(
        self, server: WorkerId, group: str | None, *, several: bool, lockstep: bool | None
    ) -> BarrierId | None:
        """Return the barrier of the ranks of a URL; None if they wait for no other.

        `server`: names the URL; `group`: as its settings say; `several`: whether it has several ranks; `lockstep`:
        whether the engine says that its ranks step together, None if it does not say.
        """
        if self.barrier == "off" or group == NO_GROUP:
            return None
        if group is not None:
            return BarrierId(group)
        return BarrierId(server) if several and lockstep is not False else None
