"""A store whose lease does not change, and that counts who asks."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from router.cluster.lease import StoreView


class FixedLease:
    """What `LeaderRoute` and a replica that waits ask of a store that has no state."""

    def __init__(self, view: StoreView) -> None:
        self._view = view
        self.looks = 0
        """How often the lease was read."""
        self.waits: list[str] = []
        """The replicas that have said that they wait."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to close."""

    async def view(self) -> StoreView:
        self.looks += 1
        return self._view

    async def manifest(self) -> None:
        """There is no state."""

    async def waiting(self, replica: str) -> Sequence[str]:
        self.waits.append(replica)
        return self.waits
