"""What both dialects do alike: prompts, streams, aborts, limits and API keys."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

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
    eventually,
    series,
    stream,
    text,
    worker,
)
from workers.engine.tokenizer import decode, encode, render_chat


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    with worker() as url:
        yield url


@pytest.fixture(scope="module")
def sglang() -> Iterator[str]:
    with worker(dialect="sglang") as url:
        yield url


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_prompt_lists_and_token_ids(dialect: str, http: aiohttp.ClientSession, request: Any) -> None:
    """A choice's index is choice + prompt × n, the usage covers all prompts, and ids have the same effect as their
    text.
    """
    url = request.getfixturevalue(dialect) + TEXT
    prompts = ["one fish", "two fish"]
    as_text = await call(http, url, text(prompts, n=2))
    as_ids = await call(http, url, text([encode(prompt) for prompt in prompts], n=2))
    assert [choice["index"] for choice in as_text["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in as_text["choices"]] == [choice["text"] for choice in as_ids["choices"]]
    assert as_text["usage"]["prompt_tokens"] == sum(len(encode(prompt)) for prompt in prompts)
    assert as_text["usage"]["completion_tokens"] == 12
    alone = await call(http, url, text(encode(prompts[1])))
    assert alone["choices"][0]["text"] == as_text["choices"][2]["text"]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_the_beginning_of_an_answer_is_continued(dialect: str, http: aiohttp.ClientSession, request: Any) -> None:
    """The rest of an answer is the same, whether its beginning is given as ids or as the chat's last message."""
    url = request.getfixturevalue(dialect)
    asked = chat("Tell me.", max_tokens=20, ignore_eos=True)
    whole = (await call(http, url + CHAT, asked))["choices"][0]["message"]["content"]
    said = decode(encode(whole)[:7])
    begun = [*encode(render_chat(asked["messages"])), *encode(said)]
    by_ids = await call(http, url + TEXT, text(begun, max_tokens=13))
    assert said + by_ids["choices"][0]["text"] == whole
    messages = [*asked["messages"], {"role": "assistant", "content": said}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    by_text = await call(http, url + CHAT, {**asked, "messages": messages, "max_tokens": 13, **options})
    assert said + by_text["choices"][0]["message"]["content"] == whole
    other = await call(http, url + CHAT, chat("Tell him.", max_tokens=20, ignore_eos=True))
    assert other["choices"][0]["message"]["content"] != whole


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_streamed_and_whole_answers_agree(
    dialect: str, path: str, http: aiohttp.ClientSession, request: Any
) -> None:
    """Equal calls give equal answers, streamed or not."""
    url = request.getfixturevalue(dialect) + path
    body = (chat if path == CHAT else text)(max_tokens=40)
    whole = await call(http, url, body)
    choice = whole["choices"][0]
    said = choice["message"]["content"] if path == CHAT else choice["text"]
    assert content(await stream(http, url, body)) == said
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_an_answer_may_end_by_itself(dialect: str, http: aiohttp.ClientSession, request: Any) -> None:
    """Without ignore_eos the finish reason is stop, the end marker is counted but not shown, and the next turn hits
    all.
    """
    url = request.getfixturevalue(dialect) + CHAT
    messages: list[Json] = [{"role": "user", "content": "tell me a story"}]
    first = await call(http, url, {"messages": messages, "max_tokens": 20_000})
    choice, usage = first["choices"][0], first["usage"]
    assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens"] == len(encode(choice["message"]["content"])) + 1
    messages += [choice["message"], {"role": "user", "content": "go on"}]
    second = await call(http, url, {"messages": messages, "max_tokens": 1})
    reusable = usage["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == reusable - reusable % 4


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_stream_interval_puts_several_tokens_in_a_chunk(
    dialect: str, http: aiohttp.ClientSession, request: Any
) -> None:
    """The first token comes alone, the next ones four at a time, then the rest, and no text is lost."""
    url = request.getfixturevalue(dialect) + TEXT
    body = text(max_tokens=10, stream_options=CONTINUOUS)
    *chunks, _ = await stream(http, url, body | {"stream_interval": 4})
    assert [event["usage"]["completion_tokens"] for event in chunks] == [1, 5, 9, 10]
    assert content(chunks) == content(await stream(http, url, body))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_bodies_that_are_not_json_objects_are_refused(
    dialect: str, http: aiohttp.ClientSession, request: Any
) -> None:
    """Each such body gets a 400."""
    url = request.getfixturevalue(dialect) + CHAT
    for data, kind in ((b"{", "application/json"), (b"[]", "application/json"), (b"{}", "text/plain")):
        async with http.post(url, data=data, headers={"content-type": kind}) as response:
            assert response.status == 400


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_hidden_capacity_is_reported_nowhere(dialect: str, http: aiohttp.ClientSession) -> None:
    """The worker reports neither the pool nor the batch limit, nor anything from which these follow."""
    reported = ""
    with worker(dialect=dialect, kv_tokens=43_216, max_running=7_777, hide_capacity=True) as url:
        for path in ("/metrics", "/v1/loads", "/server_info", "/v1/models"):
            async with http.get(url + path) as response:
                reported += await response.text()
    numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", reported)}
    assert not numbers & {43_216, 43_212, 10_804, 10_803, 7_777}
    for name in ("num_gpu_blocks", "token_usage", "kv_available"):
        assert name not in reported


@pytest.mark.parametrize("streamed", [True, False])
async def test_vllm_aborts_when_the_client_leaves(streamed: bool, http: aiohttp.ClientSession) -> None:
    """Closing the connection aborts the request, which does not count as a success."""
    with worker(hardware="a100-mistral-7b") as url:

        async def running() -> bool:
            return (await series(http, url))["vllm:num_requests_running"] == 1

        async def idle() -> bool:
            return (await series(http, url))["vllm:num_requests_running"] == 0

        leaving = asyncio.create_task(call(http, url + CHAT, chat(max_tokens=10_000, stream=streamed)))
        await eventually(running)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await eventually(idle)
        seen = await series(http, url)
    assert seen["vllm:request_success_total"] == 0
    assert seen["vllm:generation_tokens_total"] < 10_000


async def left(http: aiohttp.ClientSession, url: str, *, streamed: bool) -> None:
    """Disconnect in the middle of an answer."""

    async def generating() -> bool:
        return (await series(http, url))["sglang:realtime_tokens_total"] > 8

    leaving = asyncio.create_task(call(http, url + CHAT, chat(max_tokens=10_000, stream=streamed)))
    await eventually(generating)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)


async def aborted(http: aiohttp.ClientSession, url: str) -> bool:
    return (await series(http, url)).get("sglang:num_aborted_requests_total") == 1


async def test_sglang_ends_a_stream_with_its_client(http: aiohttp.ClientSession) -> None:
    """A stream ends without waiting for the check for clients that SGLang makes every four seconds, 80 of them here."""
    with worker(dialect="sglang", hardware="a100-mistral-7b", speed=0.05) as url:
        await left(http, url, streamed=True)
        await eventually(lambda: aborted(http, url))


async def test_sglang_checks_at_intervals_for_the_client_of_a_whole_answer(http: aiohttp.ClientSession) -> None:
    """The answer is computed until the next check, and calls that arrive meanwhile are answered."""
    with worker(dialect="sglang", hardware="a100-mistral-7b", speed=0.05) as url:
        await left(http, url, streamed=False)
        await call(http, url + CHAT, chat(max_tokens=2))
        assert not await aborted(http, url)
    with worker(dialect="sglang", hardware="a100-mistral-7b", speed=10) as url:
        await left(http, url, streamed=False)
        await eventually(lambda: aborted(http, url))


async def test_sglang_abort_request(http: aiohttp.ClientSession) -> None:
    """An abort by rid ends the stream with finish_reason abort and a usage of the tokens so far."""
    with worker(dialect="sglang", hardware="a100-mistral-7b") as url:
        body = chat(rid="r", max_tokens=10_000, stream_options=USAGE)
        reading = asyncio.create_task(stream(http, url + CHAT, body))

        async def generating() -> bool:
            return (await series(http, url))["sglang:realtime_tokens_total"] > 20

        await eventually(generating)
        async with http.post(f"{url}/abort_request", json={"rid": "r"}) as aborted:
            assert aborted.status == 200
        *tokens, finish, usage = await reading
    assert finish["choices"][0]["finish_reason"] == "abort"
    assert usage["usage"]["completion_tokens"] == len(encode(content(tokens)))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_full_queue_gets_503(dialect: str, http: aiohttp.ClientSession) -> None:
    """A full vLLM sends 503, streamed or not; SGLang sends it too, but inside a stream of status 200."""
    with worker(dialect=dialect, hardware="a100-mistral-7b", max_running=1, max_queued=1) as url:
        long = text(max_tokens=10_000, stream=True)
        async with http.post(url + TEXT, json=long) as running:
            await running.content.readany()
            waiting = asyncio.create_task(call(http, url + TEXT, text("another")))

            async def queued() -> bool:
                if dialect == "vllm":
                    return (await series(http, url))["vllm:num_requests_waiting"] == 1
                async with http.get(f"{url}/v1/loads") as response:
                    return bool((await response.json())["loads"][0]["num_waiting_reqs"] == 1)

            await eventually(queued)
            refused = await call(http, url + TEXT, text("a third"), 503)
            if dialect == "sglang":
                (event,) = await stream(http, url + TEXT, text("a third"))
                assert event["error"]["code"] == 503
            else:
                assert refused["error"]["type"] == "Service Unavailable"
                await call(http, url + TEXT, text("a third", stream=True), 503)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("dialect", "open_path", "guarded"), [("vllm", "/metrics", ""), ("sglang", "/ready", "/v1/loads")]
)
async def test_the_api_key_guards_some_paths(
    dialect: str, open_path: str, guarded: str, http: aiohttp.ClientSession
) -> None:
    """A call without the key gets 401 with a string as error, and some paths stay open."""
    with worker(dialect=dialect, api_key="k") as url:
        assert await call(http, url + TEXT, text(), 401) == {"error": "Unauthorized"}
        assert (await call(http, url + TEXT, text(), Authorization="Bearer k"))["choices"]
        async with http.get(url + open_path) as response:
            assert response.status == 200
        async with http.get(url + (guarded or "/v1/models")) as response:
            assert response.status == 401


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_many_streams_at_once_stay_apart(dialect: str, request: Any) -> None:
    """Two hundred streams each get their own answer and a usage that counts every token."""
    url = request.getfixturevalue(dialect) + TEXT
    body = text(max_tokens=20, stream_options=CONTINUOUS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        answers = await asyncio.gather(*(stream(http, url, body | {"prompt": f"number {n}"}) for n in range(200)))
    assert {events[-1]["usage"]["completion_tokens"] for events in answers} == {20}
    assert {len(encode(content(events))) for events in answers} == {20}
    assert len({content(events) for events in answers}) == 200
