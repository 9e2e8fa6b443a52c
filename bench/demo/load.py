"""Clients on real sockets: they make a workload's calls by the emulated clock and record what they see."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import httpx

from bench.demo.figures import ObservedCall, Reading
from bench.live import completions
from bench.live.player import Player
from bench.workloads.parts.traffic import Call, Client, Ending, Outcome

MODEL: Final = "emulated"
CHUNK_TOKENS: Final = 20
"""Tokens in each event of an answer after its first; with one per event, parsing would cost more than all else."""
CONNECT_SECONDS: Final = 5.0


class DemoError(Exception):
    """The demo cannot continue; the text is one line for the user."""


class Clients:
    """Plays clients against one router.

    Supports only the parts of a `Call` that `HeavyAndLight` uses: each call streams, is not cancelled, and what follows
    does not depend on the text of the answer.
    """

    def __init__(self, url: str, speed: float) -> None:
        """`speed`: emulated seconds per real second."""
        self.calls: list[ObservedCall] = []
        """All calls made, in order of arrival."""
        self._url = url
        self._player = Player(speed, self._make)
        self.play = self._player.play
        """Makes a client's calls from a time on, until it has no more. Raises DemoError, in a group."""
        self._http: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    @property
    def now(self) -> float:
        """Emulated seconds since the beginning."""
        return self._player.now

    def in_flight(self, client: str) -> int:
        """Return the number of this client's calls that have not ended."""
        return sum(call.client == client and call.finished is None for call in self.calls)

    async def read_router(self) -> Reading:
        """Read the service gaps from the router. Raises DemoError."""
        report = json.loads(await self.read("/fairness"))
        reading = Reading()
        for worker in report["workers"].values():
            if worker["window"] is not None:
                reading = reading.joined(Reading(worker["service_gap"], worker["service_gap_bound"]))
        return reading

    async def read(self, path: str) -> str:
        """Return the router's answer to a GET. Raises DemoError."""
        async with self._connection() as http:
            return (await http.get(path)).raise_for_status().text

    async def close(self) -> None:
        """Close all connections."""
        for http in self._http:
            await http.aclose()

    async def _make(self, client: Client, call: Call) -> Ending:
        body = completions.body(MODEL, client.name, call, stream_interval=CHUNK_TOKENS)
        live = ObservedCall(client.name, arrived=self.now)
        self.calls.append(live)
        async with self._connection() as http, http.stream("POST", completions.PATH, content=body) as response:
            if response.status_code != 200:
                words = (await response.aread()).decode(errors="replace").split()
                raise DemoError(f"the router answered {response.status_code}: {' '.join(words)}")
            async for line in response.aiter_lines():
                read_answer_line(live, line, self.now)
        if not live.tokens.output:
            raise DemoError("an answer ended before its usage came")
        live.finished = self.now
        return Ending(Outcome.DONE, live.finished)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """Yield an HTTP client for one call at a time. Raises DemoError for HTTP errors inside.

        A shared client would search all of its connections at each call, which costs more than the call.
        """
        http = self._idle.pop() if self._idle else self._connect()
        try:
            yield http
        except httpx.HTTPError as error:
            message = f"the router at {self._url} broke off: {type(error).__name__} {error}"
            raise DemoError(" ".join(message.split())) from None
        self._idle.append(http)

    def _connect(self) -> httpx.AsyncClient:
        # Without a read timeout: if the router stops answering, the demo still ends by its own timetable.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        kind = {"content-type": "application/json"}
        http = httpx.AsyncClient(base_url=self._url, timeout=timeout, headers=kind, trust_env=False, verify=False)
        self._http.append(http)
        return http


def read_answer_line(call: ObservedCall, line: str, now: float) -> None:
    """Parse one line of an answer. Raises DemoError if it reports a failure."""
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
