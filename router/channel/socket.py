"""The channel between processes: messages as frames on a Unix socket, or between machines on a TCP connection.

A frame is its length (four bytes, big-endian) and a message as `codec` encodes it. The first frame of each side is its
`Hello`, with its version of the messages; ends with different versions part at once. A frame that begins with a zero
byte is a probe, which the scheduler's end answers with another after all that came before it, so a front knows how far
the scheduler lags. The probe of either end says how many messages it has handled.

What an end sends in one turn of its event loop goes out in one write.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Final, Protocol, Self, TypeVar

import msgspec

from router.channel.codec import FRONT_DECODER, SCHEDULER_DECODER, channel_version, encode
from router.channel.host import SchedulerHost
from router.channel.known_front import KnownFront, KnownFronts
from router.channel.messages import FrontMessage, SchedulerMessage, Settled

T = TypeVar("T")

log = logging.getLogger(__name__)

LENGTH_BYTES: Final = 4
COUNT_BYTES: Final = 8
PROBE: Final = b"\0"
"""The first byte of a probe; a message begins with no such byte."""
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""Longer frames end the channel. The longest message is a request with the hashes of a prompt of `--body-limit`."""
MAX_UNSENT_BYTES: Final = 64 * 1024 * 1024
"""Bytes that the scheduler keeps for a front that does not read, before it gives the front up."""
MAX_PROMPTLY_SENT_BYTES: Final = 1024 * 1024
"""Bytes that may be unsent before the other end counts as too slow."""
PROBE_SECONDS: Final = 0.25
"""Seconds between two probes of a front."""
LATE_PROBES: Final = 8
"""Probe intervals without an answer after which the scheduler counts as behind: two seconds. Counted in timer turns of
the front, so that a stall of the front itself is not taken for one of the scheduler."""
CONNECT_SECONDS: Final = 30.0
"""Seconds in which a front must be welcomed."""


class ChannelClosed(Exception):
    """The other end of the channel is gone or refuses this one."""


class OtherVersion(ChannelClosed):
    """The other end speaks another version."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of each side. Every version must be able to read it: add only fields with defaults."""

    version: str
    """What `channel_version` returns there."""
    front: int = 0
    """The number of the front; 0 from the scheduler."""
    session: str = ""
    """The same at each connection of a front or of a run of the scheduler, and at those of no other."""
    secret: bytes = b""
    """From the scheduler: keys the prompt hashes."""
    epoch: int = 0
    """From the scheduler: its epoch; from a front: the highest that it has obeyed. 0 without a cluster."""
    replica: str = ""
    """From a front: the name of its replica; empty without a cluster."""
    run: str = ""
    """From a front: the session of the run of the scheduler that it was connected to last."""
    received: int = 0
    """From a front: how many messages of that run it has handled."""


_HELLO: Final = msgspec.msgpack.Decoder(Hello)


class FrameCutter:
    """Cuts received bytes into frames, however they were split on the way."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads of the frames that are complete. Raises ValueError for a frame that is too long.

        To be iterated to its end before the next call.
        """
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        try:
            while end - start >= LENGTH_BYTES:
                body = start + LENGTH_BYTES
                length = int.from_bytes(buffer[start:body], "big")
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                if end - body < length:
                    return
                start = body + length
                yield bytes(buffer[body:start])
        finally:
            del buffer[:start]


def frame(payload: bytes) -> bytes:
    """Return the payload as a frame."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


class ChannelEnd(asyncio.Protocol):
    """What both ends have in common: they cut frames, and write once per turn of the event loop."""

    def __init__(self) -> None:
        self._cutter = FrameCutter()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._greeted = False
        self.writing_paused = False
        """Whether the other end reads more slowly than this end writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        self._transport = transport
        transport.set_write_buffer_limits(MAX_PROMPTLY_SENT_BYTES)

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are complete; cut the connection if they are none."""
        try:
            for payload in self._cutter.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                self._take(payload)
        except ValueError as error:
            log.error("closing the channel, because it received an invalid message: %s", error)
            self.abort()

    def _take(self, payload: bytes) -> None:
        if not self._greeted:
            self._greeted = True
            self._greet(_HELLO.decode(payload))
        elif payload.startswith(PROBE):
            self._probed(int.from_bytes(payload[1:], "big"))
        else:
            self._handle(payload)

    def _greet(self, hello: Hello) -> None:
        """Take the other end's first frame. Raises ValueError to refuse it."""
        raise NotImplementedError

    def _handle(self, payload: bytes) -> None:
        """Take a message. Raises ValueError if it is none."""
        raise NotImplementedError

    def _probed(self, handled: int) -> None:
        """Take a probe, or the answer to one. `handled`: how many messages the other end has handled."""
        raise NotImplementedError

    def _write_probe(self, handled: int) -> None:
        self.write(PROBE + handled.to_bytes(COUNT_BYTES, "big"))

    def write(self, payload: bytes) -> None:
        """Send a frame at the end of this turn of the event loop. Without effect once the channel is closed."""
        if self._transport is None or self._transport.is_closing():
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append(frame(payload))

    def flush(self) -> None:
        """Send now what was written in this turn."""
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    def pause_writing(self) -> None:
        """Called by the event loop."""
        self.writing_paused = True

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self.writing_paused = False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Called by the event loop."""
        self._transport = None
        self._unsent.clear()

    def leave(self) -> None:
        """Begin to close the channel: what is unsent is sent, as far as the other end reads it."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the channel without sending what is unsent."""
        if self._transport is not None:
            self._transport.abort()


class FrontEnd(ChannelEnd):
    """The front's end of the channel."""

    def __init__(self, hello: Hello, receive: Callable[[SchedulerMessage], None]) -> None:
        """`hello`: this end's first frame; `receive`: takes the scheduler's messages."""
        super().__init__()
        self._hello = hello
        self._receive = receive
        self._welcome: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._probe_timer: asyncio.TimerHandle | None = None
        self._probed_at: float | None = None
        """When the probe was sent that is not answered yet."""
        self._late_probes = 0
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.delay = 0.0
        """Seconds in which the last probe was answered."""
        self.handled: Callable[[], int] = lambda: 0
        """Returns how many messages of this run of the scheduler the front has handled."""
        self.on_confirmed: Callable[[int], None] = lambda _: None
        """Called with the number of messages that the scheduler has handled."""

    async def welcome(self) -> Hello:
        """Return the scheduler's first frame. Raises ChannelClosed if the two versions differ."""
        return await self._welcome

    async def lost(self) -> None:
        """Wait until the channel is closed from either end."""
        await asyncio.shield(self._lost)

    async def unless_lost(self, future: "asyncio.Future[T]") -> T:
        """Return the result of a future. Raises ChannelClosed if the channel is closed before."""
        lost = asyncio.ensure_future(self.lost())
        await asyncio.wait((future, lost), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if not future.done():
            raise ChannelClosed("the scheduler closed the channel")
        return future.result()

    @property
    def behind(self) -> bool:
        """Whether the scheduler lags so much that no new calls should be sent to it."""
        return self.writing_paused or self._late_probes >= LATE_PROBES

    @property
    def is_closed(self) -> bool:
        """Whether the channel is closed, from either end."""
        return self._lost.done()

    async def close(self) -> None:
        """Send what is unsent, and close the channel."""
        self.leave()
        await self.lost()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send this end's first frame."""
        super().connection_made(transport)
        self.write(msgspec.msgpack.encode(self._hello))
        self._set_probe_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell those who wait."""
        super().connection_lost(exc)
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        if not self._welcome.done():
            self._welcome.set_exception(ChannelClosed("the scheduler closed the channel"))
        if not self._lost.done():
            self._lost.set_result(None)

    def send(self, message: FrontMessage) -> None:
        """Send a message at the end of this turn of the event loop. Without effect once the channel is closed."""
        self.write(encode(message))

    def _greet(self, hello: Hello) -> None:
        if self._welcome.done():
            return
        if hello.version == channel_version():
            self._welcome.set_result(hello)
        else:
            self._welcome.set_exception(OtherVersion("the scheduler runs another version of the router"))
            self.leave()

    def _handle(self, payload: bytes) -> None:
        self._receive(SCHEDULER_DECODER.decode(payload))

    def _set_probe_timer(self) -> None:
        self._probe_timer = asyncio.get_running_loop().call_later(PROBE_SECONDS, self._probe)

    def _probe(self) -> None:
        """Send a probe, or count that the last one is not answered yet."""
        self._set_probe_timer()
        if self._probed_at is None:
            self._probed_at = time.monotonic()
            self._write_probe(self.handled())
        else:
            self._late_probes += 1

    def _probed(self, handled: int) -> None:
        if self._probed_at is not None:
            self.delay = time.monotonic() - self._probed_at  # the clock of uvloop counts whole milliseconds only
        self._probed_at, self._late_probes = None, 0
        self.on_confirmed(handled)


class HostEnd(ChannelEnd):
    """The scheduler's end of the channel to one front."""

    def __init__(
        self, fronts: KnownFronts, hello: Hello, open_ends: "set[HostEnd]", on_superseded: Callable[[int], None]
    ) -> None:
        """`hello`: this end's first frame; `open_ends`: holds this end while it is connected.

        `on_superseded`: called with the epoch of a front that has obeyed a higher one than that of `hello`.
        """
        super().__init__()
        self._fronts = fronts
        self._hello = hello
        self._open_ends = open_ends
        self._on_superseded = on_superseded
        self._front: KnownFront | None = None
        """The front; None before its first frame."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send this end's first frame, which lets the front see a difference of the versions, too."""
        super().connection_made(transport)
        self._open_ends.add(self)
        self.write(msgspec.msgpack.encode(self._hello))

    def connection_lost(self, exc: Exception | None) -> None:
        """Settle what the front has left, unless it may come back."""
        super().connection_lost(exc)
        self._open_ends.discard(self)
        if self._front is not None:
            self._front.lost(self, ended=exc is None)

    def pause_writing(self) -> None:
        """Read no more of a front that does not read: its questions would only add to what is unsent."""
        super().pause_writing()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        super().resume_writing()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def flush(self) -> None:
        """Send what was written in this turn, or give up a front that has left too much unread."""
        super().flush()
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("a front does not read the scheduler's messages; closing its channel")
            self.abort()

    @property
    def replica(self) -> str:
        """The name of the front's replica; empty without a cluster, and before its first frame."""
        return "" if self._front is None else self._front.link.replica

    def _greet(self, hello: Hello) -> None:
        if hello.epoch > self._hello.epoch:
            self.abort()
            self._on_superseded(hello.epoch)
        elif hello.version == channel_version():
            self._front = self._fronts.connect(hello, self)
            if self._front is None:
                self.write(encode(Settled()))
                self.leave()
        else:
            log.error("front %d runs another version of the router; its channel is closed", hello.front)
            self.leave()

    def _handle(self, payload: bytes) -> None:
        assert self._front is not None
        message = FRONT_DECODER.decode(payload)
        try:
            self._front.receive(message)
        except Exception:  # one message that the scheduler fails on must not end the calls of all others
            number = self._front.link.number
            log.exception("a message of front %d failed inside the scheduler: %s", number, type(message))

    def _probed(self, handled: int) -> None:
        assert self._front is not None
        self._front.confirm(handled)
        self._write_probe(self._front.handled)


class ChannelServer:
    """Accepts fronts while the context is entered: at a Unix socket, or those that others bring with `new_end`."""

    def __init__(
        self,
        host: SchedulerHost,
        secret: bytes,
        path: str | None,
        epoch: int = 0,
    ) -> None:
        """`secret`: for the fronts, keys the prompt hashes; `path`: of the socket, which only this user may reach.

        `epoch`: of this run of the scheduler.
        """
        self._hello = Hello(channel_version(), session=token_hex(8), secret=secret, epoch=epoch)
        self._fronts = KnownFronts(host, self._hello.session, may_return=epoch > 0)
        self._path = path
        self.on_superseded: Callable[[int], None] = lambda _: None
        """Called with the epoch of a front that has obeyed a higher one."""
        self._server: asyncio.Server | None = None
        self._ends: set[HostEnd] = set()

    @property
    def fronts(self) -> int:
        """How many fronts are connected."""
        return len(self._ends)

    @property
    def replicas(self) -> Mapping[str, int]:
        """How many fronts of each replica are connected."""
        return Counter(end.replica for end in self._ends)

    def new_end(self) -> HostEnd:
        """Return this side's end of a connection that a front is making."""
        return HostEnd(self._fronts, self._hello, self._ends, self.on_superseded)

    async def __aenter__(self) -> Self:
        """Listen."""
        if self._path is not None:
            self._server = await asyncio.get_running_loop().create_unix_server(self.new_end, path=self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening, and cut what is connected."""
        if self._server is not None:
            self._server.close()
        self._fronts.close()
        for end in list(self._ends):
            end.abort()


class Route(Protocol):
    """How a front reaches the scheduler."""

    patience: float
    """Seconds without a scheduler for which new calls wait for it, and are not refused."""
    answers_within: float = CONNECT_SECONDS
    """Seconds in which a scheduler that accepts a connection must say what it knows of the front."""

    async def connect(self, end: FrontEnd) -> None:
        """Connect this end. Raises OSError, for one if there is no scheduler."""

    async def superseded(self, epoch: int) -> None:
        """Wait until a scheduler with a higher epoch than this leads."""


class UnixRoute(Route):
    """To the only scheduler, on the same machine."""

    patience = 2.0

    def __init__(self, path: str) -> None:
        """`path`: of its Unix socket."""
        self._path = path

    async def connect(self, end: FrontEnd) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: end, self._path)

    async def superseded(self, epoch: int) -> None:  # noqa: ARG002
        await asyncio.get_running_loop().create_future()


async def connect_front(
    route: Route, hello: Hello, receive: Callable[[SchedulerMessage], None]
) -> tuple[FrontEnd, Hello]:
    """Connect a front to the scheduler. Returns its end, and the scheduler's first frame.

    `hello`: the front's first frame. Raises ChannelClosed if it is not welcomed.
    """
    end = FrontEnd(hello, receive)
    try:
        async with asyncio.timeout(route.answers_within):
            await route.connect(end)
            return end, await end.welcome()
    except OSError as error:  # TimeoutError is one
        end.abort()
        raise ChannelClosed(f"the scheduler does not answer: {error.strerror or str(error) or 'timeout'}") from None
