"""Run a workload over sockets in real time against an OpenAI-compatible server, with the simulator's clients."""

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
from bench.live.call import HttpCall
from bench.live.player import Player
from bench.live.recorder import LiveResult, LoadRecorder
from bench.workloads.parts.prompts import random_tokens
from bench.workloads.parts.traffic import Call, Client, Ending, Outcome, Workload

CONNECT_SECONDS: Final = 5.0
KEEP_ALIVE_SECONDS: Final = 3.0
"""Less than the five seconds after which servers close idle connections, so that no call meets a closed one."""
SAMPLE_SECONDS: Final = 0.5
"""Interval at which the clients' service is sampled, by the servers' clock."""
ERROR_CHARACTERS: Final = 200
"""Characters of a server's error message that are shown."""


class LoadError(Exception):
    """The load cannot start; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class LiveLoad:
    """A load and its target. Raises ValueError if a value is invalid."""

    url: str
    workload: Workload
    seconds: float = 60.0
    """When the load ends; all times are by the servers' clock."""
    warmup: float = 0.0
    """Seconds at the start that are not measured."""
    seed: int = 0
    speed: float = 1.0
    """How many times faster the servers' clock runs than real time."""
    model: str | None = None
    """The model's name; None for the first that the server lists."""
    key_prefix: str = "bench-"
    """Each client's API key and `user` are this prefix and the client's name."""
    api_key: str | None = None
    """One key for all clients, if the server checks keys; the clients then differ only by `user`."""
    stream_interval: int | None = None
    """Passed to `bench.live.completions.body`."""
    vocabulary: int | None = None
    """Passed to `bench.live.completions.body`."""

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
    """Run the load until its time is over or SIGINT arrives. `show` is called with the time at intervals.

    Raises LoadError if the server cannot be reached or has no model.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http:
        model = load.model or await _first_model(http, load)
        return await _Run(load, http, model, show).run()


async def _first_model(http: aiohttp.ClientSession, load: LiveLoad) -> str:
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    try:
        async with http.get(f"{load.base}/v1/models", headers=headers) as response:
            if response.status != 200:
                raise LoadError(f"{load.base}/v1/models answered {await _error_text(response)}")
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
        self._recorder = LoadRecorder(
            load.warmup, load.seconds, {client.name: client.weight for client in self._clients}
        )
        self._failures: Counter[str] = Counter()
        self._name = secrets.token_hex(4)
        self._numbers = count(1)

    async def run(self) -> LiveResult:
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
        return self._recorder.result(end, self._failures, interrupted=interrupted)

    async def _play(self) -> None:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            async with asyncio.TaskGroup() as playing:
                for client in self._clients:
                    playing.create_task(self._player.play(client))
            watching.cancel()

    async def _watch(self) -> None:
        for number in count():
            await self._player.wait_until(number * SAMPLE_SECONDS)
            self._recorder.sample(self._player.now)
            self._show(self._player.now)

    async def _make(self, client: Client, call: Call) -> Ending:
        """Make one call and wait for its end, however it ends."""
        live = HttpCall(f"{self._name}-{next(self._numbers)}", client, call, self._player.now)
        self._recorder.on_sent(live, late=live.arrived - call.at)
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
        live.end(outcome, now)
        self._recorder.on_end(live, now)
        return Ending(outcome, now, self._answer(live) if outcome is Outcome.DONE else ())

    async def _ask(self, live: HttpCall) -> Outcome:
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
        if live.call.session is not None:
            headers["X-Session-Id"] = live.call.session
        async with self._http.post(load.base + completions.PATH, data=body, headers=headers) as response:
            if response.status != 200:
                outcome = self._failed(await _error_text(response))
                return Outcome.REJECTED if response.status == 429 or _dropped(response) else outcome
            live.on_headers(response.headers, load.speed)
            await self._read(live, response)
        if live.complete is None:
            raise completions.AnswerFailed("an answer ended before its usage came")
        return Outcome.DONE

    async def _read(self, live: HttpCall, response: aiohttp.ClientResponse) -> None:
        if not live.call.streamed:
            live.set_answer(await response.read())
            self._recorder.on_tokens(live, self._player.now)
            return
        async for block in response.content.iter_any():
            now = self._player.now
            live.feed(block, now)
            self._recorder.on_tokens(live, now)

    def _failed(self, reason: str) -> Outcome:
        self._failures[" ".join(reason.split())[:ERROR_CHARACTERS]] += 1
        return Outcome.FAILED

    def _answer(self, live: HttpCall) -> tuple[int, ...]:
        """Return token ids that stand for the answer's text: as many as it has, and equal for equal texts."""
        return random_tokens(Random("".join(live.answer)), live.tokens)


async def _error_text(response: aiohttp.ClientResponse) -> str:
    return f"{response.status}: {(await response.read()).decode(errors='replace')}"


def _dropped(response: aiohttp.ClientResponse) -> bool:
    """True if our router rejected the call, as opposed to a failure."""
    return "x-d2lpm-dropped-reason" in response.headers


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at the first SIGINT instead of exiting; the second one exits."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        act()

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
