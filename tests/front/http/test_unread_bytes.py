"""What a client leaves unread counts in its owner's budget, as long as it reads too slowly."""

import asyncio

from router.front.byte_budget import ByteBudget
from router.front.http.unread_bytes import UnreadBytes

LIMIT = 1000


class Transport(asyncio.WriteTransport):
    """Holds so many bytes that the network does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def get_write_buffer_size(self) -> int:
        return self.size


def began(size: int) -> tuple[ByteBudget, Transport, UnreadBytes]:
    """A client that has left so many bytes unread."""
    budget, transport = ByteBudget(LIMIT), Transport()
    unread = UnreadBytes(budget, transport, "10.0.0.1")
    transport.size = size
    unread.start()
    return budget, transport, unread


def send(transport: Transport, unread: UnreadBytes, amount: int) -> bool:
    """What is sent only if there is room for it."""
    if taken := unread.try_add(amount):
        transport.size += amount
    return taken


def test_what_is_unread_grows_within_the_budget() -> None:
    """Beyond it nothing more is taken, until the client reads."""
    budget, transport, unread = began(100)
    assert send(transport, unread, 300)
    assert budget.held == 400
    assert not send(transport, unread, 200)
    assert budget.held == 400
    transport.size -= 250
    assert send(transport, unread, 200)
    assert budget.held == 350


def test_what_was_read_is_known_however_often_it_begins() -> None:
    """The time that a slow client has left is measured by it."""
    _, transport, unread = began(100)
    assert unread.read == 0
    transport.size -= 40
    unread.start()
    assert unread.read == 40
    assert send(transport, unread, 50)
    assert unread.read == 40
    transport.size -= 30
    assert unread.read == 70


def test_at_the_end_nothing_is_held() -> None:
    """It has read nearly all; if it stops again, its count begins anew."""
    budget, transport, unread = began(100)
    unread.stop()
    assert budget.held == 0
    transport.size = 60
    unread.start()
    assert (budget.held, unread.read) == (60, 0)


def test_it_belongs_to_who_made_the_call() -> None:
    """What was counted so far, too."""
    budget, _, unread = began(100)
    unread.charge_to("client ann")
    assert (budget.held_by("10.0.0.1"), budget.held_by("client ann")) == (0, 100)
