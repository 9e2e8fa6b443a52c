"""Background responses: the request holds its place and its bill until the engine has computed the response."""

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


class EndRecorder:
    """Records how requests end."""

    event_types = (Finished, Failed, Cancelled)

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, now: float, event: Event, commands: object) -> None:  # noqa: ARG002 - as all observers
        self.events.append(event)


def ask(**more: object) -> dict[str, object]:
    return {"model": "m", "input": "Hi", "background": True, "max_output_tokens": 50, **more}


def background_router(engine: ScriptedEngine, **settings: Any) -> Any:
    """Run a router that allows background responses, with this engine."""
    return running_router(engine.url, background_responses=True, **settings)


def set_poll_answer(engine: ScriptedEngine, status: int, body: bytes) -> None:
    """Set the engine's answer to polls of the response."""
    engine.poll_answers[f"{RESPONSES}/{NAME}"] = (status, body)


async def begin(router: RunningRouter, engine: ScriptedEngine) -> None:
    """Let Ann start a background response, which waits in the engine."""
    set_poll_answer(engine, 200, encoded(NAME, "queued", used=None))
    async with router.post(ask(), RESPONSES, **ANN) as post:
        await (await engine.call()).respond(200, encoded(NAME, "queued", used=None))
        assert (await (await post.response()).json())["status"] == "queued"


def polls(engine: ScriptedEngine) -> int:
    """Return how often the router polled the response."""
    return sum(call.path == f"{RESPONSES}/{NAME}" for call in engine.polls)


async def client_name(router: RunningRouter) -> str:
    """Return the router's name for Ann."""
    [client] = (await router.fairness())["clients"]
    return str(client)


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_it_holds_its_place_until_it_is_done_and_is_charged_by_its_usage(status: str) -> None:
    """While the engine computes, the next request waits, although the first client already has its answer."""
    async with scripted_engine() as engine, background_router(engine, window="fixed", max_inflight=1) as router:
        await begin(router, engine)
        async with router.post({"model": "m", "input": "Ho"}, RESPONSES, **ANN) as other:
            set_poll_answer(engine, 200, encoded(NAME, "in_progress", used=None))
            seen = polls(engine)
            await until(lambda: polls(engine) > seen + 1)
            assert engine.calls.empty()
            assert (router.scheduler.live, router.scheduler.waiting) == (2, 1)
            set_poll_answer(engine, 200, encoded(NAME, status, used=(700, 300, 40)))
            await (await engine.call()).respond(200, encoded("resp_2", used=(10, 0, 5)))
            await other.read()
        await router.check_at_rest()
        assert await service(router, await client_name(router)) == (400 + 10, 300, 40 + 5)


async def test_cancelling_frees_its_place() -> None:
    """The router polls at once and charges the estimate until then; the worker is not blamed."""
    async with scripted_engine() as engine, background_router(engine) as router:
        router.scheduler_host.attach(endings := EndRecorder())
        await begin(router, engine)
        pending = asyncio.ensure_future(router.http.post(f"{RESPONSES}/{NAME}/cancel", headers=ANN))
        call = await engine.call()
        set_poll_answer(engine, 200, encoded(NAME, "cancelled", used=None))
        await call.respond(200, encoded(NAME, "cancelled", used=None))
        assert (await pending).status == 200
        await router.check_at_rest()
        assert (await service(router, await client_name(router)))[0] > 0
        assert isinstance(endings.events[-1], Cancelled)


async def test_deleting_frees_its_place() -> None:
    """If an engine deletes it, the missing response is not the worker's fault."""
    async with scripted_engine() as engine, background_router(engine) as router:
        router.scheduler_host.attach(endings := EndRecorder())
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


async def test_a_disconnect_does_not_end_it() -> None:
    """A client that disconnects before the answer does not stop the router, which alone learns the response's id."""
    async with scripted_engine() as engine, background_router(engine) as router:
        set_poll_answer(engine, 200, encoded(NAME, "queued", used=None))
        async with router.post(ask(), RESPONSES, **ANN):
            call = await engine.call()
        await until(lambda: not len(router.connections))
        await call.respond(200, encoded(NAME, "queued", used=None))
        await until(lambda: polls(engine) > 1)
        assert router.scheduler.live == 1
        set_poll_answer(engine, 200, encoded(NAME, used=(700, 300, 40)))
        await router.check_at_rest()
        assert await service(router, await client_name(router)) == (400, 300, 40)


async def test_a_stream_goes_on_without_its_client() -> None:
    """The stream is read to its end, and charged by its usage."""
    async with scripted_engine() as engine, background_router(engine) as router:
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
        assert await service(router, await client_name(router)) == (400, 300, 40)


async def test_cancelling_ends_its_stream() -> None:
    """The router ends it, because vLLM does not; the client pays for what has arrived."""
    async with scripted_engine() as engine, background_router(engine) as router:
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
        assert (await service(router, await client_name(router)))[2] == 3


async def test_the_death_of_its_worker_ends_it() -> None:
    """When its worker dies, a response frees its place, and its output is not charged."""
    async with scripted_engine() as engine, background_router(engine) as router:
        await begin(router, engine)
        await engine.stop()
        await router.check_at_rest()
        assert (await service(router, await client_name(router)))[2] == 0


async def test_a_restart_of_its_worker_ends_it() -> None:
    """The worker does not know the response any more."""
    async with scripted_engine() as engine, background_router(engine) as router:
        await begin(router, engine)
        set_poll_answer(engine, 404, b"{}")
        await router.check_at_rest()
        assert (await service(router, await client_name(router)))[2] == 0


async def test_it_is_cancelled_after_the_timeout_of_a_whole_answer() -> None:
    """VLLM keeps a failed response queued for ever."""
    limits = {"first_token_timeout": 0.5, "token_timeout": 0.5}  # long compared with the stalls of a busy machine
    async with scripted_engine() as engine, background_router(engine, **limits) as router:
        await begin(router, engine)
        call = await engine.call()
        assert (call.method, call.path) == ("POST", f"{RESPONSES}/{NAME}/cancel")
        await call.respond(200, encoded(NAME, "cancelled", used=None))
        await router.check_at_rest()


async def test_a_failure_ends_it() -> None:
    """The engine reports the failure itself."""
    async with scripted_engine() as engine, background_router(engine) as router:
        await begin(router, engine)
        set_poll_answer(engine, 200, encoded(NAME, "failed", used=None))
        await router.check_at_rest()


async def test_it_counts_among_its_clients_requests_in_flight(tmp_path: Path) -> None:
    """A background response counts in its client's limit until the engine is done, and calls about it do not count."""
    path = tmp_path / "clients.yaml"
    key = f"sha256:{sha256(b'sk-ann').hexdigest()}"
    path.write_text(json.dumps({"clients": {"ann": {"key": key, "limits": {"in_flight": 1}}}}))
    ann = {"authorization": "Bearer sk-ann"}
    async with scripted_engine() as engine, background_router(engine, clients=path) as router:
        set_poll_answer(engine, 200, encoded(NAME, "queued", used=None))
        async with router.post(ask(), RESPONSES, **ann) as post:
            await (await engine.call()).respond(200, encoded(NAME, "queued", used=None))
            await post.read()
        async with router.post(ask(), RESPONSES, **ann) as second:
            assert (await second.response()).status == 429
        async with router.http.get(f"{RESPONSES}/{NAME}", headers=ann) as answer:
            assert (await answer.json())["status"] == "queued"
        set_poll_answer(engine, 200, encoded(NAME))
        await router.check_at_rest()
        async with router.post(ask(background=False), RESPONSES, **ann) as third:
            await (await engine.call()).respond(200, encoded("resp_2"))
            assert (await third.response()).status == 200


async def test_a_response_that_is_done_at_once_is_charged_at_once() -> None:
    """An engine can ignore `background`."""
    async with scripted_engine() as engine, background_router(engine) as router:
        async with router.post(ask(), RESPONSES, **ANN) as post:
            await (await engine.call()).respond(200, encoded(NAME, used=(700, 300, 40)))
            await post.read()
        await router.check_at_rest()
        assert await service(router, await client_name(router)) == (400, 300, 40)
        assert not polls(engine)


async def test_shutdown_does_not_wait_for_it() -> None:
    """The router stops polling; the client is charged the estimate until then."""
    async with scripted_engine() as engine:
        pending = background_router(engine)
        router = await pending.__aenter__()
        await begin(router, engine)
        # The test's router checks that all counts are zero before it stops, so stop only this part here.
        background = router.background
        await background.__aexit__(None, None, None)
        await router.check_at_rest()
        await pending.__aexit__(None, None, None)
