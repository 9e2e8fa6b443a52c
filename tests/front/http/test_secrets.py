"""Credentials and the headers of one connection are not disclosed to others."""

import json
import logging
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.running import RunningRouter, chat, running_router
from tests.support.scripted_engine import chunk, scripted_engine, usage

CLIENT_KEY = "sk-client-0123456789"
WORKER_KEY = "sk-worker-0123456789"
NAMES = [
    "a\nb",
    'x"} evil 1\n# ',
    "\r\nset-cookie: a=b",
    "\u2028\u202e",
    "%0a{}",
    "\\",
    "\x00",
    "é" * 100,
    "\ud83d\ude00",
]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_headers_are_not_passed_between_connections(stream: bool) -> None:
    """A worker gets no header of a client, and a client only those of a worker that are meant for it."""
    sent = {
        "Authorization": f"Bearer {CLIENT_KEY}",
        "Cookie": "a=b",
        "Proxy-Authorization": "Basic abc",
        "Connection": "x-private, keep-alive",
        "X-Private": "1",
        "TE": "trailers",
        "Accept-Encoding": "gzip",
        "X-Forwarded-For": "10.0.0.1",
    }
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(stream=stream), **sent) as post:
            call = await engine.call()
            assert call.headers.keys() == {"host", "content-type", "content-length", "x-request-id"}
            body = json.dumps({"id": "c", "choices": [], "usage": usage(1, 1)}).encode()
            if stream:
                body = chunk("a") + chunk("", "stop") + b"data: [DONE]\n\n"
            date = "Thu, 01 Jan 1970 00:00:00 GMT"
            lines = ["Set-Cookie: a=b", "Connection: keep-alive, x-inner", "X-Inner: 1", "Server: x", "Trailer: y"]
            lines.append(f"Date: {date}")
            kind = "text/event-stream" if stream else "application/json"
            await call.respond(200, body, *lines, content_type=kind)
            answer = await post.response()
            await answer.read()
        assert answer.headers.get("date") != date  # a server of the router's may send its own
        own = {name.lower() for name in answer.headers} - {"content-length", "transfer-encoding", "date"}
        expected = {"content-type", "x-request-id", *(["x-accel-buffering"] if stream else [])}
        assert {name for name in own if not name.startswith("x-d2lpm-")} == expected


async def reports(router: RunningRouter, requests: list[str]) -> str:
    """Return all reports of the control plane."""
    texts = []
    for path in ("/fairness", "/metrics", "/workers", "/health", *(f"/explain/{request}" for request in requests)):
        async with router.http.get(path) as response:
            texts.append(await response.text())
    return "\n".join(texts)


@pytest.mark.one_process("the test reads the router's log")
async def test_no_key_is_disclosed(caplog: pytest.LogCaptureFixture) -> None:
    """No key is in an answer, error, metric, report or log, whatever happens to the call."""
    caplog.set_level(logging.DEBUG, logger="router")
    key = {"Authorization": f"Bearer {CLIENT_KEY}"}
    bodies: list[Mapping[str, object]] = [chat(), chat(model="no such model"), {"model": "m"}, chat(stream=True)]
    async with (
        scripted_engine() as engine,
        running_router(engine.url, worker_api_key=WORKER_KEY, max_queued=0, max_inflight=1, tries=1) as router,
    ):
        texts, requests = "", []
        async with router.post(bodies[0], **key) as post:
            call = await engine.call()
            assert call.headers["authorization"] == f"Bearer {WORKER_KEY}"
            for body in bodies:
                async with router.post(body, **key) as other:
                    answer = await other.response()
                    assert answer.status >= 400
                    texts += str(answer.headers) + await answer.text()
            call.reset()
            answer = await post.response()
            requests.append(answer.headers["x-request-id"])
            texts += str(answer.headers) + await answer.text()
        texts += await reports(router, requests)
    for secret in (CLIENT_KEY, WORKER_KEY):
        assert secret not in texts + caplog.text
        assert secret[3:] not in texts + caplog.text


@pytest.mark.one_process("the test reads the router's log")
async def test_client_names_are_escaped_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    """No client name can forge a line of a log, header, metric or report."""
    caplog.set_level(logging.DEBUG, logger="router")
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for name in NAMES:
            async with router.post(chat(user=name)) as post:
                await (await engine.call()).answer()
                client = (await post.response()).headers["x-d2lpm-client"]
                assert client.isascii()
                assert client.isprintable()
        async with router.http.get("/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        labels = {sample.labels.get("client", "") for family in families for sample in family.samples}
        assert len({label for label in labels if label.startswith("user-")}) == len(NAMES)
        assert all(label.isprintable() for label in labels)
        assert len((await router.fairness())["clients"]) == len(NAMES)
    assert "evil" not in caplog.text
