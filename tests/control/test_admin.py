"""The admin API: who may call it, and what its calls change while the router serves."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.core.model.request import WorkerId
from tests.support.running import RunningRouter, chat, running_router, until
from tests.support.scripted_engine import ScriptedEngine, scripted_engine

KEY = "k" * 16
BEARER = {"authorization": f"Bearer {KEY}"}
NOBODY = "http://127.0.0.1:9"


async def operate(router: RunningRouter, method: str, path: str, status: int = 200, body: object = None) -> Any:
    """Make a call to the admin API. Returns its JSON answer."""
    async with router.http.request(method, path, headers=BEARER, json=body) as response:
        answer = await response.json()
        assert response.status == status, answer
        return answer


async def listed(router: RunningRouter) -> list[str]:
    return [card["id"] for card in (await router.get_json("/workers"))["workers"]]


@asynccontextmanager
async def answering(engine: ScriptedEngine) -> AsyncIterator[Counter[str]]:
    """Answer each call after a moment, and count the calls by their content."""
    answered: Counter[str] = Counter()

    async def answer_all() -> None:
        async with asyncio.TaskGroup() as answers:
            while True:
                call = await engine.call()
                answered[call.json["messages"][0]["content"]] += 1
                answers.create_task(answer(call))

    async def answer(call: Any) -> None:
        await asyncio.sleep(0.005)  # the time that the engine takes
        await call.answer()

    task = asyncio.create_task(answer_all())
    try:
        yield answered
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_admin_calls_need_the_admin_key() -> None:
    """Without a key in the settings the paths do not exist; with one, a call without that key gets 401."""
    async with running_router(NOBODY) as router, router.http.post("/workers/w/drain") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "unknown_path"
    async with running_router(NOBODY, admin_key=KEY) as router:
        for header, status in (("", 401), ("Bearer k", 401), ("Bearer \u00e9", 401), (f"Bearer {KEY}", 404)):
            async with router.http.post("/workers/w/drain", headers={"authorization": header}) as response:
                assert response.status == status
                assert ("www-authenticate" in response.headers) == (status == 401)


@pytest.mark.parametrize(("more", "status"), [({}, 404), ({"admin_on_public": True}, 200)])
async def test_a_public_address_has_no_admin_calls_unless_configured(more: dict[str, Any], status: int) -> None:
    """The key alone does not open the admin API to everybody who can reach the router."""
    async with running_router(NOBODY, host="0.0.0.0", admin_key=KEY, **more) as router:
        await operate(router, "GET", "/config", status)


async def test_a_refused_path_is_answered_with_the_id_of_the_call() -> None:
    """The caller can report its own id, as with every other answer."""
    async with (
        running_router(NOBODY, host="0.0.0.0", admin_key=KEY) as router,
        router.http.get("/fairness", headers={"x-request-id": "mine"}) as response,
    ):
        assert (response.status, response.headers["x-request-id"]) == (401, "mine")


@pytest.mark.parametrize("path", ["/metrics", "/fairness", "/workers", "/explain/x"])
async def test_a_public_address_shows_no_stranger_what_clients_do(path: str) -> None:
    """Where others reach the router, what it knows of all clients needs the operator's key; its health does not."""
    async with running_router(NOBODY, host="0.0.0.0", admin_key=KEY) as router:
        for headers, refused in (({}, True), ({"authorization": "Bearer other"}, True), (BEARER, False)):
            async with router.http.get(path, headers=headers) as response:
                assert (response.status == 401) == refused
        async with router.http.get("/health") as response:
            assert response.status == 200


async def test_openapi_describes_every_admin_call_and_its_security() -> None:
    """The OpenAPI document has each path with its security, and the body that adds a worker."""
    async with running_router(NOBODY, admin_key=KEY) as router:
        document = await router.get_json("/openapi.json")
        calls = {
            (path, method): call
            for path, methods in document["paths"].items()
            for method, call in methods.items()
            if "operator" in call.get("tags", ())
        }
        assert calls.keys() >= {
            *(("/workers", "post"), ("/workers/{worker}", "delete"), ("/workers/{worker}/flush", "post")),
            *(("/workers/{worker}/drain", "post"), ("/workers/{worker}/resume", "post")),
            *(("/fairness/history", "get"), ("/config", "get")),
            *(("/clients/{client}/credit", "post"), ("/clients/{client}", "delete")),
        }
        for call in calls.values():
            assert call["security"]
            assert "401" in call["responses"]
            assert call["description"]
        schema = calls["/workers", "post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"].keys() >= {"url", "api_key", "id"}


async def test_a_worker_is_added_used_and_removed() -> None:
    """An added worker serves; a removed one finishes its calls, gets no new ones, and is then forgotten."""
    async with scripted_engine() as one, scripted_engine() as two, running_router(one.url, admin_key=KEY) as router:
        added = await operate(router, "POST", "/workers", 201, {"url": two.url + "/", "id": "two"})
        assert added == {"id": "two", "url": two.url}
        await until(lambda: WorkerId("two") in router.scheduler.fleet)
        first = (await listed(router))[0]
        await operate(router, "DELETE", f"/workers/{first}", 202)
        assert await listed(router) == ["two"]
        async with router.post(chat(stream=True)) as post:
            call = await two.call()
            await operate(router, "DELETE", "/workers/two", 202)
            assert await listed(router) == ["two"]
            await call.answer()
            assert b"[DONE]" in await post.read()
        await until(lambda: not router.directory.endpoints)
        async with router.post(chat()) as post:
            assert (await post.response()).status == 503


async def test_adding_a_known_worker_and_removing_an_unknown_one_are_errors() -> None:
    """A worker is known by its URL and by its id, and the answer to an invalid body does not repeat the body's key."""
    async with running_router(NOBODY, admin_key=KEY) as router:
        for there in ({"url": NOBODY, "id": "x"}, {"url": "http://127.0.0.1:10", "id": "127.0.0.1:9"}):
            error = await operate(router, "POST", "/workers", 409, there)
            assert error["error"]["code"] == "worker_exists"
        for wrong in ({"url": "ftp://x"}, {}, 7, {"url": NOBODY, "api_key": "sk-secret", "id": "a b"}):
            error = await operate(router, "POST", "/workers", 400, wrong)
            assert error["error"]["code"] == "invalid_body"
            assert "sk-secret" not in str(error)
        await operate(router, "POST", "/workers", 413, "x" * 70_000)
        await operate(router, "DELETE", "/workers/other", 404)
        assert await listed(router) == ["127.0.0.1:9"]


async def test_a_removed_worker_stays_away_until_it_is_added_again() -> None:
    """A worker that the settings name is gone once it is removed, and the operator can add it again."""
    async with scripted_engine() as engine, running_router(engine.url, admin_key=KEY) as router:
        (id_,) = await listed(router)
        await operate(router, "DELETE", f"/workers/{id_}", 202)
        assert await listed(router) == []
        await operate(router, "POST", "/workers", 201, {"url": engine.url})
        assert await listed(router) == [id_]
        await until(lambda: WorkerId(id_) in router.scheduler.fleet)


async def test_a_flushed_cache_is_empty_at_the_engine_and_in_the_mirror() -> None:
    """The router flushes the engine and forgets what it cached; an engine that refuses is reported as an error."""
    async with scripted_engine() as engine, running_router(engine.url, admin_key=KEY) as router:
        (id_,) = await listed(router)
        engine.poll_answers["/reset_prefix_cache"] = (200, b'{"success":true}')
        async with router.post(chat("long " * 400)) as post:
            await (await engine.call()).answer()
            await post.read()
        await router.until_all_ended()
        assert router.scheduler.mirror.held_tokens(WorkerId(id_)) > 0
        assert await operate(router, "POST", f"/workers/{id_}/flush") == {"id": id_, "flushed": True}
        assert router.scheduler.mirror.held_tokens(WorkerId(id_)) == 0
        engine.poll_answers["/reset_prefix_cache"] = (404, b"")
        error = await operate(router, "POST", f"/workers/{id_}/flush", 502)
        assert error["error"]["code"] == "worker_broke"


async def test_a_client_is_credited_and_forgotten() -> None:
    """A credit raises the client's deficit by as much; a client can be forgotten only when it has nothing in flight."""
    async with scripted_engine() as engine, running_router(engine.url, admin_key=KEY) as router:
        async with router.post(chat(user="a", stream=True)) as post:
            call = await engine.call()
            worker = (await listed(router))[0]
            before = (await router.fairness())["clients"]["user-a"]["deficit"][worker]["order"]
            await operate(router, "POST", "/clients/user-a/credit", body={"cost": 500})
            after = (await router.fairness())["clients"]["user-a"]["deficit"][worker]["order"]
            assert after == pytest.approx(before + 500)
            await operate(router, "DELETE", "/clients/user-a", 409)
            for wrong in ({"cost": 0}, {"cost": -1}, {"cost": "much"}, {"cost": True}, {"cost": 1, "unit": "s"}, {}):
                await operate(router, "POST", "/clients/user-a/credit", 400, wrong)
            await call.answer()
            await post.read()
        await router.until_all_ended()
        await operate(router, "DELETE", "/clients/user-a")
        await operate(router, "DELETE", "/clients/user-a", 404)
        await operate(router, "POST", "/clients/user-a/credit", 404, {"cost": 1})


async def test_the_settings_are_shown_without_secrets() -> None:
    """The answer has each setting with its value, but no key and no hash secret."""
    async with running_router(
        admin_key=KEY, hash_secret="h" * 16, worker=[{"url": NOBODY, "api_key": "sk-one"}], worker_api_key="sk-all"
    ) as router:
        shown = await operate(router, "GET", "/config")
        assert (shown["policy"], shown["max_queued"], shown["dlpm"]["quantum"]) == ("dlpm_home", 5000, 20000)
        assert shown["worker"][0]["url"] == NOBODY
        assert not any(secret in str(shown) for secret in (KEY, "h" * 16, "sk-one", "sk-all"))


async def test_no_request_is_lost_while_workers_come_and_go() -> None:
    """While workers are added, drained, resumed and removed under a constant load, each request gets one answer."""
    async with (
        scripted_engine() as one,
        scripted_engine() as two,
        scripted_engine() as three,
        answering(one) as first,
        answering(two) as second,
        answering(three) as third,
        running_router(one.url, two.url, admin_key=KEY, policy="least_requests") as router,
    ):
        stop, sent = asyncio.Event(), Counter[str]()

        async def client(number: int) -> None:
            while not stop.is_set():
                content = f"{number} {sent.total()}"
                sent[content] += 1
                async with router.post(chat(content, stream=number % 2 == 0, user=f"{number}")) as post:
                    response = await post.response()
                    assert response.status == 200, await response.read()
                    assert b"yes" in await response.read()

        async with asyncio.TaskGroup() as clients:
            for number in range(8):
                clients.create_task(client(number))
            await until(lambda: min(first.total(), second.total()) > 10)
            names = await listed(router)
            for again in range(3):
                await operate(router, "POST", "/workers", 201, {"url": three.url, "id": "three"})
                before = third.total()
                await until(lambda: third.total() > before + 5)  # noqa: B023 - awaited here
                await operate(router, "POST", f"/workers/{names[0]}/drain")
                await until(lambda: WorkerId(names[0]) not in router.scheduler.fleet)
                before = second.total()
                await until(lambda: second.total() > before + 5)  # noqa: B023
                await operate(router, "POST", f"/workers/{names[0]}/resume")
                await operate(router, "DELETE", "/workers/three", 202)
                await until(lambda: len(router.directory.endpoints) == 2)
                assert await listed(router) == names, again
            stop.set()
        assert first + second + third == sent
        assert max(sent.values()) == 1
