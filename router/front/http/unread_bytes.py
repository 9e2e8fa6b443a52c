"""Counts the bytes sent on one connection that its client has not read, beyond those the network holds."""

import asyncio

from router.front.byte_budget import ByteBudget


class UnreadBytes:
    """Counts unread bytes while the client reads more slowly than it is sent, and limits them by the budget.

    Within the budget, the router reads the engine's answer as fast as it arrives, however slow the client. Beyond it,
    the answer waits for the client, and so does the engine.
    """

    __slots__ = ("_hold", "_sent", "_transport")

    def __init__(self, budget: ByteBudget, transport: asyncio.WriteTransport, owner: str) -> None:
        """`owner`: whose part of the budget counts, until `charge_to` changes it."""
        self._hold = budget.hold(owner)
        self._transport = transport
        self._sent = 0
        """Bytes that were unread at `start`, plus those sent since."""

    def charge_to(self, owner: str) -> None:
        """Count against this owner, who made the call in flight."""
        self._hold.transfer(owner)

    def start(self) -> None:
        """Start counting, because the client reads too slowly, unless already started."""
        if not self._hold.amount:
            self._sent = self._transport.get_write_buffer_size()
            self._hold.set(self._sent)

    def try_add(self, amount: int) -> bool:
        """Count `amount` bytes to be sent now. Returns False if there is no room: then wait for the client."""
        self._hold.set(self._transport.get_write_buffer_size())
        if not self._hold.try_add(amount):
            return False
        self._sent += amount
        return True

    @property
    def read(self) -> int:
        """Bytes that the client has read since `start`."""
        return self._sent - self._transport.get_write_buffer_size()

    def stop(self) -> None:
        """Stop counting, because the client has read nearly all or is gone."""
        self._hold.set(0)
