"""What each worker's prefix cache is believed to hold, in tokens of a request.

Policies ask one question of it: `match(request) -> {worker: tokens}`. The tree below counts chunks; what a
chunk is worth is learned per model (`estimates`). Requests that wait can be watched: for each worker they are
indexed by the last chunk that it holds of them and by the first that it lacks, so that an insertion or an eviction
names exactly those whose match it changes, at a cost that does not depend on how many wait. (The last chunk is enough
for losses: whoever holds a chunk holds those before it.)
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from router.core.estimates import Estimates
from router.core.model import Request, RequestId, WorkerId
from router.core.prefix_tree import PrefixTree
from router.core.prompt_key import HASH_BYTES, PromptKey


class Seen(NamedTuple):
    """A request's size and match, as far as so many lessons of the estimates tell."""

    request: Request
    lessons: int
    size: int
    match: Mapping[WorkerId, int]


class Edges(NamedTuple):
    """Where the matches of a watched request's prompts end at one worker."""

    held: tuple[bytes, ...]
    """The last chunks that it holds."""
    lacked: tuple[bytes, ...]
    """The first that it lacks."""


Index = dict[bytes, dict[RequestId, None]]


class WatchedWorker:
    """The watched requests of one worker."""

    __slots__ = ("edges", "held", "lacked")

    def __init__(self) -> None:
        self.edges: dict[RequestId, Edges] = {}
        self.held: Index = {}
        self.lacked: Index = {}

    def add(self, request: RequestId, edges: Edges) -> None:
        """Index a request."""
        self.edges[request] = edges
        for chunk in edges.held:
            self.held.setdefault(chunk, {})[request] = None
        for chunk in edges.lacked:
            self.lacked.setdefault(chunk, {})[request] = None

    def discard(self, request: RequestId) -> None:
        """Take a request out; one that is not here is passed over."""
        edges = self.edges.pop(request, None)
        if edges is not None:
            _take_out(self.held, edges.held, request)
            _take_out(self.lacked, edges.lacked, request)


class PrefixMap:
    """The prefix tree, priced in tokens, and the watch on waiting requests."""

    def __init__(self, limit: int, estimates: Estimates, minimum: int) -> None:
        """`limit`: chunks; `minimum`: tokens; a shorter match is no match (a shared system line must pin nothing)."""
        self.tree = PrefixTree(limit, self._lost)
        self._estimates = estimates
        self._minimum = minimum
        self._seen: Seen | None = None
        """The last request looked at, while nothing has changed: one decision asks about it several times."""
        self._model: dict[WorkerId, str] = {}
        self._watched: dict[WorkerId, WatchedWorker] = {}
        self._changed: dict[WorkerId, dict[RequestId, None]] = {}

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        """Tokens of the request's input that each worker holds, never all; workers below the minimum are left out."""
        return self._look(request).match

    def input_tokens(self, request: Request) -> int:
        """The estimated size of a request's input."""
        return self._look(request).size

    def _look(self, request: Request) -> "Seen":
        seen = self._seen
        if seen is None or seen.request is not request or seen.lessons != self._estimates.lessons:
            size = self._estimates.input_tokens(request)
            seen = self._seen = Seen(request, self._estimates.lessons, size, self._match(request))
        return seen

    def _match(self, request: Request) -> dict[WorkerId, int]:
        found: dict[WorkerId, int] = {}
        for prompt in request.prompts:
            held = self.tree.match(prompt.hashes)
            # Workers fall into a few groups that hold equally much.
            worth = {n: self._estimates.cached_tokens(request.model, prompt, n) for n in set(held.values())}
            for worker, chunks in held.items():
                found[worker] = found.get(worker, 0) + worth[chunks]
        return {worker: tokens for worker, tokens in found.items() if tokens >= self._minimum}

    def insert(self, model: str, prompts: Iterable[PromptKey], worker: WorkerId, now: float) -> None:
        """Believe that the worker holds these prompts now."""
        self._seen = None
        self._model[worker] = model
        watched = self._watched.get(worker)
        for prompt in prompts:
            gained = self.tree.insert(prompt.hashes, worker, now)
            if watched is not None:
                self._note(worker, watched.lacked, gained)

    def changed(self) -> Mapping[WorkerId, Iterable[RequestId]]:
        """The watched requests whose match is not what `watch` told of it; each must be watched anew.

        They are named once: the next call tells what changed after this one.
        """
        changed = self._changed
        if changed:
            self._changed = {}
        return changed

    def _lost(self, worker: WorkerId, hashes: bytes) -> None:
        watched = self._watched.get(worker)
        if watched is not None:
            self._note(worker, watched.held, hashes)

    def _note(self, worker: WorkerId, index: Index, hashes: bytes) -> None:
        for start in range(0, len(hashes), HASH_BYTES):
            concerned = index.get(hashes[start : start + HASH_BYTES])
            if concerned:
                self._changed.setdefault(worker, {}).update(concerned)

    def evict(self, worker: WorkerId, tokens: int) -> None:
        """Forget this many tokens of a worker, least recently used first."""
        self._take(worker, round(tokens / self._exchange(worker)))

    def trim(self, worker: WorkerId, capacity: int) -> None:
        """Forget what exceeds the capacity of a worker's cache, in tokens, least recently used first."""
        excess = self.tree.held(worker) - int(capacity / self._exchange(worker))
        if excess > 0:
            self._take(worker, excess)

    def drop(self, worker: WorkerId) -> None:
        """Forget everything that a worker held."""
        self._seen = None
        self.tree.drop(worker)
        self._model.pop(worker, None)

    def _take(self, worker: WorkerId, chunks: int) -> None:
        self._seen = None
        self.tree.evict(worker, chunks)

    def watch(self, request: Request, workers: Collection[WorkerId]) -> dict[WorkerId, int]:
        """Follow a request's match at these workers until `unwatch`; returns the matches of now, in chunks.

        Not in tokens: what a chunk is worth changes as the estimates learn, and matches told at different times
        are compared.
        """
        held = [self.tree.match(prompt.hashes) for prompt in request.prompts]
        return {worker: self._watch(request, worker, [found.get(worker, 0) for found in held]) for worker in workers}

    def _watch(self, request: Request, worker: WorkerId, chunks: Sequence[int]) -> int:
        tokens = 0
        held: dict[bytes, None] = {}
        lacked: dict[bytes, None] = {}
        for prompt, matched in zip(request.prompts, chunks, strict=True):
            tokens += self._estimates.cached_tokens(request.model, prompt, matched)
            end = matched * HASH_BYTES
            if matched:
                held[prompt.hashes[end - HASH_BYTES : end]] = None
            if end < len(prompt.hashes):
                lacked[prompt.hashes[end : end + HASH_BYTES]] = None
        watched = self._watched.setdefault(worker, WatchedWorker())
        watched.discard(request.id)
        watched.add(request.id, Edges(tuple(held), tuple(lacked)))
        return sum(chunks) if tokens >= self._minimum else 0

    def unwatch(self, request: RequestId, workers: Iterable[WorkerId]) -> None:
        """Stop following a request at these workers; where it is not watched nothing changes."""
        for worker in workers:
            watched = self._watched.get(worker)
            if watched is not None:
                watched.discard(request)
                if not watched.edges:
                    del self._watched[worker]
            changed = self._changed.get(worker)
            if changed is not None:
                changed.pop(request, None)

    @property
    def watched(self) -> int:
        """How many watches there are."""
        return sum(len(watched.edges) for watched in self._watched.values())

    def check_integrity(self) -> None:
        """Raise AssertionError where the tree contradicts itself, or the index of the watches what is watched."""
        self.tree.check_integrity()
        for worker, watched in self._watched.items():
            for index, edge in ((watched.held, 0), (watched.lacked, 1)):
                indexed = {(request, chunk) for chunk, requests in index.items() for request in requests}
                known = {(request, chunk) for request, edges in watched.edges.items() for chunk in edges[edge]}
                assert indexed == known, f"{worker}: the watches are not those of the index"
                assert all(index.values()), f"{worker}: a chunk is indexed at which nobody's match ends"

    def _exchange(self, worker: WorkerId) -> float:
        """Tokens per chunk at a worker: those of the model that it served last, adapters being of one base."""
        return self._estimates.tokens_per_chunk(self._model.get(worker, ""))


def _take_out(index: Index, chunks: Iterable[bytes], request: RequestId) -> None:
    for chunk in chunks:
        requests = index[chunk]
        del requests[request]
        if not requests:
            del index[chunk]
