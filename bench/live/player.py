"""Clients by the clock: a workload's calls are made when they are due, and what follows from their ends after them."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from bench.workloads.parts.traffic import Call, Client, Ending


class Player:
    """Plays clients, by a clock that may run faster than that on the wall."""

    def __init__(self, speed: float, make: Callable[[Client, Call], Awaitable[Ending]]) -> None:
        """`speed`: seconds of the calls' times in a second of the clock. `make`: makes one call, and waits for its end.

        What `make` raises ends `play`.
        """
        self._speed = speed
        self._make = make
        self._began = monotonic()  # the loop's own clock may be as coarse as a millisecond

    @property
    def now(self) -> float:
        """Seconds since the beginning, by the faster clock."""
        return (monotonic() - self._began) * self._speed

    async def until(self, at: float) -> None:
        """Wait for a time; at one that is past, give way to others once."""
        await asyncio.sleep(max(0.0, at - self.now) / self._speed)

    async def play(self, client: Client, begin: float = 0.0) -> None:
        """Make a client's calls from `begin` on, for as long as it has any. Raises in a group what `make` raises."""
        await self.until(begin)
        async with asyncio.TaskGroup() as group:
            for call in client.calls:
                await self.until(call.at)
                group.create_task(self._follow(group, client, call))

    async def _follow(self, group: asyncio.TaskGroup, client: Client, call: Call) -> None:
        """Make a call, and see to what follows from its end."""
        await self.until(call.at)
        ending = await self._make(client, call)
        for following in call.then(call, ending) if call.then is not None else ():
            group.create_task(self._follow(group, client, following))
