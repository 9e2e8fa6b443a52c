"""What one connection's client was sent and has not read, beyond what the network holds."""

import asyncio

from router.front.byte_budget import ByteBudget


class UnreadBytes:
    """Counts these bytes while the client reads more slowly than it is sent, and lets them grow within its budget.

    So an engine's answer is taken off it as fast as it comes, whoever reads it. Beyond the budget the answer waits for
    its client, and the engine with it.
    """

    __slots__ = ("_hold", "_sent", "_transport")

    def __init__(self, budget: ByteBudget, transport: asyncio.WriteTransport, owner: str) -> None:
        """`owner`: whose budget counts, until `belong`."""
        self._hold = budget.hold(owner)
        self._transport = transport
        self._sent = 0
        """Bytes that were there when the client began to read too slowly, and that came since then."""

    def charge_to(self, owner: str) -> None:
        """The call under way is this one's."""
        self._hold.transfer(owner)

    def start(self) -> None:
        """The client reads too slowly from now on, if it did not already."""
        if not self._hold.amount:
            self._sent = self._transport.get_write_buffer_size()
            self._hold.set(self._sent)

    def try_add(self, amount: int) -> bool:
        """Count so many bytes more, to be sent now; False if there is no room, and the client is to be waited for."""
        self._hold.set(self._transport.get_write_buffer_size())
        if not self._hold.try_add(amount):
            return False
        self._sent += amount
        return True

    @property
    def read(self) -> int:
        """Bytes that the client has read since `begin`."""
        return self._sent - self._transport.get_write_buffer_size()

    def stop(self) -> None:
        """It has read nearly all, or is gone."""
        self._hold.set(0)
