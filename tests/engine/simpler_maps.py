"""What simpler prefix maps would have predicted for each dispatch in a journal.

They get what the router got, in the same order: each prompt at its dispatch, each prompt and answer at the end.
"""

from pathlib import Path

from router.core.cache.prefix_tree import PrefixTree
from router.core.model.commands import Dispatch
from router.core.model.events import Arrived, Cancelled, Event, Failed, Finished
from router.core.model.prompt_key import CHUNK_BYTES
from router.core.model.request import Request, RequestId, WorkerId
from router.core.predict.token_estimates import TokenRatio
from router.persistence.journal import JournalEntry, read

MINIMUM = 64
"""Tokens below which a match counts as none."""


class LruMap:
    """The prefix map before engines were mirrored: a budget of the capacity, or none, least recently used first."""

    def __init__(self, capacity: int | None) -> None:
        """`capacity`: tokens that each worker holds; None for a map that never evicts."""
        self._capacity = capacity
        self._tree = PrefixTree(4_000_000)
        self._ratio = TokenRatio()
        self._requests: dict[RequestId, Request] = {}
        self._at: dict[RequestId, WorkerId] = {}
        self.predicted: dict[RequestId, int] = {}
        """Predicted cached tokens of each request at its last dispatch."""

    def process(self, entry: JournalEntry) -> None:
        """Process one line of the journal."""
        self._take_in(entry.event, entry.at)
        for command in entry.commands:
            if isinstance(command, Dispatch):
                self._dispatched(self._requests[command.request], command.worker, entry.at)

    def _take_in(self, event: Event, now: float) -> None:
        match event:
            case Arrived(request):
                self._requests[request.id] = request
            case Finished(request_id, usage, answers):
                request, worker = self._requests.pop(request_id), self._at.pop(request_id)
                if usage is not None:
                    self._ratio.learn(request.prompts[0].size, usage.input_tokens)
                for answer in answers:
                    self._insert(answer.hashes, worker, now)
            case Failed(request_id) | Cancelled(request_id):
                self._at.pop(request_id, None)

    def _dispatched(self, request: Request, worker: WorkerId, now: float) -> None:
        (prompt,) = request.prompts
        chunks = self._tree.match(prompt.hashes).get(worker, 0)
        cached = int(chunks * CHUNK_BYTES * self._ratio.value)
        self.predicted[request.id] = cached if cached >= MINIMUM else 0
        self._at[request.id] = worker
        self._insert(prompt.hashes, worker, now)

    def _insert(self, hashes: bytes, worker: WorkerId, now: float) -> None:
        self._tree.insert(hashes, worker, now)
        if self._capacity is not None:
            budget = int(self._capacity / (CHUNK_BYTES * self._ratio.value))
            self._tree.evict(worker, max(0, self._tree.held_chunks(worker) - budget))


def predictions(journal: Path, capacity: int | None) -> dict[RequestId, int]:
    """Return the tokens that a map of this capacity would have predicted as cached, by request."""
    lru_map = LruMap(capacity)
    with journal.open("rb") as lines:
        for item in read(lines):
            if isinstance(item, JournalEntry):
                lru_map.process(item)
    return lru_map.predicted
