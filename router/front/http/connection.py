"""What a client may do to its connection: how much it sends, when, and what becomes of it and of the connection then.

uvicorn parses HTTP and runs the application; it bounds none of this. What goes beyond a limit is answered in OpenAI's
shape (`refusals.py`) where an answer can still be understood, and cut otherwise; so is what is late (`deadlines.py`).
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.errors import BadRequest, HeadTooLarge, Refused, RouterError, TooSlow
from router.front.http.connection_limits import BREAK_OFF, ON_DISCONNECT, UNREAD_OWNER, Connections
from router.front.http.corked_transport import CorkedTransport
from router.front.http.deadlines import Awaiting, Deadlines
from router.front.http.http_errors import (
    SUPPORTED_VERSIONS,
    error_response,
    head_error,
    head_size,
    named_protocol,
    parse_error,
)
from router.front.http.response_writer import send
from router.front.http.unread_bytes import UnreadBytes
from router.runtime.fair_timer import GRACE_SECONDS, stalled_since

EARLY_BYTES: Final = 64 * 1024
"""What may come of later calls while one is under way."""
EARLY_CALLS: Final = 16
"""How many of these may have come whole."""
COUNTED_BYTES: Final = 8 * 1024
"""Heads, and what comes early, up to this size are not counted in the budget; nearly all are far below."""
ACCEPTS_PER_TURN: Final = 16
"""Connections that are taken in one turn of the event loop. Whoever connects wakes every door, at 4 µs of CPU each."""


class ClientConnection(HttpToolsProtocol):
    """One client's connection."""

    transport: CorkedTransport

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = connections.limits
        self.timeout_keep_alive = self._limits.idle_seconds  # type: ignore[assignment]
        self._connections = connections
        self._address = ""
        self._served: RequestResponseCycle | None = None
        """The call under way; `cycle` is the one that came last."""
        self._extensions: dict[str, Callable[..., None]] = {
            ON_DISCONNECT: self._when_left,
            UNREAD_OWNER: self._belong,
            BREAK_OFF: self._break_off,
        }
        self._leaving: Callable[[], None] | None = None
        """What the application has us call if the client of the call under way leaves."""
        self._early = b""
        """What came of later ones: it is read, or else a client that leaves would not be noticed, but not parsed."""
        self._refused = False
        self._broken: RouterError | None = None
        """What is wrong with what came behind the call under way, to be told once that is answered."""
        self._fed = b""
        """What is being parsed, from the beginning of its first head on."""
        self._line_end = 0
        """Where in there the URL ends of the call that came last."""
        self._begun = b""
        """The part of the next head that has come already, and maybe something before it."""
        self._dangling = 0
        """Bytes that came since the last that were of use, which is the end of a head or a part of a body."""
        self._deadlines = Deadlines(self._limits, self.loop)
        self._unread: UnreadBytes
        self._waiting = connections.budget.hold("")
        """The bytes of heads, and of what comes early."""
        self._head_bytes = 0
        """Of the call that came last."""

    @property
    def unread_bytes(self) -> int:
        """What the client was sent and has not even left for the network."""
        return self.transport.get_write_buffer_size()

    def cut(self) -> None:
        """Close the connection at once; whatever is under way there ends as if its client had left."""
        self._refused = True
        self.transport.abort()

    # What the event loop tells.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(CorkedTransport(transport, self.loop.call_soon))
        self._address = self._waiting.owner = self.client[0] if self.client else ""
        self._unread = UnreadBytes(self._connections.budget, self.transport, self._address)
        if self._connections.add(self, self._address):
            self._look()
        else:
            self._refused = True
            self._answer(Refused("There are too many connections.", retry_after=1.0, reason="rejected-connections"))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._connections.remove(self, self._address)
        self._refused = True
        self._early = self._begun = b""
        self._waiting.set(0)
        self._unread.stop()
        self._deadlines.cancel()
        if self._served is not None:
            self._give_up(self._served)
        self._leaving = None
        self._extensions.clear()  # it refers to this
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._refused:
            return
        if self._must_wait:
            self._early += data
            self.transport.holds_next = False
            if len(self._early) > EARLY_BYTES or not self._count():
                self.cut()
            return
        self._unset_keepalive_if_required()
        self._feed(data)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client does not read what it is sent."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        self._unread.stop()
        self._deadlines.cancel_reading()

    def timeout_keep_alive_handler(self) -> None:
        """It has been idle for long enough; if it has not even read its last answer, for good."""
        task = self.timeout_keep_alive_task
        if task is not None and stalled_since(self.loop, task.when()):  # another call may have come and not been read
            self.timeout_keep_alive_task = self.loop.call_later(GRACE_SECONDS, self.timeout_keep_alive_handler)
            return
        super().timeout_keep_alive_handler()
        self._stall_if_unread()

    # What the parser finds.

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]
        self._dangling = self._dangling or 1
        self._deadlines.body_bytes = 0

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._dangling = 0
        named, self._line_end = named_protocol(self._fed, self.parser.get_method(), self.url, self._line_end)
        if named != b"HTTP":
            self._refuse(BadRequest(SUPPORTED_VERSIONS, code="invalid_http"))
        if self._deaf or self.parser.should_upgrade():
            return
        self._head_bytes = head_size(self.url, self.headers)
        wrong = head_error(self.parser, self.url, self.headers, self._head_bytes, self._limits)
        if wrong is not None:
            self._refuse(wrong)
            return
        self.headers = []  # the call has its own; those that follow a body are of no use to anybody
        super().on_headers_complete()
        if self.pipeline:
            self.transport.holds_next = False
            self.flow.resume_reading()
        if len(self.pipeline) > EARLY_CALLS:
            self.cut()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._dangling = 0
        self._deadlines.body_bytes += len(body)
        if not self._deaf:
            super().on_body(body)
            if self._served is not self.cycle:
                self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """See httptools."""
        self._dangling = 0
        if not self._deaf and not self.parser.should_upgrade():
            self.cycle.more_body = False
            if self._served is self.cycle:
                self._connections.mark_busy(self, self._address)
            super().on_message_complete()

    # What uvicorn does.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        # The second write fails where the client has left; then what is behind this call is not begun.
        self.transport.holds_next = not self.pipeline and not self._early
        self._unread.charge_to(self._address)
        if not cycle.more_body:
            self._connections.mark_busy(self, self._address)
        sending = partial(send, cycle, self._unread)
        super()._start_asgi_task(cycle, lambda scope, receive, _: app(scope, receive, sending))

    def on_response_complete(self) -> None:
        """A call is answered: the next one may be served."""
        self._served = None
        super().on_response_complete()
        if not self.transport.is_closing():
            if self._served is None:
                self._head_bytes = 0
                self._connections.mark_idle(self, self._address)
            if self._broken is not None:
                self._unset_keepalive_if_required()
                self._refuse(self._broken)
            elif self._early and not self._must_wait:
                early, self._early = self._early, b""
                self._unset_keepalive_if_required()
                self._feed(early)
        self._look()
        self._stall_if_unread()

    # The limits.

    @property
    def _must_wait(self) -> bool:
        """Whether what comes now belongs to a later call than the one under way."""
        served = self._served
        return served is not None and not (served is self.cycle and served.more_body)

    @property
    def _deaf(self) -> bool:
        """Whether what is parsed now is of no use, as there is something wrong before it."""
        return self._refused or self._broken is not None

    def _feed(self, data: bytes) -> None:
        self._dangling += len(data)
        self._fed, self._begun, self._line_end = self._begun + data, b"", 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as asked:
            self._decline_upgrade(data[asked.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(parse_error(error))
        if self._fed and self._dangling and not (self.cycle is not None and self.cycle.more_body):
            self._begun = self._fed[self._line_end :][-self._limits.head_bytes :]
        self._fed = b""
        if self._dangling > self._limits.head_bytes:
            self._refuse(HeadTooLarge(self._limits.head_bytes))
        elif not self._refused and not self._count():
            self._refuse(self._connections.budget.refusal(self._address, self._dangling + self._head_bytes))
        self._look()

    def _count(self) -> bool:
        """Count what is held beside the body and the answer; False if there is no room for it."""
        held = self._dangling + len(self._begun) + self._head_bytes + len(self._early)
        more = (held if held > COUNTED_BYTES else 0) - self._waiting.amount
        if more > 0:
            return self._waiting.try_add(more)
        if more < 0:
            self._waiting.set(self._waiting.amount + more)
        return True

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read a call on as if it had not offered another protocol; the parser would take its body for that."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(BadRequest("This is no proxy.", code="invalid_http"))
            return
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (
            method,
            self.url,
            self.parser.get_http_version().encode(),
            b"".join(lines),
        )
        self.parser = httptools.HttpRequestParser(self)
        self._feed(head + rest)

    def _look(self) -> None:
        """See what the client owes now, and until when."""
        owed = self._owed()
        if owed is None and self._served is None:
            self._wait_for_another()
        self._deadlines.expect(owed, self._late)

    def _wait_for_another(self) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _owed(self) -> Awaiting | None:
        if self.transport.is_closing():
            return None
        if self._refused:
            return Awaiting.REST
        if self._served is not None:
            return Awaiting.BODY if self._served is self.cycle and self.cycle.more_body else None
        if self.cycle is not None and self.cycle.more_body:
            return Awaiting.REST
        return Awaiting.HEAD if self.cycle is None or self._dangling else None

    def _late(self, owed: Awaiting) -> None:
        """It did not come in time."""
        if owed is Awaiting.REST or (owed is Awaiting.HEAD and not self._dangling):
            self.cut()
        else:
            self._refuse(TooSlow("body" if owed is Awaiting.BODY else "headers"))

    def _refuse(self, error: RouterError) -> None:
        """Answer what came with an error and end, in its turn, or cut, where that would be taken for another answer."""
        if self._refused:
            return
        served = self._served
        if served is not None and served is self.cycle and not served.more_body:
            self._broken = self._broken or error
            return
        if served is not None and (served is not self.cycle or served.response_started or not served.more_body):
            self.cut()
            return
        self._refused = True
        if served is not None:
            self._give_up(served)
        self._answer(error)
        self.transport.write_eof()  # who still sends would not get to read the answer if nobody read on
        self._look()

    def _give_up(self, served: RequestResponseCycle) -> None:
        """Tell the application that nobody waits for its answer."""
        served.disconnected = True
        served.message_event.set()
        if self._leaving is not None:
            self._leaving()

    def _when_left(self, leaving: Callable[[], None]) -> None:
        """See `WhenLeft`. To be noticed, the client's leaving has to be read."""
        if self._served is not None and self._served.disconnected:
            self.loop.call_soon(leaving)
            return
        self._leaving = leaving
        self.flow.resume_reading()

    def _belong(self, owner: str) -> None:
        """What the client of the call under way leaves unread is this owner's."""
        self._unread.charge_to(owner)

    def _break_off(self) -> None:
        """End the connection behind what was sent, so that its client sees that the answer is not whole."""
        self._refused = True
        if self._served is not None:
            self._served.disconnected = True
        self.transport.close()
        self._stall_if_unread()

    def _answer(self, error: RouterError) -> None:
        self._connections.refused[error.status] += 1
        self.transport.write(error_response(error))

    def _stall_if_unread(self) -> None:
        """A connection that is being closed waits for its client to read what is left, and no longer than it may."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._await_reading()

    def _await_reading(self) -> None:
        self._unread.start()
        self._deadlines.expect_reading(self.cut, lambda: self._unread.read)


def accept_sockets(listener: socket.socket) -> list[socket.socket]:
    """A socket that listens, and copies of it, for `uvicorn.Server.run`, which closes them.

    Of each, uvloop takes one connection in a turn of its loop. A turn in which a thousand streams go on is long, and
    with one socket alone whoever connects then waits for a minute, while those who are connected have all the service.
    """
    return [listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))]


def connection_class(connections: Connections) -> type[asyncio.Protocol]:
    """The protocol for `uvicorn.Config(http=...)`; whatever connects is one of these connections."""

    class LimitedFront(ClientConnection):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop, connections)

    return LimitedFront
