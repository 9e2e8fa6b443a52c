"""Limits of client connections: how many can be open, what each can do, and which one is closed to make room.

A connection is closed to make room only while it has no complete call: while idle, or while a head or body arrives.
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
"""Key of the ASGI scope extension by which an application registers a callback for its client's disconnect."""

UNREAD_OWNER: Final = "d2lpm.owner"
"""Key of the extension that takes the owner of the bytes that the client leaves unread."""
BREAK_OFF: Final = "d2lpm.break-off"
"""Key of the extension that closes the connection after what was sent, so that the answer looks incomplete."""
STREAM_WRITER: Final = "d2lpm.stream-writer"
"""Key of the extension that returns a `StreamWriter` for the answer that has begun; None if it is not in chunks."""

OnDisconnect = Callable[[Callable[[], None]], None]
"""Value of `ON_DISCONNECT`: registers the callback for a disconnect, in place of any earlier one. It is called soon if
the client has already disconnected."""


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Limits in bytes, seconds and connections."""

    head_bytes: int = 64 * 1024
    """Largest request line and headers together."""
    url_bytes: int = 8 * 1024
    """Largest URL."""
    head_seconds: float = 10.0
    """Seconds from connecting, or from the first byte of a later request, to the end of the headers."""
    body_seconds: float = 30.0
    """Seconds from there to the end of the body. Extended as often as `body_rate` is reached over such a period."""
    body_rate: int = 16 * 1024
    """Bytes per second."""
    write_seconds: float = 60.0
    """Seconds that a client can read nothing of what it is sent."""
    idle_seconds: float = 75.0
    """Seconds between two calls."""
    connections: int = 10_000
    """Largest number of open connections."""
    connections_per_address: int | None = None
    """Largest number of open connections of one address; None for no limit."""
    hosts: frozenset[bytes] | None = None
    """Host names that a Host header can contain, in lower case and without a port; None for any."""


class CountedConnection(Protocol):
    """A connection as `Connections` needs it."""

    def cut(self) -> None:
        """Close the connection at once."""

    @property
    def unread_bytes(self) -> int:
        """Bytes written for the client that the network has not accepted yet."""


class Connections(Collector):
    """Counts open connections per address, limits their number, and counts refusals made before a call begins."""

    def __init__(self, limits: FrontLimits, budget: ByteBudget) -> None:
        """`budget`: of the bytes held for clients."""
        self.limits = limits
        self.budget = budget
        self._by_address: LongestQueueDrop[str] = LongestQueueDrop()
        self._open: dict[CountedConnection, None] = {}
        self._idle: dict[str, dict[CountedConnection, None]] = {}
        """Connections without a complete call by address, longest idle first."""
        self.refused: Counter[int] = Counter()
        """Refused connections, heads and bodies by the HTTP status of the refusal."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unread_bytes(self) -> int:
        """Bytes written for all clients that the network has not accepted yet."""
        return sum(connection.unread_bytes for connection in self._open)

    def add(self, connection: CountedConnection, address: str) -> bool:
        """Count a new connection. Returns False if it is to be refused.

        If there are too many connections, cut one without a complete call, of the address that has most.
        """
        self._open[connection] = None
        self._by_address.add(address, 1)
        limits = self.limits
        if (
            limits.connections_per_address is not None
            and self._by_address.amount_of(address) > limits.connections_per_address
        ):
            return False
        if len(self._open) > limits.connections:
            most = self._by_address.largest_holder()
            if most is None or self._by_address.amount_of(most) <= self._by_address.amount_of(address):
                return False
            if most not in self._idle:
                return False
            evicted = next(iter(self._idle[most]))
            self.mark_busy(evicted, most)
            evicted.cut()
        self._idle.setdefault(address, {})[connection] = None
        return True

    def mark_idle(self, connection: CountedConnection, address: str) -> None:
        """Mark a connection as having no complete call."""
        self._idle.setdefault(address, {})[connection] = None

    def mark_busy(self, connection: CountedConnection, address: str) -> None:
        """Mark a connection as having a complete call, so that it is not cut to make room."""
        idle = self._idle.get(address, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(address, None)

    def remove(self, connection: CountedConnection, address: str) -> None:
        """Remove a closed connection from the counts."""
        del self._open[connection]
        self.mark_busy(connection, address)
        self._by_address.remove(address, 1)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of open and refused connections."""
        yield GaugeMetricFamily("d2lpm_connections", "Open connections of clients.", len(self))
        yield GaugeMetricFamily(
            "d2lpm_client_unread_bytes", "Bytes of answers that clients do not read.", self.unread_bytes
        )
        refused = CounterMetricFamily(
            "d2lpm_refused_connections",
            "Connections and requests refused before they became calls, by status.",
            labels=("status",),
        )
        for status, count in self.refused.items():
            refused.add_metric((str(status),), count)
        yield refused
