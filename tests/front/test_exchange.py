"""One HTTP exchange with a scripted ASGI server."""

import asyncio
import gc
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import pytest

from router.errors import BadRequest, BodyTooLarge, Refused, RouterError
from router.front.byte_budget import ByteBudget, Hold
from router.front.exchange import ClientGone, Exchange
from router.front.http.connection_limits import ON_DISCONNECT

Message = MutableMapping[str, Any]
Header = tuple[bytes, bytes]
GONE: Message = {"type": "http.disconnect"}


def body(block: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": block, "more_body": more}


class Server:
    """Delivers these messages, then those put into `inbox`, and records what is sent."""

    def __init__(
        self, messages: Sequence[Message] = (), length: bytes | None = None, headers: Sequence[Header] = ()
    ) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        for message in messages:
            self.inbox.put_nowait(message)
        self.sent: list[Message] = []
        sent = [*headers] if length is None else [*headers, (b"content-length", length)]
        self.disconnect: Callable[[], None] = lambda: None
        """The callback that the application registers for a disconnect."""
        scope: Message = {"type": "http", "path": "/p", "method": "POST", "headers": sent, "client": ("10.0.0.1", 5)}
        scope["extensions"] = {ON_DISCONNECT: self._on_disconnect}
        self.exchange = Exchange(scope, self.inbox.get, self._send)
        self.exchange.request_id = "id"

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def _on_disconnect(self, disconnect: Callable[[], None]) -> None:
        self.disconnect = disconnect


def hold() -> Hold:
    """Return a hold in a budget with room for any body here."""
    return ByteBudget(2**20).hold("owner")


async def test_the_last_of_repeated_headers_counts() -> None:
    """A header that a proxy appends overrules the one that the client sent."""
    exchange = Server(headers=[(b"x-client-id", b"forged"), (b"x-client-id", b"true")]).exchange
    assert exchange.headers == {b"x-client-id": b"true"}


async def test_a_body_is_complete_however_it_is_split() -> None:
    """Bodies up to the limit arrive in one block or in several."""
    assert await Server([body(b"abc")], b"3").exchange.body(3, hold()) == b"abc"
    assert await Server([body(b"a", True), body(b"", True), body(b"bc")]).exchange.body(3, hold()) == b"abc"
    assert await Server([{"type": "http.request"}]).exchange.body(0, hold()) == b""


@pytest.mark.parametrize(
    ("messages", "length", "expected"),
    [
        ([], b"4", BodyTooLarge),
        ([], b"9" * 4000, BodyTooLarge),
        ([], b"-1", BadRequest),
        ([], b"+1", BadRequest),
        ([body(b"ab", True), body(b"cd", True)], None, BodyTooLarge),
        ([body(b"a", True), GONE], None, ClientGone),
    ],
)
async def test_unreadable_bodies_raise_errors(
    messages: list[Message], length: bytes | None, expected: type[Exception]
) -> None:
    """The body is too long, declared or not, its length is no number, or the client disconnects; no more is read."""
    server = Server(messages, length)
    with pytest.raises(expected):
        await server.exchange.body(3, hold())
    assert server.inbox.empty()


async def test_a_body_counts_in_the_budget_while_it_arrives_and_is_held() -> None:
    """A body beyond the owner's part is refused, and all bytes are released."""
    budget = ByteBudget(100)
    server = Server([body(b"x" * 40, True)])
    with budget.hold("owner") as hold:
        reading = asyncio.ensure_future(server.exchange.body(100, hold))
        await asyncio.sleep(0)
        assert budget.held == 40
        server.inbox.put_nowait(body(b"x" * 20, True))
        with pytest.raises(Refused):
            await reading
        assert len(await Server([body(b"x" * 10)]).exchange.body(100, hold)) == 10
        assert budget.held == 50
    assert budget.held == 0


async def test_a_body_without_room_in_the_budget_is_not_read() -> None:
    """A body is refused by its declared length, before it is read."""
    server = Server([], b"60")
    with ByteBudget(100).hold("owner") as hold, pytest.raises(Refused):
        await server.exchange.body(100, hold)


async def test_a_disconnect_cancels_whatever_is_awaited() -> None:
    """The task does not count as cancelled afterwards."""
    server = Server()

    async def wait() -> None:
        with server.exchange.while_connected():
            asyncio.get_running_loop().call_soon(server.disconnect)
            await asyncio.Event().wait()

    with pytest.raises(ClientGone):
        await wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancelled_task_is_not_a_disconnect() -> None:
    """At shutdown, the server finds its tasks cancelled."""
    server = Server()
    entered = asyncio.Event()

    async def wait() -> None:
        with server.exchange.while_connected():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_disconnect_after_the_end_cancels_nothing() -> None:
    """The server may report it for the next call on the same connection."""
    server = Server()
    with server.exchange.while_connected():
        await server.exchange.respond(200, [], b"done")
    server.disconnect()
    task = asyncio.current_task()
    assert task is not None
    assert (len(server.sent), task.cancelling()) == (2, 0)


async def test_a_call_leaves_no_reference_cycles() -> None:
    """Reference counts alone free the task at its end, without the garbage collector."""
    server = Server()

    async def call() -> None:
        with server.exchange.while_connected():
            await asyncio.sleep(0)

    gc.disable()
    try:
        task = weakref.ref(asyncio.create_task(call()))
        for _ in range(3):  # it begins, and ends
            await asyncio.sleep(0)
        assert task() is None
    finally:
        gc.enable()


async def test_an_error_before_the_answer_sets_the_status() -> None:
    """The response has the error's status and headers, and the request id."""
    server = Server()
    await server.exchange.fail(RouterError("oops", reason="why"))
    start, end = server.sent
    assert start["status"] == 500
    assert {(b"x-d2lpm-dropped-reason", b"why"), (b"x-request-id", b"id")} <= set(start["headers"])
    assert b"oops" in end["body"]
    assert not end.get("more_body")


async def test_an_error_inside_a_stream_is_its_last_event() -> None:
    """No second status line is sent."""
    server = Server()
    await server.exchange.begin(200, [])
    await server.exchange.write(b": wait\n\n")
    await server.exchange.fail(RouterError("oops"))
    start, first, last = server.sent
    assert (start["status"], first["more_body"]) == (200, True)
    assert last["body"].startswith(b'data: {"error":{"message":"oops"')
    assert last["body"].endswith(b"data: [DONE]\n\n")
    assert not last.get("more_body")


async def test_a_long_body_is_joined_unchanged() -> None:
    """Blocks of any size give the same bytes."""
    whole = bytes(range(256)) * (3 * 2**12 + 1)
    for size in (2**16 + 1, 2**20 - 1, 2**20, 2**22):
        blocks = [whole[at : at + size] for at in range(0, len(whole), size)]
        messages = [body(block, more=True) for block in blocks]
        exchange = Server([*messages, body(b"")]).exchange
        with ByteBudget(2**30).hold("owner") as hold:
            same = await exchange.body(2**26, hold) == whole
            assert same  # pytest would take minutes to show the difference of megabytes
            assert hold.amount == len(whole)
