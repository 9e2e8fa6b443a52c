"""Retries at another worker: before the client has part of the answer, and when a worker is killed during it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from router.runtime.emulate import READY_LINE
from tests.support.running import CHAT, COMPLETIONS, RunningRouter, chat, running_router
from tests.support.scripted_engine import DONE, Call, called_first, chunk, event, scripted_engine
from tests.upstream.test_failing_workers import STREAMED, Act, close, garbage, half_a_head, no_json, reset, served

SOON = 1.0
"""A timeout in seconds: long compared with the stalls of a busy machine, in which an answer cannot pass either."""
ERROR = event({"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}})


async def internal_error(call: Call) -> None:
    await call.respond(500, b"Internal Server Error", content_type="text/plain")


async def error_in_band(call: Call) -> None:
    if call.json.get("stream"):
        await call.stream(ERROR, DONE)
    else:
        await call.respond(200, b'{"object":"error","message":"oops","type":"abort","param":null,"code":500}')


async def empty_stream(call: Call) -> None:
    await call.stream()


async def aborted(call: Call) -> None:
    await call.stream(chunk("", "abort"), DONE)


@STREAMED
@pytest.mark.parametrize("act", [reset, close, garbage, half_a_head, internal_error, error_in_band])
async def test_another_worker_answers(stream: bool, act: Act) -> None:
    """However a worker fails before it answers, the client gets the other worker's answer and pays once."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs") as router,
    ):
        # A try that fails is charged by its time, at most the limit: here one token, however slow the machine is.
        async with router.post(chat(stream=stream, max_tokens=1)) as post:
            call, _, other = await called_first(one, two)
            await act(call)
            await (await other.call()).answer()
            response = await post.response()
            assert response.status == 200
            assert response.headers["x-d2lpm-worker"] == other.url.removeprefix("http://")
            assert b"yes" in await post.read()
        _, output = await served(router)
        assert output == 1


@pytest.mark.parametrize(
    ("stream", "act"), [(False, no_json), (True, empty_stream), (True, aborted)], ids=["no JSON", "empty", "aborted"]
)
async def test_an_answer_without_content_is_retried(stream: bool, act: Act) -> None:
    """The answer began with status 200, and contained nothing."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs") as router,
        router.post(chat(stream=stream)) as post,
    ):
        call, _, other = await called_first(one, two)
        await act(call)
        await (await other.call()).answer()
        assert b"yes" in await post.read()


@STREAMED
async def test_a_client_error_is_not_retried(stream: bool) -> None:
    """A 400 is passed on unchanged."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs") as router,
        router.post(chat(stream=stream)) as post,
    ):
        call, _, other = await called_first(one, two)
        await call.respond(400, b'{"error":{"message":"too long"}}')
        assert (await post.response()).status == 400
        assert other.calls.empty()


async def test_the_last_failure_is_passed_on_when_no_tries_are_left() -> None:
    """The client gets the engine's own words."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs", tries=2) as router,
        router.post(chat()) as post,
    ):
        call, _, other = await called_first(one, two)
        await internal_error(call)
        await (await other.call()).respond(500, b'{"error": {"message": "the second"}}')
        assert (await post.response()).status == 500
        assert await post.read() == b'{"error": {"message": "the second"}}'


async def test_a_worker_that_hangs_is_given_up() -> None:
    """Streamed or not, when the worker is silent for too long, another is tried."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs", first_token_timeout=SOON, token_timeout=SOON) as router,
    ):
        for stream in (True, False):
            async with router.post(chat(stream=stream, max_tokens=1)) as post:
                call, _, other = await called_first(one, two)
                await call.wait_closed()
                await (await other.call()).answer()
                assert b"yes" in await post.read()


@contextmanager
def worker(dialect: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start an emulated worker that can be killed; yields its URL and process."""
    command = [sys.executable, "-m", "workers", "--port", "0", "--exit-with-parent", "--model", "m"]
    command += ["--dialect", dialect, "--hardware", "h100-llama-7b", "--speed", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = READY_LINE.match(process.stdout.readline())
        assert found is not None
        try:
            yield found["url"], process
        finally:
            process.kill()


async def stream_chunks(router: RunningRouter, number: int, begun: asyncio.Event, kill: asyncio.Event) -> list[Any]:
    """Return the chunks of a stream of 60 tokens; sets `begun` at the tenth, then waits for `kill`."""
    options = {"include_usage": True}
    more = {"stream": True, "max_tokens": 60, "ignore_eos": True, "stream_options": options}
    body = chat(f"prompt {number}", **more) if number % 2 else {"model": "m", "prompt": f"prompt {number}", **more}
    async with router.post(body, CHAT if number % 2 else COMPLETIONS) as post:
        content = (await post.response()).content
        received = b""
        for _ in range(10):
            received += await content.readuntil(b"\n\n")
        begun.set()
        await kill.wait()
        *chunks, done, nothing = (received + await content.read()).split(b"\n\n")
        assert (done, nothing) == (b"data: [DONE]", b"")
        return [json.loads(each.removeprefix(b"data: ")) for each in chunks]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_streams_of_a_killed_worker_continue_unchanged(dialect: str) -> None:
    """Every answer has the text it would have had, with one role, one end, and the usage of one answer."""
    with ExitStack() as stack:
        (first, victim), (second, _) = (stack.enter_context(worker(dialect)) for _ in range(2))
        async with running_router(first, second, policy="rr+fcfs") as router:
            kill, begun = asyncio.Event(), [asyncio.Event() for _ in range(8)]
            streams = [asyncio.create_task(stream_chunks(router, i, begun[i], kill)) for i in range(8)]
            await asyncio.gather(*(each.wait() for each in begun))
            victim.kill()
            kill.set()
            for number, chunks in enumerate(await asyncio.gather(*streams)):
                check_complete(chunks)
                assert text_of(chunks) == text_of(await stream_chunks(router, number, asyncio.Event(), kill))


def text_of(chunks: list[Any]) -> str:
    """Return the text of an answer."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def check_complete(chunks: list[Any]) -> None:
    """Assert that the chunks are one complete answer."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    assert sum("role" in choice.get("delta", ()) for choice in choices) == ("delta" in choices[0])
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert usage["completion_tokens"] == 60
    assert usage["total_tokens"] == usage["prompt_tokens"] + 60
