"""Who a request is meant for: the protocol that its first line names, and the server that its Host header does."""

import asyncio
import json

import pytest
from pydantic import ValidationError

from router.config.settings import Settings
from tests.support.running import TIMEOUT_S, RunningRouter, chat, running_router, until
from tests.support.scripted_engine import ScriptedEngine, scripted_engine

RTSP = b"GET /health RTSP/1.1\r\nhost: localhost\r\n\r\n"
ICE = b"SOURCE /health ICE/1.1\r\nhost: localhost\r\n\r\n"
HTTP = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
OFFER = b"GET /health RTSP/1.0\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"


async def answers(router: RunningRouter, *pieces: bytes) -> bytes:
    """What a connection is answered to these pieces, each of which the router reads by itself, until it is closed."""
    before = len(router.connections)
    reader, writer = await asyncio.open_connection(*router.address)
    try:
        await until(lambda: len(router.connections) > before)
        *_, connection = router.connections._open
        for piece in pieces:
            connection.data_received(piece)  # type: ignore[attr-defined]
        async with asyncio.timeout(TIMEOUT_S):
            return await reader.read()
    finally:
        writer.close()
        await until(lambda: len(router.connections) == before)


def refused(answer: bytes, status: int) -> str:
    """The code of an error, after which the connection has ended."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize("sent", [RTSP, ICE, OFFER, b"\r\n" + RTSP, b"OPTIONS  * RTSP/1.0\r\n\r\n"])
async def test_another_protocol_is_refused_however_its_bytes_come(sent: bytes) -> None:
    """In one piece, or cut anywhere."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for cut in range(len(sent)):
            assert refused(await answers(router, sent[:cut], sent[cut:]), 400) == "invalid_http"


async def test_another_protocol_behind_a_call_is_refused() -> None:
    """In the same piece, with and without a body before it, and cut in its first line."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        body = b"GET /health HTTP/1.1 and more"
        post = b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        for before, status in ((HTTP, b"200"), (post.replace(b"GET /health", b"GET /other."), b"405")):
            for cut in (len(RTSP), 10, 14):
                answer = await answers(router, before + RTSP[:cut], RTSP[cut:])
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert refused(answer[answer.rindex(b"HTTP/1.1 400") :], 400) == "invalid_http"


async def test_a_prompt_about_another_protocol_is_served() -> None:
    """The name of one in a body or a header is nobody's request line."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        async with router.post(chat("POST /v1/chat/completions RTSP/1.0", user="GET / ICE/1.0")) as post:
            await (await engine.call()).answer()
            assert (await post.response()).status == 200
        lines = b"\r\nx: GET /health RTSP/1.1\r\nconnection: close\r\n\r\n"
        answer = await answers(router, HTTP.replace(b"\r\n\r\n", lines))
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"GET /health\r\n\r\n", "invalid_http"),
        (b"GET /health HTTP/1.1\r\n\r\n", "invalid_http"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", "invalid_http"),
        (b"GET /health HTTP/1.0\r\nhost: localhost\r\nHost: localhost\r\n\r\n", "invalid_http"),
        (b"GET /health HTTP/2.0\r\nhost: localhost\r\n\r\n", "invalid_http"),
    ],
)
async def test_a_request_without_a_version_or_with_no_host_or_two_is_refused(head: bytes, code: str) -> None:
    """HTTP/0.9, an unknown version, and a Host header that is missing or there twice."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        assert refused(await answers(router, head), 400) == code


def of_host(host: bytes) -> bytes:
    """A harmless request to a server of this name."""
    return b"GET /health HTTP/1.1\r\nhost:" + host + b"\r\nconnection: close\r\n\r\n"


OWN = (b" localhost", b"LOCALHOST:8000", b" 127.0.0.1:1", b" [::1]:8000", b" [::1]", b"\tlocalhost:80 ")
OTHERS = (
    b" evil.example",
    b" evil.example:8000",
    b" localhost.evil.example",
    b" 127.0.0.1.evil.example",
    b" [::2]",
    b"",
)


async def test_on_a_loopback_address_a_request_to_another_name_is_refused() -> None:
    """403 that names the setting, on every path; a page that has its name resolve to this machine gets nothing."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for host in OWN:
            assert (await answers(router, of_host(host))).startswith(b"HTTP/1.1 200 "), host
        for host in OTHERS:
            answer = await answers(router, of_host(host))
            assert refused(answer, 403) == "host_not_allowed", host
            assert b"--allowed-hosts" in answer
        post = of_host(b"evil.example").replace(b"GET /health", b"POST /v1/chat/completions")
        assert refused(await answers(router, post), 403) == "host_not_allowed"
        assert (await answers(router, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def named(engine: ScriptedEngine, host: bytes, **settings: object) -> bytes:
    """The status that a request to a server of this name is answered with."""
    async with running_router(engine.url, **settings) as router:
        return (await answers(router, of_host(host)))[9:12]


async def test_names_can_be_allowed() -> None:
    """Those of the setting beside one's own, in any case and with any port; `*` allows all."""
    async with scripted_engine() as engine:
        router = ("Router.example",)
        assert await named(engine, b"router.EXAMPLE:80", allowed_hosts=router) == b"200"
        assert await named(engine, b"localhost", allowed_hosts=router) == b"200"
        assert await named(engine, b"evil.example", allowed_hosts=router) == b"403"
        assert await named(engine, b"evil.example", allowed_hosts=("*",)) == b"200"


def test_names_are_checked_on_loopback_addresses_or_where_some_are_given() -> None:
    """Elsewhere a router has names that it does not know."""
    assert Settings(host="0.0.0.0").host_names() is None
    assert Settings(host="10.0.0.1", allowed_hosts=("*",)).host_names() is None
    own = frozenset((b"localhost", b"127.0.0.1", b"[::1]"))
    assert (
        Settings().host_names() == Settings(host="localhost").host_names() == Settings(host="::1").host_names() == own
    )
    assert Settings(host="127.0.0.5").host_names() == own | {b"127.0.0.5"}
    assert Settings(host="10.0.0.1", allowed_hosts=("r",)).host_names() == own | {b"10.0.0.1", b"r"}


@pytest.mark.parametrize("name", ["", "router:8000", "http://router", "::1"])
def test_a_name_with_more_than_a_name_is_a_mistake(name: str) -> None:
    """It would never match."""
    with pytest.raises(ValidationError):
        Settings(allowed_hosts=(name,))
