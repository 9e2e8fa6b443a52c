"""Responses in the background: the request holds its place and its bill until the engine has computed it."""

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from router.core.model.events import Cancelled, Event, Failed, Finished
from tests.support.running import RunningRouter, running_router, until
from tests.support.scripted_engine import ScriptedEngine, scripted_engine
from tests.support.served import service
from tests.support.stored_scripts import RESPONSES, completed, created, delta, encoded

ANN = {"authorization": "Bearer ann"}
NAME = "resp_1"


class Endings:
    """Notes how requests end."""

    event_types = (Finished, Failed, Cancelled)

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, now: float, event: Event, commands: object) -> None:  # noqa: ARG002 - as all observers
        self.events.append(event)


def ask(**more: object) -> dict[str, object]:
    return {"model": "m", "input": "Hi", "background": True, "max_output_tokens": 50, **more}


def allowed(engine: ScriptedEngine, **settings: Any) -> Any:
    """A router before this engine that serves responses in the background."""
    return running_router(engine.url, background_responses=True, **settings)


def keep(engine: ScriptedEngine, status: int, body: bytes) -> None:
    """What the engine answers to looks at the response from now on."""
    engine.poll_answers[f"{RESPONSES}/{NAME}"] = (status, body)


async def begin(router: RunningRouter, engine: ScriptedEngine) -> None:
    """Ann has a response made in the background, which waits in the engine."""
    keep(engine, 200, encoded(NAME, "queued", used=None))
    async with router.post(ask(), RESPONSES, **ANN) as post:
        await (await engine.call()).respond(200, encoded(NAME, "queued", used=None))
        assert (await (await post.response()).json())["status"] == "queued"


def looks(engine: ScriptedEngine) -> int:
    """How often the router looked at the response."""
    return sum(call.path == f"{RESPONSES}/{NAME}" for call in engine.polls)


async def the_client(router: RunningRouter) -> str:
    """Ann, under the name that the router gives her."""
    [client] = (await router.fairness())["clients"]
    return str(client)


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_it_holds_its_place_until_it_is_done_and_is_charged_what_its_usage_says(status: str) -> None:
    """While the engine computes, what comes next waits, however long the first client has had its answer."""
    async with scripted_engine() as engine, allowed(engine, window="fixed", max_inflight=1) as router:
        await begin(router, engine)
        async with router.post({"model": "m", "input": "Ho"}, RESPONSES, **ANN) as other:
            keep(engine, 200, encoded(NAME, "in_progress", used=None))
            seen = looks(engine)
            await until(lambda: looks(engine) > seen + 1)
            assert engine.calls.empty()
            assert (router.scheduler.live, router.scheduler.waiting) == (2, 1)
            keep(engine, 200, encoded(NAME, status, used=(700, 300, 40)))
            await (await engine.call()).respond(200, encoded("resp_2", used=(10, 0, 5)))
            await other.read()
        await router.check_at_rest()
        assert await service(router, await the_client(router)) == (400 + 10, 300, 40 + 5)


async def test_what_is_cancelled_frees_its_place() -> None:
    """The router looks at once, and what was estimated until then is owed; the worker is not to blame."""
    async with scripted_engine() as engine, allowed(engine) as router:
        router.scheduler_host.attach(endings := Endings())
        await begin(router, engine)
        pending = asyncio.ensure_future(router.http.post(f"{RESPONSES}/{NAME}/cancel", headers=ANN))
        call = await engine.call()
        keep(engine, 200, encoded(NAME, "cancelled", used=None))
        await call.respond(200, encoded(NAME, "cancelled", used=None))
        assert (await pending).status == 200
        await router.check_at_rest()
        assert (await service(router, await the_client(router)))[0] > 0
        assert isinstance(endings.events[-1], Cancelled)


async def test_what_is_deleted_frees_its_place() -> None:
    """Where an engine deletes at all; that it is gone then is no fault of the worker's."""
    async with scripted_engine() as engine, allowed(engine) as router:
        router.scheduler_host.attach(endings := Endings())
        await begin(router, engine)
        del engine.poll_answers[f"{RESPONSES}/{NAME}"]
        pending = asyncio.ensure_future(router.http.delete(f"{RESPONSES}/{NAME}", headers=ANN))
        deleted = False
        while not deleted or router.scheduler.live:
            call = await engine.call()
            deleted = deleted or call.method == "DELETE"
            if call.method == "DELETE":
                await call.respond(200, b'{"deleted":true}')
            else:
                await call.respond(404 if deleted else 200, encoded(NAME, "queued", used=None))
                if deleted:
                    break
        assert (await pending).status == 200
        await router.check_at_rest()
        assert isinstance(endings.events[-1], Cancelled)


async def test_a_client_that_goes_away_ends_nothing() -> None:
    """Not even one that goes before the answer: nobody else could know the response's name, so the router waits."""
    async with scripted_engine() as engine, allowed(engine) as router:
        keep(engine, 200, encoded(NAME, "queued", used=None))
        async with router.post(ask(), RESPONSES, **ANN):
            call = await engine.call()
        await until(lambda: not len(router.connections))
        await call.respond(200, encoded(NAME, "queued", used=None))
        await until(lambda: looks(engine) > 1)
        assert router.scheduler.live == 1
        keep(engine, 200, encoded(NAME, used=(700, 300, 40)))
        await router.check_at_rest()
        assert await service(router, await the_client(router)) == (400, 300, 40)


async def test_a_stream_goes_on_without_its_client() -> None:
    """It is read to its end, and charged by its usage."""
    async with scripted_engine() as engine, allowed(engine) as router:
        async with router.post(ask(stream=True), RESPONSES, **ANN) as post:
            call = await engine.call()
            await call.begin()
            await call.write(created(NAME))
            await (await post.response()).content.readexactly(len(created(NAME)))
        await until(lambda: not len(router.connections))
        for _ in range(5):
            await call.write(delta("a"))
        assert router.scheduler.live == 1
        await call.write(completed(NAME, used=(700, 300, 40)))
        await call.end()
        await router.check_at_rest()
        assert await service(router, await the_client(router)) == (400, 300, 40)


async def test_a_stream_that_is_cancelled_ends() -> None:
    """Although the engine says no more on it, as vLLM does; its client pays for what has come."""
    async with scripted_engine() as engine, allowed(engine) as router:
        async with router.post(ask(stream=True), RESPONSES, **ANN) as post:
            call = await engine.call()
            await call.begin()
            await call.write(created(NAME) + delta("a") * 3)
            content = (await post.response()).content
            await content.readexactly(len(created(NAME) + delta("a") * 3))
            pending = asyncio.ensure_future(router.http.post(f"{RESPONSES}/{NAME}/cancel", headers=ANN))
            await (await engine.call()).respond(200, encoded(NAME, "cancelled", used=None))
            assert (await pending).status == 200
            assert await content.read() == b""
        await call.wait_closed()
        await router.check_at_rest()
        assert (await service(router, await the_client(router)))[2] == 3


async def test_a_workers_death_ends_it() -> None:
    """Its place is free, and its output is not charged."""
    async with scripted_engine() as engine, allowed(engine) as router:
        await begin(router, engine)
        await engine.stop()
        await router.check_at_rest()
        assert (await service(router, await the_client(router)))[2] == 0


async def test_a_worker_that_has_forgotten_it_ends_it() -> None:
    """It has begun anew."""
    async with scripted_engine() as engine, allowed(engine) as router:
        await begin(router, engine)
        keep(engine, 404, b"{}")
        await router.check_at_rest()
        assert (await service(router, await the_client(router)))[2] == 0


async def test_one_that_never_ends_is_cancelled_after_as_long_as_a_whole_answer_may_take() -> None:
    """VLLM leaves one whose work has failed in its queue for ever."""
    limits = {"first_token_timeout": 0.1, "token_timeout": 0.1}
    async with scripted_engine() as engine, allowed(engine, **limits) as router:
        await begin(router, engine)
        call = await engine.call()
        assert (call.method, call.path) == ("POST", f"{RESPONSES}/{NAME}/cancel")
        await call.respond(200, encoded(NAME, "cancelled", used=None))
        await router.check_at_rest()


async def test_a_failed_one_ends_it() -> None:
    """As an engine's own error does."""
    async with scripted_engine() as engine, allowed(engine) as router:
        await begin(router, engine)
        keep(engine, 200, encoded(NAME, "failed", used=None))
        await router.check_at_rest()


async def test_it_counts_among_its_clients_requests_in_flight(tmp_path: Path) -> None:
    """Until the engine is done. To look at it and to cancel it does not count."""
    path = tmp_path / "clients.yaml"
    key = f"sha256:{sha256(b'sk-ann').hexdigest()}"
    path.write_text(json.dumps({"clients": {"ann": {"key": key, "limits": {"in_flight": 1}}}}))
    ann = {"authorization": "Bearer sk-ann"}
    async with scripted_engine() as engine, allowed(engine, clients=path) as router:
        keep(engine, 200, encoded(NAME, "queued", used=None))
        async with router.post(ask(), RESPONSES, **ann) as post:
            await (await engine.call()).respond(200, encoded(NAME, "queued", used=None))
            await post.read()
        async with router.post(ask(), RESPONSES, **ann) as second:
            assert (await second.response()).status == 429
        async with router.http.get(f"{RESPONSES}/{NAME}", headers=ann) as answer:
            assert (await answer.json())["status"] == "queued"
        keep(engine, 200, encoded(NAME))
        await router.check_at_rest()
        async with router.post(ask(background=False), RESPONSES, **ann) as third:
            await (await engine.call()).respond(200, encoded("resp_2"))
            assert (await third.response()).status == 200


async def test_what_is_done_at_once_is_charged_at_once() -> None:
    """An engine may pass over `background`."""
    async with scripted_engine() as engine, allowed(engine) as router:
        async with router.post(ask(), RESPONSES, **ANN) as post:
            await (await engine.call()).respond(200, encoded(NAME, used=(700, 300, 40)))
            await post.read()
        await router.check_at_rest()
        assert await service(router, await the_client(router)) == (400, 300, 40)
        assert not looks(engine)


async def test_the_routers_end_is_not_held_up() -> None:
    """It stops following; its client owes what was estimated until then."""
    async with scripted_engine() as engine:
        pending = allowed(engine)
        router = await pending.__aenter__()
        await begin(router, engine)
        # The harness wants every count at zero first: so the end is that of the part itself.
        background = router.background
        await background.__aexit__(None, None, None)
        await router.check_at_rest()
        await pending.__aexit__(None, None, None)
