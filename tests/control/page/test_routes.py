"""The paths of the live page: who may read them, what they send, and that the page itself is closed to other hosts."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message
from yarl import URL

from router.control.page.routes import FILES, PageFiles
from router.errors import Unauthorized
from tests.support.running import RunningRouter, chat, running_router
from tests.support.scripted_engine import scripted_engine

KEY = "k" * 16
BEARER = {"authorization": f"Bearer {KEY}"}
NOBODY = "http://127.0.0.1:9"
DATA = ("/ui/events?updates=1", "/ui/history", "/ui/clients")
FOREIGN = re.compile(r"(?:https?:)?//[a-z0-9]", re.IGNORECASE)
OURS = [
    path for path in FILES.rglob("*") if path.suffix in (".html", ".js", ".css", ".svg") and "uplot" not in path.parts
]


async def first_frame(router: RunningRouter) -> Any:
    async with router.http.get("/ui/events?updates=1") as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        event = await response.text()
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    return json.loads(event[6:])


async def test_a_frame_shows_what_fairness_and_explain_report() -> None:
    """After a call, the frame has its client, its worker and the decision, by the id that /explain knows."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat(user="ann", stream=True)) as post:
            await (await engine.call()).answer()
            request = (await post.response()).headers["x-request-id"]
            await post.read()
        await router.until_all_ended()
        frame, fairness = await first_frame(router), await router.fairness()
        assert frame["fairness"]["clients"].keys() == fairness["clients"].keys() == {"user-ann"}
        assert frame["fairness"]["workers"].keys() == fairness["workers"].keys()
        (decision,) = frame["decisions"]
        explanation = await router.get_json(f"/explain/{request}")
        assert decision["request"] == request
        assert (decision["client"], decision["number"]) == ("user-ann", 1)
        assert (decision["worker"], decision["why"]) == (
            explanation["dispatch"]["worker"],
            explanation["dispatch"]["why"],
        )
        assert [*await router.get_json("/ui/clients?search=ANN")] == ["user-ann"]
        assert await router.get_json("/ui/clients?search=bob") == {}


@pytest.mark.parametrize(
    ("query", "param"), [("events?updates=x", "updates"), (f"clients?search={'x' * 257}", "search")]
)
async def test_a_wrong_query_is_answered_as_other_errors_are(query: str, param: str) -> None:
    """The status is 400, and the error object names the parameter."""
    async with running_router(NOBODY) as router, router.http.get(f"/ui/{query}") as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_value")
    assert error["message"].startswith(f"`{param}`: ")


async def test_a_stream_brings_frames_until_its_reader_leaves() -> None:
    """Several frames come on one connection, and the feed rests once it is closed."""
    async with running_router(NOBODY) as router:
        async with router.http.get("/ui/events") as response:
            times = [json.loads((await response.content.readuntil(b"\n\n"))[6:])["time"] for _ in range(2)]
            assert times[0] < times[1]
            assert await readers(router) == 1
        async with asyncio.timeout(60):
            while await readers(router):  # noqa: ASYNC110 - no code sets an event
                await asyncio.sleep(0.01)


async def readers(router: RunningRouter) -> float:
    async with router.http.get("/metrics") as response:
        found = re.search(r"(?m)^d2lpm_page_readers (\S+)$", await response.text())
    assert found is not None
    return float(found[1])


async def test_data_needs_the_key_where_one_is_set_and_the_page_does_not() -> None:
    """The files hold nothing of the router, and they ask for the key."""
    async with running_router(NOBODY, admin_key=KEY) as router:
        for path in DATA:
            for headers, status in (({}, 401), ({"authorization": "Bearer no"}, 401), (BEARER, 200)):
                async with router.http.get(path, headers=headers) as response:
                    assert response.status == status, path
                    assert ("www-authenticate" in response.headers) == (status == Unauthorized.status)
        async with router.http.get("/ui/") as response:
            assert response.status == 200
    async with running_router(NOBODY) as router:
        for path in DATA:
            async with router.http.get(path) as response:
                assert response.status == 200, path


async def test_on_a_public_address_the_page_can_ask_for_the_key() -> None:
    """Its files come without the key, as a browser cannot send it with them; its data do not."""
    async with running_router(NOBODY, host="0.0.0.0", admin_key=KEY) as router:
        for path, status in (("/ui/", 200), ("/ui/main.js", 200), *((path, 401) for path in DATA)):
            async with router.http.get(path) as response:
                assert response.status == status, path


async def test_the_page_runs_no_foreign_code_and_reaches_no_other_host() -> None:
    """The policy of the page allows its own files and nothing else, on each of them; /ui leads to the page."""
    async with running_router(NOBODY) as router:
        async with router.http.get("/ui") as response:
            assert (response.status, response.url.path) == (200, "/ui/")
            page = await response.text()
        assert not re.search(r"<script(?![^>]*src=)|\son[a-z]+=|\sstyle=|<style", page)
        for name in ("", "main.js", "page.css", "uplot/uPlot.esm.js", "uplot/LICENSE"):
            async with router.http.get(f"/ui/{name}") as response:
                assert response.status == 200, name
                policy = response.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["x-content-type-options"] == "nosniff"


async def test_a_file_is_read_whole_before_its_answer_begins() -> None:
    """Even the largest goes out as one message, so no file stays open when a reader leaves in the middle."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()  # the reader stays
        raise AssertionError

    path = "/uplot/uPlot.esm.js"
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": [], "extensions": {}}
    await PageFiles(directory=FILES, html=True)(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[1]["body"] == (FILES / "uplot" / "uPlot.esm.js").read_bytes()


async def test_an_unchanged_file_is_not_sent_again() -> None:
    """A browser that names the version it has is told that this is still the one; HEAD brings the headers alone."""
    async with running_router(NOBODY) as router:
        async with router.http.get("/ui/main.js") as response:
            whole, etag = await response.read(), response.headers["etag"]
        async with router.http.get("/ui/main.js", headers={"if-none-match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")
        async with router.http.head("/ui/main.js") as response:
            assert (response.status, await response.read()) == (200, b"")
            assert int(response.headers["content-length"]) == len(whole)


@pytest.mark.parametrize("path", ["/ui/none.js", "/ui/../routes.py", "/ui/%2e%2e/routes.py", "/ui/uplot"])
async def test_no_other_file_is_served(path: str) -> None:
    """What is no file of the page is an unknown path, as everywhere else."""
    async with (
        running_router(NOBODY) as router,
        router.http.get(URL(path, encoded=True), allow_redirects=False) as response,
    ):
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "unknown_path"


@pytest.mark.parametrize("file", OURS, ids=lambda file: str(file.name))
def test_no_file_of_the_page_names_another_host(file: Path) -> None:
    """The page works without a network, and parses no HTML but its own."""
    text = re.sub(r"(?m)^\s*(//|\*|/\*).*$", "", file.read_text("utf-8")).replace("http://www.w3.org/2000/svg", "")
    assert not FOREIGN.search(text)
    assert "innerHTML" not in text
    assert "eval(" not in text
