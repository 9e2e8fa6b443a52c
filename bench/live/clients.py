"""A workload against an OpenAI-compatible server, by the clock: the same clients as in virtual time, over sockets."""

import asyncio
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from typing import Final

import aiohttp

from bench.live import completions
from bench.live.books import Books, LiveResult
from bench.live.call import LiveFlight
from bench.live.player import Player
from bench.workloads.parts.prompts import random_tokens
from bench.workloads.parts.traffic import Call, Client, Ending, Outcome, Workload

CONNECT_SECONDS: Final = 5.0
KEEP_ALIVE_SECONDS: Final = 3.0
"""Shorter than the five seconds after which servers close what rests, so that no call meets that."""
SAMPLE_SECONDS: Final = 0.5
"""Between two looks at what the clients were served, by the servers' clock."""
TOLD: Final = 200
"""Characters of a server's error message that are repeated."""


class LoadError(Exception):
    """What the load cannot begin with; its text is one line for whoever started it."""


@dataclass(frozen=True, slots=True)
class LiveLoad:
    """What is sent where. Raises ValueError where it makes no sense."""

    url: str
    workload: Workload
    seconds: float = 60.0
    """When it ends, by the servers' clock as all times here."""
    warmup: float = 0.0
    """From when on it is measured."""
    seed: int = 0
    speed: float = 1.0
    """How many times faster the servers' clock runs than that on the wall."""
    model: str | None = None
    """None for the first that the server names."""
    key_prefix: str = "bench-"
    """Each client's API key and `user` are this and its name."""
    api_key: str | None = None
    """The key of all clients, where the server checks keys: they differ by `user` alone then."""
    stream_interval: int | None = None
    """See `bench.live.completions.body`."""
    vocabulary: int | None = None
    """See `bench.live.completions.body`."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.seconds < inf:
            raise ValueError("seconds must be finite, and more than the warm-up")
        if not 0 < self.speed < inf:
            raise ValueError("speed must be positive and finite")
        if any(number is not None and number < 1 for number in (self.stream_interval, self.vocabulary)):
            raise ValueError("the stream interval and the vocabulary must be at least 1")

    @property
    def base(self) -> str:
        """The server's address, to which paths are appended."""
        return self.url.rstrip("/").removesuffix("/v1")


async def run_load(load: LiveLoad, show: Callable[[float], None] = lambda _: None) -> LiveResult:
    """Let it all happen, until its time is over or SIGINT comes; `show` is told the time now and then.

    Raises LoadError if the server is not there or has no model.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(
        connector=connector, timeout=patience, cookie_jar=aiohttp.DummyCookieJar()
    ) as http:
        model = load.model or await _first_model(http, load)
        return await _Run(load, http, model, show).run()


async def _first_model(http: aiohttp.ClientSession, load: LiveLoad) -> str:
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    try:
        async with http.get(f"{load.base}/v1/models", headers=headers) as response:
            if response.status != 200:
                raise LoadError(f"{load.base}/v1/models answered {await _told(response)}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        reason = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        raise LoadError(f"no server at {load.base}: {reason}") from None
    except (ValueError, LookupError, TypeError):
        raise LoadError(f"{load.base}/v1/models names no model") from None


class _Run:
    """One run of one load."""

    def __init__(self, load: LiveLoad, http: aiohttp.ClientSession, model: str, show: Callable[[float], None]) -> None:
        self._load = load
        self._http = http
        self._model = model
        self._show = show
        self._player = Player(load.speed, self._make)
        self._clients = load.workload.clients(load.seed)
        self._books = Books(load.warmup, load.seconds, {client.name: client.weight for client in self._clients})
        self._failures: Counter[str] = Counter()
        self._name = secrets.token_hex(4)
        self._numbers = count(1)

    async def run(self) -> LiveResult:
        """See `run_load`."""
        interrupted = False
        with suppress(TimeoutError):
            async with asyncio.timeout(self._load.seconds / self._load.speed) as limit:

                def interrupt() -> None:
                    nonlocal interrupted
                    interrupted = True
                    limit.reschedule(asyncio.get_running_loop().time())

                with _on_interrupt(interrupt):
                    await self._play()
        end = min(self._player.now, self._load.seconds) if interrupted else self._load.seconds
        return self._books.result(end, self._failures, interrupted=interrupted)

    async def _play(self) -> None:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            async with asyncio.TaskGroup() as playing:
                for client in self._clients:
                    playing.create_task(self._player.play(client))
            watching.cancel()

    async def _watch(self) -> None:
        for number in count():
            await self._player.until(number * SAMPLE_SECONDS)
            self._books.sample(self._player.now)
            self._show(self._player.now)

    async def _make(self, client: Client, call: Call) -> Ending:
        """Make one call; whatever comes of it is an ending."""
        live = LiveFlight(f"{self._name}-{next(self._numbers)}", client, call, self._player.now)
        self._books.arrived(live, late=live.arrived - call.at)
        try:
            pause = None if call.cancel_after is None else call.cancel_after / self._load.speed
            async with asyncio.timeout(pause):
                outcome = await self._ask(live)
        except TimeoutError:
            outcome = Outcome.CANCELLED
        except completions.AnswerFailed as error:
            outcome = self._failed(str(error))
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            outcome = self._failed(f"{type(error).__name__} {error}")
        now = self._player.now
        live.ended(outcome, now)
        self._books.ended(live, now)
        return Ending(outcome, now, self._answer(live) if outcome is Outcome.DONE else ())

    async def _ask(self, live: LiveFlight) -> Outcome:
        load, user = self._load, f"{self._load.key_prefix}{live.client.name}"
        body = completions.body(
            self._model,
            user,
            live.call,
            stream_interval=load.stream_interval,
            usage_in_events=True,
            vocabulary=load.vocabulary,
        )
        headers = {
            "Authorization": f"Bearer {load.api_key or user}",
            "Content-Type": "application/json",
            "X-Request-Id": live.id,
        }
        async with self._http.post(load.base + completions.PATH, data=body, headers=headers) as response:
            if response.status != 200:
                outcome = self._failed(await _told(response))
                return Outcome.REJECTED if response.status == 429 or _dropped(response) else outcome
            live.began(response.headers, load.speed)
            await self._read(live, response)
        if live.complete is None:
            raise completions.AnswerFailed("an answer ended before its usage came")
        return Outcome.DONE

    async def _read(self, live: LiveFlight, response: aiohttp.ClientResponse) -> None:
        if not live.call.streamed:
            live.take(await response.read())
            self._books.heard(live, self._player.now)
            return
        async for block in response.content.iter_any():
            now = self._player.now
            live.feed(block, now)
            self._books.heard(live, now)

    def _failed(self, reason: str) -> Outcome:
        self._failures[" ".join(reason.split())[:TOLD]] += 1
        return Outcome.FAILED

    def _answer(self, live: LiveFlight) -> tuple[int, ...]:
        """Token ids that stand for the answer's text: as many as it has, and equal for equal texts."""
        return random_tokens(Random("".join(live.answer)), live.tokens)


async def _told(response: aiohttp.ClientResponse) -> str:
    return f"{response.status}: {(await response.read()).decode(errors='replace')}"


def _dropped(response: aiohttp.ClientResponse) -> bool:
    """Whether our router refused it, rather than something having failed."""
    return "x-d2lpm-dropped-reason" in response.headers


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Do this at SIGINT instead of ending, once: the next one ends."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        act()

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
