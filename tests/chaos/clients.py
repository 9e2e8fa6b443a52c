"""The clients: each one sends calls in turn and checks the answers; some disconnect before the end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Final

import aiohttp

from .asks import Ask, Asks
from .reading import Ending, Reading, Verdict

HUNG_SECONDS: Final = 90.0
"""Seconds after which an unfinished call counts as hung."""
BACK_OFF: Final = 0.2
"""Least seconds to wait after an error."""
OUTPUT_WEIGHT: Final = 2
"""Cost of an output token in input tokens, as the router charges it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call ended; times are seconds since the clients began."""

    ask: Ask
    request: str
    """The request id."""
    sent: float
    ended: float
    verdict: Verdict
    received: int = 0
    """Output tokens of a stream that the client has received."""
    reused: bool = False
    """Whether it was sent over a connection that an earlier call had used."""


@dataclass(slots=True)
class Progress:
    """How far a call is."""

    tokens: int = 0
    """Output tokens received, of a stream."""
    reused: bool = False
    """Whether it was sent over a connection that an earlier call had used."""


class Client:
    """A client. `waiting` counts its calls without an answer so far, `service` is the cost of what it received."""

    def __init__(self, name: str, random: Random, *, greedy: bool, vanishing: float = 0.0, times: int = 1) -> None:
        """`greedy`: calls without pauses; others think between calls. `vanishing`: share of calls it disconnects
        from. `times`: as in `Asks`.
        """
        self.name = name
        self.greedy = greedy
        self.waiting = 0
        """Calls whose answer has not begun."""
        self.service = 0.0
        """Cost of what it has received."""
        self._asks = Asks(name, random, shared=not greedy, times=times)
        self._random = random
        self._vanishing = vanishing
        self._number = 0

    async def call_repeatedly(self, crowd: "Crowd", think: float) -> None:
        """Make calls until the run is over, with pauses of about `think` seconds."""
        await crowd.pause(self._random.uniform(0, think))
        while not crowd.over.is_set():
            ask = self._asks.next()
            self._number += 1
            stays = None if self._random.random() >= self._vanishing else self._random.uniform(0.0, 1.5)
            ending = await crowd.ask(self, ask, f"{self.name}.{self._number}", stays)
            pause = self._random.expovariate(1 / think) if think else 0.0
            await crowd.pause(max(pause, BACK_OFF) if ending is Ending.ERROR else pause)


class Crowd:
    """All clients of one router."""

    def __init__(self, url: str, clock: Callable[[], float], headers: Mapping[str, str] | None = None) -> None:
        """`clock`: seconds since the clients began; `headers`: more of each call."""
        self.outcomes: list[Outcome] = []
        self.over = asyncio.Event()
        """Set when no more calls are to begin."""
        self._url = url
        self._clock = clock
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            trace_configs=[trace],
        )

    def now(self) -> float:
        """Return the seconds since the clients began."""
        return self._clock()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def pause(self, seconds: float) -> None:
        """Wait for this time, or until the run is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()

    async def ask(self, client: Client, ask: Ask, name: str, stays: float | None) -> Ending:
        """Make a call and read its answer to the end, or disconnect after `stays` seconds."""
        sent, progress = self._clock(), Progress()
        try:
            async with asyncio.timeout(HUNG_SECONDS if stays is None else stays):
                verdict = await self._follow(client, ask, name, progress)
        except TimeoutError:
            verdict = Verdict(Ending.VANISHED) if stays is not None else Verdict(Ending.WRONG, "no end")
        except aiohttp.ClientError as error:
            verdict = Verdict(Ending.WRONG, f"cut: {error!r}")
        self.outcomes.append(Outcome(ask, name, sent, self._clock(), verdict, progress.tokens, progress.reused))
        return verdict.ending

    async def _follow(self, client: Client, ask: Ask, name: str, progress: Progress) -> Verdict:
        headers = {"content-type": "application/json", "x-request-id": name}
        client.waiting += 1
        waits = True
        try:
            url = self._url + ask.path
            async with self._http.post(url, data=ask.body, headers=headers, trace_request_ctx=progress) as response:
                reading = Reading(ask, response.status)
                async for block in response.content.iter_any():
                    tokens = reading.feed(block)
                    progress.tokens += tokens
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


async def _note_reuse(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.reused = True


def make_clients(seed: int, number: int, greedy: int, vanishing: float = 0.0) -> list[Client]:
    """Return `number` clients, the first `greedy` of them greedy; the seed determines what each one does."""
    return [
        Client(f"client-{each}", Random(f"{seed} {each}"), greedy=each < greedy, vanishing=vanishing)
        for each in range(number)
    ]


async def ask_all(crowd: Crowd, clients: list[Client], calls: int, think: float) -> None:
    """Run all clients until the run is over: greedy ones with `calls` calls at once, others with one and with
    pauses.
    """
    asking: list[Awaitable[None]] = []
    for client in clients:
        asking += (
            [client.call_repeatedly(crowd, 0.0) for _ in range(calls)]
            if client.greedy
            else [client.call_repeatedly(crowd, think)]
        )
    await asyncio.gather(*asking)
