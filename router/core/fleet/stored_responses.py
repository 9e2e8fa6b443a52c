"""Remembers which worker keeps which stored response, and which client owns it.

An engine keeps responses (`POST /v1/responses`, unless `store` is false) in the memory of one process, and returns them
to anybody who knows the id. So the router remembers the ids in answers, with worker and client, and forwards calls
about a response only for its owner. Unknown ids are not found, even if an engine still keeps the response.

The number of ids is bounded. Beyond the bound, the client with the most ids loses the one that was unused longest. So
no client can make the router forget the responses of others by creating many.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from router.core.clients.fair_drop import LongestQueueDrop
from router.core.model.request import ClientId, WorkerId
from router.core.model.saved import in_rows

DEFAULT_LIMIT: Final = 20_000
"""Ids that are remembered by default; they take about 8 MB."""
ID_BYTES: Final = 256
"""Longest id that is remembered."""


class StoredResponse(NamedTuple):
    """A response that a worker keeps."""

    id: str
    client: ClientId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Responses:
    """A section of the state file with remembered responses."""

    rows: tuple[StoredResponse, ...]


class StoredResponses:
    """The bounded directory of stored responses."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        """`limit`: number of ids to remember; 0 for none."""
        self._limit = limit
        self._known: dict[str, StoredResponse] = {}
        self._of_client: dict[ClientId, OrderedDict[str, None]] = {}
        """The ids of each client, from least to most recently used."""
        self._amounts: LongestQueueDrop[ClientId] = LongestQueueDrop()

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, response: StoredResponse) -> None:
        """Remember a new response. A known id keeps its worker and client; ids that are too long are ignored."""
        if response.id in self._known or not self._limit or len(response.id.encode(errors="replace")) > ID_BYTES:
            return
        self._known[response.id] = response
        self._of_client.setdefault(response.client, OrderedDict())[response.id] = None
        self._amounts.add(response.client, 1)
        if len(self._known) > self._limit and (owner := self._amounts.largest_holder()) is not None:
            self.forget(next(iter(self._of_client[owner])))

    def worker_of(self, response: str, client: ClientId) -> WorkerId | None:
        """Return the worker that keeps a response; None if the response is unknown or another client owns it."""
        found = self._known.get(response)
        if found is None or found.client != client:
            return None
        self._of_client[client].move_to_end(response)
        return found.worker

    def is_of_another(self, response: str, client: ClientId) -> bool:
        """Return whether another client owns a response with this id."""
        found = self._known.get(response)
        return found is not None and found.client != client

    def forget(self, response: str) -> None:
        """Forget a response, if it is known."""
        found = self._known.pop(response, None)
        if found is None:
            return
        ids = self._of_client[found.client]
        del ids[response]
        if not ids:
            del self._of_client[found.client]
        self._amounts.remove(found.client, 1)

    def saved(self) -> Iterator[Responses]:
        """Yield all responses for the state file, each client's least recently used first."""
        by_age = [self._known[response] for ids in self._of_client.values() for response in ids]
        yield from map(Responses, in_rows(by_age))

    def restore(self, rows: Iterable[StoredResponse]) -> None:
        """Restore responses that `saved` has yielded."""
        for response in rows:
            self.remember(response)
