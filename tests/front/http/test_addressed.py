"""Checks of the protocol in the request line and of the Host header."""

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
    """Send these pieces, each of which the router reads separately; return the answer until the connection closes."""
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
    """Return the code of an error that has closed the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize("sent", [RTSP, ICE, OFFER, b"\r\n" + RTSP, b"OPTIONS  * RTSP/1.0\r\n\r\n"])
async def test_another_protocol_is_refused_however_its_bytes_are_split(sent: bytes) -> None:
    """The bytes arrive in one piece, or split anywhere."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for cut in range(len(sent)):
            assert refused(await answers(router, sent[:cut], sent[cut:]), 400) == "invalid_http"


async def test_another_protocol_behind_a_call_is_refused() -> None:
    """Another protocol is refused in the same block as a call, with or without a body, and split in its first line."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        body = b"GET /health HTTP/1.1 and more"
        post = b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        for before, status in ((HTTP, b"200"), (post.replace(b"GET /health", b"GET /other."), b"405")):
            for cut in (len(RTSP), 10, 14):
                answer = await answers(router, before + RTSP[:cut], RTSP[cut:])
                assert answer.startswith(b"HTTP/1.1 " + status)
                assert refused(answer[answer.rindex(b"HTTP/1.1 400") :], 400) == "invalid_http"


async def test_a_prompt_about_another_protocol_is_served() -> None:
    """A protocol name in a body or a header is no request line."""
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
    """HTTP/0.9, unknown versions, and missing or repeated Host headers are errors."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        assert refused(await answers(router, head), 400) == code


def request_to_host(host: bytes) -> bytes:
    """Return a harmless request to a server of this name."""
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


async def test_on_a_loopback_address_other_host_names_are_refused() -> None:
    """Every path answers 403 and names the setting, so DNS rebinding gains nothing."""
    async with scripted_engine() as engine, running_router(engine.url) as router:
        for host in OWN:
            assert (await answers(router, request_to_host(host))).startswith(b"HTTP/1.1 200 "), host
        for host in OTHERS:
            answer = await answers(router, request_to_host(host))
            assert refused(answer, 403) == "host_not_allowed", host
            assert b"--allowed-hosts" in answer
        post = request_to_host(b"evil.example").replace(b"GET /health", b"POST /v1/chat/completions")
        assert refused(await answers(router, post), 403) == "host_not_allowed"
        assert (await answers(router, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def status_for_host(engine: ScriptedEngine, host: bytes, **settings: object) -> bytes:
    """Return the status of a request to a server of this name."""
    async with running_router(engine.url, **settings) as router:
        return (await answers(router, request_to_host(host)))[9:12]


async def test_host_names_can_be_allowed() -> None:
    """The setting adds names, in any case and with any port; `*` allows all."""
    async with scripted_engine() as engine:
        router = ("Router.example",)
        assert await status_for_host(engine, b"router.EXAMPLE:80", allowed_hosts=router) == b"200"
        assert await status_for_host(engine, b"localhost", allowed_hosts=router) == b"200"
        assert await status_for_host(engine, b"evil.example", allowed_hosts=router) == b"403"
        assert await status_for_host(engine, b"evil.example", allowed_hosts=("*",)) == b"200"


def test_host_names_are_checked_on_loopback_addresses_or_if_configured() -> None:
    """On other addresses a router has names that it does not know."""
    assert Settings(host="0.0.0.0").host_names() is None
    assert Settings(host="10.0.0.1", allowed_hosts=("*",)).host_names() is None
    own = frozenset((b"localhost", b"127.0.0.1", b"[::1]"))
    assert (
        Settings().host_names() == Settings(host="localhost").host_names() == Settings(host="::1").host_names() == own
    )
    assert Settings(host="127.0.0.5").host_names() == own | {b"127.0.0.5"}
    assert Settings(host="10.0.0.1", allowed_hosts=("r",)).host_names() == own | {b"10.0.0.1", b"r"}


@pytest.mark.parametrize("name", ["", "router:8000", "http://router", "::1"])
def test_a_host_setting_with_more_than_a_name_is_invalid(name: str) -> None:
    """Such a name would never match."""
    with pytest.raises(ValidationError):
        Settings(allowed_hosts=(name,))
