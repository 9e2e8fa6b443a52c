"""What each worker's prefix cache must hold: the engine's own bookkeeping, replayed from outside.

Theory of operation. A dispatched request has its prompt in the cache, pinned until the request ends, and takes room for
its answer as that grows. Both evict at once what was released longest ago. When the request ends, prompt and answer are
released, the end first. So the tree's list of a worker mirrors the engine's free list, and its length is bounded by the
capacity that the engine reports, less what running requests hold beside their prompts. What the engine reports later
corrects the mirror:

- The `cached_tokens` of an answer are compared with the prediction made at dispatch. If less was cached, everything
  that continues from the missing part is gone. If no hit of late was that old, everything released before the missing
  part is gone as well, since caches evict in that order. If a prediction fails on a recent prefix, that text was never
  cached in that form.
- A counter of evicted tokens is compared with the evictions replayed here; an age at which blocks are evicted ends
  everything older; a counter that fell or restarted, and a sleeping engine, mean an empty cache.

Chunks are converted to tokens by the model's learned tokens per byte. An answer that cannot be matched later (its
request failed, or the engine would be sent a different text) still fills the cache: it is kept under hashes that no
prompt has.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import inf
from typing import Final

from router.core.cache.cache_model import CacheState, PinnedRun
from router.core.cache.engine_rules import (
    MatchWorth,
    Tracking,
    computes_anew,
    resent_tokens,
    rules_of,
    whole_blocks,
)
from router.core.cache.prefix_node import Node
from router.core.cache.prefix_tree import PrefixTree
from router.core.model.events import CacheReport
from router.core.model.prompt_key import HASH_BYTES, PromptKey
from router.core.model.request import Request, Usage, Worker, WorkerId
from router.core.predict.token_estimates import Estimates


class CacheMirror:
    """Mirrors the caches of all workers in the prefix tree."""

    def __init__(self, tree: PrefixTree, estimates: Estimates, capacity: int, tracking: Tracking) -> None:
        """`capacity`: assumed for a worker that does not report its own, in tokens."""
        self._tree = tree
        self._tracking = tracking
        self._estimates = estimates
        self._caches: defaultdict[WorkerId, CacheState] = defaultdict(lambda: CacheState(capacity))
        self.caches: Final[Mapping[WorkerId, CacheState]] = self._caches
        """Every worker of which anything is known; looking up a worker with `cache` adds it."""
        self._unmatchable_hashes = count(1 << 63)
        self.uncached: set[WorkerId] = set()
        """Workers that keep no prefix cache; a match there is worth nothing."""
        self._worth: dict[WorkerId, MatchWorth] = {}
        self._workers_of_worth: Counter[MatchWorth] = Counter()
        self.changes = 0
        """Rises with whatever may change what a match in the tree is worth."""

    def cache(self, worker: WorkerId) -> CacheState:
        """Return the state of one worker's cache."""
        return self._caches[worker]

    def update_worker(self, worker: Worker) -> None:
        """Apply the facts of a worker that joined or changed."""
        self.changes += 1
        state = self._caches[worker.id]
        state.engine, state.rules = worker.engine, rules_of(worker.engine)
        self._set_caching(worker.id, caches=worker.caches)
        state.batch_tokens = worker.batch_tokens
        if state.report is None or state.report.block_tokens is None:
            state.block_tokens = state.rules.block_tokens
        if worker.kv_tokens is not None:
            state.capacity = worker.kv_tokens
        self._note_worth(worker.id)

    def reads_cache(self, request: Request, worker: WorkerId) -> bool:
        """Return whether a worker would use what its prefix cache holds of a request's prompts."""
        if worker in self.uncached:
            return False
        if not request.computed_anew_by:
            return True
        state = self._caches.get(worker)
        return not computes_anew("" if state is None else state.engine, request.computed_anew_by)

    def _set_caching(self, worker: WorkerId, *, caches: bool) -> None:
        """Set whether a worker keeps a prefix cache at all."""
        if caches:
            self.uncached.discard(worker)
        else:
            self.uncached.add(worker)

    def held_tokens(self, worker: WorkerId) -> float:
        """Return how many tokens a worker is believed to have cached."""
        return 0.0 if worker in self.uncached else self._tree.held_chunks(worker) * self.chunk_tokens(worker)

    def chunk_tokens(self, worker: WorkerId) -> float:
        """Return how much of a worker's cache one chunk takes, in tokens."""
        state = self._caches[worker]
        return state.occupancy.chunk_tokens(self._estimates.tokens_per_chunk(state.model))

    def whole_block_tokens(self, tokens: int, worker: WorkerId) -> int:
        """Return how many of these tokens the engine would find: those of full blocks."""
        return whole_blocks(tokens, self._caches[worker].block_tokens)

    def resent_tokens(self, request: Request, run: PinnedRun, prompt_tokens: int, output_tokens: int) -> int:
        """Return the input tokens that were computed beyond those of the prompts, as only a search for beams does.

        `prompt_tokens`: of all prompts; `output_tokens`: of all beams.
        """
        state = run.cache
        if not (request.beam_search and state.rules.searches_beams):
            return 0
        prompt, length = prompt_tokens // len(request.prompts), output_tokens // request.answers
        block = prompt + length if run.worker in self.uncached else state.block_tokens
        return resent_tokens(prompt, request.answers, length, max(1, block))

    @property
    def common_worth(self) -> MatchWorth | None:
        """What a match is worth at every worker; None if the workers differ."""
        if len(self._workers_of_worth) != 1 or len(self._worth) != len(self._caches):
            return None
        return next(iter(self._workers_of_worth))

    def worth(self, worker: WorkerId) -> MatchWorth:
        """Return what a match is worth at a worker."""
        state = self._caches[worker]
        return MatchWorth(state.block_tokens, state.calibration.discount if self._tracking.corrects else 1.0)

    def _note_worth(self, worker: WorkerId) -> None:
        worth, known = self.worth(worker), self._worth.get(worker)
        if worth != known:
            self._drop_worth(worker)
            self._worth[worker] = worth
            self._workers_of_worth[worth] += 1

    def _drop_worth(self, worker: WorkerId) -> None:
        if (known := self._worth.pop(worker, None)) is not None:
            self._workers_of_worth[known] -= 1
            if not self._workers_of_worth[known]:
                del self._workers_of_worth[known]

    def dispatch(
        self,
        request: Request,
        worker: WorkerId,
        now: float,
        matched: int,
        prompt_tokens: int,
        starts_at: Callable[[float], float],
    ) -> PinnedRun:
        """Pin the prompts of a request sent to a worker that holds `matched` of its `prompt_tokens`.

        Returns the attempt's record, with the tokens that the worker will find. `starts_at`: returns when the worker
        is expected to start a prefill that is sent now, in seconds. If the worker does not read its cache for this
        request, `matched` is 0, but the prompt is in the cache from then on for later requests. (vLLM keeps what it
        computed again beside what it had, until either is evicted; here it is held once.)
        """
        state = self._caches[worker]
        state.model = request.model
        reads, excludes = self.reads_cache(request, worker), self._excludes_prefilling(request, state)
        holding = self._tree.holdings.get(worker) or self._tree.holding(worker)
        replays = self._tracking.replays
        chunk_tokens = self._estimates.tokens_per_chunk(request.model) if replays else 0.0
        run = PinnedRun(request, worker, state, holding, now, matched, prompt_tokens, reads=reads)
        if replays:
            run.own_tokens = run.tokens_beside(state.block_tokens, chunk_tokens)
            state.own_tokens += run.own_tokens
        if excludes:
            self._join_batch(run, now, starts_at(now))
        if reads:
            state.predicted_tokens += run.predicted_tokens
            state.prompt_tokens += prompt_tokens
        state.runs[run] = None
        whole = replays and state.rules.whole_nodes
        before = holding.chunks
        for prompt in run.prompts:
            run.paths.append(self._tree.touches(prompt.hashes, worker))
            epoch = holding.epoch  # read before the insertion, which may void all pins, this one among them
            run.pins.append((self._tree.insert(prompt.hashes, worker, now, pin=replays, seal=whole), epoch))
        run.new_chunks = holding.chunks - before
        if holding.chunks:
            self._evict_to_capacity(worker, state, holding.chunks)
        return run

    def findable(self, request: Request, worker: WorkerId, matched: int) -> int:
        """Return how many of the `matched` tokens held by a worker a request would find there if it were sent now."""
        state = self._caches.get(worker)
        if not matched or state is None or not self._excludes_prefilling(request, state) or not state.batch:
            return matched
        (prompt,) = request.prompts
        found = state.batch.would_find(prompt.hashes)
        if found is None:
            return matched
        return min(matched, self.whole_block_tokens(self._estimates.measure(request.model, prompt).held(found), worker))

    def _excludes_prefilling(self, request: Request, state: CacheState) -> bool:
        """Return whether prefixes that are still being prefilled do not count as cached."""
        return state.rules.found_when_computed and self._tracking.replays and len(request.prompts) == 1

    def on_first_token(self, run: PinnedRun, now: float) -> None:
        """Note that a request's prompt is computed."""
        if run.cache.rules.found_when_computed:
            run.cache.batch.on_first_token(run.prefilling, now)

    def set_output(self, run: PinnedRun, output: int) -> None:
        """Set how many output tokens a request has by now; what it takes of the cache grows with them."""
        if output > run.output:
            run.output = output
            if self._update_own_tokens(run, run.cache):
                self._evict_to_capacity(run.worker, run.cache, self._tree.held_chunks(run.worker))

    def end(
        self, run: PinnedRun, usage: Usage | None, answers: Sequence[PromptKey], now: float, *, computed: bool
    ) -> None:
        """Release what a request pinned and add its answers. `computed`: whether the worker computed at least a part of
        it.
        """
        state = run.cache
        del state.runs[run]
        if run.prefilling is not None:
            state.batch.remove(run.prefilling)
        state.own_tokens -= run.own_tokens
        cache_kept = self._tree.holdings.get(run.worker) is run.holding
        if usage is not None and run.reads:
            discount = state.calibration.discount
            self._compare_with_prediction(run, state, usage, cache_kept=cache_kept)
            if state.calibration.discount != discount:
                self._note_worth(run.worker)
        for place, prompt in enumerate(run.prompts if cache_kept else ()):
            if self._tracking.replays:
                end, epoch = run.pins[place]
                self._tree.unpin(end, run.worker, now, epoch)
            if not computed:
                path = run.paths[place]
                held = path[-1][0] if path else 0
                self._tree.prune(prompt.hashes, run.worker, held, inf)
                _pass_on_chunks(state, prompt.hashes, held)
        if computed and cache_kept:
            before = run.holding.chunks
            for answer in answers:
                self._tree.insert(answer.hashes, run.worker, now)
            if not answers and run.prompts:
                self._insert_unmatchable(run, run.output if usage is None else usage.output_tokens, now)
            if usage is not None and usage.cached_tokens is not None and run.reads and self._tracking.corrects:
                cached = (usage.input_tokens + usage.output_tokens - 1) // state.block_tokens * state.block_tokens
                state.occupancy.learn(cached - usage.cached_tokens, run.new_chunks + run.holding.chunks - before)
        holding = run.holding if cache_kept else self._tree.holding(run.worker)
        if holding.chunks:
            self._evict_to_capacity(run.worker, state, holding.chunks)

    def apply_report(self, worker: WorkerId, report: CacheReport, now: float) -> bool:
        """Apply what the engine's metrics say about its cache. Returns whether it has lost all that it held."""
        self.changes += 1
        state = self._caches[worker]
        before, state.report = state.report, report
        if report.block_tokens:
            state.block_tokens = report.block_tokens
        if report.caches is not None:
            self._set_caching(worker, caches=report.caches)
        emptied = report.asleep or (before is not None and report.began_anew(before))
        if emptied:
            state.evictions["restart"] += round(self.held_tokens(worker))
            self.drop(worker)
        elif before is not None and self._tracking.corrects:
            self._apply_counters(worker, state, before, now)
        state.predicted_tokens = state.prompt_tokens = 0
        self._note_worth(worker)
        return emptied

    def set_capacity(self, worker: WorkerId, capacity: int) -> None:
        """Set how much a worker's cache can hold, as its engine reports it, in tokens."""
        state = self._caches[worker]
        if capacity != state.capacity:
            state.capacity = capacity
            self._evict_to_capacity(worker, state, self._tree.held_chunks(worker))

    def evict(self, worker: WorkerId, tokens: int, source: str = "told") -> None:
        """Evict this many tokens of a worker, those released longest ago first."""
        chunk = self.chunk_tokens(worker)
        evicted = self._tree.evict(worker, round(tokens / chunk), whole=self._caches[worker].rules.whole_nodes)
        self._caches[worker].evictions[source] += round(evicted * chunk)

    def drop(self, worker: WorkerId) -> None:
        """Empty a worker's cache."""
        self.changes += 1
        self._tree.drop(worker)
        if worker in self._caches:
            self._caches[worker].clear()
            self._note_worth(worker)

    def forget_worker(self, worker: WorkerId) -> None:
        """Forget a worker that has left and at which nothing runs any more."""
        self._tree.drop(worker)
        self._caches.pop(worker, None)
        self._drop_worth(worker)
        self.uncached.discard(worker)

    def _join_batch(self, run: PinnedRun, now: float, starts_at: float) -> None:
        """Reduce the prediction to what of the match will be computed before the worker starts with this request."""
        state, estimates = run.cache, self._estimates
        (prompt,) = run.prompts
        held = self._tree.match(prompt.hashes).get(run.worker, 0)
        state.batch.batch_chunks = int((state.batch_tokens or 0) / estimates.tokens_per_chunk(run.model))
        run.prefilling, found = state.batch.add(prompt.hashes, held, now, starts_at)
        if found != held:
            computed = self.whole_block_tokens(estimates.measure(run.model, prompt).held(found), run.worker)
            run.predicted_tokens = min(run.predicted_tokens, computed)

    def _update_own_tokens(self, run: PinnedRun, state: CacheState) -> bool:
        """Update what a request holds beside what the tree accounts for. Returns whether that is more than before."""
        if not self._tracking.replays:
            return False
        own = run.tokens_beside(state.block_tokens, self._estimates.tokens_per_chunk(run.model))
        more = own > run.own_tokens
        state.own_tokens += own - run.own_tokens
        run.own_tokens = own
        return more

    def _evict_to_capacity(self, worker: WorkerId, state: CacheState, held: int) -> None:
        """Evict what exceeds the capacity of a worker that has `held` chunks in its cache."""
        if not self._tracking.evicts or not held:
            return
        chunk = self.chunk_tokens(worker)
        room = (state.capacity - state.own_tokens) / chunk
        if held > room:
            whole = self._tracking.replays and state.rules.whole_nodes
            evicted = self._tree.evict(worker, held - max(0, int(room)), whole=whole) * chunk
            state.evictions["replayed"] += round(evicted)
            state.evicted_ahead += evicted

    def _insert_unmatchable(self, run: PinnedRun, output: int, now: float) -> None:
        """Insert an answer of this many tokens that cannot be matched later."""
        chunks = round(output / self._estimates.tokens_per_chunk(run.model))
        hashes = b"".join([next(self._unmatchable_hashes).to_bytes(HASH_BYTES, "big") for _ in range(chunks)])
        if hashes:
            self._tree.insert(run.prompts[0].hashes + hashes, run.worker, now)

    def _compare_with_prediction(self, run: PinnedRun, state: CacheState, usage: Usage, *, cache_kept: bool) -> None:
        """Compare what the engine found cached with what was predicted."""
        if usage.cached_tokens is None:
            state.calibration.record_unreported()
            return
        actual = min(usage.cached_tokens, usage.input_tokens)
        state.calibration.record(run.predicted_tokens, actual, usage.input_tokens)
        if cache_kept and self._tracking.corrects and len(run.prompts) == 1:
            if run.paths[0]:
                self._estimates.on_cache_hit(run.model, run.prompts[0], run.paths[0][-1][0], actual)
            missing, block = run.predicted_tokens - actual, state.block_tokens
            if missing > block and missing > block + (chunk := self._estimates.tokens_per_chunk(run.model)):
                self._remove_missing(run, state, int(actual / chunk) + 1)
            elif run.paths[0] and (released := run.paths[0][-1][1]) is not None:
                state.hit_ages.append(run.dispatched_at - released)

    def _remove_missing(self, run: PinnedRun, state: CacheState, found: int) -> None:
        """Remove what must be gone as well if only the first `found` chunks of a prompt were cached."""
        missing = next((released for end, released in run.paths[0] if end > found), None)
        if missing is None:  # the missing chunks were pinned, so they were still being computed
            return
        evicted = self._tree.prune(run.prompts[0].hashes, run.worker, found, run.dispatched_at)
        if run.dispatched_at - missing > max(state.hit_ages, default=0.0):
            evicted += self._tree.evict_older(run.worker, missing)
        state.evictions["corrected"] += round(evicted * self.chunk_tokens(run.worker))

    def _apply_counters(self, worker: WorkerId, state: CacheState, before: CacheReport, now: float) -> None:
        """Apply the counters that rose since the report before."""
        report = state.report
        assert report is not None, "called after a report"
        evicted = _increase(before, report, lambda each: each.evicted_tokens)
        if evicted is not None:
            state.evicted_ahead -= evicted
            if state.evicted_ahead < 0:
                held = self.held_tokens(worker)
                self.evict(worker, round(-state.evicted_ahead), "counted")
                state.evicted_ahead += held - self.held_tokens(worker)
        seconds = _increase(before, report, lambda each: each.idle_seconds)
        blocks = _increase(before, report, lambda each: each.idle_blocks)
        if seconds is not None and blocks:
            # vLLM also counts blocks that were never cached. These are evicted young and lower the mean age, whereas
            # the ages of hits prove that prefixes of that age were still cached.
            aged = self._tree.evict_older(worker, now - max(seconds / blocks, *state.hit_ages, 0.0))
            state.evictions["aged"] += round(aged * self.chunk_tokens(worker))
        hits = _increase(before, report, lambda each: each.hit_tokens)
        if state.calibration.silent and hits is not None:
            state.calibration.record_totals(state.predicted_tokens, round(hits), state.prompt_tokens)


def _increase(before: CacheReport, after: CacheReport, of: Callable[[CacheReport], float | None]) -> float | None:
    """Return how far a counter rose; None if either report lacks it."""
    old, new = of(before), of(after)
    return None if old is None or new is None else new - old


def _pass_on_chunks(state: CacheState, hashes: bytes, held: int) -> None:
    """Attribute the chunks that a refused request added, those beyond its first `held`, to a request that found them
    there.

    That is the first request that shares the most of them; it may be refused as well.
    """
    at = held * HASH_BYTES
    own_chunks = Node(hashes[at:])
    new_owner: list[tuple[int, float | None]] = []
    most = 0
    for run in state.runs:
        for path, prompt in zip(run.paths, run.prompts, strict=True):
            if path and path[-1][0] > held and prompt.hashes.startswith(own_chunks.first, at):
                shared = own_chunks.shared_bytes(prompt.hashes, at)
                if shared > most:
                    new_owner, most = path, shared
    while new_owner and new_owner[-1][0] > held:
        _, released = new_owner.pop()
        if held > (new_owner[-1][0] if new_owner else 0):
            new_owner.append((held, released))
