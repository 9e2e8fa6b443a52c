"""Prefill and decode on two emulated SGLang servers: both legs at once, in a room, as a router sees it."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.support.workers_http import CHAT, TEXT, Json, call, chat, text, worker

PROMPT = "the same long beginning of every prompt " * 8


@pytest.fixture(scope="module")
def prefill() -> Iterator[str]:
    with worker(dialect="sglang", role="prefill") as url:
        yield url


@pytest.fixture(scope="module")
def decode() -> Iterator[str]:
    with worker(dialect="sglang", role="decode") as url:
        yield url


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    with worker(dialect="sglang") as url:
        yield url


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def room(http: aiohttp.ClientSession, prefill: str, number: int) -> Json:
    """Return the fields that both legs need, as a router finds them."""
    async with http.get(f"{prefill}/server_info") as response:
        info = await response.json()
    assert info["disaggregation_mode"] == "prefill"
    return {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": info["disaggregation_bootstrap_port"],
        "bootstrap_room": number,
    }


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(PROMPT)), (TEXT, text(PROMPT, max_tokens=20))])
async def test_two_legs_answer_as_one_engine(
    prefill: str, decode: str, alone: str, http: aiohttp.ClientSession, path: str, body: Json
) -> None:
    """Text and usage of the decode leg are those of one engine, and its cached tokens those of the prefill leg."""
    for again in range(2):
        legs = body | await room(http, prefill, 10 + again)
        first, second = await asyncio.gather(call(http, prefill + path, legs), call(http, decode + path, legs))
        truth = await call(http, alone + path, body)
        key = "message" if path == CHAT else "text"
        assert second["choices"][0][key] == truth["choices"][0][key]
        assert second["usage"] == truth["usage"]
        assert second["usage"]["prompt_tokens_details"] == first["usage"]["prompt_tokens_details"]
        assert first["usage"]["completion_tokens"] == 1
