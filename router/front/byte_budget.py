"""One memory budget for all bytes that the router holds for its clients.

Three things count: the body of a call, with the hashes of its prompt, from its first byte to the end of the answer; the
part of an answer that is kept before its head is sent; and bytes that were sent to a client and not read. They count
against an owner, which the head of the call names: the client if the operator vouches for it, otherwise the address,
because anybody can invent API keys.

An owner can hold at most as many bytes as are left free. So one owner alone gets half of the budget, the next one half
of the rest, and as they release bytes, n owners that want everything converge to 1/(n+1) of the budget each. Nobody can
take the last byte, and there is no fixed limit per owner, which would be too low for one owner and too high for many
(A. Choudhury and E. Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998).
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Final, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.clients.fair_drop import LongestQueueDrop
from router.errors import CapacityError, NoRoom, Refused

RETRY_SECONDS: Final = 1.0


class ByteBudget(Collector):
    """Counts the bytes that each owner holds, and refuses more than an owner can hold."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that all owners together can hold."""
        self.limit = limit
        self.refused: Counter[int] = Counter()
        """Refused calls by the HTTP status of the refusal."""
        self._held: LongestQueueDrop[str] = LongestQueueDrop()

    @property
    def held(self) -> int:
        """Bytes that all owners hold."""
        return self._held.total

    def hold(self, owner: str) -> "Hold":
        """Return an empty hold for an owner, to be used as a context manager."""
        return Hold(self, owner)

    def has_room(self, owner: str, amount: int) -> bool:
        """Return whether an owner can hold `amount` more bytes."""
        free = self.limit - self._held.total - amount
        return self._held.total + amount <= free or self._held.amount_of(owner) + amount <= free

    def refusal(self, owner: str, amount: int) -> CapacityError:
        """Return and count the error for an owner without room: 429 if it would hold more than its part, else 503."""
        held = self._held.amount_of(owner)
        owners = len(self._held) + (not held)
        if (held + amount) * (owners + 1) > self.limit:
            error: CapacityError = Refused(
                "Your requests and unread answers take too much memory; try again later.",
                retry_after=RETRY_SECONDS,
                reason="rejected-client-memory",
            )
        else:
            error = NoRoom()
        self.refused[error.status] += 1
        return error

    def adjust(self, owner: str, amount: int) -> None:
        """Add `amount` bytes to what an owner holds (remove them if negative), whether or not there is room."""
        if amount > 0:
            self._held.add(owner, amount)
        else:
            self._held.remove(owner, -amount)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of held bytes, their limit and refused calls."""
        yield GaugeMetricFamily(
            "d2lpm_held_bytes", "Bytes held for clients: bodies, and answers not yet sent or read.", self.held
        )
        yield GaugeMetricFamily("d2lpm_held_bytes_limit", "Limit of d2lpm_held_bytes.", self.limit)
        refused = CounterMetricFamily(
            "d2lpm_refused_for_memory", "Calls refused because too many bytes were held, by status.", labels=("status",)
        )
        for status, count in self.refused.items():
            refused.add_metric((str(status),), count)
        yield refused


class Hold:
    """The bytes that one call or connection holds. Leaving the context releases all of them."""

    __slots__ = ("_budget", "amount", "owner")

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self._budget = budget
        self.owner = owner
        self.amount = 0
        """Bytes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.set(0)

    def check(self, amount: int) -> None:
        """Raise Refused or NoRoom if `amount` more bytes cannot be held."""
        if not self._budget.has_room(self.owner, amount):
            raise self._budget.refusal(self.owner, amount)

    def add(self, amount: int) -> None:
        """Hold `amount` more bytes. Raises Refused or NoRoom, without holding them, if there is no room."""
        if not self.try_add(amount):
            raise self._budget.refusal(self.owner, amount)

    def try_add(self, amount: int) -> bool:
        """Hold `amount` more bytes if there is room. Returns whether there was."""
        if not self._budget.has_room(self.owner, amount):
            return False
        self.set(self.amount + amount)
        return True

    def set(self, amount: int) -> None:
        """Hold exactly `amount` bytes, whether or not there is room, because they are already in memory."""
        if amount != self.amount:
            self._budget.adjust(self.owner, amount - self.amount)
            self.amount = amount

    def transfer(self, owner: str) -> None:
        """Transfer the held bytes to another owner."""
        if owner != self.owner:
            amount = self.amount
            self.set(0)
            self.owner = owner
            self.set(amount)


class UnreadBytes:
    """Counts the bytes sent on one connection that its client has not read, beyond those the network holds.

    It counts only while the client reads more slowly than it is sent, and limits them by the budget.

    Within the budget, the router reads the engine's answer as fast as it arrives, however slow the client. Beyond it,
    the answer waits for the client, and so does the engine.
    """

    __slots__ = ("_hold", "_sent", "_transport", "owner")

    def __init__(self, budget: ByteBudget, transport: asyncio.WriteTransport, owner: str) -> None:
        """`owner`: whose part of the budget counts, until `charge_to` changes it."""
        self._hold = budget.hold(owner)
        self.owner = owner
        self._transport = transport
        self._sent = 0
        """Bytes that were unread at `start`, plus those sent since."""

    def charge_to(self, owner: str) -> None:
        """Count against this owner, who made the call in flight."""
        self._hold.transfer(owner)
        self.owner = owner

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
