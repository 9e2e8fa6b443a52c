"""The control plane: what operators and their tools read."""

import json

from running import chat, running_router
from scripted_engine import scripted_engine

NUMBER = (int, float)


async def test_models_are_the_union_of_what_living_workers_serve() -> None:
    """Each name once, in OpenAI's shape; a worker that is away adds nothing."""
    async with (
        scripted_engine("m", "b") as one,
        scripted_engine("m", "a") as two,
        running_router(one.url, two.url, "http://127.0.0.1:9") as router,
    ):
        listed = await router.get_json("/v1/models")
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["a", "b", "m"]
        assert all(card["object"] == "model" for card in listed["data"])
        assert [await router.get_json(f"/v1/models/{card['id']}") for card in listed["data"]] == listed["data"]


async def test_health_is_the_routers_own_and_ready_its_workers() -> None:
    """Without a worker it is healthy and not ready."""
    async with running_router("http://127.0.0.1:9") as router:
        async with router.http.get("/health") as response:
            assert response.status == 200
        async with router.http.get("/ready") as response:
            assert response.status == 503
            assert json.loads(await response.read())["error"]["type"] == "server_error"
    async with scripted_engine() as engine, running_router(engine.url, "http://127.0.0.1:9") as router:
        assert await router.get_json("/ready") == {"workers": 1}


async def test_workers_are_told_with_their_models_and_without_their_keys() -> None:
    """Every one that is configured, alive or not."""
    async with scripted_engine("m") as engine:
        workers = [{"url": engine.url, "id": "here", "api_key": "sk-x"}, {"url": "http://127.0.0.1:9", "id": "away"}]
        async with running_router(worker=workers) as router:
            told = await router.get_json("/workers")
            cache = told["workers"][0].pop("cache")
            assert told == {
                "workers": [
                    {"id": "here", "url": engine.url, "healthy": True, "models": ["m"]},
                    {"id": "away", "url": "http://127.0.0.1:9", "healthy": False, "models": [], "cache": None},
                ]
            }
            assert cache.keys() == {
                *("capacity", "believed", "answers", "predicted", "actual", "false_hit", "missed_hit", "error"),
                *("discount", "silent", "evicted"),
            }
            assert (cache["capacity"], cache["error"], cache["discount"]) == (100_000, None, 1.0)


async def test_fairness_has_its_documented_shape() -> None:
    """Every member, by name and type, with a client that is served, one that waits, and a worker that is away."""
    async with scripted_engine() as engine:
        workers = [{"url": engine.url, "id": "w"}, {"url": "http://127.0.0.1:9", "id": "away"}]
        async with running_router(policy="d2lpm", worker=workers, max_inflight=1) as router:
            async with router.post(chat(user="a", stream=True)) as first, router.post(chat(user="b")) as second:
                call = await engine.call()
                busy = await router.fairness()
                await call.answer()
                await first.read()
                await (await engine.call()).answer()
                await second.read()
            assert busy.keys() == {"policy", "jain", "clients", "workers"}
            assert busy["policy"] == "d2lpm"
            assert busy["clients"].keys() == {"user-a", "user-b"}
            for entry in busy["clients"].values():
                assert entry.keys() == {"weight", "service", "queued", "running", "wait_p95_s", "deficit"}
                assert entry["service"].keys() == {"extend", "cached", "output", "cost"}
                assert entry["deficit"]["w"].keys() == {"placement", "order"}
            assert [busy["clients"][c]["running"] for c in ("user-a", "user-b")] == [1, 0]
            assert [busy["clients"][c]["queued"] for c in ("user-a", "user-b")] == [0, 1]
            assert busy["workers"].keys() == {"w", "away"}
            for entry in busy["workers"].values():
                assert entry.keys() == {
                    *("url", "healthy", "queued", "running", "unstarted_tokens"),
                    *("window", "kv_tokens", "service_gap", "service_gap_bound", "cache", "unread"),
                }
            worker = busy["workers"]["w"]
            assert (worker["queued"], worker["running"], worker["kv_tokens"]) == (1, 1, 100_000)
            assert worker["window"] == {"requests": 1, "unstarted_tokens": 4096}
            assert worker["unstarted_tokens"] > 0
            assert isinstance(worker["service_gap_bound"], NUMBER)
            assert not busy["workers"]["away"]["healthy"]
            rest = await router.fairness()
            assert [entry["service"]["output"] for entry in rest["clients"].values()] == [1, 1]
            assert all(isinstance(entry["wait_p95_s"], NUMBER) for entry in rest["clients"].values())
