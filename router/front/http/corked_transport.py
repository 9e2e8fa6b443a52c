"""A transport that sends the head of an answer together with the block that follows it at once.

A server writes the two one after the other. With TCP_NODELAY each would cost a system call and a packet.
"""

import asyncio
from collections.abc import Callable
from typing import Final

JOINED_BYTES: Final = 64 * 1024
"""Largest block that is joined with the head. Copying more costs as much as a second system call."""


class CorkedTransport(asyncio.Transport):
    """Wraps the transport of the socket and can hold back one write.

    A held write is sent with the next write, or at the end of the current turn of the event loop.
    """

    def __init__(self, transport: asyncio.Transport, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """`call_soon`: the event loop's."""
        super().__init__()
        self._transport = transport
        self._call_soon = call_soon
        self.holds_next = False
        """Whether to hold the next write until another follows, or until the loop's next turn."""
        self._held = b""
        # Bound directly, because some are called several times per request.
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data`, joined with the held write if there is one, or hold it."""
        if self._held:
            held, self._held = self._held, b""
            if len(data) <= JOINED_BYTES:
                data = b"".join((held, data))
            else:
                self._transport.write(held)
        elif self.holds_next:
            self.holds_next = False
            self._held = bytes(data)
            self._call_soon(self._release)
            return
        self._transport.write(data)

    def uncork(self) -> Callable[[bytes], None]:
        """Write what is held, and return the `write` of the transport that has the socket."""
        self._release()
        return self._transport.write

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the network has not accepted yet, including the held write."""
        return self._transport.get_write_buffer_size() + len(self._held)

    def write_eof(self) -> None:
        """Send the held write and close the writing side."""
        self._release()
        self._transport.write_eof()

    def close(self) -> None:
        """Send the held write and close."""
        self._release()
        self._transport.close()

    def abort(self) -> None:
        """Send the held write and abort."""
        self._release()
        self._transport.abort()

    def _release(self) -> None:
        held, self._held = self._held, b""
        if held and not self.is_closing():
            self._transport.write(held)
