"""Tests that a client that leaves frees what its request used, in any state, by the engine's own counts."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from . import prompts
from .fleet import NARROW, SEQUENCES, Engine, Load, Router
from .processes import Server, wait_until
from .wire import COMPLETIONS, WORKER_KEY, Json, call, mapped

pytestmark = pytest.mark.engine

ROUTER_SECONDS = 20.0
"""Timeout for the router to notice that a client has left, which is far shorter than the calls."""
STATE_SECONDS = 30.0
"""Timeout for the state with which a test begins; on a busy machine a step may take long."""
LONG: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 8000}
"""Many seconds of work: an engine that is idle soon after must have dropped it."""


@pytest.fixture
def engine(engines: tuple[Engine, ...]) -> Engine:
    """Return the engine behind the narrow router."""
    return engines[0]


@contextmanager
def asked(server: Server, name: str, stream: bool, key: str = WORKER_KEY) -> Iterator[socket.socket]:
    """Send a long call on a connection that is closed at the end of the `with`."""
    body = json.dumps({**LONG, "prompt": prompts.text(name), "stream": stream}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def expect_load(engine: Engine, running: int, waiting: int, seconds: float = STATE_SECONDS) -> None:
    wanted = Load(running, waiting)
    seen: list[Load] = []

    def reached() -> bool:
        seen.append(engine.load())
        return seen[-1] == wanted

    wait_until(reached, seconds, f"{wanted} at the {engine.name}", seen)


def read_events(connection: socket.socket, count: int) -> bytes:
    """Read until this many events have come. Returns what was read."""
    received = b""
    while received.count(b"\ndata: ") < count:
        block = connection.recv(65536)
        assert block, received
        received += block
    return received


def client_of(head: bytes) -> str:
    """Return the client name in an answer's headers."""
    found = re.search(rb"\r\nx-d2lpm-client: (\S+)\r\n", head)
    assert found is not None, head
    return found[1].decode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_left_in_the_routers_queue_never_reaches_the_engine(
    narrow_router: Router, engine: Engine, stream: bool
) -> None:
    """A client that leaves the router's queue is removed from it, never reaches the engine, and the others stay."""
    with ExitStack() as running:
        before = [running.enter_context(asked(narrow_router, f"before {n}", stream=True)) for n in range(NARROW)]
        expect_load(engine, NARROW, 0)
        with asked(narrow_router, "queued", stream):
            wait_until(lambda: narrow_router.queued() == 1, STATE_SECONDS, "the last one waits in the router")
            expect_load(engine, NARROW, 0)
        wait_until(lambda: narrow_router.queued() == 0, ROUTER_SECONDS, "the queue is empty")
        for connection in before:
            read_events(connection, 2)
        expect_load(engine, NARROW, 0)
    expect_load(engine, 0, 0, engine.drop_seconds)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_left_in_the_engines_queue_is_removed(narrow_router: Router, engine: Engine, stream: bool) -> None:
    """A client that leaves while its request waits in the engine is removed from the engine's queue."""
    with ExitStack() as occupants:
        for number in range(SEQUENCES):
            occupants.enter_context(asked(engine, f"occupant {number}", stream=True))
        expect_load(engine, SEQUENCES, 0)
        with asked(narrow_router, "waiting", stream):
            expect_load(engine, SEQUENCES, 1)
        expect_load(engine, SEQUENCES, 0, engine.drop_seconds)


def test_a_stream_that_is_left_pays_for_what_was_computed(narrow_router: Router, engine: Engine) -> None:
    """A client that leaves a stream frees the engine, and pays only for its prompt and for what was computed."""
    with asked(narrow_router, "stream", stream=True, key="leaver") as connection:
        client = client_of(read_events(connection, 3))
        expect_load(engine, 1, 0)
    expect_load(engine, 0, 0, engine.drop_seconds)
    wait_until(lambda: narrow_router.unfinished() == 0, ROUTER_SECONDS, "the router has settled")
    charged = {name: int(str(tokens)) for name, tokens in narrow_router.service(client).items() if name != "cost"}
    assert charged["extend"] + charged["cached"] == prompt_tokens(engine, "stream")
    assert 3 <= charged["output"] < 8000


def prompt_tokens(engine: Engine, name: str) -> int:
    usage = call(engine.url, COMPLETIONS, {**LONG, "prompt": prompts.text(name), "max_tokens": 1}).json["usage"]
    return int(str(mapped(usage)["prompt_tokens"]))


def test_a_whole_answer_that_is_left_frees_the_engine(narrow_router: Router, engine: Engine) -> None:
    """A client that leaves while a whole answer is computed frees the engine."""
    with asked(narrow_router, "whole", stream=False):
        expect_load(engine, 1, 0)
    expect_load(engine, 0, 0, engine.drop_seconds)
