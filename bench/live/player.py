"""Play clients in real time: make a workload's calls at their times, and then those that follow from them."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from bench.workloads.parts.traffic import Call, Client, Ending


class Player:
    """Plays clients by a clock that may run faster than real time."""

    def __init__(self, speed: float, make: Callable[[Client, Call], Awaitable[Ending]]) -> None:
        """`speed`: seconds of the calls' times per real second. `make`: makes one call and waits for its end.

        An exception of `make` ends `play`.
        """
        self._speed = speed
        self._make = make
        self._began = monotonic()  # the event loop's clock may be as coarse as a millisecond

    @property
    def now(self) -> float:
        """Seconds since the beginning, by the faster clock."""
        return (monotonic() - self._began) * self._speed

    async def wait_until(self, at: float) -> None:
        """Wait until `at`; if it is past, only yield to other tasks once."""
        await asyncio.sleep(max(0.0, at - self.now) / self._speed)

    async def play(self, client: Client, begin: float = 0.0) -> None:
        """Make a client's calls from `begin` on, until it has no more. Raises in a group what `make` raises."""
        await self.wait_until(begin)
        async with asyncio.TaskGroup() as group:
            for call in client.calls:
                await self.wait_until(call.at)
                group.create_task(self._follow(group, client, call))

    async def _follow(self, group: asyncio.TaskGroup, client: Client, call: Call) -> None:
        """Make a call, and then those that follow from its end."""
        await self.wait_until(call.at)
        ending = await self._make(client, call)
        for following in call.then(call, ending) if call.then is not None else ():
            group.create_task(self._follow(group, client, following))
