"""The vLLM dialect: its chunks, usage, errors and metrics are those of a vLLM server."""

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
from workers.engine.tokenizer import encode


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    with worker() as url:
        yield url


async def test_vllm_chat_stream(vllm: str, http: aiohttp.ClientSession) -> None:
    """The stream is a role chunk, a chunk per token with the finish on the last, and the usage; X-Request-Id sets its
    id.
    """
    headers = {"X-Request-Id": "abc"}
    role, first, second, last, usage = await stream(http, vllm + CHAT, chat(stream_options=USAGE), **headers)
    assert list(role) == ["id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"]
    assert (role["id"], role["object"], role["model"]) == ("chatcmpl-abc", "chat.completion.chunk", "tiny")
    assert role["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    for event in (first, second):
        assert list(event["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]
        assert event["choices"][0]["delta"]["content"]
        assert "usage" not in event
    assert list(last["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["delta"]["content"]
    assert list(usage) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert usage["choices"] == []
    prompt = usage["usage"]["prompt_tokens"]
    assert list(usage["usage"]) == ["prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"]
    assert (usage["usage"]["completion_tokens"], usage["usage"]["total_tokens"]) == (3, prompt + 3)


async def test_vllm_continuous_usage(vllm: str, http: aiohttp.ClientSession) -> None:
    """Usage per chunk is cumulative from 0 at the role chunk, without cached tokens, and ignored without
    include_usage.
    """
    events = await stream(http, vllm + CHAT, chat(stream_options=CONTINUOUS))
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 3]
    assert ["prompt_tokens_details" in event["usage"] for event in events] == [False] * 4 + [True]
    without = await stream(http, vllm + CHAT, chat(stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in event for event in without)


async def test_vllm_reports_the_hit_in_the_last_usage(vllm: str, http: aiohttp.ClientSession) -> None:
    """The same prompt again hits its full blocks, and gets the same answer."""
    body = text("a prompt that nobody else in this file sends, of some length", stream_options=USAGE)
    first, again = [await stream(http, vllm + TEXT, body) for _ in range(2)]
    tokens = len(encode(body["prompt"]))
    assert first[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokens - 1) // 4 * 4
    assert content(first) == content(again)


async def test_vllm_reports_the_tokens_a_chat_put_into_the_cache(vllm: str, http: aiohttp.ClientSession) -> None:
    """The tokens are counted in whole blocks, and a completion's usage has no such count."""
    events = await stream(http, vllm + CHAT, chat("of this chat nobody else in this file thinks", stream_options=USAGE))
    usage = events[-1]["usage"]
    details = usage["prompt_tokens_details"]
    assert sum(details.values()) == usage["prompt_tokens"] // 4 * 4


async def test_vllm_two_choices(vllm: str, http: aiohttp.ClientSession) -> None:
    """Both role chunks come first, then interleaved content; usage per chunk is per choice, and the prompt counts
    once.
    """
    events = await stream(http, vllm + CHAT, chat(n=2, stream_options=CONTINUOUS))
    *chunks, usage = events
    assert ["role" in event["choices"][0]["delta"] for event in chunks[:3]] == [True, True, False]
    assert [event["choices"][0]["index"] for event in chunks] == [0, 1] * 4
    assert max(event["usage"]["completion_tokens"] for event in chunks) == 3
    assert usage["usage"]["completion_tokens"] == 6
    assert usage["usage"]["prompt_tokens"] == chunks[0]["usage"]["prompt_tokens"]
    assert content(chunks, 0) != content(chunks, 1)


async def test_vllm_completion_stream(vllm: str, http: aiohttp.ClientSession) -> None:
    """There is no role chunk, every field is written, and token ids come on request."""
    body = text(stream_options=USAGE, return_token_ids=True)
    *chunks, usage = await stream(http, vllm + TEXT, body)
    assert chunks[0]["object"] == "text_completion"
    assert chunks[0]["id"].startswith("cmpl-")
    names = ["index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"]
    assert [list(event["choices"][0]) for event in chunks] == [names] * 3
    assert [event["choices"][0]["finish_reason"] for event in chunks] == [None, None, "length"]
    ids = [event["choices"][0]["prompt_token_ids"] for event in chunks]
    assert ids == [encode(body["prompt"]), None, None]
    assert encode(content(chunks)) == [event["choices"][0]["token_ids"][0] for event in chunks]
    assert usage["usage"]["prompt_tokens"] == len(ids[0])


async def test_vllm_errors(vllm: str, http: aiohttp.ClientSession) -> None:
    """Client errors have vLLM's status, type and param."""
    cases: list[tuple[Json, int, str, str | None]] = [
        (chat(model="nope"), 404, "NotFoundError", "model"),
        (chat(max_tokens=0), 400, "BadRequestError", "max_tokens"),
        (chat(max_tokens=40_000), 400, "BadRequestError", "max_tokens"),
        (chat(max_tokens="three"), 400, "Bad Request", "body.max_tokens"),
        (chat(messages="hi"), 400, "Bad Request", "body.messages"),
        (chat(messages=[]), 400, "BadRequestError", None),
        (chat("word " * 33_000), 400, "BadRequestError", "input_tokens"),
    ]
    for body, status, kind, param in cases:
        error = (await call(http, vllm + CHAT, body, status))["error"]
        assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    prompts: list[object] = ["", [], [[]], [-1], [1 << 60], {"a": 1}, ["a", [1]]]
    for prompt in prompts:
        await call(http, vllm + TEXT, text(prompt), 400)


async def test_vllm_clamps_the_answer_to_the_context(http: aiohttp.ClientSession) -> None:
    """A max_tokens that fits the context but not after this prompt is reduced, not rejected."""
    with worker(max_model_len=64) as url:
        answer = await call(http, url + TEXT, text([7] * 60, max_tokens=50))
    assert answer["usage"]["completion_tokens"] == 4


async def test_vllm_information(vllm: str, http: aiohttp.ClientSession) -> None:
    """Health is an empty 200, the model is listed with its context, and tokenize and detokenize are inverse."""
    for path in ("/health", "/ping", "/version", "/kv_event_sources"):
        async with http.get(vllm + path) as response:
            assert response.status == 200
    async with http.get(f"{vllm}/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("tiny", "vllm", 32_768)
    tokens = (await call(http, f"{vllm}/tokenize", {"prompt": "naïve мир"}))["tokens"]
    assert await call(http, f"{vllm}/detokenize", {"tokens": tokens}) == {"prompt": "naïve мир"}
    counted = await call(http, f"{vllm}/tokenize", {"messages": chat()["messages"]})
    assert counted["count"] == (await call(http, vllm + CHAT, chat()))["usage"]["prompt_tokens"]
    assert await call(http, f"{vllm}/v1/loads", {}, 404) == {"detail": "Not Found"}


async def test_hidden_cached_tokens_are_in_no_usage(http: aiohttp.ClientSession) -> None:
    """Without --enable-prompt-tokens-details, a whole answer has null details, and a stream has none."""
    with worker(hide_cached=True) as url:
        for path, body in ((CHAT, chat()), (TEXT, text())):
            whole = (await call(http, url + path, body))["usage"]
            *_, end = await stream(http, url + path, {**body, "stream_options": USAGE})
            assert whole["prompt_tokens_details"] is None
            assert set(end["usage"]) == {"prompt_tokens", "total_tokens", "completion_tokens"}


async def test_vllm_metrics_count_tokens(http: aiohttp.ClientSession) -> None:
    """Queries, hits, prompt and generated tokens add up, and every counter has its *_created."""
    with worker() as url:
        for _ in range(2):
            await call(http, url + TEXT, text([5] * 9))
        seen = await series(http, url)
    assert seen["vllm:prefix_cache_queries_total"] == 18
    assert seen["vllm:prefix_cache_hits_total"] == 8
    assert seen["vllm:prompt_tokens_by_source_total"] == seen["vllm:prompt_tokens_total"] == 18
    assert seen["vllm:generation_tokens_total"] == 6
    assert seen["vllm:request_success_total"] == 2
    assert seen["vllm:kv_cache_usage_perc"] == 0
    counters = [name for name in seen if name.endswith("_total")]
    assert all(name.removesuffix("_total") + "_created" in seen for name in counters)
