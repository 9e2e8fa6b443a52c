"""What the emulated engines reject, and which oddly written values they accept."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.workers_http import CHAT, TEXT, Json, call, chat, text, worker

WRONG: list[Json] = [
    *({"temperature": value} for value in (-1, "hot", [1])),
    *({"top_p": value} for value in (0, 1.5, "x")),
    *({"max_tokens": value} for value in (5.5, "x", -1)),
    *({"user": 7}, {"cache_salt": 7}, {"stream": True, "stream_options": 7}, {"stream": "perhaps"}),
]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_values_that_both_engines_refuse(http: aiohttp.ClientSession, dialect: str) -> None:
    """Chats and completions with these values get a 400."""
    with worker(dialect=dialect) as url:
        for fields in WRONG:
            await call(http, url + CHAT, chat(**fields), 400)
            await call(http, url + TEXT, text(**fields), 400)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_values_of_other_types_that_are_accepted(http: aiohttp.ClientSession, dialect: str) -> None:
    """The engines accept a limit of "5" or 5.0, and "no" as false for `stream`."""
    with worker(dialect=dialect) as url:
        for limit in ("5", 5.0):
            answer = await call(http, url + CHAT, chat(max_tokens=limit, stream="no"))
            assert answer["usage"]["completion_tokens"] == 5


async def test_values_that_vllm_alone_refuses(http: aiohttp.ClientSession) -> None:
    """Stream options of a whole answer, an empty salt, two greedy answers and both ways to end a prompt are refused."""
    continued: Json = {"continue_final_message": True}
    only: list[tuple[Json, str | None]] = [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"n": 2, "temperature": 0}, None),
        (continued, None),
        (continued | {"add_generation_prompt": True}, None),
    ]
    with worker(dialect="vllm") as vllm, worker(dialect="sglang") as sglang:
        for fields, param in only:
            refused = (await call(http, vllm + CHAT, chat(**fields), 400))["error"]
            assert (refused["type"], refused["param"]) == ("BadRequestError", param)
            await call(http, sglang + CHAT, chat(**fields))
        await call(http, vllm + CHAT, chat(**continued, add_generation_prompt=False))


async def test_values_that_sglang_alone_refuses(http: aiohttp.ClientSession) -> None:
    """SGLang refuses an unknown role, and null as a model."""
    unknown = {"messages": [{"role": "nobody", "content": "x"}]}
    with worker(dialect="vllm") as vllm, worker(dialect="sglang") as sglang:
        for fields in (unknown, {"model": None}):
            assert (await call(http, sglang + CHAT, chat() | fields, 400))["param"] is None
            await call(http, vllm + CHAT, chat() | fields)
