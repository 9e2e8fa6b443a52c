"""Stored responses: only the client that created one reaches the worker that keeps it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.core.fleet.stored_responses import StoredResponse, StoredResponses
from router.core.model.request import ClientId, WorkerId
from tests.support.running import RunningRouter, running_router, until
from tests.support.scripted_engine import Call, ScriptedEngine, scripted_engine
from tests.support.served import service
from tests.support.stored_scripts import RESPONSES, completed, created, delta, encoded, not_found

ANN, BOB = {"authorization": "Bearer ann"}, {"authorization": "Bearer bob"}


def ask(**more: object) -> dict[str, object]:
    return {"model": "m", "input": "Hi", **more}


@asynccontextmanager
async def two_workers(**settings: Any) -> AsyncIterator[tuple[RunningRouter, list[ScriptedEngine]]]:
    """Run a router with two scripted engines."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, **settings) as router,
    ):
        yield router, [one, two]


async def next_call(engines: list[ScriptedEngine]) -> tuple[Call, ScriptedEngine]:
    """Return the next call and its engine."""
    await until(lambda: any(not engine.calls.empty() for engine in engines))
    engine = next(engine for engine in engines if not engine.calls.empty())
    return await engine.call(), engine


async def make(router: RunningRouter, engines: list[ScriptedEngine], name: str, **more: object) -> ScriptedEngine:
    """Let Ann create a response; return the engine that did."""
    async with router.post(ask(**more), RESPONSES, **ANN) as post:
        call, engine = await next_call(engines)
        await call.respond(200, encoded(name))
        assert (await post.response()).status == 200
        await post.read()
    return engine


async def call_without_engine(
    router: RunningRouter, name: str, headers: dict[str, str], method: str = "GET", about: str = ""
) -> Any:
    """Make a call about a response without answering at an engine; return status and body."""
    async with router.http.request(method, f"{RESPONSES}/{name}{about}", headers=headers) as answer:
        return answer.status, await answer.json()


async def call_to_engine(
    router: RunningRouter, engine: ScriptedEngine, name: str, method: str = "GET", about: str = "", status: int = 200
) -> Any:
    """Make Ann's call about a response, which this engine must get and answers; return status and body."""
    pending = asyncio.ensure_future(call_without_engine(router, name, ANN, method, about))
    call = await engine.call()
    assert (call.method, call.path) == (method, f"{RESPONSES}/{name}{about}")
    await call.respond(status, encoded(name))
    return await pending


async def test_only_the_owner_finds_a_response() -> None:
    """Get, cancel and delete go to its worker for Ann; for Bob and for other ids the answer is an engine's 404.

    None of these calls is charged or queued.
    """
    async with two_workers() as (router, engines):
        engine = await make(router, engines, "resp_1")
        before = await service(router, *await clients(router))
        for method, about in (("GET", ""), ("POST", "/cancel"), ("GET", "/input_items?limit=2"), ("DELETE", "")):
            for name, headers in (("resp_1", BOB), ("resp_1", {}), ("resp_2", ANN)):
                assert await call_without_engine(router, name, headers, method, about) == (404, not_found(name))
            assert (await call_to_engine(router, engine, "resp_1", method, about))[0] == 200
        assert all(engine.calls.empty() for engine in engines)
        assert await service(router, *await clients(router)) == before
        assert await call_without_engine(router, "resp_1", ANN) == (404, not_found("resp_1"))  # it was deleted


async def clients(router: RunningRouter) -> list[str]:
    return list((await router.fairness())["clients"])


async def test_a_continued_response_goes_to_its_worker() -> None:
    """Every one does; a call that names another client's response reaches no engine, on every path with this member."""
    async with two_workers() as (router, engines):
        engine = await make(router, engines, "resp_1")
        for number in range(6):
            assert await make(router, engines, f"next_{number}", previous_response_id="resp_1") is engine
        for path in (RESPONSES, f"{RESPONSES}/render"):
            for name, headers in (("resp_1", BOB), ("resp_9", ANN), ("", ANN)):
                async with router.post(ask(previous_response_id=name), path, **headers) as post:
                    assert (await post.response()).status == 404
                    assert await (await post.response()).json() == not_found(name)
        assert all(engine.calls.empty() for engine in engines)


async def test_a_pinned_call_waits_for_its_worker_without_delaying_others() -> None:
    """It waits while its worker is full, although another has room; later calls go to the other."""
    async with two_workers(window="fixed", max_inflight=1) as (router, engines):
        keeper = await make(router, engines, "resp_1")
        other = next(engine for engine in engines if engine is not keeper)
        async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as first:
            running = await keeper.call()
            async with router.post(ask(previous_response_id="resp_1", input="more"), RESPONSES, **ANN) as second:
                await router.until_waiting(1)
                async with router.post(ask(), RESPONSES, **BOB) as third:
                    await (await other.call()).respond(200, encoded("resp_3"))
                    assert (await third.response()).status == 200
                assert keeper.calls.empty()
                assert router.scheduler.waiting == 1
                await running.respond(200, encoded("resp_4"))
                await (await keeper.call()).respond(200, encoded("resp_5"))
                assert (await second.response()).status == 200
            assert (await first.response()).status == 200


async def test_a_streamed_response_is_known_from_its_first_event() -> None:
    """Its client can get it while it streams."""
    async with two_workers() as (router, engines), router.post(ask(stream=True), RESPONSES, **ANN) as post:
        call, engine = await next_call(engines)
        await call.begin()
        await call.write(created("resp_1"))
        content = (await post.response()).content
        assert await content.readexactly(len(created("resp_1"))) == created("resp_1")
        assert (await call_to_engine(router, engine, "resp_1"))[0] == 200
        assert await call_without_engine(router, "resp_1", BOB) == (404, not_found("resp_1"))
        await call.write(delta("a") + completed("resp_1"))
        await call.end()
        await post.read()


@pytest.mark.parametrize("more", [{"store": False}, {"store": None}, {"request_id": "resp_1"}])
async def test_unstored_and_client_named_responses_are_not_remembered(more: dict[str, object]) -> None:
    """An id chosen by a client could be that of another client's old response."""
    async with two_workers() as (router, engines):
        await make(router, engines, "resp_1", **more)
        assert await call_without_engine(router, "resp_1", ANN) == (404, not_found("resp_1"))


async def test_nobody_can_overwrite_the_response_of_another() -> None:
    """A call that names its own response by the id of another client's is refused."""
    async with two_workers() as (router, engines):
        await make(router, engines, "resp_1")
        async with router.post(ask(request_id="resp_1"), RESPONSES, **BOB) as post:
            assert (await post.response()).status == 400
            assert (await (await post.response()).json())["error"]["param"] == "request_id"
        assert all(engine.calls.empty() for engine in engines)


async def test_responses_of_a_lost_worker_are_not_found() -> None:
    """Calls that get it or continue it are answered 404."""
    async with two_workers(window="fixed", max_inflight=1) as (router, engines):
        keeper = await make(router, engines, "resp_1")
        await keeper.stop()
        await until(lambda: len(router.scheduler.fleet.serving("m")) == 1)
        assert await call_without_engine(router, "resp_1", ANN) == (404, not_found("resp_1"))
        async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as post:
            assert (await post.response()).status == 404
        assert all(engine.calls.empty() for engine in engines)


async def test_a_call_that_waits_for_a_lost_worker_is_refused() -> None:
    """No other worker could serve it."""
    async with two_workers(window="fixed", max_inflight=1) as (router, engines):
        keeper = await make(router, engines, "resp_1")
        async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as first:
            await keeper.call()
            async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as second:
                await router.until_waiting(1)
                await keeper.stop()
                assert (await second.response()).status == 503
            assert (await first.response()).status in (502, 503)


async def test_remembered_responses_survive_a_restart(tmp_path: Path) -> None:
    """The state file keeps them with their owners."""
    async with scripted_engine() as engine:
        async with running_router(engine.url, state=tmp_path) as router:
            await make(router, [engine], "resp_1")
        async with running_router(engine.url, state=tmp_path) as router:
            assert await call_without_engine(router, "resp_1", BOB) == (404, not_found("resp_1"))
            assert (await call_to_engine(router, engine, "resp_1"))[0] == 200


async def test_a_long_answer_about_a_response_arrives_whole() -> None:
    """It is passed on block by block."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        await make(router, [engine], "resp_1")
        long = b'{"id":"resp_1","output":"' + b"x" * (3 * 2**20) + b'"}'
        pending = asyncio.ensure_future(router.http.get(f"{RESPONSES}/resp_1", headers=ANN))
        await (await engine.call()).respond(200, long)
        assert await (await pending).read() == long


async def test_a_response_that_the_engine_has_lost_is_not_found() -> None:
    """The engine's 404 is passed on; the worker is not blamed, however often, and no other is tried."""
    async with two_workers(breaker_failures=1) as (router, engines):
        engine = await make(router, engines, "resp_1")
        for _ in range(5):
            async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as post:
                await (await engine.call()).respond(404, json.dumps(not_found("resp_1")).encode())
                assert (await post.response()).status == 404
                assert await (await post.response()).json() == not_found("resp_1")
        assert len(router.scheduler.fleet.serving("m")) == 2


async def test_continued_responses_do_not_change_the_token_estimate() -> None:
    """Their usage includes the earlier conversation, so they would distort the estimate for other prompts."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        await make(router, [engine], "resp_1")
        before = router.scheduler.estimates.tokens_per_chunk("m")
        async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as post:
            await (await engine.call()).respond(200, encoded("resp_2", used=(90_000, 0, 2)))
            await post.read()
        await router.check_at_rest()
        assert router.scheduler.estimates.tokens_per_chunk("m") == before
        [client] = await clients(router)
        assert await service(router, client) == (90_008, 0, 4)


def entry(name: str, client: str = "ann", worker: str = "w1") -> StoredResponse:
    return StoredResponse(name, ClientId(client), WorkerId(worker))


def test_the_client_with_most_responses_loses_its_least_recently_used() -> None:
    """A flood of one client does not make the router forget responses of others; use makes a response recent."""
    stored = StoredResponses(limit=4)
    stored.remember(entry("b1", "bob"))
    for number in range(3):
        stored.remember(entry(f"a{number}"))
    assert stored.worker_of("a0", ClientId("ann")) == "w1"
    for number in range(3, 100):
        stored.remember(entry(f"a{number}"))
    assert len(stored) == 4
    assert stored.worker_of("b1", ClientId("bob")) == "w1"
    assert stored.worker_of("a99", ClientId("ann")) == "w1"
    assert stored.worker_of("a96", ClientId("ann")) is None


def test_an_id_keeps_its_first_owner() -> None:
    """Later claims of the same id are ignored."""
    stored = StoredResponses()
    stored.remember(entry("r", "ann", "w1"))
    stored.remember(entry("r", "bob", "w2"))
    assert stored.worker_of("r", ClientId("bob")) is None
    assert stored.worker_of("r", ClientId("ann")) == "w1"


def test_ids_that_are_too_long_are_not_kept() -> None:
    """An engine cannot exhaust the router's memory."""
    stored = StoredResponses()
    stored.remember(entry("r" * 257))
    assert not len(stored)
