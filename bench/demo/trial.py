"""Run the load under one policy: the light clients alone, then the heavy one beside them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from bench.demo.figures import HEAVY, Figures, Group, Phase, Reading, Timetable, figures, group
from bench.demo.load import Clients
from bench.workloads.parts.traffic import Client

SNAPSHOT_SECONDS: Final = 0.5
"""Interval at which the router is read and the screen updated."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of a trial at one moment."""

    phase: Phase
    figures: Figures
    clients: Mapping[str, Group]
    """Figures of each client, over the same time."""
    in_flight: Mapping[str, int]
    """Calls in flight of each client."""


class Trial:
    """Some clients in front of one router. Create it in a running event loop, and run it once."""

    def __init__(
        self, url: str, speed: float, participants: Sequence[Client], times: Timetable, show: Callable[[Snapshot], None]
    ) -> None:
        """`speed`: emulated seconds per real second. `show`: called with every new snapshot."""
        self._clients = Clients(url, speed)
        self._participants = participants
        self._times = times
        self._show = show
        self._seconds = times.end / speed
        self._seen = Reading()

    async def run(self) -> Figures:
        """Run the trial. Raises DemoError."""
        begins = {HEAVY: self._times.heavy}
        await play_clients(self._clients, self._participants, begins, self._seconds, self._watch)
        last = self._snapshot(self._times.end)
        self._show(last)
        return last.figures

    async def _watch(self) -> None:
        while True:
            reading = await self._clients.read_router()
            now = self._clients.now
            self._seen = reading.joined(self._seen) if now >= self._times.measured else reading
            self._show(self._snapshot(now))
            await asyncio.sleep(SNAPSHOT_SECONDS)

    def _snapshot(self, now: float) -> Snapshot:
        calls, names = self._clients.calls, [client.name for client in self._participants]
        seen = figures(calls, names, self._times, now, self._seen)
        begin = self._times.measured_from(now)
        each = {name: group([call for call in calls if call.client == name], begin, now) for name in names}
        return Snapshot(self._times.phase(now), seen, each, {name: self._clients.in_flight(name) for name in names})


async def play_clients(
    clients: Clients,
    participants: Sequence[Client],
    begins: Mapping[str, float],
    seconds: float,
    watch: Callable[[], Coroutine[None, None, None]],
) -> None:
    """Play all clients for `seconds` real seconds, and run `watch` beside them; then close all connections.

    `begins`: when a client begins, in emulated seconds since the beginning; clients not named begin at once. Raises
    DemoError.
    """
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                tasks.create_task(watch())
                for client in participants:
                    tasks.create_task(clients.play(client, begins.get(client.name, 0.0)))
    except ExceptionGroup as failures:
        raise _first(failures) from None
    finally:
        await clients.close()


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    """Return the first of several exceptions raised together."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first
