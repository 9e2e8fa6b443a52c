"""A worker that dies amid a stream: another worker continues, and the client gets one answer without gap or
repetition.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.running import CHAT, COMPLETIONS, Post, RunningRouter, chat, running_router, until
from tests.support.scripted_engine import DONE, Call, ScriptedEngine, event, scripted_engine, usage
from tests.support.turn_order import in_turn

CARD: dict[str, Any] = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 1000}
PROMPT = list(range(100, 110))


def said(text: str, ids: Sequence[int] | None, output: int, finish: str | None = None, **more: object) -> bytes:
    """Return a chunk of a chat from vLLM: with token ids if the call asked for them, else `ids` is None."""
    end = {"stop_reason": None} if finish else {}
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish, **end}
    return event(
        {
            **HEAD,
            "choices": [{**choice, "token_ids": None if ids is None else list(ids)}],
            **({"usage": counts(output)} if ids is not None else {}),
            **more,
        }
    )


HEAD = {"id": "first", "object": "chat.completion.chunk", "created": 7, "model": "m"}


def counts(output: int, prompt: int = len(PROMPT)) -> dict[str, int]:
    """Return the usage in a chunk."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def role(ids: Sequence[int] | None) -> bytes:
    """The first chunk of a chat."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    sent_ids = {"prompt_token_ids": None if ids is None else list(ids), "prompt_text": None}
    return event({**HEAD, "choices": [choice], **({"usage": counts(0)} if ids is not None else {}), **sent_ids})


def piece(text: str, ids: Sequence[int] | None, output: int, finish: str | None = None, prompt: int = 12) -> bytes:
    """Return a chunk of /v1/completions, from the engine that continues."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    sent_ids = {"prompt_token_ids": None, "token_ids": None if ids is None else list(ids)}
    return event(
        {
            **{"id": "other", "object": "text_completion", "created": 9, "model": "m"},
            **{"choices": [{**choice, **sent_ids}], "usage": counts(output, prompt)},
        }
    )


def final(prompt: int, output: int) -> bytes:
    """Return the last chunk, with the usage."""
    return event({"id": "other", "object": "text_completion", "choices": [], "usage": usage(prompt, output, 8)})


@asynccontextmanager
async def fleet(size: int, **settings: Any) -> AsyncIterator[tuple[list[ScriptedEngine], RunningRouter]]:
    """Run a router in front of engines, which are in the order of their turns."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(size)]
        for engine in engines:
            engine.poll_answers["/v1/models"] = (200, json.dumps({"object": "list", "data": [CARD]}).encode())
        urls = [engine.url for engine in engines]
        router = await stack.enter_async_context(running_router(*urls, policy="rr+fcfs", **settings))
        yield await in_turn(router, *engines), router


pair = partial(fleet, 2)
"""Runs a router in front of two engines."""


async def read_until(post: Post, text: bytes) -> bytes:
    """Read the client's stream until this text."""
    content = (await post.response()).content
    return await content.readuntil(text)


def events(stream: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a complete stream."""
    *chunks, done, nothing = stream.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    return [json.loads(each.removeprefix(b"data: ")) for each in chunks]


def content_of(chunks: list[dict[str, Any]]) -> str:
    """Return the text of a chat's chunks."""
    return "".join(each["delta"].get("content", "") for chunk in chunks for each in chunk["choices"])


async def begin(engine: ScriptedEngine, post: Post) -> tuple[Call, bytes]:
    """Stream two tokens of a chat; return the call and what the client has received."""
    call = await engine.call()
    await call.begin()
    await call.write(role(PROMPT))
    await call.write(said("one ", [1], 1))
    await call.write(said("two ", [2], 2))
    return call, await read_until(post, b"two ")


@pytest.mark.parametrize("wanted", [False, True], ids=["without usage", "with usage"])
async def test_a_chat_continues_from_its_tokens(wanted: bool) -> None:
    """The next engine gets prompt and output so far as its prompt, and its chunks are converted to the first one's
    form.
    """
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if wanted else {}
    async with pair() as ((one, two), router):
        async with router.post(chat(stream=True, max_tokens=5, temperature=0, user="ann", **options)) as post:
            call, before = await begin(one, post)
            assert call.json["return_token_ids"] is True
            call.reset()
            rest = await two.call()
            assert rest.path == COMPLETIONS
            assert rest.json["prompt"] == [*PROMPT, 1, 2]
            assert (rest.json["max_tokens"], rest.json["temperature"]) == (3, 0)
            assert "messages" not in rest.json
            await rest.stream(piece("three ", [3], 1), piece("four", [4], 2, "stop"), final(12, 2), DONE)
            chunks = events(before + await post.read())
        assert content_of(chunks) == "one two three four"
        assert [each["delta"].get("role") for chunk in chunks for each in chunk["choices"]] == ["assistant"] + 4 * [
            None
        ]
        assert {chunk["id"] for chunk in chunks} == {"first"}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert [each["finish_reason"] for chunk in chunks for each in chunk["choices"]] == [None] * 4 + ["stop"]
        sent_ids = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        assert sent_ids == ([counts(4)] if wanted else [])
        assert b"[1" not in before, "the client sees ids that it did not ask for"
        await router.until_all_ended()
        service = (await router.fairness())["clients"]["user-ann"]["service"]
        assert (service["extend"], service["output"]) == (10, 4), "what was computed twice is charged once"


async def test_a_second_death_is_survived_too() -> None:
    """The third worker continues from the output of the second one."""
    async with (
        fleet(3) as ((one, two, three), router),
        router.post(chat(stream=True, max_tokens=9)) as post,
    ):
        call, before = await begin(one, post)
        call.reset()
        second = await two.call()
        await second.begin()
        await second.write(piece("three ", [3], 1))
        before += await read_until(post, b"three ")
        second.reset()
        third = await three.call()
        assert (third.json["prompt"], third.json["max_tokens"]) == ([*PROMPT, 1, 2, 3], 6)
        await third.stream(piece("four", [4], 1, "stop"), final(13, 1), DONE)
        assert content_of(events(before + await post.read())) == "one two three four"


async def test_tokens_without_text_are_chosen_again() -> None:
    """A token of half a character is left out of the prompt, because the client has no text of it."""
    async with pair() as ((one, two), router), router.post(chat(stream=True, max_tokens=9)) as post:
        call = await one.call()
        await call.begin()
        await call.write(role(PROMPT) + said("one ", [1], 1) + said("", [2], 2))
        before = await read_until(post, b'content":""},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n')
        call.reset()
        rest = await two.call()
        assert (rest.json["prompt"], rest.json["max_tokens"]) == ([*PROMPT, 1], 8)
        await rest.stream(piece("\u00e9", [2, 3], 2, "stop", 11), DONE)
        assert content_of(events(before + await post.read())) == "one \u00e9"


async def test_without_token_ids_the_text_is_continued() -> None:
    """An engine that sends no token ids is asked to continue its own last message; the client gets the role once."""
    async with pair() as ((one, two), router), router.post(chat(stream=True, max_tokens=5)) as post:
        call = await one.call()
        await call.begin()
        await call.write(role(None) + said("one ", None, 1, usage=counts(1)) + said("two ", None, 2, usage=counts(2)))
        before = await read_until(post, b"two ")
        call.reset()
        rest = await two.call()
        assert (rest.path, rest.json["continue_final_message"]) == (CHAT, True)
        assert rest.json["messages"][-1] == {"role": "assistant", "content": "one two "}
        assert rest.json["max_tokens"] == 3
        await rest.stream(role(None), said("three", None, 1, "stop", usage=counts(1, 12)), DONE)
        chunks = events(before + await post.read())
        assert content_of(chunks) == "one two three"
        assert sum("role" in each["delta"] for chunk in chunks for each in chunk["choices"]) == 1


async def test_a_limit_that_the_client_did_not_set_is_the_models() -> None:
    """Without a limit the continued completion gets the model's, where its own default would be 16 tokens."""
    async with pair() as ((one, two), router), router.post(chat(stream=True)) as post:
        call, before = await begin(one, post)
        call.reset()
        rest = await two.call()
        assert rest.json["max_tokens"] == CARD["max_model_len"] - len(PROMPT) - 2
        await rest.stream(piece("three", [3], 1, "stop"), DONE)
        assert content_of(events(before + await post.read())) == "one two three"


async def test_an_answer_whose_end_alone_is_missing_ends() -> None:
    """If only the end of the answer is missing, the router adds it and asks no other engine."""
    async with pair() as ((one, two), router):
        options: dict[str, Any] = {"stream_options": {"include_usage": True}}
        for limit, finish in ((2, None), (9, "stop")):
            async with router.post(chat(stream=True, max_tokens=limit, **options)) as post:
                engine = one if finish is None else two
                call = await engine.call()
                await call.begin()
                await call.write(role(PROMPT) + said("one ", [1], 1) + said("two ", [2], 2, finish))
                before = await read_until(post, b"two ")
                call.reset()
                chunks = events(before + await post.read())
                assert content_of(chunks) == "one two "
                reasons = [each["finish_reason"] for chunk in chunks for each in chunk["choices"]]
                assert reasons[-1] == (finish or "length")
                assert sum(reason is not None for reason in reasons) == 1
                assert chunks[-1]["usage"] == counts(2)
        assert one.calls.empty()
        assert two.calls.empty()


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 2},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required", "tools": [{}]},
    ],
    ids=["several", "logprobs", "structured", "tools"],
)
async def test_a_stream_that_cannot_be_continued_ends_in_an_error(asked: dict[str, Any]) -> None:
    """The stream ends with one error event of OpenAI's shape, then [DONE]; no other worker is asked."""
    async with pair() as ((one, two), router), router.post(chat(stream=True, **asked)) as post:
        call, before = await begin(one, post)
        assert "return_token_ids" not in call.json
        call.reset()
        *_, last = events(before + await post.read())
        assert last["error"]["code"] == "worker_broke"
        assert two.calls.empty()


@pytest.mark.parametrize("how", ["text", "off"])
async def test_continuation_can_be_switched_off(how: str) -> None:
    """With `text` the call does not ask for token ids; with `off` the client gets the error."""
    async with pair(continuation=how) as ((one, two), router), router.post(chat(stream=True)) as post:
        call, before = await begin(one, post)
        assert "return_token_ids" not in call.json
        call.reset()
        if how == "text":
            await (await two.call()).stream(said("three", None, 1, "stop"), DONE)
        *_, last = events(before + await post.read())
        assert ("error" in last) == (how == "off")


async def test_an_unfinished_tool_call_is_not_continued() -> None:
    """Half a tool call cannot be continued, because no engine can parse it as part of its prompt."""
    async with pair() as ((one, two), router), router.post(chat(stream=True, tools=[{"type": "function"}])) as post:
        call = await one.call()
        await call.begin()
        function = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
        delta = {"role": "assistant", "content": None, "tool_calls": [function]}
        await call.write(event({**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
        before = await read_until(post, b"\n\n")
        call.reset()
        *_, last = events(before + await post.read())
        assert last["error"]["code"] == "worker_broke"
        assert two.calls.empty()


async def test_an_error_amid_the_stream_is_hidden_by_a_retry() -> None:
    """An engine that reports its failure inside the stream is replaced like one that disconnects."""
    dead = event({"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}})
    async with pair() as ((one, two), router), router.post(chat(stream=True, max_tokens=5)) as post:
        call, before = await begin(one, post)
        await call.write(dead + DONE)
        await call.end()
        await (await two.call()).stream(piece("three", [3], 1, "stop"), DONE)
        assert content_of(events(before + await post.read())) == "one two three"


NONSENSE = [
    b"<html>\n\n",
    b"data: {broken}\n\n",
    b'data: {"choices":7}\n\n',
    b'data: {"choices":[7]}\n\n',
    b'data: {"choices":[{"index":"x"}]}\n\n',
]


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_invalid_data_amid_the_stream_is_hidden_by_a_retry(nonsense: bytes) -> None:
    """After invalid data of the first or of a later worker, the next one continues from the last valid chunk."""
    async with (
        fleet(3) as ((one, two, three), router),
        router.post(chat(stream=True, max_tokens=9)) as post,
    ):
        call, before = await begin(one, post)
        await call.write(nonsense + said("lost ", [9], 3))
        second = await two.call()
        assert second.json["prompt"] == [*PROMPT, 1, 2]
        await second.begin()
        await second.write(piece("three ", [3], 1) + nonsense + piece("lost ", [9], 2, "stop"))  # the router hangs up
        third = await three.call()
        assert third.json["prompt"] == [*PROMPT, 1, 2, 3]
        await third.stream(piece("four", [4], 1, "stop"), final(13, 1), DONE)
        assert content_of(events(before + await post.read())) == "one two three four"


async def test_invalid_data_after_a_complete_answer_is_harmless() -> None:
    """The router completes the end of the answer itself and asks no other worker."""
    async with pair() as ((one, two), router), router.post(chat(stream=True, max_tokens=9)) as post:
        call, before = await begin(one, post)
        await call.write(said("three", [3], 3, "stop") + b"<html>\n\n")
        assert content_of(events(before + await post.read())) == "one two three"
        await call.wait_closed()
        assert two.calls.empty()


async def test_a_worker_that_falls_silent_is_left() -> None:
    """A worker that stops sending, before or amid its stream, is given up after the token timeout."""
    timeouts = {"first_token_timeout": 1.0, "token_timeout": 1.0}  # long compared with the stalls of a busy machine
    async with pair(**timeouts) as ((one, two), router), router.post(chat(stream=True, max_tokens=5)) as post:
        silent = await one.call()
        call, before = await begin(two, post)
        await silent.wait_closed()
        await call.wait_closed()
        *_, last = events(before + await post.read())
        assert last["error"]["code"] == "worker_timeout"


async def test_a_completion_continues_from_its_tokens() -> None:
    """Its chunks have the form of a completion and the id of the first one."""
    body = {"model": "m", "prompt": "Hello", "stream": True, "max_tokens": 5}
    async with pair() as ((one, two), router), router.post(body, COMPLETIONS) as post:
        call = await one.call()
        await call.begin()
        first = json.loads(piece("one ", [1], 1, prompt=10).removeprefix(b"data: "))
        first["id"] = "first"
        first["choices"][0]["prompt_token_ids"] = PROMPT
        await call.write(event(first))
        before = await read_until(post, b"\n\n")
        call.reset()
        rest = await two.call()
        assert (rest.json["prompt"], rest.json["max_tokens"]) == ([*PROMPT, 1], 4)
        await rest.stream(piece("two", [2], 1, "stop"), DONE)
        chunks = events(before + await post.read())
        assert "".join(each["text"] for chunk in chunks for each in chunk["choices"]) == "one two"
        assert {chunk["id"] for chunk in chunks} == {"first"}


async def test_a_client_that_leaves_while_its_stream_waits_for_a_worker_leaves_nothing() -> None:
    """A request that waits for another worker to continue it is removed if its client disconnects."""
    async with pair(max_inflight=1) as ((one, two), router), router.post(chat(stream=True)) as first:
        call, _ = await begin(one, first)
        async with router.post(chat("other", stream=True)) as second:
            held = await two.call()
            call.reset()
            await until(lambda: bool(router.scheduler._retries.requests))
            first._task.result().close()
            await until(lambda: not router.scheduler._retries.requests)
            await held.answer()
            assert (await second.read()).endswith(DONE)
