"""The connections of clients: how many there may be, what each may do, and which one gives way.

One gives way only until its call is here: while it is idle, or its head or its body is on its way.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.core.clients.fair_drop import LongestQueueDrop
from router.front.byte_budget import ByteBudget

ON_DISCONNECT: Final = "d2lpm.leaving"
"""The extension of a call's scope (ASGI) by which the application hears that its client leaves."""

UNREAD_OWNER: Final = "d2lpm.owner"
"""The extension by which the application tells whose call it is; takes the owner of what its client leaves unread."""
BREAK_OFF: Final = "d2lpm.break-off"
"""The extension that ends the connection behind what was sent: the answer cannot be completed, and is to look so."""

OnDisconnect = Callable[[Callable[[], None]], None]
"""Its value. Takes what is to be called then, soon if that has been already; there is one such thing at a time."""


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Bytes, seconds and connections."""

    head_bytes: int = 64 * 1024
    """Of the request line and the headers."""
    url_bytes: int = 8 * 1024
    head_seconds: float = 10.0
    """From the connection, or the first byte of another request, to the end of the headers."""
    body_seconds: float = 30.0
    """From there to the end of the body; as long again, if since the last time `body_rate` bytes came for each."""
    body_rate: int = 16 * 1024
    write_seconds: float = 60.0
    """For which a client that is sent more than it reads may leave all of it unread."""
    idle_seconds: float = 75.0
    """Between two calls."""
    connections: int = 10_000
    """In all."""
    connections_per_address: int | None = None
    hosts: frozenset[bytes] | None = None
    """What a Host header may name, in lower case and without a port; None for anything."""


class CountedConnection(Protocol):
    """The other end of a connection, as it is counted."""

    def cut(self) -> None:
        """Close the connection at once."""

    @property
    def unread_bytes(self) -> int:
        """What it was sent and has not even left for the network, as it does not read."""


class Connections(Collector):
    """The open connections, whose they are, and what was refused before anybody looked at it."""

    def __init__(self, limits: FrontLimits, budget: ByteBudget) -> None:
        """`budget`: of the bytes that are held for them."""
        self.limits = limits
        self.budget = budget
        self._by_address: LongestQueueDrop[str] = LongestQueueDrop()
        self._open: dict[CountedConnection, None] = {}
        self._idle: dict[str, dict[CountedConnection, None]] = {}
        """Those without a call that is here as a whole, by address, longest idle first."""
        self.refused: Counter[int] = Counter()
        """Heads, bodies and connections that came to nothing, by the status that they were answered with."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unread_bytes(self) -> int:
        """What was sent and has not even left for the network, as its clients do not read."""
        return sum(connection.unread_bytes for connection in self._open)

    def add(self, connection: CountedConnection, address: str) -> bool:
        """Count a new connection; False if it is to be refused.

        When all together are too many, one whose call is not here gives way, of the address that has most.
        """
        self._open[connection] = None
        self._by_address.add(address, 1)
        limits = self.limits
        if (
            limits.connections_per_address is not None
            and self._by_address.amount_of(address) > limits.connections_per_address
        ):
            return False
        if len(self) > limits.connections:
            most = self._by_address.largest_holder()
            if most is None or self._by_address.amount_of(most) <= self._by_address.amount_of(address):
                return False
            if most not in self._idle:
                return False
            giving_way = next(iter(self._idle[most]))
            self.mark_busy(giving_way, most)
            giving_way.cut()
        self.mark_idle(connection, address)
        return True

    def mark_idle(self, connection: CountedConnection, address: str) -> None:
        """It has no call under way."""
        self._idle.setdefault(address, {})[connection] = None

    def mark_busy(self, connection: CountedConnection, address: str) -> None:
        """It has one, of which all is here."""
        theirs = self._idle.get(address, {})
        theirs.pop(connection, None)
        if not theirs:
            self._idle.pop(address, None)

    def remove(self, connection: CountedConnection, address: str) -> None:
        """It is closed."""
        del self._open[connection]
        self.mark_busy(connection, address)
        self._by_address.remove(address, 1)

    def collect(self) -> Iterator[Metric]:
        """How many there are, and what became of others."""
        yield GaugeMetricFamily("d2lpm_connections", "Open connections of clients.", len(self))
        yield GaugeMetricFamily(
            "d2lpm_client_unread_bytes", "Bytes of answers that clients do not read.", self.unread_bytes
        )
        refused = CounterMetricFamily(
            "d2lpm_refused_connections", "Refused before they were calls, by status.", labels=("status",)
        )
        for status, count in self.refused.items():
            refused.add_metric((str(status),), count)
        yield refused
