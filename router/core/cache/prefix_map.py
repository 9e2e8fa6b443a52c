"""What each worker's prefix cache is believed to hold of a request, in tokens.

Policies ask one question: `match(request) -> {worker: tokens}`. There are two key spaces. For workers whose KV events
report what they hold, and requests whose tokens are known, `token_blocks` answers. For all others, the prefix tree
counts chunks, the mirror keeps the tree true to the engines' caches, and the tokens of a chunk are learned per model
(`token_estimates`). Queued requests can be watched, in the tree only: they are indexed by the last chunk that each
worker holds of them and by the first chunk that it lacks, so that an insertion or an eviction names exactly the
requests whose match it changes, at a cost that does not depend on how many are queued. (The last chunk is enough for
losses, because a worker that holds a chunk holds those before it.)
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from struct import iter_unpack
from types import MappingProxyType
from typing import Protocol

from router.core.cache.cache_mirror import CacheMirror
from router.core.cache.engine_rules import TRACK_ALL, Tracking, whole_blocks
from router.core.cache.match_watch import MatchWatch, WatchIndex
from router.core.cache.prefix_tree import PrefixTree
from router.core.kv_blocks.token_blocks import TokenBlocks
from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey
from router.core.model.request import Request, RequestId, WorkerId
from router.core.predict.token_estimates import Estimates

Oracle = Callable[[Request], Mapping[WorkerId, int]]
"""Replaces `PrefixMap.match` in simulations."""

_serial = attrgetter("serial")


class Lookup:
    """A request's size and match, each kept while nothing changes on which it rests. A live request carries its own."""

    __slots__ = ("match", "match_version", "request", "size", "size_version")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.size = 0
        self.size_version = -1
        """The version of the estimates from which the size was computed; -1 before that."""
        self.match: Mapping[WorkerId, int] = {}
        self.match_version = -1
        """The same for the match, as the sum of all that is counted of changes on which it rests."""


class LiveRequest(Protocol):
    """A request that has arrived and not ended."""

    @property
    def lookup(self) -> Lookup:
        """What was last looked up of it."""


class PrefixMap:
    """The matches of requests at all workers, in tokens, and the watches on queued requests."""

    def __init__(
        self,
        limit: int,
        estimates: Estimates,
        match_minimum: int,
        capacity: int = 400_000,
        tracking: Tracking = TRACK_ALL,
        oracle: Oracle | None = None,
        live: Mapping[RequestId, LiveRequest] = MappingProxyType({}),
    ) -> None:
        """`limit`: chunks in the tree.

        `match_minimum`: tokens; a shorter match does not count, so that a shared system line pins no request to a
        worker.

        `capacity`: tokens assumed of a worker's cache before the worker reports it.

        `oracle`: in simulations, the true matches, used instead of the believed ones.

        `live`: the live requests, each with what was last looked up of it. Of other requests nothing is kept.
        """
        self.tree = PrefixTree(limit, self._on_lost, self._on_gained)
        self.mirror = CacheMirror(self.tree, estimates, capacity, tracking)
        self._oracle = oracle
        self.blocks = TokenBlocks(limit)
        self._promised = PrefixTree(limit)
        """What the workers will hold once the requests that wait for them have run."""
        self._limit = limit
        self._estimates = estimates
        self._match_minimum = match_minimum
        self._min_match_tokens = max(1, match_minimum)
        """Shortest match that counts, at least 1 token."""
        self._live = live
        self._latest: Lookup | None = None
        """The lookup in use. An oracle does not report when its answers change, so only this one is kept then."""
        self._watches: dict[RequestId, tuple[MatchWatch, ...]] = {}
        """For each watched request, one watch per prompt."""
        self._index = WatchIndex()
        self._unindexed: dict[MatchWatch, None] = {}
        """New watches, not indexed before the tree changes: most requests that are watched never wait that long."""
        self._watch_calls = 0
        self.changed: dict[WorkerId, dict[RequestId, None]] = {}
        """By worker, the watched requests whose match there differs from what `watch` returned; read-only, see
        `take_changes`.
        """

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        """Return the input tokens of the request that each worker would find in its cache, never all of them.

        Workers below the minimum are left out, and so are those that do not read their cache for this request.
        """
        return self.size_and_match(request)[1]

    def size_and_match(self, request: Request) -> tuple[int, Mapping[WorkerId, int]]:
        """Return a request's `input_tokens` and its `match`."""
        lookup = self._lookup(request)
        version = self.tree.changes + self.mirror.changes + self._estimates.version
        if request.blocks:
            version += self.blocks.changes
        if lookup.match_version != version:
            size = self._size(lookup)
            match = self._match_in_tokens(request, self.tree) if self._oracle is None else self._oracle(request)
            if request.blocks and (exact := self.blocks.match(request)):
                match = self._merge(match, exact, size)
            lookup.match, lookup.match_version = self._only_readable(request, match), version
        return lookup.size, lookup.match  # the size rests on nothing else

    def _only_readable(self, request: Request, match: Mapping[WorkerId, int]) -> Mapping[WorkerId, int]:
        """Leave out the workers that would compute the request's prompts in full, whatever they hold."""
        if not (request.computed_anew_by or self.mirror.uncached):
            return match
        reads = self.mirror.reads_cache
        return {worker: tokens for worker, tokens in match.items() if reads(request, worker)}

    def _merge(
        self, estimated: Mapping[WorkerId, int], exact: Mapping[WorkerId, int], size: int
    ) -> Mapping[WorkerId, int]:
        """Merge the estimated match with the one from KV events; complete events replace the estimate."""
        known = {
            worker: tokens if self.blocks.complete(worker) else max(tokens, estimated.get(worker, 0))
            for worker, tokens in exact.items()
        }
        both = {**estimated, **known}
        return {worker: min(tokens, size - 1) for worker, tokens in both.items() if tokens >= self._min_match_tokens}

    def promise(self, request: Request, worker: WorkerId, now: float) -> None:
        """Note that a request waits for a worker, so that requests which share its prefix expect a match there."""
        for prompt in request.prompts:
            self._promised.insert(prompt.hashes, worker, now)

    def release(self) -> None:
        """Drop all promises, because no request waits any more."""
        if self._promised.chunks:
            self._promised = PrefixTree(self._limit)

    def expected_match(self, request: Request) -> Mapping[WorkerId, int]:
        """Return the match as it will be once all requests that wait now have run."""
        matched = self.match(request)
        if not self._promised.chunks:
            return matched
        promised = self._only_readable(request, self._match_in_tokens(request, self._promised))
        return {w: max(matched.get(w, 0), promised.get(w, 0)) for w in {**matched, **promised}}

    def input_tokens(self, request: Request) -> int:
        """Return the size of a request's input: exact if its tokens are known, else estimated."""
        return self._size(self._lookup(request))

    def _lookup(self, request: Request) -> Lookup:
        """Return what is kept of a request; it may be out of date."""
        live = self._live.get(request.id)
        lookup = Lookup(request) if live is None or live.lookup.request is not request else live.lookup
        if self._oracle is not None and lookup is not self._latest:
            lookup.match_version = -1
            self._latest = lookup
        return lookup

    def _size(self, lookup: Lookup) -> int:
        version = self._estimates.version
        if lookup.size_version != version:
            request = lookup.request
            known = sum([key.tokens for key in request.blocks]) if request.blocks else 0
            lookup.size = known or self._estimates.input_tokens(request)
            lookup.size_version = version
        return lookup.size

    def _match_in_tokens(self, request: Request, tree: PrefixTree) -> dict[WorkerId, int]:
        found: dict[WorkerId, int] = {}
        caches = self.mirror.caches
        for prompt in request.prompts:
            if held := tree.match(prompt.hashes):
                measure = self._estimates.measure(request.model, prompt)
                # Workers fall into a few groups that hold the same number of chunks.
                worth = {chunks: measure.held(chunks) for chunks in set(held.values())}
                for worker, chunks in held.items():
                    found[worker] = found.get(worker, 0) + whole_blocks(worth[chunks], caches[worker].block_tokens)
        min_tokens, discount = self._min_match_tokens, self.mirror.discounted
        return {worker: discount(worker, tokens) for worker, tokens in found.items() if tokens >= min_tokens}

    def insert(self, model: str, prompts: Iterable[PromptKey], worker: WorkerId, now: float) -> None:
        """Assume that the worker holds these prompts now, though nothing was sent there."""
        self.mirror.cache(worker).model = model
        for prompt in prompts:
            self.tree.insert(prompt.hashes, worker, now)

    def _on_gained(self, worker: WorkerId, hashes: bytes, gained: int) -> None:
        """Update watches: a worker holds a prefix now of which it lacked the last `gained` bytes of hashes."""
        self._index_new_watches()
        start = len(hashes) - gained
        watches = self._index.lacked.get(hashes[start : start + HASH_BYTES])
        before = start // HASH_BYTES
        for watch in sorted(watches, key=_serial) if watches else ():
            if watch.ends.get(worker) == before:
                self._set_chunks(watch, worker, watch.shared(hashes, before))

    def _on_lost(self, worker: WorkerId, hashes: bytes) -> None:
        """Update watches: a worker no longer holds this run of chunks."""
        self._index_new_watches()
        held = self._index.held
        for place, (chunk,) in enumerate(iter_unpack("8s", hashes) if held else ()):
            if chunk in held:
                for watch in sorted(held[chunk], key=_serial):
                    chunks = watch.ends.get(worker, 0)
                    if watch.hashes[(chunks - 1) * HASH_BYTES : chunks * HASH_BYTES] == chunk:
                        self._set_chunks(watch, worker, chunks - place - 1)

    def _set_chunks(self, watch: MatchWatch, worker: WorkerId, chunks: int) -> None:
        self._index.move(watch, worker, chunks)
        self.changed.setdefault(worker, {})[watch.request] = None

    def take_changes(self) -> Mapping[WorkerId, Iterable[RequestId]]:
        """Return the watched requests whose match differs from what `watch` returned; each must be watched anew.

        Each change is returned once: the next call returns later changes only.
        """
        changes, self.changed = self.changed, {}
        return changes

    def drop(self, worker: WorkerId) -> None:
        """Forget everything that a worker held or was promised, because it left."""
        self.mirror.drop(worker)
        self._promised.drop(worker)

    def watch(self, request: Request, workers: Iterable[WorkerId]) -> dict[WorkerId, int]:
        """Watch a request's match at these workers, and at no others, until `unwatch`. Returns the matches, in chunks.

        They are not in tokens, because the tokens of a chunk change as the estimates learn, and matches returned at
        different times are compared.
        """
        workers = tuple(workers)
        watches = self._watches.get(request.id)
        if not watches or tuple(watches[0].ends) != workers:
            self._remove_watches(request.id)
            watches = self._watches[request.id] = tuple(
                [self._new_watch(request.id, prompt.hashes, workers) for prompt in request.prompts]
            )
        self._watch_calls += 1
        for watch in watches:
            watch.serial = self._watch_calls
        if len(watches) == 1:
            matched = watches[0].ends.copy()
        else:
            matched = {worker: sum([watch.ends[worker] for watch in watches]) for worker in workers}
        return self._apply_minimum(request, matched)

    def chunks_held(self, request: Request, workers: Iterable[WorkerId]) -> dict[WorkerId, int]:
        """Return what `watch` would return, without watching the request."""
        if len(request.prompts) == 1:
            found = self.tree.match(request.prompts[0].hashes)
            matched = {worker: found.get(worker, 0) for worker in workers}
        else:
            finds = [self.tree.match(prompt.hashes) for prompt in request.prompts]
            matched = {worker: sum([found.get(worker, 0) for found in finds]) for worker in workers}
        return self._apply_minimum(request, matched)

    def _new_watch(self, request: RequestId, hashes: bytes, workers: tuple[WorkerId, ...]) -> MatchWatch:
        """Watch one prompt."""
        found = self.tree.match(hashes)
        watch = MatchWatch(request, hashes, {worker: found.get(worker, 0) for worker in workers})
        self._unindexed[watch] = None
        return watch

    def _index_new_watches(self) -> None:
        """Index the new watches, before the tree changes."""
        if self._unindexed:
            for watch in self._unindexed:
                for chunks in set(watch.ends.values()):
                    self._index.add(watch, chunks)
            self._unindexed.clear()

    def _apply_minimum(self, request: Request, matched: dict[WorkerId, int]) -> dict[WorkerId, int]:
        """Set matches below the minimum, and those that the worker would not use, to 0."""
        if request.computed_anew_by or self.mirror.uncached:
            reads = self.mirror.reads_cache
            matched = {worker: chunks if reads(request, worker) else 0 for worker, chunks in matched.items()}
        shortest = min(filter(None, matched.values()), default=0)
        if self._match_minimum == 0 or not shortest:
            return matched
        size = sum([prompt.size for prompt in request.prompts])
        tokens = self._estimates.input_tokens(request) * CHUNK_BYTES / max(size, 1)
        if shortest * tokens >= self._match_minimum:
            return matched
        return {worker: chunks if chunks * tokens >= self._match_minimum else 0 for worker, chunks in matched.items()}

    def unwatch(self, request: RequestId) -> None:
        """Stop watching a request; does nothing if it is not watched."""
        self._remove_watches(request)
        for changes in self.changed.values():
            changes.pop(request, None)

    def _remove_watches(self, request: RequestId) -> None:
        for watch in self._watches.pop(request, ()):
            if watch in self._unindexed:
                del self._unindexed[watch]
                continue
            for chunks in set(watch.ends.values()):
                self._index.remove(watch, chunks)

    @property
    def watched(self) -> int:
        """How many requests are watched."""
        return len(self._watches)

    def check_integrity(self) -> None:
        """Raise AssertionError if the tree contradicts itself, or the index of watches differs from the watches."""
        self.tree.check_integrity()
        self._index_new_watches()
        watches = [watch for watches in self._watches.values() for watch in watches]
        for side, index in enumerate((self._index.held, self._index.lacked)):
            indexed = {(watch, chunk) for chunk, there in index.items() for watch in there}
            edges = {(watch, watch.edge(chunks)[side]) for watch in watches for chunks in watch.ends.values()}
            assert indexed == {(watch, chunk) for watch, chunk in edges if chunk}, "the index differs from the watches"
            assert all(index.values()), "a chunk is indexed at which no match ends"
