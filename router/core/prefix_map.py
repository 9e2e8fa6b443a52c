"""What each worker's prefix cache is believed to hold, in tokens of a request.

Policies ask one question of it: `match(request) -> {worker: tokens}`. The tree below counts chunks; what a
chunk is worth is learned per model (`estimates`). Requests that wait for a worker can be watched: they are
indexed by the first chunk that the worker lacks of them, so that an insertion names exactly those whose match
grew, at a cost that does not depend on how many wait.
"""

from collections.abc import Iterable, Mapping
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


class PrefixMap:
    """The prefix tree, priced in tokens, and the watch on waiting requests."""

    def __init__(self, tree: PrefixTree, estimates: Estimates, minimum: int) -> None:
        """`minimum`: tokens; a shorter match is no match (a shared system line must pin nothing)."""
        self._tree = tree
        self._estimates = estimates
        self._minimum = minimum
        self._seen: Seen | None = None
        """The last request looked at, while nothing has changed: one decision asks about it several times."""
        self._model: dict[WorkerId, str] = {}
        self._watched: dict[WorkerId, dict[RequestId, tuple[bytes, ...]]] = {}
        self._waiting_for: dict[WorkerId, dict[bytes, dict[RequestId, None]]] = {}

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
            held = self._tree.match(prompt.hashes)
            # Workers fall into a few groups that hold equally much.
            worth = {n: self._estimates.cached_tokens(request.model, prompt, n) for n in set(held.values())}
            for worker, chunks in held.items():
                found[worker] = found.get(worker, 0) + worth[chunks]
        return {worker: tokens for worker, tokens in found.items() if tokens >= self._minimum}

    def insert(self, model: str, prompts: Iterable[PromptKey], worker: WorkerId, now: float) -> list[RequestId]:
        """Believe that the worker holds these prompts now. Returns the watched requests whose match grew."""
        self._seen = None
        self._model[worker] = model
        grown: dict[RequestId, None] = {}
        waiting = self._waiting_for.get(worker)
        for prompt in prompts:
            gained = self._tree.insert(prompt.hashes, worker, now)
            if waiting:
                for start in range(0, len(gained), HASH_BYTES):
                    grown.update(waiting.get(gained[start : start + HASH_BYTES], {}))
        return list(grown)

    def evict(self, worker: WorkerId, tokens: int) -> None:
        """Forget this many tokens of a worker, least recently used first."""
        self._take(worker, round(tokens / self._exchange(worker)))

    def trim(self, worker: WorkerId, capacity: int) -> None:
        """Forget what exceeds the capacity of a worker's cache, in tokens, least recently used first."""
        excess = self._tree.held(worker) - int(capacity / self._exchange(worker))
        if excess > 0:
            self._take(worker, excess)

    def drop(self, worker: WorkerId) -> None:
        """Forget everything that a worker held."""
        self._seen = None
        self._tree.drop(worker)
        self._model.pop(worker, None)

    def _take(self, worker: WorkerId, chunks: int) -> None:
        self._seen = None
        self._tree.evict(worker, chunks)

    def watch(self, request: Request, worker: WorkerId) -> int:
        """Follow a request's match at one worker until `unwatch`; returns the match of now, in chunks.

        Not in tokens: what a chunk is worth changes as the estimates learn, and matches told at different times
        are compared. While it is watched, `insert` reports every growth beyond what the last `watch` of it
        returned; after a loss the match is smaller than what was returned, which only a new `watch` tells.
        """
        self.unwatch(request.id, worker)
        matched = tokens = 0
        missing: dict[bytes, None] = {}
        for prompt in request.prompts:
            chunks = self._tree.match(prompt.hashes).get(worker, 0)
            matched += chunks
            tokens += self._estimates.cached_tokens(request.model, prompt, chunks)
            if following := prompt.hashes[chunks * HASH_BYTES : (chunks + 1) * HASH_BYTES]:
                missing[following] = None
        index = self._waiting_for.setdefault(worker, {})
        for following in missing:
            index.setdefault(following, {})[request.id] = None
        self._watched.setdefault(worker, {})[request.id] = tuple(missing)
        return matched if tokens >= self._minimum else 0

    def unwatch(self, request: RequestId, worker: WorkerId) -> None:
        """Stop following a request at a worker; one that is not watched is passed over."""
        watched = self._watched.get(worker, {})
        index = self._waiting_for.get(worker, {})
        for missing in watched.pop(request, ()):
            waiting = index[missing]
            del waiting[request]
            if not waiting:
                del index[missing]
        if not watched:
            self._watched.pop(worker, None)
            self._waiting_for.pop(worker, None)

    @property
    def watched(self) -> int:
        """How many watches there are."""
        return sum(map(len, self._watched.values()))

    def check_integrity(self) -> None:
        """Raise AssertionError where the tree contradicts itself, or the index of the watches what is watched."""
        self._tree.check_integrity()
        for worker, index in self._waiting_for.items():
            indexed = {(request, chunk) for chunk, requests in index.items() for request in requests}
            watched = {(request, chunk) for request, chunks in self._watched[worker].items() for chunk in chunks}
            assert indexed == watched, f"{worker}: the watches are not those of the index"
            assert all(index.values()), f"{worker}: a chunk is indexed that nobody lacks"

    def _exchange(self, worker: WorkerId) -> float:
        """Tokens per chunk at a worker: those of the model that it served last, adapters being of one base."""
        return self._estimates.tokens_per_chunk(self._model.get(worker, ""))
