"""State that survives a restart of the router, as plain data in pieces small enough to build and write one at a time.

Each part of the core with state to save produces pieces and takes them back; `snapshot` combines them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeVar

from router.core.model.cost import Tokens
from router.core.model.events import CacheReport, ChargedRequest
from router.core.model.request import ClientId, GroupId, Worker, WorkerId

Row = TypeVar("Row")

ROWS: Final = 256
"""Maximum rows in one piece."""
ROOT: Final = -1
"""The parent of a node at the beginning of a prompt."""


class SavedClient(NamedTuple):
    """A client, its weight and its service so far."""

    client: ClientId
    weight: float
    served: Tokens


class SavedCounter(NamedTuple):
    """A counter of a policy."""

    client: ClientId
    worker: WorkerId | None
    """None for a counter that covers the whole fleet."""
    value: float
    """Cost units: the deficit, or VTC's virtual counter."""
    scale: float
    """The quantum of a deficit in cost units; for VTC the client's weight."""


class SavedGroup(NamedTuple):
    """A counter that a group has as if it was one client; fields as in `SavedCounter`."""

    group: GroupId
    worker: WorkerId | None
    value: float
    scale: float


class SavedNode(NamedTuple):
    """A run of chunks in the prefix tree. Nodes are numbered from 0 in their order, across all pieces."""

    parent: int
    """The number of an earlier node, or `ROOT`."""
    key: bytes
    """The hashes of the node's chunks."""


class SavedTouch(NamedTuple):
    """A worker that holds the whole prefix down to the end of a node, and the age of its last use."""

    worker: WorkerId
    node: int
    age: float
    """Seconds."""


class DailyUsage(NamedTuple):
    """What one client used of one model, summed over its calls that ended on one day (UTC)."""

    day: int
    """Days since 1970-01-01."""
    client: ClientId
    model: str
    """The name that the workers list, not an alias."""
    calls: int = 0
    """Calls that a worker accepted; one that was tried again at another worker counts once."""
    input_tokens: int = 0
    """All input tokens, cached or not."""
    cached_tokens: int = 0
    """Input tokens that were found in a prefix cache."""
    output_tokens: int = 0
    estimated_input: int = 0
    """Input tokens of calls whose engine did not say how many they were, or how many of them were cached."""
    estimated_output: int = 0
    """Output tokens of calls whose engine did not say how many they were."""

    @property
    def counts(self) -> tuple[int, ...]:
        """All fields but the day, the client and the model."""
        return self[3:]


@dataclass(frozen=True, slots=True)
class Clients:
    """Clients of the ledger."""

    rows: tuple[SavedClient, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of the policy's placement, or of its order."""

    kind: Literal["placement", "order"]
    rows: tuple[SavedCounter, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of the policy's order."""

    rows: tuple[SavedGroup, ...]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Part of the prefix tree, the most recently used first."""

    nodes: tuple[SavedNode, ...]
    touches: tuple[SavedTouch, ...]


@dataclass(frozen=True, slots=True)
class Cache:
    """Further state of a worker's cache."""

    worker: WorkerId
    model: str
    report: CacheReport | None
    """The last cache report. If the next report counts less, the worker has restarted in the meantime and holds
    nothing.
    """


@dataclass(frozen=True, slots=True)
class LiveRequests:
    """Requests that had not ended, other than those that waited and had never been charged."""

    rows: tuple[ChargedRequest, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers that were present."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class UsageRows:
    """Usage of some days, with what `LiveRequests` were charged until then."""

    rows: tuple[DailyUsage, ...]


Piece = Clients | Counters | Groups | Prefixes | Cache | LiveRequests | Fleet | UsageRows


def in_rows(rows: Iterable[Row]) -> Iterator[tuple[Row, ...]]:
    """Yield the rows in tuples of at most `ROWS`."""
    left = iter(rows)
    while piece := tuple(islice(left, ROWS)):
        yield piece
