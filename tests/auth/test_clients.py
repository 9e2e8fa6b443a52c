"""Keys, limits and groups of the clients file, end to end on real sockets."""

import asyncio
import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.auth.keys_file import hash_of
from tests.support.running import TIMEOUT_S, RunningRouter, chat, emulated_workers, running_router, until
from tests.support.scripted_engine import ScriptedEngine, scripted_engine
from tests.support.workers_http import eventually

ALICE, BOB = "sk-alice", "sk-bob"


def written(path: Path, text: str) -> Path:
    """Replace the file in one step, as an editor or `d2lpm keys` does."""
    beside = path.with_suffix(".part")
    beside.write_text(text)
    os.replace(beside, path)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def entry(name: str, key: str, **more: object) -> str:
    """Return a client's line of the file. JSON is valid YAML."""
    return f"  {name}: {json.dumps({'key': hash_of(key), **more})}\n"


TWO = "clients:\n" + entry("alice", ALICE, weight=2) + entry("bob", BOB)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "clients.yaml", TWO)


async def ask(
    router: RunningRouter, engine: ScriptedEngine, key: str | None, prompt: int = 10, completion: int = 3
) -> Any:
    """Send a call that the engine answers at once with this usage; return the response."""
    async with router.post(chat(), **(bearer(key) if key else {})) as post:
        await (await engine.call()).answer(prompt=prompt, completion=completion)
        return await post.response()


async def refused(router: RunningRouter, key: str | None, **body: str) -> tuple[int, dict[str, Any], Any]:
    """Send a call that is refused; return status, error and headers."""
    async with router.post(chat(**body), **(bearer(key) if key else {})) as post:
        response = await post.response()
        return response.status, json.loads(await post.read())["error"], response.headers


async def usage(router: RunningRouter, key: str) -> Any:
    async with router.http.get("/v1/usage", headers=bearer(key)) as response:
        assert response.status == 200
        return await response.json()


async def test_a_valid_key_is_served_and_sees_its_own_usage(path: Path) -> None:
    """A call is served under its client's name in the file, and `/v1/usage` shows each client only its own usage."""
    async with scripted_engine() as engine, running_router(engine.url, clients=path) as router:
        response = await ask(router, engine, ALICE)
        assert (response.status, response.headers["x-d2lpm-client"]) == (200, "alice")
        async with router.post(chat(), **bearer(BOB)) as post:
            call = await engine.call()
            body = await usage(router, ALICE)
            (day,) = body.pop("usage")
            assert (day["model"], day["calls"], day["input_tokens"], day["output_tokens"]) == ("m", 1, 10, 3)
            assert body == {
                "currency": None,
                **{"client": "alice", "weight": 2.0, "group": None, "share": pytest.approx(2 / 3)},
                "service": {"extend": 10, "cached": 0, "output": 3, "cost": 16.0},
                **{"queued": 0, "running": 0, "wait_p95_s": pytest.approx(0.0, abs=1.0)},
            }
            bob = await usage(router, BOB)
            # What is charged of a call under way depends on how long this machine takes.
            assert (bob["client"], bob["share"], bob["running"]) == ("bob", 1.0, 1)
            await call.answer()
            await post.read()
        async with router.http.get("/v1/usage") as response:
            assert response.status == 401


@pytest.mark.parametrize("key", [None, "sk-mallory", "EMPTY"])
async def test_a_call_without_a_valid_key_is_refused(path: Path, key: str | None) -> None:
    """Without a valid key every engine path answers 401 before the body is read, and never repeats the key."""
    async with scripted_engine() as engine, running_router(engine.url, clients=path) as router:
        status, error, headers = await refused(router, key)
        assert (status, error["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        assert key is None or key not in json.dumps(error)
        for other in ("/v1/embeddings", "/v1/anything"):
            async with router.post({"model": "m", "input": "x"}, other, **(bearer(key) if key else {})) as post:
                assert (await post.response()).status == 401
        assert b"401" in await status_line_without_body(router, key)
        assert engine.calls.empty()
        assert not router.scheduler.weights


async def status_line_without_body(router: RunningRouter, key: str | None) -> bytes:
    """Send only the head of a call and return the status line of the answer."""
    address = urlsplit(router.url)
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: {address.netloc}",
        "content-length: 100",
        "content-type: application/json",
    ]
    lines += [f"authorization: Bearer {key}"] if key else []
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write("\r\n".join([*lines, "", ""]).encode())
        line = await reader.readline()
        writer.close()
        await writer.wait_closed()
    return line


async def test_limits_and_models_hold_on_every_path(path: Path) -> None:
    """Each path answers 429 with a reason and a retry time, 403 for a forbidden model, and 200 after a call has
    ended.
    """
    written(path, "clients:\n" + entry("alice", ALICE, limits={"in_flight": 1}, models=["m"]))
    async with scripted_engine("m", "other") as engine, running_router(engine.url, clients=path) as router:
        async with router.post(chat(), **bearer(ALICE)) as post:
            call = await engine.call()
            for body, where in ((chat(), "/v1/chat/completions"), ({"model": "m", "input": "x"}, "/v1/embeddings")):
                async with router.post(body, where, **bearer(ALICE)) as second:
                    response = await second.response()
                    assert (response.status, response.headers["retry-after"]) == (429, "1")
                    assert response.headers["x-d2lpm-dropped-reason"] == "rejected-limit-in-flight"
            await call.answer()
            await post.read()
        await router.until_all_ended()  # another front may be faster with the next call than this one with the end
        assert (await ask(router, engine, ALICE)).status == 200
        status, error, _ = await refused(router, ALICE, model="other")
        assert (status, error["code"], error["type"]) == (403, "model_not_allowed", "permission_error")

        async def counted() -> bool:
            async with router.http.get("/metrics") as response:
                text = await response.text()
            return 'd2lpm_limited_calls_total{reason="rejected-limit-in-flight"} 2.0' in text

        await eventually(counted)  # a front of its own process reports its counts once a second


async def test_tokens_are_counted_as_the_engine_says(path: Path) -> None:
    """Tokens per minute count the engine's usage: two calls of 1200 tokens use up a limit of 2000."""
    written(path, "clients:\n" + entry("alice", ALICE, limits={"tokens_per_minute": 2000}))
    async with scripted_engine() as engine, running_router(engine.url, clients=path) as router:
        for _ in range(2):
            assert (await ask(router, engine, ALICE, 1000, 200)).status == 200
        await router.until_all_ended()
        status, _, headers = await refused(router, ALICE)
        assert (status, headers["x-d2lpm-dropped-reason"]) == (429, "rejected-limit-tokens")
        assert 10 < int(headers["retry-after"]) < 20


async def test_a_changed_file_takes_effect_and_no_call_is_lost(path: Path) -> None:
    """While the file changes repeatedly under load, at times into an invalid one, every call is answered in full."""
    router_settings = {"clients": path, "policy": "dlpm_home"}
    with emulated_workers(1) as workers:
        async with running_router(*workers, **router_settings) as router:
            await until(lambda: bool(router.scheduler.fleet.serving("m")))
            statuses: list[int] = []
            done = asyncio.Event()

            async def load(key: str) -> None:
                while not done.is_set():
                    async with router.post(chat(stream=True, max_tokens=8), **bearer(key)) as post:
                        body = await post.read()
                        statuses.append((await post.response()).status)
                        assert body.endswith(b"data: [DONE]\n\n"), body

            tasks = [asyncio.create_task(load(key)) for key in (ALICE, BOB) * 4]
            for weight in (5.0, 7.0, 9.0):
                written(path, TWO.replace('"weight": 2', '"weight": 0'))
                before = len(statuses)
                await until(lambda before=before: len(statuses) > before + 8)  # type: ignore[misc]
                written(path, TWO.replace('"weight": 2', f'"weight": {weight}'))
                await until(lambda weight=weight: router.scheduler.weights["alice"] == weight)  # type: ignore[misc, index]
            done.set()
            await asyncio.gather(*tasks)
            assert set(statuses) == {200}
            assert router.scheduler.weights["alice"] == 9.0  # type: ignore[index]


@pytest.mark.one_process("each process reads the keys by itself, and not at the same time")
async def test_a_revoked_key_ends_no_call_in_flight(path: Path) -> None:
    """A call in flight is answered although its key is revoked meanwhile, and later calls with that key are refused."""
    async with scripted_engine() as engine, running_router(engine.url, clients=path) as router:
        async with router.post(chat(), **bearer(ALICE)) as post:
            call = await engine.call()
            written(path, "clients:\n  alice: {key: revoked}\n" + entry("bob", BOB))

            async def is_refused() -> bool:
                async with router.http.get("/v1/usage", headers=bearer(ALICE)) as response:
                    return response.status == 401

            await eventually(is_refused)
            await call.answer()
            assert (await post.response()).status == 200
        assert (await refused(router, ALICE))[0] == 401
        assert (await ask(router, engine, BOB)).status == 200


async def measured(router: RunningRouter, at_once: Mapping[str, int], calls: int) -> dict[str, float]:
    """Return the cost that each key was served between a third of `calls` answers and the last of them.

    Each key keeps `at_once[key]` calls in flight, and no two calls have the same prompt.
    """
    answered, numbers, done = 0, count(), asyncio.Event()

    async def client(key: str) -> None:
        nonlocal answered
        while not done.is_set():
            text = f"{next(numbers)} " * 40
            async with router.post(chat(text, max_tokens=4, stream=True), **bearer(key)) as post:
                await post.read()
            answered += 1

    async def served() -> dict[str, float]:
        return {key: (await usage(router, key))["service"]["cost"] for key in at_once}

    tasks = [asyncio.create_task(client(key)) for key, most in at_once.items() for _ in range(most)]
    await until(lambda: answered >= calls / 3)
    first = await served()
    await until(lambda: answered >= calls)
    last = await served()
    done.set()
    await asyncio.gather(*tasks)
    return {key: last[key] - first[key] for key in at_once}


async def test_ten_keys_of_a_group_have_as_much_as_one_key(tmp_path: Path) -> None:
    """On a running router, ten keys of a group of weight 1 get within 10 % the service of one client of weight 1."""
    members = [f"sk-member-{number}" for number in range(10)]
    text = "groups: {team: {weight: 1}}\nclients:\n" + entry("single", "sk-single")
    text += "".join(entry(f"member{number}", key, group="team") for number, key in enumerate(members))
    path = written(tmp_path / "clients.yaml", text)
    limits = {"window": "fixed", "max_inflight": 2, "dlpm_home": {"quantum": 200}}
    with emulated_workers(1) as workers:
        async with running_router(*workers, clients=path, **limits) as router:
            await until(lambda: bool(router.scheduler.fleet.serving("m")))
            served = await measured(router, {"sk-single": 24, **dict.fromkeys(members, 4)}, 400)
            assert sum(served[key] for key in members) / served["sk-single"] == pytest.approx(1.0, abs=0.1)
            assert min(served[key] for key in members) > 0


async def test_twice_the_weight_is_twice_the_service(path: Path) -> None:
    """On a running router, of two backlogged keys the one with twice the weight gets twice the service."""
    limits = {"window": "fixed", "max_inflight": 2, "dlpm_home": {"quantum": 200}}
    with emulated_workers(1) as workers:
        async with running_router(*workers, clients=path, **limits) as router:
            await until(lambda: bool(router.scheduler.fleet.serving("m")))
            served = await measured(router, {ALICE: 24, BOB: 24}, 300)
            assert served[ALICE] / served[BOB] == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("isolate", ["none", "client", "group"])
async def test_prefixes_are_isolated_as_configured(tmp_path: Path, isolate: str) -> None:
    """The engine receives one salt per client or group, and no cached tokens are predicted across salts."""
    clients = "".join(entry(name, f"sk-{name}", group="team") for name in ("ann", "ben")) + entry("cyd", "sk-cyd")
    path = written(tmp_path / "clients.yaml", "groups: {team: {}}\nclients:\n" + clients)
    content = "the same long prompt " * 100
    salts, predicted = {}, {}
    async with scripted_engine() as engine, running_router(engine.url, clients=path, isolate=isolate) as router:
        for number, name in enumerate(("ann", "ann", "ben", "cyd")):
            async with router.post(chat(content), **bearer(f"sk-{name}")) as post:
                call = await engine.call()
                salts[number] = call.json.get("cache_salt")
                await call.answer(prompt=600)
                response = await post.response()
                predicted[number] = int(response.headers["x-d2lpm-predicted-cached-tokens"]) > 0
    same = {"none": [True, True, True], "client": [True, False, False], "group": [True, True, False]}[isolate]
    assert [predicted[0], predicted[1], predicted[2]] == [False, same[0], same[1]]
    assert [salts[number] == salts[0] for number in (1, 2, 3)] == same
    assert (salts[0] is None) == (isolate == "none")
    assert isolate != "none" or predicted[3]


async def test_a_clients_own_salt_still_separates_its_prompts(path: Path) -> None:
    """Two salts of one client stay distinct, and no client can reach another's prefixes by sending its salt."""
    async with scripted_engine() as engine, running_router(engine.url, clients=path, isolate="client") as router:
        salts = []
        for key, own in ((ALICE, {}), (ALICE, {"cache_salt": "a"}), (ALICE, {"cache_salt": "b"}), (BOB, {})):
            async with router.post(chat(**own), **bearer(key)) as post:
                call = await engine.call()
                salts.append(call.json["cache_salt"])
                await call.answer()
                await post.read()
        async with router.post(chat(cache_salt=salts[0]), **bearer(BOB)) as post:
            call = await engine.call()
            salts.append(call.json["cache_salt"])
            await call.answer()
            await post.read()
        assert len(set(salts)) == 5
