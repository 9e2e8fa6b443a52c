"""A connection on which the head of an answer leaves together with what follows it at once.

A server writes the two one after the other. By itself, with TCP_NODELAY, each would be a system call and a packet.
"""

import asyncio
from collections.abc import Callable
from typing import Final

JOINED_BYTES: Final = 64 * 1024
"""Of more than that a copy costs as much as the second call."""


class CorkedTransport(asyncio.Transport):
    """As much of a transport as its protocol needs, before the one that has the socket.

    Nothing is held beyond the turn of the event loop in which it is written, nor behind what is written next.
    """

    def __init__(self, transport: asyncio.Transport, soon: Callable[[Callable[[], None]], object]) -> None:
        """`soon`: calls in the event loop's next turn."""
        super().__init__()
        self._transport = transport
        self._soon = soon
        self.holds_next = False
        """Whether what is written next is to wait for what follows it, but no longer than for the loop's next turn."""
        self._held = b""
        # As they are: some of them are asked several times for each call.
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `asyncio.WriteTransport`."""
        if self._held:
            held, self._held = self._held, b""
            if len(data) <= JOINED_BYTES:
                data = b"".join((held, data))
            else:
                self._transport.write(held)
        elif self.holds_next:
            self.holds_next = False
            self._held = bytes(data)
            self._soon(self._release)
            return
        self._transport.write(data)

    def get_write_buffer_size(self) -> int:
        """See `asyncio.WriteTransport`; with what is held."""
        return self._transport.get_write_buffer_size() + len(self._held)

    def write_eof(self) -> None:
        """See `asyncio.WriteTransport`."""
        self._release()
        self._transport.write_eof()

    def close(self) -> None:
        """See `asyncio.BaseTransport`."""
        self._release()
        self._transport.close()

    def abort(self) -> None:
        """See `asyncio.WriteTransport`."""
        self._release()
        self._transport.abort()

    def _release(self) -> None:
        held, self._held = self._held, b""
        if held and not self.is_closing():
            self._transport.write(held)
