"""What clients of an engine rely on beside the body: headers, other names of paths, redirects and CORS."""

import asyncio
import json
from itertools import product
from typing import Any

import aiohttp
import pytest
from yarl import URL

from router.api.body.multipart import form_fields
from tests.support.running import chat, running_router
from tests.support.scripted_engine import DONE, chunk, event, scripted_engine, usage
from tests.support.served import service

TRACE = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "a=1",
    "baggage": "b=2",
}
KEY = {"authorization": "Bearer someone"}
CLOSED = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/loads", "/reset_prefix_cache", "/flush_cache"),
    *("/server_info", "/sleep", "/wake_up", "/abort_requests", "/abort_request", "/collective_rpc", "/start_profile"),
    *("/update_weights_from_disk", "/pause", "/scale_elastic_ep", "/generate", "/inference/v1/generate", "/api/chat"),
)
STEERING = ("x-vllm-priority", "x-data-parallel-rank", "x-override-rid", "x-override-priority", "x-session-id")
DEPLOYMENT = "/openai/deployments/m/chat/completions?api-version=2024-10-21"


async def test_a_trace_goes_on_at_the_worker_and_no_header_steers_it() -> None:
    """The trace's context and the wish for a load report pass; every other header of the client ends at the router."""
    sent = {**TRACE, "endpoint-load-metrics-format": "TEXT", **dict.fromkeys(STEERING, "7"), **KEY}
    async with (
        scripted_engine() as engine,
        running_router(engine.url) as router,
        router.post(chat(), **sent) as post,
    ):
        call = await engine.call()
        await call.answer()
        await post.read()
    assert {name: call.headers.get(name) for name in TRACE} == TRACE
    assert call.headers["endpoint-load-metrics-format"] == "TEXT"
    assert not {*STEERING, "authorization"} & call.headers.keys()


async def test_the_engines_own_headers_reach_the_client_if_they_are_about_its_call() -> None:
    """Load, time and rate limits pass, on whole answers and on errors; cookies, servers and other names do not."""
    about = {"endpoint-load-metrics": "TEXT a=1", "openai-processing-ms": "7", "x-ratelimit-remaining-requests": "3"}
    others = {"set-cookie": "a=b", "server": "uvicorn", "x-internal": "10.0.0.1", "access-control-allow-origin": "*"}
    lines = [f"{name}: {value}" for name, value in (about | others).items()]
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for status, body in ((200, ANSWER), (400, b'{"error":{"message":"no"}}')):
            async with router.post(chat()) as post:
                await (await engine.call()).respond(status, body, *lines)
                headers = (await post.response()).headers
            assert {name: headers.get(name) for name in about} == about
            assert not others.items() & headers.items()


ANSWER = b'{"choices":[{"index":0,"message":{"content":"yes"},"finish_reason":"stop"}]}'


TWO = chat(stream=True, n=2)
MARK = {"system_fingerprint": "vllm-1"}
MARKED_USAGE = event({"choices": [], "usage": usage(9, 2), **MARK})


def last_chunk(index: int, **more: object) -> bytes:
    """The last chunk of one of the choices."""
    return chunk("", "stop", **more).replace(b'"index":0', b'"index":%d' % index)


async def test_the_last_chunk_of_each_choice_comes_when_the_engine_sends_it() -> None:
    """A choice that ends first ends at once at the client, with the fingerprint that the worker has shown before."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(TWO) as post:
            await (await engine.call()).stream(last_chunk(0), last_chunk(1), MARKED_USAGE, DONE)
            assert await post.read() == last_chunk(0, **MARK) + last_chunk(1, **MARK) + DONE
        async with router.post(TWO) as post:
            call = await engine.call()
            await call.begin()
            await call.write(last_chunk(0))
            answer = await post.response()
            assert await answer.content.readuntil(b"\n\n") == last_chunk(0, **MARK)
            await call.write(last_chunk(1) + MARKED_USAGE + DONE)
            await call.end()
            assert await answer.read() == last_chunk(1, **MARK) + DONE


@pytest.mark.parametrize("body", [{"messages": []}, {"model": "nobody", "messages": []}], ids=["no model", "another"])
async def test_azures_path_names_the_model_and_its_header_the_client(body: dict[str, Any]) -> None:
    """The call is the model's chat, charged to the key's client; the model of the body does not count."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(body, DEPLOYMENT, api_key="azure-key") as post:
            call = await engine.call()
            assert (call.path, call.json["model"]) == ("/v1/chat/completions", "m")
            await call.answer(prompt=10, completion=1)
            azure = (await post.response()).headers["x-d2lpm-client"]
        async with router.post(chat(), authorization="Bearer azure-key") as post:
            await (await engine.call()).answer()
            assert (await post.response()).headers["x-d2lpm-client"] == azure
        assert (await service(router, azure))[2] == 2


@pytest.mark.parametrize("fields", [{}, {"model": "nobody"}], ids=["no model", "another"])
async def test_azures_path_names_the_model_of_a_form(fields: dict[str, str]) -> None:
    """The engine gets the form with the model of the path; the model of the form does not count."""
    form = aiohttp.FormData(fields)
    form.add_field("file", b"RIFF", filename="a.wav")
    async with (
        scripted_engine("m") as other,
        scripted_engine("whisper") as engine,
        running_router(other.url, engine.url) as router,
    ):
        path = "/openai/deployments/whisper/audio/transcriptions"
        request = asyncio.ensure_future(router.http.post(path, data=form))
        call = await engine.call()
        assert call.path == "/v1/audio/transcriptions"
        assert form_fields(call.body, call.headers["content-type"]) == {"model": "whisper"}
        assert b"RIFF" in call.body
        await call.respond(200, b'{"text":"hello"}')
        async with await request as response:
            assert response.status == 200


@pytest.mark.parametrize("name", ["nobody", "m/../x", "%2e%2e"])
async def test_azures_path_reaches_no_other_model_and_no_other_path(name: str) -> None:
    """A deployment that no worker serves is an unknown model or path, and nothing reaches the engine."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(), f"/openai/deployments/{name}/chat/completions") as post:
            assert (await post.response()).status == 404
        async with router.post(b"{}", "/openai/v1/load_lora_adapter") as post:
            assert (await post.response()).status == 404
        assert engine.calls.empty()


async def test_azures_path_of_version_1_is_the_path_without_its_prefix() -> None:
    """It serves calls and the list of models."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(), "/openai/v1/chat/completions") as post:
            await (await engine.call()).answer()
            assert (await post.response()).status == 200
        assert await router.get_json("/openai/v1/models") == await router.get_json("/v1/models")


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/v1/chat/completions/?a=b%20c", "/v1/chat/completions?a=b%20c"),
        ("/tokenize/", "/tokenize"),
        ("/v1/nobody/knows//", "/v1/nobody/knows"),
        ("/v1/x%0d%0aset-cookie:a/", "/v1/x%0D%0Aset-cookie:a"),
    ],
)
async def test_a_slash_at_the_end_is_redirected_on_this_server(path: str, location: str) -> None:
    """As by the engines: 307, so that method and body stay; the target is a path, whatever the path asked for."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.http.post(encoded(path), json={}, allow_redirects=False) as response:
            assert (response.status, response.headers["location"]) == (307, location)
        assert engine.calls.empty()


@pytest.mark.parametrize("path", ["//evil.example/", "/v1//evil.example/"])
async def test_a_path_with_two_slashes_in_it_is_redirected_nowhere(path: str) -> None:
    """Neither to another server, nor on this one: it is unknown."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.http.post(encoded(f"{router.url}{path}"), json={}, allow_redirects=False) as response:
            assert (response.status, response.headers.get("location")) == (404, None)
        assert engine.calls.empty()


def encoded(path: str) -> URL:
    """A URL that the client library leaves as it is."""
    return URL(path, encoded=True)


async def test_what_an_engine_tells_of_itself_costs_a_token() -> None:
    """It is asked as the client's call."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.http.get("/version", headers=KEY) as response:
            assert await response.json() == {"version": "0.32.0"}
            client = response.headers["x-d2lpm-client"]
        assert await service(router, client) == (1, 0, 0)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_an_engine_is_asked_only_what_its_kind_tells(path: str) -> None:
    """SGLang's paths are unserved where all workers are vLLM's, and nobody is charged."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.http.get(path, headers=KEY) as response:
            assert response.status == 404
        assert engine.calls.empty()


async def test_administrative_paths_of_engines_are_closed() -> None:
    """No method reaches them, with a slash or without, below Azure's prefix or not."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        names = [name for path in CLOSED for name in (path, f"{path}/", f"/openai{path}")]
        for name, method in product(names, ("GET", "POST", "PUT", "DELETE")):
            async with router.http.request(method, name, allow_redirects=False, json={}) as response:
                assert response.status in (404, 405), (method, name)
        assert engine.calls.empty()


async def test_ping_and_load_are_the_routers_own() -> None:
    """SageMaker's readiness has no body, and the load counts the calls in the router; no worker is asked."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.http.get("/ping") as pong, router.http.post("/ping") as posted:
            assert (pong.status, await pong.read(), posted.status) == (200, b"", 200)
        assert await router.get_json("/load") == {"server_load": 0}
        async with router.post(chat()) as post:
            call = await engine.call()
            assert await router.get_json("/load") == {"server_load": 1}
            await call.answer()
            await post.read()
    async with running_router("http://127.0.0.1:9") as router, router.http.get("/ping") as pong:
        assert pong.status == 503


async def test_an_invocation_is_a_chat_or_a_completion() -> None:
    """It goes to that path of the engine and is charged like it."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for body, path in ((chat(), "/v1/chat/completions"), ({"model": "m", "prompt": "Hi"}, "/v1/completions")):
            async with router.post(body, "/invocations", **KEY) as post:
                call = await engine.call()
                assert call.path == path
                await call.answer(prompt=10, completion=3)
                client = (await post.response()).headers["x-d2lpm-client"]
        assert (await service(router, client))[2] == 6


async def test_a_path_that_a_flag_of_the_engine_switches_off_says_so() -> None:
    """VLLM's 403 for it is about the path; any other 403 is about the router's own key and is not passed on."""
    off = b'{"error":{"message":"Restart with --enable-scale-out.","type":"PermissionDeniedError","code":403}}'
    async with scripted_engine() as engine, running_router(engine.url, tries=1) as router:
        for body, status in ((off, 403), (b'{"error":"Forbidden"}', 502)):
            async with router.post(chat(), "/v1/chat/completions/render") as post:
                await (await engine.call()).respond(403, body)
                assert (await post.response()).status == status


async def test_model_cards_are_the_engines_with_the_least_context() -> None:
    """All that a worker says of its model is listed; where two differ in the context, the smaller one is listed."""
    async with scripted_engine() as one, scripted_engine() as two:
        for engine, length in ((one, 8192), (two, 4096)):
            card = {"id": "m", "object": "model", "created": 7, "owned_by": "vllm", "root": "/m", "parent": None}
            card |= {"max_model_len": length, "permission": [{"id": "p"}]}
            engine.poll_answers["/v1/models"] = (200, json.dumps({"object": "list", "data": [card]}).encode())
        async with running_router(one.url, two.url, alias=["short=m"]) as router:
            listed = {each["id"]: each for each in (await router.get_json("/v1/models"))["data"]}
            assert listed["m"] == card | {"max_model_len": 4096}
            assert listed["short"] == listed["m"] | {"id": "short", "root": "m"}
            assert await router.get_json("/v1/models/m") == listed["m"]


PAGE = "https://chat.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_pages_of_a_listed_origin_can_call_and_read() -> None:
    """The preflight and the stream itself allow it; another origin gets no such header."""
    async with scripted_engine() as engine, running_router(engine.url, cors_origins=[PAGE]) as router:
        async with router.http.options("/v1/chat/completions", headers=PREFLIGHT) as response:
            assert (response.status, response.headers["access-control-allow-origin"]) == (200, PAGE)
        for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
            async with router.post(chat(stream=True), origin=origin) as post:
                await (await engine.call()).answer()
                assert (await post.response()).headers.get("access-control-allow-origin") == allowed
                assert b"[DONE]" in await post.read()
        evil = {**PREFLIGHT, "origin": "https://evil.example"}
        async with router.http.options("/v1/chat/completions", headers=evil) as response:
            assert response.status == 400


async def test_without_the_setting_no_page_of_another_origin_can_read() -> None:
    """There is no header that would let it."""
    async with (
        scripted_engine() as engine,
        running_router(engine.url) as router,
        router.http.options("/v1/chat/completions", headers=PREFLIGHT) as response,
    ):
        assert response.status == 405
        assert "access-control-allow-origin" not in response.headers
