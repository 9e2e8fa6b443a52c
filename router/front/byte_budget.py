"""The bytes that the router holds for its clients: one budget, asked by everything that holds any.

A call's body counts from its first byte to the end of its answer, with the hashes of its prompt; so does what is kept
of an answer before its head is sent, and what a client was sent and does not read. Whose they are is known by the head
of the call: a client that the operator vouches for, else an address, since anybody can make up keys.

An owner may hold no more than is left free: half of all if it is alone. Whoever comes next may have half of what is
left, and as they give back, n that want everything come to hold the n+1st part each. So nobody can take the last of it,
without a limit for each that would be too low for one and too high for many (A. Choudhury and E. Hahne, "Dynamic Queue
Length Thresholds for Shared-Memory Packet Switches", 1998).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.clients.fair_drop import LongestQueueDrop
from router.errors import CapacityError, NoRoom, Refused

RETRY_SECONDS: Final = 1.0


class ByteBudget(Collector):
    """How many bytes are held, and by whom."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes, over all owners."""
        self.limit = limit
        self.refused: Counter[int] = Counter()
        """Calls, by the status of their answer."""
        self._held: LongestQueueDrop[str] = LongestQueueDrop()

    @property
    def held(self) -> int:
        """Bytes, over all owners."""
        return self._held.total

    def held_by(self, owner: str) -> int:
        """Bytes that an owner holds."""
        return self._held.of(owner)

    def hold(self, owner: str) -> "Hold":
        """A part of the budget, empty at first; to be closed."""
        return Hold(self, owner)

    def has_room(self, owner: str, amount: int) -> bool:
        """Whether an owner may hold so many bytes more."""
        return self._held.of(owner) + amount <= self.limit - self._held.total - amount

    def refusal(self, owner: str, amount: int) -> CapacityError:
        """What to tell a client for which there is no room: 429 if it holds more than an equal part, else 503."""
        held = self._held.of(owner)
        owners = len(self._held) + (not held)
        if (held + amount) * (owners + 1) > self.limit:
            error: CapacityError = Refused(
                "Your requests, and answers that you do not read, take as much memory as they may; try again later.",
                retry_after=RETRY_SECONDS,
                reason="rejected-client-memory",
            )
        else:
            error = NoRoom()
        self.refused[error.status] += 1
        return error

    def adjust(self, owner: str, amount: int) -> None:
        """An owner holds so many bytes more, or fewer, whether or not there is room."""
        if amount > 0:
            self._held.add(owner, amount)
        else:
            self._held.remove(owner, -amount)

    def collect(self) -> Iterator[Metric]:
        """What is held of how much, and who was refused."""
        yield GaugeMetricFamily(
            "d2lpm_held_bytes", "Bytes held for clients: bodies, and answers not yet sent or read.", self.held
        )
        yield GaugeMetricFamily("d2lpm_held_bytes_limit", "How many may be held.", self.limit)
        refused = CounterMetricFamily(
            "d2lpm_refused_for_memory", "Calls refused as too many bytes were held, by status.", labels=("status",)
        )
        for status, count in self.refused.items():
            refused.add_metric((str(status),), count)
        yield refused


class Hold:
    """What one call, or one connection, holds of the budget. Given back as a whole when the context is left."""

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
        """Raise Refused or NoRoom unless so many bytes more may be held."""
        if not self._budget.has_room(self.owner, amount):
            raise self._budget.refusal(self.owner, amount)

    def add(self, amount: int) -> None:
        """Hold so many bytes more. Raises Refused or NoRoom, and then holds no more than before."""
        if not self.try_add(amount):
            raise self._budget.refusal(self.owner, amount)

    def try_add(self, amount: int) -> bool:
        """Hold so many bytes more if there is room; whether there was."""
        if not self._budget.has_room(self.owner, amount):
            return False
        self.set(self.amount + amount)
        return True

    def set(self, amount: int) -> None:
        """Hold exactly so many bytes, whether or not there is room: they are here already."""
        if amount != self.amount:
            self._budget.adjust(self.owner, amount - self.amount)
            self.amount = amount

    def transfer(self, owner: str) -> None:
        """From now on it is another's."""
        if owner != self.owner:
            amount = self.amount
            self.set(0)
            self.owner = owner
            self.set(amount)
