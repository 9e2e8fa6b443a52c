"""Runs emulated workers on real sockets, with helpers for a client that reads their answers byte by byte."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, Final

import aiohttp
import orjson

from workers.server.process import WorkerServer
from workers.settings import WorkerSettings

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
USAGE: Final = {"include_usage": True}
CONTINUOUS: Final = {"include_usage": True, "continuous_usage_stats": True}
Json = dict[str, Any]


@contextmanager
def worker(**settings: Any) -> Iterator[str]:
    """Run a worker in a thread with its own event loop. Yields its URL."""
    with worker_server(**settings) as server:
        yield server.url


@contextmanager
def worker_server(**settings: Any) -> Iterator[WorkerServer]:
    """Run a worker in a thread with its own event loop."""
    defaults: Json = {"port": 0, "model": "tiny", "hardware": "instant", "block_size": 4}
    server = WorkerServer(WorkerSettings(**(defaults | settings)))
    thread = Thread(target=asyncio.run, args=(server.run(),))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def chat(content: str = "hi", **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "ignore_eos": True} | fields


def text(prompt: Any = "once upon a time", **fields: Any) -> Json:
    return {"prompt": prompt, "max_tokens": 3, "ignore_eos": True} | fields


async def call(http: aiohttp.ClientSession, url: str, body: Any, status: int = 200, **headers: str) -> Any:
    """The JSON answer to a call."""
    async with http.post(url, json=body, headers=headers) as response:
        answer = orjson.loads(await response.read())
        assert response.status == status, answer
        return answer


async def stream(http: aiohttp.ClientSession, url: str, body: Json, **headers: str) -> list[Json]:
    """The events of a stream, which must end with [DONE]."""
    async with http.post(url, json=body | {"stream": True}, headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        *events, done, rest = (await response.read()).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


async def series(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Samples of /metrics by name, summed over their labels."""
    async with http.get(f"{url}/metrics") as response:
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    values: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] = values.get(name.partition("{")[0], 0.0) + float(value)
    return values


async def eventually(condition: Callable[[], Awaitable[bool]], tries: int = 6000) -> None:
    """Poll until a condition is true, a bounded number of times."""
    for _ in range(tries):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never became true")


def content(events: list[Json], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
