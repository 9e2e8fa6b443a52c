"""What the router's control plane reports to operators and their tools, and how they drain and resume a worker."""

import json

from router.core.model.request import WorkerId
from tests.support.running import chat, running_router, until
from tests.support.scripted_engine import scripted_engine

NUMBER = (int, float)


async def test_models_are_the_union_of_the_models_of_healthy_workers() -> None:
    """The list has each name once and in OpenAI's shape, and a worker that cannot be reached adds nothing."""
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


async def test_health_describes_the_router_and_ready_its_workers() -> None:
    """A router without a reachable worker is healthy and not ready."""
    async with running_router("http://127.0.0.1:9") as router:
        async with router.http.get("/health") as response:
            assert response.status == 200
        async with router.http.get("/ready") as response:
            assert response.status == 503
            assert json.loads(await response.read())["error"]["type"] == "server_error"
    async with scripted_engine() as engine, running_router(engine.url, "http://127.0.0.1:9") as router:
        assert await router.get_json("/ready") == {"workers": 1}


async def test_head_answers_as_get_without_the_body() -> None:
    """Monitors and load balancers ask so. The stream of the page is no page: an answer to it has no end."""
    paths = ("/health", "/ready", "/v1/models", "/metrics", "/fairness", "/workers", "/openapi.json", "/nothing")
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for path in paths:
            async with router.http.get(path) as got, router.http.head(path) as head:
                assert (head.status, head.content_type) == (got.status, got.content_type), path
                assert int(head.headers["content-length"]) > 0
                assert await head.read() == b""
        async with router.http.head("/ui/events") as refused:
            assert refused.status == 404


async def test_no_page_loads_scripts_from_elsewhere() -> None:
    """The API is described by its document alone: FastAPI's own pages for it are off."""
    async with running_router("http://127.0.0.1:9") as router:
        assert (await router.get_json("/openapi.json"))["openapi"]
        for path in ("/docs", "/redoc"):
            async with router.http.get(path) as response:
                assert response.status == 404


async def test_workers_are_listed_with_their_models_and_without_their_keys() -> None:
    """The list has every configured worker, reachable or not."""
    async with scripted_engine("m") as engine:
        workers = [{"url": engine.url, "id": "here", "api_key": "sk-x"}, {"url": "http://127.0.0.1:9", "id": "away"}]
        async with running_router(worker=workers) as router:
            reported = await router.get_json("/workers")
            cache = reported["workers"][0].pop("cache")
            assert [card.pop("breaker") for card in reported["workers"]] == ["closed", None]
            assert reported == {
                "workers": [
                    {
                        **{"id": "here", "url": engine.url, "healthy": True, "drained": False, "models": ["m"]},
                        **{"engine": "vllm", "version": "0.32.0", "not_added_fields": {}, "refused_fields": {}},
                    },
                    {
                        **{"id": "away", "url": "http://127.0.0.1:9", "healthy": False, "drained": False, "models": []},
                        **{"engine": "", "version": None, "not_added_fields": {}, "refused_fields": {}, "cache": None},
                    },
                ]
            }
            assert cache.keys() == {
                *("capacity", "believed", "answers", "prompt", "predicted", "actual", "false_hit", "missed_hit"),
                *("error", "discount", "silent", "evicted"),
            }
            assert (cache["capacity"], cache["error"], cache["discount"]) == (100_000, None, 1.0)


async def test_fairness_has_its_documented_shape() -> None:
    """Every member has its name and type, with one client that is served, one that waits, and an unreachable worker."""
    async with scripted_engine() as engine:
        workers = [{"url": engine.url, "id": "w"}, {"url": "http://127.0.0.1:9", "id": "away"}]
        async with running_router(policy="d2lpm", worker=workers, max_inflight=1) as router:
            async with router.post(chat(user="a", stream=True)) as first:
                call = await engine.call()
                async with router.post(chat(user="b")) as second:
                    await router.until_waiting(1)
                    busy = await router.fairness()
                    await call.answer()
                    await first.read()
                    await (await engine.call()).answer()
                    await second.read()
            assert busy.keys() == {
                *("policy", "jain", "clients", "forgotten", "workers", "service_lag", "rounds", "waits")
            }
            assert busy["rounds"].keys() == {"clients", "fair_s", "current_s", "unserved", "last_s"}
            assert busy["waits"].keys() == {
                *("waiting_s", "waiting_rounds", "lately_s", "lately_rounds"),
                *("unserved_s", "unserved_rounds", "unserved_clients"),
            }
            assert busy["forgotten"] == {"extend": 0, "cached": 0, "output": 0, "cost": 0.0}
            assert busy["policy"] == "d2lpm"
            assert busy["clients"].keys() == {"user-a", "user-b"}
            for entry in busy["clients"].values():
                assert entry.keys() == {
                    *("weight", "service", "queued", "running", "wait_p50_s", "wait_p95_s", "deficit"),
                    *("share", "service_lag", "unserved_s"),
                }
                assert entry["service"].keys() == {"extend", "cached", "output", "cost"}
                assert entry["deficit"]["w"].keys() == {"placement", "order"}
            assert [busy["clients"][c]["running"] for c in ("user-a", "user-b")] == [1, 0]
            assert [busy["clients"][c]["queued"] for c in ("user-a", "user-b")] == [0, 1]
            assert busy["workers"].keys() == {"w", "away"}
            for entry in busy["workers"].values():
                assert entry.keys() == {
                    *("url", "healthy", "queued", "running", "unstarted_tokens"),
                    *("window", "kv_tokens", "service_gap", "service_gap_bound", "cache", "unread", "breaker"),
                    "work",
                }
            worker = busy["workers"]["w"]
            assert (worker["queued"], worker["running"], worker["kv_tokens"]) == (1, 1, 100_000)
            assert worker["window"] == {"requests": 1, "unstarted_tokens": 4096}
            assert worker["unstarted_tokens"] > 0
            assert isinstance(worker["service_gap_bound"], NUMBER)
            assert not busy["workers"]["away"]["healthy"]
            await router.until_all_ended()
            rest = await router.fairness()
            assert [entry["service"]["output"] for entry in rest["clients"].values()] == [1, 1]
            assert all(isinstance(entry["wait_p95_s"], NUMBER) for entry in rest["clients"].values())


async def test_a_worker_is_drained_and_resumed() -> None:
    """A drained worker finishes its running calls, its queued ones go to other workers, and a resumed worker is used
    again.
    """
    key = {"authorization": "Bearer " + "k" * 16}
    async with scripted_engine() as one, scripted_engine() as two:
        workers = [{"url": one.url, "id": "one"}, {"url": two.url, "id": "two"}]
        settings = {"policy": "rr+fcfs", "max_inflight": 1, "window": "fixed", "admin_key": "k" * 16}
        async with running_router(worker=workers, **settings) as router:
            posts = [router.post(chat()) for _ in range(3)]
            first, second = await one.call(), await two.call()
            await router.until_waiting(1)
            async with router.http.post("/workers/one/drain", headers=key) as response:
                assert await response.json() == {"id": "one", "drained": True}
            assert await router.get_json("/ready") == {"workers": 1}
            assert [card["drained"] for card in (await router.get_json("/workers"))["workers"]] == [True, False]
            await second.answer()
            await (await two.call()).answer()
            await first.answer()
            assert [(await post.response()).status for post in posts] == [200] * 3
            await until(lambda: WorkerId("one") not in router.scheduler.fleet)
            polls = len(one.polls)
            await until(lambda: len(one.polls) > polls + 3)
            assert WorkerId("one") not in router.scheduler.fleet
            async with router.http.post("/workers/one/resume", headers=key) as response:
                assert await response.json() == {"id": "one", "drained": False}
            assert WorkerId("one") in router.scheduler.fleet
            for post in posts:
                await post.read()
