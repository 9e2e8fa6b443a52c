"""Which worker keeps which stored response, and for which client: only that client is led to it.

Engines keep responses (`POST /v1/responses`, unless `store` is false) in the memory of one process, and give them to
whoever knows the id. So the router remembers the ids that it has seen in answers, with worker and client. What it does
not remember is not found, although an engine may still keep it.

Their number is bounded. Beyond the bound, the client that has most of them loses the one that was not asked for
longest: nobody can make the router forget the responses of others by making many.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from router.api.body.call import NAME_BYTES
from router.core.clients.fair_drop import LongestQueueDrop
from router.core.model.request import ClientId, WorkerId
from router.core.model.saved import in_rows

DEFAULT_LIMIT: Final = 20_000
"""Of ids: some 8 MB."""


class StoredResponse(NamedTuple):
    """A response that a worker keeps."""

    id: str
    client: ClientId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Responses:
    """A piece of the state file."""

    rows: tuple[StoredResponse, ...]


class StoredResponses:
    """The directory of stored responses."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        """`limit`: how many are remembered."""
        self._limit = limit
        self._known: dict[str, StoredResponse] = {}
        self._of_client: dict[ClientId, OrderedDict[str, None]] = {}
        """The ids of each client, the one asked for last at the end."""
        self._amounts: LongestQueueDrop[ClientId] = LongestQueueDrop()

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, response: StoredResponse) -> None:
        """Remember a response that was just made. An id that is known keeps its worker and its client."""
        if response.id in self._known or not self._limit or len(response.id.encode(errors="replace")) > NAME_BYTES:
            return
        self._known[response.id] = response
        self._of_client.setdefault(response.client, OrderedDict())[response.id] = None
        self._amounts.add(response.client, 1)
        if len(self._known) > self._limit and (most := self._amounts.largest_holder()) is not None:
            self.forget(next(iter(self._of_client[most])))

    def worker_of(self, response: str, client: ClientId) -> WorkerId | None:
        """The worker that keeps this client's response; None for one that is not known, or is another client's."""
        found = self._known.get(response)
        if found is None or found.client != client:
            return None
        self._of_client[client].move_to_end(response)
        return found.worker

    def is_of_another(self, response: str, client: ClientId) -> bool:
        """Whether a response of this id is known, and not this client's."""
        found = self._known.get(response)
        return found is not None and found.client != client

    def forget(self, response: str) -> None:
        """Remember a response no more, if it is known."""
        found = self._known.pop(response, None)
        if found is None:
            return
        ids = self._of_client[found.client]
        del ids[response]
        if not ids:
            del self._of_client[found.client]
        self._amounts.remove(found.client, 1)

    def saved(self) -> Iterator[Responses]:
        """All of them, for the state file, each client's oldest first."""
        by_age = [self._known[response] for ids in self._of_client.values() for response in ids]
        yield from map(Responses, in_rows(by_age))

    def restore(self, rows: Iterable[StoredResponse]) -> None:
        """Begin with these, as `saved` gave them."""
        for response in rows:
            self.remember(response)
