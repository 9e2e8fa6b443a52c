"""What a front keeps of all its requests that two workers compute."""

from contextlib import AsyncExitStack
from typing import Final, Self

from router.front.handoff.loose_ends import LooseEnds
from router.front.handoff.releases import PromptReleases
from router.upstream.connections import WorkerConnections


class Handoffs:
    """The prompts that prefill workers keep, and what is left of calls that were sent at once."""

    def __init__(self, connections: WorkerConnections, seconds: float) -> None:
        """`seconds`: the greatest age of a prompt that a decode worker may be sent to fetch."""
        self.releases: Final = PromptReleases(connections, seconds)
        self.loose_ends: Final = LooseEnds(connections)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.releases)
        await self._stack.enter_async_context(self.loose_ends)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the calls under way that clean up, which take a few seconds at most."""
        await self._stack.aclose()
