"""What survives a restart of the router: plain data, in pieces small enough to be made and written one at a time.

The parts of the core that have something to save make pieces of it, and take them back; `snapshot` joins them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeVar

from router.core.model.cost import Tokens
from router.core.model.events import CacheReport
from router.core.model.request import ClientId, GroupId, WorkerId

Row = TypeVar("Row")

ROWS: Final = 256
"""In one piece, at most."""
ROOT: Final = -1
"""The parent of a node that begins a prompt."""


class SavedClient(NamedTuple):
    """A client and its service so far."""

    client: ClientId
    weight: float
    served: Tokens


class SavedCounter(NamedTuple):
    """A counter of a policy."""

    client: ClientId
    worker: WorkerId | None
    """None where there is one for the fleet."""
    value: float
    """In cost units."""
    scale: float
    """A deficit counter's quantum in cost units; for VTC the client's weight."""


class SavedGroup(NamedTuple):
    """What a group has as if it was one client; see `SavedCounter`."""

    group: GroupId
    worker: WorkerId | None
    value: float
    scale: float


class SavedNode(NamedTuple):
    """A run of chunks in the prefix tree. Nodes are numbered from 0 as they come, over all pieces."""

    parent: int
    """The number of an earlier one, or `ROOT`."""
    key: bytes
    """The hashes of its chunks."""


class SavedTouch(NamedTuple):
    """A worker holds everything down to the end of a node, and touched it this long ago."""

    worker: WorkerId
    node: int
    age: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Clients:
    """Of the ledger."""

    rows: tuple[SavedClient, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """Of the policy's placement, or of its order."""

    kind: Literal["placement", "order"]
    rows: tuple[SavedCounter, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """Of the policy's order."""

    rows: tuple[SavedGroup, ...]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Of the prefix tree: the most recent first."""

    nodes: tuple[SavedNode, ...]
    touches: tuple[SavedTouch, ...]


@dataclass(frozen=True, slots=True)
class Cache:
    """What else is known of a worker's cache."""

    worker: WorkerId
    model: str
    report: CacheReport | None
    """The last; if the next counts from less, the worker has begun anew meanwhile, and holds nothing."""


Piece = Clients | Counters | Groups | Prefixes | Cache


def in_rows(rows: Iterable[Row]) -> Iterator[tuple[Row, ...]]:
    """The rows, `ROWS` at a time."""
    left = iter(rows)
    while piece := tuple(islice(left, ROWS)):
        yield piece
