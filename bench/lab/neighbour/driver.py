"""Drive one server, or several in turn, from real sockets, and record what the clients see in the simulator's records.

Unlike `bench.live`, prompts are text, and nothing is requested that only some servers support: the length of an answer
and its cached tokens are counted when the answer has ended.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, cycle
from math import inf
from typing import Final

import aiohttp
import orjson

from bench.lab.neighbour.traffic import spoken
from bench.live import completions
from bench.live.call import HttpCall
from bench.live.clients import CONNECT_SECONDS, ERROR_CHARACTERS, KEEP_ALIVE_SECONDS, SAMPLE_SECONDS, LoadError
from bench.live.player import Player
from bench.live.recorder import LiveResult, LoadRecorder
from bench.workloads.parts.traffic import Call, Client, Ending, Outcome, Workload

MODELS: Final = "/v1/models"


@dataclass(frozen=True, slots=True)
class Target:
    """The target of the calls. Raises ValueError if it is invalid."""

    urls: Sequence[str]
    """One server, or several that take the calls in turn."""
    model: str | None = None
    """The model's name; None for the first that the first server lists."""
    speed: float = 1.0
    """How many times faster the servers' clock runs than real time."""
    api_key: str | None = None
    """One key for all clients, if the server checks keys; otherwise each client's key is its name."""
    stream_interval: int | None = None
    """Passed to `bench.live.completions.body`."""

    def __post_init__(self) -> None:
        if not self.urls or not 0 < self.speed < inf:
            raise ValueError("there must be a server, and the speed must be positive and finite")

    @property
    def bases(self) -> Sequence[str]:
        """The servers' addresses, to which paths are appended."""
        return [url.rstrip("/").removesuffix("/v1") for url in self.urls]


@dataclass(frozen=True, slots=True)
class Span:
    """The length of a run, in seconds by the servers' clock. Raises ValueError if nothing is left to measure."""

    seconds: float
    warmup: float

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.seconds < inf:
            raise ValueError("seconds must be finite, and more than the warm-up")


async def drive(
    target: Target, workload: Workload, span: Span, seed: int, show: Callable[[float], None] = lambda _: None
) -> LiveResult:
    """Play the workload until its time is over or it has ended; `show` is called with the time. Raises LoadError.

    Calls still open at the end are cancelled and recorded as unfinished.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=patience) as http:
        model = target.model or await _first_model(http, target)
        return await _Drive(http, target, model, workload.clients(seed), span).run(show)


async def _first_model(http: aiohttp.ClientSession, target: Target) -> str:
    url = target.bases[0] + MODELS
    try:
        async with http.get(url, headers=_headers(target.api_key or "")) as response:
            return str(orjson.loads(await response.read())["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        raise LoadError(f"no server at {url}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise LoadError(f"{url} names no model") from None


class _Drive:
    """One run."""

    def __init__(
        self, http: aiohttp.ClientSession, target: Target, model: str, clients: Sequence[Client], span: Span
    ) -> None:
        self._http = http
        self._target = target
        self._model = model
        self._clients = clients
        self._span = span
        self._bases = cycle(target.bases)
        self._player = Player(target.speed, self._make)
        self._recorder = LoadRecorder(span.warmup, span.seconds, {client.name: client.weight for client in clients})
        self._failures: Counter[str] = Counter()
        self._numbers = count(1)

    async def run(self, show: Callable[[float], None]) -> LiveResult:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._span.seconds / self._target.speed), asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(show))
                async with asyncio.TaskGroup() as playing:
                    for client in self._clients:
                        playing.create_task(self._player.play(client))
                watching.cancel()
        return self._recorder.result(self._span.seconds, self._failures, interrupted=False)

    async def _watch(self, show: Callable[[float], None]) -> None:
        for number in count():
            await self._player.wait_until(number * SAMPLE_SECONDS)
            self._recorder.sample(self._player.now)
            show(self._player.now)

    async def _make(self, client: Client, call: Call) -> Ending:
        """Make one call and wait for its end, however it ends."""
        live = HttpCall(str(next(self._numbers)), client, call, self._player.now)
        self._recorder.on_sent(live, late=live.arrived - call.at)
        try:
            outcome = await self._ask(live)
        except (completions.AnswerFailed, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            outcome = self._failed(f"{type(error).__name__} {error}")
        now = self._player.now
        live.end(outcome, now)
        self._recorder.on_end(live, now)
        return Ending(outcome, now)

    async def _ask(self, live: HttpCall) -> Outcome:
        url, name = next(self._bases) + completions.PATH, live.client.name
        headers = _headers(self._target.api_key or name) | {"Content-Type": "application/json"}
        async with self._http.post(url, data=self._body(live.call, name), headers=headers) as response:
            if response.status != 200:
                outcome = self._failed(f"{response.status}: {(await response.read()).decode(errors='replace')}")
                return Outcome.REJECTED if response.status == 429 else outcome
            async for block in response.content.iter_any():
                now = self._player.now
                live.feed(block, now)
                self._recorder.on_tokens(live, now)
        if live.complete is None:
            raise completions.AnswerFailed("an answer ended before its usage came")
        return Outcome.DONE

    def _body(self, call: Call, user: str) -> bytes:
        fields: dict[str, object] = {
            "model": self._model,
            "user": user,
            "prompt": spoken(call.prompt),
            "max_tokens": call.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.stream_interval is not None:
            fields["stream_interval"] = self._target.stream_interval
        return orjson.dumps(fields)

    def _failed(self, reason: str) -> Outcome:
        self._failures[" ".join(reason.split())[:ERROR_CHARACTERS]] += 1
        return Outcome.FAILED


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
