"""One policy under the load: the light clients alone, then the heavy one beside them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bench.demo.figures import HEAVY, Figures, Group, Phase, Reading, Timetable, figures, group
from bench.demo.load import Clients
from bench.workloads.parts.traffic import Client

GLANCE_SECONDS: Final = 0.5
"""How often the router is asked, and whoever watches is told."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What a trial looks like at one moment."""

    phase: Phase
    figures: Figures
    clients: Mapping[str, Group]
    """Figures of each client, over the same time."""
    in_flight: Mapping[str, int]
    """By client."""


class Trial:
    """Some clients before one router. To be made in a running event loop, and run once."""

    def __init__(
        self, url: str, speed: float, who: Sequence[Client], times: Timetable, show: Callable[[Glance], None]
    ) -> None:
        """`speed`: emulated seconds in a second of the clock. `show` is called as often as there is news."""
        self._clients = Clients(url, speed)
        self._who = who
        self._times = times
        self._show = show
        self._seconds = times.end / speed
        self._seen = Reading()

    async def run(self) -> Figures:
        """Let it all happen. Raises DemoError."""
        begins = {HEAVY: self._times.heavy}
        await playing(self._clients, self._who, begins, self._seconds, self._watch)
        last = self._glance(self._times.end)
        self._show(last)
        return last.figures

    async def _watch(self) -> None:
        while True:
            reading = await self._clients.read_router()
            now = self._clients.now
            self._seen = reading.joined(self._seen) if now >= self._times.measured else reading
            self._show(self._glance(now))
            await asyncio.sleep(GLANCE_SECONDS)

    def _glance(self, now: float) -> Glance:
        calls, names = self._clients.calls, [client.name for client in self._who]
        seen = figures(calls, names, self._times, now, self._seen)
        begin = self._times.begin(now)
        each = {name: group([call for call in calls if call.client == name], begin, now) for name in names}
        return Glance(self._times.phase(now), seen, each, {name: self._clients.in_flight(name) for name in names})


async def playing(
    clients: Clients,
    who: Sequence[Client],
    begins: Mapping[str, float],
    seconds: float,
    watch: Callable[[], Coroutine[None, None, None]],
) -> None:
    """Let all play for so many seconds of the clock, each from when it begins, and watch; then close all connections.

    `begins`: emulated seconds since the beginning, by name; whoever is not named begins at once. Raises DemoError.
    """
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                tasks.create_task(watch())
                for client in who:
                    tasks.create_task(clients.play(client, begins.get(client.name, 0.0)))
    except ExceptionGroup as failures:
        raise _first(failures) from None
    finally:
        await clients.close()


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """Of what failed together, what failed first."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
