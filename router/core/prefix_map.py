"""What each worker's prefix cache is believed to hold, in tokens of a request.

Policies ask one question of it: `match(request) -> {worker: tokens}`. The tree below counts chunks; what a
chunk is worth is learned per model (`estimates`). Requests that wait can be watched: they are indexed by the last
chunks that workers hold of them and by the first that these lack, so that an insertion or an eviction names exactly
those whose match it changes, at a cost that does not depend on how many wait. (The last chunk is enough for losses:
whoever holds a chunk holds those before it.)
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from router.core.estimates import Estimates
from router.core.model import Request, RequestId, WorkerId
from router.core.prefix_tree import PrefixTree
from router.core.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey


class Seen(NamedTuple):
    """A request's size and match, as far as so many lessons of the estimates tell."""

    request: Request
    lessons: int
    size: int
    match: Mapping[WorkerId, int]


Edge = dict[bytes, list[WorkerId]]
"""Chunks of one request at which the match of some workers ends, and of which workers."""
Index = dict[bytes, dict[RequestId, None]]


class Watch(NamedTuple):
    """Where the matches of a request's prompts end, worker by worker."""

    held: Edge
    """The last chunks that they hold."""
    lacked: Edge
    """The first that they lack."""


class PrefixMap:
    """The prefix tree, priced in tokens, and the watch on waiting requests."""

    def __init__(self, limit: int, estimates: Estimates, minimum: int) -> None:
        """`limit`: chunks; `minimum`: tokens; a shorter match is no match (a shared system line must pin nothing)."""
        self.tree = PrefixTree(limit, self._lost)
        self._promised = PrefixTree(limit)
        """Of requests that wait for a worker: what it will hold when their turn has come."""
        self._limit = limit
        self._estimates = estimates
        self._minimum = minimum
        self._seen: Seen | None = None
        """The last request looked at, while nothing has changed: one decision asks about it several times."""
        self._model: dict[WorkerId, str] = {}
        self._watches: dict[RequestId, Watch] = {}
        self._held: Index = {}
        self._lacked: Index = {}
        """The watched requests by the chunks at which a match of theirs ends."""
        self._changed: dict[WorkerId, dict[RequestId, None]] = {}

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        """Tokens of the request's input that each worker holds, never all; workers below the minimum are left out."""
        return self._look(request).match

    def promise(self, request: Request, worker: WorkerId, now: float) -> None:
        """A request waits for a worker, which will hold its prompts: what begins like it had best wait there too."""
        for prompt in request.prompts:
            self._promised.insert(prompt.hashes, worker, now)

    def release(self) -> None:
        """Nothing waits any more, so nothing is promised."""
        if self._promised.chunks:
            self._promised = PrefixTree(self._limit)

    def expected(self, request: Request) -> Mapping[WorkerId, int]:
        """The match as it will be when what waits now has had its turn."""
        matched = self.match(request)
        if not self._promised.chunks:
            return matched
        promised = self._tokens(request, self._promised)
        return {w: max(matched.get(w, 0), promised.get(w, 0)) for w in {**matched, **promised}}

    def input_tokens(self, request: Request) -> int:
        """The estimated size of a request's input."""
        return self._look(request).size

    def _look(self, request: Request) -> "Seen":
        seen = self._seen
        if seen is None or seen.request is not request or seen.lessons != self._estimates.lessons:
            size = self._estimates.input_tokens(request)
            seen = self._seen = Seen(request, self._estimates.lessons, size, self._tokens(request, self.tree))
        return seen

    def _tokens(self, request: Request, tree: PrefixTree) -> dict[WorkerId, int]:
        found: dict[WorkerId, int] = {}
        for prompt in request.prompts:
            held = tree.match(prompt.hashes)
            # Workers fall into a few groups that hold equally much.
            worth = {n: self._estimates.cached_tokens(request.model, prompt, n) for n in set(held.values())}
            for worker, chunks in held.items():
                found[worker] = found.get(worker, 0) + worth[chunks]
        return {worker: tokens for worker, tokens in found.items() if tokens >= self._minimum}

    def insert(self, model: str, prompts: Iterable[PromptKey], worker: WorkerId, now: float) -> None:
        """Believe that the worker holds these prompts now."""
        self._seen = None
        self._model[worker] = model
        for prompt in prompts:
            gained = self.tree.insert(prompt.hashes, worker, now)
            for start in range(0, len(gained), HASH_BYTES) if self._lacked else ():
                chunk = gained[start : start + HASH_BYTES]
                for request in self._lacked.get(chunk, ()):
                    if worker in self._watches[request].lacked[chunk]:
                        self._changed.setdefault(worker, {})[request] = None

    def changed(self) -> Mapping[WorkerId, Iterable[RequestId]]:
        """The watched requests whose match is not what `watch` told of it; each must be watched anew.

        They are named once: the next call tells what changed after this one.
        """
        changed = self._changed
        if changed:
            self._changed = {}
        return changed

    def _lost(self, worker: WorkerId, hashes: bytes) -> None:
        for start in range(0, len(hashes), HASH_BYTES) if self._held else ():
            chunk = hashes[start : start + HASH_BYTES]
            for request in self._held.get(chunk, ()):
                if worker in self._watches[request].held[chunk]:
                    self._changed.setdefault(worker, {})[request] = None

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
        self._promised.drop(worker)
        self._model.pop(worker, None)

    def _take(self, worker: WorkerId, chunks: int) -> None:
        self._seen = None
        self.tree.evict(worker, chunks)

    def watch(self, request: Request, workers: Iterable[WorkerId]) -> dict[WorkerId, int]:
        """Follow a request's match at these workers, and at no others, until `unwatch`; returns the matches, in chunks.

        Not in tokens: what a chunk is worth changes as the estimates learn, and matches told at different times
        are compared.
        """
        self._take_out(request.id)
        watch = Watch({}, {})
        matched = dict.fromkeys(workers, 0)
        for prompt in request.prompts:
            found = self.tree.match(prompt.hashes)
            for worker in matched:
                chunks = found.get(worker, 0)
                matched[worker] += chunks
                end = chunks * HASH_BYTES
                if chunks:
                    watch.held.setdefault(prompt.hashes[end - HASH_BYTES : end], []).append(worker)
                if end < len(prompt.hashes):
                    watch.lacked.setdefault(prompt.hashes[end : end + HASH_BYTES], []).append(worker)
        self._put(request.id, watch)
        return matched if self._minimum == 0 else self._without_short(request, matched)

    def _without_short(self, request: Request, matched: dict[WorkerId, int]) -> dict[WorkerId, int]:
        size = sum([prompt.size for prompt in request.prompts])
        tokens = self._estimates.input_tokens(request) * CHUNK_BYTES / max(size, 1)
        return {worker: chunks if chunks * tokens >= self._minimum else 0 for worker, chunks in matched.items()}

    def unwatch(self, request: RequestId) -> None:
        """Stop following a request; one that is not watched is passed over."""
        self._take_out(request)
        for changed in self._changed.values():
            changed.pop(request, None)

    def _put(self, request: RequestId, watch: Watch) -> None:
        self._watches[request] = watch
        for chunk in watch.held:
            self._held.setdefault(chunk, {})[request] = None
        for chunk in watch.lacked:
            self._lacked.setdefault(chunk, {})[request] = None

    def _take_out(self, request: RequestId) -> None:
        watch = self._watches.pop(request, None)
        if watch is not None:
            _remove(self._held, watch.held, request)
            _remove(self._lacked, watch.lacked, request)

    @property
    def watched(self) -> int:
        """How many requests are watched."""
        return len(self._watches)

    def check_integrity(self) -> None:
        """Raise AssertionError where the tree contradicts itself, or the index of the watches what is watched."""
        self.tree.check_integrity()
        for index, side in ((self._held, 0), (self._lacked, 1)):
            indexed = {(request, chunk) for chunk, requests in index.items() for request in requests}
            known = {(request, chunk) for request, watch in self._watches.items() for chunk in watch[side]}
            assert indexed == known, "the watches are not those of the index"
            assert all(index.values()), "a chunk is indexed at which nobody's match ends"

    def _exchange(self, worker: WorkerId) -> float:
        """Tokens per chunk at a worker: those of the model that it served last, adapters being of one base."""
        return self._estimates.tokens_per_chunk(self._model.get(worker, ""))


def _remove(index: Index, chunks: Iterable[bytes], request: RequestId) -> None:
    for chunk in chunks:
        requests = index[chunk]
        del requests[request]
        if not requests:
            del index[chunk]
