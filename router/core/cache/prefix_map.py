"""What each worker's prefix cache is believed to hold, in tokens of a request.

Policies ask one question of it: `match(request) -> {worker: tokens}`. There are two key spaces. Of workers whose own
events tell what they hold, and requests whose tokens are known, `token_blocks` answers. For all others, the tree
below counts chunks, the mirror keeps it true to the engines' caches, and what a chunk is worth is learned per model
(`estimates`). Requests that wait can be watched, in the latter only: they are indexed by the last chunks that workers
hold of them and by the first that these lack, so that an insertion or an eviction names exactly those whose match it
changes, at a cost that does not depend on how many wait. (The last chunk is enough for losses: whoever holds a chunk
holds those before it.)
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from struct import iter_unpack
from typing import Final

from router.core.cache.cache_mirror import CacheMirror
from router.core.cache.engine_rules import TRACK_ALL, Tracking, whole_blocks
from router.core.cache.match_watch import MatchWatch, WatchIndex
from router.core.cache.prefix_tree import PrefixTree
from router.core.kv_blocks.token_blocks import TokenBlocks
from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey
from router.core.model.request import Request, RequestId, WorkerId
from router.core.predict.token_estimates import Estimates

Oracle = Callable[[Request], Mapping[WorkerId, int]]
"""Says what `PrefixMap.match` should say."""

LOOKUPS_KEPT: Final = 64
"""Requests whose match is remembered while nothing changes."""

_serial = attrgetter("serial")


class Lookup:
    """A request's size and, once asked for, its match."""

    __slots__ = ("match", "request", "size")

    def __init__(self, request: Request, size: int) -> None:
        self.request = request
        self.size = size
        self.match: Mapping[WorkerId, int] | None = None


class PrefixMap:
    """The prefix tree, priced in tokens, and the watch on waiting requests."""

    def __init__(
        self,
        limit: int,
        estimates: Estimates,
        minimum: int,
        capacity: int = 400_000,
        tracking: Tracking = TRACK_ALL,
        oracle: Oracle | None = None,
    ) -> None:
        """An empty map.

        `limit`: chunks; `minimum`: tokens; a shorter match is no match (a shared system line must pin nothing);
        `capacity`: tokens believed of a worker's cache before the worker tells; `oracle`: in simulations, what matches
        really are, instead of what is believed.
        """
        self.tree = PrefixTree(limit, self._lost, self._gained)
        self.mirror = CacheMirror(self.tree, estimates, capacity, tracking)
        self._oracle = oracle
        self.blocks = TokenBlocks(limit)
        self._promised = PrefixTree(limit)
        """Of requests that wait for a worker: what it will hold when their turn has come."""
        self._limit = limit
        self._estimates = estimates
        self._minimum = minimum
        self._least = max(1, minimum)
        """Tokens of the shortest match that is one."""
        self._seen: dict[RequestId, Lookup] = {}
        """What was looked at since anything changed: one decision asks several times about what may go."""
        self._seen_at = 0
        """The changes until then."""
        self._most_seen = LOOKUPS_KEPT if oracle is None else 1  # an oracle does not say when it would say another thing
        self._watches: dict[RequestId, tuple[MatchWatch, ...]] = {}
        """Of each watched request one by prompt."""
        self._edges = WatchIndex()
        self._fresh: dict[MatchWatch, None] = {}
        """Watches that are in none of these yet, since the tree has not changed: most of what waits for no time."""
        self._questions = 0
        self._changed: dict[WorkerId, dict[RequestId, None]] = {}

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        """Tokens of the request's input that each worker would find in its cache, never all.

        Workers below the minimum are left out, and those that do not read their cache for this request.
        """
        return self.size_and_match(request)[1]

    def size_and_match(self, request: Request) -> tuple[int, Mapping[WorkerId, int]]:
        """A request's `input_tokens` and its `match`."""
        seen = self._look(request)
        match = seen.match
        if match is None:
            match = self._tokens(request, self.tree) if self._oracle is None else self._oracle(request)
            if request.blocks and (told := self.blocks.match(request)):
                match = self._corrected(match, told, seen.size)
            seen.match = match = self._read(request, match)
        return seen.size, match

    def _read(self, request: Request, match: Mapping[WorkerId, int]) -> Mapping[WorkerId, int]:
        """A match without the workers that would compute the request's prompts anew, whatever they hold."""
        if not (request.computed_anew_by or self.mirror.uncached):
            return match
        reads = self.mirror.reads_cache
        return {worker: tokens for worker, tokens in match.items() if reads(request, worker)}

    def _corrected(
        self, believed: Mapping[WorkerId, int], told: Mapping[WorkerId, int], size: int
    ) -> Mapping[WorkerId, int]:
        """What is believed, and what workers' own events tell: that alone where they tell everything."""
        known = {
            worker: tokens if self.blocks.complete(worker) else max(tokens, believed.get(worker, 0))
            for worker, tokens in told.items()
        }
        both = {**believed, **known}
        return {worker: min(tokens, size - 1) for worker, tokens in both.items() if tokens >= self._least}

    def promise(self, request: Request, worker: WorkerId, now: float) -> None:
        """A request waits for a worker, which will hold its prompts: what begins like it had best wait there too."""
        for prompt in request.prompts:
            self._promised.insert(prompt.hashes, worker, now)

    def release(self) -> None:
        """Nothing waits any more, so nothing is promised."""
        if self._promised.chunks:
            self._promised = PrefixTree(self._limit)

    def expected_match(self, request: Request) -> Mapping[WorkerId, int]:
        """The match as it will be when what waits now has had its turn."""
        matched = self.match(request)
        if not self._promised.chunks:
            return matched
        promised = self._read(request, self._tokens(request, self._promised))
        return {w: max(matched.get(w, 0), promised.get(w, 0)) for w in {**matched, **promised}}

    def input_tokens(self, request: Request) -> int:
        """The size of a request's input: exact where its tokens are known, else estimated."""
        return self._look(request).size

    def _look(self, request: Request) -> Lookup:
        changes = self.tree.changes + self.mirror.changes + self._estimates.version + self.blocks.changes
        if changes != self._seen_at:
            self._seen.clear()
            self._seen_at = changes
        seen = self._seen.get(request.id)
        if seen is None or seen.request is not request:
            if len(self._seen) >= self._most_seen:
                self._seen.clear()
            known = sum([key.tokens for key in request.blocks]) if request.blocks else 0
            seen = self._seen[request.id] = Lookup(request, known or self._estimates.input_tokens(request))
        return seen

    def _tokens(self, request: Request, tree: PrefixTree) -> dict[WorkerId, int]:
        found: dict[WorkerId, int] = {}
        caches = self.mirror.caches
        for prompt in request.prompts:
            if held := tree.match(prompt.hashes):
                measure = self._estimates.measure(request.model, prompt)
                # Workers fall into a few groups that hold equally much.
                worth = {chunks: measure.held(chunks) for chunks in set(held.values())}
                for worker, chunks in held.items():
                    found[worker] = found.get(worker, 0) + whole_blocks(worth[chunks], caches[worker].block_tokens)
        least, discount = self._least, self.mirror.discounted
        return {worker: discount(worker, tokens) for worker, tokens in found.items() if tokens >= least}

    def insert(self, model: str, prompts: Iterable[PromptKey], worker: WorkerId, now: float) -> None:
        """Believe that the worker holds these prompts now, though nothing was sent there."""
        self.mirror.cache(worker).model = model
        for prompt in prompts:
            self.tree.insert(prompt.hashes, worker, now)

    def _gained(self, worker: WorkerId, hashes: bytes, gained: int) -> None:
        """A worker holds so many bytes more of a prefix: watches may lack the first of them."""
        self._add_fresh()
        start = len(hashes) - gained
        watches = self._edges.lacked.get(hashes[start : start + HASH_BYTES])
        before = start // HASH_BYTES
        for watch in sorted(watches, key=_serial) if watches else ():
            if watch.ends.get(worker) == before:
                self._move(watch, worker, watch.shared(hashes, before))

    def _lost(self, worker: WorkerId, hashes: bytes) -> None:
        """A worker does not hold this run any more."""
        self._add_fresh()
        held = self._edges.held
        for place, (chunk,) in enumerate(iter_unpack("8s", hashes) if held else ()):
            if chunk in held:
                for watch in sorted(held[chunk], key=_serial):
                    chunks = watch.ends.get(worker, 0)
                    if watch.hashes[(chunks - 1) * HASH_BYTES : chunks * HASH_BYTES] == chunk:
                        self._move(watch, worker, chunks - place - 1)

    def _move(self, watch: MatchWatch, worker: WorkerId, chunks: int) -> None:
        self._edges.move(watch, worker, chunks)
        self._changed.setdefault(worker, {})[watch.request] = None

    def take_changes(self) -> Mapping[WorkerId, Iterable[RequestId]]:
        """The watched requests whose match is not what `watch` told of it; each must be watched anew.

        They are named once: the next call tells what changed after this one.
        """
        changed = self._changed
        if changed:
            self._changed = {}
        return changed

    def drop(self, worker: WorkerId) -> None:
        """A worker left: forget everything that it held, and that it was promised."""
        self.mirror.drop(worker)
        self._promised.drop(worker)

    def watch(self, request: Request, workers: Iterable[WorkerId]) -> dict[WorkerId, int]:
        """Follow a request's match at these workers, and at no others, until `unwatch`; returns the matches, in chunks.

        Not in tokens: what a chunk is worth changes as the estimates learn, and matches told at different times
        are compared.
        """
        workers = tuple(workers)
        watches = self._watches.get(request.id)
        if not watches or tuple(watches[0].ends) != workers:
            self._take_out(request.id)
            watches = self._watches[request.id] = tuple(
                [self._follow(request.id, prompt.hashes, workers) for prompt in request.prompts]
            )
        self._questions += 1
        for watch in watches:
            watch.serial = self._questions
        if len(watches) == 1:
            matched = watches[0].ends.copy()
        else:
            matched = {worker: sum([watch.ends[worker] for watch in watches]) for worker in workers}
        return self._worth_going_for(request, matched)

    def chunks_held(self, request: Request, workers: Iterable[WorkerId]) -> dict[WorkerId, int]:
        """What `watch` would return, of a request that is not to be followed."""
        if len(request.prompts) == 1:
            found = self.tree.match(request.prompts[0].hashes)
            matched = {worker: found.get(worker, 0) for worker in workers}
        else:
            finds = [self.tree.match(prompt.hashes) for prompt in request.prompts]
            matched = {worker: sum([found.get(worker, 0) for found in finds]) for worker in workers}
        return self._worth_going_for(request, matched)

    def _follow(self, request: RequestId, hashes: bytes, workers: tuple[WorkerId, ...]) -> MatchWatch:
        """Begin to watch one prompt."""
        found = self.tree.match(hashes)
        watch = MatchWatch(request, hashes, {worker: found.get(worker, 0) for worker in workers})
        self._fresh[watch] = None
        return watch

    def _add_fresh(self) -> None:
        """Let changes find all that is watched."""
        if self._fresh:
            for watch in self._fresh:
                for chunks in set(watch.ends.values()):
                    self._edges.add(watch, chunks)
            self._fresh.clear()

    def _worth_going_for(self, request: Request, matched: dict[WorkerId, int]) -> dict[WorkerId, int]:
        """Take a match below the minimum for none, and one that the worker would not use."""
        if request.computed_anew_by or self.mirror.uncached:
            reads = self.mirror.reads_cache
            matched = {worker: chunks if reads(request, worker) else 0 for worker, chunks in matched.items()}
        shortest = min(filter(None, matched.values()), default=0)
        if self._minimum == 0 or not shortest:
            return matched
        size = sum([prompt.size for prompt in request.prompts])
        tokens = self._estimates.input_tokens(request) * CHUNK_BYTES / max(size, 1)
        if shortest * tokens >= self._minimum:
            return matched
        return {worker: chunks if chunks * tokens >= self._minimum else 0 for worker, chunks in matched.items()}

    def unwatch(self, request: RequestId) -> None:
        """Stop following a request; one that is not watched is passed over."""
        self._take_out(request)
        for changed in self._changed.values():
            changed.pop(request, None)

    def _take_out(self, request: RequestId) -> None:
        for watch in self._watches.pop(request, ()):
            if watch in self._fresh:
                del self._fresh[watch]
                continue
            for chunks in set(watch.ends.values()):
                self._edges.remove(watch, chunks)

    @property
    def watched(self) -> int:
        """How many requests are watched."""
        return len(self._watches)

    def check_integrity(self) -> None:
        """Raise AssertionError where the tree contradicts itself, or the index of the watches what is watched."""
        self.tree.check_integrity()
        self._add_fresh()
        watches = [watch for watches in self._watches.values() for watch in watches]
        for side, index in enumerate((self._edges.held, self._edges.lacked)):
            indexed = {(watch, chunk) for chunk, there in index.items() for watch in there}
            edges = {(watch, watch.edge(chunks)[side]) for watch in watches for chunks in watch.ends.values()}
            assert indexed == {(watch, chunk) for watch, chunk in edges if chunk}, "the watches are not those indexed"
            assert all(index.values()), "a chunk is indexed at which nobody's match ends"
