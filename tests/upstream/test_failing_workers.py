"""Workers that fail, refuse, die and recover: what their clients receive and are charged."""

import asyncio
import gc
import json
import os
import resource
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from router.core.fleet.health import DEFAULT_RULES
from router.errors import NoWorker
from router.upstream.http_client import MAX_UNREAD_BYTES, WorkerClient
from tests.support.running import RunningRouter, chat, running_router, until
from tests.support.scripted_engine import DONE, Call, ScriptedEngine, called_first, chunk, event, scripted_engine, usage

Act = Callable[[Call], Awaitable[None]]
STREAMED = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


async def served(router: RunningRouter) -> tuple[int, int]:
    """Return the extend and output tokens of all clients after every call has ended."""
    await router.check_at_rest()
    service = [entry["service"] for entry in (await router.fairness())["clients"].values()]
    return sum(s["extend"] for s in service), sum(s["output"] for s in service)


async def reset(call: Call) -> None:
    call.reset()


async def close(call: Call) -> None:
    call.connection.writer.close()


async def garbage(call: Call) -> None:
    await call.raw(b"\x16\x03\x01 this is not HTTP \xff\r\n\r\n")


async def half_a_head(call: Call) -> None:
    await call.raw(b"HTTP/1.1 200 OK\r\ncontent-len")
    await close(call)


async def no_json(call: Call) -> None:
    await call.respond(200, b"<html>hello</html>")


async def no_object(call: Call) -> None:
    await call.respond(200, b"[1]")


async def too_short(call: Call) -> None:
    await call.raw(b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"choices":[]}')
    await close(call)


async def bad_chunk(call: Call) -> None:
    await call.begin(content_type="application/json")
    await call.raw(b"zz\r\n{}\r\n")


@pytest.mark.parametrize(
    ("stream", "act", "code"),
    [
        *(
            (stream, act, "worker_unreachable")
            for stream in (True, False)
            for act in (reset, close, garbage, half_a_head)
        ),
        *((False, act, "worker_broke") for act in (no_json, no_object, too_short, bad_chunk)),
    ],
)
async def test_a_worker_that_fails_before_its_answer(stream: bool, act: Act, code: str) -> None:
    """The client gets a 502 in OpenAI's shape, and the worker serves the next call."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(stream=stream)) as post:
            await act(await engine.call())
            response = await post.response()
            error = json.loads(await post.read())["error"]
            assert (response.status, error["type"]) == (502, "server_error")
            assert error["code"].startswith(code)
            assert "http" not in error["message"]
        async with router.post(chat()) as post:
            await (await engine.call()).answer()
            assert (await post.response()).status == 200


async def test_a_refused_connection_costs_nothing() -> None:
    """Nothing can have reached the engine, so the client is refunded."""
    async with scripted_engine() as engine, running_router(engine.url, poll_interval=3600) as router:
        await engine.stop()
        async with router.post(chat()) as post:
            response = await post.response()
            assert (response.status, response.headers["x-d2lpm-dropped-reason"]) == (503, "rejected-no-endpoints")
        assert await served(router) == (0, 0)


async def test_a_call_is_offered_to_every_worker_until_one_takes_the_connection() -> None:
    """A refused connection is not counted as a try; if every worker refuses, the client gets 503."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted_engine()) for _ in range(DEFAULT_RULES.tries + 1)]
        router = await stack.enter_async_context(running_router(*(e.url for e in engines), poll_interval=3600))
        for engine in engines:
            await engine.stop()
        async with router.post(chat()) as post:
            assert (await post.response()).status == 503
        assert not healthy(router)
        assert await served(router) == (0, 0)


async def test_descriptors_that_run_out_are_no_fault_of_the_worker() -> None:
    """Without a free descriptor the call raises NoWorker, which blames no worker and lets the client wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with scripted_engine() as engine:
        gc.collect()  # or it might close a file that another test has left, during the call
        free = os.dup(0)
        os.close(free)  # the lowest number that is free: all below it are in use
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(NoWorker):
                await WorkerClient(engine.url, 1.0).send("POST", "/v1/completions", {}, b"{}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def broken_chunk(call: Call) -> None:
    await call.raw(b"not a size\r\n")


async def half_an_event(call: Call) -> None:
    await call.write(b'data: {"id":"c","cho')
    await reset(call)


async def early_end(call: Call) -> None:
    await call.end()


@pytest.mark.parametrize("options", [{}, {"include_usage": True, "continuous_usage_stats": True}], ids=["cut", "all"])
@pytest.mark.parametrize("act", [reset, close, broken_chunk, half_an_event, early_end])
async def test_a_worker_that_fails_amid_a_stream(act: Act, options: dict[str, Any]) -> None:
    """The client gets the output so far, an error event and [DONE], and is charged for what was computed."""
    first = chunk("a", usage=usage(9, 1))
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(stream=True, stream_options=options)) as post:
            call = await engine.call()
            await call.begin()
            await call.write(first)
            seen = first if options else chunk("a")
            assert await (await post.response()).content.readexactly(len(seen)) == seen
            await act(call)
            *_, last, done, nothing = (await post.read()).split(b"\n\n")
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert (error["type"], error["code"]) == ("server_error", "worker_broke")
            assert (done, nothing) == (b"data: [DONE]", b"")
        assert await served(router) == (9, 1)


@STREAMED
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b'{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}'),
        (400, b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}'),
        (422, b'{"error":"Unprocessable"}'),
        (413, b""),
    ],
)
async def test_a_refusal_is_passed_on_unchanged_and_costs_nothing(stream: bool, status: int, body: bytes) -> None:
    """Status, body, type and Retry-After are the engine's own, and the client is charged nothing."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(stream=stream)) as post:
            await (await engine.call()).respond(
                status, body, "retry-after: 7", "location: /elsewhere", content_type="text/odd; charset=\xe9"
            )
            response = await post.response()
            assert (response.status, await post.read()) == (status, body)
            assert response.headers["retry-after"] == "7"
            assert response.headers["content-type"].startswith("text/odd")
        assert await served(router) == (0, 0)
        assert engine.calls.empty()


@STREAMED
async def test_an_engines_own_failure_is_passed_on(stream: bool) -> None:
    """A 500 is passed on unchanged and charged, because the engine may have computed something."""
    said = b'{"error":{"message":"Internal Server Error"}}'
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat("x" * 400, stream=stream)) as post:
            await (await engine.call()).respond(500, said, content_type="application/odd")
            response = await post.response()
            assert (response.status, response.content_type) == (500, "application/odd")
            assert await post.read() == said
        extend, output = await served(router)
        assert extend > 0
        if stream:  # a whole answer is charged by the time that it took, which is the machine's
            assert output == 0


@pytest.mark.parametrize(
    ("status", "page", "expected"),
    [
        (500, b"Internal Server Error", "500"),
        (502, b"<html>", "502"),
        (504, b"", "504"),
        (409, b'{"detail":"Not Found"}', "Not Found"),
    ],
)
async def test_a_failure_in_another_format_is_passed_on_in_openais(status: int, page: bytes, expected: str) -> None:
    """An error page of a proxy or of the engine's web framework is converted to OpenAI's error shape."""
    async with scripted_engine() as engine, running_router(engine.url) as router, router.post(chat()) as post:
        await (await engine.call()).respond(status, page, content_type="text/html")
        response = await post.response()
        assert (response.status, response.content_type) == (status, "application/json")
        assert expected in (await response.json())["error"]["message"]


FULL = event({"error": {"object": "error", "message": "The request queue is full.", "type": "abort", "code": 503}})


async def in_band(call: Call) -> None:
    await call.stream(FULL, DONE)


async def by_status(call: Call) -> None:
    await call.respond(503, b'{"error":{"message":"The request queue is full.","code":503}}')


async def too_many(call: Call) -> None:
    await call.respond(429, b"slow down")


@pytest.mark.parametrize("act", [in_band, by_status, too_many])
async def test_a_queue_that_is_full_fails_nobody(act: Act) -> None:
    """SGLang reports a full queue inside a stream of status 200, vLLM by status: the request waits and is retried,
    unseen by the client.
    """
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(stream=True)) as post:
            await act(await engine.call())
            await (await engine.call()).answer()
            assert await post.read() == chunk("yes") + chunk("", "stop") + DONE
        assert await served(router) == (10, 1)


async def test_a_queue_that_is_full_amid_a_stream_is_a_failure() -> None:
    """The output before the error is charged, and the client receives the error as the engine sent it."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(stream=True)) as post:
            await (await engine.call()).stream(chunk("a", usage=usage(9, 1)), FULL, DONE)
            assert (await post.read()).endswith(FULL + DONE)
        assert await served(router) == (9, 1)


async def test_an_error_with_status_200_is_an_error() -> None:
    """The error is passed on unchanged, and the request counts as failed."""
    body = b'{"object":"error","message":"oops","type":"abort","param":null,"code":500}'
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat()) as post:
            await (await engine.call()).respond(200, body)
            assert await post.read() == body
        await router.until_all_ended()
        async with router.http.get("/metrics") as response:
            assert 'model="m",outcome="failed"} 1.0' in await response.text()


async def test_a_connection_with_unread_data_is_not_reused() -> None:
    """A connection on which a part of the last answer was not read is closed instead of reused."""
    async with scripted_engine() as engine:
        worker = WorkerClient(engine.url, connect_timeout=5.0)
        pending = asyncio.ensure_future(worker.send("POST", "/x", {}, b"{}"))
        call = await engine.call()
        await call.respond(200, b"x" * (MAX_UNREAD_BYTES + 1))
        upstream = await pending
        await until(lambda: upstream._connection._body_complete)
        upstream.close()
        pending = asyncio.ensure_future(worker.send("POST", "/x", {}, b"{}"))
        await (await engine.call()).respond(200, b"yes")
        assert await (await pending).read_beginning(10, lambda _: True) == (b"yes", True)
        worker.close()


async def answered_by(router: RunningRouter, *engines: ScriptedEngine, model: str = "m") -> ScriptedEngine:
    """Make a call; return the engine that received it."""
    async with router.post({**chat(), "model": model}) as post:
        gets = {asyncio.ensure_future(engine.call()): engine for engine in engines}
        (got,), others = await asyncio.wait(gets, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await got.result().answer()
        assert (await post.response()).status == 200
        return gets[got]


async def test_a_model_of_one_worker_goes_only_there() -> None:
    """A model is routed to the one worker that has it, and a model of no worker gives 404."""
    async with (
        scripted_engine("m", "a") as one,
        scripted_engine("m", "b") as two,
        running_router(one.url, two.url, policy="rr+fcfs") as router,
    ):
        for model, only in (("a", one), ("b", two)):
            assert [await answered_by(router, one, two, model=model) for _ in range(3)] == [only] * 3
        assert {await answered_by(router, one, two) for _ in range(2)} == {one, two}
        async with router.post({**chat(), "model": "c"}) as post:
            assert (await post.response()).status == 404


def healthy(router: RunningRouter) -> set[str]:
    return {backend.url for backend in router.directory.endpoints if backend.healthy}


async def test_the_queue_of_a_dead_worker_moves_to_another() -> None:
    """When a connection is refused, all calls that wait for that worker, and the one that ran there, go to another."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, policy="rr+fcfs", max_inflight=1, poll_interval=3600) as router,
    ):
        async with AsyncExitStack() as stack:
            posts = [await stack.enter_async_context(router.post(chat(f"{i}", stream=True))) for i in range(8)]
            await one.call()
            held = await two.call()
            await router.until_waiting(6)
            await one.stop()
            await until(lambda: one.url not in healthy(router))
            for _ in range(7):
                await held.answer()
                held = await two.call()
            await held.answer()
            expected = [await post.read() for post in posts]
        assert sum(b"yes" in answer and answer.endswith(DONE) for answer in expected) == 8


async def test_a_worker_that_has_recovered_is_used_again() -> None:
    """An unhealthy worker gets no new calls, keeps its running one, and is used again once it is healthy."""
    async with (
        scripted_engine() as first,
        scripted_engine() as second,
        running_router(first.url, second.url, policy="rr+fcfs") as router,
    ):
        async with router.post(chat(stream=True)) as post:
            running, one, two = await called_first(first, second)
            one.poll_answers["/health"] = (503, b"")
            await until(lambda: one.url not in healthy(router))
            assert {await answered_by(router, one, two) for _ in range(3)} == {two}
            await running.answer()
            assert (await post.read()).endswith(DONE)
        one.poll_answers["/health"] = (200, b"")
        await until(lambda: one.url in healthy(router))
        assert {await answered_by(router, one, two) for _ in range(2)} == {one, two}


async def test_without_a_worker_a_call_is_refused_with_the_reason() -> None:
    """Both waiting and new calls get 503 with the reason; a known model does not become an unknown one."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url, max_inflight=1) as router,
        router.post(chat(stream=True)) as running,
        router.post(chat("waiting")) as waiting,
    ):
        call = await engine.call()
        engine.poll_answers["/health"] = (503, b"")
        await until(lambda: not healthy(router))
        async with router.post(chat("late")) as late:
            for post in (waiting, late):
                response = await post.response()
                assert response.status == 503
                assert response.headers["x-d2lpm-dropped-reason"] == "rejected-no-endpoints"
        await call.answer()
        assert (await running.read()).endswith(DONE)


@STREAMED
async def test_a_reused_connection_that_closes_as_the_call_is_sent_is_no_failure(stream: bool) -> None:
    """A call that crosses with the close of an idle connection is sent once more on a new connection."""
    async with scripted_engine() as engine, running_router(engine.url, breaker_failures=1) as router:
        for act in (close, reset, close, reset, close):
            async with router.post(chat(stream=stream)) as post:
                await (await engine.call()).answer()
                await post.read()
            async with router.post(chat(stream=stream)) as post:
                await act(await engine.call())
                await (await engine.call()).answer()
                assert (await post.response()).status == 200
                assert b"yes" in await post.read()
        assert 'd2lpm_lost_tries_total{fault="broken"} 0.0' in await metrics(router)


async def test_a_fresh_connection_that_closes_is_the_workers_failure() -> None:
    """A call is sent again only once, so a new connection that closes is reported as 502."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat()) as post:
            await (await engine.call()).answer()
            await post.read()
        async with router.post(chat()) as post:
            await close(await engine.call())
            await close(await engine.call())
            assert (await post.response()).status == 502
        assert engine.calls.empty()
        await served(router)


async def test_a_call_that_may_have_been_accepted_is_charged() -> None:
    """If the new connection is refused, the first may have been accepted, so the client is charged for the prompt."""
    async with scripted_engine() as engine, running_router(engine.url, poll_interval=3600) as router:
        async with router.post(chat()) as post:
            await (await engine.call()).answer()
            await post.read()
        before = await served(router)
        async with router.post(chat("Something else")) as post:
            await engine.call()
            await engine.stop()
            assert (await post.response()).status == 502
        assert await served(router) > before


async def metrics(router: RunningRouter) -> str:
    """What /metrics says."""
    async with router.http.get("/metrics") as response:
        return await response.text()
