"""The clients: each asks, reads and checks the answer, and asks again; some leave before the end."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Final

import aiohttp

from .asks import Ask, Asks
from .reading import Ending, Reading, Verdict

NEVER: Final = 90.0
"""Seconds after which a call that has not ended hangs, which is wrong."""
BACK_OFF: Final = 0.2
"""Seconds to wait at least behind an error."""
OUTPUT_WEIGHT: Final = 2
"""Cost of a token of output, in tokens of input, as the router counts it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call ended; times are seconds since the clients began."""

    ask: Ask
    request: str
    """Its id."""
    sent: float
    ended: float
    verdict: Verdict


class Client:
    """One who asks. `waiting` and `service` are what it is owed and was given so far."""

    def __init__(self, name: str, random: Random, *, greedy: bool, vanishing: float) -> None:
        """`greedy`: always has more waiting; else it thinks between calls. `vanishing`: share of calls it leaves."""
        self.name = name
        self.greedy = greedy
        self.waiting = 0
        """Calls that nothing came back of yet."""
        self.service = 0.0
        """Cost of what it was given."""
        self._asks = Asks(name, random, shared=not greedy)
        self._random = random
        self._vanishing = vanishing
        self._number = 0

    async def ask_on(self, crowd: "Crowd", think: float) -> None:
        """Ask until it is over; between two calls think for about so many seconds."""
        await crowd.pause(self._random.uniform(0, think))
        while not crowd.over.is_set():
            ask = self._asks.next()
            self._number += 1
            stays = None if self._random.random() >= self._vanishing else self._random.uniform(0.0, 1.5)
            ending = await crowd.ask(self, ask, f"{self.name}.{self._number}", stays)
            pause = self._random.expovariate(1 / think) if think else 0.0
            await crowd.pause(max(pause, BACK_OFF) if ending is Ending.ERROR else pause)


class Crowd:
    """All clients before one router."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        """`clock`: seconds since the clients began."""
        self.outcomes: list[Outcome] = []
        self.over = asyncio.Event()
        """No call begins any more."""
        self._url = url
        self._clock = clock
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until it is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()

    async def ask(self, client: Client, ask: Ask, name: str, stays: float | None) -> Ending:
        """Send a call and follow it to its end, or leave it after `stays` seconds."""
        sent = self._clock()
        try:
            async with asyncio.timeout(NEVER if stays is None else stays):
                verdict = await self._follow(client, ask, name)
        except TimeoutError:
            verdict = Verdict(Ending.VANISHED) if stays is not None else Verdict(Ending.WRONG, "no end")
        except aiohttp.ClientError as error:
            verdict = Verdict(Ending.WRONG, f"cut: {error!r}")
        self.outcomes.append(Outcome(ask, name, sent, self._clock(), verdict))
        return verdict.ending

    async def _follow(self, client: Client, ask: Ask, name: str) -> Verdict:
        headers = {"content-type": "application/json", "x-request-id": name}
        client.waiting += 1
        waits = True
        try:
            async with self._http.post(self._url + ask.path, data=ask.body, headers=headers) as response:
                reading = Reading(ask, response.status)
                async for block in response.content.iter_any():
                    tokens = reading.feed(block)
                    if waits and (tokens or not ask.streamed):
                        waits = False
                        client.waiting -= 1
                        client.service += ask.prompt_tokens
                    client.service += OUTPUT_WEIGHT * tokens
                verdict = reading.verdict()
                if verdict.ending is Ending.COMPLETE and not ask.streamed:
                    client.service += OUTPUT_WEIGHT * ask.output_tokens
                return verdict
        finally:
            client.waiting -= waits


def make_clients(seed: int, number: int, greedy: int, vanishing: float = 0.0) -> list[Client]:
    """So many, of which the first are greedy; what each does follows from the seed."""
    return [
        Client(f"client-{each}", Random(f"{seed} {each}"), greedy=each < greedy, vanishing=vanishing)
        for each in range(number)
    ]


async def ask_all(crowd: Crowd, clients: list[Client], calls: int, think: float) -> None:
    """Let all ask until it is over: the greedy ones so many calls at once, the others one, with pauses between."""
    asking: list[Awaitable[None]] = []
    for client in clients:
        asking += [client.ask_on(crowd, 0.0) for _ in range(calls)] if client.greedy else [client.ask_on(crowd, think)]
    await asyncio.gather(*asking)
