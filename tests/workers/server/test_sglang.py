"""The SGLang dialect: its chunks, usage, errors and metrics are those of an SGLang server."""

from collections.abc import Iterator

import aiohttp
import pytest

from tests.support.workers_http import (
    CHAT,
    CONTINUOUS,
    TEXT,
    USAGE,
    Json,
    call,
    chat,
    content,
    series,
    stream,
    text,
    worker,
)
from workers.engine.tokenizer import EOS, encode


@pytest.fixture(scope="module")
def sglang() -> Iterator[str]:
    with worker(dialect="sglang") as url:
        yield url


async def test_sglang_chat_stream(sglang: str, http: aiohttp.ClientSession) -> None:
    """Every delta has reasoning_content, the finish is its own chunk, and the model's name and the rid come back."""
    body = chat(model="whatever", rid="r1", stream_options=USAGE)
    role, *tokens, finish, usage = await stream(http, sglang + CHAT, body)
    assert (role["id"], role["model"]) == ("r1", "whatever")
    assert role["choices"][0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
    names = ["index", "delta", "logprobs", "finish_reason", "matched_stop"]
    for event in (role, *tokens, finish):
        assert list(event) == ["id", "object", "created", "model", "choices"]
        assert list(event["choices"][0]) == names
    assert [list(event["choices"][0]["delta"]) for event in tokens] == [["reasoning_content", "content"]] * 3
    assert finish["choices"][0]["delta"] == {"reasoning_content": None}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["reasoning_tokens"] == 0


async def test_sglang_continuous_usage_reports_the_hit_early(sglang: str, http: aiohttp.ClientSession) -> None:
    """Each content chunk has the cached tokens even without include_usage, and role and finish chunks have no usage."""
    body = chat("a long enough question to fill some pages", stream_options={"continuous_usage_stats": True})
    first, again = [await stream(http, sglang + CHAT, body) for _ in range(2)]
    assert ["usage" in event for event in again] == [False, True, True, True, False]
    assert first[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    prompt = again[1]["usage"]["prompt_tokens"]
    assert again[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": (prompt - 1) // 4 * 4}
    assert [event["usage"]["completion_tokens"] for event in again[1:4]] == [1, 2, 3]


async def test_sglang_two_choices_finish_together(sglang: str, http: aiohttp.ClientSession) -> None:
    """The contents are interleaved, and both finish chunks come at the end."""
    events = await stream(http, sglang + CHAT, chat(n=2))
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * 8 + ["length"] * 2
    assert [event["choices"][0]["index"] for event in events[-2:]] == [0, 1]


async def test_sglang_stop_names_the_token_and_shows_no_empty_chunk(sglang: str, http: aiohttp.ClientSession) -> None:
    """The end marker has no text, so its step yields the finish chunk alone."""
    body = chat("tell me a story", max_tokens=20_000, ignore_eos=False, stream_options=USAGE)
    _, *tokens, finish, usage = await stream(http, sglang + CHAT, body)
    assert finish["choices"][0]["matched_stop"] == EOS
    assert all(event["choices"][0]["delta"]["content"] for event in tokens)
    assert usage["usage"]["completion_tokens"] == len(encode(content(tokens))) + 1


async def test_sglang_completion_stream(sglang: str, http: aiohttp.ClientSession) -> None:
    """The last text chunk has the finish, nulls are written, and usage per chunk has no cached tokens."""
    body = text("once upon a time there was a pool")
    plain = await stream(http, sglang + TEXT, body)
    assert [event["choices"][0]["finish_reason"] for event in plain] == [None, None, "length"]
    assert [event["usage"] for event in plain] == [None] * 3
    counted = await stream(http, sglang + TEXT, body | {"stream_options": CONTINUOUS})
    assert [event["usage"]["prompt_tokens_details"] for event in counted[:3]] == [None] * 3
    assert counted[3]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_override_rid_is_read_on_chat_alone(sglang: str, http: aiohttp.ClientSession) -> None:
    """The header sets the id of a chat, not of a completion."""
    headers: Json = {"x-override-rid": "mine"}
    assert (await call(http, sglang + CHAT, chat(), **headers))["id"] == "mine"
    assert (await call(http, sglang + TEXT, text(), **headers))["id"] != "mine"


async def test_sglang_errors_are_flat(sglang: str, http: aiohttp.ClientSession) -> None:
    """No object wraps the error, and prompt and answer together must fit the context."""
    for body, words in ((chat("word " * 33_000), "longer than"), (chat(max_tokens=32_768), "Requested token count")):
        error = await call(http, sglang + CHAT, body, 400)
        assert list(error) == ["object", "message", "type", "param", "code"]
        assert (error["object"], error["code"]) == ("error", 400)
        assert words in error["message"]
    assert await call(http, f"{sglang}/nowhere", {}, 404) == {"detail": "Not Found"}
    assert await call(http, f"{sglang}/v1/models", {}, 405) == {"detail": "Method Not Allowed"}


async def test_sglang_information(sglang: str, http: aiohttp.ClientSession) -> None:
    """Health, server info and loads are reported, and an idle server's cache can be flushed."""
    for path in ("/ready", "/health", "/model_info"):
        async with http.get(sglang + path) as response:
            assert response.status == 200
    async with http.get(f"{sglang}/server_info") as response:
        info = await response.json()
    assert (info["page_size"], info["max_total_num_tokens"], info["schedule_policy"]) == (4, 430_000, "fcfs")
    async with http.get(f"{sglang}/v1/loads") as response:
        (load,) = (await response.json())["loads"]
    assert load["max_total_num_tokens"] == 430_000
    assert (load["num_running_reqs"], load["num_waiting_uncached_tokens"]) == (0, 0)
    async with http.post(f"{sglang}/flush_cache") as response:
        assert response.status == 200
    tokens = (await call(http, f"{sglang}/v1/tokenize", {"prompt": "мир"}))["tokens"]
    assert await call(http, f"{sglang}/v1/detokenize", {"tokens": tokens}) == {"text": "мир"}


async def test_sglang_metrics_count_evictions(http: aiohttp.ClientSession) -> None:
    """A pool of 40 tokens that has stored 100 reports evictions, and finished requests are counted."""
    with worker(dialect="sglang", kv_tokens=40) as url:
        for token in range(5):
            await call(http, url + TEXT, text([token] * 20))
        seen = await series(http, url)
    assert seen["sglang:evicted_tokens_total"] >= 60
    assert seen["sglang:prompt_tokens_total"] == 100
    assert seen["sglang:generation_tokens_total"] == 15
    assert seen["sglang:max_total_num_tokens"] == 40
    assert seen["sglang:realtime_tokens_total"] == 115


async def test_sglang_gauges_lag_and_loads_do_not(http: aiohttp.ClientSession) -> None:
    """Gauges still show the last prefill when all requests are done, and /v1/loads is current."""
    with worker(dialect="sglang") as url:
        await call(http, url + TEXT, text())
        assert (await series(http, url))["sglang:num_running_reqs"] == 1
        async with http.get(f"{url}/v1/loads") as response:
            assert (await response.json())["loads"][0]["num_running_reqs"] == 0


async def test_sglang_refuses_ids_in_a_streamed_chat(sglang: str, http: aiohttp.ClientSession) -> None:
    """The refusal has the real engine's message and precedes the stream; whole chats and completions accept ids."""
    refused = await call(http, sglang + CHAT, chat(return_token_ids=True, stream=True), 400)
    assert refused == {
        "object": "error",
        "message": "return_token_ids is not supported with streaming on /v1/chat/completions. "
        "Please set stream=false when using return_token_ids=true.",
        "type": "BadRequest",
        "param": None,
        "code": 400,
    }
    (choice,) = (await call(http, sglang + CHAT, chat(return_token_ids=True)))["choices"]
    assert len(choice["response_token_ids"]) == 3
    events = await stream(http, sglang + TEXT, text([9, 8, 7], return_token_ids=True))
    assert [event["choices"][0].get("prompt_token_ids") for event in events] == [[9, 8, 7], None, None]
