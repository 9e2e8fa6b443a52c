"""A worker that refuses every call at once draws all traffic, unless the refusal counts as its own fault."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from router.core.fleet.health import Condition
from router.core.model.request import WorkerId
from tests.support.running import CHAT, chat, running_router
from tests.support.scripted_engine import Call, ScriptedEngine, scripted_engine

REFUSALS = [301, 401, 402, 403, 404, 405, 407, 408]
"""Statuses that concern the worker, its address or its key, and not the call."""
CALLS, AT_ONCE = 320, 32


@asynccontextmanager
async def answered_by(engine: ScriptedEngine, answer: Callable[[Call], asyncio.Future[None]]) -> AsyncIterator[None]:
    """Answer every call to this engine while the context is entered."""

    async def serve() -> None:
        while True:
            await answer(await engine.calls.get())

    task = asyncio.create_task(serve())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def refuse(status: int) -> Callable[[Call], asyncio.Future[None]]:
    """Return an answer as a gateway in front of an engine gives it."""
    said = json.dumps({"error": {"message": "Incorrect API key provided.", "code": "invalid_api_key"}}).encode()
    return lambda call: asyncio.ensure_future(call.respond(status, said, "location: http://elsewhere/"))


def serve(call: Call) -> "asyncio.Future[None]":
    return asyncio.ensure_future(call.answer())


def name_of(engine: ScriptedEngine) -> WorkerId:
    return WorkerId(engine.url.removeprefix("http://"))


@pytest.mark.parametrize("status", REFUSALS)
async def test_no_call_is_lost_to_a_worker_that_refuses_all(status: int) -> None:
    """Of 320 calls to two workers, one of which refuses at once, all are answered, and its breaker opens."""
    async with (
        scripted_engine() as hole,
        scripted_engine() as good,
        answered_by(hole, refuse(status)),
        answered_by(good, serve),
        running_router(hole.url, good.url) as router,
    ):
        conditions = set()

        async def client(number: int) -> list[int]:
            statuses = []
            for turn in range(CALLS // AT_ONCE):
                async with router.post(chat(f"{number} {turn}", stream=bool(turn % 2))) as post:
                    statuses.append((await post.response()).status)
                    assert b"yes" in await post.read()
                conditions.add(router.scheduler.fleet[name_of(hole)].health.condition)
            return statuses

        answers = await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
        assert [status for statuses in answers for status in statuses] == [200] * CALLS
        assert Condition.OPEN in conditions


@pytest.mark.parametrize("status", REFUSALS)
async def test_a_rejected_router_key_is_not_blamed_on_the_client(status: int) -> None:
    """If no other worker can serve the call, the client receives 502 and is not charged."""
    async with (
        scripted_engine() as hole,
        answered_by(hole, refuse(status)),
        running_router(hole.url) as router,
    ):
        for stream in (False, True):
            async with router.post(chat(stream=stream), x_api_key="sk-mine") as post:
                response = await post.response()
                error = json.loads(await post.read())["error"]
                assert (response.status, error["code"]) == (502, "worker_refused")
                assert "API key" not in error["message"]
                assert str(status) in error["message"]
        await router.check_at_rest()
        (client,) = (await router.fairness())["clients"].values()
        assert client["service"]["cost"] == 0


NO_PATH = (b'{"detail":"Not Found"}', b'{"error":{"message":"Not Found","type":"Not Found","param":null,"code":404}}')


def lack_path(said: bytes) -> Callable[[Call], asyncio.Future[None]]:
    """Return the refusal of a chat by a vLLM that only serves embeddings."""
    return lambda call: asyncio.ensure_future(call.respond(404, said))


@pytest.mark.parametrize("said", NO_PATH)
async def test_a_path_that_the_models_workers_lack_is_not_found(said: bytes) -> None:
    """The client receives the error, whole or streamed, and no worker is ejected for it."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        answered_by(one, lack_path(said)),
        answered_by(two, lack_path(said)),
        running_router(one.url, two.url) as router,
    ):
        for number in range(30):
            async with router.post(chat(f"call {number}", stream=bool(number % 2))) as post:
                error = json.loads(await post.read())["error"]
                assert ((await post.response()).status, error["code"]) == (404, "path_not_served")
                assert "`m`" in error["message"]
                assert CHAT in error["message"]
        states = router.scheduler.fleet
        assert [states[name_of(each)].health.condition for each in (one, two)] == [Condition.CLOSED] * 2


async def test_a_worker_that_lacks_what_another_has_is_no_black_hole() -> None:
    """The other worker answers all calls, and the breaker of the worker that lacks the path opens."""
    async with (
        scripted_engine() as hole,
        scripted_engine() as good,
        answered_by(hole, lack_path(NO_PATH[0])),
        answered_by(good, serve),
        running_router(hole.url, good.url) as router,
    ):
        for number in range(60):
            async with router.post(chat(f"call {number}")) as post:
                assert (await post.response()).status == 200
        assert router.scheduler.fleet[name_of(hole)].health.condition is not Condition.CLOSED


@pytest.mark.parametrize("said", [b"", b"Not Found", b"[]", b'{"error":"Not Found"}', b'{"detail":"no such model"}'])
async def test_a_404_that_may_be_about_something_else_is_the_workers(said: bytes) -> None:
    """The client receives 502: a worker that lists the model and then reports that it is missing is broken."""
    async with (
        scripted_engine() as hole,
        answered_by(hole, lack_path(said)),
        running_router(hole.url) as router,
        router.post(chat()) as post,
    ):
        assert json.loads(await post.read())["error"]["code"] == "worker_refused"


async def test_after_a_heartbeat_the_refusal_arrives_in_the_stream() -> None:
    """The refusal is an error event with the same code."""
    async with (
        scripted_engine() as hole,
        running_router(hole.url, max_inflight=1, heartbeat=0.01) as router,
        router.post(chat(stream=True)) as first,
    ):
        running = await hole.call()
        async with router.post(chat(stream=True)) as second:
            await router.until_waiting(1)
            content = (await second.response()).content
            assert await content.readuntil(b"\n\n") == b"\n\n"
            await running.answer()
            await first.read()
            await refuse(401)(await hole.call())
            assert b'"worker_refused"' in await second.read()


async def test_a_refusal_that_every_worker_gives_opens_no_breaker() -> None:
    """A worker is blamed only if another worker serves what it refused."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        answered_by(one, refuse(404)),
        answered_by(two, refuse(404)),
        running_router(one.url, two.url) as router,
    ):
        for number in range(30):
            async with router.post(chat(f"call {number}")) as post:
                assert (await post.response()).status == 502
        states = router.scheduler.fleet
        assert [states[name_of(each)].health.condition for each in (one, two)] == [Condition.CLOSED] * 2


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/nobody/knows", {"model": "m"}, 404),
        ("/v1/nobody/knows", {"model": "m"}, 405),
        ("/v1/responses", {"model": "m", "input": "hi"}, 404),
        (CHAT, chat(), 400),
        (CHAT, chat(), 413),
        (CHAT, chat(), 422),
    ],
)
async def test_an_error_that_may_be_the_clients_fault_is_passed_on_unchanged(
    path: str, body: dict[str, object], status: int
) -> None:
    """The error for a path that the engine lacks, or for a call that it cannot parse, is the engine's own."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        answered_by(one, refuse(status)),
        answered_by(two, refuse(status)),
        running_router(one.url, two.url) as router,
        router.post(body, path) as post,
    ):
        assert (await post.response()).status == status
        assert b"Incorrect" in await post.read()
