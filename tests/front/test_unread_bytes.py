"""Unread bytes count in their owner's part of the budget while the client reads too slowly."""

import asyncio

from router.front.byte_budget import ByteBudget, UnreadBytes

LIMIT = 1000


class Transport(asyncio.WriteTransport):
    """A transport with `size` bytes that the network has not accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def get_write_buffer_size(self) -> int:
        return self.size


def started(size: int) -> tuple[ByteBudget, Transport, UnreadBytes]:
    """Return the parts of a connection whose client has left `size` bytes unread."""
    budget, transport = ByteBudget(LIMIT), Transport()
    unread = UnreadBytes(budget, transport, "10.0.0.1")
    transport.size = size
    unread.start()
    return budget, transport, unread


def send(transport: Transport, unread: UnreadBytes, amount: int) -> bool:
    """Send bytes if there is room for them; return whether there was."""
    if fits := unread.try_add(amount):
        transport.size += amount
    return fits


def test_unread_bytes_grow_within_the_budget() -> None:
    """Beyond it no more bytes are accepted until the client reads."""
    budget, transport, unread = started(100)
    assert send(transport, unread, 300)
    assert budget.held == 400
    assert not send(transport, unread, 200)
    assert budget.held == 400
    transport.size -= 250
    assert send(transport, unread, 200)
    assert budget.held == 350


def test_starting_again_does_not_reset_the_bytes_read() -> None:
    """The deadline for reading depends on this number."""
    _, transport, unread = started(100)
    assert unread.read == 0
    transport.size -= 40
    unread.start()
    assert unread.read == 40
    assert send(transport, unread, 50)
    assert unread.read == 40
    transport.size -= 30
    assert unread.read == 70


def test_stopping_releases_all_bytes() -> None:
    """If the client stops reading again, counting starts again."""
    budget, transport, unread = started(100)
    unread.stop()
    assert budget.held == 0
    transport.size = 60
    unread.start()
    assert (budget.held, unread.read) == (60, 0)


def test_unread_bytes_count_for_the_owner_of_the_call() -> None:
    """Bytes counted so far are transferred, too."""
    budget, _, unread = started(100)
    unread.charge_to("client ann")
    assert budget.held == 100
    assert [budget.has_room(owner, 450) for owner in ("10.0.0.1", "client ann")] == [True, False]
