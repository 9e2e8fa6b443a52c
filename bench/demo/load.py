"""Clients on real sockets: they make a workload's calls by the emulated machine's clock, and note what they see."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import httpx

from bench.demo.figures import LiveCall, Reading
from bench.live import completions
from bench.live.player import Player
from bench.workloads.parts.traffic import Call, Client, Ending, Outcome

MODEL: Final = "emulated"
CHUNK_TOKENS: Final = 20
"""Tokens in each event of an answer after its first: with one in each, reading them would cost more than all else."""
CONNECT_SECONDS: Final = 5.0


class DemoError(Exception):
    """What the demo cannot go on with; its text is one line for whoever started it."""


class Clients:
    """Plays clients against one router.

    Of a `Call` it heeds what `HeavyAndLight` makes use of: each streams, nobody leaves before its end, and what
    follows does not depend on the answer's text.
    """

    def __init__(self, url: str, speed: float) -> None:
        """`speed`: emulated seconds in a second of the clock."""
        self.calls: list[LiveCall] = []
        """All that were made, in order of arrival."""
        self._url = url
        self._player = Player(speed, self._make)
        self.play = self._player.play
        """Makes a client's calls from a time on, for as long as it has any. Raises DemoError, in a group."""
        self._http: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    @property
    def now(self) -> float:
        """Emulated seconds since the beginning."""
        return self._player.now

    def in_flight(self, client: str) -> int:
        """How many calls of this client have not ended."""
        return sum(call.client == client and call.finished is None for call in self.calls)

    async def read_router(self) -> Reading:
        """Ask the router for its gaps. Raises DemoError."""
        report = json.loads(await self.read("/fairness"))
        reading = Reading()
        for worker in report["workers"].values():
            if worker["window"] is not None:
                reading = reading.joined(Reading(worker["service_gap"], worker["service_gap_bound"]))
        return reading

    async def read(self, path: str) -> str:
        """What the router answers to a GET. Raises DemoError."""
        async with self._connection() as http:
            return (await http.get(path)).raise_for_status().text

    async def close(self) -> None:
        """Close all connections."""
        for http in self._http:
            await http.aclose()

    async def _make(self, client: Client, call: Call) -> Ending:
        body = completions.body(MODEL, client.name, call, stream_interval=CHUNK_TOKENS)
        live = LiveCall(client.name, arrived=self.now)
        self.calls.append(live)
        async with self._connection() as http, http.stream("POST", completions.PATH, content=body) as response:
            if response.status_code != 200:
                words = (await response.aread()).decode(errors="replace").split()
                raise DemoError(f"the router answered {response.status_code}: {' '.join(words)}")
            async for line in response.aiter_lines():
                hear(live, line, self.now)
        if not live.tokens.output:
            raise DemoError("an answer ended before its usage came")
        live.finished = self.now
        return Ending(Outcome.DONE, live.finished)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client for one call at a time. Raises DemoError for what fails in it.

        One for all would look through all of its connections at each call, which costs more than the call.
        """
        http = self._idle.pop() if self._idle else self._connect()
        try:
            yield http
        except httpx.HTTPError as error:
            told = f"the router at {self._url} broke off: {type(error).__name__} {error}"
            raise DemoError(" ".join(told.split())) from None
        self._idle.append(http)

    def _connect(self) -> httpx.AsyncClient:
        # A router that stops answering is no failure of the call: the demo ends by its own timetable.
        patience = httpx.Timeout(None, connect=CONNECT_SECONDS)
        kind = {"content-type": "application/json"}
        http = httpx.AsyncClient(base_url=self._url, timeout=patience, headers=kind, trust_env=False, verify=False)
        self._http.append(http)
        return http


def hear(call: LiveCall, line: str, now: float) -> None:
    """Take in one line of an answer. Raises DemoError if it tells of a failure."""
    try:
        event = completions.event(line.encode())
    except completions.AnswerFailed as error:
        raise DemoError(f"a request failed: {error}") from None
    if event is None:
        return
    if call.started is None:
        call.started = now
    if usage := event.get("usage"):
        call.tokens = completions.tokens(usage)
