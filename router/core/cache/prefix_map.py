"""What each worker's prefix cache is believed to hold of a request, in tokens.

Policies ask one question: `match(request) -> {worker: tokens}`. There are two key spaces. For workers whose KV events
report what they hold, and requests whose tokens are known, `token_blocks` answers. For all others, the prefix tree
counts chunks, the mirror keeps the tree true to the engines' caches, and the tokens of a chunk are learned per model
(`token_estimates`). Queued requests can be watched, in the tree only: `watch_index` indexes them, so that an insertion
or an eviction names the requests that it concerns, at a cost that does not depend on how many others are queued.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple, Protocol

from router.core.cache.cache_mirror import CacheMirror
from router.core.cache.engine_rules import TRACK_ALL, MatchWorth, Tracking, whole_blocks
from router.core.cache.held_chunks import NOTHING_HELD, HeldChunks
from router.core.cache.match_group import MatchGroup, MatchWatch, Narrow
from router.core.cache.prefix_tree import PrefixTree
from router.core.cache.watch_index import WatchIndex
from router.core.kv_blocks.token_blocks import TokenBlocks
from router.core.model.prompt_key import CHUNK_BYTES, HASH_BYTES, PromptKey
from router.core.model.request import Request, RequestId, WorkerId
from router.core.predict.token_estimates import Estimates

Oracle = Callable[[Request], Mapping[WorkerId, int]]
"""Replaces `PrefixMap.match` in simulations."""


class Lookup:
    """A request's size and match, each kept while nothing changes on which it rests. A live request carries its own."""

    __slots__ = ("in_tree", "in_tree_for", "match", "match_version", "request", "size", "size_version")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.size = 0
        self.size_version = -1
        """The version of the estimates from which the size was computed; -1 before that."""
        self.match: Mapping[WorkerId, int] = {}
        self.match_version = -1
        """The same for the match, as the sum of all that is counted of changes on which it rests."""
        self.in_tree: Mapping[WorkerId, int] = {}
        """The match by the tree alone, of a request that is watched."""
        self.in_tree_for: tuple[Mapping[WorkerId, int], MatchWorth, int] | None = None
        """The chunks that workers held then, what they were worth, and the version of the estimates."""


class RequestWatch(NamedTuple):
    """The watches of one request."""

    worker: WorkerId | None
    """The worker that matters to them; None if all do."""
    prompts: tuple[MatchWatch, ...]
    """One per prompt."""


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
        self._latest_held = NOTHING_HELD
        """What `_held` returned last."""
        self._watches: dict[RequestId, RequestWatch] = {}
        self._index_of_all = WatchIndex()
        """The indexed watches to which all workers matter."""
        self._indexes: defaultdict[WorkerId, WatchIndex] = defaultdict(WatchIndex)
        """The others, by the one worker that matters to them."""
        self._unindexed: dict[MatchWatch, WatchIndex] = {}
        """New watches, not indexed before the tree changes: most requests that are watched never wait that long."""
        self._narrow_models: dict[str, None] = {}
        """The models of the requests that were watched narrowly since none was watched at all."""
        self._most_needed = 0.0
        """The chunks with which a request of each of these models surely reaches the minimum."""
        self._enough_for = (-1, 0)
        """The version of the estimates and the number of models from which that was computed."""
        self.changed: dict[WorkerId, dict[RequestId, None]] = {}
        """By worker, the watched requests that a change of their match there concerns; read-only, see `take_changes`.
        """

    def match(self, request: Request) -> Mapping[WorkerId, int]:
        """Return the input tokens of the request that each worker would find in its cache, never all of them.

        Workers below the minimum are left out, and so are those that do not read their cache for this request.
        """
        return self.size_and_match(request)[1]

    def size_and_match(self, request: Request) -> tuple[int, Mapping[WorkerId, int]]:
        """Return a request's `input_tokens` and its `match`."""
        lookup = self.up_to_date(self._lookup(request))
        return lookup.size, lookup.match

    def up_to_date(self, lookup: Lookup) -> Lookup:
        """Return the lookup, after computing again what may have changed of it."""
        request = lookup.request
        if self._oracle is not None:
            self._keep_latest(lookup)
        version = self.tree.changes + self.mirror.changes + self._estimates.version
        if request.blocks:
            version += self.blocks.changes
        if lookup.match_version != version:
            size = self._size(lookup)
            match = self._match_in_tree(lookup) if self._oracle is None else self._oracle(request)
            if request.blocks and (exact := self.blocks.match(request)):
                match = self._merge(match, exact, size)
            if request.computed_anew_by or self.mirror.uncached:
                match = self._only_readable(request, match)
            lookup.match, lookup.match_version = match, version
        return lookup  # the size rests on nothing else

    def _match_in_tree(self, lookup: Lookup) -> Mapping[WorkerId, int]:
        """Return the match by the tree alone. The watch of a queued request knows what workers hold of it, and most
        changes of the tree concern other requests.
        """
        request, watched = lookup.request, self._watches.get(lookup.request.id)
        if watched is None or watched.worker is not None or len(request.prompts) != 1:
            return self._match_in_tokens(request, self.tree)
        watch, version, worth = watched.prompts[0], self._estimates.version, self.mirror.common_worth
        if worth is None or watch.hashes is not request.prompts[0].hashes:
            return self._match_in_tokens(request, self.tree)
        held, known = watch.group.held.by_worker, lookup.in_tree_for
        if known is None or known[0] is not held or known[1] != worth or known[2] != version:
            lookup.in_tree = self._match_alike(request, held, worth) if held else {}
            lookup.in_tree_for = held, worth, version
        return lookup.in_tree

    def _only_readable(self, request: Request, match: Mapping[WorkerId, int]) -> Mapping[WorkerId, int]:
        """Leave out the workers that would compute the request's prompts in full, whatever they hold."""
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
        promised = self._match_in_tokens(request, self._promised)
        if request.computed_anew_by or self.mirror.uncached:
            promised = self._only_readable(request, promised)
        return {w: max(matched.get(w, 0), promised.get(w, 0)) for w in {**matched, **promised}}

    def input_tokens(self, request: Request) -> int:
        """Return the size of a request's input: exact if its tokens are known, else estimated."""
        return self._size(self._lookup(request))

    def _lookup(self, request: Request) -> Lookup:
        """Return what is kept of a request; it may be out of date."""
        live = self._live.get(request.id)
        lookup = Lookup(request) if live is None or not _asks_alike(live.lookup.request, request) else live.lookup
        if self._oracle is not None:
            self._keep_latest(lookup)
        return lookup

    def _keep_latest(self, lookup: Lookup) -> None:
        """Note that this lookup is in use, and that its match must be asked of the oracle if another one was."""
        if lookup is not self._latest:
            lookup.match_version = -1
            self._latest = lookup

    def _size(self, lookup: Lookup) -> int:
        version = self._estimates.version
        if lookup.size_version != version:
            request = lookup.request
            known = sum([key.tokens for key in request.blocks]) if request.blocks else 0
            lookup.size = known or self._estimates.input_tokens(request)
            lookup.size_version = version
        return lookup.size

    def _match_in_tokens(self, request: Request, tree: PrefixTree) -> Mapping[WorkerId, int]:
        if len(request.prompts) == 1:
            held = tree.match(request.prompts[0].hashes)
            if not held:
                return {}
            if (worth := self.mirror.common_worth) is not None:
                return self._match_alike(request, held, worth)
        found: Counter[WorkerId] = Counter()
        for prompt in request.prompts:
            if held := tree.match(prompt.hashes):
                measure = self._estimates.measure(request.model, prompt)
                tokens = {chunks: measure.held(chunks) for chunks in {*held.values()}}
                for worker, chunks in held.items():
                    found[worker] += whole_blocks(tokens[chunks], self.mirror.worth(worker).block_tokens)
        return {
            worker: self.mirror.worth(worker).discounted(tokens)
            for worker, tokens in found.items()
            if tokens >= self._min_match_tokens
        }

    def _match_alike(self, request: Request, held: Mapping[WorkerId, int], worth: MatchWorth) -> Mapping[WorkerId, int]:
        """Return what the chunks `held` of one prompt are in tokens, at workers at which as many are worth the same.

        The workers fall into a few groups that hold the same number of chunks, so no code runs once per worker.
        """
        (prompt,) = request.prompts
        measure, block_tokens = self._estimates.measure(request.model, prompt), worth.block_tokens
        tokens = {chunks: whole_blocks(measure.held(chunks), block_tokens) for chunks in {*held.values()}}
        counted = {chunks: worth.discounted(each) for chunks, each in tokens.items()}
        if min(tokens.values()) >= self._min_match_tokens:
            return dict(zip(held, map(counted.__getitem__, held.values()), strict=True))
        return {each: counted[chunks] for each, chunks in held.items() if tokens[chunks] >= self._min_match_tokens}

    def insert(self, model: str, prompts: Iterable[PromptKey], worker: WorkerId, now: float) -> None:
        """Assume that the worker holds these prompts now, though nothing was sent there."""
        self.mirror.cache(worker).model = model
        for prompt in prompts:
            self.tree.insert(prompt.hashes, worker, now)

    def _on_gained(self, worker: WorkerId, hashes: bytes, gained: int) -> None:
        """Update watches: a worker holds a prefix now of which it lacked the last `gained` bytes of hashes."""
        self._index_new_watches()
        before = (len(hashes) - gained) // HASH_BYTES
        for index in self._indexes_of(worker):
            self._note_changes(worker, index.gained(worker, hashes, before, self._enough))

    def _on_lost(self, worker: WorkerId, hashes: bytes) -> None:
        """Update watches: a worker no longer holds this run of chunks."""
        self._index_new_watches()
        for index in self._indexes_of(worker):
            self._note_changes(worker, index.lost(worker, hashes, self._enough))

    def _enough(self) -> float:
        """Return how many chunks of a request that is watched narrowly surely reach the minimum; infinite while a
        worker has no cache.
        """
        if self.mirror.uncached:
            return inf
        if not self._match_minimum:
            return 0.0
        known = self._estimates.version, len(self._narrow_models)
        if self._enough_for != known:
            chunks_with = self._estimates.chunks_with
            chunks = [chunks_with(model, self._match_minimum) for model in self._narrow_models]
            self._enough_for, self._most_needed = known, max(chunks, default=0.0)
        return self._most_needed

    def _indexes_of(self, worker: WorkerId) -> Sequence[WatchIndex]:
        """Return the indexes whose watches a change at this worker may concern."""
        own = self._indexes.get(worker)
        return (self._index_of_all,) if own is None else (self._index_of_all, own)

    def _note_changes(self, worker: WorkerId, watches: Iterable[MatchWatch]) -> None:
        if watches:
            self.changed.setdefault(worker, {}).update(dict.fromkeys([watch.request for watch in watches]))

    def take_changes(self) -> Mapping[WorkerId, Iterable[RequestId]]:
        """Return the watched requests whose match differs from what `watch` returned, or, if they are watched narrowly,
        that a change concerns; each must be watched again.

        Each change is returned once: the next call returns later changes only.
        """
        changes, self.changed = self.changed, {}
        return changes

    def drop(self, worker: WorkerId) -> None:
        """Forget everything that a worker held or was promised, because it left."""
        self.mirror.drop(worker)
        self._index_new_watches()
        if not self._indexes.get(worker):
            self._indexes.pop(worker, None)
        self._promised.drop(worker)

    def begin_watch(self, request: Request) -> None:
        """Watch a request as `watch` does, whose answer is known from `chunks_held`."""
        self._watch(request, None)

    def watch(self, request: Request, workers: Mapping[WorkerId, object]) -> HeldChunks:
        """Watch a request's match at all workers until `unwatch`. Returns what these workers hold.

        That is in chunks and not in tokens, because the tokens of a chunk change as the estimates learn, and matches
        returned at different times are compared. A change at any worker is reported, unless `watch_narrowly` follows.
        """
        watches = self._watch(request, None)
        if len(watches) == 1:
            held = watches[0].group.held.among(workers)
        else:
            held = HeldChunks(_sum([watch.group.held.by_worker for watch in watches])).among(workers)
        return self._apply_minimum(request, held)

    def watch_narrowly(self, request: Request, workers: Collection[WorkerId], able: Mapping[WorkerId, object]) -> None:
        """Let changes of a watched request's match be reported, until it is watched again, only if they are at these
        workers, or change the most chunks that any worker holds, or those that all workers hold.

        `able`: all that the request may go to; the mapping must not change. The request is watched as before if each
        change must be looked at, because it has several prompts, or some of what matters may not count.
        """
        watch, *others = self._watches[request.id].prompts
        if others or request.computed_anew_by or self.mirror.uncached:
            return
        group = watch.group
        needed = group.held.least if group.all_hold_some(able) else group.least_needed(workers)
        if not self._match_minimum or self._surely_enough(request, needed):
            self._narrow_models[request.model] = None
            self._set_narrow(watch, Narrow(workers, able))

    def _set_narrow(self, watch: MatchWatch, narrow: Narrow | None) -> None:
        if watch in self._unindexed:
            watch.narrow = narrow
        else:
            watch.group.set_narrow(watch, narrow)

    def watch_at(self, request: Request, worker: WorkerId) -> int:
        """Watch a request's match at one worker, and at no other, until `unwatch`. Returns the match in chunks."""
        held = sum([watch.group.held.at(worker) for watch in self._watch(request, worker)])
        return self._apply_minimum(request, HeldChunks({worker: held} if held else {})).at(worker)

    def chunks_held(self, request: Request, workers: Mapping[WorkerId, object]) -> HeldChunks:
        """Return what `watch` would return, without watching the request."""
        if len(request.prompts) == 1:
            held = self._held(request.prompts[0].hashes)
            if not held.most:
                return NOTHING_HELD
        else:
            held = HeldChunks(_sum([self.tree.match(prompt.hashes) for prompt in request.prompts]))
        return self._apply_minimum(request, held.among(workers))

    def _held(self, hashes: bytes) -> HeldChunks:
        """Return how far workers hold a prompt. The latest answer is kept: a new request is asked for, then watched."""
        found = self.tree.match(hashes)
        if found is not self._latest_held.by_worker:
            self._latest_held = HeldChunks(found)
        return self._latest_held

    def _watch(self, request: Request, worker: WorkerId | None) -> Sequence[MatchWatch]:
        """Return a request's watches, one per prompt, made if there are none for this worker."""
        watched = self._watches.get(request.id)
        if watched is None or watched.worker != worker:
            self._remove_watches(request.id)
            watches = tuple([self._new_watch(request.id, prompt.hashes, worker) for prompt in request.prompts])
            watched = self._watches[request.id] = RequestWatch(worker, watches)
        for watch in watched.prompts:
            if watch.narrow is not None:
                self._set_narrow(watch, None)
        return watched.prompts

    def _new_watch(self, request: RequestId, hashes: bytes, worker: WorkerId | None) -> MatchWatch:
        """Watch one prompt."""
        held = self._held(hashes)
        if worker is not None:
            held = HeldChunks({worker: chunks} if (chunks := held.at(worker)) else {})
        watch = MatchWatch(request, hashes, MatchGroup(hashes[: held.most * HASH_BYTES], held))
        self._unindexed[watch] = self._index(worker)
        return watch

    def _index(self, worker: WorkerId | None) -> WatchIndex:
        return self._index_of_all if worker is None else self._indexes[worker]

    def _index_new_watches(self) -> None:
        """Index the new watches, before the tree changes."""
        if self._unindexed:
            for watch, index in self._unindexed.items():
                index.add(watch)
            self._unindexed.clear()

    def _apply_minimum(self, request: Request, held: HeldChunks) -> HeldChunks:
        """Leave out matches below the minimum, and those that the worker would not use."""
        if request.computed_anew_by or self.mirror.uncached:
            reads = self.mirror.reads_cache
            held = HeldChunks({worker: chunks for worker, chunks in held.by_worker.items() if reads(request, worker)})
        if self._match_minimum == 0 or not held.least or self._surely_enough(request, held.least):
            return held
        size = sum([prompt.size for prompt in request.prompts])
        tokens = self._estimates.input_tokens(request) * CHUNK_BYTES / max(size, 1)
        if held.least * tokens >= self._match_minimum:
            return held
        enough = {each: chunks for each, chunks in held.by_worker.items() if chunks * tokens >= self._match_minimum}
        return HeldChunks(enough)

    def _surely_enough(self, request: Request, chunks: int) -> bool:
        """Return whether this many chunks of a request surely reach the minimum, without measuring its prompt."""
        return (
            len(request.prompts) == 1
            and request.prompts[0].tokens is None
            and chunks >= self._estimates.chunks_with(request.model, self._match_minimum)
        )

    def unwatch(self, request: RequestId) -> None:
        """Stop watching a request; does nothing if it is not watched."""
        self._remove_watches(request)
        for changes in self.changed.values():
            changes.pop(request, None)
        if (live := self._live.get(request)) is not None:
            live.lookup.in_tree, live.lookup.in_tree_for = {}, None  # only a watched request's are used

    def _remove_watches(self, request: RequestId) -> None:
        if (watched := self._watches.pop(request, None)) is not None:
            for watch in watched.prompts:
                if self._unindexed.pop(watch, None) is None:
                    self._index(watched.worker).remove(watch)
            if not self._watches:
                self._narrow_models.clear()
                self._enough_for = (-1, 0)

    @property
    def watched(self) -> int:
        """How many requests are watched."""
        return len(self._watches)

    def check_integrity(self) -> None:
        """Raise AssertionError if the tree contradicts itself, or the index of watches differs from the watches."""
        self.tree.check_integrity()
        self._index_new_watches()
        for worker, index in ((None, self._index_of_all), *self._indexes.items()):
            index.check(
                [each for watched in self._watches.values() if watched.worker == worker for each in watched.prompts]
            )


def _sum(finds: Sequence[Mapping[WorkerId, int]]) -> Mapping[WorkerId, int]:
    """Return what workers hold of several prompts together."""
    chunks: Counter[WorkerId] = Counter()
    for found in finds:
        chunks.update(found)
    return chunks


def _asks_alike(known: Request, request: Request) -> bool:
    """Return whether two forms of one request have the same prompts. They may differ in where it may go."""
    return known is request or (known.prompts is request.prompts and known.blocks is request.blocks)
