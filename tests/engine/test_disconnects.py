"""A client that leaves frees what it used, in whatever state its request is; the engine's own count says so."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from . import prompts
from .fleet import SEQUENCES, Engine, Load, Router
from .processes import Server, wait_until
from .wire import COMPLETIONS, WORKER_KEY, Json

pytestmark = pytest.mark.engine

FREE_SECONDS = 2.0
LONG: Json = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 8000}
"""Many seconds of work, so that an engine which is free soon has dropped it."""


@pytest.fixture
def engine(engines: tuple[Engine, Engine]) -> Engine:
    """The one behind the narrow router."""
    return engines[0]


@contextmanager
def asked(server: Server, name: str, stream: bool) -> Iterator[socket.socket]:
    """A long call on a connection that is closed at the end of the `with`."""
    body = json.dumps({**LONG, "prompt": prompts.text(name), "stream": stream}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {name}\r\nAuthorization: Bearer {WORKER_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def wait_load(engine: Engine, running: int, waiting: int, seconds: float = 10) -> None:
    wanted = Load(running, waiting)
    wait_until(lambda: engine.load() == wanted, seconds, f"the {engine.name} has {wanted}")


def read_events(connection: socket.socket, count: int) -> None:
    received = b""
    while received.count(b"\ndata: ") < count:
        block = connection.recv(65536)
        assert block, received
        received += block


@pytest.mark.parametrize("stream", [True, False])
def test_queued_in_the_router(narrow_router: Router, engine: Engine, stream: bool) -> None:
    """Who leaves the router's queue is gone from it, never reaches the engine, and the others stay."""
    with asked(narrow_router, "before", stream=True) as before:
        read_events(before, 1)
        with asked(narrow_router, "queued", stream):
            wait_until(lambda: narrow_router.queued() == 1, 5, "the second waits in the router")
            wait_load(engine, 1, 0)
        wait_until(lambda: narrow_router.queued() == 0, FREE_SECONDS, "the queue is empty")
        read_events(before, 1)
        wait_load(engine, 1, 0)
    wait_load(engine, 0, 0, FREE_SECONDS)


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_token(narrow_router: Router, engine: Engine, stream: bool) -> None:
    """Who leaves while the engine lets the request wait is gone from the engine's queue."""
    with ExitStack() as occupants:
        for number in range(SEQUENCES):
            occupants.enter_context(asked(engine, f"occupant {number}", stream=True))
        wait_load(engine, SEQUENCES, 0)
        with asked(narrow_router, "waiting", stream):
            wait_load(engine, SEQUENCES, 1)
        wait_load(engine, SEQUENCES, 0, FREE_SECONDS)


def test_in_the_stream(narrow_router: Router, engine: Engine) -> None:
    """Who leaves a stream frees the engine, and pays for no more than was computed."""
    with asked(narrow_router, "stream", stream=True) as connection:
        read_events(connection, 3)
        wait_load(engine, 1, 0)
    wait_load(engine, 0, 0, FREE_SECONDS)


def test_not_streamed(narrow_router: Router, engine: Engine) -> None:
    """Who leaves while an answer in one piece is computed frees the engine."""
    with asked(narrow_router, "whole", stream=False):
        wait_load(engine, 1, 0)
    wait_load(engine, 0, 0, FREE_SECONDS)


def test_reader_that_stops_reading(narrow_router: Router, engine: Engine) -> None:
    """Who neither reads nor leaves slows nobody's end: when the connection goes, the engine is free."""
    with asked(narrow_router, "idle reader", stream=True):
        wait_load(engine, 1, 0)
    wait_load(engine, 0, 0, FREE_SECONDS)
