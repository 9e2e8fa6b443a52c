"""Responses that engines store: only the client that made one is led to the worker that keeps it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.core.model.request import ClientId, WorkerId
from router.front.stored.owners import StoredResponse, StoredResponses
from tests.support.running import RunningRouter, running_router, until
from tests.support.scripted_engine import Call, ScriptedEngine, scripted_engine
from tests.support.served import service
from tests.support.stored_scripts import RESPONSES, completed, created, delta, encoded, not_found

ANN, BOB = {"authorization": "Bearer ann"}, {"authorization": "Bearer bob"}


def ask(**more: object) -> dict[str, object]:
    return {"model": "m", "input": "Hi", **more}


@asynccontextmanager
async def two_workers(**settings: Any) -> AsyncIterator[tuple[RunningRouter, list[ScriptedEngine]]]:
    """A router before two scripted engines."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        running_router(one.url, two.url, **settings) as router,
    ):
        yield router, [one, two]


async def next_call(engines: list[ScriptedEngine]) -> tuple[Call, ScriptedEngine]:
    """The next call, and the engine that it came to."""
    await until(lambda: any(not engine.calls.empty() for engine in engines))
    engine = next(engine for engine in engines if not engine.calls.empty())
    return await engine.call(), engine


async def make(router: RunningRouter, engines: list[ScriptedEngine], name: str, **more: object) -> ScriptedEngine:
    """Ann has a response made; returns the engine that did it."""
    async with router.post(ask(**more), RESPONSES, **ANN) as post:
        call, engine = await next_call(engines)
        await call.respond(200, encoded(name))
        assert (await post.response()).status == 200
        await post.read()
    return engine


async def found(router: RunningRouter, name: str, headers: dict[str, str], method: str = "GET", about: str = "") -> Any:
    """Status and body of a call about a response that no engine is to see."""
    async with router.http.request(method, f"{RESPONSES}/{name}{about}", headers=headers) as answer:
        return answer.status, await answer.json()


async def seen(
    router: RunningRouter, engine: ScriptedEngine, name: str, method: str = "GET", about: str = "", status: int = 200
) -> Any:
    """The same of Ann's call, which this engine is to answer with this status."""
    pending = asyncio.ensure_future(found(router, name, ANN, method, about))
    call = await engine.call()
    assert (call.method, call.path) == (method, f"{RESPONSES}/{name}{about}")
    await call.respond(status, encoded(name))
    return await pending


async def test_a_response_is_found_by_the_client_that_made_it_alone() -> None:
    """Look, cancel and delete go to its worker for Ann; Bob, and whoever asks for another id, is told as by an engine.

    None of it is charged, and none of it waits for a turn.
    """
    async with two_workers() as (router, engines):
        engine = await make(router, engines, "resp_1")
        before = await service(router, *await clients(router))
        for method, about in (("GET", ""), ("POST", "/cancel"), ("GET", "/input_items?limit=2"), ("DELETE", "")):
            for name, headers in (("resp_1", BOB), ("resp_1", {}), ("resp_2", ANN)):
                assert await found(router, name, headers, method, about) == (404, not_found(name))
            assert (await seen(router, engine, "resp_1", method, about))[0] == 200
        assert all(engine.calls.empty() for engine in engines)
        assert await service(router, *await clients(router)) == before
        assert await found(router, "resp_1", ANN) == (404, not_found("resp_1"))  # it was deleted


async def clients(router: RunningRouter) -> list[str]:
    return list((await router.fairness())["clients"])


async def test_what_goes_on_from_a_response_goes_to_its_worker() -> None:
    """Each of many times; a stranger's is refused before an engine sees it, on every path that takes the member."""
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


async def test_a_call_that_is_pinned_waits_for_its_worker_and_no_other_waits_for_it() -> None:
    """While its worker is full it waits, though another has room; what comes later goes there."""
    async with two_workers(window="fixed", max_inflight=1) as (router, engines):
        keeper = await make(router, engines, "resp_1")
        other = next(engine for engine in engines if engine is not keeper)
        async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as first:
            running = await keeper.call()
            async with router.post(ask(previous_response_id="resp_1", input="more"), RESPONSES, **ANN) as second:
                await until(lambda: router.scheduler.waiting == 1)
                async with router.post(ask(), RESPONSES, **BOB) as third:
                    await (await other.call()).respond(200, encoded("resp_3"))
                    assert (await third.response()).status == 200
                assert keeper.calls.empty()
                assert router.scheduler.waiting == 1
                await running.respond(200, encoded("resp_4"))
                await (await keeper.call()).respond(200, encoded("resp_5"))
                assert (await second.response()).status == 200
            assert (await first.response()).status == 200


async def test_a_streams_response_is_known_from_its_first_event_on() -> None:
    """Its client may look at it while it streams."""
    async with two_workers() as (router, engines), router.post(ask(stream=True), RESPONSES, **ANN) as post:
        call, engine = await next_call(engines)
        await call.begin()
        await call.write(created("resp_1"))
        content = (await post.response()).content
        assert await content.readexactly(len(created("resp_1"))) == created("resp_1")
        assert (await seen(router, engine, "resp_1"))[0] == 200
        assert await found(router, "resp_1", BOB) == (404, not_found("resp_1"))
        await call.write(delta("a") + completed("resp_1"))
        await call.end()
        await post.read()


@pytest.mark.parametrize("more", [{"store": False}, {"store": None}, {"request_id": "resp_1"}])
async def test_what_is_not_stored_or_named_by_its_client_is_not_remembered(more: dict[str, object]) -> None:
    """An id that a client chooses could be that of somebody else's response, made long ago."""
    async with two_workers() as (router, engines):
        await make(router, engines, "resp_1", **more)
        assert await found(router, "resp_1", ANN) == (404, not_found("resp_1"))


async def test_nobody_can_overwrite_the_response_of_another() -> None:
    """A call that names its own response by the id of another client's is refused."""
    async with two_workers() as (router, engines):
        await make(router, engines, "resp_1")
        async with router.post(ask(request_id="resp_1"), RESPONSES, **BOB) as post:
            assert (await post.response()).status == 400
            assert (await (await post.response()).json())["error"]["param"] == "request_id"
        assert all(engine.calls.empty() for engine in engines)


async def test_the_response_of_a_worker_that_is_gone_is_gone() -> None:
    """Whoever asks for it, or goes on from it, is told that there is none; so is a call that waits for that worker."""
    async with two_workers(window="fixed", max_inflight=1) as (router, engines):
        keeper = await make(router, engines, "resp_1")
        await keeper.stop()
        await until(lambda: len(router.scheduler.cluster.serving("m")) == 1)
        assert await found(router, "resp_1", ANN) == (404, not_found("resp_1"))
        async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as post:
            assert (await post.response()).status == 404
        assert all(engine.calls.empty() for engine in engines)


async def test_a_call_that_waits_for_a_worker_that_goes_is_refused() -> None:
    """Nobody else could serve it."""
    async with two_workers(window="fixed", max_inflight=1) as (router, engines):
        keeper = await make(router, engines, "resp_1")
        async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as first:
            await keeper.call()
            async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as second:
                await until(lambda: router.scheduler.waiting == 1)
                await keeper.stop()
                assert (await second.response()).status == 503
            assert (await first.response()).status in (502, 503)


async def test_what_was_remembered_survives_a_restart(tmp_path: Path) -> None:
    """By the state file, with its owner."""
    async with scripted_engine() as engine:
        async with running_router(engine.url, state=tmp_path) as router:
            await make(router, [engine], "resp_1")
        async with running_router(engine.url, state=tmp_path) as router:
            assert await found(router, "resp_1", BOB) == (404, not_found("resp_1"))
            assert (await seen(router, engine, "resp_1"))[0] == 200


async def test_a_long_answer_about_a_response_comes_whole() -> None:
    """It is passed on as it comes."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        await make(router, [engine], "resp_1")
        long = b'{"id":"resp_1","output":"' + b"x" * (3 * 2**20) + b'"}'
        pending = asyncio.ensure_future(router.http.get(f"{RESPONSES}/resp_1", headers=ANN))
        await (await engine.call()).respond(200, long)
        assert await (await pending).read() == long


async def test_what_an_engine_has_lost_is_told_by_the_engine() -> None:
    """That is no fault of the worker's, however often it happens, and no other is asked."""
    async with two_workers(breaker_failures=1) as (router, engines):
        engine = await make(router, engines, "resp_1")
        for _ in range(5):
            async with router.post(ask(previous_response_id="resp_1"), RESPONSES, **ANN) as post:
                await (await engine.call()).respond(404, json.dumps(not_found("resp_1")).encode())
                assert (await post.response()).status == 404
                assert await (await post.response()).json() == not_found("resp_1")
        assert len(router.scheduler.cluster.serving("m")) == 2


async def test_calls_that_go_on_say_nothing_about_how_many_tokens_a_text_has() -> None:
    """Their engine reads the whole conversation before: others' prompts would seem as dense."""
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


def test_whoever_has_most_loses_its_oldest() -> None:
    """Not the oldest of all: a flood makes the router forget nothing of others; what is asked for is not old."""
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
    """Whatever is told of it later."""
    stored = StoredResponses()
    stored.remember(entry("r", "ann", "w1"))
    stored.remember(entry("r", "bob", "w2"))
    assert stored.worker_of("r", ClientId("bob")) is None
    assert stored.worker_of("r", ClientId("ann")) == "w1"


def test_ids_that_are_too_long_are_not_kept() -> None:
    """An engine is not trusted with the router's memory."""
    stored = StoredResponses()
    stored.remember(entry("r" * 257))
    assert not len(stored)
