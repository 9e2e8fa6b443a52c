"""Prefill and decode on two emulated vLLM engines with NIXL: the wire as a router sees it."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.workers_http import (
    CHAT,
    CONTINUOUS,
    TEXT,
    Json,
    call,
    chat,
    content,
    stream,
    text,
    worker,
)

PREFILL: Json = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = "the same long beginning of every prompt " * 8


@pytest.fixture(scope="module")
def prefill() -> Iterator[str]:
    with worker(role="prefill") as url:
        yield url


@pytest.fixture(scope="module")
def decode() -> Iterator[str]:
    with worker(role="decode") as url:
        yield url


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    with worker() as url:
        yield url


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def prefilled(http: aiohttp.ClientSession, url: str, path: str, body: Json) -> Json:
    """Return the whole answer of a prefill."""
    answer: Json = await call(http, url + path, body | {"max_tokens": 1, "kv_transfer_params": PREFILL})
    return answer


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat(PROMPT)), (TEXT, text(PROMPT, max_tokens=20))])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_handed_off_answer_is_that_of_one_engine(
    prefill: str, decode: str, alone: str, http: aiohttp.ClientSession, path: str, body: Json, streamed: bool
) -> None:
    """Text and usage are the same, whether streamed or not, in both APIs."""

    async def answered(url: str, **params: Any) -> tuple[str, Json]:
        if streamed:
            *events, usage = await stream(http, url + path, body | {"stream_options": CONTINUOUS} | params)
            return content(events), usage["usage"]
        answer = await call(http, url + path, body | params)
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"], answer["usage"]

    first = await prefilled(http, prefill, path, body)
    handed = await answered(decode, kv_transfer_params=first["kv_transfer_params"])
    truth, usage = await answered(alone)
    assert handed[0] == truth
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert handed[1][count] == usage[count]
    cached = first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert handed[1]["prompt_tokens_details"]["cached_tokens"] == cached
