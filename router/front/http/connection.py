"""One client connection: uvicorn's HTTP protocol, with limits on what a client sends, how slowly, and leaves unread.

uvicorn parses HTTP and runs the application, but sets none of these limits. A client that exceeds one or misses a
deadline (`deadlines.py`) gets an error in OpenAI's shape (`http_errors.py`) if it can still understand an answer;
otherwise the connection is cut.
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
from router.front.byte_budget import Hold, UnreadBytes
from router.front.http.connection_limits import BREAK_OFF, ON_DISCONNECT, STREAM_WRITER, UNREAD_OWNER, Connections
from router.front.http.deadlines import Awaiting, Deadlines
from router.front.http.http_errors import (
    SUPPORTED_VERSIONS,
    check_head,
    error_response,
    named_protocol,
    parse_error,
)
from router.front.http.response_writer import HTTP_1_0, CorkedTransport, StreamWriter, send
from router.front.http.tls_handshake import TlsHandshake
from router.runtime.fair_timer import GRACE_SECONDS, fired_late
from router.runtime.tls import Tls

EARLY_BYTES: Final = 64 * 1024
"""Bytes of later calls that a client can send while a call is in flight."""
EARLY_CALLS: Final = 16
"""Complete later calls that a client can send while a call is in flight."""
COUNTED_BYTES: Final = 8 * 1024
"""Up to this size, heads and early bytes do not count in the budget. Nearly all are far smaller."""
ACCEPTS_PER_TURN: Final = 16
"""Connections accepted per turn of the event loop. Each new one wakes all listening sockets, at 4 µs of CPU each."""


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
        self._active: RequestResponseCycle | None = None
        """The call in flight; `cycle` is the call that arrived last."""
        self._extensions: dict[str, Callable[..., object]] = {
            ON_DISCONNECT: self._on_disconnect,
            UNREAD_OWNER: self._charge_unread_to,
            BREAK_OFF: self._break_off,
            STREAM_WRITER: self._stream_writer,
        }
        self._notify_disconnect: Callable[[], None] | None = None
        """The application's callback for when the client of the call in flight disconnects."""
        self._early_bytes = b""
        """Bytes of later calls, not parsed yet. They are read all the same, or a disconnect would go unnoticed."""
        self._finished = False
        """True once an error is sent or the connection is cut or lost: nothing more is served."""
        self._pending_error: RouterError | None = None
        """The error in what followed the call in flight, to be sent once that call is answered."""
        self._parser_input = b""
        """The bytes being parsed, from the beginning of their first head."""
        self._url_end = 0
        """Position in `_parser_input` after the URL of the call that arrived last."""
        self._partial_head = b""
        """The part of the next head that has arrived, possibly with some bytes before it."""
        self._unparsed_bytes = 0
        """Bytes received since the last end of a head or part of a body."""
        self._deadlines: Deadlines
        self._unread: UnreadBytes
        self._hold: Hold
        """Counts heads and early bytes in the budget."""
        self._head_bytes = 0
        """Size of the head of the call that arrived last."""

    @property
    def unread_bytes(self) -> int:
        """Bytes written for the client that the network has not accepted yet."""
        return self.transport.get_write_buffer_size()

    def cut(self) -> None:
        """Close the connection at once. A call in flight ends as if its client had disconnected."""
        self._finished = True
        self.transport.abort()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Enter the connection in the counts, or refuse it if there are too many."""
        super().connection_made(CorkedTransport(transport, self.loop.call_soon))
        self._address = self.client[0] if self.client else ""
        self._deadlines = Deadlines(self._limits, self.loop)
        self._hold = self._connections.budget.hold(self._address)
        self._unread = UnreadBytes(self._connections.budget, self.transport, self._address)
        if self._connections.add(self, self._address):
            self._deadlines.expect(Awaiting.HEAD, self._on_deadline)
        else:
            self._finished = True
            self._send_error(Refused("Too many connections are open.", retry_after=1.0, reason="rejected-connections"))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what the connection holds and end the call in flight."""
        self._connections.remove(self, self._address)
        self._finished = True
        self._early_bytes = self._partial_head = b""
        if self._hold.amount:
            self._hold.set(0)
        self._unread.stop()
        self._deadlines.cancel()
        if self._active is not None:
            self._disconnect_app(self._active)
        self._notify_disconnect = None
        self._extensions.clear()  # breaks a reference cycle with this object
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, or keep them for later while a call is in flight that they do not belong to."""
        if self._finished:
            return
        if self._input_is_early:
            self._early_bytes += data
            self.transport.holds_next = False
            if len(self._early_bytes) > EARLY_BYTES or not self._count_held_bytes():
                self.cut()
            return
        self._unset_keepalive_if_required()
        self._feed(data)

    def pause_writing(self) -> None:
        """Called when the client reads more slowly than it is sent: start the deadline for reading."""
        super().pause_writing()
        self._start_reading_deadline()

    def resume_writing(self) -> None:
        """Called when the client has read nearly all: stop the deadline for reading."""
        super().resume_writing()
        self._unread.stop()
        self._deadlines.cancel_reading()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for the keep-alive time; cut it if its last answer stays unread."""
        task = self.timeout_keep_alive_task
        if task is not None and fired_late(self.loop, task.when()):
            # The next call may have arrived while the process stood still: give the loop time to read it.
            self.timeout_keep_alive_task = self.loop.call_later(GRACE_SECONDS, self.timeout_keep_alive_handler)
            return
        super().timeout_keep_alive_handler()
        self._limit_unread_on_close()

    # Callbacks of the parser (httptools).

    def on_message_begin(self) -> None:
        """Begin a call."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]
        self._unparsed_bytes = self._unparsed_bytes or 1
        self._deadlines.body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, without the whitespace after its value, which the parser leaves."""
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Check the head, and start the call if the head is acceptable."""
        self._unparsed_bytes = 0
        protocol_name, self._url_end = named_protocol(
            self._parser_input, self.parser.get_method(), self.url, self._url_end
        )
        if protocol_name != b"HTTP":
            self._reject(BadRequest(SUPPORTED_VERSIONS, code="invalid_http"))
        if self._finished or self._pending_error is not None or self.parser.should_upgrade():
            return
        self._head_bytes, error = check_head(self.parser, self.url, self.headers, self._limits)
        if error is not None:
            self._reject(error)
            return
        self.headers = []  # the call has its own list; trailers go to this one and are ignored
        if self.parser.get_http_version() == HTTP_1_0:  # such a client would take an interim answer for the final one
            self.expect_100_continue = False
        super().on_headers_complete()
        if self.pipeline:
            self.transport.holds_next = False
            self.flow.resume_reading()
        if len(self.pipeline) > EARLY_CALLS:
            self.cut()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._unparsed_bytes = 0
        self._deadlines.body_bytes += len(body)
        if not self._ignoring_input:
            super().on_body(body)
            if self._active is not self.cycle:
                self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """End the body."""
        self._unparsed_bytes = 0
        if not self._ignoring_input and not self.parser.should_upgrade():
            self.cycle.more_body = False
            if self._active is self.cycle:
                self._connections.mark_busy(self, self._address)
            super().on_message_complete()

    # Overrides of uvicorn.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        # The second write fails if the client has disconnected; then the calls behind this one are not started.
        self.transport.holds_next = not self.pipeline and not self._early_bytes
        if self._unread.owner != self._address:  # that of the call before
            self._unread.charge_to(self._address)
        if not cycle.more_body:
            self._connections.mark_busy(self, self._address)
        # Not kept in `cycle.send`: a call that refers to itself would wait for the garbage collector.
        send_message = partial(send, cycle, self._unread)
        super()._start_asgi_task(cycle, lambda scope, receive, _: app(scope, receive, send_message))

    def on_response_complete(self) -> None:
        """Go on with the next call, once a call is answered."""
        self._active = None
        super().on_response_complete()
        if not self.transport.is_closing():
            if self._active is None:
                self._head_bytes = 0
                self._connections.mark_idle(self, self._address)
            if self._pending_error is not None:
                self._unset_keepalive_if_required()
                self._reject(self._pending_error)
            elif self._early_bytes and not self._input_is_early:
                early, self._early_bytes = self._early_bytes, b""
                self._unset_keepalive_if_required()
                self._feed(early)
        self._update_deadline()
        self._limit_unread_on_close()

    # Limits.

    @property
    def _input_is_early(self) -> bool:
        """Whether input now belongs to a later call than the one in flight."""
        active = self._active
        return active is not None and not (active is self.cycle and active.more_body)

    @property
    def _ignoring_input(self) -> bool:
        """True once an error means that later input is ignored."""
        return self._finished or self._pending_error is not None

    def _feed(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        self._parser_input, self._partial_head, self._url_end = self._partial_head + data, b"", 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._reject(parse_error(error))
        if self._parser_input and self._unparsed_bytes and not (self.cycle is not None and self.cycle.more_body):
            self._partial_head = self._parser_input[self._url_end :][-self._limits.head_bytes :]
        self._parser_input = b""
        if self._unparsed_bytes > self._limits.head_bytes:
            self._reject(HeadTooLarge(self._limits.head_bytes))
        elif not self._finished and not self._count_held_bytes():
            self._reject(self._connections.budget.refusal(self._address, self._unparsed_bytes + self._head_bytes))
        self._update_deadline()

    def _count_held_bytes(self) -> bool:
        """Count bytes held besides the body and the answer. Returns False if the budget has no room for them."""
        held = self._unparsed_bytes + len(self._partial_head) + self._head_bytes + len(self._early_bytes)
        more = (held if held > COUNTED_BYTES else 0) - self._hold.amount
        if more > 0:
            return self._hold.try_add(more)
        if more < 0:
            self._hold.set(self._hold.amount + more)
        return True

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse a call again without its offer to upgrade: the parser would take its body for the other protocol."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._reject(BadRequest("CONNECT is not supported: this server is not a proxy.", code="invalid_http"))
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

    def _update_deadline(self) -> None:
        """Set the deadline for what the client must send next."""
        awaited = self._awaited()
        if awaited is None and self._active is None:
            self._start_keep_alive()
        if awaited is not self._deadlines.awaiting:
            self._deadlines.expect(awaited, self._on_deadline)

    def _start_keep_alive(self) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _awaited(self) -> Awaiting | None:
        """Return what the client must send next; None if nothing."""
        if self.transport.is_closing():
            return None
        if self._finished:
            return Awaiting.REST
        if self._active is not None:
            return Awaiting.BODY if self._active is self.cycle and self.cycle.more_body else None
        if self.cycle is not None and self.cycle.more_body:
            return Awaiting.REST
        return Awaiting.HEAD if self.cycle is None or self._unparsed_bytes else None

    def _on_deadline(self, awaited: Awaiting) -> None:
        """Handle a missed deadline: answer 408 if the client can still understand it, otherwise cut."""
        if awaited is Awaiting.REST or (awaited is Awaiting.HEAD and not self._unparsed_bytes):
            self.cut()
        else:
            self._reject(TooSlow("body" if awaited is Awaiting.BODY else "headers"))

    def _reject(self, error: RouterError) -> None:
        """Answer with an error after the calls in flight, and close the connection.

        Cut it instead if the error would be mistaken for the answer to another call.
        """
        if self._finished:
            return
        active = self._active
        if active is not None and active is self.cycle and not active.more_body:
            self._pending_error = self._pending_error or error
            return
        if active is not None and (active is not self.cycle or active.response_started or not active.more_body):
            self.cut()
            return
        self._finished = True
        if active is not None:
            self._disconnect_app(active)
        self._send_error(error)
        # Close only the writing side: a client that is still sending can read the answer only while its bytes are read.
        self.transport.write_eof()
        self._update_deadline()

    def _disconnect_app(self, active: RequestResponseCycle) -> None:
        """Tell the application that its client has disconnected."""
        active.disconnected = True
        active.message_event.set()
        if self._notify_disconnect is not None:
            self._notify_disconnect()

    def _on_disconnect(self, callback: Callable[[], None]) -> None:
        """Register the callback for a disconnect, which is only noticed while the connection is read."""
        if self._active is not None and self._active.disconnected:
            self.loop.call_soon(callback)
            return
        self._notify_disconnect = callback
        self.flow.resume_reading()

    def _charge_unread_to(self, owner: str) -> None:
        """Count unread bytes of the call in flight against this owner."""
        self._unread.charge_to(owner)

    def _stream_writer(self) -> StreamWriter | None:
        """Return a writer for the answer under way; None unless it has begun and is sent in chunks."""
        cycle = self._active
        if cycle is None or not cycle.response_started or not cycle.chunked_encoding or cycle.scope["method"] == "HEAD":
            return None
        return StreamWriter(cycle, self.transport.uncork())

    def _break_off(self) -> None:
        """Close the connection after what was sent, so that the client sees that the answer is incomplete."""
        self._finished = True
        if self._active is not None:
            self._active.disconnected = True
        self.transport.close()
        self._limit_unread_on_close()

    def _send_error(self, error: RouterError) -> None:
        self._connections.refused[error.status] += 1
        self.transport.write(error_response(error))

    def _limit_unread_on_close(self) -> None:
        """While the connection closes, limit the time that its client can leave the last bytes unread."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._start_reading_deadline()

    def _start_reading_deadline(self) -> None:
        self._unread.start()
        self._deadlines.expect_reading(self.cut, lambda: self._unread.read)


def accept_sockets(listener: socket.socket) -> list[socket.socket]:
    """Return a listening socket and copies of it, for `uvicorn.Server.run`, which closes them.

    uvloop accepts one connection per socket and turn of its loop. With a thousand streams a turn is long: with only one
    socket, new clients would wait up to a minute while connected clients get all the service.

    Fronts share the listening socket, and whether it blocks. It must not even for a moment: a front that comes too late
    for a connection would hang in `accept`. In Python, a copy of an object that blocks makes the socket block.
    """
    listener.setblocking(False)
    return [listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))]


def connection_class(connections: Connections, tls: Tls | None = None) -> type[asyncio.Protocol]:
    """Return the protocol class for `uvicorn.Config(http=...)`, whose instances count in `connections`.

    `tls`: the certificate to present; None for plain HTTP.
    """

    class LimitedConnection(ClientConnection):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop, connections)

    if tls is None:
        return LimitedConnection
    certificate = tls

    class EncryptedConnection(LimitedConnection):
        def __init__(self, handshake: TlsHandshake, config: Config, state: ServerState, app: dict[str, Any]) -> None:
            super().__init__(config, state, app)
            self._handshake = handshake

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._handshake.release()
            super().connection_made(transport)

    class Handshake(TlsHandshake):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            build = partial(EncryptedConnection, config=config, state=server_state, app=app_state)
            super().__init__(build, certificate.context, connections)

    return Handshake
